"""Rules of ``states=``: how states take part in loops or maps.

A rule is one of the classes below, or an axis. Each transform names the rules that it accepts and its default.
"""

from __future__ import annotations

import os.path
from collections.abc import Callable, Mapping, Sequence
from inspect import isclass
from typing import Any

import jax
import jax.numpy as jnp

from .. import _jax, _states
from .._errors import StateAccessError, StateValueError
from .._frames import Effect
from .._objects.paths import Paths, as_predicate, check_paths
from .._objects.walk import held_states
from .._states import Kind
from .._text import brief, type_str
from .._tree import is_key
from .._typing import Filter, public


class _RuleType(type):
    def __repr__(cls) -> str:
        return f"statetx.{cls.__name__}"


class Rule(metaclass=_RuleType):
    """Part that a state takes. The classes themselves are the rules; they have no instances."""


@public
class Carry(Rule):
    """Pass the state from step to step: each step reads the value that the previous step wrote.

    A rule of ``states=`` in `scan` and `microbatch`. The default for states that the body writes. After the loop the
    state holds the value of the last step. Give it to a state that the body only reads to make it part of the loop's
    carry, too.
    """


@public
class Broadcast(Rule):
    """Share one value: every step, or every example, reads the same value of the state.

    A rule of ``states=`` in `scan` and `vmap`. The default for states that the body of a loop only reads, and in `vmap`
    for all states but random ones. In `scan` a write to the state raises `StateAccessError`. In `vmap` a write is
    allowed if the value is the same for every example, such as a mean over ``axis_name``.
    """


@public
class Split(Rule):
    """Give each step, or each example, a random key of its own. The state advances once, also if they set its key.

    A rule of ``states=`` in `scan` and `vmap`, for random states only (`RngState`, brainstate's ``RandomState``). The
    default for them in `vmap`. In `scan` the default is `Carry`: the steps draw one after the other, as a Python loop
    would.
    """


@public
class Mean(Rule):
    """Take the mean: each part reads the value from before the call, and the state then holds the mean of the parts'
    values.

    A rule of ``states=`` in `microbatch`, for running statistics: the mean of the parts' updates is one update. Parts
    count with their weights, by default their sizes. Leaves that are not floats take the value of the last part.
    """


@public
class First(Rule):
    """Keep the first part's value; each part reads the value from before the call. A rule of ``states=`` in
    `microbatch`.
    """


@public
class Last(Rule):
    """Keep the last part's value; each part reads the value from before the call. A rule of ``states=`` in
    `microbatch`.
    """


