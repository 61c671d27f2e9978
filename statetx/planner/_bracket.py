"""The bisection over limits of the model, and the model's correction by compiled candidates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ._choice import Choice, Family


class Bracket:
    """A bisection over limits of the model, for one family: a choice at `low` kept the budget, one at `high` did not."""

    def __init__(self, family: Family):
        self.family = family
        self.low, self.high = 0.0, float("inf")
        self.num_tries = self.num_probes = 0
        self.is_done = False

    def narrow(self, target: float, is_kept: bool) -> None:
        """Note a compiled choice for a limit."""
        self.low, self.high = (max(self.low, target), self.high) if is_kept else (self.low, min(self.high, target))

    def note_probe(self, peak: float, is_kept: bool) -> None:
        """Note a compiled probe: where it keeps the budget, the bisection goes on above it."""
        self.num_probes += 1
        if is_kept and peak > self.low:
            self.low, self.high, self.is_done = peak, self.high if self.high > peak else float("inf"), False


class Proposal(NamedTuple):
    """A choice to compile, and the limit of the model that it was made for; None for a probe."""

    bracket: Bracket
    target: float | None
    choice: Choice


def clear_of_ends(target: float, low: float, high: float) -> float:
    """A target within an interval, so far from both ends that each try shortens the interval by a tenth or more."""
    margin = 0.1 * (high - low)
    return min(max(target, low + margin), high - margin)


def interpolate(points: Sequence[tuple[float, float]], peak: float) -> float:
    """Predict the bytes for a peak of the model from points (peak, measured bytes), in ascending order."""
    # Piecewise linear, and proportional beyond both ends; a higher peak is never predicted to take less memory.
    peaks, temps = np.array(points, float).T
    temps = np.maximum.accumulate(temps)
    if peak <= peaks[0]:
        return float(max(0.0, temps[0] + (peak - peaks[0]) * _slope(peaks[0], temps[0])))
    if peak >= peaks[-1]:
        return float(temps[-1] + (peak - peaks[-1]) * _slope(peaks[-1], temps[-1]))
    return float(np.interp(peak, peaks, temps))


def _slope(peak: float, temp: float) -> float:
    return temp / peak if peak > 0 else 1.0
