"""Arrays in nested jaxprs become inputs: cached functions do not keep a user's arrays alive."""

import gc
import itertools
import operator

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import statetx
from statetx._equations.inline import hoist
from statetx.policies import Levels, Slots, everything

X = jnp.linspace(-1.0, 1.0, 5)


def layer(seed, jit):
    """A jitted function that closes over an array and a scalar on a device."""
    table, scale = jnp.arange(5.0) + seed, jnp.float32(2.0 + seed)
    return jit(lambda x: jnp.sin(table * x) * scale)


def loop(f):
    return lambda x: jax.lax.scan(lambda c, _: (f(c), None), x, None, 3)[0]


def countdown(f):
    """Without a derivative: the loop's outcome does not matter, its equations do."""

    def test(carry):
        return (carry[0] < 3) & (f(carry[1]).sum() < 1e9)

    return lambda x: x * jax.lax.while_loop(test, lambda c: (c[0] + 1, f(c[1])), (0, jax.lax.stop_gradient(x)))[1]


def branch(f):
    return lambda x: jax.lax.cond(x.sum() > 9.0, lambda x: x, f, x)


def two_branches(f):
    g = layer(7, jax.jit if hasattr(f, "lower") else lambda f: f)
    return lambda x: jax.lax.cond(x.sum() > 9.0, f, lambda x: g(x) + f(x), x)


NESTINGS = {
    "jit": lambda f: f,
    "jit of jit": lambda f: jax.jit(lambda x: f(x) + 1),
    "scan": loop,
    "while_loop": countdown,
    "cond": branch,
    "two branches": two_branches,
    "checkpoint": jax.checkpoint,
    "all": lambda f: jax.jit(loop(branch(jax.checkpoint(f)))),
}


def arrays_in(jaxpr, consts):
    """The arrays on devices that equations hold, at any depth."""
    arrays = [x for x in consts if isinstance(x, jax.Array)]
    for eqn in jaxpr.eqns:
        arrays += [v.val for v in eqn.invars if isinstance(getattr(v, "val", None), jax.Array)]
        for leaf in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            if hasattr(leaf, "eqns"):
                arrays += arrays_in(getattr(leaf, "jaxpr", leaf), getattr(leaf, "consts", ()))
    return arrays


@pytest.mark.parametrize("name", NESTINGS)
def test_hoist_leaves_no_array_in_any_equation(name):
    closed = jax.make_jaxpr(NESTINGS[name](layer(0, jax.jit)))(X)
    assert arrays_in(closed.jaxpr, closed.consts)
    jaxpr, arrays = hoist(closed.jaxpr, closed.consts)
    assert len(arrays) >= 2 and not arrays_in(jaxpr, ())
    assert len({id(a) for a in arrays}) == len(arrays), "an array that is used twice is one input"
    out = jax.core.eval_jaxpr(jaxpr, (), *arrays, X)
    np.testing.assert_allclose(out[0], NESTINGS[name](layer(0, jax.jit))(X), rtol=1e-6)


TRANSFORMS = {
    "remat": lambda f: statetx.grad(lambda x: statetx.remat(f)(x).sum()),
    "scan": lambda f: statetx.grad(lambda x: statetx.scan(lambda c, _: (f(c), None), x, None, 2)[0].sum()),
    "cond": lambda f: statetx.grad(lambda x: statetx.cond(x.sum() < 9.0, f, lambda x: x, x).sum()),
    "schedule": lambda f: statetx.grad(
        lambda x: statetx.scan(lambda c, _: (f(c), None), x, None, 4, checkpoint=2)[0].sum()
    ),
}


CELLS = [
    pytest.param(*cell, marks=() if n % 8 == 0 or cell[:2] == ("jit", "remat") else pytest.mark.slow)
    for n, cell in enumerate(itertools.product(NESTINGS, TRANSFORMS, ("jax", "statetx")))
]


@pytest.mark.parametrize("name, transform, library", CELLS)
def test_no_call_keeps_arrays_alive(name, transform, library):
    """A new model in each call, its layers jitted by themselves."""
    jit = {"jax": jax.jit, "statetx": statetx.jit}[library]
    live = []
    for seed in range(3):
        f = NESTINGS[name](layer(seed, jit))
        out = TRANSFORMS[transform](f)(X)
        plain = reference(
            transform, NESTINGS[name](layer(seed, lambda f: f))
        )  # jax.jit in a jax.lax.cond keeps arrays alive
        np.testing.assert_allclose(out, jax.grad(lambda x, f=plain: f(x).sum())(X), rtol=2e-5, atol=1e-6)
        del f, out, plain
        gc.collect()
        live.append(len(jax.live_arrays()))
    assert live[1] == live[2]


