"""Prove that a value is 0 or 1: the result of a comparison, converted, moved, multiplied, or chosen from others that are.

The proof goes forward through the equations and errs on one side: a value that it does not prove may be 0 or 1 all the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .. import _jax
from .._equations.primitives import Runs, row_of
from .._jax import Jaxpr, Literal


def are_bits(eqn: Any, operands: Sequence[bool]) -> list[bool]:
    """For each result of an equation, whether it is proved to be 0 or 1; `operands` says the same of its operands."""
    return [_is_bool(v) or b for v, b in zip(eqn.outvars, _proved(eqn, operands), strict=True)]


def is_bits(atom: Any) -> bool:
    """Whether a literal is 0 or 1, or a variable is boolean. -0.0 is another number, whose sign a bit would lose."""
    if isinstance(atom, Literal):
        value = np.asarray(atom.val)
        return value.dtype.kind in "biuf" and bool(np.all(((value == 0) & ~np.signbit(value)) | (value == 1)))
    return _is_bool(atom)


def _is_bool(v: Any) -> bool:
    return getattr(v.aval, "dtype", None) == np.dtype(bool)


def _proved(eqn: Any, operands: Sequence[bool]) -> list[bool]:
    name, num = eqn.primitive.name, len(eqn.outvars)
    row = row_of(eqn)
    if row.forwards and num > 1:  # `optimization_barrier`, `device_put`: each result is one operand
        return list(operands) if num == len(operands) else [False] * num
    if row.bits is not None:  # the maximum of no entries is infinite
        return [all(operands[row.bits]) and all(getattr(v.aval, "size", 0) for v in eqn.invars)] * num
    if name == "integer_pow":
        return [operands[0] and eqn.params["y"] > 0]
    if name == "sub":  # 1 - x
        one = eqn.invars[0]
        return [operands[1] and isinstance(one, Literal) and bool(np.all(np.asarray(one.val) == 1))]

    if row.runs is Runs.NOT or row.jaxpr not in eqn.params:
        return [False] * num
    param = eqn.params[row.jaxpr]
    jaxprs = [_jax.open_jaxpr(x)[0] for x in (param if isinstance(param, (tuple, list)) else [param])]
    if row.runs is Runs.BRANCH:
        branches = [_outputs(jaxpr, operands[1:]) for jaxpr in jaxprs]
        return [all(bits) for bits in zip(*branches, strict=True)]
    if name == "scan":
        # A carry may change, so nothing is assumed of it; the last one may be the first.
        num_consts, num_carry = _jax.scan_counts(eqn)
        inits = operands[num_consts : num_consts + num_carry]
        inputs = [*operands[:num_consts], *[False] * num_carry, *operands[num_consts + num_carry :]]
        outs = _outputs(jaxprs[0], inputs)
        return [*(a and b for a, b in zip(outs, inits, strict=False)), *outs[num_carry:]]
    return _outputs(jaxprs[0], operands) if len(jaxprs[0].invars) == len(operands) else [False] * num


def _outputs(jaxpr: Jaxpr, inputs: Sequence[bool]) -> list[bool]:
    env = dict(zip(jaxpr.invars, inputs, strict=True))

    def read(atom: Any) -> bool:
        return is_bits(atom) or (not isinstance(atom, Literal) and env.get(atom, False))

    for eqn in jaxpr.eqns:
        env.update(zip(eqn.outvars, are_bits(eqn, [read(v) for v in eqn.invars]), strict=True))
    return [read(v) for v in jaxpr.outvars]
