"""States that a jitted function creates in each of its calls.

A function may create a state and store it in an attribute, as `brainstate.nn.init_all_states` in a training step does. When
Python runs the function again, it creates a new state, which replaces the first. A compiled program creates none: the state
from the staging stays and receives the value. The two are equivalent under two conditions (decision 16).

- Python would create the state again. There are two proofs. The code creates it without a condition (`straight`); or a second
  staging found the state of an earlier call in that place, did not touch it, kept no reference to it, and put a new state
  there (`_obstacle`). A function that creates a state only if there is none yet passes neither: its next program reads the
  existing state.
- Nobody can distinguish the two states. The attribute still holds the state, and nothing refers to it that did not when it was
  staged (`Created.is_current`). Otherwise somebody has kept it and expects its value to stay, or has put another one in its
  place. Python's reference counts show this, after references of programs are subtracted. An error in the count costs
  another staging, not a wrong value.
"""

from __future__ import annotations

import collections
import gc
import sys
import types
import weakref
from collections.abc import Iterator, Sequence, Set
from typing import Any

from ... import _frames
from ..._atomic import Store
from ..._objects.contents import package_of
from ..._states import Kind
from .straight import Notes


class States(list):
    """A program's list of states; the type distinguishes it from a user's list when referrers are searched."""

    __slots__ = ()


class AttributePlace:
    """An attribute of an object, which holds a state or a container.

    Attributes:
        key: the owner's id and the attribute's name.
    """

    __slots__ = ("_owner", "_slot", "key", "name")

    def __init__(self, owner: Any, name: str):
        # A `types.SimpleNamespace` allows no weak references; the function that stores into it keeps it alive anyway.
        self._owner: Any = weakref.ref(owner) if type(owner).__weakrefoffset__ else lambda: owner
        self._slot = _slots(type(owner)).get(name)
        self.key = (id(owner), name)
        self.name = name

    def get(self) -> Any:
        owner = self._owner()
        if owner is None:
            return None
        return vars(owner).get(self.name) if self._slot is None else _read(self._slot, owner)

    def store(self, obj: Any) -> Store:
        return object.__setattr__, self._owner(), self.name, obj

    def is_same(self, other: Any) -> bool:
        return isinstance(other, AttributePlace) and self.key == other.key


class ItemPlace:
    """An item of a list, tuple or dict that an attribute holds."""

    __slots__ = ("_index", "container")
    key = None  # only an `AttributePlace` has a key

    def __init__(self, container: Created, index: Any):
        self.container = container
        self._index = index

    def get(self) -> Any:
        try:
            return self.container.obj[self._index]
        except LookupError:
            return None


class Created:
    """A state that a jitted call created, or a container that holds such states.

    Attributes:
        places: the attributes and items that hold it.
        num_program_refs: number of references from programs.
        num_user_refs: number of all other references when it was last staged, except those of open frames.
    """

    __slots__ = ("__weakref__", "num_program_refs", "num_user_refs", "obj", "places")

    def __init__(self, obj: Any):
        self.obj = obj
        self.places: list[AttributePlace | ItemPlace] = []
        self.num_program_refs = 0
        self.num_user_refs = 0
        _created_by_id[id(obj)] = self

    def count_user_refs(self) -> int:
        """The present number of references, except those of programs and open frames."""
        num, frame = sys.getrefcount(self.obj) - _ALONE - self.num_program_refs, _frames.current_frame()
        while frame is not None:
            num -= _frames.num_references(self.obj, frame)
            frame = frame.parent
        return num - sum(c.count_user_refs() == 0 for c in self.containers())  # containers held by us only

    def roots(self) -> Iterator[AttributePlace]:
        """The attributes that hold it, directly or through containers."""
        for place in self.places:
            yield from (place,) if isinstance(place, AttributePlace) else place.container.roots()

    def add(self, place: AttributePlace | ItemPlace) -> None:
        if not (isinstance(place, AttributePlace) and any(place.is_same(p) for p in self.places)):
            self.places.append(place)

    def containers(self) -> list[Created]:
        return [place.container for place in self.places if isinstance(place, ItemPlace)]

    def record_references(self) -> None:
        """Record the present number of references as the expected one."""
        self.num_user_refs = self.count_user_refs()
        for container in self.containers():
            container.record_references()

    def is_in_place(self) -> bool:
        """Whether all its places still hold it."""
        return all(place.get() is self.obj for place in self.places) and all(
            container.is_in_place() for container in self.containers()
        )

    def is_current(self) -> bool:
        """Whether all its places still hold it, and nobody has kept another reference."""
        num = self.count_user_refs()
        if num == len(self.places):  # every place, and nothing else
            self.num_user_refs = num  # other referrers have been collected
        return num == self.num_user_refs and self.is_in_place() and all(c.is_current() for c in self.containers())

    def restoring_stores(self) -> list[Store] | None:
        """Stores that put it back in place of the state of another program's call; None if anything else has changed."""
        if len(self.places) != self.num_user_refs or self.containers():
            return None
        emptied = [place for place in self.places if isinstance(place, AttributePlace) and place.get() is not self.obj]
        if self.count_user_refs() != len(self.places) - len(emptied) or any(
            type(place.get()) is not type(self.obj) for place in emptied
        ):
            return None
        return [place.store(self.obj) for place in emptied]


