"""States that a jitted function creates in its calls.

A function may create a state and store it in an object, as `brainstate.nn.init_all_states` in a training step does.
When Python runs the function again, it creates a new state, which replaces the first. A compiled program creates none.
One rule decides (decision 16):

    If a staging has created states that live on, the next call stages once more, and the program of that staging is
    kept.

The second staging finds the states of the first call, a third would find the states of the second. So the kept
program reads and writes *places*, attributes and items of objects: a state that the staging replaced at a place is read
from its successor there (`PlacesOfObjects.successors`), and a call puts the created states back where others have
replaced them (`CreatedStates.stores`).

The objects are those that the function and its arguments hold before the staging. A created state that none of them
holds afterwards receives its value in every call, too. A state that only the result holds belongs to the caller: such a
function is staged in every call.
"""

from __future__ import annotations

import functools
import operator
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from typing import Any

import jax
from jax.tree_util import all_leaves

from ... import _frames, _states
from ..._atomic import Store
from ..._lift.outcome import partition_output
from ..._objects.contents import is_base, is_wrapper, module_of, package_of
from ..._objects.walk import held_states, visited_from
from ..._states import Kind
from ..._tree import Partition, is_opaque

_NONE = object()
Contents = dict[Any, Any]


class Place:
    """An attribute, an item of a list or dict, or a variable, and the object that it held at the end of a staging.

    Attributes:
        obj: the object.
        states: the states in the object, by id.
        key: the owner's id, the name, index or key, and whether this is one of an item.
    """

    __slots__ = ("_is_item", "_name", "_owner", "key", "obj", "states")

    def __init__(self, owner: Any, name: Any, obj: Any, *, is_item: bool):
        # A program keeps no model alive. Containers and a few other objects allow no weak reference.
        self._owner: Any = weakref.ref(owner) if type(owner).__weakrefoffset__ else lambda: owner
        self._name, self._is_item = name, is_item
        self.obj, self.states = obj, _states_in(obj)
        self.key = (id(owner), name, is_item)

    def is_in_place(self) -> bool:
        """Whether it holds the object."""
        owner, name = self._owner(), self._name
        if owner is None:
            return False
        if not self._is_item:
            return _attribute(owner, name) is self.obj
        try:
            return owner[name] is self.obj
        except LookupError:
            return False

    def is_lost(self) -> bool:
        """Whether the object cannot be put back, since the list has become shorter."""
        owner = self._owner()
        return self._is_item and isinstance(owner, list) and self._name >= len(owner)

    def stores(self) -> list[Store]:
        """Put the object back, unless it is in place or nobody can look at the place any more."""
        owner = self._owner()
        if owner is None or self.is_in_place():
            return []
        return [(operator.setitem if self._is_item else object.__setattr__, owner, self._name, self.obj)]

    def undo(self, old: Any) -> None:
        """Put back what it held before, `_NONE` if there was no such place."""
        owner = self._owner()
        if not self.is_in_place():
            return
        if old is _NONE:
            (operator.delitem if self._is_item else object.__delattr__)(owner, self._name)
        else:
            (operator.setitem if self._is_item else object.__setattr__)(owner, self._name, old)


# -- what objects hold ----------------------------------------------------------------------------------------


def _attribute(obj: Any, name: str) -> Any:
    """An attribute of the instance, not of its class; without the user's ``__getattr__``."""
    try:
        if name in (namespace := object.__getattribute__(obj, "__dict__")):
            return namespace[name]
    except AttributeError:
        pass
    try:
        return object.__getattribute__(obj, name)
    except (AttributeError, ValueError):  # an empty slot, an empty cell
        return _NONE


def _attributes(obj: Any) -> Contents:
    slots = [k for c in type(obj).__mro__ for k, v in vars(c).items() if isinstance(v, types.MemberDescriptorType)]
    namespace = _attribute(obj, "__dict__")
    names = [*slots, *(() if namespace is _NONE else namespace), *["cell_contents"] * isinstance(obj, types.CellType)]
    values = {name: _attribute(obj, name) for name in names}
    return {name: value for name, value in values.items() if value is not _NONE}


def _items(obj: Any) -> Contents:
    return dict(obj) if isinstance(obj, dict) else dict(enumerate(obj))


def _variables(fun: types.FunctionType) -> Contents:
    """The variables of its module that a function may read or bind."""
    return {name: fun.__globals__[name] for name in fun.__code__.co_names if name in fun.__globals__}


def _readers(obj: Any) -> Iterator[tuple[Any, functools.partial[Contents]]]:
    """The owners of an object's places, each with the function that reads them all."""
    if isinstance(obj, (type, types.ModuleType)) or _states.kind_of(obj) is not None:
        return
    if isinstance(obj, types.FunctionType):
        for cell in obj.__closure__ or ():
            yield cell, functools.partial(_attributes, cell)
        if not is_base(module_of(obj)):
            yield obj.__globals__, functools.partial(_variables, obj)
    elif isinstance(obj, (dict, list, tuple)):
        yield obj, functools.partial(_items, obj)
    if not (is_wrapper(obj) and package_of(type(obj).__module__) == "statetx"):  # the caches of a transform
        yield obj, functools.partial(_attributes, obj)


