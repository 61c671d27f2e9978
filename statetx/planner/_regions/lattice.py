"""The regions that a program may be cut into, and the cheapest path through them within a limit of bytes.

Nodes are cut points, arcs are regions with their options. A path from the first equation to the last is a partition
with an option for each part. During the backward pass of a region are live: what regions before it output and saved,
what it saved, and its own working set. So an arc has three numbers: the bytes that it adds for later regions, its peak
above the bytes of earlier ones, and its cost. They add up along a path,

    bytes = b1 + b2,   peak = max(p1, b1 + p2),   cost = c1 + c2,

whatever the limit is. So the front of a period of the program (a layer) is computed once, and those of several periods
from it.
"""

from __future__ import annotations

import concurrent.futures
import itertools
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, NamedTuple

import numpy as np

from ..._jax import Jaxpr, Literal
from ..._lift.context import device_bytes
from .._program.flat import Flat, Part, cotangent_variables, differentiated_variables
from .._treatments.treatment import Interval, PathSettings, PathVariant, Treatment
from .cuts import MAX_PERIODS, Cutting, Run, candidates, merged_periods
from .family import Arc, Family, Periods, cost_of
from .front import Analysis, Front, front_of
from .layout import Layout, Region

_MIN_COMPOSED = 8  # periods of a run from which on they are composed: a path through fewer is followed region by region
_COMPARED = (1.3, 1.5, 1.7, 2.0)  # limits at which families are compared, by the least memory
_CLEARLY_CHEAPER = _CLEARLY_LESS = 0.95
_NUM_SOLVERS = 2
_STEP = 8  # composed periods of an arc, at least; no merged region crosses its end, which errs towards more cost


