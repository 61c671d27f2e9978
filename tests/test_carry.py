"""Carries of loops and outputs of branches: weak types are promoted as in `jax.lax`, in carries and states; others
drift.
"""

from __future__ import annotations

from typing import NamedTuple

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from libraries import LIBRARIES

import statetx
from helpers import Counted, compilations, transforms_of_brainstate
from statetx import policies

XS = jnp.asarray(np.array([[0.3, -0.7, 1.1], [0.9, 0.2, -0.4], [0.5, 1.3, 0.6], [-0.2, 0.8, 0.1]], np.float32))


class Log(NamedTuple):
    total: jax.Array
    count: jax.Array


# Name: first value, and the step's update from it and an element of `XS`.
UPDATES = {
    "number": (0.0, lambda v, x: v + x.sum()),
    "weak array": (jnp.full((3,), 0.0), lambda v, x: 0.9 * v + x),
    "integer": (0, lambda v, x: v + x.sum()),
    "integer to a weak float": (0, lambda v, x: v + 0.5),
    "half precision": (0.0, lambda v, x: v * 0.5 + x.sum().astype(jnp.bfloat16)),
    "stays weak": (0, lambda v, x: v + 1),
    "strong, set to a number": (jnp.float32(3.0), lambda v, x: 1.0),
    "flag": (False, lambda v, x: jnp.logical_xor(v, x.sum() > 1)),
    "tree": (Log(0, 0), lambda v, x: Log(v.total + x, v.count + 1)),
    "leaves depend on each other": ((0, 0, 0), lambda v, x: (v[1], v[2], v[2] + 0.5)),
}
UPDATES["tree"] = (Log(jnp.full((3,), 0), 0), UPDATES["tree"][1])


# Each runs `step`, which has a state of its own, for the first `n` elements of `XS`; and the same by hand with
# `jax.lax`.
def with_traced(n, f):
    """Call ``f(n)`` with a tracer; unlike `statetx.jit`, this leaves weak types as the body does."""
    pure = statetx.functionalize(f)
    out, values = jax.jit(pure)(pure.values(n), n)
    pure.store(values)
    return out


LOOPS = {
    "scan": (
        lambda step, n: statetx.scan(lambda c, x: (c, step(x)), None, XS[:n]),
        lambda f, init, n: jax.lax.scan(lambda c, x: (f(c, x), None), init, XS[:n])[0],
    ),
    "scan, reverse": (
        lambda step, n: statetx.scan(lambda c, x: (c, step(x)), None, XS[:n], reverse=True),
        lambda f, init, n: jax.lax.scan(lambda c, x: (f(c, x), None), init, XS[:n], reverse=True)[0],
    ),
    "scan, unrolled": (
        lambda step, n: statetx.scan(lambda c, x: (c, step(x)), None, XS[:n], unroll=2),
        lambda f, init, n: jax.lax.scan(lambda c, x: (f(c, x), None), init, XS[:n], unroll=2)[0],
    ),
    "map": (
        lambda step, n: statetx.map(step, XS[:n]),
        lambda f, init, n: jax.lax.scan(lambda c, x: (f(c, x), None), init, XS[:n])[0],
    ),
    "fori_loop": (
        lambda step, n: statetx.fori_loop(0, n, lambda i, c: (step(XS[i]), c)[1], 0),
        lambda f, init, n: jax.lax.fori_loop(0, n, lambda i, c: f(c, XS[i]), init),
    ),
    "fori_loop, dynamic": (
        lambda step, n: with_traced(n, lambda n: statetx.fori_loop(0, n, lambda i, c: (step(XS[i]), c)[1], 0)),
        lambda f, init, n: jax.lax.fori_loop(0, n, lambda i, c: f(c, XS[i]), init),
    ),
    "while_loop": (
        lambda step, n: statetx.while_loop(lambda i: i < n, lambda i: (step(XS[i]), i + 1)[1], 0),
        lambda f, init, n: jax.lax.fori_loop(0, n, lambda i, c: f(c, XS[i]), init),
    ),
}


