"""Gradients of a loss in a `jax.shard_map` are released: updates from outside move into it."""

import functools
import os
import subprocess
import sys

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


MAKERS = [outside, inside]
OPTIMIZERS = {"sgd": optax.sgd(0.1), "momentum": optax.sgd(0.1, momentum=0.9), "adamw": optax.adamw(1e-2)}


def sizes_of(layout):
    """Bytes of the weights on a device."""
    return WEIGHTS.nbytes / (8 if layout == "fsdp" else 1)


@pytest.mark.sample
@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_updates_move_into_the_loop_of_each_device(make, layout, name):
    """In the last bits of Adam's moments, XLA may contract another product to a multiply-add."""
    optimizer, spec = OPTIMIZERS[name], LAYOUTS[layout][1]
    runs = [trained(make(layout, optimizer), spec, optimizer, release) for release in (False, True)]
    (_, plain_bytes, plain), ((told,), num_bytes, released) = runs
    assert "are used up in the loop of the backward pass" in told
    if name == "adamw":
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), plain, released)
    else:
        jax.tree.map(np.testing.assert_array_equal, plain, released)
    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(released), strict=True):
        assert a.sharding.is_equivalent_to(b.sharding, a.ndim)
    if name == "sgd":
        assert num_bytes <= plain_bytes - 0.9 * sizes_of(layout)


def differing(make, layout):
    """The entries of weights and moments of AdamW that differ after five steps with and without the release."""
    optimizer = OPTIMIZERS["adamw"]
    runs = [trained(make(layout, optimizer), LAYOUTS[layout][1], optimizer, release)[2] for release in (False, True)]
    return sum(int((np.asarray(a) != np.asarray(b)).sum()) for a, b in zip(*map(jax.tree.leaves, runs), strict=True))


