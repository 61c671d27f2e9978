"""`Stack`: a stacked result of a loop, with what becomes of it."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ... import _jax, _states
from ..._text import format_bytes


class Fate(enum.Enum):
    """What becomes of a stacked result."""

    RELEASED = "it no longer exists"
    RETURNED = "the program returns it"
    READ = "an equation needs several rows at once"
    SHARED = "the device would copy what its consumers overwrite"
    REPLACED = "what its consumers compute is as large"


class Stack(NamedTuple):
    """A stacked result of a loop that other equations read.

    Attributes:
        loop: the equation of the loop.
        num_bytes: its bytes.
        reader: the equation that needs several rows at once, if this is its fate.
    """

    loop: Any
    num_bytes: int
    fate: Fate
    reader: Any = None


def told(stacks: Sequence[Stack]) -> tuple[str, ...]:
    """A sentence for each loop whose backward pass ends in gradients, and for each thing that happens to them."""
    groups: dict[tuple[Any, Fate, Any], int] = {}
    for stack in stacks:
        key = stack.loop, stack.fate, stack.reader
        groups[key] = groups.get(key, 0) + stack.num_bytes
    return tuple([_sentence(Stack(loop, size, fate, reader)) for (loop, fate, reader), size in groups.items()])


def _sentence(stack: Stack) -> str:
    layers = f"{format_bytes(stack.num_bytes)} of gradients of {stack.loop.params.get('length', 'all')} layers"
    return f"{layers} ({_site(stack.loop)}) {_FATES[stack.fate](stack)}."


_FATES: dict[Fate, Callable[[Stack], str]] = {
    Fate.RELEASED: lambda stack: "are used up in the loop of the backward pass, layer by layer",
    Fate.RETURNED: lambda stack: "are kept: the program returns them",
    Fate.READ: lambda stack: (
        f"are kept: {stack.reader.primitive.name} at {_site(stack.reader)} needs several layers at once"
    ),
    Fate.SHARED: lambda stack: "are kept: on CPUs an update by moments copies these, which takes more memory",
    Fate.REPLACED: lambda stack: "are kept: what is made of them takes as much memory",
}


def _site(eqn: Any) -> str:
    folders = (*_states.library_folders(), _jax.JAX_FOLDER)
    return _jax.traceback_site(eqn.source_info.traceback, folders)
