"""Calls of the user's functions, told apart in the equations of a program and in the compiled one.

Two calls at one line, as in a loop over layers, have equal frames. The traceback of an equation also has the
instruction that each function was at, so `numbered` follows the functions from equation to equation: one that goes back
without a loop in its code is called again, by the next loop around it. A loop that is all of a function looks like a
loop around it; there the paths of the weights tell.

Each call has a number in the names of its equations, which XLA keeps. `Calls` finds them in the compiled program.
"""

from __future__ import annotations

import ast
import dis
import functools
import inspect
import itertools
import os
import textwrap
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import CodeType
from typing import Any, NamedTuple, TypeAlias

from .. import _jax
from .._equations.structure import Body, table
from .._jax import Literal
from ..residuals._trace import TracedCall, is_library
from ._names import AGAIN, PRODUCTS, chain
from .buffer import Step, Timeline

_OWN = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_SUSPENDED = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR

_MOST_IN_A_LINE = 3  # products of one line of a function without a loop: the query, the key and the value of a layer

# -- equations -----------------------------------------------------------------------------------------------------


class _Function:
    """The code of a function. Compared by identity: the hash of a code object would go through all its constants."""

    def __init__(self, code: CodeType):
        self._code = code
        # As in the frames of XLA.
        self.name = code.co_qualname.replace("<locals>.", "")

    @functools.cached_property
    def is_users(self) -> bool:
        """Whether it is a function of the user; not a generator, which other calls interrupt."""
        file = self._code.co_filename
        return not (self._code.co_flags & _SUSPENDED or is_library(file) or file.startswith(_OWN))

    @functools.cached_property
    def line(self) -> int:
        """The line at which it is defined, or its first decorator."""
        return self._code.co_firstlineno

    def num_loops(self, first: int, last: int) -> int:
        """The number of its loops around two instructions."""
        return sum(start <= first and last <= end for start, end in self._loops)

    @functools.cached_property
    def _loops(self) -> list[tuple[int, int]]:
        """The first and the last instruction of each loop: a jump backward, but not from the handler of an exception,
        which may be behind all other code.
        """
        instructions = list(dis.get_instructions(self._code))
        number = {x.offset: n for n, x in enumerate(instructions)}
        loops, waiting, seen = [], [0], set()
        while waiting:
            n = waiting.pop()
            if n in seen:
                continue
            seen.add(n)
            x = instructions[n]
            if x.opcode in _JUMPS:
                waiting.append(number[x.argval])
                if x.argval < x.offset:
                    loops.append((x.argval, x.offset))
            if not x.opname.startswith(_LEAVING):
                waiting.append(n + 1)
        return loops


_JUMPS = frozenset([*dis.hasjrel, *dis.hasjabs])
_LEAVING = ("RETURN_VALUE", "RETURN_CONST", "RAISE", "RERAISE", "JUMP_FORWARD", "JUMP_BACKWARD")


class _Frame(NamedTuple):
    """A function that runs, and the offset of its instruction."""

    function: _Function
    offset: int


_Stack: TypeAlias = tuple[_Frame, ...]  # outermost first; from one traceback the same object


Visit: TypeAlias = Callable[[Any, Sequence[str]], None]


def numbered(x: Any, paths: Sequence[str], visit: Visit = lambda eqn, paths: None) -> Any:
    """A jaxpr, closed or not, with the calls of the user's functions in the names of its equations.

    Args:
        paths: for each input, of the argument or state that it is; empty for any other.
        visit: is called with each equation, and the paths of its operands.
    """
    return _Numbering(visit).jaxpr(x, paths, is_backward=False)


def traced_call(fun: Callable, args: tuple, kwargs: dict[str, Any]) -> TracedCall:
    """A call to profile, as equations with the calls of the user's functions in their names."""
    with table.bypassed():  # shared structures have the source lines of the first one
        call = TracedCall("memory_profile", fun, args, kwargs)
    call.body = numbered_body(call)
    return call


def numbered_body(call: TracedCall, visit: Visit = lambda eqn, paths: None) -> Body:
    """The equations of a traced call, with the calls of the user's functions in their names."""
    paths = [*[""] * call.body.num_operands, *(i.origin.path for i in call.inputs)]
    return Body(numbered(call.body.jaxpr, paths, visit), call.body.operands)


