"""Sharing a run of the user's Python between calls that look alike: what ``share_traces=`` asks for.

The table of structures shares all that comes after the user's Python; what is left is that Python. A `Sight` of a call
is what a walk from its function and its arguments meets: types of objects, attributes, flags and code, the types of
arrays and of what states hold, and which of them are the same object. A call that looks like an earlier one takes its
equations from it, with its own arrays and states in the places of those.

What the walk does not see must not matter to the function; that is what the user promises. It does not see variables of
other modules than the function's own, the entries of arrays that have more than one, and files, clocks and the like. Where
it meets an object whose contents nobody can compare, nothing is shared.
"""

from __future__ import annotations

import collections
import dis
import enum
import functools
import threading
import types
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Any, NamedTuple, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from . import _compat, _registry
from ._jaxpr import Body
from ._lift import Input, Outcome, Wrapper
from ._paths import global_names, own_globals
from ._registry import Effect
from ._tree import ARRAY, Identity, Partition, freeze, partition
from .kinds.ref import KIND as REF

_LARGEST = 1 << 16  # bytes of a NumPy array that is compared by its content
_PLAIN = (str, bytes, bool, int, float, complex, type(None), type(...), range, slice, enum.Enum, frozenset)
_PLAIN += (np.generic, np.dtype, types.CodeType, types.ModuleType, TypeVar, ParamSpec)
# Their classes and functions are taken as they are; they hold nothing of the user's that changes.
_LIBRARIES = frozenset("builtins jax jaxlib numpy flax brainstate statetx optax equinox haiku typing abc enum".split())
_LIBRARIES |= frozenset("collections functools dataclasses contextlib types operator math threading weakref".split())
_OPERATIONS = frozenset("builtins jax jaxlib numpy operator".split())
_BOOKKEEPING = frozenset("__module__ __dict__ __weakref__ __doc__ __qualname__ __annotations__ __slots__".split())
_BOOKKEEPING |= frozenset("__firstlineno__ __static_attributes__ __abstractmethods__ _abc_impl __parameters__".split())
_BOOKKEEPING |= frozenset("__orig_bases__ __dataclass_fields__ __dataclass_params__ __match_args__".split())
_DESCRIPTORS = (types.MemberDescriptorType, types.GetSetDescriptorType, types.WrapperDescriptorType)
_DESCRIPTORS += (types.MethodDescriptorType, types.ClassMethodDescriptorType)


class _Unseen(Exception):
    """The walk met something that cannot be compared."""


