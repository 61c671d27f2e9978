"""The loop over the parts of a batch: outputs are reduced as the loop goes, states take part by their rules.

A `Turns` is the loop over consecutive parts of equal size. A batch that does not divide evenly has two of them, one
after the other; `Progress` passes the intermediate states and outputs from the first to the second.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .. import _jax, _states
from .._equations.structure import Body
from .._errors import StateValueError
from .._frames import Effect
from .._lift.rules import Broadcast, First, Last, Mean, Rules
from .._lift.staged import Staged, sort_states
from .._lift.wrapper import name_of
from .._text import type_str
from .._tree import Partition, is_float
from .accumulated import Accumulated, sum_dtype, with_left_out
from .build import make_loop
from .strategy import Strategy

REDUCTIONS = ("mean", "sum", "first", "last", "concat", "stack")
"""How an output of the parts becomes one output."""

_KEPT = {Mean: "mean", First: "first", Last: "last", Broadcast: "last"}
"""For the rules of states whose old value each part reads: which of the parts' writes is kept."""


class EqualParts(NamedTuple):
    """Parts of equal size: `num` of them, from example `start` of the batch on.

    Attributes:
        is_interleaved: whether part k has every `num`-th example, beginning with the k-th, in place of consecutive
            ones.
    """

    start: int
    num: int
    size: int
    is_interleaved: bool

    def split(self, x: Any) -> Any:
        """The parts of an array whose first axis is the batch, stacked along a new first axis."""
        # Consecutive parts of an array that explicit axes divide are each on few devices: it is gathered.
        x = _jax.with_divisible_axis(x, self.size if self.is_interleaved else 1)
        stop = self.start + self.num * self.size
        # Not by indexing, which on an explicit mesh is a gather.
        part = x if (self.start, stop) == (0, x.shape[0]) else jax.lax.slice_in_dim(x, self.start, stop)
        if self.is_interleaved:
            return jnp.swapaxes(part.reshape(self.size, self.num, *x.shape[1:]), 0, 1)
        return part.reshape(self.num, self.size, *x.shape[1:])

    def join(self, parts: Any) -> Any:
        """The inverse of `split` for these examples."""
        if self.is_interleaved:
            parts = jnp.swapaxes(parts, 0, 1)
        return parts.reshape(parts.shape[0] * parts.shape[1], *parts.shape[2:])


@dataclasses.dataclass
class Progress:
    """Results of the parts so far.

    Attributes:
        count: how many parts there were.
        results: by key of a `_PartResult` its accumulated value, or the list of its pieces.
        states: by id of a carried state, its value's leaves.
        advanced: by id of a split state, its next keys.
        effects: by id of a written state, the effect and the `Partition` of its value.
    """

    count: int = 0
    results: dict[Any, Any] = dataclasses.field(default_factory=dict)
    states: dict[int, list] = dataclasses.field(default_factory=dict)
    advanced: dict[int, list] = dataclasses.field(default_factory=dict)
    effects: dict[int, tuple[Effect, Partition]] = dataclasses.field(default_factory=dict)


class _PartResult(NamedTuple):
    """A value that each part computes: a leaf of the output, or of a state's new value.

    Attributes:
        key: its number for an output, ``(id of the state, number)`` for a state.
        how: one of `REDUCTIONS`.
        aval: its type in a part, or for a state with a batch axis in the whole batch.
        first: the value before the first part; None for zeros.
        axis: of the batch, in pieces that are joined.
    """

    key: Any
    how: str
    aval: Any
    first: Any = None
    axis: int = 0

    @property
    def is_accumulated(self) -> bool:
        return self.how not in ("concat", "stack")

    def final(self, progress: Progress) -> Any:
        """The value after the last part."""
        x = progress.results[self.key]
        if isinstance(x, list):
            return jnp.moveaxis(jnp.concatenate(x), 0, self.axis)
        # Added up in wider floats, perhaps: in the type of the parts.
        return x.astype(self.aval.dtype) if is_float(self.aval) and x.dtype != self.aval.dtype else x


