"""The search for the plans of several gradients of a step.

They have a search each (two networks that train each other, two losses). These share one limit: each gives its cheapest
candidate within it, all of them are compiled together in the step, and the limit is corrected until the step keeps the
budget. For gradients that are taken one after the other this is the optimum, since their memory is not in use at the
same time. Those of one function, for several parts of a batch, have one search.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ..._equations.compiled import candidate_options
from ...residuals.diagnosis import BASELINE
from .._budget import TimeLeft
from .._treatments.treatment import undominated
from .._tuned import TUNED
from .candidates import Candidate
from .capture import Captured
from .layout import Waits
from .search import Options, Search
from .whole import Choice, Whole


class Several(Whole):
    """A step with several gradients, of one function or of several."""

    def __init__(self, captured: Captured, options: Options, report: Callable[[str], None], time_left: TimeLeft):
        super().__init__(captured, options.objective, time_left)
        self._compiled: dict[tuple[Any, ...], Choice] = {}
        self._order: Waits | None = None  # of planned gradients, once known
        self._report = report
        self.searches: list[Search] = []
        for gradient in captured.gradients:
            with gradient.context.bind_axes():
                self.searches.append(Search(Captured((gradient,)), options, report, time_left, has_others=True))

    def _each(self, ask: Callable[[Search], Any]) -> list[Any]:
        answers = []
        for gradient, search in zip(self.captured.gradients, self.searches, strict=True):
            with gradient.context.bind_axes():
                answers.append(ask(search))
        return answers

    # -- choices --

    def fit(self, temp_bytes: Callable[[], int]) -> Choice | None:
        """The cheapest choice with at most these temporary bytes, which are asked again once something is compiled;
        None if none is found.
        """
        # Bisection over the limit that all searches share: the choice of `low` keeps the budget, the one of `high` does
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

            limit *= budget / max(choice.temp_bytes, 1)  # in proportion to the measurement
            is_bracketed = high < float("inf")
            limit = _clear_of_ends(limit, low, high) if is_bracketed else max(limit, low * (1 + TUNED.scatter))
            if limit < 1:
                break
        if self.best(temp_bytes()) is None and not self.is_late():
            candidates = self.smallest().candidates
            for waits in Waits:  # to wait copies a value, which may be the difference
                self._compile(candidates, waits)
        if self.has_times:
            self.stock_choices(temp_bytes())
        return self.best(temp_bytes())

    def _within(self, limit: int) -> Choice:
        """Compile the cheapest candidates within a limit together; the smallest of a gradient that has none."""
        return self._compile_together(
            self._each(lambda search: search.fit(lambda: limit) or search.candidates.smallest())
        )

    def _compile_together(self, candidates: Sequence[Candidate]) -> Choice:
        # Without an order XLA begins a later gradient beside an earlier one. The baseline and stock policies are as the
        # user would write them.
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
            cost = self.captured.program(self.rewritten(candidates, waits), candidate_options()).cost
            self._compiled[key] = Choice(tuple(candidates), cost, waits)
        return self._compiled[key]

    def stock_choices(self, temp_bytes: float) -> list[Choice]:
        # The same policy for all gradients.
        by_gradient = [
            {c.name: c for c in candidates}
            for candidates in self._each(lambda search: search.stock_choices(temp_bytes))
        ]
        names = [name for name in by_gradient[0] if all(name in by_name for by_name in by_gradient)]
        choices = [self._compile_together([by_name[name] for by_name in by_gradient]) for name in names]
        return [c for c in choices if c.temp_bytes <= temp_bytes]

    def smallest_bytes(self) -> int:
        return self.smallest().temp_bytes

    def choices(self) -> Iterable[Choice]:
        return self._compiled.values()

    # -- its memory --

    @functools.cached_property
    def _baseline(self) -> Choice:
        return self._compile_together(self._each(lambda search: search.candidates.compile_baseline()))

    def has_baseline(self) -> bool:
        return any(choice.name == BASELINE for choice in self.choices())

    def unplanned_bytes(self) -> int:
        if self.has_baseline():
            return self._baseline.temp_bytes
        return int(max(self._each(lambda search: search.unplanned_bytes())) + self._besides())

    @functools.cached_property
    def unplanned_flops(self) -> int:
        return self.captured.program(self._each(lambda search: search.baseline.jaxpr_without_remat), None).flops

    def _besides(self, choice: Choice | None = None) -> float:
        """Bytes that the step takes besides its largest gradient, by the compiled choices other than this one."""
        # Without an order, gradients may be in memory together.
        waits = Waits.FOR_NOTHING if choice is None else choice.waits
        other_choices = [c for c in self._compiled.values() if c is not choice]
        alike = [c for c in other_choices if c.waits is waits] or other_choices
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
            (rows[0][0], max(b for _, b, _, _ in rows) + besides, sum(cost for _, _, cost, _ in rows), True)
            for rows in by_gradient
        ]

    def curve(self) -> list[tuple[float, float]]:
        """The compiled choices that no other beats in both."""
        points = [(choice.temp_bytes, choice.added_cost / self.total_cost()) for choice in self._compiled.values()]
        return undominated(points, lambda point: point[0], lambda point: point[1])


def _clear_of_ends(target: float, low: float, high: float) -> float:
    """A target within an interval, so far from both ends that each try shortens the interval by a tenth or more."""
    margin = 0.1 * (high - low)
    return min(max(target, low + margin), high - margin)


AnyWhole = Search | Several


def whole_of(
    captured: Captured,
    options: Options,
    report: Callable[[str], None] = lambda text: None,
    *,
    compile_baseline: bool = False,
) -> AnyWhole:
    """The search for the gradient of a program, or for several.

    Args:
        compile_baseline: whether the program without rematerialization will be asked for; of one gradient it is
            compiled in a thread.
    """
    time_left = TimeLeft(options.time_limit)
    with time_left.running():
        if captured.num_taken == 1:
            return Search(captured, options, report, time_left, compile_baseline=compile_baseline)
        return Several(captured, options, report, time_left)
