"""What a policy judges (`Value`), what it says (`Verdict`), and the policies themselves; `policies` has their public names."""

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

# -- what a policy judges, and what it says ------------------------------------------------------------------------


class Origin(NamedTuple):
    """A state that a value was computed with.

    Attributes:
        path: the state's path, as seen from the rematerialised function.
        chosen: the `states` policies whose filter selects it.
    """

    path: str
    chosen: frozenset[Any]


@dataclasses.dataclass(frozen=True)
class Value:
    """A value that a function computes.

    Attributes:
        primitive: the operation, a ``jax.extend.core.Primitive``.
        inputs: types of its operands.
        params: its parameters.
        type: type of the value.
        times: how often it is computed in a run of the function: the product of the lengths of the loops around it.
        names: those that ``checkpoint_name`` gave it.
        read: states that are operands of the operation, themselves or cast, reshaped or transposed.
        near: states that the value was last computed with: `read`, or else those of its latest operand.
    """

    primitive: Any
    inputs: tuple[Any, ...]
    params: dict[str, Any] = dataclasses.field(repr=False)
    type: Any
    times: int = 1
    names: frozenset[str] = frozenset()
    read: frozenset[Origin] = frozenset()
    near: frozenset[Origin] = frozenset()

    @property
    def is_view(self) -> bool:
        """Whether it is another value in another shape, which costs nothing to make again.

        It is kept only by a policy that asks for its name or its primitive.
        """
        return self.primitive.name in VIEWS

    @property
    def nbytes(self) -> int:
        """Bytes that keeping it takes, over all steps of the loops around it."""
        return num_bytes(self.type) * self.times


class Decision(enum.IntEnum):
    """In the order of precedence."""

    RECOMPUTE = 0
    OFFLOAD = 1
    SAVE = 2


class Verdict(NamedTuple):
    """What a policy says of a value, and the memories it moves between if that is OFFLOAD."""

    decision: Decision
    src: str = ""
    dst: str = ""
    otherwise: str = "raise"


SAVE = Verdict(Decision.SAVE)
RECOMPUTE = Verdict(Decision.RECOMPUTE)


# -- policies ------------------------------------------------------------------------------------------------------


class Policy:
    """Base of all policies: values that say what a rematerialised function keeps."""

    _binding: ClassVar[int] = 3  # how tightly the printed form holds together
    missing: str = "raise"
    """What to do where `unmatched` finds something: "raise", "warn" or "ignore"."""

    def judge(self, value: Value) -> Verdict:
        """What becomes of a value."""
        raise NotImplementedError

    def parts(self) -> tuple[Policy, ...]:
        """The policies that this one is made of."""
        return ()

    def atoms(self) -> Iterable[Policy]:
        """Every policy within this one, itself included."""
        yield self
        for part in self.parts():
            yield from part.atoms()

    @property
    def is_plain(self) -> bool:
        """Whether it says by its name that it keeps all, or nothing."""
        return False

    @property
    def needs_states(self) -> bool:
        """Whether it must be told which values are those of states."""
        return any(isinstance(atom, (Path, States)) for atom in self.atoms())

    def unmatched(self, values: Sequence[Value]) -> str:
        """What this policy itself asks for and no value is, with the nearest that there is; empty if all is found."""
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
        """This policy, and `other` for what it recomputes."""
        return Then(self, as_policy(other))

    def __call__(self, primitive: Any, *inputs: Any, **params: Any) -> Any:
        """Judge one equation, as ``jax.checkpoint`` asks; for `remat` the policy sees more than that."""
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

    def _show(self, inside: int) -> str:
        text = repr(self)
        return f"({text})" if self._binding < inside else text


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


def _near(wanted: Iterable[str], there: Iterable[str], what: str) -> str:
    """Of the wanted things those that are not there, with the nearest; empty if all are."""
    there = sorted(set(there))
    lines = []
    for name in sorted(set(wanted) - set(there)):
        lines.append(f"no value has the {what} {name!r}.{suggestion(name, there)}")
    if not lines:
        return ""
    listed = ", ".join(map(repr, there)) or "none"
    return f"{' '.join(lines)} {what.capitalize()}s that occur: {listed}."


