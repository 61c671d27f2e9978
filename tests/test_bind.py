"""Loops and branches bind the same equations as `jax.lax` for the same Python."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import statetx

X, XS = jnp.arange(3.0), jnp.arange(12.0).reshape(4, 3)


BODIES = {
    "plain": lambda c, x: (jnp.sin(c) * x, c + x),
    "closes over": lambda c, x: (c * XS[0] + jnp.asarray(2.0), x.sum()),
    "carry handed on": lambda c, x: ((c[0], c[1] * x), c[0].sum()),
    "element handed on": lambda c, x: (c * x, x),
    "carry as output": lambda c, x: (c * x, c),
    "constant output": lambda c, x: (c * x, 3.0),
    "nothing out": lambda c, x: (c + x, None),
    "weak first carry": lambda c, x: (c + x.sum(), c),
    "strong first carry, weak result": lambda c, x: (2.0, c * x),
    "inner loop": lambda c, x: (jax.lax.fori_loop(0, 3, lambda i, v: v * x, c), jnp.tanh(x)),
    "effect": lambda c, x: (jax.debug.callback(lambda v: None, c) or c * x, x.sum()),
}


FIRST = {"carry handed on": (X, X + 1), "weak first carry": 0.5, "strong first carry, weak result": jnp.float32(0.5)}


def shape_of(eqn):
    """An equation without names: the count and types of its inputs, and its parameters as text."""
    params = {k: re.sub(" at 0x[0-9a-f]+", "", str(v)) for k, v in eqn.params.items()}
    return eqn.primitive, [v.aval for v in eqn.invars], [v.aval for v in eqn.outvars], params


def equation(f, *args, name):
    jaxpr = jax.make_jaxpr(f)(*args).jaxpr
    while not any(e.primitive.name == name for e in jaxpr.eqns):  # newer versions of JAX inline later
        (call,) = [e for e in jaxpr.eqns if e.primitive.name in ("jit", "pjit")]
        jaxpr = getattr(call.params["jaxpr"], "jaxpr", call.params["jaxpr"])
    (eqn,) = [e for e in jaxpr.eqns if e.primitive.name == name]
    return shape_of(eqn)


OPTIONS = [{}, {"reverse": True}, {"unroll": 2}, {"unroll": True}]
# The fast suite runs each body without options and with one of them in turn.
CASES = [
    pytest.param(name, options, id=f"{name}-{options}", marks=[pytest.mark.slow] * (k not in (0, 1 + n % 3)))
    for n, name in enumerate(BODIES)
    for k, options in enumerate(OPTIONS)
]


@pytest.mark.sample
@pytest.mark.parametrize("name, options", CASES)
def test_scan_binds_the_equation_of_jax(name, options):
    init = FIRST.get(name, X)
    ours, theirs = (lambda init, xs, scan=scan: scan(BODIES[name], init, xs, **options) for scan in SCANS)
    statetx.clear_cache()
    for _ in range(2):  # a structure that is new, and one that is known
        assert equation(ours, init, XS, name="scan")[1:] == equation(theirs, init, XS, name="scan")[1:]
    for a, b in zip(jax.tree.leaves(ours(init, XS)), jax.tree.leaves(theirs(init, XS)), strict=True):
        np.testing.assert_array_equal(a, b)
    grads = [
        jax.grad(lambda v, f=f: sum(jnp.sum(y**2) for y in jax.tree.leaves(f(v, XS))))(init) for f in (ours, theirs)
    ]
    for a, b in zip(*map(jax.tree.leaves, grads), strict=True):
        np.testing.assert_array_equal(a, b)


SCANS = (statetx.scan, jax.lax.scan)


@pytest.mark.parametrize(
    "step", [lambda c: (c[0] + 1, jnp.sin(c[1])), lambda c: (c[0] + 1, c[1])], ids=["plain", "handed on"]
)
def test_while_loop_binds_the_equation_of_jax(step):
    limit = jnp.asarray(3)
    ours, theirs = (
        lambda x, w=w: w(lambda c: c[0] < limit, step, (0, x)) for w in (statetx.while_loop, jax.lax.while_loop)
    )
    for _ in range(2):
        assert equation(ours, X, name="while")[1:] == equation(theirs, X, name="while")[1:]
    np.testing.assert_array_equal(ours(X)[1], theirs(X)[1])


@pytest.mark.parametrize("other", [jnp.cos, lambda x: x], ids=["plain", "handed on"])
def test_branches_bind_the_equation_of_jax(other):
    conds = (statetx.cond, jax.lax.cond)
    ours, theirs = (lambda p, x, c=c: c(p, lambda x: (x, other(x)), lambda x: (x, x), x) for c in conds)
    if other(X) is not X:
        for _ in range(2):
            assert equation(ours, True, X, name="cond")[1:] == equation(theirs, True, X, name="cond")[1:]
    for p in (True, False):
        np.testing.assert_array_equal(ours(p, X), theirs(p, X))
    switches = (statetx.switch, jax.lax.switch)
    ours, theirs = (lambda i, x, s=s: s(i, [jnp.sin, jnp.cos, other], x) for s in switches)
    for _ in range(2):
        assert equation(ours, 1, X, name="cond")[1:] == equation(theirs, 1, X, name="cond")[1:]
    for i in range(-2, 5):
        np.testing.assert_array_equal(ours(i, X), theirs(i, X))


@pytest.mark.parametrize(
    "loop",
    [
        lambda f: statetx.scan(lambda c, x: (f(c) * x, c), X, XS),
        lambda f: statetx.while_loop(lambda c: c.sum() < 9, lambda c: f(c) + 1, X),
        lambda f: statetx.fori_loop(0, 3, lambda i, c: f(c) + i, X),
        lambda f: statetx.fori_loop(0, jnp.asarray(3) + 0, lambda i, c: f(c) + i, X),
        lambda f: statetx.cond(True, f, jnp.cos, X),
    ],
    ids=["scan", "while_loop", "fori_loop", "fori_loop, dynamic", "cond"],
)
def test_bodies_are_bound_without_retrace(loop, monkeypatch):
    """The body is staged, and its jaxpr bound: nothing evaluates it."""
    evaluated = []
    monkeypatch.setattr("statetx._jax.evaluate", lambda *args: evaluated.append(args))
    statetx.clear_cache()
    jax.make_jaxpr(lambda: loop(lambda x: jnp.sin(x)))()
    assert not evaluated


def test_incomparable_rule_is_not_cached():
    def step(c, x):
        @jax.custom_jvp
        def f(v):
            return v * x

        f.defjvp(lambda primals, tangents: (f(*primals), tangents[0] * 2))
        return f(c), c

    statetx.scan(step, X, XS)
    size = statetx.cache_info().structures.size
    for _ in range(3):
        statetx.scan(step, X, XS)
    assert statetx.cache_info().structures.size == size


def test_settings_are_part_of_the_cache_key():
    f = functools.partial(statetx.scan, lambda c, x: (c * 2 + x, c), X, XS)
    statetx.clear_cache()
    first, back = f(), f(reverse=True)
    np.testing.assert_array_equal(first[0], jax.lax.scan(lambda c, x: (c * 2 + x, c), X, XS)[0])
    np.testing.assert_array_equal(back[0], jax.lax.scan(lambda c, x: (c * 2 + x, c), X, XS, reverse=True)[0])
    with jax.disable_jit():
        np.testing.assert_array_equal(f()[0], first[0])
