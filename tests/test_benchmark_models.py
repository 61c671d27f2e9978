"""The models that plans are judged on, at small sizes, and the verdicts of ``benchmarks/whole_plans.py``."""

import dataclasses
import importlib
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import statetx
from helpers import benchmark
from statetx.planner import Planner

for library in ("flax", "haiku", "equinox", "optax", "brainstate", "brainpy.state", "braintools"):
    pytest.importorskip(library)

pytestmark = pytest.mark.usefixtures("promoted_ranks")


@pytest.fixture(scope="module")
def harness():
    """benchmarks/whole_plans.py."""
    with benchmark("whole_plans") as module:
        module.MODELS |= importlib.import_module("unseen_models").UNSEEN
        yield module


SMALL = {
    "Gemma (flax.nnx)": {"layers": 2, "width": 16, "vocab": 32, "time": 8, "batch": 2},
    "LoRA (flax.nnx)": {"layers": 2, "width": 16, "time": 8, "batch": 2, "rank": 2},
    "LSTM seq2seq (flax.linen)": {"width": 4, "vocab": 8, "time": 4, "batch": 2},
    "GAN (haiku)": {"channels": 4, "size": 8, "batch": 4, "latent": 4},
    "mixture of experts (equinox)": {"layers": 2, "width": 8, "tokens": 32, "capacity": 10},
    "gradient accumulation (equinox)": {"layers": 2, "width": 16, "time": 4, "batch": 2, "parts": 2},
    "spiking network (brainstate)": {"steps": 20, "hidden": 8, "batch": 4, "inputs": 16},
    "graph network": {"layers": 2, "width": 8, "nodes": 16, "edges": 48},
    "meta-learning": {"layers": 2, "width": 8, "tasks": 2, "points": 8},
    "flash attention, bfloat16": {"layers": 2, "width": 16, "time": 8, "batch": 2},
    "EI network (brainstate)": {"steps": 24, "exc": 16, "inh": 4, "batch": 4, "inputs": 8},
    "state space, S5": {"layers": 1, "width": 8, "state": 4, "time": 8, "batch": 2},
    "diffusion U-Net": {"channels": 4, "size": 8, "batch": 2, "heads": 2},
}


def run(fun, *args):
    """Compile fast, and run."""
    return jax.jit(fun).lower(*args).compile({"xla_backend_optimization_level": 0})(*args)


# The models that take longest to compile.
_SLOW = {
    "Gemma (flax.nnx)",
    "GAN (haiku)",
    "LSTM seq2seq (flax.linen)",
    "LoRA (flax.nnx)",
    "gradient accumulation (equinox)",
    "diffusion U-Net",
    "flash attention, bfloat16",
    "EI network (brainstate)",
    "state space, S5",
}


@pytest.mark.sample("slow")
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in _SLOW)) for n in SMALL])
def test_model_has_finite_gradients_with_marked_blocks_and_without(harness, name):
    make = harness.MODELS[name]
    model, marked = make(**SMALL[name]), make(statetx.remat, **SMALL[name])
    value, grads = run(jax.value_and_grad(model.loss), model.params, *model.data)
    marked_value, marked_grads = run(jax.value_and_grad(marked.loss), model.params, *model.data)
    np.testing.assert_allclose(marked_value, value, rtol=1e-3)  # bfloat16
    jaxpr = str(jax.make_jaxpr(marked.loss)(model.params, *model.data))
    assert "checkpoint" in jaxpr or "remat" in jaxpr, "no block is marked"
    norms = jax.tree.map(jnp.linalg.norm, grads)
    assert all(np.isfinite(n) for n in jax.tree.leaves(norms))
    assert sum(n > 0 for n in jax.tree.leaves(norms)) > len(jax.tree.leaves(norms)) // 2
    tolerance = 2e-2 if "bfloat16" in name else 1e-3
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(marked_grads), strict=True):
        np.testing.assert_allclose(b, a, rtol=tolerance, atol=tolerance * float(jnp.abs(a).max()))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=[pytest.mark.slow] * (n in _SLOW))
        for n in ("graph network", "GAN (haiku)", "gradient accumulation (equinox)")
    ],
)
def test_step_of_a_model_changes_its_parameters(harness, name):
    model = harness.MODELS[name](**SMALL[name])
    params, opt_state, value = run(model.step, *model.step_args)
    assert np.isfinite(value)
    assert jax.tree.structure((params, opt_state)) == jax.tree.structure(model.step_args[:2])
    assert any((a != b).any() for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(model.params), strict=True))


