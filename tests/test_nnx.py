"""flax.nnx Variables and modules under statetx's transforms, and statetx's transforms under nnx's."""

import copy
import functools
import gc
import pickle
import subprocess
import sys
import textwrap
import types
import weakref
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import helpers
import statetx
from helpers import Counted, compilations

pytest.importorskip("flax")
from flax import nnx  # noqa: E402

from statetx.kinds import nnx as kind  # noqa: E402

X = jax.random.normal(jax.random.key(1), (5, 4))


@pytest.fixture(autouse=True)
def _rank_promotion_as_flax_needs_it():
    with jax.numpy_rank_promotion("allow"):
        yield
    assert not kind._owner  # no frame leaves a trace of itself


class Count(nnx.Variable):
    pass


class Net(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(4, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.readout = nnx.Linear(8, 1, rngs=rngs)
        self.calls = Count(jnp.zeros((), jnp.int32))

    def block(self, x):
        self.calls[...] += 1
        return self.drop(self.norm(jax.nn.relu(self.linear(x))))

    @statetx.remat
    def rematerialized(self, x):
        return self.block(x)

    def loss(self, x, remat):
        return (self.readout(self.rematerialized(x) if remat else self.block(x)) ** 2).mean()


def fresh():
    return Net(nnx.Rngs(0))


def values(obj):
    read = lambda v: jax.random.key_data(v[...]) if isinstance(v, nnx.RngKey) else v[...]
    return {path: read(v) for path, v in statetx.states(obj).items()}


assert_close = functools.partial(helpers.assert_close, rtol=2e-5, atol=1e-5)


# -- gradients -------------------------------------------------------------------------------------------------


def nnx_grad(net, loss):
    """Value, gradient and the states' last values by nnx itself, without rematerialization."""
    f = nnx.value_and_grad(lambda net: loss(net), argnums=nnx.DiffState(0, nnx.Param))
    value, grads = f(net)
    return value, {".".join(map(str, path)): v[...] for path, v in nnx.to_flat_state(grads)}


def bound(net, loss):
    params = statetx.states(net, nnx.Param)
    return statetx.value_and_grad(lambda: loss(net), wrt=params)()


def argument(net, loss):
    params = statetx.states(net, nnx.Param)
    return statetx.value_and_grad(lambda net: loss(net), wrt=params)(net)


def by_filter(net, loss):
    value, grads = statetx.value_and_grad(lambda net: loss(net), wrt=nnx.Param)(net)
    return value, {path.removeprefix("net."): g for path, g in grads.items()}


def compiled(net, loss):
    params = statetx.states(net, nnx.Param)
    return statetx.jit(statetx.value_and_grad(lambda: loss(net), wrt=params))()


def compiled_with_argument(net, loss):
    params = statetx.states(net, nnx.Param)
    return statetx.jit(lambda net: statetx.value_and_grad(lambda: loss(net), wrt=params)())(net)


def under_nnx(net, loss):
    return nnx_grad(net, loss)


def under_nnx_jit(net, loss):
    return nnx.jit(lambda net: nnx_grad(net, loss))(net)


def around_nnx(net, loss):
    return statetx.jit(lambda: nnx_grad(net, loss))()


GRADIENTS = [bound, argument, by_filter, compiled, compiled_with_argument, under_nnx, under_nnx_jit, around_nnx]


@pytest.mark.sample
@pytest.mark.parametrize("gradient", GRADIENTS)
def test_rematerialized_equals_the_plain_gradient_of_nnx(gradient):
    """Two steps. How remat is put on a method is told by `behaviors`."""
    net, plain = fresh(), fresh()
    for _ in range(2):
        actual, expected = gradient(net, lambda net: net.loss(X, True)), nnx_grad(plain, lambda net: net.loss(X, False))
        assert_close((actual, values(net)), (expected, values(plain)))
    assert float(jnp.abs(actual[1]["linear.kernel"]).max()) > 0
    assert int(net.calls[...]) == 2 == int(net.drop.rngs.count[...])


@pytest.mark.thorough
def test_every_read_and_write_of_a_value_is_seen():
    ways = {
        "get_value": lambda v, x: v.set_value(v.get_value() + x),
        "index": lambda v, x: v.__setitem__(..., v[...] + x),
        "part": lambda v, x: v.__setitem__(0, v[0] + x),
        "copy_from": lambda v, x: v.copy_from(v.copy(v[...] + x)),
        "update_from_state": lambda v, x: v.update_from_state(v.copy(v[...] + x)),
        "raw": lambda v, x: v.set_raw_value(v.get_raw_value() + x),
        "arithmetic": lambda v, x: v.set_value(v + x),
        "tree": lambda v, x: v.set_value(jax.tree.leaves(v)[0] + x),
        "nnx.update": lambda v, x: nnx.update({"v": v}, {"v": v.copy(v[...] + x)}),
    }
    for write in ways.values():
        v = Count(jnp.zeros(2))

        def f(x, v=v, write=write):
            write(v, x)
            return v[...].sum()

        trace = statetx.trace_states(f)(1.0)
        assert [r.state for r in trace if r.read and r.written and not r.created] == [v]
        assert not v[...].any()
        for wrap in (statetx.jit, statetx.grad, lambda f: statetx.grad(statetx.remat(f))):
            before = v[...]
            wrap(f)(1.0)
            assert float(v[...][0]) == float(before[0]) + 1.0


def test_deprecated_value_is_seen():
    v = Count(jnp.zeros(()))

    def f(x):
        v.value += x
        return v.value

    with pytest.warns(DeprecationWarning):
        statetx.grad(statetx.remat(f))(2.0)
    assert float(v[...]) == 2.0


# -- other transforms ------------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_jit_compiles_once_bound_and_with_the_module_as_argument():
    for as_argument in (False, True):
        net, expected = fresh(), fresh()
        body = Counted(lambda net, x: net.loss(x, True))
        f = statetx.jit(body if as_argument else lambda x, net=net, body=body: body(net, x))
        args = (net, X) if as_argument else (X,)
        with compilations() as compiled:
            f(*args)
        assert len([name for name in compiled if "Counted" in name or "lambda" in name]) == 1
        with compilations() as compiled:
            for _ in range(3):
                out = f(*args)
        assert not compiled and body.runs == 1
        for _ in range(4):
            plain = expected.loss(X, False)
        assert_close(out, plain)
        assert_close(values(net), values(expected))


@pytest.mark.thorough
def test_vmap_draws_per_example():
    drop = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    first = statetx.vmap(drop)(jnp.ones((3, 64)))
    assert not np.array_equal(first[0], first[1]) and int(drop.rngs.count[...]) == 1
    again = statetx.vmap(drop)(jnp.ones((3, 64)))
    assert not np.array_equal(first, again) and int(drop.rngs.count[...]) == 2
    shared = statetx.vmap(drop, states={nnx.RngKey: statetx.Broadcast})(jnp.ones((3, 64)))
    np.testing.assert_array_equal(shared[0], shared[1])
    streams = nnx.Rngs(0).default.split(3)  # already one stream for each example
    drawn = statetx.vmap(lambda: streams.uniform(), axis_size=3, states={nnx.RngState: 0})()
    assert len(set(np.asarray(drawn).tolist())) == 3 and streams.count[...].tolist() == [1, 1, 1]

    h, w = Count(jnp.arange(3.0)), nnx.Param(jnp.asarray(2.0))

    def step(x):
        h[...] = h[...] + w[...] * x
        return h[...]

    out = statetx.vmap(step, states={Count: 0})(jnp.ones(3))
    np.testing.assert_array_equal(out, [2.0, 3.0, 4.0])
    np.testing.assert_array_equal(h[...], out)
    with pytest.raises(statetx.StateAccessError, match="differs between the examples"):
        statetx.vmap(lambda x: w.set_value(x))(jnp.ones(3))
    assert float(w[...]) == 2.0


@pytest.mark.thorough
def test_draws_in_a_branch_of_some_examples():
    drop, x = nnx.Dropout(0.5, rngs=nnx.Rngs(0)), jnp.asarray([[-1.0], [1.0]])

    def branch(x, rngs=None):
        return statetx.cond(x.sum() > 0, lambda x: drop(x, rngs=rngs), jnp.zeros_like, x)

    with pytest.raises(statetx.StateAccessError, match="draw before the branch that only some examples take"):
        statetx.vmap(branch)(x)
    assert int(drop.rngs.count[...]) == 0
    out = statetx.vmap(lambda x: branch(x, drop.rngs()))(x)
    assert out[0] == 0 and out[1] in (0, 2) and int(drop.rngs.count[...]) == 1


@pytest.mark.thorough
def test_optimizer_step_compiled_once():
    optax = pytest.importorskip("optax")
    expected, actual = fresh(), fresh()

    def train(net, wrap):
        opt = nnx.Optimizer(net, optax.adam(1e-2), wrt=nnx.Param)

        def step(x):
            loss, grads = nnx.value_and_grad(lambda net: net.loss(x, wrap), argnums=nnx.DiffState(0, nnx.Param))(net)
            opt.update(net, grads)
            return loss

        body = Counted(step)
        run = statetx.jit(body) if wrap else body
        losses = [run(X) for _ in range(3)]
        assert body.runs == (1 if wrap else 3) and int(opt.step[...]) == 3
        return losses

    losses = train(actual, True)
    np.testing.assert_allclose(losses, train(expected, False), rtol=1e-4)
    assert len(set(map(float, losses))) == 3
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5), values(actual), values(expected))


