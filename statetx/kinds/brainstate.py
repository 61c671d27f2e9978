"""`brainstate.State` and its subclasses.

brainstate reports every read and write of a state's value to the `StateTraceStack`s entered in this thread since
the state was created, outermost first. Each frame enters one of its own, a pure observer, so statetx's frames and
brainstate's transforms nest in any order and each sees what it should.

These stacks are a thread's own: the read of a state in another thread reaches none of this thread's frames. `_guard`
therefore looks, at every read and write, whether the state belongs to a frame of another thread.

Relied upon beyond the documented interface, and tested in `tests/test_brainstate.py`: the attributes ``_value``,
``_level``, ``_been_writen`` of a state; its methods ``_read_value`` and ``_write_value``, through which `value` goes; the
thread's ``TRACE_CONTEXT`` (``state_stack``, ``new_state_catcher``); the functions that make a selector of the states
declared to a `vmap`.
"""

from __future__ import annotations

import functools
import os
import threading
import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NoReturn

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
from brainstate import _state as _private
from brainstate.transform import _mapping1 as _declared
from brainstate.transform import _mapping_core as _selected

from .. import _compat, _registry
from .._errors import StateAccessError
from .._state import NATIVE, RngState, State, _Buried
from .._tree import Identity, freeze

_context: Any = _private.TRACE_CONTEXT
_environment: Any = brainstate.environ._ENV_STATE
_IMMUTABLE = frozenset({bool, int, float, str, type(None)})
_SMALL = 4096  # bytes; larger arrays in `environ` are told apart by identity


class _Observer(brainstate.StateTraceStack):
    """A frame's place on brainstate's stack."""

    def __init__(self, frame: _registry.Frame, kind: _Brainstate):
        super().__init__(name=None)
        self.frame = frame
        self.kind = kind

    def read_its_value(self, state: brainstate.State) -> None:
        if isinstance(state, _View):
            self._touch_native(state.native)
        elif id(state) not in self.frame.accesses:
            self.frame.touch(state, self.kind, writing=False)

    def _touch_native(self, state: State) -> None:
        if id(state) not in self.frame.accesses:
            state.touch_from(self.frame)

    def write_its_value(self, state: brainstate.State) -> None:
        if isinstance(state, _View):
            self._touch_native(state.native)
            if _context.state_stack[-1] is self:
                self.frame.note_write(self.frame.accesses[id(state.native)])
            return
        # For a frame further out it is no write before the transform inside it, ours or brainstate's, publishes it.
        innermost = _context.state_stack[-1] is self
        access = self.frame.accesses.get(id(state))
        if access is None:
            access = self.frame.touch(state, self.kind, writing=innermost)
        if innermost and (not access.written or _compat.current_trace() is not self.frame.trace):
            self.frame.mark_written(access)

    def append(self, state: brainstate.State) -> None:
        """Called for each state created, as brainstate does for its `catch_new_states`."""
        if _innermost(_context.new_state_catcher) is self:
            self.frame.mark_created(state, self.kind)


def _innermost(stacks: list[Any]) -> _Observer | None:
    return next((s for s in reversed(stacks) if isinstance(s, _Observer)), None)


# -- statetx.State under brainstate's transforms ---------------------------------------------------------------


class _View(brainstate.State):
    """What brainstate takes a `statetx.State` for: a state of its own whose value is that of the other."""

    native: State

    @property
    def _value(self) -> Any:
        return self.native._value

    @_value.setter
    def _value(self, value: Any) -> None:
        self.native._value = value

    def _read_value(self) -> Any:
        return _read_carefully(self)

    @property
    def type(self) -> type:
        """brainstate's filters ask for it: `statetx.Param` selects the views of `statetx.Param`s."""
        return type(self.native)

    def __repr__(self) -> str:
        return _registry.describe(self.native, NATIVE)

    def raise_error_with_source_info(self, error: Exception) -> NoReturn:
        raise StateAccessError(
            f"{self!r} cannot be used in this way under a transform of brainstate: {' '.join(str(error).split())}\n"
            f"Fix: declare the state where brainstate asks for it, or use statetx's transform of the same name."
        ) from error


class _RandomView(_View, brainstate.random.RandomState):
    """That of an `RngState`: a brainstate `vmap` gives each example a key of its own."""

    def check_if_deleted(self) -> None:
        pass  # a NumPy key is no placeholder here


_TEMPLATE = brainstate.State(None)


