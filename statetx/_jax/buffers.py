"""Decode XLA's record of a compiled program: instructions in the order of their schedule, places of values.

Both are serialized protocol buffers: ``HloModuleProto`` (xla/service/hlo.proto) of the optimized module, and
``BufferAssignmentProto`` of ``Compiled.memory_analysis()``, or both from a file that XLA writes. Only the fields named
below are read, by their numbers, since the messages are not part of jaxlib's Python interface; ``tests/test_compat.py``
fails when one of them is missing or has another meaning.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from .._cached import cached_property

Place = tuple[int, tuple[int, ...]]
"""An instruction, and an index into its result if that is a tuple."""


class Instruction:
    """An instruction of the optimized program. Most attributes are decoded when they are asked for.

    Attributes:
        id: unique in the program.
        computation: the id of the computation that it belongs to.
        operands, called: ids of instructions, and of computations (the body of a loop, the branches of a conditional).
        type: as in ``f32[2,3]``; of a tuple, the types of its elements.
        index: of a parameter, its number; of a get-tuple-element, the element.
        op_name: the name stack of the user's operation, as in ``jit(f)/transpose(jvp(Block))/dot_general``.
        frames: the user's stack, innermost first.
        trip_count: of a loop, how often the body runs, if XLA knows.
        target: the name that a custom call calls, as in ``__cublas$gemm``.
    """

    def __init__(self, data: Any, computation: int, frames: Sequence[tuple[StackFrame, ...]]):
        fields = _message(data)
        self._fields = fields
        self._frames = frames
        self.id = _int(fields, _InstructionFields.ID)
        self.opcode = _text(fields, _InstructionFields.OPCODE)
        self.computation = computation
        self.operands = _ints(fields.get(_InstructionFields.OPERANDS, ()))
        self.called = _ints(fields.get(_InstructionFields.CALLED, ()))

    @cached_property
    def name(self) -> str:
        return _text(self._fields, _InstructionFields.NAME)

    @cached_property
    def type(self) -> Any:
        return _type(_message(self._fields[_InstructionFields.SHAPE][0]))

    @property
    def index(self) -> int:
        field = _InstructionFields.PARAMETER if self.opcode == "parameter" else _InstructionFields.TUPLE_INDEX
        return _int(self._fields, field)

    @cached_property
    def _metadata(self) -> _Fields:
        messages = self._fields.get(_InstructionFields.METADATA)
        return _message(messages[0]) if messages else _Fields(list)

    @cached_property
    def op_name(self) -> str:
        return _text(self._metadata, 2)

    @property
    def target(self) -> str:
        return _text(self._fields, _InstructionFields.TARGET) if self.opcode == "custom-call" else ""

    @property
    def frames(self) -> tuple[StackFrame, ...]:
        number = _int(self._metadata, 15)
        return self._frames[number] if number < len(self._frames) else ()

    @property
    def backend_config(self) -> str:
        """A JSON text, as in ``{"known_trip_count":{"n":"16"}}``, or ""."""
        return _text(self._fields, _InstructionFields.BACKEND_CONFIG)

    @property
    def trip_count(self) -> int | None:
        config = self.backend_config if self.opcode == "while" else ""
        _, marker, number = config.partition('"known_trip_count":{"n":"')
        return int(number.partition('"')[0]) if marker else None


class StackFrame(NamedTuple):
    function: str
    file: str
    line: int
    column: int


PRIMITIVES = {"dot": "dot_general", "convolution": "conv_general_dilated"}
"""The opcodes of products of matrices and convolutions, and JAX's names of these."""

_LIBRARY_CALLS = {"__cublas$": "dot_general", "__cudnn$conv": "conv_general_dilated"}  # of GPUs of either maker


def product_of(instruction: Instruction) -> str:
    """JAX's name of the product or convolution that an instruction is, also by a call of a library as on GPUs; "" for
    any other.
    """
    if instruction.opcode == "custom-call":
        return next((name for start, name in _LIBRARY_CALLS.items() if instruction.target.startswith(start)), "")
    return PRIMITIVES.get(instruction.opcode, "")


