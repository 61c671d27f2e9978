"""Consumers of stacked gradients move into the loop of the backward pass."""

import functools
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import statetx
from helpers import assert_close, num_operations
from statetx import policies
from statetx._equations.release.rewriting import Release

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


def layers(ws, x):
    return statetx.scan(lambda x, w: (statetx.remat(layer)(x, w), None), x, ws)[0]


LOSSES = {
    "slots": scanned(checkpoint=policies.Slots(3)),
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


@pytest.mark.sample
@pytest.mark.parametrize("name", LOSSES)
def test_gradients_of_parts_are_added_in_one_set(name):
    """The output is the other set; by hand a turn has a third."""
    loss = LOSSES[name]
    step = statetx.microbatch(jax.value_and_grad(loss), K, argnums=1)
    plain = lambda ws, x: by_hand(loss, ws, x)
    most = sets(plain, WEIGHTS, X) - 0.85
    assert sets(step, WEIGHTS, X) <= (1.05 if name == "whole" else most), "a fence is a branch, which copies the sums"
    jax.tree.map(np.testing.assert_array_equal, jax.jit(step)(WEIGHTS, X), jax.jit(plain)(WEIGHTS, X))
    jax.tree.map(np.testing.assert_array_equal, step(WEIGHTS, X), jax.jit(plain)(WEIGHTS, X))


# -- updates ---------------------------------------------------------------------------------------------------------


def muon(**options):
    """Muon on the matrix of each layer."""
    of_layers = lambda params: jax.tree.map(lambda _: optax.contrib.MuonDimensionNumbers(1, 2), params)
    return optax.contrib.muon(1e-3, muon_weight_dimension_numbers=of_layers, **options)


OPTIMIZERS = {
    "parts": lambda: optax.MultiSteps(optax.adam(1e-2), 2).gradient_transformation(),
    "sgd": lambda: optax.sgd(0.1),
    "momentum": lambda: optax.sgd(0.1, momentum=0.9),
    "adam": lambda: optax.adam(1e-2),
    "adamw": lambda: optax.adamw(optax.cosine_decay_schedule(1e-2, 10)),
    "lion": lambda: optax.lion(1e-3),
    "ema": lambda: optax.chain(optax.adam(1e-2), optax.ema(0.9)),
    "muon": muon,
}


def training(name, **options):
    """A step that trains scanned layers, and its states."""
    w = statetx.Param(WEIGHTS.copy())
    optimizer = statetx.Optimizer(OPTIMIZERS[name](), [w])

    @statetx.jit(donate_states=True, **options)
    def step(x):
        value, grads = statetx.value_and_grad(lambda x: scanned(statetx.remat(layer))(w.value, x), wrt=[w])(x)
        optimizer.update(grads)
        return value

    return step, optimizer


def leaves(step, optimizer, steps=5):
    values = [step(X) for _ in range(steps)]
    return jax.tree.leaves([values, [s.value for s in statetx.states(optimizer).values()]])


def differing(name):
    """The entries of weights and moments that differ after five steps with and without the release."""
    runs = [leaves(*training(name, release_gradients=release)) for release in (False, True)]
    return sum(int((np.asarray(a) != np.asarray(b)).sum()) for a, b in zip(*runs, strict=True))


@pytest.mark.thorough
def test_a_step_without_moments_has_no_set_of_gradients():
    profile = statetx.memory_profile(training("sgd")[0], X)
    plain = training("sgd", release_gradients=False)[0].lower(X)
    assert profile.temp_bytes <= plain.compile().memory_analysis().temp_size_in_bytes - 0.9 * WEIGHTS.nbytes
    assert plain.gradients == () and "are used up in the loop of the backward pass" in profile.gradients[0]
    assert "are used up" in str(profile)
    assert differing("sgd") == 0


@pytest.mark.sample
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_updates_of_each_layer_move_into_the_loop(name):
    step, _ = training(name, release_gradients=True)
    (told,) = step.trace(X).gradients
    assert "are used up" in told
    plain, released = (leaves(*training(name, release_gradients=r), steps=2) for r in (False, True))
    assert_close(plain, released, rtol=2e-5, atol=1e-6)


def biased(p, x):
    """Layers with two arrays."""
    return jnp.mean(jax.lax.scan(lambda x, p: (jnp.tanh(x @ p["w"] + p["b"][None]), None), x, p)[0] ** 2)


BIASED = {"w": WEIGHTS, "b": WEIGHTS[0, :L]}


def biased_training(release):
    """Adam, whose correction of the moments is a number that both arrays are divided by."""
    optimizer = optax.adam(1e-2)

    def update(state, x):
        value, grads = jax.value_and_grad(biased)(state[0], x)
        updates, moments = optimizer.update(grads, state[1])
        return (optax.apply_updates(state[0], updates), moments), value

    step = statetx.jit(update, donate_argnums=0, release_gradients=release)
    state = jax.tree.map(jnp.copy, (BIASED, optimizer.init(BIASED)))
    for _ in range(5):
        state, value = step(state, X)
    return jax.tree.leaves((state, value))


divided = jax.jit(lambda x, n: jnp.sin(x) / n)
QUOTIENTS = {
    "of one array": lambda w, b, n: (w / n, jnp.sin(b)),
    "of two arrays": lambda w, b, n: (w / n, b / n),
    "and a product": lambda w, b, n: (w / n, b * n),
    "in a call": lambda w, b, n: (divided(w, n), jnp.sin(b)),
    "in two calls": lambda w, b, n: (divided(w, n), divided(b, n)),
    "in a branch": lambda w, b, n: (jax.lax.cond(True, divided, lambda w, n: w, w, n), jnp.sin(b)),
    "in a loop": lambda w, b, n: (jax.lax.scan(lambda w, _: (w / n, None), w, None, length=2)[0], jnp.sin(b)),
    "of each step": lambda w, b, n: (jax.lax.scan(lambda w, k: (w / (k + n), None), w, jnp.ones(2))[0], jnp.sin(b)),
}


@pytest.mark.parametrize("name", QUOTIENTS)
@pytest.mark.parametrize("n", [jnp.float32(3), 3.0], ids=["strong", "weak"])
def test_quotients_by_a_number_have_equal_bits(name, n):
    """XLA multiplies by the reciprocal of a number that nothing else reads, and divides by another."""

    def step(p, x, n):
        grads = jax.grad(biased)(p, x)
        return dict(zip("wb", QUOTIENTS[name](grads["w"], grads["b"], n), strict=True))

    plain, released = (statetx.jit(step, donate_argnums=0, release_gradients=release) for release in (False, True))
    copies = lambda: jax.tree.map(jnp.copy, BIASED)
    jax.tree.map(np.testing.assert_array_equal, plain(copies(), X, n), released(copies(), X, n))


@pytest.mark.slow
def test_updates_have_equal_bits_where_nothing_is_contracted():
    """XLA contracts one product of two that are added to a multiply-add; on a processor without it, none."""
    code = """
import test_release as t
runs = map(t.biased_training, (False, True))
print([t.differing(name) for name in t.OPTIMIZERS], sum(int((a != b).sum()) for a, b in zip(*runs, strict=True)))
"""
    env = {**os.environ, "XLA_FLAGS": "--xla_cpu_max_isa=AVX", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"{[0] * len(OPTIMIZERS)} 0"


def test_a_step_that_returns_constants():
    """A state that is reset to a constant is a literal in the equations, as is the gradient that optax keeps first."""
    w, phase = statetx.Param(WEIGHTS.copy()), statetx.State(jnp.array(2.0))

    @statetx.jit(donate_states=True)
    def step(x):
        value, gradient = statetx.value_and_grad(lambda x: scanned()(w.value, x), wrt=w)(x)
        w.value, phase.value = w.value - 0.1 * gradient, jnp.array(0.0)
        return value, 1

    value, one = step(X)
    assert (one, phase.value) == (1, 0) and scanned()(w.value, X) < value
    assert "are used up" in step.lower(X).gradients[0]


def test_moments_are_left_on_cpus():
    """XLA there computes the outputs one by one, and copies the moments that they share."""
    step, _ = training("adam")
    assert "on CPUs an update by moments copies these" in step.trace(X).gradients[0]


def clipped(bound):
    """Optimizers whose updates need the norm of all gradients."""
    clip = optax.clip_by_global_norm(bound)
    return {"clip+sgd": optax.chain(clip, optax.sgd(0.1)), "clip+adamw": optax.chain(clip, optax.adamw(1e-2))}


def test_a_global_norm_needs_all_gradients(monkeypatch):
    """Where nobody asks for it, no operation is added."""
    monkeypatch.setitem(OPTIMIZERS, "clip", lambda: clipped(1.0)["clip+sgd"])
    step, _ = training("clip")
    assert "as for clipping by a global norm, needs them first (reduce_sum at" in step.trace(X).gradients[0]
    runs = [leaves(*training("clip", release_gradients=release)) for release in (False, None)]
    jax.tree.map(np.testing.assert_array_equal, *runs)


@pytest.mark.sample
@pytest.mark.parametrize("name", clipped(1.0))
@pytest.mark.parametrize("bound", [1e-3, 1e3])
def test_clipping_by_a_global_norm_runs_the_loop_twice(monkeypatch, name, bound):
    """The sum of squares has another order. Where nothing is clipped, it does not matter."""
    monkeypatch.setitem(OPTIMIZERS, name, lambda: clipped(bound)[name])
    (plain, _), (step, _) = (training(name, release_gradients=release) for release in (False, True))
    (told,) = step.trace(X).gradients
    assert "runs twice: the first time for a number that is computed from all layers (reduce_sum at" in told
    runs = [leaves(*training(name, release_gradients=release)) for release in (False, True)]
    if name == "clip+sgd" and bound > 1:
        jax.tree.map(np.testing.assert_array_equal, *runs)
    else:
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), *runs)
    if name == "clip+sgd":
        temporaries = [f.lower(X).compile().memory_analysis().temp_size_in_bytes for f in (plain, step)]
        assert temporaries[1] <= temporaries[0] - 0.9 * WEIGHTS.nbytes


