"""`TraceContext`: the transforms that a piece of a program runs under, with shardings, to measure it under the same.

A loop or a region is compiled alone to measure its memory. The memory of one device depends on three things that its
equations do not show: every enclosing `jax.vmap`, the enclosing `jax.shard_map`, and the shardings of its inputs. Types
of inputs show shardings along explicit axes. Shardings along automatic axes are known to arrays only, so
`note_shardings` records them for the tracers of arrays. A value computed on automatic axes has no sharding
before the whole program is compiled: it is left open, and the compiler propagates the other shardings to it. Where it
cannot, the value counts as unsharded, so the measured memory is an upper bound.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from .. import _jax
from .._equations.compiled import Program
from .._targets import current
from .._tree import num_bytes

Map = tuple[Any, tuple[bool, ...]]
"""A `jax.vmap`: its `axis_data`, and for each input whether it is mapped."""


@dataclasses.dataclass(frozen=True)
class TraceContext:
    """The transforms that enclose a program, and the shardings of its inputs.

    Attributes:
        maps: every `jax.vmap`, innermost first.
        shardings: for each input, mapped axes first; None if unknown. If shorter than the inputs, it holds the first
            ones.
        manual: the `jax.shard_map`.
    """

    maps: tuple[Map, ...] = ()
    shardings: tuple[NamedSharding | None, ...] = ()
    manual: _jax.Manual | None = None

    @classmethod
    def of(cls, values: Sequence[Any]) -> TraceContext:
        """The context of the current trace, for a program with the inputs `values`."""
        vmaps = _jax.enclosing_vmaps()
        flags = zip(*(_jax.mapped_in_each(x, vmaps) for x in values), strict=True)
        maps = [(vmap.axis_data, is_mapped) for vmap, is_mapped in zip(vmaps, flags, strict=False)]
        manual = _jax.enclosing_shard_map()
        shardings = () if manual else tuple(map(sharding_of, values))
        return cls(tuple([m for m in maps if any(m[1])]), shardings if any(shardings) else (), manual)

    @property
    def num_examples(self) -> int:
        return math.prod(axis.size for axis, _ in self.maps)

    def num_sharing(self, more: Sequence[NamedSharding | None] = ()) -> int:
        """The number of devices that the compiler may share a value between, as it shares the inputs; 1 inside of a
        shard_map.

        Args:
            more: further shardings, such as of the inputs of an enclosing program.
        """
        shardings = (*self.shardings, *(() if self.manual else more))
        return max((_num_automatic(s.mesh) for s in shardings if s is not None), default=1)

    def with_vmap(self, axis: Any, is_mapped: Sequence[bool]) -> TraceContext:
        """Return the context under one more `jax.vmap`, the outermost."""
        flags = (*is_mapped, *[True] * (len(self.shardings) - len(is_mapped)))
        in_front = lambda s: NamedSharding(s.mesh, s.spec.update((None, *s.spec.partitions)))
        shardings = [s and (in_front(s) if flag else s) for s, flag in zip(self.shardings, flags, strict=False)]
        return TraceContext((*self.maps, (axis, tuple(is_mapped))), tuple(shardings), self.manual)

    def for_other_inputs(self) -> TraceContext:
        """Return the context for a piece with other inputs, which all count as mapped."""
        maps = tuple([(axis, ()) for axis, _ in self.maps])
        return TraceContext(maps, (), self.manual)

    @contextlib.contextmanager
    def bind_axes(self) -> Iterator[None]:
        """Bind the axis names of `maps` and `manual`."""
        with contextlib.ExitStack() as stack:
            if self.manual is not None:
                stack.enter_context(_jax.inside_shard_map(self.manual))
            stack.enter_context(_jax.named_axes([axis for axis, _ in self.maps]))
            yield

    def program(
        self,
        fun: Callable[..., Any],
        avals: Sequence[Any],
        options: dict[str, Any] | None = None,
        donated: Sequence[int] = (),
        constants: Mapping[int, Any] = MappingProxyType({}),
    ) -> Program:
        """Trace ``fun(*arrays) -> tree of arrays`` for inputs of these types in this context.

        Inputs without an entry in `maps` are mapped.

        Args:
            donated: positions of donated inputs; none inside a shard_map.
            constants: by position, the values of inputs that the program closes over. In a shard_map they stay inputs.
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

        types = self._types(avals, shapes, specs)
        donated = [i - sum(constant < i for constant in constants) for i in donated]
        with _jax.eval_context():
            return Program(*close_over(fun, types, constants), options, donated)

    def types(self, avals: Sequence[Any]) -> list[jax.ShapeDtypeStruct]:
        """Inputs of these types with their shardings, as arguments of a program outside of every `jax.vmap` and
        `jax.shard_map`.
        """
        return self._types(avals, [a.shape for a in avals], list(map(_explicit_spec, avals)))

    def _types(self, avals: Sequence[Any], shapes: Sequence[Any], specs: Sequence[Any]) -> list[jax.ShapeDtypeStruct]:
        # A type that shows its sharding (explicit axes) takes precedence over the noted one.
        shardings = [*self.shardings, *[None] * (len(avals) - len(self.shardings))]
        types = []
        is_sharded = any(shardings)
        for aval, shape, spec, sharding in zip(avals, shapes, specs, shardings, strict=True):
            if spec is not None:
                sharding = NamedSharding(_jax.concrete_mesh(aval.sharding.mesh), PartitionSpec(*spec))
            types.append(_type(aval, shape, _in_memory(aval, sharding, is_sharded)))
        return types

    def _in_shard_map(
        self, fun: Callable[..., Any], avals: Sequence[Any], shapes: Sequence[tuple[int, ...]], options: Any
    ) -> Program:
        """`program` in a `jax.shard_map`: an input has a leading dimension for each mesh axis along which it varies."""
        assert self.manual is not None
        mesh, names, is_checked = _jax.concrete_mesh(self.manual.mesh), self.manual.axes, self.manual.is_checked
        varying = [[n for n in names if not is_checked or n in _jax.varying_axes(a)] for a in avals]
        specs = [PartitionSpec(*axes) for axes in varying]

        def local(*shards: Any) -> Any:
            outs = fun(*(x.reshape(shape) for x, shape in zip(shards, shapes, strict=True)))
            return jax.tree.map(lambda x: _jax.as_varying(x, names).reshape((1,) * len(names) + x.shape), outs)

        types = []
        for aval, shape, axes, spec in zip(avals, shapes, varying, specs, strict=True):
            global_shape = (*(mesh.shape[n] for n in axes), *shape)
            types.append(_type(aval, global_shape, NamedSharding(mesh, spec)))
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


