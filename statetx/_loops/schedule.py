"""Reversal of a loop with a bounded number of slots: its schedule, its run.

A slot holds the state (the carry) before some step, or, while nothing else needs it, residuals of steps. To reverse `l`
steps from a known first state, with `s` slots free for them, the first state's included:

- If ``l <= m_s``, they are a *leaf*: run them once, keep the residuals of all but the last in the free slots, and
  reverse them without another run. A leaf of m steps keeps m - 1 residuals, since the last step is differentiated at
  once, and its first state needs no slot while the leaf is reversed: ``m_s = 1 + floor(s S / R)``, for S bytes of a
  carry and R bytes of residuals.
- Otherwise *split* them: advance `i` steps, store the state there, reverse the last `l - i` steps with the ``s - 1``
  remaining slots, then the first `i` with all `s` again. This runs `i` steps ahead of their reversal.

Only leaves end a branch of the splits: to keep residuals first and to split the remaining steps is never better than to
split first and to keep later, when the slots are free. The runs of the body ahead of the reversal, a(l, s), are
therefore

    a(l, s) = 0 if l <= m_s, else min over i of  i + a(l - i, s - 1) + a(i, s).

**Thresholds.** Let ``L_s(t)`` be the longest segment that it pays to reverse if one more step in it may cost up to `t`
runs ahead. In the first part of a split each step has been run ahead once, so that `t - 1` are left for it:

    L_s(t) = m_s                          if t < kappa_s,
             L_s(t - 1) + L_{s-1}(t)      otherwise,

where ``kappa_s = 1 + min over 1 <= j <= s of (m_s - m_{s-j}) / (m_{s-1} + ... + m_{s-j})`` is the price of a step at
which a leaf of m_s is first split: by j splits at once it becomes leaves of m_s, m_{s-1}, ..., m_{s-j}, for ``j m_s``
steps ahead less those that the leaf would not have run. A segment of l steps is split so that both parts are of the
least t with ``L_s(t) >= l``: ``i = min(L_s(t - 1), l - L_{s-1}(t'))``, where t' is the threshold before t. The splits
are found in a table of L over some thresholds, on the host and in the compiled program, with one row to read.

Without residuals in slots m_s = 1, kappa_s = 1, the thresholds are whole numbers r, and ``L_s(r) = C(s + r, s)``: the
binomial schedule (Griewank and Walther 2000, Algorithm 799: revolve), which is optimal. With residuals (Maddison 2024,
arXiv 2305.09568, stores both) the table errs upward, since the runs of a segment are not quite convex in its length: by
0.01% in the mean, and at most 3% in short loops.

In JAX the forward sweep is over before a cotangent exists: the program after the loop counts as one step more, the last
to be reached and the first to be reversed. The sweep stores carries only, with c slots the states before segments of
n_c, ..., n_1 steps; segment n_s is reversed with s slots. Each of the n steps runs once in the sweep and once to be
differentiated: ``2 n`` runs and the sum of ``a(n_s, s)``; in the binomial schedule this is ``t(n + 1, c) + n`` with
``t(l, s) = r l - beta(s + 1, r - 1)``.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .. import _jax
from .rows import SlotMemory

_MOST_ENTRIES = 2**13  # of a table
_MOST_COLUMNS = 4096


def beta(s: int, r: int) -> int:
    """The number of steps that `s` slots of carries can reverse with at most `r` runs of each ahead of its reversal."""
    return math.comb(s + r, s) if r >= 0 else 0


def repetitions(length: int, slots: int) -> int:
    """The least r with ``beta(slots, r) >= length``."""
    most = next(2**n for n in itertools.count() if beta(slots, 2**n) >= length)
    return bisect.bisect_left(range(most), length, key=lambda r: beta(slots, r))


def slots_for(length: int, runs_ahead: int) -> int:
    """The least number of slots for a loop of `length` steps if no step may run more often than this ahead of its
    reversal.
    """
    slots = 1
    while beta(slots, runs_ahead) < length + 1:
        slots += 1
    return slots


def num_evaluations(length: int, slots: int) -> int:
    """The fewest runs of the body for a loop and its reversal, with this many slots of carries, the initial state's
    counted.
    """
    r = repetitions(length + 1, slots)
    return r * (length + 1) - beta(slots + 1, r - 1) + length


# -- splits ------------------------------------------------------------------------------------------------------


class SplitTable(NamedTuple):
    """Splits by thresholds.

    Attributes:
        rows: ``L_s(t)`` at ``[s, column of t]``, int32, at most the loop's length. Column 0 holds the leaves, ``m_s``;
            the last one is for every t beyond the others.
        lower: for each column the one of the largest threshold up to ``t - 1``.
    """

    rows: Any
    lower: Any

    def split(self, length: Any, slots: Any) -> Any:
        """Steps to advance before the next state is stored; 0 for a leaf. For numbers and NumPy as well as for traced
        values.
        """
        xp: Any = np if isinstance(self.rows, np.ndarray) else jnp
        row = self.rows[slots]
        column = (row < length).sum()
        advance = xp.minimum(row[self.lower[column]], length - self.rows[slots - 1, column - 1])
        return xp.where(column > 0, xp.maximum(advance, 1), 0)


class Schedule(NamedTuple):
    """Order of the reversal of a loop.

    Attributes:
        splits: of its segments.
        segments: the lengths of the segments between the states that the forward sweep stores. The first is reversed
            with all slots, each further one with one slot less.
        num_ahead: runs of steps ahead of their reversal, without the forward sweep's.
        num_leaves: how many leaves are reversed; the others of the steps are kept.
    """

    splits: SplitTable
    segments: tuple[int, ...]
    num_ahead: int
    num_leaves: int

    @property
    def length(self) -> int:
        return sum(self.segments)

    @property
    def num_runs(self) -> int:
        """Runs of the body: in the forward sweep, ahead, and to be differentiated."""
        return 2 * self.length + self.num_ahead

    @property
    def positions(self) -> list[int]:
        """The steps before which the forward sweep stores the state."""
        return [sum(self.segments[:i]) for i in range(len(self.segments))]


def leaves(slots: int, numerator: int = 0, denominator: int = 1) -> tuple[int, ...]:
    """``m_s`` for 0 to `slots` slots, if a slot holds `numerator / denominator` steps' residuals; by default none."""
    return tuple([1 + s * numerator // denominator for s in range(slots + 1)])


@functools.lru_cache(512)
def schedule(length: int, leaves: tuple[int, ...]) -> Schedule:
    """The schedule for a loop of `length` steps; `leaves` are ``m_0, m_1, ...`` up to all slots."""
    splits = table(length, leaves, 1 if max(leaves) == 1 else 8)
    return _by_table(length, splits if splits.rows.size <= _MOST_ENTRIES else table(length, leaves, 1))


def table(length: int, leaves: Sequence[int], per_unit: int, columns: int = _MOST_COLUMNS) -> SplitTable:
    """The table for loops of up to `length` steps, over thresholds at distances of ``1 / per_unit`` from 1 on.

    With fewer `columns` the schedules of longer loops are not quite the best.
    """
    m = np.minimum(np.asarray(leaves, np.int64), max(length, 1))
    slots, kappa = len(m) - 1, _kappas(m)
    rows, lower = [m], [0]

    while slots > 1 and rows[-1][1:].sum() < length and len(rows) < columns:
        t, lower_column = 1 + (len(rows) - 1) / per_unit, max(0, len(rows) - per_unit)
        splits = t + _EPSILON >= kappa
        rows.append(np.minimum(_chains(splits, np.where(splits, rows[lower_column], m)), length))
        lower.append(lower_column)

    # For longer segments the last part is as long as the thresholds allow.
    rows.append(np.where(np.arange(slots + 1) > 0, length, m))
    lower.append(len(rows) - 1)
    return SplitTable(np.stack(rows, 1).astype(np.int32), np.asarray(lower, np.int32))


_EPSILON = 1e-7  # equal thresholds may differ so much


def _kappas(m: np.ndarray) -> np.ndarray:
    """The least thresholds at which a leaf is split; infinite for the first, which has no slot."""
    kappa, sums = np.full(len(m), np.inf), np.concatenate([[0], np.cumsum(m)])
    for s in range(1, len(m)):
        # Entry i is for j = s - i.
        kappa[s] = 1 + ((m[s] - m[:s]) / (sums[s] - sums[:s])).min()
    return np.round(kappa, 9)


def _chains(continues: np.ndarray, values: np.ndarray) -> np.ndarray:
    """``x[s] = values[s] + (x[s - 1] if continues[s] else 0)``."""
    sums = np.cumsum(values)
    starts = np.maximum.accumulate(np.where(continues, 0, np.arange(len(values))))
    return sums - (sums - values)[starts]


def _by_table(length: int, splits: SplitTable) -> Schedule:
    rows = splits.rows
    slots = len(rows) - 1
    sums = np.cumsum(rows[1:], 0, dtype=np.int64)  # row s - 1: of 1 to s slots
    column = int((sums[-1] < length).sum())

    # All segments but one are as long as this threshold or the one before it allows.
    segments, num_left = [], length
    for s in range(slots, 0, -1):
        if num_left == 0:
            break
        least_remaining = sums[s - 2, column - 1] if s > 1 and column else 0
        segments.append(int(min(rows[s, column], num_left - least_remaining)))
        num_left -= segments[-1]
    num_ahead, num_leaves = runs_of(splits, [(n, slots - i) for i, n in enumerate(segments)])
    return Schedule(splits, tuple(segments), num_ahead, num_leaves)


def runs_of(splits: SplitTable, segments: Iterable[tuple[int, int]]) -> tuple[int, int]:
    """Runs ahead, and leaves, of segments, each given by its length and its slots.

    Segments of just ``L_s(t)`` steps recur: both of their parts are of this kind, and one part of any other.
    """
    counted: dict[tuple[int, int], tuple[int, int]] = {}

    def count(segment: tuple[int, int]) -> tuple[int, int]:
        pending = [segment]
        while pending:
            length, slots = pending[-1]
            advance = int(splits.split(length, slots)) if slots else 0
            if advance == 0:
                counted[pending.pop()] = 0, 1
            elif slots == 1:  # the last steps are split off one by one, until a leaf is left
                times = length - int(splits.rows[1, 0])
                counted[pending.pop()] = times * length - times * (times + 1) // 2, times + 1
            else:
                parts = (advance, slots), (length - advance, slots - 1)
                if new := [part for part in parts if part not in counted]:
                    pending += new
                else:
                    (ahead, leaves), (rest_ahead, rest_leaves) = (counted[part] for part in parts)
                    counted[pending.pop()] = advance + ahead + rest_ahead, leaves + rest_leaves
        return counted[segment]

    counts = [count(segment) for segment in segments]
    return sum(ahead for ahead, _ in counts), sum(leaves for _, leaves in counts)


# -- lengths of nested loops -------------------------------------------------------------------------------------


def nested_lengths(length: int, levels: int) -> tuple[int, ...]:
    """The lengths of nested loops, outermost first, which store the fewest states: the least sum.

    Their product is at most `length`; the remainder is less than the product of all but the first. Divisors are
    preferred where the sum is no more than a twentieth larger: a remainder costs a copy of its part.
    No inner loop has one step, which would only add runs: there may be fewer levels.
    """
    levels = min(levels, length.bit_length() - 1)
    if levels <= 1:
        return (length,)
    # Of d factors with the product T the sum is least if all are T**(1/d). One turn of the outermost loop then has T
    # / T**(1/d) steps: whole numbers near it are tried.
    ideal = length ** ((levels - 1) / levels)
    low, high = max(1, int(ideal * 0.7)), min(length, int(ideal * 1.45) + 2)

    def states(inner: int) -> float:
        inner_sum = (levels - 1) * inner ** (1 / (levels - 1))  # if they are equal
        return (length // inner + (length % inner > 0) + inner_sum) * (1.05 if length % inner else 1)

    inner_lengths = [n for n in nested_lengths(min(range(low, high + 1), key=states), levels - 1) if n > 1]
    return (length // math.prod(inner_lengths), *inner_lengths)


# -- the reversal by a schedule ----------------------------------------------------------------------------------------

# The forward sweep has stored the carry before some steps. The reversal runs forward from the nearest stored carry and
# stores carries again in the slots that have become free, until the steps before the last reversed one are a leaf. It
# is a nest of loops without a branch, with the body at four places,
#
#     while steps are left:
#         while they are not a leaf:
#             store the carry
#             for some steps: advance
#         for all steps of the leaf but the last: keep
#         at once: the last step of the leaf
#         for all steps of the leaf but the last, in reverse: pull
#
# so the size of the compiled program depends on neither length nor slots. `keep` stores a step's residuals in the free
# slots, `pull` differentiates it from there, and `at once` does both without storing.


class Filled(NamedTuple):
    """The slots' contents by position, and the schedule of their further use.

    Attributes:
        splits: a `SplitTable`.
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
    """Functions to call at the four places of the body.

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
    """State between two leaves: the slots up to `top` hold carries before steps that are still to be reversed, the
    first `num_left` ones.
    """

    pools: list
    positions: Any
    top: Any
    num_left: Any
    result: Any
    num_ahead: Any  # runs ahead of the reversal, so far


class _Inner(NamedTuple):
    """State on the way to a leaf: `carry` is the carry before step `step`, which belongs to slot `top`.

    If it is not in this slot yet, ``positions[top]`` is not valid yet. `advance` is how far it goes from there; 0 if
    the remaining steps are a leaf.
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

    def split(step: Any, num_left: Any, top: Any) -> Any:
        return filled.splits.split(num_left - step, slots.num - top)

    def approach(inner: _Inner, num_left: Any) -> _Inner:
        """Store the carry, and run as far as the schedule says."""
        # A carry that has just been read from its slot is written back: cheaper than a branch, or a select.
        pools = slots.write(inner.pools, filled.row(inner.top), inner.carry)
        positions = jax.lax.dynamic_update_index_in_dim(inner.positions, inner.step, inner.top, 0)
        step, top = inner.step + inner.advance, inner.top + 1
        carry = places.advance(inner.step, step, inner.carry)
        num_ahead = inner.num_ahead + inner.advance
        return _Inner(pools, positions, top, step, carry, split(step, num_left, top), num_ahead)

    def one_leaf(outer: _Outer) -> _Outer:
        # The last slot in use holds the latest stored carry, since positions rise and all later steps are reversed.
        step, num_left = outer.positions[outer.top], outer.num_left
        start = _Inner(
            outer.pools,
            outer.positions,
            outer.top,
            step,
            slots.read(outer.pools, filled.row(outer.top), first),
            split(step, num_left, outer.top),
            outer.num_ahead,
        )
        inner = jax.lax.while_loop(lambda i: i.advance > 0, lambda i: approach(i, num_left), start)
        pools, carry, result = inner.pools, inner.carry, outer.result
        if places.keep is None:
            result, num_left = places.at_once(inner.step, carry, result), num_left - 1
        else:
            pools, result, num_left = reverse_kept(inner.step, num_left, pools, carry, result)
        return _Outer(pools, inner.positions, inner.top - 1, num_left, result, inner.num_ahead)

    def reverse_kept(first: Any, num_left: Any, pools: list, carry: list, result: Any) -> tuple[list, Any, Any]:
        """Reverse the steps of a leaf, from `first` to ``num_left - 1``: the pools, the result, and how many steps are
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

        # `last` is the loop's counter. With ``num_left - 1`` in its place, XLA would compute the values that `at_once`
        # needs from the number alone, such as its element of xs, while steps are kept, and they would take memory.
        # With `first` for the steps left XLA would not see that the pools are written again only after the pulls, and
        # copy them.
        is_kept = lambda loop: _counted(loop[0] < num_left - 1, mean_kept)
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
    num_left = _jax.varying_like(jnp.int32(num_steps), filled.top)
    outer = _Outer(pools, _jax.replicated(filled.positions), filled.top, num_left, init, num_ahead)
    has_left = _jax.of_slots(lambda o: _counted(o.num_left > 0, num_leaves), "gradient")
    outer = jax.lax.while_loop(has_left, one_leaf, outer)
    return outer.result, outer.num_ahead


def _counted(condition: Any, runs: Fraction | None) -> Any:
    return condition if runs is None else _jax.counted(condition, runs)
