"""`Call`: the arguments of one call of a jitted function, split by a `Layout` into kept, donated and static leaves."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence, Set
from typing import Any

import jax

from ... import _states
from ..._positions import replaced
from ..._tree import as_array, is_argument, partition

Donated = tuple[Sequence[bool], Set[str]] | None
"""For each positional argument that is not static, whether it is donated; and the names of donated keyword arguments."""


class Layout:
    """Indices of the dynamic, donated and static leaves of a call's arguments; cached by their structure and types.

    Attributes:
        is_split: whether JAX's flattening splits an object that holds states, which must not be split.
        converts: whether some leaf must be converted to an array.
        static, donated, kept: indices of the leaves.
        is_plain: whether JAX can take all leaves unchanged and none is donated.
    """

    def __init__(self, donated: Donated, args: tuple, kwargs: dict[str, Any]):
        arrays, args_part = partition((args, kwargs), is_argument)
        self.treedef, mask = args_part.treedef, args_part.mask  # not the static objects: they differ from call to call
        self.key = (self.treedef, mask)
        self.converts = any(as_array(x) is not x for x in arrays)
        opaque_objects = [x for x in args_part.static if _states.is_opaque(x)]
        self.is_split = not jax.tree_util.all_leaves(opaque_objects)
        self.static = [i for i, dynamic in enumerate(mask) if not dynamic]
        flags = _donation_flags(donated, args, kwargs) if donated is not None else [False] * len(mask)
        self.donated = [i for i, dynamic in enumerate(mask) if dynamic and flags[i]]
        self.kept = [i for i, dynamic in enumerate(mask) if dynamic and not flags[i]]
        self.is_plain = not (self.static or self.donated or self.is_split or self.converts)


def _donation_flags(donated: tuple[Sequence[bool], Set[str]], args: tuple, kwargs: dict[str, Any]) -> list[bool]:
    mask, names = donated
    flags: list[bool] = []
    for arg, flag in zip(args, mask, strict=True):
        flags += [flag] * len(jax.tree.leaves(arg, is_leaf=_states.is_opaque))
    for key in sorted(kwargs):  # JAX flattens dicts in this order
        flags += [key in names] * len(jax.tree.leaves(kwargs[key], is_leaf=_states.is_opaque))
    return flags


class Call:
    """The arguments of one call, split into leaves.

    Attributes:
        kept, donated: the dynamic leaves.
        is_direct: whether JAX can take the arguments unchanged.
        key: the call's key in the cache: layout, static arguments and modes.
        operand: the operand for JAX: the pair ``(args, kwargs)`` if `is_direct`, else the kept leaves.
    """

    __slots__ = (
        "args",
        "donated",
        "is_direct",
        "kept",
        "key",
        "kwargs",
        "layout",
        "leaves",
        "merge",
        "modes",
        "operand",
    )

    def __init__(self, args: tuple, kwargs: dict, leaves: list, layout: Layout, merge: Callable, static: Hashable):
        self.args = args
        self.kwargs = kwargs
        self.leaves = leaves
        self.layout = layout
        self.merge = merge
        self.modes = _states.modes()
        self.key = (layout.key, static, self.modes)
        self.is_direct = layout.is_plain and not static
        self.kept = leaves if layout.is_plain else [leaves[i] for i in layout.kept]
        self.donated = [leaves[i] for i in layout.donated]
        self.operand = (args, kwargs) if self.is_direct else self.kept

    def with_arrays(self, kept: Sequence[Any], donated: Sequence[Any]) -> tuple[tuple, dict[str, Any]]:
        """The user's arguments with the dynamic leaves replaced by these."""
        leaves = replaced(self.leaves, (*self.layout.kept, *self.layout.donated), (*kept, *donated))
        dyn_args, dyn_kwargs = jax.tree.unflatten(self.layout.treedef, leaves)
        return self.merge(dyn_args, dyn_kwargs)


def copy_aliased_donations(kept: list, donated: list, call: Call) -> tuple[list, list]:
    """Copy arrays to be donated that are also another operand of the call: JAX must not donate an aliased array."""
    seen = {id(x) for x in jax.tree.leaves((kept, call.kept, call.donated))}

    def copy_if_aliased(x: Any) -> Any:
        if id(x) in seen and isinstance(x, jax.Array):
            return x.copy()
        seen.add(id(x))
        return x

    return kept, jax.tree.map(copy_if_aliased, donated)
