"""Staging of a function: a trace to equations, with states or Refs as inputs or outputs.

One of the two ways to carry states through a transform. Transforms that need the function as a jaxpr use it (`remat`,
`jit`, loops and branches). The other way, `run`, runs the function under JAX's transform. `InputNames` are the names of
the function's arguments in messages, `Lifting` makes a state an input when it is read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import re
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from .. import _jax, _states
from .._equations.structure import Body
from .._frames import Effect
from .._objects.paths import Paths, argument_names
from .._states import Kind, kind_of_state
from .._tree import Partition, as_array, is_type, partition
from .context import note_shardings
from .wrapper import name_of, place_of

_CALLED_WITH = {
    "scan": "two arguments, the carry and an element of xs",
    "fori_loop": "two arguments, the index and the carry",
    "while_body": "one argument, the carry",
    "while_cond": "one argument, the carry",
    "statetx.cond": "the operands, the arguments after the branches",
    "statetx.switch": "the operands, the arguments after the branches",
}
"""The arguments of the user's function, by JAX's label of its trace."""


class InputNames(Sequence[str]):
    """The names of a trace's inputs in JAX's errors: arguments as the user writes them, states by their paths.

    They are computed only on demand. JAX asks for them in error messages.

    Args:
        fun: the user's function.
        arguments: maps the inputs of the trace to the arguments of `fun`.
        num_arguments: the number of inputs that are arguments; a trace sets it.
    """

    def __init__(
        self,
        fun: Callable,
        arguments: Callable[[Sequence[Any]], tuple[tuple, dict[str, Any]]] | None = None,
        num_arguments: int = 0,
    ):
        self.fun: Callable | None = fun
        self.arguments = arguments
        self.num_arguments = num_arguments
        self.lifting: Lifting | None = None
        self._named: list[tuple[str, Any]] = []  # names in errors, each with its state or None

    def __str__(self) -> str:
        if self.fun is None:
            return "unknown"
        return place_of(self.fun)

    def __len__(self) -> int:
        return self.num_arguments + (self.lifting.num_variables if self.lifting else 0)

    def __iter__(self) -> Iterator[str]:
        """An empty name for each input: JAX 0.12 iterates to copy the names into a jaxpr, while its errors index one
        name.
        """
        return iter(("",) * len(self))

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return tuple(self)[index]
        if self.fun is None:
            return "unknown"
        if index >= self.num_arguments:
            states = self.lifting.inputs.values() if self.lifting else ()
            i = next((i for i in states if index - self.num_arguments in i.variables), None)
            return "unknown" if i is None else self._note(Paths(self.fun)(i.state), i.state)

        # Rebuild the arguments from unique objects, and find the one at `index`.
        leaves = [object() for _ in range(self.num_arguments)]
        with contextlib.suppress(Exception):  # a user's container may refuse leaves that are not arrays
            args, kwargs = self.arguments(leaves) if self.arguments else ((), {})
            name = argument_names(self.fun, args)
            for keys, leaf in jax.tree_util.tree_flatten_with_path((args, kwargs))[0]:
                if leaf is leaves[index]:
                    return self._note(name(keys))
        return "unknown"

    def _note(self, name: str, state: Any = None) -> str:
        self._named.append((name, state))
        return name

    def explain(self, error: Exception, traced_for: str) -> None:
        """Add the fix to JAX's error about a value that is traced, for the arguments and states that it has named."""
        # JAX may have asked for other names before, in errors that the function has caught.
        # Its text ends with "... depends on the value of the argument x", or "... of the arguments x and y".
        prefix, _, names = str(error).rpartition("of the argument")
        named = [
            pair for pair in self._named if not prefix or re.search(rf"[s ,]{re.escape(pair[0])}(?![\w\[])", names)
        ]
        if self.fun is None or not named:
            return
        name, state = next((pair for pair in named if pair[1] is not None), named[0])
        fix = "use jnp.where, statetx.cond or statetx.fori_loop"
        if isinstance(error, jax.errors.TracerArrayConversionError):
            fix = "use jax.numpy (jnp) in place of numpy"
        if state is not None:
            kind, note = kind_of_state(state), ""
            if "jnp.where" in fix:
                note = " A setting that Python reads belongs in a plain attribute, not in a state."
            error.add_note(
                f"{name} is a {type(state).__name__}, made at {kind.site_of(state)}: its value is traced, like an "
                f"argument.\n"
                f"Fix: {fix}.{note}"
            )
        elif traced_for in ("jit", "statetx.remat"):
            transform = traced_for.removeprefix("statetx.")
            static = f"static_argnames={name!r} (or static_argnums=)"
            if not name.isidentifier():  # an item of an argument
                static = "as an argument of its own, by static_argnames="
            if transform == "remat":
                static += ", and compute on it under jax.ensure_compile_time_eval()"
            error.add_note(
                f"{transform}({name_of(self.fun)}) traces its array arguments.\n"
                f"Fix: {fix}; or, to look at {name} in Python, declare it static: {static}."
            )
        else:
            error.add_note(f"Fix: {fix}.")

    def explain_call(self, error: TypeError, traced_for: str, leaves: Sequence[Any]) -> None:
        """Add to Python's error the arguments of the body of a loop, or of a branch, if it does not take them."""
        if traced_for not in _CALLED_WITH or self.fun is None or self.arguments is None:
            return
        args, kwargs = self.arguments(leaves[: self.num_arguments])
        with contextlib.suppress(ValueError):  # of a builtin
            try:
                # Not the function inside of a wrapper, which may call it with other arguments.
                inspect.signature(self.fun, follow_wrapped=False).bind(*args, **kwargs)
            except TypeError:
                error.add_note(f"{name_of(self.fun)} is called with {_CALLED_WITH[traced_for]}.")

    def forget(self) -> None:
        """Drop the references to the function and its arguments: JAX keeps the names of a failed trace alive.

        Their number stays: JAX compares it with the inputs of the jaxpr (`jax_enable_checks`).
        """
        self.num_arguments = len(self)
        self.fun = self.arguments = self.lifting = None
        self._named = []


