"""Primitives of this package: identities, the order of gradients, functions as one equation."""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
from jax._src import checkify as _checkify
from jax._src import core as _core
from jax._src.ad_util import Zero as _Zero
from jax._src.ad_util import instantiate as _instantiate_zeros
from jax._src.interpreters import ad as _ad
from jax._src.interpreters import batching as _batching
from jax._src.interpreters import mlir as _mlir
from jax._src.state.discharge import discharge_state as _discharge_state
from jax._src.state.discharge import register_discharge_rule as _register_discharge_rule
from jax._src.state.types import AbstractRef as _AbstractRef

from .._positions import function_of as _function_of
from .._positions import replaced
from .batching import map_over, named_axes
from .equations import ClosedJaxpr, with_nonzero
from .traces import eval_context
from .versions import NUM_CHECKIFY_CONTEXTS, NUM_DISCHARGE_CONTEXTS


def identity(name: str, *, tangent: int = 0, is_one: bool = False) -> Any:
    """A primitive that returns its first operand, and is no operation in a compiled program.

    It has no transpose.

    Args:
        tangent: the operand whose tangent the result has.
        is_one: whether `jax.vmap` maps all operands, which have one shape, if it maps one; else it must map the first,
            if any.
    """
    primitive = _core.Primitive(name)
    primitive.def_impl(lambda x, *_, **__: x)
    primitive.def_abstract_eval(lambda x, *_, **__: x)

    def batch(axis: Any, args: Sequence[Any], dims: Sequence[Any], **params: Any) -> tuple[Any, Any]:
        if not is_one or all(d is None for d in dims):
            return primitive.bind(*args, **params), dims[0]
        size, mesh_axis = axis.size, axis.explicit_mesh_axis
        args = [_batching.bdim_at_front(x, d, size, mesh_axis) for x, d in zip(args, dims, strict=True)]
        return primitive.bind(*args, **params), 0

    _ad.primitive_jvps[primitive] = lambda args, ts, **params: (primitive.bind(*args, **params), ts[tangent])
    _batching.fancy_primitive_batchers[primitive] = batch
    _mlir.register_lowering(primitive, lambda ctx, x, *_, **__: [x])
    return primitive


def call_primitive(
    name: str,
    impl: Callable,
    types: Callable,
    *,
    jvp: Callable,
    batch: Callable,
    jaxpr_of: Callable[..., ClosedJaxpr] | None = None,
    lowered: Callable | None = None,
) -> Any:
    """A primitive of several results that calls a function.

    Args:
        impl: ``(*args, **params) -> results``; so are `lowered`, the compiled version (by default `impl`), and `types`,
            which gives the types of the results, and effects.
        jvp, batch: its rules.
        jaxpr_of: ``(*args, **params) -> jaxpr`` for checkify, which does not look into a call that is one equation; by
            default it traces `impl`.
    """
    primitive = _core.Primitive(name)
    primitive.multiple_results = True

    def run(*args: Any, **params: Any) -> Any:
        with eval_context():  # `jax.ensure_compile_time_eval` leaves the trace that runs here the current one
            return impl(*args, **params)

    primitive.def_impl(run)
    primitive.def_effectful_abstract_eval(types)
    _ad.primitive_jvps[primitive] = jvp
    _batching.fancy_primitive_batchers[primitive] = batch
    _mlir.register_lowering(primitive, _mlir.lower_fun(lowered or impl, multiple_results=True))

    def check(*operands: Any, **params: Any) -> tuple[Any, list[Any]]:
        context, (error, enabled_errors, *args) = operands[:NUM_CHECKIFY_CONTEXTS], operands[NUM_CHECKIFY_CONTEXTS:]
        jaxpr = jaxpr_of(*args, **params) if jaxpr_of else jax.make_jaxpr(functools.partial(impl, **params))(*args)
        return _checkify.checkify_jaxpr(*context, jaxpr, enabled_errors, error, *args)

    _checkify.error_checks[primitive] = check

    def discharge(*operands: Any, **params: Any) -> tuple[list, list]:
        """For a `jax.Ref` that a function with a derivative rule writes in the call."""
        assert jaxpr_of is not None, "a call with Refs has equations"
        args = operands[NUM_DISCHARGE_CONTEXTS:]
        jaxpr = jaxpr_of(*args, **params)
        values, num_outs = _core.jaxpr_as_fun(_discharge_state(jaxpr))(*args), len(jaxpr.out_avals)
        last = iter(values[num_outs:])
        return [next(last) if isinstance(aval, _AbstractRef) else None for aval in jaxpr.in_avals], values[:num_outs]

    _register_discharge_rule(primitive)(discharge)
    return primitive


def _given_types(*_: Any, out_avals: Sequence[Any], **__: Any) -> tuple[list[Any], Any]:
    return list(out_avals), _core.no_effects


