"""The program that a budget is for, and the plans for its gradients: one, or all of a training step.

One gradient is searched for within the step that takes it, so that every candidate is compiled as it will run. Several
gradients (two networks that train each other, two losses) have a search each, on their own. They share one limit: each
search gives its cheapest candidate within it, all of them are compiled together in the step, and the limit is corrected
until the step keeps the budget. For gradients that are taken one after the other this is the optimum, since their
memory is not in use at the same time. Those of one function, for several parts of a batch, have one search.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from ..._equations.compiled import Cost, Program, fast_compile_options, memory_analysis_options
from ..._jax import Jaxpr
from ..._lift.context import TraceContext
from ...residuals.diagnosis import BASELINE
from .._budget import TimeLeft
from .._treatments.treatment import undominated
from .._tuned import TUNED
from .candidates import Candidate, cheapest_within, predicted_bytes
from .capture import Captured, Fixed
from .layout import Waits
from .search import Options, Search


class Choice(NamedTuple):
    """A compiled program.

    Attributes:
        candidates: one for each gradient.
        compiled: the costs of the program that the budget is for.
        waits: what each gradient waits for.
    """

    candidates: tuple[Candidate, ...]
    compiled: Cost
    waits: Waits = Waits.FOR_NOTHING

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


class Whole:
    """A program with one gradient, or with none but itself to differentiate.

    Args:
        compile_baseline: whether the program without rematerialization will be asked for; it is compiled in a thread.

    Attributes:
        searches: one for each gradient.
        time_left: of all of them.
    """

    def __init__(
        self,
        captured: Captured,
        options: Options,
        report: Callable[[str], None] = lambda text: None,
        *,
        compile_baseline: bool = False,
    ):
        self.captured = captured
        self.time_left = TimeLeft(options.time_limit)
        with self._contexts(), self.time_left.running():
            self.searches = self._start(options, report, compile_baseline)

    def _start(self, options: Options, report: Callable[[str], None], compile_baseline: bool) -> list[Search]:
        (gradient,) = self.captured.gradients
        program_of = lambda jaxpr, options: self.captured.program([jaxpr], options)
        shared = {"time_left": self.time_left, "compile_baseline": compile_baseline}
        return [Search(gradient, options, report, program_of, **shared)]

    def _contexts(self) -> Any:
        """Bind the axis names of the transforms around the gradient."""
        return self.captured.gradients[0].context.bind_axes()

    # -- choices --

    def fit(self, temp_bytes: Callable[[], int]) -> Choice | None:
        """The cheapest choice with at most these temporary bytes, which are asked again once something is compiled;
        None if none is found.
        """
        with self._contexts():
            found = self.searches[0].fit(temp_bytes)
        return None if found is None else Choice((found,), found.compiled)

    def best(self, temp_bytes: int) -> Choice | None:
        """`fit` among the choices that are compiled."""
        return cheapest_within(self.choices(), temp_bytes)

    def stock_choices(self, temp_bytes: int) -> list[Choice]:
        """The stock policies that keep a number of temporary bytes, compiled for it."""
        with self._contexts():
            candidates = self.searches[0].stock_candidates()
        return [Choice((c,), c.compiled) for c in candidates if c.temp_bytes <= temp_bytes]

    def smallest(self) -> Choice:
        return min(self.choices(), key=lambda c: c.temp_bytes)

    def smallest_bytes(self) -> int:
        """The least temporary bytes reached."""
        with self._contexts():
            return self.searches[0].smallest_bytes()

    def choices(self) -> Iterator[Choice]:
        """Choices that are compiled, all of them."""
        for candidate in self.searches[0].candidates:
            yield Choice((candidate,), candidate.compiled)

    def compile(self, choice: Choice, compiler_options: dict[str, Any] | None) -> Program:
        """The program of a choice, with other options for the compiler."""
        with self._contexts():
            return self.captured.program(self._rewritten(choice.candidates, choice.waits), compiler_options)

    def _rewritten(self, candidates: Sequence[Candidate], waits: Waits) -> list[Jaxpr]:
        programs = []
        for gradient, candidate in zip(self.captured.gradients, candidates, strict=True):
            with gradient.context.bind_axes():
                programs.append(candidate.layout.rewrite(candidate.options, waits))
        return programs

    # -- its memory --

    def fixed(self) -> Fixed:
        """Bytes of arguments and outputs: by XLA as soon as something is compiled."""
        compiled = next((choice.compiled for choice in self.choices()), None)
        return self.captured.fixed if compiled is None else _fixed_of(compiled)

    def unplanned_bytes(self) -> int:
        """Temporary bytes without rematerialization: predicted, unless that program is compiled."""
        with self._contexts():
            return self.searches[0].candidates.unplanned_bytes

    def unplanned_flops(self) -> int:
        with self._contexts():
            return self.searches[0].baseline.flops_without_remat

    def has_baseline(self) -> bool:
        """Whether the bytes of the program without rematerialization are compiled or extrapolated."""
        return self.searches[0].baseline.known is not None

    def has_saving(self) -> bool:
        """Whether anything that is compiled takes less than the program without rematerialization."""
        return not self.has_baseline() or self.smallest().temp_bytes < self.unplanned_bytes()

    def ends(self) -> tuple[int, int]:
        """The least temporary bytes reached, and the baseline's."""
        with self._contexts():
            return self.searches[0].ends()

    def fraction_of_baseline(self, fraction: float) -> int:
        """A fraction of the baseline's temporary bytes."""
        with self._contexts():
            return self.searches[0].fraction_of_baseline(fraction)

    # -- the model --

    def predict(self, choice: Choice) -> float:
        """Temporary bytes of a choice, predicted from all others."""
        (candidate,) = choice.candidates
        return predicted_bytes(candidate.peak, [c for c in self.searches[0].candidates if c is not candidate])

    def stock_policies(self) -> list[tuple[str, int, float, bool]]:
        """See `Search.stock_policies`."""
        return self.searches[0].stock_policies()

    def curve(self) -> list[tuple[float, float]]:
        """Points (predicted bytes, added cost relative to the baseline)."""
        with self._contexts():
            return self.searches[0].curve()

    def total_cost(self) -> float:
        """The cost of the baseline with its gradients."""
        return sum(search.total_cost() for search in self.searches)

    def is_late(self) -> bool:
        return any(search.is_late() for search in self.searches)

    def is_complete(self) -> bool:
        """Whether no time limit ended a search, or the analysis before it."""
        return not self.is_late() and not any(search.lacks_regions for search in self.searches)


