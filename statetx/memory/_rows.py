"""A function in parts of its rows: what it computes along the first axis of its results, some rows at a time, as by
`statetx.map` with ``batch_size=``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .. import _jax
from .._equations.primitives import FUSED
from .._jax import Jaxpr, Literal


def in_rows(jaxpr: Jaxpr, num: int) -> Callable[..., list[Any]] | None:
    """A function as a loop over equal parts of its rows; None if not all its results have as many rows, or if none of
    its equations can run on a part.

    An equation that cannot is computed as a whole, before the loop.
    """
    shapes = [getattr(v.aval, "shape", ()) for v in jaxpr.outvars]
    sizes: set[tuple[int, ...]] = {shape[:1] for shape in shapes}
    size = next(iter(sizes))[0] if len(sizes) == 1 and sizes != {()} else 0
    if not size or size % num or any(isinstance(v, Literal) for v in jaxpr.outvars):
        return None
    cut, whole = _demands(jaxpr)
    if not cut:
        return None
    steps = [(eqn, axis) for eqn in jaxpr.eqns for axis in sorted(cut.get(id(eqn), ()))]

    def run(*args: Any) -> list[Any]:
        values = dict(zip(jaxpr.invars, args, strict=True))
        read = lambda v: v.val if isinstance(v, Literal) else values[v]
        for eqn in jaxpr.eqns:
            if id(eqn) in whole:
                values.update(
                    zip(eqn.outvars, _jax.bind_equation(eqn, eqn.params, [read(v) for v in eqn.invars]), strict=True)
                )

        def part(_: None, n: Any) -> tuple[None, list[Any]]:
            rows: dict[tuple[Any, int], Any] = {}

            def rows_of(v: Any, axis: int | None) -> Any:
                if axis is None or (v, axis) in rows:
                    return read(v) if axis is None else rows[v, axis]
                length = v.aval.shape[axis] // num
                return jax.lax.dynamic_slice_in_dim(values[v], n * length, length, axis)

            for eqn, axis in steps:
                rule = _rule(eqn, axis, num)
                assert rule is not None  # `_demands` has asked
                axes, params = rule
                operands = [rows_of(v, a) for v, a in zip(eqn.invars, axes, strict=True)]
                results = _jax.bind_equation(eqn, {**eqn.params, **params}, operands)
                rows.update({(v, axis): x for v, x in zip(eqn.outvars, results, strict=True)})
            return None, [rows_of(v, 0) for v in jaxpr.outvars]

        _, parts = jax.lax.scan(part, None, jnp.arange(num))
        return [x.reshape(shape) for x, shape in zip(parts, shapes, strict=True)]

    return run


def _demands(jaxpr: Jaxpr) -> tuple[dict[int, set[int]], set[int]]:
    """The equations that run on parts, with the axes, and those that run as a whole, by their ids."""
    demanded: dict[Any, set[int | None]] = {v: {0} for v in jaxpr.outvars}
    cut: dict[int, set[int]] = {}
    whole: set[int] = set()
    for eqn in reversed(jaxpr.eqns):
        for axis in {axis for v in eqn.outvars for axis in demanded.get(v, ())}:
            rule = None if axis is None else _rule(eqn, axis, 1)
            if axis is None or rule is None:
                whole.add(id(eqn))
            else:
                cut.setdefault(id(eqn), set()).add(axis)
            for v, a in zip(eqn.invars, [None] * len(eqn.invars) if rule is None else rule[0], strict=True):
                if not isinstance(v, Literal):
                    demanded.setdefault(v, set()).add(a)
    return cut, whole


def _rule(eqn: Any, axis: int, num: int) -> tuple[list[int | None], dict[str, Any]] | None:
    """The axes along which the operands are divided into so many parts, None for a whole operand, if the result is
    along `axis`; and the parameters that differ. None if the equation cannot run on a part.
    """
    name, params, out = eqn.primitive.name, eqn.params, eqn.outvars[0].aval
    shapes = [getattr(v.aval, "shape", ()) for v in eqn.invars]
    smaller = lambda sizes: tuple(n // num if i == axis else n for i, n in enumerate(sizes))
    if name == "broadcast_in_dim":
        dims = list(params["broadcast_dimensions"])
        is_own = axis in dims and shapes[0][dims.index(axis)] == out.shape[axis]
        return [dims.index(axis) if is_own else None], {"shape": smaller(params["shape"])}
    if name == "iota":
        return None if params["dimension"] == axis else ([], {"shape": smaller(params["shape"])})
    if name == "reshape":
        before = math.prod(out.shape[:axis])
        found = [i for i, n in enumerate(shapes[0]) if n == out.shape[axis] and math.prod(shapes[0][:i]) == before]
        return ([found[0]], {"new_sizes": smaller(params["new_sizes"])}) if found else None
    if name == "slice":
        whole = params["start_indices"][axis] == 0 and params["limit_indices"][axis] == shapes[0][axis]
        strides = params["strides"] or (1,) * len(shapes[0])
        is_cut = whole and strides[axis] == 1
        return ([axis], {"limit_indices": smaller(params["limit_indices"])}) if is_cut else None
    if name == "transpose":
        return [params["permutation"][axis]], {}
    if name == "squeeze" or name.startswith(("reduce_", "arg")):
        removed = params["dimensions"] if name == "squeeze" else params.get("axes")
        if removed is None or len(eqn.outvars) > 1:
            return None
        return [[i for i in range(len(shapes[0])) if i not in {n % len(shapes[0]) for n in removed}][axis]], {}
    if name == "dot_general":
        return _rule_of_product(params["dimension_numbers"], shapes, axis), {}
    along = {"sort": "dimension", "concatenate": "dimension", **dict.fromkeys(_CUMULATIVE, "axis")}.get(name)
    if along is not None:
        return None if params[along] == axis else ([axis] * len(shapes), {})
    if name in FUSED - {"pad", "rev"} and all(len(shape) in (0, len(out.shape)) for shape in shapes):  # elementwise
        return [axis if shape and shape[axis] == out.shape[axis] else None for shape in shapes], {}
    return None


_CUMULATIVE = ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")


def _rule_of_product(dimension_numbers: Any, shapes: Sequence[Sequence[int]], axis: int) -> list[int | None]:
    (contracted, batch) = dimension_numbers
    if axis < len(batch[0]):
        return [batch[0][axis], batch[1][axis]]
    free = [[i for i in range(len(shapes[n])) if i not in (*contracted[n], *batch[n])] for n in (0, 1)]
    axis -= len(batch[0])
    return [free[0][axis], None] if axis < len(free[0]) else [None, free[1][axis - len(free[0])]]
