"""A call that JAX's partial evaluation leaves whole.

JAX drops the rule of a `jax.custom_jvp` function where partial evaluation does not know its operands: it takes the
equations for those of a linear function. The forward pass of a differentiated scan is such a place, where JAX hoists
what is constant in the loop. A second derivative of the scan would then differentiate the function's equations.
"""

from __future__ import annotations

from typing import Any

from jax._src import core as _core
from jax._src.ad_util import Zero as _Zero
from jax._src.interpreters import ad as _ad
from jax._src.interpreters import batching as _batching
from jax._src.interpreters import mlir as _mlir

from .equations import ClosedJaxpr, abstract, with_nonzero
from .primitives import check_inside


def call_whole(jaxpr: ClosedJaxpr, args: list[Any]) -> list[Any]:
    """Call a closed jaxpr as one equation. Its derivatives and batches are those of its equations, with their rules."""
    return _call_p.bind(*args, call_jaxpr=jaxpr)


_call_p = _core.Primitive("statetx_call")
_call_p.multiple_results = True


def _call_impl(*args: Any, call_jaxpr: ClosedJaxpr) -> list[Any]:
    return _core.jaxpr_as_fun(call_jaxpr)(*args)


def _call_jvp(primals: Any, tangents: Any, *, call_jaxpr: ClosedJaxpr) -> tuple[list[Any], list[Any]]:
    tangents, diff_indices = with_nonzero(tangents)
    is_nonzero = [i in diff_indices for i in range(len(primals))]
    # Not `jax.jvp`: it makes arrays of zeros in the device's memory, where outputs that are offloaded are not.
    jvp, out_is_nonzero = _ad.jvp_jaxpr(call_jaxpr, is_nonzero, instantiate=False)
    values = _core.jaxpr_as_fun(jvp)(*primals, *[tangents[i] for i in diff_indices])
    outs, nonzero_tangents = values[: len(out_is_nonzero)], iter(values[len(out_is_nonzero) :])
    return outs, [
        next(nonzero_tangents) if flag else _Zero(abstract(x).to_tangent_aval())
        for x, flag in zip(outs, out_is_nonzero, strict=True)
    ]


def _call_batch(axis: Any, args: Any, dims: Any, *, call_jaxpr: ClosedJaxpr) -> tuple[list[Any], list[Any]]:
    mapped, out_dims = _batching.batch_jaxpr2(call_jaxpr, axis, tuple(dims))
    return _call_p.bind(*args, call_jaxpr=mapped), list(out_dims)


_call_p.def_impl(_call_impl)
_call_p.def_effectful_abstract_eval(lambda *_, call_jaxpr: (call_jaxpr.out_avals, call_jaxpr.effects))
_ad.primitive_jvps[_call_p] = _call_jvp
_batching.fancy_primitive_batchers[_call_p] = _call_batch
_mlir.register_lowering(_call_p, _mlir.lower_fun(_call_impl, multiple_results=True))
check_inside(_call_p, lambda *_, call_jaxpr: call_jaxpr)
