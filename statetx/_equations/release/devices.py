"""Consumers of stacks that leave a `jax.shard_map` move into it, as equations on shards.

An update from outside acts on whole arrays. On the shards of equal parts it has the same entries if each entry of a
result is computed from the entries of the operands at its place, or if every device has the whole arrays. Each operand
must have been divided as the gradient is: otherwise it would travel between devices.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from jax.sharding import NamedSharding, PartitionSpec

from ... import _jax
from ..._jax import Var
from ..dataflow import variables_of
from ..inline import hoist
from ..primitives import inner_jaxprs, row_of, size
from .consumers import Consumers

ANYWHERE = "anywhere"
"""The placement of a value that the compiler puts where readers need it. Others are a sharding, or None: unknown."""

Spec = tuple[tuple[str, ...], ...]
"""For each axis the axes of the mesh that divide it, up to the last one that is divided."""


def with_free_values(eqns: Sequence[Any], placements: Mapping[Var, Any]) -> dict[Var, Any]:
    """Add the values that are computed from such as are placed anywhere alone."""
    all_placements = dict(placements)
    for eqn in eqns:
        operands = [*variables_of(eqn)]
        if not row_of(eqn).places and all(all_placements.get(v) == ANYWHERE for v in operands):
            all_placements |= dict.fromkeys(eqn.outvars, ANYWHERE)
    return all_placements


def into_shard_map(call: Any, consumers: Consumers, placements: Mapping[Var, Any]) -> list[Any] | Any:
    """Move consumers into a shard_map: equations in its place, or the consumer that cannot move."""
    (inner,) = inner_jaxprs(call)
    specs = _specs_of(call, consumers)
    if not isinstance(specs, dict):
        return specs
    positions = {v: i for i, v in enumerate(call.invars) if isinstance(v, Var)}
    operands = []
    for v in (*consumers.stacked, *consumers.whole):
        spec = specs.get(v, ())
        if v not in positions or _spec(call, call.params["in_specs"][positions[v]]) != spec:
            if size(v) > 1 and not _is_divided(placements.get(v), call, spec):
                return next(e for e in consumers.eqns if v in e.invars)
            operands.append(v)

    outvars = [*(v for v in call.outvars if v not in consumers.stacks), *consumers.outvars]
    out_specs = dict(zip(call.outvars, call.params["out_specs"], strict=True))
    out_specs |= {v: PartitionSpec(*specs[v]) for v in consumers.outvars}
    in_specs = (*call.params["in_specs"], *(PartitionSpec(*specs.get(v, ())) for v in operands))
    params = {**call.params, "in_specs": in_specs, "out_specs": tuple([out_specs[v] for v in outvars])}
    like = call.replace(params=params)

    def on_device(*shards: Any) -> list[Any]:
        num = len(call.invars)
        values = dict(zip(call.outvars, _jax.evaluate(inner, (), shards[:num]), strict=True))
        values |= {v: shards[i] for v, i in positions.items()} | dict(zip(operands, shards[num:], strict=True))
        for eqn in consumers.eqns:
            args = [values[v] if isinstance(v, Var) else v.val for v in eqn.invars]
            values.update(
                zip(eqn.outvars, _jax.bind_on_shards(eqn, _local_params(eqn, call, specs), args), strict=True)
            )
        return [values[v] for v in outvars]

    def run(*args: Any) -> list[Any]:
        arrays = iter(args)
        operands_of_call = [next(arrays) if isinstance(v, Var) else v.val for v in call.invars]
        with call.ctx.manager:
            return _jax.shard_mapped(like, on_device)(*operands_of_call, *arrays)

    sources = [v for v in (*call.invars, *operands) if isinstance(v, Var)]
    jaxpr, consts = _jax.stage(run, [v.aval for v in sources], traced_for="jit", name="released")
    jaxpr, arrays = hoist(jaxpr, consts)
    assert not arrays, "an equation without constants on operands"
    outvars = [Var(v.aval) if _jax.is_dropped(v) else v for v in outvars]
    return _jax.spliced(jaxpr, sources, outvars, call)


def _specs_of(call: Any, consumers: Consumers) -> dict[Var, Spec] | Any:
    """How the arrays that consumers read and compute are divided; the consumer that cannot act on shards alone."""
    out_specs = zip(call.outvars, call.params["out_specs"], strict=True)
    stack_specs = {v: spec for v, spec in out_specs if v in consumers.stacks}
    if any(spec.unreduced for spec in stack_specs.values()):  # a shard is one of the terms of a sum
        return consumers.eqns[0]
    specs = {v: _spec(call, spec) for v, spec in stack_specs.items()}
    pending = [*consumers.eqns]
    while pending:
        eqn = next((e for e in pending if not specs.keys().isdisjoint([*variables_of(e), *e.outvars])), pending[0])
        arrays = [v for v in (*eqn.invars, *eqn.outvars) if isinstance(v, Var) and size(v) > 1]
        array_specs = {specs[v] for v in arrays if v in specs}
        if len(array_specs) != 1 or inner_jaxprs(eqn) or not (array_specs == {()} or _is_local(eqn)):
            return eqn
        specs |= dict.fromkeys(arrays, array_specs.pop())
        pending.remove(eqn)
    return specs


def _is_local(eqn: Any) -> bool:
    """Whether an equation computes each entry from the entries of its operands at its place."""
    shapes = {v.aval.shape for v in (*eqn.invars, *eqn.outvars)} - {()}
    is_filled = eqn.primitive.name == "broadcast_in_dim" and eqn.params["sharding"] is None
    return len(shapes) == 1 and (row_of(eqn).is_elementwise or (is_filled and not eqn.invars[0].aval.shape))


def _local_params(eqn: Any, call: Any, specs: Mapping[Var, Spec]) -> dict[str, Any]:
    if eqn.primitive.name != "broadcast_in_dim":
        return eqn.params
    return {**eqn.params, "shape": _local_shape(eqn.outvars[0].aval.shape, specs[eqn.outvars[0]], call)}


def _local_shape(shape: tuple[int, ...], spec: Spec, call: Any) -> tuple[int, ...]:
    sizes = call.params["mesh"].shape
    parts = [math.prod(sizes[axis] for axis in axes) for axes in spec]
    return tuple([n // k for n, k in zip(shape, [*parts, *[1] * len(shape)], strict=False)])


def _spec(call: Any, spec: Any) -> Spec:
    return _normalized(spec, call.params["newly_manual_axes"], call.params["mesh"].shape)


def _is_divided(placement: Any, call: Any, spec: Spec) -> bool:
    """Whether an operand from elsewhere is divided so, or may be."""
    if not isinstance(placement, NamedSharding):
        return placement == ANYWHERE
    sizes, axes = call.params["mesh"].shape, call.params["newly_manual_axes"]
    has_axes = all(placement.mesh.shape.get(axis) == sizes[axis] for axis in axes)
    return has_axes and _normalized(placement.spec, axes, sizes) == spec


def _normalized(spec: Any, axes: Collection[str], sizes: Mapping[str, int]) -> Spec:
    entries = [entry if isinstance(entry, tuple) else (entry,) for entry in spec.partitions]
    mesh_axes = [tuple([axis for axis in entry if axis in axes and sizes[axis] > 1]) for entry in entries]
    while mesh_axes and not mesh_axes[-1]:
        mesh_axes.pop()
    return tuple(mesh_axes)
