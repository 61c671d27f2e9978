"""`vmap` and `map`: shared, mapped and split states."""

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import sparse

import statetx
from helpers import Counted

XS = jnp.linspace(-1.0, 1.0, 12).reshape(4, 3)
W = jnp.array([0.5, 1.5, -0.4])


class Cell:
    def __init__(self, batch=None):
        self.w = statetx.Param(W)
        shape = (3,) if batch is None else (batch, 3)
        self.h = statetx.State(jnp.ones(shape) * 0.1)
        self.n = statetx.State(0)

    def step(self, x):
        self.h.value = jnp.tanh(self.w.value * x + self.h.value)
        self.n.value += 1
        return self.h.value.sum()


def reference(h, x):
    h = jnp.tanh(W * x + h)
    return h.sum(), h


def test_mapped_state_equals_the_loop_and_the_body_runs_once():
    cell = Cell(4)
    body = Counted(cell.step)
    f = statetx.vmap(body, states={"*h": 0})
    for _ in range(2):
        before = cell.h.value
        out = f(XS)
        expected, h = jax.vmap(reference)(before, XS)
        np.testing.assert_allclose(out, expected, rtol=1e-6)
        np.testing.assert_allclose(cell.h.value, h, rtol=1e-6)
    assert body.runs == 2 and cell.n.value == 2


@pytest.mark.parametrize(("axis", "of_output"), [(0, 1), (1, 0), (2, -1), (-3, -2)])
def test_axes_of_states_arguments_and_outputs(axis, of_output):
    s = statetx.State(jnp.moveaxis(jnp.arange(24.0).reshape(4, 2, 3), 0, axis))

    def f(x, scale, flag=None):
        s.value = s.value * scale
        return {"a": x * 2, "b": (s.value.sum(), scale)} if flag == "on" else x

    out = statetx.vmap(f, in_axes=(1, None, None), out_axes={"a": of_output, "b": (0, None)}, states={"s": axis})(
        XS.T, 3.0, "on"
    )
    np.testing.assert_allclose(out["a"], 2 * np.moveaxis(XS, 0, of_output))
    np.testing.assert_allclose(out["b"][0], 3 * np.arange(24.0).reshape(4, 6).sum(1))
    assert float(out["b"][1]) == 3.0
    np.testing.assert_allclose(s.value, 3 * np.moveaxis(np.arange(24.0).reshape(4, 2, 3), 0, axis))


def test_batched_write_error_suggests_the_axis():
    cell = Cell()
    before = cell.h.value
    match = r"(?s)State 'h' \(f32\[3\].*at .*test_vmap.py:\d+.*states=\{'h': 0\}"
    with pytest.raises(statetx.StateAccessError, match=match):
        statetx.vmap(cell.step)(XS)
    assert cell.h.value is before and cell.n.value == 0


@pytest.mark.parametrize("value", [0, jnp.zeros(3, jnp.int32)], ids=["number", "vector"])
def test_batched_write_to_a_number_suggests_that_it_counts_draws(value):
    s = statetx.State(value)
    with pytest.raises(statetx.StateAccessError, match="differs between the examples") as error:
        statetx.vmap(lambda n: setattr(s, "value", s.value + n))(jnp.arange(4))
    assert ("counts random draws" in str(error.value)) == (jnp.ndim(value) == 0)


def test_unbatched_write_is_allowed():
    mean = statetx.State(jnp.zeros(3))

    def f(x):
        mean.value = 0.5 * mean.value + 0.5 * jax.lax.pmean(x, "batch")
        return x - mean.value

    out = statetx.vmap(f, axis_name="batch")(XS)
    np.testing.assert_allclose(mean.value, 0.5 * XS.mean(0), rtol=1e-6)
    np.testing.assert_allclose(out, XS - 0.5 * XS.mean(0)[None], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["native", "brainstate"])
