"""`ProgramStates`: the states of a program, whose values are its operands, where its results are stored."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from ... import _frames
from ..._atomic import Store, commit, locked
from ..._errors import ForeignStateError
from ..._lift.outcome import Outcome, publish_leaves
from ..._lift.stage import Input
from ..._tree import is_array_or_number, partition


class ProgramStates:
    """The states that a program reads, and those that it writes.

    Args:
        kept, donated: the states that are read, each list in the order of their kinds.
        outcome: what the program returns, the writes among it.
        staging: a lock that a thread holds while it stages the function.

    Attributes:
        guards: inputs whose value has leaves other than arrays. The program holds for these leaves only.
    """

    def __init__(self, kept: list[Input], donated: list[Input], outcome: Outcome, staging: Any):
        self.kept, self.donated, self.outcome, self._staging = kept, donated, outcome, staging
        self.guards = [i for i in kept if i.partition.static]
        self.group()

    def inputs(self) -> list[Input]:
        """The states that are read, in the order of the compiled function's operands."""
        return [*self.kept, *self.donated]

    def group(self) -> None:
        """Group the states that are read, and those that are written, by kind, once they are known."""
        self._kept_groups, self._donated_groups = _by_kind(self.kept), _by_kind(self.donated)
        # None if a value is not a single array.
        self.writers: list[tuple[Any, list, list[int]]] | None = None
        if all(p.num_dynamic == 1 and jax.tree_util.treedef_is_leaf(p.treedef) for p in self.outcome.values):
            groups: dict[int, tuple[Any, list, list[int]]] = {}
            for n, e in enumerate(self.outcome.effects):
                kind, states, indices = groups.setdefault(id(e.kind), (e.kind, [], []))
                states.append(e.state)
                indices.append(n)
            self.writers = list(groups.values())

        # The positions of written states that are also inputs, among the effects and among the inputs.
        input_indices = {id(i.state): n for n, i in enumerate(self.inputs()) if i.kind.is_watched}
        pairs = [(n, input_indices.get(id(e.state))) for n, e in enumerate(self.outcome.effects)]
        self._updated = [(n, index) for n, index in pairs if index is not None]

    def writing(self, states: Mapping[int, Any]) -> ProgramStates:
        """The states of a call that writes these, by the number of the effect."""
        effects = [
            dataclasses.replace(e, state=states[n]) if n in states else e for n, e in enumerate(self.outcome.effects)
        ]
        outcome = Outcome(self.outcome.out, effects, self.outcome.values)
        return ProgramStates(self.kept, self.donated, outcome, self._staging)

    def replace_inputs(self, successor: Callable[[Any], Any]) -> None:
        """Read other states from now on."""
        for i in self.inputs():
            i.state = successor(i.state)
        self.group()

    # -- values ------------------------------------------------------------------------------------------------------

    def kept_values(self) -> list:
        """The values of the states that keep their memory, where no frame is open."""
        try:
            return _values_of(self._kept_groups)
        except ForeignStateError:
            return self._retry_when_released(_values_of, self._kept_groups)

    def donated_values(self) -> list:
        return self._retry_when_released(_donated_values_of, self._donated_groups)

    def read(self) -> tuple[list, list]:
        """The values, of both sorts of states, as a user reads them: open frames see it."""
        read = lambda inputs: [self._retry_when_released(i.kind.read, i.state) for i in inputs]
        return read(self.kept), read(self.donated)

    def without_guarded(self, kept: list) -> list:
        """The values of `kept` as the compiled function takes them: without what guards have beside arrays."""
        if not self.guards:
            return kept
        return [
            partition(value, is_array_or_number)[0] if i.partition.static else value
            for i, value in zip(self.kept, kept, strict=True)
        ]

    # -- results -----------------------------------------------------------------------------------------------------

    def store_directly(self, writes: list, values: list) -> None:
        """`store`, where no frame is open."""
        # Values are compared only if the process has several threads (decision 18).
        writers = self.writers
        if writers is None or len(writers) > 1 or threading.active_count() > 1:
            self.store(writes, values)
        else:
            kind, states, _ = writers[0]
            kind.set_results(states, writes)

    def store(self, writes: list, values: list, attribute_stores: Sequence[Store] = ()) -> None:
        """Store the values that a call returned; `values` are its inputs' values, to detect writes by other threads."""
        if self.writers is None:
            self.publish(writes, values, attribute_stores, live=False)
        else:
            self._retry_when_released(
                functools.partial(locked, _frames.ownership, self._set_all, writes, attribute_stores), values
            )

    def publish(self, writes: list, values: list, attribute_stores: Sequence[Store] = (), *, live: bool) -> None:
        """`store`, as frames see it; `live` in the call that was staged, which creates states."""

        def publish(values: list) -> None:
            # Threads may run the program at once: each call has records of its own. Later calls create no state.
            effects = [dataclasses.replace(e, created=e.created and live) for e in self.outcome.effects]
            for n, index in self._updated if values else ():
                effects[n].value_before = values[index]
            publish_leaves(effects, self.outcome.values, writes, live=live, also=attribute_stores)

        self._retry_when_released(publish, values)

    def _set_all(self, writes: list, attribute_stores: Sequence[Store], values: list) -> None:
        writers = self.writers or ()
        for kind, states, _ in writers if _frames.open_frames else ():
            kind.check_free(states)  # checks come before the stores: all or none (decision 18)
        if values and threading.active_count() > 1:
            for n, index in self._updated:
                effect = self.outcome.effects[n]
                if effect.kind.get(effect.state) is not values[index]:
                    raise _frames.changed_state_error(effect.state, effect.kind)
        stores = [kind.store_results(states, [writes[n] for n in indices]) for kind, states, indices in writers]
        commit([*stores, *attribute_stores])

    def _retry_when_released(self, touch: Callable[[Any], Any], x: Any) -> Any:
        """Touch states; if another thread owns one, retry once after the current staging of this function."""
        try:
            return touch(x)
        except ForeignStateError:  # a thread that stages this function owns the states that it has touched
            if not _frames.is_idle():
                raise
            return locked(self._staging, touch, x)


_KindStates = list[tuple[Any, list]]
"""States, grouped by their kind."""


def _by_kind(inputs: list[Input]) -> _KindStates:
    groups = itertools.groupby(inputs, key=lambda i: i.kind)
    return [(kind, [i.state for i in group]) for kind, group in groups]


def _values_of(groups: _KindStates) -> list:
    if len(groups) == 1:
        return groups[0][0].operands(groups[0][1])
    return [v for kind, states in groups for v in kind.operands(states)]


def _donated_values_of(groups: _KindStates) -> list:
    # Of a Ref a copy: a program that fails may have consumed it, and a Ref without an array cannot be written.
    return [v for kind, states in groups for v in kind.get_all(states)]
