"""`Plan.lower_bound`: the optimum of its integer program, and at most what compiled programs take."""

from __future__ import annotations

import itertools
import pickle
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import statetx
from statetx._targets import current
from statetx.planner import Planner, _bound, _turn
from statetx.planner._bound import lower_bound
from statetx.planner._capture import capture
from statetx.planner._dataflow import Dataflow

KIB = 1024


def bound_of(fun, *args, argnums: int | tuple[int, ...] = 0, baseline=1.0):
    """The bound; with the default baseline operations are absolute numbers."""
    return lower_bound(capture(fun, args, {}, argnums).gradients, None, baseline)


def flow_of(fun, *args, argnums=0):
    (gradient,) = capture(fun, args, {}, argnums).gradients
    return Dataflow(gradient.jaxpr, gradient.diff_indices, gradient.num_out)


def ones(*shape):
    return jnp.ones(shape)


def test_nothing_is_said_of_tpus(monkeypatch):
    """They hold values in memory that does not count as temporary: a plan may take fewer bytes than are held."""
    plan = Planner(chain, *CHAIN, argnums=0, of="temporaries").plan(1.0)
    assert "Lower bound" in str(plan)
    monkeypatch.setattr(current, "platform", lambda: "tpu")
    plan._bound, bound = lambda baseline: bound_of(chain, *CHAIN), bound_of(chain, *CHAIN)
    assert (bound.bytes_at(0.0), bound.operations_at(0), bound.status) == (0, 0.0, "relaxed")
    vars(plan).pop("lower_bound")
    assert "Lower bound" not in str(plan)


def test_bound_is_of_the_target_that_the_plan_was_made_for(monkeypatch):
    seen, here, problem = [], statetx.Target.here(), _bound._problem
    monkeypatch.setattr(_bound, "_problem", lambda *args: seen.append(current.current()) or problem(*args))
    with statetx.target(here):
        planner = Planner(chain, *CHAIN, argnums=0, of="temporaries")
    plan = planner.plan(1.0)
    assert plan.lower_bound.bytes_at(0.0) > 0 and seen == [here]


# -- values known by hand ----------------------------------------------------------------------------------------------


def chain(ws, x):
    for w in ws:
        x = jnp.sin(x @ w)
    return (x**2).mean()


CHAIN = [ones(8, 8)] * 4, ones(256, 8)
PRODUCT = 2 * 256 * 8 * 8  # operations
RESULT = 256 * 8 * 4  # bytes


def test_chain_of_products_holds_their_results_or_runs_them_again():
    # The sines are fused into whatever reads them, so the products alone are held. The first reads arguments only; each other
    # one that is not held reads the sine of the one before.
    bound = bound_of(chain, *CHAIN)
    for num_again in range(5):
        assert bound.bytes_at(num_again * PRODUCT) == (4 - num_again) * RESULT
        assert bound.bytes_at((num_again + 1) * PRODUCT - 1) == (4 - num_again) * RESULT
        assert bound.operations_at((4 - num_again) * RESULT) == pytest.approx(num_again * PRODUCT)
        if num_again:
            assert bound.operations_at((5 - num_again) * RESULT - 1) == pytest.approx(num_again * PRODUCT)
    assert bound.status == "exact"


