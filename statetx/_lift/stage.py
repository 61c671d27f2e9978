"""Carry states through a JAX transform.

Every transform runs the function under a frame inside the JAX transform (`call`), returns the values that it wrote as
further outputs (`Outcome`), and stores them in the states after the transform has returned (`Outcome.finish`). Transforms
that need the function as a jaxpr use `stage`, which can make each state that is read an explicit input of the jaxpr.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar, overload

import jax
import jax.numpy as jnp
import numpy as np

from .. import _frames, _jax, _states
from .._atomic import Store, commit
from .._equations.structure import Body
from .._errors import FunctionError
from .._frames import Effect, Frame
from .._objects.opaque import refuse_function, refuse_hidden, refuse_unfinished
from .._objects.paths import Paths, argument_names, reaches_unwatched
from .._states import Kind
from .._text import brief
from .._tree import Partition, as_array, is_array, partition
from .._typing import PyTree
from .context import note_shardings
from .subclass import is_object

# -- output and effects of one call ----------------------------------------------------------------------------


class Outcome:
    """Output and effects of one framed call, without the traced leaves, which cross the JAX transform.

    Attributes:
        effects: the writes of the call, without their values.
        out: the `Partition` of the output.
        values: the `Partition` of each effect's value.
    """

    __slots__ = ("effects", "num_out", "out", "values")

    def __init__(self, out: Partition, effects: list[Effect], values: list[Partition]):
        self.out = out
        self.effects = effects
        self.values = values
        self.num_out = out.num_dynamic

    def finish(self, leaves: Sequence[Any]) -> PyTree:
        """Store the effects' values in their states and return the output; `leaves` as from `pack`."""
        self.publish(leaves[self.num_out :])
        return self.out.combine(leaves[: self.num_out])

    def add(self, effects: list[Effect]) -> Outcome:
        """Add effects of one array each; their leaves follow the present ones."""
        self.effects = [*self.effects, *effects]
        self.values = [*self.values, *(partition(0, lambda x: True)[1] for _ in effects)]
        return self

    def publish(self, leaves: Sequence[Any], *, live: bool = True, also: Sequence[Store] = ()) -> None:
        """Store the effects' values in their states, for `leaves` of the effects only; `also` as in `_frames.publish`."""
        set_values(self.effects, self.values, leaves)
        _frames.publish(self.effects, live=live, also=also)


def set_values(effects: Sequence[Effect], partitions: Sequence[Partition], leaves: Sequence[Any]) -> None:
    """Set the value of each effect; `leaves` are the leaves of all values, in order."""
    position = 0
    for effect, part in zip(effects, partitions, strict=True):
        effect.value = part.combine(leaves[position : position + part.num_dynamic])
        position += part.num_dynamic


def is_traced(x: Any) -> bool:
    """Whether a leaf must cross the transform: a tracer, or another stand-in for an array while tracing."""
    if isinstance(x, (_jax.Tracer, *_jax.LITERALS)):
        return True
    return is_array(x) and not isinstance(x, (jax.Array, np.ndarray, np.generic))


def pack(out: PyTree, effects: list[Effect], is_dynamic: Callable[[Any], bool] = is_traced) -> tuple[list, Outcome]:
    """Split output and effects into the leaves that cross the JAX transform and an `Outcome`, which holds the static parts."""
    leaves, out_part = partition_output(out, is_dynamic)
    values = []
    for effect in effects:
        dynamic, part = partition(effect.value, is_dynamic)
        leaves += dynamic
        values.append(part)
        effect.value = None
    return leaves, Outcome(out_part, effects, values)


def partition_output(out: PyTree, is_dynamic: Callable[[Any], bool] = is_traced) -> tuple[list, Partition]:
    """`partition` the return value of a call, still inside the transform.

    Raises:
        TraceLeakError: an object among the static leaves holds an array of the trace that is about to end.
        FunctionError: the return value is a generator or a coroutine.
    """
    refuse_unfinished(out)  # before JAX warns about an iterator as a leaf
    leaves, part = partition(out, is_dynamic)
    refuse_hidden(part.static)
    return leaves, part


# -- functions as bodies of equations --------------------------------------------------------------------------


