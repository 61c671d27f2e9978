"""Loops that run twice: first for numbers that are computed from all rows, then with these numbers known.

Clipping by a global norm first needs a sum over all rows of all stacks. The first run of the loop has only sums over
single rows as results, so that no stack exists; the second has the consumers of the rows, which read the norm. Other
results of the loop, such as its carry, come from the first run. If the rows are computed from little, the first run
saves it (`saved`), and the second computes the rows alone.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import jax

from ... import _jax
from ..._jax import Var
from ..dataflow import needed_equations, variables_of
from ..rowwise import is_stack
from ..sums import in_order
from .saved import rows_from_saved


class Repeated(NamedTuple):
    """Equations that run a loop twice.

    Attributes:
        first, second: the loop.
        reader: the first equation that reads numbers of all rows.
    """

    eqns: list[Any]
    first: Any
    second: Any
    reader: Any


def with_split_reductions(eqns: Sequence[Any], stacks: Collection[Var], length: int) -> list[Any]:
    """Replace reductions of all rows that depend on stacks by reductions of single rows, and of these results."""
    derived, new = {*stacks}, []
    for eqn in eqns:
        split = []
        if not derived.isdisjoint(variables_of(eqn)):
            derived.update(eqn.outvars)
            split = _split(eqn, length)
        new += split or [eqn]
    return new


def repeated(eqns: Sequence[Any], loop: Any, stacks: Collection[Var], users: Sequence[Any]) -> Repeated | None:
    """Let a loop run twice; None if no number is computed from all rows.

    Args:
        stacks: of the loop.
        users: the equations that treat rows alone, in order.
    """
    numbers = {v for e in users for v in e.outvars if len(v.aval.shape) == 1}
    readers = [e for e in eqns if e not in users and not numbers.isdisjoint(variables_of(e))]
    needed = {v for e in readers for v in variables_of(e) & numbers}
    if not needed:
        return None
    producers = needed_equations(users, needed)
    fresh = {v: Var(v.aval) for v in (*stacks, *(v for e in producers for v in e.outvars))}
    read = lambda eqn: eqn.replace(invars=[fresh.get(v, v) if isinstance(v, Var) else v for v in eqn.invars])
    write = lambda eqn: eqn.replace(outvars=[fresh.get(v, v) for v in eqn.outvars])
    runs = rows_from_saved(loop, stacks)
    first, second = runs or (loop, loop.replace(outvars=[v if v in stacks else Var(v.aval) for v in loop.outvars]))
    first = write(first)
    new: list[Any] = []
    for eqn in eqns:
        if eqn is loop:
            new += [first, second]
        elif eqn in producers:
            new += [write(read(eqn)), eqn]
        else:
            new.append(read(eqn) if eqn in readers else eqn)
    return Repeated(in_order(new), first, second, readers[0])


def _split(eqn: Any, length: int) -> list[Any]:
    """A reduction of all rows as reductions of rows, and one of their results; nothing for another equation.

    A sum has another order then, and may differ in its last bits.
    """
    name, params = eqn.primitive.name, eqn.params
    if not all(isinstance(v, Var) and is_stack(v.aval, length) for v in eqn.invars):
        return []
    if name.startswith("reduce_") and 0 in params.get("axes", ()) and params.get("out_sharding") is None:
        axes = params["axes"]

        def reduce_rows(x: Any) -> Any:
            block = x.reshape(length, x.shape[0] // length, *x.shape[1:])
            rows = _jax.bind_equation(eqn, {**params, "axes": (1, *(a + 1 for a in axes if a))}, [block])
            return _jax.bind_equation(eqn, {**params, "axes": (0,)}, rows)

        reduce: Any = reduce_rows

    elif name == "dot_general" and {len(v.aval.shape) for v in eqn.invars} == {1}:

        def reduce_products(x: Any, y: Any) -> Any:
            blocks = [v.reshape(length, -1) for v in (x, y)]
            rows = _jax.bind_equation(eqn, {**params, "dimension_numbers": (((1,), (1,)), ((0,), (0,)))}, blocks)
            return [jax.lax.reduce_sum(rows[0], axes=(0,))]

        reduce = reduce_products

    else:
        return []
    if all(v.aval.shape == (length,) for v in eqn.invars):
        return []
    jaxpr, _ = _jax.stage(reduce, [v.aval for v in eqn.invars], traced_for="scan", name="split")
    return _jax.spliced(jaxpr, eqn.invars, eqn.outvars, eqn)
