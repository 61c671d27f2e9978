"""The kernels of a program compiled for a GPU, and the bytes that they move.

A kernel reads its operands from the device's memory and writes its results there; those of a loop count as often as it runs. Of a stack only the slices that
a kernel reads or writes count. Kernels are tiled where XLA makes one of a reduction along rows and what is computed with it, as of a softmax or a norm;
products are not among them.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from statetx._jax.buffers import Computation, Instruction, scheduled_computations
from statetx._jax.estimates import kernel_seconds
from statetx.memory.buffer import bytes_of

# Instructions that move nothing: names of values, and waits for what has begun before.
FREE = (
    "parameter",
    "constant",
    "tuple",
    "get-tuple-element",
    "bitcast",
    "opt-barrier",
    "after-all",
    "partition-id",
    "replica-id",
)
FREE_CALLS = ("", "Sharding", "AllocateBuffer")
SLICES = ("dynamic-slice", "slice", "gather")
VIEWS = ("bitcast", "reshape", "copy", "convert", "transpose")
TILED, PRODUCT = '"kind":"__triton"', '"kind":"__triton_nested_gemm_fusion"'


class Traffic(NamedTuple):
    """Kernels that run, the tiled ones among them, and the bytes that all of them read and write."""

    kernels: int = 0
    tiled: int = 0
    num_bytes: int = 0

    def plus(self, other: Traffic, times: int = 1) -> Traffic:
        return Traffic(*(a + times * b for a, b in zip(self, other, strict=True)))


def traffic(compiled: Any) -> Traffic | None:
    """Of a ``jax.stages.Compiled`` for a GPU; None if its program is not told."""
    found = scheduled_computations(compiled)
    return None if found is None else _Counted(found[1]).of(found[0])


class Timed(NamedTuple):
    """A kernel with XLA's estimate of its time, in all its runs."""

    kind: str
    seconds: float


def timed(compiled: Any) -> Iterator[Timed]:
    """The kernels of a ``jax.stages.Compiled`` for a GPU that are not of a loop of unknown length or a condition."""
    found = scheduled_computations(compiled)
    assert found is not None
    entry, computations = found

    def within(number: int, times: int) -> Iterator[Timed]:
        for i in computations[number].instructions:
            if i.opcode in ("while", "call", "async-start"):
                for called in i.called[:1]:  # without the condition of a loop
                    yield from within(called, times * (i.trip_count or 1))
            elif (seconds := kernel_seconds(i)) is not None:
                is_tiled, is_product = TILED in i.backend_config, PRODUCT in i.backend_config
                kind = "softmaxes and norms" if is_tiled else "products" if is_product else "others"
                yield Timed(kind, times * seconds)

    return within(entry, 1)


class _Counted:
    def __init__(self, computations: Mapping[int, Computation]):
        self._computations = computations
        self.of = functools.cache(self._of)
        self._fused = functools.cache(self._accesses)

    def _of(self, computation: int) -> Traffic:
        total = Traffic()
        instructions = {i.id: i for i in self._computations[computation].instructions}
        for i in instructions.values():
            if i.opcode == "while":
                body, _ = i.called
                total = total.plus(self.of(body), i.trip_count or 1)
            elif i.opcode == "conditional":
                total = total.plus(max((self.of(c) for c in i.called), key=lambda t: t.num_bytes))
            elif i.opcode in ("call", "async-start"):
                for c in i.called:
                    total = total.plus(self.of(c))
            elif not (
                i.opcode in FREE or i.opcode.endswith("-done") or (i.opcode == "custom-call" and i.target in FREE_CALLS)
            ):
                is_tiled = i.opcode == "fusion" and TILED in i.backend_config
                total = total.plus(Traffic(1, int(is_tiled), self._moved(i, instructions)))
        return total

    def _moved(self, i: Instruction, around: Mapping[int, Instruction]) -> int:
        if i.opcode == "fusion":
            return sum(self._fused(i.called[0]))
        operands = [_bytes(around[o].type) for o in i.operands]
        if i.opcode == "dynamic-update-slice":
            return 2 * operands[1]
        return 2 * _bytes(i.type) if i.opcode in SLICES else sum(operands) + _bytes(i.type)

    def _accesses(self, computation: int) -> tuple[int, int]:
        """The bytes that a fusion reads, and those that it writes."""
        instructions = {i.id: i for i in self._computations[computation].instructions}
        readers: dict[int, list[tuple[Instruction, int]]] = defaultdict(list)
        for i in instructions.values():
            for n, operand in enumerate(i.operands):
                readers[operand].append((i, n))

        def read(value: Instruction) -> int:
            total, whole = 0, _bytes(value.type)
            for reader, n in readers[value.id]:
                if n == 0 and reader.opcode in SLICES:
                    total += _bytes(reader.type)
                elif n == 0 and reader.opcode == "dynamic-update-slice":
                    continue
                else:
                    total += min(whole, read(reader)) if reader.opcode in VIEWS and readers[reader.id] else whole
            return min(total, whole)

        def written(value: Instruction) -> int:
            inner = value
            while inner.opcode in VIEWS and inner.operands:
                inner = instructions[inner.operands[0]]
            return (
                _bytes(instructions[inner.operands[1]].type)
                if inner.opcode == "dynamic-update-slice"
                else _bytes(value.type)
            )

        root = instructions[self._computations[computation].root]
        results = [instructions[o] for o in root.operands] if root.opcode == "tuple" else [root]
        return sum(read(i) for i in instructions.values() if i.opcode == "parameter"), sum(map(written, results))


def _bytes(type_: Any) -> int:
    return sum(map(_bytes, type_)) if isinstance(type_, tuple) else bytes_of(type_)
