"""Counts of floating-point operations, against counts by hand."""

import jax
import jax.numpy as jnp
import pytest

import statetx
from statetx.policies import Slots


def cost(f, *args):
    return statetx.measure(f, *args, gradient=False).flops


@pytest.mark.parametrize(
    "f, shapes, expected",
    [
        (jnp.matmul, [(3, 4), (4, 5)], 2 * 3 * 4 * 5),
        (jnp.matmul, [(7, 3, 4), (7, 4, 5)], 2 * 7 * 3 * 4 * 5),
        (lambda x: jnp.sin(x) + x, [(3, 4)], 24),
        (lambda x: x.sum(0), [(3, 4)], 12),
        (lambda x: x.reshape(4, 3).T[:2], [(3, 4)], 0),
        (lambda x: jax.lax.scan(lambda c, _: (jnp.sin(c), None), x, None, length=6)[0], [(5,)], 30),
        (lambda x: jax.lax.cond(x[0] > 0, jnp.sin, lambda x: x * x + x, x), [(5,)], 1 + 10),
        (jax.jit(lambda x: jnp.exp(x)), [(5,)], 5),
        # batch 2, 8 x 8 results, 4 of 3 channels through 3 x 3 entries
        (lambda x, k: jax.lax.conv(x, k, (1, 1), "SAME"), [(2, 3, 8, 8), (4, 3, 3, 3)], 2 * 2 * 4 * 64 * 3 * 9),
        (jnp.fft.fft, [(16,)], 5 * 16 * 4),
        (lambda a, b: jax.lax.linalg.triangular_solve(a, b, left_side=True), [(6, 6), (6, 2)], 72),
    ],
)
def test_flops_of_each_operation(f, shapes, expected):
    count = cost(f, *(jnp.ones(shape) for shape in shapes))
    # Index arithmetic and conversions that jnp adds around are allowed a few operations.
    assert expected <= count <= expected + 5


def test_grouped_convolution_costs_its_group():
    f = lambda x, k: jax.lax.conv_general_dilated(x, k, (1, 1), "SAME", feature_group_count=4)
    assert cost(f, jnp.ones((1, 4, 8, 8)), jnp.ones((8, 1, 3, 3))) == 2 * 8 * 64 * 9


LOOPS = [(100, Slots(5)), (7, Slots(1)), (3, Slots(8)), (2**20, Slots(20))]


@pytest.mark.sample
@pytest.mark.parametrize("length, strategy", LOOPS, ids=repr)
@pytest.mark.parametrize("batch, num_residuals", [(1, 1), (3, 9)])
def test_checkpointed_loop_counts_every_run_of_its_step(length, strategy, batch, num_residuals):
    # The steps of the two programs differ by a product that has no derivative, so the programs differ by its runs
    # alone. With the value: without it, the last steps of the forward sweep are dead code.
    w = jnp.ones((8, 8))

    def loss(h, has_product):
        def step(h, _):
            x = jax.lax.stop_gradient(w @ h if has_product else h)
            h = h + x
            for _ in range(num_residuals):
                h = jnp.sin(h)
            return h, None

        return statetx.scan(step, h, length=length, checkpoint=strategy)[0].sum()

    gradient = jax.vmap(jax.value_and_grad(loss), (0, None))
    with_product, without = (
        statetx.measure(gradient, jnp.ones((batch, 8)), p, gradient=False).flops for p in (True, False)
    )
    num_runs = strategy.runs(length, residual_bytes=num_residuals)
    assert with_product - without == num_runs * 2 * batch * 8 * 8


def test_loop_of_unknown_length_counts_one_step():
    f = lambda x: jax.lax.while_loop(lambda x: x[0] < 9, jnp.exp, x)
    assert cost(f, jnp.ones(50)) in range(50, 55)
