"""Rules of ``states=``: the first filter that selects a state gives its rule, in every transform that takes them."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import statetx
from statetx import Broadcast, Carry, First, Last, Mean, State

X, PATH = jnp.arange(4.0), "*.h"


class Model:
    def __init__(self, value):
        self.h = State(value)


def vmapped(rules):
    model = Model(X)
    return statetx.vmap(lambda x: jnp.zeros(()) + model.h.value.sum(), states=rules)(X)


def scanned(rules):
    model = Model(X)

    def step(carry, x):
        model.h.value = model.h.value + x
        return carry, jnp.sum(model.h.value)

    statetx.scan(step, 0.0, X, states=rules)
    return model.h.value


def split_and_shared(transform):
    def draws(rules):
        model = Model(0)
        model.h = statetx.RngState(0)
        return transform(lambda x: jax.random.uniform(model.h.next()), rules)

    return draws


def in_parts(transform):
    def left(rules):
        model = Model(jnp.float32(0))

        def loss(x):
            model.h.value = model.h.value + x.sum()
            return x.sum()

        transform(loss, rules)(X)
        return model.h.value

    return left


def on_devices(rules):
    model, seen = Model(X), []

    def f(x):
        seen.append(model.h.value.shape)
        return x

    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    statetx.shard_map(f, mesh=mesh, in_specs=P(), out_specs=P(), states=rules)(X)
    return jnp.asarray(seen[0])


PLACES = {  # a call with rules, and rules of which any two give different results
    "vmap": (vmapped, (0, Broadcast)),
    "vmap, random": (split_and_shared(lambda f, rules: statetx.vmap(f, states=rules)(X)), (statetx.Split, Broadcast)),
    "scan": (scanned, (0, Carry)),
    "scan, random": (
        split_and_shared(lambda f, rules: statetx.scan(lambda c, x: (c, f(x)), 0.0, X, states=rules)[1]),
        (statetx.Split, Broadcast, Carry),
    ),
    "microbatch": (in_parts(lambda f, rules: statetx.microbatch(f, 4, states=rules)), (Carry, First, Last, Mean)),
    "chunked": (in_parts(lambda f, rules: statetx.chunked(f, size=1, states=rules)), (Carry, First, Last)),
    "shard_map": (on_devices, (P("d"), P())),
}


@pytest.mark.parametrize("place", PLACES)
def test_first_filter_that_selects_a_state_gives_its_rule(place):
    run, rules = PLACES[place]
    alone = [np.asarray(run({PATH: rule})) for rule in rules]
    assert not any(np.array_equal(a, b) for a, b in itertools.combinations(alone, 2)), "the rules must show"
    for (first, expected), second in itertools.product(zip(rules, alone, strict=True), rules):
        if first is not second:
            np.testing.assert_array_equal(run({PATH: first, State: second}), expected)
            np.testing.assert_array_equal(run({State: first, PATH: second}), expected)


def test_first_axes_of_remat_scan_are_the_layers():
    def run(axes):
        model = Model(jnp.arange(4.0).reshape(2, 2))

        def layer(h):
            return h + jnp.asarray([1.0, 10.0]) * model.h.value

        return statetx.remat_scan(layer, lengths=(2,), axes=axes)(jnp.zeros(2))

    alone = [run({State: axis}) for axis in (0, 1)]
    assert not np.array_equal(*alone)
    for axis in (0, 1):
        np.testing.assert_array_equal(run({"model.h": axis, State: 1 - axis}), alone[axis])
        np.testing.assert_array_equal(run({State: axis, "model.h": 1 - axis}), alone[axis])
