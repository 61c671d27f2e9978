"""Train a character-level recurrent model through thousands of steps, without and with rematerialisation.

The text is the language reference that every Python carries in `pydoc_data.topics`. Back-propagation runs through
the whole of each window, 2,048 characters unless told otherwise, and the hidden state of the cell is a
`brainstate.HiddenState` that every one of those steps writes.

Without rematerialisation the backward pass needs what every step computed: memory grows with the length T. With it,
T steps become about sqrt(T) chunks of about sqrt(T) steps. The backward pass finds the hidden state stored at the
start of each chunk, runs one chunk again to have the hidden state at each of its steps, and runs one step again to
have the rest. So 2 sqrt(T) hidden states and one step's activations are held at any time, for two more forward
passes (Chen et al. 2016, "Training deep nets with sublinear memory cost").

    python examples/train_long_sequence.py --help
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
import matplotlib
import numpy as np
import optax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import statetx

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

# The other members of jax.checkpoint_policies make a policy from names, or move to a host that a CPU is already.
POLICIES = (
    "nothing_saveable",
    "everything_saveable",
    "dots_saveable",
    "dots_with_no_batch_dims_saveable",
    "checkpoint_dots",
    "checkpoint_dots_with_no_batch_dims",
)
WITHOUT, WITH = "without remat", "with remat"
COLOURS = {WITHOUT: "#d1762b", WITH: "#1f5f99"}
MIB = 2**20


# Options and data -----------------------------------------------------------------------------------------------


class OneLineParser(argparse.ArgumentParser):
    """A parser whose errors are one line on stderr and exit status 2."""

    def error(self, message):
        self.exit(2, f"{self.prog}: error: {' '.join(message.split())}\n")


def positive(kind):
    """Return an argparse type: a finite number of this kind above zero."""

    def parse_number(text):
        number = kind(text)
        if not 0 < number < math.inf:
            raise argparse.ArgumentTypeError(f"must be above zero, got {text}")
        return number

    parse_number.__name__ = kind.__name__  # argparse names the type in its message
    return parse_number


def seed_number(text):
    """Parse a seed: an integer that fits in 32 bits."""
    if not 0 <= int(text) < 2**32:
        raise argparse.ArgumentTypeError(f"must be from 0 to {2**32 - 1}, got {text}")
    return int(text)


def make_parser():
    """Describe the options."""
    parser = OneLineParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--steps", type=positive(int), default=30, help="training steps of each run")
    add("--seq", type=positive(int), default=2048, help="characters that the gradient goes back through")
    add("--batch", type=positive(int), default=8, help="windows in a batch")
    add("--hidden", type=positive(int), default=96, help="units of the cell")
    add("--cell", choices=list(CELLS), default="gru", help="recurrent cell")
    add("--remat", action=argparse.BooleanOptionalAction, help="make only the run with, or without, remat")
    add("--policy", choices=POLICIES, help="what the rematerialised run keeps (of jax.checkpoint_policies)")
    add("--lr", type=positive(float), default=0.01, help="learning rate of Adam")
    add("--text", type=Path, metavar="FILE", help="UTF-8 text to learn, if not Python's language reference")
    add("--seed", type=seed_number, default=0, help="seed of the weights and the windows")
    add(
        "--out",
        type=Path,
        metavar="DIR",
        default=Path("out/train_long_sequence"),
        help="where the results go",
    )
    return parser


def load_text(path, seq):
    """Return the text as integers and the number of different characters.

    Raises:
        OSError, ValueError: the file cannot be read, or is shorter than one window.
    """
    topics = pydoc_data.topics.topics
    text = path.read_text(encoding="utf-8") if path else "".join(topics[name] for name in sorted(topics))
    if len(text) <= seq:
        raise ValueError(
            f"--seq {seq} needs a text of at least {seq + 1} characters, this one has {len(text)}"
        )
    vocabulary, ids = np.unique(np.array(list(text)), return_inverse=True)
    return ids.astype(np.int32), len(vocabulary)


def sample_windows(ids, options):
    """Yield one batch a training step, [seq + 1, batch]: evenly spaced windows from a random place on."""
    rng = np.random.default_rng(options.seed)
    spacing = np.arange(options.batch) * len(ids) // options.batch
    for _ in range(options.steps):
        start = rng.integers(len(ids)) + spacing
        yield ids[(start + np.arange(options.seq + 1)[:, None]) % len(ids)]


# The model ------------------------------------------------------------------------------------------------------


@jax.custom_jvp
def spike(x):
    """Return 1 where x is above zero, else 0; the derivative is that of a fast sigmoid, 1 / (1 + 5 |x|)^2."""
    return (x > 0).astype(x.dtype)


@spike.defjvp
def spike_jvp(primals, tangents):
    (x,), (t,) = primals, tangents
    return spike(x), t / (1 + 5 * jnp.abs(x)) ** 2


class LIFCell(brainstate.nn.RNNCell):
    """Leaky integrate-and-fire neurons that are coupled, and read out, through a leaky trace of their spikes.

    State: `v` and `trace`, both [batch, num_out], are read and written at each step.
    """

    def __init__(self, num_in, num_out, v_decay=0.8, trace_decay=0.8):
        super().__init__()
        self.num_out, self.v_decay, self.trace_decay = num_out, v_decay, trace_decay
        self.current = brainstate.nn.Linear(num_in + num_out, num_out)

    def init_state(self, batch_size=None, **kwargs):
        self.v = brainstate.HiddenState(jnp.zeros((batch_size, self.num_out)))
        self.trace = brainstate.HiddenState(jnp.zeros((batch_size, self.num_out)))

    def reset_state(self, batch_size=None, **kwargs):
        self.v.value = jnp.zeros((batch_size, self.num_out))
        self.trace.value = jnp.zeros((batch_size, self.num_out))

    def update(self, x):
        current = self.current(jnp.concatenate([x, self.trace.value], axis=-1))
        v = self.v_decay * self.v.value + current
        spikes = spike(v - 1)
        self.v.value = v * (1 - jax.lax.stop_gradient(spikes))
        self.trace.value = self.trace_decay * self.trace.value + (1 - self.trace_decay) * spikes
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
        """Return the mean surprise over a window [seq + 1, batch] in nats per character, from a zero state on."""
        self.cell.reset_state(self.batch)
        return self.all_steps(jnp.zeros(()), (window[:-1], window[1:])) / (len(window) - 1)


def rematerialised(policy):
    """Return the model that stores hidden states only (and what `policy` says) and computes the rest again."""

    class RematCharModel(CharModel):
        @statetx.remat(policy=policy)
        def step(self, total, pair):
            return super().step(total, pair)

        @statetx.remat(policy=policy)
        def chunk(self, total, pairs):
            return statetx.scan(self.step, total, pairs)

        def all_steps(self, total, pairs):
            seq = len(pairs[0])
            length = chunk_length(seq)
            whole = seq - seq % length
            chunks = jax.tree.map(lambda x: x[:whole].reshape(-1, length, self.batch), pairs)
            total, _ = statetx.scan(self.chunk, total, chunks)
            if whole < seq:
                total, _ = self.chunk(total, jax.tree.map(lambda x: x[whole:], pairs))
            return total

    return RematCharModel


def chunk_length(seq):
    """Return a length near sqrt(seq) for which chunks plus steps in a chunk are few, exact divisors first."""
    root = math.isqrt(seq)
    return min(range((root + 1) // 2, 2 * root + 1), key=lambda n: (seq % n > 0, seq // n + n))


# Training -------------------------------------------------------------------------------------------------------


def make_step(model, lr):
    """Return the training step: one compiled call that reads and writes states, the optimiser's too."""
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
    """Train from the seed; return losses, times in seconds, temporary bytes, states written and weights."""
    task = progress.add_task(name, total=options.steps, status="compiling")
    brainstate.random.seed(options.seed)
    model = model_class(options.cell, vocabulary, options.hidden, options.batch)
    step, weights = make_step(model, options.lr)

    example = jnp.zeros((options.seq + 1, options.batch), jnp.int32)
    temporary = step.lower(example).compile().memory_analysis().temp_size_in_bytes
    written = len(statetx.trace_states(step)(example).writes)

    losses, seconds = [], []
    for window in sample_windows(ids, options):
        start = time.perf_counter()
        losses.append(float(step(jnp.asarray(window))))
        seconds.append(time.perf_counter() - start)
        if not math.isfinite(losses[-1]):
            raise ValueError(f"the loss {name} is {losses[-1]} at step {len(losses)}, try a lower --lr")
        progress.update(task, advance=1, status=f"loss {losses[-1]:.4f}")
    return {
        "losses": losses,
        "final_loss": losses[-1],
        "temporary_bytes": temporary,
        # The first call compiles
        "median_step_seconds": statistics.median(seconds[1:] or seconds),
        "states_written": written,
        "weights": jax.device_get({path: state.value for path, state in weights.items()}),
    }


