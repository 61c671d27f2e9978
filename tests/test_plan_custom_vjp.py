"""Plans keep what the rule of a ``custom_vjp`` computes for its derivative, and policies see it there."""

from __future__ import annotations

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import statetx
from helpers import assert_same_gradients, decided, flat, staged
from statetx import _jax
from statetx._equations.compiler import num_compiled
from statetx._remat.mark import RULE
from statetx.planner import Plan, Planner
from statetx.planner._program.values import InFormat, derivative_of, labels_of, values_of
from statetx.planner._treatments import rewrite
from statetx.planner._treatments.graph import Graph
from statetx.planner._treatments.stored_inputs import holding

LAYERS, TIME, DIM = 3, 64, 32
X = jnp.asarray(np.random.default_rng(0).standard_normal((4, TIME, DIM)), jnp.float32)
WS = [jnp.asarray(np.random.default_rng(i).standard_normal((DIM, DIM)) / 8, jnp.float32) for i in range(LAYERS)]


@jax.custom_vjp
def attention(q, k, v):
    return forward(q, k, v)[0]


def forward(q, k, v):
    """Keeps the logarithm of each row's sum, which is no result of the function."""
    scores = jnp.einsum("btd,bsd->bts", q, k)
    log_sum = jax.nn.logsumexp(scores, -1, keepdims=True)
    out = jnp.einsum("bts,bsd->btd", jnp.exp(scores - log_sum), v)
    return out, (q, k, v, log_sum)


def backward(residuals, ct):
    q, k, v, log_sum = residuals
    weights = jnp.exp(jnp.einsum("btd,bsd->bts", q, k) - log_sum)
    ct_scores = weights * (
        jnp.einsum("btd,bsd->bts", ct, v) - (ct * jnp.einsum("bts,bsd->btd", weights, v)).sum(-1)[..., None]
    )
    of_k, of_v = (jnp.einsum("bts,btd->bsd", a, b) for a, b in ((ct_scores, q), (weights, ct)))
    return jnp.einsum("bts,bsd->btd", ct_scores, k), of_k, of_v


attention.defvjp(forward, backward)


def block(w, x):
    return x + jnp.sin(attention(x @ w, x, x) @ w)


def loss(ws, x, block=block):
    for w in ws:
        x = block(w, x)
    return (x**2).mean()


def marked(policy):
    return functools.partial(loss, block=statetx.remat(block, policy=policy))


def flops_of(fun):
    return statetx.measure(statetx.value_and_grad(fun), WS, X, gradient=False).flops


def test_values_of_a_rule_have_addresses_and_results_their_own():
    jaxpr = staged(block, WS[0], X)
    sites, results = values_of(jaxpr)
    (call,) = [i for i, e in enumerate(jaxpr.eqns) if e.primitive.name == "custom_vjp_call"]
    in_rule = {a: site for a, site in sites.items() if len(a) == 4}
    assert in_rule and all(a[:2] == (call, RULE) and site.address == a for a, site in in_rule.items())
    # The logarithm of the sums is among them; the result is saved as the result of the call.
    assert (4, TIME, 1) in {site.value.type.shape for site in in_rule.values()}
    assert results.keys() == {(call, 0)} and results[call, 0].eqn.primitive.name == "dot_general"


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["dots", "everything", "nothing"])
def test_stock_policies_of_the_planner_act_in_rules(policy):
    planner = Planner(marked("nothing"), WS, X, argnums=0, of="temporaries")
    found = {c.name: c for c in planner._search.stock_choices(2**40)}
    assert found[policy].compiled.flops == flops_of(marked(policy))


@pytest.mark.slow
def test_a_plan_keeps_what_the_rule_computes(tmp_path):
    plain, full = flops_of(loss), flops_of(marked("nothing"))
    dots = statetx.measure(statetx.value_and_grad(marked("dots")), WS, X, gradient=False).temp_bytes
    plan = statetx.plan(loss, WS, X, argnums=0, budget=int(0.8 * dots), of="temporaries")
    assert plan.flops - plain < (full - plain) / 4
    kept = [a for gradient in plan.gradients for d in gradient.decisions for a, _ in d.saved or ()]
    assert any(len(a) == 4 and a[1] == RULE for a in kept)
    assert_same_gradients(jax.jit(jax.grad(plan.apply(loss))), jax.jit(jax.grad(loss)), WS, X)

    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded == plan and flops_of(loaded.apply(loss)) == plan.flops


@pytest.mark.slow
def test_every_value_of_a_rule_can_be_kept():
    program = flat(loss, WS[:1], X)
    jaxpr, part = program.jaxpr, program.part(0, len(program))
    plain = jax.grad(lambda *args: _jax.evaluate(jaxpr, (), args)[0], argnums=(0, 1))
    for address in values_of(part.jaxpr).sites:
        rewritten = rewrite(jaxpr, [part], [decided([address])])
        planned = jax.grad(lambda *args, p=rewritten: _jax.evaluate(p, (), args)[0], argnums=(0, 1))
        assert_same_gradients(planned, plain, WS[0], X)


