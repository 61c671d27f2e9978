"""A change that is worth it, and what it saves by the timeline of a profile."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from ._edits import Edit
from ._timeline import Timeline
from .buffer import Buffer, Change


class Gap(NamedTuple):
    """Bytes that the changed program does not hold from one step to another; negative if it holds more."""

    start: int
    end: int
    num_bytes: int


class ChangeCandidate(NamedTuple):
    """A change, and the buffers that it shortens. Candidates are listed by what they cost in time, the cheapest first.

    Attributes:
        edit: the change of the staged program, with which it is tried.
        stronger: makes the same change with a number that saves more; None if there is none.
    """

    change: Change
    buffers: frozenset[Buffer]
    edit: Edit
    stronger: Callable[[], ChangeCandidate | None] = lambda: None


def saving(profile: Timeline, gaps: Iterable[Gap]) -> int:
    """By how much the peak of the timeline falls with these gaps."""
    change = np.zeros(len(profile.steps) + 1, np.int64)
    for gap in gaps:
        if gap.start <= gap.end:
            change[gap.start] -= gap.num_bytes
            change[gap.end + 1] += gap.num_bytes
    after = profile.timeline + np.cumsum(change)[:-1]
    return int(profile.timeline.max() - after.max())


def is_backward(profile: Timeline, n: int, b: Buffer) -> bool:
    """Whether a reader of a buffer is in the backward pass. What a recomputation reads is needed there only if it is a
    residual.

    XLA moves some steps of the backward pass into the forward pass: these do not count.
    """
    step = profile.steps[n]
    is_later = b.kind == "residual" or not step.is_recomputed
    return n >= profile.backward_step and step.phase == "backward" and is_later
