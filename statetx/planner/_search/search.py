"""Search a plan for a budget: propose by the model, compile, read the memory, correct the model, propose again."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from ..._equations.primitives import flops
from ..._jax import Jaxpr
from ..._lift.context import TraceContext
from ..._remat.parse import as_policy
from ..._text import format_bytes
from ...residuals.report import BASELINE
from .._budget import TimeLeft
from .._program.flat import Flat, flatten
from .._program.values import Formats
from .._regions.lattice import Choice, Family, Lattice, cost_of
from .._regions.layout import Analysis, Layout, measure
from .._treatments import TREATMENTS
from .._treatments.treatment import Option, Settings, Treatment
from .baseline import Baseline, ProgramOf, is_long
from .candidates import (
    STOCK,
    Candidate,
    Candidates,
    compile_within,
    outcome,
    policies_in,
    predicted_bytes,
    with_gradient,
)

_ANALYSIS = 0.5  # of the time limit, at most: the rest is for compilations of whole programs
_PATIENCE = 2.0  # times the time limit, at most, until a first candidate keeps the budget
_PERSISTENCE = 3  # so many times as many tries as long as no candidate keeps the budget, but one comes near
_HOPELESS = 1.3  # of the budget: if the smallest of as many candidates takes more, the search ends
_SCATTER = 0.03  # of a prediction of bytes: the memory of choices that the model finds alike differs so much
_DRIFT = 0.3  # of a prediction, for each e-fold between the model's bytes and those that it is made from
_WORTH = 0.05  # of what is negligible: an expected gain that is worth a compilation
_EXPENSIVE = 0.25  # of the baseline's cost: a plan that adds more is made cheaper even when the time is up
_LAST_TRIES = 2  # compilations then, each of which corrects the prediction
_MODEL_ERROR = 1.0  # of the bytes of a backward pass: so much more it may take than the model says
_NEARLY = 1.02  # of a budget: extrapolated bytes below this are made sure of


class Effort(NamedTuple):
    """What a search may spend.

    Attributes:
        tries: compilations without an improvement.
        negligible: forward passes: a gain that is not worth a compilation.
        limits: to try, by the one that the prediction puts at the budget; each takes a dynamic program.
        unplanned: the multiple of a budget up to which the baseline, as the model predicts it, may be worth its
            compilation; the model may be far off.
        stock: the same for a stock policy.
    """

    tries: int
    negligible: float
    limits: tuple[float, ...]
    unplanned: float
    stock: float


EFFORT = Effort(8, 0.003, (0.8, 0.9, 0.95, 0.98, 1.0, 1.02, 1.05, 1.1, 1.2, 1.35, 1.6), 4.0, 2.0)
EFFORT_OF_LONG = Effort(2, 0.006, (0.95, 1.0, 1.05), 2.0, 1.2)  # a compilation takes many seconds, a limit one


class Search:
    """The search over one program, shared by all budgets.

    Args:
        jaxpr: the program, without constants.
        diff_indices: the inputs to differentiate with respect to.
        num_out: number of differentiated outputs; they come first.
        offload: whether values may be stored in host memory.
        time_left: the time that it may take.
        report: called with a description of each step.
        program_of: see `ProgramOf`; by default the program with its gradient.
        context: the transforms and shardings that the program runs under.
        compile_baseline: whether the baseline is compiled in any case, beside the analysis; otherwise only where it may
            be the answer, or is asked for.
        formats: in which values may be held between the passes.
        has_others: whether the step takes other gradients.
        treatments: that make proposals.

    Attributes:
        lattice: the regions, and the choice among them.
        baseline: the program without rematerialization.
        candidates: what is compiled.
        lacks_regions: whether the time ended the analysis.
    """

    def __init__(
        self,
        jaxpr: Jaxpr,
        diff_indices: Sequence[int],
        num_out: int,
        *,
        offload: bool = False,
        time_left: TimeLeft,
        report: Callable[[str], None] = lambda text: None,
        program_of: ProgramOf | None = None,
        context: TraceContext = TraceContext(),  # noqa: B008
        compile_baseline: bool = True,
        formats: Formats = (),
        has_others: bool = False,
        treatments: Sequence[type[Treatment]] = TREATMENTS,
    ):
        self._time_left = time_left
        self.jaxpr = flatten(jaxpr)
        self.lacks_regions = False
        self._budget: float = float("inf")  # of the fit under way

        # The baseline, whose regions all stay unchanged, compiles in a thread while the others are analyzed.
        program = Flat(self.jaxpr)
        if program_of is None:
            program_of = functools.partial(with_gradient, list(diff_indices), num_out, context)
        self.baseline = Baseline(program, program_of, report)
        if compile_baseline:
            self.baseline.start()
        report("analyzing the program")
        # The fence keeps loops from allocating what their backward passes write before it is their turn; it takes a
        # copy of a cotangent.
        settings = Settings(formats, is_alone=len(program.loops) < 2 and not has_others)
        policies = [as_policy(p) for p in STOCK]
        analysis = Analysis(policies, offload, self._is_late_for_regions, context, settings, treatments)
        self.lattice = Lattice(program, diff_indices, num_out, analysis)
        self._stock = policies_in(self.lattice)
        # Remat on the blocks: of all plans the surest to keep a budget, of those that take no time to find.
        self._on_blocks = self._stock[STOCK.index("nothing")]
        layout, _ = self.lattice.stock_layout
        unplanned = layout, [front.baseline for front in layout.fronts]
        report_candidate = lambda text: report(text + self._best_so_far())
        self.candidates = Candidates(self.baseline, unplanned, program_of, report_candidate)
        self._forward_cost = sum(map(flops, program.jaxpr.eqns))
        self._is_long = is_long(program)
        self._effort = EFFORT_OF_LONG if self._is_long else EFFORT
        self._negligible = self._effort.negligible * self._forward_cost

    def is_late(self) -> bool:
        """Whether the time is up: more of it, as long as no candidate keeps the budget, but one may."""
        is_found = self.candidates.best(self._budget) is not None
        is_hopeless = len(self.candidates) > self._effort.tries and not self._may_find(self._budget)
        return self._time_left.is_over(1.0 if is_found or is_hopeless else _PATIENCE)

    def _is_late_for_regions(self) -> bool:
        """Whether the time for the analysis is up. A plan of the regions found until then beats none."""
        is_late = self._time_left.is_over(_ANALYSIS)
        self.lacks_regions |= is_late
        return is_late

    def _is_late_for_parts(self) -> bool:
        """Whether the time to measure parts is up: half of it, as long as no plan is compiled, which takes longest."""
        is_first = all(c.name == BASELINE for c in self.candidates)
        return self._time_left.is_over(_ANALYSIS if is_first else 1.0)

    # -- fitting ---------------------------------------------------------------------------------------------------

    def fit(self, budget_of: Callable[[], int]) -> Candidate | None:
        """Return the cheapest candidate within a budget, compiling a few; None if none of them keeps it.

        The budget is asked again once something is compiled: until then arguments and outputs are estimated, and what
        they leave.

        It is a heuristic: more memory by the model may be less in the compiled program, and the number of tries is
        limited; some more follow each improvement. So a cheaper choice within the budget may be missed, and even the
        only one; a returned one keeps it, since its program was compiled.
        """
        budget = self._budget = budget_of()
        # The baseline costs nothing: where it may be the answer, its bytes must be exact. Far above the budget it is
        # not compiled.
        if self.baseline.extrapolated is not None:
            if self.baseline.extrapolated.temp_bytes <= _NEARLY * budget:
                self.candidates.confirm_baseline()
        elif self.baseline.is_started or self.candidates.baseline_peak <= self._effort.unplanned * budget:
            self.candidates.compile_baseline()
            budget = self._budget = budget_of()
            if self.candidates.baseline_bytes() <= budget:
                self.candidates.confirm_baseline()

        budget = self._improve(budget_of)
        found = self.candidates.best(budget)
        # Whether the budget is infeasible is decided by the compiled programs of the lowest peaks, not by the model.
        if found is None and not self.is_late():
            self.candidates.measure(*self._on_blocks.choice, self._on_blocks.name)
        for family in self.lattice.families:
            if self.candidates.best(budget) is None and not self.is_late():
                least = _lowest_peak_choice(family, self._is_late_for_parts)
                if least is not None:
                    self.candidates.measure(*least)
                    if family.treatment is None:
                        self._try_saving_nothing(least[0], budget)
        if len(self.candidates) and self.candidates.best(budget) not in (None, found):
            budget = self._improve(budget_of)
        # No plan costs more than a stock policy that keeps the budget, unless that is predicted to miss it by far.
        most = self._effort.stock * budget
        compile_within(self._stock, self.candidates, most, self.is_late, lambda: self._cost_of_best(budget))
        if self.is_late():
            self._measure_last(budget)
        return self.candidates.best(budget)

    def _improve(self, budget_of: Callable[[], int]) -> int:
        """Compile the choices of the most expected gain, until none is left that is worth it, and return the budget."""
        budget, num_vain = budget_of(), 0
        while not self.is_late():
            best = self.candidates.best(budget)
            most = self._effort.tries * (_PERSISTENCE if best is None and self._may_find(budget) else 1)
            choice = self._most_promising(budget, best) if num_vain < most else None
            if choice is None:
                break
            self.candidates.measure(*choice)
            budget = self._budget = budget_of()
            num_vain = num_vain + 1 if self.candidates.best(budget) is best else 0
        return budget

    def _most_promising(self, budget: int, best: Candidate | None) -> tuple[Layout, list[Option], str] | None:
        """The choice of the most expected gain, made of measured options; None if none is worth a compilation."""
        while True:
            found = self._proposals(budget, best)
            if not found:
                return None
            layout, options, name = max(found, key=lambda x: x[0])[1]
            if not _measure_parts(layout, options, self._is_late_for_parts):
                return layout, options, name

    def _proposals(self, budget: int, best: Candidate | None) -> list[tuple[float, tuple[Layout, list[Option], str]]]:
        """Choices that are not compiled, each with the gain that is expected of it: what it spares, times the
        probability that it keeps the budget.
        """
        found = []
        choices: list[tuple[Layout, list[Option], str]] = []
        for family in self.lattice.families:
            target = self._limit_for(budget, self._guides(family))
            if best is None:
                target = max(target, 1.001 * family.least_peak() + 1)
            for step in self._effort.limits:
                choice = family.choose(step * target)
                if choice is not None:
                    choices.append((*choice, "plan"))
        # After a miss also what is surer than the cheapest by the model.
        if best is None and any(c.name != BASELINE for c in self.candidates):
            choices += [(*policy.choice, policy.name) for policy in self._stock]
        for layout, options, name in choices:
            cost = sum(o.cost for o in options)
            # Until something keeps the budget, whatever does is a gain, the cheaper the more.
            gain = self._high_cost / (1 + cost / self._high_cost) if best is None else best.predicted_cost - cost
            if gain > self._negligible and not self.candidates.has(layout, options):
                value = gain * self._probability(layout.peak(options), budget, self._guides(self._family_of(options)))
                if best is None or value > _WORTH * self._negligible:
                    found.append((value, (layout, options, name)))
        return found

    def _probability(self, peak: float, budget: int, guides: Sequence[Candidate]) -> float:
        """The probability that a choice with this peak keeps the budget."""
        predicted = max(predicted_bytes(peak, guides), 1.0)
        distance = min((abs(math.log(max(peak, 1) / max(c.peak, 1))) for c in guides), default=1.0)
        error = _SCATTER + _DRIFT * min(distance, 1.0)
        excess = math.log(predicted / max(budget, 1)) / error
        return 1 / (1 + math.exp(min(excess, 700.0)))  # logistic: some errors are large

    @functools.cached_property
    def _high_cost(self) -> float:
        return max(*(cost_of(policy.choice) for policy in self._stock), self._forward_cost)

    def _cost_of_best(self, budget: int) -> float:
        best = self.candidates.best(budget)
        return float("inf") if best is None else best.added_cost - self._negligible

    def _try_saving_nothing(self, layout: Layout, budget: int) -> None:
        """XLA may hold a value twice that a region both saves and outputs, which the model counts once."""
        if self.is_late() or not self._may_find(budget):
            return
        nothing = STOCK.index("nothing")
        options = [front.baseline if front.is_free else front.stock[nothing] for front in layout.fronts]
        self.candidates.measure(layout, options)

    def _may_find(self, budget: float) -> bool:
        """Whether the budget is missed so far, but not by far."""
        if not self.candidates or self.candidates.best(budget) is not None:
            return False
        return self.candidates.smallest().temp_bytes <= _HOPELESS * budget

    def _measure_last(self, budget: int) -> None:
        """Compile the cheapest choices that are predicted to keep the budget, which takes no time to find, until one of
        them does.

        Unless a candidate keeps it that adds few operations. After these the blocks' own rematerialization, which takes
        the least of many programs.
        """
        if not self.candidates and not self._is_long:
            self.candidates.compile_baseline()  # the prediction needs one
        best = self.candidates.best(budget)
        if best is not None and best.added_cost <= _EXPENSIVE * self.total_cost():
            return
        family = self.lattice.families[0]
        # The first choice of a long program may take long to compile; that of the blocks' own rematerialization does
        # not.
        for _ in range(_LAST_TRIES if self.candidates else 0):
            choice = family.choose(self._limit_for(budget, self._guides(family)))
            if choice is None or (best is not None and cost_of(choice) >= best.predicted_cost):
                break
            if self.candidates.measure(*choice).temp_bytes <= budget:
                return
        if best is None:
            self.candidates.measure(*self._on_blocks.choice, self._on_blocks.name)

    def _best_so_far(self) -> str:
        """For progress: the cheapest candidate within the budget, or else the smallest."""
        best = self.candidates.best(self._budget) or (self.candidates.smallest() if self.candidates else None)
        if best is None:
            return ""
        percent = 100 * best.added_cost / max(self._forward_cost, 1e-30)
        fits = "" if best.temp_bytes <= self._budget else ", above the budget"
        return f"; best so far {format_bytes(best.temp_bytes)}{fits}, {percent:+.1f}% of a forward pass"

    def smallest_bytes(self) -> int:
        """The least temporary bytes reached. A small program may take the least without rematerialization."""
        least = self.candidates.smallest().temp_bytes
        if not self._is_long and self.candidates.unplanned_bytes <= self._effort.unplanned * least:
            least = min(least, self.candidates.baseline_bytes())
        return least

    def ends(self) -> tuple[int, int]:
        """The least temporary bytes reached, and the baseline's."""
        self.candidates.baseline_bytes()
        for family in self.lattice.families:
            least = _lowest_peak_choice(family, self._is_late_for_parts)
            if least is not None and not self.is_late():
                self.candidates.measure(*least)
        return self.candidates.smallest().temp_bytes, self.candidates.baseline_bytes()

    def fraction_of_baseline(self, fraction: float) -> int:
        """A fraction of the baseline's temporary bytes."""
        if fraction > 0.99:  # the baseline may be the answer, and fast compilation may be off by a few hundred bytes
            self.candidates.confirm_baseline()
        return int(fraction * self.candidates.baseline_bytes())

    def curve(self, num: int = 20) -> list[tuple[float, float]]:
        """Points (predicted bytes, added operations or seconds relative to the baseline) of the model's best choices.

        From the least memory to the baseline's, monotone in both.
        """
        everything = self.lattice.families[0]
        low = everything.least_peak()
        high = max(low + 1, self.candidates.baseline_peak, *(c.peak for c in self.candidates))
        total_cost = self.total_cost()

        points: list[tuple[float, float]] = []
        for limit in np.geomspace(low * 1.001 + 1, high * 1.001 + 1, num):
            choice = everything.choose(limit)
            if choice is not None:
                points.append((self.candidates.predict(choice[0].peak(choice[1])), cost_of(choice) / total_cost))

        # Predictions are not monotone in the limit: take running extrema.
        least = float("inf")
        for i, (_, cost) in enumerate(points):
            least = min(least, cost)
            points[i] = (max(b for b, _ in points[: i + 1]), least)
        baseline_bytes = float(self.candidates.unplanned_bytes)
        return [*(point for point in points if point[0] < baseline_bytes), (baseline_bytes, min(least, 0.0))]

    def total_cost(self) -> float:
        """The cost of the baseline with its gradient."""
        return max(1e-30, self.baseline.flops)

    # -- stock policies --------------------------------------------------------------------------------------------

    def stock_policies(self) -> list[tuple[str, int, float, bool]]:
        """Of each stock policy what `outcome` says."""
        return [outcome(policy, self.candidates) for policy in self._stock]

    def stock_candidates(self, budget: int) -> list[Candidate]:
        """The stock policies, compiled unless they are predicted far above a budget."""
        return compile_within(self._stock, self.candidates, 2.0 * budget, self.is_late)

    # -- the corrected model ---------------------------------------------------------------------------------------

    def _limit_for(self, budget: int, guides: Sequence[Candidate]) -> float:
        """The limit of the model at which the prediction meets the budget."""
        bottom, top = 0.0, 4.0 * max([budget, *(c.peak for c in self.candidates)])
        for _ in range(50):
            middle = (bottom + top) / 2
            bottom, top = (middle, top) if predicted_bytes(middle, guides) <= budget else (bottom, middle)
        return bottom

    def _guides(self, family: Family) -> list[Candidate]:
        """The candidates whose memory predicts that of others in a family: those in it, or else all."""
        in_family = [c for c in self.candidates if c.name != BASELINE and self._family_of(c.options) is family]
        return in_family or self.candidates.known()

    def _family_of(self, options: Sequence[Option]) -> Family:
        decisions, (first, *variants) = [option.decision for option in options], self.lattice.families
        is_of = lambda kind: kind is not None and any(map(kind.is_in, decisions))
        return next((family for family in variants if is_of(family.treatment)), first)


