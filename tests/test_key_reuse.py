"""JAX's checker of key reuse, with random states."""

import contextlib

import jax
import pytest

import statetx


@contextlib.contextmanager
def checked():
    jax.config.update("jax_debug_key_reuse", True)
    try:
        yield
    finally:
        jax.config.update("jax_debug_key_reuse", False)


@pytest.mark.parametrize(
    "wrap",
    [lambda f: f, statetx.jit, lambda f: lambda: statetx.jit(statetx.grad(statetx.remat(lambda c: c * f())))(1.0)],
)
@pytest.mark.parametrize("is_drawn", [True, False])
def test_two_uses_of_the_key_of_a_random_state_are_reported(wrap, is_drawn):
    rng = statetx.RngState(0)
    key = rng.next if is_drawn else lambda: rng.value
    with checked(), contextlib.nullcontext() if is_drawn else pytest.raises(jax.errors.KeyReuseError):
        wrap(lambda: jax.random.normal(key()) + jax.random.normal(key()))()


def test_key_reuse_within_a_step_raises():
    def body(c, key):
        return c * jax.random.normal(key) * jax.random.uniform(key), None

    with checked(), pytest.raises(jax.errors.KeyReuseError):
        keys = jax.random.split(jax.random.key(0), 6)
        statetx.grad(lambda c: statetx.scan(body, c, keys)[0])(1.0)
