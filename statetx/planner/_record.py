"""The data of a plan, which are its record in JSON: how each gradient is rewritten, at which cost."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Annotated, Any

from .. import _records
from .._cached import cached_property
from .._errors import PlanError
from .._jax import Jaxpr
from .._records import Check, flag, many, metadata, one_of, optional, real, record, row, text, whole
from ._budget import STEP, TEMPORARIES, ByteBudget
from ._program.fingerprint import fingerprint_of
from ._program.flat import Flat, Part
from ._program.values import KEEP, ON_HOST, InFormat, Way
from ._search.candidates import Candidate
from ._search.layout import Waits
from ._search.program import PlannedProgram, ProgramSearch
from ._search.recorders import Recorded
from ._search.search import SearchOptions
from ._treatments import OF_STEPS
from ._treatments.inner_gradients import VARIANTS, InnerGradients
from ._treatments.treatment import Decision, Facts

VERSION = 27

OBJECTIVES = ("auto", "flops", "time")

_size = whole()
_Size = Annotated[int, _size]
_Text = Annotated[str, text]
_Flag = Annotated[bool, flag]
_predicted = whole(-(2**63))  # by the model, whose corrections may go below zero
_Predicted = Annotated[int, _predicted]
_Texts = Annotated[tuple[str, ...], many(text)]

COST: Check = record(
    {"version": one_of(VERSION)}
    | {name: _size for name in ("argument_bytes", "output_bytes", "temp_bytes", "alias_bytes")}
    | {name: optional(real(0)) for name in ("compiled_flops", "seconds")}
)
"""The cost of a compiled program, but for the operations of its equations."""


# -- the rows and lines that print it ----------------------------------------------------------------------------------


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

    value: _Text
    owner: _Text
    times: _Size
    bytes: _Size
    decision: _Text
    price: Annotated[float, real(0)]

    def rank(self) -> tuple[Any, ...]:
        """Sort key of rows: saved values first, the largest first."""
        is_saved = self.decision not in ("recompute", "unchanged")
        return (not is_saved, -self.bytes * self.times, -self.price)


@dataclasses.dataclass(frozen=True)
class Shown:
    """A row for each value, and lines for the groups of regions and the loops of a plan."""

    rows: Annotated[tuple[PlanRow, ...], many(record(metadata(PlanRow)))]
    groups: _Texts
    loops: _Texts


# -- a gradient --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class GradientPlan:
    """How to rewrite a gradient, and how to tell that it is the same program.

    Attributes:
        cuts: the equations before which the program is cut into parts.
        parts: the decision of each part, by its number: equal parts have equal decisions.
        last_input: the input that the gradient waits for, or None.
        is_sequential: whether it waits for the gradient before it.
        equations: a line for each.
    """

    cuts: Annotated[tuple[int, ...], many(_size)]
    parts: Annotated[tuple[int, ...], many(_size)]
    decisions: Annotated[tuple[Decision, ...], many(Decision.check)]
    last_input: Annotated[int | None, optional(_size)]
    is_sequential: _Flag
    equations: _Texts

    @classmethod
    def of(cls, gradient: Recorded, candidate: Candidate, waits: Waits) -> GradientPlan:
        choice, decisions = candidate.choice, [option.decision for option in candidate.choice.options]
        numbers = {decision: number for number, decision in enumerate(dict.fromkeys(decisions))}
        return cls(
            tuple(region.start for region in choice.regions),
            tuple(numbers[decision] for decision in decisions),
            tuple(numbers),
            *choice.order(waits),
            gradient.lines,
        )

    def split(self, program: Jaxpr, ways: Container[Way] | None = None) -> tuple[Jaxpr, list[Part], list[Decision]]:
        """Cut the flat program of the gradient: the cut program, the parts, their decisions.

        Args:
            ways: the allowed ways to hold values; None for all.

        Raises:
            PlanError: a decision is for another program than the equations are: a value that is not there, or is not 0
                or 1 and would be stored as bits.
        """
        # Cuts and decisions count equations, so the program must be flattened and cut exactly as for the plan.
        flat = Flat(program)
        if max(self.cuts, default=0) > len(flat) or max(self.parts, default=-1) >= len(self.decisions):
            raise _damaged("cuts or parts", "equations or decisions that are not there")
        parts = flat.split(self.cuts)
        if len(parts) != len(self.parts):
            raise _damaged("parts", f"{len(self.parts)} decisions for {len(parts)} parts")
        if self.last_input is not None and self.last_input >= len(program.invars):
            raise _damaged("last_input", "an input that is not there")
        facts = Facts(flat.jaxpr, ways)
        for part, number in zip(parts, self.parts, strict=True):
            try:
                facts.check(part, self.decisions[number])
            except ValueError as e:
                raise _damaged(f"decisions[{number}]", str(e)) from None
        return flat.jaxpr, parts, [self.decisions[i] for i in self.parts]


def _damaged(path: str, what: str) -> PlanError:
    return PlanError(f"The plan is damaged: {path} names {what}.\nFix: make a plan for this program.")


Show = Callable[[Sequence[GradientPlan]], Shown]


# -- the plan ----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, init=False, repr=False)
class PlanData:
    """The fields of `Plan`, which has them as attributes; each with its check.

    Args:
        fields: as in the JSON record.
        show: finds the rows and lines of the gradients, which only printing needs; None if the fields have them.
    """

    version: Annotated[int, one_of(VERSION)]
    name: _Text
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
    stock: _Text
    complete: _Flag
    is_step: _Flag
    num_devices: Annotated[int, whole(1)]
    variant: Annotated[str | None, optional(one_of(*VARIANTS))]
    of_step: Annotated[str | None, optional(one_of(*OF_STEPS))]
    released: _Texts
    released_bytes: _Size
    ignored: _Texts
    gradients: Annotated[tuple[GradientPlan, ...], many(record(metadata(GradientPlan)), 1)]
    curve: Annotated[tuple[tuple[int, float], ...], many(row(_predicted, real()))]
    measured: Annotated[tuple[tuple[str, int, float], ...], many(row(text, _size, real()))]
    stock_policies: Annotated[tuple[tuple[str, int, float, bool], ...], many(row(text, _predicted, real(), flag))]
    timed: Annotated[tuple[tuple[str, int, float], ...], many(row(text, _size, real(0)))]
    shown: Annotated[Shown | Show, record(metadata(Shown))] = dataclasses.field(compare=False)

    def __init__(self, fields: Mapping[str, Any], show: Show | None = None):
        try:
            (PLAN if show is None else STORED_PLAN)(fields, "")
        except ValueError as e:
            raise PlanError(
                f"Plan: these are not the fields of a plan: {e}.\n"
                f"Fix: make it by statetx.plan(fun, *args, budget=...), or read it by Plan.load(path)."
            ) from e
        shown = _records.decoded(Shown, fields["shown"]) if show is None else show
        vars(self).update(_records.decoded_fields(PlanData, fields), shown=shown)

    def to_dict(self) -> dict[str, Any]:
        """Convert to dicts, lists, strings and numbers, for ``json.dump``, as `save` does."""
        self._found_lines()
        return _records.encoded(self)

    def _found_lines(self) -> Shown:
        """The rows and lines that print it."""
        shown = self.shown
        if not isinstance(shown, Shown):
            shown = shown(self.gradients)
            vars(self)["shown"] = shown  # lets go of the equations that it was found in
        return shown

    @cached_property
    def rows(self) -> tuple[PlanRow, ...]:
        return tuple(sorted(self._found_lines().rows, key=PlanRow.rank))

    @property
    def groups(self) -> tuple[str, ...]:
        return self._found_lines().groups

    @property
    def loops(self) -> tuple[str, ...]:
        return self._found_lines().loops

    @cached_property
    def inner(self) -> InnerGradients | None:
        return None if self.variant is None else InnerGradients(self.variant)

    @property
    def is_sequential(self) -> bool:
        return any(gradient.is_sequential for gradient in self.gradients)

    @property
    def num_equations(self) -> int:
        return sum(len(gradient.equations) for gradient in self.gradients)

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


_checks: dict[str, Check] = metadata(PlanData)
PLAN: Check = record(_checks)
"""A plan, with the rows and lines that print it."""

STORED_PLAN: Check = record({name: check for name, check in _checks.items() if name != "shown"})
"""A plan in the store, next to the program that its rows are found in."""


# -- of a search -------------------------------------------------------------------------------------------------------


def fields_of(
    search: ProgramSearch,
    program: PlannedProgram,
    unplanned: ProgramSearch,
    options: SearchOptions,
    budget: ByteBudget,
) -> dict[str, Any]:
    """The fields of a plan for the store, as JSON values.

    Args:
        unplanned: for the program that the plan is compared with.
    """
    fixed, captured, unplanned_flops = search.fixed(), search.captured, unplanned.unplanned_flops
    # Of the search's own baseline, which has the rematerialized functions that plans leave.
    base_flops = program.compiled.flops - program.added_cost
    added: Callable[[float], float] = lambda cost: (base_flops + cost - unplanned_flops) / max(unplanned_flops, 1)
    pairs = zip(captured.gradients, program.candidates, strict=True)
    return {
        "version": VERSION,
        "name": captured.name,
        "of": budget.of,
        "budget_bytes": budget.amount,
        "objective": options.objective,
        "is_step": captured.is_step,
        "argument_bytes": fixed.argument_bytes,
        "output_bytes": fixed.output_bytes,
        "alias_bytes": fixed.alias_bytes,
        "temp_bytes": program.temp_bytes,
        "flops": program.compiled.flops,
        "stock": "" if program.name == "plan" else program.name,
        "complete": search.is_complete(),
        "seconds": program.compiled.seconds,
        "timed": [[c.name, c.temp_bytes, c.compiled.seconds] for c in search.programs() if c.compiled.seconds],
        "ignored": [fingerprint_of(lines) for lines in captured.ignored],
        "variant": captured.variant,
        "of_step": captured.of_step,
        **captured.released(program.rewritten()),
        "num_devices": captured.num_devices,
        "gradients": [_records.encoded(GradientPlan.of(*pair, program.waits)) for pair in pairs],
        # A leave-one-out prediction: the candidate's own measurement does not correct it.
        "predicted_bytes": int(search.predict(program)),
        "initial_prediction_bytes": int(max(c.predicted_bytes for c in program.candidates)),
        "curve": [[int(num_bytes), added(cost)] for num_bytes, cost in search.curve()],
        "measured": [[c.name, c.temp_bytes, added(c.added_cost)] for c in search.programs()],
        "stock_policies": [[n, b, added(x), is_predicted] for n, b, x, is_predicted in search.stock_policies()],
        "unplanned_bytes": _unplanned_bytes(search, unplanned),
        "unplanned_is_compiled": unplanned.has_baseline(),
        "unplanned_flops": unplanned_flops,
    }


def _unplanned_bytes(search: ProgramSearch, unplanned: ProgramSearch) -> int:
    captured = search.captured
    if captured.treatment is None or unplanned.has_baseline():
        return unplanned.unplanned_bytes()
    # Nothing of it was compiled: from the program with the treatment.
    return search.unplanned_bytes() + captured.released_bytes - unplanned.captured.released_bytes


def are_decisions_for(gradients: Sequence[Recorded], fields: Mapping[str, Any], options: SearchOptions) -> bool:
    """Whether stored fields are for these gradients, and decide nothing that the options do not allow."""
    ways: list[Way] = [KEEP, *(InFormat(format.name) for format in options.formats)]
    ways += [ON_HOST] if options.offload else []
    plans = [_records.decoded(GradientPlan, gradient) for gradient in fields["gradients"]]
    if [plan.equations for plan in plans] != [gradient.lines for gradient in gradients]:
        return False
    try:
        for gradient, plan in zip(gradients, plans, strict=True):
            plan.split(gradient.flat, ways)
    except PlanError:
        return False
    return True
