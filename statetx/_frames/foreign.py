"""Variables that no frame carries: a library (haiku, linen) holds them while a call of its own runs.

A function that changes one of them under a transform of statetx would leave a tracer there, or a change that belongs to
one trace of the function: the frame raises, and restores the variable.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from .. import _hooks
from .._atomic import Store, commit
from .._errors import TraceLeakError


@dataclasses.dataclass(eq=False)
class Held:
    """The variables of the innermost running call of a library.

    Attributes:
        values: returns their present values, by their names in messages.
        undo: stores that restore the present values.
        explain: the rest of the message about a changed variable, for the name of the transform and the variable.
    """

    values: Callable[[], Mapping[str, Any]]
    undo: list[Store]
    explain: Callable[[str, str], str]
    old_values: Mapping[str, Any] = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.old_values = self.values()


def held_by_libraries() -> list[Held]:
    """The variables that libraries hold now: none, unless a call of theirs runs."""
    return [held for library in _hooks.holders if (held := library()) is not None]


def refuse_changes(name: str, held: Sequence[Held]) -> None:
    """Raise if the call `name` has changed a variable that a library holds.

    Raises:
        TraceLeakError: it names the variable and the fix.
    """
    for library in held:
        for variable, value in library.values().items():
            if variable not in library.old_values or not _is_same(value, library.old_values[variable]):
                explanation = library.explain(name.partition("(")[0], variable)
                raise TraceLeakError(f"{name} changes {variable}{explanation}")


def undo_changes(held: Sequence[Held]) -> None:
    """Restore the variables that libraries hold."""
    if held:
        commit([store for library in held for store in library.undo])


def _is_same(a: Any, b: Any) -> bool:
    a, b = jax.tree.leaves(a), jax.tree.leaves(b)
    return len(a) == len(b) and all(map(operator.is_, a, b))


def nested_items(tree: Mapping[str, Any], separator: str) -> dict[str, Any]:
    """The values in nested dicts, by their paths."""
    items = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            items |= {f"{key}{separator}{path}": x for path, x in nested_items(value, separator).items()}
        else:
            items[key] = value
    return items


def restoring(tree: Any) -> list[Store]:
    """Stores that give nested dicts their present items again; an immutable mapping needs none."""
    if not isinstance(tree, dict):
        return []
    inner = [store for value in tree.values() for store in restoring(value)]
    return [(dict.clear, tree), (dict.update, tree, dict(tree)), *inner]
