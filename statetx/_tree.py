"""Trees: partition, combine, predicates of leaves.

Every transform uses two verbs: `partition` splits a tree into the leaves that go through JAX (dynamic) and all others
(static); `Partition.combine` is its inverse.
"""

from __future__ import annotations

import array
import math
import numbers
import operator
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence, Set
from typing import Any, TypeGuard

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from . import _jax, _states
from ._text import brief
from ._typing import PyTree

_NOT_NUMERIC = frozenset("OSUMm")  # dtype kinds that no JAX array has


def is_array(x: Any) -> bool:
    """Whether `x` is traced: a JAX or NumPy array, a tracer, a key, or anything with ``__jax_array__``."""
    if type(x) is _jax.ArrayImpl or isinstance(x, jax.Array):
        return True
    if isinstance(x, (np.ndarray, np.generic)):
        return x.dtype.kind not in _NOT_NUMERIC and x.dtype.names is None
    if _jax.is_hi_value(x):
        return True
    # A state may have `__jax_array__` (flax's do). It is not an array, whatever it holds.
    return callable(getattr(x, "__jax_array__", None)) and not isinstance(x, type) and not _states.is_opaque(x)


def is_type(x: Any) -> bool:
    """Whether `x` is the type of an array in its place: by JAX's classes, as a module may have a ``dtype``, too."""
    return isinstance(x, jax.ShapeDtypeStruct | jax.core.ShapedArray)


def is_array_or_type(x: Any) -> bool:
    return is_array(x) or is_type(x)


def is_number(x: Any) -> bool:
    """Whether `x` is a Python number other than a bool, which is a flag."""
    return isinstance(x, numbers.Number) and not isinstance(x, (bool, np.generic, jax.Array))


def is_array_or_number(x: Any) -> bool:
    return is_array(x) or is_number(x)


def is_argument(x: Any) -> bool:
    """Whether a staged function takes it as an array: arrays and their types, and Python numbers, bools included."""
    return is_array_or_number(x) or isinstance(x, bool) or is_type(x)


def is_integer(x: Any) -> TypeGuard[int]:
    """Whether `x` is a whole number of any integer type; True is a flag."""
    return isinstance(x, numbers.Integral) and not isinstance(x, bool)


def whole_number(x: Any, least: int = 0) -> int | None:
    """A number of things that there may be, as an int: whole, at least `least`, and below 2**31; None for anything
    else.
    """
    if isinstance(x, (bool, np.bool_)) or not hasattr(x, "__index__"):
        return None
    try:
        count = operator.index(x)
    except TypeError:  # an array, a tracer, a state
        return None
    return count if least <= count < 2**31 else None


def is_float(x: Any) -> bool:
    """Whether it is a differentiable array, or the type of one."""
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.inexact)


def is_key(x: Any) -> bool:
    """Whether it is a random key, an array of them, or the type of one."""
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


class Partition:
    """The static part of a tree.

    Attributes:
        treedef: structure of the tree.
        mask: for each leaf, whether it is dynamic.
        static: the static leaves.
    """

    __slots__ = ("mask", "static", "treedef")

    def __init__(self, treedef: Any, mask: tuple[bool, ...], static: tuple[Any, ...]):
        self.treedef = treedef
        self.mask = mask
        self.static = static

    @property
    def num_dynamic(self) -> int:
        return len(self.mask) - len(self.static)

    def combine(self, dynamic: Sequence[Any]) -> PyTree:
        """The tree, with these dynamic leaves."""
        if not self.static:
            return jax.tree.unflatten(self.treedef, dynamic)
        dynamic_leaves, static_leaves = iter(dynamic), iter(self.static)
        return jax.tree.unflatten(self.treedef, [next(dynamic_leaves) if d else next(static_leaves) for d in self.mask])


def has_deleted(tree: PyTree) -> bool:
    """Whether an array has been deleted, as by donation."""
    return any(isinstance(x, _jax.ArrayImpl) and x.is_deleted() for x in jax.tree.leaves(tree))


