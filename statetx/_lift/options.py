"""Errors for options that a transform does not have, and for arguments of the function that are given to the transform."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from .._text import suggestion
from .wrapper import name_of

F = TypeVar("F", bound=Callable[..., Any])


def with_checked_options(hints: Mapping[str, str] | None = None, call: str = "") -> Callable[[F], F]:
    """Decorate a transform: an unknown option, or a positional argument too many, raises an error with the fix.

    Args:
        hints: what to do, by name of an option that other libraries have.
        call: a sentence for a call with the arguments of the function.
    """

    def decorate(transform: F) -> F:
        parameters = inspect.signature(transform).parameters.values()
        accepted = {p.name for p in parameters}
        num_positional = sum(p.kind is not p.KEYWORD_ONLY for p in parameters)

        @functools.wraps(transform)
        def checked(*args: Any, **kwargs: Any) -> Any:
            if len(args) > num_positional:
                raise TypeError(_too_many(transform.__name__, args, num_positional, call))
            if not kwargs.keys() <= accepted:
                options = [p.name for p in parameters if p.name != "fun"]
                raise TypeError(_unknown(transform.__name__, sorted(kwargs.keys() - accepted), options, hints or {}))
            return transform(*args, **kwargs)

        return checked  # type: ignore[return-value]

    return decorate


def _too_many(transform: str, args: tuple, num: int, call: str) -> str:
    fun = name_of(args[0]).rpartition(".")[2] if callable(args[0]) else "f"
    expected = "the function" if num == 1 else f"the function and {num - 1} option{'s' if num > 2 else ''}"
    return (
        f"{transform} takes {expected} by position, got {len(args)} positional arguments.{call}\n"
        f"Fix: give the arguments to the function that it returns: statetx.{transform}({fun})(x)."
    )


def _unknown(transform: str, unknown: list[str], options: list[str], hints: Mapping[str, str]) -> str:
    known = [f"{transform} has no {name}=: {hints[name]}." for name in unknown if name in hints]
    if known:
        return " ".join(known)
    hint = "".join(suggestion(name, options) for name in unknown)
    return f"{transform} got unexpected options: {', '.join(unknown)}.{hint} It has {', '.join(options)}."
