"""Frames: which states a call reads and writes, and what they held before it."""

from __future__ import annotations

import gc
import operator
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from .. import _jax
from .._atomic import Store, commit
from .._errors import StateValueError
from .._states.messages import call_site, describe
from .._states.protocol import Kind
from .._states.registry import kinds
from .access import UNKNOWN, Access, Copy, Effect, _is_writable, is_leaf
from .current import _local, set_current_frame
from .leaks import _refuse_hidden, check_write
from .threads import open_frames, take

T = TypeVar("T")


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
        self.trace = _jax.current_trace()
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
        if _jax.current_trace() is not self.trace:
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
            leaked, frame = _jax.leaked_tracers(leaked, frame.trace), frame.parent
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


def around(closing: Any) -> Any:
    """The frame around one that is about to close; the current one for None."""
    return _local.frame if closing is None else closing.parent


def num_references(state: Any, frame: Frame) -> int:
    """How many references to a state an open frame has: its access, and what some kinds have for a weak reference."""
    return (id(state) in frame.accesses) + sum(getattr(ref, "state", None) is state for ref, _ in frame._created)
