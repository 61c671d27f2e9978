"""When to store what: the schedule of reversing a loop with a bounded number of slots.

A slot holds the state (the carry) before some step, or, while nothing else needs it, what steps keep for their
derivatives (residuals). To reverse `l` steps of which the first state is at hand, with `s` slots free for them, that of
the first state included:

- If ``l <= m_s``, they are a *leaf*: run them once, keep the residuals of all but the last in the free slots, and
  reverse them without another run. A leaf of m steps keeps m - 1 residuals, since the last step is differentiated at
  once, and its first state needs no slot while the leaf is reversed: ``m_s = 1 + floor(s S / R)``, for S bytes of a
  carry and R bytes of residuals.
- Otherwise *split* them: advance `i` steps, store the state there, reverse the last `l - i` steps with the ``s - 1``
  slots that are left, then the first `i` with all `s` again. This runs `i` steps ahead of their reversal.

Leaves end a branch of the splits and nothing else does: to keep residuals first and to split what is left is never
better than to split first and to keep later, when the slots are free. The runs of the body ahead of the reversal, a(l,
s), are therefore

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
less than 0.5% for up to 1,000 steps. Small schedules are searched exactly.

In JAX the forward sweep is over before a cotangent exists: what follows the loop is one step more, the last to be
reached and the first to be reversed. The sweep stores carries only, with c slots the states before segments of n_c,
..., n_1 steps, each of which is reversed with as many slots as its number says. Each of the n steps runs once in the
sweep and once to be differentiated: ``2 n`` runs and the sum of ``a(n_s, s)``; in the binomial schedule this is
``t(n + 1, c) + n`` with ``t(l, s) = r l - beta(s + 1, r - 1)``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

_SEARCHED = 640  # segments (lengths times slots) up to which a schedule is searched exactly
_MOST_ENTRIES = 2**13  # of a table
_MOST_COLUMNS = 4096
_NO_RUNS = 2**50  # more than any


def beta(s: int, r: int) -> int:
    """The number of steps that `s` slots of carries can reverse with at most `r` runs of each ahead of its reversal."""
    return math.comb(s + r, s) if r >= 0 else 0


def repetitions(length: int, slots: int) -> int:
    """The least r for which ``beta(slots, r) >= length``."""
    # beta rises with r: double r until it is enough, then bisect.
    low, high = 0, 1
    while beta(slots, high) < length:
        low, high = high, 2 * high
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if beta(slots, middle) >= length else (middle + 1, high)
    return low


def slots_for(length: int, runs_ahead: int) -> int:
    """The least number of slots for a loop of `length` steps, none of which runs more often than this ahead of its
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
        before: for each column the one of the largest threshold up to ``t - 1``.
    """

    rows: Any
    before: Any

    def split(self, length: Any, slots: Any) -> Any:
        """How far to advance before the next state is stored; 0 for a leaf. For numbers and NumPy as well as for traced
        values.
        """
        xp: Any = np if isinstance(self.rows, np.ndarray) else jnp
        row = self.rows[slots]
        column = (row < length).sum()
        advance = xp.minimum(row[self.before[column]], length - self.rows[slots - 1, column - 1])
        return xp.where(column > 0, xp.maximum(advance, 1), 0)


class SearchedSplits(NamedTuple):
    """Splits of every segment of a short loop: ``[slots, length]``, int32, 0 for a leaf."""

    advances: Any

    def split(self, length: Any, slots: Any) -> Any:
        """As `SplitTable.split`."""
        return self.advances[slots, length]


class Schedule(NamedTuple):
    """How a loop is reversed.

    Attributes:
        splits: of its segments.
        segments: the lengths of the segments between the states that the forward sweep stores. The first is reversed
            with all slots, each further one with one slot less.
        num_ahead: runs of steps ahead of their reversal, those of the forward sweep excluded.
        num_leaves: how many leaves are reversed; the others of the steps are kept.
    """

    splits: SplitTable | SearchedSplits
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
    """The schedule with the fewest runs for a loop of `length` steps; `leaves` are ``m_0, m_1, ...`` up to all
    slots.
    """
    slots, candidates = len(leaves) - 1, []
    if length == 0:
        return Schedule(SearchedSplits(np.zeros((slots + 1, 1), np.int32)), (), 0, 0)
    if max(leaves) == 1:
        return _by_table(length, table(length, leaves, 1))
    if length * slots <= _SEARCHED:
        return _by_search(length, leaves)
    # None of the sets of thresholds is the best for all loops. Ties go to the smaller table.
    for thresholds in (2, 8, None):
        columns = _MOST_ENTRIES // len(leaves) if candidates else _MOST_COLUMNS
        if columns > 2:
            candidates.append(_by_table(length, table(length, leaves, thresholds, columns)))
    return min(candidates, key=lambda s: s.num_runs)


def table(length: int, leaves: Sequence[int], per_unit: int | None = None, columns: int = _MOST_COLUMNS) -> SplitTable:
    """The table for loops of up to `length` steps, over thresholds at distances of ``1 / per_unit``, or over all that
    matter.

    With fewer `columns` the schedules of longer loops are not quite the best.
    """
    m = np.minimum(np.asarray(leaves, np.int64), length)
    slots, kappa = len(m) - 1, _kappas(m)
    thresholds, rows, before = [0.0], [m], [0]
    pending = sorted(set(kappa[1:].tolist())) if per_unit is None else [1.0]

    while slots > 1 and rows[-1][1:].sum() < length and len(rows) < columns:
        t = pending.pop(0)
        if per_unit is None:
            bisected = np.searchsorted(pending, t + 1)
            if bisected == len(pending) or pending[bisected] > t + 1:
                pending.insert(int(bisected), t + 1)
        else:
            pending.append(1 + len(rows) / per_unit)
        lower = int(np.searchsorted(thresholds, t - 1 + _EPSILON, side="right")) - 1

        splits = t + _EPSILON >= kappa
        row = np.minimum(_chains(splits, np.where(splits, rows[lower], m)), length)
        thresholds.append(t)
        rows.append(row)
        before.append(lower)

    # For longer segments the last part is as long as the thresholds allow.
    rows.append(np.where(np.arange(slots + 1) > 0, length, m))
    before.append(len(rows) - 1)
    return SplitTable(np.stack(rows, 1).astype(np.int32), np.asarray(before, np.int32))


_EPSILON = 1e-7  # by which thresholds that are equal may differ


def _kappas(m: np.ndarray) -> np.ndarray:
    """The thresholds from which on a leaf is split; infinite for the first, which has no slot."""
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
    rows, walk = splits.rows, SplitWalk(splits)
    slots = len(rows) - 1
    sums = np.cumsum(rows[1:], 0, dtype=np.int64)  # row s - 1: of 1 to s slots
    column = int((sums[-1] < length).sum())

    # All segments but one are as long as this threshold or the one before it allows.
    segments, left = [], length
    for s in range(slots, 0, -1):
        if left == 0:
            break
        others = sums[s - 2, column - 1] if s > 1 and column else 0
        segments.append(int(min(rows[s, column], left - others)))
        left -= segments[-1]
    counts = [walk.counts(n, slots - i) for i, n in enumerate(segments)]
    return Schedule(splits, tuple(segments), sum(a for a, _ in counts), sum(b for _, b in counts))


class SplitWalk:
    """Counts runs ahead, and leaves, without following every split.

    Both parts of a segment of just ``L_s(t)`` steps are of this kind, too: a table has their counts. Of any other
    segment one part is, so that the walk follows the other.
    """

    def __init__(self, splits: SplitTable):
        self._splits = splits
        rows, before = splits.rows.astype(np.int64), splits.before
        self._ahead, self._leaves = [np.zeros(len(rows), np.int64)], [np.ones(len(rows), np.int64)]
        for column in range(1, rows.shape[1] - 1):
            is_split, lower = rows[:, column] > rows[:, 0], before[column]
            ahead = _chains(is_split, np.where(is_split, rows[:, lower] + self._ahead[lower], 0))
            num = _chains(is_split, np.where(is_split, self._leaves[lower], 1))
            # Of segments beyond the loop's length: they are not met.
            self._ahead.append(np.minimum(ahead, _NO_RUNS))
            self._leaves.append(np.minimum(num, _NO_RUNS))

    def counts(self, length: int, slots: int) -> tuple[int, int]:
        """Runs ahead, and leaves, of a segment."""
        rows, before = self._splits
        last, num_ahead, num_leaves = rows.shape[1] - 1, 0, 0
        while True:
            column = int((rows[slots] < length).sum())
            if column < last and length == rows[slots, column]:
                return num_ahead + self._num_ahead(slots, column), num_leaves + self._num_leaves(slots, column)
            if column == 0:
                return num_ahead, num_leaves + 1
            if slots == 1:  # the last steps are split off, as many as no slot allows, until a leaf is left
                whole, part = int(rows[1, 0]), int(rows[0, 0])
                times = -((whole - length) // part)
                return num_ahead + times * length - part * times * (times + 1) // 2, num_leaves + times + 1

            advance = int(self._splits.split(length, slots))
            num_ahead, lower = num_ahead + advance, before[column]
            if advance == rows[slots, lower] and lower != last:
                exact, rest = (slots, lower), (length - advance, slots - 1)
            elif length - advance == rows[slots - 1, column - 1]:
                exact, rest = (slots - 1, column - 1), (advance, slots)
            else:  # a single step
                exact, rest = (0, 0), (length - 1, slots - 1)
            num_ahead, num_leaves = num_ahead + self._num_ahead(*exact), num_leaves + self._num_leaves(*exact)
            length, slots = rest

    def _num_ahead(self, slots: int, column: int) -> int:
        return int(self._ahead[column][slots])

    def _num_leaves(self, slots: int, column: int) -> int:
        return int(self._leaves[column][slots])


def _by_search(length: int, leaves: Sequence[int]) -> Schedule:
    slots = len(leaves) - 1
    ahead = np.full((slots + 1, length + 1), _NO_RUNS, np.int64)
    num = np.ones((slots + 1, length + 1), np.int64)
    advances = np.zeros((slots + 1, length + 1), np.int32)
    ahead[0, : leaves[0] + 1] = 0
    for s in range(1, slots + 1):
        ahead[s, : leaves[s] + 1] = 0
        for n in range(leaves[s] + 1, length + 1):
            i = np.arange(1, n)
            costs = i + ahead[s - 1, n - i] + ahead[s, i]
            i = advances[s, n] = 1 + int(costs.argmin())
            ahead[s, n] = costs[i - 1]
            num[s, n] = num[s - 1, n - i] + num[s, i]

    # The fewest runs ahead of the last n steps if s segments are theirs, and the length of the first of these.
    best, firsts = np.where(np.arange(length + 1) > 0, _NO_RUNS, 0), [[0] * (length + 1)]
    for s in range(1, slots + 1):
        costs = [ahead[s, 1 : n + 1] + best[n - 1 :: -1] for n in range(1, length + 1)]
        firsts.append([0, *(1 + int(c.argmin()) for c in costs)])
        best = np.asarray([0, *(c.min() for c in costs)])
    segments, left, num_leaves = [], length, 0
    for s in range(slots, 0, -1):
        if left:
            segments.append(firsts[s][left])
            left -= segments[-1]
            num_leaves += int(num[s, segments[-1]])
    return Schedule(SearchedSplits(advances), tuple(segments), int(best[length]), num_leaves)


# -- lengths of nested loops -------------------------------------------------------------------------------------


def nested_lengths(length: int, levels: int) -> tuple[int, ...]:
    """The lengths of nested loops, outermost first, which store the fewest states: the least sum.

    Their product is at most `length`; what it lacks is less than the product of all but the first. Lengths that divide
    what they are of are preferred where the sum is no more than a twentieth larger: a remainder costs a copy of its
    part.
    """
    if levels == 1 or length < 4:
        return (length,)
    # Of d factors with the product T the sum is least if all are T**(1/d). One turn of the outermost loop then has T
    # / T**(1/d) steps: whole numbers near it are tried, and divisors.
    ideal = length ** ((levels - 1) / levels)
    low, high = max(1, int(ideal * 0.7)), min(length, int(ideal * 1.45) + 2)

    def states(inner: int) -> float:
        rest = _ideal_sum(inner, levels - 1)
        return (length // inner + (length % inner > 0) + rest) * (1.05 if length % inner else 1)

    candidates: Sequence[int] = range(low, high + 1)
    # Of very long loops a sample, and the divisors, which a sample would miss.
    if len(candidates) > 10_000:
        candidates = [
            *range(low, high + 1, len(candidates) // 10_000),
            *(d for d in _divisors(length) if low <= d <= high),
        ]
    rest = nested_lengths(min(candidates, key=states), levels - 1)
    return (length // math.prod(rest), *rest)


def _ideal_sum(length: int, levels: int) -> float:
    return levels * length ** (1 / levels)


def _divisors(n: int) -> list[int]:
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})