def types(tree):
    return jax.tree.map(lambda x: (jax.typeof(x).str_short(), jax.typeof(x).weak_type), tree)


def settled(f, init):
    """The first value with the final types of the promotion; `jax.lax` stops after two rounds."""
    for _ in range(4):
        out = jax.eval_shape(f, init, XS[0])
        init = jax.tree.map(lambda a, b: jnp.asarray(a, b.dtype) if jnp.result_type(a) != b.dtype else a, init, out)
    return init


def assert_same(actual, expected):
    assert types(actual) == types(expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(a, np.float32), np.asarray(b, np.float32), rtol=1e-6)


@pytest.mark.sample
@pytest.mark.parametrize("num_steps", [4, 0])
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("update", UPDATES)
def test_weak_state_is_promoted_like_a_carry_of_jax(update, loop, num_steps):
    run, by_hand = LOOPS[loop]
    init, f = UPDATES[update]
    state = statetx.State(init)
    run(lambda x: setattr(state, "value", f(state.value, x)), num_steps)
    expected = by_hand(f, settled(f, init) if update.startswith("leaves") else init, num_steps)
    assert_same(state.value, expected)


@pytest.mark.parametrize("loop", ["scan", "fori_loop, dynamic", "while_loop"])
@pytest.mark.parametrize("update", ["number", "integer", "half precision", "flag", "tree"])
@pytest.mark.parametrize("name", ["brainstate", "nnx"])
def test_every_kind_of_state_is_promoted(name, update, loop):
    library, (run, by_hand), (init, f) = LIBRARIES[name], LOOPS[loop], UPDATES[update]
    state = library.make(init)
    run(lambda x: library.set(state, f(library.get(state), x)), 4)
    assert_same(library.get(state), by_hand(f, init, 4))


@pytest.mark.parametrize("loop", LOOPS)
def test_weakly_typed_ref_is_not_promoted(loop):
    (run, by_hand), (init, f) = LOOPS[loop], UPDATES["weak array"]
    ref = jax.new_ref(init)
    run(lambda x: ref.__setitem__(..., f(ref[...], x)), 4)
    np.testing.assert_allclose(ref[...], by_hand(f, init, 4), rtol=1e-6)
    assert ref.dtype == jnp.float32


STRATEGIES = [policies.Slots(2), policies.Levels(2), policies.Lengths(2, 2), policies.Budget("1MiB"), "auto"]


@pytest.mark.sample
@pytest.mark.parametrize("strategy", [None, *STRATEGIES], ids=repr)
def test_gradients_through_promoted_states(strategy):
    """The loss is not linear in the values read, so no gradient is constant."""
    init, f = 0, lambda v, x: jnp.tanh(v + x).sum() + v * 0.5

    def loss(xs):
        state = statetx.State(init)
        statetx.scan(lambda c, x: (c, setattr(state, "value", f(state.value, x))), None, xs, checkpoint=strategy)
        return state.value

    def by_hand(xs):
        return jax.lax.scan(lambda v, x: (f(v, x), None), init, xs)[0]

    assert_same(loss(XS), by_hand(XS))
    np.testing.assert_allclose(jax.grad(statetx.remat(loss))(XS), jax.grad(by_hand)(XS), rtol=1e-5)
    xs = jnp.stack([XS, 2 * XS])
    np.testing.assert_allclose(jax.jit(jax.vmap(jax.grad(loss)))(xs), jax.vmap(jax.grad(by_hand))(xs), rtol=1e-5)


def test_gradient_with_respect_to_a_promoted_state():
    state = statetx.State(jnp.asarray(0.5))  # weak

    def step(i, c):
        state.value = jnp.sin(state.value * jnp.float32(2.0))
        return c

    def loss():
        statetx.fori_loop(0, 3, step, None)
        return state.value

    expected = jax.grad(lambda v: jax.lax.fori_loop(0, 3, lambda i, v: jnp.sin(v * jnp.float32(2.0)), v))(0.5)
    np.testing.assert_allclose(statetx.grad(loss, wrt=state)(), expected, rtol=1e-5)
    assert not state.value.weak_type