# -- a value with the tangent of another one -------------------------------------------------------------------------

# Not `jax.custom_jvp`, whose rule JAX drops where it linearizes the primals of a loop: second derivatives would be
# zero.
_with_tangent_of_p = identity("statetx_with_tangent_of", tangent=-1, is_one=True)


def with_tangent_of(x: Any, copy: Any) -> Any:
    """Return `copy`, an array of the value of `x` that is computed from constants, with the tangent of `x`."""
    return _with_tangent_of_p.bind(copy, x)


# -- a value whose batch axis is the first ----------------------------------------------------------------------------

# JAX maps a staged `jax.custom_jvp` and its rule one by one, and takes the batch axes of the function's results for the
# rule's, too (jax#16374).
_batch_first_p = identity("statetx_batch_first", is_one=True)


def batch_first(x: Any) -> Any:
    """Return x, whose batch axis under `jax.vmap` is the first."""
    return _batch_first_p.bind(x)


# -- the order of two gradients that do not depend on each other -----------------------------------------------------

# A compiler may run them in turns, and then the values that each computes again are in memory together.
# ``hold(x, awaited)`` is x, once `awaited` are computed. ``note(x, noted)`` is x, too. It notes the cotangent of x, so
# that another computation can wait for a whole gradient.


hold_primitive = identity("statetx_hold")
note_primitive = identity("statetx_note")


def hold(x: Any, awaited: Sequence[Any], *, is_sequential: bool = False) -> Any:
    """Return x, once `awaited` are computed.

    Args:
        is_sequential: whether users of x shall also wait for everything that the program computes before; noted here,
            done elsewhere.
    """
    return hold_primitive.bind(x, *(y for y in awaited if y is not x), is_sequential=is_sequential)


class Noted:
    """The cotangents that a program being traced has computed: a parameter of an equation, equal to no other."""

    def __init__(self) -> None:
        self._tracers: list[weakref.ref] = []  # they live as long as their program is traced

    def add(self, tracer: Any) -> None:
        self._tracers.append(weakref.ref(tracer))

    def tracers(self) -> list[Any]:
        return [x for ref in self._tracers if (x := ref()) is not None]


def note(x: Any, noted: Noted) -> Any:
    """Return x; a backward pass that is traced adds the cotangent of x to `noted`."""
    return note_primitive.bind(x, noted=noted)


def set_hold_lowering(rule: Callable) -> None:
    """Lower `hold_primitive` by ``rule(ctx, x, *awaited)``."""
    _mlir.register_lowering(hold_primitive, rule)


_ad.primitive_transposes[hold_primitive] = lambda ct, x, *awaited, **_: [ct, *(None for _ in awaited)]


def _note_transpose(ct: Any, _: Any, *, noted: Noted) -> list[Any]:
    if isinstance(ct, _core.Tracer):  # neither zero nor computed already
        noted.add(ct)
    return [ct]


def _note_jvp(primals: Sequence[Any], tangents: Sequence[Any], *, noted: Noted) -> tuple[Any, Any]:
    # In the tangents only, which are gone once the backward pass is traced.
    (x,), (t,) = primals, tangents
    return x, (t if type(t) is _Zero else note_primitive.bind(t, noted=noted))


_ad.primitive_jvps[note_primitive] = _note_jvp
_ad.primitive_transposes[note_primitive] = _note_transpose


# -- a linear function with a custom transpose, and one that is differentiated only if it is compiled ----------------


def linear_call(
    fun: Callable[[list, list], list],
    transpose: Callable[[list, list], list],
    residuals: Sequence[Any],
    tangents: Sequence[Any],
    out_avals: Sequence[Any],
    *,
    rules_of: str | None = None,
) -> list[Any]:
    """Call ``fun(residuals, tangents)``, linear in the tangents, with a custom transpose.

    Unlike ``jax.custom_derivatives.linear_call`` it can be mapped, and differentiated with respect to the residuals;
    this differentiates `fun`.

    Args:
        fun: returns arrays of types `out_avals`.
        transpose: ``(residuals, cotangents) -> cotangents of the tangents``; a zero cotangent is None.
        rules_of: the loop whose derivative is called, if that runs derivative rules of users.
    """
    params = {"fun": fun, "transpose": transpose, "out_avals": tuple(out_avals), "rules_of": rules_of}
    return _linear_p.bind(*residuals, *tangents, num_res=len(residuals), **params)


def loop_with_rules(eqn: Any) -> str | None:
    """The `rules_of` of an equation of `linear_call`; None for any other equation."""
    return eqn.params["rules_of"] if eqn.primitive is _linear_p else None


