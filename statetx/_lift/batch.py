"""The length that arrays have in common along their axes; the batch in the arguments of a call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .. import _states
from .._objects.paths import argument_names
from .._text import type_str
from .._tree import Partition, as_array, is_array_or_type, is_key, partition
from .._typing import Indices, Names
from .context import sharding_of
from .signature import StaticArguments
from .wrapper import name_of


def common_length(
    call: str,
    arrays: Sequence[Any],
    axes: Sequence[int | None],
    names: Callable[[], Sequence[str]],
    *,
    lacking: str,
    differing: str,
    option: tuple[str, Any] | None = None,
    needed_by: str | None = None,
) -> Any:
    """The length of all arrays along their axes; None if no array has one.

    Args:
        call: the call, for messages.
        axes: for each array its axis, or None if it has no part in this; nor has a value that is mapped by the
            rule of a type of hijax.
        names: the names of the arrays, for messages.
        lacking: the fix for an array without its axis.
        differing: the fix for arrays of different lengths.
        option: an option that gives the length, and its value.
        needed_by: what depends on the length, so that it cannot be symbolic (``jax.export``); None if it can.

    Raises:
        ValueError: an array lacks its axis, the lengths differ, or they are symbolic.
    """
    firsts: dict[Any, int] = {}  # from length to the first array of that length
    for n, (x, axis) in enumerate(zip(arrays, axes, strict=True)):
        if not isinstance(axis, int):
            continue
        shape = x.shape if hasattr(x, "shape") else np.shape(x)
        if not -len(shape) <= axis < len(shape):
            raise ValueError(
                f"{call}: {names()[n]} is a {type_str(as_array(x))}, which has no axis {axis}.\nFix: {lacking}."
            )
        firsts.setdefault(shape[axis], n)

    describe = lambda n: f"{names()[n]} ({type_str(as_array(arrays[n]))})"
    symbolic = next((length for length in firsts if not isinstance(length, int)), None)
    if needed_by is not None and symbolic is not None:
        raise ValueError(
            f"{call}: {describe(firsts[symbolic])} has the symbolic length {symbolic} along axis "
            f"{axes[firsts[symbolic]]}. {needed_by} depends on it.\nFix: export with a constant length."
        )
    lengths = [*firsts, *(() if option is None or option[1] in firsts else (option[1],))]
    if len(lengths) > 1:
        texts = [f"{describe(n)} has {length} along axis {axes[n]}" for length, n in [*firsts.items()][:8]]
        texts += [] if option is None else [f"{option[0]}={option[1]}"]
        is_raw_key = any(np.shape(arrays[n]) == (2,) and arrays[n].dtype == jnp.uint32 for n in firsts.values())
        hint = " A key of jax.random.PRNGKey is an array of length 2: use jax.random.key." if is_raw_key else ""
        raise ValueError(f"{call}: the arrays differ in length: {', '.join(texts)}.\nFix: {differing}.{hint}")
    return lengths[0] if lengths else None


Axes = dict[int | str, int]
"""The arguments that hold the batch, by position or name, and the axis of the examples in their arrays."""


class Batch(NamedTuple):
    """The batch of a call.

    Attributes:
        leaves: its arrays, with the examples along their first axis, and the random keys among its arguments.
        arguments: ``leaves -> (args, kwargs)`` of the function, for other leaves in place of these.
        is_key: which leaves are random keys.
        size: the number of examples.
        mask: which arrays of ``(args, kwargs)``, in their order there, are leaves. One array may be an argument beside
            the batch, too.
    """

    leaves: list[Any]
    arguments: Callable[[Sequence[Any]], tuple[tuple[Any, ...], dict[str, Any]]]
    is_key: list[bool]
    size: int
    mask: list[bool]

    def types(self, size: int) -> list[jax.ShapeDtypeStruct]:
        """The types of the leaves for so many examples, without shardings."""
        return [
            jax.ShapeDtypeStruct(x.shape if is_key else (size, *x.shape[1:]), x.dtype)
            for x, is_key in zip(self.leaves, self.is_key, strict=True)
        ]

    def is_sharded(self) -> bool:
        """Whether an array is known to be sharded over devices along the examples."""
        for x in self.leaves:
            sharding = sharding_of(x) or getattr(jax.typeof(x), "sharding", None)
            if sharding is not None and x.shape and sharding.spec.partitions[:1] not in ((), (None,)):
                return True
        return False


def batch_along(
    call: str,
    fun: Callable,
    axes: Axes,
    args: tuple,
    kwargs: dict[str, Any],
    *,
    lacking: str,
    differing: str,
    missing: str,
) -> Batch:
    """The batch of a call.

    Args:
        call: the call, for messages.
        lacking, differing: see `common_length`.
        missing: the fix for a call without an array.

    Raises:
        ValueError: the arguments disagree in the number of examples, or have none.
    """
    parts: dict[int | str, Partition] = {}
    leaves: list[Any] = []
    leaf_axes: list[int | None] = []
    for key in (*range(len(args)), *sorted(kwargs)):
        if key in axes:
            arrays, parts[key] = partition(args[key] if isinstance(key, int) else kwargs[key], is_array_or_type)
            leaves += map(as_array, arrays)
            leaf_axes += [axes[key]] * len(arrays)
    are_keys = [not x.shape and is_key(x) for x in leaves]
    leaf_axes = [None if k else axis for k, axis in zip(are_keys, leaf_axes, strict=True)]

    flat = jax.tree_util.tree_flatten_with_path((args, kwargs), is_leaf=_states.is_opaque)[0]
    paths = [path for path, x in flat if is_array_or_type(x)]
    mask = [(path[1].key if path[0].idx else path[1].idx) in axes for path in paths]
    names = lambda: [argument_names(fun, args)(path) for path, flag in zip(paths, mask, strict=True) if flag]
    size = common_length(
        call, leaves, leaf_axes, names, lacking=lacking, differing=differing, needed_by="The number of parts"
    )
    if size is None:
        raise ValueError(f"{call}: no argument holds an array to be split.\nFix: {missing}.")

    def arguments(leaves: Sequence[Any]) -> tuple[tuple, dict[str, Any]]:
        arrays = iter([jnp.moveaxis(x, 0, a) if a else x for x, a in zip(leaves, leaf_axes, strict=True)])
        values = {key: part.combine([next(arrays) for _ in range(part.num_dynamic)]) for key, part in parts.items()}
        return tuple([values.get(i, x) for i, x in enumerate(args)]), {k: values.get(k, x) for k, x in kwargs.items()}

    leaves = [jnp.moveaxis(x, a, 0) if a else x for x, a in zip(leaves, leaf_axes, strict=True)]
    return Batch(leaves, arguments, are_keys, size, mask)


class BatchArguments:
    """Arguments of a function that hold the batch, along the first axis of their arrays.

    Args:
        name: the transform, for messages.
        fun: the function.
        argnums, argnames: its arguments that do, by position and by name; all if neither is given.
        unbatched: ``number of positional arguments -> positions`` of the others, if neither is given.
    """

    def __init__(
        self,
        name: str,
        fun: Callable,
        argnums: Indices | None,
        argnames: Names,
        unbatched: Callable[[int], Sequence[int]] = lambda num: (),
    ):
        self._name = f"{name}({name_of(fun)})"
        self._fun = fun
        self._batched = StaticArguments(fun, () if argnums is None else argnums, argnames, role="")
        self._is_default = argnums is None and not self._batched
        self._others = unbatched

    def of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Batch:
        """The batch of a call. Raises as `batch_along`."""
        mask, names = self._batched.mask(len(args)), self._batched.names
        unbatched = self._others(len(args)) if self._is_default else ()
        if self._is_default:
            mask, names = [i not in unbatched for i in range(len(args))], set(kwargs)
        axes: Axes = {key: 0 for key in (*(i for i, flag in enumerate(mask) if flag), *names)}
        by_name = "name the arguments that hold the batch, as in argnums=1 for loss(params, batch)"
        return batch_along(
            self._name,
            self._fun,
            axes,
            args,
            kwargs,
            lacking=by_name if self._is_default else "leave it out of argnums=, which names those that hold the batch",
            differing=by_name,
            missing="pass the batch as arrays, and name these arguments by argnums= or argnames="
            + (", since by default those that are differentiated hold none" if unbatched else ""),
        )
