"""The values of a region that a plan may save: results of its equations, and what the rule of a ``custom_vjp``
computes.

What such a rule keeps for the derivative (the sums of a flash attention, say) is not a result of the function: without
these values a plan could only run the whole function again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

from ... import _jax
from ..._jax import Jaxpr
from ..._records import either, one_of, row, whole
from ..._remat.mark import RULE, Label
from ..._remat.survey import Site, Survey, SurveyedRule

Address = tuple[int, ...]
"""A value of a region: (equation, output); in the rule of a ``custom_vjp`` (equation, `RULE`, equation of the rule,
output).
"""

ADDRESS = either(row(whole(), whole()), row(whole(), one_of(RULE), whole(), whole()))
"""Check an `Address` in a record."""


class Values(NamedTuple):
    """The values that may be saved, by address.

    Attributes:
        results: of the results of a ``custom_vjp``, each value of the rule that is one, by the address of the result.
    """

    sites: dict[Address, Site]
    results: dict[Address, Site]


def values_of(jaxpr: Jaxpr) -> Values:
    """The values of a region. Those in inner jaxprs, such as branches, cannot be saved."""
    survey = Survey(jaxpr)
    sites = {site.address: site for site in survey.results if len(site.address) == 2}
    results: dict[Address, Site] = {}
    for (i, *inner), rule in survey.rules.items():
        if not inner and rule.eqn.primitive.name == "custom_vjp_call":
            _add_rule(i, rule, sites, results)
    return Values(sites, results)


def _add_rule(i: int, rule: SurveyedRule, sites: dict[Address, Site], results: dict[Address, Site]) -> None:
    found = [site for site in rule.survey.sites if len(site.address) == 4]  # (call, 0, equation, output)
    if not found:
        return
    jaxpr = _jax.rule_of(rule.eqn)
    number = {jaxpr.outvars[o]: n for n, o in enumerate(_jax.results_of_rule(rule.eqn, jaxpr))}
    for site in found:
        *_, equation, output = site.address
        variable = jaxpr.eqns[equation].outvars[output]
        if variable in number:
            address = i, number[variable]
            results[address] = site._replace(address=address)
        else:
            address = i, RULE, equation, output
            sites[address] = site._replace(address=address)


@dataclasses.dataclass(frozen=True)
class _OfRule:
    """The labels of values that a rule computes, as `_remat.mark` takes them.

    Attributes:
        labels: by equation and output in the rule's jaxpr.
    """

    labels: tuple[tuple[Address, Label], ...]

    def __call__(self, jaxpr: Jaxpr) -> dict[Address, Label]:
        # For other differentiated inputs a rule may have other equations.
        return {(i, n): what for (i, n), what in self.labels if i < len(jaxpr.eqns) and n < len(jaxpr.eqns[i].outvars)}


def labels_of(labels: Mapping[Address, Label]) -> dict[Address, Label]:
    """Labels by address, those of values of one rule together."""
    found: dict[Address, Label] = {a: label for a, label in labels.items() if len(a) == 2}
    of_rules: dict[int, list[tuple[Address, Label]]] = {}
    for address, label in sorted(labels.items(), key=lambda item: item[0]):
        if len(address) > 2:
            of_rules.setdefault(address[0], []).append((address[2:], label))
    return found | {(i, RULE): _OfRule(tuple(inner)) for i, inner in of_rules.items()}


def renumbered(address: Address, equation: int) -> Address:
    """The address of a value whose equation has another number."""
    return (equation, *address[1:])
