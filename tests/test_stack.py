"""Stacked layers and `remat_scan`: equal to the Python loop over the layers, in values, states and gradients."""

import collections
import copy
import functools
import pickle
import random
import threading
import weakref

import brainstate
import jax
import jax.numpy as jnp
import libraries
import numpy as np
import pytest
from flax import nnx

import statetx
from helpers import in_turn
from statetx import policies

X = jnp.linspace(-0.5, 1, 4)


class Layer:
    """A weight of its own, a counter, dropout by keys of its own."""

    def __init__(self, key, rate=0.5):
        self.w = statetx.Param(jax.random.normal(key.next(), (4, 4)) / 2)
        self.n = statetx.State(jnp.zeros(()))
        self.rng = statetx.RngState(key.next())
        self.rate = rate

    def __call__(self, x, scale=1.0):
        keep = jax.random.bernoulli(self.rng.next(), self.rate, x.shape)
        self.n.value = self.n.value + x.sum()
        return x + scale * jnp.tanh(x @ self.w.value) * keep

    def with_y(self, x, extra):
        out = self(x) + extra
        return out, out.sum()


def make_layers(num=6):
    key = statetx.RngState(0)
    return [Layer(key) for _ in range(num)]


def factory():
    key = statetx.RngState(0)
    return lambda: Layer(key)


def loop(layers, x):
    for layer in layers:
        x = layer(x)
    return x


def stacked_values(layers):
    return {
        path: jnp.stack([statetx.states(layer)[path].value for layer in layers]) for path in statetx.states(layers[0])
    }


def assert_same(actual, expected, rtol=1e-5, atol=1e-6):
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        np.testing.assert_allclose(a, b, rtol=rtol, atol=atol)


# -- stack ---------------------------------------------------------------------------------------------------------


def test_layers_are_initialized_independently_and_stacked():
    layers, each = statetx.stack(factory(), 6), make_layers()
    assert list(statetx.states(layers)) == ["w", "n", "rng"]
    assert list(statetx.states({"deep": layers}, statetx.Param)) == ["deep.w"]
    assert_same({p: s.value for p, s in statetx.states(layers).items()}, stacked_values(each))
    assert len(layers) == 6 and repr(layers) == "Stack(6 x Layer, axis=0)"


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_a_stack_applies_its_layers_in_turn(axis):
    class M:
        def __init__(self, i):
            self.w = statetx.Param(jnp.cos(jnp.arange(16.0).reshape(4, 4) + i))
            self.n = statetx.State(jnp.zeros((4,)))

        def __call__(self, x):
            self.n.value = self.n.value + x
            return jnp.tanh(x @ self.w.value)

    layers = statetx.stack([M(i) for i in range(5)], axis=axis)
    np.testing.assert_allclose(layers(X), loop([M(i) for i in range(5)], X), rtol=1e-5)
    np.testing.assert_allclose(layers[0].n.value, X, rtol=1e-6)
    assert layers[1:].axis == axis


def test_calls_equal_the_python_loop():
    layers, each = statetx.stack(make_layers()), make_layers()
    assert_same(layers(X), loop(each, X))
    assert_same({p: s.value for p, s in statetx.states(layers).items()}, stacked_values(each))


def test_indexing_gives_copies():
    layers, each = statetx.stack(make_layers()), make_layers()
    for i in (0, 2, -1):
        assert_same(layers[i].w.value, each[i].w.value)
    layers[1].w.value = jnp.zeros((4, 4))
    assert_same(layers[1].w.value, each[1].w.value)
    assert [type(layer) for layer in layers] == [Layer] * 6
    part = layers[1:4]
    assert isinstance(part, statetx.Stack) and len(part) == 3
    assert_same(part(X), loop(each[1:4], X))
    for a, b in zip(statetx.unstack(layers), make_layers(), strict=True):
        assert_same(
            {p: s.value for p, s in statetx.states(a).items()}, {p: s.value for p, s in statetx.states(b).items()}
        )
    with pytest.raises(IndexError, match="layer 6 of 6"):
        layers[6]
    with pytest.raises(IndexError, match=r"no layer of 6 in layers\[6:\]; a stack has at least one"):
        layers[6:]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["copy", "pickle"])
