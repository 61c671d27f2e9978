"""Mark the values that a rematerialized function saves.

JAX asks a policy about primitives, types and parameters of equations that differentiation and vmap have rewritten, so
the policy cannot tell one value from another. A value to save therefore passes through an identity primitive,
``statetx_mark``, which survives both rewrites, and the policy for JAX saves marked values (decision 19). Some
derivative rules read the result of the operation itself (``exp``, ``tanh``, a maximum). Such a rule is made to read the
marked result; else saving it would not spare its recomputation.

A value that is stored in fewer bits passes through other primitives (`_jax.store`): its codes are marked.

Rematerialized functions nest. Each has a region number, greater than the numbers of all functions within it, and writes
it on its marks. So a function saves what its own policy selects, at any depth, and nothing that the inner policies
select.
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
from .stored import StoredType
from .survey import Address

Label = Any
Labels = Mapping[Address, Any]
"""The labels of values to mark, by address (`survey.Site`): `SAVE`, `offload` or a `StoredLabel`. For the rule of a
derivative: a function from the rule's jaxpr to the labels of the values in it, at the address of the call with `RULE`
in place of the output's index.
"""

SAVE = "save"
RULE = -1


def offload(src: str, dst: str) -> str:
    """The label of a value that is stored in another memory."""
    return f"offload:{src}:{dst}"


@dataclasses.dataclass(frozen=True)
class StoredLabel:
    """The label of a value that is stored in fewer bits.

    Attributes:
        type: the format.
        what: the label of the stored value: `SAVE` or `offload`.
        is_ordered: whether the forward pass waits until the value is encoded.
    """

    type: StoredType
    what: str = SAVE
    is_ordered: bool = False


@dataclasses.dataclass(frozen=True)
class KeepMarked:
    """A policy for JAX that saves the values marked with one region number, or with numbers of regions in it.

    Attributes:
        region: the number of the rematerialized function.
        inner_regions: numbers of functions within it whose marked values it saves, too.
    """

    region: int
    inner_regions: frozenset[int] = frozenset()

    def __call__(self, primitive: Any, *_: Any, **params: Any) -> Any:
        if _jax.is_debug_callback(primitive):
            # False makes JAX drop the saved values that the callback reads; it still runs again if it reads others
            return True
        if "call_jaxpr" in params:  # a custom derivative remains a call if none of its inputs has a tangent
            eqns = _jax.open_jaxpr(params["call_jaxpr"])[0].eqns
            marks = [e.params for e in eqns if e.primitive is _jax.mark_primitive]
        else:
            marks = [params] if primitive is _jax.mark_primitive else []
        labels = sorted(
            (p["what"] for p in marks if p["region"] in {self.region, *self.inner_regions}), reverse=True
        )  # "save" first
        if not labels:
            return False
        label, *memories = labels[0].split(":")
        return True if label == SAVE else _jax.Offloadable(*memories)


def mark(x: Any, labels: Labels, *, region: int, in_rule: bool = False) -> Any:
    """Mark the labeled values of a jaxpr, closed or not.

    Args:
        region: the number of the rematerialized function whose policy saves them.
        in_rule: whether the jaxpr is a derivative rule. Its equations are not differentiated, so a mark needs no rule
            of its own.
    """
    # Most equations have no label and stay the same objects, so JAX's caches for their inner jaxprs still hit.
    by_equation: dict[int, dict[Address, Any]] = {}
    for (i, *inner_address), label in labels.items():
        by_equation.setdefault(i, {})[tuple(inner_address)] = label
    marker = _EquationMarker(region, in_rule)
    eqns: list[Any] = []
    for i, eqn in enumerate(_jax.open_jaxpr(x)[0].eqns):
        eqns += marker.equation(eqn, by_equation[i]) if i in by_equation else [eqn]
    return _jax.with_equations(x, eqns)


class _EquationMarker(NamedTuple):
    region: int
    in_rule: bool

    def equation(self, eqn: Any, labels: Labels) -> list[Any]:
        """The equations that replace one, with marks on its labeled results and on labeled values within it."""
        result_labels = {
            address[0]: label for address, label in labels.items() if len(address) == 1 and address[0] != RULE
        }
        rule = labels.get((RULE,))
        inner_labels = {address: label for address, label in labels.items() if len(address) > 1}
        if inner_labels:
            eqn = self._with_inner_marks(eqn, inner_labels)

        if self.in_rule:
            return self.results(eqn, result_labels)
        if _jax.has_rule(eqn):
            return [self._custom_derivative(eqn, result_labels, rule)]
        # The derivative of this package's loops reads stored carries, not results.
        if rule is not None or (result_labels and _jax.loop_of(eqn) is None and _reads_results(eqn, result_labels)):
            return [self._derivative(eqn, result_labels, rule)]
        return self.results(eqn, result_labels)

    def results(self, eqn: Any, labels: Mapping[int, Label]) -> list[Any]:
        """The equation, then a mark on each labeled result. Every other equation reads the marked variable."""
        outvars, marks = list(eqn.outvars), []
        for n, label in labels.items():
            result = outvars[n]
            if not _jax.is_dropped(result):
                # The mark defines the old variable, so that the other equations need no change.
                source = outvars[n] = Var(result.aval)
                marks += self.mark(eqn, source, result, label)
        return [eqn.replace(outvars=outvars), *marks]

    def mark(self, eqn: Any, source: Any, result: Any, label: Label) -> list[Any]:
        """The equations that make `result` the marked `source`, a result of `eqn`."""
        if isinstance(label, StoredLabel):
            return _stored(eqn, source, result, label, self.region)
        return [_jax.mark_equation(eqn, source, result, region=self.region, what=label)]

    def _with_inner_marks(self, eqn: Any, labels: Labels) -> Any:
        """The equation with marks in the jaxprs among its parameters."""
        loop = _jax.loop_of(eqn)
        if loop is not None:
            body_labels = {address[1:]: label for address, label in labels.items()}
            return _jax.with_body(eqn, mark(loop.body, body_labels, region=self.region, in_rule=self.in_rule))

        key = row_of(eqn).jaxpr
        jaxprs = eqn.params[key] if isinstance(eqn.params[key], (tuple, list)) else [eqn.params[key]]
        marked = []
        with _jax.in_shard_maps(eqn):
            for n, jaxpr in enumerate(jaxprs):
                jaxpr_labels = {address[1:]: label for address, label in labels.items() if address[0] == n}
                if jaxpr_labels:
                    jaxpr = mark(jaxpr, jaxpr_labels, region=self.region, in_rule=self.in_rule)
                marked.append(jaxpr)
        return eqn.replace(
            params={**eqn.params, key: tuple(marked) if isinstance(eqn.params[key], tuple) else marked[0]}
        )

    def _custom_derivative(
        self, eqn: Any, result_labels: Mapping[int, Label], rule: Callable[[Jaxpr], Labels] | None
    ) -> Any:
        """The call with marks in its rule: on the results, and on values that only the rule computes."""
        mark_in_rule = functools.partial(mark, region=self.region, in_rule=True)

        def edit(jaxpr: Jaxpr) -> Jaxpr:
            results = [jaxpr.outvars[i] for i in _jax.results_of_rule(eqn, jaxpr)]
            labels = {} if rule is None else rule(jaxpr)
            return mark_in_rule(jaxpr, {**labels, **_labels_of_variables(jaxpr, results, result_labels)})

        call = eqn.params["call_jaxpr"]
        jaxpr = _jax.open_jaxpr(call)[0]
        return _jax.with_rule(eqn, edit, mark_in_rule(call, _labels_of_variables(jaxpr, jaxpr.outvars, result_labels)))

    def _derivative(
        self, eqn: Any, result_labels: Mapping[int, Label], rule_labels: Callable[[Jaxpr], Labels] | None = None
    ) -> Any:
        """The operation as a ``custom_jvp`` with marked results, whose rule reads them and marks values of its own."""
        # JAX's rule for `exp`, say, reads the result inside the equation, before any mark. As a `custom_jvp` the
        # equation is replaced by its rule under differentiation, and there the result and all its readers are in
        # sight.
        plain = _jax.function_of(eqn)
        mark_in_rule = functools.partial(mark, region=self.region, in_rule=True)
        marked = mark_in_rule(plain, {(0, n): label for n, label in result_labels.items()})

        @jax.custom_jvp
        def operation(*xs: Any) -> list[Any]:
            return _jax.evaluate(marked, (), xs)

        # Inputs without a tangent stay out of the derivative, which may be infinite or undefined with respect to them.
        @functools.partial(operation.defjvp, symbolic_zeros=True)
        def rule(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
            diff_indices = [
                i for i, t in enumerate(tangents) if not isinstance(t, SymbolicZero) and is_float(primals[i])
            ]
            jaxpr, consts = _jvp(plain, [_jax.abstract(x) for x in primals], diff_indices)
            labels = {} if rule_labels is None else dict(rule_labels(jaxpr))
            labels |= _labels_of_variables(jaxpr, jaxpr.outvars[: len(eqn.outvars)], result_labels)
            outs = _jax.evaluate(mark_in_rule(jaxpr, labels), consts, [*primals, *(tangents[i] for i in diff_indices)])

            values, out_tangents = outs[: len(eqn.outvars)], iter(outs[len(eqn.outvars) :])
            types = map(_jax.abstract, values)
            return values, [next(out_tangents) if is_float(t) else _jax.zero_tangent(t) for t in types]

        with eqn.ctx.manager:
            jaxpr, consts = _jax.stage(
                operation, [v.aval for v in plain.invars], traced_for="statetx.remat", name="marked"
            )
        # Put the staged call in the place of the equation: its operands instead of the inputs, literals instead of
        # constants.
        (call,) = jaxpr.eqns
        atoms = dict(zip(jaxpr.invars, plain.invars, strict=True))
        atoms |= {v: Literal(c, v.aval) for v, c in zip(jaxpr.constvars, consts, strict=True)}
        invars = [v if isinstance(v, Literal) else atoms[v] for v in call.invars]
        return call.replace(invars=invars, outvars=eqn.outvars, source_info=eqn.source_info, ctx=eqn.ctx)


def mark_inputs(jaxpr: Jaxpr, labels: Mapping[int, StoredLabel], *, region: int) -> Jaxpr:
    """Store inputs of a jaxpr without constants in fewer bits; `labels` has the formats by the indices of the
    inputs.
    """
    if not labels or not jaxpr.eqns:
        return jaxpr
    invars, eqns = list(jaxpr.invars), []
    for n, label in labels.items():
        invars[n] = Var(jaxpr.invars[n].aval)
        eqns += _stored(jaxpr.eqns[0], invars[n], jaxpr.invars[n], label, region)
    return _jax.rebuild(jaxpr, invars=invars, outvars=jaxpr.outvars, eqns=[*eqns, *jaxpr.eqns])


def _stored(like: Any, source: Any, result: Any, label: StoredLabel, region: int) -> list[Any]:
    """The equations that make `result` the value of `source`, but with the residual that the label says."""

    def run(x: Any) -> list[Any]:
        return [_jax.store(x, label.type, region=region, what=label.what, is_ordered=label.is_ordered)]

    with like.ctx.manager:
        jaxpr, consts = _jax.stage(run, [source.aval], traced_for="statetx.remat", name="stored")
    assert not consts
    return _jax.spliced(jaxpr, [source], [result], like)


def _labels_of_variables(jaxpr: Jaxpr, variables: Sequence[Any], labels: Mapping[int, Label]) -> dict[Address, Label]:
    """Labels given by index into `variables`, by the addresses at which the jaxpr computes these."""
    label_of = {variables[n]: label for n, label in labels.items() if not isinstance(variables[n], Literal)}
    outputs = ((i, n, v) for i, eqn in enumerate(jaxpr.eqns) for n, v in enumerate(eqn.outvars))
    return {(i, n): label_of[v] for i, n, v in outputs if v in label_of}


def _reads_results(eqn: Any, labels: Mapping[int, Label]) -> bool:
    """Whether the derivative of an operation is computed from its labeled results."""
    jaxpr = derivative_of(eqn)
    if jaxpr is None:
        return False
    computed = {v for e in jaxpr.eqns for v in e.outvars}
    results = jaxpr.outvars[: len(eqn.outvars)]
    if not all(isinstance(v, Var) and v in computed for v in results):
        return False
    if any(e.primitive is _jax.custom_lin_primitive for e in jaxpr.eqns):
        return False  # a custom_vjp, a rule for reverse mode only, cannot be part of a custom_jvp
    labeled = {results[n] for n in labels}
    return any(v in labeled for e in jaxpr.eqns for v in e.invars if isinstance(v, Var))


def derivative_of(eqn: Any) -> Jaxpr | None:
    """The derivative of an operation as equations, by all of its float operands; None if it has none."""
    plain = _jax.function_of(eqn)
    types = [v.aval for v in plain.invars]
    diff_indices = [i for i, t in enumerate(types) if is_float(t)]
    try:
        with eqn.ctx.manager, _jax.rules_kept([eqn]):
            return _jvp(plain, types, diff_indices)[0] if diff_indices else None
    except Exception:
        return None  # an error only where it is differentiated


def _jvp(jaxpr: Jaxpr, types: Sequence[Any], diff_indices: Sequence[int]) -> tuple[Jaxpr, Sequence[Any]]:
    """Stage ``(*inputs, *tangents of inputs at diff_indices) -> (*outputs, *tangents of the float outputs)``.

    Returns the jaxpr and its constants.
    """

    def pushforward(*xs: Any) -> list[Any]:
        primals, tangents = xs[: len(types)], xs[len(types) :]

        run = function_of(lambda *operands: _jax.evaluate(jaxpr, (), operands), primals, diff_indices)
        outs, out_tangents = jax.jvp(run, [primals[i] for i in diff_indices], list(tangents))
        return [*outs, *(t for x, t in zip(outs, out_tangents, strict=True) if is_float(x))]

    return _jax.stage(pushforward, [*types, *(types[i] for i in diff_indices)], traced_for="statetx.remat", name="jvp")
