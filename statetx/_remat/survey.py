"""List the values that a staged function computes, for policies to judge.

JAX asks its policies about equations that differentiation and vmap have rewritten. The policies of this package judge
the staged function, at every depth: jitted, rematerialized and mapped functions, loops, branches, and the
rules of custom derivatives, whose equations replace their functions under differentiation. JAX policies are asked about
the same places.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from .. import _frames, _jax
from .._cached import cached_property
from .._equations.primitives import CALLS, ENTERED, inner_jaxprs, row_of
from .._jax import Jaxpr, Literal
from .policy import StateRef, Value
from .stored import are_bits, is_bits, of_steps

NONE: frozenset[Any] = frozenset()

Address = tuple[int, ...]
"""The position of a value: from the outside in, the index of each equation and of the jaxpr within it; last, the index
of the output.
"""


class Site(NamedTuple):
    """A value of a jaxpr, its address, and the equation that computes it."""

    address: Address
    value: Value
    eqn: Any


class _ValueProvenance(NamedTuple):
    """The states that a variable comes from.

    Attributes:
        source_states: the states whose value it holds, itself or cast, reshaped or transposed.
        nearest_states: the states that it was last computed with.
        order: the number of the equation that computes it, counted over all jaxprs; -1 for inputs, -2 for literals.
        has_site: whether its value has a site already, so that an alias of it needs none.
        is_tangent: whether it is computed from tangents, in the rule of a custom derivative. Such values cannot be
            saved.
        is_bits: whether it is proved to be 0 or 1.
    """

    source_states: frozenset[StateRef] = NONE
    nearest_states: frozenset[StateRef] = NONE
    order: int = -1
    has_site: bool = False
    is_tangent: bool = False
    is_bits: bool = False


class Survey:
    """The values of a jaxpr.

    Args:
        jaxpr: the staged function.
        origins: for each of the first inputs, the state that it is the value of, or an empty set.

    Attributes:
        sites: the values, in the order of the equations.
        rules: the custom derivatives, by the address of the equation that calls the function.
    """

    def __init__(self, jaxpr: Jaxpr, origins: Sequence[frozenset[StateRef]] = ()):
        other_inputs = [_ValueProvenance()] * (len(jaxpr.invars) - len(origins))
        states = [_ValueProvenance(o, o) for o in origins]
        self._begin(jaxpr, [*states, *other_inputs], [NONE] * len(jaxpr.outvars), 1, ())

    @classmethod
    def of_rule(cls, rule: SurveyedRule, jaxpr: Jaxpr) -> Survey:
        """Survey the rule of a custom derivative, as traced for the inputs that are differentiated."""
        operands = rule.operands[_jax.num_closed_over(rule.eqn) :]
        tangents = [_ValueProvenance(is_tangent=True)] * (len(jaxpr.invars) - len(operands))
        names = [NONE] * len(jaxpr.outvars)
        for i, result_names in zip(_jax.results_of_rule(rule.eqn, jaxpr), rule.names, strict=True):
            names[i] = result_names
        survey = cls.__new__(cls)
        survey._begin(jaxpr, [*operands, *tangents], names, rule.times, (*rule.address, 0))
        survey.rules = {}  # functions that a rule calls are not differentiated: only their values are computed
        return survey

    def _begin(
        self,
        jaxpr: Jaxpr,
        inputs: Sequence[_ValueProvenance],
        out_names: Sequence[frozenset[str]],
        times: int,
        address: Address,
    ) -> None:
        self.sites: list[Site] = []
        self.rules: dict[Address, SurveyedRule] = {}
        self._calls: list[Site] = []
        self._regions: set[int] = set()
        self._enclosing: list[Any] = []  # equations around the jaxpr that is visited
        self._order = 0
        self._visit(jaxpr, inputs, out_names, times, address)

    @cached_property
    def all_sites(self) -> list[Site]:
        """`sites`, and the sites of the rules."""
        return [*self.sites, *(site for rule in self.rules.values() for site in rule.survey.sites)]

    @property
    def results(self) -> list[Site]:
        """`sites`, and the results of calls, whose sites are in the called jaxpr."""
        return [*self.sites, *self._calls]

    @property
    def regions(self) -> set[int]:
        """The region numbers of the rematerialized functions within that have marked values."""
        return self._regions.union(*(rule.survey.regions for rule in self.rules.values()))

    def _visit(
        self,
        jaxpr: Jaxpr,
        inputs: Sequence[_ValueProvenance],
        out_names: Sequence[frozenset[str]],
        times: int,
        address: Address,
    ) -> list[_ValueProvenance]:
        """Record the values of a jaxpr; return the provenance of its outputs.

        Args:
            inputs: the provenance of its inputs.
            out_names: the names that equations outside give to its outputs.
            times: how often it runs.
            address: of the jaxpr.
        """
        names = names_in(jaxpr, out_names)
        env = dict.fromkeys(jaxpr.constvars, _ValueProvenance()) | dict(zip(jaxpr.invars, inputs, strict=True))

        def read(atom: Any) -> _ValueProvenance:
            if isinstance(atom, Literal):
                return _ValueProvenance(order=-2, is_bits=is_bits(atom))
            provenance = env[atom]
            return provenance._replace(is_bits=True) if is_bits(atom) else provenance

        for i, eqn in enumerate(jaxpr.eqns):
            eqn_address, operands = (*address, i), [read(v) for v in eqn.invars]
            result_names = [names.get(v, NONE) for v in eqn.outvars]
            is_call = eqn.primitive.name in CALLS and not _jax.is_storing(eqn)

            # The jaxprs within. A call has the results of its jaxpr, with the names that they have here.
            inner_results: list[_ValueProvenance] = []
            self._enclosing.append(eqn)
            # A loop's or branch's results are values of their own, stacked or chosen; only a call's result is the
            # very value within.
            for n, (sub, length, enter) in enumerate(() if _jax.is_storing(eqn) else _inner(eqn)):
                names_within = result_names if is_call else [NONE] * len(sub.outvars)
                inner_results = self._visit(sub, enter(operands), names_within, times * length, (*eqn_address, n))
            self._enclosing.pop()
            if _jax.has_rule(eqn):
                self.rules[eqn_address] = SurveyedRule(
                    eqn, tuple(self._enclosing), eqn_address, operands, result_names, times
                )

            self._order += 1
            results = self._record(eqn, eqn_address, operands, result_names, times)
            env.update(zip(eqn.outvars, inner_results if is_call else results, strict=True))
        return [read(v) for v in jaxpr.outvars]

    def _record(
        self,
        eqn: Any,
        address: Address,
        operands: Sequence[_ValueProvenance],
        names: Sequence[frozenset[str]],
        times: int,
    ) -> list[_ValueProvenance]:
        """Record the results of an operation; return their provenance."""
        source_states = NONE.union(*(p.source_states for p in operands))
        # The latest operand: in ``gelu(x @ w + b)`` the result of the product, not the input of the block, names the
        # module.
        nearest_states = (
            source_states or max(operands, key=lambda p: p.order, default=_ValueProvenance()).nearest_states
        )
        is_tangent = any(p.is_tangent for p in operands)
        is_name, is_mark = eqn.primitive is _jax.name_primitive, eqn.primitive is _jax.mark_primitive
        if is_mark or eqn.primitive is _jax.stored_primitive:
            self._regions.add(eqn.params["region"])

        is_alias = is_mark or _jax.is_storing(eqn) or (is_name and operands[0].has_site)
        bits = are_bits(eqn, [p.is_bits for p in operands])
        if not is_alias and not is_tangent:
            sites = self._calls if eqn.primitive.name in CALLS else self.sites
            types = tuple(v.aval for v in eqn.invars)
            loop = _jax.loop_of(eqn)
            is_entered = eqn.primitive.name in ENTERED or loop is not None or _jax.has_rule(eqn)
            # An equation with inner jaxprs computes nothing with a state itself: the equations within do.
            states_of_value = NONE if is_entered else source_states
            for n, v in enumerate(eqn.outvars):
                if hasattr(v.aval, "dtype"):
                    value_names = names[n] | {eqn.params["name"]} if is_name else names[n]
                    value = Value(
                        eqn.primitive,
                        types,
                        eqn.params,
                        v.aval,
                        times,
                        value_names,
                        states_of_value,
                        nearest_states,
                        bits[n],
                    )
                    sites.append(Site((*address, n), value, eqn))

        forwarded = source_states if row_of(eqn).forwards else NONE
        has_site = operands[0].has_site if operands and (is_mark or _jax.is_storing(eqn)) else True
        return [_ValueProvenance(forwarded, nearest_states, self._order, has_site, is_tangent, b) for b in bits]


@dataclasses.dataclass
class SurveyedRule:
    """The custom derivative of a function that is called.

    Attributes:
        eqn: the call.
        enclosing: the equations around the call, the outermost first.
        address: the call's address.
        operands: the provenance of the call's operands.
        names: the names of its results.
        times: how often it is called in a run of the function.
    """

    eqn: Any
    enclosing: Sequence[Any]
    address: Address
    operands: Sequence[_ValueProvenance]
    names: Sequence[frozenset[str]]
    times: int

    @cached_property
    def survey(self) -> Survey:
        """The survey of the rule with all operands differentiated; empty if the rule raises."""
        try:
            with _jax.in_shard_maps(*self.enclosing):
                jaxpr = _frames.undone(_jax.rule_of)(self.eqn)
        except Exception:
            return Survey(_jax.empty_jaxpr)  # differentiation raises the same error, if it ever happens
        return Survey.of_rule(self, jaxpr)


_Enter = Callable[[Sequence[_ValueProvenance]], list[_ValueProvenance]]


def _inner(eqn: Any) -> Iterator[tuple[Jaxpr, int, _Enter]]:
    """The jaxprs in an equation whose values can be saved: each with its number of runs, and a function from operands
    to its inputs.
    """
    loop = _jax.loop_of(eqn)
    if loop is not None and loop.keeps_steps:
        yield loop.body, loop.length, functools.partial(_into_scan, loop.body, loop.num_constants, loop.num_carry)
    for jaxpr in inner_jaxprs(eqn) if eqn.primitive.name in ENTERED else ():
        if eqn.primitive.name == "cond":
            yield jaxpr, 1, lambda operands: _without_sites(operands[1:])
        elif eqn.primitive.name == "scan":
            yield jaxpr, eqn.params["length"], functools.partial(_into_scan, jaxpr, *_jax.scan_counts(eqn))
        else:
            yield jaxpr, 1, list


def _into_scan(
    jaxpr: Jaxpr, num_consts: int, num_carry: int, operands: Sequence[_ValueProvenance]
) -> list[_ValueProvenance]:
    """The provenance of a step's inputs. The carry changes, so it is no longer the value of a state."""
    # A carry that is not a tangent at first may be one after a step.
    is_tangent = any(p.is_tangent for p in operands)
    inputs = _without_sites(operands)
    bits, _ = of_steps(jaxpr, num_consts, num_carry, [p.is_bits for p in operands])
    for i in range(num_consts, num_consts + num_carry):
        inputs[i] = inputs[i]._replace(source_states=NONE, is_tangent=is_tangent, is_bits=bits[i])
    return inputs


