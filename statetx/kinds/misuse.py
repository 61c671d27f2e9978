"""Errors for a state that is used in place of its value: ``h + 1``, ``jnp.tanh(h)``, ``if h:`` instead of ``h.value``.

Everything here but ``==`` runs only after such a mistake: special methods and attributes that `State` would otherwise
lack. States are equal only to themselves; a comparison with a number or an array raises, in either order.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import numbers
import sys
import sysconfig
import types
from typing import Any

import numpy as np

from .. import _jax, _states
from .._errors import StateAccessError, StateValueError
from .._text import brief, type_str
from .._tree import is_array

_OPERATORS = "add sub mul matmul truediv floordiv mod divmod pow lshift rshift and xor or".split()
_CONVERSIONS = "len getitem int float complex index round trunc floor ceil".split()
_OTHERS = ["neg", "pos", "abs", "invert", "lt", "le", "gt", "ge", *_CONVERSIONS]
_ATTRIBUTES = "shape dtype ndim size T at astype reshape ravel flatten item mean sum max min".split()


class NotAnArray:
    """Base of `State`: using a state as an array, a truth value or a container raises an error.

    The special methods are set below, so that type checkers still report such a use. There is no ``__iter__``: `iter`
    calls ``__getitem__``, and a state is not a ``collections.abc.Iterable``.
    """

    __slots__ = ()

    def __dir__(self) -> list[str]:
        """List attributes, but not the array attributes, which only raise an error."""
        attributes = getattr(self, "__dict__", {})
        absent = [name for name in _ATTRIBUTES if isinstance(inspect.getattr_static(type(self), name), _ArrayAttribute)]
        return sorted({*super().__dir__()} - ({*absent} - attributes.keys()))


def _refuse(state: Any, *args: Any, **options: Any) -> Any:
    del args, options
    raise StateValueError(_used_as_array(state))


def _refuse_in_jax(state: Any) -> Any:
    # Not a `TypeError`, which JAX would replace by an error about static_argnums.
    raise StateAccessError(_used_as_array(state))


def _refuse_conversion(state: Any, dtype: Any = None, copy: bool | None = None) -> Any:
    """``__array__``. NumPy asks every item of an array of objects, too, and then gives the dtype."""
    del copy
    if dtype != np.dtype(object):
        return _refuse(state)
    held = np.empty((), object)
    held[()] = state
    return held


def _equal(state: Any, other: Any) -> Any:
    """``==``: identity, as by default in Python. A string or None is compared, too: a list of names and states may be
    searched.
    """
    if not (isinstance(other, numbers.Number) or is_array(other)):
        return NotImplemented
    fix = f"Write {_name_in_caller(state)}.value."
    raise StateValueError(
        f"{_states.describe(state)} was compared with a value of type {type_str(other)}; a state is equal to itself "
        f"only. {fix}"
    )


def _refuse_item(state: Any, index: Any, value: Any) -> None:
    del value
    name = _name_in_caller(state)
    fix = f"Write {name}.value = {name}.value.at[{brief(index)}].set(...)."
    raise StateValueError(f"{_states.describe(state)} was assigned an item. {fix}")


def _refuse_truth(state: Any) -> bool:
    name = _name_in_caller(state)
    fix = f"Write {name}.value, or `{name} is not None` to ask whether there is a state."
    raise StateValueError(f"{_states.describe(state)} was used as a truth value. {fix}")


for _name in (*_OPERATORS, *(f"r{name}" for name in _OPERATORS), *_OTHERS):
    setattr(NotAnArray, f"__{_name}__", _refuse)
_METHODS = {
    "array": _refuse_conversion,
    "bool": _refuse_truth,
    "eq": _equal,  # set after the class was made, so that it keeps its ``__hash__``
    "jax_array": _refuse_in_jax,
    "setitem": _refuse_item,
}
for _name, _method in _METHODS.items():
    setattr(NotAnArray, f"__{_name}__", _method)


class _ArrayAttribute:
    """An attribute that arrays have and states lack. Not a data descriptor: a subclass of `State` may have an attribute
    of this name.
    """

    def __init__(self, name: str):
        self.name = name

    def __get__(self, state: Any, owner: type) -> Any:
        if state is None:
            raise AttributeError(f"type object {owner.__name__!r} has no attribute {self.name!r}")
        name = _name_in_caller(state)
        raise AttributeError(
            f"{_states.describe(state)} has no attribute {self.name!r}; its value has. Write {name}.value.{self.name}."
        )


class _KeyDimensions(_ArrayAttribute):
    """``ndim`` of a random state, the first attribute that `jax.random` asks a key for: JAX would replace an
    `AttributeError`.
    """

    def __get__(self, state: Any, owner: type) -> Any:
        return super().__get__(state, owner) if state is None else _refuse_in_jax(state)


def prepare(cls: type, random: type) -> None:
    """Let the attributes of arrays, and JAX, raise the error for a state and for a random state."""
    for name in _ATTRIBUTES:
        setattr(cls, name, _ArrayAttribute(name))
    random.ndim = _KeyDimensions("ndim")  # type: ignore[attr-defined]
    _jax.refuse_as_value(cls, _refuse_in_jax)


def _used_as_array(state: Any) -> str:
    name = _name_in_caller(state)
    fix = f"Write {name}.value."
    if _states.kind_of_state(state).is_random(state):
        fix = f"Write {name}.next() for a key, and {name}.value for the key that it holds."
    return f"{_states.describe(state)} was used as an array. {fix}"


# -- the name of a state in the user's code --------------------------------------------------------------------------


def _name_in_caller(state: Any) -> str:
    """The expression of the state in the nearest caller outside libraries: ``h``, ``self.w``,
    ``layers[0]``.
    """
    paths = sysconfig.get_paths()
    folders = (*_states.library_folders(), paths["stdlib"], paths["purelib"], paths["platlib"])
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(folders):
        frame = frame.f_back
    if frame is not None:
        for variables in (frame.f_locals, frame.f_globals):
            expression = _expression(state, variables)
            if expression:
                return expression
    return _states.kind_of_state(state).name_of(state) or "state"


def _expression(state: Any, variables: Any) -> str | None:
    """The expression for a state in these variables. It runs no code of the user's, who is about to see
    another error.
    """
    items = [(name, obj) for name, obj in list(variables.items()) if name.isidentifier()]
    for name, obj in items:
        if obj is state:
            return name

    # One level down, in the first few elements: attributes, and items of the built-in containers.
    for name, obj in items:
        if type(obj) is dict:
            for key, x in list(itertools.islice(obj.items(), _MAX_ITEMS)):
                if x is state:
                    return f"{name}[{brief(key)}]"
        elif type(obj) in (list, tuple):
            for i, x in enumerate(obj[:_MAX_ITEMS]):
                if x is state:
                    return f"{name}[{i}]"
        elif not isinstance(obj, (type, types.ModuleType)):
            with contextlib.suppress(AttributeError):
                for attribute, x in list(object.__getattribute__(obj, "__dict__").items()):
                    if x is state:
                        return f"{name}.{attribute}"
    return None


_MAX_ITEMS = 1000
