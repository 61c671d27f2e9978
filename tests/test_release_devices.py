"""Gradients of a loss in a `jax.shard_map` are released: updates from outside move into it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import statetx

L, D, B = 8, 64, 16
WEIGHTS = jax.random.normal(jax.random.key(0), (L, D, D)) / D
X = jax.random.normal(jax.random.key(1), (B, D))
P = jax.P
MESH = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
place = lambda x, *spec: jax.device_put(x, jax.NamedSharding(MESH, P(*spec)))


def gathered(x, w):
    """A layer whose weights are divided among the devices."""
    w = jax.lax.all_gather(w, "d", axis=0, tiled=True)
    return x + jnp.tanh(x @ w), None


def layer(x, w):
    return x + jnp.tanh(x @ w), None


def on_device(layer, ws, x):
    y, _ = jax.lax.scan(jax.checkpoint(layer), x, ws)
    return jax.lax.pmean(jnp.mean(y**2), "d")


LAYOUTS = {"fsdp": (gathered, (None, "d")), "replicated": (layer, ())}


def loss_of(layout, **options):
    layer, spec = LAYOUTS[layout]
    in_specs = P(*spec), P("d")
    return jax.shard_map(functools.partial(on_device, layer), mesh=MESH, in_specs=in_specs, out_specs=P(), **options)


def outside(layout, optimizer, **options):
    """The gradient of a loss in a shard_map, and the update outside of it."""
    loss = loss_of(layout, **options)

    def step(state, x):
        weights, moments = state
        value, gradient = jax.value_and_grad(loss)(weights, x)
        updates, moments = optimizer.update(gradient, moments, weights)
        return (optax.apply_updates(weights, updates), moments), value

    return step


def inside(layout, optimizer, **options):
    """All of the step in a shard_map."""
    layer, spec = LAYOUTS[layout]

    def on_shards(state, x):
        weights, moments = state
        value, gradient = jax.value_and_grad(lambda w: on_device(layer, w, x))(weights)
        updates, moments = optimizer.update(gradient, moments, weights)
        return (optax.apply_updates(weights, updates), moments), value

    like = jax.eval_shape(lambda w: (w, optimizer.init(w)), WEIGHTS)
    specs = jax.tree.map(lambda x: P(*spec) if x.shape else P(), like)
    return jax.shard_map(on_shards, mesh=MESH, in_specs=(specs, P("d")), out_specs=(specs, P()), **options)


def trained(step, spec, optimizer, release, steps=5):
    """The jitted step, and the state after some steps."""
    weights = place(WEIGHTS.copy(), *spec)
    state = weights, jax.tree.map(lambda x: place(x, *(spec if x.ndim else ())), optimizer.init(weights))
    jitted = statetx.jit(step, donate_argnums=0, release_gradients=release)
    traced, x = jitted.trace(state, place(X, "d")), place(X, "d")
    size = traced.lower().compile().memory_analysis().temp_size_in_bytes
    values = []
    for _ in range(steps):
        state, value = jitted(state, x)
        values.append(value)
    return traced.gradients, size, (state, values)


OPTIMIZERS = {"sgd": optax.sgd(0.1), "momentum": optax.sgd(0.1, momentum=0.9), "adamw": optax.adamw(1e-2)}


@pytest.mark.parametrize("make", [outside, inside])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_updates_move_into_the_loop_of_each_device(make, layout, name):
    optimizer, spec = OPTIMIZERS[name], LAYOUTS[layout][1]
    runs = [trained(make(layout, optimizer), spec, optimizer, release) for release in (False, True)]
    (_, plain_bytes, plain), ((told,), num_bytes, released) = runs
    assert "are used up in the loop of the backward pass" in told
    jax.tree.map(np.testing.assert_array_equal, plain, released)
    jax.tree.map(lambda a, b: a.sharding.is_equivalent_to(b.sharding, a.ndim) or pytest.fail(), plain, released)
    if name == "sgd":
        assert num_bytes <= plain_bytes - 0.9 * WEIGHTS.nbytes / (8 if layout == "fsdp" else 1)
