"""Plans of losses that take gradients themselves: meta-learning, gradient penalties, differential equations."""

from __future__ import annotations

import functools

import jax
import jax.experimental
import jax.numpy as jnp
import numpy as np
import pytest

import statetx
from helpers import PLAIN, VARIANTS, assert_near, inner_gradients, rewritten
from statetx.planner import Plan, Planner

WIDTH, POINTS, LAYERS = 16, 1024, 3
DATA = np.random.default_rng(0)
WS = [jnp.asarray(DATA.standard_normal((2, WIDTH, WIDTH)) / 4, jnp.float32) for _ in range(LAYERS)]
X, Y = (jnp.asarray(DATA.standard_normal((POINTS, WIDTH)), jnp.float32) for _ in range(2))


def block(w, x):
    return x + jnp.tanh(x @ w[0]) @ w[1]


def task_loss(ws, x, y, block):
    for w in ws:
        x = block(w, x)
    return ((x - y) ** 2).mean()


def adapting(ws, x, y, block=block):
    """The loss after a step of gradient descent."""
    grads = jax.grad(task_loss)(ws, x, y, block)
    return task_loss([w - 0.1 * g for w, g in zip(ws, grads, strict=True)], y, x, block)


def with_penalty(ws, x, y, block=block):
    """A loss with the gradient in its inputs, of each example."""
    slopes = jax.vmap(jax.grad(lambda x, y: task_loss(ws, x, y, block)))(x, y)
    return task_loss(ws, x, y, block) + (slopes**2).mean()


LOSSES = [adapting, with_penalty]
marked = statetx.remat(block)


def measured(fun, *args):
    return statetx.measure(statetx.value_and_grad(fun), *args, gradient=False)


@pytest.mark.sample("slow")
@pytest.mark.parametrize("loss", LOSSES)
def test_every_variant_has_the_same_gradient(loss):
    planner = Planner(loss, WS, X, Y, argnums=0)
    assert [c.variant for c in planner._variants] == list(VARIANTS)
    plain = jax.jit(jax.grad(loss))
    for name in VARIANTS:
        remat = statetx.remat(loss, policy=inner_gradients(name))
        assert_near(jax.jit(jax.grad(remat))(WS, X, Y), plain(WS, X, Y), 1e-4)


def test_blocks_with_side_effects_are_not_rematerialized():
    """JAX refuses to run them again, so that a variant with such a block could not be traced."""

    def noted(w, x):
        jax.experimental.io_callback(lambda: None, None)
        return block(w, x)

    def chain(*args):
        *ws, x = args
        for w in ws:
            x = noted(w, x)
        return (x**2).mean()

    args = *WS, X
    names = lambda fun: [e.primitive.name for e in jax.make_jaxpr(fun)(*args).eqns]
    for variant in VARIANTS:
        found = rewritten(inner_gradients(variant).inner, chain, *args)
        assert names(found) == names(chain)
        jax.make_jaxpr(jax.grad(lambda w, f=found: f(w, *args[1:])[0]))(WS[0])


def test_losses_without_gradients_have_one_variant():
    planner = Planner(functools.partial(task_loss, block=marked), WS, X, Y, argnums=0)
    assert [c.variant for c in planner._variants] == [None]


