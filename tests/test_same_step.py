"""`statetx.testing.assert_same_step`: planted faults with their states and lines, and steps that are the same."""

import gc
import importlib.util
import pathlib
import re
import sys
import time
import tracemalloc
import types

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import statetx
from statetx._equations.structure import Body
from statetx._objects.walk import Walk
from statetx._verify import same
from statetx._verify.functions import plain
from statetx._verify.values import Recording
from statetx.testing import assert_same_step

X = jnp.sin(jnp.arange(24.0)).reshape(4, 6)

# `@w` reads or writes a state in the way of each library.
SOURCE = """\
import jax
import jax.numpy as jnp
NAMES = "w v m u mean mask count key".split()
log = lambda value: None
@jax.custom_vjp
def act(x):
    return jnp.tanh(x)
def act_fwd(x):
    y = jnp.tanh(x)
    return y, y
def act_bwd(y, g):
    return (g * (1 - y * y),)
act.defvjp(act_fwd, act_bwd)
def loss(w, v, mask, draw, x):
    h = act(x @ w * mask[None])
    keep = jax.random.bernoulli(draw, 0.7, h.shape)
    h = jnp.where(keep, h / 0.7, 0.0)
    late = h
    out = late @ v
    return (out**2).mean() + 0.1 * jnp.abs(late).sum(1).mean(), h.mean(0)
def step(ARGUMENTS):
    READ
    @count = @count + 1
    @key, draw = jax.random.split(@key)
    gradient = jax.value_and_grad(loss, (0, 1), has_aux=True)
    (value, batch), (gw, gv) = gradient(@w, @v, @mask, draw, x)
    @mask = jnp.roll(@mask, 1)
    gw = gw + 0.01 * @w
    scale = jnp.minimum(1.0, 0.1 / jnp.sqrt((gw**2).sum() + (gv**2).sum()))
    @m = 0.9 * @m + 0.1 * gw * scale
    @u = 0.99 * @u + 0.01 * (gw * scale) ** 2
    @w = @w - 1e-2 * @m / (jnp.sqrt(@u) + 1e-6)
    @v = @v - 1e-2 * gv * scale
    @mean = 0.9 * @mean + 0.1 * batch
    jax.debug.callback(log, value)
    return RESULT
"""
TWICE, USE = "twice", "h = act(x @ w * mask[None])"
# name: the state that is named, a line, what replaces it or follows it; where its first wrong value is, if elsewhere.
FAULTS = {
    "doubled write": ("mean", "@mean = 0.9 * @mean + 0.1 * batch", TWICE),
    "doubled count": ("count", "@count = @count + 1", TWICE),
    "key advanced twice": ("key", "@key, draw = jax.random.split(@key)", "{}; @key = jax.random.split(@key)[0]"),
    "callback twice": ("", "jax.debug.callback(log, value)", TWICE),
    "moments swapped": ("m", "@mean = 0.9 * @mean + 0.1 * batch", "{}; @m, @u = @u, @m"),
    "stale mask": ("w", "(value, batch), (gw, gv) = gradient(@w, @v, @mask, draw, x)", "@mask|jnp.roll(@mask, 1)", USE),
    "dropped gradient": ("w", "out = late @ v", "late|jax.lax.stop_gradient(late)"),
    "wrong residual": ("w", "return y, y", "y, y|y, x", USE),
    "wrong derivative": ("w", "return (g * (1 - y * y),)", "1 - y|1.001 - y", USE),
    "lost weight decay": ("w", "gw = gw + 0.01 * @w", "0.01|0.0"),
    "cast": ("w", "out = late @ v", "late|late.astype(jnp.bfloat16).astype(late.dtype)"),
    "epsilon": ("w", "@w = @w - 1e-2 * @m / (jnp.sqrt(@u) + 1e-6)", "1e-6|1.1e-6"),
    "decay": ("w", "@m = 0.9 * @m + 0.1 * gw * scale", "0.9|0.901"),
    "no correction of dropout": ("w", "h = jnp.where(keep, h / 0.7, 0.0)", "/ 0.7|/ 0.70001"),
    "learning rate": ("v", "@v = @v - 1e-2 * gv * scale", "1e-2|1.00001e-2"),
    "lost clipping": ("v", "@v = @v - 1e-2 * gv * scale", "gv * scale|gv"),
    "lost update": ("mean", "@mean = 0.9 * @mean + 0.1 * batch", "@mean = 0.9 * @mean + 0.1 * batch|@mean = @mean"),
    "another axis": ("w", "scale = jnp.minimum(1.0, 0.1 / jnp.sqrt((gw**2).sum() + (gv**2).sum()))", "sum() +|sum() -"),
}
ACCESS = {"brainstate": r"\1.value", "nnx": r"\1[...]", "plain": r"\1"}
THOROUGH = [("brainstate", "doubled write"), ("nnx", "callback twice"), ("plain", "epsilon")]


