"""The baseline of a plan, the program without rematerialization: its cost, compiled or extrapolated from shorter versions."""

from __future__ import annotations

import concurrent.futures
import functools
from collections.abc import Callable
from typing import Any

from .. import _jax
from .._equations.compiled import Cost, Program, fast_compile_options, memory_analysis_options
from .._equations.inline import inline
from .._equations.primitives import REMAT
from .._jax import Jaxpr
from ._layout import UNPLANNED, rewrite
from ._parts import Flat
from ._shorter import Shorter, is_long, repetition

ProgramOf = Callable[[Jaxpr, dict[str, Any]], Program]
"""``(jaxpr, compiler_options) -> Program`` makes the program to compile for a rewritten one: with its gradient, or the step that takes it."""


class Baseline:
    """The program without rematerialization.

    Its operations are known without compilation. It is compiled on demand, with fast options at first; a long program of equal
    periods has its cost extrapolated from shorter versions, as long as it is not compiled.

    Args:
        report: called with a description of each step.

    Attributes:
        compiled: the cost of the compiled program; None until it is compiled.
    """

    def __init__(self, program: Flat, program_of: ProgramOf, report: Callable[[str], None]):
        self._program_of, self._report = program_of, report
        self._jaxpr = _without_remat(program)
        self.compiled: Cost | None = None
        self._compiling: concurrent.futures.Future[Cost] | None = None

        # Whether `compiled` is what users' compilation gives, once it is there.
        self._is_exact = fast_compile_options() == memory_analysis_options()

        run = repetition(program) if is_long(program) else None
        self._shorter = None if run is None else Shorter(program, run, self._short_program)

    @functools.cached_property
    def _program(self) -> Program:
        return self._program_of(self._jaxpr, fast_compile_options())

    def _short_program(self, jaxpr: Jaxpr) -> Program:
        return self._program_of(_without_remat(Flat(jaxpr)), fast_compile_options())

    @property
    def flops(self) -> int:
        """Operations with the gradient, known without compilation."""
        short = None if self._shorter is None else self._shorter.flops
        return self._program.flops if short is None else short

    @functools.cached_property
    def flops_without_remat(self) -> int:
        """Operations with all rematerialized functions inlined. `flops` includes recomputation within branches and nested loops, which plans leave."""
        jaxpr = self.jaxpr_without_remat
        return self.flops if jaxpr is self._jaxpr else self._program_of(jaxpr, fast_compile_options()).flops

    @functools.cached_property
    def jaxpr_without_remat(self) -> Jaxpr:
        """The program with rematerialized functions inlined at any depth."""
        return inline(self._jaxpr, calls=REMAT) if _contains_remat(self._jaxpr) else self._jaxpr

    @functools.cached_property
    def extrapolated(self) -> Cost | None:
        """The cost of a long program, by shorter versions; None if it is not long, or not linear."""
        if self._shorter is None:
            return None
        self._report("compiling short versions of the baseline")
        return self._shorter.cost()

    @property
    def known(self) -> Cost | None:
        """The cost as compiled, or else extrapolated; None if neither is known."""
        return self.extrapolated if self.compiled is None else self.compiled

    @property
    def is_started(self) -> bool:
        """Whether its compilation has begun."""
        return self._compiling is not None

    def start(self) -> None:
        """Start to compile it, unless shorter versions tell its cost."""
        if self._shorter is None:
            self._start()

    def _start(self) -> None:
        # In a thread, while Python analyzes the regions: XLA releases the GIL. For a large program this compilation takes longest,
        # since the whole is one region.
        if self._compiling is None:
            program = self._program  # traced here: the thread only compiles
            pool = concurrent.futures.ThreadPoolExecutor(1)
            self._compiling = pool.submit(lambda: program.cost)
            pool.shutdown(wait=False)

    def compile(self) -> Cost:
        """Compile it, unless it is compiled."""
        if self.compiled is None:
            self._start()
            assert self._compiling is not None
            if not self._compiling.done():
                self._report("compiling the baseline")
            self.compiled = self._compiling.result()
        return self.compiled

    def compile_exactly(self) -> Cost:
        """Compile it without the options that may change its memory: for where it may be the answer."""
        if self.compiled is None or not self._is_exact:
            self._report("compiling the baseline")
            self.compiled = self._program_of(self._jaxpr, memory_analysis_options()).cost
            self._is_exact = True
        return self.compiled


def _contains_remat(jaxpr: Jaxpr) -> bool:
    return any(e.primitive.name in REMAT or any(map(_contains_remat, _jax.inner_jaxprs(e))) for e in jaxpr.eqns)


def _without_remat(program: Flat) -> Jaxpr:
    parts = program.split()
    return rewrite(program.jaxpr, parts, [UNPLANNED] * len(parts))
