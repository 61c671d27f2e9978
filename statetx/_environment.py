"""Settings from environment variables."""

from __future__ import annotations

import os

_ON, _OFF = ("1", "true", "yes", "on"), ("", "0", "false", "no", "off")


def flag(name: str) -> bool:
    """Whether a variable is set to a word that means yes; False if it is not set.

    Raises:
        ValueError: the word means neither yes nor no. It is not guessed: what it switches on has a cost in every call.
    """
    word = os.environ.get(name, "").strip().lower()
    if word not in (*_ON, *_OFF):
        raise ValueError(
            f"{name}={os.environ[name][:80]!r} is neither on ({', '.join(_ON)}) nor off ({', '.join(filter(None, _OFF))} or empty).\n"
            f"Fix: set {name}=1, or unset it."
        )
    return word in _ON
