"""`cond` and `switch`: branches that read and write states."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax.numpy as jnp

from .. import _compat, _control
from .._errors import CarryTypeError
from .._jaxpr import Body, table
from .._lift import Input, name_of
from .._paths import Paths
from .._registry import Effect
from .._staged import Staged, publish, union
from .._tree import as_array, partition, type_str
from .._typing import PyTree

_MISSING = object()


R = TypeVar("R")


def cond(
    pred: Any,
    true_fun: Callable[..., R],
    false_fun: Callable[..., R],
    *operands: Any,
    operand: Any = _MISSING,
) -> R:
    """Run one of two functions, which may read and write states.

    As ``jax.lax.cond``. The Python of each branch runs once. The states that either branch writes are threaded through
    both: the branch that does not write one hands it on.

    Args:
        pred: a scalar bool (or number), concrete or traced.
        true_fun: called as ``true_fun(*operands)`` where `pred` is true.
        false_fun: called where it is not; must return the same types.
        *operands: pytrees of arrays; other objects pass untouched.
        operand: a lone operand, as in ``jax.lax.cond``.

    Returns:
        The output of the branch taken.

    Raises:
        CarryTypeError: the branches return different types, or write a state with another type than it had.
        CreatedStateError: a branch created a state that outlives it.

    Source:
        ``jax.lax.cond``.

    Example:
        >>> import jax.numpy as jnp, statetx
        >>> n = statetx.State(jnp.zeros(()))
        >>> def count(x):
        ...     n.value += x
        ...     return 2 * x
        >>> float(statetx.cond(jnp.array(True), count, lambda x: x, 3.0)), float(n.value)
        (6.0, 3.0)
    """
    if operand is not _MISSING:
        if operands:
            raise TypeError("cond: give either operands by position or operand=, not both.")
        operands = (operand,)
    if jnp.ndim(pred) != 0:
        raise TypeError(f"cond: the predicate must be a scalar, got {type_str(as_array(pred))}.")
    return _branch("cond", jnp.asarray(pred).astype(bool), [false_fun, true_fun], operands)


def switch(index: Any, branches: Sequence[Callable[..., R]], *operands: Any) -> R:
    """Run one of several functions, which may read and write states; see `cond`.

    Args:
        index: a scalar integer; what lies outside the range is clamped to it, as in ``jax.lax.switch``.
        branches: the functions; at least one.
        *operands: pytrees of arrays; other objects pass untouched.

    Example:
        >>> import jax.numpy as jnp, statetx
        >>> n = statetx.State(jnp.zeros(()))
        >>> def add(k):
        ...     def branch():
        ...         n.value += k
        ...
        ...     return branch
        >>> statetx.switch(jnp.array(2), [add(1.0), add(10.0), add(100.0)])
        >>> float(n.value)
        100.0
    """
    branches = list(branches)
    if not branches:
        raise ValueError("switch: give at least one branch.")
    if jnp.ndim(index) != 0 or not jnp.issubdtype(jnp.result_type(index), jnp.integer):
        raise TypeError(f"switch: the index must be a scalar integer, got {type_str(as_array(index))}.")
    return _branch("switch", jnp.asarray(index), branches, operands)


def _branch(name: str, index: Any, branches: Sequence[Callable], operands: tuple) -> PyTree:
    for f in branches:
        if not callable(f):
            raise TypeError(f"{name}: every branch must be callable, got {type(f).__name__}.")
    if _compat.is_jit_disabled() and not isinstance(index, _compat.Tracer):
        return branches[min(max(int(index), 0), len(branches) - 1)](*operands)
    arrays, part = partition(operands)
    arrays = [as_array(x) for x in arrays]
    avals = [_compat.abstract(x) for x in arrays]
    staged = [
        Staged(name, f, lambda *xs, f=f: (f(*part.combine(xs)),), avals, kind=f"statetx.{name}") for f in branches
    ]
    return _Branches(name, staged).run(index, arrays)


class _Branches:
    """Staged branches, given the same inputs and outputs.

    Order of the inputs: operands of every branch, the states that any of them touches, arguments; of the outputs: the
    output, and the states that any of them writes.
    """

    def __init__(self, name: str, staged: list[Staged]):
        self._name = name
        self._staged = staged
        self._states: list[Input] = union([s.inputs for s in staged])
        written: list[Effect] = union([{id(e.state): e for e in s.effects} for s in staged])
        self._written = [(e, next(i for i in self._states if i.state is e.state)) for e in written]
        for s in staged:
            paths = Paths(s.fun)
            for effect in s.effects:
                s.check_written(effect, paths)
        self._check_outputs()
        self._bodies = [self._arrange(s) for s in staged]

    def _check_outputs(self) -> None:
        first = self._staged[0]
        for s in self._staged[1:]:
            if s.outs[0].treedef != first.outs[0].treedef:
                raise CarryTypeError(
                    f"{self._name}: all branches must return the same structure,\n  {name_of(first.fun)}: "
                    f"{first.outs[0].treedef}\n  {name_of(s.fun)}: {s.outs[0].treedef}"
                )
            for a, b in zip(first.out_avals, s.out_avals, strict=True):
                if (a.shape, a.dtype) != (b.shape, b.dtype):
                    raise CarryTypeError(
                        f"{self._name}: all branches must return the same types; {name_of(first.fun)} returns "
                        f"{type_str(a)} where {name_of(s.fun)} returns {type_str(b)}."
                    )

    def _arrange(self, s: Staged) -> Body:
        state_vars = {id(i.state): s.state_vars(i) for i in self._states}
        own = iter(s.operand_vars)
        operand_vars = [
            next(own) if other is s else _compat.Var(v.aval) for other in self._staged for v in other.operand_vars
        ]
        invars = [*operand_vars, *(v for vs in state_vars.values() for v in vs), *s.arg_vars]
        written = [v for e, _ in self._written for v in s.written_vars.get(id(e.state), state_vars[id(e.state)])]
        return s.arrange(invars, [*s.out_vars, *written])

    def run(self, index: Any, arrays: list) -> PyTree:
        out_avals = [_strongest(avals) for avals in zip(*(s.out_avals for s in self._staged), strict=True)]
        avals = [*out_avals, *(a for _, i in self._written for a in i.avals)]

        kept = table.get(self._bodies, (self._name, tuple(avals)), lambda *bodies: _control.branch(bodies, avals))
        constants = [x for s in self._staged for x in s.operands]
        outs = kept(index, *constants, *(x for i in self._states for x in i.values), *arrays)
        first = self._staged[0]
        effects = [e for e, _ in self._written]
        publish(effects, [i.part for _, i in self._written], outs[first.num_out :])
        return first.outs[0].combine(outs[: first.num_out])


def _strongest(avals: tuple) -> Any:
    return next((a for a in avals if not a.weak_type), avals[0])
