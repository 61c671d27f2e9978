"""`Call`: the arguments of one call of a jitted function, taken apart by a `Layout`."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence, Set
from typing import Any

import jax

from ... import _states
from ..._positions import replaced
from ..._tree import as_array, is_argument, partition

Donated = tuple[Sequence[bool], Set[str]] | None
"""For each positional argument that is not static, whether it is donated, and the names of those that are."""


class Layout:
    """Where the dynamic, donated and static leaves of a call's arguments are; the same for equal types.

    Attributes:
        is_split: whether JAX's flattening takes apart an object that holds states, which must stay whole.
        converts: whether some leaf is no array yet but knows how to become one.
    """

    def __init__(self, donated: Donated, args: tuple, kwargs: dict[str, Any]):
        arrays, others = partition((args, kwargs), is_argument)
        self.treedef, mask = others.treedef, others.mask  # and not the objects, which are a call's own
        self.key = (self.treedef, mask)
        self.converts = any(as_array(x) is not x for x in arrays)
        whole = [x for x in others.static if _states.is_opaque(x)]
        self.is_split = not jax.tree_util.all_leaves(whole)
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
    for key in sorted(kwargs):  # the order in which JAX flattens a dict
        flags += [key in names] * len(jax.tree.leaves(kwargs[key], is_leaf=_states.is_opaque))
    return flags


class Call:
    """The arguments of one call, taken apart.

    Attributes:
        kept, donated: the dynamic leaves.
        is_direct: whether JAX can be handed the arguments as they came.
        operand: what JAX gets: the pair of arguments and keyword arguments, or else the kept leaves.
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
        """The user's arguments, with these in the places of the dynamic leaves."""
        leaves = replaced(self.leaves, (*self.layout.kept, *self.layout.donated), (*kept, *donated))
        dyn_args, dyn_kwargs = jax.tree.unflatten(self.layout.treedef, leaves)
        return self.merge(dyn_args, dyn_kwargs)
