"""Gradients of JAX, of other libraries and of statetx inside of a planned step: they are seen, planned, and keep their
values.
"""

import brainstate
import jax
import jax.numpy as jnp
import optax
import pytest
from jax import grad as bound_grad
from jax.experimental import io_callback

import statetx
from helpers import assert_near, captured, temp_bytes
from statetx.planner import Planner
from statetx.testing import assert_same_step

D = 32
X = jax.random.normal(jax.random.key(9), (128, D))


def weights(seed, num):
    keys = jax.random.split(jax.random.key(seed), 2 * num)
    up = [jax.random.normal(k, (D, 4 * D)) / 6 for k in keys[:num]]
    down = [jax.random.normal(k, (4 * D, D)) / 12 for k in keys[num:]]
    return list(zip(up, down, strict=True))


def network(ws, x):
    for a, b in ws:
        x = x + jnp.tanh(jnp.sin(x @ a) @ b)
    return x


def loss(ws, x):
    return (network(ws, x) ** 2).mean()


def sgd(ws, grads):
    return jax.tree.map(lambda w, g: w - 0.1 * g, ws, grads)


WS = weights(0, 4)
FEW = WS[:2]


def total_bytes(fun, *args):
    memory = jax.jit(fun).lower(*args).compile().memory_analysis()
    return memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes


# -- which gradients are seen ----------------------------------------------------------------------------------------


def by_grad(ws, x):
    return sgd(ws, jax.grad(loss)(ws, x))


def by_bound_name(ws, x):
    return sgd(ws, bound_grad(loss)(ws, x))


def by_value_and_grad(ws, x):
    value, grads = jax.value_and_grad(lambda ws: (loss(ws, x), x.mean()), has_aux=True)(ws)
    return sgd(ws, grads), value


def by_vjp(ws, x):
    out, pullback = jax.vjp(network, ws, x)
    return sgd(ws, pullback(jnp.ones_like(out))[0])


def by_statetx(ws, x):
    return sgd(ws, statetx.grad(loss)(ws, x))


def by_jacrev(ws, x):
    return sgd(ws, jax.jacrev(loss)(ws, x))


def by_accumulation(ws, x):
    def add(total, part):
        return jax.tree.map(jnp.add, total, jax.grad(loss)(ws, part)), None

    zeros = jax.tree.map(jnp.zeros_like, ws)
    return sgd(ws, jax.lax.scan(add, zeros, x.reshape(2, -1, D))[0])


def beside_callback(ws, x):
    io_callback(lambda: None, None)
    return by_grad(ws, x)


STEPS = [by_grad, by_bound_name, by_value_and_grad, by_vjp, by_statetx, by_jacrev, by_accumulation, beside_callback]


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_one_gradient_is_captured(step):
    found, num = captured(step, WS, X), len(jax.tree.leaves(WS))
    (gradient,) = found.gradients
    # The weights at least: `jax.vjp` of all arguments differentiates the input too.
    assert found.is_step and len(gradient.diff_indices) in (num, num + 1)
    assert sum(e.primitive.name == "dot_general" for e in gradient.flat.eqns) == num


@pytest.mark.slow
@pytest.mark.parametrize(
    "step",
    [by_value_and_grad, by_bound_name, by_vjp],
    ids=lambda step: step.__name__,
)
def test_planned_step_keeps_the_budget_and_its_values(step):
    plan = statetx.plan(step, FEW, X, budget=0.8)
    assert plan.is_step and plan.extra_flops > 0
    assert total_bytes(plan.apply(step), FEW, X) == plan.total_bytes <= plan.budget_bytes
    assert plan.budget_bytes == pytest.approx(0.8 * plan.unplanned_total_bytes, abs=2)
    assert_near(jax.jit(plan.apply(step))(FEW, X), jax.jit(step)(FEW, X))
    assert_near(plan.apply(step)(FEW, X), jax.jit(step)(FEW, X))  # in eager code too


def test_auxiliary_output_has_no_cotangent():
    (gradient,) = captured(by_value_and_grad, WS, X).gradients
    assert gradient.num_out == 1 and len(gradient.jaxpr.outvars) == 2


def test_gradient_with_argnums_is_a_part_of_the_loss():
    def penalty(ws, x):
        return (jax.grad(lambda x: loss(ws, x))(x) ** 2).mean()

    assert not captured(penalty, WS, X, argnums=(0,)).is_step
    assert captured(penalty, WS, X).is_step


def test_forward_mode_is_not_a_gradient_to_plan():
    def linearized(ws, x):
        return jax.linearize(lambda ws: loss(ws, x), ws)[1](ws) + jax.jvp(lambda ws: loss(ws, x), (ws,), (ws,))[1]

    assert not captured(linearized, WS, X).is_step


