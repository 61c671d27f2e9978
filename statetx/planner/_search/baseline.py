"""The baseline of a plan, the program without rematerialization: its cost, compiled or extrapolated from shorter
versions.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from ... import _jax
from ..._equations.compiled import Cost, Program, fast_compile_options, memory_analysis_options
from ..._equations.inline import inline
from ..._equations.primitives import REMAT
from ..._equations.structure import Body
from ..._jax import Jaxpr, Literal
from ..._tree import is_float
from .._program.flat import Flat, last_reads
from .._regions.cuts import Run, crossing_bytes, runs_of
from .._treatments.rewrite import UNPLANNED, rewrite

ProgramOf = Callable[[Jaxpr, dict[str, Any]], Program]
"""``(jaxpr, compiler_options) -> Program`` makes the program to compile for a rewritten one: with its gradient, or the
step that takes it.
"""


class Baseline:
    """The program without rematerialization.

    Its operations are known without compilation. It is compiled on demand, with fast options at first; a long program
    of equal periods has its cost extrapolated from shorter versions until it is compiled.

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
        """Operations with all rematerialized functions inlined. `flops` includes recomputation within branches and
        nested loops, which plans leave.
        """
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
        # In a thread, while Python analyzes the regions: XLA releases the GIL. For a large program this compilation
        # takes longest, since the whole is one region.
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


# -- long programs

_LEAST_EQUATIONS = 1000  # of a long program: others take a few seconds to compile
_COUNTS = (3, 4, 5)  # periods of the short versions
_LEAST_PERIODS = 12
_TOLERANCE = 1e-3  # of the bytes of a period


class Shorter:
    """Short versions of a program, which compile in a thread from the beginning.

    Args:
        run: the equal periods.
        program_of: a program to compile, with its gradient, for one without rematerialization.
    """

    def __init__(self, program: Flat, run: Run, program_of: Callable[[Jaxpr], Program]):
        self._count = run.count
        self._programs = [program_of(_shortened(program.jaxpr, run, count)) for count in _COUNTS]
        pool = concurrent.futures.ThreadPoolExecutor(1)
        self._costs = pool.submit(lambda: [program.cost for program in self._programs])
        pool.shutdown(wait=False)

    @functools.cached_property
    def flops(self) -> int | None:
        """Operations of the whole program; None if they are not linear."""
        first, second, third = (program.flops for program in self._programs)
        of_period, rest = divmod(third - second, _COUNTS[2] - _COUNTS[1])
        is_linear = rest == 0 and third - second == second - first
        return third + of_period * (self._count - _COUNTS[2]) if is_linear else None

    def cost(self) -> Cost | None:
        """Extrapolate the cost of the whole program; None if it is not linear."""
        first, second, third = map(dataclasses.asdict, self._costs.result())
        change = second["temp_bytes"] - first["temp_bytes"]
        if change < 0 or abs(third["temp_bytes"] - second["temp_bytes"] - change) > _TOLERANCE * change:
            return None
        steps = (self._count - _COUNTS[2]) / (_COUNTS[1] - _COUNTS[0])
        at = lambda name: type(third[name])(third[name] + steps * (third[name] - second[name]))
        return Cost(**{name: at(name) for name in third if third[name] is not None})


def is_long(program: Flat) -> bool:
    """Whether a program takes many seconds to compile."""
    return len(program) >= _LEAST_EQUATIONS


def repetition(program: Flat) -> Run | None:
    """The largest number of equal periods, each of which reads the one before it as the others do; None if there are
    few.
    """
    found = [_equal_periods(program, run) for run in runs_of(program, crossing_bytes(program.jaxpr), program.ends)[0]]
    return max((r for r in found if r.count >= _LEAST_PERIODS), key=lambda r: r.period * r.count, default=None)


def _equal_periods(program: Flat, run: Run) -> Run:
    """The longest stretch of equal periods in a run."""
    best, length = Run(run.start, run.period, 0), 0
    wirings = _wirings(program.jaxpr, run)
    keys = [program.part(start, start + run.period).key for start in run.boundaries[:-1]]
    for k, key in enumerate(keys):
        # The first of the stretch may read other values: those from before it.
        is_equal = length > 0 and key == keys[k - 1] and (length == 1 or wirings[k] == wirings[k - 1])
        length = length + 1 if is_equal else 1
        if length > best.count:
            best = Run(run.boundaries[k + 1] - length * run.period, run.period, length)
    return best


def _wirings(jaxpr: Jaxpr, run: Run) -> list[list[Any]]:
    """For each period where its operands come from, relative to it."""
    positions = {v: (i, j) for i, e in enumerate(jaxpr.eqns) for j, v in enumerate(e.outvars)}

    def source(atom: Any, start: int) -> Any:
        if isinstance(atom, Literal):
            return None
        i, j = positions.get(atom, (-1, 0))
        return (i - start, j) if i >= run.start else (atom.aval.shape, atom.aval.dtype) if i < 0 else atom

    return [
        [source(a, start) for e in jaxpr.eqns[start : start + run.period] for a in e.invars]
        for start in run.boundaries[:-1]
    ]


def _shortened(jaxpr: Jaxpr, run: Run, count: int) -> Jaxpr:
    """The program with the first periods of a run only. What read a later one reads the last of them."""
    last, end = run.boundaries[count - 1], run.boundaries[-1]
    replaced: dict[Any, Any] = {}
    for start in run.boundaries[count:-1]:
        for kept, dropped in zip(jaxpr.eqns[last:][: run.period], jaxpr.eqns[start:], strict=False):
            replaced.update(zip(dropped.outvars, kept.outvars, strict=True))
    read = lambda atom: atom if isinstance(atom, Literal) else replaced.get(atom, atom)
    after = [e.replace(invars=[read(a) for a in e.invars]) for e in jaxpr.eqns[end:]]
    eqns = [*jaxpr.eqns[: last + run.period], *after]
    shortened = _jax.rebuild(jaxpr, invars=jaxpr.invars, outvars=[read(a) for a in jaxpr.outvars], eqns=eqns)
    unread = last_reads(jaxpr).keys() - last_reads(shortened).keys()
    return _differentiated(shortened, [i for i, v in enumerate(jaxpr.invars) if v in unread and is_float(v.aval)])


def _differentiated(jaxpr: Jaxpr, inputs: Sequence[int]) -> Jaxpr:
    """The same program, where the gradient with respect to these inputs, which it does not read, is the inputs
    themselves.

    A gradient of zeros would take memory in a training step: the more, the shorter the version.
    """
    output = next((i for i, v in enumerate(jaxpr.outvars) if is_float(v.aval)), None)
    if not inputs or output is None:
        return jaxpr

    def run(*args: Any) -> list[Any]:
        outs = list(_jax.evaluate(jaxpr, (), args))
        outs[output] = _first(outs[output], [args[i] for i in inputs])
        return outs

    avals = [v.aval for v in jaxpr.invars]
    return Body.close(*_jax.stage(run, avals, traced_for="statetx.plan", name="shortened")).jaxpr


@jax.custom_vjp
def _first(x: Any, others: list[Any]) -> Any:
    """`x`. The gradient with respect to the others is the others."""
    return x


_first.defvjp(lambda x, others: (x, others), lambda others, gradient: (gradient, others))
