"""Equations that take the consumers of their stacked results in."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from ... import _jax
from ..._jax import Var
from ..inline import hoist
from ..primitives import inner_jaxprs
from ..rowwise import evaluate
from .consumers import Consumers
from .loops import RowLoop, with_jaxpr


def into_call(call: Any, consumers: Consumers) -> Any:
    """Move consumers into a region; from there they move into its loop."""
    (inner,) = inner_jaxprs(call)
    # An operand that the region has already is the same input.
    inputs = {v: i for v, i in zip(call.invars, inner.invars, strict=True) if isinstance(v, Var)}
    operands = [v for v in (*consumers.stacked, *consumers.whole) if v not in inputs]
    inputs |= {v: Var(v.aval) for v in operands}
    values: dict[Any, Any] = inputs | dict(zip(call.outvars, inner.outvars, strict=True))
    eqns = list(inner.eqns)
    for eqn in consumers.eqns:
        outvars = [Var(v.aval) for v in eqn.outvars]
        eqns.append(
            eqn.replace(invars=[values.get(v, v) if isinstance(v, Var) else v for v in eqn.invars], outvars=outvars)
        )
        values |= dict(zip(eqn.outvars, outvars, strict=True))

    outvars = [*(v for v in call.outvars if v not in consumers.stacks), *consumers.outvars]
    jaxpr = _jax.rebuild(
        inner,
        invars=[*inner.invars, *(inputs[v] for v in operands)],
        outvars=[values[v] for v in outvars],
        eqns=eqns,
    )
    return with_jaxpr(call, jaxpr).replace(invars=[*call.invars, *operands], outvars=outvars)


def into_scan(scan: Any, length: int, consumers: Consumers, views: dict[Var, Var]) -> list[Any]:
    """Move consumers into the body of a scan.

    Its constants get the whole operands and the stacks that are only read, its carry the stacks that are overwritten,
    and the number of the row.
    """
    body, consts = _jax.open_jaxpr(scan.params["jaxpr"])
    if consts:
        return []
    num_constants, num_carry = _jax.scan_counts(scan)
    first_x = num_constants + num_carry
    ys, targets = scan.outvars[num_carry:], list(consumers.in_place.values())
    returned = [v for v in ys if v not in consumers.stacks]
    added = [v for v in consumers.outvars if v not in consumers.in_place]

    # The loop itself reads rows of an overwritten stack from the carry, before they are overwritten.
    base = lambda v: views.get(v, v)
    of_targets = {base(v): v for v in targets}
    sources = [of_targets.get(base(v)) if isinstance(v, Var) else None for v in scan.invars[first_x:]]
    xs = [v for v, source in zip(scan.invars[first_x:], sources, strict=True) if source is None]
    x_vars = body.invars[first_x:]
    x_avals: list[Any] = [v.aval for v in x_vars]
    read = [v for v in consumers.stacked if v not in targets]
    step = -1 if scan.params["reverse"] else 1

    def turn(*args: Any) -> list[Any]:
        remaining = iter(args)
        take = lambda like: [next(remaining) for _ in like]
        constants, whole, stacks = take(range(num_constants)), take(consumers.whole), take(read)
        carry, overwritten, index = take(range(num_carry)), take(targets), next(remaining)
        arrays = dict(zip([*read, *targets], [*stacks, *overwritten], strict=True))
        values = {v: _block(x, index, length) for v, x in arrays.items()}

        elements = [
            next(remaining) if source is None else values[source].reshape(aval.shape)
            for source, aval in zip(sources, x_avals, strict=True)
        ]
        outs = _jax.evaluate(body, (), [*constants, *carry, *elements])
        values |= dict(zip(consumers.whole, whole, strict=True))
        values |= {v: y[None] for v, y in zip(ys, outs[num_carry:], strict=True) if v in consumers.stacks}
        evaluate(consumers.eqns, length, values)
        pairs = consumers.in_place.items()
        overwritten = [_with_block(arrays[v], values[out], index, length) for out, v in pairs]
        returned_ys = [y for v, y in zip(ys, outs[num_carry:], strict=True) if v not in consumers.stacks]
        return [*outs[:num_carry], *overwritten, index + step, *returned_ys, *(values[v] for v in added)]

    number = _jax.abstract(np.int32(0))
    invars, remaining_xs = scan.invars, [v for v, source in zip(x_vars, sources, strict=True) if source is None]
    constants = [*invars[:num_constants], *consumers.whole, *read]
    variables = [*body.invars[:num_constants], *consumers.whole, *read, *body.invars[num_constants:first_x], *targets]
    avals = [*(v.aval for v in variables), number, *(v.aval for v in remaining_xs)]
    jaxpr, new_consts = _jax.stage(turn, avals, traced_for="scan", name="released")
    if new_consts:
        return []

    first = _jax.Literal(np.int32(0 if step > 0 else length - 1), number)
    carry = [*invars[num_constants:first_x], *targets, first]
    new = _jax.with_scan_operands(scan, _jax.close(jaxpr, ()), constants, carry, xs)
    stacked = new.outvars[len(carry) + len(returned) :]
    outvars = [*scan.outvars[:num_carry], *consumers.in_place, new.outvars[len(carry) - 1], *returned]
    flat = [e for v, out in zip(stacked, added, strict=True) for e in _reshaped(v, out, scan)]
    return [new.replace(outvars=[*outvars, *stacked]), *flat]


def into_row_loop(eqn: Any, loop: RowLoop, consumers: Consumers) -> list[Any]:
    """Move consumers to where a loop of statetx writes its rows: equations in the place of the loop's.

    The buffers are the stacks that are overwritten, and a stack for each other result.
    """
    targets = list(consumers.in_place.values())
    stacks = eqn.outvars[-loop.num_stacks :]
    # It reads its own operands at other times than it writes rows.
    if any(v in eqn.invars for v in targets) or len(targets) < len(consumers.outvars) or [*stacks] != consumers.stacks:
        return []
    read = [v for v in consumers.stacked if v not in targets]
    sources = list(dict.fromkeys(v for v in (*eqn.invars, *consumers.whole, *read) if isinstance(v, Var)))

    def run(*args: Any) -> list[Any]:
        arrays = dict(zip(sources, args, strict=False))
        operands = [arrays[v] if isinstance(v, Var) else v.val for v in eqn.invars]

        def write(buffers: list[Any], index: Any, rows: list[Any]) -> list[Any]:
            current = arrays | dict(zip(targets, buffers, strict=True))
            values = {v: current[v] for v in consumers.whole}
            values |= {v: _block(current[v], index, loop.length) for v in (*read, *targets)}
            values |= {v: row[None] for v, row in zip(stacks, rows, strict=True)}
            evaluate(consumers.eqns, loop.length, values)
            outs = consumers.in_place.items()
            return [_with_block(current[v], values[out], index, loop.length) for out, v in outs]

        return loop.run(operands, list(args[len(sources) :]), write)

    jaxpr, consts = _jax.stage(run, [v.aval for v in (*sources, *targets)], traced_for="scan", name="released")
    jaxpr, arrays = hoist(jaxpr, consts)
    if any(isinstance(x, _jax.Tracer) for x in arrays):
        return []
    outvars = [*eqn.outvars[: -loop.num_stacks], *consumers.in_place]
    outvars = [Var(v.aval) if _jax.is_dropped(v) else v for v in outvars]
    literals = [_jax.Literal(x, v.aval) for x, v in zip(arrays, jaxpr.invars, strict=False)]
    return _jax.spliced(jaxpr, [*literals, *sources, *targets], outvars, eqn)


def _block(x: Any, index: Any, length: int) -> Any:
    """The rows of a stack that belong to a turn of the loop."""
    num = x.shape[0] // length
    start = (index * num if num > 1 else index, *[0] * (x.ndim - 1))
    return jax.lax.dynamic_slice(x, start, (num, *x.shape[1:]), allow_negative_indices=False)


def _with_block(x: Any, block: Any, index: Any, length: int) -> Any:
    num = x.shape[0] // length
    start = (index * num if num > 1 else index, *[0] * (x.ndim - 1))
    return jax.lax.dynamic_update_slice(x, block.astype(x.dtype), start, allow_negative_indices=False)


def _reshaped(v: Var, out: Var, like: Any) -> list[Any]:
    """Equations that reshape one variable to another."""
    aval: Any = out.aval
    jaxpr, _ = _jax.stage(lambda x: [x.reshape(aval.shape)], [v.aval], traced_for="scan", name="released")
    return _jax.spliced(jaxpr, [v], [out], like)
