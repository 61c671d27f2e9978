"""Branches whose functions use states: `cond`, `switch`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax.numpy as jnp
import numpy as np

from .. import _jax, _states
from .._equations.structure import Body, table
from .._errors import CarryTypeError
from .._frames import Effect
from .._lift.carry import differs, drift_error, leaf_names, structure_strs
from .._lift.outcome import publish_leaves
from .._lift.stage import Input
from .._lift.staged import Staged, is_loop_leaf, union
from .._lift.wrapper import check_callable, name_of, place_of, short_name
from .._loops import bind, eager
from .._objects.paths import Paths
from .._text import tree_type_str, type_str
from .._tree import Partition, as_array, is_array_or_number, partition
from .._typing import PyTree

_MISSING = object()


R = TypeVar("R")


@_jax.api_boundary
def cond(
    pred: Any,
    true_fun: Callable[..., R],
    false_fun: Callable[..., R],
    *operands: Any,
    operand: Any = _MISSING,
) -> R:
    """Run one of two functions, which may read and write states.

    As ``jax.lax.cond``. The Python of each branch runs once. The states that either branch writes are threaded through
    both: the other branch forwards its value. A state that holds a Python number, or another value of a weak type, is
    promoted if one branch writes it and the other does not: ``State(0)`` is a float afterwards if one branch adds a
    float.

    Args:
        pred: a scalar bool (or number), concrete or traced.
        true_fun: called as ``true_fun(*operands)`` if `pred` is true.
        false_fun: called as ``false_fun(*operands)`` otherwise; must return the same types.
        *operands: pytrees of arrays and numbers; other objects pass untouched.
        operand: a single operand, as in ``jax.lax.cond``.

    Returns:
        The output of the branch taken.

    Raises:
        CarryTypeError: the branches return different types, or leave a state with different types.
        CreatedStateError: a branch created a state that outlives the branch.

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
    if not callable(true_fun) and callable(false_fun) and len(operands) == 2 and callable(operands[1]):
        # The older form, which JAX still takes: cond(pred, true_operand, true_fun, false_operand, false_fun).
        true_operand, of_true, (false_operand, of_false) = true_fun, false_fun, operands
        return cond(pred, lambda x, _: of_true(x), lambda _, x: of_false(x), true_operand, false_operand)
    if operand is not _MISSING:
        if operands:
            raise TypeError("cond: give either operands by position or operand=, not both.")
        operands = (operand,)
    _states.refuse_states("cond: the predicate", pred)
    if not is_loop_leaf(pred) or jnp.ndim(pred) != 0 or jnp.issubdtype(jnp.result_type(pred), jnp.complexfloating):
        raise TypeError(
            f"cond: the predicate must be a scalar, true or false or a real number, got {type_str(as_array(pred))}."
        )
    return _branch("cond", jnp.asarray(pred).astype(bool), [false_fun, true_fun], operands)


