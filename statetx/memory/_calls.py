"""The calls of a function of the user, told apart in the compiled program."""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from .._jax import StackFrame
from ._names import AGAIN, PRODUCTS

if TYPE_CHECKING:
    from .profile import MemoryProfile


class _Operation(NamedTuple):
    """An operation that a function runs, told by its line.

    Attributes:
        frames: from the line of the operation to the function's own line, innermost first.
    """

    primitive: str
    frames: tuple[StackFrame, ...]

    @property
    def is_own(self) -> bool:
        """Whether no other function runs it. A loop's body repeats the frames around it."""
        return self.frames[0].function == self.frames[-1].function

    @property
    def callee(self) -> tuple[StackFrame, str]:
        """The function's line, and the function that it calls there."""
        return self.frames[-1], self.frames[-2].function


class Calls:
    """The calls of a function of the user, told apart in the schedule.

    Calls at two lines of the program are two. Of calls at one line, as in a loop over layers, each runs the same operations: the
    first occurrence of an operation belongs to the first call and the last one to the last. What XLA fused in some calls only is told by
    time, between products of matrices.

    The loop may also lie inside the function: a loss that calls layer after layer runs once. The frames of both are equal, so that the
    function's own operations decide (`_runs_once`). Where it has none, and calls one function only, it counts as one call: that errs on
    the safe side, since the function that it calls has the calls that could be rematerialized.

    Attributes:
        num: of the calls in the forward pass; in the backward pass, if the forward pass has none.
        has_loop: whether a call runs the same operations several times.
    """

    def __init__(self, profile: MemoryProfile, function: str):
        self._number: dict[int, int] = {}
        self.num = 0
        self.has_loop = False
        by_caller: dict[tuple, dict[_Operation, list[int]]] = defaultdict(lambda: defaultdict(list))
        original: dict[str, int] = {}
        again: list[tuple[int, int]] = []  # steps that XLA itself runs again, with those that they repeat
        for n, step in enumerate(profile.steps):
            first = original.setdefault(AGAIN.split(step.name)[0], n)
            if first != n and AGAIN.search(step.name):
                again.append((n, first))
            elif step.is_recomputed or step.phase == "forward":
                # The outermost frame of it: the stack of a loop's operations repeats the functions around the loop.
                depth = max((d for d, f in enumerate(step.frames, 1) if f.function == function), default=0)
                if depth:
                    inside, caller = step.frames[:depth], step.frames[depth:]
                    by_caller[step.is_recomputed, caller][_Operation(step.primitive, inside)].append(n)
        for occurrences in by_caller.values():
            self._tell_apart(occurrences)
        self._number |= {n: self._number[first] for n, first in again if first in self._number}
        forward = {self._number[n] for n in self._number if not profile.steps[n].is_recomputed}
        self.num = len(forward or set(self._number.values()))
        products = [
            found
            for occurrences in by_caller.values()
            for operation, found in occurrences.items()
            if operation.primitive in PRODUCTS and not operation.is_own
        ]
        # Of one call only, as of a loss with a product behind its layers. Three may be the query, the key and the value of one layer.
        self.has_loop = self.has_loop or (self.num == 1 and max(map(len, products), default=0) > 3)

    def _tell_apart(self, occurrences: dict[_Operation, list[int]]) -> None:
        products = [found for operation, found in occurrences.items() if operation.primitive in PRODUCTS]
        anchors = products or list(occurrences.values())
        counts = [len(found) for found in anchors]
        # Of numbers of calls that explain the same number of counts, the larger one: the last call may leave out an operation.
        num = max(counts, key=lambda n: (sum(c % n == 0 for c in counts), n))
        regular = [found for found in anchors if len(found) % num == 0]
        begins = [min(found[m * len(found) // num] for found in regular) for m in range(num)]
        if _runs_once(occurrences, begins):
            self.has_loop = self.has_loop or num > 1
            num, begins = 1, begins[:1]
        for found in occurrences.values():
            for m, n in enumerate(found):
                is_regular = len(found) % num == 0
                number = m * num // len(found) if is_regular else _call_at(begins, n)
                self._number[n] = self.num + number
        self.num += num

    def of(self, step: int) -> int | None:
        """The number of the call that runs a step; None if none does."""
        return self._number.get(step)


def _call_at(begins: Sequence[int], step: int) -> int:
    """The number of the call that runs at a step, by the first step of each."""
    return max(bisect.bisect(begins, step) - 1, 0)


def _runs_once(occurrences: Mapping[_Operation, Sequence[int]], begins: Sequence[int]) -> bool:
    """Whether a loop inside the function explains the repetitions that begin at these steps, and not several calls of it.

    A function that is called several times repeats its own operations, or several functions that it calls. XLA fuses some of these, so
    that it is enough if more than half of the repetitions have them. A sum in less than half of them stands before or behind a loop,
    as the mean of a loss does.
    """

    def share(steps: Iterable[int]) -> float:
        return len({_call_at(begins, n) for n in steps}) / len(begins)

    own = {operation: share(steps) for operation, steps in occurrences.items() if operation.is_own}
    if any(operation.primitive.startswith("reduce_") and of_calls < 0.5 for operation, of_calls in own.items()):
        return True
    callees: dict[tuple[StackFrame, str], list[int]] = defaultdict(list)
    for operation, steps in occurrences.items():
        if not operation.is_own:
            callees[operation.callee] += steps
    is_own_repeated = any(of_calls > 0.5 for of_calls in own.values())
    return not is_own_repeated and sum(share(steps) > 0.5 for steps in callees.values()) < 2
