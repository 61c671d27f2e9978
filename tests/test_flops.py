"""Counts of floating-point operations, against counts by hand."""

import jax
import jax.numpy as jnp
import pytest

from statetx._equations.flops import flops


def cost(f, *args):
    return sum(map(flops, jax.make_jaxpr(f)(*args).eqns))


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
    f = lambda x, k: jax.lax.conv_general_dilated(x, k, (1, 1), "SAME", feature_group_count=4)  # noqa: E731
    assert cost(f, jnp.ones((1, 4, 8, 8)), jnp.ones((8, 1, 3, 3))) == 2 * 8 * 64 * 9
