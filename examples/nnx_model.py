"""Train a flax.nnx vision transformer with statetx's transforms on its bound methods.

The model is plain nnx: layer norms, attention, dropout with its random streams, a metric that the loss updates. One
decorator is added, `@statetx.remat` on the call of a block. The other transforms are statetx's too: the loss is a bound
method under `statetx.value_and_grad`, and `statetx.Optimizer` updates the Params inside of `statetx.jit`. No graph is
split and merged: a transform finds the Variables that a call reads and writes.

The same model is trained with and without rematerialization. Expect the same losses up to rounding, because a block
that is computed again draws the same dropout and its random stream advances once per step, and a fraction of the memory.
"""

from _common import (
    BLUE,
    ORANGE,
    BadInput,
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
    parser = make_parser(__doc__, "nnx_model")
    add = parser.add_argument
    add("--updates", type=between(int), default=120, help="training steps of each run")
    add("--blocks", type=between(int), default=6, help="transformer blocks")
    add("--width", type=between(int), default=64, help="features of a block, a multiple of 16")
    add("--batch", type=between(int, 1, 1438), default=128, help="images in a batch")
    add("--dropout", type=between(float, -1e-9, 1), default=0.1, help="fraction of the activations that is dropped")
    add("--lr", type=between(float), default=0.001, help="learning rate of AdamW")
    return parser


if __name__ == "__main__":  # before the large imports, so that --help and mistakes are answered at once
    parser = make_options()
    options = parse(parser, seconds=22, updates=8, blocks=2, width=16, batch=32)

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from matplotlib.figure import Figure
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import statetx

COLORS = {"no remat": ORANGE, "remat": BLUE}


class Block(nnx.Module):
    """Attention and a feed-forward part, each with a norm before and dropout after."""

    def __init__(self, width, dropout, rngs):
        self.norms = nnx.List([nnx.LayerNorm(width, rngs=rngs) for _ in range(2)])
        self.attention = nnx.MultiHeadAttention(width // 16, width, decode=False, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)
        self.dropout = nnx.Dropout(dropout, rngs=rngs)

    @statetx.remat
    def __call__(self, x):
        x = x + self.dropout(self.attention(self.norms[0](x)))
        return x + self.dropout(self.down(nnx.gelu(self.up(self.norms[1](x)))))


class PlainBlock(Block):
    """The same without rematerialization, for comparison."""

    __call__ = Block.__call__.__wrapped__


class Classifier(nnx.Module):
    """A transformer over the sixteen patches, of 2 by 2 pixels, of a digit."""

    def __init__(self, options, make_block, rngs):
        self.patches = nnx.Linear(4, options.width, rngs=rngs)
        self.places = nnx.Param(0.1 * jax.random.normal(rngs.params(), (1, 16, options.width)))
        self.blocks = nnx.List([make_block(options.width, options.dropout, rngs) for _ in range(options.blocks)])
        self.readout = nnx.Linear(options.width, 10, rngs=rngs)
        self.accuracy = nnx.metrics.Accuracy()

    def __call__(self, images):
        patches = images.reshape(-1, 4, 2, 4, 2).swapaxes(2, 3).reshape(-1, 16, 4)
        x = self.patches(patches) + self.places[...]
        for block in self.blocks:
            x = block(x)
        return self.readout(jnp.mean(x, axis=1))

    def loss(self, images, labels):
        logits = self(images)
        self.accuracy.update(logits=logits, labels=labels)
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels))


def make_step(model, options):
    """Return the training step."""
    optimizer = statetx.Optimizer(optax.adamw(options.lr), statetx.states(model, nnx.Param))

    @statetx.jit
    def step(images, labels):
        loss, grads = statetx.value_and_grad(model.loss, wrt=optimizer.states)(images, labels)
        optimizer.update(grads)
        return loss

    return step


def judge(model, unseen, labels):
    """Return the accuracy, on the training digits and on unseen ones, and how often each dropout has drawn."""
    streams = statetx.states(model.blocks, nnx.RngCount)
    draws = sorted({int(count[...]) for path, count in streams.items() if "dropout" in path})
    training_accuracy = float(model.accuracy.compute())
    model.eval()  # switches dropout off
    predicted = np.argmax(model(unseen), axis=1)
    return {
        "draws": draws,
        "training_accuracy": training_accuracy,
        "accuracy": float(np.mean(predicted == labels)),
    }


def example(options, progress, results):
    """Train with and without rematerialization, and compare."""
    if options.width % 16:
        raise BadInput(f"--width {options.width} is not a multiple of 16, the width of a head")
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32)
    split = {"test_size": 360, "random_state": options.seed, "stratify": labels}
    images, unseen, labels, unseen_labels = train_test_split(images, labels.astype(np.int32), **split)
    rng = np.random.default_rng(options.seed)
    picks = [rng.choice(len(images), options.batch, replace=False) for _ in range(options.updates)]
    batches = [(images[i], labels[i]) for i in picks]

    blocks = {"no remat": PlainBlock, "remat": Block}
    models = {name: Classifier(options, block, nnx.Rngs(options.seed)) for name, block in blocks.items()}
    steps = {name: make_step(model, options) for name, model in models.items()}
    memory = {name: memory_of(step, *batches[0]) for name, step in steps.items()}
    runs = train(steps, batches, progress, results)
    for name, model in models.items():
        runs[name] |= {"temporary_bytes": memory[name]} | judge(model, unseen, unseen_labels)

    plain, remat = (np.array(r["losses"]) for r in runs.values())
    difference = float(np.max(np.abs(remat / plain - 1)))
    results["loss_difference"] = difference
    table = Table("", *runs, title=f"{options.blocks} blocks of {options.width} features, {options.updates} steps")
    table.add_row("temporary memory of a step", *(show_bytes(r["temporary_bytes"]) for r in runs.values()))
    table.add_row("median time of a step", *(show_seconds(r["step_seconds"]) for r in runs.values()))
    table.add_section()
    table.add_row("draws of each dropout", *(", ".join(map(str, r["draws"])) for r in runs.values()))
    table.add_row("relative difference of losses", "", show_difference(difference))
    table.add_row("last loss, nats", *(f"{r['losses'][-1]:.6f}" for r in runs.values()))
    table.add_row("accuracy during training", *(f"{r['training_accuracy']:.1%}" for r in runs.values()))
    table.add_row("accuracy on held-out digits", *(f"{r['accuracy']:.1%}" for r in runs.values()))
    return table, draw(runs, difference)


def draw(runs, difference):
    """Draw the losses over each other, and memory and time of a step."""
    figure = Figure(figsize=(13, 4.5), layout="constrained")
    losses, memory, times = figure.subplots(1, 3, width_ratios=(1.6, 1, 1))
    plot_losses(losses, runs, COLORS, {name: f"{name}: accuracy {r['accuracy']:.1%}" for name, r in runs.items()})
    title = f"training: relative difference of losses {show_difference(difference)}"
    tidy(losses, counts="x", xlabel="training step", ylabel="loss [nats]", yscale="log", title=title)
    legend_below(losses, columns=2)
    bytes_ = {name: r["temporary_bytes"] for name, r in runs.items()}
    bar_chart(memory, bytes_, COLORS, show_bytes, title="temporary memory of a training step", yticks=[])
    seconds = {name: r["step_seconds"] for name, r in runs.items()}
    bar_chart(times, seconds, COLORS, show_seconds, title="median time of a training step", yticks=[])
    return figure


if __name__ == "__main__":
    run(parser, options, example)