def test_derivative_rules_are_not_planned():
    """A rule that calls `jax.vjp` in the backward pass, as flash attention does."""

    @jax.custom_vjp
    def wide(a, x):
        return jnp.sin(x @ a)

    def backward(residuals, ct):
        return jax.vjp(lambda a, x: jnp.sin(x @ a), *residuals)[1](ct)

    wide.defvjp(lambda a, x: (wide(a, x), (a, x)), backward)

    def step(ws, x):
        return sgd(ws, jax.grad(lambda ws: sum(wide(a, x).mean() for a, _ in ws))(ws))

    assert len(captured(step, WS, X).gradients) == 1


def test_small_gradients_are_left_alone():
    def step(ws, x):
        scale = jax.grad(lambda s: (s - 1.0) ** 2)(2.0)
        return sgd(ws, jax.tree.map(lambda g: scale * g, jax.grad(loss)(ws, x)))

    found = captured(step, FEW, X)
    assert len(found.gradients) == len(found.ignored) == 1
    plan = statetx.plan(step, FEW, X, budget=0.8, time_limit=0)
    assert plan.extra_flops > 0
    assert_near(jax.jit(plan.apply(step))(FEW, X), jax.jit(step)(FEW, X))


def test_step_that_writes_refs_in_its_gradient_is_planned():
    """A Ref refuses a tangent, which a value has if its equation has."""
    calls, last = jax.new_ref(jnp.zeros(())), jax.new_ref(jnp.zeros(()))

    def counted(ws, x):
        calls[...] += 1
        value = loss(ws, x)
        last[...] = jax.lax.stop_gradient(value)
        return value

    step = jax.jit(lambda ws, x: sgd(ws, jax.grad(counted)(ws, x)))
    assert len(captured(step, FEW, X).gradients) == 1
    assert statetx.memory_profile(step, FEW, X).num_devices == 1
    assert float(calls[...]) == 0


def test_what_examples_share_stays_shared_where_a_gradient_is_one_equation():
    calls = statetx.State(jnp.zeros(()))

    def counted(ws, x):
        calls.value += 1
        return loss(ws, x)

    program = captured(lambda x: statetx.vmap(statetx.grad(counted), in_axes=(None, 0))(FEW, x[:, None]), X[:3])
    (gradient,) = program.gradients
    assert gradient.context.num_examples == 3


def test_written_state_in_a_gradient_of_jax_still_leaks():
    seen = statetx.State(jnp.zeros(()))

    def counted(ws, x):
        seen.value = loss(ws, x)
        return seen.value

    for planned in (False, True):
        with pytest.raises(statetx.TraceLeakError):
            step = lambda ws, x: jax.grad(counted)(ws, x)
            captured(step, WS, X) if planned else jax.jit(step)(WS, X)
    assert float(seen.value) == 0


@pytest.mark.thorough
def test_states_of_a_planned_step_are_written_once():
    ps = [statetx.Param(w) for w in jax.tree.leaves(FEW)]
    calls = statetx.State(0)

    def stateful(x):
        calls.value += 1
        return loss(
            list(zip(ps[::2], ps[1::2], strict=True))
            and [(a.value, b.value) for a, b in zip(ps[::2], ps[1::2], strict=True)],
            x,
        )

    optimizer = statetx.Optimizer(optax.adam(1e-3), dict(enumerate(ps)))

    @statetx.jit
    def step(x):
        value, grads = statetx.value_and_grad(stateful, wrt=dict(enumerate(ps)))(x)
        optimizer.update(grads)
        return value

    plan = statetx.plan(step, X, budget=0.85, time_limit=0)
    assert plan.extra_flops > 0 and calls.value == 0
    planned = plan.apply(step)
    first, second = planned(X), planned(X)
    assert int(calls.value) == 2 and float(second) < float(first)


# -- several gradients -----------------------------------------------------------------------------------------------

GENERATOR, CRITIC = weights(1, 1), weights(2, 1)


def critic_loss(critic, generator, z, x):
    fake = jax.lax.stop_gradient(network(generator, z))
    return jax.nn.softplus(-network(critic, x).mean(-1)).mean() + jax.nn.softplus(network(critic, fake).mean(-1)).mean()


def generator_loss(generator, critic, z):
    return jax.nn.softplus(-network(critic, network(generator, z)).mean(-1)).mean()


def adversarial(generator, critic, z, x):
    critic = sgd(critic, jax.grad(critic_loss)(critic, generator, z, x))
    value, grads = jax.value_and_grad(generator_loss)(generator, critic, z)
    return sgd(generator, grads), critic, value


