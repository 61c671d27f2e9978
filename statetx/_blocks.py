"""Blocks of the user's program that set something for their thread: `statetx.target`, `statetx.budget`."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar, cast

from ._errors import FunctionError, PolicyWarning, printable
from ._text import brief
from ._unfinished import refuse_unfinished

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")

_PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep


class _Entered(threading.local):
    """The entered blocks of a thread, outermost first, each with what `Block.open` returned for it."""

    def __init__(self) -> None:
        self.blocks: list[tuple[Block[Any], contextlib.AbstractContextManager[Any]]] = []


_entered = _Entered()


class Block(Generic[T]):
    """A ``with`` block that sets something for its thread, and a decorator of functions that run in such a block.

    JAX keeps settings that its caches depend on by thread, so a block of ours cannot be one of an asyncio task. A block
    that is left while a later one is open takes back its own setting alone, and raises.

    Args:
        call: the public function that makes it, as the user writes it: ``statetx.target(device)``.
        use: the rest of a sentence on a block without code.
        open: makes the context manager that sets it, a new one whenever the block is entered.
        value: what ``with ... as`` gives.
    """

    def __init__(
        self, call: str, use: str, open: Callable[[], contextlib.AbstractContextManager[Any]], value: T = None
    ):
        self._name, self._call = call.removeprefix("statetx.").partition("(")[0], call
        self._open, self._value = open, value
        frame = sys._getframe(1)
        while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
            frame = frame.f_back
        message = (
            f"{call} was made and not entered, {use}.\n"
            f"Fix: with {call}: ..., around the code; or @{call} above a function."
        )
        # Unlike `__del__`, it runs before the modules of an ending program are taken apart.
        self._unused = weakref.finalize(self, _warn, message, frame.f_code.co_filename, frame.f_lineno, frame.f_globals)

    def __enter__(self) -> T:
        self._unused.detach()
        self._enter()
        return self._value

    def _enter(self) -> None:
        block = self._open()
        block.__enter__()
        _entered.blocks.append((self, block))

    def __exit__(self, *exc: Any) -> None:
        blocks = _entered.blocks
        index = next((i for i in reversed(range(len(blocks))) if blocks[i][0] is self), None)
        if index is None:
            if exc[0] is None:
                raise self._misplaced("in another thread than it was entered in, where it stays in force")
            return
        later = [block for block, _ in blocks[index + 1 :]]
        while len(blocks) > index:
            blocks.pop()[1].__exit__(None, None, None)
        for block in later:
            block._enter()
        if later and exc[0] is None:
            raise self._misplaced(f"before {later[0]._call}, which was entered later and was in force for both")

    def __call__(self, fun: F) -> F:
        self._unused.detach()
        if not callable(fun):
            raise FunctionError(
                f"{self._name} needs a function, as a decorator, got {type(fun).__name__}: {brief(fun)}.\n"
                f"Fix: with {self._call}: ..., or @{self._call} above a function."
            )

        @functools.wraps(fun)
        def run(*args: Any, **kwargs: Any) -> Any:
            with self:
                out = fun(*args, **kwargs)
            returned = lambda: f"{self._call}: the function returned"
            refuse_unfinished(out, returned, "when the block has been left")
            return out

        return cast("F", run)

    def _misplaced(self, how: str) -> FunctionError:
        return FunctionError(
            f"The block of {self._call} was left {how}.\n"
            f"Cause: asyncio tasks, or generators, that overlap in such blocks: a block belongs to its thread.\n"
            f"Fix: move the code of the block into a function without await and yield."
        )


def _warn(message: str, file: str, line: int, variables: dict[str, Any]) -> None:
    registry = variables.setdefault("__warningregistry__", {})
    warnings.warn_explicit(printable(message), PolicyWarning, file, line, registry=registry)
