"""The children of Python objects: the one description that all code that looks into objects relies on.

`states`, paths and filters, `values`, the comparison of layers by `stack` and the keys of static arguments all
use `children`. A place that it does not list is invisible to all of them.
"""

from __future__ import annotations

import collections
import contextvars
import enum
import functools
import gc
import inspect
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, TypeVar

import jax
import numpy as np

from .. import _jax, _states

T = TypeVar("T")
Children = Iterator[tuple[str, Any]]

# -- objects without children ---------------------------------------------------------------------------------------

IMMUTABLE = frozenset([str, bytes, int, float, complex, bool, type(None), type(...), range, slice, _jax.ArrayImpl])
ATOMS = (str, bytes, int, float, complex, np.generic, np.dtype, np.ufunc, jax.Array)
ATOMS += (types.CodeType, types.FrameType, types.TracebackType, types.GetSetDescriptorType)
ATOMS += (types.MemberDescriptorType, types.WrapperDescriptorType, types.MethodDescriptorType)
_BUILTIN = frozenset([types.BuiltinFunctionType, types.MethodWrapperType])
WEAK = (weakref.ref, weakref.WeakSet, weakref.WeakKeyDictionary, weakref.WeakValueDictionary)
CLOSED = frozenset("jax jaxlib numpy threading logging".split())
"""Libraries whose objects hold no objects of the user, except the functions that they wrap."""


def has_parts(obj: Any) -> bool:
    """Whether an object can hold another one. True for states and Refs."""
    cls = type(obj)
    if cls in IMMUTABLE:
        return False
    if cls is np.ndarray:
        return obj.dtype.hasobject
    if cls in _BUILTIN:
        return _self_of(obj) is not None
    try:
        is_atom = isinstance(obj, ATOMS)
    except Exception:  # a proxy without its object, such as one of a module that is imported lazily
        return False
    if is_atom:
        # A string or number of a user's subclass may have attributes; a Ref is a JAX array and a state.
        return _states.is_array_state(obj) if isinstance(obj, jax.Array) else hasattr(obj, "__dict__")
    return True


def module_of(fun: types.FunctionType) -> str:
    """The module whose variables a function reads. Its ``__module__`` may be copied from a function that it wraps."""
    name = fun.__globals__.get("__name__") or ""
    module = sys.modules.get(name)
    # A doctest runs in a copy of its module's variables: its definitions are the user's, as in a script.
    return name if module is None or vars(module) is fun.__globals__ else "__main__"


def _self_of(method: Any) -> Any:
    """The object that a method written in C is bound to: a list, for its ``append``."""
    bound = getattr(method, "__self__", None)
    return None if isinstance(bound, (type, types.ModuleType)) else bound


def package_of(module: Any) -> str:
    return module.partition(".")[0] if isinstance(module, str) else ""


@functools.lru_cache(maxsize=4096)
def is_base(module: str) -> bool:
    """Whether a module belongs to Python, JAX, NumPy, this package or a library of states: these read no states of a
    user.
    """
    package = package_of(module)
    if package in sys.stdlib_module_names or package in ("jax", "jaxlib", "numpy", "scipy", "optax", "statetx"):
        return True
    return _file_of(module).startswith(_states.library_folders())


@functools.lru_cache(maxsize=4096)
def is_installed(module: str) -> bool:
    file = _file_of(module)
    return "site-packages" in file or "dist-packages" in file


def _file_of(module: str) -> str:
    loaded = sys.modules.get(module) or sys.modules.get(package_of(module))
    return getattr(loaded, "__file__", None) or ""


def by_class(fun: Callable[[type], T]) -> Callable[[type], T]:
    """Cache a function's results by class, for as long as the class lives. The results must not refer to the class."""
    cache: weakref.WeakKeyDictionary[type, T] = weakref.WeakKeyDictionary()

    @functools.wraps(fun)
    def cached(cls: type) -> T:
        if cls not in cache:
            cache[cls] = fun(cls)
        return cache[cls]

    return cached


# -- the children of an object ---------------------------------------------------------------------------------------


