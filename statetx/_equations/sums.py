"""Sums of several cotangents of one value that are added to a total one by one."""

from __future__ import annotations

import collections
from collections.abc import Collection
from typing import Any

from .. import _jax
from .._jax import Jaxpr, Var
from .._tree import is_float
from .dataflow import variables_of


def with_split_sums(jaxpr: Jaxpr, totals: Collection[Var]) -> Jaxpr:
    """Replace ``total + f(a + b)`` by ``(total + f(a)) + f(b)`` for a sum ``a + b`` of cotangents.

    A value that is used in two places, such as an embedding that is also the last layer, has such a sum. Its two
    cotangents are computed at different times, and the first would wait for the second.

    Args:
        totals: the values that may be overwritten. `f` is a product with a number, another precision, or both.
    """
    totals, whole = {*totals}, None
    while jaxpr is not whole:
        whole, jaxpr = jaxpr, _with_split_sum(jaxpr, totals)
    return jaxpr


def _with_split_sum(jaxpr: Jaxpr, totals: set[Var]) -> Jaxpr:
    """The first sum split, whose first part is a total, too; the jaxpr itself if there is none."""
    readers = collections.Counter(v for eqn in jaxpr.eqns for v in eqn.invars if isinstance(v, Var))
    readers.update(v for v in jaxpr.outvars if isinstance(v, Var))
    producers = {v: e for e in jaxpr.eqns for v in e.outvars if readers[v] == 1}
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "add" and all(isinstance(v, Var) for v in eqn.invars) and eqn.invars[0] in totals:
            new = _split(eqn, producers)
            if new:
                totals.add(new[-1].invars[0])
                eqns = in_order([e for old in jaxpr.eqns for e in (new if old is eqn else [old])])
                split = _jax.rebuild(jaxpr, invars=jaxpr.invars, outvars=jaxpr.outvars, eqns=eqns)
                return _jax.without_dead_code(split)  # else the sums in the sum would have two readers
    return jaxpr


def _split(add: Any, producers: dict[Var, Any]) -> list[Any]:
    """The equations for an addition to a total; none if no sum of cotangents is added."""
    chain, v = [], add.invars[1]
    while (eqn := producers.get(v) if isinstance(v, Var) else None) is not None and (n := _scaled(eqn)) is not None:
        chain.append((eqn, n))
        v = eqn.invars[n]
    if eqn is None or eqn.primitive.name != "add_any":
        return []

    new, total = [], add.invars[0]
    for x, out in zip(eqn.invars, (Var(add.outvars[0].aval), add.outvars[0]), strict=True):
        for scaling, n in reversed(chain):
            invars = [x if i == n else operand for i, operand in enumerate(scaling.invars)]
            x = Var(scaling.outvars[0].aval)
            new.append(scaling.replace(invars=invars, outvars=[x]))
        new.append(add.replace(invars=[total, x], outvars=[out]))
        total = out
    return new


def _scaled(eqn: Any) -> int | None:
    """The operand that an equation multiplies by a number or converts to another precision; None if it does neither."""
    name, aval = eqn.primitive.name, eqn.outvars[0].aval
    if name == "convert_element_type" and is_float(aval) and is_float(eqn.invars[0].aval):
        return 0
    if name == "mul":
        is_number = [not v.aval.shape for v in eqn.invars]
        return is_number.index(False) if sorted(is_number) == [False, True] else None
    return None


def in_order(eqns: list[Any]) -> list[Any]:
    """Sort equations so that each comes after the ones it needs, close to the given order."""
    producers = {v: e for e in eqns for v in e.outvars}
    done: dict[Any, None] = {}
    pending = eqns[::-1]
    while pending:
        eqn = pending[-1]
        needed = [] if eqn in done else [e for v in variables_of(eqn) if (e := producers.get(v)) and e not in done]
        if needed:
            pending += needed
        else:
            done[pending.pop()] = None
    return list(done)