def _view_of(state: State, level: int) -> _View:
    if state._view is None:
        attributes = vars(_TEMPLATE.copy()).copy()  # made without its constructor, which would announce a new state
        del attributes["_value"]
        view: Any = object.__new__(_RandomView if isinstance(state, RngState) else _View)
        view.__dict__.update(attributes, native=state, _level=level, _name=state.name, _backup=None)
        state._view = view
    elif level < state._view._level:  # made inside a transform that it has outlived
        state._view.__dict__["_level"] = level
    return state._view


def _with_views(select: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Let a function of brainstate's that makes a selector of states take `statetx.State`s."""

    def view(x: Any) -> Any:
        return _view_of(x, len(_context.state_stack)) if isinstance(x, State) else x

    @functools.wraps(select)
    def selected(states: Any) -> Any:
        return select(jax.tree.map(view, states))

    return selected


for _module, _name in ((_declared, "make_identity_predicate"), (_selected, "coerce_axis_value_to_predicate")):
    setattr(_module, _name, _with_views(getattr(_module, _name)))


class _Bridge:
    """A frame of ours for a trace stack of brainstate's: reports what happens to `statetx.State`s to that stack.

    brainstate gives the old values back itself, when its transform has run.
    """

    def __init__(self, stack: brainstate.StateTraceStack):
        self.name = f"a transform of brainstate ({stack.name or 'StateTraceStack'})"
        self.stack = stack
        self.parent = _registry.current_frame()
        self.trace = _compat.current_trace()
        self.thread = threading.get_ident()
        self.accesses: dict[int, _registry.Access] = {}
        self.is_open = True
        self._created: list[tuple[weakref.ref, Any]] = []

    def touch(self, state: Any, kind: Any, *, writing: bool) -> _registry.Access:
        owner = _registry.take(state, kind, self)
        before = kind.get(state)
        if type(before) is _Buried:
            kind.own(state, owner)
            raise _registry.buried(state, kind.site_of(state), before.reason)
        access = self.accesses[id(state)] = _registry.Access(state, kind, before, before, not writing, owner)
        self.stack.read_its_value(_view_of(state, self._level_of(state)))
        access.entered = kind.get(state)
        return access

    def _level_of(self, state: State) -> int:
        """How many stacks there were when the state was made: those outside the outermost frame that has touched it."""
        frame: Any = self
        while frame.parent is not None and id(state) in frame.parent.accesses:
            frame = frame.parent
        stack = frame.stack if isinstance(frame, _Bridge) else KIND.observer(frame)
        return _context.state_stack.index(stack)

    def note_write(self, access: _registry.Access, site: str = "") -> None:
        access.written = True
        access.site = site or _registry.call_site()
        self.stack.write_its_value(access.state._view)
        # brainstate reports a write to every stack at once, and some of its transforms rely on that when they store.
        outer: Any = self.parent
        if isinstance(outer, _Bridge) and id(access.state) in outer.accesses:
            outer.note_write(outer.accesses[id(access.state)], access.site)

    def mark_created(self, state: Any, kind: Any) -> None:
        self._created.append((weakref.ref(state), kind))

    def close(self) -> None:
        self.is_open = False
        _registry.set_current_frame(self.parent)
        for access in self.accesses.values():
            access.kind.own(access.state, access.owner)
            access.before = access.entered = None
        for ref, kind in self._created:
            state = ref()
            if state is not None and any(isinstance(x, _compat.Tracer) for x in jax.tree.leaves(kind.get(state))):
                kind.bury(state, f"it was created inside {self.name}")
            elif state is not None:
                state._owner = self.parent
        self.trace = None


def _watch_stacks() -> None:
    """Have every trace stack of brainstate's open a bridge while it is entered."""
    enter, leave = brainstate.StateTraceStack.__enter__, brainstate.StateTraceStack.__exit__
    bridges: dict[int, _Bridge] = {}

    def entered(self: brainstate.StateTraceStack) -> brainstate.StateTraceStack:
        stack = enter(self)
        bridges[id(self)] = bridge = _Bridge(self)
        _registry.set_current_frame(bridge)
        return stack

    def left(self: brainstate.StateTraceStack, *exc: Any) -> None:
        leave(self, *exc)
        bridge = bridges.pop(id(self), None)
        if bridge is not None:  # else it was entered before this module was imported
            bridge.close()

    brainstate.StateTraceStack.__enter__ = entered  # type: ignore[method-assign]
    brainstate.StateTraceStack.__exit__ = left  # type: ignore[method-assign]


_watch_stacks()


# -- other threads ---------------------------------------------------------------------------------------------

# The innermost frame that has touched a state, by the state's id, while that frame is open: its accesses keep the state
# alive.
_owner: dict[int, _registry.Frame] = {}


def _check_free(state: brainstate.State) -> None:
    """Raise if a call in another thread holds the value of this state."""
    native = isinstance(state, _View)
    owner = state.native._owner if native else _owner.get(id(state))
    if owner is not None and owner.thread != threading.get_ident():
        raise _registry.foreign(*((state.native, NATIVE) if native else (state, KIND)), owner)


def _read_carefully(state: brainstate.State) -> Any:
    with _registry.ownership:  # no other thread takes it between the look and the read
        _check_free(state)
        return state._value


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
        return _read_carefully(self) if _owner else value

    def write(self: Any, value: Any) -> None:
        with _registry.ownership:
            _check_free(self)
            self._value = value

    def restore(self: Any, value: Any) -> None:
        _check_free(self)
        restore_value(self, value)

    brainstate.StateTraceStack.read_its_value = reported  # type: ignore[method-assign]
    cls._read_value, cls._write_value, cls.restore_value = read, write, restore


_guard()


class _Brainstate:
    """See `_registry.Kind`."""

    name = "brainstate"
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
        with _registry.ownership:
            if _registry.open_frames:
                self.check_free(states)
            return [s.__dict__["_value"] for s in states]

    def set_all(self, states: Sequence[Any], values: Iterable[Any]) -> None:
        with _registry.ownership:
            if _registry.open_frames:
                self.check_free(states)
            for s, v in zip(states, values):  # noqa: B905  # of equal length
                s.__dict__["_value"] = v

    def set(self, state: Any, value: Any) -> None:
        # Past the hooks and guards of `.value`: nothing of the user's happens here.
        state.__dict__["_value"] = value

    def read(self, state: brainstate.State) -> Any:
        _private.record_state_value_read(state)
        value = self.get(state)  # as in `_guard`
        return _read_carefully(state) if _owner else value

    def write(self, state: brainstate.State, value: Any) -> None:
        state.value = value

    def publish(self, effect: _registry.Effect, live: bool) -> None:
        state = effect.state
        if effect.created:
            state.__dict__["_value"] = effect.value
            return
        if not live:
            # Hooks ran in the body, when it was traced, and are part of its values: only the watchers are told.
            _private.record_state_value_write(state)
        self._check(state, effect)
        with _registry.ownership:
            _check_free(state)
            state.__dict__["_been_writen"] = True
            state.__dict__["_value"] = effect.value

    def _check(self, state: brainstate.State, effect: _registry.Effect) -> None:
        stacks = _context.state_stack[state.stack_level :]
        if not stacks:
            if not state._trace_state.is_valid():  # made in this very trace, it dies with it
                _registry.check_write(state, self, effect.value, None, effect.site)
        elif isinstance(stacks[-1], _Observer):
            frame = stacks[-1].frame
            _registry.check_write(state, self, effect.value, frame.trace, effect.site)
            access = frame.accesses[id(state)]
            access.written, access.site = True, access.site or effect.site
        # Else one of brainstate's own transforms is innermost, and takes the tracer out of the state again.

    def bury(self, state: brainstate.State, reason: str) -> None:
        del reason  # brainstate has its own message for a state whose trace has ended
        state._invalidate_trace_value()
        state.stack_level = len(_context.state_stack)
        for catcher in _context.new_state_catcher:
            catcher.append(state)

    def owner(self, state: brainstate.State) -> _registry.Frame | None:
        return _owner.get(id(state))

    def own(self, state: brainstate.State, frame: _registry.Frame | None) -> None:
        if frame is None:
            _owner.pop(id(state), None)
        else:
            _owner[id(state)] = frame

    def is_random(self, state: brainstate.State) -> bool:
        return isinstance(state, brainstate.random.RandomState)

    def name_of(self, state: brainstate.State) -> str | None:
        return state.name

    def site_of(self, state: brainstate.State) -> str:
        return _compat.traceback_site(state.source_info.traceback, _registry.library_folders())

    def open(self, frame: _registry.Frame) -> None:
        observer = self._observers[id(frame)] = _Observer(frame, self)
        _context.state_stack.append(observer)
        _context.new_state_catcher.append(observer)

    def observer(self, frame: _registry.Frame) -> _Observer:
        return self._observers[id(frame)]

    def close(self, frame: _registry.Frame) -> None:
        observer = self._observers.pop(id(frame))
        for stack in (_context.state_stack, _context.new_state_catcher):
            assert stack[-1] is observer, "a brainstate trace context was left open inside the call"
            stack.pop()

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
        if isinstance(leaf, _compat.Tracer) or extended or leaf.nbytes > _SMALL:
            return Identity(leaf)
        return freeze(np.asarray(leaf))
    return freeze(leaf)


KIND = _Brainstate()