# -- paths, filters, tables ------------------------------------------------------------------------------------


def test_paths_are_module_attributes():
    class Deep(nnx.Module):
        def __init__(self, rngs):
            self.blocks = nnx.List([nnx.Linear(2, 2, rngs=rngs) for _ in range(2)])
            self.heads = nnx.Dict(a=nnx.Linear(2, 2, use_bias=False, rngs=rngs))
            self.seq = nnx.Sequential(nnx.LayerNorm(2, rngs=rngs), jax.nn.relu)
            self.tied = self.blocks[0]

    paths = list(statetx.states(Deep(nnx.Rngs(0))))
    assert set(paths) == {
        "blocks.0.kernel",
        "blocks.0.bias",
        "blocks.1.kernel",
        "blocks.1.bias",
        "heads.a.kernel",
        "seq.layers.0.scale",
        "seq.layers.0.bias",
    }
    net = fresh()
    assert list(statetx.states(net, nnx.BatchStat)) == ["norm.mean", "norm.var"]
    assert list(statetx.states(net, "linear.*")) == ["linear.kernel", "linear.bias"]
    assert list(statetx.states(net, nnx.RngState)) == ["drop.rngs.key", "drop.rngs.count"]
    assert not [p for p in statetx.states(net) if any(part.startswith("_") for part in p.split("."))]
    assert statetx.states(net.block) == statetx.states(net)


def test_trace_table():
    net = fresh()
    trace = statetx.trace_states(net.block)(X)
    assert set(trace.writes) == {"calls", "norm.mean", "norm.var", "drop.rngs.count"}
    assert {"linear.kernel", "norm.scale", "drop.rngs.key"} <= set(trace.reads)
    assert {r.path: r.kind for r in trace}["linear.kernel"] == "flax.nnx.Param"
    assert int(net.calls[...]) == 0 and "linear.kernel" in str(trace)


# -- errors ----------------------------------------------------------------------------------------------------


def test_write_under_a_raw_transform_alone_is_refused_by_nnx():
    v, module = Count(jnp.ones(())), nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    with pytest.raises(Exception, match="trace level"):
        jax.jit(lambda x: v.set_value(v[...] * x))(1.0)
    with pytest.raises(Exception, match="trace level"):
        statetx.jit(lambda: jax.jit(lambda: setattr(module, "extra", 1))())()


# -- created inside --------------------------------------------------------------------------------------------


def test_dropped_created_variables_are_not_effects():
    v = Count(jnp.zeros(()))

    def body(c, x):
        graphdef, state = nnx.split({"v": v, "p": nnx.Param(x)})
        nnx.merge(graphdef, state)
        gc.collect()  # nnx.merge leaves a reference cycle behind
        v[...] += x
        return c, jax.tree.map(lambda a: a * 2, v)[...]

    _, ys = statetx.scan(body, 0, jnp.arange(3.0))
    np.testing.assert_array_equal(ys, [0.0, 2.0, 6.0])
    made = []
    with pytest.raises(statetx.CreatedStateError, match=r"Param made at .*test_nnx.py:\d+ was created inside scan"):
        statetx.scan(lambda c, x: (c, made.append(nnx.Param(x))), 0, jnp.arange(3.0))
    with pytest.raises(statetx.StateAccessError, match=r"Param made at .*test_nnx.py:\d+ has no value"):
        _ = made[0][...]
    made[0].set_raw_value(jnp.ones(()))
    assert float(made[0][...]) == 1.0


