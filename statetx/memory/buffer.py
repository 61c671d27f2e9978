"""Data of a memory profile: buffers with their lifetimes, and the steps of the compiled program."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

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
        start, end: the first and the last step in which it is alive; indices into ``MemoryProfile.steps``.
        kind: "argument" and "state" enter the program and "output" leaves it. A "residual" is written in the forward
            pass and read in the backward pass. What a rematerialized region computes again is "recomputed". A
            "constant" is part of the program. All else is "working memory".
        phase: of the step that writes it: "forward", "backward", or "update" after both (and in a program without
            gradient "forward").
        owner: the path of the state or the argument; else the module, a path such as ``net.blocks.0``, if the
            states or arguments that it is computed with belong to one; else the scope or the function.
        function: the innermost function of the user that computes it, as in ``Block.__call__``.
        source: the line of it, ``file:line``; empty if unknown.
        primitive: the operation that computes it, as in ``dot_general``; "carry" of a loop's carry.
        region: the rematerialized function that it belongs to; empty outside of them.
        loop: the innermost loop that it lies in, or None.
        stacked: the loop that stacks it, one slice a step; or None.
        allocation, offset: its place: two buffers may share a place one after the other.
        readers: the steps that read it.
        stored_as: the format of what is stored in fewer bits (`Policy.stored_as`); empty for any other array.
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
        """The type, and the format of what is stored in fewer bits: ``u8[32,8] (bits)``."""
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
        calls: the calls of the user's functions that run it, outermost first: the function and a number, as in
            ``Block.__call__~7``. Empty for a program that was traced before it was profiled.
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
        action: "remat", "policy", "donate", "slots", "store", "bits", "microbatch" or "argument".
        target: the owner of what it saves.
        text: what to do, in one sentence.
        saved_bytes: by how much the peak would fall, predicted from the lifetimes of the buffers.
        condition: what must hold of the program, part of `text`: else the change gives other results. Empty for a
            change that keeps them.
        is_least: whether it may save more: the compiled program does not tell the size of a carry.
    """

    action: str
    target: str
    text: str
    saved_bytes: int
    condition: str = ""
    is_least: bool = False


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


def replacements(buffers: Iterable[Buffer]) -> list[tuple[Buffer, Buffer, int]]:
    """Pairs of buffers where the second is written over the first, in the last step of the first, and the bytes that
    both have then.
    """
    ending: dict[tuple[int, int], list[Buffer]] = defaultdict(list)
    buffers = list(buffers)
    for b in buffers:
        ending[b.allocation, b.end].append(b)
    found = []
    for b in buffers:
        for a in ending.get((b.allocation, b.start), ()):
            shared = min(a.offset + a.num_bytes, b.offset + b.num_bytes) - max(a.offset, b.offset)
            if a is not b and a.start < b.start and shared > 0:
                found.append((a, b, shared))
    return found
