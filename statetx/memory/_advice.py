"""Changes of the program that may lower the peak.

A change shortens the lifetimes of some buffers. By how much the peak falls is known of a compiled program only. The
order of changes that are not compiled comes from the timeline without these buffers while they wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from .._cached import cached_property
from ._advice_inputs import constants, donations, order, releases
from ._advice_loops import bodies, checkpoints
from ._advice_parts import in_parts, rows
from ._advice_regions import bits, functions, policies, stacked, stacked_bits
from ._edits import ChangeCandidate
from .buffer import Change, Group, Timeline, grouped

_LEAST_SHARE = 0.02  # changes that save less of the peak are left out
_MUCH = 0.15  # of the peak, that a function has which is tried though the timeline stays as high
_MOST_TRIED = 4  # of such functions


class AdvisedTimeline(Timeline):
    """A timeline with changes that may lower its peak, for the views."""

    @cached_property
    def changes(self) -> tuple[Change, ...]:
        """The changes that are worth it, those first that free most at the peak."""
        key = lambda c: (-c.freed_bytes, c.change.action, c.change.owner)
        return tuple(c.change for c in sorted(candidates(self), key=key))

    @cached_property
    def at_peak(self) -> tuple[Group, ...]:
        """Buffers alive at the peak, grouped by kind, owner and line, the largest group first; of each the cheapest
        change that frees at least half of it.
        """
        cheapest_first = candidates(self)

        def change_of(group: Group) -> Change | None:
            freed = lambda c: sum(b.num_bytes for b in group.buffers if b in c.buffers)
            return next((c.change for c in cheapest_first if 2 * freed(c) >= group.num_bytes), None)

        return tuple(g._replace(change=change_of(g)) for g in grouped(self.alive(self.peak_step)))


def candidates(profile: Timeline, missing: float = float("inf"), *, to_try: bool = False) -> list[ChangeCandidate]:
    """The changes that are worth it, the cheapest first: those that free a share of the peak, or the bytes that are
    missing.

    Args:
        to_try: whether they will be compiled: then with each function that has much of the peak.
    """
    if profile.note:
        return []
    makers: list[Callable[[Timeline], Iterable[ChangeCandidate]]] = [
        order,
        donations,
        releases,
        constants,
        functions,
        bits,
        bodies,
        checkpoints,
        rows,
    ]
    least = min(_LEAST_SHARE * profile.peak_bytes, max(missing, 1))
    advised = [c for make in makers for c in make(profile) if c.freed_bytes >= least]
    if to_try:
        at_peak = set(profile.alive(profile.peak_step))
        held = lambda c: sum(b.num_bytes for b in c.buffers & at_peak)
        edits = {c.edit for c in advised}
        unadvised = [
            *functions(profile),
            *stacked(profile),
            *stacked_bits(profile),
            *bodies(profile, "recomputed"),
            *checkpoints(profile, "recomputed"),
        ]
        unadvised = [c for c in unadvised if c.edit not in edits]
        unadvised = sorted((c for c in unadvised if held(c) >= _MUCH * profile.peak_bytes), key=held, reverse=True)
        unlisted = [c._replace(freed_bytes=0) for c in unadvised[:_MOST_TRIED]]
        return [*advised, *unlisted, *policies(advised), *in_parts(profile)]
    # Splitting the batch nearly always frees most, but not in every program may a batch be split: it is advised where
    # no other change does a quarter of it.
    most = max((c.freed_bytes for c in advised), default=0)
    return advised + [c for c in in_parts(profile) if c.freed_bytes >= max(4 * most, least)]
