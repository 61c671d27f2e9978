"""Gradients of a loop on disk whose processes are killed: ``killed.py DIRECTORY NUMBERS``.

Each process calls the gradient and kills itself (SIGKILL) after it has opened, renamed or removed the next of these
numbers of files; the next one resumes, and the last one finishes. Prints a line of JSON: in which pass each
process was killed, and whether the last one has the bits of the plain loop.
"""

import json
import os
import signal
import sys

import jax
import jax.numpy as jnp
import numpy as np

import statetx

STEPS, SEGMENT = 40, 4
W = np.random.default_rng(0).normal(size=(3, 3)).astype(np.float32) / 2
XS = np.linspace(0, 1, STEPS, dtype=np.float32)


def gradient(checkpoint):
    w, rng, count = statetx.Param(jnp.asarray(W)), statetx.RngState(0), statetx.State(jnp.zeros(()))

    def step(h, x):
        h = jnp.tanh(h @ w.value + x) + 0.1 * jax.random.uniform(rng.next(), (3,))
        count.value += jnp.sum(h)
        return h, count.value

    def loss(h):
        h, ys = statetx.scan(step, h, XS, checkpoint=checkpoint)
        return jnp.dot(h, h) + jnp.dot(ys, XS)

    value, (of_w, of_h) = statetx.value_and_grad(loss, 0, wrt=w)(W[0])
    results = value, of_w, of_h, count.value, jax.random.key_data(rng.value)
    return "".join(np.asarray(x).tobytes().hex() for x in results)


def kill_at(moment, path):
    num = 0

    def count(event, args):
        nonlocal num
        if event in ("open", "os.rename", "os.remove") and str(args[0]).startswith(path):
            num += 1
            if num > moment:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)


def child(run):
    """Run a function in a forked process; its exit status, and what it returned, if it did."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(write, run().encode())
        os._exit(0)
    os.close(write)
    with open(read, "rb") as pipe:
        text = pipe.read().decode()
    return os.waitpid(pid, 0)[1], text


def main(path, moments):
    disk = statetx.policies.Disk(path, SEGMENT, slots=1, save_every=0, costs=(0.1, 0.1))
    _, expected = child(lambda: gradient(None))  # no backend starts in this process, which forks
    passes = []
    for moment in moments:

        def killed(moment=moment):
            kill_at(moment, path)
            return gradient(disk)

        status, _ = child(killed)
        assert status == signal.SIGKILL
        passes.append("backward" if any(file.startswith("ct-") for file in os.listdir(path)) else "forward")
    _, resumed = child(lambda: gradient(disk))
    print(json.dumps({"killed": passes, "same": resumed == expected != ""}))


if __name__ == "__main__":
    main(sys.argv[1], list(map(int, sys.argv[2:])))
