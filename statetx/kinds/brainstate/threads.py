"""States of brainstate that a call in another thread owns: they are neither read nor written.

brainstate's stacks are local to a thread, so a read in another thread reaches none of this thread's frames. The check
is therefore part of every read and write.
"""

from __future__ import annotations

import threading
from typing import Any

import brainstate

from ... import _frames, _jax, _states
from ..._atomic import locked
from ..native import NATIVE, Invalidated
from .observe import TraceObserver, context
from .view import View

# The innermost open frame that has touched a state, by the state's id. The frame's accesses keep the state alive, and
# so the id valid.
owners: dict[int, _frames.Frame] = {}


def check_free(state: brainstate.State) -> None:
    """Raise if a call in another thread owns this state."""
    if isinstance(state, View):
        return state.check_free()
    owner = owners.get(id(state))
    if owner is not None and owner.thread != threading.get_ident():
        kind = _states.kind_of_state(state)
        raise _frames.foreign_state_error(state, kind, owner)


def read_checked(state: brainstate.State) -> Any:
    # The lock keeps other threads from acquiring the state between the check and the read.
    return locked(_frames.ownership, lambda: (check_free(state), state._value)[1])


def install() -> None:
    """Let brainstate's states check, at every read and write, that no other thread owns them."""
    cls: Any = brainstate.State
    read_its_value, restore_value = brainstate.StateTraceStack.read_its_value, cls.restore_value

    def reported(self: brainstate.StateTraceStack, state: brainstate.State) -> None:
        check_free(state)  # before a transform of brainstate gives the state another value
        read_its_value(self, state)

    def read(self: Any) -> Any:
        # As in brainstate, with the check added. Python does not switch threads between the reads of `_value` and
        # `owners`, so a value of a frame is never taken for the value of a state without an owner.
        self.check_if_deleted()
        self._check_invalidated()
        value = self._value
        if type(value) is Invalidated:
            raise _states.invalidated_state_error(self, site_of(self), value.reason)
        return read_checked(self) if owners else value

    def write(self: Any, value: Any) -> None:
        locked(_frames.ownership, lambda: (check_free(self), setattr(self, "_value", value)))

    def restore(self: Any, value: Any) -> None:
        check_free(self)
        innermost = (
            context.state_stack[-1] if self._level < len(context.state_stack) else None
        )  # None: the state was made under this stack
        if isinstance(innermost, TraceObserver) and innermost.frame.is_undo:
            state, kind = (self.native, NATIVE) if isinstance(self, View) else (self, innermost.kind)
            access = innermost.frame.accesses.get(id(state))
            # A transform ends its staging by giving back what the call has read. Any other value is a write, which
            # brainstate reports as a read.
            if access is None or value is not access.value_in_body:
                innermost.frame.touch(state, kind, writing=True)
        restore_value(self, value)

    reason = (
        "A state that a call in another thread owns is not read or written: `ForeignStateError` instead of a lost "
        "update."
    )
    _jax.patches.replace("brainstate.StateTraceStack.read_its_value", brainstate.StateTraceStack, reported, reason)
    for name, function in (("_read_value", read), ("_write_value", write), ("restore_value", restore)):
        _jax.patches.replace(f"brainstate.State.{name}", cls, function, reason)


def site_of(state: brainstate.State) -> str:
    """The line that made a state."""
    return _jax.traceback_site(state.source_info.traceback, _states.library_folders())
