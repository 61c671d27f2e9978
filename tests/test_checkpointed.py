"""Checkpointed loops: equal results in every order and mode of differentiation, and no superfluous run of the body."""

import dataclasses
import functools
import re
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import statetx
from helpers import assert_close, carries_only, equations, in_turn
from statetx import policies
from statetx.policies import Budget, Lengths, Levels, Slots

STRATEGIES = [
    Slots(1),
    Slots(3),
    Slots(100),
    Slots(2, policy=policies.nothing),
    Levels(1),
    Levels(2),
    Levels(3),
    Levels(2, policy="dots"),
    Lengths(3, 4),
    Levels(2, policy="dots", keep="loop"),
    Lengths(3, 2, 2, policy=policies.primitives("tanh", "cos", missing="ignore"), keep="loop"),
    Budget("1MiB"),
    "auto",
]


# -- runs of the body ---------------------------------------------------------------------------------------------


def runs_of_the_body(length, checkpoint, num_residuals=60, num_carries=1):
    """Of a whole gradient, counted where they happen. Of a carry's leaves one has so many residuals of its size."""
    calls = []

    def step(carry, x):
        h, *others = carry
        jax.debug.callback(lambda _: calls.append(0), h)
        for _ in range(num_residuals):
            h = jnp.sin(h * x)
        return [h, *(h + y for y in others)], None

    def loss(w):
        carry, _ = statetx.scan(
            step, [w * n for n in range(1, num_carries + 1)], jnp.ones(length), checkpoint=checkpoint
        )
        return sum(carry)

    jax.grad(jax.jit(loss))(0.5)
    jax.effects_barrier()
    return len(calls)


@pytest.mark.sample
@pytest.mark.parametrize(("length", "slots"), in_turn([(2, 1), (7, 1), (12, 2), (23, 3), (23, 5), (40, 40), (40, 60)]))
def test_gradient_runs_the_body_num_evaluations_times(length, slots):
    # A slot for every state there is saves no more.
    assert runs_of_the_body(length, Slots(slots)) == Slots(slots).num_runs(length)


@pytest.mark.sample
@pytest.mark.parametrize(
    ("length", "slots", "ratio", "num_runs"),
    [
        (7, 1, (1, 1), 35),
        (12, 2, (1, 2), 33),
        (60, 7, (2, 1), 169),
        (97, 5, (3, 2), 374),
        (97, 20, (5, 1), 237),
        (200, 16, (1, 4), 400),
        (9, 9, (1, 1), 18),
    ],
)
def test_gradient_with_residuals_in_slots_runs_the_body_as_the_schedule_says(length, slots, ratio, num_runs):
    num_residuals, num_carries = ratio
    assert Slots(slots).runs(length, carry_bytes=num_carries, residual_bytes=num_residuals) == num_runs
    assert runs_of_the_body(length, Slots(slots), *ratio) == num_runs


@pytest.mark.slow
def test_residuals_in_slots_are_used_where_they_save_three_percent():
    # 1,000 steps with 10 slots: 4.640 runs a step without, 4.513 with three times the bytes of a carry, 4.374 with two.
    for num_residuals, is_mixed in ((3, False), (2, True)):
        num = runs_of_the_body(1000, Slots(10), num_residuals)
        assert (num < Slots(10).num_runs(1000)) == is_mixed


@pytest.mark.parametrize("length", [1, 2, 3, 4, 7, 64, 97, 4096, 4099, 10**6, 999_983])
@pytest.mark.parametrize("levels", [1, 2, 3, 4, 7, 10**6])
def test_nested_lengths(length, levels):
    lengths = Levels(levels).lengths_for(length)
    inner = int(np.prod(lengths[1:], dtype=np.int64))
    assert inner * lengths[0] <= length < inner * (lengths[0] + 1)
    assert len(lengths) <= levels and 1 not in lengths[1:]
    if length > 50 and levels <= 2:
        assert sum(lengths) <= 1.06 * levels * length ** (1 / levels) + 2


# -- values kept for the whole loop --------------------------------------------------------------------------------


def recurrent_gradient(checkpoint):
    """Of 64 steps of a layer with one product, beside cheap operations."""

    def loss(w, xs):
        def step(h, x):
            z = statetx.checkpoint_name(h @ w + x, "z")
            return jnp.tanh(z) * jax.nn.sigmoid(z) + 0.5 * h, None

        return (statetx.scan(step, jnp.zeros((16, 32)), xs, checkpoint=checkpoint)[0] ** 2).sum()

    rng = np.random.default_rng(0)
    args = jnp.asarray(rng.standard_normal((32, 32)) / 8), jnp.asarray(rng.standard_normal((64, 16, 32)))
    measured = statetx.measure(statetx.value_and_grad(loss), *args, gradient=False)
    return jax.grad(loss)(*args), measured


@pytest.mark.slow
def test_values_kept_for_the_whole_loop_run_no_product_again():
    names, step_bytes, product = policies.names("z"), 16 * 32 * 4, 2 * 16 * 32 * 32
    plain, plain_cost = recurrent_gradient(None)
    for_turn, turn_cost = recurrent_gradient(Lengths(8, 8, policy=names))
    for_loop, loop_cost = recurrent_gradient(Lengths(8, 8, policy=names, keep="loop"))
    for gradient in (for_turn, for_loop):
        np.testing.assert_allclose(gradient, plain, atol=1e-6 * jnp.abs(plain).max())
    assert 64 * product <= turn_cost.flops - plain_cost.flops, "each product runs twice"
    assert loop_cost.flops - plain_cost.flops < 16 * product, "elementwise operations only"

    # The products of all steps, the carries of 8 turns, and of one turn its values.
    assert turn_cost.temp_bytes < 64 * step_bytes < loop_cost.temp_bytes < (64 + 8 + 6 * 8) * step_bytes
    _, every_step = recurrent_gradient(Levels(1, policy=names))
    assert loop_cost.temp_bytes < 0.95 * every_step.temp_bytes, "one level keeps the carry of each step, too"


@pytest.mark.thorough
def test_policy_of_steps_holds_beside_offloaded_carries():
    names, product = policies.names("z"), 2 * 16 * 32 * 32
    plain, plain_cost = recurrent_gradient(None)
    for strategy in (Lengths(8, 8, policy=names, keep="loop", offload=True), Levels(1, policy=names, offload=True)):
        gradient, cost = recurrent_gradient(strategy)
        np.testing.assert_allclose(gradient, plain, atol=1e-6 * jnp.abs(plain).max())
        assert cost.flops - plain_cost.flops < 16 * product, "no product runs again"


def test_keep_is_for_a_turn_or_the_loop():
    for make in (lambda keep: Levels(2, keep=keep), lambda keep: Lengths(2, 2, keep=keep)):
        with pytest.raises(statetx.PolicyError, match='must be "turn" or "loop", got \'step\''):
            make("step")
        with pytest.raises(statetx.PolicyError, match="keeps nothing without a policy"):
            recurrent_gradient(Levels(2, keep="loop"))


# -- memory --------------------------------------------------------------------------------------------------------