@pytest.mark.thorough
def test_step_with_states_returns_another_loss_each_time(harness):
    name = "spiking network (brainstate)"
    model = harness.MODELS[name](**SMALL[name])
    step = model.jit(model.step)
    values = [float(step(*model.step_args)) for _ in range(3)]
    assert len(set(values)) == 3 and np.isfinite(values).all()


@pytest.mark.slow
def test_gradient_of_the_sum_of_a_gan_is_that_of_its_two_losses(harness):
    """The loss that is planned is a sum; the step takes two gradients. Their optimizers begin in the same way."""
    model = harness.MODELS["GAN (haiku)"](**SMALL["GAN (haiku)"])
    new, *_ = run(model.step, *model.step_args)
    grads = run(jax.grad(model.loss), model.params, *model.data)
    for a, b, g in zip(*(jax.tree.leaves(t["d"]) for t in (new, model.params, grads)), strict=True):
        np.testing.assert_array_equal(jnp.sign(b - a), jnp.sign(g))  # Adam's first step is the gradient's sign


def judged(bytes_, extra, *, bound=None):
    """The result of a program with one budget; the lower bound is at the plans by default."""
    least = {"extra": extra if bound is None else bound, "bytes": 50}
    row = {"budget": 100, "bytes": bytes_, "extra": extra, "seconds": 1.0, "compiled": 2, "bound": least}
    row |= {"held": 60, "bound at held": extra, "working": 30, "bound at rest": extra}
    row |= {"sequences": 0, "inner": 0.0, "bound at all": extra}
    stock = {"remat on the blocks": {"bytes": 100, "extra": 0.25}, "dots on the blocks": {"bytes": 100, "extra": 0.1}}
    step = {
        "bytes": 300,
        "full": 200,
        "plans": [{"budget": 200, "kind": "device", "bytes": 200, "extra": 0.1, "seconds": 0.5}],
    }
    return {"bytes": 250, "flops": 1000, "stock": stock, "plans": {"marked": [row], "unmarked": [row]}, "step": step}


def test_failures_name_a_budget_exceeded_a_higher_price_and_the_distance(harness):
    assert harness.failures(judged(100, 0.1)) == []
    assert len(harness.failures(judged(101, 0.1))) == 4  # two references, marked and unmarked
    lines = harness.failures(judged(100, 0.2))
    assert [line.partition(",")[0] for line in lines] == ["marked", "unmarked"] and "+20.0%" in lines[0]
    assert harness.failures(judged(100, 0.1, bound=0.06)) == []
    assert "8.0 points" in harness.failures(judged(100, 0.1, bound=0.02))[0]


def test_failures_name_a_cheaper_plan_for_another_budget_that_fits(harness):
    result = judged(100, 0.09)
    result["plans"]["marked"] = [*result["plans"]["marked"], {**judged(100, 0.01)["plans"]["marked"][0], "budget": 150}]
    lines = harness.failures(result)
    assert [line.partition(":")[0] for line in lines] == ["marked", "unmarked"]
    assert "+9.0% where another plan" in lines[0]


def test_failures_name_an_error_and_a_step_over_its_budget(harness):
    result = judged(100, 0.1)
    result["plans"]["marked"] = [{"budget": 100, "error": "PlanError", "text": "", "smallest": 120, "seconds": 1.0}]
    result["step"]["plans"][0]["bytes"] = 201
    lines = harness.failures(result)
    assert len(lines) == 3 and "PlanError" in lines[0] and lines[-1].startswith("step")


@pytest.mark.slow
def test_what_binds_is_read_from_the_compiled_program(harness):
    """Three products are held, of an elementwise chain whose cotangents take as much; the largest result lies in the
    memory of an output.
    """
    ws, x = [jnp.eye(32)] * 4, jnp.ones((256, 32))

    def loss(ws, x):
        for w in ws:
            x = jnp.tanh(x @ w)
        return x.sum()

    model = harness.Model(loss=loss, params=ws, data=(x,), step=loss, step_args=(ws, x))
    plan = statetx.plan(loss, ws, x, argnums=0, of="temporaries", budget=1.0)
    bound = harness.LowerBound(loss, ws, x)
    found = harness.what_binds(model, loss, plan.temp_bytes, bound)
    assert 3 * x.nbytes <= found["held"] <= plan.temp_bytes
    assert x.nbytes <= found["working"] <= plan.temp_bytes
    assert found["bound at rest"] >= bound.operations_at(plan.temp_bytes)


