"""States that a jitted function makes in each of its calls.

A function may make a state and leave it in an attribute: `brainstate.nn.init_all_states` in a training step does. When Python
runs it again, it makes another state, which replaces the first. A compiled program makes none: the state from the staging
stays and receives the value. Both are the same if two conditions hold.

- Python would make it again. Either the code makes it without a condition (`straight`), or a second staging found the state
  of an earlier call in that place, did not touch it, kept no reference to it, and put a new one there (`_obstacle`). A
  function that makes a state only if there is none yet does neither: its next program reads the one that is there.
- Nobody can distinguish the two. The attribute still holds the state, and nothing refers to it that did not when it was
  staged (`Made.is_current`); otherwise somebody has kept it and expects its value to stay, or has put another one in its
  place. References are counted, less those of programs. An error in this count costs another staging.
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
    """A program's list of states, told by its type from a list in which a user keeps them."""

    __slots__ = ()


class Place:
    """An attribute, and what it holds.

    Attributes:
        key: the owner's id and the attribute's name.
    """

    __slots__ = ("_owner", "_slot", "key", "name")

    def __init__(self, owner: Any, name: str):
        # A `types.SimpleNamespace` allows no weak reference; the function that stores into it has one to it anyway.
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
        return isinstance(other, Place) and self.key == other.key


class Item:
    """An item of a list, tuple or dict that an attribute holds."""

    __slots__ = ("_index", "container")
    key = None  # the `Place` of its container has one

    def __init__(self, container: Made, index: Any):
        self.container = container
        self._index = index

    def get(self) -> Any:
        try:
            return self.container.obj[self._index]
        except LookupError:
            return None


class Made:
    """A state that a jitted call made, or a container that holds some.

    Attributes:
        places: where it is.
        own: how many references programs have to it.
        others: how many there were besides when it was staged.
    """

    __slots__ = ("__weakref__", "obj", "others", "own", "places")

    def __init__(self, obj: Any):
        self.obj = obj
        self.places: list[Place | Item] = []
        self.own = 0
        self.others = 0
        _made[id(obj)] = self

    def count(self) -> int:
        """How many references there are besides those of programs and of the frames that are open."""
        num, frame = sys.getrefcount(self.obj) - _ALONE - self.own, _frames.current_frame()
        while frame is not None:
            num -= _frames.num_references(self.obj, frame)
            frame = frame.parent
        return num - sum(c.count() == 0 for c in self.containers())  # only we hold those

    def roots(self) -> Iterator[Place]:
        """The attributes that hold it, or a container that it is in."""
        for place in self.places:
            yield from (place,) if isinstance(place, Place) else place.container.roots()

    def add(self, place: Place | Item) -> None:
        if not (isinstance(place, Place) and any(place.is_same(p) for p in self.places)):
            self.places.append(place)

    def containers(self) -> list[Made]:
        return [place.container for place in self.places if isinstance(place, Item)]

    def settle(self) -> None:
        """Take what refers to it now for what shall."""
        self.others = self.count()
        for container in self.containers():
            container.settle()

    def stands(self) -> bool:
        """Whether it is where it was put."""
        return all(p.get() is self.obj for p in self.places) and all(c.stands() for c in self.containers())

    def is_current(self) -> bool:
        """Whether it is where it was put, and nobody has kept it besides."""
        num = self.count()
        if num == len(self.places):
            self.others = num  # what else referred to it has been collected
        return num == self.others and self.stands() and all(c.is_current() for c in self.containers())

    def is_kept(self) -> bool:
        """Whether somebody refers to it who did not when it was staged."""
        return self.count() > self.others or any(c.is_kept() for c in self.containers())

    def put_back(self) -> list[Store] | None:
        """Stores that put it where another call has put its own; None if something else has become of it."""
        if len(self.places) != self.others or self.containers():
            return None
        gone = [p for p in self.places if isinstance(p, Place) and p.get() is not self.obj]
        if self.count() != len(self.places) - len(gone) or any(type(p.get()) is not type(self.obj) for p in gone):
            return None
        return [p.store(self.obj) for p in gone]


