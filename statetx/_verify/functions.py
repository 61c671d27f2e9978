"""Sides of a comparison of steps: plain functions, gradients, numbers in place of types."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import _states
from .._lift.wrapper import name_of, short_name
from .._remat.override import override
from .._states import Jitted
from .._tree import is_array_or_type, is_float, is_key, is_opaque, partition
from ..residuals._trace import jitted
from ..transforms.functionalize import Functionalize
from ..transforms.jit.api import jit


def plain(fun: Callable) -> Callable:
    """The function without rematerialization, plans and checkpoints of loops."""
    user = jitted(fun) or Jitted(fun, (), ())

    def plain(*args: Any, **kwargs: Any) -> Any:
        with override.nothing_checkpointed():
            return user.fun(*args, **kwargs)

    plain.__name__ = plain.__qualname__ = f"{short_name(name_of(fun))} without rematerialization"
    return jit(plain, static_argnums=user.static_argnums, static_argnames=user.static_argnames)


def with_gradients(fun: Callable[..., Any]) -> Callable[..., Any]:
    """The outputs and new values of states of a function, with gradients for all floats, as a function of arrays."""

    def gradients(*args: Any, **kwargs: Any) -> Any:
        pure = Functionalize(fun, takes_refs=True)
        return pulled_back(pure, pure.values(*args, **kwargs), args, kwargs)

    gradients.__name__ = gradients.__qualname__ = short_name(name_of(fun))
    return gradients


def is_float_array(x: Any) -> bool:
    """Whether it is a float, and no state with one: its value is among those of the states."""
    return is_float(x) and not is_opaque(x)


def pulled_back(pure: Callable, values: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[Any, Any, tuple[Any, ...]]:
    """The output and new values of a functionalized function, and a gradient for each float among its inputs."""
    floats, static = partition((values, args, kwargs), is_float_array)
    part: Any = None

    def differentiated(*floats: Any) -> tuple[list[Any], list[Any]]:
        nonlocal part
        values, args, kwargs = static.combine(floats)
        result = pure(values, *args, **kwargs)
        arrays, part = partition(result, is_array_or_type, is_leaf=None)
        return partition(result[0], is_float, is_leaf=None)[0], arrays

    leaves, pullback, arrays = jax.vjp(differentiated, *floats, has_aux=True)
    # Cotangents differ between entries, so that swapped ones show.
    types = map(jax.typeof, leaves)
    cts = [jnp.cos(jnp.arange(t.size, dtype=t.dtype)).reshape(t.shape) for t in types]
    return *part.combine(arrays), pullback(cts)


def filled(tree: Any) -> Any:
    """Numbers in place of ``jax.ShapeDtypeStruct``: normal floats, zeros and ones, keys."""
    draw = np.random.default_rng(0)

    def numbers(x: Any) -> Any:
        if not isinstance(x, jax.ShapeDtypeStruct):
            return x
        if is_key(x):
            return jax.random.split(jax.lax.full((), 0, x.dtype), x.shape)
        entries = draw.normal(size=x.shape) if is_float(x) else draw.integers(0, 2, x.shape)
        return jnp.asarray(entries, x.dtype)

    return jax.tree.map(numbers, tree, is_leaf=_states.is_opaque)
