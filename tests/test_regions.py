"""Where a program may be cut, plans with regions of several kinds, and regions that compute their inputs again from
what earlier regions keep.
"""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import statetx
from helpers import decided, flat
from statetx import _jax
from statetx._lift.context import TraceContext
from statetx._remat.stored import BITS
from statetx.planner import Planner
from statetx.planner._program import cuts as _cuts
from statetx.planner._search.lattice import Lattice
from statetx.planner._search.recorders import Recorded
from statetx.planner._treatments import TREATMENTS, rewrite
from statetx.planner._treatments.copies import Copies, Derived
from statetx.planner._treatments.proposals import front_of
from statetx.planner._treatments.treatment import Settings

X = jnp.ones((256, 64))
WS = [(jnp.eye(64) * (1 + 0.01 * i), jnp.eye(64) / (1 + 0.01 * i)) for i in range(4)]


def block(w, x):
    return x + jax.nn.gelu(x @ w[0]) @ w[1]


def loss(ws, x, block=block):
    for w in ws:
        x = block(w, x)
    return (x**2).mean()


def lattice(program, diff_indices=(0,), formats=()):
    return Lattice(program, diff_indices, 1, Settings(formats, treatments=TREATMENTS))


def test_layers_are_found_and_the_loss_is_cut_off():
    program = flat(loss, WS, X)
    (run,) = _cuts.candidates(program).runs[0]
    assert run.num == len(WS) and run.start == 0
    starts = [program.jaxpr.eqns[b].primitive.name for b in run.boundaries]
    assert starts == ["dot_general"] * 4 + ["integer_pow"], "each begins with its product; the loss comes after them"
    (run,) = _cuts.candidates(flat(lambda ws, x: block(ws[1], block(ws[0], x)), WS, X)).runs[0]
    assert run.num == 2, "and nothing else"


def test_cuts_of_most_periods_are_those_of_all():
    """The user's functions keep their ends, and the program around the periods its cuts."""
    run = _cuts.Run(start=4, period=3, num=3)
    assert _cuts._with_period([0, 2, 5, 8, 9, 14], run, {9}) == [0, 2, 4, 5, 8, 9, 11, 14]


def test_periods_begin_where_the_users_functions_do():
    program = flat(functools.partial(loss, block=statetx.remat(lambda w, x: jnp.tanh(block(w, jnp.sin(x))))), WS, X)
    (run,) = _cuts.candidates(program).runs[0]
    assert list(itertools.pairwise(run.boundaries)) == sorted(program.blocks)


def test_blocks_of_stages_are_found_though_two_stages_repeat():
    """As in a residual network: a stage begins with a block of another kind, and two stages with their neighbors are
    alike.
    """

    def first(w, x):
        return block(w, x) + jnp.cos(x @ w[1]) @ w[0]

    def stages(ws, x):
        for kind in "PbbPbbbPbbbbbPbb":
            x = first(ws[0], x) if kind == "P" else block(ws[0], x)
        return (x**2).mean()

    program = flat(stages, WS, X)
    runs = _cuts.candidates(program).runs[0]
    assert sum(run.num for run in runs) >= 10 and all(run.num > 1 for run in runs)
    of_block = len(flat(block, WS[0], X))
    assert {run.period for run in runs} == {of_block}


def test_products_that_repeat_in_a_layer_are_a_part_of_it():
    def layers(ws, x):
        for *inputs, out in ws:
            q, k, v = ((x @ w).reshape(8, 2, 8).transpose(1, 0, 2) for w in inputs)
            x = (q * k * v).transpose(1, 0, 2).reshape(8, 16) @ out
        return x.sum()

    program = flat(layers, [[jnp.ones((16, 16))] * 4] * 4, jnp.ones((8, 16)))
    assert len(program) == 4 * 14 + 1
    assert (0, 14, 4) in _cuts.candidates(program).runs[0]


