"""Train one model on 1, 2, 4 and 8 devices, and on two processes, and compare.

A deep residual network reads eight characters and predicts the ninth. Its weights, momenta and batches are split over all
devices (fully sharded data parallelism): each device keeps its part of the weights, and gathers those of a layer when it
comes to it. Layers are rematerialised one by one, so they are gathered again in the backward pass.

The devices are CPU devices of this machine. Two processes are joined by `jax.distributed` over the loopback interface, each
with half of the devices, and exchange data as two hosts do. Half way they save their states, and one process resumes from
there.

Predicted is the temporary memory of a device. What is computed from a batch is split by n devices. Not split are the matrix
that a layer is using, which is gathered, and the gradient that is about to be summed over devices; a layer has two matrices of
one size, so these two are as large as the weights of a layer, and one device holds them too:

    memory(n) = (memory(1) - layer) / n + layer
"""

import dataclasses
import json
import pydoc_data.topics
import re
import socket
import statistics
import subprocess
import sys
import time

import numpy as np
from _common import BLUE, GREEN, MIB, ORANGE, BadInput, between, make_parser, run, show_bytes, tidy
from matplotlib.figure import Figure
from rich.table import Table

WINDOW, CHARACTERS = 8, 96  # the printable ones of ASCII, and one for all others
RELATIVE = 1e-4  # sums over the batch are taken in another order, and every step carries that on


@dataclasses.dataclass(frozen=True)
class Job:
    """One training: on how many devices, in how many processes."""

    name: str
    devices: int
    processes: int = 1
    saves: bool = False
    resumes: bool = False


# -- what a process does -----------------------------------------------------------------------------------------


