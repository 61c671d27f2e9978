"""Train one model on 1, 2, 4 and 8 devices, and on two processes, and compare.

A deep residual network reads eight characters and predicts the ninth. Its weights, momenta and batches are split over all
devices (fully sharded data parallelism): each device keeps its part of the weights, and gathers those of a layer when it
comes to it. Layers are rematerialised one by one, so they are gathered again in the backward pass.

The devices are CPU devices of this machine. Two processes are joined by `jax.distributed` over the loopback interface, each
with half of the devices, and exchange data as two hosts do. Half way they save their states, and one process resumes from
there. What each process does is in `_multihost_process.py`.

Predicted is the temporary memory of a device. What is computed from a batch is split by n devices. Not split are the matrix
that a layer is using, which is gathered, and the gradient that is about to be summed over devices; a layer has two matrices of
one size, so these two are as large as the weights of a layer, and one device holds them too:

    memory(n) = (memory(1) - layer) / n + layer
"""

import dataclasses
import json
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from _common import BLUE, GREEN, MIB, ORANGE, BadInput, between, make_parser, run, show_bytes, tidy
from _multihost_process import CHARACTERS, WINDOW, Job
from matplotlib.figure import Figure
from rich.table import Table

PROCESS = Path(__file__).with_name("_multihost_process.py")
RELATIVE = 1e-5  # sums over the batch are taken in another order, and every step carries that on