@_jax.api_boundary
def switch(index: Any, branches: Sequence[Callable[..., R]], *operands: Any) -> R:
    """Run one of several functions, which may read and write states; see `cond`.

    Args:
        index: a scalar integer; clamped to the range of `branches`, as in ``jax.lax.switch``.
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
    if callable(branches):
        first = short_name(name_of(branches))
        raise TypeError(
            f"switch: branches must be a sequence of functions, got the function {first}.\n"
            f"Fix: put the functions into a list: statetx.switch(index, [{first}, ...], *operands)."
        )
    branches = list(branches)
    if not branches:
        raise ValueError("switch: give at least one branch.")
    _states.refuse_states("switch: the index", index)
    if not is_loop_leaf(index) or jnp.ndim(index) != 0 or not jnp.issubdtype(jnp.result_type(index), jnp.integer):
        raise TypeError(f"switch: the index must be a scalar integer, got {type_str(as_array(index))}.")
    return _branch("switch", jnp.asarray(index), branches, operands)


def _branch(name: str, index: Any, branches: Sequence[Callable], operands: tuple) -> PyTree:
    for f in branches:
        fix = "a branch is a function of the operands, as in lambda: value; jnp.where chooses between values"
        check_callable(name, f, "a callable as each branch", fix)
    # As JAX does under `jax.disable_jit`: run the chosen branch as plain Python.
    if _jax.is_jit_disabled() and not isinstance(index, _jax.Tracer):
        return eager.branch(name, branches[min(max(int(index), 0), len(branches) - 1)], operands)
    arrays, part = partition(operands, is_array_or_number)
    arrays = [as_array(x) for x in arrays]
    avals = [_jax.abstract(x) for x in arrays]

    arguments = lambda xs: (part.combine(xs), {})
    return _Branches(name, [Staged(name, f, avals, arguments=arguments) for f in branches]).run(index, arrays)


class _Branches:
    """Staged branches with the same inputs and outputs.

    Inputs, in order: the operands of every branch, the states that any branch touches, the arguments. Outputs, in
    order: the branch's output, then the states that any branch writes.

    The branches must return the same shapes and dtypes; ``jax.lax.cond`` resolves weak types. The final values of a
    state must agree, too. A branch that does not write a state returns its initial value. A weak type, as of a Python
    number, is promoted to the other branch's dtype, as in a loop.
    """

    def __init__(self, name: str, staged: list[Staged]):
        self._name = name
        self._staged = staged
        self._states: list[Input] = union([branch.inputs for branch in staged])
        self._effects: list[Effect] = union([{id(e.state): e for e in branch.effects} for branch in staged])
        self._written = [next(i for i in self._states if i.state is e.state) for e in self._effects]
        self._check_outputs()
        self._final_values = [[_FinalValue.make(branch, read) for branch in staged] for read in self._written]
        self._dtypes: list[Any] = [None] * staged[0].num_out
        for finals in self._final_values:
            self._dtypes += _promoted_dtypes(name, finals)
        self._bodies = [self._arrange(n) for n in range(len(staged))]

    def _check_outputs(self) -> None:
        first = self._staged[0]
        for branch in self._staged[1:]:
            if branch.outs[0].treedef != first.outs[0].treedef:
                raise CarryTypeError(
                    f"{self._name}: all branches must return the same structure,\n  {place_of(first.fun)} returns "
                    f"{_type_of_output(first)}\n  {place_of(branch.fun)} returns {_type_of_output(branch)}"
                )
            for path, a, b in zip(leaf_names(first.outs[0]), first.out_avals, branch.out_avals, strict=True):
                if differs(a, b):
                    where = f" at {path}" if path else ""
                    raise CarryTypeError(
                        f"{self._name}: all branches must return the same types{where},\n"
                        f"  {place_of(first.fun)} returns "
                        f"{type_str(a)}\n  {place_of(branch.fun)} returns {type_str(b)}\n"
                        f"Fix: convert the value in one of them."
                    )

    def _arrange(self, index: int) -> Body:
        staged = self._staged[index]
        state_vars = {id(i.state): staged.state_vars(i) for i in self._states}
        # `lax.cond` gives every branch all inputs, so the operands of the other branches are unused variables here.
        own_vars = iter(staged.operand_vars)
        operand_vars = [
            next(own_vars) if branch is staged else _jax.Var(v.aval)
            for branch in self._staged
            for v in branch.operand_vars
        ]
        invars = [*operand_vars, *(v for vs in state_vars.values() for v in vs), *staged.arg_vars]
        state_finals = zip(self._written, self._final_values, strict=True)
        written = [v for i, branches in state_finals for v in branches[index].atoms(state_vars[id(i.state)])]
        return staged.arrange(invars, [*staged.out_vars, *written])

    def run(self, index: Any, arrays: list) -> PyTree:
        dtypes = self._dtypes
        # JAX caches by identity of functions: equal equations get one function (decision 1).
        bound_branches = table.get(
            self._bodies, (self._name, tuple(dtypes)), lambda *bodies: bind.branch(bodies, dtypes)
        )
        constants = [x for branch in self._staged for x in branch.operands]

        outs = bound_branches(index, *constants, *(x for i in self._states for x in i.values), *arrays)
        first = self._staged[0]  # the structures of all branches agree
        publish_leaves(self._effects, [branches[0].partition for branches in self._final_values], outs[first.num_out :])
        return first.outs[0].combine(outs[: first.num_out])


def _type_of_output(branch: Staged) -> str:
    """The type of a branch's output, as a tree."""
    part = branch.outs[0]
    return "None" if not part.mask else tree_type_str(part.combine(branch.out_avals))


