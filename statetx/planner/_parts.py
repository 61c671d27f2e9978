"""A program as a sequence of parts: regions that may be rematerialized, loops, and unchanged equations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from jax.extend.core.primitives import closed_call_p

from .. import _jax
from .._equations.inline import inline
from .._equations.primitives import JIT, REMAT
from .._equations.structure import Body
from .._jax import Jaxpr, Literal
from .._lift.context import device_bytes
from .._tree import is_float


class Part:
    """Some consecutive equations of a program.

    Attributes:
        category: "region", which may be rematerialized; "loop", a scan whose steps may be; "rest", which may not.
        jaxpr: the equations as a function; for a loop, one step.
        invars, outvars: the program's variables that the part reads, and those that it defines for later parts.
        eqn: the scan of a loop, else None.
        original_jaxpr: for a function that the user rematerialized, its jaxpr with inner jits; else `jaxpr`.
        key: equal for parts of equal structure.
    """

    def __init__(
        self,
        category: str,
        jaxpr: Jaxpr,
        invars: Sequence[Any],
        outvars: Sequence[Any],
        eqn: Any = None,
        original_jaxpr: Jaxpr | None = None,
    ):
        self.category = category
        self.jaxpr = jaxpr
        self.original_jaxpr = jaxpr if original_jaxpr is None else original_jaxpr
        self.invars = list(invars)
        self.outvars = list(outvars)
        self.eqn = eqn

        # The body of a loop alone does not determine its options: they depend on the length and on which inputs are carried.
        loop_key = None if eqn is None else (eqn.params["length"], eqn.params["reverse"], *_jax.scan_counts(eqn))
        self.key = (category, loop_key, Body(jaxpr, []).key)

    def __repr__(self) -> str:
        return f"Part({self.category}, {len(self.jaxpr.eqns)} equations)"


def flatten(jaxpr: Jaxpr) -> Jaxpr:
    """Inline the jits of a program, so that each variable is defined once.

    A loop with ``checkpoint="auto"`` or a size that stays plain becomes a scan, and can be planned.
    """
    return _without_jits(_plain_loops(jaxpr))


def _without_jits(jaxpr: Jaxpr) -> Jaxpr:
    return inline(jaxpr, calls=JIT | {_jax.CLOSED_CALL}, deep=False)


def _plain_loops(x: Any) -> Any:
    """Replace statetx's loop primitive by a call of the plain scan, at any depth, where the loop stays plain."""

    # `closed_call` is among the calls that `flatten` inlines after this.
    def convert(eqn: Any) -> Any:
        loop = _jax.loop_of(eqn)
        if loop is not None and loop.is_plain():
            eqn = eqn.replace(primitive=closed_call_p, params={"call_jaxpr": eqn.params["jaxpr"]})
        return _jax.map_jaxprs(_plain_loops, eqn)

    eqns = _jax.open_jaxpr(x)[0].eqns
    new = [convert(eqn) for eqn in eqns]
    return x if all(a is b for a, b in zip(new, eqns, strict=True)) else _jax.with_equations(x, new)


def inline_remat(jaxpr: Jaxpr) -> tuple[Jaxpr, set[int]]:
    """Inline the rematerialized functions of a flat program. Returns also the equation indices at which they begin and end."""
    # Indices count the equations of the inlined program, in which a rematerialized function takes as many equations as it has.
    ends, index = set(), 0
    for eqn in jaxpr.eqns:
        size = len(inline(eqn.params["jaxpr"], calls=_CALLS, deep=False).eqns) if eqn.primitive.name in REMAT else 1
        if eqn.primitive.name in REMAT:
            ends |= {index, index + size}
        index += size
    return inline(jaxpr, calls=_CALLS, deep=False), ends


_CALLS = JIT | REMAT | {_jax.CLOSED_CALL}