def deferred_call(
    fun: Callable[[list[Any]], list[Any]], inputs: Sequence[Any], out_avals: Sequence[Any], num_out: int
) -> list[Any]:
    """Call ``fun(inputs)`` in a program that is traced to be looked at: the call is one equation, and so is its
    derivative.

    `fun` is differentiated only if the program is compiled after all: a library may keep it and use it again.

    Args:
        fun: returns arrays of types `out_avals`.
        num_out: how many of these are its output. The others are new values of states.
    """
    return _deferred_p.bind(*inputs, fun=fun, out_avals=tuple(out_avals), num_out=num_out)


def _is_inexact(aval: Any) -> bool:
    return jnp.issubdtype(aval.dtype, jnp.inexact)


def _deferred_jvp(
    primals: Any, tangents: Any, *, fun: Callable, out_avals: Any, num_out: int
) -> tuple[list[Any], list[Any]]:
    has_tangent = [True] * len(out_avals)
    if any(map(_is_inexact, out_avals[num_out:])):
        # A state that is written with a value without a tangent may not get one.
        jaxpr = jax.make_jaxpr(fun)([jax.typeof(x) for x in primals])
        has_tangent = _ad.jvp_jaxpr(jaxpr, [type(t) is not _Zero for t in tangents], instantiate=False)[1]
    inputs = [i for i, x in enumerate(primals) if _is_inexact(jax.typeof(x))]
    results = [i for i, aval in enumerate(out_avals) if _is_inexact(aval) and has_tangent[i]]
    ct_avals = [jax.typeof(primals[i]).to_ct_aval() for i in inputs]
    tangent_avals = [out_avals[i].to_tangent_aval() for i in results]

    def floats_of(primals: list) -> Callable[..., list[Any]]:
        """The float results as a function of the float inputs."""

        def run(*floats: Any) -> list[Any]:
            outs = fun(replaced(primals, inputs, floats))
            return [outs[i] for i in results]

        return run

    def jvp(primals: list, tangents: list) -> list[Any]:
        return jax.jvp(floats_of(primals), [primals[i] for i in inputs], tangents)[1]

    def bind_jvp(primals: list, tangents: list) -> list[Any]:
        return linear_call(jvp, bind_vjp, primals, _without_none(tangents, ct_avals), tangent_avals)

    is_differentiated = [type(tangents[i]) is not _Zero for i in inputs]

    def bind_vjp(primals: list, cts: list) -> list[Any]:
        is_given = [ct is not None for ct in cts]
        pullback = DeferredPullback(fun, floats_of, inputs, results, is_differentiated, is_given)
        return linear_call(pullback, bind_jvp, primals, _without_none(cts, tangent_avals), ct_avals)

    out_tangents: list[Any] = [_Zero(aval.to_tangent_aval()) for aval in out_avals]
    if inputs and results:
        diff_tangents = [_instantiate_zeros(tangents[i]) for i in inputs]
        out_tangents = replaced(out_tangents, results, bind_jvp(primals, diff_tangents))
    return deferred_call(fun, primals, out_avals, num_out), out_tangents


@dataclasses.dataclass(frozen=True, eq=False)
class DeferredPullback:
    """The pullback of a `deferred_call`: ``(inputs of the call, cotangents of float results) -> cotangents of float
    inputs``.

    Attributes:
        fun: of the call.
        inputs, results: the numbers of the float inputs and results.
        is_differentiated: which of these inputs have a tangent.
        is_given: which of these results have a cotangent; the others have zeros.
    """

    fun: Callable[[list], list]
    _floats_of: Callable[[list], Callable[..., list[Any]]]
    inputs: Sequence[int]
    results: Sequence[int]
    is_differentiated: Sequence[bool]
    is_given: Sequence[bool]

    def __call__(self, primals: list, cts: list) -> list[Any]:
        return list(jax.vjp(self._floats_of(primals), *(primals[i] for i in self.inputs))[1](cts))


def deferred_function(eqn: Any) -> Callable[[list], list] | None:
    """The function of an equation of `deferred_call`; None for any other equation."""
    return eqn.params["fun"] if eqn.primitive is _deferred_p else None


def deferred_pullback(eqn: Any) -> DeferredPullback | None:
    """The pullback that an equation calls; None if it calls none."""
    fun = eqn.params["fun"] if eqn.primitive is _linear_p else None
    return fun if isinstance(fun, DeferredPullback) else None


def _without_none(values: Sequence[Any], avals: Sequence[Any]) -> list[Any]:
    return [_instantiate_zeros(_Zero(aval)) if x is None else x for x, aval in zip(values, avals, strict=True)]


