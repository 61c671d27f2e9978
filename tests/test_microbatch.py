"""`microbatch`: equal to the full batch, states by their rules, memory of one part, every nesting."""

import functools
import pathlib
import sys

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import helpers
import statetx
from helpers import Counted, compilations

sys.path.append(str(pathlib.Path(__file__).parents[1] / "benchmarks"))

KEYS = jax.random.split(jax.random.key(0), 4)
PARAMS = {"a": jax.random.normal(KEYS[0], (5, 7)), "b": jax.random.normal(KEYS[1], (7, 3))}
X, Y = jax.random.normal(KEYS[2], (10, 5)), jax.random.normal(KEYS[3], (10, 3))
TOLERANCE = {"rtol": 2e-5, "atol": 1e-6}  # float32 sums in another order


def mean_loss(params, x, y):
    return ((jnp.tanh(x @ params["a"]) @ params["b"] - y) ** 2).mean()


def sum_loss(params, x, y):
    return ((jnp.tanh(x @ params["a"]) @ params["b"] - y) ** 2).sum()


assert_close = functools.partial(helpers.assert_close, **TOLERANCE)


def parts(x, num):
    return np.array_split(x, num)  # 10 in 4 parts: 3, 3, 2, 2


# -- a batch without examples ----------------------------------------------------------------------------------------


class Counting:
    """A loss that writes a state."""

    def __init__(self, loss):
        self.w, self.runs, self.loss = statetx.Param(jnp.ones(5)), statetx.State(jnp.zeros(())), loss

    def __call__(self, x):
        self.runs.value += 1
        return self.loss(x @ self.w.value)


IN_PARTS = {
    "interleave": lambda f, **options: statetx.microbatch(f, 4, interleave=True, **options),
    "microbatch": lambda f, **options: statetx.microbatch(f, 4, **options),
    "own dtype": lambda f, **options: statetx.microbatch(f, 4, accumulate=None, **options),
    "fit": lambda f, **options: statetx.microbatch(f, budget="1GiB", **options),
    "chunked": lambda f, **options: statetx.chunked(f, size=2, **options),
}
LOSSES = {"mean": jnp.mean, "sum": jnp.sum, "masked": lambda y: jnp.sum(y) / jnp.maximum(y.size, 1)}


@pytest.mark.sample
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("name", IN_PARTS)
@pytest.mark.parametrize("wrap", [lambda f: f, statetx.jit], ids=["eager", "jit"])
def test_batch_without_examples_is_as_without_parts(name, loss, wrap):
    # The mean of nothing is nan, and has gradients of zero: as the function alone.
    found, expected = Counting(LOSSES[loss]), Counting(LOSSES[loss])
    in_parts = IN_PARTS[name](found, reduce="sum" if loss == "sum" else "mean")
    for derivative in (
        lambda f, w: f,
        lambda f, w: statetx.value_and_grad(f, wrt=w),
        lambda f, w: statetx.grad(f, argnums=0, wrt=w),
        lambda f, w: statetx.hessian(f, wrt=w),
    ):
        actual = wrap(derivative(in_parts, found.w))(X[:0])
        assert_close(actual, derivative(expected, expected.w)(X[:0]))
        assert found.runs.value == expected.runs.value > 0


def test_outputs_of_a_batch_without_examples():
    each = lambda x: (jnp.tanh(x), x.sum(), jnp.zeros(3))
    reduce = ("concat", "stack", "last")
    shapes = [y.shape for y in statetx.microbatch(each, 4, reduce=reduce)(X[:0])]
    assert shapes == [(0, 5), (1,), (3,)]  # one part
    assert statetx.chunked(jnp.tanh, axis=1, size=4, reduce="sum")(X[:, :0]).shape == (10, 0)
    gradients = statetx.microbatch(jax.grad(sum_loss), 4, argnums=(1, 2), reduce="sum")(PARAMS, X[:0], Y[:0])
    assert_close(gradients, jax.tree.map(jnp.zeros_like, PARAMS))
    key = jax.random.key(0)
    noisy = lambda x, key: (x + jax.random.normal(key, x.shape)).sum()
    assert statetx.microbatch(noisy, 4)(X[:0], key) == 0
    weighted = statetx.microbatch(lambda x: x.mean(), 4, weight=lambda x: x[:, 0].sum())
    assert weighted(X[:0]) == 0  # all parts have the weight 0


# -- values and gradients --------------------------------------------------------------------------------------------


@pytest.mark.sample
@pytest.mark.parametrize("reduce", ["mean", "sum"])
@pytest.mark.parametrize("num", [1, 4, 5, 10])
def test_gradients_equal_the_full_batch(num, reduce):
    loss = mean_loss if reduce == "mean" else sum_loss
    expected = jax.value_and_grad(loss)(PARAMS, X, Y)
    of_gradients = statetx.microbatch(jax.value_and_grad(loss), num, argnums=(1, 2), reduce=reduce)
    of_loss = jax.value_and_grad(statetx.microbatch(loss, num, argnums=(1, 2), reduce=reduce))
    for f in (of_gradients, of_loss):
        assert_close(f(PARAMS, X, Y), expected)
    assert_close(jax.jit(of_loss)(PARAMS, X, Y), expected)


@pytest.mark.slow
def test_derivatives_of_a_loss_in_parts():
    """With respect to the batch, too; in forward mode; of second order; for each example of a vmap."""
    loss = statetx.microbatch(mean_loss, 4, argnums=(1, 2))
    assert_close(jax.grad(loss, (0, 1))(PARAMS, X, Y), jax.grad(mean_loss, (0, 1))(PARAMS, X, Y))
    tangent = jax.tree.map(jnp.cos, PARAMS)
    jvp = lambda f: jax.jvp(lambda p: f(p, X, Y), (PARAMS,), (tangent,))
    assert_close(jvp(loss), jvp(mean_loss))
    norm = lambda f: lambda p: sum(jnp.sum(g**2) for g in jax.tree.leaves(jax.grad(f)(p, X, Y)))
    assert_close(jax.grad(norm(loss))(PARAMS), jax.grad(norm(mean_loss))(PARAMS), rtol=1e-4, atol=1e-5)
    stacked = jax.tree.map(lambda p: jnp.stack([p, 0.5 * p]), PARAMS)
    mapped = lambda f: jax.vmap(f, in_axes=(0, None, None))
    assert_close(mapped(jax.grad(loss))(stacked, X, Y), mapped(jax.grad(mean_loss))(stacked, X, Y))
    total = lambda f: jax.grad(lambda p: mapped(f)(p, X, Y).sum())(stacked)
    assert_close(total(loss), total(mean_loss))


@pytest.mark.parametrize("how", ["mean", "sum"])
def test_a_loss_is_differentiated_without_another_run(how):
    """As many operations as the gradient function in parts: a rematerialized loop would run each part again."""
    count = lambda f: statetx.measure(f, PARAMS, X, Y, gradient=False).flops
    full = count(jax.value_and_grad(mean_loss))
    options = {"argnums": (1, 2), "reduce": how}
    of_gradients = count(statetx.microbatch(jax.value_and_grad(mean_loss), 5, **options))
    of_loss = count(jax.value_and_grad(statetx.microbatch(mean_loss, 5, **options)))
    num_params = sum(p.size for p in jax.tree.leaves(PARAMS))
    assert of_gradients <= full + 5 * 3 * (num_params + 10)
    assert of_loss <= full + 5 * 3 * (num_params + 10)


