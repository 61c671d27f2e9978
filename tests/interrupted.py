"""A training run to be killed: ``interrupted.py DIRECTORY STEPS``; it resumes from the last step saved there.

Prints a line of JSON for each event: the first step, the loss of each step, and each step that is safely on
disk. At the end it trains once more from the beginning, without saving, and prints the reference losses.
"""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np

import statetx

WAIT_EVERY = 4


class Trainer:
    """A perceptron with dropout and momentum; all that a step depends on is in its states."""

    def __init__(self):
        # NumPy, and few random draws: the time of this process is compilation.
        start = np.random.default_rng(0)
        shapes = {"in": (8, 16), "out": (16,)}
        self.w = statetx.Param({k: jnp.asarray(start.normal(size=s), jnp.float32) for k, s in shapes.items()})
        self.moment = statetx.State({k: jnp.asarray(np.zeros(s), jnp.float32) for k, s in shapes.items()})
        self.rng = statetx.RngState(1)
        self.step = statetx.State(0)
        self.train = statetx.jit(self._train, donate_states=True)

    def loss(self, x, y):
        h = jnp.tanh(x @ self.w.value["in"])
        h = jnp.where(jax.random.bernoulli(self.rng.next(), 0.8, h.shape), h, 0.0)
        return jnp.mean((h @ self.w.value["out"] - y) ** 2)

    def _train(self):
        x = jnp.sin(self.step.value + jnp.arange(256.0).reshape(32, 8) ** 2)
        loss, grads = statetx.value_and_grad(self.loss, wrt=self.w)(x, jnp.sin(x.sum(-1)))
        self.moment.value = jax.tree.map(lambda m, g: 0.9 * m + g, self.moment.value, grads)
        self.w.value = jax.tree.map(lambda w, m: w - 0.01 * m, self.w.value, self.moment.value)
        self.step.value += 1
        return loss


def say(**what):
    print(json.dumps(what), flush=True)


def main(directory, steps):
    trainer = Trainer()
    with statetx.Checkpointer(directory, trainer, max_to_keep=2) as checkpointer:
        say(begin=checkpointer.restore() or 0)
        while int(trainer.step.value) < steps:
            loss = float(trainer.train()).hex()
            say(step=int(trainer.step.value), loss=loss)
            checkpointer.save(int(trainer.step.value))
            if int(trainer.step.value) % WAIT_EVERY == 0:
                say(saved=checkpointer.wait())
    say(saved=steps)
    again = Trainer()
    say(expected=[float(again.train()).hex() for _ in range(steps)])


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