def _deferred_batch(
    axis: Any, args: Any, dims: Any, *, fun: Callable, out_avals: Any, num_out: int
) -> tuple[list[Any], list[int | None]]:
    is_mapped = [True] * len(out_avals)
    if num_out < len(out_avals):
        # A state that is written with what all examples share may not become mapped.
        types = [_core.mapped_aval(axis.size, d, jax.typeof(x)) for x, d in zip(args, dims, strict=True)]
        with named_axes([axis]):
            jaxpr = jax.make_jaxpr(fun)(types)
            is_mapped = _batching.batch_jaxpr(jaxpr, axis, [d is not None for d in dims], [False] * len(out_avals))[1]
    out_dims = [0 if m else None for m in is_mapped]
    mapped_avals = [_core.unmapped_aval(axis.size, d, a) for d, a in zip(out_dims, out_avals, strict=True)]
    return deferred_call(map_over(fun, axis, (list(dims),), out_dims), args, mapped_avals, num_out), out_dims


def _deferred_impl(*inputs: Any, fun: Callable, **_: Any) -> list[Any]:
    return fun(list(inputs))


_deferred_p = call_primitive("statetx_deferred", _deferred_impl, _given_types, jvp=_deferred_jvp, batch=_deferred_batch)


def _linear_impl(*args: Any, fun: Callable, num_res: int, **_: Any) -> list[Any]:
    return fun(list(args[:num_res]), list(args[num_res:]))


def _linear_jvp(primals: Any, tangents: Any, *, fun: Callable, num_res: int, **params: Any) -> Any:
    tangents, diff_indices = with_nonzero(tangents)
    outs = _linear_p.bind(*primals, fun=fun, num_res=num_res, **params)

    # f(r, t) is linear in t, so that its derivative along dt alone is f(r, dt): the same primitive, which keeps the
    # transpose.
    if all(i >= num_res for i in diff_indices):
        linear_tangents = [_instantiate_zeros(t) for t in tangents[num_res:]]
        return outs, _linear_p.bind(*primals[:num_res], *linear_tangents, fun=fun, num_res=num_res, **params)

    # A residual varies too: differentiate `fun` itself, which loses the custom transpose.
    def run(*operands: Any) -> list[Any]:
        return fun(list(operands[:num_res]), list(operands[num_res:]))

    return jax.jvp(
        _function_of(run, primals, diff_indices),
        [primals[i] for i in diff_indices],
        [tangents[i] for i in diff_indices],
    )


def _linear_transpose(cts: Any, *args: Any, transpose: Callable, num_res: int, **_: Any) -> list[Any]:
    nonzero_cts = [None if type(ct) is _Zero else ct for ct in cts]
    # Nothing to run the reversal for; None is JAX's zero cotangent here.
    if all(ct is None for ct in nonzero_cts):
        return [None] * len(args)
    return [None] * num_res + transpose(list(args[:num_res]), nonzero_cts)


def _linear_batch(
    axis: Any, args: Any, dims: Any, *, fun: Callable, transpose: Callable, num_res: int, out_avals: Any, rules_of: Any
) -> tuple[list[Any], list[Any]]:
    params = {"num_res": num_res, "rules_of": rules_of}
    res_dims, dims = list(dims[:num_res]), list(dims[num_res:])
    if all(d is None for d in (*res_dims, *dims)):
        outs = _linear_p.bind(*args, fun=fun, transpose=transpose, out_avals=out_avals, **params)
        return outs, [None] * len(out_avals)

    def mapped_transpose(residuals: list, cts: list) -> list:
        ct_dims = [None if ct is None else 0 for ct in cts]
        outs = map_over(transpose, axis, (res_dims, ct_dims))(residuals, cts)
        # A tangent that all examples share is broadcast, and the transpose of a broadcast is a sum.
        return [x.sum(0) if d is None else jnp.moveaxis(x, 0, d) for x, d in zip(outs, dims, strict=True)]

    # All outputs are mapped, whichever operands are: `fun` is opaque, and any output may depend on any operand.
    outs = _linear_p.bind(
        *args,
        fun=map_over(fun, axis, (res_dims, dims)),
        transpose=mapped_transpose,
        out_avals=tuple(_core.unmapped_aval(axis.size, 0, aval) for aval in out_avals),
        **params,
    )
    return outs, [0] * len(outs)


_linear_p = call_primitive("statetx_linear", _linear_impl, _given_types, jvp=_linear_jvp, batch=_linear_batch)
_ad.primitive_transposes[_linear_p] = _linear_transpose


# -- a call that no compiled program can make ------------------------------------------------------------------------


def refused_call(error: Callable[[], Exception], args: Sequence[Any], out_avals: Sequence[Any]) -> list[Any]:
    """A call in a program that can be traced to be looked at: to compile, run, map or differentiate it raises."""
    return _refused_p.bind(*args, error=error, out_avals=tuple(out_avals))


def _refuse(*_: Any, error: Callable[[], Exception], **__: Any) -> Any:
    raise error()


_refused_p = call_primitive("statetx_refused", _refuse, _given_types, jvp=_refuse, batch=_refuse)
