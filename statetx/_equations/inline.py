"""Inline calls into a jaxpr."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from .. import _jax
from .._jax import Jaxpr, Literal
from .primitives import TABLE


def inline(
    x: Any,
    consts: Sequence[Any] = (),
    *,
    calls: Collection[str],
    deep: bool = True,
    unless: Callable[[Any], Any] = lambda eqn: False,
    note: Callable[[Any, list[Any], list[Any], int, int], Any] = lambda *_: None,
) -> Jaxpr:
    """Replace calls by the equations of their jaxprs, and constants by literals.

    Each variable of the result is defined once, even where one jaxpr is called twice.

    Args:
        x: a jaxpr, closed or not.
        consts: values of its constants, unless it is closed.
        calls: names of the primitives to inline, a subset of `primitives.INLINED`.
        deep: whether to inline also within loops, branches and other calls; otherwise these stay unchanged.
        unless: ``(equation) -> bool``, of calls that stay; asked at the level of `x` and in what is inlined into it.
        note: called for each equation of `x` with what it reads and defines in the result, and with the interval of its
            equations there.
    """
    jaxpr, closed_consts = _jax.open_jaxpr(x)
    eqns: list[Any] = []

    def copied(eqn: Any, operands: list[Any]) -> list[Any]:
        outvars = [_jax.Var(v.aval) for v in eqn.outvars]
        if deep:
            eqn = _jax.map_jaxprs(lambda inner: _jax.closed_like(inner, inline(inner, calls=calls)), eqn)
        eqns.append(eqn.replace(invars=operands, outvars=outvars))
        return outvars

    def run(jaxpr: Jaxpr, consts: Sequence[Any], operands: Sequence[Any], call: Any, same_line: bool) -> list[Any]:
        def noted(eqn: Any, operands: list[Any]) -> list[Any]:
            start = len(eqns)
            outs = rule(eqn, operands)
            note(eqn, operands, outs, start, len(eqns))
            return outs

        def rule(eqn: Any, operands: list[Any]) -> list[Any]:
            eqn = eqn if call is None else _jax.inlined(eqn, call, same_line=same_line)
            # Of a value that is stored in fewer bits a report has one line, with its format.
            if eqn.primitive.name not in calls or _jax.is_storing(eqn) or unless(eqn):
                return copied(eqn, operands)
            inner, values = _jax.open_jaxpr(eqn.params[TABLE[eqn.primitive.name].jaxpr])
            # JAX caches the jaxprs of its own functions with the source lines of the first caller: take the line of
            # this call.
            return run(inner, values, operands, eqn, same_line or _jax.is_written_by_jax(inner))

        # From jax 0.12 on, constants of a trace may be its first inputs.
        variables = [*jaxpr.constvars, *jaxpr.invars]
        literals = [Literal(c, v.aval) for v, c in zip(variables, consts, strict=False)]
        return _jax.interpret(jaxpr, [*literals, *operands], noted if call is None else rule, literal=lambda atom: atom)

    consts = consts or closed_consts
    invars = [_jax.Var(v.aval) for v in jaxpr.invars[len(consts) - len(jaxpr.constvars) :]]
    outvars = run(jaxpr, consts, invars, None, False)
    return _jax.rebuild(jaxpr, invars=invars, outvars=outvars, eqns=eqns)
