"""A program to plan: its compiled choices, their bytes, the cheapest of them, and the fastest."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax

from ..._equations.compiled import (
    Cost,
    Program,
    estimate_options,
    fast_compile_options,
    is_out_of_memory,
)
from ..._errors import TargetError
from ..._jax import Jaxpr
from ..._targets import current
from .._budget import TimeLeft
from .._tuned import TUNED
from .candidates import Candidate, cheapest_within, fastest_within
from .capture import Captured
from .layout import Waits


class Choice(NamedTuple):
    """A compiled program with several gradients; with one gradient, its `Candidate` is as such.

    Attributes:
        candidates: one for each gradient.
        compiled: the costs of the program that the budget is for.
        waits: the event that each gradient waits for.
    """

    candidates: tuple[Candidate, ...]
    compiled: Cost
    waits: Waits

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
    """The program that a budget is for. Base of the search for its gradient (`Search`), or for several (`Several`).

    Attributes:
        searches: one for each gradient.
        time_left: of all of them.
        has_times: whether choices are compared by XLA's estimates of their times.
    """

    searches: Sequence[Any]

    def __init__(self, captured: Captured, objective: str, time_left: TimeLeft):
        self.captured, self.time_left = captured, time_left
        self.has_times = objective != "flops" and bool(estimate_options())
        self._best_within = cheapest_within if objective == "flops" else fastest_within

    def choices(self) -> Iterable[Any]:
        """Choices that are compiled, all of them."""
        raise NotImplementedError

    def best(self, temp_bytes: float) -> Any:
        """The fastest compiled choice with at most these temporary bytes, or the cheapest; None if there is none."""
        return self._best_within(self.choices(), temp_bytes)

    def smallest(self) -> Any:
        return min(self.choices(), key=lambda c: c.temp_bytes)

    def compile(self, choice: Any) -> Program:
        """The program of a choice, as its user compiles it."""
        return self.captured.program(self.rewritten(choice.candidates, choice.waits), None)

    def rewritten(self, candidates: Sequence[Candidate], waits: Waits) -> list[Jaxpr]:
        programs = []
        for gradient, candidate in zip(self.captured.gradients, candidates, strict=True):
            with gradient.context.bind_axes():
                programs.append(candidate.layout.rewrite(candidate.options, waits))
        return programs

    def fixed(self) -> Cost:
        """A cost with the arguments and outputs of all plans: by XLA as soon as something is compiled."""
        compiled = next((choice.compiled for choice in self.choices()), None)
        return self.captured.fixed if compiled is None else compiled

    def has_baseline(self) -> bool:
        """Whether the bytes of the program without rematerialization are compiled or extrapolated."""
        raise NotImplementedError

    def unplanned_bytes(self) -> int:
        """Temporary bytes without rematerialization: predicted, unless that program is compiled."""
        raise NotImplementedError

    def has_saving(self) -> bool:
        """Whether anything that is compiled takes less than the program without rematerialization."""
        return not self.has_baseline() or self.smallest().temp_bytes < self.unplanned_bytes()

    def total_cost(self) -> float:
        """The cost of the baseline with its gradients."""
        return sum(max(1e-30, search.baseline.flops) for search in self.searches) + self.captured.repeated_flops

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


# -- time: ``objective="time"`` runs compiled choices ------------------------------------------------------------------

_ROUNDS = 7


def refuse_unknown_times() -> None:
    """Refuse to compare times on a target if XLA tells none for it.

    Raises:
        TargetError: it is another than an H100 or an H200.
    """
    target = current.absent()
    if target is not None and not estimate_options():
        raise TargetError(
            f"plan(objective='time') runs programs, and nothing runs on the target {target.name}; XLA's estimates, "
            f"which could be compared "
            f"instead, are complete for the H100 and the H200 only.\nFix: use objective='flops', or plan on the device."
        )


class Timer:
    """Times of choices, measured on zeros. A program without room for them counts as infinitely slow."""

    def __init__(self) -> None:
        self._times: dict[Any, float] = {}

    def fastest(self, whole: Any, choice: Any, temp_bytes: int) -> Any:
        """The fastest of the cheapest choices and the stock policies within these temporary bytes; `choice` is one of
        them.
        """
        # A program that takes less memory may be faster.
        for part in (0.8, 0.6):
            if not whole.is_late():
                whole.fit(lambda limit=int(part * temp_bytes): limit)
        # The stock policies in any case, so that no plan is slower than one of them within the same memory.
        stock = whole.stock_choices(temp_bytes)
        fitting = [c for c in whole.choices() if c.temp_bytes <= temp_bytes]
        fitting.sort(key=lambda c: (c.added_cost, c.temp_bytes))
        cheapest = list(dict.fromkeys([choice, *fitting]))[: TUNED.tries]
        return self.faster([(whole, c) for c in dict.fromkeys([*cheapest, *stock])])[1]

    def faster(self, choices: Sequence[tuple[Any, Any]]) -> tuple[Any, Any]:
        """The fastest of choices for several programs, measured together."""
        self._measure([pair for pair in choices if pair[1] not in self._times])
        return min(choices, key=lambda pair: self._times[pair[1]])

    def fields(self, choice: Any) -> dict[str, Any]:
        timed = [[c.name, c.temp_bytes, seconds] for c, seconds in self._times.items() if math.isfinite(seconds)]
        seconds = self._times.get(choice, math.inf)
        return {"timed": timed, "seconds": seconds if math.isfinite(seconds) else None}

    def _measure(self, choices: Sequence[tuple[Any, Any]]) -> None:
        programs = [whole.compile(choice).compiled for whole, choice in choices]
        seconds: list[list[float]] = [[] for _ in programs]

        # In turns, so that a change of the machine's load meets all of them. The first round warms up.
        for n in range(_ROUNDS + 1):
            for program, times in zip(programs, seconds, strict=True):
                if math.inf not in times:
                    took = _seconds(program)
                    if n or took == math.inf:
                        times.append(took)
        for (_, choice), times in zip(choices, seconds, strict=True):
            self._times[choice] = math.inf if math.inf in times else statistics.median(times)


def _seconds(program: Any) -> float:
    """The time of a run; infinite where the device has too little memory beside the caller's own arrays, which the
    zeros come on top of.
    """
    try:
        inputs = jax.block_until_ready(_zeros(program))  # each time: the program may take the memory of donated ones
        start = time.perf_counter()
        jax.block_until_ready(program(*inputs))
    except jax.errors.JaxRuntimeError as e:
        if not is_out_of_memory(e):
            raise
        return math.inf
    return time.perf_counter() - start


def _zeros(program: Any) -> list[Any]:
    """Arguments for a compiled program, each made on its own devices: one may have no room for the whole array. What
    the program does not use has no sharding.
    """
    shardings = jax.tree.leaves(program.input_shardings, is_leaf=lambda s: s is None)
    pairs = zip(jax.tree.leaves(program.args_info), shardings, strict=True)
    return [jax.device_put(jax.lax.full(x.shape, 0, x.dtype, sharding=s), s) for x, s in pairs]