def test_exception_that_is_kept_keeps_no_created_variable():
    """Its traceback leads to the frame of the call."""

    class Token:
        pass

    def make(x):
        token = Token()
        made.append(weakref.ref(token))
        nnx.Variable(x, token=token)

    def f(x):
        make(x)
        raise KeyError

    made = []
    with pytest.raises(KeyError) as error:
        statetx.grad(f)(1.0)
    assert error.value.__traceback__ is not None and made[0]() is None


def test_variable_as_argument_and_in_the_output():
    v = Count(jnp.asarray(3.0))

    @statetx.remat
    def f(v, x):
        v[...] += x
        return v, nnx.Param(v[...] * x)

    def loss(x):
        same, made = f(v, x)
        assert same is v
        return made[...], made

    grad, made = statetx.grad(loss, has_aux=True)(2.0)
    assert float(grad) == 7.0 and float(made[...]) == 10.0 and float(v[...]) == 5.0
    made[...] += 1
    assert float(made[...]) == 11.0


def test_jitted_function_returns_what_is_shared_once():
    class Tied(nnx.Module):
        def __init__(self):
            self.a = self.b = nnx.Param(jnp.ones(2))

    class Parent(nnx.Module):
        def __init__(self):
            self.child = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
            self.child.parent = self

    def pair():
        model = Tied()
        return model, nnx.state(model)  # as an optimizer has it

    for _ in range(2):
        model, state = statetx.jit(pair)()
        assert model.a is model.b is state["a"]
        parent = statetx.jit(Parent)()
        assert parent.child.parent is parent


class Remembers(nnx.Module):
    def __init__(self, keeps):
        self.last, self.mode, self.keeps = jnp.zeros(()), "new", keeps

    def __call__(self, x):
        self.last, before, self.mode = x * x, self.last, "called"
        y = self.last + 1
        self.last = self.last if self.keeps else before
        return y


@pytest.mark.parametrize(
    "wrap",
    [
        statetx.jit,
        lambda f: statetx.grad(lambda x: f(x)),
        lambda f: statetx.grad(statetx.remat(lambda x: f(x))),
        lambda f: lambda x: statetx.scan(lambda c, _: (f(c), None), x, length=2)[0],
        lambda f: lambda x: statetx.jit(lambda model, x: model(x))(f, x),
    ],
)
def test_array_that_would_stay_in_an_attribute_is_refused(wrap):
    model = Remembers(keeps=True)
    with pytest.raises(statetx.TraceLeakError, match="changes the attribute 'last' of Remembers"):
        wrap(model)(2.0)
    assert float(model.last) == 0.0 and model.mode == "new"
    assert float(model(2.0)) == 5.0 and float(model.last) == 4.0  # plain Python, as before

    model = Remembers(keeps=False)
    wrap(model)(2.0)
    assert float(model.last) == 0.0 and model.mode == "called"


@pytest.mark.filterwarnings("ignore:Using 'Module.sow")
def test_sow_and_nested_containers():
    class Sows(nnx.Module):
        def __call__(self, x):
            self.sow(nnx.Intermediate, "seen", x)
            return x * x

    for wrap in (statetx.jit, lambda f: statetx.grad(statetx.remat(f))):
        sows = Sows()
        f = wrap(sows)
        f(2.0)
        f(3.0)
        assert [float(x) for x in sows.seen.get_value()] == [2.0, 3.0]
    d = Count({"a": jnp.zeros(()), "b": [jnp.ones(())]})

    def f(x):
        d["a"] = d["a"] + x
        return d["a"] * d["b"][0]

    statetx.grad(statetx.remat(f))(2.0)
    assert float(d["a"]) == 2.0


@pytest.mark.thorough
def test_copies_made_inside_and_out():
    net = fresh()

    def f(x):
        twin = copy.deepcopy(net)
        twin.calls[...] += 5
        return twin.loss(x, True), twin

    value, twin = statetx.jit(f)(X)
    assert int(twin.calls[...]) == 6 and int(net.calls[...]) == 0
    again = pickle.loads(pickle.dumps(twin.calls))
    again[...] += 1
    assert int(again[...]) == 7
    assert copy.deepcopy(twin).calls[...] == 6


def test_ref_variables_are_refs_of_jax():
    v = Count(jnp.asarray(1.0), ref=True)

    def f(x):
        v[...] = v[...] + x
        return v[...] * x

    f = statetx.jit(f)
    assert float(f(2.0)) == 6.0 and float(f(2.0)) == 10.0
    assert float(v[...]) == 5.0


# -- installation ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_flax_imported_after_statetx_and_inside_a_frame():
    code = """
        import statetx, sys
        assert "flax" not in sys.modules
        def f(x):
            from flax import nnx
            global v
            if "v" not in globals():
                v = nnx.Variable(x * 0)
            v[...] += x
            return v[...]
        assert "flax" not in sys.modules
        from jax import numpy as jnp
        assert statetx.jit(lambda x: x)(1.0) == 1.0
        from flax import nnx
        v = nnx.Variable(jnp.zeros(()))
        assert float(statetx.grad(statetx.remat(f))(2.0)) == 1.0
        assert float(v[...]) == 2.0
        assert type(nnx.Variable.__dict__["_raw_value"]) is property
    """
    run = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_private_names_relied_upon():
    assert kind._value.__objclass__ is nnx.Variable and kind._trace.__objclass__ is nnx.Variable
    v = Count(jnp.ones(()))
    assert kind._value.__get__(v) is v.get_raw_value()
    assert type(kind._trace.__get__(v)) is kind.tracers.TraceState and v._trace_state.is_valid()
    assert kind._module_trace.__get__(fresh()._pytree__state).is_valid()
    with pytest.raises(ZeroDivisionError), mock.patch.object(nnx.Pytree, "_check_valid_context", lambda *_: 1 / 0):
        nnx.Module().attribute = 1
    frame = statetx._frames.Frame("test")
    x = v[...]

    def body():
        made = Count(jnp.ones(()))
        assert [s for s, _ in frame.created()] == [made]
        Count(jnp.ones(()))
        assert len(list(frame.created())) == 1
        v[...] = v[...] + 1
        assert list(frame.accesses.values())[0].written

    frame.run(body)
    assert v[...] is x
    gc.collect()


