"""A program with the calls inlined that hide loops, without copies of stacks."""

from __future__ import annotations

from typing import Any

from ... import _jax
from ..._jax import Jaxpr, Var
from ..inline import inline
from ..primitives import INLINED, JIT, REMAT, inner_jaxprs
from .consumers import variables_of
from .loops import has_loop, row_loop

# Regions stay: their lowering keeps a recomputation apart. So do calls with shardings, and loops with rules of their
# own, which are lowered by a rewriting of their own.
_CALLS = INLINED - REMAT - {"statetx_loop"}
_FEW = 16


def flattened(jaxpr: Jaxpr) -> Jaxpr:
    """Inline calls that have a loop, or few operations, as many functions of `jax.numpy` are; drop what is unread."""

    def stays(eqn: Any) -> bool:
        if eqn.primitive.name in JIT and not _jax.is_unplaced(eqn):
            return True
        (inner,) = inner_jaxprs(eqn)
        return row_loop(eqn) is not None or (len(inner.eqns) > _FEW and not has_loop(inner))

    return _jax.with_dropped_results(inline(jaxpr, calls=_CALLS, deep=False, unless=stays))


def without_copies(jaxpr: Jaxpr) -> Jaxpr:
    """Read in the place of a stacked result the operand of which it has each element unchanged.

    `flax.nnx.scan` returns the weights of the layers so, inside a region where JAX does not see it.
    """
    same: dict[Var, Any] = {}
    read = lambda v: same.get(v, v) if isinstance(v, Var) else v
    eqns = []
    for eqn in jaxpr.eqns:
        eqn = eqn.replace(invars=[read(v) for v in eqn.invars]) if same.keys() & variables_of(eqn) else eqn
        eqns.append(eqn)
        if eqn.primitive.name == "scan":
            num_constants, num_carry = _jax.scan_counts(eqn)
            body, _ = _jax.open_jaxpr(eqn.params["jaxpr"])
            for n, out in enumerate(eqn.outvars[num_carry:], num_carry):
                i = _input_of(body, body.outvars[n])
                if i is not None and i >= num_constants + num_carry and not _jax.is_dropped(out):
                    same[out] = eqn.invars[i]
    if not same:
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
