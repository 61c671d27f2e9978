"""Residuals stored in fewer bits: formats, policies, inputs of regions, declarations, derivatives, memory."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from laws import WORDS

import statetx
from statetx import PolicyError, PolicyWarning, policies

FORMATS = {name: policies.dots.stored_as(name).format for name in ("bits", "bfloat16", "float8_e4m3fn", "float8_e5m2")}
BITS = FORMATS["bits"]

# A spiking layer: its input is a float that is 0 or 1, and its derivative is a surrogate's, not that of a comparison.


@jax.custom_jvp
def spike(v):
    return (v > 0).astype(v.dtype)


@spike.defjvp
def _(primals, tangents):
    (v,), (t,) = primals, tangents
    return spike(v), t / (1 + 5 * jnp.abs(v)) ** 2


def layer(x, w):
    def step(v, current):
        v = 0.9 * v + current
        return v, spike(v - 0.5)

    return lax.scan(step, jnp.zeros_like(x[0] @ w), x @ w)[1]


def pair(x, w):
    """Two layers, with the name "spikes" between them."""
    return layer(statetx.checkpoint_name(layer(x, w[0]), "spikes"), w[1])


def loss_of(block):
    return lambda x, w: jnp.sum(jnp.sin(block(x, w).mean(0) + x.mean(0)) ** 2)


def data(num=24, batch=3, steps=5, layers=2):
    keys = jax.random.split(jax.random.key(0), layers + 1)
    x = (jax.random.uniform(keys[0], (steps, batch, num)) < 0.4).astype(jnp.float32)
    w = jnp.stack([jax.random.normal(k, (num, num)) * (2 / num**0.5) for k in keys[1:]])
    return x, w


def assert_equal(actual, expected):
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert a.dtype == e.dtype
        np.testing.assert_array_equal(a, e)


def assert_close(actual, expected, rtol=1e-5):
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        scale = float(np.max(np.abs(e), initial=1e-6))
        np.testing.assert_allclose(a, e, rtol=0, atol=rtol * scale)


SPIKES = policies.names("spikes")
BLOCKS = {
    "named": statetx.remat(pair, policy=SPIKES.stored_as("bits")),
    "inputs": statetx.remat(pair, inputs_stored_as=("bits", None)),
    "both": statetx.remat(pair, policy=SPIKES.stored_as("bits"), inputs_stored_as=("bits", None)),
    "proved": statetx.remat(pair, policy=policies.everything.stored_as("bits")),
    "words": statetx.remat(pair, policy=policies.everything.stored_as(WORDS), inputs_stored_as=WORDS),
}

# -- formats ---------------------------------------------------------------------------------------------------------


@pytest.mark.sample
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int32, jnp.uint8, bool])
@pytest.mark.parametrize("shape", [(), (1,), (7,), (8,), (3, 13), (2, 3, 256), (0, 4)])
def test_bits_give_the_value_back(shape, dtype):
    x = (jax.random.uniform(jax.random.key(1), shape) < 0.5).astype(dtype)
    stored = jax.jit(BITS.encode)(x)
    assert (stored.shape, stored.dtype) == (BITS.stored_type(x).shape, BITS.stored_type(x).dtype)
    decoded = BITS.decode(stored, jax.typeof(x))
    assert decoded.dtype == x.dtype
    np.testing.assert_array_equal(decoded, x)


FLOATS = ["float16", "bfloat16", "float32", "float64"]


@pytest.mark.sample
@pytest.mark.parametrize(
    ("name", "dtype"), [(n, d) for n in FORMATS for d in (["bool", "int32", *FLOATS] if n == "bits" else FLOATS)]
)
@pytest.mark.parametrize("x64", [False, True])
def test_formats_under_strict_promotion(name, dtype, x64):
    format = FORMATS[name]
    with jax.numpy_dtype_promotion("strict"), jax.enable_x64(x64):
        # 1000 is beyond float8_e4m3fn.
        x = np.zeros((3, 300), jax.dtypes.canonicalize_dtype(dtype))
        x[:, ::7] = 1 if name == "bits" else 1000
        x = jnp.asarray(x)
        decoded = format.decode(format.encode(x), jax.typeof(x))
        assert decoded.dtype == x.dtype
        np.testing.assert_allclose(*(np.minimum(a.astype(jnp.float32), 448) for a in (decoded, x)), rtol=0.03)


@pytest.mark.parametrize("length", [8, 256, 1, 7, 250])
def test_bits_take_one_32nd_of_float32(length):
    x = jnp.ones((6, length))
    assert BITS.nbytes(x) == 6 * -(-length // 8)
    if length % 8 == 0:
        assert 32 * BITS.nbytes(x) == x.nbytes


@pytest.mark.parametrize("name, error", [("bfloat16", 2**-8), ("float8_e4m3fn", 2**-4), ("float8_e5m2", 2**-3)])
def test_floats_are_rounded_to_nearest(name, error):
    format = FORMATS[name]
    x = jax.random.normal(jax.random.key(2), (5, 300))
    decoded = format.decode(jax.jit(format.encode)(x), jax.typeof(x))
    np.testing.assert_allclose(decoded, x, rtol=error, atol=2**-9)
    assert format.nbytes(x) == x.size * jnp.dtype(name).itemsize


@pytest.mark.parametrize("name, largest", [("float8_e4m3fn", 448.0), ("float8_e5m2", 57344.0)])
def test_values_beyond_float8_become_its_largest(name, largest):
    format = FORMATS[name]
    x = jnp.array([1e6, -1e6, jnp.inf, jnp.nan])
    np.testing.assert_array_equal(format.decode(format.encode(x), jax.typeof(x)), [largest, -largest, largest, jnp.nan])


@pytest.mark.parametrize("name", FORMATS)
def test_only_smaller_formats_apply(name):
    format = FORMATS[name]
    assert format.shrinks(jnp.ones((4, 64)))
    assert not format.shrinks(jax.random.key(0))
    assert not format.shrinks(jnp.ones((4, 64), jnp.complex64))
    assert not format.shrinks(jnp.ones((0, 64)))
    assert format.shrinks(jnp.ones((4, 64), bool)) == (name == "bits")
    assert not FORMATS["bfloat16"].shrinks(jnp.ones(64, jnp.bfloat16))


def test_stored_types_are_values():
    assert policies.dots.stored_as(BITS) == policies.dots.stored_as("bits")
    assert len({policies.dots.stored_as(name).format for name in (*FORMATS, *FORMATS)}) == len(FORMATS)
    with pytest.raises(PolicyError, match="Did you mean 'bits'"):
        policies.dots.stored_as("bit")
    with pytest.raises(TypeError, match="got 8"):
        statetx.remat(layer, inputs_stored_as=8)


# -- derivatives -----------------------------------------------------------------------------------------------------


@pytest.mark.sample
@pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS)
@pytest.mark.parametrize("jit", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_gradients_are_equal_bit_for_bit(block, jit):
    expected = jit(jax.value_and_grad(loss_of(statetx.remat(pair)), (0, 1)))(*data())
    actual = jit(jax.value_and_grad(loss_of(block), (0, 1)))(*data())
    assert_equal(actual, expected)
    assert all(jnp.abs(g).max() > 0 for g in actual[1])  # zeros would be equal too


def hessian_vector(f):
    return lambda x, w: jax.grad(lambda x, w: jnp.vdot(jax.grad(f, 1)(x, w), jnp.cos(w)), (0, 1))(x, w)


DERIVATIVES = {
    "grad of grad": hessian_vector,
    "grad of jitted grad": lambda f: hessian_vector(jax.jit(f)),
    "forward over reverse": lambda f: lambda x, w: jax.jvp(lambda w: jax.grad(f, 1)(x, w), [w], [jnp.cos(w)]),
    "reverse over forward": lambda f: jax.grad(lambda x, w: jax.jvp(lambda w: f(x, w), [w], [jnp.cos(w)])[1], (0, 1)),
    "jvp": lambda f: lambda x, w: jax.jvp(f, (x, w), (jnp.sin(x), jnp.cos(w))),
    "linearize": lambda f: lambda x, w: jax.linearize(lambda w: f(x, w), w)[1](jnp.cos(w)),
    "hessian": lambda f: lambda x, w: jax.hessian(lambda row: f(x, w.at[0, 0].set(row)))(w[0, 0]),
    "vmap of grad": lambda f: lambda x, w: jax.vmap(jax.grad(f, (0, 1)), (1, None))(x[:, :, None], w),
    "grad of vmap": lambda f: jax.grad(lambda x, w: jax.vmap(f, (1, None))(x[:, :, None], w).sum(), (0, 1)),
    "grad in scan": lambda f: (
        lambda x, w: lax.scan(lambda w, _: (w - 0.1 * jax.grad(f, 1)(x, w), None), w, None, length=3)
    ),
}


@functools.cache
def derivative_without_regions(name):
    return jax.jit(DERIVATIVES[name](loss_of(pair)))(*data(num=8, batch=2, steps=3))


# "both" has what "named" and "inputs" have.
@pytest.mark.sample
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("name", DERIVATIVES)
def test_derivatives_of_every_kind(name, block):
    actual = jax.jit(DERIVATIVES[name](loss_of(BLOCKS[block])))(*data(num=8, batch=2, steps=3))
    assert_close(actual, derivative_without_regions(name))


def test_second_derivatives_reach_through_what_is_stored():
    # The derivative of the gradient by x goes only through the stored value.
    f = statetx.remat(lambda x: jnp.sin(statetx.checkpoint_name(x**3, "spikes")), policy=SPIKES.stored_as(WORDS))
    third = jax.grad(jax.grad(jax.grad(f)))
    np.testing.assert_allclose(third(0.7), jax.grad(jax.grad(jax.grad(lambda x: jnp.sin(x**3))))(0.7), rtol=1e-5)


@pytest.mark.sample("slow")
@pytest.mark.parametrize("block", [BLOCKS["both"], BLOCKS["words"]], ids=["bits", "words"])
def test_inside_loops_branches_and_other_regions(block):
    x, w = data()

    def looped(x, w):
        return lax.scan(lambda x, _: (block(x, w), x.sum()), x, None, length=3)[0]

    def branched(x, w):
        return lax.cond(w.sum() > -1e9, block, lambda x, w: x, x, w)

    def nested(x, w):
        return statetx.remat(lambda x: block(x, w))(x)

    gradient = lambda f: jax.jit(jax.grad(loss_of(f), (0, 1)))(x, w)
    assert_close(gradient(looped), gradient(lambda x, w: pair(pair(pair(x, w), w), w)))
    once = gradient(pair)
    for f in (branched, nested):
        assert_close(gradient(f), once)


def test_a_scan_inside_a_region_stacks_what_is_stored():
    def cells(x, w):
        def step(h, x):
            s = statetx.checkpoint_name(spike(jnp.sin(h + x @ w[0])), "spikes")
            return 0.5 * h + s @ w[1], s.sum()

        return lax.scan(step, jnp.zeros_like(x[0]), x)[0]

    x, w = data()
    stored = statetx.remat(cells, policy=SPIKES.stored_as("bits"))
    grad = lambda f: jax.jit(jax.grad(lambda x, w: jnp.sum(f(x, w) ** 2), (0, 1)))(x, w)
    assert_equal(grad(stored), grad(statetx.remat(cells, policy=SPIKES)))
    statetx.testing.assert_residuals(stored, x, w, expected=5 * 3 * 3)  # steps, batch, 24 bits


def test_a_derivative_that_reads_its_result_reads_what_was_stored():
    f = lambda x: jnp.sum(statetx.checkpoint_name(jnp.exp(x), "spikes") ** 2)
    stored = statetx.remat(f, policy=SPIKES.stored_as("bfloat16"))
    x = jnp.linspace(0, 1, 7)
    rounded = jnp.exp(x).astype(jnp.bfloat16).astype(jnp.float32)
    np.testing.assert_allclose(jax.grad(stored)(x), 2 * rounded * rounded, rtol=1e-6)
    np.testing.assert_allclose(stored(x), f(x), rtol=1e-7)  # the forward pass uses the value itself


@pytest.mark.slow
def test_lossy_formats_change_the_backward_pass_only():
    x, w = data()
    x = x + 0.1 * jax.random.normal(jax.random.key(5), x.shape)
    dense = lambda x, w: jnp.tanh(x @ w[0]) @ w[1]
    expected_value, expected_grads = jax.jit(jax.value_and_grad(loss_of(dense), (0, 1)))(x, w)
    for name, tolerance in (("bfloat16", 0.02), ("float8_e4m3fn", 0.1), ("float8_e5m2", 0.2)):
        stored = statetx.remat(dense, inputs_stored_as=(name, None))
        value, grads = jax.jit(jax.value_and_grad(loss_of(stored), (0, 1)))(x, w)
        assert value == expected_value
        assert_close(grads, expected_grads, tolerance)
        assert any(not np.array_equal(a, b) for a, b in zip(grads, expected_grads, strict=True))
        # Rounded alike in each recomputation: also in that of a region around it.
        outer = statetx.remat(lambda x, w, stored=stored: stored(x, w))
        assert_close(jax.jit(jax.grad(loss_of(outer), (0, 1)))(x, w), grads, 1e-6)


@pytest.mark.thorough
def test_states_keys_and_static_arguments_pass():
    class Layer:
        def __init__(self):
            self.w = statetx.Param(data()[1][0])
            self.calls = statetx.State(jnp.zeros((), jnp.int32))

        @statetx.remat(inputs_stored_as=(None, "bits", None, None))
        def __call__(self, x, key, training):
            self.calls.value += 1
            x = layer(x, self.w.value)
            return jnp.where(jax.random.bernoulli(key, 0.7, x.shape), x, 0) if training else x

    x, _ = data()
    block, key = Layer(), jax.random.key(6)
    expected = jax.grad(lambda w: jnp.sum(jnp.where(jax.random.bernoulli(key, 0.7, x.shape), layer(x, w), 0)))
    grads = statetx.grad(lambda: block(x, key, True).sum(), wrt=block.w)()
    assert_close(grads, expected(block.w.value))
    assert block.calls.value == 1


# -- which values ----------------------------------------------------------------------------------------------------


def stored_values(fun, *args):
    """The types of the intermediate residuals of the gradient by all floats."""
    report = statetx.saved_residuals(fun, *args)
    return sorted(row.type for row in report if row.origin == "intermediate")


def test_inputs_are_stored_beside_states():
    weights = [statetx.State(jnp.ones((16, 16))) for _ in range(3)]
    layer = statetx.remat(lambda s: sum(jnp.tanh(s @ w.value) for w in weights), inputs_stored_as="bits")
    assert "bits[32,16]" in stored_values(lambda x: layer(spike(x)).sum(), jnp.ones((32, 16)))


def test_policy_that_stores_no_value_as_bits_warns():
    x, w = data(num=16, batch=2, steps=3)
    with pytest.warns(PolicyWarning, match="proved to be 0 or 1"):
        jax.grad(statetx.remat(lambda x, w: jnp.sum(jnp.sin(x @ w[0]) @ w[1]), policy=policies.dots.stored_as("bits")))(
            x, w
        )


PROOFS = {
    "a comparison": lambda x, y: (x > y).astype(jnp.float32),
    "a product": lambda x, y: (x > 0).astype(jnp.float32) * (y > 0),
    "a complement": lambda x, y: 1 - (x > 0).astype(jnp.float32),
    "a choice": lambda x, y: jnp.where(x > 0, (y > 0).astype(jnp.float32), 0.0),
    "a surrogate": lambda x, y: 1 - spike(x),
    "a scan": lambda x, y: lax.scan(lambda c, x: (c + x, spike(x + c)), x[0], x)[1],
    "a maximum so far": lambda x, y: lax.scan(lambda c, x: (jnp.maximum(c, spike(x)), c), jnp.zeros(4), x)[1],
    "two carries": lambda x, y: lax.fori_loop(
        0, 3, lambda i, c: (c[1], c[0] * spike(x[i])), (spike(x[0]), jnp.ones(4))
    )[0],
    "a delay": lambda x, y: lax.scan(lambda c, x: (jnp.stack([spike(x), *c[:-1]]), c[-1]), jnp.zeros((3, 4)), x)[1],
    "a ring buffer": lambda x, y: lax.fori_loop(0, 5, lambda i, c: c.at[i % 3].set(spike(x[i])), jnp.zeros((3, 4))),
    "a branch": lambda x, y: lax.cond(x.sum() > 0, spike, lambda x: jnp.zeros_like(x), y),
    "a call": lambda x, y: jax.jit(lambda x: spike(x).T.reshape(-1)[2:])(x),
    "one_hot": lambda x, y: jax.nn.one_hot(jnp.argmax(x, 1), 5),
    "a barrier": lambda x, y: lax.optimization_barrier((y, spike(x)))[1],
    "a draw": lambda x, y: jax.random.bernoulli(jax.random.key(0), 0.5, x.shape).astype(jnp.float32),
}
NO_PROOFS = {
    "a sum": lambda x, y: (x > 0).astype(jnp.float32) + (y > 0),
    "a float": lambda x, y: x * (x > 0),
    "another operand": lambda x, y: jax.device_put((spike(x), y))[1],
    "minus zero": lambda x, y: jnp.where(x > 0, 1.0, -0.0),
    "minus": lambda x, y: -(x > 0).astype(jnp.float32),
    "another complement": lambda x, y: 2 - (x > 0).astype(jnp.float32),
    "a carry of no turn": lambda x, y: lax.scan(lambda c, x: (spike(x), None), x[0], x[:0])[0],
    "a carry": lambda x, y: lax.scan(lambda c, x: (c + 1.0, c), jnp.zeros(4), x)[1],
    "a first carry": lambda x, y: lax.scan(lambda c, x: (c * spike(x), c), x[0], x)[1],
    "a carry that becomes another": lambda x, y: lax.scan(
        lambda c, x: ((c[1], x), c[0]), (spike(x[0]), spike(y[0])), x
    )[1],
    "one branch": lambda x, y: lax.cond(x.sum() > 0, spike, lambda x: x, y),
    "the maximum of none": lambda x, y: lax.reduce_max_p.bind(
        (x[:0] > 0).astype(jnp.float32), axes=(0,), out_sharding=None
    ),
}


@pytest.mark.filterwarnings("ignore:.*no saved value is proved")
@pytest.mark.parametrize(
    "fun, expected",
    [*((f, True) for f in PROOFS.values()), *((f, False) for f in NO_PROOFS.values())],
    ids=[*PROOFS, *NO_PROOFS],
)
def test_proofs(fun, expected):
    x = jnp.arange(12.0).reshape(3, 4) - 5
    region = lambda factor: jnp.sum(factor * fun(x, x[::-1]))
    (saved,) = statetx.saved_residuals(statetx.remat(region, policy=policies.everything.stored_as("bits")), 1.0)
    assert saved.stored_as == ("bits" if expected else "")
    if expected:
        assert set(np.unique(fun(x, x[::-1]))) <= {0.0, 1.0}


def test_integers_and_booleans():
    x, w = data(num=16, batch=2, steps=3)

    def f(x, w):
        index = statetx.checkpoint_name((x[0] @ w[0] > 0).astype(jnp.int32), "spikes")
        return jnp.sum(jnp.where(index == 1, x @ w[1], 0.5 * x) * w[0, 0][None, None])

    stored = statetx.remat(f, policy=SPIKES.stored_as("bits"))
    assert_equal(jax.grad(stored, (0, 1))(x, w), jax.grad(statetx.remat(f), (0, 1))(x, w))
    statetx.testing.assert_residuals(stored, x, w, expected=2 * 2)


def test_policies_print_combine_and_are_values():
    policy = policies.names("spikes").stored_as("bits") | policies.dots.stored_as("float8_e5m2")
    assert repr(policy) == "names('spikes').stored_as('bits') | dots.stored_as('float8_e5m2')"
    assert repr((policies.names("a") | policies.dots).stored_as("bits")) == "(names('a') | dots).stored_as('bits')"
    assert policy == policies.names("spikes").stored_as("bits") | policies.dots.stored_as("float8_e5m2")
    assert hash(SPIKES.stored_as("bits")) != hash(SPIKES.stored_as("float8_e5m2"))
    with pytest.raises(PolicyError, match=r"statetx\.remat"):
        jax.grad(jax.checkpoint(jnp.sin, policy=policies.dots.stored_as("bits")))(1.0)


def test_a_value_that_another_policy_saves_is_saved_unchanged():
    x, w = data()
    for policy in (SPIKES | SPIKES.stored_as("bits"), SPIKES.stored_as("bits") | SPIKES):
        assert stored_values(statetx.remat(pair, policy=policy), x, w) == ["f32[3,24]"]
    both = SPIKES & SPIKES.stored_as("bits")
    statetx.testing.assert_residuals(statetx.remat(pair, policy=both), x, w, expected=5 * 3 * 3)


@pytest.mark.sample
@pytest.mark.parametrize(
    "policy",
    [jax.checkpoint_policies.dots_saveable, "everything", policies.everything],
    ids=["dots", "name", "everything"],
)
def test_other_policies_beside_stored_inputs(policy):
    x, w = data()
    block = statetx.remat(pair, policy=policy, inputs_stored_as=("bits", None))
    plain = statetx.remat(pair, policy=policy)
    assert_equal(jax.grad(loss_of(block), (0, 1))(x, w), jax.grad(loss_of(plain), (0, 1))(x, w))
    assert "bits[5,3,24]" in stored_values(block, x, w)
    # Neither the argument itself is kept, nor what is decoded from its bits.
    assert not [row for row in statetx.saved_residuals(block, x, w) if row.path == "x" and row.origin == "argument"]


@pytest.mark.parametrize("formats", [("bits",), ("bits", "bits", None), {"x": "bits"}])
def test_a_prefix_that_does_not_fit(formats):
    with pytest.raises((ValueError, TypeError), match="inputs_stored_as"):
        jax.grad(loss_of(statetx.remat(pair, inputs_stored_as=formats)))(*data())


# -- masks -----------------------------------------------------------------------------------------------------------


def test_masks_are_packed():
    def f(x, key):
        h = jax.nn.relu(x)
        h = jnp.where(jax.random.bernoulli(key, 0.5, h.shape), h, 0.0)  # dropout
        return jnp.sum(jnp.maximum(h, 0.5 * x).max(1))

    x, key = jax.random.normal(jax.random.key(7), (4, 64)), jax.random.key(8)
    kept = statetx.remat(f, policy=policies.masks)
    assert_equal(jax.grad(kept)(x, key), jax.grad(f)(x, key))
    rows = [row for row in statetx.saved_residuals(kept, x, key) if row.origin == "intermediate"]
    assert {row.type for row in rows} == {"bits[4,64]"}
    assert {row.dtype for row in rows} == {"bool"}
    assert {"gt", "lt", "eq"} == {row.primitive for row in rows}  # of relu, of dropout, of both maxima
    assert all(row.nbytes == 4 * 8 for row in rows)
    # The masks are all that the backward pass needs.
    assert not any(row.origin == "argument" for row in statetx.saved_residuals(kept, x, key))
    assert repr(policies.masks | policies.dots) == "masks | dots"


@pytest.mark.parametrize("checkpoint", [None, policies.Slots(2, policy=policies.everything.stored_as("bits"))])
def test_masks_under_strict_promotion(checkpoint):
    """Of a region, of its inputs, and of a loop's carry."""

    def loss(x):
        step = lambda c, _: ((jnp.where(c[1], jnp.sin(c[0]), c[0] * c[0]), c[0] > 0), None)
        x = statetx.scan(step, (x, x > 0), None, 9, checkpoint=checkpoint)[0][0]
        x = statetx.remat(lambda x: jnp.sin(jnp.where(x > 0, x, 0.0) * x), policy=policies.masks)(x)
        return statetx.remat(lambda m, x: jnp.where(m, x, 0.0) * x, inputs_stored_as=("bits", None))(x > 0.1, x).sum()

    x = jnp.linspace(-1.0, 1.0, 16)
    with jax.numpy_dtype_promotion("strict"):  # first: what is staged before is used again
        eager, compiled = jax.grad(loss)(x), jax.jit(jax.grad(loss))(x)
    assert_equal(eager, jax.grad(loss)(x))
    assert_close(compiled, eager)