def compiled_gradient(length, slots):
    """Of a loop, with respect to its weights and inputs, given the cotangents of its outputs."""

    def gradient(w, h, xs, cts):
        def run(w, h, xs):
            return statetx.scan(lambda h, x: ((h := jnp.tanh(h @ w + x)), h[:1]), h, xs, checkpoint=Slots(slots))

        return jax.vjp(run, w, h, xs)[1](cts)

    leading = lambda *shape: jax.ShapeDtypeStruct((length, *shape), jnp.float32)
    types = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((64, 64), (64,))]
    return jax.jit(gradient).lower(*types, leading(64), (types[1], leading(1))).compile()


@pytest.mark.slow
def test_memory_depends_on_slots_not_on_length():
    carry, step = 64 * 4, 8 * 64 * 4
    weights = 3 * 64 * 64 * 4  # their gradient, the increment of a step, and one more
    sizes = {True: [], False: []}  # with residuals in slots the body stands at two more places
    for slots in (4, 32):
        for length in (256, 4096, 65_536, 10**6):
            compiled = compiled_gradient(length, slots)
            # A step keeps its carry, and tanh.
            is_mixed = Slots(slots).runs(length, residual_bytes=2) < Slots(slots).num_runs(length)
            sizes[is_mixed].append(len(compiled.as_text()))
            outputs = 4 * length  # ys, which nobody asked for
            temporary = compiled.memory_analysis().temp_size_in_bytes
            assert temporary <= slots * carry + step + weights + outputs, (length, slots)
    for group in sizes.values():
        assert len(group) > 1 and max(group) <= 1.2 * min(group)


def spiking(w, carry, x):
    """Keeps as many bytes as its carry: the membrane potential before the spike, and the trace."""
    v, trace = carry
    v = 0.9 * v + x @ w + trace @ w
    z = jax.nn.sigmoid(4 * (v - 1))
    return (v * (1 - jax.lax.stop_gradient(z)), 0.8 * trace + 0.2 * z), trace.sum()


def counting(w, carry, x):
    """A carry with integers and keys, a boolean among the residuals."""
    h, n, key = carry
    key, sub = jax.random.split(key)
    mask = jax.random.bernoulli(sub, 0.7, h.shape)
    return (jnp.where(mask, jnp.tanh(h @ w + x), 0), n + 1, key), h.sum() * jnp.cos(n)


def normalizing(w, carry, x):
    """A residual of another shape than its carry: a scale for each example."""
    h, mean = carry
    h = h @ w + x
    h = h * jax.lax.rsqrt((h**2).mean(-1, keepdims=True) + 1)
    return (h, 0.9 * mean + h), mean.sum()


def layered(w, carry, x):
    """A step with a loop, whose buffers XLA:CPU would allocate at the start of the program around the step."""
    (h,) = carry
    layer = jax.checkpoint(lambda h, k: (jnp.tanh(h @ w + k * x), None))
    return (jax.lax.scan(layer, h, jnp.arange(4.0))[0],), jnp.float32(0)


MIXED = {"layered": (layered, 1), "spiking": (spiking, 2), "counting": (counting, 1), "normalizing": (normalizing, 2)}


def mixed_loss(name, slots, length, shape=(8, 32)):
    """The loss of a loop whose slots hold residuals, and arguments."""
    step, num = MIXED[name]
    w, h = jnp.sin(jnp.arange(float(shape[1] ** 2)).reshape(shape[1], -1)) / 4, jnp.cos(jnp.ones(shape))
    xs = jnp.sin(jnp.arange(float(length))).reshape(length, 1, 1) * jnp.ones((1, *shape))
    rest = (jnp.int32(0), jax.random.key(0)) if step is counting else ()

    def loss(w, h, xs):
        scan = jax.lax.scan if slots is None else functools.partial(statetx.scan, checkpoint=slots)
        carry, ys = scan(functools.partial(step, w), ((h,) * num + rest), xs)
        return (carry[0] ** 2).sum() + (ys**2).sum()

    return loss, (w, h, xs)


@pytest.mark.sample("slow")
@pytest.mark.parametrize("name", MIXED)
@pytest.mark.parametrize("slots", [12, pytest.param(40, marks=pytest.mark.slow)])
def test_residuals_in_slots_take_no_memory(name, slots):
    def temporary():
        loss, args = mixed_loss(name, Slots(slots), 300)
        return jax.jit(jax.grad(loss, (0, 1, 2))).lower(*args).compile().memory_analysis().temp_size_in_bytes

    loss, args = mixed_loss(name, Slots(slots), 300)
    row = statetx.loop_report(loss, *args).rows[0]
    assert row.is_mixed and row.runs < 0.97 * row.carry_runs
    mixed = temporary()
    with carries_only():
        assert not statetx.loop_report(loss, *args).rows[0].is_mixed
        assert mixed <= temporary() + 1024


@pytest.mark.thorough
def test_a_step_with_a_loop_runs_as_often_as_the_schedule_says():
    calls = []

    def step(h, x):
        jax.debug.callback(lambda _: calls.append(0), h)
        return jax.lax.scan(lambda h, _: (jnp.sin(h * x), None), h, None, 3)[0], None

    loss = lambda h, xs: statetx.scan(step, h, xs, checkpoint=Slots(20))[0]
    args = 0.5, jnp.ones(60)
    row = statetx.loop_report(loss, *args, policies=()).rows[0]
    assert row.is_mixed
    calls.clear()
    jax.grad(jax.jit(loss), (0, 1))(*args)
    jax.effects_barrier()
    assert len(calls) == round(60 * row.runs)


@pytest.mark.slow
def test_bfloat16_in_slots_takes_no_memory():
    """XLA:CPU copies arrays of bfloat16 that it computes with, and the slots are not among them."""

    def loss(w, xs, checkpoint=None):
        step = lambda h, x: (jnp.tanh(h @ w + x), None)
        h, _ = statetx.scan(step, jnp.zeros((8, 64), w.dtype), xs, checkpoint=checkpoint)
        return h.astype(jnp.float32).sum()

    args = jnp.eye(64, dtype=jnp.bfloat16) / 2, jnp.ones((100, 8, 64), jnp.bfloat16)
    in_slots = functools.partial(loss, checkpoint=Slots(20))
    assert statetx.loop_report(in_slots, *args).rows[0].is_mixed
    for a, b in zip(jax.grad(in_slots, (0, 1))(*args), jax.grad(loss, (0, 1))(*args), strict=True):
        np.testing.assert_allclose(a.astype(jnp.float32), b.astype(jnp.float32), rtol=0.02)
    step = lambda f: jax.jvp(lambda w: jax.grad(f)(w, args[1]), args[:1], args[:1])[1].astype(jnp.float32)
    np.testing.assert_allclose(step(in_slots), step(loss), rtol=0.1, atol=0.1)
    mixed = temporary_bytes(in_slots, args)
    with carries_only():
        assert mixed <= temporary_bytes(in_slots, args) + 1024


def temporary_bytes(loss, args):
    return jax.jit(jax.grad(loss, (0, 1))).lower(*args).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.thorough
