"""The registry of kinds. The kind of a library is loaded once the program has imported the library."""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable
from typing import Any

import numpy as np

from .. import _hooks, _jax
from .._atomic import locked, new_lock
from .protocol import Kind

_kinds: list[Kind] = []
modal: list[Kind] = []
"""The kinds of libraries with settings: see `Kind.mode`."""

_array_bases: tuple[type, ...] = ()
_unwatched_bases: tuple[type, ...] = ()
# Libraries whose states are watched as soon as the program has imported them, so that `import statetx` imports neither.
pending = tuple(_hooks.foreign_kinds)  # never changed in place: other threads may be iterating over it
_kinds_lock = new_lock()


def register_kind(kind: Kind) -> None:
    global _array_bases, _unwatched_bases
    _kinds.append(kind)
    if type(kind).mode is not Kind.mode:
        modal.append(kind)
    if kind.is_array:
        _array_bases = (*_array_bases, kind.base)
    if not kind.is_watched:
        _unwatched_bases = (*_unwatched_bases, kind.base)


def kinds() -> list[Kind]:
    """The kinds of every library that the program has imported by now."""
    if pending:
        load_pending()
    return _kinds


def load_pending() -> None:
    for library in pending:
        module = sys.modules.get(library)
        # A library that is still being imported lacks the classes that the kind needs.
        if module is None or getattr(getattr(module, "__spec__", None), "_initializing", False):
            continue
        locked(_kinds_lock, _load, library)


def _load(library: str) -> None:
    global pending
    if library in pending:
        register_kind(_hooks.foreign_kinds[library]())
        pending = tuple(name for name in pending if name != library)


def kind_of(obj: Any) -> Kind | None:
    """The kind of a state; None for anything that is not a state."""
    for kind in kinds():
        if kind.owns(obj):
            return kind
    return None


def kind_of_state(state: Any) -> Kind:
    """The kind of an object that is a state."""
    kind = kind_of(state)
    assert kind is not None, f"{type(state).__name__} is not a state"
    return kind


def is_array_state(obj: Any) -> bool:
    """Whether an object is a state that is an array to JAX: see `Kind.is_array`."""
    return isinstance(obj, _array_bases)


def is_unwatched(obj: Any) -> bool:
    """Whether an object is a state whose reads and writes no frame sees: see `Kind.is_watched`."""
    return isinstance(obj, _unwatched_bases)


def is_opaque(obj: Any) -> bool:
    """Whether flattening a tree stops at this object: a state, or a module that holds states."""
    if type(obj) in _PLAIN:
        return False
    return any([kind.is_opaque(obj) for kind in kinds()])


# The most frequent types in trees, none of them opaque: a shortcut for `is_opaque`.
_PLAIN = frozenset([dict, list, tuple, type(None), bool, int, float, str, np.ndarray, _jax.ArrayImpl])


def class_options(cls: type) -> dict[str, Any]:
    """The keyword arguments that the class statement of a subclass needs: see `Kind.class_options`."""
    options: dict[str, Any] = {}
    for kind in kinds():
        options |= kind.class_options(cls)
    return options


def unjitted(fun: Any) -> Callable | None:
    """The user's function that the ``jit`` of a library of states has made `fun` of; None if none has."""
    found = (kind.unjitted(fun) for kind in kinds())
    return next((user for user in found if user is not None), None)


def jax_traced(traced: Any) -> Any:
    """JAX's traced function, of one that the ``jit`` of a library of states has traced; others are returned
    unchanged.
    """
    found = (kind.jax_traced(traced) for kind in kinds())
    return next((inner for inner in found if inner is not None), traced)


def holds_other_arrays(args: tuple) -> bool:
    """Whether arguments hold arrays that a library's ``jit`` makes inputs of, and that are no states."""
    return any(kind.holds_other_arrays(x) for kind in kinds() for x in args)


def modes() -> Hashable:
    """The settings of every library of states that a compiled program depends on."""
    kinds()
    return tuple([kind.mode() for kind in modal])
