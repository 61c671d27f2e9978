"""A plan is for one program: what its equations return, the rules that it sees into, and the policies in it are part of
the program.
"""

import dataclasses
import functools
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import statetx
from statetx.planner import Planner

WS = [jax.random.normal(key, (64, 64)) / 8 for key in jax.random.split(jax.random.key(0), 4)]
X = jax.random.normal(jax.random.key(1), (256, 64))


def spiking(result, how):
    """A loss whose layers return spikes or something else: their equations are equal."""

    def of(v):
        spike = (v > 0).astype(jnp.float32)
        return {"spike": spike, "current": spike * v}[result] if how != "rule" else jnp.sin(v)

    if how == "cond":
        act = lambda v: jax.lax.cond(v[0, 0] > -1e9, of, lambda v: (v > 1).astype(jnp.float32), v)
    elif how == "custom_jvp":
        act = jax.custom_jvp(of)
        act.defjvp(lambda primals, tangents: (act(*primals), tangents[0] / (1 + primals[0] ** 2)))
    else:
        act = jax.custom_vjp(of)
        mask = {"spike": lambda v: (v > 0).astype(jnp.float32), "current": lambda v: jnp.exp(-v * v) + 1.0}[result]
        act.defvjp(lambda v: (of(v), mask(v)), lambda m, ct: (m * ct,))

    def loss(ws, x):
        for w in ws:
            x = act(x @ w)
        return (x**2).mean()

    return loss


@pytest.mark.sample("slow")
@pytest.mark.parametrize("how", ["cond", "custom_jvp", "rule"])
def test_plan_of_a_program_that_returns_something_else_is_refused(how):
    first, second = spiking("spike", how), spiking("current", how)
    planners = [Planner(loss, WS, X, argnums=0, of="temporaries", time_limit=None) for loss in (first, second)]
    assert planners[0].key("plan") != planners[1].key("plan")
    plan = planners[0].plan(planners[0].ends()[0])
    expected = jax.grad(first)(WS, X)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-7),
        jax.grad(plan.apply(first))(WS, X),
        expected,
    )
    with pytest.raises(statetx.PlanError, match=r"does not fit .*: equation \d+ of \d+ is"):
        jax.grad(plan.apply(second))(WS, X)


def test_policies_in_a_program_are_part_of_its_key():
    def loss_with(*names):
        block = jax.checkpoint(
            lambda x, w: jnp.sin(checkpoint_name(jnp.cos(x @ w), "a")) @ w,
            policy=jax.checkpoint_policies.save_only_these_names(*names),
        )
        return lambda ws, x: jax.lax.cond(x[0, 0] < 9.0, block, lambda x, w: x, x, ws[0]).sum()

    keys = [Planner(loss_with(*names), WS, X, argnums=0).key("plan") for names in (("a",), ("b",), ("a", "b"))]
    assert keys[0] != keys[1]
    assert keys[0] == keys[2]  # nothing has the name "b"


def test_key_is_the_same_once_a_rule_has_been_run():
    """JAX remembers what rules gave."""
    loss = spiking("spike", "rule")
    keys = []
    for _ in range(2):
        keys.append(Planner(loss, WS, X, argnums=0, of="temporaries").key("plan"))
        jax.grad(loss)(WS, X)
    assert keys[0] == keys[1]


def test_rules_that_close_over_arrays_are_part_of_a_program():
    """The rule keeps what is 0 or 1, or a float; nothing but what it computes tells which."""
    scale = np.ones((1, 64), np.float32)

    def loss_with(mask):
        act = jax.custom_vjp(jnp.tanh)
        act.defvjp(lambda v: (jnp.tanh(v), mask(v * scale)), lambda m, ct: (m * ct,))
        return lambda w, x: act(act(x @ w) @ w).mean()

    hard, soft = loss_with(lambda v: (v > 0).astype(v.dtype)), loss_with(jnp.exp)
    planners = [Planner(loss, WS[0], X, argnums=0, of="temporaries", time_limit=None) for loss in (hard, soft)]
    assert planners[0].key("plan") != planners[1].key("plan")
    with pytest.raises(statetx.PlanError, match=r"does not fit .*: equation \d+ of \d+ is"):
        jax.grad(planners[0].plan(planners[0].ends()[0]).apply(soft))(WS[0], X)


NUMBER = 1.0


def number():
    return NUMBER


@dataclasses.dataclass
class Config:
    number: float


