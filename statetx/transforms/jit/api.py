"""`jit`: compilation of a function whose states are inputs of its program, or outputs.

The first call stages the function: the user's Python runs once, and each state becomes an input at its first read, so
that nothing has to be declared or searched for. A later call gathers the values of these states, calls one
`jax.jit`-ed function, and stores its outputs.

A `StagedProgram` is the result of one staging. The function that JAX compiles for it evaluates the staged equations.
JAX calls this function again if it has no executable for the types or settings of a call. If these differ from the
staged ones, the function raises `Restage`: the user's Python may do something else for them and must run again.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from types import NoneType
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, cast, overload

import jax

from ... import _frames, _jax
from ..._atomic import locked
from ..._cached import cached_property
from ..._lift.options import transform
from ..._lift.run import run_eagerly
from ..._lift.wrapper import Wrapper, name_of
from ..._objects.paths import as_predicate
from ..._objects.walk import created_undone
from ..._text import brief, tree_type_str
from ..._typing import Filter, Indices, Names, PyTree
from .arguments import Call, CallReader, Reread
from .cache import cache_of
from .program import Restage, StagedProgram

P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R")


class JitTransform(Protocol[Q]):
    """The type of `jit`: applied to a function, or with options as a decorator."""

    @overload
    def __call__(self, fun: Callable[P, R], /, *args: Q.args, **kwargs: Q.kwargs) -> Jit[P, R]: ...
    @overload
    def __call__(
        self, fun: None = None, /, *args: Q.args, **kwargs: Q.kwargs
    ) -> Callable[[Callable[P, R]], Jit[P, R]]: ...


def _returns_jit(fun: Callable[Concatenate[Any, Q], Any]) -> JitTransform[Q]:
    return cast(JitTransform[Q], fun)


_PLACE = "place arguments and states by jax.device_put; the computation follows them"
_HINTS: dict[str, str] = dict.fromkeys(["in_shardings", "out_shardings", "device", "backend"], _PLACE)


@_returns_jit
@transform(_HINTS)
def jit(
    fun: Callable[..., Any] | None = None,
    *,
    static_argnums: Indices = (),
    static_argnames: Names = (),
    donate_argnums: Indices = (),
    donate_argnames: Names = (),
    donate_states: Filter = False,
    release_gradients: bool | None = None,
    keep_unused: bool = False,
    inline: bool = False,
    compiler_options: dict[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile a function that may read and write states.

    The states that the function reads are inputs of the compiled program and the states that it writes are outputs;
    they are found in the first call. As with ``jax.jit``, the user's Python runs once for each combination of argument
    types and static arguments, and values that it reads from other Python objects are constants of the program. It runs
    again when the type of a state changes, or a mode that a kind of state declares (brainstate's ``environ``).
    Two calls of ``jit(fun)`` with the same function and equal options share their compiled programs, until
    ``jax.clear_caches()`` or ``clear_cache()`` removes them.

    Args:
        fun: the function. Arguments may be arrays, Python numbers and pytrees of them, as in ``jax.jit``. Any other
            object (a model, a string, None) is static without a declaration, and compared by equality; by identity if
            it holds states. Containers are compared by their contents, also those that cannot be hashed. Another object
            that cannot be hashed, such as a dataclass, must be the same with the same attributes. A program is dropped
            when its model is garbage collected. Variables of flax by themselves, as in an ``nnx.State``, are arrays, as
            in ``jax.jit``, and so are, from the second one on, those of models of equal structure; writes go to those
            of the call.
        static_argnums: positions of static arguments, counted as you call the function, negative ones from the end.
            Unhashable values are allowed.
        static_argnames: the same by name.
        donate_argnums: positions of arguments whose memory the program may use for its results. Of states that an
            argument holds, those that the function writes donate their old memory, as by `donate_states`. Variables of
            flax by themselves are donated as arrays, and not written if the new value is returned, as in JAX.
        donate_argnames: the same by name.
        donate_states: a filter, or True for all: the written states that it selects donate their old memory to the
            program. If JAX fails after it has taken this memory (a callback that raises, an interrupt in the first
            call), the old values are lost: reading such a state raises `StateAccessError`, and the exception names the
            states. Copy them before the call (`values`), or do not donate.
        release_gradients: whether updates of scanned layers run in the loop of their backward pass ("gradient
            release"), so that no set of gradients exists. It is for updates of each layer alone, such as Adam's. By
            default where states or arguments are donated and the device gains: on GPUs and TPUs, and on CPUs for
            updates without moments. `memory_profile` says whether it was done. True demands it: the loop runs twice
            where a number of all gradients is needed first, such as their norm for clipping, and other steps are
            refused.
        keep_unused: as in ``jax.jit``.
        inline: as in ``jax.jit``.
        compiler_options: as in ``jax.jit``.

    Returns:
        A callable with the signature of `fun`, and with the methods ``trace``, ``lower`` and ``eval_shape`` of
        ``jax.jit``. If `fun` is a callable object, attributes are read from it and written to it; compiled programs do
        not see a change.

    Sharding:
        There are no ``in_shardings`` and ``out_shardings``: the computation follows the arguments and states, which you
        place by ``jax.device_put``. A written state keeps its sharding if this divides its new shape. If other arrays
        are on a mesh, a state that is read and not committed to its single device becomes replicated. A state that is
        only written gets its sharding from the compiler. The sharding of intermediate values and outputs is the choice
        of the compiler or of ``jax.lax.with_sharding_constraint``; on a mesh with explicit axes, under
        ``jax.set_mesh``, it is part of their types. Donation works with every sharding.

    State:
        A written state keeps its sharding and its weak type, so that the second call finds the program of the first.
        If a call creates states that live on, the next call stages the function once more, which the logger ``statetx``
        says once. Later calls run the second program: they write the states that the second call has created, and put
        them back into the objects that held them. A state that is created only if there is none yet keeps its value. A
        function that returns states that it creates is staged in every call, with a `StagingWarning`, unless JAX has
        them as pytrees, as models of flax: then each call returns new ones. After an
        exception or an interrupt every state holds its old value, unless it was donated. Threads may share the function
        and the states that it reads: while one thread stages it, the others wait. If another thread writes a state
        after a call has read it and before the call writes it, the call raises `ForeignStateError` and writes nothing;
        guard such calls by a lock.

    Memory:
        A written state takes twice its size during the call, old and new value, unless it is donated.

    Raises:
        StaticArgumentError: a position or name that the function does not have, or that is both static and donated.
        FunctionError: ``release_gradients=True``, and the named line needs several layers of a gradient at once.
        StateFilterError: a path in `donate_states` selects no state that the function can reach.
        ForeignStateError: another thread has written a state that the call writes.

    Source:
        ``jax.jit``.

    Example:
        >>> import jax.numpy as jnp, statetx
        >>> total = statetx.State(jnp.zeros(()))
        >>> @statetx.jit
        ... def add(x):
        ...     total.value += x
        ...     return total.value
        >>> float(add(2.0)), float(add(3.0)), float(total.value)
        (2.0, 5.0, 5.0)
    """
    ...


