"""States on a mesh of eight CPU devices, under every transform: equal results and unchanged shardings."""

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
from statetx.policies import Levels, Slots

pytestmark = pytest.mark.skipif(len(jax.devices()) < 8, reason="needs 8 devices; conftest asks for them")

WIDTH, BATCH, LAYERS = 8, 16, 4


class Block:
    """A residual block with weights that may be sharded, and a running mean of its inputs."""

    out = None  # with explicit axes: the output sharding of a product that is sharded along the contracted axis

    def __init__(self, seed=0):
        start = np.random.default_rng(seed)
        self.up = statetx.Param(jnp.asarray(start.normal(size=(WIDTH, 2 * WIDTH)) / 4, jnp.float32))
        self.down = statetx.Param(jnp.asarray(start.normal(size=(2 * WIDTH, WIDTH)) / 4, jnp.float32))
        self.mean = statetx.State(jnp.zeros(WIDTH))

    def __call__(self, x):
        self.mean.value = 0.9 * self.mean.value + 0.1 * x.mean(0)
        return x + jnp.matmul(jnp.tanh(x @ self.up.value), self.down.value, out_sharding=self.out)


class Noisy(Block):
    """The same with dropout."""

    def __init__(self, seed=0):
        super().__init__(seed)
        self.rng = statetx.RngState(seed)

    def __call__(self, x):
        return super().__call__(jnp.where(jax.random.bernoulli(self.rng.next(), 0.9, x.shape), x, 0.0))


def in_a_loop(checkpoint):
    return lambda block, x: statetx.scan(lambda c, _: (block(c), None), x, None, 5, checkpoint=checkpoint)[0]


def in_a_while_loop(block, x):
    return statetx.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, block(c[1])), (0, x), checkpoint=Slots(2))[1]


def along_a_tangent(block, x):
    """The block and its derivative along x, added."""
    return sum(statetx.jvp(block, (x,), (x,)))


def one_example_at_a_time(block, x):
    out = None if block.out is None else P()
    return statetx.vmap(lambda v: jnp.matmul(jnp.tanh(v @ block.up.value), block.down.value, out_sharding=out))(x)


# name -> (makes the model, its step)
PROGRAMS = {
    "remat": (Noisy, lambda block, x: statetx.remat(block)(x)),
    "scan": (Block, in_a_loop(None)),
    "slots": (Noisy, in_a_loop(Slots(2))),
    "levels": (Block, in_a_loop(Levels(2))),
    "while_loop": (Block, in_a_while_loop),
    "cond": (Block, lambda block, x: statetx.cond(x.sum() < 1e9, block, lambda x: x, x)),
    "vmap": (Block, one_example_at_a_time),
    "jvp": (Block, along_a_tangent),
    "stack": (lambda: statetx.stack([Block(i) for i in range(LAYERS)]), lambda layers, x: layers(x)),
    "remat_scan": (
        lambda: statetx.stack([Block(i) for i in range(LAYERS)]),
        lambda layers, x: statetx.remat_scan(layers)(x),
    ),
}

# name -> mesh, specs of the states by name, spec of the batch
LAYOUTS = {
    "data": ({"data": 8}, {"up": P(), "down": P(), "mean": P()}, P("data")),
    "tensor": ({"model": 8}, {"up": P(None, "model"), "down": P("model"), "mean": P()}, P()),
    "fsdp": ({"data": 8}, {"up": P("data"), "down": P("data"), "mean": P("data")}, P("data")),
    "both": ({"data": 4, "model": 2}, {"up": P("data", "model"), "down": P("model", "data"), "mean": P()}, P("data")),
}
AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
LESS = ("stack", "levels", "while_loop", "remat_scan")  # the fast suite has loops with explicit axes
CASES = [
    *(("fsdp", program, AUTO) for program in PROGRAMS if program not in LESS),
    *((layout, "remat_scan", AUTO) for layout in ("data", "tensor")),
    *(("fsdp", program, EXPLICIT) for program in ("while_loop", "remat_scan")),
    ("both", "remat", EXPLICIT),
]
SLOW = [
    *(("fsdp", program, AUTO) for program in LESS),
    *((layout, "remat", AUTO) for layout in ("data", "tensor")),
    *((layout, program, AUTO) for layout in ("both",) for program in PROGRAMS),
    *(
        (layout, program, EXPLICIT)
        for layout in ("data", "tensor", "both")
        for program in PROGRAMS
        if program != "remat"
    ),
    *(("fsdp", program, EXPLICIT) for program in PROGRAMS if program not in ("while_loop", "remat_scan")),
]


