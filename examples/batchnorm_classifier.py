"""Train a convolutional classifier with batch normalization, and count the writes of its running statistics.

A batch normalization writes while it computes: each step moves the running mean and variance a little. A rematerialized
block runs twice, and the statistics must still move once. The blocks here are brainstate's own layers, with a counter
of writes added, and `@statetx.remat` on the method that runs them.

The same model is trained with and without rematerialization, from the same seed. Expect one write per step in both,
the same statistics after one step, nearly the same losses (training amplifies rounding), about half the memory, and
the same accuracy on held-out digits up to one or two of them. The test uses the running statistics instead of batch
statistics (brainstate's ``fit`` mode, which statetx's transforms respect).
"""

from _common import (
    BLUE,
    ORANGE,
    bar_chart,
    between,
    legend_below,
    make_parser,
    memory_of,
    parse,
    plot_losses,
    run,
    show_bytes,
    show_difference,
    show_seconds,
    tidy,
    train,
)


def make_options():
    """Describe the options."""
    parser = make_parser(__doc__, "batchnorm_classifier")
    add = parser.add_argument
    add("--updates", type=between(int, 1), default=80, help="training steps of each run")
    add("--blocks", type=between(int), default=4, help="residual blocks of two convolutions")
    add("--channels", type=between(int), default=16, help="channels of the blocks")
    add("--batch", type=between(int, 1, 1438), default=96, help="images in a batch")
    add("--lr", type=between(float), default=0.003, help="learning rate of Adam")
    return parser


if __name__ == "__main__":  # before the large imports, so that --help and mistakes are answered at once
    parser = make_options()
    options = parse(parser, seconds=15, updates=20, blocks=2, channels=8, batch=64)

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

COLORS = {"no remat": ORANGE, "remat": BLUE}


class CountedNorm(brainstate.nn.BatchNorm2d):
    """Batch normalization that counts how often it writes its statistics."""

    def __init__(self, size):
        super().__init__(size, momentum=0.9)
        self.writes = statetx.State(jnp.zeros((), jnp.int32))

    def update(self, x):
        if brainstate.environ.get("fit"):
            self.writes.value += 1
        return super().update(x)


class Block(brainstate.nn.Module):
    """A residual block: two convolutions, each followed by a normalization."""

    def __init__(self, size):
        super().__init__()
        self.first, self.second = (brainstate.nn.Conv2d(size, size[-1], 3) for _ in range(2))
        self.first_norm, self.second_norm = CountedNorm(size), CountedNorm(size)

    @statetx.remat
    def update(self, x):
        hidden = jax.nn.relu(self.first_norm(self.first(x)))
        return jax.nn.relu(x + self.second_norm(self.second(hidden)))


class PlainBlock(Block):
    """The same without rematerialization, for comparison."""

    update = Block.update.__wrapped__


class Classifier(brainstate.nn.Module):
    """A convolution, residual blocks, and a linear readout of the mean over the image."""

    def __init__(self, make_block, blocks, channels):
        super().__init__()
        size = (8, 8, channels)
        self.stem = brainstate.nn.Conv2d((8, 8, 1), channels, 3)
        self.blocks = [make_block(size) for _ in range(blocks)]
        self.readout = brainstate.nn.Linear(channels, 10)

    def update(self, images):
        x = self.stem(images)
        for block in self.blocks:
            x = block(x)
        return self.readout(jnp.mean(x, axis=(1, 2)))

    def loss(self, images, labels):
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(self(images), labels))


def build(options, make_block):
    """Return a model made from the seed, and its training step."""
    brainstate.random.seed(options.seed)
    model = Classifier(make_block, options.blocks, options.channels)
    optimizer = statetx.Optimizer(optax.adam(options.lr), statetx.states(model, brainstate.ParamState))

    @statetx.jit
    def step(images, labels):
        loss, grads = statetx.value_and_grad(model.loss, wrt=optimizer.states)(images, labels)
        optimizer.update(grads)
        return loss

    return model, step


