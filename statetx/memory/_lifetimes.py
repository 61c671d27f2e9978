"""Lifetimes of the values of a compiled program: the first live step, the last one.

The schedule is made flat: the body of a loop, a conditional or a call comes once, before its instruction. A
value lives from the step that defines it to the last step that reads it at any of its places: a tuple, a
get-tuple-element, a loop's carry and the result of a branch are places of the values that they hold, not copies. XLA
assigns memory by the same rule (``HloLiveRange`` in xla/hlo/utils), so two values that share memory never live at the
same time: the tests check that.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from .._jax.buffers import CompiledProgram, Computation, Instruction

# These return an operand or part of one; they need no memory and read nothing.
FORWARDS = {"tuple", "get-tuple-element", "bitcast", "parameter", "opt-barrier", "domain", "add-dependency"}
_CALLS = {"call", "conditional", "while", "async-start"}

Places = dict[tuple[int, ...], frozenset[int]]
"""The values at each index of a result, which may be a tuple of tuples."""


class Lifetime(NamedTuple):
    """A value's memory in an allocation, and its first and last step."""

    value: int
    allocation: int
    offset: int
    num_bytes: int
    start: int
    end: int


class FlatSchedule:
    """The instructions of a program in order of execution.

    Attributes:
        order: all scheduled instructions; those that a loop, call or conditional runs precede it.
        step: the index of an instruction in `order`, by id.
        span: the first and last index of a computation, by its id.
        caller: the instruction that runs a computation, by the computation's id.
    """

    def __init__(self, program: CompiledProgram):
        self.program = program
        self.order: list[Instruction] = []
        self.step: dict[int, int] = {}
        self.span: dict[int, tuple[int, int]] = {}
        self.caller: dict[int, Instruction] = {}
        self._flatten(program.computations[program.entry])

    def _flatten(self, computation: Computation) -> None:
        first = len(self.order)
        for instruction in computation.instructions:
            if instruction.opcode in _CALLS:
                for callee in called(instruction):
                    if callee not in self.span:  # computations that are called twice are laid out once
                        self.caller[callee] = instruction
                        self._flatten(self.program.computations[callee])
            self.step[instruction.id] = len(self.order)
            self.order.append(instruction)
        self.span[computation.id] = (first, len(self.order) - 1)

    def callers(self, instruction: Instruction) -> Iterator[Instruction]:
        """The loops, conditionals and calls around an instruction, innermost first."""
        computation = instruction.computation
        while computation in self.caller:
            yield (caller := self.caller[computation])
            computation = caller.computation


def called(instruction: Instruction) -> list[int]:
    """The computations that it runs, in their order: of a loop the condition first, as the schedule has them."""
    if instruction.opcode == "while":
        body, condition = instruction.called
        return [condition, body]
    return list(instruction.called)


class Flow:
    """Values at each place of a program."""

    def __init__(self, program: CompiledProgram, schedule: FlatSchedule):
        self.program = program
        self.schedule = schedule
        self.defined: dict[int, dict[tuple[int, ...], int]] = defaultdict(dict)
        for value in program.values.values():
            self.defined[value.place[0]][value.place[1]] = value.id
        self.places: dict[int, Places] = {}
        changed = True
        while changed:  # values flow around loops: two rounds for each level of nesting at most
            changed = False
            for instruction in schedule.order:
                held = self._held(instruction)
                if held != self.places.get(instruction.id):
                    self.places[instruction.id] = held
                    changed = True

    def _held(self, instruction: Instruction) -> Places:
        """The values at each index of an instruction's result: those that it defines, else those that it forwards."""
        defined = self.defined.get(instruction.id, {}).items()
        return self._forwarded(instruction) | {index: frozenset((value,)) for index, value in defined}

    def _forwarded(self, instruction: Instruction) -> Places:
        operands = [self.places.get(o, {}) for o in instruction.operands]
        results = [self.places.get(self._root(c), {}) for c in instruction.called]
        match instruction.opcode:
            case "tuple":
                return _in_tuple(*operands)
            case "get-tuple-element":
                return _element(operands[0], instruction.index)
            case "bitcast" | "opt-barrier" | "domain" | "add-dependency":
                return operands[0]
            case "parameter":
                return self._parameter(instruction)
            case "while":  # its body comes first, then its condition
                return _union(operands[0], results[0])
            case "conditional" | "call":
                return _union(*results)
            # Operations that run beside others, as on GPUs: the start holds the operands until it is done.
            case "async-start":  # (operands, results of its computation, ...)
                return _in_tuple(_in_tuple(*operands), results[0])
            case "copy-start":  # (copy, operand, ...)
                return _in_tuple({}, operands[0])
            case "all-gather-start" | "collective-permute-start":  # (operands, results, ...)
                return _in_tuple(_in_tuple(*operands) if len(operands) > 1 else operands[0])
            case "async-update" | "all-reduce-done":
                return operands[0]
            case "copy-done":
                return _element(operands[0], 0)
            case "async-done" | "all-gather-done" | "collective-permute-done":
                return _element(operands[0], 1)
            case _:
                return {}

    def _parameter(self, parameter: Instruction) -> Places:
        caller = self.schedule.caller.get(parameter.computation)
        if caller is None:
            return {}
        if caller.opcode == "while":
            return self._forwarded(caller)
        # The first operand of a conditional chooses the branch.
        is_branch = caller.opcode == "conditional"
        number = 1 + list(caller.called).index(parameter.computation) if is_branch else parameter.index
        return self.places.get(caller.operands[number], {})

    def _root(self, computation: int) -> int:
        return self.program.computations[computation].root


