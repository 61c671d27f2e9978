"""Pareto fronts of paths: the bytes that a path adds, its peak, its cost, and its steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ._option import Option
from ._pareto import front

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
        first_bytes = self.bytes[:, None]
        bytes, costs = (first_bytes + other.bytes).ravel(), (self.costs[:, None] + other.costs).ravel()
        peaks = np.maximum(self.peaks[:, None], first_bytes + other.peaks).ravel()
        rows = _front(bytes, peaks, costs)
        i, j = np.divmod(rows, len(other))

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
    rows = np.arange(len(costs)) if len(costs) <= 4 * _MAX_ROWS else _sample(bytes, peaks, costs)
    order = rows[front(costs[rows], bytes[rows], peaks[rows])]
    if len(order) > _MAX_ROWS:
        chosen = np.linspace(0, len(order) - 1, _MAX_ROWS - 2).astype(int)
        chosen = np.union1d(chosen, [np.argmin(bytes[order]), np.argmin(peaks[order])])
        order = order[chosen]
    return order


def _sample(bytes: np.ndarray, peaks: np.ndarray, costs: np.ndarray) -> np.ndarray:
    """The cheapest row of each bin, and the extremes."""
    bins = bins_of(bytes, _NUM_BINS) * (_NUM_BINS + 1) + bins_of(peaks, _NUM_BINS)
    least = np.full((_NUM_BINS + 1) ** 2, np.inf)
    np.minimum.at(least, bins, costs)
    rows = np.flatnonzero(costs == least[bins])
    rows = rows[np.lexsort((peaks[rows], bytes[rows]))]  # of equal costs the least bytes
    _, first = np.unique(bins[rows], return_index=True)
    return np.unique([*rows[first], _least(bytes, peaks, costs), _least(peaks, bytes, costs)])


def _least(values: np.ndarray, *others: np.ndarray) -> int:
    """The row of the least value; among equal ones that of the least of the others, in order."""
    rows = np.flatnonzero(values == values.min())
    return int(rows[np.lexsort([x[rows] for x in reversed(others)])[0]])


def bins_of(values: np.ndarray, num: int) -> np.ndarray:
    """Numbers of intervals of equal length, from 0 at the least value to `num` at the greatest."""
    low, high = values.min(), values.max()
    return ((values - low) * (num / max(high - low, 1e-30))).astype(int)
