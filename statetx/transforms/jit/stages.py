"""Ahead-of-time stages of a jitted function: traced, lowered, compiled.

Each wraps JAX's own stage of the program and forwards its attributes (cost and memory analyses, texts). Only the
methods that take the function's arguments differ, since the program also takes the values of states.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from typing import Any

import jax

from ... import _jax
from ..._errors import StateAccessError
from ..._frames import is_idle
from ..._objects.walk import created_undone
from ..._text import tree_type_str
from ..._typing import PyTree
from .arguments import Call
from .program import Restage, StagedProgram


@dataclasses.dataclass(repr=False, eq=False)
class _Stage:
    """Forwards to JAX's stage the attributes that it does not have itself.

    Attributes:
        jax_stage: JAX's own stage, whose first inputs are the values of the states.
    """

    jax_stage: Any
    _program: StagedProgram
    _jit: Any
    _call: Call

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.jax_stage, name)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._program.name}>"

    @property
    def name(self) -> str:
        """Name of the function, as in ``jit(step)``."""
        return self._program.name

    @property
    def state_names(self) -> frozenset[str]:
        """Names of the program's inputs that are values of states."""
        return self._program.state_names

    @property
    def out_info(self) -> PyTree:
        """The output, with a ``jax.ShapeDtypeStruct`` for each array."""
        return self._program.out_info()


class Traced(_Stage):
    """The result of ``trace(*args)`` of a jitted function; as ``jax.stages.Traced``.

    Its ``jaxpr`` takes the values of states before the arguments, and returns the new values after the output.
    """

    def lower(self, **options: Any) -> Lowered:
        """Lower the program; options as for ``jax.stages.Traced.lower``."""
        return Lowered(self.jax_stage.lower(**options), self._program, self._jit, self._call)


class Lowered(_Stage):
    """The result of ``lower(*args)`` of a jitted function; as ``jax.stages.Lowered``."""

    def compile(self, **options: Any) -> Compiled:
        """Compile the program; options as for ``jax.stages.Lowered.compile``."""
        return Compiled(self.jax_stage.compile(**options), self._program, self._jit, self._call)


class Compiled(_Stage):
    """A program compiled ahead of time; as ``jax.stages.Compiled``.

    A call with arguments of the compiled types reads and writes states as the jitted function does, and never compiles.
    If the function creates states, the first two calls run its Python, as those of the jitted function.
    """

    @functools.cached_property
    def _runner(self) -> StagedProgram:
        return self._with_executable(self._program)

    def _with_executable(self, program: StagedProgram) -> StagedProgram:
        runner = copy.copy(program)
        runner.compiled = self.jax_stage
        return runner

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        if not is_idle() or any(isinstance(x, _jax.Tracer) for x in jax.tree.leaves((args, kwargs))):
            raise StateAccessError(
                f"{self._program.name} was compiled ahead of time, and cannot be differentiated, mapped or traced.\n"
                f"Fix: call the jitted function itself."
            )
        call = self._jit.read(args, kwargs)
        if call.key == self._call.key and self._runner.accepts(call):
            try:
                return self._runner.run(call)
            except Restage:
                pass
        elif call.key == self._call.key and not self._runner.created.is_kept() and self._runner.is_for(call):
            # The function creates states: Python runs in its first two calls (decision 16), and must find the compiled
            # equations.
            with created_undone(self._jit.__wrapped__, args, kwargs):
                program = self._jit.stage(call, self._program)
                if program.can_share_compiled(self._program):
                    self._runner = self._with_executable(program)
                    out = self._runner.first_run(call)
                    program.settle()
                    return out
        raise TypeError(
            f"{self._program.name} was compiled for arguments {tree_type_str((self._call.args, self._call.kwargs))} "
            f"and the states of that time, and is called with {tree_type_str((args, kwargs))}: types, static "
            "arguments, or types of states differ.\n"
            "Fix: lower and compile it for these, or call the jitted function."
        )
