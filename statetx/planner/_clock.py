"""The time that a search may take."""

from __future__ import annotations

import contextlib
import numbers
import time
from collections.abc import Iterator
from typing import Any


class TimeLeft:
    """Seconds that a search may still take. They pass while it runs, and not while another search does.

    Args:
        seconds: None for no limit.
    """

    def __init__(self, seconds: float | None):
        self._seconds = self._left = seconds
        self._start: float | None = None

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Let the time pass; within itself without effect."""
        if self._start is not None:
            yield
            return
        self._start = time.monotonic()
        try:
            yield
        finally:
            if self._left is not None:
                self._left -= time.monotonic() - self._start
            self._start = None

    def is_over(self, part: float = 1.0) -> bool:
        """Whether it has passed, or this part of it; a part above 1 is a multiple."""
        if self._seconds is None or self._left is None:
            return False
        left = self._left - (0.0 if self._start is None else time.monotonic() - self._start)
        return left <= (1 - part) * self._seconds

    def renew(self) -> None:
        """Give as much time as at first."""
        self._left = self._seconds

    def pass_on(self, other: TimeLeft) -> None:
        """Let another search have what this one has not used, once it has ended."""
        if self._left is not None and other._left is not None:
            other._left += max(self._left, 0.0)


def read_time_limit(time_limit: Any) -> float | None:
    """The seconds that a user gives; None for no limit."""
    if time_limit is None:
        return None
    is_number = isinstance(time_limit, numbers.Real) and not isinstance(time_limit, bool)
    if not is_number or not float(time_limit) >= 0:
        raise ValueError(f"time_limit={time_limit!r} must be a number of seconds, or None for no limit.")
    return float(time_limit)
