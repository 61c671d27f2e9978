"""Settings from environment variables."""

from __future__ import annotations

import os

_ON, _OFF = ("1", "true", "yes", "on"), ("", "0", "false", "no", "off", "none")


def switch(word: str) -> bool | None:
    """Whether a word means on or off; None if it means neither."""
    word = word.strip().lower()
    return True if word in _ON else False if word in _OFF else None


def flag(name: str) -> bool:
    """Whether a variable is set to a word that means yes; False if it is not set.

    Raises:
        ValueError: the word means neither yes nor no. It is not guessed: what it switches on has a cost in every call.
    """
    is_on = switch(os.environ.get(name, ""))
    if is_on is None:
        raise ValueError(
            f"{name}={os.environ[name][:80]!r} is neither on ({', '.join(_ON)}) nor off "
            f"({', '.join(filter(None, _OFF))} or empty).\n"
            f"Fix: set {name}=1, or unset it."
        )
    return is_on
