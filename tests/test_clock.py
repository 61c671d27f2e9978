"""The time of a search: it passes while the search runs, and what is left goes to the next."""

from __future__ import annotations

import functools
import itertools
import pkgutil

import jax
import jax.numpy as jnp
import pytest

import statetx
from statetx.planner import Fit, Planner


def patched(monkeypatch, name, replacement):
    """A function of the search, which is replaced by another for this test."""
    name = f"statetx.planner.{name}"
    found = pkgutil.resolve_name(name)
    monkeypatch.setattr(name, replacement)
    return found


def test_each_plan_has_the_time_limit():
    """The second one is found although the first took all of its time."""
    planner = Planner(
        lambda w, x: (jnp.tanh(x @ w) ** 2).mean(), jnp.eye(8), jnp.ones((64, 8)), argnums=0, time_limit=60.0
    )
    seen = []
    whole = planner._plain
    whole.time_left._used = 1000.0  # all of it is used
    assert whole.is_late()
    seen.append(planner.plan(1.0).complete)
    seen.append(planner.plan(10**9).complete)
    assert seen == [False, True]


WIDTHS = [16 + 8 * (5 * i % 7) for i in range(8)]
WS = [jnp.ones(shape) / 16 for shape in itertools.pairwise(WIDTHS)]


def layers(ws, x):
    """Layers of different widths, each of which is analyzed."""
    for w in ws:
        x = jnp.sin(jnp.tanh(x @ w))
    return (x**2).mean()


def layers_planned(**options):
    return statetx.plan(layers, WS, jnp.ones((1024, 16)), argnums=0, of="temporaries", **options)


@pytest.mark.slow
def test_half_of_the_time_is_left_for_compilations(clock, monkeypatch):
    analyzed = []

    def slow(*args):
        analyzed.append(1)
        clock.append(clock[-1] + 10)
        return front_of(*args)

    front_of = patched(monkeypatch, "_search.lattice.front_of", slow)
    assert not Planner(layers, WS, jnp.ones((1024, 16)), argnums=0)._search.lacks_regions
    num_regions = len(analyzed)
    analyzed.clear()
    plan = layers_planned(budget=0.8, time_limit=10.0 * num_regions)
    assert 0 < len(analyzed) < num_regions and not plan.complete
    assert plan.temp_bytes <= plan.budget_bytes and plan.stock != "nothing"


@pytest.mark.slow
def test_half_of_the_time_is_left_for_whole_programs(clock, monkeypatch):
    """Parts are measured until the choice stays the same, which may take longer than to compile the whole."""
    begun = []

    def slow(programs):
        programs = list(programs)
        clock.append(clock[-1] + 5 * len(programs))
        compile_together(programs)

    def seen(self, choice, *name):
        begun.append(clock[-1])
        return measure(self, choice, *name)

    compile_together = patched(monkeypatch, "_treatments.front.compile_together", slow)
    measure = patched(monkeypatch, "_search.candidates.Candidates.measure", seen)
    plan = layers_planned(budget=0.65, time_limit=40.0)
    assert 0 < begun[0] <= 20 and not plan.complete and plan.temp_bytes <= plan.budget_bytes


@pytest.fixture
def compilations(clock, monkeypatch):
    """Each candidate takes 40 seconds to compile; the number of them."""
    compiled = []

    def slow(self, choice, *name):
        if self.find(choice) is None:
            compiled.append(1)
            clock.append(clock[-1] + 40)
        return measure(self, choice, *name)

    measure = patched(monkeypatch, "_search.candidates.Candidates.measure", slow)
    return compiled


def long_loop(w, xs):
    def step(h, x):
        h = jnp.tanh(h * w + x)
        return h, h.sum()

    return jax.lax.scan(step, jnp.ones(8), xs)[1].mean()


def test_search_that_is_cut_short_does_not_return_the_smallest_plan(compilations):
    """The smallest plan of this loop is one slot, of 75 times the operations; the first that is compiled keeps the
    budget at a quarter.
    """
    plan = statetx.plan(long_loop, jnp.ones(8), jnp.ones((400, 8)), budget=0.6, time_limit=60)
    assert 0 < len(compilations) <= 2
    assert plan.total_bytes <= plan.budget_bytes and plan.extra_flops < 0.4


