"""Sizes and plans count bytes of one device: under shardings, `vmap` and `shard_map`."""

from unittest import mock

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import statetx
from helpers import assert_close, captured
from statetx._lift.context import TraceContext
from statetx._remat.override import rewritten_by
from statetx._remat.rewriter import MARKER, Rewriter
from statetx.planner._program.devices import of_device
from statetx.planner.planner import ProgramPlanner
from statetx.policies import Budget, Slots

pytestmark = pytest.mark.skipif(len(jax.devices()) < 8, reason="needs 8 devices; conftest asks for them")

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
KINDS = pytest.mark.parametrize("kind", [AUTO, EXPLICIT], ids=lambda kind: kind.name)


def mesh_of(kind=AUTO):
    return jax.make_mesh((8,), ("d",), axis_types=(kind,))


class Net:
    """Residual layers whose activations are much larger than weights, and a count as a state."""

    def __init__(self, mesh, width=64):
        place = lambda x: jax.device_put(x, NamedSharding(mesh, P()))
        self.ws = [statetx.Param(place(jnp.full((width, width), 0.01 * (i + 1)))) for i in range(3)]
        self.count = statetx.State(place(jnp.zeros(())))

    def __call__(self, x):
        self.count.value += 1
        for w in self.ws:
            x = x + jnp.tanh(jnp.sin(x @ w.value))
        return jnp.mean(x**2)


def batch_on(mesh, width=64, num=2048):
    x = jnp.linspace(-1, 1, num * width, dtype=jnp.float32).reshape(num, width)
    return jax.device_put(x, NamedSharding(mesh, P("d")))


def compiled_bytes(fun, *args):
    return statetx.jit(fun).lower(*args).compile().memory_analysis().temp_size_in_bytes


# -- plans and fit: --


@pytest.mark.slow
@pytest.mark.parametrize("kind", [AUTO, EXPLICIT], ids=lambda kind: kind.name)
def test_plan_counts_bytes_per_device(kind):
    mesh = mesh_of(kind)
    with jax.set_mesh(mesh):
        net, x = Net(mesh), batch_on(mesh)
        step = statetx.value_and_grad(net, wrt=net.ws)
        whole = compiled_bytes(step, x)
        plan = statetx.plan(net, x, of="temporaries", budget=int(1.3 * whole))
        assert plan.stock == "no remat" and abs(plan.unplanned_bytes - whole) < 0.3 * whole
        plan = statetx.plan(net, x, of="temporaries", budget=int(0.75 * whole))
        assert ("bytes of all 8 devices" in str(plan)) == (kind is AUTO)
        planned = statetx.value_and_grad(plan.apply(net), wrt=net.ws)
        assert compiled_bytes(planned, x) <= 0.8 * whole
        found, expected = (jax.tree.leaves(statetx.jit(f)(x)) for f in (planned, step))
        assert_close(found, expected, rtol=1e-4, atol=1e-6)


@KINDS
@pytest.mark.parametrize("within", [pytest.param(False, marks=pytest.mark.thorough), True], ids=["eager", "jit"])
def test_fit_counts_bytes_per_device(kind, within):
    mesh = mesh_of(kind)
    with jax.set_mesh(mesh):
        net, x = Net(mesh), batch_on(mesh)
        whole = compiled_bytes(statetx.value_and_grad(net, wrt=net.ws), x)
        fitted = statetx.value_and_grad(statetx.remat(net, policy=f"fit:{int(0.75 * whole)}"), wrt=net.ws)
        if within:
            assert compiled_bytes(fitted, x) <= 0.8 * whole
        else:
            fitted(x)


@pytest.mark.slow
def test_plan_of_a_step_counts_bytes_per_device():
    mesh = mesh_of()
    net, x = Net(mesh), batch_on(mesh)

    def step(x):
        loss, grads = statetx.value_and_grad(net, wrt=net.ws)(x)
        for w, g in zip(net.ws, grads, strict=True):
            w.value = w.value - 0.1 * g
        return loss

    whole = compiled_bytes(step, x)
    plan = statetx.plan(step, x, of="temporaries", budget=int(0.75 * whole))
    assert compiled_bytes(plan.apply(step), x) <= 0.8 * whole
    assert plan.num_devices == 8 and "bytes of all 8 devices" in str(plan)


