"""Arrays in nested jaxprs become inputs: cached functions do not keep a user's arrays alive."""

import functools
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
def test_no_equation_of_a_region_holds_an_array(name):
    f = NESTINGS[name](layer(0, jax.jit))
    closed = jax.make_jaxpr(f)(X)
    assert arrays_in(closed.jaxpr, closed.consts)
    region = jax.make_jaxpr(statetx.remat(f))(X)
    assert len(region.consts) >= 2 and not arrays_in(region.jaxpr, ())
    assert len({id(a) for a in region.consts}) == len(region.consts), "an array that is used twice is one input"
    np.testing.assert_allclose(statetx.remat(f)(X), f(X), rtol=1e-6)


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


@pytest.mark.sample
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


WITH_RULES |= {
    "remat": lambda f, x: statetx.remat(f)(x) + x,
    "while_loop": lambda f, x: statetx.while_loop(
        lambda c: c[0] < 1, lambda c: (c[0] + 1, c[1] + f(c[1])), (0, x), checkpoint=Slots(2), max_steps=2
    )[1],
    "stack": lambda f, x: Stacked(f)(x) + x,
    "jit in scan": lambda f, x: stepwise(None)(statetx.jit(f), x),
}


class Stacked:
    """Two layers, of which the first is the identity."""

    def __init__(self, f):
        class Layer:
            def __init__(self, is_first):
                self.scale = statetx.State(jnp.float32(is_first))

            def __call__(self, x):
                return self.scale.value * x + (1 - self.scale.value) * f(x)

        self.layers = statetx.stack(lambda: Layer(next(firsts)), 2)

    def __call__(self, x):
        return self.layers(x)


firsts = itertools.cycle([1.0, 0.0])


AT_ONCE = {
    "grad": lambda f, x: f(x) + x,
    "vmap": lambda f, x: statetx.vmap(lambda x: f(x) + x)(jnp.stack([x, x]))[0],
}
MAKE = {
    "native": (
        statetx.State,
        lambda s: s.value,
        lambda s, x: setattr(s, "value", x),
        r"State \(f32\[\], made at .*hoist",
    ),
    "brainstate": (
        brainstate.State,
        lambda s: s.value,
        lambda s, x: setattr(s, "value", x),
        r"State \(f32\[\], made at",
    ),
    "nnx": (nnx.Param, nnx.Param.get_value, nnx.Param.set_value, r"Param \(f32\[\], made at"),
    "Ref": (jax.new_ref, lambda r: r[...], lambda r, x: r.__setitem__(..., x), r"Ref \(f32\[\], made at"),
}


def touching(kind, act):
    """A spike of slope 2, whose derivative rule calls ``act()``."""
    spike = jax.custom_vjp(lambda x: (x > 0).astype(x.dtype))
    if kind == "custom_vjp":
        spike.defvjp(lambda x: (spike(x), act()), lambda _, g: (g * 2,))
    elif kind == "backward":
        spike.defvjp(lambda x: (spike(x), None), lambda _, g: (act(), (g * 2,))[1])
    else:
        spike = jax.custom_jvp(lambda x: (x > 0).astype(x.dtype))
        spike.defjvp(lambda primals, tangents: (act(), (spike(*primals), tangents[0] * 2))[1])
    return spike


@pytest.mark.sample
@pytest.mark.parametrize(
    "rule, library", [*zip(RULES, ("native", "nnx", "Ref"), strict=True), ("custom_jvp", "brainstate")]
)
@pytest.mark.parametrize("name", WITH_RULES)
def test_a_rule_that_touches_a_state_late_is_refused(name, rule, library):
    """Read or written, eager and jitted: by name, with the rule's function and the way out."""
    make, read, write, described = MAKE[library]
    state, run = make(jnp.float32(2.0)), WITH_RULES[name]
    message = (
        rf"the derivative rule of <lambda> at .*test_hoist.py:\d+ touches {described}(.|\n)*Fix: pass the value as an"
    )
    for act, gradient in [
        (lambda: read(state), statetx.grad),
        (lambda: write(state, jnp.float32(9.0)), lambda f: statetx.jit(statetx.grad(f))),
        (lambda: read(state), lambda f: jax.grad(statetx.jit(f))),
    ]:
        spike = touching(rule, act)
        with pytest.raises(statetx.StateAccessError, match=message):
            gradient(lambda x, spike=spike: run(spike, x))(jnp.float32(1.0))
    assert read(state) == 2
    pure = touching(rule, lambda: None)
    assert statetx.grad(lambda x: run(pure, x))(jnp.float32(1.0)) == 3


