"""Learn learning rates and weight decays by the gradient through a whole training run.

A small classifier of scikit-learn's digits is trained by plain gradient descent, hundreds of steps in one
`statetx.scan`. Each layer has its own learning rate, which moves from a first to a last value, and its own weight
decay. These settings are parameters too: the loss on validation images after the last inner step is differentiated
with respect to them, through every inner step and its gradient. The weights are states that each inner step writes
and that each run resets; with ``checkpoint=`` the outer gradient stores the weights of a few steps only.

Expect better settings than the initial ones, judged by test images that neither loop has seen; an outer gradient that
agrees with a finite difference; and a small part of the memory that storing all inner steps needs.
"""

from _common import (
    BLUE,
    GREEN,
    ORANGE,
    bar_chart,
    between,
    legend_below,
    make_parser,
    memory_of,
    parse,
    run,
    show_bytes,
    show_seconds,
    tidy,
    train,
)


def make_options():
    """Describe the options."""
    parser = make_parser(__doc__, "hypergradient")
    add = parser.add_argument
    add("--updates", type=between(int), default=50, help="steps of the outer optimizer")
    add("--inner", type=between(int, 3), default=300, help="training steps that are differentiated")
    add("--hidden", type=between(int), default=64, help="units of the two hidden layers")
    add("--images", type=between(int, 15, 1000), default=250, help="training images; few, so that settings matter")
    add("--rate", type=between(float), default=0.03, help="first learning rate of every layer")
    add("--decay", type=between(float), default=1e-3, help="first weight decay of every layer")
    add("--lr", type=between(float), default=0.1, help="first learning rate of the outer optimizer, Adam on logarithms")
    return parser


if __name__ == "__main__":  # before the large imports, so that --help and mistakes are answered at once
    parser = make_options()
    options = parse(parser, seconds=15, updates=12, inner=40, hidden=16, images=200)

import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import statetx

LAYERS = ["input", "hidden", "output"]
COLORS = dict(zip(LAYERS, (ORANGE, BLUE, GREEN), strict=True))


class Trainer:
    """A classifier with its training run, and the settings of that run."""

    def __init__(self, options, data, checkpoint):
        self.data, self.checkpoint, self.inner = data, checkpoint, options.inner
        sizes = [64, options.hidden, options.hidden, 10]
        keys = jax.random.split(jax.random.key(options.seed), len(LAYERS))
        normal = jax.nn.initializers.he_normal()
        shapes = zip(LAYERS, keys, sizes, sizes[1:], strict=False)
        self.first = {name: normal(key, (rows, columns)) for name, key, rows, columns in shapes}
        self.weights = {name: statetx.Param(value) for name, value in self.first.items()}
        rng = np.random.default_rng(options.seed)
        self.batches = rng.integers(options.images, size=(options.inner, 64))
        zeros = np.zeros(len(LAYERS), np.float32)
        self.settings = {  # logarithms; rates move from a first to a last one
            "first rate": statetx.Param(zeros + np.log(options.rate)),
            "last rate": statetx.Param(zeros + np.log(options.rate)),
            "decay": statetx.Param(zeros + np.log(options.decay)),
        }

    def logits(self, images):
        *hidden, last = self.weights.values()
        for weight in hidden:
            images = jax.nn.relu(images @ weight.value)
        return images @ last.value

    def loss(self, images, labels):
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(self.logits(images), labels))

    def rates(self):
        """Return the learning rates [inner, layers], geometric from the first to the last."""
        part = jnp.linspace(0.0, 1.0, self.inner)[:, None]
        first, last = (self.settings[name].value[None] for name in ("first rate", "last rate"))
        return jnp.exp(first + part * (last - first))

    def inner_step(self, carry, step):
        rates, batch = step
        images, labels = (jnp.asarray(part)[batch] for part in self.data["train"])
        loss, grads = statetx.value_and_grad(self.loss, wrt=self.weights)(images, labels)
        decays = jnp.exp(self.settings["decay"].value)
        for name, rate, decay in zip(LAYERS, rates, decays, strict=True):
            weight = self.weights[name]
            weight.value -= rate * (grads[name] + decay * weight.value)
        return carry, loss

    def fit(self):
        """Train, starting at the first weights; return the losses of all steps."""
        for name, weight in self.weights.items():
            weight.value = self.first[name]
        return statetx.scan(self.inner_step, None, (self.rates(), self.batches), checkpoint=self.checkpoint)[1]

    def objective(self):
        """Return the loss on the validation images after training."""
        self.fit()
        return self.loss(*self.data["validation"])


def load_data(options):
    """Return images and labels in three parts: training, validation of the settings, and test."""
    images, labels = load_digits(return_X_y=True)
    images, labels = (images / 16).astype(np.float32), labels.astype(np.int32)
    names = "train", "validation", "test"
    first = train_test_split(images, labels, train_size=options.images, random_state=options.seed, stratify=labels)
    rest = train_test_split(first[1], first[3], test_size=0.5, random_state=options.seed, stratify=first[3])
    return dict(zip(names, [(first[0], first[2]), (rest[0], rest[2]), (rest[1], rest[3])], strict=True))