CALLS = {
    "jit": lambda m, x: statetx.jit(lambda m, x: m(x))(m, x),
    "jit by name": lambda m, x: statetx.jit(lambda x, m: m(x))(x, m=m),
    "remat": lambda m, x: statetx.remat(lambda m, x: m(x))(m, x),
    "jit(remat)": lambda m, x: statetx.jit(statetx.remat(lambda m, x: m(x)))(m, x),
    "vmap": lambda m, x: statetx.vmap(lambda m, x: m(x), in_axes=(None, 0))(m, x[None])[0],
    "cond": lambda m, x: statetx.cond(x[0] > -1, lambda m, x: m(x), lambda m, x: 0.0, m, x),
}


@pytest.mark.parametrize("name", CALLS)
def test_self_referencing_module_as_argument(name):
    class Cyclic(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.ones(3))
            self.me = self

        def __call__(self, x):
            return (self.w[...] * x).sum()

    model = Cyclic()
    for _ in range(2):
        np.testing.assert_allclose(CALLS[name](model, jnp.arange(3.0)), 3.0)
    grads = statetx.grad(lambda x: CALLS[name](model, x))(jnp.arange(3.0))
    np.testing.assert_allclose(grads, jnp.ones(3))


# -- metadata --


@pytest.mark.sample
@pytest.mark.filterwarnings("ignore:Variable hooks are deprecated")
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_stacked_layers_have_the_axis_in_their_metadata(axis):
    seen = []

    class Noted(nnx.Param):
        def on_add_axis(self, index, name):
            seen.append(("add", index, name))

        def on_remove_axis(self, index, name):
            seen.append(("remove", index, name))

    class Layer(nnx.Module):
        def __init__(self, rngs):
            self.w = Noted(jax.random.normal(rngs.params(), (8, 4)), out_sharding=("d", None), eager_sharding=False)
            self.short = nnx.Param(jnp.ones(3), out_sharding=["d"], eager_sharding=False)
            self.spec = nnx.Param(jnp.ones(3), out_sharding=jax.P("d"), eager_sharding=False)
            self.plain = nnx.Param(jnp.ones(3))

    make = nnx.vmap(Layer, out_axes=axis if axis >= 0 else 0, transform_metadata={nnx.PARTITION_NAME: None})
    by_hand = make(nnx.Rngs(0).split(4))
    seen.clear()
    layers = statetx.stack([Layer(nnx.Rngs(i)) for i in range(4)], axis=axis)
    states = statetx.states(layers)
    expected = {0: (None, "d", None), 1: ("d", None, None), -1: ("d", None, None)}[axis]
    assert states["w"].get_metadata("out_sharding") == expected
    names = [states[name].get_metadata("out_sharding") for name in ("short", "spec")]
    assert names == 2 * [(None, "d") if axis == 0 else ("d", None)]
    assert "out_sharding" not in states["plain"].get_metadata()
    if axis >= 0:
        assert by_hand.w.get_metadata("out_sharding") == expected
    assert seen == [("add", axis % 3, None)]
    one = layers[1]
    assert one.w.get_value().shape == (8, 4) and one.w.get_metadata("out_sharding") == ("d", None)
    assert one.short.get_metadata("out_sharding") == ("d",)
    assert states["w"].get_metadata("out_sharding") == expected, "the copy has metadata of its own"
    assert seen == [("add", axis % 3, None), ("remove", axis % 3, None)]


