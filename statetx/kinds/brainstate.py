"""`brainstate.State` and its subclasses.

brainstate reports every read and write of a state's value to the `StateTraceStack`s entered in this thread since
the state was created, outermost first. Each frame enters one of its own, a pure observer, so statetx's frames and
brainstate's transforms nest in any order and each sees what it should.

These stacks are a thread's own: the read of a state in another thread reaches none of this thread's frames. `_guard`
therefore looks, at every read and write, whether the state belongs to a frame of another thread.

Relied upon beyond the documented interface, and tested in `tests/test_brainstate.py`: the attributes ``_value``,
``_level``, ``_been_writen`` of a state; its methods ``_read_value`` and ``_write_value``, through which `value` goes; the
thread's ``TRACE_CONTEXT`` (``state_stack``, ``new_state_catcher``).
"""

from __future__ import annotations

import collections
import itertools
import operator
import os
import threading
import weakref
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
from brainstate import _state as _private
from brainstate.util import StateJaxTracer

from .. import _frames, _jax, _states
from .._atomic import Store, commit, locked
from .._tree import Identity, freeze
from ._views import View, view_of
from .native import NATIVE, State, _Invalidated

_context: Any = _private.TRACE_CONTEXT
_NAME = itertools.repeat("_value")
_put: Any = operator.setitem
_environment: Any = brainstate.environ._ENV_STATE
_IMMUTABLE = frozenset({bool, int, float, str, type(None)})
_DETERMINISTIC = "_state.py transform graph random util nn/_collective_ops.py nn/_common.py nn/_module.py".split()
_SMALL = 4096  # bytes; larger arrays in `environ` are told apart by identity


class _Observer(brainstate.StateTraceStack):
    """A frame's place on brainstate's stack."""

    def __init__(self, frame: _frames.Frame, kind: _Brainstate):
        super().__init__(name=None)
        self.frame = frame
        self.kind = kind

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
            if _context.state_stack[-1] is self:
                self.frame.note_write(self.frame.touch(state.native, NATIVE, writing=True))
            return
        # For a frame further out it is no write before the transform inside it, ours or brainstate's, publishes it.
        innermost = _context.state_stack[-1] is self
        access = self.frame.accesses.get(id(state))
        if access is None or (innermost and not access.acquired):
            access = self.frame.touch(state, self.kind, writing=innermost)
        if innermost and (not access.written or _jax.current_trace() is not self.frame.trace):
            self.frame.mark_written(access)

    def append(self, state: brainstate.State) -> None:
        """Called for each state created, as brainstate does for its `catch_new_states`."""
        if _innermost(_context.new_state_catcher) is self and not isinstance(state, View):
            self.frame.mark_created(state, self.kind)


class _Strays(weakref.WeakSet):
    """The states made while a trace stack of brainstate's is the outermost: their level ends with that.

    brainstate leaves it as deep as it was, so that no transform entered later at that depth would see them touched.
    """

    append = weakref.WeakSet.add


def _innermost(stacks: list[Any]) -> _Observer | None:
    return next((s for s in reversed(stacks) if isinstance(s, _Observer)), None)


# -- statetx.State under brainstate's transforms ---------------------------------------------------------------