def initial():
    w, v = jnp.cos(jnp.arange(36.0)).reshape(6, 6) / 2, jnp.sin(jnp.arange(12.0)).reshape(6, 2)
    mask = jnp.array([1.0, 0.0, 1.0, 1.0, 1.0, 0.0])
    names = "w v m u mean mask count key".split()
    values = (
        w,
        v,
        jnp.ones((6, 6)) / 9,
        jnp.ones((6, 6)) / 100,
        jnp.zeros(6),
        mask,
        jnp.zeros((), int),
        jax.random.key(3),
    )
    return dict(zip(names, values, strict=True))


def states_of(library):
    kind = {"brainstate": brainstate.State, "nnx": nnx.Variable, "plain": lambda x: x}[library]
    return {name: kind(x) for name, x in initial().items()}


def written(library, folder, name, source):
    """The step of a source, in a file of its own."""
    is_plain = library == "plain"
    source = re.sub(r"@(w|v|mask|mean|m|u|count|key)\b", ACCESS[library], source.replace("@jax", "\0"))
    source = source.replace("\0", "@jax").replace("ARGUMENTS", "states, x" if is_plain else "x")
    source = source.replace("READ", ", ".join(initial()) + " = (states[n] for n in NAMES)" if is_plain else "pass")
    source = source.replace("RESULT", f"({', '.join(initial())}), value" if is_plain else "value")
    path = folder / f"{name}.py"
    path.write_text(source)
    space = {} if is_plain else dict(PLANTED[library][0])
    exec(compile(source, str(path), "exec"), space)
    return space["step"]


def value_of(state):
    return state.value if isinstance(state, brainstate.State) else state.get_raw_value()


PLANTED = {}


def planted(library, folder):
    """The states and the step without a fault: one of each for all faults, so that it is compiled once."""
    if library not in PLANTED:
        PLANTED[library] = [states_of(library)]
        PLANTED[library].append(statetx.jit(written(library, folder, "reference", SOURCE)))
    return PLANTED[library]


def changed(line, change):
    """The line with a fault, as further lines or a replacement."""
    if change == TWICE:
        return f"{line}; {line}"
    if "{}" in change:
        return change.replace("{}", line)
    old, new = change.split("|")
    assert old in line
    return line.replace(old, new, 1)


def marks_of(library, name):
    marks = [pytest.mark.thorough if (library, name) in THOROUGH else pytest.mark.slow]
    if (library, name) == ("plain", "moments swapped"):
        reason = "two names of plain JAX are exchanged without an operation: the lines that compute both are named"
        marks.append(pytest.mark.xfail(reason=reason))
    return marks


@pytest.mark.whole
@pytest.mark.parametrize(
    "library, name",
    [pytest.param(library, name, marks=marks_of(library, name)) for library in ACCESS for name in FAULTS],
)
def test_planted_fault_is_named_with_its_state_and_line(library, name, tmp_path_factory):
    folder = tmp_path_factory.mktemp("planted")
    states, reference = planted(library, folder)
    state, line, change, *used = FAULTS[name]
    (number,) = [n for n, text in enumerate(SOURCE.splitlines(), 1) if text.strip() == (used or [line])[0]]
    step = written(library, folder, name.replace(" ", "_"), SOURCE.replace(line, changed(line, change)))
    args = (states, X) if library == "plain" else (X,)
    before = None if library == "plain" else value_of(states["w"])
    with pytest.raises(AssertionError, match="^step is not the same step as step: ") as error:
        assert_same_step(reference, step, *args, steps=1)
    problem = str(error.value)
    if state:
        expected = f"output[0][{list(initial()).index(state)}]" if library == "plain" else f"state '{state}'"
        assert expected in problem and str(number) in re.findall(r"\.py:(\d+)", problem), problem
    else:
        assert "calls to the host differ" in problem
    if before is not None:
        assert value_of(states["w"]) is before


def test_fault_of_a_small_step_is_named_with_its_line():
    n = statetx.State(jnp.arange(3.0))

    def step(x, epsilon=1e-6):
        n.value = x / (jnp.abs(n.value) + epsilon)

    wrong = lambda x: step(x, 1.1e-6)
    here = step.__code__.co_firstlineno + 1
    with pytest.raises(AssertionError, match=rf"state 'n'\[0\].*\n.*\n.*: add f64\[3\] at .*:{here} in step"):
        assert_same_step(step, wrong, jnp.ones(3), steps=1)


