"""`shard_map` on four CPU devices: replicated and split states, collectives, remat inside."""

import re

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import statetx
from helpers import REMAT3, Counted, assert_close, compilations
from statetx.policies import Levels, Slots

pytestmark = pytest.mark.skipif(len(jax.devices()) < 4, reason="needs 4 devices; conftest asks for them")
X = jnp.arange(8.0) / 8


class Model:
    def __init__(self):
        self.w = statetx.Param(jnp.asarray(2.0))
        self.h = statetx.State(jnp.ones(8))
        self.total = statetx.State(jnp.zeros(()))

    def step(self, x):
        self.h.value = jnp.tanh(self.h.value * self.w.value + x)
        self.total.value = self.total.value + jax.lax.psum(self.h.value.sum(), "d")
        return self.h.value * x


def mesh():
    return jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))


def mapped(f, **options):
    return statetx.shard_map(f, mesh=mesh(), in_specs=P("d"), out_specs=P("d"), states={"*h": P("d")}, **options)


@pytest.mark.parametrize("wrap", [lambda f: f, statetx.jit])
@pytest.mark.parametrize("remat", [False, True])
def test_states_on_devices(wrap, remat):
    m = Model()
    body = Counted(m.step)
    f = wrap(mapped(statetx.remat(body) if remat else body))
    h, total = m.h.value, 0.0
    for _ in range(2):
        h = jnp.tanh(h * 2.0 + X)
        total = total + h.sum()
        np.testing.assert_allclose(f(X), h * X, rtol=1e-6)
        np.testing.assert_allclose(m.h.value, h, rtol=1e-6)
        np.testing.assert_allclose(m.total.value, total, rtol=1e-6)
    assert m.h.value.sharding.num_devices == 4
    assert body.runs == (1 if wrap is statetx.jit else 2)


def test_gradients_and_no_recompilation():
    m = Model()
    m.h.value = jax.device_put(m.h.value, jax.NamedSharding(mesh(), P("d")))
    f = statetx.jit(statetx.grad(lambda x: (mapped(statetx.remat(m.step))(x) ** 2).sum(), argnums=0, wrt=m.w))
    gw, gx = f(X)

    def reference(w, x):
        return ((jnp.tanh(jnp.ones(8) * w + x) * x) ** 2).sum()

    expected = jax.grad(reference, (0, 1))(2.0, X)
    np.testing.assert_allclose(gw, expected[0], rtol=1e-5)
    np.testing.assert_allclose(gx, expected[1], rtol=1e-5)
    with compilations() as compiled:
        f(X)
        f(X)
    assert not compiled


def test_device_varying_write_raises():
    m = Model()
    before = m.total.value

    def f(x):
        m.total.value = m.total.value + x.sum()
        return x

    with pytest.raises(
        statetx.StateAccessError, match=r"State 'm.total' .*test_shard_map.py:\d+.*at .*test_shard_map.py"
    ):
        mapped(f)(X)
    assert m.total.value is before
    with pytest.raises(statetx.StateValueError, match="must give a PartitionSpec"):
        statetx.shard_map(f, mesh=mesh(), in_specs=P(), out_specs=P(), states={"h": 0})


def test_ref_closed_over_is_read_and_written_in_eager_code():
    one = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    ref = jax.new_ref(jnp.float32(1.0))

    @statetx.shard_map(mesh=one, in_specs=P("d"), out_specs=P("d"))
    def f(x):
        ref[...] = ref[...] + jax.lax.psum(x.sum(), "d")
        return x * ref[...]

    assert f(jnp.ones(2)).tolist() == [3.0, 3.0]
    assert float(ref[...]) == 3.0


def split(f, out_specs):
    return statetx.shard_map(f, mesh=mesh(), in_specs=P("d"), out_specs=out_specs)


