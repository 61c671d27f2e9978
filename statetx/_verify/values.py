"""The first value that two programs compute differently, found by the values of all their equations.

A value of one program is found in the other if a value of this shape has the same two projections there: equations need
not be in the same places. From a result that differs, the search goes back through operands that are not found, to an
equation whose operands all are.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
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

_MOST_ENTRIES = 2**14  # of a value that a program returns as a whole


@dataclasses.dataclass(eq=False)
class Node:
    """A value.

    Attributes:
        eqn: its equation; None for inputs and numbers.
        operands: by their places in the list that the node is in.
        projections: see `_projections`; before that axis there is one for each loop. The entries, until it has run.
        body, ends: of a loop, the values of a turn, and the places of its results in that list.
        is_found: for each turn, whether the other program has the value.
    """

    eqn: Any
    operands: tuple[int, ...]
    shape: tuple[int, ...]
    projections: Any
    body: Sequence[Node] = ()
    ends: Sequence[int] = ()
    is_found: Any = True

    @property
    def line(self) -> str:
        return "{}:{}".format(*user_line(self.eqn)[:2])

    def __str__(self) -> str:
        file, line, function = user_line(self.eqn)
        where = f"{file}:{line} in {function}" if file else "a line of a library"
        return f"{self.eqn.primitive.name} {type_str(self.eqn.outvars[0].aval, weak=False)} at {where}"


class Recording:
    """The values of a program for some inputs: `nodes`; `outputs` are the places of its results."""

    def __init__(self, body: Body, arrays: Sequence[Any], options: Mapping[str, Any]):
        self.nodes: list[Node] = []
        self.outputs: list[int] = []
        jaxpr, inputs = inline(body.jaxpr, calls=INLINED), [*body.operands, *arrays]

        def run(*inputs: Any) -> list[Any]:
            self.nodes = []
            self.outputs = [n for _, n in _record(self.nodes, jaxpr, inputs)]
            return [node.projections for node in _all(self.nodes)]

        program = jax.jit(run).lower(*inputs).compile(compiler_options=dict(options))
        for node, x in zip(_all(self.nodes), map(host_array, program(*inputs)), strict=True):
            is_whole = math.prod(node.shape) <= _MOST_ENTRIES
            turns = x.shape[: x.ndim - (len(node.shape) if is_whole else 1)]
            node.projections = _projections(np, x.reshape(*turns, math.prod(node.shape))) if is_whole else x


def _record(nodes: list[Node], jaxpr: Any, inputs: Sequence[Any]) -> list[tuple[Any, int]]:
    """Evaluate a jaxpr and add its values to `nodes`; its results, each with its place."""

    def added(x: Any, eqn: Any = None, operands: Sequence[Any] = (), **body: Any) -> tuple[Any, int]:
        entries = _entries(jnp.asarray(x))
        shape = jax.eval_shape(jax.random.key_data, x).shape if is_key(x) else jnp.shape(x)
        nodes.append(Node(eqn, tuple(n for _, n in operands), shape, entries, **body))
        return x, len(nodes) - 1

    def rule(eqn: Any, operands: list[Any]) -> list[Any]:
        values, body = [x for x, _ in operands], {}
        if eqn.primitive.name == "scan":
            outs, body = _scan(eqn, values)
        else:
            outs = _jax.bind_equation(eqn, eqn.params, values)
        return [added(x, eqn, operands, **body) for x in outs]

    return _jax.interpret(jaxpr, list(map(added, inputs)), rule, literal=lambda atom: added(atom.val))


def _scan(eqn: Any, operands: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
    """The results of a loop, and the values of its turns."""
    jaxpr, consts = _jax.open_jaxpr(eqn.params["jaxpr"])
    num_consts, num_carry = _jax.scan_counts(eqn)
    first_x, nodes, ends = num_consts + num_carry, [], []

    def turn(carry: Any, xs: Any) -> tuple[Any, Any]:
        nodes.clear()
        outs = _record(nodes, jaxpr, [*consts, *operands[:num_consts], *carry, *xs])
        ends[:] = [n for _, n in outs]
        values = [x for x, _ in outs]
        return values[:num_carry], (values[num_carry:], [node.projections for node in _all(nodes)])

    order = {"length": eqn.params["length"], "reverse": eqn.params["reverse"]}
    carry, (ys, projections) = jax.lax.scan(turn, list(operands[num_consts:first_x]), list(operands[first_x:]), **order)
    for node, stacked in zip(_all(nodes), projections, strict=True):
        node.projections = stacked
    return [*carry, *ys], {"body": nodes, "ends": ends}


def _all(nodes: Sequence[Node]) -> Iterator[Node]:
    """The nodes with those in loops, which the results of a loop share."""
    previous: Any = None
    for node in nodes:
        if node.body is not previous:
            yield from _all(node.body)
        previous = node.body
        yield node


def _entries(x: Any) -> Any:
    """The value as the program returns it: of a large one its projections, which take less memory."""
    x = jax.random.key_data(x) if is_key(x) else x
    return _projections(jnp, x.reshape(-1)) if x.size > _MOST_ENTRIES else x


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


def first_values(
    actual: Recording, expected: Recording, pairs: Sequence[tuple[int, int]], tolerance: float
) -> list[Node | None]:
    """Where results begin to differ, in each of the two programs; None where all its values occur in the other.

    Args:
        pairs: the places of results that differ.
        tolerance: relative, within which values are equal.
    """
    _find(actual, expected, tolerance)
    _find(expected, actual, tolerance)
    return [_first(r.nodes, [pair[n] for pair in pairs]) for n, r in enumerate((actual, expected))]


def _find(recording: Recording, other: Recording, tolerance: float) -> None:
    rows_by_shape: dict[tuple[int, ...], list[Any]] = {}
    for node in _all(other.nodes):
        rows_by_shape.setdefault(node.shape, []).append(node.projections.reshape(-1, 3)[:, :2])
    tables = {shape: _sorted(np.concatenate(rows)) for shape, rows in rows_by_shape.items()}
    for node in _all(recording.nodes):
        if node.eqn is None or node.shape not in tables:
            node.is_found = np.full(node.projections.shape[:-1], node.eqn is None)
            continue
        is_found = _are_in(tables[node.shape], node.projections.reshape(-1, 3), tolerance)
        node.is_found = is_found.reshape(node.projections.shape[:-1])


def _sorted(rows: Any) -> Any:
    """The different rows, in the order of their first entries."""
    rows = rows[np.lexsort(rows.T[::-1])]
    return rows[np.append(True, (rows[1:] != rows[:-1]).any(-1))]


def _are_in(table: Any, projections: Any, tolerance: float) -> Any:
    """Whether each of the values is in a table, by two projections; the table is `_sorted`."""
    values, limits = projections[:, :2], tolerance * projections[:, 2]
    # Those whose first projection is near: in loops of many turns most of the table is not.
    places = np.searchsorted(table[:, 0], np.nextafter(values[:, 0] - limits, -np.inf))
    ends = np.searchsorted(table[:, 0], np.nextafter(values[:, 0] + limits, np.inf), side="right")
    is_found, left = np.zeros(len(values), bool), np.flatnonzero(places < ends)
    while left.size:
        is_found[left] = np.abs(values[left] - table[places[left]]).max(-1) <= limits[left]
        places[left] += 1
        left = left[~is_found[left] & (places[left] < ends[left])]
    return is_found


def _first(nodes: Sequence[Node], starts: Sequence[int], turn: tuple[int, ...] = ()) -> Node | None:
    """The first value that is not found, though all of its operands are, behind these results."""
    pending, seen, roots = list(starts), set(), []
    while pending:
        n = pending.pop()
        if n in seen or nodes[n].is_found[turn]:
            continue
        seen.add(n)
        missing = [m for m in nodes[n].operands if not nodes[m].is_found[turn]]
        pending += missing
        roots += [n] * (not missing)
    if not roots:
        return None
    root = nodes[min(roots)]
    turns = range(root.eqn.params["length"]) if root.body else ()
    for i in reversed(turns) if root.body and root.eqn.params["reverse"] else turns:
        if (first := _first(root.body, root.ends, (*turn, i))) is not None:
            return first
    return root


def first_unstable(a: Recording, b: Recording) -> Node | None:
    """The first value that two runs of one program do not have in common."""
    for x, y in zip(_all(a.nodes), _all(b.nodes), strict=False):
        if x.eqn is not None and (x.shape != y.shape or not np.array_equal(x.projections, y.projections)):
            return x
    return None