def test_slots_hold_carries_only_where_steps_read_weights():
    """Fewer runs are not faster there. The weights of one layer are in memory at a time, or some and cotangents."""
    carry, weights = 16 * 128 * 4, 128 * 128 * 4
    stack = {name: jax.random.normal(jax.random.key(n), (64, 128, 128)) / 64 for n, name in enumerate("ab")}

    def loss(stack, h):
        layer = jax.jit(lambda h, w: (h + jnp.tanh(h @ w["a"]) @ w["b"], None))
        return (statetx.scan(layer, h, stack, checkpoint=Slots(16))[0] ** 2).mean()

    args = stack, jnp.ones((16, 128))
    assert not statetx.loop_report(loss, *args).rows[0].is_mixed
    assert temporary_bytes(loss, args) <= 16 * carry + 2 * weights + 4 * carry


@pytest.mark.sample("slow")
@pytest.mark.parametrize("name", MIXED)
@pytest.mark.parametrize(
    "mode",
    [
        "grad",
        "jit",
        "vmap",
        *(pytest.param(m, marks=pytest.mark.slow) for m in ("forward over reverse", "reverse over reverse", "remat")),
    ],
)
def test_residuals_in_slots_leave_gradients_equal(name, mode):
    wraps = {
        "grad": lambda f: f,
        "jit": jax.jit,
        "vmap": lambda f: lambda w, h, xs: jax.vmap(f, (None, 0, None))(w, jnp.stack([h, 0.5 * h]), xs),
        "forward over reverse": lambda f: lambda *args: jax.jvp(f, args, args)[1],
        "reverse over reverse": lambda f: jax.grad(lambda *args: total(f(*args)), (0, 1)),
        "remat": lambda f: jax.checkpoint(f),
    }
    # This schedule runs some steps again that it reverses at once, the first step among them.
    losses = [mixed_loss(name, slots, 12, shape=(2, 8)) for slots in (Slots(7), None)]
    assert statetx.loop_report(losses[0][0], *losses[0][1]).rows[0].is_mixed
    actual, expected = (wraps[mode](jax.grad(loss, (0, 1, 2)))(*args) for loss, args in losses)
    assert_close(actual, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.sample("slow")
@pytest.mark.parametrize(
    "times", [2.5, pytest.param(4, marks=pytest.mark.slow), 20, pytest.param(100, marks=pytest.mark.slow)]
)
def test_compiled_program_stays_within_budget(times):
    def fitted(budget):
        def run(w, h, xs):
            return statetx.scan(lambda h, x: ((h := jnp.tanh(h @ w + x)), h.sum()), h, xs, checkpoint=budget)

        def gradient(w, h, xs, cts):
            outs, pull = jax.vjp(run, w, h, xs)
            return outs, pull(cts)

        w, h, xs = jnp.zeros((64, 64)), jnp.zeros(64), jnp.zeros((500, 64))
        return jax.jit(gradient).lower(w, h, xs, (h, jnp.zeros(500))).compile().memory_analysis().temp_size_in_bytes

    least = fitted(Slots(1))
    assert fitted(Budget(int(times * least))) <= times * least


# -- the same numbers ----------------------------------------------------------------------------------------------

W = jnp.asarray(np.random.default_rng(0).normal(size=(3, 3)) / 3, jnp.float32)
H = jnp.asarray([0.3, -0.2, 0.5])


def program(length, reverse=False):
    """A loop with constants, a float and an integer carry, inputs and outputs, as ``f(checkpoint, W, H, xs)``."""

    def step(w, carry, x):
        h, n = carry
        h = jnp.tanh(h @ w + x["a"] * jnp.cos(n))
        return (h, n + 1), {"h": h[:2], "n": n}

    def f(checkpoint, w, h, xs):
        options = {"reverse": reverse}
        scan = functools.partial(statetx.scan, checkpoint=checkpoint) if checkpoint is not None else jax.lax.scan
        (h, n), ys = scan(functools.partial(step, w), (h, jnp.int32(0)), {"a": xs}, **options)
        return (h**2).sum() + (ys["h"] * jnp.arange(1.0, length + 1)[:, None]).sum() / length + n

    return f, (W, H, jnp.sin(jnp.arange(3.0 * length)).reshape(length, 3))


def total(tree):
    return sum((x**2).sum() for x in jax.tree.leaves(tree))


MODES = {
    "value": lambda f, *args: f(*args),
    "grad": lambda f, *args: jax.grad(f, (0, 1, 2))(*args),
    "grad of the weights": lambda f, *args: jax.grad(f)(*args),
    "grad, compiled": lambda f, *args: jax.jit(jax.grad(f, (0, 1, 2)))(*args),
    "jvp": lambda f, *args: jax.jvp(f, args, args),
    "forward over reverse": lambda f, *args: jax.jvp(jax.grad(f, (0, 1, 2)), args, args)[1],
    "reverse over reverse": lambda f, *args: jax.grad(lambda *a: total(jax.grad(f, (0, 1, 2))(*a)), (0, 1, 2))(*args),
    "reverse over forward": lambda f, *args: jax.grad(lambda w: jax.jvp(f, (w, *args[1:]), args)[1])(args[0]),
    "hessian": lambda f, w, h, xs: jax.hessian(lambda h: f(w, h, xs))(h),
    "hessian of xs": lambda f, w, h, xs: jax.hessian(lambda xs: f(w, h, xs))(xs),
    "jvp of vmap of grad, compiled": lambda f, w, h, xs: jax.jvp(
        jax.jit(jax.vmap(jax.grad(lambda xs: f(w, h, xs)))), (jnp.stack([xs, -xs]),), (jnp.stack([xs, xs]),)
    ),
    "vmap of grad": lambda f, w, h, xs: jax.vmap(jax.grad(f, (0, 1, 2)), (None, None, 0))(
        w, h, jnp.stack([xs, 2 * xs])
    ),
    "grad of vmap": lambda f, w, h, xs: jax.grad(
        lambda w: jax.vmap(f, (None, 0, None))(w, jnp.stack([h, -h]), xs).sum()
    )(w),
    "under checkpoint": lambda f, *args: jax.grad(jax.checkpoint(f), (0, 1, 2))(*args),
    "linearize": lambda f, *args: jax.linearize(f, *args)[1](*args),
}


@functools.cache
def without_checkpoint(mode):
    f, args = program(13)
    return MODES[mode](functools.partial(f, None), *args)


@pytest.mark.thorough
@pytest.mark.parametrize("strategy", STRATEGIES, ids=repr)
@pytest.mark.parametrize("mode", MODES)
def test_strategies_agree_with_the_plain_loop(strategy, mode):
    f, args = program(13)
    actual = MODES[mode](functools.partial(f, strategy), *args)
    expected = without_checkpoint(mode)
    assert_close(actual, expected, rtol=2e-5, atol=1e-5)


def test_hessian_of_xs_by_slots():
    """JAX maps a staged `jax.custom_jvp` and its rule one by one, and here their batch axes would differ."""
    step = lambda h, x: (jnp.sin(x) + h * h, None)
    of_xs = lambda checkpoint: jax.hessian(lambda xs: statetx.scan(step, 0.5, xs, checkpoint=checkpoint)[0])
    xs = jnp.array([0.5, 0.2, -0.3])
    assert_close(of_xs(Slots(2))(xs), of_xs(None)(xs), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("scan", [jax.lax.scan, statetx.scan], ids=["jax", "statetx"])
@pytest.mark.parametrize("strategy", [Slots(3), Levels(2)], ids=repr)
def test_second_gradient_of_a_loop_in_a_scan(scan, strategy):
    """JAX hoists what is constant in the outer loop, and would drop the rule of a ``jax.custom_jvp`` there."""
    f, (w, h, xs) = program(13)

    def loss(strategy, w):
        step = lambda h, _: (h + f(strategy, w, h, xs) * jnp.cos(h), None)
        return scan(step, h, None, length=2)[0].sum()

    def second(strategy):
        return jax.grad(lambda w: total(jax.grad(functools.partial(loss, strategy))(w)))(w)

    np.testing.assert_allclose(second(strategy), second(None), rtol=2e-4)


@pytest.mark.parametrize("mode", ["forward", "reverse"])
def test_second_derivative_of_slots_with_a_rule_that_reads_a_traced_value(mode):
    """JAX leaves such a value as a constant in the body of the loop that it differentiates."""

    def loss(x, width, checkpoint):
        @jax.custom_jvp
        def sine(x):
            return width * jnp.sin(x)

        sine.defjvp(lambda primals, tangents: (sine(*primals), width * jnp.cos(primals[0]) * tangents[0]))
        return statetx.fori_loop(0, 3, lambda i, c: jnp.sin(c) + sine(c), x, checkpoint=checkpoint).sum()

    def second(checkpoint, x, width):
        gradient = jax.grad(functools.partial(loss, width=width, checkpoint=checkpoint))
        return jax.jvp(gradient, (x,), (x,))[1] if mode == "forward" else jax.grad(lambda x: total(gradient(x)))(x)

    x, width = jnp.array([0.8, 0.1, -0.5]), jnp.float32(0.8)
    actual = jax.jit(functools.partial(second, Slots(2)))(x, width)
    expected = jax.jit(lambda x: second(None, x, width))(x)  # jax 0.12 cannot trace the width here
    np.testing.assert_allclose(actual, expected, rtol=2e-4)


LOOPS_OF_A_NUMBER = {
    "scan, slots": lambda step, h: statetx.scan(lambda h, _: (step(h), None), h, None, 9, checkpoint=Slots(3))[0],
    "scan, size": lambda step, h: statetx.scan(lambda h, _: (step(h), None), h, None, 9, checkpoint=Budget("1MiB"))[0],
    "while_loop": lambda step, h: statetx.while_loop(
        lambda c: c[0] < 9, lambda c: (c[0] + 1, step(c[1])), (0, h), checkpoint=Slots(3)
    )[1],
}
MODES_OF_A_NUMBER = {
    "jvp": lambda f, w, t: jax.jvp(f, (w,), (t,))[1],
    "jvp, compiled": lambda f, w, t: jax.jit(lambda w: jax.jvp(f, (w,), (t,))[1])(w),
    "jvp of jvp": lambda f, w, t: jax.jvp(lambda w: jax.jvp(f, (w,), (t,))[1], (w,), (t,))[1],
    "jvp of grad": lambda f, w, t: jax.jvp(jax.grad(f), (w,), (t,))[1],
    "grad of jvp": lambda f, w, t: jax.grad(lambda w: jax.jvp(f, (w,), (t,))[1])(w),
    "hessian": lambda f, w, t: jax.hessian(f)(w),
}


# A tangent that is a Python number was taken for a zero one: the result was 0, without an error.
@pytest.mark.sample
@pytest.mark.parametrize("loop", LOOPS_OF_A_NUMBER)
@pytest.mark.parametrize("mode", MODES_OF_A_NUMBER)
def test_python_numbers_as_primals_and_tangents(loop, mode):
    if loop == "while_loop" and mode == "grad of jvp":
        pytest.skip("a tangent of this loop has no reverse mode")
    f = lambda w: LOOPS_OF_A_NUMBER[loop](lambda h: jnp.tanh(w * h + 0.3), 0.1)
    plain = lambda w: jax.lax.fori_loop(0, 9, lambda _, h: jnp.tanh(w * h + 0.3), 0.1)
    expected = MODES_OF_A_NUMBER[mode](plain, jnp.float32(0.5), jnp.float32(1.0))
    for w, t in [(0.5, 1.0), (jnp.float32(0.5), 1.0), (0.5, jnp.float32(1.0))]:
        assert float(MODES_OF_A_NUMBER[mode](f, w, t)) == pytest.approx(float(expected), rel=1e-5)


def hvp(f):
    return lambda x: jax.jvp(jax.grad(f), (x,), (jnp.ones_like(x),))[1]


THIRD = {
    "grad of grad of grad": lambda f: jax.grad(jax.grad(jax.grad(f))),
    "grad of hvp": lambda f: jax.grad(hvp(f)),
    "hvp of grad": lambda f: hvp(jax.grad(f)),
    "fourth, compiled": lambda f: jax.jit(jax.grad(hvp(jax.grad(f)))),
}


# Of a loop with ys, whose cotangents reach every step: with the carry alone the third derivatives worked.
@pytest.mark.thorough
@pytest.mark.sample("slow")
@pytest.mark.parametrize(
    "derivative",
    [pytest.param(d, marks=[pytest.mark.slow] * (d in ("grad of grad of grad", "fourth, compiled"))) for d in THIRD],
)
@pytest.mark.parametrize("strategy", [Slots(3)], ids=repr)
def test_third_derivatives_of_ys(strategy, derivative):
    def loss(scan, w):
        h, ys = scan(lambda h, x: (jnp.tanh(w * h + x), w * h * h), w, jnp.linspace(0.0, 1.0, 11))
        return h + (ys**2).sum()

    actual, expected = (
        THIRD[derivative](functools.partial(loss, scan))(jnp.float32(0.5))
        for scan in (functools.partial(statetx.scan, checkpoint=strategy), jax.lax.scan)
    )
    assert float(expected) != 0 and float(actual) == pytest.approx(float(expected), rel=1e-4)


LAYOUTS = [(1, False), (2, True), (3, False), (12, True), (13, False), (64, True), (65, False)]


@functools.cache
def with_gradient(strategy, layout):
    f, args = program(*layout)
    return jax.value_and_grad(f, (1, 2, 3))(strategy, *args)


@pytest.mark.sample
@pytest.mark.parametrize(
    "layout, strategy",
    [
        # Every layout with one of two strategies in turn.
        pytest.param(x, s, id=f"{s!r}-{x}", marks=[pytest.mark.slow] * (k != n % 2))
        for n, x in enumerate(LAYOUTS)
        for k, s in enumerate([Slots(5), Levels(2), Slots(2), Levels(3), "auto"])
    ],
)
def test_strategies_agree_for_any_length_and_direction(strategy, layout):
    actual, expected = (with_gradient(s, layout) for s in (strategy, None))
    assert_close(actual, expected, rtol=2e-5, atol=1e-5)


def test_zero_length():
    for strategy in STRATEGIES:
        if not isinstance(strategy, Lengths):
            h, ys = statetx.scan(lambda h, x: (h + x, h), H, jnp.zeros((0, 3)), checkpoint=strategy)
            np.testing.assert_array_equal(h, H)
            assert ys.shape == (0, 3)


# -- states --------------------------------------------------------------------------------------------------------


class Cell:
    def __init__(self):
        self.w = statetx.Param(W)
        self.h = statetx.State(H)
        self.n = statetx.State(0)
        self.rng = statetx.RngState(0)

    def __call__(self, x):
        keep = jax.random.bernoulli(self.rng.next(), 0.7, (3,))
        self.h.value = jnp.tanh(self.h.value @ self.w.value + x) * keep
        self.n.value += 1
        return self.h.value.sum()


def eager(f):
    return f


def test_eager_calls_compile_once():
    from helpers import compilations

    def loss(w):
        return statetx.scan(lambda h, x: (jnp.tanh(h * w + x), None), 0.0, jnp.arange(9.0), checkpoint=Slots(2))[0]

    jax.grad(loss)(0.3)
    with compilations() as events:
        jax.grad(loss)(0.4)
    assert not events


# -- mistakes ------------------------------------------------------------------------------------------------------


def scan(checkpoint, init=1.0, **options):
    return statetx.scan(lambda h, x: (h * x, None), init, jnp.ones(10), checkpoint=checkpoint, **options)


def test_counts_and_sizes_of_any_integer_type():
    three = np.int64(3)
    for strategy, same in (
        (policies.Slots(three), policies.Slots(3)),
        (policies.Levels(three), policies.Levels(3)),
        (policies.Lengths(three, 4), policies.Lengths(3, 4)),
        (policies.Budget(np.int64(2**20)), policies.Budget("1MiB")),
        (policies.larger_than(np.int64(2**20)), policies.larger_than("1MiB")),
    ):
        assert strategy == same and repr(strategy) == repr(same)
    loop = lambda checkpoint: statetx.scan(lambda c, _: (jnp.sin(c), None), 1.0, None, 5, checkpoint=checkpoint)[0]
    assert float(loop(three)) == float(loop(3))
    for make in (policies.Budget, policies.larger_than):
        with pytest.raises(statetx.PolicyError, match=r"-5 is not a size; use a number of bytes"):
            make(-5)


def test_mistakes():
    with pytest.raises(statetx.PolicyError, match="unroll=2 and checkpoint=3 do not go together"):
        scan(3, unroll=2)
    assert statetx.fori_loop(0, jnp.asarray(3), lambda i, x: x + i, 1.0, checkpoint=2) == 4.0


def test_host_calls_that_a_strategy_would_repeat_are_refused():
    def show(x):
        return None

    step = lambda h: (jax.experimental.io_callback(show, None, h), h + 1)[1]
    for name, call in {
        "scan": lambda **options: statetx.scan(lambda h, x: (step(h), None), 1.0, jnp.ones(3), **options),
        "while_loop": lambda **options: statetx.while_loop(lambda h: h < 3, step, 1.0, **options),
    }.items():
        call()
        with pytest.raises(statetx.EffectError, match=rf"{name}: the body .* calls .*show at .*would run again"):
            call(checkpoint=2)


@pytest.mark.parametrize(
    "name, value, allowed",
    [
        *(("length", x, "a whole number") for x in (-1, 2.5, True, np.bool_(True), "10", None)),
        *(("carry_bytes", x, "a finite number") for x in (-1, float("inf"), "1KiB", None, True, 1j)),
        *(("residual_bytes", x, "a finite number") for x in (-4, float("nan"), np.float32("inf"), "2KiB", True)),
    ],
)
def test_mistakes_in_counts_of_runs_name_the_argument(name, value, allowed):
    arguments = {"length": 1000, "carry_bytes": 4, "residual_bytes": 4} | {name: value}
    message = re.escape(f"{name} must be {allowed} of at least 0, got {value!r}.")
    with pytest.raises(statetx.PolicyError, match="Slots.runs: " + message):
        Slots(20).runs(**arguments)
    if name == "length":
        with pytest.raises(statetx.PolicyError, match="Slots.num_runs: " + message):
            Slots(20).num_runs(value)


def test_counts_of_runs_take_any_number():
    expected = Slots(20).runs(1000, carry_bytes=4, residual_bytes=4)
    for real in (float, np.float32, np.int64, Fraction):
        assert Slots(20).runs(np.int64(1000), carry_bytes=real(4), residual_bytes=real(4)) == expected
    assert Slots(20).num_runs(np.int32(1000)) == 3750
    assert policies.Lengths(4, 5).num_runs(20) == 60
    assert Slots(20).runs(0, carry_bytes=4, residual_bytes=4) == 0
    assert Slots(20).runs(1000, carry_bytes=0, residual_bytes=4) == 3750
    assert Slots(20).runs(1000, carry_bytes=4, residual_bytes=0) == 2000


def test_loop_report_takes_one_policy_or_several():
    loss = lambda h: statetx.scan(lambda h, _: (jnp.sin(h @ W), None), h, None, 50, checkpoint=Slots(5))[0].sum()
    for own, compared in (("dots", ["dots"]), (policies.dots, ["dots"]), (("dots", None), ["dots"]), ((), [])):
        assert [r.policy for r in statetx.loop_report(loss, H, policies=own).rows] == ["-", *compared]
    with pytest.raises(statetx.PolicyError, match="policies must be a policy or a sequence of policies, got None"):
        statetx.loop_report(loss, H, policies=None)
    # Also if there is no loop that it would be compared with.
    with pytest.raises(statetx.PolicyError, match="No policy is named 'dotz'"):
        statetx.loop_report(jnp.sum, H, policies="dotz")


def test_loop_report_lists_loops_in_the_steps_of_loops():
    def inner(h, strategy):
        return statetx.scan(lambda h, _: (jnp.sin(h @ W), None), h, None, 30, checkpoint=strategy)[0]

    def outer(h, strategy):
        step = lambda h, _: (inner(h, Slots(3)), None)
        return statetx.scan(step, h, None, 20, checkpoint=strategy)[0].sum()

    for strategy, slots in ((Slots(4), 4), (Budget("1GiB"), 0)):
        rows = statetx.loop_report(lambda h: outer(h, strategy), H, policies=()).rows  # noqa: B023
        assert [(r.length, r.slots) for r in rows] == [(20, slots), (30, 3)]


def test_strategies_are_values():
    assert Slots(3) == Slots(3) != Slots(4) and hash(Levels(2)) == hash(Levels(2))
    assert repr(Lengths(3, 4, policy="dots")) == "Lengths(3, 4, policy=dots)"
    assert repr(Levels(2, policy="dots", keep="loop")) == "Levels(2, policy=dots, keep='loop')"
    assert Budget("1KiB") == Budget(1024)


# -- loops of unknown length ---------------------------------------------------------------------------------------


def decay(checkpoint=None, max_steps=None):
    """Steps until the sum is small: how many depends on the values."""

    def f(w, h):
        def step(val):
            h, n = val
            return jnp.tanh(h @ w), n + 1

        h, n = statetx.while_loop(
            lambda val: jnp.abs(val[0]).sum() > 1e-3,
            step,
            (h, jnp.int32(0)),
            checkpoint=checkpoint,
            max_steps=max_steps,
        )
        return (h**2).sum() * 1e6 + n

    return f


def unrolled(w, h):
    n = 0
    while jnp.abs(h).sum() > 1e-3:
        h, n = jnp.tanh(h @ w), n + 1
    return (h**2).sum() * 1e6 + n


ONLINE_MODES = {
    "grad": lambda f: jax.grad(f, (0, 1)),
    "grad, compiled": lambda f: jax.jit(jax.grad(f, (0, 1))),
    "jvp": lambda f: lambda *args: jax.jvp(f, args, args),
    "forward over reverse": lambda f: lambda *args: jax.jvp(jax.grad(f, (0, 1)), args, args)[1],
}


@pytest.mark.sample
@pytest.mark.parametrize("mode", ONLINE_MODES)
@pytest.mark.parametrize("slots", [1, 2, *(pytest.param(n, marks=pytest.mark.slow) for n in (3, 7, 100)), 4])
def test_while_loop(slots, mode):
    way = ONLINE_MODES[mode]
    for scale in (0.3, 0.9, 1.0):  # from a few steps to many
        args = (W * scale, H)
        expected = derivative_of_unrolled(mode.partition(",")[0], scale)
        assert_close(way(decay(slots))(*args), expected, rtol=1e-4, atol=1e-4)


@functools.cache
def derivative_of_unrolled(mode, scale):
    args = (W * scale, H)
    return ONLINE_MODES[mode](unrolled)(*args)


@pytest.mark.sample
@pytest.mark.parametrize("steps", [0, 1, 2, 5, 17])
def test_while_loop_with_max_steps(steps):
    def reference(w, h):
        for _ in range(steps):
            h = jnp.tanh(h @ w)
        return (h**2).sum() * 1e6 + steps

    args = (2 * W, H)
    assert float(decay(None, steps)(*args)) == pytest.approx(float(reference(*args)), rel=1e-5)
    assert_close(jax.grad(decay(3, steps), (0, 1))(*args), jax.grad(reference, (0, 1))(*args), rtol=1e-4, atol=1e-3)


def test_while_loop_with_states():
    cell = Cell()

    def loss():
        statetx.while_loop(lambda n: n < 11, lambda n: (cell(0.1), n + 1)[1], 0, checkpoint=3)
        return (cell.h.value**2).sum()

    def reference():
        for _ in range(11):
            cell(0.1)
        return (cell.h.value**2).sum()

    with jax.numpy_rank_promotion("allow"):
        actual = statetx.grad(loss, wrt=[cell.w, cell.h])()
        left = cell.n.value
        cell = Cell()
        expected = statetx.grad(reference, wrt=[cell.w, cell.h])()
    assert int(left) == int(cell.n.value) == 11
    assert_close(actual, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.sample
@pytest.mark.parametrize("slots", in_turn([1, 2, 3, 5, 8]))
def test_while_loop_of_every_length_under_vmap(slots):
    """Each example drops its own slots."""
    lengths = jnp.arange(70)

    def loop(h, num):
        step = lambda val: (jnp.sin(W @ val[0]) + 0.1 * val[1], val[1] + 1)
        return (statetx.while_loop(lambda val: val[1] < num, step, (h, 0), checkpoint=slots)[0] ** 2).sum()

    def scan(h, num):
        step = lambda h, i: (jnp.where(i < num, jnp.sin(W @ h) + 0.1 * i, h), None)
        return (jax.lax.scan(step, h, lengths)[0] ** 2).sum()

    actual, expected = (jax.jit(jax.vmap(jax.grad(f), (None, 0)))(H, lengths) for f in (loop, scan))
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-7)


def test_while_loop_mistakes():
    for strategy in (Levels(2), statetx.Truncated(2)):
        with pytest.raises(statetx.PolicyError, match=r"(?s)needs a known number of steps.*Slots\(n\)"):
            statetx.while_loop(lambda x: x < 1, lambda x: x + 1, 0.0, checkpoint=strategy)
    twice = lambda x: statetx.while_loop(lambda x: x < 1, lambda x: x + jnp.sin(x), x, checkpoint=2)
    with pytest.raises(ValueError, match=r"(?s)again in reverse mode.*jax\.hessian\(f\)"):
        jax.grad(jax.grad(twice))(0.1)
    # It was told to use `checkpoint=`, which it does.
    with pytest.raises(ValueError, match=r"(?s)tangent of a .*with checkpoint= .*in reverse mode.*jax\.hessian\(f\)"):
        jax.grad(lambda x: jax.jvp(twice, (x,), (1.0,))[1])(0.1)
    assert np.isfinite(jax.hessian(twice)(0.1)), "the message's advice"


# -- the host's memory, and progress -------------------------------------------------------------------------------


HOST = [Levels(2, offload=True), Levels(1, offload=True)]


@pytest.mark.parametrize("strategy", HOST, ids=repr)
def test_carries_offloaded_to_host(strategy):
    f, args = program(13)
    grad = jax.jit(jax.grad(functools.partial(f, strategy), (0, 1, 2)))
    assert_close(grad(*args), jax.grad(functools.partial(f, None), (0, 1, 2))(*args), rtol=2e-5, atol=1e-5)
    on_device = functools.partial(f, dataclasses.replace(strategy, offload=False))
    there, here = (jax.make_jaxpr(jax.grad(g))(*args) for g in (functools.partial(f, strategy), on_device))
    assert "<host>" in str(there) and "<host>" not in str(here)
    assert num_tanh(there.jaxpr) <= num_tanh(here.jaxpr)  # nothing more is computed


NESTED = {
    "Levels(1)": functools.partial(Levels, 1),
    "Levels(2)": functools.partial(Levels, 2),
    "Lengths": functools.partial(Lengths, 4, 3, 2),
}


@pytest.mark.parametrize("make", NESTED.values(), ids=NESTED)
def test_turns_bring_their_own_carry_back_from_the_host(make):
    """Not one loop before the backward pass that brings all of them, which would be in the device's memory together."""

    def compiled(strategy):
        step = lambda w, h, x: (h := jnp.tanh(h @ w + x), h.sum())
        xs, h, w = jnp.ones((26, 16, 32)), jnp.zeros((16, 32)), 0.9 * jnp.eye(32)
        grad = jax.grad(lambda w: statetx.scan(functools.partial(step, w), h, xs, checkpoint=strategy)[1].sum())
        return jax.make_jaxpr(grad)(w), jax.jit(grad).lower(w).compile().memory_analysis().temp_size_in_bytes

    (there, temp_bytes), (here, on_device) = compiled(make(offload=True)), compiled(make(offload=False))
    assert str(there).count("scan[") == str(here).count("scan[")
    assert temp_bytes <= on_device, "on a CPU both memories count"


OFFLOADED_MODES = {
    "forward over reverse": lambda f: hvp(f),
    "forward over reverse, compiled": lambda f: jax.jit(hvp(f)),
    "vmap of grad": lambda f: lambda w: jax.vmap(jax.grad(f))(jnp.stack([w, 2 * w])).sum(),
    "vmap of vmap of grad, compiled": lambda f: (
        lambda w: jax.jit(jax.vmap(jax.vmap(jax.grad(f)), 1))(jnp.outer(jnp.arange(1.0, 4), jnp.stack([w, 2 * w])))[
            1
        ].sum()
    ),
}


@pytest.mark.parametrize("mode", in_turn(OFFLOADED_MODES))
def test_derivatives_with_offloaded_carries(mode):
    def loss(strategy, w):
        return statetx.scan(lambda h, x: (jnp.tanh(w * h + x), None), H, jnp.arange(7.0), checkpoint=strategy)[0].sum()

    actual, expected = (
        OFFLOADED_MODES[mode](functools.partial(loss, strategy))(jnp.float32(0.5))
        for strategy in (Levels(2, offload=True), None)
    )
    assert float(expected) != 0 and float(actual) == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.parametrize("mode", [mode for mode in OFFLOADED_MODES if "over" in mode])
def test_tangents_of_offloaded_carries_are_in_their_memory(mode):
    with jax.enable_checks(True):
        test_derivatives_with_offloaded_carries(mode)


@pytest.mark.parametrize("wrap", [eager, jax.jit])
def test_offloaded_carries_with_keys(wrap):
    def step(w, carry, _):
        h, rng = carry
        rng, now = jax.random.split(rng)
        return (jnp.tanh(w * h + jax.random.normal(now, h.shape)), rng), None

    def loss(strategy, w):
        carry, _ = statetx.scan(functools.partial(step, w), (H, jax.random.key(0)), None, 9, checkpoint=strategy)
        return carry[0].sum()

    actual, expected = (
        wrap(jax.grad(functools.partial(loss, strategy)))(jnp.float32(0.5))
        for strategy in (Levels(2, offload=True), None)
    )
    assert float(expected) != 0 and float(actual) == pytest.approx(float(expected), rel=1e-5)


def num_tanh(jaxpr):
    return sum(eqn.primitive.name == "tanh" for eqn in equations(jaxpr))


def test_offload_without_host_memory_raises(monkeypatch):
    monkeypatch.setattr("statetx._targets.current.memory_kinds", lambda: ["device"])
    with pytest.raises(statetx.PolicyError, match="have no 'pinned_host' memory"):
        scan(Levels(2, offload=True))


@pytest.mark.parametrize("strategy", [None, Slots(3), Levels(2)], ids=repr)
def test_progress_bars(strategy, capsys):
    def loss(w, xs):
        def sharpen(h, x):
            return jnp.tanh(h * w + x), None

        return statetx.scan(sharpen, 0.0, xs, checkpoint=strategy, progress=True)[0]

    grad = jax.jit(jax.grad(loss))
    for _ in range(2):
        value = grad(0.5, jnp.ones(500))
        jax.effects_barrier()
        shown = capsys.readouterr().out
        assert shown.count("scan sharpen") >= 1 and "100%" in shown
        assert ("backward" in shown) == isinstance(strategy, Slots)
    jaxpr = str(jax.make_jaxpr(jax.grad(loss))(0.5, jnp.ones(500)))
    assert "debug_callback" in jaxpr
    expected = jax.grad(lambda w: jax.lax.scan(lambda h, x: (jnp.tanh(h * w + x), None), 0.0, jnp.ones(500))[0])(0.5)
    np.testing.assert_allclose(value, expected, rtol=1e-5)


def test_progress_bars_name_their_own_loop(capsys):
    def first(h, x):
        return h + x, None

    def second(h, x):  # of the same structure
        return h + x, None

    for f in (first, second):
        statetx.scan(f, 0.0, jnp.ones(200), progress=True)
        jax.effects_barrier()
        assert f"scan {f.__name__}" in capsys.readouterr().out


@pytest.mark.parametrize("batch_size", [None, 3])
def test_map_accepts_checkpoint_and_progress(batch_size, capsys):
    w = statetx.Param(jnp.array(0.5))
    xs = jnp.linspace(0.1, 1.0, 200)

    def sharpen(x):
        return jnp.tanh(w.value * x) ** 2

    def loss(**options):
        return lambda: jnp.sum(statetx.map(sharpen, xs, batch_size=batch_size, **options))

    expected = statetx.grad(loss(), wrt=w)()
    assert "while" not in str(statetx.make_jaxpr(statetx.grad(loss(), wrt=w))())
    stored = statetx.grad(loss(checkpoint=Slots(2)), wrt=w)
    np.testing.assert_allclose(stored(), expected, rtol=1e-5)
    assert "while" in str(statetx.make_jaxpr(stored)())  # the schedule's nest of loops
    loss(progress=True)()
    jax.effects_barrier()
    shown = capsys.readouterr().out
    assert "sharpen" in shown and "100%" in shown


def test_progress_counts_each_step_once(monkeypatch):
    """Also where an inner loop is as long as the whole."""
    seen = []
    monkeypatch.setattr("statetx._loops.build.Bars._show", lambda self, done, phase: seen.append(done))

    def loss(w):
        return statetx.scan(
            lambda h, x: (jnp.tanh(h * w + x), None), 0.0, jnp.ones(8), checkpoint=(1, 8), progress=True
        )[0]

    jax.grad(loss)(0.5)
    jax.effects_barrier()
    assert seen == [8]


def test_progress_of_truncated_segments_reaches_the_end(monkeypatch):
    seen = []
    monkeypatch.setattr("statetx._loops.build.Bars._show", lambda self, done, phase: seen.append(int(done)))
    statetx.scan(lambda h, x: (h + x, None), 0.0, jnp.ones(8), checkpoint=statetx.Truncated(3), progress=True)
    jax.effects_barrier()
    assert max(seen) == 8


def test_progress_off_adds_no_equations():
    text = str(jax.make_jaxpr(lambda: scan(None))())
    assert text == str(jax.make_jaxpr(lambda: scan(None, progress=False))()) and "callback" not in text
    with pytest.raises(ValueError, match="progress=True needs concrete bounds"):
        jax.jit(lambda n: statetx.fori_loop(0, n, lambda i, x: x, 1.0, progress=True))(3)


# -- strict promotion ----------------------------------------------------------------------------------------------


STRICT = {
    "Slots": lambda body: statetx.scan(body, 1.0, jnp.ones(12), checkpoint=Slots(2))[0],
    "Slots(1)": lambda body: statetx.scan(body, 1.0, jnp.ones(12), checkpoint=1)[0],
    "auto": lambda body: statetx.scan(body, 1.0, jnp.ones(12), checkpoint="auto")[0],
    "size": lambda body: statetx.scan(body, 1.0, jnp.ones(12), checkpoint=Budget("1MiB"))[0],
    "levels": lambda body: statetx.scan(body, 1.0, jnp.ones(12), checkpoint=Levels(2))[0],
    "fori_loop": lambda body: statetx.fori_loop(0, 12, lambda i, c: body(c, 1.0)[0], 1.0, checkpoint=2),
    "while_loop": lambda body: statetx.while_loop(
        lambda c: c[0] < 12, lambda c: (c[0] + 1, body(c[1], 1.0)[0]), (0, 1.0), checkpoint=2
    )[1],
}


@pytest.mark.sample
@pytest.mark.parametrize("name", in_turn(STRICT))
def test_strategies_under_strict_promotion(name):
    w = statetx.Param(jnp.float32(0.5))
    loss = lambda: STRICT[name](lambda c, x: (jnp.tanh(c * w.value) + x, None))
    expected = statetx.grad(loss, wrt=w)()
    with jax.numpy_dtype_promotion("strict"):
        np.testing.assert_array_equal(statetx.grad(loss, wrt=w)(), expected)
        np.testing.assert_array_equal(statetx.jit(statetx.grad(loss, wrt=w))(), expected)


# -- carries without a derivative --------------------------------------------------------------------------------


def on_the_host(t):
    return jax.pure_callback(lambda t: np.float32(np.sqrt(t)), jax.ShapeDtypeStruct((), jnp.float32), t)


def damped(c):
    """The second of three carries depends on the differentiated input; JAX cannot differentiate the first; the third is
    independent.
    """
    t, v, w = c
    return t + on_the_host(t), jnp.sin(v) * jax.lax.stop_gradient(t), 0.5 * w


WITHOUT_DERIVATIVE = {
    "Slots(2)": lambda c: statetx.scan(lambda c, _: (damped(c), None), c, None, 7, checkpoint=Slots(2))[0],
    "Levels(2)": lambda c: statetx.scan(lambda c, _: (damped(c), None), c, None, 7, checkpoint=Levels(2))[0],
    "fori_loop": lambda c: statetx.fori_loop(0, 7, lambda _, c: damped(c), c, checkpoint=Slots(2)),
    "while_loop": lambda c: statetx.while_loop(lambda c: c[0] < 30, damped, c, checkpoint=Slots(3)),
}


@pytest.mark.sample
@pytest.mark.parametrize("name", WITHOUT_DERIVATIVE)
@pytest.mark.parametrize("moving", [(1,), *(pytest.param(m, marks=pytest.mark.slow) for m in ((2,), (1, 2)))])
def test_carries_without_tangents_need_no_derivative(name, moving):
    start = [jnp.float32(1.0), jnp.float32(0.5), jnp.float32(2.0)]

    def loss(run, *values):
        c = [*start]
        for i, x in zip(moving, values, strict=True):
            c[i] = x
        t, *others = run(tuple(c))
        return sum(others) * on_the_host(t)

    values = [start[i] for i in moving]
    places = tuple(range(len(moving)))
    got = jax.grad(lambda *v: loss(WITHOUT_DERIVATIVE[name], *v), places)(*values)
    steps, t = 0, 1.0
    while steps < 7 if name != "while_loop" else t < 30:
        steps, t = steps + 1, t + t**0.5
    wanted = jax.grad(lambda *v: loss(lambda c: jax.lax.fori_loop(0, steps, lambda _, c: damped(c), c), *v), places)(
        *values
    )
    np.testing.assert_allclose(got, wanted, rtol=1e-6)


@pytest.mark.parametrize("checkpoint", [Slots(2), Budget("1MiB")], ids=str)
@pytest.mark.parametrize(
    "transform", [jax.grad, lambda f: jax.grad(jax.grad(f)), jax.jacfwd], ids=["1", "2", "forward"]
)
def test_outputs_without_tangents_need_no_derivative(checkpoint, transform):
    def loss(x, **options):
        step = lambda c, _: ((c[0] + 1.0, jnp.sin(c[0] * c[1])), (c[0], c[1]))
        (t, v), (times, values) = statetx.scan(step, (1.0, x), None, 5, **options)
        return (v + values.sum()) * on_the_host(t) * on_the_host(times.sum())

    planned = transform(functools.partial(loss, checkpoint=checkpoint))(0.4)
    np.testing.assert_allclose(planned, transform(loss)(0.4), rtol=1e-5)


def test_while_loop_outputs_without_tangents_need_no_derivative():
    def loss(x):
        step = lambda c: (c[0] + 1.0, jnp.sin(c[1]))
        t, v = statetx.while_loop(lambda c: c[0] < 3, step, (1.0, x), checkpoint=Slots(2))
        return v * on_the_host(t)

    np.testing.assert_allclose(jax.grad(loss)(0.4), np.sqrt(3) * np.cos(np.sin(0.4)) * np.cos(0.4), rtol=1e-6)


def test_steps_that_keep_literals():
    def last(x, **options):
        step = lambda c, _: (jnp.stack([jnp.sin(c), 1.0]).sum(), None)
        return statetx.scan(step, x, None, 6, **options)[0]

    planned = jax.grad(functools.partial(last, checkpoint=Slots(5)))(0.4)
    np.testing.assert_allclose(planned, jax.grad(last)(0.4), rtol=1e-6)


@pytest.mark.parametrize("checkpoint", [None, *STRATEGIES[:1], *STRATEGIES[4:5]], ids=str)
def test_jax_looks_for_nan_in_eager_gradients_of_loops(checkpoint):
    @statetx.remat
    def loss(h, xs):
        return statetx.scan(lambda h, x: (jnp.sqrt(jnp.abs(h * x)), None), h, xs, checkpoint=checkpoint)[0]

    xs = jnp.ones(6)
    with jax.debug_nans(True):
        assert float(jax.grad(loss)(1.0, xs)) == 0.5**6
        with pytest.raises(FloatingPointError, match=r"encountered in (scan|while)"):
            jax.grad(loss)(1.0, xs.at[3:].set(0.0))


def test_gradients_are_known_at_compile_time_if_they_are_to_be():
    def last(x):
        return statetx.scan(lambda c, _: (jnp.sin(c), None), x, None, 3, checkpoint=Slots(2))[0]

    @jax.jit
    def slope(y):
        with jax.ensure_compile_time_eval():
            return y * float(jax.grad(last)(0.4))

    assert slope(1.0) == jax.grad(last)(0.4)


@pytest.mark.parametrize("strategy, runs", [(Levels(1), 2), (Levels(2), 3)], ids=repr)
def test_effects_of_steps_run_with_the_steps(strategy, runs):
    seen = []

    def step(h, x):
        jax.debug.callback(lambda _: seen.append(1), h)
        return (jnp.tanh(h + x),) * 2

    jax.grad(lambda x: statetx.scan(step, 0.0, x, checkpoint=strategy)[1].sum())(jnp.ones(8))
    jax.effects_barrier()
    assert len(seen) == runs * 8