def temporary_bytes(f, *args):
    return f.lower(*args).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.skipif(
    REMAT3 and jax.__version__.startswith("0.10."), reason="jax_remat3: jax.checkpoint itself fails in this program"
)
def test_replicated_weights_take_the_memory_of_a_handwritten_program():
    """Closed over, they took as many bytes again on each device."""
    weights = jax.device_put(jnp.ones((8, 64, 64)), NamedSharding(mesh(), P()))
    x = jax.device_put(jnp.ones((16, 64)), NamedSharding(mesh(), P("d")))

    def by_hand(weights, x):
        body = jax.checkpoint(lambda c, w: (c + jnp.tanh(c @ w), None), prevent_cse=False)
        return jax.lax.psum((jax.lax.scan(body, x, weights)[0] ** 2).sum(), "d")

    hand = jax.jit(jax.value_and_grad(jax.shard_map(by_hand, mesh=mesh(), in_specs=(P(), P("d")), out_specs=P())))
    w = statetx.Param(weights)

    def loss(x):
        body = statetx.remat(lambda c, w: (c + jnp.tanh(c @ w), None))
        return jax.lax.psum((statetx.scan(body, x, w.value)[0] ** 2).sum(), "d")

    ours = statetx.jit(statetx.value_and_grad(split(loss, P()), wrt=w))
    assert temporary_bytes(ours, x) <= temporary_bytes(hand, weights, x) < w.value.nbytes
    assert_close(ours(x), hand(weights, x), rtol=1e-5)


def test_placed_weights_are_readable_in_a_loop_of_another_program():
    w, x = statetx.Param(jnp.eye(16) * 0.1), jnp.ones((16, 16))

    def rnn(x):
        h = statetx.scan(lambda c, _: (jnp.tanh(c @ w.value), None), x, None, 5)[0]
        return jax.lax.pmean((h**2).sum(), "d")

    @statetx.jit
    def step(x):
        loss, g = statetx.value_and_grad(split(rnn, P()), wrt=w)(x)
        w.value = w.value - 0.1 * g
        return loss, g

    step(x)
    _, grad = step(jnp.concatenate([x, x]))
    assert float(jnp.abs(grad).max()) > 0


def test_constant_loss_on_the_mesh():
    """Its cotangent is made with the type that it has within."""
    s = statetx.State(jax.device_put(jnp.ones(()), NamedSharding(mesh(), P())))
    f = split(lambda x: x + statetx.grad(lambda y: s.value)(x.sum()), P("d"))
    np.testing.assert_allclose(f(jnp.ones(16)), jnp.ones(16))


@pytest.mark.parametrize("make", [statetx.State, brainstate.State, nnx.Variable])
def test_untouched_state_without_a_value(make):
    """Left by a call that failed, in a list that the function holds."""
    items, w = [], statetx.Param(jnp.asarray(2.0))

    def f(x, fails):
        if fails:
            items.append(make(x.sum()))
        return [x * w.value, len(items)][0]

    with pytest.raises(statetx.CreatedStateError):
        split(lambda x: f(x, True), P("d"))(jnp.ones(4))
    assert len(items) == 1
    np.testing.assert_allclose(split(lambda x: f(x, False), P("d"))(jnp.ones(4)), 2 * jnp.ones(4))


LOOPS_AROUND = {
    "eager, thrice": lambda update: [update() for _ in range(3)],
    "scan": lambda update: statetx.scan(lambda c, _: (c, update())[:1] * 2, 0.0, None, 3),
    "Slots": lambda update: statetx.scan(lambda c, _: (c, update())[:1] * 2, 0.0, None, 3, checkpoint=2),
    "fori_loop": lambda update: statetx.fori_loop(0, 3, lambda i, c: (update(), c)[1], 0.0),
    "while_loop": lambda update: statetx.while_loop(lambda c: c < 3, lambda c: (update(), c + 1)[1], 0),
    "jit, thrice": lambda update: [f() for f in [statetx.jit(update)] * 3],
    "scan in jvp": lambda update: statetx.jvp(
        lambda x: statetx.scan(lambda c, _: (c + x, update())[:1] * 2, x, None, 3)[0], (1.0,), (1.0,)
    ),
    "cond in scan": lambda update: statetx.scan(
        lambda c, _: (statetx.cond(c >= 0, lambda: (update(), 0.0)[1], lambda: 0.0), None), 0.0, None, 3
    ),
}


