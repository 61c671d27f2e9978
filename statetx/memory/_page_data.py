"""The data of a page: a profile as columns of integers in JSON, small enough for a page that opens at once.

Names, owners and lines are indices into one table of strings; ``page_model.js`` reads them.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from .._errors import printable
from .._text import short_path
from ._changes import AdvisedTimeline
from .buffer import KINDS, Buffer, Step, replacements

_MAX_TEXT = 300  # characters of a name; longer ones are cut
_PHASES = ("forward", "backward", "update")


def clipped(text: str, width: int = _MAX_TEXT) -> str:
    text = printable(text)
    return text if len(text) <= width else text[: width - 1] + "…"


def encode(profile: AdvisedTimeline, max_bytes: int) -> dict[str, Any]:
    """The data of a profile, at most `max_bytes` of JSON: without the smallest buffers if need be, then without names
    of steps.
    """
    taken = _taken(profile)
    by_size = sorted(range(len(profile.buffers)), key=lambda i: -profile.buffers[i].num_bytes)

    def encoded(num_listed: int, with_names: bool) -> tuple[dict[str, Any], int]:
        made = _encode(profile, taken, sorted(by_size[:num_listed]), with_names)
        return made, len(json.dumps(made, separators=(",", ":")))

    num_listed, (made, size) = len(by_size), encoded(len(by_size), True)
    if size > max_bytes:
        with_names = encoded(0, True)[1] < 0.7 * max_bytes
        base = encoded(0, with_names)[1]
        while size > max_bytes and num_listed:
            num_listed = int(num_listed * max(0.95 * max_bytes - base, 0) / max(size - base, 1))
            made, size = encoded(num_listed, with_names)
    return made


def _encode(profile: AdvisedTimeline, taken: dict[int, int], listed: Sequence[int], with_names: bool) -> dict[str, Any]:
    buffers = [profile.buffers[i] for i in listed]
    steps = profile.steps if with_names else [s._replace(name="", primitive="", source="") for s in profile.steps]
    strings = {"": 0}

    def column(texts: Iterable[str]) -> list[int]:
        return [strings.setdefault(clipped(text), len(strings)) for text in texts]

    return {
        "name": clipped(profile.name),
        "num_steps": len(profile.steps),
        "peak_step": profile.peak_step,
        "peak_bytes": profile.peak_bytes,
        "num_buffers": len(buffers),
        "steps": {
            "name": column(s.name for s in steps),
            "primitive": column(s.primitive for s in steps),
            "source": column(short_path(s.source) for s in steps),
            "phase": [_PHASES.index(s.phase) for s in steps],
        },
        "loops": [span._replace(text=clipped(span.text))._asdict() for span in loop_spans(steps)],
        "buffers": {name: column(map(text, buffers)) for name, text in _BUFFER_TEXTS.items()}
        | {
            # Most buffers have the name of the step that writes them, for which the empty string stands.
            "name": column(b.name if steps[b.start].name != b.name else "" for b in buffers),
            "bytes": [b.num_bytes for b in buffers],
            "start": [b.start for b in buffers],
            "end": [b.end for b in buffers],
            "kind": [KINDS.index(b.kind) for b in buffers],
            "phase": [_PHASES.index(b.phase) for b in buffers],
            "taken": [taken.get(i, 0) for i in listed],
        },
        "small": _encode_small(profile, set(listed), taken),
        "kinds": KINDS,
        "strings": list(strings),
    }


_BUFFER_TEXTS: dict[str, Callable[[Buffer], str]] = {
    "type": lambda b: b.type,
    "owner": lambda b: b.owner or b.function,
    "function": lambda b: b.function,
    "source": lambda b: short_path(b.source),
    "primitive": lambda b: b.primitive,
    "region": lambda b: b.region,
    "loop": lambda b: str(b.loop or ""),
    "stacked": lambda b: str(b.stacked or ""),
}


def _taken(profile: AdvisedTimeline) -> dict[int, int]:
    """By the index of a buffer: the bytes that others, which replace it in place, take from it in its last step."""
    index = {id(b): i for i, b in enumerate(profile.buffers)}
    taken: dict[int, int] = defaultdict(int)
    for a, b in replacements(x for x in profile.buffers if x.kind != "constant"):
        taken[index[id(a)]] += min(a.offset + a.num_bytes, b.offset + b.num_bytes) - max(a.offset, b.offset)
    return taken


def _encode_small(profile: AdvisedTimeline, listed: set[int], taken: dict[int, int]) -> dict[str, Any] | None:
    """The buffers that are not listed: how many, the size of the largest, and the change of their sum at each step."""
    merged = [(i, b) for i, b in enumerate(profile.buffers) if i not in listed]
    if not merged:
        return None
    change = [0] * (len(profile.steps) + 1)
    for i, b in merged:
        if b.kind != "constant":
            change[b.start] += b.num_bytes
            change[b.end] -= taken.get(i, 0)
            change[b.end + 1] += taken.get(i, 0) - b.num_bytes
    return {
        "count": len(merged),
        "max_bytes": max(b.num_bytes for _, b in merged),
        "change": change[:-1],
    }


class LoopSpan(NamedTuple):
    """A loop in the schedule.

    Attributes:
        text: the loop.
        first, last: its steps.
        depth: how many other loops are around it.
    """

    text: str
    first: int
    last: int
    depth: int


def loop_spans(steps: Sequence[Step]) -> list[LoopSpan]:
    """The loops, in the order of their first steps.

    A step names its innermost loop only. A loop that comes back after steps of other loops alone is around them.
    """
    spans: list[list[Any]] = []  # loop, first, last
    open_: list[list[Any]] = []  # those that may come back, the outermost first
    for n, step in enumerate(steps):
        if step.loop is None:
            open_ = []
            continue
        level = next((i for i, span in enumerate(open_) if span[0] == step.loop), len(open_))
        if level == len(open_):
            open_.append([step.loop, n, n])
            spans.append(open_[-1])
        open_ = open_[: level + 1]
        open_[level][2] = n

    found: list[LoopSpan] = []
    around: list[int] = []  # last steps
    for loop, first, last in spans:
        while around and around[-1] < last:
            around.pop()
        found.append(LoopSpan(str(loop), first, last, len(around)))
        around.append(last)
    return found