class Sight:
    """What a walk from a call meets.

    Attributes:
        key: equal for calls that look alike; None where that cannot be told.
        things: the states and arrays that were met, in order.
    """

    def __init__(self, fun: Callable, others: Partition, avals: Sequence[Any], settings: Hashable):
        self.things: list[Any] = []
        self._parts: list[Hashable] = []
        self._seen: dict[int, int] = {}
        self._keep: list[Any] = []  # objects made on the way must outlive the walk, or their ids are used again
        self._module = own_globals(fun)
        self.key: Hashable = None
        try:
            for obj in (*others.static, fun):
                self._look(obj)
            key = (settings, _registry.modes(), _compat.trace_context(), others.treedef, others.mask, tuple(avals))
            key = (*key, tuple(self._parts))
            hash(key)
        except Exception:  # whatever an object of the user's raises when it is looked at
            return
        self.key = key

    def find(self, obj: Any) -> int | None:
        """The place of a state or array among the `things`."""
        return next((n for n, thing in enumerate(self.things) if thing is obj), None)

    # What is not named here is unseen: a function that reaches it shares nothing.

    def _look(self, obj: Any) -> None:
        parts, cls = self._parts, type(obj)
        if cls in _EXACT:
            parts += (cls, obj)
            return
        if cls not in _COMMON and isinstance(obj, _PLAIN):
            parts.append(freeze(obj))
            return
        number = self._seen.get(id(obj))
        if number is not None:
            parts += (_AGAIN, number)
            return
        self._seen[id(obj)] = len(self._seen)
        self._keep.append(obj)
        look = _COMMON.get(cls)
        if look is not None:
            look(self, obj)
        else:
            self._look_at_other(obj)

    def _look_at_other(self, obj: Any) -> None:
        parts = self._parts
        kind = _registry.kind_of(obj)
        if kind is REF:
            raise _Unseen
        if kind is not None:
            self._look_at_state(obj, kind)
        elif isinstance(obj, jax.Array):
            # An array of one entry steers Python: a flag, a count.
            content = np.asarray(obj).tobytes() if not isinstance(obj, _compat.Tracer) and _is_scalar(obj) else None
            parts.append((_compat.abstract(obj), content))
            self.things.append(obj)
        elif isinstance(obj, np.ndarray):
            if obj.nbytes > _LARGEST or obj.dtype.hasobject:
                raise _Unseen
            parts.append(freeze(obj))
        elif isinstance(obj, type):
            self._look_at_class(obj)
        elif isinstance(obj, _compat.TraceState):
            parts.append(type(obj))  # where flax.nnx made a module; never in the trace that the call will be run in
        elif isinstance(obj, functools.partial):
            parts.append(type(obj))
            self._look_at_all([obj.func, list(obj.args), obj.keywords, vars(obj)])
        elif isinstance(obj, Wrapper):
            parts += (type(obj), obj.plain_options)
            self._look(obj.__wrapped__)
            self._look_at_held({k: v for k, v in vars(obj).items() if k not in _own_names(type(obj))})
            if obj.plain_options is None:
                self._look_at_dict(obj._options)
        elif isinstance(obj, (property, staticmethod, classmethod, functools.cached_property)):
            parts.append(type(obj))
            names = ("fget", "fset", "__func__", "func")
            self._look_at_all([getattr(obj, name) for name in names if getattr(obj, name, None) is not None])
        elif callable(obj) and type(obj).__module__.partition(".")[0] in _OPERATIONS:
            parts.append(Identity(obj))  # an operation of JAX's or NumPy's, or a function that was jitted
            if isinstance(getattr(obj, "__wrapped__", None), types.FunctionType):
                self._look(obj.__wrapped__)
        else:
            self._look_at_object(obj)

    def _look_at_all(self, objs: Collection[Any]) -> None:
        self._parts.append(len(objs))
        for obj in objs:
            self._look(obj)

    def _look_at_held(self, objs: Any) -> None:
        """At a list, tuple or dict that belongs to one object and is empty most times."""
        if not objs:
            self._parts.append(None)
        elif isinstance(objs, dict):
            self._look_at_dict(objs)
        else:
            self._look_at_sequence(objs)

    def _look_at_sequence(self, objs: list | tuple) -> None:
        self._parts.append(type(objs))
        self._look_at_all(objs)

    def _look_at_dict(self, obj: dict) -> None:
        self._parts += (dict, *[k if type(k) is str else freeze(k) for k in obj])
        self._look_at_all(obj.values())

    def _look_at_method(self, obj: types.MethodType) -> None:
        self._parts.append(types.MethodType)
        self._look(obj.__self__)
        self._look(obj.__func__)

    def _look_at_state(self, state: Any, kind: Any) -> None:
        leaves, part = partition(kind.get(state))
        if part is ARRAY:
            self._parts += (ARRAY, _compat.abstract(leaves[0]))
        else:
            self._parts += (part.treedef, part.mask, freeze(part.static), *[_compat.abstract(x) for x in leaves])
        self.things.append(state)
        if hasattr(state, "get_metadata"):
            self._look(dict(state.get_metadata()))
        else:
            self._look(getattr(state, "metadata", None))
            self._look_at_attributes(state, kind.bookkeeping)
        self._look(kind.name_of(state))
        self._look(type(state))

    def _look_at_function(self, fun: types.FunctionType) -> None:
        # What a function wraps, it closes over, if it calls it.
        attributes = {k: v for k, v in vars(fun).items() if k != "__wrapped__"}
        values = fun.__globals__ if fun.__globals__ is self._module else {}
        used = {n: values[n] for n in global_names(fun.__code__) if n in values}
        self._parts += (fun.__code__, fun.__name__)
        for held in (fun.__defaults__, fun.__kwdefaults__, fun.__closure__, attributes, used):
            self._look_at_held(held)

    def _look_at_cell(self, cell: types.CellType) -> None:
        self._parts.append(types.CellType)
        self._look(cell.cell_contents if _is_filled(cell) else _Unseen)

    def _look_at_class(self, cls: type) -> None:
        self._parts.append(Identity(cls))
        for base in cls.__mro__:
            if not _is_of_library(base):
                held = {k: v for k, v in vars(base).items() if k not in _BOOKKEEPING and type(v) not in _DESCRIPTORS}
                self._look_at_dict(held)

    def _look_at_object(self, obj: Any) -> None:
        self._look(type(obj))
        known = False
        if isinstance(obj, dict):
            self._look_at_dict(obj)
            known = True
        elif isinstance(obj, (list, tuple, collections.deque)):
            self._look_at_all(list(obj))
            known = True
        elif isinstance(obj, set):
            self._parts.append(freeze(obj))
            known = True
        self._look_at_attributes(obj)
        # One of a class that is not Python's has contents that nobody sees.
        own = [c for c in type(obj).__mro__ if c is not object and not c.__flags__ & _HEAP_TYPE]
        if not known and own:
            raise _Unseen

    def _look_at_attributes(self, obj: Any, skip: Collection[str] = ()) -> None:
        for cls in type(obj).__mro__:
            slots = cls.__dict__.get("__slots__", ())
            for slot in (slots,) if isinstance(slots, str) else slots:
                if slot in skip:
                    continue
                is_mangled = slot.startswith("__") and not slot.endswith("__")
                name = f"_{cls.__name__.lstrip('_')}{slot}" if is_mangled else slot
                if name not in ("__dict__", "__weakref__") and hasattr(obj, name):
                    self._parts.append(name)
                    self._look(getattr(obj, name))
        attributes = getattr(obj, "__dict__", None)
        if attributes is not None:  # objects may share it
            self._look({k: v for k, v in attributes.items() if k not in skip} if skip else attributes)


