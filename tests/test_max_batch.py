"""`max_batch`, and ``microbatch(fun, "fit", budget=...)``: the largest that fits, by few compilations."""

import contextlib
import gc
import pathlib
import sys
import types
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import statetx
from statetx.planner import batches

sys.path.append(str(pathlib.Path(__file__).parents[1] / "benchmarks"))
import programs  # noqa: E402

PROGRAM = programs.transformer(layers=1, width=32, heads=4, time=32, batch=4)
PARAMS, (X,) = PROGRAM.params, PROGRAM.data
MIB = 2**20


def sgd(params, x):
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(PROGRAM.loss)(params, x))


def bytes_with(step, size, **options):
    x = jax.ShapeDtypeStruct((size, *X.shape[1:]), X.dtype)
    if hasattr(step, "lower"):
        memory = step.lower(PARAMS, x).compile().memory_analysis()
        arguments = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
        return arguments + memory.temp_size_in_bytes
    return statetx.measure(step, PARAMS, x, gradient=False, **options).peak_bytes


# -- max_batch -------------------------------------------------------------------------------------------------------


def test_progress(monkeypatch, capsys):
    options = {"argnums": 0, "budget": "1MiB"}
    fit = statetx.max_batch(lambda x: jnp.tanh(x), jnp.ones((64, 16)), progress=True, **options)
    assert capsys.readouterr().out.strip() == ""  # not a terminal
    seen = []
    monkeypatch.setattr(batches, "spinner", lambda what, is_shown: contextlib.nullcontext(seen.append))
    statetx.max_batch(lambda x: jnp.tanh(x), jnp.ones((64, 16)), progress=True, **options)
    assert sorted(seen) == sorted(f"compiling the step for {size} examples" for size, _ in fit.tried)


@pytest.mark.sample("slow")
@pytest.mark.parametrize("donate", [False, True])
def test_the_largest_batch_that_fits(donate):
    step = jax.jit(sgd, donate_argnums=0) if donate else sgd
    fit = statetx.max_batch(step, PARAMS, X, argnums=1, budget=5 * MIB)
    assert bytes_with(step, fit.size) == fit.total_bytes <= 5 * MIB < fit.next_bytes == bytes_with(step, fit.size + 1)
    assert len(fit.tried) <= 6
    assert jnp.zeros((fit, 2)).shape == (fit.size, 2) and int(fit) == len(range(fit)) == fit.size


@pytest.mark.sample
@pytest.mark.parametrize("options", [{}, {"donate_argnames": "model"}, {"static_argnames": "times"}, {"graph": False}])
def test_a_step_that_flax_has_jitted(options):
    nnx = pytest.importorskip("flax.nnx")

    def step(model, x, times=2):
        loss, grad = nnx.value_and_grad(lambda model: times * jnp.mean(jnp.tanh(model(x)) ** 2))(model)
        for name in ("kernel", "bias"):
            getattr(model, name)[...] -= 0.1 * getattr(grad, name)[...]
        return loss

    model, x = nnx.Linear(64, 64, rngs=nnx.Rngs(0)), jnp.ones((4, 64))
    kernel = model.kernel[...]
    fit = statetx.max_batch(nnx.jit(step, **options), model, x, argnums=1, budget="256KiB")
    lowered = nnx.jit(step, **options).lower(model, jax.ShapeDtypeStruct((fit.size, 64), x.dtype))
    memory = lowered.compile().memory_analysis()
    arguments = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    assert fit.total_bytes == arguments + memory.temp_size_in_bytes <= 2**18 < fit.next_bytes
    assert model.kernel[...] is kernel


def test_a_stateful_step_by_types_only():
    w = statetx.Param(jnp.eye(64))
    seen = statetx.State(0)

    @statetx.jit(donate_states=True)
    def step(x):
        seen.value += x.shape[0]
        w.value -= 0.1 * statetx.grad(lambda x: jnp.tanh(jnp.tanh(x @ w.value) @ w.value).sum(), wrt=w)(x)

    fit = statetx.max_batch(step, jax.ShapeDtypeStruct((8, 64), jnp.float32), budget=MIB, multiple=16)
    assert fit.size % 16 == 0 and fit.total_bytes <= MIB < fit.next_bytes
    assert seen.value == 0 and (w.value == jnp.eye(64)).all()


