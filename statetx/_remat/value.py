"""Values that a policy judges, and its answers."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any, NamedTuple

from .._equations.primitives import VIEWS
from .._tree import num_bytes
from .stored import StoredType


class StateRef(NamedTuple):
    """A state that a value was computed with.

    Attributes:
        path: the state's path, as seen from the rematerialized function.
        selected_by: the `states` policies whose filter selects it.
    """

    path: str
    selected_by: frozenset[Any]


@dataclasses.dataclass(frozen=True)
class Value:
    """A value that a function computes.

    Attributes:
        primitive: the operation, a ``jax.extend.core.Primitive``.
        inputs: types of its operands.
        params: its parameters.
        type: type of the value.
        times: how often it is computed in a run of the function: the product of the lengths of the loops around it.
        names: the names that ``checkpoint_name`` gave it.
        source_states: the states among the operands of the operation, themselves or cast, reshaped or transposed.
        nearest_states: the states that the value was last computed with: `source_states`, or else the nearest states of
            its latest operand.
        is_bits: whether its entries are proved to be 0 or 1.
    """

    primitive: Any
    inputs: tuple[Any, ...]
    params: dict[str, Any] = dataclasses.field(repr=False)
    type: Any
    times: int = 1
    names: frozenset[str] = frozenset()
    source_states: frozenset[StateRef] = frozenset()
    nearest_states: frozenset[StateRef] = frozenset()
    is_bits: bool = False

    @property
    def is_view(self) -> bool:
        """Whether it is another value in another shape, which is free to recompute.

        A policy saves it only if it selects its name or its primitive.
        """
        return self.primitive.name in VIEWS

    @property
    def nbytes(self) -> int:
        """Bytes that saving it takes, over all steps of the loops around it."""
        return num_bytes(self.type) * self.times


class Action(enum.IntEnum):
    """What to do with a value. `Or` takes the greater of two decisions, `And` the lesser."""

    RECOMPUTE = 0
    OFFLOAD = 1
    SAVE = 2


class Verdict(NamedTuple):
    """A policy's answer for a value.

    Attributes:
        decision: what to do with it.
        src, dst, otherwise: of OFFLOAD, two memories, and the reaction to devices without them: "raise" or "save".
        stored: the format to store it in; None to store it unchanged.
    """

    decision: Action
    src: str = ""
    dst: str = ""
    otherwise: str = "raise"
    stored: StoredType | None = None

    @property
    def rank(self) -> tuple[Action, bool]:
        """`Or` takes the verdict with the greater rank, `And` the one with the lesser."""
        return self.decision, self.stored is None


SAVE = Verdict(Action.SAVE)
RECOMPUTE = Verdict(Action.RECOMPUTE)