@dataclasses.dataclass(slots=True, eq=False)
class Input:
    """A state whose value is an input of a staged function.

    Attributes:
        partition: the value's `Partition`; its dynamic leaves are inputs of the trace.
        values: these leaves, in the enclosing context.
        avals: the types of these leaves in the body.
        variables: the positions of these inputs among all inputs added while staging.
    """

    state: Any
    kind: Kind
    partition: Partition
    values: list[Any]
    avals: list[Any]
    variables: range


@dataclasses.dataclass(eq=False)
class Lifting:
    """Turns the value of each state that a staged function reads into inputs of the trace.

    Attributes:
        is_dynamic: whether a leaf of a value becomes an input; other leaves are unchanged.
        slice: maps a state and the type of a leaf to the type in the body, for mapped states.
        enter: maps a state and its value to the value on entry, for promoted states.
        inputs: by id of the state, in the order of the first reads.
    """

    is_dynamic: Callable[[Any], bool]
    slice: Callable[[Any, Any], Any] | None = None
    enter: Callable[[Any, Any], Any] | None = None
    inputs: dict[int, Input] = dataclasses.field(default_factory=dict)
    num_variables: int = 0
    trace: Any = None

    def add(self, state: Any, kind: Kind, part: Partition, values: list[Any], avals: list[Any]) -> None:
        """Make the leaves of a state's value the next inputs."""
        variables = range(self.num_variables, self.num_variables + len(values))
        self.inputs[id(state)] = Input(state, kind, part, values, avals, variables)
        self.num_variables += len(values)

    def _is_input(self, x: Any) -> bool:
        return self.is_dynamic(x) or is_type(x)  # the states of a model from `eval_shape` hold types

    def on_read(self, state: Any, kind: Kind, value: Any) -> Any:
        if self.enter is not None:
            value = self.enter(state, value)
        dynamic, part = partition(value, self._is_input)
        dynamic = [as_array(x) for x in dynamic]
        avals = [_jax.abstract(x) for x in dynamic]
        if self.slice is not None:
            avals = [self.slice(state, aval) for aval in avals]
        self.add(state, kind, part, dynamic, avals)
        inputs = [_jax.new_input(self.trace, aval) for aval in avals]
        if self.slice is None:
            note_shardings(inputs, dynamic)
        return part.combine(inputs)


def read_types(state: Any, kind: Kind, value: Any) -> Any:
    """The value of a state with arrays in place of types: a frame's `on_read` where a function is only traced."""
    types, part = partition(value, is_type)
    return part.combine([_jax.zeros(_jax.abstract(x)) for x in types]) if types else value


# -- staging -----------------------------------------------------------------------------------------------------------


CONVERSIONS = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)
"""JAX's errors for a traced value where Python needs a known one."""


