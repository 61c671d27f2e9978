"""Loops that are reversed from carries that a schedule has stored.

The forward sweep stores the carry at a few steps (`schedule` says which), and the reversal runs forward from the nearest of
them, storing anew in the slots that are free. It is a nest of three loops without a branch,

    for each block of steps, from the last to the first:
        while the carry in hand is not that before the block:
            run some steps; store the carry

of which the compiled size depends on neither length nor slots. These loops have no reverse mode of their own, so what is
differentiated twice goes back to `nested`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .. import _jax
from .._lift.staged import as_types
from .._positions import replaced
from .._tree import is_float
from . import schedule
from .cpu_concurrency import with_company
from .derivative import Loop, floats_of, jvp_of, with_derivative
from .nested import Step, nested

# -- a schedule --------------------------------------------------------------------------------------------------


class Scheduled(Loop):
    """A loop that is reversed from a bounded number of slots.

    Args:
        step: of the loop.
        slots: how many carries are stored at a time, the first one included.
        block: how many steps are reversed together, from what they keep.
        offload: whether the carries are stored in the host's memory.
    """

    def __init__(self, step: Step, slots: int, block: int = 1, *, offload: bool = False):
        super().__init__(step)
        self._offload = offload
        self._slots = SlotMemory(offload)
        self._block = block
        self._num_blocks, self._rest = divmod(step.length, block)
        self.slots = max(1, min(slots, self._num_blocks))
        self._sweep = with_derivative(self._store, self._derivative_of_store)
        self._reversal = functools.cache(self._make_reversal)
        lengths = schedule.nested_lengths(step.length, 2 if step.length < 20_000 else 3)
        self._nested = nested(step, lengths)

    def with_step(self, step: Step) -> Scheduled:
        return Scheduled(step, self.slots, self._block, offload=self._offload)

    # -- derivatives --

    def derivative(self, primals: tuple, tangents: dict[int, Any]) -> tuple[tuple[list, list], list]:
        """A linear map, whose transpose is the reversal."""
        outs, stored = self._sweep(*primals)
        leaves, treedef = jax.tree.flatten((primals, stored))
        moving = tuple(tangents)

        def push(residuals: list, tangents: list) -> list[Any]:
            primals, _ = treedef.unflatten(residuals)
            return jvp_of(self._nested, primals, dict(zip(moving, tangents, strict=True)))[1]

        def pull(residuals: list, cts: list) -> list[Any]:
            primals, stored = treedef.unflatten(residuals)
            given = tuple(ct is not None for ct in cts)
            return self._reversal(moving, given)(primals, stored, [ct for ct in cts if ct is not None])

        types = [_jax.abstract(x) for x in jax.tree.leaves(outs) if is_float(x)]
        return outs, _jax.linear_call(push, pull, leaves, list(tangents.values()), types)

    def _derivative_of_store(self, args: tuple, tangents: dict[int, Any]) -> Any:
        """The derivative of the sweep: what is stored does not count, since what is done with it is a function of the
        arguments, and is differentiated as such."""
        outs = self._store(*args)
        return outs, jvp_of(self._nested, args, tangents)[1]

    # -- the forward sweep --

    def _at(self, i: Any) -> Any:
        return self.step.length - 1 - i if self.step.reverse else i

    def _element(self, xs: list, i: Any) -> list:
        return [jax.lax.dynamic_index_in_dim(x, self._at(i), 0, keepdims=False) for x in xs]

    def _store(self, constants: list, carry: list, xs: list) -> Any:
        """Run the loop: ``(carry, ys), (slots, carry after the last whole block)``."""
        step = self.step
        positions = schedule.first_positions(self._num_blocks, self.slots) if self._num_blocks else []
        bounds = jnp.asarray([p * self._block for p in (*positions, self._num_blocks)], jnp.int32)

        def one(i: Any, loop: tuple[list, list]) -> tuple[list, list]:
            carry, y = step(constants, loop[0], self._element(xs, i))
            step.tick(i + 1)
            return carry, [
                jax.lax.dynamic_update_index_in_dim(b, v, self._at(i), 0) for b, v in zip(loop[1], y, strict=True)
            ]

        def segment(j: Any, loop: Any) -> Any:
            slots, carry, ys = loop
            slots = self._slots.write(slots, j, carry)
            return (slots, *jax.lax.fori_loop(bounds[j], bounds[j + 1], one, (carry, ys)))

        slots = self._slots.make(self.slots, step.avals)
        ys = [_buffer(step.length, aval, i) for i, aval in enumerate(step.y_avals)]
        carry = as_types(carry, step.avals)
        slots, carry, ys = jax.lax.fori_loop(0, len(positions), segment, (slots, carry, ys))
        middle = carry if self._rest else []
        carry, ys = jax.lax.fori_loop(step.length - self._rest, step.length, one, (carry, ys))
        return (carry, ys), (slots, middle)

    # -- the reversal --

    def _make_reversal(self, moving: tuple[int, ...], given: tuple[bool, ...]) -> Callable:
        """``(primals, stored, cotangents) -> cotangents`` of those inputs that `moving` names; `given` says which of the
        float outputs have a cotangent."""

        def scheduled(primals: tuple, stored: Any, cts: list) -> list:
            return self._reverse(primals, stored, cts, moving, given)

        def by_nesting(primals: tuple, cts: list) -> list:
            outs, pull = jax.vjp(
                lambda *xs: floats_of(self._nested, primals, dict(zip(moving, xs, strict=True))),
                *[jax.tree.leaves(primals)[i] for i in moving],
            )
            given_cts = iter(cts)
            return list(pull([next(given_cts) if g else jnp.zeros_like(x) for g, x in zip(given, outs, strict=True)]))

        def derivative(args: tuple, tangents: dict[int, Any]) -> Any:
            primals, stored, cts = args
            num, skipped = len(jax.tree.leaves(primals)), len(jax.tree.leaves(stored))
            mine = {i if i < num else i - skipped: t for i, t in tangents.items() if i < num or i >= num + skipped}
            return jvp_of(by_nesting, (primals, cts), mine)

        return with_derivative(scheduled, derivative)

    def _reverse(
        self, primals: tuple, stored: Any, cts: list, moving: tuple[int, ...], given: tuple[bool, ...]
    ) -> list:
        step, block = self.step, self._block
        constants, _, xs = primals
        slots, middle = stored
        num_constants, first_x = step.num_constants, step.num_constants + step.num_carry
        const_places = [i for i in moving if i < num_constants]
        x_places = [i - first_x for i in moving if i >= first_x]
        all_floats = [i for i, a in enumerate(step.avals) if is_float(a)]
        carry_floats = step.moving_carry(moving)
        y_floats = [i for i, a in enumerate(step.y_avals) if is_float(a)]
        given_cts = iter(cts)
        all_cts = [next(given_cts) if g else None for g in given]
        of_carry = dict(zip(all_floats, all_cts, strict=False))
        ct_carry = [_jax.zeros(step.avals[i]) if of_carry[i] is None else of_carry[i] for i in carry_floats]
        ct_ys = all_cts[len(all_floats) :]

        def reverse_block(first: Any, size: int, carry: list, loop: tuple) -> tuple:
            """Reverse the steps from `first` on, of which the first finds this carry."""
            ct_carry, sums, ct_xs = loop
            low = self._at(first + size - 1) if step.reverse else first
            part = lambda x: jax.lax.dynamic_slice_in_dim(x, low, size, 0)  # noqa: E731
            elements = [part(x) for x in xs]

            def run(consts: list, floats: list, moved: list) -> tuple[list, list]:
                c = replaced(constants, const_places, consts)
                k = replaced(carry, carry_floats, floats)
                x = replaced(elements, x_places, moved)
                if size == 1:
                    k, y = step.keeping(c, k, [v[0] for v in x])
                    y = [v[None] for v in y]
                else:
                    k, y = jax.lax.scan(functools.partial(step.keeping, c), k, x, size, step.reverse)
                return [k[i] for i in carry_floats], [y[i] for i in y_floats]

            (_, y), pull = jax.vjp(
                run,
                [constants[i] for i in const_places],
                [carry[i] for i in carry_floats],
                [elements[i] for i in x_places],
            )
            ct_y = [jnp.zeros_like(v) if ct is None else part(ct) for ct, v in zip(ct_ys, y, strict=True)]
            ct_consts, ct_carry, ct_x = pull((ct_carry, ct_y))
            step.tick(step.length - first, "backward")
            sums = [a + b for a, b in zip(sums, ct_consts, strict=True)]
            ct_xs = [jax.lax.dynamic_update_slice_in_dim(b, v, low, 0) for b, v in zip(ct_xs, ct_x, strict=True)]
            return ct_carry, sums, ct_xs

        run_steps = with_company if step.has_overlap else jax.lax.fori_loop

        def advance(first: Any, last: Any, carry: list) -> list:
            return run_steps(first, last, lambda i, c: step(constants, c, self._element(xs, i))[0], carry)

        loop = (
            ct_carry,
            [jnp.zeros_like(constants[i]) for i in const_places],
            [_buffer(step.length, step.x_avals[i], -1 - i) for i in x_places],
        )
        if self._rest:
            loop = reverse_block(self._num_blocks * block, self._rest, middle, loop)
        if self._num_blocks:
            size = functools.partial(reverse_block, size=block)
            plan = Plan.make(self._num_blocks, self.slots)
            loop, _ = reverse_scheduled(self._num_blocks, plan, block, slots, loop, advance, size, self._slots)
        ct_carry, sums, ct_xs = loop
        of_carry.update(zip(carry_floats, ct_carry, strict=True))
        return [*sums, *(of_carry[i - num_constants] for i in moving if num_constants <= i < first_x), *ct_xs]


def reverse_scheduled(
    num_blocks: Any,
    plan: Plan,
    block: int,
    slots: list,
    loop: Any,
    advance: Callable,
    reverse_block: Callable,
    memory: SlotMemory | None = None,
) -> tuple[Any, Any]:
    """Reverse all blocks in turn: the schedule, whatever a step is.

    Args:
        num_blocks: how many; may be traced.
        slots: for each leaf of the carry the stored ones, as the forward sweep left them.
        loop: what the reversal hands on.
        advance: ``(first step, last step, carry) -> carry``.
        reverse_block: ``(first step, carry=, loop=) -> loop``.
        memory: how slots are read and written.

    Returns:
        ``loop``, and how many blocks were run ahead.
    """
    memory = memory or SlotMemory(False)
    num_slots = len(plan.positions)
    last_slot = jnp.int32(num_slots - 1)

    # `top` is the last slot in use, `positions[top]` the block before which its carry stands.
    def one_block(n: Any, state: Any) -> Any:
        slots, positions, top, loop, runs = state
        target = jnp.int32(num_blocks - 1 - n)

        def is_before(inner: Any) -> Any:
            return inner[3] < target

        def go_on(inner: Any) -> Any:
            slots, positions, top, here, carry, runs = inner
            free, ahead = num_slots - top, target - here
            has_free = free > 1
            if num_slots > 1:
                ahead = jnp.where(has_free, schedule.split(plan.rows, ahead + 1, jnp.maximum(free, 2)), ahead)
            carry = advance(here * block, (here + ahead) * block, carry)
            here = here + ahead
            if num_slots > 1:
                # Where none is free, the last slot gets back what it has.
                top = jnp.minimum(top + 1, last_slot)
                slots = memory.write(slots, top, carry, has_free)
                positions = jax.lax.dynamic_update_index_in_dim(
                    positions, jnp.where(has_free, here, positions[top]), top, 0
                )
            return slots, positions, top, here, carry, runs + ahead

        inner = (slots, positions, top, positions[top], memory.read(slots, top), runs)
        slots, positions, top, _, carry, runs = jax.lax.while_loop(is_before, go_on, inner)
        loop = reverse_block(target * block, carry=carry, loop=loop)
        return slots, positions, jnp.where(positions[top] == target, top - 1, top), loop, runs

    num_runs = _jax.varying_like(jnp.int32(0), plan.top)
    state = (slots, _jax.replicated(plan.positions), plan.top, loop, num_runs)
    return jax.lax.fori_loop(0, num_blocks, one_block, state)[-2:]


class Plan(NamedTuple):
    """What the reversal knows of the schedule.

    Attributes:
        rows: `schedule.table` of it.
        positions: for each slot the block before which its carry stands, of those that the forward sweep filled.
        top: the last of these.
    """

    rows: Any
    positions: Any
    top: Any

    @classmethod
    def make(cls, num_blocks: int, num_slots: int) -> Plan:
        first = schedule.first_positions(num_blocks, num_slots)
        positions = jnp.asarray([*first, *[0] * (num_slots - len(first))], jnp.int32)
        return cls(jnp.asarray(schedule.table(num_blocks + 1, num_slots)), positions, jnp.int32(len(first) - 1))


def _buffer(length: int, aval: Any, number: int) -> Any:
    """An array to be written in place.

    The number, which must differ between buffers that live together, keeps XLA from making them as copies of one
    that then would live as long.
    """
    buffer = _jax.empty(length, aval)
    return buffer + jnp.asarray(number, aval.dtype) if is_float(aval) and number else buffer


class SlotMemory:
    """Reads and writes what is stored: for each leaf of the carry an array with one more axis, perhaps on the host."""

    def __init__(self, offload: bool):
        self._store = _jax.to_host if offload else lambda x: x
        self._load = _jax.to_device if offload else lambda x: x

    def make(self, num: int, avals: Sequence[Any]) -> list:
        return [self._store(_jax.empty(num, aval)) for aval in avals]

    def read(self, slots: list, i: Any) -> list:
        return [self._load(jax.lax.dynamic_index_in_dim(s, i, 0, keepdims=False)) for s in slots]

    def write(self, slots: list, i: Any, carry: list, condition: Any = True) -> list:
        """Put a carry into slot `i`, or leave what is there."""
        if condition is not True:
            carry = [jax.lax.select(condition, x, old) for x, old in zip(carry, self.read(slots, i), strict=True)]
        return [jax.lax.dynamic_update_index_in_dim(s, self._store(x), i, 0) for s, x in zip(slots, carry, strict=True)]
