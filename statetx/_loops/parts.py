"""The loop over the parts of a batch: outputs are reduced as the loop goes, states take part by their rules.

A `Turns` is the loop over consecutive parts of equal size. A batch that does not divide evenly has two of them, one
after the other; `Progress` passes from the first to the second what is left to do with each state and output.
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
from .strategy import Levels, Strategy

REDUCTIONS = ("mean", "sum", "first", "last", "concat", "stack")
"""How an output of the parts becomes one output."""

_KEPT = {Mean: "mean", First: "first", Last: "last", Broadcast: "last"}
"""For the rules of states that each part reads as they were before the call: which of the parts' writes is kept."""


class EqualParts(NamedTuple):
    """Parts of equal size: `num` of them, the first of which begins at example `start` of the batch.

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
        if self.is_interleaved:
            x = _jax.with_divisible_axis(x, self.size)
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
    """What the parts so far have left.

    Attributes:
        count: how many parts there were.
        outs: for each output leaf its accumulated value, or the list of its pieces.
        states: by id of a carried state, its value's leaves.
        kept: by id of a state that parts read as it was before the call, the leaves of the value that it will hold.
        slices: by id of a state with a batch axis, the pieces of its value's leaves.
        advanced: by id of a split state, its next keys.
        effects: by id of a written state, the effect and the `Partition` of its value.
    """

    count: int = 0
    outs: list[Any] | None = None
    states: dict[int, list] = dataclasses.field(default_factory=dict)
    kept: dict[int, list] = dataclasses.field(default_factory=dict)
    slices: dict[int, list[list]] = dataclasses.field(default_factory=dict)
    advanced: dict[int, list] = dataclasses.field(default_factory=dict)
    effects: dict[int, tuple[Effect, Partition]] = dataclasses.field(default_factory=dict)


class Turns:
    """The loop over parts of equal size.

    Inputs of the loop's body, in order: operands, shared states, first values of kept states; the number of the turn,
    accumulated outputs, carried states, accumulated kept states; the weight, keys, examples, slices of states. Outputs:
    the carries, then stacked outputs and slices of states.

    Args:
        staged: the function of one part; its arguments are the examples.
        rules: of the states.
        reductions: for each output leaf, one of `REDUCTIONS`.
        share: the weight of each of these parts in a mean; None if the loop gets weights.
        dtype: in which floats of fewer bits are added up; None for their own.
    """

    def __init__(self, staged: Staged, rules: Rules, reductions: Sequence[str], share: float | None, dtype: Any):
        self._staged = staged
        self._share = share
        self._dtype = dtype
        states = sort_states(staged, rules, "Carry, Mean, First or Last, or give the axis of the batch")
        self._shared, self._carried, self._split, self._mapped, kept = states
        self._kept = [(i, _KEPT[rule]) for i, rule in kept]
        self._sliced = [i for i, _ in self._mapped if id(i.state) in staged.written]
        self._reductions = list(reductions)
        self._accumulated = [n for n, how in enumerate(reductions) if how not in ("concat", "stack")]
        self._stacked = [n for n, how in enumerate(reductions) if how in ("concat", "stack")]

    # -- the body --

    def _arranged(self) -> Body:
        staged = self._staged
        states = lambda inputs: [v for i in inputs for v in staged.state_vars(i)]
        written = lambda inputs: [v for i in inputs for v in staged.written_vars.get(id(i.state), staged.state_vars(i))]
        kept, mapped = [i for i, _ in self._kept], [i for i, _ in self._mapped]
        constants = [*staged.operand_vars, *states(self._shared), *states(kept)]
        invars = [*constants, *states(self._carried), *states(self._split), *staged.arg_vars, *states(mapped)]
        outvars = [*staged.out_vars, *written(self._carried), *written(kept), *written(self._sliced)]
        return staged.arrange(invars, outvars)

    def _body(self, carry_avals: list[Any], weight: list[Any], num: int) -> Body:
        inner = self._arranged()
        num_constants = self._num_constants
        num_outs, num_acc = len(self._reductions), len(self._accumulated)
        carried_avals = [a for i in self._carried for a in i.avals]
        kept = [how for i, how in self._kept for _ in i.avals]
        x_avals = [v.aval for v in inner.jaxpr.invars[num_constants + len(carried_avals) :]]
        groups = self._groups(bool(weight))

        def turn(*args: Any) -> list[Any]:
            constants, args = args[:num_constants], args[num_constants:]
            (count, *carry), args = args[: len(carry_avals)], args[len(carry_avals) :]
            w, xs = (args[0] if weight else self._share), args[len(weight) :]
            accumulated, carry = carry[:num_acc], carry[num_acc:]
            carried, accumulated_states = carry[: len(carried_avals)], carry[len(carried_avals) :]

            is_left_out = lambda how: w == 0 if how == "mean" else count != (0 if how == "first" else num - 1)
            outs = with_left_out(inner, [*constants, *carried, *xs], groups, is_left_out)
            outs, written = outs[:num_outs], outs[num_outs:]
            add = lambda how, total, x: _add(how, total, x, w, count)
            totals = [
                add(self._reductions[n], total, outs[n])
                for n, total in zip(self._accumulated, accumulated, strict=True)
            ]
            carried, written = written[: len(carried)], written[len(carried) :]
            kept_totals = [add(how, total, x) for how, total, x in zip(kept, accumulated_states, written, strict=False)]
            stacked = [outs[n] for n in self._stacked]
            return [count + 1, *totals, *carried, *kept_totals, *stacked, *written[len(kept) :]]

        avals = [*(v.aval for v in inner.jaxpr.invars[:num_constants]), *carry_avals, *weight, *x_avals]
        jaxpr, consts = _jax.stage(turn, avals, traced_for="scan", name=name_of(self._staged.fun))
        return Body.close(jaxpr, consts)

    def _groups(self, is_weighted: bool) -> list[str | None]:
        """For each output of `_arranged`, how it is reduced if parts may be left out of it, and None otherwise."""
        num_leaves = lambda inputs: sum(len(i.values) for i in inputs)
        kept = [how for i, how in self._kept for _ in i.values]
        carried, sliced = [None] * num_leaves(self._carried), [None] * num_leaves(self._sliced)
        leaving_out = {"first", "last", "mean"} if is_weighted else {"first", "last"}
        return [how if how in leaving_out else None for how in (*self._reductions, *carried, *kept, *sliced)]

    @property
    def _num_constants(self) -> int:
        values = [i.values for i in (*self._shared, *(i for i, _ in self._kept))]
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
        kept = [i for i, _ in self._kept]
        # What an earlier loop of the same call has written, this one reads.
        shared = [x for i in self._shared for x in progress.states.get(id(i.state), i.values)]
        constants = [*staged.operands, *shared, *(x for i in kept for x in i.values)]
        outs = progress.outs or [None] * len(self._reductions)
        totals = [
            _zeros(self._reductions[n], staged.out_avals[n], self._dtype) if outs[n] is None else outs[n]
            for n in self._accumulated
        ]
        carried = [x for i in self._carried for x in progress.states.get(id(i.state), i.values)]
        kept_totals = []
        for i, how in self._kept:
            first = [
                _zeros(how, aval, self._dtype) if how == "mean" and is_float(aval) else x
                for x, aval in zip(i.values, i.avals, strict=True)
            ]
            kept_totals += progress.kept.get(id(i.state), first)
        split = self._keys(parts, num, progress)
        mapped = [parts.split(jnp.moveaxis(jnp.asarray(x), axis, 0)) for i, axis in self._mapped for x in i.values]
        mapped = [
            jnp.moveaxis(x, 1, axis + 1 if axis >= 0 else axis) for x, axis in zip(mapped, self._axes(), strict=True)
        ]

        carry = [jnp.int32(progress.count), *totals, *carried, *kept_totals]
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
        """For each leaf of a split state, the keys of these parts."""
        keys = []
        for i in self._split:
            all_keys = [jax.random.split(x, num + 1) for x in i.values]
            progress.advanced[id(i.state)] = [k[0] for k in all_keys]
            keys += [k[1 + progress.count :][: parts.num] for k in all_keys]
        return keys

    def _strategy(self, body: Body, is_weighted: bool) -> Strategy | None:
        """How to differentiate the loop with the memory of one part."""
        if _jax.forbidden_effects(body.jaxpr):  # must not run again
            return None
        for position, n in enumerate(self._accumulated):
            aval = self._staged.out_avals[n]
            is_loss = not aval.shape and jnp.issubdtype(aval.dtype, jnp.floating)
            if is_loss and self._reductions[n] in ("mean", "sum"):
                weight = (None if is_weighted else self._share) if self._reductions[n] == "mean" else 1.0
                return Accumulated(1 + position, weight, self._dtype)
        constants: list[Any] = [v.aval for v in body.jaxpr.invars[: body.num_operands + self._num_constants]]
        is_widened = any(sum_dtype(a, self._dtype) != a.dtype for a in constants)
        return Accumulated(None, dtype=self._dtype) if is_widened else Levels(1)

    def _note(self, parts: EqualParts, carry: list, ys: list, progress: Progress) -> None:
        progress.count += parts.num
        carry_leaves, y_leaves = iter(carry), iter(ys)
        outs = progress.outs = progress.outs or [[] if how in ("concat", "stack") else None for how in self._reductions]
        for n in self._accumulated:
            outs[n] = next(carry_leaves)
        for n in self._stacked:
            y = next(y_leaves)
            outs[n].append(parts.join(y) if self._reductions[n] == "concat" else y)
        for i in self._carried:
            progress.states[id(i.state)] = [next(carry_leaves) for _ in i.values]
        for i, _ in self._kept:
            progress.kept[id(i.state)] = [next(carry_leaves) for _ in i.values]
        for i, axis in self._mapped:
            if id(i.state) in self._staged.written:
                pieces = progress.slices.setdefault(id(i.state), [[] for _ in i.values])
                for piece in pieces:
                    y = jnp.moveaxis(next(y_leaves), axis + 1 if axis >= 0 else axis, 1)
                    piece.append(parts.join(y))
        for effect, part in zip(self._staged.effects, self._staged.values, strict=True):
            progress.effects[id(effect.state)] = effect, part

    # -- after the last loop --

    def outputs(self, progress: Progress) -> list[Any]:
        """The leaves of the outputs."""
        assert progress.outs is not None
        outs = [jnp.concatenate(x) if isinstance(x, list) else x for x in progress.outs]
        return _narrowed(outs, self._staged.out_avals)

    def state_values(self, progress: Progress) -> list[Any]:
        """The leaves of the written states' values, in the order of the effects."""
        axes = {id(i.state): axis for i, axis in self._mapped}
        kept = {id(i.state): i.avals for i, _ in self._kept}
        leaves: list[Any] = []
        for key in progress.effects:
            if key in kept:
                leaves += _narrowed(progress.kept[key], kept[key])
            elif key in progress.slices:
                leaves += [jnp.moveaxis(jnp.concatenate(x), 0, axes[key]) for x in progress.slices[key]]
            else:
                leaves += next(d[key] for d in (progress.states, progress.advanced) if key in d)
        return leaves


