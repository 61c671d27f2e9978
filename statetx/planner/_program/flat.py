"""A program as a sequence of parts: regions that may be rematerialized, loops, unchanged equations."""

from __future__ import annotations

import itertools
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from jax.extend.core.primitives import closed_call_p

from ... import _frames, _jax
from ..._cached import cached_property
from ..._equations.dataflow import free_variables, needed_equations, variables_of
from ..._equations.inline import inline
from ..._equations.primitives import JIT, REMAT, row_of
from ..._equations.structure import Body
from ..._jax import Array, ArrayFunction, Arrays, Atom, Eqn, Jaxpr, Literal, Var
from ..._remat.stored import of_steps, reader
from ..._tree import is_float
from .values import without

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
        invars: Sequence[Atom],
        outvars: Sequence[Var],
        eqn: Eqn | None = None,
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

    @property
    def scan(self) -> Eqn:
        """The equation of a loop."""
        assert self.eqn is not None
        return self.eqn

    @property
    def is_rematerialized(self) -> bool:
        """Whether it is a loop whose steps the user rematerialized, each as a whole, to save nothing."""
        eqns = _jax.open_jaxpr(self.scan.params["jaxpr"])[0].eqns
        return len(eqns) == 1 and eqns[0].primitive.name in REMAT and eqns[0].params["policy"] is None

    def __call__(self, *args: Array) -> Arrays:
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
    is_output: Callable[[Var], bool] = lambda v: any(out is v for out in jaxpr.outvars)
    is_left_out: Callable[[Eqn], bool] = lambda eqn: _converts_weak_type_alone(eqn) and not is_output(eqn.outvars[0])
    new: list[Eqn] = []
    for eqn in without(jaxpr.eqns, is_left_out)[0]:
        loop = _jax.loop_of(eqn)
        if loop is not None and loop.is_plain():  # `flatten` inlines the call
            eqn = eqn.replace(primitive=closed_call_p, params={"call_jaxpr": eqn.params["jaxpr"]})
        # A kernel is left unchanged.
        new.append(eqn if eqn.primitive.name == "pallas_call" else _jax.map_jaxprs(_simplified, eqn))
    is_same = len(new) == len(jaxpr.eqns) and all(a is b for a, b in zip(new, jaxpr.eqns, strict=True))
    return x if is_same else _jax.with_equations(x, new)


def _converts_weak_type_alone(eqn: Eqn) -> bool:
    """Whether an equation is the identity, but for a weak type."""
    if eqn.primitive.name != "convert_element_type" or not isinstance(eqn.invars[0], Var):
        return False
    old_type, new_type = _jax.shaped(eqn.invars[0].aval), _jax.shaped(eqn.outvars[0].aval)
    return (old_type.shape, old_type.dtype, old_type.sharding) == (new_type.shape, new_type.dtype, new_type.sharding)


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
        noted: list[tuple[Eqn, list[Atom], list[Atom], int, int]] = []

        def note(eqn: Eqn, operands: list[Atom], outs: list[Atom], start: int, end: int) -> None:
            if eqn.primitive.name in REMAT:
                noted.append((eqn, operands, outs, start, end))

        self.jaxpr = inlined = inline(jaxpr, calls=self._calls, deep=False, note=note)
        self._last_reads = last_reads(inlined)
        self._parts: dict[tuple[int, int], Part] = {}
        self.blocks: dict[tuple[int, int], Part] = {}
        self.ends: set[int] = set()
        for block in noted:
            self._add_block(*block)
        self.loops = [i for i, e in enumerate(inlined.eqns) if is_loop(e)]
        outer_loops = [i for i in self.loops if not any(start <= i < end for start, end in self.blocks)]
        self.ends |= {j for i in outer_loops for j in (i, i + 1)}

    def _add_block(self, eqn: Eqn, operands: Sequence[Atom], outs: Sequence[Atom], start: int, end: int) -> None:
        self.ends |= {start, end}
        defined = {v for e in self.jaxpr.eqns[start:end] for v in e.outvars}
        # A function that returns an input, or a value twice, cannot be a part: each part defines its outputs.
        computed = [v for v in outs if isinstance(v, Var) and v in defined]
        if end > start and len({*computed}) == len(outs):
            original = _jax.open_jaxpr(eqn.params["jaxpr"])[0]
            literals = {v: a for v, a in zip(original.invars, operands, strict=True) if isinstance(a, Literal)}
            original = _jax.with_atoms(original, literals) if literals else original
            # Functions rematerialized inside of it are inlined, too: the plan decides for the whole.
            jaxpr = inline(original, calls=_CALLS, deep=False)
            variables = [a for a in operands if not isinstance(a, Literal)]
            self.blocks[start, end] = Part(jaxpr, variables, computed, original_jaxpr=original)

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

    @cached_property
    def _is_bits(self) -> Callable[[Atom], bool]:
        """Whether a variable is proved to be 0 or 1."""
        return reader(self.jaxpr)

    def _region(self, start: int, end: int) -> Part:
        # As a function: its inputs are the variables that it reads and does not define, its outputs those read later.
        eqns = self.jaxpr.eqns[start:end]
        invars = free_variables(eqns)
        outvars = [v for e in eqns for v in e.outvars if self._last_reads.get(v, -1) >= end]
        return Part(_jax.rebuild(self.jaxpr, invars=invars, outvars=outvars, eqns=eqns), invars, outvars)

    def split(self, cuts: Iterable[int] | None = None) -> list[Part]:
        """The parts between cuts, the indices of the equations that begin one; by default the blocks, the loops and the
        rest.
        """
        boundaries = sorted({0, len(self), *(self.ends if cuts is None else cuts)})
        return [self.part(a, b) for a, b in itertools.pairwise(boundaries)]


