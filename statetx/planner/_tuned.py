"""The tuned constants of the planner, all in one table.

Not in it, since no plan depends on their exact values: the accuracy of numerical methods (states and bins of dynamic
programs, limits of the solver, rounds of a measurement of time): twice as much gives the same plans; limits of stored
and printed texts; and the promises of `plan` and `max_batch` on their time and sizes.
"""

from __future__ import annotations

from typing import NamedTuple


class Tuned(NamedTuple):
    """Tuned constants.

    Attributes:
        tries: compilations without an improvement that end a search. Fewer lose budgets that are kept by one choice of
            many that the model finds alike.
        long_equations: a program of as many takes many seconds to compile. Its search has a quarter of the tries, and
            predicts the program without rematerialization from shorter ones. Merged regions have at most 5/16
            of as many.
        negligible: a part of operations or bytes that is not worth a compilation, or another way to hold a value.
        scatter: the relative error of a prediction of bytes beside a compiled choice: XLA takes so much more or less
            for choices that the model finds alike.
        drift: the error that is added for each e-fold between the model's bytes of a choice and of the nearest one that
            is compiled.
        overhead: of a region that is changed, as a part of a block's operations with its gradient, where programs are
            compared by their times: XLA's fusions end there. An H100 takes so much longer for a block that saves all
            its products.
        options: of a region, at most: each takes an integer program, and a row of the dynamic program.
        merged: neighboring periods or stretches that may become one region. More save no product of a layer.
        reduced: how many times fewer bytes than what its equation reads make a result small, such as a mean; an
            equation of fewer operations for each entry than a product over twice as many is cheap enough to be copied.
    """

    tries: int = 8
    long_equations: int = 1000
    negligible: float = 0.003
    scatter: float = 0.03
    drift: float = 0.3
    overhead: float = 0.06
    options: int = 24
    merged: int = 4
    reduced: int = 16


TUNED = Tuned()
