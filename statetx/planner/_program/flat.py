"""A program as a sequence of parts: regions that may be rematerialized, loops, and unchanged equations."""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
import re
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
from jax.extend.core.primitives import closed_call_p

from ... import _frames, _jax
from ..._equations.inline import inline
from ..._equations.primitives import JIT, REMAT, flops, row_of
from ..._equations.structure import Body
from ..._jax import Jaxpr, Literal, Var
from ..._remat.stored import of_steps, reader
from ..._text import type_str
from ..._tree import is_float
from .values import derivative_of, without

Interval = tuple[int, int]
"""Equations of a program or of a region: the first, and the one after the last."""


class Part:
    """Some consecutive equations of a program.

    Attributes:
        jaxpr: the equations as a function; for a loop, one step.
        invars, outvars: the program's variables that the part reads, and those that it defines for later parts.
        eqn: the scan of a loop, whose steps may be rematerialized; None for a region, which may be itself.
        original_jaxpr: for a function that the user rematerialized, its jaxpr as written, with inner calls; else
            `jaxpr`.
        bit_carries: for a loop, the leaves of its carry that each step returns as 0 or 1, and whether the first one is
            proved to be 0 or 1, too.
        key: equal for parts of equal structure.
    """

    def __init__(
        self,
        jaxpr: Jaxpr,
        invars: Sequence[Any],
        outvars: Sequence[Any],
        eqn: Any = None,
        original_jaxpr: Jaxpr | None = None,
        bit_carries: Mapping[int, bool] = MappingProxyType({}),
    ):
        self.jaxpr = jaxpr
        self.original_jaxpr = jaxpr if original_jaxpr is None else original_jaxpr
        self.invars = list(invars)
        self.outvars = list(outvars)
        self.eqn = eqn

        # The options of a loop depend on more than its body: on the length, and on the inputs that are carried, or 0
        # or 1.
        self.bit_carries = bit_carries
        loop_key = None
        if eqn is not None:
            loop_key = (eqn.params["length"], eqn.params["reverse"], *_jax.scan_counts(eqn), *bit_carries.items())
        self.key = (loop_key, Body(jaxpr, []).key)

    def __call__(self, *args: Any) -> list[Any]:
        """Run it unchanged."""
        if self.eqn is not None:
            return _jax.bind_equation(self.eqn, self.eqn.params, args)
        return _jax.evaluate(self.jaxpr, (), args)

    def __repr__(self) -> str:
        return f"Part({'region' if self.eqn is None else 'loop'}, {len(self.jaxpr.eqns)} equations)"


def flatten(jaxpr: Jaxpr) -> Jaxpr:
    """Inline the jits of a program, so that each variable is defined once.

    A loop with ``checkpoint="auto"`` or a size that stays plain becomes a scan, and can be planned. Conversions of a
    weak type are left out: a state that is weakly typed before its first update is not after it, and the program has
    the same plan.
    """
    return inline(_simplified(jaxpr), calls=JIT | {_jax.CLOSED_CALL}, deep=False)


def _simplified(x: Any) -> Any:
    """Replace, at any depth, statetx's loop primitive by a call of the plain scan, where the loop stays plain, and drop
    conversions of weak types.
    """
    jaxpr = _jax.open_jaxpr(x)[0]
    # The results of a jaxpr keep their types.
    is_left_out = lambda eqn: _converts_weak_type(eqn) and not any(v is eqn.outvars[0] for v in jaxpr.outvars)
    new = []
    for eqn in without(jaxpr.eqns, is_left_out)[0]:
        loop = _jax.loop_of(eqn)
        if loop is not None and loop.is_plain():  # `flatten` inlines the call
            eqn = eqn.replace(primitive=closed_call_p, params={"call_jaxpr": eqn.params["jaxpr"]})
        # A kernel is left unchanged.
        new.append(eqn if eqn.primitive.name == "pallas_call" else _jax.map_jaxprs(_simplified, eqn))
    is_same = len(new) == len(jaxpr.eqns) and all(a is b for a, b in zip(new, jaxpr.eqns, strict=True))
    return x if is_same else _jax.with_equations(x, new)


