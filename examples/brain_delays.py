"""Differentiate a whole-brain model with delays through 60,000 steps, at a twentieth of the memory.

84 brain regions (reduced Wong-Wang model, Heun's method, steps of 1 ms, fixed noise) excite each other with delays of up to 56.1 ms. A
hemodynamic response turns a minute of their activity into a BOLD signal, its correlations into functional connectivity (FC),
and the loss is the distance to a measured FC. Wanted is its gradient with respect to the global coupling G.

The same problem is in the documentation of tvboptim, "Gradient checkpointing for long DDE simulations", with a table of memory and
time; the table here stands beside it. ``--connectome tvboptim`` takes the connectome and the FC of that package, if it is installed,
and lets its own solver take part. Without it the connectome is made by the script, of the same size and delays.

The loop runs over the samples of the BOLD signal, 1,000 steps each, so that it returns what they add to the signal and not
all activity. It is differentiated in four ways:

- plain: everything that the gradient needs is stored;
- Levels(1): the state before each sample, which is the activity of the last 58 ms; its steps run again (``checkpoint=Levels(1)``);
- coupling: the same, and the sums over delayed activity, which are most of a step's work (``policy=names("coupling")``, ``keep="loop"``);
- budget: what fits in 32 MB (``checkpoint=Budget(...)``).
"""

from _common import BLUE, GREEN, GREY, ORANGE, between, compare_times, make_parser, parse, run, show_difference, tidy

MB = 10**6  # as in the published table
WAYS = {"plain": GREY, "Levels(1)": BLUE, "coupling": ORANGE, "budget": GREEN}
# Gradient of G by tvboptim, of its documentation: bytes by which the process grew, and seconds.
PUBLISHED = {"plain": (763.1e6, 2.4834), "blocks of 512": (223.0e6, 3.1904)}


def make_options():
    """Describe the options."""
    parser = make_parser(__doc__, "brain_delays")
    add = parser.add_argument
    add("--regions", type=between(int, 1), default=84, help="brain regions")
    add(
        "--scans",
        type=between(int, 22),
        default=60,
        help="of the BOLD signal, one a second; the first 20 are left out",
    )
    add("--period", type=between(int), default=1000, help="steps between samples")
    add("--budget", type=between(float), default=32.0, help="temporary memory of the way with a budget, in MB")
    add("--rounds", type=between(int), default=5, help="gradients of each way, in turns")
    add("--connectome", choices=["made", "tvboptim"], default="made", help="where connections and FC come from")
    return parser


if __name__ == "__main__":  # before the large imports, so that --help and mistakes are answered at once
    parser = make_options()
    options = parse(parser, seconds=20, regions=8, scans=24, period=100, budget=0.5, rounds=2)

import time

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure
from rich.table import Column, Table

import statetx
from statetx.policies import Budget, Levels, names

TAPS = 20  # samples over which the hemodynamic response lasts
SKIPPED = 20  # samples, of which the response is not complete


class Brain(brainstate.nn.Module):
    """Reduced Wong-Wang regions, coupled with delays."""

    def __init__(self, weights, delays):
        super().__init__()
        self.weights, self.num = jnp.asarray(weights), len(weights)
        rows = int(np.ceil(delays.max())) + 1  # the last row is now, the first the longest delay ago
        self.read = rows - 1 - np.rint(delays).astype(int)
        self.coupling = brainstate.ParamState(jnp.array(0.5))
        self.activity = brainstate.HiddenState(jnp.zeros(self.num))
        self.past = brainstate.HiddenState(jnp.zeros((rows, self.num)))

    def reset(self):
        self.activity.value = jnp.full(self.num, 0.3)
        self.past.value = jnp.full(self.past.value.shape, 0.3)

    def slope(self, activity, received):
        drive = 0.270 * (0.2609 * (0.5 * activity + received) + 0.32) - 0.108
        # u / (1 - exp(-154 u)); where u is near 0, the difference from 1 would cost the derivative all its digits.
        rate = -drive / jnp.expm1(-154.0 * drive)
        return -activity / 100.0 + (1 - activity) * rate * 0.641

    def step(self, noise):
        """Advance by 1 ms, by Heun's method with the coupling at the start of the step; return the activity."""
        late = self.past.value[self.read, np.arange(self.num)]  # [to, from]
        received = statetx.checkpoint_name(jnp.sum(self.weights * late, 1), "coupling") * self.coupling.value
        now, kick = self.activity.value, 0.00283 * noise
        first = self.slope(now, received)
        second = self.slope(now + first + kick, received)
        now = self.activity.value = now + 0.5 * (first + second) + kick
        self.past.value = jnp.concatenate([self.past.value[1:], now[None]])
        return now


