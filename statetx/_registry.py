"""Frames and the registry: which states a call reads and writes, and what they held before it.

A `Frame` watches one call. For every state that existed before the call and is touched in it, the frame keeps an
`Access`: the value it held, the value that was put in its place (a transform may hand the body a tracer), whether
it was read before it was written, whether it was written, and where. When the frame closes, normally or by an
exception, each of these states holds its old value again, and what the call wrote is in `Frame.effects`, for the
transform to carry out of the trace and to publish.

Frames of a thread form a stack. A touch is reported to each of them, outermost first, so that every enclosing
transform sees the state as one of its own inputs.

A call is atomic: after an exception or an interrupt (KeyboardInterrupt, at any bytecode) its states hold their old
values or its new ones, never a mixture. Two rules give that. What changes several states at once, closing a frame or
publishing effects, first computes everything as a list of stores and then runs the list by `commit`, which no signal
handler can divide. And whatever keeps a frame from closing, `Frame.run` closes it on the way out.

A *kind* of state (this package's, brainstate's, ...) is an object that implements `Kind`; nothing above this
module asks which kind a state is.
"""

from __future__ import annotations

import functools
import gc
import importlib
import operator
import sys
import threading
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

import jax
import numpy as np

from . import _compat
from ._atomic import Store, commit, locked
from ._errors import CreatedStateError, ForeignStateError, StateAccessError, StateValueError, TraceLeakError

T = TypeVar("T")

UNKNOWN: Any = type("Unknown", (), {"__slots__": (), "__repr__": lambda self: "UNKNOWN"})()
"""Stands for a value that was not looked up."""


class Kind(Protocol):
    """How one library keeps its states. `get` and `store` touch the value and are seen by nobody."""

    name: str
    folder: str
    """Where the library's source is; what it does is attributed to the line that called it."""

    base: type
    """The class of all its states."""

    conductors: tuple[str, ...]
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

    def storing(self, states: Sequence[Any], values: Iterable[Any]) -> Store:
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

    def bury(self, state: Any, reason: str, closing: Any) -> list[Store]:
        """Stores that take the value from a state made in a call, and make it one that the context around has made.

        Reading it raises, until it is published or written. `closing`: the frame of that call, None if it is closed.
        """
        ...

    def is_lost(self, state: Any) -> bool:
        """Whether the value was taken from the state, by `bury` or by its library."""
        ...

    def owner(self, state: Any) -> Frame | None:
        """The innermost open frame that has claimed the state."""
        ...

    def claim(self, state: Any, frame: Any) -> Store:
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


class Access:
    """What one frame knows of one state that existed before it."""

    __slots__ = (
        "before",
        "claimed",
        "copy",
        "entered",
        "kind",
        "owner",
        "read",
        "read_site",
        "site",
        "state",
        "written",
    )

    def __init__(self, state: Any, kind: Kind, owner: Frame | None, *, read: bool):
        self.state = state
        self.kind = kind
        self.owner = owner  # the frame that held the state before this one
        self.claimed = False
        self.before: Any = UNKNOWN
        self.entered: Any = UNKNOWN
        self.read = read
        self.written = False
        self.site = ""  # of the first write; `read_site` is set by `_debug`
        self.copy: Copy | None = None  # of a container, as it was handed out

    def undo(self) -> list[Store]:
        """Stores that give the state its old value and owner."""
        stores = []
        entered, before = self.entered, self.before
        # What was not claimed another thread may have written: only the copy that was handed out is taken back.
        if before is not UNKNOWN and (self.claimed or (entered is not before and self.kind.get(self.state) is entered)):
            stores.append(self.kind.store(self.state, before))
        if self.claimed:
            stores.append(self.kind.claim(self.state, self.owner))
        return stores


