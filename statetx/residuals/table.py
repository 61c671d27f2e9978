"""`Residuals`: the values that a function saves for its backward pass, as lines or a table."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, overload

from .._tables import Cell, Column, Table, Tabular
from .._text import counted, format_bytes, format_flops, short_dtype, short_path, type_str
from .._typing import public


@dataclasses.dataclass(frozen=True)
class Residual:
    """One value that is saved between the forward and the backward pass.

    Attributes:
        shape, dtype: of the value; in a loop, of its value in one step.
        times: the number of such values: the product of the lengths of the loops around it.
        nbytes: bytes of all of them together.
        origin: "argument", "state", "constant", "literal" or "intermediate".
        path: the argument as written in Python (``params['w']``), or the path of the state.
        kind: a state's type.
        names: its names from ``checkpoint_name``.
        primitive: the operation that computes it.
        source: ``file:line`` of the user's code that computes it, `function` the function of this line.
        module: the modules of the states that it was last computed from, separated by commas: the states that the
            operation reads, or else its latest operand's (as in ``policies.path``). For a state, the state's module.
        flops: floating-point operations to compute it from the inputs and the other residuals.
        why: the reasons for saving it: "policy of f", "input of f" (of a rematerialized function f), "not
            rematerialized" (an operation outside such functions reads it), "not read" (the pullback holds it unused).
        memory: the memory that it is offloaded to; "" if it stays where it was computed.
        stored_as: the format that it is stored in, in fewer bits (`Policy.stored_as`); "" if unchanged. Then `nbytes`
            are the stored bytes, and the value is no argument or state but a copy of it.
    """

    shape: tuple[int, ...]
    dtype: str
    times: int
    nbytes: int
    origin: str
    path: str = ""
    kind: str = ""
    names: tuple[str, ...] = ()
    primitive: str = ""
    source: str = ""
    function: str = ""
    module: str = ""
    flops: int = 0
    why: tuple[str, ...] = ()
    memory: str = ""
    stored_as: str = ""

    @property
    def reason(self) -> str:
        """The decisive reason in short: removing the other reasons would not free the value."""
        for word in ("not rematerialized", "policy", "input"):
            if any(text.startswith(word) for text in self.why):
                return word
        return "not read"

    @property
    def type(self) -> str:
        """Dtype and shape in short: ``f32[3,4]``; with the format in place of the dtype if it is stored so:
        ``bits[3,4]``.
        """
        text = type_str(self)
        return f"{self.stored_as}{text[text.index('[') :]}" if self.stored_as else text

    def __str__(self) -> str:
        return line(self)


@public
class Residuals(Tabular, Sequence[Residual]):
    """The residuals of a function: a sequence of `Residual`, in the order of the forward pass.

    Prints as a table: as plain text with ``print``, in colors with ``rich.print``, as HTML in a notebook.

    Attributes:
        name: the function's name.
        rows: the residuals.
    """

    def __init__(self, name: str, rows: Sequence[Residual]):
        self.name = name
        self.rows = tuple(rows)

    @overload
    def __getitem__(self, index: int) -> Residual: ...
    @overload
    def __getitem__(self, index: slice) -> Residuals: ...
    def __getitem__(self, index: Any) -> Any:
        return Residuals(self.name, self.rows[index]) if isinstance(index, slice) else self.rows[index]

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Residual]:
        return iter(self.rows)

    @property
    def total_bytes(self) -> int:
        """Bytes of all residuals."""
        return sum(row.nbytes for row in self.rows)

    @property
    def intermediate_bytes(self) -> int:
        """Bytes of the residuals other than arguments, states and constants: the part that a policy can change."""
        return self.by("origin").get("intermediate", 0)

    def by(self, field: str) -> dict[str, int]:
        """Bytes by the values of a field or property of `Residual`: ``by("module")``, ``by("reason")``;
        largest first.
        """
        totals: dict[str, int] = {}
        for row in self.rows:
            key = getattr(row, field)
            key = key if isinstance(key, str) else ", ".join(map(str, key)) if isinstance(key, tuple) else str(key)
            totals[key] = totals.get(key, 0) + row.nbytes
        return dict(sorted(totals.items(), key=lambda item: -item[1]))

    def largest(self, num: int = 10) -> Residuals:
        """The `num` residuals of most bytes, largest first."""
        return Residuals(self.name, sorted(self.rows, key=lambda row: -row.nbytes)[:num])

    def to_dict(self) -> dict[str, Any]:
        """Convert to dicts, lists, strings and numbers, for ``json.dump``."""
        rows = [{k: list(v) if isinstance(v, tuple) else v for k, v in vars(row).items()} for row in self.rows]
        totals = {"total_bytes": self.total_bytes, "intermediate_bytes": self.intermediate_bytes}
        return {"function": self.name, **totals, "residuals": rows}

    def _table(self) -> Table:
        return table(self)

    def __repr__(self) -> str:
        return f"Residuals({title(self)})"


# -- forms -----------------------------------------------------------------------------------------------------------

_COLORS = {"policy": "green", "input": "cyan", "not rematerialized": "yellow", "not read": "red"}


def _description(row: Residual) -> str:
    """Path and names of a value, else its primitive, else its origin."""
    words = [row.path] if row.path else []
    words += map(repr, row.names)
    return ", ".join(words) or row.primitive or row.origin


def _reasons(row: Residual) -> str:
    """Reasons, two at most, and the memory."""
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
    return (
        f"{start}: {format_bytes(residuals.intermediate_bytes)} intermediate, {format_bytes(other_bytes)} inputs and "
        f"constants"
    )


def see_profile(fun: str = "fun") -> tuple[str, str]:
    """The note at the end of a table: the same owners and lines in the compiled program."""
    return "More:", f"statetx.memory_profile({fun}, ...) shows what is alive at the peak of the compiled program."


# -- lines -----------------------------------------------------------------------------------------------------


def _counted(row: Residual) -> str:
    return f"{row.times} x {_type(row)}" if row.times > 1 else _type(row)


def _type(row: Residual) -> str:
    """The stored type, and the dtype of the value."""
    return f"{row.type} for {short_dtype(row.dtype)}" if row.stored_as else row.type


def in_fewer_bits(residuals: Iterable[Residual]) -> str:
    """The types of values that are stored in fewer bits, three at most, by bytes; empty if there are none."""
    counts: collections.Counter[str] = collections.Counter()
    for row in sorted(residuals, key=lambda row: -row.nbytes):
        if row.stored_as:
            counts[_type(row)] += row.times
    texts = [f"{n} x {type_}" if n > 1 else type_ for type_, n in counts.items()]
    more = [f"and {len(texts) - 3} more types"] if len(texts) > 3 else []
    return ", ".join([*texts[:3], *more])


def _from(row: Residual) -> str:
    if row.origin == "argument" or (row.path and row.stored_as):
        return f"from the argument {row.path}"
    if row.origin == "state":
        return f"from the state {row.path} ({row.kind})"
    if not row.primitive:
        return f"from a {row.origin}"
    description = f"named {', '.join(map(repr, row.names))}" if row.names else f"output of {row.primitive}"
    location = f" from {short_path(row.source)} ({row.function})" if row.source else ""
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