def response_taps(period):
    """Return the hemodynamic response as weights [TAPS, period]: of a step in the sample's own second, the second before ..."""
    steps = TAPS * period
    seconds = np.linspace(0, TAPS, steps)
    rate = np.sqrt(1 / 0.4 - 1 / (4 * 0.8**2))
    response = np.exp(-0.5 * seconds / 0.8) * np.sin(rate * seconds) / rate / 3
    ago = period * (np.arange(TAPS)[:, None] + 1) - np.arange(period)
    return np.where(ago < steps, response[np.minimum(ago, steps - 1)], 0.0)


def connectivity(signal):
    """Return correlations between regions, zero on the diagonal."""
    return jnp.corrcoef(signal[SKIPPED:], rowvar=False) * (1 - jnp.eye(signal.shape[1]))


class Fit:
    """The loss of a brain's coupling, with a way to differentiate its loop."""

    def __init__(self, data, period, checkpoint):
        self.brain, self.target = Brain(data["weights"], data["delays"]), jnp.asarray(data["fc"])
        self.taps, self.period, self.checkpoint = jnp.asarray(response_taps(period)), period, checkpoint

    def signal(self, noise):
        """Return the BOLD signal [samples, regions] of noise [steps, regions]."""

        def second(carry, noise):
            _, activity = statetx.scan(lambda carry, noise: (carry, self.brain.step(noise)), None, noise)
            return carry, self.taps @ activity  # what this second adds to its own sample and to later ones

        self.brain.reset()
        _, parts = statetx.scan(
            second, None, noise.reshape(-1, self.period, self.brain.num), checkpoint=self.checkpoint
        )
        later = [jnp.pad(parts[: len(parts) - i, i], ((i, 0), (0, 0))) for i in range(min(TAPS, len(parts)))]
        return 5.6 * 0.02 * (sum(later) - 1)

    def loss(self, noise):
        return jnp.sqrt(jnp.mean((connectivity(self.signal(noise)) - self.target) ** 2))


def make_data(options):
    """Return weights, delays in steps, and the target FC, all [regions, regions], and the noise [steps, regions]."""
    noise = jax.random.normal(jax.random.key(options.seed), (options.scans * options.period, 1, options.regions))[:, 0]
    if options.connectome == "tvboptim":
        from tvboptim import data

        weights, lengths, _ = data.load_structural_connectivity(name="dk_average")
        fc = data.load_functional_connectivity(name="dk_average")
        return {"weights": weights / weights.max(), "delays": np.asarray(lengths) / 4, "fc": fc, "noise": noise}
    # Regions in a ball: connections become weaker with distance, delays longer.
    rng = np.random.default_rng(options.seed)
    place = rng.standard_normal((options.regions, 3))
    distance = np.linalg.norm(place[:, None] - place, axis=-1)
    weights = np.exp(-2 * distance) * rng.lognormal(size=distance.shape) * (1 - np.eye(options.regions))
    weights = (weights + weights.T) / np.max(weights + weights.T)
    fc = np.exp(-distance) * (1 - np.eye(options.regions))
    return {"weights": weights, "delays": 56.1 * distance / distance.max(), "fc": fc, "noise": noise}


def gradients(data, options):
    """Return for each way a function of noise that returns loss and gradient."""
    checkpoints = {
        "plain": None,
        "Levels(1)": Levels(1),
        "coupling": Levels(1, policy=names("coupling"), keep="loop"),
        "budget": Budget(int(options.budget * MB)),
    }
    ways = {}
    for way, checkpoint in checkpoints.items():
        fit = Fit(data, options.period, checkpoint)
        ways[way] = statetx.jit(statetx.value_and_grad(fit.loss, wrt=fit.brain.coupling))
    if options.connectome == "tvboptim":
        ways |= gradients_of_tvboptim(data, options)
    return ways


def gradients_of_tvboptim(data, options):
    """Return the same for the solver of tvboptim: plain, and in blocks of 512 steps, the best of its table."""
    import equinox
    from tvboptim.experimental import network_dynamics as tvb
    from tvboptim.experimental.network_dynamics import coupling, dynamics, graph, noise, solvers
    from tvboptim.observations.observation import compute_fc, rmse
    from tvboptim.observations.tvb_monitors.bold import HRFBold

    network = tvb.Network(
        dynamics=dynamics.tvb.ReducedWongWang(w=0.5, I_o=0.32, INITIAL_STATE=(0.3,)),
        coupling={"delayed": coupling.DelayedLinearCoupling(incoming_states="S", G=0.5, buffer_strategy="roll")},
        graph=graph.DenseDelayGraph(weights=jnp.asarray(data["weights"]), delays=jnp.asarray(data["delays"])),
        noise=noise.AdditiveNoise(sigma=0.00283, apply_to="S", key=jax.random.key(options.seed)),
    )
    monitor, steps = HRFBold(period=float(options.period), downsample_period=1.0, voi=0), len(data["noise"])

    def gradient(block):
        solve, config = tvb.prepare(network, solvers.Heun(block_size=block), t0=0.0, t1=float(steps), dt=1.0)

        def loss(value, noise):
            chosen = equinox.tree_at(lambda c: c.coupling.delayed.G, config, value)
            chosen._internal.noise_samples = noise[:, None]
            return rmse(compute_fc(monitor(solve(chosen)), skip_t=SKIPPED), jnp.asarray(data["fc"]))

        return jax.jit(lambda noise: jax.value_and_grad(loss)(jnp.array(0.5), noise))

    return {"tvboptim": gradient(None), "tvboptim, blocks of 512": gradient(512)}


