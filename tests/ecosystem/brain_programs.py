"""Small programs of the brainstate family, written once over a table of transforms.

Each uses the layers, optimizers and trainers of braintools, brainpy.state, braincell and braintrace the way their
documentation does; only the transforms come from a table. `THEIRS` holds the transforms of ``brainstate.transform``,
`OURS` the ones of statetx. The tests compare the numbers, ``benchmarks/ecosystem.py`` memory and time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import braincell
import brainevent
import brainpy.state
import brainstate
import braintools
import braintrace
import brainunit as u
import jax
import jax.numpy as jnp
import numpy as np
from braincell import mech
from brainstate import nn

import statetx


class Transforms(NamedTuple):
    """The names that a program takes from its library.

    Attributes:
        value_and_grad: ``(f, states) -> (*args) -> (value, grads)``.
        for_loop: ``(f, *xs) -> ys``; `f` is called with one element of each.
        scan: ``(f, init, xs) -> (carry, ys)``.
    """

    jit: Callable
    value_and_grad: Callable
    for_loop: Callable
    scan: Callable
    vmap: Callable
    cond: Callable
    while_loop: Callable
    remat: Callable


def _brainstate_value_and_grad(f: Callable, states: Any) -> Callable:
    differentiated = brainstate.transform.grad(f, states, return_value=True)
    return lambda *args: differentiated(*args)[::-1]


THEIRS = Transforms(
    jit=brainstate.transform.jit,
    value_and_grad=_brainstate_value_and_grad,
    for_loop=brainstate.transform.for_loop,
    scan=brainstate.transform.scan,
    vmap=brainstate.transform.vmap,
    cond=brainstate.transform.cond,
    while_loop=brainstate.transform.while_loop,
    remat=brainstate.transform.remat,
)
OURS = Transforms(
    jit=statetx.jit,
    value_and_grad=lambda f, states: statetx.value_and_grad(f, wrt=states),
    for_loop=lambda f, *xs: statetx.map(lambda x: f(*x), xs),
    scan=statetx.scan,
    vmap=statetx.vmap,
    cond=statetx.cond,
    while_loop=statetx.while_loop,
    remat=statetx.remat,
)


class Program(NamedTuple):
    """A program that is ready to run.

    Attributes:
        step: one training step or one simulation; returns the values to compare.
        roots: the objects whose states are compared afterwards. Not the states that a jitted step makes: brainstate
            leaves dead tracers in them.
    """

    step: Callable[[], Any]
    roots: tuple[Any, ...]


class Size(NamedTuple):
    """How large a program is made: the tests take the defaults, the benchmark more."""

    steps: int = 12
    batch: int = 4
    hidden: int = 8


def at(i: Any) -> Any:
    """The context of step `i` in a loop, as the family's examples open it."""
    return brainstate.environ.context(i=i, t=i * brainstate.environ.get_dt())


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return braintools.metric.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def rand(*shape: int) -> jax.Array:
    return brainstate.random.rand(*shape)


# -- brainstate.nn and braintools.optim ------------------------------------------------------------------------


def recurrent_classifier(t: Transforms, size: Size) -> Program:
    """Two recurrent layers; their states are made in the jitted step, as the examples do; Adam with a decaying rate."""
    net = nn.Sequential(nn.GRUCell(3, size.hidden), nn.LSTMCell(size.hidden, size.hidden), nn.Linear(size.hidden, 5))
    weights = net.states(brainstate.ParamState)
    rate = braintools.optim.ExponentialDecayLR(0.05, decay_steps=1, decay_rate=0.9)
    optimizer = braintools.optim.Adam(lr=rate)
    optimizer.register_trainable_weights(weights)
    xs, labels = rand(size.steps, size.batch, 3), jnp.arange(size.batch) % 5

    def loss():
        return cross_entropy(t.for_loop(net, xs)[-1], labels)

    @t.jit
    def train():
        nn.init_all_states(net, batch_size=size.batch)
        value, grads = t.value_and_grad(loss, weights)()
        optimizer.update(nn.clip_grad_norm(grads, 1.0))
        return value

    return Program(train, (weights, optimizer))


