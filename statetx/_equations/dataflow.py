"""Dataflow of equations: the variables that they read, the equations that others need, the bytes alive at each step."""

from __future__ import annotations

from collections.abc import Container, Iterable, KeysView, Sequence

import numpy as np

from .._jax import Eqn, Var


def variables_of(eqn: Eqn) -> KeysView[Var]:
    """The operands that are variables, as an ordered set."""
    return dict.fromkeys(v for v in eqn.invars if isinstance(v, Var)).keys()


def free_variables(eqns: Sequence[Eqn]) -> list[Var]:
    """The variables that equations read and do not compute, in the order of their first reads."""
    computed = {v for e in eqns for v in e.outvars}
    return list(dict.fromkeys(v for e in eqns for v in variables_of(e) if v not in computed))


def needed_equations(eqns: Sequence[Eqn], outvars: Iterable[Var], available: Container[Var] = ()) -> list[Eqn]:
    """The equations that compute some variables from the `available` ones, in order."""
    needed = {v for v in outvars if v not in available}
    producers: list[Eqn] = []
    for eqn in reversed(eqns):
        if not needed.isdisjoint(eqn.outvars):
            producers.append(eqn)
            needed.update(v for v in variables_of(eqn) if v not in available)
    return producers[::-1]


def alive_bytes(num_steps: int, spans: Iterable[tuple[int, int, int]]) -> np.ndarray:
    """The sum at each step, ``int64[num_steps]``, of spans ``(first, last, bytes)``: a value is alive in both of these
    steps. One whose last step is before its first is never alive.
    """
    change = np.zeros(num_steps + 1, np.int64)
    for first, last, num_bytes in spans:
        if first <= last:
            change[first] += num_bytes
            change[last + 1] -= num_bytes
    return np.cumsum(change)[:-1]
