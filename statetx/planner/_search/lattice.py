"""The cheapest partition of a program into regions within a limit of bytes: a dynamic program over the cut points.

Nodes are cut points, arcs are regions with their options. A path from the first equation to the last is a partition
with an option for each part. During the backward pass of a region are live: outputs and saved values of regions before
it, its own saved values and its working set. So an arc has three numbers: the bytes that it adds for later regions, its
peak above the bytes of earlier ones, and its cost. They add up along a path,

    bytes = b1 + b2,   peak = max(p1, b1 + p2),   cost = c1 + c2.
"""

from __future__ import annotations

import bisect
import concurrent.futures
import functools
import itertools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence, Set

import numpy as np

from ... import _jax
from ..._equations.dataflow import variables_of
from ..._jax import Jaxpr, Literal, Var
from ..._lift.context import device_bytes
from .._program.cuts import candidates
from .._program.flat import Flat, Interval, Part, cotangent_variables, differentiated_variables, is_loop
from .._treatments.front import Front
from .._treatments.proposals import FindOptions, Variants, front_of, of_regions
from .._treatments.treatment import Option, Settings, front
from .._tuned import TUNED
from .layout import Choice, OptionTable, Region

_MAX_STATES = 256  # pairs of bytes and cost that the dynamic program follows
_NUM_SOLVERS = 2


class Lattice:
    """Lattice of all regions of a program.

    Args:
        program: the program, flat.
        diff_indices: the inputs to differentiate with respect to.
        num_out: number of differentiated outputs; they come first.

    Attributes:
        stock_regions: a partition, each region with whether stock policies act on it.
        regions: by interval.
        families: all regions; then variants of all regions, for each treatment that has such, where these are better.
    """

    def __init__(self, program: Flat, diff_indices: Sequence[int], num_out: int, settings: Settings):
        self.program = program
        self.regions: dict[Interval, Region] = {}
        # Integer programs are solved in threads, while Python analyzes other regions: the solver releases the GIL.
        pool = concurrent.futures.ThreadPoolExecutor(_NUM_SOLVERS, "statetx-solver")
        self._start: Callable[[FindOptions], FindOptions] = lambda find: pool.submit(find).result
        self._settings, self._is_late = settings, settings.deadline
        self._fronts: dict[Hashable, Front] = {}
        jaxpr = program.jaxpr
        self._computed = {v for e in jaxpr.eqns for v in e.outvars}
        self._differentiated = differentiated_variables(jaxpr, diff_indices)
        self._with_cotangent = cotangent_variables(jaxpr, num_out)
        self._lifetimes = _Lifetimes(jaxpr, self._differentiated & self._with_cotangent)

        cut_candidates = candidates(program)
        cuts, planned = cut_candidates.stock
        intervals = itertools.pairwise([*cuts, len(program)])
        self.stock_regions = [(self.region(*interval), interval in {*planned}) for interval in intervals]
        for interval in cut_candidates.intervals:
            if not self._is_late():
                self.region(*interval)
        self.families = [Family(program, self.regions)]
        for kind in of_regions(settings.treatments):
            variant = kind.paths(jaxpr, settings, self._parts_of)
            if variant is not None and not self._is_late():
                self._add_family(variant)

    def region(self, start: int, end: int) -> Region:
        """The region of an interval. Equal parts, such as the layers of a model, share one front."""
        if (start, end) not in self.regions:
            part = self.program.part(start, end)
            variables = [None if isinstance(v, Literal) else v for v in part.invars]
            is_computed = tuple(v in self._computed for v in variables)
            is_differentiated = tuple(v in self._differentiated for v in variables)
            flags = is_computed, is_differentiated, tuple(v in self._with_cotangent for v in part.outvars)
            key = (part.key, *flags)
            if key not in self._fronts:
                self._fronts[key] = front_of(part, *flags, self._settings, self._start)
            self.regions[start, end] = Region(start, end, part, self._fronts[key], *self._lifetimes.bytes(start, end))
        return self.regions[start, end]

    def undivided(self) -> Region | None:
        """The region of one equation, no loop, with a quarter of the bytes of all values within it: such as a solver
        with a derivative of its own. Any plan has it in a region, unchanged.
        """
        eqns = self.program.jaxpr.eqns
        within = [sum(map(_value_bytes, _jax.inner_jaxprs(eqn))) for eqn in eqns]
        num_bytes, n = max(zip(within, itertools.count(), strict=False), default=(0, 0))
        is_large = num_bytes > _value_bytes(self.program.jaxpr) / 4
        return self.region(n, n + 1) if is_large and not is_loop(eqns[n]) else None

    def _parts_of(self, front: Front) -> list[Part]:
        return [region.part for region in self.regions.values() if region.front is front]

    def _add_family(self, variant: Variants) -> None:
        """Add the paths through variants of the regions, if some of them are better."""
        with_cotangent = self._differentiated & self._with_cotangent
        lifetimes = _Lifetimes(self.program.jaxpr, with_cotangent, variant.unheld)
        regions: dict[Interval, Region] = {}
        for (start, end), region in self.regions.items():
            result = variant.front(start, end, region.part, region.front)
            if result is not None:
                out_bytes, cotangent_bytes = lifetimes.bytes(start, end)
                regions[start, end] = Region(start, end, region.part, result[0], out_bytes, cotangent_bytes + result[1])
        family = Family(self.program, regions)
        if family.has_path() and _is_better(family, self.families[0]):
            self.families.append(family)


