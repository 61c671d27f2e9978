"""The policies, the values that they judge (`Value`) and their answers (`Verdict`). The module `policies` has the public names.

A policy judges one value at a time and sees nothing of how the value is used, so policies combine freely: `Or`, `And`, `Not` and `Then`
are functions of two answers. Policies are frozen, equal by content and hashable, since the table of structures is keyed by them.
"""

from __future__ import annotations

import dataclasses
import enum
import fnmatch
import pkgutil
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, NamedTuple, TypeVar, dataclass_transform

import jax

from .. import _jax
from .._equations.primitives import VIEWS
from .._errors import PolicyError
from .._objects.paths import as_predicate
from .._text import suggestion
from .._tree import freeze, num_bytes
from .._typing import Filter

# -- values and verdicts -------------------------------------------------------------------------------------------


class StateRef(NamedTuple):
    """A state that a value was computed with.

    Attributes:
        path: the state's path, as seen from the rematerialised function.
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
        nearest_states: the states that the value was last computed with: `source_states`, or else the nearest states of its latest operand.
    """

    primitive: Any
    inputs: tuple[Any, ...]
    params: dict[str, Any] = dataclasses.field(repr=False)
    type: Any
    times: int = 1
    names: frozenset[str] = frozenset()
    source_states: frozenset[StateRef] = frozenset()
    nearest_states: frozenset[StateRef] = frozenset()

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


class Decision(enum.IntEnum):
    """What to do with a value. `Or` takes the greater of two decisions, `And` the lesser."""

    RECOMPUTE = 0
    OFFLOAD = 1
    SAVE = 2


class Verdict(NamedTuple):
    """A policy's answer for a value. OFFLOAD has two memories, and `otherwise` for devices without them: "raise" or "save"."""

    decision: Decision
    src: str = ""
    dst: str = ""
    otherwise: str = "raise"


SAVE = Verdict(Decision.SAVE)
RECOMPUTE = Verdict(Decision.RECOMPUTE)


# -- policies ------------------------------------------------------------------------------------------------------


class Policy:
    """Base of all policies, which decide which values a rematerialised function saves."""

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
        return any(isinstance(atom, (Path, States)) for atom in self.atoms())

    def unmatched(self, values: Sequence[Value]) -> str:
        """A message about names, paths or filters of this policy that match no value, with suggestions; empty if all match."""
        del values
        return ""

    def __or__(self, other: Any) -> Policy:
        return Or(self, as_policy(other))

    def __ror__(self, other: Any) -> Policy:
        return Or(as_policy(other), self)

    def __and__(self, other: Any) -> Policy:
        return And(self, as_policy(other))

    def __rand__(self, other: Any) -> Policy:
        return And(as_policy(other), self)

    def __invert__(self) -> Policy:
        return Not(self)

    def then(self, other: Any) -> Policy:
        """Ask `other` about the values that this policy recomputes."""
        return Then(self, as_policy(other))

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
def _policy(cls: type[P]) -> type[P]:
    return dataclasses.dataclass(frozen=True, repr=False)(cls)


@_policy
class Everything(Policy):
    @property
    def is_plain(self) -> bool:
        return True

    def judge(self, value: Value) -> Verdict:
        return RECOMPUTE if value.is_view else SAVE

    def __repr__(self) -> str:
        return "everything"


@_policy
class Nothing(Policy):
    @property
    def is_plain(self) -> bool:
        return True

    def judge(self, value: Value) -> Verdict:
        return RECOMPUTE

    def __repr__(self) -> str:
        return "nothing"


@_policy
class Dots(Policy):
    batched: bool

    def judge(self, value: Value) -> Verdict:
        name = value.primitive.name
        if name == "dot_general":
            _, (batch, _) = value.params["dimension_numbers"]
            return SAVE if self.batched or not batch else RECOMPUTE
        if name == "scaled_matmul_wrapper":
            return SAVE if self.batched or value.inputs[0].shape[0] == 1 else RECOMPUTE
        return SAVE if self.batched and name == "conv_general_dilated" else RECOMPUTE

    def __repr__(self) -> str:
        return "dots" if self.batched else "dots_without_batch_dims"


def _option(policy: Any) -> str:
    return "" if policy.missing == "raise" else f", missing={policy.missing!r}"


def _listed(policy: Any) -> str:
    return ", ".join(map(repr, sorted(policy.chosen))) + _option(policy)


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


@_policy
class Names(Policy):
    chosen: frozenset[str]
    missing: str = "raise"

    def judge(self, value: Value) -> Verdict:
        return SAVE if value.names & self.chosen else RECOMPUTE

    def unmatched(self, values: Sequence[Value]) -> str:
        return _unmatched(self.chosen, (name for v in values for name in v.names), "name")

    def __repr__(self) -> str:
        return f"names({_listed(self)})"