class Copy:
    """A container, or a NumPy array, of which the body was handed a copy, since it may change it in place."""

    __slots__ = ("arrays", "leaves", "treedef", "value")

    def __init__(self, value: Any):
        leaves, self.treedef = _flatten(value)
        self.arrays = [(n, x) for n, x in enumerate(leaves) if _is_writable(x)]
        for n, x in self.arrays:
            leaves[n] = x.copy()
        self.leaves = leaves
        self.value = jax.tree.unflatten(self.treedef, leaves)

    def was_changed(self) -> bool:
        """Whether it has other contents now than it had when it was handed out."""
        leaves, treedef = _flatten(self.value)
        if treedef != self.treedef or any(a is not b for a, b in zip(self.leaves, leaves, strict=True)):
            return True
        return any(leaves[n].tobytes() != x.tobytes() for n, x in self.arrays)


class Effect:
    """A value that a call leaves in a state; `created` if the state was made in that call.

    Attributes:
        before: the state's value before the call, UNKNOWN if that does not matter.
    """

    __slots__ = ("before", "created", "kind", "site", "state", "value")

    def __init__(self, state: Any, kind: Kind, value: Any, site: str, *, before: Any = UNKNOWN, created: bool = False):
        self.state = state
        self.kind = kind
        self.value = value
        self.site = site
        self.before = before
        self.created = created


class _Local(threading.local):
    frame: Frame | None = None


_local = _Local()


def current_frame() -> Frame | None:
    return _local.frame


set_current_frame = functools.partial(setattr, _local, "frame")  # written in C, as a `Store` needs it


