"""Programs of the brainstate family whose step creates states or a learner, as the examples of braintrace do in each
batch.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import brainpy.state
import brainstate
import braintools
import braintrace
import brainunit as u
import jax
import jax.numpy as jnp
from brainstate import nn

from brain_programs import (
    THEIRS,
    Program,
    Size,
    Transforms,
    _HodgkinHuxley,
    _Spiking,
    _Task,
    at,
    cross_entropy,
    rand,
)


def _batches(size: Size) -> Callable[[], jax.Array]:
    """A function that returns another batch in each call."""
    batches = iter([rand(size.steps, size.batch, 3) for _ in range(6)])
    return lambda: next(batches)


class _Recurrent(nn.Module):
    def __init__(self, hidden: int):
        super().__init__()
        self.cell = nn.GRUCell(3, hidden)
        self.dropout = nn.Dropout(0.9)
        self.readout = nn.Linear(hidden, 5)

    def update(self, x):
        return self.readout(self.dropout(self.cell(x)))


def initialized_in_the_step(t: Transforms, size: Size) -> Program:
    """`init_all_states` for each batch, with dropout; back-propagation through time."""
    net, batch = _Recurrent(size.hidden), _batches(size)
    weights = net.states(brainstate.ParamState)

    @t.jit
    def train(xs):
        with brainstate.environ.context(fit=True):
            nn.init_all_states(net, batch_size=size.batch)
            loss, grads = t.value_and_grad(lambda: jnp.mean(t.for_loop(net, xs) ** 2), weights)()
        for key, weight in weights.items():
            weight.value = jax.tree.map(lambda w, g: w - 0.1 * g, weight.value, grads[key])
        return loss

    return Program(lambda: train(batch()), (net,))


def mapped_by_vmap_new_states(t: Transforms, size: Size) -> Program:
    """States of one example each, made under vmap."""
    task, batch = _Task.make(size), _batches(size)

    @t.jit
    def train(xs):
        @brainstate.transform.vmap_new_states(state_tag="new", axis_size=size.batch)
        def init():
            nn.init_all_states(task.net)

        init()
        model = nn.Vmap(task.net, vmap_states="new")
        loss, grads = t.value_and_grad(lambda: jnp.mean(t.for_loop(model, xs) ** 2), task.weights)()
        task.optimizer.update(grads)
        return loss

    return Program(lambda: train(batch()), (task.net, task.optimizer))


def mapped_by_nn_map(t: Transforms, size: Size) -> Program:
    """`nn.Map`, made in the step and kept in an attribute of the model."""
    net, batch = nn.GRUCell(3, size.hidden), _batches(size)

    @t.jit
    def run(xs):
        net.mapped = nn.Map(net, init_map_size=size.batch)
        net.mapped.init_all_states()
        return t.for_loop(net.mapped, xs)

    return Program(lambda: run(batch()), (net,))


def optimizer_made_in_the_step(t: Transforms, size: Size) -> Program:
    """A few steps of a new optimizer in each call, which start from the weights of the last one."""
    weight, batch = brainstate.ParamState(jnp.linspace(-1.0, 1.0, 3)), _batches(size)

    @t.jit
    def fit(xs):
        optimizer = braintools.optim.Adam(lr=braintools.optim.StepLR(0.1, step_size=2))
        optimizer.register_trainable_weights({"w": weight})

        def step(x):
            loss, grads = t.value_and_grad(lambda: jnp.mean((x @ weight.value - 1.0) ** 2), {"w": weight})()
            optimizer.update(grads)
            optimizer.lr.step_epoch()
            return loss

        return t.for_loop(step, xs)

    return Program(lambda: fit(batch()), (weight,))


def spiking_simulation(t: Transforms, size: Size) -> Program:
    """Neurons of brainpy.state, initialized in each run; a random initial voltage."""
    net = _Spiking(size.hidden, braintools.surrogate.ReluGrad())
    net.neurons.V_initializer = braintools.init.Normal(0.5 * u.mV, 0.1 * u.mV)

    @t.jit
    def run(rate):
        nn.init_all_states(net, batch_size=size.batch)

        def step(i):
            with at(i):
                return net((brainstate.random.rand(size.batch, 10) < rate).astype(float))

        return t.for_loop(step, jnp.arange(size.steps))

    rates = iter([0.3, 0.5, 0.7, 0.9])
    return Program(lambda: run(next(rates)), (net,))


def delay_line(t: Transforms, size: Size) -> Program:
    """A delay whose buffer is made in the step."""
    neurons = brainpy.state.LIF(size.hidden, tau=10.0 * u.ms, V_th=0.3 * u.mV, R=1.0 * u.ohm)
    delay = nn.Delay(jax.ShapeDtypeStruct((size.hidden,), jnp.float32), 5.0 * u.ms)
    delay.register_entry("late", 3.0 * u.ms)

    @t.jit
    def run(current):
        nn.init_all_states((neurons, delay))

        def step(i):
            with at(i):
                delay.update(neurons((current + 0.1 * delay.at("late")) * u.mA))
                return neurons.V.value.to_decimal(u.mV)

        return t.for_loop(step, jnp.arange(size.steps))

    currents = iter([0.4, 0.8, 1.2, 1.6])
    return Program(lambda: run(next(currents)), (neurons, delay))


def cell_initialized_in_the_run(t: Transforms, size: Size) -> Program:
    """braincell: voltages and gates of a cell are made in each run."""
    cell = _HodgkinHuxley(3)

    @t.jit
    def run(current):
        cell.init_state()

        def step(i):
            with at(i):
                cell.update(current * u.uA / u.cm**2)
                return cell.V.value.to_decimal(u.mV)

        return t.for_loop(step, jnp.arange(size.steps))

    currents = iter([0.0, 5.0, 10.0, 15.0])
    return Program(lambda: run(next(currents)), (cell,))


def _compiled(algorithm: str, is_kept: bool = False, **options: Any) -> Callable[[Transforms, Size], Program]:
    """A learner that `braintrace.compile` makes in the step: a prefix that runs freely, then gradients online."""

    def make(t: Transforms, size: Size) -> Program:
        task, batch, kept = _Task.make(size), _batches(size), SimpleNamespace()

        @t.jit
        def train(xs):
            model = braintrace.compile(task.net, algorithm, xs[0], batch_size=size.batch, **options)
            if is_kept:
                kept.learner = model
            model.etrace_evolve(xs[:4])
            step = lambda x, y: cross_entropy(model(x), y)
            grads, losses = model.etrace_grad(xs[4:], task.labels[4:], step_fn=step, return_value=True)
            task.optimizer.update(grads)
            return losses

        return Program(lambda: train(batch()), (task.net, task.optimizer, kept))

    return make


def _mapped(algorithm: str, is_multi_step: bool = False, **options: Any) -> Callable[[Transforms, Size], Program]:
    """A learner whose graph is compiled under `vmap_new_states`, run freely and then differentiated in a scan."""
    if is_multi_step:
        options["vjp_method"] = "multi-step"

    def make(t: Transforms, size: Size) -> Program:
        task, batch = _Task.make(size), _batches(size)

        @t.jit
        def train(xs):
            learner = getattr(braintrace, algorithm)(task.net, **options)

            @brainstate.transform.vmap_new_states(state_tag="new", axis_size=size.batch)
            def init():
                nn.init_all_states(task.net)
                learner.compile_graph(xs[0, 0])

            init()
            model = nn.Vmap(learner, vmap_states="new")

            def accumulate(grads, x):
                # brainstate's: the learner's derivative rule looks at the shapes of states, which are those of one
                # example there.
                loss, new = THEIRS.value_and_grad(lambda: cross_entropy(model(x[0]), x[1]), task.weights)()
                return jax.tree.map(jnp.add, grads, new), loss

            t.for_loop(model, xs[:4])
            zeros = {k: jax.tree.map(jnp.zeros_like, w.value) for k, w in task.weights.items()}
            grads, losses = t.scan(accumulate, zeros, (xs[4:], task.labels[4:]))
            task.optimizer.update(grads)
            return losses

        return Program(lambda: train(batch()), (task.net, task.optimizer))

    return make


PROGRAMS: dict[str, Callable[[Transforms, Size], Program]] = {
    "init_all_states": initialized_in_the_step,
    "vmap_new_states": mapped_by_vmap_new_states,
    "nn.Map": mapped_by_nn_map,
    "optimizer": optimizer_made_in_the_step,
    "spiking": spiking_simulation,
    "delay": delay_line,
    "braincell": cell_initialized_in_the_run,
    "D_RTRL": _compiled("D_RTRL"),
    "D_RTRL, vmap": _compiled("D_RTRL", vmap=True),
    "D_RTRL, kept": _compiled("D_RTRL", is_kept=True),
    "D_RTRL, multi-step": _compiled("D_RTRL", vjp_method="multi-step"),
    "ES_D_RTRL": _compiled("ES_D_RTRL", decay_or_rank=0.9),
    "pp_prop": _compiled("pp_prop", decay_or_rank=0.9),
    "D_RTRL, by hand": _mapped("D_RTRL"),
    "ES_D_RTRL, by hand": _mapped("ES_D_RTRL", decay_or_rank=0.9),
    "pp_prop, by hand, multi-step": _mapped("pp_prop", is_multi_step=True, decay_or_rank=0.9),
}
CELLS = {"braincell"}


def start(name: str, transforms: Transforms) -> Program:
    """Build a program; the same name gives the same weights and draws."""
    brainstate.random.seed(0)
    dt = 0.05 * u.ms if name in CELLS else 1.0 * u.ms
    with brainstate.environ.context(dt=dt):
        program = PROGRAMS[name](transforms, Size(steps=8, batch=2, hidden=4))

    def step():
        with brainstate.environ.context(dt=dt):
            return program.step()

    return program._replace(step=step)