# Results --------------------------------------------------------------------------------------------------------


def compare(plain, remat):
    """Return the ratios and the largest differences of the two runs."""
    pairs = zip(jax.tree.leaves(plain["weights"]), jax.tree.leaves(remat["weights"]), strict=True)
    a, b = np.array(plain["losses"]), np.array(remat["losses"])
    return {
        "memory_ratio": plain["temporary_bytes"] / remat["temporary_bytes"],
        "time_ratio": remat["median_step_seconds"] / plain["median_step_seconds"],
        "largest_relative_loss_difference": float(np.max(np.abs(a - b) / np.abs(a))),
        "largest_weight_difference": max(float(np.max(np.abs(p - q))) for p, q in pairs),
    }


def report(runs, comparison, title):
    """Return the results as a table: one column a run, and their ratio or difference."""
    rows = [
        (
            "temporary memory",
            "temporary_bytes",
            lambda b: f"{b / MIB:.2f} MiB",
            "memory_ratio",
            "{:.1f} x less",
        ),
        ("median step time", "median_step_seconds", "{:.3f} s".format, "time_ratio", "{:.2f} x"),
        ("final loss [nats/character]", "final_loss", "{:.6f}".format, None, None),
        ("states written by a step", "states_written", "{}".format, None, None),
        ("largest relative difference of losses", None, None, "largest_relative_loss_difference", "{:.1e}"),
        ("largest difference of weights", None, None, "largest_weight_difference", "{:.1e}"),
    ]
    table = Table("", *runs, "ratio", title=title)
    for column in table.columns[1:]:
        column.justify = "right"
    for label, key, show, ratio, show_ratio in rows:
        cells = [show(run[key]) if key else "" for run in runs.values()]
        if key or comparison:
            table.add_row(label, *cells, show_ratio.format(comparison[ratio]) if comparison and ratio else "")
    return table