def test_random_states_are_split_unless_shared(kind):
    rng = statetx.RngState(0) if kind == "native" else brainstate.random.RandomState(0)
    draw = rng.next if kind == "native" else rng.split_key
    f = Counted(lambda x: x * 0 + jax.random.uniform(draw()))
    before = jax.random.key_data(rng.value)
    out = statetx.vmap(f)(jnp.ones(5))
    assert len(np.unique(out)) == 5 and f.runs == 1
    assert rng.value.shape == () and not np.array_equal(before, jax.random.key_data(rng.value))
    assert len(np.unique(np.concatenate([out, statetx.vmap(f)(jnp.ones(5))]))) == 10
    shared = statetx.vmap(f, states={type(rng): statetx.Broadcast})(jnp.ones(5))
    assert len(np.unique(shared)) == 1
    inside = statetx.vmap(statetx.remat(f))  # the draw is in an inner trace
    assert len(np.unique(jax.grad(lambda x: (inside(x) * x).sum())(jnp.ones(5)))) == 5


def test_states_created_inside_are_stacked():
    class Layer:
        def __init__(self, key):
            self.w = statetx.Param(jax.random.normal(key, (2,)))
            self.b = statetx.Param(jnp.zeros(2))
            self.mode = statetx.State("on")

    layers = statetx.vmap(Layer)(jax.random.split(jax.random.key(0), 3))
    assert layers.w.value.shape == (3, 2) and layers.b.value.shape == (3, 2) and layers.mode.value == "on"
    expected = jax.vmap(lambda k: jax.random.normal(k, (2,)))(jax.random.split(jax.random.key(0), 3))
    np.testing.assert_array_equal(layers.w.value, expected)
    x = jnp.ones(2)
    out = statetx.vmap(lambda: layers.w.value * x + layers.b.value, axis_size=3, states={statetx.Param: 0})()
    np.testing.assert_allclose(out, expected)


def test_flags_and_numbers_by_name_are_not_mapped():
    f = lambda x, scale, training: x * scale if training else x
    mapped = statetx.vmap(f)
    np.testing.assert_array_equal(mapped(jnp.arange(3.0), scale=2.0, training=True), [0.0, 2.0, 4.0])
    np.testing.assert_array_equal(mapped(jnp.arange(3.0), scale=2.0, training=False), [0.0, 1.0, 2.0])
    np.testing.assert_array_equal(mapped(jnp.arange(3.0), scale=jnp.arange(3.0), training=True), [0.0, 1.0, 4.0])


def test_python_values_stay_concrete():
    n = statetx.State(jnp.asarray(3))

    def f(x):
        return x * 2 if int(n.value) > 2 else x  # the state is the same for all: Python may look at it

    np.testing.assert_array_equal(statetx.vmap(f)(XS), 2 * XS)


def test_mistakes():
    s = statetx.State(jnp.ones(3))
    with pytest.raises(
        statetx.StateValueError, match=r"mapped along axis 0, which must have the length of the vmap, 4"
    ):
        statetx.vmap(lambda x: x * s.value, states={"s": 0})(XS)
    key = statetx.RngState(0)
    with pytest.raises(
        statetx.StateValueError, match=r"RngState 'key'.*\nFix: .*before this one, .*states=\{'key': statetx.Split, "
    ):
        statetx.vmap(lambda x: x * jax.random.uniform(key.next()), states={statetx.State: 0})(XS)
    for rule in (statetx.Carry, True):
        with pytest.raises(statetx.StateValueError, match="is not understood"):
            statetx.vmap(lambda x: x, states={"s": rule})
    with pytest.raises(statetx.StateValueError, match="maps filters to rules"):
        statetx.vmap(lambda x: x, states=statetx.Param)
    with pytest.raises(ValueError, match="in_axes=\\(0, 0\\) is not a tree prefix"):
        statetx.vmap(lambda x: x, in_axes=(0, 0))(XS)
    with pytest.raises(TypeError, match="must hold ints and None"):
        statetx.vmap(lambda x: x, in_axes=("a",))(XS)