_CALLS = JIT | REMAT | {_jax.CLOSED_CALL}


def is_loop(eqn: Eqn) -> bool:
    """Whether an equation is a loop that can be planned: a scan, without constants, of steps that may run again."""
    if eqn.primitive.name != "scan" or eqn.params["length"] == 1:
        return False
    jaxpr, consts = _jax.open_jaxpr(eqn.params["jaxpr"])
    return not consts and not _jax.forbidden_effects(jaxpr)


def is_linear(eqn: Eqn) -> bool:
    """Whether an equation is linear in its operands, so that its derivative reads none of them."""
    name, is_literal = eqn.primitive.name, [isinstance(v, Literal) for v in eqn.invars]
    return row_of(eqn).is_linear or (name == "mul" and any(is_literal)) or (name == "div" and is_literal[1])


def last_reads(jaxpr: Jaxpr) -> dict[Var, int]:
    """Index of the last equation that reads each variable; the number of equations for outputs."""
    uses = {v: i for i, e in enumerate(jaxpr.eqns) for v in variables_of(e)}
    return uses | {v: len(jaxpr.eqns) for v in jaxpr.outvars if not isinstance(v, Literal)}


def closed_over_by_rules(jaxpr: Jaxpr) -> list[int]:
    """The inputs of a program, by number, that functions with a ``custom_vjp`` close over."""
    eqns = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "custom_vjp_call"]
    closed_over = {v for eqn in eqns for v in eqn.invars[: _jax.num_closed_over(eqn)] if isinstance(v, Var)}
    return [i for i, v in enumerate(jaxpr.invars) if v in closed_over]


def differentiated_variables(jaxpr: Jaxpr, diff_indices: Sequence[int]) -> set[Var]:
    """The variables with a nonzero tangent in differentiation with respect to these inputs."""
    # By JAX's own rules: one output of a loop may have a tangent and another none, so that what reads only the other
    # needs no derivative.
    variables = [v for eqn in jaxpr.eqns for v in eqn.outvars if is_float(v.aval) and not _jax.is_dropped(v)]
    every = _jax.rebuild(jaxpr, invars=jaxpr.invars, outvars=variables, eqns=jaxpr.eqns)
    is_diff = [i in diff_indices for i in range(len(jaxpr.invars))]
    flags = _frames.undone(_jax.outputs_with_tangents)(every, is_diff)
    return {v for v, flag in zip([*jaxpr.invars, *variables], [*is_diff, *flags], strict=True) if flag}


def cotangent_variables(jaxpr: Jaxpr, num_out: int) -> set[Var]:
    """The variables that may get a cotangent: those that the first `num_out` outputs depend on."""
    outs = {v for v in jaxpr.outvars[:num_out] if isinstance(v, Var)}
    return outs.union(*map(variables_of, needed_equations(jaxpr.eqns, outs)))


# -- running them ---------------------------------------------------------------------------------------------------


def run(
    jaxpr: Jaxpr,
    parts: Sequence[Part],
    replacements: Sequence[ArrayFunction | None],
    args: Sequence[Array],
) -> Arrays:
    """Evaluate a program part by part; a replacement of a part is called in place of its equations."""
    calls = (replacement or part for part, replacement in zip(parts, replacements, strict=True))
    by_part = types.SimpleNamespace(constvars=[], invars=jaxpr.invars, outvars=jaxpr.outvars, eqns=parts)
    return _jax.interpret(by_part, args, lambda _, operands: next(calls)(*operands))