class Frame:
    """Watches one call, that of `run`.

    Args:
        name: what is being run, for messages: ``"remat(loss)"``.
        on_read: called with the value of a state that is touched for the first time, by a read; returns the value
            the body shall see. Called once for a state.
        allow: called with each state touched; raises if the call may not touch it.
        is_undo: the body runs at once, with values and not with tracers: the frame is there to undo its writes. It
            claims what the body writes; what it only reads other threads may read, too.
        aliases: whether states that hold one container hand out one copy of it.
        frees_cycles: whether the call must know which of the states that it made outlive it: those that only reference
            cycles hold are freed first. A jitted function that closes over a local state is such a cycle.
        outside: the trace around the transform, where the transform's own trace does not name it.

    Attributes:
        note: called with each state that is made in the call, by its constructor; also in the frames inside this one.
    """

    note: Callable[[Any], None] | None = None

    def __init__(
        self,
        name: str,
        on_read: Callable[[Any, Kind, Any], Any] | None = None,
        allow: Callable[[Any, Kind], None] | None = None,
        *,
        is_undo: bool = False,
        aliases: bool = True,
        frees_cycles: bool = False,
        outside: Any = None,
    ):
        self.name = name
        self.on_read = on_read
        self.allow = allow
        self.is_undo = is_undo
        self.aliases = aliases
        self.frees_cycles = frees_cycles
        self.outside = outside
        self.accesses: dict[int, Access] = {}
        self.effects: list[Effect] = []
        self.is_open = False
        self._created: list[tuple[Callable[[], Any], Kind]] = []
        self._watching: list[Kind] = []
        self._suspects: list[Access] = []
        self._added: list[Effect] = []
        self._copies: dict[int, tuple[Any, Access]] = {}  # by id of the container, with the container

    def run(self, fun: Callable[..., T], /, *args: Any, **kwargs: Any) -> T:
        """Call a function and watch it. Once it has returned, `effects` says what it wrote."""
        try:
            self._open()
            out = fun(*args, **kwargs)
            assert _local.frame is self, "a trace context was left open inside the call"
            if self._suspects:
                self._check_suspects()
            if self.frees_cycles and any(True for _ in self.created()):
                gc.collect()
            self.effects = self._collect()
            self.close()
            return out
        except BaseException:
            self._abandon()
            raise

    def _open(self) -> None:
        self.parent = _local.frame
        if self.note is None and self.parent is not None:
            self.note = self.parent.note
        self.trace = _compat.current_trace()
        self.thread = threading.get_ident()
        self._watching = list(kinds())
        opening = [store for kind in self._watching for store in kind.open(self)]
        commit(
            [
                *opening,
                (operator.setitem, open_frames, id(self), None),
                (setattr, self, "is_open", True),
                (set_current_frame, self),
            ]
        )

    def close(self) -> None:
        """Give every state its old value and its old owner, in one step. Does nothing to a frame that is closed."""
        if not self.is_open:
            return
        reason = f"it was created inside {self.name}, which did not complete"
        stores: list[Store] = []
        for kind in reversed(self._watching):
            stores += kind.close(self)
        for access in self.accesses.values():
            stores += access.undo()
        for state, kind in self.created():
            # Its value belongs to the trace that ends here; the transform publishes one that does not.
            stores += kind.bury(state, reason, self)
        held = [access.kind.get(access.state) for access in self.accesses.values()]  # see `commit`
        commit(
            [
                *stores,
                (set_current_frame, self.parent),
                (setattr, self, "is_open", False),
                (open_frames.pop, id(self), None),
            ]
        )
        del held
        self.trace = self.note = None
        self._created.clear()
        self._copies.clear()
        for access in self.accesses.values():  # these may be tracers of a trace that ends here
            access.before = access.entered = UNKNOWN
            access.copy = None

    def _abandon(self) -> None:
        """Close the frame, and those inside it that an interrupt has kept from closing."""
        inner, frame = [], _local.frame
        while frame is not None and frame is not self:
            inner.append(frame)
            frame = frame.parent
        if frame is self:
            for frame in inner:
                frame.close()
        self.close()

    # -- called by kinds while the frame is open --

    def touch(self, state: Any, kind: Kind, *, writing: bool) -> Access:
        """Record that the body touches a state: for the first time, or in an undo frame writes what it had read."""
        if self._suspects:
            self._check_suspects()
        access = self.accesses.get(id(state))
        if access is None and self.allow is not None:
            self.allow(state, kind)
        access = take(state, kind, self, access, writing=writing)
        if access.before is UNKNOWN:
            try:
                self._enter(access, writing)
            except BaseException:
                if access.before is UNKNOWN:
                    del self.accesses[id(state)]
                    commit([kind.claim(state, access.owner)])
                raise
        return access

    def _enter(self, access: Access, writing: bool) -> None:
        """Give the state the value that the body shall see."""
        state, kind = access.state, access.kind
        before = entered = kind.get(state)
        if self.on_read is not None and not writing:
            entered = self.on_read(state, kind, before)
        if not is_leaf(entered) or _is_writable(entered):
            twin = self._copies.get(id(before))
            if twin is not None and self.aliases:
                access.copy = twin[1].copy
            else:
                access.copy = Copy(entered)
                self._copies[id(before)] = before, access
            assert access.copy is not None
            entered = access.copy.value
        access.before, access.entered = before, entered
        if entered is not before:
            commit([kind.store(state, entered)])

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
        if self.note is not None:
            self.note(state)
        commit([self.creation(state, kind, ref)])

    def creation(self, state: Any, kind: Kind, ref: Callable[[], Any] | None = None) -> Store:
        """The store that `mark_created` makes."""
        return self._created.append, (ref or weakref.ref(state), kind)

    def _check_suspects(self) -> None:
        suspects, self._suspects = self._suspects, []
        for access in suspects:
            value = access.kind.get(access.state)
            check_write(access.state, access.kind, value, self.trace, access.site, late=True)

    # -- closing --

    def created(self) -> Iterator[tuple[Any, Kind]]:
        """States made in the call that are still alive, each once."""
        seen = set()
        for ref, kind in self._created:
            state = ref()
            if state is not None and id(state) not in seen:
                seen.add(id(state))
                yield state, kind

    def _collect(self) -> list[Effect]:
        effects = []
        for access in self.accesses.values():
            value = access.kind.get(access.state)
            changed = access.copy is not None and access.copy.was_changed()
            if access.written or value is not access.entered or changed:
                if changed and not self.aliases:
                    self._refuse_alias(access)
                site = access.site or "a line that changed it in place"
                if changed:
                    self._check_unseen(access.state, access.kind, value, site)
                effects.append(Effect(access.state, access.kind, value, site, before=access.before))
        for state, kind in self.created():
            value, site = kind.get(state), kind.site_of(state)
            self._check_unseen(state, kind, value, site)
            effects.append(Effect(state, kind, value, site, created=True))
        for effect in effects:
            if not is_leaf(effect.value):
                _refuse_hidden(effect)
        return effects + self._added

    def _check_unseen(self, state: Any, kind: Kind, value: Any, site: str) -> None:
        """`check_write` where no write was seen: a container that was changed in place, a state that was made."""
        leaked, frame = [value], self
        while leaked and frame is not None:  # JAX does not link the trace of a shard_map to those around it
            leaked, frame = _compat.leaked_tracers(leaked, frame.trace), frame.parent
        if leaked:
            check_write(state, kind, value, self.trace, site, late=True)

    def _refuse_alias(self, access: Access) -> None:
        """Raise if another state holds the very container that was changed in place."""
        for other in self.accesses.values():
            if other is not access and other.before is access.before and not is_leaf(access.before):
                a, b = (describe(x.state, x.kind, value=access.before) for x in (access, other))
                raise StateValueError(
                    f"{self.name} changed in place a {type(access.before).__name__} that two states hold: {a} and {b}. "
                    f"A compiled program gives each state a container of its own.\n"
                    f"Fix: assign a new container to .value, or keep it in one state."
                )


