"""A profile, or two of them, as one HTML page without external resources.

The tables are HTML, so that they are there without JavaScript. The timeline and the list of buffers are drawn by the
scripts beside this file, from the data that ``_page_data.py`` encodes.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from html import escape

from .._tables import HEX, Table, page, resource
from .._text import format_bytes, short_path
from ._changes import AdvisedTimeline
from ._page_data import clipped, encode
from ._plot import GRAYS, PALETTE, svg
from ._show import compare, percent, sums, table
from .buffer import KINDS, Change, Kind

MAX_DATA = 7_500_000
"""Bytes of the data in a page; a page is this and about 100 KB more."""

_SCRIPTS = ("page_model.js", "page.js", "page_timeline.js", "page_list.js")
_MAX_CHANGES = 5

# The layers of the timeline by kind. Vermilion stays free for what grows.
_KIND_COLORS: dict[Kind, str] = {
    "state": GRAYS["states"],
    "argument": GRAYS["arguments"],
    "output": GRAYS["outputs"],
    "residual": PALETTE[0],
    "recomputed": PALETTE[3],
    "working memory": HEX["yellow"],
    "constant": HEX["green"],
}


def to_html(profile: AdvisedTimeline, other: AdvisedTimeline | None = None) -> str:
    """A page with a timeline to zoom, a list of the buffers to filter, and what to change.

    Args:
        profile: the profile; with `other`, the one before the change.
        other: the profile after the change, shown below the first with the same scale.

    Returns:
        The page, below 8 MB. If the data do not fit, the smallest buffers are merged, and the page says below which
        size.
    """
    profiles = [profile] if other is None else [profile, other]
    labels = [""] if other is None else ["before", "after"]
    data = {
        "profiles": [
            encode(p, MAX_DATA // len(profiles)) | {"label": label} for p, label in zip(profiles, labels, strict=True)
        ],
        "palette": PALETTE,
        "kind_colors": _KIND_COLORS,
    }
    # A name that contains "</script>" would end the element: JSON may write "<" as an escape.
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    code = "".join(resource("statetx.memory", name) for name in _SCRIPTS)
    sizes = " → ".join(f"{p.peak_bytes:,}" for p in profiles)
    return page(
        f"{clipped(profile.name, 60)}: peak of {sizes} bytes",
        f"""<noscript>
<section class="card"><p>Without JavaScript the timeline is a picture, and there is no list of all buffers.</p>
{"".join(map(svg, profiles))}</section>
</noscript>
<section class="card" id="timelines" aria-label="Timeline"></section>
{"".join(_cards(profiles, labels))}
<section class="card" id="buffers" aria-label="Buffers"></section>
<p class="note">A step is an instruction of the compiled program, in the order in which it runs;
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
    """Where the peak is: its step, and the line that it belongs to."""
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
    if profile.changes:
        yield _changes(profile)
    # The changes have their own card.
    yield _card(dataclasses.replace(table(profile), notes=()))


def _card(shown: Table) -> str:
    untitled = dataclasses.replace(shown, title="")
    return f'<section class="card statetx"><h2>{escape(shown.title)}</h2>{untitled._html()}</section>'


def _parts(profile: AdvisedTimeline) -> str:
    """What the peak is made of: XLA's figures, and a bar with the kinds that are alive."""
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
    note = f'<p class="note">{escape(profile.note)}</p>' if profile.note else ""
    return f'<h2>Parts of the peak</h2>{_kind_bar(profile)}<dl class="tiles">{items}</dl>{note}'


def _kind_bar(profile: AdvisedTimeline) -> str:
    totals = Counter(sums((g.kind, g.num_bytes) for g in profile.at_peak if g.kind != "constant"))
    parts = [(kind, totals[kind], f"background:{_KIND_COLORS[kind]}") for kind in KINDS if totals[kind]]
    parts += [("unused", profile.unused_bytes, "")] if profile.unused_bytes > 0 else []
    whole = max(sum(n for _, n, _ in parts), 1)
    bars = "".join(
        f'<span class="{kind}" style="width:{100 * n / whole:.2f}%;{css}" title="{kind}: {n:,} bytes"></span>'
        for kind, n, css in parts
    )
    keys = "".join(
        f'<li><i class="swatch {kind}" style="{css}"></i>{kind} <b>{_size(n)}</b> <span '
        f'class="dim">{escape(percent(n, whole))}</span></li>'
        for kind, n, css in parts
    )
    return f'<div class="bar" aria-hidden="true">{bars}</div><ul class="keys">{keys}</ul>'


def _changes(profile: AdvisedTimeline) -> str:
    items = list(_items(profile.changes, profile.peak_bytes))
    shown, rest = items[:_MAX_CHANGES], items[_MAX_CHANGES:]
    more = f"<details><summary>{len(rest)} more</summary><ol>{''.join(rest)}</ol></details>" if rest else ""
    return (
        f'<section class="card changes"><h2>What to change</h2><ol>{"".join(shown)}</ol>{more}'
        f'<p class="note">Savings are predicted from the lifetimes of the buffers, each change alone.</p></section>'
    )


def _items(changes: Iterable[Change], peak_bytes: int) -> Iterator[str]:
    for number, change in enumerate(changes, 1):
        yield (
            f'<li><span class="saved">−{_size(change.saved_bytes)} <span '
            f'class="dim">{escape(percent(change.saved_bytes, peak_bytes))}</span></span> '
            f'<span>[{number}] <b class="action">{escape(change.action)}</b> '
            f"{escape(clipped(change.text, 1000))}</span></li>"
        )
