"""XLA's own estimates of the time of a compiled program.

XLA:GPU writes one beside each kernel when it is asked to. XLA:TPU has one for the whole program, in
``cost_analysis()``. It counts the body of a loop once, and an instruction of unknown time as -1 second: most larger
programs have no time there.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from .buffers import Computation, Instruction, product_of, scheduled_computations

ESTIMATES = {"xla_gpu_collect_cost_model_stats": True}
"""The compiler options that let XLA:GPU write its estimates into the program."""


def estimated_seconds(compiled: Any, platform: str) -> float | None:
    """The estimated time of a run of a ``jax.stages.Compiled``; None where XLA does not tell one, or not how often a
    loop runs, and where values are in the host's memory, which XLA counts as fast as the device's.
    """
    memory = compiled.memory_analysis()
    if memory is not None and any(getattr(memory, name) for name in _ON_HOST):
        return None
    program = scheduled_computations(compiled) if platform in ("gpu", "tpu") else None
    if program is None:
        return None
    entry, computations = program
    if platform == "gpu":
        return _Sum(computations).of(computations[entry]) or None
    has_loop = any(i.opcode == "while" for c in list(computations.values()) for i in c.instructions)
    seconds = 0.0 if has_loop else (compiled.cost_analysis() or {}).get("optimal_seconds", 0.0)
    return seconds if seconds > 0 else None


_ON_HOST = ("host_temp_size_in_bytes", "host_argument_size_in_bytes", "host_output_size_in_bytes")

_MODEL = "sol"  # "speed of light": operations at the rate of the GPU, bytes at the bandwidth of its memory
# That model does not know tiled fusions, which XLA makes of a softmax or a norm, and writes its least time for them.
# The model that chose the tiles knows them.
_LEAST, _TILED_MODEL = 0.01, "indexing-cost-model"
_LAUNCH = 1.0  # microseconds to start a kernel, in XLA's own model of fusions (kKernelLaunchOverhead)
_TRANSFERS = ("all-", "ragged-all-", "collective-", "reduce-scatter", "copy-start")  # between devices, and to the host
_CALLS = ("while", "conditional", "call", "async-start")


class _Sum:
    """Seconds of the kernels of computations, one after another, loops counted with their lengths; None if a part
    is not known.
    """

    def __init__(self, computations: Mapping[int, Computation]):
        self._computations = computations
        self._found: dict[int, float | None] = {}

    def of(self, computation: Computation) -> float | None:
        if computation.id not in self._found:
            self._found[computation.id] = _sum(map(self._of_instruction, computation.instructions))
        return self._found[computation.id]

    def _of_instruction(self, instruction: Instruction) -> float | None:
        seconds = kernel_seconds(instruction)
        if seconds is not None:
            return seconds
        if product_of(instruction) or instruction.opcode.startswith(_TRANSFERS):
            return None if not instruction.opcode.endswith("-done") else 0.0
        if instruction.opcode not in _CALLS:
            return 0.0
        called = [self.of(self._computations[number]) for number in instruction.called]
        once = None if None in called else max(called, default=0.0)  # pyright: ignore[reportArgumentType]
        if instruction.opcode == "conditional":
            return once
        if instruction.opcode != "while":
            return _sum(called)
        # XLA does not evaluate the condition of a loop whose length it knows.
        body, _ = called
        return None if body is None or instruction.trip_count is None else instruction.trip_count * body


def _sum(parts: Iterable[float | None]) -> float | None:
    total = 0.0
    for part in parts:
        if part is None:
            return None
        total += part
    return total


def kernel_seconds(instruction: Instruction) -> float | None:
    """The estimated time of a kernel; None where XLA has written none."""
    if "reification_cost" not in instruction.backend_config:
        return None
    costs = json.loads(instruction.backend_config)["reification_cost"]
    of_model = lambda name: [float(c["exec_time_us"]) for c in costs if c.get("name") == name]
    told = of_model(_MODEL)
    if told and sum(told) <= _LEAST:
        told = of_model(_TILED_MODEL) or told
    return (sum(told) + _LAUNCH) / 1e6 if told else None
