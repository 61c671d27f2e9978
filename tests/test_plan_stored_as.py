"""Plans that store values in fewer bits: which they take, what they hold, and equal gradients."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import statetx
from helpers import decided, flat
from statetx import _jax
from statetx._loops.strategy import Lengths, Slots
from statetx._remat.stored import BITS
from statetx.planner import Planner
from statetx.planner._program.values import KEEP, InFormat
from statetx.planner._treatments import TREATMENTS, UNPLANNED, rewrite
from statetx.planner._treatments.graph import Graph
from statetx.planner._treatments.groups import Groups
from statetx.planner._treatments.loops import CheckpointedLoop
from statetx.planner._treatments.proposals import front_of
from statetx.planner._treatments.treatment import Decision, Settings

KEYS = jax.random.split(jax.random.key(0), 9)
WS = [jax.random.normal(key, (32, 32)) * 0.5 for key in KEYS[1:]]
SPIKES = (jax.random.uniform(KEYS[0], (32, 16, 32)) < 0.2).astype(jnp.float32)  # time, batch, neurons
FEW, X = WS[:5], jax.random.normal(KEYS[0], (256, 32))


@jax.jit
@jax.custom_jvp
def spike(v):
    return (v > 0).astype(v.dtype)


spike.__wrapped__.defjvp(lambda primals, tangents: (spike(primals[0]), tangents[0] / (1 + jnp.abs(primals[0])) ** 2))


def layer(x, w):
    def step(v, current):
        v = 0.9 * v + current
        return v, spike(v - 1)

    return lax.scan(step, jnp.zeros_like(x[0]), x @ w)[1]


def spiking(ws, x):
    for w in ws:
        x = layer(x, w)
    return (x.mean(0) ** 2).sum()


def masked(ws, x):
    """The derivative of a layer reads the mask and the input, not the product."""
    for w in ws:
        y = x @ w
        x = jnp.where(y > 0, y, -0.1 * y)
    return (x**2).mean()


def gradient_of(fun, *args):
    return jax.jit(jax.grad(fun)).lower(*args).compile()


def planner(fun, *args, **options):
    return Planner(fun, *args, argnums=0, of="temporaries", **options)


@functools.cache
def spiking_planner(stored_as=("bits",)):
    return planner(spiking, WS, SPIKES, stored_as=stored_as)


def assert_equal(fun, planned, *args):
    expected, found = jax.jit(jax.grad(fun))(*args), jax.jit(jax.grad(planned))(*args)
    assert max(float(jnp.abs(g).max()) for g in expected) > 0
    jax.tree.map(np.testing.assert_array_equal, found, expected)


# -- spikes between layers -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_layers_that_read_spikes_hold_them_as_bits():
    least, most = spiking_planner().ends()
    floats, _ = spiking_planner(()).ends()
    assert least < 0.7 * floats  # what is left is the working memory of one layer

    plan = spiking_planner().plan((least + floats) // 2)
    assert any("as bits" in line for line in plan.groups)
    assert gradient_of(plan.apply(spiking), WS, SPIKES).memory_analysis().temp_size_in_bytes <= plan.budget_bytes + 256
    assert plan.budget_bytes < floats < most
    assert_equal(spiking, plan.apply(spiking), WS, SPIKES)


@pytest.mark.slow
def test_what_bits_take_is_what_remat_takes_with_them():
    def loss(block, ws, x):
        for w in ws:
            x = block(x, w)
        return (x.mean(0) ** 2).sum()

    declared = statetx.remat(layer, inputs_stored_as=("bits", None))
    ws = WS[:3]
    by_hand = gradient_of(lambda ws, x: loss(declared, ws, x), ws, SPIKES).memory_analysis().temp_size_in_bytes
    assert planner(spiking, ws, SPIKES).ends()[0] <= 1.02 * by_hand


@pytest.mark.slow
def test_layers_with_loops_reach_what_remat_of_the_layers_takes():
    def loss(ws, x):
        for w in ws:
            x = statetx.remat(layer)(x, w)
        return (x.mean(0) ** 2).sum()

    by_hand = gradient_of(loss, WS, SPIKES).memory_analysis().temp_size_in_bytes
    plan = spiking_planner(()).plan(by_hand)
    assert plan.temp_bytes <= by_hand and plan.extra_flops <= 0.34


# -- choices of a region ---------------------------------------------------------------------------------------------


def graph_of(fun, *args, formats=(BITS,)):
    program = flat(fun, *args).jaxpr
    return Graph(program, [False] * len(args), [True] * len(args), [True], formats=formats)


def random_region(seed):
    rng = random.Random(seed)

    def fun(x, w):
        values = [x]
        for _ in range(rng.randint(3, 5)):
            v, u = rng.choice(values[-3:]), rng.choice(values)
            op = rng.choice([lambda v, u: jnp.tanh(v @ w), lambda v, u: jnp.where(v > u, v, 2 * u), lambda v, u: v * u])
            values.append(op(v, u))
        return sum(v.sum() for v in values[1:])

    return fun


@pytest.mark.parametrize("seed", range(8))
def test_front_is_the_optimum_with_and_without_bits(seed):
    """Against every set of saved values, each kept or stored."""
    graph = graph_of(random_region(seed), jnp.ones((6, 16)), jnp.ones((16, 16)))
    useful = sorted(set(graph._address_of.values()))
    assert 1 <= len(useful) <= 14
    every = []
    for n in range(len(useful) + 1):
        for saved in map(frozenset, itertools.combinations(useful, n)):
            smaller = sorted(saved & graph.smaller.keys())
            sets = itertools.chain(*(itertools.combinations(smaller, k) for k in range(len(smaller) + 1)))
            every += [graph.option(dict.fromkeys(saved, KEEP) | {a: graph.smaller[a] for a in some}) for some in sets]
    options = graph.front_finder()()
    for limit in sorted({o.saved_bytes for o in every}):
        best = min(o.cost for o in every if o.saved_bytes <= limit)
        assert min(o.cost for o in options if o.saved_bytes <= limit) <= 1.02 * best + 1


def test_bytes_and_cost_of_a_stored_value():
    graph = graph_of(lambda w, x: jnp.where(x @ w > 0, x @ w, 0.0).sum(), WS[0], X)
    ((mask),) = [a for a in graph.smaller if graph.sites[a].value.type.dtype == bool]
    kept, stored = graph.option({mask: KEEP}), graph.option({mask: InFormat("bits")})
    assert (kept.saved_bytes, stored.saved_bytes) == (256 * 32, 256 * 32 // 8)
    assert 0 < stored.cost - kept.cost <= 8 * 256 * 32  # compare, shift, or; shift, and, compare
    assert stored.decision.saved == {(mask, InFormat("bits"))} and kept.decision.saved == {(mask, KEEP)}


def test_no_value_is_stored_without_formats():
    graph = graph_of(lambda w, x: jnp.where(x @ w > 0, x @ w, 0.0).sum(), WS[0], X, formats=())
    assert not graph.smaller and all({*dict(o.decision.saved or ()).values()} <= {KEEP} for o in graph.front_finder()())


def test_small_values_are_no_choice():
    def fun(w, x):
        y = x @ w
        return jnp.where(y > 0, y, 0.0).sum() + jnp.where(y[:2] > 1, y[:2], 0.0).sum()

    graph = graph_of(fun, WS[0], X)
    masks = [a for a, site in graph.sites.items() if site.value.type.dtype == bool]
    assert sorted(graph.sites[a].value.type.shape for a in masks) == [(2, 32), (256, 32)]
    assert [graph.sites[a].value.type.shape for a in masks if a in graph.smaller] == [(256, 32)]


@pytest.mark.parametrize("loop", [Lengths(8), Lengths(2, 4)])
def test_steps_of_a_loop_keep_bits(loop):
    def fun(w, x):
        def step(h, x):
            y = jnp.tanh(h @ w) + x
            return jnp.where(y > 0.1, y, 0.5 * y), None

        return (lax.scan(step, jnp.zeros((16, 32)), x)[0] ** 2).sum()

    x = jax.random.normal(KEYS[0], (8, 16, 32))
    program = flat(fun, WS[0], x)
    parts = program.split()
    (n, part) = next((n, p) for n, p in enumerate(parts) if p.eqn is not None)
    mask = next((i, 0) for i, e in enumerate(part.jaxpr.eqns) if e.primitive.name == "gt")
    option = decided([mask], loop=loop, stored=[(mask, "bits")])
    options = [option if k == n else UNPLANNED for k in range(len(parts))]
    planned = rewrite(program.jaxpr, parts, options)
    gradient = jax.grad(lambda w: _jax.evaluate(planned, (), [w, x])[0])
    assert "u8[" in str(jax.make_jaxpr(gradient)(WS[0]))
    np.testing.assert_allclose(gradient(WS[0]), jax.grad(fun)(WS[0], x), rtol=1e-5, atol=1e-6)


def dropped(ws, x):
    """Floats of 0 and 1, and masks."""
    for w in ws:
        y = x @ w
        mask = jax.random.bernoulli(jax.random.key(1), 0.5, y.shape)
        x = jnp.where(y > 0, jnp.sin(y), y * 0.1) * mask.astype(y.dtype) + x
    return (x**2).mean()


@pytest.mark.slow
@pytest.mark.parametrize("num", [2, 5])
def test_plans_under_strict_promotion(num):
    with jax.numpy_dtype_promotion("strict"):
        plan = planner(dropped, WS[:num], X).plan(0.8)
        assert num == 2 or any("as bits" in line for line in plan.groups)
        assert_equal(dropped, plan.apply(dropped), WS[:num], X)


# -- formats that round ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_values_are_rounded_only_when_asked():
    exact, rounding = planner(masked, FEW, X), planner(masked, FEW, X, stored_as=("bits", "bfloat16"))
    budget = int(0.65 * exact.ends()[1])
    plan, rounded = exact.plan(budget), rounding.plan(budget)
    decisions = [{row.decision for row in p.rows} for p in (plan, rounded)]
    assert "keep as bfloat16" in decisions[1] and "keep as bfloat16" not in decisions[0]
    assert rounded.extra_flops < plan.extra_flops
    assert_equal(masked, plan.apply(masked), FEW, X)

    # The value is that of the program itself; gradients differ by what is rounded, to 8 bits.
    np.testing.assert_array_equal(jax.jit(rounded.apply(masked))(FEW, X), jax.jit(masked)(FEW, X))
    for a, b in zip(jax.grad(rounded.apply(masked))(FEW, X), jax.grad(masked)(FEW, X), strict=True):
        np.testing.assert_allclose(a, b, atol=2**-6 * float(jnp.abs(b).max()))


# -- carries of loops ------------------------------------------------------------------------------------------------

LENGTH, DELAY, CURRENTS = 48, 8, jax.random.normal(KEYS[0], (48, 8, 64))
W = jax.random.normal(KEYS[1], (64, 64)) * 0.2
NEURONS = CURRENTS[0].nbytes


def delayed(w, currents, first=None):
    """Spikes arrive after `DELAY` steps. The line of those on their way is carried: 8/9 of the carry."""
    first = jnp.zeros((DELAY, 8, 64)) if first is None else first

    def step(carry, current):
        v, line = carry
        v = 0.9 * v * (1 - line[0]) + current + line[-1] @ w
        return (v, jnp.concatenate([spike(v - 1)[None], line[:-1]])), None

    (v, line), _ = lax.scan(step, (jnp.zeros_like(currents[0]), first), currents)
    return (v**2).sum() + line.mean()


def refractory(w, currents, first):
    """The spikes of the step before keep a neuron from the next one, whatever the first ones are."""

    def step(carry, current):
        v, spikes = carry
        v = (0.9 * v + current + spikes @ w) * (1 - spikes)
        return (v, spike(v - 1)), None

    v, spikes = lax.scan(step, (jnp.zeros_like(currents[0]), first), currents)[0]
    return (v**2).sum() + spikes.mean()


@functools.cache
def delayed_planner(stored_as=("bits",)):
    return planner(delayed, W, CURRENTS, stored_as=stored_as)


@pytest.mark.slow
def test_slots_of_a_planned_loop_hold_spikes_as_bits():
    least, most = delayed_planner().ends()
    floats, _ = delayed_planner(()).ends()
    assert least < floats - 0.9 * DELAY * NEURONS

    budget = int(1.15 * floats)
    plan, of_floats = delayed_planner().plan(budget), delayed_planner(()).plan(budget)
    assert plan.extra_flops < 0.5 * of_floats.extra_flops
    assert plan.loops[0].endswith("1 of the 2 arrays in its carry as bits (512 B in place of 16.0 KiB).")
    assert "as bits" in str(plan)
    compiled = gradient_of(plan.apply(delayed), W, CURRENTS).memory_analysis().temp_size_in_bytes
    assert abs(compiled - plan.temp_bytes) <= 256 and compiled <= budget < 0.4 * most
    assert abs(plan.predicted_bytes - compiled) <= 0.25 * compiled
    assert_equal(delayed, plan.apply(delayed), W, CURRENTS)


@pytest.mark.slow
def test_loops_in_loops_of_a_plan_hold_spikes_as_bits():
    budget = int(0.5 * delayed_planner().ends()[1])
    plan, of_floats = delayed_planner().plan(budget), delayed_planner(()).plan(budget)
    assert "as bits" in plan.loops[0] and "Slots" not in plan.loops[0]
    assert plan.temp_bytes <= budget and plan.extra_flops < 0.5 * of_floats.extra_flops
    for a, b in zip(*(jax.jit(jax.grad(f))(W, CURRENTS) for f in (plan.apply(delayed), delayed)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4 * float(jnp.abs(b).max()))


def loop_part(fun, *args):
    program = flat(fun, *args)
    parts = program.split()
    return program, parts, next(n for n, part in enumerate(parts) if part.eqn is not None)


def with_option(fun, args, option):
    """The program with this option for its loop."""
    program, parts, n = loop_part(fun, *args)
    options = [option if k == n else UNPLANNED for k in range(len(parts))]
    planned = rewrite(program.jaxpr, parts, options)
    return lambda *args: _jax.evaluate(planned, (), list(args))[0]


def with_bits(option):
    return Decision(
        option.saved, (dataclasses.replace(option.get(CheckpointedLoop), carries=((1, InFormat("bits")),)),)
    )


TWO_GROUPS = Groups(((24, decided([], loop=Lengths(4, 6))), (24, decided([], loop=Lengths(24)))))
LOOPS = {
    "one level": (decided([], loop=Lengths(48)), 48),
    "two levels": (decided([], loop=Lengths(8, 6)), 8 + 6),
    "fenced": (decided([], loop=Lengths(8, 6), fenced=True), 8 + 6),
    "three levels": (decided([], loop=Lengths(4, 4, 3)), 4 + 4 + 3),
    "slots": (decided(loop=Slots(9)), 9),
    "groups": (decided(loop=TWO_GROUPS, fenced=True), 24 + 4),
}


@pytest.mark.sample
@pytest.mark.parametrize(("option", "num"), LOOPS.values(), ids=LOOPS)
@pytest.mark.parametrize("fun", [delayed, refractory])
def test_a_rewritten_loop_stores_bits(fun, option, num):
    args = (W, CURRENTS) if fun is delayed else (W, CURRENTS, jnp.full((8, 64), 0.3))
    programs = [gradient_of(with_option(fun, args, o), *args) for o in (option, with_bits(option))]
    exact, stored = programs
    np.testing.assert_array_equal(stored(*args), exact(*args))
    np.testing.assert_allclose(stored(*args), jax.grad(fun)(*args), rtol=1e-4, atol=1e-3)
    before, after = (program.memory_analysis().temp_size_in_bytes for program in programs)
    leaf = (DELAY if fun is delayed else 1) * NEURONS
    # One decoded leaf may be in use, and that of a turn.
    assert after <= before - num * leaf * 31 // 32 + 2 * leaf + 1024


def carries_of(fun, *args):
    """The leaves that a plan may store as bits, and whether the first one is proved to be 0 or 1, too."""
    _, parts, n = loop_part(fun, *args)
    return dict(parts[n].bit_carries)


def test_carries_are_proved_by_induction():
    line, spikes = jnp.zeros((DELAY, 8, 64)), jnp.zeros((8, 64))
    assert carries_of(delayed, W, CURRENTS) == {1: True}
    assert carries_of(lambda w, x: delayed(w, x, (x[:DELAY] > 0).astype(x.dtype)), W, CURRENTS) == {1: True}
    assert carries_of(delayed, W, CURRENTS, line) == {}  # of an argument nothing is known
    assert carries_of(refractory, W, CURRENTS, spikes) == {1: False}
    assert carries_of(lambda w, x: refractory(w, x, jnp.ones_like(spikes)), W, CURRENTS) == {1: True}

    def swapping(first, xs):  # the third leaf gets what the second had: neither stays 0 or 1
        step = lambda c, x: ((spike(x) * c[0], c[2] + x, c[1]), None)
        return lax.scan(step, (first, first, first), xs)[0][2].sum()

    assert carries_of(lambda xs: swapping(jnp.ones(64), xs), CURRENTS[:, 0]) == {0: True}


def test_a_loop_without_bits_has_the_options_of_one_without_formats():
    def options(fun, formats, *args):
        _, parts, n = loop_part(fun, *args)
        part, num = parts[n], len(parts[n].invars)
        flags = [True] * num, [True] * num, [True] * len(part.outvars)
        return front_of(part, *flags, Settings(formats, treatments=TREATMENTS)).options

    def recurrent(w, xs):
        return lax.scan(lambda h, x: (jnp.sin(h @ w + x), None), xs[0], xs)[0].sum()

    assert options(recurrent, (BITS,), W, CURRENTS) == options(recurrent, (), W, CURRENTS)
    loops = lambda formats: [o.decision.get(CheckpointedLoop) for o in options(delayed, formats, W, CURRENTS)]
    assert not any(loop.carries for loop in loops(()) if loop is not None)
    stored = [loop for loop in loops((BITS,)) if loop is not None and loop.carries]
    assert {type(loop.strategy) for loop in stored} >= {Lengths, Slots}
    assert {loop.carries for loop in stored} == {((1, InFormat("bits")),)}


@pytest.mark.slow
def test_small_leaves_are_no_choice():
    def fun(w, xs):
        def step(carry, x):
            h, is_on = carry
            return (jnp.sin(h @ w + x), spike(h[:, :1]) * is_on), None

        h, is_on = lax.scan(step, (xs[0], jnp.ones((8, 1))), xs)[0]
        return h.sum() + is_on.sum()

    assert carries_of(fun, W, CURRENTS) == {1: True}
    assert all(planner(fun, W, CURRENTS).plan(fraction).loops[0].count("as bits") == 0 for fraction in (0.3, 0.6))


@pytest.mark.slow
def test_a_stored_plan_of_a_loop_stores_the_same(tmp_path):
    plan = delayed_planner().plan(int(1.15 * delayed_planner(()).ends()[0]))
    plan.save(tmp_path / "plan.json")
    loaded = statetx.Plan.load(tmp_path / "plan.json")
    assert loaded == plan and loaded.loops == plan.loops
    assert_equal(delayed, loaded.apply(delayed), W, CURRENTS)


# -- storage and errors ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "decision",
    [
        decided(loop=Slots(9), carries=[(1, "bits")]),
        decided(loop=Lengths(4, 2, keep="loop"), fenced=True),
        decided([(n, n % 2) for n in range(9)], stored=[((2, 0), "float8_e4m3fn")], inputs=[(3, "bits")], copies=True),
    ],
)
def test_decisions_are_read_as_they_were_written(decision):
    record = decision.to_json()
    assert Decision.from_json(json.loads(json.dumps(record))) == decision
    assert record["saved"] is None or record["saved"] == sorted(record["saved"]), "the same in every process"


@pytest.mark.parametrize(
    ("stored_as", "message"),
    [("bit", "did you mean"), (("bits", "int4"), "int4"), (3, "a sequence of names"), ([None], "each format")],
)
def test_formats_are_checked_before_anything_is_compiled(stored_as, message):
    with pytest.raises(statetx.PolicyError, match=f"(?i){message}"):
        statetx.plan(masked, FEW, X, budget=0.5, stored_as=stored_as)