class InputNames(Sequence[str]):
    """The names of a trace's inputs in JAX's errors: arguments as the user writes them, states by their paths.

    They are computed only on demand. JAX asks for them in error messages.

    Args:
        fun: the user's function.
        arguments: maps the inputs of the trace to the arguments of `fun`.
    """

    def __init__(self, fun: Callable, arguments: Callable[[Sequence[Any]], tuple[tuple, dict[str, Any]]] | None = None):
        self.fun: Callable | None = fun
        self.arguments = arguments
        self.num_arguments = 0
        self.lifting: Lifting | None = None

    def __str__(self) -> str:
        if self.fun is None:
            return "unknown"
        code = getattr(inspect.unwrap(self.fun), "__code__", None)
        return name_of(self.fun) + (f" at {code.co_filename}:{code.co_firstlineno}" if code else "")

    def __len__(self) -> int:
        return self.num_arguments + (self.lifting.num_variables if self.lifting else 0)

    def __iter__(self) -> Iterator[str]:
        """An empty name for each input: JAX 0.12 iterates to copy the names into a jaxpr, while its errors index one name."""
        return iter(("",) * len(self))

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return tuple(self)[index]
        if self.fun is None:
            return "unknown"
        if index >= self.num_arguments:
            states = self.lifting.inputs.values() if self.lifting else ()
            i = next((i for i in states if index - self.num_arguments in i.variables), None)
            return "unknown" if i is None else Paths(self.fun)(i.state)

        # Rebuild the arguments from unique objects, and find the one at `index`.
        leaves = [object() for _ in range(self.num_arguments)]
        with contextlib.suppress(Exception):  # a user's container may refuse leaves that are not arrays
            args, kwargs = self.arguments(leaves) if self.arguments else ((), {})
            name = argument_names(self.fun, args)
            for keys, leaf in jax.tree_util.tree_flatten_with_path((args, kwargs))[0]:
                if leaf is leaves[index]:
                    return name(keys)
        return "unknown"

    def forget(self) -> None:
        """Drop the references to the function and its arguments: JAX keeps the names of a failed trace alive."""
        self.fun = self.arguments = self.lifting = None


class Input:
    """A state whose value is an input of a staged function.

    Attributes:
        partition: the value's `Partition`; its dynamic leaves are inputs of the trace.
        values: these leaves, in the enclosing context.
        avals: the types of these leaves in the body.
        variables: the positions of these inputs among all inputs added while staging.
    """

    __slots__ = ("avals", "kind", "partition", "state", "values", "variables")

    def __init__(self, state: Any, kind: Kind, partition: Partition, values: list[Any], avals: list[Any], start: int):
        self.state = state
        self.kind = kind
        self.partition = partition
        self.values = values
        self.avals = avals
        self.variables = range(start, start + len(values))


