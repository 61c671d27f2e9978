"""Records in JSON: written with a checksum, and read as if anybody had written them.

A check describes the types and ranges of a value. It is a function that takes the value and its place in the record,
and raises `ValueError` with both.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from typing import Any, get_type_hints

from ._text import brief

Check = Callable[[Any, str], None]

_CHECKSUM = "sha256"


# -- files -----------------------------------------------------------------------------------------------------------


def dump(fields: Mapping[str, Any], indent: int | None = None) -> bytes:
    """A record as JSON, with its checksum."""
    return json.dumps({_CHECKSUM: _digest(fields), **fields}, indent=indent).encode()


def parse(content: bytes) -> dict[str, Any]:
    """The fields of JSON text, with the checksum and not yet checked.

    Raises:
        ValueError: it is not JSON, or not an object.
    """
    try:
        fields = json.loads(content)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(fields, dict):
        raise ValueError("it is not a JSON object")
    return fields


def verified(fields: dict[str, Any], check: Check) -> dict[str, Any]:
    """The fields of a record without the checksum.

    Raises:
        ValueError: the checksum is not that of the fields, or a field has another type or range.
    """
    fields = dict(fields)
    if fields.pop(_CHECKSUM, None) != _digest(fields):
        raise ValueError("it has changed since it was written: its checksum is that of other contents")
    check(fields, "")
    return fields


def _digest(fields: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


# -- types and ranges ------------------------------------------------------------------------------------------------


def whole(least: int = 0, most: int = 2**63 - 1) -> Check:
    def check(x: Any, at: str) -> None:
        if type(x) is not int or not least <= x <= most:
            _refuse(x, at, f"a whole number from {least} to {most}")

    return check


def real(least: float = -math.inf, most: float = math.inf, *, is_finite: bool = True) -> Check:
    """A number; NaN is none, and infinity only if `is_finite` is False."""

    def check(x: Any, at: str) -> None:
        is_number = isinstance(x, float) or (type(x) is int and abs(x) < 2**63)
        if not is_number or not least <= x <= most or (is_finite and math.isinf(x)):
            _refuse(x, at, f"a number from {least} to {most}")

    return check


def text(x: Any, at: str) -> None:
    if type(x) is not str:
        _refuse(x, at, "text")


def flag(x: Any, at: str) -> None:
    if type(x) is not bool:
        _refuse(x, at, "true or false")


def one_of(*values: Any) -> Check:
    def check(x: Any, at: str) -> None:
        if not any(type(x) is type(value) and x == value for value in values):
            _refuse(x, at, f"one of {', '.join(map(repr, values))}")

    return check


def optional(check: Check) -> Check:
    return lambda x, at: None if x is None else check(x, at)


def many(item: Check, least: int = 0) -> Check:
    """A list of any length of at least `least`."""

    def check(x: Any, at: str) -> None:
        if not isinstance(x, (list, tuple)) or len(x) < least:
            _refuse(x, at, f"a list of at least {least} items" if least else "a list")
        for i, value in enumerate(x):
            item(value, f"{at}[{i}]")

    return check


def row(*items: Check) -> Check:
    """A list of exactly these items."""

    def check(x: Any, at: str) -> None:
        if not isinstance(x, (list, tuple)) or len(x) != len(items):
            _refuse(x, at, f"a list of {len(items)} items")
        for i, (item, value) in enumerate(zip(items, x, strict=True)):
            item(value, f"{at}[{i}]")

    return check


def headed(head: Check, item: Check, least: int = 0) -> Check:
    """A list that begins with one item, and has at least `least` others."""

    def check(x: Any, at: str) -> None:
        many(lambda *_: None, 1 + least)(x, at)
        head(x[0], f"{at}[0]")
        for i, value in enumerate(x[1:], 1):
            item(value, f"{at}[{i}]")

    return check


def either(first: Check, second: Check) -> Check:
    def check(x: Any, at: str) -> None:
        try:
            first(x, at)
        except ValueError:
            second(x, at)

    return check


def mapping(value: Check) -> Check:
    """An object with any names."""

    def check(x: Any, at: str) -> None:
        if not isinstance(x, dict):
            _refuse(x, at, "an object")
        for name, item in x.items():
            text(name, f"a name in {at or 'it'}")
            value(item, f"{at}.{brief(name)}" if at else brief(name))

    return check


def record(needed: Mapping[str, Check], other: Mapping[str, Check] | None = None) -> Check:
    """An object with these names, perhaps with the other ones, and with no more."""
    other = other or {}

    def check(x: Any, at: str) -> None:
        if not isinstance(x, dict):
            _refuse(x, at, "an object")
        prefix = f"{at}." if at else ""
        for name in needed:
            if name not in x:
                raise ValueError(f"{prefix}{name} is missing")
        for name, value in x.items():
            item = needed.get(name) or other.get(name)
            if item is None:
                raise ValueError(f"{prefix}{brief(name)} is not a field")
            item(value, f"{prefix}{name}")

    return check


def decoded_by(decode: Callable[[Any], Any]) -> Check:
    """Whatever a function takes that raises ValueError for all else."""

    def check(x: Any, at: str) -> None:
        try:
            decode(x)
        except ValueError as e:
            raise ValueError(f"{at}: {e.args[0]}") from e

    return check


def metadata(cls: type) -> dict[str, Any]:
    """Annotations of the attributes of a class, by name; those without are left out."""
    hints = get_type_hints(cls, include_extras=True)
    return {name: hint.__metadata__[0] for name, hint in hints.items() if hasattr(hint, "__metadata__")}


def _refuse(x: Any, at: str, what: str) -> None:
    raise ValueError(f"{at or 'it'} must be {what}, got {brief(x)}")