def nnx_training(release):
    """`nnx.scan`, `nnx.value_and_grad` and `nnx.Optimizer`."""

    class Block(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(D, D, use_bias=False, rngs=rngs)

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.blocks = nnx.split_rngs(splits=L)(nnx.vmap(Block, in_axes=0, out_axes=0))(rngs)

        def __call__(self, x):
            return nnx.scan(lambda x, b: x + jnp.tanh(b.linear(x)), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(
                x, self.blocks
            )

    net = Net(nnx.Rngs(0))
    optimizer = nnx.Optimizer(net, clipped(1e-2)["clip+adamw"], wrt=nnx.Param)

    @statetx.jit(donate_states=True, release_gradients=release)
    def step(x):
        value, grads = nnx.value_and_grad(lambda net: jnp.mean(net(x) ** 2))(net)
        optimizer.update(net, grads)
        return value

    return step, lambda: nnx.state((net, optimizer))


def by_hand_training(release):
    """Optax alone."""
    optimizer = clipped(1e-2)["clip+adamw"]
    state = [WEIGHTS.copy(), optimizer.init(WEIGHTS)]

    @functools.partial(statetx.jit, donate_argnums=0, release_gradients=release)
    def update(state, x):
        value, grads = jax.value_and_grad(LOSSES["scan"])(state[0], x)
        updates, moments = optimizer.update(grads, state[1], state[0])
        return [optax.apply_updates(state[0], updates), moments], value

    def step(x):
        state[:], value = update(state, x)
        return value

    step.trace = lambda x: update.trace(state, x)
    return step, lambda: state


@pytest.mark.sample
@pytest.mark.parametrize("train", [nnx_training, by_hand_training])
def test_clipping_in_steps_of_others(train):
    runs = []
    for release in (False, True):
        step, state = train(release)
        if release:
            assert "runs twice" in step.trace(X).gradients[0]
        runs.append([step(X), step(X), jax.tree.leaves(state())])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), *runs)


