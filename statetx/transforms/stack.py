"""`stack`: layers of equal structure as one, whose states have an axis for the layers."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable, Iterator, Sequence, Set
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import _compat, _registry
from .._errors import StateValueError
from .._paths import as_predicate, children, states
from .._tree import is_array, is_array_or_number, partition, tree_type_str
from .._typing import Filter, PyTree
from ..kinds.ref import KIND as REF
from .scan import scan


def stack(
    layers: Callable[[], Any] | Sequence[Any], num: int | None = None, *, axis: int = 0, shared: Filter = False
) -> Stack:
    """Build layers and stack their states along an axis, so that a loop can go through them.

    A stack of a thousand layers is traced and compiled like one layer. Call it to apply the layers one after the
    other (by `scan`), or give it to `remat_scan` to do so in less memory.

    Args:
        layers: makes one layer (a class or function without arguments, called `num` times, so that each layer
            draws its own initial values), or a sequence of layers that are there already.
        num: how many to make.
        axis: where the states get the axis for the layers.
        shared: a filter for states that all layers have in common: the first layer's.

    Returns:
        A `Stack`. What it holds is the first layer, of which each state now has the values of all. A state that all
        layers share stays as it is, shared.

    Raises:
        StateValueError: the layers differ in structure, in the type of a state's value, or in a plain attribute, which
            could not differ between the turns of a loop; the message has the path and both values.

    Example:
        >>> import jax, jax.numpy as jnp, statetx
        >>> key = statetx.RngState(0)
        >>> class Layer:
        ...     def __init__(self):
        ...         self.w = statetx.Param(jax.random.normal(key.next(), (2, 2)))
        ...
        ...     def __call__(self, x):
        ...         return jnp.tanh(x @ self.w.value)
        >>> layers = statetx.stack(Layer, 3)
        >>> layers
        Stack(3 x Layer, axis=0)
        >>> {path: state.value.shape for path, state in statetx.states(layers).items()}
        {'w': (3, 2, 2)}
        >>> x = jnp.ones(2)
        >>> bool(jnp.allclose(layers(x), layers[2](layers[1](layers[0](x)))))
        True
    """
    if isinstance(axis, bool) or not isinstance(axis, int):
        raise TypeError(f"stack: axis must be an integer, got {axis!r}.")
    if callable(layers) and not isinstance(layers, (list, tuple)):
        if isinstance(num, bool) or not isinstance(num, int) or num < 1:
            raise ValueError(f"stack: say how many layers to make, a whole number of at least 1; got num={num!r}.")
        made = [layers() for _ in range(num)]
    else:
        made = list(layers)
        if not made or num not in (None, len(made)):
            raise ValueError(f"stack: num={num} disagrees with the {len(made)} layers given.")
    for i, layer in enumerate(made[1:], 1):
        _check_alike(made[0], layer, "", f"layer {i}", set())
    return Stack(made[0], len(made), axis, _stack_states(made, axis, as_predicate(shared)))


class Stack:
    """Layers as one; made by `stack`.

    Attributes:
        axis: of the states, along which the layers lie.

    ``len(layers)`` is their number, ``layers[i]`` a copy of one with states of its own, ``layers[a:b]`` a stack of
    copies, and iteration gives copies in order. `unstack` gives them all as a list.
    """

    def __init__(self, layer: Any, num: int, axis: int, stacked: Sequence[Any]):
        self.__wrapped__ = layer
        self.axis = axis
        self._num = num
        self._stacked = {id(state) for state in stacked}

    def __len__(self) -> int:
        return self._num

    def __getitem__(self, i: int | slice) -> Any:
        if isinstance(i, slice):
            return stack([self[j] for j in range(*i.indices(self._num))], axis=self.axis)
        if not -self._num <= i < self._num:
            raise IndexError(f"layer {i} of {self._num}")
        return self._copy(i % self._num)

    def __iter__(self) -> Iterator[Any]:
        return (self[i] for i in range(self._num))

    def __call__(self, carry: PyTree, *args: Any, **kwargs: Any) -> PyTree:
        """Apply the layers one after the other: ``carry = layer(carry, *args, **kwargs)``."""
        fun = self.__wrapped__
        body = lambda carry, _: (fun(carry, *args, **kwargs), None)  # noqa: E731
        return scan(body, carry, None, self._num, states={self.is_stacked: self.axis})[0]

    def is_stacked(self, path: str, state: Any) -> bool:
        """Whether a state has an axis for the layers: a filter for ``states=``."""
        return id(state) in self._stacked

    def __repr__(self) -> str:
        return f"Stack({self._num} x {type(self.__wrapped__).__name__}, axis={self.axis})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Stack:
        layer = copy.deepcopy(self.__wrapped__, memo)
        mine, new = states(self.__wrapped__), states(layer)
        return Stack(layer, self._num, self.axis, [new[p] for p, s in mine.items() if id(s) in self._stacked])

    def _copy(self, i: int) -> Any:
        found = states(self.__wrapped__)
        memo: dict[int, Any] = {}
        values = {}
        for path, state in found.items():
            value = _kind(state).read(state)
            if id(state) in self._stacked:
                values[path] = jax.tree.map(lambda x: jnp.take(x, i, self.axis) if is_array(x) else x, value)
            else:
                memo[id(state)] = state  # shared by all layers, and so by the copy
            memo |= {id(x): x for x in jax.tree.leaves(value)}
        layer = copy.deepcopy(self.__wrapped__, memo)
        copies = states(layer)
        for path, value in values.items():
            _kind(copies[path]).set(copies[path], value)
        return layer


def unstack(layers: Stack) -> list[Any]:
    """The layers of a stack, each with states of its own; later writes to one do not reach the other."""
    return list(layers)


def _kind(state: Any) -> Any:
    kind = _registry.kind_of(state)
    assert kind is not None
    return kind


def _stack_states(layers: list[Any], axis: int, shared: Callable[[str, Any], bool]) -> list[Any]:
    """Give the states of the first layer the values of all; returns those that got them."""
    found = [states(layer) for layer in layers]
    stacked, values = [], []
    for path, first in found[0].items():
        alike = [f[path] for f in found]
        if shared(path, first) or (len(layers) > 1 and all(state is first for state in alike)):
            continue
        if len({id(state) for state in alike}) != len(alike):
            raise StateValueError(
                f"stack: some layers share the state {path!r} and others do not. Fix: share it among all, or none."
            )
        kind = _kind(first)
        if kind is REF:
            raise StateValueError(f"stack: {path!r} is a jax.Ref, whose shape is fixed. Fix: use statetx.State for it.")
        stacked.append(first)
        values.append(_stack_values([kind.read(state) for state in alike], path, axis))
    for state, value in zip(stacked, values, strict=True):
        _kind(state).set(state, value)
    return stacked


def _stack_values(values: list[PyTree], path: str, axis: int) -> PyTree:
    parts = [partition(value, is_array_or_number) for value in values]
    leaves, part = parts[0]
    for i, (others, other) in enumerate(parts[1:], 1):
        same = other.treedef == part.treedef and other.mask == part.mask and other.static == part.static
        if not same or any(_type(a) != _type(b) for a, b in zip(leaves, others, strict=True)):
            raise StateValueError(
                f"stack: the layers' states {path!r} differ in type: layer 0 has {tree_type_str(values[0])}, layer {i} "
                f"{tree_type_str(values[i])}.\nFix: stack layers of the same sizes; keep others beside the stack."
            )
    return part.combine(
        [jnp.stack([jnp.asarray(x) for x in column], axis) for column in zip(*(p[0] for p in parts), strict=True)]
    )


def _type(x: Any) -> tuple:
    return jnp.shape(x), jnp.result_type(x)


_LABELS = frozenset({"name", "_name"})


def _check_alike(a: Any, b: Any, path: str, which: str, seen: set[int]) -> None:
    """Raise if what two layers hold besides states differs."""
    if a is b or id(a) in seen or path.rpartition(".")[2] in _LABELS:
        return
    seen.add(id(a))
    if type(a) is not type(b):
        raise _differs(path, which, type(a).__name__, type(b).__name__)
    if _registry.kind_of(a) is not None:
        return
    if is_array(a):
        if isinstance(a, _compat.Tracer) or a.shape != b.shape or not np.array_equal(a, b):
            raise _differs(path, which, f"{a}", f"{b}")
        return
    if isinstance(a, (str, bytes, int, float, complex, bool, type)):
        if a != b and not (a != a and b != b):
            raise _differs(path, which, repr(a), repr(b))
        return
    if isinstance(a, types.FunctionType) and a.__code__ is not b.__code__:
        raise _differs(path, which, repr(a), repr(b))
    if isinstance(a, types.ModuleType):
        return
    mine, theirs = dict(children(a)), dict(children(b))
    if not mine and (callable(a) or isinstance(a, (Set, np.dtype))) and a != b:
        raise _differs(path, which, repr(a), repr(b))
    if list(mine) != list(theirs):
        raise _differs(path, which, f"parts {', '.join(mine)}", f"parts {', '.join(theirs)}")
    for key, child in mine.items():
        _check_alike(child, theirs[key], f"{path}.{key}" if path and key else path or key, which, seen)


def _differs(path: str, which: str, a: str, b: str) -> StateValueError:
    return StateValueError(
        f"stack: the layers differ in {path or 'type'!r}, which is no state: {a} in layer 0 and {b} in {which}. One body "
        f"serves every turn of the loop, so that only states can differ.\n"
        f"Fix: make it a statetx.State (it is stacked then), or give it as an argument."
    )
