"""Residuals of functions nested in a rematerialized one, by policy, against the residuals of `jax.checkpoint`."""

import collections
import contextlib
import functools
import warnings

import jax
import jax.ad_checkpoint
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

import statetx
from helpers import REMAT3, equations, in_turn
from statetx import policies

JAX = jax.checkpoint_policies
# The product is the one large value that the backward pass reads: its power is computed from it.
W = jnp.linspace(-1.0, 1.0, 4 * 16).reshape(4, 16)
X = jnp.linspace(-1.0, 2.0, 4 * 4).reshape(4, 4)
MESH = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))


@contextlib.contextmanager
def older_remat():
    """`jax.checkpoint` without `jax_remat3`, since its policy sees no nested equations with that."""
    if not REMAT3:
        yield
        return
    jax.config.update("jax_remat3", False)
    try:
        yield
    finally:
        jax.config.update("jax_remat3", True)


def block(w):
    def f(x):
        h = checkpoint_name(x @ w(), "h")  # f32[4,16], in shard_map f32[2,16]
        return jnp.sin(x * (h * h).sum(1, keepdims=True))

    return f


def with_vjp(w):
    @jax.custom_vjp
    def f(x, w):
        return block(lambda: w)(x)

    def forward(x, w):
        h = checkpoint_name(x @ w, "h")
        s = (h * h).sum(1, keepdims=True)
        return jnp.sin(x * s), (x, w, h, s)

    def backward(residuals, ct):
        x, w, h, s = residuals
        ct = ct * jnp.cos(x * s)
        ct_h = (ct * x).sum(1, keepdims=True) * 2 * h
        return ct * s + ct_h @ w.T, x.T @ ct_h

    f.defvjp(forward, backward)
    return lambda x: f(x, w())


def with_jvp(w):
    @jax.custom_jvp
    def f(x, w):
        return block(lambda: w)(x)

    @f.defjvp
    def _(primals, tangents):
        (x, w), (dx, dw) = primals, tangents
        h = checkpoint_name(x @ w, "h")
        s = (h * h).sum(1, keepdims=True)
        ds = (2 * h * (dx @ w + x @ dw)).sum(1, keepdims=True)
        return jnp.sin(x * s), jnp.cos(x * s) * (dx * s + x * ds)

    return lambda x: f(x, w())


def in_scan(f, length=3):
    return lambda x: jax.lax.scan(lambda c, _: (f(c), None), x, None, length=length)[0]


def on_devices(f):
    return jax.shard_map(f, mesh=MESH, in_specs=P("d"), out_specs=P("d"))


# Bodies of the rematerialized function, given the inner rematerialization and the weight.
NESTINGS = {
    "remat": lambda remat, w: remat(block(w)),
    "jax.checkpoint": lambda remat, w: jax.checkpoint(block(w)),
    "remat in remat": lambda remat, w: remat(lambda x: jnp.cos(remat(block(w))(x))),
    "jit": lambda remat, w: jax.jit(block(w)),
    "remat in jit": lambda remat, w: jax.jit(remat(block(w))),
    "remat in scan": lambda remat, w: in_scan(remat(block(w))),
    "scan in remat": lambda remat, w: remat(in_scan(block(w))),
    "remat in cond": lambda remat, w: lambda x: jax.lax.cond(x[0, 0] < 0, remat(block(w)), jnp.cos, x),
    "shard_map": lambda remat, w: on_devices(block(w)),
    "remat in shard_map": lambda remat, w: on_devices(remat(block(w))),
    "shard_map in remat": lambda remat, w: remat(on_devices(block(w))),
    "custom_vjp": lambda remat, w: with_vjp(w),
    "remat of custom_vjp": lambda remat, w: remat(with_vjp(w)),
    "custom_vjp in scan": lambda remat, w: in_scan(with_vjp(w)),
    "custom_vjp in shard_map": lambda remat, w: on_devices(with_vjp(lambda: jax.lax.pcast(w(), "d", to="varying"))),
    "custom_jvp": lambda remat, w: with_jvp(w),
    "remat of custom_jvp": lambda remat, w: remat(jax.jit(with_jvp(w))),
    "inner policy": lambda remat, w: remat(lambda x: jnp.exp(jnp.tanh(block(w)(x))), policy=JAX.everything_saveable),
}

