"""`Consumers`: equations that read stacked results row by row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ... import _jax
from ..._jax import Var


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


def variables_of(eqn: Any) -> set[Var]:
    return {v for v in eqn.invars if isinstance(v, Var)}


def read_whole(eqn: Any, found: Any) -> list[Var]:
    """The operands that a rowwise equation does not read by rows."""
    return [v for v, s in zip(eqn.invars, found.is_stacked, strict=True) if not s and isinstance(v, Var)]


def are_read_once(eqns: Sequence[Any], in_place: dict[Var, Var]) -> bool:
    """Whether one output alone is computed from the rows of each overwritten stack."""
    needed = {out: {out} for out in in_place}
    for variables in needed.values():
        for eqn in reversed(eqns):
            if not variables.isdisjoint(eqn.outvars):
                variables |= variables_of(eqn)
    return all(sum(v in variables for variables in needed.values()) == 1 for v in in_place.values())


def is_same_type(a: Any, b: Any) -> bool:
    return (a.shape, a.dtype, _jax.varying_axes(a)) == (b.shape, b.dtype, _jax.varying_axes(b))