@pytest.mark.parametrize("name", ["slots", "cond"])
def test_a_rule_that_touches_a_state_is_refused_in_forward_mode(name):
    """JAX runs the forward mode of a loop with slots when it lowers the program, after the call."""
    width = statetx.State(jnp.float32(2.0))
    spike = surrogate(width, "custom_jvp")
    slope = statetx.jit(lambda x: statetx.jvp(lambda x: WITH_RULES[name](spike, x), (x,), (jnp.float32(1.0),))[1])
    with pytest.raises(statetx.StateAccessError, match="touches State"):
        slope(1.0)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", AT_ONCE)
def test_a_rule_that_jax_runs_at_once_reads_a_state(name, rule):
    width = statetx.State(jnp.float32(2.0))
    spike = surrogate(width, rule)
    gradient = statetx.grad(lambda x: AT_ONCE[name](spike, x))
    jitted = statetx.jit(gradient)
    x = jnp.float32(1.0)
    assert gradient(x) == jitted(x) == 3
    width.value = jnp.float32(5.0)
    assert gradient(x) == jitted(x) == 6


@pytest.mark.sample
@pytest.mark.parametrize("name", WITH_RULES)
def test_the_fix_of_the_error_works(name):
    """The value is an argument of the function that has the rule, where it may be differentiated, too."""
    width = statetx.Param(jnp.float32(2.0))
    spike = jax.custom_jvp(lambda w, x: (x > 0).astype(x.dtype))
    spike.defjvp(lambda primals, tangents: (spike(*primals), primals[0] * tangents[1]))
    gradient = statetx.grad(lambda x: WITH_RULES[name](lambda x: spike(width.value, x), x), 0, wrt=width)
    jitted = statetx.jit(gradient)
    x = jnp.float32(1.0)
    assert gradient(x) == jitted(x) == (0, 3)
    width.value = jnp.float32(5.0)
    assert gradient(x) == jitted(x) == (0, 6)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def of_width(width, x):
    return (x > 0).astype(x.dtype)


of_width.defjvp(lambda width, primals, tangents: (of_width(width, *primals), tangents[0] * width))


@pytest.mark.parametrize("name", [*AT_ONCE, *WITH_RULES])
def test_value_of_a_state_in_nondiff_argnums_is_right_or_refused(name):
    width = statetx.State(jnp.float32(2.0), name="width")
    run = (AT_ONCE | WITH_RULES)[name]
    message = (
        r"the derivative rule of of_width at .*test_hoist.py:\d+ uses a traced value .*nondiff_argnums(.|\n)* touches "
        r".*State 'width' \(f32\[\], made at .*test_hoist.py:\d+\)(.|\n)*Fix: pass the value as an argument outside of "
        r"nondiff_argnums"
    )
    for gradient in (statetx.grad, lambda f: statetx.jit(statetx.grad(f))):
        f = gradient(lambda x: run(lambda x: of_width(width.value, x), x))
        if name in AT_ONCE or (name == "remat" and gradient is statetx.grad):
            assert f(jnp.float32(1.0)) == 3
        else:
            with pytest.raises(statetx.StateAccessError, match=message):
                f(jnp.float32(1.0))


