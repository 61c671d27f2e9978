"""Memory and operation counts of compiled programs, without running them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from .. import _jax
from .flops import count


@dataclasses.dataclass(frozen=True)
class Cost:
    """Operations and memory of a compiled program.

    Attributes:
        flops: operations of its equations, loops counted with their lengths.
        compiled_flops: operations as XLA counts them: the body of a loop once.
        argument_bytes, output_bytes, temp_bytes: memory, by XLA's memory analysis.
    """

    flops: int
    compiled_flops: float
    argument_bytes: int
    output_bytes: int
    temp_bytes: int

    @property
    def peak_bytes(self) -> int:
        """Arguments, outputs and temporaries together."""
        return self.argument_bytes + self.output_bytes + self.temp_bytes


def memory_analysis_options() -> dict[str, Any]:
    """Compiler options for a program that is compiled only to measure its memory.

    On a CPU they leave the machine code unoptimised, which halves the compile time. XLA assigns memory before that step, so
    the memory is exact.
    """
    return {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else {}


@functools.cache
def fast_compile_options() -> dict[str, Any]:
    """Faster compiler options for the same purpose; reported memory may differ by a few hundred bytes."""
    options = {
        **memory_analysis_options(),
        "xla_cpu_use_fusion_emitters": False,
    }  # an option that jaxlib 0.12 no longer has
    if jax.default_backend() == "cpu":
        # Try the options on a trivial program: a jaxlib that lacks one of them raises.
        try:
            jax.jit(lambda x: x).lower(0.0).compile(options)
            return options
        except jax.errors.JaxRuntimeError:
            pass
    return memory_analysis_options()


class Program:
    """A function of arrays, traced for arguments of certain types and compiled on request. It is never run.

    Attributes:
        lowered, compiled: the ``jax.stages`` objects.
        flops: operations of its equations, loops counted with their lengths.
        cost: see `Cost`.
    """

    def __init__(self, fun: Callable, args: Sequence[Any], compiler_options: dict[str, Any] | None = None):
        traced = jax.jit(fun).trace(*args)
        self.lowered = traced.lower()
        self.flops = count(_jax.without_dead_code(traced.jaxpr))
        self._options = compiler_options

    @functools.cached_property
    def compiled(self) -> Any:
        return self.lowered.compile(self._options)

    @functools.cached_property
    def cost(self) -> Cost:
        memory, analysis = self.compiled.memory_analysis(), self.compiled.cost_analysis()
        assert memory is not None
        return Cost(
            flops=self.flops,
            compiled_flops=float((analysis or {}).get("flops", 0.0)),
            argument_bytes=memory.argument_size_in_bytes,
            output_bytes=memory.output_size_in_bytes,
            temp_bytes=memory.temp_size_in_bytes,
        )
