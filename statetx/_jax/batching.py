"""What `jax.vmap` does to values, and values that learn of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
from jax._src import core as _core
from jax._src import source_info_util
from jax._src.interpreters import ad as _ad
from jax._src.interpreters import batching as _batching
from jax._src.interpreters import mlir as _mlir

from .equations import ClosedJaxpr, Jaxpr, open_jaxpr
from .traces import Tracer, _context, _parents


def batch_size(trace: Any) -> int:
    """How many examples the `jax.vmap` has whose trace this is."""
    return trace.axis_data.size


def batch_tracer(trace: Any, x: Any, axis: int) -> Any:
    """The tracer, in a `jax.vmap`, of one example of `x`, an array with one slice for each along `axis`."""
    return _batching.BatchTracer(trace, x, axis % len(x.shape), source_info_util.current())


def enclosing_vmaps() -> list[Any]:
    """The traces of every `jax.vmap` around the current trace, innermost first."""
    return [t for t in _parents(_context.trace) if isinstance(t, _batching.BatchTrace)]


def with_batch_axis(x: Any, axis: int | None, to: int, axis_data: Any) -> Any:
    """An array whose examples lie along `axis`, with their axis at `to`; None: the same for all, repeated."""
    if axis is None:
        return _batching.broadcast(x, axis_data.size, to, axis_data.explicit_mesh_axis)
    return jnp.moveaxis(x, axis, to)


def mapped_in_each(x: Any, vmaps: Sequence[Any]) -> list[bool]:
    """For each of `enclosing_vmaps`, whether `x` differs between its examples; True where that cannot be told."""
    found = []
    for trace in vmaps:
        while isinstance(x, (_ad.JVPTracer, _ad.LinearizeTracer)):
            x = x.primal
        if not isinstance(x, _batching.BatchTracer):
            found.append(isinstance(x, Tracer))  # of another kind, such as that of a jit inside the map
        elif x._trace.tag is not trace.tag:
            found.append(False)
        else:
            found.append(x.batch_dim is not None)
            x = x.val
    return found


def map_jaxpr(
    jaxpr: Jaxpr, axis_data: Any, is_mapped: Sequence[bool], instantiate: Sequence[bool]
) -> tuple[Jaxpr, Sequence[Any], list[bool]]:
    """A jaxpr without constants for all examples of a `jax.vmap` at once, along axis 0 of the inputs that are mapped.

    Returns it with its constants, and which outputs are mapped; those in `instantiate` are in any case.
    """
    mapped, outs = _batching.batch_jaxpr(ClosedJaxpr(jaxpr, ()), axis_data, list(is_mapped), list(instantiate))
    return *open_jaxpr(mapped), list(outs)


def map_over(fun: Callable, axis_data: Any, in_axes: Any) -> Callable:
    """`jax.vmap` over the axis of another; examples lie along axis 0 of all outputs."""
    name = None if axis_data.name is _core.no_axis_name else axis_data.name
    options = {"axis_name": name, "axis_size": axis_data.size, "spmd_axis_name": axis_data.spmd_name}
    return jax.vmap(fun, in_axes=in_axes, out_axes=0, **options)


def named_axes(axes: Sequence[Any]) -> Any:
    """A context with the names of the axes of these `jax.vmap`s, described as JAX does."""
    return _core.extend_axis_env_nd([(a.name, a.size) for a in axes if a.name is not _core.no_axis_name])


def explicit_mesh_axes(axis_data: Any) -> Any:
    """The explicit mesh axes along which a `jax.vmap` is divided."""
    return axis_data.explicit_mesh_axis


def stacked_type(aval: Any, num: int) -> Any:
    """The type of so many values of this type along a new axis 0."""
    return _core.unmapped_aval(num, 0, aval)


def unwrap_batched(x: Any) -> tuple[Any, int | None] | None:
    """The values of all examples, and their axis, for the tracer of one; None for others."""
    return (x.val, x.batch_dim) if isinstance(x, _batching.BatchTracer) else None


def notify_of_vmap(values: Sequence[Any], which: int, notice: Callable[[Any, list[bool]], Callable]) -> Any:
    """One of `values`, unchanged.

    Whenever a `jax.vmap` maps some of them, also in a program that was traced without it, ``notice(axis, is_mapped)`` is
    called with the `vmap`'s axis, and for each value whether it is mapped; it returns what is called the next time.
    """
    return _notice_p.bind(*values, which=which, notice=notice)


_notice_p = _core.Primitive("statetx_notice")


def _notice_batch(axis: Any, args: Any, dims: Any, *, which: int, notice: Callable) -> tuple[Any, Any]:
    if any(d is not None for d in dims):
        notice = notice(axis, [d is not None for d in dims])
    return _notice_p.bind(*args, which=which, notice=notice), dims[which]


def _notice_impl(*args: Any, which: int, notice: Callable) -> Any:
    return args[which]


_notice_p.def_impl(_notice_impl)
_notice_p.def_abstract_eval(_notice_impl)
_ad.primitive_jvps[_notice_p] = lambda ps, ts, **params: (_notice_p.bind(*ps, **params), ts[params["which"]])
_batching.fancy_primitive_batchers[_notice_p] = _notice_batch
_mlir.register_lowering(_notice_p, _mlir.lower_fun(_notice_impl, multiple_results=False))