def children(obj: Any) -> Children:
    """The objects that an object holds, each with its part of a path; "" if it adds nothing to the path.

    Not included: a class's attributes (`class_children`), the variables that a function reads (`global_children`), weak
    references (`weak_children`).
    """
    # By exact type first: nearly all objects of a walk are containers and functions of Python.
    lister = _EXACT.get(type(obj)) or _lister_for(type(obj))
    return lister(obj)


@by_class
def _lister_for(cls: type) -> Callable[[Any], Children]:
    """`children` for the instances of a class that is not in `_EXACT`. The result must not refer to the class: see
    `by_class`.
    """
    if issubclass(cls, (type, *WEAK)):
        return _nothing
    if issubclass(cls, np.ndarray):
        items = _entries
    elif package_of(cls.__module__) in CLOSED:
        return _wrapped
    elif issubclass(cls, Mapping):
        items = _items
    elif issubclass(cls, (list, tuple, collections.deque)):
        items = _sequence
    elif issubclass(cls, Set):
        items = _set
    elif issubclass(cls, functools.partial):
        items = _partial
    else:
        return attributes

    def lister(obj: Any) -> Children:
        yield from items(obj)
        yield from attributes(obj)

    return lister


def _nothing(obj: Any) -> Children:
    return iter(())


def _items(obj: Mapping) -> Children:
    for i, (key, value) in enumerate(list(obj.items())):
        yield _key(key, i), value
        if type(key) not in IMMUTABLE:
            yield f"keys.{i}", key


def _key(key: Any, i: int) -> str:
    if type(key) is str:
        return key
    # The text of other objects may contain their address, which differs in the next run.
    return str(key) if isinstance(key, (str, bytes, int, float, bool, type(None), tuple, enum.Enum)) else str(i)


def _sequence(obj: Iterable) -> Children:
    items = list(obj)
    fields = getattr(obj, "_fields", ()) if isinstance(obj, tuple) else ()
    names = fields if len(fields) == len(items) else map(str, range(len(items)))
    yield from zip(names, items, strict=True)


def _partial(obj: functools.partial) -> Children:
    yield "", obj.func
    yield from named_arguments(obj.func, obj.args, obj.keywords)


def _set(obj: Set) -> Children:
    yield from set_items(obj)[0]


def _entries(obj: np.ndarray) -> Children:
    if obj.dtype.hasobject:
        for index, entry in np.ndenumerate(obj):
            content = entry.item() if isinstance(entry, np.void) else entry
            yield ".".join(map(str, index)), content


def set_items(obj: Set) -> tuple[list[tuple[str, Any]], bool]:
    """The items of a set that can hold objects, and whether names and types distinguish all of them.

    A set has no order. Its items are labeled by the names of states and the types of objects; equal labels are
    numbered, in an order that is valid in this process only.
    """
    labeled = []
    for item in list(obj):
        if has_parts(item):
            kind = _states.kind_of(item)
            name = kind.name_of(item) if kind is not None else getattr(item, "__qualname__", None)
            label: str = name if isinstance(name, str) else type(item).__name__
            labeled.append((label, "" if kind is None else kind.site_of(item), item))

    # Without the item, which need not be comparable. The sort is stable, so equal labels keep the set's own order.
    labeled.sort(key=lambda entry: entry[:2])
    counts: collections.Counter[str] = collections.Counter()
    items = []
    for label, _, item in labeled:
        counts[label] += 1
        items.append((label if counts[label] == 1 else f"{label}#{counts[label]}", item))
    return items, len(counts) == len(items)


def _method(obj: types.MethodType) -> Children:
    yield "", obj.__self__
    yield "", obj.__func__


def _builtin(obj: Any) -> Children:
    yield "", _self_of(obj)


def _function(fun: types.FunctionType) -> Children:
    if "__wrapped__" in fun.__dict__:  # first, since paths in it are the user's
        yield "", fun.__dict__["__wrapped__"]
        if _states.jitted(fun) is not None:  # the rest is its cache, which holds the states of earlier calls
            return
    for name, cell in zip(fun.__code__.co_freevars, fun.__closure__ or (), strict=True):
        # These variables hold the bound object or the wrapped function: the path is ``w``, not ``self.w``.
        key = "" if name in ("self", "fun", "__class__") else name
        yield from ((key, content) for _, content in _cell(cell))
    defaults = fun.__defaults__ or ()
    names = fun.__code__.co_varnames[fun.__code__.co_argcount - len(defaults) : fun.__code__.co_argcount]
    yield from zip(names, defaults, strict=True)
    yield from (fun.__kwdefaults__ or {}).items()
    yield from [(_NAMELESS.get(name, name), content) for name, content in fun.__dict__.items()]


