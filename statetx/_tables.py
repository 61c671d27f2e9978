"""Tables of reports: printed as text, by rich, and as HTML in a notebook."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from html import escape
from typing import Any, Literal, NamedTuple

from ._errors import printable
from ._text import filled, format_table, text_width

HEX = {"green": "#009e73", "cyan": "#56b4e9", "yellow": "#e69f00", "red": "#d55e00"}
"""The colors in HTML and plots, by their names in rich: a palette for the color-blind (Okabe and Ito)."""

_CSS = {"": "", "bold": ";font-weight:bold", "dim": ";opacity:0.7", "bold magenta": ";font-weight:bold"}


_LEAST_WIDTH = 12  # of a column of texts that are shortened


class Column(NamedTuple):
    """A column: its header, and the look of its cells.

    Attributes:
        code: whether they are code, for HTML.
        rank: a table wider than the terminal loses its columns of the highest rank first, those of rank 0 never.
        below: whether a lost column's cells go below those of the last column on the left.
    """

    name: str
    align: Literal["left", "right"] = "left"
    style: str = ""
    code: bool = False
    rank: int = 0
    below: bool = False


class Cell(NamedTuple):
    """A cell.

    Attributes:
        color: of the text in rich; in HTML of the bar, else of a stripe at the left.
        share: length of a bar behind the text in HTML, from 0 to 1.
        hint: shown in HTML under the pointer.
        style: in place of the column's; of rich, one of those in `_CSS`.
    """

    text: str
    color: str = ""
    share: float | None = None
    hint: str = ""
    style: str = ""


@dataclasses.dataclass(frozen=True)
class Table:
    """A table; below it notes, each a heading and a text. If there are no rows, only the title is printed."""

    title: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]
    notes: Sequence[tuple[str, str]] = ()

    def __post_init__(self) -> None:
        rows = [
            [cell._replace(text=printable(cell.text), hint=printable(cell.hint)) for cell in row] for row in self.rows
        ]
        notes = [(printable(heading), printable(text)) for heading, text in self.notes]
        for name, value in {"title": printable(self.title), "rows": rows, "notes": notes}.items():
            object.__setattr__(self, name, value)

    def text(self) -> str:
        header, *rows = self._narrowed(text_width())._texts()
        right = [c.name for c in self.columns if c.align == "right"]
        notes = [filled(" ".join(filter(None, note)), "    ") for note in self.notes]
        return "\n".join([filled(self.title), *([format_table(header, rows, right)] if rows else []), *notes])

    def _narrowed(self, width: int) -> Table:
        """Without the columns of the highest ranks until it fits; then with the widest text shortened to its end."""
        widths = [max(map(len, texts)) for texts in zip(*self._texts(), strict=True)]
        shown = list(range(len(widths)))
        excess = lambda: sum(widths[i] + 2 for i in shown) - 2 - width  # noqa: E731
        while excess() > 0 and (rank := max(self.columns[i].rank for i in shown)):
            shown = [i for i in shown if self.columns[i].rank < rank]

        lefts = [i for i in shown if self.columns[i].align == "left"]
        widest = max(lefts, key=lambda i: widths[i], default=None)
        length = 0 if widest is None else max(widths[widest] - excess(), _LEAST_WIDTH)
        short = lambda i, x: x._replace(text=f"…{x.text[1 - length :]}") if i == widest and len(x.text) > length else x  # noqa: E731
        rows = [[short(i, row[i]) for i in shown] for row in self.rows]
        return dataclasses.replace(self, columns=[self.columns[i] for i in shown], rows=rows)

    def _texts(self) -> list[list[str]]:
        """The header and the rows."""
        return [[c.name for c in self.columns], *([cell.text for cell in row] for row in self.rows)]

    def rich(self, width: int) -> Any:
        from rich.box import SIMPLE_HEAD
        from rich.console import Group
        from rich.table import Table as RichTable
        from rich.text import Text

        notes = [Text.assemble((f"{heading} ", "yellow"), text) for heading, text in self.notes]
        if not self.rows:
            return Group(Text(self.title, style="bold"), *notes)

        shown = self._fitting(width)
        below = [i for i, column in enumerate(self.columns) if column.below and i not in shown]
        last_left = max(i for i in shown if self.columns[i].align == "left")

        table = RichTable(
            title=Text(self.title), box=SIMPLE_HEAD, title_justify="left", title_style="bold", pad_edge=False
        )
        for column in (self.columns[i] for i in shown):  # text may be folded, numbers not
            table.add_column(column.name, justify=column.align, no_wrap=column.align == "right", overflow="fold")
        for row in self.rows:
            texts = [Text(x.text, f"{x.style or c.style} {x.color}") for c, x in zip(self.columns, row, strict=True)]
            if lost := [texts[i] for i in below if row[i].text]:
                texts[last_left] = Text("\n").join([texts[last_left], Text("  ").join(lost)])
            table.add_row(*(texts[i] for i in shown))
        return Group(table, *notes)

    def _fitting(self, width: int) -> list[int]:
        """The columns that fit into `width`. Text that has to stay counts as 30 wide at most: it can be folded."""
        padding = 3  # of SIMPLE_HEAD
        widths = [max(map(len, texts)) + padding for texts in zip(*self._texts(), strict=True)]
        widths = [
            min(n, 30) if c.align == "left" and not c.rank else n for n, c in zip(widths, self.columns, strict=True)
        ]
        shown = list(range(len(widths)))
        while sum(widths[i] for i in shown) > width and (rank := max(self.columns[i].rank for i in shown)):
            shown = [i for i in shown if self.columns[i].rank < rank]
        return shown

    def html(self) -> str:
        head = "".join(
            f'<th style="{_css(c)};border-bottom:1px solid currentColor">{escape(c.name)}</th>' for c in self.columns
        )
        body = "".join(f"<tr>{''.join(map(_td, self.columns, row))}</tr>" for row in self.rows)
        table = f'<table style="border-collapse:collapse;font-size:90%"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
        notes = "".join(_paragraph(heading, f" {text}") for heading, text in self.notes)
        return f'<div style="overflow-x:auto">{_paragraph(self.title)}{table if self.rows else ""}{notes}</div>'


def _paragraph(heading: str, text: str = "") -> str:
    return f'<p style="margin:4px 0"><b>{escape(heading)}</b>{escape(text)}</p>'


def _css(column: Column) -> str:
    return f"padding:3px 10px;border:0;white-space:nowrap;vertical-align:top;text-align:{column.align}"


def _td(column: Column, cell: Cell) -> str:
    style = _css(column) + _CSS[cell.style or column.style]
    if cell.share is not None:
        end, color = f"{100 * cell.share:.1f}%", HEX[cell.color or "cyan"]
        style += f";background:linear-gradient(to right,{color}66 {end},transparent {end})"
    elif cell.color:
        style += f";border-left:4px solid {HEX[cell.color]}"
    hint = f' title="{escape(cell.hint)}"' if cell.hint else ""
    content = f"<code>{escape(cell.text)}</code>" if column.code and cell.text else escape(cell.text)
    return f'<td style="{style}"{hint}>{content}</td>'


class Tabular:
    """Prints as a table: as text with ``print``, in colors with ``rich.print``, as HTML in a notebook."""

    def _table(self) -> Table:
        raise NotImplementedError

    def __str__(self) -> str:
        return self._table().text()

    __repr__ = __str__

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        yield self._table().rich(options.max_width)

    def _repr_html_(self) -> str:
        return self._table().html()