def _do_nothing() -> None:
    pass


def _states_in(obj: Any) -> dict[int, Any]:
    return {id(state): state for state in held_states([obj])}


def _has_repeated(tree: Any) -> bool:
    """Whether JAX finds a state or model twice in a pytree."""
    ids: list[int] = []

    def is_leaf(x: Any) -> bool:
        if not is_opaque(x):
            return False
        ids.append(id(x))
        return _states.kind_of(x) is not None or ids.count(id(x)) > 1  # a model may hold itself

    jax.tree.leaves(tree, is_leaf=is_leaf)
    return len({*ids}) < len(ids)


class PlacesOfObjects:
    """The places that a call of a function may change, with their contents before it.

    Attributes:
        changed: the places that hold a created state after the call, and did not before.
        undo: puts back what these held.
        successors: by id, for a state that the call has replaced at its place, the new state.
        moved: states of earlier calls that took the place of another one.
    """

    def __init__(self, *roots: Any):
        self._owners = [(owner, read, read()) for obj in visited_from(*roots) for owner, read in _readers(obj)]
        self._before: dict[int, Contents] = {}
        for owner, _, contents in self._owners:
            self._before.setdefault(id(owner), {}).update(contents)
        self.changed: list[Place] = []
        self.successors: dict[int, Any] = {}
        self.moved: list[Any] = []
        self.undo: Callable[[], Any] = _do_nothing

    def compare(self, created: dict[int, Any]) -> None:
        """Find the places that the call has changed; `created` are the states that it made, by id."""
        changes = [(place, old) for place, old in self._changes() if place.states]
        seen: set[int] = set()
        pairs = [pair for place, old in changes for pair in self._pairs(old, place.obj, seen)]
        self.successors = {id(old): new for old, new in pairs if id(new) in created}
        moved_pairs = [(old, new) for old, new in pairs if id(new) in self.successors]
        self.successors = {id(old): new for old, new in moved_pairs} | self.successors
        self.moved = [new for _, new in moved_pairs]
        current = created.keys() | map(id, self.moved)
        changes = [(place, old) for place, old in changes if place.states.keys() & current]
        self.changed = [place for place, _ in changes]
        self.undo = lambda: [place.undo(old) for place, old in reversed(changes)]

    def _changes(self) -> Iterator[tuple[Place, Any]]:
        """The places that hold another object than before, which comes second."""
        for owner, read, old_contents in self._owners:
            for name, new in read().items():
                old = old_contents.get(name, _NONE)
                if new is not old:
                    yield Place(owner, name, new, is_item=read.func is not _attributes), old

    def _pairs(self, old: Any, new: Any, seen: set[int]) -> Iterator[tuple[Any, Any]]:
        """Pairs of each state inside `new` with the one that was at the same place inside `old`."""
        pending = [(old, new)]
        while pending:
            old, new = pending.pop()
            if old is new or id(new) in seen or type(old) is not type(new):
                continue
            seen.add(id(new))
            if _states.kind_of(new) is not None:
                yield old, new
                continue
            for owner, read in _readers(new):
                old_contents = self._before.get(id(old), {}) if owner is new else {}
                pending += [(old_contents[name], x) for name, x in read().items() if name in old_contents]


# -- of one program -------------------------------------------------------------------------------------------


class _Placed:
    """A state that a jitted call has created, with its places; programs that read it check these."""

    __slots__ = ("__weakref__", "places", "state")

    def __init__(self, state: Any, places: list[Place]):
        self.state = state
        self.places = places
        _placed_by_id[id(state)] = self

    def is_in_place(self) -> bool:
        return all(place.is_in_place() for place in self.places)


_placed_by_id: weakref.WeakValueDictionary[int, _Placed] = weakref.WeakValueDictionary()


class _Stagings(threading.local):
    """The `CreatedStates` of the stagings of this thread that have not returned, outermost first."""

    def __init__(self) -> None:
        self.open: list[CreatedStates] = []


_stagings = _Stagings()