def part_type(rules: Rules, state: Any, aval: Any, batch: int, size: int) -> Any:
    """The type of a part of a state with a batch axis; `aval` itself for other states."""
    axis = rules(state)
    if not isinstance(axis, int):
        return aval
    shape = list(aval.shape)
    if not -len(shape) <= axis < len(shape) or shape[axis] != batch:
        raise StateValueError(
            f"{rules.name}: {_states.describe(state, path=rules.path(state))} has its examples along axis {axis} by "
            f"states=, and is "
            f"{type_str(aval)}: the batch has {batch}."
        )
    shape[axis] = size
    return aval.update(shape=tuple(shape), weak_type=False)


# -- reductions ------------------------------------------------------------------------------------------------------


def _narrowed(values: Sequence[Any], avals: Sequence[Any]) -> list[Any]:
    """What `_zeros` and `_add` have added up in wider floats, in the types of the parts."""
    pairs = zip(values, avals, strict=True)
    return [x.astype(aval.dtype) if is_float(aval) and x.dtype != aval.dtype else x for x, aval in pairs]


def _zeros(how: str, aval: Any, dtype: Any) -> Any:
    """The value before the first part, of the type of the values after it; `dtype` as in `Turns`."""
    zeros = _jax.zeros(aval)
    if how in ("mean", "sum") and is_float(aval):
        zeros = zeros.astype(sum_dtype(aval, dtype))
    elif how == "mean" and not is_float(aval):
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
