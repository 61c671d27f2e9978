"""The options of a part of a program, as values: what is saved and how, bytes and cost; and the Pareto front of several."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from .._loops.strategy import Strategy
from .._remat.stored import StoredType
from ._pareto import undominated
from ._values import Address, renumbered

Interval = tuple[int, int]
"""Equations of a program or of a region: the first, and the one after the last."""


class Option(NamedTuple):
    """One decision for a region.

    Attributes:
        saved: addresses of the saved values; None if the region is not rematerialized.
        saved_bytes: bytes held between the passes, beyond the region's inputs.
        backward_bytes: bytes in use during its backward pass, beyond the saved ones.
        cost: of recomputation.
        offloaded: the subset of `saved` that is stored in host memory.
        loop: for a loop, how its carries are stored; None for an unchanged loop. `saved` then applies to each step.
        copies: whether inputs are computed again from what earlier regions keep, where that is cheap (`_copies`).
        stored: those of `saved` that are stored in fewer bits, with their formats.
        inputs: the inputs that are stored in fewer bits, by index, with their formats.
        fenced: whether the backward pass of a loop is kept from starting early (`_remat.fence`).
        carries: the leaves of a loop's carry that are stored in fewer bits, by number, with their formats.
        inputs_first: whether the function of a region takes the program's inputs before what the program computes.
        inner: intervals of a region that saves nothing. While it is computed again, only their inputs are kept: each interval is
            computed once more in its turn.
    """

    saved: frozenset[Address] | None
    saved_bytes: int
    backward_bytes: int
    cost: float
    offloaded: frozenset[Address] = frozenset()
    loop: Strategy | None = None
    copies: bool = False
    stored: frozenset[tuple[Address, StoredType]] = frozenset()
    inputs: tuple[tuple[int, StoredType], ...] = ()
    fenced: bool = False
    carries: tuple[tuple[int, StoredType], ...] = ()
    inputs_first: bool = False
    inner: tuple[Interval, ...] = ()

    @property
    def decision(self) -> tuple[Any, ...]:
        """What is done, without bytes and cost."""
        return (
            self.saved,
            self.offloaded,
            self.loop,
            self.copies,
            self.stored,
            self.inputs,
            self.fenced,
            self.carries,
            self.inputs_first,
            self.inner,
        )

    @property
    def total_bytes(self) -> int:
        """What its backward pass has in use."""
        return self.saved_bytes + self.backward_bytes

    @property
    def saving(self) -> tuple[Any, ...]:
        """What is saved and how: the backward bytes of a region, or of a step of a loop, depend on this alone."""
        return self.saved, self.offloaded, self.stored, self.inputs, self.inner

    def renumbered(self, number: Callable[[int], int]) -> Option:
        """The option for a region whose equations have other numbers."""
        saved = None if self.saved is None else frozenset(renumbered(a, number(a[0])) for a in self.saved)
        offloaded = frozenset(renumbered(a, number(a[0])) for a in self.offloaded)
        stored = frozenset((renumbered(a, number(a[0])), format) for a, format in self.stored)
        return self._replace(saved=saved, offloaded=offloaded, stored=stored)


def pareto_front(options: Sequence[Option]) -> list[Option]:
    """The options that no other dominates in cost, saved bytes and backward bytes, the cheapest first."""
    return undominated(options, lambda o: o.cost, lambda o: o.saved_bytes, lambda o: o.backward_bytes)