@pytest.mark.parametrize(("examples", "factor"), [(B // 2, 1.3), (B, 1.8)])
def test_the_second_run_computes_rows_alone_from_little(monkeypatch, examples, factor):
    """From the cotangents of each layer, if these take at most an eighth of its weights; else it is a whole run."""
    monkeypatch.setitem(OPTIMIZERS, "clip", lambda: clipped(1e-3)["clip+sgd"])
    x = jax.random.normal(jax.random.key(2), (examples, D))
    steps = [training("clip", release_gradients=release)[0] for release in (False, True)]
    plain, twice = (num_operations(step.trace(x).jaxpr.jaxpr) for step in steps)
    assert factor - 0.2 < twice / plain < factor
    np.testing.assert_array_equal(*[step(x) for step in steps])
    np.testing.assert_allclose(*[step(x) for step in steps], rtol=1e-6)


def test_the_second_run_reads_the_carry_of_the_first():
    """The gradient of a linear layer is a product with it."""
    loss = scanned(jnp.matmul)

    def step(ws, x):
        gradient = jax.grad(loss)(ws, x)
        return ws - gradient / jnp.linalg.norm(gradient.ravel())

    plain, released = (statetx.jit(step, donate_argnums=0, release_gradients=release) for release in (False, True))
    args = 8 * WEIGHTS, X[: B // 2]
    plain_run, second = (num_operations(f.trace(*args).jaxpr.jaxpr) for f in (plain, released))
    assert second / plain_run < 1.5
    np.testing.assert_allclose(*[f(jnp.copy(args[0]), args[1]) for f in (plain, released)], rtol=1e-5, atol=1e-6)


def test_what_is_logged_of_all_gradients_needs_no_second_run():
    w = statetx.Param(WEIGHTS.copy())

    def step(x):
        grads = statetx.grad(lambda x: scanned()(w.value, x), wrt=w)(x)
        w.value -= 0.1 * grads
        return jnp.vdot(grads, grads), jnp.abs(grads).max()

    def run(release):
        w.value = WEIGHTS.copy()
        jitted = statetx.jit(step, donate_states=True, release_gradients=release)
        return jitted(X), w.value, jitted.trace(X).gradients

    (norm, largest), weights, _ = run(False)
    (other_norm, other_largest), other_weights, (told,) = run(True)
    assert "layer by layer." in told
    np.testing.assert_allclose(norm, other_norm, rtol=1e-6)
    np.testing.assert_array_equal(largest, other_largest)
    np.testing.assert_array_equal(weights, other_weights)


def test_two_stacks_are_clipped_by_one_norm():
    """The second loop of the backward pass needs the first, and both need the norm of all."""
    clip = optax.clip_by_global_norm(1e-3)

    def step(ws, x):
        grads = jax.grad(lambda ws: LOSSES["remat"](ws[1], jnp.tanh(layers(ws[0], x)) @ ws[2]))(ws)
        return jax.tree.map(lambda w, g: w - g, ws, clip.update(grads, clip.init(ws))[0])

    args = (WEIGHTS, WEIGHTS[::-1], WEIGHTS[0])
    plain, twice = (statetx.jit(step, donate_argnums=0, release_gradients=release) for release in (False, True))
    assert [("runs twice" in told) for told in twice.trace(args, X).gradients] == [True, True]
    copies = lambda: jax.tree.map(jnp.copy, args)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), plain(copies(), X), twice(copies(), X)
    )


def test_a_mean_of_layers_is_refused_with_its_line():
    def step(ws, x):
        grads = jax.grad(LOSSES["remat"])(ws, x)
        return ws - (grads - grads.mean(0, keepdims=True)) / jnp.linalg.norm(grads.ravel())

    refusal = r"release_gradients=True .*of ws .*reduce_sum at .*test_release.py.*\n.*jax.vmap"
    with pytest.raises(statetx.FunctionError, match=refusal):
        statetx.jit(step, donate_argnums=0, release_gradients=True).trace(WEIGHTS, X)


def of_layers(optimizer):
    """An optimizer that treats each layer alone."""
    return optax.GradientTransformation(jax.vmap(optimizer.init), jax.vmap(optimizer.update))


WHOLE = {
    "apply_if_finite": (lambda: optax.apply_if_finite(optax.sgd(0.1), 3), "reduce_and at .*_conditionality.py"),
    "adaptive clipping": (lambda: optax.chain(optax.adaptive_grad_clip(0.01), optax.sgd(0.1)), "reduce_sum at .*_clip"),
    "lamb": (lambda: optax.lamb(1e-3), "reduce_sum at .*numerics.py"),
    "lars": (lambda: optax.lars(1e-3), "reduce_sum at .*numerics.py"),
}


@pytest.mark.sample
@pytest.mark.parametrize("name", WHOLE)
def test_an_optimizer_of_all_layers_is_refused_with_a_way_out(monkeypatch, name):
    """To optax a stack is one array: a norm of a unit, or the ratio of a layer, would be that of all layers."""
    make, line = WHOLE[name]
    monkeypatch.setitem(OPTIMIZERS, "whole", make)
    refusal = rf"gradients of 8 layers of optimizer.states.0 .*{line}.*\nFix: .*jax.vmap\(optimizer.update\)"
    with pytest.raises(statetx.FunctionError, match=refusal):
        training("whole", release_gradients=True)[0].trace(X)
    monkeypatch.setitem(OPTIMIZERS, "whole", lambda: of_layers(make()))
    assert "are used up" in training("whole", release_gradients=True)[0].trace(X).gradients[0]
    plain, released = (leaves(*training("whole", release_gradients=r), steps=2) for r in (False, True))
    assert_close(plain, released, rtol=2e-5, atol=1e-6)


@pytest.mark.sample
@pytest.mark.parametrize("width", [4, 8])
def test_an_array_of_every_layer_with_as_many_rows_is_read_whole(width):
    """What computes it, row by row of its own, stays outside of the loop over layers."""
    key = jax.random.key(3)
    ws, x, mask = (jax.random.normal(key, shape) for shape in ((4, width, width), (2, width), (width, width)))

    def step(ws, x, mask):
        return ws - jax.grad(LOSSES["scan"])(ws, x) * jnp.broadcast_to(jnp.tanh(mask), ws.shape)

    plain, released = (statetx.jit(step, donate_argnums=0, release_gradients=release) for release in (False, True))
    assert "are used up" in released.trace(ws, x, mask).gradients[0]
    np.testing.assert_allclose(*[f(ws.copy(), x, mask) for f in (plain, released)], rtol=1e-6, atol=1e-7)


def test_gradients_that_are_returned_are_named():
    w = statetx.Param(WEIGHTS.copy())

    @statetx.jit(donate_states=True)
    def step(x):
        grads = statetx.grad(lambda x: scanned()(w.value, x), wrt=w)(x)
        w.value -= 0.1 * grads
        return grads

    assert "are kept: the program returns them" in step.trace(X).gradients[0]


@pytest.mark.sample
@pytest.mark.parametrize("region", ["whole", "none"])
@pytest.mark.parametrize("logged", [lambda means: means, jnp.linalg.norm], ids=["all", "norm"])
def test_statistics_of_a_forward_pass_are_no_gradients(region, logged):
    """Those of batch normalization, of which each layer has some, and a loss of each layer."""

    def run(ws, x):
        return statetx.scan(lambda x, w: (layer(x, w), jnp.mean(x, 0)), x, ws)

    def loss(ws, x):
        y, means = (statetx.remat(run) if region == "whole" else run)(ws, x)
        return jnp.mean(y**2) + jnp.sum(means**2), logged(means)

    def step(ws, x):
        grads, means = jax.grad(loss, has_aux=True)(ws, x)
        return ws - 0.1 * grads, means

    (told,) = statetx.jit(step, donate_argnums=0, release_gradients=True).trace(WEIGHTS, X).gradients
    assert told.startswith("128.0 KiB of gradients of 8 layers") and "are used up" in told


def test_a_step_that_releases_can_be_differentiated():
    w = statetx.Param(WEIGHTS.copy())

    def step(x):
        w.value -= 0.1 * statetx.grad(lambda x: scanned()(w.value, x), wrt=w)(x)
        return (w.value**2).sum()

    def grad_of(step):
        w.value = WEIGHTS.copy()
        return statetx.jit(lambda x: statetx.grad(step)(x))(X)

    expected = grad_of(step)
    np.testing.assert_allclose(grad_of(statetx.jit(step, donate_states=True)), expected, rtol=1e-4, atol=1e-6)


def used(*calls):
    """Weights used in several places; the cotangents of those that one jitted function has are added first."""

    def loss(ws, x):
        for num in calls:
            x = jax.jit(lambda ws, x, num=num: functools.reduce(lambda x, _: layers(ws, x), range(num), x))(ws, x)
        return jnp.mean(x**2)

    return loss


def from_slots(ws, x):
    """Steps that read two stacks."""
    step = lambda x, w: (layer(layer(x, w[0]), w[1]), None)
    return jnp.mean(statetx.scan(step, x, (ws, ws), checkpoint=policies.Slots(3))[0] ** 2)


@pytest.mark.parametrize(
    ("loss", "num"),
    [(used(2, 1), 3), (used(1, 2), 3), (from_slots, 2)],
    ids=["two and one", "one and two", "slots"],
)
def test_cotangents_of_weights_used_several_times_are_added_one_by_one(loss, num):
    """By hand so many stacks exist beside the sum; the sum of all has another order."""
    step = statetx.microbatch(jax.value_and_grad(loss), K, argnums=1)
    plain = lambda ws, x: by_hand(loss, ws, x)
    assert sets(step, WEIGHTS, X) <= sets(plain, WEIGHTS, X) - (num - 0.1)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
        *(jax.jit(f)(WEIGHTS, X) for f in (step, plain)),
    )


def test_a_number_that_is_added_is_no_total():
    loss = LOSSES["remat"]
    step, plain = (statetx.microbatch(jax.value_and_grad(f), K, argnums=1) for f in (lambda *a: 0.5 + loss(*a), loss))
    value, gradient = step(WEIGHTS, X)
    plain_value, plain_gradient = plain(WEIGHTS, X)
    np.testing.assert_allclose(value, 0.5 + plain_value, rtol=1e-6)
    np.testing.assert_array_equal(gradient, plain_gradient)


def test_sums_of_half_precision_are_wide():
    """A bfloat16 gradient is widened in the loop of the backward pass, and added there."""
    narrow = WEIGHTS.astype(jnp.bfloat16)
    step, plain = statetx.microbatch(jax.value_and_grad(LOSSES["remat"]), K, argnums=1), by_hand
    jax.tree.map(
        np.testing.assert_array_equal,
        jax.jit(step)(narrow, X),
        jax.jit(lambda ws, x: plain(LOSSES["remat"], ws, x))(narrow, X),
    )


def test_inside_a_shard_map():
    """Each device adds the gradients of its own examples in one set."""
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    loss = LOSSES["remat"]

    def on_mesh(f):
        def run(ws, x):
            value, gradient = f(ws, x)
            return jax.lax.pmean(value, "d"), gradient

        return jax.shard_map(run, mesh=mesh, in_specs=(jax.P(), jax.P("d")), out_specs=jax.P(), check_vma=False)

    step, plain = (
        on_mesh(statetx.microbatch(jax.value_and_grad(loss), K, argnums=1)),
        on_mesh(lambda ws, x: by_hand(loss, ws, x)),
    )
    assert sets(step, WEIGHTS, X) <= sets(plain, WEIGHTS, X) - 0.85
    jax.tree.map(np.testing.assert_array_equal, jax.jit(step)(WEIGHTS, X), jax.jit(plain)(WEIGHTS, X))


def test_adafactor_needs_the_size_of_all_updates(monkeypatch):
    """Its moments are sums within a layer; it clips by a mean over all layers."""
    monkeypatch.setitem(OPTIMIZERS, "adafactor", lambda: optax.adafactor(1e-3, min_dim_size_to_factor=8))
    (told,) = training("adafactor", release_gradients=True)[0].trace(X).gradients
    assert "runs twice" in told and "_clipping.py" in told
    runs = [leaves(*training("adafactor", release_gradients=release), steps=2) for release in (False, True)]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), *runs)