class Computation(NamedTuple):
    """Instructions in the order of the schedule; a fusion has none, and keeps the program's order."""

    id: int
    name: str
    root: int
    instructions: Sequence[Instruction]


class BufferValue(NamedTuple):
    """A value that has memory of its own: the place that defines it, and its size in bytes."""

    id: int
    place: Place
    num_bytes: int


class Allocation(NamedTuple):
    """A piece of memory, and the values in it with offset and size.

    Attributes:
        parameter: the number of the program's parameter that it holds, or None.
        is_output, is_constant, is_thread_local: its use; a temporary allocation has none of these.
        is_elsewhere: whether it is not in the device's main memory: in the host's, as offloaded values are, or in a
            TPU's core.
    """

    index: int
    num_bytes: int
    parameter: int | None
    is_output: bool
    is_constant: bool
    is_thread_local: bool
    is_elsewhere: bool
    values: Sequence[tuple[int, int, int]]


@dataclasses.dataclass(frozen=True)
class CompiledProgram:
    """An optimized, scheduled program with its buffer assignment."""

    name: str
    entry: int
    computations: dict[int, Computation]
    instructions: dict[int, Instruction]
    values: dict[int, BufferValue]
    allocations: Sequence[Allocation]


# Raised by a backend or a jaxlib that does not tell.
_NOT_TOLD = (AttributeError, NotImplementedError, jax.errors.JaxRuntimeError)


def compiled_program(compiled: Any) -> CompiledProgram | None:
    """The program of a ``jax.stages.Compiled``; None if its backend does not tell a schedule or a buffer assignment."""
    try:
        assignment = compiled.memory_analysis().serialized_buffer_assignment_proto
        module = compiled.runtime_executable().hlo_modules()[0].as_serialized_hlo_module_proto()
    except _NOT_TOLD:
        return None
    return decode(module, assignment) if assignment else None


def reserved_bytes(memory: Any) -> int:
    """Bytes that the buffer assignment of ``Compiled.memory_analysis()`` reserves for temporaries; 0 if the backend
    tells none.
    """
    assignment = getattr(memory, "serialized_buffer_assignment_proto", None)
    if not assignment:
        return 0
    is_fixed = lambda a: a.parameter is not None or a.is_output or a.is_constant or a.is_thread_local or a.is_elsewhere
    return sum(a.num_bytes for a in _assignment(_message(assignment))[1] if not is_fixed(a))


# -- a file that XLA writes: JAX asks backends that are plugins (GPUs, TPUs) through an interface without the buffer
# assignment --------


def options_to_write(folder: Path) -> dict[str, Any]:
    """Compiler options that let XLA write the compiled program, with its buffer assignment, to a folder.

    The last two undo what ``XLA_FLAGS`` of the user may say of other files.
    """
    named = {"xla_dump_to": str(folder), "xla_dump_hlo_as_proto": True}
    return named | {"xla_dump_hlo_module_re": "", "xla_dump_compress_protos": False}


def written_program(folder: Path, compiled: Any, platform: str) -> CompiledProgram | None:
    """The program of a ``jax.stages.Compiled`` that was compiled with `options_to_write`.

    None if XLA has not written it: a cache of compiled programs had it, or the backend writes none.
    """
    try:
        name = compiled.runtime_executable().hlo_modules()[0].name
    except _NOT_TOLD:
        return None
    paths = folder.glob("*after_optimizations.hlo.pb")  # kernels that XLA times have files of their own
    for path in sorted(paths, key=lambda p: p.stat().st_mtime_ns, reverse=True):
        message = _message(path.read_bytes())
        module, assignment = message[_ProgramFields.MODULE], message[_ProgramFields.ASSIGNMENT]
        if module and assignment and _text(_message(module[0]), _ModuleFields.NAME) == name:
            return decode(module[0], assignment[0], platform)
    return None


# -- decoding ------------------------------------------------------------------------------------------------------