def judge(trainer):
    """Train with the current settings; return losses, test accuracy, rates and decays."""
    losses = trainer.fit()
    images, labels = trainer.data["test"]
    return {
        "inner_losses": np.asarray(losses).tolist(),
        "validation_loss": float(trainer.loss(*trainer.data["validation"])),
        "test_accuracy": float(np.mean(np.argmax(trainer.logits(images), 1) == labels)),
        "rates": np.asarray(trainer.rates()).tolist(),
        "decays": np.exp(trainer.settings["decay"].value).tolist(),
    }


def check_gradient(trainer, gradient, size=0.1):
    """Return the slope along the gradient, from the gradient and from a central difference.

    The weights jump where a step crosses a kink of the ReLU, so a difference over a small distance is noise: with
    ``--quick`` it is off by 61% at 0.005, 9% at 0.02, 3% at 0.1.
    """
    _, grads = gradient()
    norm = float(np.linalg.norm(list(grads.values())))
    before = {name: state.value for name, state in trainer.settings.items()}
    ends = []
    for step in size, -size, 0:
        for name, state in trainer.settings.items():
            state.value = before[name] + step * grads[name] / norm
        ends.append(float(gradient()[0]))
    return {"gradient": norm, "differences": (ends[0] - ends[1]) / (2 * size)}


def example(options, progress, results):
    """Measure, check and learn; judge the settings before and after."""
    data = load_data(options)
    memory = results["temporary_bytes"] = {}
    for name, checkpoint in ("all steps", None), ("slots", statetx.policies.Slots(16)):
        trainer = Trainer(options, data, checkpoint)
        gradient = statetx.jit(statetx.value_and_grad(trainer.objective, wrt=trainer.settings))
        memory[name] = memory_of(gradient)
    adam = optax.adam(optax.cosine_decay_schedule(options.lr, options.updates))
    optimizer = statetx.Optimizer(adam, trainer.settings)

    def update():
        loss, grads = gradient()
        optimizer.update(grads)
        return loss

    slopes = results["slopes"] = check_gradient(trainer, gradient)
    judged = {"before": judge(trainer)}
    results |= judged
    learned = train({"settings": update}, [()] * options.updates, progress, results)["settings"]
    judged["after"] = results["after"] = judge(trainer)

    table = Table("", *judged, title=f"Settings learned through {options.inner} training steps")
    table.add_row("validation loss, nats", *(f"{j['validation_loss']:.4f}" for j in judged.values()))
    table.add_row("accuracy on test images", *(f"{j['test_accuracy']:.1%}" for j in judged.values()))
    for i, layer in enumerate(LAYERS):
        moves = (f"{j['rates'][0][i]:.3f} to {j['rates'][-1][i]:.3f}" for j in judged.values())
        table.add_row(f"learning rate, {layer} layer", *moves)
        table.add_row(f"weight decay, {layer} layer", *(f"{j['decays'][i]:.1e}" for j in judged.values()))
    table.add_section()
    table.add_row("slope: gradient, difference", f"{slopes['gradient']:.4f}, {slopes['differences']:.4f}", "")
    table.add_row("memory: all steps stored, slots", show_bytes(memory["all steps"]), show_bytes(memory["slots"]))
    table.add_row("time of an outer step", "", show_seconds(learned["step_seconds"]))
    return table, draw(learned["losses"], judged, memory, options)


def draw(losses, judged, memory, options):
    """Draw the outer and inner losses, the learned rates, and memory."""
    figure = Figure(figsize=(13, 8.5), layout="constrained")
    (outer, inner), (rates, bytes_) = figure.subplots(2, 2)
    outer.plot(range(1, len(losses) + 1), losses, color="black")
    labels = {"ylabel": "validation loss after training [nats]", "title": "learning the settings"}
    tidy(outer, counts="x", xlabel="outer step", **labels)
    steps = range(1, options.inner + 1)
    for (name, result), color in zip(judged.items(), (ORANGE, GREEN), strict=True):
        label = f"{name}: test accuracy {result['test_accuracy']:.1%}"
        inner.plot(steps, result["inner_losses"], color=color, label=label, linewidth=1)
    tidy(inner, counts="x", xlabel="inner step", ylabel="training loss [nats]", yscale="log", title="training runs")
    legend_below(inner, columns=2)
    for layer, values, width in zip(LAYERS, np.transpose(judged["after"]["rates"]), (5, 3, 1.2), strict=True):
        rates.plot(steps, values, color=COLORS[layer], linewidth=width, label=f"{layer} layer")
    rates.axhline(options.rate, color="black", linestyle=":", label="before, all layers")
    tidy(rates, counts="x", xlabel="inner step", ylabel="learning rate", yscale="log", title="learned learning rates")
    legend_below(rates, columns=4)
    title = f"temporary memory of a gradient through {options.inner} steps"
    bar_chart(bytes_, memory, {"all steps": ORANGE, "slots": GREEN}, show_bytes, title=title, yticks=[])
    return figure


if __name__ == "__main__":
    run(parser, options, example)
