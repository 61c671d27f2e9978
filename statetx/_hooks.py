"""Functions of higher layers that lower ones call.

``statetx/__init__.py``, above all layers, registers each; it imports its module when called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

foreign_kinds: dict[str, Callable[[], Any]] = {}
"""By library of states, imported or not: returns its kind."""

holders: list[Callable[[], Any]] = []
"""By library that holds variables while a call of its own runs: returns them, or None if none runs."""

policies: dict[str, Callable[..., Any]] = {}
"""By the name in ``policy="name:argument"``: makes the policy."""

fits: dict[str, Callable[..., Any]] = {}
"""By transform with ``"fit"`` as an option: chooses for the budget."""
