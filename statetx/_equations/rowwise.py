"""Rowwise equations: each row of a stacked array is computed from the same row of others.

A stacked array has a first axis of ``length * k``: a loop of this length computes k rows of it in each step, a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from .. import _jax
from .._jax import Jaxpr, Var
from .blocks import Rowwise
from .dataflow import variables_of
from .primitives import INLINED, JIT, REMAT, inner_jaxprs, row_of


def is_stack(aval: Any, length: int) -> bool:
    """Whether an array of this type can be cut into blocks for a loop of this length. JAX slices no partial sums."""
    shape = getattr(aval, "shape", ())
    is_cut = bool(shape) and isinstance(shape[0], int) and shape[0] > 0 and shape[0] % length == 0
    return is_cut and not _jax.is_partial_sum(aval)


def rowwise(eqn: Any, length: int) -> Rowwise | None:
    """The equation on a block of rows; None if it mixes rows, or if this is not known."""
    if eqn.effects or not all(is_stack(v.aval, length) or _jax.is_dropped(v) for v in eqn.outvars):
        return None
    rule = row_of(eqn).block
    if rule is None:
        inner = _nested(eqn, length)
        block = None if inner is None else Rowwise(eqn.params, inner.is_stacked)
    else:
        block = rule(eqn, length)
    if block is None or not all(
        is_stack(v.aval, length) for v, stacked in zip(eqn.invars, block.is_stacked, strict=True) if stacked
    ):
        return None
    return block


def evaluate(eqns: Sequence[Any], length: int, values: dict[Any, Any]) -> None:
    """Bind rowwise equations to the blocks and the whole operands in `values`, by variable; add their results."""
    for eqn in eqns:
        block = rowwise(eqn, length)
        assert block is not None
        operands = [v.val if isinstance(v, _jax.Literal) else values[v] for v in eqn.invars]
        if row_of(eqn).block is None:
            outs = _evaluate_nested(eqn, length, operands)
        else:
            outs = _jax.bind_equation(eqn, block.params, operands)
        values.update(zip(eqn.outvars, outs, strict=True))


# -- calls, and loops over something else than the rows, such as the steps of an iteration ----------------------------


class _Nested(NamedTuple):
    """The jaxpr of an equation, on a block of rows.

    Attributes:
        jaxpr: of the equation.
        rows, whole: the variables that are blocks, and the others that something needs.
    """

    jaxpr: Jaxpr
    rows: set[Var]
    whole: set[Var]

    @property
    def is_stacked(self) -> list[bool]:
        return [v in self.rows for v in self.jaxpr.invars]

    def __call__(self, length: int, args: Sequence[Any]) -> list[Any]:
        """The outputs; None in the place of those that nothing needs."""
        values: dict[Any, Any] = dict(zip(self.jaxpr.invars, args, strict=True))
        for eqn in self.jaxpr.eqns:
            if not self.rows.isdisjoint(eqn.outvars):
                evaluate([eqn], length, values)
            elif not self.whole.isdisjoint(eqn.outvars):
                operands = [v.val if isinstance(v, _jax.Literal) else values[v] for v in eqn.invars]
                values.update(zip(eqn.outvars, _jax.bind_equation(eqn, eqn.params, operands), strict=True))
        return [v.val if isinstance(v, _jax.Literal) else values.get(v) for v in self.jaxpr.outvars]

    def grown(self, length: int) -> _Nested | None:
        """With what its variables are computed from; None if rows are mixed."""
        rows, whole = {*self.rows}, {*self.whole}
        for eqn in reversed(self.jaxpr.eqns):
            if not rows.isdisjoint(eqn.outvars):
                block = rowwise(eqn, length)
                if block is None:
                    return None
                for v, stacked in zip(eqn.invars, block.is_stacked, strict=True):
                    if isinstance(v, Var):
                        (rows if stacked else whole).add(v)
            elif not whole.isdisjoint(eqn.outvars):
                whole.update(variables_of(eqn))
        return None if rows & whole else _Nested(self.jaxpr, rows, whole)


def _nested(eqn: Any, length: int) -> _Nested | None:
    name, jaxprs = eqn.primitive.name, inner_jaxprs(eqn)
    is_call = name in INLINED - REMAT - {"statetx_loop"} and not (name in JIT and not _jax.is_unplaced(eqn))
    if not (is_call or name == "scan") or jaxprs[0].constvars:
        return None
    (jaxpr,) = jaxprs
    num_constants, num_carry = _jax.scan_counts(eqn) if name == "scan" else (0, 0)
    if name == "scan" and len(eqn.outvars) > num_carry:  # rows of these would be another axis
        return None
    carry = list(zip(jaxpr.invars[num_constants:], jaxpr.outvars, strict=False))[:num_carry]
    live = {v for v, out in zip(jaxpr.outvars, eqn.outvars, strict=True) if not _jax.is_dropped(out)}
    nested: _Nested | None = _Nested(jaxpr, {v for v in live if isinstance(v, Var)}, set())
    previous = None
    while nested is not None and nested != previous:
        previous, nested = nested, nested.grown(length)
        if nested is not None:  # a carry is one kind of variable before and after a step
            for pair in carry:
                for kind in (nested.rows, nested.whole):
                    kind.update(v for v in pair if isinstance(v, Var) and not kind.isdisjoint(pair))
    if nested is None or nested.rows.intersection(jaxpr.invars[num_constants + num_carry :] if carry else ()):
        return None
    return nested


def _evaluate_nested(eqn: Any, length: int, operands: list[Any]) -> list[Any]:
    nested = _nested(eqn, length)
    assert nested is not None
    if eqn.primitive.name != "scan":
        return nested(length, operands)
    num_constants, _ = _jax.scan_counts(eqn)

    def step(*args: Any) -> list[Any]:
        outs = nested(length, args)
        return [args[num_constants + n] if out is None else out for n, out in enumerate(outs)]

    triples = zip(nested.jaxpr.invars, nested.is_stacked, operands, strict=True)
    avals = [jax.typeof(x) if stacked else v.aval for v, stacked, x in triples]
    jaxpr, consts = _jax.stage(step, avals, traced_for="scan", name="rows")
    assert not consts
    return _jax.bind_equation(eqn, {**eqn.params, "jaxpr": _jax.close(jaxpr, ())}, operands)
