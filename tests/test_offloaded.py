"""Values in host memory in a loop in a loop: refused for the devices for which XLA cannot compile them."""

import jax
import jax.numpy as jnp
import pytest

import statetx
from statetx import policies
from statetx.policies import Levels

W = jnp.eye(4) / 2
LAYER = statetx.remat(
    lambda h: jnp.cos(jnp.sin(statetx.checkpoint_name(h @ W, "kept"))), policy=policies.offload("kept")
)
INNER = {
    "Levels": lambda h: statetx.scan(
        lambda h, _: (jnp.sin(h @ W), None), h, None, 4, checkpoint=Levels(2, offload=True)
    )[0],
    "remat": lambda h: statetx.scan(lambda h, _: (LAYER(h), None), h, None, 4)[0],
    "auto": lambda h: statetx.scan(lambda h, _: (LAYER(h), None), h, None, 4, checkpoint="auto")[0],
    "fori_loop": lambda h: statetx.fori_loop(0, 4, lambda i, h: LAYER(h), h),
}
H = jnp.ones((4, 4))


def in_loop(inner, checkpoint=None):
    return lambda h: statetx.scan(lambda h, _: (inner(h), None), h, None, 3, checkpoint=checkpoint)[0].sum()


@pytest.fixture
def on_a_gpu(monkeypatch):
    statetx.clear_cache()
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    yield
    statetx.clear_cache()


@pytest.mark.parametrize("jit", [lambda f: f, statetx.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("name", INNER)
def test_offloading_in_a_loop_in_a_loop_is_refused(name, jit, on_a_gpu):
    message = r"scan\(.*a loop in its body offloads values to 'pinned_host'.* For a GPU(.|\n)*Fix: give the outer loop"
    with pytest.raises(statetx.PolicyError, match=message):
        jax.eval_shape(jit(jax.grad(in_loop(INNER[name]))), H)
    for checkpoint in (2, Levels(2)):
        jax.eval_shape(jit(jax.grad(in_loop(INNER[name], checkpoint))), H)
    jax.eval_shape(jit(in_loop(INNER[name])), H)  # nothing is differentiated
    jax.eval_shape(jit(jax.grad(lambda h: INNER[name](h).sum())), H)  # one loop


def test_plain_regions_in_a_loop_in_a_loop_are_unchanged(on_a_gpu):
    layer = statetx.remat(lambda h: jnp.sin(jnp.sin(h @ W)))
    inner = lambda h: statetx.scan(lambda h, _: (layer(h), None), h, None, 4)[0]
    jax.eval_shape(jax.grad(in_loop(inner)), H)


def test_gradients_in_an_outer_loop_are_not_refused(on_a_gpu):
    for inner in INNER.values():
        jax.eval_shape(in_loop(jax.grad(lambda h: inner(h).sum())), H)  # noqa: B023
        jax.eval_shape(statetx.grad(statetx.microbatch(lambda h: inner(h).mean(), 2)), H)  # noqa: B023
        jax.eval_shape(jax.grad(in_loop(statetx.remat(inner))), H)


@pytest.mark.parametrize("checkpoint", [None, 2], ids=["plain", "slots"])
def test_cpus_take_it(checkpoint):
    inner = lambda h: statetx.scan(lambda h, _: (jnp.sin(h @ W), None), h, None, 4)[0]
    expected = jax.grad(in_loop(inner))(H)
    actual = jax.jit(jax.grad(in_loop(INNER["Levels"], checkpoint)))(H)
    assert jnp.allclose(actual, expected, rtol=1e-6) and (actual != 0).all()
