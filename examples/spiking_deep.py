"""Train a deep recurrent spiking network on event streams, by exact gradients through thousands of time steps.

A bar crosses a sensor of 8 x 8 pixels once, in one of eight directions. A pixel fires at random, more often while the
bar is on it. Opposite directions differ only in the order of their events, so the network has to remember. Its layers
are leaky integrate-and-fire neurons of ``brainpy.state`` with surrogate gradients of ``braintools`` and recurrent
weights.

The stream passes the network in chunks: a `statetx.scan` over chunks, in which each layer runs through all steps of the
chunk. The same network is trained in six ways, which differ in what they store for the gradient:

- plain: everything;
- remat: the input of each layer in each chunk, as floats; layers are computed again (`statetx.remat`);
- bits: the same inputs as bits, since spikes are 0 or 1 (``inputs_stored_as="bits"``);
- slots: the states before a few chunks (``checkpoint=Slots(n)``); chunks are computed again. What the layers of one
  chunk compute is a hundred times its states, so that slots hold states only;
- mixed: the same slots around rematerialized layers. A chunk keeps the inputs of its layers, so little that slots
  which are free hold that, too: mixed slots. Then fewer chunks are computed again, in the same slots;
- all: the same with bits. A chunk keeps hardly more than its states, and free slots hold many chunks.

The first gradients are compared: they are the same, bit for bit or up to the rounding of sums that XLA computes in
another order. Later, a last bit of a weight may decide whether a neuron fires. After some training steps in turns,
training goes on in the last way. Expect less than 1/100 of the first memory at less time, and a memory that does not
grow with the length of the stream.
"""

import dataclasses

from _common import (
    BLUE,
    GREEN,
    GREY,
    MIB,
    ORANGE,
    BadInput,
    between,
    make_parser,
    memory_of,
    parse,
    run,
    show_bytes,
    show_difference,
    show_seconds,
    tidy,
    train,
)

RED, PURPLE = "#b03a48", "#7a4fa3"
WAYS = {"plain": GREY, "remat": ORANGE, "bits": BLUE, "slots": RED, "mixed": PURPLE, "all": GREEN}
FORMATS = {"remat": None, "bits": "bits", "mixed": None, "all": "bits"}  # of the inputs of rematerialized layers
WITH_SLOTS = ("slots", "mixed", "all")
SIZE, DIRECTIONS = 8, 8
TOLERANCE = 1e-5  # of gradients, relative to the largest entry of each array


def make_options():
    """Describe the options."""
    parser = make_parser(__doc__, "spiking_deep")
    add = parser.add_argument
    add("--updates", type=between(int), default=60, help="training steps")
    add("--turns", type=between(int), default=5, help="the first of them, in which all ways take turns")
    add("--steps", type=between(int, 15), default=2048, help="time steps of a stream")
    add("--chunk", type=between(int), default=16, help="time steps of a chunk, a divisor of --steps")
    add("--lengths", type=between(int), default=3, help="streams measured: of --steps, 4 times as many, 16 times ...")
    add("--layers", type=between(int), default=6, help="spiking layers")
    add("--neurons", type=between(int), default=64, help="neurons in a layer")
    add("--batch", type=between(int), default=32, help="streams in a batch")
    add("--slots", type=between(int), default=48, help="chunks whose states there is room for")
    add("--lr", type=between(float), default=0.01, help="first learning rate of Adam, which falls to zero")
    return parser


if __name__ == "__main__":  # before the large imports, so that --help and mistakes are answered at once
    parser = make_options()
    quick = {"updates": 6, "turns": 3, "steps": 128, "chunk": 16, "lengths": 2}
    options = parse(parser, seconds=26, layers=2, neurons=16, batch=16, slots=6, **quick)
    if options.steps % options.chunk:
        parser.error("--chunk must divide --steps")

import brainstate
import braintools
import brainunit as u
import jax
import jax.numpy as jnp
import numpy as np
import optax
from brainpy.state import LIF
from matplotlib.figure import Figure
from rich.table import Column, Table

import statetx
from statetx.policies import Slots


