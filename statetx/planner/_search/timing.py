"""Compare compiled candidates by time, and choose the fastest: ``objective="time"``. They run; for a target XLA's
estimates count.
"""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Sequence
from typing import Any

import jax

from ... import _jax
from ..._equations.compiled import compile_together, estimate_options, is_out_of_memory
from ..._errors import TargetError
from ..._targets import current
from .._tuned import TUNED
from .whole import Choice, Whole

_ROUNDS = 7


def refuse_unknown_times() -> None:
    """Refuse to compare times on a target of which XLA tells none.

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
    """Times of choices, measured on zeros; for a target as XLA estimates them. A time that XLA does not know counts as
    infinite.
    """

    def __init__(self) -> None:
        # By identity: a choice is equal to no other, and is held here.
        self._times: dict[tuple[int, ...], tuple[Choice, float]] = {}

    def fastest(self, whole: Whole, choice: Choice, temp_bytes: int) -> Choice:
        """The fastest of the cheapest choices and the stock policies within these temporary bytes; `choice` is one of
        them.
        """
        # A program that takes less memory may be faster.
        for part in (0.8, 0.6):
            if not whole.is_late():
                whole.fit(lambda limit=int(part * temp_bytes): limit)
        fitting = [c for c in whole.choices() if c.temp_bytes <= temp_bytes]
        fitting.sort(key=lambda c: (c.added_cost, c.temp_bytes))
        cheapest = [choice, *(c for c in fitting if _id(c) != _id(choice))][: TUNED.tries]
        # The stock policies in any case, so that no plan is slower than one of them within the same memory.
        cheapest = list({_id(c): c for c in [*cheapest, *whole.stock_choices(temp_bytes)]}.values())
        self._measure([(whole, c) for c in cheapest if _id(c) not in self._times])
        return min(cheapest, key=lambda c: self._times[_id(c)][1])

    def faster(self, choices: Sequence[tuple[Whole, Choice]]) -> tuple[Whole, Choice]:
        """The fastest of choices for several programs, measured together."""
        self._measure(choices)
        return min(choices, key=lambda pair: self._times[_id(pair[1])][1])

    def fields(self, choice: Choice) -> dict[str, Any]:
        timed = [[c.name, c.temp_bytes, seconds] for c, seconds in self._times.values() if math.isfinite(seconds)]
        seconds = self._times[_id(choice)][1] if _id(choice) in self._times else math.inf
        return {"timed": timed, "seconds": seconds if math.isfinite(seconds) else None}

    def _measure(self, choices: Sequence[tuple[Whole, Choice]]) -> None:
        if current.absent() is not None:
            estimated = [whole.compile(choice, estimate_options()) for whole, choice in choices]
            compile_together(estimated)
            for (_, choice), program in zip(choices, estimated, strict=True):
                told = _jax.estimated_seconds(program.compiled, current.platform())
                self._times[_id(choice)] = choice, math.inf if told is None else told
            return
        programs = [whole.compile(choice, None).compiled for whole, choice in choices]
        seconds: list[list[float]] = [[] for _ in programs]

        # In turns, so that a change of the machine's load meets all of them. The first round warms up.
        for n in range(_ROUNDS + 1):
            for program, times in zip(programs, seconds, strict=True):
                if math.inf not in times:
                    took = _seconds(program)
                    if n or took == math.inf:
                        times.append(took)
        for (_, choice), times in zip(choices, seconds, strict=True):
            self._times[_id(choice)] = choice, math.inf if math.inf in times else statistics.median(times)


def _id(choice: Choice) -> tuple[int, ...]:
    # Candidates live as long as their search.
    return tuple(map(id, choice.candidates))


def _seconds(program: Any) -> float:
    """The time of a run; infinite where the device has too little memory beside the caller's own arrays, which the
    zeros come on top of.
    """
    try:
        inputs = jax.block_until_ready(_zeros(program))  # each time: the program may take the memory of donated ones
        start = time.perf_counter()
        jax.block_until_ready(program(*inputs))
    except jax.errors.JaxRuntimeError as e:
        if not is_out_of_memory(e):
            raise
        return math.inf
    return time.perf_counter() - start


def _zeros(program: Any) -> list[Any]:
    """Arguments for a compiled program."""
    infos, shardings = jax.tree.leaves(program.args_info), jax.tree.leaves(program.input_shardings)
    return [_zero(info.shape, info.dtype, s) for info, s in zip(infos, shardings, strict=True)]


def _zero(shape: tuple[int, ...], dtype: Any, sharding: Any) -> jax.Array:
    if sharding is None:  # the program does not use the argument
        return jax.lax.full(shape, 0, dtype)
    if len(sharding.device_set) > 1:  # one device may have no room for the whole array
        return _filler(shape, dtype, sharding)()
    return jax.device_put(jax.lax.full(shape, 0, dtype), sharding)


@functools.lru_cache(64)
def _filler(shape: tuple[int, ...], dtype: Any, sharding: Any) -> Any:
    return jax.jit(lambda: jax.lax.full(shape, 0, dtype), out_shardings=sharding)
