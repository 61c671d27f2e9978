"""A loop of unknown length that is reversed from a bounded number of slots.

The first carries fill the slots. From then on the forward sweep decides after every `_distance` steps whether to store
the carry, and which stored one to replace: so that a reversal from the next decision on would have the fewest runs. The
reversal knows the number of steps and continues as in `checkpointed`, with the slots that become free. Slots hold
carries only, in the formats of `rows`.

A carry that was not stored, or dropped, is lost, so that the loop can run more steps than the optimum for a known
length (`num_runs`). For every length up to 3,000 it runs at most 1.05 times as many with 4 to 20 slots, 1.07 with 3,
1.11 with 2, and as many with 1; the mean over the lengths is at most 1.016. With 30 to 1,000 slots, in samples, at most
1.09. Long loops are nearer: 100,000 steps at most 1.02 with 2 to 100 slots.

Source: to replace stored states by later ones is the idea of online checkpointing. Stumm and Walther 2010, "New
algorithms for optimal online checkpointing", do it optimally for short loops. Wang, Moin and Iaccarino 2009, "Minimal
repetition dynamic checkpointing algorithm for unsteady adjoint calculation", minimize the most runs of a step for any
length; simulated, that takes up to 1.25 times as many in all as the optimum. Here the count decides.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .. import _jax
from .._cached import cached_property
from .._equations.structure import Body
from .._positions import replaced
from .._tree import is_float
from . import bind, schedule
from .derivative import (
    Differentiated,
    jvp_of,
    nonzero_tangents,
    tangents_by_reversal,
    tangents_of,
    until_linearized,
    with_derivative,
    without_stored,
)
from .linearized import Halves
from .rows import SlotMemory
from .schedule import Filled, Places, reverse_steps
from .step import LoopStep

# Sizes of the schedule's table. Its columns bound the runs of a step ahead of its reversal.
_MOST_ENTRIES, _LEAST_COLUMNS = 1024, 64


class _OnlineSweep(NamedTuple):
    """The forward sweep after `count` steps: their carry, and whether the loop continues."""

    carry: list
    count: Any
    continues: Any


class _SlotPositions(NamedTuple):
    """Slot i is row ``rows[i]`` of the pools, and holds the carry before step ``positions[i]``. Positions rise from 0,
    which is in row 0.

    Row `free` is for the present carry: its slot is the last then. It is the number of slots if no row is free.
    """

    rows: Any
    positions: Any
    free: Any


class StoredOnline(NamedTuple):
    """State that the forward sweep leaves for the reversal: slots as in `_SlotPositions`, the last one in use, the
    number of steps.
    """

    pools: list
    rows: Any
    positions: Any
    top: Any
    count: Any


def while_loop(test: Body, step: LoopStep, slots: int | None, max_steps: int | None) -> Callable:
    """``(constants of the test, constants of the body, carry) -> carry``, differentiable in reverse mode if it has
    slots.

    Args:
        test: ``(*constants, *carry) -> bool``.
        slots: how many carries are stored; None for a loop without a reverse mode.
        max_steps: the loop ends after as many steps.
    """
    online = OnlineLoop(test, step, slots or 0, max_steps)
    return bind.compiled(online.run) if slots is None else online.with_rule()


def num_runs(length: int, slots: int) -> int:
    """Runs of the body in the gradient of a loop that ends after so many steps.

    Exact up to 16 million; from there on sums are rounded to float32, and a compiled loop may decide otherwise where
    two choices cost nearly the same.
    """
    # As `OnlineLoop.store` does.
    splits = _splits(slots)
    positions, count = list(range(min(length, slots))), slots
    while count < length:
        dropped = int(_dropped(splits, np.asarray(positions), count))
        if dropped < slots:
            positions = [*positions[:dropped], *positions[dropped + 1 :], count]
        count += int(_distance(count))
    ends = zip(positions, [*positions[1:], length], strict=False)
    segments = [(end - start, slots - i) for i, (start, end) in enumerate(ends)]
    return 2 * length + schedule.runs_of(splits, segments)[0]


def _dropped(splits: schedule.SplitTable, positions: Any, count: Any) -> Any:
    """The slot whose carry to drop for the one after `count` steps; the number of slots if this one is not worth a
    slot.

    Args:
        positions: of all slots.

    Each of c + 1 carries has a segment, which ends at the next one; the last ends at the next decision. To drop carry k
    + 1 leaves c segments. Segments 0, ..., k - 1 have c, ..., c - k + 1 slots; then segments k and k + 1, as one, have
    c - k; and segments k + 2, ..., c have c - k - 1, ..., 1.
    """
    xp: Any = np if isinstance(positions, np.ndarray) else jnp
    bounds = xp.concatenate([positions, xp.stack([count, count + _distance(count)])])
    lengths = bounds[1:] - bounds[:-1]
    segment, following = lengths[:-1], lengths[1:]
    # Entry k is a(l, c - k). As a(l, s) = r l - beta(s + 1, r - 1), it is the sum over r of what l has beyond L_s(r) =
    # beta(s, r).
    limits = splits.rows[None, :0:-1]
    beyond = xp.maximum(xp.stack([segment, following, segment + following])[..., None] - limits, 0)
    segment, following, merged = beyond.sum(-1, np.float32)
    return 1 + (merged - segment + xp.cumsum(segment - following)).argmin()


def _distance(count: Any) -> Any:
    """The steps from one decision to the next: a power of two between a quarter and half of the root of `count`, and 1
    at least.

    The steps after the last decision have one slot. So they run ahead at most ``count / 8`` times in all.
    """
    return 1 << (count >= 4 ** np.arange(2, 16)).sum()


@functools.lru_cache(64)
def _splits(slots: int) -> schedule.SplitTable:
    # The number of steps is traced, so the table is for the largest int32, with a bounded number of columns: enough for
    # 131,000 steps with 2 slots, 6.8 million with 3. Longer loops run many times the optimum.
    return schedule.table(2**31 - 1, schedule.leaves(slots), 1, max(_LEAST_COLUMNS, _MOST_ENTRIES // slots))


class OnlineLoop:
    """A loop ``(constants of the test, constants of the body, carry) -> carry``.

    Args:
        reversed_step: the step that a reversal differentiates, of the same values; by default `step`.
    """

    def __init__(
        self, test: Body, step: LoopStep, slots: int, max_steps: int | None, reversed_step: LoopStep | None = None
    ):
        self.step, self.slots, self.max_steps = step, slots, max_steps
        self._reversed = reversed_step or step
        self._test = test
        self._run = bind.compiled(self.run)
        self._store = bind.compiled(self.store)
        self.reversal = functools.cache(self._make_reversal)
        self._floats = [i for i, a in enumerate(step.avals) if is_float(a)]

    @cached_property
    def _memory(self) -> SlotMemory:
        # The first carry, which need not be 0 or 1 where those after a step are, always is in row 0.
        return SlotMemory(self.slots, self.step.rows)

    def is_running(self, test_constants: list, carry: list, count: Any) -> Any:
        holds = self._test((), *test_constants, *carry)[0]
        return holds if self.max_steps is None else holds & (count < self.max_steps)

    def run(self, test_constants: list, constants: list, carry: list) -> list:
        """The loop without slots."""

        def one(loop: tuple) -> tuple:
            return loop[0] + 1, self.step(constants, loop[1], [])[0]

        start, named = (jnp.int32(0), carry), _jax.name_as_staged(one, self.step.body.jaxpr)
        is_running = lambda loop: self.is_running(test_constants, loop[1], loop[0])
        # The error of its tangents in reverse mode must not advise slots that it has.
        test = _jax.of_slots(is_running, "tangent") if self.slots else is_running
        return jax.lax.while_loop(test, named, start)[1]

    # -- derivatives --

    def with_rule(self) -> Callable:
        @jax.custom_jvp
        def loop(test_constants: list, constants: list, carry: list) -> list:
            return self._run(test_constants, constants, carry)

        loop.defjvp(self._rule, symbolic_zeros=True)
        return loop

    def _rule(self, primals: tuple, tangents: tuple) -> tuple[list, list]:
        primals = jax.tree.map(_jax.as_array, primals)
        num_test = len(primals[0])
        # The result does not depend differentiably on constants that only the test reads.
        nonzero = {i: t for i, t in nonzero_tangents(tangents).items() if i >= num_test}
        note = Differentiated.here(self, [i - num_test for i in nonzero])
        outs, stored = self._stored(primals, note.diff_indices)
        # Forward mode runs the plain loop beside its tangents. Without a known length there is no nested form, so the
        # reversal itself can be differentiated in forward mode only (decision 6).
        options: dict[str, Any] = {"forward": self._run, "reverse": self._reverse, "note": note}
        out_tangents = tangents_by_reversal(primals, stored, outs, nonzero, **options)
        return outs, tangents_of(outs, self.step.without_zeros(note.diff_indices, out_tangents))

    def _linearized(self, diff_indices: Sequence[int]) -> tuple[OnlineLoop, list[Any]]:
        """The loop, with carries stored unchanged, of the linearized step, and its first constants of the body."""
        step = self.step.with_unchanged_carries()
        if not _jax.has_rules(step.marked[0]):
            return type(self)(self._test, step, self.slots, self.max_steps), []
        halves = Halves.of(step, diff_indices)
        return type(self)(self._test, halves.primal, self.slots, self.max_steps, halves.step), halves.operands

    def _stored(self, primals: tuple, diff_indices: Sequence[int]) -> tuple[list, StoredOnline]:
        """`store`, whose outputs have the derivatives of the plain loop, also if that is linearized."""
        if not _jax.has_rules(self.step.marked[0]):
            return self._store(*primals)
        halves = Halves.of(self.step, diff_indices)
        linearized = type(self)(self._test, halves.primal, self.slots, self.max_steps)

        def after(test_constants: list, constants: list, carry: list) -> tuple[list, StoredOnline]:
            return linearized.store(test_constants, [*halves.operands, *constants], carry)

        return until_linearized(self.store, after, primals, self.step.name)

    def _reverse(self, primals: tuple, stored: StoredOnline, diff_indices: tuple[int, ...], cts: list) -> list:
        """Cotangents of the inputs at `diff_indices`, for cotangents of the float outputs; None for a zero one."""
        first = len(primals[0])
        first_carry = first + len(primals[1])
        diff_constants = tuple(i - first for i in diff_indices if i < first_carry)
        diff_carry = tuple(self.step.diff_carry(i - first for i in diff_indices))
        ct_carry = dict(zip(self._floats, cts, strict=True))
        cts = [_jax.zeros(self.step.avals[i]) if ct_carry[i] is None else ct_carry[i] for i in diff_carry]

        ct_constants, ct_diff_carry = self.reversal(diff_constants, diff_carry)(primals, stored, cts)
        ct_carry.update(zip(diff_carry, ct_diff_carry, strict=True))
        return [*ct_constants, *(ct_carry[i - first_carry] for i in diff_indices if i >= first_carry)]

    # -- the forward sweep --

    def store(self, test_constants: list, constants: list, carry: list) -> tuple[list, StoredOnline]:
        """Run the loop: the last carry, and the stored ones."""
        num, splits = self.slots, _splits(self.slots)

        def one(sweep: _OnlineSweep) -> _OnlineSweep:
            carry, count = self.step(constants, sweep.carry, [])[0], sweep.count + 1
            return _OnlineSweep(carry, count, self.is_running(test_constants, carry, count))

        def decided(slots: _SlotPositions, count: Any) -> _SlotPositions:
            dropped = _dropped(splits, slots.positions, count)
            free = slots.rows.at[dropped].get(mode="fill", fill_value=num)
            is_before = jnp.arange(num) < dropped
            rows, positions = (
                jnp.where(is_before, xs, jnp.append(xs[1:], x))
                for xs, x in ((slots.rows, free), (slots.positions, count))
            )
            return _SlotPositions(rows, positions, free)

        def to_decision(loop: tuple[_OnlineSweep, _SlotPositions]) -> tuple[_OnlineSweep, _SlotPositions]:
            """Run until the next decision, and make it."""
            sweep, slots = loop
            end = sweep.count + jnp.where(sweep.count < num, 1, _distance(sweep.count))
            sweep = jax.lax.while_loop(lambda s: s.continues & (s.count < end), one, sweep)
            # A branch, since with as many slots as steps this would be computed in each step. The first carries have
            # the slots in order.
            slots = jax.lax.cond(
                sweep.continues & (sweep.count >= num),
                lambda: decided(slots, sweep.count),
                lambda: slots._replace(free=sweep.count),
            )
            return sweep, slots

        def to_store(loop: tuple[_OnlineSweep, _SlotPositions, list]) -> tuple[_OnlineSweep, _SlotPositions, list]:
            """Store the carry, and run until one is to be stored again. The pools pass through this loop only: XLA
            copies the carry of a loop.
            """
            sweep, slots, pools = loop
            pools = self._memory.write(pools, slots.free, sweep.carry)
            slots = slots._replace(free=jnp.full_like(slots.free, num))
            is_passing = lambda loop: loop[0].continues & (loop[1].free == num)
            return *jax.lax.while_loop(is_passing, to_decision, (sweep, slots)), pools

        # Where devices of a shard_map may run different numbers of steps, counts vary as the condition does.
        axes = sorted(_jax.varying_axes(self._test.jaxpr.outvars[0].aval))
        zero, index = (
            _jax.as_varying(_jax.replicated(x), axes) for x in (jnp.int32(0), jnp.arange(num, dtype=jnp.int32))
        )
        start = _OnlineSweep(carry, zero, self.is_running(test_constants, carry, zero))
        loop = start, _SlotPositions(index, index, zero), self._memory.make()
        last, slots, pools = jax.lax.while_loop(lambda loop: loop[0].continues, to_store, loop)
        return last.carry, StoredOnline(
            pools, slots.rows, slots.positions, jnp.minimum(last.count, num) - 1, last.count
        )

    # -- the reversal --

    def _make_reversal(self, diff_constants: tuple[int, ...], diff_carry: tuple[int, ...]) -> Callable:
        """``(primals, stored, cotangents of the last carry) -> cotangents of constants and of the first carry``."""
        step = self.step

        def reverse(primals: tuple, stored: StoredOnline, ct_carry: list) -> tuple[list, list]:
            _, constants, carry = primals

            def reverse_step(_: Any, carry: list, result: tuple) -> tuple:
                def run(diff_constant_values: list, diff_carry_values: list) -> list:
                    values = replaced(constants, diff_constants, diff_constant_values)
                    last, _ = self._reversed.saving(values, replaced(carry, diff_carry, diff_carry_values), [])
                    return [last[i] for i in diff_carry]

                # The step runs here once more, from its carry: its residuals live for one step only.
                _, pull = jax.vjp(run, [constants[i] for i in diff_constants], [carry[i] for i in diff_carry])
                ct_constants, ct_carry = pull(result[1])
                return [a + b for a, b in zip(result[0], ct_constants, strict=True)], ct_carry

            def advance(first: Any, end: Any, carry: list) -> list:
                return jax.lax.fori_loop(first, end, lambda _, c: step(constants, c, [])[0], carry)

            filled = Filled(jax.tree.map(jnp.asarray, _splits(self.slots)), stored.positions, stored.top, stored.rows)
            init = ([jnp.zeros_like(constants[i]) for i in diff_constants], ct_carry)
            places = Places(advance, reverse_step)
            return reverse_steps(stored.count, filled, stored.pools, carry, init, places, self._memory)[0]

        is_changed = any(row.format for row in step.rows) or _jax.has_rules(step.marked[0])
        if not is_changed or self._reversed is not step:
            return bind.compiled(reverse)

        # Codes have no tangents, but the decoded values may, such as spikes with a surrogate derivative; and carries
        # that a linearized loop computes have true derivatives. So a derivative of the reversal differentiates another
        # sweep and reversal.
        diff_indices = [*diff_constants, *(step.num_constants + i for i in diff_carry)]

        def reverse_unchanged(primals: tuple, ct_carry: list) -> tuple[list, list]:
            test_constants, constants, carry = primals
            unchanged, operands = self._linearized(diff_indices)
            primals = test_constants, [*operands, *constants], carry
            _, stored = unchanged.store(*primals)
            shifted = tuple(len(operands) + i for i in diff_constants)
            return unchanged.reversal(shifted, diff_carry)(primals, stored, ct_carry)

        def derivative(args: tuple, tangents: dict[int, Any]) -> Any:
            return reverse(*args), jvp_of(reverse_unchanged, *without_stored(args, tangents))[1]

        return with_derivative(reverse, derivative)