def _in_tuple(*held: Places) -> Places:
    return {(n, *index): values for n, places in enumerate(held) for index, values in places.items()}


def _element(held: Places, number: int) -> Places:
    return {index[1:]: values for index, values in held.items() if index[:1] == (number,)}


def _union(*held: Places) -> Places:
    out: Places = {}
    for places in held:
        for index, values in places.items():
            out[index] = out.get(index, frozenset()) | values
    return out


def lifetimes(program: CompiledProgram, schedule: FlatSchedule, flow: Flow) -> list[Lifetime]:
    """Lifetimes of the values that have memory of their own on the device, in an allocation of the program, by
    allocation and offset.
    """
    starts, ends = _spans(program, schedule, flow)
    return [
        Lifetime(value, allocation.index, offset, size, starts[value], ends[value])
        for allocation in program.allocations
        if not (allocation.is_thread_local or allocation.is_elsewhere)  # on the stack of a fused operation; offloaded
        for value, offset, size in allocation.values
        if value in starts
    ]


def _spans(program: CompiledProgram, schedule: FlatSchedule, flow: Flow) -> tuple[dict[int, int], dict[int, int]]:
    last = len(schedule.order) - 1
    starts = {
        value.id: schedule.step[value.place[0]] for value in program.values.values() if value.place[0] in schedule.step
    }
    read = readers(schedule, flow)
    for value, done in _overwritten(program, schedule, flow):
        read[value] = [n for n in read[value] if n not in done]
    ends = {value: max(steps, default=starts[value]) for value, steps in read.items()}
    ends = {value: max(start, ends.get(value, 0)) for value, start in starts.items()}
    for computation, (_, end) in schedule.span.items():
        for values in flow.places[program.computations[computation].root].values():
            for value in values:  # the result of a computation lives until it ends
                ends[value] = max(ends[value], end)
    for loop in (i for i in schedule.order if i.opcode == "while"):
        condition = called(loop)[0]
        for parameter in program.computations[condition].instructions:
            if parameter.opcode == "parameter":
                for values in flow.places[parameter.id].values():
                    for value in values:  # the body reads the carry after the condition
                        ends[value] = max(ends[value], schedule.span[condition][1])
    for allocation in program.allocations:
        if allocation.parameter is not None and not allocation.is_output:
            for value, _, _ in allocation.values:  # the caller owns it all along
                starts[value], ends[value] = 0, last
    return starts, ends


def _overwritten(program: CompiledProgram, schedule: FlatSchedule, flow: Flow) -> Iterator[tuple[int, set[int]]]:
    """Values that an asynchronous operation writes over, as it writes a slice of a stack, and the steps that only begin
    it and wait for its end.
    """
    place = {v: (a.index, offset, size) for a in program.allocations for v, offset, size in a.values}
    for start in (i for i in schedule.order if i.opcode == "async-start"):
        waits = [i for i in schedule.order if i.opcode in ("async-update", "async-done") and start.id in i.operands]
        steps = {schedule.step[i.id] for i in (start, *waits)}
        held = flow.places[start.id]
        written = {place[v] for index, values in held.items() if index[:1] == (1,) for v in values if v in place}
        for index, values in held.items():
            if index[:1] == (0,):
                yield from ((v, steps) for v in values if place.get(v) in written)


def readers(schedule: FlatSchedule, flow: Flow) -> dict[int, list[int]]:
    """The steps that read each value."""
    steps: dict[int, list[int]] = defaultdict(list)
    for instruction in schedule.order:
        if instruction.opcode in FORWARDS - {"get-tuple-element"}:
            continue
        step = _time_of_use(instruction, schedule)
        for operand in instruction.operands:
            for index, values in flow.places.get(operand, {}).items():
                if instruction.opcode == "get-tuple-element" and index:
                    continue  # it reads the table of pointers only
                for value in values:
                    steps[value].append(step)
    return steps


def _time_of_use(instruction: Instruction, schedule: FlatSchedule) -> int:
    """A loop or call reads its operands when it starts: afterwards they live on as the carry, or as the parameters."""
    if instruction.opcode in ("while", "call"):
        return schedule.span[called(instruction)[0]][0]
    return schedule.step[instruction.id]
