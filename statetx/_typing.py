"""Aliases shared by the whole package."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

PyTree = Any
"""A nest of containers known to ``jax.tree_util`` with arrays or other objects at its leaves."""

Filter = Any
"""A state type, a path glob, a predicate ``(path, state) -> bool``, a bool, a sequence of these (any), or ``Not``."""

Policy = Callable[..., Any] | str | None
"""What rematerialisation keeps: one of `statetx.policies`, a callable of ``jax.checkpoint_policies``' kind, the name of either,
or None."""

Indices = int | Sequence[int]
Names = str | Sequence[str]

C = TypeVar("C", bound=type)


def public(cls: C) -> C:
    """Mark a class that users know as ``statetx.Name``: tracebacks, reprs and pickles name it so, wherever it is defined."""
    cls.__module__ = "statetx"
    return cls
