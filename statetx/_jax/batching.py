"""`jax.vmap` from the inside: batched values, batched jaxprs, a primitive that reports when it is mapped."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
from jax._src import core as _core
from jax._src import source_info_util
from jax._src.interpreters import ad as _ad
from jax._src.interpreters import batching as _batching
from jax._src.interpreters import mlir as _mlir

from .equations import ClosedJaxpr, Jaxpr, equations_in, open_jaxpr
from .traces import Tracer, _context, _parents


def batch_size(trace: Any) -> int:
    """The number of examples of the `jax.vmap` that `trace` belongs to."""
    return trace.axis_data.size


def batch_tracer(trace: Any, x: Any, axis: int) -> Any:
    """A tracer of `jax.vmap` for one example of `x`, an array that holds all examples along `axis`."""
    return _batching.BatchTracer(trace, x, axis % len(x.shape), source_info_util.current())


def has_own_map(x: Any) -> bool:
    """Whether JAX maps values of this type by rules of their own, not leaf by leaf: sparse matrices."""
    return _batching.is_vmappable(x)


def enclosing_vmaps() -> list[Any]:
    """The traces of every `jax.vmap` that encloses the current trace, innermost first."""
    return [t for t in _parents(_context.trace) if isinstance(t, _batching.BatchTrace)]


def with_batch_axis(x: Any, axis: int | None, to: int, axis_data: Any) -> Any:
    """Move the batch axis of `x` from `axis` to `to`; if `axis` is None, broadcast `x` along a new one."""
    if axis is None:
        return _batching.broadcast(x, axis_data.size, to, axis_data.explicit_mesh_axis)
    return jnp.moveaxis(x, axis, to)


def mapped_in_each(x: Any, vmaps: Sequence[Any]) -> list[bool]:
    """Tell for each of `enclosing_vmaps` whether `x` differs between its examples; True if this is unknown."""
    is_mapped = []
    for trace in vmaps:
        # A derivative between two vmaps has a tracer of its own, which says nothing about examples: its primal does.
        while isinstance(x, (_ad.JVPTracer, _ad.LinearizeTracer)):
            x = x.primal
        if not isinstance(x, _batching.BatchTracer):
            is_mapped.append(isinstance(x, Tracer))  # of another transform, such as a jit inside the map
        elif x._trace.tag is not trace.tag:
            # A tracer of another vmap: a value that this vmap mapped would be wrapped in a tracer of it.
            is_mapped.append(False)
        else:
            is_mapped.append(x.batch_dim is not None)
            x = x.val
    return is_mapped


def map_jaxpr(
    jaxpr: Jaxpr, axis_data: Any, is_mapped: Sequence[bool], instantiate: Sequence[bool]
) -> tuple[Jaxpr, Sequence[Any], list[bool]]:
    """Batch a jaxpr without constants, along axis 0 of the mapped inputs.

    Returns the batched jaxpr, its constants, and for each output whether it is mapped. Outputs in `instantiate` always
    are.
    """
    mapped, outs = _batching.batch_jaxpr(ClosedJaxpr(jaxpr, ()), axis_data, list(is_mapped), list(instantiate))
    return *open_jaxpr(mapped), list(outs)


def map_over(fun: Callable, axis_data: Any, in_axes: Any, out_axes: Any = 0) -> Callable:
    """Map `fun` over the axis of another `jax.vmap`, given by its `axis_data`."""
    # With the name and sharding of the axis: collectives inside `fun` may refer to it.
    name = None if axis_data.name is _core.no_axis_name else axis_data.name
    options = {"axis_name": name, "axis_size": axis_data.size, "spmd_axis_name": axis_data.spmd_name}
    return jax.vmap(fun, in_axes=in_axes, out_axes=out_axes, **options)


def named_axes(axes: Sequence[Any]) -> Any:
    """A context that binds the axis names of these `jax.vmap`s, each given by its `axis_data`."""
    return _core.extend_axis_env_nd([(a.name, a.size) for a in axes if a.name is not _core.no_axis_name])


def explicit_mesh_axes(axis_data: Any) -> Any:
    """The explicit mesh axes along which the examples of a `jax.vmap` are sharded."""
    return axis_data.explicit_mesh_axis


def stacked_type(aval: Any, num: int) -> Any:
    """The type of `num` values of type `aval`, stacked along a new axis 0."""
    return _core.unmapped_aval(num, 0, aval)


def unwrap_batched(x: Any) -> tuple[Any, int | None] | None:
    """The batched value of a tracer of `jax.vmap` and its batch axis; None for any other value."""
    return (x.val, x.batch_dim) if isinstance(x, _batching.BatchTracer) else None


def notify_of_vmap(values: Sequence[Any], index: int, callback: Callable[[Any, list[bool]], Callable]) -> Any:
    """Return ``values[index]``, and call `callback` whenever a `jax.vmap` maps some of `values`.

    This includes a `vmap` of a program that was traced without it. ``callback(axis, is_mapped)`` gets the `vmap`'s axis
    and a flag for each value, and returns the callback for the next `vmap`.
    """
    return _notice_p.bind(*values, index=index, callback=callback)


# A primitive, since a program that is traced now may be mapped later, and only equations remain of it then (decision
# 20). All values are operands: which of them are mapped is known only to their equation.
_notice_p = _core.Primitive("statetx_notice")


def _notice_batch(axis: Any, args: Any, dims: Any, *, index: int, callback: Callable) -> tuple[Any, Any]:
    if any(d is not None for d in dims):
        callback = callback(axis, [d is not None for d in dims])
    return _notice_p.bind(*args, index=index, callback=callback), dims[index]


def _notice_impl(*args: Any, index: int, callback: Callable) -> Any:
    return args[index]


_notice_p.def_impl(_notice_impl)
_notice_p.def_abstract_eval(_notice_impl)
_ad.primitive_jvps[_notice_p] = lambda ps, ts, **params: (_notice_p.bind(*ps, **params), ts[params["index"]])
# JAX passes the whole axis (name, size, sharding) to the rules in this table only.
_batching.fancy_primitive_batchers[_notice_p] = _notice_batch
_mlir.register_lowering(_notice_p, _mlir.lower_fun(_notice_impl, multiple_results=False))


def vmap_callbacks(jaxpr: Jaxpr) -> Iterator[Callable]:
    """The callbacks of `notify_of_vmap` in a jaxpr and in those inside of it, in the order of the equations."""
    return (eqn.params["callback"] for eqn in equations_in(jaxpr) if eqn.primitive is _notice_p)
