"""Descriptions of states in messages: type, name, where it was made, where it was last used."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from .. import _jax
from .._errors import StateAccessError, StateValueError, printable
from .._text import short_tree_type_str
from .protocol import Kind
from .registry import _kinds, is_array_state, kind_of

PACKAGE = os.path.join(
    os.path.dirname(os.path.dirname(os.path.abspath(__file__))), ""
)  # ends with a separator: not `statetx_demo`


def library_folders() -> tuple[str, ...]:
    """Folders of library code, which no user wrote."""
    return (PACKAGE, _jax.JAX_FOLDER, *(kind.folder for kind in _kinds))


def call_site() -> str:
    """``file:line`` of the nearest caller that is not a library."""
    frame, _ = _user_frame()
    return "unknown place" if frame is None else printable(f"{frame.f_code.co_filename}:{frame.f_lineno}")


def user_stacklevel() -> int:
    """The ``stacklevel`` by which a warning from the caller of this function points at the user's line."""
    return _user_frame()[1]


# Python's own frames between those of a library: a cached property, a context manager, an import.
_BETWEEN = (functools.__file__, contextlib.__file__, "<frozen importlib")


def _user_frame() -> tuple[FrameType | None, int]:
    """The nearest frame outside the libraries, and its distance from the caller of the calling function."""
    files = (*library_folders(), *_BETWEEN)
    frame, level = sys._getframe(2), 1
    while frame is not None and frame.f_code.co_filename.startswith(files):
        frame, level = frame.f_back, level + 1
    return frame, level


def describe(state: Any, kind: Kind | None = None, path: str | None = None, value: Any = None) -> str:
    """Describe a state for a message: type, path or name, shape and dtype, and where it was made."""
    kind = kind or kind_of(state)
    assert kind is not None
    label = path or kind.name_of(state)
    label = f" {label!r}" if label else ""
    value = kind.get(state) if value is None else value
    return (
        f"{type(state).__name__}{label} ({short_tree_type_str(value)}, made at "
        f"{printable(kind.site_of(state))}{history(state)})"
    )


def refuse_states(argument: str, *objects: Any) -> None:
    """Raise if a state is given where an array is needed; `argument` names the transform and its argument.

    Raises:
        StateValueError: one of the objects is a state.
    """
    for x in objects:
        kind = kind_of(x)
        if kind is not None:
            value = "[...]" if is_array_state(x) else ".value"
            raise StateValueError(
                f"{argument} is {describe(x, kind)}, not an array.\nFix: give the value that it holds, by {value}."
            )


def no_history(state: Any) -> str:
    del state
    return ""


history: Callable[[Any], str] = no_history
"""Describes the last accesses of a state, for `describe`; `kinds.debug` replaces it."""


def invalidated_state_error(state: Any, site: str, reason: str) -> StateAccessError:
    """The error for reading a state that was invalidated: see `Kind.invalidate`."""
    return StateAccessError(
        f"{type(state).__name__} made at {site} has no value: {reason}.\n"
        f"Fix: create the state before the transformed call, or give it a value again by writing to it."
    )
