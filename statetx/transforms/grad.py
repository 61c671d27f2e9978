"""Reverse-mode differentiation: `grad`, `value_and_grad` and `vjp`, with respect to arguments and to states."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, ParamSpec, TypedDict, TypeVar, Unpack, overload

import jax
import jax.numpy as jnp

from .._lift.stage import Outcome, Wrapper, as_decorator, call, frame_for, name_of, pack, take_apart
from .._lift.targets import Targets, refuse_lost_writes, resolve_argnums, split_aux
from .._positions import replaced
from .._remat import decide
from .._tree import Partition, is_array_or_number, partition
from .._typing import Filter, PyTree

P = ParamSpec("P")
R = TypeVar("R")
A = TypeVar("A")
Argnums = int | Sequence[int] | None


class GradOptions(TypedDict, total=False):
    """What `grad` and `value_and_grad` take besides the function, `argnums` and `has_aux`."""

    wrt: PyTree | Filter
    holomorphic: bool
    allow_int: bool


@overload
def grad(
    fun: Callable[P, tuple[Any, A]],
    argnums: Argnums = None,
    *,
    has_aux: Literal[True],
    **options: Unpack[GradOptions],
) -> Callable[P, tuple[Any, A]]: ...
@overload
def grad(
    fun: Callable[P, Any], argnums: Argnums = None, *, has_aux: Literal[False] = False, **options: Unpack[GradOptions]
) -> Callable[P, Any]: ...
@overload
def grad(
    fun: None = None, argnums: Argnums = None, *, has_aux: bool = False, **options: Unpack[GradOptions]
) -> Callable[[Callable[P, Any]], Callable[P, Any]]: ...
def grad(
    fun: Any = None,
    argnums: Argnums = None,
    *,
    wrt: PyTree | Filter = None,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
) -> Any:
    """Differentiate a function that may read and write states.

    As ``jax.grad``, and with respect to states: what the function writes is written once, with the values of the
    forward pass. Gradients are with respect to the values that the states had when the call began.

    Args:
        fun: returns a scalar, or a scalar and auxiliary data with `has_aux`.
        argnums: positions of the arguments to differentiate; 0 if `wrt` is not given either, none if it is.
        wrt: the states to differentiate: a state, a list or dict of states (``statetx.states(model, Param)``), or
            a filter, which selects among the states that the function and its arguments hold, and those besides that the
            call reads, and gives a dict by path. A dict of brainstate (``net.states()``) gives a plain dict.
        has_aux: whether `fun` returns a pair whose second item is passed through.
        holomorphic: as in ``jax.grad``.
        allow_int: as in ``jax.grad``.

    Returns:
        A function of the same arguments. It returns the gradients, in the structure of `wrt` (of each state, the
        structure of its value), in that of `argnums`, or the pair of these; with `has_aux` a pair ``(gradients,
        aux)``. A dict has its keys sorted, as JAX gives dicts back: look gradients up by path.

    Raises:
        StateFilterError: `wrt` selects no state, or one that the call reads and that nothing leads to.
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
    options = _options(argnums, wrt, has_aux, holomorphic, allow_int)
    return as_decorator(Grad, fun, options)


@overload
def value_and_grad(
    fun: Callable[P, R], argnums: Argnums = None, *, has_aux: bool = False, **options: Unpack[GradOptions]
) -> Callable[P, tuple[R, Any]]: ...
@overload
def value_and_grad(
    fun: None = None, argnums: Argnums = None, *, has_aux: bool = False, **options: Unpack[GradOptions]
) -> Callable[[Callable[P, R]], Callable[P, tuple[R, Any]]]: ...
def value_and_grad(
    fun: Any = None,
    argnums: Argnums = None,
    *,
    wrt: PyTree | Filter = None,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
) -> Any:
    """Evaluate a function and differentiate it; `grad` says what the arguments are.

    Returns:
        A function of the same arguments that returns ``(value, gradients)``, with `has_aux` ``((value, aux),
        gradients)``.

    Example:
        >>> import jax.numpy as jnp, statetx
        >>> w = statetx.Param(jnp.array(2.0))
        >>> value, g = statetx.value_and_grad(lambda x: w.value**2 * x, wrt=w)(3.0)
        >>> float(value), float(g)
        (12.0, 12.0)
    """
    options = _options(argnums, wrt, has_aux, holomorphic, allow_int)
    return as_decorator(ValueAndGrad, fun, options)