def _cell(cell: types.CellType) -> Children:
    try:
        yield "", cell.cell_contents
    except ValueError:  # an empty cell
        return


def attributes(obj: Any) -> Children:
    """Slots and attributes; for an object without either, the children that a registered pytree declares."""
    slots = _slots(type(obj))
    for depth, name in slots:
        try:
            # By the descriptor: `getattr` may call the user's ``__getattr__``, and finds only the first of two slots
            # of one name.
            content = _jax.patches.members(type(obj).__mro__[depth])[name].__get__(obj)
        except AttributeError:  # not set
            continue
        yield _NAMELESS.get(name, name), content

    namespace = getattr(obj, "__dict__", None)
    if isinstance(namespace, Mapping):
        if "__wrapped__" in namespace:
            # The other attributes of statetx's wrappers are private: they do not belong to the function.
            is_statetx = package_of(type(obj).__module__) == "statetx"
            namespace = {"__wrapped__": namespace["__wrapped__"]} if is_statetx else _wrapped_first(namespace)
        yield from [(_NAMELESS.get(name, name), content) for name, content in namespace.items()]
    # Last, since flattening runs code of the class.
    elif not slots and jax.tree_util.default_registry.flatten_one_level(obj) is not None:
        leaves, _ = jax.tree_util.tree_flatten_with_path(obj, is_leaf=lambda x: x is not obj)
        yield from ((jax.tree_util.keystr(keys, simple=True), child) for keys, child in leaves)


def _wrapped_first(namespace: Mapping[str, Any]) -> dict[str, Any]:
    return {"__wrapped__": namespace["__wrapped__"], **namespace}


_NAMELESS: dict[str, str] = dict.fromkeys(("__wrapped__", "__func__", "fget", "fset", "fdel"), "") | {
    "_value_": "value",
    "_raw_value": "",  # of an nnx.Variable that holds a Ref: its path is the Variable's
}


def _wrapped(obj: Any) -> Children:
    """The functions that an object of JAX wraps: a jitted function, or one with a derivative rule."""
    namespace = getattr(obj, "__dict__", None)
    if not isinstance(namespace, dict) or "__wrapped__" not in namespace:
        return
    for name, content in list(namespace.items()):
        if name == "__wrapped__":
            yield "", content
        elif isinstance(content, types.FunctionType) and not is_base(module_of(content)):
            yield "", content


@by_class
def _slots(cls: type) -> tuple[tuple[int, str], ...]:
    """The slots of a class in the order of definition, as index of the base in the MRO and mangled name."""
    slots: list[tuple[int, str]] = []
    for depth, base in enumerate(cls.__mro__):
        if base is functools.partial:  # `_partial` gives its parts better names
            continue
        defined = _jax.patches.members(base)
        members = [n for n, v in defined.items() if isinstance(v, types.MemberDescriptorType) and n != "__dict__"]
        declared = vars(base).get("__slots__", ())
        names = [declared] if isinstance(declared, str) else list(declared) if isinstance(declared, Iterable) else []
        names = [_mangled(base, n) for n in names if isinstance(n, str)]
        order = [n for n in names if n in members] + [n for n in members if n not in names]
        slots += [(depth, n) for n in order]
    return tuple(slots)


def _mangled(cls: type, name: str) -> str:
    is_private = name.startswith("__") and not name.endswith("__")
    return f"_{cls.__name__.lstrip('_')}{name}" if is_private and cls.__name__.strip("_") else name


