"""Output and writes of a call whose arrays leave JAX's transform in different ways: along axes (`vmap`), by shardings (`shard_map`)."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

from .. import _frames
from .._frames import Effect
from .._tree import Partition
from .._typing import PyTree
from .stage import partition_output


class Groups:
    """The traced leaves of output and effects, grouped by a key: an axis, a spec.

    Attributes:
        keys: from the name of a group to its key, as JAX wants them for a dict of lists. Names are strings, since JAX sorts the keys
            of a dict, and neither None nor a spec has an order.
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
        _frames.publish([effect for effect, _, _ in self._effects], live=True)
        return out