class _Bridge:
    """A frame of ours for a trace stack of brainstate's: reports what happens to `statetx.State`s to that stack.

    brainstate gives the old values back itself, when its transform has run.
    """

    is_undo = False

    def __init__(self, stack: brainstate.StateTraceStack):
        self.name = f"a transform of brainstate ({stack.name or 'StateTraceStack'})"
        self.stack = stack
        self.parent = _frames.current_frame()
        self.on_created = None if self.parent is None else self.parent.on_created
        self.trace = _jax.current_trace()
        self.thread = threading.get_ident()
        self.accesses: dict[int, _frames.Access] = {}
        self.is_open = True
        self.strays = _Strays() if len(_context.state_stack) == 1 else None
        self._created: list[tuple[Any, Any]] = []

    def touch(self, state: Any, kind: Any, *, writing: bool) -> _frames.Access:
        access = _frames.acquire(state, kind, self, writing=writing)
        before = kind.get(state)
        if type(before) is _Invalidated:
            del self.accesses[id(state)]
            commit([kind.set_owner(state, access.previous_owner)])
            raise _states.invalidated_state_error(state, kind.site_of(state), before.reason)
        access.value_before = before
        self.stack.read_its_value(view_of(state, self._level_of(state)))
        access.value_in_body = kind.get(state)
        return access

    def _level_of(self, state: State) -> int:
        """How many stacks there were when the state was made: those outside the outermost frame that has touched it."""
        frame: Any = self
        while frame.parent is not None and id(state) in frame.parent.accesses:
            frame = frame.parent
        stack = frame.stack if isinstance(frame, _Bridge) else KIND.observer(frame)
        return _context.state_stack.index(stack)

    def note_write(self, access: _frames.Access, site: str = "") -> None:
        access.written = True
        access.site = site or _states.call_site()
        self.stack.write_its_value(access.state._view())  # which the stack keeps alive
        # brainstate reports a write to every stack at once, and some of its transforms rely on that when they store.
        outer: Any = self.parent
        if isinstance(outer, _Bridge) and id(access.state) in outer.accesses:
            outer.note_write(outer.accesses[id(access.state)], access.site)

    def open(self) -> list[Store]:
        strays = [] if self.strays is None else [(_context.new_state_catcher.append, self.strays)]
        return [*strays, (_frames.set_current_frame, self)]

    def mark_created(self, state: Any, kind: Any) -> None:
        if self.on_created is not None:
            self.on_created(state)
        if _is_caught():
            _private.record_state_init(view_of(state, len(_context.state_stack)))
        commit([self.creation(state, kind)])

    def creation(self, state: Any, kind: Any) -> Store:
        return self._created.append, (weakref.ref(state), kind)

    def close(self) -> None:
        if not self.is_open:
            return
        stores = [access.kind.set_owner(access.state, access.previous_owner) for access in self.accesses.values()]
        for state, kind in [(ref(), kind) for ref, kind in self._created]:
            if state is None:
                continue
            # brainstate looks after what it catches: its maps batch the values, its traces take them out again.
            if not _is_caught() and any(isinstance(x, _jax.Tracer) for x in jax.tree.leaves(kind.get(state))):
                stores += kind.invalidate(state, f"it was created inside {self.name}", self)
            else:
                stores += _handed_over(state, kind, self.parent)
        if self.strays is not None:
            place = _context.new_state_catcher.index(self.strays)
            stores.append((operator.delitem, _context.new_state_catcher, place))
            stores += [(operator.setitem, vars(state), "_level", 0) for state in self.strays]
        commit([*stores, (setattr, self, "is_open", False), (_frames.set_current_frame, self.parent)])
        for access in self.accesses.values():
            access.value_before = access.value_in_body = _frames.UNKNOWN
        self.trace = None


def _is_caught() -> bool:
    """Whether brainstate looks after the states that are made now."""
    return any(not isinstance(c, (_Observer, _Strays)) for c in _context.new_state_catcher)


def _handed_over(state: Any, kind: Any, frame: Any) -> list[Store]:
    """Stores that make a state one that this frame has made, or nobody's."""
    set_owner = kind.set_owner(state, frame)
    return [set_owner] if frame is None else [set_owner, frame.creation(state, kind)]


def _watch_stacks() -> None:
    """Have every trace stack of brainstate's open a bridge while it is entered."""
    enter, leave = brainstate.StateTraceStack.__enter__, brainstate.StateTraceStack.__exit__
    bridges: dict[int, _Bridge] = {}

    def entered(self: brainstate.StateTraceStack) -> brainstate.StateTraceStack:
        stack = enter(self)
        bridge = _Bridge(self)
        commit([(operator.setitem, bridges, id(self), bridge), *bridge.open()])
        return stack

    def left(self: brainstate.StateTraceStack, *exc: Any) -> None:
        try:
            leave(self, *exc)
        finally:
            bridge = bridges.pop(id(self), None)
            if bridge is not None:  # else it was entered before this module was imported
                bridge.close()

    reason = "While a transform of brainstate's traces, `statetx.State`s report to it, so that it carries them as it carries its own."
    _jax.patches.replace("brainstate.StateTraceStack.__enter__", brainstate.StateTraceStack, entered, reason)
    _jax.patches.replace("brainstate.StateTraceStack.__exit__", brainstate.StateTraceStack, left, reason)


_watch_stacks()


# -- other threads ---------------------------------------------------------------------------------------------

# The innermost frame that has touched a state, by the state's id, while that frame is open: its accesses keep the state
# alive.
_owner: dict[int, _frames.Frame] = {}


def _check_free(state: brainstate.State) -> None:
    """Raise if a call in another thread holds the value of this state."""
    if isinstance(state, View):
        return state.check_free()
    owner = _owner.get(id(state))
    if owner is not None and owner.thread != threading.get_ident():
        raise _frames.foreign_state_error(state, KIND, owner)


def _read_carefully(state: brainstate.State) -> Any:
    # Under the lock no other thread takes it between the look and the read.
    return locked(_frames.ownership, lambda: (_check_free(state), state._value)[1])