@pytest.mark.parametrize("wrap", [lambda layers: layers, lambda layers: statetx.remat_scan(layers, (3,))])
def test_copies_run_their_own_layers(wrap, copied):
    layers = wrap(statetx.stack([Bias(float(i)) for i in range(3)]))
    twin = copied(layers)
    assert float(twin(0.0)) == float(layers(0.0)) == 0.0 + 1.0 + 2.0
    statetx.states(twin)["b"].value += 1.0
    assert float(twin(0.0)) == 6.0 and float(layers(0.0)) == 3.0


class Bias:
    def __init__(self, b):
        self.b = statetx.Param(jnp.asarray(b))

    def __call__(self, x):
        return x + self.b.value


def test_shared_states_stay_shared():
    scale = statetx.Param(jnp.asarray(2.0))

    class Scaled:
        def __init__(self, w):
            self.w, self.scale = statetx.Param(w), scale

        def __call__(self, x):
            return jnp.tanh(self.scale.value * self.w.value * x)

    layers = statetx.stack([Scaled(0.1 * i) for i in range(1, 5)])
    assert statetx.states(layers)["scale"] is scale and layers[2].scale is scale
    for part in (layers[0:1], layers[1:3]):
        assert statetx.states(part)["scale"] is scale and scale.value.shape == ()
        assert part(X).shape == X.shape
    grads = statetx.grad(lambda x: layers(x).sum(), wrt=statetx.states(layers))(X)

    def pure(scale, ws):
        return functools.reduce(lambda x, w: jnp.tanh(scale * w * x), ws, X).sum()

    gs, gw = jax.grad(pure, (0, 1))(2.0, [0.1, 0.2, 0.3, 0.4])
    np.testing.assert_allclose(grads["scale"], gs, rtol=1e-5)
    np.testing.assert_allclose(grads["w"], jnp.stack(gw), rtol=1e-5)
    one = statetx.stack(lambda: Scaled(0.5), 3, shared="w")
    assert one.__wrapped__.w.value == 0.5
    half = Scaled(0.1)
    half.scale = statetx.Param(jnp.asarray(2.0))
    with pytest.raises(statetx.StateValueError, match="some layers share the state 'scale'"):
        statetx.stack([Scaled(0.1), Scaled(0.2), half])


def test_layers_of_other_structure_raise():
    key = statetx.RngState(0)
    with pytest.raises(
        statetx.StateValueError, match=r"(?s)differ in 'rate', which is not a state: 0.5 .* 0.25 in layer 2"
    ):
        statetx.stack([Layer(key), Layer(key), Layer(key, 0.25)])
    with pytest.raises(statetx.StateValueError, match=r"(?s)'w' differ in type: .*f32\[4,4\].* layer 1 f32\[3\]"):
        other = Layer(key)
        other.w.value = jnp.ones(3)
        statetx.stack([Layer(key), other])
    with pytest.raises(statetx.StateValueError, match="differ in their type: Layer in layer 0 and dict"):
        statetx.stack([Layer(key), {"w": 1}])
    odd = Layer(key)
    odd.more = [1, 2]
    with pytest.raises(
        statetx.StateValueError, match="differ in their type.*parts w, n, rng, rate in layer 0 and parts"
    ):
        statetx.stack([Layer(key), odd])

    class WithRef:
        def __init__(self):
            self.r = jax.new_ref(jnp.ones(2))

    with pytest.raises(statetx.StateValueError, match="'r' is a jax.Ref"):
        statetx.stack(WithRef, 2)
    with pytest.raises(ValueError, match="num, the number of layers"):
        statetx.stack(Layer)
    with pytest.raises(ValueError, match="num=3 disagrees with the 2 layers"):
        statetx.stack([Layer(key), Layer(key)], 3)
    for a, b in ((np.sin, np.cos), ({1}, {2}), (jnp.sin, jnp.tanh), (np.dtype("f4"), np.dtype("f2"))):
        one, two = Layer(key), Layer(key)
        one.act, two.act = a, b
        with pytest.raises(statetx.StateValueError, match="differ in 'act'"):
            statetx.stack([one, two])
    before = statetx.states(odd)["w"].value
    assert before.shape == (4, 4)  # the rejected values are unchanged


