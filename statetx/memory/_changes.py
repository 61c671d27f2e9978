"""A timeline with the changes of the program that would lower its peak."""

from __future__ import annotations

import functools

from ._advice import all_changes, changes_of
from ._timeline import Timeline, grouped
from .buffer import Change, Group


class AdvisedTimeline(Timeline):
    """A timeline and what would lower its peak: what the views show."""

    @functools.cached_property
    def at_peak(self) -> tuple[Group, ...]:
        """Buffers alive at the peak, grouped by kind, owner and line, the largest group first."""
        groups = grouped(self.alive(self.peak_step))
        changes = changes_of(self, groups)
        return tuple(g._replace(change=changes.get(n)) for n, g in enumerate(groups))

    @functools.cached_property
    def changes(self) -> tuple[Change, ...]:
        """What would lower the peak, the largest saving first."""
        return all_changes(self)
