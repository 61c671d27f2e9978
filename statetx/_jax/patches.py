"""What importing statetx changes in JAX, and in brainstate or flax once a program imports that: a list, each with its reason.

The page "What importing statetx changes" of the documentation shows this list, and a test compares them.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Change(NamedTuple):
    """A name of another library that stands for something of ours.

    Attributes:
        target: the name, from its library's on.
        reason: why the library's own way is not enough, and what stays as it was.
    """

    target: str
    reason: str


changes: list[Change] = []


def replace(target: str, owner: Any, value: Any, reason: str) -> None:
    """Put a function or a property of ours in the place of one of a library, and note the change."""
    setattr(owner, target.rpartition(".")[2], value)
    note(target, reason)


def note(target: str, reason: str) -> None:
    changes.append(Change(target, reason))