def judge(model, unseen, labels):
    """Return the accuracy on unseen images, and how often the statistics were written."""
    with brainstate.environ.context(fit=False):
        predicted = np.argmax(model(unseen), axis=1)
    writes = {int(state.value) for state in statetx.states(model, "*writes").values()}
    return {"accuracy": float(np.mean(predicted == labels)), "writes": sorted(writes)}


def read_statistics(model):
    """Return running means and variances by path, as lists."""
    statistics = statetx.states(model, ["*running_mean", "*running_var"])
    return {path: np.ravel(state.value).tolist() for path, state in statistics.items()}


def example(options, progress, results):
    """Train with and without rematerialization, and compare."""
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32).reshape(-1, 8, 8, 1)
    split = {"test_size": 360, "random_state": options.seed, "stratify": labels}
    images, unseen, labels, unseen_labels = train_test_split(images, labels.astype(np.int32), **split)
    rng = np.random.default_rng(options.seed)
    picks = [rng.choice(len(images), options.batch, replace=False) for _ in range(options.updates)]
    batches = [(images[i], labels[i]) for i in picks]

    models = {"no remat": build(options, PlainBlock), "remat": build(options, Block)}
    steps = {name: step for name, (_, step) in models.items()}
    with brainstate.environ.context(fit=True):
        memory = {name: memory_of(step, *batches[0]) for name, step in steps.items()}
        results["runs"], statistics = {}, {}
        for name, (model, step) in models.items():  # statistics after one step, since training amplifies rounding
            results["runs"][name] = {"losses": [float(step(*batches[0]))]}
            statistics[name] = read_statistics(model)
        runs = train(steps, batches[1:], progress, results)
    for name, (model, _) in models.items():
        runs[name] |= {"temporary_bytes": memory[name], "statistics": statistics[name]}
        runs[name] |= judge(model, unseen, unseen_labels)

    plain, remat = runs.values()
    pairs = [(plain["statistics"][path], remat["statistics"][path]) for path in plain["statistics"]]
    difference = max(float(np.max(np.abs(np.subtract(a, b))) / np.max(np.abs(a))) for a, b in pairs)
    results["statistics_difference"] = difference
    table = Table("", *runs, title=f"{options.blocks} blocks of {options.channels} channels, {options.updates} steps")
    table.add_row("temporary memory of a step", *(show_bytes(r["temporary_bytes"]) for r in runs.values()))
    table.add_row("median time of a step", *(show_seconds(r["step_seconds"]) for r in runs.values()))
    table.add_section()
    table.add_row("writes of each statistic", *(", ".join(map(str, r["writes"])) for r in runs.values()))
    table.add_row("relative difference of statistics", "", show_difference(difference))
    table.add_row("last loss, nats", *(f"{r['losses'][-1]:.6f}" for r in runs.values()))
    table.add_row("accuracy on held-out digits", *(f"{r['accuracy']:.1%}" for r in runs.values()))
    return table, draw(runs, pairs, difference)


def draw(runs, pairs, difference):
    """Draw the losses over each other, the statistics against each other, and memory."""
    figure = Figure(figsize=(13, 4.5), layout="constrained")
    losses, statistics, memory = figure.subplots(1, 3)
    plot_losses(losses, runs, COLORS, {name: f"{name}: accuracy {r['accuracy']:.1%}" for name, r in runs.items()})
    tidy(losses, counts="x", xlabel="training step", ylabel="loss [nats]", yscale="log", title="training")
    legend_below(losses)
    plain, remat = (np.concatenate(side) for side in zip(*pairs, strict=True))
    statistics.axline((0, 0), slope=1, color="black", linewidth=0.6)
    statistics.plot(plain, remat, ".", color=BLUE, markersize=4)
    title = f"{len(plain)} statistics after one step, difference {show_difference(difference)}"
    tidy(statistics, xlabel="no remat", ylabel="remat", title=title)
    bytes_ = {name: r["temporary_bytes"] for name, r in runs.items()}
    bar_chart(memory, bytes_, COLORS, show_bytes, title="temporary memory and time of a step", yticks=[])
    memory.set_xticks(range(len(runs)), [f"{name}\n{show_seconds(r['step_seconds'])}" for name, r in runs.items()])
    return figure


if __name__ == "__main__":
    run(parser, options, example)
