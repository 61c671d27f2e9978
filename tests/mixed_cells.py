"""States of the reference of mixed programs: cells in plain Python, and the promotion of their types."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from statetx import CarryTypeError, StateAccessError

Tree = Any


class World(Protocol):
    """Keeps the cells of one program."""

    has_read_open: bool
    """Whether a value of unspecified weakness was read: a value written afterwards may depend on it."""

    def add(self, cell: Cell) -> None: ...


class Dead:
    """Stands in a cell that has no value."""


DEAD = Dead()


class Cell:
    """A state: a value, and whether it is a random key, of which library. A Ref's type is fixed, and
    a tree of Refs is one cell.
    """

    def __init__(self, world: World, value: Any, is_random: bool = False, is_ref: bool = False, library: str = ""):
        self._world = world
        self._value = jax.tree.map(jnp.asarray, value) if is_ref else value
        self.is_random = is_random
        self.is_ref = is_ref
        self.library = library
        self.is_weak_open = world.has_read_open  # whether nobody promises that its value is weak, or is not
        self.is_strengthened = False  # whether a loop has made a weak value strong
        world.add(self)

    @property
    def value(self) -> Any:
        if self._value is DEAD:
            raise StateAccessError("a cell without a value")
        if isinstance(self._value, (dict, list)):  # it may be changed in place, which is a write that no one sees
            self.is_weak_open |= self._world.has_read_open
        self._world.has_read_open |= self.is_weak_open
        return self._value

    @value.setter
    def value(self, value: Any) -> None:
        fit = lambda x, old: jnp.asarray(x, old.dtype)
        self._value = jax.tree.map(fit, value, self._value) if self.is_ref else value
        self.is_weak_open |= self._world.has_read_open


class Only:
    """The filter that selects one cell."""

    def __init__(self, cell: Any):
        self.cell = cell


def is_numeric(x: Any) -> bool:
    return isinstance(x, (jax.Array, np.ndarray, np.generic, bool, int, float))


def rebuild(value: Tree) -> Tree:
    """The value in containers of its own."""
    return jax.tree.map(lambda x: x.copy() if isinstance(x, np.ndarray) else x, value)


def leaf_type(x: Any) -> Any:
    """(shape, dtype, is weak) of numbers and arrays; anything else is its own type."""
    if not is_numeric(x):
        return x
    dtype = np.dtype(bool) if isinstance(x, bool) else jnp.result_type(x)
    is_python_number = isinstance(x, (int, float)) and not isinstance(x, np.generic)  # also JAX's subclasses of these
    # A bool gives way to every other dtype, weak or not.
    return jnp.shape(x), dtype, dtype != np.dtype(bool) and getattr(x, "weak_type", is_python_number)


def leaf_types(tree: Tree) -> list[Any]:
    """Shapes and dtypes; weakness does not count."""
    return [leaf_type(x)[:2] for x in jax.tree.leaves(tree)]


def same_leaves(a: Tree, b: Tree) -> bool:
    """Whether two trees are one, leaf by leaf the same objects."""
    xs, ys = jax.tree.flatten(a), jax.tree.flatten(b)
    return xs[1] == ys[1] and all(x is y for x, y in zip(xs[0], ys[0], strict=True))


def settle_leaf(x: Any, entry: Any) -> Any:
    """A leaf as a loop or branch leaves it that was entered with another; raises where it cannot go on as that."""
    if not (is_numeric(x) and is_numeric(entry)):
        if is_numeric(x) or is_numeric(entry) or x != entry:
            raise CarryTypeError("another object")
        return x
    (shape, dtype, weak), (shape_before, dtype_before, weak_before) = leaf_type(x), leaf_type(entry)
    if shape != shape_before:
        raise CarryTypeError("another shape")
    if dtype != dtype_before:
        gives_way = weak_before and jnp.promote_types(dtype_before, dtype) == dtype
        if not gives_way:
            raise CarryTypeError("another dtype")
        return jnp.asarray(x, dtype)
    return x if weak_before or not weak else jnp.asarray(x, dtype)


def settle(value: Tree, entry: Tree) -> Tree:
    leaves, treedef = jax.tree.flatten(value)
    entries, treedef_before = jax.tree.flatten(entry)
    if treedef != treedef_before:
        raise CarryTypeError("another structure")
    return jax.tree.unflatten(treedef, [settle_leaf(x, e) for x, e in zip(leaves, entries, strict=True)])


def unsettle(settled: Tree, left: Tree) -> Tree:
    """The final value of a loop: as weak as its last step's value, unless its dtype was promoted."""
    return jax.tree.map(lambda s, x: x if is_numeric(x) and leaf_type(s)[1] == leaf_type(x)[1] else s, settled, left)


def strengthens(value: Tree, entry: Tree) -> bool:
    """Whether some weak leaf has become strong."""
    pairs = zip(jax.tree.leaves(value), jax.tree.leaves(entry), strict=True)
    return any(is_numeric(x) and leaf_type(e)[2] and not leaf_type(x)[2] for x, e in pairs)


def as_weak(x: Any) -> Any:
    """The value with a weak type."""
    weak = jnp.full(jnp.shape(x), np.zeros((), jnp.result_type(x)).item())
    return jax.lax.cond(True, lambda: x, lambda: weak)


def join_leaves(leaves: Sequence[Any]) -> Any:
    """The common type of branches: the promoted dtype, and whether it is weak."""
    if not all(is_numeric(x) for x in leaves):
        if any(is_numeric(x) or x != leaves[0] for x in leaves):
            raise CarryTypeError("branches differ")
        return leaves[0]
    types = [leaf_type(x) for x in leaves]
    strong = {dtype for _, dtype, weak in types if not weak}
    dtype = functools.reduce(jnp.promote_types, strong or {dtype for _, dtype, _ in types})
    for shape, own, weak in types:
        fits = own == dtype or (weak and jnp.promote_types(own, dtype) == dtype)
        if shape != types[0][0] or not fits:
            raise CarryTypeError("branches differ")
    return dtype, types[0][2] and all(own == dtype for _, own, _ in types)


def join(values: Sequence[Tree], chosen: int) -> Tree:
    """The value of the branch taken, with the type that all branches agree on."""
    flat = [jax.tree.flatten(v) for v in values]
    if any(treedef != flat[0][1] for _, treedef in flat):
        raise CarryTypeError("branches differ")
    leaves = []
    for column in zip(*(leaves for leaves, _ in flat), strict=True):
        x, joined = column[chosen], join_leaves(column)
        if is_numeric(x):
            dtype, weak = joined
            x = jnp.array(x, dtype)  # a copy: a branch's write is a write, whichever branch is taken
            x = as_weak(x) if weak else x
        leaves.append(x)
    return jax.tree.unflatten(flat[0][1], leaves)


def take(tree: Tree, i: int, axis: int = 0) -> Tree:
    return jax.tree.map(lambda x: jnp.take(x, i, axis), tree)


def stack(trees: Sequence[Tree], axis: int = 0) -> Tree:
    return jax.tree.map(lambda *xs: jnp.stack([jnp.asarray(x) for x in xs], axis), *trees)
