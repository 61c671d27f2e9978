"""The stock policies, which plans are compared with: where they act in a program, and what they take and cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from ._candidate import Candidate, Candidates
from ._choice import Choice
from ._lattice import Lattice
from ._layout import Layout
from ._measured import measure_parts
from ._option import Option

STOCK = ("everything", "dots", "dots_without_batch_dims", "nothing")

# A stock policy is not compiled if the best candidate costs at most this part of the model's cost for it. The cost may be predicted too high, so
# the margin is wide (0.9 at first, widened so that each policy that might be cheaper is tried).
_CLEARLY_CHEAPER = 0.95


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


def compiled_within(
    policies: Sequence[StockPolicy], candidates: Candidates, most: float, is_late: Callable[[], bool]
) -> list[Candidate]:
    """The policies that are compiled, or predicted to take at most so many temporary bytes, and then compiled while there is time."""
    found = []
    for policy in policies:
        layout, options = policy.choice
        is_close = candidates.predict(layout.peak(options)) <= most and not is_late()
        if candidates.has(layout, options) or is_close:
            found.append(candidates.measure(layout, options, policy.name))
    return found


def compile_cheaper(
    policies: Sequence[StockPolicy],
    candidates: Candidates,
    budget: int,
    most: float,
    negligible: float,
    is_late: Callable[[], bool],
) -> None:
    """Compile the policies that the model thinks cheaper than the best candidate within a budget; all if there is none.

    Args:
        most: temporary bytes; policies that are predicted to take more are not compiled.
        negligible: a cost that is not worth a compilation.
    """
    for policy in policies:
        best = candidates.best(budget)
        layout, options = policy.choice
        if candidates.has(layout, options) or is_late():
            continue
        if best is not None:
            if best.added_cost <= max(_CLEARLY_CHEAPER * sum(o.cost for o in options), negligible):
                continue
            if measure_parts(layout, options, is_late):
                layout, options = policy.choice
            if candidates.predict(layout.peak(options)) > most:
                continue
        candidates.measure(layout, options, policy.name)


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