def test_steps_of_an_iteration_move_into_the_loop():
    """A loop over other things than layers, with coefficients of its steps and a number that it counts."""

    @jax.jit
    def iterated(grads, coefficients):
        def step(carry, c):
            n, y = carry
            return (n + 1, y * c + jnp.where(n > 0, 0.5, 0.25) * jnp.tanh(grads)), None

        (n, y), _ = jax.lax.scan(step, (0, grads), coefficients)
        return y / jnp.linalg.norm(y, axis=(1, 2), keepdims=True)

    def step(ws, x):
        return ws - 0.1 * iterated(jax.grad(LOSSES["remat"])(ws, x), jnp.linspace(0, 1, L))

    plain, released = (statetx.jit(step, donate_argnums=0, release_gradients=release) for release in (False, True))
    assert "layer by layer." in released.trace(WEIGHTS, X).gradients[0]
    results = [f(WEIGHTS.copy(), X) for f in (plain, released)]
    np.testing.assert_allclose(*results, rtol=1e-6, atol=1e-8)


def test_weights_of_every_step_have_no_stack():
    """The loop of the backward pass adds their gradients in its carry."""
    shared = lambda w, x: jnp.mean(statetx.scan(lambda x, _: (layer(x, w), None), x, length=L)[0] ** 2)
    step = statetx.jit(lambda w, x: w - 0.1 * jax.grad(shared)(w, x), donate_argnums=0)
    assert step.trace(WEIGHTS[0], X).gradients == ()


