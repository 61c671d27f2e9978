"""How brainstate's transforms see states of ours (decision 5), how frames see brainstate's.

Relied upon beyond the documented interface, and tested in `tests/test_brainstate.py`: the attributes ``_value``,
``_level`` of a state, its methods ``_read_value`` and ``_invalidate_trace_value``; the functions that make a predicate
from the states declared to a `vmap`.
"""

from __future__ import annotations

import functools
import operator
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any, NoReturn

import brainstate
import jax
from brainstate import _state as _private
from brainstate.transform import _mapping1 as _declared
from brainstate.transform import _mapping_core as _selected

from ... import _frames, _jax, _states
from ..._atomic import Store, commit, locked
from ..._errors import StateAccessError
from ..native import NATIVE, Invalidated, RngState, State, _reset_dead_home

context: Any = _private.TRACE_CONTEXT
"""brainstate's stacks of this thread."""


_STATES = (os.path.join(os.path.dirname(brainstate.__file__), "_state"),)  # and modules of their hooks
_TRANSFORMS = (os.path.join(os.path.dirname(brainstate.transform.__file__), ""),)


class View(brainstate.State):
    """A `brainstate.State` without a value of its own: it reads and writes the value of a `statetx.State`."""

    native: State

    @property
    def _value(self) -> Any:
        return self.native._value

    @_value.setter
    def _value(self, value: Any) -> None:
        native, frame = self.native, _frames.current_frame()
        if native._home is not None:  # made inside the transform that now stores its result
            _reset_dead_home(native, frame if frame is not None and native._owner is frame else None)
        native._value = value

    def _read_value(self) -> Any:
        # The lock keeps other threads from acquiring the state between the check and the read.
        return locked(_frames.ownership, lambda: (self.check_free(), self._value)[1])

    def check_free(self) -> None:
        """Raise if a call in another thread owns the state."""
        owner = self.native._owner
        if owner is not None and owner.thread != threading.get_ident():
            raise _frames.foreign_state_error(self.native, NATIVE, owner)

    def _invalidate_trace_value(self) -> None:
        commit(NATIVE.invalidate(self.native, "it was created inside a transform of brainstate", None))

    @property
    def type(self) -> type:
        """Type for brainstate's filters: `statetx.Param` selects the views of `statetx.Param`s."""
        return type(self.native)

    def __repr__(self) -> str:
        return _states.describe(self.native, NATIVE)

    def raise_error_with_source_info(self, error: Exception) -> NoReturn:
        raise StateAccessError(
            f"{self!r} cannot be used in this way under a transform of brainstate: {' '.join(str(error).split())}\n"
            f"Fix: declare the state where brainstate asks for it, or use statetx's transform of the same name."
        ) from error


class _RandomView(View, brainstate.random.RandomState):
    """The view of an `RngState`: a brainstate `vmap` gives each example its own key."""

    def check_if_deleted(self) -> None:
        # brainstate would make a typed key of a NumPy value, its placeholder for a seed; here it is the user's own key
        pass


_TEMPLATE = brainstate.State(None)


def view_of(state: State, level: int) -> View:
    """The view of a state, made at its first touch by a transform of brainstate.

    `level`: the number of trace stacks that do not see the state; brainstate reports a touch to those entered later.
    """
    view: Any = None if state._view is None else state._view()
    if view is None:
        attributes = vars(_TEMPLATE.copy()).copy()  # without its constructor, which would report a new state
        del attributes["_value"]
        view = object.__new__(_RandomView if isinstance(state, RngState) else View)
        view.__dict__.update(attributes, native=state, _level=level, _name=state.name, _backup=None)
        state._view = weakref.ref(
            view
        )  # a strong reference would make a cycle, and keep a transform's leftovers until it is collected
    elif level < view._level:  # the view was made inside a transform that it has outlived
        view.__dict__["_level"] = level
    return view


def _with_views(select: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Let a function of brainstate that turns states into a predicate accept `statetx.State`s."""

    def view(x: Any) -> Any:
        return view_of(x, len(context.state_stack)) if isinstance(x, State) else x

    @functools.wraps(select)
    def selected(states: Any) -> Any:
        views = jax.tree.map(view, states)
        predicate = select(views)

        def is_selected(*args: Any) -> bool:
            return predicate(*args)

        is_selected.__dict__["views"] = views  # keeps them alive: the predicate compares ids
        return is_selected

    return selected


for _module, _name in ((_declared, "make_identity_predicate"), (_selected, "coerce_axis_value_to_predicate")):
    _jax.patches.replace(
        f"{_module.__name__}.{_name}",
        _module,
        _with_views(getattr(_module, _name)),
        "The arguments that declare states to a map of brainstate may be `statetx.State`s, too; any other argument "
        "is forwarded.",
    )


# -- frames observe brainstate's states --------------------------------------------------------------------------------


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
            (operator.setitem, flags, slice(None), earlier + [False] * (len(flags) - len(earlier)))
            for flags, earlier in self.written
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
                access = self.frame.touch(state.native, NATIVE, writing=True)
                access.count_write(is_known=False)
                self.frame.note_write(access)
            return
        if not state._been_writen:
            self.unwritten.append(state)
        # For an outer frame it is a read until the inner transform, statetx's or brainstate's, publishes it: see
        # decision 3.
        innermost = context.state_stack[-1] is self
        access = self.frame.accesses.get(id(state))
        if access is None or (innermost and not access.acquired):
            access = self.frame.touch(state, self.kind, writing=innermost)
        if innermost:
            access.count_write(not _states.is_called_from(_TRANSFORMS, through=_STATES))
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


# -- states that a call in another thread owns: they are neither read nor written -------------------------------------
#
# brainstate's stacks are local to a thread, so a read in another thread reaches none of this thread's frames. The check
# is therefore part of every read and write.

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
            # A transform ends its staging by restoring the values that the call has read. Any other value is a write,
            # which brainstate reports as a read.
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
