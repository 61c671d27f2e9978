"""Cuts of a program: the intervals of its equations that may become regions.

The dynamic program of `_search.lattice` takes a path through their union, from the first equation to the last:

- the functions that the user rematerialized,
- stretches between cuts that few bytes cross, and up to four neighboring ones merged,
- the periods of a repeating program, such as its layers, and up to four of them merged.

Where the periods begin is not unique. Of ``gelu(x @ w)`` the results of the product and of the activation have equal
bytes. A region that begins with a product runs it again, for the derivative of the activation behind it; one that
begins with the activation need not run the product before. Conversely, a value that several regions read, such as a
residual stream, should be the output of a region. So there are several *cuttings* of a program, each with periods of
its own.
"""

from __future__ import annotations

import collections
import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, cast

import numpy as np

from ..._equations.dataflow import alive_bytes
from ..._equations.primitives import REMAT, flops, row_of
from ..._jax import Jaxpr
from ..._lift.context import device_bytes
from .._tuned import TUNED
from .flat import Flat, Interval, is_linear, last_reads

_MAX_EQUATIONS = 5 * TUNED.long_equations // 16  # of a merged region: its integer programs take more than linear time


class Run(NamedTuple):
    """Equal periods, one after the other, such as the layers of a model.

    Attributes:
        start: the first equation.
        period: equations of each.
        num: their number.
    """

    start: int
    period: int
    num: int

    @property
    def boundaries(self) -> list[int]:
        return [self.start + k * self.period for k in range(self.num + 1)]


_InPhase = Callable[[int, int, int], Run]


class CutCandidates(NamedTuple):
    """The intervals that may become regions.

    Attributes:
        stock: a partition, as cuts, where the stock policies act on the parts of the second item, and other parts stay
            unchanged.
        intervals: the most useful first.
        runs: where the program repeats: by the user's functions, by structure where few bytes cross, and by structure
            behind products.
    """

    stock: tuple[list[int], list[Interval]]
    intervals: list[Interval]
    runs: list[list[Run]]


def crossing_bytes(jaxpr: Jaxpr) -> list[int]:
    """Bytes of values computed before each equation and read by it or later."""
    # Outputs are read at index `len(eqns)`, hence one more step.
    return alive_bytes(len(jaxpr.eqns) + 1, _values(jaxpr))[:-1].tolist()


def _values(jaxpr: Jaxpr) -> list[tuple[int, int, int]]:
    """The computed values: the first and the last equation that each crosses into, and its bytes."""
    # A value crosses into the equations after its own, up to and including its last reader.
    reads = last_reads(jaxpr)
    values = [(i, v) for i, eqn in enumerate(jaxpr.eqns) for v in eqn.outvars if v in reads]
    return [(i + 1, reads[v], device_bytes(v.aval)) for i, v in values]


def candidates(program: Flat) -> CutCandidates:
    """The intervals of a program that may become regions."""
    live = crossing_bytes(program.jaxpr)
    cuts = _Cuts.of(program, live, sorted(program.blocks))

    # The user's functions may end elsewhere than where the program is cut best, within a plateau of equal bytes too.
    ways = [cuts, *(_Cuts.of(program, live, None, behind_products=behind) for behind in (False, True))]
    intervals = dict.fromkeys(i for way in ways for i in _intervals(program, live, way))
    return CutCandidates(_stock(program, cuts.runs, cuts.positions), list(intervals), [way.runs for way in ways])


