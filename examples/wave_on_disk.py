"""Differentiate a long simulation of waves, with its carries on disk; kill the run, start it again, and it goes on.

A pulse runs through a string of cells with different speeds, back and forth, and one receiver records it. The gradient
of the misfit between this record and one from other speeds, with respect to all speeds, is what a full waveform
inversion starts with (Tarantola 1984, "Inversion of seismic reflection data in the acoustic approximation"). It runs
every step backward, so a simulation of a million steps needs either the field at every step or a schedule.

`policies.Disk` drives the loop in segments and stores fields on the device and in the folder ``store``. Kill the
process at any moment (``kill -9``) and repeat the command: it resumes, forward or backward, and gives the same bits.
Expect the gradient of `policies.Slots`, which stores fields in memory only and starts again after a kill.
``--steps 1000000`` takes some minutes.
"""

from _common import (
    BLUE,
    GREY,
    ORANGE,
    between,
    make_parser,
    parse,
    run,
    show_difference,
    show_seconds,
    tidy,
)


def make_options():
    """Describe the options."""
    parser = make_parser(__doc__, "wave_on_disk")
    add = parser.add_argument
    add("--steps", type=between(int), default=100_000, help="time steps of the simulation")
    add("--cells", type=between(int, 15), default=2000, help="cells of the string")
    add("--segment", type=between(int), default=500, help="steps that run as one program")
    add("--slots", type=between(int), default=8, help="pairs of fields that are stored on the device")
    add("--save-every", type=between(float, -1e-9), default=5.0, help="seconds between files to resume from")
    return parser


if __name__ == "__main__":  # before the large imports, so that --help and mistakes are answered at once
    parser = make_options()
    options = parse(parser, seconds=12, steps=2000, cells=200, segment=100, save_every=0.0)

import time

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure
from rich.table import Table

import statetx
from statetx import policies


def simulate(speeds, num_steps, checkpoint=None, is_shown=False):
    """The record of the receiver, for speeds in cells a step."""
    num_cells = len(speeds)
    now, before = (statetx.State(jnp.zeros(num_cells)) for _ in range(2))
    squared = speeds**2

    def step(n):
        u = now.value
        pulse = jnp.exp(-(((n - 60.0) / 20.0) ** 2))
        bend = jnp.roll(u, 1) - 2 * u + jnp.roll(u, -1)
        new = 2 * u - before.value + squared * bend
        new = new.at[num_cells // 4].add(pulse).at[0].set(0.0).at[-1].set(0.0)  # a source, and two fixed ends
        before.value, now.value = u, new * 0.99999  # the string loses energy
        return new[3 * num_cells // 4]

    body = lambda _, n: (None, step(n))
    times = jnp.arange(float(num_steps))
    return statetx.scan(body, None, times, checkpoint=checkpoint, progress=is_shown)[1]


def example(options, progress, results):
    """Compute the gradient on disk and in memory, and compare."""
    place = np.linspace(0, 1, options.cells)
    true = jnp.asarray(0.5 + 0.1 * (np.abs(place - 0.55) < 0.1), jnp.float32)
    start = jnp.full(options.cells, 0.5)
    record = jax.jit(simulate, static_argnums=1)(true, options.steps)

    def misfit(speeds, checkpoint, is_shown=False):
        return jnp.mean((simulate(speeds, options.steps, checkpoint, is_shown) - record) ** 2)

    store = options.out / "store"
    disk = policies.Disk(store, options.segment, slots=options.slots, save_every=options.save_every)
    found = len([*store.glob("*.arrays")])
    if found:
        progress.console.print(f"{store} has {found} files: the run resumes from there", soft_wrap=True)
    progress.stop()  # for the loop's own line
    began = time.perf_counter()
    value, on_disk = statetx.value_and_grad(misfit)(start, disk, True)
    seconds = time.perf_counter() - began
    progress.start()
    results |= {"misfit": float(value), "gradient": np.asarray(on_disk).tolist(), "resumed_from_files": found}
    results["seconds"] = {"disk": seconds}

    slots = policies.Slots(max(options.slots, round((2 * options.steps) ** 0.5)))
    in_memory = statetx.jit(statetx.grad(lambda speeds: misfit(speeds, slots)))
    began = time.perf_counter()
    gradient = np.asarray(in_memory(start))
    results["seconds"]["memory"] = time.perf_counter() - began
    difference = float(np.max(np.abs(on_disk - gradient)) / np.max(np.abs(gradient)))
    results |= {"difference": difference, "num_slots": slots.num}

    title = f"A gradient through {options.steps:,} steps of {options.cells:,} cells"
    table = Table("", "on disk", "in memory", title=title)
    on_device, _, in_files = statetx.loop_report(lambda speeds: misfit(speeds, disk), start, policies=()).rows[0].tiers
    table.add_row("pairs of fields in memory", str(on_device.num_carries), str(slots.num))
    table.add_row("bytes of files", f"{in_files.num_bytes:,}", "")
    runs = [policy.num_runs(options.steps) / options.steps for policy in (disk, slots)]
    table.add_row("runs a step", *(f"{r:.2f}" for r in runs))
    table.add_row("time, compilations included", *map(show_seconds, results["seconds"].values()))
    table.add_row("largest difference of gradients", "", show_difference(difference))
    return table, draw(place, true, start, on_disk, record)


def draw(place, true, start, gradient, record):
    """Draw the speeds, the gradient, and the end of the record."""
    figure = Figure(figsize=(12, 4), layout="constrained")
    speeds, slope, sound = figure.subplots(1, 3)
    for values, color, label in ((start, GREY, "start"), (true, ORANGE, "true")):
        speeds.plot(place, values, color=color, label=label)
    speeds.legend(frameon=False)
    tidy(speeds, xlabel="place", ylabel="speed [cells a step]", title="speeds")
    slope.plot(place, gradient, color=BLUE, lw=0.7)
    tidy(slope, xlabel="place", ylabel="slope of the misfit", title="gradient")
    last = np.asarray(record)[-1000:]
    sound.plot(np.arange(len(record) - len(last), len(record)), last, color=ORANGE)
    tidy(sound, xlabel="step", ylabel="displacement", title="record, its last steps")
    return figure


if __name__ == "__main__":
    run(parser, options, example)
