"""Forward mode, full Jacobians: `jvp`, `linearize`, `jacfwd`, `jacrev`, `hessian`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, Literal, ParamSpec, Protocol, TypeVar, cast, overload

import jax
import jax.numpy as jnp

from .. import _jax, _states
from .._errors import FunctionError
from .._lift.options import check_flags, transform
from .._lift.run import FramedRun
from .._lift.wrapper import check_callable, name_of
from .._text import type_str
from .._tree import flatten, is_array_or_number, is_number
from .._typing import Argnums, Filter, PyTree
from .grad import Derivative

P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R")
A = TypeVar("A")


@overload
def jvp(
    fun: Callable[..., tuple[R, A]], primals: Sequence[Any], tangents: Sequence[Any], has_aux: Literal[True]
) -> tuple[R, R, A]: ...
@overload
def jvp(
    fun: Callable[..., R], primals: Sequence[Any], tangents: Sequence[Any], has_aux: Literal[False] = False
) -> tuple[R, R]: ...
@_jax.api_boundary
def jvp(fun: Callable, primals: Sequence[Any], tangents: Sequence[Any], has_aux: bool = False) -> tuple[Any, ...]:
    """Evaluate a function that may read and write states, and its directional derivative.

    Args:
        fun: called as ``fun(*primals)``.
        primals: the point of evaluation; a tuple or list of pytrees of arrays.
        tangents: the direction, in the structure of `primals`.
        has_aux: whether `fun` returns a pair whose second item is passed through.

    Returns:
        ``(out, tangent_of_out)``, or with `has_aux` ``(out, tangent_of_out, aux)``.

    State:
        Each written state is written once, with its value from the evaluation. States have no tangents here; an
        enclosing differentiation of statetx differentiates them like any value.

    Source:
        ``jax.jvp``.

    Example:
        >>> import jax.numpy as jnp, statetx
        >>> n = statetx.State(0)
        >>> def f(x):
        ...     n.value += 1
        ...     return jnp.sin(x)
        >>> out, slope = statetx.jvp(f, (0.0,), (2.0,))
        >>> float(out), float(slope), n.value
        (0.0, 2.0, 1)
    """
    for name, value in (("primals", primals), ("tangents", tangents)):
        if not isinstance(value, (tuple, list)):
            raise TypeError(
                f"jvp: {name} must be a tuple or a list with an item for each argument of {name_of(fun)}, got "
                f"{type(value).__name__}."
            )
    check_callable("jvp", fun)
    check_flags("jvp", has_aux=has_aux)
    run = FramedRun("jvp", fun, has_aux)
    out, tangent, leaves = jax.jvp(lambda *xs: run.flat(xs), _arrays(primals), _arrays(tangents), has_aux=True)
    aux = run.finish(leaves)
    out, tangent = run.out.combine(out), run.out.combine(tangent)
    return (out, tangent, aux) if has_aux else (out, tangent)


@overload
def linearize(
    fun: Callable[..., tuple[R, A]], *primals: Any, has_aux: Literal[True]
) -> tuple[R, Callable[..., R], A]: ...
@overload
def linearize(fun: Callable[..., R], *primals: Any, has_aux: Literal[False] = False) -> tuple[R, Callable[..., R]]: ...
@_jax.api_boundary
def linearize(fun: Callable, *primals: Any, has_aux: bool = False) -> tuple[Any, ...]:
    """Evaluate a function that may read and write states, and return its derivative there as a linear function.

    Args:
        fun: called as ``fun(*primals)``.
        *primals: the point of evaluation; pytrees of arrays.
        has_aux: whether `fun` returns a pair whose second item is passed through.

    Returns:
        ``(out, pushforward)``, or with `has_aux` ``(out, pushforward, aux)``. ``pushforward(*tangents)`` runs none of
        the user's Python and writes no state. It is a pytree: a jitted function may return it.

    State:
        As in `jvp`.

    Source:
        ``jax.linearize``.

    Example:
        >>> import jax.numpy as jnp, statetx
        >>> s = statetx.State(jnp.ones(()))
        >>> def f(x):
        ...     s.value = s.value * x
        ...     return s.value**2
        >>> out, pushforward = statetx.linearize(f, 3.0)
        >>> float(out), float(pushforward(1.0)), float(s.value)
        (9.0, 6.0, 3.0)
    """
    check_callable("linearize", fun)
    check_flags("linearize", has_aux=has_aux)
    run = FramedRun("linearize", fun, has_aux)
    out, jvp_fun, leaves = jax.linearize(lambda *xs: run.flat(xs), *_arrays(primals), has_aux=True)
    aux = run.finish(leaves, jvp_fun)
    out_part = run.out

    def push(jvp_fun: Callable, *tangents: Any) -> Any:
        return out_part.combine(jvp_fun(*tangents))

    pushforward = jax.tree_util.Partial(push, jvp_fun)
    out = out_part.combine(out)
    return (out, pushforward, aux) if has_aux else (out, pushforward)


def _arrays(trees: Sequence[Any]) -> tuple:
    """Convert Python numbers to arrays: JAX's tracers would pass the numbers to primitives that take arrays only."""
    leaves, treedef = flatten(tuple(trees))
    return jax.tree.unflatten(treedef, [jnp.asarray(x) if is_number(x) else x for x in leaves])


