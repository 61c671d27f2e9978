"""`CallReader`: turns the arguments of a call of a jitted function into one value, a `Call`.

A `Call` has the arrays, split into kept and donated ones, and the key to look up programs: the structure and types of
the arguments, the static ones, and the modes of the libraries of states.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
import types
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.tree_util import all_leaves, default_registry

from ... import _frames, _states
from ..._lift.signature import StaticArguments
from ..._objects.contents import attributes, has_parts
from ..._objects.paths import argument_names, holds_states
from ..._positions import replaced
from ..._tree import (
    as_array,
    container_key,
    flatten,
    freeze,
    is_argument,
    is_hashable,
    is_model,
    is_opaque,
    is_state_tree,
    partition,
)
from ..._typing import PyTree

_NONE, _STATES, _MODELS = range(3)  # opened objects
_IS_LEAF: tuple[Callable[[Any], bool], ...] = (
    _states.is_opaque,
    lambda x: is_opaque(x) and not is_state_tree(x),
    lambda x: is_opaque(x) and all_leaves([x]),
)
_MAX_LAYOUTS = 256  # combinations of structures and types of arguments; all are dropped at once


@dataclasses.dataclass(frozen=True, eq=False)
class _ArgumentLayout:
    """Indices of the dynamic, donated and static leaves of a call's arguments; cached by their structure and types.

    Attributes:
        key: the structure, and which leaves are dynamic.
        is_split: whether JAX's flattening splits an object that holds states, which must not be split.
        converts: whether some leaf must be converted to an array.
        static, donated, kept: indices of the leaves.
        is_plain: whether JAX can take all leaves unchanged and none is donated.
        opened: as of a `CallReader`.
    """

    treedef: Any
    key: Hashable
    is_split: bool
    converts: bool
    static: list[int]
    donated: list[int]
    kept: list[int]
    is_plain: bool
    opened: int


@dataclasses.dataclass(slots=True, eq=False)
class Call:
    """The arguments of one call, split into leaves.

    Attributes:
        args, kwargs: as the user gave them.
        key: the call's key in the cache.
        kept, donated: the dynamic leaves.
        is_direct: whether JAX can take the arguments unchanged.
        operand: the operand for JAX: the pair ``(args, kwargs)`` if `is_direct`, else the kept leaves.
        modes: settings of the libraries of states.
    """

    args: tuple
    kwargs: dict[str, Any]
    key: tuple[Hashable, ...]
    kept: list[Any]
    donated: list[Any]
    is_direct: bool
    operand: PyTree
    modes: Hashable
    _leaves: list[Any]
    _layout: _ArgumentLayout
    reader: CallReader

    @property
    def arrays(self) -> list[Any]:
        """The dynamic leaves: kept ones, then donated ones."""
        return [*self.kept, *self.donated]

    def with_arrays(self, arrays: Sequence[Any]) -> tuple[tuple, dict[str, Any]]:
        """The user's arguments with other `arrays`."""
        return self.with_dynamic(*self.dynamic_with(arrays))

    def dynamic_with(self, arrays: Sequence[Any]) -> tuple[tuple, dict[str, Any]]:
        """The user's arguments that are not static, with other `arrays`."""
        leaves = replaced(self._leaves, (*self._layout.kept, *self._layout.donated), arrays)
        return jax.tree.unflatten(self._layout.treedef, leaves)

    def with_dynamic(self, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """The user's arguments with others in the place of those that are not static."""
        return self.reader.static.split(self.args, self.kwargs)[2](args, kwargs)

    @property
    def dynamic(self) -> tuple[tuple, dict[str, Any]]:
        """The user's arguments that are not static."""
        return self.reader.static.split(self.args, self.kwargs)[:2]

    def opened_states(self) -> list[Any]:
        """The states in the arguments that are arrays to the program."""
        return [x for x in self.flatten_to_states(self.dynamic)[0] if self.is_opened(x)]

    @property
    def opens_models(self) -> bool:
        """Whether models in the arguments are trees of arrays to the program."""
        return self._layout.opened == _MODELS

    def is_leaf(self, x: Any) -> bool:
        """Whether an object in the arguments is known by its identity; as the call was read."""
        return _IS_LEAF[self._layout.opened](x)

    def flatten_to_states(self, args: PyTree) -> tuple[list[Any], Any]:
        """The leaves of arguments, of which states are some, and the structure."""
        return jax.tree.flatten(args, lambda x: self.is_leaf(x) or is_state_tree(x))

    def is_opened(self, x: Any) -> bool:
        """Whether a leaf is a state that is a tree of arrays to the program."""
        return is_state_tree(x) and not self.is_leaf(x)

    def needs_identity(self) -> Reread:
        """The exception to raise if the function needs to know more objects by their identity: it will from now on."""
        self.reader.opening.open_less_than(self._layout.opened)
        return Reread()

    def open_models(self) -> None:
        """Open models from now on if the call, which is to be staged, has others than an earlier one, of equal
        structure: it is staged once for all of them.

        Raises:
            Reread: that is so.
        """
        if self._layout.opened != _STATES:
            return
        models = [x for x in jax.tree.leaves(self.dynamic, is_leaf=self.is_leaf) if is_model(x)]
        if models and not any(all_leaves([x]) or _refers_to_itself(x) for x in models):
            self.reader.opening.note_models(self.key[0], models)

    def merged(self, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
        """Arguments in place of the dynamic ones, with the call's static ones; None if their number or names differ."""
        own_args, own_kwargs, merge = self.reader.static.split(self.args, self.kwargs)
        return merge(args, kwargs) if (len(args), {*kwargs}) == (len(own_args), {*own_kwargs}) else None

    def names(self) -> list[str]:
        """The names of `arrays` in Python, for profilers and messages."""
        static = self.reader.static
        dynamic = [n for n, is_static in enumerate(static.mask(len(self.args))) if not is_static]
        name = argument_names(self.reader.fun, self.args, dynamic)
        split = static.split(self.args, self.kwargs)[:2]
        leaves = jax.tree_util.tree_flatten_with_path(split, is_leaf=self.is_leaf)[0]
        names = [name(keys) for keys, _ in leaves]
        return [names[n] for n in (*self._layout.kept, *self._layout.donated)]


class Reread(Exception):
    """The arguments of a call are to be read again: more or fewer of the objects in them are opened."""


def _dead() -> None:
    """In place of a weak reference to an object that allows none: as if it was gone."""


class Opening:
    """What is opened in the arguments of a function, and why; for every `jit` of it with the same options.

    Attributes:
        opened: which objects with states are trees of arrays in the arguments, if JAX has them as pytrees, as in
            `jax.jit`: states by themselves; models too, if other ones come in further calls; or none. Other objects,
            and those that a function needs so, are known by their identity, and cost nothing to look up.
    """

    def __init__(self) -> None:
        self.opened, self._most_opened = _STATES, _MODELS
        self._opened_inside = _STATES
        self._seen: dict[Hashable, list[Callable[[], Any]]] = {}

    def open_less_than(self, opened: int) -> None:
        """Know more objects by their identity from now on."""
        self.opened = self._most_opened = max(min(self._most_opened, opened - 1), _NONE)

    def now(self) -> int:
        """`opened`. Inside other transforms, which see what is touched, the states of models are read one by one."""
        return self.opened if _frames.current_frame() is None else min(self.opened, self._opened_inside)

    def is_for_several(self) -> bool:
        """Whether models are opened now, for no other reason than that several have come."""
        return self.now() == _MODELS != self._opened_inside

    def note_models(self, key: Hashable, models: Sequence[Any]) -> None:
        """Note the models of a call that is to be staged; `key` of the call.

        Raises:
            Reread: one has further arrays, which may be others in a later call; or an earlier call had others of equal
                structure.
        """
        if self._most_opened != _MODELS:
            return
        is_state = lambda x: _states.kind_of(x) is not None
        if any(map(is_argument, jax.tree.leaves(models, is_leaf=is_state))):
            self.opened = self._opened_inside = _MODELS
            raise Reread
        if _frames.current_frame() is not None or self.opened == _MODELS:
            return
        if len(self._seen) >= _MAX_LAYOUTS:
            self._seen.clear()
        refs = [weakref.ref(x) if type(x).__weakrefoffset__ else _dead for x in models]
        seen = self._seen.setdefault((key, *map(jax.tree.structure, models)), refs)
        if any(ref() is not x for ref, x in zip(seen, models, strict=True)):
            self.opened = _MODELS
            raise Reread


class CallReader:
    """Reads the calls of a function.

    Args:
        fun: the function.
        options: of `jit`.
        opening: what to open in its arguments.
        programs_of: returns the programs for calls like one.

    Raises:
        StaticArgumentError: an option names an argument that the function does not have, or one that is both static and
            donated.
    """

    def __init__(
        self, fun: Callable, options: dict[str, Any], opening: Opening, programs_of: Callable[[Call], Sequence[Any]]
    ):
        self.fun = fun
        self.opening, self._programs_of = opening, programs_of
        self.static = StaticArguments(fun, options["static_argnums"], options["static_argnames"])
        self.donated = StaticArguments(fun, options["donate_argnums"], options["donate_argnames"], "donate")
        self.static.refuse_overlap(self.donated)
        self._layouts: dict[Hashable, _ArgumentLayout] = {}

    def read_to_run(self, args: tuple, kwargs: dict[str, Any]) -> Call:
        """Read a call; models with a program of their own, which runs sooner than one for all, are not opened."""
        if self.opening.is_for_several():
            call = self._read(args, kwargs, _STATES)
            if self._programs_of(call):
                return call
        return self.read(args, kwargs)

    def read(self, args: tuple, kwargs: dict[str, Any], *, like: Call | None = None) -> Call:
        """Read a call; with what another one has opened, if one is given."""
        return self._read(args, kwargs, self.opening.now() if like is None else like._layout.opened)

    def _read(self, args: tuple, kwargs: dict[str, Any], opened: int) -> Call:
        dyn_args, dyn_kwargs, _ = self.static.split(args, kwargs)
        # Flattening a module reads its states, which open frames would record, and does not end if the module is
        # cyclic. So modules are leaves inside a frame, and if an argument is one. For modules in other containers see
        # `_ArgumentLayout.is_split`.
        is_whole = _frames.current_frame() is not None or any(map(_states.is_opaque, (*args, *kwargs.values())))
        leaves, treedef = flatten((dyn_args, dyn_kwargs), _IS_LEAF[opened] if is_whole else None)
        types: tuple[Any, ...] = tuple(map(type, leaves))
        if np.ndarray in types:  # an array of text is static
            types += tuple([is_argument(x) for x in leaves if type(x) is np.ndarray])
        # Positions that count from the end depend on the number of arguments.
        key = (treedef, types, len(args) if self.donated else None, opened)
        layout = self._layouts.get(key)
        if layout is None:
            if len(self._layouts) >= _MAX_LAYOUTS:
                self._layouts.clear()
            layout = self._layouts[key] = self._layout(args, dyn_args, dyn_kwargs, opened)

        if layout.is_split:
            leaves = jax.tree.leaves((dyn_args, dyn_kwargs), is_leaf=_IS_LEAF[opened])
        if layout.converts:
            leaves = [as_array(x) for x in leaves]

        static: Hashable = ()
        if layout.static or self.static:
            flagged = zip(args, self.static.mask(len(args)), strict=True) if self.static else ()
            static = (
                tuple([static_key(leaves[i]) for i in layout.static]),
                tuple([static_key(a) for a, is_static in flagged if is_static]),
                tuple([(k, static_key(v)) for k, v in sorted(kwargs.items()) if k in self.static.names]),
            )
        modes = _states.modes()
        is_direct = layout.is_plain and not static
        kept = leaves if layout.is_plain else [leaves[i] for i in layout.kept]
        return Call(
            args,
            kwargs,
            key=(layout.key, static, modes),
            kept=kept,
            donated=[leaves[i] for i in layout.donated],
            is_direct=is_direct,
            operand=(args, kwargs) if is_direct else kept,
            modes=modes,
            _leaves=leaves,
            _layout=layout,
            reader=self,
        )

    def _layout(self, args: tuple, dyn_args: tuple, dyn_kwargs: dict[str, Any], opened: int) -> _ArgumentLayout:
        if opened == _MODELS and self._donates_models(args, dyn_args, dyn_kwargs):
            self.opening.open_less_than(opened)
            raise Reread
        arrays, part = partition((dyn_args, dyn_kwargs), is_argument, is_leaf=_IS_LEAF[opened])
        flags = (
            self._donation_flags(args, dyn_args, dyn_kwargs, _IS_LEAF[opened])
            if self.donated
            else [False] * len(part.mask)
        )
        dynamic = [i for i, is_dynamic in enumerate(part.mask) if is_dynamic]
        converts = any(as_array(x) is not x for x in arrays)
        is_split = not all_leaves([x for x in part.static if _states.is_opaque(x)])
        return _ArgumentLayout(
            part.treedef,
            (part.treedef, part.mask),  # not the static objects: they differ from call to call
            is_split,
            converts,
            static=[i for i, is_dynamic in enumerate(part.mask) if not is_dynamic],
            donated=[i for i in dynamic if flags[i]],
            kept=[i for i in dynamic if not flags[i]],
            is_plain=not (part.static or any(flags) or is_split or converts),
            opened=opened,
        )

    def _donates_models(self, args: tuple, dyn_args: tuple, dyn_kwargs: dict[str, Any]) -> bool:
        """Whether a donated argument holds a model, of which the states that the function writes are donated."""
        leaves = jax.tree.leaves((dyn_args, dyn_kwargs), is_leaf=_IS_LEAF[_STATES])
        flags = self._donation_flags(args, dyn_args, dyn_kwargs, _IS_LEAF[_STATES])
        return any(flag and is_model(x) for x, flag in zip(leaves, flags, strict=True))

    def _donation_flags(
        self, args: tuple, dyn_args: tuple, dyn_kwargs: dict[str, Any], is_leaf: Callable[[Any], bool]
    ) -> list[bool]:
        """Tell for each leaf of the arguments that are not static whether it is donated."""
        num_args = len(args)
        masks = zip(self.donated.mask(num_args), self.static.mask(num_args), strict=True)
        values = [*zip(dyn_args, [donated for donated, static in masks if not static], strict=True)]
        # JAX flattens dicts in the order of their keys.
        values += [(dyn_kwargs[key], key in self.donated.names) for key in sorted(dyn_kwargs)]
        return [flag for x, flag in values for _ in jax.tree.leaves(x, is_leaf=is_leaf)]


def _refers_to_itself(tree: PyTree, outer: frozenset[int] = frozenset()) -> bool:
    """Whether a pytree has no end."""
    level = None if is_state_tree(tree) else default_registry.flatten_one_level(tree)  # which reads a state
    outer |= {id(tree)}
    return level is not None and any(id(x) in outer or _refers_to_itself(x, outer) for x in level[0])


# -- static arguments --------------------------------------------------------------------------------------------------
#
# Programs are looked up by the static arguments of a call. A model among them must remain collectable, and its
# programs, with the states in them, must be dropped with it. So a key refers weakly to each object that it compares by
# identity.


def static_key(x: Any) -> Hashable:
    """`freeze` of a static argument, with weak references to objects that are compared by identity.

    An object is compared by identity if its class does not define equality, if it cannot be hashed, or if it holds
    states: two equal models are two keys. Whether an object with its own equality holds states is checked when the key
    is stored. An object that cannot be hashed and holds no states is a record that may change: its attributes must be
    the same, too.
    """
    return freeze(x, _stand_for)


def _stand_for(x: Any, records: tuple[int, ...] = ()) -> Hashable:
    """The key of a leaf; `records`: the ids of the records that it is an attribute of."""
    cls = type(x)
    if x is None or cls is str:
        return (cls, x)
    if cls is types.MethodType:  # a new object at each attribute access
        leaf_key = functools.partial(_stand_for, records=records)
        return (cls, freeze(x.__self__, leaf_key), freeze(x.__func__, leaf_key))
    if cls.__eq__ is object.__eq__:
        try:
            return (cls, weakref.ref(x))
        except TypeError:
            return HeldKey(x, by_identity=True)
    if _states.kind_of(x) is not None:  # whatever its attributes are
        return HeldKey(x, by_identity=True)
    if not is_hashable(x):
        key = container_key(x, functools.partial(_stand_for, records=records))
        if key is not None:
            return key
        return HeldKey(x, by_identity=True, attributes=_attributes(x, records))
    return HeldKey(x, by_identity=False) if has_parts(x) else (cls, x)


def _attributes(x: Any, records: tuple[int, ...]) -> Hashable:
    """A key for the attributes of an object; None if it is compared by identity alone, or is an attribute of its own
    attributes.
    """
    if not has_parts(x) or id(x) in records:
        return None
    return freeze(list(attributes(x)), functools.partial(_stand_for, records=(*records, id(x))))


class HeldKey:
    """The part of a key for an object. Holds it strongly until the key is stored, and longer only to compare by
    equality.

    Attributes:
        attributes: a key for the object's attributes, which must be the same; None if they need not.
    """

    __slots__ = ("_hash", "is_weak", "_obj", "attributes", "by_identity")

    def __init__(self, obj: Any, *, by_identity: bool, attributes: Hashable = None):
        self._obj = obj
        self.is_weak = False
        self.attributes = attributes
        self._hash = id(obj) if by_identity else hash(obj)
        self.by_identity = by_identity

    @property
    def obj(self) -> Any:
        """The object; None if it has been collected."""
        return self._obj() if self.is_weak else self._obj

    def settle(self) -> None:
        """Compare by identity alone if the object holds states; then hold it weakly, if its class allows that."""
        if self.attributes is not None or not self.by_identity:
            has_states = holds_states(self._obj)
            self.by_identity = self.by_identity or has_states
            self.attributes = None if has_states else self.attributes
        if self.by_identity:
            with contextlib.suppress(TypeError):  # it allows no weak references
                self._obj, self.is_weak = weakref.ref(self._obj), True

    @property
    def is_alone(self) -> bool:
        """Whether this holds the last reference to the object, whose class allows no weak references."""
        return self.by_identity and not self.is_weak and self._count() <= _ALONE

    def _count(self) -> int:
        return sys.getrefcount(self._obj)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if type(other) is not HeldKey:
            return False
        obj, other_obj = self.obj, other.obj
        if obj is other_obj:
            is_record = self.attributes is not None and other.attributes is not None
            return obj is not None and (not is_record or self.attributes == other.attributes)
        return not (self.by_identity or other.by_identity) and type(obj) is type(other_obj) and obj == other_obj


# References to an object that only a `HeldKey` refers to.
_ALONE = HeldKey(object(), by_identity=True)._count()


def parts(key: Any) -> Iterator[Any]:
    """The parts of a key that refer to objects: each a `HeldKey` or a weak reference."""
    if isinstance(key, (tuple, frozenset)):
        for part in key:
            yield from parts(part)
    elif isinstance(key, (HeldKey, weakref.ref)):
        yield key
        if isinstance(key, HeldKey):
            yield from parts(key.attributes)
