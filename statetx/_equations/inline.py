"""Rewriting of jaxprs without change of meaning: calls become equations, arrays become inputs."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax

from .. import _jax
from .._cached import cached_property
from .._jax import Jaxpr, Literal
from .primitives import JIT, REMAT, TABLE


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
        unless: ``(equation) -> bool``, of calls that stay; asked at the level of `x` and in the inlined jaxprs.
        note: called for each equation of `x` with its operands and results in the new jaxpr, and with the interval of
            its equations there.
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


# -- arrays as inputs ---------------------------------------------------------------------------------------------

# JAX writes arrays that a function closes over into equations, at any depth: as constants of a nested ``jit``'s jaxpr
# or as scalar literals. A cache of such equations would keep the arrays alive, and two models whose layers are jitted
# separately would never have equal structures.


def hoist(jaxpr: Jaxpr, consts: Sequence[Any]) -> tuple[Jaxpr, list[Any]]:
    """Return a jaxpr without constants, and the arrays to pass as its first inputs.

    Arrays in equations that cannot have further inputs, such as calls with derivative rules, stay. A derivative rule
    that runs late may leave values of the jaxpr itself in nested ones, as constants: they become operands there.
    """
    num_inputs = len(consts) - len(jaxpr.constvars)  # from jax 0.12 on, constants of a trace may be inputs already
    variables = [*jaxpr.constvars, *jaxpr.invars[:num_inputs]]
    scope = _Scope(variables, consts, jaxpr)
    eqns = [scope.equation(eqn) for eqn in jaxpr.eqns]
    outvars = [scope.atom(v) for v in jaxpr.outvars]
    invars = [*scope.variables, *jaxpr.invars[num_inputs:]]
    return _jax.rebuild(jaxpr, invars=invars, outvars=outvars, eqns=eqns), scope.arrays


class _Scope:
    """A jaxpr while its arrays become inputs: `variables` are the new inputs, `arrays` their values."""

    def __init__(self, variables: Sequence[Any], arrays: Sequence[Any], jaxpr: Jaxpr):
        self._jaxpr = jaxpr
        # By variable of a constant that is a value of the jaxpr, the variable of that value.
        self._aliases = {v: var for v, x in zip(variables, arrays, strict=True) if (var := self._own(x)) is not None}
        inputs = [(v, x) for v, x in zip(variables, arrays, strict=True) if v not in self._aliases]
        self.variables = [v for v, _ in inputs]
        self.arrays = [x for _, x in inputs]
        # By identity: an array that several equations hold becomes one input. `arrays` keeps them alive, and so the
        # ids valid.
        self._variable_by_id = {id(x): v for v, x in inputs}

    def variable(self, array: Any, aval: Any) -> Any:
        var = self._variable_by_id.get(id(array))
        if var is None and (defined := self._own(array)) is not None:
            return defined
        if var is None:
            var = self._variable_by_id[id(array)] = _jax.Var(aval)
            self.variables.append(var)
            self.arrays.append(array)
        return var

    @cached_property
    def _defined(self) -> set[Any]:
        return {*self._jaxpr.constvars, *self._jaxpr.invars, *(v for eqn in self._jaxpr.eqns for v in eqn.outvars)}

    def _own(self, array: Any) -> Any:
        """The variable of an array that is a value of this jaxpr; None for another array."""
        var = _jax.variable_of(array)
        return var if isinstance(var, _jax.Var) and var in self._defined else None  # not the literal of a constant

    def atom(self, atom: Any) -> Any:
        if not isinstance(atom, Literal):
            return self._aliases.get(atom, atom)
        return self.variable(atom.val, atom.aval) if isinstance(atom.val, jax.Array) else atom

    def equation(self, eqn: Any) -> Any:
        if self._aliases or any(isinstance(v, Literal) and isinstance(v.val, jax.Array) for v in eqn.invars):
            eqn = eqn.replace(invars=[self.atom(v) for v in eqn.invars])
        rule = _RULES.get(eqn.primitive.name)
        return eqn if rule is None else rule(self, eqn)

    def inputs_for(self, new: Jaxpr, arrays: Sequence[Any]) -> list[Any]:
        """Variables of this jaxpr for the arrays that a nested jaxpr needs as its first inputs."""
        return [self.variable(x, v.aval) for x, v in zip(arrays, new.invars, strict=False)]


# -- nested jaxprs ---------------------------------------------------------------------------------------------

_hoisted: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
"""From a nested jaxpr, closed or not, to the hoisted one; None if it holds no arrays. JAX's caches go by identity:
hoist each once.
"""


def _nested(x: Any) -> tuple[Any, list[Any]]:
    """Hoist a jaxpr in an equation: the jaxpr with its arrays as first inputs, and these arrays."""
    cached = _hoisted.get(x, x)
    if cached is None:
        return x, []
    jaxpr, consts = _jax.open_jaxpr(x)
    new, arrays = hoist(jaxpr, consts)
    if not arrays:
        _hoisted[x] = None
        return x, []
    if cached is x:
        cached = _hoisted[x] = new if isinstance(x, Jaxpr) else _jax.close(new, ())
    return cached, arrays


def _of_call(name: str, *by_input: tuple[str, Any]) -> Callable[[_Scope, Any], Any]:
    """The rule for a primitive that runs the jaxpr in parameter `name` on its operands.

    `by_input` holds the parameters with an entry for each operand, and the entry of a new operand.
    """

    def rule(scope: _Scope, eqn: Any) -> Any:
        new, arrays = _nested(eqn.params[name])
        if not arrays:
            return eqn
        params = {**eqn.params, name: new}
        for key, value in by_input:
            # One entry for each operand: the new operands come first.
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
    test, test_arrays = _nested(eqn.params["cond_jaxpr"])
    body, body_arrays = _nested(eqn.params["body_jaxpr"])
    if not (test_arrays or body_arrays):
        return eqn
    num_test = eqn.params["cond_nconsts"]
    params = {
        **eqn.params,
        "cond_jaxpr": test,
        "body_jaxpr": body,
        "cond_nconsts": num_test + len(test_arrays),
        "body_nconsts": eqn.params["body_nconsts"] + len(body_arrays),
    }

    # Operands of a while: constants of the condition, constants of the body, carry.
    test_inputs = scope.inputs_for(_jax.open_jaxpr(test)[0], test_arrays)
    body_inputs = scope.inputs_for(_jax.open_jaxpr(body)[0], body_arrays)
    return eqn.replace(
        params=params, invars=[*test_inputs, *eqn.invars[:num_test], *body_inputs, *eqn.invars[num_test:]]
    )


def _of_cond(scope: _Scope, eqn: Any) -> Any:
    branches = [_nested(x) for x in eqn.params["branches"]]
    if not any(arrays for _, arrays in branches):
        return eqn
    inputs: list[Any] = []
    for new, arrays in branches:
        inputs += scope.inputs_for(_jax.open_jaxpr(new)[0], arrays)

    # All branches take the same operands: pad each with unused inputs for the arrays of the other branches.
    padded, start = [], 0
    for new, arrays in branches:
        jaxpr, _ = _jax.open_jaxpr(new)
        end = start + len(arrays)
        unused = [_jax.Var(v.aval) for v in inputs]
        invars = [*unused[:start], *jaxpr.invars[: len(arrays)], *unused[end:], *jaxpr.invars[len(arrays) :]]
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
