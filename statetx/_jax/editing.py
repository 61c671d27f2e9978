"""Edits of jaxprs."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax.extend.core
from jax._src import core as _core
from jax._src import source_info_util
from jax._src.interpreters import partial_eval as _pe

from .custom_loop import loop_of, with_body
from .equations import ClosedJaxpr, Jaxpr, Literal, Var, is_jaxpr, open_jaxpr

_value_of = operator.attrgetter("val")


def bind_equation(eqn: Any, params: dict[str, Any], args: Sequence[Any]) -> list[Any]:
    """Run one equation, with these parameters, on `args`; what it does is attributed to the line it came from."""
    name_stack = source_info_util.current_name_stack() + eqn.source_info.name_stack
    with source_info_util.user_context(eqn.source_info.traceback, name_stack=name_stack), eqn.ctx.manager:
        outs = eqn.primitive.bind(*args, **eqn.primitive.get_bind_params(params))
    return outs if eqn.primitive.multiple_results else [outs]


def interpret(
    jaxpr: Any, args: Sequence[Any], rule: Callable[[Any, list[Any]], Sequence[Any]], *, literal: Callable = _value_of
) -> list[Any]:
    """Evaluate a jaxpr over any domain; the outputs in that domain.

    Args:
        jaxpr: anything with `constvars`, `invars`, `outvars` and `eqns`, whose items have `invars` and `outvars`.
        args: for its constants and inputs.
        rule: ``(equation, operands) -> results``.
        literal: what a literal stands for, by default its value.
    """
    env = dict(zip([*jaxpr.constvars, *jaxpr.invars], args, strict=True))

    def read(atom: Any) -> Any:
        return literal(atom) if isinstance(atom, Literal) else env[atom]

    for eqn in jaxpr.eqns:
        env.update(zip(eqn.outvars, rule(eqn, [read(v) for v in eqn.invars]), strict=True))
    return [read(v) for v in jaxpr.outvars]


def function_of(eqn: Any) -> Jaxpr:
    """An equation as a function of the variables among its operands."""
    invars = list(dict.fromkeys(v for v in eqn.invars if isinstance(v, Var)))
    outvars = [Var(v.aval) for v in eqn.outvars]
    info = _core.DebugInfo("statetx", eqn.primitive.name, None, None)
    return Jaxpr([], invars, outvars, [eqn.replace(outvars=outvars)], eqn.effects, info)


class _Checks:
    """Whether edited jaxprs are type-checked, which costs about as much as the edit."""

    on = False


def check_edits(on: bool = True) -> bool:
    """Type-check every edited jaxpr from now on, or no longer; returns the former choice."""
    former, _Checks.on = _Checks.on, on
    return former


def _checked(jaxpr: Jaxpr) -> Jaxpr:
    """The jaxpr, after JAX's own check that each variable is defined once, before it is read, with the type that it has.

    The body of a `jax.shard_map` by itself is not checked: its axes are bound, and its types hold, only within the whole program.
    """
    if _Checks.on and not any(map(_is_manual, (v.aval for v in (*jaxpr.invars, *jaxpr.outvars)))):
        try:
            jax.extend.core.check_jaxpr(jaxpr)
        except NameError:  # an axis of a `jax.shard_map` that types do not say (check_vma=False)
            pass
    return jaxpr


def _is_manual(aval: Any) -> bool:
    sharding = getattr(aval, "sharding", None)
    return sharding is not None and bool(sharding.mesh.manual_axes)


def rebuild(jaxpr: Jaxpr, *, invars: Sequence[Any], outvars: Sequence[Any], eqns: Sequence[Any] | None = None) -> Jaxpr:
    """The jaxpr with other inputs, outputs and equations and with no constants."""
    info = jaxpr.debug_info._replace(arg_names=None, result_paths=None)
    eqns = jaxpr.eqns if eqns is None else list(eqns)
    return _checked(jaxpr.replace(constvars=[], invars=list(invars), outvars=list(outvars), eqns=eqns, debug_info=info))


def with_literals(jaxpr: Jaxpr, literals: dict[Any, Any]) -> Jaxpr:
    """The jaxpr without constants and with literals in the places of some inputs."""

    def read(atom: Any) -> Any:
        return atom if isinstance(atom, Literal) else literals.get(atom, atom)

    eqns = [e.replace(invars=[read(v) for v in e.invars]) for e in jaxpr.eqns]
    invars = [v for v in jaxpr.invars if v not in literals]
    return rebuild(jaxpr, invars=invars, outvars=[read(v) for v in jaxpr.outvars], eqns=eqns)


def without_dead_code(jaxpr: Any) -> Jaxpr:
    """The equations of a jaxpr, closed or not, that its outputs need, in loops and regions too."""
    jaxpr, _ = open_jaxpr(jaxpr)
    return _pe.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)[0]


def map_jaxprs(fun: Callable[[Any], Any], eqn: Any) -> Any:
    """An equation with `fun` applied to each jaxpr in it, closed or not; of a loop with rules of its own, to that of a step.

    Returns the equation itself if that changes none.
    """
    loop = loop_of(eqn)
    if loop is not None:
        body = fun(loop.body)
        return eqn if body is loop.body else with_body(eqn, body)

    def apply(x: Any) -> Any:
        if isinstance(x, (tuple, list)) and any(map(is_jaxpr, x)):
            return getattr(x, "_make", type(x))([apply(v) for v in x])
        return fun(x) if is_jaxpr(x) else x

    params = {key: apply(value) for key, value in eqn.params.items()}
    return eqn if all(params[k] is v for k, v in eqn.params.items()) else eqn.replace(params=params)


def with_equations(x: Any, eqns: Sequence[Any]) -> Any:
    """A jaxpr, closed or not, with other equations for the same inputs and outputs."""
    if isinstance(x, Jaxpr):
        return _checked(x.replace(eqns=list(eqns)))
    return ClosedJaxpr(_checked(x.jaxpr.replace(eqns=list(eqns))), x.consts)


def closed_like(x: Any, jaxpr: Jaxpr) -> Any:
    """A jaxpr without constants, closed if `x` is: each primitive takes one or the other as its parameter."""
    return jaxpr if isinstance(x, Jaxpr) else ClosedJaxpr(jaxpr, ())


def with_scope(eqn: Any, name: str) -> Any:
    """The equation with a further name around it, which all that JAX makes of the equation inherits."""
    info = eqn.source_info
    return eqn.replace(source_info=info.replace(name_stack=info.name_stack.extend(name)))


def inlined(eqn: Any, outer: Any, *, same_line: bool, **changes: Any) -> Any:
    """The equation, changed, with the names around `outer`, whose jaxpr it comes from, and on request its line."""
    info, around = eqn.source_info, outer.source_info
    info = info.replace(name_stack=around.name_stack + info.name_stack)
    return eqn.replace(source_info=info.replace(traceback=around.traceback) if same_line else info, **changes)