@pytest.mark.slow
def test_has_aux_and_reductions():
    def loss(params, x, y):
        out = jnp.tanh(x @ params["a"]) @ params["b"]
        error = ((out - y) ** 2).mean(1)
        return error.mean(), {"out": out, "max": error.max(), "num": (error > 1).sum(), "last": x[-1], "first": x[0]}

    reduce = (("mean", {"out": "concat", "max": "stack", "num": "sum", "last": "last", "first": "first"}), "mean")
    for num in (4, 5):
        f = statetx.microbatch(jax.value_and_grad(loss, has_aux=True), num, argnums=(1, 2), reduce=reduce)
        (value, aux), grads = jax.jit(f)(PARAMS, X, Y)
        (expected, expected_aux), expected_grads = jax.value_and_grad(loss, has_aux=True)(PARAMS, X, Y)
        assert_close((value, grads), (expected, expected_grads))
        for name in ("out", "num", "last", "first"):
            np.testing.assert_allclose(aux[name], expected_aux[name], rtol=1e-5)
        assert aux["max"].shape == (num,) and aux["num"].dtype == jnp.int32
        np.testing.assert_allclose(aux["max"].max(), expected_aux["max"], rtol=1e-5)
        # As a loss, too: what is not the loss keeps its derivative.
        in_parts = statetx.microbatch(loss, num, argnums=(1, 2), reduce=reduce[0])
        assert_close(jax.grad(in_parts, has_aux=True)(PARAMS, X, Y)[0], expected_grads)
        of_out = lambda f: jax.grad(lambda p: (f(p, X, Y)[1]["out"] ** 3).sum())(PARAMS)
        assert_close(of_out(in_parts), of_out(loss), rtol=1e-4, atol=1e-4)


@pytest.mark.thorough
def test_means_of_integers_and_of_half_precision():
    f = statetx.microbatch(lambda x: {"hits": (x > 3).mean(), "num": (x > 3).sum(), "any": x > 8}, 3, reduce="mean")
    out = f(jnp.arange(9.0).astype(jnp.bfloat16))
    assert out["hits"].dtype == jnp.float32 and out["num"].dtype == jnp.float32 and out["any"].dtype == jnp.float32
    np.testing.assert_allclose(out["num"], 5 / 3, rtol=1e-6)
    half = statetx.microbatch(lambda x: x.mean(), 4)(jnp.full(10, 3.0, jnp.bfloat16))
    assert half.dtype == jnp.bfloat16 and float(half) == 3.0


@pytest.mark.parametrize("how", ["first", "last", "stack"])
def test_outputs_that_are_random_keys(how):
    def loss(x, key):
        return (x**2).sum(), jax.random.split(key)

    key = jax.random.key(7)
    each = jax.vmap(jax.random.split)(jax.random.split(key, 3))  # of the parts
    expected = {"first": each[0], "last": each[-1], "stack": each}[how]
    in_parts = statetx.microbatch(loss, 3, reduce=("sum", how))
    (value, keys), gradient = jax.value_and_grad(in_parts, has_aux=True)(jnp.arange(9.0), key)
    assert value == 204 and keys.dtype == key.dtype
    np.testing.assert_array_equal(jax.random.key_data(keys), jax.random.key_data(expected))
    np.testing.assert_array_equal(gradient, 2 * jnp.arange(9.0))


@pytest.mark.sample
@pytest.mark.parametrize("num", [3, 2])
def test_mean_over_a_mask(num):
    mask = jnp.array(
        [1, 1, 0, 1, 0, 0, 0, 0, 1, 1.0]
    )  # no example of the second of three parts counts: its mean is nan

    def loss(params, x, y, mask):
        error = ((jnp.tanh(x @ params["a"]) @ params["b"] - y) ** 2).mean(1)
        return (error * mask).sum() / mask.sum()

    expected = jax.value_and_grad(loss)(PARAMS, X, Y, mask)
    options = {"argnums": (1, 2, 3), "weight": lambda params, x, y, mask: mask.sum()}
    assert_close(statetx.microbatch(jax.value_and_grad(loss), num, **options)(PARAMS, X, Y, mask), expected)
    assert_close(jax.value_and_grad(statetx.microbatch(loss, num, **options))(PARAMS, X, Y, mask), expected)
    unweighted = statetx.microbatch(loss, 2, argnums=(1, 2, 3))(PARAMS, X, Y, mask)
    assert abs(unweighted - expected[0]) > 1e-2


LEFT_OUT_MASK = jnp.array([1, 1, 0, 0, 1, 0.0])  # nothing in the second of three parts


def left_out_losses(scale, x, mask):
    mean = lambda e: (e * mask).sum() / mask.sum()
    return mean((scale * x) ** 2), mean(jnp.sin(scale * x))


def left_out_vector(scale, x, mask):
    return jnp.stack(left_out_losses(scale, x, mask))


@pytest.mark.thorough
@pytest.mark.parametrize("of_vector", [False, True])
def test_a_part_of_weight_zero_leaves_no_nan_in_any_derivative(of_vector):
    """Where the loss is not the only output: of first and second order, in forward mode, for each example of a vmap."""
    fun, weight = left_out_vector if of_vector else left_out_losses, lambda scale, x, mask: mask.sum()
    in_parts = statetx.microbatch(fun, 3, argnums=(1, 2), weight=weight)
    x = jnp.arange(1.0, 7.0)

    @functools.partial(jax.jit, static_argnums=0)
    def derivatives(fun):
        f = lambda s, x, mask: sum(c * loss for c, loss in zip((1.0, 3.0), fun(s, x, mask), strict=True))
        gradient = lambda s: jax.grad(f, (0, 1))(s, x, LEFT_OUT_MASK)
        masks = jnp.stack([LEFT_OUT_MASK, jnp.roll(LEFT_OUT_MASK, 2), jnp.ones(6)])
        total = lambda s: jax.vmap(lambda mask: f(s, x, mask))(masks).sum()
        forward = jax.jvp(lambda s: f(s, x, LEFT_OUT_MASK), (0.5,), (1.0,))
        return forward, jax.jvp(gradient, (0.5,), (1.0,)), jax.grad(lambda s: gradient(s)[0])(0.5), jax.grad(total)(0.5)

    assert_close(derivatives(in_parts), derivatives(fun))


@pytest.mark.thorough
def test_a_part_of_weight_zero_keeps_the_derivatives_of_its_states():
    """A loss of a carried state: the state of a part that is left out has a derivative, and so has a sum beside the
    mean.
    """

    def run(wrap):
        h = statetx.State(jnp.float32(0.1))

        def step(w, x, mask):
            h.value = jnp.tanh(h.value * w + x.sum())
            return (h.value**2 * mask).sum() / mask.sum(), (w * x).sum()

        mean, total = wrap(step)
        return mean + total + h.value

    def in_python(step, w, x):
        means, totals = [], []
        for n in range(0, 6, 2):
            mean, total = step(w, x[n : n + 2], LEFT_OUT_MASK[n : n + 2])
            totals.append(total)
            means += [LEFT_OUT_MASK[n : n + 2].sum() / 3 * mean] if n != 2 else []
        return sum(means), sum(totals)

    options = {"argnums": (1, 2), "weight": lambda w, x, mask: mask.sum(), "reduce": ("mean", "sum")}
    in_parts = lambda step, w, x: statetx.microbatch(step, 3, **options)(w, x, LEFT_OUT_MASK)
    gradient = lambda way: jax.value_and_grad(lambda w, x: run(lambda step: way(step, w, x)), (0, 1))
    args = 0.7, jnp.linspace(-0.4, 0.3, 6)
    assert_close(jax.jit(gradient(in_parts))(*args), gradient(in_python)(*args))