@pytest.mark.slow
def test_values_of_a_rule_in_a_loop():
    def scanned(ws, x):
        return (jax.lax.scan(lambda h, w: (block(w, h), None), x, ws)[0] ** 2).mean()

    ws = jnp.stack(WS * 4)
    for budget in (0.7, 0.5):
        plan = statetx.plan(scanned, ws, X, argnums=0, budget=budget, of="temporaries")
        assert plan.temp_bytes <= plan.budget_bytes
        assert_same_gradients(jax.grad(plan.apply(scanned)), jax.grad(scanned), ws, X)


def test_labels_of_a_rule_are_left_out_where_it_has_fewer_equations():
    labels = labels_of({(2, 0): "save", (1, RULE, 0, 0): "save", (1, RULE, 9, 0): "save"})
    assert labels[2, 0] == "save" and labels.keys() == {(2, 0), (1, RULE)}
    assert labels[1, RULE](staged(lambda x: jnp.sin(x), X)) == {(0, 0): "save"}


# -- numbers that are added up ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_losses_with_penalties_of_layers_are_planned():
    def with_penalties(ws, x):
        total = 0.0
        for w in ws:
            x = jnp.tanh(x @ w)
            total = total + jnp.abs(x).max()
        return (x**2).mean() + 0.01 * total

    ws = WS * 4
    plan = statetx.plan(with_penalties, ws, X, argnums=0, budget=0.9, of="temporaries")
    assert plan.temp_bytes <= plan.budget_bytes and plan.extra_flops > 0
    assert_same_gradients(jax.grad(plan.apply(with_penalties)), jax.grad(with_penalties), ws, X)


@jax.custom_vjp
def from_table(x, table):
    return jnp.tanh(x) * table[0]


from_table.defvjp(
    lambda x, table: (jnp.tanh(x), (x, table)),
    # A traced index does not index a NumPy array.
    lambda r, ct: (ct * r[1][jnp.argmax(r[0]) % 4] * (1 - jnp.tanh(r[0]) ** 2), jnp.zeros(4)),
)


@pytest.mark.parametrize("is_step", [False, True])
def test_rule_that_indexes_an_array_made_in_the_loss(is_step):
    def loss(w, x):
        return from_table(x @ w, jnp.array([0.1, 0.2, 0.3, 0.4])).mean()

    fun = jax.jit(jax.grad(loss)) if is_step else loss
    plan = statetx.plan(fun, WS[0], X[0], budget="1MiB")
    planned = plan.apply(fun) if is_step else jax.jit(jax.grad(plan.apply(loss)))
    np.testing.assert_allclose(planned(WS[0], X[0]), jax.grad(loss)(WS[0], X[0]), rtol=1e-5)


