"""No tracer outlives its trace in a state, and no state that a loop's body made outlives the body."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from .. import _jax
from .._atomic import commit
from .._errors import CreatedStateError, TraceLeakError
from .._objects.opaque import hidden_tracer, refuse_hidden
from .._states.messages import describe
from .._states.protocol import Kind
from .access import Effect, _flatten, is_leaf


def check_write(state: Any, kind: Kind, value: Any, anchor: Any | None, site: str, *, late: bool = False) -> None:
    """Raise `TraceLeakError` if storing `value` leaves a tracer behind once its trace has ended.

    `anchor` is the innermost trace whose tracers the state may hold, None if it may hold none. What is written while
    that trace is the current one needs no look, unless the look comes `late`.
    """
    if not late and anchor is not None and _jax.current_trace() is anchor:
        return
    leaked = _jax.leaked_tracers(value, anchor) or _hidden_tracers(value, anchor)
    if not leaked:
        return
    name = _jax.transform_name(leaked[0]._trace)
    ours = sys.modules["statetx"]
    instead = f"use statetx.{name} in place of jax's {name}, or " if hasattr(ours, name) else ""
    raise TraceLeakError(
        f"{describe(state, kind)} was given a value that jax's {name} is tracing, at {site}.\n"
        f"The tracer would stay in the state after {name} has ended, and break its next use.\n"
        f"Cause: a function that writes states stands under a plain jax transform, which cannot see them.\n"
        f"Fix: {instead}pass the value through the function's arguments and results (statetx.functionalize)."
    )


def refuse_created(effects: Iterable[Effect], where: str) -> None:
    """Raise for states that a loop body created and that outlived it."""
    for effect in effects:
        if effect.created:
            reason = f"it was created inside {where}, whose body stands for many steps"
            commit(effect.kind.bury(effect.state, reason, None))
            raise CreatedStateError(
                f"{type(effect.state).__name__} made at {effect.site} was created inside {where} and outlived it.\n"
                f"The body runs once for many steps, so no single value can be given to that state.\n"
                f"Fix: create the state before the loop, and write it in the body."
            )


def _refuse_hidden(effect: Effect) -> None:
    """Raise if a call leaves an object in a state that holds an array of the trace which ends with it."""
    refuse_hidden(
        _flatten(effect.value)[0], lambda: f"At {effect.site}, {describe(effect.state, effect.kind)} was given"
    )


def _hidden_tracers(value: Any, anchor: Any | None) -> list[Any]:
    """`leaked_tracers` of the objects in a value that JAX does not look into: the first."""
    if is_leaf(value) or _jax.is_eager():
        return []
    found = [hidden_tracer(x, lambda t: bool(_jax.leaked_tracers(t, anchor))) for x in _flatten(value)[0]]
    return [hidden[1] for hidden in found if hidden is not None][:1]
