"""Train a character-level recurrent model through thousands of steps, storing everything or next to nothing.

The text is the language reference that every Python carries in `pydoc_data.topics`. Back-propagation runs
through the whole of each window, 2,048 characters unless told otherwise, and the hidden state of the cell is
a `brainstate.HiddenState` that every one of those steps writes.

Three runs train the same model from the same seed:

- plain: the backward pass needs what every step computed, so memory grows with the length T;
- nested: T steps become about sqrt(T) chunks of about sqrt(T) steps, and chunks and steps are rematerialised, so
  about 2 sqrt(T) hidden states and the activations of one step are held at any time, for two more forward passes
  (Chen et al. 2016, "Training deep nets with sublinear memory cost");
- scheduled: a given number of hidden states, the slots, and the fewest steps run again that these allow (Griewank
  and Walther 2000, "Algorithm 799: revolve").

A last figure shows what the number of slots costs: memory against time.
"""

import argparse
import json
import math
import pydoc_data.topics
import statistics
import time
from pathlib import Path

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import optax
from _common import BadInput, between, make_parser, make_progress, parse
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Column, Table

import statetx

# Not the members that make a policy from names, nor those that move values to the host.
POLICIES = [p for p in dir(jax.checkpoint_policies) if p.endswith("_saveable") or p.startswith("checkpoint_")]
COLOURS = {"plain": "#e08a3c", "nested": "#1f5f99", "scheduled": "#3a8f4f"}
PLAIN, NESTED, SCHEDULED = COLOURS


def make_options():
    """Describe the options."""
    parser = make_parser(__doc__, "train_long_sequence")
    add = parser.add_argument
    add("--steps", type=between(int), default=40, help="training steps of each run")
    add("--seq", type=between(int), default=2048, help="characters that the gradient goes back through")
    add("--batch", type=between(int), default=16, help="windows in a batch")
    add("--hidden", type=between(int), default=128, help="units of the cell")
    add("--cell", choices=list(CELLS), default="gru", help="recurrent cell; spikes of lif amplify rounding")
    add("--runs", nargs="+", choices=list(COLOURS), default=list(COLOURS), help="which runs to make")
    add("--slots", type=between(int), help="hidden states that the scheduled run stores; about sqrt(2 T) if not given")
    add("--curve", action=argparse.BooleanOptionalAction, default=True, help="measure memory and time over slot counts")
    add("--policy", choices=POLICIES, help="what nested and scheduled steps keep (of jax.checkpoint_policies)")
    add("--lr", type=between(float), default=0.003, help="learning rate of Adam")
    add("--text", type=Path, metavar="FILE", help="UTF-8 text to learn, if not Python's language reference")
    return parser


def load_text(path, seq):
    """Return the text as integers, and the number of different characters."""
    topics = pydoc_data.topics.topics
    text = path.read_text(encoding="utf-8") if path else "".join(topics[name] for name in sorted(topics))
    if len(text) <= seq:
        raise BadInput(f"--seq {seq} needs a text of at least {seq + 1} characters, this has {len(text)}")
    vocabulary, ids = np.unique(np.array(list(text)), return_inverse=True)
    return ids.astype(np.int32), len(vocabulary)


def sample_windows(ids, options):
    """Yield one batch a training step, [seq + 1, batch]: evenly spaced windows from a random place on."""
    rng = np.random.default_rng(options.seed)
    places = np.arange(options.batch) * len(ids) // options.batch + np.arange(options.seq + 1)[:, None]
    for _ in range(options.steps):
        yield ids[(rng.integers(len(ids)) + places) % len(ids)]


@jax.custom_jvp
def spike(x):
    """Return 1 where x is above zero, else 0; the derivative is that of a fast sigmoid, 1 / (1 + 5 |x|)^2."""
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
    """Embedding, recurrent cell, linear readout: predicts the next character from those before it."""

    def __init__(self, cell, vocabulary, hidden, batch, checkpoint=None):
        super().__init__()
        self.batch, self.checkpoint = batch, checkpoint
        self.embedding = brainstate.nn.Embedding(vocabulary, hidden)
        self.cell = CELLS[cell](hidden, hidden)
        self.readout = brainstate.nn.Linear(hidden, vocabulary)
        self.cell.init_state(batch)

    def step(self, total, pair):
        """Read one character of each row and add the surprise at the next one to the total."""
        character, following = pair
        logits = self.readout(self.cell(self.embedding(character)))
        surprise = optax.softmax_cross_entropy_with_integer_labels(logits, following)
        return total + jnp.mean(surprise), None

    def loss(self, window):
        """Return the mean surprise over a window [seq + 1, batch], in nats per character.

        The hidden state is found, and carried, by `statetx.scan`; `checkpoint` says how much of it all is stored.
        """
        self.cell.reset_state(self.batch)
        pairs = window[:-1], window[1:]
        total, _ = statetx.scan(self.step, jnp.zeros(()), pairs, checkpoint=self.checkpoint)
        return total / (len(window) - 1)


