"""`remat` and modules of flax.linen, whose variables are no states."""

import functools
import subprocess
import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import statetx

X = jnp.sin(jnp.arange(32.0)).reshape(4, 8)
KEYS = {"params": jax.random.key(0), "dropout": jax.random.key(1)}


class Block(nn.Module):
    has_statistics: bool

    @nn.compact
    def __call__(self, x):
        h = nn.BatchNorm(use_running_average=False, name="norm")(x) if self.has_statistics else x
        return x + nn.Dense(8, name="dense")(nn.Dropout(0.1, deterministic=False)(jnp.tanh(h)))


class Decorated(Block):
    @statetx.remat
    @nn.compact
    def __call__(self, x):
        h = nn.BatchNorm(use_running_average=False, name="norm")(x) if self.has_statistics else x
        return x + nn.Dense(8, name="dense")(nn.Dropout(0.1, deterministic=False)(jnp.tanh(h)))


class Net(nn.Module):
    block: type
    has_statistics: bool = True
    call: str = "block(x)"

    @nn.compact
    def __call__(self, x):
        for n in range(2):
            block = self.block(self.has_statistics, name=f"block{n}")
            x = CALLS[self.call](block, x)
        return nn.BatchNorm(use_running_average=False, name="last")(x)


CALLS = {
    "block(x)": lambda block, x: block(x),
    "remat(block)(x)": lambda block, x: statetx.remat(block)(x),
    "remat(block.__call__)(x)": lambda block, x: statetx.remat(block.__call__)(x),
    "remat(lambda x: block(x))(x)": lambda block, x: statetx.remat(lambda x: block(x))(x),
    "remat(call)(block, x)": lambda block, x: statetx.remat(lambda block, x: block(x))(block, x),
}


def gradient(net):
    variables = Net(Block, net.has_statistics).init(KEYS, X)

    def loss(params):
        given = {**variables, "params": params}
        out, new = net.apply(given, X, mutable=["batch_stats"], rngs={"dropout": KEYS["dropout"]})
        return (out**2).mean(), new

    return jax.grad(loss, has_aux=True)(variables["params"])


@pytest.mark.parametrize("block, call", [(Decorated, "block(x)"), *[(Block, call) for call in list(CALLS)[1:]]])
def test_remat_refuses_a_module_that_writes_variables(block, call):
    names = r"remat\(.*\) changes linen's variable 'batch_stats\.block0\.norm\.\w+', which linen holds"
    with pytest.raises(statetx.TraceLeakError, match=rf"{names}(.|\n)*or use flax's nn\.remat\."):
        gradient(Net(block, True, call))


@pytest.mark.parametrize("name", ["scan", "cond", "vmap", "grad"])
def test_other_transforms_refuse_it(name):
    """And linen's variables are those of before: a call without the transform is right."""
    transforms = {
        "scan": lambda f, x: statetx.scan(lambda h, _: (f(h), None), x, None, 2),
        "cond": lambda f, x: statetx.cond(x[0, 0] < 1, f, lambda x: x, x),
        "vmap": lambda f, x: statetx.vmap(f)(x[None]),
        "grad": lambda f, x: statetx.grad(lambda x: f(x).sum())(x),
    }

    class Caught(nn.Module):
        @nn.compact
        def __call__(self, x, is_tried):
            norm = nn.BatchNorm(use_running_average=False, name="norm")
            if is_tried:
                with pytest.raises(statetx.TraceLeakError, match=rf"{name}\(.*\) changes .*'batch_stats.norm.mean'"):
                    transforms[name](norm, x)
            return norm(x)

    variables = Caught().init(KEYS, X, False)
    apply = lambda is_tried: jax.jit(lambda x: Caught().apply(variables, x, is_tried, mutable=["batch_stats"]))(X)
    jax.tree.map(np.testing.assert_array_equal, apply(True), apply(False))


def test_remat_refuses_a_module_that_makes_parameters():
    with pytest.raises(statetx.TraceLeakError, match=r"remat\(Decorated.__call__\) changes .* 'params\.block0\."):
        jax.jit(Net(Decorated, False).init)(KEYS, X)


