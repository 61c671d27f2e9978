"""Train one model on 1, 2, 4 and 8 devices, and on two processes, and compare.

A deep residual network reads eight characters and predicts the ninth. Its weights, momenta and batches are split over
all devices (fully sharded data parallelism): each device stores its part of the weights, and gathers the weights of a
layer just before it uses them. Layers are rematerialized one by one, so their weights are gathered again in the
backward pass.

The devices are CPU devices of this machine. Two processes are joined by `jax.distributed` over the loopback interface,
each with half of the devices, and exchange data as two hosts do. Halfway they save their states, and one process
resumes from there. The program of each process is `_multihost_process.py`.

The table compares the temporary memory of a device with a prediction. Everything computed from a batch is split over n
devices. Two buffers are not split: the gathered matrix that a layer uses, and the gradient before it is summed over the
devices. A layer has two matrices of one size, so both buffers together are as large as the weights of a layer:

    memory(n) = (memory(1) - layer) / n + layer
"""

from _common import (
    BLUE,
    GREEN,
    MIB,
    ORANGE,
    BadInput,
    between,
    legend_below,
    make_parser,
    parse,
    run,
    show_difference,
    show_seconds,
    tidy,
)


def make_options():
    """Describe the options."""
    parser = make_parser(__doc__, "train_multihost")
    add = parser.add_argument
    add("--devices", type=between(int), nargs="+", default=[1, 2, 4, 8], help="numbers of devices, the largest last")
    add("--steps", type=between(int, 1), default=20, help="training steps of each job")
    add("--batch", type=between(int), default=2048, help="windows in a batch, of all devices together")
    add("--width", type=between(int), default=128, help="width of a layer, which has 8 times its square in weights")
    add("--layers", type=between(int), default=8, help="layers")
    add("--lr", type=between(float), default=0.05, help="learning rate")
    return parser


if __name__ == "__main__":  # before the large imports, so that --help and mistakes are answered at once
    parser = make_options()
    options = parse(parser, seconds=30, devices=[1, 2, 4], steps=4, batch=512, width=64, layers=4)

import dataclasses
import json
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from _multihost_process import CHARACTERS, WINDOW, Job
from matplotlib.figure import Figure
from rich.table import Table

PROCESS = Path(__file__).with_name("_multihost_process.py")
RELATIVE = 1e-5  # other device counts sum over the batch in another order, and every step adds to the difference