def with_plain_dict(tree: PyTree) -> PyTree:
    """A dict of a library's own class, such as brainstate's FlattedDict, as a plain one: gradients have its structure,
    and are no states.
    """
    has_rule = isinstance(tree, (OrderedDict, defaultdict))  # JAX has these two as pytrees
    return dict(tree) if isinstance(tree, dict) and not has_rule else tree


def flatten(tree: PyTree, is_leaf: Callable[[Any], bool] | None = None) -> tuple[list[Any], Any]:
    """`jax.tree.flatten`, whose error for a dict with keys that cannot be sorted names the keys."""
    try:
        return jax.tree.flatten(tree, is_leaf)
    except ValueError as e:
        keys = _unsorted_keys(tree)
        if keys is None:
            raise
        raise ValueError(
            f"A dict has the keys {', '.join(map(brief, keys[:4]))}, which cannot be sorted. JAX orders the items of "
            f"a dict by their keys.\n"
            f"Fix: give all keys one type, such as str."
        ) from e


def _unsorted_keys(tree: PyTree) -> list[Any] | None:
    """The keys of the first dict in a tree of containers whose keys cannot be sorted."""
    if isinstance(tree, dict):
        try:
            sorted(tree)
        except TypeError:
            return list(tree)
    items = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, (list, tuple)) else ()
    return next((keys for x in items if (keys := _unsorted_keys(x)) is not None), None)


def is_opaque(x: Any) -> bool:
    """As `_states.is_opaque`, faster for arrays."""
    return type(x) not in _jax.LEAVES and _states.is_opaque(x)


def is_model(x: Any) -> bool:
    """Whether an object holds states and is none."""
    return is_opaque(x) and _states.kind_of(x) is None


def is_state_tree(x: Any) -> bool:
    """Whether an object is a state that JAX has as a pytree, as flax's are."""
    return is_opaque(x) and _states.kind_of(x) is not None and not jax.tree_util.all_leaves([x])


def partition(
    tree: PyTree,
    is_dynamic: Callable[[Any], bool] = is_array,
    *,
    is_leaf: Callable[[Any], bool] | None = is_opaque,
) -> tuple[list[Any], Partition]:
    """Split a tree into its dynamic leaves, in order, and its static part.

    Objects that hold states are leaves: to unflatten them would create new states. Where JAX takes them apart,
    `is_leaf` is None, or `is_model`, so that states by themselves are trees of arrays.
    """
    if type(tree) in _jax.LEAVES and is_dynamic(tree):  # fast path: a single array
        return [tree], ARRAY
    leaves, treedef = flatten(tree, is_leaf)
    mask = tuple(is_dynamic(leaf) for leaf in leaves)
    dynamic = [leaf for leaf, d in zip(leaves, mask, strict=True) if d]
    static = tuple(leaf for leaf, d in zip(leaves, mask, strict=True) if not d)
    return dynamic, Partition(treedef, mask, static)


ARRAY = Partition(jax.tree.structure(0), (True,), ())
"""The partition of a single array."""


def as_array(x: Any) -> Any:
    """Convert an object that is an array only through ``__jax_array__``; return all others unchanged."""
    if type(x) in _jax.LEAVES:
        return x
    convert = getattr(x, "__jax_array__", None)  # None, too, in a tracer of a type of hijax
    if convert is not None and not isinstance(x, (jax.Array, np.ndarray, np.generic)) and is_array(x):
        return convert()
    return x


def host_array(x: Any) -> np.ndarray:
    """An array's entries, gathered from all processes that hold some; of keys, their words."""
    x = jax.random.key_data(x) if is_key(x) else x
    if isinstance(x, jax.Array) and not (x.is_fully_addressable or x.is_fully_replicated):
        from jax.experimental import multihost_utils

        x = multihost_utils.process_allgather(x, tiled=True)
    return np.asarray(x)


def as_value(x: Any) -> Any:
    """As ``jnp.asarray``, of a leaf that JAX takes: one of a type of hijax is unchanged."""
    return x if isinstance(x, jax.Array) or _jax.is_hi_value(x) else jnp.asarray(x)