@pytest.mark.parametrize("how", ["first", "last"])
def test_the_first_and_the_last_part_alone_have_derivatives(how):
    x = jnp.array([1.0, 2.0, 0.0, 4.0, 5.0, 6.0])  # the root has no derivative at 0
    root, roots = lambda x: jnp.sqrt(x).sum(), lambda x: (jnp.sqrt(x).sum(), jnp.sqrt(x + 1).sum())
    expected = jnp.where(jnp.arange(6) < 2 if how == "first" else jnp.arange(6) >= 4, 0.5 / jnp.sqrt(x), 0.0)
    assert_close(jax.grad(statetx.microbatch(root, 3, reduce=how))(x), expected)
    both = statetx.microbatch(roots, 3, reduce=(how, "sum"))
    assert_close(jax.grad(lambda x: sum(both(x)))(x), expected + 0.5 / jnp.sqrt(x + 1))


@pytest.mark.slow
def test_a_weighted_loss_beside_states_is_differentiated_without_another_run():
    def program(wrap):
        seen = statetx.State(jnp.zeros(7))

        def loss(params, x, y, mask):
            hidden = jnp.tanh(x @ params["a"])
            seen.value = 0.9 * seen.value + hidden.mean(0)
            return (((hidden @ params["b"] - y) ** 2).mean(1) * mask).sum() / mask.sum()

        return wrap(loss)

    options = {"argnums": (1, 2, 3), "weight": lambda params, x, y, mask: mask.sum()}
    of_gradients = program(lambda f: statetx.microbatch(statetx.value_and_grad(f), 5, **options))
    of_loss = program(lambda f: statetx.value_and_grad(statetx.microbatch(f, 5, **options)))
    mask = jnp.ones(10).at[2:4].set(0.0)
    count = lambda f: statetx.measure(f, PARAMS, X, Y, mask, gradient=False)
    assert count(of_loss).flops <= 1.02 * count(of_gradients).flops
    assert count(of_loss).temp_bytes <= 1.1 * count(of_gradients).temp_bytes
    assert_close(statetx.jit(of_loss)(PARAMS, X, Y, mask), statetx.jit(of_gradients)(PARAMS, X, Y, mask))


# -- states ----------------------------------------------------------------------------------------------------------


class Norm:
    """Running statistics, a counter, a random draw."""

    def __init__(self):
        self.w = statetx.Param(jnp.array([0.5, -1.5, 2.0, 0.1, 1.0]))
        self.mean = statetx.State(jnp.zeros(5))
        self.count = statetx.State(0)
        self.rng = statetx.RngState(jax.random.key(3))

    def loss(self, x):
        self.mean.value = 0.9 * self.mean.value + 0.1 * x.mean(0)
        self.count.value += 1
        mask = jax.random.bernoulli(self.rng.next(), 0.5, x.shape)
        return (((x - x.mean(0, keepdims=True)) * mask) @ self.w.value).sum() ** 2 / x.shape[0]


def python_loop(model, num, x=X):
    """What a loop leaves: the value and gradient of each part, weighted by its size."""
    f = statetx.value_and_grad(model.loss, wrt=model.w)
    results = [(len(part) / len(x), f(part)) for part in parts(x, num)]
    return jax.tree.map(lambda *leaves: sum(leaves), *[jax.tree.map(lambda a, w=w: w * a, r) for w, r in results])


def state_values(model):
    return {
        path: jax.random.key_data(s.value) if path == "rng" else s.value for path, s in statetx.states(model).items()
    }


@pytest.mark.sample
@pytest.mark.parametrize("num", [2, 4])
@pytest.mark.parametrize("kind", ["gradients", "loss", "jit"])
def test_states_are_carried_as_a_loop_leaves_them(num, kind):
    a, b = Norm(), Norm()
    expected = python_loop(a, num)
    if kind == "gradients":
        f = statetx.microbatch(statetx.value_and_grad(b.loss, wrt=b.w), num)
    else:
        f = statetx.value_and_grad(statetx.microbatch(b.loss, num), wrt=b.w)
    f = statetx.jit(f) if kind == "jit" else f
    assert_close(f(X), expected)
    assert_close(state_values(b), state_values(a))
    assert int(b.count.value) == num


@pytest.mark.slow
def test_mean_first_and_last():
    written = [0.9 * 2.0 + 0.1 * part.mean(0) for part in parts(X, 4)]
    expected = {
        statetx.Mean: sum(len(p) / 10 * v for p, v in zip(parts(X, 4), written, strict=True)),
        statetx.First: written[0],
        statetx.Last: written[-1],
    }
    for rule, value in expected.items():
        model = Norm()
        model.mean.value = jnp.full(5, 2.0)
        rules = {"*mean": rule, "*count": rule}
        step = statetx.microbatch(statetx.value_and_grad(model.loss, wrt=model.w), 4, states=rules)
        statetx.jit(step)(X)
        np.testing.assert_allclose(model.mean.value, value, rtol=1e-5)
        assert int(model.count.value) == 1 and jnp.issubdtype(model.count.value.dtype, jnp.integer)


def test_mean_of_momentum_updates_is_the_update_of_the_full_batch():
    full, model = Norm(), Norm()
    full.loss(X)
    statetx.microbatch(model.loss, 5, states={"*mean": statetx.Mean})(X)
    np.testing.assert_allclose(model.mean.value, full.mean.value, rtol=1e-5, atol=1e-7)


@pytest.mark.thorough
def test_random_states_are_carried_split_or_shared():
    def draws(**options):
        rng = statetx.RngState(jax.random.key(1))
        f = statetx.microbatch(lambda x: jax.random.normal(rng.next(), x.shape), 4, reduce="concat", **options)
        return f(jnp.zeros(10)), jax.random.key_data(rng.value)

    def advanced(num):
        rng = statetx.RngState(jax.random.key(1))
        values = [jax.random.normal(rng.next(), (len(part),)) for part in parts(np.zeros(10), num)]
        return jnp.concatenate(values), jax.random.key_data(rng.value)

    assert_close(draws(), advanced(4))
    rng = statetx.RngState(jax.random.key(1))
    keys = jax.random.split(rng.value, 5)
    out, after = draws(states={statetx.RngState: statetx.Split})
    assert_close(after, jax.random.key_data(keys[0]))
    assert len({float(v) for v in out}) == 10
    shared, after = draws(states={statetx.RngState: statetx.Broadcast})
    np.testing.assert_array_equal(shared[:3], shared[3:6])
    assert_close(after, advanced(1)[1])


