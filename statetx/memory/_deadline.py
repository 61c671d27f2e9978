"""Time of a search that compiles programs."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from .._equations.compiler import num_compiled


class Deadline:
    """The wall time at which a search has to end, and the time and the compilations that it has spent.

    Wall time ends it, since a compilation has to be waited for: on a busy machine the longest one so far tells how long
    the next one takes there.

    Args:
        seconds: from now; None for no limit.

    Attributes:
        limit: seconds; infinity for no limit.
        longest: seconds of the longest compilation so far.
    """

    def __init__(self, seconds: float | None):
        self.limit = float("inf") if seconds is None else seconds
        self._begin, self._processor_begin, self._first = time.monotonic(), time.process_time(), num_compiled()
        self.longest = 0.0

    @property
    def seconds(self) -> float:
        """Wall time so far."""
        return time.monotonic() - self._begin

    @property
    def processor_seconds(self) -> float:
        """Time of all processors so far, of all threads of this process."""
        return time.process_time() - self._processor_begin

    @property
    def num_compiled(self) -> int:
        """The programs compiled so far, in all threads of this process."""
        return num_compiled() - self._first

    @property
    def seconds_left(self) -> float:
        return self.limit - self.seconds

    def has_time(self, share: float = 1.0) -> bool:
        """Whether a compilation as long as the longest so far would end within this share of the limit."""
        return self.seconds + self.longest < share * self.limit

    @contextlib.contextmanager
    def compiling(self, num: int = 1) -> Iterator[None]:
        """Note the time of a compilation, or the mean of several side by side."""
        begin = self.seconds
        try:
            yield
        finally:
            self.longest = max(self.longest, (self.seconds - begin) / max(num, 1))
