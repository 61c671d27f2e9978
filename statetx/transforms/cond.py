"""`cond` and `switch`: branches that read and write states."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax.numpy as jnp
import numpy as np

from .. import _jax
from .._equations.structure import Body, table
from .._errors import CarryTypeError
from .._frames import Effect
from .._lift.carry import differs, drift_error, leaf_names, structure_strs
from .._lift.stage import Input, name_of
from .._lift.staged import Staged, is_loop_leaf, publish, union
from .._loops import bind
from .._objects.paths import Paths
from .._text import type_str
from .._tree import Partition, as_array, is_array_or_number, partition
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
    both: the branch that does not write one hands it on. A state that holds a Python number, or another value of a weak
    type, is promoted where one branch writes it and the other does not: ``State(0)`` to which one branch adds a float is a
    float afterwards.

    Args:
        pred: a scalar bool (or number), concrete or traced.
        true_fun: called as ``true_fun(*operands)`` where `pred` is true.
        false_fun: called where it is not; must return the same types.
        *operands: pytrees of arrays and numbers; other objects pass untouched.
        operand: a lone operand, as in ``jax.lax.cond``.

    Returns:
        The output of the branch taken.

    Raises:
        CarryTypeError: the branches return different types, or leave a state with different types.
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
    if not is_loop_leaf(pred) or jnp.ndim(pred) != 0 or jnp.issubdtype(jnp.result_type(pred), jnp.complexfloating):
        raise TypeError(
            f"cond: the predicate must be a scalar, true or false or a real number, got {type_str(as_array(pred))}."
        )
    return _branch("cond", jnp.asarray(pred).astype(bool), [false_fun, true_fun], operands)


def switch(index: Any, branches: Sequence[Callable[..., R]], *operands: Any) -> R:
    """Run one of several functions, which may read and write states; see `cond`.

    Args:
        index: a scalar integer; what lies outside the range is clamped to it, as in ``jax.lax.switch``.
        branches: the functions; at least one.
        *operands: pytrees of arrays and numbers; other objects pass untouched.

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
    if not is_loop_leaf(index) or jnp.ndim(index) != 0 or not jnp.issubdtype(jnp.result_type(index), jnp.integer):
        raise TypeError(f"switch: the index must be a scalar integer, got {type_str(as_array(index))}.")
    return _branch("switch", jnp.asarray(index), branches, operands)


def _branch(name: str, index: Any, branches: Sequence[Callable], operands: tuple) -> PyTree:
    for f in branches:
        if not callable(f):
            raise TypeError(f"{name}: every branch must be callable, got {type(f).__name__}.")
    if _jax.is_jit_disabled() and not isinstance(index, _jax.Tracer):
        return branches[min(max(int(index), 0), len(branches) - 1)](*operands)
    arrays, part = partition(operands, is_array_or_number)
    arrays = [as_array(x) for x in arrays]
    avals = [_jax.abstract(x) for x in arrays]

    def stage(f: Callable) -> Staged:
        call = lambda *xs: (f(*part.combine(xs)),)  # noqa: E731
        return Staged(name, f, call, avals, kind=f"statetx.{name}", arguments=lambda xs: (part.combine(xs), {}))

    staged = [stage(f) for f in branches]
    return _Branches(name, staged).run(index, arrays)


class _Branches:
    """Staged branches, given the same inputs and outputs.

    Order of the inputs: operands of every branch, the states that any of them touches, arguments; of the outputs: the
    output, and the states that any of them writes.

    What the branches return must agree in dtypes, as in ``jax.lax.cond``, which also says what becomes of weak types. What
    they leave in a state must agree as well, a branch that does not write it being one that leaves it unchanged; but a
    weak type, that of a Python number, is promoted to what another branch leaves, as a loop promotes it.
    """

    def __init__(self, name: str, staged: list[Staged]):
        self._name = name
        self._staged = staged
        self._states: list[Input] = union([s.inputs for s in staged])
        self._effects: list[Effect] = union([{id(e.state): e for e in s.effects} for s in staged])
        self._written = [next(i for i in self._states if i.state is e.state) for e in self._effects]
        self._check_outputs()
        self._left = [[_Left.make(s, read) for s in staged] for read in self._written]
        self._dtypes: list[Any] = [None] * staged[0].num_out
        for left in self._left:
            self._dtypes += _agree(name, left)
        self._bodies = [self._arrange(n) for n in range(len(staged))]

    def _check_outputs(self) -> None:
        first = self._staged[0]
        for s in self._staged[1:]:
            if s.outs[0].treedef != first.outs[0].treedef:
                raise CarryTypeError(
                    f"{self._name}: all branches must return the same structure,\n  {name_of(first.fun)}: "
                    f"{first.outs[0].treedef}\n  {name_of(s.fun)}: {s.outs[0].treedef}"
                )
            for a, b in zip(first.out_avals, s.out_avals, strict=True):
                if differs(a, b):
                    raise CarryTypeError(
                        f"{self._name}: all branches must return the same types; {name_of(first.fun)} returns "
                        f"{type_str(a)} where {name_of(s.fun)} returns {type_str(b)}."
                    )

    def _arrange(self, n: int) -> Body:
        s = self._staged[n]
        state_vars = {id(i.state): s.state_vars(i) for i in self._states}
        own = iter(s.operand_vars)
        operand_vars = [
            next(own) if other is s else _jax.Var(v.aval) for other in self._staged for v in other.operand_vars
        ]
        invars = [*operand_vars, *(v for vs in state_vars.values() for v in vs), *s.arg_vars]
        left = zip(self._written, self._left, strict=True)
        written = [v for i, branches in left for v in branches[n].atoms(state_vars[id(i.state)])]
        return s.arrange(invars, [*s.out_vars, *written])

    def run(self, index: Any, arrays: list) -> PyTree:
        dtypes = self._dtypes
        kept = table.get(self._bodies, (self._name, tuple(dtypes)), lambda *bodies: bind.branch(bodies, dtypes))
        constants = [x for s in self._staged for x in s.operands]
        outs = kept(index, *constants, *(x for i in self._states for x in i.values), *arrays)
        first = self._staged[0]
        publish(self._effects, [branches[0].part for branches in self._left], outs[first.num_out :])
        return first.outs[0].combine(outs[: first.num_out])