def close_over(
    fun: Callable[..., Any], inputs: Sequence[Any], constants: Mapping[int, Any]
) -> tuple[Callable[..., Any], list[Any]]:
    """A function that closes over the values `constants` of some inputs, by position; and its own inputs."""
    if not constants:
        return fun, list(inputs)
    num = len(inputs)

    def with_constants(*arrays: Any) -> Any:
        remaining = iter(arrays)
        # Not NumPy arrays, which a traced index does not index.
        return fun(*(jnp.asarray(constants[i]) if i in constants else next(remaining) for i in range(num)))

    return with_constants, [x for i, x in enumerate(inputs) if i not in constants]


def _type(aval: Any, shape: tuple[int, ...], sharding: jax.sharding.Sharding | None) -> Any:
    """The `jax.ShapeDtypeStruct` of an argument for ``jax.jit``, without a sharding that does not divide the shape."""
    if sharding is not None and not divides(sharding, shape):
        sharding = None
    return jax.ShapeDtypeStruct(shape, aval.dtype, sharding=sharding, weak_type=getattr(aval, "weak_type", False))


def _in_memory(aval: Any, sharding: NamedSharding | None, is_sharded: bool) -> jax.sharding.Sharding | None:
    """The sharding of an input, in the memory that its type names: without one JAX takes the device's memory."""
    kind = _jax.memory_of(aval)
    if not kind or (sharding is None and is_sharded):  # one of several devices: which, is not known
        return sharding
    if sharding is None:
        return jax.sharding.SingleDeviceSharding(current.local_device(), memory_kind=kind)
    return sharding.with_memory_kind(kind)


