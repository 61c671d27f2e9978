"""The values of a region that are saved without breaking a fusion of XLA for GPUs."""

from __future__ import annotations

import collections
from collections.abc import Callable

from ..._equations.dataflow import variables_of
from ..._equations.primitives import row_of
from ..._jax import Eqn, Jaxpr, Var, shaped
from ..._lift.context import device_bytes


def between_fusions(jaxpr: Jaxpr) -> set[Var] | None:
    """The variables of a region that are worth saving where traffic counts as well as operations; None if all are: the
    region has no reduction, and a kernel of elementwise operations writes further results.

    These are in memory anyway: results of equations that do not fuse, such as products, and the operands of these. Any
    other value is computed within a kernel. One that takes fewer bytes than the results that it is computed from, such
    as the sum of two products, is a further output of its kernel; but XLA's kernels for a softmax or a norm, which
    begin with a reduction of rows, have one output, and fall into several that read the large operand again. All
    other values are as well computed again with their readers.
    """
    if not any(row_of(eqn).reads_fused for eqn in jaxpr.eqns):
        return None
    follows = _reductions_of_rows(jaxpr)  # and later the values that follow one of these in its kernel
    is_fused: Callable[[Eqn], bool] = lambda eqn: row_of(eqn).fuses or not follows.isdisjoint(eqn.outvars)
    values = {v for eqn in jaxpr.eqns if not is_fused(eqn) for v in eqn.outvars}
    for eqn in jaxpr.eqns:
        if not (row_of(eqn).fuses or row_of(eqn).reads_fused):
            values.update(variables_of(eqn))

    sources: dict[Var, set[Var]] = {}  # the values in memory that each is computed from
    worth = set(values)
    for eqn in jaxpr.eqns:
        operands = variables_of(eqn)
        read = set[Var]().union(*({v} if v in values else sources.get(v, set()) for v in operands)) - {*jaxpr.invars}
        for v in eqn.outvars:
            sources[v] = read
            if not follows.isdisjoint(u for u in operands if u not in values):
                follows.add(v)
            elif v not in follows and sum(device_bytes(u.aval) for u in read) > device_bytes(v.aval):
                worth.add(v)
    return worth


def _reductions_of_rows(jaxpr: Jaxpr) -> set[Var]:
    """The results of reductions along the last axes that are broadcast again to the shape of their operand."""
    readers: dict[Var, list[Eqn]] = collections.defaultdict(list)
    widest: dict[Var, int] = {}  # of a value and those that are computed from it in its kernel
    rows: set[Var] = set()
    for eqn in jaxpr.eqns:
        for v in variables_of(eqn):
            readers[v].append(eqn)
    for eqn in reversed(jaxpr.eqns):
        for v in eqn.outvars:
            further = [widest[u] for reader in readers[v] if row_of(reader).fuses for u in reader.outvars]
            widest[v] = max([shaped(v.aval).size, *further])
        if row_of(eqn).reads_fused:
            operand, result = shaped(eqn.invars[0].aval), eqn.outvars[0]
            is_last = tuple(eqn.params["axes"]) == tuple(range(shaped(result.aval).ndim, operand.ndim))
            rows |= {result} if is_last and widest[result] >= operand.size else set()
    return rows
