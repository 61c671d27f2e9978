"""Numbers of the calls of the user's functions, in the names of equations.

Two calls at one line, as in a loop over layers, have equal frames. But the traceback of an equation, which begins at
the function that JAX traced, has the instruction of each frame, so functions are followed from one equation to the
next. One that goes back without a loop in its code is called once more, by the next loop around it, and begins where
its first call began. A loop that is all of a function looks like a loop around it: there the paths of the weights
tell, and where they do not, as in slices of one list, it counts as one call. XLA keeps the names: `_calls` reads them
in the compiled program.

A profiler of our own was rejected (`sys.setprofile`, `sys.monitoring`): it slows the trace, may take the place of
another, and sees nothing of a program that was traced before.

So were the periods of equal structure that the planner finds: a function that is a loop has one for each repetition.
Of the 36 programs in `tests/test_memory_calls.py` they give the calls of 19. Without the loops in the code 17 programs
have wrong numbers, without the paths of the weights 11.
"""

from __future__ import annotations

import dis
import functools
import inspect
import itertools
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from types import CodeType
from typing import Any, NamedTuple, TypeAlias

from .. import _jax
from .._cached import cached_property
from .._equations.structure import Body, table
from .._jax import Literal
from ..residuals._trace import TracedCall, is_library
from ._names import chain

_OWN = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_SUSPENDED = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
_JUMPS = frozenset([*dis.hasjrel, *dis.hasjabs])
_LEAVING = ("RETURN_VALUE", "RETURN_CONST", "RAISE", "RERAISE", "JUMP_FORWARD", "JUMP_BACKWARD")


class DifferentiatedCall:
    """A function that is differentiated, of one equation (`_jax.deferred_call`): ``(inputs) -> outputs``."""

    def __init__(self, body: Body, name: str, num_out: int):
        self.body, self.name, self.num_out = body, name, num_out

    def __call__(self, inputs: Sequence[Any]) -> list[Any]:
        return self.body((), *inputs)


def numbered(x: Any, paths: Sequence[str] | None = None) -> Any:
    """A jaxpr, closed or not, with the calls of the user's functions in the names of its equations; so are the bodies
    of functions of one equation.

    Args:
        paths: for each input, of the argument or state that it is; empty for any other. By default the names of the
            arguments.
    """
    if paths is None:
        jaxpr, _ = _jax.open_jaxpr(x)
        names = jaxpr.debug_info.arg_names or ()
        paths = names if len(names) == len(jaxpr.invars) else [""] * len(jaxpr.invars)
    return _Numbering().jaxpr(x, paths, is_backward=False)


def numbered_body(call: TracedCall) -> Body:
    """The equations of a traced call, with the calls of the user's functions in their names."""
    paths = [*[""] * call.body.num_operands, *(i.origin.path for i in call.inputs)]
    return Body(numbered(call.body.jaxpr, paths), call.body.operands)


def traced_call(fun: Callable, args: tuple, kwargs: dict[str, Any]) -> TracedCall:
    """A call to profile, with the calls of the user's functions in the names of its equations."""
    with table.bypassed():  # shared structures have the source lines of the first one
        call = TracedCall("memory_profile", fun, args, kwargs)
    call.body = numbered_body(call)
    return call


class _Function:
    """The code of a function. Compared by identity: the hash of a code object would go through all its constants."""

    def __init__(self, code: CodeType):
        self._code = code

    @cached_property
    def name(self) -> str:
        """The name and the line of the definition; empty for a function of a library, or for a generator, which other
        calls interrupt.
        """
        code, file = self._code, self._code.co_filename
        is_users = not (code.co_flags & _SUSPENDED or is_library(file) or file.startswith(_OWN))
        return f"{frame_name(code)}~{code.co_firstlineno}" if is_users else ""

    def num_loops(self, first: int, last: int) -> int:
        """The number of its loops around two instructions."""
        return sum(start <= first and last <= end for start, end in self._loops)

    def defines(self, other: _Function) -> bool:
        """Whether the code of another one is in it: a lambda or an inner function, that a library may call for it."""
        return any(x is other._code for x in self._code.co_consts)

    @cached_property
    def _loops(self) -> list[tuple[int, int]]:
        """The first and the last instruction of each loop: a jump backward, but not from the handler of an exception,
        which may be behind all other code.
        """
        instructions = list(dis.get_instructions(self._code))
        number = {x.offset: n for n, x in enumerate(instructions)}
        loops: dict[int, int] = {}  # the last jump to each first instruction
        waiting, seen = [0], set()
        while waiting:
            n = waiting.pop()
            if n in seen:
                continue
            seen.add(n)
            x = instructions[n]
            if x.opcode in _JUMPS:
                waiting.append(number[x.argval])
                if x.argval < x.offset:
                    loops[x.argval] = max(x.offset, loops.get(x.argval, 0))
            if not x.opname.startswith(_LEAVING):
                waiting.append(n + 1)
        return [*loops.items()]


