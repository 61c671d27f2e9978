"""`fence=`: rematerialization lowers the compiled program's memory, on every backend and with default flags."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import statetx
from helpers import assert_close, benchmark

CPU_DROPS_BARRIERS = jax.__version_info__ < (0, 11, 1)
on_cpu = pytest.mark.skipif(jax.default_backend() != "cpu", reason="figures of XLA on a CPU")


with benchmark("programs") as programs:
    pass

# Each is unrolled, and small enough for a test; benchmarks/planner.py takes them at full size.
UNROLLED = {
    "MLP": functools.partial(programs.mlp, layers=8, width=64, batch=512),
    "transformer": functools.partial(programs.transformer, layers=5, width=64, heads=4, time=128, batch=4),
    "conv": functools.partial(programs.conv_net, layers=8, channels=16, size=16, batch=8),
    "U-Net": functools.partial(programs.unet, channels=8, size=32, batch=8),
}


def cost(program):
    return statetx.measure(program.loss, program.params, *program.data)


@pytest.mark.thorough
@on_cpu
def test_independent_recomputations_run_one_by_one():
    """From jaxlib 0.11.1 on the barrier stays until XLA orders the operations, but independent ones all start early."""

    def branch(w, x):
        return functools.reduce(lambda x, _: jnp.tanh(x @ w), range(4), x)

    def temp_bytes(branch):
        loss = lambda ws, x: sum((branch(w, x) ** 2).sum() for w in ws)
        return statetx.measure(loss, list(jnp.ones((6, 32, 32)) / 32), jnp.ones((256, 32))).temp_bytes

    assert temp_bytes(statetx.remat(branch)) <= 0.6 * temp_bytes(branch)
    assert temp_bytes(statetx.remat(branch, fence="barrier")) > 0.9 * temp_bytes(branch)


@pytest.mark.slow
@on_cpu
def test_unrolled_blocks_with_loops():
    """From jaxlib 0.11.1 on the barrier stays until XLA orders the operations, but loops start early in spite of it."""

    def block(w, x):
        step = lambda h, _: (jnp.tanh(h @ w + x),) * 2
        return jax.lax.scan(step, x, None, length=16)[1].mean(0) + x

    def temp_bytes(block):
        loss = lambda ws, x: (functools.reduce(lambda x, w: block(w, x), ws, x) ** 2).sum()
        return statetx.measure(loss, list(jnp.ones((6, 32, 32)) / 32), jnp.ones((64, 32))).temp_bytes

    assert temp_bytes(statetx.remat(block)) <= 0.5 * temp_bytes(block)
    assert temp_bytes(statetx.remat(block, fence="barrier")) > 0.9 * temp_bytes(block)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n in ("U-Net", "conv", "transformer") else n for n in UNROLLED]
)
def test_unrolled_memory_at_most_half(name):
    make = UNROLLED[name]
    none, fenced = cost(make()), cost(make(statetx.remat))
    assert fenced.temp_bytes <= 0.5 * none.temp_bytes
    assert fenced.flops > 1.05 * none.flops, "what is recomputed is counted"
    if CPU_DROPS_BARRIERS:  # then jax.checkpoint's barrier saves nothing
        assert cost(make(functools.partial(statetx.remat, fence="barrier"))).temp_bytes > 0.9 * none.temp_bytes


@pytest.mark.thorough
@pytest.mark.parametrize(
    "fence", ["auto", *(pytest.param(f, marks=pytest.mark.slow) for f in ("barrier", "cond", None))]
)
def test_gradients_equal_without_remat(fence):
    plain = programs.transformer(layers=2, width=32, heads=2, time=16, batch=2)
    wrapped = programs.transformer(
        functools.partial(statetx.remat, fence=fence), layers=2, width=32, heads=2, time=16, batch=2
    )
    value, grads = jax.jit(jax.value_and_grad(plain.loss))(plain.params, *plain.data)
    value_, grads_ = jax.jit(jax.value_and_grad(wrapped.loss))(wrapped.params, *wrapped.data)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6), (value, grads), (value_, grads_))


def f(x):
    return jnp.sin(jnp.cos(x) * x)


@pytest.mark.parametrize(
    "transform",
    [
        jax.grad,
        lambda f: jax.grad(lambda x: jax.grad(f)(x)),
        jax.hessian,
        jax.jacfwd,
        lambda f: lambda x: jax.vmap(jax.grad(f))(jnp.stack([x, 2 * x]))[1],
        lambda f: jax.grad(lambda x: jax.vmap(f)(jnp.stack([x, 2 * x])).sum()),
        lambda f: jax.grad(lambda x: jax.jvp(f, (x,), (x,))[1]),
        lambda f: jax.grad(lambda x: jax.lax.scan(lambda h, _: (f(h), None), x, length=3)[0]),
    ],
)
@pytest.mark.parametrize("value", [0.7, 0.0, jnp.inf, jnp.nan, -0.0])
def test_every_mode(transform, value):
    fenced = jax.jit(transform(statetx.remat(f, fence="cond")))
    np.testing.assert_allclose(fenced(value), jax.jit(transform(f))(value), rtol=1e-6)


@pytest.mark.sample
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64", "complex64", "float8_e4m3fn"])
def test_every_dtype(dtype):
    with jax.enable_x64(dtype == "float64"):
        x = jnp.ones(3, dtype)
        loss = lambda f: lambda x, i, key, e: (f(x, i, key, e) * x).real.astype("float32").sum()

        def g(x, i, key, empty):
            return (x * x).at[i].multiply(jax.random.bernoulli(key).astype(x.dtype)) + empty.sum().astype(x.dtype)

        args = (x, jnp.int8(1), jax.random.key(0), jnp.zeros((0, 2)))
        fenced = jax.jit(jax.grad(loss(statetx.remat(g, fence="cond"))))(*args)
        assert fenced.dtype == x.dtype
        np.testing.assert_allclose(*(np.asarray(v, "complex64") for v in (fenced, jax.grad(loss(g))(*args))))


def test_inputs_without_testable_bits():
    """int4 has no whole bytes: it crashed. For complex numbers, the predicate reads the real part."""
    g = statetx.remat(lambda x, w: jnp.sin(x @ w.astype(jnp.float32)).sum(), fence="cond")
    args = (jnp.ones((2, 4)), jnp.ones((4, 2), jnp.int4))
    np.testing.assert_allclose(jax.jit(jax.grad(g))(*args), jax.grad(g)(*args), rtol=1e-6)
    h = statetx.remat(lambda z: jnp.sin(z) * z, fence="cond")
    lowered = jax.jit(jax.grad(lambda z: h(z).real.sum())).lower(jnp.ones(3, "complex64"))
    assert "stablehlo.case" in lowered.as_text() and "conditional" in lowered.compile().as_text()


def test_symbolic_shapes():
    """Of the backward pass of an operand that is only summed, nothing but the result has such a size."""
    (n,) = jax.export.symbolic_shape("n")
    fun = statetx.remat(lambda b, x: jnp.sum(b) * jnp.sin(jnp.cos(x)), fence="cond")
    types = jax.ShapeDtypeStruct((n,), jnp.float32), jax.ShapeDtypeStruct((), jnp.float32)
    exported = jax.export.export(jax.jit(jax.grad(fun)))(*types)
    np.testing.assert_allclose(exported.call(jnp.ones(4), jnp.float32(1.0)), np.full(4, np.sin(np.cos(1.0))), rtol=1e-6)


def text(fence, **options):
    wrapped = statetx.remat(f, fence=fence, **options)
    return jax.jit(jax.grad(lambda x: wrapped(x).sum())).lower(jnp.ones(3)).as_text()


def test_lowered_text_on_each_platform():
    assert "stablehlo.case" in text("cond") and "optimization_barrier" not in text("cond")
    assert "stablehlo.case" not in text("barrier") and "optimization_barrier" in text("barrier")
    assert "stablehlo.case" not in text(None) and "optimization_barrier" not in text(None)
    assert text("auto") == text("cond" if jax.default_backend() == "cpu" else "barrier")
    assert text("auto", prevent_cse=False) == text(None)
    assert text("cond", policy="everything").count("stablehlo.case") == 1


def test_auto_follows_the_lowering_platform():
    wrapped = statetx.remat(f)
    traced = jax.jit(jax.grad(lambda x: wrapped(x).sum())).trace(jnp.ones(3))
    assert "stablehlo.case" in traced.lower(lowering_platforms=("cpu",)).as_text()
    assert "stablehlo.case" not in traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("unroll", [1, 2])
@pytest.mark.parametrize("reverse", [False, True])
def test_loops_of_regions_begin_late_on_gpus(unroll, reverse):
    """XLA for GPUs makes arrays of constants when a program starts: those that a recomputed loop fills wait for it."""

    def layer(w, xs):
        step = lambda h, x: (jnp.tanh(h @ w + x),) * 2
        return jax.lax.scan(step, xs[0], xs, reverse=reverse, unroll=unroll)[1]

    def num_barriers(platform, **options):
        wrapped = statetx.remat(layer, **options)
        traced = jax.jit(jax.grad(lambda args: wrapped(*args).sum())).trace((jnp.eye(3), jnp.ones((4, 2, 3))))
        return traced.lower(lowering_platforms=(platform,)).as_text().count("stablehlo.optimization_barrier")

    assert num_barriers("cuda") == num_barriers("rocm") == 1 + 2  # of the region; of its loop and the loop's derivative
    assert num_barriers("cuda", fence="barrier") == num_barriers("tpu") == 1


@pytest.mark.parametrize(
    "dims", [("NHWC", "HWIO", "NHWC"), ("NCHW", "OIHW", "NCHW"), ("NHWC", "OIHW", "NCHW")], ids=str
)
@pytest.mark.parametrize("stride, groups", [((1, 1), 1), ((2, 1), 1), ((1, 2), 2)])
def test_convolutions_in_a_branch_have_fast_code(dims, stride, groups):
    """XLA rewrites convolutions on CPUs, but not within branches: there the derivatives were 20 times slower."""

    def convolution(x, w):
        y = jax.lax.conv_general_dilated(x, w, stride, "SAME", dimension_numbers=dims, feature_group_count=groups)
        return jnp.tanh(y)

    x = jnp.linspace(-1, 1, 2 * 6 * 6 * 4).reshape((2, 6, 6, 4) if dims[0] == "NHWC" else (2, 4, 6, 6))
    w = jnp.linspace(-1, 1, 9 * 4 // groups * 8)
    w = w.reshape((3, 3, 4 // groups, 8) if dims[1] == "HWIO" else (8, 4 // groups, 3, 3))
    gradient = lambda f: jax.jit(jax.grad(lambda x, w: (f(x, w) ** 2).sum(), argnums=(0, 1)))
    fenced = gradient(statetx.remat(convolution, fence="cond"))
    assert_close(fenced(x, w), gradient(convolution)(x, w), rtol=1e-5, atol=1e-5)
    branch = fenced.lower(x, w).as_text().partition("stablehlo.case")[2]
    found = re.findall(r"dim_numbers = (\[.*?\]x\[.*?\]->\[.*?\])", branch)
    canonical = "[b, 0, 1, f]x[0, 1, i, o]->[b, 0, 1, f]"
    assert found == [canonical] * 3
    # XLA computes the product of all pairs of groups of a batch, as in derivatives by grouped weights.
    assert branch.count("batch_group_count = 1 ") == 3


@pytest.mark.parametrize("policy", ["dots", statetx.policies.names("h")], ids=repr)
def test_only_low_precision_residuals_are_rounded(policy):
    """JAX rounds all residuals; for float32 that is a copy, and each residual was in memory twice."""
    inner = lambda x: jnp.sin(statetx.checkpoint_name(jnp.tanh(x @ x), "h") @ x)
    count = lambda fun, x: str(jax.make_jaxpr(jax.grad(lambda x: fun(x).sum()))(x)).count("reduce_precision")
    ours, exact, short = statetx.remat(inner, policy=policy), jnp.ones((3, 3)), jnp.ones((3, 3), "bfloat16")
    assert count(ours, exact) == 0 and count(ours, short) > 0
    theirs = jax.checkpoint(inner, policy=jax.checkpoint_policies.dots_saveable)
    assert count(theirs, exact) > 0, "what is kept by others is rounded as JAX does"


def test_loop_has_no_fence():
    step = statetx.remat(f)
    loss = lambda x: jax.lax.scan(lambda h, _: (step(h), None), x, length=3)[0].sum()
    assert "stablehlo.case" not in jax.jit(jax.grad(loss)).lower(jnp.ones(3)).as_text()


def test_jax_checkpoint_is_unchanged():
    loss = lambda x: jax.checkpoint(f)(x).sum()
    lowered = jax.jit(jax.grad(loss)).lower(jnp.ones(3)).as_text()
    assert "stablehlo.case" not in lowered and "optimization_barrier" in lowered


def test_shard_map_and_many_devices():
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("d")
    for check in (True, False):
        mapped = jax.shard_map(
            lambda x: statetx.remat(f, fence="cond")(x), mesh=mesh, in_specs=spec, out_specs=spec, check_vma=check
        )
        got = jax.jit(jax.grad(lambda x: mapped(x).sum()))(jnp.ones(4))  # noqa: B023
        np.testing.assert_allclose(got, jax.grad(lambda x: f(x).sum())(jnp.ones(4)), rtol=1e-6)


@pytest.mark.skipif(len(jax.devices()) < 4, reason="needs 4 devices; conftest asks for them")
@pytest.mark.parametrize("check", [True, False])
def test_layers_in_shard_map_take_less_memory(check):
    """With checked types the cotangent of a weight is added up over devices in the recomputed function itself."""
    mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:4])
    ws = jax.random.normal(jax.random.key(0), (6, 16, 16)) / 4
    x = jax.random.normal(jax.random.key(1), (512, 16))

    def gradient(wrap):
        layer = wrap(lambda w, x: jnp.tanh(jnp.sin(x @ w) @ jnp.cos(w)), **({} if wrap is plain else {"fence": "cond"}))

        def local(ws, x):
            grads = jax.grad(lambda ws: (functools.reduce(lambda x, w: layer(w, x), ws, x) ** 2).mean())(ws)
            return grads if check else jax.lax.psum(grads, "d")

        specs = {"in_specs": (P(), P("d")), "out_specs": P(), "check_vma": check}
        return jax.jit(jax.shard_map(local, mesh=mesh, **specs)).lower(ws, x).compile()

    def plain(f):
        return f

    kept, computed_again = gradient(plain), gradient(statetx.remat)
    sizes = [c.memory_analysis().temp_size_in_bytes for c in (kept, computed_again)]
    assert sizes[1] < 0.6 * sizes[0]
    for _ in range(3):
        np.testing.assert_allclose(computed_again(ws, x), kept(ws, x), rtol=1e-5, atol=1e-7)


def test_callbacks_within():
    seen = []

    @functools.partial(statetx.remat, fence="cond")
    def g(x):
        jax.debug.callback(lambda v: seen.append(float(v)), x)
        return jnp.sin(x)

    assert float(jax.jit(jax.grad(g))(0.0)) == 1.0
    jax.effects_barrier()
    assert seen == [0.0, 0.0]


def test_order_of_callbacks():
    seen = []

    def g(n, x):
        jax.debug.callback(lambda: seen.append(n), ordered=True)
        return jnp.sin(x)

    def f(x):
        for n in range(3):
            x = statetx.remat(functools.partial(g, n), fence="cond")(x)
        jax.debug.callback(lambda: seen.append("end"), ordered=True)
        return x

    gradient = jax.jit(jax.grad(f))
    for _ in range(2):
        gradient(0.5)
    jax.effects_barrier()
    assert seen == [0, 1, 2, "end", 2, 1, 0] * 2


@pytest.mark.parametrize("ordered", [False, True])
def test_callbacks_do_not_keep_memory(ordered):
    def layer(w, x):
        jax.debug.callback(lambda v: None, x.sum(), ordered=ordered)
        return x + jnp.sin(jnp.exp(x @ w)) * jnp.cos(x)

    def temp_bytes(layer):
        loss = lambda ws, x: functools.reduce(lambda x, w: layer(w, x), ws, x).sum()
        return statetx.measure(loss, list(jnp.ones((6, 16, 16))), jnp.ones((256, 16))).temp_bytes

    assert temp_bytes(statetx.remat(layer, fence="cond")) < 0.6 * temp_bytes(layer)


def test_mistakes():
    with pytest.raises(TypeError, match="fence must be 'auto', 'barrier', 'cond' or None, got 'wall'"):
        statetx.remat(f, fence="wall")
    with pytest.raises(TypeError, match="fence='cond' and prevent_cse=False contradict each other"):
        statetx.remat(f, fence="cond", prevent_cse=False)
    with pytest.raises(TypeError, match="fence=None and prevent_cse=True contradict each other"):
        statetx.remat(f, fence=None, prevent_cse=True)