# -- threads ---------------------------------------------------------------------------------------------------
#
# A state has one value. While a frame is open, that of each state it has touched is the frame's own: a tracer perhaps.
# So a state belongs to the innermost frame that has touched it, and another thread that touches it raises; whoever
# shares states between threads guards them by a lock. A state is taken before it is given its new value and handed back
# after it has its old one, so what belongs to nobody holds no tracer of a call that is running.

open_frames: dict[int, None] = {}
"""Frames of all threads. Where there are none no state has an owner, and while one has `ownership` none gets one."""

ownership = threading.RLock()  # reentrant: a finalizer may run, and touch a state, wherever Python allocates


def take(state: Any, kind: Kind, frame: Any, access: Access | None = None, *, writing: bool) -> Access:
    """Make a frame the owner of a state, unless that only watches what it reads; returns the frame's `Access`."""
    return locked(ownership, _take, state, kind, frame, access, writing)


def _take(state: Any, kind: Kind, frame: Any, access: Access | None, writing: bool) -> Access:
    owner = kind.owner(state)
    if owner is not None and owner.thread != frame.thread:
        raise foreign(state, kind, owner)
    if access is None:
        access = frame.accesses[id(state)] = Access(state, kind, owner, read=not writing)
    if not access.claimed and (writing or not frame.is_undo):
        access.owner, access.claimed = owner, True  # before the claim: a frame that closes takes it back
        commit([kind.claim(state, frame)])
    return access


def publish(effects: Sequence[Effect], *, live: bool, also: Sequence[Store] = ()) -> None:
    """Store what a call wrote, all of it or nothing, and forget the values.

    `live`: see `Kind.announce`. `also`: what belongs to the same step.

    Raises:
        ForeignStateError: another thread has written one of the states since the call began. Had it been stored,
            that write would be lost.
    """
    try:
        stores = [store for effect in effects for store in effect.kind.announce(effect, live)]
        locked(ownership, _store_unchanged, effects, [*stores, *also])
    finally:
        for effect in effects:
            effect.value = effect.before = UNKNOWN


def _store_unchanged(effects: Sequence[Effect], stores: list[Store]) -> None:
    if _local.frame is None:
        for effect in effects:
            check_unchanged(effect)
    held = [effect.kind.get(effect.state) for effect in effects]  # see `commit`
    commit(stores)
    del held


def check_unchanged(effect: Effect) -> None:
    """Raise unless the state still holds what it held when the call began."""
    state, kind = effect.state, effect.kind
    owner = kind.owner(state)
    if owner is not None:
        raise foreign(state, kind, owner)
    if effect.before is not UNKNOWN and kind.get(state) is not effect.before:
        raise changed(state, kind)


