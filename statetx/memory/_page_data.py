"""The data of a page: a profile as columns of integers, small enough for a page that opens at once.

Names, owners and lines are indices into one table of strings. A column is a base64 string of variable-length integers: 7 bits in a byte,
the lowest first, the eighth bit set if more follow (LEB128). ``page_model.js`` decodes it.
"""

from __future__ import annotations

import base64
import functools
import json
import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .._errors import printable
from .._text import short_path
from .buffer import KINDS, Buffer, Step, replacements

if TYPE_CHECKING:
    from .profile import MemoryProfile

_MAX_TEXT = 300  # characters of a name; longer ones are cut
_PHASES = ("forward", "backward", "update")


def clipped(text: str, width: int = _MAX_TEXT) -> str:
    return _cut(printable(text), width)


def _cut(text: str, width: int = _MAX_TEXT) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def varints(numbers: Iterable[int]) -> str:
    """Non-negative integers below 2^63 as variable-length bytes, in base64.

    Example:
        >>> varints([0, 127, 128]) == base64.b64encode(bytes([0, 127, 128, 1])).decode()
        True
    """
    rest = np.fromiter(numbers, np.int64)
    assert not (rest < 0).any()
    digits, is_used = [], []
    while not digits or rest.any():
        is_used.append(rest > 0 if digits else np.ones(len(rest), bool))
        digits.append(rest & 127 | (rest > 127) << 7)
        rest = rest >> 7
    in_order = np.stack(digits, axis=1)[np.stack(is_used, axis=1)]
    return base64.b64encode(in_order.astype(np.uint8).tobytes()).decode()


def zigzag(numbers: Iterable[int]) -> Iterator[int]:
    """Integers of both signs as non-negative ones: 0, -1, 1, -2 become 0, 1, 2, 3."""
    return (2 * n if n >= 0 else -2 * n - 1 for n in numbers)


def differences(numbers: Iterable[int]) -> Iterator[int]:
    """Each number less its predecessor; before the first one is 0."""
    last = 0
    for n in numbers:
        yield n - last
        last = n


_NUMBER = re.compile(r"(?<![0-9])(?:0|[1-9][0-9]{0,8})(?![0-9])")
_MARK = "\x01"


@functools.lru_cache(100_000)
def pattern(name: str) -> tuple[str, list[int]]:
    """A name without its numbers, each replaced by a mark: names of instructions are few words with many numbers."""
    name = printable(name)  # a mark of its own, too
    return _NUMBER.sub(_MARK, name), [int(digits) for digits in _NUMBER.findall(name)]


def short_source(source: str) -> str:
    """A line relative to the working directory; one that is relative already stays, with its folders."""
    return short_path(source) if os.path.isabs(source) else source


class _Strings:
    """Columns of strings, and the table of strings that they index. Frequent strings come first, so that they take a byte; the
    empty string is 0.

    Args:
        columns: of strings of users, escaped here.
        patterns: columns of what `pattern` returns.
    """

    def __init__(self, columns: dict[str, list[str]], patterns: dict[str, list[str]]):
        short = {name: [clipped(text) for text in texts] for name, texts in columns.items()}
        short |= {name: [_cut(text) for text in texts] for name, texts in patterns.items()}
        counts = Counter(text for texts in short.values() for text in texts)
        self.table = ["", *(text for text, _ in counts.most_common() if text)]
        index = {text: n for n, text in enumerate(self.table)}
        self.columns = {name: varints([index[text] for text in texts]) for name, texts in short.items()}


def encode(profile: MemoryProfile, max_bytes: int) -> dict[str, Any]:
    """The data of a profile, at most `max_bytes` of JSON: without the smallest buffers if need be, then without names of steps.

    Args:
        profile: the profile.
        max_bytes: of the JSON text.
    """
    taken = _taken(profile)
    by_size = sorted(range(len(profile.buffers)), key=lambda i: -profile.buffers[i].num_bytes)

    def encoded(num_listed: int, with_names: bool) -> tuple[dict[str, Any], int]:
        made = _encode(profile, taken, sorted(by_size[:num_listed]), with_names)
        return made, len(json.dumps(made, separators=(",", ":")))

    made, size = encoded(len(by_size), True)
    if size <= max_bytes or not by_size:
        return made

    # The size with n buffers: that without any, the strings of n buffers, and as much for each buffer in the other columns.
    _, base = encoded(0, True)
    with_names = base < 0.7 * max_bytes
    string_bytes = _string_bytes([profile.buffers[i] for i in by_size])
    per_buffer = (size - base - string_bytes[-1]) / len(by_size)
    if not with_names:
        made, base = encoded(0, False)
    sizes = base + string_bytes + max(per_buffer, 1) * np.arange(1, len(by_size) + 1)
    num_listed = int(np.searchsorted(sizes, 0.97 * max_bytes))
    while size > max_bytes and num_listed:
        made, size = encoded(num_listed, with_names)
        num_listed = int(num_listed * max(0.95 * max_bytes - base, 0) / max(size - base, 1))
    return made if size <= max_bytes else encoded(0, False)[0]


