"""A program cut into parts, with an option for each of them: what they take together."""

from __future__ import annotations

import dataclasses
import enum
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..._cached import cached_property
from ..._jax import Jaxpr
from ..._lift.context import device_bytes
from ..._tree import is_float
from .._program.flat import Flat, Part
from .._treatments import rewrite
from .._treatments.front import Front
from .._treatments.treatment import Option


class OptionTable(NamedTuple):
    """The options of a region.

    Attributes:
        bytes: added for later regions.
        peaks: above the bytes of earlier regions.
        costs: of recomputation.
    """

    bytes: np.ndarray
    peaks: np.ndarray
    costs: np.ndarray


class Region(NamedTuple):
    """An interval of equations that may be a part.

    Attributes:
        out_bytes: its outputs that later equations read.
        cotangent_bytes: live during its backward pass besides its outputs' cotangents: the cotangents of values that it
            or equations before it read, and equations after it too.
    """

    start: int
    end: int
    part: Part
    front: Front
    out_bytes: int
    cotangent_bytes: int = 0

    def table(self, overhead: float) -> OptionTable:
        """The options; `overhead` is added to the cost of each that changes the region."""
        saved, backward, costs = self.front.columns
        costs = costs + overhead * self.front.are_changed
        return OptionTable(saved + self.out_bytes, saved + backward + self.cotangent_bytes, costs)


class Waits(enum.Enum):
    """Values that a gradient waits for before it begins."""

    FOR_NOTHING = "nothing"
    FOR_INPUTS = "inputs"  # until all that it reads is computed
    FOR_GRADIENTS = "gradients"  # until the gradient before it is computed, too


@dataclasses.dataclass(frozen=True, eq=False)
class Choice:
    """A program cut into regions, with an option for each of them."""

    program: Flat
    regions: Sequence[Region]
    options: Sequence[Option]

    @property
    def cost(self) -> float:
        return sum(option.cost for option in self.options)

    @cached_property
    def in_use(self) -> list[int]:
        """The bytes in use during the backward pass of each region: the values that regions before it computed for
        regions after them, `Region.cotangent_bytes`, the values saved so far, and its own. A value that only later
        regions read is live as its cotangent.
        """
        outputs = itertools.accumulate((r.out_bytes for r in self.regions), initial=0)
        saved = itertools.accumulate(option.saved_bytes for option in self.options)
        regions = zip(self.regions, self.options, saved, outputs, strict=False)
        return [out_bytes + r.cotangent_bytes + s + o.backward_bytes for r, o, s, out_bytes in regions]

    @property
    def peak(self) -> int:
        """The most bytes in use during the backward pass of any region."""
        return max(self.in_use, default=0)

    def rewrite(self, waits: Waits = Waits.FOR_NOTHING) -> Jaxpr:
        """Apply its option to each region."""
        parts, decisions = [r.part for r in self.regions], [option.decision for option in self.options]
        return rewrite(self.program.jaxpr, parts, decisions, *self.order(waits))

    def order(self, waits: Waits) -> tuple[int | None, bool]:
        """The last two arguments of `rewrite`. The input that waits is the smallest one of the first region with a
        backward pass, if there is one.
        """
        if waits is Waits.FOR_NOTHING:
            return None, False
        first = next((r.part for r in self.regions if not r.front.is_free), None)
        reads, inputs = [] if first is None else first.invars, self.program.jaxpr.invars
        numbers = [i for i, v in enumerate(inputs) if v in reads and is_float(v.aval)]
        last_input = min(numbers, key=lambda i: device_bytes(inputs[i].aval), default=None)
        return last_input, waits is Waits.FOR_GRADIENTS