def test_cheaper_of_two_values_is_run_again():
    def loss(ws, x):
        a, b = ws
        return ((jnp.sin(x @ a) * jnp.cos(x[:, :4] @ b)) ** 2).sum()

    # Both products have results of the same size; the second has half the operations.
    bound = bound_of(loss, [ones(8, 8), ones(4, 8)], ones(256, 8))
    assert bound.bytes_at(0) == 2 * RESULT
    assert bound.bytes_at(PRODUCT // 2) == RESULT
    assert bound.operations_at(RESULT) == pytest.approx(PRODUCT / 2)
    assert bound.bytes_at(PRODUCT) == RESULT and bound.bytes_at(1.5 * PRODUCT) == 0


def test_linear_program_holds_nothing():
    assert bound_of(lambda w, x: (x @ w).sum(), ones(8, 8), ones(256, 8)).bytes_at(0) == 0


def test_outputs_of_the_program_are_not_counted():
    kept = statetx.State(CHAIN[1])

    def loss(ws, x, is_kept):
        y = x @ ws[0]
        kept.value = y if is_kept else jnp.zeros_like(y)
        return chain(ws[1:], jnp.sin(y))

    # The memory of the new state holds the first product, or else another one until the turn: both are the program's to use.
    bounds = [bound_of(loss, *CHAIN, is_kept).bytes_at(0) for is_kept in (False, True)]
    assert bounds == [3 * RESULT, 2 * RESULT]


def test_values_that_fit_into_outputs_are_held_there():
    # Results of 32 KiB each, which fit into the gradient of the argument; the gradients of the weights are smaller.
    bound = bound_of(chain, *CHAIN, argnums=(0, 1))
    x_bytes = RESULT
    assert bound.bytes_at(0) == 4 * RESULT - x_bytes
    assert bound.bytes_at(PRODUCT) == 3 * RESULT - x_bytes


def test_same_value_twice_is_held_once():
    def loss(w, x):
        return ((jnp.sin(x @ w) * jnp.cos(x @ w)) ** 2).sum()

    bound = bound_of(loss, ones(8, 8), ones(256, 8))
    # XLA computes the product once, and counted operations allow for two runs of it: one more is free.
    assert bound.bytes_at(0) == 0


def scanned(ws, x):
    return (statetx.scan(lambda h, w: (jnp.sin(h @ w), None), x, ws)[0] ** 2).mean()


def test_scan_has_the_bound_of_its_steps():
    unrolled = bound_of(lambda ws, x: chain(list(ws), x), jnp.stack(CHAIN[0]), CHAIN[1])
    bound = bound_of(scanned, jnp.stack(CHAIN[0]), CHAIN[1])
    for num_again in range(5):
        # At most the unrolled program's, and below it by less than the carry of one step.
        x = num_again * PRODUCT
        assert unrolled.bytes_at(x) - RESULT <= bound.bytes_at(x) <= unrolled.bytes_at(x)
    assert bound.bytes_at(0) >= 3 * RESULT and bound.status == "relaxed"


def test_values_that_are_equal_in_all_steps_count_once():
    def loss(w, xs):
        def step(carry, x):
            h, w = carry
            return (jnp.sin(h + x * jnp.sin(w @ w)), w), None

        return (statetx.scan(step, (ones(8, 8), w), xs)[0][0] ** 2).sum()

    products = [n for n in flow_of(loss, ones(8, 8), ones(16, 8, 8)).nodes if n.fuses is False and not n.is_backward]
    sizes = {v.num_bytes for n in products for v in n.results}
    assert sizes == {256, 4}  # the product of two matrices, and the loss


# -- against all subsets -------------------------------------------------------------------------------------------------


def random_program(seed):
    """A few products, sines and sums, with arguments."""
    rng = random.Random(seed)
    widths = [rng.randint(1, 3) for _ in range(rng.randint(2, 4))]
    ws = [ones(a, b) for a, b in itertools.pairwise([2, *widths])]
    skips = [rng.random() < 0.5 for _ in ws]
    curved = [rng.random() < 0.7 for _ in ws]

    def loss(ws, x):
        seen = [x]
        for w, skip, is_curved in zip(ws, skips, curved, strict=True):
            y = seen[-1] @ w
            y = jnp.sin(y) if is_curved else y
            same = [z for z in seen if z.shape == y.shape]
            seen.append(y + rng_choice(same) if skip and same else y)
        return (seen[-1] ** 2).mean()

    def rng_choice(values):
        return values[seed % len(values)]

    return loss, ws, ones(64, 2)


def by_enumeration(flow):
    """For each set of held values: its bytes, and the operations that run again. By the definition of the turn, without solver."""
    turn = _turn.turn_of(flow)
    assert turn is not None
    needed = list(turn.reads)
    values = [
        v for n in needed for v in n.results if v.num_bytes >= 64 * 4
    ]  # smaller ones are free: it errs low as the test does
    outcomes = []
    for held in itertools.product((False, True), repeat=len(values)):
        available = {v for v, is_held in zip(values, held, strict=True) if is_held}
        again = set()

        def provide(value, available=available, again=again):
            if value not in available and value.producer not in again:
                again.add(value.producer)
                for reads in turn.reads[value.producer]:
                    for v in reads:
                        provide(v)

        for reads in turn.required:
            for v in reads:
                provide(v)
        outcomes.append((sum(v.num_bytes for v in available), sum(n.cost for n in again & turn.ran_before)))
    return outcomes


@pytest.mark.parametrize("seed", range(12))
def test_bound_is_the_best_of_all_subsets(seed):
    loss, ws, x = random_program(seed)
    outcomes = by_enumeration(flow_of(loss, ws, x))
    bound = bound_of(loss, ws, x)
    for operations in sorted({cost for _, cost in outcomes})[:12]:
        assert bound.bytes_at(operations) == min(b for b, cost in outcomes if cost <= operations)
    for num_bytes in sorted({b for b, _ in outcomes})[:12]:
        assert bound.operations_at(num_bytes) == pytest.approx(min(cost for b, cost in outcomes if b <= num_bytes))
    assert bound.status == "exact"


# -- against compiled programs -------------------------------------------------------------------------------------------


def attention(p, x):
    scores = jnp.einsum("btc,bsc->bts", x @ p["q"], x @ p["k"])
    return x + jax.nn.softmax(scores) @ x @ p["out"]


def perceptron(p, x):
    h = (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)
    return x + jax.nn.gelu(h @ p["up"]) @ p["down"]


def convolution(p, x):
    y = jax.lax.conv_general_dilated(
        x[..., None], p["kernel"][:, None, None], (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
    )
    return x + jax.nn.relu(y[..., 0] - y.mean())


SHAPES = {
    attention: {"q": (8, 8), "k": (8, 8), "out": (8, 8)},
    perceptron: {"up": (8, 32), "down": (32, 8)},
    convolution: {"kernel": (3,)},
}


def params_of(block, key):
    keys = jax.random.split(key, len(SHAPES[block]))
    return {name: jax.random.normal(k, shape) for (name, shape), k in zip(SHAPES[block].items(), keys, strict=True)}


_SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("block", "is_scanned"),
    [
        pytest.param(attention, False, marks=_SLOW, id="attention-unrolled"),
        pytest.param(attention, True, marks=_SLOW, id="attention-scanned"),
        pytest.param(perceptron, False, marks=_SLOW, id="perceptron-unrolled"),
        pytest.param(perceptron, True, marks=_SLOW, id="perceptron-scanned"),
        pytest.param(convolution, False, id="convolution-unrolled"),
        pytest.param(convolution, True, marks=_SLOW, id="convolution-scanned"),
    ],
)
def test_no_compiled_program_takes_less(block, is_scanned):
    shape = (16, 24) if block is convolution else (4, 32, 8)
    params = [params_of(block, key) for key in jax.random.split(jax.random.key(0), 4 if is_scanned else 2)]
    params = jax.tree.map(lambda *xs: jnp.stack(xs), *params) if is_scanned else params

    def loss(params, x, block=block):
        if is_scanned:
            x, _ = statetx.scan(lambda h, p: (block(p, h), None), x, params)
        else:
            for p in params:
                x = block(p, x)
        return (x**2).mean()

    args = params, ones(*shape)
    planner = Planner(loss, *args, argnums=0, of="temporaries")
    least, most = planner.ends()
    plans = [planner.plan(int(least + part * (most - least))) for part in (0.0, 0.5)]
    bound = plans[0].lower_bound
    costs = [(plan.temp_bytes, plan.extra_flops) for plan in plans]
    for policy in ("everything", "nothing"):
        rematerialized = statetx.remat(block, policy=policy)
        gradient = statetx.value_and_grad(lambda params, x, b=rematerialized: loss(params, x, block=b))
        cost = statetx.measure(gradient, *args, gradient=False)
        costs.append((cost.temp_bytes, cost.flops / plans[0].unplanned_flops - 1))

    assert 0 < bound.bytes_at(0.0) and 0 < bound.operations_at(0)
    for temp_bytes, extra in costs:
        assert bound.bytes_at(extra) <= temp_bytes
        assert bound.operations_at(temp_bytes) <= max(extra, 0.0)


# -- the numbers, as functions and on disk -------------------------------------------------------------------------------


def test_bound_is_monotone_and_above_its_relaxation():
    bound = bound_of(chain, *CHAIN)
    curve = bound.curve()
    assert [x for _, x in curve] == sorted((x for _, x in curve), reverse=True)
    assert [b for b, _ in curve] == sorted(b for b, _ in curve)
    assert curve[0][0] == 0 and curve[-1][1] == 0.0
    fresh = bound_of(chain, *CHAIN)
    previous = None
    for num_bytes, x in curve:
        exact = fresh.bytes_at(x)
        assert num_bytes <= exact and (previous is None or previous <= exact)
        previous = exact


@pytest.fixture(scope="module")
def plan():
    return statetx.plan(chain, *CHAIN, budget=0.9, argnums=0)


def test_bound_is_printed_beside_the_plan(plan):
    assert "Lower bound for any schedule:" in str(plan)
    assert "relaxed" not in repr(plan.lower_bound)


def test_bound_is_stored_with_the_plan(plan, tmp_path):
    asked = plan.lower_bound.bytes_at(0.05)
    plan.save(tmp_path / "plan.json")
    loaded = statetx.Plan.load(tmp_path / "plan.json")
    assert loaded == plan == pickle.loads(pickle.dumps(plan))
    assert loaded.lower_bound.bytes_at(0.05) == asked
    for x in np.linspace(0.0, 0.4, 9):  # what was not asked before is bounded by the relaxation
        assert loaded.lower_bound.bytes_at(x) <= plan.lower_bound.bytes_at(x)
        assert loaded.lower_bound.bytes_at(x) >= plan.lower_bound.bytes_at(x) - RESULT


def test_bound_of_a_step_counts_donated_outputs_as_arguments():
    def step(ws, x):
        return jax.tree.map(lambda w, g: w - 0.1 * g, ws, jax.grad(chain)(ws, x))

    args = [ones(8, 8)] * 4, ones(256, 8)
    wide = [ones(64, 64)] * 2, ones(64, 64)  # every result fits into the new parameters
    bounds = []
    for compiled, arrays in ((step, args), (step, wide), (jax.jit(step, donate_argnums=0), wide)):
        plan = statetx.plan(compiled, *arrays, budget=0.99, of="temporaries")
        bounds.append(plan.lower_bound.bytes_at(0.0))
    assert bounds == [4 * RESULT, 0, 2 * 64 * 64 * 4]


@pytest.mark.parametrize("kind", [jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit], ids=["auto", "explicit"])
def test_bound_of_a_sharded_program_counts_bytes_of_a_device(kind):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(kind,))
    spec = jax.sharding.PartitionSpec
    with jax.set_mesh(mesh):
        ws = [jax.device_put(w, jax.NamedSharding(mesh, spec())) for w in CHAIN[0]]
        x = jax.device_put(CHAIN[1], jax.NamedSharding(mesh, spec("data")))
        assert bound_of(chain, ws, x).bytes_at(0) == 4 * RESULT // 4


