"""Static arguments, by position or name in the user's function."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterable
from typing import Any

from .._errors import StaticArgumentError
from .._text import brief, suggestion
from .._tree import is_array
from .._typing import Indices, Names
from .wrapper import name_of

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class StaticArguments:
    """The static arguments of a function, whether they are passed by position, by keyword or by default.

    Args:
        fun: the function as the user calls it: ``self`` is argument 0 of a method in a class body and absent from a
            bound method.
        argnums: positions; negative ones count from the end of the positional parameters (with ``*args``: of the
            arguments of the call).
        argnames: parameter names.
        role: the prefix of the user's options, for messages: "static" or "donate"; empty for options without a prefix.

    Raises:
        StaticArgumentError: the function has no such parameter.
    """

    def __init__(self, fun: Callable, argnums: Indices, argnames: Names, role: str = "static"):
        self.names: set[str] = set()
        self.positions: set[int] = set()
        self._from_end: set[int] = set()
        self._fun = fun
        self._role = role
        self._argnums, self._argnames = f"{role}_argnums".lstrip("_"), f"{role}_argnames".lstrip("_")
        try:
            self._parameters = list(inspect.signature(fun).parameters.values())
        except (TypeError, ValueError):  # builtins may have no signature
            unknown = [("args", inspect.Parameter.VAR_POSITIONAL), ("kwargs", inspect.Parameter.VAR_KEYWORD)]
            self._parameters = [inspect.Parameter(name, variadic) for name, variadic in unknown]
        self._positional = [p for p in self._parameters if p.kind in _POSITIONAL]
        for i in _as_indices(argnums, self._argnums):
            self._add_position(i)
        for name in _as_names(argnames, self._argnames):
            self._add_name(name)

    def __bool__(self) -> bool:
        return bool(self.names or self.positions or self._from_end)

    def mask(self, num_args: int) -> list[bool]:
        """Tell for each positional argument of a call whether it is static."""
        from_end = {i + num_args for i in self._from_end}
        return [i in self.positions or i in from_end for i in range(num_args)]

    def refuse_overlap(self, donated: StaticArguments) -> None:
        """Raise if an argument is in both sets, as static and as donated."""
        overlap = sorted(self.names & donated.names) or sorted(
            (self.positions & donated.positions) | (self._from_end & donated._from_end)
        )
        if overlap:
            raise StaticArgumentError(
                f"Argument {overlap[0]!r} is both {self._role} and {donated._role}d: {self._describe()}. A static "
                f"argument has no "
                f"memory to donate.\nFix: leave it out of {donated._role}_argnums and {donated._role}_argnames."
            )

    def filters_of_states(self) -> list[str]:
        """Filters by path, for the states that these arguments hold."""
        names = self.names | {self._positional[i].name for i in self.positions if i < len(self._positional)}
        return [pattern for name in sorted(names) for pattern in (name, f"{name}.*", f"{name}[[]*")]

    def split(self, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any], Callable]:
        """Split off the static arguments: the dynamic ones, and a function that merges the static ones back in."""
        if not self:
            return args, kwargs, lambda a, k: (a, k)
        mask = self.mask(len(args))
        static_args = tuple(a for a, s in zip(args, mask, strict=True) if s)
        static_kwargs = {k: v for k, v in kwargs.items() if k in self.names}

        def merge(dyn_args: tuple, dyn_kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
            dynamic, static = iter(dyn_args), iter(static_args)
            merged = tuple(next(static) if s else next(dynamic) for s in mask)
            return merged, {k: static_kwargs[k] if k in static_kwargs else dyn_kwargs[k] for k in kwargs}

        dyn_args = tuple(a for a, s in zip(args, mask, strict=True) if not s)
        return dyn_args, {k: v for k, v in kwargs.items() if k not in static_kwargs}, merge

    def _add_position(self, i: int) -> None:
        num = len(self._positional)
        variadic = any(p.kind is p.VAR_POSITIONAL for p in self._parameters)
        if i < 0 and variadic:
            self._from_end.add(i)
            return
        if not (-num <= i < num or (variadic and i >= 0)):
            positions = f", from 0 to {num - 1} or from -{num} to -1" if num else ": it takes none by position"
            raise StaticArgumentError(
                f"{self._argnums}={i} is out of range: {self._describe()}. Positions count the parameters of the "
                f"function as you call it{positions}."
            )
        i %= max(num, i + 1)
        self.positions.add(i)
        if i < num and self._positional[i].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD:
            self.names.add(self._positional[i].name)

    def _add_name(self, name: str) -> None:
        by_name = {p.name: p for p in self._parameters}
        parameter = by_name.get(name)
        variadic = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
        if parameter is None or parameter.kind in variadic:
            if any(p.kind is p.VAR_KEYWORD for p in self._parameters) and parameter is None:
                self.names.add(name)
                return
            raise StaticArgumentError(f"{self._argnames}={name!r}: {self._describe()}.{suggestion(name, by_name)}")
        if parameter.kind is not inspect.Parameter.POSITIONAL_ONLY:
            self.names.add(name)
        if parameter in self._positional:
            self.positions.add(self._positional.index(parameter))

    def _describe(self) -> str:
        names = ", ".join(str(p).split(":")[0].split("=")[0] for p in self._parameters)
        return f"{name_of(self._fun)} has the parameters ({names})"


def _as_names(argnames: Names | None, option: str) -> list[str]:
    items = () if argnames is None else (argnames,) if isinstance(argnames, str) else argnames
    names = (
        list(items) if isinstance(items, Iterable) and not isinstance(items, bytes) and not is_array(items) else [items]
    )
    for name in names:
        if not isinstance(name, str):
            raise StaticArgumentError(f"{option} must be a name or a sequence of names, got {brief(argnames)}.")
    return names  # type: ignore[return-value]


def _as_indices(argnums: Indices | None, option: str) -> list[int]:
    if argnums is None:
        return []
    items = (argnums,) if isinstance(argnums, int) or not hasattr(argnums, "__iter__") else argnums
    try:
        return [operator.index(i) for i in items]  # type: ignore[arg-type]
    except TypeError:
        raise StaticArgumentError(
            f"{option} must be an int or a sequence of ints, got {brief(argnums)}.\n"
            f"Fix: {option}=0, or {option}=(0, 2); arguments of the function go to the function that the transform "
            f"returns."
        ) from None