def test_layers_of_other_sizes_repeat():
    ws = [(jnp.ones((2 ** (i + 3), 256)), jnp.ones((256, 2 ** (i + 4)))) for i in range(4)]

    def widening(ws, x):
        for w in ws:
            x = jnp.tanh(jnp.sin(x @ w[0]) @ w[1])
        return x.sum()

    (run,) = _cuts.candidates(flat(widening, ws, jnp.ones((8, 8)))).runs[0]
    assert run.num == 4


def layers(num, wrap=lambda f: f, together=1):
    """Products and activations of equal size; a marked function has several of them."""

    def part(ws, x):
        for w in ws:
            x = jnp.tanh(jnp.sin(x @ w))
        return x

    def loss(ws, x):
        for i in range(0, num, together):
            x = wrap(part)(ws[i : i + together], x)
        return (x**2).mean()

    return loss, [jnp.eye(16)] * num, jnp.ones((64, 16))


def test_periods_also_begin_behind_the_product():
    """A region that begins with an activation does not compute the product before it again."""
    fun, *args = layers(6)
    program = flat(fun, *args)
    (early,), (late,) = _cuts.candidates(program).runs[1:]
    assert [program.jaxpr.eqns[run.start].primitive.name for run in (early, late)] == ["dot_general", "sin"]
    assert late.num == 5, "the first product is in no period"


@pytest.mark.thorough
def test_cheapest_regions_in_little_memory_begin_with_activations():
    fun, ws, x = layers(6)
    program = flat(fun, ws, x)
    choices = [family.choose(7 * x.nbytes) for family in lattice(program, range(len(ws))).families]
    cheapest = min((c for c in choices if c is not None), key=lambda c: c.cost)
    starts = [program.jaxpr.eqns[region.start].primitive.name for region in cheapest.regions]
    assert "sin" in starts[1:]


@pytest.mark.slow
@pytest.mark.parametrize("is_marked", [False, True])
def test_plans_begin_regions_with_activations(is_marked):
    """A region of n layers that begins with the activation runs n - 1 products again, one that begins with the product
    all n.
    """
    (plain, *args), (marked, *_) = layers(24), layers(24, statetx.remat, together=4)
    base, blocks = (statetx.measure(statetx.value_and_grad(fun), *args, gradient=False) for fun in (plain, marked))
    plan = statetx.plan(marked if is_marked else plain, *args, budget=blocks.temp_bytes, argnums=0, of="temporaries")
    num_products = plan.extra_flops * base.flops / (2 * 64 * 16 * 16)
    assert num_products <= 0.75 * 24, "without such regions all but one"


