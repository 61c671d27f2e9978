"""Checks that no tracer outlives its trace in a state, and that no state made in the body of a loop or branch outlives
it.
"""

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


def check_write(
    state: Any, kind: Kind, value: Any, anchor: Any | None, site: str, *, after_store: bool = False
) -> None:
    """Raise `TraceLeakError` if storing `value` leaves a tracer behind once its trace has ended.

    Args:
        anchor: the innermost trace whose tracers the state may hold, None if it may hold none. A write while that trace
            is the current one needs no check.
        after_store: whether `value` was stored some time ago, so that the current trace says nothing about it.
    """
    if not after_store and anchor is not None and _jax.current_trace() is anchor:
        return
    leaked = _jax.leaked_tracers(value, anchor) or _hidden_tracers(value, anchor)
    if not leaked:
        return
    traced = _jax.transform_name(leaked[0]._trace)
    # A value of an outer trace, such as a count that has no derivative, may be written under a plain transform further
    # inside.
    current = _jax.current_trace()
    name = _jax.transform_name(current) if _jax.is_derivative_or_batching(current) else traced
    owner, where = ("jax's", "") if name == traced else ("a", f", under jax's {name}")
    package = sys.modules["statetx"]
    advice = f"use statetx.{name} in place of jax's {name}, or " if hasattr(package, name) else ""
    raise TraceLeakError(
        f"{describe(state, kind)} was given a value that {owner} {traced} is tracing, at {site}{where}.\n"
        f"The tracer would stay in the state after {name} has ended, and break its next use.\n"
        f"Cause: a function that writes states runs under a plain jax transform, which cannot see them.\n"
        f"Fix: {advice}pass the value through the function's arguments and results (statetx.functionalize)."
    )


def refuse_created(effects: Iterable[Effect], where: str) -> None:
    """Raise if a call has created a state that outlives it, in a transform that makes none."""
    for effect in effects:
        if effect.created:
            reason = f"it was created inside {where}, which gives values to states from before it only"
            commit(effect.kind.invalidate(effect.state, reason, None))
            raise CreatedStateError(
                f"{type(effect.state).__name__} made at {effect.site} was created inside {where} and outlived it.\n"
                f"It gives new values to states from before it only: a body that is traced once may run many times, "
                f"or not at all.\n"
                f"Fix: create the state before the call, and write it inside."
            )


def _refuse_hidden(effect: Effect) -> None:
    """Raise if a call leaves an object in a state that holds a tracer of the call's own trace."""
    refuse_hidden(
        _flatten(effect.value)[0], lambda: f"At {effect.site}, {describe(effect.state, effect.kind)} was given"
    )


def _hidden_tracers(value: Any, anchor: Any | None) -> list[Any]:
    """The first leaked tracer, as a list, in the objects of a value that JAX does not look into."""
    if is_leaf(value) or _jax.is_eager():
        return []
    entries = [hidden_tracer(x, lambda t: bool(_jax.leaked_tracers(t, anchor))) for x in _flatten(value)[0]]
    return [entry[1] for entry in entries if entry is not None][:1]
