"""How far plans stay from the lower bound of any schedule, at the memory of full rematerialization.

Each program of ``programs.py`` is planned for the temporary memory that rematerializing every block takes. Beside the plan's added operations stand
those that `lower_bound.py` does not exclude at that memory, and the memory that it does not exclude at the plan's operations. The bound counts the
bytes held at the turn from the forward to the backward pass, so that a part of the distance is memory in use during the backward pass.

Run it alone: `python benchmarks/bounds.py --only MLP "U-Net"`.
"""

from __future__ import annotations

import functools
import time
from typing import Any

from _common import MIB, show, start, write_json
from lower_bound import LowerBound
from planner import SMALL, cost
from programs import PROGRAMS

import statetx
from statetx.planner import Planner

EXTRAS = (0.0, 0.02, 0.05, 0.1, 0.2)


def judge(name: str, *, quick: bool) -> dict[str, Any]:
    make = functools.partial(PROGRAMS[name], **(SMALL[name] if quick else {}))
    program = make()
    full = cost(make(statetx.remat))
    planner = Planner(make(statetx.remat).loss, program.params, *program.data, of="temporaries", argnums=0)
    plan = planner.plan(full.temp_bytes)
    start = time.perf_counter()
    bound = LowerBound(program.loss, program.params, *program.data)
    result = {
        "full": {"bytes": full.temp_bytes, "extra": full.flops / plan.unplanned_flops - 1},
        "plan": {"bytes": plan.temp_bytes, "extra": plan.extra_flops},
        "operations": bound.operations_at(full.temp_bytes),
        "bytes": bound.bytes_at(plan.extra_flops),
        "bytes at": [bound.bytes_at(x) for x in EXTRAS],
    }
    return result | {"seconds": time.perf_counter() - start}


def table(results: dict[str, Any]) -> tuple[str, list[str], list[list[str]]]:
    columns = ["program", "full remat", "plan at its memory", "bound at its memory", "bound at the plan's operations"]
    columns += [*(f"at +{100 * x:.0f}%" for x in EXTRAS), "seconds"]
    cells = [
        [
            name,
            f"{r['full']['bytes'] / MIB:.1f} MiB {100 * r['full']['extra']:+.1f}%",
            f"{100 * r['plan']['extra']:+.1f}%",
        ]
        + [f"{100 * r['operations']:+.1f}%", f"{r['bytes'] / MIB:.1f} MiB"]
        + [f"{b / MIB:.1f} MiB" for b in r["bytes at"]]
        + [f"{r['seconds']:.1f}"]
        for name, r in results.items()
    ]
    return "Plans and lower bounds at full rematerialization's memory", columns, cells


def main() -> None:
    options, env = start(__doc__ or "", only={"nargs": "+", "choices": list(PROGRAMS), "help": "these alone"})
    results = {}
    for name in options.only or PROGRAMS:
        results[name] = judge(name, quick=options.quick)
        show(*table({name: results[name]}))
        if options.json:  # after each program: a later one may take too long
            write_json(options.json, env, {"programs": results})
    show(*table(results))


if __name__ == "__main__":
    main()