class Layer(brainstate.nn.Module):
    """Spiking neurons with many time constants, which see the layer below and their own last spikes, with a
    shortcut.
    """

    def __init__(self, num_inputs, num, steps, has_shortcut):
        super().__init__()
        normal, zero = braintools.init.KaimingNormal, braintools.init.Constant(0.0)
        self.has_shortcut = has_shortcut
        tau = np.geomspace(4, max(8, steps / 2), num, dtype=np.float32)
        self.feed = brainstate.nn.Linear(
            num_inputs, num, w_init=normal(scale=5.0 if has_shortcut else 20.0), b_init=None
        )
        self.back = brainstate.nn.Linear(num, num, w_init=normal(scale=1.0), b_init=None)
        self.neurons = LIF(
            num, R=np.sqrt(tau), tau=tau * u.ms, V_th=1.0, V_reset=0.0, V_rest=0.0, V_initializer=zero,
            spk_fun=braintools.surrogate.Arctan(alpha=2.0),
        )  # fmt: skip

    def __call__(self, spikes):
        """Run the steps of a chunk on the spikes of the layer below [steps, batch, inputs]; return [steps, batch,
        neurons].
        """

        def step(carry, current):
            return carry, self.neurons(current + self.back(self.neurons.get_spike()))

        _, own = statetx.scan(step, None, self.feed(spikes))
        return spikes + own - spikes * own if self.has_shortcut else own  # or: still 0 or 1


class Network(brainstate.nn.Module):
    """Spiking layers, and a linear readout of slow traces of the last one's spikes."""

    def __init__(self, options, steps, way):
        super().__init__()
        self.chunk, self.steps, num = options.chunk, steps, options.neurons
        sizes = [SIZE**2] + [num] * (options.layers - 1)
        self.layers = [Layer(n, num, steps, has_shortcut=i > 0) for i, n in enumerate(sizes)]
        self.readout = brainstate.nn.Linear(num, DIRECTIONS)
        self.keep = np.exp(-4 * options.chunk / steps)
        self.trace = brainstate.HiddenState(jnp.zeros((options.batch, num)))
        brainstate.nn.init_all_states(self.layers, batch_size=options.batch)

        # There are several layers in the body of the scan over chunks, of which only one is to be recomputed at a time.
        # `prevent_cse=True` orders them; by default `remat` leaves a region in a loop's body to XLA's scheduler.
        wrap = lambda layer: statetx.remat(layer, inputs_stored_as=FORMATS[way], prevent_cse=True)
        self.run_layers = [wrap(layer) if way in FORMATS else layer for layer in self.layers]
        self.shows_spikes = False  # of the length of the stream, and not needed for training
        self.checkpoint = Slots(options.slots) if way in WITH_SLOTS else None

    def run_chunk(self, carry, events):
        """Run all layers on events [steps, batch, sensors]; return the first stream's spikes of each layer if asked."""
        spikes, shown = events.astype(jnp.float32), []
        for layer in self.run_layers:
            spikes = layer(spikes)
            shown.append(spikes[:, 0] > 0)
        self.trace.value = self.keep * self.trace.value + spikes.sum(0)
        return carry, shown if self.shows_spikes else None

    def __call__(self, events):
        """Return logits [batch, directions] for events [steps, batch, sensors], and the first stream's spikes."""
        brainstate.nn.reset_all_states(self.layers, batch_size=events.shape[1])
        self.trace.value = jnp.zeros((events.shape[1], self.trace.value.shape[1]))
        chunks = events.reshape(-1, self.chunk, *events.shape[1:])
        _, spikes = statetx.scan(self.run_chunk, None, chunks, checkpoint=self.checkpoint)
        return self.readout(self.trace.value * (20 / self.steps)), spikes

    def loss(self, events, labels):
        return optax.softmax_cross_entropy_with_integer_labels(self(events)[0], labels).mean()


def make_streams(rng, batch, steps):
    """Return events [steps, batch, sensors] and directions [batch]."""
    labels = rng.integers(DIRECTIONS, size=batch)
    angle = 2 * np.pi * labels / DIRECTIONS
    x, y = np.meshgrid(*2 * [np.linspace(-1, 1, SIZE)], indexing="ij")
    place = np.outer(np.cos(angle), x) + np.outer(np.sin(angle), y)
    bar = np.linspace(-1.2, 1.2, steps)[:, None, None] + 0.2 * rng.standard_normal((batch, 1))
    rate = 0.8 * np.exp(-(((place - bar) / 0.25) ** 2) / 2) + 0.02
    # About as many events, however many steps they are spread over.
    return rng.random(rate.shape) < rate * min(1, 400 / steps), labels.astype(np.int32)


def build(options, steps, way):
    """Return a network made from the seed, and its training step, which returns loss and gradients."""
    brainstate.random.seed(options.seed)
    network = Network(options, steps, way)
    adam = optax.adam(optax.cosine_decay_schedule(options.lr, options.updates))
    weights = statetx.states(network, brainstate.ParamState)
    optimizer = statetx.Optimizer(optax.chain(optax.clip_by_global_norm(1.0), adam), weights)

    @statetx.jit
    def update(events, labels):
        loss, grads = statetx.value_and_grad(network.loss, wrt=optimizer.states)(events, labels)
        optimizer.update(grads)
        return loss, grads

    return network, update


