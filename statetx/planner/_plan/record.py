"""The record of a plan, as stored in JSON: how to rewrite each gradient of its program, what it takes and costs.

Its fields, with their types and ranges, are listed at the end.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Annotated, Any

from ... import _jax
from ..._errors import PlanError
from ..._jax import Jaxpr
from ..._records import Check, flag, many, metadata, one_of, optional, real, record, row, text, whole
from .._budget import STEP, TEMPORARIES, Budget
from .._program.fingerprint import digest_of, fingerprint
from .._program.flat import Flat, Part
from .._program.values import ON_HOST, Address, InFormat, Way, smallest_of_variables, values_of
from .._regions.layout import Waits
from .._search.candidates import Candidate
from .._search.inner import VARIANTS, InnerGradients
from .._search.search import Search
from .._search.whole import Choice, Options, Whole
from .._treatments import DECISION, from_json, to_json
from .._treatments.treatment import Decision


def fields_of(whole: Whole, choice: Choice, name: str, budget: Budget, options: Options) -> dict[str, Any]:
    """The fields of a plan, as JSON values: what it takes and costs, and how to rewrite each gradient of the
    program.
    """
    fixed = whole.fixed()
    fields = {
        "version": VERSION,
        "name": name,
        "objective": options.objective,
        "is_step": whole.captured.is_step,
        "of": budget.of,
        "budget_bytes": bytes_of(whole, budget),
        "argument_bytes": fixed.argument_bytes,
        "output_bytes": fixed.output_bytes,
        "alias_bytes": fixed.alias_bytes,
        "temp_bytes": choice.temp_bytes,
        "flops": choice.compiled.flops,
        "stock": "" if choice.name == "plan" else choice.name,
        "complete": whole.is_complete(),
        "seconds": None,
        "ignored": [digest_of(lines) for lines in whole.captured.ignored],
        "inner": whole.captured.variant,
        "num_devices": whole.captured.num_devices,
    }
    pairs = zip(whole.searches, choice.candidates, strict=True)
    return fields | {"programs": [_program_fields(search, candidate, choice.waits) for search, candidate in pairs]}


def bytes_of(whole: Whole, budget: Budget) -> int:
    """A budget in bytes of what it counts."""
    if isinstance(budget.amount, int):
        return budget.amount
    fixed = whole.fixed().bytes if budget.of == STEP else 0
    return budget.temp_bytes(fixed, whole.fraction_of_baseline) + fixed


def shown_fields(whole: Whole, choice: Choice) -> dict[str, Any]:
    """The fields that only say how good a plan is. They need the whole trade-off."""
    # `predicted_bytes` is a leave-one-out prediction: the candidate's own measurement does not correct it.
    return {
        "predicted_bytes": int(whole.predict(choice)),
        "initial_prediction_bytes": int(max(c.predicted_bytes for c in choice.candidates)),
        "curve": whole.curve(),
        "measured": [[c.name, c.temp_bytes, c.added_cost / whole.total_cost()] for c in whole.choices()],
        "stock_policies": [[n, b, c / whole.total_cost(), p] for n, b, c, p in whole.stock_policies()],
        **unplanned_fields(whole),
    }


def unplanned_fields(whole: Whole) -> dict[str, Any]:
    """The fields of the program without a plan."""
    return {
        "unplanned_bytes": whole.unplanned_bytes(),
        "unplanned_is_compiled": whole.has_baseline(),
        "unplanned_flops": whole.unplanned_flops(),
    }


def _program_fields(search: Search, candidate: Candidate, waits: Waits) -> dict[str, Any]:
    """How to rewrite one gradient."""
    layout = candidate.layout
    # Equal parts have equal decisions: each is stored once, and parts refer to it by number.
    decisions: list[dict[str, Any]] = []
    numbers = []
    for option in candidate.options:
        decision = to_json(option.decision)
        if decision not in decisions:
            decisions.append(decision)
        numbers.append(decisions.index(decision))

    return {
        # Where the program is cut, the decision for each part, and how to tell that it is the same program.
        "cuts": list(layout.cuts),
        "parts": numbers,
        "decisions": decisions,
        "last_input": None if waits is Waits.FOR_NOTHING else layout.first_read(),
        "is_sequential": waits is Waits.FOR_GRADIENTS,
        "equations": fingerprint(search.jaxpr),
    }


# -- stored decisions, checked

Programs = Sequence[tuple[Jaxpr, Sequence[str]]]
"""Flat programs, each with its fingerprint."""


def are_decisions_for(programs: Programs, fields: Mapping[str, Any], options: Options) -> bool:
    """Whether stored fields are for these programs, and decide nothing that the options do not allow."""
    records = fields["programs"]
    if [record["equations"] for record in records] != [list(lines) for _, lines in programs]:
        return False
    formats = {format.name for format in options.formats}
    try:
        for (program, _), record in zip(programs, records, strict=True):
            _, _, decisions = parts_of(program, record)
            ways: set[Way] = {way for d in decisions for t in d.treatments for way in t.ways()}
            ways |= {way for d in decisions for _, way in d.saved or ()}
            used = {way.name for way in ways if isinstance(way, InFormat)}
            if not used <= formats or (ON_HOST in ways and not options.offload):
                return False
    except PlanError:
        return False
    return True


def parts_of(program: Jaxpr, fields: dict[str, Any]) -> tuple[Jaxpr, list[Part], list[Decision]]:
    """Cut a flat program as a stored plan says: the program as it was cut, the parts, their decisions.

    Raises:
        PlanError: a decision is for another program than the equations are: a value that is not there, or is not 0 or 1
            and would be stored as bits.
    """
    # Cuts and decisions count equations, so the program must be flattened and cut exactly as it was for the plan.
    flat = Flat(program)
    decisions = [from_json(decision) for decision in fields["decisions"]]
    numbers, cuts = fields["parts"], fields["cuts"]
    _expect(all(0 <= cut <= len(flat) for cut in cuts), "cuts", "after the last equation")
    _expect(all(n < len(decisions) for n in numbers), "parts", "a decision that is not there")
    parts = flat.split(cuts)
    _expect(len(parts) == len(numbers), "parts", f"{len(numbers)} decisions for {len(parts)} parts")

    # What the program around equal parts proves of their values may differ.
    checked: set[Any] = set()
    facts = _Facts(flat)
    for part, number in zip(parts, numbers, strict=True):
        decision = decisions[number]
        ways = [way for _, way in decision.saved or ()]
        is_same = (part.key, number) in checked
        if not is_same or decision.held_inputs or any(isinstance(way, InFormat) for way in ways):
            facts.check(part, decision, f"decisions[{number}]")
            checked.add((part.key, number))
    last = fields["last_input"]
    _expect(last is None or last < len(flat.jaxpr.invars), "last_input", "an input that is not there")
    return flat.jaxpr, parts, [decisions[i] for i in numbers]


class _Facts:
    """Checks decisions against the parts of a program."""

    def __init__(self, program: Flat):
        self._program = program
        self._storable: dict[InFormat, Set[Any]] = {}
        self._sites: dict[Any, Any] = {}

    def check(self, part: Part, decision: Decision, at: str) -> None:
        if decision.is_unchanged:
            return
        _expect(not _jax.forbidden_effects(part.jaxpr), at, "a part with effects, which must not run again")
        _expect(decision.addresses <= self.addresses(part), f"{at}.saved", "a value that is not there")
        for address, way in decision.saved or ():
            is_right = not isinstance(way, InFormat) or self._can_store_at(part, address, way)
            _expect(is_right, f"{at}.saved", f"a value that cannot be kept as {way.name}")
        for treatment in decision.treatments:
            try:
                treatment.check(part, self)
            except ValueError as e:
                _expect(False, f"{at}.{treatment.name}", str(e))

    def addresses(self, part: Part) -> Set[Address]:
        return self._values(part).keys()

    def can_store(self, variable: Any, way: InFormat) -> bool:
        if way not in self._storable:
            self._storable[way] = smallest_of_variables(self._program.jaxpr, (way.format,)).keys()
        return variable in self._storable[way]

    def _values(self, part: Part) -> Mapping[Address, Any]:
        if part.key not in self._sites:
            self._sites[part.key] = values_of(part.jaxpr).sites
        return self._sites[part.key]

    def _can_store_at(self, part: Part, address: Address, way: InFormat) -> bool:
        value, format = self._values(part)[address].value, way.format
        if not format.shrinks(value.type) or not format.is_exact or value.is_bits:
            return format.shrinks(value.type)
        # The program around a part may prove more of its results.
        variable = part.jaxpr.eqns[address[0]].outvars[address[-1]] if len(address) == 2 else None
        pairs = zip(part.outvars, part.jaxpr.outvars, strict=False)
        return any(ours is variable and self.can_store(v, way) for v, ours in pairs)


def _expect(is_right: bool, at: str, what: str) -> None:
    if not is_right:
        raise PlanError(f"The plan is damaged: {at} names {what}.\nFix: make a plan for this program.")


# -- the fields

VERSION = 24

OBJECTIVES = ("flops", "time")

_size, _index = whole(), whole()
_predicted = whole(-(2**63))  # by the model, whose corrections may go below zero

_row = record({"value": text, "owner": text, "times": _size, "bytes": _size, "decision": text, "price": real(0)})

_program = record(
    {
        "cuts": many(_index),
        "parts": many(_index),
        "decisions": many(DECISION),
        "last_input": optional(_index),
        "is_sequential": flag,
        "equations": many(text),
    },
    {"rows": many(_row), "loops": many(text), "groups": many(text)},
)

_pair = row(real(), real())

_Size = Annotated[int, _size]
_Predicted = Annotated[int, _predicted]
_Flag = Annotated[bool, flag]


class Attributes:
    """The fields that `Plan` has as attributes, each with its check."""

    name: Annotated[str, text]
    of: Annotated[str, one_of(STEP, TEMPORARIES)]
    budget_bytes: _Size
    argument_bytes: _Size
    output_bytes: _Size
    alias_bytes: _Size
    temp_bytes: _Size
    predicted_bytes: _Predicted
    initial_prediction_bytes: _Predicted
    unplanned_bytes: _Predicted
    unplanned_is_compiled: _Flag
    flops: _Size
    unplanned_flops: _Size
    seconds: Annotated[float | None, optional(real(0))]
    objective: Annotated[str, one_of(*OBJECTIVES)]
    stock: Annotated[str, text]
    complete: _Flag
    is_step: _Flag
    num_devices: Annotated[int, whole(1)]


ATTRIBUTES: dict[str, Check] = metadata(Attributes)

PLAN: Check = record(
    {
        **ATTRIBUTES,
        "version": one_of(VERSION),
        "ignored": many(text),
        "inner": optional(one_of(*VARIANTS)),
        "programs": many(_program, 1),
        "curve": many(_pair),
        "measured": many(row(text, _size, real())),
    },
    {
        "stock_policies": many(row(text, _predicted, real(), flag)),
        "timed": many(row(text, _size, real(0))),
    },
)
"""A plan."""

PEAK: Check = record({"version": one_of(VERSION), "peak_bytes": _size})
"""The bytes of a compiled program."""


# -- what a plan takes and costs --------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class PlanRow:
    """The decision for a value.

    Attributes:
        value: its name, or else the operation that computes it; and its type.
        owner: the line that computes it, and the function of that line.
        times: number of such values in the program: one for each equal part and each step of a loop.
        bytes: size of one of them.
        decision: "keep", "recompute", "offload", "keep as bits" (or another format), or "unchanged" in parts that are
            not rematerialized.
        price: cost of computing one of them from its operands, in operations or seconds.
    """

    value: str
    owner: str
    times: int
    bytes: int
    decision: str
    price: float

    def rank(self) -> tuple[Any, ...]:
        """The order in which rows are listed: saved values first, the largest first."""
        is_saved = self.decision not in ("recompute", "unchanged")
        return (not is_saved, -self.bytes * self.times, -self.price)


class Result(Attributes):
    """The attributes of `Plan`.

    Args:
        fields: of the record.
        describe: the fields of the programs with the rows and lines that only printing needs; None if they have them.
    """

    def __init__(
        self,
        fields: dict[str, Any],
        describe: Callable[[], list[dict[str, Any]]] | None = None,
    ):
        try:
            PLAN(fields, "")
        except ValueError as e:
            raise PlanError(
                f"Plan: its fields are not those of a plan: {e}.\n"
                f"Fix: make it by statetx.plan(fun, *args, budget=...), or read "
                f"it by Plan.load(path)."
            ) from e
        self._describe = describe  # the fields of the programs with their rows, which only printing needs
        self._fields = fields
        vars(self).update((name, fields[name]) for name in ATTRIBUTES)
        self.is_sequential = any(program["is_sequential"] for program in fields["programs"])
        variant = fields["inner"]
        self.inner = None if variant is None else InnerGradients(variant)
        self.num_equations = sum(len(program["equations"]) for program in fields["programs"])

    @functools.cached_property
    def _programs(self) -> list[dict[str, Any]]:
        """The fields of the programs, with the rows that print them."""
        describe, self._describe = self._describe, None  # which holds the equations
        return self._fields["programs"] if describe is None else describe()

    @functools.cached_property
    def rows(self) -> tuple[PlanRow, ...]:
        rows = [PlanRow(**row) for program in self._programs for row in program["rows"]]
        return tuple(sorted(rows, key=PlanRow.rank))

    @property
    def groups(self) -> tuple[str, ...]:
        return tuple(text for program in self._programs for text in program["groups"])

    @property
    def loops(self) -> tuple[str, ...]:
        return tuple(text for program in self._programs for text in program["loops"])

    @property
    def fixed_bytes(self) -> int:
        """Arguments and outputs together; a donated argument and the output in its memory count once."""
        return self.argument_bytes + self.output_bytes - self.alias_bytes

    @property
    def total_bytes(self) -> int:
        """Arguments, outputs and temporaries of the compiled program."""
        return self.fixed_bytes + self.temp_bytes

    @property
    def unplanned_total_bytes(self) -> int:
        """`total_bytes` of the baseline."""
        return self.fixed_bytes + self.unplanned_bytes

    @property
    def extra_flops(self) -> float:
        """Added operations relative to the baseline."""
        return (self.flops - self.unplanned_flops) / max(self.unplanned_flops, 1)

    def curve(self) -> list[tuple[int, float]]:
        """The model's trade-off: points (predicted bytes, added operations relative to the baseline).

        Each is the best choice of the model for its bytes. Fewer bytes never cost less.
        """
        return [(int(b), float(x)) for b, x in self._fields["curve"]]

    def measured(self) -> list[tuple[str, int, float]]:
        """The compiled programs: name ("plan", "no remat" or a stock policy), temporary bytes, and added operations as
        in `curve`.
        """
        return [(str(n), int(b), float(x)) for n, b, x in self._fields["measured"]]

    def stock_policies(self) -> list[tuple[str, int, float, bool]]:
        """What the stock policies would take: name, temporary bytes, added operations as in `curve`, and whether both
        are predicted.

        They are measured where the search compiled the policy, and else by the model.
        """
        rows = self._fields.get("stock_policies", ())
        return [(str(n), int(b), float(x), bool(is_predicted)) for n, b, x, is_predicted in rows]

    def timed(self) -> list[tuple[str, int, float]]:
        """The programs whose times were compared (``objective="time"``): name, temporary bytes, and `seconds`."""
        return [(str(n), int(b), float(s)) for n, b, s in self._fields.get("timed", ())]
