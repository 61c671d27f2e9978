"""A jitted function ahead of its calls: traced, lowered, compiled. What JAX gives for the program, with the function's signature.

Everything that JAX's own stages offer (cost and memory analyses, texts) is theirs; only what takes the function's arguments
is different, since the program takes the values of states besides them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import jax

from ... import _jax
from ..._errors import StateAccessError
from ..._frames import is_idle
from ..._text import tree_type_str
from ..._typing import PyTree
from .arguments import Call
from .program import Program, Restage


class _Stage:
    """Reads from JAX's stage what it has not itself."""

    def __init__(self, of_jax: Any, program: Program, read: Callable[[tuple, dict[str, Any]], Call], call: Call):
        self._of_jax = of_jax
        self._program = program
        self._read = read
        self._call = call

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self._of_jax, name)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._program.name}>"

    @property
    def out_info(self) -> PyTree:
        """The output, with a ``jax.ShapeDtypeStruct`` for each array."""
        return self._program.out_info()


class Traced(_Stage):
    """What `jit` gives by ``trace(*args)``; as ``jax.stages.Traced``.

    Its ``jaxpr`` takes the values of states before the arguments and returns those that are written after the output.
    """

    def lower(self, **options: Any) -> Lowered:
        """Lower the program; options as those of ``jax.stages.Traced.lower``."""
        return Lowered(self._of_jax.lower(**options), self._program, self._read, self._call)


class Lowered(_Stage):
    """What `jit` gives by ``lower(*args)``; as ``jax.stages.Lowered``."""

    def compile(self, **options: Any) -> Compiled:
        """Compile the program; options as those of ``jax.stages.Lowered.compile``."""
        return Compiled(self._of_jax.compile(**options), self._program, self._read, self._call)


class Compiled(_Stage):
    """A program that was compiled ahead of its calls; as ``jax.stages.Compiled``.

    Called with arguments of the types that it was compiled for, it reads and writes states as the jitted function does,
    and never compiles.
    """

    def __init__(self, of_jax: Any, program: Program, read: Callable[[tuple, dict[str, Any]], Call], call: Call):
        super().__init__(of_jax, program, read, call)
        self._runs = copy.copy(program)
        self._runs.compiled = of_jax

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        if not is_idle() or any(isinstance(x, _jax.Tracer) for x in jax.tree.leaves((args, kwargs))):
            raise StateAccessError(
                f"{self._program.name} was compiled ahead of its calls, and cannot be differentiated, mapped or traced.\n"
                f"Fix: call the jitted function itself."
            )
        call = self._read(args, kwargs)
        if call.key == self._call.key and self._runs.accepts(call):
            try:
                return self._runs.run(call)
            except Restage:
                pass
        raise TypeError(
            f"{self._program.name} was compiled for arguments {tree_type_str((self._call.args, self._call.kwargs))} and states "
            f"as they were then, and is called with {tree_type_str((args, kwargs))}: types, static arguments, or those of "
            f"states differ.\nFix: lower and compile it for these, or call the jitted function."
        )