@pytest.mark.parametrize("make", [jax.new_ref, statetx.State], ids=["Ref", "State"])
@pytest.mark.parametrize("name", LOOPS_AROUND)
def test_ref_written_in_one_iteration_is_read_in_the_next(name, make):
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    state = make(jax.device_put(jnp.asarray([1.0, 2.0]), NamedSharding(mesh, P())))
    key = "value" if make is statetx.State else ...

    def read():
        return state.value if key == "value" else state[...]

    def write(value):
        if key == "value":
            state.value = value
        else:
            state[...] = value

    def double(x):
        write(2 * read() + 0 * x.sum())
        return x

    def update():
        return jnp.sum(statetx.shard_map(double, mesh=mesh, in_specs=P(), out_specs=P())(jnp.ones(2)))

    LOOPS_AROUND[name](update)
    np.testing.assert_array_equal(read(), [8.0, 16.0])


@pytest.mark.sample
@pytest.mark.parametrize("checkpoint", [None, Levels(2), Slots(2)], ids=str)
@pytest.mark.parametrize("check_vma", [True, False])
def test_gradient_of_a_ref_that_a_loop_reads(checkpoint, check_vma):
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    ref = jax.new_ref(jax.device_put(jnp.float32(2.0), NamedSharding(mesh, P())))

    def loop(x):
        step = lambda h, _: (statetx.cond(h.sum() > 0, lambda h: h * ref[...], jnp.sin, h), None)
        return statetx.scan(step, x, None, 3, checkpoint=checkpoint)[0]

    split = statetx.shard_map(loop, mesh=mesh, in_specs=P("d"), out_specs=P("d"), check_vma=check_vma)
    gradient = statetx.grad(lambda x: split(x).sum(), wrt=ref)
    assert gradient(jnp.ones(4)) == statetx.jit(gradient)(jnp.ones(4)) == 48


@pytest.mark.parametrize(
    "differentiate", [lambda f: statetx.jvp(f, (1.1,), (2.0,))[1], lambda f: statetx.linearize(f, 1.1)[1](2.0)]
)
def test_derivative_at_a_python_number(differentiate):
    one, scale = jax.make_mesh((1,), ("d",)), jax.new_ref(jnp.float32(3.0))

    def f(x):
        return statetx.shard_map(lambda a: a * x * scale[...], mesh=one, in_specs=P(), out_specs=P())(jnp.ones(3))

    np.testing.assert_allclose(statetx.jit(lambda: differentiate(f))(), 6.0)


# -- errors name what the user wrote


def double(x):
    return 2 * x


def shard(f, in_specs=None, out_specs=None, **options):
    return statetx.shard_map(
        f,
        mesh=mesh(),
        in_specs=P("d") if in_specs is None else in_specs,
        out_specs=P("d") if out_specs is None else out_specs,
        **options,
    )


def on_device(state):
    state.value = jax.device_put(state.value, jax.devices()[1])


