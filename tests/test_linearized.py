"""Loops with checkpoints have the derivatives of JAX's plain loop, with rules that are not those of their functions.

Where the derivative is linearized, JAX's `scan` drops the rule of a `custom_jvp` from the primals before JAX 0.12, so
that the second derivative is another one than that of the unrolled loop. Parts of a batch that do not depend on each
other have the derivatives of the whole, which has no loop: no rule is dropped.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import statetx
from statetx import policies

LENGTH = 4
DROPS_RULES = jax.__version_info__ < (0, 12)


@jax.custom_jvp
def sine_jvp(x):
    return jnp.sin(x)


@sine_jvp.defjvp
def _(primals, tangents):
    return sine_jvp(*primals), 0.6 * jnp.cos(1.3 * primals[0]) * tangents[0]


@jax.custom_vjp
def sine_vjp(x):
    return jnp.sin(x)


# The backward rule has a rule in it.
sine_vjp.defvjp(lambda x: (jnp.sin(x), x), lambda x, ct: (0.6 * sine_jvp(1.3 * x + 1.0) * ct,))
RULES = {"custom_jvp": sine_jvp, "custom_vjp": sine_vjp}


def step(sine, w, c, x):
    """Calls that read a constant alone, the carry, and what another call returned."""
    h = sine(w * c + x)
    return h + 0.3 * c + 0.1 * sine(h * x + sine(w)), h * c


def plain(sine, z, **options):
    scan = statetx.scan if options else jax.lax.scan
    c, ys = scan(functools.partial(step, sine, z[0]), z[1], z[2] * jnp.linspace(-0.5, 0.6, LENGTH), **options)
    return c**2 + (ys**2).sum()


def by_while(sine, z):
    xs = z[2] * jnp.linspace(-0.5, 0.6, LENGTH)

    def body(loop):
        i, c, total = loop
        c, y = step(sine, z[0], c, xs[i])
        return i + 1, c, total + y**2

    _, c, total = statetx.while_loop(lambda loop: loop[0] < LENGTH, body, (0, z[1], 0 * z[1]), checkpoint=2)
    return c**2 + total


def by_parts(sine, z):
    """`microbatch` of a loss that reads what the part before has written."""
    state = statetx.State(z[1])

    def loss(x):
        state.value, y = step(sine, z[0], state.value, x[0])
        return y**2

    return statetx.microbatch(loss, LENGTH, reduce="sum")(z[2] * jnp.linspace(-0.5, 0.6, LENGTH)) + state.value**2


STRATEGIES = {
    "Slots": functools.partial(plain, checkpoint=policies.Slots(2)),
    "Levels(2)": functools.partial(plain, checkpoint=policies.Levels(2)),
    "Truncated": functools.partial(plain, checkpoint=statetx.Truncated(9, checkpoint=policies.Levels(2))),
    "microbatch": by_parts,
    "while_loop": by_while,
}
T, U = jnp.array([0.3, -0.5, 0.9]), jnp.array([-0.7, 0.2, 0.4])


def reverse(f, t=T):
    return lambda z: jax.grad(lambda z: (f(z) * t).sum())(z)


def forward(f, t=T):
    return lambda z: jax.jvp(f, (z,), (t,))[1]


MODES = {
    "reverse over reverse": lambda f: reverse(jax.grad(f)),
    "forward over reverse": lambda f: forward(jax.grad(f)),
    "reverse over forward": lambda f: jax.grad(forward(f)),
    "forward over forward": lambda f: forward(forward(f), U),
    "reverse over reverse over forward": lambda f: reverse(jax.grad(forward(f)), U),
    "reverse over reverse of a rematerialized function": lambda f: reverse(jax.grad(jax.checkpoint(f))),
    "hessian": jax.hessian,
}


def of_strategies(sine, mode, names):
    """The derivatives by each strategy, and by JAX's scan, from one compiled program."""
    losses = [functools.partial(f, sine) for f in (plain, *(STRATEGIES[name] for name in names))]
    return jax.jit(lambda z: [MODES[mode](loss)(z) for loss in losses])(jnp.array([0.8, 0.7, 1.1]))


