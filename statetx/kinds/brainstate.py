"""`brainstate.State` and its subclasses.

brainstate reports every read and write of a state's value to the `StateTraceStack`s entered in this thread since
the state was created, outermost first. Each frame enters its own stack, an observer that only reports to the frame. So
statetx's frames and brainstate's transforms nest in any order, and each sees its own accesses (decision 3).

The stacks are local to a thread: the read of a state in another thread reaches none of this thread's frames.
`_install_owner_checks` therefore checks, at every read and write, whether a frame of another thread owns the state.

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
_SMALL = 4096  # bytes; larger arrays in `environ` are compared by identity


class _Observer(brainstate.StateTraceStack):
    """The trace stack that a frame enters; it reports accesses to the frame."""

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
        # For an outer frame it is a read until the inner transform, statetx's or brainstate's, publishes it: see decision 3.
        innermost = _context.state_stack[-1] is self
        access = self.frame.accesses.get(id(state))
        if access is None or (innermost and not access.acquired):
            access = self.frame.touch(state, self.kind, writing=innermost)
        if innermost and (not access.written or _jax.current_trace() is not self.frame.trace):
            self.frame.mark_written(access)

    def append(self, state: brainstate.State) -> None:
        """brainstate calls this for each new state, as for its own `catch_new_states`."""
        if _innermost(_context.new_state_catcher) is self and not isinstance(state, View):
            self.frame.mark_created(state, self.kind)


class _Strays(weakref.WeakSet):
    """The states made while a trace stack of brainstate is the outermost; their level becomes 0 when the stack closes.

    brainstate leaves the level unchanged, so that no transform entered later at that depth would see a touch of them.
    """

    append = weakref.WeakSet.add


def _innermost(stacks: list[Any]) -> _Observer | None:
    return next((s for s in reversed(stacks) if isinstance(s, _Observer)), None)


# -- statetx.State under brainstate's transforms ---------------------------------------------------------------


class _Bridge:
    """The frame for a trace stack of brainstate: it reports accesses of `statetx.State`s to that stack.

    It restores no values: brainstate does so itself, when its transform has run.
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
        value_before = kind.get(state)
        if type(value_before) is _Invalidated:
            del self.accesses[id(state)]
            commit([kind.set_owner(state, access.previous_owner)])
            raise _states.invalidated_state_error(state, kind.site_of(state), value_before.reason)
        access.value_before = value_before
        self.stack.read_its_value(view_of(state, self._level_of(state)))
        access.value_in_body = kind.get(state)
        return access

    def _level_of(self, state: State) -> int:
        """The number of stacks that do not see the state: those outside the outermost frame that has touched it."""
        frame: Any = self
        while frame.parent is not None and id(state) in frame.parent.accesses:
            frame = frame.parent
        stack = frame.stack if isinstance(frame, _Bridge) else KIND.observer(frame)
        return _context.state_stack.index(stack)

    def note_write(self, access: _frames.Access, site: str = "") -> None:
        access.written = True
        access.site = site or _states.call_site()
        self.stack.write_its_value(access.state._view())  # not None: the stack keeps the view alive
        # brainstate reports a write to every stack at once, and some of its transforms rely on this when they store.
        outer: Any = self.parent
        if isinstance(outer, _Bridge) and id(access.state) in outer.accesses:
            outer.note_write(outer.accesses[id(access.state)], access.site)

    def open(self) -> list[Store]:
        strays = [] if self.strays is None else [(_context.new_state_catcher.append, self.strays)]
        return [*strays, (_frames.set_current_frame, self)]

    def mark_created(self, state: Any, kind: Any) -> None:
        if self.on_created is not None:
            self.on_created(state)
        if _is_catching_new_states():
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
            # brainstate manages the new states that it catches: its maps batch their values, its traces remove the tracers.
            if not _is_catching_new_states() and any(
                isinstance(x, _jax.Tracer) for x in jax.tree.leaves(kind.get(state))
            ):
                stores += kind.invalidate(state, f"it was created inside {self.name}", self)
            else:
                stores += _transferred(state, kind, self.parent)

        if self.strays is not None:
            index = _context.new_state_catcher.index(self.strays)
            stores.append((operator.delitem, _context.new_state_catcher, index))
            stores += [(operator.setitem, vars(state), "_level", 0) for state in self.strays]
        commit([*stores, (setattr, self, "is_open", False), (_frames.set_current_frame, self.parent)])
        for access in self.accesses.values():
            access.value_before = access.value_in_body = _frames.UNKNOWN
        self.trace = None


