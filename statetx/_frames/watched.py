"""`WatchedKind`: the part of a kind that is the same for every library whose states report their reads and writes to
frames.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from .._atomic import Store, commit, locked
from .._states.protocol import Kind
from .access import Effect
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

    # -- writes after a call --

    def announce(self, effect: Effect, live: bool) -> list[Store]:
        del live
        state, frame, owner = effect.state, current_frame(), self.owner(effect.state)
        if owner is not frame:
            report_touch(state, self, frame, owner, writing=True)
        access = None if frame is None else frame.accesses.get(id(state))
        if frame is not None and access is not None:  # else no call is open, or the open call has made the state
            check_write(state, self, effect.value, frame.trace, effect.site)
            frame.note_write(access, effect.site)
        return [self.store(state, effect.value)]
