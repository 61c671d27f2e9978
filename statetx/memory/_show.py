"""Text of one profile or two: the first line, a sparkline, the table of live buffers at the peak."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from typing import Any, NamedTuple

import numpy as np

from .._errors import printable
from .._tables import Cell, Column, Line, Piece, Table, folded
from .._text import format_bytes, short_path
from ._advice import AdvisedTimeline
from .buffer import Buffer, Change, Group, Kind, Loop

_MAX_ROWS = 12  # of the table, without the rows for the rest
_MAX_CHANGES = 5
_SPARKLINE_WIDTH = 60


# -- rows: groups of equal owners ------------------------------------------------------------------------------------


class PeakRow(NamedTuple):
    """Groups at the peak that differ in the index of their owner only: the layers of a model.

    Attributes:
        num_owners: how many groups.
        arrays: the types of the buffers, each with its number: ``24 x f32[32,64]``.
        place: the rematerialized function or the loop that they lie in.
    """

    num_bytes: int
    kind: Kind
    owner: str
    num_owners: int
    function: str
    source: str
    arrays: str
    place: str
    change: Change | None


_INDEX = re.compile(r"(?<=[.\[])\d+(?=[.\]]|$)")


def family(owner: str) -> str:
    """The path of an owner without indices: equal layers of a model are one family.

    Example:
        >>> family("net.blocks.3.attention"), family("params['layers'][0]['w']"), family("loss")
        ('net.blocks.*.attention', "params['layers'][*]['w']", 'loss')
    """
    return _INDEX.sub("*", owner)


def rows_at_peak(profile: AdvisedTimeline) -> list[PeakRow]:
    """Rows, the largest first; without constants, which XLA's figures leave out. With ``profile.unused_bytes`` they
    sum to ``profile.peak_bytes``.
    """
    families: defaultdict[tuple[str, ...], list[Group]] = defaultdict(list)
    for group in profile.at_peak:
        families[group.kind, family(group.owner), group.function, group.source, group.region].append(group)
    return sorted((row for groups in families.values() for row in _rows(groups)), key=lambda row: -row.num_bytes)


def _rows(groups: Sequence[Group]) -> list[PeakRow]:
    """One row; a group that takes more than the others together has a row of its own."""
    largest, *smaller = sorted(groups, key=lambda g: -g.num_bytes)
    if smaller and largest.num_bytes > sum(g.num_bytes for g in smaller):
        return [_row([largest]), *_rows(smaller)]
    return [_row(groups)]


def _row(groups: Sequence[Group]) -> PeakRow:
    first, buffers = groups[0], [b for g in groups for b in g.buffers]
    types = Counter(b.shown_type for b in buffers)
    # The largest first: a table of pointers is no row's content.
    sizes = sums((b.shown_type, b.num_bytes) for b in buffers)
    texts = [f"{types[name]} x {name}" if types[name] > 1 else name for name in sizes]
    return PeakRow(
        num_bytes=sum(g.num_bytes for g in groups),
        kind=first.kind,
        owner=first.owner if len(groups) == 1 else family(first.owner),
        num_owners=len(groups),
        function=first.function,
        source=first.source,
        arrays=", ".join([*texts[:2], *(["..."] if len(texts) > 2 else [])]),
        place=_place(first),
        change=next((g.change for g in groups if g.change is not None), None),
    )


def _place(group: Group) -> str:
    largest = max(group.buffers, key=lambda b: b.num_bytes)
    if group.region:
        return f"remat of {group.region}"
    if largest.stacked:
        return f"stacked by {_loop(largest.stacked)}"
    return _loop(largest.loop) if largest.loop else ""


def _loop(loop: Loop) -> str:
    """Loop without its line, which is in another column."""
    return str(loop._replace(source=""))


# -- sentences -------------------------------------------------------------------------------------------------------


def headline(profile: AdvisedTimeline) -> str:
    """Two sentences: the step and the largest owner at the peak; the first change."""
    changes = profile.changes
    if not changes:
        return _peak_sentence(profile)
    best = _sentence(changes[0], profile)
    return f"{_peak_sentence(profile)} To try first: {best[0].lower()}{best[1:]}"


def _sentence(change: Change, profile: AdvisedTimeline) -> str:
    text = change.text.rstrip(".")
    if not change.is_compiled:
        return f"{text}."
    share = percent(change.saved_bytes, profile.peak_bytes)
    return f"{text}: {format_bytes(change.saved_bytes)} less (compiled, {share})."


def _peak_sentence(profile: AdvisedTimeline) -> str:
    devices = f" on each of {profile.num_devices} devices" if profile.num_devices > 1 else ""
    start = f"Peak {format_bytes(profile.peak_bytes)}{devices}{_peak_place(profile)}"
    rows = rows_at_peak(profile)
    if not rows:
        return f"{start}."

    # The lines of one owner count together: a block is large, not its line 7.
    totals: defaultdict[tuple[Kind, str], int] = defaultdict(int)
    for row in rows:
        totals[row.kind, row.owner] += row.num_bytes
    kind, owner = max(totals, key=lambda key: totals[key])
    lines = [row for row in rows if (row.kind, row.owner) == (kind, owner)]
    largest = totals[kind, owner]
    if profile.constant_bytes > largest:
        return f"{start}, and beside it {_constants(profile)}."
    share = percent(largest, profile.peak_bytes)
    return f"{start}: {share} is {_subject(lines)}{_line_of(lines)}."


def _peak_place(profile: AdvisedTimeline) -> str:
    """The pass, the line and the operation of the peak."""
    step = profile.steps[profile.peak_step]
    names = {"forward": " in the forward pass", "backward": " in the backward pass", "update": " in the update"}
    has_phases = len({s.phase for s in profile.steps}) > 1
    text = names[step.phase] if has_phases else ""
    text += f" at {short_path(step.source)}" if step.source else ""
    text += f" ({step.primitive})" if step.primitive else ""
    return text + (f" in a {_loop(step.loop)}" if step.loop else "")


SUBJECTS = {
    "state": ("the state", "the states"),
    "argument": ("the argument", "the arguments"),
    "output": ("the output", "the outputs"),
    "residual": ("residuals of", "residuals of"),
    "recomputed": ("recomputed values of", "recomputed values of"),
    "working memory": ("working memory of", "working memory of"),
    "constant": ("the constant", "the constants"),
}


def _subject(rows: Sequence[PeakRow]) -> str:
    """Name of the rows of one owner. Not every layer has a buffer of every line."""
    num_owners = max(row.num_owners for row in rows)
    number = f" ({num_owners} of them)" if num_owners > 1 else ""
    return f"{SUBJECTS[rows[0].kind][num_owners > 1]} {rows[0].owner}{number}"


def _line_of(rows: Sequence[PeakRow]) -> str:
    """Function, line and loop of the largest of some rows."""
    largest, total = rows[0], sum(row.num_bytes for row in rows)
    function = largest.function if largest.function != largest.owner else ""
    where = ", ".join(filter(None, [function, short_path(largest.source), largest.place]))
    if not where or largest.kind in ("state", "argument"):
        return ""
    if len(rows) == 1:
        return f" ({where})"
    part = "most of it" if 2 * largest.num_bytes > total else "the largest part"
    return f", {part} from {where}"


def _constants(profile: AdvisedTimeline) -> str:
    """The constants of the program, with the name of the largest."""
    text = f"{format_bytes(profile.constant_bytes)} of constants, which XLA's figures leave out"
    constants = [b for b in profile.buffers if b.kind == "constant"]
    if not constants:
        return text
    b = max(constants, key=lambda b: b.num_bytes)
    where = ", ".join(filter(None, [b.function, short_path(b.source)]))
    name = b.owner if b.owner and b.owner != b.function else ""
    description = " ".join(filter(None, [name, b.shown_type, f"in {where}" if where else ""]))
    return f"{text}; the largest is {description} ({format_bytes(b.num_bytes)})"


def percent(part: int, total: int) -> str:
    share = 100 * part / max(total, 1)
    return "<1%" if 0 < share < 0.5 else f"{share:.0f}%"


def kinds_line(profile: AdvisedTimeline) -> str:
    """The bytes of each kind at the peak, and the unused ones."""
    sizes = _parts_of_peak(profile).items()
    parts = [f"{name} {format_bytes(n)} ({percent(n, profile.peak_bytes)})" for name, n in sizes]
    return "At the peak: " + ", ".join(parts) if parts else ""


def unwritten_outputs(profile: AdvisedTimeline) -> list[Buffer]:
    """The outputs that have their memory at the peak, and are written later."""
    used = {b.allocation for b in profile.alive(profile.peak_step)}
    return [b for b in profile.buffers if b.kind == "output" and b.allocation not in used]


def unused_parts(profile: AdvisedTimeline) -> dict[str, int]:
    """The parts of ``profile.unused_bytes``."""
    unwritten = min(sum(b.num_bytes for b in unwritten_outputs(profile)), max(profile.unused_bytes, 0))
    gaps = profile.unused_bytes - unwritten
    # Buffers that are estimated from the equations can exceed the program's reservation.
    label = "unused (gaps between buffers)" if gaps > 0 else "more than the program reserves"
    label = label if profile.buffers else "not told"
    return {name: n for name, n in ((UNWRITTEN, unwritten), (label, gaps)) if n}


def _parts_of_peak(profile: AdvisedTimeline) -> dict[str, int]:
    return sums((g.kind, g.num_bytes) for g in profile.at_peak) | unused_parts(profile)


def sums(pairs: Iterable[tuple[str, int]]) -> dict[str, int]:
    """The sum of each name, the largest first."""
    totals: defaultdict[str, int] = defaultdict(int)
    for name, n in pairs:
        totals[name] += n
    return dict(sorted(totals.items(), key=lambda item: -item[1]))


UNWRITTEN = "outputs not yet written"


# -- sparkline -------------------------------------------------------------------------------------------------------

_BLOCKS = " ▁▂▃▄▅▆▇█"
_RULES = {"forward": "─", "backward": "═", "update": "┄"}


def sparkline(profile: AdvisedTimeline) -> str:
    """Bytes alive over the schedule, and below it the phases and the peak."""
    width = min(_SPARKLINE_WIDTH, len(profile.steps))
    edges = np.linspace(0, len(profile.steps), width + 1).astype(int)
    columns = list(itertools.pairwise(edges))  # each shows the most bytes of its steps
    levels = np.array([profile.timeline[a:b].max() for a, b in columns])
    highest = max(int(levels.max()), 1)
    repeats = max(_SPARKLINE_WIDTH // width, 1)  # the steps of a short program are several characters wide

    # A level is rounded up: what holds memory at all is visible.
    blocks = "".join(_BLOCKS[-(-int(n) * (len(_BLOCKS) - 1) // highest)] * repeats for n in levels)
    phases = ""
    for phase, run in itertools.groupby(_phases(profile, columns)):
        length = repeats * len(list(run))
        lead = _RULES[phase] if phases[-1:].isalpha() else ""  # between two labels
        label = f"{lead}{phase} "[:length] if len(lead + phase) <= length else ""
        phases += label.ljust(length, _RULES[phase])

    column = repeats * int(levels.argmax())
    label = f"peak, step {profile.peak_step + 1:,} of {len(profile.steps):,}"
    mark = f"{label} ▲".rjust(column + 1) if column > len(label) else " " * column + f"▲ {label}"
    return "\n".join([blocks, phases, mark])


def _phases(profile: AdvisedTimeline, columns: Sequence[tuple[int, int]]) -> list[str]:
    """The phase of each column: of most steps around it, or of the peak for the column with the peak.

    XLA schedules single operations of one pass within the other.
    """
    margin, peak = len(profile.steps) // 12, profile.peak_step
    phases: list[str] = []
    for first, end in columns:
        near = [step.phase for step in profile.steps[max(first - margin, 0) : end + margin]]
        phases.append(profile.steps[peak].phase if first <= peak < end else Counter(near).most_common(1)[0][0])
    return phases


# -- table -----------------------------------------------------------------------------------------------------------

_COLUMNS = (
    Column("bytes", "right", "bold"),
    Column("share", "right"),
    Column("kind"),
    Column("owner", code=True),
    Column("arrays", code=True, rank=4),
    Column("line", code=True, rank=1, below=True),
    Column("function", style="dim", code=True, rank=3),
    Column("in", rank=2),
    Column("change"),
)
_COLORS = {"state": "green", "argument": "cyan", "output": "cyan", "residual": "red"}
_COLORS |= {"recomputed": "yellow", "working memory": "yellow"}


def table(profile: AdvisedTimeline) -> Table:
    """Table of the live buffers at the peak, by owner and line; below it the changes that the column "change" counts.

    The rows sum to ``profile.peak_bytes``: one is for the groups that are not shown, and the last ones for unused
    memory.
    """
    rows = rows_at_peak(profile)
    listed, unlisted = (rows[:_MAX_ROWS], rows[_MAX_ROWS:]) if len(rows) > _MAX_ROWS + 1 else (rows, [])
    changes = _numbered(profile, listed)
    cells = [_cells(row, profile, changes) for row in listed]
    if unlisted:
        cells.append(_total(sum(row.num_bytes for row in unlisted), f"{len(unlisted)} more groups", profile))
    cells += [_total(n, name, profile) for name, n in unused_parts(profile).items()]

    title = f"Alive at the peak of {profile.name}, {format_bytes(profile.peak_bytes)}"
    return Table(title, _COLUMNS, cells, _notes(profile, changes)).without_empty_columns()


def _numbered(profile: AdvisedTimeline, rows: Sequence[PeakRow]) -> dict[Change, int]:
    """The changes to list, the best ones and the rows' own, with their numbers in ``profile.changes``."""
    of_rows = [row.change for row in rows if row.change is not None]
    every = {change: n for n, change in enumerate(dict.fromkeys([*profile.changes, *of_rows]), 1)}
    return {change: every[change] for change in (*profile.changes[:_MAX_CHANGES], *of_rows)}


