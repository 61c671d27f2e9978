"""A loop of unknown length that is reversed from a bounded number of slots.

The loop stores its carry at equal distances. When all slots are full, it drops every other one and doubles the distance. The reversal knows
the number of steps and continues as in `checkpointed`, with the slots that become free. It runs more steps than the optimum for a
known length (`num_runs`): with 20 slots up to 1.21 times as many for loops of up to 100 steps, and 1.8 times for up to 3,000. With few slots for a long
loop it can be many times as many, since the last segment is long and has one free slot: 15.6 times for 2,043 steps with 3 slots. Slots hold carries
only, in the formats of `rows`.

Source: dropping every other slot is an idea of online checkpointing. Stumm and Walther 2010, "New algorithms for optimal online
checkpointing", have a schedule that is nearer to the optimum for short loops.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .. import _jax
from .._equations.structure import Body
from .._positions import replaced
from .._tree import is_float
from . import bind, schedule
from .derivative import (
    Differentiated,
    jvp_of,
    linear_in_tangents,
    nonzero_tangents,
    tangents_of,
    with_derivative,
    without_stored,
)
from .reversal import Filled, Places, reverse_steps
from .rows import SlotMemory
from .step import Step

_COLUMNS = 64  # of the schedule's table: it plans for up to as many runs of a step ahead of its reversal


class _Running(NamedTuple):
    """The forward sweep.

    The first `used` slots of `pools` hold the carries before the steps ``positions[:used]``, which rise from 0. Neighbors are at most `distance` apart: exactly
    `distance` if the number of slots is even, less if dropping every other one of an odd number has kept both ends. `carry` is the carry
    after `count` steps.
    """

    carry: list
    count: Any
    pools: list
    positions: Any
    used: Any
    distance: Any


class Stored(NamedTuple):
    """What the forward sweep leaves for the reversal: slots, the steps of their carries, the last slot in use, the number of steps."""

    pools: list
    positions: Any
    top: Any
    count: Any


def while_loop(test: Body, step: Step, slots: int | None, max_steps: int | None) -> Callable:
    """``(constants of the test, constants of the body, carry) -> carry``, differentiable in reverse mode if it has slots.

    Args:
        test: ``(*constants, *carry) -> bool``.
        slots: how many carries are stored; None for a loop without a reverse mode.
        max_steps: the loop ends after as many steps.
    """
    online = OnlineLoop(test, step, slots or 0, max_steps)
    return bind.compiled(online.run) if slots is None else online.with_rule()


def num_runs(length: int, slots: int) -> int:
    """How often a gradient runs the body of a loop that ends after so many steps."""
    # As `OnlineLoop.store` does.
    positions, distance, count = [], 1, 0
    while count < length:
        if len(positions) == slots:
            positions, distance = positions[::2], 2 * distance
        if len(positions) < slots:
            positions.append(count)
            count = min(count + distance, length)
        else:  # the only slot
            count = length
    walk = schedule.Walk(_splits(slots))
    segments = zip(positions, [*positions[1:], length], strict=False)
    return 2 * length + sum(walk.counts(end - start, slots - i)[0] for i, (start, end) in enumerate(segments))


def _splits(slots: int) -> schedule.Table:
    # The number of steps is traced, so the table is for the largest int32, with a bounded number of columns.
    return schedule.table(2**31 - 1, schedule.leaves(slots), 1, _COLUMNS)


class OnlineLoop:
    def __init__(self, test: Body, step: Step, slots: int, max_steps: int | None):
        self.step, self.slots, self.max_steps = step, slots, max_steps
        self._test = test
        self._run = bind.compiled(self.run)
        self._store = bind.compiled(self.store)
        self.reversal = functools.cache(self._make_reversal)
        self._floats = [i for i, a in enumerate(step.avals) if is_float(a)]

    @functools.cached_property
    def _memory(self) -> SlotMemory:
        # The first carry, which need not be 0 or 1 where those after a step are, always is in slot 0.
        step = self.step
        return SlotMemory(self.slots, step.avals, formats=step.carry_formats, checks=step.carry_checks)

    def is_running(self, test_constants: list, carry: list, count: Any) -> Any:
        holds = self._test((), *test_constants, *carry)[0]
        return holds if self.max_steps is None else holds & (count < self.max_steps)

    def run(self, test_constants: list, constants: list, carry: list) -> list:
        """The loop without slots."""

        def one(loop: tuple) -> tuple:
            return loop[0] + 1, self.step(constants, loop[1], [])[0]

        start = (jnp.int32(0), carry)
        return jax.lax.while_loop(lambda loop: self.is_running(test_constants, loop[1], loop[0]), one, start)[1]

    # -- derivatives --

    def with_rule(self) -> Callable:
        @jax.custom_jvp
        def loop(test_constants: list, constants: list, carry: list) -> list:
            return self._run(test_constants, constants, carry)

        loop.defjvp(self._rule, symbolic_zeros=True)
        return loop

    def _rule(self, primals: tuple, tangents: tuple) -> tuple[list, list]:
        primals = jax.tree.map(_jax.as_array, primals)
        outs, stored = self._store(*primals)
        num_test = len(primals[0])
        # The result does not depend differentiably on constants that only the test reads.
        nonzero = {i: t for i, t in nonzero_tangents(tangents).items() if i >= num_test}
        note = Differentiated.here(self, [i - num_test for i in nonzero])
        # Forward mode runs the plain loop beside its tangents. Without a known length there is no nested form, so the
        # reversal itself can be differentiated in forward mode only (decision 6).
        options: dict[str, Any] = {"forward": self._run, "reverse": self._reverse, "note": note}
        out_tangents = linear_in_tangents(primals, stored, outs, nonzero, **options)
        return outs, tangents_of(outs, out_tangents)

    def _reverse(self, primals: tuple, stored: Stored, diff_indices: tuple[int, ...], cts: list) -> list:
        """Cotangents of the inputs at `diff_indices`, from those of the float outputs; None for a zero one."""
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

    def store(self, test_constants: list, constants: list, carry: list) -> tuple[list, Stored]:
        """Run the loop: the last carry, and the stored ones."""
        slots = self.slots
        is_running = lambda r: self.is_running(test_constants, r.carry, r.count)  # noqa: E731

        def fill(running: _Running) -> _Running:
            """Run until the slots are full; then, if the loop continues, drop every other one."""
            segment = functools.partial(self._segment, is_running, constants)
            running = jax.lax.while_loop(lambda r: is_running(r) & (r.used < slots), segment, running)
            # Slot i gets the carry of slot 2 i; the slots after the first half mean nothing then. If the loop ends
            # here, every slot gets its own carry: a branch would need a second buffer for each slot (decision 6).
            continues = is_running(running)
            sources = jnp.minimum(2 * jnp.arange(slots), slots - 1)
            sources = jnp.where(continues, sources, jnp.arange(slots))
            running = running._replace(
                pools=[pool[sources] for pool in running.pools],  # each leaf of the carry has a pool: a row is a slot
                positions=running.positions[sources],
                used=jnp.where(continues, (slots + 1) // 2, running.used),
                distance=jnp.where(continues, 2 * running.distance, running.distance),
            )
            # One slot keeps the first carry, and the remaining steps are one long segment.
            return self._steps(is_running, constants, running) if slots == 1 else running

        # Where devices of a shard_map may run different numbers of steps, counts vary as the condition does.
        axes = sorted(_jax.varying_axes(self._test.jaxpr.outvars[0].aval))
        zero, one, positions = (
            _jax.as_varying(x, axes) for x in (jnp.int32(0), jnp.int32(1), _jax.replicated(jnp.zeros(slots, jnp.int32)))
        )
        start = _Running(carry, zero, self._memory.make(), positions, zero, one)
        last = jax.lax.while_loop(is_running, fill, start)
        return last.carry, Stored(last.pools, last.positions, last.used - 1, last.count)

    def _segment(self, is_running: Callable, constants: list, running: _Running) -> _Running:
        """Store the carry, and run as many steps as the distance."""
        used = running.used
        pools = self._memory.write(running.pools, used, running.carry)
        positions = running.positions.at[used].set(running.count)
        end = running.count + running.distance
        running = running._replace(pools=pools, positions=positions, used=used + 1)
        return self._steps(lambda r: is_running(r) & (r.count < end), constants, running)

    def _steps(self, condition: Callable, constants: list, running: _Running) -> _Running:
        def one(loop: tuple) -> tuple:
            return self.step(constants, loop[0], [])[0], loop[1] + 1

        # Only the carry and the count pass through the innermost loop: XLA copies what a loop carries.
        now = lambda loop: running._replace(carry=loop[0], count=loop[1])  # noqa: E731
        return now(jax.lax.while_loop(lambda loop: condition(now(loop)), one, (running.carry, running.count)))

    # -- the reversal --

    def _make_reversal(self, diff_constants: tuple[int, ...], diff_carry: tuple[int, ...]) -> Callable:
        """``(primals, stored, cotangents of the last carry) -> cotangents of constants and of the first carry``."""
        step = self.step

        def reverse(primals: tuple, stored: Stored, ct_carry: list) -> tuple[list, list]:
            _, constants, carry = primals

            def reverse_step(_: Any, carry: list, result: tuple) -> tuple:
                def run(diff_constant_values: list, diff_carry_values: list) -> list:
                    values = replaced(constants, diff_constants, diff_constant_values)
                    last, _ = step.saving(values, replaced(carry, diff_carry, diff_carry_values), [])
                    return [last[i] for i in diff_carry]

                # The step runs here once more, from its carry: its residuals live for one step only.
                _, pull = jax.vjp(run, [constants[i] for i in diff_constants], [carry[i] for i in diff_carry])
                ct_constants, ct_carry = pull(result[1])
                return [a + b for a, b in zip(result[0], ct_constants, strict=True)], ct_carry

            def advance(first: Any, end: Any, carry: list) -> list:
                return jax.lax.fori_loop(first, end, lambda _, c: step(constants, c, [])[0], carry)

            filled = Filled(jax.tree.map(jnp.asarray, _splits(self.slots)), stored.positions, stored.top)
            init = ([jnp.zeros_like(constants[i]) for i in diff_constants], ct_carry)
            places = Places(advance, reverse_step)
            return reverse_steps(stored.count, filled, stored.pools, carry, init, places, self._memory)[0]

        if not any(step.carry_formats):
            return bind.compiled(reverse)

        # Codes have no tangents, but what they stand for may, such as spikes with a surrogate derivative. So a derivative of the reversal is that of
        # another sweep and reversal, whose slots hold carries unchanged.
        unchanged = type(self)(self._test, step.with_unchanged_carries(), self.slots, self.max_steps)

        def reverse_unchanged(primals: tuple, ct_carry: list) -> tuple[list, list]:
            _, stored = unchanged.store(*primals)
            return unchanged.reversal(diff_constants, diff_carry)(primals, stored, ct_carry)

        def derivative(args: tuple, tangents: dict[int, Any]) -> Any:
            return reverse(*args), jvp_of(reverse_unchanged, *without_stored(args, tangents))[1]

        return with_derivative(reverse, derivative)
