"""A stateful function without running it: `eval_shape` for its types, `make_jaxpr` for its equations."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from .. import _jax, _states
from .._lift.context import note_shardings
from .._lift.options import notes_shapes, with_checked_options
from .._lift.outcome import Outcome, pack
from .._lift.run import frame_for
from .._lift.signature import StaticArguments
from .._lift.stage import InputNames, read_types, stage
from .._lift.staged import Staged
from .._lift.wrapper import check_callable, name_of
from .._objects.walk import created_undone, inspecting
from .._tree import as_array, is_argument, is_array_or_number, is_array_or_type, partition
from .._typing import Indices, PyTree


@_jax.api_boundary
@notes_shapes
def eval_shape(fun: Callable[..., PyTree], /, *args: Any, **kwargs: Any) -> PyTree:
    """Compute the output types of a function that may read and write states; no state changes.

    Args:
        fun: the function.
        *args, **kwargs: its arguments. A ``jax.ShapeDtypeStruct``, or any object with a ``shape`` and a ``dtype`` that
            is not a state, may replace an array.

    Returns:
        The output with a ``jax.ShapeDtypeStruct`` for each array; other objects are returned unchanged.

    State:
        States that the function creates and that outlive the call (the parameters of a model, for example) hold
        ``jax.ShapeDtypeStruct`` too.

    Source:
        ``jax.eval_shape``.

    Example:
        >>> import jax.numpy as jnp, statetx
        >>> n = statetx.State(jnp.zeros(3))
        >>> def f(x):
        ...     n.value += x
        ...     return n.value
        >>> statetx.eval_shape(f, 1.0)
        ShapeDtypeStruct(shape=(3,), dtype=float32)
        >>> n.value
        Array([0., 0., 0.], dtype=float32)
        >>> statetx.eval_shape(lambda: [statetx.Param(jnp.ones((2, 3)))])[0].value
        ShapeDtypeStruct(shape=(2, 3), dtype=float32)
    """
    check_callable("eval_shape", fun)
    arrays, args_part = partition((args, kwargs), _is_typed)
    outcome: Outcome | None = None
    names = InputNames(fun, args_part.combine)

    def body(*tracers: Any) -> tuple[list, Outcome]:
        call_args, call_kwargs = args_part.combine(tracers)
        frame = frame_for("eval_shape", fun, on_read=read_types)
        out = frame.run(fun, *call_args, **call_kwargs)
        return pack(out, [e for e in frame.effects if e.created], is_array_or_number)

    def run(*tracers: Any) -> list:
        nonlocal outcome
        avals = [_jax.abstract(x) for x in tracers]
        staged, outcome, _ = stage(body, avals, traced_for="statetx.eval_shape", names=names)
        return staged(staged.operands, *tracers)

    with inspecting():
        shapes = jax.eval_shape(run, *arrays)
    assert outcome is not None
    return outcome.finish(shapes)


def _is_typed(x: Any) -> bool:
    has_type = hasattr(x, "shape") and hasattr(x, "dtype")
    return is_array_or_number(x) or (has_type and not isinstance(x, type) and not _states.is_opaque(x))


@with_checked_options()
def make_jaxpr(
    fun: Callable[..., PyTree], static_argnums: Indices = (), *, return_shape: bool = False
) -> Callable[..., Any]:
    """Make a function that returns the jaxpr of a function that may read and write states.

    Args:
        fun: the function. Arguments other than arrays, numbers and ``jax.ShapeDtypeStruct`` pass untouched.
        static_argnums: positions of further arguments that pass untouched, as in `jit`.
        return_shape: whether to return the pair of the jaxpr and the output types, as from `eval_shape`.

    Returns:
        A function of the same arguments that returns a ``jax.extend.core.ClosedJaxpr``. Its inputs are the values of
        the states that the call touches, in the order of ``statetx.functionalize(fun).values(*args)``, then the
        arguments; its outputs are the outputs of `fun`, then the new values of these states in the same order. A
        ``jax.Ref`` counts as a state here; Refs are the last of the states. The function's Python runs once, and no
        state changes.

    Source:
        ``jax.make_jaxpr``.

    Example:
        >>> import jax.numpy as jnp, statetx
        >>> n = statetx.State(jnp.zeros(()))
        >>> def f(x):
        ...     n.value += x
        ...     return 2 * n.value
        >>> len(statetx.make_jaxpr(f)(jnp.ones(())).eqns)
        2
    """

    check_callable("make_jaxpr", fun, "a callable", "write make_jaxpr(f)(x) in place of make_jaxpr(f(x))")
    static = StaticArguments(fun, static_argnums, ())

    @functools.wraps(fun, assigned=("__doc__",), updated=())
    def jaxpr_of(*args: Any, **kwargs: Any) -> Any:
        dyn_args, dyn_kwargs, merge = static.split(args, kwargs)
        arrays, args_part = partition((dyn_args, dyn_kwargs), is_argument)

        def arguments(leaves: Sequence[Any]) -> tuple[tuple, dict[str, Any]]:
            return merge(*args_part.combine(leaves))

        with created_undone(fun, args, kwargs):
            staged = _stage("make_jaxpr", arguments, arrays, fun)
        closed = _close(staged)
        if not return_shape:
            return closed

        return closed, staged.outs[0].combine([*map(_type_of, staged.out_avals)])

    jaxpr_of.__name__ = jaxpr_of.__qualname__ = f"make_jaxpr({name_of(fun)})"
    return jaxpr_of


def _type_of(aval: Any) -> jax.ShapeDtypeStruct:
    kinds = aval.sharding.mesh.axis_types
    is_known = kinds and jax.sharding.AxisType.Auto not in kinds
    return jax.ShapeDtypeStruct(
        aval.shape, aval.dtype, sharding=aval.sharding if is_known else None, weak_type=aval.weak_type
    )


def staged_jaxpr(name: str, fun: Callable[..., PyTree], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The jaxpr of a call as from `make_jaxpr`, for a function of this name that only inspects it.

    Numbers stay numbers: a field of an equinox model may be a shape. The call may create states. The values of those
    that outlive it are the last outputs.
    """
    arrays, args_part = partition((tuple(args), kwargs), is_array_or_type)
    with created_undone(fun, args_part.static):
        return _close(_stage(name, args_part.combine, arrays, fun, may_create=True))


def _stage(
    name: str,
    arguments: Callable[[Sequence[Any]], tuple[tuple, dict[str, Any]]],
    arrays: Sequence[Any],
    fun: Callable,
    may_create: bool = False,
) -> Staged:
    def call(*tracers: Any) -> tuple[PyTree]:
        note_shardings(tracers, arrays)
        args, kwargs = arguments(tracers)
        return (fun(*args, **kwargs),)

    avals = [_jax.abstract(as_array(x)) for x in arrays]
    return Staged(name, fun, avals, arguments=arguments, call=call, may_create=may_create)


def _close(staged: Staged) -> Any:
    """The closed jaxpr, whose first inputs are the values of the states."""
    states = staged.inputs.values()
    created = [v for e in staged.effects if e.created for v in staged.written_vars[id(e.state)]]
    return staged.close([*states, *staged.arg_vars], [*staged.out_vars, *states, *created])
