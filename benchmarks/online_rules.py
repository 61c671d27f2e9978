"""Gradients of a deep recurrent spiking network: braintrace's online rules against the exact gradient in bounded
memory.

Compared
    The network of ``examples/spiking_deep.py`` in small, with a loss in every time step, as online rules need it:
    layers of leaky integrate-and-fire neurons (``brainpy.state``) with recurrent weights and surrogate gradients.
    "exact" is ``statetx.scan`` with ``Slots(16)`` on the same model, the same weights and the same events; it is
    compared with a plain scan before anything else. D-RTRL keeps a trace for each weight and each example, ES-D-RTRL
    (``pp_prop``) one for each neuron. Both approximate: they drop the terms by which a neuron's past acts on it through
    other neurons.

Measured
    The cosine of the angle between the gradient of a rule and the exact one, over all weights into a layer, and the
    ratio of their norms: means over batches of random streams, at the initial weights. The readout is left out: it has
    no past, and braintrace 0.2.6 gives it zeros. Memory is XLA's temporary memory of the compiled gradient; CPU time is
    of the whole process.
"""

from __future__ import annotations

import warnings
from typing import Any

import brainstate
import braintools
import braintrace
import brainunit as u
import jax
import jax.numpy as jnp
import numpy as np
import optax
import spiking
from _common import interleave, show, start, summaries, timed, write_json
from brainpy.state import LIF

import statetx

LAYERS, NEURONS, BATCH, SIZE, CLASSES = 3, 64, 16, 8, 8
RULES: dict[str, tuple[Any, dict[str, Any]]] = {
    "D-RTRL": (braintrace.D_RTRL, {}),
    "ES-D-RTRL, decay 0.9": (braintrace.pp_prop, {"decay_or_rank": 0.9}),
    "ES-D-RTRL, decay 0.99": (braintrace.pp_prop, {"decay_or_rank": 0.99}),
}


class Layer(brainstate.nn.Module):
    """Leaky integrate-and-fire neurons that see the layer below and their own last spikes."""

    def __init__(self, num_inputs: int, num: int, steps: int) -> None:
        super().__init__()
        tau = np.geomspace(4, steps / 4, num, dtype=np.float32)
        normal, zero = braintools.init.KaimingNormal(scale=10.0), braintools.init.Constant(0.0)
        # braintrace's own layer, whose weight it traces; for other transforms it is brainstate's.
        self.weights = braintrace.nn.Linear(num_inputs + num, num, w_init=normal, b_init=None)
        self.neurons = LIF(
            num, R=np.sqrt(tau), tau=tau * u.ms, V_th=1.0, V_reset=0.0, V_rest=0.0, V_initializer=zero,
            spk_fun=braintools.surrogate.Arctan(alpha=2.0),
        )  # fmt: skip

    def update(self, x: jax.Array) -> jax.Array:
        return self.neurons(self.weights(jnp.concatenate([x, self.neurons.get_spike()], -1)))


