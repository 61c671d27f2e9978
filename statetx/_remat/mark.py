"""Marking what a rematerialised function keeps.

JAX asks a policy about primitives, types and parameters, of equations that differentiation and vmap have rewritten: it cannot tell
one value from another. So a value that is kept goes through an equation of ours, which survives both, and the policy that JAX is
handed keeps what is marked. Where a derivative rule reads the value it differentiates (that of ``exp``, ``tanh``, a maximum), the
rule is made to read the marked one; else keeping it would not spare its recomputation.

Rematerialised functions may stand within others. Each has a number for its marks that none within it has: it keeps what its own
policy says, wherever within it that is computed, and nothing that theirs say.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.custom_derivatives import SymbolicZero

from .. import _jax
from .._equations.primitives import row_of
from .._jax import Jaxpr, Literal, Var
from .._positions import function_of
from .._tree import is_float
from .survey import Address

Labels = Mapping[Address, Any]
"""What to write on the marks of values, by their addresses (`survey.Site`): `SAVE` or `offload`. At the address of a call with a
custom derivative, with `RULE` for the output: a function from the rule's equations to the labels of values in it."""

SAVE = "save"
RULE = -1


def offload(src: str, dst: str) -> str:
    """What is written on a value that waits in another memory."""
    return f"offload:{src}:{dst}"


@dataclasses.dataclass(frozen=True)
class KeepMarked:
    """The policy, as JAX takes one, that keeps what is marked for a rematerialised function.

    Attributes:
        region: the number of the function.
    """

    region: int

    def __call__(self, primitive: Any, *_: Any, **params: Any) -> Any:
        if _jax.is_debug_callback(primitive):
            return True  # a no makes JAX lose kept values that it reads; it is called again where that takes more than them
        if "call_jaxpr" in params:  # a custom derivative, left as a call where none of its inputs moves
            eqns = _jax.open_jaxpr(params["call_jaxpr"])[0].eqns
            marks = [e.params for e in eqns if e.primitive is _jax.mark_primitive]
        else:
            marks = [params] if primitive is _jax.mark_primitive else []
        own = sorted((p["what"] for p in marks if p["region"] == self.region), reverse=True)  # "save" first
        if not own:
            return False
        what, *memories = own[0].split(":")
        return True if what == SAVE else _jax.Offloadable(*memories)


def mark(x: Any, labels: Labels, *, region: int, in_rule: bool = False) -> Any:
    """A jaxpr, closed or not, with the values marked that labels are for.

    Args:
        region: the number of the rematerialised function whose policy keeps them.
        in_rule: whether the equations are those of a derivative. They are not differentiated themselves.
    """
    by_equation: dict[int, dict[Address, Any]] = {}
    for (i, *rest), label in labels.items():
        by_equation.setdefault(i, {})[tuple(rest)] = label
    marker = _Marker(region, in_rule)
    eqns: list[Any] = []
    for i, eqn in enumerate(_jax.open_jaxpr(x)[0].eqns):
        eqns += marker.equation(eqn, by_equation[i]) if i in by_equation else [eqn]
    return _jax.with_equations(x, eqns)


