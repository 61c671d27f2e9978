"""Random states under every transform: each draw is a new one, in the call and after it, and brainstate's idioms for
keys give brainstate's numbers.
"""

import functools

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from brainstate import random
from flax import nnx
from libraries import LIBRARIES

import statetx
from helpers import transforms_of_brainstate

XS = jnp.linspace(0.5, 2.0, 3)
KEYS = jax.random.split(jax.random.key(3), 3)


def is_random(path, state):
    if isinstance(state, jax.Ref):
        return jnp.issubdtype(state.dtype, jax.dtypes.prng_key)
    return isinstance(state, (statetx.RngState, random.RandomState, nnx.RngKey))


SPLIT = {is_random: statetx.Split}
data = jax.random.key_data

# -- every draw is a new one -------------------------------------------------------------------------------------

TRANSFORMS = {
    "vmap": lambda draw: statetx.vmap(lambda x: draw())(XS),
    "vmap, Split": lambda draw: statetx.vmap(lambda x: draw(), states=SPLIT)(XS),
    "vmap of vmap": lambda draw: statetx.vmap(statetx.vmap(lambda x: draw()))(jnp.ones((2, 2))),
    "vmap of remat": lambda draw: statetx.vmap(statetx.remat(lambda x: draw()))(XS),
    "vmap of cond": lambda draw: statetx.vmap(lambda x: statetx.cond(XS[0] > 9, draw, draw))(XS),
    "map": lambda draw: statetx.map(lambda x: draw(), XS),
    "scan, Split": lambda draw: statetx.scan(lambda c, x: (c, draw()), 0.0, XS, states=SPLIT)[1],
    "vmap of map": lambda draw: statetx.vmap(lambda xs: statetx.map(lambda x: draw(), xs))(jnp.ones((2, 2))),
    "microbatch, Split": lambda draw: statetx.microbatch(lambda x: draw(), 3, reduce="stack", states=SPLIT)(XS),
    "remat": lambda draw: [k[None] for k in statetx.remat(draw)()],
    "cond": lambda draw: [k[None] for k in statetx.cond(XS[0] > 0, draw, draw)],
    "jit": lambda draw: [k[None] for k in statetx.jit(draw)()],
    "grad": lambda draw: [k[None] for k in statetx.grad(lambda x: (x, draw()), has_aux=True)(1.0)[1]],
}


@pytest.mark.sample
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_next_draws_after_a_transform_equal_none_of_its_draws(transform):
    rngs = [kind.rng() for kind in LIBRARIES.values()]

    def draw():
        return [data(kind.draw(rng)) for kind, rng in zip(LIBRARIES.values(), rngs, strict=True)]

    draws = TRANSFORMS[transform](draw)
    later = [*TRANSFORMS[transform](draw)], draw(), draw()
    for kind, inside, again, *outside in zip(LIBRARIES.values(), draws, *later, strict=True):
        rows = np.concatenate([np.reshape(x, (-1, 2)) for x in (inside, again, *outside)])
        assert len(np.unique(rows, axis=0)) == len(rows) > 3, kind.name


# -- a key for each example, set in the function -----------------------------------------------------------------


@pytest.mark.sample
@pytest.mark.parametrize("rules", [None, SPLIT], ids=["default", "Split"])
@pytest.mark.parametrize("kind", LIBRARIES.values(), ids=LIBRARIES)
def test_key_that_is_set_for_each_example(kind, rules):
    def run(rng, key):
        kind.set(kind.key_of(rng), key)
        return jax.random.uniform(kind.draw(rng))

    expected = [run(kind.rng(), key) for key in KEYS]
    rng, other = kind.rng(), kind.rng()
    np.testing.assert_array_equal(statetx.vmap(lambda key: run(rng, key), states=rules)(KEYS), jnp.stack(expected))
    # It advances once, whatever the function sets.
    statetx.vmap(lambda key: run(other, jax.random.fold_in(key, 1)), states=rules)(KEYS)
    np.testing.assert_array_equal(data(kind.draw(rng)), data(kind.draw(other)))


@pytest.mark.parametrize("rules", [None, SPLIT], ids=["default", "Split"])
def test_constant_key_that_a_map_sets_does_not_stay(rules):
    rng, other = statetx.RngState(0), statetx.RngState(0)

    def run(x):
        rng.value = jax.random.key(5)
        return jax.random.uniform(rng.next())

    assert len(np.unique(statetx.vmap(run, states=rules)(XS))) == 1
    other.split(3)
    np.testing.assert_array_equal(data(rng.value), data(other.value))


