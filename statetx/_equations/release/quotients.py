"""Quotients by a number, as XLA computes them outside of loops."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any

import jax

from ... import _jax
from ..._jax import Jaxpr, Literal, Var
from ..._tree import is_float
from ..dataflow import variables_of
from ..primitives import INLINED, inner_jaxprs
from .flat import taken_branch
from .loops import row_loop


def with_reciprocals(jaxpr: Jaxpr) -> Jaxpr:
    """Replace ``x / number`` by ``x * (1 / number)``, in calls and loops, too, if nothing else reads the number.

    XLA does so. In a loop, where a constant has another reader, it does not: quotients that move into one would have
    other bits.
    """
    return _rewritten(jaxpr, _num_readers(jaxpr))


def _called(eqn: Any) -> tuple[Jaxpr, Sequence[Any]] | None:
    """The jaxpr whose equations XLA has in the place of a call or of a decided branch, and its operands."""
    branch = taken_branch(eqn)
    if branch is not None:
        return inner_jaxprs(eqn)[branch], eqn.invars[1:]
    is_call = eqn.primitive.name in INLINED and row_loop(eqn) is None
    return (inner_jaxprs(eqn)[0], eqn.invars) if is_call else None


def _origins(jaxpr: Jaxpr) -> dict[Var, Var]:
    """For results of conversions to a type of the same numbers, which XLA does not have, the variable of the value."""
    origins: dict[Var, Var] = {}
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "convert_element_type" and isinstance(v := eqn.invars[0], Var):
            aval: Any = v.aval
            if aval.dtype == eqn.params["new_dtype"]:
                origins[eqn.outvars[0]] = origins.get(v, v)
    return origins


def _num_readers(jaxpr: Jaxpr) -> collections.Counter[Var]:
    """How many equations read each variable or its conversions."""
    origins = _origins(jaxpr)
    readers = collections.Counter(origins.get(v, v) for v in jaxpr.outvars if isinstance(v, Var))
    for eqn in jaxpr.eqns:
        called = _called(eqn)
        if called is None:
            if origins.keys().isdisjoint(eqn.outvars):
                readers.update({origins.get(v, v) for v in variables_of(eqn)})
            continue
        inner, operands = called
        of_inner = _num_readers(inner)
        for v, inner_v in zip(operands, inner.invars, strict=True):
            if isinstance(v, Var):
                readers[origins.get(v, v)] += of_inner[inner_v]
    return readers


def _rewritten(jaxpr: Jaxpr, readers: collections.Counter[Var]) -> Jaxpr:
    origins, eqns = _origins(jaxpr), []
    readers = readers + collections.Counter({v: readers[origin] for v, origin in origins.items()})
    for eqn in jaxpr.eqns:
        number = _divisor(eqn)
        if number is not None and readers[number] == 1:
            avals = [v.aval for v in eqn.invars]
            product = _jax.stage(
                lambda x, n: [x * jax.lax.integer_pow(n, -1)], avals, traced_for="jit", name="released"
            )
            eqns += _jax.spliced(product[0], eqn.invars, eqn.outvars, eqn)
        else:
            eqns.append(_rewritten_within(eqn, readers))
    return jaxpr if eqns == jaxpr.eqns else _jax.with_equations(jaxpr, eqns)


def _rewritten_within(eqn: Any, readers: collections.Counter[Var]) -> Any:
    called, name = _called(eqn), eqn.primitive.name
    if called is None and name not in ("scan", "shard_map"):
        return eqn
    inner, operands = called or (inner_jaxprs(eqn)[0], ())
    of_inner = _num_readers(inner)
    of_inner |= {u: readers[v] for u, v in zip(inner.invars, operands, strict=False) if isinstance(v, Var)}
    if name == "scan":
        of_inner.update(inner.invars[: _jax.scan_counts(eqn)[0]])  # the next step reads constants, too
    new = _rewritten(inner, of_inner)
    return _jax.map_jaxprs(lambda x: _jax.closed_like(x, new) if _jax.open_jaxpr(x)[0] is inner else x, eqn)


def _divisor(eqn: Any) -> Var | None:
    """The number that an equation divides an array by; None for any other equation."""
    if eqn.primitive.name != "div" or isinstance(eqn.invars[1], Literal) or not is_float(eqn.invars[1].aval):
        return None
    return eqn.invars[1] if eqn.invars[0].aval.shape and not eqn.invars[1].aval.shape else None