class CreatedStates:
    """The states that a program creates, and the places of those that it reads.

    Args:
        roots: the function and its arguments.
        is_second: whether an earlier staging for the same types has created states, and its call has returned.

    Attributes:
        states: the created states that live on, with their kinds.
        is_run: whether the staged call has returned.
        is_returned: whether a created state is in the result and in no object that existed before.
        num_stagings: the number of stagings in a row, with this one, that created states and served one call each.
        summary: the states and where they are made, for messages.
        undo: puts back what was at the places of created states, if the staging is given up.
    """

    def __init__(self, *roots: Any, is_second: bool):
        self.states: list[tuple[Any, Kind]] = []
        self.is_second = is_second
        self.is_run = False
        self.is_returned = False
        self._free: Set[int] = set()
        self.num_stagings = 1
        self.summary = ""
        self._before: PlacesOfObjects | None = PlacesOfObjects(*roots)  # until the staged function has returned
        self._successors: dict[int, Any] = {}
        self._places: dict[Any, Place] = {}
        self._placed: list[_Placed] = []
        self._read: list[_Placed] = []
        self.undo: Callable[[], Any] = _do_nothing

    def __bool__(self) -> bool:
        return bool(self.states or self._places or self._read)

    def run(self, frame: _frames.Frame, fun: Callable, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Call the function in the staging's frame, and find where the states are that it creates."""
        _stagings.open.append(self)
        try:
            out = fun(*args, **kwargs)
        finally:
            _stagings.open.pop()
        places, self._before = self._before, None
        created = {id(state): state for state, _ in frame.created()}
        if created and places is not None:
            places.compare(created)
            self.undo = places.undo
            if self.is_second:
                self._successors = places.successors
                for state in places.moved:  # an output of the program, whose input is its predecessor at the place
                    kind = _states.kind_of_state(state)
                    kind.write(state, kind.read(state))
            self._add(places.changed)
            placed = {key for place in places.changed for key in place.states}
            self._free = created.keys() - placed
        # Places of inner calls, too, unless the function has put something else there.
        self._places = {key: place for key, place in self._places.items() if place.is_in_place()}
        return out

    def flatten_output(self, out: Any, is_dynamic: Callable[[Any], bool]) -> tuple[list, Partition]:
        """Take the output of the call apart, and what JAX has as pytrees of new states that are in no object that
        existed before: each call returns others. JAX would make two of a state or model that is there twice.
        """
        is_shared = bool(self._free) and _has_repeated(out)

        def is_leaf(x: Any) -> bool:
            if not is_opaque(x):
                return False
            states = held_states(x)
            return is_shared or all_leaves([x]) or not (states and all(id(state) in self._free for state in states))

        leaves, part = partition_output(out, is_dynamic, is_leaf=is_leaf)
        self.is_returned = bool(_states_in(part.static).keys() & self._free)
        return leaves, part

    def _add(self, places: Iterable[Place]) -> None:
        self._places |= {place.key: place for place in places}

    def finish(self, inputs: Sequence[Any], effects: Sequence[_frames.Effect]) -> None:
        """Take the states that the staged program reads and writes; to be called when its trace has ended."""
        self.undo = _do_nothing
        self.states = [(e.state, e.kind) for e in effects if e.created]
        if self.states:
            state, kind = self.states[0]
            more = f" and {len(self.states) - 1} more" * (len(self.states) > 1)
            self.summary = f"{type(state).__name__} (at {kind.site_of(state)}){more}"
        places: dict[int, list[Place]] = {}
        for place in self._places.values():
            for key in place.states:
                places.setdefault(key, []).append(place)
        self._placed = [_Placed(state, places[id(state)]) for state, _ in self.states if id(state) in places]
        ids = {id(e.state) for e in effects if not e.created} - places.keys()
        self._check(ids | {id(i.state) for i in inputs})

    def _check(self, ids: set[int]) -> None:
        placed_states = [_placed_by_id.get(key) for key in ids]
        self._read = [placed for placed in placed_states if placed is not None and placed.is_in_place()]

    def successor(self, state: Any) -> Any:
        """The state that later calls read in place of one that the staged call has read."""
        return self._successors.get(id(state), state)

    def settle(self, inputs: Sequence[Any]) -> None:
        """Take the inputs of later calls, once the staged call has returned."""
        if self._successors:
            self._check({id(i.state) for i in inputs})
        self._successors = {}
        self.is_run = True

    def report(self) -> None:
        """Tell the staging around a call of the program where its states are: the outer program puts them
        there, too.
        """
        if _stagings.open:
            _stagings.open[-1]._add(self._places.values())

    def is_kept(self) -> bool:
        """Whether later calls run the program: it creates no states, or it is the second one."""
        return not self.states or (self.is_second and self.is_run and not self.is_returned)

    def is_awaiting(self) -> bool:
        """Whether the next call stages once more on its account."""
        return self.is_run and not self.is_kept()

    def can_run(self) -> bool:
        """Whether later calls may run the program, outside of other transforms."""
        return self.is_kept() and not any(place.is_lost() for place in self._places.values())

    def stores(self) -> list[Store] | None:
        """The stores after which every created state is in its places. None: Python has to run."""
        if not self.can_run() or not all(placed.is_in_place() for placed in self._read):
            return None
        frame = _frames.current_frame()
        if self.states and frame is not None and not (_is_transparent(frame) and self._have_values()):
            return None
        return [store for place in self._places.values() for store in place.stores()]

    def _have_values(self) -> bool:
        # A state without a value belongs to a call that failed, or to a trace of brainstate that has ended.
        return not any(kind.is_invalidated(state) for state, kind in self.states)


# Transforms that treat created states like written states.
_TRANSPARENT = frozenset(["jit", "remat", "grad", "vjp", "jvp", "linearize"])


def _is_transparent(frame: Any) -> bool:
    while frame is not None and isinstance(frame, _frames.Frame):
        if frame.name.partition("(")[0] not in _TRANSPARENT:
            return False
        frame = frame.parent
    return frame is None
