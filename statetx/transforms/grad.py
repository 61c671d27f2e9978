"""Gradients by arguments or states: `grad`, `value_and_grad`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Concatenate,
    Literal,
    Never,
    ParamSpec,
    Protocol,
    TypedDict,
    TypeVar,
    Unpack,
    overload,
)

import jax
import jax.numpy as jnp

from .. import _states
from .._errors import FunctionError, StateAccessError
from .._lift.differentiated import (
    DifferentiatedStates,
    parse_argnums,
    refuse_arguments,
    refuse_types,
    resolve_argnums,
)
from .._lift.options import transform
from .._lift.run import FramedRun
from .._lift.wrapper import Wrapper, name_of
from .._positions import replaced
from .._text import brief, short_tree_type_str, tree_type_str, type_str
from .._tree import is_array_or_number
from .._typing import Argnums, Filter, PyTree

if TYPE_CHECKING:
    from ..kinds.native import State

P = ParamSpec("P")
R = TypeVar("R")
A = TypeVar("A")
G = TypeVar("G")
# Without this bound, pyright takes the parameter of a lambda for an object without attributes.
X = TypeVar("X", bound=Any)
G_co = TypeVar("G_co", covariant=True)
L = TypeVar("L", bound=jax.typing.ArrayLike)
First = Literal[0] | None


class Gradient(Protocol[P, G_co]):
    """The type of ``grad(fun)`` and of ``value_and_grad(fun)``: gradients are as the first argument, with arrays for
    numbers.

    Only Any, the type of an argument without annotation, is a Never.
    """

    @overload
    def __call__(self: Gradient[P, Never], *args: P.args, **kwargs: P.kwargs) -> Any: ...
    @overload
    def __call__(self: Gradient[P, tuple[R, Never]], *args: P.args, **kwargs: P.kwargs) -> tuple[R, Any]: ...
    @overload
    def __call__(self: Gradient[P, L], *args: P.args, **kwargs: P.kwargs) -> jax.Array: ...
    @overload
    def __call__(self: Gradient[P, tuple[R, L]], *args: P.args, **kwargs: P.kwargs) -> tuple[R, jax.Array]: ...
    @overload
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> G_co: ...


_HINTS = {
    "return_value": "statetx.value_and_grad(fun, ...) returns (value, gradients)",
    "grad_states": "give the states by wrt=",
    "check_states": "leave it out, a state that the function does not use has a gradient of zeros",
    "unit_aware": "differentiate the magnitude of a loss with a unit",
}


class GradOptions(TypedDict, total=False):
    """The options of `grad` and `value_and_grad` that say nothing of types."""

    holomorphic: bool
    allow_int: bool


class ValueOptions(GradOptions, total=False):
    """`GradOptions` with `has_aux`: the auxiliary data of `value_and_grad` is a part of its value."""

    has_aux: bool


@overload
def grad(
    fun: Callable[P, tuple[Any, A]],
    argnums: Argnums = None,
    *,
    wrt: PyTree | Filter = None,
    has_aux: Literal[True],
    **options: Unpack[GradOptions],
) -> Callable[P, tuple[Any, A]]: ...
@overload
def grad(
    fun: Callable[Concatenate[X, P], Any], argnums: First = None, *, wrt: None = None, **options: Unpack[GradOptions]
) -> Gradient[Concatenate[X, P], X]: ...
@overload
def grad(fun: Callable[P, Any], *, wrt: State[G], **options: Unpack[GradOptions]) -> Callable[P, G]: ...
@overload
def grad(
    fun: Callable[P, Any], *, wrt: Mapping[str, State[G]] | type[State[G]], **options: Unpack[GradOptions]
) -> Callable[P, dict[str, G]]: ...
@overload
def grad(
    fun: Callable[P, Any],
    argnums: Argnums = None,
    *,
    wrt: PyTree | Filter = None,
    has_aux: Literal[False] = False,
    **options: Unpack[GradOptions],
) -> Callable[P, Any]: ...
@overload
def grad(*, wrt: State[G], **options: Unpack[GradOptions]) -> Callable[[Callable[P, Any]], Callable[P, G]]: ...
@overload
def grad(
    *, wrt: Mapping[str, State[G]] | type[State[G]], **options: Unpack[GradOptions]
) -> Callable[[Callable[P, Any]], Callable[P, dict[str, G]]]: ...
@overload
def grad(
    fun: None = None, argnums: Argnums = None, *, wrt: PyTree | Filter = None, **options: Unpack[ValueOptions]
) -> Callable[[Callable[P, Any]], Callable[P, Any]]: ...
@transform(_HINTS)
def grad(
    fun: Callable[..., Any] | None = None,
    argnums: Argnums = None,
    *,
    wrt: PyTree | Filter = None,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
) -> Callable[..., Any]:
    """Differentiate a function that may read and write states.

    As ``jax.grad``, and also with respect to states. Each written state is written once, with its value from the
    forward pass. Gradients with respect to a state are taken at its value when the call begins.

    Args:
        fun: returns a scalar, or with `has_aux` a scalar and auxiliary data.
        argnums: positions of the arguments to differentiate. By default 0 without `wrt`, and none with `wrt`.
        wrt: the states to differentiate: a state, a list or dict of states (``statetx.states(model, Param)``), or a
            filter. A filter selects among the states that the function and its arguments hold and the others that the
            call reads; the gradients are a dict by path. For a dict of brainstate (``net.states()``) they are a plain
            dict.
        has_aux: whether `fun` returns a pair whose second item is passed through.
        holomorphic: as in ``jax.grad``.
        allow_int: as in ``jax.grad``.

    Returns:
        A function of the same arguments. It returns the gradients: in the structure of `wrt`, with the structure of its
        value for each state; in the structure of `argnums`; or the pair of both. With `has_aux` it returns
        ``(gradients, aux)``. Dicts have sorted keys, as always in JAX: look gradients up by path.

    Raises:
        StateFilterError: `wrt` selects no state, or a state that the call reads and that has no path from the function.
        StateValueError: a state's value cannot be differentiated.

    Source:
        ``jax.grad``.

    Example:
        >>> import jax.numpy as jnp, statetx
        >>> w, seen = statetx.Param(jnp.array([1.0, 2.0])), statetx.State(0)
        >>> def loss(x):
        ...     seen.value += 1
        ...     return (w.value * x).sum()
        >>> statetx.grad(loss, wrt={"w": w})(3.0)
        {'w': Array([3., 3.], dtype=float32)}
        >>> seen.value
        1
    """
    ...


@overload
def value_and_grad(
    fun: Callable[Concatenate[X, P], R], argnums: First = None, *, wrt: None = None, **options: Unpack[ValueOptions]
) -> Gradient[Concatenate[X, P], tuple[R, X]]: ...
@overload
def value_and_grad(
    fun: Callable[P, R], *, wrt: State[G], **options: Unpack[ValueOptions]
) -> Callable[P, tuple[R, G]]: ...
@overload
def value_and_grad(
    fun: Callable[P, R], *, wrt: Mapping[str, State[G]] | type[State[G]], **options: Unpack[ValueOptions]
) -> Callable[P, tuple[R, dict[str, G]]]: ...
@overload
def value_and_grad(
    fun: Callable[P, R], argnums: Argnums = None, *, wrt: PyTree | Filter = None, **options: Unpack[ValueOptions]
) -> Callable[P, tuple[R, Any]]: ...
@overload
def value_and_grad(
    *, wrt: State[G], **options: Unpack[ValueOptions]
) -> Callable[[Callable[P, R]], Callable[P, tuple[R, G]]]: ...
@overload
def value_and_grad(
    *, wrt: Mapping[str, State[G]] | type[State[G]], **options: Unpack[ValueOptions]
) -> Callable[[Callable[P, R]], Callable[P, tuple[R, dict[str, G]]]]: ...
@overload
def value_and_grad(
    fun: None = None, argnums: Argnums = None, *, wrt: PyTree | Filter = None, **options: Unpack[ValueOptions]
) -> Callable[[Callable[P, R]], Callable[P, tuple[R, Any]]]: ...
@transform(_HINTS)
def value_and_grad(
    fun: Callable[..., Any] | None = None,
    argnums: Argnums = None,
    *,
    wrt: PyTree | Filter = None,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
) -> Callable[..., Any]:
    """Evaluate a function and differentiate it; the arguments are as in `grad`.

    Returns:
        A function of the same arguments that returns ``(value, gradients)``, or with `has_aux`
        ``((value, aux), gradients)``.

    Example:
        >>> import jax.numpy as jnp, statetx
        >>> w = statetx.Param(jnp.array(2.0))
        >>> value, g = statetx.value_and_grad(lambda x: w.value**2 * x, wrt=w)(3.0)
        >>> float(value), float(g)
        (12.0, 12.0)
    """
    ...


class Derivative(Wrapper):
    """A derivative of a function with respect to arguments and states.

    Attributes:
        of_jax: JAX's transform.
        frame_name: the name of the function's frames, for messages.
        has_trees: whether the function may return trees of arrays, which JAX gets as a list.
        argnums: as the user gave it, or its default.
    """

    of_jax: ClassVar[Callable]
    frame_name: ClassVar[str]
    has_trees: ClassVar[bool] = False

    @classmethod
    def make(cls, fun: Any, options: dict[str, Any]) -> Any:
        parse_argnums(options["argnums"])  # an error is raised here, not at the first call
        return super().make(fun, options)

    def __init__(self, fun: Callable, **options: Any):
        super().__init__(fun, **options)
        self.argnums, self._wrt, self.has_aux = (self._options[name] for name in ("argnums", "wrt", "has_aux"))
        if self.argnums is None and self._wrt is None:
            self.argnums = 0
        self._jax_options = {name: x for name, x in self._options.items() if name in ("holomorphic", "allow_int")}

    def differentiate(self, args: tuple, kwargs: dict[str, Any]) -> tuple[Any, PyTree, Callable, Any]:
        """Run the function once in JAX's transform.

        Returns:
            The transform's result, whose derivatives are pairs of the states' and the arguments'; auxiliary data; a
            function that combines such a pair in the form of the options; and the structure of the output.
        """
        fun, name = self.__wrapped__, self.maker.__name__
        allow_int = self._jax_options.get("allow_int", False)
        diff_states = (
            DifferentiatedStates(self._wrt, fun, args, kwargs, allow_int=allow_int) if self._wrt is not None else None
        )
        diff_argnums, as_tuple = resolve_argnums(self.argnums, len(args), fun)
        structure: Any = None

        def leaves_of(out: PyTree) -> PyTree:
            nonlocal structure
            self.check_output(out)
            outputs, structure = jax.tree.flatten(out)
            return outputs if self.has_trees else out

        run = FramedRun(self.frame_name, fun, has_aux=self.has_aux, diff_states=diff_states)

        @run.named
        def pure(state_values: list, diff_args: tuple) -> tuple[Any, list]:
            return run(replaced(args, diff_argnums, diff_args), kwargs, state_values, diff_args, leaves_of)

        # States and arguments are two arguments of `pure`, so that the user's argnums need no shift.
        differentiate = self.of_jax(pure, argnums=(0, 1), has_aux=True, **self._jax_options)
        values = diff_states.values() if diff_states else []
        try:
            result, leaves = self.split_leaves(differentiate(values, tuple(args[i] for i in diff_argnums)))
        except jax.errors.UnexpectedTracerError:
            run.explain()
            raise
        except (TypeError, ValueError, StateAccessError) as e:
            if _states.is_of_jax(e):
                refuse_arguments(name, fun, args, diff_argnums, allow_int=allow_int)
                refuse_types(e, name, fun)
            raise

        def combine(of_states: Any, of_args: Any) -> Any:
            of_args = of_args if as_tuple else of_args[0]
            if diff_states is None:
                return of_args
            return diff_states.combine(of_states) if self.argnums is None else (diff_states.combine(of_states), of_args)

        return result, run.finish(leaves), combine, structure

    def check_output(self, out: PyTree) -> None:
        """Raise for an output if JAX's error would not name the function."""
        raise NotImplementedError

    def split_leaves(self, result: Any) -> tuple[Any, list]:
        """Split the leaves of auxiliary data and effects off the result of JAX's transform."""
        return result


