"""What names in a compiled program tell of the user's: phase, region, loop, function, line, module.

XLA keeps the name stack of the operation, such as
``jit(step)/transpose(jvp(Block))/checkpoint/rematted_computation/dot_general``, and the user's stack of functions and
lines. A fusion has the names and lines of its last operation.
"""

from __future__ import annotations

import functools
import itertools
import os
import re
import sys
import traceback
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, get_args

from .._jax import PRIMITIVES, CompiledProgram, Instruction, StackFrame, product_of
from ..residuals._trace import INSTALLED, is_library
from ._lifetimes import FORWARDS, FlatSchedule
from .buffer import Loop, Phase

# Parts of a name stack that JAX or we add: loops, branches, calls, regions, marks and the functions of jax.numpy.
_ADDED = re.compile(
    r"jit\(.*\)|pjit|while|body|cond|closed_call|eval_jaxpr|branch_\d+_fun|checkpoint|rematted_computation|remat\d*|"
    r"custom_[jv][jv]p_call\w*|"
    r"shard_map|scan|core_call|vmap\(\)|jvp\(\)|transpose\(\)|xla_call|statetx_differentiates_\w+"
)
_CALLED = re.compile(r"closed_call|eval_jaxpr")  # the body of a scan; its name is the second one since JAX 0.11.2
# Names of operations that XLA itself recomputes, on GPUs and TPUs, in a program that would not fit
# (xla/hlo/transforms/simplifiers/hlo_rematerialization.cc).
AGAIN = re.compile(r"\.remat\d*(\.|$)")
_CONVERTS = ("bitcast", "reshape", "convert", "copy")
_REARRANGES = (*_CONVERTS, "transpose")
PRODUCTS = frozenset(PRIMITIVES.values())
_CALL = re.compile(r".*~\d*")  # the name of a call, by `_calls`
_NUMBER = re.compile(r"~\d+")
_PATH_STEP = re.compile(r"""(\.\w+|\['[^']*'\]|\["[^"]*"\]|\[[^\[\]]*\])$""")  # a key in quotes may have brackets


class Origin(NamedTuple):
    """Source of an instruction.

    Attributes:
        scopes: names that the user or a library gave (``jax.named_scope``, flax's modules), joined by slashes.
        calls: the calls of the user's functions around it, outermost first, as in `Step.calls`.
    """

    primitive: str
    phase: Phase
    is_recomputed: bool
    region: str
    scopes: str
    function: str
    source: str
    frames: tuple[StackFrame, ...]
    calls: tuple[str, ...] = ()


NOWHERE = Origin("", "forward", False, "", "", "", "", ())


