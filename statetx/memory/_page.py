"""A profile, or two of them, as one HTML page without external resources.

The tables are HTML, so that they are there without JavaScript. The timeline and the list of buffers are drawn by the scripts beside
this file, from the data that ``_page_data.py`` encodes.
"""

from __future__ import annotations

import functools
import importlib.resources
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from typing import TYPE_CHECKING, TypeVar

from .._tables import HEX
from .._text import format_bytes
from ._page_data import clipped, encode, short_source
from ._plot import GRAYS, PALETTE, svg
from ._show import rows_at_peak
from .buffer import KINDS, Change, Kind

if TYPE_CHECKING:
    from .profile import MemoryProfile

MAX_DATA = 1_700_000
"""Bytes of the data in a page; a page is this and about 100 KB more."""

_SCRIPTS = ("page_model.js", "page.js", "page_timeline.js", "page_list.js")
_MAX_ROWS = 10
_MAX_CHANGES = 5
T = TypeVar("T")

# The layers of the timeline by kind, and the stripes of the kinds in the tables. Vermilion stays free for what grows.
_KIND_COLORS: dict[Kind, str] = {
    "state": GRAYS["states"],
    "argument": GRAYS["arguments"],
    "output": GRAYS["outputs"],
    "residual": PALETTE[0],
    "recomputed": PALETTE[3],
    "working memory": HEX["yellow"],
    "constant": HEX["green"],
}


