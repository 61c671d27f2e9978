"""Records of the last access of each state, if ``STATETX_DEBUG`` is set when statetx is imported.

`install` wraps the functions that see an access, so the disabled path has no overhead. The records appear in errors
that describe a state and in the table of `trace_states`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from .. import _frames, _states
from .._frames import Access, Frame
from .._states import Kind
from .native import State


class _Log:
    """The sites where each state was last ``read`` and last ``written``."""

    def __init__(self) -> None:
        self._entries: dict[int, tuple[Callable[[], Any], dict[str, str]]] = {}

    def note(self, state: Any, verb: str, frame: Frame | None) -> str:
        """Record an access by the current line of user code; return that line."""
        ref, sites = self._entries.get(id(state), (None, {}))
        if ref is None or ref() is not state:  # a new state, or one with the id of a dead one
            sites = {}
            self._entries[id(state)] = _ref_to(state), sites
        site = _states.call_site()
        sites[verb] = f"{site} in {frame.name}" if frame is not None else site
        return site

    def describe(self, state: Any) -> str:
        ref, sites = self._entries.get(id(state), (None, {}))
        if ref is None or ref() is not state:
            return ""
        return "".join(f", last {verb} at {site}" for verb, site in sites.items())


def _ref_to(state: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(state)
    except TypeError:  # flax's Variables allow none
        return lambda: state


def install() -> None:
    """Start recording, for the rest of the process."""
    log = _Log()
    touch, mark_written, note_write, value = Frame.touch, Frame.mark_written, Frame.note_write, State.value

    def recording_touch(self: Frame, state: Any, kind: Kind, *, writing: bool) -> Access:
        access = touch(self, state, kind, writing=writing)
        if not writing:
            access.read_site = log.note(state, "read", self)
        return access

    def recording_mark(self: Frame, access: Access) -> None:
        mark_written(self, access)
        log.note(access.state, "written", self)

    def recording_note(self: Frame, access: Access, site: str = "") -> None:
        note_write(self, access, site)
        log.note(access.state, "written", self)

    def get(self: State) -> Any:
        result = value.fget(self)  # type: ignore[misc]
        log.note(self, "read", _frames.current_frame())
        return result

    def set(self: State, new: Any) -> None:
        value.fset(self, new)  # type: ignore[misc]
        log.note(self, "written", _frames.current_frame())

    wrapped = {"touch": recording_touch, "mark_written": recording_mark, "note_write": recording_note}
    for name, function in wrapped.items():
        setattr(Frame, name, function)
    setattr(State, "value", property(get, set, doc=value.__doc__))  # noqa: B010
    _states.history = log.describe
