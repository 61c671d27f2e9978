"""`Optimizer`: one step of optax on states of every kind, and its use in training code."""

import dataclasses
import functools
import re
import threading

import brainstate
import jax
import jax.numpy as jnp
import libraries
import numpy as np
import optax
import pytest
from flax import nnx

import statetx
from helpers import assert_close

X, Y = jnp.linspace(-1.0, 1.0, 24).reshape(8, 3), jnp.linspace(0.5, -1.0, 16).reshape(8, 2)
W, B = jnp.linspace(-0.4, 0.6, 6).reshape(3, 2), jnp.array([0.1, -0.2])


class Native:
    def __init__(self):
        self.w, self.b = statetx.Param(W), statetx.Param(B)
        self.calls = statetx.State(jnp.zeros((), jnp.int32))

    def __call__(self, x):
        self.calls.value += 1
        return jnp.tanh(x @ self.w.value + self.b.value[None])


class Brainstate:
    def __init__(self):
        self.weight = brainstate.ParamState({"w": W, "b": B})

    def __call__(self, x):
        return jnp.tanh(x @ self.weight.value["w"] + self.weight.value["b"][None])


class Nnx(nnx.Module):
    def __init__(self):
        self.w, self.b = nnx.Param(W), nnx.Param(B)

    def __call__(self, x):
        return jnp.tanh(x @ self.w[...] + self.b[...][None])


KINDS = {Native: statetx.Param, Brainstate: brainstate.ParamState, Nnx: nnx.Param}


def loss_of(model):
    return lambda x, y: jnp.mean((model(x) - y) ** 2)


def trained_by_hand(tx, batches):
    params = {"w": W, "b": B}

    def loss(p, x, y):
        return jnp.mean((jnp.tanh(x @ p["w"] + p["b"][None]) - y) ** 2)

    memory = tx.init(params)
    for x, y in batches:
        updates, memory = tx.update(jax.grad(loss)(params, x, y), memory, params)
        params = optax.apply_updates(params, updates)
    return params


def values(optimizer):
    """The parameters of one of the models above, as {"w": ..., "b": ...}."""
    flat = {}
    for path, state in optimizer.states.items():
        value = libraries.get(state)
        flat |= value if isinstance(value, dict) else {path: value}
    return flat


assert_same = functools.partial(assert_close, atol=1e-6)


@pytest.mark.sample
@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.__name__)
@pytest.mark.parametrize("how", ["eager", "jit", "scan"])
def test_training_equals_optax_by_hand(kind, how):
    model = kind()
    tx = optax.chain(optax.clip_by_global_norm(0.3), optax.adamw(0.1))
    optimizer = statetx.Optimizer(tx, statetx.states(model, KINDS[kind]))

    def step(x, y):
        loss, grads = statetx.value_and_grad(loss_of(model), wrt=optimizer.states)(x, y)
        optimizer.update(grads)
        return loss

    if how == "scan":
        losses = list(statetx.scan(lambda c, xy: (c, step(*xy)), None, (X.reshape(4, 2, 3), Y.reshape(4, 2, 2)))[1])
    else:
        step = statetx.jit(step) if how == "jit" else step
        losses = [step(x, y) for x, y in zip(X.reshape(4, 2, 3), Y.reshape(4, 2, 2), strict=True)]
    assert_same(values(optimizer), trained_by_hand(tx, zip(X.reshape(4, 2, 3), Y.reshape(4, 2, 2), strict=True)))
    assert len(losses) == 4
    if kind is Native:
        assert int(model.calls.value) == 4


def test_jitted_step_compiles_once_and_optimizer_state_has_a_path():
    model = Native()
    optimizer = statetx.Optimizer(optax.inject_hyperparams(optax.adam)(0.1), statetx.states(model, statetx.Param))
    runs = []

    @statetx.jit
    def step():
        runs.append(1)
        optimizer.update(statetx.grad(loss_of(model), wrt=optimizer.states)(X, Y))

    for _ in range(3):
        step()
    assert len(runs) == 1
    states = statetx.states({"model": model, "optimizer": optimizer})
    assert list(states) == ["model.w", "model.b", "model.calls", "optimizer.state"]
    assert states["optimizer.state"] is optimizer.state
    assert int(optimizer.state.value.count) == 3


def test_states_keep_their_dtype_and_extra_arguments_are_passed_on():
    w = statetx.Param(jnp.ones(2, jnp.bfloat16))
    tx = optax.chain(optax.sgd(0.5), optax.contrib.reduce_on_plateau(patience=1, factor=0.5))
    optimizer = statetx.Optimizer(tx, [w])
    for _ in range(4):
        optimizer.update([jnp.ones(2)], value=jnp.float32(1.0))
    assert w.value.dtype == jnp.bfloat16 and w.value[0] < 1
    assert float(optimizer.state.value[1].scale) < 1.0