# With the equivalent policies of JAX; the states and sizes chosen here select the one product.
POLICIES = {
    "dots": (policies.dots, JAX.dots_saveable),
    "dots_without_batch_dims": (policies.dots_without_batch_dims, JAX.dots_with_no_batch_dims_saveable),
    "names": (policies.names("h"), JAX.save_only_these_names("h")),
    "states": (policies.states(statetx.Param), JAX.save_only_these_names("h")),
    "larger_than": (policies.larger_than(100) & policies.primitives("dot_general"), JAX.dots_saveable),
    "everything": (policies.everything, JAX.everything_saveable),
    "nothing": (policies.nothing, None),
    "jax's dots": (JAX.dots_saveable, JAX.dots_saveable),
    "jax's dots without batch dims": (JAX.dots_with_no_batch_dims_saveable, JAX.dots_with_no_batch_dims_saveable),
    "jax's names": (JAX.save_only_these_names("h"), JAX.save_only_these_names("h")),
    "jax's other names": (JAX.save_any_names_but_these(), JAX.save_any_names_but_these()),
}


def ours(nesting, policy, w):
    inner = NESTINGS[nesting](statetx.remat, lambda: w.value)
    return statetx.remat(lambda x: jnp.cos(inner(jnp.sin(x))), policy=policy)


def theirs(nesting, policy, w):
    inner = NESTINGS[nesting](jax.checkpoint, lambda: w)
    return jax.checkpoint(lambda x: jnp.cos(inner(jnp.sin(x))), policy=policy)


def saved_types(fun, *args):
    rows = statetx.saved_residuals(fun, *args)
    return sorted((row.type, row.times) for row in rows if row.origin == "intermediate")


def num_products(gradient, *args):
    """Products in both passes."""
    return sum(eqn.primitive.name == "dot_general" for eqn in equations(jax.make_jaxpr(gradient)(*args).jaxpr))


# The functions are made for each use: JAX's caches take a function that reads a state for one that it has seen.
def our_gradient(nesting, policy):
    w = statetx.Param(W)
    f = ours(nesting, policy, w)
    return statetx.grad(lambda x: f(x).sum(), 0, wrt=w)


def their_function(nesting, policy):
    return lambda w, x: theirs(nesting, policy, w)(x)


def their_gradient(nesting, policy):
    return jax.grad(lambda w, x: theirs(nesting, policy, w)(x).sum(), (0, 1))


@pytest.mark.sample("slow")
@pytest.mark.parametrize("nesting", in_turn(NESTINGS))
def test_residuals_and_recomputation_equal_jax(nesting):
    found = {}
    for name, (policy, _) in POLICIES.items():
        with warnings.catch_warnings():
            warnings.simplefilter("error", statetx.PolicyWarning)
            found[name] = (
                saved_types(ours(nesting, policy, statetx.Param(W)), X),
                num_products(our_gradient(nesting, policy), X),
            )
    with older_remat():
        expected = {
            name: (
                saved_types(their_function(nesting, policy), W, X),
                num_products(their_gradient(nesting, policy), W, X),
            )
            for name, (_, policy) in POLICIES.items()
        }
    assert found == expected
    assert len(found["names"][0]) == 1 and found["nothing"][1] > found["names"][1] == 3


# The others take their time, behind the marker.
@pytest.mark.sample
@pytest.mark.parametrize("policy", [pytest.param(p, marks=[] if p == "names" else pytest.mark.slow) for p in POLICIES])
@pytest.mark.parametrize("nesting", NESTINGS)
def test_gradients_equal_without_a_policy(nesting, policy):
    actual = statetx.jit(our_gradient(nesting, POLICIES[policy][0]))(X)
    with older_remat():
        expected = jax.jit(their_gradient(nesting, JAX.everything_saveable))(W, X)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), actual, expected)


