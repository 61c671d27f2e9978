"""Data of a memory profile: buffers with their lifetimes, the steps of the compiled program, their timeline."""

from __future__ import annotations

import dataclasses
import math
import re
from collections import defaultdict
from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

import numpy as np

from .._cached import cached_property
from .._equations.dataflow import alive_bytes
from .._jax import StackFrame
from .._text import short_path

Kind = Literal["argument", "state", "output", "residual", "recomputed", "working memory", "constant"]
KINDS: tuple[Kind, ...] = ("state", "argument", "output", "residual", "recomputed", "working memory", "constant")
Phase = Literal["forward", "backward", "update"]


class Loop(NamedTuple):
    """A loop of the compiled program.

    Attributes:
        name: ``"scan"`` or ``"while_loop"``.
        length: how often the body runs; None if the program decides it.
        source: ``file:line`` of the user's call, or an empty string.
        library: the installed library that has the loop, if the user's line calls one, such as a recurrent layer; else
            empty.
    """

    name: str
    length: int | None
    source: str
    library: str = ""

    def __str__(self) -> str:
        steps = "" if self.length is None else f" of {self.length:,} steps"
        return f"{self.name}{steps}" + (f" at {short_path(self.source)}" if self.source else "")


@dataclasses.dataclass(frozen=True)
class Buffer:
    """A piece of memory of a compiled program, from the step that writes it to the last that reads it.

    Attributes:
        name: the instruction of the compiled program that writes it.
        num_bytes: its size.
        type: as in ``f32[32,64]``.
        start, end: its first and last live step; indices into ``MemoryProfile.steps``.
        kind: "argument" and "state" enter the program and "output" leaves it. A "residual" is written in the forward
            pass and read in the backward pass. A value that a rematerialized region computes again is "recomputed".
            A "constant" is part of the program. All else is "working memory".
        phase: of the step that writes it: "forward", "backward", or "update" after both (and in a program without
            gradient "forward").
        owner: the path of the state or the argument; else the module, a path such as ``net.blocks.0``, if the
            states or arguments that it is computed with belong to one; else the scope or the function.
        function: the innermost function of the user that computes it, as in ``Block.__call__``.
        source: the line of it, ``file:line``; empty if unknown.
        primitive: the operation that computes it, as in ``dot_general``; "carry" of a loop's carry.
        region: the rematerialized function that it belongs to; empty outside of them.
        loop: the innermost loop around it, or None.
        stacked: the loop that stacks it, one slice a step; or None.
        allocation, offset: its place: two buffers may share a place one after the other.
        readers: the steps that read it.
        stored_as: the format of an array stored in fewer bits (`Policy.stored_as`); empty for any other.
        is_bits: whether it is boolean, or made of booleans: its entries are 0 or 1.
    """

    name: str
    num_bytes: int
    type: str
    start: int
    end: int
    kind: Kind
    phase: Phase
    owner: str
    function: str = ""
    source: str = ""
    primitive: str = ""
    region: str = ""
    loop: Loop | None = None
    stacked: Loop | None = None
    allocation: int = 0
    offset: int = 0
    readers: tuple[int, ...] = ()
    stored_as: str = ""
    is_bits: bool = False

    @property
    def shown_type(self) -> str:
        """The type, and the format if it is stored in fewer bits: ``u8[32,8] (bits)``."""
        return f"{self.type} ({self.stored_as})" if self.stored_as else self.type

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {
            "loop": str(self.loop) if self.loop else None,
            "stacked": str(self.stacked) if self.stacked else None,
        }


class Step(NamedTuple):
    """An instruction of the compiled program, in the order of its schedule; the body of a loop once, inside the loop.

    Attributes:
        name: of the instruction.
        primitive: the operation of the user's program, as in ``dot_general``; empty if unknown.
        phase: "forward", "backward" or "update".
        source: ``file:line``.
        loop: the innermost loop.
        owner: the module, a path; empty if unknown.
        frames: the user's functions that run it with their lines, innermost first.
        is_recomputed: whether a rematerialized region computes it again.
        calls: the calls of the user's functions that run it, outermost first: the function, the line at which it is
            defined, and a number, as in ``Block.__call__~12~7``; ``~7`` for one that is jitted, rematerialized, or a
            loop. Empty for a program that was compiled before it was profiled.
    """

    name: str
    primitive: str
    phase: Phase
    source: str
    loop: Loop | None
    owner: str = ""
    frames: tuple[StackFrame, ...] = ()
    is_recomputed: bool = False
    calls: tuple[str, ...] = ()

    @property
    def stack(self) -> tuple[str, ...]:
        """The user's functions that run it, innermost first."""
        return tuple(dict.fromkeys(f.function for f in self.frames))


class Change(NamedTuple):
    """A change of the program that would save memory.

    Attributes:
        action: "remat", "policy", "donate", "slots", "store", "bits", "microbatch", "argument", "release" or
            "order".
        owner: of the saved bytes.
        text: what to do, in one sentence.
        saved_bytes: by how much the peak falls, as compiled; 0 if the changed program was not compiled.
        condition: a condition on the program, part of `text`: if it fails, the change gives other results. Empty for a
            change that keeps them.
        is_compiled: whether the changed program was compiled.
    """

    action: str
    owner: str
    text: str
    saved_bytes: int = 0
    condition: str = ""
    is_compiled: bool = False