@_policy
class ExceptNames(Names):
    def judge(self, value: Value) -> Verdict:
        return RECOMPUTE if value.is_view or value.names & self.chosen else SAVE

    def __repr__(self) -> str:
        return f"except_{super().__repr__()}"


@_policy
class Size(Policy):
    limit: int
    larger: bool

    def judge(self, value: Value) -> Verdict:
        is_saved = value.nbytes > self.limit if self.larger else value.nbytes < self.limit
        return SAVE if is_saved and not value.is_view else RECOMPUTE

    def __repr__(self) -> str:
        return f"{'larger' if self.larger else 'smaller'}_than({self.limit})"


@_policy
class Primitives(Policy):
    chosen: frozenset[str]
    missing: str = "raise"

    def judge(self, value: Value) -> Verdict:
        return SAVE if value.primitive.name in self.chosen else RECOMPUTE

    def unmatched(self, values: Sequence[Value]) -> str:
        return _unmatched(self.chosen, (v.primitive.name for v in values), "primitive")

    def __repr__(self) -> str:
        return f"primitives({_listed(self)})"


@_policy
class Path(Policy):
    pattern: str
    missing: str = "raise"

    def judge(self, value: Value) -> Verdict:
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
        return f"path({self.pattern!r}{_option(self)})"


@dataclasses.dataclass(frozen=True, repr=False, eq=False)  # the filter may not be hashable
class States(Policy):
    """See `states`."""

    filter: Filter
    missing: str = "raise"

    def __post_init__(self) -> None:
        as_predicate(self.filter)  # raises if it is not a filter

    def selects(self, path: str, state: Any) -> bool:
        return as_predicate(self.filter)(path, state)

    def judge(self, value: Value) -> Verdict:
        return SAVE if any(self in o.selected_by for o in value.source_states) and not value.is_view else RECOMPUTE

    def unmatched(self, values: Sequence[Value]) -> str:
        if any(self in o.selected_by for v in values for o in v.source_states):
            return ""
        paths = sorted({o.path for v in values for o in v.source_states})
        hint = suggestion(self.filter, paths) if isinstance(self.filter, str) else ""
        return f"no value is computed from a state that the filter selects.{hint} States read: {', '.join(paths) or 'none'}."

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, States):
            return NotImplemented
        return (freeze(self.filter), self.missing) == (freeze(other.filter), other.missing)

    def __hash__(self) -> int:
        return hash((States, freeze(self.filter), self.missing))

    def __repr__(self) -> str:
        return f"states({getattr(self.filter, '__name__', None) or repr(self.filter)}{_option(self)})"


@_policy
class Offload(Policy):
    inner: Policy
    src: str
    dst: str
    otherwise: str

    def children(self) -> tuple[Policy, ...]:
        return (self.inner,)

    def judge(self, value: Value) -> Verdict:
        is_offloaded = self.inner.judge(value).decision is not Decision.RECOMPUTE
        return Verdict(Decision.OFFLOAD, self.src, self.dst, self.otherwise) if is_offloaded else RECOMPUTE

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
        answers = [self.fun(value.primitive, *value.inputs, **value.params)]
        answers += [self.fun(_jax.name_primitive, value.type, name=name) for name in value.names]
        return max(map(_verdict, answers), key=lambda v: v.decision)

    def unmatched(self, values: Sequence[Value]) -> str:
        return _unmatched(_jax.names_in_policy(self.fun), (name for v in values for name in v.names), "name")

    def __repr__(self) -> str:
        maker, _, inner = getattr(self.fun, "__qualname__", "").partition(".<locals>.")
        if inner and _jax.is_jax_policy(self.fun):  # print the call that made it
            return f"{maker}({', '.join(map(repr, sorted(_jax.names_in_policy(self.fun))))})"
        return getattr(self.fun, "__name__", None) or repr(self.fun)


def _verdict(answer: Any) -> Verdict:
    decision = _jax.policy_answer(answer)
    return Verdict(Decision.OFFLOAD, *decision) if isinstance(decision, tuple) else SAVE if decision else RECOMPUTE


@_policy
class Or(Policy):
    a: Policy
    b: Policy
    _binding: ClassVar[int] = 0

    def children(self) -> tuple[Policy, ...]:
        return (self.a, self.b)

    def judge(self, value: Value) -> Verdict:
        return max(self.a.judge(value), self.b.judge(value), key=lambda v: v.decision)

    def __repr__(self) -> str:
        return f"{self.a._show(0)} | {self.b._show(1)}"


@_policy
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


@_policy
class Not(Policy):
    inner: Policy
    _binding: ClassVar[int] = 2

    def children(self) -> tuple[Policy, ...]:
        return (self.inner,)

    def judge(self, value: Value) -> Verdict:
        is_saved = self.inner.judge(value).decision is Decision.RECOMPUTE
        return SAVE if is_saved and not value.is_view else RECOMPUTE

    def __repr__(self) -> str:
        return f"~{self.inner._show(2)}"