def test_output_whose_value_is_elsewhere_in_the_reference_has_its_line():
    def step(n, x):
        n = n + 1
        return n, 2 * x

    wrong = lambda n, x: (n + 1 + 1, 2 * x)
    here = wrong.__code__.co_firstlineno
    with pytest.raises(AssertionError, match=rf"output\[0\]: 2 in place of 1 .*\n.*\n.*: add i32\[\] at .*:{here} in"):
        assert_same_step(step, wrong, jnp.zeros((), jnp.int32), jnp.ones((), jnp.int32), steps=1)


# -- steps that are the same ------------------------------------------------------------------------------------------


class Network:
    def __init__(self, depth=3):
        keys = jax.random.split(jax.random.key(0), depth)
        self.layers = [statetx.Param(jax.random.normal(k, (6, 6)) / 2) for k in keys]
        self.rng, self.mean = statetx.RngState(1), statetx.State(jnp.zeros(6))

    def layer(self, w, h):
        keep = jax.random.bernoulli(self.rng.next(), 0.8, h.shape)
        return h + jnp.where(keep, jnp.tanh(h @ w.value), 0.0)

    def step(self, x, remat=lambda f: f):
        def loss(x):
            for w in self.layers:
                x = remat(lambda h, w=w: self.layer(w, h))(x)
            self.mean.value = 0.9 * self.mean.value + 0.1 * x.mean(0)
            return (x**2).mean()

        value, grads = statetx.value_and_grad(loss, wrt=self.layers)(x)
        for w, g in zip(self.layers, grads, strict=True):
            w.value = w.value - 0.1 * g
        return value


@pytest.mark.thorough
def test_rematerialized_step_is_the_same_bit_for_bit():
    network = Network()
    step = lambda x: network.step(x, statetx.remat)
    before = [s.value for s in statetx.states(network).values()]
    report = assert_same_step(network.step, step, X, steps=2)
    assert str(report).endswith("in 2 steps, bit for bit.") and report.rounding is None and report.num_results == 6
    assert all(a is s.value for a, s in zip(before, statetx.states(network).values(), strict=True))


def recurrent(checkpoint):
    def step(x):
        def loss(x):
            turn = lambda h, x: ((jnp.tanh(h @ W.value + x), jnp.sin(h).sum()))
            h, out = statetx.scan(turn, jnp.zeros(6), x, checkpoint=checkpoint)
            return out.mean() + (h**2).sum()

        value, g = statetx.value_and_grad(loss, wrt=W)(x)
        W.value = W.value - 0.1 * g
        return value

    return step


W = statetx.Param(jnp.cos(jnp.arange(36.0)).reshape(6, 6) / 2)


@pytest.mark.thorough
@pytest.mark.parametrize("checkpoint", [statetx.policies.Slots(3), statetx.policies.Levels(2)], ids=repr)
def test_checkpointed_loop_is_the_same_step(checkpoint):
    xs = jnp.sin(jnp.arange(72.0)).reshape(12, 6)
    report = assert_same_step(recurrent(None), recurrent(checkpoint), xs, steps=2)
    assert report.error < 1e-6


@pytest.mark.slow
def test_sums_in_another_order_are_rounding_which_is_measured():
    x = jnp.sin(jnp.arange(64.0 * 6)).reshape(64, 6)
    loss = lambda x: (jnp.tanh(x @ W.value) ** 2).mean()

    def step(x, parts=None):
        gradient = statetx.grad(loss, wrt=W)(x)
        if parts:
            gradient = statetx.grad(statetx.microbatch(loss, parts), wrt=W)(x)
        W.value = W.value - 0.1 * gradient

    report = assert_same_step(step, lambda x: step(x, 8), x)
    assert 0 < report.error < 1e-6 and report.double_error < 1e-14
    assert "up to" in str(report) and "both in float64" in str(report)
    wrong = lambda x: step(x * (1 + 1e-6), 8)
    with pytest.raises(AssertionError, match=r"state '.*W'"):
        assert_same_step(step, wrong, x)


@pytest.mark.slow
def test_planned_step_and_gradients_in_place_are_the_same():
    network = Network()
    plan = statetx.plan(network.step, X, budget=1.0, time_limit=2)
    assert_same_step(network.step, plan.apply(network.step), X, steps=1)
    assert_same_step(network.step, statetx.jit(network.step, donate_states=True), X, steps=2)


@pytest.mark.slow
def test_verified_plan_is_held_against_the_plain_program(monkeypatch):
    def loss(w, x):
        return (jnp.tanh(jnp.tanh(x @ w) @ w) ** 2).mean()

    args, options = (jnp.eye(6), jax.ShapeDtypeStruct((4, 6), jnp.float32)), {"budget": 1.0, "verify": True}
    assert not statetx.plan(loss, *args, **options).is_step
    monkeypatch.setattr(statetx.Plan, "apply", lambda self, fun: lambda w, x: fun(w, x) * 1.001)
    with pytest.raises(statetx.PlanError, match=r"The plan for loss is wrong\..*is not the same step as loss"):
        statetx.plan(loss, *args, **options)
    report = statetx.explain_oom(loss, *args, limit="0.4KiB", verify=True)
    assert report.plan is None or "finds none" in report.plan.text


