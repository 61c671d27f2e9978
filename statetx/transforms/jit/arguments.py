"""`Call`: the arguments of one call of a jitted function, split by a `ArgumentLayout` into kept, donated and static
leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence, Set
from typing import Any

import jax

from ... import _states
from ..._objects.paths import Paths, argument_names
from ..._positions import replaced
from ..._tree import as_array, is_argument, partition

Donated = tuple[Sequence[bool], Set[str]] | None
"""For each positional argument that is not static, whether it is donated; and the names of donated keyword
arguments.
"""


class ArgumentLayout:
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

    def __init__(
        self, args: tuple, kwargs: dict, leaves: list, layout: ArgumentLayout, merge: Callable, static: Hashable
    ):
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


def input_names(owner: Any, call: Call, inputs: Sequence[Any], operands: tuple, paths: Paths) -> list[str]:
    """The names of a program's inputs, for profilers and messages: paths of the states, and argument names."""
    kept, donated, _, _ = operands
    states: list[str] = []
    for i, value in zip(inputs, [*kept, *donated], strict=True):
        leaves = jax.tree_util.tree_flatten_with_path(value)[0]
        states += [paths(i.state) + jax.tree_util.keystr(keys) for keys, _ in leaves]
    dynamic = [n for n, is_static in enumerate(owner.static.mask(len(call.args))) if not is_static]
    split = owner.static.split(call.args, call.kwargs)[:2]
    name = argument_names(owner.__wrapped__, call.args, dynamic)
    leaves = jax.tree_util.tree_flatten_with_path(split, is_leaf=_states.is_opaque)[0]
    arguments = [name(keys) for keys, _ in leaves]
    return [*states, *(arguments[n] for n in (*call.layout.kept, *call.layout.donated))]


def name_operands(error: ValueError, names: Sequence[str], operands: tuple) -> None:
    """Let JAX's error about the devices of an operand name the state or the argument of the user."""
    text = str(error)
    if not text.startswith("Received incompatible devices"):
        return
    parameters = ("kept", "donated", "operand", "donated_args")  # of the function that JAX compiles
    leaves = jax.tree_util.tree_flatten_with_path(operands)[0]
    for (keys, _), name in zip(leaves, names, strict=True):
        jax_name = parameters[keys[0].idx] + jax.tree_util.keystr(keys[1:])
        text = text.replace(f"argument {jax_name} of ", f"{name} of ")
    error.args = (
        f"{text}\nFix: place each state and argument on the devices of the mesh, by jax.device_put(x, "
        f"jax.NamedSharding(mesh, spec)).",
    )