class Lifting:
    """While a function is staged, turn the value of each state that it reads into inputs of the trace.

    Args:
        is_dynamic: whether a leaf of a value becomes an input; other leaves are unchanged.
        slice: maps a state and the type of a leaf to the type in the body, for mapped states.
        enter: maps a state and its value to the value on entry, for promoted states.
    """

    def __init__(
        self,
        is_dynamic: Callable[[Any], bool],
        slice: Callable[[Any, Any], Any] | None = None,
        enter: Callable[[Any, Any], Any] | None = None,
    ):
        self.is_dynamic = is_dynamic
        self.slice = slice
        self.enter = enter
        self.inputs: dict[int, Input] = {}  # by id of the state, in the order of the first reads
        self.num_variables = 0
        self.trace: Any = None

    def on_read(self, state: Any, kind: Kind, value: Any) -> Any:
        if self.enter is not None:
            value = self.enter(state, value)
        dynamic, part = partition(value, self.is_dynamic)
        dynamic = [as_array(x) for x in dynamic]
        avals = [_jax.abstract(x) for x in dynamic]
        if self.slice is not None:
            avals = [self.slice(state, aval) for aval in avals]
        self.inputs[id(state)] = Input(state, kind, part, dynamic, avals, self.num_variables)
        self.num_variables += len(avals)
        inputs = [_jax.new_input(self.trace, aval) for aval in avals]
        if self.slice is None:
            note_shardings(inputs, dynamic)
        return part.combine(inputs)


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

    The body's inputs are its operands, one input for each of `avals`, and the inputs of `lifting`, in this order. Refs that
    the function closes over are discharged: their values are operands, or inputs of `lifting` if it is given, and the last
    value of each written Ref is a further output, one for each returned effect. `read` reads a Ref.
    """
    aux = None

    def run(*tracers: Any) -> list[Any]:
        nonlocal aux
        if lifting is not None:
            lifting.trace = _jax.current_trace()
        try:
            leaves, aux = fun(*tracers)
        finally:
            names.forget()
            if lifting is not None:
                lifting.trace = None
        return leaves

    names.num_arguments, names.lifting = len(avals), lifting
    jaxpr, consts = _jax.stage(run, avals, traced_for=traced_for, name=name_of(names.fun), names=names)
    if _jax.touches_refs(jaxpr, consts):
        body, effects = _with_explicit_refs(jaxpr, consts, lifting, read)
        return body, aux, effects
    return Body.close(jaxpr, consts), aux, []


def call(fun: Callable, args: Sequence[Any], kwargs: dict[str, Any], wants_refs: bool = False) -> PyTree:
    """Run a function under the current frame, for a transform that needs no jaxpr.

    JAX refuses writes of differentiated or mapped values to a `jax.Ref` from outside the transform. If the call can reach
    one, or `wants_refs` is true, the function is staged and its Refs are discharged; the frame gets their last values.
    """
    if not _jax.has_made_refs() or not (wants_refs or reaches_unwatched(fun, args, kwargs)):
        out = fun(*args, **kwargs)
        refuse_unfinished(out)
        return out
    frame = _frames.current_frame()
    assert frame is not None

    def body() -> tuple[list, Any]:
        inner = Frame(frame.name)
        return pack(inner.run(fun, *args, **kwargs), inner.effects)

    def read(ref: Any, kind: Kind) -> Any:
        value = kind.get(ref) if _jax.is_of_current_trace(ref) else _read_outside(ref, kind, frame)
        return value if frame.on_read is None else frame.on_read(ref, kind, value)

    transform = frame.name.partition("(")[0]
    staged, outcome, refs = stage(body, (), traced_for=f"statetx.{transform}", names=InputNames(fun), read=read)
    outs = [x if isinstance(x, jax.Array) else jnp.asarray(x) for x in staged(staged.operands)]

    for effect in reversed(refs):  # their values are the last outputs
        effect.value = outs.pop()
        if _jax.is_of_current_trace(effect.state):
            _frames.publish([effect], live=True)  # a mapped argument: a Ref of this trace, which JAX lets us write
        else:
            frame.add_effect(effect)
    return outcome.finish(outs)


def _read_outside(ref: Any, kind: Kind, frame: Frame) -> Any:
    """Read a Ref of the enclosing trace in that trace: inside a shard_map it cannot be read."""
    with _jax.in_parent_trace(frame.trace) if frame.outer_trace is None else _jax.in_trace(frame.outer_trace):
        return kind.get(ref)


def run_eagerly(name: str, fun: Callable[..., T], args: Sequence[Any], kwargs: dict[str, Any], allow: Any = None) -> T:
    """Run a function eagerly, and undo its writes if it fails; `allow` as in `Frame`."""
    frame = frame_for(name, fun, allow=allow, is_undo=True)
    states = Paths(fun, args, kwargs).items().values() if _jax.has_made_refs() else ()
    unwatched = [(state, _states.kind_of_state(state)) for state in states if _states.is_unwatched(state)]
    saved = [(state, kind, kind.get(state)) for state, kind in unwatched]  # frames do not see their writes: save all
    try:
        out = frame.run(fun, *args, **kwargs)
        _frames.publish(frame.effects, live=True, also=[(saved.clear,)])
        return out
    except BaseException:
        commit([kind.store(state, value) for state, kind, value in saved])
        raise


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
            aval = _jax.abstract(values[i])
            kind = _states.kind_of_state(consts[i])
            lifting.inputs[id(consts[i])] = Input(consts[i], kind, part, dynamic, [aval], lifting.num_variables)
            lifting.num_variables += 1
        others = [i for i in range(len(variables)) if i not in set(refs)]
        variables = [variables[i] for i in (*others, *refs)]
        values = [v for v, r in zip(values, is_ref, strict=True) if not r]
    body = Body.close(_jax.rebuild(pure, invars=variables, outvars=pure.outvars), ())
    return Body(body.jaxpr, [*body.operands, *values]), effects


# -- callables -------------------------------------------------------------------------------------------------


P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R")
S = TypeVar("S")
T = TypeVar("T")


class Wrapper(Generic[P, R]):
    """Base class of the callables that transforms return; each wraps a function or a callable object.

    It has the function's name, docstring and signature, binds to instances like a function, and is pickled by reference if
    a module variable or class attribute holds it, else by its parts. Attributes that it lacks are read from the wrapped
    function; if a callable object is wrapped, they are also written to the object.
    """

    __qualname__: str
    _object: Any = None  # the wrapped callable object; set after `__init__`, whose attributes are the wrapper's

    def __init__(self, fun: Callable, options: dict[str, Any]):
        functools.update_wrapper(self, fun, updated=())
        self.__wrapped__ = fun
        self._options = options

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # a protocol: Python must not find it on the wrapper because the function has it
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.__wrapped__, name)

    def __setattr__(self, name: str, value: Any) -> None:
        is_own = self._object is None or name in vars(self) or hasattr(type(self), name)
        object.__setattr__(self, name, value) if is_own else setattr(self._object, name, value)

    def __delattr__(self, name: str) -> None:
        is_own = self._object is None or name in vars(self)
        object.__delattr__(self, name) if is_own else delattr(self._object, name)

    @property
    def __isabstractmethod__(self) -> bool:
        return getattr(self.__wrapped__, "__isabstractmethod__", False)

    @overload
    def __get__(self, instance: None, owner: type | None = None) -> Self: ...
    @overload
    def __get__(self: Wrapper[Concatenate[S, Q], R], instance: S, owner: type | None = None) -> Callable[Q, R]: ...
    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __reduce__(self) -> Any:
        if _find_global(self) is self:
            return self.__qualname__
        return _rebuild, (type(self), self.__wrapped__, self._options)

    def __repr__(self) -> str:
        public = getattr(sys.modules["statetx"], self._made_by(), None)
        defaults = {} if public is None else inspect.signature(public).parameters
        texts = {k: brief(v) for k, v in self._options.items() if k in defaults}
        options = "".join(f", {k}={text}" for k, text in texts.items() if text != brief(defaults[k].default))
        return f"statetx.{self._made_by()}({name_of(self.__wrapped__)}{options})"

    def _made_by(self) -> str:
        """The public function that made this wrapper."""
        return _public_name(type(self))


def _public_name(cls: type[Wrapper]) -> str:
    """The public function that makes wrappers of a class: ``value_and_grad`` for `ValueAndGrad`."""
    return re.sub("(?<=[a-z])(?=[A-Z])", "_", cls.__name__).lower()


def _rebuild(cls: type[Wrapper], fun: Callable, options: dict[str, Any]) -> Wrapper:
    return as_decorator(cls, fun, options)


def _find_global(wrapper: Wrapper) -> Any:
    value: Any = sys.modules.get(getattr(wrapper, "__module__", None) or "")
    for name in getattr(wrapper, "__qualname__", "<none>").split("."):
        value = getattr(value, name, None)
    return value


def _is_call_of_object(fun: Any) -> bool:
    return isinstance(fun, types.MethodType) and getattr(fun.__func__, "__name__", "") == "__call__"


def name_of(fun: Any) -> str:
    """A short name for messages and traces; for the call of an object, the name of its class."""
    if _is_call_of_object(fun):
        return type(fun.__self__).__name__
    while isinstance(fun, functools.partial) or (isinstance(fun, Wrapper) and not hasattr(fun, "__qualname__")):
        fun = fun.func if isinstance(fun, functools.partial) else fun.__wrapped__
    return getattr(fun, "__qualname__", None) or getattr(fun, "__name__", None) or type(fun).__name__


def short_name(name: str) -> str:
    """A function's qualified name without the enclosing functions."""
    return name.rpartition("<locals>.")[2]


