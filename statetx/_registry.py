"""Frames and the registry: which states a call reads and writes, and what they held before it.

A `Frame` watches one call. For every state that existed before the call and is touched in it, the frame keeps an
`Access`: the value it held, the value that was put in its place (a transform may hand the body a tracer), whether
it was read before it was written, whether it was written, and where. When the frame closes, normally or by an
exception, each of these states holds its old value again, and what the call wrote is in `Frame.effects`, for the
transform to carry out of the trace and to publish.

Frames of a thread form a stack. A touch is reported to each of them, outermost first, so that every enclosing
transform sees the state as one of its own inputs.

A *kind* of state (this package's, brainstate's, ...) is an object that implements `Kind`; nothing above this
module asks which kind a state is.
"""

from __future__ import annotations

import importlib
import itertools
import sys
import threading
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np

from . import _compat
from ._errors import CreatedStateError, ForeignStateError, StateAccessError, TraceLeakError


class Kind(Protocol):
    """How one library keeps its states. `get` and `set` touch the value and are seen by nobody."""

    name: str
    folder: str
    """Where the library's source is; what it does is attributed to the line that called it."""

    bookkeeping: frozenset[str]
    """Names of a state's attributes that the library keeps for itself."""

    def owns(self, obj: Any) -> bool: ...

    def is_opaque(self, obj: Any) -> bool:
        """Whether a container must never be flattened, because it holds states of this kind."""
        ...

    def get(self, state: Any) -> Any: ...

    def set(self, state: Any, value: Any) -> None: ...

    def get_all(self, states: Sequence[Any]) -> list[Any]: ...

    def set_all(self, states: Sequence[Any], values: Iterable[Any]) -> None: ...

    def read(self, state: Any) -> Any:
        """The value, reported to every watcher (ours and the library's own)."""
        ...

    def write(self, state: Any, value: Any) -> None:
        """Store a value as the library's users do."""
        ...

    def publish(self, effect: Effect, live: bool) -> None:
        """Write as the library's users do, reported to every watcher.

        `live`: the body ran just now, under the watchers in force, which have already seen it write.
        """
        ...

    def bury(self, state: Any, reason: str) -> None:
        """Take the value from a state that was created inside a frame and give the state to the context around it.

        Reading it raises, until it is published or written.
        """
        ...

    def owner(self, state: Any) -> Frame | None:
        """The innermost open frame that has touched the state, as `own` was told."""
        ...

    def own(self, state: Any, frame: Frame | None) -> None:
        """Remember that a frame holds the state's value, so that other threads are refused; None: nobody does."""
        ...

    def is_random(self, state: Any) -> bool:
        """Whether the state holds a random key that advances with every draw."""
        ...

    def name_of(self, state: Any) -> str | None: ...

    def site_of(self, state: Any) -> str: ...

    def open(self, frame: Frame) -> None: ...

    def close(self, frame: Frame) -> None: ...


@runtime_checkable
class Modal(Protocol):
    """A kind whose library has watchers of its own, and settings that a compiled program depends on."""

    def is_idle(self) -> bool:
        """Whether nothing of the library watches its states in this thread."""
        ...

    def mode(self) -> Hashable:
        """The settings."""
        ...


class Access:
    """What one frame knows of one state that existed before it."""

    __slots__ = ("before", "contents", "entered", "kind", "owner", "read", "read_site", "site", "state", "written")

    def __init__(self, state: Any, kind: Kind, before: Any, entered: Any, read: bool, owner: Frame | None):
        self.state = state
        self.kind = kind
        self.owner = owner  # the frame that held the state before this one
        self.before = before
        self.entered = entered
        self.read = read
        self.written = False
        self.site = ""  # of the first write; `read_site` is set by `_debug`
        self.contents: tuple[list[Any], Any] | None = None  # of a container, as it was handed out


class Effect:
    """A value that a call leaves in a state; `created` if the state was made in that call."""

    __slots__ = ("access", "created", "kind", "site", "state", "value")

    def __init__(
        self, state: Any, kind: Kind, value: Any, site: str, access: Access | None, created: bool | None = None
    ):
        self.state = state
        self.kind = kind
        self.value = value
        self.site = site
        self.access = access
        self.created = access is None if created is None else created


class _Local(threading.local):
    frame: Frame | None = None


_local = _Local()
_serial = itertools.count(1)


def current_frame() -> Frame | None:
    return _local.frame


