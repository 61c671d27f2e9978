"""A program as a sequence of parts: regions that may be rematerialised, loops, and what is left as it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from jax.extend.core.primitives import closed_call_p

from .. import _jax
from .._equations.inline import inline
from .._equations.primitives import JIT, REMAT
from .._equations.structure import Body
from .._jax import Jaxpr, Literal
from .._lift.around import device_bytes
from .._tree import is_float


class Part:
    """Some consecutive equations of a program.

    Attributes:
        kind: "region", which may be rematerialised; "loop", a scan whose steps may be; "rest", which may not.
        jaxpr: the equations as a function; of a loop, one step of it.
        invars, outvars: variables of the program that the part reads and gives to others.
        eqn: of a loop, the scan.
        as_given: of a function that the user rematerialises, its jaxpr with the jits in it; of others `jaxpr`.
        key: equal for parts that are alike.
    """

    def __init__(
        self,
        kind: str,
        jaxpr: Jaxpr,
        invars: Sequence[Any],
        outvars: Sequence[Any],
        eqn: Any = None,
        as_given: Jaxpr | None = None,
    ):
        self.kind = kind
        self.jaxpr = jaxpr
        self.as_given = jaxpr if as_given is None else as_given
        self.invars = list(invars)
        self.outvars = list(outvars)
        self.eqn = eqn
        length = None if eqn is None else (eqn.params["length"], eqn.params["reverse"], *_jax.scan_counts(eqn))
        self.key = (kind, length, Body(jaxpr, []).key)

    def __repr__(self) -> str:
        return f"Part({self.kind}, {len(self.jaxpr.eqns)} equations)"


def flatten(jaxpr: Jaxpr) -> Jaxpr:
    """The program without its inner jits; each variable stands in one place.

    A loop with ``checkpoint="auto"`` or a size that stays plain becomes a scan, and can be planned.
    """
    return _without_jits(_plain_loops(jaxpr))


def _without_jits(jaxpr: Jaxpr) -> Jaxpr:
    return inline(jaxpr, calls=JIT | {_jax.CLOSED_CALL}, deep=False)


def _plain_loops(x: Any) -> Any:
    """The program, at any depth, with calls of plain loops for those of ours that are left as they are."""

    def of_equation(eqn: Any) -> Any:
        loop = _jax.loop_of(eqn)
        if loop is not None and loop.is_plain():
            eqn = eqn.replace(primitive=closed_call_p, params={"call_jaxpr": eqn.params["jaxpr"]})
        return _jax.map_jaxprs(_plain_loops, eqn)

    eqns = _jax.open_jaxpr(x)[0].eqns
    new = [of_equation(eqn) for eqn in eqns]
    return x if all(a is b for a, b in zip(new, eqns, strict=True)) else _jax.with_equations(x, new)


def opened(jaxpr: Jaxpr) -> tuple[Jaxpr, set[int]]:
    """A flat program with the equations of its rematerialised functions in their places, and where these begin and end."""
    ends, at = set(), 0
    for eqn in jaxpr.eqns:
        size = len(inline(eqn.params["jaxpr"], calls=_CALLS, deep=False).eqns) if eqn.primitive.name in REMAT else 1
        if eqn.primitive.name in REMAT:
            ends |= {at, at + size}
        at += size
    return inline(jaxpr, calls=_CALLS, deep=False), ends


_CALLS = JIT | REMAT | {_jax.CLOSED_CALL}


def split(jaxpr: Jaxpr, cuts: Sequence[int] | None) -> list[Part]:
    """The parts of a flat program.

    Args:
        cuts: before which equations a region ends and another begins, in addition to loops and rematerialised
            functions, which are parts themselves. None if those functions are the only regions.
    """
    uses = _last_uses(jaxpr)
    kind = "rest" if cuts is None else "region"
    parts: list[Part] = []
    start = 0

    def flush(end: int) -> None:
        nonlocal start
        if end > start:
            eqns = jaxpr.eqns[start:end]
            made = {v for e in eqns for v in e.outvars}
            read = {v: None for e in eqns for v in e.invars if not isinstance(v, Literal) and v not in made}
            given = [v for e in eqns for v in e.outvars if uses.get(v, -1) >= end]
            body = _jax.rebuild(jaxpr, invars=list(read), outvars=given, eqns=eqns)
            parts.append(Part(kind, _without_jits(body), list(read), given))
        start = end

    boundaries = set(cuts or ())
    for i, eqn in enumerate(jaxpr.eqns):
        if i in boundaries:
            flush(i)
        if eqn.primitive.name in REMAT or is_loop(eqn):
            flush(i)
            inner = _jax.open_jaxpr(eqn.params["jaxpr"])[0]
            if eqn.primitive.name in REMAT:
                invars, given = _distinct(inner, eqn.invars)
                body = _without_jits(given)
                parts.append(Part("region", body, invars, eqn.outvars, as_given=given))
            else:
                body = inline(inner, calls=_CALLS, deep=False)  # of its functions that are rematerialised, too
                parts.append(Part("loop", body, eqn.invars, eqn.outvars, eqn))
            start = i + 1
    flush(len(jaxpr.eqns))
    return parts


def is_loop(eqn: Any) -> bool:
    """Whether an equation is a loop that can be planned: a scan of more than one step without effects."""
    return eqn.primitive.name == "scan" and eqn.params["length"] > 1 and not eqn.effects and not _consts(eqn)


def _consts(eqn: Any) -> Sequence[Any]:
    return _jax.open_jaxpr(eqn.params["jaxpr"])[1]


def _distinct(jaxpr: Jaxpr, atoms: Sequence[Any]) -> tuple[list[Any], Jaxpr]:
    """The jaxpr with literals among its arguments written into it."""
    given = {v: a for v, a in zip(jaxpr.invars, atoms, strict=True) if isinstance(a, Literal)}
    if not given:
        return list(atoms), jaxpr
    return [a for a in atoms if not isinstance(a, Literal)], _jax.with_literals(jaxpr, given)


def _last_uses(jaxpr: Jaxpr) -> dict[Any, int]:
    """For each variable the last equation that reads it; one past the last for outputs."""
    uses = {v: i for i, e in enumerate(jaxpr.eqns) for v in e.invars if not isinstance(v, Literal)}
    return uses | {v: len(jaxpr.eqns) for v in jaxpr.outvars if not isinstance(v, Literal)}


def moving_variables(jaxpr: Jaxpr, chosen: Sequence[int]) -> set[Any]:
    """The variables that differentiation with respect to some inputs varies."""
    moving = {jaxpr.invars[i] for i in chosen}
    for eqn in jaxpr.eqns:
        reads = any(v in moving for v in eqn.invars if not isinstance(v, Literal))
        if reads and eqn.primitive.name != "stop_gradient":
            moving.update(v for v in eqn.outvars if is_float(v.aval))
    return moving


def pulled_variables(jaxpr: Jaxpr, num_out: int) -> set[Any]:
    """The variables that the first outputs depend on, which may get cotangents."""
    pulled = {v for v in jaxpr.outvars[:num_out] if not isinstance(v, Literal)}
    for eqn in reversed(jaxpr.eqns):
        if any(v in pulled for v in eqn.outvars):
            pulled.update(v for v in eqn.invars if not isinstance(v, Literal))
    return pulled


def has_regions(jaxpr: Jaxpr) -> bool:
    """Whether the user marked parts of the program, or of steps of its loops, by rematerialising them."""
    loops = [_jax.open_jaxpr(e.params["jaxpr"])[0] for e in jaxpr.eqns if is_loop(e)]
    return any(e.primitive.name in REMAT for e in jaxpr.eqns) or any(map(has_regions, loops))


# -- where to cut ----------------------------------------------------------------------------------------------------


def crossing_bytes(jaxpr: Jaxpr) -> list[int]:
    """For each equation, the bytes of values computed before it and read by it or later."""
    uses = _last_uses(jaxpr)
    change = [0] * (len(jaxpr.eqns) + 2)
    for i, eqn in enumerate(jaxpr.eqns):
        for v in eqn.outvars:
            if v in uses:
                change[i + 1] += device_bytes(v.aval)
                change[uses[v] + 1] -= device_bytes(v.aval)
    live, found = 0, []
    for delta in change[:-2]:
        live += delta
        found.append(live)
    return found


def ways_to_cut(jaxpr: Jaxpr) -> Iterator[tuple[Jaxpr, Sequence[int] | None]]:
    """Programs that compute the same, and cuts of them: as the user marked it first, then the finest."""
    if not has_regions(jaxpr):
        for cuts in _cut_sets(jaxpr):
            yield jaxpr, cuts
        return
    yield jaxpr, None
    whole, ends = opened(jaxpr)
    seen = {tuple(sorted(ends))}
    for cuts in _cut_sets(whole):
        finer = tuple(sorted(ends.union(cuts)))
        if finer not in seen:
            seen.add(finer)
            yield whole, finer


def _cut_sets(jaxpr: Jaxpr) -> Iterator[tuple[int, ...]]:
    """Where to cut a program so that few bytes cross, the most regions first."""
    from scipy.signal import find_peaks

    live = crossing_bytes(jaxpr)
    if not any(live):
        yield ()
        return
    minima, _ = find_peaks([-x for x in live], prominence=0.02 * max(live))
    # Of equations between which as much crosses, cut before the last: what is cheap to compute again goes with its maker.
    cuts = []
    for at in minima:
        end = int(at)
        while end + 1 < len(live) and live[end + 1] == live[end]:
            end += 1
        cuts.append(end)
    seen = set()
    for every in (1, 2, 4):
        chosen = tuple(cuts[every - 1 :: every])
        if chosen not in seen:
            seen.add(chosen)
            yield chosen
    # Sequences of blocks within which other minima lie: the least of all.
    lowest = min((live[c] for c in cuts), default=0)
    chosen = tuple(c for c in cuts if live[c] <= 1.01 * lowest)
    if chosen not in seen:
        yield chosen


# -- running them ----------------------------------------------------------------------------------------------------


def run(
    jaxpr: Jaxpr, parts: Sequence[Part], how: Sequence[Callable[..., list] | None], args: Sequence[Any]
) -> list[Any]:
    """Evaluate a program part by part; `how` says for each what takes the place of its equations, None if nothing does."""
    replacements = iter(how)

    def rule(part: Part, operands: list[Any]) -> list[Any]:
        instead = next(replacements)
        return _jax.evaluate(part.jaxpr, (), operands) if instead is None else instead(*operands)

    return _jax.interpret(_Program(jaxpr.invars, jaxpr.outvars, parts), args, rule)


class _Program(NamedTuple):
    """A program whose equations are its parts."""

    invars: Sequence[Any]
    outvars: Sequence[Any]
    eqns: Sequence[Part]
    constvars: Sequence[Any] = ()
