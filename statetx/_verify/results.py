"""Differences between the results of two programs, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from .._text import type_str
from .._tree import host_array, is_float


class Mismatch(NamedTuple):
    """A result that two programs compute differently.

    Attributes:
        error: the largest difference of an entry; infinite for another type.
        scale: the largest entry that was expected.
    """

    text: str
    error: float = np.inf
    scale: float = 1.0

    @property
    def relative(self) -> float:
        return self.error / max(self.scale, np.finfo(np.float64).tiny)


def equal_entries(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Which entries are equal; NaN equals NaN."""
    return (a == b) | ((a != a) & (b != b))


def differences(
    actual: Mapping[str, Any],
    expected: Mapping[str, Any],
    are_close: Callable[[np.ndarray, np.ndarray], np.ndarray] = equal_entries,
) -> dict[str, Mismatch]:
    """The results that are not equal, in the order of `expected`; by default bit for bit.

    Args:
        are_close: of the entries of floats, which are.
    """
    mismatches = {name: Mismatch(": only one of them has it") for name in actual if name not in expected}
    for name, b in expected.items():
        is_there = name in actual
        difference = _difference(actual[name], b, are_close) if is_there else Mismatch(": only one of them has it")
        if difference is not None:
            mismatches[name] = difference
    return mismatches


def _difference(a: Any, b: Any, are_close: Callable) -> Mismatch | None:
    if not hasattr(b, "dtype"):
        is_same = a is b or (type(a) is type(b) and (a == b or (a != a and b != b)))
        return None if is_same else Mismatch(f": {a!r} in place of {b!r}")
    if (np.shape(a), getattr(a, "dtype", None)) != (np.shape(b), b.dtype):
        return Mismatch(f": {type_str(a, weak=False)} in place of {type_str(b, weak=False)}")
    exact = not is_float(b)
    a, b = host_array(a), host_array(b)
    differs = ~(equal_entries if exact else are_close)(a, b)
    if not differs.any():
        return None
    wide = np.complex128 if np.iscomplexobj(b) else np.float64
    with np.errstate(all="ignore"):
        errors = np.abs(a.astype(wide) - b.astype(wide))[differs]
        sizes = np.abs(b.astype(wide))
    error = np.inf if exact or np.isnan(errors).any() else float(errors.max())
    first = tuple(map(int, np.unravel_index(differs.argmax(), differs.shape)))
    text = f"{[*first] if first else ''}: {a[first]} in place of {b[first]} ({differs.sum()} of {differs.size} differ)"
    return Mismatch(text, error, float(np.max(sizes, where=np.isfinite(sizes), initial=0.0)))
