"""Results of a call whose body has not run: generators, coroutines."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

from ._errors import FunctionError

_ASYNC = "move the computation into a function without async, transform that, and call it in the coroutine"
_UNFINISHED = {
    types.GeneratorType: (
        "generator",
        "return all values at once, as a list, or transform the function that computes one of them",
    ),
    types.CoroutineType: ("coroutine", _ASYNC),
    types.AsyncGeneratorType: ("asynchronous generator", _ASYNC),
}
"""Types of objects whose body runs after the call that made them: the name, and the fix."""


def refuse_unfinished(
    out: Any, returned: Callable[[], str] = lambda: "The function returned", end: str = "when the trace has ended"
) -> None:
    """Raise if a call returned a generator or a coroutine.

    Args:
        out: the result of the call.
        returned: the beginning of the message.
        end: when the body would run.

    Raises:
        FunctionError: it did.
    """
    unfinished = _UNFINISHED.get(type(out))
    if unfinished is not None:
        if isinstance(out, types.CoroutineType):
            out.close()  # else Python warns that it was never awaited
        name, fix = unfinished
        raise FunctionError(
            f"{returned()} a {name} of {out.__qualname__}, whose body has not run: it would run {end}.\nFix: {fix}."
        )
