"""Records of a state in one call: `Access` while the call runs, `Effect` when it has ended.

Here are also the checks that no tracer outlives its trace in a state, and that no state made in the body of a loop or
branch outlives it.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from .. import _jax
from .._atomic import Store, commit
from .._errors import CreatedStateError, TraceLeakError
from .._objects.opaque import hidden_tracer, refuse_hidden
from .._states import Kind, call_site, describe, is_opaque

UNKNOWN: Any = type("Unknown", (), {"__slots__": (), "__repr__": lambda self: "UNKNOWN"})()
"""A placeholder for a value that was not looked up."""


@dataclasses.dataclass(slots=True, eq=False)
class Access:
    """The record of one frame about one state that existed before it.

    Attributes:
        previous_owner: the frame that owned the state before this one.
        stepped: whether an `Optimizer`, or an inner call that differentiated the state, has updated it.
        site: of the first write. `kinds.debug` sets `read_site`.
        num_writes: by the call itself, and by calls inside of it once they have returned; infinite if a transform
            of another library has written a result back, since it does not tell how often its body has written.
        last_site: of the last write, if there are several.
        copy: the copy of a container that the body was given.
    """

    state: Any
    kind: Kind
    previous_owner: Any
    read: bool
    acquired: bool = False
    value_before: Any = UNKNOWN
    value_in_body: Any = UNKNOWN
    written: bool = False
    stepped: bool = False
    num_writes: float = 0
    last_site: str = ""
    site: str = ""
    read_site: str = ""
    copy: Copy | None = None

    def count_write(self, is_known: bool = True) -> None:
        self.num_writes += 1 if is_known else math.inf
        if self.num_writes > 1:
            self.last_site = call_site()

    def undo(self) -> list[Store]:
        """Stores that give the state its old value and owner."""
        stores = []
        value_in_body, value_before = self.value_in_body, self.value_before

        # Another thread may have written a state that was not acquired: only the copy that the body was given is
        # replaced.
        if value_before is not UNKNOWN and (
            self.acquired or (value_in_body is not value_before and self.kind.get(self.state) is value_in_body)
        ):
            stores.append(self.kind.store(self.state, value_before))

        if self.acquired:
            stores.append(self.kind.set_owner(self.state, self.previous_owner))
        return stores


class Copy:
    """The copy of a container or NumPy array that a body is given, since it may change it in place."""

    __slots__ = ("arrays", "leaves", "treedef", "value")

    def __init__(self, value: Any):
        leaves, self.treedef = _flatten(value)
        self.arrays = [(i, x) for i, x in enumerate(leaves) if is_writable(x)]
        for i, x in self.arrays:
            leaves[i] = x.copy()
        self.leaves = leaves
        self.value = jax.tree.unflatten(self.treedef, leaves)

    def was_changed(self) -> bool:
        """Whether the body has changed the contents."""
        leaves, treedef = _flatten(self.value)
        if treedef != self.treedef or any(a is not b for a, b in zip(self.leaves, leaves, strict=True)):
            return True
        return any(leaves[i].tobytes() != x.tobytes() for i, x in self.arrays)


@dataclasses.dataclass(slots=True, eq=False)
class Effect:
    """A value that a call leaves in a state; `created` if the state was made in that call.

    Attributes:
        value_before: the state's value before the call; UNKNOWN if `publish` need not compare it.
        stepped: whether the call is a training step for this state: it differentiated the value, and then wrote another
            one.
        num_writes: as the body has written it, see `Access`; for a `jax.Ref`, whose writes nobody sees, 1.
        last_site: as in `Access`.
    """

    state: Any
    kind: Kind
    value: Any
    site: str
    value_before: Any = UNKNOWN
    created: bool = False
    stepped: bool = False
    num_writes: float = 1
    last_site: str = ""


_LEAF_TYPES = (jax.Array, np.ndarray, np.generic, int, float, complex, str, bytes, type(None))


def is_leaf(value: Any) -> bool:
    return isinstance(value, _LEAF_TYPES)


def is_writable(value: Any) -> bool:
    """Whether a value is a NumPy array that can be changed in place."""
    return isinstance(value, np.ndarray) and value.flags.writeable


def _flatten(value: Any) -> tuple[list[Any], Any]:
    return jax.tree.flatten(value, is_leaf=is_opaque)


# -- values that a call may leave in states ---------------------------------------------------------------------------


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


def refuse_hidden_in(effect: Effect) -> None:
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
