"""Regions of several layers that are computed again layer by layer: rematerialization within rematerialization."""

import functools

import brainstate
import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest

import statetx
from statetx.planner._option import Decision
from statetx.planner._parts import Part, flatten
from statetx.planner._regions import region

GROUPS, LAYERS, WIDTH = 4, 4, 32
X = jnp.sin(jnp.arange(256.0 * WIDTH)).reshape(256, WIDTH)
WS = [
    [(jnp.eye(WIDTH) * (0.5 + 0.01 * g), jnp.eye(WIDTH) * (0.3 + 0.01 * n)) for n in range(LAYERS)]
    for g in range(GROUPS)
]


def layer(w, x):
    return x + jnp.tanh(x @ w[0]) @ w[1]


def network(*, layers=lambda fun: fun, groups=lambda fun: fun):
    """A loss of groups of layers, each marked or not."""
    marked = layers(layer)

    def group(ws, x):
        return functools.reduce(lambda x, w: marked(w, x), ws, x)

    marked_group = groups(group)
    return lambda ws, x: (functools.reduce(lambda x, w: marked_group(w, x), ws, x) ** 2).mean()


def temp_bytes(fun):
    return jax.jit(fun).lower(WS, X).compile().memory_analysis().temp_size_in_bytes


@pytest.fixture(scope="module")
def nested_cost():
    return statetx.measure(network(layers=statetx.remat, groups=statetx.remat), WS, X)


@pytest.fixture(scope="module")
def plan(nested_cost):
    return statetx.plan(network(), WS, X, budget=nested_cost.temp_bytes, of="temporaries", argnums=0)


@pytest.mark.parametrize(
    "marks",
    [{}, pytest.param({"layers": statetx.remat, "groups": statetx.remat}, marks=pytest.mark.slow)],
    ids=["unmarked", "nested marks"],
)
def test_memory_of_nested_remat_is_met(marks, nested_cost, plan):
    loss = network(**marks)
    if marks:
        plan = statetx.plan(loss, WS, X, budget=nested_cost.temp_bytes, of="temporaries", argnums=0)
    assert plan.temp_bytes <= plan.budget_bytes and plan.extra_flops > 0.2, "all is computed again, some of it twice"
    gradient = jax.value_and_grad(plan.apply(loss))
    assert temp_bytes(gradient) <= nested_cost.temp_bytes
    jax.tree.map(np.testing.assert_array_equal, jax.jit(gradient)(WS, X), jax.jit(jax.value_and_grad(loss))(WS, X))


def test_it_adds_fewer_operations_than_nested_remat(nested_cost, plan):
    loss = network()
    planned = statetx.measure(plan.apply(loss), WS, X)
    assert planned.temp_bytes <= nested_cost.temp_bytes and planned.flops < nested_cost.flops


def test_a_plan_says_so_and_is_stored_with_it(plan, tmp_path):
    loss = network()
    assert "keep nothing, computed again in 4 parts" in str(plan)
    plan.save(tmp_path / "plan.json")
    loaded = statetx.Plan.load(tmp_path / "plan.json")
    assert temp_bytes(jax.value_and_grad(loaded.apply(loss))) == temp_bytes(jax.value_and_grad(plan.apply(loss)))


@pytest.mark.slow
def test_states_of_layers():
    class Layer(brainstate.nn.Module):
        def __init__(self, seed):
            super().__init__()
            self.w = brainstate.ParamState(jnp.eye(WIDTH) * (0.5 + 0.01 * seed))
            self.v = brainstate.ParamState(jnp.eye(WIDTH) * 0.3)
            self.mean = brainstate.ShortTermState(jnp.zeros(WIDTH))

        def __call__(self, x):
            self.mean.value = 0.9 * self.mean.value + 0.1 * x.mean(0)
            return layer((self.w.value, self.v.value), x)

    def make(mark):
        layers = [Layer(i) for i in range(16)]
        params = [p for m in layers for p in m.states(brainstate.ParamState).values()]
        calls = [mark(m.__call__) for m in layers]
        groups = [
            mark(lambda x, group=group: functools.reduce(lambda x, call: call(x), group, x))
            for group in (calls[:4], calls[4:8], calls[8:12], calls[12:])
        ]
        loss = lambda x: (functools.reduce(lambda x, group: group(x), groups, x) ** 2).mean()  # noqa: E731
        return layers, statetx.value_and_grad(loss, wrt=params)

    budget = statetx.measure(make(statetx.remat)[1], X).temp_bytes
    layers, step = make(lambda fun: fun)
    plan = statetx.plan(step, X, budget=budget, of="temporaries")
    assert "computed again in" in str(plan)
    planned_layers, planned_step = make(lambda fun: fun)
    results = statetx.jit(step)(X), statetx.jit(plan.apply(planned_step))(X)
    jax.tree.map(np.testing.assert_array_equal, *results)
    for ours, theirs in zip(layers, planned_layers, strict=True):
        np.testing.assert_array_equal(ours.mean.value, theirs.mean.value)


def staged(fun, *args):
    return flatten(jax.make_jaxpr(fun)(*args).jaxpr)


def runs(jaxpr, name):
    """How many equations of a jaxpr apply a primitive, inner ones included."""
    inner = [j for e in jaxpr.eqns for j in jax.tree.leaves([*e.params.values()], is_leaf=is_jaxpr) if is_jaxpr(j)]
    return sum(e.primitive.name == name for e in jaxpr.eqns) + sum(runs(j, name) for j in inner)


def is_jaxpr(x):
    return isinstance(x, (jax.extend.core.Jaxpr, jax.extend.core.ClosedJaxpr))


@pytest.mark.parametrize("inner, expected", [((), 2), (((0, 1), (1, 2), (2, 3)), 3)])
def test_inner_intervals_run_once_more(inner, expected):
    jaxpr = staged(lambda x: [jnp.sin(jnp.tanh(jnp.cos(x)))], X)
    call = region(Part("region", jaxpr, jaxpr.invars, jaxpr.outvars), Decision(frozenset(), inner=inner))
    gradient = jax.make_jaxpr(jax.grad(lambda x: call(x)[0].sum()))(X)
    assert runs(gradient, "tanh") == expected


def test_loops_and_numbers_within_a_region():
    """Loops stay as they are; sums of numbers, which stay outside of regions, do not move the inner intervals."""

    def fun(key, w, x, total):
        for i in range(3):
            x, norms = jax.lax.scan(lambda c, _: (jnp.tanh(c @ w), c.sum()), x, None, length=4)
            x = jnp.where(jax.random.bernoulli(jax.random.fold_in(key, i), 0.8, x.shape), x, 0)
            total = total + norms[0]
        return [x, total]

    key = jax.random.key(3)
    jaxpr = staged(fun, key, jnp.eye(WIDTH), X, 0.0)
    ends = [i + 1 for i, e in enumerate(jaxpr.eqns) if e.primitive.name == "add" and not e.outvars[0].aval.shape]
    intervals = tuple(zip([0, *ends], ends, strict=False))
    assert len(intervals) == 3
    part = Part("region", jaxpr, jaxpr.invars, jaxpr.outvars)
    nested = region(part, Decision(frozenset(), inner=intervals))
    args = jnp.eye(WIDTH) * 0.9, X, jnp.float32(1.0)

    def loss(call, *args):
        x, total = call(*args)
        return (x**2).sum() + total

    results = [
        jax.jit(jax.value_and_grad(functools.partial(loss, call, key), (0, 1, 2)))(*args)
        for call in (nested, lambda *a: fun(*a))
    ]
    jax.tree.map(np.testing.assert_array_equal, *results)
