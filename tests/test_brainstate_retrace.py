"""Functions that brainstate has traced are planned, budgeted and compared as if they had not been traced."""

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import statetx

pytestmark = pytest.mark.usefixtures("promoted_ranks")
X = jax.random.normal(jax.random.key(0), (512, 8))


class Net(brainstate.nn.Module):
    def __init__(self, num):
        super().__init__()
        with brainstate.random.seed_context(0):
            self.layers = [brainstate.nn.Linear(8 if i == 0 else 32, 32) for i in range(num)]
        self.calls = brainstate.ShortTermState(jnp.zeros(()))
        self.traces = 0

    def __call__(self, x):
        self.traces += 1
        self.calls.value += 1
        for layer in self.layers:
            x = jnp.tanh(layer(x))
        return (x**2).mean()


@pytest.fixture
def step():
    """A training step that brainstate has jitted, and run."""
    net = Net(8)
    params = net.states(brainstate.ParamState)

    def train(x):
        grads = brainstate.transform.grad(net, params)(x)
        for k, g in grads.items():
            params[k].value = jax.tree.map(lambda p, g: p - 0.1 * g, params[k].value, g)

    jitted = brainstate.transform.jit(train)
    jitted(X)
    jitted.net = net
    return jitted


def temp_bytes(fun):
    return statetx.measure(fun, X, gradient=False).temp_bytes


@pytest.mark.slow
def test_traced_step_is_planned(step):
    unplanned = temp_bytes(step)
    plan = statetx.plan(step, X, budget=0.85, of="temporaries")
    assert plan.is_step and plan.extra_flops > 0
    assert temp_bytes(plan.apply(step)) == plan.temp_bytes < 0.9 * unplanned
    assert temp_bytes(step) == unplanned


@pytest.mark.slow
def test_planned_calls_and_others_train_alike(step):
    plan = statetx.plan(step, X, budget=0.85, of="temporaries")
    planned, net = plan.apply(step), step.net
    start = {k: s.value for k, s in net.states().items()}

    def trained(*steps):
        for k, s in net.states().items():
            s.value = start[k]
        for f in steps:
            f(X)
        return {k: s.value for k, s in net.states().items()}

    expected = trained(step, step, step)
    for steps in [(planned, planned, planned), (planned, step, planned), (step, planned, step)]:
        found = trained(*steps)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, expected)
    assert net.calls.value == 4


@pytest.mark.slow
def test_budget_around_a_traced_step(step):
    unplanned = temp_bytes(step)
    with statetx.budget(int(0.85 * unplanned)):
        assert temp_bytes(step) < 0.9 * unplanned


@pytest.mark.slow
def test_python_runs_once_for_each_setting(step):
    planned = statetx.plan(step, X, budget=0.85, of="temporaries").apply(step)
    planned(X), step(X)
    traces = step.net.traces
    for _ in range(3):
        planned(X), step(X)
    assert step.net.traces == traces
