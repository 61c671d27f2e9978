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
from collections.abc import Callable, Hashable
from typing import Any, ParamSpec, TypedDict, TypeVar, Unpack, overload

import jax

from .. import _compat, _registry
from .._lift import Wrapper, as_decorator
from .._paths import as_predicate
from .._program import Call, Layout, Program, Restage
from .._signature import StaticArguments
from .._tree import as_array, freeze
from .._typing import Filter, Indices, Names

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

    Args:
        fun: the function. Arguments may be arrays, Python numbers and pytrees of them, as in ``jax.jit``; any other
            object (a model, a string, None) is static by itself, told apart by equality, or by identity if it cannot
            be hashed.
        static_argnums: positions of static arguments, counted as you call the function, negative ones from the end.
            Unhashable values are welcome.
        static_argnames: the same by name.
        donate_argnums: positions of arguments whose memory the program may use for its results.
        donate_argnames: the same by name.
        donate_states: a filter, or True: written states that it selects hand their old memory to the program.
        keep_unused: as in ``jax.jit``.
        inline: as in ``jax.jit``.
        compiler_options: as in ``jax.jit``.

    Returns:
        A callable with the signature of `fun`; its method ``lower(*args)`` gives a ``jax.stages.Lowered``.

    Sharding:
        There are no ``in_shardings`` and ``out_shardings``: arguments and states lie where you put them
        (``jax.device_put``), and are computed with there. A state that is written keeps its sharding. One that is on a
        single device, and was not put there, becomes replicated where others lie on several. What is computed within,
        outputs too, lies as the compiler finds, or as ``jax.lax.with_sharding_constraint`` says; on a mesh with explicit
        axes, under ``jax.set_mesh``, as its type says. Donation works with every sharding.

    State:
        A written state keeps its sharding and its weak type, so that the second call finds the program of the first.
        A state that the call creates and leaves behind gets its value; the next call is then staged anew.
        Threads may share the function and the states it reads: while one stages it, the others wait. What they write
        is as if each had read all states before its call and written them after it; guard that by a lock.

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
        self.donates = as_predicate(options["donate_states"])
        self.jax_options = {k: options[k] for k in ("keep_unused", "inline", "compiler_options")}
        self._layouts: dict[Hashable, Layout] = {}
        self._programs: dict[Hashable, list[Program]] = {}  # of a key, most recently used first
        self._only: tuple[Program, Hashable] | None = None  # the one program there is, and the modes it is for
        self._lock = threading.RLock()  # held while programs are put in order
        self.staging = threading.RLock()  # held by a thread that stages, so that others wait for its program

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        only = self._only
        if only is not None and only[1] == _registry.idle_modes():
            try:
                return only[0].run_directly(args, kwargs)
            except Restage:
                self._only = None
            except TypeError:
                pass  # an argument or a state that JAX does not take: what follows finds out which
        if _compat.is_jit_disabled():
            return self.__wrapped__(*args, **kwargs)
        call = self._read(args, kwargs)
        programs = self._programs.get(call.key)
        if programs:
            program = programs[0]
            if len(programs) == 1 and not program.guards:
                try:
                    return program.run(call)
                except Restage:
                    pass
                except TypeError:
                    program.check_values()
                    raise
            for program in programs:
                if program.accepts(call):
                    if program is not programs[0]:
                        self._put_first(call, program)
                    try:
                        return program.run(call)
                    except Restage:  # the arguments come in another form than those that were staged
                        continue
        return self._first_run(call, programs)

    def _first_run(self, call: Call, tried: list[Program] | None) -> Any:
        if not _registry.is_idle():
            # No waiting here, where a call further out may be what another thread waits for.
            return self._stage(call).first_run(call)
        with self.staging:
            program = self._stage(call) if self._programs.get(call.key) is tried else None
        if program is None:  # another thread has staged one meanwhile
            return self(*call.args, **call.kwargs)
        return program.first_run(call)

    def _stage(self, call: Call) -> Program:
        program = Program(self, call)
        if program.is_reusable:
            self._keep(call, program)
        return program

    def _keep(self, call: Call, program: Program) -> None:
        with self._lock:
            is_first = not self._programs
            while len(self._programs) >= _MAX_KEYS and call.key not in self._programs:
                del self._programs[next(iter(self._programs))]
            self._put_first(call, program)
            self._only = (program, call.modes) if is_first and call.is_direct and program.is_direct else None

    def _put_first(self, call: Call, program: Program) -> None:
        with self._lock:
            rest = [p for p in self._programs.get(call.key, ()) if p is not program]
            self._programs[call.key] = [program, *rest[: _MAX_PROGRAMS - 1]]

    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """Stage and lower for arguments like these (arrays or ``jax.ShapeDtypeStruct``); no state changes.

        Returns:
            A ``jax.stages.Lowered``; ``.compile()`` gives memory and cost analyses.
        """
        call = self._read(args, kwargs)
        for program in self._programs.get(call.key, ()):
            if program.accepts(call):
                break
        else:
            program = self._stage(call)
        return program.compiled.lower(*program.operands_of(call))

    def clear_cache(self) -> None:
        """Forget every program."""
        self._only = None
        self._programs.clear()
        self._layouts.clear()

    def _read(self, args: tuple, kwargs: dict[str, Any]) -> Call:
        dyn_args, dyn_kwargs, merge = self.static.split(args, kwargs)
        # Taking a module apart reads its states: where that is watched, it must stay whole.
        is_leaf = None if _registry.current_frame() is None else _registry.is_opaque
        leaves, treedef = jax.tree.flatten((dyn_args, dyn_kwargs), is_leaf=is_leaf)
        types = (treedef, tuple(map(type, leaves)))
        layout = self._layouts.get(types)
        if layout is None:
            layout = self._layouts[types] = Layout(self._donated, dyn_args, dyn_kwargs)
        if layout.is_split:
            leaves = jax.tree.leaves((dyn_args, dyn_kwargs), is_leaf=_registry.is_opaque)
        if layout.converts:
            leaves = [as_array(x) for x in leaves]
        static: Hashable = ()
        if layout.static or self.static:
            given = args if self.static else ()
            mask = self.static.mask(len(given))
            static = (
                tuple([freeze(leaves[i]) for i in layout.static]),
                tuple([freeze(a) for a, s in zip(given, mask, strict=True) if s]),
                tuple([(k, freeze(v)) for k, v in sorted(kwargs.items()) if k in self.static.names]),
            )
        return Call(args, kwargs, leaves, layout, merge, static)


_MAX_KEYS = 256  # combinations of static arguments; the oldest is forgotten
_MAX_PROGRAMS = 64  # for one structure of arguments; more types than that are staged again