def _guard() -> None:
    """Have brainstate's states look, whenever they are read or written, whether another thread holds them."""
    cls: Any = brainstate.State
    read_its_value, restore_value = brainstate.StateTraceStack.read_its_value, cls.restore_value

    def reported(self: brainstate.StateTraceStack, state: brainstate.State) -> None:
        _check_free(state)  # before the stack of a transform of brainstate's gives the state another value
        read_its_value(self, state)

    def read(self: Any) -> Any:
        # As brainstate has it, but for the look. Python does not change threads between the last read and that look, so
        # that a value which belongs to a frame is never taken for one that belongs to nobody.
        self.check_if_deleted()
        self._check_invalidated()
        value = self._value
        if type(value) is _Invalidated:
            raise _states.invalidated_state_error(self, KIND.site_of(self), value.reason)
        return _read_carefully(self) if _owner else value

    def write(self: Any, value: Any) -> None:
        locked(_frames.ownership, lambda: (_check_free(self), setattr(self, "_value", value)))

    def restore(self: Any, value: Any) -> None:
        _check_free(self)
        innermost = (
            _context.state_stack[-1] if self._level < len(_context.state_stack) else None
        )  # None: it was made here
        if isinstance(innermost, _Observer) and innermost.frame.is_undo:
            state, kind = (self.native, NATIVE) if isinstance(self, View) else (self, KIND)
            innermost.frame.touch(state, kind, writing=True)  # brainstate reports it as a read
        restore_value(self, value)

    reason = "A state that a call in another thread holds is not read or written: `ForeignStateError` instead of a lost update."
    _jax.patches.replace("brainstate.StateTraceStack.read_its_value", brainstate.StateTraceStack, reported, reason)
    for name, function in (("_read_value", read), ("_write_value", write), ("restore_value", restore)):
        _jax.patches.replace(f"brainstate.State.{name}", cls, function, reason)


_guard()