@pytest.mark.slow
def test_fit_on_a_mesh_whose_types_name_axes():
    """Operands that are made within a function are sharded by their types."""
    mesh = mesh_of(EXPLICIT)
    with jax.set_mesh(mesh):
        w, x = statetx.Param(jax.device_put(jnp.ones((8, 8)), P())), batch_on(mesh, 8, 512)

        def loss(x):
            for _ in range(3):
                h = x @ w.value
                x = jnp.where(jax.device_put(jnp.ones(h.shape, bool), jax.typeof(h).sharding), jnp.tanh(h), x)
            return jnp.mean(x**2)

        step = statetx.grad(loss, wrt=w)
        fitted = statetx.grad(statetx.remat(loss, policy="fit:1MiB"), wrt=w)
        np.testing.assert_allclose(statetx.jit(fitted)(x), statetx.jit(step)(x), rtol=1e-5)
        assert statetx.plan(loss, x, of="temporaries", budget="1MiB").temp_bytes <= 2**20
        assert statetx.plan(step, x, of="temporaries", budget="1MiB").temp_bytes <= 2**20


# -- loops --


@pytest.mark.sample
@KINDS
def test_loop_budget_counts_bytes_per_device(kind):
    mesh = mesh_of(kind)
    with jax.set_mesh(mesh):
        w = statetx.Param(jax.device_put(jnp.full((64, 64), 0.01), NamedSharding(mesh, P())))
        x = batch_on(mesh, num=512)

        def loss(x, checkpoint=None):
            body = lambda c, _: (jnp.tanh(c @ w.value), None)
            return jnp.mean(statetx.scan(body, x, None, 128, checkpoint=checkpoint)[0] ** 2)

        step = lambda checkpoint: statetx.value_and_grad(lambda x: loss(x, checkpoint), wrt=w)
        # A carry has 16 KiB on a device, and 128 KiB in all; all of the loop 4 MiB, and 24 MiB.
        budget, enough = Budget(2**18), Budget("8MiB")
        sizes = {c: compiled_bytes(step(c), x) for c in (None, 1, budget, enough)}
        assert sizes[1] < sizes[budget] <= 2**18 + 2**15 < sizes[None] == sizes[enough]


# -- vmap and shard_map --


def test_context_under_vmap_has_the_shardings_of_mapped_and_other_inputs():
    named = lambda *spec: NamedSharding(mesh_of(), P(*spec))
    context = TraceContext(shardings=(named("d"), None, named("d"), named("d"))).with_vmap("axis", [True, True, False])
    assert context.shardings == (named(None, "d"), None, named("d"), named(None, "d"))
    assert context.for_other_inputs() == TraceContext((("axis", ()),))


@pytest.mark.slow
def test_fit_under_a_named_axis():
    w, xs = statetx.Param(jnp.eye(64)), jnp.linspace(-1, 1, 2 * 128 * 64).reshape(2, 128, 64)

    def f(x):
        for _ in range(3):
            x = jnp.tanh(x @ w.value)
            x = x - jax.lax.pmean(x.mean(0, keepdims=True), "batch")
        return jnp.mean(x**2)

    def run(policy):
        loss = lambda xs: statetx.vmap(statetx.remat(f, policy=policy), axis_name="batch")(xs).mean()
        return statetx.grad(loss, wrt=w)

    whole = compiled_bytes(run("everything"), xs)
    np.testing.assert_allclose(statetx.jit(run("fit:1MiB"))(xs), statetx.jit(run(None))(xs), rtol=1e-5, atol=1e-7)
    assert compiled_bytes(run(f"fit:{int(0.9 * whole)}"), xs) <= 0.95 * whole


def in_shard_map(f, mesh, check_vma):
    return statetx.shard_map(
        lambda x: jax.lax.psum((f(x) ** 2).sum(), "d"), mesh=mesh, in_specs=P("d"), out_specs=P(), check_vma=check_vma
    )


W, WS = statetx.Param(jnp.full((8, 8), 0.1)), statetx.Param(jnp.full((6, 8, 8), 0.1))


def cell(c):
    return c + jnp.tanh(c @ W.value)


def meeting(c):
    return cell(c) - jax.lax.pmean(c.mean(0, keepdims=True), "d")


LOOPS = {
    "scan": lambda size: (
        lambda x: statetx.scan(lambda c, _: (cell(c), None), x, None, 6, checkpoint=size and Budget(size))[0]
    ),
    "collective": lambda size: (
        lambda x: statetx.scan(lambda c, _: (meeting(c), None), x, None, 6, checkpoint=size and Budget(size))[0]
    ),
    "remat_scan": lambda size: (
        lambda x: statetx.remat_scan(
            lambda c: c + jnp.tanh(c @ WS.value), lengths=Budget(size) if size else (2, 3), num=6
        )(x)
    ),
    "fit": lambda size: statetx.remat(lambda x: cell(cell(cell(x))), policy=size and f"fit:{size}"),
    "fit, collective": lambda size: statetx.remat(lambda x: meeting(meeting(x)), policy=size and f"fit:{size}"),
}


