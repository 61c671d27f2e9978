"""A training step on a mesh, compiled, against the same step written by hand in plain JAX."""

import contextlib
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import statetx
from helpers import Counted, compilations
from statetx.policies import Lengths

pytestmark = pytest.mark.skipif(len(jax.devices()) < 8, reason="needs 8 devices; conftest asks for them")

WIDTH, BATCH = 64, 64
X = np.random.default_rng(7).normal(size=(BATCH, WIDTH)).astype(np.float32)
WEIGHTS = {
    "up": np.random.default_rng(0).normal(size=(WIDTH, 2 * WIDTH)).astype(np.float32) / 4,
    "down": np.random.default_rng(1).normal(size=(2 * WIDTH, WIDTH)).astype(np.float32) / 8,
}
START = {
    "weights": WEIGHTS,
    "moments": {name: np.zeros_like(w) for name, w in WEIGHTS.items()},
    "mean": np.zeros(WIDTH, np.float32),
    "count": np.int32(0),
}


def layer(weights, mean, key, x, out):
    """One step of the loop: dropout, a running mean, a residual block; with explicit axes `out` says how
    products lie.
    """
    keep = jax.random.bernoulli(key, 0.9, x.shape)
    x = jnp.where(keep if out is None else jax.sharding.reshard(keep, out), x, 0.0)
    h = jnp.tanh(jnp.matmul(x, weights["up"], out_sharding=out))
    return x + jnp.matmul(h, weights["down"], out_sharding=out), 0.9 * mean + 0.1 * x.mean(0)


class Training:
    """With states: the weights and moments split over the devices, the rest on each."""

    def __init__(self, values, out):
        self.weights = {name: statetx.Param(w) for name, w in values["weights"].items()}
        self.moments = {name: statetx.State(m) for name, m in values["moments"].items()}
        self.key = statetx.RngState(values["key"])
        self.mean, self.count = statetx.State(values["mean"]), statetx.State(values["count"])
        self.out = out

    def layer(self, x, _):
        weights = {name: w.value for name, w in self.weights.items()}
        x, self.mean.value = layer(weights, self.mean.value, self.key.next(), x, self.out)
        return x, None

    def loss(self, x):
        return jnp.mean(statetx.scan(self.layer, x, None, 6, checkpoint=Lengths(2, 3))[0] ** 2)

    def step(self, x):
        loss, gradients = statetx.value_and_grad(self.loss, wrt=self.weights)(x)
        for name, w in self.weights.items():
            self.moments[name].value = 0.9 * self.moments[name].value + gradients[name]
            w.value = w.value - 0.01 * self.moments[name].value
        self.count.value = self.count.value + 1
        return loss

    def values(self):
        read = lambda states: {name: s.value for name, s in states.items()}
        named = {"mean": self.mean.value, "count": self.count.value, "key": self.key.value}
        return {"weights": read(self.weights), "moments": read(self.moments), **named}


def by_hand(values, x, out):
    """The step of `Training` as a function of everything that it reads."""

    def turn(weights, carry, _):
        x, mean, key = carry
        key, drawn = jax.random.split(key)
        return (*layer(weights, mean, drawn, x, out), key), None

    def loss(weights, x):
        step = jax.checkpoint(functools.partial(turn, weights), prevent_cse=False)  # as JAX advises within a scan
        turns = jax.checkpoint(lambda c, _: jax.lax.scan(step, c, None, 3), prevent_cse=False)
        (x, mean, key), _ = jax.lax.scan(turns, (x, values["mean"], values["key"]), None, 2)
        return jnp.mean(x**2), {"mean": mean, "key": key}

    (value, left), gradients = jax.value_and_grad(loss, has_aux=True)(values["weights"], x)
    moments = jax.tree.map(lambda m, g: 0.9 * m + g, values["moments"], gradients)
    weights = jax.tree.map(lambda w, m: w - 0.01 * m, values["weights"], moments)
    return value, {"weights": weights, "moments": moments, "count": values["count"] + 1, **left}


def placed(mesh):
    """Values of the states on the mesh."""
    put = lambda spec: lambda x: jax.device_put(x, NamedSharding(mesh, spec))
    split = {name: jax.tree.map(put(P("d")), START[name]) for name in ("weights", "moments")}
    return {**split, **{n: put(P())(x) for n, x in (("mean", START["mean"]), ("count", START["count"]))}} | {
        "key": put(P())(jax.random.key(0))
    }


def collectives(compiled):
    found = r"= (\S+?)(?:\{[\d,]*\})? ((?:all-\w+|collective-\w+|reduce-scatter)(?:-start)?)\("
    return sorted(re.findall(found, compiled.as_text()))


FAST = [(AxisType.Auto, 1), (AxisType.Explicit, 8)]
CASES = [
    pytest.param(kind, n, id=f"{kind.name}-{n}", marks=[] if (kind, n) in FAST else pytest.mark.slow)
    for kind in (AxisType.Auto, AxisType.Explicit)
    for n in (1, 2, 8)
]


@pytest.mark.sample
@pytest.mark.parametrize(("kind", "num_devices"), CASES)
def test_donating_step_equals_handwritten(kind, num_devices):
    mesh = jax.make_mesh((num_devices,), ("d",), axis_types=(kind,))
    is_explicit = kind is AxisType.Explicit
    out = P("d") if is_explicit else None
    with jax.set_mesh(mesh) if is_explicit else contextlib.nullcontext():
        x = jax.device_put(X, NamedSharding(mesh, P("d")))
        training, values = Training(placed(mesh), out), placed(mesh)
        hand = jax.jit(functools.partial(by_hand, out=out), donate_argnums=0)
        body = Counted(training.step)
        step = statetx.jit(body, donate_states=True)

        compiled, wanted = step.lower(x).compile(), hand.lower(values, x).compile()
        assert collectives(compiled) == collectives(wanted) and bool(collectives(wanted)) == (num_devices > 1)
        memory, by = compiled.memory_analysis(), wanted.memory_analysis()
        assert memory.temp_size_in_bytes <= by.temp_size_in_bytes
        assert memory.argument_size_in_bytes == by.argument_size_in_bytes
        assert memory.alias_size_in_bytes == by.alias_size_in_bytes > 0
        assert compiled.cost_analysis()["flops"] == wanted.cost_analysis()["flops"]

        losses, wanted_losses, counts = [], [], []
        for _ in range(3):
            old = training.values()
            with compilations() as found:
                losses.append(float(step(x)))
            counts.append(len(found))
            assert all(w.is_deleted() for w in jax.tree.leaves(old["weights"]))
            loss, values = hand(values, x)
            wanted_losses.append(float(loss))
    assert counts[1:] == [0, 0] and body.runs == 1
    assert losses == wanted_losses
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(training.values()), jax.tree.leaves(values), strict=True
    ):
        assert a.sharding.is_equivalent_to(b.sharding, b.ndim) and a.dtype == b.dtype, path
        same = [jax.random.key_data(v) if jnp.issubdtype(v.dtype, jax.dtypes.prng_key) else v for v in (a, b)]
        np.testing.assert_array_equal(*same, err_msg=str(path))
