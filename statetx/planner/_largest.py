"""The largest size whose program keeps a budget, by few compilations.

The memory of a program is close to affine in the size of its batch. So the next size to compile is where the line through two measured points
crosses the budget. The search ends when a size that keeps the budget and the next larger one, which does not, have both been compiled.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

_MAX_SLOW = 2  # guesses that leave more than half of the sizes in question, before the middle is taken
_MAX_GROWTH = 64  # of a guess, times the largest size that was compiled: a line through two close points may be far off


class Search(NamedTuple):
    """The result of a search.

    Attributes:
        best: the largest index whose program keeps the budget; 0 if none does.
        tried: bytes by index.
    """

    best: int
    tried: dict[int, int]


def largest(
    measure: Callable[[int], int],
    budget: int,
    first: int,
    limit: int,
    *,
    size: Callable[[int], float] = float,
    bytes_at_zero: int = 0,
) -> Search:
    """The largest index from 1 to `limit` whose program keeps the budget.

    Args:
        measure: from an index to the bytes of its program.
        first: the index to compile first.
        size: of the batch of an index; rises with it.
        bytes_at_zero: a lower bound of the bytes for no examples, for the first guess.
    """
    tried: dict[int, int] = {}
    points = {0: (0.0, bytes_at_zero)}  # by index: size and bytes
    low, high, guess = 0, limit + 1, min(max(first, 1), limit)
    stride, num_slow = 1, 0
    while high - low > 1:
        before = high - low
        tried[guess] = measure(guess)
        points[guess] = size(guess), tried[guess]
        low, high = (guess, high) if tried[guess] <= budget else (low, guess)
        num_slow = num_slow + 1 if 2 * (high - low) > before and high <= limit else 0

        guess = _crossing(points, budget, low, high)
        guess, _ = bisected(lambda i, at=guess: size(i) <= at, low, min(high, _MAX_GROWTH * max(tried) + 1))
        if low < guess < high - 1:
            stride = 1
        else:
            # At an end of the sizes in question: away from it in steps that double, since memory may be a staircase.
            guess, stride, num_slow = (low + stride if guess <= low else high - stride), 2 * stride, 0
        if num_slow >= _MAX_SLOW or not low < guess < high:
            guess, num_slow = (low + high) // 2, 0
    return Search(low, tried)


def _crossing(points: dict[int, tuple[float, int]], budget: int, low: int, high: int) -> float:
    """The size at which the line through the two points next to the budget crosses it, if that lies in question; else through the ends."""
    nearest = sorted(sorted(points, key=lambda i: abs(points[i][1] - budget))[:2])
    for ends in (nearest, [low, high]):
        if all(i in points for i in ends):
            (x0, y0), (x1, y1) = (points[i] for i in ends)
            target = x0 + (budget - y0) * (x1 - x0) / (y1 - y0) if y1 > y0 else math.inf
            if points[low][0] <= target < math.inf and (high not in points or target <= points[high][0]):
                return target
    return 2 * points[max(points)][0]


def bisected(
    is_low: Callable[[int], bool], low: int, high: int, close: Callable[[int], int] = lambda high: 1
) -> tuple[int, int]:
    """The last number that is low and the first that is not, from `low` and `high` on; nearby ones if it ends when they are close."""
    while high - low > close(high):
        middle = (low + high) // 2
        low, high = (middle, high) if is_low(middle) else (low, middle)
    return low, high