class Training:
    """Momentum on the weights; a step reads and writes all its states."""

    def __init__(self, program):
        make, forward = PROGRAMS[program]
        self.model = make()
        self.weights = statetx.states(self.model, statetx.Param)
        self.moments = {path: statetx.State(jnp.zeros_like(w.value)) for path, w in self.weights.items()}
        self.count = statetx.State(0)
        self.loss = lambda x: jnp.mean(forward(self.model, x) ** 2)

    def step(self, x):
        loss, grads = statetx.value_and_grad(self.loss, wrt=self.weights)(x)
        for path, w in self.weights.items():
            self.moments[path].value = 0.9 * self.moments[path].value + grads[path]
            w.value = w.value - 0.01 * self.moments[path].value
        self.count.value += 1
        return loss

    def place(self, mesh, specs):
        """Put the states on a mesh, but for the counter and random keys, which the first step finds where they were
        made.
        """
        for path, state in statetx.states([self.model, self.moments]).items():
            spec = specs.get(path.rpartition(".")[2])
            if spec is not None:
                layers = (None,) * (state.value.ndim - (1 if path.endswith("mean") else 2))
                state.value = jax.device_put(state.value, NamedSharding(mesh, P(*layers, *spec)))

    def shardings(self):
        return {p: s.value.sharding for p, s in statetx.states([self.model, self.moments]).items()}


X = np.random.default_rng(7).normal(size=(BATCH, WIDTH)).astype(np.float32)


@functools.cache
def expected(program):
    """Three losses on one device."""
    training = Training(program)
    step = statetx.jit(training.step)
    return [float(step(X)) for _ in range(3)]


@contextlib.contextmanager
def on_a_mesh(layout, program, kind):
    """A training whose states are on the devices, and its batch."""
    shape, specs, batch_spec = LAYOUTS[layout]
    mesh = jax.make_mesh(tuple(shape.values()), tuple(shape), axis_types=(kind,) * len(shape))
    is_explicit = kind is EXPLICIT
    with jax.set_mesh(mesh) if is_explicit else contextlib.nullcontext():
        training = Training(program)
        training.place(mesh, specs)
        if is_explicit:
            getattr(training.model, "__wrapped__", training.model).out = batch_spec
        yield training, jax.device_put(X, NamedSharding(mesh, batch_spec))


@pytest.mark.sample
@pytest.mark.parametrize(
    ("layout", "program", "kind"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)],
    ids=lambda x: getattr(x, "name", x),
)
def test_states_keep_their_sharding(layout, program, kind):
    with on_a_mesh(layout, program, kind) as (training, x):
        before = training.shardings()
        body = Counted(training.step)
        step = statetx.jit(body)
        losses = [float(step(x))]
        with compilations() as compiled:
            losses += [float(step(x)), float(step(x))]
        after = training.shardings()
    np.testing.assert_allclose(losses, expected(program), rtol=2e-5)  # the order of sums differs
    assert losses[2] < losses[1] < losses[0]
    assert body.runs == 1 and not compiled
    assert int(training.count.value) == 3
    for path, sharding in before.items():
        if isinstance(sharding, NamedSharding):
            assert after[path] == sharding, path
        else:  # found on one device, and replicated by the first step
            assert after[path].is_fully_replicated and after[path].num_devices == 8, path


