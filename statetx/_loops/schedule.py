"""When to store what: the binomial schedule of reversing a loop with a bounded number of slots.

A slot holds the state (the carry) before some step. To reverse `l` steps of which the first state is in a slot, with
`s` slots, that one counted: advance `m` steps, store the state there, reverse the last `l - m` steps with the `s - 1`
slots that are left, then the first `m` with all `s` again. With ``beta(s, r) = C(s + r, s)``, the number of steps that
`s` slots can reverse if no step is run more than `r` times ahead of its reversal, and `r` the least for which
``beta(s, r) >= l``, the fewest steps are run ahead by any `m` with

    beta(s, r - 2) <= m <= beta(s, r - 1)   and   beta(s - 1, r - 1) <= l - m <= beta(s - 1, r);

they are ``t(l, s) = r l - beta(s + 1, r - 1)``. (Griewank and Walther 2000, Algorithm 799: revolve.)

In JAX the forward sweep is over before a cotangent exists: what follows the loop is one step more, the last to be
reached and the first to be reversed. So a loop of n steps is reversed by the schedule for n + 1, and each of its n steps
is run once more to be differentiated: ``t(n + 1, c) + n`` runs of the body in all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np


def beta(s: int, r: int) -> int:
    """The number of steps that `s` slots can reverse with at most `r` runs of each ahead of its reversal."""
    return math.comb(s + r, s) if r >= 0 else 0


def repetitions(length: int, slots: int) -> int:
    """The least r for which ``beta(slots, r) >= length``."""
    # beta rises with r: double r until it is enough, then bisect.
    low, high = 0, 1
    while beta(slots, high) < length:
        low, high = high, 2 * high
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if beta(slots, middle) >= length else (middle + 1, high)
    return low


def slots_for(length: int, runs_ahead: int) -> int:
    """The least number of slots for a loop of `length` steps, none of which runs more often than this ahead of its reversal."""
    slots = 1
    while beta(slots, runs_ahead) < length + 1:
        slots += 1
    return slots


def num_evaluations(length: int, slots: int) -> int:
    """The fewest runs of the body for a loop and its reversal, with this many slots, the initial state's counted."""
    r = repetitions(length + 1, slots)
    return r * (length + 1) - beta(slots + 1, r - 1) + length


def table(length: int, slots: int, columns: int | None = None) -> np.ndarray:
    """``beta(s, r - 1)`` at ``[s, r]`` for every s and r that a schedule of `length` steps meets, int32; what is above
    `length` is cut off there. With fewer `columns` longer schedules are not quite the best."""
    if columns is None:
        columns = repetitions(length, slots) + 2
    rows = np.ones((slots + 1, columns), np.int64)
    # Column r holds beta(s, r - 1), so the first one is beta(s, -1) = 0.
    rows[:, 0] = 0
    for s in range(1, slots + 1):
        # beta(s, r) = beta(s, r - 1) + beta(s - 1, r)
        rows[s] = np.minimum(np.cumsum(rows[s - 1]), length)
    return rows.astype(np.int32)


def split(rows: Any, length: Any, slots: Any) -> Any:
    """How far to advance before the next state is stored; `rows` as of `table`, for ``length >= 2`` and ``slots >= 2``.

    For numbers and NumPy as well as for traced values.
    """
    r = (rows[slots] < length).sum() - 1  # the least r with beta(slots, r) >= length
    # The largest m that both conditions of the module's docstring allow, min(beta(s, r - 1), l - beta(s - 1, r - 1)),
    # written in operators that numbers, NumPy arrays and tracers share.
    most, rest = rows[slots, r], length - rows[slots - 1, r]
    return most + (rest - most) * (rest < most).astype(rows.dtype)


def first_positions(length: int, slots: int) -> list[int]:
    """The steps before which the forward sweep stores the state."""
    rows = table(length + 1, slots)
    positions, left = [0], length + 1
    while slots > 1 and left > 1:
        advance = int(split(rows, left, slots))
        left, slots = left - advance, slots - 1
        positions.append(positions[-1] + advance)
    # The last step of the schedule for length + 1 is what follows the loop. It is reversed by the program around it.
    return [p for p in positions if p < length]


def nested_lengths(length: int, levels: int) -> tuple[int, ...]:
    """The lengths of nested loops, outermost first, which store the fewest states: the least sum.

    Their product is at most `length`; what it lacks is less than the product of all but the first. Lengths that divide
    what they are of are preferred where the sum is no more than a twentieth larger: a remainder costs a copy of its part.
    """
    if levels == 1 or length < 4:
        return (length,)
    # Of d factors with the product T the sum is least if all are T**(1/d). One turn of the outermost loop then has T
    # / T**(1/d) steps: whole numbers near it are tried, and divisors.
    ideal = length ** ((levels - 1) / levels)
    low, high = max(1, int(ideal * 0.7)), min(length, int(ideal * 1.45) + 2)

    def states(inner: int) -> float:
        rest = _ideal_sum(inner, levels - 1)
        return (length // inner + (length % inner > 0) + rest) * (1.05 if length % inner else 1)

    candidates: Sequence[int] = range(low, high + 1)
    # Of very long loops a sample, and the divisors, which a sample would miss.
    if len(candidates) > 10_000:
        candidates = [
            *range(low, high + 1, len(candidates) // 10_000),
            *(d for d in _divisors(length) if low <= d <= high),
        ]
    rest = nested_lengths(min(candidates, key=states), levels - 1)
    return (length // math.prod(rest), *rest)


def _ideal_sum(length: int, levels: int) -> float:
    return levels * length ** (1 / levels)


def _divisors(n: int) -> list[int]:
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})
