"""Faults of JAX or XLA that matter to states, loops, offload, donation: each with its thread, each with a check."""

from __future__ import annotations

import importlib.metadata
import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from ._targets import current


class Fault(NamedTuple):
    """A fault of some versions.

    Attributes:
        is_right: computes it here, in under a second; False if the fault is here.
        platform: of the programs that have it; empty: all.
    """

    thread: str
    what: str
    fix: str
    is_right: Callable[[], bool]
    platform: str = ""
    num_devices: int = 1

    def verdict(self) -> str:
        """The check's result on the default device: ``"wrong here"``, ``"right here"``, or why it was not run."""
        if self.platform not in ("", current.platform()):
            return f"not checked: needs a {self.platform.upper()}"
        if len(current.local_devices()) < self.num_devices:
            return f"not checked: needs {self.num_devices} devices"
        return "right here" if self.is_right() else "wrong here"

    def refusal(self) -> str:
        """The message of an error where programs that have it are traced."""
        return f"With jaxlib {_jaxlib()} this is wrong ({self.thread}). {self.what}\nFix: {self.fix}."


def _jaxlib() -> str:
    return importlib.metadata.version("jaxlib")


def _delay_line() -> bool:
    x = jnp.arange(8, dtype=jnp.int32).reshape(4, 2)

    @jax.jit
    def shifted(x):
        rows = 3 * x
        return rows.at[1:].set(rows[:-1]).reshape(1, 4, 2)

    return np.array_equal(shifted(x)[0], 3 * np.asarray(x)[[0, 0, 1, 2]])


def _row_after_roll() -> bool:
    row = jax.jit(lambda x, turn, i: jax.lax.dynamic_slice(jnp.roll(x, turn), [i], [2]))
    return np.array_equal(row(jnp.arange(5), 2, 9), [1, 2])


def _sharded_row() -> bool:
    mesh = jax.sharding.Mesh(np.array(current.local_devices()[:2]), ("rows",))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("rows"))
    put = jax.jit(lambda x, i: jax.lax.dynamic_update_slice(x, jnp.ones(1), [i]), out_shardings=rows)
    return np.array_equal(put(jax.device_put(jnp.zeros(4), rows), 9), [0, 0, 0, 1])


def _row_in_loop() -> bool:
    def seconds(keeps: bool) -> float:
        steps = lambda x: jax.lax.scan(lambda c, _: (0.99 * c, c if keeps else None), x, None, length=5000)
        run = jax.jit(steps)
        jax.block_until_ready(run(1.0))
        start = time.perf_counter()
        jax.block_until_ready(run(1.0))
        return time.perf_counter() - start

    return seconds(True) < 50 * seconds(False)


def _mapped_custom_jvp() -> bool:
    @jax.custom_jvp
    def outer(x):
        return jnp.outer(jnp.arange(1.0, 3.0), x)

    @outer.defjvp
    def rule(primals, tangents):
        rows = lambda x: jax.lax.scan(lambda c, n: (c, n * x), 0, jnp.arange(1.0, 3.0))[1]
        return jax.jvp(rows, primals, tangents)

    mapped = jax.vmap(outer)
    x = jnp.arange(4.0).reshape(2, 2)
    return np.array_equal(jax.jvp(jax.jit(mapped), (x,), (x,))[1], mapped(x))


def _donated_outputs() -> bool:
    step = jax.jit(lambda state, x: ((x - x,) * 3, state), donate_argnums=0)
    zeros, state = step(tuple(map(jnp.float32, (1, 2, 3))), jnp.float32(0))
    return [*map(float, (*zeros, *state))] == [0, 0, 0, 1, 2, 3]


def _offloaded_residuals() -> bool:
    offload = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["h"],
        offload_src="device",
        offload_dst="pinned_host",
    )

    def gradient(policy: Callable | None) -> jax.Array:
        def turn(h, w):
            return jnp.tanh(checkpoint_name(h, "h") @ w), None

        turn = turn if policy is None else jax.checkpoint(turn, policy=policy)
        return jax.jit(jax.grad(lambda ws: jax.lax.scan(turn, jnp.ones((64, 64)), ws)[0].sum()))(ws)

    ws = jnp.stack([(n + 1) * jnp.eye(64) / 8 for n in range(4)])
    return bool(jnp.allclose(gradient(offload), gradient(None), rtol=1e-3))


DELAY_LINE = Fault(
    "openxla/xla#49176",
    "A shifted array with a reshape after it, x.at[1:].set(x[:-1]).reshape(...), repeats its first row: a delay line.",
    "jnp.concatenate([x[:1], x[:-1]]), or a ring buffer",
    _delay_line,
    "cpu",
)
ROW_AFTER_ROLL = Fault(
    "openxla/xla#49121",
    "A slice of a rolled array (jnp.roll by a traced number) beyond its end reads other rows than the last ones.",
    "index by (i - turn) % length instead of rolling; or jnp.clip the start",
    _row_after_roll,
)
SHARDED_ROW = Fault(
    "openxla/xla#49118",
    "An update by dynamic_update_slice beyond the end of an array that is sharded along this axis is lost.",
    "x.at[i].set(row, mode='clip')",
    _sharded_row,
    num_devices=2,
)
ROW_IN_LOOP = Fault(
    "jax-ml/jax#40101",
    "A loop that writes one row in each step, as a scan with outputs does, copies the whole array for each.",
    "another jaxlib than 0.11.1",
    _row_in_loop,
    "cpu",
)
MAPPED_CUSTOM_JVP = Fault(
    "jax-ml/jax#16374",
    "A derivative of jit(vmap(f)), or of vmap(jit(f)), transposes results of a jax.custom_jvp in f whose rule has the "
    "batch axis elsewhere, such as one with a loop.",
    "move jax.jit to the outermost call; or let the rule return f(*primals), not the result of another computation",
    _mapped_custom_jvp,
)
DONATED_OUTPUTS = Fault(
    "jax-ml/jax#39625",
    "Outputs that are returned before donated states can be overwritten by them.",
    "return donated states first, as statetx.jit does; or do not donate",
    _donated_outputs,
    "gpu",
)
OFFLOADED_RESIDUALS = Fault(
    "openxla/xla#46231",
    "Gradients of a scan whose residuals are offloaded read the wrong steps.",
    "another jaxlib than 0.11.0; or checkpoint=policies.Slots(8), policies.nothing instead of offloading",
    _offloaded_residuals,
    "gpu",
)
FAULTS = (
    DELAY_LINE,
    ROW_AFTER_ROLL,
    SHARDED_ROW,
    ROW_IN_LOOP,
    MAPPED_CUSTOM_JVP,
    DONATED_OUTPUTS,
    OFFLOADED_RESIDUALS,
)


def offloads_wrongly() -> bool:
    """Whether programs for the present target have `OFFLOADED_RESIDUALS`; by version, since a target cannot run."""
    return current.platform() == "gpu" and _jaxlib() == "0.11.0"