def as_decorator(cls: type[Wrapper], fun: Any, options: dict[str, Any]) -> Any:
    """``cls(fun, **options)``, or a decorator if `fun` is None; a descriptor stays a descriptor of the same type."""
    decorate = functools.partial(as_decorator, cls, options=options)
    if fun is None:
        return decorate
    if isinstance(fun, (staticmethod, classmethod)):
        return type(fun)(decorate(fun.__func__))
    if isinstance(fun, property) and fun.fget is not None:
        return fun.getter(decorate(fun.fget))
    if isinstance(fun, functools.cached_property):
        return functools.cached_property(decorate(fun.func))
    if isinstance(fun, functools.partialmethod):
        return functools.partialmethod(decorate(fun.func), *fun.args, **fun.keywords)
    name = _public_name(cls)
    if not callable(fun):
        raise _refusal(name, fun)
    refuse_function(fun, name, name_of(fun))
    wrapper = cls(fun, **options)
    if is_object(fun):
        wrapper._object = fun
    return wrapper


def _refusal(transform: str, fun: Any) -> FunctionError:
    type_name = type(fun).__name__
    if not hasattr(type(fun), "__get__"):
        return FunctionError(f"{transform} needs a callable, got {type_name}: {fun!r}.")
    return FunctionError(
        f"{transform} needs a callable, and cannot be above @{type_name}, which chooses a function when it is looked up.\n"
        f"Fix: put @statetx.{transform} below @{type_name}, and below each decorator that registers a function with it."
    )


def frame_for(name: str, fun: Callable, **hooks: Any) -> Frame:
    return Frame(f"{name}({name_of(fun)})", **hooks)