def to_html(profile: MemoryProfile, other: MemoryProfile | None = None) -> str:
    """A page with a timeline to zoom, a list of the buffers to filter, and what to change.

    Args:
        profile: the profile; with `other`, the one before the change.
        other: the profile after the change, shown below the first with the same scale.

    Returns:
        The page, below 2 MB. If the data do not fit, the smallest buffers are merged, and the page says below which size.
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
    parts = {
        "title": escape(_title(profiles)),
        "style": _resource("page.css"),
        "header": _header(profiles),
        "tables": "".join(_tables(profiles, labels)),
        "pictures": "".join(map(svg, profiles)),
        # A name that contains "</script>" would end the element: JSON may write "<" as an escape.
        "data": json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"),
        "script": "".join(map(_resource, _SCRIPTS)),
    }
    # In one pass: a name that looks like a placeholder is not replaced. A lone surrogate in a name cannot be written as UTF-8.
    page = re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _resource("page.html"))
    return page.encode("utf-8", "replace").decode("utf-8")


@functools.cache
def _resource(name: str) -> str:
    return importlib.resources.files(__name__.rpartition(".")[0]).joinpath(name).read_text(encoding="utf-8")


# -- text and tables -----------------------------------------------------------------------------------------------------------


def _title(profiles: Sequence[MemoryProfile]) -> str:
    sizes = " → ".join(f"{p.peak_bytes:,}" for p in profiles)
    return f"{clipped(profiles[0].name, 60)}: peak of {sizes} bytes"


def _header(profiles: Sequence[MemoryProfile]) -> str:
    first, last = profiles[0], profiles[-1]
    sizes = " <span class='to'>→</span> ".join(
        f'<span title="{p.peak_bytes:,} bytes">{_size(p.peak_bytes)}</span>' for p in profiles
    )
    exact = " → ".join(f"{p.peak_bytes:,}" for p in profiles) + " bytes"
    ratio = ""
    if len(profiles) > 1:
        css = _direction(first.peak_bytes, last.peak_bytes)
        ratio = f' <span class="{css}">{_ratio(first.peak_bytes, last.peak_bytes)}</span>'
    names = " → ".join(dict.fromkeys(clipped(p.name) for p in profiles))
    devices = f" on each of {last.num_devices} devices" if last.num_devices > 1 else ""
    return (
        f'<p class="eyebrow">Memory of <code>{escape(names)}</code> on {escape(last.backend)}{devices}</p>'
        f"<h1>{sizes}{ratio} <small>at the peak</small></h1>"
        f'<p class="exact">{exact}{escape(_place(last)) if len(profiles) == 1 else ""}</p>'
    )


def _size(num_bytes: int) -> str:
    return format_bytes(num_bytes).replace(" ", "&nbsp;")


def _ratio(before: int, after: int) -> str:
    if before == after or not before:
        return "±0%" if before == after else ""
    return f"{100 * (after - before) / before:+.0f}%".replace("-", "−")


def _direction(before: int, after: int) -> str:
    """The CSS class of a difference."""
    return "less" if after < before else "more" if after > before else ""


def _place(profile: MemoryProfile) -> str:
    """Where the peak is: its step, and the line that it belongs to."""
    if not profile.steps:
        return ""
    step = profile.steps[profile.peak_step]
    parts = [f"step {profile.peak_step + 1:,} of {len(profile.steps):,}", step.phase, step.primitive]
    return " · " + " · ".join(filter(None, [*parts, short_source(step.source)]))


def _tables(profiles: Sequence[MemoryProfile], labels: Sequence[str]) -> Iterator[str]:
    if len(profiles) == 1:
        yield f'<div class="card">{_parts(profiles[0])}</div>{_advice(profiles[0])}'
        return
    yield _comparison(*profiles)
    for profile, label in zip(reversed(profiles), reversed(labels), strict=True):
        opened = " open" if label == "after" else ""
        yield f'<details class="profile"{opened}><summary>{label.capitalize()}: {_size(profile.peak_bytes)}</summary>'
        yield f'<div class="card">{_parts(profile)}</div>{_advice(profile)}</details>'


def _parts(profile: MemoryProfile) -> str:
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
        f'<div class="tile"><dt>{name}</dt><dd title="{n:,} bytes">{sign}{_size(n)}</dd><dd class="hint">{hint}</dd></div>'
        for name, sign, n, hint in tiles
    )
    note = f'<p class="note">{escape(profile.note)}</p>' if profile.note else ""
    return f'<h2>Parts of the peak</h2>{_kind_bar(profile)}<dl class="tiles">{items}</dl>{note}'


def _kind_bar(profile: MemoryProfile) -> str:
    totals: Counter[str] = Counter()
    for group in profile.at_peak:
        if group.kind != "constant":
            totals[group.kind] += group.num_bytes
    parts = [(kind, totals[kind], f"background:{_KIND_COLORS[kind]}") for kind in KINDS if totals[kind]]
    parts += [("unused", profile.unused_bytes, "")] if profile.unused_bytes > 0 else []
    whole = max(sum(n for _, n, _ in parts), 1)
    bars = "".join(
        f'<span class="{kind}" style="width:{100 * n / whole:.2f}%;{css}" title="{kind}: {n:,} bytes"></span>'
        for kind, n, css in parts
    )
    keys = "".join(
        f'<li><i class="swatch {kind}" style="{css}"></i>{kind} <b>{_size(n)}</b> <span class="dim">{_percent(n, whole)}</span></li>'
        for kind, n, css in parts
    )
    return f'<div class="bar" aria-hidden="true">{bars}</div><ul class="keys">{keys}</ul>'


def _percent(part: int, whole: int) -> str:
    share = 100 * part / max(whole, 1)
    return "&lt;1%" if 0 < share < 0.5 else f"{share:.0f}%"


def _advice(profile: MemoryProfile) -> str:
    return _changes(profile) + _peak_table(profile)


def _changes(profile: MemoryProfile) -> str:
    if not profile.changes:
        return ""
    shown, rest = profile.changes[:_MAX_CHANGES], profile.changes[_MAX_CHANGES:]
    more = f"<details><summary>{len(rest)} more</summary><ol>{_items(rest, profile)}</ol></details>" if rest else ""
    return (
        f'<section class="card changes"><h2>What to change</h2><ol>{_items(shown, profile)}</ol>{more}'
        f'<p class="note">Savings are predicted from the lifetimes of the buffers, each change alone.</p></section>'
    )


def _items(changes: Iterable[Change], profile: MemoryProfile) -> str:
    return "".join(
        f'<li><span class="saved" title="{c.saved_bytes:,} bytes">−{_size(c.saved_bytes)} '
        f'<span class="dim">{_percent(c.saved_bytes, profile.peak_bytes)}</span></span> '
        f'<span><b class="action">{escape(c.action)}</b> {escape(clipped(c.text, 1000))}</span></li>'
        for c in changes
    )


def _peak_table(profile: MemoryProfile) -> str:
    """What is alive at the peak by owner and line; equal layers are one row."""
    rows = rows_at_peak(profile)
    shown, rest = _first(rows)
    body = []
    for row in shown:
        owner = escape(clipped(row.owner)) + (
            f' <span class="dim">× {row.num_owners}</span>' if row.num_owners > 1 else ""
        )
        details = " · ".join(escape(clipped(t, 90)) for t in (row.arrays, row.place) if t)
        where = " ".join(f"<code>{escape(clipped(t))}</code>" for t in (short_source(row.source), row.function) if t)
        change = ""
        if row.change:
            change = f'<b class="action">{escape(row.change.action)}</b> <span class="dim">−{_size(row.change.saved_bytes)}</span>'
        hint = escape(row.change.text) if row.change else ""
        body.append(
            f"<tr>{_bytes_cell(row.num_bytes, profile.peak_bytes, _KIND_COLORS[row.kind])}<td>{row.kind}</td>"
            f'<td class="wide"><code>{owner}</code><div class="dim">{details}</div></td><td>{where}</td><td title="{hint}">{change}</td></tr>'
        )
    if rest:
        num_bytes = sum(row.num_bytes for row in rest)
        body.append(
            f'<tr>{_bytes_cell(num_bytes, profile.peak_bytes, "")}<td></td><td class="wide dim">{len(rest):,} more groups</td><td></td><td></td></tr>'
        )
    head = _head(("Bytes", ""), ("Kind", ""), ("Owner", ""), ("Line", ""), ("Change", ""))
    return f'<section class="card"><h2>Alive at the peak</h2><table class="stacks">{head}<tbody>{"".join(body)}</tbody></table></section>'


def _first(rows: Sequence[T]) -> tuple[Sequence[T], Sequence[T]]:
    """Those that a table shows, and the others, which are none or several."""
    num = len(rows) if len(rows) <= _MAX_ROWS + 1 else _MAX_ROWS
    return rows[:num], rows[num:]


def _head(*columns: tuple[str, str]) -> str:
    cells = "".join(f'<th scope="col" class="{css}">{name}</th>' for name, css in columns)
    return f"<thead><tr>{cells}</tr></thead>"


def _bytes_cell(num_bytes: int, whole: int, color: str) -> str:
    width = 100 * min(num_bytes / max(whole, 1), 1)
    return (
        f'<td class="bytes" title="{num_bytes:,} bytes"><b>{_size(num_bytes)}</b> <span class="dim">{_percent(num_bytes, whole)}</span>'
        f'<span class="share"><i style="width:{width:.2f}%;background:{color or "var(--muted)"}"></i></span></td>'
    )


def _comparison(before: MemoryProfile, after: MemoryProfile) -> str:
    """Bytes by owner, each at the peak of its profile; the largest first."""
    old, new = _by_owner(before), _by_owner(after)
    names = sorted(old.keys() | new.keys(), key=lambda name: (-max(old[name], new[name]), name))
    shown, rest = _first(names)
    rows = [(f"<code>{escape(clipped(name))}</code>", old[name], new[name]) for name in shown]
    if rest:
        rows.append((f"{len(rest):,} other owners", sum(old[n] for n in rest), sum(new[n] for n in rest)))
    rows.append(("unused", before.unused_bytes, after.unused_bytes))
    rows.append(("<b>peak</b>", before.peak_bytes, after.peak_bytes))
    widest = max((abs(b - a) for _, a, b in rows), default=0) or 1
    body = "".join(_compared(name, a, b, widest) for name, a, b in rows)
    head = _head(("Owner", ""), ("Before", "number"), ("After", "number"), ("Difference", "number"), ("", "diff"))
    return f'<section class="card"><h2>Peak by owner, before and after</h2><table class="compare">{head}<tbody>{body}</tbody></table></section>'


def _by_owner(profile: MemoryProfile) -> Counter[str]:
    totals: Counter[str] = Counter()
    for row in rows_at_peak(profile):
        totals[row.owner or "unknown"] += row.num_bytes
    return totals


def _compared(name: str, before: int, after: int, widest: int) -> str:
    """A row. `name` is HTML."""
    change, css = after - before, _direction(before, after)
    sign = "−" if change < 0 else "+" if change > 0 else ""
    numbers = "".join(f'<td class="number" title="{n:,} bytes">{_size(n)}</td>' for n in (before, after))
    return (
        f'<tr><td class="wide">{name}</td>{numbers}<td class="number {css}" title="{change:+,} bytes">{sign}{_size(abs(change))} '
        f'<span class="dim">{_ratio(before, after) if change else ""}</span></td>'
        f'<td class="diff"><i class="{css}" style="width:{50 * abs(change) / widest:.1f}%"></i></td></tr>'
    )