def reference(transform, f):
    def run(x):
        for _ in range({"scan": 2, "schedule": 4}.get(transform, 1)):
            x = f(x)
        return x

    return run


def test_models_with_jitted_layers_share_one_structure():
    statetx.clear_cache()
    for seed in range(3):
        f = statetx.remat(layer(seed, jax.jit))
        statetx.grad(lambda x, f=f: f(x).sum())(X)
    assert statetx.cache_info().structures[:2] == (2, 1)


RULES = ("custom_vjp", "custom_jvp", "backward")


def surrogate(width, kind):
    """A spike whose derivative rule reads its width from a state."""
    if kind == "custom_vjp":
        spike = jax.custom_vjp(lambda x: (x > 0).astype(x.dtype))
        spike.defvjp(lambda x: (spike(x), width.value), lambda w, g: (g * w,))
    elif kind == "backward":
        spike = jax.custom_vjp(lambda x: (x > 0).astype(x.dtype))
        spike.defvjp(lambda x: (spike(x), None), lambda _, g: (g * width.value,))
    else:
        # That an operator of `jax.numpy` gets a value too old JAX sees at once.
        mul = jax.lax.mul if kind == "lax" else operator.mul
        spike = jax.custom_jvp(lambda x: (x > 0).astype(x.dtype))
        spike.defjvp(lambda primals, tangents: (spike(*primals), mul(width.value, tangents[0])))
    return spike


def stepwise(checkpoint):
    return lambda f, x: statetx.scan(lambda h, _: (h + f(h), h + f(h)), x, None, 2, checkpoint=checkpoint)[1][0]


BITS = Slots(2, policy=everything.stored_as("bits"))
UNIT = jax.new_ref(jnp.float32(1.0))
WITH_RULES = {
    "scan": stepwise(None),
    "slots": stepwise(Slots(2)),
    "levels": stepwise(Levels(2)),
    "policy": lambda f, x: stepwise(None)(lambda h: stepwise(BITS)(f, h) - h, x),
    "beside a Ref": lambda f, x: stepwise(Levels(2))(lambda h: stepwise(None)(f, h) * UNIT[...] - h, x),
    "truncated": stepwise(statetx.Truncated(1)),
    "cond": lambda f, x: statetx.cond(x > 0, f, jnp.tanh, x) + x,
    "switch": lambda f, x: statetx.switch(jnp.int32(x > 0), [jnp.tanh, f], x) + x,
    "jit": lambda f, x: statetx.jit(f)(x) + x,
    "cond in scan": lambda f, x: stepwise(Levels(1))(lambda h: statetx.cond(h > 0, f, jnp.tanh, h), x),
    "microbatch": lambda f, x: statetx.microbatch(lambda x: f(x[0]) + x[0], 2)(jnp.stack([x, x])),
    "chunked": lambda f, x: statetx.chunked(lambda x: f(x[0]) + x[0], size=1, reduce="mean")(jnp.stack([x, x])),
    "vector in parts": lambda f, x: statetx.microbatch(f, 2, reduce="concat")(jnp.stack([x, x]))[1] + x,
}


@pytest.mark.parametrize("kind", ["custom_vjp", "custom_jvp"])
@pytest.mark.parametrize("name", WITH_RULES)
def test_derivative_rules_read_states(name, kind):
    """A rule runs late, when JAX differentiates a loop or a branch, and may close over a value of the trace
    around it.
    """
    width = statetx.State(jnp.float32(2.0))
    spike = surrogate(width, kind)
    gradient = lambda: statetx.grad(lambda x: WITH_RULES[name](spike, x))(1.0)
    jitted = statetx.jit(gradient)
    assert gradient() == jitted() == 3
    width.value = jnp.float32(5.0)
    assert gradient() == jitted() == 6


@pytest.mark.parametrize("name", ["slots", "cond"])
def test_derivative_rules_read_states_in_forward_mode(name):
    """JAX runs the forward mode of a loop with slots when it lowers the program, after the call."""
    width = statetx.State(jnp.float32(2.0))
    spike = surrogate(width, "custom_jvp")
    slope = statetx.jit(lambda x: statetx.jvp(lambda x: WITH_RULES[name](spike, x), (x,), (jnp.float32(1.0),))[1])
    assert slope(1.0) == 3
    width.value = jnp.float32(5.0)
    assert slope(1.0) == 6


