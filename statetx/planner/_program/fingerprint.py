"""Fingerprints: programs with equal ones have the same plans."""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Sequence
from typing import Any, cast

import jax
import numpy as np

from ... import _frames, _jax
from ..._equations.dataflow import variables_of
from ..._jax import Atom, Eqn, Jaxpr, Literal
from ..._text import type_str
from ..._tree import is_float
from .flat import closed_over_by_rules, flatten
from .values import derivative_of


def fingerprint_of(lines: Sequence[str]) -> str:
    """A digest of the lines of a program."""
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def lines_of(jaxpr: Jaxpr, has_rules: bool = True) -> tuple[str, ...]:
    """A line for each equation of a flat program, and one for its outputs. Programs with equal equations have equal
    lines.

    Args:
        has_rules: whether the rules of a ``custom_vjp`` count.
    """
    # Variables are numbered in the order of their definition: names of variables and of functions do not count.
    variables = {v: f"v{i}:{_type(v)}" for i, v in enumerate(jaxpr.invars)}

    def operand(atom: Atom) -> str:
        if isinstance(atom, Literal):
            return f"{np.asarray(atom.val).tolist() if np.ndim(atom.val) == 0 else 'constant'}:{_type(atom)}"
        return variables[atom]

    numbers = _jax.error_numbers(jaxpr)
    lines: list[str] = []
    for eqn in jaxpr.eqns:
        operands = " ".join(map(operand, eqn.invars)) if numbers.isdisjoint(eqn.outvars) else "error number"
        types = [_type(v) for v in eqn.outvars]
        for v, type in zip(eqn.outvars, types, strict=True):
            variables[v] = f"v{len(variables)}:{type}"
        outs = " ".join(types)
        params = [f"{k}={_param(v, has_rules)}" for k, v in sorted(eqn.params.items()) if k not in _UNSTABLE]
        # A plan may keep values of a rule, but not of the rules in it: often it calls the function itself.
        if has_rules and eqn.primitive.name == "custom_vjp_call":
            params.append(f"rule={_rule(eqn)}")
        lines.append(f"{eqn.primitive.name} {operands} -> {outs}" + (f" [{' '.join(params)}]" if params else ""))
    return (*lines, f"return {' '.join(map(operand, jaxpr.outvars))}")


# Parameters that may differ between traces of the same program: functions made by each trace, names and debugging
# information. A difference in them alone, such as another rule for forward mode, is not noticed.
_UNSTABLE = frozenset(
    {"policy", "name", "debug_info", "jvp_jaxpr_fun", "jvp_jaxpr_thunk", "fwd_jaxpr_thunk", "bwd", "ctx_mesh"}
)


def _type(v: Atom) -> str:
    aval = _jax.shaped(v.aval)
    return _array_type(aval.shape, aval.dtype) if hasattr(aval, "dtype") else str(aval)


@functools.lru_cache(4096)
def _array_type(shape: tuple[int, ...], dtype: jax.typing.DTypeLike) -> str:
    # Hashed into stored plans, without sharding and weak type: not to be changed with the notation of messages.
    return type_str(jax.ShapeDtypeStruct(shape, dtype))


def _param(x: Any, has_rules: bool) -> str:
    if _jax.is_jaxpr(x):
        program = flatten(_jax.constants_as_inputs(_jax.open_jaxpr(x)[0]))
        return fingerprint_of(lines_of(program, has_rules))[:12]
    if isinstance(x, (tuple, list)):
        return f"({','.join(_param(item, has_rules) for item in cast(Sequence[Any], x))})"
    if callable(x) and not isinstance(x, type):
        return getattr(x, "__name__", type(x).__name__)
    return _ADDRESS.sub("", str(_jax.error_messages(x) or x))


def _rule(eqn: Eqn) -> str:
    """The forward rule of a ``custom_vjp``; nothing if it raises, since no plan sees into it then."""
    try:
        rule = _frames.undone(_jax.rule_of)(eqn)
    except Exception:
        return ""
    return _param(rule, has_rules=False)


_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def rules_of(jaxpr: Jaxpr) -> list[str]:
    """The lines of derivatives of equations with rules or policies of the user, which the program's lines leave out."""
    lines: list[str] = []
    for eqn in jaxpr.eqns:
        if any(callable(x) and not isinstance(x, type) and not _jax.is_jaxpr(x) for x in eqn.params.values()):
            lines += _derivative(_jax.rebuild(jaxpr, invars=[*variables_of(eqn)], outvars=eqn.outvars, eqns=[eqn]))
        else:
            lines += [line for inner in _jax.inner_jaxprs(eqn) for line in rules_of(inner)]
    return lines


def _derivative(jaxpr: Jaxpr) -> tuple[str, ...]:
    fixed = closed_over_by_rules(jaxpr)
    inputs = [i for i, v in enumerate(jaxpr.invars) if is_float(v.aval) and i not in fixed]
    outs = [i for i, v in enumerate(jaxpr.outvars) if is_float(v.aval)]
    try:
        passes = _frames.undone(derivative_of)(jaxpr, inputs, outs)
    except Exception as e:  # no plan looks into a rule that raises
        return (type(e).__name__,)
    return tuple(line for derivative in passes for line in lines_of(flatten(derivative.jaxpr)))