class InstructionNames:
    """The origins of a program's instructions.

    Attributes:
        turn, last_backward: the first and the last step of the backward pass (`_turn`); after all steps if there is
            none.
    """

    def __init__(self, program: CompiledProgram, schedule: FlatSchedule):
        self.program = program
        self.schedule = schedule
        self._users: dict[int, list[Instruction]] = {}
        for instruction in schedule.order:
            for operand in instruction.operands:
                self._users.setdefault(operand, []).append(instruction)
        self._callers = _callers()
        # Caches of the object's own: a cache of the class would keep every program.
        self.frames = functools.cache(self._frames_of)  # `(instruction) -> object`
        self.origin = functools.cache(self._origin_of)  # `(instruction) -> object`
        self._loop = functools.cache(self._loop_of)  # `(instruction) -> object`
        self.turn, self.last_backward = _turn(schedule)
        # In the forward pass a region is a scope like any other: it is known by its recomputation.
        self._regions = {_parsed(i.op_name).region for i in schedule.order} - {""}

    def _frames_of(self, instruction: Instruction) -> tuple[StackFrame, ...]:
        """The user's stack within the program: JAX records that of the caller of the program, too."""
        frames = instruction.frames
        while frames and (frames[-1].function, frames[-1].file) in self._callers:
            frames = frames[:-1]
        return frames

    def _origin_of(self, instruction: Instruction) -> Origin:
        """Origin of the operation that computes its result; of its operand or its first reader if it has no name of
        its own.
        """
        named = next(self._named(instruction), None)
        if named is None:
            return NOWHERE._replace(phase=self._phase(instruction, ""))
        origin = _origin(named.op_name, self.frames(named))
        region = next((r for r in reversed(origin.scopes.split("/")) if r in self._regions), origin.region)
        phase = self._phase(instruction, instruction.op_name or named.op_name)
        if (
            instruction.opcode == "tuple" and not instruction.op_name
        ):  # its first element may be the loss, the others new weights
            elements = (self.program.instructions[i] for i in instruction.operands)
            phase = max((self.origin(i).phase for i in elements), key=get_args(Phase).index)
        is_again = self._is_again(instruction)
        if is_again:
            phase = "backward"  # the name stack comes from the first computation
        return origin._replace(
            region=region,
            phase=phase,
            is_recomputed=origin.is_recomputed or is_again,
            primitive=self._product(instruction) or _not_copied(instruction, origin.primitive),
        )

    def _is_again(self, instruction: Instruction) -> bool:
        """Whether XLA itself computes it again for the backward pass.

        A value recomputed before the turn is a residual like any other, if the backward pass reads it: often it is only
        moved.
        """
        return self.schedule.step.get(instruction.id, 0) >= self.turn and AGAIN.search(instruction.name) is not None

    def _product(self, instruction: Instruction) -> str:
        """The primitive of a product of matrices or a convolution, which may carry the name of a transposition next to
        it.
        """
        instructions = [instruction]
        if instruction.opcode == "fusion":
            instructions = list(self.program.computations[instruction.called[0]].instructions)
        return next(filter(None, map(product_of, instructions)), "")

    def _phase(self, instruction: Instruction, op_name: str) -> Phase:
        if "transpose(" in op_name:
            return "backward"
        step = self.schedule.step.get(instruction.id, 0)
        if "jvp(" in op_name or step < self.turn:
            return "forward"
        return "update" if step > self.last_backward else "backward"

    def _named(self, instruction: Instruction, depth: int = 0) -> Iterator[Instruction]:
        """The instruction itself, else those inside its fusion, else its operands, else its users: those with
        a name.
        """
        if instruction.opcode == "parameter":
            if depth == 0 and instruction.computation in self.schedule.caller:  # a loop's carry
                yield self.schedule.caller[instruction.computation]
            return
        if instruction.op_name and self.frames(instruction):
            yield instruction
        if instruction.opcode == "fusion":
            instructions = self.program.computations[instruction.called[0]].instructions
            yield from (i for i in reversed(instructions) if i.op_name and self.frames(i))
        if instruction.op_name:
            yield instruction
        if depth < 3:
            for operand in self._passed_on(instruction):
                yield from self._named(operand, depth + 1)
            if depth == 0:
                for user in self._users.get(instruction.id, ())[:2]:
                    yield from self._named(user, 3)

    def _passed_on(self, instruction: Instruction) -> list[Instruction]:
        """The first operand of an instruction; for an element of a tuple, the tuple's operand."""
        operands = [self.program.instructions[i] for i in instruction.operands[:1]]
        if instruction.opcode == "get-tuple-element" and operands[0].opcode == "tuple":
            return [self.program.instructions[operands[0].operands[instruction.index]]]
        return operands

    def loops(self, instruction: Instruction) -> list[Loop]:
        """The loops around an instruction, innermost first."""
        return [self._loop(c) for c in self.schedule.callers(instruction) if c.opcode == "while"]

    def _loop_of(self, instruction: Instruction) -> Loop:
        body = self.program.computations[instruction.called[0]].instructions
        depth = instruction.op_name.count("/while") or 1
        is_scan = any(i.op_name.split("/while/body")[depth:][:1] and _CALLED.search(i.op_name) for i in body)
        frames = self.frames(instruction)
        _, source = innermost(frames)
        name = "scan" if is_scan or instruction.trip_count is not None else "while_loop"
        return Loop(name, instruction.trip_count, source, _library(frames[:1]))

    def stacking(self, instruction: Instruction) -> Instruction | None:
        """Instruction that computes the slice of a stack that this one writes in each step of a loop, if it does."""
        if instruction.opcode == "dynamic-update-slice":
            return self._argument(self.program.instructions[instruction.operands[1]])
        if instruction.opcode != "fusion":
            return None
        root = self._result(instruction, ())
        if root.opcode == "bitcast" and root.operands:
            root = self.program.instructions[root.operands[0]]
        if root.opcode != "dynamic-update-slice":
            return None
        return self._before_conversion(self.program.instructions[root.operands[1]], instruction)

    def converted(self, instruction: Instruction, index: Sequence[int] = ()) -> Instruction:
        """The instruction whose result it converts to another type or shape; itself if it does not.

        Args:
            index: of the result, if the instruction is a fusion with several.
        """
        if instruction.opcode == "fusion":
            return self._before_conversion(self._result(instruction, index), instruction)
        return self._before_conversion(instruction, None)

    def rearranged(self, instruction: Instruction) -> Instruction:
        """The instruction whose entries it holds in another order, shape or type; itself if it computes anything.

        On GPUs weights are transposed before the products and convolutions that read them, several weights by one
        fusion.
        """
        fusion, index = instruction, ()
        if instruction.opcode == "get-tuple-element":
            fusion, index = self.program.instructions[instruction.operands[0]], (instruction.index,)
        if fusion.opcode != "fusion":
            return self._before_conversion(instruction, None, _REARRANGES)
        source = self._before_conversion(self._result(fusion, index), fusion, _REARRANGES)
        return instruction if source.computation == fusion.called[0] else source

    def _result(self, fusion: Instruction, index: Sequence[int]) -> Instruction:
        """The instruction inside a fusion that computes its result, or of several the one of this index."""
        root = self.program.instructions[self.program.computations[fusion.called[0]].root]
        return self.program.instructions[root.operands[index[0]]] if index and root.opcode == "tuple" else root

    def origin_at(self, instruction: Instruction, index: Sequence[int]) -> Origin:
        """Origin of one result of an operation that has several: a fusion has the name of one of them."""
        origin = self.origin(instruction)
        if instruction.opcode != "fusion" or not index:
            return origin
        told = self.origin(self._result(instruction, index))
        if not told.source:
            return origin
        is_recomputed = told.is_recomputed or self._is_again(instruction)
        return told._replace(phase=origin.phase, is_recomputed=is_recomputed)

    def _before_conversion(
        self, instruction: Instruction, fusion: Instruction | None, opcodes: Sequence[str] = _CONVERTS
    ) -> Instruction:
        while instruction.opcode in opcodes and instruction.operands:
            instruction = self.program.instructions[instruction.operands[0]]
        if fusion is not None and instruction.opcode == "parameter":
            instruction = self._argument(self.program.instructions[fusion.operands[instruction.index]])
        return instruction

    def _argument(self, instruction: Instruction) -> Instruction:
        """Operand of a call behind its parameter; anything else unchanged.

        On GPUs a loop's slice that is only copied into a stack is written by an asynchronous call, beside other
        operations.
        """
        while instruction.opcode == "parameter":
            caller = self.schedule.caller.get(instruction.computation)
            if caller is None or caller.opcode not in ("async-start", "call"):
                break
            instruction = self.program.instructions[caller.operands[instruction.index]]
        return instruction

    def element(self, instruction: Instruction) -> Instruction:
        """Instruction that computes an element of the results of an operation that has several; anything
        else unchanged.

        Such operations are fusions, and calls of libraries, which have working memory as another result.
        """
        if instruction.opcode != "get-tuple-element":
            return instruction
        several = self.program.instructions[instruction.operands[0]]
        if several.opcode == "fusion":
            return self._result(several, (instruction.index,))
        return several if several.opcode == "custom-call" else instruction


