"""The reversal of a loop from carries stored in slots, by the binomial schedule.

The forward sweep has stored the carry before some blocks of steps. The reversal runs forward from the nearest stored carry and stores
carries again in the slots that have become free. It is a nest of three loops without a branch,

    for each block of steps, from the last to the first:
        while the current carry is not the one before the block:
            run some steps; store the carry

so the size of the compiled program depends on neither length nor slots.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .. import _jax
from . import schedule


class SlotMemory:
    """Reads and writes slots: for each leaf of the carry an array with one more axis, on the device or on the host."""

    def __init__(self, offload: bool = False):
        self._store = _jax.to_host if offload else lambda x: x
        self._load = _jax.to_device if offload else lambda x: x

    def make(self, num: int, avals: Sequence[Any]) -> list:
        return [self._store(_jax.empty(num, aval)) for aval in avals]

    def read(self, slots: list, i: Any) -> list:
        return [self._load(jax.lax.dynamic_index_in_dim(s, i, 0, keepdims=False)) for s in slots]

    def write(self, slots: list, i: Any, carry: list, condition: Any = True) -> list:
        """Write a carry to slot `i` where the condition holds."""
        if condition is not True:
            carry = [jax.lax.select(condition, x, old) for x, old in zip(carry, self.read(slots, i), strict=True)]
        return [jax.lax.dynamic_update_index_in_dim(s, self._store(x), i, 0) for s, x in zip(slots, carry, strict=True)]


class Filled(NamedTuple):
    """The slots' contents by position, and the schedule of their further use.

    Attributes:
        rows: `schedule.table`.
        positions: for each slot, the block before which its carry is.
        top: the last slot in use. Positions rise up to it; those after it mean nothing.
    """

    rows: Any
    positions: Any
    top: Any

    @classmethod
    def by_schedule(cls, num_blocks: int, num_slots: int) -> Filled:
        """The slots after the forward sweep of a loop of known length."""
        first = schedule.first_positions(num_blocks, num_slots)
        positions = jnp.asarray([*first, *[0] * (num_slots - len(first))], jnp.int32)
        return cls(jnp.asarray(schedule.table(num_blocks + 1, num_slots)), positions, jnp.int32(len(first) - 1))


class _Outer(NamedTuple):
    """Between two blocks: the slots up to `top` hold carries before blocks that are still to be reversed."""

    slots: list
    positions: Any
    top: Any
    result: Any
    num_runs: Any  # blocks run ahead of their reversal, so far


class _Inner(NamedTuple):
    """On the way to a block: `carry` is the carry before block `block`, and slot `top` holds it or an earlier one."""

    slots: list
    positions: Any
    top: Any
    block: Any
    carry: list
    num_runs: Any


def reverse_blocks(
    num_blocks: Any,
    filled: Filled,
    slots: list,
    init: Any,
    advance: Callable,
    reverse_block: Callable,
    memory: SlotMemory | None = None,
) -> tuple[Any, Any]:
    """Reverse all blocks in turn, the last first.

    Args:
        num_blocks: may be traced.
        slots: for each leaf of the carry the stored values, as the forward sweep left them.
        init: the first value of the result.
        advance: ``(first block, end block, carry) -> carry``, before the end block.
        reverse_block: ``(block, carry before it, result) -> result``.
        memory: where slots are.

    Returns:
        The result, and the number of blocks run ahead of their reversal.
    """
    memory = memory or SlotMemory()
    num_slots = len(filled.positions)
    last_slot = jnp.int32(num_slots - 1)

    def approach(state: _Inner, target: Any) -> _Inner:
        """Run some blocks, as far as the schedule says, and store the carry if a slot is free."""
        # In terms of `schedule.split`: the first state is in slot `top`, which counts as free, and the steps to
        # reverse are those up to the target and the target itself, ahead + 1. `split` is defined from two slots on;
        # with one, its result is not used.
        free, ahead = num_slots - state.top, target - state.block
        has_free = free > 1
        if num_slots > 1:
            ahead = jnp.where(has_free, schedule.split(filled.rows, ahead + 1, jnp.maximum(free, 2)), ahead)
        block = state.block + ahead
        state = state._replace(
            block=block, carry=advance(state.block, block, state.carry), num_runs=state.num_runs + ahead
        )
        if num_slots == 1:
            return state

        # If none is free, the last slot is written with its own contents: a select is faster than a branch.
        top = jnp.minimum(state.top + 1, last_slot)
        position = jnp.where(has_free, block, state.positions[top])
        return state._replace(
            slots=memory.write(state.slots, top, state.carry, has_free),
            positions=jax.lax.dynamic_update_index_in_dim(state.positions, position, top, 0),
            top=top,
        )

    def one_block(n: Any, outer: _Outer) -> _Outer:
        # The last slot in use holds the latest stored carry before the target, since positions rise and all later
        # blocks are reversed.
        target = jnp.int32(num_blocks - 1 - n)
        carry = memory.read(outer.slots, outer.top)
        start = _Inner(outer.slots, outer.positions, outer.top, outer.positions[outer.top], carry, outer.num_runs)
        inner = jax.lax.while_loop(lambda i: i.block < target, lambda i: approach(i, target), start)
        result = reverse_block(target, inner.carry, outer.result)
        # The slot before the reversed block is free now.
        top = jnp.where(inner.positions[inner.top] == target, inner.top - 1, inner.top)
        return _Outer(inner.slots, inner.positions, top, result, inner.num_runs)

    # Inside a shard_map that checks types, and on an explicit mesh, a carry must have from the start the type it has
    # after a turn.
    num_runs = _jax.varying_like(jnp.int32(0), filled.top)
    outer = _Outer(slots, _jax.replicated(filled.positions), filled.top, init, num_runs)
    outer = jax.lax.fori_loop(0, num_blocks, one_block, outer)
    return outer.result, outer.num_runs
