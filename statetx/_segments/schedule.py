"""The fewest runs of a loop's segments for carries in two tiers, memory, then disk: H-Revolve.

A loop of n segments is reversed from carries that are stored, the first one included, in s slots in memory, which cost
nothing, and in d files, each with a cost to write and to read. Costs are in runs of a segment. The pull-back of a
segment runs it once more in any case and is not counted.

- ``memory[n]``: the cost from a carry in a slot, where all slots are free: Griewank and Walther 2000, in closed form.
- ``on_disk[d][n]``: from a carry at hand that is on disk, too, and has one of d files. Either slots do the rest; or the
  loop is advanced by j, the right part is reversed, and the carry is read for the left part:
  ``min(memory[n], min_j j + at_hand[d - 1][n - j] + read + on_disk[d][j])``.
- ``at_hand[d][n]``: from a carry at hand, with d files free: ``min(memory[n], write + on_disk[d][n])``.

Source: Herrmann and Pallez 2020, "H-Revolve", ACM TOMS 46(2). Their model runs and writes one after the other. Where a
thread writes beside the computation a write costs less: the schedule errs on the side of fewer files.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np

from .._loops.schedule import beta, num_evaluations, repetitions

MEMORY, DISK = "memory", "disk"
AT_HAND = "at hand"  # the carry that the last segment starts from: its pull-back comes next, and takes no slot for it


class Load(NamedTuple):
    """Take the stored carry at `position`, or remove it from `stored` if it cannot be read."""

    position: int


class Advance(NamedTuple):
    """Run the segments from `start` to `end`."""

    start: int
    end: int


class Keep(NamedTuple):
    """Store the carry at hand in `tier`."""

    position: int
    tier: str


class Reverse(NamedTuple):
    """Pull the cotangents back through the segment at `position`, from the carry at hand."""

    position: int


class Drop(NamedTuple):
    """Forget the stored carry at `position`."""

    position: int


Action = Load | Advance | Keep | Reverse | Drop


class Moment(NamedTuple):
    """An action that runs a program, with the numbers of carries in each tier.

    Attributes:
        device: the loop's argument, the stored ones, the one at hand, and the next one.
        cotangents: that segments pass on.
        output_cotangents: of the loop's outputs, which the caller holds.
    """

    action: Advance | Reverse
    device: int
    host: int
    disk: int
    cotangents: int
    output_cotangents: int


def runs_of(moments: Iterable[Moment], length: int, segment: int, of_pull: Callable[[int], float]) -> float:
    """Runs of the step of a loop of `length` steps; `of_pull` says how many a pull-back takes."""
    num = lambda n: min(segment, length - n * segment)
    actions = [moment.action for moment in moments]
    num_advanced = sum(num(n) for a in actions if isinstance(a, Advance) for n in range(a.start, a.end))
    return num_advanced + sum(of_pull(num(a.position)) for a in actions if isinstance(a, Reverse))


def jump_in_memory(length: int, slots: int) -> int:
    """How far to advance from a carry in a slot before the next one is stored."""
    r = repetitions(length, slots)
    most = beta(slots, r - 1)  # of the left part, which then takes r - 1 repetitions
    least = beta(slots - 1, r - 1)  # of the right part
    return min(most, length - min(least, length - 1))


@dataclasses.dataclass(eq=False)
class TierSchedule:
    """The schedule of a loop of `length` segments.

    Args:
        slots: carries in memory, at least one. A loop whose slots do without files starts in one of them.
        files: carries on disk; None for as many as are worth it.
        write, read: costs.
    """

    length: int
    slots: int
    files: int | None
    write: float
    read: float

    def __post_init__(self) -> None:
        self.slots = min(self.slots, self.length)
        self._most = self.length if self.files is None else self.files
        files, self.files = self.files, None
        self._plan(1)
        if files is not None and self._most_files() > files:  # a row for each takes as much longer
            self.files = files
            self._plan(files + 1)

    def _plan(self, num_rows: int) -> None:
        # The last segment is not advanced again: its pull-back does that.
        fewest = (num_evaluations(n - 1, self.slots) - n + 1 for n in range(1, self.length + 1))
        self._memory = np.array([0, *fewest], np.float64)
        self._at_hand, self._on_disk = (np.tile(self._memory, (num_rows, 1)) for _ in range(2))
        self._jumps = np.zeros((num_rows, self.length + 1), np.int32)
        # The right part has a file less, unless there are always enough: then one row serves all.
        rows, right_rows = (slice(0, 1), slice(0, 1)) if self.files is None else (slice(1, None), slice(0, -1))
        for n in range(2, self.length + 1):
            right_costs, left_costs = self._at_hand[right_rows, n - 1 : 0 : -1], self._on_disk[rows, 1:n]
            costs = np.arange(1, n) + right_costs + self.read + left_costs
            jumps = costs.argmin(axis=1) + 1 if costs.size else np.zeros(0, np.int32)
            least = np.minimum(self._memory[n], costs.min(axis=1, initial=np.inf))
            self._jumps[rows, n] = np.where(least < self._memory[n], jumps, 0)
            self._on_disk[rows, n] = least
            self._at_hand[rows, n] = np.minimum(self._memory[n], self.write + least)

    def _most_files(self) -> int:
        """How many files are there at a time, if there are always enough."""
        most = [0] * (self.length + 1)  # beside the one of the carry at hand
        is_file = self.write + self._on_disk[0] < self._memory
        for n, jump in enumerate(self._jumps[0].tolist()):
            if jump:
                most[n] = max(most[jump], is_file[n - jump] + most[n - jump])
        return int(is_file[-1] + most[-1])

    @property
    def cost(self) -> float:
        """Runs of segments, with reads and writes, to reverse the loop; pull-backs and the last run do not count."""
        return float(self._at_hand[-1, self.length])

    def _row(self, stored: dict[int, str]) -> int:
        """The row for the files that are free."""
        return 0 if self.files is None else max(0, self.files - list(stored.values()).count(DISK))

    def replay(self, host: int) -> Iterator[Moment]:
        """A whole gradient, whose first `host` carries in memory are in the host's."""
        stored: dict[int, str] = {}
        is_reversed = 0
        for action in itertools.chain(self.sweep(0, stored), self.reversal(self.length, stored)):
            of = lambda *tiers: [p for p, tier in stored.items() if p and tier in tiers]
            on_device = {0, *of(MEMORY)[host:], *of(AT_HAND)}
            elsewhere = min(host, len(of(MEMORY))), len(of(DISK))
            match action:
                case Advance(start, end):
                    num_new = 1 + (end - start > 1 or start not in on_device)
                    yield Moment(action, len(on_device) + num_new, *elsewhere, is_reversed, is_reversed)
                case Reverse(position):
                    num_new = position not in on_device
                    yield Moment(action, len(on_device) + num_new, *elsewhere, 2, is_reversed)
                    is_reversed = 1

    # -- actions; `stored` maps positions to tiers, and has 0, the arguments of the loop, at all times --

    def sweep(self, start: int, stored: dict[int, str]) -> Iterator[Action]:
        """Run the loop forward from a position whose carry is at hand, to its end."""
        yield from self._descend(start, self.length, stored)
        if stored.setdefault(self.length - 1, AT_HAND) == AT_HAND:
            yield Keep(self.length - 1, AT_HAND)
        yield Advance(self.length - 1, self.length)

    def reversal(self, end: int, stored: dict[int, str]) -> Iterator[Action]:
        """Reverse the segments before `end`, the last one first."""
        while end > 0:
            start = max(position for position in stored if position < end)
            yield Load(start)
            if start not in stored:
                continue
            yield from self._descend(start, end, stored)
            yield Reverse(end - 1)
            end -= 1
            for position in [p for p in stored if p >= end > 0]:
                del stored[position]
                yield Drop(position)

    def _descend(self, position: int, end: int, stored: dict[int, str]) -> Iterator[Action]:
        """Advance from a carry at hand to the last segment before `end`, and store carries on the way."""
        while (num := end - position) > 1:
            tier, row = stored.get(position), self._row(stored)
            jump = 0
            if tier == DISK:
                jump = int(self._jumps[min(row + 1, len(self._jumps) - 1), num])
            elif tier == MEMORY:
                jump = jump_in_memory(num, self.slots - list(stored.values()).count(MEMORY) + 1)
            if not jump:  # it is not stored, or slots do the rest
                # A loop that was killed again and again has more files than the schedule has chosen.
                has_room = list(stored.values()).count(DISK) < self._most
                is_file = tier is None and has_room and self.write + self._on_disk[row, num] < self._memory[num]
                stored[position] = DISK if is_file else MEMORY
                yield Keep(position, stored[position])
                continue
            yield Advance(position, position + jump)
            position += jump
            if tier == MEMORY and end - position > 1:
                stored[position] = MEMORY
                yield Keep(position, MEMORY)