class Counting(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(jnp.ones(3))
        self.calls = nnx.BatchStat(jnp.zeros(()))


@pytest.mark.parametrize("name", ["grad", "value_and_grad", "jacrev", "jacfwd", "vjp", "jvp", "linearize"])
def test_write_to_the_differentiated_copy_raises(name):
    model, transform = Counting(), getattr(statetx, name)

    def loss(model, x):
        model.calls[...] += 1
        return (model.w[...] * x).sum()

    arguments = [model, jnp.ones(3)]
    at_once = {"vjp": arguments, "jvp": [arguments, arguments], "linearize": arguments}.get(name)
    hint = "wrt=nnx.Param" if at_once is None else "wrt="
    with pytest.raises(statetx.StateAccessError, match=rf"(?s)copy of BatchStat .Counting.calls.*{hint}"):
        transform(loss)(*arguments) if at_once is None else transform(loss, *at_once)
    assert float(model.calls[...]) == 0
    if name in ("jvp", "linearize"):
        return
    out = transform(loss, wrt=nnx.Param)(*arguments) if at_once is None else transform(loss, *at_once, wrt=nnx.Param)
    grads = {"value_and_grad": lambda: out[1], "vjp": lambda: out[1](1.0)[0]}.get(name, lambda: out)()
    np.testing.assert_array_equal(grads["model.w"], jnp.ones(3))
    assert float(model.calls[...]) == 1, "the module stays whole, and is written"


def test_read_only_module_is_differentiated_as_a_pytree():
    grads = statetx.grad(lambda model, x: (model.w[...] * x).sum())(Counting(), 2 * jnp.ones(3))
    np.testing.assert_array_equal(grads.w[...], 2 * jnp.ones(3))


def test_variables_that_hold_refs_are_found_by_their_paths():
    def make(seed):
        with nnx.var_defaults(ref=True):
            return {"model": nnx.Linear(3, 2, rngs=nnx.Rngs(seed)), "step": statetx.State(jnp.array(seed))}

    saved, restored = make(5), make(7)
    assert list(statetx.states(saved["model"])) == ["kernel", "bias"]
    assert [row.path for row in statetx.trace_states(saved["model"])(jnp.ones(3))] == ["kernel", "bias"]
    statetx.restore(restored, statetx.values(saved))
    np.testing.assert_array_equal(saved["model"].kernel[...], restored["model"].kernel[...])
    assert restored["step"].value == 5


def test_count_of_a_fork_under_a_plain_gradient():
    """The count has no derivative, so its tracer is that of the jit: the gradient is to blame."""
    net, keys = nnx.Dropout(0.5), nnx.Rngs(dropout=0)

    def step(rngs, x):
        return jax.grad(lambda x, rngs: statetx.remat(net)(x, rngs=rngs).sum())(x, rngs.fork())

    with pytest.raises(
        statetx.TraceLeakError, match=r"(?s)a jit is tracing, at .*, under jax's grad.*use statetx.grad in"
    ):
        statetx.jit(step)(keys, jnp.ones(3))


@pytest.mark.thorough
def test_mapped_states_of_arguments_need_a_rule():
    """As `nnx.vmap` maps modules, `nnx.State` and Rngs by in_axes, an axis that is not applied must not be silent."""
    x, drop = jnp.ones((3, 3)), nnx.Dropout(0.5)
    draw = lambda x, rngs: drop(x, rngs=rngs)
    with pytest.raises(statetx.StateValueError, match=r"argument rngs.*RngKey(?s:.*)states=\{'rngs\.default\.\*': 0\}"):
        statetx.vmap(draw, in_axes=(0, 0))(x, nnx.Rngs(1).split(3))
    out = statetx.vmap(draw, in_axes=(0, 0), states={"rngs.default.*": 0})(x, nnx.Rngs(1).split(3))
    np.testing.assert_array_equal(out, nnx.vmap(draw, in_axes=(0, 0))(x, nnx.Rngs(1).split(3)))

    state = nnx.State({"s": nnx.Param(jnp.arange(1.0, 4.0))})
    f = lambda s, x: (s["s"][...] * x).sum()
    with pytest.raises(statetx.StateValueError, match=r"argument s,(?s:.*)states=\{'s\.s': 0\}"):
        statetx.vmap(f, in_axes=(0, 0))(state, x)
    with pytest.raises(statetx.StateValueError, match=r"scan: xs\[0\]\['s'\] holds states"):
        statetx.scan(lambda c, a: (c, f(*a)), 0.0, (state, x))
    ys = statetx.scan(lambda c, a: (c, f(*a)), 0.0, (state, x), states={nnx.Param: 0})[1]
    np.testing.assert_array_equal(ys, jax.vmap(f)(state, x))


def test_models_that_jax_would_map_by_default_need_a_rule():
    """Without in_axes, `jax.vmap` takes each model of an ensemble; a model that it cannot map passes untouched."""
    ensemble = nnx.vmap(lambda key: nnx.Linear(3, 2, rngs=nnx.Rngs(key)))(jax.random.split(jax.random.key(0), 4))
    x, apply = jnp.ones((4, 3)), lambda model, x: model(x)
    for call in (
        lambda: statetx.vmap(apply)(ensemble, x),
        lambda: statetx.vmap(apply)(model=ensemble, x=x),
        lambda: statetx.vmap(lambda pair, x: apply(pair[0], x))((ensemble, x), x),
    ):
        with pytest.raises(statetx.StateValueError, match=r"with the axis 0 in in_axes,(?s:.*)states=\{'.*\*': 0\}"):
            call()
    np.testing.assert_array_equal(statetx.vmap(apply, states={nnx.Param: 0})(ensemble, x), jax.vmap(apply)(ensemble, x))
    drop = nnx.Dropout(0.5)
    draws = statetx.vmap(lambda x, rngs: drop(x, rngs=rngs))(jnp.ones((4, 9)), nnx.Rngs(1))
    assert len({tuple(row) for row in draws.tolist()}) == 4, "a key for each example"
    block = nnx.Sequential(nnx.Linear(9, 2, rngs=nnx.Rngs(0)), nnx.Dropout(0.5, rngs=nnx.Rngs(1)))
    assert statetx.vmap(lambda block, x: block(x))(block, jnp.ones((4, 9))).shape == (4, 2)


def _doubled(tree):
    return jax.tree.map(lambda x: 2 * x, tree)


def _cubes(tree):
    return sum((x**3).sum() for x in jax.tree.leaves(tree))


def _with_pullback(out, pullback):
    return out, pullback(out)


TREES = {
    "vjp": lambda tx, tree: tx.vjp(_cubes, tree)[1](1.0),
    "vjp of a tree": lambda tx, tree: _with_pullback(*tx.vjp(_doubled, tree)),
    "jvp": lambda tx, tree: tx.jvp(_doubled, (tree,), (tree,)),
    "linearize": lambda tx, tree: tx.linearize(_doubled, tree)[1](tree),
    "jacrev": lambda tx, tree: tx.jacrev(_doubled)(tree),
    "jacfwd": lambda tx, tree: tx.jacfwd(lambda x: jax.tree.map(lambda a: a * x, tree))(2.0),
    "hessian": lambda tx, tree: tx.hessian(_cubes)(tree),
    "scan": lambda tx, tree: tx.lax.scan(lambda c, x: (_doubled(c), (c, x)), tree, jnp.arange(3.0)),
    "while_loop": lambda tx, tree: tx.lax.while_loop(lambda c: _cubes(c) < 1e3, _doubled, tree),
    "fori_loop": lambda tx, tree: tx.lax.fori_loop(0, 3, lambda i, c: _doubled(c), tree),
    "cond": lambda tx, tree: tx.lax.cond(jnp.array(True), _doubled, lambda tree: tree, tree),
    "vmap": lambda tx, tree: tx.vmap(lambda x: jax.tree.map(lambda a: a * x, tree), out_axes=1)(jnp.arange(3.0)),
    "switch": lambda tx, tree: tx.lax.switch(jnp.array(1), [_doubled, lambda tree: tree], tree),
}


@pytest.mark.parametrize("name", ["grad", "vjp", "jvp", "linearize", "jacrev", "jacfwd", "hessian"])
def test_auxiliary_data_with_a_differentiated_model_has_no_tracers(name):
    """JAX gives the function a copy, whose values end with the derivative."""
    model = Counting()
    call = {
        "vjp": lambda of, f: of(f, model, has_aux=True)[2],
        "jvp": lambda of, f: of(f, (model,), (model,), has_aux=True)[2],
        "linearize": lambda of, f: of(f, model, has_aux=True)[2],
    }.get(name, lambda of, f: of(f, has_aux=True)(model)[1])
    loss = lambda m: ((m.w[...] ** 2).sum(), (m, {"w": m.w}))
    aux, expected = (call(getattr(module, name), loss) for module in (statetx, jax))
    jax.tree.map(np.testing.assert_array_equal, aux, expected)


def test_donated_states_that_are_returned_are_one_output_each():
    """A write to the state in the argument would be a second one, of as many bytes."""

    def step(state, x):
        model = nnx.merge(graph, state)
        for p in jax.tree.leaves(nnx.state(model), is_leaf=lambda v: isinstance(v, nnx.Variable)):
            p[...] = p[...] + x
        return nnx.state(model)

    graph, state = nnx.split(nnx.Linear(8, 8, rngs=nnx.Rngs(0)))
    bytes_of = lambda jit: jit(step, donate_argnums=0).lower(state, 1.0).compile().memory_analysis()
    ours, theirs = bytes_of(statetx.jit), bytes_of(jax.jit)
    assert ours.output_size_in_bytes == theirs.output_size_in_bytes
    assert ours.alias_size_in_bytes == theirs.alias_size_in_bytes > 0


def test_calls_do_not_read_the_metadata_of_variables():
    """A list of Variables is known by their identities."""
    reads = []

    class Tag:
        __eq__ = lambda self, other: True
        __hash__ = lambda self: reads.append(self) or 0

    variables, add = nnx.List([nnx.Param(jnp.ones(()), tag=Tag())]), lambda vs, x: [v[...] + x for v in vs]
    jitted = statetx.jit(add)
    for n in range(3):
        reads.clear()
        assert jitted(variables, jnp.asarray(1.0 + n)) == [2.0 + n]
    assert not reads


@pytest.mark.parametrize("make", [lambda: nnx.state(Counting()), Counting])
def test_vmap_takes_axes_in_the_form_of_flaxs_trees(make):
    """As `jax.tree.map` over such a tree gives them."""
    axes, xs = (jax.tree.map(lambda _, axis=axis: axis, make()) for axis in (None, 0)), jnp.arange(3.0)
    shared, stacked = axes
    fun = lambda tree, x: jax.tree.map(lambda a: a + x, tree)
    out = statetx.vmap(fun, in_axes=(shared, 0), out_axes=stacked)(make(), xs)
    jax.tree.map(np.testing.assert_array_equal, out, jax.vmap(fun, in_axes=(None, 0))(make(), xs))
    with pytest.raises(statetx.StateValueError, match="with the axis 0 in in_axes, holds states"):
        statetx.vmap(fun, in_axes=(stacked, 0))(out, xs)
    if make is Counting:
        with pytest.raises(ValueError, match="in_axes has a Counting with several axes, None and others"):
            statetx.vmap(fun, in_axes=(jax.tree.unflatten(jax.tree.structure(stacked), [None, 0]), 0))


class _Ours:
    """`statetx` with the names of `jax.lax`."""

    lax = statetx

    def __getattr__(self, name):
        return getattr(statetx, name)


@pytest.mark.parametrize("name", TREES)
@pytest.mark.parametrize("mode", ["jit", pytest.param("eager", marks=pytest.mark.thorough)])
def test_variables_in_trees_are_arrays_as_in_jax(name, mode):
    """In differentiated arguments, carries and outputs."""
    _, state = nnx.split(nnx.Linear(3, 2, rngs=nnx.Rngs(0), bias_init=nnx.initializers.ones))
    with jax.disable_jit(mode == "eager"):
        actual, expected = TREES[name](_Ours(), state), TREES[name](jax, state)
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


def test_functional_step_compiles_once_and_donates():
    """Each call returns others; `jax.jit` knows them by their structure."""
    graph, state = nnx.split(nnx.Linear(3, 2, rngs=nnx.Rngs(0)))
    traced = Counted(lambda state, x: jax.tree.map(lambda a: a + nnx.merge(graph, state)(x).sum(), state))
    step, expected = statetx.jit(traced, donate_argnums=0), jax.jit(traced.fun)
    ours = theirs = jax.tree.map(jnp.copy, state)
    for _ in range(3):
        last, ours, theirs = ours, step(jax.tree.map(jnp.copy, ours), jnp.ones(3)), expected(theirs, jnp.ones(3))
        assert ours is not last
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)
    assert traced.runs == 1
    step(ours, jnp.ones(3))
    assert all(x.is_deleted() for x in jax.tree.leaves(ours))


