"""Train a character-level recurrent model through thousands of steps, with and without rematerialization.

Rematerialization (also called gradient checkpointing or activation checkpointing) stores some of the values that the
backward pass needs, and computes the others again. The text is Python's language reference, which is part of every
Python (`pydoc_data.topics`). Backpropagation runs through the whole of each window, 2,048 characters by default, and
the hidden state of the cell is a `brainstate.HiddenState` that every one of these steps writes.

Three runs train the same model from the same seed:

- plain: the backward pass needs the values of every step, so memory grows with the length T;
- nested: about sqrt(T) chunks of about sqrt(T) steps, where chunks and steps are rematerialized. About 2 sqrt(T) hidden
  states and the activations of one step are stored at any time, for two more forward passes (Chen et al. 2016,
  "Training deep nets with sublinear memory cost");
- scheduled: a fixed number of hidden states is stored, in slots, and the number of recomputed steps is minimal for it
  (Griewank and Walther 2000, "Algorithm 799: revolve").

One more panel shows memory and time over the number of slots. Temporary memory does not rise with every slot, because
XLA can put the slots into the buffer of a result of the training step (a new weight or moment) that is not in use yet,
and result buffers are not temporary memory. With the default sizes a slot is 8 KiB. In XLA's buffer assignment 2 to 6
slots are in a result of 51.5 KiB (as large as the embedding), and 16 slots in a result of exactly 128 KiB (as large as
a weight of the cell). 7 to 15 slots fit into no unused result, so they are temporary: 97 KiB with 8 slots, 41 KiB with 16.
"""

import argparse
from pathlib import Path

from _common import (
    BLUE,
    GREEN,
    GREY,
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
    show_seconds,
    tidy,
    train,
)

COLORS = {"plain": ORANGE, "nested": BLUE, "scheduled": GREEN}
PLAIN, NESTED, SCHEDULED = COLORS
# Of jax.checkpoint_policies, without those that need arguments and those that move values to the host.
POLICIES = ["everything_saveable", "nothing_saveable", "dots_saveable", "dots_with_no_batch_dims_saveable"]


def make_options():
    """Describe the options."""
    parser = make_parser(__doc__, "train_long_sequence")
    add = parser.add_argument
    add("--steps", type=between(int), default=40, help="training steps of each run")
    add("--seq", type=between(int), default=2048, help="characters that the gradient goes back through")
    add("--batch", type=between(int), default=16, help="windows in a batch")
    add("--hidden", type=between(int), default=128, help="units of the cell")
    add("--cell", choices=["gru", "lif"], default="gru", help="recurrent cell; spikes of lif amplify rounding")
    add("--runs", nargs="+", choices=list(COLORS), default=list(COLORS), help="the runs to make")
    add("--slots", type=between(int), help="hidden states that the scheduled run stores; about sqrt(2 T) if not set")
    add("--curve", action=argparse.BooleanOptionalAction, default=True, help="measure memory and time over slot counts")
    add("--policy", choices=POLICIES, help="values that nested and scheduled steps store (of jax.checkpoint_policies)")
    add("--lr", type=between(float), default=0.003, help="learning rate of Adam")
    add("--text", type=Path, metavar="FILE", help="UTF-8 text to learn; Python's language reference if not set")
    return parser


if __name__ == "__main__":  # before the large imports, so that --help and mistakes are answered at once
    parser = make_options()
    options = parse(parser, seconds=15, seq=64, steps=2, hidden=8, batch=2, curve=False)

import math
import pydoc_data.topics
import statistics
import time

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure
from rich.table import Column, Table

import statetx


def load_text(path, seq):
    """Return the text as integers, and the number of distinct characters."""
    topics = pydoc_data.topics.topics
    text = path.read_text(encoding="utf-8") if path else "".join(topics[name] for name in sorted(topics))
    if len(text) <= seq:
        raise BadInput(f"--seq {seq} needs a text of at least {seq + 1} characters, got {len(text)}")
    vocabulary, ids = np.unique(np.array(list(text)), return_inverse=True)
    return ids.astype(np.int32), len(vocabulary)