@pytest.mark.slow
@pytest.mark.parametrize("is_marked", [False, True])
def test_a_plan_reaches_the_memory_of_rematerialized_blocks(is_marked, tmp_path, monkeypatch):
    monkeypatch.setenv("STATETX_CACHE", str(tmp_path))
    plain, full = measured(adapting, WS, X, Y), measured(functools.partial(adapting, block=marked), WS, X, Y)
    assert full.temp_bytes < 0.7 * plain.temp_bytes
    loss = functools.partial(adapting, block=marked) if is_marked else adapting
    plan = Planner(loss, WS, X, Y, argnums=0, of="temporaries").plan(full.temp_bytes)
    assert measured(plan.apply(loss), WS, X, Y).temp_bytes <= full.temp_bytes
    assert plan.unplanned_flops == plain.flops and plan.flops <= full.flops
    assert plan.inner is not None and plan.inner.variant != PLAIN
    assert_near(jax.grad(plan.apply(loss))(WS, X, Y), jax.grad(adapting)(WS, X, Y), 1e-4)

    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert measured(loaded.apply(loss), WS, X, Y).flops == plan.flops

    # From the store, without a search.
    planner = Planner(loss, WS, X, Y, argnums=0, of="temporaries")
    again = planner.plan(full.temp_bytes)
    assert "_searches" not in vars(planner) and again.flops == plan.flops and again.inner == plan.inner
    assert f"with policy {plan.inner.variant!r} on their blocks" in str(again)


@pytest.mark.slow
def test_a_plan_undoes_rematerialization_where_there_is_memory():
    plain = measured(adapting, WS, X, Y)
    loss = functools.partial(adapting, block=marked)
    assert measured(loss, WS, X, Y).flops > 1.1 * plain.flops
    plan = statetx.plan(loss, WS, X, Y, argnums=0, budget=2 * plain.temp_bytes, of="temporaries")
    assert plan.flops == measured(plan.apply(loss), WS, X, Y).flops == plain.flops


@pytest.mark.slow
def test_a_training_step_whose_loss_takes_a_gradient():
    @jax.jit
    def step(ws, x, y):
        value, grads = jax.value_and_grad(adapting)(ws, x, y)
        return [w - 0.1 * g for w, g in zip(ws, grads, strict=True)], value

    full = measured(functools.partial(adapting, block=marked), WS, X, Y)
    plan = Planner(step, WS, X, Y, of="temporaries").plan(int(1.1 * full.temp_bytes))
    assert plan.is_step and plan.inner is not None and plan.inner.variant != PLAIN
    planned = jax.jit(plan.apply(step))
    assert planned.lower(WS, X, Y).compile().memory_analysis().temp_size_in_bytes == plan.temp_bytes
    assert_near(planned(WS, X, Y), step(WS, X, Y), 1e-4)


def recurrent_task(w, xs, wrap=lambda f: f):
    def step(h, x):
        h = jnp.tanh(h @ w + x)
        return h, h

    return (jax.lax.scan(wrap(step), xs[0], xs)[1] ** 2).mean()


@pytest.mark.sample("slow")
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("wrap", [lambda f: f, functools.partial(jax.checkpoint, prevent_cse=False)])
def test_inner_gradient_of_a_loop(variant, wrap):
    """Its steps are rematerialized, whether the user did or not."""

    def loss(w, xs):
        return recurrent_task(w - 0.1 * jax.grad(recurrent_task)(w, xs, wrap), xs)

    args = WS[0][0], jnp.stack([X, Y, X + Y])
    remat = statetx.remat(loss, policy=inner_gradients(variant))
    assert_near(jax.grad(remat)(*args), jax.grad(loss)(*args), 1e-4)
    plain = measured(lambda w, xs: recurrent_task(w - 0.1 * jax.grad(recurrent_task)(w, xs), xs), *args).flops
    num_products = (measured(remat, *args).flops - plain) / (2 * POINTS * WIDTH * WIDTH)
    least, most = {PLAIN: (0, 0.01), "dots": (2, 10), "nothing": (20, 30)}[
        variant
    ]  # what runs again is differentiated, too
    assert least <= num_products <= most


@pytest.mark.slow
def test_loss_with_a_gradient_of_a_loop_is_planned():
    def loss(w, xs):
        return recurrent_task(w - 0.1 * jax.grad(recurrent_task)(w, xs), xs)

    args = WS[0][0], jnp.stack([X, Y, X + Y])
    plan = statetx.plan(loss, *args, budget=0.7, of="temporaries", argnums=0)
    assert_near(jax.grad(plan.apply(loss))(*args), jax.grad(loss)(*args), 1e-4)