def strategies(options):
    """Return what each run stores."""
    slots = options.slots or max(2, math.isqrt(2 * options.seq))
    return {
        PLAIN: None,
        NESTED: statetx.policies.Levels(2, policy=options.policy),
        SCHEDULED: statetx.policies.Slots(slots, policy=options.policy),
    }


def make_step(model, lr):
    """Return the training step, one compiled call that reads and writes states only, and the weights."""
    weights = statetx.states(model, brainstate.ParamState)
    optimiser = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(lr))
    moments = statetx.State(optimiser.init({path: state.value for path, state in weights.items()}))

    @statetx.jit
    def step(window):
        loss, grads = statetx.value_and_grad(model.loss, wrt=weights)(window)
        values = {path: state.value for path, state in weights.items()}
        updates, moments.value = optimiser.update(grads, moments.value, values)
        for path, value in optax.apply_updates(values, updates).items():
            weights[path].value = value
        return loss

    return step, weights


def build(checkpoint, vocabulary, options):
    """Return the training step of a model made from the seed, its weights, and the bytes that XLA reserves for it."""
    brainstate.random.seed(options.seed)
    model = CharModel(options.cell, vocabulary, options.hidden, options.batch, checkpoint)
    step, weights = make_step(model, options.lr)
    example = jnp.zeros((options.seq + 1, options.batch), jnp.int32)
    return step, weights, step.lower(example).compile().memory_analysis().temp_size_in_bytes


def train(name, checkpoint, ids, vocabulary, options, progress):
    """Train from the seed; return the losses, what a step takes and writes, and the weights at the end."""
    task = progress.add_task(name, total=options.steps, status="compiling")
    step, weights, temporary = build(checkpoint, vocabulary, options)

    losses, seconds = [], []
    for window in sample_windows(ids, options):
        start = time.perf_counter()
        losses.append(float(step(jnp.asarray(window))))
        seconds.append(time.perf_counter() - start)
        if not math.isfinite(losses[-1]):
            raise BadInput(f"the loss of {name} is {losses[-1]} at step {len(losses)}, try a lower --lr")
        progress.update(task, advance=1, status=f"loss {losses[-1]:.4f}")
    return {
        "checkpoint": repr(checkpoint),
        "losses": losses,
        "final_loss": losses[-1],
        "temporary_bytes": temporary,
        "temporary_mib": temporary / 2**20,
        "median_step_seconds": statistics.median(seconds[1:] or seconds),  # the first call compiles
        "states_written": len(statetx.trace_states(step)(jnp.asarray(window)).writes),
        "weights": jax.device_get({path: state.value for path, state in weights.items()}),
    }