class ValueAndGrad(Derivative, made_by=value_and_grad):
    """Made by `value_and_grad`."""

    of_jax = staticmethod(jax.value_and_grad)
    frame_name = "grad"

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        value, aux, grads = self.value_aux_and_grads(args, kwargs)
        return ((value, aux) if self.has_aux else value), grads

    def value_aux_and_grads(self, args: tuple, kwargs: dict[str, Any]) -> tuple[Any, Any, Any]:
        (value, grads), aux, combine, _ = self.differentiate(args, kwargs)
        return value, aux, combine(*grads)

    def split_leaves(self, result: Any) -> tuple[Any, list]:
        (value, leaves), grads = result
        return (value, grads), leaves

    def check_output(self, out: PyTree) -> None:
        if not is_array_or_number(out) or jnp.ndim(out):
            _refuse_loss(out, self.maker.__name__, name_of(self.__wrapped__))


def _refuse_loss(out: Any, transform: str, name: str) -> None:
    """Raise for a loss that is not a scalar; leave objects that JAX may know to JAX."""
    if is_array_or_number(out):
        got, fix = type_str(out), "reduce it, with .sum() or .mean(); for derivatives of every item use statetx.jacrev"
    elif isinstance(out, (tuple, list)):
        got = f"{type(out).__name__} of {len(out)}"
        fix = "return the loss alone, or a pair (loss, aux) with has_aux=True"
    elif out is None:
        got, fix = "None", "return the loss"
    elif _states.kind_of(out) is not None:
        got, fix = _states.describe(out), "return its .value"
    elif not isinstance(out, Mapping) and hasattr(out, "mantissa") and hasattr(out, "unit"):
        # A Quantity of brainunit or saiunit. A brainstate dict raises KeyError for an attribute that it lacks.
        got, fix = f"the Quantity {tree_type_str(out)}", "return its magnitude, as brainunit.get_magnitude(loss)"
    elif isinstance(out, (str, bytes)):
        got, fix = f"the {type(out).__name__} {brief(out)}", "return one number"
    elif not jax.tree_util.all_leaves([out]):
        got, fix = f"the pytree {short_tree_type_str(out)}", "return one number"
    else:
        return
    raise FunctionError(f"{transform} needs a function that returns a scalar: {name} returned {got}.\nFix: {fix}.")


class Grad(ValueAndGrad, made_by=grad):
    """Made by `grad`."""

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        _, aux, grads = self.value_aux_and_grads(args, kwargs)
        return (grads, aux) if self.has_aux else grads