# -- whose policy decides ------------------------------------------------------------------------------------------


def two_products(x):
    h = checkpoint_name(x @ W, "h")
    return checkpoint_name(jnp.sin(jnp.tanh(h) @ W.T), "g")


INNER = {
    "statetx.remat": statetx.remat(two_products, policy=policies.dots | policies.names("g")),
    "jax.checkpoint": jax.checkpoint(two_products, policy=JAX.dots_saveable),
}


@pytest.mark.parametrize("inner", INNER)
def test_outer_policy_selects_residuals_and_inner_policy_recomputation(inner):
    f = lambda x: jnp.exp(INNER[inner](jnp.sin(x)))
    with older_remat():
        reference = lambda x: jnp.exp(jax.checkpoint(two_products, policy=JAX.dots_saveable)(jnp.sin(x)))
        expected = num_products(jax.grad(lambda x: jax.checkpoint(reference)(x).sum()), X)
    outer = {
        statetx.remat(f): [],
        statetx.remat(f, policy=policies.names("h")): [("f32[4,16]", 1)],
        statetx.remat(f, policy=policies.primitives("tanh")): [("f32[4,16]", 1)],
        statetx.remat(f, policy=policies.names("h") | policies.names("g")): [("f32[4,16]", 1), ("f32[4,4]", 1)],
        # The inner function's marks are not names.
        statetx.remat(f, policy=JAX.save_any_names_but_these("g")): [("f32[4,16]", 1)],
    }
    for fun, rows in outer.items():
        assert saved_types(fun, X) == rows, fun._policy
    assert num_products(jax.grad(lambda x: statetx.remat(f)(x).sum()), X) == expected
    if not REMAT3:  # which sees no nested equations
        assert saved_types(jax.checkpoint(f, policy=JAX.save_any_names_but_these("g")), X) == [("f32[4,16]", 1)]


def test_three_nested_functions_save_for_the_outermost():
    innermost = statetx.remat(two_products, policy=policies.dots)
    middle = statetx.remat(lambda x: jnp.cos(innermost(x)), policy=policies.names("g"))
    for policy, rows in [
        (policies.nothing, []),
        (policies.names("h"), [("f32[4,16]", 1)]),
        (policies.dots & ~policies.names("h"), [("f32[4,4]", 1)]),
    ]:
        assert saved_types(statetx.remat(lambda x: jnp.sin(middle(x)), policy=policy), X) == rows
    f = lambda x: jnp.sin(jnp.cos(two_products(x))).sum()
    g = statetx.remat(lambda x: jnp.sin(middle(x)), policy=policies.names("h"))
    np.testing.assert_allclose(jax.grad(lambda x: g(x).sum())(X), jax.grad(f)(X), rtol=1e-5)


# -- messages ------------------------------------------------------------------------------------------------------


def test_missing_name_error_lists_nested_names():
    f = statetx.remat(lambda x: on_devices(statetx.remat(two_products))(x), policy=policies.names("hh"))
    with pytest.raises(statetx.PolicyError, match=r"no value has the name 'hh'. Did you mean 'h'\? .*: 'g', 'h'"):
        saved_types(f, X)


def test_unsaved_name_in_a_loop_differs_from_a_misspelt_name():
    def f(x):
        h = jax.lax.while_loop(
            lambda c: c[0, 0] < 0, lambda c: checkpoint_name(c + 1, "turn"), jax.lax.stop_gradient(x)
        )
        return jnp.sin(x * h)

    with pytest.raises(statetx.PolicyError, match="'turn' occurs inside while, where no single value can be saved"):
        saved_types(statetx.remat(f, policy=policies.names("turn")), X)


# -- places --------------------------------------------------------------------------------------------------------


