"""Search a plan for a budget: propose by the model, compile, read the memory, correct the model, propose again."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import numpy as np

from .._equations.flops import flops
from .._jax import Jaxpr
from .._lift.context import TraceContext
from .._remat.parse import as_policy
from .._text import format_bytes
from ..residuals.report import BASELINE
from ._baseline import Baseline, ProgramOf
from ._bracket import Bracket, Proposal, clear_of_ends
from ._candidate import Candidate, Candidates, predicted_bytes, with_gradient
from ._choice import HOLDS, Family, cost_of, kind_of
from ._clock import TimeLeft
from ._effort import LONG, SHORT
from ._groups import Groups
from ._lattice import Lattice
from ._layout import Layout
from ._measured import cheapest_choice, lowest_peak_choice
from ._parts import Flat, flatten
from ._shorter import is_long
from ._stock import STOCK, StockPolicy, compile_cheaper, compiled_within, outcomes, policies_in
from ._stored import Formats

_ANALYSIS = 0.5  # of the time limit, at most: the rest is for compilations of whole programs
_PATIENCE = 2.0  # times the time limit, at most, until a first candidate keeps the budget
_LARGE = 5  # times what is negligible: a cost at which a marked program is also searched as if it were not
_MAX_TRIES = 8  # compilations for one budget, before the stock policies
_MISSES = 3  # candidates above the budget, before remat on the blocks is compiled; one is enough once the time is over
_MORE_TRIES = 3  # after each candidate that is cheaper than those before
_MAX_PROBES = 9  # of them, for each family, as long as no candidate keeps the budget
_PERSISTENCE = 3  # so many times as many tries as long as no candidate keeps the budget
_HOPELESS = 1.3  # of the budget: if the smallest of as many candidates takes more, the search ends
_MAX_PROBE_STEPS = 24  # of 2%
_MAX_SKIPS, _SKIP = 24, 1.02  # past choices that cost too much
_WORTH_A_PROBE = 0.75  # of the best candidate's cost, at most

_SMALL_GAIN = 0.25  # of what is negligible, near the best candidate
_EXPENSIVE = 0.25  # of the baseline's cost: a plan that adds more is made cheaper even when the time is up
_LAST_TRIES = 2  # compilations then, each of which corrects the prediction

_NEARLY = 1.02  # of a budget: extrapolated bytes below this are made sure of


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
        compile_baseline: whether the baseline is compiled in any case, beside the analysis; otherwise only where it may be the
            answer, or is asked for.
        formats: in which values may be stored between the passes.
        has_others: whether the step takes other gradients.

    Attributes:
        lattice: the regions, and the choice among them.
        baseline: the program without rematerialization.
        effort: how much is compiled.
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
        options = {"policies": [as_policy(p) for p in STOCK], "offload": offload, "deadline": self._is_late_for_regions}
        options |= {"context": context, "formats": formats, "has_others": has_others}
        self.lattice = Lattice(program, diff_indices, num_out, **options)
        self._stock = policies_in(self.lattice)
        layout, _ = self.lattice.stock_layouts[0]
        unplanned = layout, [front.baseline for front in layout.fronts]
        report_candidate = lambda text: report(text + self._best_so_far())  # noqa: E731
        self.candidates = Candidates(self.baseline, unplanned, program_of, report_candidate)
        self._forward_cost = sum(map(flops, program.jaxpr.eqns))
        self.effort = LONG if is_long(program) else SHORT
        self._negligible = self.effort.negligible * self._forward_cost

    def is_late(self) -> bool:
        """Whether the time is up: more of it, as long as no candidate keeps the budget, but one may."""
        is_found = self.candidates.best(self._budget) is not None
        is_hopeless = len(self.candidates) > _MAX_TRIES and not self._may_find(self._budget)
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

        The budget is asked again once something is compiled: until then arguments and outputs are estimated, and what they leave.

        A bisection over limits of the model, for each family of regions. It is a heuristic: more memory by the model may be less in
        the compiled program, and the number of tries is limited; some more follow each improvement. So a cheaper choice within the
        budget may be missed, and even the only one; a returned one keeps it, since its program was compiled.
        """
        budget = self._budget = budget_of()
        # The baseline costs nothing: where it may be the answer, its bytes must be exact. Far above the budget it is not compiled.
        if self.baseline.extrapolated is not None:
            if self.baseline.extrapolated.temp_bytes <= _NEARLY * budget:
                self.candidates.confirm_baseline()
        elif self.baseline.is_started or self.candidates.baseline_peak <= self.effort.unplanned_above * budget:
            self.candidates.compile_baseline()
            budget = self._budget = budget_of()
            if self.candidates.baseline_bytes() <= budget:
                self.candidates.confirm_baseline()

        budget = self._bisect_together(self.lattice.families, budget_of, _MAX_TRIES)
        self._refine(budget)
        # XLA may use less memory for regions that end elsewhere than the user's functions, though the model says more.
        if self.lattice.unmarked_family is not None and self._may_improve(budget):
            budget = self._bisect_together([self.lattice.unmarked_family], budget_of, _MORE_TRIES)
            self._refine(budget)
        # Whether the budget is infeasible is decided by the compiled programs of the lowest peaks, not by the model.
        for family in self.lattice.families:
            if self.candidates.best(budget) is None and not self.is_late():
                least = lowest_peak_choice(family, self._is_late_for_parts)
                if least is not None:
                    self.candidates.measure(*least)
                    if family.kind == HOLDS:
                        self._try_saving_nothing(least[0], budget)
        self._try_stock(budget)
        if self.is_late():
            self._measure_last(budget)
        return self.candidates.best(budget)

    def _bisect_together(self, families: Sequence[Family], budget_of: Callable[[], int], most: int) -> int:
        """Compile choices of some families, and return the budget.

        Args:
            most: compilations, apart from those that follow improvements.
        """
        budget = budget_of()
        brackets, best = [Bracket(family) for family in families], self.candidates.best(budget)
        for num_tries in range(_MAX_TRIES * _PERSISTENCE):
            if self.is_late() or (num_tries >= most and not self._may_find(budget)):
                break
            proposals = [p for bracket in brackets if (p := self._proposal(bracket, budget)) is not None]
            if not proposals or self.is_late():
                break
            # The families in turn, since the model errs in another way for each; then the model's cheapest. A family that takes more
            # memory than the model says is held to lower limits, and costs more.
            proposal = min(proposals, key=lambda p: (p.bracket.num_tries, p.target is None, cost_of(p.choice)))
            proposal.bracket.num_tries += 1
            candidate = self.candidates.measure(*proposal.choice)
            budget = self._budget = budget_of()
            is_kept = candidate.temp_bytes <= budget
            if proposal.target is None:
                proposal.bracket.note_probe(candidate.peak, is_kept)
            else:
                proposal.bracket.narrow(proposal.target, is_kept)
            if best is None and not is_kept and (num_tries + 1 == _MISSES or self._time_left.is_over()):
                self._try_blocks(budget)  # what keeps the budget guides the search to what is cheaper
            if self.candidates.best(budget) is not best:
                best, most = self.candidates.best(budget), max(most, num_tries + 1 + _MORE_TRIES)
        return budget

    def _refine(self, budget: int) -> None:
        """Try choices that are a little cheaper than the best, and take little more memory."""
        for _ in range(self.effort.num_refinements):
            best = self.candidates.best(budget)
            if best is None or best.name == BASELINE:
                return
            family = self._family_of(best)
            above = [c for c in self.candidates if c.name != BASELINE and self._family_of(c) is family]
            above = [c.peak for c in above if c.peak > best.peak and c.temp_bytes > budget]
            low, high = float(best.peak), float(min(above, default=best.peak))
            enough = best.predicted_cost - _SMALL_GAIN * self._negligible
            choice = None
            while choice is None and high - low > 1e-3 * low and not self.is_late():
                low = (low + high) / 2
                choice = cheapest_choice(family, low, self._is_late_for_parts)
                if choice is not None and (cost_of(choice) > enough or self.candidates.has(*choice)):
                    choice = None
            if choice is None:
                return
            self.candidates.measure(*choice)

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

    def _may_improve(self, budget: int) -> bool:
        """Whether another search is worth its compilations, and there is time for it."""
        if not self.effort.is_thorough or self.is_late():
            return False
        best = self.candidates.best(budget)
        return self._may_find(budget) if best is None else best.added_cost > _LARGE * self._negligible

    @property
    def _on_blocks(self) -> StockPolicy:
        """Remat on the blocks: of all plans the surest to keep a budget, of those that take no time to find."""
        policies = [policy for policy in self._stock if policy.name == "nothing"]
        return min(policies, key=lambda policy: policy.choice[0].peak(policy.choice[1]))

    def _try_blocks(self, budget: int) -> None:
        """Compile remat on the blocks, if it is predicted to keep the budget."""
        layout, options = self._on_blocks.choice
        if self.candidates.predict(layout.peak(options)) <= budget:
            self.candidates.measure(layout, options, self._on_blocks.name)

    def _measure_last(self, budget: int) -> None:
        """Compile the cheapest choices that are predicted to keep the budget, which takes no time to find, until one of them does.

        Unless a candidate keeps it that adds few operations. After these the blocks' own rematerialization, which takes the least of many programs.
        """
        if not self.candidates and self.effort.is_thorough:
            self.candidates.compile_baseline()  # the prediction needs one
        best = self.candidates.best(budget)
        if best is not None and best.added_cost <= _EXPENSIVE * self.total_cost():
            return
        bracket = Bracket(self.lattice.families[0])
        # The first choice of a long program may take long to compile; that of the blocks' own rematerialization does not.
        for _ in range(_LAST_TRIES if self.candidates else 0):
            choice = bracket.family.choose(self._target(budget, bracket))
            if choice is None or (best is not None and cost_of(choice) >= best.predicted_cost):
                break
            if self.candidates.measure(*choice).temp_bytes <= budget:
                return
        if best is None:
            self.candidates.measure(*self._on_blocks.choice, self._on_blocks.name)

    def _proposal(self, bracket: Bracket, budget: int) -> Proposal | None:
        """The next choice of a family to compile; None if there is none, or little left to gain."""
        proposal = None if bracket.is_done else self._bisect(bracket, budget)
        bracket.is_done = proposal is None
        return proposal or self._probe(bracket, budget)

    def _bisect(self, bracket: Bracket, budget: int) -> Proposal | None:
        """A choice between one that keeps the budget and one that does not."""
        best, family = self.candidates.best(budget), bracket.family
        if best is not None and best.temp_bytes >= self.effort.full * budget and self._family_of(best) is family:
            return None

        # By the model no choice below `high` costs less than the cheapest at `high`; half a percent of memory is not worth a compilation.
        if best is not None and best.added_cost - self._least_cost(family, bracket.high) <= self._negligible:
            return None
        if bracket.high <= bracket.low * 1.005:
            return None
        target = self._target(budget, bracket)
        choice = cheapest_choice(family, target, self._is_late_for_parts)
        while choice is None and bracket.low < (least := family.least_peak()) < bracket.high and not self.is_late():
            # One candidate that takes far more than the model says puts the target below every choice: go on above the least, which
            # rises while parts are measured.
            bracket.low = least
            target = self._target(budget, bracket)
            choice = cheapest_choice(family, target, self._is_late_for_parts)

        # A choice that costs as much as the best one so far need not be compiled: go on above it.
        for _ in range(_MAX_SKIPS):
            if choice is None or best is None or best.added_cost - cost_of(choice) > self._negligible or self.is_late():
                break
            bracket.low = max(bracket.low, target)
            target = max(self._target(budget, bracket), _SKIP * bracket.low)
            is_allowed = target < bracket.high and not self._is_too_much(target, bracket, budget)
            choice = cheapest_choice(family, target, self._is_late_for_parts) if is_allowed else None
        if choice is None:
            return None

        # A choice that was compiled before gives its side of the bisection; go on to the nearest other choice.
        tried = self.candidates.find(*choice)
        if tried is not None:
            bracket.narrow(target, tried.temp_bytes <= budget)
            target = self._next_untried(bracket, tried, budget)
            choice = None if target is None else cheapest_choice(family, target, self._is_late_for_parts)
            if choice is None or self.candidates.has(*choice):
                return None
        if best is not None and best.added_cost - cost_of(choice) <= self.effort.least_gain * self._negligible:
            return None
        return Proposal(bracket, target, choice)

    def _probe(self, bracket: Bracket, budget: int) -> Proposal | None:
        """A choice where the model must err if it is to be of use: of the lowest peaks, or far cheaper than the best and above the bisection.

        XLA's memory is not monotone in the model's: choices of nearly equal peaks differ by several percent.
        """
        family, best = bracket.family, self.candidates.best(budget)
        if bracket.num_probes >= (_MAX_PROBES if best is None else self.effort.num_probes):
            return None
        if best is None:
            choice = lowest_peak_choice(family, self._is_late_for_parts)
            limit, enough = family.least_peak(), float("inf")
        else:
            choice, limit, enough = None, bracket.high, _WORTH_A_PROBE * best.added_cost
            if limit == float("inf") or best.added_cost <= 2 * self._negligible:
                return None
        for _ in range(_MAX_PROBE_STEPS):
            if choice is not None and not self.candidates.has(*choice):
                return Proposal(bracket, None, choice)
            limit *= 1.02
            choice = family.choose(limit)
            if choice is not None and cost_of(choice) <= enough:
                choice = cheapest_choice(family, limit, self._is_late_for_parts)
            else:
                choice = None
        return None

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
        if self.effort.is_thorough and self.candidates.unplanned_bytes <= self.effort.unplanned_above * least:
            least = min(least, self.candidates.baseline_bytes())
        return least

    def ends(self) -> tuple[int, int]:
        """The least temporary bytes reached, and the baseline's."""
        self.candidates.baseline_bytes()
        for family in self.lattice.families:
            least = lowest_peak_choice(family, self._is_late_for_parts)
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

    def _least_cost(self, family: Family, limit: float) -> float:
        """The least cost of the choices that the model puts below a limit; 0 if there is none."""
        # Without a limit nothing costs less than the baseline.
        choice = family.choose(limit) if limit < float("inf") else None
        return 0.0 if choice is None else cost_of(choice)

    def _next_untried(self, bracket: Bracket, tried: Candidate, budget: int) -> float | None:
        """The next limit of the model that gives a new choice: above a candidate that fits, below one that does not."""
        # In steps of 2%, which reach a factor of 3.3. Choices within one step of another are missed.
        is_kept = tried.temp_bytes <= budget
        step = 1.02 if is_kept else 1 / 1.02
        # Limits between the tried choice's peak and the limit that chose it give the same choice. Its peak may lie outside of the
        # interval, where the choice was first tried for another limit: start inside.
        low, high = bracket.low, bracket.high
        target = max(float(tried.peak), low) if is_kept else min(float(tried.peak), high)
        for _ in range(60):
            target *= step
            if not low <= target <= high or self.is_late():
                return None
            choice = cheapest_choice(bracket.family, target, self._is_late_for_parts)
            if choice is None:
                return None
            if not self.candidates.has(*choice):
                return target
        return None

    # -- stock policies --------------------------------------------------------------------------------------------

    def stock_policies(self) -> list[tuple[str, int, float, bool]]:
        """See `_stock.outcomes`."""
        return outcomes(self._stock, self.candidates)

    def stock_candidates(self, budget: int) -> list[Candidate]:
        """The stock policies, compiled unless they are predicted far above a budget."""
        return compiled_within(self._stock, self.candidates, SHORT.stock_above * budget, self.is_late)

    def _try_stock(self, budget: int) -> None:
        """Compile the stock policies that may be cheaper than the best candidate, or all if there is none."""
        most = self.effort.stock_above * budget
        compile_cheaper(self._stock, self.candidates, budget, most, self._negligible, self.is_late)

    # -- the corrected model ---------------------------------------------------------------------------------------

    def _target(self, budget: int, bracket: Bracket) -> float:
        """The limit of the model at which the prediction for a family meets the budget."""
        low, high = bracket.low, bracket.high
        if self.candidates.best(budget) is None:
            budget = int(budget * self.effort.lower ** sum(c.name != BASELINE for c in self.candidates))
        candidates = self._guides(bracket)

        # `predicted_bytes` is monotone, so bisection applies. Without an upper limit, four times the largest number known stands for it.
        bottom, top = low, high if high < float("inf") else 4.0 * max([budget, *(c.peak for c in self.candidates)])
        for _ in range(50):
            middle = (bottom + top) / 2
            bottom, top = (middle, top) if predicted_bytes(middle, candidates) <= budget else (bottom, middle)
        return clear_of_ends(bottom, low, high) if high < float("inf") else bottom

    def _is_too_much(self, target: float, bracket: Bracket, budget: int) -> bool:
        """Whether a choice at a limit of the model is predicted to take clearly more than a budget."""
        return predicted_bytes(target, self._guides(bracket)) > self.effort.clearly_above * budget

    def _guides(self, bracket: Bracket) -> list[Candidate]:
        """The candidates whose memory predicts that of others in a family: those in it, or else all."""
        in_family = [c for c in self.candidates if self._family_of(c) is bracket.family and c.name != BASELINE]
        return in_family or self.candidates.known()

    def _family_of(self, candidate: Candidate) -> Family:
        """The smallest family that a candidate belongs to."""
        if any(isinstance(o.decision.loop, Groups) for o in candidate.options):
            return self.lattice.families[0]
        cuts, kind = candidate.layout.cuts, kind_of(candidate.options)
        families = [f for f in (*self.lattice.families, self.lattice.unmarked_family) if f and f.kind == kind]
        return next(f for f in reversed(families) if f.ends is None or f.ends.issuperset(cuts))