@pytest.mark.sample
@pytest.mark.parametrize("check_vma", [True, False], ids=["checked", "unchecked"])
@pytest.mark.parametrize("name", LOOPS)
def test_budgets_in_shard_map(name, check_vma):
    mesh, x = mesh_of(), jnp.linspace(-1, 1, 128).reshape(16, 8)
    params = [W] if name != "remat_scan" else [WS]
    run = lambda size: statetx.jit(statetx.value_and_grad(in_shard_map(LOOPS[name](size), mesh, check_vma), wrt=params))
    (value, (grad,)), (expected, (expected_grad,)) = run("1MiB")(x), run(None)(x)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    np.testing.assert_allclose(grad, expected_grad, rtol=1e-5)


def test_inputs_of_the_program_around_a_shard_map_share_nothing_inside():
    batch, found = batch_on(mesh_of()), []
    look = lambda x: found.append(TraceContext.of([x]).num_sharing([batch.sharding])) or x
    jax.jit(look)(batch), jax.shard_map(look, mesh=mesh_of(), in_specs=P("d"), out_specs=P("d"))(batch)
    assert found == [8, 1]


class Noting(Rewriter):
    """Rewrites nothing."""

    @of_device
    def rewrite(self, body, name, num_out):
        of_eqn = {v: eqn.primitive.name for eqn in body.jaxpr.eqns for v in eqn.outvars}
        self.given = num_out, [of_eqn[v] for v in body.jaxpr.outvars], body.jaxpr.invars[0].aval.shape
        return body


def test_gradient_of_a_shard_map_is_rewritten_on_a_device():
    """With the outputs first that have a cotangent."""
    rewriter, x = Noting(), jnp.linspace(-1, 1, 128).reshape(16, 8)
    mapped = jax.shard_map(lambda x: (x + 1, jnp.sin(x), -x), mesh=mesh_of(), in_specs=P("d"), out_specs=P("d"))
    gradient = jax.grad(lambda x: (lambda a, y, b: (y.sum(), (a, b)))(*mapped(x)), has_aux=True)
    with rewritten_by(rewriter):
        found = gradient(x)
    jax.tree.map(np.testing.assert_array_equal, found, gradient(x))
    assert rewriter.given == (1, ["sin", "add", "neg"], (2, 8))


@pytest.mark.slow
@pytest.mark.parametrize("check_vma", [True, False], ids=["checked", "unchecked"])
def test_budget_in_shard_map_is_per_device(check_vma):
    mesh, x = mesh_of(), jnp.ones((512, 64))
    w = statetx.Param(jnp.full((64, 64), 0.01))
    f = lambda c: lambda x: statetx.scan(lambda h, _: (jnp.tanh(h @ w.value), None), x, None, 128, checkpoint=c)[0]
    run = lambda c: statetx.value_and_grad(in_shard_map(f(c), mesh, check_vma), wrt=w)
    sizes = {c: compiled_bytes(run(c), x) for c in (None, 1, Budget("512KiB"), Budget("8MiB"))}
    assert sizes[Budget("8MiB")] == sizes[None]
    assert sizes[1] < sizes[Budget("512KiB")] <= 2**19 + 2**15


@pytest.mark.sample("slow")
@pytest.mark.parametrize("check_vma", [True, False], ids=["checked", "unchecked"])
def test_while_loop_with_slots_steps_per_device(check_vma):
    """Gradients of replicated weights are summed over devices after the loop: within it they would wait for
    each other.
    """
    mesh, x = mesh_of(), jnp.linspace(0.1, 1.5, 128).reshape(16, 8)
    w, total = statetx.Param(jnp.full((8, 8), 0.1)), statetx.State(jnp.zeros(8))
    step = lambda w, c: jnp.where(c < 40, c + jnp.tanh(c @ w), c)  # jnp.where is jitted

    def f(x):
        def body(carry):
            total.value += 1.0
            return carry[0] + 1, step(w.value, carry[1])

        return statetx.while_loop(lambda c: (c[0] < 12) & (c[1].sum() < 60), body, (0, x), checkpoint=Slots(2))[1]

    def by_hand(w, x):
        loss, counts = 0.0, []
        for part in jnp.split(x, 8):
            counts.append(0)
            while counts[-1] < 12 and float(jax.lax.stop_gradient(part).sum()) < 60:
                part, counts[-1] = step(w, part), counts[-1] + 1
            loss += (part**2).sum()
        return loss, counts

    run = statetx.shard_map(
        lambda x: jax.lax.psum((f(x) ** 2).sum(), "d"),
        mesh=mesh,
        in_specs=P("d"),
        out_specs=P(),
        check_vma=check_vma,
        states={"*total": P("d")},
    )
    compiled = statetx.jit(statetx.value_and_grad(run, wrt=w)).lower(x).compile()
    (expected, counts), expected_grad = jax.value_and_grad(by_hand, has_aux=True)(w.value, x)
    value, grad = compiled(x)
    assert len(set(counts)) > 3 and total.value.tolist() == counts
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    np.testing.assert_allclose(grad, expected_grad, rtol=1e-4)


