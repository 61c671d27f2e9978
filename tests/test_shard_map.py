"""`shard_map` on four CPU devices: replicated and split states, collectives, remat inside."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import statetx
from helpers import Counted, compilations

pytestmark = pytest.mark.skipif(len(jax.devices()) < 4, reason="needs 4 devices; conftest asks for them")
X = jnp.arange(8.0) / 8


class Model:
    def __init__(self):
        self.w = statetx.Param(jnp.asarray(2.0))
        self.h = statetx.State(jnp.ones(8))
        self.total = statetx.State(jnp.zeros(()))

    def step(self, x):
        self.h.value = jnp.tanh(self.h.value * self.w.value + x)
        self.total.value = self.total.value + jax.lax.psum(self.h.value.sum(), "d")
        return self.h.value * x


def mesh():
    return jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))


def mapped(f, **options):
    return statetx.shard_map(f, mesh=mesh(), in_specs=P("d"), out_specs=P("d"), states={"*h": P("d")}, **options)


@pytest.mark.parametrize("wrap", [lambda f: f, statetx.jit])
@pytest.mark.parametrize("remat", [False, True])
def test_states_on_devices(wrap, remat):
    m = Model()
    body = Counted(m.step)
    f = wrap(mapped(statetx.remat(body) if remat else body))
    h, total = m.h.value, 0.0
    for _ in range(2):
        h = jnp.tanh(h * 2.0 + X)
        total = total + h.sum()
        np.testing.assert_allclose(f(X), h * X, rtol=1e-6)
        np.testing.assert_allclose(m.h.value, h, rtol=1e-6)
        np.testing.assert_allclose(m.total.value, total, rtol=1e-6)
    assert m.h.value.sharding.num_devices == 4
    assert body.runs == (1 if wrap is statetx.jit else 2)


def test_gradients_and_no_recompilation():
    m = Model()
    m.h.value = jax.device_put(m.h.value, jax.NamedSharding(mesh(), P("d")))
    f = statetx.jit(statetx.grad(lambda x: (mapped(statetx.remat(m.step))(x) ** 2).sum(), argnums=0, wrt=m.w))
    gw, gx = f(X)

    def reference(w, x):
        return ((jnp.tanh(jnp.ones(8) * w + x) * x) ** 2).sum()

    expected = jax.grad(reference, (0, 1))(2.0, X)
    np.testing.assert_allclose(gw, expected[0], rtol=1e-5)
    np.testing.assert_allclose(gx, expected[1], rtol=1e-5)
    with compilations() as compiled:
        f(X)
        f(X)
    assert not compiled


def test_write_that_may_differ_between_devices():
    m = Model()
    before = m.total.value

    def f(x):
        m.total.value = m.total.value + x.sum()
        return x

    with pytest.raises(
        statetx.StateAccessError, match=r"State 'm.total' .*test_shard_map.py:\d+.*at .*test_shard_map.py"
    ):
        mapped(f)(X)
    assert m.total.value is before
    with pytest.raises(statetx.StateValueError, match="must give a PartitionSpec"):
        statetx.shard_map(f, mesh=mesh(), in_specs=P(), out_specs=P(), states={"h": 0})
