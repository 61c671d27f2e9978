"""The callables that transforms return, with the names of functions in messages.

A transform of a callable object must not hide the object: libraries look for its states, check its type and set its
attributes. So its result is a *twin*: an instance of a subclass that shares the object's ``__dict__``. An attribute
written to one is visible in the other.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
import weakref
from collections.abc import Callable, Hashable
from typing import Any, ClassVar, Concatenate, Generic, ParamSpec, Self, TypeVar, cast, overload

import jax
import numpy as np

from .. import _jax, _states
from .._errors import FunctionError, printable
from .._text import brief, type_str

P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R")
S = TypeVar("S")


class Wrapper(Generic[P, R]):
    """Base class of the callables that transforms return; each wraps a function or a callable object.

    It has the function's name, docstring and signature, binds to instances like a function, and is pickled by reference
    if a module variable or class attribute holds it, else by its parts. Attributes that it lacks are read from the
    wrapped function; if a callable object is wrapped, they are also written to the object.

    Attributes:
        maker: the public transform that makes it: ``class Named(Wrapper, made_by=named)``.
        defaults: the options of this transform with their defaults, from its signature.
    """

    __qualname__: str
    __text_signature__ = "(*args, **kwargs)"  # for `inspect.signature(follow_wrapped=False)`, to which it is a builtin
    _object: Any = None  # the wrapped callable object; set after `__init__`, whose attributes are the wrapper's
    maker: ClassVar[Any] = None
    defaults: ClassVar[dict[str, Any]] = {}

    def __init_subclass__(cls, made_by: Any = None, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "__call__" in vars(cls):
            cls.__call__ = _jax.api_boundary(cls.__call__)
        if made_by is not None:
            cls.maker, made_by.wrapper = made_by, cls
            cls.defaults = {p.name: p.default for p in [*inspect.signature(made_by).parameters.values()][1:]}

    def __init__(self, fun: Callable[..., Any], **options: Any):
        functools.update_wrapper(self, fun, updated=())
        self.__wrapped__ = fun
        # `abc.abstractmethod` above sets it, too.
        self.__isabstractmethod__ = getattr(fun, "__isabstractmethod__", False)
        self._options = self.defaults | options

    @classmethod
    def make(cls, fun: Any, options: dict[str, Any]) -> Any:
        """Apply the transform; `options` has all of them. Without a function, return a decorator."""
        return as_decorator(cls, fun, options)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # a protocol: Python must not find it on the wrapper because the function has it
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.__wrapped__, name)

    def __setattr__(self, name: str, value: Any) -> None:
        is_own = self._object is None or name in vars(self) or hasattr(type(self), name)
        object.__setattr__(self, name, value) if is_own else setattr(self._object, name, value)

    def __delattr__(self, name: str) -> None:
        is_own = self._object is None or name in vars(self)
        object.__delattr__(self, name) if is_own else delattr(self._object, name)

    # A type checker asks this also below `classmethod`, where the first parameter is a class, and below `staticmethod`.
    # Only a parameter without annotation takes an Ellipsis: `self` and `cls` have types.
    @overload
    def __get__(
        self: Wrapper[Concatenate[types.EllipsisType, Q], R], instance: Any, owner: type
    ) -> Callable[Concatenate[Any, Q], R]: ...
    @overload
    def __get__(self: Wrapper[Concatenate[type[S], Q], R], instance: S | None, owner: type[S]) -> Callable[Q, R]: ...
    @overload
    def __get__(self, instance: None, owner: type | None = None) -> Self: ...
    @overload
    def __get__(self: Wrapper[Concatenate[S, Q], R], instance: S, owner: type | None = None) -> Callable[Q, R]: ...
    @overload
    def __get__(self, instance: Any, owner: type | None = None) -> Self: ...
    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __reduce__(self) -> Any:
        if find_global(self) is self:
            return self.__qualname__
        return as_decorator, (type(self), self.__wrapped__, self._options)

    def __repr__(self) -> str:
        texts = {k: (brief(v), brief(self.defaults.get(k))) for k, v in self._options.items()}
        options = "".join(f", {k}={text}" for k, (text, default) in texts.items() if text != default)
        return f"statetx.{getattr(self.maker, '__name__', type(self).__name__)}({name_of(self.__wrapped__)}{options})"


def _is_call_of_object(fun: Any) -> bool:
    return isinstance(fun, types.MethodType) and getattr(fun.__func__, "__name__", "") == "__call__"


def name_of(fun: Any) -> str:
    """A short name for messages and traces; for the call of an object, the name of its class."""
    if _is_call_of_object(fun):
        return printable(type(fun.__self__).__name__)
    while isinstance(fun, functools.partial) or (isinstance(fun, Wrapper) and not hasattr(fun, "__qualname__")):
        fun = fun.func if isinstance(fun, functools.partial) else fun.__wrapped__
    return printable(getattr(fun, "__qualname__", None) or getattr(fun, "__name__", None) or type(fun).__name__)


def place_of(fun: Any) -> str:
    """The name of a function, with the line that defines it."""
    code = getattr(inspect.unwrap(fun), "__code__", None)
    return name_of(fun) + (printable(f" at {code.co_filename}:{code.co_firstlineno}") if code else "")


def short_name(name: str) -> str:
    """A function's qualified name without the enclosing functions."""
    return name.rpartition("<locals>.")[2]


