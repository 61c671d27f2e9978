"""For tests of code that uses statetx: is a rematerialised function the function itself, what does it keep, how often is it run."""

from __future__ import annotations

import collections
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from . import _jax
from ._lift.stage import Wrapper, name_of
from ._remat.decide import override
from ._tree import is_float, partition
from .residuals.table import saved_residuals
from .transforms.functionalize import functionalize
from .transforms.remat import remat


def assert_remat_equivalent(fun: Callable, /, *args: Any, rtol: float = 0.0, atol: float = 0.0, **kwargs: Any) -> None:
    """Check that rematerialisation changes nothing that a function computes.

    Runs the function and its pullback twice without rematerialisation and once with it, and compares outputs, the states'
    new values (random keys among them) and the gradients with respect to every float argument and state. It runs operation
    by operation (``jax.disable_jit``), loops step by step, so give it small arguments. No state changes.

    Args:
        fun: a function that may read and write states. If no function in it is rematerialised, it is itself.
        *args, **kwargs: what to call it with.
        rtol, atol: tolerances of floats; zero for equal bits, which nested rematerialisation may miss by a rounding, since
            gradients of a value that is used in several places are then summed in another order.

    Raises:
        AssertionError: naming the first difference; or a function that is not deterministic, naming the generator or the
            host callback that makes it so.

    Example:
        >>> import jax.numpy as jnp, statetx
        >>> w = statetx.Param(jnp.ones(3))
        >>> statetx.testing.assert_remat_equivalent(lambda x: jnp.tanh(w.value * x), jnp.arange(3.0))
    """
    pure = functionalize(fun)
    values = pure.values(*args, **kwargs)
    before = _generators()
    with override(is_off=True):
        first, second = _run(pure, values, args, kwargs), _run(pure, values, args, kwargs)
    drawn = [name for name, state in _generators().items() if state != before[name]]
    difference = _difference(second, first, 0.0, 0.0)
    if difference:
        raise AssertionError(
            f"{name_of(fun)} is not deterministic: two runs without rematerialisation differ at {difference}.\n"
            f"{_suspects(pure, values, args, kwargs, drawn)}"
        )
    with override() as met:
        again = _run(pure, values, args, kwargs)
    if not met:
        again = _run(functionalize(remat(fun)), values, args, kwargs)
    difference = _difference(again, first, rtol, atol)
    if difference:
        raise AssertionError(
            f"{name_of(fun)} is another function when it is rematerialised: {difference}.\n"
            f"{_suspects(pure, values, args, kwargs, drawn)}"
        )