def train(job, options):
    """Train in this process, and print a line of JSON for each step; the last is a summary."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    import statetx

    mesh = jax.make_mesh(
        (job.devices,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[: job.devices]
    )
    rng = np.random.default_rng(options["seed"])
    width, hidden = options["width"], 4 * options["width"]

    def split(x, axis=0):
        """An array on the mesh, split along an axis; None to have it on every device."""
        spec = PartitionSpec(*[None] * axis, "data") if axis is not None else PartitionSpec()
        return jax.make_array_from_callback(np.shape(x), NamedSharding(mesh, spec), lambda index: x[index])

    def weights(*shape):
        return rng.normal(size=shape, scale=shape[-2] ** -0.5).astype(np.float32)

    class Layer:
        def __init__(self):
            self.up = statetx.Param(weights(width, hidden))
            self.down = statetx.Param(weights(hidden, width) / 4)

        def __call__(self, x):
            x = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec("data")))
            return x + jnp.tanh(x @ self.up.value) @ self.down.value

    class Model:
        def __init__(self):
            self.embedding = statetx.Param(split(weights(CHARACTERS, width // WINDOW)))
            self.layers = statetx.stack(Layer, options["layers"])
            self.readout = statetx.Param(split(weights(width, CHARACTERS)))
            for state in statetx.states(self.layers).values():
                state.value = split(np.asarray(state.value), axis=1)  # the first axis is that of the layers
            self.weights = statetx.states(self, statetx.Param)
            self.momenta = {path: statetx.State(split_like(w.value)) for path, w in self.weights.items()}
            self.steps = statetx.State(split(np.zeros((), np.int32), axis=None))

        def loss(self, text):
            x = self.embedding.value[text[:, :-1]].reshape(len(text), width)
            x = statetx.remat_scan(self.layers)(x)
            logits = jax.nn.log_softmax(x @ self.readout.value)
            return -jnp.mean(jnp.take_along_axis(logits, text[:, -1:], axis=1))

        def step(self, text):
            loss, grads = statetx.value_and_grad(self.loss, wrt=self.weights)(text)
            for path, weight in self.weights.items():
                momentum = self.momenta[path]
                momentum.value = 0.9 * momentum.value + grads[path]
                weight.value = weight.value - options["lr"] * momentum.value
            self.steps.value += 1
            return loss

    def split_like(x):
        return jax.make_array_from_callback(x.shape, x.sharding, lambda i: np.zeros(x.shape, x.dtype)[i])

    model = Model()
    batches = sample(options)
    step = statetx.jit(model.step, donate_states=True)
    compiled = step.lower(split(batches[0])).compile()
    say = print if jax.process_index() == 0 else lambda *_, **__: None
    losses, seconds = [], []
    with statetx.Checkpointer(options["checkpoints"], model) as checkpointer:
        if job.resumes:
            checkpointer.restore()
        for i in range(int(model.steps.value), options["steps"]):
            start = time.perf_counter()
            losses.append(float(step(split(batches[i]))))
            seconds.append(time.perf_counter() - start)
            say(json.dumps({"step": i + 1, "loss": losses[-1]}), flush=True)
            if job.saves and i + 1 == options["steps"] // 2:
                checkpointer.save(i + 1)
    summary = {
        "losses": losses,
        "seconds": statistics.median(seconds[1:] or seconds),
        "temporary_bytes": compiled.memory_analysis().temp_size_in_bytes,
        "argument_bytes": compiled.memory_analysis().argument_size_in_bytes,
        "communicated_bytes": communicated(compiled.as_text()),
        "layer_bytes": 4 * 2 * width * hidden,
    }
    say(json.dumps(summary), flush=True)


def sample(options):
    """Return the text of every step, [batch, WINDOW + 1] integers; the same in every process."""
    topics = pydoc_data.topics.topics
    codes = np.frombuffer("".join(topics[name] for name in sorted(topics)).encode("ascii", "replace"), np.uint8)
    codes = np.where((codes >= 32) & (codes < 127), codes - 31, 0).astype(np.int32)
    rng = np.random.default_rng(options["seed"])
    starts = rng.integers(len(codes) - WINDOW, size=(options["steps"], options["batch"]))
    return codes[starts[..., None] + np.arange(WINDOW + 1)]


SIZES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8, "f64": 8}
COLLECTIVE = re.compile(r"= (.*?) (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(")


def communicated(program):
    """Return the bytes that the collectives of a compiled program give to a device, by their kind.

    The text of the program is a list of computations, of which loops call theirs as often as is known.
    """
    computations, name = {}, None
    for line in program.splitlines():
        if line.endswith("{") and (head := re.match(r"(ENTRY )?%?([\w.\-]+) ", line)):
            name = "ENTRY" if head[1] else head[2]
            computations[name] = []
        elif name:
            computations[name].append(line)

    def count(name):
        total = {}
        for line in computations.get(name, ()):
            if found := COLLECTIVE.search(line):
                arrays = re.findall(r"(\w+)\[([\d,]*)\]", found[1])
                size = sum(SIZES[kind] * int(np.prod([int(d) for d in dims.split(",") if d])) for kind, dims in arrays)
                total[found[2]] = total.get(found[2], 0) + size
            times = re.search(r'known_trip_count":\{"n":"(\d+)"', line)
            for group in re.findall(r"(?:body|calls|to_apply|branch_computations)=\{?([%\w.\-, ]+)", line):
                for called in group.replace("%", "").split(", "):
                    for kind, size in count(called).items():
                        total[kind] = total.get(kind, 0) + size * (int(times[1]) if times else 1)
        return total

    return count("ENTRY")


def work(text):
    """Be one process of a job, which is described in JSON."""
    given = json.loads(text)
    job = Job(**given["job"])
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", job.devices // job.processes)
    if job.processes > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(given["address"], job.processes, given["index"])
    train(job, given["options"])


# -- what this process does --------------------------------------------------------------------------------------


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
            command = [sys.executable, __file__, "--work", json.dumps(given)]
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
    given["checkpoints"] = str((options.out / f"checkpoints-{time.time_ns()}").resolve())
    results = {}
    for job in jobs(options.devices):
        results[job.name] = {**dataclasses.asdict(job), **launch(job, given, progress)}
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
    """Run the example, or one of its processes."""
    if sys.argv[1:2] == ["--work"]:
        work(sys.argv[2])
        return
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
