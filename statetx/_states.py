"""States of every library behind one protocol: `Kind`, the registry of kinds, parts of messages.

A *kind* of state (this package's, brainstate's, ...) is an object that implements `Kind`. The kind of a library is
loaded once the program has imported the library.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from types import FrameType
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from . import _hooks, _jax
from ._atomic import Store, commit, in_one, locked, new_lock
from ._errors import StateAccessError, StateValueError, printable
from ._text import short_tree_type_str


class Jitted(NamedTuple):
    """What a jitted function is made of: the user's function, with its static arguments by position and name."""

    fun: Callable
    static_argnums: Any
    static_argnames: Any


class Kind(Protocol):
    """The states of one library. `get` and `store` access the value without a report to any watcher.

    A method with a body is for most libraries; a kind overrides it where its library has rules of its own, or a faster
    way. A frame is a `_frames.Frame`, and an effect a `_frames.Effect`; both are above this module.
    """

    name: str
    folder: str
    """The folder of the library's source, with a separator at its end. Messages name the line that called into it."""

    base: type
    """The class of all its states."""

    bookkeeping: frozenset[str] = frozenset()
    """Names of a state's attributes that belong to the library, not to the user."""

    is_watched: bool = True
    """Whether frames see every read and write. The states of other kinds are found as constants of staged equations."""

    advances_when_read: bool = False
    """Whether a map advances a random state that it reads and does not write, as the library's own maps do."""

    is_array: bool = False
    """Whether the states are arrays to JAX: `vmap` maps them as arguments, `scan` slices them as ``xs``, their shape is
    fixed.
    """

    def owns(self, obj: Any) -> bool:
        return isinstance(obj, self.base)

    def is_opaque(self, obj: Any) -> bool:
        """Whether JAX must treat the object as a leaf: a state of this kind, or a container of such states."""
        return self.owns(obj)

    def get(self, state: Any) -> Any: ...

    def store(self, state: Any, value: Any) -> Store:
        """The store that gives the state this value."""
        ...

    def get_all(self, states: Sequence[Any]) -> list[Any]:
        return [self.get(state) for state in states]

    def set_all(self, states: Sequence[Any], values: Iterable[Any]) -> None:
        """Store a value in each state by one `commit`; raise if another thread owns one of them."""
        commit([self.store_all(states, values)])

    def store_all(self, states: Sequence[Any], values: Iterable[Any]) -> Store:
        """One store that gives each state its value."""
        return in_one([self.store(state, value) for state, value in zip(states, values, strict=True)])

    def operands(self, states: Sequence[Any]) -> list[Any]:
        """The values, for a program that keeps none of their arrays."""
        return self.get_all(states)

    def set_results(self, states: Sequence[Any], values: Iterable[Any]) -> None:
        """`set_all` of arrays that nothing else holds."""
        self.set_all(states, values)

    def store_results(self, states: Sequence[Any], values: Iterable[Any]) -> Store:
        """`store_all` of arrays that nothing else holds."""
        return self.store_all(states, values)

    def check_free(self, states: Sequence[Any]) -> None:
        """Raise if a call in another thread owns one of these states. Called where this thread has no open frame."""

    def read(self, state: Any) -> Any:
        """Read the value and report it to every watcher: open frames, and the library's own."""
        ...

    def write(self, state: Any, value: Any) -> None:
        """Assign a value as the library's users do."""
        ...

    def announce(self, effect: Any, live: bool) -> list[Store]:
        """Report a write to every watcher; return the stores that carry it out.

        `live`: the body has just run under the present watchers, which have already seen it write.
        """
        ...

    def invalidate(self, state: Any, reason: str, closing: Any) -> list[Store]:
        """Stores that remove the value of a state made in a call, and record the state as made in the enclosing frame.

        Reading the state raises until it is published or written. `closing`: the frame of the call, None if it is
        closed.
        """
        ...

    def is_invalidated(self, state: Any) -> bool:
        """Whether the value was removed, by `invalidate` or by the library."""
        ...

    def owner(self, state: Any) -> Any:
        """The innermost open frame that has acquired the state."""
        ...

    def set_owner(self, state: Any, frame: Any) -> Store:
        """The store that makes a frame the owner, so that other threads are refused; None: no owner."""
        ...

    def token(self, state: Any) -> object:
        """An object of this state alone, which does not keep it alive. Each call returns the same object."""
        return weakref.ref(state)

    def is_random(self, state: Any) -> bool:
        """Whether the state holds a random key that advances with every draw."""
        return False

    def split(self, key: Any, num: int) -> tuple[Any, Any]:
        """Split the key of a state into `num` keys, for examples or steps, and the key that the state keeps."""
        keys = jax.random.split(key, num + 1)
        return keys[1:], keys[0]

    def is_trainable(self, state: Any) -> bool:
        """Whether the library's class for weights says so: `Param`."""
        return False

    def name_of(self, state: Any) -> str | None:
        return None

    def site_of(self, state: Any) -> str: ...

    def open(self, frame: Any) -> list[Store]:
        return []

    def close(self, frame: Any) -> list[Store]:
        """Stores that undo `open`'s, and end whatever was opened after it and left open."""
        return []

    # -- of libraries that have these --

    def is_idle(self) -> bool:
        """Whether no watcher of the library is active in this thread."""
        return True

    def mode(self) -> Hashable:
        """The settings of the library that a compiled program depends on, as part of its key."""
        return ()

    def new(self, value: Any) -> Any:
        """A new state that holds an array, if `is_array`."""
        raise AssertionError(f"states of {self.name} are no arrays")

    def insert_axis(self, state: Any, axis: int) -> None:
        """Add metadata for a new, unsharded dimension of the value, such as its mesh axes."""

    def delete_axis(self, state: Any, axis: int) -> None:
        """Remove the metadata of a removed dimension."""

    def class_options(self, cls: type) -> dict[str, Any]:
        """The keyword arguments that the class statement of a subclass needs to inherit the options."""
        return {}

    def jitted(self, fun: Any) -> Jitted | None:
        """What the library's ``jit`` has made `fun` of; None if it has not."""
        return None

    def jax_traced(self, traced: Any) -> Any | None:
        """JAX's traced function, of one that the library's ``jit`` has traced; None if it has not."""
        return None

    def holds_other_arrays(self, obj: Any) -> bool:
        """Whether the library's ``jit`` makes inputs of arrays in an argument that are no states."""
        return False


