"""Depth of nested transforms: at least half of JAX's, with Python's limit of 1,000 frames."""

import sys

import jax
import jax.numpy as jnp
import pytest

import statetx

COUNT = statetx.State(jnp.float32(0))


def leaf(x):
    COUNT.value += 1.0
    return x * 1.01


NESTED = {  # JAX traces 112 levels of `jit`, 103 of `remat`, over 100 of the others; it compiles 44 of `scan` itself
    "jit": (56, statetx.jit),
    "remat": (52, statetx.remat),
    "cond": (50, lambda f: lambda x: statetx.cond(x > 0, f, jnp.sin, x)),
    "scan": (50, lambda f: lambda x: statetx.scan(lambda c, _: (f(c), None), x, length=1)[0]),
}


@pytest.mark.sample
@pytest.mark.parametrize("transform", NESTED)
def test_nested_transforms_are_traced_to_half_the_depth_of_jax(transform):
    levels, wrap = NESTED[transform]
    f = leaf
    for _ in range(levels):
        f = wrap(f)
    before = COUNT.value
    assert statetx.eval_shape(f, jnp.float32(1)).shape == ()
    if transform == "remat":
        assert abs(float(jax.grad(lambda x: f(x))(1.0)) - 1.01) < 1e-6
        assert COUNT.value == before + 1


def test_derivatives_of_nested_parts_are_taken_a_few_times_each():
    def num_calls(levels):
        num, f = 0, lambda x: jnp.sin(x).mean()
        for _ in range(levels):
            f = statetx.microbatch(f, 2)

        def count(frame, event, arg):
            nonlocal num
            num += event == "call"

        sys.setprofile(count)
        try:
            jax.eval_shape(jax.grad(f), jnp.ones(32))
        finally:
            sys.setprofile(None)
        return num

    num_calls(1)  # JAX imports, and fills caches
    assert num_calls(3) <= 2.5 * num_calls(2)  # each level asks those in it which tangents are zero