class Rules:
    """A ``states=`` argument: maps each state to its rule.

    Args:
        name: the transform, for messages.
        states: from filter to rule; filters are tried in order.
        fun: the function, to find paths.
        accepted: the rules that the transform accepts besides an axis.
        args, kwargs: the arguments of the function.
    """

    def __init__(
        self,
        name: str,
        states: Mapping[Filter, Any] | None,
        fun: Callable,
        accepted: tuple[type[Rule], ...],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ):
        self.name = name
        self.path = Paths(fun, args, kwargs)
        self._rules: list[tuple[Callable, Any]] = []
        self._rule_by_state: dict[int, tuple[Any, Any]] = {}
        self._needs_paths = False
        if states is not None and not isinstance(states, Mapping):
            raise StateValueError(
                f"{name}: states= maps filters to rules, as in states={{statetx.Param: 0}}; got {states!r}."
            )
        self._filters = list(states or ())
        for filter, rule in (states or {}).items():
            is_axis = isinstance(rule, int) and not isinstance(rule, bool)
            if not is_axis and not any(rule is r for r in accepted):
                raise StateValueError(
                    f"{name}: states={{{brief(filter)}: {rule!r}}} is not understood. Give an axis (an int) or one of "
                    f"{', '.join(map(repr, accepted))}."
                )
            self._rules.append((as_predicate(filter), rule))
            self._needs_paths |= not isclass(filter)
        if self._rules and _jax.has_made_refs():
            self._refuse_mapped_refs(fun)

    def _refuse_mapped_refs(self, fun: Callable) -> None:
        for path, state in Paths(fun).held.items():
            if _states.is_unwatched(state) and isinstance(self(state), int):
                raise StateValueError(
                    f"{self.name} cannot map {_states.describe(state, path=path)}, which the function closes over: "
                    "every reader sees the unsliced array.\n"
                    "Fix: pass it to the mapped function as an argument, with an axis in in_axes, or keep the value in "
                    "a statetx.State."
                )

    def __call__(self, state: Any) -> Any:
        """The first rule whose filter selects the state; None if no filter does."""
        if not self._rules:
            return None
        if id(state) not in self._rule_by_state:
            path = self.path(state) if self._needs_paths else ""
            rule = next((rule for selects, rule in self._rules if selects(path, state)), None)
            self._rule_by_state[id(state)] = state, rule
        return self._rule_by_state[id(state)][1]

    def split(self, state: Any, kind: Kind, leaves: Sequence[Any], num: int) -> tuple[list, list]:
        """Split each array of the value of a `Split` state into keys for `num` examples or steps, and the key that the
        state keeps.

        Raises:
            StateValueError: an array is not one random key.
        """
        for x in leaves:
            if not (is_key(x) and x.ndim == 0) and not (x.dtype == jnp.uint32 and x.ndim == 1):
                path = self.path(state)
                raise StateValueError(
                    f"{self.name}: {_states.describe(state, kind, path)} holds {type_str(x)}, which is not one random "
                    f"key. Split gives each call a key of its own.\n"
                    f"Fix: keep one key in the state; or declare another rule, states={{{path!r}: ...}}: an axis for "
                    f"an array of keys, Broadcast for a value that all calls share."
                )
        pairs = [kind.split(x, num) for x in leaves]
        return [keys for keys, _ in pairs], [key for _, key in pairs]

    def check_paths(self) -> None:
        """Raise if a path glob selects none of the states that the function touched, whose rules have been
        looked up.
        """
        paths = lambda: [self.path(state) for state, _ in self._rule_by_state.values()]
        for filter in self._filters:
            check_paths(f"{self.name}: states={{{brief(filter)}: ...}}", filter, paths, "The function touches")

    def refuse_unruled(self, argument: str, obj: Any, axis: int, call: str, otherwise: str) -> None:
        """Raise if an argument that the user maps holds states and none has a rule: only arrays are sliced with the
        argument.

        Args:
            argument: its name, for the message.
            obj: the argument.
            axis: the axis that the user maps.
            call: the call up to ``states=``.
            otherwise: what to do if no slices are meant.

        Raises:
            StateValueError: `obj` holds states, and none has a rule.
        """
        held = held_states(obj)
        if not held or any(self(state) is not None for state in held):
            return
        state = held[0]
        paths = {id(state): path for path, state in self.path.held.items()}
        raise StateValueError(
            f"{self.name}: {argument} holds states, which are not sliced like arrays. Each call would get the whole "
            f"value of {_states.describe(state, path=paths.get(id(state)))}.\n"
            f"Fix: map the states by {call}states={{{_filter_for(held, paths)}: {axis}}}); {otherwise}."
        )

    def error_of_write(self, effect: Effect, fix: str) -> StateAccessError:
        """The error for a write to a `Broadcast` state; `fix` says what to declare."""
        return StateAccessError(
            f"{self.name}: {_states.describe(effect.state, effect.kind, self.path(effect.state))} is declared "
            f"Broadcast and was written at {effect.site}.\nFix: declare it {fix}."
        )

    def size_of_mapped(self, *objects: Any) -> int | None:
        """The length of the mapped axis of the first mapped state that the function or `objects` hold; None without
        one.
        """
        for state in [*self.path.held.values(), *held_states(objects)] if self._rules else ():
            axis, kind = self(state), _states.kind_of(state)
            if isinstance(axis, int) and kind is not None:
                shapes = [jnp.shape(x) for x in jax.tree.leaves(kind.get(state))]
                sizes = [shape[axis] for shape in shapes if -len(shape) <= axis < len(shape)]
                if sizes:
                    return sizes[0]
        return None

    def slice_type(self, state: Any, aval: Any, length: int) -> Any:
        """The type of one slice of an array of a mapped state; `aval` itself for other states."""
        axis = self(state)
        if not isinstance(axis, int):
            return aval
        if not -len(aval.shape) <= axis < len(aval.shape) or aval.shape[axis] != length:
            path, kind = self.path(state), _states.kind_of_state(state)
            rule = Split if kind.is_random(state) else Broadcast
            raise StateValueError(
                f"{self.name}: {_states.describe(state, kind, path)} is mapped along axis {axis}, which must have the "
                f"length of the {self.name}, {length}.\n"
                f"Fix: a value with such an axis; or another rule before this one, as the first that selects a state "
                f"decides: states={{{path!r}: {rule!r}, ...}}."
            )
        return _jax.drop_axis(aval, axis)


def _filter_for(states: Sequence[Any], paths: Mapping[int, str]) -> str:
    """A filter that selects these states, as the user writes it: what their paths have in common, or their types."""
    parts = [paths.get(id(state), "").split(".") for state in states]
    common = ".".join(os.path.commonprefix(parts))  # type: ignore[type-var]
    if common:
        return repr(common if len(parts) == 1 else f"{common}.*")
    names = sorted({type(state).__name__ for state in states})
    return names[0] if len(names) == 1 else f"({', '.join(names)})"
