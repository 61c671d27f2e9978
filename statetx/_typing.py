"""Aliases shared by the whole package."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

PyTree = Any
"""Nested containers known to ``jax.tree_util``, with arrays or other objects as leaves."""

Filter = Any
"""A state type, a path glob, a predicate ``(path, state) -> bool``, a bool, a sequence of filters (any of them), or
``Not``.
"""

Policy = Callable[..., Any] | str | None
"""A rematerialization policy: one of `statetx.policies`, a callable as in ``jax.checkpoint_policies``, the name of
either, or None.
"""

Indices = int | Sequence[int]
"""Positions of arguments: one, or a sequence of them. Negative ones count from the end."""

Names = str | Sequence[str]
"""Names of arguments: one, or a sequence of them."""

Argnums = Indices | None
"""Positions of the arguments to differentiate. An int gives one gradient, a sequence a tuple of them; None, see the
function.
"""

C = TypeVar("C", bound=type)


def public(cls: C) -> C:
    """Mark a class that statetx exports: tracebacks, reprs and pickles name it ``statetx.Name``, wherever it is
    defined.
    """
    cls.__module__ = "statetx"
    return cls
