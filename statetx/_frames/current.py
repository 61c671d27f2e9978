"""The innermost open frame of each thread."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Hashable
from typing import Any

from .. import _jax
from .._states.registry import load_pending, modal, pending


class _Local(threading.local):
    frame: Any = None  # the `Frame`, or None


_local = _Local()


def current_frame() -> Any:
    """The frame; None if none is open. `_frames` exports it with its type."""
    return _local.frame


set_current_frame = functools.partial(setattr, _local, "frame")  # written in C, as a `Store` must be


def is_idle() -> bool:
    """Whether this thread has no open frame, no active transform of a state library, and traces nothing."""
    return idle_modes() is not None


def idle_modes() -> Hashable | None:
    """`modes` if the thread is idle, else None: the one check of the fast path of a compiled function."""
    if _local.frame is not None or _jax._context.trace is not _jax.eager_trace:
        return None

    # Load the kind of a library that the program has imported since the last call.
    for library in pending:
        if library in sys.modules:
            load_pending()
            break

    modes = []
    for kind in modal:
        if not kind.is_idle():
            return None
        modes.append(kind.mode())
    return tuple(modes)
