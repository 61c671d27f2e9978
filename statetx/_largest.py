"""Search for the largest size that fits a budget of bytes, for all that have such a size to choose.

Such sizes, and how bytes grow with them:

- `planner.batches`: the examples of a batch or of a part; affine, to be exact to the example.
- `_loops.tune`: the slots of a loop; affine, and copies that no model knows. Whatever fits ends it.
- `planner._search.search`: the limit of the model for a budget; piecewise linear.
- `planner._search.program`: the limit that the gradients of a step share; near it, a staircase with noise.

A search that asks whether something is possible, and learns no bytes, is a call of `bisect`: `Family.least_peak` in
`planner._search.lattice`, `repetitions` in `_loops.schedule`.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Mapping, Sequence

_MAX_SLOW = 3  # guesses that leave more than half of the sizes in question, before the middle is taken
_MAX_GROWTH = 64  # of a guess, times the largest size that was measured: a line through two close points may be far off


def largest_within(
    budget: int,
    bytes_of: Callable[[int], int],
    sizes: Sequence[int],
    first: int,
    known_bytes: Mapping[int, int],
    *,
    tries: int | None = None,
    tolerance: float = 0.0,
    is_enough: Callable[[int], bool] = lambda num_bytes: False,
) -> tuple[int, dict[int, int]]:
    """Search for the largest size whose bytes are within a budget, with few measurements.

    The next size to measure is where the line through two points crosses the budget; the middle, where such guesses
    leave many sizes. The search ends when a size that keeps the budget and the next larger one, which does not, are
    both measured. Where bytes are not monotone it finds one of several such sizes; the returned one keeps the budget.

    Args:
        bytes_of: measures a size, such as by compiling a program.
        sizes: positive, in ascending order.
        first: the size to measure first; the next smaller one where it is not among them.
        known_bytes: by size, at least one, which need not be among `sizes`: a point of the line that is extrapolated.
        tries: the number of measurements, at most.
        tolerance: a part. Sizes that differ from a measured one by less are not tried, and a measurement that leaves
            less of the budget ends the search.
        is_enough: whether a measurement of so many bytes ends the search.

    Returns:
        The largest size that keeps the budget, of those measured or known, 0 if none does; and the measured bytes by
        size.
    """
    measured: dict[int, int] = {}
    points: dict[float, int] = {**known_bytes}
    # `low` keeps the budget, `high` does not.
    low, high = max((size for size, num_bytes in known_bytes.items() if num_bytes <= budget), default=0), math.inf
    aim, num_left, num_slow = float(first), len(sizes), 0
    while len(measured) != tries:
        least = bisect.bisect_right(sizes, (1 + tolerance) * low)
        most = bisect.bisect_left(sizes, high / (1 + tolerance))
        if least >= most:
            break
        is_slow = high < math.inf and 2 * (most - least) >= num_left
        num_left, num_slow = most - least, num_slow + 1 if is_slow else 0
        if num_slow < _MAX_SLOW:
            size = sizes[max(least, min(bisect.bisect_right(sizes, aim), most) - 1)]
        else:
            size, num_slow = sizes[(least + most - 1) // 2], 0
        points[size] = measured[size] = num_bytes = bytes_of(size)
        low, high = (size, high) if num_bytes <= budget else (low, size)
        if (1 - tolerance) * budget < num_bytes <= budget or is_enough(num_bytes):
            break
        aim = min(_crossing(points, budget, low, high), _MAX_GROWTH * max(measured))
    return low, measured


def _crossing(points: Mapping[float, int], budget: int, low: int, high: float) -> float:
    """The size between two where the line through the two points next to the budget crosses it; else the line through
    these two; beyond all points, where bytes do not grow, twice as far as the last step.
    """
    nearest = sorted(sorted(points, key=lambda size: abs(points[size] - budget))[:2])
    for x0, x1 in (nearest, (low, high)):
        if x0 in points and x1 in points and points[x1] > points[x0]:
            aim = x0 + (budget - points[x0]) * (x1 - x0) / (points[x1] - points[x0])
            if low <= aim <= high:
                return aim
    x0, x1 = sorted(points)[-2:]
    return x1 + 2 * (x1 - x0)
