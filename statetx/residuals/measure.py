"""`measure`: memory and operations of a compiled program, counted the same way everywhere."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from .. import _jax, _states
from .._equations.compiled import Cost, Program, donated_inputs
from .._equations.differentiate import with_pullback
from .._frames import Effect
from .._lift.options import notes_shapes
from .._lift.wrapper import refuse_value
from .._objects.walk import created_undone
from .._remat.gradients import rewritten_by
from .._remat.rewriter import MARKER, is_step_by_marks, marks_in
from .._targets import current
from .._tree import is_array_or_type, is_float, partition
from ..transforms.abstract import staged_jaxpr
from ..transforms.functionalize import Functionalize, values_of


@_jax.api_boundary
@notes_shapes
@current.takes_target
def measure(
    fun: Callable[..., Any],
    /,
    *args: Any,
    gradient: bool | None = None,
    compiler_options: dict[str, Any] | None = None,
    **kwargs: Any,
) -> Cost:
    """Compile a training step, or a loss with its gradient, and count its memory and operations.

    No array is computed and no state changes. Memory is the memory that XLA reserves for the compiled program;
    operations are counted in its equations, including recomputation, without unused equations.

    Args:
        fun: a function that may read and write states. With ``gradient=False`` the arguments that a jitted one donates
            count once, as in the budgets of `plan`.
        *args, **kwargs: its arguments; ``jax.ShapeDtypeStruct`` may stand for arrays.
        gradient: whether the program also computes the derivative of all float outputs with respect to every float
            argument and every float state. By default it does, unless the function is a training step, which takes
            gradients itself (as in `plan`).
        compiler_options: as in ``jax.jit``.

    Returns:
        `Cost`, with ``temp_bytes``, ``argument_bytes``, ``output_bytes`` and ``peak_bytes`` in bytes, ``flops`` with
        each loop body counted as often as it runs (once for a while loop of unknown length), and ``compiled_flops``,
        XLA's own figure, which counts the body of every loop once; on a GPU or TPU, or for one as target, also
        ``seconds``, XLA's estimate of the time. Arguments are the function's arrays and the states
        that it reads; outputs are its own, the states that it writes or creates, and the gradients.

    Source:
        ``jax.stages.Compiled.memory_analysis`` and ``cost_analysis``.

    Example:
        >>> import jax.numpy as jnp, statetx
        >>> def loss(w, x):
        ...     return statetx.scan(lambda h, _: (jnp.tanh(w @ h), None), x, length=100)[0].sum()
        >>> cost = statetx.measure(loss, jnp.eye(64), jnp.ones(64), gradient=False)
        >>> cost.flops == 100 * (2 * 64 * 64 + 64) + 64
        True
    """
    refuse_value("measure", fun)
    program, _ = inspected(fun, args, kwargs, gradient)
    return program.for_types(program.arrays, compiler_options, estimates=True).cost


def is_step(fun: Callable, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether a function is a training step, which takes gradients itself."""
    closed, num_out = staged_with_marks("measure", fun, args, kwargs)
    return is_step_by_marks(marks_in(closed.jaxpr), [v.aval for v in closed.jaxpr.outvars[:num_out]])


def staged_with_marks(name: str, fun: Callable, args: tuple, kwargs: dict[str, Any]) -> tuple[Any, int]:
    """The jaxpr of a call, in which the functions that it differentiates are marked. Its first results, of this number,
    are the float outputs.
    """
    num_out = 0

    @functools.wraps(fun)
    def floats(*args: Any, **kwargs: Any) -> list[Any]:
        nonlocal num_out
        with rewritten_by(MARKER):
            outs = [x for x in jax.tree.leaves(fun(*args, **kwargs)) if is_float(x)]
        num_out = len(outs)
        return outs

    return staged_jaxpr(name, floats, args, kwargs), num_out


class ArrayProgram(NamedTuple):
    """A stateful function and its arguments, as a function of arrays and these arrays.

    States are inputs of a measured program, as in a jitted step: as constants they would not count as arguments.

    Attributes:
        keys: of each array, its key path in ``(values of states by path, args, kwargs)``.
        donates: whether the arguments that a jitted function donates are donated by the program.
    """

    run: Callable
    arrays: list[Any]
    keys: list[tuple[Any, ...]]
    donates: bool

    def for_types(
        self, types: Sequence[Any], compiler_options: dict[str, Any] | None, *, estimates: bool = False
    ) -> Program:
        """The program for arrays of these types, to be compiled; `estimates` as in `Program`."""
        return Program(self.run, types, compiler_options, self.donated(types), estimates=estimates)

    def donated(self, types: Sequence[Any]) -> tuple[int, ...]:
        """Positions of the arrays whose memory the outputs may take. JAX caches the trace."""
        return donated_inputs(jax.make_jaxpr(self.run)(*types).jaxpr) if self.donates else ()