def test_sequences_between_loops_count_once(harness):
    """What the first loop writes and the second reads; not the argument that the first reads, nor carries."""
    step = lambda h, x: (jnp.tanh(h + x), 2 * h)

    def two_loops(xs):
        jax.lax.scan(step, xs[0], xs)  # nothing reads what it writes
        xs = jax.jit(lambda xs: jax.lax.scan(step, xs[0], xs)[1])(xs)
        return jax.lax.scan(jax.checkpoint(lambda h, x: (h + x, None)), xs[0], xs)[0].sum()

    xs = jnp.ones((8, 4))
    assert harness.sequence_bytes(two_loops, xs) == xs.nbytes


@pytest.mark.slow
def test_rematerialization_of_inner_gradients_adds_operations_of_its_own(harness):
    """The products that run again are differentiated, too."""

    def task_loss(w, x):
        return (jnp.tanh(jnp.tanh(x @ w) @ w) ** 2).mean()

    def loss(w, x):
        return task_loss(w - jax.grad(task_loss)(w, x), x)

    args = jnp.eye(16), jnp.ones((64, 16))
    planner = Planner(loss, *args, argnums=0)
    plain, rematerialized = (
        harness.inner_cost(planner, types.SimpleNamespace(inner=types.SimpleNamespace(variant=v)))
        for v in (harness.PLAIN, "nothing")
    )
    assert plain == 0 and rematerialized > 0.1
    assert harness.inner_cost(planner, types.SimpleNamespace(inner=None)) == 0


def test_tables_have_a_row_for_each_program(harness, tmp_path):
    result = judged(100, 0.1, bound=0.06)
    result["plans"]["unmarked"] = [{"budget": 100, "error": "PlanError", "text": "", "smallest": 120, "seconds": 1.0}]
    for _, columns, rows in harness.tables({"one": result, "two": judged(100, 0.2)}):
        assert [row[0] for row in rows] == ["one", "two"] and all(len(row) == len(columns) for row in rows)
    lines = harness.lines_of({"one": result})
    assert lines[0].startswith("marked: 1 of 1") and lines[1].startswith("unmarked: 0 of 1")
    harness.picture({"one": result}, str(tmp_path / "plans.svg"))


@pytest.mark.slow
def test_families_of_regions_have_turns(harness):
    """Marked blocks of two convolutions: the choices of whole blocks near the budget must not use up the tries of those
    that copy the residual stream.
    """
    model = harness.ALL["convolutional net"](statetx.remat, batch=2)
    by_hand = statetx.measure(statetx.value_and_grad(model.loss), model.params, *model.data, gradient=False)
    planner = Planner(model.loss, model.params, *model.data, argnums=0, of="temporaries", time_limit=None)
    assert planner.plan(by_hand.temp_bytes).extra_flops < 0.2


# -- benchmarks/gpu_times.py -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_estimates_beside_times(monkeypatch):
    """One program at a tiny size, on this CPU; XLA tells times for GPUs only, so they are made up."""
    measure = statetx.measure
    as_told = lambda *args, **kwargs: dataclasses.replace(cost := measure(*args, **kwargs), seconds=1e-9 * cost.flops)
    with benchmark("gpu_times") as gpu_times:
        monkeypatch.setattr(statetx, "measure", as_told)
        monkeypatch.setattr(gpu_times, "STEPS_FOR", 0.0)
        assert len(gpu_times.NAMES) == len(gpu_times.ALL) - 3
        found = gpu_times.one("MLP", {"layers": 2, "width": 16, "batch": 64})
        assert list(found) == ["no remat", "remat on the blocks", "dots on the blocks", "plan"]
        assert all(row["estimate"] and row["seconds"] > 0 for row in found.values())
        assert found["plan"]["bytes"] <= 1.001 * found["remat on the blocks"]["bytes"]
        assert len(gpu_times.rows({"MLP": found, "killed": {"failed": "x"}})) == 4

        told = {"a": (1.0, 1.0), "b": (2.0, 4.0), "c": (3.0, 6.0), "no remat": (1.0, 2.0)}
        made_up = {way: {"estimate": e, "seconds": s, "bytes": 1} for way, (e, s) in told.items()}
        assert gpu_times.verdict({"p": made_up, "q": {"failed": ""}}) == [
            "rank correlation of 4 programs 0.95",
            "of the ways of one program 0.95 at the median",
            "worst ratio of estimate to time 0.50 (p, b)",
            "worst ratio of the same, relative to no remat 2.00 (p, a)",
        ]
        assert gpu_times.verdict({}) == ["XLA tells no time of these programs"]
