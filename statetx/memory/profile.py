"""`memory_profile`: what is alive in a compiled program at each of its steps, and who made it."""

from __future__ import annotations

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import _files
from .._errors import printable
from .._tables import Line, Printed, Table, Tabular
from .._typing import public
from .buffer import KINDS, Buffer, Change, Group, Step, replacements

if TYPE_CHECKING:
    from os import PathLike


@public
@dataclasses.dataclass(frozen=True)
class MemoryProfile(Printed):
    """The memory of a compiled program, buffer by buffer; made by `memory_profile`.

    Sizes are in bytes, and of one device. Print it, or show it in a notebook.

    Attributes:
        name: of the function.
        buffers: all buffers, in the order of their first step; those of zero bytes are left out.
        steps: the schedule of the compiled program.
        argument_bytes, output_bytes, alias_bytes, temp_bytes: XLA's own figures. Outputs that reuse the memory of an argument
            (donation) count in the first three.
        constant_bytes: of the constants in the program, which XLA's figures leave out.
        num_devices: that the program runs on.
        backend: "cpu", "gpu" or "tpu".
        backward_step: the first step of the backward pass, of several gradients that of the largest; the number of steps if there is none.
        gradient: whether the program has the gradient of a loss among its outputs, and not a step that updates its arguments.
        note: what the profile lacks on this backend; empty if nothing.
    """

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
        """Bytes alive at each step, without constants: ``int64[len(steps)]``. Memory that two buffers share counts once."""
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

        If one replaces another in place in this step, the new one is listed: sizes sum to ``timeline[step]`` unless only
        part of the memory is reused, where the old one is listed with what is left of it.
        """
        counted = self._counted()
        found = {id(b): b for b in counted if b.start <= step <= b.end}
        for a, b in replacements(counted):
            if b.start == step and id(a) in found:
                both = min(a.offset + a.num_bytes, b.offset + b.num_bytes) - max(a.offset, b.offset)
                rest = found[id(a)].num_bytes - both
                found[id(a)] = dataclasses.replace(a, num_bytes=rest)
        return sorted((b for b in found.values() if b.num_bytes > 0), key=lambda b: (-b.num_bytes, b.start, b.name))

    @functools.cached_property
    def at_peak(self) -> tuple[Group, ...]:
        """Buffers alive at the peak, grouped by kind, owner and line, the largest group first."""
        from ._advice import changes_of

        groups = group(self.alive(self.peak_step))
        changes = changes_of(self, groups)
        return tuple(g._replace(change=changes.get(n)) for n, g in enumerate(groups))

    @functools.cached_property
    def changes(self) -> tuple[Change, ...]:
        """What would lower the peak, the largest saving first."""
        from ._advice import all_changes

        return all_changes(self)

    def _lines(self, width: int, prose: int) -> Iterator[Line]:
        from ._show import lines

        return lines(self, width, prose)

    def _html(self) -> str:
        from ._show import html

        return html(self)

    def __repr__(self) -> str:
        return f"<MemoryProfile of {printable(self.name)}: {len(self.buffers)} buffers, {self.peak_bytes} bytes at the peak>"

    def compare(self, after: MemoryProfile) -> Comparison:
        """This profile beside another: the peak, its parts, and the owners with their difference. It prints.

        Args:
            after: the profile of the changed program.
        """
        return Comparison(self, after)

    def to_dict(self) -> dict[str, Any]:
        """Everything as lists, dicts, numbers and text, for ``json.dump``."""
        from ._show import to_dict

        return to_dict(self)

    def to_html(self, path: str | PathLike[str], *, after: MemoryProfile | None = None) -> None:
        """Write a page with a timeline to zoom, and a list of the buffers to filter. It needs no other file and no network.

        Args:
            path: the file to write.
            after: a second profile, shown below the first.
        """
        from ._page import to_html

        _files.write(path, to_html(self, after))


@dataclasses.dataclass(frozen=True, repr=False)
class Comparison(Tabular):
    """Two profiles beside each other; made by `MemoryProfile.compare`."""

    before: MemoryProfile
    after: MemoryProfile

    def _table(self) -> Table:
        from ._show import compare

        return compare(self.before, self.after)


def group(buffers: Iterable[Buffer]) -> list[Group]:
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
