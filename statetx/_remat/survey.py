"""The values that a staged function computes, as a policy sees them.

JAX's policies are asked about equations that differentiation and vmap have rewritten. These judge the function as it was staged,
whatever stands around its values: functions within it that are jitted, rematerialised or mapped over devices, loops, branches,
and the rules of custom derivatives, which are what their functions compute where they are differentiated. A policy of JAX is asked
about the same places.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from .. import _jax
from .._equations.primitives import CALLS, ENTERED, inner_jaxprs, row_of
from .._jax import Jaxpr, Literal
from .policy import Origin, Value

NONE: frozenset[Any] = frozenset()

Address = tuple[int, ...]
"""Of a value: indices of equations, and of the jaxprs within them, from the outside in, and then of the output."""


class Site(NamedTuple):
    """A value of a jaxpr, its place, and the equation that computes it."""

    address: Address
    value: Value
    eqn: Any


class _Flow(NamedTuple):
    """What is known of a variable.

    Attributes:
        read: the states that it holds.
        near: those that it was last computed with.
        order: when it was computed.
        has_site: whether its value has one, so that further names for it need none.
        is_tangent: whether it is computed from tangents, in the rule of a custom derivative. Such values cannot be kept.
    """

    read: frozenset[Origin] = NONE
    near: frozenset[Origin] = NONE
    order: int = -1
    has_site: bool = False
    is_tangent: bool = False


class Survey:
    """The values of a jaxpr.

    Args:
        jaxpr: the function.
        origins: for each of the first inputs that is known to be the value of a state, which.

    Attributes:
        sites: its values, in the order of the equations.
        rules: the custom derivatives, by the address of the equation that calls the function.
    """

    def __init__(self, jaxpr: Jaxpr, origins: Sequence[frozenset[Origin]] = ()):
        rest = [_Flow()] * (len(jaxpr.invars) - len(origins))
        self._begin(jaxpr, [*(_Flow(o, o) for o in origins), *rest], [NONE] * len(jaxpr.outvars), 1, ())

    @classmethod
    def of_rule(cls, rule: Rule, jaxpr: Jaxpr) -> Survey:
        """The survey of what takes the place of a call when it is differentiated."""
        operands = rule.flows[_jax.num_closed_over(rule.eqn) :]
        tangents = [_Flow(is_tangent=True)] * (len(jaxpr.invars) - len(operands))
        names = [NONE] * len(jaxpr.outvars)
        for i, own in zip(_jax.results_of_rule(rule.eqn, jaxpr), rule.names, strict=True):
            names[i] = own
        survey = cls.__new__(cls)
        survey._begin(jaxpr, [*operands, *tangents], names, rule.times, (*rule.address, 0))
        survey.rules = {}  # of what a rule calls the value is computed, and no derivative
        return survey

    def _begin(
        self, jaxpr: Jaxpr, ins: Sequence[_Flow], out_names: Sequence[frozenset[str]], times: int, at: Address
    ) -> None:
        self.sites: list[Site] = []
        self.rules: dict[Address, Rule] = {}
        self._calls: list[Site] = []
        self._regions: set[int] = set()
        self._around: list[Any] = []
        self._order = 0
        self._visit(jaxpr, ins, out_names, times, at)

    @functools.cached_property
    def all_sites(self) -> list[Site]:
        """`sites`, and those of rules."""
        return [*self.sites, *(site for rule in self.rules.values() for site in rule.survey.sites)]

    @property
    def results(self) -> list[Site]:
        """`sites`, and the results of calls, which have a site within."""
        return [*self.sites, *self._calls]

    @property
    def regions(self) -> set[int]:
        """The numbers of the rematerialised functions within that have marked what they keep."""
        return self._regions.union(*(rule.survey.regions for rule in self.rules.values()))

    def _visit(
        self, jaxpr: Jaxpr, ins: Sequence[_Flow], out_names: Sequence[frozenset[str]], times: int, at: Address
    ) -> list[_Flow]:
        """Record the values of a jaxpr; returns what is known of its outputs."""
        names = names_in(jaxpr, out_names)
        known = dict.fromkeys(jaxpr.constvars, _Flow()) | dict(zip(jaxpr.invars, ins, strict=True))

        def flow(atom: Any) -> _Flow:
            return _Flow(order=-2) if isinstance(atom, Literal) else known[atom]

        for i, eqn in enumerate(jaxpr.eqns):
            place, flows = (*at, i), [flow(v) for v in eqn.invars]
            own_names = [names.get(v, NONE) for v in eqn.outvars]
            is_call = eqn.primitive.name in CALLS
            inner: list[_Flow] = []
            self._around.append(eqn)
            for n, (sub, length, enter) in enumerate(_inner(eqn)):
                names_within = own_names if is_call else [NONE] * len(sub.outvars)
                inner = self._visit(sub, enter(flows), names_within, times * length, (*place, n))
            self._around.pop()
            if _jax.has_rule(eqn):
                self.rules[place] = Rule(eqn, tuple(self._around), place, flows, own_names, times)
            self._order += 1
            results = self._record(eqn, place, flows, own_names, times)
            known.update(zip(eqn.outvars, inner if is_call else results, strict=True))
        return [flow(v) for v in jaxpr.outvars]

    def _record(
        self, eqn: Any, place: Address, flows: Sequence[_Flow], names: Sequence[frozenset[str]], times: int
    ) -> list[_Flow]:
        """Record the results of an operation; returns what is known of them."""
        read = NONE.union(*(f.read for f in flows))
        near = read or max(flows, key=lambda f: f.order, default=_Flow()).near
        is_tangent = any(f.is_tangent for f in flows)
        is_name, is_mark = eqn.primitive is _jax.name_primitive, eqn.primitive is _jax.mark_primitive
        if is_mark:
            self._regions.add(eqn.params["region"])
        is_alias = is_mark or (is_name and flows[0].has_site)
        if not is_alias and not is_tangent:
            sites = self._calls if eqn.primitive.name in CALLS else self.sites
            types = tuple(v.aval for v in eqn.invars)
            loop = _jax.loop_of(eqn)
            is_entered = eqn.primitive.name in ENTERED or loop is not None or _jax.has_rule(eqn)
            for n, v in enumerate(eqn.outvars):
                if hasattr(v.aval, "dtype"):
                    own = names[n] | {eqn.params["name"]} if is_name else names[n]
                    # A loop does nothing with a state itself: what does stands within.
                    value = Value(
                        eqn.primitive, types, eqn.params, v.aval, times, own, NONE if is_entered else read, near
                    )
                    sites.append(Site((*place, n), value, eqn))
        forwarded = read if row_of(eqn).forwards else NONE
        has_site = flows[0].has_site if is_mark else True
        return [_Flow(forwarded, near, self._order, has_site, is_tangent)] * len(eqn.outvars)


@dataclasses.dataclass
class Rule:
    """The custom derivative of a function that is called.

    Attributes:
        eqn: the call.
        around: the equations that it stands in.
        address: of the call.
        flows: what is known of its operands.
        names: of its results.
        times: how often it is called in a run of the function.
    """

    eqn: Any
    around: Sequence[Any]
    address: Address
    flows: Sequence[_Flow]
    names: Sequence[frozenset[str]]
    times: int

    @functools.cached_property
    def survey(self) -> Survey:
        """What it computes where all operands are differentiated; nothing where it fails."""
        try:
            with _jax.in_shard_maps(*self.around):
                jaxpr = _jax.rule_of(self.eqn)
        except Exception:
            return Survey(_jax.empty_jaxpr)  # an error only where it is differentiated, and raised there
        return Survey.of_rule(self, jaxpr)


_Enter = Callable[[Sequence[_Flow]], list[_Flow]]


def _inner(eqn: Any) -> Iterator[tuple[Jaxpr, int, _Enter]]:
    """Jaxprs in an equation whose values can be kept one by one, how often each is run, and what goes in."""
    loop = _jax.loop_of(eqn)
    if loop is not None and loop.keeps_steps:
        yield loop.body, loop.length, functools.partial(_into_scan, loop.num_constants, loop.num_carry)
    for jaxpr in _entered_jaxprs(eqn):
        if eqn.primitive.name == "cond":
            yield jaxpr, 1, lambda flows: _without_sites(flows[1:])
        elif eqn.primitive.name == "scan":
            yield jaxpr, eqn.params["length"], functools.partial(_into_scan, *_jax.scan_counts(eqn))
        else:
            yield jaxpr, 1, list


def _into_scan(num_consts: int, num_carry: int, flows: Sequence[_Flow]) -> list[_Flow]:
    """What is known in a step: not which states the carry holds, which changes."""
    is_tangent = any(f.is_tangent for f in flows)
    flows = _without_sites(flows)
    for i in range(num_consts, num_consts + num_carry):
        flows[i] = flows[i]._replace(read=NONE, is_tangent=is_tangent)
    return flows


def _without_sites(flows: Sequence[_Flow]) -> list[_Flow]:
    # The names that a loop or branch gives to what enters it are not those of the value outside: `names_in` stops there.
    return [f._replace(has_site=False) for f in flows]


def _entered_jaxprs(eqn: Any) -> list[Jaxpr]:
    return inner_jaxprs(eqn) if eqn.primitive.name in ENTERED else []


def names_in(jaxpr: Jaxpr, out_names: Sequence[frozenset[str]]) -> dict[Any, frozenset[str]]:
    """The names of each variable: those that later equations give to the same value."""
    names: dict[Any, frozenset[str]] = {}

    def add(atom: Any, more: frozenset[str]) -> None:
        if more and not isinstance(atom, Literal):
            names[atom] = names.get(atom, NONE) | more

    for v, more in zip(jaxpr.outvars, out_names, strict=True):
        add(v, more)
    for eqn in reversed(jaxpr.eqns):
        if eqn.primitive is _jax.name_primitive:
            add(eqn.invars[0], names.get(eqn.outvars[0], NONE) | {eqn.params["name"]})
        elif eqn.primitive is _jax.mark_primitive:
            add(eqn.invars[0], names.get(eqn.outvars[0], NONE))
        elif eqn.primitive.name in CALLS:
            (inner,) = inner_jaxprs(eqn)
            names_within = names_in(inner, [names.get(v, NONE) for v in eqn.outvars])
            for outside, inside in zip(eqn.invars, inner.invars, strict=True):
                add(outside, names_within.get(inside, NONE))
    return names


def names_out_of_reach(jaxpr: Jaxpr, within: str = "") -> dict[str, str]:
    """Names in operations that are not entered, such as ``while``, and in which."""
    names = {}
    for eqn in jaxpr.eqns:
        if within and eqn.primitive is _jax.name_primitive:
            names[eqn.params["name"]] = within
        operation = within or ("" if eqn.primitive.name in ENTERED else eqn.primitive.name)
        loop = _jax.loop_of(eqn)
        if loop is not None:
            operation = within or ("" if loop.keeps_steps else "a loop that stores carries (checkpoint=)")
        for inner in _jax.inner_jaxprs(eqn):
            names |= names_out_of_reach(inner, operation)
    return names
