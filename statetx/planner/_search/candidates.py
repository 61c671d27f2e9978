"""Candidates of a search: compiled choices of options, which predict the memory of others.

The baseline is the program without rematerialization: compiled, or extrapolated from shorter versions.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import jax
import numpy as np

from ... import _jax
from ..._cached import cached_property
from ..._equations.compiled import Cost, Program
from ..._equations.compiler import candidate_options, fast_compile_options
from ..._equations.inline import inline
from ..._equations.primitives import REMAT
from ..._equations.structure import Body
from ..._jax import Jaxpr, Var
from ..._tree import is_float
from ...residuals.diagnosis import BASELINE
from .._program.cuts import Run, crossing_bytes, runs_of
from .._program.flat import Flat, last_reads
from .._treatments import UNPLANNED, rewrite
from .._tuned import TUNED
from .capture import ProgramOf
from .layout import Choice

Compiled = TypeVar("Compiled", bound=Any)  # a `Candidate`, or a program with one for each gradient

Result = TypeVar("Result")

STOCK = ("everything", "dots", "dots_without_batch_dims", "nothing")


@dataclasses.dataclass(frozen=True, eq=False)
class Candidate:
    """A compiled choice of options.

    Attributes:
        name: the stock policy's, "no remat" for the baseline, or "plan".
        added_cost: of recomputation, by the equations of the compiled program; by the model where these do not show it.
        compiled: the costs of the compiled program, gradient included.
        predicted_bytes: temporary bytes, predicted from the model and the candidates compiled before.
    """

    name: str
    choice: Choice
    added_cost: float
    compiled: Cost
    predicted_bytes: float

    @property
    def temp_bytes(self) -> int:
        return self.compiled.temp_bytes


class Candidates:
    """The compiled candidates of a search, and the memory that they predict for other choices.

    They are in order of compilation, except that the baseline comes first once it is compiled.

    Args:
        baseline: the program without rematerialization.
        unplanned: the choice for it.
        report: called with a description of each compilation.
    """

    def __init__(self, baseline: Baseline, unplanned: Choice, report: Callable[[str], None]):
        self._baseline, self._unplanned, self._report = baseline, unplanned, report
        self._baselines: dict[Cost, Candidate] = {}  # as compiled with fast options, and exactly
        self._others: dict[Hashable, Candidate] = {}  # by `_key`

    def __iter__(self) -> Iterator[Candidate]:
        return iter([*self._with_cost(self._baseline.compiled), *self._others.values()])

    def __len__(self) -> int:
        return len(self._others) + (self._baseline.compiled is not None)

    def find(self, choice: Choice) -> Candidate | None:
        """The candidate of a choice; None if it is not compiled."""
        key = _key(choice)
        if key == _key(self._unplanned):
            return next(self._with_cost(self._baseline.compiled), None)
        return self._others.get(key)

    def measure(self, choice: Choice, name: str = "plan") -> Candidate:
        """Compile a choice, unless it was compiled before."""
        earlier, key = self.find(choice), _key(choice)
        if earlier is not None:
            return earlier
        if key == _key(self._unplanned):  # the model, which said that it takes too much, was wrong
            return next(self._with_cost(self._baseline.compile_exactly()))
        predicted = self.predict(choice.peak)
        self._report(f"compiling candidate {len(self) + 1}")
        compiled = self._baseline.program_of(choice.rewrite(), candidate_options()).cost

        # The operations that rewriting adds to the equations are exact, checkpointed loops included.
        added_cost = compiled.flops - self._baseline.flops
        self._others[key] = Candidate(name, choice, added_cost, compiled, predicted)
        return self._others[key]

    def best(self, budget: float) -> Candidate | None:
        """The cheapest candidate that keeps a budget."""
        return cheapest_within(self, budget)

    def smallest(self) -> Candidate:
        return min(self, key=lambda c: c.temp_bytes)

    def predict(self, peak: float) -> float:
        """Predict the temporary bytes of a choice with this peak."""
        return predicted_bytes(peak, self.known())

    def known(self) -> list[Candidate]:
        """The candidates, and the baseline if it is extrapolated."""
        return [*self._with_cost(self._baseline.known), *self._others.values()]

    # -- the baseline ------------------------------------------------------------------------------------------------

    def compile_baseline(self) -> Candidate:
        """Compile the baseline, unless it is compiled."""
        return next(self._with_cost(self._baseline.compile()))

    def baseline_bytes(self) -> int:
        """Temporary bytes of the baseline: by its program, or extrapolated for a long one."""
        return (self._baseline.known or self._baseline.compile()).temp_bytes

    @property
    def unplanned_bytes(self) -> int:
        """Temporary bytes of the baseline: as of `baseline_bytes` if these are known, else predicted."""
        compiled = self._baseline.known
        return int(self.predict(self._unplanned.peak)) if compiled is None else compiled.temp_bytes

    def _with_cost(self, cost: Cost | None) -> Iterator[Candidate]:
        """The baseline, if it has a cost."""
        if cost is not None:
            if cost not in self._baselines:
                predicted = predicted_bytes(self._unplanned.peak, [*self._others.values()])
                self._baselines[cost] = Candidate(BASELINE, self._unplanned, 0.0, cost, predicted)
            yield self._baselines[cost]


def _key(choice: Choice) -> Hashable:
    # The decisions alone, since measurements change an option's bytes; and where parts stay unchanged, cuts make no
    # difference.
    pairs = zip(choice.regions, [o.decision for o in choice.options], strict=True)
    return tuple([(r.start, r.end, decision) for r, decision in pairs if decision != UNPLANNED])


def cheapest_within(compiled: Iterable[Compiled], num_bytes: float) -> Compiled | None:
    """The compiled program of the least added cost with at most these temporary bytes."""
    fitting = [c for c in compiled if c.temp_bytes <= num_bytes]
    return min(fitting, key=lambda c: (c.added_cost, c.name != BASELINE, c.temp_bytes), default=None)


def best_within(compiled: Iterable[Compiled], num_bytes: float, objective: str) -> Compiled | None:
    """The compiled program of the least estimated time with at most these temporary bytes; for ``"flops"`` of the least
    cost. Operations decide between times that are nearly equal, and alone where the time of the cheapest is not told.
    """
    fitting = [c for c in compiled if c.temp_bytes <= num_bytes]
    cheapest = cheapest_within(fitting, num_bytes)
    if objective == "flops" or cheapest is None or cheapest.compiled.seconds is None:
        return cheapest
    seconds = {c: c.compiled.seconds for c in fitting if c.compiled.seconds is not None}
    least = (1 + TUNED.negligible) * min(seconds.values())
    return cheapest_within([c for c, told in seconds.items() if told <= least], num_bytes)


def predicted_bytes(peak: float, candidates: Sequence[Candidate]) -> float:
    """Predict the temporary bytes of a choice with this peak, by interpolation between compiled candidates."""
    points = sorted({(c.choice.peak, c.temp_bytes) for c in candidates if c.name != BASELINE})
    if not points:
        # Only the baseline: a bad guide, since XLA fuses more without remat. Take the geometric mean of it and the
        # model.
        points = sorted({(c.choice.peak, math.sqrt(c.choice.peak * c.temp_bytes)) for c in candidates})
    if not points:
        return peak
    return _interpolate(points, peak)


def _interpolate(points: Sequence[tuple[float, float]], peak: float) -> float:
    """Predict the bytes for a peak of the model from points (peak, measured bytes), in ascending order."""
    # Piecewise linear, and proportional beyond both ends; a lower peak is never predicted to take more memory than a
    # higher one took: XLA's memory is not monotone, and what costs less than a plan that fits is sought above it.
    peaks, temps = np.array(points, float).T
    temps = np.minimum.accumulate(temps[::-1])[::-1]
    if peak <= peaks[0]:
        return float(max(0.0, temps[0] + (peak - peaks[0]) * _slope(peaks[0], temps[0])))
    if peak >= peaks[-1]:
        return float(temps[-1] + (peak - peaks[-1]) * _slope(peaks[-1], temps[-1]))
    return float(np.interp(peak, peaks, temps))


def _slope(peak: float, temp: float) -> float:
    return temp / peak if peak > 0 else 1.0


# -- the program without rematerialization ---------------------------------------------------------------------------


class Baseline:
    """The program without rematerialization.

    Its operations are known without compilation. It is compiled on demand, with fast options at first; a long program
    of equal periods has its cost extrapolated from shorter versions until it is compiled.

    Args:
        report: called with a description of each step.

    Attributes:
        program_of: see `ProgramOf`.
        compiled: the cost of the compiled program; None until it is compiled.
    """

    def __init__(self, program: Flat, program_of: ProgramOf, report: Callable[[str], None]):
        self.program_of, self._report = program_of, report
        self._jaxpr = _without_remat(program)
        self.compiled: Cost | None = None

        # Whether `compiled` will be the users' compilation.
        self._is_exact = fast_compile_options() == candidate_options()

        run = repetition(program) if is_long(program) else None
        self._shorter = None if run is None else Shorter(program, run, self._short_program)

    @cached_property
    def _program(self) -> Program:
        return self.program_of(self._jaxpr, fast_compile_options())

    def _short_program(self, jaxpr: Jaxpr) -> Program:
        return self.program_of(_without_remat(Flat(jaxpr)), fast_compile_options())

    @property
    def flops(self) -> int:
        """Operations with the gradient, known without compilation."""
        short = None if self._shorter is None else self._shorter.flops
        return self._program.flops if short is None else short

    @cached_property
    def flops_without_remat(self) -> int:
        """Operations with all rematerialized functions inlined. `flops` includes recomputation within branches and
        nested loops, which plans leave.
        """
        jaxpr = self.jaxpr_without_remat
        return self.flops if jaxpr is self._jaxpr else self.program_of(jaxpr, fast_compile_options()).flops

    @cached_property
    def jaxpr_without_remat(self) -> Jaxpr:
        """The program with rematerialized functions inlined at any depth."""
        has_remat = any(eqn.primitive.name in REMAT for eqn in _jax.equations_in(self._jaxpr))
        return inline(self._jaxpr, calls=REMAT) if has_remat else self._jaxpr

    @cached_property
    def extrapolated(self) -> Cost | None:
        """The cost of a long program, by shorter versions; None if it is not long, or not linear."""
        if self._shorter is None:
            return None
        self._report("compiling short versions of the baseline")
        return self._shorter.cost()

    @property
    def known(self) -> Cost | None:
        """The cost as compiled, or else extrapolated; None if neither is known."""
        return self.extrapolated if self.compiled is None else self.compiled

    @property
    def is_started(self) -> bool:
        """Whether its compilation has begun."""
        return "_compiling" in vars(self)

    def start(self) -> None:
        """Start to compile it, unless shorter versions tell its cost."""
        if self._shorter is None:
            _ = self._compiling

    @cached_property
    def _compiling(self) -> concurrent.futures.Future[Cost]:
        # While Python analyzes the regions: for a large program this compilation takes longest, since the whole is one
        # region. Traced here: the thread only compiles.
        program = self._program
        return _in_thread(lambda: program.cost)

    def compile(self) -> Cost:
        """Compile it, unless it is compiled."""
        if self.compiled is None:
            if not self._compiling.done():
                self._report("compiling the baseline")
            self.compiled = self._compiling.result()
        return self.compiled

    def compile_exactly(self) -> Cost:
        """Compile it without the options that may change its memory: for where it may be the answer."""
        if self.compiled is None or not self._is_exact:
            self._report("compiling the baseline")
            self.compiled = self.program_of(self._jaxpr, candidate_options()).cost
            self._is_exact = True
        return self.compiled


def _in_thread(run: Callable[[], Result]) -> concurrent.futures.Future[Result]:
    """Run a function that compiles in a thread: XLA releases the GIL."""
    pool = concurrent.futures.ThreadPoolExecutor(1)
    future = pool.submit(run)
    pool.shutdown(wait=False)
    return future


def _without_remat(program: Flat) -> Jaxpr:
    parts = program.split()
    return rewrite(program.jaxpr, parts, [UNPLANNED] * len(parts))


# -- long programs

_COUNTS = (3, 4, 5)  # periods of the short versions


class Shorter:
    """Short versions of a program, which compile in a thread from the beginning.

    Args:
        run: the equal periods.
        program_of: a program to compile, with its gradient, for one without rematerialization.
    """

    def __init__(self, program: Flat, run: Run, program_of: Callable[[Jaxpr], Program]):
        self._count = run.num
        self._programs = [program_of(_shortened(program.jaxpr, run, count)) for count in _COUNTS]
        self._costs = _in_thread(lambda: [program.cost for program in self._programs])

    @cached_property
    def flops(self) -> int | None:
        """Operations of the whole program; None if they are not linear."""
        first, second, third = (program.flops for program in self._programs)
        of_period, remainder = divmod(third - second, _COUNTS[2] - _COUNTS[1])
        is_linear = remainder == 0 and third - second == second - first
        return third + of_period * (self._count - _COUNTS[2]) if is_linear else None

    def cost(self) -> Cost | None:
        """Extrapolate the cost of the whole program; None if it is not linear."""
        first, second, third = map(dataclasses.asdict, self._costs.result())
        change = second["temp_bytes"] - first["temp_bytes"]
        if change < 0 or abs(third["temp_bytes"] - second["temp_bytes"] - change) > change / 1000:
            return None
        steps = (self._count - _COUNTS[2]) / (_COUNTS[1] - _COUNTS[0])

        def extrapolated(name: str) -> Any:
            a, b = second[name], third[name]
            return None if None in (a, b) else type(b)(b + steps * (b - a))

        return Cost(**{name: extrapolated(name) for name in third})


def is_long(program: Flat) -> bool:
    """Whether a program takes many seconds to compile."""
    return len(program) >= TUNED.long_equations


def repetition(program: Flat) -> Run | None:
    """The largest number of equal periods that all read their predecessor alike; None if there are few."""
    runs = [_equal_periods(program, run) for run in runs_of(program, crossing_bytes(program.jaxpr), program.ends)[0]]
    # Fewer than all short versions have together are as soon compiled.
    return max((r for r in runs if r.num >= sum(_COUNTS)), key=lambda r: r.period * r.num, default=None)


def _equal_periods(program: Flat, run: Run) -> Run:
    """The longest stretch of equal periods in a run."""
    best, length = Run(run.start, run.period, 0), 0
    parts = [program.part(*period) for period in itertools.pairwise(run.boundaries)]

    # The values that each reads of this run, by number, relative to its own.
    values = [v for e in program.jaxpr.eqns[run.start :] for v in e.outvars]
    number = dict(zip(values, itertools.count()))
    size = sum(len(e.outvars) for e in program.jaxpr.eqns[run.start :][: run.period])
    reads = [[number[v] - k * size if v in number else None for v in part.invars] for k, part in enumerate(parts)]
    for k, part in enumerate(parts):
        # The first of the stretch may read other values: those from before it.
        is_equal = length > 0 and part.key == parts[k - 1].key and (length == 1 or reads[k] == reads[k - 1])
        length = length + 1 if is_equal else 1
        if length > best.num:
            best = Run(run.boundaries[k + 1] - length * run.period, run.period, length)
    return best


def _shortened(jaxpr: Jaxpr, run: Run, count: int) -> Jaxpr:
    """The program with the first periods of a run only. What read a later one reads the last of them."""
    last, end = run.boundaries[count - 1], run.boundaries[-1]
    replaced: dict[Var, Var] = {}
    for start in run.boundaries[count:-1]:
        for last_eqn, dropped in zip(jaxpr.eqns[last:][: run.period], jaxpr.eqns[start:], strict=False):
            replaced.update(zip(dropped.outvars, last_eqn.outvars, strict=True))
    shortened = _jax.with_atoms(jaxpr, replaced, [*jaxpr.eqns[: last + run.period], *jaxpr.eqns[end:]])
    unread = last_reads(jaxpr).keys() - last_reads(shortened).keys()
    return _differentiated(shortened, [i for i, v in enumerate(jaxpr.invars) if v in unread and is_float(v.aval)])


def _differentiated(jaxpr: Jaxpr, inputs: Sequence[int]) -> Jaxpr:
    """Return the program whose gradient with respect to these inputs, which it does not read, is the inputs
    themselves.

    A gradient of zeros would take memory in a training step: the more, the shorter the version.
    """
    output = next((i for i, v in enumerate(jaxpr.outvars) if is_float(v.aval)), None)
    if not inputs or output is None:
        return jaxpr

    def run(*args: jax.Array) -> list[jax.Array]:
        outs = list(_jax.evaluate(jaxpr, (), args))
        outs[output] = _first(outs[output], [args[i] for i in inputs])
        return outs

    avals = [v.aval for v in jaxpr.invars]
    return Body.close(*_jax.stage(run, avals, traced_for="statetx.plan", name="shortened")).jaxpr


@jax.custom_vjp
def _first(x: jax.Array, values: list[jax.Array]) -> jax.Array:
    """`x`. The gradient with respect to `values` is `values`."""
    return x


_Pair = tuple[jax.Array, list[jax.Array]]
_forward: Callable[[jax.Array, list[jax.Array]], _Pair] = lambda x, values: (x, values)
_backward: Callable[[list[jax.Array], jax.Array], _Pair] = lambda values, gradient: (gradient, values)
_first.defvjp(_forward, _backward)  # pyright: ignore[reportUnknownMemberType]