def test_names_of_step_inputs_belong_to_each_step():
    def f(x):
        step = lambda c, _: (jnp.sin(checkpoint_name(c, "carry")) * 2, None)
        return jax.lax.scan(step, jnp.sin(x), None, length=5)[0]

    (row,) = statetx.saved_residuals(statetx.remat(f, policy=policies.names("carry")), X)[1:]
    assert (row.names, row.type, row.times) == (("carry",), "f32[4,4]", 5)
    with older_remat():
        theirs = jax.checkpoint(f, policy=JAX.save_only_these_names("carry"))
        assert saved_types(theirs, X) == [("f32[4,4]", 5)]


@pytest.mark.parametrize("mapped", [False, True], ids=["", "vmap"])
@pytest.mark.parametrize("checkpoint", ["auto", policies.Budget("64MiB")])
def test_budgeted_plain_loop_saves_values_of_each_step(checkpoint, mapped):
    if mapped and REMAT3:
        pytest.skip("JAX does not map names where it is on")

    def gradient(policy, checkpoint):
        def step(c, _):
            return jnp.sin(checkpoint_name(jnp.sin(c @ X), "product")), None

        run = lambda x: statetx.scan(step, x, None, 70, checkpoint=checkpoint)[0]
        f = statetx.remat(jax.vmap(run) if mapped else run, policy=policy)
        return lambda x: jax.grad(lambda x: f(x).sum())(x)

    for policy in (policies.nothing, policies.names("product"), policies.dots):
        ours, plain = gradient(policy, checkpoint), gradient(policy, None)
        assert num_products(ours, X) == num_products(plain, X)
        np.testing.assert_allclose(ours(X), plain(X), rtol=1e-6)
    counts = [num_products(gradient(p, checkpoint), X) for p in (policies.nothing, policies.dots)]
    assert counts[1] < counts[0]


def test_name_in_a_checkpointed_loop_is_reported_unreachable():
    def f(x):
        step = lambda c, _: (jnp.sin(checkpoint_name(c, "carry")), None)
        return statetx.scan(step, x, None, 70, checkpoint=policies.Slots(3))[0]

    with pytest.raises(statetx.PolicyError, match=r"occurs inside a loop that stores carries \(checkpoint=\)"):
        saved_types(statetx.remat(f, policy=policies.names("carry")), X)


@pytest.mark.parametrize("transform", ["jax", "statetx", "declared"])
def test_policies_by_state_select_products_in_shard_map(transform):
    w = statetx.Param(jnp.eye(4))
    block = lambda x: jnp.sin(jnp.sin(x @ w.value))
    specs = {"mesh": MESH, "in_specs": P("d"), "out_specs": P("d")}
    policy = policies.states(statetx.Param)
    if transform == "jax":
        f = jax.shard_map(statetx.remat(block, policy=policy), **specs)
    elif transform == "statetx":
        f = statetx.shard_map(statetx.remat(block, policy=policy), **specs)
    else:
        gathered = lambda x: jnp.sin(x @ jax.lax.all_gather(w.value, "d", tiled=True))
        f = statetx.shard_map(statetx.remat(gathered, policy=policy | policies.dots), **specs, states={"w": P("d")})
    rows = [r for r in statetx.saved_residuals(f, X) if r.origin == "intermediate"]
    products = [r for r in rows if r.primitive == "dot_general"]
    assert [r.type for r in products] == ["f32[4,4]"]
    assert [r.primitive for r in rows if r not in products] == (["all_gather"] if transform == "declared" else [])


def test_nested_offloaded_values_are_in_host_memory():
    for nest in (statetx.remat, lambda f: statetx.remat(jax.jit(statetx.remat(f))), in_scan):
        f = statetx.remat(nest(lambda x: two_products(x)), policy=policies.offload("h"))
        (row,) = [r for r in statetx.saved_residuals(f, X) if r.origin == "intermediate"]
        assert (row.names, row.type, row.memory) == (("h",), "f32[4,16]", "pinned_host")


# -- rules of custom derivatives -----------------------------------------------------------------------------------


@jax.custom_vjp
def scaled(x, y):
    return jnp.sin(x) * y


