"""A call's output with its writes, split: arrays leave a JAX transform, structure stays.

`pack` splits inside the transform; after it `Outcome.finish` combines the output and stores the written values. In
`OutputGroups` the arrays leave in groups: along axes (`vmap`), by shardings (`shard_map`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import jax
import numpy as np

from .. import _frames, _jax, _states
from .._frames import Effect
from .._objects.opaque import refuse_hidden
from .._objects.walk import held_states
from .._tree import ARRAY, Partition, is_array, is_opaque, partition
from .._typing import PyTree
from .._unfinished import refuse_unfinished


class Outcome:
    """Output and effects of one framed call, without the traced leaves, which cross the JAX transform.

    Attributes:
        effects: the writes of the call, without their values.
        out: the `Partition` of the output.
        values: the `Partition` of each effect's value.
    """

    __slots__ = ("effects", "num_out", "out", "values")

    def __init__(self, out: Partition, effects: list[Effect], values: list[Partition]):
        self.out = out
        self.effects = effects
        self.values = values
        self.num_out = out.num_dynamic

    def finish(self, leaves: Sequence[Any]) -> PyTree:
        """Store the effects' values in their states and return the output; `leaves` as from `pack`."""
        self.publish(leaves[self.num_out :])
        return self.out.combine(leaves[: self.num_out])

    def add(self, effects: list[Effect]) -> Outcome:
        """Add effects of one array each; their leaves follow the present ones."""
        self.effects = [*self.effects, *effects]
        self.values = [*self.values, *[ARRAY] * len(effects)]
        return self

    def publish(self, leaves: Sequence[Any], **options: Any) -> None:
        """Store the effects' values in their states, for `leaves` of the effects only; options as of
        `_frames.publish`.
        """
        publish_leaves(self.effects, self.values, leaves, **options)


def publish_leaves(
    effects: Sequence[Effect], partitions: Sequence[Partition], leaves: Sequence[Any], **options: Any
) -> None:
    """Combine the value of each effect and publish it; `leaves` are the leaves of all values, in order.

    `options`: see `_frames.publish`.
    """
    position = 0
    for effect, part in zip(effects, partitions, strict=True):
        effect.value = part.combine(leaves[position : position + part.num_dynamic])
        position += part.num_dynamic
    _frames.publish(effects, **options)


def is_traced(x: Any) -> bool:
    """Whether a leaf must cross the transform: a tracer, or another abstract array."""
    if isinstance(x, (_jax.Tracer, *_jax.LITERALS)):
        return True
    return is_array(x) and not isinstance(x, (jax.Array, np.ndarray, np.generic))


def pack(out: PyTree, effects: list[Effect], is_dynamic: Callable[[Any], bool] = is_traced) -> tuple[list, Outcome]:
    """Split output and effects into the leaves that cross the JAX transform and an `Outcome`, which holds the static
    parts.
    """
    return pack_effects(*partition_output(out, is_dynamic), effects, is_dynamic)


def pack_effects(
    leaves: list, out_part: Partition, effects: list[Effect], is_dynamic: Callable[[Any], bool]
) -> tuple[list, Outcome]:
    """As `pack`, with an output that is taken apart already."""
    values = []
    for effect in effects:
        dynamic, part = partition(effect.value, is_dynamic)
        leaves += dynamic
        values.append(part)
        effect.value = None
    return leaves, Outcome(out_part, effects, values)


def partition_output(
    out: PyTree,
    is_dynamic: Callable[[Any], bool] = is_traced,
    *,
    is_leaf: Callable[[Any], bool] | None = is_opaque,
) -> tuple[list, Partition]:
    """`partition` the return value of a call, still inside the transform; with another `is_leaf` inside the frame.

    Raises:
        TraceLeakError: an object among the static leaves holds an array of the trace that is about to end.
        FunctionError: the return value is a generator or a coroutine.
    """
    refuse_unfinished(out)  # before JAX warns about an iterator as a leaf
    leaves, part = partition(out, is_dynamic, is_leaf=is_leaf)
    refuse_hidden(part.static)
    return leaves, part