def frame_name(code: CodeType) -> str:
    """The name of a function as in the frames of XLA."""
    return code.co_qualname.replace("<locals>.", "")


class _Running(NamedTuple):
    """A function that runs, and the offset of its instruction."""

    function: _Function
    offset: int


_Stack: TypeAlias = tuple[_Running, ...]  # outermost first; the same object for the same traceback


class _Numbering:
    """Numbers the calls in a program, each by its first equation."""

    def __init__(self) -> None:
        self._functions: dict[int, _Function] = {}  # by the id of the code
        self._stacks: dict[int, _Stack] = {}  # by the id of the traceback
        self._inner: dict[tuple[int, bool], tuple[Any, Any]] = {}  # the jaxpr of a jitted function is in all its calls

    def jaxpr(self, x: Any, paths: Sequence[str], *, is_backward: bool) -> Any:
        """The jaxpr with numbers.

        In a backward pass derivatives come in the reverse order of their equations, recomputed equations in the same.
        """
        jaxpr, _ = _jax.open_jaxpr(x)
        path_of = {v: path for v, path in zip(jaxpr.invars, paths, strict=True) if path}
        eqns, reads = [], []
        orders: dict[bool, list[int]] = {False: [], True: []}
        for n, eqn in enumerate(jaxpr.eqns):
            operands = ["" if isinstance(v, Literal) else path_of.get(v, "") for v in eqn.invars]
            if len(operands) == 1 and operands[0]:  # a weight in another type or form
                path_of |= dict.fromkeys(eqn.outvars, operands[0])
            if isinstance(gradient := _jax.deferred_function(eqn), DifferentiatedCall):
                gradient.body = Body(numbered(gradient.body.jaxpr, operands), [])
            reads.append([path for path in operands if path])
            scope = _jax.scope(eqn)
            is_reversed = (is_backward or "transpose(" in scope) and "rematted_computation" not in scope
            orders[is_reversed].append(n)
            inner = functools.partial(self._inner_jaxpr, paths=operands, is_backward=is_reversed)
            eqns.append(_jax.map_jaxprs(inner, eqn))
        stacks = self._with_callers(jaxpr.eqns)
        for order in (orders[False], orders[True][::-1]):
            calls = _calls([stacks[n] for n in order], [reads[n] for n in order])
            for n, firsts in zip(order, calls, strict=True):
                frames = zip(stacks[n], firsts, strict=True)
                names = [f"{function.name}~{order[first]}" for (function, _), first in frames if function.name]
                if eqns[n] is not jaxpr.eqns[n]:  # the equations inside may belong to another call, too
                    names.append(f"~{n}")
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
        itself, as a region's are in a forward pass, an equation with others of the function inside tells who called it.
        """
        stacks = [self._stack(eqn) for eqn in eqns]
        callers: dict[tuple[_Function, ...], dict[_Stack, None]] = defaultdict(dict)
        for eqn, stack in zip(eqns, stacks, strict=True):
            for traced in {_traced(self._stack(e)) for inner in _jax.inner_jaxprs(eqn) for e in inner.eqns[:1]}:
                if traced != _traced(stack):
                    callers[traced][stack] = None
        joined: dict[tuple[int, int], _Stack] = {}
        previous: _Stack = ()
        for n, stack in enumerate(stacks):
            if candidates := callers.get(_traced(stack)):
                caller = max(candidates, key=lambda caller: _num_shared(previous, caller))
                stacks[n] = joined.setdefault((id(caller), id(stack)), caller + stack)
            previous = stacks[n]
        return stacks

    def _stack(self, eqn: Any) -> _Stack:
        traceback = id(eqn.source_info.traceback)
        if traceback not in self._stacks:
            # A derivative rule is a part of what calls the function: rematerialized, it would keep no less.
            frames = [*itertools.takewhile(lambda frame: not _jax.calls_rule(frame[0]), _jax.frames_of(eqn))]
            self._functions |= {id(c): _Function(c) for c, _ in frames if id(c) not in self._functions}
            self._stacks[traceback] = tuple(_Running(self._functions[id(code)], offset) for code, offset in frames)
        return self._stacks[traceback]


def _traced(stack: _Stack) -> tuple[_Function, ...]:
    """The functions from the beginning of a stack to the first one of the user."""
    first = next((n for n, (function, _) in enumerate(stack) if function.name), 0)
    return tuple(function for function, _ in stack[: first + 1])


def _num_shared(a: Sequence[Any], b: Sequence[Any]) -> int:
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


class _Repetition(NamedTuple):
    """How an equation may have come after another one.

    Attributes:
        depths: for each loop that may go on with it, innermost first, how many frames are of the same calls.
        in_library: how many are if no loop of Python does, as within `functools.reduce`; None if that cannot be.
    """

    depths: tuple[int, ...]
    in_library: int | None = None


def _repetition(old_stack: _Stack, new_stack: _Stack, entries: dict[_Function, int]) -> _Repetition:
    depth = _num_shared(old_stack, new_stack)
    if old_stack is new_stack or depth == len(old_stack) != len(new_stack) or depth == len(new_stack) != len(old_stack):
        return _Repetition((depth,))
    depth = min(depth, len(new_stack) - 1)  # the innermost instruction once more
    old, new = old_stack[depth], new_stack[depth]
    depths: list[int] = []
    if old.function is new.function:
        if old.offset < new.offset:
            return _Repetition((depth + 1,))
        depths += [depth + 1] * new.function.num_loops(new.offset, old.offset)
    for n in reversed(range(depth)):
        depths += [n + 1] * new_stack[n].function.num_loops(new_stack[n].offset, new_stack[n].offset)
    in_library = depth if depths and depths[0] < depth else None
    is_entered = lambda num: all(entries[f] == offset for f, offset in new_stack[num : depth + 1] if f.name)
    # Without a loop, as within `functools.reduce`, no call can come back to its instruction: it is of a function that
    # was given to a library.
    callback_depths = (
        n + 1 for n in range(depth) if new_stack[n].function.defines(new_stack[n + 1].function) and is_entered(n + 1)
    )
    default = in_library if in_library is not None else depths[0] if depths else next(callback_depths, depth)
    return _Repetition(tuple(filter(is_entered, depths)) or (default,), in_library)


def _calls(stacks: Sequence[_Stack], reads: Sequence[Sequence[str]]) -> list[list[int]]:
    """For each equation, by their order, and each of its frames the number of the first equation of the call."""
    last: dict[_Function, int] = {}  # the last equation below each outermost function
    previous: list[int | None] = []
    entries: dict[_Function, int] = {}  # where its first call begins: so will others
    starts: dict[_Stack, list[int]] = defaultdict(list)
    repetitions: dict[int, _Repetition] = {}
    for n, stack in enumerate(stacks):
        for function, offset in stack:
            entries.setdefault(function, offset)
        p = last.get(stack[0].function) if stack else None
        last |= {frame.function: n for frame in stack[:1]}
        previous.append(p)
        if p is not None:
            repetitions[n] = _repetition(stacks[p], stack, entries)
        if p is None or stacks[p] is not stack:
            starts[stack].append(n)

    depth_of = {n: repetition.depths[0] for n, repetition in repetitions.items()}
    for numbers in starts.values():
        doubtful = [
            n for n in numbers if n in repetitions and (len(repetitions[n].depths) > 1 or repetitions[n].in_library)
        ]
        shared = _shared_steps(numbers, reads) if doubtful else {}
        levels = sorted({shared[n] for n in doubtful if n in shared}, reverse=True)
        for n in filter(shared.__contains__, doubtful):
            loops, in_library = repetitions[n]
            if in_library is not None and len(levels) > len(loops):
                loops = (in_library, *loops)
            depth_of[n] = loops[min(levels.index(shared[n]), len(loops) - 1)]

    calls: list[list[int]] = []
    for n, (stack, p) in enumerate(zip(stacks, previous, strict=True)):
        firsts = [] if p is None else calls[p][: depth_of[n]]
        calls.append([*firsts, *[n] * (len(stack) - len(firsts))])
    return calls


def _shared_steps(starts: Sequence[int], reads: Sequence[Sequence[str]]) -> dict[int, int]:
    """For each repetition of a loop, how many steps its paths share with the paths of the one before.

    From ``blocks[0].layers[1]`` to ``blocks[0].layers[2]`` it is an inner loop, to ``blocks[1].layers[0]`` an outer
    one. A repetition whose new paths are unrelated to the paths that they replace, or that reads the same again, shares
    all steps.
    """
    shared: dict[int, int] = {}
    previous: set[tuple[str, ...]] = set()  # the paths that one repetition reads, each with its parents
    for start, end in itertools.pairwise([*starts, len(reads)]):
        paths = {chain(path) for path in itertools.chain(*reads[start:end])}
        if paths and previous:  # else they tell nothing
            previous_steps = set(itertools.chain(*previous))
            replaced = {steps[0] for steps in previous - paths}
            new = [steps for steps in paths if steps[-1] not in previous_steps and steps[0] in replaced]
            shared[start] = max(sum(step in previous_steps for step in steps) for steps in new or paths)
        previous = paths
    return shared