@pytest.mark.slow
def test_a_loss_with_its_gradient():
    fit = statetx.max_batch(PROGRAM.loss, PARAMS, X, argnums=1, budget=5 * MIB, gradient=True)
    forward = statetx.max_batch(PROGRAM.loss, PARAMS, X, argnums=1, budget=5 * MIB)
    assert fit.size < forward.size


@pytest.mark.parametrize("donate", [False, True])
def test_states_with_a_value_for_each_example(donate):
    """They grow with the batch. Their bytes are counted by hand: for each example the input, the state, and the new
    state.
    """
    h, w = statetx.State(jnp.zeros((4, 64))), statetx.Param(jnp.ones((1, 64)))

    @statetx.jit(donate_states=donate)
    def step(x):
        h.value = h.value * w.value + x

    x = jax.ShapeDtypeStruct((4, 64), jnp.float32)
    fit = statetx.max_batch(step, x, budget=MIB, states={"h": 0, statetx.Param: statetx.Broadcast})
    example, weights = 64 * 4, w.value.nbytes
    assert fit.size == (MIB - weights) // ((2 if donate else 3) * example)
    assert h.value.shape == (4, 64)


@pytest.mark.parametrize("x", [jax.ShapeDtypeStruct((64, 64), jnp.float32), jnp.eye(64)], ids=["type", "array"])
def test_one_object_may_be_both_weights_and_batch(x):
    h = statetx.State(jnp.zeros((64, 64)))
    loss = lambda w, x: jnp.tanh(jnp.tanh(x @ w) @ w).mean()

    def step(w, x):
        h.value = jnp.tanh(x @ w + h.value)
        return h.value.sum()

    size = lambda w: statetx.max_batch(step, w, x, argnums=1, budget="1MiB", states={"h": 0}).size
    assert size(x) == size(jnp.ones((64, 64))) > 1000
    fit = lambda w: statetx.microbatch(loss, "fit", budget="120KiB", argnums=1).fit(w, x).total_bytes
    assert fit(x) == fit(jnp.ones((64, 64))) > 2 * 64 * 64 * 4


def test_states_that_do_not_have_an_axis_of_examples():
    h = statetx.State(jnp.zeros((3, 8)))
    loss = lambda x: (h.value.sum() + x).sum()
    x = jnp.ones((4, 8))
    with pytest.raises(
        statetx.StateValueError, match=r"max_batch: .*'h'.* has its examples along axis 0 .* the batch has 4"
    ):
        statetx.max_batch(loss, x, budget=MIB, states={"h": 0})
    with pytest.raises(statetx.StateFilterError, match="'g': ...}: the path 'g' selects no state"):
        statetx.max_batch(loss, x, budget=MIB, states={"g": 0})


@pytest.mark.thorough
def test_budget_of_the_device(monkeypatch):
    monkeypatch.setenv("STATETX_DEVICE_MEMORY", "3MiB")
    device = statetx.max_batch(sgd, PARAMS, X, argnums=1, budget="device")
    assert device.budget_bytes == 3 * MIB and device.total_bytes <= 3 * MIB


def test_limit():
    fit = statetx.max_batch(sgd, PARAMS, X, argnums=1, budget="1GiB", limit=16)
    assert fit.size == 16 and fit.next_bytes is None


def test_fits_print_what_was_compiled():
    loss, x = lambda w, x: jnp.tanh(jnp.tanh(x @ w) @ w).mean(), jnp.ones((16, 8))
    found = statetx.max_batch(loss, jnp.eye(8), x, argnums=1, budget="4KiB")
    fit = statetx.microbatch(loss, "fit", budget="4KiB", argnums=1).fit(jnp.eye(8), x)
    for result, first in ((found, f" {found.size} examples fit, with "), (fit, f" 1 part of {fit.size} examples")):
        text = str(result)
        assert first in text and ("Each example: about" in text) == (result is found)
        rows = [line for line in text.splitlines() if line.endswith(("yes", "no"))]
        assert [int(row.split()[0]) for row in rows] == [size for size, _ in result.tried]
        assert "<table" in result._repr_html_() and '<span class="share">' in result._repr_html_()


