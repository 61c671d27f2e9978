"""Calls of the user's functions in a compiled program, told apart by the numbers of `_numbered`."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections import Counter, defaultdict
from collections.abc import Iterable
from types import CodeType
from typing import Any

from .. import _jax
from ._names import AGAIN, PRODUCTS
from ._numbered import frame_name
from .buffer import Step, Timeline

_MOST_IN_A_LINE = 3  # products of one line of a function without a loop: the query, the key and the value of a layer


def code_of(eqns: Iterable[Any], function: str) -> CodeType | None:
    """The code of a function that runs equations; None if it does not."""
    codes = (code for eqn in eqns for code, _ in _jax.frames_of(eqn))
    return next((code for code in codes if frame_name(code) == function), None)


def returned_arguments(code: CodeType | None) -> int:
    """How many of its arguments a function returns unchanged, by its source."""
    try:
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(code))).body if code else [None]
    except (OSError, SyntaxError, ValueError):
        return 0
    if not isinstance(tree, ast.FunctionDef):
        return 0
    arguments = {a.arg for a in (*tree.args.posonlyargs, *tree.args.args, *tree.args.kwonlyargs)}
    nodes = [node for statement in tree.body for node in ast.walk(statement)]
    assigned = {node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
    returned = [getattr(node.value, "elts", [node.value]) for node in nodes if isinstance(node, ast.Return)]
    returned_names = [{x.id for x in values if isinstance(x, ast.Name)} for values in returned]
    return max((len(names & arguments - assigned) for names in returned_names), default=0)


def line_of(profile: Timeline, function: str, file: str) -> int | None:
    """The line at which a function of the user is defined, or its first decorator; None if its calls are not known."""
    for step in profile.steps:
        if any((f.function, f.file) == (function, file) for f in step.frames):
            for call in step.calls:
                name, _, line = call.rpartition("~")[0].partition("~")
                if name == function and line:
                    return int(line)
    return None


def function_of(call: str) -> str:
    """The function of a call; empty for a call whose equations may belong to other calls, too."""
    return call.partition("~")[0]


class Calls:
    """The calls of a function of the user, told apart in the schedule.

    Without numbers, as in a program that was compiled before it was profiled, calls at one line, as in a loop over
    layers, count as one.

    Attributes:
        num: of the calls in the forward pass; in the backward pass, if the forward pass has none.
        has_loop: whether a call runs the same operations several times.
    """

    def __init__(self, profile: Timeline, function: str):
        self._number: dict[int, int] = {}
        numbers: dict[Any, int] = {}
        products: Counter[Any] = Counter()
        called: dict[Any, set[Any]] = defaultdict(set)
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
                inner = step.calls[len(call) :] if call == step.calls[: len(call)] else ()
                if (depth := next((d for d, c in enumerate(inner) if function_of(c)), None)) is not None:
                    line = next((f.line for f in reversed(step.frames) if f.function == function), 0)
                    called[number, function_of(inner[depth]), line].add(inner[: depth + 1])
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
        if function_of(call) == function:
            return step.calls[: n + 1]
    depth = max((d for d, f in enumerate(step.frames, 1) if f.function == function), default=0)
    return step.frames[depth:] if depth else None
