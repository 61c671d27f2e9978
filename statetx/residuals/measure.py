"""`measure`: memory and operations of a compiled program, counted the same way everywhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, overload

from .. import _jax
from .._equations.compiled import Cost, Program, donated_inputs
from .._equations.differentiate import with_pullback
from .._lift.options import notes_shapes
from .._lift.wrapper import check_callable
from .._targets import current
from .._targets.target import Target
from .._tree import is_float
from ._trace import TracedCall

P = ParamSpec("P")


@overload
def measure(fun: Callable[P, Any], /, *args: P.args, **kwargs: P.kwargs) -> Cost: ...
@overload
def measure(fun: Callable[..., Any], /, *args: Any, gradient: bool | None, **kwargs: Any) -> Cost: ...
@overload
def measure(fun: Callable[..., Any], /, *args: Any, compiler_options: dict[str, Any] | None, **kwargs: Any) -> Cost: ...
@overload
def measure(fun: Callable[..., Any], /, *args: Any, target: Target | str, **kwargs: Any) -> Cost: ...
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
    check_callable("measure", fun)
    program = array_program("measure", fun, args, kwargs, gradient)
    return program.for_types(program.arrays, compiler_options, estimates=True).cost


class ArrayProgram:
    """A traced call as a function of arrays, to be compiled.

    States are inputs of a measured program, as in a jitted step: as constants they would not count as arguments.

    Args:
        gradient: whether it returns the float outputs, then the others with the values of states, then the gradients of
            the float outputs with respect to the float inputs; else one list of outputs and values of states.
        fixed: which arrays of the arguments are not differentiated.
        retraces: whether the user's Python runs again, for a rewriter of what it differentiates.

    Attributes:
        inputs: the states by path, then the arguments; `arrays` and `names` are theirs, `states` the names of states.
        donated: the numbers of the arrays whose memory the outputs may take: those that a jitted function donates. A
            gradient reads its inputs after the call that would donate them.
    """

    def __init__(self, call: TracedCall, gradient: bool, fixed: Sequence[bool] = (), *, retraces: bool = False):
        self._call, self._retraces = call, retraces
        states = [i for i in call.inputs if i.state is not None]
        arguments = call.inputs[: len(call.inputs) - len(states)]
        self.inputs = [*sorted(states, key=lambda i: i.origin.path), *arguments]
        self.arrays = [i.array for i in self.inputs]
        self.names = [i.origin.path for i in self.inputs]
        self.states = self.names[: len(states)]
        is_fixed = [*[False] * (len(self.inputs) - len(fixed)), *fixed]
        self.diff_indices = [i for i, x in enumerate(self.arrays) if is_float(_jax.abstract(x)) and not is_fixed[i]]
        self.run = with_pullback(self._split_outputs, self.diff_indices) if gradient else self._outputs
        number = {id(i): n for n, i in enumerate(self.inputs)}
        donated = () if gradient else donated_inputs(call.body.jaxpr)
        first = call.body.num_operands
        self.donated = tuple(sorted(number[id(call.inputs[i - first])] for i in donated if i >= first))

    def _results(self, arrays: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        given = {id(i): x for i, x in zip(self.inputs, arrays, strict=True)}
        in_order = [given[id(i)] for i in self._call.inputs]
        types = [v.aval for v in self._call.body.jaxpr.invars[self._call.body.num_operands :]]
        is_same = not self._retraces and [_jax.abstract(x) for x in in_order] == types
        return self._call(in_order) if is_same else self._call.retraced(in_order)

    def _outputs(self, *arrays: Any) -> list[Any]:
        outs, written = self._results(arrays)
        return [*outs, *written]

    def _split_outputs(self, *arrays: Any) -> tuple[list[Any], list[Any]]:
        # Float outputs get cotangents. The others are returned too, so that XLA does not remove what computes them.
        outs, written = self._results(arrays)
        return [x for x in outs if is_float(x)], [*(x for x in outs if not is_float(x)), *written]

    def for_types(
        self, types: Sequence[Any], compiler_options: dict[str, Any] | None, *, estimates: bool = False
    ) -> Program:
        """The program for arrays of these types, to be compiled; `estimates` as in `Program`."""
        return Program(self.run, types, compiler_options, self.donated, estimates=estimates)


def array_program(
    name: str,
    fun: Callable,
    args: tuple,
    kwargs: dict[str, Any],
    gradient: bool | None = None,
    fixed: Sequence[bool] = (),
) -> ArrayProgram:
    """The program of a call; by default with its gradient unless it is a training step. One trace finds the states, and
    whether the function takes gradients itself.
    """
    call = TracedCall(name, fun, args, kwargs)
    return ArrayProgram(call, not call.is_step if gradient is None else gradient, fixed)
