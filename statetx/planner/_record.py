"""The record of a plan, as stored in JSON: how to rewrite each gradient of its program, what it takes and costs.

Its fields, with their types and ranges, are listed in `_fields`.
"""

from __future__ import annotations

from typing import Any

from ._budget import STEP, Budget
from ._candidate import Candidate
from ._fields import VERSION
from ._fingerprint import digest_of, fingerprint
from ._layout import Waits
from ._search import Search
from ._whole import Choice, Options, Whole


def fields_of(whole: Whole, choice: Choice, name: str, budget: Budget, options: Options) -> dict[str, Any]:
    """The fields of a plan, as JSON values: what it takes and costs, and how to rewrite each gradient of the program."""
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
        decision = option.decision.to_json()
        if decision not in decisions:
            decisions.append(decision)
        numbers.append(decisions.index(decision))

    return {
        # Where the program is cut, the decision for each part, and how to tell that it is the same program.
        "cuts": list(layout.cuts),
        "parts": numbers,
        "treatments": decisions,
        "last_input": None if waits is Waits.FOR_NOTHING else layout.first_read(),
        "is_sequential": waits is Waits.FOR_GRADIENTS,
        "equations": fingerprint(search.jaxpr),
    }
