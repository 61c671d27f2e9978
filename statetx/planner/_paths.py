"""Pareto fronts of paths: the bytes that a path adds, its peak, its cost, and its steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ._option import Option

_MAX_ROWS = 256  # of a composed table: two of these have 65,536 pairs
_NUM_BINS = 40  # by bytes, and by peak, of a table that is sampled

Steps = list[tuple[int, Option]]
"""The regions of a path: the first equation of each, relative to the path's, and its option."""


class Paths:
    """A Pareto front of paths over some equations.

    Attributes:
        bytes: added for later regions.
        peaks: above the bytes of earlier regions.
        costs: of recomputation.
        steps: of a row.
    """

    def __init__(self, bytes: np.ndarray, peaks: np.ndarray, costs: np.ndarray, steps: Callable[[int], Steps]):
        self.bytes, self.peaks, self.costs, self.steps = bytes, peaks, costs, steps

    def __len__(self) -> int:
        return len(self.bytes)

    @classmethod
    def of_options(cls, options: Sequence[Option], out_bytes: int, cotangent_bytes: int) -> Paths:
        """One region, as in `_layout.Region`."""
        saved = np.array([o.saved_bytes for o in options], float)
        peaks = saved + cotangent_bytes + np.array([o.backward_bytes for o in options], float)
        return cls(saved + out_bytes, peaks, np.array([o.cost for o in options], float), lambda i: [(0, options[i])])

    @classmethod
    def empty(cls) -> Paths:
        """The path of no equations."""
        return cls(np.zeros(1), np.zeros(1), np.zeros(1), lambda i: [])

    def then(self, other: Paths, offset: int) -> Paths:
        """Paths of this table followed by paths of another, which begins `offset` equations later."""
        i, j = (x.ravel() for x in np.indices((len(self), len(other))))
        bytes, costs = self.bytes[i] + other.bytes[j], self.costs[i] + other.costs[j]
        peaks = np.maximum(self.peaks[i], self.bytes[i] + other.peaks[j])
        rows = _front(bytes, peaks, costs)
        i, j = i[rows], j[rows]

        def steps(row: int) -> Steps:
            return [*self.steps(int(i[row])), *((offset + start, option) for start, option in other.steps(int(j[row])))]

        return Paths(bytes[rows], peaks[rows], costs[rows], steps)

    @classmethod
    def union(cls, tables: Sequence[Paths]) -> Paths:
        """The front of several tables over the same equations."""
        if len(tables) == 1:
            return tables[0]
        number = np.concatenate([np.full(len(t), n) for n, t in enumerate(tables)])
        row = np.concatenate([np.arange(len(t)) for t in tables])
        bytes, peaks, costs = (np.concatenate([getattr(t, x) for t in tables]) for x in ("bytes", "peaks", "costs"))
        rows = _front(bytes, peaks, costs)
        return cls(
            bytes[rows], peaks[rows], costs[rows], lambda n: tables[int(number[rows[n]])].steps(int(row[rows[n]]))
        )


def _front(bytes: np.ndarray, peaks: np.ndarray, costs: np.ndarray) -> np.ndarray:
    """The rows that no other dominates, by ascending cost; of too many a sample, with the least of each number."""
    order = np.lexsort((peaks, bytes, costs))
    if len(order) > 4 * _MAX_ROWS:
        # The cheapest row of each bin, and the extremes.
        bins = _bins(bytes) * (_NUM_BINS + 1) + _bins(peaks)
        _, first = np.unique(bins[order], return_index=True)
        extremes = [np.lexsort((costs, peaks, bytes))[0], np.lexsort((costs, bytes, peaks))[0]]
        is_kept = np.zeros(len(order), bool)
        is_kept[order[first]] = is_kept[extremes] = True
        order = order[is_kept[order]]

    # A row is dominated by an earlier one with no more bytes and no higher peak.
    b, p = bytes[order], peaks[order]
    dominates = (b[:, None] <= b) & (p[:, None] <= p)
    order = order[~np.triu(dominates, 1).any(0)]
    if len(order) > _MAX_ROWS:
        chosen = np.linspace(0, len(order) - 1, _MAX_ROWS - 2).astype(int)
        chosen = np.union1d(chosen, [np.argmin(bytes[order]), np.argmin(peaks[order])])
        order = order[chosen]
    return order


def _bins(values: np.ndarray) -> np.ndarray:
    low, high = values.min(), values.max()
    return ((values - low) * (_NUM_BINS / max(high - low, 1e-30))).astype(int)
