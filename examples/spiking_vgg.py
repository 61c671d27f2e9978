"""Train a spiking VGG on event frames at 0.4 of its memory, without computing a convolution again.

The network is CIFAR10DVSVGG of SpikingJelly's tutorial on memory optimization, in brainstate: eight blocks of a convolution, BatchNorm and leaky
integrate-and-fire neurons (hard reset, arctan surrogate gradient), at the tutorial's input of 8 samples with 10 frames of 48 x 48 pixels. The table of
the tutorial stands below the one here. Events are random: memory and time do not depend on them.

A training step is the gradient and the update of BatchNorm's statistics. Three ways:

- plain: everything that the gradient needs is stored;
- bits: each block is computed again from its input, which is spikes, stored as bits (``inputs_stored_as="bits"``);
- convolutions: the same, and the results of the convolutions are stored (``policy=primitives("conv_general_dilated")``), so that only cheap
  operations run again. The first block, whose convolution is cheap, stores its input alone.

``fence="cond"`` makes the blocks run again one at a time: with barriers XLA may start with the largest one early. In both
ways neurons keep the membrane potential between steps and nothing within (``checkpoint=Levels(1)``).
``--target h100`` compiles for a GPU that is not there, too.
"""

from _common import GREEN, GREY, between, compare_times, make_parser, parse, run, show_bytes, show_difference, tidy

WAYS = "plain", "bits", "convolutions"
RED = "#b03a48"
# SpikingJelly's table, one RTX 4090: peak memory in MB, milliseconds of a step, seconds of the search.
PUBLISHED = {
    "without": (1022.23, 27.57, 0.0),
    "safe": (833.94, 36.60, 2.6),
    "balanced": (787.94, 33.88, 37.0),
    "memory": (671.56, 35.83, 89.8),
    "exhaustive": (589.0, 27.7, 451.0),
}


def make_options():
    """Describe the options."""
    parser = make_parser(__doc__, "spiking_vgg")
    add = parser.add_argument
    add("--batch", type=between(int), default=8, help="samples")
    add("--frames", type=between(int), default=10, help="of a sample")
    add("--size", type=between(int, 15), default=48, help="height and width of a frame, a multiple of 16")
    add("--channels", type=between(int), default=64, help="of the first block; the last has eight times as many")
    add("--rounds", type=between(int), default=3, help="training steps of each way, in turns")
    add("--target", help="also the memory on this GPU, such as h100 (needs statetx[target-cuda])")
    return parser


if __name__ == "__main__":  # before the large imports, so that --help and mistakes are answered at once
    parser = make_options()
    options = parse(parser, seconds=30, batch=2, frames=4, size=16, channels=8, rounds=2)
    if options.size % 16:
        parser.error("--size must be a multiple of 16")

import time

import statetx  # before jax: no messages about a GPU that is not there

# isort: split
import brainstate
import braintools
import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure
from rich.table import Column, Table

from statetx.policies import Levels, primitives


