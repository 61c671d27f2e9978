"""Layers, optimizers and trainers of the brainstate family under statetx's transforms, beside brainstate's own."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import statetx
from helpers import compilations

for library in ("braintools", "brainpy", "braincell", "braintrace"):
    pytest.importorskip(library)

import brainstate  # noqa: E402
import braintools  # noqa: E402
import braintrace  # noqa: E402
import created_programs  # noqa: E402

from brain_programs import OURS, PROGRAMS, THEIRS, start, values  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore:ETP primitive"),  # weights that an online algorithm leaves to others
    pytest.mark.filterwarnings("ignore:brainevent:DeprecationWarning"),  # names that brainstate uses of it
    pytest.mark.filterwarnings("ignore:core.Jaxpr is missing a DebugInfo"),  # braintrace's, on jax 0.12
]


@pytest.fixture(autouse=True)
def _settings_as_the_family_needs_them():
    with jax.numpy_rank_promotion("allow"):
        yield


def run(name, transforms):
    """Outputs of four steps, the states after them, and how many programs XLA compiled in each step."""
    program = start(name, transforms)
    outputs, compiled = [], []
    for _ in range(4):
        with compilations() as events:
            outputs.append(jax.block_until_ready(program.step()))
        compiled.append(len(events))
    return (outputs, values(*program.roots)), compiled


@functools.cache
def expected(name):
    """The results of brainstate's transforms: finite numbers, some of them changing from step to step."""
    (outputs, states), _ = run(name, THEIRS)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(outputs))
    assert any((np.asarray(a) != np.asarray(b)).any() for a, b in zip(*map(jax.tree.leaves, outputs[-2:]), strict=True))
    return outputs, states


def assert_equal_numbers(ours, theirs):
    ours, theirs = jax.tree.leaves_with_path(ours), jax.tree.leaves_with_path(theirs)
    assert len(ours) == len(theirs)
    for (path, a), (_, b) in zip(ours, theirs, strict=True):  # paths hold ids, which differ
        if jnp.issubdtype(jnp.result_type(b), jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6, err_msg=jax.tree_util.keystr(path))


# One of each family; the others are built alike and take longer.
FAST = "delayed_network trained_online".split()


@pytest.mark.sample("slow")
@pytest.mark.parametrize("name", [p if p in FAST else pytest.param(p, marks=pytest.mark.slow) for p in PROGRAMS])
def test_results_equal_brainstates_transforms_with_one_trace(name):
    result, compiled = run(name, OURS)
    assert_equal_numbers(result, expected(name))
    assert compiled[-1] == 0  # the second step may know the states by their final types


