"""Plans that minimize time: the cost of keeping a value against that of computing it again."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import statetx
from statetx._equations.structure import Body
from statetx.planner import CostModel, _parts, _whole, machine, planner
from statetx.planner._analysis import Graph

MODEL = CostModel("a device", flops_per_second=1e15, bytes_per_second=1e9, host_bytes_per_second=1e9)
KEPT = 2 / MODEL.bytes_per_second
X, W = jnp.ones((64, 32)), jnp.eye(32)
SWEEP = X.nbytes / MODEL.bytes_per_second  # the seconds that reading X takes


def graph_of(fun, model=MODEL, kept_byte_cost=KEPT):
    jaxpr = jax.make_jaxpr(fun)(X, W)
    flat = _parts.flatten(Body.close(jaxpr.jaxpr, jaxpr.consts).jaxpr)
    return Graph(flat, model.seconds, [False, False], [True, True], [True], kept_byte_cost=kept_byte_cost)


def names_saved(graph, option):
    return None if option.saved is None else {graph.sites[a].eqn.primitive.name for a in option.saved}


def sums(x, w):
    return ((x + 1) * (x + 2)).sum()  # each factor is needed for the derivative by the other


def test_value_that_is_cheaper_to_compute_again_is_not_kept():
    """Each sum takes one sweep over x, and two sweeps to write and read."""
    (best,) = graph_of(sums).front()
    assert best.saved == frozenset() and best.cost == pytest.approx((2 - 4) * SWEEP, rel=0.01)


def test_keeping_costs_nothing_under_operations():
    cheapest = graph_of(sums, kept_byte_cost=0.0).front()[0]
    assert cheapest.cost == 0 and cheapest.saved is None


def test_result_of_a_product_is_kept():
    """It is in memory in any case."""
    graph = graph_of(lambda x, w: ((x @ w + 1) * (x @ w + 2)).sum())
    assert names_saved(graph, graph.front()[0]) == {"dot_general"}


def test_slow_function_is_kept():
    """An exponential takes longer than two sweeps on this device, and none on the other."""
    fun = lambda x, w: (jnp.exp(x) * jnp.exp(2 * x)).sum()  # noqa: E731
    slow = dataclasses.replace(MODEL, transcendentals_per_second=X.size / (10 * SWEEP))
    assert graph_of(fun, slow).front()[0].saved is None
    assert graph_of(fun).front()[-1].saved == frozenset() and graph_of(fun).front()[-1].cost < 0


def loss(ws, x):
    for w in ws:
        h = x @ w
        x = (h + 1) * (h + 2) / 100
    return x.mean()


def test_plan_computes_again_what_the_budget_would_let_it_keep(monkeypatch):
    for module in (_whole, planner):
        monkeypatch.setattr(module, "cost_model", lambda: MODEL)
    settings = {"of": "temporaries", "budget": "1GiB", "argnums": 0}
    plan = statetx.plan(loss, [W] * 3, X, objective="time", **settings)
    decisions = {(row.value.split()[0], row.decision) for row in plan.rows if row.bytes >= X.nbytes}
    assert ("add", "recompute") in decisions and ("dot_general", "keep") in decisions
    assert not {("add", "keep"), ("dot_general", "recompute")} & decisions
    assert [cost for _, cost in plan.curve()] == sorted((cost for _, cost in plan.curve()), reverse=True)
    assert statetx.plan(loss, [W] * 3, X, **settings).stock == "no remat"


def test_transcendentals_count_where_they_are_slower_than_memory(monkeypatch):
    times = iter([1.0, 1.0, 5.0, 1.0, *[1.0] * 4])  # product, sweep, exponential, round trip
    monkeypatch.setattr(machine, "_measure", lambda *_: machine._Measured(next(times), 0.0))
    slow, fast = statetx.calibrate(save=False, size=64), statetx.calibrate(save=False, size=64)
    assert slow.transcendentals_per_second == 2**22 / 5 and fast.transcendentals_per_second == float("inf")
    (exp,) = jax.make_jaxpr(jnp.exp)(X).eqns
    assert slow.seconds(exp) == X.size / slow.transcendentals_per_second and fast.seconds(exp) < slow.seconds(exp)


def test_calibrate_takes_smaller_arrays_where_the_memory_of_the_device_is_taken(monkeypatch):
    sizes, measure = [], machine._measure

    def limited(fun, x, repeats, limit):
        sizes.append(x.shape[0])
        if x.size > 2**22:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1.00GiB.")
        return measure(fun, x, 1, 0.01)

    monkeypatch.setattr(machine, "_measure", limited)
    monkeypatch.setattr(machine, "_SMALLEST", 512)
    model = statetx.calibrate(save=False)
    assert sizes[:2] == [1024, 2**22] and model.bytes_per_second > 0  # on a CPU all arrays are small
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(machine.jnp, "ones", lambda shape, dtype: jax.ShapeDtypeStruct(shape, dtype))
    monkeypatch.setattr(
        machine,
        "_measure",
        lambda fun, x, *_: limited(fun, x, 1, 0.0) if x.size > 2**22 else machine._Measured(1e-3, 0.0),
    )
    sizes.clear()
    assert statetx.calibrate(save=False).flops_per_second == 2 * 1024**3 / 1e-3
    assert sizes == [8192, 4096, 2048 * 2048 * 4]
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
        statetx.calibrate(save=False, size=4096)
