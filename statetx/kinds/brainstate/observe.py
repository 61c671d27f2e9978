"""Frames observe brainstate's states: the trace stack that a frame enters reports to the frame."""

from __future__ import annotations

import operator
import weakref
from typing import Any

import brainstate
from brainstate import _state as _private

from ... import _frames, _jax, _states
from ..._atomic import Store
from ..native import NATIVE, State
from .view import View

context: Any = _private.TRACE_CONTEXT
"""brainstate's stacks of this thread."""


class TraceObserver(brainstate.StateTraceStack):
    """The trace stack that a frame enters; it reports accesses to the frame.

    Attributes:
        written: the flags of the stacks around it, which say of each state whether it was written.
        unwritten: states that the call was the first to write.
    """

    def __init__(self, frame: _frames.Frame, kind: _states.Kind):
        super().__init__(name=None)
        self.frame = frame
        self.kind = kind
        self.written = [(stack.been_writen, stack.been_writen.copy()) for stack in context.state_stack]
        self.unwritten: list[brainstate.State] = []

    def unreport(self) -> list[Store]:
        """Stores that make reads of the writes that brainstate has noted: in the stacks around this one, and in the
        states.

        Nothing is written until the transform publishes it, and then it is noted again: see decision 3.
        """
        stacks = [
            (operator.setitem, flags, slice(None), before + [False] * (len(flags) - len(before)))
            for flags, before in self.written
            if flags
        ]
        return [*stacks, *((operator.setitem, vars(state), "_been_writen", False) for state in self.unwritten)]

    def read_its_value(self, state: brainstate.State) -> None:
        if isinstance(state, View):
            self._touch_native(state.native)
        elif id(state) not in self.frame.accesses:
            self.frame.touch(state, self.kind, writing=False)

    def _touch_native(self, state: State) -> None:
        if id(state) not in self.frame.accesses:
            state.touch_from(self.frame)

    def write_its_value(self, state: brainstate.State) -> None:
        if isinstance(state, View):
            self._touch_native(state.native)
            if context.state_stack[-1] is self:
                self.frame.note_write(self.frame.touch(state.native, NATIVE, writing=True))
            return
        if not state._been_writen:
            self.unwritten.append(state)
        # For an outer frame it is a read until the inner transform, statetx's or brainstate's, publishes it: see
        # decision 3.
        innermost = context.state_stack[-1] is self
        access = self.frame.accesses.get(id(state))
        if access is None or (innermost and not access.acquired):
            access = self.frame.touch(state, self.kind, writing=innermost)
        if innermost and (not access.written or _jax.current_trace() is not self.frame.trace):
            self.frame.mark_written(access)

    def append(self, state: brainstate.State) -> None:
        """brainstate calls this for each new state, as for its own `catch_new_states`."""
        # brainstate appends a new state to every catcher; it belongs to the innermost frame only.
        if innermost(context.new_state_catcher) is self and not isinstance(state, View):
            self.frame.mark_created(state, self.kind)


class Strays(weakref.WeakSet):
    """The states made while a trace stack of brainstate is the outermost; their level becomes 0 when the stack closes.

    brainstate leaves the level unchanged, so that no transform entered later at that depth would see a touch of them.
    """

    append = weakref.WeakSet.add


def innermost(stacks: list[Any]) -> TraceObserver | None:
    return next((s for s in reversed(stacks) if isinstance(s, TraceObserver)), None)


observers: dict[int, TraceObserver] = {}
"""By the id of an open frame."""


def observer_of(frame: _frames.Frame) -> TraceObserver:
    return observers[id(frame)]