def attention(softmax, decay=0.1, of=None, scale=1.0):
    """A step of Adam by hand: the gradient of the keys' bias is zero but for rounding, which Adam makes a step of."""
    states = [statetx.Param(jnp.sin(jnp.arange(n) + 0.5) / 3) for n in (36, 36, 6)]
    moments = [(statetx.State(s.value * 0), statetx.State(s.value * 0)) for s in states]

    def loss(x):
        q, k, bias = (s.value for s in states)
        scores = (x @ q.reshape(6, 6)) @ (x @ k.reshape(6, 6) + bias[None]).T
        weights = softmax(jnp.where(jnp.tri(len(x)) > 0, scores, -jnp.inf))
        return (scale * (weights @ x).astype(of or x.dtype) ** 2).sum() / scale

    def step(x):
        for w, (m, u), g in zip(states, moments, statetx.grad(loss, wrt=states)(x), strict=True):
            m.value, u.value = 0.9 * m.value + 0.1 * g, 0.99 * u.value + 0.01 * g**2
            w.value = w.value * (1 - 1e-3 * decay) - 1e-3 * m.value / (jnp.sqrt(u.value) + 1e-8)

    return step


SOFTMAX = jax.nn.softmax, lambda scores: jnp.exp(jax.nn.log_softmax(scores))


@pytest.mark.slow
@pytest.mark.parametrize("of", [None, jnp.float32])  # float32 in a program of float64, too
def test_rounding_that_an_optimizer_amplifies_is_no_fault(of):
    plain, other = SOFTMAX
    report = assert_same_step(attention(plain, of=of), attention(other, of=of, scale=1.7), X, steps=1)
    assert report.error > 1e-3 and report.rounding > 1e-2  # of the bias


@pytest.mark.slow
def test_fault_beside_amplified_rounding_and_an_infinite_mask_is_named():
    steps = attention(SOFTMAX[0]), attention(SOFTMAX[1], decay=0.0)
    with pytest.raises(
        AssertionError, match=r"(?s)state 'loss.states.0'.*: sub f64\[36\] at .*same_step.py:\d+ in step"
    ):
        assert_same_step(*steps, X, steps=1)


def mixed_precision(wrap=lambda f: f):
    """A step of AdamW with norms and products in bfloat16, which XLA rounds in some fusions and not in others."""
    optimizer = optax.adamw(1e-3)

    def layer(w, x):
        w, h = w.astype(jnp.bfloat16), x - x.mean(-1, keepdims=True)
        h = h * jax.lax.rsqrt((h**2).mean(-1, keepdims=True) + 1e-5)
        return x + jnp.tanh(h @ w) @ w.T

    def loss(ws, x):
        x = x.astype(jnp.bfloat16)
        for w in ws:
            x = wrap(layer)(w, x)
        return (x.astype(jnp.float32) ** 2).mean()

    def step(ws, moments, x):
        updates, moments = optimizer.update(jax.grad(loss)(ws, x), moments, ws)
        return optax.apply_updates(ws, updates), moments

    ws = [jax.random.normal(jax.random.key(n), (16, 32)) / 4 for n in range(3)]
    return step, ws, optimizer.init(ws), jax.random.normal(jax.random.key(9), (8, 16))


@pytest.mark.thorough
def test_narrow_floats_that_xla_does_not_round_are_no_fault():
    step, *args = mixed_precision()
    report = assert_same_step(step, mixed_precision(statetx.remat)[0], *args, steps=1)
    assert report.error > 1e-3 and report.double_error == 0


@pytest.mark.thorough
def test_differences_are_rounding_where_another_compilation_has_them_in_other_results():
    """Of bfloat16: each result alone is no measure, since XLA may round it the same way by chance."""
    optimizer = optax.adamw(1e-3)

    def layer(x, w):
        w, h = w.astype(jnp.bfloat16), (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)
        weights = jax.nn.softmax(((h @ w) @ h.T).astype(jnp.float32)).astype(jnp.bfloat16)
        return x + weights @ (h @ w.T), None

    def unrolled(ws, x):
        for w in ws:
            x, _ = layer(x, w)
        return x

    def make(layers):
        loss = lambda ws, x: (layers(ws, x.astype(jnp.bfloat16)).astype(jnp.float32) ** 2).mean()

        def step(ws, moments, x):
            updates, moments = optimizer.update(jax.grad(loss)(ws, x), moments, ws)
            return optax.apply_updates(ws, updates), moments, loss(ws, x)

        return step

    ws = [jax.random.normal(jax.random.key(n), (16, 16)) / 4 for n in range(3)]
    args = ws, optimizer.init(ws), jax.random.normal(jax.random.key(9), (12, 16))
    in_a_loop = make(lambda ws, x: jax.lax.scan(layer, x, jnp.stack(ws))[0])
    report = assert_same_step(make(unrolled), in_a_loop, *args, steps=1)
    assert report.error > 1e-2


