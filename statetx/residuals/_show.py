"""Output formats of `Residuals`: lines, a text table, rich, HTML, a plot."""

from __future__ import annotations

import html as html_
from typing import TYPE_CHECKING, Any

from .._text import format_bytes, format_flops, format_table, short_path

if TYPE_CHECKING:
    from .table import Residual, Residuals

_REASONS = {"policy": "kept by policy", "input": "input of a rematerialised function"}
_REASONS |= {"not rematerialised": "not rematerialised", "not read": "not read"}

# One colour for each reason, for rich, and for HTML and plots; a palette for the colour-blind (Okabe and Ito).
_RICH = {"policy": "green", "input": "cyan", "not rematerialised": "yellow", "not read": "red"}
_HEX = {"policy": "#009e73", "input": "#56b4e9", "not rematerialised": "#e69f00", "not read": "#d55e00"}


def _description(row: Residual) -> str:
    """Path and names of a value, else its primitive, else its origin."""
    words = [row.path] if row.path else []
    words += map(repr, row.names)
    return ", ".join(words) or row.primitive or row.origin


def _reasons(row: Residual) -> str:
    """At most two of the reasons, and the memory."""
    text = "; ".join(row.why[:2])
    text += f"; {len(row.why) - 2} more" if len(row.why) > 2 else ""
    return f"{text}, in {row.memory}" if row.memory else text


def _location(row: Residual) -> str:
    """The line of the source, or the type of a state."""
    if row.source:
        return f"{short_path(row.source)} ({row.function})"
    return row.kind or (row.origin if row.path else "")


def title(residuals: Residuals) -> str:
    other_bytes = residuals.total_bytes - residuals.intermediate_bytes
    plural = "s" if len(residuals) != 1 else ""
    start = f"{residuals.name} keeps {len(residuals)} value{plural}, {format_bytes(residuals.total_bytes)}"
    return f"{start}: {format_bytes(residuals.intermediate_bytes)} intermediate, {format_bytes(other_bytes)} inputs and constants"


# -- lines -----------------------------------------------------------------------------------------------------


def _counted(row: Residual) -> str:
    return f"{row.times} x {row.type}" if row.times > 1 else row.type


def _from(row: Residual) -> str:
    if row.origin == "argument":
        return f"from the argument {row.path}"
    if row.origin == "state":
        return f"from the state {row.path} ({row.kind})"
    if not row.primitive:
        return f"from a {row.origin}"
    description = f"named {', '.join(map(repr, row.names))}" if row.names else f"output of {row.primitive}"
    location = f" from {row.source} ({row.function})" if row.source else ""
    return f"{description}{location}" + (f", in {row.memory}" if row.memory else "")


def line(row: Residual) -> str:
    return f"{_counted(row)}  {format_bytes(row.nbytes)}  {_from(row)}"


def lines(residuals: Residuals) -> str:
    cells = [(_counted(row), format_bytes(row.nbytes), _from(row)) for row in residuals]
    widths = [max((len(c[i]) for c in cells), default=0) for i in range(2)]
    rows = [f"{a:<{widths[0]}}  {b:>{widths[1]}}  {c}" for a, b, c in cells]
    total, new = format_bytes(residuals.total_bytes), format_bytes(residuals.intermediate_bytes)
    return "\n".join([*rows, f"{total} in {len(residuals)} values, {new} of them intermediate"])


# -- tables ----------------------------------------------------------------------------------------------------

_COLUMNS = {
    "value": lambda row: row.type,
    "times": lambda row: str(row.times) if row.times > 1 else "",
    "bytes": lambda row: format_bytes(row.nbytes),
    "what": _description,
    "where": _location,
    "module": lambda row: row.module,
    "FLOPs": lambda row: format_flops(row.flops) if row.origin == "intermediate" else "",
    "kept because": _reasons,
}
_RIGHT = ("times", "bytes", "FLOPs")


def _table(residuals: Residuals) -> tuple[list[str], list[list[str]]]:
    """Columns and cells, without empty columns."""
    cells = {name: [fill(row) for row in residuals] for name, fill in _COLUMNS.items()}
    columns = [name for name in cells if any(cells[name])]
    return columns, [list(row) for row in zip(*(cells[name] for name in columns), strict=True)]


def text(residuals: Residuals) -> str:
    if not len(residuals):
        return f"{residuals.name} keeps nothing"
    columns, rows = _table(residuals)
    return f"{title(residuals)}\n{format_table(columns, rows, right=_RIGHT)}"