@pytest.mark.parametrize("block, call", [(Decorated, "block(x)"), *[(Block, call) for call in list(CALLS)[1:]]])
def test_remat_takes_a_module_that_writes_nothing(block, call):
    """In an `apply` with mutable collections, which other modules of it write."""
    net, expected = Net(block, False, call), gradient(Net(Block, False))
    assert "remat" in str(jax.make_jaxpr(lambda: gradient(net))())
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), gradient(net), expected)


def test_advice_of_the_error_works():
    theirs, ours = gradient(Net(Block)), gradient(Net(nn.remat(Block)))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), theirs, ours)


@pytest.mark.slow
def test_remat_does_not_import_flax():
    program = (
        "import sys, jax, statetx; jax.grad(statetx.remat(lambda x: x * x))(1.0); assert 'flax' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize("activation", [nn.gelu, lambda h: jnp.sin(jnp.cos(jnp.tanh(h)))])
def test_report_advises_remat_of_flax(activation):
    """Also where a function of the user's that is no method keeps most."""

    class Wide(nn.Module):
        @nn.compact
        def __call__(self, x):
            return x + nn.Dense(8)(activation(nn.Dense(64)(x)))

    class Unused(nn.Module):  # a method of this name in this file is not the one
        def __call__(self, x):
            return x

    net = nn.Sequential([Wide(), Wide()])
    params = net.init(jax.random.key(0), X)
    report = statetx.memory_report(lambda params, x: net.apply(params, x).sum(), params, X)
    text = report.diagnoses[0].text
    assert "Make its repeated blocks with flax's nn.remat(Wide), which" in text and "@statetx.remat" not in text
    assert "on a CPU with jaxlib before 0.11.1 it saves memory in loops only" in text


@pytest.mark.slow
def test_profile_advises_remat_of_flax():
    class Norm(nn.Module):
        @nn.compact
        def __call__(self, x):
            h = nn.gelu(nn.Dense(64)(x))
            return x + nn.BatchNorm(use_running_average=False)(nn.Dense(32)(nn.gelu(h)))

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            for _ in range(4):
                x = Norm()(x)
            return x

    net, x = Net(), jnp.ones((512, 32))
    variables = net.init(jax.random.key(0), x)

    def loss(params, x):
        out, _ = net.apply({**variables, "params": params}, x, mutable=["batch_stats"])
        return jnp.mean(out**2)

    texts = [change.text for change in statetx.memory_profile(loss, variables["params"], x).changes]
    assert any("Norm.__call__ (4 calls) with flax's nn.remat(Norm)" in text for text in texts)
    assert not any("@statetx.remat" in text for text in texts)
    namespace = {"jnp": jnp}
    exec(
        compile("class Norm:\n    def __call__(self, x):\n        return jnp.tanh(x @ x.T) @ x", "plain.py", "exec"),
        namespace,
    )
    norm = namespace["Norm"]()
    texts = [change.text for change in statetx.memory_profile(lambda x: norm(norm(norm(x))).sum(), x).changes]
    assert any("Rematerialize Norm.__call__ (3 calls) with @statetx.remat" in text for text in texts)


class Recurrent(nn.Module):
    """A cell that `nn.scan` runs through time, as in recurrent policies."""

    @functools.partial(nn.scan, variable_broadcast="params", split_rngs={"params": False})
    @nn.compact
    def __call__(self, carry, x):
        return nn.GRUCell(8, name="cell")(carry, x)


@pytest.mark.slow
def test_scan_of_a_cell_takes_the_place_of_linens_scan():
    cell, start, xs = nn.GRUCell(8), jnp.zeros((4, 8)), jnp.sin(jnp.arange(192.0)).reshape(48, 4, 1)
    variables = Recurrent().init(KEYS["params"], start, xs)

    def by_linen(variables):
        return (Recurrent().apply(variables, start, xs)[1] ** 2).mean()

    def by_statetx(variables, checkpoint=None):
        of_cell = {"params": variables["params"]["cell"]}
        return (statetx.scan(functools.partial(cell.apply, of_cell), start, xs, checkpoint=checkpoint)[1] ** 2).mean()

    slots = functools.partial(by_statetx, checkpoint=statetx.policies.Slots(4))
    with jax.numpy_rank_promotion("allow"):  # as users have it
        expected = jax.grad(by_linen)(variables)
        jax.tree.map(np.testing.assert_allclose, jax.grad(slots)(variables), expected)
        plain, less = (statetx.measure(f, variables).temp_bytes for f in (by_linen, slots))
    assert less < 0.5 * plain