_made: weakref.WeakValueDictionary[int, Made] = weakref.WeakValueDictionary()  # by id of the object
_ALONE = 0
_ALONE = Made(object()).count()


def of(obj: Any) -> Made | None:
    """What is known of an object that a jitted call has made."""
    made = _made.get(id(obj))
    return made if made is not None and made.obj is obj else None


def standing() -> list[tuple[Made, int]]:
    """What jitted calls have made that an attribute still holds, with the number of references to it."""
    return [(made, made.count()) for made in list(_made.values()) if made.places and made.stands()]


def _obstacle(made: Made, before: Sequence[tuple[Made, int]], touched: Set[int]) -> str:
    """Why another call may not put a state in the place of this one; "" if this call has put this one in such a place.

    It has found one there that an earlier call had made, did not touch it (`touched`: ids of states), and dropped it: of
    the references to it that there were `before`, those are gone that the earlier call had left.
    """
    roots = list(made.roots())
    if not roots:
        return "and no attribute keeps it"
    olds = [(old, num) for old, num in before if any(a.is_same(b) for a in roots for b in old.roots())]
    olds = [(old, num) for old, num in olds if isinstance(old.obj, type(made.obj)) and old is not made]
    if not olds:
        return "and keeps it in an object that it makes, too"
    if any(id(old.obj) in touched for old, _ in olds):
        return "and reads or writes the one of the call before"
    if any(num - old.count() != old.others for old, num in olds):
        return "and something still holds the one of the call before"
    return ""


def _are_unconditional(makes: Sequence[Made], notes: Notes) -> bool:
    """Whether the code makes all these in every run, whatever their places hold before it."""
    names = {place.name for m in makes for place in m.places if isinstance(place, Place)}
    for m in makes:
        note = notes.get(id(m.obj))
        if note is None or {p.key for p in m.places} != note.stores or note.names & names or not note.holds():
            return False
    return True


def notes_for_staging() -> Notes:
    """Notes for a frame to take, those of the function around where one that is staged is inside another."""
    outer = _frames.current_frame()
    return outer.on_created if outer is not None and isinstance(outer.on_created, Notes) else Notes()


class Making:
    """What a program makes, and what it uses of what others have made.

    Args:
        makes: what the call left behind that was staged; `notes` say how it was made.
        states: those that the program reads and writes, with their kinds.
        before: what stood when it was staged.

    Attributes:
        is_settled: whether another call would make all that `makes` holds, too, and put it in the same places.
        was_used: whether a call has run the program after the one that was staged.
        num_unused: how many programs before this one were staged in a row that no other call has run.
    """

    def __init__(
        self,
        makes: list[Made],
        states: dict[int, tuple[Any, Kind]],
        before: Sequence[tuple[Made, int]],
        notes: Notes,
    ):
        ids = {id(m.obj) for m in makes}
        self.makes = [(m, states[id(m.obj)][1]) for m in makes]
        others = [of(state) for key, (state, _) in states.items() if key not in ids]
        self.uses = [m for m in others if m is not None and m.places and m.stands()]
        self._obstacles = {id(m): _obstacle(m, before, states.keys() - ids) for m in makes}
        self._is_straight = bool(makes) and _are_unconditional(makes, notes)
        self.is_settled = not any(self._obstacles.values())
        self.was_used = False
        self.num_unused = 0

    def __bool__(self) -> bool:
        return bool(self.makes or self.uses)

    def own(self, program: Any, references: Sequence[Any]) -> None:
        """Count a program's references as its own while it lives."""
        numbers = collections.Counter(map(id, references))
        for m in (*(m for m, _ in self.makes), *self.uses):
            num = numbers[id(m.obj)]
            m.own += num
            weakref.finalize(program, _disown, m, num).atexit = False

    def advice(self, name: str) -> str:
        """What to say of a function of which every call is staged."""
        m, kind = next((x for x in self.makes if self._obstacles[id(x[0])]), self.makes[0])
        obstacle = self._obstacles[id(m)] or "and the caller keeps the one of the call before"
        return (
            f"{name} is staged again in every call: it makes {type(m.obj).__name__} (at {kind.site_of(m.obj)}) each time, "
            f"{obstacle}.\nA program that was staged once gives its values to the state of the call before, which here is not "
            f"what Python does.\nFix: make the state before the call and write it there; or assign it to an attribute of an "
            f"object that was there before, and keep it nowhere else."
        )

    def settle(self) -> None:
        """Take what refers to the states now for what shall."""
        for m, _ in self.makes:
            m.settle()
        if not self.is_settled and self._is_straight:
            self.is_settled = self._are_alone() or bool(gc.collect()) and self._are_alone()

    def _are_alone(self) -> bool:
        return all(m.count() == len(m.places) for m, _ in self.makes)

    def may_run(self) -> bool:
        """Whether the program may run another call, now or when what it uses is back in its place."""
        return not self.makes or self.moves() is not None

    def moves(self) -> list[Store] | None:
        """What a call has to do besides storing values, so that all states are where the function would leave them.

        None: no program can do that, Python has to run.
        """
        if not (self.is_settled and all(m.stands() for m in self.uses)):
            return None
        frame = _frames.current_frame()
        if self.makes and frame is not None and not (_is_transparent(frame) and self._have_values()):
            return None
        moves: list[Store] = []
        for m, _ in self.makes:
            move = [] if m.is_current() else m.put_back()
            if move is None:
                return None
            moves += move
        return moves

    def _have_values(self) -> bool:
        # One that lost its value belongs to a call that failed, or to a trace of brainstate's that has ended.
        return not any(kind.is_invalidated(m.obj) for m, kind in self.makes)