def split(jaxpr: Jaxpr, cuts: Sequence[int] | None) -> list[Part]:
    """Split a flat program into parts.

    Args:
        cuts: indices of the equations that begin a new region. Loops and rematerialized functions are parts in any case. None
            if those functions are the only regions.
    """
    last_uses = _last_uses(jaxpr)
    category = "rest" if cuts is None else "region"
    parts: list[Part] = []
    start = 0

    def flush(end: int) -> None:
        nonlocal start
        if end > start:
            eqns = jaxpr.eqns[start:end]

            # As a function: its inputs are the variables that it reads and does not define, its outputs those read later.
            defined = {v for e in eqns for v in e.outvars}
            invars = {v: None for e in eqns for v in e.invars if not isinstance(v, Literal) and v not in defined}
            outvars = [v for e in eqns for v in e.outvars if last_uses.get(v, -1) >= end]
            body = _jax.rebuild(jaxpr, invars=list(invars), outvars=outvars, eqns=eqns)
            parts.append(Part(category, _without_jits(body), list(invars), outvars))
        start = end

    boundaries = set(cuts or ())
    for i, eqn in enumerate(jaxpr.eqns):
        if i in boundaries:
            flush(i)
        if eqn.primitive.name in REMAT or is_loop(eqn):
            flush(i)
            inner = _jax.open_jaxpr(eqn.params["jaxpr"])[0]
            if eqn.primitive.name in REMAT:
                variables, original = _bind_literals(inner, eqn.invars)
                body = _without_jits(original)
                parts.append(Part("region", body, variables, eqn.outvars, original_jaxpr=original))
            else:
                # Rematerialized functions are inlined too: the plan decides what a step saves.
                body = inline(inner, calls=_CALLS, deep=False)
                parts.append(Part("loop", body, eqn.invars, eqn.outvars, eqn))
            start = i + 1
    flush(len(jaxpr.eqns))
    return parts


def is_loop(eqn: Any) -> bool:
    """Whether an equation is a loop that can be planned: a scan of several steps, without effects or constants."""
    return eqn.primitive.name == "scan" and eqn.params["length"] > 1 and not eqn.effects and not _consts(eqn)


def _consts(eqn: Any) -> Sequence[Any]:
    return _jax.open_jaxpr(eqn.params["jaxpr"])[1]


def _bind_literals(jaxpr: Jaxpr, atoms: Sequence[Any]) -> tuple[list[Any], Jaxpr]:
    """Inline the literals among the arguments of a jaxpr. Returns the remaining arguments, and the jaxpr."""
    literals = {v: a for v, a in zip(jaxpr.invars, atoms, strict=True) if isinstance(a, Literal)}
    if not literals:
        return list(atoms), jaxpr
    return [a for a in atoms if not isinstance(a, Literal)], _jax.with_literals(jaxpr, literals)


def _last_uses(jaxpr: Jaxpr) -> dict[Any, int]:
    """For each variable, the index of the last equation that reads it; the number of equations for outputs."""
    uses = {v: i for i, e in enumerate(jaxpr.eqns) for v in e.invars if not isinstance(v, Literal)}
    return uses | {v: len(jaxpr.eqns) for v in jaxpr.outvars if not isinstance(v, Literal)}


def differentiated_variables(jaxpr: Jaxpr, diff_indices: Sequence[int]) -> set[Any]:
    """The variables with a nonzero tangent in differentiation with respect to these inputs.

    Errs towards too many: every float output of an equation with such an operand counts.
    """
    # One pass suffices, forwards here and backwards in `cotangent_variables`: the program is flat, and its loops are one equation.
    differentiated = {jaxpr.invars[i] for i in diff_indices}
    for eqn in jaxpr.eqns:
        reads = any(v in differentiated for v in eqn.invars if not isinstance(v, Literal))
        if reads and eqn.primitive.name != "stop_gradient":
            differentiated.update(v for v in eqn.outvars if is_float(v.aval))
    return differentiated


def cotangent_variables(jaxpr: Jaxpr, num_out: int) -> set[Any]:
    """The variables that may get a cotangent: those that the first `num_out` outputs depend on."""
    dependencies = {v for v in jaxpr.outvars[:num_out] if not isinstance(v, Literal)}
    for eqn in reversed(jaxpr.eqns):
        if any(v in dependencies for v in eqn.outvars):
            dependencies.update(v for v in eqn.invars if not isinstance(v, Literal))
    return dependencies


