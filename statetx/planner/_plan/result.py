"""What a plan takes and costs: its attributes, from the fields of its record."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from ..._errors import PlanError
from .._search.inner import InnerGradients
from .record import ATTRIBUTES, PLAN, Attributes


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
