"""The length that arrays have in common along their axes: the steps of a loop, the examples of a map or a batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from .._text import type_str
from .._tree import as_array


def common_length(
    call: str,
    arrays: Sequence[Any],
    axes: Sequence[int | None],
    names: Callable[[], Sequence[str]],
    *,
    lacking: str,
    differing: str,
    given: tuple[str, Any] | None = None,
    needed_by: str | None = None,
) -> Any:
    """The length of all arrays along their axes; None if no array has one.

    Args:
        call: the call, for messages.
        axes: for each array its axis, or None if it has no part in this.
        names: the names of the arrays, for messages.
        lacking: the fix for an array without its axis.
        differing: the fix for arrays of different lengths.
        given: an option that gives the length, and its value.
        needed_by: what depends on the length, so that it cannot be symbolic (``jax.export``); None if it can.

    Raises:
        ValueError: an array lacks its axis, the lengths differ, or they are symbolic.
    """
    firsts: dict[Any, int] = {}  # from length to the first array of that length
    for n, (x, axis) in enumerate(zip(arrays, axes, strict=True)):
        if axis is None:
            continue
        shape = x.shape if hasattr(x, "shape") else np.shape(x)
        if not -len(shape) <= axis < len(shape):
            raise ValueError(
                f"{call}: {names()[n]} is a {type_str(as_array(x))}, which has no axis {axis}.\nFix: {lacking}."
            )
        firsts.setdefault(shape[axis], n)

    describe = lambda n: f"{names()[n]} ({type_str(as_array(arrays[n]))})"
    symbolic = next((length for length in firsts if not isinstance(length, int)), None)
    if needed_by is not None and symbolic is not None:
        raise ValueError(
            f"{call}: {describe(firsts[symbolic])} has the symbolic length {symbolic} along axis "
            f"{axes[firsts[symbolic]]}. "
            f"{needed_by} depends on it.\nFix: export with a constant length."
        )
    lengths = [*firsts, *(() if given is None or given[1] in firsts else (given[1],))]
    if len(lengths) > 1:
        texts = [f"{describe(n)} has {length} along axis {axes[n]}" for length, n in [*firsts.items()][:8]]
        texts += [] if given is None else [f"{given[0]}={given[1]}"]
        is_raw_key = any(np.shape(arrays[n]) == (2,) and arrays[n].dtype == jnp.uint32 for n in firsts.values())
        hint = " A key of jax.random.PRNGKey is an array of length 2: use jax.random.key." if is_raw_key else ""
        raise ValueError(f"{call}: the arrays differ in length: {', '.join(texts)}.\nFix: {differing}.{hint}")
    return lengths[0] if lengths else None
