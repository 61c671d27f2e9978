"""Packages that statetx uses only if they are installed."""

from __future__ import annotations

import importlib
from typing import Any


def require(module: str, feature: str, extra: str = "plot") -> Any:
    """Import a module that a feature needs.

    Args:
        module: its name.
        feature: the option or method that the user called, for the message.
        extra: the extra of statetx that installs the package.

    Raises:
        ImportError: it cannot be imported; the message has the command that installs it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as e:
        package = module.partition(".")[0]
        raise ImportError(f"{feature} needs {package}, which is not installed: pip install 'statetx[{extra}]'") from e
