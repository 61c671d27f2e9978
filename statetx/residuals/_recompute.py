"""What it would cost to compute a value again."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from .. import _jax
from .._equations.flops import flops
from .._jax import Jaxpr, Literal


class Recomputation:
    """The cost of each value of an inlined jaxpr, where some are there already.

    Args:
        jaxpr: every variable in it, at any depth, stands in one place.
        have: variables, at any depth, whose values are there.
    """

    def __init__(self, jaxpr: Jaxpr, have: Collection[Any]):
        self._jaxpr = jaxpr
        self._have = frozenset(have)
        self._made = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}

    def __call__(self, var: Any, but: Collection[Any] = ()) -> int:
        """Operations that give `var` from the inputs and what is there, `but` some of it."""
        have = self._have.difference(but)
        wanted, _ = _slice(self._made, [var], have)
        return sum(_partial(eqn, outs, have)[0] for eqn, outs in wanted)


def _slice(made: dict[Any, Any], targets: Iterable[Any], have: Collection[Any]) -> tuple[list, set]:
    """The equations that give `targets`, each with those of its outputs that are used, and the inputs that they need."""
    wanted: dict[int, tuple[Any, set]] = {}
    inputs = set()
    work = list(targets)
    while work:
        v = work.pop()
        if isinstance(v, Literal) or v in have:
            continue
        eqn = made.get(v)
        if eqn is None:
            inputs.add(v)
            continue
        _, outs = wanted.setdefault(id(eqn), (eqn, set()))
        if v not in outs:
            outs.add(v)
            work += _partial(eqn, outs, have)[1]
    return list(wanted.values()), inputs


def _partial(eqn: Any, outs: Collection[Any], have: Collection[Any]) -> tuple[int, list[Any]]:
    """Operations for some outputs of an equation, and its operands that they need; of a scan only its part is run."""
    if eqn.primitive.name != "scan":
        return flops(eqn), eqn.invars
    body = _jax.open_jaxpr(eqn.params["jaxpr"])[0]
    start, num_carry = _jax.scan_counts(eqn)
    made = {v: e for e in body.eqns for v in e.outvars}
    targets = [inner for v, inner in zip(eqn.outvars, body.outvars, strict=True) if v in outs]
    carries = dict(zip(body.invars[start : start + num_carry], body.outvars[:num_carry], strict=True))
    while True:  # what a step needs of the carry, the step before must compute
        eqns, inputs = _slice(made, targets, have)
        more = [carries[v] for v in inputs if v in carries and carries[v] not in targets]
        if not more:
            break
        targets += more
    cost = eqn.params["length"] * sum(_partial(e, o, have)[0] for e, o in eqns)
    return cost, [a for a, v in zip(eqn.invars, body.invars, strict=True) if v in inputs]