class _Cuts(NamedTuple):
    """Cuts of a program.

    Attributes:
        blocks: the user's functions; none if it is cut as if there were none.
        ends: where these begin or end, or loops.
        runs: where it repeats.
        minima: cuts that few bytes cross, apart from `ends` and the runs' cuts.
        positions: of all cuts, in order.
    """

    blocks: list[Interval]
    ends: set[int]
    runs: list[Run]
    minima: list[int]
    positions: list[int]

    @classmethod
    def of(
        cls, program: Flat, live: Sequence[int], blocks: Sequence[Interval] | None, *, behind_products: bool = False
    ) -> _Cuts:
        """The cuts of a program.

        Args:
            blocks: the user's functions; None to cut it as if there were none.
            behind_products: as for `runs_of`.
        """
        num = len(program)
        ends = _loop_ends(program) | (program.ends if blocks is not None else set[int]())
        runs, inner = runs_of(program, live, ends, behind_products)
        fixed = {0, num, *ends, *inner, *(b for run in runs for b in run.boundaries)}

        # A cut within the same plateau as a fixed one separates nothing.
        plateaus = _plateaus(live)
        taken = {plateaus[c] for c in fixed if c < num}
        minima = [c for c in _minima(live) if plateaus[c] not in taken]
        cuts = sorted(fixed.union(minima))
        for run in runs:
            cuts = _with_period(cuts, run, ends)
        return cls(list(blocks or ()), ends, runs, minima, cuts)


def _loop_ends(program: Flat) -> set[int]:
    return {j for i in program.loops for j in (i, i + 1)}


def _intervals(program: Flat, live: Sequence[int], cuts: _Cuts) -> list[Interval]:
    """Intervals between cuts that can be regions, the most useful first."""
    num, runs, minima = len(program), cuts.runs, cuts.minima
    lists: list[Iterable[Interval]] = [_small(itertools.pairwise(sorted({0, num, *cuts.ends})))]
    bounds = sorted({0, num, *_loop_ends(program), *(b for run in runs for b in run.boundaries)})
    for start, end in itertools.pairwise(bounds):
        local = [c for c in cuts.positions if start <= c <= end]
        lists += [itertools.pairwise(dict.fromkeys([*local[::n], end])) for n in range(1, TUNED.merged + 1)]

        # The ends of blocks that have other local minima inside.
        lowest = min((live[c] for c in minima if start < c < end), default=0)
        is_low: Callable[[int], bool] = lambda c, most=(1 + TUNED.scatter) * lowest: c in minima and live[c] <= most
        lists.append(itertools.pairwise([c for c in local if c in (start, end) or is_low(c)]))
    lists += [itertools.pairwise(run.boundaries) for run in runs]
    for run in runs:
        # The rest of the program before and after the periods, such as the loss, merged with one of them: a value
        # between the two, such as the last activation, can then be computed again.
        last_before = max((b for b in bounds if b < run.start), default=run.start)
        first_after = min((b for b in bounds if b > run.boundaries[-1]), default=run.boundaries[-1])
        lists.append(_small([(last_before, run.boundaries[1]), (run.boundaries[-2], first_after)]))
    lists.append(cuts.blocks)

    # Periods can be regions that have loops inside, such as layers that run through a sequence.
    periods = [i for run in runs for n in range(1, TUNED.merged + 1) for i in _merged_periods(run, n)]
    allowed = [i for intervals in lists for i in intervals if i[0] < i[1] and _is_allowed(program, *i)]
    return [*allowed, *periods]


def _merged_periods(run: Run, number: int) -> list[Interval]:
    """The intervals of so many periods of a run; none if several are too large for a region."""
    # Three are between two and four, and as expensive to analyze as four.
    most = _MAX_EQUATIONS // 2 if number == 3 else _MAX_EQUATIONS
    is_small = number == 1 or number * run.period <= most
    return list(zip(run.boundaries, run.boundaries[number:], strict=False)) if is_small else []


def _small(intervals: Iterable[Interval]) -> list[Interval]:
    return [(start, end) for start, end in intervals if end - start <= _MAX_EQUATIONS]


def _is_allowed(program: Flat, start: int, end: int) -> bool:
    """Whether an interval can be a region: without loops, a loop alone, or a function that the user rematerialized."""
    if end == start + 1 or (start, end) in program.blocks:
        return True
    return not any(start <= i < end for i in program.loops)


