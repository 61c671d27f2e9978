"""The protocol of a kind of state, `Kind`."""

from __future__ import annotations

import collections
import itertools
import operator
import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, Protocol

from .._atomic import Store


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

    def get_all(self, states: Sequence[Any]) -> list[Any]: ...

    def set_all(self, states: Sequence[Any], values: Iterable[Any]) -> None:
        """Store a value in each state by one `commit`; raise if another thread owns one of them."""
        ...

    def store_all(self, states: Sequence[Any], values: Iterable[Any]) -> Store:
        """One store that gives each state its value."""
        stores = [self.store(state, value) for state, value in zip(states, values, strict=True)]
        # A `deque` of length 0 consumes the map in C: one call in which Python handles no signal (decision 18).
        return collections.deque, itertools.starmap(operator.call, stores), 0

    def check_free(self, states: Sequence[Any]) -> None:
        """Raise if a call in another thread owns one of these states. Called where this thread has no open frame."""
        ...

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

    def is_trainable(self, state: Any) -> bool:
        """Whether the library's class for weights says so: `Param`."""
        return False

    def name_of(self, state: Any) -> str | None:
        return None

    def site_of(self, state: Any) -> str: ...

    def open(self, frame: Any) -> list[Store]:
        return []

    def close(self, frame: Any) -> list[Store]:
        """Stores that undo those of `open`, and end whatever was opened after it and left open."""
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

    def unjitted(self, fun: Any) -> Callable | None:
        """The user's function that the library's ``jit`` has made `fun` of; None if it has not."""
        return None

    def jax_traced(self, traced: Any) -> Any | None:
        """JAX's traced function, of one that the library's ``jit`` has traced; None if it has not."""
        return None

    def holds_other_arrays(self, obj: Any) -> bool:
        """Whether the library's ``jit`` makes inputs of arrays in an argument that are no states."""
        return False