class Jit(Wrapper[P, R], made_by=jit):
    """A compiled function; made by `jit`."""

    def __init__(self, fun: Callable, **options_given: Any):
        super().__init__(fun, **options_given)
        options = self._options
        if not isinstance(options["compiler_options"], (Mapping, NoneType)):
            raise TypeError(
                f"jit: compiler_options= must be a dict of options of XLA, got {brief(options['compiler_options'])}."
            )
        self.cache = cache_of(fun, options)
        reader = CallReader(fun, options, self.cache.opening, self.cache.of)
        self.read, self._read_to_run = reader.read, reader.read_to_run
        self.static_argnums, self.static_argnames = options["static_argnums"], options["static_argnames"]
        self.donate_states = options["donate_states"]
        self.donates = as_predicate([self.donate_states, *reader.donated.filters_of_states()])
        self.release_gradients = options["release_gradients"]
        self.jax_options = {k: options[k] for k in ("keep_unused", "inline", "compiler_options")}

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> R:
        # One program, arguments unchanged, no open frame: JAX's own dispatch checks the types.
        fast_path = self.cache.fast_path
        if fast_path is not None and fast_path[1] == _frames.idle_modes():
            try:
                return fast_path[0].run_directly(args, kwargs)
            except Restage:
                self.cache.fast_path = None
            except TypeError:
                pass  # JAX rejects an argument or a state: the slow path below finds out which
        if _jax.is_jit_disabled():
            return run_eagerly(self._name(), self.__wrapped__, args, kwargs)
        while True:
            with contextlib.suppress(Reread):
                return self._run(self._read_to_run(args, kwargs))

    def _run(self, call: Call) -> Any:
        programs = self.cache.of(call)
        # A single program need not be chosen: it raises `Restage` if the types differ.
        if len(programs) == 1 and not programs[0].states.guards:
            try:
                return programs[0].run(call)
            except Restage:
                pass
            except TypeError:  # a state may hold something other than an array now, or no value: `accepts` checks it
                if programs[0].accepts(call):
                    raise

        for program in programs:
            if program.accepts(call):
                if program is not programs[0]:
                    self.cache.put_first(call, program)
                try:
                    return program.run(call)
                except Restage:  # the arguments have another structure than the staged ones
                    continue

        if _frames.is_idle():
            program = locked(self.cache.staging, self._stage_unless_done, call, programs)
            if program is None:  # another thread has staged one meanwhile
                return self._run(call)
        else:  # without the lock: another thread may be waiting for an enclosing call of this thread (deadlock)
            program = self._stage(call, programs)
        return program.first_run(call)

    def _stage_unless_done(self, call: Call, tried: Sequence[StagedProgram]) -> StagedProgram | None:
        return self._stage(call, tried) if self.cache.of(call) is tried else None

    def _stage(self, call: Call, tried: Sequence[StagedProgram], *, is_run: bool = True) -> StagedProgram:
        if not self.donate_states:
            call.open_models()
        program = StagedProgram(self, call, tried)
        created = program.created
        # A call that is only inspected, or within another trace, such as a report's, says nothing of later ones.
        if is_run and created.is_second and _frames.is_idle():
            earlier = [p.created for p in tried if p.created.is_awaiting() and p.is_for(call)]
            self.cache.say_second(self._name(), created, earlier)
        if program.is_reusable and (is_run or not created.states):
            self.cache.keep(call, program)
        return program

    def _name(self) -> str:
        return f"jit({name_of(self.__wrapped__)})"

    def trace(self, /, *args: P.args, **kwargs: P.kwargs) -> Traced:
        """Stage the function for arguments like these (arrays or ``jax.ShapeDtypeStruct``); no state changes.

        Returns:
            As ``jax.stages.Traced``: ``.jaxpr``, ``.out_info``, ``.lower()``.
        """
        program, call = self._program_for(args, kwargs)
        return Traced(program.compiled.trace(*program.operands_of(call)), program, self, call)

    def lower(self, /, *args: Any, **kwargs: Any) -> Lowered:
        """Stage and lower the function for arguments like these (arrays or ``jax.ShapeDtypeStruct``); no state changes.

        Returns:
            As ``jax.stages.Lowered``. ``.compile()`` returns an object with memory and cost analyses; calling it reads
            and writes states as the jitted function does, and never compiles.
        """
        program, call = self._program_for(args, kwargs)
        return Lowered(program.compiled.lower(*program.operands_of(call)), program, self, call)

    def eval_shape(self, /, *args: Any, **kwargs: Any) -> PyTree:
        """Return the output for arguments like these, with a ``jax.ShapeDtypeStruct`` for each array; no state
        changes.
        """
        return self.trace(*args, **kwargs).out_info

    def _program_for(self, args: tuple, kwargs: dict[str, Any]) -> tuple[StagedProgram, Call]:
        while True:
            with contextlib.suppress(Reread):
                return self._program_of(self.read(args, kwargs))

    def _program_of(self, call: Call) -> tuple[StagedProgram, Call]:
        programs = self.cache.of(call)
        program = next((p for p in programs if p.accepts(call)), None)
        if program is None:
            with created_undone(self.__wrapped__, call.args, call.kwargs):
                program = self._stage(call, programs, is_run=False)
        return program, call

    def stage(self, call: Call, compiled: StagedProgram) -> StagedProgram:
        """Stage a call of a program that was compiled ahead of time."""
        return locked(self.cache.staging, self._stage, call, [compiled, *self.cache.of(call)])

    def clear_cache(self) -> None:
        """Drop every program of the function, as ``jax.clear_caches`` does for all functions."""
        self.cache.cache_clear()


