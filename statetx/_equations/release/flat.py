"""Flat programs: calls that hide loops are inlined, copies of stacks removed, equal loops merged."""

from __future__ import annotations

from typing import Any

from jax.extend.core.primitives import closed_call_p

from ... import _jax
from ..._jax import Jaxpr, Literal, Var
from ..dataflow import variables_of
from ..inline import inline
from ..primitives import INLINED, JIT, LOOPS, REMAT, inner_jaxprs
from ..structure import operation_of
from .loops import has_loop, row_loop

# Regions stay: their lowering keeps a recomputation apart. So do calls with shardings, and loops with rules of their
# own, which are lowered by a rewriting of their own.
_CALLS = INLINED - REMAT - {"statetx_loop"}
_FEW = 16


def flattened(jaxpr: Jaxpr) -> Jaxpr:
    """Inline calls that have a loop or few operations, like many functions of `jax.numpy`, and branches with a known
    index; leave one of equal loops; drop unread results.
    """

    def stays(eqn: Any) -> bool:
        if eqn.primitive.name in JIT and not _jax.is_unplaced(eqn):
            return True
        (inner,) = inner_jaxprs(eqn)
        return row_loop(eqn) is not None or (len(inner.eqns) > _FEW and not has_loop(inner))

    flat = inline(jaxpr, calls=_CALLS, deep=False, unless=stays)
    while any(taken_branch(e) is not None for e in flat.eqns):
        taken = [e if (n := taken_branch(e)) is None else _as_call(e, n) for e in flat.eqns]
        flat = _jax.rebuild(flat, invars=flat.invars, outvars=flat.outvars, eqns=taken)
        flat = inline(flat, calls=_CALLS, deep=False, unless=lambda eqn, taken=taken: eqn not in taken and stays(eqn))
    return _jax.with_dropped_results(_without_equal_loops(flat))


def taken_branch(eqn: Any) -> int | None:
    """The branch of a `cond` with a known index, as in `optax.MultiSteps`; None for any other equation."""
    if eqn.primitive.name != "cond" or not isinstance(eqn.invars[0], Literal):
        return None
    return min(max(int(eqn.invars[0].val), 0), len(eqn.params["branches"]) - 1)


def _as_call(cond: Any, branch: int) -> Any:
    params = {"call_jaxpr": cond.params["branches"][branch]}
    return cond.replace(primitive=closed_call_p, params=params, invars=cond.invars[1:])


def _without_equal_loops(jaxpr: Jaxpr) -> Jaxpr:
    """Drop a loop that repeats an earlier one on the same operands: its readers get the earlier results.

    A step that takes a gradient twice has such loops. XLA merges them, but not with one that has taken consumers in.
    Other equations are left to XLA: of two stacks of zeros, each may become the memory of a sum.
    """
    equal: dict[Var, Var] = {}  # from a variable to the first one that has the same value
    first = lambda v: equal.get(v, v) if isinstance(v, Var) else None
    seen: dict[Any, list[Any]] = {}
    replacements: dict[Var, Var] = {}  # from a result of a loop to the first equal loop's
    eqns = []
    for eqn in jaxpr.eqns:
        candidates = seen.setdefault((eqn.primitive, *map(first, eqn.invars)), [])
        key = operation_of(eqn) if candidates and not eqn.effects else None
        twin = next((e for e in candidates if operation_of(e) == key), None) if key is not None else None
        if twin is None:
            candidates.append(eqn)
        else:
            results = dict(zip(eqn.outvars, twin.outvars, strict=True))
            equal |= results
            if eqn.primitive.name in LOOPS or any(map(has_loop, inner_jaxprs(eqn))):
                replacements |= results
                continue
        eqns.append(eqn.replace(invars=[replacements.get(v, v) if isinstance(v, Var) else v for v in eqn.invars]))
    if not replacements:
        return jaxpr
    outvars = [replacements.get(v, v) if isinstance(v, Var) else v for v in jaxpr.outvars]
    return _jax.without_dead_code(_jax.rebuild(jaxpr, invars=jaxpr.invars, outvars=outvars, eqns=eqns))


def without_copies(jaxpr: Jaxpr) -> Jaxpr:
    """Replace a stacked result by the operand whose elements it has unchanged.

    `flax.nnx.scan` returns the weights of the layers so, inside a region where JAX does not see it.
    """
    replacements: dict[Var, Any] = {}
    read = lambda v: replacements.get(v, v) if isinstance(v, Var) else v
    eqns = []
    for eqn in jaxpr.eqns:
        eqn = eqn.replace(invars=[read(v) for v in eqn.invars]) if replacements.keys() & variables_of(eqn) else eqn
        eqns.append(eqn)
        if eqn.primitive.name == "scan":
            num_constants, num_carry = _jax.scan_counts(eqn)
            body, _ = _jax.open_jaxpr(eqn.params["jaxpr"])
            for n, out in enumerate(eqn.outvars[num_carry:], num_carry):
                i = _input_of(body, body.outvars[n])
                if i is not None and i >= num_constants + num_carry and not _jax.is_dropped(out):
                    replacements[out] = eqn.invars[i]
    if not replacements:
        return jaxpr
    outvars = [read(v) for v in jaxpr.outvars]
    return _jax.without_dead_code(_jax.rebuild(jaxpr, invars=jaxpr.invars, outvars=outvars, eqns=eqns))


def _input_of(jaxpr: Jaxpr, v: Any) -> int | None:
    """The position of the input that a variable is, perhaps handed through calls; None for another value."""
    while isinstance(v, Var) and v not in jaxpr.invars:
        eqn = next(e for e in jaxpr.eqns if v in e.outvars)
        if eqn.primitive.name not in INLINED - {"statetx_loop"}:
            return None
        (inner,) = inner_jaxprs(eqn)
        i = _input_of(inner, inner.outvars[eqn.outvars.index(v)])
        if i is None:
            return None
        v = eqn.invars[i - len(inner.invars)]  # a call may have constants before its operands
    return jaxpr.invars.index(v) if isinstance(v, Var) else None