def test_optimizer_state_that_starts_as_a_python_number_is_carried():
    w = statetx.Param(jnp.ones(2))
    halving = optax.GradientTransformation(lambda params: 1.0, lambda g, s, params: (g, jnp.float32(0.5) * s))
    optimizer = statetx.Optimizer(halving, w)
    statetx.fori_loop(0, 2, lambda i, c: optimizer.update(w.value), None)
    assert optimizer.state.value == 0.25 and w.value[0] == 4


@pytest.mark.thorough
def test_accumulated_gradients_equal_the_full_batch():
    whole, scanned, multi = Native(), Native(), Native()
    x, y = X.reshape(4, 2, 3), Y.reshape(4, 2, 2)
    weights = statetx.states(whole, statetx.Param)
    full = statetx.grad(loss_of(whole), wrt=weights)(X, Y)

    weights = statetx.states(scanned, statetx.Param)

    def add(total, batch):
        return jax.tree.map(jnp.add, total, statetx.grad(loss_of(scanned), wrt=weights)(*batch)), None

    total, _ = statetx.scan(add, {path: jnp.zeros_like(s.value) for path, s in weights.items()}, (x, y))
    assert_same(jax.tree.map(lambda g: g / 4, total), full)
    assert int(scanned.calls.value) == 4

    optimizer = statetx.Optimizer(
        optax.MultiSteps(optax.adam(0.1), every_k_schedule=4), statetx.states(multi, statetx.Param)
    )

    def step(carry, batch):
        optimizer.update(statetx.grad(loss_of(multi), wrt=optimizer.states)(*batch))
        return carry, multi.w.value

    _, history = statetx.scan(step, None, (x, y))
    assert_same(values(optimizer), trained_by_hand(optax.adam(0.1), [(X, Y)]))
    assert bool((history[:3] == W[None]).all()) and not bool((history[3] == W).all())


@pytest.mark.parametrize(
    "grads, said",
    [
        ({"w": W}, "there is none for 'b'"),
        ({"b": B, "w": W, "net.w": W}, "there is one for 'net.w', which is not among the states"),
        ({"b": B, "ww": W}, "Did you mean 'w'?"),
        ({"b": B, "w": W.T}, "The gradient for 'w' is f32[2,3], the state's value f32[3,2]."),
        ([B, W], "there is none for 'b', 'w'; there is one for '0', '1'"),
    ],
)
def test_gradients_of_other_states_raise(grads, said):
    model = Native()
    optimizer = statetx.Optimizer(optax.sgd(0.1), statetx.states(model, statetx.Param))
    with pytest.raises(statetx.GradientError, match=re.escape(said)) as e:
        optimizer.update(grads)
    assert "wrt=optimizer.states" in str(e.value)
    assert bool((model.w.value == W).all())


def test_gradients_in_other_containers_raise():
    w, b = statetx.Param(W), statetx.Param(B)
    with pytest.raises(
        statetx.GradientError, match=r"they are PyTreeDef\(\(\*, \*\)\), the states PyTreeDef\(\[\*, \*\]\)"
    ):
        statetx.Optimizer(optax.sgd(0.1), [w, b]).update((W, B))


def test_non_updatable_target_raises():
    w, n = statetx.Param(W), statetx.State(jnp.zeros((), jnp.int32), name="steps")
    sgd = optax.sgd(0.1)
    with pytest.raises(statetx.StateValueError, match="State 'steps' .i32.*Leave it out"):
        statetx.Optimizer(sgd, {"w": w, "n": n})
    with pytest.raises(statetx.StateFilterError, match="twice"):
        statetx.Optimizer(sgd, [w, w])
    with pytest.raises(statetx.StateFilterError, match="holds a float, which is not a state"):
        statetx.Optimizer(sgd, [w, 1.0])
    with pytest.raises(statetx.StateFilterError, match="got no states"):
        statetx.Optimizer(sgd, {})
    with pytest.raises(statetx.StateFilterError, match=r"statetx.states\(model, Param\)"):
        statetx.Optimizer(sgd, statetx.Param)
    with pytest.raises(TypeError, match="gradient transformation"):
        statetx.Optimizer(0.1, [w])


