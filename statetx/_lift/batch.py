"""The batch in the arguments of a call: the arrays that hold examples along their first axis."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .. import _states
from .._objects.paths import argument_names
from .._text import type_str
from .._tree import Partition, as_array, is_array_or_type, is_key, partition
from .._typing import Indices, Names
from .context import sharding_of
from .signature import StaticArguments
from .wrapper import name_of


class Batch(NamedTuple):
    """The batch of a call.

    Attributes:
        leaves: its arrays, and the random keys among its arguments.
        arguments: ``leaves -> (args, kwargs)`` of the function, for other leaves in place of these.
        is_key: which leaves are random keys.
        size: the number of examples.
    """

    leaves: list[Any]
    arguments: Callable[[Sequence[Any]], tuple[tuple, dict[str, Any]]]
    is_key: list[bool]
    size: int

    def types(self, size: int) -> list[jax.ShapeDtypeStruct]:
        """The types of the leaves for so many examples, without shardings."""
        return [
            jax.ShapeDtypeStruct(x.shape if is_key else (size, *x.shape[1:]), x.dtype)
            for x, is_key in zip(self.leaves, self.is_key, strict=True)
        ]

    def mask(self) -> list[bool]:
        """Which arrays of ``(args, kwargs)``, in their order there, are leaves of the batch. One array may be an argument beside the batch, too."""
        return [isinstance(x, _Mark) for x in partition(self._marked(), _is_marked_or_array)[0]]

    def holds(self, argnum: int) -> bool:
        """Whether a positional argument has a leaf of the batch."""
        return any(isinstance(x, _Mark) for x in partition(self._marked()[0][argnum], _is_marked_or_array)[0])

    def _marked(self) -> tuple[tuple, dict[str, Any]]:
        return self.arguments([_Mark() for _ in self.leaves])

    def is_sharded(self) -> bool:
        """Whether an array is known to be sharded over devices along the examples."""
        return any(map(_is_sharded, self.leaves))


class _Mark:
    """Stands for a leaf of the batch."""


def _is_marked_or_array(x: Any) -> bool:
    return isinstance(x, _Mark) or is_array_or_type(x)


class BatchArguments:
    """Which arguments of a function hold the batch.

    Args:
        name: the transform, for messages.
        fun: the function.
        argnums, argnames: its arguments that do, by position and by name; all if neither is given.
        others: ``number of positional arguments -> positions`` of those that do not, if neither is given.
    """

    def __init__(
        self,
        name: str,
        fun: Callable,
        argnums: Indices | None,
        argnames: Names,
        others: Callable[[int], Sequence[int]] = lambda num: (),
    ):
        self._name = f"{name}({name_of(fun)})"
        self._fun = fun
        self._batched = StaticArguments(fun, () if argnums is None else argnums, argnames, role="")
        self._is_default = argnums is None and not self._batched
        self._others = others

    def of(self, args: tuple, kwargs: dict[str, Any]) -> Batch:
        """The batch of a call.

        Raises:
            ValueError: the arguments disagree in the number of examples, or have none.
        """
        mask, names = self._batched.mask(len(args)), self._batched.names
        if self._is_default:
            others = self._others(len(args))
            mask, names = [i not in others for i in range(len(args))], set(kwargs)
        positional = {i: x for i, x in enumerate(args) if mask[i]}
        named = {name: x for name, x in kwargs.items() if name in names}
        leaves, part = partition((positional, named), is_array_or_type)
        leaves = [as_array(x) for x in leaves]

        def arguments(leaves: Sequence[Any]) -> tuple[tuple, dict[str, Any]]:
            positional, named = part.combine(leaves)
            return tuple([positional.get(i, x) for i, x in enumerate(args)]), {**kwargs, **named}

        are_keys = [not x.shape and is_key(x) for x in leaves]
        return Batch(leaves, arguments, are_keys, self._size(leaves, are_keys, part, args))

    def _size(self, leaves: list[Any], is_key: list[bool], part: Partition, args: tuple) -> int:
        first_leaf: dict[int, int] = {}  # by size
        for n, x in enumerate(leaves):
            if is_key[n]:
                continue
            if not x.shape:
                raise ValueError(
                    f"{self._name}: {self._leaf_name(n, part, args)} is a {type_str(x)}, which has no axis of examples.\n"
                    f"Fix: leave it out of argnums=, which names the arguments that hold the batch."
                )
            first_leaf.setdefault(x.shape[0], n)
        if not first_leaf:
            raise ValueError(
                f"{self._name}: no argument holds a batch.\nFix: pass the batch as arrays, and name these arguments by argnums= or argnames=."
            )
        symbolic = next((n for size, n in first_leaf.items() if not isinstance(size, int)), None)
        if symbolic is not None:
            raise ValueError(
                f"{self._name}: the number of examples of {self._leaf_name(symbolic, part, args)} is symbolic: {type_str(leaves[symbolic])}. "
                f"The number of parts depends on it.\nFix: export with a constant number of examples."
            )
        if len(first_leaf) > 1:
            sizes = [f"{self._leaf_name(n, part, args)} has {size}" for size, n in list(first_leaf.items())[:4]]
            is_raw_key = any(x.shape == (2,) and x.dtype == jnp.uint32 for x in leaves)
            hint = " A key of jax.random.PRNGKey is such an array: use jax.random.key." if is_raw_key else ""
            raise ValueError(
                f"{self._name}: the arguments differ in the number of examples, their first axis: {', '.join(sizes)}.\n"
                f"Fix: name the arguments that hold the batch, as in argnums=1 for loss(params, batch).{hint}"
            )
        return next(iter(first_leaf))

    def _leaf_name(self, n: int, part: Partition, args: tuple) -> str:
        leaves = [object() for _ in range(part.num_dynamic)]
        tree = part.combine(leaves)
        for keys, leaf in jax.tree_util.tree_flatten_with_path(tree, is_leaf=_states.is_opaque)[0]:
            if leaf is leaves[n]:
                # Positional arguments are a dict by position here.
                first = jax.tree_util.SequenceKey(keys[1].key) if keys[0].idx == 0 else keys[1]
                return argument_names(self._fun, args)([keys[0], first, *keys[2:]])
        return "an argument"


def _is_sharded(x: Any) -> bool:
    sharding = sharding_of(x) or getattr(jax.typeof(x), "sharding", None)
    return sharding is not None and bool(x.shape) and len(sharding.spec) > 0 and sharding.spec[0] is not None
