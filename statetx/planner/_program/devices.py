"""Programs that consist of a shard_map, rewritten on a device."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import TypeVar

from ... import _jax
from ..._equations.primitives import flops
from ..._equations.structure import Body
from ..._jax import Array, ArrayFunction, Arrays, Eqn, Jaxpr
from ..._remat.rewriter import Rewriter
from .flat import Flat, cotangent_variables, flatten

# Where a gradient is taken around a `jax.shard_map`, the differentiated function has one equation, and its regions are
# in the body of that. (A loss that is a shard_map is planned as the step that takes its gradient, `_search.capture`.)
# JAX differentiates the body on its own: the backward pass of a device reads the saved values of the body's regions. So
# the body is a program like any other, with the shapes of a device, and a rewritten one goes back into the shard_map.

R = TypeVar("R", bound=Rewriter)
Rewrite = Callable[[R, Body, str, int], ArrayFunction]


def of_device(rewrite: Rewrite[R]) -> Rewrite[R]:
    """Let a method `Rewriter.rewrite` rewrite what runs on a device, in place of a function that consists of a
    shard_map.
    """

    @functools.wraps(rewrite)
    def rewrite_of_device(self: R, body: Body, name: str, num_out: int) -> ArrayFunction:
        parts = _with_shard_map(body.jaxpr)
        if parts is None:
            return rewrite(self, body, name, num_out)
        program, eqn = parts

        # The outputs with a cotangent come first, as in every program to plan.
        with_cotangent = cotangent_variables(program, num_out)
        order = sorted(range(len(eqn.outvars)), key=lambda i: eqn.outvars[i] not in with_cotangent)
        inner = eqn.params["jaxpr"]
        inner = _jax.rebuild(inner, invars=inner.invars, outvars=[inner.outvars[i] for i in order])
        with _jax.in_shard_maps(eqn):  # a rewriter may stage it
            rewritten = rewrite(self, Body(inner, []), name, sum(v in with_cotangent for v in eqn.outvars))

        def on_device(*shards: Array) -> Arrays:
            outs = dict(zip(order, rewritten([], *shards), strict=True))
            return [outs[i] for i in range(len(order))]

        def rule(e: Eqn, operands: Arrays) -> Arrays:
            return (
                _jax.shard_mapped(eqn, on_device)(*operands) if e is eqn else _jax.bind_equation(e, e.params, operands)
            )

        def run(operands: Sequence[Array], *args: Array) -> Arrays:
            return _jax.interpret(program, [*operands, *args], rule)

        return run

    return rewrite_of_device


def is_on_devices(jaxpr: Jaxpr) -> bool:
    """Whether a program consists of a shard_map."""
    return _with_shard_map(jaxpr) is not None


def _with_shard_map(jaxpr: Jaxpr) -> tuple[Jaxpr, Eqn] | None:
    """A program, flat, with the shard_map that has more than half of its operations; None if it has none."""
    # Most programs have none, and long ones take a while to be flattened.
    if all(eqn.primitive.name != "shard_map" for eqn in _jax.equations_in(jaxpr)):
        return None
    program = Flat(flatten(jaxpr)).jaxpr
    operations = [_operations(eqn) for eqn in program.eqns]
    for eqn, num in zip(program.eqns, operations, strict=True):
        if eqn.primitive.name == "shard_map" and 2 * num > sum(operations):
            return program, eqn
    return None


def _operations(eqn: Eqn) -> int:
    """Operations on all devices together."""
    if eqn.primitive.name != "shard_map":
        return flops(eqn)
    return flops(eqn) * math.prod(eqn.params["mesh"].shape[axis] for axis in eqn.params["newly_manual_axes"])
