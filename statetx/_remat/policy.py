"""Policies: which values a rematerialized function saves.

The module `policies` has the public names.

A policy judges one value at a time and sees nothing of how the value is used, so policies combine freely: `Or`, `And`,
`NotSaved` and `Then` are functions of two answers. Policies are frozen, equal by content and hashable, since the table
of structures is keyed by them.
"""

from __future__ import annotations

import dataclasses
import enum
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, NamedTuple, Never, TypeVar, dataclass_transform

from jax.extend.core import Primitive

from .. import _jax
from .._equations.primitives import VIEWS
from .._errors import PolicyError
from .._tree import num_bytes
from .stored import StoredType, as_stored_type


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
    """Decision on a value. `Or` takes the greater of two decisions, `And` the lesser."""

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


class Policy:
    """Base of all policies, which decide which values a rematerialized function saves."""

    _coerce: ClassVar[Callable[[Any], Policy]]  # set by `parse`, above: operators take names and None, too
    _binding: ClassVar[int] = 3  # precedence of the printed form, to decide on parentheses
    missing: str = "raise"
    """The reaction to a message of `unmatched`: "raise", "warn" or "ignore"."""
    is_plain: ClassVar[bool] = False
    """Whether its name says that it saves everything or nothing, so that no warning does."""

    def __repr__(self) -> str:
        return type(self).__name__.lower()

    def judge(self, value: Value) -> Verdict:
        """Decide about one value."""
        raise NotImplementedError

    def children(self) -> tuple[Policy, ...]:
        """The policies that this one combines."""
        return tuple([value for value in vars(self).values() if isinstance(value, Policy)])

    def atoms(self) -> Iterable[Policy]:
        """List the policy, its children, their children, and so on."""
        yield self
        for child in self.children():
            yield from child.atoms()

    def map_atoms(self, change: Callable[[Policy], Policy]) -> Policy:
        """Return the policy with ``change(atom)`` in place of each policy in it that combines no others."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}  # type: ignore[arg-type]
        children = {name: value.map_atoms(change) for name, value in values.items() if isinstance(value, Policy)}
        return dataclasses.replace(self, **children) if children else change(self)  # type: ignore[type-var]

    @property
    def needs_states(self) -> bool:
        """Whether it needs to know which values come from states."""
        return any(child.needs_states for child in self.children())

    def selects_by_name(self, value: Value) -> bool:
        """Whether it selects the value by one of the names that the user gave it."""
        return any(child.selects_by_name(value) for child in self.children())

    def unmatched(self, values: Sequence[Value]) -> str:
        """A message about names, paths or filters of this policy that match no value, with suggestions; empty if all
        match.
        """
        del values
        return ""

    def __or__(self, other: Any) -> Policy:
        return Or(self, Policy._coerce(other))

    def __ror__(self, other: Any) -> Policy:
        return Or(Policy._coerce(other), self)

    def __and__(self, other: Any) -> Policy:
        return And(self, Policy._coerce(other))

    def __rand__(self, other: Any) -> Policy:
        return And(Policy._coerce(other), self)

    def __invert__(self) -> Policy:
        return NotSaved(self)

    def __add__(self, other: Any) -> Never:
        raise PolicyError(
            f"Policies are not added: {self!r} + {other!r}.\nFix: {self!r} | {other!r} saves what any of them saves."
        )

    __radd__ = __add__

    def __bool__(self) -> bool:
        if sys._getframe(1).f_code.co_filename.startswith(_jax.JAX_FOLDER):
            return True  # `jax.checkpoint` has ``policy or nothing_saveable``
        raise PolicyError(
            f"The policy {self!r} was used as a truth value, as `or`, `and`, `not` and `if` do: they would drop one of "
            "the policies.\n"
            "Fix: use | and & to combine policies and ~ for the complement; `policy is None` asks whether there is one."
        )

    def then(self, other: Any) -> Policy:
        """Ask `other` about the values that this policy recomputes."""
        return Then(self, Policy._coerce(other))

    def stored_as(self, format: str | StoredType) -> Policy:
        """Store the selected values in fewer bits. The forward pass uses the values themselves, the backward pass what
        was stored.

        Args:
            format: ``"bits"`` for values that are 0 or 1, such as spikes, masks and booleans: exact, eight to a byte.
                Integers and floats are stored so if they are proved to be 0 or 1, as a comparison converted to floats
                is, or if the policy selects them by name, which declares them to be; other values are stored unchanged.
                ``"bfloat16"``, ``"float8_e4m3fn"`` and ``"float8_e5m2"`` round floats of greater size; of the two
                float8s the second has the wider range and fewer digits.

        Returns:
            The policy that saves or offloads the same values.

        Memory:
            A bit, two bytes, or a byte for each entry; a last axis of bits that 8 does not divide is filled up.

        Raises:
            PolicyError: an unknown format.

        Example:
            >>> from statetx import policies
            >>> policies.names("spikes").stored_as("bits") | policies.dots.stored_as("bfloat16")
            names('spikes').stored_as('bits') | dots.stored_as('bfloat16')
        """
        return StoredAs(self, as_stored_type(format, "stored_as: the format"))

    def __call__(self, primitive: Any = None, *inputs: Any, **params: Any) -> Any:
        """Judge one equation, as a policy of ``jax.checkpoint``. Under `remat` a policy sees more: names, loops and
        states.
        """
        if not isinstance(primitive, Primitive):
            raise PolicyError(
                f"{self!r} is a policy, not a function that returns one.\nFix: write policy={self!r}, without the call."
            )
        if _jax.is_debug_callback(primitive):
            return True  # as in `mark.KeepMarked`
        outs = _jax.output_types(primitive, inputs, params)
        if not outs:
            return False
        name = frozenset({params["name"]}) if primitive.name == "name" else frozenset()
        if any(isinstance(atom, StoredAs) for atom in self.atoms()):
            raise PolicyError(f"{self!r} stores values in fewer bits: use it with statetx.remat, not jax.checkpoint.")
        if self.needs_states:
            raise PolicyError(f"{self!r} needs to know the states: use it with statetx.remat, not jax.checkpoint.")
        # An equation has one answer in JAX, but a policy judges its results one by one: the strongest decision for
        # all of them.
        verdict = max(
            (self.judge(Value(primitive, inputs, params, t, names=name)) for t in outs), key=lambda v: v.decision
        )
        if verdict.decision is Action.OFFLOAD:
            return _jax.Offloadable(src=verdict.src, dst=verdict.dst)
        return verdict.decision is Action.SAVE

    def _show(self, precedence: int) -> str:
        text = repr(self)
        return f"({text})" if self._binding < precedence else text


P = TypeVar("P", bound=Policy)


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field,))
def frozen_policy(cls: type[P]) -> type[P]:
    return dataclasses.dataclass(frozen=True, repr=False)(cls)


@frozen_policy
class Or(Policy):
    a: Policy
    b: Policy
    _binding: ClassVar[int] = 0

    def judge(self, value: Value) -> Verdict:
        # Decisions are ordered save > offload > recompute, each unchanged > in fewer bits, and form a lattice: `Or` and
        # `And` are associative and commutative. With equal decisions the left operand's memories count.
        return max(self.a.judge(value), self.b.judge(value), key=lambda v: v.rank)

    def __repr__(self) -> str:
        return f"{self.a._show(0)} | {self.b._show(1)}"


@frozen_policy
class And(Policy):
    a: Policy
    b: Policy
    _binding: ClassVar[int] = 1

    def judge(self, value: Value) -> Verdict:
        return min(self.a.judge(value), self.b.judge(value), key=lambda v: v.rank)

    def __repr__(self) -> str:
        return f"{self.a._show(1)} & {self.b._show(2)}"


@frozen_policy
class NotSaved(Policy):
    inner: Policy
    _binding: ClassVar[int] = 2

    def judge(self, value: Value) -> Verdict:
        is_saved = self.inner.judge(value).decision is Action.RECOMPUTE
        # Most policies recompute views, so `~policy` would save them all, each a copy of its operand.
        return SAVE if is_saved and not value.is_view else RECOMPUTE

    def selects_by_name(self, value: Value) -> bool:
        return False

    def __repr__(self) -> str:
        return f"~{self.inner._show(2)}"


@frozen_policy
class Then(Policy):
    a: Policy
    b: Policy

    def judge(self, value: Value) -> Verdict:
        first = self.a.judge(value)
        return self.b.judge(value) if first.decision is Action.RECOMPUTE else first

    def __repr__(self) -> str:
        return f"{self.a._show(3)}.then({self.b!r})"


@frozen_policy
class StoredAs(Policy):
    inner: Policy
    format: StoredType
    missing: ClassVar[str] = "warn"

    def judge(self, value: Value) -> Verdict:
        verdict = self.inner.judge(value)
        is_fit = not self.format.is_exact or value.is_bits or self.inner.selects_by_name(value)
        if verdict.decision is Action.RECOMPUTE or not is_fit or not self.format.shrinks(value.type):
            return verdict
        return verdict._replace(stored=self.format)

    def unmatched(self, values: Sequence[Value]) -> str:
        verdicts = [self.judge(value) for value in values]
        saved = [v for v in verdicts if v.decision is not Action.RECOMPUTE]
        if not saved or any(v.stored is not None for v in saved):
            return ""
        if self.format.is_exact:
            return (
                "no saved value is proved to be 0 or 1. If some are, give them a name and select it: names('spikes')."
            )
        return f"no saved value takes more bits than {self.format}."

    def __repr__(self) -> str:
        return f"{self.inner._show(3)}.stored_as({self.format!r})"