def test_one_layer_has_no_stack():
    step = statetx.jit(lambda ws, x: ws - 0.1 * jax.grad(LOSSES["remat"])(ws, x), donate_argnums=0)
    assert [len(step.trace(WEIGHTS[:num], X).gradients) for num in (1, 2)] == [0, 1]


# -- what is left to XLA ---------------------------------------------------------------------------------------------


def logging(logged):
    """A step with SGD, donated, that logs this function of ``(weights, x)`` before the update."""

    def step(ws, x):
        value, gradient = jax.value_and_grad(LOSSES["jax.checkpoint"])(ws, x)
        return ws - 0.1 * gradient, (value, logged(ws, x))

    return [statetx.jit(step, donate_argnums=0, release_gradients=release) for release in (False, None)]


def temporaries(step):
    return step.lower(WEIGHTS, X).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("stacks", [False, True])
def test_a_step_is_rewritten_only_where_a_loop_has_stacks(monkeypatch, stacks):
    """Else its lowering takes no longer than that of the user's."""
    rewritten = []
    monkeypatch.setattr(Release, "__call__", lambda self, jaxpr: rewritten.append(jaxpr) or jaxpr)
    w = statetx.Param(WEIGHTS[0])

    @statetx.jit(donate_states=True)
    def step(x):
        rows = jax.lax.fori_loop(0, 3, lambda n, x: layer(x, w.value), x)
        w.value -= (
            statetx.scan(lambda sum, _: (sum + rows.sum(), rows), 0.0, length=3)[1].sum() if stacks else rows.sum()
        )

    step.lower(X)
    assert bool(rewritten) == stacks