def test_of_a_loss_the_gradient_is_counted():
    loss, x = lambda w, x: jnp.tanh(jnp.tanh(x @ w) @ w).mean(), jnp.ones((16, 8))
    num = lambda fun: statetx.microbatch(fun, "fit", budget="2KiB", argnums=1).fit(jnp.eye(8), x).num
    assert num(loss) > num(lambda w, x: (loss(w, x), loss(w, x))) == 1


def grows_slowly(w, x):
    return (x @ w).sum()


def large_sum(w, x):
    return (x @ w).sum()


@pytest.mark.parametrize(
    "call",
    [
        lambda w, x: statetx.max_batch(large_sum, w, x, argnums=1, budget="10KiB"),
        lambda w, x: statetx.max_batch(jax.jit(large_sum), w, x, argnums=1, budget="10KiB"),
        lambda w, x: statetx.microbatch(large_sum, budget="10KiB", argnums=1).fit(w, x),
    ],
    ids=["max_batch", "jitted", "microbatch"],
)
def test_arguments_above_the_budget_are_refused_without_a_compilation(call, monkeypatch):
    monkeypatch.setattr("statetx._equations.compiled.compile_to_measure", None)
    w, x = jnp.ones((64, 64)), jnp.ones((8, 64))
    with pytest.raises(
        statetx.PlanError, match=r"\(large_sum\): the budget of 10.0 KiB cannot be kept: arguments and states"
    ) as e:
        call(w, x)
    assert w.nbytes <= e.value.smallest_bytes <= w.nbytes + x.nbytes


def test_argument_that_is_not_read_does_not_count():
    """JAX does not pass it on."""
    first = lambda w, x: x.sum()
    assert statetx.max_batch(first, jnp.ones((64, 64)), jnp.ones((8, 64)), argnums=1, budget="10KiB").size > 8


def test_errors_of_max_batch():
    with pytest.raises(statetx.PlanError, match="no batch fits: 1 example need") as e:
        statetx.max_batch(sgd, PARAMS, X, argnums=1, budget="60KiB")
    assert e.value.smallest_bytes == bytes_with(sgd, 1)
    with pytest.raises(statetx.PlanError, match="does not grow with the batch"):
        statetx.max_batch(
            lambda w, x: w.sum(), jnp.ones(3), jax.ShapeDtypeStruct((4,), jnp.float32), argnums=1, budget="1024GiB"
        )
    with pytest.raises(
        statetx.PlanError,
        match=r"grows_slowly\): 16777216 examples fit, with 320.0 MiB of 10.0 GiB; (.|\n)*give limit=",
    ):
        statetx.max_batch(grows_slowly, jnp.ones(4), jnp.ones((8, 4)), argnums=1, budget="10GiB")
    with pytest.raises(statetx.PlanError, match="is a fraction"):
        statetx.max_batch(sgd, PARAMS, X, argnums=1, budget=0.5)
    with pytest.raises(ValueError, match=r"(?s)max_batch\(sgd\): the arrays differ in length.*argnums=1"):
        statetx.max_batch(sgd, PARAMS, X, budget="1MiB")


# -- microbatch for a budget -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def program():
    return programs.transformer(layers=1, width=32, heads=4, time=32, batch=16)


def bytes_in_parts(program, num):
    f = statetx.microbatch(jax.value_and_grad(program.loss), num, argnums=1)
    return statetx.measure(f, program.params, *program.data, gradient=False).peak_bytes


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gradients", "loss"])
def test_fit_takes_the_fewest_parts(program, kind):
    budget = bytes_in_parts(program, 4) + 2**14
    fun = jax.value_and_grad(program.loss) if kind == "gradients" else program.loss
    f = statetx.microbatch(fun, "fit", budget=budget, argnums=1)
    fit = f.fit(program.params, *program.data)
    assert fit.num == 4 and fit.size == 4 and fit.total_bytes <= budget
    assert dict(fit.tried)[2] > budget if 2 in dict(fit.tried) else bytes_in_parts(program, 2) > budget
    assert len(fit.tried) <= 4 and "4 parts of 4 examples" in str(fit)
    run = f if kind == "gradients" else jax.value_and_grad(f)
    value, grads = jax.jit(run)(program.params, *program.data)
    expected = jax.value_and_grad(program.loss)(program.params, *program.data)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-6), (value, grads), expected)


