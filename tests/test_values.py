"""`values` and `restore`: every kind of state and value, refusals that leave states alone, shardings, transforms."""

import threading

import brainstate
import brainunit as u
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from libraries import get

import statetx

OPTIMISER = optax.adamw(1e-3)


class Everything:
    """A state of every kind, with every sort of value."""

    def __init__(self, seed):
        self.number = seed
        x = np.random.default_rng(seed).normal(size=(4, 3)).astype(np.float32)
        self.w = statetx.Param(jnp.asarray(x))
        weights = {"w": jnp.asarray(x), "b": jnp.asarray(x[0])}
        self.optimizer = statetx.State(OPTIMISER.update(weights, OPTIMISER.init(weights), weights)[1])
        self.dtypes = [
            statetx.State(jnp.asarray(x > 0 if d == "bool" else x).astype(d))
            for d in ("bfloat16", "float8_e4m3fn", "int4", "uint4", "bool", "complex64", "uint32")
        ]
        self.rng = statetx.RngState(seed)
        self.keys = statetx.State(jax.random.split(jax.random.key(seed, impl="rbg"), 3))
        self.numbers = statetx.State({"int": seed, "float": seed / 3, "flag": seed > 1, "none": None, "c": seed - 0.5j})
        self.weak = statetx.State(jnp.asarray(float(seed)))
        self.numpy = statetx.State([x.astype(np.float64), np.int16(seed)])
        self.empty = statetx.State(jnp.zeros((0, 3)))
        self.linear = brainstate.nn.Linear(3, 2)  # its ParamState holds a dict
        self.linear.weight.value = {"weight": jnp.asarray(x[:3, :2]), "bias": jnp.asarray(x[3, :2])}
        self.random = brainstate.random.RandomState(seed)
        self.voltage = brainstate.HiddenState(jnp.asarray(x[0]) * u.mV)
        self.flax = nnx.Linear(3, 2, rngs=nnx.Rngs(seed), bias_init=nnx.initializers.normal())
        self.ref = jax.new_ref(jnp.asarray(x))


def contents(obj):
    """All that the states hold, to compare: types and bits."""

    def show(x):
        if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return str(x.dtype), np.asarray(jax.random.key_data(x)).tolist()
        weak, place = (jax.typeof(x).weak_type, x.committed) if isinstance(x, jax.Array) else (None, None)
        return type(x), weak, place, getattr(x, "dtype", None), np.asarray(x).tobytes() if hasattr(x, "dtype") else x

    return {
        path: (jax.tree.structure(get(s)), [show(x) for x in jax.tree.leaves(get(s))])
        for path, s in statetx.states(obj).items()
    }


def by_npz(saved, folder):
    np.savez(folder / "model.npz", **saved)
    return np.load(folder / "model.npz")


@pytest.mark.parametrize("write", [lambda saved, folder: saved, by_npz], ids=["dict", "npz"])
def test_every_kind_of_state_and_value_comes_back(write, tmp_path):
    model, other = Everything(1), Everything(2)
    expected, before = contents(model), contents(other)
    assert [path for path in expected if before[path] == expected[path]] == ["empty"], "the models must differ"
    statetx.restore(other, write(statetx.values(model), tmp_path))
    assert contents(other) == expected
    assert other.number == 2  # no state


def test_paths_are_those_of_states_and_leaves():
    states = {"w": statetx.Param(jnp.ones(2)), "many": statetx.State({"a": 1, "b": [2.5, None]})}
    assert {path: x.tolist() for path, x in statetx.values(states).items()} == {
        "w": [1, 1],
        "many['a']": 1,
        "many['b'][0]": 2.5,
    }


def test_an_array_comes_back_into_a_python_number():
    trained, fresh = statetx.State(0), statetx.State(0)
    statetx.jit(lambda: setattr(trained, "value", trained.value + 1))()
    statetx.restore([fresh], statetx.values([trained]))
    assert fresh.value == 1 and type(fresh.value) is int
    fresh.value = 5
    statetx.restore([trained], statetx.values([fresh]))
    assert trained.value == 5 and trained.value.dtype == jnp.int32 and jax.typeof(trained.value).weak_type