class LinearRecurrence(nn.Module):
    """A linear recurrent unit: a diagonal complex recurrence over time, as an associative scan; one sequence at a time.

    Source: Orvieto et al., "Resurrecting Recurrent Neural Networks for Long Sequences" (2023), equations 5 to 7.
    """

    def __init__(self, width: int, hidden: int):
        super().__init__()
        radius, phase = jnp.sqrt(0.81 + 0.18 * rand(hidden)), 0.3 * rand(hidden)
        weight = lambda *shape: brainstate.ParamState(brainstate.random.randn(*shape) / shape[-1] ** 0.5)
        self.log_decay = brainstate.ParamState(jnp.log(-jnp.log(radius)))
        self.log_phase = brainstate.ParamState(jnp.log(phase))
        self.log_gain = brainstate.ParamState(0.5 * jnp.log(1 - radius**2))
        self.b_real, self.b_imag = weight(hidden, width), weight(hidden, width)
        self.c_real, self.c_imag = weight(width, hidden), weight(width, hidden)
        self.skip, self.gate = weight(width), nn.Linear(width, 2 * width)
        self.dropout = nn.Dropout(0.8)

    def update(self, x: jax.Array) -> jax.Array:
        decay = jnp.exp(-jnp.exp(self.log_decay.value) + 1j * jnp.exp(self.log_phase.value))
        b = (self.b_real.value + 1j * self.b_imag.value) * jnp.exp(self.log_gain.value)[:, None]
        c = self.c_real.value + 1j * self.c_imag.value
        factors = jnp.broadcast_to(decay, (len(x), *decay.shape))
        combine = lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1])
        _, h = jax.lax.associative_scan(combine, (factors, x @ b.T))
        y = jax.nn.gelu((h @ c.T).real + self.skip.value * x)
        value, gate = jnp.split(self.gate(y), 2, axis=-1)
        return x + self.dropout(value * jax.nn.sigmoid(gate))


def linear_recurrent_unit(t: Transforms, size: Size) -> Program:
    """A classifier of sequences, each with a random key of its own: it is set in the function that `vmap` maps."""
    block = LinearRecurrence(size.hidden, size.hidden)
    net = nn.Sequential(nn.Linear(3, size.hidden), block, nn.LayerNorm(size.hidden), nn.Linear(size.hidden, 5))
    weights = net.states(brainstate.ParamState)
    optimizer = braintools.optim.Adam(lr=0.02)
    optimizer.register_trainable_weights(weights)
    xs, labels = rand(size.batch, size.steps, 3), jnp.arange(size.batch) % 5

    def run(x, key):
        brainstate.random.set_key(key)
        return net(x).mean(0)

    def loss():
        with brainstate.environ.context(fit=True):
            return cross_entropy(t.vmap(run)(xs, brainstate.random.split_key(size.batch)), labels)

    @t.jit
    def train():
        value, grads = t.value_and_grad(loss, weights)()
        optimizer.update(grads)
        return value

    return Program(train, (weights, optimizer, brainstate.random.DEFAULT))


def image_classifier(t: Transforms, size: Size) -> Program:
    """Convolution, batch normalization, dropout; momentum and weight decay, the rate stepped between epochs."""
    net = nn.Sequential(
        nn.Conv2d((8, 8, 1), size.hidden, kernel_size=3),
        nn.BatchNorm2d.desc(),
        nn.ReLU(),
        nn.MaxPool2d.desc(kernel_size=2, stride=2, channel_axis=-1),
        nn.Flatten.desc(),
        nn.Dropout(0.8),
        nn.Linear.desc(out_size=5),
    )
    weights = net.states(brainstate.ParamState)
    schedule = braintools.optim.StepLR(0.1, step_size=1, gamma=0.5)
    optimizer = braintools.optim.Momentum(lr=schedule, momentum=0.9, weight_decay=1e-3)
    optimizer.register_trainable_weights(weights)
    images, labels = rand(size.batch, 8, 8, 1), jnp.arange(size.batch) % 5

    @t.jit
    def train():
        with brainstate.environ.context(fit=True):
            value, grads = t.value_and_grad(lambda: cross_entropy(t.remat(net)(images), labels), weights)()
        optimizer.update(grads)
        return value

    @t.jit
    def evaluate():
        with brainstate.environ.context(fit=False):
            return net(images)

    def step():
        value = train()
        schedule.step_epoch()
        return value, evaluate()

    return Program(step, (net, optimizer))


class _Loss(brainstate.State):
    pass


class _Encoder(nn.Module):
    """Keeps its divergence in a state that each call makes."""

    def __init__(self, size: int):
        super().__init__()
        self.mean, self.scale = nn.Linear(6, size), nn.Linear(6, size)

    def update(self, x):
        mean, scale = self.mean(x), jnp.exp(self.scale(x))
        self.divergence = _Loss(0.5 * jnp.mean(scale**2 + mean**2 - 1.0 - 2.0 * jnp.log(scale)))
        return mean + scale * brainstate.random.normal(size=mean.shape)


