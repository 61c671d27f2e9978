"""Differences between the versions of JAX that are supported, 0.10 to 0.12, each found by its feature.

No other module asks for a version. Names that only change are looked up where they are used: the primitive of a closed
call (`CLOSED_CALL`), or an option of the compiler (`_equations.compiled`).
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import jax
from jax._src import checkify as _checkify
from jax._src import core as _core
from jax._src.state import discharge as _discharge

try:
    from jax._src import flattree as _flattree  # pyright: ignore[reportAttributeAccessIssue]
except ImportError:
    _flattree = None

SCAN_HAS_TREES = _flattree is not None
"""Since 0.12 `scan_p` has trees of its operands where it had numbers; the next two functions make them."""


def tree_of(num: int) -> Any:
    """A tree of so many operands."""
    return _flattree.nones(num)  # type: ignore[union-attr]


def packed(trees: tuple[Any, ...]) -> Any:
    """A tree of trees."""
    return _flattree.pack(trees)  # type: ignore[union-attr]


if TYPE_CHECKING or hasattr(_core, "ClosedJaxpr"):
    ClosedJaxpr = _core.ClosedJaxpr
else:
    ClosedJaxpr = _core.Jaxpr
"""Since 0.12 one class is for jaxprs with and without the values of their constants."""

NUM_CHECKIFY_CONTEXTS = int("ctx" in inspect.signature(_checkify.checkify_jaxpr).parameters)
"""Since 0.11 a rule of checkify takes a context, which numbers the errors, before the error."""

NUM_DISCHARGE_CONTEXTS = 1 if hasattr(_discharge, "DischargeContext") else 2
"""A rule that discharges Refs takes the types of its operands and results before its operands, since 0.11 in one."""

INLINE: Any = jax.Inline.JAX_EARLY if hasattr(jax, "Inline") else True  # pyright: ignore[reportAttributeAccessIssue]
"""How ``jax.jit`` leaves no equation. 0.12 has several ways to inline, and takes True for a later one."""

NAME_CLASSES = ("CheckpointName", "CheckpointNameFwd")
"""The operations that ``jax_remat3`` makes of names; since 0.12 the second in rules of ``jax.custom_vjp``."""


def is_check_missing(error: TypeError) -> bool:
    """Whether JAX's own check of a jaxpr failed: in 0.10 it has no parameter for the name of a ``closed_call``."""
    return "_check_closed_call" in str(error)