def largest_difference(grads, others):
    """Return the largest difference of gradients, relative to the largest entry of each array."""
    pairs = zip(jax.tree.leaves(grads), jax.tree.leaves(others), strict=True)
    return max(float(jnp.max(jnp.abs(a - b)) / jnp.max(jnp.abs(a))) for a, b in pairs)


def measure(options, progress, built):
    """Return the temporary bytes of a training step, and what the library reports on slots, for streams of several
    lengths.

    Args:
        options: of the command line.
        progress: the progress bar.
        built: what `build` returned for the length of the options, by way.

    Returns:
        Bytes by way, and by way with slots the `LoopRow` of the scan over chunks, as a dict: lists with an entry for
        each length.
    """
    lengths = [options.steps * 4**i for i in range(options.lengths)]
    task = progress.add_task("memory", total=len(lengths) * len(WAYS), status="compiling")
    memory, loops = {"steps": lengths} | {way: [] for way in WAYS}, {way: [] for way in WITH_SLOTS}
    for length in lengths:
        events = jax.ShapeDtypeStruct((length, options.batch, SIZE**2), bool)
        labels = jax.ShapeDtypeStruct((options.batch,), jnp.int32)
        for way in WAYS:
            network, update = built[way] if length == options.steps else build(options, length, way)
            memory[way].append(memory_of(update, events, labels))
            if way in WITH_SLOTS:
                (row,) = statetx.loop_report(network.loss, events, labels, policies=()).rows
                loops[way].append(dataclasses.asdict(row))
            progress.update(task, advance=1, status=f"{length} steps, {way}: {show_bytes(memory[way][-1])}")
    return memory, loops