def autoencoder(t: Transforms, size: Size) -> Program:
    """A variational autoencoder whose loss reads a state that the forward pass has made."""
    net = nn.Sequential(_Encoder(size.hidden), nn.Linear(size.hidden, 6))
    weights = net.states(brainstate.ParamState)
    optimizer = braintools.optim.AdamW(lr=1e-2)
    optimizer.register_trainable_weights(weights)
    x = rand(size.batch, 6)

    def loss():
        error = braintools.metric.squared_error(net(x), x).mean()
        return error + 0.1 * sum(s.value for s in net.states(_Loss).values())

    @t.jit
    def train():
        value, grads = t.value_and_grad(loss, weights)()
        optimizer.update(grads)
        return value

    return Program(train, (weights, optimizer))


class _Integrator(nn.Module):
    """A recurrent layer whose initial state is trained."""

    def __init__(self, hidden: int):
        super().__init__()
        self.initial = brainstate.ParamState(jnp.zeros(hidden))
        self.cell = nn.Linear(1 + hidden, hidden)
        self.readout = nn.Linear(hidden, 1)

    def init_state(self, batch_size=None, **kwargs):
        self.h = brainstate.HiddenState(
            braintools.init.param(braintools.init.ZeroInit(), self.cell.out_size, batch_size)
        )
        self.h.value = jnp.repeat(self.initial.value[None], batch_size, axis=0)

    def update(self, x):
        self.h.value = nn.relu(self.cell(jnp.concatenate([x, self.h.value], axis=-1)))
        return self.readout(self.h.value)


def integrator(t: Transforms, size: Size) -> Program:
    """A jitted prediction inside the gradient, with states made in it that depend on a parameter."""
    net = _Integrator(size.hidden)
    weights = net.states(brainstate.ParamState)
    optimizer = braintools.optim.RMSprop(lr=1e-4)
    optimizer.register_trainable_weights(weights)

    @t.jit
    def predict(inputs):
        nn.init_all_states(net, batch_size=inputs.shape[1])
        return t.for_loop(net.update, inputs)

    def loss(inputs, targets):
        return braintools.metric.squared_error(predict(inputs), targets).mean()

    @t.jit
    def train(inputs, targets):
        value, grads = t.value_and_grad(loss, weights)(inputs, targets)
        optimizer.update(grads)
        return value

    def step():
        inputs = rand(size.steps, size.batch, 1) - 0.5
        targets = jnp.cumsum(inputs, axis=0)
        return train(inputs, targets), predict(inputs)

    return Program(step, (weights, optimizer))


# -- brainpy.state ---------------------------------------------------------------------------------------------


def _no_current(size: tuple[int, ...]) -> Any:
    return jnp.zeros(size) * u.mA


class _Spiking(nn.Module):
    def __init__(self, hidden: int, surrogate: braintools.surrogate.Surrogate):
        super().__init__()
        self.current = nn.Sequential(
            nn.Linear(10, hidden, w_init=braintools.init.KaimingNormal(40.0, unit=u.mA), b_init=_no_current),
            brainpy.state.Expon(hidden, tau=5.0 * u.ms, g_initializer=braintools.init.Constant(0.0 * u.mA)),
        )
        self.neurons = brainpy.state.LIF(
            hidden,
            tau=20.0 * u.ms,
            V_reset=0.0 * u.mV,
            V_rest=0.0 * u.mV,
            V_th=1.0 * u.mV,
            spk_fun=surrogate,
        )
        self.readout = brainpy.state.LeakyRateReadout(hidden, 2, tau=5.0 * u.ms)

    def update(self, spikes):
        return self.readout(self.neurons(self.current(spikes)))


def _train_spiking(t: Transforms, size: Size, surrogate: Any, remat: bool) -> Program:
    net = _Spiking(size.hidden, surrogate)
    weights = net.states(brainstate.ParamState)
    optimizer = braintools.optim.Adam(lr=1e-2)
    optimizer.register_trainable_weights(weights)
    spikes = (rand(size.steps, size.batch, 10) < 0.5).astype(float)
    labels = jnp.arange(size.batch) % 2
    update = t.remat(net.update) if remat else net.update

    def loss():
        def run(i, x):
            with at(i):
                return update(x)

        return cross_entropy(t.for_loop(run, jnp.arange(size.steps), spikes).mean(0), labels)

    @t.jit
    def train():
        nn.init_all_states(net, batch_size=size.batch)
        value, grads = t.value_and_grad(loss, weights)()
        optimizer.update(grads)
        return value, grads

    return Program(train, (weights, optimizer))