# -- the registry ----------------------------------------------------------------------------------------------------

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


def jitted(fun: Any) -> Jitted | None:
    """What the ``jit`` of a library of states has made `fun` of; None if none has."""
    functions = (kind.jitted(fun) for kind in kinds())
    return next((user for user in functions if user is not None), None)


def jax_traced(traced: Any) -> Any:
    """JAX's traced function, of one that the ``jit`` of a library of states has traced; others are returned
    unchanged.
    """
    results = (kind.jax_traced(traced) for kind in kinds())
    return next((inner for inner in results if inner is not None), traced)


def holds_other_arrays(args: tuple) -> bool:
    """Whether arguments hold arrays that a library's ``jit`` makes inputs of, and that are no states."""
    return any(kind.holds_other_arrays(x) for kind in kinds() for x in args)


def modes() -> Hashable:
    """The settings of every library of states that a compiled program depends on."""
    kinds()
    return tuple([kind.mode() for kind in modal])


# -- states in messages: type, name, where they were made and last used ----------------------------------------------

PACKAGE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "")  # ends with a separator: not `statetx_demo`


def library_folders() -> tuple[str, ...]:
    """Folders of library code, which no user wrote. Python's own frozen modules have none."""
    return (PACKAGE, _jax.JAX_FOLDER, "<frozen ", *(kind.folder for kind in _kinds))


def call_site() -> str:
    """``file:line`` of the nearest caller that is not a library."""
    frame, _ = _user_frame()
    return "unknown place" if frame is None else printable(f"{frame.f_code.co_filename}:{frame.f_lineno}")


def is_called_from(files: tuple[str, ...], *, through: tuple[str, ...]) -> bool:
    """Whether the nearest caller that is neither in statetx nor in the files `through` is in these files; both are
    beginnings of paths.
    """
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith((PACKAGE, *through)):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.startswith(files)


def user_stacklevel() -> int:
    """The ``stacklevel`` that makes a warning from the caller of this function point at the user's line."""
    return _user_frame()[1]


# Frames of Python itself between frames of a library: a cached property, a context manager, an import.
_BETWEEN = (functools.__file__, contextlib.__file__, "<frozen importlib")


def _user_frame() -> tuple[FrameType | None, int]:
    """The nearest frame outside the libraries, and its distance from the caller of the calling function."""
    files = (*library_folders(), *_BETWEEN)
    frame, level = sys._getframe(2), 1
    while frame is not None and frame.f_code.co_filename.startswith(files):
        frame, level = frame.f_back, level + 1
    return frame, level


def is_of_jax(error: BaseException) -> bool:
    """Whether JAX or statetx has raised an error that is being handled, and no function of the user on the way there.

    The text of an error does not tell: the user's own may have any.
    """
    folders = (PACKAGE, _jax.JAX_FOLDER, *_BETWEEN)
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_frame.f_code.co_filename.startswith(folders):
        traceback = traceback.tb_next
    return traceback is None


def describe(state: Any, kind: Kind | None = None, path: str | None = None, value: Any = None) -> str:
    """Describe a state for a message: type, path or name, shape and dtype, and where it was made."""
    kind = kind or kind_of(state)
    assert kind is not None
    label = path or kind.name_of(state)
    label = f" {label!r}" if label else ""
    value = kind.get(state) if value is None else value
    return (
        f"{type(state).__name__}{label} ({short_tree_type_str(value)}, made at "
        f"{printable(kind.site_of(state))}{history(state)})"
    )


def refuse_states(argument: str, *objects: Any) -> None:
    """Raise if a state is given where an array is needed; `argument` names the transform and its argument.

    Raises:
        StateValueError: one of the objects is a state.
    """
    for x in objects:
        kind = kind_of(x)
        if kind is not None:
            value = "[...]" if is_array_state(x) else ".value"
            raise StateValueError(
                f"{argument} is {describe(x, kind)}, not an array.\nFix: give the value that it holds, by {value}."
            )


def no_history(state: Any) -> str:
    del state
    return ""


history: Callable[[Any], str] = no_history
"""Describes the last accesses of a state, for `describe`; `kinds.debug` replaces it."""


def invalidated_state_error(state: Any, site: str, reason: str) -> StateAccessError:
    """The error for reading a state that was invalidated: see `Kind.invalidate`."""
    return StateAccessError(
        f"{type(state).__name__} made at {site} has no value: {reason}.\n"
        f"Fix: create the state before the transformed call, or give it a value again by writing to it."
    )
