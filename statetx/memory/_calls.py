"""The calls of a function of the user, told apart in the compiled program."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any

from ._names import AGAIN, PRODUCTS
from ._timeline import Timeline

if TYPE_CHECKING:
    from .buffer import Step

_MOST_IN_A_LINE = 3  # products of one line of a function without a loop: the query, the key and the value of a layer


class Calls:
    """The calls of a function of the user, told apart in the schedule.

    Each has a number in the names of its operations (`_scopes`). In a program that was traced before it was profiled,
    calls at one line, as in a loop over layers, count as one.

    Attributes:
        num: of the calls in the forward pass; in the backward pass, if the forward pass has none.
        has_loop: whether a call runs the same operations several times.
    """

    def __init__(self, profile: Timeline, function: str):
        self._number: dict[int, int] = {}
        numbers: dict[Any, int] = {}
        products: Counter[Any] = Counter()
        called: dict[Any, set[str]] = defaultdict(set)
        original: dict[str, int] = {}
        again: list[tuple[int, int]] = []  # steps that XLA itself runs again, with those that they repeat
        for n, step in enumerate(profile.steps):
            first = original.setdefault(AGAIN.split(step.name)[0], n)
            if first != n and AGAIN.search(step.name):
                again.append((n, first))
            elif (step.is_recomputed or step.phase == "forward") and (call := _call_of(step, function)) is not None:
                number = numbers.setdefault((step.is_recomputed, call), len(numbers))
                self._number[n] = number
                if step.primitive in PRODUCTS:
                    products[number, step.primitive, step.frames] += 1
                for inner in step.calls[len(call) : len(call) + 1]:  # by its line in the function
                    line = next((f.line for f in reversed(step.frames) if f.function == function), 0)
                    called[number, inner.rpartition("~")[0], line].add(inner)
        self._number |= {n: self._number[first] for n, first in again if first in self._number}
        forward = {self._number[n] for n in self._number if not profile.steps[n].is_recomputed}
        self.num = len(forward or set(self._number.values()))
        self.has_loop = max(products.values(), default=0) > _MOST_IN_A_LINE or any(len(c) > 1 for c in called.values())

    def of(self, step: int) -> int | None:
        """The number of the call that runs a step; None if none does."""
        return self._number.get(step)


def _call_of(step: Step, function: str) -> Any:
    """What tells the outermost call of a function that runs a step from other calls; None if none does."""
    for n, call in enumerate(step.calls):
        if call.rpartition("~")[0] == function:
            return step.calls[: n + 1]
    depth = max((d for d, f in enumerate(step.frames, 1) if f.function == function), default=0)
    return step.frames[depth:] if depth else None