def _run(pure: Callable, values: dict[str, Any], args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Outputs, new states and gradients, by what a message calls them."""
    floats, others = partition((values, args, kwargs), is_float)
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path((values, args, kwargs))]
    rest_part: Any = None

    def differentiable(*floats: Any) -> tuple[list[Any], list[Any]]:
        nonlocal rest_part
        values, args, kwargs = others.combine(floats)
        out, new = pure(values, *args, **kwargs)
        rest, rest_part = partition((out, new), lambda x: hasattr(x, "dtype"))
        return partition(out, is_float)[0], rest

    with jax.disable_jit():  # what is compiled as a whole is rounded otherwise than its parts
        leaves, pullback, rest = jax.vjp(differentiable, *floats, has_aux=True)
        out, new = rest_part.combine(rest)
        types = [jax.typeof(x) for x in leaves]
        cotangents = [jnp.cos(jnp.arange(t.size, dtype=t.dtype)).reshape(t.shape) for t in types]
        grads = iter(pullback(cotangents))
    found = {f"output{jax.tree_util.keystr(p)}": x for p, x in jax.tree_util.tree_leaves_with_path(out)}
    for path, value in new.items():
        for p, x in jax.tree_util.tree_leaves_with_path(value):
            found[f"state {path!r}{jax.tree_util.keystr(p)}"] = x
    for path, moves in zip(paths, others.mask, strict=True):
        if moves:
            found[f"gradient of {_place(path)}"] = next(grads)
    return found


def _place(path: tuple) -> str:
    which, entry, *rest = path
    tail = jax.tree_util.keystr(tuple(rest))
    name = getattr(entry, "key", getattr(entry, "idx", entry))
    return f"{('state', 'argument', 'argument')[which.idx]} {name!r}{tail}"


def _difference(actual: dict[str, Any], expected: dict[str, Any], rtol: float, atol: float) -> str:
    """The first result that differs, empty if none does."""
    if list(actual) != list(expected):
        return f"the results {sorted(set(actual) ^ set(expected))}, which only one of them has"
    for name, b in expected.items():
        a = actual[name]
        if not hasattr(b, "dtype"):
            if a is not b and a != b:
                return f"{name}: {a!r} in place of {b!r}"
            continue
        if (np.shape(a), a.dtype) != (np.shape(b), b.dtype):
            return f"{name}: {a.dtype}{list(a.shape)} in place of {b.dtype}{list(b.shape)}"
        if jnp.issubdtype(b.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        a, b = np.asarray(a), np.asarray(b)
        if is_float(b) and (rtol or atol):
            wide = np.complex128 if np.iscomplexobj(b) else np.float64
            same = np.isclose(a.astype(wide), b.astype(wide), rtol=rtol, atol=atol, equal_nan=True)
        else:
            same = (a == b) | ((a != a) & (b != b))
        if not same.all():
            at = tuple(int(i[0]) for i in np.nonzero(~same)) if same.ndim else ()
            where = f"[{', '.join(map(str, at))}]" if at else ""
            return f"{name}{where}: {a[at]} in place of {b[at]} ({int((~same).sum())} of {same.size} differ)"
    return ""


def _generators() -> dict[str, Any]:
    """The state of the generators that no function carries."""
    return {"numpy.random": str(np.random.get_state(legacy=False)), "random": random.getstate()}


def _suspects(pure: Callable, values: Any, args: tuple, kwargs: dict[str, Any], drawn: Iterable[str]) -> str:
    lines = [
        f"It draws from the global generator of {name}, which is no state: use a statetx.RngState." for name in drawn
    ]
    with override(is_off=True):
        found = _jax.callbacks(_jaxpr_of(pure, values, args, kwargs))
    for name, place in found:
        lines.append(
            f"It calls {name} on the host, at {place}, once more for each recomputation: that must give the same."
        )
    return (
        "\n".join(lines)
        or "No callback and no draw from a global generator was seen: this is a fault of statetx or JAX."
    )


def _jaxpr_of(pure: Callable, values: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    arrays, others = partition((values, args, kwargs), lambda x: hasattr(x, "dtype"))

    def run(*arrays: Any) -> list[Any]:
        values, args, kwargs = others.combine(arrays)
        return partition(pure(values, *args, **kwargs), lambda x: hasattr(x, "dtype"))[0]

    return jax.make_jaxpr(run)(*arrays).jaxpr


def assert_residuals(fun: Callable, /, *args: Any, expected: int | Sequence[str], **kwargs: Any) -> None:
    """Check what a function keeps for its backward pass, beyond its arguments, states and constants.

    Args:
        fun: a function that may read and write states.
        *args, **kwargs: what to call it with; nothing is run.
        expected: the bytes, or the values in any order, each by its name, by its type (``"f32[8,64]"``), or by both
            (``"hidden f32[8,64]"``). A value that a loop of 10 steps keeps in each is given once, as ``"10 x f32[64]"``.

    Raises:
        AssertionError: naming what is kept and was not expected, and the other way round.

    Example:
        >>> import jax.numpy as jnp, statetx
        >>> @statetx.remat(policy=statetx.policies.names("hidden"))
        ... def f(x):
        ...     return jnp.sin(statetx.checkpoint_name(jnp.cos(x), "hidden"))
        >>> statetx.testing.assert_residuals(f, jnp.ones(4), expected=["hidden f32[4]"])
        >>> statetx.testing.assert_residuals(f, jnp.ones(4), expected=16)
    """
    residuals = saved_residuals(fun, *args, **kwargs)
    kept = [row for row in residuals if row.origin == "intermediate"]
    if isinstance(expected, int):
        if residuals.intermediate_bytes != expected:
            raise AssertionError(
                f"{name_of(fun)} keeps {residuals.intermediate_bytes} bytes, not {expected}:\n{residuals}"
            )
        return
    left = collections.Counter(expected)
    extra = []
    for row in kept:
        times = f"{row.times} x " if row.times > 1 else ""
        forms = [f"{name} {times}{row.type}" for name in row.names] + [*row.names, times + row.type]
        found = next((form for form in forms if left[form] > 0), None)
        if found is None:
            extra.append(forms[0])
        else:
            left[found] -= 1
    missing = sorted((+left).elements())
    if extra or missing:
        raise AssertionError(
            f"{name_of(fun)} keeps, unexpectedly, {extra or 'nothing'}, and does not keep {missing or 'nothing else'}:\n"
            f"{residuals}"
        )


class count_traces(Wrapper):
    """A function that counts how often its Python body is run.

    Use it on a function or, in a class body, on a method. Under a transform that traces, a run is a trace.

    Attributes:
        count: how often the body was run.

    Example:
        >>> import jax.numpy as jnp, statetx
        >>> f = statetx.testing.count_traces(lambda x: x * 2)
        >>> g = statetx.jit(statetx.grad(statetx.remat(f)))
        >>> _ = g(1.0), g(2.0)
        >>> f.count
        1
    """

    def __init__(self, fun: Callable):
        super().__init__(fun, {})
        self.count = 0

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        self.count += 1
        return self.__wrapped__(*args, **kwargs)
