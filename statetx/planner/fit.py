"""`Fit`: the policy ``"fit:2GiB"``, which plans each function that it is used on; `budget`, one for a block."""

from __future__ import annotations

from collections.abc import Sequence

from .. import _jax
from .._blocks import Block
from .._equations.structure import Body
from .._errors import PolicyError
from .._jax import Array, ArrayFunction, Arrays
from .._lift.context import TraceContext
from .._lift.options import check_flags, with_checked_options
from .._remat.override import rewritten_by, unobserved
from .._remat.rewriter import Rewriter
from .._text import format_bytes
from .._tree import is_float
from ._budget import TEMPORARIES, ByteBudget, read_amount, read_time_limit
from ._plan import Plan
from ._program.devices import of_device
from ._program.flat import closed_over_by_rules, flatten
from ._search.capture import Captured
from ._search.recorders import Recorded
from ._search.search import SearchOptions
from .planner import DEFAULT_TIME_LIMIT, ProgramPlanner


class Fit(Rewriter):
    """``policy="fit:2GiB"``: plan each function it is used on, for the gradient that is taken of it.

    Each function has the budget to itself. Functions of one program share one with ``policy="fit"`` and
    `statetx.budget`.

    Args:
        budget: temporary bytes of that function's gradient, compiled on its own. Arguments and outputs of the function
            do not count: in the program around it they are no arguments and outputs. None: the one of the
            `statetx.budget` around the gradient.
        offload, time_limit: as in `plan`.
    """

    def __init__(
        self,
        budget: int | float | str | None = None,
        *,
        offload: bool = False,
        time_limit: float | None = DEFAULT_TIME_LIMIT,
    ):
        self.budget = None if budget is None else ByteBudget.read(budget)
        check_flags("fit", offload=offload)
        self._options = SearchOptions(offload=offload, time_limit=read_time_limit(time_limit))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Fit) and (self.budget, self._options) == (other.budget, other._options)

    def __hash__(self) -> int:
        return hash((self.budget, self._options))

    def __repr__(self) -> str:
        if self.budget is None:
            return "fit"
        amount = self.budget.amount
        return f"fit:{amount if isinstance(amount, float) else format_bytes(amount).replace(' ', '')}"

    @of_device
    def rewrite(self, body: Body, name: str, num_out: int, /) -> ArrayFunction:
        if self.budget is None:
            raise PolicyError(
                f"remat({name}, policy='fit') has no budget: no statetx.budget(...) is around the gradient.\n"
                f"Fix: write `with statetx.budget('2GiB'):` around it, or give the function a budget of its own, "
                f"policy='fit:2GiB'."
            )
        # Memory depends on the vmaps and shardings around the call, so each of them has a plan of its own.
        planned: dict[tuple[TraceContext, tuple[int, ...]], ArrayFunction] = {}

        def run(operands: Sequence[Array], *args: Array) -> Arrays:
            context = TraceContext.of([*operands, *args])
            fixed = _without_gradient(operands, args)
            if (context, fixed) not in planned:
                with unobserved():  # the search takes gradients itself
                    plan = self._plan(body, name, num_out, context, fixed)
                planned[context, fixed] = plan.rewrite(body, name, num_out)
            return planned[context, fixed](operands, *args)

        return run

    def _plan(self, body: Body, name: str, num_out: int, context: TraceContext, fixed: Sequence[int]) -> Plan:
        # Of inputs that may have a gradient all are differentiated. A custom_vjp refuses to be differentiated by what
        # it closes over.
        assert self.budget is not None
        without = {*fixed, *closed_over_by_rules(flatten(body.jaxpr))}
        floats = [i for i, v in enumerate(body.jaxpr.invars) if is_float(v.aval) and i not in without]
        recorded = Recorded(body.jaxpr, num_out, floats, floats, context)
        program = Captured((recorded,), name=name)
        return ProgramPlanner([program], TEMPORARIES, self._options, progress=False).plan(self.budget.amount)


def _without_gradient(operands: Sequence[Array], args: Sequence[Array]) -> tuple[int, ...]:
    """The inputs, by number, that the derivative around the call leaves out.

    A gradient that is not asked for would be an output of the measured program, whose memory XLA also uses for
    temporary values. In a `jax.jit` inside of the derivative nothing shows which inputs it takes: then only arrays that
    the function closes over are left out.
    """
    inputs = [*operands, *args]
    if any(map(_jax.is_differentiated, inputs)):
        return tuple(i for i, x in enumerate(inputs) if not _jax.is_differentiated_or_batched(x))
    return tuple(i for i, x in enumerate(operands) if not isinstance(x, _jax.Tracer))


@with_checked_options(
    {"of": "it counts temporary bytes; use statetx.plan for a budget of a whole step"},
    fix="with statetx.budget(size): ..., around the code that takes gradients; or @statetx.budget(size) above a "
    "function.",
)
def budget(
    size: int | float | str,
    *,
    offload: bool = False,
    time_limit: float | None = DEFAULT_TIME_LIMIT,
) -> Block[None]:
    """Give everything that is differentiated in a block one budget of memory. Also a decorator of a function.

    A block belongs to its thread, as JAX's do: a coroutine does not wait inside of one.

    Each function that `statetx.grad`, ``jax.grad`` or ``jax.vjp`` differentiates in the block is planned as a whole,
    when it is traced: rematerialized functions in it (``policy="fit"``, or any other policy) are the regions that the
    plan chooses from, together with finer ones. So they share the budget, by the best choice for the whole.

    Several gradients in the block, taken one after the other, have the whole budget each, because their memory is not
    in use at the same time. To plan them together with the rest of a training step, use `plan`.

    Args:
        size: temporary bytes of each gradient, compiled on its own: a number, ``"2GiB"``, or a fraction of the memory
            without rematerialization. ``"device"`` is all of the device's memory: what arguments and results take is
            not taken off, so use `plan` for a step that is to fit into a device.
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
    read_amount(size)  # a `Fit` without a size takes this block's
    rewriter = Fit(size, offload=offload, time_limit=time_limit)
    return Block(f"statetx.budget({size!r})", "so that nothing is planned", lambda: rewritten_by(rewriter))
