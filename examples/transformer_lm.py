"""Train a deep character-level transformer within a memory budget, by a plan.

Layers are made one by one and stacked (`statetx.stack`), so that a deep model is traced and compiled like one layer.
Weights are float32 states; layers compute in bfloat16. Each layer has its own `statetx.RngState` for dropout. The text
is Python's language reference, which is part of every Python (`pydoc_data.topics`).

Three ways to take the gradient are compared: no rematerialization, every layer rematerialized (`statetx.remat_scan`),
and a plan (`statetx.plan`), which chooses the values to store under ``--budget`` and compiles its choice to verify the
memory. The first losses of all three are equal up to the rounding of bfloat16, since recomputation draws the same
dropout. Expect the plan to stay within its budget and to add fewer operations than rematerializing every layer.
Planning compiles about forty small programs, which takes about a minute.
"""

from _common import (
    BLUE,
    GREEN,
    MIB,
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


def budget(text):
    """Read a budget as `statetx.plan` takes it: a size, or a fraction of the memory without rematerialization."""
    return text if text.endswith("B") else between(float)(text)


def make_options():
    """Describe the options."""
    parser = make_parser(__doc__, "transformer_lm")
    add = parser.add_argument
    add("--compared", type=between(int), default=10, help="training steps of all three, in turns")
    add("--updates", type=between(int), default=60, help="further training steps of the planned model")
    add("--layers", type=between(int), default=8, help="transformer layers")
    add("--width", type=between(int), default=128, help="features of a layer, a multiple of 32")
    add("--context", type=between(int), default=128, help="characters that the model sees")
    add("--batch", type=between(int), default=12, help="windows in a batch")
    add("--dropout", type=between(float, -1e-9, 1), default=0.1, help="fraction of the activations that is dropped")
    add("--compute", choices=["bfloat16", "float32"], default="bfloat16", help="dtype of the computations in layers")
    budgets = 'temporary memory: "100MiB", or a fraction of the memory without rematerialization'
    add("--budget", type=budget, default="0.25", help=budgets)
    add("--lr", type=between(float), default=0.001, help="learning rate of Adam")
    return parser


if __name__ == "__main__":  # before the large imports, so that --help and mistakes are answered at once
    small = {"layers": 4, "width": 32, "context": 32, "batch": 4, "compute": "float32", "budget": "0.5"}
    parser = make_options()
    options = parse(parser, seconds=30, compared=4, updates=12, **small)

import pydoc_data.topics

import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure
from rich.table import Table

import statetx

COLORS = {"no remat": ORANGE, "each layer": BLUE, "plan": GREEN}


class Layer:
    """Attention and a feed-forward part, each with a norm before and dropout after."""

    def __init__(self, width, dropout, dtype, key):
        self.dropout, self.dtype, self.heads = dropout, dtype, width // 32
        normal = jax.nn.initializers.lecun_normal()
        shapes = {
            "qkv": (width, 3 * width),
            "join": (width, width),
            "up": (width, 4 * width),
            "down": (4 * width, width),
        }
        self.weights = {name: statetx.Param(normal(key.next(), shape)) for name, shape in shapes.items()}
        self.scales = [statetx.Param(jnp.ones(width)), statetx.Param(jnp.ones(width))]
        self.rng = statetx.RngState(key.next())

    def __call__(self, x):
        q, k, v = jnp.split(self.project(self.norm(x, 0), "qkv").reshape(*x.shape[:2], self.heads, -1), 3, axis=-1)
        attended = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.project(attended.reshape(x.shape), "join"))
        hidden = jax.nn.gelu(self.project(self.norm(x, 1), "up"))
        return x + self.drop(self.project(hidden, "down"))

    def project(self, x, name):
        return x @ self.weights[name].value.astype(self.dtype)

    def norm(self, x, i):
        x = x.astype(jnp.float32)  # a mean of squares needs the precision
        scaled = x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6) * self.scales[i].value
        return scaled.astype(self.dtype)

    def drop(self, x):
        keep = 1 - self.dropout
        return jnp.where(jax.random.bernoulli(self.rng.next(), keep, x.shape), x / jnp.asarray(keep, x.dtype), 0)


class LanguageModel:
    """Predicts the next character from the previous ones; `wrap` makes the function that applies the stack of
    layers.
    """

    def __init__(self, vocabulary, options, wrap=lambda layers: layers):
        key = statetx.RngState(options.seed)
        self.dtype = jnp.dtype(options.compute)
        self.characters = statetx.Param(jax.random.normal(key.next(), (vocabulary, options.width)))
        self.places = statetx.Param(0.1 * jax.random.normal(key.next(), (options.context, options.width)))
        make_layer = lambda: Layer(options.width, options.dropout, self.dtype, key)
        self.layers = statetx.stack(make_layer, options.layers)
        self.apply_layers = wrap(self.layers)
        self.readout = statetx.Param(jnp.zeros((options.width, vocabulary)))

    def loss(self, window):
        """Return the mean cross-entropy over windows [batch, context + 1], in nats per character."""
        x = (self.characters.value[window[:, :-1]] + self.places.value[None]).astype(self.dtype)
        logits = self.apply_layers(x).astype(jnp.float32) @ self.readout.value
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, window[:, 1:]))


