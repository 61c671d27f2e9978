"""Equations that compute each row of a stacked array from the same row of others, and their evaluation on a block.

A stacked array has a first axis of ``length * k``: a loop of this length computes k rows of it in each step, a block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from .. import _jax
from .._tree import is_float
from .primitives import row_of


class Rowwise(NamedTuple):
    """An equation on a block of rows.

    Attributes:
        params: its parameters there.
        is_stacked: for each operand, whether a block of it is read; otherwise it is read whole.
    """

    params: dict[str, Any]
    is_stacked: list[bool]


def is_stack(aval: Any, length: int) -> bool:
    """Whether an array of this type can be cut into blocks for a loop of this length."""
    shape = getattr(aval, "shape", ())
    return bool(shape) and isinstance(shape[0], int) and shape[0] > 0 and shape[0] % length == 0


def rowwise(eqn: Any, length: int) -> Rowwise | None:
    """The equation on a block of rows; None if it mixes rows, or if this is not known."""
    if eqn.effects or not all(is_stack(v.aval, length) for v in eqn.outvars):
        return None
    rule = _elementwise if row_of(eqn).is_elementwise else _RULES.get(eqn.primitive.name)
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


# -- rules: ``(equation, length) -> Rowwise`` --------------------------------------------------------------------------


def _elementwise(eqn: Any, length: int) -> Rowwise | None:
    shapes = {v.aval.shape for v in eqn.outvars}
    is_stacked = [v.aval.shape in shapes for v in eqn.invars]
    is_known = all(s or not v.aval.shape for v, s in zip(eqn.invars, is_stacked, strict=True))
    return Rowwise(eqn.params, is_stacked) if is_known else None


def _shaped(key: str) -> Callable[[Any, int], Rowwise | None]:
    """For primitives that have the shape of their result as a parameter."""

    def rule(eqn: Any, length: int) -> Rowwise | None:
        shape = eqn.params[key]
        if eqn.params.get("sharding") is not None or eqn.params.get("dimensions") is not None:
            return None
        return Rowwise({**eqn.params, key: (shape[0] // length, *shape[1:])}, [True] * len(eqn.invars))

    return rule


def _broadcast(eqn: Any, length: int) -> Rowwise | None:
    found, dims = _shaped("shape")(eqn, length), eqn.params["broadcast_dimensions"]
    if found is None or len(eqn.invars) != 1:
        return None
    operand_shape = eqn.invars[0].aval.shape
    has_rows = 0 in dims and operand_shape[dims.index(0)] != 1
    return found._replace(is_stacked=[has_rows])


def _iota(eqn: Any, length: int) -> Rowwise | None:
    return None if eqn.params["dimension"] == 0 or eqn.invars else _shaped("shape")(eqn, length)


def _unless_axis_0(key: str) -> Callable[[Any, int], Rowwise | None]:
    """For primitives that combine entries along the axes in a parameter."""

    def rule(eqn: Any, length: int) -> Rowwise | None:
        axes = eqn.params[key]
        is_mixed = 0 in axes if isinstance(axes, tuple) else axes == 0
        return None if is_mixed else Rowwise(eqn.params, [True] * len(eqn.invars))

    return rule


def _transpose(eqn: Any, length: int) -> Rowwise | None:
    return Rowwise(eqn.params, [True]) if eqn.params["permutation"][0] == 0 else None


def _dot(eqn: Any, length: int) -> Rowwise | None:
    _, batch = eqn.params["dimension_numbers"]
    return Rowwise(eqn.params, [True, True]) if all(dims[:1] == (0,) for dims in map(tuple, batch)) else None


def _slice(eqn: Any, length: int) -> Rowwise | None:
    start, limit, strides = (eqn.params[k] for k in ("start_indices", "limit_indices", "strides"))
    num_rows = eqn.invars[0].aval.shape[0]
    if start[0] != 0 or limit[0] != num_rows or (strides is not None and strides[0] != 1):
        return None
    return Rowwise({**eqn.params, "limit_indices": (num_rows // length, *limit[1:])}, [True])


def _pad(eqn: Any, length: int) -> Rowwise | None:
    return Rowwise(eqn.params, [True, False]) if tuple(eqn.params["padding_config"][0]) == (0, 0, 0) else None


_RULES: dict[str, Callable[[Any, int], Rowwise | None]] = {
    "broadcast_in_dim": _broadcast,
    "reshape": _shaped("new_sizes"),
    "iota": _iota,
    "transpose": _transpose,
    "dot_general": _dot,
    "slice": _slice,
    "pad": _pad,
    **dict.fromkeys(
        "reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum argmax argmin".split(),
        _unless_axis_0("axes"),
    ),
    **dict.fromkeys(["squeeze", "rev"], _unless_axis_0("dimensions")),
    **dict.fromkeys(["cumsum", "cumprod", "cummax", "cummin", "split"], _unless_axis_0("axis")),
    "concatenate": _unless_axis_0("dimension"),
}