def test_compiled_init_returns_other_models_and_compiles_once():
    make = Counted(lambda key: nnx.Linear(3, 2, rngs=nnx.Rngs(key)))
    jitted = statetx.jit(make)
    models = [jitted(jax.random.key(n)) for n in (0, 1, 0)]
    kernels = [model.kernel[...] for model in models]
    np.testing.assert_array_equal(kernels[0], kernels[2])
    assert (kernels[0] != kernels[1]).all() and models[0].kernel is not models[2].kernel and make.runs == 1


def test_compiled_function_writes_variables_in_its_arguments():
    add, x = Counted(lambda count, x: count.set_value(count[...] + x)), jnp.float32(1.0)
    jitted, first, second = statetx.jit(add), Count(jnp.asarray(0.0)), Count(jnp.asarray(1.0))
    for _ in range(2):
        jitted(first, x)
    jitted(second, x)
    assert first[...].weak_type and float(first[...]) == float(second[...]) == 2 and add.runs == 1


@pytest.mark.parametrize("has_states", [False, True])
def test_arrays_in_attributes_of_a_module_argument_are_inputs(has_states):
    class Model(nnx.Module):
        def __init__(self, w):
            self.w = nnx.data(w)
            if has_states:
                self.scale = nnx.Param(jnp.ones(()))

    def run(model, _):
        return model.w.sum() * (model.scale[...] if has_states else 1)

    traced = Counted(run)
    model, jitted = Model(jnp.ones(3)), statetx.jit(traced)
    assert float(jitted(model, 1.0)) == 3
    model.w = jnp.arange(3.0) + 2
    assert float(jitted(model, 1.0)) == 9 and traced.runs == 1

    def write(model, _):
        model.calls = "written"

    statetx.jit(write)(model, 1.0)
    assert model.calls == "written"  # an attribute of the user's own model
    assert statetx.jit(lambda model, _: model)(model, 1.0) is model

    def loss(x):
        return jitted(model, 1.0) * x

    for w in (jnp.ones(3), jnp.arange(3.0)):
        model.w = w
        assert float(statetx.grad(loss)(1.0)) == w.sum()


