"""`budget`: one budget for all functions of a program that are planned when it is traced."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from .. import _states
from .._errors import PolicyWarning
from .._lift.options import with_checked_options
from .._lift.wrapper import refuse_value
from .._remat.gradients import rewritten_by
from ._budget import read_amount
from .fit import Fit
from .planner import DEFAULT_TIME_LIMIT

P = ParamSpec("P")
R = TypeVar("R")


@with_checked_options(
    {"of": "it counts temporary bytes; use statetx.plan for a budget of a whole step"},
    fix="with statetx.budget(size): ..., around the code that takes gradients; or @statetx.budget(size) above a function.",
)
def budget(
    size: int | float | str,
    *,
    offload: bool = False,
    time_limit: float | None = DEFAULT_TIME_LIMIT,
) -> SharedBudget:
    """Give everything that is differentiated in a block one budget of memory. Also a decorator of a function.

    Each function that `statetx.grad`, ``jax.grad`` or ``jax.vjp`` differentiates in the block is planned as a whole, when it is
    traced: rematerialized functions in it (``policy="fit"``, or any other policy) are the regions that the plan chooses from,
    together with finer ones. So they share the budget, and each gets what is best for the whole, whatever the others leave.

    Several gradients in the block, taken one after the other, have the whole budget each, because their memory is not in use at
    the same time. To plan them together with the rest of a training step, use `plan`.

    Args:
        size: temporary bytes of each gradient, compiled on its own: a number, ``"2GiB"``, or a fraction of the memory without a
            plan. ``"device"`` is all of the device's memory: what arguments and results take is not taken off, so use `plan` for a step
            that is to fit into a device.
        offload, time_limit: as in `plan`.

    Raises:
        PlanError: no plan keeps the budget; raised where the gradient is taken.

    Example:
        >>> import jax, jax.numpy as jnp, statetx
        >>> @statetx.remat(policy="fit")
        ... def encode(w, x):
        ...     return jnp.sin(jnp.tanh(x @ w))
        >>> @statetx.remat(policy="fit")
        ... def decode(w, x):
        ...     return jnp.tanh(jnp.sin(x @ w))
        >>> def loss(w, x):
        ...     return (decode(w, encode(w, x)) ** 2).mean()
        >>> with statetx.budget("300KiB"):
        ...     grads = jax.grad(loss)(jnp.ones((64, 64)) / 64, jnp.ones((256, 64)))
    """
    read_amount(size)  # a `Fit` without a size takes that of this block
    return SharedBudget(Fit(size, offload=offload, time_limit=time_limit))


class SharedBudget:
    """A block with a budget, or a decorator; made by `budget`. One that is neither warns when it is dropped."""

    def __init__(self, rewriter: Fit):
        self._rewriter, self._is_used = rewriter, False
        self._entered: list[Any] = []

    def __enter__(self) -> None:
        self._is_used = True
        self._entered.append(rewritten_by(self._rewriter))
        self._entered[-1].__enter__()

    def __exit__(self, *exc: Any) -> None:
        self._entered.pop().__exit__(*exc)

    def __call__(self, fun: Callable[P, R]) -> Callable[P, R]:
        self._is_used = True
        refuse_value("budget", fun)

        @functools.wraps(fun)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            with rewritten_by(self._rewriter):
                return fun(*args, **kwargs)

        return call

    def __del__(self) -> None:
        if not self._is_used:
            warnings.warn(
                "A statetx.budget was made and not entered, so that nothing is planned.\n"
                "Fix: with statetx.budget(size): ..., around the code that takes gradients; or @statetx.budget(size) above a function.",
                PolicyWarning,
                stacklevel=_states.user_stacklevel(),
            )
