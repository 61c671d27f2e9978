"""Output formats of `Residuals`: lines and a table."""

from __future__ import annotations

import collections
from collections.abc import Iterable
from typing import TYPE_CHECKING

from .._tables import Cell, Column, Table
from .._text import counted, format_bytes, format_flops, short_dtype, short_path

if TYPE_CHECKING:
    from .table import Residual, Residuals

_COLORS = {"policy": "green", "input": "cyan", "not rematerialized": "yellow", "not read": "red"}


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
    # A policy can change intermediate values only, so they are told apart from inputs and constants.
    other_bytes = residuals.total_bytes - residuals.intermediate_bytes
    start = f"{residuals.name} keeps {counted(len(residuals), 'value')}, {format_bytes(residuals.total_bytes)}"
    return f"{start}: {format_bytes(residuals.intermediate_bytes)} intermediate, {format_bytes(other_bytes)} inputs and constants"


def see_profile(fun: str = "fun") -> tuple[str, str]:
    """The note at the end of a table: the same owners and lines in the compiled program."""
    return "More:", f"statetx.memory_profile({fun}, ...) shows what is alive at the peak of the compiled program."


# -- lines -----------------------------------------------------------------------------------------------------


def _counted(row: Residual) -> str:
    return f"{row.times} x {_type(row)}" if row.times > 1 else _type(row)


def _type(row: Residual) -> str:
    """The type of what is stored, and the dtype that it stands for."""
    return f"{row.type} for {short_dtype(row.dtype)}" if row.stored_as else row.type


def in_fewer_bits(residuals: Iterable[Residual], num: int = 3) -> str:
    """The types of values that are stored in fewer bits, those of most bytes first; empty if there are none."""
    counts: collections.Counter[str] = collections.Counter()
    for row in sorted(residuals, key=lambda row: -row.nbytes):
        if row.stored_as:
            counts[_type(row)] += row.times
    shown = [f"{n} x {type_}" if n > 1 else type_ for type_, n in counts.items()]
    return ", ".join([*shown[:num], *([f"and {len(shown) - num} more types"] if len(shown) > num else [])])


def _from(row: Residual) -> str:
    if row.origin == "argument" or (row.path and row.stored_as):
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
    return "\n".join([*rows, f"{total} in {counted(len(residuals), 'value')}, {new} of them intermediate"])


# -- table -----------------------------------------------------------------------------------------------------

_COLUMNS = (
    Column("value", code=True),
    Column("times", "right"),
    Column("bytes", "right", "bold"),
    Column("what", code=True),
    Column("where", style="dim", code=True, rank=1, below=True),
    Column("module", code=True, rank=1, below=True),
    Column("FLOPs", "right", "dim", rank=1),
    Column("kept because", rank=1, below=True),
)


def _cells(row: Residual, largest: int) -> tuple[Cell, ...]:
    """One for each of `_COLUMNS`."""
    return (
        Cell(_type(row)),
        Cell(str(row.times) if row.times > 1 else ""),
        Cell(format_bytes(row.nbytes), _COLORS[row.reason], share=row.nbytes / max(largest, 1)),
        Cell(_description(row), style="bold magenta" if row.names else ""),
        Cell(_location(row), hint=row.source),
        Cell(row.module),
        Cell(format_flops(row.flops) if row.origin == "intermediate" else ""),
        Cell(_reasons(row), _COLORS[row.reason]),
    )


def table(residuals: Residuals) -> Table:
    if not len(residuals):
        return Table(f"{residuals.name} keeps nothing", [], [])
    largest = max(row.nbytes for row in residuals)
    cells = [_cells(row, largest) for row in residuals]
    return Table(title(residuals), _COLUMNS, cells, [see_profile()]).without_empty_columns()
