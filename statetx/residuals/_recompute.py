"""The cost of computing a value again."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from .. import _jax
from .._equations.flops import flops
from .._jax import Jaxpr, Literal


class Recomputation:
    """The cost of each value of an inlined jaxpr, given that some are available.

    Args:
        jaxpr: every variable in it, at any depth, is defined once.
        available: variables, at any depth, whose values are available.
    """

    def __init__(self, jaxpr: Jaxpr, available: Collection[Any]):
        self._jaxpr = jaxpr
        self._available = frozenset(available)
        self._definitions = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}

    def __call__(self, var: Any, excluding: Collection[Any] = ()) -> int:
        """Operations that compute `var` from the inputs and the available values, `excluding` some of these."""
        available = self._available.difference(excluding)
        needed, _ = _slice(self._definitions, [var], available)
        return sum(_partial(eqn, outs, available)[0] for eqn, outs in needed)


def _slice(definitions: dict[Any, Any], targets: Iterable[Any], available: Collection[Any]) -> tuple[list, set]:
    """The equations that compute `targets`, each with its used outputs, and the inputs that they need."""
    # An equation that is met again for another output is looked at again: a scan may then need more of its body.
    needed: dict[int, tuple[Any, set]] = {}
    inputs = set()
    work = list(targets)
    while work:
        v = work.pop()
        if isinstance(v, Literal) or v in available:
            continue
        eqn = definitions.get(v)
        if eqn is None:
            inputs.add(v)
            continue
        _, outs = needed.setdefault(id(eqn), (eqn, set()))
        if v not in outs:
            outs.add(v)
            work += _partial(eqn, outs, available)[1]
    return list(needed.values()), inputs


def _partial(eqn: Any, outs: Collection[Any], available: Collection[Any]) -> tuple[int, list[Any]]:
    """Operations for some outputs of an equation, and the operands that they need. Of a scan, count only the equations
    needed.
    """
    if eqn.primitive.name != "scan":
        return flops(eqn), eqn.invars

    body = _jax.open_jaxpr(eqn.params["jaxpr"])[0]
    num_consts, num_carry = _jax.scan_counts(eqn)
    definitions = {v: e for e in body.eqns for v in e.outvars}
    targets = [inner for v, inner in zip(eqn.outvars, body.outvars, strict=True) if v in outs]
    carries = dict(zip(body.invars[num_consts : num_consts + num_carry], body.outvars[:num_carry], strict=True))

    # A step needs carries that the previous step must compute: add their outputs until there are no more.
    while True:
        eqns, inputs = _slice(definitions, targets, available)
        missing = [carries[v] for v in inputs if v in carries and carries[v] not in targets]
        if not missing:
            break
        targets += missing

    cost = eqn.params["length"] * sum(_partial(e, o, available)[0] for e, o in eqns)
    return cost, [a for a, v in zip(eqn.invars, body.invars, strict=True) if v in inputs]
