"""Attributes in which a call that only inspects a function leaves states without a value, or tracers."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from typing import Any

from .. import _jax, _states
from .walk import Walk

_NONE = object()


@contextlib.contextmanager
def created_undone(*roots: Any) -> Iterator[None]:
    """Undo, at the end, the assignments of new states, and of tracers, to attributes of the objects that these roots
    hold.

    A call that is traced and not run may create states, as a step with ``init_all_states`` does, or a layer at its
    first call. They have no value afterwards, and the object is to be as before: with the earlier state, or without
    one. Nor has an array in an attribute, which flax.nnx allows. Other assignments stay, as after any trace of JAX; so
    do items of containers that existed before.
    """
    walk = Walk(follows_classes=False)
    for root in roots:
        for _ in walk.held(root):
            pass
    # Held for the call: the references to earlier states cost `jit` another staging at most (decision 16).
    before = [(obj, dict(attributes)) for obj in walk.visited if (attributes := _attributes(obj)) is not None]
    try:
        yield
    finally:
        for obj, attributes in before:
            for name, value in list((_attributes(obj) or {}).items()):
                earlier = attributes.get(name, _NONE)
                if value is not earlier and (isinstance(value, _jax.Tracer) or _holds_dropped_state(value)):
                    _restore(obj, name, earlier)


def _attributes(obj: Any) -> dict[str, Any] | None:
    """The attributes of an instance; None without a ``__dict__``, and for modules and classes, which are no part of a
    model.

    Those of a state that its library sets, such as its value, are left out: frames restore them, to the tracers of the
    enclosing calls.
    """
    if isinstance(obj, (type, types.ModuleType)):
        return None
    try:
        attributes = object.__getattribute__(obj, "__dict__")
    except AttributeError:
        return None
    kind = _states.kind_of(obj)
    return attributes if kind is None else {k: v for k, v in attributes.items() if k not in kind.bookkeeping}


def _holds_dropped_state(obj: Any) -> bool:
    states = (state for _, state in Walk(follows_classes=False).held([obj], is_called=False))
    return any(_states.kind_of_state(state).is_invalidated(state) for state in states)


def _restore(obj: Any, name: str, value: Any) -> None:
    # Not by the class's own methods, which may check or convert the value: it was there before.
    if value is _NONE:
        object.__delattr__(obj, name)
    else:
        object.__setattr__(obj, name, value)
