"""`statetx.State`s under brainstate's transforms: each of its trace stacks opens a frame that reports to the stack."""

from __future__ import annotations

import operator
import threading
import weakref
from typing import Any

import brainstate
from brainstate import _state as _private

from ... import _frames, _jax, _states
from ..._atomic import Store, commit
from ..native import Invalidated, State
from .observe import Strays, TraceObserver, context, observer_of, view_of


class Bridge:
    """The frame for a trace stack of brainstate: it reports accesses of `statetx.State`s to that stack.

    It restores no values: brainstate does so itself, when its transform has run.
    """

    is_undo = False
    is_complete = False
    is_kept = True  # brainstate keeps its staged programs for other calls
    differentiates_states = False

    def __init__(self, stack: brainstate.StateTraceStack):
        self.name = f"a transform of brainstate ({stack.name or 'StateTraceStack'})"
        self.stack = stack
        self.parent = _frames.current_frame()
        self.differentiated: dict[int, tuple[Any, list[Any]]] = {}
        self.trace = _jax.current_trace()
        self.thread = threading.get_ident()
        self.accesses: dict[int, _frames.Access] = {}
        self.is_open = True
        # `enter` has put the stack on brainstate's list already, so one entry means the outermost.
        self.strays = Strays() if len(context.state_stack) == 1 else None
        self._created: list[tuple[Any, Any]] = []

    def touch(self, state: Any, kind: Any, *, writing: bool) -> _frames.Access:
        access = _frames.acquire(state, kind, self, writing=writing)
        value_before = kind.get(state)
        if type(value_before) is Invalidated:
            del self.accesses[id(state)]
            commit([kind.set_owner(state, access.previous_owner)])
            raise _states.invalidated_state_error(state, kind.site_of(state), value_before.reason)
        access.value_before = value_before
        # The stack may give the state another value here (`new_arg`), so the value in the body is read after it.
        self.stack.read_its_value(view_of(state, self._level_of(state)))
        access.value_in_body = kind.get(state)
        return access

    def _level_of(self, state: State) -> int:
        """The number of stacks that do not see the state: those outside the outermost frame that has touched it."""
        frame: Any = self
        while frame.parent is not None and id(state) in frame.parent.accesses:
            frame = frame.parent
        stack = frame.stack if isinstance(frame, Bridge) else observer_of(frame)
        return context.state_stack.index(stack)

    def note_write(self, access: _frames.Access, site: str = "") -> None:
        access.written = True
        access.site = site or _states.call_site()
        self.stack.write_its_value(access.state._view())  # not None: the stack keeps the view alive
        # brainstate reports a write to every stack at once, and some of its transforms rely on this when they store.
        outer: Any = self.parent
        if isinstance(outer, Bridge) and id(access.state) in outer.accesses:
            outer.note_write(outer.accesses[id(access.state)], access.site)

    def open(self) -> list[Store]:
        strays = [] if self.strays is None else [(context.new_state_catcher.append, self.strays)]
        return [*strays, (_frames.set_current_frame, self)]

    def mark_created(self, state: Any, kind: Any) -> None:
        if _is_catching_new_states():
            _private.record_state_init(view_of(state, len(context.state_stack)))
        commit([self.creation(state, kind)])

    def creation(self, state: Any, kind: Any) -> Store:
        return self._created.append, (weakref.ref(state), kind)

    def close(self) -> None:
        if not self.is_open:
            return
        # One list for one `commit` (decision 18): an interrupt leaves the bridge open or closed, and no state owned
        # by a closed one.
        stores = [access.kind.set_owner(access.state, access.previous_owner) for access in self.accesses.values()]

        for state, kind in [(ref(), kind) for ref, kind in self._created]:
            if state is None:
                continue
            # brainstate manages the new states that it catches: its maps batch their values, its traces remove the
            # tracers.
            if not _is_catching_new_states() and _jax.has_tracers(kind.get(state)):
                stores += kind.invalidate(state, f"it was created inside {self.name}", self)
            else:
                stores += _transferred(state, kind, self.parent)

        if self.strays is not None:
            index = context.new_state_catcher.index(self.strays)
            stores.append((operator.delitem, context.new_state_catcher, index))
            stores += [(operator.setitem, vars(state), "_level", 0) for state in self.strays]
        commit([*stores, (setattr, self, "is_open", False), (_frames.set_current_frame, self.parent)])
        # They may be tracers of the trace that ends here, and would keep it alive.
        for access in self.accesses.values():
            access.value_before = access.value_in_body = _frames.UNKNOWN
        self.trace = None
        _frames.end_differentiated(self)