def set_current_frame(frame: Any) -> None:
    _local.frame = frame


class Frame:
    """Watches one call; a context manager.

    Args:
        name: what is being run, for messages: ``"remat(loss)"``.
        on_read: called with the value of a state that is touched for the first time, by a read; returns the value
            the body shall see. Called once for a state.
        allow: called with each state touched; raises if the call may not touch it.
    """

    def __init__(
        self,
        name: str,
        on_read: Callable[[Any, Kind, Any], Any] | None = None,
        allow: Callable[[Any, Kind], None] | None = None,
    ):
        self.name = name
        self.on_read = on_read
        self.allow = allow
        self.accesses: dict[int, Access] = {}
        self.effects: list[Effect] = []
        self.is_open = False
        self._created: list[tuple[Callable[[], Any], Kind]] = []
        self._watching: list[Kind] = []
        self._suspects: list[Access] = []
        self._added: list[Effect] = []

    def __enter__(self) -> Frame:
        self.parent = _local.frame
        self.trace = _compat.current_trace()
        self.thread = threading.get_ident()
        self.is_open = True
        open_frames[id(self)] = None
        _local.frame = self
        try:
            for kind in kinds():
                kind.open(self)
                self._watching.append(kind)
        except BaseException:
            self.__exit__(*sys.exc_info())
            raise
        return self

    def __exit__(self, exc_type, exc, tb) -> None:
        try:
            for kind in reversed(self._watching):
                kind.close(self)
            _local.frame = self.parent
            try:
                if exc_type is None:
                    self._check_suspects()
                    self.effects = self._collect()
            finally:
                self._restore()
        finally:
            _local.frame = self.parent
            self._created.clear()
            self.is_open = False
            self.trace = None
            del open_frames[id(self)]

    # -- called by kinds while the frame is open --

    def touch(self, state: Any, kind: Kind, *, writing: bool) -> Access:
        """Record that the body touches a state for the first time in this frame."""
        if self._suspects:
            self._check_suspects()
        if self.allow is not None:
            self.allow(state, kind)
        owner = take(state, kind, self)
        try:
            before = kind.get(state)
            entered = before
            if self.on_read is not None and not writing:
                entered = self.on_read(state, kind, before)
            access = Access(state, kind, before, entered, not writing, owner)
            if not _is_leaf(entered):
                # The body may mutate a container in place: it gets a copy, so that the old value stays whole.
                access.contents = leaves, treedef = _flatten(entered)
                access.entered = entered = jax.tree.unflatten(treedef, leaves)
        except BaseException:
            kind.own(state, owner)
            raise
        if entered is not before:
            kind.set(state, entered)
        self.accesses[id(state)] = access
        return access

    def mark_written(self, access: Access) -> None:
        """Record a write. A kind that sees it before the value is stored leaves the leak check to us."""
        access.written = True
        access.site = call_site()
        if _compat.current_trace() is not self.trace:
            self._suspects.append(access)

    def note_write(self, access: Access, site: str = "") -> None:
        """Record a write that was checked already."""
        access.written = True
        access.site = access.site or site or call_site()

    def add_effect(self, effect: Effect) -> None:
        """Record what the call leaves in a state that the frame does not hold, a `jax.Ref`."""
        self._added.append(effect)

    def mark_created(self, state: Any, kind: Kind, ref: Callable[[], Any] | None = None) -> None:
        """Record a state made in the call; `ref` stands for a weak reference where the state allows none."""
        self._created.append((ref or weakref.ref(state), kind))

    def _check_suspects(self) -> None:
        suspects, self._suspects = self._suspects, []
        for access in suspects:
            value = access.kind.get(access.state)
            check_write(access.state, access.kind, value, self.trace, access.site, late=True)

    # -- closing --

    def created(self) -> Iterator[tuple[Any, Kind]]:
        """States made in the call that are still alive."""
        for ref, kind in self._created:
            state = ref()
            if state is not None:
                yield state, kind

    def _collect(self) -> list[Effect]:
        effects = []
        for access in self.accesses.values():
            value = access.kind.get(access.state)
            if access.written or value is not access.entered or _was_mutated(access):
                effects.append(Effect(access.state, access.kind, value, access.site, access))
        for state, kind in self.created():
            effects.append(Effect(state, kind, kind.get(state), kind.site_of(state), None))
        return effects + self._added

    def _restore(self) -> None:
        for access in self.accesses.values():
            access.kind.set(access.state, access.before)
            access.kind.own(access.state, access.owner)  # not before: another thread may read it from here on
            access.before = access.entered = access.contents = None  # they may be tracers of a trace that ends here
        for state, kind in self.created():
            # Its value belongs to the trace that ends here; the transform publishes one that does not.
            kind.bury(state, f"it was created inside {self.name}, which did not complete")


