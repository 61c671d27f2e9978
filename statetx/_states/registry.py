"""The kinds of state there are. That of a library is loaded when the program has imported the library."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Hashable
from typing import Any

import numpy as np

from .. import _jax
from .._atomic import locked
from .protocol import Kind, Modal, Subclassed

# Libraries whose states are watched as soon as the program has imported them.
_FOREIGN = {"brainstate": "statetx.kinds.brainstate", "flax.nnx": "statetx.kinds.nnx"}
_kinds: list[Kind] = []
_modal: list[Modal] = []
_pending = tuple(_FOREIGN)  # replaced as a whole: other threads may be going through it
_kinds_lock = threading.RLock()


def register_kind(kind: Kind) -> None:
    _kinds.append(kind)
    if isinstance(kind, Modal):
        _modal.append(kind)


def kinds() -> list[Kind]:
    """Every kind of state that the program can have by now."""
    if _pending:
        _load_pending()
    return _kinds


def _load_pending() -> None:
    for library in _pending:
        module = sys.modules.get(library)
        if module is None or getattr(getattr(module, "__spec__", None), "_initializing", False):
            continue
        locked(_kinds_lock, _load, library)


def _load(library: str) -> None:
    global _pending
    if library in _pending:
        register_kind(importlib.import_module(_FOREIGN[library]).KIND)
        _pending = tuple(name for name in _pending if name != library)


def kind_of(obj: Any) -> Kind | None:
    """The kind of a state; None for anything that is no state."""
    for kind in kinds():
        if kind.owns(obj):
            return kind
    return None


def is_opaque(obj: Any) -> bool:
    """Whether a tree's flattening stops at this object: a state, or a module that holds states."""
    if type(obj) in _PLAIN:
        return False
    return any([kind.is_opaque(obj) for kind in kinds()])


# Of what trees hold, what is met most and is no state.
_PLAIN = frozenset([dict, list, tuple, type(None), bool, int, float, str, np.ndarray, _jax.ArrayImpl])


def class_options(cls: type) -> dict[str, Any]:
    """What a subclass of a library's class must be told, to be of the same sort as the class."""
    options: dict[str, Any] = {}
    for kind in kinds():
        if isinstance(kind, Subclassed):
            options |= kind.class_options(cls)
    return options


def modes() -> Hashable:
    """Settings that a compiled program depends on, of every library whose states are watched."""
    kinds()
    return tuple([kind.mode() for kind in _modal])