def inspected(fun: Callable, args: tuple, kwargs: dict[str, Any], gradient: bool | None) -> tuple[ArrayProgram, bool]:
    """The program of a call, with its gradient unless the function is a training step, and whether it has one.

    One trace finds the states, and whether the function takes gradients itself.
    """
    pure = Functionalize(fun, takes_refs=True)
    with rewritten_by(MARKER):
        states, jaxpr = pure.traced(args, kwargs)
    if gradient is None:
        floats = [v.aval for v in jaxpr.outvars if is_float(v.aval)]
        gradient = not is_step_by_marks(marks_in(jaxpr), floats)
    inputs = values_of(states), args, kwargs
    return (_with_gradient if gradient else _without_gradient)(pure, inputs), gradient


def without_gradient(fun: Callable, args: tuple, kwargs: dict[str, Any]) -> ArrayProgram:
    """A program that returns the outputs, and the values of the states that are written or created."""
    return _without_gradient(*_functionalized(fun, args, kwargs))


def _without_gradient(pure: Functionalize, inputs: tuple) -> ArrayProgram:
    fun = pure.__wrapped__
    arrays, static_part = partition(inputs, is_array_or_type)

    def run(*arrays: Any) -> list[Any]:
        values, args, kwargs = static_part.combine(arrays)
        with created_undone(fun, static_part.static):
            out, new_values, created = pure.call_with_created(values, args, kwargs)
        return _arrays_in(out, _written(values, new_values, created))

    return ArrayProgram(run, arrays, _keys(inputs), donates=True)


def with_gradient(fun: Callable, args: tuple, kwargs: dict[str, Any], fixed: Sequence[bool] = ()) -> ArrayProgram:
    """A program that returns the float outputs; other outputs with the values of states, as in `without_gradient`; the
    gradients.

    Args:
        fixed: which arrays among the arguments are not differentiated.
    """
    return _with_gradient(*_functionalized(fun, args, kwargs), fixed)


def _with_gradient(pure: Functionalize, inputs: tuple, fixed: Sequence[bool] = ()) -> ArrayProgram:
    fun = pure.__wrapped__
    arrays, static_part = partition(inputs, is_array_or_type)

    def run(*arrays: Any) -> tuple[list[Any], list[Any]]:
        values, args, kwargs = static_part.combine(arrays)
        with created_undone(fun, static_part.static):
            out, new_values, created = pure.call_with_created(values, args, kwargs)
        floats, others = partition(out, is_float)

        # Float outputs get cotangents. The others are returned too, so that XLA does not remove what computes them.
        return floats, _arrays_in(others.static, _written(values, new_values, created))

    is_fixed = [*[False] * (len(arrays) - len(fixed)), *fixed]  # the values of states come first
    step = with_pullback(run, [i for i, x in enumerate(arrays) if is_float(x) and not is_fixed[i]])
    # A gradient reads its inputs after the call that would donate them.
    return ArrayProgram(step, arrays, _keys(inputs), donates=False)


def _functionalized(fun: Callable, args: tuple, kwargs: dict[str, Any]) -> tuple[Functionalize, tuple]:
    pure = Functionalize(fun, takes_refs=True)
    return pure, (pure.values(*args, **kwargs), args, kwargs)


def _keys(inputs: tuple) -> list[tuple[Any, ...]]:
    leaves = jax.tree_util.tree_flatten_with_path(inputs, is_leaf=_states.is_opaque)[0]
    return [keys for keys, x in leaves if is_array_or_type(x)]


def _written(values: dict[str, Any], new_values: dict[str, Any], created: Sequence[Effect]) -> list[Any]:
    """The new values of the states that a call writes, and those of the states that it creates.

    A state that is only read keeps its value, the same object. As an output it would count twice: XLA copies an
    argument that is returned. An array written back unchanged is taken for one that is only read.
    """
    written = [value for path, value in new_values.items() if value is not values[path]]
    return [*written, *(effect.value for effect in created)]


def _arrays_in(*trees: Any) -> list[Any]:
    return partition(trees, is_array_or_type)[0]
