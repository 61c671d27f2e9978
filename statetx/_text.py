"""Text for messages or reports: tables, counts of bytes or operations, types, source lines, suggestions for misspelled
names.
"""

from __future__ import annotations

import difflib
import numbers
import os
import re
import reprlib
import shutil
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from ._errors import PolicyError
from ._typing import PyTree


def format_bytes(n: int) -> str:
    """Format bytes with a binary unit: ``"1.5 KiB"``."""
    if n < 1024:
        return f"{n} B"
    size = float(n)
    for unit in ("KiB", "MiB", "GiB"):
        size /= 1024
        if size < 1024 or unit == "GiB":
            break
    return f"{size:.1f} {unit}"


def size_literal(n: int) -> str:
    """A number of bytes as a user writes it in a call, exactly: ``'64MiB'``, or digits.

    Example:
        >>> size_literal(2**26), size_literal(1000), size_literal(0)
        ("'64MiB'", '1000', '0')
    """
    for unit in ("GiB", "MiB", "KiB"):
        if n and n % _UNITS[unit.lower()] == 0:
            return repr(f"{n // _UNITS[unit.lower()]}{unit}")
    return str(n)


def format_flops(n: int) -> str:
    """Format operations with a decimal unit.

    Example:
        >>> format_flops(0), format_flops(960), format_flops(12_345_678)
        ('0', '960', '12.3 M')
    """
    size = float(n)
    for unit in ("", "k", "M", "G", "T", "P"):
        if size < 999.5 or unit == "P":
            break
        size /= 1000
    return f"{size:.3g} {unit}".rstrip()


def format_seconds(x: float) -> str:
    """Format a short time.

    Example:
        >>> format_seconds(0.0285), format_seconds(2e-4)
        ('28.5 ms', '200 us')
    """
    return f"{1e6 * x:.3g} us" if x < 1e-3 else f"{1e3 * x:.3g} ms"


_FILE_WIDTH = 120


def text_width() -> int:
    """The columns of the terminal, or ``COLUMNS``; a constant where output goes to a file or a notebook."""
    return shutil.get_terminal_size((_FILE_WIDTH, 24)).columns


def short_path(source: str) -> str:
    """A source line, relative to the working directory if the file is below it and not of an installed package, else
    the file name alone; unchanged if it is relative.
    """
    if not os.path.isabs(source):
        return source
    below = source.removeprefix(os.getcwd() + os.sep)
    is_own = below != source and f"{os.sep}site-packages{os.sep}" not in source
    return below if is_own else source.rsplit(os.sep, 1)[-1]


def suggestion(word: Any, names: Iterable[str]) -> str:
    """`` Did you mean 'x'?`` with the name that begins so, or the closest; empty if none is close."""
    names = list(names)
    longer = [name for name in names if word and name.startswith(str(word))]
    close = longer[:1] or difflib.get_close_matches(str(word), names, 1)
    return f" Did you mean {close[0]!r}?" if close else ""