@pytest.mark.slow
@pytest.mark.parametrize("kind", [AUTO, EXPLICIT], ids=lambda kind: kind.name)
def test_states_keep_their_sharding_without_jit(kind):
    with on_a_mesh("fsdp", "remat", kind) as (training, x):
        before = training.shardings()
        losses = [float(training.step(x)) for _ in range(2)]
        with compilations() as compiled:
            losses.append(float(training.step(x)))
        after = training.shardings()
    np.testing.assert_allclose(losses, expected("remat"), rtol=2e-5)
    assert not compiled
    for path, sharding in before.items():
        if isinstance(sharding, NamedSharding):
            assert after[path].is_equivalent_to(sharding, 2 - path.endswith("mean")), path


def test_sharding_constraint_inside_is_respected():
    with on_a_mesh("fsdp", "scan", AUTO) as (training, x):
        block, mesh = training.model, x.sharding.mesh

        def constrained(x):
            return jax.lax.with_sharding_constraint(jnp.tanh(x @ block.up.value), NamedSharding(mesh, P(None, "data")))

        out = statetx.jit(statetx.remat(constrained))(x)
        assert out.sharding.spec == P(None, "data")


# -- the fence --


def test_fence_adds_no_collective():
    """Each block reduces its gradient in its branch, beside the loss; nothing is reduced to know the branch."""
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AUTO,))
    place = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))
    weights = [statetx.Param(place(jnp.eye(64) / 9 + i, P())) for i in range(4)]
    x = place(jnp.ones((2048, 64)), P("d"))

    def block(w, x):
        h = x @ w
        for _ in range(6):
            h = jnp.sin(h) * x
        return x + h

    def compiled(fence):
        def loss(x):
            for w in weights:
                x = statetx.remat(lambda x, w=w: block(w.value, x), fence=fence)(x)
            return jnp.mean(x**2)

        return statetx.jit(statetx.value_and_grad(loss, wrt=weights)).lower(x).compile()

    fenced, text = compiled("cond"), compiled("cond").as_text()
    assert text.count(" conditional(") == 4
    found = re.findall(r"= (\S+?)(?:\{[\d,]*\})? (?:all-\w+|collective-\w+|reduce-scatter)\(", text)
    assert sorted(found) == ["f32[64,64]"] * 4 + ["f32[]"]
    assert fenced.memory_analysis().temp_size_in_bytes < 0.7 * compiled(None).memory_analysis().temp_size_in_bytes


# -- programs for one device of several --


