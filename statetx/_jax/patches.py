"""Changes that importing statetx makes in JAX, or in a library once a program imports it, each with its reason.

The page `docs/imports.md` shows this list, and a test compares them.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Patch(NamedTuple):
    """One changed name of another library.

    Attributes:
        name: the qualified name, which begins with the library's.
        reason: why the library's own behavior is not enough, and which behavior is unchanged.
    """

    name: str
    reason: str


changes: list[Patch] = []
_slots: dict[tuple[Any, str], Any] = {}


def replace(name: str, owner: Any, value: Any, reason: str, *, is_content: bool = False) -> None:
    """Replace a function or property of a library by `value`, and note the change.

    Args:
        is_content: whether it is a slot that may hold the user's objects, which `members` still finds.
    """
    member = name.rpartition(".")[2]
    if is_content:
        _slots[owner, member] = vars(owner)[member]
    setattr(owner, member, value)
    note(name, reason)


def members(cls: type) -> dict[str, Any]:
    """Members that a class defines itself, by name, with slots as its library wrote them."""
    return {name: _slots.get((cls, name), value) for name, value in vars(cls).items()}


def note(name: str, reason: str) -> None:
    changes.append(Patch(name, reason))
