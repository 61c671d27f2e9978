"""Train a convolutional classifier with batch normalisation, and see its running statistics written once a step.

A batch normalisation writes while it computes: each step moves the running mean and variance a little. A block that
is rematerialised is run twice, and these must move once all the same. The blocks here are brainstate's own layers,
untouched, with a counter of writes added; `statetx.remat` goes around each block.

The same model is trained with and without, from the same seed. Expect one write a step in both, the same statistics
after a step and nearly the same losses (training amplifies rounding), about half the memory, and the same accuracy on
held-out digits up to one or two of them. There the running statistics take the place of the batch's (brainstate's
``fit`` mode, which statetx's transforms respect).
"""

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import optax
from _common import (
    BLUE,
    MIB,
    ORANGE,
    Optimiser,
    between,
    make_parser,
    memory_of,
    run,
    show_bytes,
    show_difference,
    tidy,
    train,
)
from matplotlib.figure import Figure
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import statetx

COLOURS = {"no remat": ORANGE, "remat": BLUE}


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


class CountedNorm(brainstate.nn.BatchNorm2d):
    """Batch normalisation that counts how often it has written its statistics."""

    def __init__(self, size):
        super().__init__(size, momentum=0.9)
        self.writes = statetx.State(jnp.zeros((), jnp.int32))

    def update(self, x):
        if brainstate.environ.get("fit"):
            self.writes.value += 1
        return super().update(x)


class Block(brainstate.nn.Module):
    """Two convolutions, each followed by a normalisation, around which the input goes."""

    def __init__(self, size):
        super().__init__()
        self.first, self.second = (brainstate.nn.Conv2d(size, size[-1], 3) for _ in range(2))
        self.first_norm, self.second_norm = CountedNorm(size), CountedNorm(size)

    def update(self, x):
        hidden = jax.nn.relu(self.first_norm(self.first(x)))
        return jax.nn.relu(x + self.second_norm(self.second(hidden)))


class Classifier(brainstate.nn.Module):
    """A convolution, residual blocks, and a linear readout of the mean over the image."""

    def __init__(self, blocks, channels, wrap):
        super().__init__()
        size = (8, 8, channels)
        self.stem = brainstate.nn.Conv2d((8, 8, 1), channels, 3)
        self.blocks = [Block(size) for _ in range(blocks)]
        self.readout = brainstate.nn.Linear(channels, 10)
        self.wrap = wrap

    def update(self, images):
        x = self.stem(images)
        for block in self.blocks:
            x = self.wrap(block)(x)
        return self.readout(jnp.mean(x, axis=(1, 2)))

    def loss(self, images, labels):
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(self(images), labels))


def build(options, wrap):
    """Return a model made from the seed, and its training step."""
    brainstate.random.seed(options.seed)
    model = Classifier(options.blocks, options.channels, wrap)
    weights = statetx.states(model, brainstate.ParamState)
    optimiser = Optimiser(weights, optax.adam(options.lr))

    @statetx.jit
    def step(images, labels):
        loss, grads = statetx.value_and_grad(model.loss, wrt=weights)(images, labels)
        optimiser.update(grads)
        return loss

    return model, step


def judge(model, unseen, labels):
    """Return how well the model does, and how often its statistics were written."""
    with brainstate.environ.context(fit=False):
        predicted = np.argmax(model(unseen), axis=1)
    writes = {int(state.value) for state in statetx.states(model, "*writes").values()}
    return {"accuracy": float(np.mean(predicted == labels)), "writes": sorted(writes)}


def read_statistics(model):
    """Return running means and variances by path, as lists."""
    found = statetx.states(model, ["*running_mean", "*running_var"])
    return {path: np.ravel(state.value).tolist() for path, state in found.items()}


def example(options, progress):
    """Train with and without rematerialisation, and compare."""
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32).reshape(-1, 8, 8, 1)
    split = {"test_size": 360, "random_state": options.seed, "stratify": labels}
    images, unseen, labels, unseen_labels = train_test_split(images, labels.astype(np.int32), **split)
    rng = np.random.default_rng(options.seed)
    picks = [rng.choice(len(images), options.batch, replace=False) for _ in range(options.updates)]
    batches = [(images[i], labels[i]) for i in picks]

    models = {"no remat": build(options, lambda block: block), "remat": build(options, statetx.remat)}
    with brainstate.environ.context(fit=True):
        memory = {name: memory_of(step, *batches[0]) for name, (_, step) in models.items()}
        statistics = {}
        for name, (model, step) in models.items():  # after one step, since training amplifies rounding
            step(*batches[0])
            statistics[name] = read_statistics(model)
        runs = train({name: step for name, (_, step) in models.items()}, batches[1:], progress)
    for name, (model, _) in models.items():
        runs[name] |= {"temporary_bytes": memory[name], "statistics": statistics[name]}
        runs[name] |= judge(model, unseen, unseen_labels)

    plain, remat = runs.values()
    pairs = [(plain["statistics"][path], remat["statistics"][path]) for path in plain["statistics"]]
    difference = max(float(np.max(np.abs(np.subtract(a, b))) / np.max(np.abs(a))) for a, b in pairs)
    table = Table("", *runs, title=f"{options.blocks} blocks of {options.channels} channels, {options.updates} steps")
    table.add_row("temporary memory of a step", *(show_bytes(r["temporary_bytes"]) for r in runs.values()))
    table.add_row("median time of a step", *(f"{r['step_seconds']:.3f} s" for r in runs.values()))
    table.add_section()
    table.add_row("writes of each statistic", *(", ".join(map(str, r["writes"])) for r in runs.values()))
    table.add_row("statistics after a step differ by", "", show_difference(difference))
    table.add_row("last loss, nats", *(f"{r['losses'][-1]:.6f}" for r in runs.values()))
    table.add_row("held-out digits right", *(f"{r['accuracy']:.1%}" for r in runs.values()))
    return table, draw(runs, pairs, difference), {"runs": runs, "statistics_difference": difference}


def draw(runs, pairs, difference):
    """Draw the losses over each other, the statistics against each other, and memory."""
    figure = Figure(figsize=(13, 4.2), layout="constrained")
    losses, statistics, memory = figure.subplots(1, 3)
    for (name, fitted), width in zip(runs.items(), (5, 1.5), strict=True):
        label = f"{name}: {fitted['accuracy']:.1%} of held-out digits"
        losses.plot(fitted["losses"], color=COLOURS[name], linewidth=width, label=label)
    losses.legend(frameon=False)
    tidy(losses, xlabel="training step", ylabel="loss [nats]", yscale="log", title="training")
    plain, remat = (np.concatenate(side) for side in zip(*pairs, strict=True))
    statistics.axline((0, 0), slope=1, color="black", linewidth=0.6)
    statistics.plot(plain, remat, ".", color=BLUE, markersize=4)
    title = f"{len(plain)} statistics after one step differ by {show_difference(difference)}"
    tidy(statistics, xlabel="no remat", ylabel="remat", title=title)
    bars = memory.bar(
        list(runs), [r["temporary_bytes"] / MIB for r in runs.values()], color=COLOURS.values(), width=0.6
    )
    memory.bar_label(
        bars, [f"{show_bytes(r['temporary_bytes'])}\n{r['step_seconds']:.3f} s" for r in runs.values()], padding=3
    )
    memory.margins(y=0.2)
    tidy(memory, ylabel="temporary memory [MiB]", title="memory and time of a training step")
    return figure


if __name__ == "__main__":
    run(make_options(), example, updates=10, blocks=2, channels=8, batch=64)