@pytest.mark.parametrize("disabled", [False, True], ids=["scan", "disable_jit"])
def test_key_that_is_set_for_each_step_of_a_split_scan(disabled):
    rng, other = statetx.RngState(0), statetx.RngState(0)

    def step(carry, key):
        rng.value = key
        return carry, jax.random.uniform(rng.next())

    with jax.disable_jit(disabled):
        _, draws = statetx.scan(step, 0.0, KEYS, states={statetx.RngState: statetx.Split})
    other.split(3)
    np.testing.assert_array_equal(draws, [jax.random.uniform(jax.random.split(key)[1]) for key in KEYS])
    np.testing.assert_array_equal(data(rng.value), data(other.value))


def fail(draw):
    def failing():
        draw()
        raise KeyError

    with pytest.raises(KeyError):
        statetx.remat(failing)()


def hold(draw):
    def fun(x):
        if x.ndim:  # it is not
            draw()
        return x

    specs = {"in_specs": jax.P(), "out_specs": jax.P()}
    statetx.shard_map(fun, mesh=jax.make_mesh((1,), ("d",)), check_vma=False, **specs)(jnp.ones(()))


LOOKS = {
    "make_jaxpr": lambda draw: statetx.make_jaxpr(draw)(),
    "eval_shape": lambda draw: statetx.eval_shape(draw),
    "lower": lambda draw: statetx.jit(draw).lower(),
    "saved_residuals": lambda draw: statetx.saved_residuals(lambda x: x * jax.random.normal(draw()), 1.0),
    "failed call": fail,
    "shard_map that does not draw": hold,
}


@pytest.mark.parametrize("look", LOOKS)
def test_call_in_a_map_that_only_looks_at_a_function_advances_no_key(look):
    for kind in LIBRARIES.values():
        rng = kind.rng()
        draw = functools.partial(kind.draw, rng)
        statetx.vmap(lambda x, draw=draw: (LOOKS[look](draw), x)[1])(XS)
        np.testing.assert_array_equal(data(kind.draw(rng)), data(kind.draw(kind.rng())), kind.name)


def test_read_of_a_key_in_an_inner_call_of_a_map_advances_it():
    keys = []
    for transform in (lambda f: f, statetx.remat, statetx.jit, brainstate.transform.jit):
        rng = random.RandomState(7)
        statetx.vmap(lambda x, rng=rng, wrap=transform: wrap(lambda: jax.random.normal(rng.value))())(XS)
        keys.append(data(rng.value))
    np.testing.assert_array_equal(keys[1:], keys[:1] * 3)
    assert (keys[0] != data(random.RandomState(7).value)).any()


def test_key_without_a_value_that_a_map_sets():
    rngs = []

    def make():
        rngs.append(statetx.RngState(0))
        raise KeyError

    with pytest.raises(KeyError):
        statetx.remat(make)()
    statetx.vmap(lambda x: setattr(rngs[0], "value", jax.random.key(5)))(XS)
    np.testing.assert_array_equal(data(rngs[0].value), data(jax.random.key(5)))


# -- brainstate's idioms for keys --------------------------------------------------------------------------------


def in_context(x, seed):
    with random.seed_context(seed):
        x = x * random.rand()
    return x + random.rand()


def after(set_or_draw, x):
    del set_or_draw
    return x * random.rand()


IDIOMS = {
    "draw": lambda x, key: x * random.rand() + random.rand(),
    "set_key": lambda x, key: after(random.set_key(key), x),
    "set_key, and no draw": lambda x, key: (random.set_key(key), x)[1],
    "set_key after a draw": lambda x, key: after((random.rand(), random.set_key(key)), x),
    "set_key(5)": lambda x, key: after(random.set_key(5), x),
    "seed": lambda x, key: after(random.seed(key), x),
    "seed(5)": lambda x, key: after(random.seed(5), x),
    "split_key": lambda x, key: x * jax.random.uniform(random.split_key()),
    "split_key(3)": lambda x, key: x * jax.random.uniform(random.split_key(3)[1]),
    "split_keys": lambda x, key: x * jax.random.uniform(random.split_keys(3)[2]),
    "seed_context": in_context,
    "seed_context(5)": lambda x, key: in_context(x, 5),
    "get_key": lambda x, key: x * jax.random.uniform(random.get_key()),
    "get_key and set_key": lambda x, key: after(random.set_key(random.get_key()), x),
    "key=": lambda x, key: x * random.rand(key=key),
    "clone_rng": lambda x, key: x * random.clone_rng().rand(),
    "a RandomState of its own": lambda x, key: x * random.RandomState(key).rand(),
    "no random number": lambda x, key: x,
}
THEIRS = brainstate.transform
first = lambda f: lambda: f(XS[0], KEYS[0])