class _Brainstate:
    """See `_states.Kind`."""

    name = "brainstate"
    base = brainstate.State
    deterministic_paths = tuple(
        os.path.join(os.path.dirname(brainstate.__file__), *f.split("/")) for f in _DETERMINISTIC
    )
    bookkeeping: frozenset[str] = frozenset(
        "_trace_state _value _level _source_info _hooks_manager _name _been_writen _backup".split()
    )
    folder = os.path.dirname(brainstate.__file__)

    def __init__(self) -> None:
        self._observers: dict[int, _Observer] = {}
        self._last_mode: tuple[dict[str, Any], Hashable] = ({}, ())

    def owns(self, obj: Any) -> bool:
        return isinstance(obj, brainstate.State)

    def is_opaque(self, obj: Any) -> bool:
        return isinstance(obj, (brainstate.State, brainstate.graph.Node))

    def get(self, state: brainstate.State) -> Any:
        value = state._value
        if isinstance(state, brainstate.random.RandomState) and isinstance(value, np.ndarray):
            # It keeps a NumPy seed until its first read makes a key of it. Make the key here, outside any trace,
            # lest a tracer of the call stay behind after a mere read.
            with jax.ensure_compile_time_eval():
                state.check_if_deleted()
            value = state._value
        return value

    def check_free(self, states: Sequence[brainstate.State]) -> None:
        """Raise if a call in another thread holds the value of one of these states."""
        if _owner:
            for s in states:
                _check_free(s)

    def get_all(self, states: Sequence[brainstate.State]) -> list[Any]:
        return locked(_frames.ownership, self._get_all, states)

    def _get_all(self, states: Sequence[brainstate.State]) -> list[Any]:
        if _frames.open_frames:
            self.check_free(states)
        return [s.__dict__["_value"] for s in states]

    def set_all(self, states: Sequence[Any], values: Iterable[Any]) -> None:
        locked(_frames.ownership, self._set_all, states, values)

    def _set_all(self, states: Sequence[Any], values: Iterable[Any]) -> None:
        if _frames.open_frames:
            self.check_free(states)
        commit([self.store_all(states, values)])

    def store_all(self, states: Sequence[Any], values: Iterable[Any]) -> Store:
        return collections.deque, map(_put, map(vars, states), _NAME, values), 0

    def store(self, state: Any, value: Any) -> Store:
        # Past the hooks and guards of `.value`: nothing of the user's happens here.
        return operator.setitem, vars(state), "_value", value

    def read(self, state: brainstate.State) -> Any:
        _private.record_state_value_read(state)
        value = self.get(state)  # as in `_guard`
        if type(value) is _Invalidated:
            raise _states.invalidated_state_error(state, self.site_of(state), value.reason)
        return _read_carefully(state) if _owner else value

    def write(self, state: brainstate.State, value: Any) -> None:
        state.value = value

    def announce(self, effect: _frames.Effect, live: bool) -> list[Store]:
        state = effect.state
        store = self.store(state, effect.value)
        if effect.created:
            trace_state = (
                operator.setitem,
                vars(state),
                "_trace_state",
                StateJaxTracer(),
            )  # that of its making has ended
            return [trace_state, store]
        if not live:
            # Hooks ran in the body, when it was traced, and are part of its values: only the watchers are told.
            _private.record_state_value_write(state)
        self._check(state, effect)
        _check_free(state)
        return [(operator.setitem, vars(state), "_been_writen", True), store]

    def _check(self, state: brainstate.State, effect: _frames.Effect) -> None:
        stacks = _context.state_stack
        if not stacks:
            if not state._trace_state.is_valid():  # made in this very trace, it dies with it
                _frames.check_write(state, self, effect.value, None, effect.site)
        elif isinstance(stacks[-1], _Observer):
            frame = stacks[-1].frame
            _frames.check_write(state, self, effect.value, frame.trace, effect.site)
            access = frame.accesses.get(id(state))
            if access is not None:  # else it was made in this very frame
                if not access.acquired:
                    frame.touch(state, self, writing=True)
                access.written, access.site = True, access.site or effect.site
        # Else one of brainstate's own transforms is innermost, and takes the tracer out of the state again.

    def invalidate(self, state: brainstate.State, reason: str, closing: Any) -> list[Store]:
        del reason  # brainstate has its own message for a state whose trace has ended
        enclosing_frame = _frames.enclosing_frame(closing)
        while isinstance(enclosing_frame, _Bridge):
            enclosing_frame = enclosing_frame.parent
        level = len(_context.state_stack) if closing is None else _context.state_stack.index(self.observer(closing))
        stores = [
            self.store(state, _private._INVALIDATED_TRACE_VALUE),
            (operator.setitem, vars(state), "_level", level),
        ]
        return stores if enclosing_frame is None else [*stores, enclosing_frame.creation(state, self)]

    def is_invalidated(self, state: brainstate.State) -> bool:
        return isinstance(vars(state)["_value"], (_Invalidated, _private._InvalidatedTraceValue))

    def owner(self, state: brainstate.State) -> _frames.Frame | None:
        return _owner.get(id(state))

    def set_owner(self, state: brainstate.State, frame: Any) -> Store:
        return (_owner.pop, id(state), None) if frame is None else (operator.setitem, _owner, id(state), frame)

    def is_random(self, state: brainstate.State) -> bool:
        return isinstance(state, brainstate.random.RandomState)

    def name_of(self, state: brainstate.State) -> str | None:
        return state.name

    def site_of(self, state: brainstate.State) -> str:
        return _jax.traceback_site(state.source_info.traceback, _states.library_folders())

    def open(self, frame: _frames.Frame) -> list[Store]:
        observer = _Observer(frame, self)
        return [
            (operator.setitem, self._observers, id(frame), observer),
            (_context.state_stack.append, observer),
            (_context.new_state_catcher.append, observer),
        ]

    def observer(self, frame: _frames.Frame) -> _Observer:
        return self._observers[id(frame)]

    def close(self, frame: _frames.Frame) -> list[Store]:
        observer = self.observer(frame)
        cuts = [
            (operator.delitem, stacks, slice(stacks.index(observer), None))
            for stacks in (_context.state_stack, _context.new_state_catcher)
        ]
        return [*cuts, (self._observers.pop, id(frame))]

    def is_idle(self) -> bool:
        return not _context.state_stack

    def mode(self) -> Hashable:
        # Asked for by every call of a compiled function: the key of the last answer serves while all values, of types
        # that cannot change, are the same objects.
        is_plain = not any(_environment.contexts.values())
        settings = _environment.settings.copy() if is_plain else brainstate.environ.all()
        last, key = self._last_mode
        if len(settings) == len(last):
            for name, value in settings.items():
                if last.get(name, self) is not value or type(value) not in _IMMUTABLE:
                    break
            else:
                return key
        key = tuple([(name, _freeze(value)) for name, value in settings.items()])
        self._last_mode = (settings, key)
        return key


def _freeze(value: Any) -> Hashable:
    """`freeze`, with the unit of a quantity and the content of an array on a device."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return freeze(value)
    leaves, treedef = jax.tree.flatten(value)
    return (treedef, *(_freeze_leaf(leaf) for leaf in leaves))


def _freeze_leaf(leaf: Any) -> Hashable:
    if isinstance(leaf, jax.Array):
        extended = jnp.issubdtype(leaf.dtype, jax.dtypes.extended)
        if isinstance(leaf, _jax.Tracer) or extended or leaf.nbytes > _SMALL:
            return Identity(leaf)
        return freeze(np.asarray(leaf))
    return freeze(leaf)


KIND = _Brainstate()