def spiking_classifier(t: Transforms, size: Size) -> Program:
    """Leaky integrate-and-fire neurons trained by a surrogate gradient; currents and voltages have units."""
    return _train_spiking(t, size, braintools.surrogate.ReluGrad(), remat=False)


def spiking_classifier_remat(t: Transforms, size: Size) -> Program:
    """The same with every step rematerialized."""
    return _train_spiking(t, size, braintools.surrogate.Sigmoid(), remat=True)


class _Balanced(nn.Module):
    """Excitatory and inhibitory neurons in balance, sparsely connected, driven by events."""

    def __init__(self, num: int):
        super().__init__()
        self.num_exc = 4 * num // 5
        self.neurons = brainpy.state.LIFRef(
            num,
            V_rest=-60.0 * u.mV,
            V_th=-50.0 * u.mV,
            V_reset=-60.0 * u.mV,
            tau=20.0 * u.ms,
            tau_ref=5.0 * u.ms,
            V_initializer=braintools.init.Normal(-55.0 * u.mV, 2.0 * u.mV),
        )
        self.exc = self._projection(self.num_exc, num, 0.6, 0.0, 5.0)
        self.inh = self._projection(num - self.num_exc, num, 6.7, -80.0, 10.0)

    def _projection(self, pre: int, post: int, weight: float, reversal: float, tau: float) -> Any:
        return brainpy.state.AlignPostProj(
            comm=nn.EventFixedProb(pre, post, conn_num=0.2, conn_weight=weight * u.mS),
            syn=brainpy.state.Expon.desc(post, tau=tau * u.ms),
            out=brainpy.state.COBA.desc(E=reversal * u.mV),
            post=self.neurons,
        )

    def update(self, time, current):
        with brainstate.environ.context(t=time):
            spikes = self.neurons.get_spike() != 0.0
            self.exc(spikes[: self.num_exc])
            self.inh(spikes[self.num_exc :])
            self.neurons(current)
            return self.neurons.get_spike()


def balanced_network(t: Transforms, size: Size) -> Program:
    """Conductance-based synapses; the simulation is a loop in eager code, as in the examples."""
    net = _Balanced(5 * size.hidden)
    nn.init_all_states(net)
    times = u.math.arange(size.steps * 5) * brainstate.environ.get_dt()
    return Program(lambda: t.for_loop(lambda time: net.update(time, 25.0 * u.mA), times), (net,))


class _Delayed(nn.Module):
    """Neurons that receive their own spikes some steps later, and a synapse whose efficacy varies."""

    def __init__(self, num: int):
        super().__init__()
        self.neurons = brainpy.state.ALIF(num, tau=10.0 * u.ms, tau_a=50.0 * u.ms, V_th=0.3 * u.mV, R=1.0 * u.ohm)
        self.delay = nn.Delay(jax.ShapeDtypeStruct((num,), jnp.float32), 5.0 * u.ms)
        self.delay.register_entry("late", 3.0 * u.ms)
        self.plasticity = brainpy.state.STP(num)
        self.weights = nn.Linear(num, num, w_init=braintools.init.Normal(0.0 * u.mA, 0.3 * u.mA), b_init=_no_current)

    def update(self, i, current):
        with at(i):
            late = self.delay.at("late")
            spikes = self.neurons(current * u.mA + self.weights(self.plasticity(late)))
            self.delay.update(spikes)
            return spikes, self.neurons.V.value


def delayed_network(t: Transforms, size: Size) -> Program:
    """A delay line and short-term plasticity; poisson input is drawn in each step of the loop."""
    net = _Delayed(size.hidden)
    nn.init_all_states(net)

    def run(i):
        return net.update(i, brainstate.random.poisson(0.5, (size.hidden,)).astype(jnp.float32))

    @t.jit
    def simulate():
        return t.for_loop(run, jnp.arange(size.steps * 4))

    return Program(simulate, (net,))


# -- braincell -------------------------------------------------------------------------------------------------