_created_by_id: weakref.WeakValueDictionary[int, Created] = weakref.WeakValueDictionary()  # by id of the object
# References to an object that only its `Created` holds. Measured: the number depends on how Python passes arguments.
_ALONE = 0
_ALONE = Created(object()).count_user_refs()


def find(obj: Any) -> Created | None:
    """The record of an object that a jitted call has created; None for another object."""
    created = _created_by_id.get(id(obj))
    return created if created is not None and created.obj is obj else None


def all_in_place() -> list[tuple[Created, int]]:
    """All created objects that still are in their places, with the number of references to each."""
    return [
        (created, created.count_user_refs())
        for created in list(_created_by_id.values())
        if created.places and created.is_in_place()
    ]


def _obstacle(created: Created, earlier: Sequence[tuple[Created, int]], touched: Set[int]) -> str:
    """Why a second staging does not prove that every call creates this state; "" if it does prove it.

    It does if the call found the state of an earlier call in the same place, did not touch it (`touched`: ids of states), and
    dropped it: of the references in `earlier`, which were counted before the call, those recorded by the earlier call are gone.
    """
    roots = list(created.roots())
    if not roots:
        return "and no attribute keeps it"
    replaced = [(old, num) for old, num in earlier if any(a.is_same(b) for a in roots for b in old.roots())]
    replaced = [(old, num) for old, num in replaced if isinstance(old.obj, type(created.obj)) and old is not created]
    if not replaced:
        return "and keeps it in an object that it also creates"
    if any(id(old.obj) in touched for old, _ in replaced):
        return "and reads or writes the state of the previous call"
    if any(num - old.count_user_refs() != old.num_user_refs for old, num in replaced):
        return "and something still holds the state of the previous call"
    return ""


def _are_unconditional(new_states: Sequence[Created], notes: Notes) -> bool:
    """Whether the code creates all these in every run, whatever their places hold before it."""
    names = {place.name for created in new_states for place in created.places if isinstance(place, AttributePlace)}
    for created in new_states:
        note = notes.get(id(created.obj))
        if note is None or {p.key for p in created.places} != note.stores or note.names & names or not note.holds():
            return False
    return True


def notes_for_staging() -> Notes:
    """The notes of the enclosing staged function, so that it sees states created inside; else new notes."""
    outer = _frames.current_frame()
    return outer.on_created if outer is not None and isinstance(outer.on_created, Notes) else Notes()


class CreatedStates:
    """The states that a program creates, and those created by other programs that it uses.

    Args:
        new_states: the states that the staged call created and that outlive it; `notes` say how they were created.
        states: all states that the program reads and writes, with their kinds.
        earlier: `all_in_place` before the staging.

    Attributes:
        states: the created states, with their kinds.
        used: states created by other programs that this one reads or writes.
        is_repeated: whether every call would create these states again and put them in the same places.
        was_used: whether a call other than the staged one has run the program; True for a program that is staged to be looked at.
        num_unused: number of programs staged in a row before this one that were run by their staged call only.
    """

    def __init__(
        self,
        new_states: list[Created],
        states: dict[int, tuple[Any, Kind]],
        earlier: Sequence[tuple[Created, int]],
        notes: Notes,
    ):
        ids = {id(created.obj) for created in new_states}
        self.states = [(created, states[id(created.obj)][1]) for created in new_states]
        used = [find(state) for key, (state, _) in states.items() if key not in ids]
        self.used = [created for created in used if created is not None and created.places and created.is_in_place()]
        self._obstacles = {id(created): _obstacle(created, earlier, states.keys() - ids) for created in new_states}
        self._is_straight = bool(new_states) and _are_unconditional(new_states, notes)
        self.is_repeated = not any(self._obstacles.values())
        self.was_used = False
        self.num_unused = 0

    def __bool__(self) -> bool:
        return bool(self.states or self.used)

    def register_references(self, program: Any, references: Sequence[Any]) -> None:
        """Count a program's references separately from the user's until the program is collected."""
        counts = collections.Counter(map(id, references))
        for created in (*(created for created, _ in self.states), *self.used):
            num = counts[id(created.obj)]
            created.num_program_refs += num
            weakref.finalize(program, _unregister, created, num).atexit = False

    def advice(self, name: str) -> str:
        """The warning for a function that is staged in every call."""
        created, kind = next((x for x in self.states if self._obstacles[id(x[0])]), self.states[0])
        obstacle = self._obstacles[id(created)] or "and the caller keeps the state of the previous call"
        return (
            f"{name} is staged again in every call: it creates {type(created.obj).__name__} (at {kind.site_of(created.obj)}) each time, "
            f"{obstacle}.\nA program that is staged once would give its values to the state of the previous call, which differs "
            f"from plain Python here.\nFix: create the state before the call and write it there; or assign it to an attribute "
            f"of an object that exists before the call, and keep it nowhere else."
        )

    def record_references(self) -> None:
        """Record the present references to the states as the expected ones."""
        for created, _ in self.states:
            created.record_references()
        if not self.is_repeated and self._is_straight:  # garbage may still refer to a state: collect it only if needed
            self.is_repeated = self._are_unshared() or bool(gc.collect()) and self._are_unshared()

    def _are_unshared(self) -> bool:
        return all(created.count_user_refs() == len(created.places) for created, _ in self.states)

    def can_run(self) -> bool:
        """Whether the program can run another call, with the states that it creates put back in their places."""
        return not self.states or self.attribute_stores() is not None

    def attribute_stores(self) -> list[Store] | None:
        """The attribute stores of a call, after which every created state is in the place where Python would put it.

        None: not possible, Python has to run.
        """
        if not (self.is_repeated and all(created.is_in_place() for created in self.used)):
            return None
        frame = _frames.current_frame()
        if self.states and frame is not None and not (_is_transparent(frame) and self._have_values()):
            return None
        stores: list[Store] = []
        for created, _ in self.states:
            state_stores = [] if created.is_current() else created.restoring_stores()
            if state_stores is None:
                return None
            stores += state_stores
        return stores

    def _have_values(self) -> bool:
        # A state without a value belongs to a call that failed, or to a trace of brainstate that has ended.
        return not any(kind.is_invalidated(created.obj) for created, kind in self.states)