def example(options, progress, results):
    """Measure memory, train all ways in turns, compare their first gradients, train one to the end, and test it."""
    brainstate.environ.set(dt=1.0 * u.ms)  # a step of `brainpy.state`
    built = {way: build(options, options.steps, way) for way in WAYS}
    results["temporary_bytes"], results["loops"] = measure(options, progress, built)

    rng = np.random.default_rng(options.seed)
    batches = [make_streams(rng, options.batch, options.steps) for _ in range(options.updates)]
    first_grads = {}

    def step_of(way, update):
        def step(events, labels):
            loss, grads = update(events, labels)
            first_grads.setdefault(way, jax.device_get(grads))
            return loss

        return step

    steps = {way: step_of(way, update) for way, (_, update) in built.items()}
    train(steps, batches[: options.turns], progress, results)
    differences = {way: largest_difference(first_grads["plain"], first_grads[way]) for way in WAYS}
    results["gradient_difference"] = differences
    if max(differences.values()) > TOLERANCE:
        raise BadInput(f"gradients differ: {differences}")
    rest = batches[options.turns :]
    if rest:
        train({"all": steps["all"]}, rest, progress, results)

    network, _ = built["all"]
    network.shows_spikes = True
    evaluate = statetx.jit(network)
    predicted, actual = [], []
    for _ in range(-(-256 // options.batch)):
        unseen, directions = make_streams(rng, options.batch, options.steps)
        logits, spikes = evaluate(unseen)
        predicted.append(np.argmax(logits, -1))
        actual.append(directions)
    accuracy = results["accuracy"] = float(np.mean(np.concatenate(predicted) == np.concatenate(actual)))
    spikes = [np.asarray(s).reshape(options.steps, -1) for s in spikes]
    results["spike_rate"] = [float(s.mean()) for s in spikes]

    table = make_table(options, results, accuracy)
    return table, draw(unseen[:, 0], spikes, results, options)


def make_table(options, results, accuracy):
    """Return the table of all ways."""
    title = (
        f"{options.layers} spiking layers, batch {options.batch}, chunks of {options.chunk} steps, {options.slots} "
        f"slots"
    )
    table = Table("", *[Column(way, justify="right") for way in WAYS], title=title)
    memory, loops, runs = results["temporary_bytes"], results["loops"], results["runs"]

    def of_slots(show, i=0):
        return [show(loops[way][i]) if way in loops else "" for way in WAYS]

    for i, steps in enumerate(memory["steps"]):
        table.add_row(f"memory, {steps:,} time steps", *(show_bytes(memory[way][i]) for way in WAYS))
    table.add_row("  relative to plain", *(f"1 / {memory['plain'][-1] / memory[way][-1]:,.0f}" for way in WAYS))
    table.add_section()
    table.add_row("states before a chunk", *of_slots(lambda row: show_bytes(row["carry_bytes"])))
    table.add_row("kept by a chunk", *of_slots(lambda row: show_bytes(row["residual_bytes"])))
    for i, steps in enumerate(memory["steps"]):
        table.add_row(f"runs of a chunk, {steps:,} time steps", *of_slots(lambda row: f"{row['runs']:.2f}", i))
        table.add_row("  slots hold what chunks keep", *of_slots(lambda row: "yes" if row["is_mixed"] else "no", i))
        table.add_row("  if slots held states only", *of_slots(lambda row: f"{row['carry_runs']:.2f}", i))
    table.add_section()
    table.add_row("time of a training step", *(show_seconds(runs[way]["step_seconds"]) for way in WAYS))
    differences = (show_difference(results["gradient_difference"][way]) for way in WAYS)
    table.add_row("difference of the first gradient", *differences)
    table.add_section()
    table.add_row("accuracy on new streams", *[""] * (len(WAYS) - 1), f"{accuracy:.1%}")
    return table


def draw(events, spikes, results, options):
    """Draw a stream, the spikes of two layers and the loss; below, memory and runs over steps, and memory
    against time.
    """
    figure = Figure(figsize=(15, 8), layout="constrained")
    top, bottom = figure.subfigures(2, 1)
    stream, first, last, curve = top.subplots(1, 4)
    over, again, against = bottom.subplots(1, 3)
    rasters = (stream, events, "events", GREY), (first, spikes[0], "spikes, layer 1", BLUE)
    for axes, raster, title, color in (*rasters, (last, spikes[-1], f"spikes, layer {len(spikes)}", BLUE)):
        times, channels = np.nonzero(raster)
        axes.scatter(times, channels + 1, s=6, marker="|", color=color, linewidths=0.6)
        limits = {"xlim": (0, len(raster)), "ylim": (0.5, raster.shape[1] + 0.5)}
        tidy(axes, counts="xy", xlabel="time step", title=f"{title} of one stream: {len(times):,}", **limits)
    stream.set(ylabel="pixel")
    first.set(ylabel="neuron, by time constant")
    losses = results["runs"]["all"]["losses"]
    curve.plot(range(1, len(losses) + 1), losses, color=GREEN)
    title = f"training; accuracy {results['accuracy']:.1%}"
    tidy(curve, counts="x", xlabel="training step", ylabel="loss [nats]", title=title, ylim=(0, None))

    memory = results["temporary_bytes"]
    lines = {way: [n / MIB for n in memory[way]] for way in WAYS}
    plot_over_steps(over, memory["steps"], lines, title="temporary memory of a training step, MiB", yscale="log")
    lines = {way: [row["runs"] for row in rows] for way, rows in results["loops"].items()}
    title = f"runs of a chunk, {options.slots} slots"
    plot_over_steps(again, memory["steps"], lines, title=title, ylim=(1, 1.05 * max(map(max, lines.values()))))

    points = {way: (results["runs"][way]["step_seconds"], memory[way][0]) for way in WAYS}
    for way, (seconds, num_bytes) in points.items():
        against.scatter(seconds, num_bytes / MIB, color=WAYS[way], s=60)
        # On the side where no other way of about the same memory is.
        is_left = any(seconds < s and 2 / 3 < num_bytes / n < 3 / 2 for s, n in points.values())
        offset, side = ((-8, 0), "right") if is_left else ((8, 0), "left")
        options_of_text = {"color": WAYS[way], "ha": side, "va": "center", "textcoords": "offset points"}
        against.annotate(way, (seconds, num_bytes / MIB), xytext=offset, **options_of_text)
    title = f"memory, MiB, against time, {options.steps:,} steps"
    tidy(against, xlabel="seconds of a training step", title=title, yscale="log")
    against.set_xlim(0, 1.15 * against.get_xlim()[1])
    return figure


def plot_over_steps(axes, steps, lines, **properties):
    """Draw a line for each way, with its name at the end, where names that would overlap are moved apart."""
    for way, values in lines.items():
        axes.plot(steps, values, "o-", color=WAYS[way])
    tidy(axes, xlabel="time steps", xscale="log", **properties)
    axes.set_xticks(steps, [f"{n:,}" for n in steps], minor=False)
    axes.set_ylim(axes.get_ylim())
    to_fraction = axes.transScale + axes.transLimits
    heights = {way: to_fraction.transform((steps[-1], values[-1]))[1] for way, values in lines.items()}
    lowest = 0.0
    for way in sorted(reversed(heights), key=heights.get):
        lowest = max(lowest, heights[way])
        axes.annotate(
            way, (1.01, lowest), xycoords="axes fraction", color=WAYS[way], va="center", annotation_clip=False
        )
        lowest += 0.06  # of the height, a line of text


if __name__ == "__main__":
    run(parser, options, example)