@pytest.mark.parametrize("slots", [None, 2])
def test_promoted_state_in_while_loop_condition_and_body(slots):
    total = statetx.State(0)
    seen = []

    def goes_on(i):
        seen.append(total.value.dtype)
        return (total.value < 3) & (i < 10)

    def step(i):
        total.value = total.value + jnp.float32(0.75)
        return i + 1

    assert int(statetx.while_loop(goes_on, step, 0, checkpoint=slots, max_steps=10)) == 4
    assert_same(total.value, jnp.float32(3.0))
    assert set(seen) == {jnp.dtype("float32")}


def test_promoted_state_under_vmap():
    state = statetx.State(jnp.full((2,), 0))
    batch = jnp.stack([XS, 2 * XS])

    def one(xs):
        statetx.scan(lambda c, x: (c, setattr(state, "value", state.value + x.sum())), None, xs)

    statetx.vmap(one, states={"state": 0})(batch)
    np.testing.assert_allclose(state.value, batch.sum((1, 2)), rtol=1e-6)
    assert state.value.dtype == jnp.float32 and not state.value.weak_type


def test_split_states_accept_writes_of_any_dtype():
    layers = statetx.State(jnp.full((4, 3), 0))
    statetx.scan(lambda c, x: (c, setattr(layers, "value", layers.value + x)), None, XS, states={"layers": 0})
    assert_same(layers.value, XS)
    statetx.scan(lambda c, x: (c, setattr(layers, "value", (x, layers.value.sum()))), None, XS, states={"layers": 0})
    assert_same(layers.value, (XS, XS.sum(1)))


# -- how often the body is run -------------------------------------------------------------------------------------


@pytest.mark.parametrize("update", UPDATES)
def test_body_is_retraced_only_for_another_dtype(update):
    init, f = UPDATES[update]
    state = statetx.State(init)
    most = {
        "integer": 2,
        "integer to a weak float": 2,
        "half precision": 2,
        "flag": 2,
        "tree": 2,
        "leaves depend on each other": 4,
    }
    for expected in (most.get(update, 1), 1):
        step = Counted(lambda c, x: (c, setattr(state, "value", f(state.value, x))))
        statetx.scan(step, None, XS)
        assert step.runs == expected


def test_inner_body_is_retraced_once_per_enclosing_loop():
    """Not twice as often for each, as where every loop around stages both types."""
    state = statetx.State(0)
    step = Counted(lambda c, x: (c, setattr(state, "value", state.value + x.sum())))

    def loops(depth):
        if depth == 0:
            return step
        return lambda c, _: (statetx.scan(loops(depth - 1), c, XS if depth == 1 else None, length=4)[0], None)

    statetx.scan(loops(3), None, None, 2)
    assert step.runs == 5
    assert_same(state.value, 2 * 4 * 4 * XS.sum())


@pytest.mark.parametrize(("init", "runs"), [(0.0, [1, 0, 0]), (0, [2, 1, 0])])
def test_jitted_loop_is_restaged_only_for_another_dtype(init, runs):
    state = statetx.State(init)
    step = Counted(lambda c, x: (c, setattr(state, "value", state.value + x.sum())))
    f = statetx.jit(lambda xs: statetx.scan(step, None, xs)[1])
    for n, expected in enumerate(runs):
        before = step.runs
        f(XS)
        assert step.runs - before == expected
        np.testing.assert_allclose(state.value, (n + 1) * XS.sum(), rtol=1e-5)
        assert state.value.dtype == jnp.float32
    with compilations() as compiled:
        f(XS)
    assert not compiled


# -- branches ------------------------------------------------------------------------------------------------------