ERRORS = {
    "argument is not divisible": (
        lambda m: shard(double)(X[:6]),
        "shard_map(double): in_specs has P('d',) for argument x, .* 6 elements",
    ),
    "item of an argument": (
        lambda m: shard(lambda p, x: p["a"] + x, (P("d"), P()))({"a": X[:6], "b": "text"}, X),
        "in_specs has .* for argument p['a'], of type f32[6]: 6 elements",
    ),
    "argument of too few dimensions": (
        lambda m: shard(double, P(None, "d"))(X),
        "in_specs has .* for argument x, .*: more entries",
    ),
    "argument's spec is text": (
        lambda m: shard(double, "d")(X),
        "in_specs has 'd' for argument x, which is not a PartitionSpec",
    ),
    "argument's axis is unknown": (
        lambda m: shard(double, P("e"))(X),
        "in_specs has .* for argument x, and 'e' is not an axis .*: 'd'",
    ),
    "specs of two arguments": (
        lambda m: shard(double, (P("d"), P()))(X),
        "in_specs=.* is not a tree prefix of the arguments",
    ),
    "argument by keyword": (lambda m: shard(double)(x=X), "shard_map(double): got x by keyword"),
    "argument on one device": (
        lambda m: shard(double)(jax.device_put(X, jax.devices()[1])),
        "argument x is committed to the devices [1], and the mesh has the devices [0, 1, 2, 3]",
    ),
    "state is not divisible": (
        lambda m: shard(m.step, states={"w": P(), "h": P("d")})(X),
        "states has P('d',) for State 'h' (f32[6], made at .*, of type f32[6]: 6 elements",
    ),
    "state is a scalar": (
        lambda m: shard(m.step, states={"w": P("d")})(X),
        "states has P('d',) for Param 'w' (~f32[], .*: more entries",
    ),
    "state's axis is unknown": (
        lambda m: shard(m.step, states={"w": P("e")})(X),
        "for Param 'w' .* 'e' is not an axis",
    ),
    "state on one device": (
        lambda m: [on_device(m.w), shard(m.step)(X)],
        "Param 'w' (~f32[], made at .*) is committed to the devices [1], and .*[0, 1, 2, 3]",
    ),
    "states= is a number": (lambda m: shard(double, states=3), "states= maps filters to PartitionSpecs, .*; got 3"),
    "output is a scalar": (
        lambda m: shard(jnp.sum)(X),
        "shard_map(sum): out_specs has P('d',) for the output, .*: more entries",
    ),
    "output varies": (
        lambda m: shard(double, out_specs=P())(X),
        "the output (f32[2]) has the spec P() in out_specs, .* axes 'd'",
    ),
    "part of the output varies": (
        lambda m: shard(lambda x: {"a": x, "b": x}, out_specs={"a": P("d"), "b": P()})(X),
        "the output['b'] (f32[2]) has the spec P()",
    ),
    "output's spec is text": (
        lambda m: shard(double, out_specs="d")(X),
        "out_specs has 'd' for the output, which is not a PartitionSpec",
    ),
    "output's axis is unknown": (
        lambda m: shard(double, out_specs=P("e"))(X),
        "for the output, and 'e' is not an axis",
    ),
    "specs of two outputs": (
        lambda m: shard(double, out_specs=(P("d"),) * 2)(X),
        "out_specs=.* is not a tree prefix of the output",
    ),
    "branch on an argument": (
        lambda m: statetx.jit(shard(lambda x: x if x[0] > 0 else -x))(X),
        "while tracing the function .*lambda.* at .*test_shard_map.py:.* argument x",
    ),
    "branch on a state": (
        lambda m: statetx.jit(shard(lambda x: x if m.w.value > 0 else x))(X),
        "the value of the argument m.w",
    ),
}


@pytest.mark.parametrize("mistake", ERRORS)
def test_error_names_the_function_and_the_argument_of_the_user(mistake):
    m = Model()
    if mistake == "state is not divisible":
        m.h.value = jnp.ones(6)
    before = {path: np.asarray(state.value) for path, state in statetx.states(m).items()}
    run, words = ERRORS[mistake]
    with pytest.raises((TypeError, ValueError), match=".*".join(map(re.escape, words.split(".*")))):
        run(m)
    for path, state in statetx.states(m).items():
        np.testing.assert_array_equal(state.value, before[path])


def test_jit_names_the_state_that_is_on_other_devices_than_the_mesh():
    h = statetx.State(X)
    f = statetx.jit(statetx.shard_map(lambda x: h.value.sum() * x, mesh=mesh(), in_specs=P("d"), out_specs=P("d")))
    f(X)
    h.value = jax.device_put(X, jax.devices()[0])
    with pytest.raises(ValueError, match=r"(?s)Got argument h of .*<lambda> with shape float32\[8\].*\nFix: place"):
        f(X)
    h.value = X
    assert f(X).shape == X.shape


