"""A linear function with a custom transpose, as one equation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
from jax._src import core as _core
from jax._src.ad_util import Zero as _Zero
from jax._src.ad_util import instantiate as _instantiate_zeros
from jax._src.interpreters import ad as _ad
from jax._src.interpreters import batching as _batching
from jax._src.interpreters import mlir as _mlir

from .._positions import function_of
from .batching import map_over
from .equations import as_array


def linear_call(
    fun: Callable[[list, list], list],
    transpose: Callable[[list, list], list],
    residuals: Sequence[Any],
    tangents: Sequence[Any],
    out_avals: Sequence[Any],
) -> list[Any]:
    """Call ``fun(residuals, tangents)``, linear in the tangents, with a custom transpose.

    Unlike ``jax.custom_derivatives.linear_call`` it can be mapped, and differentiated with respect to the residuals; this
    differentiates `fun`.

    Args:
        fun: returns arrays of types `out_avals`.
        transpose: ``(residuals, cotangents) -> cotangents of the tangents``; None stands for a zero cotangent.
    """
    return _linear_p.bind(
        *residuals, *tangents, fun=fun, transpose=transpose, num_res=len(residuals), out_avals=tuple(out_avals)
    )


def opaque(inputs: Sequence[Any], out_avals: Sequence[Any]) -> list[Any]:
    """Arrays of some types that depend on all inputs, in a program that is looked at and never runs.

    They can be differentiated any number of times, as linear functions of the float inputs; a derivative is one equation, too.
    """
    types = list(map(jax.typeof, inputs))
    floats = [i for i, t in enumerate(types) if _is_inexact(t)]
    others = [x for i, x in enumerate(inputs) if i not in floats]
    ct_avals = [types[i].to_ct_aval() for i in floats]

    def transpose(_: list, cts: list) -> list[Any]:
        return opaque([ct for ct in cts if ct is not None], ct_avals)

    float_outs = [i for i, a in enumerate(out_avals) if _is_inexact(a)]
    other_outs = [i for i in range(len(out_avals)) if i not in float_outs]
    outs: dict[int, Any] = {}
    if float_outs:
        avals = [out_avals[i] for i in float_outs]
        outs |= zip(
            float_outs, linear_call(_never_run, transpose, others, [inputs[i] for i in floats], avals), strict=True
        )
    if other_outs:
        residuals, avals = jax.lax.stop_gradient(list(inputs)), [out_avals[i] for i in other_outs]
        outs |= zip(other_outs, linear_call(_never_run, transpose, residuals, [], avals), strict=True)
    return [outs[i] for i in range(len(out_avals))]


def _is_inexact(aval: Any) -> bool:
    return jnp.issubdtype(aval.dtype, jnp.inexact)


def _never_run(residuals: list, tangents: list) -> list[Any]:
    raise AssertionError("an opaque equation was run")


_linear_p = _core.Primitive("statetx_linear")
_linear_p.multiple_results = True


def _linear_impl(*args: Any, fun: Callable, transpose: Callable, num_res: int, out_avals: Any) -> list[Any]:
    return fun(list(args[:num_res]), list(args[num_res:]))


def _linear_jvp(primals: Any, tangents: Any, *, fun: Callable, num_res: int, **params: Any) -> Any:
    tangents = [t if type(t) is _Zero else as_array(t) for t in tangents]
    diff_indices = [i for i, t in enumerate(tangents) if type(t) is not _Zero and t.dtype != jax.dtypes.float0]
    outs = _linear_p.bind(*primals, fun=fun, num_res=num_res, **params)

    # f(r, t) is linear in t, so that its derivative along dt alone is f(r, dt): the same primitive, which keeps the transpose.
    if all(i >= num_res for i in diff_indices):
        linear_tangents = [_instantiate_zeros(t) for t in tangents[num_res:]]
        return outs, _linear_p.bind(*primals[:num_res], *linear_tangents, fun=fun, num_res=num_res, **params)

    # A residual varies too: differentiate `fun` itself, which loses the custom transpose.
    def run(*operands: Any) -> list[Any]:
        return fun(list(operands[:num_res]), list(operands[num_res:]))

    return jax.jvp(
        function_of(run, primals, diff_indices), [primals[i] for i in diff_indices], [tangents[i] for i in diff_indices]
    )


def _linear_transpose(
    cts: Any, *args: Any, fun: Callable, transpose: Callable, num_res: int, out_avals: Any
) -> list[Any]:
    nonzero_cts = [None if type(ct) is _Zero else ct for ct in cts]
    # Nothing to run the reversal for; None is JAX's zero cotangent here.
    if all(ct is None for ct in nonzero_cts):
        return [None] * len(args)
    return [None] * num_res + transpose(list(args[:num_res]), nonzero_cts)


def _linear_batch(
    axis: Any, args: Any, dims: Any, *, fun: Callable, transpose: Callable, num_res: int, out_avals: Any
) -> tuple[list[Any], list[Any]]:
    res_dims, dims = list(dims[:num_res]), list(dims[num_res:])
    if all(d is None for d in (*res_dims, *dims)):
        params = {"fun": fun, "transpose": transpose, "num_res": num_res, "out_avals": out_avals}
        return _linear_p.bind(*args, **params), [None] * len(out_avals)

    def mapped_transpose(residuals: list, cts: list) -> list:
        ct_dims = [None if ct is None else 0 for ct in cts]
        outs = map_over(transpose, axis, (res_dims, ct_dims))(residuals, cts)
        # A tangent that all examples share is broadcast, and the transpose of a broadcast is a sum.
        return [x.sum(0) if d is None else jnp.moveaxis(x, 0, d) for x, d in zip(outs, dims, strict=True)]

    # All outputs are mapped, whichever operands are: `fun` is opaque, and nobody knows what an output depends on.
    outs = _linear_p.bind(
        *args,
        fun=map_over(fun, axis, (res_dims, dims)),
        transpose=mapped_transpose,
        num_res=num_res,
        out_avals=tuple(_core.unmapped_aval(axis.size, 0, aval) for aval in out_avals),
    )
    return outs, [0] * len(outs)


_linear_p.def_impl(_linear_impl)
_linear_p.def_abstract_eval(lambda *_, out_avals, **__: list(out_avals))
_ad.primitive_jvps[_linear_p] = _linear_jvp
_ad.primitive_transposes[_linear_p] = _linear_transpose
_batching.fancy_primitive_batchers[_linear_p] = _linear_batch
_mlir.register_lowering(_linear_p, _mlir.lower_fun(_linear_impl, multiple_results=True))