def test_a_random_key_among_the_arguments_is_split():
    f = statetx.microbatch(lambda x, key: x + jax.random.normal(key), 4, argnums=(0, 1), reduce="concat")
    out = f(jnp.zeros(10), jax.random.key(5))
    keys = jax.random.split(jax.random.key(5), 4)
    np.testing.assert_allclose(out, np.repeat([jax.random.normal(k) for k in keys], [3, 3, 2, 2]), rtol=1e-6)


@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("num", [4, 5])
def test_a_state_with_a_batch_axis(axis, num):
    """The membrane potentials of a batch: a part reads and writes the ones of its own examples."""
    start = jnp.moveaxis(jnp.arange(50.0).reshape(10, 5), 0, axis)
    h = statetx.State(start)

    def step(x):
        value = jnp.moveaxis(h.value, axis, 0) * 0.5 + x
        h.value = jnp.moveaxis(value, 0, axis)
        return (value**2).mean()

    expected = step(X), h.value
    h.value = start
    assert_close((statetx.jit(statetx.microbatch(step, num, states={"h": axis}))(X), h.value), expected)


@pytest.mark.thorough
def test_a_gradient_flows_through_carried_states():
    """A loss that reads what former parts wrote is differentiated as a loop is."""

    def run(wrap):
        h = statetx.State(jnp.zeros(5))

        def step(w, x):
            h.value = jnp.tanh(h.value * w + x.sum(0))
            return (h.value**2).sum()

        f = wrap(step)
        return statetx.value_and_grad(lambda w: (f(w, X), h.value.sum()), has_aux=True)(0.7), h.value

    in_parts = run(lambda step: statetx.microbatch(step, 5, argnums=1, reduce="sum"))
    in_python = run(lambda step: lambda w, x: sum(step(w, part) for part in parts(x, 5)))
    assert_close(in_parts, in_python, rtol=1e-4)


def test_broadcast_that_is_written_is_refused():
    model = Norm()
    with pytest.raises(statetx.StateAccessError, match="'.*mean' .*is declared Broadcast and was written"):
        statetx.microbatch(model.loss, 2, states={"*mean": statetx.Broadcast})(X)
    with pytest.raises(statetx.StateFilterError, match="selects no state"):
        statetx.microbatch(model.loss, 2, states={"*meen": statetx.Mean})(X)


def test_a_call_is_atomic():
    model = Norm()

    def failing(x):
        loss = model.loss(x)
        if x.shape[0] == 2:
            raise KeyError("the second size")
        return loss

    with pytest.raises(KeyError):
        statetx.microbatch(failing, 4)(X)
    assert_close(state_values(model), state_values(Norm()))


# -- programs of other libraries -------------------------------------------------------------------------------------


def test_gradient_function_of_brainstate_with_a_state_along_the_batch():
    w, v = brainstate.ParamState(jnp.eye(5) * 0.5), brainstate.HiddenState(jnp.zeros((10, 5)))

    def loss(x):
        v.value = 0.8 * v.value + x @ w.value
        return (v.value**2).mean()

    gradient = brainstate.transform.grad(loss, w, return_value=True)
    expected = gradient(X), v.value
    v.value = jnp.zeros((10, 5))
    assert_close((statetx.microbatch(gradient, 4, states={brainstate.HiddenState: 0})(X), v.value), expected)


@pytest.mark.parametrize("value_and_grad", [nnx.value_and_grad, statetx.value_and_grad])
def test_gradients_in_the_form_of_a_flax_module(value_and_grad):
    """Their Variables are made in each part, and end with it; those that are returned hold the mean."""
    net = nnx.Sequential(jnp.tanh, nnx.Linear(5, 3, rngs=nnx.Rngs(0)))
    gradient = value_and_grad(lambda net, x, y: ((net(x) - y) ** 2).mean())
    expected_value, expected = gradient(net, X, Y)
    value, gradients = statetx.jit(statetx.microbatch(gradient, 2, argnums=(1, 2)))(net, X, Y)
    assert type(gradients) is type(expected) and jax.tree.structure(gradients) == jax.tree.structure(expected)
    assert_close([value, *jax.tree.leaves(gradients)], [expected_value, *jax.tree.leaves(expected)])

    assert statetx.microbatch(gradient, budget="1MiB", argnums=(1, 2)).fit(net, X, Y).num == 1

    optimizer = nnx.Optimizer(net, optax.sgd(0.1), wrt=nnx.Param)
    before = net.layers[1].kernel[...]
    optimizer.update(net, gradients)
    np.testing.assert_allclose(net.layers[1].kernel[...], before - 0.1 * jax.tree.leaves(expected)[1], rtol=1e-5)


def test_variables_that_are_not_new_are_no_outputs():
    net = nnx.Linear(5, 3, rngs=nnx.Rngs(0))
    with pytest.raises(statetx.StateValueError, match="is a Linear, which is not an array"):
        statetx.microbatch(lambda x: (net, net(x).mean()), 2)(X)


# -- nesting ---------------------------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_remat_inside_a_part_lowers_its_memory():
    """Forward and backward pass of a part share a loop body: there the recomputation must not be merged with the first
    computation.
    """
    blocks = jnp.stack([jnp.eye(32)] * 8)

    def loss_of(block):
        def loss(ws, x):
            for w in ws:
                x = block(w, x)
            return (x**2).mean()

        return loss

    block = lambda w, x: jnp.tanh(jnp.tanh(jnp.tanh(x @ w) @ w) @ w)
    x = jnp.ones((512, 32))

    def temp(block):
        f = jax.value_and_grad(statetx.microbatch(loss_of(block), 2, argnums=1))
        return statetx.measure(f, blocks, x, gradient=False).temp_bytes

    assert temp(statetx.remat(block)) < 0.6 * temp(block)


@pytest.mark.sample
@pytest.mark.parametrize("check_vma", [True, False])
def test_inside_shard_map(check_vma):
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    x, y = X[:8], Y[:8]
    expected = jax.value_and_grad(mean_loss)(PARAMS, x, y)
    in_parts = statetx.microbatch(mean_loss, 2, argnums=(1, 2))

    def local(params, x, y):
        return jax.lax.pmean(in_parts(params, x, y), "d")

    def local_gradients(params, x, y):
        params = jax.tree.map(lambda p: jax.lax.pcast(p, "d", to="varying") if check_vma else p, params)
        f = statetx.microbatch(jax.value_and_grad(mean_loss), 2, argnums=(1, 2))
        return jax.lax.pmean(f(params, x, y), "d")

    shard = lambda f: jax.shard_map(f, mesh=mesh, in_specs=(P(), P("d"), P("d")), out_specs=P(), check_vma=check_vma)
    assert_close(jax.jit(shard(local_gradients))(PARAMS, x, y), expected)
    if check_vma:
        assert_close(jax.jit(jax.value_and_grad(shard(local)))(PARAMS, x, y), expected)


