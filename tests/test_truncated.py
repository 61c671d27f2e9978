"""Truncated loops: gradients of a hand-written loop with `jax.lax.stop_gradient`, in the memory of one segment."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from libraries import LIBRARIES, get

import statetx
from statetx import Truncated, policies
from statetx.policies import Levels, Slots

SEGMENTS = [
    lambda k: Truncated(k),
    lambda k: Truncated(k, policy=policies.everything),
    lambda k: Truncated(k, policy="dots"),
    lambda k: Truncated(k, checkpoint=2),
    lambda k: Truncated(k, checkpoint=Slots(2), policy=policies.everything),
    lambda k: Truncated(k, checkpoint=Levels(2)),
    lambda k: Truncated(k, checkpoint=(k,)),
    lambda k: Truncated(k, checkpoint="auto"),
]
RNG = np.random.default_rng(0)
W = jnp.asarray(RNG.normal(size=(4, 4)) / 2, jnp.float32)
H = jnp.asarray(RNG.normal(size=4), jnp.float32)
XS = jnp.asarray(RNG.normal(size=(11, 4)), jnp.float32)


@functools.cache
def expected(length, k, reverse=False):
    return of_all(functools.partial(by_hand, k=k, reverse=reverse))(W, H, XS[:length])


def near(actual, desired):
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-6), actual, desired)


def by_hand(w, h, xs, k, reverse=False):
    """The loss of an unrolled loop whose gradient stops every k steps; every step and the last carry are in it."""
    ys = [None] * len(xs)
    for n, i in enumerate(range(len(xs))[:: -1 if reverse else 1]):
        if n > 0 and n % k == 0:
            h = jax.lax.stop_gradient(h)
        h = jnp.tanh(h @ w + xs[i])
        ys[i] = jnp.sum(h)
    return jnp.sum(h**2) + jnp.stack(ys) @ jnp.arange(1.0, 1 + len(xs))


def by_scan(w, h, xs, checkpoint, reverse=False):
    def step(h, x):
        h = jnp.tanh(h @ w + x)
        return h, jnp.sum(h)

    h, ys = statetx.scan(step, h, xs, reverse=reverse, checkpoint=checkpoint)
    return jnp.sum(h**2) + ys @ jnp.arange(1.0, 1 + len(xs))


def of_all(fun):
    return jax.value_and_grad(fun, (0, 1, 2))


# -- gradients -----------------------------------------------------------------------------------------------------


@pytest.mark.sample
@pytest.mark.parametrize("segment", SEGMENTS)
@pytest.mark.parametrize("length", [1, 6, pytest.param(11, marks=pytest.mark.slow)])
def test_gradients_are_those_of_stop_gradient(segment, length):
    xs = XS[:length]
    for k in (1, 4, 6):
        near(of_all(by_scan)(W, H, xs, segment(k)), expected(length, k))


def test_truncation_changes_the_gradient():
    """The inputs of these tests tell a truncated gradient from the plain one."""
    plain = jax.grad(by_scan)(W, H, XS, None)
    assert not np.allclose(jax.grad(by_hand)(W, H, XS, 3), plain, rtol=1e-2)


@pytest.mark.sample
@pytest.mark.parametrize("k", [2, 3, 11])
def test_reverse_segments_begin_at_the_first_step_that_runs(k):
    for checkpoint in (Truncated(k), Truncated(k, checkpoint=2)):
        near(of_all(by_scan)(W, H, XS, checkpoint, True), expected(11, k, True))


def test_first_carry_has_the_gradient_of_the_first_segment():
    def last(h, checkpoint):
        return jnp.sum(statetx.scan(lambda h, x: (h @ W + x, None), h, XS, checkpoint=checkpoint)[0])

    assert not np.any(jax.grad(last)(H, Truncated(5)))
    near(jax.grad(last)(H, Truncated(11)), jax.grad(last)(H, None))


@pytest.mark.sample("slow")
@pytest.mark.parametrize("checkpoint", [Truncated(3), Truncated(4, checkpoint=Levels(1)), Truncated(3, policy="dots")])
def test_other_modes_and_orders(checkpoint):
    def ours(w):
        return by_scan(w, H, XS[:6], checkpoint)

    def reference(w):
        return by_hand(w, H, XS[:6], checkpoint.num)

    near(jax.jvp(ours, (W,), (W,)), jax.jvp(reference, (W,), (W,)))
    near(jax.jit(jax.grad(ours))(W), jax.grad(reference)(W))
    near(jax.jvp(jax.grad(ours), (W,), (W,)), jax.jvp(jax.grad(reference), (W,), (W,)))

    def along(f):
        return jax.grad(lambda w: jnp.sum(jax.grad(f)(w) * W))

    near(along(ours)(W), along(reference)(W))


@pytest.mark.sample("slow")
@pytest.mark.parametrize("checkpoint", [Truncated(4), Truncated(4, checkpoint=2)])
def test_vmap_inside_and_outside(checkpoint):
    hs = jnp.stack([H, 2 * H, -H])

    def each(f):
        return jax.vmap(jax.grad(f, (0, 1)), (None, 0))(W, hs)

    near(each(lambda w, h: by_scan(w, h, XS[:6], checkpoint)), each(lambda w, h: by_hand(w, h, XS[:6], 4)))

    def total(f):
        return jax.grad(lambda w: jnp.sum(jax.vmap(lambda h: f(w, h))(hs)))(W)

    near(total(lambda w, h: by_scan(w, h, XS[:6], checkpoint)), total(lambda w, h: by_hand(w, h, XS[:6], 4)))


def test_fori_loop_and_python_numbers():
    def loss(w, checkpoint):
        return statetx.fori_loop(0, 7, lambda i, x: jnp.sin(x * w) + i, 0, checkpoint=checkpoint)

    def reference(w):
        x = 0.0
        for i in range(7):
            x = jax.lax.stop_gradient(x) if i in (3, 6) else x
            x = jnp.sin(x * w) + i
        return x

    near(jax.value_and_grad(loss)(0.7, Truncated(3)), jax.value_and_grad(reference)(0.7))


def test_disable_jit_stops_the_same_gradients():
    count = statetx.State(jnp.zeros(()))

    def step(h, x):
        count.value = jnp.sin(count.value + jnp.sum(h))
        return jnp.tanh(h @ W + x), count.value

    def loss(h, xs):
        count.value = jnp.sum(h)
        h, ys = statetx.scan(step, h, xs, checkpoint=Truncated(4))
        h = statetx.fori_loop(0, 5, lambda i, h: jnp.sin(h * xs[i]), h, checkpoint=Truncated(2))
        return jnp.sum(h) + jnp.sum(ys) + count.value

    compiled = statetx.grad(loss, (0, 1))(H, XS)
    with jax.disable_jit():
        near(statetx.grad(loss, (0, 1))(H, XS), compiled)


# -- states --------------------------------------------------------------------------------------------------------


@pytest.mark.sample
@pytest.mark.parametrize("lib", LIBRARIES.values(), ids=LIBRARIES)
@pytest.mark.parametrize("checkpoint", [Truncated(4), Truncated(3, checkpoint=2)])
def test_carried_states_stop_and_continue(lib, checkpoint):
    w = (LIBRARIES["statetx"] if lib.name == "ref" else lib).param(W)
    h, steps = lib.make(H), lib.make(jnp.zeros((), jnp.int32))

    def step(carry, x):
        lib.set(h, jnp.tanh(lib.get(h) @ get(w) + x))
        lib.set(steps, lib.get(steps) + 1)
        return carry, jnp.sum(lib.get(h))

    def loss(xs):
        lib.set(h, H)
        _, ys = statetx.scan(step, None, xs, checkpoint=checkpoint)
        return jnp.sum(lib.get(h) ** 2) + ys @ jnp.arange(1.0, 1 + len(xs))

    (of_w, of_xs) = statetx.grad(loss, 0, wrt=w)(XS)
    expected = jax.grad(by_hand, (0, 2))(W, H, XS, checkpoint.num)
    near((jnp.asarray(of_w), of_xs), expected)
    assert int(lib.get(steps)) == 11
    last, _ = jax.lax.scan(lambda h, x: (jnp.tanh(h @ W + x), None), H, XS)
    near(lib.get(h), last)


@pytest.mark.parametrize("split", [False, True])
def test_random_draws_are_those_of_the_plain_loop(split):
    def run(checkpoint):
        rng = statetx.RngState(0)

        def step(h, x):
            h = jnp.where(jax.random.bernoulli(rng.next(), 0.5, (4,)), jnp.tanh(h @ W + x), 0.0)
            return h, jnp.sum(h)

        rules = {statetx.RngState: statetx.Split} if split else None
        value, grad = statetx.value_and_grad(
            lambda h: jnp.sum(statetx.scan(step, h, XS, states=rules, checkpoint=checkpoint)[1])
        )(H)
        return value, grad, jax.random.key_data(rng.value)

    plain, truncated, whole = run(None), run(Truncated(4)), run(Truncated(11))
    near(truncated[0], plain[0])
    near(truncated[2], plain[2])
    near(whole, plain)


# -- memory and runs -----------------------------------------------------------------------------------------------


def temp_bytes(checkpoint, length, size=512):
    w, xs = jnp.eye(size) / 2, jnp.ones((length, 1, 1))

    def loss(w):
        def step(h, x):
            for _ in range(6):  # a step computes much more than its carry
                h = jnp.tanh(h @ w + x)
            return h, None

        return jnp.sum(statetx.scan(step, jnp.ones((64, size)), xs, checkpoint=checkpoint)[0])

    return jax.jit(jax.grad(loss)).lower(w).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.thorough
def test_memory_is_that_of_one_segment_and_a_carry_for_each():
    """A step computes much more than its carry."""
    carry, weights = 64 * 512 * 4, 512 * 512 * 4
    segment, truncated = temp_bytes(None, 4), temp_bytes(Truncated(4), 48)
    # 12 carries at the starts of segments, and the gradient of the weights, summed over segments.
    assert truncated < segment + 12 * carry + weights + 2**10
    assert temp_bytes(None, 48) > 5 * truncated
    # Four times as long, one more carry for each further segment.
    assert abs(temp_bytes(Truncated(4), 192) - truncated - 36 * carry) < 2**10


def test_a_segment_with_a_strategy_of_its_own_needs_less():
    inner = temp_bytes(Truncated(24, checkpoint=Slots(3)), 48)
    assert inner < 0.5 * temp_bytes(Truncated(24), 48)


def test_policy_saves_values_of_all_steps():
    kept = temp_bytes(Truncated(4, policy=policies.everything), 48)
    assert kept > 48 * 6 * 64 * 512 * 4


def products(fun, *args):
    """The runs of the body in a compiled gradient, counted by its operations."""
    return statetx.measure(fun, *args, gradient=True).flops


@pytest.mark.parametrize(
    ("checkpoint", "runs"),
    [
        (Truncated(4), 2),
        (Truncated(100), 1),
        (Truncated(4, policy=policies.everything), 1),
        (Truncated(4, checkpoint=Levels(1)), 3),
        (Truncated(6, checkpoint=Slots(3), policy=policies.everything), None),
    ],
)
def test_num_runs_is_the_compiled_number(checkpoint, runs):
    w = jnp.eye(16)

    def cost(checkpoint):
        def step(h, _):
            return (jnp.tanh(h @ w @ w), None)

        return products(
            lambda h: jnp.sum(statetx.scan(step, h, length=24, checkpoint=checkpoint)[0]), jnp.ones((16, 16))
        )

    of_run = 24 * 2 * 2 * 16**3  # of 24 forward steps
    extra = (cost(checkpoint) - cost(None)) / of_run + 1
    num_runs = checkpoint.num_runs(24) / 24
    if checkpoint.checkpoint == Slots(3):
        assert extra < num_runs - 0.15
    else:
        assert abs(extra - num_runs) < 0.15
    assert runs is None or checkpoint.num_runs(24) == runs * 24


@pytest.mark.parametrize("options", [{"offload": True}, {"policy": policies.dots, "keep": "loop"}])
def test_lengths_that_fit_no_shorter_segment_are_levels_there(options):
    lengths, levels = policies.Lengths(2, 2, **options), Levels(2, **options)
    assert [Truncated(4, checkpoint=lengths).within(n) for n in (4, 3)] == [lengths, levels]


def test_program_size_does_not_depend_on_the_length():
    def loss(w, xs):
        return by_scan(w, H, xs, Truncated(4))

    def size(n):
        return str(jax.make_jaxpr(jax.grad(loss))(W, jnp.ones((n, 4)))).count(" = ")

    assert size(400) == size(40)


# -- programs around it --------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_meshes_and_shard_map():
    hs = jnp.stack([H * n for n in range(8)])

    def loss(w, h, f):
        return jnp.sum(jax.vmap(lambda h: f(w, h, XS, 4))(h))

    expected = jax.grad(loss, (0, 1))(W, hs, by_hand)
    for checkpoint in (Truncated(4), Truncated(4, checkpoint=2)):

        def ours(w, h, c=checkpoint):
            return batched(w, h, c)

        for kind in (AxisType.Auto, AxisType.Explicit):
            mesh = jax.make_mesh((4,), ("d",), axis_types=(kind,))
            with jax.set_mesh(mesh):
                sharded = jax.device_put(hs, NamedSharding(mesh, P("d")))
                near(jax.jit(jax.grad(ours, (0, 1)))(W, sharded), expected)
        mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))
        mapped = jax.shard_map(
            lambda w, h: jax.lax.psum(ours(w, h), "d"), mesh=mesh, in_specs=(P(), P("d")), out_specs=P()
        )
        near(jax.jit(jax.grad(mapped, (0, 1)))(W, hs), expected)


def batched(w, hs, checkpoint):
    def step(h, x):
        h = jnp.tanh(h @ w + x[None])
        return h, jnp.sum(h)

    h, ys = statetx.scan(step, hs, XS, checkpoint=checkpoint)
    return jnp.sum(h**2) + ys @ jnp.arange(1.0, 1 + len(XS))


def test_in_remat_jit_and_training_step():
    w, h = statetx.Param(W), statetx.State(H)

    def loss(xs):
        def step(carry, x):
            h.value = jnp.tanh(h.value @ w.value + x)
            return carry, jnp.sum(h.value)

        return statetx.scan(step, None, xs, checkpoint=Truncated(4))[1] @ jnp.arange(1.0, 1 + len(xs))

    plain = statetx.grad(loss, wrt=w)(XS)
    h.value = H
    near(statetx.jit(statetx.grad(statetx.remat(loss), wrt=w))(XS), plain)


def test_remat_scan_takes_it():
    layers = statetx.stack(Layer, 6)
    states = statetx.states(layers)

    def deep(lengths, policy=None):
        return statetx.grad(lambda x: jnp.sum(statetx.remat_scan(layers, lengths, policy=policy)(x)), wrt=states)(H)[
            "w"
        ]

    truncated, plain = deep(Truncated(2)), deep((6,))
    near(truncated[-2:], plain[-2:])
    assert not np.any(truncated[:-2]) and np.any(plain[:-2])
    near(deep(Truncated(2), policies.everything), truncated)


class Layer:
    def __init__(self):
        self.w = statetx.Param(W)

    def __call__(self, x):
        return jnp.tanh(x @ self.w.value)


def test_errors_and_representation():
    assert repr(Truncated(4, checkpoint=2)) == "Truncated(4, checkpoint=Slots(2))"
    assert statetx.Truncated is Truncated and Truncated(4, checkpoint=2) == Truncated(4, checkpoint=Slots(2))
    assert hash(Truncated(4)) != hash(Truncated(5))
    for num in (0, 2.0, True):
        with pytest.raises(statetx.PolicyError, match="Truncated: num must be a whole number"):
            Truncated(num)
    with pytest.raises(statetx.PolicyError, match="give the policy to the strategy of the segment"):
        Truncated(4, checkpoint=2, policy="dots")
    with pytest.raises(statetx.PolicyError, match=r"Truncated: checkpoint='64MiB'.* Budget\('64MiB'\)"):
        Truncated(4, checkpoint="64MiB")
    with pytest.raises(statetx.PolicyError, match="unroll"):
        statetx.scan(lambda c, x: (c, x), 0.0, XS, unroll=2, checkpoint=Truncated(2))