@pytest.mark.thorough
def test_two_networks_share_the_budget_of_the_step():
    args = (GENERATOR, CRITIC, X, X + 1)
    plan = statetx.plan(adversarial, *args, budget=0.65)
    assert total_bytes(plan.apply(adversarial), *args) == plan.total_bytes <= plan.budget_bytes
    assert_near(jax.jit(plan.apply(adversarial))(*args), jax.jit(adversarial)(*args))

    # Both gradients are rematerialized: neither alone takes the step that far.
    assert len(plan.gradients) == 2
    assert all(any(decision.saved is not None for decision in gradient.decisions) for gradient in plan.gradients)
    assert 0 < plan.extra_flops < 0.5 and plan.measured and plan.curve[0][0] <= plan.temp_bytes


def test_flax_gradient_of_a_module():
    nnx = pytest.importorskip("flax.nnx")
    model = nnx.Sequential(*[nnx.Linear(D, D, rngs=nnx.Rngs(i)) for i in range(4)])

    def step(x):
        grads = nnx.grad(lambda model: (model(jnp.tanh(x)) ** 2).mean())(model)
        return jax.tree.map(lambda g: -0.1 * g, nnx.to_pure_dict(grads))

    (gradient,) = captured(step, X).gradients
    assert len(gradient.diff_indices) == 8


# -- a budget around gradients ---------------------------------------------------------------------------------------


@statetx.remat(policy="fit")
def first_half(ws, x):
    return network(ws, x)


@statetx.remat(policy="fit")
def second_half(ws, x):
    return network(ws, x)


def halves(ws, x):
    return (second_half(ws[1:], first_half(ws[:1], x)) ** 2).mean()


@pytest.mark.slow
def test_functions_share_a_budget():
    budget = int(0.7 * temp_bytes(jax.grad(loss), FEW, X))

    @statetx.budget(budget)
    def step(ws, x):
        return jax.grad(halves)(ws, x)

    assert temp_bytes(step, FEW, X) <= budget
    assert_near(jax.jit(step)(FEW, X), jax.jit(jax.grad(loss))(FEW, X))

    # Each with the whole budget to itself, the halves take more together.
    half = lambda: statetx.remat(network, policy=f"fit:{budget // 1024}KiB")
    alone = lambda ws, x: (half()(ws[1:], half()(ws[:1], x)) ** 2).mean()
    assert temp_bytes(jax.grad(alone), FEW, X) > budget


@pytest.mark.slow
def test_budget_is_that_of_the_block_and_thread():
    traced = lambda: jax.eval_shape(jax.grad(halves), FEW, X)
    with pytest.raises(statetx.PolicyError, match=r"no statetx.budget\(...\) is around the gradient"):
        traced()
    with statetx.budget("1GiB"):
        traced()
    with pytest.raises(statetx.PolicyError):
        traced()
    with statetx.budget("1KiB"), pytest.raises(statetx.PlanError, match="keeps the budget of 1.0 KiB"):
        traced()
    with pytest.raises(statetx.PlanError, match="is not a size"), statetx.budget("fast"):
        pass


@pytest.mark.thorough
def test_jitted_function_is_traced_again_under_a_budget():
    traces = []

    @jax.jit
    def gradient(ws, x):
        traces.append(None)
        return jax.grad(loss)(ws, x)

    gradient(FEW, X)
    for _ in range(2):
        with statetx.budget("1GiB"):
            gradient(FEW, X)
    gradient(FEW, X)
    assert len(traces) == 2


def test_nothing_is_rewritten_outside_of_a_block():
    step = jax.make_jaxpr(jax.grad(loss))
    before = str(step(WS, X))
    with statetx.budget("1GiB"):
        pass
    assert str(step(WS, X)) == before


def test_derivatives_of_a_trace_that_only_finds_states_are_no_gradients_of_the_step():
    """`brainstate.transform.grad` traces the loss before it is differentiated, so that its inner derivatives are taken
    outside of any gradient there.
    """
    weight = brainstate.ParamState(jnp.ones(4))
    hidden = brainstate.HiddenState(jnp.zeros(4))

    def loss(x):
        hidden.value = brainstate.nn.exp_euler_step(lambda h: weight.value * x - h**3, hidden.value)
        return (hidden.value**2).mean()

    def step(x):
        with brainstate.environ.context(dt=0.1):
            gradients = brainstate.transform.grad(loss, {"weight": weight})(x)
            weight.value = weight.value - 0.1 * gradients["weight"]

    planner = Planner(step, jnp.ones(4))
    assert len(planner.captured.gradients) == planner.captured.num_taken == 1
    report = assert_same_step(step, planner.plan(1.0).apply(step), jnp.ones(4))
    assert report.error == 0
