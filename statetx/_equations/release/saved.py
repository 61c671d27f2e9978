"""The rows of a loop's stacks from values that an earlier run has saved.

A step of a backward pass computes the cotangent of its input, which the next step needs, and gradients of its weights,
which no step needs. These are products of the layer's inputs with cotangents: half of the operations.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from ... import _jax
from ..._jax import Jaxpr, Var
from ..._tree import num_bytes
from ..dataflow import variables_of
from ..inline import inline
from ..primitives import FUSED, INLINED, JIT, REMAT, inner_jaxprs

_MOST = 1 / 8  # of the bytes of the stacks, which would exist otherwise


def rows_from_saved(scan: Any, stacks: Collection[Var]) -> tuple[Any, Any] | None:
    """A scan that also returns what its stacks are computed from, and one without a carry that computes them from it;
    None if that is large.
    """
    if scan.primitive.name != "scan":
        return None
    body, consts = _jax.open_jaxpr(scan.params["jaxpr"])
    regions = [e for e in body.eqns if e.primitive.name in REMAT]
    # Without the border of an inner region, XLA would merge its two computations.
    if consts or any(e.primitive.name in REMAT for region in regions for e in inner_jaxprs(region)[0].eqns):
        return None
    is_placed = lambda eqn: eqn.primitive.name in JIT and not _jax.is_unplaced(eqn)
    body = inline(body, calls=INLINED - {"statetx_loop"}, deep=False, unless=is_placed)
    num_constants, num_carry = _jax.scan_counts(scan)
    first_x = num_constants + num_carry
    available = {*body.invars[:num_constants], *body.invars[first_x:]}
    is_stack = [v in stacks for v in scan.outvars]
    rows = [v for v, flag in zip(body.outvars, is_stack, strict=True) if flag]
    eqns, saved = _cut(body, [v for v, flag in zip(body.outvars, is_stack, strict=True) if not flag], rows, available)
    length = scan.params["length"]
    if length * sum(num_bytes(v.aval) for v in saved) > _MOST * sum(num_bytes(v.aval) for v in stacks):
        return None

    invars = scan.invars
    constants, carry, xs = invars[:num_constants], invars[num_constants:first_x], invars[first_x:]
    jaxpr = _jax.rebuild(body, invars=body.invars, outvars=[*body.outvars, *saved])
    first = _jax.with_scan_operands(scan, _jax.close(jaxpr, ()), constants, carry, xs)
    saved_stacks = first.outvars[len(scan.outvars) :]
    first = first.replace(outvars=[*scan.outvars, *saved_stacks])

    read = {v for e in eqns for v in variables_of(e)} | {v for v in rows if isinstance(v, Var)}
    used_constants = [i for i in range(num_constants) if body.invars[i] in read]
    used_xs = [i for i in range(first_x, len(invars)) if body.invars[i] in read]
    inputs = [*(body.invars[i] for i in (*used_constants, *used_xs)), *saved]
    jaxpr = _jax.rebuild(body, invars=inputs, outvars=rows, eqns=eqns)
    xs = [*(invars[i] for i in used_xs), *saved_stacks]
    second = _jax.with_scan_operands(scan, _jax.close(jaxpr, ()), [invars[i] for i in used_constants], [], xs)
    return first, second.replace(outvars=[v for v in scan.outvars if v in stacks])


def _cut(body: Jaxpr, other_outs: list[Any], rows: list[Any], available: set[Var]) -> tuple[list[Any], list[Var]]:
    """The equations that compute the rows from available and saved values, and the latter.

    Args:
        others: the other outputs. What these need is saved, unless it is fused into its readers, and its operands are
            as small.
    """
    needed, first_only = {*other_outs}, set()
    for eqn in reversed(body.eqns):
        if eqn.effects or not needed.isdisjoint(eqn.outvars):
            first_only.add(eqn)
            needed.update(variables_of(eqn))
    producers = {v: e for e in first_only if not e.effects and e.primitive.name in FUSED for v in e.outvars}
    while True:
        row_inputs, eqns = {v: None for v in rows if isinstance(v, Var)}, []
        for eqn in reversed(body.eqns):
            if eqn not in first_only and not row_inputs.keys().isdisjoint(eqn.outvars):
                eqns.insert(0, eqn)
                row_inputs |= dict.fromkeys(variables_of(eqn))
        computed = {v for e in eqns for v in e.outvars}
        saved = [v for v in row_inputs if v not in computed and v not in available]
        at_hand = available | {*saved}
        repeated = [
            e
            for v in saved
            if (e := producers.get(v)) is not None
            and e in first_only
            and num_bytes([x.aval for x in variables_of(e) - at_hand]) <= num_bytes(v.aval)
        ]
        if not repeated:
            return eqns, saved
        first_only -= {*repeated}