class _HodgkinHuxley(braincell.SingleCompartment):
    def __init__(self, size: Any, g_na: Any = 120.0 * u.mS / u.cm**2, solver: str = "ind_exp_euler"):
        super().__init__(size, solver=solver, V_initializer=braintools.init.Constant(-65.0 * u.mV))
        self.na = braincell.ion.SodiumFixed(size, E=50.0 * u.mV)
        self.na.add(INa=braincell.channel.Na_HH1952(size, g_max=g_na))
        self.k = braincell.ion.PotassiumFixed(size, E=-77.0 * u.mV)
        self.k.add(IK=braincell.channel.K_HH1952(size))
        self.leak = braincell.channel.IL(size, E=-54.387 * u.mV, g_max=0.03 * (u.mS / u.cm**2))


def hodgkin_huxley(t: Transforms, size: Size) -> Program:
    """A cell simulated in eager code."""
    cell = _HodgkinHuxley(3)
    cell.init_state()

    def run(i):
        with at(i):
            return cell.update(jnp.arange(1.0, 4.0) * 5.0 * u.uA / u.cm**2), cell.V.value

    return Program(lambda: t.for_loop(run, np.arange(size.steps * 4)), (cell,))


def fitted_cell(t: Transforms, size: Size) -> Program:
    """A conductance fitted by gradient descent; the cell is built in the loss, under vmap over several starts."""
    conductance = brainstate.ParamState(jnp.linspace(90.0, 150.0, size.batch) * (u.mS / u.cm**2))
    target = -65.0 + 20.0 * rand(size.batch, 4 * size.steps)

    def simulate(g_na):
        cell = _HodgkinHuxley(1, g_na, solver="rk4")
        cell.init_state()
        cell.reset_state()

        def run(i):
            with at(i):
                cell.update(20.0 * u.uA / u.cm**2)
            return cell.V.value[0]

        return t.for_loop(run, np.arange(4 * size.steps))

    def loss():
        voltages = t.vmap(simulate)(conductance.value)
        return braintools.metric.squared_error(voltages.to_decimal(u.mV), target).mean()

    @t.jit
    def train():
        value, grads = t.value_and_grad(loss, {"g": conductance})()
        conductance.value = jax.tree.map(lambda g, d: g - d, conductance.value, grads["g"])
        return value, grads

    return Program(train, (conductance,))


def _two_compartments() -> Any:
    soma = braincell.Branch.from_lengths(lengths=[20.0] * u.um, radii=[10.0, 10.0] * u.um, type="soma")
    dendrite = braincell.Branch.from_lengths(lengths=[50.0] * u.um, radii=[2.0, 1.0] * u.um, type="dendrite")
    tree = braincell.Morphology.from_root(soma, name="soma")
    tree.soma.dendrite = dendrite
    cell = braincell.Cell(tree, cv_policy=braincell.CVPerBranch())
    everywhere, middle = braincell.filter.AllRegion(), braincell.filter.RootLocation(0.5)
    cell.paint(everywhere, mech.Channel("IL", g_max=0.3 * u.mS / u.cm**2, E=-54.0 * u.mV))
    cell.place(middle, mech.CurrentClamp(delay=[0.0] * u.ms, durations=[50.0] * u.ms, amplitudes=[0.02] * u.nA))
    cell.init_state()
    return cell


def fitted_compartments(t: Transforms, size: Size) -> Program:
    """The initial voltages of a cell of two compartments, fitted to a trace by gradient descent."""
    cell = _two_compartments()
    initial = brainstate.ParamState(cell.V.value + jnp.array([5.0, -5.0]) * u.mV)
    optimizer = braintools.optim.SGD(lr=0.5)
    optimizer.register_trainable_weights({"initial": initial})
    target = jnp.linspace(-62.0, -58.0, size.steps)

    def run(i):
        with at(i):
            cell.update()
        return cell.V.value

    def loss():
        cell.V.value = initial.value
        voltages = t.for_loop(run, jnp.arange(size.steps)).to_decimal(u.mV)
        return braintools.metric.squared_error(voltages[..., 0].reshape(-1), target).mean()

    @t.jit
    def train():
        value, grads = t.value_and_grad(loss, {"initial": initial})()
        optimizer.update(grads)
        return value, grads

    return Program(train, (cell, initial, optimizer))


# -- braintrace ------------------------------------------------------------------------------------------------


class _Traced(nn.Module):
    def __init__(self, hidden: int):
        super().__init__()
        self.cell = braintrace.nn.GRUCell(3, hidden)
        self.readout = braintrace.nn.Linear(hidden, 5)

    def update(self, x):
        return self.readout(self.cell(x))


