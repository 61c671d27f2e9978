"""A profile as a trace that Perfetto (ui.perfetto.dev) and chrome://tracing show.

The format is the JSON of the Trace Event Format (Google, "Trace Event Format", 2016): an object with ``traceEvents``, of which each has
a phase ``ph``: "M" names a process or a thread, "C" is a counter, "X" a slice, "i" an instant. Times ``ts`` and ``dur`` are
microseconds; here one is a step of the compiled program.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .._text import format_bytes
from ._plot import bytes_by, family
from .buffer import KINDS, Buffer

if TYPE_CHECKING:
    from .profile import MemoryProfile

# A viewer becomes slow with more slices, and smaller buffers would be too thin to see.
_MAX_SLICES = 5_000
_COUNTERS, _BUFFERS = 1, 2  # process ids: one group of tracks each


def to_chrome_trace(profile: MemoryProfile) -> dict[str, Any]:
    """Convert a profile to the Trace Event Format.

    Args:
        profile: the profile.

    Returns:
        A dict for ``json.dump``: bytes by kind as counters, the phases, a slice for each of the largest buffers on tracks by owner,
        and the peak as an instant. ``otherData`` has the program's totals.
    """
    events = [
        _name("process_name", _COUNTERS, 0, f"memory of {profile.name}"),
        _name("process_name", _BUFFERS, 0, f"buffers of {profile.name} by owner"),
        *_counters(profile),
        *_phases(profile),
        *_slices(profile),
        *_peak(profile),
    ]
    names = "peak_bytes argument_bytes output_bytes alias_bytes temp_bytes constant_bytes num_devices backend".split()
    totals = {name: getattr(profile, name) for name in names}
    return {
        "traceEvents": events,
        "displayTimeUnit": "ns",
        "otherData": {"program": profile.name, "unit of time": "1 us is a step of the compiled program", **totals},
    }


def _name(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}


def _counters(profile: MemoryProfile) -> Iterator[dict[str, Any]]:
    """A counter with a series for each kind, whenever one changes; all are zero when the program has ended."""
    series = bytes_by(profile, lambda b: b.kind)
    kinds = [kind for kind in KINDS if kind in series]
    values = np.array([series[kind] for kind in kinds]).T  # [steps, kinds]
    previous = None
    for step, row in enumerate(values.tolist()):
        if row != previous:
            yield _counter(step, dict(zip(kinds, row, strict=True)))
        previous = row
    yield _counter(len(profile.steps), dict.fromkeys(kinds, 0))


def _counter(step: int, values: dict[str, int]) -> dict[str, Any]:
    return {"ph": "C", "name": "bytes", "pid": _COUNTERS, "tid": 0, "ts": step, "args": values}


def _phases(profile: MemoryProfile) -> Iterator[dict[str, Any]]:
    """Forward, backward and update as slices of a track."""
    yield _name("thread_name", _COUNTERS, 1, "phase")
    first = 0
    for n, step in enumerate(profile.steps):
        is_last = n + 1 == len(profile.steps)
        if is_last or profile.steps[n + 1].phase != step.phase:
            args = {"last operation": step.primitive, "at": step.source}
            yield _slice(step.phase, _COUNTERS, 1, first, n, args)
            first = n + 1


def _slices(profile: MemoryProfile) -> Iterator[dict[str, Any]]:
    largest = sorted(profile.buffers, key=lambda b: -b.num_bytes)[:_MAX_SLICES]
    by_owner: defaultdict[str, list[Buffer]] = defaultdict(list)
    for b in largest:
        by_owner[family(b.owner)].append(b)

    tid = 0
    for owner, buffers in by_owner.items():  # the owner of the largest buffer first
        for number, lane in enumerate(_lanes(buffers)):
            tid += 1
            yield _name("thread_name", _BUFFERS, tid, owner if number == 0 else f"{owner} ({number + 1})")
            yield {**_name("thread_sort_index", _BUFFERS, tid, ""), "args": {"sort_index": tid}}
            for b in lane:
                label = f"{format_bytes(b.num_bytes)} {b.type} {b.primitive}".rstrip()
                yield _slice(label, _BUFFERS, tid, b.start, b.end, b.to_dict(), b.kind)


def _lanes(buffers: Sequence[Buffer]) -> list[list[Buffer]]:
    """Distribute buffers to as few tracks as possible such that those of a track do not overlap.

    The slices of a thread have to nest, which lifetimes do not. A buffer takes the track that has been free for longest.
    """
    lanes: list[list[Buffer]] = []
    free: list[tuple[int, int]] = []  # the first free step of each lane, and its number
    for b in sorted(buffers, key=lambda b: (b.start, -b.end)):
        if free and free[0][0] <= b.start:
            _, number = heapq.heappop(free)
        else:
            number = len(lanes)
            lanes.append([])
        lanes[number].append(b)
        heapq.heappush(free, (b.end + 1, number))
    return lanes


def _slice(
    name: str, pid: int, tid: int, start: int, end: int, args: dict[str, Any], category: str = "phase"
) -> dict[str, Any]:
    place = {"pid": pid, "tid": tid, "ts": start, "dur": end - start + 1}
    return {"ph": "X", "name": name, "cat": category, **place, "args": args}


def _peak(profile: MemoryProfile) -> Iterator[dict[str, Any]]:
    """An instant of all tracks (scope "g")."""
    step = profile.steps[profile.peak_step]
    name = f"peak: {format_bytes(profile.peak_bytes)}"
    args = {"operation": step.primitive, "at": step.source, "phase": step.phase}
    place = {"pid": _COUNTERS, "tid": 1, "ts": profile.peak_step}
    yield {"ph": "i", "s": "g", "name": name, "cat": "peak", **place, "args": args}
