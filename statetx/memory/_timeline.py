"""The timeline of a compiled program: its buffers, the steps at which they are alive, and the totals of XLA."""

from __future__ import annotations

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Iterable, Iterator

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
        """What the program reserves: arguments, outputs without those that reuse arguments, and temporaries."""
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
        for step, num_bytes in self._shared():
            alive[step] -= num_bytes
        return alive

    def _counted(self) -> list[Buffer]:
        return [b for b in self.buffers if b.kind != "constant"]

    def _shared(self) -> Iterator[tuple[int, int]]:
        """Steps in which a buffer replaces another in place, and the bytes that both have then."""
        for a, b in replacements(self._counted()):
            yield b.start, min(a.offset + a.num_bytes, b.offset + b.num_bytes) - max(a.offset, b.offset)

    @functools.cached_property
    def peak_step(self) -> int:
        """The first step at which most bytes are alive: an index into `steps`."""
        return int(np.argmax(self.timeline)) if len(self.steps) else 0

    @property
    def unused_bytes(self) -> int:
        """What the program reserves and does not use at the peak: gaps between buffers, and outputs not yet written."""
        return self.peak_bytes - int(self.timeline.max(initial=0))

    def alive(self, step: int) -> list[Buffer]:
        """The buffers alive at a step, without constants, the largest first.

        If one replaces another in place in this step, the new one is listed: sizes sum to ``timeline[step]`` unless
        only part of the memory is reused, where the old one is listed with what is left of it.
        """
        counted = self._counted()
        found = {id(b): b for b in counted if b.start <= step <= b.end}
        for a, b in replacements(counted):
            if b.start == step and id(a) in found:
                both = min(a.offset + a.num_bytes, b.offset + b.num_bytes) - max(a.offset, b.offset)
                rest = found[id(a)].num_bytes - both
                found[id(a)] = dataclasses.replace(a, num_bytes=rest)
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