@_policy
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


# -- constants -----------------------------------------------------------------------------------------------------

everything: Policy = Everything()
"""Save all values that the backward pass needs, as without rematerialisation."""

nothing: Policy = Nothing()
"""Save only the inputs; the default."""

dots: Policy = Dots(True)
"""Save the results of matrix products and convolutions."""

dots_without_batch_dims: Policy = Dots(False)
"""Save the results of matrix products without batch dimensions. A ``vmap`` around the function adds none."""


def names_of(policy: Policy) -> frozenset[str]:
    """The names of values that a policy saves or offloads."""
    names: set[str] = set()
    for atom in policy.atoms():
        if isinstance(atom, JaxPolicy):
            names |= _jax.names_in_policy(atom.fun)
        elif type(atom) is Names:
            names |= atom.chosen
    return frozenset(names)


# -- policies from arguments of users ------------------------------------------------------------------------------

_CONSTANTS = {"everything": everything, "nothing": nothing, "dots": dots}
_CONSTANTS["dots_without_batch_dims"] = dots_without_batch_dims


def _jax_names() -> list[str]:
    return [n for n in dir(jax.checkpoint_policies) if not n.startswith("_")]


# Members of jax.checkpoint_policies that return a policy; the other members are policies.
_FACTORIES = frozenset(n for n in _jax_names() if n.startswith(("save_", "offload_")))


@_policy
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


FAMILIES = {"fit": "statetx.planner.plan:Fit"}
"""For policies written ``"name:argument"``: the constructor, imported by name on first use because this module is below the planner."""


class Rewriting(Policy):
    """A policy that replaces the whole function by another program, such as a plan; it does not judge values one by one."""

    def judge(self, value: Value) -> Verdict:
        raise PolicyError(f"{self!r} rewrites the whole function, so it does not combine with other policies.")

    def rewrite(self, body: Any, name: str, num_out: int) -> Any:
        """Return ``(operands, *args) -> outputs`` in place of a staged function (`Body`) of this name.

        The first `num_out` outputs are the function's results; the new values of the states that it writes follow.
        """
        raise NotImplementedError


def as_policy(policy: Any) -> Policy:
    """Convert an argument ``policy=`` to a policy: a `Policy`, None, a name, or a callable of JAX's form.

    Raises:
        PolicyError: an unknown name, a function that returns policies and was not called, or another type.
    """
    if isinstance(policy, Policy):
        return policy
    if policy is None:
        return nothing
    if isinstance(policy, str):
        family, colon, argument = policy.partition(":")
        if colon and family in FAMILIES:
            return pkgutil.resolve_name(FAMILIES[family])(argument.strip())
        if policy in _CONSTANTS:
            return _CONSTANTS[policy]
        jax_names = _jax_names()
        if policy not in jax_names:
            hint = suggestion(policy, [*_CONSTANTS, *jax_names])
            raise PolicyError(
                f"No policy is named {policy!r}.{hint} Known: {', '.join([*_CONSTANTS, *sorted(jax_names)])}."
            )
        if policy in _FACTORIES:
            raise PolicyError(_not_called(policy))
        return JaxPolicy(getattr(jax.checkpoint_policies, policy))
    if not callable(policy):
        raise PolicyError(f"A policy is None, a name or a callable, got {type(policy).__name__}: {policy!r}.")
    if getattr(policy, "__module__", "") == "statetx.policies":
        raise PolicyError(f"policies.{policy.__name__} is a function that returns a policy: call it.")
    for name in _FACTORIES:
        if policy is getattr(jax.checkpoint_policies, name):
            raise PolicyError(_not_called(name))
    return JaxPolicy(policy)


def _not_called(name: str) -> str:
    return (
        f"jax.checkpoint_policies.{name} is a function that returns a policy: call it, "
        f"policy=jax.checkpoint_policies.{name}(...)."
    )


_UNITS = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30, "": 1}


def parse_bytes(size: int | str) -> int:
    """Convert a size to bytes: a number, or a string with a unit.

    Example:
        >>> parse_bytes("1.5 KiB"), parse_bytes("2GB"), parse_bytes(64)
        (1536, 2000000000, 64)
    """
    if isinstance(size, bool) or not isinstance(size, (int, str)):
        raise PolicyError(f"A size is a number of bytes or a string such as '64MiB', got {size!r}.")
    if isinstance(size, int):
        return size
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([a-zA-Z]*)\s*", size)
    if match is None or match[2].lower() not in _UNITS:
        raise PolicyError(f"Not a size: {size!r}. Write a number and one of B, KB, MB, GB, KiB, MiB, GiB.")
    return int(float(match[1]) * _UNITS[match[2].lower()])
