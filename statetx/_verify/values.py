"""The first value that two programs compute differently, found by the values of all their equations.

A value of one program is found in the other if a value of this shape has the same projections there: equations need not
be in the same places. From a result that differs, the search goes back through operands that are not found, to the
value that is computed first.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import _jax
from .._equations.inline import inline
from .._equations.primitives import INLINED
from .._equations.structure import Body
from .._text import type_str
from .._tree import host_array, is_key
from ..residuals._trace import user_line
from .rounding import other_roundings

_MOST_ENTRIES = 2**14  # of a value that a program returns as a whole: projections take long to compile


@dataclasses.dataclass(eq=False)
class Node:
    """A value.

    Attributes:
        eqn: its equation; None for inputs and numbers.
        operands: by their places in the list of nodes; of a loop's result, also those of the results of a turn.
        shape: of the value in one turn.
        projections: see `_projections`; before that axis there is one for the turns of each loop around the equation.
            The entries, until the program has run.
        loops: the place of the first value of each loop around the equation.
    """

    eqn: Any
    operands: tuple[int, ...]
    shape: tuple[int, ...]
    projections: Any
    loops: tuple[int, ...]

    @property
    def line(self) -> str:
        return "{}:{}".format(*user_line(self.eqn)[:2])

    def __str__(self) -> str:
        file, line, function = user_line(self.eqn)
        where = f"{file}:{line} in {function}" if file else "a line of a library"
        return f"{self.eqn.primitive.name} {type_str(self.eqn.outvars[0].aval, weak=False)} at {where}"


class Recording:
    """The values of a program for some inputs: `nodes`; `outputs` are the places of its results."""

    def __init__(self, body: Body, arrays: Sequence[Any]):
        self.nodes: list[Node] = []
        self.outputs: list[int] = []
        jaxpr, inputs = inline(body.jaxpr, calls=INLINED), [*body.operands, *arrays]

        def run(*inputs: Any) -> list[Any]:
            self.nodes.clear()
            self.outputs = [n for _, n in self._record(jaxpr, inputs, ())]
            return [node.projections for node in self.nodes]

        program = jax.jit(run).lower(*inputs).compile(compiler_options=other_roundings())
        for node, x in zip(self.nodes, map(host_array, program(*inputs)), strict=True):
            size, turns = math.prod(node.shape), x.shape[: len(node.loops)]
            node.projections = x if size > _MOST_ENTRIES else _projections(np, x.reshape(*turns, size))

    def _record(self, jaxpr: Any, inputs: Iterable[Any], loops: tuple[int, ...]) -> list[tuple[Any, int]]:
        """Evaluate a jaxpr, and add its values to the nodes; its results, each with its place."""

        def added(x: Any, eqn: Any = None, operands: Sequence[tuple[Any, int]] = ()) -> tuple[Any, int]:
            entries = jax.random.key_data(x) if is_key(x) else jnp.asarray(x)
            kept = _projections(jnp, entries.reshape(-1)) if entries.size > _MOST_ENTRIES else entries
            self.nodes.append(Node(eqn, tuple(n for _, n in operands), entries.shape, kept, loops))
            return x, len(self.nodes) - 1

        def rule(eqn: Any, operands: list[Any]) -> list[Any]:
            values, results = [x for x, _ in operands], []
            if eqn.primitive.name == "scan":
                outs, results = self._scan(eqn, values, loops)
            else:
                outs = _jax.bind_equation(eqn, eqn.params, values)
            return [added(x, eqn, [*operands, *results]) for x in outs]

        return _jax.interpret(jaxpr, list(map(added, inputs)), rule, literal=lambda atom: added(atom.val))

    def _scan(self, eqn: Any, operands: Sequence[Any], loops: tuple[int, ...]) -> tuple[list[Any], Any]:
        """The results of a loop, and those of a turn with their places."""
        jaxpr, consts = _jax.open_jaxpr(eqn.params["jaxpr"])
        num_consts, num_carry = _jax.scan_counts(eqn)
        first, first_x, results = len(self.nodes), num_consts + num_carry, []

        def turn(carry: Any, xs: Any) -> tuple[Any, Any]:
            del self.nodes[first:]
            results[:] = self._record(jaxpr, [*consts, *operands[:num_consts], *carry, *xs], (*loops, first))
            values = [x for x, _ in results]
            return values[:num_carry], (values[num_carry:], [node.projections for node in self.nodes[first:]])

        order = {"length": eqn.params["length"], "reverse": eqn.params["reverse"]}
        carry, xs = list(operands[num_consts:first_x]), list(operands[first_x:])
        carry, (ys, projections) = jax.lax.scan(turn, carry, xs, **order)
        for node, stacked in zip(self.nodes[first:], projections, strict=True):
            node.projections = stacked[::-1] if eqn.params["reverse"] else stacked  # in the order of the turns
        return [*carry, *ys], results

    def computed(self, place: int) -> Node | None:
        """The value at a place; None of an input or a number."""
        return None if self.nodes[place].eqn is None else self.nodes[place]

    def first_missing(self, other: Recording, results: Iterable[int], tolerance: float) -> Node | None:
        """The value that is computed first among those behind these results that another program lacks."""
        rows_by_shape: dict[tuple[int, ...], list[Any]] = {}
        for node in other.nodes:
            rows_by_shape.setdefault(node.shape, []).append(node.projections.reshape(-1, 3))
        columns = {shape: np.sort(np.concatenate(rows), axis=0) for shape, rows in rows_by_shape.items()}
        absent = np.full((1, 3), np.inf)
        times: dict[int, list[int]] = {}
        pending = list(results)
        while pending:
            node = self.nodes[n := pending.pop()]
            if n in times or node.eqn is None:
                continue
            turns = np.argwhere(~_occurs(columns.get(node.shape, absent), node.projections, tolerance)).tolist()
            if turns:
                times[n] = [*itertools.chain(*zip(node.loops, turns[0], strict=True)), n]
                pending += node.operands
        return self.nodes[min(times, key=times.__getitem__)] if times else None


def _occurs(columns: Any, projections: Any, tolerance: float) -> Any:
    """Whether each value has all of its projections in sorted columns; each alone may be there by chance."""
    limits, occurs = tolerance * projections[..., 2], True
    for column, x in zip(columns.T, np.moveaxis(projections, -1, 0), strict=True):
        places = np.searchsorted(column, x)
        near = column[np.maximum(places - 1, 0)], column[np.minimum(places, len(column) - 1)]
        occurs &= np.minimum(*(abs(x - y) for y in near)) <= limits
    return occurs


def _projections(library: Any, x: Any) -> Any:
    """On two vectors, and the sum of magnitudes, along the last axis."""
    x = x.real + 1.7 * x.imag if library.iscomplexobj(x) else x
    # Masks are as large as can be: with their sum nothing else would count, and it overflows.
    limit = 1e19 if x.dtype.itemsize <= 4 else 1e154
    x = library.nan_to_num(x.astype(float), nan=0.37)
    x = library.where(abs(x) > limit, 1.7 * library.sign(x), x)
    n = library.arange(x.shape[-1], dtype=x.dtype)
    vectors = 2 + library.cos(1.3 * n), 2 + library.sin(0.7 * n)
    return library.stack([*((x * v).sum(-1) for v in vectors), abs(x).sum(-1)], -1)
