"""`cached_property`: attributes that are computed when they are first read."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, TypeVar

T_co = TypeVar("T_co", covariant=True)


class cached_property(functools.cached_property[T_co]):
    """Python 3.12's `functools.cached_property`, which has no lock.

    That of Python 3.11 has one lock for all objects, held while a value is computed. Two threads without an object in
    common waited for each other forever: one computed a survey and needed the marks of a step, the other the reverse.
    Now two threads may compute the same value.
    """

    def __init__(self, func: Callable[[Any], T_co]) -> None:
        super().__init__(func)
        self.lock = contextlib.nullcontext()
