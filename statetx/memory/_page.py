"""A profile, or two of them, as one HTML page without external resources.

The tables are HTML, and need no JavaScript. The timeline and the list of buffers are drawn by the
scripts beside this file, from columns of integers in JSON, small enough for a page that opens at once: names, owners
and lines are indices into one table of strings, which ``page_model.js`` reads.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from html import escape
from typing import Any, NamedTuple

import numpy as np

from .._equations.dataflow import alive_bytes
from .._errors import printable
from .._tables import HEX, Table, page, resource
from .._text import format_bytes, short_path
from ._advice import AdvisedTimeline
from ._show import compare, percent, sums, table
from .buffer import KINDS, Buffer, Kind, Step

MAX_LISTED = 20_000
"""Buffers that a page lists, the largest; the others are merged. A page of so many is below 4 MB."""

MAX_NAMED = 100_000
"""Steps that have names in a page."""

_SCRIPTS = ("page_model.js", "page.js", "page_timeline.js", "page_list.js")

# Okabe and Ito, for the color-blind.
_PALETTE = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#c9b800")

# The layers of the timeline by kind. Kinds that live from the first to the last step are gray, so that colors belong
# to the others. Vermilion stays free for growth.
_KIND_COLORS: dict[Kind, str] = {
    "state": "#7f7f7f",
    "argument": "#b0b0b0",
    "output": "#5a5a5a",
    "residual": _PALETTE[0],
    "recomputed": _PALETTE[3],
    "working memory": HEX["yellow"],
    "constant": HEX["green"],
}


def to_html(profile: AdvisedTimeline, second: AdvisedTimeline | None = None) -> str:
    """A page with a timeline to zoom, a list of the buffers to filter, and what to change.

    Args:
        profile: the profile; with `other`, the one before the change.
        other: the profile after the change, shown below the first with the same scale.

    Returns:
        The page. Of very many buffers the smallest are merged, and the page says below which size.
    """
    profiles = [profile] if second is None else [profile, second]
    labels = [""] if second is None else ["before", "after"]
    data = {
        "profiles": [
            encode(p, MAX_LISTED // len(profiles)) | {"label": label} for p, label in zip(profiles, labels, strict=True)
        ],
        "palette": _PALETTE,
        "kind_colors": _KIND_COLORS,
    }
    # A name that contains "</script>" would end the element: JSON may write "<" as an escape.
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    code = "".join(resource("statetx.memory", name) for name in _SCRIPTS)
    sizes = " → ".join(f"{p.peak_bytes:,}" for p in profiles)
    return page(
        f"{clipped(profile.name, 60)}: peak of {sizes} bytes",
        f"""<noscript>
<section class="card"><p>Without JavaScript there is no timeline, and no list of all buffers.</p></section>
</noscript>
<section class="card" id="timelines" aria-label="Timeline"></section>
{"".join(_cards(profiles, labels))}
<section class="card" id="buffers" aria-label="Buffers"></section>
<p class="note">Steps are the instructions of the compiled program, in the order of execution;
the body of a loop is drawn once.</p>""",
        header=_header(profiles),
        scripts=f'<script type="application/json" id="data">{text}</script>\n<script>\n{code}\n</script>',
    )


def _header(profiles: Sequence[AdvisedTimeline]) -> str:
    first, last = profiles[0], profiles[-1]
    sizes = " <span class='to'>→</span> ".join(map(_size, (p.peak_bytes for p in profiles)))
    exact = " → ".join(f"{p.peak_bytes:,}" for p in profiles) + " bytes"
    ratio = ""
    if len(profiles) > 1 and first.peak_bytes:
        css = "less" if last.peak_bytes < first.peak_bytes else "more"
        change = 100 * (last.peak_bytes - first.peak_bytes) / first.peak_bytes
        ratio = f' <span class="{css}">{change:+.0f}%</span>'.replace("-", "−")
    names = " → ".join(dict.fromkeys(clipped(p.name) for p in profiles))
    devices = f" on each of {last.num_devices} devices" if last.num_devices > 1 else ""
    return (
        f'<p class="eyebrow">Memory of <code>{escape(names)}</code> on {escape(last.backend)}{devices}</p>'
        f"<h1>{sizes}{ratio} <small>at the peak</small></h1>"
        f'<p class="exact">{exact}{escape(_place(last)) if len(profiles) == 1 else ""}</p>'
    )


def _size(num_bytes: int) -> str:
    return f'<span title="{num_bytes:,} bytes">{format_bytes(num_bytes).replace(" ", "&nbsp;")}</span>'


def _place(profile: AdvisedTimeline) -> str:
    """Place of the peak: its step, and the line that it belongs to."""
    if not profile.steps:
        return ""
    step = profile.steps[profile.peak_step]
    parts = [f"step {profile.peak_step + 1:,} of {len(profile.steps):,}", step.phase, step.primitive]
    return " · " + " · ".join(filter(None, [*parts, short_path(step.source)]))


def _cards(profiles: Sequence[AdvisedTimeline], labels: Sequence[str]) -> Iterator[str]:
    if len(profiles) == 1:
        yield from _of_one(profiles[0])
        return
    yield _card(compare(*profiles))
    for profile, label in zip(reversed(profiles), reversed(labels), strict=True):
        opened = " open" if label == "after" else ""
        yield f'<details class="profile"{opened}><summary>{label.capitalize()}: {_size(profile.peak_bytes)}</summary>'
        yield from (*_of_one(profile), "</details>")


def _of_one(profile: AdvisedTimeline) -> Iterator[str]:
    yield f'<div class="card">{_parts(profile)}</div>'
    whole_table = table(profile)
    if whole_table.notes:
        yield _card(Table("What to change" if profile.changes else "Notes", (), (), whole_table.notes))
    yield _card(dataclasses.replace(whole_table, notes=()))


def _card(section: Table) -> str:
    untitled = dataclasses.replace(section, title="")
    return f'<section class="card statetx"><h2>{escape(section.title)}</h2>{untitled._html()}</section>'


def _parts(profile: AdvisedTimeline) -> str:
    """Parts of the peak: XLA's figures, and a bar with the kinds that are alive."""
    plus, minus, equals = (f'<span class="sign">{sign}</span>' for sign in "+−=")
    tiles = [
        ("arguments", "", profile.argument_bytes, "states and arguments"),
        ("outputs", plus, profile.output_bytes, "with those that reuse arguments"),
        ("reused by donation", minus, profile.alias_bytes, "outputs in the memory of arguments"),
        ("temporaries", plus, profile.temp_bytes, "all else"),
        ("peak", equals, profile.peak_bytes, "what the program reserves"),
        ("unused at the peak", "", profile.unused_bytes, "part of the peak: gaps, outputs not yet written"),
        ("constants", "", profile.constant_bytes, "not part of the peak"),
    ]
    items = "".join(
        f'<div class="tile"><dt>{name}</dt><dd>{sign}{_size(n)}</dd><dd class="hint">{hint}</dd></div>'
        for name, sign, n, hint in tiles
    )
    return f'<h2>Parts of the peak</h2>{_kind_bar(profile)}<dl class="tiles">{items}</dl>'