@pytest.mark.parametrize("make", [statetx.Param, brainstate.ParamState])
def test_state_that_the_enclosing_trace_has_created_is_read_and_written(make):
    """JAX does not link the trace of a shard_map in a compiled function to the traces around it."""
    m = Model()

    def loss(x):
        m.w = make(2.0 * x)

        def f(x):
            y = jnp.sin(m.w.value) * x
            m.w.value = m.w.value + 1.0
            return y

        shards = statetx.shard_map(f, mesh=mesh(), in_specs=P("d"), out_specs=P("d"))
        return shards(jnp.broadcast_to(x, 4)).sum() + m.w.value

    for gradient in (statetx.jit(statetx.grad(loss)), statetx.grad(statetx.jit(statetx.remat(loss)))):
        for _ in range(2):
            np.testing.assert_allclose(gradient(1.0), 4 * (jnp.sin(2.0) + 2 * jnp.cos(2.0)) + 2, rtol=1e-6)
            np.testing.assert_allclose(m.w.value, 3.0)


@pytest.mark.parametrize(
    ("args", "options", "words"),
    [
        ((double, "mesh"), {}, r"the mesh is given by keyword.\nFix: statetx.shard_map\(f, mesh=mesh, .* states=...\)"),
        ((double,), {"state_in_specs": {}}, r"no state_in_specs=: .* states=\{state: PartitionSpec"),
        ((double,), {"in_spec": P()}, "Did you mean 'in_specs'"),
    ],
    ids=["mesh by position", "specs as in brainstate", "misspelled"],
)
def test_calls_in_the_form_of_brainstate_name_the_options(args, options, words):
    with pytest.raises(TypeError, match=words):
        statetx.shard_map(*args, **options, in_specs=P("d"), out_specs=P("d"))


def explicit_mesh():
    return jax.set_mesh(jax.make_mesh((2, 2), ("d", "e"), axis_types=(jax.sharding.AxisType.Explicit,) * 2))


