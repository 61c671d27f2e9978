"""Calls of the user's functions, each with a number of its own in the names of its operations.

Two calls at one line, as in a loop over layers, have equal frames. So while a function is traced for a profile, each
call of a function of the user opens a ``jax.named_scope`` with a number, which XLA keeps in the name of each operation.
A program that was traced before has none. `Calls` tells them apart in the compiled program.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import os
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any, NamedTuple

import jax

from .. import _states
from .._equations.structure import table
from ..residuals._trace import is_library
from ._names import AGAIN, PRODUCTS
from .buffer import Step, Timeline

_OWN = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_SUSPENDED = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR

_MOST_IN_A_LINE = 3  # products of one line of a function without a loop: the query, the key and the value of a layer
_numbers = itertools.count()  # of all calls of the process: JAX caches traces with the numbers
_definitions: dict[tuple[str, str], int] = {}  # lines of the functions that were numbered, by name and file
_called: dict[str, _Called] = {}  # the last such function of each name
# Part of the keys of JAX's caches: a function traced without numbers is traced again.
_context: Any = jax.make_user_context(None)


class _Called(NamedTuple):
    """What the first call of a function of the user tells, in each trace.

    Attributes:
        num_arrays: how many arrays it takes as arguments.
        returned: how often it returns an argument of each type unchanged.
    """

    code: CodeType
    num_arrays: int
    returned: Counter[Any]


@contextlib.contextmanager
def numbered_calls() -> Iterator[None]:
    """Number the calls of the user's functions that this thread makes in the block."""
    if sys.getprofile() is not None:  # of a profiler: this one would take its place
        yield
        return
    opened: list[tuple[FrameType, Any]] = []
    arguments: dict[FrameType, list[Any]] = {}  # of the first call of a function
    noted: set[int] = set()  # ids of code objects: the hash of one would go through all its constants

    def note(frame: FrameType, event: str, arg: Any) -> None:
        if event == "call":
            if _is_users(frame.f_code.co_filename, frame.f_code.co_flags):
                name = _name_in_frames(frame.f_code)
                _definitions[name, frame.f_code.co_filename] = frame.f_code.co_firstlineno
                if id(frame.f_code) not in noted:
                    noted.add(id(frame.f_code))
                    arguments[frame] = found = _arrays_in_arguments(frame)
                    before = _called.get(name)
                    returned = before.returned if before and before.code is frame.f_code else Counter()
                    _called[name] = _Called(frame.f_code, len(found), returned)
                scope = jax.named_scope(f"{name}~{next(_numbers)}")
                scope.__enter__()
                opened.append((frame, scope))
        elif event == "return" and opened and opened[-1][0] is frame:  # by an exception, too
            opened.pop()[1].__exit__(None, None, None)
            if frame in arguments:
                known = [id(x) for x in arguments.pop(frame)]
                name = _name_in_frames(frame.f_code)
                returned = Counter(jax.typeof(x) for x in _arrays_of(arg) if id(x) in known)
                _called[name] = _called[name]._replace(returned=_called[name].returned | returned)

    # No structure has the numbers of another: an entry of the table would never be found again.
    with _context("numbered"), table.bypassed():
        sys.setprofile(note)
        try:
            yield
        finally:
            sys.setprofile(None)
            for _, scope in reversed(opened):  # an interrupt in `note` ends the notes
                scope.__exit__(None, None, None)


def line_of(function: str, file: str) -> int | None:
    """The line at which a function of the user is defined, or its first decorator; None if no call of it was
    numbered.
    """
    return _definitions.get((function, file))


def takes_as_arguments(function: str, num: int) -> bool:
    """Whether a function of the user takes so many arrays as arguments; else it has some from elsewhere, such as the
    states of its module.
    """
    return function in _called and _called[function].num_arrays >= num


def returned_arguments(function: str) -> list[Any]:
    """The types of the arguments that a function of the user returns unchanged; of traces for other types, too."""
    return [*_called[function].returned.elements()] if function in _called else []


def _name_in_frames(code: CodeType) -> str:
    return code.co_qualname.replace("<locals>.", "")  # as in the frames of XLA


def _arrays_in_arguments(frame: FrameType) -> list[Any]:
    code = frame.f_code
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    return _arrays_of([frame.f_locals.get(name) for name in names])


def _arrays_of(tree: Any) -> list[Any]:
    """The arrays in a tree, without those of states: to take a state apart is to read it, which watchers see."""
    with contextlib.suppress(Exception):  # of the user's own pytrees
        return [x for x in jax.tree.leaves(tree, is_leaf=_states.is_opaque) if isinstance(x, jax.Array)]
    return []


@functools.lru_cache(maxsize=10_000)
def _is_users(file: str, flags: int) -> bool:
    """Whether it is a function of the user; not a generator, which other calls interrupt.

    Each call of a trace asks: the hash of a code object would go through all its constants.
    """
    return not (flags & _SUSPENDED or is_library(file) or file.startswith(_OWN))


class Calls:
    """The calls of a function of the user, told apart in the schedule.

    Each has a number in the names of its operations (`_scopes`). In a program that was traced before it was profiled,
    calls at one line, as in a loop over layers, count as one.

    Attributes:
        num: of the calls in the forward pass; in the backward pass, if the forward pass has none.
        has_loop: whether a call runs the same operations several times.
    """

    def __init__(self, profile: Timeline, function: str):
        self._number: dict[int, int] = {}
        numbers: dict[Any, int] = {}
        products: Counter[Any] = Counter()
        called: dict[Any, set[str]] = defaultdict(set)
        original: dict[str, int] = {}
        repeated: list[tuple[int, int]] = []  # steps that XLA itself runs again, with those that they repeat
        for n, step in enumerate(profile.steps):
            first = original.setdefault(AGAIN.split(step.name)[0], n)
            if first != n and AGAIN.search(step.name):
                repeated.append((n, first))
            elif (step.is_recomputed or step.phase == "forward") and (call := _call_of(step, function)) is not None:
                number = numbers.setdefault((step.is_recomputed, call), len(numbers))
                self._number[n] = number
                if step.primitive in PRODUCTS:
                    products[number, step.primitive, step.frames] += 1
                for inner in step.calls[len(call) : len(call) + 1]:  # by its line in the function
                    line = next((f.line for f in reversed(step.frames) if f.function == function), 0)
                    called[number, inner.rpartition("~")[0], line].add(inner)
        self._number |= {n: self._number[first] for n, first in repeated if first in self._number}
        forward = {self._number[n] for n in self._number if not profile.steps[n].is_recomputed}
        self.num = len(forward or set(self._number.values()))
        self.has_loop = max(products.values(), default=0) > _MOST_IN_A_LINE or any(len(c) > 1 for c in called.values())

    def of(self, step: int) -> int | None:
        """The number of the call that runs a step; None if none does."""
        return self._number.get(step)


def _call_of(step: Step, function: str) -> Any:
    """Key that tells the outermost call of a function that runs a step from other calls; None if there is none."""
    for n, call in enumerate(step.calls):
        if call.rpartition("~")[0] == function:
            return step.calls[: n + 1]
    depth = max((d for d, f in enumerate(step.frames, 1) if f.function == function), default=0)
    return step.frames[depth:] if depth else None
