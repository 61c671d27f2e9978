"""Renderer of all reports: as text with ``print``, in colors with ``rich.print``, as HTML in notebooks or
pages.

Text and colors are the same lines of pieces with styles; rich only paints them. HTML has the same cells.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.resources
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from typing import Any, Literal, NamedTuple

from ._errors import printable
from ._text import text_width

HEX = {"green": "#009e73", "cyan": "#56b4e9", "yellow": "#e69f00", "red": "#d55e00"}
"""The colors in HTML and plots, by their names in rich: a palette for the color-blind (Okabe and Ito)."""

# The words of a style, which are rich's, in HTML.
_CSS = {"bold": "font-weight:bold", "dim": "opacity:0.65", "italic": "font-style:italic", "magenta": ""}
_CSS |= {"reverse": "background:#ffd54f;color:#000;border-radius:3px;padding:0 2px", "yellow": ""}
_CSS |= {"cyan": "color:#0072b2", "green": "color:#009e73", "red": "color:#d55e00"}

_LEAST_WIDTH = 12  # of a column of texts that are shortened
_CELL_WIDTH = 80  # in HTML, where the pointer shows the whole text
_UNLIMITED = 10**6  # columns of a paragraph that is not printed to a terminal


# -- lines -----------------------------------------------------------------------------------------------------------


class Piece(NamedTuple):
    """A part of a line. Its style is in words of rich that `_CSS` has."""

    text: str
    style: str = ""

    def html(self) -> str:
        text = escape(self.text)
        return f'<span style="{_css(self.style)}">{text}</span>' if self.style else text


def _css(style: str) -> str:
    return ";".join(filter(None, (_CSS[word] for word in style.split())))


Line = list[Piece]


def folded(line: Line, width: int, indent: int = 4) -> Iterator[Line]:
    """Break a line at blanks; what follows is indented by `indent` more. A word longer than a line is broken, too."""
    words: list[list[Piece]] = []
    for piece in line:
        for text in re.findall(r" *[^ ]+| +", piece.text):
            if words and text[0] != " ":
                words[-1].append(piece._replace(text=text))
            else:
                words.append([piece._replace(text=text)])
    start = "".join(piece.text for piece in line)
    margin = min(len(start) - len(start.lstrip()) + indent, width // 2)

    out: list[Piece] = []  # the line so far, and its columns
    used = 0
    for word in words:
        if used > margin - indent and used + sum(len(piece.text) for piece in word) > width:
            yield out
            out, used = [Piece(" " * margin)], margin
            word[0] = word[0]._replace(text=word[0].text.lstrip())
        for text, style in word:
            while used + len(text) > width:
                yield [*out, Piece(text[: width - used], style)]
                text = text[width - used :]
                out, used = [Piece(" " * margin)], margin
            out.append(Piece(text, style))
            used += len(text)
    yield out


class Printed:
    """Prints as text with ``print``, in colors with ``rich.print``, as HTML in a notebook."""

    def _lines(self, width: int, prose: int) -> Iterable[Line]:
        """Lines of at most `width` columns; of `prose` in paragraphs."""
        raise NotImplementedError

    def _html(self) -> str:
        raise NotImplementedError

    def __str__(self) -> str:
        # In a file, prose has any length, since readers wrap it themselves.
        width, is_terminal = text_width(), sys.__stdout__ is not None and sys.__stdout__.isatty()
        return plain(self._lines(width, width if is_terminal else _UNLIMITED))

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        from rich.text import Text

        for line in self._lines(options.max_width, options.max_width):
            yield Text.assemble(*line, no_wrap=True, overflow="crop")

    def _repr_html_(self) -> str:
        return f'<div class="statetx"><style>{_NOTEBOOK}</style>{self._html()}</div>'


def plain(lines: Iterable[Line]) -> str:
    return "\n".join("".join(piece.text for piece in line).rstrip() for line in lines)


# -- tables ----------------------------------------------------------------------------------------------------------


class Column(NamedTuple):
    """A column: its header, and the look of its cells.

    Attributes:
        code: whether they are code, for HTML.
        rank: a table wider than the terminal loses its columns of the highest rank first, columns of rank 0 never.
        below: whether a lost column's cells go below their row.
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
        share: length of a bar below the text in HTML, from 0 to 1.
        hint: shown in HTML under the pointer.
        style: in place of the column's.
    """

    text: str
    color: str = ""
    share: float | None = None
    hint: str = ""
    style: str = ""


@dataclasses.dataclass(frozen=True, repr=False)
class Table(Printed):
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

    def without_empty_columns(self) -> Table:
        """A column that no row fills, such as the module in a program without states, would only take width."""
        filled = [i for i, column in enumerate(zip(*self.rows, strict=True)) if any(cell.text for cell in column)]
        rows = [[row[i] for i in filled] for row in self.rows]
        return dataclasses.replace(self, columns=[self.columns[i] for i in filled], rows=rows)

    def _lines(self, width: int, prose: int) -> Iterator[Line]:
        if self.title:
            yield from folded([Piece(self.title, "bold")], prose, 0)
        if self.rows:
            yield from self._row_lines(width)
        for heading, text in self.notes:
            yield from folded([Piece(heading, "yellow"), Piece(f" {text}" if heading and text else text)], prose)

    def _row_lines(self, width: int) -> Iterator[Line]:
        """Drop the columns of the highest ranks until it fits; then shorten the widest text to its end."""
        texts = [[c.name for c in self.columns], *([cell.text for cell in row] for row in self.rows)]
        widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
        columns = list(range(len(widths)))
        excess = lambda: sum(widths[i] + 2 for i in columns) - 2 - width
        while excess() > 0 and (rank := max(self.columns[i].rank for i in columns)):
            columns = [i for i in columns if self.columns[i].rank < rank]
        lefts = [i for i in columns if self.columns[i].align == "left"]
        if lefts and excess() > 0:
            widest = max(lefts, key=lambda i: widths[i])
            widths[widest] = min(max(widths[widest] - excess(), _LEAST_WIDTH), widths[widest])

        def cell(i: int, text: str, style: str) -> Piece:
            text = text if len(text) <= widths[i] else f"…{text[1 - widths[i] :]}"
            return Piece(text.rjust(widths[i]) if self.columns[i].align == "right" else text.ljust(widths[i]), style)

        yield _spaced(cell(i, self.columns[i].name, "bold") for i in columns)
        yield _spaced(Piece("-" * widths[i], "dim") for i in columns)
        below = [i for i, column in enumerate(self.columns) if column.below and i not in columns]
        for row in self.rows:
            yield _spaced(
                cell(i, row[i].text, f"{row[i].style or self.columns[i].style} {row[i].color}".strip()) for i in columns
            )
            if lost := "  ".join(row[i].text for i in below if row[i].text):
                yield from folded([Piece(f"    {lost}", "dim")], width, 0)

    def _html(self) -> str:
        head = "".join(f"<th{_class(c)}>{escape(c.name)}</th>" for c in self.columns)
        body = "".join(f"<tr>{''.join(map(_td, self.columns, row))}</tr>" for row in self.rows)
        table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>" if self.rows else ""
        notes = "".join(f"<p><b>{escape(heading)}</b> {escape(text)}</p>" for heading, text in self.notes)
        title = f"<p><b>{escape(self.title)}</b></p>" if self.title else ""
        return f"{title}{table}{notes}"


def _spaced(pieces: Iterable[Piece]) -> Line:
    return [part for piece in pieces for part in (piece, Piece("  "))][:-1]


def _class(column: Column) -> str:
    return ' class="number"' if column.align == "right" else ""


def _td(column: Column, cell: Cell) -> str:
    style, bar, text, hint = _css(cell.style or column.style), "", cell.text, cell.hint
    if len(text) > _CELL_WIDTH:  # the end of a path tells more than its middle
        text, hint = f"{text[: _CELL_WIDTH // 2]}…{text[1 - _CELL_WIDTH // 2 :]}", hint or text
    if cell.share is not None:
        width, color = f"{100 * min(cell.share, 1):.1f}%", HEX[cell.color or "cyan"]
        bar = f'<span class="share"><i style="width:{width};background:{color}"></i></span>'
    elif cell.color:
        style = f"{style};border-left:4px solid {HEX[cell.color]}".strip(";")
    attributes = f' style="{style}"' * bool(style) + f' title="{escape(hint)}"' * bool(hint)
    content = f"<code>{escape(text)}</code>" if column.code and text else escape(text)
    return f'<td{_class(column)} data-name="{escape(column.name)}"{attributes}>{content}{bar}</td>'


class Tabular(Printed):
    """Prints as a table: as text with ``print``, in colors with ``rich.print``, as HTML in a notebook."""

    def _table(self) -> Table:
        raise NotImplementedError

    def _lines(self, width: int, prose: int) -> Iterable[Line]:
        return self._table()._lines(width, prose)

    def _html(self) -> str:
        return self._table()._html()

    def __repr__(self) -> str:
        return str(self)


# -- pages -----------------------------------------------------------------------------------------------------------

# In a notebook, whose own colors and fonts stay. A page has a file of styles.
_NOTEBOOK = (
    ".statetx{overflow-x:auto}.statetx p{margin:4px 0}.statetx table{border-collapse:collapse;font-size:90%}"
    ".statetx th,.statetx td{padding:3px 10px;border:0;white-space:nowrap;vertical-align:top;text-align:left}"
    ".statetx th{border-bottom:1px solid currentColor}.statetx .number{text-align:right}"
    ".statetx .share,.statetx .share i{display:block;height:3px}.statetx pre{margin:4px 0;line-height:1.45}"
    ".statetx .sides{display:flex;flex-wrap:wrap;gap:0 32px}"
)


def page(title: str, main: str, *, header: str = "", scripts: str = "") -> str:
    """A page without external resources, in the colors of the system, for screens of any width.

    Args:
        title: plain text.
        main: HTML, as the header and the scripts; without scripts the page forbids any.
    """
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    parts = {
        "policy": f"{policy}; script-src 'unsafe-inline'" if scripts else policy,
        "title": escape(title),
        "style": resource("statetx", "page.css"),
        "header": header,
        "main": main,
        "scripts": scripts,
    }
    # In one pass: a name that looks like a placeholder is not replaced. A lone surrogate in a name cannot be written as
    # UTF-8.
    text = re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], resource("statetx", "page.html"))
    return text.encode("utf-8", "replace").decode("utf-8")


@functools.cache
def resource(package: str, name: str) -> str:
    return importlib.resources.files(package).joinpath(name).read_text(encoding="utf-8")