@pytest.mark.parametrize("formats", ["bits", ("bits", None)])
def test_plans_refuse_formats_of_inputs(formats):
    with pytest.raises(PolicyError, match=r"does not combine with inputs_stored_as=.*\n.*plan\(\.\.\., stored_as="):
        statetx.remat(pair, policy="fit:1MiB", inputs_stored_as=formats)
    statetx.remat(pair, policy="fit:1MiB", inputs_stored_as=(None, None))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("option", [jax.debug_nans, jax.debug_infs], ids=["nans", "infs"])
def test_jax_looks_for_nan_in_eager_gradients(format, option):
    block = statetx.remat(jnp.sqrt, inputs_stored_as=format)
    x = jnp.ones((4, 16))
    grad = jax.grad(lambda x: jnp.sum(block(x)))
    with option(True):
        for _ in range(2):  # the second time from the cache of jax.jit, which asks for the shards of results
            assert_close(grad(x), jnp.full_like(x, 0.5))
        with pytest.raises(FloatingPointError):
            grad(0 * x if option is jax.debug_infs else -x - 1)


def wrongly_declared(x):
    h = statetx.checkpoint_name(jnp.sin(x), "h")
    return jnp.sum(jnp.cos(h) * h)


@pytest.mark.parametrize(
    "options", [{"policy": policies.names("h").stored_as("bits")}, {"inputs_stored_as": "bits"}], ids=["named", "input"]
)
def test_a_wrong_declaration_is_found(options):
    x = jnp.arange(4.0)
    with pytest.raises(AssertionError, match="gradient of argument 0.*(?s:.)*it may be neither 0 nor 1"):
        statetx.testing.assert_remat_equivalent(statetx.remat(wrongly_declared, **options), x)
    statetx.testing.assert_remat_equivalent(statetx.remat(wrongly_declared, policy=policies.names("h")), x)


