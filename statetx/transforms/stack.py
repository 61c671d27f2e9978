"""`stack`: combine layers of equal structure into one, whose states have an axis for the layers."""

from __future__ import annotations

import collections
import copy
import functools
import inspect
import operator
import threading
import types
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence, Set
from typing import Any, Generic, TypeVar, overload

import jax
import jax.numpy as jnp
import numpy as np

from .. import _jax, _states
from .._atomic import commit
from .._errors import StateValueError
from .._lift.wrapper import name_of, place_of, short_name
from .._objects.contents import attributes, children, extras, has_parts, is_opaque, is_wrapper, set_items, weak_children
from .._objects.paths import Paths, as_predicate, check_paths, states
from .._objects.walk import Walk, held_states
from .._text import brief, tree_type_str, type_str
from .._tree import (
    Identity,
    as_array,
    freeze,
    host_array,
    is_array,
    is_array_or_number,
    is_integer,
    partition,
    whole_number,
)
from .._typing import Filter, PyTree, public
from .scan import scan

T = TypeVar("T")


@_jax.api_boundary
def stack(
    layers: Callable[[], T] | Sequence[T], num: int | None = None, *, axis: int = 0, shared: Filter = False
) -> Stack[T]:
    """Build layers and stack their states along an axis, so that a loop can run over them.

    A stack of a thousand layers is traced and compiled like one layer. Call it to apply the layers one after the
    other (by `scan`), or give it to `remat_scan` to do so in less memory.

    Args:
        layers: a class or function without arguments that makes one layer (called `num` times, so that each layer
            draws its own initial values), or a sequence of existing layers. One object several times, as in
            ``[layer] * 3``, is one layer that is applied several times, as in a Python loop: the layers share all its
            states.
        num: number of layers to make.
        axis: position of the new axis in the states' arrays.
        shared: a filter for states that all layers share: the first layer's states are used.

    Returns:
        A `Stack`. It holds the first layer, whose states now have the stacked values of all layers. A state that all
        layers share already is left unchanged.

    State:
        Writes the states of the first layer; the other layers' are only read.

    Raises:
        StateValueError: the layers differ in structure, in the type of a state's value, or in a plain attribute, which
            cannot differ between the steps of a loop; the message has the path and both values.

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
    if not is_integer(axis):
        raise TypeError(f"stack: axis must be an integer, got {axis!r}.")
    if callable(layers) and not isinstance(layers, (list, tuple)):
        if not is_integer(num) or whole_number(num, 1) is None:
            raise ValueError(
                f"stack: num, the number of layers to make, must be an integer of at least 1 and below 2**31; got "
                f"num={brief(num)}.\n"
                f"Fix: stack({name_of(layers)}, 12) makes twelve layers; give layers that exist as a list."
            )
        _check_maker(layers)
        try:
            layer_list = [layers() for _ in range(num)]
        except TypeError as e:
            if held_states(layers) and not isinstance(layers, _FUNCTIONS):
                name = type(layers).__name__
                e.add_note(
                    f"stack called a {name} without arguments, to make a layer. If it is a layer itself: "
                    f"stack(lambda: {name}(...), {num})."
                )
            raise
    else:
        try:
            layer_list = list(layers)
        except TypeError:
            raise TypeError(
                f"stack: layers must be a function that makes a layer, with num, or a sequence of layers; got "
                f"{type(layers).__name__}."
            ) from None
        if not layer_list:
            raise ValueError(
                "stack: the sequence has no layers.\n"
                "Fix: give at least one layer, or a function that makes one, with num."
            )
        if num not in (None, len(layer_list)):
            raise ValueError(f"stack: num={num} disagrees with the {len(layer_list)} layers given.")
    partners = [_check_alike(layer_list[0], layer, f"layer {i}") for i, layer in enumerate(layer_list[1:], 1)]
    return Stack(layer_list[0], len(layer_list), axis, _stack_states(layer_list[0], partners, axis, shared))


_FUNCTIONS = (type, types.FunctionType, types.MethodType, functools.partial)


def _check_maker(make: Callable) -> None:
    """Refuse a function that cannot be called without arguments: a layer, or a class of layers with sizes."""
    try:
        signature = inspect.signature(make)
    except (TypeError, ValueError):  # of a builtin
        return
    try:
        signature.bind()
    except TypeError as e:
        is_layer = not isinstance(make, _FUNCTIONS)
        name = type(make).__name__ if is_layer else short_name(name_of(make))
        got = f"a {name}, which is a layer itself" if is_layer else name
        raise TypeError(
            f"stack: layers must be a function without arguments that makes one layer; got {got}: {e}.\n"
            f"Fix: stack(lambda: {name}(...), 12) makes twelve layers, each with its own initial values; give layers "
            f"that exist as a list."
        ) from None


@public
class Stack(Generic[T]):
    """Stacked layers; made by `stack`.

    Attributes:
        axis: the axis of the states' arrays along which the layers are stacked.

    ``len(layers)`` is the number of layers, ``layers[i]`` a copy of one layer with its own states, ``layers[a:b]`` a
    stack of copies; iteration yields copies in order. `unstack` returns a list of copies of all layers.
    """

    def __init__(self, layer: T, num: int, axis: int, stacked: Sequence[Any]):
        self.__wrapped__ = layer
        self.axis = axis
        self._num = num
        self._stacked = {id(state) for state in stacked}

    def __len__(self) -> int:
        return self._num

    @overload
    def __getitem__(self, i: int) -> T: ...
    @overload
    def __getitem__(self, i: slice) -> Stack[T]: ...
    def __getitem__(self, i: int | slice) -> T | Stack[T]:
        if isinstance(i, slice):
            copies = [self[j] for j in range(*i.indices(self._num))]
            if not copies:
                raise IndexError(f"no layer of {self._num} in layers[{_slice_str(i)}]; a stack has at least one")
            shared = {id(state) for state in states(self.__wrapped__).values()} - self._stacked
            return stack(copies, axis=self.axis, shared=lambda path, state: id(state) in shared)
        i = operator.index(i)
        if not -self._num <= i < self._num:
            raise IndexError(f"layer {i} of {self._num}")
        return self._copy(i % self._num)

    def __iter__(self) -> Iterator[T]:
        return (self[i] for i in range(self._num))

    def __call__(self, carry: PyTree, /, *args: Any, **kwargs: Any) -> PyTree:
        """Apply the layers one after the other: ``carry = layer(carry, *args, **kwargs)``."""
        fun: Any = self.__wrapped__
        body = lambda carry, _: (fun(carry, *args, **kwargs), None)
        return scan(body, carry, None, self._num, states={self.is_stacked: self.axis})[0]

    def is_stacked(self, path: str, state: Any) -> bool:
        """Whether a state has an axis for the layers: a filter for ``states=``."""
        return id(state) in self._stacked

    def __repr__(self) -> str:
        where = f"axis={self.axis}" if self._stacked else "no stacked states"
        return f"Stack({self._num} x {type(self.__wrapped__).__name__}, {where})"

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy or an unpickled layer has states with other ids, or the same ones: a module of brainstate shares them
        # with its copy.
        paths = [path for path, state in states(self.__wrapped__).items() if id(state) in self._stacked]
        return _restored, (self.__wrapped__, self._num, self.axis, paths)

    def _copy(self, i: int) -> T:
        states_by_path = states(self.__wrapped__)
        memo: dict[int, Any] = {}
        values = {}
        for path, state in states_by_path.items():
            value = _states.kind_of_state(state).read(state)
            if id(state) in self._stacked:
                values[path] = jax.tree.map(lambda x: jnp.take(x, i, self.axis) if is_array(x) else x, value)
            else:
                memo[id(state)] = state  # all layers share it, so the copy does, too
            memo |= {id(x): x for x in jax.tree.leaves(value)}  # arrays are replaced below: do not copy them

        layer = copy.deepcopy(self.__wrapped__, memo)
        shared_path = next((p for p, s in Paths(layer).items().items() if id(s) in self._stacked), None)
        if shared_path is not None:
            raise StateValueError(
                f"stack: cannot copy a layer: its copy would still refer to the stacked state {shared_path!r}, which "
                "is held weakly, in code, or by an object that copies itself, as a module of brainstate does without "
                "copying states of statetx.\n"
                "Fix: hold the state in an attribute of the layer only, and in modules of brainstate use states of "
                "brainstate."
            )

        copies = states(layer)
        stacked = [copies[path] for path in values]
        _annotate(stacked, [_states.kind_of_state(s).get(s) for s in stacked], self.axis, "delete_axis")
        commit([_states.kind_of_state(copies[path]).store(copies[path], value) for path, value in values.items()])
        return layer


def _restored(layer: Any, num: int, axis: int, stacked: Sequence[str]) -> Stack:
    states_by_path = states(layer)
    return Stack(layer, num, axis, [states_by_path[path] for path in stacked])


def _slice_str(i: slice) -> str:
    start, stop, step = ("" if n is None else str(n) for n in (i.start, i.stop, i.step))
    return f"{start}:{stop}" + (f":{step}" if step else "")


@_jax.api_boundary
def unstack(layers: Stack[T]) -> list[T]:
    """Return the layers of a stack as copies with their own states; later writes to a copy or to the stack are
    separate.
    """
    return list(layers)


def _stack_states(layer: Any, partners: list[dict[int, Any]], axis: int, shared: Filter) -> list[Any]:
    """Write the stacked values of all layers to the first layer's states; returns the stacked states.

    `partners`: for each other layer, its corresponding state by id of the first layer's state.
    """
    states_by_path = dict(Walk(follows_classes=False).held(layer, is_called=False))
    check_paths("stack: shared=", shared, lambda: states_by_path, "The first layer holds")
    is_shared = as_predicate(shared)
    held_ids = {id(state) for state in states_by_path.values()}
    foreign_states = [
        (n, i) for n, by_id in enumerate(partners, 1) for i, s in by_id.items() if i not in held_ids and i != id(s)
    ]
    for n, i in foreign_states:
        path = next(path for path, state in Paths(layer).items().items() if id(state) == i)
        raise StateValueError(
            f"stack: layer {n} refers to the state {path!r} without holding it, and the first layer refers to another "
            f"state there.\nFix: hold the state in an attribute of the layer, or let all layers refer to one state."
        )

    stacked, values = [], []
    for path, first in states_by_path.items():
        states_of_layers = [first, *(by_id.get(id(first), first) for by_id in partners)]
        if is_shared(path, first) or (len(states_of_layers) > 1 and all(state is first for state in states_of_layers)):
            continue
        if len({id(state) for state in states_of_layers}) != len(states_of_layers):
            raise StateValueError(
                f"stack: some layers share the state {path!r} and others do not. Fix: share it among all, or none."
            )
        kind = _states.kind_of_state(first)
        if _states.is_array_state(first):
            raise StateValueError(
                f"stack: {path!r} is a {kind.name}, whose shape is fixed. Fix: use statetx.State for it."
            )

        stacked.append(first)
        values.append(_stack_values([kind.read(state) for state in states_of_layers], path, axis))
    _annotate(stacked, values, axis, "insert_axis")  # first: it runs the user's hooks
    commit([_states.kind_of_state(state).store(state, value) for state, value in zip(stacked, values, strict=True)])
    return stacked


def _annotate(stacked: Sequence[Any], values: Sequence[PyTree], axis: int, change: str) -> None:
    """Update the axis metadata of states for the layer axis of `values`: `change` is ``"insert_axis"`` or
    ``"delete_axis"``.
    """
    for state, value in zip(stacked, values, strict=True):
        kind = _states.kind_of_state(state)
        leaves = jax.tree.leaves(value)
        getattr(kind, change)(state, axis if axis >= 0 or not leaves else axis + jnp.ndim(leaves[0]))


def _stack_values(values: list[PyTree], path: str, axis: int) -> PyTree:
    partitions = [partition(value, is_array_or_number) for value in values]
    leaves, part = partitions[0]
    for i, (other_leaves, second) in enumerate(partitions[1:], 1):
        is_same_structure = second.treedef == part.treedef and second.mask == part.mask and second.static == part.static
        if not is_same_structure or any(_type(a) != _type(b) for a, b in zip(leaves, other_leaves, strict=True)):
            raise StateValueError(
                f"stack: the layers' states {path!r} differ in type: layer 0 has {tree_type_str(values[0])}, layer {i} "
                f"{tree_type_str(values[i])}.\nFix: stack layers of the same sizes; keep others outside the stack."
            )
    for x in leaves:
        if not -jnp.ndim(x) - 1 <= axis <= jnp.ndim(x):
            raise StateValueError(
                f"stack: values {type_str(as_array(x))} of the state {path!r} cannot be stacked along axis {axis}.\n"
                f"Fix: give an axis from 0 to {jnp.ndim(x)}."
            )
    return part.combine(
        [
            jnp.stack([jnp.asarray(x) for x in leaf_of_layers], axis)
            for leaf_of_layers in zip(*(p[0] for p in partitions), strict=True)
        ]
    )


def _type(x: Any) -> tuple:
    return jnp.shape(x), jnp.result_type(x)


# -- are the layers alike --------------------------------------------------------------------------------------------
#
# The first layer's Python runs for all layers. So everything except states must be equal in two layers, and their
# states must correspond one to one. Opaque objects are compared by `==`. This errs towards refusing layers that are
# alike.

_LABELS = frozenset({"name", "_name"})  # may differ: they identify a layer
_INERT = (type(threading.Lock()), type(threading.RLock()))  # hold no data that a layer could compute with


def _check_alike(first: Any, second: Any, which: str) -> dict[int, Any]:
    """Raise if two layers differ in anything but states; returns the other's state by id of the first's."""
    partners: dict[int, Any] = {}
    path_of_partner: dict[int, str] = {}  # from id of the other's state to its path
    seen: set[tuple[int, int]] = set()
    alive: list[Any] = []  # objects made on access must outlive the comparison, since Python reuses their ids
    pending = [("", first, second)]
    while pending:
        path, a, b = pending.pop()
        is_label = path.rpartition(".")[2] in _LABELS
        if (id(a), id(b)) in seen or is_label or (a is b and not has_parts(a)):
            continue
        seen.add((id(a), id(b)))
        alive += (a, b)
        if type(a) is not type(b):
            same_name = type(a).__name__ == type(b).__name__
            raise _differs(path, which, *(_class_str(type(x)) if same_name else type(x).__name__ for x in (a, b)))

        kind = _states.kind_of(a)
        if kind is not None:
            if partners.setdefault(id(a), b) is not b or path_of_partner.setdefault(id(b), path) != path:
                raise _differs(path, which, "one state in several places", "several states there, or the reverse")
            children_a, children_b = list(extras(a, kind)), list(extras(b, kind))
        else:
            if a is not b:
                _check_content(a, b, path, which)
            children_a, children_b = _all_children(a), _all_children(b)

        if [key for key, _ in children_a] != [key for key, _ in children_b]:
            keys_a, keys_b = (", ".join(key for key, _ in items) or "none" for items in (children_a, children_b))
            raise _differs(path, which, f"parts {keys_a}", f"parts {keys_b}")
        # Reversed, so that the first difference in order of definition is the one that is reported.
        pairs = zip(children_a, children_b, strict=True)
        pending += [(f"{path}.{k}" if path and k else path or k, x, y) for (k, x), (_, y) in pairs][::-1]
    return partners


def _all_children(obj: Any) -> list[tuple[str, Any]]:
    if _is_array(obj):
        return list(attributes(obj)) if isinstance(obj, np.ndarray) else []
    return [*children(obj), *weak_children(obj)]


def _check_content(a: Any, b: Any, path: str, which: str) -> None:
    """Raise if two objects of one type differ in their own data, apart from their children."""
    if _is_array(a):
        is_known = not isinstance(a, _jax.Tracer) and a.shape == b.shape
        if not (
            is_known and np.array_equal(host_array(a), host_array(b), equal_nan=jnp.issubdtype(a.dtype, jnp.inexact))
        ):
            same_type = type_str(a) == type_str(b)
            raise _differs(
                path, which, *(f"{type_str(x)} with {'other ' * n * same_type}values" for n, x in enumerate((a, b)))
            )
    elif isinstance(a, Set) and not set_items(a)[1]:
        raise StateValueError(
            f"stack: the set {path!r} has several objects of one name or type, and no order that matches layer 0 with "
            f"{which}.\nFix: use a list or a dict, or give the states names."
        )
    elif _content(a) != _content(b):
        raise _differs(path, which, _text(a), _text(b))


def _content(obj: Any) -> Hashable:
    if isinstance(obj, types.FunctionType):
        return (Identity(obj.__code__), Identity(obj.__globals__))
    if isinstance(obj, (type, types.ModuleType)):
        return Identity(obj)
    if isinstance(obj, Mapping):
        return tuple([freeze(key) for key in obj if not has_parts(key)])
    if isinstance(obj, Set):
        return freeze(frozenset([freeze(item) for item in obj if not has_parts(item)]))
    if isinstance(obj, np.ndarray):
        return obj.shape
    if isinstance(obj, _INERT):
        return ()
    if isinstance(obj, (str, bytes, int, float, complex)) or (is_opaque(type(obj)) and not is_wrapper(obj)):
        return freeze(obj)
    return getattr(obj, "maxlen", None) if isinstance(obj, collections.deque) else ()


def _is_array(x: Any) -> bool:
    return isinstance(x, (jax.Array, np.generic)) or (isinstance(x, np.ndarray) and not x.dtype.hasobject)


def _text(x: Any) -> str:
    """A text for an object that is compared by identity or equality."""
    return place_of(x) if isinstance(x, types.FunctionType) else brief(x)


def _class_str(cls: type) -> str:
    """A class with its module and the line of its first method, which tell classes of one name apart."""
    method = next((x for x in vars(cls).values() if isinstance(x, types.FunctionType)), None)
    line = f" at {method.__code__.co_filename}:{method.__code__.co_firstlineno}" if method else ""
    return f"{cls.__module__}.{cls.__qualname__}{line}"


def _differs(path: str, which: str, a: str, b: str) -> StateValueError:
    if a == b:
        b = f"another {b}, which is not equal to it,"
    if path:
        what = f"{path!r}, which is not a state"
        fix = "make it a statetx.State, to be stacked, or give it as an argument, or make a stack"
    else:
        what, fix = "their type", "make a stack"
    return StateValueError(
        f"stack: the layers differ in {what}: {a} in layer 0 and {b} in {which}. Every step of the loop runs the same "
        f"body, so only states can differ.\nFix: {fix} for each kind of layer."
    )