def _is_catching_new_states() -> bool:
    """Whether brainstate manages the states that are being made."""
    return any(not isinstance(c, (TraceObserver, Strays)) for c in context.new_state_catcher)


def _transferred(state: Any, kind: Any, frame: Any) -> list[Store]:
    """Stores that make `frame` the creator and owner of a state; None: no owner."""
    store = kind.set_owner(state, frame)
    return [store] if frame is None else [store, frame.creation(state, kind)]


def install() -> None:
    """Let every trace stack of brainstate open a bridge while it is entered."""
    stack_enter, stack_exit = brainstate.StateTraceStack.__enter__, brainstate.StateTraceStack.__exit__
    bridges: dict[int, Bridge] = {}

    def enter(self: brainstate.StateTraceStack) -> brainstate.StateTraceStack:
        # brainstate first: the bridge counts the entered stacks.
        stack = stack_enter(self)
        bridge = Bridge(self)
        commit([(operator.setitem, bridges, id(self), bridge), *bridge.open()])
        return stack

    def leave(self: brainstate.StateTraceStack, *exc: Any) -> None:
        try:
            stack_exit(self, *exc)
        finally:
            # Even if brainstate refuses the exit, as it does out of order: else every touched state would stay owned.
            bridge = bridges.pop(id(self), None)
            if bridge is not None:  # else the stack was entered before this module was imported
                bridge.is_complete = not any(exc)
                bridge.close()

    reason = (
        "While a transform of brainstate traces, `statetx.State`s report to it, so that it carries them like its own "
        "states."
    )
    _jax.patches.replace("brainstate.StateTraceStack.__enter__", brainstate.StateTraceStack, enter, reason)
    _jax.patches.replace("brainstate.StateTraceStack.__exit__", brainstate.StateTraceStack, leave, reason)
    _install_retracing()


def _install_retracing() -> None:
    """Trace a function that brainstate has traced again where plans and reports rewrite the program to differentiate.

    `jax.jit` has a user context for that. ``brainstate.transform.jit`` keeps the programs that it has traced itself, by
    the types of the arguments: `_jax.cache_key_context` becomes a part of its keys.
    """
    cls: Any = brainstate.transform.StatefulFunction
    key_of_arguments = cls.get_arg_cache_key

    def get_arg_cache_key(self: Any, *args: Any, compile_if_miss: bool = False, **kwargs: Any) -> Any:
        setting = _jax.cache_key_context.value
        if setting is None:
            return key_of_arguments(self, *args, compile_if_miss=compile_if_miss, **kwargs)
        if compile_if_miss:
            # It asks for the key, and traces the function unless that has been done for this key.
            self.make_jaxpr(*args, **kwargs)
        key = key_of_arguments(self, *args, **kwargs)
        return key._replace(static_args=(key.static_args, setting))

    _jax.patches.replace(
        "brainstate.transform.StatefulFunction.get_arg_cache_key",
        cls,
        get_arg_cache_key,
        "A function that brainstate has traced is traced again while a plan, a budget or a report of statetx "
        "rewrites what it differentiates.",
    )
    _install_order_of_states()


def _install_order_of_states() -> None:
    """Give the written values of a gradient of brainstate by state in place of by number.

    It traces its function before it differentiates it. Where that is traced once more inside, as above, it may touch
    its states in another order: the values would go to other states.
    """
    cls: Any = brainstate.transform.GradientTransform
    call, finish = cls._call_target, cls._return

    def call_target(self: Any, grad_vals: Any, other_vals: Any, *args: Any, **kwargs: Any) -> Any:
        values, out = call(self, grad_vals, other_vals, *args, **kwargs)
        if _jax.cache_key_context.value is None:  # traced once
            return values, out
        states = self.stateful_target.get_state_trace(*args, **kwargs).states
        return {id(state): value for state, value in zip(states, values, strict=True)}, out

    def return_(self: Any, rets: Any, read_state_vals: Any, state_trace: Any) -> Any:
        grads, (outputs, values) = rets
        if isinstance(values, dict):
            values = [values[id(state)] for state in state_trace.states]
        return finish(self, (grads, (outputs, values)), read_state_vals, state_trace)

    reason = "A gradient's second trace gives each state its own value."
    gradient = "brainstate.transform.GradientTransform"
    _jax.patches.replace(f"{gradient}._call_target", cls, call_target, reason)
    _jax.patches.replace(f"{gradient}._return", cls, return_, reason)