def sample_windows(ids, options):
    """Yield one batch per training step, [seq + 1, batch]: evenly spaced windows, the first at a random place."""
    rng = np.random.default_rng(options.seed)
    places = np.arange(options.batch) * len(ids) // options.batch + np.arange(options.seq + 1)[:, None]
    for _ in range(options.steps):
        yield ids[(rng.integers(len(ids)) + places) % len(ids)]


@jax.custom_jvp
def spike(x):
    """Return 1 where x is above zero, else 0; the derivative is a surrogate, 1 / (1 + 5 |x|)^2 (a fast sigmoid)."""
    return (x > 0).astype(x.dtype)


@spike.defjvp
def spike_jvp(primals, tangents):
    (x,), (t,) = primals, tangents
    return spike(x), t / (1 + 5 * jnp.abs(x)) ** 2


class LIFCell(brainstate.nn.RNNCell):
    """Leaky integrate-and-fire neurons, coupled and read out through a leaky trace of their spikes.

    Rounding can flip a spike, so runs that differ in the order of a sum drift apart: their losses agree to
    1e-7 in the first training steps, and to 1e-3 after tens of them.
    """

    def __init__(self, num_in, num_out, decay=0.8):
        super().__init__()
        self.num_out, self.decay = num_out, decay
        self.current = brainstate.nn.Linear(num_in + num_out, num_out)

    def init_state(self, batch_size):
        self.v = brainstate.HiddenState(jnp.zeros((batch_size, self.num_out)))
        self.trace = brainstate.HiddenState(jnp.zeros((batch_size, self.num_out)))

    def reset_state(self, batch_size):
        self.v.value = self.trace.value = jnp.zeros((batch_size, self.num_out))

    def update(self, x):
        v = self.decay * self.v.value + self.current(jnp.concatenate([x, self.trace.value], axis=-1))
        spikes = spike(v - 1)
        self.v.value = v * (1 - jax.lax.stop_gradient(spikes))
        self.trace.value = self.decay * self.trace.value + (1 - self.decay) * spikes
        return self.trace.value


CELLS = {"gru": brainstate.nn.GRUCell, "lif": LIFCell}


class CharModel(brainstate.nn.Module):
    """Embedding, recurrent cell, linear readout: predicts the next character from the previous ones."""

    def __init__(self, cell, vocabulary, hidden, batch, checkpoint=None):
        super().__init__()
        self.batch, self.checkpoint = batch, checkpoint
        self.embedding = brainstate.nn.Embedding(vocabulary, hidden)
        self.cell = CELLS[cell](hidden, hidden)
        self.readout = brainstate.nn.Linear(hidden, vocabulary)
        self.cell.init_state(batch)

    def step(self, total, pair):
        """Read one character of each row and add the cross-entropy of the next one to the total."""
        character, following = pair
        logits = self.readout(self.cell(self.embedding(character)))
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, following)
        return total + jnp.mean(losses), None

    def loss(self, window):
        """Return the mean cross-entropy over a window [seq + 1, batch], in nats per character.

        `statetx.scan` finds the hidden state and carries it; `checkpoint` says how much is stored for the gradient.
        """
        self.cell.reset_state(self.batch)
        pairs = window[:-1], window[1:]
        total, _ = statetx.scan(self.step, jnp.zeros(()), pairs, checkpoint=self.checkpoint)
        return total / (len(window) - 1)


def strategies(options):
    """Return the checkpointing strategy of each run."""
    slots = options.slots or max(2, math.isqrt(2 * options.seq))
    return {
        PLAIN: None,
        NESTED: statetx.policies.Levels(2, policy=options.policy),
        SCHEDULED: statetx.policies.Slots(slots, policy=options.policy),
    }


def build(checkpoint, vocabulary, options):
    """Return the training step of a model made from the seed, its weights, and the step's temporary memory in bytes."""
    brainstate.random.seed(options.seed)
    model = CharModel(options.cell, vocabulary, options.hidden, options.batch, checkpoint)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(options.lr))
    optimizer = statetx.Optimizer(tx, statetx.states(model, brainstate.ParamState))

    @statetx.jit
    def step(window):
        loss, grads = statetx.value_and_grad(model.loss, wrt=optimizer.states)(window)
        optimizer.update(grads)
        return loss

    window = jnp.zeros((options.seq + 1, options.batch), jnp.int32)
    return step, optimizer.states, memory_of(step, window)


