"""Arrays that a staged function closes over, at any depth, become its inputs.

JAX writes some of them into equations, as constants of the jaxpr of a nested ``jit`` or as scalar literals. What keeps
such equations keeps the arrays, and two models whose layers are jitted by themselves would never be alike.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax

from .. import _jax
from .._jax import Jaxpr, Literal
from .primitives import JIT, REMAT


def hoist(jaxpr: Jaxpr, consts: Sequence[Any]) -> tuple[Jaxpr, list[Any]]:
    """A jaxpr without constants, whose first inputs are to get the arrays that are returned.

    Arrays in equations that cannot be given further inputs, as those of derivative rules, stay.
    """
    num_inputs = len(consts) - len(jaxpr.constvars)  # from jax 0.12 on, constants of a trace may be inputs already
    variables = [*jaxpr.constvars, *jaxpr.invars[:num_inputs]]
    scope = _Scope(variables, consts)
    eqns = [scope.equation(eqn) for eqn in jaxpr.eqns]
    outvars = [scope.atom(v) for v in jaxpr.outvars]
    invars = [*scope.variables, *jaxpr.invars[num_inputs:]]
    return _jax.rebuild(jaxpr, invars=invars, outvars=outvars, eqns=eqns), scope.arrays


class _Scope:
    """One jaxpr while its arrays are made inputs: `variables` are new ones, `arrays` their values."""

    def __init__(self, variables: Sequence[Any], arrays: Sequence[Any]):
        self.variables = list(variables)
        self.arrays = list(arrays)
        self._known = {id(x): v for x, v in zip(arrays, variables, strict=True)}

    def variable(self, array: Any, aval: Any) -> Any:
        var = self._known.get(id(array))
        if var is None:
            var = self._known[id(array)] = _jax.Var(aval)
            self.variables.append(var)
            self.arrays.append(array)
        return var

    def atom(self, atom: Any) -> Any:
        is_array = isinstance(atom, Literal) and isinstance(atom.val, jax.Array)
        return self.variable(atom.val, atom.aval) if is_array else atom

    def equation(self, eqn: Any) -> Any:
        if any(isinstance(v, Literal) and isinstance(v.val, jax.Array) for v in eqn.invars):
            eqn = eqn.replace(invars=[self.atom(v) for v in eqn.invars])
        rule = _RULES.get(eqn.primitive.name)
        return eqn if rule is None else rule(self, eqn)

    def inputs_for(self, new: Jaxpr, arrays: Sequence[Any]) -> list[Any]:
        """Variables of this jaxpr for arrays that a nested one needs as its first inputs."""
        return [self.variable(x, v.aval) for x, v in zip(arrays, new.invars, strict=False)]


# -- nested jaxprs ---------------------------------------------------------------------------------------------

_hoisted: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
"""By nested jaxpr, closed or not: the one without arrays, None if it has none to begin with. JAX's caches go by the identity of both."""


def _nested(x: Any) -> tuple[Any, list[Any]]:
    """A jaxpr in an equation with its arrays as its first inputs, and these arrays."""
    known = _hoisted.get(x, x)
    if known is None:
        return x, []
    jaxpr, consts = _jax.open_jaxpr(x)
    new, arrays = hoist(jaxpr, consts)
    if not arrays:
        _hoisted[x] = None
        return x, []
    if known is x:
        known = _hoisted[x] = new if isinstance(x, Jaxpr) else _jax.close(new, ())
    return known, arrays


def _of_call(name: str, *by_input: tuple[str, Any]) -> Callable[[_Scope, Any], Any]:
    """The rule of an operation that runs the jaxpr `name` on its operands; `by_input`: parameters with an entry for each."""

    def rule(scope: _Scope, eqn: Any) -> Any:
        new, arrays = _nested(eqn.params[name])
        if not arrays:
            return eqn
        params = {**eqn.params, name: new}
        for key, value in by_input:
            params[key] = (value,) * len(arrays) + tuple(params[key])
        inputs = scope.inputs_for(_jax.open_jaxpr(new)[0], arrays)
        return eqn.replace(params=params, invars=[*inputs, *eqn.invars])

    return rule


def _of_scan(scope: _Scope, eqn: Any) -> Any:
    new, arrays = _nested(eqn.params["jaxpr"])
    if not arrays:
        return eqn
    return _jax.with_scan_constants(eqn, new, scope.inputs_for(_jax.open_jaxpr(new)[0], arrays))


def _of_while(scope: _Scope, eqn: Any) -> Any:
    test, of_test = _nested(eqn.params["cond_jaxpr"])
    body, of_body = _nested(eqn.params["body_jaxpr"])
    if not (of_test or of_body):
        return eqn
    num_test = eqn.params["cond_nconsts"]
    params = {
        **eqn.params,
        "cond_jaxpr": test,
        "body_jaxpr": body,
        "cond_nconsts": num_test + len(of_test),
        "body_nconsts": eqn.params["body_nconsts"] + len(of_body),
    }
    for_test = scope.inputs_for(_jax.open_jaxpr(test)[0], of_test)
    for_body = scope.inputs_for(_jax.open_jaxpr(body)[0], of_body)
    return eqn.replace(params=params, invars=[*for_test, *eqn.invars[:num_test], *for_body, *eqn.invars[num_test:]])


def _of_cond(scope: _Scope, eqn: Any) -> Any:
    branches = [_nested(x) for x in eqn.params["branches"]]
    if not any(arrays for _, arrays in branches):
        return eqn
    inputs: list[Any] = []
    for new, arrays in branches:
        inputs += scope.inputs_for(_jax.open_jaxpr(new)[0], arrays)
    padded, start = [], 0
    for new, arrays in branches:  # all branches take the same operands, of which each uses its own
        jaxpr, _ = _jax.open_jaxpr(new)
        end = start + len(arrays)
        others = [_jax.Var(v.aval) for v in inputs]
        invars = [*others[:start], *jaxpr.invars[: len(arrays)], *others[end:], *jaxpr.invars[len(arrays) :]]
        padded.append(_jax.close(_jax.rebuild(jaxpr, invars=invars, outvars=jaxpr.outvars), ()))
        start = end
    params = {**eqn.params, "branches": tuple(padded)}
    return eqn.replace(params=params, invars=[eqn.invars[0], *inputs, *eqn.invars[1:]])


_RULES: dict[str, Callable[[_Scope, Any], Any]] = {
    **dict.fromkeys(
        JIT,
        _of_call("jaxpr", ("in_shardings", _jax.UNSPECIFIED), ("in_layouts", None), ("donated_invars", False)),
    ),
    **dict.fromkeys(REMAT, _of_call("jaxpr")),
    _jax.CLOSED_CALL: _of_call("call_jaxpr"),
    "scan": _of_scan,
    "while": _of_while,
    "cond": _of_cond,
}
