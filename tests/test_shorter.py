"""Long programs: the baseline's memory from short versions of it."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import optax
import pytest

import statetx
from helpers import temp_bytes
from statetx.planner import Planner

LAYERS = 12
X = jnp.ones((64, 16))
WS = [jnp.eye(16) * (1 + 0.01 * i) for i in range(LAYERS)]
ADAM = optax.adam(1e-3)


def block(w, x):
    return x + jnp.sin(jnp.tanh(x @ w) @ w.T)


def loss(ws, x):
    for w in ws:
        x = block(w, x)
    return (x**2).mean()


def step(ws, x):
    return jax.tree.map(lambda w, g: w - 0.1 * g, ws, jax.grad(loss)(ws, x))


@functools.partial(jax.jit, donate_argnums=(0, 1))
def adam_step(ws, opt_state, x):
    value, gradient = jax.value_and_grad(loss)(ws, x)
    updates, opt_state = ADAM.update(gradient, opt_state)
    return optax.apply_updates(ws, updates), opt_state, value


@pytest.fixture
def long(monkeypatch):
    """Every program counts as a long one."""
    for module in ("candidates", "search"):
        monkeypatch.setattr(f"statetx.planner._search.{module}.is_long", lambda program: True)


@pytest.mark.slow
@pytest.mark.parametrize("fun, gradient", [(loss, jax.value_and_grad(loss)), (step, step)], ids=["loss", "step"])
def test_memory_is_extrapolated_to_the_byte(long, fun, gradient):
    plan = statetx.plan(fun, WS, X, budget=0.6, of="temporaries", argnums=0 if fun is loss else None)
    assert plan.unplanned_bytes == temp_bytes(gradient, WS, X) and plan.unplanned_is_compiled
    assert plan.unplanned_flops == statetx.measure(gradient, WS, X, gradient=False).flops
    assert "no remat" not in [name for name, _, _ in plan.measured]
    assert plan.temp_bytes <= plan.budget_bytes == int(0.6 * plan.unplanned_bytes)
    assert len(plan.measured) <= 12, "candidates predicted to take too much are not compiled"


@pytest.mark.slow
def test_layers_left_out_take_no_memory_in_a_step(long):
    # Gradients of zeros, which Adam reads, would take more memory, the fewer layers a short version has.
    args = WS, ADAM.init(WS), X[:8]
    search = Planner(adam_step, *args)._search
    memory = adam_step.lower(*args).compile().memory_analysis()
    assert search.baseline.extrapolated.temp_bytes == memory.temp_size_in_bytes


def test_extrapolated_costs_lack_what_xla_does_not_tell(long, monkeypatch):
    """As for devices that are not there."""
    monkeypatch.setattr(jax.stages.Compiled, "cost_analysis", lambda self: None)
    cost = Planner(loss, WS, X, of="temporaries", argnums=0)._search.baseline.extrapolated
    assert cost.compiled_flops is None and cost.seconds is None and cost.temp_bytes > 0


@pytest.mark.slow
def test_baseline_that_may_fit_is_compiled(long):
    planner = Planner(loss, WS, X, of="temporaries", argnums=0)
    plan = planner.plan("1GiB")
    assert plan.stock == "no remat" and plan.temp_bytes == temp_bytes(jax.value_and_grad(loss), WS, X)


@pytest.mark.slow
def test_long_baseline_without_equal_periods_is_compiled_near_the_budget_only(long):
    planner = Planner(skipping, WS[:7], X, of="temporaries", argnums=0)
    candidates, peak = planner._search.candidates, planner._search._unplanned.peak
    for part in (0.4, 0.6):  # of the memory by the model; others are compiled from a quarter on
        with contextlib.suppress(statetx.PlanError):
            planner.plan(int(part * peak))
        assert (candidates.find(candidates._unplanned) is not None) == (part > 0.5)


def skipping(ws, x):
    xs = [x]
    for i, w in enumerate(ws):
        xs.append(block(w, xs[-1]) + xs[i // 2])
    return xs[-1].sum()


@pytest.mark.thorough
def test_no_time_gives_a_program_that_compiles_fast(long):
    plan = statetx.plan(loss, WS, X, budget=0.9, of="temporaries", argnums=0, time_limit=0.0)
    assert [name for name, _, _ in plan.measured] == ["nothing"] and not plan.complete
    assert plan.temp_bytes <= plan.budget_bytes
