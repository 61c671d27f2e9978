"""`jit`: compile a function that reads and writes states, with their values as inputs and outputs.

The first call stages the function: the user's Python runs once, and each state it reads becomes an input at the
moment it is read, so nothing has to be declared or searched for. What remains for later calls is small: gather the
values of the states in that list, call one `jax.jit`-ed function, store its outputs.

A `Program` is what one staging gave. The function that JAX compiles for it evaluates the staged equations. JAX calls
that function again where it has no compiled program for the types or settings of a call; if these differ from those
that were staged it raises `Restage`, since the user's Python may do something else for them and must run again.
"""

from __future__ import annotations

import threading
import types
import warnings
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any, ParamSpec, TypedDict, TypeVar, Unpack, overload

import jax

from ... import _frames, _jax, _states
from ..._atomic import locked
from ..._errors import StagingWarning
from ..._lift.signature import StaticArguments
from ..._lift.stage import Wrapper, as_decorator, name_of, run_at_once
from ..._objects.paths import as_predicate
from ..._tree import as_array
from ..._typing import Filter, Indices, Names
from .arguments import Call, Layout
from .created import Making
from .program import Program, Restage
from .stages import Lowered, Traced
from .static_keys import Programs, static_key

P = ParamSpec("P")
R = TypeVar("R")


class JitOptions(TypedDict, total=False):
    """What `jit` takes besides the function."""

    static_argnums: Indices
    static_argnames: Names
    donate_argnums: Indices
    donate_argnames: Names
    donate_states: Filter
    keep_unused: bool
    inline: bool
    compiler_options: dict[str, Any] | None