def scaled_forward(x, y):
    residual = checkpoint_name(jnp.cos(x.value), "slope") if x.perturbed else None
    return jnp.sin(x.value) * y.value, (residual, y.value, jnp.sin(x.value))


def scaled_backward(residuals, ct):
    slope, y, sine = residuals
    return None if slope is None else slope * y * ct, sine * ct


scaled.defvjp(scaled_forward, scaled_backward, symbolic_zeros=True)


def test_symbolic_zeros_rule_is_judged_for_its_perturbed_arguments():
    keep_slope = statetx.remat(lambda x, y: jnp.tanh(scaled(jnp.exp(x), jnp.exp(y))), policy=policies.names("slope"))
    assert saved_types(keep_slope, X, X) == [("f32[4,4]", 1)]
    assert saved_types(lambda y: keep_slope(X, y), X) == []
    plain = lambda x, y: jnp.tanh(jnp.sin(jnp.exp(x)) * jnp.exp(y)).sum()
    for argnums in (0, 1, (0, 1)):
        actual = jax.grad(lambda x, y: keep_slope(x, y).sum(), argnums)(X, X / 3)
        expected = jax.grad(plain, argnums)(X, X / 3)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), actual, expected)


@jax.custom_jvp
def exponential(x):
    return jnp.exp(x), x


@exponential.defjvp
def _(primals, tangents):
    y = jnp.exp(*primals)
    return (y, *primals), (y * tangents[0], *tangents)


def test_named_results_of_a_custom_rule_are_saved_inside():
    """Marked outside, the result would be computed again for the rule, which reads its own."""
    for f in (
        lambda x: jnp.sin(checkpoint_name(exponential(x @ W)[0], "e")),
        lambda x: jnp.sin(checkpoint_name(jax.jit(exponential)(x @ W)[0], "e")),
        statetx.remat(lambda x: jnp.sin(checkpoint_name(exponential(x @ W)[0], "e"))),
    ):
        g = statetx.remat(f, policy=policies.names("e"))
        assert saved_types(g, X) == [("f32[4,16]", 1)]
        found = collections.Counter(
            e.primitive.name for e in equations(jax.make_jaxpr(jax.grad(lambda x, g=g: g(x).sum()))(X).jaxpr)
        )
        assert found["exp"] == 1


def test_result_of_an_undifferentiated_custom_rule_is_saved():
    f = statetx.remat(lambda x: x * checkpoint_name(exponential(jnp.sin(X))[0], "e"), policy=policies.names("e"))
    assert saved_types(f, X) == [("f32[4,4]", 1)]
    np.testing.assert_allclose(jax.grad(lambda x: f(x).sum())(X), jnp.exp(jnp.sin(X)), rtol=1e-6)


def test_failing_custom_rule_raises_where_differentiated():
    @jax.custom_vjp
    def f(x):
        return jnp.sin(x)

    def forward(x):
        raise ValueError("no rule for this")

    f.defvjp(forward, lambda _, ct: (ct,))
    g = statetx.remat(lambda x: f(jax.lax.stop_gradient(x)) * jnp.sin(x @ x), policy=policies.dots)
    np.testing.assert_allclose(
        jax.grad(lambda x: g(x).sum())(X), jax.grad(lambda x: (jnp.sin(X) * jnp.sin(x @ x)).sum())(X), rtol=1e-5
    )
    with pytest.raises(ValueError, match="no rule for this"):
        jax.grad(lambda x: statetx.remat(f, policy=policies.everything)(x).sum())(X)


# -- other transforms ----------------------------------------------------------------------------------------------

TWICE = ["custom_jvp", "remat in remat", "remat in scan", "inner policy", "remat in cond"]