class _Marker(NamedTuple):
    region: int
    in_rule: bool

    def equation(self, eqn: Any, labels: Labels) -> list[Any]:
        """The equations in the place of one, for labels of its results and of values within it."""
        own = {at[0]: label for at, label in labels.items() if len(at) == 1 and at[0] != RULE}
        rule = labels.get((RULE,))
        within = {at: label for at, label in labels.items() if len(at) > 1}
        if within:
            eqn = self._within(eqn, within)
        if self.in_rule:
            return self.results(eqn, own)
        if _jax.has_rule(eqn):
            return [self._custom_derivative(eqn, own, rule)]
        # What a loop of ours keeps for its derivative are carries, and not its results.
        if own and _jax.loop_of(eqn) is None and _reads_results(eqn, own):
            return [self._derivative(eqn, own)]
        return self.results(eqn, own)

    def results(self, eqn: Any, labels: Mapping[int, str]) -> list[Any]:
        """An equation and marks on its results, which all others read."""
        outvars, marks = list(eqn.outvars), []
        for n, what in labels.items():
            target = outvars[n]
            if not _jax.is_dropped(target):
                source = outvars[n] = Var(target.aval)
                marks.append(_jax.mark_equation(eqn, source, target, region=self.region, what=what))
        return [eqn.replace(outvars=outvars), *marks]

    def _within(self, eqn: Any, labels: Labels) -> Any:
        loop = _jax.loop_of(eqn)
        if loop is not None:
            own = {at[1:]: label for at, label in labels.items()}
            return _jax.with_body(eqn, mark(loop.body, own, region=self.region, in_rule=self.in_rule))
        key = row_of(eqn).jaxpr
        parts = eqn.params[key] if isinstance(eqn.params[key], (tuple, list)) else [eqn.params[key]]
        new = []
        with _jax.in_shard_maps(eqn):
            for n, part in enumerate(parts):
                own = {at[1:]: label for at, label in labels.items() if at[0] == n}
                new.append(mark(part, own, region=self.region, in_rule=self.in_rule) if own else part)
        return eqn.replace(params={**eqn.params, key: tuple(new) if isinstance(eqn.params[key], tuple) else new[0]})

    def _custom_derivative(self, eqn: Any, own: Mapping[int, str], rule: Callable[[Jaxpr], Labels] | None) -> Any:
        """A call of which the results, and values that the rule computes, are marked in the rule."""
        mark_in_rule = functools.partial(mark, region=self.region, in_rule=True)

        def edit(jaxpr: Jaxpr) -> Jaxpr:
            results = [jaxpr.outvars[i] for i in _jax.results_of_rule(eqn, jaxpr)]
            labels = {} if rule is None else rule(jaxpr)
            return mark_in_rule(jaxpr, {**labels, **_where_made(jaxpr, results, own)})

        call = eqn.params["call_jaxpr"]
        jaxpr = _jax.open_jaxpr(call)[0]
        return _jax.with_rule(eqn, edit, mark_in_rule(call, _where_made(jaxpr, jaxpr.outvars, own)))

    def _derivative(self, eqn: Any, own: Mapping[int, str]) -> Any:
        """An operation with marked results, and with a derivative that reads these in place of the results themselves."""
        plain = _jax.function_of(eqn)
        mark_in_rule = functools.partial(mark, region=self.region, in_rule=True)
        marked = mark_in_rule(plain, {(0, n): what for n, what in own.items()})

        @jax.custom_jvp
        def operation(*xs: Any) -> list[Any]:
            return _jax.evaluate(marked, (), xs)

        # Inputs that do not move stay out of the derivative, which may be infinite or undefined with respect to them.
        @functools.partial(operation.defjvp, symbolic_zeros=True)
        def rule(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
            moving = [i for i, t in enumerate(tangents) if not isinstance(t, SymbolicZero) and is_float(primals[i])]
            jaxpr, consts = _jvp(plain, [_jax.abstract(x) for x in primals], moving)
            labels = _where_made(jaxpr, jaxpr.outvars[: len(eqn.outvars)], own)
            outs = _jax.evaluate(mark_in_rule(jaxpr, labels), consts, [*primals, *(tangents[i] for i in moving)])
            values, rest = outs[: len(eqn.outvars)], iter(outs[len(eqn.outvars) :])
            types = map(_jax.abstract, values)
            return values, [next(rest) if is_float(t) else _jax.zero_tangent(t) for t in types]

        with eqn.ctx.manager:
            jaxpr, consts = _jax.stage(
                operation, [v.aval for v in plain.invars], traced_for="statetx.remat", name="marked"
            )
        (call,) = jaxpr.eqns
        atoms = dict(zip(jaxpr.invars, plain.invars, strict=True))
        atoms |= {v: Literal(c, v.aval) for v, c in zip(jaxpr.constvars, consts, strict=True)}
        invars = [v if isinstance(v, Literal) else atoms[v] for v in call.invars]
        return call.replace(invars=invars, outvars=eqn.outvars, source_info=eqn.source_info, ctx=eqn.ctx)


def _where_made(jaxpr: Jaxpr, variables: Sequence[Any], labels: Mapping[int, str]) -> dict[Address, str]:
    """Labels for some of the variables, by the addresses at which a jaxpr computes them."""
    wanted = {variables[n]: what for n, what in labels.items() if not isinstance(variables[n], Literal)}
    made = ((i, n, v) for i, eqn in enumerate(jaxpr.eqns) for n, v in enumerate(eqn.outvars))
    return {(i, n): wanted[v] for i, n, v in made if v in wanted}


def _reads_results(eqn: Any, labels: Mapping[int, str]) -> bool:
    """Whether the derivative of an operation is computed from its results."""
    plain = _jax.function_of(eqn)
    types = [v.aval for v in plain.invars]
    try:
        with eqn.ctx.manager:
            jaxpr, _ = _jvp(plain, types, [i for i, t in enumerate(types) if is_float(t)])
    except Exception:
        return False  # an operation without a derivative is an error only where it is differentiated
    made = {v for e in jaxpr.eqns for v in e.outvars}
    results = jaxpr.outvars[: len(eqn.outvars)]
    if not all(isinstance(v, Var) and v in made for v in results):
        return False
    if any(e.primitive is _jax.custom_lin_primitive for e in jaxpr.eqns):
        return False  # a rule for reverse mode only (custom_vjp) cannot stand within one for both
    marked = {results[n] for n in labels}
    return any(v in marked for e in jaxpr.eqns for v in e.invars if isinstance(v, Var))


def _jvp(jaxpr: Jaxpr, types: Sequence[Any], moving: Sequence[int]) -> tuple[Jaxpr, Sequence[Any]]:
    """``(*inputs, *tangents of some of them) -> (*outputs, *tangents of the float outputs)`` as equations, and constants."""

    def push(*xs: Any) -> list[Any]:
        primals, tangents = xs[: len(types)], xs[len(types) :]

        run = function_of(lambda *operands: _jax.evaluate(jaxpr, (), operands), primals, moving)
        outs, out_tangents = jax.jvp(run, [primals[i] for i in moving], list(tangents))
        return [*outs, *(t for x, t in zip(outs, out_tangents, strict=True) if is_float(x))]

    return _jax.stage(push, [*types, *(types[i] for i in moving)], traced_for="statetx.remat", name="jvp")
