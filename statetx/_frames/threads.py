"""What threads have of frames: the innermost open one, the owner of each state, the publication of writes.

`WatchedKind` is the part of a kind that is the same for every library whose states report their reads and writes to
frames.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

from .. import _jax, _states
from .._atomic import Store, commit, locked, new_lock
from .._errors import ForeignStateError
from .._states import Kind, describe
from .access import UNKNOWN, Access, Copy, Effect, check_write


class _Local(threading.local):
    frame: Any = None  # the `Frame`, or None
    has_called_host: bool = False  # whether a function on the host was called since a call has last published writes


_local = _Local()


def current_frame() -> Any:
    """The frame; None if none is open. `_frames` exports it with its type."""
    return _local.frame


_jax.note_host_calls(functools.partial(setattr, _local, "has_called_host", True))


def has_called_host() -> bool:
    """Whether the call that is about to end may have called a function on the host that can raise yet."""
    return _local.has_called_host


set_current_frame = functools.partial(setattr, _local, "frame")  # written in C, as a `Store` must be


def is_idle() -> bool:
    """Whether this thread has no open frame, no active transform of a state library, and traces nothing."""
    return idle_modes() is not None


def idle_modes() -> Hashable | None:
    """`modes` if the thread is idle, else None: the one check of the fast path of a compiled function."""
    if _local.frame is not None or _jax._context.trace is not _jax.eager_trace:
        return None

    # Load the kind of a library that the program has imported since the last call.
    for library in _states.pending:
        if library in sys.modules:
            _states.load_pending()
            break

    modes = []
    for kind in _states.modal:
        if not kind.is_idle():
            return None
        modes.append(kind.mode())
    return tuple(modes)


# A state has one value. While a frame is open, each state that it has touched holds a value of the frame: perhaps a
# tracer. So the innermost frame that has touched a state owns it, and a touch by another thread raises; a program that
# shares states between threads guards them by a lock. A state is acquired before it gets its new value and released
# after it has its old one, so a state without an owner holds no tracer of a call that is running.
open_frames: dict[int, Any] = {}  # of `Frame`s, by id
"""The open frames of all threads, by their ids, in the order of opening. If it is empty, no state has an owner, and
holding `ownership` keeps it so.
"""

ownership = new_lock()  # reentrant: a finalizer may run, and touch a state, wherever Python allocates


def acquire(state: Any, kind: Kind, frame: Any, access: Access | None = None, *, writing: bool) -> Access:
    """Make a frame the owner of a state, and return its `Access`.

    An undo frame (`Frame.is_undo`) does not acquire a state that it only reads. When it writes a state that it has
    read, the state must still hold the value that was read.

    Raises:
        ForeignStateError: a call in another thread owns the state, or another thread has written it since it was read.
    """
    return locked(ownership, _acquire, state, kind, frame, access, writing)


def _acquire(state: Any, kind: Kind, frame: Any, access: Access | None, writing: bool) -> Access:
    owner = kind.owner(state)
    if owner is not None and owner.thread != frame.thread:
        raise foreign_state_error(state, kind, owner)
    if access is None:
        access = frame.accesses[id(state)] = Access(state, kind, owner, read=not writing)
    if not access.acquired and (writing or not frame.is_undo):
        if access.value_before is not UNKNOWN:
            _check_not_written(access)
        access.previous_owner, access.acquired = owner, True  # first: a frame that closes must know what to release
        commit([kind.set_owner(state, frame)])
    return access


def _check_not_written(access: Access) -> None:
    """Raise if another thread has written a state since an undo frame read it."""
    value = access.kind.get(access.state)
    # A tracer is of a transform of the state's library in this thread, which stores its result now.
    if value is not access.value_in_body and not _jax.leaked_tracers(value, None):
        raise changed_state_error(access.state, access.kind)


def moving(state: Any, kind: Kind, value: Any) -> list[Store]:
    """Stores of a state's value on other devices: for the open calls of this thread it is the value that they read."""
    current, stores, frame, inner = kind.get(state), [], _local.frame, None
    while frame is not None:
        access = frame.accesses.get(id(state))
        if access is not None and access.value_in_body is current:
            if inner is not None:  # it gives the state back as the call around it has it
                stores.append((setattr, inner, "value_before", value))
            if access.copy is not None:
                copy = Copy(value)
                value = copy.value
                stores.append((setattr, access, "copy", copy))
            stores.append((setattr, access, "value_in_body", value))
            inner = access
        frame = frame.parent
    return [*stores, kind.store(state, value)]


def publish(effects: Sequence[Effect], *, live: bool = True, also: Sequence[Store] = ()) -> None:
    """Store all writes of a call or none, and drop the values from the effects.

    `live`: see `Kind.announce`. `also`: stores for the same `commit`.

    Raises:
        ForeignStateError: another thread has written one of the states since the call began; publishing would lose
            that write.
        jax.errors.JaxRuntimeError: a function on the host has raised.
    """
    try:
        if _local.has_called_host:
            _jax.wait_for([effect.value for effect in effects])
            _local.has_called_host = _local.frame is not None  # the calls around it publish, too
        stores = [store for effect in effects for store in effect.kind.announce(effect, live)]
        frame = _local.frame
        for effect in effects:
            if frame is not None and effect.stepped and (access := frame.accesses.get(id(effect.state))) is not None:
                access.stepped = True
        locked(ownership, _store_unchanged, effects, [*stores, *also])
    finally:
        for effect in effects:
            effect.value = effect.value_before = UNKNOWN


def _store_unchanged(effects: Sequence[Effect], stores: list[Store]) -> None:
    if _local.frame is None:
        for effect in effects:
            check_unchanged(effect)
    held = [effect.kind.get(effect.state) for effect in effects]  # see `commit`
    commit(stores)
    del held