def _stock(program: Flat, runs: Sequence[Run], cuts: Sequence[int]) -> tuple[list[int], list[Interval]]:
    """Regions of the stock policies: the user's functions; without such, the periods of structure; without these, the
    finest parts.
    """
    loops = [(i, i + 1) for i in program.loops]
    if program.blocks or any(_has_remat_inside(program, i) for i in program.loops):
        return sorted({0, *program.ends} - {len(program)}), [*program.blocks, *loops]
    periods = [i for run in runs for i in itertools.pairwise(run.boundaries)]
    walls = {0, *(j for j in _loop_ends(program) if not any(start < j < end for start, end in periods))}
    structural = sorted({*walls, *(b for run in runs for b in run.boundaries)} - {len(program)})
    finest = sorted(set(cuts) - {len(program)})
    return (structural, [*periods, *loops]) if periods else (finest, [*itertools.pairwise([*finest, len(program)])])


def _has_remat_inside(program: Flat, index: int) -> bool:
    return any(e.primitive.name in REMAT for e in program.jaxpr.eqns[index].params["jaxpr"].eqns)


def _minima(live: Sequence[int]) -> list[int]:
    """Local minima of the crossing bytes; of a plateau of equal bytes its end."""
    from scipy.signal import find_peaks  # pyright: ignore[reportMissingTypeStubs, reportUnknownVariableType]

    # Cheap equations stay with the producers of their operands. A lesser dip does not separate regions.
    if not live:
        return []
    options = {"prominence": TUNED.scatter * max(live), "plateau_size": 1}
    return cast(dict[str, np.ndarray], find_peaks(np.negative(live), **options)[1])["right_edges"].tolist()


def _plateaus(live: Sequence[int]) -> list[int]:
    """Number of the plateau of equal bytes of each equation."""
    return list(itertools.accumulate([0, *(int(a != b) for a, b in itertools.pairwise(live))]))


# -- repetition ------------------------------------------------------------------------------------------------------


