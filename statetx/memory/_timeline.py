"""The timeline of a compiled program: its buffers, the steps at which they are alive, and the totals of XLA."""

from __future__ import annotations

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from .buffer import KINDS, Buffer, Group, Step, replacements


@dataclasses.dataclass(frozen=True, repr=False)
class Timeline:
    """The memory of a compiled program as data, in bytes of one device; `MemoryProfile` has the attributes."""

    name: str
    buffers: tuple[Buffer, ...]
    steps: tuple[Step, ...]
    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int
    constant_bytes: int
    num_devices: int
    backend: str
    backward_step: int = 0
    gradient: bool = False
    note: str = ""

    @property
    def peak_bytes(self) -> int:
        """Bytes that the program reserves: arguments, outputs without those that reuse arguments, and temporaries."""
        return self.argument_bytes + self.output_bytes - self.alias_bytes + self.temp_bytes

    @functools.cached_property
    def timeline(self) -> np.ndarray:
        """Bytes alive at each step, without constants: ``int64[len(steps)]``. Memory that two buffers share counts
        once.
        """
        change = np.zeros(len(self.steps) + 1, np.int64)
        for b in self._counted():
            change[b.start] += b.num_bytes
            change[b.end + 1] -= b.num_bytes
        alive = np.cumsum(change)[:-1]
        for _, b, shared in self._replacements:
            alive[b.start] -= shared
        return alive

    def _counted(self) -> list[Buffer]:
        return [b for b in self.buffers if b.kind != "constant"]

    @functools.cached_property
    def _replacements(self) -> list[tuple[Buffer, Buffer, int]]:
        return replacements(self._counted())

    @functools.cached_property
    def peak_step(self) -> int:
        """The first step at which most bytes are alive: an index into `steps`."""
        return int(np.argmax(self.timeline)) if len(self.steps) else 0

    @property
    def unused_bytes(self) -> int:
        """Bytes that the program reserves and does not use at the peak: gaps between buffers, and outputs not yet
        written.
        """
        return self.peak_bytes - int(self.timeline.max(initial=0))

    def alive(self, step: int) -> list[Buffer]:
        """The buffers alive at a step, without constants, the largest first.

        If one replaces another in place in this step, the new one is listed: sizes sum to ``timeline[step]`` unless
        only part of the memory is reused, where the old one is listed with what is left of it.
        """
        found = {id(b): b for b in self._counted() if b.start <= step <= b.end}
        for a, b, shared in self._replacements:
            if b.start == step and id(a) in found:
                found[id(a)] = dataclasses.replace(a, num_bytes=found[id(a)].num_bytes - shared)
        return sorted((b for b in found.values() if b.num_bytes > 0), key=lambda b: (-b.num_bytes, b.start, b.name))


def grouped(buffers: Iterable[Buffer]) -> list[Group]:
    """Group buffers by kind, owner, function, line, region, and the loop that stacks them; the largest group first."""
    members: dict[tuple, list[Buffer]] = defaultdict(list)
    for b in buffers:
        members[b.kind, b.owner, b.function, b.source, b.region, b.stacked].append(b)
    groups = [
        Group(
            num_bytes=sum(b.num_bytes for b in found),
            kind=key[0],
            owner=key[1],
            function=key[2],
            source=key[3],
            region=key[4],
            types=tuple(dict.fromkeys(b.type for b in found)),
            buffers=tuple(found),
            change=None,
        )
        for key, found in members.items()
    ]
    return sorted(groups, key=lambda g: (-g.num_bytes, KINDS.index(g.kind), g.owner, g.source))


# -- changes of a timeline


class Gap(NamedTuple):
    """Bytes that the changed program does not hold from one step to another; negative if it holds more."""

    start: int
    end: int
    num_bytes: int


def saving(profile: Timeline, gaps: Iterable[Gap]) -> int:
    """Bytes by which the peak of the timeline falls with these gaps."""
    change = np.zeros(len(profile.steps) + 1, np.int64)
    for gap in gaps:
        if gap.start <= gap.end:
            change[gap.start] -= gap.num_bytes
            change[gap.end + 1] += gap.num_bytes
    after = profile.timeline + np.cumsum(change)[:-1]
    return int(profile.timeline.max() - after.max())


def is_backward(profile: Timeline, n: int, b: Buffer) -> bool:
    """Whether a reader of a buffer is in the backward pass. What a recomputation reads is needed there only if it is a
    residual.

    XLA moves some steps of the backward pass into the forward pass: these do not count.
    """
    step = profile.steps[n]
    is_later = b.kind == "residual" or not step.is_recomputed
    return n >= profile.backward_step and step.phase == "backward" and is_later