class Turns:
    """The loop over parts of equal size.

    Inputs of the loop's body, in order: operands, shared states, first values of kept states; the number of the turn,
    accumulated results, carried states; the weight, keys, examples, slices of states. Outputs: the carries, then
    results to be joined.

    Args:
        staged: the function of one part; its arguments are the examples.
        rules: of the states.
        reductions: for each output leaf, one of `REDUCTIONS`.
        share: the weight of each of these parts in a mean; None if the loop gets weights.
        dtype: the type for sums of floats of fewer bits; None for their own.
    """

    def __init__(self, staged: Staged, rules: Rules, reductions: Sequence[str], share: float | None, dtype: Any):
        self._staged = staged
        self._share = share
        self._dtype = dtype
        self._rules = rules
        states = sort_states(staged, rules, "Carry, Mean, First or Last, or give the axis of the batch")
        self._shared, self._carried, self._split, self._mapped, states_by_rule = states
        self._kept = [i for i, _ in states_by_rule]
        self._sliced = [i for i, _ in self._mapped if id(i.state) in staged.written]

        outputs = zip(reductions, staged.out_avals, strict=True)
        results = [_PartResult(n, how, aval) for n, (how, aval) in enumerate(outputs)]
        for i, rule in states_by_rule:
            for n, (x, aval) in enumerate(zip(i.values, i.avals, strict=True)):
                is_mean = rule is Mean and is_float(aval)
                how = "last" if rule is Mean and not is_mean else _KEPT[rule]
                results.append(_PartResult((id(i.state), n), how, aval, None if is_mean else x))
        for i, axis in self._mapped:
            if id(i.state) in staged.written:
                results += [_PartResult((id(i.state), n), "concat", aval, None, axis) for n, aval in enumerate(i.avals)]
        self._results = results
        self._accumulated = [r for r in results if r.is_accumulated]
        self._joined = [r for r in results if not r.is_accumulated]

    # -- the body --

    def _arranged(self) -> Body:
        staged = self._staged
        constants, mapped = [*staged.operand_vars, *self._shared, *self._kept], [i for i, _ in self._mapped]
        inputs = [*constants, *self._carried, *self._split, *staged.arg_vars, *mapped]
        return staged.arrange(inputs, [*self._carried, *staged.out_vars, *self._kept, *self._sliced])

    def _body(self, carry_avals: list[Any], weight: list[Any], num: int) -> Body:
        inner = self._arranged()
        num_constants = self._num_constants
        num_totals = len(self._accumulated)
        carried_avals = [a for i in self._carried for a in i.avals]
        x_avals = [v.aval for v in inner.jaxpr.invars[num_constants + len(carried_avals) :]]
        groups = self._groups(bool(weight))

        def turn(*args: Any) -> list[Any]:
            constants, args = args[:num_constants], args[num_constants:]
            (count, *carry), args = args[: len(carry_avals)], args[len(carry_avals) :]
            w, xs = (args[0] if weight else self._share), args[len(weight) :]
            totals, carried = carry[:num_totals], carry[num_totals:]

            is_left_out = lambda how: w == 0 if how == "mean" else count != (0 if how == "first" else num - 1)
            outs = with_left_out(inner, [*constants, *carried, *xs], groups, is_left_out)
            carried, outs = outs[: len(carried)], outs[len(carried) :]
            values = {r.key: x for r, x in zip(self._results, outs, strict=True)}
            pairs = zip(self._accumulated, totals, strict=True)
            totals = [_add(r.how, total, values[r.key], w, count) for r, total in pairs]
            return [count + 1, *totals, *carried, *(values[r.key] for r in self._joined)]

        avals = [*(v.aval for v in inner.jaxpr.invars[:num_constants]), *carry_avals, *weight, *x_avals]
        jaxpr, consts = _jax.stage(turn, avals, traced_for="scan", name=name_of(self._staged.fun))
        return Body.close(jaxpr, consts)

    def _groups(self, is_weighted: bool) -> list[str | None]:
        """Reduction of each output of `_arranged` that parts may be left out of, and None for the others."""
        leaving_out = {"first", "last", "mean"} if is_weighted else {"first", "last"}
        carried = [None for i in self._carried for _ in i.values]
        return [*carried, *(r.how if r.how in leaving_out else None for r in self._results)]

    @property
    def _num_constants(self) -> int:
        values = [i.values for i in (*self._shared, *self._kept)]
        return len(self._staged.operands) + sum(map(len, values))

    # -- the loop --

    def run(self, parts: EqualParts, examples: list, weights: Any, num: int, progress: Progress) -> None:
        """Run the loop, and note its results in `progress`.

        Args:
            examples: for each argument of the staged function, its values along a new first axis.
            weights: of the parts; None if each has the same.
            num: the number of all parts of the batch.
        """
        staged = self._staged
        # An earlier loop of the same call may have written states that this one reads.
        shared = [x for i in self._shared for x in progress.states.get(id(i.state), i.values)]
        constants = [*staged.operands, *shared, *(x for i in self._kept for x in i.values)]
        firsts = [_zeros(r.how, r.aval, self._dtype) if r.first is None else r.first for r in self._accumulated]
        totals = [progress.results.get(r.key, first) for r, first in zip(self._accumulated, firsts, strict=True)]
        carried = [x for i in self._carried for x in progress.states.get(id(i.state), i.values)]
        split = self._keys(parts, num, progress)
        mapped = [parts.split(jnp.moveaxis(jnp.asarray(x), axis, 0)) for i, axis in self._mapped for x in i.values]
        mapped = [
            jnp.moveaxis(x, 1, axis + 1 if axis >= 0 else axis) for x, axis in zip(mapped, self._axes(), strict=True)
        ]

        carry = [jnp.int32(progress.count), *totals, *carried]
        carry = [x if isinstance(x, jax.Array) else jnp.asarray(x) for x in carry]
        xs = [*([] if weights is None else [weights]), *split, *examples, *mapped]
        carry_avals = [_jax.abstract(x) for x in carry]
        weight_avals = [] if weights is None else [_jax.drop_axis(_jax.abstract(weights), 0)]
        body = self._body(carry_avals, weight_avals, num)
        loop = make_loop(
            staged,
            body,
            body.num_operands + len(constants),
            len(carry),
            parts.num,
            strategy=self._strategy(body, weights is not None),
        )
        carry, ys = loop([*body.operands, *constants], carry, xs)
        self._note(parts, carry[1:], ys, progress)

    def _axes(self) -> list[int]:
        return [axis for i, axis in self._mapped for _ in i.values]

    def _keys(self, parts: EqualParts, num: int, progress: Progress) -> list[Any]:
        """Keys of these parts, for each leaf of a split state."""
        keys = []
        for i in self._split:
            keys_of_parts, progress.advanced[id(i.state)] = self._rules.split(i.state, i.kind, i.values, num)
            keys += [k[progress.count :][: parts.num] for k in keys_of_parts]
        return keys

    def _strategy(self, body: Body, is_weighted: bool) -> Strategy | None:
        """Strategy that differentiates the loop with the memory of one part."""
        if _jax.forbidden_effects(body.jaxpr):  # must not run again
            return None
        for position, r in enumerate(self._accumulated):
            is_loss = isinstance(r.key, int) and not r.aval.shape and jnp.issubdtype(r.aval.dtype, jnp.floating)
            if is_loss and r.how in ("mean", "sum"):
                weight = (None if is_weighted else self._share) if r.how == "mean" else 1.0
                return Accumulated(1 + position, weight, self._dtype)
        return Accumulated(None, dtype=self._dtype)

    def _note(self, parts: EqualParts, carry: list, ys: list, progress: Progress) -> None:
        progress.count += parts.num
        carry_leaves = iter(carry)
        progress.results |= {r.key: next(carry_leaves) for r in self._accumulated}
        for r, y in zip(self._joined, ys, strict=True):
            y = jnp.moveaxis(y, r.axis + 1 if r.axis >= 0 else r.axis, 1) if r.axis else y
            progress.results.setdefault(r.key, []).append(y if r.how == "stack" else parts.join(y))
        for i in self._carried:
            progress.states[id(i.state)] = [next(carry_leaves) for _ in i.values]
        for effect, part in zip(self._staged.effects, self._staged.values, strict=True):
            progress.effects[id(effect.state)] = effect, part

    # -- after the last loop --

    def outputs(self, progress: Progress) -> list[Any]:
        """The leaves of the outputs."""
        return [r.final(progress) for r in self._results if isinstance(r.key, int)]

    def state_values(self, progress: Progress) -> list[Any]:
        """The leaves of the written states' values, in the order of the effects."""
        values = progress.states | progress.advanced
        for r in self._results:
            if not isinstance(r.key, int):
                values.setdefault(r.key[0], []).append(r.final(progress))
        return [x for key in progress.effects for x in values[key]]


