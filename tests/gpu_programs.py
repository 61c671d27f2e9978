"""Programs as XLA compiles them for a GPU, for tests on machines without one.

On a machine with a GPU, ``python - < tests/gpu_programs.py`` writes them to ``tests/gpu_programs/``, and prints the
sizes that XLA tells. Each file is XLA's ``HloProto`` of an optimized program with its buffer assignment. It contains
the name of the source file: from the standard input there is none.

``rematerialized_by_xla`` is a step of gradient descent of the transformer in ``benchmarks/programs.py`` with 24 layers
of width 1,024 and 16 heads, for a batch of 32 times 2,048 tokens. It needs 260 GiB, so that XLA computes values again
on its own. It was written by `explain_oom`, without timing kernels.

The two ``..._for_target`` are compiled for an H200 that is not there, with numbers of calls
(`statetx.memory._numbered`): the transformer step, and the step of gradient descent with 6 layers of width 256 and 4
heads, for a batch of 8 times 256 tokens and a device of 96 MiB. ``python - --target < tests/gpu_programs.py`` writes
them.
"""

from __future__ import annotations

import json
import lzma
import sys
import tempfile
from pathlib import Path
from types import ModuleType

import jax
import jax.numpy as jnp

import statetx
from statetx import _jax
from statetx._equations.compiler import compile_to_measure, full_device_options, lower
from statetx.memory._numbered import numbered
from statetx.policies import Levels

FOLDER = Path("tests/gpu_programs")


def normed(x):
    return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)


def attention(p, x):
    q, k, v = jnp.split((normed(x) @ p["qkv"]).reshape(*x.shape[:2], 4, -1), 3, -1)
    weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape) @ p["out"]


def block(p, x):
    x = x + attention(p, x)
    return x + jnp.tanh(normed(x) @ p["up"]) @ p["down"]


def transformer_step(params, x):
    """A training step of two blocks; the parameters are donated."""

    def loss(params):
        y = x
        for p in params:
            y = block(p, y)
        return (y**2).mean()

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def offloaded_loop(w, xs):
    """A loop whose carries are in the host's memory."""

    def step(h, x):
        h = jnp.tanh(h @ w + x)
        return h, (h**2).mean()

    return statetx.scan(step, jnp.zeros_like(xs[0]), xs, checkpoint=Levels(1, offload=True))[1].sum()


def convolution(w, x):
    y = jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    return x + jax.nn.relu((y - y.mean((0, 1, 2))) * jax.lax.rsqrt(y.var((0, 1, 2)) + 1e-5))


def convolutions(ws, x):
    for w in ws:
        x = convolution(w, x)
    return (x**2).mean()


def programs():
    """``name -> lowered program``."""
    f32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    layer = {"qkv": f32(256, 768), "out": f32(256, 256), "up": f32(256, 1024), "down": f32(1024, 256)}
    return {
        "transformer_step": jax.jit(transformer_step, donate_argnums=0).lower([layer] * 2, f32(8, 256, 256)),
        "offloaded_loop": jax.jit(jax.grad(offloaded_loop)).lower(f32(256, 256), f32(300, 32, 256)),
        "convolutions": jax.jit(jax.grad(convolutions)).lower([f32(3, 3, 64, 64)] * 3, f32(32, 32, 32, 64)),
    }


def programs_for_target():
    """``name -> (target, function that traces the program)``."""
    layer = {"qkv": (256, 768), "out": (256, 256), "up": (256, 1024), "down": (1024, 256)}
    types = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in layer.items()}
    x = jax.ShapeDtypeStruct((8, 256, 256), jnp.float32)
    benchmark = ModuleType("programs")
    sys.modules["programs"] = benchmark
    exec(compile(Path("benchmarks/programs.py").read_text(), "<stdin>", "exec"), vars(benchmark))
    sizes = {"layers": 6, "width": 256, "heads": 4, "batch": 8, "time": 256}
    model = benchmark.of_types(lambda: benchmark.transformer(**sizes))

    def step(params, *data):
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(model.loss)(params, *data))

    small = Path(tempfile.gettempdir()) / "statetx-small-h200.json"
    statetx.Target("h200").save(small)
    fields = json.loads(small.read_text())
    fields["device"]["memory_bytes"] = 96 * 2**20
    small.write_text(json.dumps(fields))
    return {
        "transformer_step_for_target": (
            "h200",
            lambda: jax.jit(transformer_step, donate_argnums=0).trace([types] * 2, x),
        ),
        "rematerialized_for_target": (small, lambda: jax.jit(step).trace(model.params, *model.data)),
    }


def main_for_target():
    for name, (target, trace) in programs_for_target().items():
        with tempfile.TemporaryDirectory() as folder, statetx.target(target):
            traced = trace()
            stage = lower(_jax.with_jaxpr(traced, numbered(traced.jaxpr)))
            memory = compile_to_measure(
                stage, full_device_options() | _jax.options_to_write(Path(folder))
            ).memory_analysis()
            path = max(Path(folder).glob("*after_optimizations.hlo.pb"), key=lambda path: path.stat().st_size)
            (FOLDER / f"{name}.hlo.pb.xz").write_bytes(lzma.compress(path.read_bytes(), preset=9))
        sizes = memory.argument_size_in_bytes, memory.output_size_in_bytes, memory.alias_size_in_bytes
        print(f'    "{name}": {(*sizes, memory.temp_size_in_bytes)},')


def main():
    FOLDER.mkdir(exist_ok=True)
    for name, lowered in programs().items():
        with tempfile.TemporaryDirectory() as folder:
            compiled = lowered.compile(_jax.options_to_write(Path(folder)))
            program = compiled.runtime_executable().hlo_modules()[0].name
            (path,) = Path(folder).glob(f"*.{program}.*after_optimizations.hlo.pb")
            (FOLDER / f"{name}.hlo.pb.xz").write_bytes(lzma.compress(path.read_bytes(), preset=9))
        memory = compiled.memory_analysis()
        sizes = memory.argument_size_in_bytes, memory.output_size_in_bytes, memory.alias_size_in_bytes
        print(f'    "{name}": {(*sizes, memory.temp_size_in_bytes)},')


if __name__ == "__main__":
    main_for_target() if "--target" in sys.argv else main()
