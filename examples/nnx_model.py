"""Train a flax.nnx vision transformer with statetx's transforms on its bound methods.

The model is plain nnx: layer norms, attention, dropout with its random streams, a metric that it updates, an
optimiser of nnx. The transforms are statetx's: blocks are called through `statetx.remat`, the loss is a bound method
under `statetx.value_and_grad`, the training step a bound method under `statetx.jit`. There is no graph to split and
merge: a transform finds the Variables that a call reads and writes.

The same model is trained with and without rematerialisation. Expect the same losses up to rounding, since dropout is
the same when a block is computed again and its random stream advances once a step, and a fraction of the memory.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _common import (
    BLUE,
    MIB,
    ORANGE,
    BadInput,
    between,
    make_parser,
    memory_of,
    run,
    show_bytes,
    show_difference,
    tidy,
    train,
)
from flax import nnx
from matplotlib.figure import Figure
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import statetx

COLOURS = {"no remat": ORANGE, "remat": BLUE}


def make_options():
    """Describe the options."""
    parser = make_parser(__doc__, "nnx_model")
    add = parser.add_argument
    add("--updates", type=between(int), default=120, help="training steps of each run")
    add("--blocks", type=between(int), default=6, help="transformer blocks")
    add("--width", type=between(int), default=64, help="features of a block, a multiple of 16")
    add("--batch", type=between(int, 1, 1438), default=128, help="images in a batch")
    add("--dropout", type=between(float, -1e-9, 1), default=0.1, help="part of the activations that is dropped")
    add("--lr", type=between(float), default=0.001, help="learning rate of AdamW")
    return parser


class Block(nnx.Module):
    """Attention and a feed-forward part, each with a norm before and dropout after."""

    def __init__(self, width, dropout, rngs):
        self.norms = nnx.List([nnx.LayerNorm(width, rngs=rngs) for _ in range(2)])
        self.attention = nnx.MultiHeadAttention(width // 16, width, decode=False, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)
        self.dropout = nnx.Dropout(dropout, rngs=rngs)

    def __call__(self, x):
        x = x + self.dropout(self.attention(self.norms[0](x)))
        return x + self.dropout(self.down(nnx.gelu(self.up(self.norms[1](x)))))


class Classifier(nnx.Module):
    """A transformer over the sixteen patches, of 2 by 2 pixels, of a digit."""

    def __init__(self, options, wrap, rngs):
        self.wrap = wrap
        self.patches = nnx.Linear(4, options.width, rngs=rngs)
        self.places = nnx.Param(0.1 * jax.random.normal(rngs.params(), (1, 16, options.width)))
        self.blocks = nnx.List([Block(options.width, options.dropout, rngs) for _ in range(options.blocks)])
        self.readout = nnx.Linear(options.width, 10, rngs=rngs)
        self.accuracy = nnx.metrics.Accuracy()

    def __call__(self, images):
        patches = images.reshape(-1, 4, 2, 4, 2).swapaxes(2, 3).reshape(-1, 16, 4)
        x = self.patches(patches) + self.places[...]
        for block in self.blocks:
            x = self.wrap(block)(x)
        return self.readout(jnp.mean(x, axis=1))

    def loss(self, images, labels):
        logits = self(images)
        self.accuracy.update(logits=logits, labels=labels)
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels))


class Trainer:
    """A model and its optimiser."""

    def __init__(self, options, wrap):
        self.model = Classifier(options, wrap, nnx.Rngs(options.seed))
        self.optimiser = nnx.Optimizer(self.model, optax.adamw(options.lr), wrt=nnx.Param)

    def step(self, images, labels):
        weights = nnx.state(self.model, nnx.Param)  # gradients come in this structure
        loss, grads = statetx.value_and_grad(self.model.loss, wrt=weights)(images, labels)
        self.optimiser.update(self.model, jax.tree.map(nnx.Param, grads))  # nnx's optimiser wants Variables
        return loss


def judge(model, unseen, labels):
    """Return how well a model does, and how often each of its dropouts has drawn."""
    streams = statetx.states(model.blocks, nnx.RngCount)
    draws = sorted({int(count[...]) for path, count in streams.items() if "dropout" in path})
    on_the_way = float(model.accuracy.compute())
    model.eval()  # dropout is off
    predicted = np.argmax(model(unseen), axis=1)
    return {"draws": draws, "training_accuracy": on_the_way, "accuracy": float(np.mean(predicted == labels))}


def example(options, progress):
    """Train with and without rematerialisation, and compare."""
    if options.width % 16:
        raise BadInput(f"--width {options.width} is no multiple of 16, the width of a head")
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32)
    split = {"test_size": 360, "random_state": options.seed, "stratify": labels}
    images, unseen, labels, unseen_labels = train_test_split(images, labels.astype(np.int32), **split)
    rng = np.random.default_rng(options.seed)
    picks = [rng.choice(len(images), options.batch, replace=False) for _ in range(options.updates)]
    batches = [(images[i], labels[i]) for i in picks]

    trainers = {"no remat": Trainer(options, lambda block: block), "remat": Trainer(options, statetx.remat)}
    steps = {name: statetx.jit(trainer.step) for name, trainer in trainers.items()}
    memory = {name: memory_of(step, *batches[0]) for name, step in steps.items()}
    runs = train(steps, batches, progress)
    for name, trainer in trainers.items():
        runs[name] |= {"temporary_bytes": memory[name]} | judge(trainer.model, unseen, unseen_labels)

    plain, remat = (np.array(r["losses"]) for r in runs.values())
    difference = float(np.max(np.abs(remat / plain - 1)))
    table = Table("", *runs, title=f"{options.blocks} blocks of {options.width} features, {options.updates} steps")
    table.add_row("temporary memory of a step", *(show_bytes(r["temporary_bytes"]) for r in runs.values()))
    table.add_row("median time of a step", *(f"{r['step_seconds']:.3f} s" for r in runs.values()))
    table.add_section()
    table.add_row("draws of each dropout", *(", ".join(map(str, r["draws"])) for r in runs.values()))
    table.add_row("losses differ, relatively, by", "", show_difference(difference))
    table.add_row("last loss, nats", *(f"{r['losses'][-1]:.6f}" for r in runs.values()))
    table.add_row("training digits right, on the way", *(f"{r['training_accuracy']:.1%}" for r in runs.values()))
    table.add_row("held-out digits right", *(f"{r['accuracy']:.1%}" for r in runs.values()))
    return table, draw(runs, difference), {"runs": runs, "loss_difference": difference}


def draw(runs, difference):
    """Draw the losses over each other, and memory and operations."""
    figure = Figure(figsize=(13, 4.2), layout="constrained")
    losses, memory, times = figure.subplots(1, 3, width_ratios=(1.6, 1, 1))
    for (name, fitted), width in zip(runs.items(), (5, 1.5), strict=True):
        label = f"{name}: {fitted['accuracy']:.1%} of held-out digits"
        losses.plot(fitted["losses"], color=COLOURS[name], linewidth=width, label=label)
    losses.legend(frameon=False)
    title = f"training: losses differ by {show_difference(difference)}"
    tidy(losses, xlabel="training step", ylabel="loss [nats]", yscale="log", title=title)
    for axes, key, unit in (memory, "temporary_bytes", MIB), (times, "step_seconds", 1):
        bars = axes.bar(list(runs), [r[key] / unit for r in runs.values()], color=COLOURS.values(), width=0.6)
        axes.bar_label(bars, fmt="{:,.3f}", padding=3)
        axes.margins(y=0.15)
    tidy(memory, ylabel="temporary memory of a training step [MiB]", title="memory")
    tidy(times, ylabel="median time of a training step [s]", title="time")
    return figure


if __name__ == "__main__":
    run(make_options(), example, updates=8, blocks=2, width=16, batch=32)
