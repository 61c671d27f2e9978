"""An FSDP and tensor-parallel transformer, planned for eight and for sixteen H100 on a machine that has none.

Programs
    Four layers of attention and two matrix products, 8,192 wide, on sequences of 4,096. Weights are divided over both axes of the mesh: over "data" they are gathered
    where a block needs them (FSDP), over "model" the heads and the hidden layer are divided (tensor parallelism), and the
    batch is divided over "data". With axis types Auto the program has sharding constraints at these places, with Explicit it
    reshards there. Sizes are such that no device has room for the program without rematerialization.

Compared
    ``jax.checkpoint`` on the blocks, in plain JAX, compiled for a mesh of the target, and plans: for the memory of the devices
    (``budget="device"``), and for the total of the program by hand. Plans are made from arguments on an abstract mesh, and compiled
    as a user does.

Measured
    Of the compiled program of one device: temporary and total bytes, and the collectives in its text, by kind (a loop's count once);
    operations relative to the program without rematerialization, and the seconds of planning.

With ``--json OUT`` each row is written when it is done, and the same command goes on where it ended: with ``--limit 500`` it starts no row after 500 seconds.
It needs ``pip install ".[target-cuda]"``.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from _common import environment, header, parse_args, show, write_json
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import statetx
from statetx._equations.compiled import Program
from statetx._equations.primitives import count
from statetx._jax import without_dead_code

GIB = 2**30
AXES = ("data", "model")
MESHES = {"h100:8": (2, 4), "h100:2x8": (2, 8)}  # hosts are joined by the batch
COLLECTIVES = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")
BATCHES = {"h100:8": 32, "h100:2x8": 48}
SIZES = {"layers": 4, "width": 8192, "heads": 64, "time": 4096}
QUICK = {"layers": 2, "width": 512, "heads": 8, "time": 512}
UNPLANNED, BY_HAND = "no remat", "jax.checkpoint on the blocks"
FOR_DEVICES, FOR_BY_HAND = "plan for the devices", "plan for the memory by hand"
TIME_LIMIT = 100.0  # seconds for a plan

WEIGHTS = {  # how each weight is stored, and how a block uses it
    "qkv": P("data", None, "model", None),
    "out": P("model", None, "data"),
    "up": P("data", "model"),
    "down": P("model", "data"),
}


def norm(x: jax.Array) -> jax.Array:
    return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)


def make_loss(wrap: Callable, mesh: Any) -> Callable:
    """The loss of a transformer whose blocks are wrapped."""
    explicit = AxisType.Explicit in mesh.axis_types
    rows = P("data", None, None)

    def placed(x: jax.Array, spec: P) -> jax.Array:
        place = jax.sharding.reshard if explicit else jax.lax.with_sharding_constraint
        return place(x, NamedSharding(mesh, spec))

    def product(equation: str, x: jax.Array, w: jax.Array) -> jax.Array:
        """A product summed over the devices of "model"."""
        if explicit:
            return jnp.einsum(equation, x, w, out_sharding=NamedSharding(mesh, rows))
        return placed(jnp.einsum(equation, x, w), rows)

    def gathered(w: jax.Array, name: str) -> jax.Array:
        return placed(w, P(*(None if axis == "data" else axis for axis in WEIGHTS[name])))

    def block(p: Any, x: jax.Array) -> jax.Array:
        w = {name: gathered(value, name) for name, value in p.items()}
        q, k, v = (jnp.einsum("btw,whd->bthd", norm(x), w["qkv"][:, i]) for i in range(3))
        scores = jnp.einsum("bthd,bshd->bhts", q, k) / math.sqrt(q.shape[-1])
        mask = jnp.tril(jnp.ones(scores.shape[-2:], bool))
        attended = jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(jnp.where(mask, scores, -1e9)), v)
        x = x + product("bthd,hdw->btw", attended, w["out"])
        hidden = jax.nn.gelu(jnp.einsum("btw,wh->bth", norm(x), w["up"]))
        return x + product("bth,hw->btw", hidden, w["down"])

    wrapped = wrap(block)

    def loss(params: Any, x: jax.Array) -> jax.Array:
        for p in params:
            x = wrapped(p, x)
        return (norm(x) ** 2).mean()

    return loss


def arguments(mesh: Any, *, layers: int, width: int, heads: int, time: int, batch: int) -> tuple[Any, Any]:
    """The types of the weights and of a batch."""
    shapes = {
        "qkv": (width, 3, heads, width // heads),
        "out": (heads, width // heads, width),
        "up": (width, 4 * width),
        "down": (4 * width, width),
    }
    dtype = jnp.bfloat16

    def typed(shape: tuple[int, ...], spec: P) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    weights = {name: typed(shape, WEIGHTS[name]) for name, shape in shapes.items()}
    return [weights] * layers, typed((batch, time, width), P("data", None, None))


def collectives(text: str) -> dict[str, int]:
    """The number of collectives in a compiled program."""
    found = Counter(re.findall(rf" ({'|'.join(COLLECTIVES)})(?:-start)?\(", text))
    return {name: found[name] for name in COLLECTIVES if found[name]}


def figures(program: Any, flops: int, seconds: float) -> dict[str, Any]:
    """What is told of a compiled program."""
    memory = program.memory_analysis()
    fixed = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    temporary = memory.temp_size_in_bytes
    told = {"temporary": temporary, "total": fixed + temporary, "collectives": collectives(program.as_text())}
    return {**told, "flops": flops, "seconds": seconds}


def compiled(loss: Callable, args: tuple[Any, Any], target: statetx.Target, mesh: AbstractMesh) -> Any:
    """The value and the gradient of a loss, compiled for a mesh of the target by JAX alone."""
    there = target.mesh(mesh.axis_sizes, AXES, mesh.axis_types)
    moved = jax.tree.map(lambda x: x.update(sharding=NamedSharding(there, x.sharding.spec)), args)
    with jax.set_mesh(there):
        lowered = jax.jit(jax.value_and_grad(loss)).trace(*moved).lower(lowering_platforms=("cuda",))
    return lowered.compile({"xla_gpu_autotune_level": 0})


def by_hand(wrap: Callable, target: str, mesh: AbstractMesh, args: tuple[Any, Any]) -> dict[str, Any]:
    """The loss with its blocks wrapped, in plain JAX."""
    device = statetx.Target(target)
    there = device.mesh(mesh.axis_sizes, AXES, mesh.axis_types)
    begin = time.perf_counter()
    program = compiled(make_loss(wrap, there), args, device, mesh)
    took = time.perf_counter() - begin
    with jax.sharding.use_abstract_mesh(mesh):
        jaxpr = jax.make_jaxpr(jax.value_and_grad(make_loss(wrap, mesh)))(*args)
    return figures(program, count(without_dead_code(jaxpr.jaxpr)), took)


def planned(budget: int | str, target: str, mesh: AbstractMesh, args: tuple[Any, Any]) -> dict[str, Any]:
    """The loss planned for the target, then compiled as a user does."""
    loss = make_loss(lambda block: block, mesh)
    begin = time.perf_counter()
    with statetx.target(target), jax.sharding.use_abstract_mesh(mesh):
        try:
            plan = statetx.plan(loss, *args, argnums=0, budget=budget, time_limit=TIME_LIMIT)
        except statetx.PlanError as e:
            return {"failed": e.smallest_bytes, "budget": budget, "seconds": time.perf_counter() - begin}
        took = time.perf_counter() - begin
        gradient = jax.value_and_grad(plan.apply(loss))
        program = Program(lambda *inputs: gradient(*inputs), args)
        return {**figures(program.compiled, program.flops, took), "budget": plan.budget_bytes}


def add_row(row: str, name: str, target: str, axis_type: AxisType, quick: bool, done: dict[str, Any]) -> None:
    """Compile or plan the program of a row for one mesh."""
    mesh = AbstractMesh(MESHES[target], AXES, axis_types=(axis_type,) * 2)
    args = arguments(mesh, **(QUICK if quick else SIZES), batch=BATCHES[target])
    rows = done.setdefault(name, {})
    if row == FOR_DEVICES:
        rows[row] = planned("device", target, mesh, args)
    elif row == FOR_BY_HAND:
        rows[row] = planned(rounded(rows[BY_HAND]["total"]), target, mesh, args)
    else:
        rows[row] = by_hand(jax.checkpoint if row == BY_HAND else lambda block: block, target, mesh, args)


def rounded(num_bytes: int) -> int:
    """The next MiB: the program by hand returns a tuple of another size."""
    return -(-num_bytes // 2**20) * 2**20


ROWS = (UNPLANNED, BY_HAND, FOR_DEVICES, FOR_BY_HAND)
COLUMNS = ("mesh and program", "temporary", "in all", "budget", "kept", "operations", *COLLECTIVES[:3], "seconds")


def lines(results: dict[str, Any]) -> list[list[str]]:
    found = []
    for name, rows in results.items():
        for row in (row for row in ROWS if row in rows):
            r = rows[row]
            if "failed" in r:
                cells = [
                    "",
                    f"more than {r['failed'] / GIB:.1f} GiB",
                    f"{r['budget'] / GIB:.1f} GiB",
                    "no plan",
                    *[""] * 4,
                ]
                found.append([f"{name}: {row}", *cells, f"{r['seconds']:.0f}"])
                continue
            budget = r.get("budget")
            kept = "" if budget is None else "yes" if r["total"] <= budget else "NO"
            cells = [
                f"{r['temporary'] / GIB:.1f} GiB",
                f"{r['total'] / GIB:.1f} GiB",
                f"{budget / GIB:.1f} GiB" if budget else "",
                kept,
            ]
            cells.append(f"{100 * (r['flops'] / rows[UNPLANNED]['flops'] - 1):+.1f}%")
            cells += [str(r["collectives"].get(kind, 0)) for kind in COLLECTIVES[:3]]
            found.append([f"{name}: {row}", *cells, f"{r['seconds']:.0f}" if budget else ""])
    return found


def verdicts(results: dict[str, Any]) -> list[str]:
    """How many plans keep their budgets."""
    plans = [r for rows in results.values() for r in rows.values() if "budget" in r]
    kept = sum("failed" not in r and r["total"] <= r["budget"] for r in plans)
    return [f"{kept} of {len(plans)} plans keep their budgets in the program that a user compiles"]


def main() -> None:
    limit = {"type": float, "metavar": "SECONDS", "help": "start no further row after this time"}
    options, env = parse_args(__doc__ or "", limit=limit), environment()
    env["quick"] = options.quick
    print(header(env))
    results: dict[str, Any] = {}
    if options.json and options.json.exists():
        results = json.loads(options.json.read_text())["results"]
    begin = time.monotonic()
    for row, target, axis_type in itertools.product(ROWS, MESHES, (AxisType.Auto, AxisType.Explicit)):
        name = f"{target}, {axis_type.name}"
        late = options.limit is not None and time.monotonic() - begin > options.limit
        if row in results.get(name, {}) or late:
            continue
        add_row(row, name, target, axis_type, options.quick, results)
        print(f"{name}: {row}, {time.monotonic() - begin:.0f} s", flush=True)
        if options.json:
            write_json(options.json, env, {"results": results, "verdict": verdicts(results)})
    show("Of one device", COLUMNS, lines(results))


if __name__ == "__main__":
    main()