def test_a_gradient_that_is_taken_twice_has_one_loop():
    """XLA merges equal loops, but not with one that has taken an update in: 1.5 sets of temporaries became 2.5."""
    again = lambda ws, x: jax.grad(LOSSES["jax.checkpoint"])(ws, x)
    plain, step = logging(lambda ws, x: jnp.sqrt(jnp.sum(again(ws, x) ** 2)))
    assert "computed from all layers" in step.trace(WEIGHTS, X).gradients[0]
    assert temporaries(step) == temporaries(plain)


@pytest.mark.parametrize("has_regions", [False, True])
def test_unrolled_steps_are_left_on_cpus_without_regions(has_regions):
    """There the update of one row and the read of the next copied the weights: 2.3 sets became 2.9."""
    body = jax.checkpoint(layer) if has_regions else layer

    def step(ws, x):
        loss = lambda ws: jnp.mean(jax.lax.scan(lambda x, w: (body(x, w), None), x, ws, unroll=2)[0] ** 2)
        return ws - 0.1 * jax.grad(loss)(ws)

    plain, default = (statetx.jit(step, donate_argnums=0, release_gradients=release) for release in (False, None))
    (told,) = default.trace(WEIGHTS, X).gradients
    if has_regions:
        assert temporaries(default) <= temporaries(plain) - 0.9 * WEIGHTS.nbytes
    else:
        assert "unrolled (unroll=2)" in told
        assert temporaries(default) == temporaries(plain)