_EXACT: dict[type, Callable[[Any], Children]] = {
    dict: _items,
    list: _sequence,
    tuple: _sequence,
    set: _set,
    frozenset: _set,
    types.FunctionType: _function,
    types.MethodType: _method,
    types.BuiltinFunctionType: _builtin,
    types.MethodWrapperType: _builtin,
    types.CellType: _cell,
    types.ModuleType: _nothing,
}
_CONTAINERS = (dict, list, tuple, set, frozenset, collections.deque, np.ndarray, functools.partial)


def extras(state: Any, kind: _states.Kind) -> Children:
    """The objects that a state holds beside its value: metadata, attributes of a subclass."""
    if _states.is_array_state(state):
        return
    if hasattr(state, "get_metadata"):
        yield from list(dict(state.get_metadata()).items())
        return
    yield from list((getattr(state, "metadata", None) or {}).items())
    namespace = getattr(state, "__dict__", None) or {}
    yield from [(name, content) for name, content in namespace.items() if name not in kind.bookkeeping]
    for depth, name in _slots(type(state)):
        if name not in kind.bookkeeping:
            try:
                yield name, vars(type(state).__mro__[depth])[name].__get__(state)
            except AttributeError:
                continue


def weak_children(obj: Any) -> Children:
    """Weak references, the value of a context variable in this context, and the options of a transform."""
    if isinstance(obj, weakref.ref):
        yield "", obj()
    elif isinstance(obj, weakref.WeakSet):
        yield from set_items(obj)[0]
    elif isinstance(obj, (weakref.WeakKeyDictionary, weakref.WeakValueDictionary)):
        yield from _items(obj)
    elif isinstance(obj, contextvars.ContextVar):
        yield "", obj.get(None)
    elif is_wrapper(obj) and package_of(type(obj).__module__) == "statetx":
        yield "_options", vars(obj).get("_options")


def is_wrapper(obj: Any) -> bool:
    """Whether an object has its own ``__wrapped__``; an instance of a class that wraps another class does not."""
    return "__wrapped__" in getattr(obj, "__dict__", ())


def referents(obj: Any) -> Children:
    """The objects that the garbage collector sees in an opaque object, without names."""
    if is_opaque(type(obj)) and package_of(type(obj).__module__) not in CLOSED and not isinstance(obj, WEAK):
        yield from ((HIDDEN, x) for x in gc.get_referents(obj) if not isinstance(x, (type, types.ModuleType)))


HIDDEN = "?"
"""The part of a path for a place in an iterator, a cache or another object whose contents have no names."""


@by_class
def is_opaque(cls: type) -> bool:
    """Whether an instance may hold more than its attributes and items, since the class is not written in Python."""
    if package_of(cls.__module__) in CLOSED:
        return True
    return any(_is_foreign(base) for base in cls.__mro__ if base not in _TRANSPARENT)


def _is_foreign(cls: type) -> bool:
    """Whether a class was not made by a class statement."""
    # A type of C may hold references that no attribute shows. Types of C extensions are heap types in part, but
    # construct by a ``__new__`` in C, which a class statement never makes.
    return bool(cls.__flags__ & _IMMUTABLE) or isinstance(vars(cls).get("__new__"), types.BuiltinFunctionType)


_IMMUTABLE = 1 << 8  # Py_TPFLAGS_IMMUTABLETYPE
_TRANSPARENT = frozenset([*_EXACT, *_CONTAINERS, collections.defaultdict, collections.OrderedDict, object, type])
_TRANSPARENT |= {str, bytes, int, float, complex, bool, property, staticmethod, classmethod, types.SimpleNamespace}
_TRANSPARENT |= {types.MappingProxyType, type({}.items()), type({}.keys()), type({}.values())}
_TRANSPARENT |= {threading.local, weakref.ref}


@by_class
def is_remote(cls: type) -> bool:
    """Whether an instance may refer to more than its children."""
    return is_opaque(cls) or issubclass(cls, WEAK) or package_of(cls.__module__) == "statetx"


def named_arguments(fun: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Arguments by the names of their parameters; "" for ``self``."""
    try:
        names = list(inspect.signature(fun).parameters)
    except (TypeError, ValueError):
        names = []
    names += [str(i) for i in range(len(names), len(args))]
    return [("" if name == "self" else name, x) for name, x in (*zip(names, args, strict=False), *kwargs.items())]
