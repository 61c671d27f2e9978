"""Loops that run steps again, with JAX's checker of key reuse on."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import statetx
from statetx.policies import Levels, Slots


@contextlib.contextmanager
def checked():
    jax.config.update("jax_debug_key_reuse", True)
    try:
        yield
    finally:
        jax.config.update("jax_debug_key_reuse", False)


class Noisy:
    def __init__(self):
        self.rng = statetx.RngState(0)

    def __call__(self, x):
        return x * jax.random.normal(self.rng.next())


def over_keys(checkpoint):
    keys = jax.random.split(jax.random.key(0), 6)
    return lambda c: statetx.scan(lambda c, k: (c * jax.random.normal(k), k), c, keys, checkpoint=checkpoint)[0]


def of_state(checkpoint):
    rng = statetx.RngState(3)
    body = lambda c, _: (c * jax.random.normal(rng.next()), None)
    return lambda c: statetx.scan(body, c, None, 6, checkpoint=checkpoint)[0]


def key_carried(checkpoint):
    def body(c, _):
        key, sub = jax.random.split(c[1])
        return (c[0] * jax.random.normal(sub), key), None

    return lambda c: statetx.scan(body, (c, jax.random.key(5)), None, 6, checkpoint=checkpoint)[0][0]


def of_while(checkpoint):
    def body(c):
        key, sub = jax.random.split(c[1])
        return c[0] * jax.random.normal(sub), key, c[2] + 1

    start = lambda c: (c, jax.random.key(5), 0)
    return lambda c: statetx.while_loop(lambda c: c[2] < 6, body, start(c), checkpoint=checkpoint)[0]


def of_layers(checkpoint):
    return statetx.remat_scan(statetx.stack(Noisy, 6), checkpoint)


LOOPS = {
    "keys, Slots": (over_keys, 2),
    "keys, Levels": (over_keys, Levels(2)),
    "keys, size": (over_keys, statetx.policies.Budget("64KiB")),
    "state, Slots": (of_state, Slots(3)),
    "state, Levels": (of_state, Levels(2)),
    "carry, Slots": (key_carried, Slots(2)),
    "carry, Levels": (key_carried, Levels(2)),
    "while_loop": (of_while, Slots(2)),
    "layers": (of_layers, (2, 3)),
}
# Each program has a fast case, and each strategy.
SLOW = ("keys, Levels", "state, Slots", "carry, Levels")


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


@pytest.mark.sample
@pytest.mark.parametrize("wrap", [pytest.param(lambda f: f, marks=pytest.mark.slow), statetx.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in LOOPS])
def test_recomputed_step_is_not_key_reuse(name, wrap):
    make, checkpoint = LOOPS[name]
    wanted = wrap(statetx.value_and_grad(make(checkpoint)))(jnp.float32(1.0))
    with checked():
        got = wrap(statetx.value_and_grad(make(checkpoint)))(jnp.float32(1.0))
    np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("checkpoint", [None, Slots(2), Levels(2)], ids=str)
def test_key_reuse_within_a_step_raises(checkpoint):
    def body(c, key):
        return c * jax.random.normal(key) * jax.random.uniform(key), None

    with checked(), pytest.raises(jax.errors.KeyReuseError):
        keys = jax.random.split(jax.random.key(0), 6)
        statetx.grad(lambda c: statetx.scan(body, c, keys, checkpoint=checkpoint)[0])(1.0)