class Identity:
    """A key that compares an object by identity, and keeps it alive, so that its id is not reused."""

    __slots__ = ("obj",)

    def __init__(self, obj: Any):
        self.obj = obj

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Identity) and self.obj is other.obj

    def __hash__(self) -> int:
        return id(self.obj)


def is_hashable(x: Any) -> bool:
    try:
        hash(x)
    except Exception:  # a TypeError, as a rule; a ValueError for a writable memoryview
        return False
    return True


def _by_equality(x: Any) -> Hashable:
    return (type(x), x) if is_hashable(x) else container_key(x, _by_equality) or Identity(x)


def freeze(x: Any, leaf_key: Callable[[Any], Hashable] = _by_equality) -> Hashable:
    """A hashable key that is equal for values that a program cannot tell apart.

    Types count: 1, True and 1.0 differ, and so do 0.0 and -0.0, a list and a tuple. Containers (any sequence, mapping
    or set that is not hashable) and NumPy arrays are compared by content and attributes; other objects by `leaf_key`:
    by default their own equality, or identity if they are not hashable.
    """
    if isinstance(x, float):  # `hex` tells 0.0 from -0.0, and nan equals nan
        return (type(x), x.hex())
    if isinstance(x, complex):
        return (type(x), x.real.hex(), x.imag.hex())
    if isinstance(x, (tuple, list)):
        return (type(x), *[freeze(v, leaf_key) for v in x], *_attributes(x, leaf_key))
    if isinstance(x, slice):  # hashable from Python 3.12 on, but equal for 1 and True
        return (type(x), freeze(x.start, leaf_key), freeze(x.stop, leaf_key), freeze(x.step, leaf_key))
    if isinstance(x, (dict, set, frozenset)):
        return container_key(x, leaf_key)
    if isinstance(x, (np.ndarray, np.generic)):
        content = freeze(x.tolist(), leaf_key) if x.dtype.hasobject else x.tobytes()
        return (type(x), x.dtype.str, x.shape, content)
    return leaf_key(x)


def container_key(x: Any, leaf_key: Callable[[Any], Hashable]) -> Hashable:
    """`freeze` of a mapping, set or sequence, also of one that is not hashable (a deque, a UserDict); None for any
    other object.
    """
    if isinstance(x, (bytearray, memoryview, array.array)):
        view = memoryview(x)
        return (type(x), view.format, view.shape, view.tobytes())
    if isinstance(x, Mapping):
        items = [(freeze(k, leaf_key), freeze(v, leaf_key)) for k, v in x.items()]
        return (type(x), *items, *_attributes(x, leaf_key))
    if isinstance(x, Set):
        return (type(x), frozenset([freeze(v, leaf_key) for v in x]), *_attributes(x, leaf_key))
    if isinstance(x, Sequence):
        return (type(x), *[freeze(v, leaf_key) for v in x], *_attributes(x, leaf_key))
    return None


def _attributes(x: Any, leaf_key: Callable[[Any], Hashable]) -> tuple[Hashable, ...]:
    """A key for a container beside its items: attributes of the user's class, options of Python's."""
    if type(x) in _WITHOUT_ATTRIBUTES:
        return ()
    attributes = {**getattr(x, "__dict__", {}), **{name: getattr(x, name) for name in _OPTIONS if hasattr(x, name)}}
    return (freeze(attributes, leaf_key),) if attributes else ()


_WITHOUT_ATTRIBUTES = frozenset([tuple, list, dict, set, frozenset])
_OPTIONS = ("default_factory", "maxlen")  # of a defaultdict and a deque


def num_bytes(tree: PyTree) -> int:
    """Bytes of all array leaves. A random key counts as its words, a symbolic size (jax.export) as 1."""
    total = 0
    for leaf in jax.tree.leaves(tree):
        if hasattr(leaf, "dtype") and hasattr(leaf, "shape"):
            total += math.prod(n for n in leaf.shape if isinstance(n, int)) * leaf.dtype.itemsize
    return total


def has_known_sizes(x: Any) -> bool:
    """Whether no size of an array or type is symbolic (jax.export). Such a size cannot be compared with others."""
    return all(isinstance(n, int) for n in getattr(x, "shape", ()))