def pair(f):
    def step(carry, xs):
        y = f(*xs)
        return carry + y, y

    return step


second = lambda x, key: 2 * x
BOTH = {  # brainstate's transform, and statetx's
    "vmap": (lambda f: lambda: THEIRS.vmap(f)(XS, KEYS), lambda f: lambda: statetx.vmap(f)(XS, KEYS)),
    "vmap2": (lambda f: lambda: THEIRS.vmap2(f)(XS, KEYS), lambda f: lambda: statetx.vmap(f)(XS, KEYS)),
    "remat": (lambda f: first(THEIRS.remat(f)), lambda f: first(statetx.remat(f))),
    "jit": (lambda f: first(THEIRS.jit(f)), lambda f: first(statetx.jit(f))),
    "grad of remat": (
        lambda f: first(THEIRS.grad(THEIRS.remat(f))),
        lambda f: first(statetx.grad(statetx.remat(f))),
    ),
    "jit of vmap": (lambda f: THEIRS.jit(BOTH["vmap"][0](f)), lambda f: statetx.jit(BOTH["vmap"][1](f))),
    "scan": (
        lambda f: lambda: THEIRS.scan(pair(f), jnp.float32(0), (XS, KEYS)),
        lambda f: lambda: statetx.scan(pair(f), jnp.float32(0), (XS, KEYS)),
    ),
    "for_loop": (
        lambda f: lambda: THEIRS.for_loop(f, XS, KEYS),
        lambda f: lambda: statetx.map(lambda xs: f(*xs), (XS, KEYS)),
    ),
    "cond": (
        lambda f: lambda: THEIRS.cond(XS[0] > 0, f, second, XS[1], KEYS[1]),
        lambda f: lambda: statetx.cond(XS[0] > 0, f, second, XS[1], KEYS[1]),
    ),
    "cond, other branch": (
        lambda f: lambda: THEIRS.cond(XS[0] < 0, f, second, XS[1], KEYS[1]),
        lambda f: lambda: statetx.cond(XS[0] < 0, f, second, XS[1], KEYS[1]),
    ),
    "for_loop of vmap": (
        lambda f: lambda: THEIRS.for_loop(lambda s: THEIRS.vmap(f)(s * XS, KEYS), jnp.ones(2)),
        lambda f: lambda: statetx.map(lambda s: statetx.vmap(f)(s * XS, KEYS), jnp.ones(2)),
    ),
    "vmap of for_loop": (
        lambda f: lambda: THEIRS.vmap(lambda x, k: THEIRS.for_loop(f, x * jnp.ones(2), jax.random.split(k)))(XS, KEYS),
        lambda f: (
            lambda: statetx.vmap(lambda x, k: statetx.map(lambda xs: f(*xs), (x * jnp.ones(2), jax.random.split(k))))(
                XS, KEYS
            )
        ),
    ),
}
EAGER = ("vmap", "remat")


def several(names):
    """One function of several idioms, one after the other, which compiles once for all of them."""
    return lambda x, key: jnp.stack([IDIOMS[name](x, key) for name in names]).sum()


def calls(transform, f):
    """The results of two calls, with the key after each."""
    random.seed(0)
    run = transform(f)
    return [(jax.tree.map(np.asarray, run()), np.asarray(data(random.DEFAULT.value))) for _ in range(2)]


def cells():
    for transform in BOTH:
        for name in IDIOMS if transform in EAGER else ("draw", "set_key", "split_key(3)", "seed_context(5)"):
            marks = () if transform in EAGER or (transform, name) == ("jit", "draw") else pytest.mark.slow
            yield pytest.param(transform, (name,), marks=marks, id=f"{transform}-{name}")
    for transform in ("jit of vmap", "scan", "cond"):
        yield pytest.param(transform, ("draw", "set_key", "seed_context(5)"), id=f"{transform}-several")
    for transform in BOTH:
        yield pytest.param(transform, tuple(IDIOMS), id=f"{transform}-all", marks=pytest.mark.slow)


@transforms_of_brainstate
@pytest.mark.parametrize(("transform", "idioms"), [*cells()])
def test_idiom_of_brainstate_gives_its_numbers_and_its_next_key(transform, idioms):
    theirs, ours = (calls(t, several(idioms)) for t in BOTH[transform])
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)
