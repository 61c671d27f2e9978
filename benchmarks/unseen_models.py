"""Models that the planner was not developed on: what its changes are judged by, beside those of ``models.py``."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from models import Model, _dense, _layer_norm, _normal, cross_entropy, with_step
from programs import _channel_norm, _conv, identity

# -- brainstate ------------------------------------------------------------------------------------------------------


@functools.cache
def _ei_module() -> Any:
    """A class of modules; in a function, so that brainstate is imported only where a model needs it."""
    import brainstate
    import braintools

    class Network(brainstate.nn.Module):
        """Excitatory and inhibitory neurons with adaptation, whose synapses keep their sign, and a leaky readout."""

        def __init__(self, num_in: int, num_exc: int, num_inh: int, num_out: int):
            super().__init__()
            self.num_exc, num = num_exc, num_exc + num_inh
            self.spike = braintools.surrogate.ReluGrad()
            self.w_in = brainstate.ParamState(6 * _dense(1, num_in, num))
            self.w_exc = brainstate.ParamState(0.5 * _dense(2, num_exc, num))
            self.w_inh = brainstate.ParamState(_dense(3, num_inh, num))
            self.w_out = brainstate.ParamState(_dense(4, num_exc, num_out))
            self.states = {k: brainstate.HiddenState(jnp.zeros(0)) for k in ("v", "exc", "inh", "slow", "out")}

        def init_state(self, batch: int) -> None:
            (_, num), num_out = self.w_exc.value.shape, self.w_out.value.shape[1]
            for name, state in self.states.items():
                state.value = jnp.zeros((batch, num_out if name == "out" else num))

        def update(self, x: jax.Array) -> jax.Array:
            s = self.states
            fired = self.spike(s["v"].value - 1.0 - s["slow"].value)
            by_exc, by_inh = fired[:, : self.num_exc], fired[:, self.num_exc :]
            s["exc"].value = 0.8 * s["exc"].value + by_exc @ jnp.abs(self.w_exc.value)
            s["inh"].value = 0.9 * s["inh"].value + by_inh @ jnp.abs(self.w_inh.value)
            s["slow"].value = 0.95 * s["slow"].value + 0.1 * fired
            drive = x @ self.w_in.value + s["exc"].value - s["inh"].value
            s["v"].value = 0.9 * (s["v"].value - fired) + 0.1 * drive
            s["out"].value = 0.9 * s["out"].value + by_exc @ self.w_out.value
            return s["out"].value

    return Network


def ei_network(
    wrap: Callable = identity, *, steps: int = 200, exc: int = 200, inh: int = 50, batch: int = 32, inputs: int = 64
) -> Model:
    """A recurrent network of spiking neurons, trained through time by surrogate gradients; states of brainstate."""
    import brainstate

    import statetx

    net = _ei_module()(inputs, exc, inh, 10)
    net.init_state(batch)
    update = wrap(lambda x: net.update(x))

    def stateful(spikes: jax.Array, labels: jax.Array) -> jax.Array:
        outputs = statetx.map(update, spikes)
        return cross_entropy(outputs.mean(0), labels)

    data = ((jnp.abs(_normal(1, steps, batch, inputs)) > 1).astype(jnp.float32), jnp.arange(batch) % 10)
    pure = statetx.functionalize(stateful)
    values, states = pure.values(*data), pure.states(*data)
    params = {k: v for k, v in values.items() if isinstance(states[k], brainstate.ParamState)}
    hidden = {k: v for k, v in values.items() if k not in params}

    def loss(params: Any, hidden: Any, spikes: jax.Array, labels: jax.Array) -> jax.Array:
        return pure(params | hidden, spikes, labels)[0]

    return with_step(loss, params, (hidden, *data))


# -- plain JAX -------------------------------------------------------------------------------------------------------


def state_space(
    wrap: Callable = identity, *, layers: int = 2, width: int = 128, state: int = 64, time: int = 64, batch: int = 128
) -> Model:
    """Blocks of S5: a diagonal linear recurrence in complex numbers by ``associative_scan``, and a gated
    hidden layer.
    """

    def combined(a: Any, b: Any) -> Any:
        return a[0] * b[0], b[0] * a[1] + b[1]

    @wrap
    def block(p: Any, x: jax.Array) -> jax.Array:
        step = jnp.exp(p["step"])
        poles = (-jnp.exp(p["decay"]) + 1j * p["frequency"]) * step
        u = _layer_norm(x)
        driven = (u @ p["in_re"] + 1j * (u @ p["in_im"])) * step
        factors = jnp.broadcast_to(jnp.exp(poles), driven.shape)
        _, h = jax.lax.associative_scan(combined, (factors, driven), axis=1)
        y = jax.nn.gelu(h.real @ p["out_re"] - h.imag @ p["out_im"] + u * p["skip"])
        return x + y * jax.nn.sigmoid(y @ p["gate"])

    def loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        for p in params:
            x = block(p, x)
        return ((_layer_norm(x) - y) ** 2).mean()

    def layer(n: int) -> dict[str, jax.Array]:
        p = {"in_re": _dense(n, width, state), "in_im": _dense(n + 1, width, state)}
        p |= {"out_re": _dense(n + 2, state, width), "out_im": _dense(n + 3, state, width)}
        p |= {"gate": _dense(n + 4, width, width), "skip": _normal(n + 5, width)}
        p |= {"decay": jnp.zeros(state), "frequency": math.pi * jnp.arange(state, dtype=jnp.float32)}
        return p | {"step": jnp.linspace(math.log(1e-3), math.log(1e-1), state)}

    shape = (batch, time, width)
    return with_step(loss, [layer(10 * i) for i in range(layers)], (_normal(1, *shape), _normal(2, *shape)))


def diffusion(
    wrap: Callable = identity, *, levels: int = 2, channels: int = 32, size: int = 32, batch: int = 8, heads: int = 4
) -> Model:
    """The noise that a U-Net finds in images: residual blocks with the time embedded, and attention at the
    lower sizes.
    """
    emb = 4 * channels

    @wrap
    def residual(p: Any, x: jax.Array, time: jax.Array) -> jax.Array:
        h = _conv(jax.nn.silu(_channel_norm(x)), p["first"])
        scale, shift = jnp.split((jax.nn.silu(time) @ p["time"])[:, None, None], 2, -1)
        h = _channel_norm(h) * (1 + scale) + shift
        return _conv(x, p["across"]) + _conv(jax.nn.silu(h), p["second"])

    @wrap
    def attention(p: Any, x: jax.Array) -> jax.Array:
        flat = _channel_norm(x).reshape(x.shape[0], -1, x.shape[-1])
        q, k, v = (y.reshape(*flat.shape[:2], heads, -1) for y in jnp.split(flat @ p["qkv"], 3, -1))
        weights = jax.nn.softmax(jnp.einsum("bthd,bshd->bhts", q, k) / math.sqrt(q.shape[-1]))
        mixed = jnp.einsum("bhts,bshd->bthd", weights, v).reshape(flat.shape)
        return x + (mixed @ p["out"]).reshape(x.shape)

    def stage(p: Any, x: jax.Array, time: jax.Array) -> jax.Array:
        x = residual(p["residual"], x, time)
        return attention(p["attention"], x) if "attention" in p else x

    def loss(params: Any, images: jax.Array, noise: jax.Array, t: jax.Array) -> jax.Array:
        angles = t[:, None] * jnp.exp(-math.log(1e4) * jnp.arange(channels // 2) / (channels // 2))
        time = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1) @ params["time"]
        alpha = jnp.cos(0.5 * math.pi * t / 1000)[:, None, None, None]
        x = _conv(alpha * images + jnp.sqrt(1 - alpha**2) * noise, params["first"])
        skips = []
        for i, p in enumerate(params["down"]):
            x = stage(p, x, time)
            skips.append(x)
            if i + 1 < len(params["down"]):
                x = x.reshape(x.shape[0], x.shape[1] // 2, 2, x.shape[2] // 2, 2, x.shape[3]).mean((2, 4))
        x = stage(params["middle"], x, time)
        for i, p in enumerate(params["up"]):
            if i:
                x = jnp.repeat(jnp.repeat(x, 2, 1), 2, 2)
            x = stage(p, jnp.concatenate([x, skips.pop()], -1), time)
        return ((_conv(x, params["last"]) - noise) ** 2).mean()

    seeds = iter(range(1000))
    weight = lambda *shape: _dense(next(seeds), *shape)

    def made(num_in: int, num: int, attends: bool) -> dict[str, Any]:
        p = {"first": weight(3, 3, num_in, num), "second": weight(3, 3, num, num), "across": weight(1, 1, num_in, num)}
        p |= {"time": weight(emb, 2 * num)}
        return {"residual": p} | (
            {"attention": {"qkv": weight(num, 3 * num), "out": weight(num, num)}} if attends else {}
        )

    widths = [channels * 2**i for i in range(levels)]
    down = [made(widths[max(i - 1, 0)], w, i > 0) for i, w in enumerate(widths)]
    params: dict[str, Any] = {"time": weight(channels, emb), "first": weight(3, 3, 3, channels), "down": down}
    params["middle"] = made(widths[-1], widths[-1], True)
    below = [widths[-1], *reversed(widths[1:])]
    params["up"] = [
        made(a + b, b, i > 1) for i, a, b in zip(range(levels, 0, -1), below, reversed(widths), strict=True)
    ]
    params |= {"last": weight(3, 3, channels, 3)}
    shape = (batch, size, size, 3)
    return with_step(loss, params, (_normal(1, *shape), _normal(2, *shape), jnp.linspace(0, 999, batch)))


UNSEEN: dict[str, Callable[..., Model]] = {
    "EI network (brainstate)": ei_network,
    "state space, S5": state_space,
    "diffusion U-Net": diffusion,
}
