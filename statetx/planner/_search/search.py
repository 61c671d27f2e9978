"""Search a plan for a budget: propose by the model, compile, read the memory, correct the model, propose again."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np

from ... import _jax
from ..._cached import cached_property
from ..._equations.compiled import Cost
from ..._equations.compiler import estimate_options
from ..._equations.primitives import flops
from ..._errors import PlanError
from ..._jax import Eqn
from ..._largest import largest_within
from ..._remat.parse import as_value_policy
from ..._remat.stored import BITS
from ..._targets import current
from ..._text import MOST_BYTES, format_bytes
from ...residuals.diagnosis import BASELINE
from .._budget import ByteBudget, TimeLeft, unit_question
from .._program.flat import Flat
from .._program.values import Formats
from .._treatments import TREATMENTS, UNPLANNED
from .._treatments.front import measure
from .._treatments.treatment import Settings, Treatment
from .._tuned import TUNED
from .candidates import STOCK, Baseline, Candidate, Candidates, Compiled, best_within, is_long, predicted_bytes
from .capture import Captured, ProgramOf
from .lattice import Family, Lattice
from .layout import Choice


@dataclasses.dataclass(frozen=True)
class SearchOptions:
    """Options of a search, as in `plan`.

    Attributes:
        formats: the allowed storage formats of values between the passes.
        treatments: that make proposals.
    """

    objective: str = "auto"
    offload: bool = False
    time_limit: float | None = None
    formats: Formats = (BITS,)
    treatments: tuple[type[Treatment], ...] = TREATMENTS

    @property
    def has_times(self) -> bool:
        """Whether programs are compared by XLA's estimates of their times."""
        return self.objective != "flops" and bool(estimate_options())


def bytes_left(budget: ByteBudget, captured: Captured, compiled: Sequence[Compiled]) -> int:
    """The temporary bytes that a budget leaves, 1 at least.

    Raises:
        PlanError: arguments and outputs, which are exact once something is compiled, leave nothing.
    """
    if not compiled:
        return max(budget.left(captured.fixed), 1)
    left = budget.left(compiled[0].compiled)
    if left < 0 or (left == 0 and all(c.temp_bytes for c in compiled)):  # one without temporaries keeps the budget
        raise impossible(captured, budget, compiled[0].compiled)
    return max(left, 1)


def impossible(captured: Captured, budget: ByteBudget, fixed: Cost) -> PlanError:
    """The error that arguments and outputs leave nothing of the budget for temporaries."""
    constant_bytes = captured.constant_bytes  # which the budget does not count
    donated = f" ({format_bytes(fixed.alias_bytes)} of them in place of donated arguments)" if fixed.alias_bytes else ""
    constants = f" Its constants, which do not count, take {format_bytes(constant_bytes)}." if constant_bytes else ""
    return PlanError(
        f"No plan for {captured.name} keeps the budget of {format_bytes(int(budget.amount))}: arguments take "
        f"{format_bytes(fixed.argument_bytes)} and outputs {format_bytes(fixed.output_bytes)}{donated}, which no plan "
        f"changes, so none was searched for.{constants}{unit_question(budget.amount)}\n"
        f"Fix: allow more than {format_bytes(fixed.fixed_bytes)}; make the arguments smaller (a smaller batch, "
        f"bfloat16, more devices){'' if fixed.alias_bytes else ', or plan the jitted step that donates them'}; "
        f"or count temporaries alone, of='temporaries'.",
        smallest_bytes=fixed.fixed_bytes,
    )


