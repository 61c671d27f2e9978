"""Residuals: their provenance, the arrays that they share, their readers in the backward pass."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from .. import _jax
from .._equations.inline import inline
from .._equations.primitives import EAGER, ENTERED, REMAT, Forwards, inner_jaxprs, row_of
from .._jax import Jaxpr, Literal
from .._remat.policy import StateRef
from .._remat.survey import Survey
from ._passes import Passes, regions_of


@dataclasses.dataclass
class Provenance:
    """The input, literal or equation that defines a value.

    Attributes:
        aval: its type, in one step of the loops that stacked it.
        times: product of the lengths of these loops.
        eqn: the equation that computes it; None for an input or literal.
        address: its address in the nested jaxprs, as in `survey.Site`.
        input: its index among the inputs of the outermost jaxpr; None if it is not an input.
        names: all names that ``checkpoint_name`` gave it.
        regions: the rematerialized regions that compute it.
        aliases: variables, at any depth, that hold this value in one step.
        stored_as: the format that it is stored in; "" if unchanged.
        encoder: the address of the equation that encodes it.
    """

    aval: Any
    times: int = 1
    eqn: Any = None
    address: tuple[int, ...] = ()
    input: int | None = None
    names: list[str] = dataclasses.field(default_factory=list)
    regions: list[int] = dataclasses.field(default_factory=list)
    aliases: set[Any] = dataclasses.field(default_factory=set)
    stored_as: str = ""
    encoder: tuple[int, ...] = ()


class _NestedJaxpr:
    """A jaxpr and its place in the outer ones: the equation that it is a parameter of."""

    def __init__(self, jaxpr: Jaxpr, address: tuple[int, ...] = (), outer: _NestedJaxpr | None = None, eqn: Any = None):
        self.jaxpr = jaxpr
        self.address = address
        self.outer = outer
        self.eqn = eqn
        self.made = {v: (i, n) for i, e in enumerate(jaxpr.eqns) for n, v in enumerate(e.outvars)}
        self._levels: dict[tuple[int, int], _NestedJaxpr] = {}
        self._forwarded: dict[Any, list[Any]] = {}
        for e in jaxpr.eqns:
            if row_of(e).forwards is Forwards.VALUE:
                # An equation with one result forwards its first operand.
                for a, v in zip(e.invars[: len(e.outvars)], e.outvars, strict=True):
                    if not isinstance(a, Literal):
                        self._forwarded.setdefault(a, []).append((e, v))

    def within(self, index: int, n: int, jaxpr: Any) -> _NestedJaxpr:
        """The level of the n-th jaxpr of an equation."""
        level = self._levels.get((index, n))
        if level is None:
            inner = _jax.open_jaxpr(jaxpr)[0]
            level = self._levels[index, n] = _NestedJaxpr(
                inner, (*self.address, index, n), self, self.jaxpr.eqns[index]
            )
        return level

    def is_fill(self, atom: Any) -> bool:
        """Whether a value is a broadcast number, or uninitialized."""
        if isinstance(atom, Literal):
            return True
        if atom not in self.made:
            return False
        eqn = self.jaxpr.eqns[self.made[atom][0]]
        return row_of(eqn).is_fill and all(map(self.is_fill, eqn.invars))

    def forwards(self, v: Any) -> list[tuple[Any, Any]]:
        """The equations that forward a value, directly or not, and their results."""
        pairs = []
        for eqn, out in self._forwarded.get(v, ()):
            pairs += [(eqn, out), *self.forwards(out)]
        return pairs


class ProvenanceFinder:
    """Finds the `Provenance` of each output of an inlined jaxpr.

    Args:
        states: for each input, the path of its state; None for other inputs.
    """

    def __init__(self, jaxpr: Jaxpr, states: Sequence[str | None]):
        self._top = _NestedJaxpr(jaxpr)
        self._inputs = {v: i for i, v in enumerate(jaxpr.invars)}
        state_refs = [frozenset() if path is None else frozenset({StateRef(path, frozenset())}) for path in states]
        self._nearest_states = {site.address: site.value.nearest_states for site in Survey(jaxpr, state_refs).sites}

    def __call__(self, atom: Any) -> Provenance:
        level, provenance = self._top, Provenance(atom.aval)
        stacked = True  # whether the atom is the value of every step, not only the last carry
        carried = False  # whether the atom is the carry that the previous step computed
        num_enclosing = 0  # regions of the loops and branches around the atom
        seen = set()  # the carry of a loop may lead back to itself

        # From the value to its definition: each turn goes one equation back, or one level in or out. `level` is the
        # jaxpr that `atom` belongs to.
        while not isinstance(atom, Literal) and atom not in seen:
            seen.add(atom)
            self._add_names(level, atom, provenance, stacked)

            # An input: go on outside, or in the previous step of a loop.
            if atom not in level.made:
                if level.outer is None:
                    provenance.input = self._inputs[atom]
                    break
                inner_level, (level, atom) = level, self._outer_value(level, atom)
                carried = level is inner_level
                continue

            i, n = level.made[atom]
            eqn = level.jaxpr.eqns[i]
            name = eqn.primitive.name

            # A carry is an input of the regions of its step, though the same regions computed it in the step before.
            provenance.regions += [] if carried else regions_of(eqn)
            if name in ENTERED and not _jax.is_storing(eqn):
                num_enclosing = len(provenance.regions)
            if row_of(eqn).forwards is Forwards.VALUE:
                atom = eqn.invars[n if len(eqn.invars) == len(eqn.outvars) else 0]
            elif name in ("scan", "shard_map"):
                level = level.within(i, 0, eqn.params["jaxpr"])
                atom = level.jaxpr.outvars[n]
                if name == "scan" and n >= _jax.scan_counts(eqn)[1]:
                    provenance.times *= eqn.params["length"]
                    provenance.aval = atom.aval
                elif name == "scan":
                    stacked = False

            elif name == "cond":
                level, atom = self._branch_value(level, i, eqn, n)
            elif _jax.encoded_as(eqn):
                # From here on the value behind the codes. An input of a region is encoded in it, but not computed.
                provenance.stored_as, provenance.encoder = _jax.encoded_as(eqn), (*level.address, i)
                atom = eqn.invars[0]
                provenance.aval = atom.aval
                del provenance.regions[num_enclosing:]
            else:
                provenance.eqn, provenance.address = eqn, (*level.address, i, n)
                break
        return provenance

    def nearest_states(self, provenance: Provenance) -> list[str]:
        """Paths of the states that the value was last computed from."""
        return sorted(origin.path for origin in self._nearest_states.get(provenance.address, ()))

    def _add_names(self, level: _NestedJaxpr, v: Any, provenance: Provenance, stacked: bool) -> None:
        """Add the names and aliases of a value at one level, including the names that later equations give it."""
        forwards = level.forwards(v)
        if v in level.made:
            eqn = level.jaxpr.eqns[level.made[v][0]]
            forwards.append((eqn, v))
        for eqn, _ in forwards:
            if eqn.primitive is _jax.name_primitive and eqn.params["name"] not in provenance.names:
                provenance.names.append(eqn.params["name"])

        # Where only the last step's value is held, recomputation in other steps cannot start from it.
        if stacked:
            provenance.aliases |= {v, *(out for _, out in forwards)}

    def _outer_value(self, level: _NestedJaxpr, v: Any) -> tuple[_NestedJaxpr, Any]:
        """The value of an input of an inner jaxpr: an operand of the equation, or the carry of the previous step."""
        eqn, n = level.eqn, level.jaxpr.invars.index(v)
        assert level.outer is not None
        if eqn.primitive.name == "scan":
            num_consts, num_carry = _jax.scan_counts(eqn)
            n_carry = n - num_consts
            if 0 <= n_carry < num_carry and level.jaxpr.outvars[n_carry] is not v:
                return level, level.jaxpr.outvars[n_carry]
        elif eqn.primitive.name == "cond":
            n += 1  # the first operand is the index of the branch
        return level.outer, eqn.invars[n]

    @staticmethod
    def _branch_value(level: _NestedJaxpr, i: int, eqn: Any, n: int) -> tuple[_NestedJaxpr, Any]:
        """The output of the branch that computes it: differentiation lets the other branches return fill values."""
        levels = [level.within(i, b, jaxpr) for b, jaxpr in enumerate(eqn.params["branches"])]
        inner = next((inner for inner in levels if not inner.is_fill(inner.jaxpr.outvars[n])), levels[0])
        return inner, inner.jaxpr.outvars[n]


# -- the arrays of the residuals -----------------------------------------------------------------------------------


_NAMING = (_jax.name_primitive, _jax.mark_primitive)


def buffers(passes: Passes) -> list[list[int]]:
    """Group residuals, by index, that are one array; in the order of the first of each group."""
    # Names and marks label an array and do not copy it.
    jaxpr = inline(passes.forward, calls=EAGER)
    names = {e.outvars[0]: e.invars[0] for e in jaxpr.eqns if e.primitive in _NAMING}
    groups: dict[Any, list[int]] = {}
    for i, atom in enumerate(jaxpr.outvars[passes.num_out :]):
        while not isinstance(atom, Literal) and atom in names:
            atom = names[atom]
        groups.setdefault(id(atom) if isinstance(atom, Literal) else atom, []).append(i)
    return list(groups.values())


# -- the readers -------------------------------------------------------------------------------------------------

NOT_REMATERIALIZED = -1
UNKNOWN_REGION = -2  # a region that a custom rule makes when its equation is differentiated


def readers(jaxpr: Jaxpr) -> list[set[int]]:
    """Map each input of a backward pass to the regions whose recomputation reads it, and `NOT_REMATERIALIZED` for other
    readers.
    """
    uses: dict[Any, set[int]] = {}

    def add(atom: Any, regions: set[int]) -> None:
        if regions and not isinstance(atom, Literal):
            uses.setdefault(atom, set()).update(regions)

    # Backwards, so that the readers of an equation's outputs are known when it forwards them to its operands.
    for v in jaxpr.outvars:
        add(v, {NOT_REMATERIALIZED})
    for eqn in reversed(jaxpr.eqns):
        name = eqn.primitive.name

        # Regions count as one reader, forwarding equations as the readers of their outputs, bodies as the readers in
        # them. The inputs of a body are the last operands.
        inner = inner_jaxprs(eqn) if name in ("cond", "scan", "shard_map") else []
        if name in REMAT:
            region = (regions_of(eqn) or [UNKNOWN_REGION])[-1]
            for v in eqn.invars:
                add(v, {region})
        elif row_of(eqn).forwards is Forwards.VALUE and len(eqn.invars) == len(eqn.outvars):
            for a, v in zip(eqn.invars, eqn.outvars, strict=True):
                add(a, uses.get(v, set()))
        elif inner:
            # A `cond` reads its index outside of the branches.
            num_leading = len(eqn.invars) - len(inner[0].invars)
            for v in eqn.invars[:num_leading]:
                add(v, {NOT_REMATERIALIZED})
            for body in inner:
                for v, regions in zip(eqn.invars[num_leading:], readers(body), strict=True):
                    add(v, regions)

        else:
            for v in eqn.invars:
                add(v, {NOT_REMATERIALIZED})
    return [uses.get(v, set()) for v in jaxpr.invars]
