"""Classes with some methods replaced, and objects that become instances of such a class.

A transform of a callable object shall not hide the object: libraries look for its states, ask for its type and set its
attributes. So the result is a *twin*: an instance of a subclass that has the same ``__dict__``. What is written to one is
there in the other.
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

_CLASS = "<the subclass>"  # stands in a pickle for a class that cannot be imported


def make_subclass(cls: type, methods: dict[str, Any], maker: Callable[..., type], *args: Any) -> type:
    """A subclass with these methods, of the same name; ``maker(*args)`` makes it again when an instance is unpickled."""

    def reduce(self: Any, protocol: Any) -> Any:
        made = super(subclass, self).__reduce_ex__(protocol)
        if isinstance(made, str) or _is_importable(subclass):
            return made
        parts = [_CLASS if x is type(self) else x for x in (made[0], *made[1])]
        return (_rebuild, (maker, args, parts), *made[2:])

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


def _is_importable(cls: type) -> bool:
    found: Any = sys.modules.get(cls.__module__)
    for part in cls.__qualname__.split("."):
        found = getattr(found, part, None)
    return found is cls


def _rebuild(maker: Callable[..., type], args: tuple, parts: list[Any]) -> Any:
    subclass = maker(*args)
    reconstruct: Any
    reconstruct, *rest = [subclass if x == _CLASS and type(x) is str else x for x in parts]
    made = reconstruct(*rest)
    return made if isinstance(made, subclass) else twin(made, subclass)  # a class may name itself when it is pickled


# -- twins -----------------------------------------------------------------------------------------------------

_uses: weakref.WeakKeyDictionary[type, Hashable] = weakref.WeakKeyDictionary()


def subclass_for(cls: type, use: Hashable, make: Callable[[], type]) -> type:
    """The subclass that was made for this use before, as long as it is alive: objects of one class stay of one class."""
    for subclass in cls.__subclasses__():
        if _uses.get(subclass) == use:
            return subclass
    subclass = make()
    _uses[subclass] = use
    return subclass


def is_object(fun: Any) -> bool:
    """Whether a callable is an object with attributes rather than a function, in whatever form."""
    if not callable(fun) or isinstance(fun, (type, functools.partial)):
        return False
    if isinstance(type(fun).__call__, (types.WrapperDescriptorType, types.MethodDescriptorType)):
        return False  # a function of Python's or of an extension
    return "__wrapped__" not in getattr(fun, "__dict__", ()) and _states.kind_of(fun) is None


def has_twins(cls: type) -> bool:
    """Whether instances of a class are nothing but their ``__dict__``: what slots or a list hold cannot be shared.

    One that is finalised would be so twice.
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
    """An instance of a class with the very attributes of an object of one of its bases, or of a subclass."""
    made = object.__new__(cls)
    object.__setattr__(made, "__dict__", vars(obj))
    return made


def _register_like(subclass: type, cls: type) -> None:
    """Make a subclass a pytree if the class is one; libraries that register all subclasses have done so."""
    if _is_leaf(cls) or not _is_leaf(subclass):
        return

    def flatten(made: Any) -> tuple[list, Any]:
        whole = twin(made, cls)
        children, treedef = jax.tree_util.tree_flatten_with_path(whole, is_leaf=lambda x: x is not whole)
        return [(keys[0], child) for keys, child in children], treedef

    def unflatten(treedef: Any, children: Any) -> Any:
        return twin(jax.tree.unflatten(treedef, children), subclass)

    jax.tree_util.register_pytree_with_keys(subclass, flatten, unflatten)


def _is_leaf(cls: type) -> bool:
    """Whether JAX takes instances for leaves, which it knows by their type."""
    return jax.tree_util.all_leaves([object.__new__(cls)])
