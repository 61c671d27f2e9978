"""Meshes: manual axes, types that vary along them."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.core
from jax._src import config as _config
from jax._src import core as _core
from jax._src import mesh as _mesh
from jax._src.lax.control_flow import loops as _loops

from .._targets import current
from .editing import closed_like, map_jaxprs
from .equations import Jaxpr, Literal, Var, inner_jaxprs, open_jaxpr
from .evaluation import bind_equation, interpret
from .traces import _context, eager_trace


@dataclasses.dataclass(frozen=True)
class Manual:
    """The `jax.shard_map` that code runs in: its mesh, its manual axes, and whether types show varying axes
    (`check_vma`).
    """

    mesh: Any
    axes: tuple[str, ...]
    is_checked: bool


def enclosing_shard_map() -> Manual | None:
    """The `jax.shard_map` that encloses the running code, or None."""
    mesh = jax.sharding.get_abstract_mesh()
    axes = tuple(mesh.manual_axes)
    return Manual(mesh, axes, _config._check_vma.value) if axes else None


def concrete_mesh(mesh: Any) -> Any:
    """A mesh of devices for an abstract mesh: the current mesh if its shape is the same, else one of the first devices.

    Where this machine has fewer devices, the program is for a target, which needs none of them: the mesh stays
    abstract.
    """
    in_force = _mesh.get_concrete_mesh()
    if in_force.shape_tuple == mesh.shape_tuple:
        return in_force
    # Axes are manual only inside a shard_map. A program that is compiled by itself has them automatic.
    auto, manual = jax.sharding.AxisType.Auto, jax.sharding.AxisType.Manual
    types = tuple([auto if t == manual else t for t in mesh.axis_types])
    devices = current.first_devices(mesh.size)
    if len(devices) < mesh.size:
        return jax.sharding.AbstractMesh(mesh.axis_sizes, mesh.axis_names, axis_types=types)
    return jax.make_mesh(mesh.axis_sizes, mesh.axis_names, axis_types=types, devices=devices)


def varying_axes(aval: Any) -> frozenset[str]:
    """The axes of a `jax.shard_map` along which values of this type vary; empty if types do not show them."""
    manual = getattr(aval, "mat", None)  # types of arrays and Refs have it
    return frozenset() if manual is None else manual.varying


def as_varying(x: Any, axes: Sequence[str]) -> Any:
    """Cast `x` to a type that varies along these axes of a `jax.shard_map`, if types show them."""
    # `pcast` refuses an axis along which the value varies already.
    missing = tuple([a for a in axes if a not in varying_axes(jax.typeof(x))])
    return jax.lax.pcast(x, missing, to="varying") if missing and _config._check_vma.value else x


def varying_like(x: Any, y: Any) -> Any:
    """Cast `x` to a type that varies along the same axes as `y`."""
    return as_varying(x, tuple(varying_axes(jax.typeof(y))))


def psum_like(x: Any, y: Any) -> Any:
    """The sum of `x` over the axes of a `jax.shard_map` along which the type of `y` does not vary."""
    axes = tuple(varying_axes(jax.typeof(x)) - varying_axes(jax.typeof(y)))
    return jax.lax.psum(x, axes) if axes else x


@contextlib.contextmanager
def outside_all_transforms() -> Iterator[None]:
    """A context outside every trace, `jax.vmap` and `jax.shard_map`."""
    # The trace alone is not enough: axis names, the abstract mesh and `check_vma` are settings of their own.
    mesh = _mesh.get_concrete_mesh().abstract_mesh
    axes = _context.axis_env
    with _core.set_current_trace(eager_trace), jax.sharding.use_abstract_mesh(mesh), _config._check_vma(False):
        _context.set_axis_env(_core.top_axis_env)
        try:
            yield
        finally:
            _context.set_axis_env(axes)


@contextlib.contextmanager
def inside_shard_map(manual: Manual) -> Iterator[None]:
    """A context with the mesh, the axis names and the types of a `jax.shard_map`, outside of its trace."""
    axes = [(name, size) for name, size in manual.mesh.shape.items() if name in manual.axes]
    with (
        _core.extend_axis_env_nd(axes),
        jax.sharding.use_abstract_mesh(manual.mesh),
        _config._check_vma(manual.is_checked),
    ):
        yield


def replicated(x: Any) -> Any:
    """Put `x` on the current mesh, replicated, if the mesh has explicit axes and the type of `x` names no mesh."""
    if not has_explicit_axes() or not jax.typeof(x).sharding.mesh.empty:
        return x
    return jax.sharding.reshard(x, jax.P())


def empty(length: int, aval: Any) -> Any:
    """An uninitialized array for `length` values of type `aval`."""
    # The function that JAX's own scan makes its ys with: zeros would be written once before they are overwritten.
    return replicated(_loops._empty_array((length,), (None,), aval))


def with_divisible_axis(x: Any, size: int) -> Any:
    """Gather the first axis of `x` if it is sharded along explicit mesh axes whose sizes do not divide `size`."""
    sharding = jax.typeof(x).sharding
    partitions = sharding.spec.partitions
    axes = partitions[0] if partitions else None
    names = axes if isinstance(axes, tuple) else () if axes is None else (axes,)
    num_shards = math.prod(sharding.mesh.shape[name] for name in names)
    return x if size % num_shards == 0 else jax.sharding.reshard(x, sharding.spec.update((None, *partitions[1:])))


def has_explicit_axes() -> bool:
    """Whether the current mesh has explicit axes: types show shardings along them."""
    return jax.sharding.AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types


def with_varying_inputs(jaxpr: Jaxpr, args: Sequence[Any]) -> list[Any]:
    """Evaluate a jaxpr on values that vary along more axes of a `jax.shard_map` than the inputs it was staged for."""
    return interpret(jaxpr, args, _run_varying)


def _run_varying(eqn: Any, operands: list[Any]) -> list[Any]:
    name = eqn.primitive.name
    if name == "pvary":
        # Some axes vary already now, which the primitive would refuse.
        return [as_varying(x, eqn.params["axes"]) for x in operands]
    if name == "jit":
        inner, consts = open_jaxpr(eqn.params["jaxpr"])
        with eqn.ctx.manager:
            return with_varying_inputs(inner, [*consts, *operands])
    # The functions of `jax.lax` cast operands to vary alike; a primitive that is bound directly refuses operands that
    # differ.
    if not any(True for _ in inner_jaxprs(eqn)):
        axes = sorted(frozenset().union(*(varying_axes(jax.typeof(x)) for x in operands)))
        operands = [as_varying(x, axes) for x in operands]
    return bind_equation(eqn, eqn.params, operands)


def bind_on_shards(eqn: Any, params: dict[str, Any], operands: Sequence[Any]) -> list[Any]:
    """Run an equation from outside of a `jax.shard_map` inside of it, on shards."""
    axes = sorted(frozenset().union(*(varying_axes(jax.typeof(x)) for x in operands)))
    return bind_equation(eqn, params, [as_varying(x, axes) for x in operands], contextlib.nullcontext())


def is_divided_first(aval: Any) -> bool:
    """Whether explicit axes of a mesh divide an array of this type along its first axis."""
    return isinstance(aval, jax.core.ShapedArray) and aval.sharding.spec.partitions[:1] not in ((), (None,))


def is_partial_sum(aval: Any) -> bool:
    """Whether the shards of an array of this type are terms of a sum, over explicit axes of its mesh."""
    return isinstance(aval, jax.core.ShapedArray) and bool(aval.sharding.spec.unreduced)


def on_current_mesh(x: Any) -> Any:
    """A jaxpr that was staged in a `jax.shard_map`, at any depth with the types that its values have there.

    The type of a `jax.Ref` from outside, and of the values read from it, names the mesh outside, and JAX refuses to
    make zeros of this type.
    """
    mesh = jax.sharding.get_abstract_mesh()
    jaxpr, _ = open_jaxpr(x)
    new: dict[Any, Any] = {}

    def renamed(v: Any) -> Any:
        if isinstance(v, Literal):
            return v
        if v in new:
            return new[v]
        sharding = v.aval.sharding if isinstance(v.aval, jax.core.ShapedArray) else None
        if sharding is None or sharding.mesh == mesh or sharding.mesh.axis_names != mesh.axis_names:
            return v
        new[v] = Var(v.aval.update(sharding=sharding.update(mesh=mesh)))
        return new[v]

    names = lambda variables: [renamed(v) for v in variables]
    inner = [map_jaxprs(on_current_mesh, eqn) for eqn in jaxpr.eqns]
    eqns = [eqn.replace(invars=names(eqn.invars), outvars=names(eqn.outvars)) for eqn in inner]
    if not new and all(map(operator.is_, inner, jaxpr.eqns)):
        return x
    jaxpr = jaxpr.replace(
        constvars=names(jaxpr.constvars), invars=names(jaxpr.invars), outvars=names(jaxpr.outvars), eqns=eqns
    )
    return closed_like(x, jaxpr)


def shard_mapped(eqn: Any, fun: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """The `jax.shard_map` of an equation, with another function of the shards."""
    params = eqn.params
    return jax.shard_map(
        fun,
        mesh=params["mesh"],
        in_specs=tuple(params["in_specs"]),
        out_specs=list(params["out_specs"]),
        axis_names=set(params["newly_manual_axes"]),
        check_vma=params["check_vma"],
    )


@contextlib.contextmanager
def in_shard_maps(*eqns: Any) -> Iterator[None]:
    """A context with the mesh and axes that bodies of these equations were traced in; `eqns` are nested, outermost
    first.
    """
    with contextlib.ExitStack() as stack:
        for params in (eqn.params for eqn in eqns if eqn.primitive.name == "shard_map"):
            mesh, axes = params["mesh"], params["newly_manual_axes"]
            # `newly_manual_axes` are this shard_map's own; an enclosing one's axes are manual on its mesh already.
            manual = axes | set(mesh.manual_axes)
            stack.enter_context(_core.extend_axis_env_nd([(k, v) for k, v in mesh.shape.items() if k in manual]))
            types = dict.fromkeys(axes, jax.sharding.AxisType.Manual)
            stack.enter_context(jax.sharding.use_abstract_mesh(mesh.abstract_mesh.update_axis_types(types)))
            stack.enter_context(_config._check_vma(params["check_vma"]))
        yield


def num_mapped(eqn: Any) -> int:
    """The number of devices along the axes of the mesh that a shard_map maps itself."""
    mesh, names = eqn.params["mesh"], ("newly_manual_axes", "manual_axes")
    axes = next((eqn.params[name] for name in names if name in eqn.params), mesh.axis_names)
    return math.prod(mesh.shape[axis] for axis in axes)