def rich_table(residuals: Residuals, width: int) -> Any:
    """A ``rich.table.Table``. If the columns do not fit, the less important ones go below each value."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title(residuals), box=box.SIMPLE_HEAD, title_justify="left", title_style="bold", pad_edge=False)
    columns, rows = _table(residuals)
    styles = {"bytes": "bold", "where": "dim", "FLOPs": "dim"}

    needed = sum(max(map(len, column)) + 2 for column in zip(columns, *rows, strict=True))
    main_columns = columns if needed <= width else [c for c in columns if c in ("value", "times", "bytes", "what")]
    other_columns = [c for c in columns if c not in main_columns and c != "FLOPs"]
    for name in main_columns:
        table.add_column(name, justify="right" if name in _RIGHT else "left", no_wrap=name != "what", overflow="fold")

    for row, cells in zip(residuals, rows, strict=True):
        cell_styles = {**styles, "what": "bold magenta" if row.names else "", "kept because": _RICH[row.reason]}
        texts = {c: Text(cell, style=cell_styles.get(c, "")) for c, cell in zip(columns, cells, strict=True)}
        other_cells = [texts[c] for c in other_columns if texts[c].plain and (c != "module" or not row.path)]
        if other_cells:
            texts["what"] = Text("\n").join([texts["what"], Text("  ").join(other_cells)])
        table.add_row(*(texts[name] for name in main_columns))
    return table


def html(residuals: Residuals) -> str:
    columns, rows = _table(residuals)
    cell = "padding:3px 10px;border:0;white-space:nowrap;vertical-align:top"
    head = "".join(
        f'<th style="{cell};text-align:{_align(name)};border-bottom:1px solid currentColor">{name}</th>'
        for name in columns
    )

    largest = max((row.nbytes for row in residuals), default=1)
    body = []
    for row, cells in zip(residuals, rows, strict=True):
        share = 100 * row.nbytes / max(largest, 1)
        tds = []
        for name, content in zip(columns, cells, strict=True):
            style = f"{cell};text-align:{_align(name)}"
            if name == "bytes":  # a bar, relative to the largest value
                style += (
                    f";background:linear-gradient(to right,{_HEX[row.reason]}66 {share:.1f}%,transparent {share:.1f}%)"
                )
            elif name == "kept because":
                style += f";border-left:4px solid {_HEX[row.reason]}"
            elif name in ("where", "FLOPs"):
                style += ";opacity:0.7"
            content = html_.escape(content)
            hint = f' title="{html_.escape(row.source)}"' if name == "where" and row.source else ""
            code = name in ("value", "what", "where", "module")
            tds.append(f'<td style="{style}"{hint}>{f"<code>{content}</code>" if code and content else content}</td>')
        body.append(f"<tr>{''.join(tds)}</tr>")
    return (
        f'<div style="overflow-x:auto"><p style="margin:4px 0"><b>{html_.escape(title(residuals))}</b></p>'
        f'<table style="border-collapse:collapse;font-size:90%"><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(body)}</tbody></table></div>"
    )


def _align(column: str) -> str:
    return "right" if column in _RIGHT else "left"


# -- plot ------------------------------------------------------------------------------------------------------


def plot(residuals: Residuals, ax: Any, num: int) -> Any:
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    rows = list(residuals.largest(num))
    bars = [(f"{_description(r)}  {_counted(r)}", r.nbytes, _HEX[r.reason]) for r in rows]
    num_remaining = len(residuals) - len(rows)
    if num_remaining:
        size = residuals.total_bytes - sum(r.nbytes for r in rows)
        bars.append((f"{num_remaining} more", size, "#999999"))

    if ax is None:
        _, ax = pyplot.subplots(figsize=(8, 1.2 + 0.28 * len(bars)), layout="constrained")
    labels, sizes, colours = zip(*bars, strict=True) if bars else ((), (), ())
    positions = range(len(bars))
    ax.barh(positions, sizes, color=colours, height=0.75)
    ax.set_yticks(positions, labels, fontsize=8, family="monospace")
    ax.invert_yaxis()
    for y, size in zip(positions, sizes, strict=True):
        ax.annotate(format_bytes(size), (size, y), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8)

    ax.margins(x=0.15, y=0.01)
    ax.set_xticks([])
    ax.spines[:].set_visible(False)
    ax.tick_params(axis="y", length=0)

    totals = residuals.by("reason")
    patches = [Patch(color=_HEX[key], label=f"{_REASONS[key]}: {format_bytes(n)}") for key, n in totals.items()]
    if patches:
        ax.legend(handles=patches, loc="lower right", fontsize=8, frameon=False)
    ax.set_title(title(residuals).replace(": ", "\n", 1), fontsize=9, loc="left")
    return ax
