"""The policies that look at values: by kind of operation, name, size, primitive, state."""

from __future__ import annotations

import dataclasses
import fnmatch
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

import jax

from .. import _jax
from .._errors import PolicyError
from .._objects.paths import as_predicate
from .._text import size_literal, suggestion, type_str
from .._tree import freeze, has_known_sizes
from .._typing import Filter
from .policy import RECOMPUTE, SAVE, Action, Policy, StateRef, Value, Verdict, frozen_policy
from .rewriter import Rewriter
from .stored import BITS


@frozen_policy
class Everything(Policy):
    is_plain: ClassVar[bool] = True

    def judge(self, value: Value) -> Verdict:
        # Saving a view would store its operand a second time; recomputed from the saved operand it is free.
        return RECOMPUTE if value.is_view else SAVE


@frozen_policy
class Nothing(Policy):
    is_plain: ClassVar[bool] = True

    def judge(self, value: Value) -> Verdict:
        return RECOMPUTE


@frozen_policy
class Dots(Policy):
    batched: bool

    def judge(self, value: Value) -> Verdict:
        # The primitives of JAX's `dots_saveable`, judged before `vmap` adds batch dimensions. `scaled_matmul_wrapper`
        # is asked for by name, as JAX does, since its class is imported with cudnn only.
        name = value.primitive.name
        if name == "dot_general":
            _, (batch, _) = value.params["dimension_numbers"]
            return SAVE if self.batched or not batch else RECOMPUTE
        if name == "scaled_matmul_wrapper":
            return SAVE if self.batched or value.inputs[0].shape[0] == 1 else RECOMPUTE
        return SAVE if self.batched and name == "conv_general_dilated" else RECOMPUTE

    def __repr__(self) -> str:
        return "dots" if self.batched else "dots_without_batch_dims"


@frozen_policy
class Masks(Policy):
    def judge(self, value: Value) -> Verdict:
        if value.type.dtype != bool or value.is_view:
            return RECOMPUTE
        return SAVE._replace(stored=BITS if BITS.shrinks(value.type) else None)


@frozen_policy
class Selecting(Policy):
    """Base of the policies with names, patterns or filters, which may match no value."""

    missing: str = dataclasses.field(default="raise", kw_only=True)

    def __post_init__(self) -> None:
        choices = ("raise", "warn", "ignore")
        if self.missing not in choices:
            hint = suggestion(self.missing, choices)
            raise PolicyError(f"missing= must be 'raise', 'warn' or 'ignore', got {self.missing!r}.{hint}")

    @property
    def _option(self) -> str:
        return "" if self.missing == "raise" else f", missing={self.missing!r}"


def _listed(policy: Any) -> str:
    return ", ".join(map(repr, sorted(policy.chosen))) + policy._option


def _unmatched(requested: Iterable[str], occurring: Iterable[str], what: str) -> str:
    """A message about requested strings that do not occur, with suggestions; empty if all occur."""
    occurring = sorted(set(occurring))
    lines = []
    for name in sorted(set(requested) - set(occurring)):
        lines.append(f"no value has the {what} {name!r}.{suggestion(name, occurring)}")
    if not lines:
        return ""
    listed = ", ".join(map(repr, occurring)) or "none"
    return f"{' '.join(lines)} {what.capitalize()}s that occur: {listed}."


@frozen_policy
class Names(Selecting):
    chosen: frozenset[str]

    def judge(self, value: Value) -> Verdict:
        return SAVE if value.names & self.chosen else RECOMPUTE

    def selects_by_name(self, value: Value) -> bool:
        return bool(value.names & self.chosen)

    def unmatched(self, values: Sequence[Value]) -> str:
        return _unmatched(self.chosen, (name for v in values for name in v.names), "name")

    def __repr__(self) -> str:
        return f"names({_listed(self)})"


@frozen_policy
class ExceptNames(Names):
    def judge(self, value: Value) -> Verdict:
        return RECOMPUTE if value.is_view or value.names & self.chosen else SAVE

    def selects_by_name(self, value: Value) -> bool:
        return False

    def __repr__(self) -> str:
        return f"except_{super().__repr__()}"


@frozen_policy
class Size(Policy):
    limit: int
    larger: bool

    def judge(self, value: Value) -> Verdict:
        if not has_known_sizes(value.type):
            raise PolicyError(
                f"{self!r}: the size of {type_str(value.type)} is not known, since it has a symbolic dimension.\n"
                f"Fix: export with constant shapes, or take a policy that does not compare sizes."
            )
        is_saved = value.nbytes > self.limit if self.larger else value.nbytes < self.limit
        return SAVE if is_saved and not value.is_view else RECOMPUTE

    def __repr__(self) -> str:
        return f"{'larger' if self.larger else 'smaller'}_than({size_literal(self.limit)})"