def _unregister(created: Created, num: int) -> None:
    created.num_program_refs -= num


# Transforms that treat created states like written states.
_TRANSPARENT = frozenset(["jit", "remat", "grad", "vjp", "jvp", "linearize"])


def _is_transparent(frame: Any) -> bool:
    while frame is not None and isinstance(frame, _frames.Frame):
        if frame.name.partition("(")[0] not in _TRANSPARENT:
            return False
        frame = frame.parent
    return frame is None


# -- places of the states --------------------------------------------------------------------------------------

_DEPTH = 3  # levels of places: a state in a tuple in a dict in an attribute


def created_by(frame: _frames.Frame, notes: Notes) -> list[Created]:
    """The states that a call has created and that outlive it; to be called when its function has returned."""
    created = _locate(frame)
    if not _are_unconditional(created, notes):
        created.clear()
        gc.collect()  # a state that only a reference cycle holds is not an effect of the call
        created = _locate(frame)
    return created


def _locate(frame: _frames.Frame) -> list[Created]:
    """The states created under a frame, with their places."""
    states = [find(state) or Created(state) for state, _ in frame.created()]
    by_id = {id(created.obj): created for created in states}
    for created in states:
        created.places = []
    level = states
    for _ in range(_DEPTH):
        level = _add_places(level, by_id) if level else []
    for created in by_id.values():
        created.places = [
            p for p in created.places if isinstance(p, AttributePlace) or any(True for _ in p.container.roots())
        ]
    return states


def _add_places(level: Sequence[Created], by_id: dict[int, Created]) -> list[Created]:
    """Record the places of objects; returns the containers among them that are new in `by_id`."""
    objs = {id(created.obj): created for created in level}
    containers: list[Created] = []
    for holder, owner in _holders(level):
        if type(owner) not in (dict, list, tuple):
            for name, x in _attributes(owner):
                if id(x) in objs:
                    objs[id(x)].add(AttributePlace(owner, name))
            continue
        container = by_id.get(id(holder))
        if container is None:
            container = by_id[id(holder)] = find(holder) or Created(holder)
            container.places = []
            containers.append(container)
        for key, x in holder.items() if isinstance(holder, dict) else enumerate(holder):
            if id(x) in objs:
                objs[id(x)].add(ItemPlace(container, key))
    return containers


def _holders(level: Sequence[Created]) -> list[tuple[Any, Any]]:
    """The referrers of objects, each with its owner: for an attribute dict the object that it belongs to, else itself."""
    holders = gc.get_referrers(*(created.obj for created in level))
    dicts = [holder for holder in holders if type(holder) is dict]
    owners = {id(_dict_of(owner)): owner for owner in gc.get_referrers(*dicts)} if dicts else {}
    pairs = [(holder, owners.get(id(holder), holder) if type(holder) is dict else holder) for holder in holders]
    return [(holder, owner) for holder, owner in pairs if package_of(type(owner).__module__) != "statetx"]


def _attributes(owner: Any) -> Iterator[tuple[str, Any]]:
    yield from list((_dict_of(owner) or {}).items())
    for name, slot in _slots(type(owner)).items():
        yield name, _read(slot, owner)


def _dict_of(obj: Any) -> Any:
    try:
        return object.__getattribute__(obj, "__dict__")
    except AttributeError:
        return None


def _slots(cls: type) -> dict[str, Any]:
    slots = [(k, v) for c in reversed(cls.__mro__) for k, v in vars(c).items()]
    return {k: v for k, v in slots if isinstance(v, types.MemberDescriptorType)}


def _read(slot: Any, owner: Any) -> Any:
    try:
        return slot.__get__(owner)
    except AttributeError:
        return None