def _value_bytes(jaxpr: Jaxpr) -> int:
    """The bytes of all values that a jaxpr computes, at any depth."""
    values = [v.aval for eqn in _jax.equations_in(jaxpr) for v in eqn.outvars]
    return sum(device_bytes(aval) for aval in values if hasattr(aval, "dtype"))


def _is_better(family: Family, original: Family) -> bool:
    """Whether the model finds clearly less memory in one family than in another, or clearly cheaper paths at some limit
    near its least memory.
    """
    least = family.least_peak()
    if least < (1 - TUNED.scatter) * original.least_peak():
        return True
    for n in (1, 2, 3):
        limit = math.exp(n * TUNED.drift) * least
        choice, reference = family.choose(limit), original.choose(limit)
        if choice and (reference is None or choice.cost < (1 - TUNED.scatter) * reference.cost):
            return True
    return False


class Family:
    """The regions of a program, or variants of them, with at least one path from its first equation to its last.

    Args:
        overhead: cost of a region that is changed, beside that of recomputation.
    """

    def __init__(self, program: Flat, regions: Mapping[Interval, Region], overhead: float = 0.0):
        self._program, self.regions, self._overhead = program, regions, overhead
        ending: dict[int, list[Region]] = {}
        for region in regions.values():
            ending.setdefault(region.end, []).append(region)
        self._ending = sorted(ending.items())

    def with_overhead(self, overhead: float) -> Family:
        return Family(self._program, self.regions, overhead)

    def has_path(self) -> bool:
        """Whether a path leads from the first equation to the last."""
        return self._fits(self._tables(), float("inf"))

    def least_peak(self) -> int:
        """The lowest limit with a feasible path, to within 0.01%, never below it."""
        fits = functools.partial(self._fits, self._tables())
        high = next(2**n for n in itertools.count() if fits(2**n))
        step = max(1, high // 10_000)
        limits = range(high // 2 + step, high, step)
        index = bisect.bisect_left(limits, True, key=fits)
        return limits[index] if index < len(limits) else high

    def _tables(self) -> list[tuple[int, list[tuple[int, OptionTable]]]]:
        """Regions that end at each cut point, by their first equations."""
        return [
            (end, [(region.start, region.table(self._overhead)) for region in regions]) for end, regions in self._ending
        ]

    def _fits(self, tables: list[tuple[int, list[tuple[int, OptionTable]]]], limit: float) -> bool:
        # Greedy is exact here: fewer bytes at a node leave more room for every later region.
        least = {0: 0.0}
        for end, row in tables:
            totals = [
                least[start] + table.bytes[fitting].min()
                for start, table in row
                if start in least and (fitting := table.peaks <= limit - least[start]).any()
            ]
            if totals:
                least[end] = min(totals)
        return len(self._program) in least

    def choose(self, limit: float) -> Choice | None:
        """The cheapest partition and options within a limit, None if none fit: a dynamic program over the cut points.

        The states of a node are the Pareto front of (bytes, cost) over the paths to it. A front of more than
        `_MAX_STATES` is sampled; the choice may then cost more than the optimum, but keeps the limit.
        """
        zero = np.zeros(1)
        states: dict[int, tuple[np.ndarray, np.ndarray]] = {0: (zero, zero)}  # by cost; more cost, fewer bytes
        origins: dict[int, tuple[np.ndarray, ...]] = {}
        for end, row in self._tables():
            pairs: list[tuple[np.ndarray, ...]] = []
            for number, (start, table) in enumerate(row):
                if start not in states:
                    continue
                # Every pair of an option and a state that fits. Later regions only add bytes, which are checked there:
                # a pair that does not fit here never will.
                state_bytes, state_costs = states[start]
                option, parent = np.nonzero(state_bytes <= limit - table.peaks[:, None])
                added = table.bytes[option] + state_bytes[parent], table.costs[option] + state_costs[parent]
                pairs.append((*added, np.full(len(option), number), option, parent))
            if not any(len(x[0]) for x in pairs):
                continue
            new_bytes, new_costs, *origin = (np.concatenate(x) for x in zip(*pairs, strict=True))
            order = front(new_costs, new_bytes)

            # Sampling keeps both ends: the cheapest state, and the one of the fewest bytes, which fits if any does.
            if len(order) > _MAX_STATES:
                order = order[np.unique(np.linspace(0, len(order) - 1, _MAX_STATES).astype(int))]
            states[end] = new_bytes[order], new_costs[order]
            origins[end] = tuple(x[order] for x in origin)
        return self._path(origins) if len(self._program) in states else None

    def _path(self, origins: dict[int, tuple[np.ndarray, ...]]) -> Choice:
        # Backtrack from the cheapest state, which is the first.
        end, state, path = len(self._program), 0, list[tuple[Region, Option]]()
        ending = dict(self._ending)
        while end > 0:
            number, option, parent = (int(x[state]) for x in origins[end])
            region = ending[end][number]
            path.append((region, region.front.options[option]))
            end, state = region.start, parent
        path.reverse()
        return Choice(self._program, [region for region, _ in path], [option for _, option in path])


class _Lifetimes:
    """Times at which the values of a program are computed and read.

    Args:
        with_cotangent: the variables with a cotangent.
        unheld: the variables that are not in memory between regions: each region makes or holds its operands.
    """

    def __init__(self, jaxpr: Jaxpr, with_cotangent: set[Var], unheld: Set[Var] = frozenset()):
        reads = [(v, i) for i, e in enumerate(jaxpr.eqns) for v in variables_of(e)]
        first_reads, last_reads = dict(reversed(reads)), dict(reads)
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
