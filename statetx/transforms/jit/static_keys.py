"""Static arguments as keys: what a program is told apart by, without keeping models alive.

A program is found again by the static arguments of a call. A model among them shall die as if it had never been an argument,
and its programs, with the states in them, shall go with it. So a key refers weakly to what it stands for by identity.
"""

from __future__ import annotations

import contextlib
import sys
import types
import weakref
from collections.abc import Hashable, Iterator
from typing import Any

from ..._objects.contents import has_parts
from ..._objects.paths import holds_states
from ..._tree import freeze


def static_key(x: Any) -> Hashable:
    """`freeze` of a static argument, with objects that go by identity referred to weakly.

    An object goes by identity if it has no equality of its own, cannot be hashed, or holds states: two models are two,
    however equal they are. Whether one with an equality of its own holds states is found out when the key is kept.
    """
    return freeze(x, _stand_for)


def _stand_for(x: Any) -> Hashable:
    cls = type(x)
    if x is None or cls is str:
        return (cls, x)
    if cls is types.MethodType:  # made whenever it is looked up
        return (cls, static_key(x.__self__), static_key(x.__func__))
    if cls.__eq__ is object.__eq__:
        try:
            return (cls, weakref.ref(x))
        except TypeError:
            return Held(x, by_identity=True)
    try:
        hash(x)
    except TypeError:
        return Held(x, by_identity=True)
    return Held(x, by_identity=False) if has_parts(x) else (cls, x)


class Held:
    """The part of a key that stands for an object; holds it until the key is kept, and longer if it goes by equality."""

    __slots__ = ("_hash", "is_weak", "_obj", "by_identity")

    def __init__(self, obj: Any, *, by_identity: bool):
        self._obj = obj
        self.is_weak = False
        self._hash = id(obj) if by_identity else hash(obj)
        self.by_identity = by_identity

    @property
    def obj(self) -> Any:
        """The object; None if it is no more."""
        return self._obj() if self.is_weak else self._obj

    def settle(self) -> None:
        """Go by identity if the object holds states, and hold it weakly then, where it allows that."""
        self.by_identity = self.by_identity or holds_states(self._obj)
        if self.by_identity:
            with contextlib.suppress(TypeError):  # it allows no weak references
                self._obj, self.is_weak = weakref.ref(self._obj), True

    @property
    def is_alone(self) -> bool:
        """Whether nobody else holds the object, which allows no weak reference."""
        return self.by_identity and not self.is_weak and self._count() <= _ALONE

    def _count(self) -> int:
        return sys.getrefcount(self._obj)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if type(other) is not Held:
            return False
        mine, theirs = self.obj, other.obj
        if mine is theirs:
            return mine is not None
        return not (self.by_identity or other.by_identity) and type(mine) is type(theirs) and mine == theirs


_ALONE = Held(object(), by_identity=True)._count()


def _parts(key: Any) -> Iterator[Any]:
    """The parts of a key that stand for objects: a `Held`, or a weak reference."""
    if isinstance(key, (tuple, frozenset)):
        for part in key:
            yield from _parts(part)
    elif isinstance(key, (Held, weakref.ref)):
        yield key


class Programs(dict[Hashable, list]):
    """Programs by the keys of calls; bounded, the oldest out first. Those for an object that is no more are dropped.

    A state that refers to its model keeps both until then, since a program holds its states.
    """

    def __init__(self, size: int):
        super().__init__()
        self._size = size
        self._watches: dict[Hashable, list[weakref.ref]] = {}

    def keep(self, key: Hashable, programs: list) -> None:
        """Put programs under a key; for one thread at a time."""
        if key not in self:
            self._drop_abandoned()
            while len(self) >= self._size:
                self._forget(self._oldest())
            self._watch(key)
        self[key] = programs

    def clear(self) -> None:
        super().clear()
        self._watches.clear()

    def _watch(self, key: Hashable) -> None:
        mine = weakref.ref(self)

        def forget(_: Any) -> None:
            programs = mine()
            if programs is not None:
                programs._forget(key)

        watches = []
        for part in _parts(key):
            if isinstance(part, Held):
                part.settle()
            obj = part() if isinstance(part, weakref.ref) else part.obj if part.is_weak else None
            if obj is not None:
                watches.append(weakref.ref(obj, forget))
        if watches:
            self._watches[key] = watches

    def _forget(self, key: Hashable) -> None:
        self.pop(key, None)
        self._watches.pop(key, None)

    def _drop_abandoned(self) -> None:
        for key in list(self):
            if any(isinstance(part, Held) and part.is_alone for part in _parts(key)):
                self._forget(key)

    def _oldest(self) -> Hashable:
        while True:
            with contextlib.suppress(RuntimeError):  # an object has died between the two
                return next(iter(self), None)