def launch(job, options, progress):
    """Run the processes of a job to their end; return the summary."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    processes, summary = [], None
    first = options["steps"] // 2 if job.resumes else 0
    task = progress.add_task(job.name, total=options["steps"] - first, status="compiling")
    try:
        for index in range(job.processes):
            given = {"job": dataclasses.asdict(job), "options": options, "index": index, "address": address}
            command = [sys.executable, str(PROCESS), json.dumps(given)]
            processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        for line in processes[0].stdout:
            said = json.loads(line) if line.startswith("{") else {}  # gloo says something too
            if "step" in said:
                progress.update(task, completed=said["step"] - first, status=f"loss {said['loss']:.4f}")
            summary = said if "losses" in said else summary
        errors = [process.communicate()[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    failed = [error for process, error in zip(processes, errors, strict=True) if process.returncode]
    if failed or summary is None:
        raise BadInput(f"a process of {job.name} failed: {(failed or errors)[0][-2000:]}")
    return summary


def jobs(devices):
    """Return what is run: every number of devices, then the largest in two processes, and once more from the middle."""
    most = max(devices)
    return [
        *(Job(f"{n} device{'s' * (n > 1)}", n) for n in devices),
        Job(f"{most} devices, 2 processes", most, processes=2, saves=True),
        Job(f"{most // 2} devices, resumed", most // 2, resumes=True),
    ]


def example(options, progress):
    """Run all jobs; return a table, a figure and results."""
    most = max(options.devices)
    if options.batch % most or options.width % (most * WINDOW) or CHARACTERS % most or most < 2:
        raise BadInput(
            f"--batch, --width / {WINDOW} and {CHARACTERS} must be multiples of the {most} devices, at least 2"
        )
    given = {k: getattr(options, k) for k in ("seed", "steps", "batch", "width", "layers", "lr")}
    sizes = {"layers": options.layers, "layer_bytes": 4 * 8 * options.width**2}
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for job in jobs(options.devices):
            summary = launch(job, {**given, "checkpoints": folder}, progress)
            results[job.name] = {**dataclasses.asdict(job), **sizes, **summary}
    one = results[jobs(options.devices)[0].name]
    for result in results.values():
        n, layer = result["devices"] / one["devices"], one["layer_bytes"]
        result["predicted_bytes"] = (one["temporary_bytes"] - layer) / n + layer
        expected = np.array(one["losses"][-len(result["losses"]) :])
        result["loss_difference"] = float(np.max(np.abs(np.array(result["losses"]) / expected - 1)))
        if not result["loss_difference"] < RELATIVE:
            raise BadInput(f"the losses of {result['name']} differ by {result['loss_difference']:.1e}, relatively")
    return report(results), plot(results), {"runs": results}


def report(results):
    """Return a table with a row for each job."""
    table = Table(title="One model, split over devices; memory and communication of one device in one step")
    for column in "devices processes loss difference temporary predicted weights communication seconds".split():
        table.add_column(column, justify="right")
    for r in results.values():
        table.add_row(
            str(r["devices"]) + (", resumed" if r["resumes"] else ""),
            str(r["processes"]),
            f"{r['losses'][-1]:.6f}",
            f"{r['loss_difference']:.1e}",
            show_bytes(r["temporary_bytes"]),
            f"{show_bytes(r['predicted_bytes'])} ({r['temporary_bytes'] / r['predicted_bytes'] - 1:+.0%})",
            show_bytes(r["argument_bytes"]),
            show_bytes(sum(r["communicated_bytes"].values())),
            f"{r['seconds']:.3f}",
        )
    return table


def plot(results):
    """Draw losses over each other, memory beside its prediction, and communication."""
    figure = Figure(figsize=(13, 4.2), layout="constrained")
    losses, memory, traffic = figure.subplots(1, 3)
    colours = [ORANGE, GREEN, BLUE, "#7a4fa3", "#222222", "#c0392b"]
    for (name, r), colour, size in zip(results.items(), colours, (8, 6, 4, 2.6, 1.4, 1), strict=False):
        last = len(next(iter(results.values()))["losses"])
        steps = range(last - len(r["losses"]) + 1, last + 1)
        losses.plot(steps, r["losses"], label=name, color=colour, linewidth=size, alpha=0.9)
    losses.legend(frameon=False, fontsize=8)
    losses.xaxis.get_major_locator().set_params(integer=True)
    tidy(losses, xlabel="training step", ylabel="loss [nats]", title="the same losses")
    names = [
        f"{r['devices']}" + (" (2 proc.)" if r["processes"] > 1 else "") for r in results.values() if not r["resumes"]
    ]
    shown = [r for r in results.values() if not r["resumes"]]
    places = np.arange(len(shown))
    for shift, key, colour in ((-0.2, "temporary_bytes", BLUE), (0.2, "predicted_bytes", ORANGE)):
        bars = memory.bar(places + shift, [r[key] / MIB for r in shown], 0.38, color=colour, label=key.split("_")[0])
        memory.bar_label(bars, fmt="%.1f", fontsize=8)
    memory.set_xticks(places, names)
    memory.legend(frameon=False)
    tidy(memory, xlabel="devices", ylabel="MiB", title="temporary memory of a device")
    kinds = sorted({kind for r in shown for kind in r["communicated_bytes"]})
    bottom = np.zeros(len(shown))
    for kind, colour in zip(kinds, colours, strict=False):
        height = np.array([r["communicated_bytes"].get(kind, 0) / MIB for r in shown])
        traffic.bar(places, height, 0.6, bottom=bottom, label=kind, color=colour)
        bottom += height
    traffic.set_xticks(places, names)
    traffic.set_ylim(top=1.2 * bottom.max())
    traffic.legend(frameon=False, loc="upper left", ncols=2)
    tidy(traffic, xlabel="devices", ylabel="MiB", title="results of collectives, a step of a device")
    return figure


def main():
    """Run the example."""
    parser = make_parser(__doc__, "train_multihost")
    add = parser.add_argument
    add("--devices", type=between(int), nargs="+", default=[1, 2, 4, 8], help="how many, the most last")
    add("--steps", type=between(int, 1), default=20, help="training steps of each job")
    add("--batch", type=between(int), default=2048, help="windows in a batch, of all devices together")
    add("--width", type=between(int), default=128, help="of a layer, which has 8 times its square in weights")
    add("--layers", type=between(int), default=8, help="layers")
    add("--lr", type=between(float), default=0.05, help="learning rate")
    run(parser, example, devices=[1, 2, 4], steps=4, batch=512, width=64, layers=4)


if __name__ == "__main__":
    main()