@pytest.mark.parametrize("library", [jax, statetx])
@pytest.mark.parametrize("rule", RULES)
def test_rules_of_a_jitted_function_see_a_state_change(rule, library):
    """JAX runs the rules of a compiled function once. A program whose rules have read other values is staged again."""
    width, stagings = statetx.State(jnp.float32(2.0)), []
    spike = surrogate(width, rule)

    @statetx.jit
    def inner(x):
        stagings.append(x)
        return spike(x) + 0.0

    outer = statetx.jit(lambda x: inner(x) * 10.0)
    gradients = [library.grad(f) for f in (inner, outer)]
    gradients += [statetx.jit(gradients[0])]
    assert outer(1.0) == 10 and [g(1.0) for g in gradients[:2]] == [g(1.0) for g in gradients[:2]] == [2, 20]
    assert len(stagings) <= 2, "nothing has changed"
    for value in (3, 4):
        width.value = jnp.float32(value)
        assert [g(1.0) for g in gradients] == [value, 10 * value, value]
    assert outer(1.0) == 10 and inner(-1.0) == 0


IN_JIT = {
    **{name: WITH_RULES[name] for name in ("scan", "slots", "levels", "truncated", "cond", "microbatch", "chunked")},
    "while_loop": lambda f, x: statetx.while_loop(
        lambda c: c[0] < 1, lambda c: (c[0] + 1, c[1] + f(c[1])), (0, x), checkpoint=Slots(2), max_steps=2
    )[1],
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", IN_JIT)
def test_rules_in_a_jitted_loop_see_a_state_change(name, rule):
    """A rule of a loop may run when JAX transposes the loop, which other equations than the user's do."""
    width = statetx.State(jnp.float32(2.0))
    spike = surrogate(width, rule)
    gradient = jax.grad(statetx.jit(lambda x: IN_JIT[name](spike, x)))
    assert gradient(1.0) == 3
    width.value = jnp.float32(4.0)
    assert gradient(1.0) == 5


DIFFERENTIATED = {
    "unstaged": lambda f, x: f(x) + x,
    "vmap": lambda f, x: statetx.vmap(lambda x: f(x) + x)(jnp.stack([x, x]))[0],
    "remat": lambda f, x: statetx.remat(f)(x) + x,
    **IN_JIT,
    "switch": WITH_RULES["switch"],
    "jit": WITH_RULES["jit"],
}
ACCEPTED = {
    ("scan", "custom_vjp"),
    ("scan", "custom_jvp"),
    *itertools.product(("unstaged", "vmap", "remat", "microbatch", "chunked"), RULES),
}


@pytest.mark.parametrize("rule, outer", [("custom_vjp", lambda f: f), ("custom_jvp", statetx.jit)])
@pytest.mark.parametrize("name", DIFFERENTIATED)
def test_rule_that_reads_a_differentiated_state_is_refused(name, rule, outer):
    """JAX runs a rule outside of the derivative that it is for, where no value of this derivative can be used."""
    width = statetx.Param(jnp.float32(2.0), name="width")
    spike, run = surrogate(width, rule), DIFFERENTIATED[name]
    message = (
        r"the derivative rule .*<lambda> at .*test_hoist.py:\d+ read Param 'width' \(f32\[\], made at "
        r".*test_hoist.py:\d+\), "
        r"whose value is differentiated.*\n.*pass the value as an argument"
    )
    with pytest.raises(statetx.StateAccessError, match=message):
        outer(lambda x: statetx.grad(lambda x: run(spike, x), 0, wrt=width)(x))(jnp.float32(1.0))
    assert width.value == 2 and statetx.grad(lambda x: run(spike, x))(jnp.float32(1.0)) == 3


def _read_before(spike, width, x):
    return width.value * spike(x)


def _read_before_vmap(spike, width, x):
    scale = width.value
    return statetx.vmap(lambda x: scale * spike(x))(jnp.stack([x, x])).sum()


def _assigned(spike, width, x):
    width.value = 2 * x
    return spike(x)


@pytest.mark.parametrize("outer", [lambda f: f, statetx.jit])
@pytest.mark.parametrize("rule", ["custom_jvp", "lax"])
@pytest.mark.parametrize("loss", [_read_before, _read_before_vmap, _assigned])
def test_rule_that_reads_a_differentiated_state_late_is_refused(loss, rule, outer):
    """The frame sees the first read or write of a state only, and here that is not the rule's."""
    width = statetx.Param(jnp.float32(2.0), name="width")
    spike = surrogate(width, rule)
    wrt = None if loss is _assigned else width
    message = r"a derivative rule|the derivative rule .*<lambda> at .*test_hoist.py:\d+"
    message = (
        rf"({message}) read Param 'width' \(f32\[\], made at .*test_hoist.py:\d+\), whose value is differentiated.*\n"
        rf".*pass the value"
    )
    with pytest.raises(statetx.StateAccessError, match=message):
        outer(lambda x: statetx.grad(lambda x: loss(spike, width, x), 0, wrt=wrt)(x))(jnp.float32(1.0))
    assert width.value == 2 and statetx.grad(lambda x: spike(x))(jnp.float32(1.0)) == 2


LATE = {
    "vjp": lambda f, x: statetx.vjp(f, x)[1](x),
    "jvp": lambda f, x: statetx.jvp(f, (x,), (x,)),
    "linearize": lambda f, x: statetx.linearize(f, x)[1](x),
    "jacrev": lambda f, x: statetx.jacrev(f, 0)(x),
}


@pytest.mark.parametrize("outer", [lambda f: f, jax.jit, statetx.jit])
@pytest.mark.parametrize("rule", ["custom_jvp", "lax"])
@pytest.mark.parametrize("name", LATE)
def test_rule_that_reads_a_differentiated_state_late_is_refused_by(name, rule, outer):
    """Each derivative checks what it keeps, and what the trace around it does, where JAX would fail when the program
    runs.
    """
    width = statetx.State(jnp.float32(2.0), name="width")
    spike = surrogate(width, rule)
    with pytest.raises(
        statetx.StateAccessError, match=rf"^{name}\(.* read State 'width' .*, whose value is differentiated"
    ):
        outer(lambda x: LATE[name](lambda x: _assigned(spike, width, x), x))(jnp.float32(1.0))
    assert width.value == 2


@pytest.mark.parametrize("outer", [lambda f: f, jax.jit, statetx.jit])
def test_values_of_an_outer_derivative_are_kept(outer):
    """A derivative inside another one keeps its values as residuals, and a jitted function as constants."""
    width = statetx.Param(jnp.float32(2.0))

    def pulled(x):
        return statetx.vjp(lambda y: y * width.value * width.value, x)[1](jnp.float32(1.0))[0]

    @jax.jit
    def slope(x):
        return statetx.grad(lambda y: width.value * y * y)(x)

    assert outer(lambda x: statetx.grad(pulled, wrt=width)(x))(3.0) == 4
    assert outer(lambda x: statetx.grad(lambda x: width.value * slope(x), wrt=width)(x))(3.0) == 24


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", DIFFERENTIATED)
def test_rule_that_reads_a_state_of_an_outer_derivative(name, rule):
    """The value of an outer derivative can be used in a rule where JAX can close over it; elsewhere the state
    is named.
    """
    width = statetx.Param(jnp.float32(2.0), name="width")
    spike, run = surrogate(width, rule), DIFFERENTIATED[name]
    slope = statetx.grad(lambda: jax.grad(lambda x: run(spike, x))(jnp.float32(1.0)), wrt=width)
    if (name, rule) in ACCEPTED:
        assert slope() == 1
    else:
        with pytest.raises(statetx.StateAccessError, match="read Param 'width' .* whose value is differentiated"):
            slope()


def test_second_derivatives_of_a_jitted_function_see_a_state_change():
    width = statetx.State(jnp.float32(2.0))
    growth = jax.custom_jvp(jnp.square)
    growth.defjvp(lambda primals, tangents: (growth(*primals), width.value * growth(*primals) * tangents[0]))
    curvature = jax.grad(jax.grad(statetx.jit(lambda x: growth(x))))
    assert curvature(1.0) == 4
    width.value = jnp.float32(3.0)
    assert curvature(1.0) == 9


WITH_WRITES = {
    "scan": lambda f, x: statetx.scan(lambda c, _: (f(c), None), x, None, 2)[0],
    "slots": lambda f, x: statetx.scan(lambda c, _: (f(c), None), x, None, 2, checkpoint=Slots(1))[0],
    "while_loop": lambda f, x: statetx.while_loop(
        lambda c: c[0] < 2, lambda c: (c[0] + 1, f(c[1])), (0, x), checkpoint=Slots(2), max_steps=2
    )[1],
    "cond": lambda f, x: statetx.cond(x > 0, f, jnp.tanh, x),
    "microbatch": lambda f, x: statetx.microbatch(lambda x: f(x[0]), 2)(jnp.stack([x, x])),
    "remat": lambda f, x: statetx.remat(f)(x),
    "jit": lambda f, x: statetx.jit(f)(x),
    "jit in scan": lambda f, x: statetx.scan(lambda c, _: (statetx.jit(f)(c), None), x, None, 2)[0],
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", WITH_WRITES)
def test_rules_that_read_a_state_the_body_writes_are_refused(name, rule):
    width, other = (statetx.State(jnp.float32(2.0), name=name) for name in ("width", "other"))
    spike = surrogate(width, rule)

    def loss(x, written=width):
        def body(x):
            written.value = written.value + 1.0
            return x + spike(x)

        return WITH_WRITES[name](body, x)

    message = (
        r"the derivative rule of .* read State 'width' .* made at .*test_hoist.py:\d+\), which .* writes at "
        r".*test_hoist.py:\d+"
    )
    for gradient in (statetx.grad(loss), statetx.jit(jax.grad(loss))):
        with pytest.raises(statetx.StateAccessError, match=message) as error:
            gradient(1.0)
        assert "Fix: pass the value as an argument" in str(error.value)
    assert width.value == 2 and loss(jnp.float32(1.0)) >= 2
    assert statetx.grad(lambda x: loss(x, other))(1.0) > 2 and other.value > 2


@pytest.mark.parametrize("rule", ["custom_vjp", "custom_jvp"])
def test_policy_looks_into_a_rule_of_a_jitted_body_that_writes(rule):
    """A policy runs the rule while jit stages the body: what it reads then belongs to that trace."""
    width, count = statetx.State(jnp.float32(2.0)), statetx.State(jnp.float32(0.0))
    spike = surrogate(width, rule)

    def body(x):
        count.value = count.value + 1.0
        return spike(x) + x

    f = statetx.jit(statetx.remat(body, policy=statetx.policies.path("count", missing="ignore")))
    gradient = statetx.jit(statetx.grad(f))
    assert [statetx.grad(f)(1.0), statetx.remat(f)(1.0), gradient(1.0), count.value] == [3, 2, 3, 3]
    width.value = jnp.float32(5.0)
    assert [statetx.grad(f)(1.0), gradient(1.0), f(1.0), count.value] == [6, 6, 2, 6]


@pytest.mark.parametrize("transform", [brainstate.transform.jit, brainstate.transform.vmap])
def test_rule_in_a_transform_of_brainstate(transform):
    width, count = statetx.State(jnp.float32(2.0)), brainstate.State(jnp.float32(0.0))
    spike = surrogate(width, "custom_jvp")

    def body(x):
        count.value = count.value + 1.0
        return spike(x) + x

    x = jnp.ones(()) if transform is brainstate.transform.jit else jnp.ones(1)
    assert transform(lambda x: statetx.grad(statetx.remat(body))(x))(x) == 3


@pytest.mark.parametrize("make", [statetx.State, brainstate.State, nnx.Param])
def test_rule_beside_writes_keeps_no_state_of_the_body_alive(make):
    read = nnx.Param.get_value if make is nnx.Param else lambda s: s.value
    write = nnx.Param.set_value if make is nnx.Param else lambda s, x: setattr(s, "value", x)
    spike = surrogate(statetx.State(jnp.float32(2.0)), "custom_jvp")

    def step(x):
        own = make(jnp.float32(0.0))

        def body(c, _):
            write(own, read(own) + c)
            return spike(c), None

        return statetx.scan(body, x, None, 2)[0] + read(own)

    mesh = jax.make_mesh((1,), ("i",))
    mapped = statetx.shard_map(step, mesh=mesh, in_specs=jax.P(), out_specs=jax.P(), check_vma=False)
    assert statetx.jit(lambda x: mapped(x))(jnp.float32(1.0)) == 3


@pytest.mark.slow
def test_thousands_of_calls_keep_no_bytes():
    def call(seed):
        f = layer(seed, jax.jit)
        for transform in TRANSFORMS.values():
            transform(f)(X)

    sizes = []
    for num in (10, 2000):
        for seed in range(num):
            call(float(seed))
        gc.collect()
        sizes.append(sum(x.nbytes for x in jax.live_arrays()))
    assert sizes[0] == sizes[1]