def _options(argnums: Any, wrt: Any, has_aux: bool, holomorphic: bool, allow_int: bool) -> dict[str, Any]:
    if argnums is None and wrt is None:
        argnums = 0
    return {
        "argnums": argnums,
        "wrt": wrt,
        "has_aux": has_aux,
        "holomorphic": holomorphic,
        "allow_int": allow_int,
    }


class ValueAndGrad(Wrapper):
    """Made by `value_and_grad`."""

    def __init__(self, fun: Callable, *, argnums: Any, wrt: Any, has_aux: bool, holomorphic: bool, allow_int: bool):
        super().__init__(fun, _options(argnums, wrt, has_aux, holomorphic, allow_int))
        self._argnums = argnums
        self._wrt = wrt
        self._has_aux = has_aux
        self._jax_options: dict[str, Any] = {"holomorphic": holomorphic, "allow_int": allow_int}

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        value, aux, grads = self._differentiate(args, kwargs)
        return ((value, aux) if self._has_aux else value), grads

    def _differentiate(self, args: tuple, kwargs: dict[str, Any]) -> tuple[Any, Any, Any]:
        fun = self.__wrapped__
        allow_int = self._jax_options["allow_int"]
        targets = Targets(self._wrt, fun, args, kwargs, allow_int=allow_int) if self._wrt is not None else None
        wants_refs = targets is not None and targets.has_refs
        nums, as_tuple = resolve_argnums(self._argnums, len(args), fun)
        outcome: Outcome | None = None
        wrapped = decide.override.wrapped(fun)

        def pure(state_values: list, diff_args: tuple) -> tuple[Any, list]:
            nonlocal outcome
            on_read = targets and targets.on_read(state_values)
            call_args = replaced(args, nums, diff_args)
            frame = frame_for("grad", fun, on_read=on_read)
            out = frame.run(call, wrapped, call_args, kwargs, wants_refs)
            refuse_lost_writes("grad", fun, frame.effects, diff_args)
            value, aux = split_aux(out, fun) if self._has_aux else (out, None)
            leaves, outcome = pack(aux, frame.effects)
            return value, leaves

        differentiate = jax.value_and_grad(pure, argnums=(0, 1), has_aux=True, **self._jax_options)
        values = targets.values() if targets else []
        (value, leaves), (state_grads, arg_grads) = differentiate(values, tuple(args[i] for i in nums))
        assert outcome is not None
        aux = outcome.finish(leaves)
        of_args = arg_grads if as_tuple else arg_grads[0] if arg_grads else None
        if targets is None:
            return value, aux, of_args
        of_states = targets.combine(state_grads)
        return value, aux, of_states if self._argnums is None else (of_states, of_args)


class Grad(ValueAndGrad):
    """Made by `grad`."""

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        _, aux, grads = self._differentiate(args, kwargs)
        return (grads, aux) if self._has_aux else grads