def _string_bytes(buffers: Sequence[Buffer]) -> np.ndarray:
    """For each number of buffers, from 1: about the bytes of their different strings in JSON."""
    seen: set[str] = set()
    total, totals = 0, []
    for b in buffers:
        for text in _BUFFER_TEXTS.values():
            string = text(b)
            if string not in seen:
                seen.add(string)
                total += len(string) + 3
        totals.append(total)
    return np.array(totals)


def _encode(profile: MemoryProfile, taken: dict[int, int], listed: Sequence[int], with_names: bool) -> dict[str, Any]:
    buffers = [profile.buffers[i] for i in listed]
    steps = profile.steps if with_names else [s._replace(name="", primitive="", source="") for s in profile.steps]

    loops = loop_spans(profile.steps)

    # Most buffers have the name of the step that writes them, for which the empty string stands.
    buffer_names = [b.name if steps[b.start].name != b.name else "" for b in buffers]
    step_patterns, buffer_patterns = [pattern(s.name) for s in steps], [pattern(name) for name in buffer_names]
    strings = _Strings(
        {
            "steps.primitive": [s.primitive for s in steps],
            "steps.source": [short_source(s.source) for s in steps],
            "loops.text": [loop.text for loop in loops],
        }
        | {f"buffers.{name}": [text(b) for b in buffers] for name, text in _BUFFER_TEXTS.items()},
        {
            "steps.pattern": [text for text, _ in step_patterns],
            "buffers.pattern": [text for text, _ in buffer_patterns],
        },
    )
    return {
        "name": clipped(profile.name),
        "num_steps": len(profile.steps),
        "peak_step": profile.peak_step,
        "peak_bytes": profile.peak_bytes,
        "num_buffers": len(buffers),
        "columns": strings.columns
        | _buffer_numbers(buffers, [taken.get(i, 0) for i in listed])
        | {
            "steps.phase": varints(_PHASES.index(s.phase) for s in steps),
            "steps.numbers": varints(n for _, numbers in step_patterns for n in numbers),
            "loops.first": varints(loop.first for loop in loops),
            "loops.last": varints(loop.last for loop in loops),
            "loops.depth": varints(loop.depth for loop in loops),
            "buffers.numbers": varints(n for _, numbers in buffer_patterns for n in numbers),
        },
        "small": _encode_small(profile, set(listed), taken),
        "kinds": KINDS,
        "strings": strings.table,
    }


_BUFFER_TEXTS: dict[str, Callable[[Buffer], str]] = {
    "type": lambda b: b.type,
    "owner": lambda b: b.owner or b.function,
    "function": lambda b: b.function,
    "source": lambda b: short_source(b.source),
    "primitive": lambda b: b.primitive,
    "region": lambda b: b.region,
    "loop": lambda b: str(b.loop or ""),
    "stacked": lambda b: str(b.stacked or ""),
}


def _buffer_numbers(buffers: Sequence[Buffer], taken: Sequence[int]) -> dict[str, str]:
    return {
        "buffers.bytes": varints(b.num_bytes for b in buffers),
        "buffers.start": varints(zigzag(differences(b.start for b in buffers))),
        "buffers.length": varints(b.end - b.start for b in buffers),
        "buffers.kind": varints(KINDS.index(b.kind) for b in buffers),
        "buffers.phase": varints(_PHASES.index(b.phase) for b in buffers),
        # 0 and 1 for nothing and all of it, which are frequent.
        "buffers.taken": varints(
            0 if not n else 1 if n == b.num_bytes else n + 1 for b, n in zip(buffers, taken, strict=True)
        ),
    }


def _taken(profile: MemoryProfile) -> dict[int, int]:
    """By the index of a buffer: the bytes that others, which replace it in place, take from it in its last step."""
    index = {id(b): i for i, b in enumerate(profile.buffers)}
    taken: dict[int, int] = defaultdict(int)
    for a, b in replacements(x for x in profile.buffers if x.kind != "constant"):
        taken[index[id(a)]] += min(a.offset + a.num_bytes, b.offset + b.num_bytes) - max(a.offset, b.offset)
    return taken


def _encode_small(profile: MemoryProfile, listed: set[int], taken: dict[int, int]) -> dict[str, Any] | None:
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
        "change": varints(zigzag(change[:-1])),
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
