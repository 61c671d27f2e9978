"""`loop_report`: the loops that a gradient reverses, counted as they run in it, for losses and for steps."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

import statetx
from statetx import policies
from statetx.policies import Slots

H = jnp.linspace(-1, 1, 8).reshape(2, 4)
W = jnp.eye(4) / 2
XS = jnp.linspace(0, 1, 60 * 8).reshape(60, 2, 4)


class Runs:
    """Counts the runs of the bodies of loops."""

    def __init__(self):
        self._calls = []

    def here(self, x):
        jax.debug.callback(lambda _: self._calls.append(0), x)

    def of(self, fun, *args):
        self._calls.clear()
        jax.block_until_ready(fun(*args))
        jax.effects_barrier()
        return len(self._calls)


def product_loss(runs, w, h, xs, checkpoint=9):
    """The derivative with respect to xs needs a value that the others do not: ``w @ sin(h)``."""

    def step(h, x):
        runs.here(h)
        return jnp.sin(h) @ w * x, None

    return statetx.scan(step, h, xs, checkpoint=checkpoint)[0].sum()


def only_row(fun, *args, **options):
    (row,) = statetx.loop_report(fun, *args, policies=(), **options).rows
    return row


# -- what is differentiated ----------------------------------------------------------------------------------------


@pytest.mark.sample
@pytest.mark.parametrize("argnums", [(0, 1, 2), (0,), (1,), (2,), (0, 1)], ids=str)
def test_runs_are_those_of_the_gradient_with_respect_to_the_same_arguments(argnums):
    runs = Runs()
    loss, args = functools.partial(product_loss, runs), (W, H, XS)
    gradient = jax.jit(jax.grad(loss, argnums))
    row = only_row(loss, *args, argnums=argnums)
    assert row.is_mixed and round(60 * row.runs) == runs.of(gradient, *args)
    assert only_row(gradient, *args) == row


def test_a_number_is_differentiated_if_argnums_says_so():
    loss = lambda scale, x: statetx.scan(lambda h, _: (jnp.sin(h * scale), None), x, None, 60, checkpoint=5)[0].sum()
    row = only_row(loss, 0.5, H, argnums=0)
    assert row == only_row(loss, jnp.asarray(0.5, jnp.float32), H, argnums=0)
    assert row.residual_bytes != only_row(loss, 0.5, H, argnums=1).residual_bytes


@pytest.mark.thorough
def test_arrays_that_a_loss_closes_over_are_not_differentiated():
    runs = Runs()
    loss, closed = functools.partial(product_loss, runs), lambda w, h: product_loss(runs, w, h, XS)
    row, row_of_all = only_row(closed, W, H), only_row(loss, W, H, XS)
    assert row == only_row(loss, W, H, XS, argnums=(0, 1))
    assert row.residual_bytes < row_of_all.residual_bytes and row.runs < row_of_all.runs
    assert round(60 * row.runs) == runs.of(jax.grad(closed, (0, 1)), W, H)
    assert round(60 * row_of_all.runs) == runs.of(jax.grad(loss, (0, 1, 2)), W, H, XS)


def test_states_are_differentiated():
    w = statetx.Param(W)
    step = lambda h, _: (jnp.sin(h @ w.value), None)
    loss = lambda h: statetx.scan(step, h, None, 60, checkpoint=Slots(9))[0].sum()
    row = only_row(loss, H)
    assert row == only_row(statetx.grad(loss, argnums=0, wrt=w), H)
    assert row.residual_bytes > only_row(statetx.grad(loss), H).residual_bytes


def test_loops_that_are_not_differentiated_are_not_listed():
    loss = functools.partial(product_loss, Runs())
    two = lambda w, h: (loss(w, h, XS), loss(jax.lax.stop_gradient(w), jnp.ones((2, 4)), XS))
    assert only_row(two, W, H).length == 60
    for fun in (lambda: loss(W, H, XS), lambda n: loss(W, H, XS) * n, lambda w: loss(w, H, XS) > 0):
        args = [W][: fun.__code__.co_argcount]
        assert "no differentiated loop has slots" in str(statetx.loop_report(fun, *args))


def test_a_loss_whose_steps_take_gradients_is_a_loss():
    """As of neurons whose integrator linearizes their equations."""

    def loss(w, h):
        def step(h, _):
            slope = jax.vjp(jnp.sin, h)[1](jnp.ones_like(h))[0]
            return jnp.tanh(h @ w) * slope, None

        return statetx.scan(step, h, None, 40, checkpoint=Slots(5))[0].sum()

    row = only_row(loss, jnp.eye(8), jnp.ones((4, 8)))
    assert (row.length, row.slots) == (40, 5)
    assert row == only_row(jax.grad(loss, argnums=(0, 1)), jnp.eye(8), jnp.ones((4, 8)))


def test_a_step_without_such_loops_need_not_have_a_derivative():
    def step(w):
        gradient = jax.grad(lambda w: (w**2).sum())(w)
        return jax.lax.while_loop(lambda w: w.sum() > 1, lambda w: w / 2, w - gradient)

    assert not statetx.loop_report(step, jnp.ones(4)).rows
    with pytest.raises(ValueError, match="while_loop"):
        statetx.loop_report(step, jnp.ones(4), argnums=0)


@pytest.mark.parametrize(("argnums", "error"), [(3, ValueError), ("w", TypeError)])
def test_mistakes_in_argnums(argnums, error):
    with pytest.raises(error, match="argnums"):
        statetx.loop_report(functools.partial(product_loss, Runs()), W, H, XS, argnums=argnums)


# -- steps ---------------------------------------------------------------------------------------------------------


def sgd_step(loss):
    opt = statetx.State(jnp.zeros_like(W))

    def step(w, h, xs):
        value, gradient = jax.value_and_grad(loss)(w, h, xs)
        opt.value = 0.9 * opt.value + gradient
        return w - opt.value, value

    return step


STEPS = {
    "jax.grad": jax.grad,
    "statetx.grad": statetx.grad,
    "jitted twice": lambda f: jax.jit(jax.grad(jax.jit(f))),
    "vjp": lambda f: lambda *args: jax.vjp(lambda w: f(w, *args[1:]), args[0])[1](1.0),
    "step with a state": sgd_step,
    "jitted step with a state": lambda f: statetx.jit(sgd_step(f)),
    "rematerialized": lambda f: jax.grad(statetx.remat(f)),
}


@pytest.mark.sample
@pytest.mark.parametrize("name", STEPS)
def test_a_step_has_the_rows_of_its_loss(name):
    loss = functools.partial(product_loss, Runs())
    expected = statetx.loop_report(loss, W, H, XS, argnums=0).rows
    step = STEPS[name](loss)
    for _ in range(2):  # the second one finds what JAX has traced
        rows = statetx.loop_report(step, W, H, XS).rows
        assert rows == expected and [r.policy for r in rows] == ["-", "dots", "nothing"]


@pytest.mark.parametrize(
    ("checkpoint", "is_plain"), [("auto", True), (policies.Budget("1GiB"), True), (policies.Budget("8KiB"), False)]
)
def test_a_step_has_the_strategy_that_sizes_choose(checkpoint, is_plain):
    loss = functools.partial(product_loss, Runs(), checkpoint=checkpoint)
    args = W, H, jnp.concatenate([XS, XS])
    row = only_row(jax.grad(loss), *args)
    assert row == only_row(loss, *args, argnums=0)
    assert (row.slots == 0) == is_plain and (row.runs == 1) == is_plain


def test_bytes_of_all_examples_count():
    loss = functools.partial(product_loss, Runs())
    one, hs = only_row(jax.grad(loss), W, H, XS), jnp.stack([H, H, H])
    for fun in (jax.vmap(jax.grad(loss), (None, 0, None)), jax.vmap(jax.jit(jax.grad(loss)), (None, 0, None))):
        row = only_row(fun, W, hs, XS)
        assert (row.carry_bytes, row.residual_bytes) == (3 * one.carry_bytes, 3 * one.residual_bytes)
        assert row.runs == one.runs


def test_a_loop_that_several_gradients_reverse_is_listed_once():
    class NotCounted:  # each trace makes a callback of its own, and with it another loop
        def here(self, x):
            pass

    loss = functools.partial(product_loss, NotCounted())
    both = lambda *args: (jax.grad(loss)(*args), jax.value_and_grad(loss)(*args))
    assert only_row(both, W, H, XS) == only_row(jax.grad(loss), W, H, XS)
    # With respect to other inputs it is reversed in another way.
    both = lambda *args: (jax.grad(loss)(*args), jax.grad(loss, 2)(*args))
    assert [r.residual_bytes for r in statetx.loop_report(both, W, H, XS, policies=()).rows] == [32, 64]


def test_a_step_in_a_shard_map():
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))

    def loss(w, xs):
        step = lambda h, x: (jnp.sin(h @ w) * jax.lax.pmean(x, "d"), None)
        return statetx.scan(step, jax.lax.pcast(H, ("d",), to="varying"), xs, checkpoint=Slots(9))[0].sum()

    specs = PartitionSpec(), PartitionSpec(None, "d")
    step = jax.shard_map(lambda *args: jax.grad(loss)(*args), mesh=mesh, in_specs=specs, out_specs=PartitionSpec())
    rows = statetx.loop_report(step, W, jnp.concatenate([XS, XS], 1)).rows
    assert [r.carry_bytes for r in rows] == [H.nbytes] * 3 and rows[0].is_mixed


@pytest.mark.thorough
def test_loops_are_listed_in_the_order_of_the_backward_pass_before_those_of_their_steps():
    def loop(h, length, step):
        return statetx.scan(lambda h, _: (step(h), None), h, None, length, checkpoint=Slots(3))[0]

    inner = lambda length: lambda h: loop(h, length, lambda h: jnp.sin(h @ W))
    loss = lambda h: loop(loop(h, 10, inner(11)), 20, inner(21)).sum()
    for fun in (loss, jax.grad(loss)):
        assert [r.length for r in statetx.loop_report(fun, H, policies=()).rows] == [20, 21, 10, 11]


# -- loops of unknown length ---------------------------------------------------------------------------------------


def counting_loss(runs, w, h, num, *, checkpoint, max_steps=None):
    def step(val):
        runs.here(val[0])
        return jnp.sin(val[0] @ w), val[1] + 1

    below = lambda val: val[1] < num
    return statetx.while_loop(below, step, (h, 0), checkpoint=checkpoint, max_steps=max_steps)[0].sum()


@pytest.mark.sample("slow")
@pytest.mark.parametrize(
    "slots", [1, pytest.param(2, marks=pytest.mark.slow), 3, 4, pytest.param(7, marks=pytest.mark.slow), 20]
)
def test_runs_of_a_while_loop_are_those_of_its_gradient(slots):
    runs = Runs()
    gradient = jax.jit(jax.grad(lambda *args: counting_loss(runs, *args, checkpoint=slots, max_steps=1000)))
    rows = statetx.loop_report(gradient, W, H, 0).rows
    assert [r.length for r in rows] == [10, 100, 1000] and not any(r.is_fixed for r in rows)
    for row in rows[: 2 if slots == 1 else 3]:
        assert round(row.length * row.runs) == runs.of(gradient, W, H, row.length)


@pytest.mark.sample("slow")
@pytest.mark.parametrize(
    "length", [0, 5, 33, 64, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2, 3, 6, 8, 31, 57))]
)
def test_runs_of_a_while_loop_with_max_steps(length):
    runs = Runs()
    for slots in (1, 2, 3, 5):
        loss = functools.partial(counting_loss, runs, checkpoint=slots, max_steps=length)
        row = statetx.loop_report(loss, W, H, 1000).rows[-1]
        assert (row.length, row.slots, row.carry_bytes) == (length, slots, H.nbytes + 4)
        assert round(length * row.runs) == runs.of(jax.grad(loss), W, H, 1000)


def test_a_while_loop_is_one_loop_of_several_lengths():
    loss = functools.partial(counting_loss, Runs(), checkpoint=Slots(4, policy=policies.dots))
    report = statetx.loop_report(loss, W, H, 10)
    assert [(r.length, r.is_own) for r in report.rows] == [(10, True), (100, False), (1000, False), (10_000, False)]
    assert {r.policy for r in report.rows} == {"dots"}
    assert "1 differentiated loop with" in str(report) and "if 10,000" in str(report)


def test_what_a_step_of_a_while_loop_keeps_depends_on_what_is_differentiated():
    loss = functools.partial(counting_loss, Runs(), checkpoint=4)
    of_w, of_h = (statetx.loop_report(loss, W, H, 10, argnums=i).rows[0].residual_bytes for i in (0, 1))
    assert of_w == 2 * of_h == 2 * H.nbytes


def test_a_while_loop_in_the_steps_of_a_loop():
    def loss(h):
        step = lambda h, _: (jnp.sin(counting_loss(Runs(), W, h, 5, checkpoint=3) * h), None)
        return statetx.scan(step, h, None, 30, checkpoint=Slots(4))[0].sum()

    for fun in (loss, loss, jax.grad(loss)):
        lengths = [(r.length, r.slots) for r in statetx.loop_report(fun, H, policies=()).rows]
        assert lengths == [(30, 4), (10, 3), (100, 3), (1000, 3), (10_000, 3)]


def test_policies_that_the_report_tries_give_no_warnings():
    w = statetx.Param(jnp.ones(4))
    step = lambda c, x: (jnp.tanh(c * w.value + x), None)  # without a product: "dots" saves nothing
    loss = lambda xs: statetx.scan(step, jnp.zeros(4), xs, checkpoint=policies.Slots(3))[0].sum()
    report = statetx.loop_report(loss, jnp.ones(41))  # warnings are errors in the tests
    assert [row.policy for row in report.rows] == ["-", "dots", "nothing"]
