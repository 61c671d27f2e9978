"""Assembly of the buffers of a profile from a compiled program: lifetimes with names, kinds, owners."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from .._jax import CompiledProgram, Instruction
from ._lifetimes import FORWARDS, FlatSchedule, Flow, Lifetime, lifetimes, readers
from ._names import InstructionNames, Origin, common_parent, stored_as
from .buffer import Buffer, Kind, Loop, Step, bytes_of


class Inputs(NamedTuple):
    """Facts of a program that XLA does not tell.

    Attributes:
        states: the paths of the states among its inputs.
        outputs: names of its results, in their order; may be empty.
    """

    states: frozenset[str] = frozenset()
    outputs: tuple[str, ...] = ()


class _FilledStack(NamedTuple):
    """The loop that fills a stack, and the instruction that computes a slice of it."""

    instruction: Instruction
    loop: Loop
    slice: Instruction


class Assembly:
    """Builds the buffers of one program."""

    def __init__(self, program: CompiledProgram, inputs: Inputs):
        self.program = program
        self.inputs = inputs
        self.schedule = FlatSchedule(program)
        self.flow = Flow(program, self.schedule)
        self.names = InstructionNames(program, self.schedule)
        self._parameters = {
            i.id: i for i in program.computations[program.entry].instructions if i.opcode == "parameter"
        }
        self._parameter_of = {
            value.id: self._parameters[value.place[0]]
            for value in program.values.values()
            if value.place[0] in self._parameters
        }
        root = program.computations[program.entry].root
        self.readers = readers(self.schedule, self.flow)
        # A cache of the object's own: one of the class would keep every program.
        self.module = functools.cache(self._module)  # `(instruction) -> object`
        num_outputs = len({index[0] for index in self.flow.places[root] if index}) or 1
        if (
            len(inputs.outputs) != num_outputs
        ):  # XLA's program has other outputs than the function: an argument passed through
            self.inputs = inputs._replace(outputs=())
        self._outputs = {v: index for index, values in self.flow.places[root].items() for v in values}

    def steps(self) -> tuple[Step, ...]:
        return tuple(self._step(i) for i in self.schedule.order)

    def _step(self, instruction: Instruction) -> Step:
        origin = self.names.origin(instruction)
        loop = self._loop(instruction)
        if instruction.opcode in FORWARDS:
            return Step(instruction.name, "", origin.phase, "", loop)
        owner, told = self.module(instruction.id), (origin.frames, origin.is_recomputed, origin.calls)
        return Step(instruction.name, origin.primitive, origin.phase, origin.source, loop, owner, *told)

    def _loop(self, instruction: Instruction) -> Loop | None:
        return next(iter(self.names.loops(instruction)), None)

    def buffers(self) -> tuple[Buffer, ...]:
        nonempty = [x for x in lifetimes(self.program, self.schedule, self.flow) if x.num_bytes]
        buffers = [*(self._buffer(group) for group in self._merged(nonempty)), *self._fused_constants()]
        return tuple(sorted(buffers, key=lambda b: (b.start, -b.num_bytes, b.name)))

    def _fused_constants(self) -> Iterator[Buffer]:
        """Arrays in the code of a fusion. They have no allocation: each gets a place of its own, before the
        first one.
        """
        last, place = len(self.schedule.order) - 1, 0
        for fusion in self.schedule.order:
            instructions = self.program.computations[fusion.called[0]].instructions if fusion.opcode == "fusion" else ()
            for constant in instructions:
                if constant.opcode != "constant":
                    continue
                num_bytes = bytes_of(constant.type)
                if num_bytes >= _LEAST_CONSTANT:
                    place -= 1
                    o = self.names.origin(fusion)
                    yield Buffer(
                        constant.name, num_bytes, constant.type, 0, last, "constant", "forward",
                        o.function or _of_compiler(fusion, o), o.function, o.source, allocation=place,
                        readers=(self.schedule.step[fusion.id],),
                    )  # fmt: skip

    # -- one buffer from the values that are the same array, at the places of a loop's carry or a branch's result

    def _merged(self, all_lifetimes: Iterable[Lifetime]) -> list[list[Lifetime]]:
        """Values of one carry or result in one place of memory, if there is no gap between their lifetimes."""
        leaders = self._same_array()
        by_place: dict[tuple, list[Lifetime]] = defaultdict(list)
        for x in all_lifetimes:
            by_place[x.allocation, x.offset, x.num_bytes, leaders.get(x.value, x.value)].append(x)
        groups = []
        for members in by_place.values():
            members.sort(key=lambda x: x.start)
            group, end = [members[0]], members[0].end
            for x in members[1:]:
                if x.start > end + 1:  # other values may use the memory meanwhile
                    groups.append(group)
                    group = []
                group.append(x)
                end = max(end, x.end) if len(group) > 1 else x.end
            groups.append(group)
        return groups

    def _same_array(self) -> dict[int, int]:
        """Map each value that flows through a loop or branch to one representative of them."""
        leader: dict[int, int] = {}

        def find(v: int) -> int:
            while leader.get(v, v) != v:
                v = leader[v]
            return v

        places, computations = self.flow.places, self.program.computations
        for i in self.schedule.order:
            if i.opcode not in ("while", "conditional", "call"):
                continue
            sources = [places.get(computations[c].root, {}) for c in i.called]
            if i.opcode == "while":
                parameters = [p for c in i.called for p in computations[c].instructions if p.opcode == "parameter"]
                sources = [sources[0], places.get(i.operands[0], {}), *(places[p.id] for p in parameters)]
            for index, values in places[i.id].items():
                together = {find(v) for held in (places[i.id], *sources) for v in held.get(index, values)}
                first = min(together)
                leader.update(dict.fromkeys(together, first))
        return {v: find(v) for v in self.program.values}

    def _buffer(self, group: Sequence[Lifetime]) -> Buffer:
        values = [self.program.values[x.value] for x in group]
        makers = [self.program.instructions[v.place[0]] for v in values]
        instruction = max(makers, key=self._how_telling)
        value = values[makers.index(instruction)]
        origin = self.names.origin_at(instruction, value.place[1])
        stack = self._stack(makers)
        stacked, slice_ = (None, None) if stack is None else (stack.loop, stack.slice)
        if slice_ is not None:
            origin = self._of_slice(slice_, origin)
        first, last = min(x.start for x in group), max(x.end for x in group)
        parameter = next((self._parameter_of[x.value] for x in group if x.value in self._parameter_of), None)
        kind = self._kind(group, parameter, origin)
        return Buffer(
            name=instruction.name,
            num_bytes=group[0].num_bytes,
            type=_type_at(instruction.type, value.place[1]),
            start=first,
            end=last,
            kind=kind,
            phase="forward" if parameter is not None else origin.phase,
            owner=self._owner(kind, instruction, slice_, parameter, group),
            function=origin.function,
            source=origin.source,
            primitive=origin.primitive,
            region=origin.region,
            loop=self._loop(instruction) if stacked is None else None,
            stacked=stacked,
            allocation=group[0].allocation,
            offset=group[0].offset,
            readers=tuple(sorted({step for x in group for step in self.readers.get(x.value, ())})),
            stored_as=stored_as(instruction.op_name),
            is_bits=_is_boolean(slice_ if slice_ is not None else self.names.converted(instruction, value.place[1])),
        )

    def _of_slice(self, slice_: Instruction, stack: Origin) -> Origin:
        """The origin of a stack: the operation that computes a slice, or the loop's carry."""
        while slice_.opcode in ("copy", "bitcast") and slice_.operands:
            slice_ = self.program.instructions[slice_.operands[0]]
        slice_ = self._filled(self.names.element(slice_))
        if slice_.opcode in ("get-tuple-element", "parameter"):
            return stack._replace(primitive="carry")
        told = self.names.origin(slice_)
        return told._replace(phase=stack.phase) if told.source else stack

    def _filled(self, slice_: Instruction) -> Instruction:
        """The instruction that computes a slice of the stack of an inner loop, if it is one; else itself."""
        index: tuple[int, ...] = (slice_.index,) if slice_.opcode == "get-tuple-element" else ()
        loop = self.program.instructions[slice_.operands[0]] if index else slice_
        if loop.opcode != "while":
            return slice_
        values = self.flow.places[self.program.computations[loop.called[0]].root][index]
        makers = [self.program.instructions[self.program.values[v].place[0]] for v in values]
        stack = self._stack(makers)
        return makers[0] if stack is None else self._filled(self.names.element(stack.slice))

    def _how_telling(self, instruction: Instruction) -> int:
        """Prefer, of the instructions that define one array, the one that computes it to those that forward it."""
        forwards = instruction.opcode in ("parameter", "while", "conditional", "call", "tuple")
        return 4 * (not forwards) + 2 * bool(self.names.stacking(instruction)) + bool(instruction.op_name)

    def _stack(self, makers: Sequence[Instruction]) -> _FilledStack | None:
        for maker in makers:
            slice_ = self.names.stacking(maker)
            loop = next((c for c in self.schedule.callers(maker) if c.opcode == "while"), None)
            if slice_ is not None and loop is not None:
                return _FilledStack(loop, self.names.loops(maker)[0], slice_)
        return None

    def _kind(self, group: Sequence[Lifetime], parameter: Instruction | None, origin: Origin) -> Kind:
        if parameter is not None:
            return "state" if parameter.op_name in self.inputs.states else "argument"
        if self.program.allocations[group[0].allocation].is_constant:
            return "constant"
        if any(x.value in self._outputs for x in group):
            return "output"
        if self._is_scratch(group):
            return "working memory"
        if origin.is_recomputed:
            return "recomputed"
        if origin.phase == "forward" and self._is_read_backward(group):
            return "residual"
        return "working memory"

    def _is_scratch(self, group: Sequence[Lifetime]) -> bool:
        """Whether it is working memory of a library that a call allocates as one of its results: nothing reads it."""
        makers = [self.program.instructions[self.program.values[x.value].place[0]] for x in group]
        return all(m.opcode == "custom-call" for m in makers) and not any(self.readers.get(x.value) for x in group)

    def _is_read_backward(self, group: Sequence[Lifetime]) -> bool:
        last = max(x.end for x in group)
        # The last reader may be the loss, which XLA computes behind the update.
        read = [last, *(n for x in group for n in self.readers.get(x.value, ()) if n >= self.names.turn)]
        return any(self.names.origin(self.schedule.order[n]).phase == "backward" for n in read)

    # -- owners ----------------------------------------------------------------------------------------------------

    def _owner(
        self,
        kind: Kind,
        instruction: Instruction,
        slice_: Instruction | None,
        parameter: Instruction | None,
        group: Sequence[Lifetime],
    ) -> str:
        if parameter is not None:
            return parameter.op_name or parameter.name
        if kind == "output":
            index = next(self._outputs[x.value] for x in group if x.value in self._outputs)
            if not index and isinstance(instruction.type, tuple):
                return "(table of pointers)"
            number = index[0] if index else 0
            if self.inputs.outputs and self.inputs.outputs[number]:
                return self.inputs.outputs[number]
        maker = slice_ or instruction
        origin = self.names.origin(maker)
        return self.module(maker.id) or origin.scopes or origin.function or _of_compiler(maker, origin)

    def _module(self, number: int, depth: int = 0) -> str:
        """The object whose states or arrays this operation reads, or that its first operand of the same
        function reads.
        """
        instruction = self.program.instructions[number]
        if module := common_parent(self._inputs_read(instruction)):
            return module
        if depth == 6 or instruction.opcode in ("parameter", "while", "conditional"):
            return ""
        function = self.names.origin(instruction).function
        # The latest operand first: of a residual connection the layer's result, and not the stream that all layers
        # share.
        for operand in sorted(instruction.operands, key=lambda o: -self.schedule.step.get(o, -1)):
            source = self.program.instructions[operand]
            if self.names.origin(source).function in (function, "") and (module := self._module(operand, depth + 1)):
                return module
        return ""

    def _inputs_read(self, instruction: Instruction) -> list[str]:
        """The paths of the inputs that are operands, and belong to some object."""
        operands = [self.names.rearranged(self.program.instructions[o]).id for o in instruction.operands]
        values = {v for o in operands for v in self.flow.places.get(o, {}).get((), ())}
        paths = [self._parameter_of[v].op_name for v in values if v in self._parameter_of]
        owned = [p for p in paths if common_parent([p])]
        states = [p for p in owned if p in self.inputs.states]
        return states or owned


def _of_compiler(maker: Instruction, origin: Origin) -> str:
    """The owner of what belongs to no line of the user's program."""
    return "no line (a copy by XLA)" if maker.opcode == "copy" else f"no line ({origin.primitive or maker.opcode})"


_LEAST_CONSTANT = 1024
"""Bytes; numbers and small tables in the code are not worth a line."""


def _is_boolean(instruction: Instruction) -> bool:
    return isinstance(instruction.type, str) and instruction.type.startswith(("pred[", "bool["))


def _type_at(type_: Any, index: Sequence[int]) -> str:
    for n in index:
        type_ = type_[n]
    return type_ if isinstance(type_, str) else "pointers"