@pytest.mark.thorough
def test_fit_where_nothing_fits(program):
    budget = 1024 + sum(x.nbytes for x in jax.tree.leaves((program.params, program.data)))
    with pytest.raises(statetx.PlanError, match="parts of one example need") as e:
        statetx.microbatch(program.loss, budget=budget, argnums=1)(program.params, *program.data)
    assert e.value.smallest_bytes > budget


@pytest.fixture
def choices(monkeypatch):
    """The arguments of each choice. It is one part, and nothing is compiled."""
    asked = []

    def fit(micro, *args):
        asked.append(args)
        return types.SimpleNamespace(num=1)

    monkeypatch.setattr("statetx.planner.batches.parts", fit)
    return asked


def test_a_choice_is_for_flags_structures_and_states(choices):
    class Model:
        def __init__(self, width):
            self.w, self.act = statetx.Param(jnp.ones((4, width))), statetx.State({"act": "sin", "scale": 1.0})

    def loss(x, model, mode, options):
        act = jnp.sin if model.act.value["act"] == "sin" else jnp.cos
        return act(x @ model.w.value).mean() * (2.0 if mode == "double" else 1.0)

    f = statetx.microbatch(loss, budget="1MiB", argnums=0)
    x, model = jnp.ones((8, 4)), Model(3)

    def num_choices(*args):
        f(*args)
        f(*args)
        num, choices[:] = len(choices), []
        return num

    assert num_choices(x, model, "single", {"a": 1.0}) == 1
    assert num_choices(2 * x, model, "single", {"a": 2.0}) == 0
    assert num_choices(x, model, "double", {"a": 1.0}) == 1
    assert num_choices(x, model, "double", {"b": 1.0}) == 1
    model.w.value = jnp.ones((4, 5))
    assert num_choices(x, model, "double", {"b": 1.0}) == 1
    model.act.value = {"act": "cos", "scale": 1.0}
    assert num_choices(x, model, "double", {"b": 1.0}) == 1
    model.act.value = {"act": "sin", "scale": 1.0}
    assert num_choices(x, model, "double", {"b": 1.0}) == 0
    collected = weakref.ref(model)
    del model
    gc.collect()
    assert collected() is None


def test_a_choice_for_flags_keeps_the_budget():

    def loss(w, x, mode):
        h = jnp.tanh(x @ w)
        if mode == "wide":
            h = jnp.sort(jnp.sin(h[:, None] * jnp.arange(1.0, 33)[None, :, None]), 1).sum(1)
        return (h**2).mean()

    f = statetx.microbatch(jax.value_and_grad(loss), budget="96KiB", argnums=1)
    w, x = jnp.eye(16), jnp.ones((64, 16))
    assert f.fit(w, x, "narrow").num == 1 < f.fit(w, x, "wide").num
    assert f.fit(w, x, "wide").total_bytes <= 96 * 2**10


@pytest.mark.slow
def test_fit_of_a_loss_with_aux_counts_the_gradient_of_its_states():
    w, x = statetx.Param(jnp.eye(16)), jnp.ones((64, 16))

    def loss(x):
        h = jnp.sin(jnp.tanh(x @ w.value))
        h = jnp.sin(h) * jnp.cos(h)
        return (h**2).mean(), h.mean()

    budget = 12 * 2**10
    f = statetx.microbatch(loss, budget=budget)
    step = statetx.jit(statetx.value_and_grad(f, wrt=w, has_aux=True))
    memory = step.lower(x).compile().memory_analysis()
    assert memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes <= budget
    num = statetx.value_and_grad(lambda x: (f(x)[0], f.fit(x).num), wrt=w, has_aux=True)(x)[0][1]
    assert f.fit(x).num < num  # without a gradient