# -- measured options


def _lowest_peak_choice(family: Family, is_late: Callable[[], bool]) -> Choice | None:
    """The choice of the lowest peak, after measuring the options that come near it."""
    while True:
        # The cheapest choice within 0.1% of the lowest peak, rather than any at it.
        limit = family.least_peak() * 1.001 + 1
        choice = family.choose(limit)
        if choice is None or is_late():
            return choice
        if not (_measure_parts(*choice, is_late) | _measure_peak_part(*choice, 1.1 * limit, is_late)):
            return choice


def _measure_parts(layout: Layout, options: Sequence[Option], is_late: Callable[[], bool]) -> bool:
    """Measure the options of a choice, each on its own, but those far from the peak. Returns whether anything
    was new.
    """
    peak, in_use = layout.peak(options), layout.in_use(options)
    pairs = [
        (front, option)
        for front, option, num_bytes in zip(layout.fronts, options, in_use, strict=True)
        if num_bytes + _MODEL_ERROR * option.backward_bytes >= peak
    ]
    return measure(pairs, is_late)


def _measure_peak_part(layout: Layout, options: Sequence[Option], limit: float, is_late: Callable[[], bool]) -> bool:
    """Measure all options of the peak's part that fit a limit there. Returns whether anything was new."""
    part, saved_bytes = layout.peak_part(options)
    front, spare = layout.fronts[part], limit - layout.base[part] - saved_bytes
    fitting = [o for o in front.options if o.total_bytes <= spare]
    return measure([(front, option) for option in fitting], is_late)
