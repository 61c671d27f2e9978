"""A loop of known length that is reversed from a bounded number of slots.

The forward sweep stores the carry before some steps (`schedule`), and `reverse_steps` reverses them. They may keep
residuals in free slots (`rows`), if that saves runs. The loops of a reversal have no reverse mode of their own, so
higher derivatives use `nested` loops.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .. import _jax
from .._equations.structure import Body
from .._lift.staged import as_types
from .._positions import replaced
from .._targets import current
from .._tree import has_known_sizes, is_float, num_bytes
from .backward import BackwardStep, starts_early
from .derivative import (
    DifferentiableLoop,
    Differentiated,
    jvp_of_loop,
    tangents_by_reversal,
    until_linearized,
    whole,
    with_derivative,
    without_stored,
)
from .linearized import ComposedLoop
from .nested import nested
from .rows import SlotMemory
from .schedule import (
    Filled,
    Places,
    Schedule,
    leaves,
    nested_lengths,
    num_evaluations,
    reverse_steps,
    schedule,
)
from .step import LoopStep

# Of the runs with carries only. Residuals in slots cost a copy each, so that a smaller gain is none.
WORTH_MIXING = Fraction(97, 100)


class ReversalPlan(NamedTuple):
    """Reversal of the loop when it is differentiated with respect to some inputs.

    Attributes:
        slots: the memory.
        schedule: of the steps.
        is_mixed: whether slots hold residuals, too.
        step: in two parts.
    """

    slots: SlotMemory
    schedule: Schedule
    is_mixed: bool
    step: BackwardStep


def memory_for(num: int, step: LoopStep, backward: BackwardStep | None) -> tuple[SlotMemory, Schedule, bool]:
    """The memory of `num` slots, the schedule of a loop with it, and whether the slots hold residuals, too.

    Args:
        backward: the step in two parts, whose residuals the slots may hold; None if they are to hold carries only.
    """
    by_carries = schedule(step.length, leaves(num))
    # Arrays of symbolic sizes (jax.export) cannot share rows.
    has_sizes = backward is not None and all(map(has_known_sizes, (*step.avals, *backward.residual_avals)))
    # Slots are in the device's memory, and a step may offload residuals.
    is_offloaded = backward is not None and any(map(_jax.memory_of, backward.residual_avals))
    if backward is not None and has_sizes and not is_offloaded and not _reads_weights(step, backward):
        mixed = SlotMemory(num, step.rows, backward.residual_avals)
        by_both = schedule(step.length, mixed.leaves)
        if runs_with_rerun(by_both, backward) < WORTH_MIXING * by_carries.num_runs:
            return mixed, by_both, True
    return SlotMemory(num, step.rows), by_carries, False


def _reads_weights(step: LoopStep, backward: BackwardStep) -> bool:
    """Whether differentiated elements of xs are larger than a carry, as the weights of layers are.

    The backward part would hold them beside their cotangents, and there fewer runs were not faster (decision 30).
    """
    num_bytes_of_xs = [num_bytes(step.x_avals[i]) for i in backward.diff_xs]
    return max(num_bytes_of_xs, default=0) > sum(map(num_bytes, step.avals))


def runs_with_rerun(schedule: Schedule, step: BackwardStep) -> float:
    """Runs of the body, with the recomputation in the backward part for steps whose residuals are kept."""
    # A step that is differentiated at once has all its values at hand, whatever its policy says.
    num_kept = schedule.length - schedule.num_leaves
    return schedule.num_runs + (step.rerun * num_kept if num_kept else 0)


class LoopOfSlots(DifferentiableLoop):
    """A loop that is reversed from a bounded number of slots.

    Args:
        step: of the loop.
        slots: how many carries are stored at a time, the first one included.
    """

    def __init__(self, step: LoopStep, slots: int):
        super().__init__(step)
        # More slots than steps would never be written.
        self.slots = min(slots, step.length)
        self.plan = functools.cache(self._plan)
        self._sweep = functools.cache(self._make_sweep)
        self._reversal = functools.cache(self._make_reversal)
        # The nested form serves second derivatives in reverse mode (decision 6). Two levels of 20,000 steps store
        # about 2 sqrt(20,000) = 283 carries; three store 3 * 20,000**(1/3) = 81, for one more run of each step.
        lengths = nested_lengths(step.length, 2 if step.length < 20_000 else 3)
        self._nested = ComposedLoop(step.with_unchanged_carries(), lambda step: nested(step, lengths))

    def with_step(self, step: LoopStep) -> LoopOfSlots:
        return LoopOfSlots(step, self.slots)

    # -- derivatives --

    def derivative(
        self, primals: tuple, tangents: dict[int, Any], *, is_linearized: bool
    ) -> tuple[tuple[list, list], list]:
        settings = _jax.trace_context()
        indices = tuple(tangents)  # in place of the tangents, which equations would keep alive
        sweep, linearized = (self._sweep(indices, settings, flag) for flag in (is_linearized, True))
        if sweep is linearized or not _jax.has_rules(self.body):
            outs, stored = sweep(*primals)
        else:
            outs, stored = until_linearized(sweep, linearized, primals, self.step.name)

        def reverse(primals: tuple, pools: list, diff_indices: tuple[int, ...], cts: list) -> list:
            has_ct = tuple(ct is not None for ct in cts)
            return self._reversal(diff_indices, has_ct, settings)(primals, pools, [ct for ct in cts if ct is not None])

        note = Differentiated.here(self, tangents)

        def forward(*primals: Any) -> Any:
            return (self._nested.linearized(indices) if is_linearized else self._nested.unchanged)(*primals)

        options: dict[str, Any] = {"forward": forward, "reverse": reverse, "note": note}
        return outs, tangents_by_reversal(primals, stored, outs, tangents, **options)

    def _plan(self, diff_indices: tuple[int, ...], settings: Any) -> ReversalPlan:
        """Choose the reversal of the loop for these differentiated inputs.

        Args:
            settings: of JAX, under which steps are traced.
        """
        step = BackwardStep(self.step, *self.step.sorted_indices(diff_indices))
        return ReversalPlan(*memory_for(self.slots, self.step, step), step)

    def runs_a_step(self, plan: ReversalPlan | None = None) -> float:
        """Mean number of runs of a step in a gradient; without a plan if slots hold carries only."""
        if plan is not None and plan.is_mixed:
            return runs_with_rerun(plan.schedule, plan.step) / self.length
        return num_evaluations(self.length, self.slots) / self.length

    def _make_sweep(self, diff_indices: tuple[int, ...], settings: Any, is_linearized: bool) -> Callable:
        """``(*primals) -> (outputs, stored)``."""
        plan = self.plan(diff_indices, settings)
        store = functools.partial(self._store, plan)

        # The stored carries count as constants: the reversal, their only reader, is a function of the arguments and
        # is differentiated as such. The rule calls `sweep`, not `store`, whose `while` loops have no reverse mode: a
        # derivative of the rule differentiates the outputs, too.
        def derivative(args: tuple, tangents: dict[int, Any]) -> Any:
            nested = self._nested.linearized(diff_indices, is_primal=True) if is_linearized else self._nested.unchanged
            return sweep(*args), self.step.without_zeros(tangents, jvp_of_loop(self.step, nested, args, tangents)[1])

        sweep = whole(with_derivative(store, derivative), self.step.name)
        return sweep

    def _make_reversal(self, diff_indices: tuple[int, ...], has_ct: tuple[bool, ...], settings: Any) -> Callable:
        """``(primals, stored, cotangents) -> cotangents`` of the inputs at `diff_indices`; `has_ct`: which float
        outputs have a cotangent.
        """

        # Two programs with the same values. The `while` loops of the schedule have no reverse mode, so a derivative
        # of the reversal differentiates the pullback of nested loops, which JAX can reverse again.
        def by_schedule(primals: tuple, pools: list, cts: list) -> list:
            leaves, treedef = jax.tree.flatten((primals, pools, cts))
            rows = ReversedRows(self, diff_indices, has_ct, settings, treedef)
            types = list(map(_jax.abstract, leaves))
            body = Body.close(*_jax.stage(lambda *xs: rows.run(xs), types, traced_for="scan", name=self.step.name))
            lowered = dataclasses.replace(rows, num_operands=body.num_operands) if rows.num_stacks else None
            return _jax.call_whole(_jax.close(body.jaxpr, ()), [*body.operands, *leaves], lowered)

        def by_nesting(primals: tuple, cts: list) -> list:
            # With the batch axes of `by_schedule`: JAX maps the two one by one, and takes those of the first for both.
            return list(map(_jax.batch_first, self._nested.pullback(primals, diff_indices, _expanded(cts, has_ct))))

        def derivative(args: tuple, tangents: dict[int, Any]) -> Any:
            # `by_nesting` computes the stored carries again.
            return jvp_of_loop(self.step, by_nesting, *without_stored(args, tangents))

        return whole(with_derivative(by_schedule, derivative), self.step.name)

    # -- the forward sweep --

    def index(self, i: Any) -> Any:
        """The position in `xs` of step `i`."""
        return self.step.length - 1 - i if self.step.reverse else i

    def element(self, xs: list, i: Any) -> list:
        return [jax.lax.dynamic_index_in_dim(x, self.index(i), 0, keepdims=False) for x in xs]

    def _store(self, plan: ReversalPlan, constants: list, carry: list, xs: list) -> tuple[tuple[list, list], list]:
        """Run the loop: ``(carry, ys)``, and the pools with the stored carries."""
        step, positions = self.step, plan.schedule.positions
        bounds = jnp.asarray([*positions, step.length], jnp.int32)
        mean_length = Fraction(step.length, len(positions))

        # Elements and ys by index, not by `scan`: segments differ in length, and a part of xs for each of them would
        # be a copy.
        def one(i: Any, loop: tuple[list, list]) -> tuple[list, list]:
            carry, y = step(constants, loop[0], self.element(xs, i))
            step.tick(i + 1)
            index = self.index(i)
            return carry, [jax.lax.dynamic_update_index_in_dim(b, v, index, 0) for b, v in zip(loop[1], y, strict=True)]

        # One inner loop with traced bounds for all segments, so that the size of the program does not depend on their
        # number.
        def segment(j: Any, loop: Any) -> Any:
            pools, carry, ys = loop
            pools = plan.slots.write(pools, j, carry)
            return (pools, *_jax.counted_fori_loop(bounds[j], bounds[j + 1], one, (carry, ys), mean_length))

        ys = [_buffer(step.length, aval, i) for i, aval in enumerate(step.y_avals)]
        carry = as_types(carry, step.avals)
        pools, carry, ys = jax.lax.fori_loop(0, len(positions), segment, (plan.slots.make(), carry, ys))
        return (carry, ys), pools


@dataclasses.dataclass(frozen=True)
class ReversedRows:
    """The reversal of a loop as a `RowLoop` of `_equations.release`: each step writes the cotangents of its xs.

    Attributes:
        num_operands: how many operands of the equation come before the leaves of `treedef`.
    """

    loop: LoopOfSlots
    diff_indices: tuple[int, ...]
    has_ct: tuple[bool, ...]
    settings: Any
    treedef: Any
    num_operands: int = 0

    @property
    def length(self) -> int:
        return self.loop.length

    @property
    def num_stacks(self) -> int:
        return len(self.loop.step.sorted_indices(self.diff_indices)[2])

    def __call__(self, jaxpr: Any) -> Any:
        return jaxpr

    def run(self, args: Sequence[Any], buffers: list[Any] | None = None, write: Callable | None = None) -> list[Any]:
        primals, pools, cts = self.treedef.unflatten(args[self.num_operands :])
        plan = self.loop.plan(self.diff_indices, self.settings)
        reversal = _Reversal(self.loop, plan, primals, self.diff_indices)
        return reversal.run(pools, _expanded(cts, self.has_ct), buffers, write or _written)


def _written(buffers: list[Any], index: Any, rows: list[Any]) -> list[Any]:
    pairs = zip(buffers, rows, strict=True)
    return [jax.lax.dynamic_update_index_in_dim(buffer, row, index, 0) for buffer, row in pairs]


class _Cotangents(NamedTuple):
    """State of a reversal after the steps from some step on.

    Attributes:
        carry: cotangents of the differentiated carries before that step.
        constants: of the differentiated constants, summed over the reversed steps.
        xs: of the differentiated xs, of the loop's length, written for the reversed steps.
    """

    carry: list
    constants: list
    xs: list


class _Reversal:
    """The backward pass with respect to some inputs of a loop.

    Args:
        diff_indices: of the differentiated inputs among constants, carry, xs.
    """

    def __init__(self, loop: LoopOfSlots, plan: ReversalPlan, primals: tuple, diff_indices: tuple[int, ...]):
        self._loop, self._plan, self._step = loop, plan, loop.step
        self._constants, carry, self._xs = primals
        self._first = as_types(carry, self._step.avals)
        step = self._step
        self._diff_constants, self._diff_carry, self._diff_xs = loop.step.sorted_indices(diff_indices)
        self._diff_init = [i - step.num_constants for i in diff_indices if step.num_constants <= i < step.first_x]
        self._float_carry = [i for i, a in enumerate(step.avals) if is_float(a)]
        self._float_ys = [i for i, a in enumerate(step.y_avals) if is_float(a)]

    def run(self, pools: list, cts: list, buffers: list | None, write: Callable) -> list:
        """The cotangents of the inputs, for cotangents of the loop's float outputs; None for a zero one.

        Args:
            buffers, write: in the place of the cotangents of xs, as in `RowLoop`; None for new ones.
        """
        avals, self._write = self._step.avals, write
        ct_carry = dict(zip(self._float_carry, cts, strict=False))
        self._ct_ys = cts[len(self._float_carry) :]
        init = _Cotangents(
            [_jax.zeros(avals[i]) if ct_carry[i] is None else ct_carry[i] for i in self._diff_carry],
            [jnp.zeros_like(self._constants[i]) for i in self._diff_constants],
            self._buffers() if buffers is None else buffers,
        )
        total = self._reverse(pools, init)
        # A carry outside `_diff_carry` depends on no differentiated input: nothing reads its cotangent, which stays
        # as given.
        ct_carry.update(zip(self._diff_carry, total.carry, strict=True))
        return [*total.constants, *(ct_carry[i] for i in self._diff_init), *total.xs]

    def _buffers(self) -> list:
        # Negative numbers: the ys of the forward sweep, which may still be alive, have the others.
        return [_buffer(self._step.length, self._step.x_avals[i], -1 - i) for i in self._diff_xs]

    def _reverse(self, pools: list, total: _Cotangents) -> _Cotangents:
        plan = self._plan
        at_once = self._reverse_in_loop if self._starts_early else self._reverse_step
        places = Places(self._advance, at_once, *((self._keep, self._pull_kept) if plan.is_mixed else ()))
        filled = Filled.by_schedule(plan.schedule, plan.slots.num)
        length = self._step.length
        return reverse_steps(length, filled, pools, self._first, total, places, plan.slots, plan.schedule)[0]

    def _advance(self, first: Any, end: Any, carry: list) -> list:
        schedule = self._plan.schedule
        mean_length = Fraction(schedule.num_ahead, schedule.num_leaves)
        step = lambda i, c: self._step(self._constants, c, self._loop.element(self._xs, i))[0]
        return _jax.counted_fori_loop(first, end, step, carry, mean_length)

    def _forward(self, i: Any, carry: list) -> tuple[list, list]:
        return self._plan.step.forward(self._constants, carry, self._loop.element(self._xs, i))

    def _reverse_step(self, i: Any, carry: list, total: _Cotangents) -> _Cotangents:
        return self._pull(i, self._forward(i, carry)[1], total)

    @property
    def _starts_early(self) -> bool:
        """Whether much of the step that is differentiated at once would be in memory while steps before it are run
        ahead and kept.
        """
        is_cpu = current.platform() == "cpu"
        return self._plan.is_mixed and is_cpu and starts_early(self._step)

    def _reverse_in_loop(self, i: Any, carry: list, total: _Cotangents) -> _Cotangents:
        """Run `_reverse_step` in a loop that runs once: nothing of it starts before the loop."""

        def once(loop: tuple[Any, list, _Cotangents]) -> tuple[Any, list, _Cotangents]:
            i, carry, total = loop
            total = self._reverse_step(i, carry, total)
            # A negative number ends the loop, which XLA does not see. An unchanged carry would be alive to the end.
            return -1 - i, replaced(carry, self._diff_carry, total.carry), total

        return jax.lax.while_loop(lambda loop: _jax.counted(loop[0] >= 0, Fraction(1)), once, (i, carry, total))[2]

    def _keep(self, i: Any, carry: list) -> tuple[list, list]:
        carry, residuals = self._forward(i, carry)
        return carry, self._plan.step.encoded(residuals)

    def _pull_kept(self, i: Any, residuals: list, total: _Cotangents) -> _Cotangents:
        return self._pull(i, self._plan.step.decoded(residuals, i, self._first), total)

    def _pull(self, i: Any, residuals: list, total: _Cotangents) -> _Cotangents:
        """Add the cotangents of a step, given its residuals."""
        index, element = self._loop.index(i), self._loop.element(self._xs, i)
        ct_ys = [self._ct_y(n, index) for n in range(len(self._float_ys))]
        ct_constants, ct_carry, ct_x = self._plan.step.backward(self._constants, element, residuals, total.carry, ct_ys)
        self._step.tick(self._step.length - i, "backward")
        sums = [a + b for a, b in zip(total.constants, ct_constants, strict=True)]
        return _Cotangents(ct_carry, sums, self._write(total.xs, index, ct_x))

    def _ct_y(self, n: int, index: Any) -> Any:
        ct = self._ct_ys[n]
        if ct is None:
            return _jax.zeros(self._step.y_avals[self._float_ys[n]])
        return jax.lax.dynamic_index_in_dim(ct, index, 0, keepdims=False)


def _expanded(values: list, is_present: tuple[bool, ...]) -> list:
    """The values in the places where `is_present`, None in others."""
    remaining = iter(values)
    return [next(remaining) if present else None for present in is_present]


def _buffer(length: int, aval: Any, number: int) -> Any:
    """An array to be written in place.

    The number must differ between buffers that are alive together. Otherwise XLA makes them as copies of one buffer,
    and keeps that alive as long.
    """
    buffer = _jax.empty(length, aval)
    return buffer + jnp.asarray(number, aval.dtype) if is_float(aval) and number else buffer
