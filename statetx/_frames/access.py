"""What one call does to one state: `Access` while it runs, `Effect` when it has ended."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from .._atomic import Store
from .._states.protocol import Kind
from .._states.registry import is_opaque

if TYPE_CHECKING:
    from .frame import Frame

UNKNOWN: Any = type("Unknown", (), {"__slots__": (), "__repr__": lambda self: "UNKNOWN"})()
"""Stands for a value that was not looked up."""


class Access:
    """What one frame knows of one state that existed before it."""

    __slots__ = (
        "before",
        "claimed",
        "copy",
        "entered",
        "kind",
        "owner",
        "read",
        "read_site",
        "site",
        "state",
        "written",
    )

    def __init__(self, state: Any, kind: Kind, owner: Frame | None, *, read: bool):
        self.state = state
        self.kind = kind
        self.owner = owner  # the frame that held the state before this one
        self.claimed = False
        self.before: Any = UNKNOWN
        self.entered: Any = UNKNOWN
        self.read = read
        self.written = False
        self.site = ""  # of the first write; `read_site` is set by `kinds.debug`
        self.copy: Copy | None = None  # of a container, as it was handed out

    def undo(self) -> list[Store]:
        """Stores that give the state its old value and owner."""
        stores = []
        entered, before = self.entered, self.before
        # What was not claimed another thread may have written: only the copy that was handed out is taken back.
        if before is not UNKNOWN and (self.claimed or (entered is not before and self.kind.get(self.state) is entered)):
            stores.append(self.kind.store(self.state, before))
        if self.claimed:
            stores.append(self.kind.claim(self.state, self.owner))
        return stores


class Copy:
    """A container, or a NumPy array, of which the body was handed a copy, since it may change it in place."""

    __slots__ = ("arrays", "leaves", "treedef", "value")

    def __init__(self, value: Any):
        leaves, self.treedef = _flatten(value)
        self.arrays = [(n, x) for n, x in enumerate(leaves) if _is_writable(x)]
        for n, x in self.arrays:
            leaves[n] = x.copy()
        self.leaves = leaves
        self.value = jax.tree.unflatten(self.treedef, leaves)

    def was_changed(self) -> bool:
        """Whether it has other contents now than it had when it was handed out."""
        leaves, treedef = _flatten(self.value)
        if treedef != self.treedef or any(a is not b for a, b in zip(self.leaves, leaves, strict=True)):
            return True
        return any(leaves[n].tobytes() != x.tobytes() for n, x in self.arrays)


class Effect:
    """A value that a call leaves in a state; `created` if the state was made in that call.

    Attributes:
        before: the state's value before the call, UNKNOWN if that does not matter.
    """

    __slots__ = ("before", "created", "kind", "site", "state", "value")

    def __init__(self, state: Any, kind: Kind, value: Any, site: str, *, before: Any = UNKNOWN, created: bool = False):
        self.state = state
        self.kind = kind
        self.value = value
        self.site = site
        self.before = before
        self.created = created


_LEAF_TYPES = (jax.Array, np.ndarray, np.generic, int, float, complex, str, bytes, type(None))


def is_leaf(value: Any) -> bool:
    return isinstance(value, _LEAF_TYPES)


def _is_writable(value: Any) -> bool:
    """Whether it is a NumPy array that can be changed in place."""
    return isinstance(value, np.ndarray) and value.flags.writeable


def _flatten(value: Any) -> tuple[list[Any], Any]:
    return jax.tree.flatten(value, is_leaf=is_opaque)
