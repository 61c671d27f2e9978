"""What the time of a rematerialized program consists of, kernel by kernel, by XLA's estimates for an H100.

A transformer of 12 layers of width 1,024 in bfloat16 (``target_plans.py``): without rematerialization, with policies on its blocks, and with a plan in the memory of its
blocks rematerialized. Kernels are products; softmaxes and norms, which XLA tiles; and the others, such as a gelu or a sum. Needs ``pip install ".[target-cuda]"``.
"""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import kernels
import target_plans
from _common import show, start, write_json
from whole_plans import mib, percent

import statetx
from statetx.planner import Planner

PROGRAM = "transformer, 12 layers of 1,024, bfloat16"
POLICIES = ("dots", "dots_without_batch_dims", "nothing")
KINDS = ("products", "softmaxes and norms", "others")
COLUMNS = ("policy", "memory", "added operations", "ms", *KINDS, "of remat's time")


def row_of(program: Any) -> dict[str, Any]:
    cost, times = program.cost, Counter[str]()
    for kernel in kernels.timed(program.compiled):
        times[kernel.kind] += kernel.seconds
    return {"bytes": cost.temp_bytes, "flops": cost.flops, "seconds": cost.seconds, "times": dict(times)}


def rows(results: dict[str, dict[str, Any]]) -> list[list[str]]:
    base, remat = results["no remat"], results["nothing"]
    return [
        [
            name if name in ("no remat", "plan") else f"`{name}`" + " (remat)" * (name == "nothing"),
            mib(r["bytes"]),
            percent(r["flops"] / base["flops"] - 1),
            f"{1e3 * r['seconds']:.1f}",
            *(f"{1e3 * r['times'][kind]:.1f}" for kind in KINDS),
            f"{r['seconds'] / remat['seconds']:.3f}",
        ]
        for name, r in results.items()
    ]


def verdicts(results: dict[str, dict[str, Any]]) -> list[str]:
    base, remat, dots = (results[name] for name in ("no remat", "nothing", "dots"))
    added = {kind: 1e3 * (remat["times"][kind] - base["times"][kind]) for kind in KINDS}
    whole, of_products = 1e3 * (remat["seconds"] - base["seconds"]), 0.05 * 1e3 * remat["seconds"] / added["products"]
    return [
        f"Rematerialization adds {whole:.1f} ms: {', '.join(f'{ms:.1f} of {kind}' for kind, ms in added.items())}.",
        f"A plan of 0.95 of its time saves {of_products:.0%} of the products' part; `dots` saves all, in "
        f"{dots['bytes'] / remat['bytes']:.1f} times the memory.",
    ]


def main() -> None:
    options, env = start(__doc__ or "")
    make = target_plans.ALL[PROGRAM]
    sizes: dict[str, Any] = {"layers": 2, "width": 128, "time": 256, "batch": 2} if options.quick else {}
    with statetx.target("h100"):
        results = {"no remat": row_of(target_plans.program_of(model := make(**sizes), model.loss))}
        for policy in POLICIES:
            model = make(functools.partial(statetx.remat, policy=policy), **sizes)
            results[policy] = row_of(target_plans.program_of(model, model.loss))
        model = make(statetx.remat, **sizes)
        budget = int(1.001 * results["nothing"]["bytes"])
        plan = Planner(model.loss, model.params, *model.data, of="temporaries", argnums=0).plan(budget)
        results["plan"] = row_of(target_plans.program_of(model, plan.apply(model.loss)))
    show("Kernels", COLUMNS, rows(results))
    print(*verdicts(results), sep="\n")
    if options.json:
        write_json(options.json, env, {"results": results, "verdict": verdicts(results)})


if __name__ == "__main__":
    main()
