"""Policies: which values a rematerialized function saves. The module `policies` has the public names.

A policy judges one value at a time and sees nothing of how the value is used, so policies combine freely: `Or`, `And`, `Not` and `Then`
are functions of two answers. Policies are frozen, equal by content and hashable, since the table of structures is keyed by them.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, TypeVar, dataclass_transform

from .. import _jax
from .._errors import PolicyError
from .value import RECOMPUTE, SAVE, Decision, Value, Verdict


class Policy:
    """Base of all policies, which decide which values a rematerialized function saves."""

    _coerce: ClassVar[Callable[[Any], Policy]]  # set by `parse`, above: operators take names and None, too
    _binding: ClassVar[int] = 3  # precedence of the printed form, to decide on parentheses
    missing: str = "raise"
    """The reaction to a message of `unmatched`: "raise", "warn" or "ignore"."""

    def judge(self, value: Value) -> Verdict:
        """Decide about one value."""
        raise NotImplementedError

    def children(self) -> tuple[Policy, ...]:
        """The policies that this one combines."""
        return ()

    def atoms(self) -> Iterable[Policy]:
        """This policy, its children, their children, and so on."""
        yield self
        for child in self.children():
            yield from child.atoms()

    @property
    def is_plain(self) -> bool:
        """Whether its name says that it saves everything or nothing, so that no warning does."""
        return False

    @property
    def needs_states(self) -> bool:
        """Whether it needs to know which values come from states."""
        return any(child.needs_states for child in self.children())

    def unmatched(self, values: Sequence[Value]) -> str:
        """A message about names, paths or filters of this policy that match no value, with suggestions; empty if all match."""
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
        return Not(self)

    def __bool__(self) -> bool:
        if sys._getframe(1).f_code.co_filename.startswith(_jax.JAX_FOLDER):
            return True  # `jax.checkpoint` has ``policy or nothing_saveable``
        raise PolicyError(
            f"The policy {self!r} was used as a truth value, as `or`, `and`, `not` and `if` do: they would drop one of the "
            f"policies.\nFix: use | and & to combine policies and ~ for the complement; `policy is None` asks whether there is one."
        )

    def then(self, other: Any) -> Policy:
        """Ask `other` about the values that this policy recomputes."""
        return Then(self, Policy._coerce(other))

    def __call__(self, primitive: Any, *inputs: Any, **params: Any) -> Any:
        """Judge one equation, as a policy of ``jax.checkpoint``. Under `remat` a policy sees more: names, loops and states."""
        if _jax.is_debug_callback(primitive):
            return True  # as in `mark.KeepMarked`
        outs = _jax.output_types(primitive, inputs, params)
        if not outs:
            return False
        name = frozenset({params["name"]}) if primitive.name == "name" else frozenset()
        if self.needs_states:
            raise PolicyError(f"{self!r} needs to know the states: use it with statetx.remat, not jax.checkpoint.")
        # An equation has one answer in JAX, but a policy judges its results one by one: the strongest decision for
        # all of them.
        verdict = max(
            (self.judge(Value(primitive, inputs, params, t, names=name)) for t in outs), key=lambda v: v.decision
        )
        if verdict.decision is Decision.OFFLOAD:
            return _jax.Offloadable(src=verdict.src, dst=verdict.dst)
        return verdict.decision is Decision.SAVE

    def _show(self, precedence: int) -> str:
        text = repr(self)
        return f"({text})" if self._binding < precedence else text


P = TypeVar("P", bound=Policy)


@dataclass_transform(frozen_default=True)
def frozen_policy(cls: type[P]) -> type[P]:
    return dataclasses.dataclass(frozen=True, repr=False)(cls)


@frozen_policy
class Or(Policy):
    a: Policy
    b: Policy
    _binding: ClassVar[int] = 0

    def children(self) -> tuple[Policy, ...]:
        return (self.a, self.b)

    def judge(self, value: Value) -> Verdict:
        # Decisions are ordered save > offload > recompute, so the algebra is that of a lattice: `Or` and `And` are
        # associative and commutative. With equal decisions the left operand's memories count.
        return max(self.a.judge(value), self.b.judge(value), key=lambda v: v.decision)

    def __repr__(self) -> str:
        return f"{self.a._show(0)} | {self.b._show(1)}"


@frozen_policy
class And(Policy):
    a: Policy
    b: Policy
    _binding: ClassVar[int] = 1

    def children(self) -> tuple[Policy, ...]:
        return (self.a, self.b)

    def judge(self, value: Value) -> Verdict:
        return min(self.a.judge(value), self.b.judge(value), key=lambda v: v.decision)

    def __repr__(self) -> str:
        return f"{self.a._show(1)} & {self.b._show(2)}"


@frozen_policy
class Not(Policy):
    inner: Policy
    _binding: ClassVar[int] = 2

    def children(self) -> tuple[Policy, ...]:
        return (self.inner,)

    def judge(self, value: Value) -> Verdict:
        is_saved = self.inner.judge(value).decision is Decision.RECOMPUTE
        # Most policies recompute views, so `~policy` would save them all, each a copy of its operand.
        return SAVE if is_saved and not value.is_view else RECOMPUTE

    def __repr__(self) -> str:
        return f"~{self.inner._show(2)}"


@frozen_policy
class Then(Policy):
    a: Policy
    b: Policy

    def children(self) -> tuple[Policy, ...]:
        return (self.a, self.b)

    def judge(self, value: Value) -> Verdict:
        first = self.a.judge(value)
        return self.b.judge(value) if first.decision is Decision.RECOMPUTE else first

    def __repr__(self) -> str:
        return f"{self.a._show(3)}.then({self.b!r})"