@pytest.mark.slow
@pytest.mark.parametrize("kind", [AUTO, EXPLICIT], ids=lambda kind: kind.name)
def test_collectives_in_a_rematerialized_function_of_one_device(kind):
    """Weights gathered by hand within remat, gradients reduced by the transpose, a mean over devices as a state."""
    mesh = jax.make_mesh((8,), ("d",), axis_types=(kind,))
    block = Block()
    noise = statetx.State(jax.random.split(jax.random.key(0), 8))  # each device draws from a key of its own
    weights, x = {"up": block.up, "down": block.down}, jnp.asarray(X)

    @statetx.remat
    def layer(x):
        up, down = (jax.lax.all_gather(w.value, "d", tiled=True) for w in weights.values())
        keys = jax.vmap(jax.random.split, out_axes=1)(noise.value)
        noise.value = keys[0]
        block.mean.value = 0.9 * block.mean.value + 0.1 * jax.lax.pmean(x.mean(0), "d")
        return x + jnp.tanh(x @ up) @ down + jax.random.normal(keys[1, 0], x.shape)

    def loss(x):
        total = (statetx.scan(lambda c, _: (layer(c), None), x, None, 3, checkpoint=Slots(2))[0] ** 2).sum()
        return jax.lax.psum(total, "d")

    split = statetx.shard_map(
        loss, mesh=mesh, in_specs=P("d"), out_specs=P(), states={"*up": P("d"), "*down": P("d"), "*noise": P("d")}
    )

    def reference(values, x):
        keys, mean = jax.random.split(jax.random.key(0), 8), jnp.zeros(WIDTH)
        for _ in range(3):
            both = jax.vmap(jax.random.split, out_axes=1)(keys)
            keys, mean = both[0], 0.9 * mean + 0.1 * x.mean(0)
            drawn = jax.vmap(lambda key: jax.random.normal(key, (BATCH // 8, WIDTH)))(both[1])
            x = x + jnp.tanh(x @ values["up"]) @ values["down"] + drawn.reshape(x.shape)
        return (x**2).sum(), (mean, keys)

    start = {name: w.value for name, w in weights.items()}
    (value, (mean, keys)), grads = jax.jit(jax.value_and_grad(reference, has_aux=True))(start, x)
    with jax.set_mesh(mesh):
        for state, spec in (*((w, P("d")) for w in weights.values()), (noise, P("d")), (block.mean, P())):
            state.value = jax.device_put(state.value, NamedSharding(mesh, spec))
        first, x = noise.value, jax.device_put(x, NamedSharding(mesh, P("d")))
        step = statetx.jit(statetx.value_and_grad(split, wrt=weights))
        got, got_grads = step(x)
        np.testing.assert_allclose(got, value, rtol=1e-5)
        np.testing.assert_allclose(block.mean.value, mean, rtol=1e-5)
        assert (jax.random.key_data(noise.value) == jax.random.key_data(keys)).all()
        for name in weights:
            np.testing.assert_allclose(got_grads[name], grads[name], rtol=1e-4, atol=1e-4)
            assert got_grads[name].sharding.is_equivalent_to(weights[name].value.sharding, 2)
        assert noise.value.sharding == first.sharding and noise.value.sharding.num_devices == 8
        with compilations() as compiled:
            step(x)
    assert not compiled


IN_PARTS = {
    "chunked": lambda loss: statetx.chunked(loss, size=3),
    "microbatch": lambda loss: statetx.microbatch(loss, 2),
    "weighted": lambda loss: statetx.chunked(loss, size=3, weight=lambda hidden, labels: (labels >= 0).sum()),
}


@pytest.mark.sample
@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("name", IN_PARTS)
def test_entropy_in_parts_of_a_vocabulary_over_devices(name, order):
    """Tokens lie over one axis of the mesh, and the embedding, whose gradient is taken, over the other."""
    mesh = jax.make_mesh((2, 4), ("d", "v"), axis_types=(AxisType.Auto,) * 2)
    start = np.random.default_rng(0)
    hidden = jnp.asarray(start.normal(size=(12, WIDTH)), jnp.float32)
    labels = jnp.asarray(start.integers(0, 16, 12))
    embedding = statetx.Param(jnp.asarray(start.normal(size=(WIDTH, 16)), jnp.float32))

    def local(hidden, labels):
        logits = hidden @ embedding.value
        places = jax.lax.axis_index("v") * logits.shape[1] + jnp.arange(logits.shape[1])
        most = jax.lax.pmax(jax.lax.stop_gradient(logits.max(-1)), "v")
        total = jax.lax.psum(jnp.exp(logits - most[:, None]).sum(-1), "v")
        at_labels = jax.lax.psum(jnp.where(labels[:, None] == places[None], logits, 0).sum(-1), "v")
        return (jnp.log(total) + most - at_labels).mean()

    split = statetx.shard_map(
        lambda *batch: jax.lax.pmean(IN_PARTS[name](local)(*batch), "d"),
        mesh=mesh,
        in_specs=P("d"),
        out_specs=P(),
        states={"*embedding": P(None, "v")},
    )

    def whole(hidden, labels):
        logits = hidden @ embedding.value
        return (jax.nn.logsumexp(logits, -1) - logits[jnp.arange(len(labels)), labels]).mean()

    def derivative(loss):
        gradient = lambda x: statetx.value_and_grad(loss, 0, wrt=embedding)(x, labels)
        return gradient(hidden) if order == 1 else statetx.jvp(gradient, (hidden,), (jnp.cos(hidden),))[1]

    expected = derivative(whole)
    embedding.value = jax.device_put(embedding.value, NamedSharding(mesh, P(None, "v")))
    got = statetx.jit(lambda: derivative(split))()
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), got, expected)


def test_resharded_states_recompile():
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
    place = lambda spec: NamedSharding(mesh, spec)
    w, count = statetx.State(jax.device_put(jnp.ones(8), place(P()))), statetx.State(jnp.zeros(()))

    @statetx.jit
    def step(x):
        w.value, count.value = w.value * x, count.value + 1

    step(2.0)
    w.value = jax.device_put(w.value, place(P("d")))
    step(2.0)
    assert w.value.sharding.spec == P("d") and count.value.sharding.spec == P()
    with compilations() as compiled:
        step(2.0)
        w.value = jax.device_put(w.value, place(P()))
        step(2.0)
    assert w.value.sharding.spec == P() and float(w.value[0]) == 16 and float(count.value) == 4
    assert len(compiled) == 0, "both placements were met before"
    count.value = jnp.zeros(())  # uncommitted, and returned to its former device
    step(2.0)
    assert count.value.sharding.spec == P() and float(count.value) == 1


@pytest.mark.parametrize("value", [jnp.full(3, 0.5), {"a": jnp.full(3, 0.5), "n": 2}], ids=["array", "container"])
def test_a_state_that_moves_to_a_mesh_within_a_rematerialized_call(value):
    """`jit` replicates a state that is not committed to its device; the call around it has read it before."""
    mesh = jax.make_mesh((1,), ("d",), axis_types=(AxisType.Auto,))
    state = statetx.State(value)
    halved = statetx.jit(lambda x: setattr(state, "value", jax.tree.map(lambda v: v * x[0], state.value)))

    @statetx.remat
    def call(x):
        total = sum(jax.tree.leaves(jax.tree.map(jnp.sum, state.value)))
        halved(x)
        return total

    out = call(jax.device_put(jnp.full(2, 0.5), NamedSharding(mesh, P())))
    assert float(out) == float(sum(map(jnp.sum, jax.tree.leaves(value))))
    jax.tree.map(lambda new, old: np.testing.assert_array_equal(new, 0.5 * old), state.value, value)


def test_a_compiled_call_in_a_trace_moves_no_state_to_a_mesh():
    """A value that is moved in a trace would be a tracer; the call around it has read the state before."""
    mesh = jax.make_mesh((1,), ("d",), axis_types=(AxisType.Auto,))
    w = statetx.State(jax.device_put(jnp.full(2, 0.5), NamedSharding(mesh, P())))
    count, offset = statetx.State(jnp.float32(1)), jax.new_ref(jnp.float32(0))

    @statetx.jit
    def step(x):
        count.value *= 2
        return (w.value * x).sum()

    # A derivative stages a function that reaches a Ref.
    call = statetx.remat(lambda x: statetx.grad(lambda x: step(x) + offset[...])(x))
    assert float(call(3.0)) == 1 and float(count.value) == 2


def test_a_state_that_moves_to_a_mesh_within_two_calls_and_is_written_in_the_outer_one():
    """Lowering moves the state, and nothing is written: the end of the inner call keeps it where it is."""
    mesh = jax.make_mesh((1,), ("d",), axis_types=(AxisType.Auto,))
    state = statetx.State(jnp.float32(2))
    doubled = statetx.jit(lambda x: setattr(state, "value", state.value * 2 + 0 * x[0]))
    inner = statetx.remat(lambda x: (doubled.lower(x), state.value)[1])

    @statetx.remat
    def outer(x):
        before = inner(x)
        state.value += before
        return before

    assert float(outer(jax.device_put(jnp.ones(2), NamedSharding(mesh, P())))) == 2
    assert float(state.value) == 4