def brainstate_layers():
    with brainstate.random.seed_context(0):
        return [BrainLayer() for _ in range(5)]


class BrainLayer(brainstate.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = brainstate.nn.Linear(4, 4)
        self.n = brainstate.ShortTermState(jnp.zeros(()))

    def __call__(self, x):
        self.n.value = self.n.value + 1
        return x + jnp.tanh(self.linear(x))


class NnxLayer(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(4, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return x + jnp.tanh(self.dropout(self.norm(self.linear(x))))


def nnx_layers():
    rngs = nnx.Rngs(0)
    return [NnxLayer(rngs.fork()) for _ in range(5)]


@pytest.mark.sample("slow")
@pytest.mark.parametrize(
    "make, apply",
    [
        (brainstate_layers, lambda s: s),
        pytest.param(brainstate_layers, statetx.remat_scan, marks=pytest.mark.slow),
        (brainstate_layers, lambda s: statetx.remat_scan(s, (2, 2))),
        pytest.param(nnx_layers, lambda s: s, marks=pytest.mark.slow),
        (nnx_layers, statetx.remat_scan),
        pytest.param(nnx_layers, lambda s: statetx.remat_scan(s, (2, 2)), marks=pytest.mark.slow),
    ],
)
def test_layers_of_other_libraries(make, apply):
    if make is brainstate_layers:
        brainstate.random.seed(0)
    each = make()
    if make is brainstate_layers:
        brainstate.random.seed(0)
    layers = statetx.stack(make())
    with jax.numpy_rank_promotion("allow"):
        check_layers(each, layers, apply(layers), jnp.sin(jnp.arange(64.0)).reshape(16, 4))


def check_layers(each, layers, deep, xs):
    out, grads = statetx.value_and_grad(
        lambda x: (deep(x) ** 2).sum(), argnums=0, wrt=statetx.states(layers, "linear*")
    )(xs)

    def plain(x):
        return (loop(each, x) ** 2).sum()

    expected, (by_state, by_x) = statetx.value_and_grad(
        plain, argnums=0, wrt=[statetx.states(layer, "linear*") for layer in each]
    )(xs)
    np.testing.assert_allclose(out, expected, rtol=1e-5)
    np.testing.assert_allclose(grads[1], by_x, rtol=1e-4, atol=1e-5)
    for path, g in grads[0].items():
        assert_same(g, jax.tree.map(lambda *x: jnp.stack(x), *[b[path] for b in by_state]), 1e-4, 1e-4)
    for a, b in zip(layers, each, strict=True):
        for path, state in statetx.states(b).items():
            assert_same(libraries.get(statetx.states(a)[path]), libraries.get(state))


# -- remat_scan ----------------------------------------------------------------------------------------------------


LENGTHS = [(6,), (2, 3), (2, 2), "auto", policies.Budget("1MiB"), policies.Slots(2), policies.Levels(2), 6]


@pytest.mark.sample
@pytest.mark.parametrize("wrap", [lambda f: f, pytest.param(statetx.jit, marks=pytest.mark.slow)], ids=["eager", "jit"])
@pytest.mark.parametrize("lengths", in_turn([pytest.param(x) for x in LENGTHS]), ids=str)
def test_equals_the_python_loop(lengths, wrap):
    num = 5 if lengths == (2, 2) else 6
    layers, each = statetx.stack(make_layers(num)), make_layers(num)
    deep = statetx.remat_scan(layers, lengths)
    out, (by_state, by_x) = wrap(
        statetx.value_and_grad(lambda x: (deep(x) ** 2).sum(), argnums=0, wrt=statetx.states(deep, statetx.Param))
    )(X)
    expected, (by_states, expected_x) = wrap(
        statetx.value_and_grad(lambda x: (loop(each, x) ** 2).sum(), argnums=0, wrt=[m.w for m in each])
    )(X)
    assert_same((out, by_x, by_state["w"]), (expected, expected_x, jnp.stack(by_states)))
    assert_same({p: s.value for p, s in statetx.states(layers).items()}, stacked_values(each))


def test_class_factory_and_function():
    deep = statetx.remat_scan(Layer, (2, 3))(statetx.RngState(0))
    assert repr(deep) == "RematScan(6 x Layer, Lengths(2, 3))" and len(deep) == 6
    expected = loop(make_layers(), X)
    assert_same(deep(X), expected)
    assert_same(statetx.remat_scan(factory(), (2, 3))(X), expected)
    layers = statetx.stack(make_layers())
    inner = layers.__wrapped__
    fun = statetx.remat_scan(lambda x: inner(x), (2, 3), axes={True: 0})
    assert_same(fun(X), expected)
    columns = statetx.remat_scan(lambda: Bias(X), 3, axes=1)
    assert_same(columns(X), 4 * X)
    assert statetx.states(columns)["b"].value.shape == (4, 3)


def test_inputs_outputs_and_options_for_each_layer():
    each = make_layers()
    layers = statetx.stack(make_layers())
    inner = layers.__wrapped__
    extras = jnp.arange(24.0).reshape(6, 4)
    f = statetx.remat_scan(inner.with_y, num=6, axes={True: 0}, has_ys=True)
    out, ys = f(X, extras)
    x, expected = X, []
    for layer, extra in zip(each, extras, strict=True):
        x, y = layer.with_y(x, extra)
        expected.append(y)
    assert_same((out, ys), (x, jnp.stack(expected)))
    again = statetx.stack(make_layers())
    assert_same(statetx.remat_scan(again)(X, scale=0.0), X)


def test_shared_states_by_filter():
    class Shared:
        def __init__(self):
            self.w = statetx.Param(jnp.asarray(0.5))
            self.scale = statetx.Param(jnp.asarray(2.0))
            self.n = statetx.State(jnp.asarray(0))

        def __call__(self, x):
            self.n.value += 1
            return jnp.tanh(x * self.w.value * self.scale.value)

    deep = statetx.remat_scan(Shared, (2, 2), broadcast="scale", carry="n")()
    values = {p: s.value.shape for p, s in statetx.states(deep).items()}
    assert values == {"w": (4,), "scale": (), "n": ()}
    deep(X)
    assert int(statetx.states(deep)["n"].value) == 4
    refused = statetx.remat_scan(Shared, (2, 2), broadcast=["scale", "n"])()
    with pytest.raises(statetx.StateAccessError, match="declared Broadcast and was written"):
        refused(X)


def test_random_states_that_layers_share():
    def draws(**options):
        rng, w = statetx.RngState(3), statetx.Param(jnp.ones((5, 4)))  # a slice of the weights for each layer

        def layer(x):
            return x * w.value, jax.random.uniform(rng.next())

        _, ys = statetx.remat_scan(layer, num=5, axes={statetx.Param: 0}, has_ys=True, **options)(X)
        return np.asarray(ys), jax.random.key_data(rng.value)

    rng = statetx.RngState(3)
    in_turn = np.asarray([jax.random.uniform(rng.next()) for _ in range(5)])
    ys, key = draws()
    np.testing.assert_array_equal(ys, in_turn)
    np.testing.assert_array_equal(key, jax.random.key_data(rng.value))
    split, _ = draws(split_rngs=True)
    assert len(np.unique(np.concatenate([split, in_turn]))) == 10
    same, key = draws(split_rngs=False)
    assert len(np.unique(same)) == 1 and same[0] == in_turn[0]
    rng = statetx.RngState(3)
    rng.next()
    np.testing.assert_array_equal(key, jax.random.key_data(rng.value))
    by_filter, _ = draws(split_rngs=statetx.RngState)
    np.testing.assert_array_equal(by_filter, split)


def residuals(f, x):
    return statetx.saved_residuals(f, x).total_bytes


def test_innermost_level_is_rematerialized_by_default():
    def kept(lengths, policy=None):
        layers = statetx.stack(make_layers())
        deep = statetx.remat_scan(layers, lengths, policy=policy)
        return residuals(lambda x: deep(x).sum(), X)

    one_level, everything = kept((6,)), kept((6,), policies.everything)
    assert one_level < kept((6,), policies.dots) < everything
    assert kept((2, 3)) < one_level


@pytest.mark.parametrize(
    "lengths", [policies.Levels(1), policies.Lengths(6), policies.Slots(2), "auto", policies.Budget("1MiB")], ids=repr
)
def test_the_policy_reaches_every_strategy(lengths):
    deep = statetx.remat_scan(statetx.stack(make_layers()), lengths, policy=policies.dots)
    assert "policy=dots" in repr(deep)
    assert_same(deep(X), loop(make_layers(), X))


def test_trace_does_not_grow_with_the_layers():
    def equations(num):
        layers = statetx.stack(factory(), num)
        deep = statetx.remat_scan(layers)
        traced = statetx.make_jaxpr(statetx.grad(lambda x: deep(x).sum(), wrt=statetx.states(deep, "w")))(X)
        return str(traced).count("\n")

    assert equations(40) == equations(10)


def test_mistakes():
    with pytest.raises(ValueError, match="give the number of layers"):
        statetx.remat_scan(Layer)
    with pytest.raises(statetx.PolicyError, match="are 6 layers in all, and there are 4"):
        statetx.remat_scan(Layer, (2, 3), num=4)
    with pytest.raises(ValueError, match="the stack has 6 layers, but num or lengths asks for 4"):
        statetx.remat_scan(statetx.stack(make_layers()), (2, 2), num=4)
    with pytest.raises(TypeError, match="needs a Stack, a class, a factory or a function, got int"):
        statetx.remat_scan(3, num=4)
    with pytest.raises(ValueError, match="axes= by filter"):
        statetx.remat_scan(Layer, 3, axes={True: 0})(statetx.RngState(0))


# -- differences between layers --


class Holder:
    def __init__(self, held):
        self.w = statetx.Param(jnp.ones(4))
        self.held = held

    def __call__(self, x):
        return x * self.w.value


class Proxy:
    """Of an object that is not there yet, such as a module that is imported lazily."""

    @property
    def __class__(self):
        raise RuntimeError


def dotted(policy):
    return statetx.remat(lambda x: x, policy=policy)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({1: 2.0}, {"1": 2.0}),
        ({1, 2}, {1, 3}),
        ((0.0,), (-0.0,)),
        (True, 1),
        (jax.random.key(0), jax.random.key(1)),
        (np.array([None, 1.0]), np.array([None, 2.0])),
        (random.Random(0), random.Random(1)),
        (jnp, np),
        (functools.partial(jnp.sum, axis=0), functools.partial(jnp.sum, axis=1)),
        (collections.deque([1], 2), collections.deque([1], 3)),
        (jax.jit(lambda x: x + 1), jax.jit(lambda x: x + 2)),
        (dotted("dots"), dotted(None)),
        (slice(1), slice(2)),
        (iter([1]), iter([2])),
        (statetx.State(0, unit="a"), statetx.State(0, unit="b")),
    ],
    ids=lambda x: type(x).__name__,
)
def test_layers_that_differ_in_an_attribute_raise(one, other):
    with pytest.raises(statetx.StateValueError, match="differ in 'held"):
        statetx.stack([Holder(one), Holder(other)])


@pytest.mark.parametrize(
    "make",
    [
        lambda: float("nan"),
        lambda: np.array([jnp.nan, 1.0]),
        lambda: jax.random.key(0),
        lambda: {"a": (1, [2.0, {3, "b"}])},
        lambda: functools.partial(jnp.sum, axis=0),
        lambda: jax.jit(lambda x: x + 1),
        lambda: dotted("dots"),
        lambda: [threading.Lock(), np.dtype("f4"), slice(1), range(3), jnp.tanh, object],
        lambda: np.array([None, 1.0]),
        lambda: {Holder(1): 2.0},
        lambda: {Holder(1)},
        functools.partial(lambda proxy: proxy, Proxy()),
    ],
)
def test_layers_with_equal_attributes_are_stacked(make):
    assert statetx.stack([Holder(make()), Holder(make())])(X).shape == (4,)


def test_layers_without_corresponding_states_raise():
    tied, untied = Holder(None), Holder(statetx.Param(jnp.ones(4)))
    tied.held = tied.w
    for layers in ([tied, untied], [untied, tied]):
        with pytest.raises(statetx.StateValueError, match="one state in several places"):
            statetx.stack(layers)
    crossed = [Holder([statetx.Param(jnp.ones(4))]), Holder(None)]
    crossed[1].held = crossed[0].held
    crossed[0].w = crossed[0].held[0]
    with pytest.raises(statetx.StateValueError, match="one state in several places"):
        statetx.stack(crossed)
    pairs = [Holder({statetx.Param(jnp.ones(4)), statetx.Param(jnp.ones(4))}) for _ in range(2)]
    with pytest.raises(statetx.StateValueError, match="the set 'held' has several objects of one name or type"):
        statetx.stack(pairs)


def test_layers_referring_to_states_they_do_not_hold_raise():
    others = [statetx.Param(jnp.ones(4)) for _ in range(2)]
    with pytest.raises(statetx.StateValueError, match="layer 1 refers to the state 'held' without holding it"):
        statetx.stack([Holder(weakref.ref(w)) for w in others])
    layers = [Holder(None) for _ in range(2)]
    for layer in layers:
        layer.held = weakref.ref(layer.w)
    stacked = statetx.stack(layers)
    np.testing.assert_allclose(stacked(X), X)
    with pytest.raises(statetx.StateValueError, match="cannot copy"):
        stacked[0]


def test_class_attributes_are_shared():
    class Shared:
        scale = statetx.Param(jnp.full(4, 2.0))

        def __init__(self):
            self.w = statetx.Param(jnp.ones(4))

        def __call__(self, x):
            return x * self.w.value * self.scale.value

    for num in (1, 3):
        layers = statetx.stack(Shared, num)
        assert Shared.scale.value.shape == (4,) and layers.__wrapped__.w.value.shape == (num, 4)
        np.testing.assert_allclose(layers(X), X * 2.0**num)
        np.testing.assert_allclose(layers[0](X), X * 2.0)


def test_copy_of_a_brainstate_module_with_a_state_of_statetx_is_refused():
    class Scaled(brainstate.nn.Module):
        def __init__(self, value):
            super().__init__()
            self.scale = statetx.Param(jnp.asarray(value))

        def __call__(self, x):
            return self.scale.value * x

    layers = statetx.stack([Scaled(2.0), Scaled(3.0)])
    assert float(layers(1.0)) == float(copy.deepcopy(layers)(1.0)) == 6.0  # the copy of the whole shares the state
    with pytest.raises(
        statetx.StateValueError, match=r"state 'scale'.*\n.*in modules of brainstate use states of brainstate"
    ):
        layers[0]


@pytest.mark.filterwarnings("ignore:Variable hooks are deprecated")
def test_exception_in_a_hook_leaves_the_layers_unchanged():
    def refuse(*_):
        raise ZeroDivisionError

    def layer(**hooks):
        return {"a": nnx.Param(jnp.ones(2)), "b": nnx.Param(jnp.ones(2), **hooks)}

    layers = [layer(on_add_axis=refuse) for _ in range(3)]
    with pytest.raises(ZeroDivisionError):
        statetx.stack(layers)
    assert [p[...].shape for one in layers for p in one.values()] == [(2,)] * 6


def test_one_layer_several_times_shares_its_states():
    layer = Layer(statetx.RngState(0), rate=1.0)
    layers = statetx.stack([layer] * 3)
    assert repr(layers) == "Stack(3 x Layer, no stacked states)" and layers[1].w is layer.w
    gradient = statetx.grad(lambda f: f(X).sum(), argnums=(), wrt=layer.w)
    jax.tree.map(np.testing.assert_allclose, gradient(layers), gradient(functools.partial(loop, [layer] * 3)))


@pytest.mark.parametrize("axis", [2, -3])
def test_axis_that_values_do_not_have_is_refused_by_the_state(axis):
    layers = [functools.partial(jnp.multiply, statetx.Param(jnp.ones(4))) for _ in range(2)]
    with pytest.raises(statetx.StateValueError, match=rf"'args' cannot be stacked along axis {axis}.\nFix: .* 0 to 1"):
        statetx.stack(layers, axis=axis)
    assert layers[0].args[0].value.shape == (4,)


def test_an_index_of_a_layer_is_a_known_integer():
    layers = statetx.stack(lambda: functools.partial(jnp.multiply, statetx.Param(jnp.ones(4))), 2)
    with pytest.raises(TypeError, match="'str' object cannot be interpreted as an integer"):
        layers["0"]
    with pytest.raises(jax.errors.TracerIntegerConversionError):
        jax.jit(lambda i: layers[i](X))(1)