# -- counts, bad input ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_doubled_update_shows_at_any_tolerance():
    network = Network(1)

    def step(x):
        network.step(x)
        network.mean.value = 0.9 * network.mean.value + 0.1 * x.mean(0)

    twice = lambda x: [step(x), setattr(network.mean, "value", network.mean.value * 1.0001)][0]
    with pytest.raises(AssertionError, match=r"state '.*mean' is written 3 times in place of 2, last at .*:\d+"):
        assert_same_step(step, twice, X, tolerance=10.0)


def test_of_several_writes_the_last_has_the_line():
    count = statetx.State(jnp.zeros(()))

    def step(x, num=1):
        for _ in range(num - 1):
            count.value += x
        count.value += x

    line = step.__code__.co_firstlineno + 3
    with pytest.raises(AssertionError, match=rf"written 3 times in place of 1, last at .*:{line}\."):
        assert_same_step(step, lambda x: step(x, 3), jnp.float32(1.0))


def test_writes_that_nnx_and_brainstate_write_back_are_not_counted():
    model = nnx.Dict(w=nnx.Param(jnp.ones(3)), n=nnx.Variable(jnp.zeros(())))

    def loss(model, x):
        for _ in range(2):
            model.n[...] += 1.0
        return (model.w * x).sum()

    def step(model, x, gradient=nnx.grad):
        grads = gradient(loss)(model, x)
        model.w[...] -= 0.1 * grads.w[...]

    def by_hand(model, x):
        model.n[...] += 2.0
        model.w[...] -= 0.1 * x

    jitted = nnx.jit(step)
    assert_same_step(step, lambda model, x: jitted(model, x), model, jnp.ones(3), steps=1, tolerance=1e-6)
    assert_same_step(step, by_hand, model, jnp.ones(3), steps=1, tolerance=1e-6)

    w, n = brainstate.ParamState(jnp.ones(3)), brainstate.State(0.0)

    def turns(loop):
        def body(i):
            n.value = n.value + i

        def step(x):
            loop(body)
            w.value = w.value - 0.1 * x

        return step

    loops = lambda body: brainstate.transform.for_loop(body, X[0]), lambda body: [body(x) for x in X[0]]
    assert_same_step(*map(turns, loops), X[0, :3], steps=1, tolerance=1e-5)
    twice = lambda x: [turns(loops[1])(x), setattr(w, "value", w.value * 1.001)][0]
    with pytest.raises(AssertionError, match=r"state '.*w' is written 2 times in place of 1"):
        assert_same_step(turns(loops[0]), twice, X[0, :3], steps=1, tolerance=10.0)


