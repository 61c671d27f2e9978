"""`Around`: what a piece of a program runs under, so that the piece is measured as it will run.

A loop or a region is compiled on its own to learn its memory. Memory of one device depends on three things that its equations
do not say: every `jax.vmap` around it, the `jax.shard_map` around it, and the shardings of its inputs. The types of inputs name
explicit axes. Of automatic axes only arrays know, so that a tracer which stands for an array is noted with the array's
sharding. A value that is computed on automatic axes has none before the whole program is compiled: it is left open, and the
compiler propagates the shardings of the others to it. Where it cannot, the value counts as whole, so that the memory measured is
an upper bound.
"""

from __future__ import annotations

import dataclasses
import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from .. import _jax
from .._equations.compiled import Program
from .._tree import num_bytes

Map = tuple[Any, tuple[bool, ...]]
"""A `jax.vmap`: its axis, and for each input whether it is mapped."""


@dataclasses.dataclass(frozen=True)
class TraceContext:
    """What a program runs under.

    Attributes:
        maps: every `jax.vmap`, innermost first.
        shardings: of each input, its mapped axes in front; None where unknown. Fewer than inputs: of the first.
        manual: the `jax.shard_map`.
    """

    maps: tuple[Map, ...] = ()
    shardings: tuple[NamedSharding | None, ...] = ()
    manual: _jax.Manual | None = None

    @classmethod
    def of(cls, values: Sequence[Any]) -> TraceContext:
        """What surrounds the current trace, in which these are the inputs."""
        vmaps = _jax.enclosing_vmaps()
        flags = zip(*(_jax.mapped_in_each(x, vmaps) for x in values), strict=True)
        maps = [(vmap.axis_data, of_vmap) for vmap, of_vmap in zip(vmaps, flags, strict=False)]
        manual = _jax.enclosing_shard_map()
        shardings = () if manual else tuple(map(sharding_of, values))
        return cls(tuple([m for m in maps if any(m[1])]), shardings if any(shardings) else (), manual)

    @property
    def num_examples(self) -> int:
        return math.prod(axis.size for axis, _ in self.maps)

    def with_vmap(self, axis: Any, is_mapped: Sequence[bool]) -> TraceContext:
        """The same under one more `jax.vmap`, the outermost."""
        flags = (*is_mapped, *[True] * (len(self.shardings) - len(is_mapped)))
        in_front = lambda s: NamedSharding(s.mesh, PartitionSpec(None, *s.spec))  # noqa: E731
        shardings = [s and (in_front(s) if flag else s) for s, flag in zip(self.shardings, flags, strict=False)]
        return TraceContext((*self.maps, (axis, tuple(is_mapped))), tuple(shardings), self.manual)

    def for_other_inputs(self) -> TraceContext:
        """The same for a part of the program with other inputs, all of them mapped."""
        maps = tuple([(axis, ()) for axis, _ in self.maps])
        return TraceContext(maps, (), self.manual)

    def bind_axes(self) -> Any:
        """A context in which the names of the axes of `maps` are bound."""
        return _jax.named_axes([axis for axis, _ in self.maps])

    def program(self, fun: Callable, avals: Sequence[Any], options: dict[str, Any] | None = None) -> Program:
        """Trace ``fun(*arrays) -> tree of arrays`` for inputs of these types, under all this.

        Inputs of which `maps` says nothing are mapped.
        """
        shapes: list[tuple[int, ...]] = [a.shape for a in avals]
        specs = [_explicit_spec(a) for a in avals]
        for axis, flags in self.maps:
            is_mapped = [*flags, *[True] * (len(avals) - len(flags))]
            fun = _jax.map_over(fun, axis, tuple([0 if flag else None for flag in is_mapped]))
            shapes = [(axis.size, *s) if flag else s for s, flag in zip(shapes, is_mapped, strict=True)]
            name = _jax.explicit_mesh_axes(axis)
            specs = [s and (name, *s) if flag else s for s, flag in zip(specs, is_mapped, strict=True)]
        if self.manual is not None:
            return self._in_shard_map(fun, avals, shapes, options)
        known = [*self.shardings, *[None] * (len(avals) - len(self.shardings))]
        types = []
        for aval, shape, spec, sharding in zip(avals, shapes, specs, known, strict=True):
            if spec is not None:
                sharding = NamedSharding(_jax.concrete_mesh(aval.sharding.mesh), PartitionSpec(*spec))
            types.append(_type(aval, shape, sharding))
        with _jax.eval_context():
            return Program(fun, types, options)

    def _in_shard_map(
        self, fun: Callable, avals: Sequence[Any], shapes: Sequence[tuple[int, ...]], options: Any
    ) -> Program:
        """Each device has its part of an input along one leading dimension for every axis along which the input varies."""
        assert self.manual is not None
        mesh, names, is_checked = _jax.concrete_mesh(self.manual.mesh), self.manual.axes, self.manual.is_checked
        varying = [[n for n in names if not is_checked or n in _jax.varying_axes(a)] for a in avals]
        specs = [PartitionSpec(*axes) for axes in varying]

        def local(*parts: Any) -> Any:
            outs = fun(*(x.reshape(shape) for x, shape in zip(parts, shapes, strict=True)))
            return jax.tree.map(lambda x: _jax.as_varying(x, names).reshape((1,) * len(names) + x.shape), outs)

        types = []
        for aval, shape, axes, spec in zip(avals, shapes, varying, specs, strict=True):
            whole = (*(mesh.shape[n] for n in axes), *shape)
            types.append(_type(aval, whole, NamedSharding(mesh, spec)))
        with _jax.outside_all_transforms():
            mapped = jax.shard_map(
                local,
                mesh=mesh,
                in_specs=tuple(specs),
                out_specs=PartitionSpec(*names),
                axis_names=set(names),
                check_vma=is_checked,
            )
            return Program(mapped, types, options)


