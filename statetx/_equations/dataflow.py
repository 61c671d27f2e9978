"""Dataflow of equations: the bytes that are alive at each step."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np


def alive_bytes(num_steps: int, spans: Iterable[tuple[int, int, int]]) -> np.ndarray:
    """The sum at each step, ``int64[num_steps]``, of spans ``(first, last, bytes)``: a value is alive in both of these
    steps. One whose last step is before its first is never alive.
    """
    change = np.zeros(num_steps + 1, np.int64)
    for first, last, num_bytes in spans:
        if first <= last:
            change[first] += num_bytes
            change[last + 1] -= num_bytes
    return np.cumsum(change)[:-1]