class JacobianTransform(Protocol[Q]):
    """The type of `jacfwd`, `jacrev` and `hessian`: applied to a function, or with options as a decorator."""

    @overload
    def __call__(self, fun: Callable[P, Any], /, *args: Q.args, **kwargs: Q.kwargs) -> Callable[P, Any]: ...
    @overload
    def __call__(
        self, fun: None = None, /, *args: Q.args, **kwargs: Q.kwargs
    ) -> Callable[[Callable[P, Any]], Callable[P, Any]]: ...


def _returns_jacobian(fun: Callable[Concatenate[Any, Q], Any]) -> JacobianTransform[Q]:
    return cast(JacobianTransform[Q], fun)


@_returns_jacobian
@transform()
def jacfwd(
    fun: Callable[..., Any] | None = None,
    argnums: Argnums = None,
    has_aux: bool = False,
    holomorphic: bool = False,
    *,
    wrt: PyTree | Filter = None,
) -> Callable[..., Any]:
    """Compute the Jacobian by forward mode: one pass for each input element; for few inputs and many outputs.

    Args:
        fun: a function that may read and write states; it runs once and writes once.
        argnums: positions of the arguments to differentiate. By default 0 without `wrt`, and none with `wrt`.
        has_aux: whether `fun` returns a pair whose second item is passed through.
        holomorphic: as in ``jax.jacfwd``.
        wrt: states to differentiate, as in `grad`.

    Returns:
        A function of the same arguments that returns the Jacobian in the structure of the output. Each leaf of it has
        the structure of `argnums`, of `wrt`, or the pair ``(wrt's, argnums')``, and each of their leaves the shape of
        the output followed by the shape of the input. With `has_aux` it returns ``(jacobian, aux)``.

    Source:
        ``jax.jacfwd``.

    Example:
        >>> import jax.numpy as jnp, statetx
        >>> w = statetx.Param(jnp.array([1.0, 2.0]))
        >>> statetx.jacfwd(lambda x: w.value * x)(3.0)
        Array([1., 2.], dtype=float32)
        >>> statetx.jacfwd(lambda x: w.value * x, wrt=w)(3.0)
        Array([[3., 0.],
               [0., 3.]], dtype=float32)
    """
    ...


@_returns_jacobian
@transform()
def jacrev(
    fun: Callable[..., Any] | None = None,
    argnums: Argnums = None,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
    *,
    wrt: PyTree | Filter = None,
) -> Callable[..., Any]:
    """Compute the Jacobian by reverse mode: one pass for each output element; the arguments are as in `jacfwd`.

    Example:
        >>> import jax.numpy as jnp, statetx
        >>> w = statetx.Param(jnp.array([1.0, 2.0]))
        >>> statetx.jacrev(lambda x: jnp.sum(w.value * x) * jnp.ones(1), wrt={"w": w})(3.0)
        {'w': Array([[3., 3.]], dtype=float32)}
    """
    ...


@_returns_jacobian
@transform()
def hessian(
    fun: Callable[..., Any] | None = None,
    argnums: Argnums = None,
    has_aux: bool = False,
    holomorphic: bool = False,
    *,
    wrt: PyTree | Filter = None,
) -> Callable[..., Any]:
    """Compute the Hessian by forward over reverse mode; the arguments are as in `jacfwd`.

    Example:
        >>> import jax.numpy as jnp, statetx
        >>> w = statetx.Param(jnp.asarray(2.0))
        >>> float(statetx.hessian(lambda x: w.value**3 * x, wrt=w)(1.0))
        12.0
    """
    ...


class Jacfwd(Derivative, made_by=jacfwd):
    """Made by `jacfwd`; `jacrev` and `hessian` have subclasses."""

    of_jax = staticmethod(jax.jacfwd)
    has_trees = True

    @property
    def frame_name(self) -> str:  # type: ignore[override]
        return self.maker.__name__

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        jacobian, aux, combine, structure = self.differentiate(args, kwargs)
        result = jax.tree.unflatten(structure, [combine(*pair) for pair in jacobian])
        return (result, aux) if self.has_aux else result

    def check_output(self, out: PyTree) -> None:
        # States, and integers, have errors of their own.
        leaves = jax.tree.leaves(out)
        opaque = [x for x in leaves if not is_array_or_number(x) and _states.kind_of(x) is None]
        flags = [x for x in leaves if is_array_or_number(x) and jnp.issubdtype(jnp.result_type(x), bool)]
        if opaque or flags or (not leaves and self.of_jax is jax.jacrev):
            got = type_str((opaque or flags)[0]) if leaves else "no output"
            raise FunctionError(
                f"{self.frame_name}({name_of(self.__wrapped__)}) requires outputs that are numbers, but got {got}.\n"
                f"Fix: return numbers, and anything else as auxiliary data, with has_aux=True."
            )


class Jacrev(Jacfwd, made_by=jacrev):
    """Made by `jacrev`."""

    of_jax = staticmethod(jax.jacrev)


class Hessian(Jacfwd, made_by=hessian):
    """Made by `hessian`: forward mode over reverse mode, which has the same name in messages."""

    @classmethod
    def make(cls, fun: Any, options: dict[str, Any]) -> Any:
        if cls is Hessian and fun is not None:
            fun = _ReverseOfHessian.make(fun, options)
        return super().make(fun, options) if fun is not None else functools.partial(cls.make, options=options)


class _ReverseOfHessian(Hessian):
    of_jax = staticmethod(jax.jacrev)