def measure_slots(window, vocabulary, options, progress):
    """Return memory and step time over slot counts, as a list of dicts; the counts take turns."""
    rounds, counts = 3, [n for n in (2, 4, 8, 16, 32, 64, 128, 256) if n <= max(2, options.seq // 4)]
    task = progress.add_task("slots", total=len(counts) * rounds, status="compiling")
    steps, memory = {}, {}
    for n in counts:
        steps[n], _, memory[n] = build(statetx.policies.Slots(n, policy=options.policy), vocabulary, options)
        steps[n](window)  # the first call may compile
    seconds = {n: [] for n in counts}
    for _ in range(rounds):
        for n, step in steps.items():
            start = time.perf_counter()
            jax.block_until_ready(step(window))
            seconds[n].append(time.perf_counter() - start)
            progress.update(task, advance=1, status=f"{n} slots")
    return [
        {"slots": n, "temporary_mib": memory[n] / MIB, "step_seconds": statistics.median(seconds[n])} for n in counts
    ]


def compare(plain, run, plain_weights, weights):
    """Return the ratios to the plain run, and the largest differences: relative for losses, absolute for weights."""
    pairs = zip(jax.tree.leaves(plain_weights), jax.tree.leaves(weights), strict=True)
    losses = np.array([plain["losses"], run["losses"]])
    return {
        "memory_ratio": plain["temporary_bytes"] / max(run["temporary_bytes"], 1),
        "time_ratio": run["step_seconds"] / plain["step_seconds"],
        "loss_difference": float(np.max(np.ptp(losses, 0) / np.maximum(losses[0], 1e-30))),
        "weight_difference": max(float(np.max(np.abs(p - q))) for p, q in pairs),
    }


def example(options, progress, results):
    """Train with each strategy, and compare."""
    ids, vocabulary = load_text(options.text, options.seq)
    batches = [(window,) for window in sample_windows(ids, options)]
    chosen = {name: checkpoint for name, checkpoint in strategies(options).items() if name in options.runs}
    built, task = {}, progress.add_task("compile", total=len(chosen), status="")
    for name, checkpoint in chosen.items():
        progress.update(task, status=name)
        built[name] = build(checkpoint, vocabulary, options)
        progress.advance(task)
    runs = train({name: step for name, (step, _, _) in built.items()}, batches, progress, results)

    final = {}
    for name, (step, weights, temporary) in built.items():
        runs[name] |= {
            "checkpoint": repr(chosen[name]),
            "final_loss": runs[name]["losses"][-1],
            "temporary_bytes": temporary,
            "temporary_mib": temporary / MIB,
            "states_written": len(statetx.trace_states(step)(*batches[-1]).writes),
        }
        final[name] = jax.device_get({path: state.value for path, state in weights.items()})
    others = [name for name in runs if name != PLAIN and PLAIN in runs]
    comparisons = {name: compare(runs[PLAIN], runs[name], final[PLAIN], final[name]) for name in others}
    if options.quick:  # a few steps of a small program: their times say nothing of the others
        for comparison in comparisons.values():
            del comparison["time_ratio"]
    results["comparisons"] = comparisons
    curve = results["slots"] = measure_slots(*batches[0], vocabulary, options, progress) if options.curve else []

    title = f"{options.cell.upper()} with {options.hidden} units, batch {options.batch}, "
    title += f"gradient through {options.seq:,} steps" + (f", {options.policy}" if options.policy else "")
    return report(runs, comparisons, title), plot(runs, comparisons, curve, title)


def report(runs, comparisons, title):
    """Return the results as a table: a column for each run."""
    table = Table("", *(Column(name, justify="right") for name in runs), title=title)

    def row(label, show, source=runs):
        table.add_row(label, *(show(source[name]) if name in source else "" for name in runs))

    row("temporary memory", lambda r: f"{r['temporary_mib']:,.3f} MiB")
    row("median step time", lambda r: show_seconds(r["step_seconds"]))
    row("final loss, nats/character", lambda r: f"{r['final_loss']:.6f}")
    row("states written by a step", lambda r: str(r["states_written"]))
    if comparisons:
        table.add_section()
        row("memory relative to plain", lambda c: f"1 / {c['memory_ratio']:.1f}", comparisons)
        if timed := {name: c for name, c in comparisons.items() if "time_ratio" in c}:
            row("time relative to plain", lambda c: f"{c['time_ratio']:.2f}", timed)
        row("relative difference of losses", lambda c: f"{c['loss_difference']:.1e}", comparisons)
        row("difference of final weights", lambda c: f"{c['weight_difference']:.1e}", comparisons)
    return table


def plot(runs, comparisons, curve, title):
    """Draw the losses over each other, memory and time of each run, and memory and time over slot counts."""
    figure = Figure(figsize=(13, 9) if curve else (13, 4.7), layout="constrained")
    if curve:
        (losses, slots), (memory, seconds) = figure.subplots(2, 2)
        draw_curve(slots, runs, curve)
    else:
        losses, memory, seconds = figure.subplots(1, 3)
    plot_losses(losses, runs, COLORS)
    differences = [c["loss_difference"] for c in comparisons.values()]
    note = "training" + (f": losses differ by {max(differences):.1e}, relatively" if differences else "")
    tidy(losses, counts="x", xlabel="training step", ylabel="loss [nats per character]", title=note)
    legend_below(losses, columns=3)

    note = "memory" + "".join(f", {name}: 1/{c['memory_ratio']:.0f}" for name, c in comparisons.items())
    sizes = {name: r["temporary_mib"] for name, r in runs.items()}
    labels = {"ylabel": "temporary memory [MiB]", "title": note, "yscale": "log"}
    bar_chart(memory, sizes, COLORS, lambda size: show_bytes(size * MIB), **labels)
    note = "time" + "".join(f", {name}: {c['time_ratio']:.2f}" for name, c in comparisons.items() if "time_ratio" in c)
    times = {name: r["step_seconds"] for name, r in runs.items()}
    bar_chart(seconds, times, COLORS, show_seconds, ylabel="median step time [s]", title=note)
    figure.suptitle(title, fontweight="bold")
    return figure


def draw_curve(axes, runs, curve):
    """Draw step time and temporary memory over slot counts, and both of the plain run as lines for comparison."""
    counts = [point["slots"] for point in curve]
    right = axes.twinx()
    times, sizes = ([point[key] for point in curve] for key in ("step_seconds", "temporary_mib"))
    axes.plot(counts, times, "o-", color=GREEN, markersize=5, label="time")
    right.plot(counts, sizes, "s-", color=GREY, markersize=5, label="memory")
    if PLAIN in runs:
        axes.axhline(runs[PLAIN]["step_seconds"], color=ORANGE, linestyle="--", label="time, plain")
        right.axhline(runs[PLAIN]["temporary_mib"], color=ORANGE, linestyle=":", label="memory, plain")
    tidy(axes, ylabel="step time [s] (circles)", title="scheduled run: time and memory over slots", ylim=(0, None))
    tidy(right, yscale="log", ylabel="temporary memory [MiB] (squares)")
    right.spines["right"].set_visible(True)
    right.grid(False)
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [str(n) for n in counts])
    label = "slots of the scheduled run"
    if sizes != sorted(sizes):
        label += "\nMemory falls where XLA puts the slots into the unused buffer of a result,\n"
        label += "which is not temporary memory (see the script)."
    axes.set_xlabel(label)
    axes.tick_params(axis="y", labelcolor=GREEN)
    right.tick_params(axis="y", labelcolor=GREY)
    lines = [*axes.get_lines(), *right.get_lines()]
    axes.legend(
        lines,
        [line.get_label() for line in lines],
        frameon=False,
        ncols=4,
        loc="upper center",
        bbox_to_anchor=(0.5, -0.3 if sizes != sorted(sizes) else -0.16),
    )


if __name__ == "__main__":
    run(parser, options, example)
