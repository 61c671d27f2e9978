"""The fields of a plan and of what else the planner stores: the names, types and ranges of a file format."""

from __future__ import annotations

from typing import Annotated

from .._records import Check, flag, many, metadata, one_of, optional, real, record, row, text, whole
from ._budget import STEP, TEMPORARIES
from ._inner import VARIANTS
from ._option import DECISION

VERSION = 24

OBJECTIVES = ("flops", "time")

_size, _index = whole(), whole()
_predicted = whole(-(2**63))  # by the model, whose corrections may go below zero

_row = record({"value": text, "owner": text, "times": _size, "bytes": _size, "decision": text, "price": real(0)})

_program = record(
    {
        "cuts": many(_index),
        "parts": many(_index),
        "treatments": many(DECISION),
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

PART: Check = record({"version": one_of(VERSION), "budget": optional(whole(1))})
"""The budget of a part of a batch."""