def _is_catching_new_states() -> bool:
    """Whether brainstate manages the states that are being made."""
    return any(not isinstance(c, (_Observer, _Strays)) for c in _context.new_state_catcher)


def _transferred(state: Any, kind: Any, frame: Any) -> list[Store]:
    """Stores that make `frame` the creator and owner of a state; None: no owner."""
    store = kind.set_owner(state, frame)
    return [store] if frame is None else [store, frame.creation(state, kind)]


def _bridge_stacks() -> None:
    """Let every trace stack of brainstate open a bridge while it is entered."""
    stack_enter, stack_exit = brainstate.StateTraceStack.__enter__, brainstate.StateTraceStack.__exit__
    bridges: dict[int, _Bridge] = {}

    def enter(self: brainstate.StateTraceStack) -> brainstate.StateTraceStack:
        stack = stack_enter(self)
        bridge = _Bridge(self)
        commit([(operator.setitem, bridges, id(self), bridge), *bridge.open()])
        return stack

    def leave(self: brainstate.StateTraceStack, *exc: Any) -> None:
        try:
            stack_exit(self, *exc)
        finally:
            bridge = bridges.pop(id(self), None)
            if bridge is not None:  # else the stack was entered before this module was imported
                bridge.close()

    reason = "While a transform of brainstate traces, `statetx.State`s report to it, so that it carries them like its own states."
    _jax.patches.replace("brainstate.StateTraceStack.__enter__", brainstate.StateTraceStack, enter, reason)
    _jax.patches.replace("brainstate.StateTraceStack.__exit__", brainstate.StateTraceStack, leave, reason)


_bridge_stacks()


# -- other threads ---------------------------------------------------------------------------------------------

# The innermost open frame that has touched a state, by the state's id. The frame's accesses keep the state alive, and so
# the id valid.
_owner: dict[int, _frames.Frame] = {}


def _check_free(state: brainstate.State) -> None:
    """Raise if a call in another thread owns this state."""
    if isinstance(state, View):
        return state.check_free()
    owner = _owner.get(id(state))
    if owner is not None and owner.thread != threading.get_ident():
        raise _frames.foreign_state_error(state, KIND, owner)


def _read_checked(state: brainstate.State) -> Any:
    # The lock keeps other threads from acquiring the state between the check and the read.
    return locked(_frames.ownership, lambda: (_check_free(state), state._value)[1])


def _install_owner_checks() -> None:
    """Let brainstate's states check, at every read and write, that no other thread owns them."""
    cls: Any = brainstate.State
    read_its_value, restore_value = brainstate.StateTraceStack.read_its_value, cls.restore_value

    def reported(self: brainstate.StateTraceStack, state: brainstate.State) -> None:
        _check_free(state)  # before a transform of brainstate gives the state another value
        read_its_value(self, state)

    def read(self: Any) -> Any:
        # As in brainstate, with the check added. Python does not switch threads between the reads of `_value` and `_owner`, so
        # a value of a frame is never taken for the value of a state without an owner.
        self.check_if_deleted()
        self._check_invalidated()
        value = self._value
        if type(value) is _Invalidated:
            raise _states.invalidated_state_error(self, KIND.site_of(self), value.reason)
        return _read_checked(self) if _owner else value

    def write(self: Any, value: Any) -> None:
        locked(_frames.ownership, lambda: (_check_free(self), setattr(self, "_value", value)))

    def restore(self: Any, value: Any) -> None:
        _check_free(self)
        innermost = (
            _context.state_stack[-1] if self._level < len(_context.state_stack) else None
        )  # None: the state was made under this stack
        if isinstance(innermost, _Observer) and innermost.frame.is_undo:
            state, kind = (self.native, NATIVE) if isinstance(self, View) else (self, KIND)
            innermost.frame.touch(state, kind, writing=True)  # brainstate reports it as a read
        restore_value(self, value)

    reason = "A state that a call in another thread owns is not read or written: `ForeignStateError` instead of a lost update."
    _jax.patches.replace("brainstate.StateTraceStack.read_its_value", brainstate.StateTraceStack, reported, reason)
    for name, function in (("_read_value", read), ("_write_value", write), ("restore_value", restore)):
        _jax.patches.replace(f"brainstate.State.{name}", cls, function, reason)