def _disown(made: Made, num: int) -> None:
    made.own -= num


# Transforms that treat a state which their function makes as they do one that it writes.
_TRANSPARENT = frozenset(["jit", "remat", "grad", "vjp", "jvp", "linearize"])


def _is_transparent(frame: Any) -> bool:
    while frame is not None and isinstance(frame, _frames.Frame):
        if frame.name.partition("(")[0] not in _TRANSPARENT:
            return False
        frame = frame.parent
    return frame is None


# -- where they are --------------------------------------------------------------------------------------------

_DEPTH = 3  # a state in a tuple in a dict


def left_by(frame: _frames.Frame, notes: Notes) -> list[Made]:
    """The states that a call has made and left behind, to be asked for when it has returned."""
    made = _find(frame)
    if not _are_unconditional(made, notes):
        made.clear()
        gc.collect()  # what only a cycle holds is no effect of the call
        made = _find(frame)
    return made


def _find(frame: _frames.Frame) -> list[Made]:
    states = [of(state) or Made(state) for state, _ in frame.created()]
    found = {id(m.obj): m for m in states}
    for m in states:
        m.places = []
    level = states
    for _ in range(_DEPTH):
        level = _find_holders(level, found) if level else []
    for m in found.values():
        m.places = [p for p in m.places if isinstance(p, Place) or any(True for _ in p.container.roots())]
    return states


def _find_holders(level: Sequence[Made], found: dict[int, Made]) -> list[Made]:
    """Note where objects are; returns the containers among these places that are met for the first time."""
    objs = {id(m.obj): m for m in level}
    containers: list[Made] = []
    for holder, owner in _holders(level):
        if type(owner) not in (dict, list, tuple):
            for name, x in _attributes(owner):
                if id(x) in objs:
                    objs[id(x)].add(Place(owner, name))
            continue
        container = found.get(id(holder))
        if container is None:
            container = found[id(holder)] = of(holder) or Made(holder)
            container.places = []
            containers.append(container)
        for key, x in holder.items() if isinstance(holder, dict) else enumerate(holder):
            if id(x) in objs:
                objs[id(x)].add(Item(container, key))
    return containers


def _holders(level: Sequence[Made]) -> list[tuple[Any, Any]]:
    """What refers to objects, each with the object whose attributes it holds if it is such a dict, else with itself."""
    holders = gc.get_referrers(*(m.obj for m in level))
    dicts = [h for h in holders if type(h) is dict]
    owners = {id(_dict_of(o)): o for o in gc.get_referrers(*dicts)} if dicts else {}
    pairs = [(h, owners.get(id(h), h) if type(h) is dict else h) for h in holders]
    return [(h, o) for h, o in pairs if package_of(type(o).__module__) != "statetx"]


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
