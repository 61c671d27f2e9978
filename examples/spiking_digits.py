"""Train spiking neurons to read digits row by row, by backpropagation through thousands of time steps.

Each image of scikit-learn's digits becomes a stream of events: its rows pass eight sensors, one after the other, and a
sensor fires at random, more often where the pixel is brighter. Leaky integrate-and-fire neurons receive the events. The
class is read from slow traces of their spikes after the last step, so the first row has to be remembered for seven
eighths of the time. Spikes have the derivative of a fast sigmoid.

Membranes and traces are states of brainstate, the sensors draw from a `statetx.RngState` in every step, and the loop
is a `statetx.scan` that stores the states of a given number of steps (``checkpoint=Slots(n)``). Steps that run again
for the gradient draw the same events. Expect an accuracy above 80% on unseen digits, and a gradient that needs a small
part of the memory of a plain loop. The measured memory over the number of steps shows that this part shrinks as loops
grow.
"""

from _common import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    between,
    legend_below,
    make_parser,
    parse,
    plot_losses,
    run,
    show_bytes,
    show_seconds,
    tidy,
    train,
)


def make_options():
    """Describe the options."""
    parser = make_parser(__doc__, "spiking_digits")
    add = parser.add_argument
    add("--updates", type=between(int), default=400, help="training steps")
    add("--steps", type=between(int, 15), default=2048, help="time steps in which an image passes")
    add("--neurons", type=between(int), default=128, help="spiking neurons")
    add("--batch", type=between(int, 0, 361), default=64, help="images in a batch")
    add("--slots", type=between(int), default=64, help="time steps whose states are stored")
    add("--lr", type=between(float), default=0.02, help="first learning rate of Adam, which falls to zero")
    return parser


if __name__ == "__main__":  # before the large imports, so that --help and mistakes are answered at once
    parser = make_options()
    options = parse(parser, seconds=22, updates=10, steps=64, neurons=16, batch=32, slots=8)

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import statetx


@jax.custom_jvp
def spike(x):
    """Return 1 where x is above zero, else 0; the derivative is 1 / (1 + 5 |x|)^2."""
    return (x > 0).astype(x.dtype)


@spike.defjvp
def spike_jvp(primals, tangents):
    (x,), (t,) = primals, tangents
    return spike(x), t / (1 + 5 * jnp.abs(x)) ** 2


class Reader(brainstate.nn.Module):
    """Eight sensors, spiking neurons with many time constants, and a linear readout of their traces."""

    def __init__(self, neurons, steps, batch, seed, checkpoint):
        super().__init__()
        self.steps, self.checkpoint = steps, checkpoint
        self.events = statetx.RngState(seed)
        self.sensors = brainstate.nn.Linear(8, neurons)
        self.readout = brainstate.nn.Linear(neurons, 10)
        order = np.random.default_rng(seed).permutation(neurons)  # any membrane may have any trace
        self.keep_membrane = np.exp(-1 / np.geomspace(steps / 400, steps / 4, neurons, dtype=np.float32))
        self.keep_trace = np.exp(-1 / np.geomspace(steps / 32, steps, neurons, dtype=np.float32))[order]
        self.membrane = brainstate.HiddenState(jnp.zeros((batch, neurons)))
        self.trace = brainstate.HiddenState(jnp.zeros((batch, neurons)))

    def step(self, time, images):
        """Run one time step on images [batch, 8, 8]; return the next time, and the first image's events and spikes."""
        row = jax.lax.dynamic_index_in_dim(images, time * 8 // self.steps, axis=1, keepdims=False)
        probability = row * min(1, 400 / self.steps)
        events = jax.random.bernoulli(self.events.next(), probability).astype(row.dtype)
        a, b = self.keep_membrane, self.keep_trace
        membrane = a * self.membrane.value + 20 * (1 - a) * self.sensors(events)
        spikes = spike(membrane - 1)
        self.membrane.value = membrane - jax.lax.stop_gradient(spikes)
        self.trace.value = b * self.trace.value + 10 * (1 - b) * spikes
        return time + 1, (events[0], spikes[0])

    def __call__(self, images):
        """Return logits [batch, 10], and the events and spikes of the first image [steps, ...]."""
        shape = (len(images), len(self.keep_trace))
        self.membrane.value = self.trace.value = jnp.zeros(shape)
        step = lambda time, _: self.step(time, images)
        _, raster = statetx.scan(step, 0, None, self.steps, checkpoint=self.checkpoint)
        return self.readout(self.trace.value), raster

    def loss(self, images, labels):
        logits, _ = self(images)
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels))


def build(options, steps, checkpoint):
    """Return a model made from the seed, and its training step."""
    brainstate.random.seed(options.seed)
    model = Reader(options.neurons, steps, options.batch, options.seed, checkpoint)
    adam = optax.adam(optax.cosine_decay_schedule(options.lr, options.updates))
    tx = optax.chain(optax.clip_by_global_norm(1.0), adam)
    optimizer = statetx.Optimizer(tx, statetx.states(model, brainstate.ParamState))

    @statetx.jit
    def update(images, labels):
        loss, grads = statetx.value_and_grad(model.loss, wrt=optimizer.states)(images, labels)
        optimizer.update(grads)
        return loss

    return model, update