def test_updates_by_two_equal_gradients_move_into_one_loop():
    def step(ws, x):
        first, second = (jax.grad(loss)(ws, x) for loss in [LOSSES["jax.checkpoint"]] * 2)
        return ws - 0.1 * first - 0.01 * jnp.sign(second)

    plain, released = (statetx.jit(step, donate_argnums=0, release_gradients=release) for release in (False, None))
    assert "are used up" in released.trace(WEIGHTS, X).gradients[0]
    assert temporaries(released) <= temporaries(plain) - 0.9 * WEIGHTS.nbytes
    np.testing.assert_array_equal(*[f(WEIGHTS.copy(), X) for f in (plain, released)])


def test_weights_that_another_loop_reads_are_left():
    """That loop may run after the update, which would then need a copy of the weights."""
    plain, step = logging(lambda ws, x: LOSSES["jax.checkpoint"](ws, 2 * x))
    (told,) = step.trace(WEIGHTS, X).gradients
    assert "reads arrays that the update overwrites, and does not come before it" in told and "scan at" in told
    assert temporaries(step) == temporaries(plain)


# -- plans and advice ------------------------------------------------------------------------------------------------


@functools.partial(jax.jit, donate_argnums=0)
def donating(ws, x):
    """A step of JAX alone."""
    value, gradient = jax.value_and_grad(LOSSES["jax.checkpoint"])(ws, x)
    return ws - 0.1 * gradient, value


def peak(fun):
    memory = fun.lower(WEIGHTS, X).compile().memory_analysis()
    aliased = memory.alias_size_in_bytes
    return memory.argument_size_in_bytes + memory.output_size_in_bytes - aliased + memory.temp_size_in_bytes