@pytest.mark.parametrize("kind", [np.float32, float])
def test_numbers_that_a_module_has_as_data_are_inputs(kind):
    class Model(nnx.Module):
        def __init__(self):
            self.w, self.scale = nnx.data(kind(1)), nnx.Param(jnp.ones(()))

    model, traced = Model(), Counted(lambda model: model.w * model.scale[...])
    jitted = statetx.jit(traced)
    for w in (1, 2):
        model.w = kind(w)
        assert float(jitted(model)) == w
    assert traced.runs == 1


def test_module_of_arrays_alone_as_a_result_is_told_to_hold_states():
    class Model(nnx.Module):
        def __init__(self, w):
            self.w = nnx.data(w)

    told = r"Model .*'w'.* A model passes(.|\n)*Fix:.* hold it in a state"
    for transform in (statetx.jit, statetx.vmap, statetx.remat):
        with pytest.raises(statetx.TraceLeakError, match=told):
            statetx.make_jaxpr(transform(lambda x: Model(2 * x)))(jnp.ones(3))


def test_metadata_that_a_function_sets():
    jitted = statetx.jit(lambda tree: tree["count"].set_metadata(unit="s"))
    for _ in range(3):
        count = Count(jnp.zeros(()), unit="ms")
        jitted({"count": count})
        assert count.get_metadata("unit") == "s"


def _written(model, x):
    model.calls[...] += 1
    return (model.w[...] * x).sum()


class Tied(nnx.Module):
    def __init__(self):
        self.calls = nnx.BatchStat(jnp.zeros(()))
        self.w = self.twice = nnx.Param(jnp.ones(3))


class Growing(Counting):
    def grow(self):
        self.seen = nnx.Variable(self.calls[...])


@pytest.mark.parametrize(
    ("make", "fun", "most"),
    [
        (Counting, _written, 2),
        (lambda: [Counting()], lambda models, x: _written(models[0], x), 2),
        (Counting, lambda model, x: (model.w[...] * x).sum(), 2),
        (lambda: nnx.Rngs(3), lambda rngs, x: x + jax.random.normal(rngs(), (3,)), 2),
        (Tied, _written, 5),
        (Growing, lambda model, x: (_written(model, x), model.grow())[0], 9),
    ],
)
def test_other_models_of_equal_structure_need_no_further_compilation(make, fun, most):
    """From the second one on they are known by their structure, unless the function needs to know which they are."""
    counted = Counted(fun)
    jitted, x = statetx.jit(counted), jnp.arange(3.0)
    for _ in range(4):
        model, expected = make(), make()
        for _ in range(2):
            np.testing.assert_allclose(jitted(model, x), fun(expected, x), rtol=1e-6)
        assert jax.tree.structure(model) == jax.tree.structure(expected)
        for a, b in zip(jax.tree.leaves(model), jax.tree.leaves(expected), strict=True):
            is_key = jnp.issubdtype(a.dtype, jax.dtypes.prng_key)
            np.testing.assert_array_equal(*map(jax.random.key_data, (a, b)) if is_key else (a, b))
    assert counted.runs <= most


def test_other_models_that_the_function_reaches_itself():
    """Each is one object there, whichever way the function reads it."""
    models = [Counting() for _ in range(3)]

    def fun(model, x):
        models[0].calls[...] += 1
        return model.calls[...] + x

    jitted = statetx.jit(fun)
    assert [float(jitted(model, 0.0)) for model in (*models, *models)] == [1, 0, 0, 4, 0, 0]


@pytest.mark.parametrize(
    "fun",
    [
        lambda model, kept: (_written(model, 1.0), model)[1],
        lambda model, kept: model.w,
        lambda model, kept: kept.update(model=model),
    ],
)
def test_other_models_that_the_function_returns_or_keeps(fun):
    """The caller's own, as from the first one."""
    kept = {}
    jitted = statetx.jit(lambda model: fun(model, kept))
    for model in (Counting(), Counting(), Counting()):
        assert jitted(model) is fun(model, {}) and kept.get("model", model) is model


def test_variables_that_an_earlier_call_had_apart():
    """One that is there twice, which is no more than one object."""

    def fun(a, b):
        a[...] += 1
        b[...] *= 2

    jitted, count, other = statetx.jit(fun), Count(jnp.ones(())), Count(jnp.ones(()))
    jitted(count, other)
    jitted(count, count)
    assert (float(count[...]), float(other[...])) == (6, 2)


def test_donated_models_keep_what_the_function_does_not_write():
    def fun(model, x):
        model.calls[...] += model.w[0] * x

    jitted = statetx.jit(fun, donate_argnums=0)
    for model in (Counting(), Counting(), Counting()):
        old = model.calls[...]
        jitted(model, 1.0)
        jitted(model, 1.0)
        assert float(model.calls[...]) == 2 and old.is_deleted() and not model.w[...].is_deleted()


def test_new_setting_does_not_make_another_model_of_one():
    """A program for each setting; opening the model would compile them again."""
    traced, model = Counted(lambda model, mode: model.w[...] * len(mode)), Counting()
    jitted = statetx.jit(traced)
    for mode in ("train", "test", "train", "test"):
        jitted(model, mode)
    assert traced.runs == 2


def test_new_jit_of_a_function_knows_how_its_arguments_are_read():
    traced = Counted(_written)

    def fun(model, x):
        return traced(model, x)

    for _ in range(4):
        statetx.jit(fun)(Counting(), jnp.ones(3))
    assert traced.runs == 2


def test_states_created_in_a_call_that_is_read_again():
    """The second run of Python is the first one for the function."""
    model, made, items = Counting(), types.SimpleNamespace(), {}

    def fun(state, x):
        if not items:
            made.state, items["state"] = statetx.State(jnp.zeros(())), statetx.State(jnp.ones(()))
        made.state.value += x
        items["state"].value += x
        return (model.w[...] * state["w"][...]).sum()  # which are one Variable

    jitted = statetx.jit(fun)
    for _ in range(3):
        jitted({"w": model.w}, 1.0)
    assert (float(made.state.value), float(items["state"].value)) == (3, 4)