class _Numbering:
    def __init__(self, visit: Visit) -> None:
        self._visit = visit
        self._numbers = itertools.count()
        self._functions: dict[int, _Function] = {}  # by the id of the code
        self._stacks: dict[int, _Stack] = {}  # by the id of the traceback
        self._inner: dict[tuple[int, bool], tuple[Any, Any]] = {}  # the jaxpr of a jitted function is in all its calls

    def jaxpr(self, x: Any, paths: Sequence[str], *, is_backward: bool) -> Any:
        """The jaxpr with names.

        Equations of a backward pass come in the reverse order of those that they are the derivatives of; what it
        computes again does not.
        """
        jaxpr, _ = _jax.open_jaxpr(x)
        path_of = {v: path for v, path in zip(jaxpr.invars, paths, strict=True) if path}
        eqns, reads, passes = list(jaxpr.eqns), [], ([], [])
        for n, eqn in enumerate(jaxpr.eqns):
            operands = ["" if isinstance(v, Literal) else path_of.get(v, "") for v in eqn.invars]
            if len(operands) == 1 and operands[0]:
                path_of[eqn.outvars[0]] = operands[0]  # a weight in another type or form
            self._visit(eqn, operands)
            reads.append([path for path in operands if path])
            scope = _jax.scope(eqn)
            is_reversed = (is_backward or "transpose(" in scope) and "rematted_computation" not in scope
            passes[is_reversed].append(n)
            eqns[n] = _jax.map_jaxprs(
                functools.partial(self._inner_jaxpr, paths=operands, is_backward=is_reversed), eqn
            )
        stacks = self._with_callers(jaxpr.eqns)
        for order in (passes[False], passes[True][::-1]):
            told = _told_apart([stacks[n] for n in order], [reads[n] for n in order], self._numbers)
            for n, numbers in zip(order, told, strict=True):
                names = [
                    f"{function.name}~{function.line}~{number}"
                    for (function, _), number in zip(stacks[n], numbers, strict=True)
                    if function.is_users
                ]
                if eqns[n] is not jaxpr.eqns[n]:  # its equations may be those of another call, too
                    names.append(f"~{next(self._numbers)}")
                eqns[n] = functools.reduce(_jax.with_scope, names, eqns[n])
        return _jax.with_equations(x, eqns)

    def _inner_jaxpr(self, x: Any, paths: Sequence[str], is_backward: bool) -> Any:
        key = id(x), is_backward
        if key not in self._inner:
            num = len(_jax.open_jaxpr(x)[0].invars)
            # Loops and branches have operands that one of their jaxprs does not take: the first ones.
            fitting = [*[""] * (num - len(paths)), *paths[max(0, len(paths) - num) :]]
            self._inner[key] = x, self.jaxpr(x, fitting, is_backward=is_backward)
        return self._inner[key][1]

    def _with_callers(self, eqns: Iterable[Any]) -> list[_Stack]:
        """The frames of equations.

        JAX begins the traceback of an equation at the function that it traced. If such equations are in the program
        itself, as those of a region are in a forward pass, the call that has other equations of the function inside
        tells who called it.
        """
        stacks = [self._stack(eqn) for eqn in eqns]
        callers: dict[tuple[_Function, ...], list[_Stack]] = defaultdict(list)
        for eqn, stack in zip(eqns, stacks, strict=True):
            for inner in _jax.inner_jaxprs(eqn):
                for key in {self._traced(self._stack(e)) for e in inner.eqns[:1]} - {self._traced(stack)}:
                    callers[key].append(stack)
        joined: dict[tuple[int, int], _Stack] = {}
        previous: _Stack = ()
        for n, stack in enumerate(stacks):
            if found := callers.get(self._traced(stack)):
                longer = [joined.setdefault((id(caller), id(stack)), caller + stack) for caller in found]
                stacks[n] = max(longer, key=lambda s: _repetition(previous, s).kept[0])
            previous = stacks[n]
        return stacks

    def _stack(self, eqn: Any) -> _Stack:
        traceback = eqn.source_info.traceback
        if id(traceback) not in self._stacks:
            frames = _jax.frames_of(eqn)
            new = {id(code): _Function(code) for code, _ in frames if id(code) not in self._functions}
            self._functions |= new
            self._stacks[id(traceback)] = tuple(_Frame(self._functions[id(code)], at) for code, at in frames)
        return self._stacks[id(traceback)]

    @staticmethod
    def _traced(stack: _Stack) -> tuple[_Function, ...]:
        """The functions from the beginning of a stack to the first one of the user."""
        first = next((n for n, (function, _) in enumerate(stack) if function.is_users), 0)
        return tuple(frame.function for frame in stack[: first + 1])


class _Repetition(NamedTuple):
    """How an equation may have come after the one before it.

    Attributes:
        kept: for each loop that may have been repeated, innermost first, how many frames are of the same calls.
        depth: the outermost frame that is another, or elsewhere.
        in_library: the frames of the same calls if no loop of Python was repeated, as within `functools.reduce`; None
            if that cannot be.
    """

    kept: tuple[int, ...]
    depth: int
    in_library: int | None = None

    @property
    def is_doubtful(self) -> bool:
        return len(self.kept) > 1 or self.in_library is not None

    def entering(self, stack: _Stack, entries: Mapping[_Function, int]) -> _Repetition:
        """Those that call functions of the user where their calls begin."""
        enters = lambda k: all(entries[f] == at for f, at in stack[k : self.depth + 1] if f.is_users)
        loops = tuple(k for k in self.kept if enters(k))
        return self._replace(kept=loops or (self.kept[0] if self.in_library is None else self.in_library,))