@pytest.mark.thorough
def test_a_plan_updates_weights_in_the_backward_pass(tmp_path):
    """A budget that rematerialization alone does not keep."""
    budget = int(peak(donating) - 0.9 * WEIGHTS.nbytes)
    plan = statetx.plan(donating, WEIGHTS, X, budget=budget)
    planned = plan.apply(donating)
    assert peak(planned) == plan.total_bytes <= budget
    assert plan.released_bytes == WEIGHTS.nbytes and plan.extra_flops < 0.4
    assert "Updates in the backward pass: 128.0 KiB of gradients of 8 layers" in str(plan)
    results = [step(WEIGHTS.copy(), X) for step in (donating, planned)]
    jax.tree.map(np.testing.assert_array_equal, *results)

    plan.save(tmp_path / "plan.json")
    loaded = statetx.Plan.load(tmp_path / "plan.json")
    assert loaded == plan and loaded.released == plan.released
    assert peak(loaded.apply(donating)) == plan.total_bytes


@functools.partial(jax.jit, donate_argnums=0)
def clipping(ws, x):
    value, gradient = jax.value_and_grad(LOSSES["jax.checkpoint"])(ws, x)
    updates, _ = clipped(1e-3)["clip+sgd"].update(gradient, clipped(1e-3)["clip+sgd"].init(ws))
    return optax.apply_updates(ws, updates), value


@pytest.mark.thorough
def test_a_plan_runs_a_loop_twice_where_nothing_cheaper_keeps_the_budget():
    least = peak(clipping) - int(0.9 * WEIGHTS.nbytes)
    ample, plan = (statetx.plan(clipping, WEIGHTS, X, budget=budget) for budget in (peak(clipping), least))
    assert ample.released_bytes == 0 and ample.extra_flops < 0.4
    assert plan.released_bytes == WEIGHTS.nbytes and "runs twice" in str(plan)
    assert 0.8 < plan.extra_flops
    planned = plan.apply(clipping)
    assert peak(planned) == plan.total_bytes <= least
    results = [step(WEIGHTS.copy(), X) for step in (clipping, planned)]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-8), *results)


def test_a_plan_leaves_what_is_not_donated():
    step = jax.jit(donating.__wrapped__)
    plan = statetx.plan(step, WEIGHTS, X, budget=1.0)
    assert plan.released == () and "It fits unchanged." in str(plan)


@pytest.mark.thorough
def test_advice_names_updates_in_the_backward_loop():
    profile = statetx.memory_profile(donating, WEIGHTS, X)
    report = statetx.explain_oom(donating, WEIGHTS, X, limit=profile.peak_bytes - WEIGHTS.nbytes // 2, gradient=False)
    (remedy,) = report.remedies
    assert remedy.change.action == "release" and remedy.fits and remedy.is_compiled and remedy.added_operations == 0
    assert remedy.change.saved_bytes >= 0.9 * WEIGHTS.nbytes
    assert "release_gradients=True" in remedy.change.text and "gradients of 8 layers" in remedy.change.text
    assert statetx.memory_profile(training("sgd")[0], X).releasable is None


@pytest.mark.thorough
def test_advice_tells_what_a_second_run_costs():
    limit = peak(clipping) - WEIGHTS.nbytes // 2
    report = statetx.explain_oom(clipping, WEIGHTS, X, limit=limit, gradient=False)
    (remedy,) = report.remedies
    assert remedy.change.action == "release" and "runs twice" in remedy.change.text
    assert remedy.fits and remedy.is_compiled and 0.5 < remedy.added_operations < 0.9


def test_a_moment_of_whole_numbers_is_divided_by_a_number():
    """A float is multiplied by the reciprocal, as XLA does outside of loops."""

    def step(state, x, number):
        weights, moment = state
        moment = jax.lax.div(moment + (1e6 * jax.grad(LOSSES["scan"])(weights, x)).astype(jnp.int32), number)
        return weights - 1e-7 * moment, moment

    plain, released = (statetx.jit(step, donate_argnums=0, release_gradients=r) for r in (False, True))
    state = lambda: (WEIGHTS.copy(), jnp.zeros(WEIGHTS.shape, jnp.int32))
    jax.tree.map(np.testing.assert_array_equal, plain(state(), X, jnp.int32(3)), released(state(), X, jnp.int32(3)))
