"""Loops with stacked results, at any depth of regions or `jax.shard_map`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ... import _jax
from ..._jax import Jaxpr, Var
from ..primitives import LOOPS, REMAT, TABLE, inner_jaxprs


class RowLoop(Protocol):
    """A loop of statetx that computes each row of its last results once; the `lowered` of its `_jax.call_whole`.

    Attributes:
        length: number of rows.
        num_stacks: how many of its last results are stacks.
    """

    length: int
    num_stacks: int

    def __call__(self, jaxpr: Any) -> Any: ...

    def run(self, args: Sequence[Any], buffers: list[Any], write: Callable) -> list[Any]:
        """The results, with buffers in the place of the stacks.

        Args:
            buffers: the values before the first row.
            write: ``(buffers, number of a row, rows of the stacks) -> buffers``, called once for each row.
        """
        ...


def row_loop(eqn: Any) -> RowLoop | None:
    lowered = eqn.params.get("lowered")
    return lowered if hasattr(lowered, "num_stacks") else None


def has_loop(jaxpr: Jaxpr) -> bool:
    """Whether a jaxpr has a loop, at any depth."""
    return any(eqn.primitive.name in LOOPS or any(map(has_loop, inner_jaxprs(eqn))) for eqn in jaxpr.eqns)


def has_stacks(jaxpr: Jaxpr) -> bool:
    """Whether consumers may move into a loop of a jaxpr, at any depth: it has stacked results."""
    return any(any(stacks_of(eqn).values()) or any(map(has_stacks, inner_jaxprs(eqn))) for eqn in jaxpr.eqns)


def stacks_of(eqn: Any) -> dict[int, list[Var]]:
    """The stacked results of an equation into which consumers may move, by the length of their loop."""
    stacks: dict[int, list[Var]] = {}
    if eqn.primitive.name == "scan":
        _, num_carry = _jax.scan_counts(eqn)
        # A number for each step, such as a loss, is not worth a carry.
        stacks[eqn.params["length"]] = [v for v in eqn.outvars[num_carry:] if len(v.aval.shape) > 1]
    elif (loop := row_loop(eqn)) is not None:
        stacks[loop.length] = [v for v in eqn.outvars[-loop.num_stacks :] if len(v.aval.shape) > 1]
    elif eqn.primitive.name in REMAT | {"shard_map"}:
        stacks = _stacks_within(eqn)
    return {length: outs for length, outs in stacks.items() if length > 1}


def _stacks_within(eqn: Any) -> dict[int, list[Var]]:
    """The results of an equation that are stacked results of loops in its jaxpr."""
    stacks: dict[int, list[Var]] = {}
    (inner,) = inner_jaxprs(eqn)
    lengths = {v: length for e in inner.eqns for length, outs in stacks_of(e).items() for v in outs}
    for v, out in zip(inner.outvars, eqn.outvars, strict=True):
        if isinstance(v, Var) and v in lengths:
            stacks.setdefault(lengths[v], []).append(out)
    return stacks


def with_jaxpr(eqn: Any, jaxpr: Jaxpr) -> Any:
    key = TABLE[eqn.primitive.name].jaxpr
    return eqn.replace(params={**eqn.params, key: _jax.closed_like(eqn.params[key], jaxpr)})