def bars(axes, runs, values, title, unit):
    """Draw one labelled bar a run."""
    drawn = axes.bar(list(runs), values, color=[COLOURS[name] for name in runs], width=0.6)
    axes.bar_label(drawn, fmt=lambda v: f"{v:.3g} {unit}", padding=3)
    axes.set(title=title, ylabel=unit, ylim=(0, 1.15 * max(values)))


def plot(runs, title, path):
    """Draw the losses of the runs over each other, and what each took."""
    figure, (left, middle, right) = plt.subplots(
        1, 3, figsize=(12, 4.2), width_ratios=(2.2, 1, 1), layout="constrained"
    )
    for (name, run), style in zip(runs.items(), ({"lw": 5, "alpha": 0.45}, {"lw": 1.6}), strict=False):
        steps = range(1, len(run["losses"]) + 1)
        left.plot(steps, run["losses"], color=COLOURS[name], label=name, **style)
    left.set(title="Loss", xlabel="training step", ylabel="nats per character")
    left.legend(frameon=False)
    bars(middle, runs, [run["temporary_bytes"] / MIB for run in runs.values()], "Temporary memory", "MiB")
    bars(right, runs, [run["median_step_seconds"] for run in runs.values()], "Step time", "s")
    figure.suptitle(title)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def run_all(options, console):
    """Train as the options say, show the results and write them."""
    options.out.mkdir(parents=True, exist_ok=True)
    ids, vocabulary = load_text(options.text, options.seq)
    models = {WITHOUT: CharModel, WITH: rematerialised(options.policy)}
    if options.remat is not None:
        models = {name: model for name, model in models.items() if (name == WITH) is options.remat}

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, TextColumn("{task.fields[status]}"), console=console) as progress:
        runs = {n: train(n, model, ids, vocabulary, options, progress) for n, model in models.items()}

    comparison = compare(*runs.values()) if len(runs) == 2 else None
    title = f"{options.cell.upper()}, {options.hidden} units, batch {options.batch}, gradient through {options.seq:,} steps"
    console.print(report(runs, comparison, title))
    plot(runs, title, options.out / "comparison.png")
    results = {name: {k: v for k, v in run.items() if k != "weights"} for name, run in runs.items()}
    settings = {k: str(v) if isinstance(v, Path) else v for k, v in vars(options).items()}
    with open(options.out / "results.json", "w") as file:
        json.dump({"options": settings, "runs": results, "comparison": comparison}, file, indent=2)
    console.print(f"Wrote {options.out / 'comparison.png'} and {options.out / 'results.json'}")


def main():
    """Run, or say in one line what is wrong with an option or a file."""
    parser = make_parser()
    try:
        run_all(parser.parse_args(), Console())
    except (OSError, ValueError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