_install_owner_checks()


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
            # It holds a NumPy seed until its first read turns it into a key. Make the key here, outside any trace:
            # otherwise a tracer of the call would stay in the state after a mere read.
            with jax.ensure_compile_time_eval():
                state.check_if_deleted()
            value = state._value
        return value

    def check_free(self, states: Sequence[brainstate.State]) -> None:
        """Raise if a call in another thread owns one of these states."""
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
        # Without the hooks and checks of `.value`: a `Store` runs no Python code.
        return operator.setitem, vars(state), "_value", value

    def read(self, state: brainstate.State) -> Any:
        _private.record_state_value_read(state)
        value = self.get(state)  # as in `_install_owner_checks`
        if type(value) is _Invalidated:
            raise _states.invalidated_state_error(state, self.site_of(state), value.reason)
        return _read_checked(state) if _owner else value

    def write(self, state: brainstate.State, value: Any) -> None:
        state.value = value

    def announce(self, effect: _frames.Effect, live: bool) -> list[Store]:
        state = effect.state
        store = self.store(state, effect.value)
        if effect.created:
            # The trace in which the state was made has ended.
            trace_state = (operator.setitem, vars(state), "_trace_state", StateJaxTracer())
            return [trace_state, store]
        if not live:
            # Hooks ran when the body was traced, and are part of its values: report to the watchers only.
            _private.record_state_value_write(state)
        self._check(state, effect)
        _check_free(state)
        return [(operator.setitem, vars(state), "_been_writen", True), store]

    def _check(self, state: brainstate.State, effect: _frames.Effect) -> None:
        stacks = _context.state_stack
        if not stacks:
            if not state._trace_state.is_valid():  # made in the present trace, and dies with it
                _frames.check_write(state, self, effect.value, None, effect.site)
        elif isinstance(stacks[-1], _Observer):
            frame = stacks[-1].frame
            _frames.check_write(state, self, effect.value, frame.trace, effect.site)
            access = frame.accesses.get(id(state))
            if access is not None:  # else the state was made in this frame
                if not access.acquired:
                    frame.touch(state, self, writing=True)
                access.written, access.site = True, access.site or effect.site
        # Else a transform of brainstate is innermost, and removes the tracer from the state.

    def invalidate(self, state: brainstate.State, reason: str, closing: Any) -> list[Store]:
        del reason  # brainstate has its own message
        frame = _frames.enclosing_frame(closing)
        while isinstance(frame, _Bridge):
            frame = frame.parent
        level = len(_context.state_stack) if closing is None else _context.state_stack.index(self.observer(closing))
        stores = [
            self.store(state, _private._INVALIDATED_TRACE_VALUE),
            (operator.setitem, vars(state), "_level", level),
        ]
        return stores if frame is None else [*stores, frame.creation(state, self)]

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
        truncations = [
            (operator.delitem, stacks, slice(stacks.index(observer), None))
            for stacks in (_context.state_stack, _context.new_state_catcher)
        ]
        return [*truncations, (self._observers.pop, id(frame))]

    def is_idle(self) -> bool:
        return not _context.state_stack

    def mode(self) -> Hashable:
        # Every call of a compiled function needs the mode. The last key is valid while all values are the same objects, of
        # immutable types.
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
    """`freeze`, for quantities with their unit, and for arrays on a device by content."""
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