# -- what branches leave in a state ----------------------------------------------------------------------------


class _Left(NamedTuple):
    """What a branch leaves in a state that some branch writes.

    Attributes:
        staged: the branch.
        effect: its write, None if it leaves the state unchanged.
        part: `Partition` of what it leaves; `avals` the types of the leaves.
        values: the leaves, if they are those that the state has on entry; else their types.
    """

    staged: Staged
    effect: Effect | None
    part: Partition
    avals: list[Any]
    values: list[Any]

    @classmethod
    def make(cls, staged: Staged, read: Input) -> _Left:
        key = id(read.state)
        if key in staged.written:
            effect = next(e for e in staged.effects if e.state is read.state)
            avals = staged.written_avals[key]
            return cls(staged, effect, staged.written[key], avals, avals)
        values, part = partition(read.part.combine(read.values), is_loop_leaf)
        return cls(staged, None, part, [_jax.abstract(x) for x in values], values)

    def atoms(self, state_vars: Sequence[Any]) -> list[Any]:
        """The leaves as outputs of the branch's body; `state_vars` hold the state on entry."""
        if self.effect is not None:
            return self.staged.written_vars[id(self.effect.state)]
        inputs = iter(state_vars)  # of all leaves but Python bools, which Python may branch on
        pairs = zip(self.values, self.avals, strict=True)
        return [_jax.Literal(np.bool_(x), aval) if isinstance(x, bool) else next(inputs) for x, aval in pairs]


def _agree(name: str, left: list[_Left]) -> list[Any]:
    """For each leaf that the branches leave in a state, the dtype to which it is promoted; None if their dtypes are equal.

    Raises:
        CarryTypeError: they leave it with different types.
    """
    first = left[0].part
    for other in left[1:]:
        part = other.part
        if (part.treedef, part.mask, part.static) != (first.treedef, first.mask, first.static):
            raise _disagreement(name, [left[0], other])
    dtypes = []
    for n in range(first.num_dynamic):
        dtype = _join(left, n)
        if dtype is None:
            raise _disagreement(name, next(p for p in itertools.combinations(left, 2) if _join(p, n) is None), n)
        dtypes.append(dtype if any(x.avals[n].dtype != dtype for x in left) else None)
    return dtypes


def _join(left: Sequence[_Left], leaf: int) -> Any:
    """The dtype to which what branches leave in one place promotes; None if there is none, or the shapes differ."""
    avals = [x.avals[leaf] for x in left]
    if all(a.shape == avals[0].shape and a.dtype == avals[0].dtype for a in avals):
        return avals[0].dtype
    try:
        dtype = jnp.result_type(*(x.values[leaf] for x in left))
    except ValueError:  # keys, or an integer where promotion is strict
        return None
    agrees = all(a.shape == avals[0].shape and (a.weak_type or a.dtype == dtype) for a in avals)
    return dtype if agrees else None


def _disagreement(name: str, pair: Sequence[_Left], n: int | None = None) -> CarryTypeError:
    """The error for two branches, of which at least one writes: in leaf `n`, or in the structure of the value."""
    a, b = sorted(pair, key=lambda left: left.effect is not None)
    leaf = "" if n is None else leaf_names(a.part)[n]
    types = (
        [type_str(x.avals[n]) for x in (a, b)] if n is not None else structure_strs([(x.part, x.avals) for x in (a, b)])
    )
    assert b.effect is not None
    paths = Paths(b.staged.fun)
    if a.effect is None:
        return drift_error(name, b.effect, paths, leaf, types, "branch")
    state, kind = b.effect.state, b.effect.kind
    return CarryTypeError(
        f"{name}: the branches leave {type(state).__name__} {paths(state)!r}{leaf}, made at {kind.site_of(state)}, with "
        f"different types: {name_of(a.staged.fun)} writes {types[0]} at {a.effect.site}, {name_of(b.staged.fun)} writes "
        f"{types[1]} at {b.effect.site}.\nFix: convert the value in one of them."
    )