@pytest.mark.parametrize("nesting", [pytest.param(n, marks=[] if n in TWICE[:2] else pytest.mark.slow) for n in TWICE])
@pytest.mark.parametrize("policy", ["names", "larger_than"])
def test_vmap_jvp_and_second_derivatives(nesting, policy):
    w = statetx.Param(W)
    f = lambda x: ours(nesting, POLICIES[policy][0], w)(x).sum()
    with older_remat():
        plain = lambda x: theirs(nesting, JAX.everything_saveable, W)(x).sum()
        xs, t = jnp.stack([X, X / 2]), jnp.cos(X)
        expected = (jax.vmap(jax.grad(plain))(xs), jax.jvp(plain, (X,), (t,)), jax.jvp(jax.grad(plain), (X,), (t,)))
    actual = jax.vmap(jax.grad(f))(xs), jax.jvp(f, (X,), (t,)), jax.jvp(jax.grad(f), (X,), (t,))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3), actual, expected)


@pytest.fixture
def remat3():
    """JAX's new rematerialization, switched on."""
    if not hasattr(jax.config, "jax_remat3"):
        pytest.skip("this JAX has none")
    is_on = jax.config.jax_remat3
    jax.config.update("jax_remat3", True)
    yield
    jax.config.update("jax_remat3", is_on)


def test_names_are_saved_with_jax_remat3(remat3):
    f = lambda x: two_products(x)
    for nest in (f, jax.checkpoint(f), in_scan(f), jax.jit(f), statetx.remat(f), on_devices(f)):
        for policy in (policies.names("h"), JAX.save_only_these_names("h")):
            with warnings.catch_warnings():
                warnings.simplefilter("error", statetx.PolicyWarning)
                rows = statetx.saved_residuals(statetx.remat(nest, policy=policy), X)
            (row,) = [r for r in rows if r.origin == "intermediate"]
            assert (row.names, row.type) == (("h",), "f32[4,16]")


@pytest.mark.parametrize("name", ["checkpoint_name", "checkpoint_name_fwd"])
def test_names_in_rules_of_custom_vjp_are_saved_with_jax_remat3(name, remat3):
    named = getattr(jax.ad_checkpoint, name, None)
    if named is None:
        pytest.skip("since jax 0.12")

    @jax.custom_vjp
    def f(x):
        return jnp.sin(x)

    f.defvjp(lambda x: (jnp.sin(x), named(2 * jnp.cos(x), "h")), lambda h, ct: (h * ct / 2,))
    for nest in (f, in_scan(f), jax.jit(f)):
        outer = lambda x, nest=nest: jnp.exp(nest(jnp.tanh(x))).sum()
        for policy in (policies.names("h"), policies.nothing):
            stored = statetx.remat(outer, policy=policy)
            rows = [r for r in statetx.saved_residuals(stored, X) if r.origin == "intermediate"]
            assert len(rows) == (policy == policies.names("h"))
            np.testing.assert_allclose(jax.grad(stored)(X), jax.grad(outer)(X), rtol=1e-6)


@pytest.mark.slow
def test_gradients_of_scans_in_a_region_with_jax_remat3(remat3):
    """Linearized loops are equations of their own, such as ``vjp_node[scan]``."""
    body = lambda c, _: (jnp.sin(statetx.checkpoint_name(2 * jnp.cos(c), "h")), None)
    loop = lambda x: jnp.sum(jax.lax.scan(body, x, None, length=3)[0])
    for inner in (loop, jax.checkpoint(loop)):
        for f in (lambda x, g=inner: jnp.sin(jax.grad(g)(x)).sum(), lambda x, g=inner: jax.vjp(g, x)[1](1.0)[0].sum()):
            stored = statetx.remat(f, policy=policies.names("h"))
            np.testing.assert_allclose(jax.jit(jax.grad(stored))(X), jax.grad(f)(X), rtol=1e-6)


@jax.tree_util.register_static
class Tag(str):
    """A residual that is no array."""