@_policy
class Names(Policy):
    chosen: frozenset[str]
    missing: str = "raise"

    def judge(self, value: Value) -> Verdict:
        return SAVE if value.names & self.chosen else RECOMPUTE

    def unmatched(self, values: Sequence[Value]) -> str:
        return _near(self.chosen, (name for v in values for name in v.names), "name")

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
        keeps = value.nbytes > self.limit if self.larger else value.nbytes < self.limit
        return SAVE if keeps and not value.is_view else RECOMPUTE

    def __repr__(self) -> str:
        return f"{'larger' if self.larger else 'smaller'}_than({self.limit})"


@_policy
class Primitives(Policy):
    chosen: frozenset[str]
    missing: str = "raise"

    def judge(self, value: Value) -> Verdict:
        return SAVE if value.primitive.name in self.chosen else RECOMPUTE

    def unmatched(self, values: Sequence[Value]) -> str:
        return _near(self.chosen, (v.primitive.name for v in values), "primitive")

    def __repr__(self) -> str:
        return f"primitives({_listed(self)})"


@_policy
class Path(Policy):
    pattern: str
    missing: str = "raise"

    def judge(self, value: Value) -> Verdict:
        keeps = any(fnmatch.fnmatchcase(o.path, self.pattern) for o in value.near)
        return SAVE if keeps and not value.is_view else RECOMPUTE

    def unmatched(self, values: Sequence[Value]) -> str:
        paths = sorted({o.path for v in values for o in v.near})
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
        as_predicate(self.filter)  # raises if it is none

    def selects(self, path: str, state: Any) -> bool:
        return as_predicate(self.filter)(path, state)

    def judge(self, value: Value) -> Verdict:
        return SAVE if any(self in o.chosen for o in value.read) and not value.is_view else RECOMPUTE

    def unmatched(self, values: Sequence[Value]) -> str:
        if any(self in o.chosen for v in values for o in v.read):
            return ""
        paths = sorted({o.path for v in values for o in v.read})
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

    def parts(self) -> tuple[Policy, ...]:
        return (self.inner,)

    def judge(self, value: Value) -> Verdict:
        keeps = self.inner.judge(value).decision is not Decision.RECOMPUTE
        return Verdict(Decision.OFFLOAD, self.src, self.dst, self.otherwise) if keeps else RECOMPUTE

    def __repr__(self) -> str:
        inner = _listed(self.inner) if type(self.inner) is Names else repr(self.inner)
        defaults = {"src": "device", "dst": "pinned_host", "otherwise": "raise"}
        options = [f", {k}={getattr(self, k)!r}" for k, v in defaults.items() if getattr(self, k) != v]
        return f"offload({inner}{''.join(options)})"


@dataclasses.dataclass(frozen=True, repr=False)
class JaxPolicy(Policy):
    """A policy of JAX's, asked about the function as it is written."""

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
        return _near(_jax.names_in_policy(self.fun), (name for v in values for name in v.names), "name")

    def __repr__(self) -> str:
        maker, _, inner = getattr(self.fun, "__qualname__", "").partition(".<locals>.")
        if inner and _jax.is_jax_policy(self.fun):  # as it was asked for
            return f"{maker}({', '.join(map(repr, sorted(_jax.names_in_policy(self.fun))))})"
        return getattr(self.fun, "__name__", None) or repr(self.fun)


def _verdict(answer: Any) -> Verdict:
    kept = _jax.policy_answer(answer)
    return Verdict(Decision.OFFLOAD, *kept) if isinstance(kept, tuple) else SAVE if kept else RECOMPUTE


@_policy
class Or(Policy):
    a: Policy
    b: Policy
    _binding: ClassVar[int] = 0

    def parts(self) -> tuple[Policy, ...]:
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

    def parts(self) -> tuple[Policy, ...]:
        return (self.a, self.b)

    def judge(self, value: Value) -> Verdict:
        return min(self.a.judge(value), self.b.judge(value), key=lambda v: v.decision)

    def __repr__(self) -> str:
        return f"{self.a._show(1)} & {self.b._show(2)}"


@_policy
class Not(Policy):
    inner: Policy
    _binding: ClassVar[int] = 2

    def parts(self) -> tuple[Policy, ...]:
        return (self.inner,)

    def judge(self, value: Value) -> Verdict:
        keeps = self.inner.judge(value).decision is Decision.RECOMPUTE
        return SAVE if keeps and not value.is_view else RECOMPUTE

    def __repr__(self) -> str:
        return f"~{self.inner._show(2)}"


@_policy
class Then(Policy):
    a: Policy
    b: Policy

    def parts(self) -> tuple[Policy, ...]:
        return (self.a, self.b)

    def judge(self, value: Value) -> Verdict:
        first = self.a.judge(value)
        return self.b.judge(value) if first.decision is Decision.RECOMPUTE else first

    def __repr__(self) -> str:
        return f"{self.a._show(3)}.then({self.b!r})"


