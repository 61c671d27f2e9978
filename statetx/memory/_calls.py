"""The calls of a function of the user, told apart in the compiled program."""

from __future__ import annotations

import bisect
from collections import defaultdict
from typing import TYPE_CHECKING

from ._names import PRODUCTS

if TYPE_CHECKING:
    from .profile import MemoryProfile


class Calls:
    """The calls of a function of the user, told apart in the schedule.

    Calls at two lines of the program are two. Of calls at one line, as in a loop over layers, each runs the same operations: the
    first occurrence of an operation belongs to the first call and the last one to the last. What XLA fused in some calls only is told by
    time, between products of matrices.

    Attributes:
        num: of the calls in the forward pass; in the backward pass, if the forward pass has none.
    """

    def __init__(self, profile: MemoryProfile, function: str):
        self._number: dict[int, int] = {}
        self.num = 0
        by_caller: dict[tuple, dict[tuple, list[int]]] = defaultdict(lambda: defaultdict(list))
        for n, step in enumerate(profile.steps):
            if step.is_recomputed or step.phase == "forward":
                # The outermost frame of it: the stack of a loop's operations repeats the functions around the loop.
                depth = max((d for d, f in enumerate(step.frames, 1) if f.function == function), default=0)
                if depth:
                    inside, caller = step.frames[:depth], step.frames[depth:]
                    by_caller[step.is_recomputed, caller][step.primitive, inside].append(n)
        for occurrences in by_caller.values():
            self._tell_apart(occurrences)
        forward = {self._number[n] for n in self._number if not profile.steps[n].is_recomputed}
        self.num = len(forward or set(self._number.values()))

    def _tell_apart(self, occurrences: dict[tuple, list[int]]) -> None:
        products = [found for key, found in occurrences.items() if key[0] in PRODUCTS]
        anchors = products or list(occurrences.values())
        counts = [len(found) for found in anchors]
        # Of numbers of calls that explain the same number of counts, the larger one: the last call may leave out an operation.
        num = max(counts, key=lambda n: (sum(c % n == 0 for c in counts), n))
        regular = [found for found in anchors if len(found) % num == 0]
        begins = [min(found[m * len(found) // num] for found in regular) for m in range(num)]
        for found in occurrences.values():
            for m, n in enumerate(found):
                is_regular = len(found) % num == 0
                number = m * num // len(found) if is_regular else max(bisect.bisect(begins, n) - 1, 0)
                self._number[n] = self.num + number
        self.num += num

    def of(self, step: int) -> int | None:
        """The number of the call that runs a step; None if none does."""
        return self._number.get(step)
