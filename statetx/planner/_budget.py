"""Budgets: of memory, with what counts against it; of time, which a search may take."""

from __future__ import annotations

import contextlib
import math
import numbers
import os
import time
from collections.abc import Generator
from typing import Any, NamedTuple

from .._equations.compiled import Cost
from .._errors import PlanError
from .._targets import current
from .._text import MOST_BYTES, brief, parse_bytes, suggestion

STEP = "step"
TEMPORARIES = "temporaries"


class ByteBudget(NamedTuple):
    """An amount of memory.

    Attributes:
        amount: bytes as an int, or a fraction of the memory without rematerialization as a float.
        of: what counts: "step" for arguments, outputs and temporaries together, or "temporaries".
    """

    amount: int | float
    of: str

    @classmethod
    def read(cls, amount: Any, of: Any = TEMPORARIES) -> ByteBudget:
        if of not in (STEP, TEMPORARIES):
            accepted = [STEP, TEMPORARIES]
            raise PlanError(f"of={of!r} must be 'step' or 'temporaries'.{suggestion(str(of), accepted)}")
        return cls(read_amount(amount), of)

    def fixed_bytes(self, fixed: Cost) -> int:
        """Bytes of it that arguments and outputs of a program take."""
        return fixed.fixed_bytes if self.of == STEP else 0

    def left(self, fixed: Cost) -> int:
        """The bytes that it leaves for temporaries of a program."""
        return int(self.amount) - self.fixed_bytes(fixed)


def read_amount(argument: Any) -> int | float:
    """Bytes as an int, or a fraction of the memory without rematerialization as a float. 1 is a byte, 1.0 the whole."""
    amount: Any = argument
    if isinstance(argument, str):
        if argument.strip() == "device":
            return device_memory()
        # "0.5" is a fraction, as 0.5 is; "2.5GiB" and "1" are bytes.
        try:
            amount = (
                float(argument)
                if "." in argument and argument.strip().replace(".", "").isdigit()
                else parse_bytes(argument.strip())
            )
        except ValueError:
            amount = None

    # NumPy's numbers count as well. A bool is an `int` in Python, but not an amount.
    is_number = not isinstance(amount, bool) and isinstance(amount, numbers.Real)
    value = float(amount) if is_number and amount <= MOST_BYTES else math.nan
    if not math.isfinite(value) or value <= 0 or (value > 1 and value != int(value)):
        raise PlanError(
            f"budget={brief(argument)} is not a size; use 2**31, '2GiB', 'device' or a fraction of the memory "
            f"without rematerialization, such as 0.5."
        )
    is_fraction = value < 1 or (value == 1 and not isinstance(amount, numbers.Integral))
    return value if is_fraction else int(value)


def device_memory() -> int:
    """The bytes that the program of one device may use: ``STATETX_DEVICE_MEMORY`` if it is set, else as the device
    says.

    A CPU has the machine's memory, in equal parts for the CPU devices of JAX.

    Raises:
        PlanError: the device does not say.
    """
    pretended = os.environ.get("STATETX_DEVICE_MEMORY")
    if pretended:
        try:
            size = parse_bytes(pretended)
        except ValueError:
            size = 0
        if size == 0:
            raise PlanError(f"STATETX_DEVICE_MEMORY={brief(pretended)} is not a size, such as 16GiB.")
        return size
    chosen = current.current()
    if chosen is not None:
        return chosen.memory_bytes
    devices = current.local_devices()
    limits = [(device.memory_stats() or dict[str, int]()).get("bytes_limit", 0) for device in devices]
    if all(limits):
        return min(limits)
    if devices[0].platform == "cpu" and hasattr(os, "sysconf"):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // len(devices)
    raise PlanError(
        f"budget='device': {devices[0].device_kind} does not tell its memory.\n"
        f"Fix: give the size, as in budget='16GiB', or set STATETX_DEVICE_MEMORY=16GiB."
    )


def unit_question(amount: int | float) -> str:
    """Question for the error that nothing keeps a budget: numbers and text without a unit are bytes, which nobody means
    by 80.
    """
    if isinstance(amount, float) or amount >= 1024:
        return ""
    return f" Was a unit forgotten, as in '{amount}MiB' or '{amount}GiB'?"


# -- time -------------------------------------------------------------------------------------------------------------


class TimeLeft:
    """Wall time that a search may still take. It passes while the search runs, and not while another one does.

    Wall time ends it, since a compilation has to be waited for: on a busy machine the longest one so far tells how long
    the next one takes there.

    Args:
        seconds: None for no limit.

    Attributes:
        limit: seconds; infinity for no limit.
        longest: seconds of the longest compilation so far, of those that are noted.
    """

    def __init__(self, seconds: float | None):
        self.limit = math.inf if seconds is None else seconds
        self.longest = 0.0
        self._used = 0.0
        self._start: float | None = None

    @property
    def used(self) -> float:
        """Seconds that have passed."""
        return self._used + (0.0 if self._start is None else time.monotonic() - self._start)

    @contextlib.contextmanager
    def running(self) -> Generator[None]:
        """Let the time pass; within itself without effect."""
        if self._start is not None:
            yield
            return
        self._start = time.monotonic()
        try:
            yield
        finally:
            self._used, self._start = self.used, None

    @contextlib.contextmanager
    def compiling(self, num: int = 1) -> Generator[None]:
        """Note the time of a compilation, or the mean of several side by side."""
        begin = self.used
        try:
            yield
        finally:
            self.longest = max(self.longest, (self.used - begin) / max(num, 1))

    def is_over(self, part: float = 1.0) -> bool:
        """Whether it has passed, or this part of it; a part above 1 is a multiple."""
        return self.used >= part * self.limit

    def has_time(self, part: float) -> bool:
        """Whether a compilation as long as the longest so far would end within this part of it."""
        return self.used + self.longest < part * self.limit

    def renew(self) -> None:
        """Give as much time as at first."""
        self._used = 0.0

    def pass_on(self, following: TimeLeft) -> None:
        """Let another search have what this one has not used, once it has ended."""
        following._used -= max(self.limit - self.used, 0.0)


def read_time_limit(time_limit: Any) -> float | None:
    """The seconds that a user gives; None for no limit."""
    if time_limit is None:
        return None
    is_number = not isinstance(time_limit, bool) and isinstance(time_limit, numbers.Real)
    if not is_number or not float(time_limit) >= 0:
        raise ValueError(f"time_limit={time_limit!r} must be a number of seconds, or None for no limit.")
    return float(time_limit)
