"""Functions that only inspect a step accept one that creates states, such as brainstate's ``init_all_states`` in a training step."""

import dataclasses
import functools
import itertools
import warnings

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import statetx
from statetx.memory._estimate import estimate

X = jnp.ones((4, 8))
KINDS = {"statetx": statetx.State, "brainstate": brainstate.HiddenState, "nnx": nnx.Variable}
each_kind = pytest.mark.parametrize("kind", KINDS)


class Cell:
    """A hidden state that each call of `loss` creates."""

    def __init__(self, kind):
        self.make = KINDS[kind]
        self.w = statetx.Param(jnp.eye(8) / 2, name="w")

    def loss(self, x):
        self.h = self.make(jnp.zeros_like(x))

        def body(carry, x):
            set_value(self.h, jnp.sin(jnp.tanh(get_value(self.h) @ self.w.value + x)))
            return carry, get_value(self.h)

        return (statetx.scan(body, None, jnp.broadcast_to(x, (20, *x.shape)))[1] ** 2).mean()

    def step(self, x):
        loss, grad = statetx.value_and_grad(self.loss, wrt=self.w)(x)
        self.w.value -= 0.1 * grad
        return loss


def get_value(state):
    return state.get_value() if isinstance(state, nnx.Variable) else state.value


def set_value(state, value):
    state.set_value(value) if isinstance(state, nnx.Variable) else setattr(state, "value", value)


INSPECTIONS = {
    "measure": statetx.measure,
    "memory_report": statetx.memory_report,
    "memory_profile": statetx.memory_profile,
    "explain_oom": statetx.explain_oom,
    "saved_residuals": statetx.saved_residuals,
    "trace_states": lambda loss, x: statetx.trace_states(loss)(x),
    "loop_report": statetx.loop_report,
    "max_batch": lambda loss, x: statetx.max_batch(loss, x, budget="64KiB"),
    "plan": lambda loss, x: statetx.plan(loss, x, budget=1.0),
}


each_inspection = pytest.mark.parametrize("inspect", INSPECTIONS)


@each_inspection
@pytest.mark.parametrize(
    ("kind", "is_jitted"),
    [*((kind, True) for kind in KINDS), *(pytest.param(kind, False, marks=pytest.mark.slow) for kind in KINDS)],
)
def test_inspection_accepts_a_created_state_and_leaves_the_attribute_as_it_was(kind, inspect, is_jitted):
    cell, reference = Cell(kind), Cell(kind)
    loss = statetx.jit(cell.loss) if is_jitted else cell.loss
    INSPECTIONS[inspect](loss, X)
    assert not hasattr(cell, "h")
    for _ in range(2):
        np.testing.assert_allclose(loss(X), reference.loss(X), rtol=1e-6)
        np.testing.assert_allclose(get_value(cell.h), get_value(reference.h), rtol=1e-6)
    h = cell.h
    INSPECTIONS[inspect](loss, X)
    assert cell.h is h
    np.testing.assert_allclose(get_value(cell.h), get_value(reference.h), rtol=1e-6)
    np.testing.assert_allclose(loss(X + 1), reference.loss(X + 1), rtol=1e-6)


class Lazy:
    """Creates its state at the first call, in a container of a new layer."""

    def __init__(self):
        self.layer = None

    def __call__(self, x):
        if self.layer is None:
            self.layer = Cell("statetx")
            self.layer.states = {"n": [statetx.State(jnp.zeros(()))]}
        self.layer.states["n"][0].value += 1
        return (jnp.sin(jnp.tanh(x @ self.layer.w.value)) ** 2).mean() * self.layer.states["n"][0].value


@each_inspection
def test_state_that_is_created_once_counts_from_the_first_real_call(inspect):
    lazy = Lazy()
    INSPECTIONS[inspect](lazy, X)
    assert lazy.layer is None
    first = lazy(X)
    INSPECTIONS[inspect](lazy, X)
    np.testing.assert_allclose([first, lazy(X)], [first, 2 * first], rtol=1e-6)