@pytest.mark.parametrize("rule, outer", [("custom_vjp", lambda f: f), ("custom_jvp", statetx.jit)])
@pytest.mark.parametrize("name", AT_ONCE)
def test_rule_that_reads_a_differentiated_state_is_refused(name, rule, outer):
    """JAX runs a rule outside of the derivative that it is for, where no value of this derivative can be used."""
    width = statetx.Param(jnp.float32(2.0), name="width")
    spike, run = surrogate(width, rule), AT_ONCE[name]
    message = (
        r"the derivative rule .*<lambda> at .*test_hoist.py:\d+ read Param 'width' \(f32\[\], made at "
        r".*test_hoist.py:\d+\), "
        r"whose value is differentiated.*\n.*pass the value as an argument"
    )
    with pytest.raises(statetx.StateAccessError, match=message):
        outer(lambda x: statetx.grad(lambda x: run(spike, x), 0, wrt=width)(x))(jnp.float32(1.0))
    assert width.value == 2 and statetx.grad(lambda x: run(spike, x))(jnp.float32(1.0)) == 3


def test_rule_that_closes_over_a_differentiated_value_has_the_error_of_jax():
    with pytest.raises(jax.errors.UnexpectedTracerError):
        statetx.grad(lambda x: touching("custom_jvp", lambda: x + 1)(x))(jnp.float32(1.0))


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
@pytest.mark.parametrize("name", AT_ONCE)
def test_rule_that_reads_a_state_of_an_outer_derivative(name, rule):
    width = statetx.Param(jnp.float32(2.0), name="width")
    spike, run = surrogate(width, rule), AT_ONCE[name]
    assert statetx.grad(lambda: jax.grad(lambda x: run(spike, x))(jnp.float32(1.0)), wrt=width)() == 1


@pytest.mark.parametrize("rule", ["custom_vjp", "custom_jvp"])
def test_policy_runs_a_rule_of_a_jitted_body(rule):
    """A policy runs the rule while jit stages the body: it is refused there."""
    width, count = statetx.State(jnp.float32(2.0)), statetx.State(jnp.float32(0.0))
    spike = surrogate(width, rule)

    def body(x):
        count.value = count.value + 1.0
        return spike(x) + x

    f = statetx.jit(statetx.remat(body, policy=statetx.policies.path("count", missing="ignore")))
    with pytest.raises(statetx.StateAccessError, match="touches State"):
        statetx.grad(f)(1.0)
    assert count.value == 0


@pytest.mark.parametrize("transform", [brainstate.transform.jit, brainstate.transform.vmap])
def test_rule_in_a_transform_of_brainstate(transform):
    width, count = statetx.State(jnp.float32(2.0)), brainstate.State(jnp.float32(0.0))
    spike = surrogate(width, "custom_jvp")

    def body(x):
        count.value = count.value + 1.0
        return spike(x) + x

    x = jnp.ones(()) if transform is brainstate.transform.jit else jnp.ones(1)
    assert transform(lambda x: statetx.grad(body)(x))(x) == 3
    with pytest.raises(statetx.StateAccessError, match="touches State"):
        transform(lambda x: statetx.grad(statetx.remat(body))(x))(x)


@pytest.mark.parametrize("make", [statetx.State, brainstate.State, nnx.Param])
def test_rule_in_a_body_keeps_no_state_of_it_alive(make):
    read = nnx.Param.get_value if make is nnx.Param else lambda s: s.value
    write = nnx.Param.set_value if make is nnx.Param else lambda s, x: setattr(s, "value", x)
    spike = touching("custom_jvp", lambda: None)

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
def test_hundreds_of_calls_keep_no_bytes():
    def call(seed):
        f = layer(seed, jax.jit)
        for transform in TRANSFORMS.values():
            transform(f)(X)

    sizes = []
    for num in (10, 300):
        for seed in range(num):
            call(float(seed))
        gc.collect()
        sizes.append(sum(x.nbytes for x in jax.live_arrays()))
    assert sizes[0] >= sizes[1]  # arrays of other tests may end in between
