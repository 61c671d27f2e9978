"""A call that is traced once, with each function that it differentiates as one equation, to be evaluated with others in
their places.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .. import _jax
from .._equations.structure import Body, table
from .._jax import Jaxpr
from .._positions import replaced
from .._remat.override import override, rewritten_by, unobserved
from .._remat.rewriter import Rewriter
from ..residuals._trace import TracedCall
from ._numbered import DifferentiatedCall, numbered_body


class UnresolvedError(Exception):
    """A derivative whose function is not known, as under `jax.vmap`."""


class _Deferring(Rewriter):
    """Makes each function that is differentiated one equation, also inside of others."""

    is_used_once = True
    keeps_policies = True

    def __init__(self, *, keeps_order: bool):
        self.keeps_order = keeps_order

    @property
    def inner(self) -> Rewriter:
        return self

    def rewrite(self, body: Body, name: str, num_out: int) -> Callable:
        gradient, types = DifferentiatedCall(body, name, num_out), [v.aval for v in body.jaxpr.outvars]
        return lambda operands, *args: _jax.deferred_call(gradient, [*operands, *args], types, num_out)


class Outline:
    """A traced call, whose calls of the user's functions are numbered.

    A derivative whose function is not known raises `UnresolvedError`.

    Args:
        types: of the inputs.
        keeps_order: as in `Rewriter`, of the rewriters that it is evaluated with.
    """

    def __init__(self, call: TracedCall, types: Sequence[Any], *, keeps_order: bool):
        with table.bypassed(), rewritten_by(_Deferring(keeps_order=keeps_order)):
            self._traced, _ = call.retrace(types)
        self._traced.body = numbered_body(self._traced)
        numbers = {(id(i.state), i.index): n for n, i in enumerate(call.inputs)}
        self._numbers = [numbers.get((id(i.state), i.index)) for i in self._traced.inputs]

    def rewrite(self, rewriter: Rewriter) -> None:
        """Let a rewriter see each function that the call differentiates, in order; nothing is evaluated."""
        _rewrite(self._traced.body.jaxpr, rewriter)

    def __call__(self, arrays: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """As the traced call, whose differentiated functions the rewriter of this block rewrites."""
        body, pairs = self._traced.body, zip(self._numbers, self._traced.inputs, strict=True)
        inputs = [i.array if n is None else arrays[n] for n, i in pairs]
        return self._traced.results(resolved(body.jaxpr, [*body.operands, *inputs], override.rewriter))


class _OutlinedCall(NamedTuple):
    """A deferred call of a jaxpr, with the equation of its derivative.

    Attributes:
        derivative: None if it has none.
    """

    gradient: DifferentiatedCall
    derivative: Any


def resolved(jaxpr: Jaxpr, args: Sequence[Any], rewriter: Rewriter | None) -> list[Any]:
    """Evaluate a jaxpr with its deferred functions as a rewriter makes them."""
    called = _calls(jaxpr)
    pullbacks: dict[int, Callable] = {}

    def rule(eqn: Any, operands: list[Any]) -> Sequence[Any]:
        if (call := called.get(id(eqn))) is not None:
            outs, pullback = _call(call, operands, rewriter)
            pullbacks[id(call.derivative)] = pullback
            return outs
        if id(eqn) in pullbacks:
            return pullbacks[id(eqn)](operands)
        if _has_unresolved(eqn):
            eqn = _jax.map_jaxprs(lambda x: _resolved_jaxpr(x, rewriter), eqn)
        return _jax.bind_equation(eqn, eqn.params, operands)

    return _jax.interpret(jaxpr, args, rule)


def _rewrite(jaxpr: Jaxpr, rewriter: Rewriter) -> None:
    called = _calls(jaxpr)
    derivatives = {id(call.derivative) for call in called.values()}
    for eqn in jaxpr.eqns:
        if (call := called.get(id(eqn))) is not None:
            _edited(call.gradient, rewriter)
        elif id(eqn) not in derivatives and _has_unresolved(eqn):
            for inner in filter(_has_deferred, _jax.inner_jaxprs(eqn)):
                _rewrite(_jax.open_jaxpr(inner)[0], rewriter)


def _has_unresolved(eqn: Any) -> bool:
    """Whether an equation has deferred functions inside.

    Raises:
        UnresolvedError: it is one whose derivative is elsewhere, or is on a mesh.
    """
    if _jax.deferred_function(eqn) is not None or _jax.deferred_pullback(eqn) is not None:
        raise UnresolvedError
    has_deferred = any(map(_has_deferred, _jax.inner_jaxprs(eqn)))
    if has_deferred and eqn.primitive.name == "shard_map":
        raise UnresolvedError
    return has_deferred


def _calls(jaxpr: Jaxpr) -> Mapping[int, _OutlinedCall]:
    """The deferred calls of a jaxpr, by their equations."""
    pullbacks = [(eqn, p) for eqn in jaxpr.eqns if (p := _jax.deferred_pullback(eqn)) is not None]
    called = {}
    for eqn in jaxpr.eqns:
        gradient = _jax.deferred_function(eqn)
        if isinstance(gradient, DifferentiatedCall):
            inputs = list(eqn.invars)
            derivatives = [e for e, p in pullbacks if p.fun is gradient and e.invars[: len(inputs)] == inputs]
            if len(derivatives) > 1:
                raise UnresolvedError
            called[id(eqn)] = _OutlinedCall(gradient, derivatives[0] if derivatives else None)
    return called


def _call(call: _OutlinedCall, operands: list[Any], rewriter: Rewriter | None) -> tuple[list[Any], Callable]:
    """The results of a deferred call, and its derivative: ``(operands of the equation) -> results``."""
    edited = _edited(call.gradient, rewriter)
    if call.derivative is None:
        return edited((), *operands), lambda operands: []
    pullback = _jax.deferred_pullback(call.derivative)
    assert pullback is not None
    numbers = [i for i, flag in zip(pullback.inputs, pullback.is_differentiated, strict=True) if flag]
    result_numbers = [i for i, flag in zip(pullback.results, pullback.is_given, strict=True) if flag]

    def run(*floats: Any) -> tuple[list[Any], list[Any]]:
        outs = edited((), *replaced(operands, numbers, floats))
        return [outs[i] for i in result_numbers], list(outs)

    with unobserved():
        _, vjp, outs = jax.vjp(run, *(operands[i] for i in numbers), has_aux=True)

    def derivative(values: list[Any]) -> list[Any]:
        cts = values[len(operands) :]
        floats = iter(vjp([ct for ct, flag in zip(cts, pullback.is_given, strict=True) if flag]))
        types = [v.aval for v in call.derivative.outvars]
        return [
            next(floats) if flag else jnp.zeros(aval.shape, aval.dtype)
            for flag, aval in zip(pullback.is_differentiated, types, strict=True)
        ]

    return outs, derivative


def _edited(gradient: DifferentiatedCall, rewriter: Rewriter | None) -> Callable:
    """A function that is differentiated, as a rewriter makes it."""
    body = gradient.body
    if _has_deferred(body.jaxpr):
        body = Body(_resolved_jaxpr(body.jaxpr, None if rewriter is None else rewriter.inner), [])
    return body if rewriter is None else rewriter.rewrite(body, gradient.name, gradient.num_out)


def _resolved_jaxpr(x: Any, rewriter: Rewriter | None) -> Any:
    jaxpr, constants = _jax.open_jaxpr(x)
    if not _has_deferred(jaxpr):
        return x
    avals = [v.aval for v in jaxpr.invars]
    run = lambda *args: resolved(jaxpr, [*constants, *args], rewriter)
    body = Body.close(*_jax.stage(run, avals, traced_for="statetx.explain_oom", name="resolved"))
    if body.operands:
        raise UnresolvedError
    return _jax.closed_like(x, body.jaxpr)


def _has_deferred(x: Any) -> bool:
    return any(_jax.deferred_function(eqn) is not None for eqn in _jax.equations_in(x))
