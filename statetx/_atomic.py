"""What no interrupt divides: a list of stores that is run at once, and a lock that is always released.

Ctrl-C, or any signal whose handler raises, reaches a program between two bytecodes; a trace function raises between two
lines. A function written in C that calls none written in Python has neither.
"""

from __future__ import annotations

import collections
import itertools
import operator
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

T = TypeVar("T")

Store = tuple[Any, ...]
"""A function written in C and its arguments: one step of a `commit`."""


def commit(stores: Iterable[Store]) -> None:
    """Run stores in order: all are run, or none.

    The caller keeps the values that are replaced alive, so that no finalizer runs in between.
    """
    collections.deque(itertools.starmap(operator.call, stores), maxlen=0)


# fmt: off
def locked(lock: Any, fun: Callable[..., T], *args: Any) -> T:
    """Call a function while holding a lock."""
    with lock: return fun(*args)  # noqa: E701  # one line: between two the lock could be left behind
# fmt: on