@overload
def vjp(
    fun: Callable[..., tuple[R, A]], *primals: Any, wrt: PyTree | Filter = None, has_aux: Literal[True]
) -> tuple[R, Callable[[Any], Any], A]: ...
@overload
def vjp(
    fun: Callable[..., R], *primals: Any, wrt: PyTree | Filter = None, has_aux: Literal[False] = False
) -> tuple[R, Callable[[Any], Any]]: ...
def vjp(fun: Callable, *primals: Any, wrt: PyTree | Filter = None, has_aux: bool = False) -> tuple:
    """Evaluate a function that may read and write states, and return its pullback.

    Args:
        fun: called as ``fun(*primals)``.
        *primals: arrays or pytrees of arrays, all differentiated; leaves of other types pass untouched.
        wrt: states to differentiate as well, as in `grad`.
        has_aux: whether `fun` returns a pair whose second item is passed through.

    Returns:
        ``(out, pullback)``, with `has_aux` ``(out, pullback, aux)``. ``pullback(cotangent_of_out)`` returns a tuple
        with a cotangent for each primal; with `wrt`, the pair of the states' cotangents and that tuple. It runs
        none of the user's Python and writes no state. It is a pytree: a jitted function may return it.

    Example:
        >>> import jax.numpy as jnp, statetx
        >>> n = statetx.State(0)
        >>> def f(x):
        ...     n.value += 1
        ...     return x * x
        >>> out, pullback = statetx.vjp(f, 3.0)
        >>> float(out), float(pullback(1.0)[0]), n.value
        (9.0, 6.0, 1)
    """
    targets = Targets(wrt, fun, primals, {}) if wrt is not None else None
    wants_refs = targets is not None and targets.has_refs
    arrays, others = partition(primals, is_array_or_number)
    outcome: Outcome | None = None
    out_part: Any = None
    wrapped = decide.override.wrapped(fun)

    def pure(state_values: list, *diff: Any) -> tuple[list, list]:
        nonlocal outcome, out_part
        frame = frame_for("vjp", fun, on_read=targets and targets.on_read(state_values))
        out = frame.run(call, wrapped, others.combine(diff), {}, wants_refs)
        out, aux = split_aux(out, fun) if has_aux else (out, None)
        leaves, outcome = pack(aux, frame.effects)
        out_leaves, out_part = take_apart(out, is_array_or_number)
        return [jnp.asarray(x) for x in out_leaves], leaves

    out_leaves, pull, leaves = jax.vjp(pure, targets.values() if targets else [], *arrays, has_aux=True)
    assert outcome is not None
    aux = outcome.finish(leaves)

    form = _Form(name_of(fun), out_part, [x.dtype for x in out_leaves], others, targets)
    pullback = Pullback(pull, form)
    out = out_part.combine(out_leaves)
    return (out, pullback, aux) if has_aux else (out, pullback)


class _Form:
    """What a pullback takes and gives besides arrays."""

    def __init__(self, name: str, out: Partition, dtypes: list[Any], primals: Partition, targets: Targets | None):
        self.name = name
        self.out = out
        self.dtypes = dtypes
        self.primals = primals
        self.targets = targets


@jax.tree_util.register_pytree_node_class
class Pullback:
    """The linear map from a cotangent of a function's output to those of its inputs; made by `vjp`.

    A pytree, as JAX's is: a compiled function may return it or take it as an argument.
    """

    def __init__(self, pull: Callable, form: _Form):
        self._pull = pull
        self._form = form

    def __call__(self, cotangent: Any) -> Any:
        form = self._form
        given, treedef = jax.tree.flatten(cotangent)
        if treedef != form.out.treedef:
            raise TypeError(
                f"The pullback of {form.name} needs a cotangent in the structure of its output, {form.out.treedef}, and "
                f"got {treedef}."
            )
        dynamic = [c for c, d in zip(given, form.out.mask, strict=True) if d]
        converted = [
            jnp.asarray(c, dtype) if isinstance(c, (int, float, complex)) else c
            for c, dtype in zip(dynamic, form.dtypes, strict=True)
        ]
        of_states, *of_arrays = self._pull(converted)
        of_args = form.primals.combine(of_arrays)
        return of_args if form.targets is None else (form.targets.combine(of_states), of_args)

    def __repr__(self) -> str:
        return f"<pullback of {self._form.name}>"

    def tree_flatten(self) -> tuple[tuple[Callable], _Form]:
        return (self._pull,), self._form

    @classmethod
    def tree_unflatten(cls, form: _Form, children: tuple[Callable]) -> Pullback:
        return cls(*children, form)
