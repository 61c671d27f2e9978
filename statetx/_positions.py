"""Items of a sequence by their positions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any


def replaced(items: Sequence[Any], positions: Iterable[int], values: Sequence[Any]) -> list[Any]:
    """A copy of `items` with `values` at `positions`."""
    copy = list(items)
    for i, value in zip(positions, values, strict=True):
        copy[i] = value
    return copy


def function_of(fun: Callable[..., Any], args: Sequence[Any], positions: Sequence[int]) -> Callable[..., Any]:
    """``fun(*args)`` as a function of the arguments at `positions`; the others are constants.

    Differentiating the result differentiates `fun` with respect to these arguments only, which JAX's own ``argnums``
    cannot say for ``jax.jvp`` and ``jax.vjp``.
    """
    return lambda *values: fun(*replaced(args, positions, values))
