"""Equations that compute each row of a stacked array from the same row of others, and their evaluation on a block.

A stacked array has a first axis of ``length * k``: a loop of this length computes k rows of it in each step, a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .. import _jax
from .._tree import is_float
from .blocks import Rowwise
from .primitives import row_of


def is_stack(aval: Any, length: int) -> bool:
    """Whether an array of this type can be cut into blocks for a loop of this length."""
    shape = getattr(aval, "shape", ())
    return bool(shape) and isinstance(shape[0], int) and shape[0] > 0 and shape[0] % length == 0


def rowwise(eqn: Any, length: int) -> Rowwise | None:
    """The equation on a block of rows; None if it mixes rows, or if this is not known."""
    if eqn.effects or not all(is_stack(v.aval, length) for v in eqn.outvars):
        return None
    rule = row_of(eqn).block
    found = None if rule is None else rule(eqn, length)
    if found is None or not all(
        is_stack(v.aval, length) for v, stacked in zip(eqn.invars, found.is_stacked, strict=True) if stacked
    ):
        return None
    return found


def evaluate(eqns: Sequence[Any], length: int, values: dict[Any, Any]) -> None:
    """Bind rowwise equations to the blocks and the whole operands in `values`, by variable; add their results."""
    for eqn in eqns:
        found = rowwise(eqn, length)
        assert found is not None
        operands = [v.val if isinstance(v, _jax.Literal) else values[v] for v in eqn.invars]
        if _is_quotient_by_number(eqn):
            values[eqn.outvars[0]] = operands[0] * (1 / operands[1])
            continue
        values.update(zip(eqn.outvars, _jax.bind_equation(eqn, found.params, operands), strict=True))


def _is_quotient_by_number(eqn: Any) -> bool:
    """Whether an equation divides an array by a variable number.

    XLA multiplies by the number's reciprocal instead, but not in a loop, where the result would have other bits.
    """
    if eqn.primitive.name != "div" or isinstance(eqn.invars[1], _jax.Literal) or not is_float(eqn.invars[1].aval):
        return False
    return bool(eqn.invars[0].aval.shape) and not eqn.invars[1].aval.shape