class Search:
    """The search for the plan of one gradient, shared by all budgets.

    Args:
        captured: a program with one gradient; every candidate is compiled in it, as it will run.
        report: called with a description of each step.
        time_left: the time that it may take.
        compile_baseline: whether the baseline is compiled in any case, beside the analysis; otherwise only where it may
            be the answer, or is asked for.
        has_others: whether the step takes other gradients.

    Attributes:
        lattice: the regions, and the choice among them.
        baseline: the program without rematerialization.
        candidates: the compiled choices.
        lacks_regions: whether the time ended the analysis.
    """

    def __init__(
        self,
        captured: Captured,
        options: SearchOptions,
        report: Callable[[str], None],
        time_left: TimeLeft,
        *,
        compile_baseline: bool = False,
        has_others: bool = False,
    ):
        self._captured, self._options, self._time_left = captured, options, time_left
        (gradient,) = captured.gradients
        program_of: ProgramOf = lambda jaxpr, options: captured.program([jaxpr], options)
        self.lacks_regions = False
        self._budget: float = float("inf")  # of the fit under way

        # The baseline, whose regions all stay unchanged, compiles in a thread while the others are analyzed.
        program = Flat(gradient.flat)
        self.baseline = Baseline(program, program_of, report)
        if compile_baseline:
            self.baseline.start()
        report("analyzing the program")
        is_alone = len(program.loops) < 2 and not has_others
        # Operations have no exchange rate with transfers: offloading is free, and limited by memory alone. Without host
        # memory nothing is offloaded; the values are saved or recomputed.
        offload = options.offload and _jax.HOST_MEMORY in current.memory_kinds()
        policies = [as_value_policy(p) for p in STOCK]
        of_program = options.treatments, policies, gradient.context, options.has_times, self._is_late_for_regions
        settings = Settings(options.formats, is_alone, offload, *of_program)
        self.lattice = Lattice(program, gradient.diff_indices, gradient.num_out, settings)
        regions = [region for region, _ in self.lattice.stock_regions]
        self._unplanned = Choice(program, regions, [region.front.baseline for region in regions])
        report_candidate: Callable[[str], None] = lambda text: report(text + self._best_so_far())
        self.candidates = Candidates(self.baseline, self._unplanned, report_candidate)
        self._forward_cost = sum(map(flops, program.jaxpr.eqns))
        self._is_long = is_long(program)
        self._tries = TUNED.tries // 4 if self._is_long else TUNED.tries
        # Fewer tries are to gain more each.
        self._negligible = TUNED.negligible * TUNED.tries / self._tries * self._forward_cost

        # The limits to try, by the one that the prediction puts at the budget; each takes a dynamic program.
        distances = [TUNED.scatter / 2 * 2**n for n in ([2] if self._is_long else range(6))]
        self._steps = [1.0, *(math.exp(sign * d) for d in distances for sign in (-1, 1))]

    @property
    def _total_cost(self) -> float:
        """The cost of the baseline with its gradient."""
        return max(1e-30, self.baseline.flops) + self._captured.repeated_flops

    def is_late(self) -> bool:
        """Whether the time is up: as long as no candidate keeps the budget, twice the time."""
        return self._time_left.is_over(2.0 if self.candidates.best(self._budget) is None else 1.0)

    def _is_late_for_regions(self) -> bool:
        """Whether the time for the analysis is up. A plan of the regions found until then beats none."""
        is_late = self._time_left.is_over(0.5)
        self.lacks_regions |= is_late
        return is_late

    def _is_late_for_parts(self) -> bool:
        """Whether the time to measure parts is up: half of it, as long as no plan is compiled, which takes longest."""
        is_first = all(c.name == BASELINE for c in self.candidates)
        return self._time_left.is_over(0.5 if is_first else 1.0)

    # -- fitting ---------------------------------------------------------------------------------------------------

    def fit(self, total: ByteBudget) -> Candidate | None:
        """Return the cheapest candidate within a budget, compiling a few; None if none of them keeps it.

        Until something is compiled, arguments and outputs are estimated, and so are the bytes that they leave.

        It is a heuristic: more memory by the model may be less in the compiled program, and the number of tries is
        limited; some more follow each improvement. So a cheaper choice within the budget may be missed, and even the
        only one; a returned one keeps it, since its program was compiled.
        """
        budget = self._budget = self._left(total)
        # The baseline costs nothing: where it may be the answer, its bytes must be exact. Far above the budget it is
        # not compiled.
        if self.baseline.extrapolated is not None:
            if self.baseline.extrapolated.temp_bytes <= (1 + TUNED.scatter) * budget:
                self.baseline.compile_exactly()
        elif self.baseline.is_started or self._may_keep(self._unplanned.peak, budget, ()):
            # Without guides: the model of the program without rematerialization may be far off.
            self.candidates.compile_baseline()
            budget = self._budget = self._left(total)
            if self.candidates.baseline_bytes() <= budget:
                self.baseline.compile_exactly()

        if self._is_impossible(budget):
            return None
        budget = self._improve(total)
        first_best = self.candidates.best(budget)
        # Whether the budget is infeasible is decided by the compiled programs of the lowest peaks, not by the model.
        if not self.is_late():
            self._measure_blocks()
        for family in self.lattice.families:
            if self.candidates.best(budget) is None and not self.is_late():
                least = _lowest_peak_choice(family, self._is_late_for_parts)
                if least is not None:
                    self.candidates.measure(least)
                    if family is self.lattice.families[0]:
                        self._try_saving_nothing(least)
        if self.candidates.best(budget) not in (None, first_best):
            budget = self._improve(total)
        if self.is_late():
            self._measure_last(budget)
        if self._options.has_times:
            self._measure_fewer_regions(budget)
            self.stock_choices(budget)
        return best_within(self.candidates, budget, self._options.objective)

    def _left(self, total: ByteBudget) -> int:
        return bytes_left(total, self._captured, [*self.candidates])

    def _is_impossible(self, budget: int) -> bool:
        """Whether one equation alone takes clearly more than the budget, and the compiled remat on the blocks, too."""
        if self.candidates.best(budget) is not None or self.undivided is None:
            return False
        if self.undivided[1] <= math.exp(TUNED.drift) * budget:
            return False
        self._measure_blocks()
        return self.candidates.best(budget) is None

    @cached_property
    def undivided(self) -> tuple[Eqn, int] | None:
        """The equation of `Lattice.undivided`, and the temporary bytes of its backward pass, compiled on its own."""
        region = self.lattice.undivided()
        graph = None if region is None else region.front.graph
        return None if graph is None else (graph.jaxpr.eqns[0], graph.program(UNPLANNED).cost.temp_bytes)

    def _may_keep(self, peak: float, num_bytes: float, guides: Sequence[Candidate]) -> bool:
        """Whether a choice with this peak is worth one of the tries."""
        return self._probability(peak, num_bytes, guides) > 1 / TUNED.tries

    def _improve(self, total: ByteBudget) -> int:
        """Compile the choices of the most expected gain, until none is left that is worth it, and return the budget."""
        budget, num_vain = self._left(total), 0
        while not self.is_late():
            best = self.candidates.best(budget)
            most = self._tries if best is not None else 3 * self._tries
            proposal = self._most_promising(budget, best) if num_vain < most else None
            if proposal is None:
                break
            choice, name = proposal
            self.candidates.measure(choice, name)
            budget = self._budget = self._left(total)
            num_vain = num_vain + 1 if self.candidates.best(budget) is best else 0
        return budget

    def _most_promising(self, budget: int, best: Candidate | None) -> tuple[Choice, str] | None:
        """The choice of the most expected gain, made of measured options; None if none is worth a compilation."""
        while True:
            proposals = self._proposals(budget, best)
            if not proposals:
                return None
            choice, name = max(proposals, key=lambda x: x[0])[1]
            if not _measure_parts(choice, self._is_late_for_parts):
                return choice, name

    def _proposals(self, budget: int, best: Candidate | None) -> list[tuple[float, tuple[Choice, str]]]:
        """Choices that are not compiled, each with its expected gain: the cost that it spares, times the probability
        that it keeps the budget.
        """
        # The stock policies are surer than the cheapest choice by the model, and no plan should cost more.
        choices = [(choice, name) for name, choice in self._stock.items()]
        guides = self.candidates.known()
        aim = self._limit_for(budget, guides)
        for family in self.lattice.families:
            least = 0.0 if best is not None else 1.001 * family.least_peak() + 1
            family_choices = [family.choose(step * max(aim, least)) for step in self._steps]
            choices += [(choice, "plan") for choice in family_choices if choice is not None]
        proposals: list[tuple[float, tuple[Choice, str]]] = []
        for choice, name in choices:
            if best is not None:
                gain = best.choice.cost - choice.cost
            else:  # until something keeps the budget, whatever does is a gain, the cheaper the more
                gain = self._high_cost / (1 + choice.cost / self._high_cost)
            if gain > self._negligible and self.candidates.find(choice) is None:
                value = gain * self._probability(choice.peak, budget, guides)
                if value > self._negligible / (2 * self._tries):  # the tries together are to gain half of it
                    proposals.append((value, (choice, name)))
        return proposals

    def _probability(self, peak: float, budget: float, guides: Sequence[Candidate]) -> float:
        """The probability that a choice with this peak keeps the budget."""
        predicted = max(predicted_bytes(peak, guides), 1.0)
        distance = min((abs(math.log(max(peak, 1) / max(c.choice.peak, 1))) for c in guides), default=1.0)
        error = TUNED.scatter + TUNED.drift * min(distance, 1.0)
        excess = math.log(predicted / max(budget, 1)) / error
        return 1 / (1 + math.exp(min(excess, 700.0)))  # logistic: some errors are large

    @cached_property
    def _high_cost(self) -> float:
        return max(*(choice.cost for choice in self._stock.values()), self._forward_cost)

    def _try_saving_nothing(self, choice: Choice) -> None:
        """XLA may hold a value twice that a region both saves and outputs, which the model counts once."""
        if not self.is_late() and self.candidates.best(self._budget) is None:
            nothing = STOCK.index("nothing")
            fronts = [region.front for region in choice.regions]
            options = [front.baseline if front.is_free else front.stock[nothing] for front in fronts]
            self.candidates.measure(dataclasses.replace(choice, options=options))

    def _measure_blocks(self) -> None:
        """Compile remat on the blocks, unless a candidate keeps the budget for less: of all plans it is the surest to
        keep a budget, of those that take no time to find.
        """
        best, blocks = self.candidates.best(self._budget), self._stock["nothing"]
        if best is None or best.added_cost > blocks.cost:
            self.candidates.measure(blocks, "nothing")

    def _measure_fewer_regions(self, budget: int) -> None:
        """Compile choices of fewer regions, with more of them unchanged, until one keeps the budget."""
        is_block = [is_planned for _, is_planned in self.lattice.stock_regions]
        family = self.lattice.families[0].with_overhead(TUNED.overhead * self.baseline.flops / max(sum(is_block), 1))
        least = 1.001 * family.least_peak() + 1
        for _ in range(TUNED.tries // 4 + 1):
            limit = self._limit_for(budget, self.candidates.known())
            choice = family.choose(max(limit, least))
            while choice is not None and _measure_parts(choice, self._is_late_for_parts):
                choice = family.choose(max(limit, least))
            if choice is None or self.is_late() or self.candidates.find(choice) is not None:
                return
            if self.candidates.measure(choice).temp_bytes <= budget:
                return

    def _measure_last(self, budget: int) -> None:
        """Compile the cheapest choices that are predicted to keep the budget, which takes no time to find, two at most;
        unless a candidate keeps it that adds at most a quarter of the operations. After these remat on the blocks.
        """
        if not self.candidates and not self._is_long:
            self.candidates.compile_baseline()  # the prediction needs one
        best = self.candidates.best(budget)
        if best is not None and best.added_cost <= self._total_cost / 4:
            return
        # The first choice of a long program may take long to compile; remat on the blocks does not.
        for _ in range(2 if self.candidates else 0):
            choice = self.lattice.families[0].choose(self._limit_for(budget, self.candidates.known()))
            if choice is None or (best is not None and choice.cost >= best.choice.cost):
                break
            if self.candidates.measure(choice).temp_bytes <= budget:
                return
        self._measure_blocks()

    def _best_so_far(self) -> str:
        """Candidate that progress shows: the cheapest within the budget, or else the smallest."""
        best = self.candidates.best(self._budget) or (self.candidates.smallest() if self.candidates else None)
        if best is None:
            return ""
        percent = 100 * best.added_cost / max(self._forward_cost, 1e-30)
        fits = "" if best.temp_bytes <= self._budget else ", above the budget"
        return f"; best so far {format_bytes(best.temp_bytes)}{fits}, {percent:+.1f}% of a forward pass"

    # -- its memory ------------------------------------------------------------------------------------------------

    def predict(self, candidate: Candidate) -> float:
        """Temporary bytes of a candidate, predicted from all others."""
        return predicted_bytes(candidate.choice.peak, [c for c in self.candidates if c is not candidate])

    def smallest_bytes(self) -> int:
        """The least temporary bytes reached. A small program may take the least without rematerialization."""
        if not self._is_long:
            self.candidates.compile_baseline()
        if self.candidates.smallest().name == BASELINE:
            self.baseline.compile_exactly()  # a plan of this budget is to be found
        return self.candidates.smallest().temp_bytes

    def ends(self) -> tuple[int, int]:
        """The least temporary bytes reached, and the baseline's."""
        self.candidates.baseline_bytes()
        for family in self.lattice.families:
            least = _lowest_peak_choice(family, self._is_late_for_parts)
            if least is not None and not self.is_late():
                self.candidates.measure(least)
        return self.candidates.smallest().temp_bytes, self.candidates.baseline_bytes()

    def fraction_of_baseline(self, fraction: float) -> int:
        """A fraction of the baseline's temporary bytes."""
        # The baseline may be the answer, and fast compilation may be off by a few hundred bytes.
        may_be_short = self.baseline.extrapolated is not None and (1 + TUNED.scatter) * fraction >= 1
        if fraction > 0.99 or may_be_short:
            self.baseline.compile_exactly()
        return int(fraction * self.candidates.baseline_bytes())

    def curve(self, num: int = 20) -> list[tuple[float, float]]:
        """Points (predicted bytes, added operations) of the model's best choices.

        From the least memory to the baseline's, monotone in both.
        """
        everything = self.lattice.families[0]
        low = everything.least_peak()
        high = max(low + 1, self._unplanned.peak, *(c.choice.peak for c in self.candidates))
        points: list[tuple[float, float]] = []
        for limit in np.geomspace(low * 1.001 + 1, high * 1.001 + 1, num):
            choice = everything.choose(limit)
            if choice is not None:
                points.append((self.candidates.predict(choice.peak), choice.cost))

        # Predictions are not monotone in the limit: take running extrema.
        least = float("inf")
        for i, (_, cost) in enumerate(points):
            least = min(least, cost)
            points[i] = (max(b for b, _ in points[: i + 1]), least)
        baseline_bytes = float(self.candidates.unplanned_bytes)
        return [*(point for point in points if point[0] < baseline_bytes), (baseline_bytes, min(least, 0.0))]

    # -- stock policies --------------------------------------------------------------------------------------------

    @property
    def _stock(self) -> dict[str, Choice]:
        """The stock policies, by name, with options as measured so far."""
        pairs = [(region.front, acts) for region, acts in self.lattice.stock_regions]
        options_of_policies = (
            [front.stock[n] if acts else front.baseline for front, acts in pairs] for n in range(len(STOCK))
        )
        choices = (dataclasses.replace(self._unplanned, options=options) for options in options_of_policies)
        return dict(zip(STOCK, choices, strict=True))

    def stock_policies(self) -> list[tuple[str, int, float, bool]]:
        """Name, temporary bytes and added cost of each stock policy, and whether these are predicted, since it was not
        compiled.
        """
        rows: list[tuple[str, int, float, bool]] = []
        for name, choice in self._stock.items():
            candidate = self.candidates.find(choice)
            if candidate is not None:
                rows.append((name, candidate.temp_bytes, candidate.added_cost, False))
            else:
                rows.append((name, int(self.candidates.predict(choice.peak)), choice.cost, True))
        return rows

    def stock_choices(self, temp_bytes: float) -> list[Candidate]:
        """The stock policies that keep a number of temporary bytes: all that may are compiled, also when it is late."""
        measured: list[Candidate] = []
        for name, choice in sorted(self._stock.items(), key=lambda x: x[1].peak):
            is_known = self.candidates.find(choice) is not None
            if is_known or not measured or self._may_keep(choice.peak, temp_bytes, self.candidates.known()):
                measured.append(self.candidates.measure(choice, name))
        return [candidate for candidate in measured if candidate.temp_bytes <= temp_bytes]

    # -- the corrected model ---------------------------------------------------------------------------------------

    def _limit_for(self, budget: int, guides: Sequence[Candidate]) -> int:
        """The limit of the model at which the prediction meets the budget."""
        most = min(4 * max([budget, *(c.choice.peak for c in self.candidates)]), MOST_BYTES)
        bytes_of: Callable[[int], int] = lambda limit: int(predicted_bytes(limit, guides))
        return largest_within(budget, bytes_of, range(1, most), budget, {0: 0})[0]


# -- measured options


def _lowest_peak_choice(family: Family, is_late: Callable[[], bool]) -> Choice | None:
    """The choice of the lowest peak, after measuring the options that come near it."""
    while True:
        # The cheapest choice within 0.1% of the lowest peak, rather than any at it.
        limit = family.least_peak() * 1.001 + 1
        choice = family.choose(limit)
        if choice is None or is_late():
            return choice
        if not (_measure_parts(choice, is_late) | _measure_peak_part(choice, 1.1 * limit, is_late)):
            return choice


def _measure_parts(choice: Choice, is_late: Callable[[], bool]) -> bool:
    """Measure the options of a choice, each on its own, but those far from the peak. Returns whether anything
    was new.
    """
    pairs = [
        (region.front, option)
        for region, option, num_bytes in zip(choice.regions, choice.options, choice.in_use, strict=True)
        if num_bytes + option.backward_bytes >= choice.peak  # its backward pass may take twice the model's bytes
    ]
    return measure(pairs, is_late)


def _measure_peak_part(choice: Choice, limit: float, is_late: Callable[[], bool]) -> bool:
    """Measure all options of the peak's part that fit a limit there. Returns whether anything was new."""
    part = choice.in_use.index(choice.peak)
    front, spare = choice.regions[part].front, limit - choice.peak + choice.options[part].total_bytes
    fitting = [o for o in front.options if o.total_bytes <= spare]
    return measure([(front, option) for option in fitting], is_late)
