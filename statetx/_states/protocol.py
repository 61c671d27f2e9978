"""What statetx asks of a kind of state: `Kind`, and what some kinds can do besides."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from .._atomic import Store

if TYPE_CHECKING:
    from .._frames.access import Effect
    from .._frames.frame import Frame


class Kind(Protocol):
    """How one library keeps its states. `get` and `store` touch the value and are seen by nobody."""

    name: str
    folder: str
    """Where the library's source is; what it does is attributed to the line that called it."""

    base: type
    """The class of all its states."""

    deterministic_paths: tuple[str, ...]
    """Those of the library's files and folders whose code calls a user's in the same way whenever it runs."""

    bookkeeping: frozenset[str]
    """Names of a state's attributes that the library keeps for itself."""

    def owns(self, obj: Any) -> bool: ...

    def is_opaque(self, obj: Any) -> bool:
        """Whether a container must never be flattened, because it holds states of this kind."""
        ...

    def get(self, state: Any) -> Any: ...

    def store(self, state: Any, value: Any) -> Store:
        """The store that gives a state this value."""
        ...

    def get_all(self, states: Sequence[Any]) -> list[Any]: ...

    def set_all(self, states: Sequence[Any], values: Iterable[Any]) -> None:
        """Store a value in each state by one `commit`, unless another thread holds one of them."""
        ...

    def store_all(self, states: Sequence[Any], values: Iterable[Any]) -> Store:
        """The store that gives each state a value."""
        ...

    def check_free(self, states: Sequence[Any]) -> None:
        """Raise if a call in another thread holds the value of one of these states; for a thread that watches none."""
        ...

    def read(self, state: Any) -> Any:
        """The value, reported to every watcher (ours and the library's own)."""
        ...

    def write(self, state: Any, value: Any) -> None:
        """Store a value as the library's users do."""
        ...

    def announce(self, effect: Effect, live: bool) -> list[Store]:
        """Report a write to every watcher, as one of the library's users; returns the stores that carry it out.

        `live`: the body ran just now, under the watchers in force, which have already seen it write.
        """
        ...

    def invalidate(self, state: Any, reason: str, closing: Any) -> list[Store]:
        """Stores that take the value from a state made in a call, and make it one that the context around has made.

        Reading it raises, until it is published or written. `closing`: the frame of that call, None if it is closed.
        """
        ...

    def is_invalidated(self, state: Any) -> bool:
        """Whether the value was taken from the state, by `bury` or by its library."""
        ...

    def owner(self, state: Any) -> Frame | None:
        """The innermost open frame that has claimed the state."""
        ...

    def set_owner(self, state: Any, frame: Any) -> Store:
        """The store that makes a frame the owner of the state's value, so that other threads are refused; None: nobody."""
        ...

    def is_random(self, state: Any) -> bool:
        """Whether the state holds a random key that advances with every draw."""
        ...

    def name_of(self, state: Any) -> str | None: ...

    def site_of(self, state: Any) -> str: ...

    def open(self, frame: Frame) -> list[Store]: ...

    def close(self, frame: Frame) -> list[Store]:
        """Stores that end what `open` began, and whatever was begun after it and left open."""
        ...


@runtime_checkable
class Modal(Protocol):
    """A kind whose library has watchers of its own, and settings that a compiled program depends on."""

    def is_idle(self) -> bool:
        """Whether nothing of the library watches its states in this thread."""
        ...

    def mode(self) -> Hashable:
        """The settings."""
        ...


@runtime_checkable
class Annotated(Protocol):
    """A kind whose states have metadata for each dimension of the value, such as the mesh axes that divide it."""

    def insert_axis(self, state: Any, axis: int) -> None:
        """Add metadata for a dimension that was added to the value and is not divided."""
        ...

    def delete_axis(self, state: Any, axis: int) -> None:
        """Remove the metadata of a dimension that was removed from the value."""
        ...


@runtime_checkable
class Subclassed(Protocol):
    """A kind whose library makes classes of several sorts."""

    def class_options(self, cls: type) -> dict[str, Any]:
        """Keyword arguments of the class statement that a subclass of the same sort needs."""
        ...