@frozen_policy
class Primitives(Selecting):
    chosen: frozenset[str]

    def judge(self, value: Value) -> Verdict:
        return SAVE if value.primitive.name in self.chosen else RECOMPUTE

    def unmatched(self, values: Sequence[Value]) -> str:
        return _unmatched(self.chosen, (v.primitive.name for v in values), "primitive")

    def __repr__(self) -> str:
        return f"primitives({_listed(self)})"


@frozen_policy
class Path(Selecting):
    pattern: str

    @property
    def needs_states(self) -> bool:
        return True

    def judge(self, value: Value) -> Verdict:
        # The nearest states, not the source states: `path` selects a module, which includes activations behind its
        # last product.
        is_saved = any(fnmatch.fnmatchcase(o.path, self.pattern) for o in value.nearest_states)
        return SAVE if is_saved and not value.is_view else RECOMPUTE

    def unmatched(self, values: Sequence[Value]) -> str:
        paths = sorted({o.path for v in values for o in v.nearest_states})
        if any(fnmatch.fnmatchcase(path, self.pattern) for path in paths):
            return ""
        return (
            f"no value is computed with a state whose path matches {self.pattern!r}.{suggestion(self.pattern, paths)} "
            f"Paths that occur: {', '.join(map(repr, paths)) or 'none'}."
        )

    def __repr__(self) -> str:
        return f"path({self.pattern!r}{self._option})"


@dataclasses.dataclass(frozen=True, repr=False, eq=False)  # the filter may not be hashable
class States(Selecting):
    """See `states`."""

    filter: Filter

    def __post_init__(self) -> None:
        super().__post_init__()
        as_predicate(self.filter)  # raises if it is not a filter

    def selects(self, path: str, state: Any) -> bool:
        return as_predicate(self.filter)(path, state)

    @property
    def needs_states(self) -> bool:
        return True

    def judge(self, value: Value) -> Verdict:
        return SAVE if any(self in o.selected_by for o in value.source_states) and not value.is_view else RECOMPUTE

    def unmatched(self, values: Sequence[Value]) -> str:
        if any(self in o.selected_by for v in values for o in v.source_states):
            return ""
        paths = sorted({o.path for v in values for o in v.source_states})
        hint = suggestion(self.filter, paths) if isinstance(self.filter, str) else ""
        return (
            f"no value is computed from a state that the filter selects.{hint} States read: "
            f"{', '.join(paths) or 'none'}."
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, States):
            return NotImplemented
        return (freeze(self.filter), self.missing) == (freeze(other.filter), other.missing)

    def __hash__(self) -> int:
        return hash((States, freeze(self.filter), self.missing))

    def __repr__(self) -> str:
        return f"states({_filter_str(self.filter)}{self._option})"


@dataclasses.dataclass(frozen=True)
class _Applied:
    """Placeholder for a filter that has been applied to the states, the `index`-th of a policy."""

    index: int
    text: str = dataclasses.field(compare=False)

    def __call__(self, path: str, state: Any) -> bool:
        raise AssertionError("an applied filter was asked again")

    def __repr__(self) -> str:
        return self.text


def without_objects(
    policy: Policy, origins: Sequence[frozenset[StateRef]]
) -> tuple[Policy, tuple[frozenset[StateRef], ...]]:
    """The policy, and the states that its filters have selected, without the filters that hold objects of the user.

    A cache with such a policy among its keys would keep a model alive.
    """
    held = [atom for atom in policy.atoms() if isinstance(atom, States) and _holds_objects(atom.filter)]
    if not held:
        return policy, tuple(origins)
    applied: dict[Policy, Policy] = {
        atom: dataclasses.replace(atom, filter=_Applied(i, _filter_str(atom.filter)))
        for i, atom in enumerate(dict.fromkeys(held))
    }

    def change(atom: Policy) -> Policy:
        return applied.get(atom, atom)

    refs = [
        frozenset(ref._replace(selected_by=frozenset(map(change, ref.selected_by))) for ref in refs) for refs in origins
    ]
    return policy.map_atoms(change), tuple(refs)


def _filter_str(filter: Filter) -> str:
    return getattr(filter, "__name__", None) or repr(filter)