def test_rule_on_a_weight_that_devices_share_inside_shard_map():
    """A rule is staged for the type that the weight has, which does not vary between devices."""

    @jax.custom_vjp
    def rounded(w):
        return jnp.round(4 * w) / 4

    rounded.defvjp(lambda w: (rounded(w), None), lambda _, ct: (0.9 * ct,))

    def loss(params, x, y):
        return mean_loss(jax.tree.map(rounded, params), x, y)

    def local(params, x, y):
        return jax.lax.pmean(statetx.microbatch(loss, 2, argnums=(1, 2))(params, x, y), "d")

    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    sharded = jax.shard_map(local, mesh=mesh, in_specs=(P(), P("d"), P("d")), out_specs=P())
    arrays = PARAMS, X[:8], Y[:8]
    assert_close(jax.jit(jax.value_and_grad(sharded))(*arrays), jax.value_and_grad(loss)(*arrays))


def test_rule_on_examples_inside_shard_map_needs_no_loop_of_its_own():
    """They vary between devices: value and gradient of a part are computed together, as outside."""

    @jax.custom_jvp
    def rounded(x):
        return jax.lax.erf(x)

    rounded.defjvp(lambda primals, tangents: (rounded(*primals), 0.9 * tangents[0]))
    loss = lambda w, x: jnp.mean(rounded(x * w.sum()))
    in_parts = statetx.microbatch(loss, 2, argnums=1)
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    sharded = jax.shard_map(
        lambda w, x: jax.lax.pmean(in_parts(w, x), "d"), mesh=mesh, in_specs=(P(), P("d")), out_specs=P()
    )
    arrays = jnp.ones(3), X[:8]
    num_loops = lambda f: str(jax.make_jaxpr(jax.value_and_grad(f))(*arrays)).count("scan[")
    assert num_loops(sharded) == num_loops(in_parts) == 1


@pytest.mark.sample
@pytest.mark.parametrize("axis_type", ["Auto", "Explicit"])
def test_a_sharded_batch_stays_on_its_devices(axis_type):
    """No part of the batch moves: the only communication is the sum of the gradients."""
    mesh = jax.make_mesh((2,), ("d",), axis_types=(getattr(jax.sharding.AxisType, axis_type),))
    with jax.set_mesh(mesh):
        x = jax.device_put(jnp.tile(X[:8], (4, 1)), NamedSharding(mesh, P("d")))
        y = jax.device_put(jnp.tile(Y[:8], (4, 1)), NamedSharding(mesh, P("d")))
        params = jax.device_put(PARAMS, NamedSharding(mesh, P()))
        expected = jax.value_and_grad(mean_loss)(params, x, y)
        f = statetx.jit(statetx.microbatch(jax.value_and_grad(mean_loss), 4, argnums=(1, 2)))
        text = f.lower(params, x, y).compile().as_text()
        assert "all-reduce" in text
        assert not any(word in text for word in ("all-gather", "all-to-all", "collective-permute"))
        assert_close(f(params, x, y), expected)


@pytest.mark.thorough
def test_parts_that_the_devices_do_not_divide():
    """On explicit axes, where types forbid uneven shards, the batch is gathered."""
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        x, y = jax.device_put((X[:8], Y[:8]), NamedSharding(mesh, P("d")))
        params = jax.device_put(PARAMS, NamedSharding(mesh, P()))
        expected = jax.value_and_grad(mean_loss)(params, x, y)
        for f in (
            statetx.microbatch(jax.value_and_grad(mean_loss), 3, argnums=(1, 2)),
            jax.value_and_grad(statetx.microbatch(mean_loss, 3, argnums=(1, 2))),
        ):
            assert_close(f(params, x, y), expected)


@pytest.mark.parametrize("num", [2, 4])
def test_consecutive_parts_of_a_batch_that_explicit_axes_divide(num):
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        x = jax.device_put(jnp.arange(8.0), NamedSharding(mesh, P("d")))
        f = statetx.microbatch(jnp.sum, num, reduce="stack", interleave=False)
        np.testing.assert_array_equal(f(x), np.arange(8.0).reshape(num, -1).sum(1))


def test_interleaved_parts():
    rows = statetx.microbatch(lambda x: x, 5, reduce="stack", interleave=True)(jnp.arange(10))
    np.testing.assert_array_equal(rows, np.arange(10).reshape(2, 5).T)
    joined = statetx.microbatch(lambda x: x, 4, reduce="concat", interleave=True)(jnp.arange(10))
    np.testing.assert_array_equal(joined, np.arange(10))


def test_python_runs_once_for_each_size():
    counted = Counted(lambda x: x.sum())
    statetx.microbatch(counted, 5)(X)
    assert counted.runs == 1
    statetx.microbatch(counted, 4)(X)
    assert counted.runs == 3


def test_equal_calls_compile_once():
    f = statetx.value_and_grad(statetx.microbatch(mean_loss, 4, argnums=(1, 2)))
    f(PARAMS, X, Y)
    with compilations() as count:
        f(PARAMS, X, Y)
    assert len(count) == 0

    # The steps of other outputs are rematerialized by JAX's own scan, which an eager gradient compiles again; but
    # nothing else.
    losses = lambda *args: (mean_loss(*args), sum_loss(*args))
    in_parts = statetx.microbatch(losses, 5, argnums=(1, 2), reduce=("mean", "first"))
    of_first = statetx.value_and_grad(lambda *args: in_parts(*args)[1])
    of_first(PARAMS, X, Y)
    with compilations() as count:
        of_first(PARAMS, X, Y)
    assert len(count) <= 1


def test_callbacks_fire_once_a_part():
    seen = []

    def loss(w, x):
        jax.debug.callback(lambda v: seen.append(float(v)), x[0])
        return (w * x).mean()

    def effectful(w, x):
        jax.experimental.io_callback(lambda v: seen.append(float(v)), None, x[0])
        return (w * x).mean()

    jax.jit(jax.grad(statetx.microbatch(loss, 5, argnums=1)))(1.0, jnp.arange(10.0))
    jax.effects_barrier()
    assert sorted(seen) == [0, 2, 4, 6, 8]
    seen.clear()
    jax.jit(statetx.microbatch(jax.value_and_grad(effectful), 5, argnums=1))(1.0, jnp.arange(10.0))
    jax.effects_barrier()
    assert sorted(seen) == [0, 2, 4, 6, 8]


@pytest.mark.slow
def test_as_a_method_and_other_precisions():
    class Model:
        def __init__(self):
            self.w = statetx.Param(PARAMS["a"])

        @statetx.microbatch(num=4)
        def loss(self, x):
            return ((x @ self.w.value) ** 2).mean()

    model = Model()
    expected = jax.grad(lambda w: ((X @ w) ** 2).mean())(PARAMS["a"])
    assert_close(statetx.grad(model.loss, wrt=model.w)(X), expected)
    with jax.numpy_dtype_promotion("strict"):
        f = statetx.microbatch(lambda w, x: (x * w).sum(), 4, argnums=1, reduce="sum", weight=lambda w, x: x.size)
        assert jax.grad(f)(jnp.bfloat16(1), jnp.ones(10, jnp.bfloat16)) == 10
        f = statetx.microbatch(lambda x: (x * 1j).mean(), 4, weight=lambda x: x.size)
        assert_close(f(jnp.arange(10, dtype=jnp.complex64)), 4.5j)
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda a: a.astype(jnp.float64), (PARAMS, X, Y))
        actual = jax.value_and_grad(statetx.microbatch(mean_loss, 4, argnums=(1, 2)))(*wide)
        assert_close(actual, jax.value_and_grad(mean_loss)(*wide), rtol=1e-12)