# -- constants -----------------------------------------------------------------------------------------------------

everything: Policy = Everything()
"""Keep all that the backward pass needs, as without rematerialisation."""

nothing: Policy = Nothing()
"""Keep only inputs; the default."""

dots: Policy = Dots(True)
"""Keep the results of matrix products and convolutions."""

dots_without_batch_dims: Policy = Dots(False)
"""Keep the results of matrix products without batch dimensions in the function as it is written; vmap changes nothing."""


def names_of(policy: Policy) -> frozenset[str]:
    """The names of values that a policy asks to keep or offload."""
    found: set[str] = set()
    for atom in policy.atoms():
        if isinstance(atom, JaxPolicy):
            found |= _jax.names_in_policy(atom.fun)
        elif type(atom) is Names:
            found |= atom.chosen
    return frozenset(found)


# -- whatever a user gives as a policy -----------------------------------------------------------------------------

_CONSTANTS = {"everything": everything, "nothing": nothing, "dots": dots}
_CONSTANTS["dots_without_batch_dims"] = dots_without_batch_dims


def _jax_names() -> list[str]:
    return [n for n in dir(jax.checkpoint_policies) if not n.startswith("_")]


# Members of jax.checkpoint_policies that make a policy of their arguments rather than being one.
_FACTORIES = frozenset(n for n in _jax_names() if n.startswith(("save_", "offload_")))


@_policy
class Marks(Policy):
    """Keeps what was chosen for the equations of one function.

    Attributes:
        marks: addresses of values in that function, and what becomes of each; see `mark.mark`.
    """

    marks: tuple[tuple[tuple[int, ...], str], ...]

    def judge(self, value: Value) -> Verdict:
        raise PolicyError("What was chosen for one function cannot judge another.")

    def __repr__(self) -> str:
        return f"Marks({len(self.marks)} values)"


FAMILIES = {"fit": "statetx.planner.plan:Fit"}
"""Where to find what makes a policy of ``"name:argument"``: in modules above this one, loaded when they are asked for."""


class Rewriting(Policy):
    """A policy that does not judge values one by one, but has another program in the place of the function."""

    def judge(self, value: Value) -> Verdict:
        raise PolicyError(f"{self!r} is for a whole function: it does not combine with other policies.")

    def rewrite(self, body: Any, name: str, num_out: int) -> Any:
        """``(operands, *args) -> outputs`` for a staged function (`Body`) of this name.

        The first `num_out` outputs are the function's own; those of states that it writes follow.
        """
        raise NotImplementedError


def as_policy(given: Any) -> Policy:
    """The policy that a user means: one of ours, the name of one, or JAX's, or any callable like JAX's.

    Raises:
        PolicyError: an unknown name, a factory of policies that was not called, or something else.
    """
    if isinstance(given, Policy):
        return given
    if given is None:
        return nothing
    if isinstance(given, str):
        family, colon, argument = given.partition(":")
        if colon and family in FAMILIES:
            return pkgutil.resolve_name(FAMILIES[family])(argument.strip())
        if given in _CONSTANTS:
            return _CONSTANTS[given]
        known = _jax_names()
        if given not in known:
            hint = suggestion(given, [*_CONSTANTS, *known])
            raise PolicyError(f"No policy is named {given!r}.{hint} Known: {', '.join([*_CONSTANTS, *sorted(known)])}.")
        if given in _FACTORIES:
            raise PolicyError(_not_called(given))
        return JaxPolicy(getattr(jax.checkpoint_policies, given))
    if not callable(given):
        raise PolicyError(f"A policy is None, a name or a callable, got {type(given).__name__}: {given!r}.")
    if getattr(given, "__module__", "") == "statetx.policies":
        raise PolicyError(f"policies.{given.__name__} makes a policy of its arguments: call it.")
    for name in _FACTORIES:
        if given is getattr(jax.checkpoint_policies, name):
            raise PolicyError(_not_called(name))
    return JaxPolicy(given)


def _not_called(name: str) -> str:
    return (
        f"jax.checkpoint_policies.{name} makes a policy of its arguments; pass what it returns, for example "
        f"policy=jax.checkpoint_policies.{name}(...)."
    )


_UNITS = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30, "": 1}


def parse_bytes(size: int | str) -> int:
    """A number of bytes, given as one or as a string with a unit.

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
