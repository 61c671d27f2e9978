"""A program cut into parts, with an option for each of them: what they take together."""

from __future__ import annotations

import enum
import itertools
from collections.abc import Sequence
from typing import NamedTuple

from ..._jax import Jaxpr
from ..._lift.context import device_bytes
from ..._tree import is_float
from .._program.flat import Flat, Part
from .._treatments.rewrite import rewrite
from .._treatments.treatment import Option
from .front import Front


class Region(NamedTuple):
    """An interval of equations that may be a part.

    Attributes:
        out_bytes: its outputs that later equations read.
        cotangent_bytes: live during its backward pass besides those of its outputs: the cotangents of values that it or
            equations before it read, and equations after it too.
    """

    start: int
    end: int
    part: Part
    front: Front
    out_bytes: int
    cotangent_bytes: int = 0


class Waits(enum.Enum):
    """What a gradient waits for before it begins."""

    FOR_NOTHING = "nothing"
    FOR_INPUTS = "inputs"  # until all that it reads is computed
    FOR_GRADIENTS = "gradients"  # until the gradient before it is computed, too


class Layout:
    """One way to cut a program.

    Attributes:
        cuts: the first equation of each part.
        parts, fronts: the parts, and the options of each.
        base: for each part, the bytes live during its backward pass under any choice: the values that parts before it
            computed for parts after them, and `Region.cotangent_bytes`. A value that only later parts read is live as
            its cotangent.
    """

    def __init__(self, program: Flat, regions: Sequence[Region]):
        self.program = program
        self.regions = list(regions)
        self.cuts = tuple(r.start for r in regions)
        self.parts = [r.part for r in regions]
        self.fronts = [r.front for r in regions]
        outputs = itertools.accumulate([0, *(r.out_bytes for r in regions[:-1])] if regions else [])
        self.base = [o + r.cotangent_bytes for o, r in zip(outputs, regions, strict=True)]

    @property
    def jaxpr(self) -> Jaxpr:
        return self.program.jaxpr

    def in_use(self, options: Sequence[Option]) -> list[int]:
        """The bytes in use during the backward pass of each part."""
        saved = itertools.accumulate(option.saved_bytes for option in options)
        return [b + s + o.backward_bytes for b, s, o in zip(self.base, saved, options, strict=True)]

    def peak(self, options: Sequence[Option]) -> int:
        """The most bytes in use during the backward pass of any part."""
        return max(self.in_use(options), default=0)

    def peak_part(self, options: Sequence[Option]) -> tuple[int, int]:
        """Return the index of the part whose backward pass has the peak, and the bytes saved by the parts before it."""
        in_use = self.in_use(options)
        part = in_use.index(max(in_use))
        return part, sum(option.saved_bytes for option in options[:part])

    def rewrite(self, options: Sequence[Option], waits: Waits = Waits.FOR_NOTHING) -> Jaxpr:
        """Apply an option to each part."""
        last_input = None if waits is Waits.FOR_NOTHING else self.first_read()
        is_sequential = waits is Waits.FOR_GRADIENTS
        decisions = [option.decision for option in options]
        return rewrite(self.jaxpr, self.parts, decisions, last_input=last_input, is_sequential=is_sequential)

    def first_read(self) -> int | None:
        """The smallest input, by number, of the first part with a backward pass; None if it has none."""
        first = next((r.part for r in self.regions if not r.front.is_free), None)
        reads = [] if first is None else first.invars
        numbers = [i for i, v in enumerate(self.jaxpr.invars) if v in reads and is_float(v.aval)]
        return min(numbers, key=lambda i: device_bytes(self.jaxpr.invars[i].aval), default=None)
