"""A long loop with a large carry: `policies.Disk` beside slots in memory and the plain loop.

The step is elementwise, on a carry of ``--megabytes``, and costs ``--work`` sines for each element. Each way runs in a
process of its own, whose peak of resident memory is shown, with what the process has before the loop subtracted. Time
is of one gradient, compilations included, and so is ``cpu``, that of all threads; ``waited`` is the part of the time in
which the computation waits for the disk. Gradients are compared by a checksum of their bits.
"""

import hashlib
import json
import resource
import subprocess
import sys
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
from _common import Stopwatch, parse_args, start, write_json

import statetx
from statetx import policies
from statetx._segments.store import Store

OPTIONS = {
    "way": {"choices": ["plain", "slots", "disk"], "help": "measure this way alone, in this process"},
    "steps": {"type": int, "default": 64, "help": "length of the loop"},
    "megabytes": {"type": float, "default": 64.0, "help": "of the carry"},
    "work": {"type": int, "default": 4, "help": "sines of a step for each element"},
    "slots": {"type": int, "default": 4, "help": "carries on the device beside the disk"},
    "segment": {"type": int, "default": 4, "help": "steps of a segment"},
    "in-memory": {"type": int, "default": None, "help": "slots of the loop in memory; by default one a step"},
    "ways": {"nargs": "+", "default": ["disk", "slots", "plain"], "help": "which ways to measure"},
}


def peak_bytes():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(options):
    """Measure one way; returns a row."""
    h = jnp.linspace(0.1, 1, int(options.megabytes * 250_000))
    waited, num_bytes, close, flush = [], [0], Store.close, Store.flush

    def closed(self):
        num_bytes.append(self.num_bytes)
        close(self)

    def flushed(self, pending=0):
        watch = Stopwatch()
        flush(self, pending)
        waited.append(watch.read()["wall"])

    Store.close, Store.flush = closed, flushed

    def step(h, _):
        for _ in range(options.work):
            h = h + 0.1 * jnp.sin(h)
        return h, None

    def loss(h, checkpoint):
        return jnp.mean(statetx.scan(step, h, length=options.steps, checkpoint=checkpoint)[0])

    with tempfile.TemporaryDirectory() as folder:
        disk = policies.Disk(folder, options.segment, slots=options.slots)
        slots = policies.Slots(options.in_memory or options.steps)
        checkpoint = {"plain": None, "slots": slots, "disk": disk}[options.way]
        before, watch = peak_bytes(), Stopwatch()
        gradient = jax.block_until_ready(statetx.grad(loss)(h, checkpoint))
        seconds = watch.read()
    return {
        "way": f"{checkpoint!s}".replace(folder, "store"),
        "seconds": seconds["wall"],
        "cpu": seconds["cpu"],
        "memory": peak_bytes() - before,
        "waited": sum(waited) / seconds["wall"],
        "disk": max(num_bytes),
        "bits": hashlib.blake2b(np.asarray(gradient).data, digest_size=4).hexdigest(),
    }


def main():
    if "--way" in sys.argv:
        print(json.dumps(measure(parse_args(__doc__, **OPTIONS))))
        return
    options, env = start(__doc__, **OPTIONS)
    if options.quick:
        options.steps, options.megabytes = min(options.steps, 32), min(options.megabytes, 1.0)
    sizes = [
        x for name in ("steps", "megabytes", "work", "slots", "segment") for x in (f"--{name}", getattr(options, name))
    ]
    sizes += ["--in-memory", options.in_memory] if options.in_memory else []
    rows = []
    for way in options.ways:
        command = [sys.executable, __file__, "--way", way, *map(str, sizes)]
        rows.append(json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout))
        print(json.dumps(rows[-1]), flush=True)
    if options.json:
        sizes = {name: value for name, value in vars(options).items() if name != "json"}
        write_json(options.json, env, {"options": sizes, "rows": rows})


if __name__ == "__main__":
    main()
