"""Calls that are one equation: partial evaluation leaves them whole, or changes their function where it passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax._src import core as _core
from jax._src.ad_util import Zero as _Zero
from jax._src.interpreters import ad as _ad
from jax._src.interpreters import batching as _batching
from jax._src.interpreters import partial_eval as _pe

from .equations import ClosedJaxpr, Var, abstract, with_nonzero
from .evaluation import evaluate
from .primitives import call_primitive

# -- a call that partial evaluation leaves whole ---------------------------------------------------------------------

# JAX drops the rule of a `jax.custom_jvp` function where partial evaluation does not know its operands: it takes the
# function for linear. It does so in the forward pass of a differentiated scan, where it hoists constants out of the
# loop. A second derivative of the scan would then differentiate the function's equations.


def call_whole(
    jaxpr: ClosedJaxpr, args: Sequence[Any], lowered: Callable[[ClosedJaxpr], ClosedJaxpr] | None = None
) -> list[Any]:
    """Call a closed jaxpr as one equation, differentiated and batched equation by equation, by the rules of each.

    Results have their batch axis first.

    Args:
        lowered: gives an equal jaxpr to compile, which need not be differentiable. It is for this jaxpr, and not for
            the mapped one under `jax.vmap`, unless its attribute `is_general` is true.
    """
    return _call_p.bind(*args, call_jaxpr=jaxpr, lowered=lowered)


def _call_impl(*args: Any, call_jaxpr: ClosedJaxpr, **_: Any) -> list[Any]:
    return evaluate(call_jaxpr.jaxpr, call_jaxpr.consts, args)


def _call_lowered(*args: Any, call_jaxpr: ClosedJaxpr, lowered: Callable | None) -> list[Any]:
    return _core.jaxpr_as_fun(call_jaxpr if lowered is None else lowered(call_jaxpr))(*args)


def _call_jvp(primals: Any, tangents: Any, *, call_jaxpr: ClosedJaxpr, **_: Any) -> tuple[list[Any], list[Any]]:
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


def _call_batch(
    axis: Any, args: Any, dims: Any, *, call_jaxpr: ClosedJaxpr, lowered: Callable | None
) -> tuple[list[Any], list[Any]]:
    args, is_mapped = _with_axis_first(args, dims)
    mapped, out_is_mapped = _batching.batch_jaxpr(call_jaxpr, axis, is_mapped, False)
    lowered = lowered if getattr(lowered, "is_general", False) else None
    outs = _call_p.bind(*args, call_jaxpr=mapped, lowered=lowered)
    return outs, [0 if flag else None for flag in out_is_mapped]


def _with_axis_first(args: Any, dims: Any) -> tuple[list[Any], list[bool]]:
    """The operands of a mapped call with their batch axis first, and which have one."""
    args = [x if d is None else jnp.moveaxis(x, d, 0) for x, d in zip(args, dims, strict=True)]
    return args, [d is not None for d in dims]


_call_p = call_primitive(
    "statetx_call",
    _call_impl,
    lambda *_, call_jaxpr, lowered: (call_jaxpr.out_avals, _core.positional_effects(call_jaxpr)),
    jvp=_call_jvp,
    batch=_call_batch,
    jaxpr_of=lambda *_, call_jaxpr, lowered: call_jaxpr,
    lowered=_call_lowered,
)


# -- a call whose derivative changes where it is linearized ----------------------------------------------------------

# ``jax.linearize``, and with it reverse mode, is a jvp whose tangents are unknown to partial evaluation. A derivative
# rule that is staged, as in a jitted function, has run before. Its results from the primals alone are known to the
# partial evaluation, which this call notices.


def call_until_linearized(plain: ClosedJaxpr, linearized: ClosedJaxpr, args: list[Any]) -> list[Any]:
    """Call `plain`; once partial evaluation has passed over the call, `linearized`, of the same values and types."""
    return _settled_p.bind(*args, call_jaxpr=plain, linearized=linearized)


def _settled_jvp(
    primals: Any, tangents: Any, *, call_jaxpr: ClosedJaxpr, linearized: ClosedJaxpr
) -> tuple[list[Any], list[Any]]:
    # Results that partial evaluation may pass over later; the differentiated call's own are dead code.
    outs = _settled_p.bind(*primals, call_jaxpr=call_jaxpr, linearized=linearized)
    return outs, _call_jvp(primals, tangents, call_jaxpr=call_jaxpr)[1]


def _settled_batch(
    axis: Any, args: Any, dims: Any, *, call_jaxpr: ClosedJaxpr, linearized: ClosedJaxpr
) -> tuple[list[Any], list[Any]]:
    args, is_mapped = _with_axis_first(args, dims)
    batch = lambda jaxpr, instantiate: _batching.batch_jaxpr(jaxpr, axis, is_mapped, instantiate)
    # A result that all examples share in one of the calls may be one for each example in the other.
    flags = [batch(jaxpr, [False] * len(jaxpr.out_avals))[1] for jaxpr in (call_jaxpr, linearized)]
    out_is_mapped = list(map(any, zip(*flags, strict=True)))
    mapped, mapped_linearized = (batch(jaxpr, out_is_mapped)[0] for jaxpr in (call_jaxpr, linearized))
    outs = _settled_p.bind(*args, call_jaxpr=mapped, linearized=mapped_linearized)
    return outs, [0 if flag else None for flag in out_is_mapped]


def _settled_partial_eval(trace: Any, *tracers: Any, call_jaxpr: ClosedJaxpr, linearized: ClosedJaxpr) -> Any:
    if all(t.is_known() for t in tracers):
        return _call_p.bind(*(t.pval.get_known() for t in tracers), call_jaxpr=linearized, lowered=None)
    # A loop around it looks for what reads its constants alone: JAX drops the rules of all else.
    return trace.default_process_primitive(_call_p, tracers, {"call_jaxpr": linearized, "lowered": None})


_settled_p = call_primitive(
    "statetx_settled",
    lambda *args, call_jaxpr, linearized: _call_impl(*args, call_jaxpr=call_jaxpr),
    lambda *_, call_jaxpr, linearized: (call_jaxpr.out_avals, _core.positional_effects(call_jaxpr)),
    jvp=_settled_jvp,
    batch=_settled_batch,
    jaxpr_of=lambda *_, call_jaxpr, linearized: call_jaxpr,
)
_pe.custom_partial_eval_rules[_settled_p] = _settled_partial_eval


def _settled_partial_eval_of_region(
    _: Callable, is_unknown: Sequence[bool], is_there: Sequence[bool], eqn: Any
) -> tuple[Any, Any, list[bool], list[bool], list[Var]]:
    """The forward pass of a region calls `linearized`, which has no rules any more; its recomputation keeps them."""
    is_linear, num_outs = any(is_unknown), len(eqn.outvars)
    known_eqn = eqn.replace(primitive=_call_p, params={"call_jaxpr": eqn.params["linearized"], "lowered": None})
    stored = [v for v, flag in zip(eqn.invars, is_there, strict=True) if isinstance(v, Var) and not flag]
    return None if is_linear else known_eqn, eqn, [is_linear] * num_outs, [True] * num_outs, stored


_pe.partial_eval_jaxpr_custom_rules[_settled_p] = _settled_partial_eval_of_region