@pytest.mark.parametrize("how", ["fit", "budget"])
@pytest.mark.parametrize("is_jitted", [False, True])
def test_function_with_a_rule_that_closes_over_an_array(how, is_jitted):
    def grad_of(mask, policy=None):
        act = jax.custom_vjp(lambda v: jnp.tanh(v) * mask)
        act.defvjp(lambda v: (act(v), v), lambda r, ct: (ct * mask * (1 - jnp.tanh(r) ** 2),))
        loss = lambda w, x: act(act(x @ w) @ w).mean()
        return jax.grad(loss if policy is None else statetx.remat(loss, policy=policy))(WS[0], X[0])

    mask = jnp.linspace(0.0, 1.0, DIM)[None]
    run = functools.partial(grad_of, policy="fit:1MiB" if how == "fit" else None)
    # In a jit the mask is traced, and still has no gradient.
    with statetx.budget("1MiB") if how == "budget" else contextlib.nullcontext():
        found = jax.jit(run)(mask) if is_jitted else run(mask)
    np.testing.assert_allclose(found, grad_of(mask), rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("policy", [None, "fit:1MiB"])
def test_gradients_of_functions_without_operations(policy):
    with statetx.budget("1MiB"):
        for fun, expected in ((lambda x: x, 1.0), (lambda x: 2.0, 0.0)):
            fun = fun if policy is None else statetx.remat(fun, policy=policy)
            assert jax.grad(fun)(3.0) == expected


SCALE = np.linspace(0.1, 0.9, DIM, dtype=np.float32)  # an array that a rule closes over


@jax.custom_jvp
def scaled(h):
    return jnp.tanh(h)


@scaled.defjvp
def _(primals, tangents):
    return scaled(*primals), tangents[0] * primals[0] * SCALE


@jax.custom_vjp
def scaled_back(h):
    return jnp.tanh(h)


scaled_back.defvjp(lambda h: (jnp.tanh(h), (h, jnp.asarray(SCALE) * 2)), lambda res, ct: (ct * res[0] * res[1],))


@pytest.mark.parametrize("rule", [scaled, scaled_back])
def test_inputs_are_counted_beside_the_arrays_of_a_rule(rule):
    """The region reads `h` alone: not the bias that it adds, nor the large input that it sums."""

    def region(bias, h, large):
        return (rule(h) + bias).sum() + large.sum()

    arrays = jnp.ones(()), jnp.ones(DIM), jnp.ones((64, DIM))
    graph = Graph(staged(region, *arrays), [True] * 3, [True] * 3, [True])
    baseline, nothing = graph.baseline(), graph.option({})
    assert [graph.inputs_read(option.decision) for option in (baseline, nothing)] == [{1}, {1}]
    held = [holding(graph, baseline, {i: InFormat("bits")}, {}).saved_bytes - baseline.saved_bytes for i in range(3)]
    assert held == [0, arrays[1].nbytes, 0]


@jax.custom_vjp
def with_scale(h):
    return jnp.tanh(h), jnp.array(2)


with_scale.defvjp(lambda h: ((jnp.tanh(h), jnp.array(2)), jnp.cos(h)), lambda res, ct: (ct[0] * res,))


def test_a_result_of_a_rule_may_be_a_constant():
    """It is a literal among the rule's outputs, and, under a mark, among the residuals."""

    def region(h):
        out, scale = with_scale(h)
        return jnp.sin(out * scale)

    graph = Graph(staged(region, jnp.ones(DIM)), [True], [True], [True])
    assert graph.option({}).saved_bytes < graph.baseline().saved_bytes
    for option in (graph.option({}), graph.baseline()):
        assert graph.program(option.decision) is not None


@pytest.mark.sample("slow")
@pytest.mark.parametrize("rule", [scaled, scaled_back])
def test_loop_whose_rule_holds_an_array_is_planned(rule):
    def loss(w, xs):
        def step(h, x):
            h = rule(h * x * w)
            return h, h.sum()

        return jax.lax.scan(step, jnp.ones(DIM), xs)[1].mean()

    args = jnp.ones(DIM), jnp.ones((TIME, DIM))
    plan = statetx.plan(loss, *args, budget=0.75)
    assert plan.total_bytes <= plan.budget_bytes
    gradient = functools.partial(jax.grad, argnums=(0, 1))
    assert_same_gradients(gradient(plan.apply(loss)), gradient(loss), *args)


def test_a_rule_that_refuses_an_operand_of_a_region_leaves_jax_its_record():
    @jax.custom_vjp
    def solve(x, t):
        return jnp.sin(x) * t

    def forward(x, t):
        if t.perturbed:
            raise TypeError("t cannot be differentiated")
        return solve(x.value, t.value), x.value

    solve.defvjp(forward, lambda x, ct: (ct * jnp.cos(x), None), symbolic_zeros=True)
    jaxpr = jax.make_jaxpr(solve)(1.0, 2.0).jaxpr
    run = lambda x: jax.core.eval_jaxpr(jaxpr, (), x, 2.0)[0]
    _, pull = jax.vjp(run, 1.0)
    with pytest.raises(TypeError, match="t cannot"):
        derivative_of(jaxpr, [0, 1], [0])
    np.testing.assert_allclose(pull(1.0)[0], np.cos(1.0), rtol=1e-6)


# -- a derivative that no plan divides -------------------------------------------------------------------------------


@jax.custom_vjp
def solve(w, x):
    return jax.lax.while_loop(lambda c: c[0] < 16, lambda c: (c[0] + 1, jnp.tanh(c[1] @ w)), (0, x))[1]


def solve_backward(inputs, ct):
    """Runs all steps again before it reverses them, as a solver with checkpoints does between two of them."""
    w, x = inputs
    step = lambda i, c: (jnp.tanh(c[0] @ w), c[1].at[i].set(c[0]))
    _, xs = jax.lax.fori_loop(0, 16, step, (x, jnp.zeros((16, *x.shape))))

    def reverse(i, cts):
        of_w, of_x = jax.vjp(lambda w, x: jnp.tanh(x @ w), w, xs[15 - i])[1](cts[1])
        return cts[0] + of_w, of_x

    return jax.lax.fori_loop(0, 16, reverse, (jnp.zeros_like(w), ct))


solve.defvjp(lambda w, x: (solve(w, x), (w, x)), solve_backward)


def test_a_budget_below_one_derivative_is_refused_without_a_search_and_the_equation_named():
    def loss(w, x):
        return jnp.mean(solve(w, jnp.sin(x @ w)) ** 2)

    planner, before = Planner(loss, jnp.eye(8), jnp.ones((64, 8)), of="temporaries"), num_compiled()
    with pytest.raises(statetx.PlanError, match=r"one operation takes .* custom_vjp_call at .*test_plan_custom_vjp"):
        planner.plan(0.5)
    assert num_compiled() - before <= 4, "the program, the equation, remat on the blocks, the program exactly"