SLOW = ("reverse over reverse over forward", "reverse over reverse of a rematerialized function", "hessian")
OF_VJP = ("reverse over reverse", "forward over reverse")  # JAX has no other mode


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "rule"), [*((m, "custom_jvp") for m in MODES), *((m, "custom_vjp") for m in OF_VJP)])
def test_derivative_equals_that_of_the_plain_loop(mode, rule):
    # JAX's `while` has no reverse mode: a loop of unknown length has one forward of reverse, or of forward.
    has_while = mode in ("forward over reverse", "forward over forward", "hessian")
    names = [name for name in STRATEGIES if has_while or name != "while_loop"]
    wanted, *found = of_strategies(RULES[rule], mode, names)
    for name, value in zip(names, found, strict=True):
        np.testing.assert_allclose(value, wanted, rtol=2e-4, atol=2e-4, err_msg=name)


def test_mapped_loop_whose_carry_is_reset_to_one_value():
    """The loop itself then has a last carry that all examples share; its linearization has one for each."""
    step = lambda w: lambda c, x: (0.3, sine_jvp(w * c + x))

    def of(**options):
        scan = statetx.scan if options else jax.lax.scan
        loop = lambda w: jnp.hstack(scan(step(w), w, jnp.arange(3.0), **options))
        first = lambda w: jax.jvp(loop, (w,), (w,))[1]
        return jax.vmap(lambda w: jax.jvp(first, (w,), (1.0,))[1])(jnp.array([0.5, 0.8]))

    np.testing.assert_allclose(of(checkpoint=statetx.Truncated(2)), of(), rtol=1e-5)


def stopped(sine, z, every=3):
    """The plain loop, whose carry keeps its value and loses its derivative after so many steps."""

    def body(loop, x):
        i, c = loop
        c = jnp.where((i > 0) & (i % every == 0), jax.lax.stop_gradient(c), c)
        c, y = step(sine, z[0], c, x)
        return (i + 1, c), y

    (_, c), ys = jax.lax.scan(body, (0, z[1]), z[2] * jnp.linspace(-0.5, 0.6, 2 * LENGTH))
    return c**2 + (ys**2).sum()


@pytest.mark.sample
@pytest.mark.parametrize(
    "mode",
    [
        "forward",
        *(
            pytest.param(m, marks=pytest.mark.thorough if m == "reverse over forward" else ())
            for m in MODES
            if m not in SLOW
        ),
    ],
)
def test_truncated_loop_with_rules_stops_derivatives_in_each_mode(mode):
    def truncated(z, checkpoint):
        strategy = statetx.Truncated(3, checkpoint=checkpoint)
        xs = z[2] * jnp.linspace(-0.5, 0.6, 2 * LENGTH)
        c, ys = statetx.scan(functools.partial(step, sine_jvp, z[0]), z[1], xs, checkpoint=strategy)
        return c**2 + (ys**2).sum()

    losses = [functools.partial(stopped, sine_jvp)]
    losses += [functools.partial(truncated, checkpoint=checkpoint) for checkpoint in (None, 2)]
    of = MODES.get(mode, forward)
    wanted, *found = jax.jit(lambda z: [of(loss)(z) for loss in losses])(jnp.array([0.8, 0.7, 1.1]))
    for value in found:
        np.testing.assert_allclose(value, wanted, rtol=2e-4, atol=2e-4)


def in_region(sine, z, region, scan):
    """A loop over segments, each a loop in a region."""

    def segment(c, xs):
        return scan(functools.partial(step, sine, z[0]), c, xs)

    c, ys = jax.lax.scan(region(segment), z[1], z[2] * jnp.linspace(-0.5, 0.6, 6).reshape(2, 3))
    return c**2 + (ys**2).sum()


REGIONS = {
    "checkpoint": jax.checkpoint,
    "twice": lambda f: jax.checkpoint(lambda c, xs: jax.lax.scan(jax.checkpoint(f), c, xs[None])),
    "branch": lambda f: jax.checkpoint(lambda c, xs: jax.lax.cond(c < 50, f, lambda c, xs: (c, c * xs), c, xs)),
}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("mode", "rule", "region"),
    [
        pytest.param(mode, rule, region, marks=() if region == "checkpoint" and mode in OF_VJP else pytest.mark.slow)
        for region in REGIONS
        for rule, modes in {"custom_jvp": MODES, "custom_vjp": OF_VJP}.items()
        for mode in modes
    ],
)
def test_loop_in_a_region_of_a_loop_has_the_derivative_of_the_plain_loop(mode, rule, region):
    scans = jax.lax.scan, functools.partial(statetx.scan, checkpoint=policies.Levels(1))
    losses = [functools.partial(in_region, RULES[rule], region=REGIONS[region], scan=scan) for scan in scans]
    wanted, found = jax.jit(lambda z: [MODES[mode](loss)(z) for loss in losses])(jnp.array([0.8, 0.7, 1.1]))
    np.testing.assert_allclose(found, wanted, rtol=2e-4, atol=2e-4)