def _callers() -> frozenset[tuple[str, str]]:
    """The functions that are running, and their files: those that ask for the names of a program, none of its own."""
    codes = (frame.f_code for frame, _ in traceback.walk_stack(sys._getframe()))
    return frozenset((code.co_qualname.replace(".<locals>", ""), code.co_filename) for code in codes)


def stored_as(op_name: str) -> str:
    """The format of an operation that stores a value in fewer bits (`statetx._jax.store`); "" for any other."""
    match = re.search(r"statetx_encode_(\w+)", op_name)
    return match[1] if match else ""


def _turn(schedule: FlatSchedule) -> tuple[int, int]:
    """The first and the last step of the backward pass; if the program takes several gradients, the turn of the one
    with most operations.

    XLA moves some steps of either pass into the other: zeros that gradients are added to come early, for example. So
    the turn is where most steps of the forward pass are before it and most of the backward pass behind it. Steps that
    no gradient differentiates, such as an optimizer's, are in neither pass: they would count as a forward pass of their
    own, longer than the model's.
    """
    passes = [0 if i.opcode in FORWARDS or i.opcode == "constant" else _pass(i.op_name) for i in schedule.order]
    num = len(passes)
    backward = [n for n, p in enumerate(passes) if p < 0]
    if not backward:
        return num, num
    sums = [0, *itertools.accumulate(passes)]
    return max(range(num + 1), key=lambda n: (sums[n], -n)), backward[-1]


def _pass(op_name: str) -> int:
    """-1 in a backward pass, 1 in the forward pass of a derivative, 0 elsewhere."""
    return -1 if "transpose(" in op_name else int("jvp(" in op_name)


def _not_copied(instruction: Instruction, primitive: str) -> str:
    """The primitive of the instruction's name; "copy" if XLA copies an operand of a product under the
    product's name.
    """
    return "copy" if instruction.opcode == "copy" and primitive in PRODUCTS else primitive


