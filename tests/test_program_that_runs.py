"""All reports are on the program that runs: the jitted function's own, whose order of donated arrays decides its
memory.
"""

import functools

import jax
import jax.numpy as jnp
import pytest
from libraries import VALUED

import statetx

DEPTH, WIDTH = 8, 32
X = jnp.ones((4, WIDTH))
BIG = 2**24


def mean_square(w, x):
    return jnp.mean(jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), x, w)[0] ** 2)


def adam(w, m, v, x):
    loss, g = jax.value_and_grad(mean_square)(w, x)
    m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
    return w - 1e-3 * m / (jnp.sqrt(v) + 1e-8), m, v, loss


def step_of(make):
    """A step whose states have paths in another order than it reads and returns them."""
    c, a, b = [make(jnp.full((DEPTH, WIDTH, WIDTH), x)) for x in (0.1, 0.2, 0.3)]

    @functools.partial(statetx.jit, donate_states=True)
    def step(x):
        new = adam(c.value, b.value, a.value, x)
        a.value, b.value, c.value = new[2], new[1], new[0]
        return new[3]

    return step, (X,)


def in_order(order):
    """Plain JAX, with the states as donated arguments, returned in any order."""

    def reordered(*args):
        out = adam(*args)
        return [out[i] for i in (*order, 3)]

    step = jax.jit(reordered, donate_argnums=(0, 1, 2))
    return step, (*[jnp.full((DEPTH, WIDTH, WIDTH), x) for x in (0.1, 0.2, 0.3)], X)


PROGRAMS = {name: functools.partial(step_of, make) for name, make in VALUED.items()}
PROGRAMS |= {str(order): functools.partial(in_order, order) for order in ((0, 1, 2), (1, 2, 0))}


REPORTS = {
    "measure": lambda *call: statetx.measure(*call).peak_bytes,
    "memory_report": lambda *call: statetx.memory_report(*call).rows[-1].peak_bytes,
    "memory_profile": lambda *call: statetx.memory_profile(*call).peak_bytes,
    "explain_oom": lambda *call: statetx.explain_oom(*call, limit=BIG).profile.peak_bytes,
}


@pytest.mark.sample
@pytest.mark.parametrize("make", PROGRAMS.values(), ids=PROGRAMS)
def test_reports_are_on_the_program_that_runs(make):
    step, args = make()
    memory = step.lower(*args).compile().memory_analysis()
    peak = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    expected = dict.fromkeys(REPORTS, peak + memory.temp_size_in_bytes)
    assert {name: report(step, *args) for name, report in REPORTS.items()} == expected
    statetx.testing.assert_memory(step, *args, at_most=expected["measure"])


def test_a_plan_is_of_the_program_that_runs():
    step, args = step_of(statetx.State)
    assert statetx.plan(step, *args, budget=BIG).total_bytes == statetx.measure(step, *args).peak_bytes


@pytest.mark.parametrize("make", VALUED.values(), ids=VALUED)
def test_a_function_around_a_jitted_step_keeps_its_order(make):
    """The function that is measured is another program, in which the step is updated in place as well."""
    step, args = step_of(make)
    alone, around = statetx.measure(step, *args), statetx.measure(lambda x: 2 * step(x), *args)
    assert around.peak_bytes <= alone.peak_bytes + 64


def test_a_function_around_a_jitted_step_keeps_the_names_of_its_inputs():
    w = statetx.Param(jnp.eye(WIDTH))
    model = statetx.jit(lambda x: jnp.tanh(x @ w.value))
    update = jax.jit(lambda params, x: {"w": params["w"] + x.T @ x}, donate_argnums=0)
    for fun, args, expected in (
        (lambda y: model(y), (X,), {("state", "model.w"), ("argument", "y")}),
        (lambda p, y: update(p, y), ({"w": w.value}, X), {("argument", "p['w']"), ("argument", "y")}),
    ):
        profile = statetx.memory_profile(fun, *args, gradient=False)
        assert {(b.kind, b.owner) for b in profile.buffers if b.kind in ("state", "argument")} == expected


@pytest.mark.slow
def test_order_of_outputs_is_advised_by_what_the_program_in_order_takes(monkeypatch):
    """XLA copies on GPUs (`test_target_programs`). Here the program in order is told to take nothing."""
    (step, args), (ordered, _) = in_order((1, 2, 0)), in_order((0, 1, 2))
    assert statetx.memory_profile(ordered, *args).reordered is None
    reordered = statetx.memory_profile(step, *args).reordered
    saved = statetx.measure(step, *args).peak_bytes - statetx.measure(ordered, *args).peak_bytes
    assert reordered.saved_bytes == saved and reordered.is_compiled
    assert "test_program_that_runs.py:" in reordered.text

    monkeypatch.setattr("statetx._equations.compiled.temp_bytes_of", lambda *_: 0)
    profile = statetx.memory_profile(step, *args)
    assert profile.changes[0].action == "order" and "less (compiled" in str(profile)
    report = statetx.explain_oom(step, *args, limit=profile.peak_bytes - 1)
    assert report.remedies[0].change.action == "order" and report.remedies[0].is_compiled


def test_a_donated_step_may_close_over_an_array():
    mask = jnp.arange(WIDTH)
    step = jax.jit(lambda w, m: (m * 2, w * mask), donate_argnums=(0, 1))
    call = step, jnp.ones(WIDTH), jnp.ones(WIDTH)
    assert statetx.memory_profile(*call).peak_bytes == statetx.measure(*call).peak_bytes
