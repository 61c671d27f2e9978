"""Compiler options that change memory as a part of a plan."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import statetx
from statetx._equations.compiled import low_memory_options
from statetx.planner import Planner, planner

X = jnp.ones((128, 32))
WS = [jnp.eye(32)] * 3


def branch(w, x):
    for _ in range(2):
        x = jnp.sin(jnp.tanh(x @ w) @ w.T)
    return (x**2).mean()


def loss(ws, x):
    """Branches that need not be in memory together: the default schedule of XLA:CPU runs their forward passes first."""
    return sum(branch(w, x) for w in ws)


def gradient(ws, x):
    return jax.grad(loss)(ws, x)


def temp_bytes(fun, compiler_options):
    return jax.jit(fun, compiler_options=compiler_options).lower(WS, X).compile().memory_analysis().temp_size_in_bytes


@pytest.fixture(scope="module")
def budget():
    """One that the program keeps unchanged with the options, and not without them."""
    if not low_memory_options():
        pytest.skip("no compiler options are known for this backend")
    most, least = temp_bytes(gradient, {}), temp_bytes(gradient, low_memory_options())
    assert least <= 0.6 * most
    return int(1.1 * least)  # the planner compiles a program with other arguments


def test_options_keep_a_budget_without_added_operations(budget, tmp_path):
    plan = statetx.plan(gradient, WS, X, of="temporaries", budget=budget, compiler_options=True)
    assert plan.compiler_options == plan.allowed_options == low_memory_options()
    assert plan.extra_flops == 0 and plan.stock == "no remat"
    assert temp_bytes(plan.apply(gradient), plan.compiler_options) == plan.temp_bytes <= budget
    assert plan.unplanned_bytes == temp_bytes(gradient, {}), "that of the program without the options"
    assert "compiler_options=plan.compiler_options): xla_cpu_scheduler_type=" in str(plan)

    plan.save(tmp_path / "plan.json")
    assert statetx.Plan.load(tmp_path / "plan.json").compiler_options == low_memory_options()


@pytest.mark.slow
def test_options_are_set_only_where_allowed(budget):
    plan = statetx.plan(gradient, WS, X, of="temporaries", budget=budget)
    assert plan.compiler_options == {} and plan.allowed_options is None
    assert plan.stock != "no remat" and "ompiler" not in str(plan).replace("compiled program", "")


@pytest.mark.slow
def test_options_are_not_set_where_the_program_fits_without(budget):
    plan = statetx.plan(gradient, WS, X, of="temporaries", budget="1GiB", compiler_options=low_memory_options())
    assert plan.compiler_options == {} and plan.allowed_options == low_memory_options()
    assert "It needs no compiler options." in str(plan)


@pytest.mark.slow
def test_cheaper_of_both_searches_is_taken(budget):
    """Below what the options reach alone."""
    low = int(0.82 * budget)
    with_options = Planner(gradient, WS, X, of="temporaries", compiler_options=True)
    assert with_options.plan(budget).extra_flops == 0
    plan, other = with_options.plan(low), statetx.plan(gradient, WS, X, of="temporaries", budget=low)
    assert 0 < plan.extra_flops <= other.extra_flops and plan.temp_bytes <= low
    assert temp_bytes(plan.apply(gradient), plan.compiler_options) == plan.temp_bytes
    assert with_options.best(budget).extra_flops == 0
    assert with_options.ends()[0] <= plan.temp_bytes and with_options.ends()[1] == temp_bytes(gradient, {})


@pytest.mark.slow
def test_measured_programs_have_their_options(budget):
    """Each is timed as it would be compiled."""
    plan = statetx.plan(gradient, WS, X, of="temporaries", budget=budget, objective="time", compiler_options=True)
    assert temp_bytes(plan.apply(gradient), plan.compiler_options) <= budget
    assert plan.seconds in [seconds for _, _, seconds in plan.timed()]
    assert any(name == "no remat" for name, _, _ in plan.timed()), "fits with the options only"


def test_backend_without_such_options(monkeypatch, budget):
    monkeypatch.setattr(planner, "low_memory_options", dict)
    plan = statetx.plan(gradient, WS, X, of="temporaries", budget="1GiB", compiler_options=True)
    assert plan.compiler_options == plan.allowed_options == {}
    assert "No compiler options that change memory are known for this backend." in str(plan)


def test_neither_true_nor_options():
    with pytest.raises(ValueError, match="compiler_options must be True, False or a mapping, got 'xla'"):
        statetx.plan(gradient, WS, X, budget=0.5, compiler_options="xla")