def make_step(model, options, plan=None):
    """Return the training step; with a plan, its gradient stores the values that the plan selects."""
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(options.lr))
    optimizer = statetx.Optimizer(tx, statetx.states(model, statetx.Param))
    loss = plan.apply(model.loss) if plan else model.loss

    @statetx.jit
    def step(window):
        value, grads = statetx.value_and_grad(loss, wrt=optimizer.states)(window)
        optimizer.update(grads)
        return value

    return step


def sample_windows(options):
    """Return the training batches [batch, context + 1], and the number of different characters."""
    topics = pydoc_data.topics.topics
    text = np.array(list("".join(topics[name] for name in sorted(topics))))
    vocabulary, ids = np.unique(text, return_inverse=True)
    if len(ids) <= options.context:
        raise BadInput(f"--context {options.context} is more than the text has, {len(ids)} characters")
    rng = np.random.default_rng(options.seed)
    starts = rng.integers(len(ids) - options.context, size=(options.compared + options.updates, options.batch, 1))
    return ids[starts + np.arange(options.context + 1)].astype(np.int32), len(vocabulary)


def make_plan(model, window, options, progress):
    """Return a plan for the gradient of the model's loss under the budget."""
    task = progress.add_task("planning", total=None, status=f"budget {options.budget}")
    try:
        plan = statetx.plan(model.loss, window, budget=options.budget, of="temporaries")
    except statetx.StatetxError as error:  # not a budget, or too small
        raise BadInput(f"--budget {options.budget}: {error}") from error
    status = f"{show_bytes(plan.temp_bytes)} of {show_bytes(plan.budget_bytes)}"
    progress.update(task, total=1, completed=1, status=status)
    return plan


def example(options, progress, results):
    """Plan, train three ways, and compare."""
    if options.width % 32:
        raise BadInput(f"--width {options.width} is not a multiple of 32, the width of a head")
    windows, vocabulary = sample_windows(options)
    plan = make_plan(LanguageModel(vocabulary, options), windows[0], options, progress)
    results |= {"budget_bytes": plan.budget_bytes, "planned_bytes": plan.temp_bytes, "curve": plan.curve}
    ways = {"no remat": {}, "each layer": {"wrap": lambda layers: statetx.remat_scan(layers, len(layers))}, "plan": {}}
    steps, memory = {}, {}
    for name, how in ways.items():
        model = LanguageModel(vocabulary, options, **how)
        steps[name] = make_step(model, options, plan if name == "plan" else None)
        memory[name] = memory_of(steps[name], windows[0])

    batches = [(window,) for window in windows]
    compared = options.compared
    runs = train(steps, batches[:compared], progress, results)
    plain = np.array(runs["no remat"]["losses"])
    for name, trained in runs.items():
        trained["temporary_bytes"] = memory[name]
        trained["loss_difference"] = float(np.max(np.abs(trained["losses"] / plain - 1)))
    train({"plan": steps["plan"]}, batches[compared:], progress, results)

    table = Table("", *runs, title=f"{options.layers} layers of {options.width} features in {options.compute}")
    table.add_row("temporary memory of a step", *(show_bytes(r["temporary_bytes"]) for r in runs.values()))
    table.add_row("median time of a step", *(show_seconds(r["step_seconds"]) for r in runs.values()))
    table.add_row("relative difference of losses", *(show_difference(r["loss_difference"]) for r in runs.values()))
    losses = (f"{r['losses'][compared - 1]:.3f}" for r in runs.values())
    table.add_row(f"nats/character, step {compared}", *losses)
    table.add_row(f"nats/character, step {len(batches)}", "", "", f"{runs['plan']['losses'][-1]:.3f}")
    return table, draw(runs, plan, options)


def draw(runs, plan, options):
    """Draw the losses over each other, memory and time of a step, and the curve of memory against operations."""
    figure = Figure(figsize=(13, 4.7), layout="constrained")
    losses, memory, curve = figure.subplots(1, 3)
    plot_losses(losses, runs, COLORS)
    title = f"training; all three for {options.compared} steps"
    tidy(losses, counts="x", xlabel="training step", ylabel="loss [nats per character]", title=title)
    legend_below(losses, columns=3)
    bytes_ = {name: r["temporary_bytes"] for name, r in runs.items()}
    bar_chart(memory, bytes_, COLORS, show_bytes, title="temporary memory and time of a training step", yticks=[])
    memory.set_xticks(range(len(runs)), [f"{name}\n{show_seconds(r['step_seconds'])}" for name, r in runs.items()])
    points = ((b / MIB, 100 * x) for b, x in plan.curve)
    curve.plot(*zip(*points, strict=True), ".-", color=GREEN, label="possible plans")
    curve.plot(plan.temp_bytes / MIB, 100 * plan.extra_flops, "o", color=GREEN, label="this plan")
    curve.axvline(plan.budget_bytes / MIB, color="black", linestyle=":", label="budget")
    labels = {"xlabel": "memory of the loss and its gradient [MiB]", "ylabel": "operations added [%]"}
    tidy(curve, **labels, title="operations against memory")
    legend_below(curve, columns=3)
    figure.suptitle(f"{options.layers} layers of {options.width} features, {options.compute}", fontweight="bold")
    return figure


if __name__ == "__main__":
    run(parser, options, example)
