"""Gradients of one program, each of which begins when the one before is computed.

Two gradients may not depend on each other, such as those of the two networks of a GAN that are taken before either is
updated. XLA would run them in turns, and the values of both would be in memory together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .. import _jax


class GradientOrder:
    """The gradients that are taken in one block."""

    def __init__(self) -> None:
        self._previous = _jax.Noted()

    def run(self, program: Callable, last_input: int, inputs: Sequence[Any]) -> list[Any]:
        """Run a function that is being differentiated once the gradient before is computed.

        Args:
            last_input: the number of an input that the function begins with.
        """
        inputs = list(inputs)
        awaited = [x for x in self._previous.tracers() if _jax.is_usable_here(x)]
        if awaited:
            inputs[last_input] = _jax.hold(inputs[last_input], awaited)
        self._previous = noted = _jax.Noted()
        return program(*(_jax.note(x, noted) if _jax.is_differentiated(x) else x for x in inputs))