def test_map():
    total = statetx.State(jnp.zeros(()))

    def f(x):
        total.value = total.value + x.sum()
        return {"y": x * 2, "t": total.value}

    out = statetx.map(f, XS)
    np.testing.assert_allclose(out["t"], np.cumsum(XS.sum(1)), atol=1e-6)
    np.testing.assert_allclose(out["y"], 2 * XS)
    w = statetx.Param(W)
    for size in (0, 1, 2, 3, 4, 9):
        f = lambda xs, size=size: statetx.map(lambda x: x * w.value, xs, batch_size=size)
        np.testing.assert_allclose(f(XS), XS * W[None])
        assert f":f32[{min(size or 4, 4)},3] = mul" in str(statetx.make_jaxpr(f)(XS))


def test_flags_in_outputs_are_mapped():
    np.testing.assert_array_equal(statetx.vmap(lambda x: True)(jnp.arange(3.0)), [True] * 3)
    assert statetx.vmap(lambda x: True, out_axes=None)(jnp.arange(3.0)) is True
    for length in (4, 5):
        xs, flags = statetx.map(lambda x: (x, True), jnp.arange(float(length)), batch_size=2)
        assert xs.shape == flags.shape == (length,)


@pytest.mark.parametrize("xs", [(), (jnp.ones(4), jnp.ones(6))], ids=["no arrays", "lengths"])
def test_batches_of_map_need_one_length(xs):
    with pytest.raises(ValueError, match=r"scan: (give length=|the arrays differ in length)"):
        statetx.map(lambda x: 1.0, xs, batch_size=2)


@pytest.mark.parametrize(
    "call, message",
    [
        (
            lambda f: statetx.vmap(f)(jnp.ones(10), b=jnp.ones(2)),
            r"^(?![\s\S]*PRNGKey)vmap\(.*both\): the arrays differ in length: a \(f32\[10\]\) has 10 along axis 0, "
            r"b \(f32\[2\]\) has 2 along axis 0",
        ),
        (
            lambda f: statetx.vmap(f, axis_size=2)({"w": jnp.ones(8)}, None),
            r"a\['w'\] \(f32\[8\]\) has 8 along axis 0, axis_size=2",
        ),
        (lambda f: statetx.vmap(f)(4.0, 2), "no argument has an axis to map over.*Python numbers have none"),
        (lambda f: statetx.vmap(f, (1, None))(jnp.ones(3), 1), r"a is a f32\[3\], which has no axis 1"),
        (lambda f: statetx.vmap(f)({}, ()), "no argument has an axis to map over"),
    ],
)
def test_inconsistent_sizes_are_named_by_argument(call, message):
    def both(a, b):
        return a, b

    with pytest.raises(ValueError, match=message):
        call(both)


@pytest.mark.parametrize(
    ("axis", "message"),
    [
        (None, r"out_axes has None for the output\['b'\]\[0\], f32\[\] for each example, which differs"),
        (1, r"out_axes has 1 for the output\['b'\]\[0\], f32\[\] for each example: .* from 0 to 0"),
    ],
)
def test_an_output_that_cannot_have_its_axis_is_named(axis, message):
    with pytest.raises(ValueError, match=message):
        statetx.vmap(lambda x: {"a": x, "b": (x, 2.0)}, out_axes={"a": 0, "b": (axis, None)})(jnp.ones(3))


def test_out_axes_must_be_numbers():
    with pytest.raises(TypeError, match="vmap: out_axes must hold ints and None, got ArrayImpl"):
        statetx.vmap(lambda x: x, out_axes=jnp.ones(2))(jnp.ones(3))


def test_axis_size_follows_a_mapped_state():
    h = statetx.State(jnp.arange(6.0).reshape(2, 3))
    np.testing.assert_allclose(statetx.vmap(lambda: h.value.sum(), states={statetx.State: 1})(), [3.0, 5.0, 7.0])
    carry, ys = statetx.scan(lambda c, _: (c + h.value.sum(), h.value), 0.0, states={statetx.State: 0})
    assert float(carry) == 15.0 and ys.shape == (2, 3)


class Scale:
    def __init__(self):
        self.s = statetx.Param(jnp.arange(1.0, 4.0))