@pytest.mark.parametrize("wrap", [lambda f: f, statetx.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("axes", [("d", "e"), ("d",)], ids=["all axes", "an axis"])
def test_missing_in_specs_are_the_shardings_of_the_types(wrap, axes):
    calls = statetx.State(0)

    def step(x, scale):
        calls.value += 1
        assert x.shape == (4, 8 // len(axes))
        return scale * jnp.sin(x)

    with explicit_mesh():
        x = jax.device_put(jnp.arange(64.0).reshape(8, 8), P("d", "e"))
        spec = P(*axes)
        out = wrap(statetx.shard_map(step, out_specs=spec, axis_names=set(axes)))(x, jnp.asarray(2.0))
        np.testing.assert_allclose(out, 2 * jnp.sin(x), rtol=1e-6)
    assert calls.value == 1


def test_missing_in_specs_over_automatic_axes_are_refused():
    with pytest.raises(
        TypeError, match="in_specs is missing, .* over 'd': only .* explicit axes .*\nFix: give in_specs"
    ):
        statetx.shard_map(double, mesh=mesh(), out_specs=P("d"))(X)


@pytest.mark.parametrize("remat", [lambda f: f, statetx.remat], ids=["plain", "remat"])
def test_gradient_of_a_reduced_argument_is_a_sum_in_parts(remat):
    calls = statetx.State(0)

    @remat
    def on_device(w, x):
        calls.value += 1
        return jnp.sin(w) * x

    with explicit_mesh():
        w, x = jax.device_put(X, P(None, reduced={"d"})), jax.device_put(jnp.arange(16.0), P("d"))
        mapped = statetx.shard_map(on_device, in_specs=(P(None, reduced={"d"}), P("d")), out_specs=P("d"))
        grad = statetx.jit(statetx.grad(lambda w: mapped(w, x).sum()))(w)
        assert grad.sharding.spec == P(None, unreduced={"d"})
        whole = statetx.jit(lambda g: jax.reshard(g, P()))(grad)
        np.testing.assert_allclose(whole, jnp.cos(X) * jnp.arange(16.0).reshape(2, 8).sum(0), rtol=1e-6)
    assert calls.value == 1


def _add_in_loop(loop):
    """Sums in a state and in a carry, both the same on all devices before the loop."""

    def program(x):
        total, last = statetx.State(jnp.zeros(())), statetx.State(0.0)

        def step(c, a):
            total.value = total.value + c * a
            last.value = a
            return jnp.sin(c + a)

        return loop(step, x) * total.value + last.value

    return program


def _unrolled(step, x):
    c = 0.0
    for a in x:
        c = step(c, a)
    return c


LOOPS_ON_DEVICES = {
    "scan": lambda step, x: statetx.scan(lambda c, a: (step(c, a), None), 0.0, x)[0],
    "Slots": lambda step, x: statetx.scan(lambda c, a: (step(c, a), None), 0.0, x, checkpoint=Slots(1))[0],
    "Levels": lambda step, x: statetx.scan(lambda c, a: (step(c, a), None), jnp.zeros(()), x, checkpoint=Levels(2))[0],
    "fori_loop": lambda step, x: statetx.fori_loop(0, 4, lambda i, c: step(c, x[i]), 0.0),
    "while_loop": lambda step, x: statetx.while_loop(
        lambda c: c[0] < 4, lambda c: (c[0] + 1, step(c[1], x[c[0]])), (0, 0.0), max_steps=4, checkpoint=2
    )[1],
}


@pytest.mark.sample
@pytest.mark.parametrize("name", LOOPS_ON_DEVICES)
def test_a_loop_starts_with_a_value_that_is_the_same_on_all_devices(name):
    x = jnp.linspace(-1.0, 1.0, 16)

    def loss(program):
        each = statetx.shard_map(lambda x: program(x)[None], mesh=mesh(), in_specs=P("d"), out_specs=P("d"))
        return lambda x: jnp.sin(each(x)).sum()

    value, grad = statetx.jit(statetx.value_and_grad(loss(_add_in_loop(LOOPS_ON_DEVICES[name]))))(x)
    wanted, wanted_grad = jax.value_and_grad(
        lambda x: sum(jnp.sin(_add_in_loop(_unrolled)(part)) for part in x.reshape(4, 4))
    )(x)
    np.testing.assert_allclose(value, wanted, rtol=1e-6)
    np.testing.assert_allclose(grad, wanted_grad, rtol=2e-6)


@pytest.mark.sample
@pytest.mark.parametrize("name", LOOPS_ON_DEVICES)
def test_a_state_is_set_in_a_loop_to_what_is_the_same_on_all_devices(name):
    def on_device(loop):
        def program(x):
            first = statetx.State(x.sum())

            def step(c, a):
                sum_ = first.value
                first.value = jnp.ones(())
                return jnp.sin(c + a * sum_)

            return (loop(step, x) + first.value)[None]

        return program

    def loss(x):
        each = on_device(LOOPS_ON_DEVICES[name])
        return statetx.shard_map(each, mesh=mesh(), in_specs=P("d"), out_specs=P("d"))(x).sum()

    x = jnp.linspace(-1.0, 1.0, 16)
    value, grad = statetx.jit(statetx.value_and_grad(loss))(x)
    wanted, wanted_grad = jax.value_and_grad(
        lambda x: sum(on_device(_unrolled)(part).sum() for part in x.reshape(4, 4))
    )(x)
    np.testing.assert_allclose(value, wanted, rtol=1e-6)
    np.testing.assert_allclose(grad, wanted_grad, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("wrap", [lambda f: f, statetx.jit], ids=["eager", "jit"])
def test_a_branch_may_return_a_value_that_is_the_same_on_all_devices(wrap):
    def on_device(x):
        count = statetx.State(0.0)

        def large(x):
            count.value = x.sum()
            return x, jnp.ones(())

        out, one = statetx.cond(x[0] > 3, large, lambda x: (jnp.zeros(2), x[1]), x)
        return out + one + count.value

    x = jnp.arange(8.0)
    out = wrap(statetx.shard_map(on_device, mesh=mesh(), in_specs=P("d"), out_specs=P("d")))(x)
    np.testing.assert_allclose(out, [1, 1, 3, 3, 4 + 1 + 9, 5 + 1 + 9, 6 + 1 + 13, 7 + 1 + 13])