def divides(sharding: jax.sharding.Sharding, shape: tuple[int, ...]) -> bool:
    """Whether a sharding divides a shape."""
    try:
        sharding.shard_shape(shape)
    except ValueError:
        return False
    return True


def _explicit_spec(aval: Any) -> tuple[Any, ...] | None:
    """The explicit mesh axes that shard a type, by dimension; None if its mesh has no explicit axis."""
    sharding = getattr(aval, "sharding", None)
    if sharding is None or jax.sharding.AxisType.Explicit not in sharding.mesh.axis_types:
        return None
    return tuple(sharding.spec.partitions)


def _num_automatic(mesh: Any) -> int:
    """The number of devices along the axes that are not explicit; along explicit axes the type of a value says how it
    is shared.
    """
    kinds = zip(mesh.axis_types, mesh.shape.values(), strict=True)
    return math.prod(size for kind, size in kinds if kind != jax.sharding.AxisType.Explicit)


def device_bytes(aval: Any) -> int:
    """Bytes of a value of this type on one device; an upper bound if it is also sharded along axes that are not
    explicit.
    """
    size = num_bytes(aval)
    for axes in _explicit_spec(aval) or ():
        for name in axes if isinstance(axes, tuple) else (axes,):
            if name is not None and isinstance(name, str):
                size = -(-size // aval.sharding.mesh.shape[name])
    return size


# -- shardings of tracers on automatic axes

_noted_shardings: dict[int, tuple[weakref.ref, NamedSharding]] = {}


def note_shardings(tracers: Sequence[Any], values: Sequence[Any]) -> None:
    """Record for each tracer the sharding of its value, if it has one."""
    for tracer, value in zip(tracers, values, strict=False):
        sharding = sharding_of(value)
        if sharding is not None and isinstance(tracer, _jax.Tracer) and tracer.ndim == len(sharding.spec):
            key = id(tracer)
            _noted_shardings[key] = weakref.ref(tracer, lambda _, key=key: _noted_shardings.pop(key, None)), sharding


def sharding_of(x: Any) -> NamedSharding | None:
    """The sharding of a value, with the axes of every `jax.vmap` that maps it first; None if unknown."""
    dims = _dims_of(x)
    if dims is None:
        return None
    mesh, mapped, unmapped = dims
    return NamedSharding(mesh, PartitionSpec(*mapped, *unmapped))


def _dims_of(x: Any) -> tuple[Any, list[Any], list[Any]] | None:
    """The mesh, the mesh axes of the mapped dimensions, and the mesh axes of the other dimensions."""
    if isinstance(x, _jax.Tracer):
        primal = _jax.primal_of(x)
        if primal is not None:
            return _dims_of(primal)
        batched = _jax.unwrap_batched(x)
        if batched is not None:
            dims = _dims_of(batched[0])
            if dims is None or batched[1] is None:
                return dims
            mesh, mapped, unmapped = dims
            return mesh, [*mapped, unmapped[batched[1]]], unmapped[: batched[1]] + unmapped[batched[1] + 1 :]
        noted = _noted_shardings.get(id(x))
        if noted is None or noted[0]() is not x:  # the id of a dead tracer may be in use again
            return None
        sharding: Any = noted[1]
    else:
        sharding = getattr(x, "sharding", None)
    if not isinstance(sharding, NamedSharding) or sharding.mesh.size == 1:
        return None
    if sharding.spec.unreduced or sharding.spec.reduced:  # over explicit axes, which types show
        return None
    return sharding.mesh, [], [*sharding.spec.partitions, *[None] * (jnp.ndim(x) - len(sharding.spec))]