@pytest.mark.thorough
def test_complex_parameters():
    z = PARAMS["a"] * (1 + 0.5j)
    loss = lambda z, x: (jnp.abs(x @ z) ** 2).mean()
    f = statetx.microbatch(loss, 4, argnums=1)
    assert_close(jax.grad(f)(z, X), jax.grad(loss)(z, X))
    jvp = lambda f: jax.jvp(lambda z: f(z, X), (z,), (1j * z + 1,))
    assert_close(jvp(f), jvp(loss))


def test_under_disable_jit():
    expected = mean_loss(PARAMS, X, Y)
    with jax.disable_jit():
        assert_close(statetx.microbatch(mean_loss, 4, argnums=(1, 2))(PARAMS, X, Y), expected)


# -- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gradients", "loss"])
def test_eight_parts_take_a_sixth_of_the_memory(kind):
    import programs

    program = programs.transformer(layers=2, width=64, heads=4, time=64, batch=16)
    full = jax.value_and_grad(program.loss)
    if kind == "gradients":
        in_parts = statetx.microbatch(full, 8, argnums=1)
    else:
        in_parts = jax.value_and_grad(statetx.microbatch(program.loss, 8, argnums=1))
    temp = lambda f: statetx.measure(f, program.params, *program.data, gradient=False).temp_bytes
    assert 6 * temp(in_parts) <= temp(full)


@pytest.mark.parametrize("kind", ["gradients", "loss"])
def test_one_buffer_accumulates_gradients(kind):
    """The gradients are an output; beside them no more than one layer's is alive."""
    ws = [jnp.eye(128)] * 8

    def loss(ws, x):
        for w in ws:
            x = jnp.tanh(x @ w)
        return (x**2).mean()

    if kind == "gradients":
        f = statetx.microbatch(jax.value_and_grad(loss), 4, argnums=1)
    else:
        f = jax.value_and_grad(statetx.microbatch(loss, 4, argnums=1))
    cost = statetx.measure(f, ws, jnp.ones((8, 128)), gradient=False)
    one = 128 * 128 * 4
    assert 8 * one <= cost.output_bytes < 8.1 * one
    assert cost.temp_bytes < 2.5 * one


# -- half precision --------------------------------------------------------------------------------------------------

ONE, ONES = jnp.bfloat16(1), jnp.ones(512, jnp.bfloat16)  # added up in bfloat16 one by one, 512 ones are 256
in_ones = functools.partial(statetx.microbatch, num=512, argnums=1, reduce="sum")


def half_square(w, x):
    return (w * x) ** 2 / 2  # its gradient and its second derivative are 1, too


def summed(w, x, **options):
    return in_ones(lambda w, x: half_square(w, x)[0], **options)(w, x)


HALF_PRECISION = {
    "vector": lambda w: jax.vjp(lambda w: in_ones(half_square)(w, ONES), w)[1](jnp.ones(1, jnp.bfloat16))[0],
    "loss": lambda w: jax.grad(summed)(w, ONES),
    "sum of outputs": lambda w: 2 * summed(w, ONES),
    "gradients": lambda w: in_ones(jax.grad(lambda w, x: half_square(w, x)[0]))(w, ONES),
    "chunked": lambda w: jax.grad(
        lambda w: statetx.chunked(lambda x: half_square(w, x)[0], size=1, reduce="sum")(ONES)
    )(w),
    "weight": lambda w: jax.grad(
        statetx.microbatch(lambda w, x: 512 * half_square(w, x)[0], 512, argnums=1, weight=lambda w, x: x.sum())
    )(w, ONES),
    "forward": lambda w: jax.jvp(lambda w: summed(w, ONES), (w,), (ONE,))[1],
    "second, reverse": lambda w: jax.grad(jax.grad(summed))(w, ONES),
    "second, forward": lambda w: jax.jvp(lambda w: jax.grad(summed)(w, ONES), (w,), (ONE,))[1],
    "jit": lambda w: jax.jit(jax.grad(summed))(w, ONES),
    "vmap": lambda w: jax.vmap(jax.grad(summed), (0, None))(w[None], ONES)[0],
    "sum of vmap": lambda w: jax.grad(lambda w: jax.vmap(summed, (0, None))(w[None], ONES).sum())(w),
    "remat": lambda w: jax.grad(statetx.remat(summed))(w, ONES),
    "nested": lambda w: jax.grad(statetx.microbatch(lambda w, x: summed(w, x, num=32), 16, argnums=1, reduce="sum"))(
        w, ONES
    ),
    "budget": lambda w: jax.grad(
        statetx.microbatch(lambda w, x: half_square(w, x).sum(), budget="4KiB", argnums=1, reduce="sum")
    )(w, ONES),
}


def test_a_vector_is_no_loss_and_a_tree_is_averaged():
    x = jnp.arange(8.0)
    vector = lambda x: x.sum() * jnp.ones(3)
    with pytest.raises(statetx.StateValueError, match=r"is for a loss, and .* returns f32\[3\] for a part"):
        statetx.chunked(vector, size=4)(x)
    tree = lambda x: {"v": vector(x), "num": (x > 4).sum()}
    for averaged in (statetx.chunked(tree, size=4), statetx.microbatch(tree, 2)):
        np.testing.assert_array_equal(averaged(x)["v"], [14.0] * 3)
        assert averaged(x)["num"] == 1.5


def test_state_with_a_value_for_each_example_is_told_how_to_have_them():
    s = statetx.State(jnp.zeros((8, 3)))

    def loss(x):
        s.value = jnp.stack([x, x, x], axis=1)
        return x.sum()

    message = r"(?s)f32\[8,3\] and leaves as f32\[4,3\].*gives each part its own"
    with pytest.raises(statetx.CarryTypeError, match=message):
        statetx.microbatch(loss, 2)(jnp.arange(8.0))


@pytest.mark.sample
@pytest.mark.parametrize("name", HALF_PRECISION)
def test_half_precision_adds_up(name):
    got = HALF_PRECISION[name](ONE)
    assert got.dtype == jnp.bfloat16 and got == 512


