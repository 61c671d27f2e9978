"""The reversal of a loop from slots, by a schedule of splits and leaves (see `schedule`).

The forward sweep has stored the carry before some steps. The reversal runs forward from the nearest stored carry and
stores carries again in the slots that have become free, until what is left before the last reversed step is a leaf. It
is a nest of loops without a branch, in which the body stands at four places,

    while steps are left:
        while they are not a leaf:
            store the carry
            for some steps: advance
        for all steps of the leaf but the last: keep
        at once: the last step of the leaf
        for all steps of the leaf but the last, in reverse: pull

so the size of the compiled program depends on neither length nor slots. `keep` stores what a step leaves for its
derivative in the free slots, `pull` differentiates it from there, and `at once` does both without storing.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .. import _jax
from .rows import SlotMemory
from .schedule import Schedule


class Filled(NamedTuple):
    """The slots' contents by position, and the schedule of their further use.

    Attributes:
        splits: a `schedule.SplitTable`.
        positions: for each slot, the step before which its carry is.
        top: the last slot in use. Positions rise up to it; those after it mean nothing.
        rows: for each slot, its row in the pools, 0 for the first; None if slot i is row i.
    """

    splits: Any
    positions: Any
    top: Any
    rows: Any = None

    def row(self, slot: Any) -> Any:
        return slot if self.rows is None else self.rows[slot]

    @classmethod
    def by_schedule(cls, schedule: Schedule, num_slots: int) -> Filled:
        """The slots after the forward sweep of a loop of known length."""
        first = schedule.positions
        positions = jnp.asarray([*first, *[0] * (num_slots - len(first))], jnp.int32)
        return cls(jax.tree.map(jnp.asarray, schedule.splits), positions, jnp.int32(len(first) - 1))


class Places(NamedTuple):
    """Functions to call at the four places where the body stands.

    Attributes:
        advance: ``(first step, end step, carry) -> carry``, before the end step.
        at_once: ``(step, carry before it, result) -> result``.
        keep: ``(step, carry before it) -> (carry, residuals)``; None if no leaf has more than one step.
        pull: ``(step, residuals, result) -> result``.
    """

    advance: Callable
    at_once: Callable
    keep: Callable | None = None
    pull: Callable | None = None


class _Outer(NamedTuple):
    """Between two leaves: the slots up to `top` hold carries before steps that are still to be reversed, the first
    `left` ones.
    """

    pools: list
    positions: Any
    top: Any
    left: Any
    result: Any
    num_ahead: Any  # runs ahead of the reversal, so far


class _Inner(NamedTuple):
    """State on the way to a leaf: `carry` is the carry before step `step`, which belongs to slot `top`.

    If it is not in this slot yet, ``positions[top]`` is not valid yet. `advance` is how far it goes from there; 0 if
    what is left is a leaf.
    """

    pools: list
    positions: Any
    top: Any
    step: Any
    carry: list
    advance: Any
    num_ahead: Any


def reverse_steps(
    num_steps: Any,
    filled: Filled,
    pools: list,
    first: list,
    init: Any,
    places: Places,
    slots: SlotMemory,
    schedule: Schedule | None = None,
) -> tuple[Any, Any]:
    """Reverse all steps, the last first.

    Args:
        num_steps: may be traced.
        pools: of `slots`, as the forward sweep left them.
        first: the carry before the first step.
        init: the first value of the result.
        schedule: says how often loops run, if that is known.

    Returns:
        The result, and the number of steps run ahead of their reversal.
    """

    def split(step: Any, left: Any, top: Any) -> Any:
        return filled.splits.split(left - step, slots.num - top)

    def approach(inner: _Inner, left: Any) -> _Inner:
        """Store the carry, and run as far as the schedule says."""
        # A carry that has just been read from its slot is written back: cheaper than a branch, or a select.
        pools = slots.write(inner.pools, filled.row(inner.top), inner.carry)
        positions = jax.lax.dynamic_update_index_in_dim(inner.positions, inner.step, inner.top, 0)
        step, top = inner.step + inner.advance, inner.top + 1
        carry = places.advance(inner.step, step, inner.carry)
        num_ahead = inner.num_ahead + inner.advance
        return _Inner(pools, positions, top, step, carry, split(step, left, top), num_ahead)

    def one_leaf(outer: _Outer) -> _Outer:
        # The last slot in use holds the latest stored carry, since positions rise and all later steps are reversed.
        step, left = outer.positions[outer.top], outer.left
        start = _Inner(
            outer.pools,
            outer.positions,
            outer.top,
            step,
            slots.read(outer.pools, filled.row(outer.top), first),
            split(step, left, outer.top),
            outer.num_ahead,
        )
        inner = jax.lax.while_loop(lambda i: i.advance > 0, lambda i: approach(i, left), start)
        pools, carry, result = inner.pools, inner.carry, outer.result
        if places.keep is None:
            result, left = places.at_once(inner.step, carry, result), left - 1
        else:
            pools, result, left = reverse_kept(inner.step, left, pools, carry, result)
        return _Outer(pools, inner.positions, inner.top - 1, left, result, inner.num_ahead)

    def reverse_kept(first: Any, left: Any, pools: list, carry: list, result: Any) -> tuple[list, Any, Any]:
        """Reverse the steps of a leaf, from `first` to ``left - 1``: the pools, the result, and how many steps are
        left.
        """
        keep, pull = places.keep, places.pull
        assert keep is not None and pull is not None

        def keep_one(loop: tuple[Any, list, list]) -> tuple[Any, list, list]:
            step, pools, carry = loop
            carry, residuals = keep(step, carry)
            return step + 1, slots.keep(pools, step - first, residuals), carry

        def pull_one(loop: tuple[Any, Any]) -> tuple[Any, Any]:
            result, n = loop[0], loop[1] - 1
            return pull(first + n, slots.kept(pools, n), result), n

        # What follows a loop is computed from its counter. With ``left - 1`` for `last`, what `at_once` computes from
        # its number alone, such as its element of xs, would be there, and take memory, while steps are kept. With
        # `first` for the steps left XLA would not see that the pools are written again only after the pulls, and copy
        # them.
        is_kept = lambda loop: _counted(loop[0] < left - 1, mean_kept)
        last, pools, carry = jax.lax.while_loop(is_kept, keep_one, (first, pools, carry))
        result = places.at_once(last, carry, result)
        # Found by trial: with the number first XLA left a gap as large as a leaf of the carry in one of 26 programs
        # (dropout).
        has_kept = lambda loop: _counted(loop[1] > 0, mean_kept)
        result, num_kept = jax.lax.while_loop(has_kept, pull_one, (result, last - first))
        return pools, result, first + num_kept

    num_leaves, mean_kept = None, None
    if schedule is not None and schedule.num_leaves:
        num_leaves = Fraction(schedule.num_leaves)
        mean_kept = Fraction(schedule.length, schedule.num_leaves) - 1

    # Inside a shard_map that checks types, and on an explicit mesh, a carry must have from the start the type it has
    # after a turn.
    num_ahead = _jax.varying_like(jnp.int32(0), filled.top)
    left = _jax.varying_like(jnp.int32(num_steps), filled.top)
    outer = _Outer(pools, _jax.replicated(filled.positions), filled.top, left, init, num_ahead)
    outer = jax.lax.while_loop(lambda o: _counted(o.left > 0, num_leaves), one_leaf, outer)
    return outer.result, outer.num_ahead


def _counted(condition: Any, runs: Fraction | None) -> Any:
    return condition if runs is None else _jax.counted(condition, runs)