def tied_layers(share, num=12):
    """Layers that share a weight with their neighbors, and mask their activations."""

    def loss(ws, x, us):
        masks = [jnp.where(u > 0.3, 1.0, 0.0) for u in us]
        for k in range(num):
            x = jnp.cos(jnp.sin(x @ ws[k // share]) * masks[k])
        return (x**2).mean()

    keys = iter(jax.random.split(jax.random.key(0), 2 * num + 1))
    ws = [jax.random.normal(next(keys), (16, 16)) / 4 for _ in range(num // share)]
    return (
        loss,
        ws,
        jax.random.normal(next(keys), (256, 16)),
        [jax.random.uniform(next(keys), (256, 16)) for _ in range(num)],
    )


@pytest.mark.slow
@pytest.mark.parametrize("share", [1, 2, 3])
def test_decisions_are_those_of_the_regions_own_fronts(share):
    """Two periods with one weight have another input list than two with two weights: `Decision.inputs` counts
    inputs.
    """
    loss, ws, *others = tied_layers(share)
    program = flat(loss, ws, *others)
    families = lattice(program, range(len(ws)), formats=(BITS,)).families
    assert len(families) > 1
    for family in families:
        least = family.least_peak()
        for limit in np.geomspace(least, 8 * least, 12):
            choice = family.choose(limit)
            assert choice.peak <= limit
            for region, option in zip(choice.regions, choice.options, strict=True):
                own = {o.decision: o for o in region.front.options}
                assert own[option.decision] == option


@pytest.mark.slow
@pytest.mark.parametrize("share", [2, 3])
def test_plans_of_layers_that_share_weights_have_equal_gradients(share):
    loss, *args = tied_layers(share)
    planner, expected = Planner(loss, *args, of="temporaries", argnums=0), jax.grad(loss)(*args)
    least = planner.ends()[0]
    for budget in (least, int(1.2 * least)):
        grads = jax.grad(planner.plan(budget).apply(loss))(*args)
        for a, b in zip(grads, expected, strict=True):
            np.testing.assert_allclose(a, b, atol=1e-6 * float(jnp.abs(b).max()))


@pytest.mark.thorough
def test_regions_are_a_union():
    """The user's functions, cuts within them, and several of them merged."""
    marked = flat(functools.partial(loss, block=statetx.remat(block)), WS, X)
    regions = lattice(marked, range(len(marked.jaxpr.invars) - 1)).regions
    blocks = sorted(marked.blocks)
    assert set(blocks) <= set(regions)
    assert (blocks[0][0], blocks[1][1]) in regions or (blocks[1][0], blocks[2][1]) in regions
    assert (blocks[-1][0], len(marked)) in regions, "the last one with the loss"
    assert all(regions[i].part is marked.blocks[i] for i in blocks)


def test_cotangents_that_wait_are_counted():
    """The cotangent of a skip connection is live beside its value during the backward passes between its readers."""

    def fun(w, x):
        y = jnp.sin(x @ w)
        return (jnp.tanh(jnp.tanh(y @ w) @ w) + y).sum()

    program = flat(fun, WS[0][0], X)
    names = [e.primitive.name for e in program.jaxpr.eqns]
    assert names == ["dot_general", "sin", "dot_general", "tanh", "dot_general", "tanh", "add", "reduce_sum"]
    found = lattice(program)
    assert found.region(0, 2).out_bytes == X.nbytes and found.region(0, 2).cotangent_bytes == 0
    assert found.region(2, 4).cotangent_bytes == X.nbytes, "it reads y, and so does the addition after it"
    assert found.region(4, 6).cotangent_bytes == X.nbytes
    assert found.region(6, 8).cotangent_bytes == 0


@pytest.mark.slow
@pytest.mark.parametrize("wrap", [lambda f: f, statetx.remat], ids=["unmarked", "marked"])
def test_memory_of_a_policy_on_the_blocks_is_reached(wrap):
    planner = Planner(functools.partial(loss, block=wrap(block)), WS, X, of="temporaries", argnums=0)
    for policy in ("nothing", "dots"):
        stock = functools.partial(loss, block=statetx.remat(block, policy=policy))
        cost = statetx.measure(jax.value_and_grad(stock), WS, X, gradient=False)
        plan = planner.plan(cost.temp_bytes)
        assert plan.temp_bytes <= cost.temp_bytes and plan.flops <= cost.flops
        assert plan.unplanned_flops == statetx.measure(jax.value_and_grad(loss), WS, X, gradient=False).flops


@pytest.mark.slow
def test_search_goes_on_where_a_limit_was_narrowed_before():
    """A spiking network over time: the peaks of its few options lie far apart."""

    @jax.custom_jvp
    def spike(v):
        return (v > 0).astype(v.dtype)

    spike.defjvp(lambda p, t: (spike(p[0]), t[0] / (1 + 10 * jnp.abs(p[0])) ** 2))
    normal = lambda key, *shape: jax.random.normal(jax.random.key(key), shape) / shape[0] ** 0.5
    ws = [normal(0, 64, 128), normal(1, 128, 128), normal(2, 128, 10)]
    xs = (jax.random.uniform(jax.random.key(8), (100, 32, 64)) < 0.2).astype(jnp.float32)

    def cell(ws, v, x):
        a = 0.9 * v[0] + x @ ws[0]
        s = spike(a - 1.0)
        b = 0.9 * v[1] + s @ ws[1]
        r = spike(b - 1.0)
        return (a * (1 - s), b * (1 - r)), r @ ws[2]

    def spiking(ws, xs, cell=cell):
        def step(carry, x):
            v, out = cell(ws, carry[0], x)
            return (v, carry[1] + out), None

        start = (jnp.zeros((32, 128)), jnp.zeros((32, 128))), jnp.zeros((32, 10))
        return (statetx.scan(step, start, xs)[0][1] ** 2).mean()

    full = functools.partial(spiking, cell=statetx.remat(cell))
    cost = statetx.measure(jax.value_and_grad(full), ws, xs, gradient=False)
    plan = statetx.plan(spiking, ws, xs, of="temporaries", budget=cost.temp_bytes, argnums=0)
    assert plan.extra_flops < 0.02 and cost.flops > 1.3 * plan.unplanned_flops


@pytest.mark.slow
def test_baseline_is_not_compiled_for_bytes_far_below_it():
    many = WS * 4
    least = Planner(loss, many, X, of="temporaries", argnums=0).ends()[0]
    planner = Planner(loss, many, X, of="temporaries", argnums=0)
    plan = planner.plan(least)
    assert plan.temp_bytes <= least
    assert [name for name, _, _ in plan.measured].count("no remat") == planner._search.baseline.is_started


@pytest.mark.slow
def test_plans_are_deterministic():
    programs = [Planner(loss, WS[:2], X, of="temporaries", argnums=0).plan(0.6).gradients for _ in range(2)]
    assert programs[0] == programs[1]


def shifted_halves(wrap):
    """Layers whose marked functions begin in the middle of one and end in the middle of the next."""

    @wrap
    def shifted(b, a, x, h):
        x = x + jnp.tanh(h @ b)
        return x, jnp.sin(x @ a)

    def loss(ws, x):
        h = jnp.sin(x @ ws[0][0])
        for (_, b), (a, _) in itertools.pairwise(ws):
            x, h = shifted(b, a, x, h)
        return ((x + jnp.tanh(h @ ws[-1][1])) ** 2).mean()

    return loss


def searches(loss, ws, x, budget):
    planner = statetx.planner.Planner(loss, ws, x, argnums=0, of="temporaries", time_limit=None)
    plan = planner.plan(budget)
    return plan, planner._search


@pytest.mark.slow
def test_marks_that_shift_the_layers_cost_little():
    """The regions of a program with marks contain those of the same program without."""
    keys = jax.random.split(jax.random.key(0), 12)
    ws = [(jax.random.normal(a, (16, 64)) / 4, jax.random.normal(b, (64, 16)) / 8) for a, b in zip(keys, keys[6:])]  # noqa: B905
    x = jax.random.normal(jax.random.key(1), (128, 16))
    marked, plain = (searches(shifted_halves(wrap), ws, x, 0.3)[0] for wrap in (statetx.remat, lambda f: f))
    assert marked.temp_bytes <= marked.budget_bytes
    assert marked.extra_flops <= 1.05 * plain.extra_flops


def chain(num, wrap=lambda layers: layers):
    """The loss of layers of which the first has a smaller input, each three of them as one function."""
    layers = wrap(lambda ws, x: functools.reduce(lambda x, w: jnp.tanh(x @ w), ws, x))

    def loss(ws, x):
        for first in range(0, num, 3):
            x = layers(ws[first : first + 3], x)
        return (x**2).mean()

    return loss, [0.1 * jnp.ones((8 if i == 0 else 64, 64)) for i in range(num)], jnp.ones((2048, 8))


@pytest.mark.slow
@pytest.mark.parametrize("num", [5, 10])
def test_unmarked_chains_reach_the_memory_of_segments_by_hand(num):
    """Segments that save nothing: XLA holds their outputs twice where they are saved, too."""
    by_hand, *args = chain(num, statetx.remat)
    budget = statetx.measure(statetx.value_and_grad(by_hand), *args, gradient=False).temp_bytes
    plan = statetx.plan(chain(num)[0], *args, argnums=0, of="temporaries", budget=int(1.02 * budget))
    assert plan.temp_bytes <= 1.02 * budget


def masked(wrap):
    """Layers that all read a mask, in their first halves: behind the last of these it is not alive."""
    layer = wrap(lambda w, x, mask: (y := x + jnp.tanh((x @ w[0]) * mask)) + jnp.tanh(y @ w[1]))

    def loss(ws, x, mask):
        doubled = 2 * mask
        return (functools.reduce(lambda x, w: layer(w, x, doubled), ws, x) ** 2).mean()

    return loss, WS, X, jnp.ones((256, 64))


@pytest.mark.slow
def test_layers_that_share_a_mask_cost_no_more_than_by_hand():
    by_hand, *args = masked(statetx.remat)
    budget = statetx.measure(statetx.value_and_grad(by_hand), *args, gradient=False)
    plan = statetx.plan(masked(lambda layer: layer)[0], *args, argnums=0, of="temporaries", budget=budget.temp_bytes)
    assert plan.flops <= budget.flops


@pytest.mark.sample
@pytest.mark.parametrize("time_limit", [0.0, 0.2])
def test_program_with_rematerialized_functions_keeps_its_own_budget_in_no_time(time_limit):
    layers = functools.partial(loss, block=statetx.remat(block))
    budget = statetx.measure(statetx.value_and_grad(layers), WS, X, gradient=False).temp_bytes
    plan = statetx.plan(layers, WS, X, argnums=0, of="temporaries", budget=budget, time_limit=time_limit)
    assert plan.temp_bytes <= budget


@pytest.mark.slow
def test_smallest_bytes_may_be_those_without_rematerialization():
    layer = statetx.remat(lambda w, x: jnp.tanh(x @ w))

    def small(ws, x):
        return (functools.reduce(lambda x, w: layer(w, x), ws, x) ** 2).mean()

    args = [jnp.eye(64)] * 3, jnp.ones((128, 64))
    with pytest.raises(statetx.PlanError) as error:
        statetx.plan(small, *args, argnums=0, of="temporaries", budget="1KiB")
    least = statetx.plan(small, *args, argnums=0, of="temporaries", budget=1.0).temp_bytes
    assert error.value.smallest_bytes <= least


# -- copies ----------------------------------------------------------------------------------------------------------


RAMP = jnp.linspace(0, 1, 256 * 64).reshape(256, 64)
PAIRS = [(jnp.full((64, 64), 0.01 * (i + 1)), jnp.full((64, 64), 0.02)) for i in range(4)]


def stream(ws, x):
    """Each layer adds a function of a product, which the backward pass reads, to the stream."""
    for a, b in ws:
        x = jnp.tanh(x + jnp.sin(jnp.cos(x @ a) @ b))
    return (x**2).mean()


def residual(ws, x):
    """Each layer adds a product: the backward pass reads the sum, not the product."""
    for a, b in ws:
        x = x + jnp.cos(x @ a) @ b
    return (x**2).mean()


def names(program, variables):
    return [e.primitive.name for e in program.jaxpr.eqns for v in e.outvars if v in variables]


def test_a_stream_is_derived_from_the_products_that_the_backward_pass_reads():
    program = flat(stream, PAIRS, RAMP)
    copies = Derived(program.jaxpr)
    tanhs = [e.outvars[0] for e in program.jaxpr.eqns if e.primitive.name == "tanh"]
    assert [names(program, copies.sources[v]) for v in tanhs] == [["dot_general"] * n for n in (1, 2, 3, 4)]
    assert not {"dot_general", "reduce_sum"} & {*names(program, copies.sources)}


def test_a_sum_of_products_is_kept_itself():
    program = flat(residual, PAIRS, RAMP)
    copies = Derived(program.jaxpr)
    derived = names(program, copies.sources)
    assert (derived.count("add"), derived.count("cos")) == (1, 4), (
        "the first sum has one computed term, to keep in its place"
    )


def test_a_deep_stream_is_kept_once_in_a_while():
    program = flat(stream, PAIRS * 5, RAMP)
    copies = Derived(program.jaxpr)
    tanhs = [e.outvars[0] for e in program.jaxpr.eqns if e.primitive.name == "tanh"]
    assert max(len(copies.sources[v]) for v in tanhs) < 12 < len(tanhs)


def with_scans(ws, x):
    """Each layer has an associative scan: many cheap equations between small products."""
    for a, b in ws:
        decay = jnp.exp(-jnp.square(x * a[:1]))
        merge = lambda p, q: (p[0] * q[0], q[0] * p[1] + q[1])
        x = x + jnp.tanh(jax.lax.associative_scan(merge, (decay, x))[1] @ b)
    return (x**2).mean()


@pytest.mark.parametrize(("fun", "x"), [(stream, RAMP), (with_scans, RAMP[:8, :8])], ids=["products", "scans"])
def test_a_region_holds_what_is_no_cheaper_to_copy_than_to_compute(fun, x):
    size = x.shape[1]
    program = flat(fun, [(a[:size, :size], b[:size, :size]) for a, b in PAIRS], x)
    start = max(i for i, e in enumerate(program.jaxpr.eqns) if e.primitive.name == "dot_general")
    part = program.part(start, len(program))  # the last product and the loss
    front = front_of(part, *[[True] * len(vs) for vs in (part.invars, part.invars, part.outvars)], Settings())
    variant = Copies.paths(program.jaxpr, Settings(), lambda front: [part])
    found, _ = variant.front(start, len(program), part, front)
    by_treatment = [[o for o in found.options if bool(o.decision.treatments) == copies] for copies in (True, False)]
    assert [bool(options) for options in by_treatment] == [fun is stream, True]
    assert min(o.saved_bytes for o in by_treatment[1]) >= part.invars[0].aval.size * 4, "the inputs"


@pytest.mark.slow
def test_copies_take_less_memory_and_compute_the_same():
    program = flat(stream, PAIRS, RAMP)
    parts = program.split([0, 6, 12, 18])
    assert [p.jaxpr.eqns[0].primitive.name for p in parts] == ["dot_general"] * 4
    keep = [(2, 0)]  # the second product of each layer
    planned = {c: rewrite(program.jaxpr, parts, [decided(keep, copies=c)] * 4) for c in (False, True)}
    indices = list(range(len(program.jaxpr.invars)))
    recorded = Recorded(program.jaxpr, 1, indices, indices, TraceContext())
    cost = {c: recorded.program(jaxpr, None).cost for c, jaxpr in planned.items()}
    assert cost[True].temp_bytes <= cost[False].temp_bytes - 1.9 * RAMP.nbytes, (
        "of three inputs two at a time are not kept"
    )
    assert cost[True].flops <= 1.01 * cost[False].flops

    args = [*jax.tree.leaves(PAIRS), RAMP]
    runs = [lambda *xs, j=j: _jax.evaluate(j, (), xs)[0] for j in (program.jaxpr, planned[True])]
    expected, found = (jax.jit(jax.grad(run, tuple(indices)))(*args) for run in runs)
    for a, b in zip(expected, found, strict=True):
        assert jnp.allclose(a, b, rtol=1e-4, atol=1e-7)
    again = [jax.grad(lambda *xs, run=run: jnp.sum(jax.grad(run, 1)(*xs) ** 2), tuple(indices)) for run in runs]
    for a, b in zip(*(jax.jit(second)(*args) for second in again), strict=True):
        assert jnp.any(a) and jnp.allclose(a, b, rtol=1e-3, atol=1e-5 * jnp.abs(a).max()), "second derivatives"
    backward = [
        e for e in jax.make_jaxpr(jax.grad(runs[1], tuple(indices)))(*args).eqns if e.primitive.name == "remat2"
    ]
    assert sorted(sum(v.aval.shape == RAMP.shape for v in e.invars) for e in backward) == [3, 4, 5, 5], (
        "no value beside its copy"
    )
    tangents = [jnp.ones_like(x) for x in args]
    expected, found = (jax.jvp(run, args, tangents) for run in runs)
    assert jnp.allclose(jnp.stack(expected), jnp.stack(found), rtol=1e-5)


@pytest.mark.slow
def test_paths_that_copy_are_cheaper_by_the_model():
    program = flat(stream, PAIRS, RAMP)
    families = Lattice(program, range(9), 1, Settings(treatments=TREATMENTS)).families
    assert len(families) == 2
    limit = 1.3 * families[0].least_peak()
    reference, copying = families[0].choose(limit), families[-1].choose(limit)
    assert reference is not None and copying is not None
    assert copying.cost < 0.9 * reference.cost
