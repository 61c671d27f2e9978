"""Operations that no interrupt breaks: lists of stores run as a whole, locks are always released.

Ctrl-C, or any signal whose handler raises, interrupts a program between two bytecodes; a trace function raises between
two lines. A C function that calls no Python function has neither, so nothing interrupts it.
"""

from __future__ import annotations

import collections
import itertools
import operator
import os
import threading
import weakref
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


def in_one(stores: Iterable[Store]) -> Store:
    """One store that does all of some."""
    # A `deque` of length 0 consumes the map in C: Python handles no signal during the call (decision 18).
    return collections.deque, itertools.starmap(operator.call, stores), 0


# fmt: off
def locked(lock: Any, fun: Callable[..., T], *args: Any) -> T:
    """Call a function while holding a lock."""
    with lock: return fun(*args)  # noqa: E701  # one line: an exception between two lines could leave the lock acquired
# fmt: on


_locks: weakref.WeakSet[Any] = weakref.WeakSet()


def new_lock() -> Any:
    """A reentrant lock, which a process made by `os.fork` finds free: the threads that may hold it are not in that
    process.
    """
    lock = threading.RLock()
    _locks.add(lock)
    return lock


def _free_locks() -> None:
    for lock in _locks:
        if not lock._is_owned():  # not by the thread that forks
            lock._at_fork_reinit()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_free_locks)