# The transforms may be exchanged one by one: either library's transform works inside the other's.
MIXED = {
    "jit": OURS._replace(jit=THEIRS.jit),
    "value_and_grad": OURS._replace(value_and_grad=THEIRS.value_and_grad),
    "for_loop": OURS._replace(for_loop=THEIRS.for_loop),
    "jit and for_loop": THEIRS._replace(value_and_grad=OURS.value_and_grad),
}


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name",
    [
        "recurrent_classifier",
        pytest.param("spiking_classifier_remat", marks=pytest.mark.slow),
        pytest.param("trained_through_time", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("theirs", MIXED)
def test_results_equal_with_some_transforms_exchanged(name, theirs):
    result, _ = run(name, MIXED[theirs])
    assert_equal_numbers(result, expected(name))


# -- states and learners made in the step ----------------------------------------------------------------------


def run_created(name, jit):
    """Outputs and states after each of four calls, and the number of times that Python ran."""
    runs, seen = [], []

    def counting(fun):
        def counted(*args):
            runs.append(1)
            return fun(*args)

        return jit(counted)

    program = created_programs.start(name, OURS._replace(jit=counting))
    for _ in range(4):
        seen.append((program.step(), values(*program.roots)))
    return seen, len(runs)


@pytest.mark.parametrize(
    "name",
    [p if p in ("nn.Map", "optimizer") else pytest.param(p, marks=pytest.mark.slow) for p in created_programs.PROGRAMS],
)
def test_step_that_creates_states_equals_plain_python_with_two_stagings(name):
    result, num_runs = run_created(name, statetx.jit)
    plain, _ = run_created(name, lambda fun: fun)
    assert_equal_numbers(result, plain)
    assert num_runs <= 2
    last, before = (jax.tree.leaves(states) for _, states in plain[:1:-1])
    assert any((np.asarray(a) != np.asarray(b)).any() for a, b in zip(last, before, strict=True) if is_number(a))


def is_number(x):
    return not jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key)


# -- braintools ------------------------------------------------------------------------------------------------

OPTIMIZERS = {
    name: dict(lr=1e-2)
    for name in (
        *("SGD", "Momentum", "MomentumNesterov", "Adam", "AdamW", "Adamax", "Nadam", "RAdam", "AdaBelief", "Yogi"),
        *("Adagrad", "Adadelta", "RMSprop", "Rprop", "Lion", "Lamb", "Lars", "Novograd", "Fromage", "SM3", "Adafactor"),
    )
}
OPTIMIZERS["Adam"] |= dict(weight_decay=1e-2, grad_clip_norm=1.0)
OPTIMIZERS["SGD"] |= dict(grad_clip_value=0.5)


def train_with_every_optimizer(t, in_a_loop):
    weights = {name: brainstate.ParamState(jnp.linspace(-1.0, 2.0, 6).reshape(2, 3)) for name in OPTIMIZERS}
    optimizers = {name: getattr(braintools.optim, name)(**options) for name, options in OPTIMIZERS.items()}
    for name, optimizer in optimizers.items():
        optimizer.register_trainable_weights({"w": weights[name]})

    def step(x):
        for name, optimizer in optimizers.items():
            w = weights[name]
            _, grads = t.value_and_grad(lambda w=w: jnp.sum((jnp.sin(w.value) - x) ** 2), {"w": w})()
            optimizer.update(grads)

    if in_a_loop:
        t.jit(lambda xs: t.for_loop(step, xs))(jnp.linspace(0.1, 0.5, 4))
    else:
        jitted = t.jit(step)
        for x in np.linspace(0.1, 0.5, 4, dtype=np.float32):
            jitted(x)
    return {name: (weights[name].value, optimizers[name].opt_state.value) for name in OPTIMIZERS}


@pytest.mark.slow
@pytest.mark.parametrize(
    "in_a_loop", [pytest.param(False, marks=pytest.mark.slow), True], ids=["in steps", "in a loop"]
)
def test_optimizers_give_equal_weights_and_moments(in_a_loop):
    ours, theirs = train_with_every_optimizer(OURS, in_a_loop), train_with_every_optimizer(THEIRS, in_a_loop)
    assert_equal_numbers(ours, theirs)
    start = jnp.linspace(-1.0, 2.0, 6).reshape(2, 3)
    assert [name for name, (w, _) in ours.items() if bool((w == start).all())] == []


def schedules():
    o = braintools.optim
    return {
        "step": o.StepLR(0.1, step_size=2),
        "multistep": o.MultiStepLR(0.1, milestones=(1, 3)),
        "exponential": o.ExponentialLR(0.1),
        "decay": o.ExponentialDecayLR(0.1, decay_steps=2),
        "cosine": o.CosineAnnealingLR(0.1, T_max=5),
        "polynomial": o.PolynomialLR(0.1),
        "warmup": o.WarmupScheduler(0.1),
        "warmup and cosine": o.WarmupCosineSchedule(0.1, warmup_steps=2, total_steps=6),
        "cyclic": o.CyclicLR(0.1, max_lr=0.5, step_size_up=2),
        "one cycle": o.OneCycleLR(0.5, total_steps=6),
        "linear": o.LinearLR(0.1),
        "constant": o.ConstantLR(0.1, total_iters=2),
    }


def rates(t):
    by_name = schedules()
    weight = brainstate.ParamState(jnp.ones(3))
    for schedule in by_name.values():
        braintools.optim.SGD(lr=schedule).register_trainable_weights({"w": weight})

    @t.jit
    def step():
        for schedule in by_name.values():
            schedule.step()
        return {name: schedule.current_lrs.value for name, schedule in by_name.items()}

    return [step() for _ in range(4)]


def test_schedules_stepped_in_a_compiled_function_give_the_same_rates():
    ours, theirs = rates(OURS), rates(THEIRS)
    assert_equal_numbers(ours, theirs)
    assert all((np.asarray(ours[0][name]) != np.asarray(ours[-1][name])).any() for name in schedules())


SURROGATES = [
    name
    for name, cls in vars(braintools.surrogate).items()
    if isinstance(cls, type)
    and issubclass(cls, braintools.surrogate.Surrogate)
    and cls is not braintools.surrogate.Surrogate
]


def surrogate_gradients(t):
    """Gradients through a loop where the spikes of every surrogate reset their own potential."""
    weights = {name: brainstate.ParamState(jnp.linspace(0.3, 0.9, 4)) for name in SURROGATES}
    potentials = {name: brainstate.HiddenState(jnp.zeros(4)) for name in SURROGATES}
    functions = {name: getattr(braintools.surrogate, name)() for name in SURROGATES}

    def step(x):
        spikes = {}
        for name, v in potentials.items():
            v.value = 0.9 * v.value + weights[name].value * x
            spikes[name] = functions[name](v.value - 1.0)
            v.value = v.value - spikes[name]
        return spikes

    def loss():
        return sum(jnp.mean(s * jnp.arange(4.0)) for s in t.for_loop(step, jnp.linspace(0.5, 1.5, 6)).values())

    return t.jit(t.value_and_grad(loss, weights))()


@pytest.mark.slow
def test_surrogate_gradients_through_a_loop_are_the_same():
    (value, grads), theirs = surrogate_gradients(OURS), surrogate_gradients(THEIRS)
    assert_equal_numbers((value, grads), theirs)
    assert [name for name, g in grads.items() if not bool((np.asarray(g) != 0).any())] == []


# -- brainstate.nn's maps, and braintrace's algorithms ---------------------------------------------------------


def mapped(t, wrapper):
    """A recurrent layer without a batch, mapped over one; the loop around it is differentiated."""
    brainstate.random.seed(0)
    cell = brainstate.nn.GRUCell(3, 4)
    xs = brainstate.random.rand(5, 2, 3)
    weights = cell.states(brainstate.ParamState)
    if wrapper == "Map":
        model = brainstate.nn.Map(cell, init_map_size=2)
        model.init_all_states()
    else:
        brainstate.nn.vmap_init_all_states(cell, axis_size=2, state_tag="mapped")
        model = brainstate.nn.Vmap(cell, vmap_states="mapped")

    @t.jit
    def train():
        return t.value_and_grad(lambda: jnp.mean(t.for_loop(model, xs) ** 2), weights)()

    return [train(), train()], values(cell)


@pytest.mark.parametrize("wrapper", ["Vmap", "Map"])
def test_mapped_modules_give_the_same_gradients_and_states(wrapper):
    assert_equal_numbers(mapped(OURS, wrapper), mapped(THEIRS, wrapper))


def online_gradients(t, algorithm, options):
    brainstate.random.seed(0)
    net = brainstate.nn.Sequential(braintrace.nn.MiniGRU(3, 6), braintrace.nn.Linear(6, 2))
    weights = net.states(brainstate.ParamState)
    xs, ys = brainstate.random.rand(6, 3), brainstate.random.rand(6, 2)
    model = braintrace.compile(net, algorithm, xs[0], **options)

    def step(x, y):
        return t.value_and_grad(lambda: braintools.metric.squared_error(model(x), y).mean(), weights)()

    return t.jit(lambda: t.for_loop(step, xs, ys))(), values(model)


@pytest.mark.parametrize(
    ("algorithm", "options"),
    [
        ("D_RTRL", {}),
        pytest.param("ES_D_RTRL", dict(decay_or_rank=0.8), marks=pytest.mark.slow),
        ("EProp", {}),
        pytest.param("OSTLRecurrent", {}, marks=pytest.mark.slow),
    ],
)
def test_online_algorithms_give_the_same_gradients_and_traces(algorithm, options):
    algorithm = getattr(braintrace, algorithm)
    ours = online_gradients(OURS, algorithm, options)
    assert_equal_numbers(ours, online_gradients(THEIRS, algorithm, options))
    assert all(bool((np.asarray(g) != 0).any()) for g in jax.tree.leaves(ours[0][1]["layers", 0, "W_x", "weight"]))
