"""`brainstate.State` as a kind of state."""

from __future__ import annotations

import collections
import itertools
import operator
import os
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
from brainstate import _state as _private
from brainstate.util import StateJaxTracer

from ... import _frames, _jax, _states
from ..._atomic import Store
from ..._states import Jitted
from ..._tree import Identity, freeze
from ..native import Invalidated
from .bridge import Bridge
from .observe import TraceObserver, check_free, context, observer_of, observers, owners, read_checked, site_of

_NAME = itertools.repeat("_value")
_put: Any = operator.setitem
_environment: Any = brainstate.environ._ENV_STATE
_IMMUTABLE = frozenset({bool, int, float, str, type(None)})
_SMALL = 4096  # bytes; larger arrays in `environ` are compared by identity


class _Brainstate(_frames.WatchedKind):
    """See `_states.Kind`."""

    name = "brainstate"
    base = brainstate.State
    advances_when_read = True
    bookkeeping = frozenset("_trace_state _value _level _source_info _hooks_manager _name _been_writen _backup".split())
    folder = os.path.join(os.path.dirname(brainstate.__file__), "")

    def __init__(self) -> None:
        self._last_mode: tuple[dict[str, Any], Hashable] = ({}, ())

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
        if owners:
            for s in states:
                check_free(s)

    def _values(self, states: Sequence[brainstate.State]) -> list[Any]:
        return [s.__dict__["_value"] for s in states]

    def store_all(self, states: Sequence[Any], values: Iterable[Any]) -> Store:
        # ``dict.__setitem__`` on each state's ``__dict__``, consumed in C (decision 18).
        return collections.deque, map(_put, map(vars, states), _NAME, values), 0

    def store(self, state: Any, value: Any) -> Store:
        # Without the hooks and checks of `.value`: a `Store` runs no Python code.
        return operator.setitem, vars(state), "_value", value

    def read(self, state: brainstate.State) -> Any:
        _private.record_state_value_read(state)
        value = self.get(state)  # as in `observe`
        if type(value) is Invalidated:
            raise _states.invalidated_state_error(state, self.site_of(state), value.reason)
        return read_checked(state)

    def write(self, state: brainstate.State, value: Any) -> None:
        state.value = value

    def announce(self, effect: _frames.Effect, live: bool) -> list[Store]:
        state = effect.state
        store = self.store(state, effect.value)
        if effect.created:
            # The trace that made the state has ended.
            trace_state = (operator.setitem, vars(state), "_trace_state", StateJaxTracer())
            return [trace_state, store]
        # Hooks ran when the body was traced, and are part of its values: report to the watchers only. They have been
        # told of an assignment by the body itself, but not of a change in place.
        _private.record_state_value_write(state)
        self._check(state, effect)
        check_free(state)
        return [(operator.setitem, vars(state), "_been_writen", True), store]

    def _check(self, state: brainstate.State, effect: _frames.Effect) -> None:
        stacks = context.state_stack
        if not stacks:
            if not state._trace_state.is_valid():  # made in the present trace, and dies with it
                _frames.check_write(state, self, effect.value, None, effect.site)
        elif isinstance(stacks[-1], TraceObserver):
            frame = stacks[-1].frame
            _frames.check_write(state, self, effect.value, frame.trace, effect.site)
            access = frame.accesses.get(id(state))
            if access is not None:  # else the state was made in this frame
                if not access.acquired:
                    frame.touch(state, self, writing=True)
                access.written, access.site = True, access.site or effect.site
                access.num_writes += effect.num_writes - 1  # one is reported above
        # Else a transform of brainstate is innermost, and removes the tracer from the state.

    def invalidate(self, state: brainstate.State, reason: str, closing: Any) -> list[Store]:
        del reason  # brainstate has its own message
        frame = _frames.enclosing_frame(closing)
        # A bridge records `statetx.State`s only: the new owner is the next frame of statetx.
        while isinstance(frame, Bridge):
            frame = frame.parent
        # brainstate reports to the stacks from this level on: for the closing frame's state, those that are entered
        # after it.
        level = len(context.state_stack) if closing is None else context.state_stack.index(observer_of(closing))
        stores = [
            self.store(state, _private._INVALIDATED_TRACE_VALUE),
            (operator.setitem, vars(state), "_level", level),
        ]
        return stores if frame is None else [*stores, frame.creation(state, self)]

    def is_invalidated(self, state: brainstate.State) -> bool:
        return isinstance(vars(state)["_value"], (Invalidated, _private._InvalidatedTraceValue))

    def owner(self, state: brainstate.State) -> _frames.Frame | None:
        return owners.get(id(state))

    def set_owner(self, state: brainstate.State, frame: Any) -> Store:
        return (owners.pop, id(state), None) if frame is None else (operator.setitem, owners, id(state), frame)

    def jitted(self, fun: Any) -> Jitted | None:
        # `functools.wraps` copies these attributes to a wrapper of a jitted function, whose own `__wrapped__` is the
        # latter.
        user = getattr(fun, "origin_fun", None)
        if user is None or user is not getattr(fun, "__wrapped__", None):
            return None
        return Jitted(user, fun.stateful_fun.static_argnums, fun.stateful_fun.static_argnames)

    def is_random(self, state: brainstate.State) -> bool:
        return isinstance(state, brainstate.random.RandomState)

    def split(self, key: Any, num: int) -> tuple[Any, Any]:
        # As `brainstate.transform.vmap`: `split_key(num)` for the examples, and then the key of a `split_key()`.
        keys, key = super().split(key, num)
        return keys, jax.random.split(key)[1]

    def is_trainable(self, state: brainstate.State) -> bool:
        return isinstance(state, brainstate.ParamState)

    def name_of(self, state: brainstate.State) -> str | None:
        return "brainstate.random.DEFAULT" if state is brainstate.random.DEFAULT else state.name

    def site_of(self, state: brainstate.State) -> str:
        return site_of(state)

    def open(self, frame: _frames.Frame) -> list[Store]:
        observer = TraceObserver(frame, self)
        return [
            (operator.setitem, observers, id(frame), observer),
            (context.state_stack.append, observer),
            (context.new_state_catcher.append, observer),
        ]

    def close(self, frame: _frames.Frame) -> list[Store]:
        observer = observer_of(frame)
        # From the observer to the top: entries of inner transforms that an interrupt has left go, too.
        truncations = [
            (operator.delitem, stacks, slice(stacks.index(observer), None))
            for stacks in (context.state_stack, context.new_state_catcher)
        ]
        return [*truncations, (observers.pop, id(frame)), *observer.unreport()]

    def is_idle(self) -> bool:
        return not context.state_stack

    def mode(self) -> Hashable:
        # Every call of a compiled function needs the mode. The last key is valid while all values are the same objects,
        # of immutable types.
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
        # By content, which takes long to hash for large arrays; tracers and keys have none to look at.
        if isinstance(leaf, _jax.Tracer) or extended or leaf.nbytes > _SMALL:
            return Identity(leaf)
        return freeze(np.asarray(leaf))
    return freeze(leaf)


KIND = _Brainstate()