class Lattice:
    """All regions of a program.

    Args:
        program: the program, flat.
        diff_indices: the inputs to differentiate with respect to.
        num_out: number of differentiated outputs; they come first.

    Attributes:
        stock_layout: where stock policies act, and for each part whether they act on it.
        regions: by interval.
        families: all regions; then variants of all regions, for each treatment that has such, where these are cheaper.
    """

    def __init__(self, program: Flat, diff_indices: Sequence[int], num_out: int, analysis: Analysis):
        self.program = program
        self.regions: dict[Interval, Region] = {}
        # Integer programs are solved in threads, while Python analyzes other regions: the solver releases the GIL.
        pool = concurrent.futures.ThreadPoolExecutor(_NUM_SOLVERS, "statetx-solver")
        self._start = lambda find: pool.submit(find).result
        self._analysis, self._is_late = analysis, analysis.deadline
        self._fronts: dict[Any, Front] = {}
        jaxpr = program.jaxpr
        self._computed = {v for e in jaxpr.eqns for v in e.outvars}
        self._differentiated = differentiated_variables(jaxpr, diff_indices)
        self._with_cotangent = cotangent_variables(jaxpr, num_out)
        self._lifetimes = _Lifetimes(jaxpr, self._differentiated & self._with_cotangent)

        found = candidates(program)
        self.stock_layout = self._stock_layout(*found.stock)
        for interval in found.intervals:
            if not self._is_late():
                self.region(*interval)
        self._cuttings = found.cuttings
        self.families = [self._family(self.region)]
        for kind in analysis.treatments:
            variant = kind.paths(PathSettings(program, analysis.settings.formats, self._parts_of))
            if variant is not None and not self._is_late():
                self._add_family(kind, variant)

    def region(self, start: int, end: int) -> Region:
        """The region of an interval. Equal parts, such as the layers of a model, share one front."""
        if (start, end) not in self.regions:
            part = self.program.part(start, end)
            variables = [None if isinstance(v, Literal) else v for v in part.invars]
            is_computed = tuple(v in self._computed for v in variables)
            is_differentiated = tuple(v in self._differentiated for v in variables)
            has_cotangent = tuple(v in self._with_cotangent for v in part.outvars)
            key = (part.key, is_computed, is_differentiated, has_cotangent)
            if key not in self._fronts:
                flags = is_computed, is_differentiated, has_cotangent
                self._fronts[key] = front_of(part, *flags, self._analysis, self._start)
            self.regions[start, end] = Region(start, end, part, self._fronts[key], *self._lifetimes.bytes(start, end))
        return self.regions[start, end]

    def _parts_of(self, front: Front) -> list[Part]:
        return [region.part for region in self.regions.values() if region.front is front]

    def _stock_layout(self, cuts: Sequence[int], planned: Sequence[Interval]) -> tuple[Layout, list[bool]]:
        layout, set_ = self._layout(self.region, cuts), set(planned)
        return layout, [(r.start, r.end) in set_ for r in layout.regions]

    def _layout(self, region_of: _RegionOf, cuts: Sequence[int]) -> Layout:
        """The partition with these cuts."""
        regions = [region_of(*interval) for interval in itertools.pairwise([*cuts, len(self.program)])]
        return Layout(self.program, [region for region in regions if region is not None])

    # -- the arcs ----------------------------------------------------------------------------------------------------

    def _add_family(self, kind: type[Treatment], variant: PathVariant) -> None:
        """Add the paths through variants of the regions, if some of them are cheaper."""
        with_cotangent = self._differentiated & self._with_cotangent
        lifetimes = _Lifetimes(self.program.jaxpr, with_cotangent, variant.unheld)
        regions: dict[Interval, Region | None] = {}

        def region_of(start: int, end: int) -> Region | None:
            if (start, end) not in regions:
                region = self.region(start, end)
                found = variant.front(start, end, region.part, region.front)
                if found is not None:
                    out_bytes, cotangent_bytes = lifetimes.bytes(start, end)
                    found = Region(start, end, region.part, found[0], out_bytes, cotangent_bytes + found[1])
                regions[start, end] = found
            return regions[start, end]

        family, first = self._family(region_of, kind), self.families[0]
        if family.has_path():
            is_smaller = variant.saves_memory and family.least_peak() < _CLEARLY_LESS * first.least_peak()
            if is_smaller or _is_cheaper(family, first):
                self.families.append(family)

    def _family(self, region_of: _RegionOf, treatment: type[Treatment] | None = None) -> Family:
        """The paths through all regions."""
        arcs: dict[int, list[Arc]] = {}
        seen: set[Interval] = set()
        for cutting in self._cuttings:
            groups, regions, uneven = self._groups(cutting, region_of)
            ends = {end for interval in uneven for end in interval}
            composed = [group for group in groups if group.is_composed]
            for group in composed:
                periods = Periods(group.periods.period, group.inside, group.merged)
                for first, last in _composed(group.periods, ends):
                    arcs.setdefault(last, []).append((first, (periods, (last - first) // group.periods.period)))
            stretches = [(group.periods.start, group.periods.boundaries[-1]) for group in composed]
            for (start, end), region in regions.items():
                # The arcs of composed periods stand for all regions within. A region of all periods is an arc beside
                # them.
                is_inside = any(a < end and start < b and not (start <= a and b <= end) for a, b in stretches)
                if (not is_inside or (start, end) in uneven) and (start, end) not in seen:
                    seen.add((start, end))
                    arcs.setdefault(end, []).append((start, region))
        layouts: dict[tuple[int, ...], Layout] = {}

        def layout_of(cuts: Sequence[int]) -> Layout:
            cuts = tuple(cuts)
            if cuts not in layouts:
                layouts[cuts] = self._layout(region_of, cuts)
            return layouts[cuts]

        return Family(len(self.program), arcs, layout_of, treatment)

    def _groups(
        self, cutting: Cutting, region_of: _RegionOf
    ) -> tuple[list[_Group], dict[Interval, Region], set[Interval]]:
        """The equal periods of a cutting; its regions with those of several of these merged; and of these the ones
        whose first or last period is unlike the others.
        """
        regions: dict[Interval, Region] = {}

        def add(start: int, end: int) -> Region | None:
            region = region_of(start, end)
            if region is not None:
                regions[start, end] = region
            return region

        for interval in cutting.intervals:
            if interval in self.regions:
                add(*interval)
        groups: list[_Group] = []
        uneven: set[Interval] = set()
        for run in cutting.runs:
            equal = self._equal_periods(run, regions)
            groups += [self._merged(group, regions, add) for group in equal]
            uneven |= {i for i in self._uneven(run, equal) if add(*i) is not None}
        return groups, regions, uneven

    def _uneven(self, run: Run, equal: Sequence[Run]) -> list[Interval]:
        """The intervals of several periods that begin with a first one unlike the others, or end with such a
        last one.
        """
        if not equal:
            return []
        first, last = equal[0].start > run.start, equal[-1].boundaries[-1] < run.boundaries[-1]
        numbers = range(2, min(MAX_PERIODS, run.count) + 1)
        found = [merged_periods(run, 0, n) for n in numbers if first]
        found += [merged_periods(run, run.count - n, n) for n in numbers if last]
        return [i for i in found if i is not None and not self._is_late()]

    def _equal_periods(self, run: Run, all_regions: dict[Interval, Region]) -> list[Run]:
        """Consecutive periods with equal regions."""
        inside: list[list[Any]] = [[] for _ in range(run.count)]
        crossing: set[int] = set()
        for start, end in sorted(all_regions):
            first, last = (start - run.start) // run.period, (end - 1 - run.start) // run.period
            if first == last and 0 <= first < run.count:
                region, offset = all_regions[start, end], run.start + first * run.period
                inside[first].append((start - offset, end - offset, *_numbers(region)))
            elif not (start <= run.start and run.boundaries[-1] <= end):
                crossing.update(range(max(first, 0), min(last, run.count - 1) + 1))
        groups: list[Run] = []
        for k, (regions, previous) in enumerate(zip(inside, [None, *inside], strict=False)):
            if regions == previous and not crossing & {k, k - 1}:
                groups[-1] = groups[-1]._replace(count=groups[-1].count + 1)
            else:
                groups.append(Run(run.start + k * run.period, run.period, 1))
        return [group for group in groups if group.count > 1]

    def _merged(self, group: Run, regions: Mapping[Interval, Region], region_of: _RegionOf) -> _Group:
        """Add regions of several periods.

        Equal periods do not make equal regions of several: periods may share a weight that a region of two reads once.
        So the periods are composed only if those of each number agree.
        """
        start, end = group.start, group.start + group.period
        inside = [(a - start, b - start, r) for (a, b), r in sorted(regions.items()) if start <= a and b <= end]
        merged: dict[int, Region] = {}
        is_composed = group.count >= _MIN_COMPOSED
        for number in range(2, min(MAX_PERIODS, group.count) + 1):
            intervals = [merged_periods(group, k, number) for k in range(group.count - number + 1)]
            found = [None if i is None or self._is_late() else region_of(*i) for i in intervals]
            is_composed &= len({None if r is None else _numbers(r) for r in found}) == 1
            if found[0] is not None:
                merged[number] = found[0]
        return _Group(group, inside, merged, is_composed)


def _composed(periods: Run, ends: Set[int]) -> list[Interval]:
    """The intervals of arcs of composed periods, in equal steps and in steps of nearly equal numbers.

    They follow each other; the first and the last also begin and end at some equations within.
    """
    number = max(1, periods.count // _STEP)
    steps = [*range(0, periods.count, _STEP), periods.count]
    balanced = [periods.count * k // number for k in range(number + 1)]
    start, stop = periods.start, periods.boundaries[-1]
    within = [b for b in periods.boundaries[1:-1] if b in ends]
    intervals = [
        (a, b)
        for counts in (steps, balanced)
        for first, last in itertools.pairwise(start + count * periods.period for count in counts)
        for a in ([first, *within] if first == start else [first])
        for b in ([last, *within] if last == stop else [last])
        if first <= a < b <= last
    ]
    return list(dict.fromkeys(intervals))


def _numbers(region: Region) -> tuple[int, int, int]:
    """What a path through a region depends on."""
    return id(region.front), region.out_bytes, region.cotangent_bytes


def _is_cheaper(family: Family, other: Family) -> bool:
    """Whether the model finds clearly cheaper paths in one family than in another, at some limit near the least memory
    of both.
    """
    least = max(family.least_peak(), other.least_peak())
    for factor in _COMPARED:
        choice, reference = family.choose(factor * least), other.choose(factor * least)
        if choice is not None and (reference is None or cost_of(choice) < _CLEARLY_CHEAPER * cost_of(reference)):
            return True
    return False


_RegionOf = Callable[[int, int], Region | None]


class _Group(NamedTuple):
    """Equal periods.

    Attributes:
        inside: the regions (start, end, region) of one period, relative to its start.
        merged: those of several periods, by their number.
        is_composed: whether a path through the periods is composed of these regions, wherever it is.
    """

    periods: Run
    inside: list[tuple[int, int, Region]]
    merged: dict[int, Region]
    is_composed: bool


class _Lifetimes:
    """When the values of a program are computed and read.

    Args:
        with_cotangent: the variables with a cotangent.
        unheld: those that are not in memory between regions: each region makes or holds what it reads.
    """

    def __init__(self, jaxpr: Jaxpr, with_cotangent: set[Any], unheld: Set[Any] = frozenset()):
        first_reads: dict[Any, int] = {}
        last_reads: dict[Any, int] = {}
        for i, eqn in enumerate(jaxpr.eqns):
            for v in eqn.invars:
                if not isinstance(v, Literal):
                    first_reads.setdefault(v, i)
                    last_reads[v] = i
        values = [(i, v) for i, e in enumerate(jaxpr.eqns) for v in e.outvars if v in last_reads]
        self._defined = np.array([i for i, _ in values], int)
        self._first_reads = np.array([first_reads[v] for _, v in values], int)
        self._last_reads = np.array([last_reads[v] for _, v in values], int)
        self._bytes = np.array([device_bytes(v.aval) for _, v in values], int)
        self._has_cotangent = np.array([v in with_cotangent for _, v in values], bool)
        self._is_unheld = np.array([v in unheld for _, v in values], bool)

    def bytes(self, start: int, end: int) -> tuple[int, int]:
        """The `out_bytes` and `cotangent_bytes` of a region."""
        crosses = self._last_reads >= end
        outs = crosses & (start <= self._defined) & (self._defined < end) & ~self._is_unheld

        # A value from before that equations after the region read counts once, as an output of the region that computes
        # it. Where it was read before, it is itself live and so is its cotangent; else its cotangent alone, if it has
        # one.
        passes, was_read = crosses & (self._defined < start), self._first_reads < end
        copies = np.where(self._is_unheld, self._has_cotangent, was_read.astype(int) + self._has_cotangent - 1)
        return int(self._bytes[outs].sum()), int((copies * self._bytes)[passes].sum())
