"""Search a plan for a budget: propose by the model, compile, read the memory, correct the model, propose again."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from .. import _jax
from .._equations.compiled import Cost, Program, fast_compile_options, memory_analysis_options
from .._equations.differentiate import with_pullback
from .._equations.flops import flops
from .._jax import Jaxpr
from .._lift.context import TraceContext
from .._remat.parse import as_policy
from .._text import format_bytes
from .._tree import is_float
from ..residuals.report import BASELINE
from ._analysis import EquationCost, Option
from ._layout import Layout
from ._parts import candidate_partitions, flatten

STOCK = ("everything", "dots", "dots_without_batch_dims", "nothing")
_MAX_TRIES = 7  # compilations for one budget, before the stock policies

# A stock policy is compiled unless the best candidate costs at most this part of the model's cost for it, or its predicted memory is
# above this multiple of the budget. Both figures are predictions, so the margins are wide (0.9 and 1.25 at first, widened so that
# each policy that might be cheaper is tried). They err by leaving out a policy whose program would turn out better than predicted.
_CLEARLY_CHEAPER = 0.95
_FAR_ABOVE_BUDGET = 2.0

# A gain below this part of the forward pass is not worth a compilation: about a thousandth of the program with its gradient.
_NEGLIGIBLE = 3e-3


@dataclasses.dataclass(frozen=True, eq=False)
class Candidate:
    """A compiled choice of options.

    Attributes:
        name: the stock policy's, "no remat" for the baseline, or "plan".
        options: one for each part of `layout`.
        peak: bytes, by the model.
        predicted_cost: of recomputation, by the model.
        added_cost: of recomputation, by the equations of the compiled program; by the model where these do not show it.
        compiled: the costs of the compiled program, gradient included.
        predicted_bytes: temporary bytes, predicted from the model and the candidates compiled before.
    """

    name: str
    layout: Layout
    options: list[Option]
    peak: int
    predicted_cost: float
    added_cost: float
    compiled: Cost
    predicted_bytes: float

    @property
    def temp_bytes(self) -> int:
        return self.compiled.temp_bytes


class Search:
    """The search over one program, shared by all budgets.

    Args:
        jaxpr: the program, without constants.
        diff_indices: the inputs to differentiate with respect to.
        num_out: number of differentiated outputs; they come first.
        equation_cost: see `EquationCost`.
        offload: the cost of fetching a byte from host memory; None if nothing is offloaded.
        time_limit: seconds.
        report: called with a description of each step.
        program_of: ``(jaxpr, compiler_options) -> Program`` to compile for a rewritten program; by default with its gradient.
        context: the transforms and shardings that the program runs under.

    Attributes:
        candidates: compiled candidates in order of compilation, except that the baseline comes first once it is compiled.
    """

    def __init__(
        self,
        jaxpr: Jaxpr,
        diff_indices: Sequence[int],
        num_out: int,
        *,
        equation_cost: EquationCost,
        offload: float | None = None,
        time_limit: float | None = None,
        report: Callable[[str], None] = lambda text: None,
        program_of: Callable[[Jaxpr, dict[str, Any]], Program] | None = None,
        context: TraceContext = TraceContext(),  # noqa: B008
    ):
        self._end = None if time_limit is None else time.monotonic() + time_limit
        self._report = report
        self._program_of = program_of or functools.partial(_with_gradient, list(diff_indices), num_out, context)
        self.equation_cost = equation_cost
        self.jaxpr = flatten(jaxpr)
        self.candidates: list[Candidate] = []
        self._tried: dict[Any, Candidate] = {}
        self._budget = float("inf")  # of the fit under way

        fronts: dict[Any, Any] = {}
        policies = [as_policy(p) for p in STOCK]
        report("analyzing the program")
        self.layouts: list[Layout] = []
        for program, cuts in candidate_partitions(self.jaxpr):
            if self.layouts and self.is_late():
                break
            options = {"policies": policies, "offload": offload, "deadline": self.is_late, "fronts": fronts}
            options |= {"context": context}
            self.layouts.append(Layout(program, cuts, diff_indices, num_out, equation_cost=equation_cost, **options))

            # The baseline and the stock policies are choices of the first layout: the user's regions, or the finest cuts.
            if len(self.layouts) == 1:
                self._start_baseline()
        self._forward_cost = sum(map(equation_cost, self.jaxpr.eqns))
        self._negligible = _NEGLIGIBLE * self._forward_cost

    def is_late(self) -> bool:
        """Whether the time is up."""
        return self._end is not None and time.monotonic() > self._end

    # -- fitting ---------------------------------------------------------------------------------------------------

    def fit(self, budget: int) -> Candidate | None:
        """Return the cheapest candidate within a budget, compiling a few; None if none of them keeps it.

        A bisection over limits of the model: a choice at `low` kept the budget, one at `high` did not. It is a heuristic: more
        memory by the model may be less in the compiled program, and the number of tries is limited. So a cheaper choice
        within the budget may be missed, and even the only one; a returned one keeps it, since its program was compiled.
        """
        self._budget = float(budget)
        # The baseline costs nothing: where it may be the answer, its bytes must be exact.
        self._finish_baseline()
        if self.baseline_bytes() <= budget:
            self._confirm_baseline()

        low, high = 0.0, float("inf")
        for _ in range(_MAX_TRIES):
            # Stop where little is left to gain: by the model, no choice below `high` costs less than `_least_cost(high)`.
            best = self.best(budget)
            if (best is not None and best.added_cost - self._least_cost(high) <= self._negligible) or self.is_late():
                break
            target = self._target(budget, low, high)
            choice = self._propose(target)
            if choice is None:  # the model thinks nothing fits: its choice of the lowest peak shows whether it is right
                if low == 0.0 and (least := self._lowest_peak()) is not None and not self._was_tried(*least):
                    self.measure(*least)
                    continue
                break

            # A choice that was compiled before gives its side of the bisection; go on to the nearest other choice.
            if self._was_tried(*choice):
                tried = self._tried[self._key(*choice)]
                low, high = (max(low, target), high) if tried.temp_bytes <= budget else (low, min(high, target))
                target = self._next_untried(low, high, tried, budget)
                choice = None if target is None else self._propose(target)
                if choice is None or self._was_tried(*choice):
                    break
            candidate = self.measure(*choice)
            assert target is not None
            low, high = (max(low, target), high) if candidate.temp_bytes <= budget else (low, min(high, target))

            # Half a percent of memory is not worth a compilation.
            if high <= low * 1.005:
                break

        # Whether the budget is infeasible is decided by the compiled program of the lowest peak, not by the model.
        if self.best(budget) is None and not self.is_late() and (least := self._lowest_peak()) is not None:
            self.measure(*least)
        self._try_stock(budget)
        return self.best(budget)

    def _best_so_far(self) -> str:
        """For progress: the cheapest candidate within the budget, or else the smallest."""
        best = self.best(self._budget) or (self.smallest() if self.candidates else None)
        if best is None:
            return ""
        percent = 100 * best.added_cost / max(self._forward_cost, 1e-30)  # operations, or seconds
        fits = "" if best.temp_bytes <= self._budget else ", above the budget"
        return f"; best so far {format_bytes(best.temp_bytes)}{fits}, {percent:+.1f}% of a forward pass"

    def best(self, budget: float) -> Candidate | None:
        """The cheapest compiled candidate that keeps a budget."""
        fitting = [c for c in self.candidates if c.temp_bytes <= budget]
        return min(fitting, key=lambda c: (c.added_cost, c.name != BASELINE, c.temp_bytes), default=None)

    def smallest(self) -> Candidate:
        return min(self.candidates, key=lambda c: c.temp_bytes)

    def ends(self) -> tuple[int, int]:
        """The least temporary bytes reached, and the baseline's."""
        self._finish_baseline()
        least = self._lowest_peak()
        if least is not None and not self.is_late():
            self.measure(*least)
        return self.smallest().temp_bytes, self.baseline_bytes()

    def baseline_bytes(self) -> int:
        """Temporary bytes of the baseline."""
        return self.baseline.temp_bytes

    def fraction_of_baseline(self, fraction: float) -> int:
        """A fraction of the baseline's temporary bytes."""
        if fraction > 0.99:  # the baseline may be the answer, and fast compilation may be off by a few hundred bytes
            self._confirm_baseline()
        return int(fraction * self.baseline_bytes())

    def curve(self, num: int = 20) -> list[tuple[float, float]]:
        """Points (predicted bytes, added operations or seconds relative to the baseline) of the model's best choices.

        From the least memory to the baseline's, monotone in both.
        """
        self._finish_baseline()
        low = min(layout.least_peak() for layout in self.layouts)
        high = max(low + 1, *(c.peak for c in self.candidates))
        total_cost = self.total_cost()

        # Only layouts with a compiled candidate, since each of the others would take a dynamic program for every point. So a point
        # may cost more than the best choice of all layouts.
        layouts = list({id(c.layout): c.layout for c in self.candidates}.values())
        points: list[tuple[float, float]] = []
        for limit in np.geomspace(low * 1.001 + 1, high * 1.001 + 1, num):
            choice = self._cheapest(limit, layouts)
            if choice is not None:
                cost = sum(o.cost for o in choice[1]) / total_cost
                points.append((self.predict(choice[0].peak(choice[1])), cost))

        # Predictions are not monotone in the limit: take running extrema.
        least = float("inf")
        for i, (_, cost) in enumerate(points):
            least = min(least, cost)
            points[i] = (max(b for b, _ in points[: i + 1]), least)
        baseline_bytes = float(self.baseline.temp_bytes)
        return [*(point for point in points if point[0] < baseline_bytes), (baseline_bytes, 0.0)]

    def total_cost(self) -> float:
        """The cost of the baseline with its gradient."""
        # The backward pass costs about twice the forward pass: a product has a derivative by each of its two operands. Times
        # are only known of equations, not of the compiled program.
        return max(1e-30, self._baseline_program.flops if self.equation_cost is flops else 3 * self._forward_cost)

    @property
    def baseline(self) -> Candidate:
        """The program without rematerialization."""
        self._finish_baseline()
        return self.candidates[0]

    def _start_baseline(self) -> None:
        """Start to compile the baseline in a thread, while Python analyses further layouts: XLA releases the GIL.

        For a large program this compilation takes longest, since the whole is one region.
        """
        self._has_baseline = False
        self._is_confirmed = fast_compile_options() == memory_analysis_options()
        self._baseline_program = self._program_of(
            self.layouts[0].rewrite(self._baseline_options), fast_compile_options()
        )
        pool = concurrent.futures.ThreadPoolExecutor(1)
        self._compiling = pool.submit(lambda: self._baseline_program.cost)
        pool.shutdown(wait=False)

    @property
    def _baseline_options(self) -> list[Option]:
        return [front.baseline for front in self.layouts[0].fronts]

    def _finish_baseline(self) -> None:
        if not self._has_baseline:
            if not self._compiling.done():
                self._report("compiling the baseline")
            self._set_baseline(self._compiling.result())

    def _confirm_baseline(self) -> None:
        """Compile the baseline again where it may be the answer, without the options that may change its memory."""
        if not self._is_confirmed:
            self._report("compiling the baseline")
            self._set_baseline(
                self._program_of(self.layouts[0].rewrite(self._baseline_options), memory_analysis_options()).cost
            )
            self._is_confirmed = True

    def _set_baseline(self, compiled: Cost) -> None:
        layout, options = self.layouts[0], self._baseline_options
        peak = layout.peak(options)
        baseline = Candidate(BASELINE, layout, options, peak, 0.0, 0.0, compiled, self.predict(peak))
        self._tried[self._key(layout, options)] = baseline
        candidates = self.candidates[1:] if self._has_baseline else self.candidates
        self.candidates = [baseline, *candidates]
        self._has_baseline = True

    def _least_cost(self, limit: float) -> float:
        """The least cost of the choices that the model puts below a limit; 0 if there is none."""
        choice = self._cheapest(limit) if limit < float("inf") else None
        return 0.0 if choice is None else sum(o.cost for o in choice[1])

    def _lowest_peak(self) -> tuple[Layout, list[Option]] | None:
        """The choice of the lowest peak, after measuring the options that come near it."""
        while True:
            # The cheapest choice within 0.1% of the lowest peak, rather than any at it.
            limit = min(layout.least_peak() for layout in self.layouts) * 1.001 + 1
            choice = self._cheapest(limit)
            if (
                choice is None
                or self.is_late()
                or not (self._measure_parts(*choice) | self._measure_peak_part(*choice, 1.1 * limit))
            ):
                return choice

    def _measure_peak_part(self, layout: Layout, options: Sequence[Option], limit: float) -> bool:
        """Measure all options of the peak's part that fit a limit there. Returns whether anything was new."""
        part, saved_bytes = layout.peak_part(options)
        front, spare = layout.fronts[part], limit - layout.base[part] - saved_bytes
        fitting = [o for o in front.options if o.saved_bytes + o.backward_bytes <= spare]

        # A list, not a generator: `any` would stop at the first new measurement.
        return any([front.measure(o) for o in fitting if not self.is_late()])

    def _propose(self, limit: float) -> tuple[Layout, list[Option]] | None:
        """The cheapest choice of all layouts that the model puts within a limit, made of measured options only."""
        # A measurement changes the bytes of chosen options, and so may change the choice. The loop ends: every turn but the last
        # measures an option for the first time, and there are finitely many.
        while True:
            choice = self._cheapest(limit)
            if choice is None or not self._measure_parts(*choice):
                return choice

    def _measure_parts(self, layout: Layout, options: Sequence[Option]) -> bool:
        """Measure the options of a choice, each on its own. Returns whether anything was new."""
        pairs = zip(layout.fronts, options, strict=True)
        return any([front.measure(option) for front, option in pairs if not self.is_late()])

    def _cheapest(self, limit: float, layouts: Sequence[Layout] | None = None) -> tuple[Layout, list[Option]] | None:
        layouts, choices = layouts or self.layouts, []
        for i, layout in enumerate(layouts):
            options = layout.choose(limit)
            if options is not None:
                # Of equal costs the choice with fewer parts, then of the earlier layout: options themselves are not compared.
                choices.append((sum(o.cost for o in options), len(layout.parts), i, options))
        if not choices:
            return None
        _, _, i, options = min(choices, key=lambda c: c[:3])
        return layouts[i], options

    def _next_untried(self, low: float, high: float, tried: Candidate, budget: int) -> float | None:
        """The next limit of the model that gives a new choice: above a candidate that fits, below one that does not."""
        # In steps of 2%, which reach a factor of 3.3. Choices within one step of another are missed.
        step = 1.02 if tried.temp_bytes <= budget else 1 / 1.02
        target = float(tried.peak)  # limits between this peak and the one that chose it give the same choice
        for _ in range(60):
            target *= step
            if not low <= target <= high:
                return None
            choice = self._propose(target)
            if choice is None:
                return None
            if not self._was_tried(*choice):
                return target
        return None

    def _try_stock(self, budget: int) -> None:
        """Compile the stock policies that the model thinks cheaper than the best candidate, or all if there is none."""
        for n, name in enumerate(STOCK):
            best = self.best(budget)
            layout = self.layouts[0]
            options = layout.stock(n)
            if self._was_tried(layout, options) or self.is_late():
                continue
            if best is not None:
                # Not worth a compilation: a policy clearly more expensive than the best, or predicted far above the budget.
                if best.added_cost <= max(_CLEARLY_CHEAPER * sum(o.cost for o in options), self._negligible):
                    continue
                if self._measure_parts(layout, options):
                    options = layout.stock(n)
                if self.predict(layout.peak(options)) > _FAR_ABOVE_BUDGET * budget:
                    continue
            self.measure(layout, options, name)

    # -- the corrected model -----------------------------------------------------------------------------------------

    def predict(self, peak: float, candidates: Sequence[Candidate] | None = None) -> float:
        """Predict the temporary bytes of a choice with this peak, by interpolation between compiled candidates."""
        candidates = self.candidates if candidates is None else candidates
        points = sorted({(c.peak, c.temp_bytes) for c in candidates if c.name != BASELINE})
        if not points:
            # Only the baseline: a bad guide, since XLA fuses more without remat. Take the geometric mean of it and the model.
            points = sorted({(c.peak, math.sqrt(c.peak * c.temp_bytes)) for c in candidates})
        if not points:
            return peak
        # Piecewise linear, and proportional beyond both ends; a higher peak is never predicted to take less memory.
        peaks, temps = np.array(points, float).T
        temps = np.maximum.accumulate(temps)
        if peak <= peaks[0]:
            return float(max(0.0, temps[0] + (peak - peaks[0]) * _slope(peaks[0], temps[0])))
        if peak >= peaks[-1]:
            return float(temps[-1] + (peak - peaks[-1]) * _slope(peaks[-1], temps[-1]))
        return float(np.interp(peak, peaks, temps))

    def _target(self, budget: int, low: float, high: float) -> float:
        """The limit of the model at which the prediction meets the budget."""
        # `predict` is monotone, so bisection applies. Without an upper limit, four times the largest number known stands for it.
        bottom, top = low, high if high < float("inf") else 4.0 * max([budget, *(c.peak for c in self.candidates)])
        for _ in range(50):
            middle = (bottom + top) / 2
            bottom, top = (middle, top) if self.predict(middle) <= budget else (bottom, middle)
        if high < float("inf"):  # stay clear of both ends, so that each try shortens the interval by a tenth or more
            margin = 0.1 * (high - low)
            return min(max(bottom, low + margin), high - margin)
        return bottom

    # -- compiling ---------------------------------------------------------------------------------------------------

    def _key(self, layout: Layout, options: Sequence[Option]) -> Any:
        # The decisions alone, since measurements change an option's bytes. Layouts live as long as the search: ids are unique.
        return id(layout), tuple((o.saved, o.offloaded, o.loop) for o in options)

    def _was_tried(self, layout: Layout, options: Sequence[Option]) -> bool:
        return self._key(layout, options) in self._tried

    def measure(self, layout: Layout, options: Sequence[Option], name: str = "plan") -> Candidate:
        """Compile a choice, unless it was compiled before."""
        key = self._key(layout, options)
        if key in self._tried:
            return self._tried[key]
        peak = layout.peak(options)
        predicted_bytes = self.predict(peak)
        self._report(f"compiling candidate {len(self.candidates) + 1}{self._best_so_far()}")
        compiled = self._program_of(layout.rewrite(options), memory_analysis_options()).cost

        # The operations that rewriting adds to the equations are exact, checkpointed loops included. Seconds are known by
        # the model only.
        predicted_cost = sum(o.cost for o in options)
        added_cost = predicted_cost
        if self.equation_cost is flops:
            added_cost = compiled.flops - self._baseline_program.flops
        candidate = Candidate(name, layout, list(options), peak, predicted_cost, added_cost, compiled, predicted_bytes)
        self._tried[key] = candidate
        self.candidates.append(candidate)
        return candidate


def _slope(peak: float, temp: float) -> float:
    return temp / peak if peak > 0 else 1.0


def _with_gradient(
    diff_indices: Sequence[int], num_out: int, context: TraceContext, jaxpr: Jaxpr, compiler_options: dict[str, Any]
) -> Program:
    """A program without constants, with the gradient of its first `num_out` outputs with respect to these inputs."""

    def run(*inputs: Any) -> tuple[list[Any], list[Any]]:
        all_outs = _jax.evaluate(jaxpr, (), inputs)
        outs, new_states = all_outs[:num_out], all_outs[num_out:]

        # Outputs without a derivative and new states stay outputs, as in the user's program, so they are not temporary.
        return [jnp.asarray(x) for x in outs if is_float(x)], [*(x for x in outs if not is_float(x)), *new_states]

    return context.program(with_pullback(run, diff_indices), [v.aval for v in jaxpr.invars], compiler_options)