@pytest.mark.parametrize("kind", [jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit], ids=["auto", "explicit"])
def test_bound_of_a_sharded_step_counts_bytes_of_a_device(kind):
    """Its gradient is taken of tracers, which on automatic axes do not know how they are shared."""

    def step(ws, x):
        return jax.tree.map(lambda w, g: w - 0.1 * g, ws, jax.grad(chain)(ws, x))

    mesh = jax.make_mesh((4,), ("data",), axis_types=(kind,))
    spec = jax.sharding.PartitionSpec
    with jax.set_mesh(mesh):
        ws = [jax.device_put(w, jax.NamedSharding(mesh, spec())) for w in CHAIN[0]]
        x = jax.device_put(CHAIN[1], jax.NamedSharding(mesh, spec("data")))
        plan = statetx.plan(jax.jit(step), ws, x, budget=0.99, of="temporaries")
    assert plan.lower_bound.bytes_at(0.0) == 4 * RESULT // 4


def test_bounds_of_several_gradients():
    def step(ws, vs, x):
        return jax.grad(chain)(ws, x), jax.grad(lambda vs: chain(vs, jnp.cos(x)))(vs)

    args = [ones(8, 8)] * 4, [ones(8, 8)] * 2, ones(256, 8)
    captured = capture(step, args, {}, None)
    bound = lower_bound(captured.gradients, [], 1.0)
    assert len(captured.gradients) == 2
    assert bound.bytes_at(0) == 4 * RESULT  # at one of the two turns
    assert bound.operations_at(0) == pytest.approx(6 * PRODUCT)  # the backward pass of each runs its products again
    assert bound.operations_at(2 * RESULT) == pytest.approx(2 * PRODUCT)


def test_limit_of_the_solver_gives_a_lower_bound(monkeypatch):
    exact = bound_of(chain, *CHAIN)
    monkeypatch.setattr(_turn, "_MAX_NODES", 0)
    limited = bound_of(chain, *CHAIN)
    assert 0 < limited.bytes_at(1.5 * PRODUCT) <= exact.bytes_at(1.5 * PRODUCT)


def test_gradient_that_cannot_be_traced_again_has_no_bound():
    is_stale = False

    @jax.custom_vjp
    def f(x):
        return jnp.sin(x)

    def backward(x, ct):
        if is_stale:
            raise RuntimeError("the rule keeps what a first trace found")
        return (ct * jnp.cos(x),)

    f.defvjp(lambda x: (f(x), x), backward)
    plan = statetx.plan(lambda w, x: f(x @ w).sum(), ones(8, 8), ones(256, 8), budget=1.0, argnums=0)
    is_stale = True
    assert "Lower bound" not in str(plan)  # "0 B" would read as an error
    assert plan.lower_bound.status == "relaxed" and plan.lower_bound.bytes_at(0.0) == 0
