"""Values that a plan stores in fewer bits between the forward and the backward pass: formats, bytes, cost."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax

from .._equations.flops import flops
from .._equations.inline import inline
from .._equations.primitives import JIT
from .._errors import PolicyError
from .._jax import Jaxpr
from .._lift.context import device_bytes
from .._remat.stored import StoredType, as_stored_type
from .._remat.survey import Survey
from .._tree import num_bytes

Formats = tuple[StoredType, ...]
"""The formats that a plan may use."""


def read_formats(stored_as: str | Sequence[str]) -> Formats:
    """Convert an argument of users."""
    names = (stored_as,) if isinstance(stored_as, (str, StoredType)) else stored_as
    if not isinstance(names, Sequence):
        raise PolicyError(f"stored_as must be the name of a format or a sequence of names, got {stored_as!r}.")
    return tuple(dict.fromkeys(as_stored_type(name, "stored_as: each format") for name in names))


def format_of(aval: Any, formats: Formats, is_bits: bool) -> StoredType | None:
    """The format in which a value takes the fewest bytes; None if none is smaller than the value.

    Args:
        is_bits: whether the value is proved to be 0 or 1. Others are not stored as bits.
    """
    fit = [f for f in formats if (is_bits or not f.is_exact) and hasattr(aval, "dtype") and f.shrinks(aval)]
    return min(fit, key=lambda f: f.nbytes(aval), default=None)


def stored_bytes(aval: Any, format: StoredType) -> int:
    """Bytes of a stored value on one device."""
    return -(-device_bytes(aval) * format.nbytes(aval) // max(num_bytes(aval), 1))


def storing_cost(aval: Any, format: StoredType) -> int:
    """The cost of encoding a value in the forward pass and decoding it in the backward pass."""
    return sum(map(flops, _storing(aval.shape, aval.dtype, format).eqns))


@functools.lru_cache(1024)
def _storing(shape: tuple[int, ...], dtype: Any, format: StoredType) -> Jaxpr:
    aval = jax.ShapeDtypeStruct(shape, dtype)
    run = lambda x: [format.decode(format.encode(x), aval)]  # noqa: E731
    return inline(jax.make_jaxpr(run)(aval).jaxpr, calls=JIT, deep=False)


def formats_of_variables(jaxpr: Jaxpr, formats: Formats) -> dict[Any, StoredType]:
    """The variables of a program that can be stored in fewer bits."""
    if not formats:
        return {}
    found = {}
    for site in Survey(jaxpr).results:
        if len(site.address) == 2 and (format := format_of(site.value.type, formats, site.value.is_bits)) is not None:
            found[jaxpr.eqns[site.address[0]].outvars[site.address[1]]] = format
    return found