def runs_of(
    program: Flat, live: Sequence[int], marked: set[int], behind_products: bool = False
) -> tuple[list[Run], set[int]]:
    """Find the repetitions of a program, and the ends of repetitions within one period.

    Args:
        live: the bytes that cross into each equation.
        marked: where the user's functions end.
        behind_products: whether periods begin, of places that equally few bytes cross, behind the most expensive
            equation, if nonlinear ones are between it and the usual place: only their derivatives read what crosses
            there.
    """
    eqns = program.jaxpr.eqns
    # By kind alone, not by shape: levels of a convolutional net repeat with other sizes.
    numbers: dict[str, int] = collections.defaultdict(lambda: len(numbers))
    tokens = np.array([numbers[e.primitive.name] for e in eqns], int)
    heavy = np.cumsum([0, *(not row_of(e).fuses for e in eqns)])

    in_phase = functools.partial(_in_phase, program, live, marked, behind_products)
    most_crossing = functools.partial(_most_crossing, np.array(_values(program.jaxpr)).reshape(-1, 3).T)
    runs = _repetitions(tokens, heavy, len(tokens) // 10, in_phase, most_crossing)
    inner: set[int] = set()
    for run in runs:
        period_tokens = tokens[run.start : run.start + run.period]
        in_period: _InPhase = lambda start, period, length, by=run.start: in_phase(by + start, period, length)
        for inner_run in _repetitions(period_tokens, heavy[run.start :], run.period // 2, in_period, most_crossing):
            inner |= {b + k * run.period for b in inner_run.boundaries for k in range(run.num)}
    return sorted(runs), inner


def _repetitions(
    tokens: np.ndarray,
    heavy: np.ndarray,
    least: int,
    in_phase: _InPhase,
    most_crossing: Callable[[Sequence[int]], float],
) -> list[Run]:
    """Periodic stretches of a sequence, as long as possible and of a least length, that do not overlap.

    Args:
        tokens: the sequence.
        heavy: the running number of equations that do not fuse.
        least: of the lengths.
        in_phase: ``(start, period, length) -> Run``, the periods of a stretch.
        most_crossing: the values that cross one of some boundaries, as in `_most_crossing`.
    """
    chosen: list[tuple[int, int]] = []
    runs: list[Run] = []
    for start, period, length in _stretches(tokens, heavy, least):
        if any(s < start + length and start < s + n for s, n in chosen):
            continue
        run = in_phase(start, period, length)
        # Two stages of a residual network may be alike. The blocks that most of them consists of tell more, unless more
        # values cross between these, as between the products for queries and keys in a layer of attention.
        inner = _stretches(tokens[start : start + period], heavy[start:], 2 * period // 3)
        if any(
            most_crossing(in_phase(start + s, p, n).boundaries[1:-1]) <= most_crossing(run.boundaries)
            for s, p, n in inner
        ):
            continue
        if run.num > 1:
            chosen.append((start, length))
            runs.append(run)
    return runs


def _stretches(tokens: np.ndarray, heavy: np.ndarray, least: int) -> list[tuple[int, int, int]]:
    """Maximal periodic stretches ``(start, period, length)``, the longest first."""
    stretches: list[tuple[int, int, int]] = []
    num = len(tokens)
    for period in range(2, num // 2 + 1):
        equal = np.concatenate([[False], tokens[period:] == tokens[:-period], [False]]).astype(np.int8)
        starts, ends = np.nonzero(np.diff(equal) == 1)[0], np.nonzero(np.diff(equal) == -1)[0]
        for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
            # A period without an equation that does not fuse, such as a product, is not worth a region.
            if end - start + period >= least and end - start >= period and heavy[start + period] > heavy[start]:
                stretches.append((start, period, end - start + period))
    # Of equal lengths the shortest period: multiples of it repeat as well.
    return sorted(stretches, key=lambda r: (-(r[2] // r[1] * r[1]), r[1], r[0]))


def _in_phase(
    program: Flat, live: Sequence[int], marked: set[int], behind_products: bool, start: int, period: int, length: int
) -> Run:
    """The periods of a periodic stretch, begun where the user's functions end, or else where the fewest bytes cross."""
    num, eqns = len(live), program.jaxpr.eqns
    cost: Callable[[int], int] = lambda i: flops(eqns[i]) if i < num else 0

    def rank(offset: int, is_behind: bool) -> tuple[float, ...]:
        boundaries = list(range(start + offset, start + length + 1, period))
        count = len(boundaries) - 1
        crossing = sum(live[b] for b in boundaries[1:] if b < num) / count  # on average, except for the first
        is_marked = all(b in marked or b in (0, num) for b in boundaries)

        # In a plateau of equal bytes, before the most expensive equation: cheap ones stay with the producers of their
        # operands.
        order = (-cost(boundaries[1] - 1), -count) if is_behind else (-count, -cost(boundaries[1]))
        return not is_marked, crossing, *order, offset

    offset = min(range(period), key=lambda o: rank(o, False))
    if behind_products:
        late = min(range(period), key=lambda o: rank(o, True))
        between = range(start + late, start + late + (offset - late) % period)
        if not all(is_linear(eqns[i]) for i in between if i < num):
            offset = late
    return Run(start + offset, period, (length - offset) // period)


def _most_crossing(values: np.ndarray, boundaries: Sequence[int]) -> float:
    """The most values that cross one of some boundaries: their bytes in those of the largest there."""
    # In numbers, not bytes: the periods of a convolutional net get smaller.
    first, last, sizes = values
    crossing = (sizes[(first <= b) & (b <= last)] for b in boundaries)
    return max((s.sum() / s.max() for s in crossing if s.any()), default=0.0)


def _with_period(cuts: Sequence[int], run: Run, ends: set[int]) -> list[int]:
    """Replace the cuts within a run by those that most of its periods have, except where the user's functions end."""
    first, last = run.start, run.boundaries[-1]
    run_cuts = [c for c in cuts if first <= c < last]
    votes = collections.Counter((c - first) % run.period for c in run_cuts)
    common = [offset for offset, number in votes.items() if 2 * number >= run.num]
    regular = {first + k * run.period + offset for k in range(run.num) for offset in common}
    return sorted({c for c in cuts if not first <= c < last} | regular | {c for c in run_cuts if c in ends} | {first})
