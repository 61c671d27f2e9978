"""What a function is differentiated with respect to: arguments by position, states by `Targets`."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp

from . import _registry
from ._errors import StateFilterError, StateValueError
from ._lift import name_of
from ._paths import Paths, as_predicate, is_filter
from ._text import brief, suggestion
from ._tree import is_array_or_number, partition
from ._typing import Filter, PyTree


def split_aux(out: Any, fun: Callable) -> tuple[Any, Any]:
    if not (isinstance(out, (tuple, list)) and len(out) == 2):
        raise TypeError(f"With has_aux=True {name_of(fun)} must return a pair (value, aux), got {type(out).__name__}.")
    return out[0], out[1]


def resolve_argnums(argnums: Any, num_args: int, fun: Callable) -> tuple[list[int], bool]:
    if argnums is None:
        return [], True
    as_tuple = not hasattr(argnums, "__index__")
    nums = [operator.index(i) for i in (list(argnums) if as_tuple else [argnums])]
    for i in nums:
        if not -num_args <= i < num_args:
            raise ValueError(
                f"argnums={argnums!r} asks for argument {i}, and {name_of(fun)} was called with {num_args} positional "
                f"arguments. Pass differentiated arguments by position."
            )
    return [i % num_args for i in nums], as_tuple


class Targets:
    """The states that a function is differentiated with respect to.

    Args:
        wrt: a state, a pytree of states, or a filter over the states that the call can reach.
    """

    def __init__(self, wrt: Any, fun: Callable, args: tuple, kwargs: dict[str, Any]):
        if is_filter(wrt):
            wrt = _select(wrt, fun, args, kwargs)
        self.states, self._treedef = jax.tree.flatten(wrt, is_leaf=_registry.is_opaque)
        self._kinds = []
        for state in self.states:
            kind = _registry.kind_of(state)
            if kind is None:
                raise StateFilterError(
                    f"wrt= holds a {type(state).__name__}, which is no state. Pass states, a dict of them such as "
                    f"statetx.states(model, statetx.Param), or a filter."
                )
            self._kinds.append(kind)
        if not self.states:
            raise StateFilterError("wrt= is empty: there is nothing to differentiate with respect to.")
        self._positions = {id(s): i for i, s in enumerate(self.states)}
        if len(self._positions) < len(self.states):
            twice = next(s for i, s in enumerate(self.states) if self._positions[id(s)] != i)
            raise StateFilterError(
                f"wrt= lists {_registry.describe(twice)} twice. Each state has one gradient: list it once."
            )
        self._parts: list[Any] = []

    def values(self) -> list[list]:
        """The states' values, each as the list of its array leaves."""
        values = []
        for state, kind in zip(self.states, self._kinds, strict=True):
            value = kind.read(state)
            arrays, part = partition(value, is_array_or_number)
            if part.static or not arrays:
                raise StateValueError(
                    f"Cannot differentiate with respect to {_registry.describe(state, kind)}: its value holds a "
                    f"{type(part.static[0] if part.static else value).__name__}, which is no array."
                )
            for x in arrays:
                if not jnp.issubdtype(jnp.result_type(x), jnp.inexact):
                    raise StateValueError(
                        f"Cannot differentiate with respect to {_registry.describe(state, kind)}: gradients need "
                        f"floating-point or complex values. Leave it out of wrt=."
                    )
            self._parts.append(part)
            values.append(arrays)
        return values

    def on_read(self, values: list[list]) -> Callable[[Any, Any, Any], Any]:
        """A frame's hook that hands the body these values in place of the states' own."""

        def on_read(state: Any, kind: Any, value: Any) -> Any:
            i = self._positions.get(id(state))
            return value if i is None else self._parts[i].combine(values[i])

        return on_read

    def combine(self, values: list[list]) -> PyTree:
        """Values for the states, in the structure of `wrt`."""
        whole = [part.combine(v) for part, v in zip(self._parts, values, strict=True)]
        return jax.tree.unflatten(self._treedef, whole)


def _nearest(filter: Filter, paths: Iterable[str]) -> str:
    globs = (filter,) if isinstance(filter, str) else filter if isinstance(filter, (list, tuple)) else ()
    return next((hint for glob in globs if isinstance(glob, str) and (hint := suggestion(glob, paths))), "")


def _select(filter: Filter, fun: Callable, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    reach = Paths(fun, args, kwargs).items()
    keep = as_predicate(filter)
    found = {path: state for path, state in reach.items() if keep(path, state)}
    if not found:
        there = ", ".join(f"{p} ({type(s).__name__})" for p, s in list(reach.items())[:8]) or "none"
        raise StateFilterError(
            f"wrt={brief(filter)} selects no state of {name_of(fun)}.{_nearest(filter, reach)} States that its arguments and "
            f"variables reach: {there}."
        )
    return found