def _origin(op_name: str, frames: Sequence[StackFrame]) -> Origin:
    function, source = innermost(frames)
    parsed = _parsed(op_name)
    return parsed._replace(
        function=function,
        source=source,
        frames=_of_user(tuple(frames)),
        calls=calls_of(op_name) if "~" in op_name else (),
    )


@functools.lru_cache(maxsize=10_000)
def _of_user(frames: tuple[StackFrame, ...]) -> tuple[StackFrame, ...]:
    """The frames outside of installed libraries."""
    return tuple(f for f in frames if not is_library(f.file))


def _parsed(op_name: str) -> Origin:
    """The parts of a name without its calls, whose numbers no other program has."""
    return _parsed_without_numbers(_NUMBER.sub("~", op_name))


@functools.lru_cache(maxsize=10_000)
def _parsed_without_numbers(op_name: str) -> Origin:
    op_name = op_name.partition(";")[0]  # XLA joins the names of operations that it merges
    parts = [p for p in _split(op_name) if not _CALL.fullmatch(_unwrapped(p))]
    # A copy of an argument is called as the argument.
    primitive = parts[-1] if len(parts) > 1 and "(" not in parts[-1] else ""
    is_recomputed = "rematted_computation" in parts
    region = ""
    for enclosing, part in zip(["", *parts], parts, strict=False):
        if part == "checkpoint" or re.fullmatch(r"remat\d*", part):
            region = _unwrapped(enclosing) or "checkpoint"
    # An einsum names its operations after its formula.
    scopes = [_unwrapped(p) for p in parts[:-1] if not _ADDED.fullmatch(p) and "->" not in p]
    distinct = [s for n, s in enumerate(scopes) if s and s not in scopes[:n]]
    return NOWHERE._replace(
        primitive=primitive,
        is_recomputed=is_recomputed,
        region=region,
        scopes="/".join(distinct),
        calls=calls_of(op_name),
    )


def calls_of(name_stack: str) -> tuple[str, ...]:
    """The calls of the user's functions in a name stack; see `Origin.calls`."""
    parts = map(_unwrapped, _split(name_stack.partition(";")[0]))
    return tuple(p for p in parts if _CALL.fullmatch(p))


def without_calls(name_stack: str) -> str:
    """A name stack without the calls of functions."""
    return re.sub(r"[^()/]*~\d+", "", name_stack)


def _split(op_name: str) -> list[str]:
    """The parts of a name stack; a slash inside parentheses belongs to a part."""
    parts, depth, start = [], 0, 0
    for n, character in enumerate(op_name):
        depth += (character == "(") - (character == ")")
        if character == "/" and depth <= 0:
            parts.append(op_name[start:n])
            start = n + 1
    return [p for p in [*parts, op_name[start:]] if p]


def _unwrapped(part: str) -> str:
    """``Block`` of ``transpose(jvp(Block))``; nothing of ``jit(f)``."""
    while (match := re.fullmatch(r"(jvp|transpose|vmap|remat|rematted_computation)\((.*)\)", part)) is not None:
        part = match[2]
    return "" if _ADDED.fullmatch(part) or part.startswith("jit(") else part


def innermost(frames: Sequence[StackFrame]) -> tuple[str, str]:
    """The innermost function of the user, not of an installed library, and its line:
    ``("Block.__call__", "/home/ann/model.py:12")``.
    """
    for frame in [f for f in frames if not is_library(f.file)] or frames[:1]:
        return frame.function, f"{frame.file}:{frame.line}"
    return "", ""


def _library(frames: Sequence[StackFrame]) -> str:
    """The installed library that the first frame is in, as in ``"flax"``; empty if it is the user's."""
    for folder in INSTALLED:
        if frames and folder in frames[0].file:
            return frames[0].file.rpartition(folder)[2].partition(os.sep)[0].removesuffix(".py")
    return ""


def parent(path: str) -> str:
    """The object that a state or an array belongs to: ``net.blocks.0`` of ``net.blocks.0.w``; nothing of a
    plain name.
    """
    return _PATH_STEP.sub("", path) if _PATH_STEP.search(path) else ""


def common_parent(paths: Iterable[str]) -> str:
    """The innermost object that all of them belong to."""
    paths = list(paths)
    if not paths:
        return ""
    chains = [chain(parent(p)) for p in paths]
    shared = [step for step in chains[0] if all(step in chain for chain in chains)]
    return shared[-1] if shared else ""


@functools.lru_cache(maxsize=10_000)
def chain(path: str) -> tuple[str, ...]:
    """The path and its parents, outermost first."""
    chain: list[str] = []
    while path:
        chain.append(path)
        path = parent(path)
    return tuple(reversed(chain))