def test_scan_and_unrolled_loop_differ():
    """Otherwise the table above shows nothing."""

    def second(loop):
        return float(jax.grad(jax.grad(loop))(0.7))

    def unrolled(x):
        for _ in range(LENGTH):
            x = sine_jvp(x)
        return x

    by_scan = second(lambda x: jax.lax.scan(lambda c, _: (sine_jvp(c), None), x, None, LENGTH)[0])
    by_slots = second(lambda x: statetx.fori_loop(0, LENGTH, lambda _, c: sine_jvp(c), x, checkpoint=2))
    assert by_slots == pytest.approx(by_scan, rel=1e-4)
    assert (abs(second(unrolled) - by_scan) > 0.01) is DROPS_RULES


def second_with_a_rule(scale, x, loop):
    """The second derivative of a loop, with a rule that closes over `scale`."""

    @jax.custom_jvp
    def sine(x):
        return jnp.sin(x)

    @sine.defjvp
    def _(primals, tangents):
        return sine(*primals), scale * jnp.cos(primals[0]) * tangents[0]

    return jax.jvp(jax.grad(lambda x: loop(lambda c: sine(c + x), x)), (x,), (1.0,))[1]


LOOPS = {
    "Levels": lambda f, x: statetx.fori_loop(0, 3, lambda i, c: f(c), x, checkpoint=policies.Levels(2)),
    "Slots": lambda f, x: statetx.fori_loop(0, 3, lambda i, c: f(c), x, checkpoint=policies.Slots(2)),
    "while_loop": lambda f, x: statetx.while_loop(
        lambda c: c[0] < 3, lambda c: (c[0] + 1, f(c[1])), (0, x), checkpoint=2
    )[1],
}


@pytest.mark.thorough
@pytest.mark.skipif(not DROPS_RULES, reason="since jax 0.12 the plain loop raises")
def test_rule_that_closes_over_a_traced_value():
    plain = lambda f, x: jax.lax.scan(lambda c, _: (f(c), None), x, None, 3)[0]
    loops = [plain, *LOOPS.values()]
    wanted, *found = jax.jit(lambda s, x: [second_with_a_rule(s, x, loop) for loop in loops])(0.6, 0.4)
    np.testing.assert_allclose(found, [wanted] * len(found), rtol=1e-4)


# -- parts of a batch: the derivatives of the function of the whole batch ----------------------------------------------

BATCH = jnp.array([-0.5, 0.2, 0.6, 1.3, -1.0, 0.4])
ORDERS = [*itertools.product("RF", repeat=2), *itertools.product("RF", repeat=3)]  # the first is the innermost
QUICK = ("RR", "RRR", "FRR", "RFF")


def part_loss(sine, z, x):
    return sine(z * x + 0.2 * sine(z)) ** 2


def in_parts(sine, z):
    return statetx.microbatch(lambda x: part_loss(sine, z, x).mean(), 3)(BATCH)


def in_chunks(sine, z):
    return statetx.chunked(lambda x: part_loss(sine, z, x).mean(), size=4)(BATCH)


def whole(sine, z):
    return part_loss(sine, z, BATCH).mean()


def derivatives(order, functions, wrap=lambda f: f):
    """The derivatives of functions of a number, from one compiled program."""
    pushed = lambda f: lambda z: jax.jvp(f, (z,), (1.0,))[1]
    for mode in order:
        functions = [wrap((jax.grad if mode == "R" else pushed)(f)) for f in functions]
    return jax.jit(lambda z: [f(z) for f in functions])(0.7)


def assert_equal_derivatives(order, *functions, **options):
    found, wanted = derivatives(order, functions, **options)
    assert abs(wanted) > 0.01
    np.testing.assert_allclose(found, wanted, rtol=2e-4)