@pytest.mark.sample
@pytest.mark.parametrize("run", ["loss", "gradients", "chunked"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e5m2", "float32", "float64", "complex64"])
def test_dtypes_that_are_widened(dtype, run):
    with jax.enable_x64(True):
        w, x = jnp.ones((), dtype), (1 + jax.random.uniform(KEYS[0], 512)).astype(dtype)
        f = lambda w, x: jnp.real(w * x).sum()

        def gradient(**options):
            if run == "gradients":
                return in_ones(jax.grad(f), **options)(w, x)
            if run == "loss":
                return jax.grad(in_ones(f, **options))(w, x)
            return jax.grad(lambda w: statetx.chunked(lambda x: f(w, x), size=1, reduce="sum", **options)(x))(w)

        # One by one, without and with a wider sum.
        narrow, wide = jnp.zeros((), dtype), np.sum(np.asarray(x, np.complex128))
        for g in x:
            narrow += g.conj()
        assert gradient(accumulate=None).dtype == x.dtype and gradient(accumulate=None) == narrow
        if jnp.finfo(dtype).bits < 32:
            assert gradient() == gradient(accumulate=jnp.float64) == wide.real.astype(dtype) != narrow
        else:
            assert gradient() == narrow


def test_means_of_half_precision():
    """Outputs and statistics are rounded once, between groups of parts of two sizes, too."""
    statistic = statetx.State(jnp.bfloat16(0))
    x = (1 + jnp.arange(1000) % 3 / 128).astype(jnp.bfloat16)

    def mean(x):
        statistic.value = x.mean()
        return x.mean()

    got = statetx.microbatch(mean, 300, states={statetx.State: statetx.Mean})(x)
    assert got == statistic.value == np.asarray(x, np.float64).mean().astype(x.dtype) and got.dtype == x.dtype
    got = statetx.microbatch(mean, 300, states={statetx.State: statetx.Mean}, accumulate=None)(x)
    assert got == statistic.value != np.asarray(x, np.float64).mean().astype(x.dtype)


@pytest.mark.slow
def test_half_precision_states_and_devices():
    """A weight in a state, carried statistics, examples over devices."""
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    w, seen = statetx.Param(ONE), statetx.State(jnp.int32(0))

    def loss(x):
        seen.value += 1
        return half_square(w.value, x)[0]

    grad = statetx.grad(statetx.microbatch(loss, 512, reduce="sum"), wrt=w)
    assert grad(ONES) == statetx.jit(grad)(ONES) == 512 and seen.value == 1024
    local = lambda x: jax.lax.psum(statetx.microbatch(loss, 512, reduce="sum")(x), "d")
    split = statetx.shard_map(local, mesh=mesh, in_specs=P("d"), out_specs=P())
    assert statetx.grad(split, wrt=w)(jnp.tile(ONES, 2)) == 1024
    assert seen.value == 1536


@pytest.mark.thorough
def test_gradients_keep_the_scale_of_the_loss():
    """The share of a part, 1/512, and its gradient have a product that float16 cannot hold; so has their sum until it
    is scaled.
    """
    w, x = jnp.float16(1), jnp.full(512, 2.0**-24, jnp.float16).at[1:].set(0)
    loss = lambda w, x, *_: (w * x)[0]
    scaled = lambda f, *args: jax.grad(lambda w: 2.0**10 * f(w, x, *args).astype(float))(w)
    assert scaled(statetx.microbatch(loss, 512, argnums=1)) == 2.0**-23
    assert scaled(statetx.microbatch(loss, 512, argnums=1, weight=lambda w, x: len(x))) == 2.0**-23
    assert jax.grad(statetx.microbatch(lambda w, x: 512 * loss(w, x), 512, argnums=1), 1)(w, x)[0] == 1


# -- errors ----------------------------------------------------------------------------------------------------------


def test_errors_name_the_fix():
    with pytest.raises(ValueError, match=r"(?s)differ in length.*params\['a'\] .*has 5.*x .*has 10.*argnums=1"):
        statetx.microbatch(mean_loss, 2)(PARAMS, X, Y)
    with pytest.raises(ValueError, match="10 examples cannot be split into 11 parts"):
        statetx.microbatch(lambda x: x.sum(), 11)(X)
    with pytest.raises(ValueError, match="scale is a f32.* no axis 0"):
        statetx.microbatch(lambda x, scale: (x * scale).sum(), 2)(X, jnp.float32(2))
    for num in (0, 2.5, True, "many"):
        with pytest.raises(statetx.StaticArgumentError, match="not a number of parts"):
            statetx.microbatch(mean_loss, num)
    with pytest.raises(statetx.StaticArgumentError, match="needs a budget"):
        statetx.microbatch(mean_loss, "fit")
    with pytest.raises(statetx.StaticArgumentError, match="do not go together"):
        statetx.microbatch(mean_loss, 2, budget="1GiB")
    with pytest.raises(statetx.StaticArgumentError, match="reduce='average' is not one of"):
        statetx.microbatch(mean_loss, 2, reduce="average")
    with pytest.raises(statetx.StaticArgumentError, match="accumulate='int32' is not a dtype of floats"):
        statetx.microbatch(mean_loss, 2, accumulate="int32")
    with pytest.raises(statetx.StaticArgumentError, match="^argnums=7 is out of range"):
        statetx.microbatch(mean_loss, 2, argnums=7)
    with pytest.raises(statetx.StateValueError, match="not a tree prefix of the output"):
        statetx.microbatch(lambda x: (x.sum(), x.sum()), 2, reduce=("mean", "mean", "sum"))(X)
    h = statetx.State(jnp.zeros(3))
    with pytest.raises(statetx.StateValueError, match="along axis 0 by states=.*the batch has 10"):
        statetx.microbatch(lambda x: (x.sum() + h.value).sum(), 2, states={"h": 0})(X)
    with pytest.raises(statetx.StateValueError, match='"concat" is for outputs with a value for each example.*f32'):
        statetx.microbatch(lambda x: x.mean(), 3, reduce="concat")(X)
    with pytest.raises(statetx.StateValueError, match=r"4 parts of 10 examples are not equal.*f32\[3,5\].*f32\[2,5\]"):
        statetx.microbatch(jnp.sin, 4)(X)
    with pytest.raises(statetx.StaticArgumentError, match="accumulate=4 .*\nFix: num=4: the number of parts is num"):
        statetx.microbatch(mean_loss, accumulate=4)
    with pytest.raises(ValueError, match="use jax.random.key"):
        statetx.microbatch(lambda x, k: x.mean(), 2)(X, jax.random.PRNGKey(0))


def test_weights_are_numbers_and_write_no_state():
    with pytest.raises(statetx.StateValueError, match="a number for each part, and returned f32"):
        statetx.microbatch(lambda x: x.mean(), 3, weight=lambda x: x[:, 0])(X)
    calls = statetx.State(0.0)

    def weight(x):
        calls.value += 1.0
        return x.shape[0]

    with pytest.raises(statetx.StateAccessError, match="(?s)weight= may read states, and wrote .*Fix"):
        statetx.microbatch(lambda x: x.mean(), 3, weight=weight)(X)
    assert calls.value == 0.0

    scale = statetx.State(jnp.arange(3.0))
    mean = statetx.microbatch(lambda x: x.sum(), 2, weight=lambda x: x[0] + scale.value.sum())
    np.testing.assert_allclose(mean(jnp.array([1.0, 2.0, 5.0, 6.0])), (3 * 4 + 11 * 8) / 12, rtol=1e-6)


@pytest.mark.thorough
@jax.numpy_rank_promotion("allow")  # as brainstate's cells have it
def test_state_of_the_size_of_a_part_is_told_of_states():
    cell = brainstate.nn.GRUCell(3, 4)
    brainstate.nn.init_all_states(cell, batch_size=12)
    weights = cell.states(brainstate.ParamState)

    def loss(x):
        brainstate.nn.reset_all_states(cell, batch_size=len(x))
        return (cell(x) ** 2).mean()

    gradient = statetx.grad(loss, wrt=weights)
    with pytest.raises(
        statetx.CarryTypeError, match=r"Fix: if it has a value for each example, states=\{'cell\.h': 0\}"
    ):
        statetx.microbatch(gradient, 4)(jnp.ones((12, 3)))
    statetx.microbatch(gradient, 4, states={"cell.h": 0})(jnp.ones((12, 3)))
    assert cell.h.value.shape == (12, 4)


def test_smaller_parts_read_what_the_larger_ones_have_written():
    class Norm:
        def __init__(self):
            self.mean, self.is_set = statetx.State(jnp.zeros(())), False

        def __call__(self, x):
            if not self.is_set:  # when the larger parts are traced, and not when the smaller ones are
                self.mean.value, self.is_set = x.mean(), True
            return self.mean.value

    for make in (
        lambda f: statetx.microbatch(f, 2, reduce="stack"),
        lambda f: statetx.chunked(f, 0, 3, reduce="stack"),
    ):
        norm = Norm()
        out = make(norm)(jnp.arange(5.0))
        np.testing.assert_array_equal(out, [1.0, 1.0])
        assert float(norm.mean.value) == 1.0


# -- training steps --------------------------------------------------------------------------------------------------


class _Net(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(jnp.ones(()))

    def __call__(self, x):
        return (self.w * x).mean()


def training_steps():
    """Functions that update a weight with its gradient; each has a weight of its own."""

    def with_optimizer(wrap):
        w = statetx.State(jnp.ones(()))
        optimizer = statetx.Optimizer(optax.sgd(0.1), [w])

        @wrap
        def train(x):
            value, grads = statetx.value_and_grad(lambda x: (w.value * x).mean(), wrt=optimizer.states)(x)
            optimizer.update(grads)
            return value

        return train, lambda: w.value

    def by_hand(x, w=statetx.Param(jnp.ones(()))):  # noqa: B008
        w.value = w.value - 0.1 * jax.grad(lambda v: (v * x).mean())(w.value)
        return x.mean()

    def by_remat(x, w=statetx.Param(jnp.ones(()))):  # noqa: B008
        w.value -= statetx.remat(statetx.grad(lambda x: (w.value * x).mean(), wrt=w))(x)
        return x.mean()

    def of_brainstate(x, w=brainstate.ParamState(jnp.ones(()))):  # noqa: B008
        w.value = w.value - 0.1 * brainstate.transform.grad(lambda: (w.value * x).mean(), {"w": w})()["w"]
        return x.mean()

    net = _Net()
    optimizer = nnx.Optimizer(net, optax.sgd(0.1), wrt=nnx.Param)

    def of_nnx(x):
        value, grads = nnx.value_and_grad(lambda net: net(x))(net)
        optimizer.update(net, grads)
        return value

    value_of = lambda step: lambda: step.__defaults__[0].value
    return {
        "optimizer": with_optimizer(lambda f: f),
        "optimizer under jit": with_optimizer(statetx.jit),
        "optimizer under remat": with_optimizer(statetx.remat),
        "by hand": (by_hand, value_of(by_hand)),
        "gradient under remat": (by_remat, value_of(by_remat)),
        "brainstate": (of_brainstate, value_of(of_brainstate)),
        "nnx": (of_nnx, lambda: net.w[...]),
    }


@pytest.mark.parametrize("in_parts", [lambda f: statetx.microbatch(f, 2), lambda f: statetx.chunked(f, 0, 2)])
@pytest.mark.parametrize("case", training_steps())
def test_training_step_is_refused(case, in_parts):
    step, value = training_steps()[case]
    x = jnp.arange(4.0)
    step(x[:2])  # jit has the program of a part
    before = value()
    for _ in range(2):
        with pytest.raises(
            statetx.FunctionError, match=r"training step on each part(.|\n)*value_and_grad\((statetx.chunked\()?loss"
        ):
            in_parts(step)(x)
    assert value() == before


def losses_with_inner_updates():
    """Functions that write states, or differentiate them, and are no training steps."""
    w, count = statetx.Param(jnp.full((), 2.0)), statetx.State(jnp.zeros(()))
    gradient = lambda x: statetx.grad(lambda x: (w.value * x).mean(), wrt=w)(x)

    def meta(x):
        count.value += 1
        return ((w.value - 0.1 * gradient(x)) * x).mean()

    def restored(x):
        old = w.value
        w.value = old - 0.1 * gradient(x)
        out = (w.value * x).mean()
        w.value = old
        return out

    def restored_by_optimizer(x):
        old, optimizer = w.value, statetx.Optimizer(optax.sgd(0.1), [w])
        optimizer.update([gradient(x)])
        out = (w.value * x).mean()
        w.value = old
        return out

    def clipped(x):
        w.value = jnp.clip(w.value, -1, 1)
        return gradient(x)

    def of_hidden_state(x):  # an integrator that linearizes
        out, pull = jax.vjp(lambda h: x.mean() - h, count.value)
        count.value += 0.1 * out * pull(jnp.ones(()))[0]
        return count.value * w.value

    def clips_itself(x):
        w.value = jnp.clip(w.value, -1, 1)
        return (w.value * x).mean()

    def trains_inside(x):
        w.value -= 0.1 * gradient(x)
        return (w.value * x).mean()

    return {
        "meta": meta,
        "restored": restored,
        "restored, by an optimizer": restored_by_optimizer,
        "clipped before": clipped,
        "hidden state": of_hidden_state,
        "weight written in the loss": statetx.value_and_grad(clips_itself, wrt=w),
        "gradient of a meta loss": statetx.value_and_grad(meta, wrt=w),
        "gradient of a loss that trains": statetx.value_and_grad(trains_inside, wrt=w),
    }


@pytest.mark.parametrize("case", losses_with_inner_updates())
def test_function_that_is_no_training_step_is_run_in_parts(case):
    x = jnp.arange(1.0, 3.0)
    first, second = (losses_with_inner_updates()[case] for _ in range(2))
    outs = [first(x[:1]), first(x[1:])]
    assert_close(statetx.microbatch(second, 2)(x), jax.tree.map(lambda a, b: (a + b) / 2, *outs))


def test_training_step_takes_its_gradient_in_parts():
    w = statetx.Param(jnp.ones(()))
    optimizer = statetx.Optimizer(optax.sgd(0.1), [w])
    gradient = statetx.microbatch(statetx.grad(lambda x: (w.value * x).mean(), wrt=optimizer.states), 2)
    statetx.jit(lambda x: optimizer.update(gradient(x)))(jnp.arange(4.0))
    np.testing.assert_allclose(w.value, 1 - 0.1 * 1.5, rtol=1e-6)


def test_values_of_examples_are_not_averaged_over_parts():
    x = jnp.arange(8.0)
    with pytest.raises(statetx.StateValueError, match="(?s)a value for each of the 4 examples of a part.*concat"):
        statetx.microbatch(jnp.square, 2)(x)
    with pytest.raises(statetx.StateValueError, match="a value for each of the 4 examples"):
        statetx.microbatch(lambda x: (x**2, x.sum()), 2, reduce=("mean", "first"))(x)
    np.testing.assert_array_equal(statetx.microbatch(jnp.square, 2, reduce="concat")(x), x**2)


@pytest.mark.thorough
def test_gradients_with_as_many_rows_as_a_part_has_examples_are_averaged():
    w, x = jnp.eye(4), jnp.arange(32.0).reshape(8, 4)
    gradient = jax.grad(lambda w, x: ((x @ w) ** 2).mean())
    np.testing.assert_allclose(statetx.microbatch(gradient, 2, argnums=1)(w, x), gradient(w, x), rtol=1e-6)