def test_gradients_of_nnx_do_not_outlive_the_step():
    model = nnx.Linear(3, 3, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

    def step(model, optimizer, x):
        optimizer.update(model, nnx.grad(lambda m: (m(x) ** 2).sum())(model))

    assert_same_step(step, nnx.jit(step), model, optimizer, jnp.ones((2, 3)), steps=1)


def test_trees_of_variables_are_results():
    """Of steps that return ``nnx.State``, new parameters and moments, or a model."""
    graph, state = nnx.split(nnx.Linear(3, 2, rngs=nnx.Rngs(0)))
    tx, x = optax.adam(1e-2), jnp.ones((4, 3))

    def make(scale):
        def step(state, moments, x):
            grads = statetx.grad(lambda state: (nnx.merge(graph, state)(x) ** 2).mean())(state)
            updates, moments = tx.update(grads, moments, state)
            return jax.tree.map(lambda a: scale * a, optax.apply_updates(state, updates)), moments

        return step

    arguments = state, tx.init(state), x
    assert_same_step(make(1.0), statetx.jit(make(1.0)), *arguments, steps=1)
    for wrap in (jax.jit, statetx.jit):
        with pytest.raises(AssertionError, match=r"(?s)output\[0\]\['bias'\]\.value.*differs: mul "):
            assert_same_step(make(1.0), wrap(make(1.01)), *arguments, steps=1)
    make_model = lambda scale: lambda: nnx.Dict(w=nnx.Param(scale * jnp.ones(3)))
    with pytest.raises(AssertionError, match=r"output\['w'\]\.value|output\.w\.value"):
        assert_same_step(make_model(1.0), make_model(2.0), steps=1)


def test_steps_without_results_are_not_the_same():
    with pytest.raises(statetx.FunctionError, match="returns no array and touches no state: there is nothing"):
        assert_same_step(lambda x: None, lambda x: None, jnp.ones(3))


def test_two_models_begin_with_the_values_of_the_reference():
    a, b = Network(1), Network(1)
    b.layers[0].value = b.layers[0].value * 2
    before = b.layers[0].value
    of = lambda model: lambda x: model.step(x)
    assert_same_step(of(a), of(b), X, steps=1)
    assert b.layers[0].value is before


def test_models_of_which_one_is_behind_another_function_are_compared():
    def behind(model, scale=1):
        within = statetx.remat(lambda x: model.step(scale * x))
        return lambda x: within(x)

    of = lambda model: lambda x: model.step(x)
    report = assert_same_step(of(Network(1)), behind(Network(1)), X, steps=1)
    assert report.num_results > 1
    with pytest.raises(AssertionError, match=r"(?s)is not the same step.*state 'model\.layers"):
        assert_same_step(of(Network(1)), behind(Network(1), scale=2), X, steps=1)


def test_step_that_is_not_deterministic_is_told_with_the_line():
    n = statetx.State(jnp.zeros(3))
    draw = lambda: np.random.default_rng().normal(size=3).astype(np.float32)

    def step():
        noise = jax.pure_callback(draw, jax.ShapeDtypeStruct((3,), jnp.float32))
        n.value = n.value + noise

    here = step.__code__.co_firstlineno + 1
    with pytest.raises(AssertionError, match=rf"step is not deterministic.*\n?.*test_same_step.py:{here} in"):
        assert_same_step(step, step)

    def traced():
        n.value = n.value * 2 + jnp.asarray(np.random.normal(size=3), jnp.float32)

    with pytest.raises(AssertionError, match=rf"traced is not deterministic.*:{traced.__code__.co_firstlineno + 1} in"):
        assert_same_step(traced, lambda: traced())


def test_bad_input_and_errors_leave_the_states(monkeypatch):
    n = statetx.State(jnp.zeros(3))
    before = n.value

    def step(x):
        n.value = n.value + x

    with pytest.raises(
        statetx.FunctionError, match=r"step\(x\) does not take the arguments: missing a required argument"
    ):
        assert_same_step(step, step)
    with pytest.raises(statetx.FunctionError, match="step cannot run here: an argument is ShapeDtypeStruct"):
        assert_same_step(step, step, jax.ShapeDtypeStruct((3,), jnp.float32))
    made = []
    with pytest.raises(statetx.FunctionError, match=r"a list, a dict or a global variable holds[^\0]*reset its value"):
        assert_same_step(step, lambda x: made.append(statetx.State(x)), X[0, :3])

    def broken(x):
        def fail(x):
            raise ZeroDivisionError("on the host")

        step(x)
        return jax.pure_callback(fail, x, x)

    with pytest.raises(Exception, match="on the host"):
        assert_same_step(step, broken, X[0, :3])
    assert n.value is before


@pytest.mark.slow
def test_time_and_memory_of_a_comparison():
    network = Network(8)
    start = time.process_time()
    assert_same_step(network.step, lambda x: network.step(x, statetx.remat), X)
    assert time.process_time() - start < 10


def example(name, monkeypatch, **sizes):
    """An example as a module, and its options at these sizes."""
    folder = pathlib.Path(__file__).parents[1] / "examples"
    monkeypatch.syspath_prepend(str(folder))
    spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    options = module.make_options()
    options.set_defaults(**sizes)
    return module, options.parse_args([])


@pytest.mark.slow
@jax.numpy_rank_promotion("allow")
def test_steps_of_the_examples_are_the_same(monkeypatch):
    draw, labels = np.random.default_rng(0), np.arange(32, dtype=np.int32) % 10
    images = draw.random((32, 8, 8), np.float32)
    refs, options = example("refs", monkeypatch, codes=16, hidden=32, lr=0.01)
    plain, step = (refs.make_step(kind(options), options) for kind in (refs.PlainAutoencoder, refs.Autoencoder))
    assert_same_step(plain, step, images, steps=2)

    normalized, options = example("batchnorm_classifier", monkeypatch, blocks=2, channels=8)
    plain, step = (normalized.build(options, kind)[1] for kind in (normalized.PlainBlock, normalized.Block))
    with brainstate.environ.context(fit=True):
        report = assert_same_step(plain, step, images[..., None], labels, steps=2)
    assert report.error < 1e-5


def test_states_that_each_call_creates_are_results():
    """As brainstate's steps with ``init_all_states`` do."""
    model = types.SimpleNamespace(w=statetx.Param(jnp.arange(3.0)), h=statetx.State(jnp.ones(3)))
    before = model.h

    def step(x, factor=1.0):
        model.h = statetx.State(jnp.zeros_like(x))
        loss = lambda: jnp.sum((model.h.value + model.w.value * x) ** 2)
        model.w.value -= 0.1 * statetx.grad(loss, wrt="model.w")()["model.w"]
        model.h.value += factor * x
        return model.w.value.sum()

    assert_same_step(step, lambda x: step(x), X[0, :3])
    with pytest.raises(AssertionError, match=r"state 'model.h'\[1\]: [^\0]*mul f"):
        assert_same_step(step, lambda x: step(x, factor=1.01), X[0, :3])
    assert model.h is before and before.value.tolist() == [1.0] * 3


@pytest.mark.parametrize("checkpoint", [statetx.policies.Slots(2), statetx.policies.Levels(2)], ids=repr)
def test_calls_to_the_host_in_a_checkpointed_loop(checkpoint):
    """How often the loop's equations make them is not known."""

    def step(calls, checkpoint=None):
        def body(c, x):
            for _ in range(calls):
                jax.debug.callback(lambda c: None, c)
            return jnp.sin(c * x), None

        return jax.grad(lambda c: statetx.scan(body, c, X[0, :4], checkpoint=checkpoint)[0])

    assert_same_step(step(1), step(1, checkpoint), 0.5, steps=1)
    with pytest.raises(AssertionError, match=r"debug_callback of \S*<lambda>: only one of them calls it"):
        assert_same_step(step(0), step(1, checkpoint), 0.5, steps=1)


def test_a_state_that_one_of_them_creates_is_a_difference():
    model = types.SimpleNamespace()

    def creates(x):
        model.h = statetx.State(2 * x)
        return x.sum()

    assert_same_step(creates, lambda x: creates(x), X[0])
    for steps in [(creates, lambda x: x.sum()), (lambda x: x.sum(), creates)]:
        with pytest.raises(AssertionError, match=r"step 1 [^\0]*state 'model.h': only one of them has it"):
            assert_same_step(*steps, X[0])
    assert not vars(model)


@pytest.mark.parametrize("jit", [lambda f: f, brainstate.transform.jit], ids=["plain", "jit"])
def test_states_that_brainstate_leaves_without_a_value_are_no_results(jit):
    """Of those that a loss creates, statetx keeps the values, and brainstate's `grad` and `jit` do not."""
    w, model = brainstate.ParamState(jnp.arange(3.0)), types.SimpleNamespace()

    def loss(x):
        model.h = brainstate.HiddenState(jnp.sin(w.value * x))
        return jnp.sum(model.h.value)

    @jit
    def reference(x):
        w.value -= 0.1 * brainstate.transform.grad(loss, {"w": w})(x)["w"]

    def step(x, rate=0.1):
        w.value -= rate * statetx.grad(loss, wrt={"w": w})(x)["w"]

    assert_same_step(reference, step, X[0, :3])
    assert_same_step(reference, reference, X[0, :3])
    with pytest.raises(AssertionError, match="state 'loss.w'"):
        assert_same_step(reference, lambda x: step(x, 0.2), X[0, :3])
    with pytest.raises(AssertionError, match="state 'loss.model.h': only one of them has it"):
        assert_same_step(step, reference, X[0, :3])
    assert not vars(model)


def test_states_that_a_program_kept_by_brainstate_does_not_create_again_are_no_results():
    model = types.SimpleNamespace()

    def step(x):
        model.h = brainstate.HiddenState(jnp.sin(x))
        return jnp.sum(model.h.value)

    reference = brainstate.transform.jit(step)
    for _ in range(2):
        assert_same_step(reference, step, X[0])
    with pytest.raises(AssertionError, match="output"):
        assert_same_step(reference, lambda x: step(2 * x), X[0])


def test_the_report_says_why_float64_is_not_possible():
    def step(total):
        add = lambda c, x: (c + total(x), None)
        return lambda xs: jax.lax.scan(add, jnp.zeros((), jnp.float32), xs)[0]

    xs = jax.random.normal(jax.random.key(0), (3, 1000))
    by_columns = step(lambda x: (x * x)[::-1].reshape(10, 100).sum(0).sum())
    report = assert_same_step(step(lambda x: (x * x).sum()), by_columns, xs, steps=1)
    assert report.rounding is not None and report.double_error is None
    assert "both in float64: not possible (scan body function carry input and carry output" in str(report)


def test_a_library_may_say_in_any_way_that_float64_is_not_possible():
    class ModuleError(Exception):
        pass

    def total(values):
        if values.dtype != jnp.float32:
            raise ModuleError("the module failed") from ValueError("its types are of 32 bits")
        return values.sum()

    xs = jax.random.normal(jax.random.key(0), (1000,))
    report = assert_same_step(lambda xs: total(xs * xs), lambda xs: total((xs * xs)[::-1]), xs, steps=1)
    assert "both in float64: not possible (its types are of 32 bits)" in str(report)


@pytest.mark.parametrize("compile_", [lambda f: f, statetx.jit], ids=["plain", "jit"])
def test_a_comparison_holds_one_run_at_a_time(compile_, monkeypatch):
    """In sets of states: the user's, those that the step begins with, and the reference's results. To measure rounding
    in float64, where a set counts twice: inputs, results, and those of one run.
    """
    w = statetx.State(jnp.linspace(-0.3, 0.1, 2**16).reshape(256, 256) ** 3)
    others, in_memory = {id(x) for x in jax.live_arrays() if x is not w.value}, []

    def measured(actual, expected, differences=same.differences):
        gc.collect()
        arrays = {x.unsafe_buffer_pointer(): x.nbytes for x in jax.live_arrays() if id(x) not in others}
        in_memory.append(sum(n for n in arrays.values() if n >= w.value.nbytes) / w.value.nbytes)
        return differences(actual, expected)

    def step(x):
        w.value = jnp.tanh(w.value @ w.value) * x / 3

    def other(x):
        w.value = jnp.tanh(w.value @ w.value) * (x / 3)

    monkeypatch.setattr(same, "differences", measured)
    report = assert_same_step(compile_(step), compile_(other), jnp.float32(0.7), steps=2)
    assert report.rounding and report.double_error is not None
    assert max(in_memory) <= 9 and in_memory[0] <= 3


def test_another_number_of_writes_of_a_variable_is_named_at_any_tolerance():
    variable = nnx.Variable(X)

    def step(num):
        for _ in range(num):
            variable[...] *= 1.5

    with pytest.raises(AssertionError, match=r"written 2 times in place of 1"):
        assert_same_step(lambda: step(1), lambda: step(2), tolerance=10.0)


def test_values_of_long_loops_are_looked_up_not_compared_with_all():
    def recorded(factor):
        def step(c, t):
            for n in range(1, 6):
                c = jnp.cos(c) + n * jnp.where(t < 150, t, factor * t)
            return c, None

        closed = jax.make_jaxpr(lambda x: jax.lax.scan(step, x, jnp.arange(200.0))[0])(jnp.float32(0.1))
        return Recording(Body.close(closed.jaxpr, closed.consts), [jnp.float32(0.1)])

    sides = recorded(1.0), recorded(1.5)
    tracemalloc.start()
    found = [a.first_missing(b, a.outputs, 1e-6) for a, b in (sides, sides[::-1])]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert None not in found
    assert peak < 2e6  # all values of the 200 turns beside each other: 100 MB


@pytest.mark.parametrize("jit", [jax.jit, statetx.jit, nnx.jit, brainstate.transform.jit])
def test_a_python_number_is_what_it_is_under_jit(jit):
    """An array, unless it is static: a power of Python fails at 0, and a traced size would."""

    def step(x, size, count):
        assert isinstance(size, int) and not isinstance(count, int)
        loss, grad = jax.value_and_grad(lambda x: jnp.tile(x, size).sum() * count**-0.5)(x)
        return x - grad, loss, count + 1

    step = jit(step, static_argnums=(1,))
    args = jnp.ones(2), 3, 0
    assert_same_step(step, step, *args, steps=1)
    assert_same_step(plain(step), step, *args, steps=1)
    with pytest.raises(AssertionError, match="first value that differs: add"):
        assert_same_step(step, jit(lambda *a: (step(*a)[0] + 1, *step(*a)[1:]), static_argnums=(1,)), jnp.ones(2), 3, 1)
    statetx.saved_residuals(step, *args)
    statetx.memory_report(step, *args)


def test_writes_that_jax_jit_loses_are_not_in_its_results():
    """JAX takes a Variable in an argument apart; its own jit stores no value in it."""
    graphdef, state = nnx.split(nnx.BatchStat(jnp.array(0)))

    def step(state, x):
        count = nnx.merge(graphdef, state)
        count[...] += 1
        return 2 * x

    call = state, jnp.ones(2)
    assert_same_step(jax.jit(step), jax.jit(step), *call)
    with pytest.raises(AssertionError, match="1 in place of 0"):
        assert_same_step(jax.jit(step), statetx.jit(step), *call)


def test_a_step_that_creates_no_state_is_walked_once_a_run(monkeypatch):
    """A walk over what a method of keras reaches takes seconds."""
    walks = []
    beyond = Walk.beyond
    monkeypatch.setattr(Walk, "beyond", lambda walk: walks.append(walk) or beyond(walk))
    assert_same_step(jnp.sin, jnp.sin, jnp.ones(2), steps=2)
    assert len(walks) == 2 + 2 * 2