# What is met most, without asking what it is an instance of; of other types are states, arrays and the user's objects.
_COMMON: dict[type, Callable[[Sight, Any], None]] = {
    dict: Sight._look_at_dict,
    list: Sight._look_at_sequence,
    tuple: Sight._look_at_sequence,
    type: Sight._look_at_class,
    types.FunctionType: Sight._look_at_function,
    types.MethodType: Sight._look_at_method,
    types.CellType: Sight._look_at_cell,
}
_EXACT = frozenset([str, bytes, bool, int, type(None), types.CodeType])  # whose equality says all, with the type
_AGAIN = object()

_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: a class that was made by a class statement


def _is_of_library(cls: type) -> bool:
    return (getattr(cls, "__module__", None) or "").partition(".")[0] in _LIBRARIES


@functools.cache
def _own_names(cls: type[Wrapper]) -> frozenset[str]:
    """Attributes of a transformed function that are not the user's: those that methods assign, and what stands for the function."""
    functions = [f for base in cls.__mro__ for f in vars(base).values() if isinstance(f, types.FunctionType)]
    assigned = [i.argval for f in functions for i in dis.get_instructions(f) if i.opname == "STORE_ATTR"]
    return frozenset([*assigned, *functools.WRAPPER_ASSIGNMENTS, "__wrapped__", *dir(cls)])


def _is_scalar(x: jax.Array) -> bool:
    return x.size <= 1 and x.is_fully_addressable and not jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


class Recalled(NamedTuple):
    """A run for one call.

    Attributes:
        kept: takes operands, and then the call's arrays and the states' `values`.
    """

    kept: Callable
    operands: list[Any]
    values: list[Any]
    outcome: Outcome