def part_type(rules: Rules, state: Any, aval: Any, batch: int, size: int) -> Any:
    """The type of a part of a state with a batch axis; `aval` itself for other states."""
    axis = rules(state)
    if not isinstance(axis, int):
        return aval
    shape = list(aval.shape)
    if not -len(shape) <= axis < len(shape) or shape[axis] != batch:
        raise StateValueError(
            f"{rules.name}: {_states.describe(state, path=rules.path(state))} has its examples along axis {axis} by "
            f"states=, and is {type_str(aval)}: the batch has {batch}."
        )
    shape[axis] = size
    return aval.update(shape=tuple(shape), weak_type=False)


# -- reductions ------------------------------------------------------------------------------------------------------


def _zeros(how: str, aval: Any, dtype: Any) -> Any:
    """The value before the first part, of the type of the values after it; `dtype` as in `Turns`."""
    zeros = _jax.zeros(aval)
    if how in ("mean", "sum") and is_float(aval):
        zeros = zeros.astype(sum_dtype(aval, dtype))
    elif how == "mean":
        zeros = zeros.astype(jnp.result_type(float))  # as `jnp.mean` of integers
    elif how == "sum" and aval.dtype == bool:
        zeros = zeros.astype(jnp.result_type(int))
    if getattr(jax.typeof(zeros), "weak_type", False):
        zeros = jax.lax.convert_element_type(zeros, zeros.dtype)
    return _jax.as_varying(zeros, tuple(_jax.varying_axes(aval)))


def _add(how: str, total: Any, x: Any, weight: Any, count: Any) -> Any:
    """The value after one more part."""
    if how == "first":
        return jnp.where(count == 0, x, total)
    if how == "last" or (how == "mean" and not is_float(total)):  # the latter: an integer leaf of a state
        return jax.lax.convert_element_type(x, total.dtype) if total.dtype != x.dtype else x
    if how == "sum":
        return total + x.astype(total.dtype)
    # Weighted before it is added, so that the sum needs no division, a second array, in the end. In float32 at least:
    # 3/10 in bfloat16 is off by one part in 500.
    with jax.numpy_dtype_promotion("standard"):
        wide = jnp.promote_types(total.dtype, jnp.float32)
    if isinstance(weight, float):
        return total + (x.astype(wide) * weight).astype(total.dtype)
    scaled = x.astype(wide) * weight.astype(wide)
    return total + jnp.where(weight == 0, jnp.zeros_like(scaled), scaled).astype(total.dtype)
