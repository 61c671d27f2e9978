"""Stored decisions, checked against the program that they are for."""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any

from .. import _jax
from .._errors import PlanError, PolicyError
from .._jax import Jaxpr
from .._remat.stored import StoredType
from ._groups import Groups
from ._option import Decision
from ._parts import Flat, Part
from ._stored import formats_of_variables
from ._values import Address, values_of
from ._whole import Options


def are_decisions_for(
    programs: Sequence[tuple[Jaxpr, Sequence[str]]], fields: dict[str, Any], options: Options
) -> bool:
    """Whether stored fields are for these flat programs with their fingerprints, and decide nothing that the options do not allow."""
    records = fields["programs"]
    if [record["equations"] for record in records] != [list(lines) for _, lines in programs]:
        return False
    formats = {format.name for format in options.formats}
    for (program, _), record in zip(programs, records, strict=True):
        decisions = record["treatments"]
        used = {row[-1] for d in decisions for row in (*d["stored"], *d["inputs"], *d["carries"])}
        if not used <= formats or (not options.offload and any(d["offloaded"] for d in decisions)):
            return False
        try:
            parts_of(program, record)
        except PlanError:
            return False
    return True


def parts_of(program: Jaxpr, fields: dict[str, Any]) -> tuple[Jaxpr, list[Part], list[Decision]]:
    """Cut a flat program as a stored plan says: the program as it was cut, the parts, their decisions.

    Raises:
        PlanError: a decision is for another program than the equations are: a value that is not there, or is not 0 or 1 and would be stored as bits.
    """
    # Cuts and decisions count equations, so the program must be flattened and cut exactly as it was for the plan.
    flat = Flat(program)
    decisions = [Decision.from_json(decision) for decision in fields["treatments"]]
    numbers, cuts = fields["parts"], fields["cuts"]
    _expect(all(0 <= cut <= len(flat) for cut in cuts), "cuts", "after the last equation")
    _expect(all(n < len(decisions) for n in numbers), "parts", "a treatment that is not there")
    parts = flat.split(cuts)
    _expect(len(parts) == len(numbers), "parts", f"{len(numbers)} treatments for {len(parts)} parts")

    # Parts with equal decisions share one; the cache of `_layout.rewrite` gives them one function.
    checked: set[Any] = set()
    check = _Check(flat)
    for part, number in zip(parts, numbers, strict=True):
        if (part.key, number) not in checked or decisions[number].stored or decisions[number].inputs:
            check(part, decisions[number], f"treatments[{number}]")
            checked.add((part.key, number))
    last = fields["last_input"]
    _expect(last is None or last < len(flat.jaxpr.invars), "last_input", "an input that is not there")
    return flat.jaxpr, parts, [decisions[i] for i in numbers]


class _Check:
    """Checks decisions against the parts of a program."""

    def __init__(self, program: Flat):
        self._program = program
        self._storable: dict[StoredType, set[Any]] = {}
        self._sites: dict[Any, Any] = {}

    def __call__(self, part: Part, decision: Decision, at: str) -> None:
        if decision.saved is None and decision.loop is None and not decision.carries:
            return
        _expect(not _jax.forbidden_effects(part.jaxpr), at, "a part with effects, which must not run again")
        saved = decision.saved or frozenset()
        stored = dict(decision.stored)
        is_within = decision.offloaded <= saved and stored.keys() <= saved
        _expect(is_within and saved <= self._addresses(part), f"{at}.saved", "a value that is not there")
        for address, format in stored.items():
            _expect(self._can_store(part, address, format), f"{at}.stored", f"a value that cannot be kept as {format}")
        for i, format in decision.inputs:
            is_input = i < len(part.invars) and part.invars[i] in self._variables(format)
            _expect(is_input, f"{at}.inputs", f"an input that cannot be kept as {format}")
        if part.eqn is not None:
            self._check_loop(part, decision, at)
        else:
            _expect(decision.loop is None and not decision.carries, f"{at}.loop", "a part that is not a loop")

    def _check_loop(self, part: Part, decision: Decision, at: str) -> None:
        num_constants, num_carry = _jax.scan_counts(part.eqn)
        for n, format in decision.carries:
            fits = (
                n in part.bit_carries and format.is_exact and format.shrinks(part.jaxpr.invars[num_constants + n].aval)
            )
            _expect(fits, f"{at}.carries", f"a carry that cannot be kept as {format}")
        if decision.loop is not None:
            try:
                decision.loop.check("plan", "steps", part.eqn.params["length"])
            except PolicyError:
                _expect(False, f"{at}.loop", f"a loop of other than {part.eqn.params['length']} steps")
        if isinstance(decision.loop, Groups):
            num_xs = len(part.eqn.invars) - num_constants - num_carry
            groups, addresses = decision.loop.groups, self._addresses(part)
            fits = all(i < num_xs for i in decision.loop.differentiated) and all(
                (g.saved or set()) <= addresses for g in groups
            )
            _expect(fits, f"{at}.loop", "a value that is not there")

    def _values(self, part: Part) -> dict[Address, Any]:
        if part.key not in self._sites:
            self._sites[part.key] = values_of(part.jaxpr)
        return self._sites[part.key].sites

    def _addresses(self, part: Part) -> Set[Address]:
        return self._values(part).keys()

    def _can_store(self, part: Part, address: Address, format: StoredType) -> bool:
        value = self._values(part)[address].value
        if not format.shrinks(value.type) or not format.is_exact or value.is_bits:
            return format.shrinks(value.type)
        # The program around a part may prove more of its results.
        variable = part.jaxpr.eqns[address[0]].outvars[address[-1]] if len(address) == 2 else None
        pairs = zip(part.outvars, part.jaxpr.outvars, strict=False)
        return any(ours is variable and v in self._variables(format) for v, ours in pairs)

    def _variables(self, format: StoredType) -> set[Any]:
        """The variables of the program that may be stored in a format."""
        if format not in self._storable:
            self._storable[format] = {*formats_of_variables(self._program.jaxpr, (format,))}
        return self._storable[format]


def _expect(is_right: bool, at: str, what: str) -> None:
    if not is_right:
        raise PlanError(f"The plan is damaged: {at} names {what}.\nFix: make a plan for this program.")