def backward_rule(how, n):
    """A rule that depends on a number, which it finds in another place each time."""
    config = {"dict": {"number": n}, "object": Config(n), "namespace": types.SimpleNamespace(number=n)}.get(how)
    rules = {
        "keyword of a partial": functools.partial(lambda r, ct, n: (ct * n,), n=n),
        "keyword default": lambda r, ct, *, n=n: (ct * n,),
        "dict": lambda r, ct: (ct * config["number"],),
        "object": lambda r, ct: (ct * config.number,),
        "namespace": lambda r, ct: (ct * config.number,),
        "global of a function": lambda r, ct: (ct * number(),),
    }
    return rules[how]


HOW = ["keyword of a partial", "keyword default", "dict", "object", "namespace", "global of a function"]


@pytest.mark.parametrize("how", HOW)
def test_what_a_backward_rule_reads_is_part_of_the_key(how, monkeypatch):
    keys = []
    for n in (1.0, 2.0, 1.0):
        monkeypatch.setattr(sys.modules[__name__], "NUMBER", n)
        act = jax.custom_vjp(jnp.tanh)
        act.defvjp(lambda v: (jnp.tanh(v), v), backward_rule(how, n))
        keys.append(Planner(lambda w, x, act=act: act(x @ w).mean(), WS[0], X, argnums=0).key("plan"))
    assert keys[0] == keys[2] != keys[1]


@pytest.mark.slow
def test_gradients_of_functions_with_equal_equations_and_other_outputs():
    def body(ws, x):
        for w in ws:
            x = x + jnp.sin(jnp.tanh(x @ w))
        return x

    def with_aux(ws, x):
        y = body(ws, x)
        return (y**2).mean(), y

    @jax.jit
    def step(ws, x):
        first = jax.grad(lambda ws: (body(ws, x) ** 2).mean())(ws)
        (value, aux), second = jax.value_and_grad(with_aux, has_aux=True)(ws, x)
        return jax.tree.map(lambda w, a, b: w - 0.1 * (a + b), ws, first, second), value, aux.sum()

    plan = statetx.plan(step, WS, X, budget=0.9)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), plan.apply(step)(WS, X), step(WS, X)
    )


@pytest.mark.slow
def test_second_derivatives_of_a_loop_in_groups():
    """Its steps read the whole of xs, to which no tangent flows: that flows through the slices."""
    w, h, xs = WS[0][:16, :16] * 2, jnp.zeros((8, 16)), jax.random.normal(jax.random.key(2), (64, 8, 16))

    def loss(w, xs):
        def step(h, x):
            h = jnp.tanh(h @ w + jnp.sin(x) * h + x)
            return jnp.tanh(h @ w) * jnp.cos(x), None

        return (jax.lax.scan(step, h, xs)[0] ** 2).sum()

    planner = Planner(loss, w, xs, of="temporaries", argnums=(0, 1), time_limit=None)
    low, high = planner.ends()
    plans = (planner.plan(int(low + part * (high - low))) for part in (0.1, 0.05, 0.2, 0.3))
    plan = next(plan for plan in plans if any("Groups" in line for line in plan.loops))
    product = lambda f: jax.jit(lambda xs: jax.jvp(lambda xs: jax.grad(f, 1)(w, xs), (xs,), (jnp.cos(xs),))[1])(xs)
    expected = product(loss)
    assert float(jnp.abs(expected).max()) > 1e-2
    np.testing.assert_allclose(product(plan.apply(loss)), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.sample
@pytest.mark.parametrize("is_planned_so", [False, True])
def test_plan_fits_states_that_hold_one_array(is_planned_so):
    key, w = jax.random.key(3), WS[0]
    states = {"a": statetx.Param(w), "b": statetx.Param(w), "k": statetx.RngState(key), "l": statetx.RngState(key)}
    states["both"] = statetx.Param({"c": w, "d": w})

    def loss(x):
        for name in "ab":
            x = jnp.tanh(x @ states[name].value) + jax.random.normal(states["k" if name == "a" else "l"].value, x.shape)
        return ((x @ states["both"].value["c"]) ** 2 @ states["both"].value["d"]).mean()

    def share(is_shared):
        own = (lambda x: x) if is_shared else jnp.copy
        states["b"].value, states["l"].value = own(states["a"].value), own(states["k"].value)
        states["both"].value = {"c": states["a"].value, "d": own(states["a"].value)}

    share(is_planned_so)
    plan = statetx.plan(loss, X, of="temporaries", budget=1.0)
    share(True)
    for wrt in (None, [states["a"]]):
        expected, planned = (statetx.grad(f, wrt=wrt)(X) for f in (loss, plan.apply(loss)))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-7), planned, expected)
