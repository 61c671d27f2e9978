"""Atomic under interrupts: a list of stores that runs as a whole, and a lock that is always released.

Ctrl-C, or any signal whose handler raises, interrupts a program between two bytecodes; a trace function raises between two
lines. A C function that calls no Python function has neither, so nothing interrupts it.
"""

from __future__ import annotations

import collections
import itertools
import operator
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

T = TypeVar("T")

Store = tuple[Any, ...]
"""A C function and its arguments: one step of a `commit`."""


def commit(stores: Iterable[Store]) -> None:
    """Run stores in order: all or none.

    The caller keeps the replaced values alive, so that no finalizer runs in between.
    """
    collections.deque(itertools.starmap(operator.call, stores), maxlen=0)


# fmt: off
def locked(lock: Any, fun: Callable[..., T], *args: Any) -> T:
    """Call a function while holding a lock."""
    with lock: return fun(*args)  # noqa: E701  # one line: an exception between two lines could leave the lock acquired
# fmt: on
