"""The tools that inspect a function know a training step, which takes gradients itself, from a loss."""

import brainstate
import jax
import jax.numpy as jnp
import pytest

import statetx

WS = [jnp.eye(16) * 0.5 for _ in range(4)]
X = jnp.ones((64, 16))


@statetx.remat
def block(w, x):
    return jnp.sin(jnp.tanh(x @ w))


def loss(ws, x):
    for w in ws:
        x = block(w, x)
    return (x**2).mean()


def by_jax(ws, x):
    return jax.tree.map(lambda w, g: w - 0.1 * g, ws, jax.grad(loss)(ws, x))


def by_vjp_of_arrays(ws, x):
    y, pullback = jax.vjp(lambda ws: block(ws[1], block(ws[0], x)), ws)
    return pullback(2 * y)[0]


STEPS = [by_jax, jax.jit(by_jax, donate_argnums=0), statetx.jit(by_jax), statetx.grad(loss), by_vjp_of_arrays]
NAMES = ["jax", "jax.jit", "statetx.jit", "statetx.grad", "vjp of arrays"]


class Neurons(brainstate.nn.Module):
    """An integrator linearizes their equations."""

    def __init__(self):
        super().__init__()
        self.layer = brainstate.nn.Linear(16, 16)
        self.v = brainstate.HiddenState(jnp.zeros((64, 16)))

    def update(self, x):
        self.v.value = brainstate.nn.exp_euler_step(
            lambda v: (jnp.tanh(v) - v + self.layer(x + self.v.value)) / 10, self.v.value
        )
        return self.v.value


def neurons_and_loss():
    neurons = Neurons()

    def loss(x):
        return sum((neurons(x) ** 2).mean() for _ in range(3))

    return neurons, loss


@pytest.fixture(autouse=True)
def settings():
    with brainstate.environ.context(dt=1.0), jax.numpy_rank_promotion("allow"):  # brainstate's layers promote
        yield


@pytest.mark.sample
@pytest.mark.parametrize("step", STEPS, ids=NAMES)
def test_a_step_is_not_differentiated(step):
    unchanged = statetx.measure(step, WS, X, gradient=False)
    assert statetx.measure(step, WS, X) == unchanged != statetx.measure(step, WS, X, gradient=True)
    profile = statetx.memory_profile(step, WS, X)
    assert not profile.gradient and profile.temp_bytes == unchanged.temp_bytes


@pytest.mark.parametrize("step", STEPS, ids=NAMES)
def test_residuals_of_a_step_are_those_of_its_gradient(step):
    found = statetx.saved_residuals(step, WS, X)
    fun, args = (loss, (WS, X)) if step is not by_vjp_of_arrays else (lambda ws: block(ws[1], block(ws[0], X)), (WS,))
    expected = statetx.saved_residuals(fun, *args, argnums=0)
    assert found.name.startswith("gradient in ")
    rows = [(r.type, r.nbytes, r.why, r.primitive, r.flops) for r in found]
    assert sorted(rows) == sorted((r.type, r.nbytes, r.why, r.primitive, r.flops) for r in expected)
    assert {"x", "ws[0]"} <= {r.path for r in found}


@pytest.mark.parametrize("policy", ["dots", "everything"])
def test_residuals_of_a_step_under_the_policies_of_its_blocks(policy):
    kept = statetx.remat(block.__wrapped__, policy=policy)
    fun = lambda ws, x: (kept(ws[1], kept(ws[0], x)) ** 2).mean()
    found, expected = (
        statetx.saved_residuals(jax.jit(jax.grad(fun)), WS, X),
        statetx.saved_residuals(fun, WS, X, argnums=0),
    )
    assert [(r.type, r.why) for r in found] == [(r.type, r.why) for r in expected]
    assert any("policy of" in why for r in found for why in r.why)


def test_each_function_that_a_step_differentiates_is_listed_once():
    def step(ws, x):
        halves = [jax.grad(loss)(ws, half) for half in (x[:32], x[32:])]
        penalty = jax.grad(lambda ws: sum(jnp.sin(w).sum() for w in ws))(ws)
        return halves, penalty

    found = statetx.saved_residuals(step, WS, X)
    assert found.name.startswith("2 gradients in ")
    assert sum(r.primitive == "tanh" for r in found) == 0 and sum(r.primitive == "cos" for r in found) == 4


def test_residuals_of_a_jitted_step_of_brainstate_have_the_paths_of_its_states():
    neurons, loss = neurons_and_loss()

    @brainstate.transform.jit
    def step(x):
        return brainstate.transform.grad(loss, neurons.states(brainstate.ParamState))(x)

    before = neurons.v.value
    found = statetx.saved_residuals(step, X)
    assert any(r.origin == "state" and r.path.endswith("neurons.layer.weight['weight']") for r in found)
    assert found.name == "gradient in step" and neurons.v.value is before


def nnx_step():
    nnx = pytest.importorskip("flax.nnx")
    model = nnx.Linear(16, 16, rngs=nnx.Rngs(0))
    step = nnx.jit(lambda model, x: nnx.grad(lambda model: (jnp.tanh(model(x)) ** 2).mean())(model))
    return step, (model, X), "model.kernel"


def brainstate_step():
    neurons, loss = neurons_and_loss()
    step = brainstate.transform.jit(lambda x: brainstate.transform.grad(loss, neurons.states(brainstate.ParamState))(x))
    return step, (X,), "neurons.layer.weight['weight']"


@pytest.mark.parametrize("make", [brainstate_step, nnx_step])
def test_a_profile_of_a_step_that_a_library_has_jitted_names_its_states(make):
    step, args, path = make()
    profile = statetx.memory_profile(step, *args)
    assert any(group.owner.endswith(path) and group.kind == "state" for group in profile.at_peak)
    assert "state_vals" not in str(profile)