@each_kind
def test_value_of_a_created_state_is_an_output(kind):
    cell = Cell(kind)
    jitted = statetx.jit(Cell(kind).step).lower(X).compile().memory_analysis()
    cost = statetx.measure(cell.step, X, gradient=False)
    assert cost.output_bytes == jitted.output_size_in_bytes
    assert cost.output_bytes >= X.nbytes + cell.w.value.nbytes + 4  # h, w and the loss
    assert statetx.measure(cell.loss, X).output_bytes >= 2 * X.nbytes + cell.w.value.nbytes + 4  # and the gradient of x


def test_estimate_without_the_compiler_counts_a_created_state():
    outputs = [b for b in estimate(Cell("statetx").loss, (X,), {}).buffers if b.kind == "output"]
    assert sum(b.num_bytes for b in outputs) == X.nbytes + 4


class Recurrent(brainstate.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = brainstate.ParamState(jnp.eye(8) / 2)

    def init_state(self, batch_size=None, **kwargs):
        self.h = brainstate.HiddenState(jnp.zeros((batch_size, 8)))

    def update(self, x):
        self.h.value = jnp.sin(jnp.tanh(self.h.value @ self.w.value + x))
        return self.h.value


def training_step():
    """The idiom of brainstate's tutorials."""
    net = Recurrent()
    weights = net.states(brainstate.ParamState)

    def loss():
        brainstate.nn.init_all_states(net, batch_size=4)
        return (brainstate.transform.for_loop(net, jnp.broadcast_to(X, (20, 4, 8))) ** 2).mean()

    def step():
        grads, value = brainstate.transform.grad(loss, weights, return_value=True)()
        for name, grad in grads.items():
            weights[name].value -= 0.1 * grad
        return value

    return step


JITS = {"brainstate": brainstate.transform.jit, "statetx": statetx.jit, "plain": lambda step: step}


@pytest.mark.parametrize(
    ("planned", "jit"),
    [
        pytest.param(*pair, marks=() if len(set(pair)) == 1 else pytest.mark.slow)
        for pair in itertools.product(JITS, repeat=2)
    ],
)
def test_plan_applies_to_a_step_with_init_all_states_inside(planned, jit):
    reference = training_step()
    expected = [reference() for _ in range(3)]
    plan = statetx.plan(JITS[planned](training_step()), budget=0.95)
    assert plan.temp_bytes < plan.unplanned_bytes
    for step in (plan.apply(JITS[jit](training_step())), JITS[jit](plan.apply(training_step()))):
        np.testing.assert_allclose([step() for _ in range(3)], expected, rtol=1e-5)


@each_kind
def test_plan_of_a_loss_applies_to_its_gradient(kind):
    cell, reference = Cell(kind), Cell(kind)
    plan = statetx.plan(cell.loss, X, budget=0.9)
    grads = statetx.grad(plan.apply(cell.loss), wrt=cell.w)(X)
    np.testing.assert_allclose(grads, statetx.grad(reference.loss, wrt=reference.w)(X), rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(get_value(cell.h), get_value(reference.h), rtol=1e-6)


def test_max_batch_of_a_state_with_an_axis_and_a_created_one():
    h = statetx.State(jnp.zeros((4, 8)), name="h")
    kept = []

    def loss(x):
        kept[:] = [statetx.State(x @ x.T)]
        h.value = jnp.tanh(h.value + x)
        return (h.value**2).sum() + kept[0].value.sum()

    fit = statetx.max_batch(loss, X, budget="64KiB", states={"h": 0})
    assert fit.total_bytes <= 2**16 < fit.next_bytes


def test_make_jaxpr_refuses_a_created_state_and_does_not_speak_of_loops():
    with pytest.raises(statetx.CreatedStateError) as error:
        statetx.make_jaxpr(Cell("statetx").loss)(X)
    assert "inside make_jaxpr(Cell.loss)" in str(error.value) and "loop" not in str(error.value)


@each_kind
def test_reports_of_a_jitted_step_warn_of_nothing(kind):
    """They stage the step many times, each in a trace of its own, and training stages it once."""
    cell, stagings = Cell(kind), []

    @statetx.jit
    def step(x):
        stagings.append(0)
        return cell.step(x)

    with warnings.catch_warnings():
        warnings.simplefilter("error", statetx.StagingWarning)
        statetx.memory_report(step, X)
        statetx.explain_oom(step, X)
        for _ in range(3):
            step(X)
        stagings.clear()
        step(X)
    assert not stagings


# -- derivative rules that are Python ----------------------------------------------------------------------------------


def with_rule(forward, backward=lambda x: None):
    """A sine whose derivative rules first call `forward` and `backward`."""

    @jax.custom_vjp
    def sine(x):
        return jnp.sin(x)

    def rule(x):
        forward(x)
        return jnp.sin(x), x

    def transposed_rule(x, ct):
        backward(x)
        return (ct * jnp.cos(x),)

    sine.defvjp(rule, transposed_rule)
    return sine


def planned(loss, x):
    return statetx.plan(loss, x, of="temporaries", budget=10**6).lower_bound.bytes_at(0.1)


def printed(loss, x):
    return str(statetx.saved_residuals(statetx.remat(loss, policy="everything"), x)), statetx.print_fwd_bwd(loss, x)


@pytest.mark.parametrize("inspect", [planned, printed, statetx.saved_residuals, statetx.loop_report])
@pytest.mark.parametrize("is_backward", [False, True])
def test_writes_of_derivative_rules_are_undone(inspect, is_backward):
    """Rules of braintrace write states, past the setter that statetx watches, and expect that the call ends as that of a jitted function."""
    state = brainstate.ParamState(jnp.zeros(8))
    before = state.value
    write = lambda x: state.restore_value(x[0])  # noqa: E731
    sine = with_rule(lambda x: None, write) if is_backward else with_rule(write)
    inspect(lambda x: (sine(x) ** 2).sum(), X)
    assert state.value is before


@pytest.mark.parametrize("inspect", ["saved_residuals", "memory_report", "loop_report", "plan"])
def test_derivative_rules_that_read_what_the_call_has_set_are_named(inspect):
    class Model:
        pass

    def step(x):
        model = Model()
        model.h = x
        value = (with_rule(lambda x: model.h)(x) ** 2).sum()
        del model.h
        return value

    with pytest.raises(AttributeError, match="no attribute 'h'") as error:
        INSPECTIONS[inspect](step, X)
    (note,) = (n for n in error.value.__notes__ if "derivative rule" in n)
    assert "test_inspected.py:" in note and "\nFix: " in note


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Net:
    """As a module of equinox, whose sizes are leaves of the tree."""

    w: jax.Array
    size: int

    def loss(self, x):
        def body(h, x):
            return jnp.tanh((h + x) @ self.w), None

        return statetx.scan(body, jnp.zeros(self.size), x, checkpoint=2)[0].sum()

    def step(self, x):
        return self.w - jax.grad(lambda w: Net(w, self.size).loss(x))(self.w)


@pytest.mark.parametrize("fun", [Net.loss, Net.step])
@pytest.mark.parametrize(
    "inspect",
    [
        statetx.measure,
        statetx.memory_profile,
        lambda fun, *args: estimate(fun, args, {}).buffers,
        statetx.memory_report,
        statetx.loop_report,
        statetx.saved_residuals,
        statetx.explain_oom,
        functools.partial(statetx.plan, budget=1.0),
    ],
)
def test_a_number_in_a_module_may_be_a_shape(inspect, fun):
    assert str(inspect(fun, Net(jnp.eye(8) / 2, 8), X))