@overload
def jit(fun: Callable[P, R], **options: Unpack[JitOptions]) -> Jit[P, R]: ...
@overload
def jit(fun: None = None, **options: Unpack[JitOptions]) -> Callable[[Callable[P, R]], Jit[P, R]]: ...
def jit(
    fun: Any = None,
    *,
    static_argnums: Indices = (),
    static_argnames: Names = (),
    donate_argnums: Indices = (),
    donate_argnames: Names = (),
    donate_states: Filter = False,
    keep_unused: bool = False,
    inline: bool = False,
    compiler_options: dict[str, Any] | None = None,
) -> Any:
    """Compile a function that may read and write states.

    States read are inputs of the compiled program and states written are outputs, found when the function is first
    run; between calls only their values move. As with ``jax.jit``, the user's Python runs once for each combination
    of argument types and static arguments, and what it reads from other Python objects is remembered. It runs again
    when the type of a state changes, and when a mode that a kind of state declares (brainstate's ``environ``) does.
    Two calls of ``jit(fun)`` with the same function and equal options share their compiled programs, until
    ``jax.clear_caches()`` or ``clear_cache()`` removes them.

    Args:
        fun: the function. Arguments may be arrays, Python numbers and pytrees of them, as in ``jax.jit``; any other
            object (a model, a string, None) is static by itself, told apart by equality; by identity if it cannot be
            hashed or holds states. A program goes with the model that it was made for.
        static_argnums: positions of static arguments, counted as you call the function, negative ones from the end.
            Unhashable values are welcome.
        static_argnames: the same by name.
        donate_argnums: positions of arguments whose memory the program may use for its results.
        donate_argnames: the same by name.
        donate_states: a filter, or True: written states that it selects hand their old memory to the program. If JAX
            fails after it has taken that memory (a callback that raises, an interrupt in the first call), the old values
            are gone: reading such a state raises `StateAccessError`, and the exception names them. Save a checkpoint
            before, or do not donate.
        keep_unused: as in ``jax.jit``.
        inline: as in ``jax.jit``.
        compiler_options: as in ``jax.jit``.

    Returns:
        A callable with the signature of `fun`; its methods ``trace``, ``lower`` and ``eval_shape`` are those of ``jax.jit``.
        Attributes of a callable object are read from it and written to it; what was compiled does not see the change.

    Sharding:
        There are no ``in_shardings`` and ``out_shardings``: arguments and states lie where you put them
        (``jax.device_put``), and are computed with there. A state that is written keeps its sharding, if this divides its
        new shape. One that is read on a single device, without having been put there, becomes replicated where other
        arrays are on a mesh; one that is only written gets its sharding from the compiler. What is computed within,
        outputs too, lies as the compiler finds, or as ``jax.lax.with_sharding_constraint`` says; on a mesh with explicit
        axes, under ``jax.set_mesh``, as its type says. Donation works with every sharding.

    State:
        A written state keeps its sharding and its weak type, so that the second call finds the program of the first.
        A state that every call makes and leaves in an attribute is made once, when the function is staged, and receives the
        values of later calls. Where that would differ from what Python does (the state is made only if there is none yet, or
        the caller has kept that of the call before), the function is staged again, with a `StagingWarning` if this repeats.
        After an exception or an interrupt every state holds its old value, unless it was donated.
        Threads may share the function and the states it reads: while one stages it, the others wait. Where another
        thread writes a state between the moment a call reads it and the moment the call writes it, the call raises
        `ForeignStateError` and writes nothing; guard such calls by a lock.

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
    options = {
        "static_argnums": static_argnums,
        "static_argnames": static_argnames,
        "donate_argnums": donate_argnums,
        "donate_argnames": donate_argnames,
        "donate_states": donate_states,
        "keep_unused": keep_unused,
        "inline": inline,
        "compiler_options": compiler_options,
    }
    return as_decorator(Jit, fun, options)


class Jit(Wrapper[P, R]):
    """A compiled function; made by `jit`."""

    def __init__(self, fun: Callable, **options: Any):
        super().__init__(fun, options)
        self.static = StaticArguments(fun, options["static_argnums"], options["static_argnames"])
        self._donated = StaticArguments(fun, options["donate_argnums"], options["donate_argnames"], "donate")
        self.static.refuse_overlap(self._donated)
        self.donates = as_predicate(options["donate_states"])
        self.jax_options = {k: options[k] for k in ("keep_unused", "inline", "compiler_options")}
        self.cache = _cache_of(fun, options)

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> R:
        only = self.cache.only
        if only is not None and only[1] == _frames.idle_modes():
            try:
                return only[0].run_directly(args, kwargs)
            except Restage:
                self.cache.only = None
            except TypeError:
                pass  # an argument or a state that JAX does not take: what follows finds out which
        if _jax.is_jit_disabled():
            return run_at_once("jit", self.__wrapped__, args, kwargs)
        call = self._read(args, kwargs)
        programs = self.cache.programs.get(call.key)
        if programs:
            program = programs[0]
            if len(programs) == 1 and not program.guards:
                try:
                    return program.run(call)
                except Restage:
                    pass
                except TypeError:  # a state may hold what is no array now, or have lost its value, which `accepts` says
                    if program.accepts(call):
                        raise
            for program in programs:
                if program.accepts(call):
                    if program is not programs[0]:
                        locked(self.cache.lock, self._put_first, call, program)
                    try:
                        return program.run(call)
                    except Restage:  # the arguments come in another form than those that were staged
                        continue
        return self._first_run(call, programs)

    def _first_run(self, call: Call, tried: list[Program] | None) -> Any:
        if not _frames.is_idle():
            # No waiting here, where a call further out may be what another thread waits for.
            return self._stage(call, tried or []).first_run(call)
        program = locked(self.cache.staging, self._stage_unless_done, call, tried)
        if program is None:  # another thread has staged one meanwhile
            return self(*call.args, **call.kwargs)
        return program.first_run(call)

    def _stage_unless_done(self, call: Call, tried: list[Program] | None) -> Program | None:
        return self._stage(call, tried or []) if self.cache.programs.get(call.key) is tried else None

    def _stage(self, call: Call, tried: Sequence[Program]) -> Program:
        program = Program(self, call, tried)
        program.count_references()
        program.making.settle()
        if program.making.makes:
            self._warn(program.making, [p.making for p in tried[:1] if p.is_for(call)])
        if program.is_reusable:
            locked(self.cache.lock, self._keep, call, program)
        return program

    def _warn(self, making: Making, last: Sequence[Making]) -> None:
        """Say, once, that calls are staged again and again for the states that they make."""
        making.num_unused = sum(m.num_unused + 1 for m in last if m.makes and not m.was_used)
        if making.num_unused >= (3 if making.is_settled else 1) and not self.cache.has_warned:
            self.cache.has_warned = True
            advice = making.advice(f"jit({name_of(self.__wrapped__)})")
            warnings.warn(advice, StagingWarning, stacklevel=_states.user_stacklevel())

    def _keep(self, call: Call, program: Program) -> None:
        is_first = not self.cache.programs
        self._put_first(call, program)
        self.cache.only = (program, call.modes) if is_first and call.is_direct and program.is_direct else None

    def _put_first(self, call: Call, program: Program) -> None:
        rest = [p for p in self.cache.programs.get(call.key, ()) if p is not program and p.making.may_run()]
        self.cache.programs.keep(call.key, [program, *rest[: _MAX_PROGRAMS - 1]])

    def trace(self, /, *args: P.args, **kwargs: P.kwargs) -> Traced:
        """Stage for arguments like these (arrays or ``jax.ShapeDtypeStruct``); no state changes.

        Returns:
            As ``jax.stages.Traced``: ``.jaxpr``, ``.out_info``, ``.lower()``.
        """
        program, call = self._program_for(args, kwargs)
        return Traced(program.compiled.trace(*program.operands_of(call)), program, self._read, call)

    def lower(self, /, *args: Any, **kwargs: Any) -> Lowered:
        """Stage and lower for arguments like these (arrays or ``jax.ShapeDtypeStruct``); no state changes.

        Returns:
            As ``jax.stages.Lowered``; ``.compile()`` gives memory and cost analyses, and a callable that reads and
            writes states as this one does, and never compiles.
        """
        program, call = self._program_for(args, kwargs)
        return Lowered(program.compiled.lower(*program.operands_of(call)), program, self._read, call)

    def eval_shape(self, /, *args: Any, **kwargs: Any) -> Any:
        """The output for arguments like these, with a ``jax.ShapeDtypeStruct`` for each array; no state changes."""
        return self._program_for(args, kwargs)[0].out_info()

    def _program_for(self, args: tuple, kwargs: dict[str, Any]) -> tuple[Program, Call]:
        call = self._read(args, kwargs)
        programs = self.cache.programs.get(call.key, [])
        return next((p for p in programs if p.accepts(call)), None) or self._stage(call, programs), call

    def clear_cache(self) -> None:
        """Forget every program of the function, as ``jax.clear_caches`` does for all functions."""
        self.cache.cache_clear()

    def _read(self, args: tuple, kwargs: dict[str, Any]) -> Call:
        dyn_args, dyn_kwargs, merge = self.static.split(args, kwargs)
        # Taking a module apart reads its states: where that is watched, it must stay whole. One that refers to itself has no end.
        is_whole = _frames.current_frame() is not None or any(map(_states.is_opaque, (*args, *kwargs.values())))
        is_leaf = _states.is_opaque if is_whole else None
        leaves, treedef = jax.tree.flatten((dyn_args, dyn_kwargs), is_leaf=is_leaf)
        donated = self._donation(args) if self._donated else None
        key = (treedef, tuple(map(type, leaves)), donated and donated[0])
        layouts = self.cache.layouts
        layout = layouts.get(key)
        if layout is None:
            if len(layouts) >= _MAX_KEYS:
                layouts.clear()
            layout = layouts[key] = Layout(donated, dyn_args, dyn_kwargs)
        if layout.is_split:
            leaves = jax.tree.leaves((dyn_args, dyn_kwargs), is_leaf=_states.is_opaque)
        if layout.converts:
            leaves = [as_array(x) for x in leaves]
        static: Hashable = ()
        if layout.static or self.static:
            given = args if self.static else ()
            mask = self.static.mask(len(given))
            static = (
                tuple([static_key(leaves[i]) for i in layout.static]),
                tuple([static_key(a) for a, s in zip(given, mask, strict=True) if s]),
                tuple([(k, static_key(v)) for k, v in sorted(kwargs.items()) if k in self.static.names]),
            )
        return Call(args, kwargs, leaves, layout, merge, static)

    def _donation(self, args: tuple) -> tuple[tuple[bool, ...], set[str]]:
        num = len(args)
        pairs = zip(self._donated.mask(num), self.static.mask(num), strict=True)
        return tuple([donated for donated, static in pairs if not static]), self._donated.names


class _Cache:
    """What calls of a function have staged, for every `jit` of it with the same options.

    Attributes:
        layouts: those of arguments, by their structure and types.
        programs: those of a key, most recently used first.
        only: the one program there is, and the modes it is for.
        has_warned: whether a `StagingWarning` was given.
        lock: held while programs are put in order.
        staging: held by a thread that stages, so that others wait for its program.
    """

    def __init__(self) -> None:
        self.layouts: dict[Hashable, Layout] = {}
        self.programs = Programs(_MAX_KEYS)
        self.only: tuple[Program, Hashable] | None = None
        self.has_warned = False
        self.lock = threading.RLock()
        self.staging = threading.RLock()
        _jax.register_cache(self, "statetx.jit")

    def cache_clear(self) -> None:
        self.only = None
        self.programs.clear()
        self.layouts.clear()


_caches: weakref.WeakKeyDictionary[types.FunctionType, dict[Hashable, _Cache]] = weakref.WeakKeyDictionary()


def _cache_of(fun: Callable, options: dict[str, Any]) -> _Cache:
    """The cache of a function with these options, which every `jit` of it shares."""
    if not isinstance(fun, types.FunctionType):  # a bound method, for one, is made whenever it is looked up
        return _Cache()
    caches = _caches.setdefault(fun, {})
    key = static_key(options)
    if key not in caches:
        while len(caches) >= _MAX_OPTIONS:
            caches.pop(next(iter(caches)), None)
        caches[key] = _Cache()
    return caches[key]


_MAX_OPTIONS = 8  # combinations of options for one function; the oldest is forgotten
_MAX_KEYS = 256  # combinations of static arguments; the oldest is forgotten
_MAX_PROGRAMS = 64  # for one structure of arguments; more types than that are staged again