class _Run:
    """One run of a function, without what was its own: states and arrays go by their places among the things."""

    def __init__(self, kept: Callable, operands: list, inputs: list, outcome: Outcome, places: list[int]):
        self.kept = kept
        self.operands = operands  # (place, None), or (None, value) of what is no thing
        self.inputs = inputs  # (place, kind, part, avals)
        self.out = outcome.out
        self.values = outcome.values
        self.effects = [(n, e.kind, e.site) for n, e in zip(places, outcome.effects, strict=True)]

    def of(self, things: Sequence[Any]) -> Recalled:
        """For these things; raises `_Unseen`, with nothing done, if a state is not what it looked like."""
        values: list[Any] = []
        for n, kind, part, avals in self.inputs:
            leaves, found = partition(kind.read(things[n]))
            now = [_compat.abstract(x) for x in leaves]
            if found.treedef != part.treedef or now != avals:
                raise _Unseen
            values += leaves
        operands = [x if n is None else things[n] for n, x in self.operands]
        effects = [Effect(things[n], kind, None, site, None, created=False) for n, kind, site in self.effects]
        return Recalled(self.kept, operands, values, Outcome(self.out, effects, self.values))


def remember(sight: Sight, after: Sight, run: Recalled, body: Body, inputs: Sequence[Input]) -> None:
    """Keep a run for calls that look like the one it was for, if all that it touched was met on the way.

    Args:
        after: a sight of the same call once it was run; one that the run has changed shares nothing.
    """
    kept, operands, _, outcome = run
    # A body that is like no other has a derivative rule of the user's, which reads what it likes whenever it runs.
    if sight.key is None or after.key != sight.key or body.key.is_unlike or any(e.created for e in outcome.effects):
        return
    places = [sight.find(e.state) for e in outcome.effects]
    reads = [(sight.find(i.state), i.kind, i.part, i.avals) for i in inputs]
    if None in places or any(n is None for n, *_ in reads):
        return
    static = [x for part in (outcome.out, *outcome.values) for x in part.static]
    if not all(isinstance(x, _PLAIN) for x in static):
        return  # an object, or an array, that belongs to this very call
    found = [(sight.find(x), x) for x in operands]
    # What Python made of an array that it could look at may be another thing for the next call.
    is_concrete = any(isinstance(x, jax.Array) and not isinstance(x, _compat.Tracer) for x in sight.things)
    if any(
        n is None and (isinstance(x, _compat.Tracer) or (is_concrete and isinstance(x, jax.Array))) for n, x in found
    ):
        return
    found = [(n, None if n is not None else x.copy() if isinstance(x, np.ndarray) else x) for n, x in found]
    runs.keep(sight.key, _Run(kept, found, reads, outcome, [n for n in places if n is not None]))


def recall(sight: Sight) -> Recalled | None:
    """The run of a call that looked like this one; None if there was none."""
    run = runs.find(sight.key)
    try:
        found = None if run is None else run.of(sight.things)
    except _Unseen:
        found = None
    runs.count(is_hit=found is not None)
    return found


class Runs:
    """Runs by the looks of their calls; bounded, least recently used first out; safe to share by threads.

    Attributes:
        hits, misses: how often a run was found and not found.
    """

    def __init__(self, size: int):
        self.size = size
        self.hits = 0
        self.misses = 0
        self._kept: collections.OrderedDict[Hashable, _Run] = collections.OrderedDict()
        self._lock = threading.RLock()

    def find(self, key: Hashable) -> _Run | None:
        with self._lock:
            found = None if key is None else self._kept.get(key)
            if found is not None:
                self._kept.move_to_end(key)
            return found

    def count(self, *, is_hit: bool) -> None:
        with self._lock:
            self.hits += is_hit
            self.misses += not is_hit

    def keep(self, key: Hashable, run: _Run) -> None:
        with self._lock:
            self._kept[key] = run
            while len(self._kept) > self.size:
                self._kept.popitem(last=False)

    def clear(self) -> None:
        with self._lock:
            self._kept.clear()
            self.hits = self.misses = 0

    def __len__(self) -> int:
        return len(self._kept)


runs = Runs(size=512)