TOOLS = [statetx.measure, statetx.memory_report, statetx.memory_profile, statetx.saved_residuals, statetx.loop_report]


@pytest.mark.parametrize("tool", TOOLS)
def test_arrays_in_attributes_of_an_nnx_module_are_left_unchanged(tool):
    """As in flax's example of array leaves: its jit makes inputs of them, and writes them."""
    nnx = pytest.importorskip("flax.nnx")

    class Layer(nnx.Module):
        def __init__(self):
            self.w, self.count = jnp.eye(16), jnp.array(0)

        def __call__(self, x):
            self.count += 1
            return jnp.tanh(x @ self.w)

    @nnx.jit
    def step(layer, x):
        loss = (layer(x) ** 2).mean()
        layer.w -= 0.1
        return loss

    layer = Layer()
    w, count = layer.w, layer.count
    result = tool(step, layer, X)
    assert layer.w is w and layer.count is count
    if tool is statetx.memory_profile:
        assert tool(step, layer, X, gradient=False).argument_bytes >= w.nbytes + X.nbytes and result.gradient
    step(layer, X)
    assert int(layer.count) == 1


@pytest.mark.parametrize("tool", TOOLS)
def test_a_module_with_a_dtype_is_no_array(tool):
    nnx = pytest.importorskip("flax.nnx")
    tool(
        lambda layer, x: (layer(x) ** 2).mean(), nnx.Linear(16, 16, rngs=nnx.Rngs(0)), X
    )  # did raise a StateAccessError


def test_residuals_of_a_rematerialized_jitted_function():
    jitted = jax.jit(lambda x: jnp.sin(jnp.tanh(x)).sum())
    assert statetx.saved_residuals(statetx.remat(jitted), X).intermediate_bytes == 0
    assert statetx.saved_residuals(jitted, X).intermediate_bytes > 0


@pytest.mark.parametrize("tool", [statetx.measure, statetx.memory_profile, statetx.saved_residuals])
def test_a_loss_whose_integrator_linearizes_is_differentiated(tool):
    neurons, loss = neurons_and_loss()
    if tool is statetx.measure:
        assert tool(loss, X) == tool(loss, X, gradient=True) != tool(loss, X, gradient=False)
    elif tool is statetx.memory_profile:
        assert tool(loss, X).gradient
    else:
        assert tool(loss, X).name == "loss"
    assert isinstance(neurons.v.value, jax.Array)


@pytest.mark.thorough
def test_a_loss_whose_integrator_linearizes_is_planned_without_argnums():
    neurons, _ = neurons_and_loss()
    assert not statetx.plan(lambda x: (neurons(x) ** 2).mean(), X, budget="1GiB", time_limit=0).is_step


def test_arrays_that_are_differentiated_and_returned_are_a_step():
    assert statetx.plan(by_vjp_of_arrays, WS, X, budget="1GiB").is_step


@pytest.mark.slow
@pytest.mark.parametrize("way", ["plan", "budget"])
def test_a_planned_step(way):
    """The plan rewrites what the step differentiates: its residuals are those of the plan."""
    ws = WS
    if way == "plan":
        ws = WS[:2]
        plan = statetx.plan(by_jax, ws, X, budget=0.9, of="temporaries")
        planned = plan.apply(by_jax)
    else:
        planned = statetx.budget(0.9)(by_jax)
    assert statetx.measure(planned, ws, X) == statetx.measure(planned, ws, X, gradient=False)
    assert not statetx.memory_profile(planned, ws, X).gradient
    found, unplanned = statetx.saved_residuals(planned, ws, X), statetx.saved_residuals(by_jax, ws, X)
    assert found.name == "gradient in by_jax" and {"x", "ws[1]"} <= {r.path for r in found}
    assert [(r.primitive, r.why) for r in found] != [(r.primitive, r.why) for r in unplanned]


def test_report_of_a_step():
    report = statetx.memory_report(by_jax, WS, X, policies=[None, "everything"])
    assert str(report).startswith("by_jax: training step")
    assert [row.policy for row in report.rows] == ["no remat", "nothing", "everything"]
    assert report.rows[1].residual_bytes < report.rows[2].residual_bytes == report.rows[0].residual_bytes
    assert report.rows[0].flops < report.rows[1].flops == statetx.measure(by_jax, WS, X, gradient=False).flops


def test_report_of_a_step_without_remat_has_one_row():
    report = statetx.memory_report(jax.grad(lambda w, x: (jnp.tanh(x @ w) ** 2).mean()), WS[0], X)
    (row,), (diagnosis,) = report.rows, report.diagnoses
    assert row.policy == "no remat" and diagnosis.category == "nothing is rematerialized"
    assert "as a whole" not in diagnosis.text


@pytest.mark.slow
def test_report_of_a_loss_that_differentiates_a_scalar_itself():
    """A penalty on a gradient: it counts as a step unless it is said to be a loss."""

    def penalized(ws, x):
        return sum((g**2).sum() for g in jax.grad(loss)(ws, x))

    report = statetx.memory_report(penalized, WS, X, gradient=True)
    assert not report.is_step and "value and gradient" in str(report)
    assert report.rows[0].flops < report.rows[1].flops == statetx.measure(penalized, WS, X, gradient=True).flops
    assert statetx.memory_report(penalized, WS, X).is_step
    assert report.rows[0].residuals.name.endswith("penalized")


def test_passes_of_a_step_are_those_of_its_gradient(capsys):
    printed = statetx.print_fwd_bwd(by_jax, WS, X)
    assert printed.name == "gradient in by_jax" and "remat2" in capsys.readouterr().out