def _converts_weak_type(eqn: Any) -> bool:
    """Whether an equation changes nothing but a weak type, to the strong one of the same dtype."""
    if eqn.primitive.name != "convert_element_type" or not isinstance(eqn.invars[0], Var):
        return False
    old_type, new_type = eqn.invars[0].aval, eqn.outvars[0].aval
    is_same = (old_type.shape, old_type.dtype, old_type.sharding) == (new_type.shape, new_type.dtype, new_type.sharding)
    return is_same and old_type.weak_type and not new_type.weak_type


class Flat:
    """A flat program with its rematerialized functions inlined, and where these were. Its parts are intervals of its
    equations.

    Args:
        jaxpr: a program from `flatten`.
        opens_blocks: whether rematerialized functions are inlined; else each stays one equation, with its policy.

    Attributes:
        jaxpr: the program without calls.
        blocks: the functions that the user rematerialized, by the interval (start, end) of their equations.
        loops: the equations that are loops.
        ends: the equations at which such functions, and loops outside of them, begin or end.
    """

    def __init__(self, jaxpr: Jaxpr, *, opens_blocks: bool = True):
        self._calls = _CALLS if opens_blocks else _CALLS - REMAT
        noted: list[tuple[Any, ...]] = []
        note = lambda eqn, *where: noted.append((eqn, *where)) if eqn.primitive.name in REMAT else None
        self.jaxpr = whole = inline(jaxpr, calls=self._calls, deep=False, note=note)
        self._last_reads = last_reads(whole)
        self._parts: dict[tuple[int, int], Part] = {}
        self.blocks: dict[tuple[int, int], Part] = {}
        self.ends: set[int] = set()
        for block in noted:
            self._add_block(*block)
        self.loops = [i for i, e in enumerate(whole.eqns) if is_loop(e)]
        outside = [i for i in self.loops if not any(start <= i < end for start, end in self.blocks)]
        self.ends |= {j for i in outside for j in (i, i + 1)}

    def _add_block(self, eqn: Any, operands: Sequence[Any], outs: Sequence[Any], start: int, end: int) -> None:
        self.ends |= {start, end}
        defined = {v for e in self.jaxpr.eqns[start:end] for v in e.outvars}
        # A function that returns an input, or a value twice, cannot be a part: each part defines its outputs.
        are_own = all(not isinstance(v, Literal) and v in defined for v in outs) and len(set(outs)) == len(outs)
        if end > start and are_own:
            original = _jax.open_jaxpr(eqn.params["jaxpr"])[0]
            literals = {v: a for v, a in zip(original.invars, operands, strict=True) if isinstance(a, Literal)}
            original = _jax.with_literals(original, literals) if literals else original
            # Functions rematerialized inside of it are inlined, too: the plan decides for the whole.
            jaxpr = inline(original, calls=_CALLS, deep=False)
            variables = [a for a in operands if not isinstance(a, Literal)]
            self.blocks[start, end] = Part(jaxpr, variables, outs, original_jaxpr=original)

    def __len__(self) -> int:
        return len(self.jaxpr.eqns)

    def part(self, start: int, end: int) -> Part:
        """The equations of an interval: a function that the user rematerialized, a loop, or a region."""
        if (start, end) not in self._parts:
            block = self.blocks.get((start, end)) if REMAT <= self._calls else None
            is_single_loop = end == start + 1 and is_loop(self.jaxpr.eqns[start])
            part = block or (self._loop(start) if is_single_loop else self._region(start, end))
            self._parts[start, end] = part
        return self._parts[start, end]

    def _loop(self, index: int) -> Part:
        # Rematerialized functions are inlined too: the plan decides for the step.
        eqn = self.jaxpr.eqns[index]
        body = inline(_jax.open_jaxpr(eqn.params["jaxpr"])[0], calls=self._calls, deep=False)
        num_constants, num_carry = _jax.scan_counts(eqn)
        inputs, outs = of_steps(body, num_constants, num_carry, [self._is_bits(v) for v in eqn.invars])
        bit_carries = {n: inputs[num_constants + n] for n in range(num_carry) if outs[n]}
        return Part(body, eqn.invars, eqn.outvars, eqn, bit_carries=bit_carries)

    @functools.cached_property
    def _is_bits(self) -> Callable[[Any], bool]:
        """Whether a variable is proved to be 0 or 1."""
        return reader(self.jaxpr)

    def _region(self, start: int, end: int) -> Part:
        # As a function: its inputs are the variables that it reads and does not define, its outputs those read later.
        eqns = self.jaxpr.eqns[start:end]
        defined = {v for e in eqns for v in e.outvars}
        invars = {v: None for e in eqns for v in e.invars if not isinstance(v, Literal) and v not in defined}
        outvars = [v for e in eqns for v in e.outvars if self._last_reads.get(v, -1) >= end]
        return Part(_jax.rebuild(self.jaxpr, invars=list(invars), outvars=outvars, eqns=eqns), list(invars), outvars)

    def split(self, cuts: Iterable[int] | None = None) -> list[Part]:
        """The parts between cuts, the indices of the equations that begin one; by default the blocks, the loops and the
        rest.
        """
        boundaries = sorted({0, len(self), *(self.ends if cuts is None else cuts)})
        return [self.part(a, b) for a, b in itertools.pairwise(boundaries)]


