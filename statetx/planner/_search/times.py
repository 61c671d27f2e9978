# pyright: reportUnknownMemberType=false
"""Times of compiled programs: ``objective="time"`` runs them."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from typing import Any

import jax

from ..._equations.compiler import COMPILER_ERRORS, estimate_options, is_out_of_memory
from ..._errors import TargetError
from ..._targets import current
from .._budget import TEMPORARIES, ByteBudget
from .._tuned import TUNED
from .program import PlannedProgram, ProgramSearch

_ROUNDS = 7


def refuse_unknown_times() -> None:
    """Refuse to compare times on a target if XLA tells none for it.

    Raises:
        TargetError: it is another than an H100 or an H200.
    """
    target = current.absent()
    if target is not None and not estimate_options():
        raise TargetError(
            f"plan(objective='time') runs programs, and nothing runs on the target {target.name}; XLA's estimates, "
            f"which could be compared "
            f"instead, are complete for the H100 and the H200 only.\nFix: use objective='flops', or plan on the device."
        )


class Timer:
    """Times of programs, measured on zeros. A program without room for them counts as infinitely slow."""

    def __init__(self) -> None:
        self._times: dict[PlannedProgram, float] = {}

    def fastest(self, search: ProgramSearch, program: PlannedProgram, temp_bytes: int) -> PlannedProgram:
        """The fastest of the cheapest programs and the stock policies within these temporary bytes; `program` is one of
        them.
        """
        # A program that takes less memory may be faster.
        for part in (0.8, 0.6):
            if not search.is_late():
                search.find(ByteBudget(max(int(part * temp_bytes), 1), TEMPORARIES))
        # The stock policies in any case, so that no plan is slower than one of them within the same memory.
        stock = search.stock_programs(temp_bytes)
        fitting = [p for p in search.programs() if p.temp_bytes <= temp_bytes]
        fitting.sort(key=lambda p: (p.added_cost, p.temp_bytes))
        cheapest = list(dict.fromkeys([program, *fitting]))[: TUNED.tries]
        return self.faster(list(dict.fromkeys([*cheapest, *stock])))

    def faster(self, programs: Sequence[PlannedProgram]) -> PlannedProgram:
        """The fastest of programs, measured together."""
        self._measure([program for program in programs if program not in self._times])
        return min(programs, key=lambda program: self._times[program])

    def fields(self, program: PlannedProgram) -> dict[str, Any]:
        timed = [[p.name, p.temp_bytes, seconds] for p, seconds in self._times.items() if math.isfinite(seconds)]
        seconds = self._times.get(program, math.inf)
        return {"timed": timed, "seconds": seconds if math.isfinite(seconds) else None}

    def _measure(self, programs: Sequence[PlannedProgram]) -> None:
        compiled = [program.program().compiled for program in programs]
        seconds: list[list[float]] = [[] for _ in programs]

        # In turns, so that a change of the machine's load meets all of them. The first round warms up.
        for n in range(_ROUNDS + 1):
            for executable, times in zip(compiled, seconds, strict=True):
                if math.inf not in times:
                    took = _seconds(executable)
                    if n or took == math.inf:
                        times.append(took)
        for program, times in zip(programs, seconds, strict=True):
            self._times[program] = math.inf if math.inf in times else statistics.median(times)


def _seconds(program: jax.stages.Compiled) -> float:
    """The time of a run; infinite where the device has too little memory beside the caller's own arrays, which the
    zeros come on top of.
    """
    try:
        inputs = _zeros(program)  # each time: the program may take the memory of donated ones
        jax.block_until_ready(inputs)
        start = time.perf_counter()
        jax.block_until_ready(program(*inputs))
    except COMPILER_ERRORS as e:
        if not is_out_of_memory(e):
            raise
        return math.inf
    return time.perf_counter() - start


def _zeros(program: jax.stages.Compiled) -> list[jax.Array]:
    """Arguments for a compiled program, each made on its own devices: one may have no room for the whole array. What
    the program does not use has no sharding.
    """
    shardings = jax.tree.leaves(program.input_shardings, is_leaf=lambda s: s is None)
    pairs = zip(jax.tree.leaves(program.args_info), shardings, strict=True)
    return [jax.device_put(jax.lax.full(x.shape, 0, x.dtype, sharding=s), s) for x, s in pairs]