def _cells(row: PeakRow, profile: AdvisedTimeline, changes: dict[Change, int]) -> list[Cell]:
    """One for each of `_COLUMNS`."""
    share = row.num_bytes / max(profile.peak_bytes, 1)
    owner = f"{row.owner} ({row.num_owners})" if row.num_owners > 1 else row.owner
    return [
        Cell(format_bytes(row.num_bytes), _COLORS[row.kind], share=share, hint=f"{row.num_bytes:,} B"),
        Cell(percent(row.num_bytes, profile.peak_bytes)),
        Cell(row.kind, _COLORS[row.kind]),
        Cell(owner),
        Cell(row.arrays),
        Cell(short_path(row.source), hint=row.source),
        Cell(row.function),
        Cell(row.place),
        Cell(f"[{changes[row.change]}]" if row.change else "", hint=row.change.text if row.change else ""),
    ]


def _total(num_bytes: int, label: str, profile: AdvisedTimeline) -> list[Cell]:
    cells = [Cell(format_bytes(num_bytes), hint=f"{num_bytes:,} B"), Cell(percent(num_bytes, profile.peak_bytes))]
    return [*cells, Cell(""), Cell(label, style="dim"), *[Cell("")] * (len(_COLUMNS) - 4)]


def _notes(profile: AdvisedTimeline, changes: dict[Change, int]) -> list[tuple[str, str]]:
    notes = [(f"[{n}]", _sentence(c, profile)) for c, n in changes.items()]
    if 100 * profile.constant_bytes > profile.peak_bytes:
        notes.append(("Constants:", f"{_constants(profile)}."))
    notes += [("Gradients:", sentence) for sentence in profile.gradients]
    if profile.note:
        notes.append(("Note:", profile.note))
    return notes