def measure_slots(ids, vocabulary, options, progress, rounds=3):
    """Return memory and step time over slot counts, as a list of dicts; the counts take turns."""
    counts = [n for n in (2, 4, 8, 16, 32, 64, 128, 256) if n <= max(2, options.seq // 4)]
    task = progress.add_task("slots", total=len(counts) * rounds, status="compiling")
    built = {n: build(statetx.policies.Slots(n, policy=options.policy), vocabulary, options) for n in counts}
    seconds = {n: [] for n in counts}
    window = jnp.asarray(next(sample_windows(ids, options)))
    for n in counts:
        built[n][0](window)  # compiles
    for _ in range(rounds):
        for n in counts:
            start = time.perf_counter()
            jax.block_until_ready(built[n][0](window))
            seconds[n].append(time.perf_counter() - start)
            progress.update(task, advance=1, status=f"{n} slots")
    return [
        {"slots": n, "temporary_mib": built[n][2] / 2**20, "step_seconds": statistics.median(seconds[n])}
        for n in counts
    ]


def compare(plain, run):
    """Return the ratios to the plain run, and the largest differences: of losses relative, of weights not."""
    pairs = zip(jax.tree.leaves(plain["weights"]), jax.tree.leaves(run["weights"]), strict=True)
    losses = np.array([plain["losses"], run["losses"]])
    return {
        "memory_ratio": plain["temporary_bytes"] / max(run["temporary_bytes"], 1),
        "time_ratio": run["median_step_seconds"] / plain["median_step_seconds"],
        "loss_difference": float(np.max(np.ptp(losses, 0) / np.maximum(losses[0], 1e-30))),
        "weight_difference": max(float(np.max(np.abs(p - q))) for p, q in pairs),
    }


def report(runs, comparisons, title):
    """Return the results as a table: a column for each run."""
    table = Table("", *(Column(name, justify="right") for name in runs), title=title)

    def row(label, form, source=runs):
        table.add_row(label, *(form.format_map(source[name]) if name in source else "" for name in runs))

    row("temporary memory", "{temporary_mib:,.3f} MiB")
    row("median step time", "{median_step_seconds:.3f} s")
    row("final loss, nats/character", "{final_loss:.6f}")
    row("states a step writes", "{states_written}")
    if comparisons:
        table.add_section()
        row("memory, of plain", "1 / {memory_ratio:.1f}", comparisons)
        row("time, of plain", "{time_ratio:.2f}", comparisons)
        row("losses differ, relatively, by", "{loss_difference:.1e}", comparisons)
        row("weights differ at the end by", "{weight_difference:.1e}", comparisons)
    return table


def plot(runs, comparisons, curve, title, path):
    """Draw the losses of the runs over each other, what each run took, and memory against time over slot counts."""
    figure = Figure(figsize=(13, 8), layout="constrained")
    (losses, slots), (memory, seconds) = figure.subplots(2, 2)
    for (name, run), width in zip(runs.items(), (7, 3.5, 1.2)[-len(runs) :], strict=True):  # thin over thick
        losses.plot(range(1, len(run["losses"]) + 1), run["losses"], label=name, color=COLOURS[name], linewidth=width)
    losses.set_xlabel("training step")
    losses.legend(frameon=False)
    for axes, key in (memory, "temporary_mib"), (seconds, "median_step_seconds"):
        drawn = axes.bar(list(runs), [run[key] for run in runs.values()], color=[COLOURS[n] for n in runs], width=0.6)
        axes.bar_label(drawn, fmt="{:,.3f}", padding=3)
        axes.margins(x=0.1, y=0.15)
    memory.set_yscale("log")
    if curve:
        draw_curve(slots, runs, curve)

    differences = [c["loss_difference"] for c in comparisons.values()]
    notes = {
        losses: f"largest relative difference {max(differences):.1e}" if differences else "",
        slots: "more slots: more memory, less time",
        memory: "memory" + "".join(f", {n}: 1/{c['memory_ratio']:.0f}" for n, c in comparisons.items()),
        seconds: "time" + "".join(f", {n}: {c['time_ratio']:.2f}" for n, c in comparisons.items()),
    }
    labels = {
        losses: "loss [nats per character]",
        slots: "step time [s] (circles)",
        memory: "temporary memory [MiB]",
        seconds: "median step time [s]",
    }
    for axes, note in notes.items():
        axes.set(ylabel=labels[axes], title=note, axisbelow=True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.3)
    figure.suptitle(title, fontweight="bold")
    figure.savefig(path, dpi=150)


def draw_curve(axes, runs, curve):
    """Draw step time and temporary memory over slot counts, with those of the plain run as lines to compare with."""
    counts = [point["slots"] for point in curve]
    right = axes.twinx()
    for side, key, marker in ((axes, "step_seconds", "o"), (right, "temporary_mib", "s")):
        colour = COLOURS[SCHEDULED] if side is axes else "#555555"
        side.plot(counts, [point[key] for point in curve], f"{marker}-", color=colour, markersize=5)
        side.tick_params(axis="y", labelcolor=colour)
    if PLAIN in runs:
        axes.axhline(runs[PLAIN]["median_step_seconds"], color=COLOURS[PLAIN], linestyle="--", label="plain: time")
        right.axhline(runs[PLAIN]["temporary_mib"], color=COLOURS[PLAIN], linestyle=":", label="plain: memory")
        lines = [*axes.get_lines()[1:], *right.get_lines()[1:]]
        right.legend(lines, [line.get_label() for line in lines], frameon=False, loc=(0.6, 0.68))
    axes.set(xlabel="slots of the scheduled run")
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [str(n) for n in counts])
    axes.set_ylim(bottom=0)
    right.set(yscale="log", ylabel="temporary memory [MiB] (squares)")
    right.spines["top"].set_visible(False)


def run_all(options, console):
    """Train as the options say, show the results and write them."""
    options.out.mkdir(parents=True, exist_ok=True)
    ids, vocabulary = load_text(options.text, options.seq)
    chosen = {name: checkpoint for name, checkpoint in strategies(options).items() if name in options.runs}
    with make_progress(console) as progress:
        runs = {n: train(n, checkpoint, ids, vocabulary, options, progress) for n, checkpoint in chosen.items()}
        curve = measure_slots(ids, vocabulary, options, progress) if options.curve else []
    comparisons = {n: compare(runs[PLAIN], run) for n, run in runs.items() if n != PLAIN and PLAIN in runs}

    title = f"{options.cell.upper()} with {options.hidden} units, batch {options.batch}, "
    title += f"gradient through {options.seq:,} steps" + (f", {options.policy}" if options.policy else "")
    console.print(report(runs, comparisons, title))
    plot(runs, comparisons, curve, title, options.out / "comparison.png")
    plain = {name: {k: v for k, v in run.items() if k != "weights"} for name, run in runs.items()}
    results = {"options": vars(options), "runs": plain, "comparisons": comparisons, "slots": curve}
    (options.out / "results.json").write_text(json.dumps(results, indent=2, default=str))
    console.print(f"Wrote comparison.png and results.json into {options.out}")


def main():
    """Run, or say in one line what is wrong with an option or a file."""
    parser = make_options()
    try:
        run_all(parse(parser, seq=64, steps=2, hidden=8, batch=2, curve=False), Console())
    except (OSError, UnicodeError, BadInput) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