_ended: weakref.WeakSet[Any] = weakref.WeakSet()


def has_ended(trace: Any) -> bool:
    """Whether a trace belonged to a `stage` that has returned, so that its values are gone."""
    return trace in _ended


def _read(state: Any, kind: Kind) -> Any:
    return kind.get(state)


def stage(
    fun: Callable[..., tuple[list, Any]],
    avals: Sequence[Any],
    *,
    traced_for: str,
    names: InputNames,
    lifting: Lifting | None = None,
    read: Callable[[Any, Kind], Any] = _read,
) -> tuple[Body, Any, list[Effect]]:
    """Trace ``fun(*arrays) -> (list of arrays, aux)`` once; return it as a `Body`, with `aux` and the effects on Refs.

    The body's inputs are its operands, one input for each of `avals`, and the inputs of `lifting`, in this order. Refs
    that the function closes over are discharged: their values are operands, or inputs of `lifting` if it is given, and
    the last value of each written Ref is a further output, one for each returned effect. `read` reads a Ref.
    """
    aux = trace = None

    def run(*tracers: Any) -> list[Any]:
        nonlocal aux, trace
        trace = _jax.current_trace()
        if lifting is not None:
            lifting.trace = trace
        try:
            leaves, aux = fun(*tracers)
        except CONVERSIONS as e:
            names.explain(e, traced_for)
            raise
        except TypeError as e:
            names.explain_call(e, traced_for, tracers)
            raise
        finally:
            names.forget()
            _jax.forget_names(trace, traced_for, label)
            if lifting is not None:
                lifting.trace = None
        return leaves

    names.num_arguments, names.lifting = len(avals), lifting
    label = name_of(names.fun)
    jaxpr, consts = _jax.stage(run, avals, traced_for=traced_for, name=label, names=names)
    _ended.add(trace)
    body = Body.close(jaxpr, consts)  # first: a discharge renames the values that nested equations hold
    if _jax.touches_refs(body.jaxpr, body.operands):
        body, effects = _with_explicit_refs(body.jaxpr, body.operands, lifting, read)
        return body, aux, effects
    return body, aux, []


def close_derivative(jaxpr: Any, consts: list[Any]) -> Body:
    """The body of staged equations that may hold derivative rules: a Ref that a rule reads is read now."""
    return with_read_refs(Body.close(jaxpr, consts))  # nested equations may hold the Ref


def with_read_refs(body: Body, read: Callable[[Any, Kind], Any] = _read) -> Body:
    """The body with values, read now by `read`, for the Refs that it closes over; the body itself if it writes one."""
    if not _jax.touches_refs(body.jaxpr, body.operands):
        return body
    explicit, effects = _with_explicit_refs(body.jaxpr, body.operands, None, read)
    return body if effects else explicit


def _with_explicit_refs(
    jaxpr: Any, consts: list[Any], lifting: Lifting | None, read: Callable[[Any, Kind], Any]
) -> tuple[Body, list[Effect]]:
    invars = [*jaxpr.constvars, *jaxpr.invars]
    pure, is_ref, written = _jax.discharge_refs(_jax.rebuild(jaxpr, invars=invars, outvars=jaxpr.outvars))
    is_ref = is_ref[: len(consts)]
    kinds = [_states.kind_of_state(c) if r else None for c, r in zip(consts, is_ref, strict=True)]
    effects = [
        Effect(ref, kind, None, kind.site_of(ref))
        for ref, kind, is_written in zip(consts, kinds, written, strict=False)
        if is_written and kind is not None
    ]
    values = [c if kind is None else read(c, kind) for c, kind in zip(consts, kinds, strict=True)]
    variables = pure.invars
    if lifting is not None:
        # Each Ref gets an input of `lifting`, like a state that is read: move its variable to the end.
        refs = [i for i, r in enumerate(is_ref) if r]
        for i in refs:
            dynamic, part = partition(values[i])
            lifting.add(consts[i], _states.kind_of_state(consts[i]), part, dynamic, [_jax.abstract(values[i])])
        positions = [i for i in range(len(variables)) if i not in set(refs)]
        variables = [variables[i] for i in (*positions, *refs)]
        values = [v for v, r in zip(values, is_ref, strict=True) if not r]
    body = Body.close(_jax.rebuild(pure, invars=variables, outvars=pure.outvars), ())
    return Body(body.jaxpr, [*body.operands, *values]), effects
