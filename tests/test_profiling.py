"""Names for profilers: rematerialized functions and states, in the compiled program."""

import re

import jax
import jax.numpy as jnp
import pytest

import statetx


class Block:
    def __init__(self, scale):
        self.w = statetx.Param({"matrix": jnp.eye(2) * scale, "bias": jnp.ones(2)})
        self.calls = statetx.State(jnp.zeros((), jnp.int32))

    @statetx.remat
    def __call__(self, x):
        self.calls.value += 1
        return jnp.tanh(self.w.value["matrix"] @ jnp.sin(x) + self.w.value["bias"])


class Net:
    def __init__(self):
        self.blocks = [Block(1.0), Block(0.5)]

    def __call__(self, x):
        for n, block in enumerate(self.blocks):
            with jax.named_scope(f"block{n}"):
                x = block(x)
        return x


def compiled(**options):
    net = Net()
    weights = statetx.states(net, statetx.Param)

    def train(batch, mode, *, scale):
        assert mode == "train"
        grads = statetx.grad(lambda: (scale * net(batch["x"])).sum(), wrt=weights)()
        for path, state in weights.items():
            state.value = jax.tree.map(lambda w, g: w - 0.1 * g, state.value, grads[path])

    step = statetx.jit(train, static_argnums=1, **options)
    args, kwargs = ({"x": jnp.ones(2)}, "train"), {"scale": 2.0}
    return step, args, kwargs, net


@pytest.fixture(scope="module")
def program():
    step, args, kwargs, _ = compiled()
    return step.lower(*args, **kwargs).compile().as_text()


def test_operations_carry_the_name_of_their_function(program):
    names = re.findall('op_name="([^"]*)"', program)
    for n in range(2):
        inside = [name for name in names if f"jvp(block{n})/Block.__call__/" in name]
        assert any("rematted_computation" in name for name in inside)
        assert any("transpose" not in name for name in inside)


def test_inputs_carry_paths(program):
    found = re.findall(r'parameter\((\d+)\), metadata=\{op_name="([^"]*)"', program.replace("\\'", "'"))
    names = dict(reversed(found))
    weights = [f"net.blocks.{n}.w['{leaf}']" for n in range(2) for leaf in ("bias", "matrix")]
    expected = [*weights, "net.blocks.0.calls", "net.blocks.1.calls", "batch['x']", "scale"]
    assert [names[str(n)] for n in range(len(expected))] == expected


def test_donated_states_carry_paths_too():
    step, args, kwargs, net = compiled(donate_states=True)
    text = step.lower(*args, **kwargs).as_text(debug_info=True)
    for name in ("net.blocks.1.w['bias']", "net.blocks.0.calls", "batch['x']", "scale"):
        assert f'loc("{name}")' in text
    step(*args, **kwargs)
    assert int(net.blocks[0].calls.value) == 1


def test_names_do_not_split_the_cache_or_restage():
    net, runs = Net(), []
    statetx.clear_cache()

    @statetx.jit
    def loss(x):
        runs.append(1)
        return net(x).sum()

    loss(jnp.ones(2)), loss(jnp.ones(2))
    assert statetx.cache_info().structures[:2] == (1, 1) and len(runs) == 1
