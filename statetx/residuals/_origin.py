"""Where a value that crosses to the backward pass was computed, and who reads it there."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from .. import _jax
from .._equations.inline import inline
from .._equations.primitives import EAGER, REMAT, Forwards, row_of
from .._jax import Jaxpr, Literal
from .._remat.policy import Origin
from .._remat.survey import Survey
from ._trace import Passes, regions_of


@dataclasses.dataclass
class Place:
    """Where a value comes from.

    Attributes:
        times: product of the lengths of the loops that stacked it.
        aval: its type, in one step of these loops.
        eqn: the operation that computes it; None for an input or literal.
        address: of that value, as in `survey.Site`.
        input: index among the inputs of the whole; None if it is none.
        names: all that ``checkpoint_name`` gave it.
        regions: the rematerialised regions in which it is computed.
        aliases: variables, at any depth, that hold this value in one step.
    """

    aval: Any
    times: int = 1
    eqn: Any = None
    address: tuple[int, ...] = ()
    input: int | None = None
    names: list[str] = dataclasses.field(default_factory=list)
    regions: list[int] = dataclasses.field(default_factory=list)
    aliases: set[Any] = dataclasses.field(default_factory=set)


class _Level:
    """A jaxpr within others."""

    def __init__(self, jaxpr: Jaxpr, address: tuple[int, ...] = (), outer: _Level | None = None, eqn: Any = None):
        self.jaxpr = jaxpr
        self.address = address
        self.outer = outer
        self.eqn = eqn
        self.made = {v: (i, n) for i, e in enumerate(jaxpr.eqns) for n, v in enumerate(e.outvars)}
        self._levels: dict[tuple[int, int], _Level] = {}
        self._handed_on: dict[Any, list[Any]] = {}
        for e in jaxpr.eqns:
            if row_of(e).forwards is Forwards.VALUE:
                for a, v in zip(e.invars, e.outvars, strict=True):
                    if not isinstance(a, Literal):
                        self._handed_on.setdefault(a, []).append((e, v))

    def within(self, index: int, n: int, jaxpr: Any) -> _Level:
        """The level of the n-th jaxpr in an equation."""
        found = self._levels.get((index, n))
        if found is None:
            inner = _jax.open_jaxpr(jaxpr)[0]
            found = self._levels[index, n] = _Level(inner, (*self.address, index, n), self, self.jaxpr.eqns[index])
        return found

    def is_fill(self, atom: Any) -> bool:
        """Whether a value is a number, repeated, or is left unset."""
        if isinstance(atom, Literal):
            return True
        if atom not in self.made:
            return False
        eqn = self.jaxpr.eqns[self.made[atom][0]]
        return row_of(eqn).is_fill and all(map(self.is_fill, eqn.invars))

    def later(self, v: Any) -> list[tuple[Any, Any]]:
        """Where a value is handed on to, directly or not: the equations and their results."""
        found = []
        for eqn, out in self._handed_on.get(v, ()):
            found += [(eqn, out), *self.later(out)]
        return found


class Origins:
    """Finds the `Place` of each output of an inlined jaxpr."""

    def __init__(self, jaxpr: Jaxpr, states: Sequence[str | None]):
        self._top = _Level(jaxpr)
        self._inputs = {v: i for i, v in enumerate(jaxpr.invars)}
        known = [frozenset() if path is None else frozenset({Origin(path, frozenset())}) for path in states]
        self._near = {site.address: site.value.near for site in Survey(jaxpr, known).sites}

    def __call__(self, atom: Any) -> Place:
        level, place = self._top, Place(atom.aval)
        stacked = True  # while what was walked through gives each step's value, not the last one's
        carried = False  # whether it is the result of the step before that is read in this one
        seen = set()
        while not isinstance(atom, Literal) and atom not in seen:
            seen.add(atom)
            self._note(level, atom, place, stacked)
            if atom not in level.made:
                if level.outer is None:
                    place.input = self._inputs[atom]
                    break
                inside, (level, atom) = level, self._outwards(level, atom)
                carried = level is inside
                continue
            i, n = level.made[atom]
            eqn = level.jaxpr.eqns[i]
            name = eqn.primitive.name
            place.regions += [] if carried else regions_of(eqn)
            if row_of(eqn).forwards is Forwards.VALUE:
                atom = eqn.invars[n if len(eqn.invars) == len(eqn.outvars) else 0]
            elif name == "scan":
                is_step = n >= _jax.scan_counts(eqn)[1]
                level = level.within(i, 0, eqn.params["jaxpr"])
                atom = level.jaxpr.outvars[n]
                stacked = stacked and is_step
                if is_step:
                    place.times *= eqn.params["length"]
                    place.aval = atom.aval
            elif name == "cond":
                level, atom = self._branch(level, i, eqn, n)
            elif name == "shard_map":
                level = level.within(i, 0, eqn.params["jaxpr"])
                atom = level.jaxpr.outvars[n]
            else:
                place.eqn, place.address = eqn, (*level.address, i, n)
                break
        return place

    def near(self, place: Place) -> list[str]:
        """Paths of the states that the value was last computed with."""
        return sorted(origin.path for origin in self._near.get(place.address, ()))

    def _note(self, level: _Level, v: Any, place: Place, stacked: bool) -> None:
        """Add names of a value that has been found at a level; also those that later equations give it."""
        others = level.later(v)
        if v in level.made:
            eqn = level.jaxpr.eqns[level.made[v][0]]
            others.append((eqn, v))
        for eqn, _ in others:
            if eqn.primitive is _jax.name_primitive and eqn.params["name"] not in place.names:
                place.names.append(eqn.params["name"])
        if stacked:
            place.aliases |= {v, *(out for _, out in others)}

    def _outwards(self, level: _Level, v: Any) -> tuple[_Level, Any]:
        """From the input of an inner jaxpr to the value that it has: outside, or at the end of the step before."""
        eqn, n = level.eqn, level.jaxpr.invars.index(v)
        assert level.outer is not None
        if eqn.primitive.name == "scan":
            num_consts, num_carry = _jax.scan_counts(eqn)
            n_carry = n - num_consts
            if 0 <= n_carry < num_carry and level.jaxpr.outvars[n_carry] is not v:
                return level, level.jaxpr.outvars[n_carry]
        elif eqn.primitive.name == "cond":
            n += 1  # the first operand chooses
        return level.outer, eqn.invars[n]

    @staticmethod
    def _branch(level: _Level, i: int, eqn: Any, n: int) -> tuple[_Level, Any]:
        """The branch in which an output is computed; where it is not, something is filled in."""
        found = [level.within(i, b, jaxpr) for b, jaxpr in enumerate(eqn.params["branches"])]
        inner = next((inner for inner in found if not inner.is_fill(inner.jaxpr.outvars[n])), found[0])
        return inner, inner.jaxpr.outvars[n]


# -- the arrays that are kept --------------------------------------------------------------------------------------


_NAMING = (_jax.name_primitive, _jax.mark_primitive)


def buffers(passes: Passes) -> list[list[int]]:
    """The residuals, by index, that are one array each; in the order of their first."""
    jaxpr = inline(passes.forward, calls=EAGER)
    names = {e.outvars[0]: e.invars[0] for e in jaxpr.eqns if e.primitive in _NAMING}
    groups: dict[Any, list[int]] = {}
    for i, atom in enumerate(jaxpr.outvars[passes.num_out :]):
        while not isinstance(atom, Literal) and atom in names:
            atom = names[atom]
        groups.setdefault(id(atom) if isinstance(atom, Literal) else atom, []).append(i)
    return list(groups.values())


# -- who reads it ------------------------------------------------------------------------------------------------

PLAIN = -1
UNKNOWN = -2  # a region that is made only when its equation is differentiated, by a custom rule


def readers(jaxpr: Jaxpr) -> list[set[int]]:
    """For each input of a backward pass: the regions whose recomputation reads it, and `PLAIN` if anything else does."""
    uses: dict[Any, set[int]] = {}

    def add(atom: Any, who: set[int]) -> None:
        if who and not isinstance(atom, Literal):
            uses.setdefault(atom, set()).update(who)

    for v in jaxpr.outvars:
        add(v, {PLAIN})
    for eqn in reversed(jaxpr.eqns):
        name = eqn.primitive.name
        inner = [_jax.open_jaxpr(x)[0] for x in _loop_bodies(eqn)]
        if name in REMAT:
            region = (regions_of(eqn) or [UNKNOWN])[-1]
            for v in eqn.invars:
                add(v, {region})
        elif row_of(eqn).forwards is Forwards.VALUE and len(eqn.invars) == len(eqn.outvars):
            for a, v in zip(eqn.invars, eqn.outvars, strict=True):
                add(a, uses.get(v, set()))
        elif inner:
            skipped = len(eqn.invars) - len(inner[0].invars)
            for v in eqn.invars[:skipped]:
                add(v, {PLAIN})
            for sub in inner:
                for v, who in zip(eqn.invars[skipped:], readers(sub), strict=True):
                    add(v, who)
        else:
            for v in eqn.invars:
                add(v, {PLAIN})
    return [uses.get(v, set()) for v in jaxpr.invars]


def _loop_bodies(eqn: Any) -> Sequence[Any]:
    """The jaxprs of an equation whose inputs are its last operands, one for one."""
    if eqn.primitive.name == "cond":
        return eqn.params["branches"]
    return [eqn.params["jaxpr"]] if eqn.primitive.name in ("scan", "shard_map") else []
