"""How much a search compiles: for most programs, and for long ones, whose compilation takes more than linear time."""

from __future__ import annotations

import dataclasses

_NEVER = float("inf")


@dataclasses.dataclass(frozen=True)
class Effort:
    """The limits of a search.

    Attributes:
        negligible: a gain that is not worth a compilation, in forward passes: about a thousandth of the program with its gradient.
        least_gain: what a new limit must gain, in negligible gains: any that is compiled corrects the model, where that is cheap.
        num_refinements: compilations of choices that are a little cheaper than the best: the bisection passes over them.
        num_probes: for each family, once a candidate keeps the budget: compilations of choices for which the model must err to be of use.
        is_thorough: whether what is seldom better is compiled, too: other regions, no rematerialization.
        full: the part of the budget from which a candidate is not made cheaper within its family: what is left of it buys little.
        lower: the part of the budget that each further candidate aims at, until one keeps it: fewer of them miss it then.
        clearly_above: the multiple of the budget from which a choice is predicted to miss it, where others cost too much.
        stock_above, unplanned_above: the multiples of the budget up to which a stock policy is compiled, and the program without
            rematerialization; wide, since their predicted memory may be far off.
    """

    negligible: float = 3e-3
    least_gain: float = -_NEVER
    num_refinements: int = 3
    num_probes: int = 3
    is_thorough: bool = True
    full: float = _NEVER
    lower: float = 1.0
    clearly_above: float = _NEVER
    stock_above: float = 2.0
    unplanned_above: float = 4.0


SHORT = Effort()
LONG = Effort(
    negligible=6e-3,
    least_gain=1.0,
    num_refinements=0,
    num_probes=0,
    is_thorough=False,
    full=0.98,
    lower=0.97,
    clearly_above=1.05,
    stock_above=1.2,
    unplanned_above=2.0,
)
