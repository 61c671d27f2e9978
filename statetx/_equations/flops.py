"""Floating-point operations of equations.

An elementwise primitive counts one operation for each entry of its result (a sine as much as a sum), a reduction one
for each entry of its operand; products and convolutions count two for each multiply-add. Moving data is free. Matrix
factorizations count their leading terms (Golub and Van Loan, Matrix Computations, 4th edition). A branch counts its
most expensive case, a shard_map one device. A ``while`` loop inside a checkpointed loop counts the steps that the
schedule makes (`_jax.known_runs`). Any other ``while`` loop counts one step, since its number of steps is unknown:
there, and only there, the count may be far too small.
"""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction
from typing import Any

from .. import _jax
from .._jax import Jaxpr
from .._tree import has_known_sizes, num_bytes
from .primitives import Runs, row_of, size


def count(jaxpr: Jaxpr) -> int:
    """Operations of a jaxpr's equations."""
    return round(_count(jaxpr))


def flops(eqn: Any) -> int:
    """Operations of an equation, including the jaxprs in it."""
    return round(_flops(eqn))


# Of a loop that runs a mean number of times, the exact product with the length of the loop around it is a whole number:
# fractions are rounded at the end only.


def _count(jaxpr: Jaxpr) -> Fraction | int:
    return sum(map(_flops, jaxpr.eqns))


def _flops(eqn: Any) -> Fraction | int:
    name, rule = eqn.primitive.name, row_of(eqn).flops
    # With symbolic sizes (jax.export) an estimate, which decides between equal results.
    if not all(has_known_sizes(v.aval) for v in (*eqn.invars, *eqn.outvars)):
        return sum(num_bytes(v.aval) for v in eqn.outvars)
    if rule is not None:
        return int(rule(eqn))
    # An unknown primitive with a jaxpr counts as one run of it.
    inner = [times * _count(jaxpr) for jaxpr, times in _inner(eqn)]
    if inner:
        return max(inner) if row_of(eqn).runs is Runs.BRANCH else sum(inner)
    if name.startswith(("reduce_", "arg", "cum")):
        return size(eqn.invars[0])
    return max((size(v) for v in eqn.outvars), default=0)


def _inner(eqn: Any) -> Iterable[tuple[Jaxpr, Fraction | int]]:
    """The jaxprs in an equation and the number of times each runs; for a custom derivative, the function without its
    rule.
    """
    params, row = eqn.params, row_of(eqn)
    if row.runs is Runs.PRIMAL:
        params = {row.jaxpr: params[row.jaxpr]}
    known_runs = _jax.known_runs(eqn)
    times = params["length"] if row.runs is Runs.LOOP else 1 if known_runs is None else known_runs
    for param in params.values():
        for x in param if isinstance(param, (tuple, list)) else (param,):
            if _jax.is_jaxpr(x):
                yield _jax.open_jaxpr(x)[0], times
