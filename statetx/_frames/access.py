"""Records of one call and one state: `Access` while the call runs, `Effect` when it has ended."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

from .._atomic import Store
from .._states.protocol import Kind
from .._states.registry import is_opaque

UNKNOWN: Any = type("Unknown", (), {"__slots__": (), "__repr__": lambda self: "UNKNOWN"})()
"""A placeholder for a value that was not looked up."""


@dataclasses.dataclass(slots=True, eq=False)
class Access:
    """The record of one frame about one state that existed before it.

    Attributes:
        previous_owner: the frame that owned the state before this one.
        stepped: whether an `Optimizer`, or an inner call that differentiated the state, has updated it.
        site: of the first write. `kinds.debug` sets `read_site`.
        copy: the copy of a container that the body was given.
    """

    state: Any
    kind: Kind
    previous_owner: Any
    read: bool
    acquired: bool = False
    value_before: Any = UNKNOWN
    value_in_body: Any = UNKNOWN
    written: bool = False
    stepped: bool = False
    site: str = ""
    read_site: str = ""
    copy: Copy | None = None

    def undo(self) -> list[Store]:
        """Stores that give the state its old value and owner."""
        stores = []
        value_in_body, value_before = self.value_in_body, self.value_before

        # Another thread may have written a state that was not acquired: only the copy that the body was given is
        # replaced.
        if value_before is not UNKNOWN and (
            self.acquired or (value_in_body is not value_before and self.kind.get(self.state) is value_in_body)
        ):
            stores.append(self.kind.store(self.state, value_before))

        if self.acquired:
            stores.append(self.kind.set_owner(self.state, self.previous_owner))
        return stores


class Copy:
    """The copy of a container or NumPy array that a body is given, since it may change it in place."""

    __slots__ = ("arrays", "leaves", "treedef", "value")

    def __init__(self, value: Any):
        leaves, self.treedef = _flatten(value)
        self.arrays = [(i, x) for i, x in enumerate(leaves) if _is_writable(x)]
        for i, x in self.arrays:
            leaves[i] = x.copy()
        self.leaves = leaves
        self.value = jax.tree.unflatten(self.treedef, leaves)

    def was_changed(self) -> bool:
        """Whether the body has changed the contents."""
        leaves, treedef = _flatten(self.value)
        if treedef != self.treedef or any(a is not b for a, b in zip(self.leaves, leaves, strict=True)):
            return True
        return any(leaves[i].tobytes() != x.tobytes() for i, x in self.arrays)


@dataclasses.dataclass(slots=True, eq=False)
class Effect:
    """A value that a call leaves in a state; `created` if the state was made in that call.

    Attributes:
        value_before: the state's value before the call; UNKNOWN if `publish` need not compare it.
        stepped: whether the call is a training step for this state: it differentiated the value, and then wrote another
            one.
    """

    state: Any
    kind: Kind
    value: Any
    site: str
    value_before: Any = UNKNOWN
    created: bool = False
    stepped: bool = False


_LEAF_TYPES = (jax.Array, np.ndarray, np.generic, int, float, complex, str, bytes, type(None))


def is_leaf(value: Any) -> bool:
    return isinstance(value, _LEAF_TYPES)


def _is_writable(value: Any) -> bool:
    """Whether a value is a NumPy array that can be changed in place."""
    return isinstance(value, np.ndarray) and value.flags.writeable


def _flatten(value: Any) -> tuple[list[Any], Any]:
    return jax.tree.flatten(value, is_leaf=is_opaque)