# -- memory, loops, devices ------------------------------------------------------------------------------------------


def compiled(f, *args):
    return jax.jit(jax.grad(f)).lower(*args).compile()


@pytest.mark.slow
def test_a_deep_spiking_network_takes_a_quarter_of_remat():
    # The network of the facts: 24 blocks, each dense with 256 neurons, 32 steps, a batch of 64.
    def block(x, w):
        def step(v, current):
            v = 0.9 * v + current
            return v, spike(v - 1)

        return lax.scan(step, jnp.zeros_like(x[0]), x @ w)[1]

    def loss(block):
        def run(ws, x):
            for w in ws:
                x = block(x, w)
            return (x.mean(0) ** 2).sum()

        return run

    x, _ = data(256, 64, 32)
    ws = [jax.random.normal(key, (256, 256)) * (3 / 16) for key in jax.random.split(jax.random.key(9), 24)]
    blocks = {"none": block, "remat": statetx.remat(block)}
    blocks["bits"] = statetx.remat(block, inputs_stored_as=("bits", None))
    programs = {name: compiled(loss(block), ws, x) for name, block in blocks.items()}
    sizes = {name: program.memory_analysis().temp_size_in_bytes for name, program in programs.items()}
    assert 4 * sizes["bits"] <= sizes["remat"], sizes
    assert 12 * sizes["bits"] <= sizes["none"], sizes

    grads = {name: program(ws, x) for name, program in programs.items()}
    assert_equal(grads["bits"], grads["remat"])
    assert all(jnp.abs(g).max() > 0 for g in grads["bits"])