def load_images(seed):
    """Return images [n, 8, 8] from 0 to 1 and labels, for training and for the test (360)."""
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32).reshape(-1, 8, 8)
    return train_test_split(images, labels.astype(np.int32), test_size=360, random_state=seed, stratify=labels)


def measure_memory(options, progress):
    """Return temporary bytes of a training step over numbers of time steps: all stored, or a few slots."""
    lengths = [options.steps // n for n in (4, 2, 1)]
    ways = {"plain": None, "slots": statetx.policies.Slots(options.slots)}
    task = progress.add_task("memory", total=len(lengths) * len(ways), status="compiling")
    images, labels = jnp.zeros((options.batch, 8, 8)), jnp.zeros(options.batch, jnp.int32)
    memory = {"steps": lengths} | {name: [] for name in ways}
    for length in lengths:
        for name, checkpoint in ways.items():
            model, _ = build(options, length, checkpoint)
            memory[name].append(statetx.measure(model.loss, images, labels).temp_bytes)
            progress.update(task, advance=1, status=f"{length} steps, {name}: {show_bytes(memory[name][-1])}")
    return memory


def example(options, progress, results):
    """Train, test, and measure the memory of both ways."""
    images, unseen, labels, unseen_labels = load_images(options.seed)
    memory = results["temporary_bytes"] = measure_memory(options, progress)
    model, update = build(options, options.steps, statetx.policies.Slots(options.slots))
    rng = np.random.default_rng(options.seed)
    picks = [rng.choice(len(images), options.batch, replace=False) for _ in range(options.updates)]
    trained = train({"training": update}, [(images[i], labels[i]) for i in picks], progress, results)["training"]

    logits, (events, spikes) = statetx.jit(model)(unseen)
    predicted = np.argmax(logits, axis=1)
    accuracy = results["accuracy"] = float(np.mean(predicted == unseen_labels))
    confusion = np.zeros((10, 10), int)
    np.add.at(confusion, (unseen_labels, predicted), 1)

    table = Table("", "all steps stored", f"{options.slots} stored", title=f"Digits in {options.steps:,} time steps")
    for i, steps in enumerate(memory["steps"]):
        cells = (show_bytes(memory[way][i]) for way in ("plain", "slots"))
        table.add_row(f"memory of a gradient through {steps:,} steps", *cells)
    table.add_section()
    table.add_row("time of a training step", "", show_seconds(trained["step_seconds"]))
    table.add_row("accuracy on held-out digits", "", f"{accuracy:.1%}")
    table.add_row("spikes of a neuron for one image", "", f"{np.sum(spikes, 0).mean():.1f}")
    return table, draw(np.asarray(events), np.asarray(spikes), trained, confusion, accuracy, memory)


def draw(events, spikes, trained, confusion, accuracy, memory):
    """Draw events and spikes of one image, the loss, the confusion matrix, and memory over time steps."""
    figure = Figure(figsize=(13, 8), layout="constrained")
    (sensors, neurons), (curve, table, bytes_) = [
        part.subplots(1, n) for part, n in zip(figure.subfigures(2, 1), (2, 3), strict=True)
    ]
    for axes, raster, color, title in (sensors, events, ORANGE, "events"), (neurons, spikes, BLUE, "spikes"):
        times, channels = np.nonzero(raster)
        size = np.clip(2000 / raster.shape[1] ** 1.4, 6, 60)  # marks of neighbors do not touch
        axes.scatter(times, channels + 1, s=size, marker="|", color=color, linewidths=1)
        limits = {"xlim": (0, len(raster)), "ylim": (0.5, raster.shape[1] + 0.5)}
        tidy(axes, counts="xy", xlabel="time step", title=f"{title} of one image: {len(times):,}", **limits)
    sensors.set(ylabel="sensor (column of the image)")
    neurons.set(ylabel="neuron, by time constant")
    plot_losses(curve, {"training": trained}, {"training": GREY})
    tidy(curve, counts="x", xlabel="training step", ylabel="loss [nats]", title="training", ylim=(0, None))
    table.imshow(confusion, cmap="Blues")
    for row, column in np.argwhere(confusion):
        number = confusion[row, column]
        table.text(column, row, number, ha="center", va="center", fontsize=8, color="white" if number > 15 else "black")
    ticks = {"xticks": range(10), "yticks": range(10)}
    table.set(xlabel="predicted digit", ylabel="digit", title=f"held out: accuracy {accuracy:.1%}", **ticks)
    for way, label, color in ("plain", "all steps stored", ORANGE), ("slots", "slots", GREEN):
        bytes_.plot(memory["steps"], memory[way], "o-", color=color, label=label)
    legend_below(bytes_, columns=2)
    tidy(bytes_, xlabel="time steps", title="temporary memory of a gradient")
    for scale in bytes_.set_xscale, bytes_.set_yscale:
        scale("log", base=2)
    bytes_.set_xticks(memory["steps"], [f"{n:,}" for n in memory["steps"]], minor=False)
    bytes_.yaxis.set_major_formatter(lambda num, _: show_bytes(num))
    return figure


if __name__ == "__main__":
    run(parser, options, example)