@pytest.mark.slow
def test_updates_have_equal_bits_where_nothing_is_contracted():
    code = (
        "import test_release_devices as t; print([t.differing(make, name) for make in t.MAKERS for name in t.LAYOUTS])"
    )
    flags = "--xla_cpu_max_isa=AVX --xla_force_host_platform_device_count=8"
    env = {**os.environ, "XLA_FLAGS": flags, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str([0] * 4)


def momentum(state, x):
    """By hand, for weights on every device."""
    weights, moment = state
    moment = 0.9 * moment + jax.grad(loss_of("replicated"))(weights, x)
    return weights - 0.1 * moment, moment


def test_moments_that_are_divided_otherwise_stay_outside():
    """In the loop, each device would gather what the others have of them."""
    refusal = r"they leave jax.shard_map, and mul at .*test_release_devices.py.* divided otherwise"
    state = place(WEIGHTS.copy()), place(WEIGHTS, None, "d")
    with pytest.raises(statetx.FunctionError, match=refusal):
        statetx.jit(momentum, donate_argnums=0, release_gradients=True).trace(state, X)
    state = WEIGHTS, WEIGHTS  # JAX puts them where the program needs them
    (told,) = statetx.jit(momentum, donate_argnums=0, release_gradients=True).trace(state, X).gradients
    assert "are used up" in told


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_norm_of_each_layer_needs_whole_layers(layout):
    def step(weights, x):
        gradient = jax.grad(loss_of(layout))(weights, x)
        return weights - 0.1 * gradient / jnp.linalg.norm(gradient, axis=(1, 2), keepdims=True)

    plain, released = (statetx.jit(step, donate_argnums=0, release_gradients=r) for r in (False, None))
    weights = lambda: place(WEIGHTS.copy(), *LAYOUTS[layout][1])
    (told,) = released.trace(weights(), X).gradients
    assert ("reduce_sum at" in told and "mixes shards" in told) if layout == "fsdp" else "are used up" in told
    np.testing.assert_allclose(plain(weights(), X), released(weights(), X), rtol=1e-6, atol=1e-7)


def test_an_array_of_one_number_has_the_shape_of_a_shard():
    """Divided along the last axis."""
    loss = jax.shard_map(
        lambda ws, x: on_device(
            lambda x, w: (x + jnp.tanh(x @ jax.lax.all_gather(w, "d", axis=1, tiled=True)), None), ws, x
        ),
        mesh=MESH,
        in_specs=(P(None, None, "d"), P("d")),
        out_specs=P(),
    )

    def step(weights, x, rate):
        gradient = jax.grad(loss)(weights, x)
        return weights - jax.lax.broadcast(rate, gradient.shape) * gradient

    plain, released = (statetx.jit(step, donate_argnums=0, release_gradients=r) for r in (False, True))
    weights = lambda: place(WEIGHTS.copy(), None, None, "d")
    np.testing.assert_array_equal(plain(weights(), X, 0.1), released(weights(), X, 0.1))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_of_parts_are_added_on_each_device(layout):
    loss = jax.value_and_grad(loss_of(layout))

    def by_hand(weights, x):
        def part(sums, x):
            return jax.tree.map(lambda s, g: s + 0.5 * g, sums, loss(weights, x)), None

        zeros = jnp.zeros(()), jnp.zeros_like(weights)
        return jax.lax.scan(part, zeros, x.reshape(2, B // 2, D))[0]

    weights = place(WEIGHTS, *LAYOUTS[layout][1])
    programs = [jax.jit(f).lower(weights, X).compile() for f in (by_hand, statetx.microbatch(loss, 2, argnums=1))]
    plain_bytes, num_bytes = (program.memory_analysis().temp_size_in_bytes for program in programs)
    assert num_bytes <= plain_bytes - 0.9 * sizes_of(layout)
    jax.tree.map(np.testing.assert_array_equal, *[program(weights, X) for program in programs])


def test_gradients_that_are_summed_later_are_kept():
    """Each device has one of the terms: an update of a shard would be of a term alone."""
    mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Explicit,))

    def terms(ws, x):
        def loss(ws):
            return jnp.sum(jax.lax.scan(jax.checkpoint(layer), x, ws)[0] ** 2)

        return jax.lax.pcast(jax.grad(loss)(jax.lax.pcast(ws, "d", to="varying")), "d", to="unreduced")

    with jax.set_mesh(mesh):
        gradient = jax.shard_map(terms, in_specs=(P(), P("d")), out_specs=P(unreduced={"d"}))
        step = lambda ws, x: ws - 0.1 * jax.reshard(gradient(ws, x), P())
        plain, released = (statetx.jit(step, donate_argnums=0, release_gradients=r) for r in (False, None))
        weights, x = lambda: jax.device_put(WEIGHTS.copy(), P()), jax.device_put(X, P("d"))
        (told,) = released.trace(weights(), x).gradients
        assert "are kept: vary_unreduced_cast" in told
        np.testing.assert_array_equal(plain(weights(), x), released(weights(), x))


def test_gradients_of_parts_that_are_summed_later_are_kept():
    """JAX takes no rows of a sum whose terms are on several devices: what adds such gradients stays outside."""
    mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Explicit,))

    def loss(ws, x):
        return jnp.sum(jax.lax.scan(lambda h, w: (h @ w, None), x, ws)[0])

    def step(ws, xs):
        def part(total, x):
            return total + jax.grad(loss)(ws, x), None

        total = jax.reshard(jnp.zeros_like(ws), P(unreduced={"d"}))
        total = jax.lax.scan(part, total, xs)[0]
        return jax.reshard(ws, P()) - 0.01 * jax.reshard(total, P())

    with jax.set_mesh(mesh):
        ws = jax.device_put(WEIGHTS, P(reduced={"d"}))
        xs = jax.device_put(X.reshape(2, B // 2, D), P(None, "d"))
        expected = jax.jit(step)(ws, xs)
        np.testing.assert_array_equal(statetx.jit(step, donate_argnums=0)(ws, xs), expected)
