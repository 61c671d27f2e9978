"""`Consumers`: equations that read stacked results row by row."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

from ... import _jax
from ..._jax import Var
from ..dataflow import needed_equations, variables_of


class Consumers(NamedTuple):
    """The consumers of stacked results of one equation.

    Attributes:
        stacks: the results that only they read.
        eqns: the consumers, in order.
        stacked, whole: their operands from elsewhere, by how they are read.
        outvars: their results that others read.
        in_place: for some of these the stacked operand whose memory each takes.
    """

    stacks: list[Var]
    eqns: list[Any]
    stacked: list[Var]
    whole: list[Var]
    outvars: list[Var]
    in_place: dict[Var, Var]


def read_whole(eqn: Any, block: Any) -> list[Var]:
    """The operands that a rowwise equation does not read by rows."""
    return [v for v, s in zip(eqn.invars, block.is_stacked, strict=True) if not s and isinstance(v, Var)]


def are_read_once(eqns: Sequence[Any], in_place: dict[Var, Var]) -> bool:
    """Whether one output alone is computed from the rows of each overwritten stack."""
    needed = [{out}.union(*map(variables_of, needed_equations(eqns, [out]))) for out in in_place]
    return all(sum(v in variables for variables in needed) == 1 for v in in_place.values())


def paired(eqns: Sequence[Any], outvars: Sequence[Var], operands: Sequence[Var]) -> dict[Var, Var]:
    """For outputs of equations the operands of their types whose memory they take: of the pairs that are fewest
    equations apart, as the new weights and the old ones. JAX gives the memory of a donated state to its new value.
    """
    distances: dict[Var, dict[Var, int]] = {v: {v: 0} for v in operands}
    for eqn in eqns:
        nearest: dict[Var, int] = {}
        for v in variables_of(eqn):
            for operand, distance in distances.get(v, {}).items():
                nearest[operand] = min(distance + 1, nearest.get(operand, distance + 1))
        distances |= dict.fromkeys(eqn.outvars, nearest)

    far = len(eqns) + 1
    apart = lambda pair: distances[pair[0]].get(pair[1], far)
    pairs: dict[Var, Var] = {}
    for out, operand in sorted(itertools.product(outvars, operands), key=apart):
        if is_same_type(out.aval, operand.aval) and out not in pairs and operand not in pairs.values():
            pairs[out] = operand
    return {out: pairs[out] for out in outvars if out in pairs}


def is_same_type(a: Any, b: Any) -> bool:
    return (a.shape, a.dtype, _jax.varying_axes(a)) == (b.shape, b.dtype, _jax.varying_axes(b))