class _Task(NamedTuple):
    net: Any
    weights: Any
    optimizer: Any
    xs: jax.Array
    labels: jax.Array

    @classmethod
    def make(cls, size: Size) -> _Task:
        net = _Traced(size.hidden)
        weights = net.states(brainstate.ParamState)
        optimizer = braintools.optim.Adam(lr=1e-2)
        optimizer.register_trainable_weights(weights)
        labels = jnp.arange(size.steps * size.batch).reshape(size.steps, size.batch) % 5
        return cls(net, weights, optimizer, rand(size.steps, size.batch, 3), labels)


def trained_through_time(t: Transforms, size: Size) -> Program:
    """braintrace's trainer with back-propagation through time: states made under vmap in the jitted step."""
    task = _Task.make(size)

    @t.jit
    def train(xs, labels):
        @brainstate.transform.vmap_new_states(state_tag="new", axis_size=size.batch)
        def init():
            nn.init_all_states(task.net)

        init()
        model = nn.Vmap(task.net, vmap_states="new")
        warmup = size.steps // 3

        def loss():
            t.for_loop(model, xs[:warmup])
            return t.for_loop(lambda x, y: cross_entropy(model(x), y), xs[warmup:], labels[warmup:]).mean()

        value, grads = t.value_and_grad(loss, task.weights)()
        task.optimizer.update(grads)
        return value

    return Program(lambda: train(task.xs, task.labels), (task.weights, task.optimizer))


def trained_online(t: Transforms, size: Size) -> Program:
    """braintrace's driver of D-RTRL, compiled in the jitted step."""
    task = _Task.make(size)

    @t.jit
    def train(xs, labels):
        model = braintrace.compile(task.net, braintrace.D_RTRL, xs[0], batch_size=size.batch, vmap=True)
        step = lambda x, y: cross_entropy(model(x), y)
        grads, losses = model.etrace_grad(xs, labels, step_fn=step, reduction="mean", return_value=True)
        task.optimizer.update(grads)
        return losses

    return Program(lambda: train(task.xs, task.labels), (task.weights, task.optimizer))


def trained_online_by_hand(t: Transforms, size: Size) -> Program:
    """ES-D-RTRL with gradients accumulated by a scan; the learner is compiled once, before the steps."""
    task = _Task.make(size)
    model = braintrace.compile(task.net, braintrace.ES_D_RTRL, task.xs[0], batch_size=size.batch, decay_or_rank=0.9)

    def accumulate(grads, x):
        value, new = t.value_and_grad(lambda: cross_entropy(model(x[0]), x[1]), task.weights)()
        return jax.tree.map(jnp.add, grads, new), value

    @t.jit
    def train(xs, labels):
        zeros = {k: jax.tree.map(jnp.zeros_like, w.value) for k, w in task.weights.items()}
        grads, losses = t.scan(accumulate, zeros, (xs, labels))
        task.optimizer.update(grads)
        return losses

    return Program(lambda: train(task.xs, task.labels), (task.weights, task.optimizer))


PROGRAMS: dict[str, Callable[[Transforms, Size], Program]] = {
    f.__name__: f
    for f in (
        recurrent_classifier,
        linear_recurrent_unit,
        image_classifier,
        autoencoder,
        integrator,
        spiking_classifier,
        spiking_classifier_remat,
        balanced_network,
        delayed_network,
        hodgkin_huxley,
        fitted_cell,
        fitted_compartments,
        trained_through_time,
        trained_online,
        trained_online_by_hand,
    )
}
CELLS = {"hodgkin_huxley", "fitted_cell", "fitted_compartments"}


def start(name: str, transforms: Transforms, size: Size = Size()) -> Program:  # noqa: B008
    """Build a program; the same name and size give the same weights and draws."""
    brainevent.config.set_backend("cpu", "jax_raw")  # the other one needs numba
    brainstate.random.seed(0)
    dt = 0.05 * u.ms if name in CELLS else 1.0 * u.ms
    with brainstate.environ.context(dt=dt):
        program = PROGRAMS[name](transforms, size)

    def step():
        with brainstate.environ.context(dt=dt):
            return program.step()

    return program._replace(step=step)


def values(*roots: Any) -> list[Any]:
    """The values of every state reachable from some objects, in the order of the search."""
    return [state.value for root in roots for state in statetx.states(root).values()]