# -- ahead-of-time stages ----------------------------------------------------------------------------------------------
#
# Each wraps JAX's own stage of the program and forwards its attributes (cost and memory analyses, texts). Only the
# methods that take the function's arguments differ, since the program also takes the values of states.


@dataclasses.dataclass(repr=False, eq=False)
class _Stage:
    """Forwards to JAX's stage the attributes that it does not have itself, those of inputs and outputs as they are in
    the user's function.

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
        value = getattr(self.jax_stage, name)
        if name in ("args_info", "in_avals", "input_shardings", "input_formats"):
            (_, _, operand, donated), _ = value
            return operand if self._call.is_direct else self._call.dynamic_with([*operand, *donated])
        return self._program.output(value) if name in ("out_avals", "output_shardings", "output_formats") else value

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
        return self._program.output(self.jax_stage.out_info)

    @property
    def in_tree(self) -> Any:
        """The structure of the arguments, without static ones."""
        return jax.tree.structure(self.args_info)

    @property
    def out_tree(self) -> Any:
        """The structure of the output."""
        return jax.tree.structure(self.out_info)

    @property
    def donate_argnums(self) -> tuple[int, ...]:
        """The numbers of donated leaves of the arguments."""
        infos = jax.tree.leaves(self.args_info)
        return tuple(n for n, info in enumerate(infos) if getattr(info, "donated", False))

    @property
    def gradients(self) -> tuple[str, ...]:
        """Sentences on the gradients of scanned layers: whether the program releases them, or why not."""
        return self._program.gradients.told()


class Traced(_Stage):
    """The result of ``trace(*args)`` of a jitted function; as ``jax.stages.Traced``.

    Its ``jaxpr`` takes the values of states before the arguments, and returns the new values after the output, of
    donated states before it.
    """

    def lower(self, **options: Any) -> Lowered:
        """Lower the program; options as for ``jax.stages.Traced.lower``."""
        return Lowered(self.jax_stage.lower(**options), self._program, self._jit, self._call)


class Lowered(_Stage):
    """The result of ``lower(*args)`` of a jitted function; as ``jax.stages.Lowered``."""

    def compile(self, compiler_options: dict[str, Any] | None = None, **options: Any) -> Compiled:
        """Compile the program; options as for ``jax.stages.Lowered.compile``."""
        compiled = self.jax_stage.compile(compiler_options, **options)
        return Compiled(compiled, self._program, self._jit, self._call)


class Compiled(_Stage):
    """A program compiled ahead of time; as ``jax.stages.Compiled``.

    A call with arguments of the compiled types, without the static ones, reads and writes states as the jitted function
    does, and never compiles.
    If the function creates states, the first two calls run its Python, as with the jitted function.
    """

    @cached_property
    def _runner(self) -> StagedProgram:
        return self._with_executable(self._program)

    def _with_executable(self, program: StagedProgram) -> StagedProgram:
        runner = copy.copy(program)
        runner.compiled = self.jax_stage
        return runner

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        if not _frames.is_idle() or _jax.has_tracers((args, kwargs)):
            raise TypeError(
                f"{self._program.name} was compiled ahead of time, and cannot be differentiated, mapped or traced.\n"
                f"Fix: call the jitted function itself."
            )
        merged = self._call.merged(args, kwargs)
        if merged is None:
            raise self._refusal(args, kwargs)
        try:
            call = self._jit.read(*merged, like=self._call)
            if call.key == self._call.key and self._runner.accepts(call):
                return self._runner.run(call)
        except (Restage, Reread):
            raise self._refusal(args, kwargs) from None
        if call.key == self._call.key and not self._runner.created.is_kept() and self._runner.is_for(call):
            # The function creates states: Python runs in its first two calls (decision 16), and must find the compiled
            # equations.
            with created_undone(self._jit.__wrapped__, *merged):
                program = self._jit.stage(call, self._program)
                if program.can_share_compiled(self._program):
                    self._runner = self._with_executable(program)
                    out = self._runner.first_run(call)
                    program.settle()
                    return out
        raise self._refusal(args, kwargs)

    def _refusal(self, args: tuple, kwargs: dict[str, Any]) -> TypeError:
        types = tree_type_str(self._call.dynamic)
        return TypeError(
            f"{self._program.name} was compiled for arguments {types} and the states of that time, and is "
            f"called with {tree_type_str((args, kwargs))}: types, values other than arrays, or types of states differ. "
            "Static arguments are left out, as in JAX.\n"
            "Fix: lower and compile it for these, or call the jitted function."
        )
