"""The record of a plan, as stored in JSON: how to rewrite each gradient of its program, its bytes and cost; and the
attributes of a plan, from the fields of its record.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Annotated, Any

from .._errors import PlanError
from .._jax import Jaxpr
from .._records import Check, flag, many, metadata, one_of, optional, real, record, row, text, whole
from ._budget import STEP, TEMPORARIES
from ._program.flat import Flat, Part, digest_of
from ._program.values import KEEP, ON_HOST, InFormat, Way
from ._search.candidates import Candidate
from ._search.capture import Recorded
from ._search.layout import Waits
from ._search.search import Options, Search
from ._search.several import AnyWhole
from ._treatments import OF_STEPS, VARIANTS, InnerGradients
from ._treatments.released import RELEASED
from ._treatments.treatment import Decision, Facts


def fields_of(whole: AnyWhole, choice: Any, unplanned: AnyWhole, options: Options, **of_call: Any) -> dict[str, Any]:
    """The fields of a plan, as JSON values: its bytes and cost, and how to rewrite each gradient of the program.

    Args:
        unplanned: the program that the plan is compared with.
        of_call: further fields: name and budget.
    """
    fixed, captured, total_cost = whole.fixed(), whole.captured, whole.total_cost()
    pairs = zip(whole.searches, choice.candidates, strict=True)
    return of_call | {
        "version": VERSION,
        "objective": options.objective,
        "is_step": captured.is_step,
        "argument_bytes": fixed.argument_bytes,
        "output_bytes": fixed.output_bytes,
        "alias_bytes": fixed.alias_bytes,
        "temp_bytes": choice.temp_bytes,
        "flops": choice.compiled.flops,
        "stock": "" if choice.name == "plan" else choice.name,
        "complete": whole.is_complete(),
        "seconds": choice.compiled.seconds,
        "timed": [[c.name, c.temp_bytes, c.compiled.seconds] for c in whole.choices() if c.compiled.seconds],
        "ignored": [digest_of(lines) for lines in captured.ignored],
        "inner": captured.variant,
        "of_step": None if captured.treatment is None else captured.treatment.name,
        "released": captured.released(whole.rewritten(choice.candidates, choice.waits)),
        "num_devices": captured.num_devices,
        "programs": [_program_fields(search, candidate, choice.waits) for search, candidate in pairs],
        # A leave-one-out prediction: the candidate's own measurement does not correct it.
        "predicted_bytes": int(whole.predict(choice)),
        "initial_prediction_bytes": int(max(c.predicted_bytes for c in choice.candidates)),
        "curve": [[int(num_bytes), cost] for num_bytes, cost in whole.curve()],
        "measured": [[c.name, c.temp_bytes, c.added_cost / total_cost] for c in whole.choices()],
        "stock_policies": [[n, b, c / total_cost, is_predicted] for n, b, c, is_predicted in whole.stock_policies()],
        "unplanned_bytes": _unplanned_bytes(whole, unplanned),
        "unplanned_is_compiled": unplanned.has_baseline(),
        "unplanned_flops": unplanned.unplanned_flops,
    }


def _unplanned_bytes(whole: AnyWhole, unplanned: AnyWhole) -> int:
    captured = whole.captured
    if captured.treatment is None or unplanned.has_baseline():
        return unplanned.unplanned_bytes()
    # Nothing of it was compiled: from the program with the treatment.
    return whole.unplanned_bytes() + captured.released_bytes - unplanned.captured.released_bytes


def _program_fields(search: Search, candidate: Candidate, waits: Waits) -> dict[str, Any]:
    """Fields that tell how to rewrite one gradient: its cuts, the decision for each part, and how to tell that it is
    the same program.
    """
    layout, decisions = candidate.layout, [option.decision for option in candidate.options]
    # Equal parts have equal decisions: each is stored once, and parts refer to it by number.
    numbers = {decision: number for number, decision in enumerate(dict.fromkeys(decisions))}
    return {
        "cuts": list(layout.cuts),
        "parts": [numbers[decision] for decision in decisions],
        "decisions": [decision.to_json() for decision in numbers],
        "last_input": None if waits is Waits.FOR_NOTHING else layout.first_read(),
        "is_sequential": waits is Waits.FOR_GRADIENTS,
        "equations": list(search.captured.gradients[0].lines),
    }


# -- stored decisions, checked ---------------------------------------------------------------------------------------


def are_decisions_for(gradients: Sequence[Recorded], fields: Mapping[str, Any], options: Options) -> bool:
    """Whether stored fields are for these gradients, and decide nothing that the options do not allow."""
    ways: list[Way] = [KEEP, *(InFormat(format.name) for format in options.formats)]
    ways += [ON_HOST] if options.offload else []
    programs = fields["programs"]
    if [program["equations"] for program in programs] != [list(gradient.lines) for gradient in gradients]:
        return False
    try:
        for gradient, program in zip(gradients, programs, strict=True):
            parts_of(gradient.flat, program, ways)
    except PlanError:
        return False
    return True


def parts_of(
    program: Jaxpr, fields: Mapping[str, Any], ways: Container[Way] | None = None
) -> tuple[Jaxpr, list[Part], list[Decision]]:
    """Cut a flat program as a stored plan says: the cut program, the parts, their decisions.

    Args:
        ways: the allowed ways to hold values; None for all.

    Raises:
        PlanError: a decision is for another program than the equations are: a value that is not there, or is not 0 or 1
            and would be stored as bits.
    """
    # Cuts and decisions count equations, so the program must be flattened and cut exactly as it was for the plan.
    flat = Flat(program)
    decisions = [Decision.from_json(decision) for decision in fields["decisions"]]
    numbers, cuts, last = fields["parts"], fields["cuts"], fields["last_input"]
    if max(cuts, default=0) > len(flat) or max(numbers, default=-1) >= len(decisions):
        raise _damaged("cuts or parts", "what is not there")
    parts = flat.split(cuts)
    if len(parts) != len(numbers):
        raise _damaged("parts", f"{len(numbers)} decisions for {len(parts)} parts")
    if last is not None and last >= len(program.invars):
        raise _damaged("last_input", "an input that is not there")
    facts = Facts(flat.jaxpr, ways)
    for part, number in zip(parts, numbers, strict=True):
        try:
            facts.check(part, decisions[number])
        except ValueError as e:
            raise _damaged(f"decisions[{number}]", str(e)) from None
    return flat.jaxpr, parts, [decisions[i] for i in numbers]


def _damaged(path: str, what: str) -> PlanError:
    return PlanError(f"The plan is damaged: {path} names {what}.\nFix: make a plan for this program.")


# -- the fields -------------------------------------------------------------------------------------------------------

VERSION = 26

OBJECTIVES = ("auto", "flops", "time")

_size, _index = whole(), whole()
_predicted = whole(-(2**63))  # by the model, whose corrections may go below zero

_row = record({"value": text, "owner": text, "times": _size, "bytes": _size, "decision": text, "price": real(0)})

_program = record(
    {
        "cuts": many(_index),
        "parts": many(_index),
        "decisions": many(Decision.check),
        "last_input": optional(_index),
        "is_sequential": flag,
        "equations": many(text),
    }
)

_shown = record({"rows": many(_row), "loops": many(text), "groups": many(text)})

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

_needed: dict[str, Check] = {
    **ATTRIBUTES,
    "version": one_of(VERSION),
    "ignored": many(text),
    "inner": optional(one_of(*VARIANTS)),
    "of_step": optional(one_of(*OF_STEPS)),
    "released": RELEASED,
    "programs": many(_program, 1),
    "curve": many(row(_predicted, real())),
    "measured": many(row(text, _size, real())),
    "stock_policies": many(row(text, _predicted, real(), flag)),
}
_timed = {"timed": many(row(text, _size, real(0)))}

PLAN: Check = record({**_needed, "shown": _shown}, _timed)
"""A plan, with the rows and lines that print it."""

STORED_PLAN: Check = record(_needed, {**_timed, "shown": _shown})
"""A plan in the store, next to the program that its rows are found in."""

PEAK: Check = record({"version": one_of(VERSION), "peak_bytes": _size})
"""The bytes of a compiled program."""


# -- the bytes and the cost of a plan ---------------------------------------------------------------------------------


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
        """Sort key of rows: saved values first, the largest first."""
        is_saved = self.decision not in ("recompute", "unchanged")
        return (not is_saved, -self.bytes * self.times, -self.price)


class PlanResult(Attributes):
    """The attributes of `Plan`.

    Args:
        fields: of the record.
        show: finds the rows and lines that only printing needs; None if the fields have them.
    """

    def __init__(self, fields: dict[str, Any], show: Callable[[], dict[str, Any]] | None = None):
        try:
            (PLAN if show is None else STORED_PLAN)(fields, "")
        except ValueError as e:
            raise PlanError(
                f"Plan: its fields are not those of a plan: {e}.\n"
                f"Fix: make it by statetx.plan(fun, *args, budget=...), or read it by Plan.load(path)."
            ) from e
        self._show, self._fields = show, fields
        vars(self).update((name, fields[name]) for name in ATTRIBUTES)
        self.is_sequential = any(program["is_sequential"] for program in fields["programs"])
        variant = fields["inner"]
        self.inner = None if variant is None else InnerGradients(variant)
        self.released_bytes: int = fields["released"]["bytes"]
        self.num_equations = sum(len(program["equations"]) for program in fields["programs"])

    @functools.cached_property
    def _shown(self) -> dict[str, Any]:
        """The rows and lines that print it."""
        shown = self._fields["shown"] if self._show is None else self._show()
        # It is kept before the equations, which `_show` holds, are let go of: a signal may end the call.
        vars(self)["_shown"] = shown
        self._show = None
        return shown

    @functools.cached_property
    def rows(self) -> tuple[PlanRow, ...]:
        return tuple(sorted((PlanRow(**row) for row in self._shown["rows"]), key=PlanRow.rank))

    @property
    def groups(self) -> tuple[str, ...]:
        return tuple(self._shown["groups"])

    @property
    def loops(self) -> tuple[str, ...]:
        return tuple(self._shown["loops"])

    @property
    def released(self) -> tuple[str, ...]:
        return tuple(self._fields["released"]["lines"])

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
        return self._tuples("curve")

    def measured(self) -> list[tuple[str, int, float]]:
        """The compiled programs: name ("plan", "no remat" or a stock policy), temporary bytes, and added operations as
        in `curve`.
        """
        return self._tuples("measured")

    def stock_policies(self) -> list[tuple[str, int, float, bool]]:
        """Figures of the stock policies: name, temporary bytes, added operations as in `curve`, and whether both
        are predicted.

        They are measured where the search compiled the policy, and else by the model.
        """
        return self._tuples("stock_policies")

    def timed(self) -> list[tuple[str, int, float]]:
        """The programs whose times are known: name, temporary bytes, and `seconds`."""
        return self._tuples("timed")

    def _tuples(self, name: str) -> list[Any]:
        return [tuple(row) for row in self._fields.get(name, ())]