class Network(brainstate.nn.Module):
    def __init__(self, steps: int) -> None:
        super().__init__()
        self.layers = [Layer(NEURONS if i else SIZE**2, NEURONS, steps) for i in range(LAYERS)]
        self.readout = brainstate.nn.Linear(NEURONS, CLASSES)

    def update(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = layer(x)
        return self.readout(x)


def streams(rng: np.random.Generator, steps: int) -> tuple[jax.Array, jax.Array]:
    """Events [steps, batch, sensors] of bars that cross the sensors once, and the bars' directions [batch]."""
    labels = rng.integers(CLASSES, size=BATCH)
    angle = 2 * np.pi * labels / CLASSES
    x, y = np.meshgrid(*2 * [np.linspace(-1, 1, SIZE)], indexing="ij")
    place = np.outer(np.cos(angle), x) + np.outer(np.sin(angle), y)
    bar = np.linspace(-1.2, 1.2, steps)[:, None, None] + 0.2 * rng.standard_normal((BATCH, 1))
    rate = (0.8 * np.exp(-(((place - bar) / 0.25) ** 2) / 2) + 0.02) * min(1, 400 / steps)
    return jnp.asarray(rng.random(rate.shape) < rate, jnp.float32), jnp.asarray(labels)


def step_loss(model: Any, x: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(model(x), labels).mean()


def exact_gradient(net: Network, checkpoint: Any) -> Any:
    """A compiled function from events and labels to the gradients of all weights, by their paths."""
    params = net.states(brainstate.ParamState)

    def loss(xs: jax.Array, labels: jax.Array) -> jax.Array:
        brainstate.nn.reset_all_states(net, batch_size=BATCH)
        step = lambda carry, x: (carry, step_loss(net, x, labels))
        return statetx.scan(step, None, xs, checkpoint=checkpoint)[1].mean()

    @statetx.jit
    def gradient(xs: jax.Array, labels: jax.Array) -> dict:
        return dict(zip(params, statetx.grad(loss, wrt=list(params.values()))(xs, labels), strict=True))

    return gradient


def online_gradient(net: Network, rule: str, example: jax.Array) -> Any:
    """The same by a rule of braintrace."""
    algorithm, options = RULES[rule]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the readout, which needs no trace
        learner = braintrace.compile(net, algorithm, example, batch_size=BATCH, **options)

    @statetx.jit
    def gradient(xs: jax.Array, labels: jax.Array) -> dict:
        brainstate.nn.reset_all_states(net, batch_size=BATCH)
        learner.reset_state(batch_size=BATCH)
        return learner.etrace_grad(xs, step_fn=lambda x: step_loss(learner, x, labels))

    return gradient


def vector(gradient: dict, layer: int) -> np.ndarray:
    """The gradient of the weights into a layer."""
    return np.ravel(gradient["layers", layer, "weights", "weight"]["weight"])


def measure(steps: int, batches: int, rounds: int) -> dict[str, Any]:
    """Cosines and ratios of norms by rule and layer, memory, and CPU time relative to the exact gradient."""
    brainstate.environ.set(dt=1.0 * u.ms)
    brainstate.random.seed(0)
    rng = np.random.default_rng(0)
    data = [streams(rng, steps) for _ in range(batches)]
    net = Network(steps)
    brainstate.nn.init_all_states(net, batch_size=BATCH)
    plain = exact_gradient(net, None)
    gradients = {"exact": exact_gradient(net, statetx.policies.Slots(16))}
    values = {"exact": [jax.device_get(gradients["exact"](*batch)) for batch in data]}
    reference = plain(*data[0])
    difference = max(
        float(np.max(np.abs(vector(values["exact"][0], i) - vector(reference, i))) / np.max(np.abs(vector(reference, i))))
        for i in range(LAYERS)
    )  # fmt: skip
    if difference > 1e-4:
        raise AssertionError(f"the gradient with slots differs from that of a plain scan by {difference}, relatively")

    results: dict[str, Any] = {"steps": steps, "difference": difference, "plain_bytes": temp_bytes(plain, data[0])}
    for rule in RULES:
        gradients[rule] = online_gradient(net, rule, data[0][0][0])
        values[rule] = [jax.device_get(gradients[rule](*batch)) for batch in data]
    samples = interleave({name: timed(f, *data[0]) for name, f in gradients.items()}, rounds)
    for name, f in gradients.items():
        own = results[name] = {"bytes": temp_bytes(f, data[0]), **summaries(samples[name], samples["exact"])}
        pairs = [
            [(vector(a, i), vector(b, i)) for a, b in zip(values[name], values["exact"], strict=True)]
            for i in range(LAYERS)
        ]
        norm = np.linalg.norm
        own["cosine"] = [float(np.mean([a @ b / (norm(a) * norm(b)) for a, b in layer])) for layer in pairs]
        own["norm"] = [float(np.mean([norm(a) / norm(b) for a, b in layer])) for layer in pairs]
    return results


def temp_bytes(gradient: Any, batch: Any) -> int:
    return gradient.lower(*batch).compile().memory_analysis().temp_size_in_bytes


def main() -> None:
    options, env = start(__doc__ or "")
    steps, batches, rounds = ([64], 1, 1) if options.quick else ([128, 512, 2048], 4, 3)
    results = {str(n): measure(n, batches, options.rounds or rounds) for n in steps}
    show("Cosine with the exact gradient", *spiking.online_table(results))
    if options.json:
        write_json(options.json, env, {"results": results})


if __name__ == "__main__":
    main()
