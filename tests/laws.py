"""Helpers of the laws: trees compared leaf by leaf, and transforms of programs.

A nesting is a tuple of the transforms below. `transformed` applies it to a program's step, by the program's own `api`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import statetx
from corpus import Program
from helpers import WORDS

# -- trees -----------------------------------------------------------------------------------------------------


def is_array(x: Any) -> bool:
    return isinstance(x, (jax.Array, np.ndarray, np.generic))


def is_float(x: Any) -> bool:
    return is_array(x) and jnp.issubdtype(x.dtype, jnp.inexact)


def is_key(x: Any) -> bool:
    return is_array(x) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def scalar(out: Any) -> jax.Array:
    """A number that depends on every float of the output, each in a different way."""
    floats = [leaf for leaf in jax.tree.leaves(out) if is_float(leaf)]
    return sum(jnp.sum(jnp.sin(0.7 * leaf + i)) for i, leaf in enumerate(floats))  # type: ignore[return-value]


def numbers_of(out: Any) -> list:
    return [leaf for leaf in jax.tree.leaves(out) if is_array(leaf) or isinstance(leaf, (int, float))]


def cotangents(out: Any) -> Any:
    """A cotangent for an output: different for each entry, float0 for integers; other leaves unchanged."""

    def cotangent(leaf: Any) -> Any:
        if is_float(leaf):
            return (0.3 + 0.1 * jnp.arange(leaf.size, dtype=leaf.dtype)).reshape(leaf.shape)
        return np.zeros(np.shape(leaf), jax.dtypes.float0) if is_array(leaf) or isinstance(leaf, int) else leaf

    return jax.tree.map(cotangent, out, is_leaf=lambda x: isinstance(x, type))


def assert_same(actual: Any, expected: Any, *, tolerance: float = 1e-10, weak: bool = True, where: str = "") -> None:
    """Equal structure, types and values; Python numbers may have become arrays."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected), where
    paths = [jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_flatten_with_path(expected)[0]]
    for path, a, e in zip(paths, jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert not isinstance(a, jax.core.Tracer), f"{where}{path}: {a}"
        if not (is_array(e) or isinstance(e, (int, float))):
            assert a is e or a == e, f"{where}{path}"
            continue
        if isinstance(e, jax.Array):
            assert isinstance(a, jax.Array), f"{where}{path}: a {type(a).__name__} instead of an array"
        ta, te = jax.typeof(jnp.asarray(a)), jax.typeof(jnp.asarray(e))
        assert (ta.shape, ta.dtype) == (te.shape, te.dtype), f"{where}{path}: {ta} instead of {te}"
        if weak:
            assert ta.weak_type == te.weak_type, f"{where}{path}: weak type {ta.weak_type}"
        if is_key(e):
            a, e = jax.random.key_data(a), jax.random.key_data(e)
        a, e = np.asarray(a), np.asarray(e)
        if is_float(e) and tolerance:
            scale = max(1.0, float(np.max(np.abs(e), initial=0)))
            np.testing.assert_allclose(a, e, rtol=0, atol=tolerance * scale, err_msg=f"{where}{path}")
        else:
            np.testing.assert_array_equal(a, e, err_msg=f"{where}{path}")


def assert_no_tracer(program: Program) -> None:
    for name, state in program.cells().items():
        for leaf in jax.tree.leaves(state.value):
            assert not isinstance(leaf, jax.core.Tracer), f"{name} holds {leaf}"


# -- transforms: statetx's, or the reference's ------------------------------------------------------------------

Stateful = Callable[[jax.Array], Any]


def remat(f: Stateful, program: Program) -> Stateful:
    return program.api.remat(f)


def stored(f: Stateful, program: Program) -> Stateful:
    """`remat` that stores each float of the function and its arguments in another form."""
    return program.api.remat(f, policy=statetx.policies.everything.stored_as(WORDS), inputs_stored_as=WORDS)


def gated(f: Callable, x: jax.Array) -> Any:
    """The function, of which a residual is 0 or 1: the gate."""
    gate = (x > 0).astype(x.dtype)
    return f(jnp.sin(x) * gate + 0.5 * x * (1 - gate))


def packed(f: Stateful, program: Program) -> Stateful:
    """`remat` that stores values that are 0 or 1 as bits."""
    policy = statetx.policies.everything.stored_as("bits") | statetx.policies.masks
    return program.api.remat(lambda x: gated(f, x), policy=policy)


def jit(f: Stateful, program: Program) -> Stateful:
    return program.api.jit(f)


def grad(f: Stateful, program: Program) -> Stateful:
    targets = program.targets()

    def loss(x):
        out = f(x)
        return scalar(out), out

    def gradients(x):
        if targets:
            (value, out), (of_states, of_x) = program.api.value_and_grad(loss, 0, wrt=targets, has_aux=True)(x)
        else:
            (value, out), of_x = program.api.value_and_grad(loss, has_aux=True)(x)
            of_states = {}
        return {"value": value, "out": out, "of_states": of_states, "of_x": of_x}

    return gradients


def vjp(f: Stateful, program: Program) -> Stateful:
    targets = program.targets()

    def pulled(x):
        out, pullback = program.api.vjp(f, x, wrt=targets or None)
        grads = pullback(cotangents(out))
        of_states, (of_x,) = grads if targets else ({}, grads)
        return {"out": out, "of_states": of_states, "of_x": of_x}

    return pulled


def elements(x: jax.Array) -> jax.Array:
    return jnp.stack([x, 0.5 * x, x + 0.25])


def scan(f: Stateful, program: Program) -> Stateful:
    def body(c, x):
        out = f(x + 0.1 * jnp.sin(c))
        return 0.5 * c + 0.1 * scalar(out), numbers_of(out)

    return lambda x: program.api.scan(body, jnp.asarray(0.5, x.dtype), elements(x))


# A carry with more numbers than a step keeps, and as many that are 0 or 1.
WEIGHTS = np.linspace(-1, 1, 64)


def slots_step(f: Callable, carry: Any, x: jax.Array) -> tuple[Any, Any]:
    h, spikes = carry
    out = f(x + 0.1 * jnp.sin(h.mean()) + 0.1 * spikes.mean())
    h = 0.5 * h + 0.1 * scalar(out) * jnp.asarray(WEIGHTS, h.dtype)
    return (h, (h > 0.01).astype(h.dtype)), out


def slots_init(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return jnp.asarray(WEIGHTS, x.dtype), jnp.full(64, 0.25, x.dtype)  # no 0 or 1 yet


def slots(f: Stateful, program: Program) -> Stateful:
    """A loop that is reversed from two slots: carries, the second half of them as bits, and what steps keep."""
    policy = statetx.policies.everything.stored_as("bits")

    def body(carry, x):
        carry, out = slots_step(f, carry, x)
        return carry, numbers_of(out)

    checkpoint = statetx.policies.Slots(2, policy=policy)
    return lambda x: program.api.scan(body, slots_init(x), elements(x), checkpoint=checkpoint)


LOOPS = (scan, slots)

Nesting = tuple[Callable, ...]  # from the inside out


def transformed(nesting: Nesting, f: Stateful, program: Program) -> Stateful:
    for op in nesting:
        f = op(f, program)
    return f


def name_of(nesting: Nesting) -> str:
    name = "step"
    for op in nesting:
        name = f"{op.__name__}({name})"
    return name