def fixed_above(captured: Captured, budget: int) -> Fixed | None:
    """Bytes of arguments and outputs, if these take more than a budget; without a search."""
    fixed = captured.fixed
    if fixed.bytes <= budget or fixed.argument_bytes > budget:
        return None if fixed.bytes <= budget else fixed

    # Outputs are estimated: their shardings, and whether two of them are one.
    with captured.gradients[0].context.bind_axes():
        fixed = _fixed_of(captured.program([], fast_compile_options()).cost)
    return fixed if fixed.bytes > budget else None


def _fixed_of(compiled: Cost) -> Fixed:
    return Fixed(compiled.argument_bytes, compiled.output_bytes, compiled.alias_bytes)


class Several(Whole):
    """A step with several gradients, of one function or of several."""

    def _start(self, options: Options, report: Callable[[str], None], compile_baseline: bool) -> list[Search]:
        del compile_baseline  # of a gradient alone it tells little
        self._compiled: dict[tuple[Any, ...], Choice] = {}
        self._order: Waits | None = None  # of planned gradients, once known
        self._report = report
        searches = []
        for gradient in self.captured.gradients:
            with gradient.context.bind_axes():
                shared = {"time_left": self.time_left, "has_others": True}
                searches.append(Search(gradient, options, report, gradient.program, **shared))
        return searches

    def _contexts(self) -> Any:
        return TraceContext().bind_axes()

    def _each(self, ask: Callable[[Search], Any]) -> list[Any]:
        answers = []
        for gradient, search in zip(self.captured.gradients, self.searches, strict=True):
            with gradient.context.bind_axes():
                answers.append(ask(search))
        return answers

    # -- choices --

    def fit(self, temp_bytes: Callable[[], int]) -> Choice | None:
        # Bisection over the limit that all searches share: the choice of `low` keeps the budget, that of `high` does
        # not.
        low, high, limit = 0.0, float("inf"), float(temp_bytes())
        tried: set[int] = set()
        for _ in range(TUNED.tries):
            choice, budget = self._within(int(limit)), temp_bytes()
            if choice.temp_bytes > budget and choice.waits is Waits.FOR_NOTHING:
                choice = self._ordered(choice.candidates)  # an order alone may be enough
            if choice.temp_bytes <= budget:
                if choice.added_cost <= 0 or choice.temp_bytes >= (1 - TUNED.scatter) * budget:
                    break
                low = limit
            else:
                high = limit
            if id(choice) in tried and high - low <= 4 * TUNED.scatter * limit:
                break
            tried.add(id(choice))
            if self.is_late() or high - low <= TUNED.scatter * limit:
                break

            limit *= budget / max(choice.temp_bytes, 1)  # in proportion to what was measured
            is_bracketed = high < float("inf")
            limit = _clear_of_ends(limit, low, high) if is_bracketed else max(limit, low * (1 + TUNED.scatter))
            if limit < 1:
                break
        if self.best(temp_bytes()) is None and not self.is_late():
            candidates = self.smallest().candidates
            for waits in Waits:  # to wait copies a value, which may be the difference
                self._compile(candidates, waits)
        return self.best(temp_bytes())

    def _within(self, limit: int) -> Choice:
        """Compile the cheapest candidates within a limit together; the smallest of a gradient that has none."""
        return self._compile_together(
            self._each(lambda search: search.fit(lambda: limit) or search.candidates.smallest())
        )

    def _compile_together(self, candidates: Sequence[Candidate]) -> Choice:
        # Without an order XLA begins what a later gradient computes of the data beside an earlier gradient. The
        # baseline and stock policies are as the user would write them.
        is_planned = any(c.name == "plan" for c in candidates)
        return self._ordered(candidates) if is_planned else self._compile(candidates, Waits.FOR_NOTHING)

    def _ordered(self, candidates: Sequence[Candidate]) -> Choice:
        """Compile candidates with the order that took less memory for the first ones."""
        # A gradient that reads results of the one before waits for these anyway, and to read the gradient itself may
        # keep it in memory.
        orders = [Waits.FOR_INPUTS, Waits.FOR_GRADIENTS] if self._order is None else [self._order]
        choice = min((self._compile(candidates, waits) for waits in orders), key=lambda c: c.temp_bytes)
        self._order = choice.waits
        return choice

    def _compile(self, candidates: Sequence[Candidate], waits: Waits) -> Choice:
        key = (waits, *map(id, candidates))  # searches hold their candidates
        if key not in self._compiled:
            self._report(f"compiling the step, plan {len(self._compiled) + 1}")
            cost = self.captured.program(self._rewritten(candidates, waits), memory_analysis_options()).cost
            self._compiled[key] = Choice(tuple(candidates), cost, waits)
        return self._compiled[key]

    def stock_choices(self, temp_bytes: int) -> list[Choice]:
        # The same policy for all gradients.
        by_gradient = [{c.name: c for c in found} for found in self._each(lambda s: s.stock_candidates())]
        names = [name for name in by_gradient[0] if all(name in by_name for by_name in by_gradient)]
        choices = [self._compile_together([by_name[name] for by_name in by_gradient]) for name in names]
        return [c for c in choices if c.temp_bytes <= temp_bytes]

    def smallest_bytes(self) -> int:
        return self.smallest().temp_bytes

    def choices(self) -> Iterator[Choice]:
        yield from self._compiled.values()

    # -- its memory --

    @functools.cached_property
    def _baseline(self) -> Choice:
        return self._compile_together(self._each(lambda search: search.candidates.compile_baseline()))

    def has_baseline(self) -> bool:
        return any(choice.name == BASELINE for choice in self.choices())

    def unplanned_bytes(self) -> int:
        if self.has_baseline():
            return self._baseline.temp_bytes
        return int(max(self._each(lambda search: search.candidates.unplanned_bytes)) + self._besides())

    def unplanned_flops(self) -> int:
        return self._unplanned_flops

    @functools.cached_property
    def _unplanned_flops(self) -> int:
        return self.captured.program(self._each(lambda search: search.baseline.jaxpr_without_remat), None).flops

    def _besides(self, choice: Choice | None = None) -> float:
        """Bytes that the step takes besides its largest gradient, by the compiled choices other than this one."""
        # Without an order, gradients may be in memory together.
        waits = Waits.FOR_NOTHING if choice is None else choice.waits
        others = [c for c in self._compiled.values() if c is not choice]
        alike = [c for c in others if c.waits is waits] or others
        return min((c.temp_bytes - max(x.temp_bytes for x in c.candidates) for c in alike), default=0.0)

    def ends(self) -> tuple[int, int]:
        self._each(lambda search: search.ends())
        self._compile_together(self._each(lambda search: search.candidates.smallest()))
        return self.smallest().temp_bytes, self._baseline.temp_bytes

    def fraction_of_baseline(self, fraction: float) -> int:
        return int(fraction * self._baseline.temp_bytes)

    # -- the model --

    def predict(self, choice: Choice) -> float:
        return max(c.predicted_bytes for c in choice.candidates) + self._besides(choice)

    def stock_policies(self) -> list[tuple[str, int, float, bool]]:
        by_gradient = zip(*(search.stock_policies() for search in self.searches), strict=True)
        besides = int(self._besides())
        return [
            (same[0][0], max(b for _, b, _, _ in same) + besides, sum(cost for _, _, cost, _ in same), True)
            for same in by_gradient
        ]

    def curve(self) -> list[tuple[float, float]]:
        """The compiled choices that no other beats in both."""
        points = [(choice.temp_bytes, choice.added_cost / self.total_cost()) for choice in self._compiled.values()]
        return undominated(points, lambda point: point[0], lambda point: point[1])


def _clear_of_ends(target: float, low: float, high: float) -> float:
    """A target within an interval, so far from both ends that each try shortens the interval by a tenth or more."""
    margin = 0.1 * (high - low)
    return min(max(target, low + margin), high - margin)


def whole_of(captured: Captured, *args: Any, **options: Any) -> Whole:
    """`Whole`, or `Several` for several gradients; the arguments are as for `Whole`."""
    return (Whole if captured.num_taken == 1 else Several)(captured, *args, **options)
