"""Rules of equations that compute a block of rows from the same rows of their operands, for the table of primitives.

Each takes an equation and the length of a loop that computes an equal number of rows in each step, and returns None if
the equation mixes rows, or if this is not known.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


class Rowwise(NamedTuple):
    """An equation on a block of rows.

    Attributes:
        params: its parameters there.
        is_stacked: for each operand, whether a block of it is read; otherwise it is read whole.
    """

    params: dict[str, Any]
    is_stacked: list[bool]


def elementwise(eqn: Any, length: int) -> Rowwise | None:
    shapes = {v.aval.shape for v in eqn.outvars}
    operands = [v.aval.shape for v in eqn.invars]
    if not all(_broadcasts(shape, *shapes) for shape in operands):
        return None
    return Rowwise(eqn.params, [bool(shape) and shape[0] != 1 for shape in operands])


def _broadcasts(shape: tuple[int, ...], *results: tuple[int, ...]) -> bool:
    """Whether an operand of a shape has the shape of a result, apart from axes of size one, or is a number."""
    of = lambda result: len(shape) == len(result) and all(n in (1, m) for n, m in zip(shape, result, strict=True))
    return not shape or any(map(of, results))


def shaped(key: str) -> Callable[[Any, int], Rowwise | None]:
    """For primitives that have the shape of their result as a parameter."""

    def rule(eqn: Any, length: int) -> Rowwise | None:
        shape = eqn.params[key]
        if eqn.params.get("sharding") is not None or eqn.params.get("dimensions") is not None:
            return None
        return Rowwise({**eqn.params, key: (shape[0] // length, *shape[1:])}, [True] * len(eqn.invars))

    return rule


def broadcast(eqn: Any, length: int) -> Rowwise | None:
    block, dims = shaped("shape")(eqn, length), eqn.params["broadcast_dimensions"]
    if block is None or len(eqn.invars) != 1:
        return None
    operand_shape = eqn.invars[0].aval.shape
    has_rows = 0 in dims and operand_shape[dims.index(0)] != 1
    return block._replace(is_stacked=[has_rows])


def iota(eqn: Any, length: int) -> Rowwise | None:
    return None if eqn.params["dimension"] == 0 or eqn.invars else shaped("shape")(eqn, length)


def unless_axis_0(key: str) -> Callable[[Any, int], Rowwise | None]:
    """For primitives that combine entries along the axes in a parameter."""

    def rule(eqn: Any, length: int) -> Rowwise | None:
        axes = eqn.params[key]
        is_mixed = 0 in axes if isinstance(axes, tuple) else axes == 0
        return None if is_mixed else Rowwise(eqn.params, [True] * len(eqn.invars))

    return rule


def transpose(eqn: Any, length: int) -> Rowwise | None:
    return Rowwise(eqn.params, [True]) if eqn.params["permutation"][0] == 0 else None


def dot(eqn: Any, length: int) -> Rowwise | None:
    _, batch = eqn.params["dimension_numbers"]
    return Rowwise(eqn.params, [True, True]) if all(dims[:1] == (0,) for dims in map(tuple, batch)) else None


def sliced(eqn: Any, length: int) -> Rowwise | None:
    start, limit, strides = (eqn.params[k] for k in ("start_indices", "limit_indices", "strides"))
    num_rows = eqn.invars[0].aval.shape[0]
    if start[0] != 0 or limit[0] != num_rows or (strides is not None and strides[0] != 1):
        return None
    return Rowwise({**eqn.params, "limit_indices": (num_rows // length, *limit[1:])}, [True])


def pad(eqn: Any, length: int) -> Rowwise | None:
    return Rowwise(eqn.params, [True, False]) if tuple(eqn.params["padding_config"][0]) == (0, 0, 0) else None