BRANCHES = {
    "number": (0.0, lambda v: v + jnp.float32(1), lambda v: v),
    "number, in both": (0.0, lambda v: v + jnp.float32(1), lambda v: v * 2),
    "stays weak": (0, lambda v: v + 1, lambda v: v),
    "another type in both": (jnp.ones(3), lambda v: v.sum(), lambda v: v[0]),
    "set to a number": (jnp.ones(()), lambda v: 2.0, lambda v: v),
    "flag": (False, lambda v: True, lambda v: v),
}


@pytest.mark.parametrize("name", ["statetx", "brainstate", "nnx"])
@pytest.mark.parametrize("pred", [True, False])
@pytest.mark.parametrize("case", BRANCHES)
def test_branches_promote_states_like_jax_outputs(case, pred, name):
    library, (init, f, g) = LIBRARIES[name], BRANCHES[case]

    def left_by(branch):
        state = library.make(init)
        write = lambda h: lambda: None if h(init) is init else library.set(state, h(library.get(state)))
        branch(write)
        return library.get(state)

    which = jnp.asarray(pred)
    assert_same(left_by(lambda write: statetx.cond(which, write(f), write(g))), jax.lax.cond(pred, f, g, init))
    index = jnp.asarray(2 * pred)
    actual = left_by(lambda write: statetx.switch(index, [write(f), write(f), write(g)]))
    assert_same(actual, jax.lax.switch(index, [f, f, g], init))


@pytest.mark.parametrize("pred", [True, False])
@pytest.mark.parametrize("wrap", [lambda f: f, statetx.jit, statetx.remat], ids=["eager", "jit", "remat"])
def test_branches_promote_a_python_number_to_the_written_dtype(wrap, pred):
    state = statetx.State(Log(0, 0))

    def write(x):
        state.value = Log(state.value.total + x, state.value.count + 1)
        return state.value.total * x

    f = wrap(lambda x: statetx.cond(pred, write, lambda x: x * 0.5, x))
    value, gradient = statetx.value_and_grad(f)(2.0)
    assert (float(value), float(gradient)) == ((4.0, 4.0) if pred else (1.0, 0.5))
    expected = Log(jnp.float32(2.0 * pred), int(pred))
    np.testing.assert_array_equal(state.value, expected)
    assert state.value.total.dtype == jnp.float32 and not state.value.total.weak_type
    assert state.value.count.dtype == jnp.int32


def test_written_flag_is_a_valid_predicate():
    first = statetx.State(True)

    def step(x):
        y = x if first.value else 2 * x
        first.value = False
        return y

    assert float(statetx.cond(jnp.asarray(True), step, lambda x: x, 3.0)) == 3.0
    assert_same(first.value, jnp.asarray(False))


# -- drift ---------------------------------------------------------------------------------------------------------


DRIFTS = {
    "dtype of a leaf": (
        Log(jnp.float32(0), 0),
        lambda v, x: Log((v.total + x.sum()).astype(jnp.bfloat16), v.count),
        r"State '(step.)?log'\.total, made at .*it enters as f32\[\] and leaves as bf16\[\], written at "
        r".*test_carry.py:\d+",
    ),
    "shape of a weak leaf": (
        {"a": [0.0, jnp.zeros(3)]},
        lambda v, x: {"a": [x, v["a"][1]]},
        r"State '(step.)?log'\['a'\]\[0\], made at .*it enters as ~f32\[\] and leaves as f32\[3\] \(~ marks a weak "
        r"type",
    ),
    "a float that would be an integer": (
        0.5,
        lambda v, x: 1,
        r"State '(step.)?log', made at .*it enters as ~f32\[\] and leaves as ~i32\[\]",
    ),
    "structure": (
        Log(0.0, 0),
        lambda v, x: (v.total, v.count),
        r"State '(step.)?log', made at .*it enters as Log\(total=~f32\[\], count=~i32\[\]\) and leaves as "
        r"\(~?f32\[\], ~?i32\[\]\)",
    ),
    "flag": (True, lambda v, x: x, r"State '(step.)?log', made at .*it enters as bool\[\] and leaves as f32\[3\]"),
}