_CALLS = JIT | REMAT | {_jax.CLOSED_CALL}


def is_loop(eqn: Any) -> bool:
    """Whether an equation is a loop that can be planned: a scan of several steps, without effects or constants."""
    is_scan = eqn.primitive.name == "scan" and eqn.params["length"] > 1 and not eqn.effects
    return is_scan and not _jax.open_jaxpr(eqn.params["jaxpr"])[1]


def is_linear(eqn: Any) -> bool:
    """Whether an equation is linear in its operands, so that its derivative reads none of them."""
    name, is_literal = eqn.primitive.name, [isinstance(v, Literal) for v in eqn.invars]
    return row_of(eqn).is_linear or (name == "mul" and any(is_literal)) or (name == "div" and is_literal[1])


def last_reads(jaxpr: Jaxpr) -> dict[Any, int]:
    """Index of the last equation that reads each variable; the number of equations for outputs."""
    uses = {v: i for i, e in enumerate(jaxpr.eqns) for v in e.invars if not isinstance(v, Literal)}
    return uses | {v: len(jaxpr.eqns) for v in jaxpr.outvars if not isinstance(v, Literal)}


def closed_over_by_rules(jaxpr: Jaxpr) -> list[int]:
    """The inputs of a program, by number, that functions with a ``custom_vjp`` close over."""
    eqns = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "custom_vjp_call"]
    closed_over = {v for eqn in eqns for v in eqn.invars[: _jax.num_closed_over(eqn)] if isinstance(v, Var)}
    return [i for i, v in enumerate(jaxpr.invars) if v in closed_over]


def differentiated_variables(jaxpr: Jaxpr, diff_indices: Sequence[int]) -> set[Any]:
    """The variables with a nonzero tangent in differentiation with respect to these inputs."""
    # By JAX's own rules: one output of a loop may have a tangent and another none, so that what reads only the other
    # needs no derivative.
    variables = [v for eqn in jaxpr.eqns for v in eqn.outvars if is_float(v.aval) and not _jax.is_dropped(v)]
    every = _jax.rebuild(jaxpr, invars=jaxpr.invars, outvars=variables, eqns=jaxpr.eqns)
    is_diff = [i in diff_indices for i in range(len(jaxpr.invars))]
    flags = _frames.undone(_jax.outputs_with_tangents)(every, is_diff)
    return {v for v, flag in zip([*jaxpr.invars, *variables], [*is_diff, *flags], strict=True) if flag}


