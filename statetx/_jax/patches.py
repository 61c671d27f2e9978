"""Changes that importing statetx makes in JAX, and in brainstate or flax once a program imports it, each with its reason.

The page `docs/imports.md` shows this list, and a test compares them.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Change(NamedTuple):
    """One changed name of another library.

    Attributes:
        target: the qualified name, which begins with the library's.
        reason: why the library's own behavior is not enough, and which behavior is unchanged.
    """

    target: str
    reason: str


changes: list[Change] = []


def replace(target: str, owner: Any, value: Any, reason: str) -> None:
    """Replace a function or property of a library by `value`, and note the change."""
    setattr(owner, target.rpartition(".")[2], value)
    note(target, reason)


def note(target: str, reason: str) -> None:
    changes.append(Change(target, reason))