def launch(job, options, progress, result):
    """Run the processes of a job to their end; fill a dict with the losses, as they come, and the summary."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    processes, losses, summary = [], result.setdefault("losses", []), None
    first = options["steps"] // 2 if job.resumes else 0
    task = progress.add_task(job.name, total=options["steps"] - first, status="compiling")
    try:
        for index in range(job.processes):
            config = {"job": dataclasses.asdict(job), "options": options, "index": index, "address": address}
            command = [sys.executable, str(PROCESS), json.dumps(config)]
            processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        for line in processes[0].stdout:
            message = json.loads(line) if line.startswith("{") else {}  # gloo prints too
            if "step" in message:
                losses.append(message["loss"])
                progress.update(task, completed=len(losses), status=f"loss {message['loss']:.4f}")
            summary = message if "losses" in message else summary
        errors = [process.communicate()[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    failed = [error for process, error in zip(processes, errors, strict=True) if process.returncode]
    if failed or summary is None:
        raise BadInput(f"a process of {job.name} failed: {(failed or errors)[0][-2000:]}")
    result |= summary


def make_jobs(devices):
    """Return the jobs: every number of devices, the largest in two processes, and one that resumes halfway."""
    most = max(devices)
    return [
        *(Job(f"{n} device{'s' * (n > 1)}", n) for n in devices),
        Job(f"{most} devices, 2 processes", most, processes=2, saves=True),
        Job(f"{most // 2} device{'s' * (most > 3)}, resumed", most // 2, resumes=True),
    ]


def example(options, progress, results):
    """Run all jobs, and compare."""
    most = max(options.devices)
    if options.batch % most or options.width % (most * WINDOW) or CHARACTERS % most or most < 2:
        raise BadInput(
            f"--batch, --width / {WINDOW} and {CHARACTERS} must be multiples of the {most} devices, at least 2"
        )
    settings = {k: getattr(options, k) for k in ("seed", "steps", "batch", "width", "layers", "lr")}
    sizes = {"layers": options.layers, "layer_bytes": 4 * 8 * options.width**2}
    runs = results["runs"] = {}
    with tempfile.TemporaryDirectory() as folder:
        for job in make_jobs(options.devices):
            runs[job.name] = {**dataclasses.asdict(job), **sizes, "losses": []}
            launch(job, {**settings, "checkpoints": folder}, progress, runs[job.name])
    one = next(iter(runs.values()))
    for r in runs.values():
        n, layer = r["devices"] / one["devices"], one["layer_bytes"]
        r["predicted_bytes"] = (one["temporary_bytes"] - layer) / n + layer
        expected = np.array(one["losses"][-len(r["losses"]) :])
        r["loss_difference"] = float(np.max(np.abs(np.array(r["losses"]) / expected - 1)))
        if not r["loss_difference"] < RELATIVE:
            raise BadInput(f"the losses of {r['name']} differ by {r['loss_difference']:.1e}, relatively")
    return report(runs), plot(runs)


def report(runs):
    """Return a table with a column for each job."""

    def label(r):
        return f"{r['devices']}" + "\nresumed" * r["resumes"] + "\n2 proc." * (r["processes"] > 1)

    table = Table("devices", title="One model, split over devices; sizes are of one device, in one step")
    for r in runs.values():
        table.add_column(label(r), justify="right")
    table.add_row("temporary, MiB", *(f"{r['temporary_bytes'] / MIB:.2f}" for r in runs.values()))
    table.add_row("predicted, MiB", *(f"{r['predicted_bytes'] / MIB:.2f}" for r in runs.values()))
    errors = (r["temporary_bytes"] / r["predicted_bytes"] - 1 for r in runs.values())
    table.add_row("measured - pred.", *(f"{error:+.0%}" for error in errors))
    table.add_row("arguments, MiB", *(f"{r['argument_bytes'] / MIB:.2f}" for r in runs.values()))
    table.add_row("received, MiB", *(f"{sum(r['communicated_bytes'].values()) / MIB:.2f}" for r in runs.values()))
    table.add_row("time", *(show_seconds(r["seconds"]) for r in runs.values()))
    table.add_section()
    table.add_row("last loss, nats", *(f"{r['losses'][-1]:.4f}" for r in runs.values()))
    table.add_row("rel. difference", *(show_difference(r["loss_difference"]) for r in runs.values()))
    return table


def plot(runs):
    """Draw losses over each other, memory beside its prediction, and communication."""
    figure = Figure(figsize=(13, 5), layout="constrained")
    losses, memory, traffic = figure.subplots(1, 3)
    colors = [ORANGE, GREEN, BLUE, "#7a4fa3", "#222222", "#c0392b"]
    num_steps = len(next(iter(runs.values()))["losses"])
    for (name, r), color, width in zip(runs.items(), colors, (8, 6, 4, 2.6, 1.4, 1), strict=False):
        steps = range(num_steps - len(r["losses"]) + 1, num_steps + 1)
        losses.plot(steps, r["losses"], label=name, color=color, linewidth=width, alpha=0.9)
    tidy(losses, counts="x", xlabel="training step", ylabel="loss [nats]", title="equal losses")
    legend_below(losses, columns=2)

    shown = [r for r in runs.values() if not r["resumes"]]
    names = [f"{r['devices']}" + "\n2 processes" * (r["processes"] > 1) for r in shown]
    places = np.arange(len(shown))
    for shift, kind, color in ((-0.2, "temporary", BLUE), (0.2, "predicted", ORANGE)):
        bars = memory.bar(places + shift, [r[f"{kind}_bytes"] / MIB for r in shown], 0.38, color=color, label=kind)
        memory.bar_label(bars, fmt="%.1f", fontsize=8)
    memory.set_xticks(places, names)
    tidy(memory, xlabel="devices", ylabel="MiB", title="temporary memory of a device")
    legend_below(memory, columns=2)

    kinds = sorted({kind for r in shown for kind in r["communicated_bytes"]})
    bottom = np.zeros(len(shown))
    for kind, color in zip(kinds, colors, strict=False):
        height = np.array([r["communicated_bytes"].get(kind, 0) / MIB for r in shown])
        traffic.bar(places, height, 0.6, bottom=bottom, label=kind, color=color)
        bottom += height
    traffic.set_xticks(places, names)
    tidy(traffic, xlabel="devices", ylabel="MiB", title="results of collectives, per step and device")
    legend_below(traffic, columns=2)
    return figure


if __name__ == "__main__":
    run(parser, options, example)