def changed(state: Any, kind: Kind) -> ForeignStateError:
    """The error for a state that was written while a call that writes it, too, was running."""
    return ForeignStateError(
        f"{describe(state, kind)} was written by another thread, or by a callback, while a call was running that read it "
        f"and writes it, too. No state was changed by the call, since that write would be lost.\n"
        f"Fix: guard the calls that share the state by a lock."
    )


def report_touch(state: Any, kind: Kind, frame: Any, owner: Any, *, writing: bool) -> None:
    """Report a touch of a state to each frame around it, outermost first, that has not seen it yet.

    Args:
        frame: the current frame.
        owner: the frame that has claimed the state.
    """
    pending = []
    step = frame
    while step is not None and step is not owner:
        pending.append(step)
        step = step.parent
    if owner is not None and step is not owner:
        raise foreign(state, kind, owner)
    for watching in reversed(pending):
        # For the frames around the innermost, a write is not one until the transform publishes it.
        is_write = writing and watching is frame
        if is_write or id(state) not in watching.accesses:
            watching.touch(state, kind, writing=is_write)


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
    value = None if access is None or access.before is UNKNOWN else access.before
    return ForeignStateError(f"{describe(state, kind, value=value)} cannot be used: {cause}.\nFix: {fix}.")


def check_write(state: Any, kind: Kind, value: Any, anchor: Any | None, site: str, *, late: bool = False) -> None:
    """Raise `TraceLeakError` if storing `value` leaves a tracer behind once its trace has ended.

    `anchor` is the innermost trace whose tracers the state may hold, None if it may hold none. What is written while
    that trace is the current one needs no look, unless the look comes `late`.
    """
    if not late and anchor is not None and _compat.current_trace() is anchor:
        return
    leaked = _compat.leaked_tracers(value, anchor) or _hidden_tracers(value, anchor)
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


def around(closing: Any) -> Any:
    """The frame around one that is about to close; the current one for None."""
    return _local.frame if closing is None else closing.parent


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
    for library in _pending:
        module = sys.modules.get(library)
        if module is None or getattr(getattr(module, "__spec__", None), "_initializing", False):
            continue
        locked(_kinds_lock, _load, library)


def _load(library: str) -> None:
    global _pending
    if library in _pending:
        register_kind(importlib.import_module(_FOREIGN[library]).KIND)
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


def class_options(cls: type) -> dict[str, Any]:
    """What a subclass of a library's class must be told, to be of the same sort as the class."""
    options: dict[str, Any] = {}
    for kind in kinds():
        if isinstance(kind, Subclassed):
            options |= kind.class_options(cls)
    return options


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


def num_references(state: Any, frame: Frame) -> int:
    """How many references to a state an open frame has: its access, and what some kinds have for a weak reference."""
    return (id(state) in frame.accesses) + sum(getattr(ref, "state", None) is state for ref, _ in frame._created)


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
            reason = f"it was created inside {where}, whose body stands for many steps"
            commit(effect.kind.bury(effect.state, reason, None))
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


def _refuse_hidden(effect: Effect) -> None:
    """Raise if a call leaves an object in a state that holds an array of the trace which ends with it."""
    from ._opaque import refuse_hidden  # that module imports this one

    refuse_hidden(
        _flatten(effect.value)[0], lambda: f"At {effect.site}, {describe(effect.state, effect.kind)} was given"
    )


def _hidden_tracers(value: Any, anchor: Any | None) -> list[Any]:
    """`leaked_tracers` of the objects in a value that JAX does not look into: the first."""
    if is_leaf(value) or _compat.is_eager():
        return []
    from ._opaque import hidden_tracer  # that module imports this one

    found = [hidden_tracer(x, lambda t: bool(_compat.leaked_tracers(t, anchor))) for x in _flatten(value)[0]]
    return [hidden[1] for hidden in found if hidden is not None][:1]


def is_leaf(value: Any) -> bool:
    return isinstance(value, _LEAF_TYPES)


def _is_writable(value: Any) -> bool:
    """Whether it is a NumPy array that can be changed in place."""
    return isinstance(value, np.ndarray) and value.flags.writeable


def _flatten(value: Any) -> tuple[list[Any], Any]:
    return jax.tree.flatten(value, is_leaf=is_opaque)