def _type(aval: Any, shape: tuple[int, ...], sharding: NamedSharding | None) -> Any:
    """The type as ``jax.jit`` takes it in the place of an argument."""
    if sharding is not None and not _divides(sharding, shape):
        sharding = None
    return jax.ShapeDtypeStruct(shape, aval.dtype, sharding=sharding, weak_type=getattr(aval, "weak_type", False))


def _divides(sharding: NamedSharding, shape: tuple[int, ...]) -> bool:
    try:
        sharding.shard_shape(shape)
    except ValueError:
        return False
    return True


def _explicit_spec(aval: Any) -> tuple[Any, ...] | None:
    """Along which explicit axes a type is divided; None where there are none."""
    sharding = getattr(aval, "sharding", None)
    if sharding is None or jax.sharding.AxisType.Explicit not in sharding.mesh.axis_types:
        return None
    return tuple(sharding.spec)


def device_bytes(aval: Any) -> int:
    """Bytes of a value of this type on one device, as far as its type says how it is divided."""
    size = num_bytes(aval)
    for axes in _explicit_spec(aval) or ():
        for name in axes if isinstance(axes, tuple) else (axes,):
            if name is not None and isinstance(name, str):
                size = -(-size // aval.sharding.mesh.shape[name])
    return size


# -- shardings of tracers on automatic axes ------------------------------------------------------------------------------

_noted_shardings: dict[int, tuple[weakref.ref, NamedSharding]] = {}


def note_shardings(tracers: Sequence[Any], values: Sequence[Any]) -> None:
    """Remember of each tracer that it stands for a value, if it is known how this one is divided among devices."""
    for tracer, value in zip(tracers, values, strict=False):
        sharding = sharding_of(value)
        if sharding is not None and isinstance(tracer, _jax.Tracer) and tracer.ndim == len(sharding.spec):
            key = id(tracer)
            _noted_shardings[key] = weakref.ref(tracer, lambda _, key=key: _noted_shardings.pop(key, None)), sharding


def sharding_of(x: Any) -> NamedSharding | None:
    """How a value is divided among the devices of a mesh, the axes of every `jax.vmap` that maps it first; None if unknown."""
    dims = _dims_of(x)
    if dims is None:
        return None
    mesh, lead, rest = dims
    return NamedSharding(mesh, PartitionSpec(*lead, *rest))


def _dims_of(x: Any) -> tuple[Any, list, list] | None:
    """The mesh, and the axes along which mapped and other dimensions are divided."""
    if isinstance(x, _jax.Tracer):
        primal = _jax.primal_of(x)
        if primal is not None:
            return _dims_of(primal)
        batched = _jax.unwrap_batched(x)
        if batched is not None:
            dims = _dims_of(batched[0])
            if dims is None or batched[1] is None:
                return dims
            mesh, lead, rest = dims
            return mesh, [*lead, rest[batched[1]]], rest[: batched[1]] + rest[batched[1] + 1 :]
        found = _noted_shardings.get(id(x))
        if found is None or found[0]() is not x:
            return None
        sharding: Any = found[1]
    else:
        sharding = getattr(x, "sharding", None)
    if (
        not isinstance(sharding, NamedSharding)
        or not isinstance(sharding.mesh, jax.sharding.Mesh)
        or sharding.mesh.size == 1
    ):
        return None
    return sharding.mesh, [], [*sharding.spec, *[None] * (jnp.ndim(x) - len(sharding.spec))]
