"""The search for the plan of a program, made of a search for each of its gradients.

Several gradients of a step (two networks that train each other, two losses) share one limit: each search gives its
cheapest candidate within it, all of them are compiled together in the step, and the limit is corrected until the step
keeps the budget. For gradients that are taken one after the other this is the optimum, since their memory is not in use
at the same time. Gradients of one function, for several parts of a batch, have one search.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from ..._cached import cached_property
from ..._equations.compiled import Cost, Program
from ..._equations.compiler import candidate_options, fast_compile_options
from ..._errors import PlanError
from ..._jax import Jaxpr
from ..._largest import largest_within
from ..._text import MOST_BYTES, format_bytes, short_path
from ...residuals._trace import user_line
from ...residuals.diagnosis import BASELINE
from .._budget import STEP, TEMPORARIES, ByteBudget, TimeLeft, unit_question
from .._treatments.treatment import undominated
from .._tuned import TUNED
from .candidates import Candidate, best_within
from .capture import Captured
from .layout import Waits
from .search import Search, SearchOptions, bytes_left

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, eq=False)
class PlannedProgram:
    """A program to be compiled.

    Attributes:
        captured: the program, with its variant of inner gradients.
        candidates: one for each gradient.
        waits: the event that each gradient waits for.
        unplanned_cost: the cost of the program without rematerialization.
    """

    captured: Captured
    candidates: tuple[Candidate, ...]
    waits: Waits
    unplanned_cost: float

    @cached_property
    def compiled(self) -> Cost:
        """The costs of the compiled program."""
        is_alone = self.captured.num_taken == 1  # its candidates are compiled in the program
        return self.candidates[0].compiled if is_alone else self.program(candidate_options()).cost

    def program(self, compiler_options: dict[str, str | bool] | None = None) -> Program:
        """The program to compile; by default as its user compiles it."""
        return self.captured.program(self.rewritten(), compiler_options)

    def rewritten(self) -> list[Jaxpr]:
        programs: list[Jaxpr] = []
        for gradient, candidate in zip(self.captured.gradients, self.candidates, strict=True):
            with gradient.context.bind_axes():
                programs.append(candidate.choice.rewrite(self.waits))
        return programs

    @property
    def name(self) -> str:
        """Name of the stock policy, or "no remat", if all gradients have the same as the user would write it; else
        "plan".
        """
        names = {c.name for c in self.candidates}
        return names.pop() if len(names) == 1 and self.waits is Waits.FOR_NOTHING else "plan"

    @property
    def temp_bytes(self) -> int:
        return self.compiled.temp_bytes

    @property
    def added_cost(self) -> float:
        return sum(c.added_cost for c in self.candidates)

    @property
    def total_cost(self) -> float:
        # The added cost is relative to its own program, which may rematerialize gradients inside of the loss.
        return self.unplanned_cost + self.added_cost


class ProgramSearch:
    """The search for the plans of a program, shared by all budgets.

    Args:
        report: called with a description of each step.
        compile_baseline: whether the program without rematerialization will be asked for; of one gradient it is
            compiled in a thread.

    Attributes:
        searches: one for each gradient.
        time_left: of all of them.
    """

    def __init__(
        self, captured: Captured, options: SearchOptions, report: Callable[[str], None], compile_baseline: bool
    ):
        self.captured, self._options, self._report = captured, options, report
        self.time_left = TimeLeft(options.time_limit)
        self._programs: dict[tuple[Waits | int, ...], PlannedProgram] = {}
        is_alone = captured.num_taken == 1
        self._order = Waits.FOR_NOTHING if is_alone else None  # of planned gradients, once known
        self.searches: list[Search] = []
        flags = {"compile_baseline": compile_baseline and is_alone, "has_others": not is_alone}
        with self.time_left.running():
            for gradient in captured.gradients:
                program = captured if is_alone else Captured((gradient,))
                with gradient.context.bind_axes():
                    self.searches.append(Search(program, options, report, self.time_left, **flags))

    @property
    def _alone(self) -> Search | None:
        """The search for the only gradient; None if the program takes several, or one of them several times."""
        return self.searches[0] if self.captured.num_taken == 1 else None

    def _each(self, ask: Callable[[Search], T]) -> list[T]:
        answers: list[T] = []
        for gradient, search in zip(self.captured.gradients, self.searches, strict=True):
            with gradient.context.bind_axes():
                answers.append(ask(search))
        return answers

    # -- budgets ---------------------------------------------------------------------------------------------------

    def fixed(self) -> Cost:
        """A cost with the arguments and outputs of all plans: by XLA as soon as something is compiled."""
        return next((program.compiled for program in self.programs()), self.captured.fixed)

    def in_bytes(self, budget: ByteBudget) -> ByteBudget:
        """A budget in bytes. A fraction is one of the program without rematerialization, which is compiled, so that
        arguments and outputs are exact.
        """
        if isinstance(budget.amount, int):
            return budget
        alone, amount = self._alone, budget.amount
        temp_bytes = alone.fraction_of_baseline(amount) if alone else int(amount * self._baseline.temp_bytes)
        fixed = budget.fixed_bytes(self.fixed())
        return ByteBudget(temp_bytes + fixed - int((1 - amount) * fixed), budget.of)  # rounded up

    def _left(self, budget: ByteBudget) -> int:
        return bytes_left(budget, self.captured, self.programs())

    # -- programs --------------------------------------------------------------------------------------------------

    def programs(self) -> list[PlannedProgram]:
        """The programs that are compiled, all of them."""
        if self._alone is None:
            return [*self._programs.values()]
        return [self._program((candidate,), Waits.FOR_NOTHING) for candidate in self._alone.candidates]

    def best(self, temp_bytes: float) -> PlannedProgram | None:
        """The fastest compiled program with at most these temporary bytes, or the cheapest; None if there is none."""
        return best_within(self.programs(), temp_bytes, self._options.objective)

    def smallest(self) -> PlannedProgram:
        return min(self.programs(), key=lambda p: p.temp_bytes)

    def fit(self, budget: ByteBudget) -> PlannedProgram:
        """The cheapest program within a budget.

        Raises:
            PlanError: none is found.
        """
        program = self.find(budget)
        if program is None:  # a small program may keep the budget without a plan, whatever was predicted
            smallest = self._alone.smallest_bytes() if self._alone else self.smallest().temp_bytes
            program = self.best(self._left(budget))
            if program is None:
                raise self._no_plan(budget, smallest + budget.fixed_bytes(self.fixed()))
        return program

    def _no_plan(self, budget: ByteBudget, smallest_bytes: int) -> PlanError:
        """The error that no candidate keeps a budget.

        Args:
            smallest_bytes: the least bytes reached, counted as in the budget.
        """
        name, budget_bytes, fixed = self.captured.name, int(budget.amount), self.fixed()
        late, fixes = "", list[str]()
        if not self.is_complete():
            late, fixes = ", when the time limit ended the search", ["give the search more time (time_limit=None)"]
        undivided, held = self._alone.undivided if self._alone else None, ""
        if undivided is not None and undivided[1] > budget.left(fixed):
            eqn, held_bytes = undivided
            file, line, _ = user_line(eqn)
            place = f" at {short_path(file)}:{line}" if file else ""
            held = (
                f" The backward pass of one operation takes {format_bytes(held_bytes)} of it, which no plan changes: "
                f"{eqn.primitive.name}{place}."
            )
            fixes.insert(0, "let this operation store less, such as fewer checkpoints of a solver")
        elif self.captured.is_step and self.has_baseline() and self.smallest().temp_bytes >= self.unplanned_bytes():
            # Its gradients take nothing that a plan could save.
            loss = (
                f"if {name} is a loss, give argnums=, so that its own gradient is planned (it takes small ones itself)"
            )
            fixes.insert(0, loss)
        parts = ""
        if budget.of == STEP:
            donate = "" if fixed.alias_bytes else " (plan the jitted step, if it donates arguments)"
            parts = (
                f" Arguments take {format_bytes(fixed.argument_bytes)} of it and outputs "
                f"{format_bytes(fixed.output_bytes - fixed.alias_bytes)}, which no plan changes{donate}."
            )
        fixes.append("allow that much; or rematerialize smaller parts, make the batch smaller, or let the loop's steps")
        return PlanError(
            f"No plan for {name} keeps the budget of {format_bytes(budget_bytes)}: the smallest found needs "
            f"{format_bytes(smallest_bytes)}, {format_bytes(smallest_bytes - budget_bytes)} "
            f"more{late}.{held}{parts}{unit_question(budget.amount)}\nFix: {'; '.join(fixes)} compute less.",
            smallest_bytes=smallest_bytes,
        )

    def find(self, budget: ByteBudget) -> PlannedProgram | None:
        """The cheapest program within a budget; None if none is found.

        Raises:
            PlanError: arguments and outputs leave nothing of the budget.
        """
        if self._alone is None:
            self._fit_together(budget)
        else:
            self._alone.fit(budget)
        return self.best(self._left(budget))

    def _fit_together(self, budget: ByteBudget) -> None:
        """Search for the limit that all searches share."""
        left = self._left(budget)  # arguments and outputs are estimated until something is compiled
        programs: list[PlannedProgram] = []

        def bytes_of(limit: int) -> int:
            program = self._within(limit)
            if program.waits is Waits.FOR_NOTHING and program.temp_bytes > self._left(budget):
                program = self._ordered(program.candidates)  # an order alone may be enough
            programs.append(program)
            return program.temp_bytes + left - self._left(budget)

        largest_within(
            left,
            bytes_of,
            range(1, MOST_BYTES),
            first=left,
            known_bytes={0: 0},
            tries=TUNED.tries,
            tolerance=TUNED.scatter,
            is_enough=lambda num_bytes: self.is_late() or (num_bytes <= left and programs[-1].added_cost <= 0),
        )
        if self.best(self._left(budget)) is None and not self.is_late():
            candidates = self.smallest().candidates
            for waits in Waits:  # to wait copies a value, which may be the difference
                self._program(candidates, waits)
        if self._options.has_times:
            self.stock_programs(self._left(budget))

    def _within(self, limit: int) -> PlannedProgram:
        """Compile the cheapest candidates within a limit together; the smallest of a gradient that has none."""
        budget = ByteBudget(limit, TEMPORARIES)
        return self._together(self._each(lambda search: search.fit(budget) or search.candidates.smallest()))

    def _together(self, candidates: Sequence[Candidate]) -> PlannedProgram:
        # Without an order XLA begins a later gradient beside an earlier one. The baseline and stock policies are as the
        # user would write them.
        is_planned = any(c.name == "plan" for c in candidates)
        return self._ordered(candidates) if is_planned else self._program(candidates, Waits.FOR_NOTHING)

    def _ordered(self, candidates: Sequence[Candidate]) -> PlannedProgram:
        """Compile candidates with the order that took less memory for the first ones."""
        # A gradient that reads results of the one before waits for these anyway, and to read the gradient itself may
        # keep it in memory.
        orders = [Waits.FOR_INPUTS, Waits.FOR_GRADIENTS] if self._order is None else [self._order]
        program = min((self._program(candidates, waits) for waits in orders), key=lambda p: p.temp_bytes)
        self._order = program.waits
        return program

    def _program(self, candidates: Sequence[Candidate], waits: Waits) -> PlannedProgram:
        """The program of candidates."""
        key = (waits, *map(id, candidates))  # searches hold their candidates
        if key not in self._programs:
            if self._alone is None:
                self._report(f"compiling the step, plan {len(self._programs) + 1}")
            self._programs[key] = PlannedProgram(self.captured, tuple(candidates), waits, self.total_cost())
        return self._programs[key]

    def stock_programs(self, temp_bytes: float) -> list[PlannedProgram]:
        """The stock policies that keep a number of temporary bytes, the same for all gradients."""
        by_gradient = [
            {c.name: c for c in candidates}
            for candidates in self._each(lambda search: search.stock_choices(temp_bytes))
        ]
        names = [name for name in by_gradient[0] if all(name in by_name for by_name in by_gradient)]
        programs = [self._together([by_name[name] for by_name in by_gradient]) for name in names]
        return [p for p in programs if p.temp_bytes <= temp_bytes]

    def ends(self) -> tuple[int, int]:
        """The least temporary bytes reached, and the baseline's."""
        ends = self._each(lambda search: search.ends())
        if self._alone is not None:
            return ends[0]
        self._together(self._each(lambda search: search.candidates.smallest()))
        return self.smallest().temp_bytes, self._baseline.temp_bytes

    # -- the program without rematerialization ---------------------------------------------------------------------

    @cached_property
    def _baseline(self) -> PlannedProgram:
        return self._together(self._each(lambda search: search.candidates.compile_baseline()))

    def has_baseline(self) -> bool:
        """Whether its bytes are compiled or extrapolated."""
        if self._alone is not None:
            return self._alone.baseline.known is not None
        return any(program.name == BASELINE for program in self.programs())

    def unplanned_bytes(self) -> int:
        """Its temporary bytes: predicted, unless it is compiled."""
        if self._alone is None and self.has_baseline():
            return self._baseline.temp_bytes
        return int(max(self._each(lambda search: search.candidates.unplanned_bytes)) + self._besides())

    @cached_property
    def unplanned_flops(self) -> int:
        if self._alone is not None:
            return self._alone.baseline.flops_without_remat
        return self.captured.program(self._each(lambda search: search.baseline.jaxpr_without_remat), None).flops

    def total_cost(self) -> float:
        """Its cost, with its gradients."""
        return sum(max(1e-30, search.baseline.flops) for search in self.searches) + self.captured.repeated_flops

    # -- the model -------------------------------------------------------------------------------------------------

    def _besides(self, program: PlannedProgram | None = None) -> float:
        """Bytes that the program takes besides its largest gradient, by the compiled ones other than this one."""
        if self._alone is not None:
            return 0.0
        # Without an order, gradients may be in memory together.
        waits = Waits.FOR_NOTHING if program is None else program.waits
        compiled = [p for p in self.programs() if p is not program]
        alike = [p for p in compiled if p.waits is waits] or compiled
        return min((p.temp_bytes - max(c.temp_bytes for c in p.candidates) for p in alike), default=0.0)

    def predict(self, program: PlannedProgram) -> float:
        """Temporary bytes of a program, predicted from all others."""
        if self._alone is not None:
            return self._alone.predict(program.candidates[0])
        return max(c.predicted_bytes for c in program.candidates) + self._besides(program)

    def stock_policies(self) -> Iterator[tuple[str, int, float, bool]]:
        """Name, temporary bytes and added cost of each stock policy, and whether these are predicted."""
        besides = int(self._besides())
        for rows in zip(*(search.stock_policies() for search in self.searches), strict=True):
            names, sizes, costs, are_predicted = zip(*rows, strict=True)
            yield names[0], max(sizes) + besides, sum(costs), self._alone is None or are_predicted[0]

    def curve(self) -> list[tuple[float, float]]:
        """The model's curve; of several gradients the compiled programs that no other beats in both."""
        if self._alone is not None:
            return self._alone.curve()
        points = [(float(p.temp_bytes), p.added_cost) for p in self.programs()]
        return undominated(points, lambda point: point[0], lambda point: point[1])

    # -- time ------------------------------------------------------------------------------------------------------

    def is_late(self) -> bool:
        return any(search.is_late() for search in self.searches)

    def is_complete(self) -> bool:
        """Whether no time limit ended a search, or the analysis before it."""
        return not self.is_late() and not any(search.lacks_regions for search in self.searches)


def fixed_above(captured: Captured, budget: int) -> Cost | None:
    """Bytes of arguments and outputs, if these take more than a budget; without a search."""
    fixed = captured.fixed
    if fixed.argument_bytes <= budget < fixed.fixed_bytes:
        # Outputs are estimated: their shardings, and whether two of them are one.
        with captured.gradients[0].context.bind_axes():
            fixed = captured.program([], fast_compile_options()).cost
    return fixed if fixed.fixed_bytes > budget else None
