"""The fields of a plan and of what else the planner stores: the names, types and ranges of a file format."""

from __future__ import annotations

from typing import Annotated, get_type_hints

from .._loops.strategy import Strategy
from .._records import Check, decoded_by, either, flag, many, mapping, one_of, optional, real, record, row, text, whole
from .._remat.mark import RULE
from .._remat.stored import NAMES
from ._budget import STEP, TEMPORARIES
from ._groups import ADDRESS
from ._inner import VARIANTS

VERSION = 21

OBJECTIVES = ("flops", "time")

_size, _index = whole(), whole()
_predicted = whole(-(2**63))  # by the model, whose corrections may go below zero
_format = one_of(*NAMES)
_rule = one_of(RULE), _index, _index  # of a value in the rule of a function
OPTIONS = mapping(lambda x, at: None if type(x) in (bool, int, float) else text(x, at))

_decision = record(
    {
        "kept": optional(many(ADDRESS)),
        "offloaded": many(ADDRESS),
        "loop": optional(decoded_by(Strategy.from_json)),
        "copies": flag,
        "stored": many(either(row(_index, _index, _format), row(_index, *_rule, _format))),
        "stored_inputs": many(row(_index, _format)),
        "fenced": flag,
        "carries": many(row(_index, _format)),
        "inputs_first": flag,
        "inner": many(row(_index, _index)),
    }
)

_row = record({"value": text, "owner": text, "times": _size, "bytes": _size, "decision": text, "price": real(0)})

_program = record(
    {
        "cuts": many(_index),
        "parts": many(_index),
        "treatments": many(_decision),
        "order": many(row(_index, many(_index), _index, _index)),
        "last_input": optional(_index),
        "is_sequential": flag,
        "equations": many(text),
    },
    {"rows": many(_row), "loops": many(text), "groups": many(text)},
)

_pair = row(real(), real())
_bound = record(
    {"lines": many(_pair), "points": many(_pair), "exact": flag},
    {"asked": many(row(one_of("bytes", "operations"), real()))},
)

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


ATTRIBUTES = {name: hint.__metadata__[0] for name, hint in get_type_hints(Attributes, include_extras=True).items()}

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
        "allowed_options": optional(OPTIONS),
        "compiler_options": OPTIONS,
        "lower_bound": many(_bound),
    },
)
"""A plan."""

PEAK: Check = record({"version": one_of(VERSION), "peak_bytes": _size})
"""The bytes of a compiled program."""

PART: Check = record({"version": one_of(VERSION), "budget": optional(whole(1))})
"""The budget of a part of a batch."""
