"""Subclasses that replace some methods of a class, and *twins* of objects as instances of such a subclass.

A transform of a callable object must not hide the object: libraries look for its states, check its type and set its
attributes. So the result is a *twin*: an instance of a subclass that shares the object's ``__dict__``. An attribute
written to one is visible in the other.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
import weakref
from collections.abc import Callable, Hashable
from typing import Any

import jax

from .. import _states

_CLASS = "<the subclass>"  # replaces a class that cannot be imported in a pickle


def make_subclass(cls: type, methods: dict[str, Any], maker: Callable[..., type], *args: Any) -> type:
    """A subclass of the same name with these methods; ``maker(*args)`` makes it again when an instance is unpickled."""

    def reduce(self: Any, protocol: Any) -> Any:
        reduced = super(subclass, self).__reduce_ex__(protocol)
        if isinstance(reduced, str) or find_global(subclass) is subclass:
            return reduced
        parts = [_CLASS if x is type(self) else x for x in (reduced[0], *reduced[1])]
        return (_rebuild, (maker, args, parts), *reduced[2:])

    namespace = {
        **methods,
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        "__reduce_ex__": reduce,
    }
    if "__slots__" in cls.__dict__:
        namespace["__slots__"] = ()
    subclass = type(cls)(cls.__name__, (cls,), namespace, **_states.class_options(cls))
    if has_twins(cls):
        _register_like(subclass, cls)
    return subclass


def find_global(obj: Any) -> Any:
    """The object that a class's, or function's, module holds under its qualified name."""
    value: Any = sys.modules.get(getattr(obj, "__module__", None) or "")
    for name in getattr(obj, "__qualname__", "<none>").split("."):
        value = getattr(value, name, None)
    return value


def _rebuild(maker: Callable[..., type], args: tuple, parts: list[Any]) -> Any:
    subclass = maker(*args)
    reconstruct: Any
    reconstruct, *arguments = [subclass if type(x) is str and x == _CLASS else x for x in parts]
    obj = reconstruct(*arguments)
    return (
        obj if isinstance(obj, subclass) else twin(obj, subclass)
    )  # a class's own `__reduce__` may name the class itself


# -- twins -----------------------------------------------------------------------------------------------------

_uses: weakref.WeakKeyDictionary[type, Hashable] = weakref.WeakKeyDictionary()


def subclass_for(cls: type, use: Hashable, make: Callable[[], type]) -> type:
    """The subclass for this use. It is cached while it is alive, so that all rematerialized objects of one class share
    one subclass.
    """
    for subclass in cls.__subclasses__():
        if _uses.get(subclass) == use:
            return subclass
    subclass = make()
    _uses[subclass] = use
    return subclass


def is_object(fun: Any) -> bool:
    """Whether a callable is an object with attributes rather than any form of function."""
    if not callable(fun) or isinstance(fun, (type, functools.partial)):
        return False
    if isinstance(type(fun).__call__, (types.WrapperDescriptorType, types.MethodDescriptorType)):
        return False  # a function of Python or of an extension
    return "__wrapped__" not in getattr(fun, "__dict__", ()) and _states.kind_of(fun) is None


def has_twins(cls: type) -> bool:
    """Whether instances of a class can have twins: their whole content must be in ``__dict__``, not in slots or a list.

    A class with ``__del__`` cannot: it would be finalized twice.
    """
    slots = [base.__dict__.get("__slots__", ()) for base in cls.__mro__]
    names = [name for s in slots for name in ((s,) if isinstance(s, str) else s)]
    has_slots = any(name not in ("__dict__", "__weakref__") for name in names)
    if has_slots or hasattr(cls, "__del__") or inspect.isabstract(cls):
        return False
    try:
        return hasattr(object.__new__(cls), "__dict__")
    except TypeError:
        return False


def twin(obj: Any, cls: type) -> Any:
    """An instance of `cls` that shares the ``__dict__`` of `obj`, an instance of a base or a subclass of `cls`."""
    instance = object.__new__(cls)
    object.__setattr__(instance, "__dict__", vars(obj))
    return instance


def _register_like(subclass: type, cls: type) -> None:
    """Register a subclass as a pytree if the class is one, unless the library has registered it already."""
    if _is_leaf(cls) or not _is_leaf(subclass):
        return

    # Flatten by the base class's own rule, one level only; its treedef is the aux data of the subclass.
    def flatten(obj: Any) -> tuple[list, Any]:
        base_obj = twin(obj, cls)
        children, treedef = jax.tree_util.tree_flatten_with_path(base_obj, is_leaf=lambda x: x is not base_obj)
        return [(keys[0], child) for keys, child in children], treedef

    def unflatten(treedef: Any, children: Any) -> Any:
        return twin(jax.tree.unflatten(treedef, children), subclass)

    jax.tree_util.register_pytree_with_keys(subclass, flatten, unflatten)


def _is_leaf(cls: type) -> bool:
    """Whether instances are leaves for JAX, which decides by their type."""
    return jax.tree_util.all_leaves([object.__new__(cls)])
