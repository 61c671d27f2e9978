"""Choices of measured options: the backward bytes of each part are those of its backward pass, compiled on its own.

Until then they are the model's, which may be off by half. Each function stops measuring once the time is up (`is_late`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .._equations.compiled import compile_together
from ._choice import Choice, Family
from ._fronts import Front
from ._layout import Layout
from ._option import Option

_MODEL_ERROR = 1.0  # of the bytes of a backward pass: so much more it may take than the model says


def cheapest_choice(family: Family, limit: float, is_late: Callable[[], bool]) -> Choice | None:
    """The cheapest choice that the model puts within a limit, made of measured options only."""
    # A measurement changes the bytes of chosen options, and so may change the choice. The loop ends: every turn but the last
    # measures an option for the first time, and there are finitely many.
    while True:
        choice = family.choose(limit)
        if choice is None or not measure_parts(*choice, is_late):
            return choice


def lowest_peak_choice(family: Family, is_late: Callable[[], bool]) -> Choice | None:
    """The choice of the lowest peak, after measuring the options that come near it."""
    while True:
        # The cheapest choice within 0.1% of the lowest peak, rather than any at it.
        limit = family.least_peak() * 1.001 + 1
        choice = family.choose(limit)
        if choice is None or is_late():
            return choice
        if not (measure_parts(*choice, is_late) | _measure_peak_part(*choice, 1.1 * limit, is_late)):
            return choice


def measure_parts(layout: Layout, options: Sequence[Option], is_late: Callable[[], bool]) -> bool:
    """Measure the options of a choice, each on its own, but those far from the peak. Returns whether anything was new."""
    peak, in_use = layout.peak(options), layout.in_use(options)
    pairs = [
        (front, option)
        for front, option, num_bytes in zip(layout.fronts, options, in_use, strict=True)
        if num_bytes + _MODEL_ERROR * option.backward_bytes >= peak
    ]
    return _measure(pairs, is_late)


def _measure_peak_part(layout: Layout, options: Sequence[Option], limit: float, is_late: Callable[[], bool]) -> bool:
    """Measure all options of the peak's part that fit a limit there. Returns whether anything was new."""
    part, saved_bytes = layout.peak_part(options)
    front, spare = layout.fronts[part], limit - layout.base[part] - saved_bytes
    fitting = [o for o in front.options if o.total_bytes <= spare]
    return _measure([(front, option) for option in fitting], is_late)


def _measure(pairs: Sequence[tuple[Front, Option]], is_late: Callable[[], bool]) -> bool:
    compile_together(p for front, option in pairs if not is_late() for p in front.programs(option))
    # A list, not a generator: `any` would stop at the first new measurement.
    return any([front.measure(option) for front, option in pairs if not is_late()])
