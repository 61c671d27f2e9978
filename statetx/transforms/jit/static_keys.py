"""Cache keys of static arguments, which keep no model alive.

Programs are looked up by the static arguments of a call. A model among them must remain collectable, and its programs,
with the states in them, must be dropped with it. So a key refers weakly to each object that it compares by identity.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import types
import weakref
from collections.abc import Hashable, Iterator
from typing import Any

from ..._objects.contents import attributes, has_parts
from ..._objects.paths import holds_states
from ..._tree import container_key, freeze, is_hashable


def static_key(x: Any) -> Hashable:
    """`freeze` of a static argument, with weak references to objects that are compared by identity.

    An object is compared by identity if its class does not define equality, if it cannot be hashed, or if it holds
    states: two equal models are two keys. Whether an object with its own equality holds states is checked when the key
    is stored. An object that cannot be hashed and holds no states is a record that may change: its attributes must be
    the same, too.
    """
    return freeze(x, _stand_for)


def _stand_for(x: Any, records: tuple[int, ...] = ()) -> Hashable:
    """The key of a leaf; `records`: the ids of the records that it is an attribute of."""
    cls = type(x)
    if x is None or cls is str:
        return (cls, x)
    if cls is types.MethodType:  # a new object at each attribute access
        leaf_key = functools.partial(_stand_for, records=records)
        return (cls, freeze(x.__self__, leaf_key), freeze(x.__func__, leaf_key))
    if cls.__eq__ is object.__eq__:
        try:
            return (cls, weakref.ref(x))
        except TypeError:
            return HeldKey(x, by_identity=True)
    if not is_hashable(x):
        key = container_key(x, functools.partial(_stand_for, records=records))
        if key is not None:
            return key
        return HeldKey(x, by_identity=True, attributes=_attributes(x, records))
    return HeldKey(x, by_identity=False) if has_parts(x) else (cls, x)


def _attributes(x: Any, records: tuple[int, ...]) -> Hashable:
    """A key for the attributes of an object; None if it is compared by identity alone, or is an attribute of its own
    attributes.
    """
    if not has_parts(x) or id(x) in records:
        return None
    return freeze(list(attributes(x)), functools.partial(_stand_for, records=(*records, id(x))))


class HeldKey:
    """The part of a key for an object. Holds it strongly until the key is stored, and longer only to compare by
    equality.

    Attributes:
        attributes: a key for the object's attributes, which must be the same; None if they need not.
    """

    __slots__ = ("_hash", "is_weak", "_obj", "attributes", "by_identity")

    def __init__(self, obj: Any, *, by_identity: bool, attributes: Hashable = None):
        self._obj = obj
        self.is_weak = False
        self.attributes = attributes
        self._hash = id(obj) if by_identity else hash(obj)
        self.by_identity = by_identity

    @property
    def obj(self) -> Any:
        """The object; None if it has been collected."""
        return self._obj() if self.is_weak else self._obj

    def settle(self) -> None:
        """Compare by identity alone if the object holds states; then hold it weakly, if its class allows that."""
        if self.attributes is not None or not self.by_identity:
            has_states = holds_states(self._obj)
            self.by_identity = self.by_identity or has_states
            self.attributes = None if has_states else self.attributes
        if self.by_identity:
            with contextlib.suppress(TypeError):  # it allows no weak references
                self._obj, self.is_weak = weakref.ref(self._obj), True

    @property
    def is_alone(self) -> bool:
        """Whether this holds the last reference to the object, whose class allows no weak references."""
        return self.by_identity and not self.is_weak and self._count() <= _ALONE

    def _count(self) -> int:
        return sys.getrefcount(self._obj)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if type(other) is not HeldKey:
            return False
        obj, other_obj = self.obj, other.obj
        if obj is other_obj:
            is_record = self.attributes is not None and other.attributes is not None
            return obj is not None and (not is_record or self.attributes == other.attributes)
        return not (self.by_identity or other.by_identity) and type(obj) is type(other_obj) and obj == other_obj


# References to an object that only a `HeldKey` refers to.
_ALONE = HeldKey(object(), by_identity=True)._count()


def parts(key: Any) -> Iterator[Any]:
    """The parts of a key that refer to objects: each a `HeldKey` or a weak reference."""
    if isinstance(key, (tuple, frozenset)):
        for part in key:
            yield from parts(part)
    elif isinstance(key, (HeldKey, weakref.ref)):
        yield key
        if isinstance(key, HeldKey):
            yield from parts(key.attributes)
