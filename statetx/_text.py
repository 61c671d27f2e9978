"""Plain text for people: aligned tables, byte counts, and which name was meant."""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Iterable, Sequence
from typing import Any


def format_bytes(n: int) -> str:
    """Bytes with a binary unit: ``"1.5 KiB"``."""
    if n < 1024:
        return f"{n} B"
    size = float(n)
    for unit in ("KiB", "MiB", "GiB"):
        size /= 1024
        if size < 1024 or unit == "GiB":
            break
    return f"{size:.1f} {unit}"


def format_table(columns: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str] = ()) -> str:
    """Columns of text, as wide as their widest entry; those named in `right` end flush."""
    lines = [list(columns), *([str(c) for c in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    aligned = [
        "  ".join(
            c.rjust(w) if name in right else c.ljust(w) for c, w, name in zip(line, widths, columns, strict=True)
        ).rstrip()
        for line in lines
    ]
    return "\n".join([aligned[0], "  ".join("-" * w for w in widths), *aligned[1:]])


def suggestion(given: Any, known: Iterable[str]) -> str:
    """`` Did you mean 'x'?`` with the known name that is nearest to the given one; empty if none is near."""
    close = difflib.get_close_matches(str(given), list(known), 1)
    return f" Did you mean {close[0]!r}?" if close else ""


class _Brief(reprlib.Repr):
    """Types and functions by their names, and of containers the first few items."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = 80

    def repr1(self, x: Any, level: int) -> str:
        is_named = isinstance(x, type) or (callable(x) and hasattr(x, "__qualname__"))
        return x.__qualname__ if is_named else super().repr1(x, level)


brief = _Brief().repr
"""``repr`` for a message: types and functions by their names, long containers cut short."""