def as_decorator(cls: type[Wrapper], fun: Any, options: dict[str, Any]) -> Any:
    """``cls(fun, **options)``, or a decorator if `fun` is None; a descriptor stays a descriptor of the same type."""
    decorate = functools.partial(as_decorator, cls, options=options)
    if fun is None:
        return decorate
    if isinstance(fun, (staticmethod, classmethod)):
        return type(fun)(decorate(fun.__func__))
    if isinstance(fun, property) and fun.fget is not None:
        return fun.getter(decorate(fun.fget))
    if isinstance(fun, functools.cached_property):
        return functools.cached_property(decorate(fun.func))
    if isinstance(fun, functools.partialmethod):
        return functools.partialmethod(decorate(fun.func), *fun.args, **fun.keywords)
    name = cls.maker.__name__
    if not callable(fun) and hasattr(type(fun), "__get__"):
        raise FunctionError(
            f"{name} needs a callable, and cannot be above @{type(fun).__name__}, which chooses a function when it is "
            f"looked up.\n"
            f"Fix: put @statetx.{name} below it, and below each decorator that registers a function with it."
        )
    check_callable(name, fun, "a callable", f"is it the result of a call? Write {name}(f)(x) in place of {name}(f(x))")
    wrapper = cls(cast(Any, fun), **options)
    if is_object(fun):
        wrapper._object = fun
    return wrapper


def check_callable(name: str, fun: Any, what: str = "", fix: str = "") -> None:
    """Raise if `fun` is not callable; by default for a function that takes a function and then its arguments.

    Raises:
        FunctionError: it is not.
    """
    if not callable(fun):
        is_array = isinstance(fun, (jax.Array, np.ndarray))
        got = f"an array, {type_str(fun)}" if is_array else f"{type(fun).__name__}: {brief(fun)}"
        fix = fix or f"is it the result of a call? Write {name}(f, x) in place of {name}(f(x))"
        raise FunctionError(
            f"{name} needs {what or 'a function first, and then its arguments'}, got {got}.\nFix: {fix}."
        )


# -- subclasses that replace methods, and twins ------------------------------------------------------------------------


_CLASS = "<the subclass>"  # replaces a class that cannot be imported in a pickle


def make_subclass(cls: type, methods: dict[str, Any], maker: Callable[..., type], *args: Any) -> type:
    """A subclass of the same name with these methods; ``maker(*args)`` makes it again when an instance is unpickled."""

    def reduce(self: Any, protocol: Any) -> Any:
        reduced = super(subclass, self).__reduce_ex__(protocol)
        if isinstance(reduced, str) or find_global(subclass) is subclass:
            return reduced
        parts = [_CLASS if x is type(self) else x for x in (reduced[0], *reduced[1])]
        return (_rebuild_object, (maker, args, parts), *reduced[2:])

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


def _rebuild_object(maker: Callable[..., type], args: tuple, parts: list[Any]) -> Any:
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
    if not callable(fun) or isinstance(fun, type):
        return False
    if isinstance(type(fun).__call__, types.WrapperDescriptorType):
        return False  # a function of Python or of an extension, or a partial
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