@jax.custom_vjp
def gate(x):
    return x * (x > 0)


gate.defvjp(lambda x: (gate(x), (x > 0).astype(x.dtype)), lambda is_open, ct: (ct * is_open,))
BRANCHING = {
    **{name: BLOCKS[name] for name in ("named", "inputs")},
    "rule": statetx.remat(lambda x, w: jax.jit(gate)(x @ w[0]), policy=policies.everything.stored_as("bits")),
}


@pytest.mark.parametrize("block", BRANCHING.values(), ids=BRANCHING)
def test_the_stored_value_dies_before_what_follows(block):
    """The last use of each block's input is in the branch that encodes it; a region in a loop has no branch."""
    x, w = data()
    text = compiled(loss_of(block), x, w).as_text()
    assert text.count(" conditional(") == 2  # the forward pass in order, and the fence of the recomputation

    looped = lambda x, w: lax.scan(lambda x, _: (block(x, w), None), x, None, length=3)[0]
    assert compiled(loss_of(looped), x, w).as_text().count(" conditional(") == 0


@pytest.mark.sample
@pytest.mark.parametrize(
    "strategy", [functools.partial(policies.Slots, 3), functools.partial(policies.Levels, 2)], ids=["slots", "levels"]
)
def test_checkpointed_loops_with_a_policy_that_stores_small(strategy):
    x, w = data()

    def loss(w, policy):
        h, ys = statetx.scan(
            step_of(w), jnp.zeros_like(x[0]), jnp.tile(x, (2, 1, 1)), checkpoint=strategy(policy=policy)
        )
        return jnp.sum(h**2) + jnp.sum(ys * jnp.arange(3.0)[None])

    def step_of(w):
        def step(h, x):
            s = statetx.checkpoint_name(spike(jnp.sin(h + x @ w[0])), "spikes")
            return 0.5 * h + s @ w[1], s.sum(-1)

        return step

    stored, exact = (jax.jit(jax.grad(functools.partial(loss, policy=p))) for p in (SPIKES.stored_as("bits"), SPIKES))
    assert_equal(stored(w), exact(w))
    # The format reaches the steps' residuals.
    assert " shift_left" in str(jax.make_jaxpr(jax.grad(functools.partial(loss, policy=SPIKES.stored_as("bits"))))(w))