# -- outputs of what is measured --


@pytest.mark.slow
@pytest.mark.parametrize("spec", [P("d"), P()], ids=["sharded weights", "replicated weights"])
def test_fit_counts_no_gradient_that_is_not_taken(spec):
    """Of the batch. As an output of the measured program it would lend its memory to temporary values, and the budget
    would be exceeded.
    """
    mesh, data = jax.make_mesh((8,), ("d",), axis_types=(AUTO,)), np.random.default_rng(0)
    put = lambda spec, *shape: jax.device_put(
        jnp.asarray(data.normal(size=shape) / 12, jnp.float32), NamedSharding(mesh, spec)
    )
    x, layers = put(P("d"), 512, 64), [(put(spec, 64, 128), put(spec, 128, 64)) for _ in range(4)]

    def loss(layers, x):
        for up, down in layers:
            x = x + jnp.sin(jax.nn.silu(x @ up)) @ down
        return jnp.mean(x**2)

    def temp_bytes(fun):
        return statetx.jit(jax.value_and_grad(fun)).lower(layers, x).compile().memory_analysis().temp_size_in_bytes

    unplanned, plans = temp_bytes(loss), []
    found = ProgramPlanner.plan
    with mock.patch.object(ProgramPlanner, "plan", lambda *args: plans.append(found(*args)) or plans[-1]):
        budget = unplanned // 2
        assert temp_bytes(statetx.remat(loss, policy=f"fit:{budget}")) == plans[0].temp_bytes <= budget


def test_fit_made_without_a_gradient_is_differentiated_with_it():
    """Plans of the inner gradient, by the weights, leave out the batch, by which the outer one differentiates."""
    loss = lambda w, x: jnp.sin(jnp.tanh(x @ w)).sum()
    of_batch = lambda fun: jax.grad(lambda x, w: (jax.grad(fun)(w, x) ** 2).sum())
    args = jnp.linspace(-1, 1, 128).reshape(16, 8), jnp.eye(8)
    planned = of_batch(statetx.remat(loss, policy="fit:1MiB"))
    np.testing.assert_allclose(planned(*args), of_batch(loss)(*args), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(statetx.jit(planned)(*args), of_batch(loss)(*args), rtol=1e-5, atol=1e-6)


# -- meshes without devices --


@KINDS
def test_types_on_an_abstract_mesh_count_for_one_device(kind):
    """Of more devices than this machine has."""
    mesh = jax.sharding.AbstractMesh((16,), ("data",), axis_types=(kind,))
    x = jax.ShapeDtypeStruct((64, 8), jnp.float32, sharding=NamedSharding(mesh, P("data")))
    found = captured(lambda x: jnp.sum(jnp.sin(x) ** 2), x)
    assert found.fixed.argument_bytes == 64 * 8 * 4 // 16
    (gradient,) = found.gradients
    (typed,) = gradient.context.types([v.aval for v in gradient.jaxpr.invars])
    assert typed.sharding.shard_shape(x.shape) == (4, 8)


# -- functions that are traced twice --


def test_states_of_a_gradient_that_is_traced_twice_in_another_order():
    """A report has brainstate trace a loss again inside of the gradient; the first trace may read states earlier."""
    w, a, b = brainstate.ParamState(jnp.ones(3)), brainstate.State(1.0), brainstate.State(10.0)
    reads = []

    def loss():
        reads.append([s.value for s in ((a, b) if not reads else (b, a))])
        a.value, b.value = a.value + 1.0, b.value + 1.0
        return jnp.sum(w.value**2) + a.value

    def step():
        return brainstate.transform.grad(loss, {"w": w})()["w"]

    with rewritten_by(MARKER):
        np.testing.assert_array_equal(step(), [2.0] * 3)
    assert len(reads) == 2 and (a.value, b.value) == (2.0, 11.0)
