"""Plain text for people: aligned tables, byte counts, and which name was meant."""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np

from ._typing import PyTree


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


def type_str(x: Any) -> str:
    """Shape and dtype as in ``float32[3,4]``, explicit axes as in ``float32[3@data,4]``; else the name of the Python type."""
    if hasattr(x, "dtype") and hasattr(x, "shape"):
        aval = x if not isinstance(x, jax.Array) else jax.typeof(x)
        weak = "~" if getattr(aval, "weak_type", False) else ""
        dtype = np.dtype(x.dtype).name if _has_numpy_dtype(x) else x.dtype
        return f"{weak}{dtype}[{','.join(map(_size_str, x.shape, _axes(aval)))}]"
    return type(x).__name__


def _axes(aval: Any) -> Sequence[Any]:
    """For each dimension, the explicit mesh axes along which a type is sharded: None, a name or names."""
    sharding = None if isinstance(aval, jax.ShapeDtypeStruct) else getattr(aval, "sharding", None)
    return (None,) * len(aval.shape) if sharding is None else tuple(sharding.spec)


def _size_str(size: int, axes: Any) -> str:
    return f"{size}" if axes is None else f"{size}@{axes}".replace("'", "").replace(" ", "")


def tree_type_str(tree: PyTree) -> str:
    """The type of a tree: `type_str` of a lone leaf, else the container with its leaves' types."""
    if jax.tree.structure(tree) == jax.tree.structure(0):
        return type_str(tree)
    return str(jax.tree.map(lambda x: _Word(type_str(x)), tree))


def short_tree_type_str(tree: PyTree, width: int = 100) -> str:
    """`tree_type_str`, or what is left to say where that is longer: ``tuple of 25 leaves``."""
    text = tree_type_str(tree)
    return text if len(text) <= width else f"{type(tree).__name__} of {len(jax.tree.leaves(tree))} leaves"


def _has_numpy_dtype(x: Any) -> bool:
    return isinstance(x.dtype, np.dtype)


class _Word(str):
    __slots__ = ()
    __repr__ = str.__str__