@pytest.mark.parametrize("form", [lambda states: states, lambda states: states.to_nest()])
def test_states_in_a_dict_of_brainstate(form):
    """Gradients by it are a plain dict."""
    layer = brainstate.nn.Linear(2, 2)
    weights = form(layer.states(brainstate.ParamState))
    optimizer = statetx.Optimizer(optax.adam(0.1), weights)
    before = layer.weight.value
    for wrt in (weights, optimizer.states):
        optimizer.update(statetx.grad(lambda x: layer(x).sum(), wrt=wrt)(jnp.ones(2)))
    after = layer.weight.value
    np.testing.assert_allclose(before["weight"] - after["weight"], 0.2, rtol=1e-4)  # of any weights


def test_arguments_with_a_dict_of_brainstate():
    """It raises KeyError for an attribute that it does not have."""
    weights = brainstate.nn.Linear(2, 2).states(brainstate.ParamState)
    with pytest.raises(TypeError, match="Did you call it"):
        statetx.Optimizer(optax.adam, weights)
    with pytest.raises(TypeError, match="comes first"):
        statetx.Optimizer(weights, optax.adam(0.1))


def test_printing_is_not_a_read():
    w = statetx.Param(jnp.ones((2, 4)))
    optimizer = statetx.Optimizer(optax.adam(0.1), w)
    trace = statetx.trace_states(lambda x: (repr(optimizer), x)[1])(1.0)
    assert not trace.rows


def test_repr_shows_counts_and_bytes():
    optimizer = statetx.Optimizer(optax.adam(0.1), [statetx.Param(W), statetx.Param(B)])
    assert repr(optimizer) == "Optimizer(2 states, 32 B; remembers 68 B)"


def finite(variable, value):
    if not jnp.isfinite(value).all():
        raise FloatingPointError("not finite")
    return value


@pytest.mark.filterwarnings("ignore:Variable hooks are deprecated")
@pytest.mark.parametrize("inside", [lambda f: f, statetx.remat], ids=["", "in remat"])
def test_update_refused_by_one_state_changes_none(inside):
    a, b = nnx.Param(jnp.zeros(())), nnx.Param(jnp.zeros(()), on_set_value=finite)
    optimizer = statetx.Optimizer(optax.adam(1.0), {"a": a, "b": b})

    def refused():
        with pytest.raises(FloatingPointError):
            optimizer.update({"a": jnp.float32(-1), "b": jnp.float32("nan")})

    inside(refused)()
    assert (a[...], b[...], optimizer.state.value[0].count) == (0, 0, 0)
    inside(optimizer.update)({"a": jnp.float32(-1), "b": jnp.float32(-1)})
    assert a[...] > 0.9 and b[...] > 0.9 and optimizer.state.value[0].count == 1


def test_update_refused_while_tracing_changes_nothing():
    a, b = statetx.Param(jnp.zeros(())), nnx.Param(jnp.zeros(()))
    optimizer = statetx.Optimizer(optax.sgd(1.0), [a, b])

    @statetx.jit
    def step(x):
        with pytest.raises(ZeroDivisionError), pytest.MonkeyPatch.context() as patch:
            patch.setattr(nnx.Param, "set_value", lambda *_: 1 / 0)
            optimizer.update([x, x])
        return a.value + b[...]

    assert step(-1.0) == 0.0
    optimizer.update([jnp.float32(-1)] * 2)
    assert step(-1.0) == 2.0


def test_update_of_another_thread_is_not_lost():
    w = statetx.Param(jnp.zeros(()))
    optimizer = statetx.Optimizer(optax.sgd(1.0), w)

    def meanwhile(grads, state, params):
        thread = threading.Thread(target=lambda: setattr(w, "value", jnp.float32(5.0)))
        thread.start()
        thread.join(60)
        return grads, state

    optimizer.tx = optax.GradientTransformation(optimizer.tx.init, meanwhile)
    with pytest.raises(statetx.ForeignStateError, match="written by another thread"):
        optimizer.update(jnp.float32(1.0))
    assert w.value == 5.0


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Plain:
    """A callable object whose arrays are its leaves, as equinox's modules are."""

    w: jax.Array

    def __call__(self, x):
        return self.w * x


def test_module_of_arrays_is_no_filter():
    with pytest.raises(statetx.StateFilterError, match=r"states= holds f32\[4\], which is not a state"):
        statetx.Optimizer(optax.sgd(1.0), Plain(jnp.ones(4)))


def test_exception_restores_the_optimizer_state():
    w = statetx.Param(jnp.ones(2))
    optimizer = statetx.Optimizer(optax.adam(0.1), w)

    def fails():
        optimizer.update(jnp.ones(2))
        raise KeyError("afterwards")

    with pytest.raises(KeyError):
        statetx.jit(fails)()
    assert int(optimizer.state.value[0].count) == 0 and w.value[0] == 1