# -- forms -----------------------------------------------------------------------------------------------------------


def lines(profile: AdvisedTimeline, width: int, prose: int) -> Iterator[Line]:
    """The first line, the timeline, and the table."""
    paragraph = lambda text: folded([Piece(printable(text))], prose, 0)
    whole_table = table(profile)
    yield from (*paragraph(headline(profile)), [])
    yield from (*([Piece(line)] for line in sparkline(profile).splitlines()), [])
    if by_kind := kinds_line(profile):
        yield from (*paragraph(by_kind), [])
    yield from dataclasses.replace(whole_table, notes=())._lines(width, prose)
    if whole_table.notes:
        yield from ([], *dataclasses.replace(whole_table, title="", rows=())._lines(width, prose))


def html(profile: AdvisedTimeline) -> str:
    """HTML for a notebook: the first line, the timeline, and the table."""
    return f"<p>{escape(printable(headline(profile)))}</p><pre>{sparkline(profile)}</pre>{table(profile)._html()}"


def to_dict(profile: AdvisedTimeline) -> dict[str, Any]:
    """Lists, dicts, numbers and texts, for ``json.dump``. A group names its buffers by their index in ``buffers``."""
    index = {_key(b): n for n, b in enumerate(profile.buffers)}
    groups = []
    for group in profile.at_peak:
        change = group.change._asdict() if group.change else None
        buffers = [index[_key(b)] for b in group.buffers]
        groups.append(group._asdict() | {"types": list(group.types), "buffers": buffers, "change": change})
    fields = {f.name: getattr(profile, f.name) for f in dataclasses.fields(profile)}
    return fields | {
        "summary": headline(profile),
        "peak_bytes": profile.peak_bytes,
        "peak_step": profile.peak_step,
        "unused_bytes": profile.unused_bytes,
        "changes": [c._asdict() for c in profile.changes],
        "at_peak": groups,
        "timeline": profile.timeline.tolist(),
        "buffers": [b.to_dict() for b in profile.buffers],
        "steps": [s._asdict() | {"loop": str(s.loop) if s.loop else None} for s in profile.steps],
    }