def decode(module_proto: Any, assignment_proto: Any, platform: str = "") -> CompiledProgram | None:
    """The program in these two messages, for a platform; None if the module has no schedule."""
    module = _message(module_proto)
    computations = _computations(module)
    if computations is None:
        return None
    values, allocations = _assignment(_message(assignment_proto), platform)
    return CompiledProgram(
        name=_text(module, _ModuleFields.NAME),
        entry=_int(module, _ModuleFields.ENTRY),
        computations=computations,
        instructions=computations.instructions,
        values=values,
        allocations=allocations,
    )


def scheduled_computations(compiled: Any) -> tuple[int, _Computations] | None:
    """The entry of a ``jax.stages.Compiled``, and its computations by their ids; None if its backend tells no
    schedule.
    """
    try:
        module = _message(compiled.runtime_executable().hlo_modules()[0].as_serialized_hlo_module_proto())
    except _NOT_TOLD:
        return None
    computations = _computations(module)
    return None if computations is None else (_int(module, _ModuleFields.ENTRY), computations)


def _computations(module: _Fields) -> _Computations | None:
    if not module[_ModuleFields.SCHEDULE]:
        return None
    frames = _stack_frames(module[_ModuleFields.STACK_FRAMES])
    order = {
        _int(entry, 1): _ints(_message(entry[2][0])[1])
        for entry in map(_message, _message(module[_ModuleFields.SCHEDULE][0])[1])
    }
    return _Computations(map(_message, module[_ModuleFields.COMPUTATIONS]), frames, order)


# -- the messages --------------------------------------------------------------------------------------------------


class _Computations(dict[int, Computation]):
    """Computations by their ids. Fusions are decoded on access, for they are most of a program.

    Attributes:
        instructions: the instructions of the decoded computations, by their ids.
    """

    def __init__(
        self,
        messages: Iterable[_Fields],
        frames: Sequence[tuple[StackFrame, ...]],
        order: dict[int, list[int]],
    ):
        self.instructions: dict[int, Instruction] = {}
        self._messages = {_int(m, 5): m for m in messages}
        self._frames = frames
        self._order = order
        for number in order:
            self[number]

    def __missing__(self, number: int) -> Computation:
        message = self._messages[number]
        decoded = [Instruction(i, number, self._frames) for i in message[2]]
        by_id = {i.id: i for i in decoded}
        self.instructions |= by_id
        ordered = [by_id[i] for i in self._order.get(number, by_id)]
        computation = self[number] = Computation(number, _text(message, 1), _int(message, 6), ordered)
        return computation


class _ProgramFields:
    """Numbers of the fields of ``HloProto``."""

    MODULE, ASSIGNMENT = 1, 3


class _ModuleFields:
    """Numbers of the fields of ``HloModuleProto``."""

    NAME, COMPUTATIONS, ENTRY, SCHEDULE, STACK_FRAMES = 1, 3, 6, 7, 17


class _InstructionFields:
    """Numbers of the fields of ``HloInstructionProto``."""

    NAME, OPCODE, SHAPE, METADATA, PARAMETER, TUPLE_INDEX = 1, 2, 3, 7, 9, 13
    TARGET, ID, OPERANDS, CALLED, BACKEND_CONFIG = 28, 35, 36, 38, 43


# The names of ``PrimitiveType`` (xla_data.proto), by their numbers.
_DTYPES = dict(
    enumerate(
        "? pred s8 s16 s32 s64 u8 u16 u32 u64 f16 f32 f64 tuple opaque c64 bf16 token c128 f8e5m2 f8e4m3fn s4 u4 "
        "f8e4m3b11fnuz f8e5m2fnuz f8e4m3fnuz s2 u2 f8e4m3 f8e3m4 s1 u1 f4e2m1fn f8e8m0fnu buffer".split()
    )
)
# statetx writes types as JAX does.
_JAX_NAMES = {"pred": "bool", **{f"s{n}": f"i{n}" for n in (1, 2, 4, 8, 16, 32, 64)}}


