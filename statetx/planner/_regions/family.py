"""The cheapest path through the regions of a program within a limit of bytes: a dynamic program over the cut points."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from .._treatments.treatment import Option, Treatment, front
from .layout import Layout, Region

_MAX_STATES = 768  # pairs of bytes and cost that the dynamic program follows
_NUM_BINS = 1024  # of costs, before pairs are sorted

Choice = tuple[Layout, list[Option]]


def cost_of(choice: Choice) -> float:
    return sum(option.cost for option in choice[1])


class Family:
    """The regions of a program, or variants of them, with at least one path from its first equation to its last.

    The compiled program differs from the model in another way for variants, so a search corrects the model for each
    family.

    Args:
        num: equations of the program.
        arcs: that end at each cut point: (start, region), or (start, (periods, number)) for a number of equal periods.
        layout_of: a partition by its cuts.
        treatment: of all regions; None for the regions themselves.
    """

    def __init__(
        self,
        num: int,
        arcs: dict[int, list[Arc]],
        layout_of: Callable[[Sequence[int]], Layout],
        treatment: type[Treatment] | None = None,
    ):
        self._num, self._layout_of, self.treatment = num, layout_of, treatment
        self._arcs = sorted(arcs.items())
        everything = [arc for _, row in self._arcs for _, arc in row]
        regions = [r for arc in everything for r in ([arc] if isinstance(arc, Region) else arc[0].regions)]
        self._fronts = list({id(r.front): r.front for r in regions}.values())
        self._limits: dict[float, Choice | None] = {}
        self._versions: list[int] | None = None
        self._tables: list[tuple[int, list[tuple[int, Paths]]]] = []

    def _incoming(self) -> list[tuple[int, list[tuple[int, Paths]]]]:
        """The arcs' tables by node, in order."""
        versions = [front.version for front in self._fronts]
        if versions != self._versions:
            self._versions, self._limits, self._tables = versions, {}, []
            tables: dict[tuple[int, ...], Paths] = {}
            for end, arcs in self._arcs:
                row = []
                for start, arc in arcs:
                    if isinstance(arc, Region):
                        key = id(arc.front), arc.out_bytes, arc.cotangent_bytes
                        if key not in tables:
                            tables[key] = _paths_of(arc)
                        row.append((start, tables[key]))
                    else:
                        periods, number = arc
                        if (table := periods.table(number)) is not None:
                            row.append((start, table))
                self._tables.append((end, row))
        return self._tables

    def has_path(self) -> bool:
        """Whether a path leads from the first equation to the last."""
        return self._fits(float("inf"))

    def least_peak(self) -> int:
        """The lowest limit with a feasible path, to within 0.01%, never below it."""
        low, high = 0, 1
        while not self._fits(high):
            low, high = high, 2 * high
        step = max(1, high // 10_000)
        limits = range(low + step, high, step)
        index = bisect.bisect_left(limits, True, key=self._fits)
        return limits[index] if index < len(limits) else high

    def _fits(self, limit: float) -> bool:
        # Greedy is exact here: fewer bytes at a node leave more room for every later region.
        least = {0: 0.0}
        for end, row in self._incoming():
            found = [
                least[start] + table.bytes[fitting].min()
                for start, table in row
                if start in least and (fitting := table.peaks <= limit - least[start]).any()
            ]
            if found:
                least[end] = min(found)
        return self._num in least

    def choose(self, limit: float) -> Choice | None:
        """The cheapest partition and options within a limit, None if none fit: a dynamic program over the cut points.

        The states of a node are the Pareto front of (bytes, cost) over the paths to it. A front of more than
        `_MAX_STATES` is sampled, as is that of many periods; the choice may then cost more than the optimum, but keeps
        the limit.
        """
        tables = self._incoming()
        if limit not in self._limits:
            self._limits[limit] = self._choose(tables, limit)
        return self._limits[limit]

    def _choose(self, tables: list[tuple[int, list[tuple[int, Paths]]]], limit: float) -> Choice | None:
        zero = np.zeros(1)
        states: dict[int, tuple[np.ndarray, np.ndarray]] = {0: (zero, zero)}  # by cost; more cost, fewer bytes
        origins: dict[int, tuple[np.ndarray, ...]] = {}
        for end, row in tables:
            pairs = []
            for number, (start, table) in enumerate(row):
                if start not in states:
                    continue
                # Every pair of a row of the table and a state that fits. Later regions only add bytes, which are
                # checked there: a pair that does not fit here never will.
                state_bytes, state_costs = states[start]
                option, parent = np.nonzero(state_bytes <= limit - table.peaks[:, None])
                new_bytes, new_costs = (
                    table.bytes[option] + state_bytes[parent],
                    table.costs[option] + state_costs[parent],
                )
                pairs.append((new_bytes, new_costs, np.full(len(option), number), option, parent))
            if not pairs:
                continue
            new_bytes, new_costs, *origin = (np.concatenate(x) for x in zip(*pairs, strict=True))
            if not len(new_bytes):
                continue

            order = _front(new_bytes, new_costs)

            # Sampling keeps both ends: the cheapest state, and the one of the fewest bytes, which fits if any does.
            if len(order) > _MAX_STATES:
                order = order[np.unique(np.linspace(0, len(order) - 1, _MAX_STATES).astype(int))]
            states[end] = new_bytes[order], new_costs[order]
            origins[end] = tuple(x[order] for x in origin)
        if self._num not in states:
            return None
        return self._path(dict(tables), origins)

    def _path(self, tables: dict[int, list[tuple[int, Paths]]], origins: dict[int, tuple[np.ndarray, ...]]) -> Choice:
        # Backtrack from the cheapest state, which is the first.
        end, state = self._num, 0
        cuts: list[int] = []
        options: list[Option] = []
        while end > 0:
            number, option, parent = (int(x[state]) for x in origins[end])
            start, table = tables[end][number]
            steps = table.steps(option)
            cuts = [*(start + offset for offset, _ in steps), *cuts]
            options = [*(o for _, o in steps), *options]
            end, state = start, parent
        return self._layout_of(cuts), options


def _front(bytes: np.ndarray, costs: np.ndarray) -> np.ndarray:
    """The Pareto front: by ascending cost, the rows with fewer bytes than every cheaper one."""
    # Most rows have more bytes than a row of a lower interval of costs.
    bins = bins_of(costs, _NUM_BINS)
    least = np.full(_NUM_BINS + 2, np.inf)
    np.minimum.at(least, bins + 1, bytes)
    rows = np.flatnonzero(bytes < np.minimum.accumulate(least)[bins])
    return rows[front(costs[rows], bytes[rows])]


def _paths_of(region: Region) -> Paths:
    return Paths.of_options(region.front.options, region.out_bytes, region.cotangent_bytes)


class Periods:
    """Tables of any number of equal periods of a program.

    Args:
        period: equations of each.
        inside: (start, end, region) within one period, relative to its start.
        merged: the regions of several periods, by their number.
    """

    def __init__(self, period: int, inside: Sequence[tuple[int, int, Region]], merged: Mapping[int, Region]):
        self._period, self._inside, self._merged = period, inside, merged
        self.regions = [*(r for _, _, r in inside), *merged.values()]
        self._versions: list[int] = []
        self._tables: list[Paths | None] = []  # of 0, 1, 2 ... periods
        self._last: dict[int, Paths] = {}

    def table(self, number: int) -> Paths | None:
        """The paths through a number of periods; None if there are none."""
        versions = [r.front.version for r in self.regions]
        if versions != self._versions:
            self._versions, self._tables = versions, [Paths.empty()]
            one = self._one_period()
            self._last = {n: _paths_of(region) for n, region in self._merged.items()}
            self._last |= {} if one is None else {1: one}
        # Each path of n periods ends with k periods that are a region of their own, or with a path of one period.
        while (n := len(self._tables)) <= number:
            before = {k: self._tables[n - k] for k in self._last if k <= n}
            tables = [t.then(self._last[k], (n - k) * self._period) for k, t in before.items() if t is not None]
            self._tables.append(Paths.union(tables) if tables else None)
        return self._tables[number]

    def _one_period(self) -> Paths | None:
        tables = {0: Paths.empty()}
        for end in sorted({e for _, e, _ in self._inside}):
            paths = [
                tables[start].then(_paths_of(region), start)
                for start, e, region in self._inside
                if e == end and start in tables
            ]
            if paths:
                tables[end] = Paths.union(paths)
        return tables.get(self._period)


Arc = tuple[int, Region | tuple[Periods, int]]


# -- fronts of paths

_MAX_ROWS = 256  # of a composed table: two of these have 65,536 pairs
_NUM_PATH_BINS = 40  # by bytes, and by peak, of a table that is sampled

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
        """One region, as in `Region`."""
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
        rows = _front_of_paths(bytes, peaks, costs)
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
        rows = _front_of_paths(bytes, peaks, costs)
        return cls(
            bytes[rows], peaks[rows], costs[rows], lambda n: tables[int(number[rows[n]])].steps(int(row[rows[n]]))
        )


def _front_of_paths(bytes: np.ndarray, peaks: np.ndarray, costs: np.ndarray) -> np.ndarray:
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
    bins = bins_of(bytes, _NUM_PATH_BINS) * (_NUM_PATH_BINS + 1) + bins_of(peaks, _NUM_PATH_BINS)
    least = np.full((_NUM_PATH_BINS + 1) ** 2, np.inf)
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