def _holds_objects(filter: Filter) -> bool:
    if isinstance(filter, (list, tuple, set, frozenset)):
        return any(map(_holds_objects, filter))
    return not isinstance(filter, (str, type, bool, types.EllipsisType))


@frozen_policy
class Offload(Policy):
    inner: Policy
    src: str
    dst: str
    otherwise: str

    def judge(self, value: Value) -> Verdict:
        verdict = self.inner.judge(value)
        if verdict.decision is Action.RECOMPUTE:
            return RECOMPUTE
        return Verdict(Action.OFFLOAD, self.src, self.dst, self.otherwise, verdict.stored)

    def __repr__(self) -> str:
        inner = _listed(self.inner) if type(self.inner) is Names else repr(self.inner)
        defaults = {"src": "device", "dst": "pinned_host", "otherwise": "raise"}
        options = [f", {k}={getattr(self, k)!r}" for k, v in defaults.items() if getattr(self, k) != v]
        return f"offload({inner}{''.join(options)})"


@dataclasses.dataclass(frozen=True, repr=False)
class JaxPolicy(Policy):
    """A policy of JAX, asked about the equations of the function as staged."""

    fun: Callable[..., Any]
    missing: str = "warn"

    @property
    def is_plain(self) -> bool:
        return self.fun in (jax.checkpoint_policies.everything_saveable, jax.checkpoint_policies.nothing_saveable)

    def judge(self, value: Value) -> Verdict:
        # For JAX a name is an operation of its own, so a policy by names is asked about that operation, once for each
        # name.
        answers = [self.fun(value.primitive, *value.inputs, **value.params)]
        answers += [self.fun(_jax.name_primitive, value.type, name=name) for name in value.names]
        return max(map(_verdict, answers))

    def selects_by_name(self, value: Value) -> bool:
        by_name = any(
            _verdict(self.fun(_jax.name_primitive, value.type, name=name)) != RECOMPUTE for name in value.names
        )
        # A policy that saves everything saves names too.
        return by_name and _verdict(self.fun(value.primitive, *value.inputs, **value.params)) == RECOMPUTE

    def unmatched(self, values: Sequence[Value]) -> str:
        return _unmatched(_jax.names_in_policy(self.fun), (name for v in values for name in v.names), "name")

    def __repr__(self) -> str:
        maker, _, inner = getattr(self.fun, "__qualname__", "").partition(".<locals>.")
        if inner and _jax.is_jax_policy(self.fun):  # print the call that made it
            return f"{maker}({', '.join(map(repr, sorted(_jax.names_in_policy(self.fun))))})"
        return getattr(self.fun, "__name__", None) or repr(self.fun)


def _verdict(answer: Any) -> Verdict:
    decision = _jax.policy_answer(answer)
    return Verdict(Action.OFFLOAD, *decision) if isinstance(decision, tuple) else SAVE if decision else RECOMPUTE


@frozen_policy
class Marks(Policy):
    """The labels of values in one function, chosen for its equations.

    Attributes:
        marks: pairs of an address and a label, as `mark.mark` takes them.
    """

    marks: tuple[tuple[tuple[int, ...], str], ...]

    def judge(self, value: Value) -> Verdict:
        raise PolicyError("Marks are for the equations of one function, and cannot judge values of another.")

    def __repr__(self) -> str:
        return f"Marks({len(self.marks)} values)"


# -- constants -----------------------------------------------------------------------------------------------------

everything: Policy = Everything()
"""Save all values that the backward pass needs, as without rematerialization."""

nothing: Policy = Nothing()
"""Save only the inputs; the default."""

dots: Policy = Dots(True)
"""Save the results of matrix products and convolutions."""

dots_without_batch_dims: Policy = Dots(False)
"""Save the results of matrix products without batch dimensions. A ``vmap`` around the function adds none."""


masks: Policy = Masks()
"""Save the booleans that the backward pass needs, eight to a byte: where an input of ``relu`` is positive, which
entries ``where`` or a dropout chose, where a maximum is. In place of booleans of a byte, or of the floats that they
would be computed again from.
"""


def names_of(policy: Policy | Rewriter) -> frozenset[str]:
    """The names of values that a policy saves or offloads; none for a `Rewriter`."""
    names: set[str] = set()
    for atom in () if isinstance(policy, Rewriter) else policy.atoms():
        if isinstance(atom, JaxPolicy):
            names |= _jax.names_in_policy(atom.fun)
        # Not `ExceptNames`, a subclass: its names are values that it does not save.
        elif type(atom) is Names:
            names |= atom.chosen
    return frozenset(names)