# -- threads ---------------------------------------------------------------------------------------------------
#
# A state has one value. While a frame is open, that of each state it has touched is the frame's own: a tracer perhaps.
# So a state belongs to the innermost frame that has touched it, and another thread that touches it raises; whoever
# shares states between threads guards them by a lock. A state is taken before it is given its new value and handed back
# after it has its old one, so what belongs to nobody holds no tracer of a call that is running.

open_frames: dict[int, None] = {}
"""Frames of all threads. Where there are none no state has an owner, and while one has `ownership` none gets one."""

ownership = threading.RLock()  # reentrant: a finalizer may run, and touch a state, wherever Python allocates


def take(state: Any, kind: Kind, frame: Any) -> Frame | None:
    """Make a frame the owner of a state; returns the owner until then, one of the frames around it."""
    with ownership:
        owner = kind.owner(state)
        if owner is not None and owner.thread != frame.thread:
            raise foreign(state, kind, owner)
        kind.own(state, frame)
    return owner


def foreign(state: Any, kind: Kind, owner: Frame) -> ForeignStateError:
    """The error for a touch of a state that belongs to a frame which is not running here."""
    if owner.is_open and owner.thread != threading.get_ident():
        cause = f"another thread is running {owner.name}, which has its own value for it until it ends"
        fix = "trace the functions that share a state in one thread, or guard them by a lock"
    else:
        cause = f"it belongs to {owner.name}, a call that is not running here any more"
        fix = (
            "create states before the transformed call; do not touch one from a generator or callback that outlives it"
        )
    access = owner.accesses.get(id(state))
    value = None if access is None else access.before
    return ForeignStateError(f"{describe(state, kind, value=value)} cannot be used: {cause}.\nFix: {fix}.")


def check_write(state: Any, kind: Kind, value: Any, anchor: Any | None, site: str, *, late: bool = False) -> None:
    """Raise `TraceLeakError` if storing `value` leaves a tracer behind once its trace has ended.

    `anchor` is the innermost trace whose tracers the state may hold, None if it may hold none. What is written while
    that trace is the current one needs no look, unless the look comes `late`.
    """
    if not late and anchor is not None and _compat.current_trace() is anchor:
        return
    leaked = _compat.leaked_tracers(value, anchor)
    if not leaked:
        return
    name = _compat.transform_name(leaked[0]._trace)
    ours = sys.modules["statetx"]
    instead = f"use statetx.{name} in place of jax's {name}, or " if hasattr(ours, name) else ""
    raise TraceLeakError(
        f"{describe(state, kind)} was given a value that jax's {name} is tracing, at {site}.\n"
        f"The tracer would stay in the state after {name} has ended, and break its next use.\n"
        f"Cause: a function that writes states stands under a plain jax transform, which cannot see them.\n"
        f"Fix: {instead}pass the value through the function's arguments and results (statetx.functionalize)."
    )


# -- kinds -----------------------------------------------------------------------------------------------------

# Libraries whose states are watched as soon as the program has imported them.
_FOREIGN = {"brainstate": "statetx.kinds.brainstate", "flax.nnx": "statetx.kinds.nnx"}
_kinds: list[Kind] = []
_modal: list[Modal] = []
_pending = tuple(_FOREIGN)  # replaced as a whole: other threads may be going through it
_kinds_lock = threading.RLock()


def register_kind(kind: Kind) -> None:
    _kinds.append(kind)
    if isinstance(kind, Modal):
        _modal.append(kind)


def kinds() -> list[Kind]:
    """Every kind of state that the program can have by now."""
    if _pending:
        _load_pending()
    return _kinds


def _load_pending() -> None:
    global _pending
    for library in _pending:
        module = sys.modules.get(library)
        if module is None or getattr(getattr(module, "__spec__", None), "_initializing", False):
            continue
        with _kinds_lock:
            if library in _pending:
                kind = importlib.import_module(_FOREIGN[library]).KIND
                register_kind(kind)
                _pending = tuple(name for name in _pending if name != library)


