"""Faults measured in brainstate's own transforms, each with the test that statetx's on the same states do not share it.

Two are tested elsewhere: static arguments that are told apart (`test_jit.py`) and flags, methods, strings and outputs
that are no arrays (`test_remat.py`).
"""

import brainstate
import brainunit as u
import jax
import jax.numpy as jnp
import numpy as np

import statetx

X = jnp.arange(3.0) + 1


def no_tracers(*states):
    return not any(isinstance(x, jax.core.Tracer) for s in states for x in jax.tree.leaves(s.value))


def test_unit_or_structure_changing_under_jit():
    v, later = brainstate.ShortTermState(X * u.mV), brainstate.ShortTermState(jnp.zeros(()))

    @statetx.jit
    def f(x):
        v.value = (v.value / u.mV) * x * u.second if v.value.unit == u.mV else v.value * x
        later.value = later.value + 1

    for i in range(1, 4):
        f(2.0)
        assert v.value.unit == u.second and no_tracers(v, later) and float(later.value) == i
    np.testing.assert_allclose(v.value.mantissa, X * 8)

    s = brainstate.ShortTermState({"a": X})
    g = statetx.jit(lambda: setattr(s, "value", {**s.value, f"k{len(s.value)}": X}))
    g()
    g()
    assert sorted(s.value) == ["a", "k1", "k2"] and no_tracers(s)


def test_settings_changed_after_the_first_call():
    s = brainstate.ShortTermState(jnp.ones((4, 4)))
    seen = []

    @statetx.jit
    def f(x):
        seen.append(brainstate.environ.get("mode", default=None))
        return (s.value @ s.value).sum() * x

    for mode in ("a", "b", "a"):
        with brainstate.environ.context(mode=mode):
            f(1.0)
    assert seen == ["a", "b"]
    with brainstate.environ.context(mode="a"), jax.default_matmul_precision("highest"):
        f(1.0)
    with brainstate.environ.context(mode="a", dt=0.1 * u.ms):
        f(1.0)
    with brainstate.environ.context(mode="a", dt=0.1 * u.second):
        f(1.0)
    assert len(seen) == 5
    with jax.enable_x64(True):
        s.value = jnp.ones((4, 4), jnp.float64)
        assert f(jnp.float64(1.0)).dtype == jnp.float64
    s.value = jnp.ones((4, 4))
    h = statetx.vmap(lambda x: x * s.value.sum().astype(jnp.float32))
    assert h(jnp.ones(3)).shape == (3,) and h(jnp.ones(5)).shape == (5,)


def test_random_draw_in_vmap_of_jit_does_not_depend_on_the_cache():
    rng = brainstate.random.RandomState(0)
    draw = statetx.jit(lambda x: x * jax.random.uniform(rng.split_key()))
    results = []
    for _ in range(2):
        rng.set_key(jax.random.key(3))
        results.append(statetx.vmap(draw)(jnp.ones(4)))
        draw(1.0)
    np.testing.assert_array_equal(*results)
    assert len(np.unique(results[0])) == 4


def test_restored_value_in_a_transformed_body_persists():
    s = brainstate.ShortTermState(jnp.zeros(()))

    def f(x):
        s.restore_value(s.value + x)
        return s.value * x

    for i, call in enumerate(
        (
            lambda: statetx.jit(f)(1.0),
            lambda: statetx.grad(statetx.remat(f))(1.0),
            lambda: statetx.scan(lambda c, x: (c, f(x)), 0, jnp.ones(1)),
            lambda: statetx.cond(jnp.asarray(True), f, lambda x: x, jnp.float32(1.0)),
        ),
        start=1,
    ):
        call()
        assert float(s.value) == i and no_tracers(s)


def test_writes_under_disable_jit():
    s = brainstate.ShortTermState(jnp.asarray(1.0))

    def f(x):
        s.value = s.value * x
        return s.value**2

    with jax.disable_jit():
        g = statetx.grad(statetx.remat(f))(3.0)
    assert float(g) == 6.0 and float(s.value) == 3.0
