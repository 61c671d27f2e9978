"""`statetx.testing`: accepted programs, and differences that it reports by name."""

import random

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import corpus
import statetx
from statetx import policies, testing

X = jnp.array([0.3, -0.7, 1.1])


class Layer:
    def __init__(self):
        self.w = statetx.Param(jnp.array([0.5, 1.5, -0.4]))
        self.n = statetx.State(jnp.zeros((), jnp.int32))
        self.rng = statetx.RngState(0)

    def __call__(self, x):
        self.n.value += 1
        keep = jax.random.bernoulli(self.rng.next(), 0.5, x.shape)
        return jnp.where(keep, jnp.tanh(self.w.value * x), 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("policy", [None, policies.primitives("tanh"), policies.everything], ids=repr)
def test_rematerialized_layer_is_equivalent_bit_for_bit(policy):
    layer = Layer()
    before = [s.value for s in (layer.w, layer.n)]
    testing.assert_remat_equivalent(statetx.remat(layer, policy=policy), X)
    testing.assert_remat_equivalent(layer, X)
    testing.assert_remat_equivalent(statetx.jit(lambda x: statetx.remat(layer)(x).sum()), X, rtol=1e-6)
    assert all(a is b for a, b in zip(before, [layer.w.value, layer.n.value], strict=True))


PROGRAMS = [p for p in corpus.PROGRAMS if p in corpus.NATIVE and not p.grows and p.loops]


@pytest.mark.sample
@pytest.mark.parametrize(
    "program",
    [p if n % 6 == 0 else pytest.param(p, marks=pytest.mark.slow) for n, p in enumerate(PROGRAMS)],
    ids=lambda p: p.__name__,
)
def test_corpus_is_equivalent(program):
    # Bit for bit, but where gradients are summed in another order or a branch is compiled as a whole.
    rounds = program.__name__ in ("Nested", "Branches")
    testing.assert_remat_equivalent(program().step, X, rtol=1e-6 if rounds else 0.0)


def wrong(f, break_it):
    """A rematerialized function whose own JAX rule is broken where it is recomputed."""

    def run(x):
        return break_it(statetx.remat(f)(x)) if statetx._remat.override.override.is_off is False else f(x)

    return run


def test_trees_of_variables_are_compared():
    nnx = pytest.importorskip("flax.nnx")
    _, state = nnx.split(nnx.Linear(3, 3, rngs=nnx.Rngs(0)))
    fun = lambda state, x: jax.tree.map(lambda a: jnp.sin(a) * x.sum(), state)
    testing.assert_remat_equivalent(fun, state, jnp.ones(3))
    pure = statetx.functionalize(fun)
    results = testing._run(pure, pure.values(state, jnp.ones(3)), (state, jnp.ones(3)), {})
    shapes = {name: x.shape for name, x in results.items()}
    assert shapes["output['kernel'].value"] == shapes["gradient of state 'state.kernel'"] == (3, 3)
    assert shapes["gradient of argument 1"] == (3,) and len(shapes) == 7


@pytest.mark.slow
def test_difference_is_named():
    layer = Layer()
    with pytest.raises(AssertionError, match=r"(?s)gives other results.*output\[0\]: .* in place of .*\d of 3 differ"):
        testing.assert_remat_equivalent(wrong(layer, lambda y: y + 1e-3), X)
    testing.assert_remat_equivalent(wrong(layer, lambda y: y * (1 + 1e-6)), X, rtol=1e-4)

    @jax.custom_jvp
    def twice_the_slope(y):
        return y

    twice_the_slope.defjvp(lambda p, t: (p[0], 2 * t[0]))
    with pytest.raises(AssertionError, match=r"gradient of state 'f.w'\[\d\]"):
        testing.assert_remat_equivalent(wrong(layer, twice_the_slope), X)

    def counts(x):
        layer.n.value = layer.n.value + (0 if statetx._remat.override.override.is_off else 1)
        return statetx.remat(layer)(x)

    with pytest.raises(AssertionError, match="state 'layer.n': 2 in place of 1"):
        testing.assert_remat_equivalent(counts, X)


def test_nondeterminism_is_reported():
    calls = []

    def unsteady(x):
        calls.append(0)
        return np.float32(len(calls)) * x

    def with_callback(x):
        return jnp.sin(jax.pure_callback(unsteady, jax.ShapeDtypeStruct((), x.dtype), jax.lax.stop_gradient(x[0]))) * x

    with pytest.raises(
        AssertionError, match=r"(?s)not deterministic.*calls .*unsteady on the host, at .*test_testing.py:\d+"
    ):
        testing.assert_remat_equivalent(with_callback, X)

    with pytest.raises(AssertionError, match=r"(?s)not deterministic.*global generator of numpy\.random"):
        testing.assert_remat_equivalent(lambda x: x * np.random.rand(3).astype(np.float32), X)
    with pytest.raises(AssertionError, match=r"(?s)not deterministic.*global generator of random, .*RngState"):
        testing.assert_remat_equivalent(lambda x: x * random.random(), X)


def test_callback_changed_by_recomputation_is_reported():
    """It answers rightly until it is called a second time in a run."""
    calls = []

    def fresh(x):
        if not statetx._remat.override.override.is_off:
            calls.append(0)
        return np.float32(2.0 if len(calls) > 1 else 1.0) * x

    def f(x):
        scale = jax.pure_callback(fresh, jax.ShapeDtypeStruct(x.shape, x.dtype), jax.lax.stop_gradient(x))
        return jnp.sin(scale) * x

    with pytest.raises(AssertionError, match=r"(?s)gives other results.*gradient of argument 0.*fresh on the host"):
        testing.assert_remat_equivalent(statetx.remat(f), X)


def test_residuals():
    layer = Layer()
    keep = statetx.policies.primitives("tanh")
    f = statetx.remat(lambda x: jnp.sin(statetx.checkpoint_name(layer(x), "out")), policy=keep)
    testing.assert_residuals(f, X, expected=["f32[3]"])
    testing.assert_residuals(f, X, expected=12)
    named = statetx.remat(
        lambda x: jnp.sin(statetx.checkpoint_name(layer(x), "out")), policy=statetx.policies.names("out")
    )
    testing.assert_residuals(lambda x: named(x) ** 2, X, expected=["out", "f32[3]"])
    with pytest.raises(AssertionError, match=r"keeps, unexpectedly, \['f32\[3\]'\], and does not keep \['hidden'\]"):
        testing.assert_residuals(f, X, expected=["hidden"])
    with pytest.raises(AssertionError, match="keeps 12 bytes, not 24"):
        testing.assert_residuals(f, X, expected=24)
    loop = lambda x: statetx.scan(lambda c, _: (f(c), None), x, None, length=5)[0]
    testing.assert_residuals(loop, X, expected=["5 x f32[3]", "5 x f32[3]", "5 x key<fry>[]"])


def test_count_traces_of_a_method():
    class Model:
        @statetx.remat
        @testing.count_traces
        def step(self, x):
            return jnp.sin(x)

    model = Model()
    statetx.grad(lambda x: model.step(x).sum())(X)
    assert Model.step.__wrapped__.count == 1


def test_numpy_output_of_double_precision():
    statetx.testing.assert_remat_equivalent(lambda x: (np.ones(2), jnp.sin(x)), jnp.ones(3))


def test_numbers_that_are_nan_are_equal():
    statetx.testing.assert_remat_equivalent(lambda x: (jnp.sin(x).sum(), float("nan")), jnp.ones(3))


def test_random_state_of_brainstate_is_found():
    statetx.testing.assert_remat_equivalent(lambda x: (x * brainstate.random.rand(3)).sum(), jnp.ones(3))


def test_expected_residuals_are_a_list_or_a_number():
    f = lambda x: jnp.sin(jnp.cos(x))
    statetx.testing.assert_residuals(f, jnp.ones(4), expected=np.int64(32))

    def named(x, y):
        x, y = statetx.checkpoint_name(jnp.cos(x), "h"), statetx.checkpoint_name(jnp.cos(y), "h")
        return jnp.sin(x).sum() + jnp.sin(y).sum()

    kept = statetx.remat(named, policy=statetx.policies.names("h"))
    for expected in (["f32[8]", "h"], ["h", "f32[4]"], ["h", "h"], ["h f32[8]", "h"]):
        statetx.testing.assert_residuals(kept, jnp.ones(8), jnp.ones(4), expected=expected)
    with pytest.raises(TypeError, match=r"expected='f32\[4\]' is one value\.\nFix: give a list"):
        statetx.testing.assert_residuals(f, jnp.ones(4), expected="f32[4]")