@pytest.mark.parametrize("value", [jnp.int32(1), np.int8(1)])
def test_a_number_that_the_state_cannot_hold_is_refused(value):
    state = statetx.State(value)
    with pytest.raises(statetx.CheckpointError, match="'n' is 5000000000 in them, which i(32|8).* cannot hold"):
        statetx.restore({"n": state}, {"n": np.int64(5_000_000_000)})
    assert state.value is value
    statetx.restore({"n": state}, {"n": np.int64(100)})
    assert state.value == 100 and state.value.dtype == value.dtype


@pytest.mark.parametrize(
    "devices", [pytest.param(None, id="not committed"), pytest.param(1, id="one"), pytest.param(8, id="eight")]
)
def test_values_are_copied_and_placed_as_those_that_they_replace(devices):
    x = jnp.arange(16.0).reshape(8, 2)
    if devices:
        mesh = jax.make_mesh((devices,), ("d",))
        x = jax.device_put(x, NamedSharding(mesh, PartitionSpec("d")))
    state = statetx.State(jnp.zeros_like(x))
    saved = {"w": jax.device_put(jnp.full((8, 2), 3.0), jax.devices()[1])}
    statetx.restore({"w": state}, saved)
    assert state.value.sharding == x.sharding and state.value.committed == bool(devices)
    saved = statetx.values({"w": state})
    state.value = state.value + 0
    statetx.restore({"w": state}, saved)
    statetx.jit(lambda: setattr(state, "value", state.value + 1), donate_states=True)()
    np.testing.assert_array_equal(saved["w"], 3)  # the step has donated the copy
    np.testing.assert_array_equal(state.value, 4)


def test_deleted_values_are_named():
    state = statetx.State(jnp.zeros((512, 512)))
    saved = statetx.values({"w": state})
    statetx.jit(lambda: setattr(state, "value", state.value + 1), donate_states=True)()
    with pytest.raises(statetx.CheckpointError, match=r"'w' has been deleted.*\nFix: .*jax.device_get"):
        statetx.restore({"w": state}, saved)
    np.testing.assert_array_equal(state.value, 1)


@pytest.mark.parametrize("how", [lambda f: f, statetx.jit, statetx.remat], ids="plain jit remat".split())
def test_average_of_weights_in_a_transform(how):
    cells = [statetx.Param(jnp.full(2, 4.0)), brainstate.ParamState({"w": jnp.full(2, 4.0)}), jax.new_ref(jnp.ones(2))]
    average = [statetx.State(jnp.zeros(2)), statetx.State({"w": jnp.zeros(2)}), jax.new_ref(jnp.zeros(2))]

    def step():
        new, old = statetx.values(cells), statetx.values(average)
        statetx.restore(average, {path: 0.5 * old[path] + 0.5 * new[path] for path in old})

    how(step)()
    assert [get(x) for x in average][0].tolist() == [2, 2]
    assert average[1].value["w"].tolist() == [2, 2] and average[2][...].tolist() == [0.5, 0.5]


@pytest.mark.parametrize("how", [lambda f: f, statetx.jit], ids="plain jit".split())
def test_keys_in_a_transform(how):
    cells, other = {"a": statetx.RngState(3), "b": statetx.State(0)}, {"a": statetx.RngState(4), "b": statetx.State(7)}
    how(lambda: statetx.restore(other, statetx.values(cells)))()
    np.testing.assert_array_equal(*(jax.random.key_data(each["a"].value) for each in (other, cells)))
    assert int(other["b"].value) == 0


# -- refusals --


def test_plain_jit_writes_all_or_none():
    states = {"n": statetx.State(0), "w": statetx.State(jnp.zeros(2))}
    with pytest.raises(statetx.TraceLeakError):
        jax.jit(lambda: statetx.restore(states, {"n": 5, "w": jnp.ones(2)}))()
    assert states["n"].value == 0 and states["w"].value.tolist() == [0, 0]


def change(name, value):
    return lambda model, saved: setattr(getattr(model, name), "value", value)


def drop(name):
    return lambda model, saved: saved.pop(name)