def example(options, progress, results):
    """Compile all ways, compare their gradients, and measure them in turns."""
    jax.config.update("jax_enable_x64", True)
    data = make_data(options)
    noise = data["noise"]
    functions, ways, signal = gradients(data, options), results.setdefault("ways", {}), None
    task = progress.add_task("gradients", total=len(functions) * (1 + options.rounds), status="compiling")
    compiled = {}
    for way, function in functions.items():
        start = time.perf_counter()
        compiled[way] = function.lower(noise).compile()
        memory = compiled[way].memory_analysis().temp_size_in_bytes
        ways[way] = {"temporary_bytes": memory, "compile_seconds": time.perf_counter() - start, "cpu_seconds": []}
        loss, gradient = map(float, compiled[way](noise))
        ways[way] |= {"loss": loss, "gradient": gradient}
        progress.update(task, advance=1, status=f"{way}: {memory / MB:,.1f} MB")
    tell = lambda text: progress.update(task, advance=1, status=text)
    compare_times(compiled, [noise], ways, options.rounds, tell)
    plain = ways["plain"]
    for found in ways.values():
        found["gradient_difference"] = abs(found["gradient"] / plain["gradient"] - 1)
    results["published"] = {
        way: {"bytes": memory, "time": seconds / PUBLISHED["plain"][1]} for way, (memory, seconds) in PUBLISHED.items()
    }
    fit = Fit(data, options.period, None)
    signal = np.asarray(statetx.jit(fit.signal)(noise))
    return make_table(results, options), draw(signal, results, data)


def make_table(results, options):
    """Return the table of all ways, and of the published figures."""
    steps = options.scans * options.period
    columns = ("memory", "time of plain", "loss", "gradient of G", "difference")
    title = f"Gradient through {steps:,} steps of {options.regions} regions, float64"
    table = Table("", *(Column(name, justify="right") for name in columns), title=title)
    for way, found in results["ways"].items():
        numbers = f"{found['loss']:.12f}", f"{found['gradient']:.6e}", show_difference(found["gradient_difference"])
        table.add_row(way, f"{found['temporary_bytes'] / MB:,.1f} MB", f"{found['time']:.2f}", *numbers)
    table.add_section()
    for way, found in results["published"].items():
        table.add_row(f"tvboptim's page: {way}", f"{found['bytes'] / MB:,.1f} MB", f"{found['time']:.2f}", *[""] * 3)
    return table


def draw(signal, results, data):
    """Draw the BOLD signal, the simulated and the measured FC, and memory against time."""
    figure = Figure(figsize=(14, 4.2), layout="constrained")
    bold, simulated, measured, against = figure.subplots(1, 4, width_ratios=(1.2, 0.9, 0.9, 1.6))
    bold.plot(
        np.arange(1, len(signal) + 1), signal[:, :12] - signal[SKIPPED:, :12].mean(0), lw=0.9, color=BLUE, alpha=0.6
    )
    shown = signal[SKIPPED:] - signal[SKIPPED:].mean(0)
    limits = 1.2 * shown.min(), 1.2 * shown.max()
    tidy(bold, xlabel="second", title="BOLD signal, 12 regions", xlim=(SKIPPED, len(signal)), ylim=limits)
    for axes, fc, name in (simulated, connectivity(jnp.asarray(signal)), "simulated"), (measured, data["fc"], "target"):
        axes.imshow(np.asarray(fc), cmap="RdBu_r", vmin=-1, vmax=1)
        axes.set(title=f"FC, {name}", xticks=[], yticks=[])
    points = {way: (results["ways"][way], "temporary_bytes", color, "o") for way, color in WAYS.items()}
    points |= {f"tvboptim's page: {way}": (r, "bytes", "black", "x") for way, r in results["published"].items()}
    for label, (found, key, color, marker) in points.items():
        point = found["time"], found[key] / MB
        against.scatter(*point, color=color, s=50, marker=marker)
        down = -12 if label == "budget" else 0  # beside Levels(1)
        against.annotate(label, point, (8, down), textcoords="offset points", color=color, va="center")
    tidy(against, xlabel="time of the plain loop", title="memory of a gradient, MB", yscale="log")
    against.set_xlim(0.85, max(1.75, 1.2 * max(found["time"] for found, *_ in points.values())))
    return figure


if __name__ == "__main__":
    run(parser, options, example)
