"""Sharing a run of the user's Python between calls that look alike: what ``share_traces=`` asks for.

The table of structures shares all that comes after the user's Python; what is left is that Python. A `Sight` of a call
is what a walk from its function and its arguments meets: types of objects, attributes, flags and code, the types of
arrays and of what states hold, and which of them are the same object. A call that looks like an earlier one takes its
equations from it, with its own arrays and states in the places of those.

What the walk does not see must not matter to the function; that is what the user promises. It does not see variables of
other modules than the function's own, what is inside objects of other languages, and files, clocks and the like.
"""

from __future__ import annotations

import collections
import threading
import types
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from . import _compat, _registry
from ._jaxpr import Body
from ._lift import Input, Outcome, Wrapper
from ._paths import ATOMS, children, own_globals
from ._registry import Effect
from ._tree import Partition, freeze, partition

_LARGEST = 1 << 16  # bytes of a NumPy array that is compared by its content


class _Unseen(Exception):
    """The walk met something that cannot be compared."""


class Sight:
    """What a walk from a call meets.

    Attributes:
        key: equal for calls that look alike; None where that cannot be told.
        things: the states and arrays that were met, in order.
    """

    def __init__(self, fun: Callable, others: Partition, avals: Sequence[Any], settings: Hashable):
        self.things: list[Any] = []
        self._parts: list[Hashable] = []
        self._seen: dict[int, int] = {}
        self._keep: list[Any] = []  # objects made on the way must outlive the walk, or their ids are used again
        self.key: Hashable = None
        try:
            for obj in (*others.static, fun):
                self._look(obj, own_globals(fun))
            key = (settings, _registry.modes(), _compat.trace_context(), others.treedef, others.mask, tuple(avals))
            key = (*key, tuple(self._parts))
            hash(key)
        except (_Unseen, TypeError, RecursionError):
            return
        self.key = key

    def _look(self, obj: Any, module: dict[str, Any] | None) -> None:
        parts = self._parts
        if isinstance(obj, jax.Ref) or (isinstance(obj, np.ndarray) and obj.nbytes > _LARGEST):
            raise _Unseen
        if isinstance(obj, ATOMS) and not isinstance(obj, jax.Array):
            parts.append(freeze(obj))
            return
        number = self._seen.setdefault(id(obj), len(self._seen))
        if number != len(self._seen) - 1:
            parts.append(("again", number))
            return
        self._keep.append(obj)
        kind = _registry.kind_of(obj)
        if kind is not None:
            leaves, part = partition(kind.get(obj))
            avals = tuple([_compat.abstract(x) for x in leaves])
            parts.append((type(obj), part.treedef, part.mask, freeze(part.static), avals))
            self.things.append(obj)
        elif isinstance(obj, jax.Array):
            parts.append(_compat.abstract(obj))
            self.things.append(obj)
        else:
            self._look_within(obj, module)

    def _look_within(self, obj: Any, module: dict[str, Any] | None) -> None:
        if isinstance(obj, types.GeneratorType):
            raise _Unseen
        found = list(children(obj, module))
        if isinstance(obj, Wrapper):
            found += vars(obj)["_options"].items()
        elif isinstance(obj, types.FunctionType):
            self._parts.append(obj.__code__)
        elif not found and not isinstance(obj, (Mapping, list, tuple)):
            self._parts.append(freeze(obj))
            return
        self._parts.append((type(obj), len(found)))
        for name, child in found:
            self._parts.append(name)
            self._look(child, module)

    def find(self, obj: Any) -> int | None:
        """The place of a state or array among the `things`."""
        return next((n for n, thing in enumerate(self.things) if thing is obj), None)


class Recalled(NamedTuple):
    """A run for one call.

    Attributes:
        kept: takes operands, and then the call's arrays and the states' `values`.
    """

    kept: Callable
    operands: list[Any]
    values: list[Any]
    outcome: Outcome


class _Run:
    """One run of a function, without what was its own: states and arrays go by their places among the things."""

    def __init__(self, kept: Callable, operands: list, inputs: list, outcome: Outcome, places: list[int]):
        self.kept = kept
        self.operands = operands  # (place, None), or (None, value) of what is no thing
        self.inputs = inputs  # (place, kind, part, avals)
        self.out = outcome.out
        self.values = outcome.values
        self.effects = [(n, e.kind, e.site) for n, e in zip(places, outcome.effects, strict=True)]

    def of(self, things: Sequence[Any]) -> Recalled:
        """For these things; raises `_Unseen`, with nothing done, if a state is not what it looked like."""
        values: list[Any] = []
        for n, kind, part, avals in self.inputs:
            leaves, found = partition(kind.read(things[n]))
            now = [_compat.abstract(x) for x in leaves]
            if found.treedef != part.treedef or now != avals:
                raise _Unseen
            values += leaves
        operands = [x if n is None else things[n] for n, x in self.operands]
        effects = [Effect(things[n], kind, None, site, None, created=False) for n, kind, site in self.effects]
        return Recalled(self.kept, operands, values, Outcome(self.out, effects, self.values))


def remember(sight: Sight, run: Recalled, body: Body, inputs: Sequence[Input]) -> None:
    """Keep a run for calls that look like the one it was for, if all that it touched was met on the way."""
    kept, operands, _, outcome = run
    # A body that is like no other has a derivative rule of the user's, which reads what it likes whenever it runs.
    if sight.key is None or body.key.is_unlike or any(e.created for e in outcome.effects):
        return
    places = [sight.find(e.state) for e in outcome.effects]
    reads = [(sight.find(i.state), i.kind, i.part, i.avals) for i in inputs]
    if None in places or any(n is None for n, *_ in reads):
        return
    static = [x for part in (outcome.out, *outcome.values) for x in part.static]
    if not all(isinstance(x, ATOMS) for x in static):
        return  # an object that belongs to this very call
    found = [(sight.find(x), x) for x in operands]
    if any(n is None and isinstance(x, _compat.Tracer) for n, x in found):
        return
    found = [(n, x if n is None else None) for n, x in found]
    runs.keep(sight.key, _Run(kept, found, reads, outcome, [n for n in places if n is not None]))


def recall(sight: Sight) -> Recalled | None:
    """The run of a call that looked like this one; None if there was none."""
    run = runs.find(sight.key)
    try:
        return None if run is None else run.of(sight.things)
    except _Unseen:
        return None


class Runs:
    """Runs by the looks of their calls; bounded, least recently used first out; safe to share by threads.

    Attributes:
        hits, misses: how often a run was found and not found.
    """

    def __init__(self, size: int):
        self.size = size
        self.hits = 0
        self.misses = 0
        self._kept: collections.OrderedDict[Hashable, _Run] = collections.OrderedDict()
        self._lock = threading.RLock()

    def find(self, key: Hashable) -> _Run | None:
        with self._lock:
            found = None if key is None else self._kept.get(key)
            if found is None:
                self.misses += 1
            else:
                self.hits += 1
                self._kept.move_to_end(key)
            return found

    def keep(self, key: Hashable, run: _Run) -> None:
        with self._lock:
            self._kept[key] = run
            while len(self._kept) > self.size:
                self._kept.popitem(last=False)

    def clear(self) -> None:
        with self._lock:
            self._kept.clear()
            self.hits = self.misses = 0

    def __len__(self) -> int:
        return len(self._kept)


runs = Runs(size=512)