def _key(buffer: Buffer) -> tuple[Any, ...]:
    """Key without the size: if a part of a buffer is reused at the peak, its group has a smaller copy."""
    return buffer.name, buffer.type, buffer.start, buffer.allocation, buffer.offset


# -- two profiles ----------------------------------------------------------------------------------------------------


def compare(old_profile: AdvisedTimeline, new_profile: AdvisedTimeline) -> Table:
    """Two profiles side by side: the peak, XLA's figures, and kinds and owners at the peak with their difference.

    Args:
        old_profile: of the unchanged program.
        new_profile: of the changed program.
    """
    rows = [_difference("peak", old_profile.peak_bytes, new_profile.peak_bytes, style="bold")]
    for parts in (_xla_parts, _kind_parts, _owner_parts):
        old, new = parts(old_profile), parts(new_profile)
        names = sorted({**old, **new}, key=lambda name: -max(old.get(name, 0), new.get(name, 0)))
        if parts is _owner_parts:  # those that differ most
            names = [name for name in names if old.get(name) != new.get(name)]
            names = sorted(names, key=lambda name: -abs(new.get(name, 0) - old.get(name, 0)))[:_MAX_ROWS]
        rows += [_difference(name, old.get(name, 0), new.get(name, 0)) for name in names]

    names = old_profile.name if old_profile.name == new_profile.name else f"{old_profile.name} and {new_profile.name}"
    sizes = f"{format_bytes(old_profile.peak_bytes)} before, {format_bytes(new_profile.peak_bytes)} after"
    columns = [Column("bytes"), *(Column(name, "right") for name in ("before", "after", "difference", "relative"))]
    return Table(f"Peak of {names}: {sizes}", columns, rows)


