"""Functions that consist of a `jax.shard_map`: what runs on a device is planned in their place.

Where the gradient is taken around a shard_map, the differentiated function has one equation, and its regions are in the
body of that. A loss that is a shard_map is planned as the step that takes its gradient (`_search.capture`).
JAX differentiates the body on its own: what the backward pass of a device reads is what the regions of the body save.
So the body is a program like any other, with the shapes of a device, and a rewritten one goes back into the shard_map.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

from ... import _jax
from ..._equations.flops import flops
from ..._equations.structure import Body
from ..._jax import Jaxpr
from .flat import Flat, cotangent_variables, flatten

Rewrite = Callable[[Any, Body, str, int], Callable]


def of_device(rewrite: Rewrite) -> Rewrite:
    """Let a method `Rewriter.rewrite` rewrite what runs on a device, in place of a function that consists of a
    shard_map.
    """

    @functools.wraps(rewrite)
    def rewrite_of_device(self: Any, body: Body, name: str, num_out: int) -> Callable:
        # Most programs have none, and long ones take a while to be flattened.
        if not _contains_shard_map(body.jaxpr):
            return rewrite(self, body, name, num_out)
        program = Flat(flatten(body.jaxpr)).jaxpr
        eqn = shard_map_of(program)
        if eqn is None:
            return rewrite(self, body, name, num_out)

        # The outputs with a cotangent come first, as in every program to plan.
        with_cotangent = cotangent_variables(program, num_out)
        order = sorted(range(len(eqn.outvars)), key=lambda i: eqn.outvars[i] not in with_cotangent)
        inner = eqn.params["jaxpr"]
        inner = _jax.rebuild(inner, invars=inner.invars, outvars=[inner.outvars[i] for i in order])
        with _jax.in_shard_maps(eqn):  # a rewriter may stage it
            rewritten = rewrite(self, Body(inner, []), name, sum(v in with_cotangent for v in eqn.outvars))

        def on_device(*shards: Any) -> list[Any]:
            outs = dict(zip(order, rewritten([], *shards), strict=True))
            return [outs[i] for i in range(len(order))]

        def rule(e: Any, operands: list[Any]) -> Sequence[Any]:
            return (
                _jax.shard_mapped(eqn, on_device)(*operands) if e is eqn else _jax.bind_equation(e, e.params, operands)
            )

        return lambda operands, *args: _jax.interpret(program, [*operands, *args], rule)

    return rewrite_of_device


def is_on_devices(jaxpr: Jaxpr) -> bool:
    """Whether a program consists of a shard_map."""
    return _contains_shard_map(jaxpr) and shard_map_of(Flat(flatten(jaxpr)).jaxpr) is not None


def shard_map_of(program: Jaxpr) -> Any:
    """The shard_map with more than half of the operations of a flat program; None if it has none."""
    operations = [_operations(eqn) for eqn in program.eqns]
    for eqn, num in zip(program.eqns, operations, strict=True):
        if eqn.primitive.name == "shard_map" and 2 * num > sum(operations):
            return eqn
    return None


def _contains_shard_map(jaxpr: Jaxpr) -> bool:
    return any(
        e.primitive.name == "shard_map" or any(map(_contains_shard_map, _jax.inner_jaxprs(e))) for e in jaxpr.eqns
    )


def _operations(eqn: Any) -> int:
    """Operations on all devices together."""
    if eqn.primitive.name != "shard_map":
        return flops(eqn)
    return flops(eqn) * math.prod(eqn.params["mesh"].shape[axis] for axis in eqn.params["newly_manual_axes"])