def test_rule_that_is_told_what_is_differentiated_keeps_its_structure():
    """The structure of its residuals differs, and JAX keeps that of the last run."""

    @jax.custom_vjp
    def g(x, s):
        return jnp.sin(x) * s

    def fwd(x, s):
        if not s.perturbed:
            return g(x.value, s.value), (Tag("derivative"), jnp.cos(x.value) * s.value, s.value)
        return g(x.value, s.value), (Tag("inputs"), x.value, s.value)

    def bwd(residuals, ct):
        tag, a, s = residuals
        return (a * ct, None) if tag == "derivative" else (jnp.cos(a) * s * ct, jnp.sin(a) * ct)

    g.defvjp(fwd, bwd, symbolic_zeros=True)
    jitted, scale, x = jax.jit(g), jnp.arange(4.0) + 2.0, jnp.arange(4.0)
    loss = lambda x: jnp.sum(jitted(x, scale) ** 2)
    expected = 2 * jnp.sin(x) * jnp.cos(x) * scale**2
    for remat in (jax.checkpoint, statetx.remat, jax.checkpoint, statetx.remat):  # JAX's marks the rule as run already
        for policy in (jax.checkpoint_policies.everything_saveable, lambda prim, *_, **__: prim.name == "sin"):
            gradient = jax.grad(remat(loss, policy=policy))
            np.testing.assert_allclose(jax.jit(gradient)(x), expected, rtol=1e-5)


@pytest.mark.parametrize("depth", [0, 3])
def test_rule_that_raises_for_other_differentiated_arguments_keeps_its_structure(depth):
    @jax.custom_vjp
    def g(x, s):
        return jnp.sin(x) * s

    def fwd(x, s):
        if s.perturbed:
            raise NotImplementedError
        return g(x.value, s.value), (x.value, s.value)

    g.defvjp(fwd, lambda r, ct: (jnp.cos(r[0]) * r[1] * ct, jnp.zeros(())), symbolic_zeros=True)
    bound = g
    for _ in range(depth):  # as a solver of diffrax binds its loop
        bound = jax.extend.core.jaxpr_as_fun(jax.make_jaxpr(bound)(1.0, 2.0))
        bound = functools.partial(lambda f, *args: f(*args)[0], bound)
    mapped, x = jax.jit(jax.vmap(bound, in_axes=(0, None))), jnp.arange(4.0)
    loss = lambda x: jnp.sum(mapped(x, 2.0) ** 2)  # noqa: E731
    for remat in (jax.checkpoint, statetx.remat, statetx.remat, jax.checkpoint):
        gradient = jax.grad(remat(loss, policy=jax.checkpoint_policies.everything_saveable))
        np.testing.assert_allclose(jax.jit(gradient)(x), 8 * jnp.sin(x) * jnp.cos(x), rtol=1e-5)


def test_rule_may_be_differentiated_otherwise_later():
    """Its residuals then have another structure than in the run before."""

    @jax.custom_vjp
    def g(x, s):
        return jnp.sin(x) * s

    def fwd(x, s):
        x, is_perturbed, s = x.value, s.perturbed, s.value
        return g(x, s), (x, s, jnp.sin(x)) if is_perturbed else (x, s)

    def bwd(r, ct):
        return jnp.cos(r[0]) * r[1] * ct, jnp.sum(r[2] * ct) if len(r) == 3 else jnp.zeros(())

    g.defvjp(fwd, bwd, symbolic_zeros=True)
    x, saving = jnp.arange(4.0), functools.partial(statetx.remat, policy=lambda prim, *_, **__: prim.name == "sin")
    plain = lambda f: f  # noqa: E731
    of_x, of_s = 8 * jnp.sin(x) * jnp.cos(x), 4 * jnp.sum(jnp.sin(x) ** 2)
    for transforms in [(saving, plain, plain), (saving, saving, saving), (plain, plain, saving)]:
        jitted = jax.jit(lambda *args: g(*args))
        loss = lambda x, s, jitted=jitted: jnp.sum(jitted(x, s) ** 2)  # noqa: E731
        for transform, argnums in zip(transforms, (0, (0, 1), 0), strict=True):
            got, want = jax.grad(transform(loss), argnums)(x, 2.0), (of_x, of_s) if argnums else of_x
            jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), got, want)
