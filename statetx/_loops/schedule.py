"""Schedule of the reversal of a loop with a bounded number of slots.

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
0.01% in the mean, and at most 3% in short loops.

In JAX the forward sweep is over before a cotangent exists: what follows the loop is one step more, the last to be
reached and the first to be reversed. The sweep stores carries only, with c slots the states before segments of n_c,
..., n_1 steps, each of which is reversed with as many slots as its number says. Each of the n steps runs once in the
sweep and once to be differentiated: ``2 n`` runs and the sum of ``a(n_s, s)``; in the binomial schedule this is
``t(n + 1, c) + n`` with ``t(l, s) = r l - beta(s + 1, r - 1)``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

_MOST_ENTRIES = 2**13  # of a table
_MOST_COLUMNS = 4096


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
        """Steps to advance before the next state is stored; 0 for a leaf. For numbers and NumPy as well as for traced
        values.
        """
        xp: Any = np if isinstance(self.rows, np.ndarray) else jnp
        row = self.rows[slots]
        column = (row < length).sum()
        advance = xp.minimum(row[self.before[column]], length - self.rows[slots - 1, column - 1])
        return xp.where(column > 0, xp.maximum(advance, 1), 0)


class Schedule(NamedTuple):
    """Order in which a loop is reversed.

    Attributes:
        splits: of its segments.
        segments: the lengths of the segments between the states that the forward sweep stores. The first is reversed
            with all slots, each further one with one slot less.
        num_ahead: runs of steps ahead of their reversal, those of the forward sweep excluded.
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
    rows, before = [m], [0]

    while slots > 1 and rows[-1][1:].sum() < length and len(rows) < columns:
        t, lower = 1 + (len(rows) - 1) / per_unit, max(0, len(rows) - per_unit)
        splits = t + _EPSILON >= kappa
        rows.append(np.minimum(_chains(splits, np.where(splits, rows[lower], m)), length))
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
    rows = splits.rows
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
    num_ahead, num_leaves = runs_of(splits, [(n, slots - i) for i, n in enumerate(segments)])
    return Schedule(splits, tuple(segments), num_ahead, num_leaves)


def runs_of(splits: SplitTable, segments: Iterable[tuple[int, int]]) -> tuple[int, int]:
    """Runs ahead, and leaves, of segments, each given by its length and its slots.

    Segments of just ``L_s(t)`` steps recur: both of their parts are of this kind, and one part of any other.
    """
    known: dict[tuple[int, int], tuple[int, int]] = {}

    def count(segment: tuple[int, int]) -> tuple[int, int]:
        pending = [segment]
        while pending:
            length, slots = pending[-1]
            advance = int(splits.split(length, slots)) if slots else 0
            if advance == 0:
                known[pending.pop()] = 0, 1
            elif slots == 1:  # the last steps are split off one by one, until a leaf is left
                times = length - int(splits.rows[1, 0])
                known[pending.pop()] = times * length - times * (times + 1) // 2, times + 1
            else:
                parts = (advance, slots), (length - advance, slots - 1)
                if new := [part for part in parts if part not in known]:
                    pending += new
                else:
                    (ahead, leaves), (rest_ahead, rest_leaves) = (known[part] for part in parts)
                    known[pending.pop()] = advance + ahead + rest_ahead, leaves + rest_leaves
        return known[segment]

    counts = [count(segment) for segment in segments]
    return sum(ahead for ahead, _ in counts), sum(leaves for _, leaves in counts)


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
    # / T**(1/d) steps: whole numbers near it are tried.
    ideal = length ** ((levels - 1) / levels)
    low, high = max(1, int(ideal * 0.7)), min(length, int(ideal * 1.45) + 2)

    def states(inner: int) -> float:
        rest = (levels - 1) * inner ** (1 / (levels - 1))  # if they are equal
        return (length // inner + (length % inner > 0) + rest) * (1.05 if length % inner else 1)

    rest = nested_lengths(min(range(low, high + 1), key=states), levels - 1)
    return (length // math.prod(rest), *rest)