def has_regions(jaxpr: Jaxpr) -> bool:
    """Whether the user rematerialized parts of the program, or of its loops' steps."""
    loops = [_jax.open_jaxpr(e.params["jaxpr"])[0] for e in jaxpr.eqns if is_loop(e)]
    return any(e.primitive.name in REMAT for e in jaxpr.eqns) or any(map(has_regions, loops))


# -- where to cut ----------------------------------------------------------------------------------------------------


def crossing_bytes(jaxpr: Jaxpr) -> list[int]:
    """For each equation, the bytes of values computed before it and read by it or later."""
    # A value crosses into the equations after its own, up to and including its last reader: add its bytes at the first of them,
    # subtract them after the last, and take running sums. Outputs are read at index `len(eqns)`, hence two more entries.
    last_uses = _last_uses(jaxpr)
    deltas = [0] * (len(jaxpr.eqns) + 2)
    for i, eqn in enumerate(jaxpr.eqns):
        for v in eqn.outvars:
            if v in last_uses:
                deltas[i + 1] += device_bytes(v.aval)
                deltas[last_uses[v] + 1] -= device_bytes(v.aval)
    live, crossing = 0, []
    for delta in deltas[:-2]:
        live += delta
        crossing.append(live)
    return crossing


def candidate_partitions(jaxpr: Jaxpr) -> Iterator[tuple[Jaxpr, Sequence[int] | None]]:
    """Yield equivalent programs with cuts, as for `split`: the user's regions first, then the finest cuts."""
    if not has_regions(jaxpr):
        for cuts in _cut_sets(jaxpr):
            yield jaxpr, cuts
        return
    yield jaxpr, None
    inlined, ends = inline_remat(jaxpr)
    seen = {tuple(sorted(ends))}
    for cuts in _cut_sets(inlined):
        finer = tuple(sorted(ends.union(cuts)))
        if finer not in seen:
            seen.add(finer)
            yield inlined, finer


def _cut_sets(jaxpr: Jaxpr) -> Iterator[tuple[int, ...]]:
    """Yield sets of cuts that few bytes cross, the set with the most regions first."""
    from scipy.signal import find_peaks

    live = crossing_bytes(jaxpr)
    if not any(live):
        yield ()
        return

    # A dip of less than 2% of the highest count does not separate regions.
    minima, _ = find_peaks([-x for x in live], prominence=0.02 * max(live))
    # Within a plateau of equal bytes, cut at its end: cheap equations stay with the producers of their operands.
    cuts = []
    for index in minima:
        end = int(index)
        while end + 1 < len(live) and live[end + 1] == live[end]:
            end += 1
        cuts.append(end)

    # Larger regions save fewer inputs and need more memory in their backward pass; which is better depends on the budget. Every
    # one, two or four neighboring regions are merged, counted from the first.
    seen = set()
    for stride in (1, 2, 4):
        subset = tuple(cuts[stride - 1 :: stride])
        if subset not in seen:
            seen.add(subset)
            yield subset

    # The global minima only: the ends of blocks that have other local minima inside.
    lowest = min((live[c] for c in cuts), default=0)
    subset = tuple(c for c in cuts if live[c] <= 1.01 * lowest)
    if subset not in seen:
        yield subset


# -- running them ----------------------------------------------------------------------------------------------------


def run(
    jaxpr: Jaxpr, parts: Sequence[Part], replacements: Sequence[Callable[..., list] | None], args: Sequence[Any]
) -> list[Any]:
    """Evaluate a program part by part; a replacement of a part is called in place of its equations."""
    remaining = iter(replacements)

    def rule(part: Part, operands: list[Any]) -> list[Any]:
        replacement = next(remaining)
        return _jax.evaluate(part.jaxpr, (), operands) if replacement is None else replacement(*operands)

    return _jax.interpret(_Program(jaxpr.invars, jaxpr.outvars, parts), args, rule)


class _Program(NamedTuple):
    """A program whose equations are its parts."""

    invars: Sequence[Any]
    outvars: Sequence[Any]
    eqns: Sequence[Part]
    constvars: Sequence[Any] = ()
