"""`WatchedKind`: the part of a kind that is the same for every library whose states report their reads and writes to
frames.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from .. import _jax
from .._atomic import Store, commit, locked
from .._states.protocol import Kind
from .access import Access, Effect
from .leaks import check_write
from .threads import current_frame, foreign_state_error, open_frames, ownership, report_touch


class WatchedKind(Kind):
    """Base of the kinds whose states frames watch; see `_states.Kind` for the methods that a kind adds.

    A kind must define `name`, `base`, `folder`, `get`, `store`, `read`, `write`, `invalidate`, `is_invalidated`,
    `owner`, `set_owner` and `site_of`.
    """

    # -- several states at once --

    def check_free(self, states: Sequence[Any]) -> None:
        """See `Kind.check_free`. Any owner belongs to another thread, since this one has no open frame."""
        for state in states:
            owner = self.owner(state)
            if owner is not None:
                raise foreign_state_error(state, self, owner)

    def get_all(self, states: Sequence[Any]) -> list[Any]:
        return locked(ownership, self._get_all, states)

    def _get_all(self, states: Sequence[Any]) -> list[Any]:
        if open_frames:  # else no state has an owner
            self.check_free(states)
        return self._values(states)

    def _values(self, states: Sequence[Any]) -> list[Any]:
        return [self.get(state) for state in states]

    def set_all(self, states: Sequence[Any], values: Iterable[Any]) -> None:
        locked(ownership, self._set_all, states, values)

    def _set_all(self, states: Sequence[Any], values: Iterable[Any]) -> None:
        if open_frames:
            self.check_free(states)
        commit([self.store_all(states, values)])

    # -- reads in a call, and writes after it --

    def touch(self, state: Any, frame: Any, *, writing: bool) -> None:
        """Report the first touch of a state in `frame` to each open frame that has not seen it yet, outermost first."""
        owner = self.owner(state)
        if owner is not frame:
            report_touch(state, self, frame, owner, writing=writing)

    def touched_value(self, state: Any, frame: Any) -> Any:
        """The value of a state that `frame` does not own, once its read is reported."""
        self.touch(state, frame, writing=False)
        return locked(ownership, self._free_value, state, frame)

    def _free_value(self, state: Any, frame: Any) -> Any:
        # An undo frame has not acquired the state: another thread may have done so since.
        owner = self.owner(state)
        if owner is not None and (frame is None or owner.thread != frame.thread):
            raise foreign_state_error(state, self, owner)
        return self.get(state)

    def announce(self, effect: Effect, live: bool) -> list[Store]:
        del live
        state, frame = effect.state, current_frame()
        store = self.store(state, effect.value)
        if effect.created:
            return [*self.adopt(state, effect.site), store]
        self.touch(state, frame, writing=True)
        access = None if frame is None else frame.accesses.get(id(state))
        check_write(state, self, effect.value, self.anchor(state, frame, access), effect.site)
        if frame is not None and access is not None:  # else no call is open, or the open call has made the state
            frame.note_write(access, effect.site)
        return [store]

    def adopt(self, state: Any, site: str) -> list[Store]:
        """Stores that make a state of the present trace of one that was made in a trace that has ended."""
        return []

    def anchor(self, state: Any, frame: Any, access: Access | None) -> Any:
        """The innermost trace whose tracers a state may hold; None if it may hold none."""
        return _jax.current_trace() if access is None else frame.trace