def test_loop_whose_step_needs_nothing_but_its_result_keeps_that():
    """Without rematerialization it stores as much; but that is no loop in a loop."""

    def loss(w, xs):
        def step(h, x):
            h = jnp.exp(-h * w * x)
            return h, h.sum()

        return jax.lax.scan(step, jnp.ones(8), xs)[1].mean()

    plan = statetx.plan(loss, jnp.ones(8), jnp.ones((400, 8)), budget=0.6)
    assert plan.total_bytes <= plan.budget_bytes and plan.extra_flops < 0.4, "slots: 0.96"


@pytest.mark.slow
def test_time_that_ended_an_expensive_plan_is_said(compilations, tmp_path, monkeypatch):
    """In this memory no plan costs little: its carries alone are in slots."""
    monkeypatch.setenv("STATETX_CACHE", str(tmp_path))
    planned = functools.partial(statetx.plan, long_loop, jnp.ones(8), jnp.ones((400, 8)), of="temporaries", budget=3200)
    with pytest.warns(
        statetx.PolicyWarning, match=r"plan\(long_loop\): the time limit ended the search.* times the oper"
    ):
        plan = planned(time_limit=60)
    num_compiled = len(compilations)
    with pytest.warns(statetx.PolicyWarning, match="time limit"):  # also if it comes from the store
        assert planned(time_limit=60) == plan
    assert len(compilations) == num_compiled


@pytest.mark.slow
def test_policy_says_that_the_time_ended_an_expensive_plan(compilations):
    args = jnp.ones(8), jnp.ones((400, 8))
    planned = statetx.remat(long_loop, policy=Fit("3200", time_limit=60))
    with pytest.warns(statetx.PolicyWarning, match=r"plan\(long_loop\): the time limit ended the search"):
        jax.eval_shape(jax.grad(planned), *args)
    assert compilations


@pytest.mark.slow
def test_search_goes_on_until_a_plan_keeps_the_budget(compilations):
    """For at most twice the time limit. The cheapest that is predicted to keep the budget comes next."""
    plan = layers_planned(budget=0.8, time_limit=30.0)
    assert plan.temp_bytes <= plan.budget_bytes and not plan.complete
    assert 0 < len(compilations) <= 2, "a candidate takes more than the time"


@pytest.mark.slow
def test_search_that_keeps_no_budget_ends_with_the_time(compilations):
    with pytest.raises(statetx.PlanError, match="the time limit ended the search"):
        layers_planned(budget=0.3, time_limit=30.0)
    assert len(compilations) == 3, "two, and remat on the blocks in the end"


def test_plan_that_fails_leaves_the_next_its_time():
    planner = Planner(
        lambda w, x: (jnp.tanh(x @ w) ** 2).mean(),
        jnp.eye(8),
        jnp.ones((64, 8)),
        argnums=0,
        of="temporaries",
        time_limit=60.0,
    )
    whole = planner._plain
    whole.time_left._used = 1000.0
    with pytest.raises(statetx.PlanError, match="the time limit ended the search"):
        planner.plan(1)
    with pytest.raises(statetx.PlanError) as error:
        planner.plan(2)
    assert "time limit" not in str(error.value)


@pytest.mark.slow
def test_plan_of_a_program_that_was_not_the_last_is_complete():
    """Its time that was left went to the next one."""

    def loss(w, x):
        inner = jax.grad(lambda w: (jnp.tanh(x @ w) ** 2).mean())(w)
        return (jnp.tanh(x @ (w - inner)) ** 2).mean()

    plan = statetx.plan(loss, jnp.eye(8), jnp.ones((64, 8)), argnums=0, budget="1GiB", time_limit=120.0)
    assert plan.inner is not None and plan.complete


@pytest.mark.parametrize("time_limit", ["a", -1, True, float("nan")])
def test_wrong_time_limit_raises(time_limit):
    loss = lambda w: (w**2).sum()
    with pytest.raises(ValueError, match="time_limit=.* must be a number of seconds"):
        statetx.plan(loss, jnp.ones(4), argnums=0, budget="1GiB", time_limit=time_limit)
    with pytest.raises(ValueError, match="time_limit="), statetx.budget("1GiB", time_limit=time_limit):
        pass
    with pytest.raises(ValueError, match="time_limit="):
        statetx.explain_oom(loss, jnp.ones(4), limit="1GiB", time_limit=time_limit)


def test_block_without_a_size_raises():
    with pytest.raises(statetx.PlanError, match="budget=None is not a size"), statetx.budget(None):  # pyright: ignore
        pass
