"""One process of `train_multihost.py`: builds the model, trains it on a mesh over all processes, and prints its progress."""

import dataclasses
import json
import pydoc_data.topics
import re
import statistics
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding, PartitionSpec

import statetx

WINDOW, CHARACTERS = 8, 96  # printable ASCII, and one character for all others


@dataclasses.dataclass(frozen=True)
class Job:
    """One training: on how many devices, in how many processes."""

    name: str
    devices: int
    processes: int = 1
    saves: bool = False
    resumes: bool = False


def split(x, mesh, axis=0):
    """Return an array split along an axis over the devices of a mesh; without an axis, replicated on every device."""
    spec = PartitionSpec() if axis is None else PartitionSpec(*[None] * axis, "data")
    return jax.make_array_from_callback(np.shape(x), NamedSharding(mesh, spec), lambda index: np.asarray(x)[index])


def weights(rng, *shape):
    return rng.normal(size=shape, scale=shape[-2] ** -0.5).astype(np.float32)


class Layer:
    """A residual layer whose input is split over the batch, independent of the sharding of the weights."""

    def __init__(self, rng, width, mesh):
        self.up = statetx.Param(weights(rng, width, 4 * width))
        self.down = statetx.Param(weights(rng, 4 * width, width) / 4)
        self.sharding = NamedSharding(mesh, PartitionSpec("data"))

    def __call__(self, x):
        x = jax.lax.with_sharding_constraint(x, self.sharding)
        return x + jnp.tanh(x @ self.up.value) @ self.down.value


class Model:
    """Embedding with dropout, layers, readout, and an optimizer: all arrays are split along one axis."""

    def __init__(self, mesh, *, seed, width, layers, lr):
        rng = np.random.default_rng(seed)
        self.embedding = statetx.Param(weights(rng, CHARACTERS, width // WINDOW))
        self.readout = statetx.Param(weights(rng, width, CHARACTERS))
        self.layers = statetx.stack(lambda: Layer(rng, width, mesh), layers)
        self.weights = statetx.states(self, statetx.Param)
        for path, weight in self.weights.items():  # the first axis of a stack counts the layers
            weight.value = split(weight.value, mesh, axis=1 if path.startswith("layers") else 0)
        self.optimizer = statetx.Optimizer(optax.sgd(lr, momentum=0.9), self.weights)  # momenta are split like weights
        self.steps = statetx.State(split(np.int32(0), mesh, axis=None))
        self.dropout = statetx.RngState(seed)

    def loss(self, text):
        """Return the mean cross-entropy of the last character of each window, in nats."""
        x = self.embedding.value[text[:, :-1]].reshape(len(text), -1)
        keep = jax.random.bernoulli(self.dropout.next(), 0.9, x.shape)  # the same on any number of devices
        x = jnp.where(keep, x / 0.9, 0)
        x = statetx.remat_scan(self.layers, statetx.policies.Levels(1))(x)
        logits = jax.nn.log_softmax(x @ self.readout.value)
        return -jnp.mean(jnp.take_along_axis(logits, text[:, -1:], axis=1))

    def step(self, text):
        loss, grads = statetx.value_and_grad(self.loss, wrt=self.weights)(text)
        self.optimizer.update(grads)
        self.steps.value += 1
        return loss


def train(job, options):
    """Train, and print a line of JSON for each step; the last line is a summary."""
    mesh = jax.make_mesh((job.devices,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    model = Model(mesh, **{name: options[name] for name in ("seed", "width", "layers", "lr")})
    batches = sample(options)
    step = statetx.jit(model.step, donate_states=True)
    compiled = step.lower(split(batches[0], mesh)).compile()
    say = print if jax.process_index() == 0 else lambda *_, **__: None
    losses, seconds = [], []
    with ocp.CheckpointManager(options["checkpoints"]) as manager:
        if job.resumes:
            wanted = ocp.args.StandardRestore(statetx.values(model))
            statetx.restore(model, manager.restore(manager.latest_step(), args=wanted))
        for i in range(int(model.steps.value), options["steps"]):
            start = time.perf_counter()
            losses.append(float(step(split(batches[i], mesh))))
            seconds.append(time.perf_counter() - start)
            say(json.dumps({"step": i + 1, "loss": losses[-1]}), flush=True)
            if job.saves and i + 1 == options["steps"] // 2:
                manager.save(i + 1, args=ocp.args.StandardSave(statetx.values(model)))
    summary = {
        "losses": losses,
        "seconds": statistics.median(seconds[1:] or seconds),
        "temporary_bytes": compiled.memory_analysis().temp_size_in_bytes,
        "argument_bytes": compiled.memory_analysis().argument_size_in_bytes,
        "communicated_bytes": communicated(compiled.as_text()),
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
    """Return the bytes that a device receives from the collectives of a compiled program, by kind of collective.

    The text of the program is a list of computations. A computation called by a loop counts with the loop's trip count.
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
            if match := COLLECTIVE.search(line):
                arrays = re.findall(r"(\w+)\[([\d,]*)\]", match[1])
                size = sum(SIZES[kind] * int(np.prod([int(d) for d in dims.split(",") if d])) for kind, dims in arrays)
                total[match[2]] = total.get(match[2], 0) + size
            times = re.search(r'known_trip_count":\{"n":"(\d+)"', line)
            for group in re.findall(r"(?:body|calls|to_apply|branch_computations)=\{?([%\w.\-, ]+)", line):
                for called in group.replace("%", "").split(", "):
                    for kind, size in count(called).items():
                        total[kind] = total.get(kind, 0) + size * (int(times[1]) if times else 1)
        return total

    return count("ENTRY")


def work(text):
    """Run one process of a job, from its description in JSON."""
    config = json.loads(text)
    job = Job(**config["job"])
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", job.devices // job.processes)
    if job.processes > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(config["address"], job.processes, config["index"])
    train(job, config["options"])


if __name__ == "__main__":
    work(sys.argv[1])