def _repetition(before: _Stack, after: _Stack) -> _Repetition:
    if before is after:
        return _Repetition((len(after),), len(after))
    depth = next((n for n, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), None)
    if depth is None:
        depth = min(len(before), len(after))
        if len(before) != len(after) or not depth:
            return _Repetition((depth,), depth)
        depth -= 1  # the last instruction once more
    old, new = before[depth], after[depth]
    kept: list[int] = []
    if old.function is new.function:
        if old.offset < new.offset:
            return _Repetition((depth + 1,), depth)
        kept += [depth + 1] * new.function.num_loops(new.offset, old.offset)
    for n in reversed(range(depth)):
        kept += [n + 1] * after[n].function.num_loops(after[n].offset, after[n].offset)
    return _Repetition(tuple(kept) or (depth,), depth, depth if kept and kept[0] < depth else None)


def _told_apart(stacks: Sequence[_Stack], reads: Sequence[Sequence[str]], numbers: Iterator[int]) -> list[list[int]]:
    """For each equation the numbers of the calls of its frames."""
    last: dict[_Function, int] = {}  # the last equation below each outermost function
    previous: list[int | None] = []
    for n, stack in enumerate(stacks):
        previous.append(last.get(stack[0].function) if stack else None)
        last |= {frame.function: n for frame in stack[:1]}
    repetitions: dict[int, _Repetition] = {}
    entries: dict[_Function, int] = {}  # the instruction at which the first call of a function has its first equation
    for n, (stack, p) in enumerate(zip(stacks, previous, strict=True)):
        for function, offset in stack:
            entries.setdefault(function, offset)
        if p is not None:
            repetitions[n] = _repetition(stacks[p], stack).entering(stack, entries)
    kept = {n: repetition.kept[0] for n, repetition in repetitions.items()}

    starts: dict[_Stack, list[int]] = defaultdict(list)
    for n, (stack, p) in enumerate(zip(stacks, previous, strict=True)):
        if p is None or stacks[p] is not stack:
            starts[stack].append(n)
    for found in starts.values():
        doubtful = {n for n in found if n in repetitions and repetitions[n].is_doubtful}
        shared = {n: num for n, num in _shared_steps(found, reads).items() if n in doubtful} if doubtful else {}
        levels = sorted(set(shared.values()), reverse=True)
        for n, num_shared in shared.items():
            loops, _, in_library = repetitions[n]
            if in_library is not None and len(levels) > len(loops):
                loops = (in_library, *loops)
            kept[n] = loops[min(levels.index(num_shared), len(loops) - 1)]

    told: list[list[int]] = []
    for n, (stack, p) in enumerate(zip(stacks, previous, strict=True)):
        same = [] if p is None else told[p][: kept[n]]
        told.append([*same, *itertools.islice(numbers, len(stack) - len(same))])
    return told


def _shared_steps(starts: Sequence[int], reads: Sequence[Sequence[str]]) -> dict[int, int]:
    """For each repetition of a loop, how many steps the paths that it reads share with those of the one before.

    From ``blocks[0].layers[1]`` to ``blocks[0].layers[2]`` it is an inner loop, to ``blocks[1].layers[0]`` an outer
    one.
    """
    shared: dict[int, int] = {}
    before: set[str] = set()  # the paths of one repetition, and of the objects that they belong to
    for start, end in itertools.pairwise([*starts, len(reads)]):
        paths = {chain(path) for path in itertools.chain(*reads[start:end])}
        if new := [steps for steps in paths if steps[-1] not in before]:
            shared[start] = max(sum(step in before for step in steps) for steps in new)
        before = set(itertools.chain(*paths))
    return {start: num for start, num in shared.items() if start != starts[0]}


def code_of(eqns: Iterable[Any], function: str) -> CodeType | None:
    """The code of a function that runs equations; None if it does not."""
    codes = (code for eqn in eqns for code, _ in _jax.frames_of(eqn))
    return next((code for code in codes if _Function(code).name == function), None)


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
    names = [{x.id for x in values if isinstance(x, ast.Name)} for values in returned]
    return max((len(found & arguments - assigned) for found in names), default=0)


# -- the compiled program ------------------------------------------------------------------------------------------


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
    """The function of a call; empty for a call of equations that may be those of other calls, too."""
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
