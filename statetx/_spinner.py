"""The progress of a search or a compilation on the terminal."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from ._environment import require


def spinner(what: str, *, is_shown: bool | None) -> AbstractContextManager[Callable[[str], None]]:
    """A context whose value reports a step; silently if it is not shown. It may be entered several times.

    Args:
        is_shown: by default on a terminal, if rich is installed.
    """
    if is_shown is None:
        is_shown = getattr(sys.stdout, "isatty", bool)() and importlib.util.find_spec("rich") is not None
    return _Spinner(what) if is_shown else contextlib.nullcontext(lambda text: None)


class _Spinner:
    """A spinner with a text and the seconds since it was made. It leaves nothing behind."""

    def __init__(self, what: str):
        require("rich.progress", "progress=True")
        from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        self._what = what
        columns = SpinnerColumn(), TimeElapsedColumn(), TextColumn("{task.description}")
        self._bar = Progress(*columns, transient=True)
        self._task = self._bar.add_task(what)

    def __enter__(self) -> Callable[[str], None]:
        self._bar.start()
        return lambda text: self._bar.update(self._task, description=f"{self._what}: {text}")

    def __exit__(self, *exception: Any) -> None:
        self._bar.stop()