def kind_of(obj: Any) -> Kind | None:
    """The kind of a state; None for anything that is no state."""
    for kind in kinds():
        if kind.owns(obj):
            return kind
    return None


def is_opaque(obj: Any) -> bool:
    """Whether a tree's flattening stops at this object: a state, or a module that holds states."""
    if type(obj) in _PLAIN:
        return False
    return any([kind.is_opaque(obj) for kind in kinds()])


# Of what trees hold, what is met most and is no state.
_PLAIN = frozenset([dict, list, tuple, type(None), bool, int, float, str, np.ndarray, _compat.ArrayImpl])


def modes() -> Hashable:
    """Settings that a compiled program depends on, of every library whose states are watched."""
    kinds()
    return tuple([kind.mode() for kind in _modal])


def is_idle() -> bool:
    """Whether nobody watches states in this thread and nothing is being traced."""
    return idle_modes() is not None


def idle_modes() -> Hashable | None:
    """`modes` if the thread is idle, else None: all that the fast path of a compiled function asks for, in one go."""
    if _local.frame is not None or _compat._context.trace is not _compat._eval_trace:
        return None
    for library in _pending:
        if library in sys.modules:
            _load_pending()
            break
    found = []
    for kind in _modal:
        if not kind.is_idle():
            return None
        found.append(kind.mode())
    return tuple(found)


# -- descriptions ----------------------------------------------------------------------------------------------

PACKAGE = __file__.rsplit("/", 1)[0]


def library_folders() -> tuple[str, ...]:
    """Folders whose code is never what a user wrote."""
    return (PACKAGE, _compat.JAX_FOLDER, *(kind.folder for kind in _kinds))


def call_site() -> str:
    """``file:line`` of the nearest caller that is not a library's code."""
    folders = library_folders()
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(folders):
        frame = frame.f_back
    return "unknown place" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def user_stacklevel() -> int:
    """The ``stacklevel`` with which the caller of this function makes a warning that points at the user's line."""
    folders = library_folders()
    frame, level = sys._getframe(1), 1
    while frame is not None and frame.f_code.co_filename.startswith(folders):
        frame, level = frame.f_back, level + 1
    return level


def describe(state: Any, kind: Kind | None = None, path: str | None = None, value: Any = None) -> str:
    """Name a state for a message: type, path or name, shape and dtype, and where it was made."""
    from ._tree import short_tree_type_str  # the tree module imports this one

    kind = kind or kind_of(state)
    assert kind is not None
    label = path or kind.name_of(state)
    label = f" {label!r}" if label else ""
    value = kind.get(state) if value is None else value
    return (
        f"{type(state).__name__}{label} ({short_tree_type_str(value)}, made at {kind.site_of(state)}{history(state)})"
    )


def no_history(state: Any) -> str:
    del state
    return ""


history: Callable[[Any], str] = no_history
"""What is known of a state's last accesses, for `describe`; `_debug` replaces it."""


def refuse_created(effects: Iterable[Effect], where: str) -> None:
    """Raise for states that a loop body created and that outlived it."""
    for effect in effects:
        if effect.created:
            effect.kind.bury(effect.state, f"it was created inside {where}, whose body stands for many steps")
            raise CreatedStateError(
                f"{type(effect.state).__name__} made at {effect.site} was created inside {where} and outlived it.\n"
                f"The body runs once for many steps, so no single value can be given to that state.\n"
                f"Fix: create the state before the loop, and write it in the body."
            )


def buried(state: Any, site: str, reason: str) -> StateAccessError:
    return StateAccessError(
        f"{type(state).__name__} made at {site} has no value: {reason}.\n"
        f"Fix: create the state before the transformed call, or give it a value again by writing to it."
    )


# -- values ----------------------------------------------------------------------------------------------------

_LEAF_TYPES = (jax.Array, np.ndarray, np.generic, int, float, complex, str, bytes, type(None))


def _is_leaf(value: Any) -> bool:
    return isinstance(value, _LEAF_TYPES)


def _flatten(value: Any) -> tuple[list[Any], Any]:
    return jax.tree.flatten(value, is_leaf=is_opaque)


def _was_mutated(access: Access) -> bool:
    """Whether the container that the body was handed has other contents now than it had then."""
    if access.contents is None:
        return False
    leaves, treedef = access.contents
    now, treedef_now = _flatten(access.entered)
    return treedef != treedef_now or any(a is not b for a, b in zip(leaves, now, strict=True))