class _Brief(reprlib.Repr):
    """Types and functions by name; the first few items of containers."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = 80

    def repr_int(self, x: int, level: int) -> str:
        # Python refuses to print integers of more than 4,300 digits.
        return super().repr_int(x, level) if x.bit_length() < 1024 else f"an integer of {x.bit_length()} bits"

    def repr1(self, x: Any, level: int) -> str:
        is_named = isinstance(x, type) or (callable(x) and hasattr(x, "__qualname__"))
        return x.__qualname__ if is_named else super().repr1(x, level)


brief = _Brief().repr
"""``repr`` for a message: types and functions by name, long containers truncated."""


def type_str(x: Any, *, weak: bool = True) -> str:
    """The type of an array or of anything with a dtype and a shape, as JAX abbreviates it; for others the name of the
    Python type.

    Args:
        x: the value, its abstract value, or a description.
        weak: whether a weak type is marked, ``~f32[]``.

    Example:
        >>> type_str(np.ones((2, 3), np.float32)), type_str(np.uint8(1)), type_str(np.ones(4, bool)), type_str("text")
        ('f32[2,3]', 'u8[]', 'bool[4]', 'str')
    """
    if hasattr(x, "dtype") and hasattr(x, "shape"):
        aval = x if not isinstance(x, jax.Array) else jax.typeof(x)
        mark = "~" if weak and getattr(aval, "weak_type", False) else ""
        dtype = np.dtype(x.dtype).name if isinstance(x.dtype, np.dtype) else str(x.dtype)
        return f"{mark}{short_dtype(dtype)}[{','.join(map(_size_str, x.shape, _axes(aval)))}]"
    return type(x).__name__


_SHORT = {"bfloat": "bf", "float": "f", "uint": "u", "int": "i", "complex": "c"}


def short_dtype(name: str) -> str:
    """Abbreviate the dtype that a text begins with: ``bfloat16`` to ``bf16``, ``int32[3]`` to ``i32[3]``."""
    if name.startswith("void"):  # the name of `jax.dtypes.float0`
        return name.replace("void", "float0", 1)
    return re.sub(r"^(bfloat|float|uint|int|complex)(?=\d)", lambda m: _SHORT[m[1]], name)


def _axes(aval: Any) -> Sequence[Any]:
    """Explicit mesh axes of the sharding of each dimension: None, a name, or a tuple of names."""
    sharding = None if isinstance(aval, jax.ShapeDtypeStruct) else getattr(aval, "sharding", None)
    return (None,) * len(aval.shape) if sharding is None else tuple(sharding.spec.partitions)


def _size_str(size: int, axes: Any) -> str:
    return f"{size}" if axes is None else f"{size}@{axes}".replace("'", "").replace(" ", "")


def tree_type_str(tree: PyTree) -> str:
    """The type of a tree: `type_str` of a single leaf, else the container with the types of its leaves."""
    try:
        if jax.tree.structure(tree) == jax.tree.structure(0):
            return type_str(tree)
    except ValueError:  # a dict whose keys cannot be sorted
        return type(tree).__name__
    try:
        return str(jax.tree.map(lambda x: _Word(type_str(x)), tree))
    except Exception:  # a container that refuses leaves that are not arrays
        return f"{type(tree).__name__}({', '.join(map(type_str, jax.tree.leaves(tree)))})"


def counted(num: int, word: str) -> str:
    """A number with a noun.

    Example:
        >>> counted(1, "state"), counted(2, "state")
        ('1 state', '2 states')
    """
    return f"{num} {word}{'' if num == 1 else 's'}"


def value_str(tree: PyTree) -> str:
    """`short_tree_type_str`; a Python scalar, or an array of at most four elements that a device holds, with its value.

    Example:
        >>> value_str(3), value_str(np.float32(0.5)), value_str(np.zeros(100)), value_str({"a": np.zeros(2), "b": True})
        ('3', 'f32[] 0.5', 'f64[100]', "{'a': f64[2], 'b': bool}")
    """
    if isinstance(tree, (bool, int, float, complex, str)) or tree is None:
        return brief(tree)
    text = short_tree_type_str(tree, 200)
    is_concrete = isinstance(tree, (jax.Array, np.ndarray, np.generic)) and not isinstance(tree, Tracer)
    if not is_concrete or tree.size > _MAX_SHOWN or jnp.issubdtype(tree.dtype, jax.dtypes.extended):
        return text
    if isinstance(tree, jax.Array) and (tree.is_deleted() or not tree.is_fully_addressable):
        return text
    return f"{text} {np.array2string(np.asarray(tree), separator=', ', precision=6)}"


_MAX_SHOWN = 4  # elements


def short_tree_type_str(tree: PyTree, width: int = 100) -> str:
    """`tree_type_str`, or a count if that is longer than `width`: ``tuple of 25 leaves``."""
    text = tree_type_str(tree)
    return text if len(text) <= width else f"{type(tree).__name__} of {len(jax.tree.leaves(tree))} leaves"


class _Word(str):
    """A string that prints without quotes inside a container."""

    __slots__ = ()
    __repr__ = str.__str__


MOST_BYTES = 2**63 - 1
"""The largest size that is accepted: XLA counts bytes in 64 bits."""

_UNITS = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30, "": 1}


def parse_bytes(size: int | str, option: str = "") -> int:
    """Convert a size to bytes: a number, or a string with a unit. `option`, such as "limit=", is for messages.

    Example:
        >>> parse_bytes("1.5 KiB"), parse_bytes("2GB"), parse_bytes(64)
        (1536, 2000000000, 64)
    """
    if not isinstance(size, str):
        if isinstance(size, bool) or not isinstance(size, numbers.Integral) or not 0 <= size <= MOST_BYTES:
            raise PolicyError(f"{option}{brief(size)} is not a size; use a number of bytes such as 2**31, or '2GiB'.")
        return int(size)
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([a-zA-Z]*)\s*", size)
    if match is None or match[2].lower() not in _UNITS:
        raise PolicyError(
            f"{option}{brief(size)} is not a size; use a number of bytes such as 2**31, or '2GiB' (units: B, KB, MB, "
            f"GB, KiB, MiB, GiB)."
        )
    num_bytes = float(match[1]) * _UNITS[match[2].lower()]
    if num_bytes > MOST_BYTES:  # infinity, if there are hundreds of digits
        raise PolicyError(f"{option}{brief(size)} is not a size: it is more than 2**63 bytes.")
    return int(num_bytes)
