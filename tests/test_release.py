"""Consumers of stacked gradients move into the loop of the backward pass."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import statetx
from statetx import policies

L, D, B, K = 8, 64, 16, 4
WEIGHTS = jax.random.normal(jax.random.key(0), (L, D, D)) / D
X = jax.random.normal(jax.random.key(1), (B, D))


def layer(x, w):
    return x + jnp.tanh(x @ w.astype(x.dtype))


def scanned(layer=layer, **options):
    def loss(ws, x):
        y, _ = statetx.scan(lambda x, w: (layer(x, w), None), x, ws, **options)
        return jnp.mean(y**2)

    return loss


def twice(ws, x):
    """Each layer is used in two places."""
    run = lambda x: statetx.scan(lambda x, w: (statetx.remat(layer)(x, w), None), x, ws)[0]
    return jnp.mean(run(run(x)) ** 2)


LOSSES = {
    "scan": scanned(),
    "remat": scanned(statetx.remat(layer)),
    "jax.checkpoint": scanned(jax.checkpoint(layer)),
    "levels": scanned(checkpoint=policies.Levels(2)),
    "whole": statetx.remat(scanned()),
    "jitted": jax.jit(scanned(statetx.remat(layer))),
}


def by_hand(loss, ws, x):
    """The loop over parts that `microbatch` has; its turns hold a set of gradients beside the sums."""

    def part(sums, x):
        outs = jax.value_and_grad(loss)(ws, x)
        return jax.tree.map(lambda s, g: s + (g.astype(s.dtype) * 0.25).astype(s.dtype), sums, outs), None

    zeros = jnp.zeros(()), jnp.zeros(ws.shape, jnp.float32)
    (value, gradient), _ = jax.lax.scan(part, zeros, x.reshape(K, B // K, D))
    return value, gradient.astype(ws.dtype)


def sets(fun, *args):
    """Temporaries in sets of weights."""
    return jax.jit(fun).lower(*args).compile().memory_analysis().temp_size_in_bytes / WEIGHTS.nbytes


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_of_parts_are_added_in_one_set(name):
    """The output is the other set; by hand a turn has a third."""
    loss = LOSSES[name]
    step = statetx.microbatch(jax.value_and_grad(loss), K, argnums=1)
    plain = lambda ws, x: by_hand(loss, ws, x)
    gain = 0.3 if name == "whole" else 0.85  # the fence of a region is a branch, which copies the sums
    assert sets(step, WEIGHTS, X) <= sets(plain, WEIGHTS, X) - gain
    jax.tree.map(np.testing.assert_array_equal, jax.jit(step)(WEIGHTS, X), jax.jit(plain)(WEIGHTS, X))
    jax.tree.map(np.testing.assert_array_equal, step(WEIGHTS, X), jax.jit(plain)(WEIGHTS, X))