def test_offloaded_codes():
    x, w = data()
    policy = policies.offload(SPIKES.stored_as("bits"), otherwise="save")
    block = statetx.remat(pair, policy=policy)
    (row,) = [row for row in statetx.saved_residuals(block, x, w) if row.origin == "intermediate"]
    assert (row.stored_as, row.nbytes) == ("bits", 5 * 3 * 3)
    assert row.memory in ("pinned_host", "")
    jaxpr = jax.make_jaxpr(jax.grad(loss_of(block), 1))(x, w)
    assert str(jaxpr) != str(jax.make_jaxpr(jax.grad(loss_of(statetx.remat(pair)), 1))(x, w))


@pytest.mark.sample
@pytest.mark.parametrize("form", ["shard_map", "sharded", "shard_map outside"])
def test_on_several_devices(form):
    if jax.device_count() < 2:
        pytest.skip("one device")
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    x, w = data(num=24, batch=4)
    P = jax.sharding.PartitionSpec
    expected = jax.jit(jax.grad(loss_of(pair), (0, 1)))(x, w)
    for name in ("both", "words"):
        f = BLOCKS[name]
        if form == "shard_map":
            f = jax.shard_map(f, mesh=mesh, in_specs=(P(None, "d"), P()), out_specs=P(None, "d"))
        elif form == "shard_map outside":
            mapped = jax.shard_map(pair, mesh=mesh, in_specs=(P(None, "d"), P()), out_specs=P(None, "d"))
            f = statetx.remat(mapped, policy=policies.everything.stored_as(WORDS), inputs_stored_as=WORDS)
        x_placed = jax.device_put(x, jax.sharding.NamedSharding(mesh, P(None, "d")))
        assert_close(jax.jit(jax.grad(loss_of(f), (0, 1)))(x_placed, w), expected)