def cotangent_variables(jaxpr: Jaxpr, num_out: int) -> set[Any]:
    """The variables that may get a cotangent: those that the first `num_out` outputs depend on."""
    dependencies = {v for v in jaxpr.outvars[:num_out] if not isinstance(v, Literal)}
    for eqn in reversed(jaxpr.eqns):
        if any(v in dependencies for v in eqn.outvars):
            dependencies.update(v for v in eqn.invars if not isinstance(v, Literal))
    return dependencies


# -- running them ---------------------------------------------------------------------------------------------------


def run(
    jaxpr: Jaxpr,
    parts: Sequence[Part],
    replacements: Sequence[Callable[..., list] | None],
    args: Sequence[Any],
) -> list[Any]:
    """Evaluate a program part by part; a replacement of a part is called in place of its equations."""
    calls = (replacement or part for part, replacement in zip(parts, replacements, strict=True))
    by_part = types.SimpleNamespace(constvars=[], invars=jaxpr.invars, outvars=jaxpr.outvars, eqns=parts)
    return _jax.interpret(by_part, args, lambda _, operands: next(calls)(*operands))


# -- programs on devices --------------------------------------------------------------------------------------------

# Where a gradient is taken around a `jax.shard_map`, the differentiated function has one equation, and its regions are
# in the body of that. (A loss that is a shard_map is planned as the step that takes its gradient, `_search.capture`.)
# JAX differentiates the body on its own: the backward pass of a device reads the saved values of the body's regions. So
# the body is a program like any other, with the shapes of a device, and a rewritten one goes back into the shard_map.

Rewrite = Callable[[Any, Body, str, int], Callable]


def of_device(rewrite: Rewrite) -> Rewrite:
    """Let a method `Rewriter.rewrite` rewrite what runs on a device, in place of a function that consists of a
    shard_map.
    """

    @functools.wraps(rewrite)
    def rewrite_of_device(self: Any, body: Body, name: str, num_out: int) -> Callable:
        parts = _with_shard_map(body.jaxpr)
        if parts is None:
            return rewrite(self, body, name, num_out)
        program, eqn = parts

        # The outputs with a cotangent come first, as in every program to plan.
        with_cotangent = cotangent_variables(program, num_out)
        order = sorted(range(len(eqn.outvars)), key=lambda i: eqn.outvars[i] not in with_cotangent)
        inner = eqn.params["jaxpr"]
        inner = _jax.rebuild(inner, invars=inner.invars, outvars=[inner.outvars[i] for i in order])
        with _jax.in_shard_maps(eqn):  # a rewriter may stage it
            rewritten = rewrite(self, Body(inner, []), name, sum(v in with_cotangent for v in eqn.outvars))

        def on_device(*shards: Any) -> list[Any]:
            outs = dict(zip(order, rewritten([], *shards), strict=True))
            return [outs[i] for i in range(len(order))]

        def rule(e: Any, operands: list[Any]) -> Sequence[Any]:
            return (
                _jax.shard_mapped(eqn, on_device)(*operands) if e is eqn else _jax.bind_equation(e, e.params, operands)
            )

        return lambda operands, *args: _jax.interpret(program, [*operands, *args], rule)

    return rewrite_of_device


def is_on_devices(jaxpr: Jaxpr) -> bool:
    """Whether a program consists of a shard_map."""
    return _with_shard_map(jaxpr) is not None


def _with_shard_map(jaxpr: Jaxpr) -> tuple[Jaxpr, Any] | None:
    """A program, flat, with the shard_map that has more than half of its operations; None if it has none."""
    # Most programs have none, and long ones take a while to be flattened.
    if not _contains_shard_map(jaxpr):
        return None
    program = Flat(flatten(jaxpr)).jaxpr
    operations = [_operations(eqn) for eqn in program.eqns]
    for eqn, num in zip(program.eqns, operations, strict=True):
        if eqn.primitive.name == "shard_map" and 2 * num > sum(operations):
            return program, eqn
    return None


