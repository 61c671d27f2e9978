"""Settings from the environment: variables, optional packages."""

from __future__ import annotations

import importlib
import os
from typing import Any

_ON, _OFF = ("1", "true", "yes", "on"), ("", "0", "false", "no", "off", "none")


def switch(word: str) -> bool | None:
    """Whether a word means on or off; None if it means neither."""
    word = word.strip().lower()
    return True if word in _ON else False if word in _OFF else None


def flag(name: str) -> bool:
    """Whether a variable is set to a word that means yes; False if it is not set.

    Raises:
        ValueError: the word means neither yes nor no. It is not guessed, for the switch costs time in every call.
    """
    is_on = switch(os.environ.get(name, ""))
    if is_on is None:
        raise ValueError(
            f"{name}={os.environ[name][:80]!r} is neither on ({', '.join(_ON)}) nor off "
            f"({', '.join(filter(None, _OFF))} or empty).\n"
            f"Fix: set {name}=1, or unset it."
        )
    return is_on


def require(module: str, feature: str) -> Any:
    """Import a module that a feature needs.

    Args:
        module: its name.
        feature: the option or method that the user called, for the message.

    Raises:
        ImportError: it cannot be imported; the message has the command that installs it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as e:
        package = module.partition(".")[0]
        raise ImportError(f"{feature} needs {package}, which is not installed: pip install 'statetx[plot]'") from e
