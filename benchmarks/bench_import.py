"""The cost of ``import statetx`` over ``import jax``: time, memory, and other modules that it imports.

Transforms are loaded on first use; the third row includes them.

Each sample is a new process with one of the imports; they take turns. CPU time is of the process from its start, less
the time of a process that imports nothing. Resident memory is its peak.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from _common import (
    Sample,
    environment,
    header,
    interleave,
    judge,
    parse_args,
    show,
    spread,
    summaries,
    write_json,
)

JAX, STATETX = "import jax", "import statetx"
USED = "from statetx import remat, grad, jit, scan, vmap, cond"
LATE = ("brainstate", "flax", "scipy", "rich", "matplotlib", "optax", "orbax")
CODE = """
import json, resource, sys, time
{line}
used = resource.getrusage(resource.RUSAGE_SELF)
print(json.dumps({{"cpu": used.ru_utime + used.ru_stime, "mib": used.ru_maxrss / 1024, "modules": sorted(sys.modules)}}))
"""


def run(line: str) -> dict[str, Any]:
    done = subprocess.run([sys.executable, "-c", CODE.format(line=line)], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def measure(rounds: int) -> dict[str, Any]:
    idle = min(run("pass")["cpu"] for _ in range(3))

    def sample(line: str) -> Sample:
        usage = run(line)
        return {"cpu": usage["cpu"] - idle, "mib": usage["mib"]}

    samples = interleave({line: lambda line=line: sample(line) for line in (JAX, STATETX, USED)}, rounds)
    return {line: {**summaries(samples[line], samples[JAX]), "samples": samples[line]} for line in samples}


COLUMNS = ("process", "CPU ms", "middle half", "ratio", "middle half", "peak MiB", "ratio")


def rows(results: dict[str, Any]) -> list[list[str]]:
    return [
        [
            line,
            f"{1e3 * r['cpu']['median']:.0f}",
            spread(r["cpu"], 1e3, 0),
            f"{r['cpu_ratio']['median']:.2f}",
            spread(r["cpu_ratio"], 1, 2),
            f"{r['mib']['median']:.0f}",
            f"{r['mib_ratio']['median']:.2f}",
        ]
        for line, r in results.items()
    ]


def main() -> None:
    options = parse_args(__doc__ or "")
    env = environment()
    print(header(env))
    results = measure(options.rounds or (3 if options.quick else 15))
    show("Import", COLUMNS, rows(results))
    loaded = {name.partition(".")[0] for name in run(STATETX)["modules"]}
    late = [name for name in LATE if name in loaded]
    figures = {
        "import statetx, of import jax": results[STATETX]["cpu_ratio"],
        "import statetx with its transforms, of import jax": results[USED]["cpu_ratio"],
    }
    lines = [*judge("bench_import", figures, quick=options.quick), f"Of {', '.join(LATE)} it imports {late or 'none'}."]
    print("\n".join(lines))
    if options.json:
        write_json(options.json, env, {"results": results, "figures": figures, "verdict": lines})


if __name__ == "__main__":
    main()
