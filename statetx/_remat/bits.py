"""Prove that a value is 0 or 1: the result of a comparison, converted, moved, multiplied, or chosen from others that
are.

The proof goes forward through the equations and errs on one side: a value that it does not prove may be 0 or 1 all the
same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .. import _jax
from .._equations.primitives import Runs, row_of
from .._jax import Jaxpr, Literal


def are_bits(eqn: Any, operands: Sequence[bool]) -> list[bool]:
    """Tell for each result of an equation if it is proved to be 0 or 1; `operands` says the same of its operands."""
    return [_is_bool(v) or b for v, b in zip(eqn.outvars, _proved(eqn, operands), strict=True)]


def of_steps(jaxpr: Jaxpr, num_consts: int, num_carry: int, operands: Sequence[bool]) -> tuple[list[bool], list[bool]]:
    """Tell for each input and output of a loop's step if it is proved to be 0 or 1 in every step; `operands` says
    it of the loop's operands.

    By induction: of the carries that are 0 or 1 before the first step, the largest set that a step keeps so.
    """
    inputs, carries = list(operands), slice(num_consts, num_consts + num_carry)
    while True:
        outs = _outputs(jaxpr, inputs)
        kept = [a and b for a, b in zip(inputs[carries], outs, strict=False)]
        if kept == inputs[carries]:
            return inputs, outs
        inputs[carries] = kept


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
        num_consts, num_carry = _jax.scan_counts(eqn)
        inputs, outs = of_steps(jaxprs[0], num_consts, num_carry, operands)
        # The last carry may be the first.
        return [*inputs[num_consts : num_consts + num_carry], *outs[num_carry:]]
    return _outputs(jaxprs[0], operands) if len(jaxprs[0].invars) == len(operands) else [False] * num


def _outputs(jaxpr: Jaxpr, inputs: Sequence[bool]) -> list[bool]:
    read = reader(jaxpr, inputs)
    return [read(v) for v in jaxpr.outvars]


def reader(jaxpr: Jaxpr, inputs: Sequence[bool] = ()) -> Callable[[Any], bool]:
    """A function that says whether a variable or literal of a program is proved to be 0 or 1, given this of its first
    inputs.
    """
    env = dict(zip(jaxpr.invars, inputs, strict=False))

    def read(atom: Any) -> bool:
        return is_bits(atom) or (not isinstance(atom, Literal) and env.get(atom, False))

    for eqn in jaxpr.eqns:
        env.update(zip(eqn.outvars, are_bits(eqn, [read(v) for v in eqn.invars]), strict=True))
    return read
