"""Objects with new states in the output of a function that runs in parts, whose states end with each part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from .. import _frames, _states
from .._objects.walk import held_states
from .._tree import is_array_or_number
from .._typing import PyTree


@jax.tree_util.register_pytree_node_class
class _Arrays:
    """The arrays of an object with states that a part made: a gradient in the form of a module of flax.

    The states end with the part. An object with the accumulated arrays is made after the last one.
    """

    def __init__(self, leaves: Sequence[Any], treedef: Any):
        self.leaves, self.treedef = leaves, treedef

    def tree_flatten(self) -> tuple[Sequence[Any], Any]:
        return self.leaves, self.treedef

    @classmethod
    def tree_unflatten(cls, treedef: Any, leaves: Sequence[Any]) -> _Arrays:
        return cls(leaves, treedef)


def without_new_states(out: PyTree) -> PyTree:
    """Replace the objects that hold nothing but arrays and states made in this call by `_Arrays`."""
    frame = _frames.current_frame()
    assert frame is not None
    created = {id(state) for state, _ in frame.created()}

    def replaced(x: Any) -> Any:
        if not _states.is_opaque(x):
            return x
        states = held_states(x)
        leaves, treedef = jax.tree.flatten(x)
        is_new = bool(states) and all(id(state) in created for state in states)
        return _Arrays(leaves, treedef) if is_new and all(map(is_array_or_number, leaves)) else x

    return jax.tree.map(replaced, out, is_leaf=_states.is_opaque) if created else out


def with_new_states(out: PyTree) -> PyTree:
    """Make the objects again that `without_new_states` has replaced."""
    is_replaced = lambda x: isinstance(x, _Arrays)
    restore = lambda x: jax.tree.unflatten(x.treedef, x.leaves) if is_replaced(x) else x
    return jax.tree.map(restore, out, is_leaf=is_replaced)