@pytest.mark.parametrize(
    ("act", "match"),
    [
        (lambda m, saved: setattr(m, "more", statetx.State(0)), "they have no 'more'"),
        (lambda m, saved: delattr(m, "rng"), "they have 'rng', which the program does not have"),
        (drop("numbers['float']"), r"they have no \"numbers\['float'\]\""),
        (change("w", jnp.zeros((4, 4))), r"'w' is f32\[4,3\] in them, and f32\[4,4\] in the program"),
        (change("w", jnp.zeros((4, 3), jnp.float16)), r"'w' is f32\[4,3\] in them, and f16"),
        (change("rng", jax.random.key(0, impl="rbg")), r"'rng' is u32\[2\] in them, and u32\[4\]"),
        (change("numbers", {"int": 1}), r"they have \"numbers\['c'\]\""),
        (lambda m, saved: saved.update(w="a path"), "'w' is 'a path' in them, not an array"),
        (lambda m, saved: saved.update({"numbers['int']": np.float64(2)}), r"is f64\[\] in them, and i64\[\] in"),
    ],
    ids="more less leaf shape dtype generator structure text kind".split(),
)
def test_other_states_are_refused_by_the_first_path(act, match):
    model, saved = Everything(2), statetx.values(Everything(1))
    act(model, saved)
    before = contents(model)
    with pytest.raises(statetx.CheckpointError, match=match):
        statetx.restore(model, saved)
    assert contents(model) == before


def test_values_of_another_thread_are_refused():
    w, saved = statetx.Param(jnp.ones(2)), {"w": jnp.zeros(2)}
    begun, done = threading.Event(), threading.Event()

    def hold():
        def loss():
            w.value  # noqa: B018  # the call owns the state from here on
            begun.set()
            done.wait(60)
            return w.value.sum()

        statetx.grad(loss, wrt=w)()

    thread = threading.Thread(target=hold)
    thread.start()
    try:
        assert begun.wait(60)
        with pytest.raises(statetx.ForeignStateError):
            statetx.restore({"w": w}, saved)
    finally:
        done.set()
        thread.join()
    assert w.value.tolist() == [1, 1]


@pytest.mark.parametrize(
    ("obj", "error", "match"),
    [
        (lambda w: {"w": w.value}, statetx.CheckpointError, r"'w' is f32\[3\], not a state"),
        (lambda w: {"w": w, "deep": [{"rate": 0.1}]}, statetx.CheckpointError, "'deep.0.rate' is float, not a state"),
        (lambda w: {"w": w, "name": "a"}, statetx.CheckpointError, "'name' is str, not a state"),
        (lambda w: 3.0, statetx.CheckpointError, "'its argument' is float, not a state"),
        (lambda w: {}, statetx.CheckpointError, "there is no state in {}"),
        (lambda w: lambda x: x, statetx.CheckpointError, "there is no state in"),
        (
            lambda w: {"a": {"b": w}, "a.b": statetx.State(0)},
            statetx.CheckpointError,
            "states given have the same path, 'a.b'",
        ),
        (
            lambda w: {"f": statetx.State({"g": print})},
            statetx.StateValueError,
            r"f\['g'\].* holds .*print.*\nFix: leave",
        ),
        (lambda w: {"f": statetx.State("text")}, statetx.StateValueError, "'f' holds 'text', which is not an array"),
        (lambda w: {"f": statetx.State(10**30)}, statetx.StateValueError, "'f' holds 1000"),
    ],
    ids="value number name lone empty function path print text large".split(),
)
def test_values_of_something_else_are_refused(obj, error, match):
    with pytest.raises(error, match=match):
        statetx.values(obj(statetx.Param(jnp.ones(3))))


def test_a_model_may_have_other_attributes_and_a_state_twice():
    class Model:
        def __init__(self):
            self.w, self.scale = statetx.Param(jnp.ones(3)), jnp.ones(3)

    model = Model()
    assert list(statetx.values({"layers": [model, jnp.tanh], "none": None})) == ["layers.0.w"]
    assert list(statetx.values({"a": model.w, "b": [model.w]})) == ["a"]
