"""Which thread a state belongs to while frames are open, and the publication of what a call wrote."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .._atomic import Store, commit, locked
from .._errors import ForeignStateError
from .._states.messages import describe
from .._states.protocol import Kind
from .access import UNKNOWN, Access, Effect
from .current import _local

if TYPE_CHECKING:
    from .frame import Frame

# A state has one value. While a frame is open, that of each state it has touched is the frame's own: a tracer perhaps.
# So a state belongs to the innermost frame that has touched it, and another thread that touches it raises; a program that
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