class Group(NamedTuple):
    """Buffers of one owner, line and kind that are alive at the peak.

    Attributes:
        num_bytes: the bytes that they take together. A place that two of them share counts once.
        change: the cheapest change that saves them, or None.
    """

    num_bytes: int
    kind: Kind
    owner: str
    function: str
    source: str
    region: str
    types: tuple[str, ...]
    buffers: tuple[Buffer, ...]
    change: Change | None


def shape_of(type_: str) -> tuple[int, ...]:
    """The shape of an array, by its type as in ``f32[2,3]``; empty for other types."""
    sizes = type_.partition("[")[2].rstrip("]").split(",")
    return tuple(map(int, sizes)) if all(size.isdigit() for size in sizes) else ()


def bits_of(type_: str) -> int:
    """The bits of an entry, by the type of the array."""
    digits = re.search(r"\d+", type_.partition("[")[0])
    return int(digits[0]) if digits else 8


def bytes_of(type_: str) -> int:
    """The size of an array, by its type."""
    return -(-math.prod(shape_of(type_)) * bits_of(type_) // 8)


# -- the timeline ------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, repr=False)
class Timeline:
    """The memory of a compiled program as data, in bytes of one device; `MemoryProfile` has the attributes."""

    name: str
    buffers: tuple[Buffer, ...]
    steps: tuple[Step, ...]
    argument_bytes: int
    output_bytes: int
    alias_bytes: int = 0
    temp_bytes: int = 0
    constant_bytes: int = 0
    num_devices: int = 1
    backend: str = ""
    backward_step: int = 0
    gradient: bool = False
    note: str = ""
    reordered: Change | None = None
    releasable: Change | None = None
    releasable_bytes: int = 0
    gradients: tuple[str, ...] = ()

    @property
    def peak_bytes(self) -> int:
        """Bytes that the program reserves: arguments, outputs without those that reuse arguments, and temporaries."""
        return self.argument_bytes + self.output_bytes - self.alias_bytes + self.temp_bytes

    @cached_property
    def timeline(self) -> np.ndarray:
        """Bytes alive at each step, without constants: ``int64[len(steps)]``. Memory that two buffers share counts
        once.
        """
        alive = alive_bytes(len(self.steps), ((b.start, b.end, b.num_bytes) for b in self._counted()))
        for _, b, shared in self.replacements:
            alive[b.start] -= shared
        return alive

    def _counted(self) -> list[Buffer]:
        return [b for b in self.buffers if b.kind != "constant"]

    @cached_property
    def replacements(self) -> list[tuple[Buffer, Buffer, int]]:
        """Pairs of buffers where the second is written over the first, in the last step of the first, and the bytes
        that both have then; without constants.
        """
        buffers, ending = self._counted(), defaultdict[tuple[int, int], list[Buffer]](list)
        for b in buffers:
            ending[b.allocation, b.end].append(b)
        pairs = []
        for b in buffers:
            for a in ending.get((b.allocation, b.start), ()):
                shared = min(a.offset + a.num_bytes, b.offset + b.num_bytes) - max(a.offset, b.offset)
                if a is not b and a.start < b.start and shared > 0:
                    pairs.append((a, b, shared))
        return pairs

    @cached_property
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
        only part of the memory is reused: then the old one is listed with the rest.
        """
        live = {id(b): b for b in self._counted() if b.start <= step <= b.end}
        for a, b, shared in self.replacements:
            if b.start == step and id(a) in live:
                live[id(a)] = dataclasses.replace(a, num_bytes=live[id(a)].num_bytes - shared)
        return sorted((b for b in live.values() if b.num_bytes > 0), key=lambda b: (-b.num_bytes, b.start, b.name))


def grouped(buffers: Iterable[Buffer]) -> list[Group]:
    """Group buffers by kind, owner, function, line, region, and the loop that stacks them; the largest group first."""
    members: dict[tuple, list[Buffer]] = defaultdict(list)
    for b in buffers:
        members[b.kind, b.owner, b.function, b.source, b.region, b.stacked].append(b)
    types_of = lambda group: tuple(dict.fromkeys(b.type for b in group))
    groups = [
        Group(
            sum(b.num_bytes for b in group), kind, owner, function, source, region, types_of(group), tuple(group), None
        )
        for (kind, owner, function, source, region, _), group in members.items()
    ]
    return sorted(groups, key=lambda g: (-g.num_bytes, KINDS.index(g.kind), g.owner, g.source))


# -- changes of a timeline


class Gap(NamedTuple):
    """Bytes that the changed program does not hold from one step to another."""

    start: int
    end: int
    num_bytes: int


def freed_bytes(profile: Timeline, gaps: Iterable[Gap]) -> int:
    """Bytes that these gaps take off the peak of the timeline."""
    new_timeline = profile.timeline - alive_bytes(len(profile.steps), gaps)
    return int(profile.timeline.max() - new_timeline.max())


def is_backward(profile: Timeline, n: int, b: Buffer) -> bool:
    """Whether a reader of a buffer is in the backward pass. A recomputation counts only if it reads a residual.

    XLA moves some steps of the backward pass into the forward pass: these do not count.
    """
    step = profile.steps[n]
    is_later = b.kind == "residual" or not step.is_recomputed
    return n >= profile.backward_step and step.phase == "backward" and is_later
