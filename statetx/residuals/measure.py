"""`measure`: memory and operations of a compiled program, counted the same way everywhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .. import _jax
from .._equations.compiled import Cost, Program
from .._equations.differentiate import with_pullback
from .._tree import is_float, partition
from ..transforms.functionalize import functionalize


@_jax.api_boundary
def measure(
    fun: Callable[..., Any],
    /,
    *args: Any,
    gradient: bool = True,
    compiler_options: dict[str, Any] | None = None,
    **kwargs: Any,
) -> Cost:
    """Compile a function, with its gradient, and count its memory and operations.

    No array is computed and no state changes. Memory is the memory that XLA reserves for the compiled program; operations
    are counted in its equations, including recomputation, without unused equations.

    Args:
        fun: a function that may read and write states.
        *args, **kwargs: its arguments; ``jax.ShapeDtypeStruct`` may stand for arrays.
        gradient: whether the program also computes the derivative of all float outputs with respect to every float
            argument and every float state. False for a training step, which differentiates inside.
        compiler_options: as in ``jax.jit``.

    Returns:
        `Cost`, with ``temp_bytes``, ``argument_bytes``, ``output_bytes`` and ``peak_bytes`` in bytes, ``flops`` with
        each loop body counted as often as it runs (once for a while loop of unknown length), and ``compiled_flops``,
        XLA's own figure, which counts the body of every loop once. Arguments are the function's arrays and the states
        that it reads; outputs are its own, the states that it writes, and the gradients.

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
    program = with_gradient if gradient else without_gradient
    return Program(*program(fun, args, kwargs), compiler_options).cost


def without_gradient(fun: Callable, args: tuple, kwargs: dict[str, Any]) -> tuple[Callable, list[Any]]:
    """Outputs and values of the written states as a function of arrays, and these arrays."""
    # States are inputs of the measured program, as in a jitted step: as constants they would not count as arguments.
    pure = functionalize(fun)
    arrays, static_part = partition((pure.values(*args, **kwargs), args, kwargs), lambda x: hasattr(x, "dtype"))

    def run(*arrays: Any) -> list[Any]:
        values, args, kwargs = static_part.combine(arrays)
        out, new_values = pure(values, *args, **kwargs)
        return _arrays_in(out, _written(values, new_values))

    return run, arrays


def with_gradient(fun: Callable, args: tuple, kwargs: dict[str, Any]) -> tuple[Callable, list[Any]]:
    """Outputs, values of the written states, and gradients as a function of arrays, and these arrays."""
    pure = functionalize(fun)
    arrays, static_part = partition((pure.values(*args, **kwargs), args, kwargs), lambda x: hasattr(x, "dtype"))

    def run(*arrays: Any) -> tuple[list[Any], list[Any]]:
        values, args, kwargs = static_part.combine(arrays)
        out, new_values = pure(values, *args, **kwargs)
        floats, others = partition(out, is_float)

        # Float outputs get cotangents. The others are returned too, so that XLA does not remove what computes them.
        return floats, _arrays_in(others.static, _written(values, new_values))

    return with_pullback(run, [i for i, x in enumerate(arrays) if is_float(x)]), arrays


def _written(values: dict[str, Any], new_values: dict[str, Any]) -> list[Any]:
    """The new values of the states that a call writes.

    A state that is only read keeps its value, the same object. As an output it would count twice: XLA copies an argument
    that is returned. An array written back unchanged is taken for one that is only read.
    """
    return [value for path, value in new_values.items() if value is not values[path]]


def _arrays_in(*trees: Any) -> list[Any]:
    return partition(trees, lambda x: hasattr(x, "dtype"))[0]