# -- final values of the written states ------------------------------------------------------------------------


class _FinalValue(NamedTuple):
    """The value of a state after one branch, for a state that some branch writes.

    Attributes:
        staged: the branch.
        effect: its write; None if the branch does not write the state.
        partition: the `Partition` of the value; `avals` the types of its leaves.
        values: the leaves on entry if the branch does not write the state; else the same as `avals`.
    """

    staged: Staged
    effect: Effect | None
    partition: Partition
    avals: list[Any]
    values: list[Any]

    @classmethod
    def make(cls, staged: Staged, state_input: Input) -> _FinalValue:
        key = id(state_input.state)
        if key in staged.written:
            effect = next(e for e in staged.effects if e.state is state_input.state)
            avals = staged.written_avals[key]
            return cls(staged, effect, staged.written[key], avals, avals)
        values, part = partition(state_input.partition.combine(state_input.values), is_loop_leaf)
        return cls(staged, None, part, [_jax.abstract(x) for x in values], values)

    def atoms(self, state_vars: Sequence[Any]) -> list[Any]:
        """The leaves as outputs of the branch's body; `state_vars` are its inputs for the state."""
        if self.effect is not None:
            return self.staged.written_vars[id(self.effect.state)]
        inputs = iter(state_vars)  # no input for a Python bool: Python may branch on it
        pairs = zip(self.values, self.avals, strict=True)
        return [_jax.Literal(np.bool_(x), aval) if isinstance(x, bool) else next(inputs) for x, aval in pairs]


def _promoted_dtypes(name: str, finals: list[_FinalValue]) -> list[Any]:
    """Promoted dtype of each leaf of a written state over the branches; None if their dtypes are equal.

    Raises:
        CarryTypeError: the branches end with different types that do not promote.
    """
    first = finals[0].partition
    for final in finals[1:]:
        part = final.partition
        if (part.treedef, part.mask, part.static) != (first.treedef, first.mask, first.static):
            raise _type_mismatch(name, [finals[0], final])

    dtypes = []
    for n in range(first.num_dynamic):
        dtype = _promoted_dtype(finals, n)
        if dtype is None:  # the message names the first two branches that disagree
            raise _type_mismatch(
                name, next(p for p in itertools.combinations(finals, 2) if _promoted_dtype(p, n) is None), n
            )
        dtypes.append(dtype if any(x.avals[n].dtype != dtype for x in finals) else None)
    return dtypes


def _promoted_dtype(finals: Sequence[_FinalValue], leaf: int) -> Any:
    """The promoted dtype of one leaf over all branches; None without one, or if the shapes differ."""
    avals = [x.avals[leaf] for x in finals]
    if all(a.shape == avals[0].shape and a.dtype == avals[0].dtype for a in avals):
        return avals[0].dtype
    try:
        dtype = jnp.result_type(*(x.values[leaf] for x in finals))
    except ValueError:  # keys, or an integer where promotion is strict
        return None
    agrees = all(a.shape == avals[0].shape and (a.weak_type or a.dtype == dtype) for a in avals)
    return dtype if agrees else None


def _type_mismatch(name: str, pair: Sequence[_FinalValue], n: int | None = None) -> CarryTypeError:
    """The error for two branches, one of them or both with a write, that differ in leaf `n` or, if None, in the
    structure.
    """
    a, b = sorted(pair, key=lambda final: final.effect is not None)
    leaf = "" if n is None else leaf_names(a.partition)[n]
    types = (
        [type_str(x.avals[n]) for x in (a, b)]
        if n is not None
        else structure_strs([(x.partition, x.avals) for x in (a, b)])
    )
    assert b.effect is not None
    paths = Paths(b.staged.fun)
    if a.effect is None:
        return drift_error(name, b.effect, paths, leaf, types, "branch")
    state, kind = b.effect.state, b.effect.kind
    return CarryTypeError(
        f"{name}: the branches leave {type(state).__name__} {paths(state)!r}{leaf}, made at {kind.site_of(state)}, "
        f"with different types: {name_of(a.staged.fun)} writes {types[0]} at {a.effect.site}, {name_of(b.staged.fun)} "
        f"writes {types[1]} at {b.effect.site}.\n"
        "Fix: convert the value in one of them."
    )