def test_transform_around_jit_sees_the_states_that_the_function_reads():
    jitted = statetx.jit(lambda model, x: (model.w[...] * x).sum())
    traces = [statetx.trace_states(lambda m: jitted(m, jnp.ones(3)))(Counting()) for _ in range(2)]
    for _ in range(2):
        jitted(Counting(), jnp.ones(3))
    traces.append(statetx.trace_states(lambda m: jitted(m, jnp.ones(3)))(Counting()))
    assert [len(trace.reads) for trace in traces] == [1, 1, 1]


@pytest.mark.parametrize("how", ["donated", "on a mesh"])
def test_written_variables_are_donated_and_keep_their_sharding(how):
    """As states; arrays of arguments are, and do, only where JAX's options say so."""
    sharding = jax.NamedSharding(jax.make_mesh((1,), ("d",)), jax.P("d"))
    value = jnp.zeros(4) if how == "donated" else jax.device_put(jnp.zeros(4), sharding)
    add, count = (
        statetx.jit(lambda count, x: count.set_value(count[...] + x), donate_states=how == "donated"),
        Count(value),
    )
    for _ in range(2):
        old = count[...]
        add(count, 1.0)
        assert old.is_deleted() if how == "donated" else count[...].sharding == sharding
    assert count[...].tolist() == [2.0] * 4


class Compared(Counting):
    def __eq__(self, other):
        return isinstance(other, Compared)

    __hash__ = None


@pytest.mark.parametrize("make", [Counting, Compared])
def test_program_of_other_models_keeps_none_of_them(make):
    jitted, arrays = statetx.jit(lambda model, x: _written(model, x)), []
    for _ in range(3):
        model = make()
        jitted(model, jnp.ones(3))
        arrays += [weakref.ref(x) for x in jax.tree.leaves(model)]
    del model
    gc.collect()
    assert not any(ref() is not None for ref in arrays) and len(jitted.cache.programs) == 1


def test_model_with_a_program_of_its_own_keeps_it_once_others_have_come():
    """It is not flattened in each call, as others are."""
    flattened = []

    class Model(Counting):
        def _pytree__flatten(self):
            flattened.append(type(self))
            return super()._pytree__flatten()

    jitted, models, x = statetx.jit(lambda model, x: _written(model, x)), [Model() for _ in range(3)], jnp.ones(3)
    for model in models:
        jitted(model, x)
    flattened.clear()
    jitted(models[0], x)
    assert not flattened and float(models[0].calls[...]) == 2
    jitted(models[0], jnp.ones((2, 3)))  # of another type: staged for this model
    jitted(models[2], x)
    assert flattened and [float(model.calls[...]) for model in models] == [3, 1, 2]


def test_program_compiled_ahead_of_time_for_a_model_runs_once_others_have_come():
    jitted, models, x = statetx.jit(_written), [Counting() for _ in range(3)], jnp.ones(3)
    compiled = jitted.lower(models[0], x).compile()
    for model in models:
        jitted(model, x)
    compiled(models[0], x)
    assert [float(model.calls[...]) for model in models] == [2, 1, 1]
    others = jitted.lower(models[0], x).compile()
    others(models[1], x)
    assert [float(model.calls[...]) for model in models] == [2, 2, 1], "for all models of this structure"


def test_model_as_a_carry_raises():
    """`jax.lax` would return another one, and flax's loops would write it."""
    with pytest.raises(statetx.StateValueError, match="carry holds a Counting, .* Close over it in the body"):
        statetx.fori_loop(0, 3, lambda i, model: model, Counting())
    with pytest.raises(statetx.StateValueError, match="an output of .* is a Counting"):
        statetx.cond(True, lambda model: model, lambda model: model, Counting())


def test_pure_function_returns_trees_of_variables():
    _, state = nnx.split(nnx.Linear(3, 2, rngs=nnx.Rngs(0)))
    pure = statetx.functionalize(_doubled)
    out, _ = jax.jit(lambda tree: pure(pure.values(tree), tree))(state)
    jax.tree.map(np.testing.assert_array_equal, out, _doubled(state))


def test_advice_to_donate_the_variables_of_an_argument():
    """`nnx.jit` takes modules apart; `statetx.jit` donates their Variables by donate_states=, not by
    donate_argnames=.
    """
    net = nnx.Linear(64, 64, rngs=nnx.Rngs(0))

    def step(net, x):
        net.kernel[...] = net.kernel[...] * x.sum()

    profile = statetx.memory_profile(nnx.jit(step, graph=False), net, jnp.ones(64))
    assert {b.kind for b in profile.buffers if b.owner == "net.kernel.value"} == {"state"}
    (text,) = [c.text for c in profile.changes if c.action == "donate"]
    assert "donate_states=True" in text and "donate_argnames" not in text


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, statetx.jit])
def test_advice_to_donate_an_argument_of_variables(wrap):
    """They are no states that the step writes; it returns others."""
    _, state = nnx.split(nnx.Linear(64, 64, rngs=nnx.Rngs(0)))

    def step(state, x):
        return jax.tree.map(lambda a: a * x.sum(), state)

    profile = statetx.memory_profile(wrap(step), state, jnp.ones(64), gradient=False)
    (change,) = [c for c in profile.changes if c.action == "donate"]
    assert "donate_argnames='state'" in change.text
    jitted = statetx.jit(step, donate_argnames="state")
    donated = statetx.memory_profile(jitted, state, jnp.ones(64), gradient=False)
    assert profile.peak_bytes - donated.peak_bytes >= 64 * 64 * 4


def test_variable_is_not_the_value_of_a_state():
    with pytest.raises(statetx.StateValueError, match=r"cannot hold a state: got Count .*Count\.value"):
        statetx.State(Count(jnp.ones(3)))


def test_gradient_of_a_module_with_integers_names_the_filter_of_flax():
    with pytest.raises(TypeError, match=r"count.* is u32\[\].*\n.*wrt=nnx\.Param"):
        statetx.grad(lambda net: net(X).sum())(
            nnx.Sequential(nnx.Linear(4, 4, rngs=nnx.Rngs(0)), nnx.Dropout(0.5, rngs=nnx.Rngs(1)))
        )


def test_record_of_nnx_without_variables_is_a_tree():
    class Record(nnx.Pytree):
        def __init__(self):
            self.x = jnp.arange(3.0)

    np.testing.assert_array_equal(statetx.vmap(lambda record: 2 * record.x)(Record()), [0.0, 2.0, 4.0])