def _without_sites(operands: Sequence[_ValueProvenance]) -> list[_ValueProvenance]:
    # `names_in` does not enter loops and branches: a name that one gives to its input is not a name of the value
    # outside.
    return [p._replace(has_site=False) for p in operands]


def names_in(jaxpr: Jaxpr, out_names: Sequence[frozenset[str]]) -> dict[Any, frozenset[str]]:
    """The names of each variable, which later equations give to the same value."""
    names: dict[Any, frozenset[str]] = {}

    def add(atom: Any, new_names: frozenset[str]) -> None:
        if new_names and not isinstance(atom, Literal):
            names[atom] = names.get(atom, NONE) | new_names

    for v, names_of_output in zip(jaxpr.outvars, out_names, strict=True):
        add(v, names_of_output)
    # Backward, since a name is given after the value is computed, and may be given through several calls and further
    # names.
    for eqn in reversed(jaxpr.eqns):
        if eqn.primitive is _jax.name_primitive:
            add(eqn.invars[0], names.get(eqn.outvars[0], NONE) | {eqn.params["name"]})
        elif eqn.primitive in (_jax.mark_primitive, _jax.stored_primitive):
            add(eqn.invars[0], names.get(eqn.outvars[0], NONE))
        elif eqn.primitive.name in CALLS and not _jax.is_storing(eqn):
            (inner,) = inner_jaxprs(eqn)
            names_within = names_in(inner, [names.get(v, NONE) for v in eqn.outvars])
            for operand, inner_input in zip(eqn.invars, inner.invars, strict=True):
                add(operand, names_within.get(inner_input, NONE))
    return names


def names_out_of_reach(jaxpr: Jaxpr, operation: str = "") -> dict[str, str]:
    """Names inside operations that a survey does not enter, such as ``while``, by name; the value is the operation.

    Args:
        operation: the operation that `jaxpr` is inside of; empty if its values can be saved.
    """
    names = {}
    for eqn in jaxpr.eqns:
        if operation and eqn.primitive is _jax.name_primitive:
            names[eqn.params["name"]] = operation
        inner_operation = operation or ("" if eqn.primitive.name in ENTERED else eqn.primitive.name)
        loop = _jax.loop_of(eqn)
        if loop is not None:
            inner_operation = operation or ("" if loop.keeps_steps else "a loop that stores carries (checkpoint=)")
        for inner in _jax.inner_jaxprs(eqn):
            names |= names_out_of_reach(inner, inner_operation)
    return names