def _xla_parts(profile: AdvisedTimeline) -> dict[str, int]:
    parts = {
        "  arguments": profile.argument_bytes,
        "  outputs beside them": profile.output_bytes - profile.alias_bytes,
        "  temporaries": profile.temp_bytes,
        "  constants (not in the peak)": profile.constant_bytes,
    }
    return {name: n for name, n in parts.items() if n}


def _kind_parts(profile: AdvisedTimeline) -> dict[str, int]:
    return {f"at the peak, {name}": n for name, n in _parts_of_peak(profile).items()}


def _owner_parts(profile: AdvisedTimeline) -> dict[str, int]:
    return sums((f"  {row.kind}, {row.owner}", row.num_bytes) for row in rows_at_peak(profile))


def _difference(name: str, old_bytes: int, new_bytes: int, style: str = "") -> list[Cell]:
    change = new_bytes - old_bytes
    sign = "-" if change < 0 else "+"
    relative = f"{100 * change / old_bytes:+.0f}%" if old_bytes else "new" if new_bytes else ""
    color = "" if not change else "green" if change < 0 else "red"
    return [
        Cell(name, style=style),
        Cell(format_bytes(old_bytes), hint=f"{old_bytes:,} B"),
        Cell(format_bytes(new_bytes), hint=f"{new_bytes:,} B"),
        Cell(f"{sign}{format_bytes(abs(change))}" if change else "0 B", color, style=style),
        Cell(relative, color),
    ]
