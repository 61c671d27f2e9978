"""Trees: partition and combine, and which leaves are arrays.

Two verbs carry every transform: `partition` splits a tree into the arrays that go through JAX and everything
else, which passes by; `Partition.combine` is its inverse.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from . import _jax, _states
from ._typing import PyTree

_NOT_NUMERIC = frozenset("OSUMm")  # dtype kinds that no JAX array has


def is_array(x: Any) -> bool:
    """Whether `x` is traced: a JAX or NumPy array, a tracer, a key, or anything with ``__jax_array__``."""
    if type(x) is _jax.ArrayImpl or isinstance(x, jax.Array):
        return True
    if isinstance(x, (np.ndarray, np.generic)):
        return x.dtype.kind not in _NOT_NUMERIC
    # A state may know how to become an array (flax's do): it is no array, whatever it holds.
    return hasattr(x, "__jax_array__") and not isinstance(x, type) and not _states.is_opaque(x)


def is_number(x: Any) -> bool:
    """Whether `x` is a Python number other than a bool: a count or a scale rather than a flag."""
    return isinstance(x, numbers.Number) and not isinstance(x, (bool, np.generic, jax.Array))


def is_array_or_number(x: Any) -> bool:
    return is_array(x) or is_number(x)


def is_argument(x: Any) -> bool:
    """Whether a function that is staged takes it as an array: arrays and their types, and every Python number."""
    return is_array_or_number(x) or isinstance(x, (bool, jax.ShapeDtypeStruct))


def is_float(x: Any) -> bool:
    """Whether it is an array, or the type of one, that can be differentiated."""
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.inexact)


class Partition:
    """What `partition` set aside; `combine` puts the array leaves back.

    Attributes:
        treedef: structure of the whole tree.
        mask: for each leaf, whether it is dynamic.
        static: the leaves that are not.
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
        if not self.static:
            return jax.tree.unflatten(self.treedef, dynamic)
        arrays, others = iter(dynamic), iter(self.static)
        return jax.tree.unflatten(self.treedef, [next(arrays) if d else next(others) for d in self.mask])


def partition(tree: PyTree, is_dynamic: Callable[[Any], bool] = is_array) -> tuple[list[Any], Partition]:
    """Split a tree into its dynamic leaves, in order, and the rest.

    Objects that hold states (modules registered as pytrees by their library) are leaves: taking them apart would
    make new states of the old ones.
    """
    if type(tree) in _jax.LEAVES and is_dynamic(tree):
        return [tree], ARRAY
    leaves, treedef = jax.tree.flatten(tree, is_leaf=_is_whole)
    mask = tuple(is_dynamic(leaf) for leaf in leaves)
    dynamic = [leaf for leaf, d in zip(leaves, mask, strict=True) if d]
    static = tuple(leaf for leaf, d in zip(leaves, mask, strict=True) if not d)
    return dynamic, Partition(treedef, mask, static)


def _is_whole(x: Any) -> bool:
    return type(x) not in _jax.LEAVES and _states.is_opaque(x)


ARRAY = Partition(jax.tree.structure(0), (True,), ())
"""The partition of what is nothing but an array."""


def as_array(x: Any) -> Any:
    """Give objects that only know how to become a JAX array that form; leave every other alone."""
    if type(x) in _jax.LEAVES:
        return x
    if hasattr(x, "__jax_array__") and not isinstance(x, (jax.Array, np.ndarray, np.generic)) and is_array(x):
        return x.__jax_array__()
    return x


class Identity:
    """A key that equals that of the same object only, and keeps the object alive."""

    __slots__ = ("obj",)

    def __init__(self, obj: Any):
        self.obj = obj

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Identity) and self.obj is other.obj

    def __hash__(self) -> int:
        return id(self.obj)


def _by_equality(x: Any) -> Hashable:
    try:
        hash(x)
    except TypeError:
        return Identity(x)
    return (type(x), x)


def freeze(x: Any, other: Callable[[Any], Hashable] = _by_equality) -> Hashable:
    """A key that is equal for values that a program cannot tell apart.

    Types count: 1, True and 1.0 differ, and so do 0.0 and -0.0, a list and a tuple. Containers and NumPy arrays go by
    content and attributes; `other` says what stands for other objects: if it is not given, their own equality, or their identity if
    they cannot be hashed.
    """
    if isinstance(x, float):
        return (type(x), x.hex())
    if isinstance(x, complex):
        return (type(x), x.real.hex(), x.imag.hex())
    if isinstance(x, (tuple, list)):
        return (type(x), *[freeze(v, other) for v in x], *_attributes(x, other))
    if isinstance(x, slice):  # from Python 3.12 on it can be hashed, and is equal where 1 is True
        return (type(x), freeze(x.start, other), freeze(x.stop, other), freeze(x.step, other))
    if isinstance(x, dict):
        return (type(x), *[(freeze(k, other), freeze(v, other)) for k, v in x.items()], *_attributes(x, other))
    if isinstance(x, (set, frozenset)):
        return (type(x), frozenset([freeze(v, other) for v in x]), *_attributes(x, other))
    if isinstance(x, (np.ndarray, np.generic)) and x.dtype != object:
        return (type(x), x.dtype.str, x.shape, x.tobytes())
    return other(x)


def _attributes(x: Any, other: Callable[[Any], Hashable]) -> tuple[Hashable, ...]:
    """A key for the attributes that a container of a class of the user's has besides its items."""
    attributes = getattr(x, "__dict__", None)
    return (freeze(dict(attributes), other),) if attributes else ()


def num_bytes(tree: PyTree) -> int:
    """Bytes of all array leaves; a key counts the words it is made of."""
    total = 0
    for leaf in jax.tree.leaves(tree):
        if hasattr(leaf, "dtype") and hasattr(leaf, "shape"):
            total += int(np.prod(leaf.shape, dtype=np.int64)) * leaf.dtype.itemsize
    return total