def _contains_shard_map(jaxpr: Jaxpr) -> bool:
    return any(
        e.primitive.name == "shard_map" or any(map(_contains_shard_map, _jax.inner_jaxprs(e))) for e in jaxpr.eqns
    )


def _operations(eqn: Any) -> int:
    """Operations on all devices together."""
    if eqn.primitive.name != "shard_map":
        return flops(eqn)
    return flops(eqn) * math.prod(eqn.params["mesh"].shape[axis] for axis in eqn.params["newly_manual_axes"])


# -- fingerprints: programs with equal ones have the same plans -----------------------------------------------------


def digest_of(lines: Sequence[str]) -> str:
    """A digest of a fingerprint."""
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def fingerprint(jaxpr: Jaxpr) -> tuple[str, ...]:
    """A line for each equation of a flat program. Programs with equal equations have equal lines, whatever their
    outputs.
    """
    return full_fingerprint(jaxpr)[:-1]


def full_fingerprint(jaxpr: Jaxpr, has_rules: bool = True) -> tuple[str, ...]:
    """The fingerprint of a flat program, and a line for its outputs.

    Args:
        has_rules: whether the rules of a ``custom_vjp`` count.
    """
    # Variables are numbered in the order of their definition: names of variables and of functions do not count.
    variables = {v: f"v{i}:{_type(v)}" for i, v in enumerate(jaxpr.invars)}

    def operand(atom: Any) -> str:
        if isinstance(atom, Literal):
            return f"{np.asarray(atom.val).tolist() if np.ndim(atom.val) == 0 else 'constant'}:{_type(atom)}"
        return variables[atom]

    lines = []
    for eqn in jaxpr.eqns:
        operands = " ".join(map(operand, eqn.invars))
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


def _type(v: Any) -> str:
    return _array_type(v.aval.shape, v.aval.dtype) if hasattr(v.aval, "dtype") else str(v.aval)


@functools.lru_cache(4096)
def _array_type(shape: tuple[Any, ...], dtype: Any) -> str:
    # Hashed into stored plans, without sharding and weak type: not to be changed with the notation of messages.
    return type_str(jax.ShapeDtypeStruct(shape, dtype))


def _param(x: Any, has_rules: bool) -> str:
    if _jax.is_jaxpr(x):
        program = flatten(_jax.constants_as_inputs(_jax.open_jaxpr(x)[0]))
        return digest_of(full_fingerprint(program, has_rules))[:12]
    if isinstance(x, (tuple, list)):
        return f"({','.join(_param(item, has_rules) for item in x)})"
    if callable(x) and not isinstance(x, type):
        return getattr(x, "__name__", type(x).__name__)
    return _ADDRESS.sub("", str(x))


def _rule(eqn: Any) -> str:
    """The forward rule of a ``custom_vjp``; nothing if it raises, since no plan sees into it then."""
    try:
        rule = _frames.undone(_jax.rule_of)(eqn)
    except Exception:
        return ""
    return _param(rule, has_rules=False)


_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def rules_of(jaxpr: Jaxpr) -> list[str]:
    """The fingerprints of the derivatives of equations with rules or policies of the user, which the fingerprint leaves
    out.
    """
    lines: list[str] = []
    for eqn in jaxpr.eqns:
        if any(callable(x) and not isinstance(x, type) and not _jax.is_jaxpr(x) for x in eqn.params.values()):
            variables = dict.fromkeys(v for v in eqn.invars if isinstance(v, Var))
            lines += _derivative(_jax.rebuild(jaxpr, invars=list(variables), outvars=eqn.outvars, eqns=[eqn]))
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
    return tuple(line for derivative in passes for line in full_fingerprint(flatten(derivative.jaxpr)))
