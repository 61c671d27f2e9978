"""The treatments of plans: what may be done with a part of a program. To add one, write its file and list it here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..._records import either, many, one_of, optional, record, row, whole
from ..._remat.mark import RULE
from .._program.values import WAY, way_of
from .copies import Copies
from .groups import InGroups
from .inputs import StoredInputs
from .loops import CheckpointedLoop
from .treatment import Decision, Treatment

TREATMENTS: tuple[type[Treatment], ...] = (Copies, StoredInputs, CheckpointedLoop, InGroups)
"""All treatments, in the order in which they make proposals."""

# Some only propose others.
_KINDS = dict(sorted((kind.name, kind) for kind in TREATMENTS if hasattr(kind, "CHECK")))
_saved = either(row(whole(), whole(), WAY), row(whole(), one_of(RULE), whole(), whole(), WAY))

DECISION = record({"saved": optional(many(_saved))}, {name: kind.CHECK for name, kind in _KINDS.items()})
"""Check a decision in a record."""


def to_json(decision: Decision) -> dict[str, Any]:
    """A decision as JSON values."""
    saved = None if decision.saved is None else sorted([*address, way.name] for address, way in decision.saved)
    return {"saved": saved, **{t.name: t.to_json() for t in decision.treatments}}


def from_json(fields: Mapping[str, Any]) -> Decision:
    """The inverse of `to_json`."""
    rows = fields["saved"]
    saved = None if rows is None else frozenset((tuple(address), way_of(name)) for *address, name in rows)
    return Decision(saved, tuple(kind.from_json(fields[name]) for name, kind in _KINDS.items() if name in fields))