SPLITS = [  # a length over eight devices, which are one axis or two of the mesh
    pytest.param(length, axes, marks=[] if (length, len(axes)) in ((72, 1), (128, 2)) else pytest.mark.slow)
    for length in (8, 24, 72, 128, 2048)
    for axes in ("d", "ad")
]


@pytest.fixture
def split_over_devices():
    """``(shape, axes) -> array`` whose type splits its last axis over eight devices."""
    if jax.device_count() < 8:
        pytest.skip("fewer than eight devices")

    @contextlib.contextmanager
    def normal(shape, axes):
        explicit = (jax.sharding.AxisType.Explicit,) * len(axes)
        mesh = jax.make_mesh((8,) if axes == "d" else (2, 4), tuple(axes), axis_types=explicit)
        spec = jax.sharding.PartitionSpec(*(None,) * (len(shape) - 1), tuple(axes))
        values = np.random.default_rng(0).normal(size=shape).astype(np.float32)
        with jax.set_mesh(mesh):
            yield jax.device_put(values, jax.sharding.NamedSharding(mesh, spec))

    return normal


@pytest.mark.parametrize(("length", "axes"), SPLITS)
def test_formats_of_a_last_axis_that_is_split_over_devices(length, axes, split_over_devices):
    part = length // 8
    with split_over_devices((4, length), axes) as x:
        spikes = (x > 0).astype(x.dtype)
        stored, decoded = jax.jit(lambda x: (codes := BITS.encode(x), BITS.decode(codes, jax.typeof(x))))(spikes)
        size = -(-part // 8)
        assert stored.shape == BITS.stored_type(spikes).shape == (4, 8 * size)
        assert all(s.data.shape == (4, size) for s in stored.addressable_shards)
        assert jax.typeof(decoded) == jax.typeof(spikes)
        np.testing.assert_array_equal(decoded, spikes)


@pytest.mark.parametrize("length", [72, pytest.param(128, marks=pytest.mark.slow)])
def test_gradients_where_the_last_axis_is_split_over_devices(length, split_over_devices):
    def f(x):
        return jnp.sum(jnp.sin(x * statetx.checkpoint_name(spike(x), "spikes")))

    stored, exact = (statetx.remat(f, policy=p) for p in (SPIKES.stored_as("bits"), SPIKES))
    with split_over_devices((4, length), "d") as x:
        grad = jax.jit(jax.grad(stored))(x)
        assert jax.typeof(grad) == jax.typeof(x)
        assert_equal(grad, jax.jit(jax.grad(exact))(x))
        (row,) = [row for row in statetx.saved_residuals(stored, x) if row.stored_as]
        assert row.nbytes == 4 * 8 * -(-length // 64)
    assert_close(grad, jax.jit(jax.grad(f))(np.asarray(x)))


# -- reports ---------------------------------------------------------------------------------------------------------


def test_saved_residuals_show_format_bytes_and_dtype():
    x, w = data()
    report = statetx.saved_residuals(BLOCKS["both"], x, w)
    stored = {row.reason: row for row in report if row.stored_as}
    assert set(stored) == {"input", "policy"}
    assert (stored["input"].type, stored["input"].dtype, stored["input"].nbytes) == ("bits[5,3,24]", "float32", 45)
    assert (stored["policy"].type, stored["policy"].times, stored["policy"].names) == ("bits[3,24]", 5, ("spikes",))
    assert (
        stored["policy"].source.startswith(__file__) and stored["policy"].flops > 0
    )  # what the recomputation is spared
    assert "bits[5,3,24] for f32" in str(report)
    assert report.to_dict()["residuals"][1]["stored_as"] == "bits"


def spiking(block, num=8):
    ws = [jax.random.normal(key, (128, 128)) * (3 / 128**0.5) for key in jax.random.split(jax.random.key(10), num)]
    x = (jax.random.uniform(jax.random.key(11), (16, 32, 128)) < 0.2).astype(jnp.float32)

    def loss(ws, x):
        for w in ws:
            x = block(x, w)
        return (x.mean(0) ** 2).sum()

    return statetx.memory_profile(loss, ws, x)


@pytest.mark.slow
def test_memory_profile_advises_bits():
    before = spiking(statetx.remat(layer))
    (change,) = [c for c in before.changes if c.action == "bits"]
    assert change.owner == "layer" and "inputs_stored_as='bits'" in change.text

    after = spiking(statetx.remat(layer, inputs_stored_as=("bits", None)))
    assert after.timeline.max() < 0.8 * before.timeline.max()
    assert not [c for c in after.changes if c.action == "bits"]
    stored = [b for b in after.buffers if b.stored_as == "bits" and b.kind == "residual"]
    assert len(stored) == 8 and all(b.num_bytes == 16 * 32 * 16 for b in stored)
    assert "u8[16,32,16] (bits)" in str(after)


@pytest.mark.thorough
def test_bits_in_a_plain_while_loop_of_a_rematerialized_function():
    """A `while_loop` can save nothing: what the inner function stores is computed again."""
    stored = statetx.remat(lambda h: jnp.tanh(h) * (h > 0), policy=policies.everything.stored_as("bits"))

    def loss(x):
        body = lambda c: (stored(c[0]) + 0.0 * c[0], c[1] + 1)
        h, _ = statetx.while_loop(lambda c: c[1] < 3, body, (jax.lax.stop_gradient(x), 0))
        return jnp.sum(jnp.sin(x) * h)

    x = jnp.array([0.5, -0.5])
    np.testing.assert_array_equal(jax.grad(statetx.remat(loss))(x), jax.grad(loss)(x))
