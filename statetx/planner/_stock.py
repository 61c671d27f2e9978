"""The stock policies, which plans are compared with: where they act in a program, and what they take and cost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ._candidate import Candidates
from ._choice import Choice
from ._lattice import Lattice
from ._layout import Layout
from ._option import Option

STOCK = ("everything", "dots", "dots_without_batch_dims", "nothing")


class StockPolicy(NamedTuple):
    """A stock policy in a program.

    Attributes:
        is_planned: for each part of `layout`, whether the policy acts on it.
    """

    name: str
    layout: Layout
    is_planned: Sequence[bool]

    @property
    def choice(self) -> Choice:
        """The layout, with the options as measured so far."""
        number = STOCK.index(self.name)
        pairs = zip(self.layout.fronts, self.is_planned, strict=True)
        options: list[Option] = [front.stock[number] if acts else front.baseline for front, acts in pairs]
        return self.layout, options


def policies_in(lattice: Lattice) -> list[StockPolicy]:
    """The stock policies, in each layout that they may act in."""
    return [StockPolicy(name, *layout) for layout in lattice.stock_layouts for name in STOCK]


def outcomes(policies: Sequence[StockPolicy], candidates: Candidates) -> list[tuple[str, int, float, bool]]:
    """Of each stock policy: name, temporary bytes, added cost, and whether these are predicted, since it was not compiled."""
    rows = []
    for name in STOCK:
        in_layouts = [_outcome(policy, candidates) for policy in policies if policy.name == name]
        is_predicted, temp_bytes, cost = min(in_layouts)
        rows.append((name, temp_bytes, cost, is_predicted))
    return rows


def _outcome(policy: StockPolicy, candidates: Candidates) -> tuple[bool, int, float]:
    """Whether it is predicted, temporary bytes, added cost."""
    layout, options = policy.choice
    candidate = candidates.find(layout, options)
    if candidate is not None:
        return False, candidate.temp_bytes, candidate.added_cost
    return True, int(candidates.predict(layout.peak(options))), sum(o.cost for o in options)