def halve(images):
    """Return the means of 2 x 2 pixels of images [..., height, width, channels]."""
    *lead, height, width, channels = images.shape
    return images.reshape(*lead, height // 2, 2, width // 2, 2, channels).mean((-4, -2))


class Block(brainstate.nn.Module):
    """Convolution and BatchNorm of all frames at once, then neurons frame by frame."""

    def __init__(self, size, inputs, outputs, halves, checkpoint):
        super().__init__()
        weight = braintools.init.KaimingNormal(scale=2.0, mode="fan_out")
        self.conv = brainstate.nn.Conv2d((size, size, inputs), outputs, 3, padding=1, w_init=weight)
        self.norm = brainstate.nn.BatchNorm2d((size, size, outputs), momentum=0.9)
        self.spike = braintools.surrogate.Arctan(alpha=2.0)
        self.halves, self.checkpoint = halves, checkpoint

    def __call__(self, spikes):  # [frames, samples, height, width, channels]
        def step(membrane, current):
            membrane += current - membrane / 1.333
            spikes = self.spike(membrane - 1)
            return membrane * (1 - jax.lax.stop_gradient(spikes)), spikes

        frames = spikes.reshape(-1, *spikes.shape[2:])
        currents = self.norm(self.conv(halve(frames) if self.halves else frames))
        currents = currents.reshape(*spikes.shape[:2], *currents.shape[1:])
        return statetx.scan(step, jnp.zeros_like(currents[0]), currents, checkpoint=self.checkpoint)[1]


class Network(brainstate.nn.Module):
    """Eight spiking blocks and a linear readout of the mean over frames."""

    def __init__(self, options, way):
        super().__init__()
        size, inputs, checkpoint = options.size, 2, None if way == "plain" else Levels(1)
        self.blocks = []
        for times, halves in (1, 0), (2, 0), (4, 1), (4, 0), (8, 1), (8, 0), (8, 1), (8, 0):
            size, outputs = size >> halves, times * options.channels
            self.blocks.append(Block(size, inputs, outputs, halves, checkpoint))
            inputs = outputs
        self.readout = brainstate.nn.Linear(inputs * (size // 2) ** 2, 10)
        first, *others = self.blocks
        if way != "plain":
            policy = primitives("conv_general_dilated") if way == "convolutions" else None
            first = statetx.remat(first, fence="cond")
            others = [statetx.remat(b, policy=policy, inputs_stored_as="bits", fence="cond") for b in others]
        self.run_blocks = [first, *others]

    def loss(self, events, labels):
        spikes = jnp.swapaxes(events, 0, 1)
        for block in self.run_blocks:
            spikes = block(spikes)
        features = halve(spikes).reshape(*spikes.shape[:2], -1)
        kept = brainstate.random.random(features.shape) < 0.75  # dropout
        logits = self.readout(jnp.where(kept, features / 0.75, 0)).mean(0)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def build(options, way):
    """Return a network made from the seed, and its training step, which returns loss and gradients."""
    brainstate.random.seed(options.seed)
    network = Network(options, way)
    weights = statetx.states(network, brainstate.ParamState)

    @statetx.jit
    def step(events, labels):
        with brainstate.environ.context(fit=True):
            return statetx.value_and_grad(network.loss, wrt=weights)(events, labels)

    return network, step


def largest_difference(grads, others):
    """Return the largest difference of gradients, relative to the largest entry of each array."""
    pairs = zip(jax.tree.leaves(grads), jax.tree.leaves(others), strict=True)
    return max(float(np.max(np.abs(a - b)) / np.max(np.abs(a))) for a, b in pairs if np.any(a))


def example(options, progress, results):
    """Compile all ways, compare their gradients, and measure them in turns."""
    rng = np.random.default_rng(options.seed)
    shape = options.batch, options.frames, options.size, options.size, 2
    batch = rng.poisson(0.3, shape).astype(np.float32), rng.integers(10, size=options.batch).astype(np.int32)
    ways, steps, grads = results.setdefault("ways", {}), {}, {}
    task = progress.add_task("training steps", total=len(WAYS) * (1 + options.rounds), status="compiling")
    for way in WAYS:
        network, steps[way] = build(options, way)
        start = time.perf_counter()
        compiled = steps[way].lower(*batch).compile()
        found = ways[way] = {"temporary_bytes": compiled.memory_analysis().temp_size_in_bytes}
        found["compile_seconds"] = time.perf_counter() - start
        found["operations"] = compiled.cost_analysis()["flops"]
        if options.target:
            found["target_bytes"] = statetx.measure(steps[way], *batch, target=options.target).temp_bytes
        brainstate.random.seed(options.seed)  # the same dropout
        loss, grads[way] = jax.device_get(steps[way](*batch))
        difference = largest_difference(grads["plain"], grads[way])
        found |= {"loss": float(loss), "gradient_difference": difference, "cpu_seconds": []}
        progress.update(task, advance=1, status=f"{way}: {show_bytes(found['temporary_bytes'])}")
    tell = lambda text: progress.update(task, advance=1, status=text)
    compare_times(steps, batch, ways, options.rounds, tell)
    plain = ways["plain"]
    for found in ways.values():
        for name in ("temporary_bytes", "target_bytes"):
            if name in found:
                found[name.replace("bytes", "ratio")] = found[name] / plain[name]
    results["published"] = {
        way: {"memory_mb": memory, "ratio": memory / 1022.23, "time": ms / 27.57, "search_seconds": search}
        for way, (memory, ms, search) in PUBLISHED.items()
    }
    return make_table(results, options), draw(results, options)


def make_table(results, options):
    """Return the table of all ways, and of the published figures."""
    columns = ("memory", "of plain", "time of plain", "operations", "gradient differs by")
    title = f"A training step of the spiking VGG, input {options.batch, options.frames, 2, options.size, options.size}"
    table = Table("", *(Column(name, justify="right") for name in columns), title=title)
    plain = results["ways"]["plain"]
    for way, found in results["ways"].items():
        more = f"+{found['operations'] / plain['operations'] - 1:.1%}"
        numbers = f"{found['temporary_ratio']:.2f}", f"{found['time']:.2f}", more
        difference = show_difference(found["gradient_difference"])
        table.add_row(way, show_bytes(found["temporary_bytes"]), *numbers, difference)
        if "target_bytes" in found:
            table.add_row(f"  on {options.target}", show_bytes(found["target_bytes"]), f"{found['target_ratio']:.2f}")
    table.add_section()
    for way, found in results["published"].items():
        numbers = f"{found['memory_mb']:,.0f} MB", f"{found['ratio']:.2f}", f"{found['time']:.2f}"
        table.add_row(f"SpikingJelly: {way}", *numbers)
    return table


def draw(results, options):
    """Draw memory against time, relative to the plain network, beside the published figures."""
    figure = Figure(figsize=(8, 4.2), layout="constrained")
    axes = figure.subplots()
    published = {f"SpikingJelly, {way}": (r["time"], r["ratio"]) for way, r in results["published"].items()}
    own = {f"statetx, {way}": (r["time"], r["temporary_ratio"]) for way, r in results["ways"].items()}
    for points, color, marker in (published, RED, "x"), (own, GREEN, "o"):
        for label, point in points.items():
            axes.scatter(*point, color=color, marker=marker, s=55)
            is_plain = label in ("SpikingJelly, without", "statetx, plain")
            text = "" if label == "SpikingJelly, without" else "plain" if is_plain else label
            axes.annotate(
                text, point, (8, 0), textcoords="offset points", color=GREY if is_plain else color, va="center"
            )
    tidy(axes, xlabel="time of the plain network", ylabel="memory of the plain network", ylim=(0, 1.08))
    low, high = axes.get_xlim()
    axes.set(xlim=(min(low, 0.85), max(high, 1.6)), title="Training step of a spiking VGG")
    return figure


if __name__ == "__main__":
    run(parser, options, example)
