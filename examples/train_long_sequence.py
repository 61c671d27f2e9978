"""Train a character-level recurrent model through thousands of steps, without and with rematerialisation.

The text is the language reference that every Python carries in `pydoc_data.topics`. Back-propagation runs
through the whole of each window, 2,048 characters unless told otherwise, and the hidden state of the cell is
a `brainstate.HiddenState` that every one of those steps writes.

Without rematerialisation the backward pass needs what every step computed: memory grows with the length T.
With it, T steps become about sqrt(T) chunks of about sqrt(T) steps. The backward pass finds the hidden state
stored at the start of each chunk, runs one chunk again to have it at each of its steps, and runs one step
again to have the rest. So about 2 sqrt(T) hidden states and the activations of one step are held at any time,
for two more forward passes (Chen et al. 2016, "Training deep nets with sublinear memory cost").
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
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column, Table

import statetx

# Not the members that make a policy from names, nor those that move values to the host.
POLICIES = [p for p in dir(jax.checkpoint_policies) if p.endswith("_saveable") or p.startswith("checkpoint_")]
WITHOUT, WITH = "without remat", "with remat"
COLOURS = {WITHOUT: "#e08a3c", WITH: "#1f5f99"}


class BadInput(Exception):
    """An option or a text that the program cannot work with."""


class OneLineParser(argparse.ArgumentParser):
    """A parser whose errors are one line on stderr and exit status 2."""

    def error(self, message):
        self.exit(2, f"{self.prog}: error: {' '.join(message.split())}\n")


def between(kind, low=0, high=math.inf):
    """Return an argparse type: a number of this kind above low and below high."""

    def parse_number(text):
        if not low < kind(text) < high:
            raise argparse.ArgumentTypeError(f"must be above {low} and below {high}, got {text}")
        return kind(text)

    parse_number.__name__ = kind.__name__  # argparse names the type in its message
    return parse_number


def make_parser():
    """Describe the options."""
    show_defaults = argparse.ArgumentDefaultsHelpFormatter
    parser = OneLineParser(description=__doc__.splitlines()[0], formatter_class=show_defaults)
    add = parser.add_argument
    add("--steps", type=between(int), default=60, help="training steps of each run")
    add("--seq", type=between(int), default=2048, help="characters that the gradient goes back through")
    add("--batch", type=between(int), default=16, help="windows in a batch")
    add("--hidden", type=between(int), default=128, help="units of the cell")
    add("--cell", choices=list(CELLS), default="gru", help="recurrent cell; spikes of lif amplify rounding")
    add("--remat", action=argparse.BooleanOptionalAction, help="make only the run with, or without, remat")
    add("--policy", choices=POLICIES, help="what the rematerialised run keeps (of jax.checkpoint_policies)")
    add("--lr", type=between(float), default=0.003, help="learning rate of Adam")
    add("--text", type=Path, metavar="FILE", help="UTF-8 text to learn, if not Python's language reference")
    add("--seed", type=between(int, -1, 2**32), default=0, help="seed of the weights and the windows")
    add("--out", type=Path, metavar="DIR", default=Path("out/train_long_sequence"), help="where results go")
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

    def __init__(self, cell, vocabulary, hidden, batch):
        super().__init__()
        self.batch = batch
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

    def all_steps(self, total, pairs):
        """Run every step of a window; the hidden state is found, and carried, by `statetx.scan`."""
        return statetx.scan(self.step, total, pairs)[0]

    def loss(self, window):
        """Return the mean surprise over a window [seq + 1, batch], in nats per character."""
        self.cell.reset_state(self.batch)
        return self.all_steps(jnp.zeros(()), (window[:-1], window[1:])) / (len(window) - 1)


def rematerialised(policy):
    """Return the model that keeps hidden states, and what `policy` says, and computes the rest again."""

    class RematCharModel(CharModel):
        @statetx.remat(policy=policy)
        def step(self, total, pair):
            return super().step(total, pair)

        @statetx.remat(policy=policy)
        def chunk(self, total, pairs):
            return statetx.scan(self.step, total, pairs)

        def all_steps(self, total, pairs):
            seq = len(pairs[0])
            root = math.isqrt(seq)  # a chunk's length is near it, and divides seq if that is possible
            length = min(range((root + 1) // 2, 2 * root + 1), key=lambda n: (seq % n > 0, seq // n + n))
            whole = seq - seq % length
            chunks = jax.tree.map(lambda x: x[:whole].reshape(-1, length, self.batch), pairs)
            total, _ = statetx.scan(self.chunk, total, chunks)
            rest = jax.tree.map(lambda x: x[whole:], pairs)
            return self.chunk(total, rest)[0] if whole < seq else total

    return RematCharModel


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


def train(name, model_class, ids, vocabulary, options, progress):
    """Train from the seed; return the losses, what a step takes and writes, and the weights at the end."""
    task = progress.add_task(name, total=options.steps, status="compiling")
    brainstate.random.seed(options.seed)
    model = model_class(options.cell, vocabulary, options.hidden, options.batch)
    step, weights = make_step(model, options.lr)
    example = jnp.zeros((options.seq + 1, options.batch), jnp.int32)
    temporary = step.lower(example).compile().memory_analysis().temp_size_in_bytes

    losses, seconds = [], []
    for window in sample_windows(ids, options):
        start = time.perf_counter()
        losses.append(float(step(jnp.asarray(window))))
        seconds.append(time.perf_counter() - start)
        if not math.isfinite(losses[-1]):
            raise BadInput(f"the loss {name} is {losses[-1]} at step {len(losses)}, try a lower --lr")
        progress.update(task, advance=1, status=f"loss {losses[-1]:.4f}")
    return {
        "losses": losses,
        "final_loss": losses[-1],
        "temporary_bytes": temporary,
        "temporary_mib": temporary / 2**20,
        "median_step_seconds": statistics.median(seconds[1:] or seconds),  # the first call compiles
        "states_written": len(statetx.trace_states(step)(example).writes),
        "weights": jax.device_get({path: state.value for path, state in weights.items()}),
    }


def compare(plain, remat):
    """Return the ratios of the two runs, and the largest differences: of losses relative, of weights not."""
    pairs = zip(jax.tree.leaves(plain["weights"]), jax.tree.leaves(remat["weights"]), strict=True)
    losses = np.array([plain["losses"], remat["losses"]])
    return {
        "memory_ratio": plain["temporary_bytes"] / max(remat["temporary_bytes"], 1),
        "time_ratio": remat["median_step_seconds"] / plain["median_step_seconds"],
        "loss_difference": float(np.max(np.ptp(losses, 0) / np.maximum(losses[0], 1e-30))),
        "weight_difference": max(float(np.max(np.abs(p - q))) for p, q in pairs),
    }


def report(runs, comparison, title):
    """Return the results as a table: a column for each run, and one for their ratio or largest difference."""
    table = Table("", *(Column(name, justify="right") for name in (*runs, "ratio")), title=title)

    def row(label, form, key, ratio=None):
        last = ratio.format_map(comparison) if ratio and comparison else ""
        table.add_row(label, *(form.format(run[key]) for run in runs.values()), last)

    row("temporary memory", "{:,.3f} MiB", "temporary_mib", "1 / {memory_ratio:.1f}")
    row("median step time", "{:.3f} s", "median_step_seconds", "{time_ratio:.2f}")
    row("final loss, nats/character", "{:.6f}", "final_loss")
    row("states a step writes", "{}", "states_written")
    if comparison:
        table.add_section()
        row("losses differ, relatively, by", "", "losses", "{loss_difference:.1e}")
        row("weights differ at the end by", "", "weights", "{weight_difference:.1e}")
    return table


def plot(runs, comparison, title, path):
    """Draw the losses of the runs over each other, and what each run took."""
    figure = Figure(figsize=(12, 4.4), layout="constrained")
    losses, memory, seconds = figure.subplots(1, 3, gridspec_kw={"width_ratios": (2.2, 1, 1), "wspace": 0.08})
    for (name, run), width in zip(runs.items(), (6, 1.6)[-len(runs) :], strict=True):  # thin over thick
        style = {"color": COLOURS[name], "linewidth": width, "marker": "o", "markersize": width}
        losses.plot(range(1, len(run["losses"]) + 1), run["losses"], label=name, **style)
    losses.legend(frameon=False)
    losses.set_xlabel("training step")
    for axes, key in (memory, "temporary_mib"), (seconds, "median_step_seconds"):
        drawn = axes.bar(list(runs), [run[key] for run in runs.values()], color=[COLOURS[n] for n in runs])
        axes.bar_label(drawn, fmt="{:,.3f}", padding=3)
        axes.margins(x=0.08, y=0.1)

    for axes, label, note in (
        (losses, "loss [nats per character]", "largest relative difference {loss_difference:.1e}"),
        (memory, "temporary memory [MiB]", "memory divided by {memory_ratio:.1f}"),
        (seconds, "median step time [s]", "time multiplied by {time_ratio:.2f}"),
    ):
        axes.set(ylabel=label, title=note.format_map(comparison) if comparison else "", axisbelow=True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.3)
    figure.suptitle(title, fontweight="bold")
    figure.savefig(path, dpi=150)


def run_all(options, console):
    """Train as the options say, show the results and write them."""
    options.out.mkdir(parents=True, exist_ok=True)
    ids, vocabulary = load_text(options.text, options.seq)
    both = {WITHOUT: CharModel, WITH: rematerialised(options.policy)}
    models = {name: model for name, model in both.items() if options.remat in (None, name == WITH)}
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, TextColumn("{task.fields[status]}"), console=console) as progress:
        runs = {n: train(n, model, ids, vocabulary, options, progress) for n, model in models.items()}
    comparison = compare(*runs.values()) if len(runs) == 2 else None

    title = f"{options.cell.upper()} with {options.hidden} units, batch {options.batch}, "
    title += f"gradient through {options.seq:,} steps" + (f", {options.policy}" if options.policy else "")
    console.print(report(runs, comparison, title))
    plot(runs, comparison, title, options.out / "comparison.png")
    plain = {name: {k: v for k, v in run.items() if k != "weights"} for name, run in runs.items()}
    results = {"options": vars(options), "runs": plain, "comparison": comparison}
    (options.out / "results.json").write_text(json.dumps(results, indent=2, default=str))
    console.print(f"Wrote comparison.png and results.json into {options.out}")


def main():
    """Run, or say in one line what is wrong with an option or a file."""
    parser = make_parser()
    try:
        run_all(parser.parse_args(), Console())
    except (OSError, UnicodeError, BadInput) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