def check_unchanged(effect: Effect) -> None:
    """Raise unless the state still holds its value from the start of the call."""
    state, kind = effect.state, effect.kind
    owner = kind.owner(state)
    if owner is not None:
        raise foreign_state_error(state, kind, owner)
    if effect.value_before is not UNKNOWN and kind.get(state) is not effect.value_before:
        raise changed_state_error(state, kind)


def changed_state_error(state: Any, kind: Kind) -> ForeignStateError:
    """The error for a state that was written during a call that writes it, too."""
    return ForeignStateError(
        f"{describe(state, kind)} was written by another thread, or by a callback, during a call that reads and writes "
        "it, too. The call changed no state, since that write would be lost.\n"
        "Fix: guard the calls that share the state by a lock."
    )


def report_touch(state: Any, kind: Kind, frame: Any, owner: Any, *, writing: bool) -> None:
    """Report a touch of a state to each enclosing frame that has not seen it yet, outermost first.

    Args:
        frame: the current frame.
        owner: the owner of the state.
    """
    pending = []
    enclosing = frame
    while enclosing is not None and enclosing is not owner:
        pending.append(enclosing)
        enclosing = enclosing.parent
    if owner is not None and enclosing is not owner:
        raise foreign_state_error(state, kind, owner)
    for receiver in reversed(pending):
        # For the frames around the innermost, a write is a read until the transform publishes it: see decision 3.
        is_write = writing and receiver is frame
        if is_write or id(state) not in receiver.accesses:
            receiver.touch(state, kind, writing=is_write)


def foreign_state_error(state: Any, kind: Kind, owner: Any) -> ForeignStateError:
    """The error for a touch of a state whose owner is a frame of another thread, or one that is not running
    any more.
    """
    if owner.is_open and owner.thread != threading.get_ident():
        cause = f"another thread is running {owner.name}, which has its own value for it until it ends"
        fix = "trace the functions that share a state in one thread, or guard them by a lock"
    else:
        cause = f"it belongs to {owner.name}, a call that is not running here any more"
        fix = (
            "create states before the transformed call; do not touch one from a generator or callback that outlives it"
        )
    access = owner.accesses.get(id(state))
    value = None if access is None or access.value_before is UNKNOWN else access.value_before
    return ForeignStateError(f"{describe(state, kind, value=value)} cannot be used: {cause}.\nFix: {fix}.")


# -- kinds whose states report to frames ------------------------------------------------------------------------------


class WatchedKind(Kind):
    """Base of the kinds whose states frames watch; see `_states.Kind` for the methods that a kind adds.

    A kind must define `name`, `base`, `folder`, `get`, `store`, `read`, `write`, `invalidate`, `is_invalidated`,
    `owner`, `set_owner` and `site_of`.
    """

    # -- several states at once --

    def check_free(self, states: Sequence[Any]) -> None:
        """See `Kind.check_free`. Any owner belongs to another thread, since this one has no open frame."""
        for state in states:
            owner = self.owner(state)
            if owner is not None:
                raise foreign_state_error(state, self, owner)

    def get_all(self, states: Sequence[Any]) -> list[Any]:
        return locked(ownership, self._get_all, states)

    def _get_all(self, states: Sequence[Any]) -> list[Any]:
        if open_frames:  # else no state has an owner
            self.check_free(states)
        return self._values(states)

    def _values(self, states: Sequence[Any]) -> list[Any]:
        return [self.get(state) for state in states]

    def set_all(self, states: Sequence[Any], values: Iterable[Any]) -> None:
        locked(ownership, self._set_all, states, values)

    def _set_all(self, states: Sequence[Any], values: Iterable[Any]) -> None:
        if open_frames:
            self.check_free(states)
        commit([self.store_all(states, values)])

    # -- reads in a call, and writes after it --

    def touch(self, state: Any, frame: Any, *, writing: bool) -> None:
        """Report the first touch of a state in `frame` to each open frame that has not seen it yet, outermost first."""
        owner = self.owner(state)
        if owner is not frame:
            report_touch(state, self, frame, owner, writing=writing)

    def touched_value(self, state: Any, frame: Any) -> Any:
        """The value of a state that `frame` does not own, once its read is reported."""
        self.touch(state, frame, writing=False)
        if frame is not None and self.owner(state) is frame:  # no other thread can acquire it
            return self.get(state)
        return locked(ownership, self._free_value, state, frame)

    def _free_value(self, state: Any, frame: Any) -> Any:
        # An undo frame has not acquired the state: another thread may have done so since.
        owner = self.owner(state)
        if owner is not None and (frame is None or owner.thread != frame.thread):
            raise foreign_state_error(state, self, owner)
        return self.get(state)

    def announce(self, effect: Effect, live: bool) -> list[Store]:
        del live
        state, frame = effect.state, current_frame()
        store = self.store(state, effect.value)
        if effect.created:
            return [*self.adopt(state, effect.site), store]
        self.touch(state, frame, writing=True)
        access = None if frame is None else frame.accesses.get(id(state))
        check_write(state, self, effect.value, self.anchor(state, frame, access), effect.site)
        if frame is not None and access is not None:  # else no call is open, or the open call has made the state
            access.num_writes += effect.num_writes
            access.last_site = effect.last_site or effect.site
            frame.note_write(access, effect.site)
        return [store]

    def adopt(self, state: Any, site: str) -> list[Store]:
        """Stores that make a state of the present trace of one that was made in a trace that has ended."""
        return []

    def anchor(self, state: Any, frame: Any, access: Access | None) -> Any:
        """The innermost trace whose tracers a state may hold; None if it may hold none."""
        return _jax.current_trace() if access is None else frame.trace