def _type(shape: _Fields) -> Any:
    if shape[4]:  # a tuple
        return tuple(_type(_message(s)) for s in shape[4])
    dtype = _DTYPES.get(_int(shape, 2), "?")
    return f"{_JAX_NAMES.get(dtype, dtype)}[{','.join(map(str, _ints(shape[3])))}]"


def _stack_frames(index: Sequence[Any]) -> list[tuple[StackFrame, ...]]:
    """The stack of each frame, by its number; number 0 is none.

    A frame is a line of a function and its caller, another frame. Numbers in the message count from one.
    """
    if not index:
        return [()]
    message = _message(index[0])
    files, functions = ([bytes(t).decode() for t in message[n]] for n in (1, 2))
    locations = [
        StackFrame(functions[_int(m, 2) - 1].replace(".<locals>", ""), files[_int(m, 1) - 1], _int(m, 3), _int(m, 4))
        for m in map(_message, message[3])
    ]
    parents = [(_int(m, 1), _int(m, 2)) for m in map(_message, message[4])]
    stacks: list[tuple[StackFrame, ...]] = [()]
    for location, parent in parents:
        stacks.append((locations[location - 1], *(stacks[parent] if parent < len(stacks) else ())))
    return stacks


# Numbers of memory spaces. Others than the main one are parts of it on GPUs (of collectives), and memories of the core
# on TPUs.
_MAIN, _HOST = 0, 5  # ``Layout::kHostMemorySpace``


def _assignment(message: _Fields, platform: str = "") -> tuple[dict[int, BufferValue], list[Allocation]]:
    values = {}
    for value in map(_message, message[1]):
        defined_at = _message(value[3][0])
        number = _int(value, 1)
        values[number] = BufferValue(number, (_int(defined_at, 4), tuple(_ints(defined_at[3]))), _int(value, 2))
    allocations = [
        Allocation(
            index=_int(a, 1),
            num_bytes=_int(a, 2),
            parameter=_int(a, 6) if _int(a, 5) else None,
            is_output=bool(_int(a, 7)),
            is_constant=bool(_int(a, 12)),
            is_thread_local=bool(_int(a, 3)),
            is_elsewhere=_int(a, 8) == _HOST or (platform == "tpu" and _int(a, 8) != _MAIN),
            values=[(_int(v, 1), _int(v, 2), _int(v, 3)) for v in map(_message, a[9])],
        )
        for a in map(_message, message[3])
    ]
    return values, allocations


# -- the wire format: https://protobuf.dev/programming-guides/encoding -----------------------------------------------

_Fields = defaultdict
"""The values of each field of a message, by its number: integers, or bytes of a text, a message or packed integers."""


_FIXED = {1: 8, 5: 4}  # bytes of the wire types for numbers of a fixed size


def _message(data: Any) -> _Fields:
    fields: _Fields = _Fields(list)
    view, i = memoryview(data), 0
    while i < len(view):
        key, i = _varint(view, i)
        if key & 7 == 0:
            value, i = _varint(view, i)
        else:
            size, i = _varint(view, i) if key & 7 == 2 else (_FIXED[key & 7], i)
            value, i = view[i : i + size], i + size
        fields[key >> 3].append(value)
    return fields


def _varint(view: memoryview, i: int) -> tuple[int, int]:
    """The integer at a position, 7 bits in a byte, the lowest first, and the position behind it."""
    value = shift = 0
    while view[i] > 127:
        value |= (view[i] & 127) << shift
        shift, i = shift + 7, i + 1
    return value | view[i] << shift, i + 1


def _int(message: _Fields, number: int) -> int:
    """The last value of a field, 0 if it is absent."""
    values = message.get(number)
    return values[-1] if values else 0


def _text(message: _Fields, number: int) -> str:
    values = message.get(number)
    return bytes(values[-1]).decode() if values else ""


def _ints(values: Sequence[Any]) -> list[int]:
    """A repeated field of integers, packed or not."""
    out: list[int] = []
    for value in values:
        packed, i = memoryview(b"") if isinstance(value, int) else value, 0
        out += [value] if isinstance(value, int) else []
        while i < len(packed):
            number, i = _varint(packed, i)
            out.append(number)
    return out