@pytest.mark.parametrize("rule", [{statetx.Param: 0}, {"m.*": 0}])
def test_axis_of_an_argument_that_holds_states_needs_a_rule(rule):
    m, x = Scale(), jnp.ones((3, 3))
    f = lambda m, x: (m.s.value * x).sum()
    words = r"vmap: argument m, with the axis 0 in in_axes, holds states.*Param 'm.s' \(f32\[3\].*states=\{'m.s': 0\}"
    with pytest.raises(statetx.StateValueError, match=f"(?s){words}"):
        statetx.vmap(f, in_axes=(0, 0))(m, x)
    with pytest.raises(statetx.StateValueError, match=r"(?s)argument a\['m'\].*states=\{'a.m.s': -1\}"):
        statetx.vmap(lambda a: f(**a), in_axes=({"m": -1, "x": 0},))({"m": m, "x": x})
    np.testing.assert_array_equal(statetx.vmap(f, in_axes=(0, 0), states=rule)(m, x), [3.0, 6.0, 9.0])
    for axes in (0, (None, 0)):
        np.testing.assert_array_equal(statetx.vmap(f, in_axes=axes)(m, x), [6.0, 6.0, 6.0])
    assert statetx.vmap(lambda m, x: x, in_axes=(0, 0))("flag", x).shape == x.shape


def test_states_in_the_xs_of_map_are_refused():
    for options in ({}, {"batch_size": 2}):
        with pytest.raises(
            statetx.StateValueError, match=r"(?s)map: xs\[0\] holds states.*scan\(.*states=\{Param: 0\}"
        ):
            statetx.map(lambda a: a[0].s.value * a[1], (Scale(), jnp.ones(3)), **options)


@pytest.mark.parametrize("reads_type", [lambda v: v.ndim == 1, lambda v: v.dtype == jnp.float16])
def test_filter_may_look_at_the_value_of_a_created_state(reads_type):
    def make(x):
        return {"w": statetx.Param(jnp.zeros((2, 3))), "b": statetx.Param(jnp.zeros(3, jnp.float16))}

    is_bias = lambda path, state: reads_type(state.value)
    made = statetx.vmap(make, states={is_bias: statetx.Broadcast})(jnp.zeros(4))
    assert {k: state.value.shape for k, state in made.items()} == {"w": (4, 2, 3), "b": (3,)}


def test_error_for_a_created_state_shows_its_type():
    with pytest.raises(
        statetx.StateAccessError, match=r"differs between the examples to Param .*\(f32\[2\], made at .*test_vmap.py"
    ):
        statetx.vmap(lambda x: statetx.Param(x * jnp.ones(2)), states={statetx.Param: statetx.Broadcast})(jnp.zeros(4))


SPARSE_PROGRAMS = {
    "product": (lambda m, w, x: m @ (w * x), 0),
    "sparse result": (lambda m, w, x: {"m": 2.0 * m, "x": w + x}, 0),
    "one for all": (lambda m, w, x: (m @ (w * x), m.shape), None),
}


@pytest.mark.sample
@pytest.mark.parametrize("wrap", [lambda f: f, statetx.remat, statetx.jit], ids=["plain", "remat", "jit"])
@pytest.mark.parametrize("name", SPARSE_PROGRAMS)
def test_sparse_matrices_are_mapped_as_jax_does(name, wrap):
    fun, axis = SPARSE_PROGRAMS[name]
    dense = jnp.arange(24.0).reshape(4, 2, 3) * (jnp.arange(24).reshape(4, 2, 3) % 3 > 0)
    m = sparse.BCOO.fromdense(dense, n_batch=1) if axis == 0 else sparse.BCOO.fromdense(dense[0])
    cell = Cell()

    def step(m, x):
        cell.n.value += 1
        return fun(m, cell.w.value, x)

    out = statetx.vmap(wrap(step), in_axes=(axis, 0))(m, XS)
    expected = jax.vmap(lambda m, x: fun(m, W, x), in_axes=(axis, 0))(m, XS)
    assert jax.tree.structure(out) == jax.tree.structure(expected)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), out, expected)
    assert cell.n.value == 1