@pytest.mark.parametrize("drift", DRIFTS)
def test_drift_error_names_leaf_and_line(drift):
    init, f, message = DRIFTS[drift]
    log = statetx.State(init)

    def step(x):
        log.value = f(log.value, x)

    loops = [
        lambda: statetx.scan(lambda c, x: (c, step(x)), None, XS),
        lambda: statetx.fori_loop(0, 4, lambda i, c: step(XS[i]), None),
        lambda: statetx.while_loop(lambda c: c[0] < 4, lambda c: (c[0] + 1, step(XS[c[0]])), (0, None)),
    ]
    branches = [
        lambda: statetx.cond(jnp.asarray(True), step, lambda x: None, XS[0]),
        lambda: statetx.switch(1, [lambda x: None, step, lambda x: None], XS[0]),
    ]
    # Both leave a flag as an array, and an integer beside a float promotes to it.
    for run in loops if drift in ("flag", "a float that would be an integer") else loops + branches:
        with pytest.raises(statetx.CarryTypeError, match=message):
            run()
        assert log.value is init


def test_branches_writing_different_types_raise():
    log = statetx.State(Log(0.0, jnp.zeros(3)))
    write = lambda v: lambda: setattr(log, "value", log.value._replace(count=v))
    with pytest.raises(
        statetx.CarryTypeError,
        match=r"branches leave State 'log'.count, made at .*test_carry.py:\d+, with different types: .* writes "
        r"f32\[2\] "
        r"at .*test_carry.py:\d+, .* writes f32\[\] at .*test_carry.py:\d+",
    ):
        statetx.cond(jnp.asarray(True), write(jnp.float32(1)), write(jnp.ones(2)))
    with pytest.raises(statetx.CarryTypeError, match=r"writes Log\(.*\[~f32.* writes Log\(.*\(~f32"):
        statetx.cond(jnp.asarray(True), write((1.0, 2.0)), write([1.0, 2.0]))


def test_python_number_under_strict_promotion():
    state = statetx.State(0)
    with jax.numpy_dtype_promotion("strict"):
        statetx.scan(lambda c, x: (c, setattr(state, "value", x.sum())), None, XS)
        assert_same(state.value, XS[-1].sum())
        state.value = 0
        statetx.cond(True, lambda: setattr(state, "value", XS.sum()), lambda: None)
        assert_same(state.value, XS.sum())
    with jax.enable_x64(True):
        state.value = 0.0
        statetx.scan(
            lambda c, x: (c, setattr(state, "value", state.value + x)), None, jnp.arange(3.0, dtype=jnp.float32)
        )
        assert_same(state.value, jnp.float32(3))


# -- beside brainstate ---------------------------------------------------------------------------------------------


@transforms_of_brainstate
def test_branch_in_loop_promotes_more_than_brainstate():
    total = brainstate.ShortTermState(0)

    def write(x):
        total.value = total.value + x.sum()
        return x

    def step(cond):
        return lambda x: cond(x[0] > 0.4, write, lambda x: x, x)

    with pytest.raises(TypeError, match="equal output types"):
        brainstate.transform.for_loop(step(brainstate.transform.cond), XS)
    statetx.map(step(statetx.cond), XS)
    assert total.value.dtype == jnp.float32


def test_structures_of_equal_text_are_told_apart():
    @jax.tree_util.register_pytree_node_class
    class Tagged:
        def __init__(self, x, mode):
            self.x, self.mode = x, mode

        def __repr__(self):
            return f"Tagged({self.x})"

        def tree_flatten(self):
            return (self.x,), self.mode

        @classmethod
        def tree_unflatten(cls, mode, xs):
            return cls(*xs, mode)

    state = statetx.State(Tagged(jnp.ones(2), "first"))

    def step(carry, _):
        state.value = Tagged(state.value.x, "second")
        return carry, None

    with pytest.raises(statetx.CarryTypeError, match=r"first(.|\n)*second"):
        statetx.scan(step, 0.0, None, 3)
