"""Run compiled candidates, and choose the fastest: ``objective="measured"``."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

import jax

from ._whole import Choice, Whole

_MAX_TIMED = 6  # the cheapest candidates: each is compiled once more, with the options of the user's program
_SMALLER = (0.8, 0.6)  # parts of the budget to plan for too: a program that takes less memory may be faster
_ROUNDS = 7


class Timer:
    """Times of choices, measured on zeros."""

    def __init__(self) -> None:
        # By identity: a choice is equal to no other, and is held here.
        self._times: dict[tuple[int, ...], tuple[Choice, float]] = {}

    def fastest(self, whole: Whole, choice: Choice, temp_bytes: int) -> Choice:
        """The fastest of the cheapest choices and the stock policies within these temporary bytes; `choice` is one of them."""
        for part in _SMALLER:
            if not whole.is_late():
                whole.fit(lambda limit=int(part * temp_bytes): limit)
        fitting = [c for c in whole.choices() if c.temp_bytes <= temp_bytes]
        fitting.sort(key=lambda c: (c.added_cost, c.temp_bytes))
        cheapest = [choice, *(c for c in fitting if _id(c) != _id(choice))][:_MAX_TIMED]
        # The stock policies in any case, so that no plan is slower than one of them within the same memory.
        cheapest = list({_id(c): c for c in [*cheapest, *whole.stock_choices(temp_bytes)]}.values())
        self._measure([(whole, c) for c in cheapest if _id(c) not in self._times])
        return min(cheapest, key=lambda c: self._times[_id(c)][1])

    def faster(self, choices: Sequence[tuple[Whole, Choice]]) -> tuple[Whole, Choice]:
        """The fastest of choices for several programs, measured together."""
        self._measure(choices)
        return min(choices, key=lambda pair: self._times[_id(pair[1])][1])

    def fields(self, choice: Choice) -> dict[str, Any]:
        timed = [[c.name, c.temp_bytes, seconds] for c, seconds in self._times.values()]
        return {"timed": timed, "seconds": self._times[_id(choice)][1] if _id(choice) in self._times else None}

    def _measure(self, choices: Sequence[tuple[Whole, Choice]]) -> None:
        programs = [whole.compile(choice, None).compiled for whole, choice in choices]
        seconds: list[list[float]] = [[] for _ in programs]

        # In turns, so that a change of the machine's load meets all of them. The first round warms up.
        for n in range(_ROUNDS + 1):
            for program, times in zip(programs, seconds, strict=True):
                inputs = jax.block_until_ready(
                    _zeros(program)
                )  # each time: the program may take the memory of donated ones
                start = time.perf_counter()
                jax.block_until_ready(program(*inputs))
                if n:
                    times.append(time.perf_counter() - start)
        for (_, choice), times in zip(choices, seconds, strict=True):
            self._times[_id(choice)] = choice, statistics.median(times)


def _id(choice: Choice) -> tuple[int, ...]:
    # Candidates live as long as their search.
    return tuple(map(id, choice.candidates))


def _zeros(program: Any) -> list[Any]:
    """Arguments for a compiled program."""
    infos, shardings = jax.tree.leaves(program.args_info), jax.tree.leaves(program.input_shardings)
    arrays = [jax.lax.full(info.shape, 0, info.dtype) for info in infos]
    # Arguments that the program does not use have no sharding.
    return [x if s is None else jax.device_put(x, s) for x, s in zip(arrays, shardings, strict=True)]
