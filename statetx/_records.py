"""Records in JSON: written with a checksum, read as untrusted.

A check describes the types and ranges of a value. It is a function that takes the value and its place in the record,
and raises `ValueError` with both.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
from collections.abc import Callable, Mapping
from typing import Any, get_args, get_type_hints

from ._text import brief

Check = Callable[[Any, str], None]

_CHECKSUM = "sha256"
_MOST_LEVELS = 40  # of objects and lists in each other; a plan has 8


# -- files -----------------------------------------------------------------------------------------------------------


def dump(fields: Mapping[str, Any], indent: int | None = None) -> bytes:
    """A record as JSON, with its checksum."""
    return json.dumps({_CHECKSUM: _digest(fields), **fields}, indent=indent).encode()


def parse(content: bytes) -> dict[str, Any]:
    """The fields of JSON text, with the checksum and not yet checked.

    Raises:
        ValueError: it is not JSON, not an object, or nested so deeply that what checks, writes or prints it may fail.
    """
    try:
        fields = json.loads(content)
        is_flat = _has_levels(fields, _MOST_LEVELS)
    except RecursionError:
        is_flat = False
    if not is_flat:
        raise ValueError("it is nested too deeply")
    if not isinstance(fields, dict):
        raise ValueError("it is not a JSON object")
    return fields


def _has_levels(x: Any, most: int) -> bool:
    """Whether at most so many containers of JSON are in each other."""
    level = [x] if isinstance(x, (dict, list)) else []
    for _ in range(most):
        items = [item for held in level for item in (held.values() if isinstance(held, dict) else held)]
        level = [item for item in items if isinstance(item, (dict, list))]
    return not level


def verified(fields: dict[str, Any], check: Check) -> dict[str, Any]:
    """The fields of a record without the checksum.

    Raises:
        ValueError: the checksum does not match the fields, or a field has another type or range.
    """
    fields = dict(fields)
    if fields.pop(_CHECKSUM, None) != _digest(fields):
        raise ValueError("it has changed since it was written: its checksum fits other contents")
    check(fields, "")
    return fields


def _digest(fields: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


# -- types and ranges ------------------------------------------------------------------------------------------------


def whole(least: int = 0, most: int = 2**63 - 1) -> Check:
    def check(x: Any, path: str) -> None:
        if type(x) is not int or not least <= x <= most:
            _refuse(x, path, f"a whole number from {least} to {most}")

    return check


def real(least: float = -math.inf, most: float = math.inf, *, is_finite: bool = True) -> Check:
    """A number; NaN is none, and infinity only if `is_finite` is False."""

    def check(x: Any, path: str) -> None:
        is_number = isinstance(x, float) or (type(x) is int and abs(x) < 2**63)
        if not is_number or not least <= x <= most or (is_finite and math.isinf(x)):
            _refuse(x, path, f"a number from {least} to {most}")

    return check


def text(x: Any, path: str) -> None:
    if type(x) is not str:
        _refuse(x, path, "text")


def flag(x: Any, path: str) -> None:
    if type(x) is not bool:
        _refuse(x, path, "true or false")


def one_of(*values: Any) -> Check:
    def check(x: Any, path: str) -> None:
        if not any(type(x) is type(value) and x == value for value in values):
            _refuse(x, path, f"one of {', '.join(map(repr, values))}")

    return check


def optional(check: Check) -> Check:
    return lambda x, path: None if x is None else check(x, path)


def many(item: Check, least: int = 0) -> Check:
    """A list of any length of at least `least`."""

    def check(x: Any, path: str) -> None:
        if not isinstance(x, (list, tuple)) or len(x) < least:
            _refuse(x, path, f"a list of at least {least} items" if least else "a list")
        for i, value in enumerate(x):
            item(value, f"{path}[{i}]")

    return check


def row(*items: Check) -> Check:
    """A list of exactly these items."""

    def check(x: Any, path: str) -> None:
        if not isinstance(x, (list, tuple)) or len(x) != len(items):
            _refuse(x, path, f"a list of {len(items)} items")
        for i, (item, value) in enumerate(zip(items, x, strict=True)):
            item(value, f"{path}[{i}]")

    return check


def headed(head: Check, item: Check, least: int = 0) -> Check:
    """A list that begins with one item, and has at least `least` others."""

    def check(x: Any, path: str) -> None:
        many(lambda *_: None, 1 + least)(x, path)
        head(x[0], f"{path}[0]")
        for i, value in enumerate(x[1:], 1):
            item(value, f"{path}[{i}]")

    return check


def either(first: Check, second: Check) -> Check:
    def check(x: Any, path: str) -> None:
        try:
            first(x, path)
        except ValueError:
            second(x, path)

    return check


def mapping(value: Check) -> Check:
    """An object with any names."""

    def check(x: Any, path: str) -> None:
        if not isinstance(x, dict):
            _refuse(x, path, "an object")
        for name, item in x.items():
            text(name, f"a name in {path or 'it'}")
            value(item, f"{path}.{brief(name)}" if path else brief(name))

    return check


def record(needed: Mapping[str, Check], optional_fields: Mapping[str, Check] | None = None) -> Check:
    """An object with the needed names, perhaps with the optional ones, and with no more."""
    optional_fields = optional_fields or {}

    def check(x: Any, path: str) -> None:
        if not isinstance(x, dict):
            _refuse(x, path, "an object")
        prefix = f"{path}." if path else ""
        for name in needed:
            if name not in x:
                raise ValueError(f"{prefix}{name} is missing")
        for name, value in x.items():
            item = needed.get(name) or optional_fields.get(name)
            if item is None:
                raise ValueError(f"{prefix}{brief(name)} is not a field")
            item(value, f"{prefix}{name}")

    return check


def decoded_by(decode: Callable[[Any], Any]) -> Check:
    """Any value that `decode` accepts: it raises ValueError for others."""

    def check(x: Any, path: str) -> None:
        try:
            decode(x)
        except ValueError as e:
            raise ValueError(f"{path}: {e.args[0]}") from e

    return check


# -- dataclasses -----------------------------------------------------------------------------------------------------


def encoded(x: Any) -> Any:
    """A value as JSON: dataclasses as objects, tuples as lists, others by their `to_json`."""
    if hasattr(x, "to_json"):
        return x.to_json()
    if dataclasses.is_dataclass(x):
        return {f.name: encoded(getattr(x, f.name)) for f in dataclasses.fields(x)}
    return [encoded(item) for item in x] if isinstance(x, (list, tuple)) else x


def decoded(hint: Any, x: Any) -> Any:
    """The inverse of `encoded` for a checked value that is annotated with `hint`."""
    if hasattr(hint, "from_json"):
        return hint.from_json(x)
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return hint(**decoded_fields(hint, x))
    return tuple(decoded(get_args(hint)[0], item) for item in x) if isinstance(x, (list, tuple)) else x


def decoded_fields(cls: type, x: Mapping[str, Any]) -> dict[str, Any]:
    """The decoded fields of a dataclass, of those that an object in JSON has."""
    return {name: decoded(hint, x[name]) for name, hint in _hints(cls).items() if name in x}


_hints = functools.cache(get_type_hints)


def metadata(cls: type) -> dict[str, Any]:
    """Annotations of the attributes of a class, by name; those without are left out."""
    hints = get_type_hints(cls, include_extras=True)
    return {name: hint.__metadata__[0] for name, hint in hints.items() if hasattr(hint, "__metadata__")}


def _refuse(x: Any, path: str, what: str) -> None:
    raise ValueError(f"{path or 'it'} must be {what}, got {brief(x)}")