@pytest.mark.sample
@pytest.mark.parametrize(
    ("order", "rule", "parts"),
    [
        pytest.param(order, rule, parts, marks=() if is_quick else pytest.mark.thorough)
        for order in map("".join, ORDERS)
        for rule in RULES
        for parts in (in_parts, in_chunks)
        if rule == "custom_jvp" or order[0] == "R"  # a backward rule has no forward mode
        for is_quick in [order in QUICK and parts is in_parts]
    ],
)
def test_parts_have_the_derivatives_of_the_whole(order, rule, parts):
    sine = RULES[rule]
    assert_equal_derivatives(order, functools.partial(parts, sine), functools.partial(whole, sine))


def test_derivatives_by_rules_and_without_differ():
    """Otherwise the table above shows nothing."""
    by_scan = lambda z: jax.lax.scan(lambda c, x: (c + part_loss(sine_jvp, z, x) / 6, None), 0.0, BATCH)[0]
    second, other = derivatives("RR", [functools.partial(whole, sine_jvp), by_scan])
    assert bool(abs(second - other) > 0.01) is DROPS_RULES


def outputs(sine, z, x):
    """Results that are added up, joined, and kept of one part."""
    losses = part_loss(sine, z, x)
    return losses.mean(), losses.sum(), sine(losses * z), sine(z * x[0]), sine(z * x[-1])


def combined(mean, total, joined, first, last):
    return mean + 2 * total + (joined**2).sum() + first * last + last**2


@pytest.mark.sample("slow")
@pytest.mark.parametrize("rule", RULES)
def test_all_outputs_of_parts_have_the_derivatives_of_the_whole(rule):
    sine = RULES[rule]
    reduce = ("mean", "sum", "concat", "first", "last")
    parts = lambda z: combined(*statetx.microbatch(lambda x: outputs(sine, z, x), 3, reduce=reduce)(z * BATCH))
    assert_equal_derivatives("RR", parts, lambda z: combined(*outputs(sine, z, z * BATCH)))


@pytest.mark.parametrize("rule", RULES)
def test_third_derivative_of_the_last_part_is_that_of_the_whole(rule):
    """The loop of its second derivative is one of independent steps, too, though a carry has a cotangent."""
    last = lambda z, x: RULES[rule](z * x[-1])
    parts = lambda z: statetx.microbatch(lambda x: last(z, x), 3, reduce="last")(z * BATCH) ** 2
    assert_equal_derivatives("RRR", parts, lambda z: last(z, z * BATCH) ** 2)


@pytest.mark.slow
def test_parts_that_update_states_for_later_calls_have_the_derivatives_of_the_whole():
    """A running mean, and a key that each part advances: what the parts compute depends on neither's derivative."""

    def noisy(z, key, x):
        return (sine_jvp(z * x + jax.random.normal(key, x.shape)) ** 2).mean()

    def parts(z):
        mean, keys = statetx.State(jnp.float32(0.3)), statetx.RngState(jax.random.key(0))

        def loss(x):
            mean.value = 0.9 * mean.value + 0.1 * sine_jvp(x * z).mean()
            return noisy(z, keys.next(), x)

        return statetx.microbatch(loss, 3)(BATCH)

    def whole(z):
        keys = statetx.RngState(jax.random.key(0))
        return sum(noisy(z, keys.next(), x) for x in BATCH.reshape(3, 2)) / 3

    assert_equal_derivatives("RRR", parts, whole)


def test_staged_derivatives_of_parts_are_those_of_the_whole():
    functions = functools.partial(in_parts, sine_jvp), functools.partial(whole, sine_jvp)
    assert_equal_derivatives("RRR", *functions, wrap=lambda f: jax.checkpoint(jax.jit(f)))


def test_mapped_parts_have_the_derivatives_of_the_whole():
    mapped = lambda f: lambda z: jax.vmap(lambda a: f(sine_jvp, a * z))(jnp.array([0.5, 1.0, 2.0])).sum()
    assert_equal_derivatives("RR", mapped(in_parts), mapped(whole))


def test_parts_with_a_rule_that_closes_over_a_traced_value():
    parts = lambda f, x: statetx.microbatch(lambda xs: f(x * xs).mean(), 3)(BATCH)
    whole = lambda f, x: f(x * BATCH).mean()
    found, wanted = jax.jit(lambda s, x: [second_with_a_rule(s, x, loop) for loop in (parts, whole)])(0.6, 0.4)
    np.testing.assert_allclose(found, wanted, rtol=1e-4)