def _kind_bar(profile: AdvisedTimeline) -> str:
    totals = Counter(sums((g.kind, g.num_bytes) for g in profile.at_peak if g.kind != "constant"))
    parts = [(kind, totals[kind], f"background:{_KIND_COLORS[kind]}") for kind in KINDS if totals[kind]]
    parts += [("unused", profile.unused_bytes, "")] if profile.unused_bytes > 0 else []
    total = max(sum(n for _, n, _ in parts), 1)
    bars = "".join(
        f'<span class="{kind}" style="width:{100 * n / total:.2f}%;{css}" title="{kind}: {n:,} bytes"></span>'
        for kind, n, css in parts
    )
    keys = "".join(
        f'<li><i class="swatch {kind}" style="{css}"></i>{kind} <b>{_size(n)}</b> <span '
        f'class="dim">{escape(percent(n, total))}</span></li>'
        for kind, n, css in parts
    )
    return f'<div class="bar" aria-hidden="true">{bars}</div><ul class="keys">{keys}</ul>'


# -- data ------------------------------------------------------------------------------------------------------------

_MAX_TEXT = 300  # characters of a name; longer ones are cut
_PHASES = ("forward", "backward", "update")


def clipped(text: str, width: int = _MAX_TEXT) -> str:
    text = printable(text)
    return text if len(text) <= width else text[: width - 1] + "…"


def encode(profile: AdvisedTimeline, num_listed: int) -> dict[str, Any]:
    """The data of a profile, with at most so many buffers."""
    taken = _taken(profile)
    by_size = sorted(range(len(profile.buffers)), key=lambda i: -profile.buffers[i].num_bytes)
    listed = sorted(by_size[:num_listed])
    buffers, steps = [profile.buffers[i] for i in listed], profile.steps
    if len(steps) > MAX_NAMED:
        steps = [s._replace(name="", primitive="", source="") for s in steps]
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
            # Most buffers have the name of the step that writes them, written as the empty string.
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
    """Bytes that others, which replace a buffer in place, take from it in its last step, by its index."""
    index = {id(b): i for i, b in enumerate(profile.buffers)}
    taken: dict[int, int] = defaultdict(int)
    for a, _, shared in profile.replacements:
        taken[index[id(a)]] += shared
    return taken


def _encode_small(profile: AdvisedTimeline, listed: set[int], taken: dict[int, int]) -> dict[str, Any] | None:
    """The buffers that are not listed: how many, the size of the largest, and the change of their sum at each step."""
    merged = [(i, b) for i, b in enumerate(profile.buffers) if i not in listed]
    if not merged:
        return None
    spans = [(b.start, b.end, b.num_bytes) for _, b in merged if b.kind != "constant"]
    spans += [(b.end, b.end, -taken[i]) for i, b in merged if i in taken]
    return {
        "count": len(merged),
        "max_bytes": max(b.num_bytes for _, b in merged),
        "change": np.diff(alive_bytes(len(profile.steps), spans), prepend=0).tolist(),
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

    loops: list[LoopSpan] = []
    last_steps: list[int] = []  # last steps
    for loop, first, last in spans:
        while last_steps and last_steps[-1] < last:
            last_steps.pop()
        loops.append(LoopSpan(str(loop), first, last, len(last_steps)))
        last_steps.append(last)
    return loops
