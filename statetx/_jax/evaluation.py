"""Evaluate jaxprs."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import core as _core
from jax._src import source_info_util
from jax._src.interpreters import partial_eval as _pe

from .equations import ClosedJaxpr, Eqn, Jaxpr, Literal, as_array, open_jaxpr
from .loops import scan_counts, scan_p
from .traces import _context, is_eager

_value_of = operator.attrgetter("val")


def bind_equation(
    eqn: Eqn, params: dict[str, Any], args: Sequence[Any], context: contextlib.AbstractContextManager[Any] | None = None
) -> list[Any]:
    """Run one equation on `args` with these parameters; its operations keep the source line and name stack of `eqn`.

    Args:
        context: in the place of the settings that the equation was traced under.
    """
    # `eqn.ctx` has the settings that the equation was traced under, such as the mesh; lowering looks them up there.
    name_stack = source_info_util.current_name_stack() + eqn.source_info.name_stack
    with source_info_util.user_context(eqn.source_info.traceback, name_stack=name_stack), context or eqn.ctx.manager:
        outs = eqn.primitive.bind(*args, **eqn.primitive.get_bind_params(params))
    return outs if eqn.primitive.multiple_results else [outs]


def interpret(
    jaxpr: Any,
    args: Sequence[Any],
    rule: Callable[[Any, list[Any]], Sequence[Any]],
    *,
    literal: Callable[[Any], Any] = _value_of,
) -> list[Any]:
    """Evaluate a jaxpr over any domain; return its outputs in that domain.

    Args:
        jaxpr: any object with `constvars`, `invars`, `outvars` and `eqns`; each equation has `invars` and `outvars`.
        args: values of its constants and then of its inputs.
        rule: ``(equation, operands) -> results``.
        literal: maps a literal to the domain; by default to its value.
    """
    env = dict(zip([*jaxpr.constvars, *jaxpr.invars], args, strict=True))

    def read(atom: Any) -> Any:
        return literal(atom) if isinstance(atom, Literal) else env[atom]

    for eqn in jaxpr.eqns:
        env.update(zip(eqn.outvars, rule(eqn, [read(v) for v in eqn.invars]), strict=True))
    return [read(v) for v in jaxpr.outvars]


def evaluate_single_turns(
    jaxpr: Jaxpr, args: Sequence[Any], is_stacked: Sequence[bool], is_out_stacked: Sequence[bool]
) -> list[Any]:
    """Evaluate a jaxpr without constants, with the bodies of its scans of length 1 in their places.

    Args:
        is_stacked: for each input, whether the argument is the only element of the array that the jaxpr takes;
            `is_out_stacked` says it of results.
    """
    values: dict[Any, Any] = {}
    elements: dict[Any, Any] = {}  # what passes from scan to scan is not stacked in between
    for v, x, flag in zip(jaxpr.invars, args, is_stacked, strict=True):
        (elements if flag else values)[v] = x

    def read(v: Any) -> Any:
        if isinstance(v, Literal):
            return v.val
        return values[v] if v in values else elements[v][None]

    def element(v: Any) -> Any:
        return elements[v] if not isinstance(v, Literal) and v in elements else jnp.asarray(read(v))[0]

    for eqn in jaxpr.eqns:
        if eqn.primitive is scan_p and eqn.params["length"] == 1 and not eqn.effects:
            body, consts = open_jaxpr(eqn.params["jaxpr"])
            num_consts, num_carry = scan_counts(eqn)
            first_x = num_consts + num_carry
            if len(body.outvars) == len(eqn.outvars):  # JAX 0.12 may forward some
                x = map(element, eqn.invars[first_x:])
                outs = evaluate(body, consts, [*map(read, eqn.invars[:first_x]), *x])
                values.update(zip(eqn.outvars[:num_carry], outs, strict=False))
                elements.update(zip(eqn.outvars[num_carry:], outs[num_carry:], strict=True))
                continue
        values.update(zip(eqn.outvars, bind_equation(eqn, eqn.params, [read(v) for v in eqn.invars]), strict=True))
    return [element(v) if flag else read(v) for v, flag in zip(jaxpr.outvars, is_out_stacked, strict=True)]


def evaluate(jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    """Evaluate a jaxpr on `args` in the current trace.

    Raises:
        FloatingPointError: it runs at once, and an output has what ``jax.debug_nans`` or ``jax.debug_infs`` looks for.
            An intermediate value may have it: `jax.numpy.var` allows it in itself, and equations do not tell.
    """
    trace = _context.trace
    args = [*consts, *args]
    if isinstance(trace, _pe.DynamicJaxprTrace) and not (jaxpr.effects or jaxpr.is_high):
        variables = [*jaxpr.constvars, *jaxpr.invars]
        source = source_info_util.current()
        # Copied only if every argument has the very type that the jaxpr was staged for. Another weak type or sharding
        # may change the types of results, which JAX must then infer again.
        tracers = [trace.to_jaxpr_tracer(as_array(x), source) for x in args]
        if all(t.aval == v.aval for t, v in zip(tracers, variables, strict=True)):
            return _copy_equations(trace, jaxpr, tracers, source)
    outs = _core.jaxpr_as_fun(ClosedJaxpr(jaxpr, args[: len(consts)]))(*args[len(consts) :])
    if (jax.debug_nans.value or jax.debug_infs.value) and is_eager() and _looked_for(outs):
        return evaluate_checked(jaxpr, args)
    return outs


def evaluate_checked(jaxpr: Jaxpr, args: Sequence[Any]) -> list[Any]:
    """Evaluate a jaxpr without constants operation by operation, each checked under ``jax.debug_nans``; `evaluate`
    checks the results.

    For a second run after one that has returned a NaN, to name the operation. JAX itself checks nothing within a
    `jax.custom_jvp` function, and a loop with a strategy is one.
    """

    def rule(eqn: Any, operands: list[Any]) -> list[Any]:
        called = eqn.params.get("call_jaxpr")
        if isinstance(called, ClosedJaxpr):
            return evaluate_checked(called.jaxpr, [*called.consts, *operands])
        outs = bind_equation(eqn, eqn.params, operands)
        if kind := _looked_for(outs):
            raise FloatingPointError(f"invalid value ({kind}) encountered in {eqn.primitive}")
        return outs

    return interpret(jaxpr, args, rule)


def _looked_for(outs: Sequence[Any]) -> str:
    """Which of "nan" and "inf" arrays have, if the user lets JAX look for it."""
    arrays = [jnp.asarray(x) for x in outs if jnp.issubdtype(x.dtype, jnp.inexact)]
    data = [np.asarray(shard.data) for x in arrays for shard in x.addressable_shards]
    if jax.debug_nans.value and any(np.isnan(x).any() for x in data):
        return "nan"
    return "inf" if jax.debug_infs.value and any(np.isinf(x).any() for x in data) else ""


def _copy_equations(trace: Any, jaxpr: Jaxpr, tracers: Sequence[Any], call_source: Any) -> list[Any]:
    """Copy a jaxpr's equations to a trace that records them; `tracers` of that trace are its inputs.

    The result is the same as binding them one by one, but faster: their types are known. JAX's
    ``inline_jaxpr_into_trace`` was rejected: it gives every equation the source line of the call, so the lines of the
    user's code would be lost.
    """

    def rule(eqn: Any, operands: list[Any]) -> list[Any]:
        source = eqn.source_info.replace(name_stack=call_source.name_stack + eqn.source_info.name_stack)
        types = [v.aval for v in eqn.outvars]
        return trace.emit_eqn(operands, types, eqn.primitive, eqn.params, eqn.effects, source, eqn.ctx)

    literal = lambda atom: _pe.DynamicJaxprTracer(trace, atom.aval, atom, call_source)
    return interpret(jaxpr, tracers, rule, literal=literal)