class OutputGroups:
    """Output and effects of one framed call whose arrays leave the transform in groups, each with a key: an axis, a
    spec.

    Attributes:
        keys: from the name of a group to its key, as JAX wants them for a dict of lists. Names are strings, since JAX
            sorts the keys of a dict, and neither None nor a spec has an order.
    """

    def __init__(self, keys: Iterable[Hashable]):
        self.keys = {str(key): key for key in keys}
        self._leaves: dict[str, list] = {name: [] for name in self.keys}
        self._places: list[tuple[str, int]] = []  # for each leaf, its group and its index in the group
        self._out: Partition | None = None
        self._effects: list[tuple[Effect, Callable[[list], Any], int]] = []

    # -- inside the transform --

    def add_output(self, out: PyTree, keys: Sequence[Any], is_dynamic: Callable[[Any], bool]) -> None:
        """Take the output apart; `keys`: for each of its leaves, dynamic or not."""
        leaves, self._out = partition_output(out, is_dynamic)
        dynamic_keys = (key for key, is_dynamic in zip(keys, self._out.mask, strict=True) if is_dynamic)
        for leaf, key in zip(leaves, dynamic_keys, strict=True):
            self._add(leaf, key)

    def add_effect(self, effect: Effect, leaves: Sequence[Any], key: Any, value_of: Callable[[list], Any]) -> None:
        """Take the leaves of a written value; after the transform ``value_of(leaves)`` is the value."""
        effect.value = None
        self._effects.append((effect, value_of, len(leaves)))
        for leaf in leaves:
            self._add(leaf, key)

    def _add(self, leaf: Any, key: Any) -> None:
        group = self._leaves[str(key)]
        self._places.append((str(key), len(group)))
        group.append(leaf)

    def pack(self) -> dict[str, list]:
        """The leaves by the name of their group, for JAX; none of them stays here."""
        leaves, self._leaves = self._leaves, {}
        return leaves

    # -- after it --

    def finish(self, groups: dict[str, list]) -> PyTree:
        """Publish the writes and return the output."""
        assert self._out is not None
        leaves = iter([groups[name][index] for name, index in self._places])
        out = self._out.combine([next(leaves) for _ in range(self._out.num_dynamic)])
        for effect, value_of, num in self._effects:
            effect.value = value_of([next(leaves) for _ in range(num)])
        _frames.publish([effect for effect, _, _ in self._effects])
        return out


# -- objects with new states, of a function that runs in parts ---------------------------------------------------------


@jax.tree_util.register_pytree_node_class
class _Arrays:
    """The arrays of an object with states that a part made: a gradient in the form of a module of flax.

    The states end with the part. An object with the accumulated arrays is made after the last one.
    """

    def __init__(self, leaves: Sequence[Any], treedef: Any):
        self.leaves, self.treedef = leaves, treedef

    def tree_flatten(self) -> tuple[Sequence[Any], Any]:
        return self.leaves, self.treedef

    @classmethod
    def tree_unflatten(cls, treedef: Any, leaves: Sequence[Any]) -> _Arrays:
        return cls(leaves, treedef)


def without_new_states(out: PyTree) -> PyTree:
    """Replace the objects whose states were all made in this call by `_Arrays`."""
    frame = _frames.current_frame()
    assert frame is not None
    created = {id(state) for state, _ in frame.created()}

    def replaced(x: Any) -> Any:
        if not _states.is_opaque(x):
            return x
        states = held_states(x)
        is_new = bool(states) and all(id(state) in created for state in states)
        return _Arrays(*jax.tree.flatten(x)) if is_new else x

    return jax.tree.map(replaced, out, is_leaf=_states.is_opaque) if created else out


def with_new_states(out: PyTree) -> PyTree:
    """Make the objects again that `without_new_states` has replaced."""
    is_replaced = lambda x: isinstance(x, _Arrays)
    restore = lambda x: jax.tree.unflatten(x.treedef, x.leaves) if is_replaced(x) else x
    return jax.tree.map(restore, out, is_leaf=is_replaced)
