"""The rows of benchmarks/gpu.py, compiled for the H200 on which they ran, on a machine that has none.

Compared
    The programs of benchmarks/gpu.py, its plans searched again, compiled for ``Target("h200")`` from the types of their arguments, with what
    benchmarks/results/gpu.json has of the device: the temporary bytes of the compiled program, and the time of a step.

Measured
    Each in its own process: temporary bytes, XLA's estimate of the time, and the CPU time of planning and compiling. Bytes agree if they are within 1% of
    the device's, or within 2 MiB, with or without the workspace of cuBLAS, which XLA reserves on the device alone (24 MiB).

With ``--json OUT`` each row is written when it is done, and the same command goes on where it ended: with ``--limit 500`` it starts no
process after 500 seconds. It needs ``pip install ".[target-cuda]"`` with the version of JAX that ran on the device.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import gpu
import jax
import programs
from _common import environment, header, parse_args, show, write_json

import statetx

MIB = 2**20
DEVICE = "h200"
SHARE, LEAST, WORKSPACE = 0.01, 2 * MIB, 24 * MIB
# Those that one waits for first.
FIRST = [("transformer", name) for name in gpu.STOCK]
FIRST += [("recurrent", name) for name in ("plain", "Levels(2)", "Slots(16)")]
ALL = [(kind, name) for kind, names in gpu.IMPLEMENTATIONS.items() for name in names]
ROWS = list(dict.fromkeys(FIRST + ALL))


def one(kind: str, name: str, quick: bool) -> dict[str, Any]:
    """Compile one implementation in this process."""
    begin = time.process_time()
    gpu.TIME_LIMIT = 600.0  # plans are searched for to their end, also on a busy machine
    with statetx.target(DEVICE):  # a plan is made for it, too
        program = programs.of_types(lambda: gpu.IMPLEMENTATIONS[kind][name](quick))
        cost = statetx.measure(jax.value_and_grad(program.loss), program.params, *program.data, gradient=False)
    return {"temporary": cost.temp_bytes, "seconds": cost.seconds, "cpu": time.process_time() - begin}


def difference(here: int, there: int) -> tuple[float, float, bool]:
    """The percentage and the MiB by which two sizes differ, and whether they agree."""
    off = here - there
    return 100 * off / there, off / MIB, abs(off) <= SHARE * there or min(abs(off), abs(off + WORKSPACE)) <= LEAST


COLUMNS = (
    "model and policy",
    "temporary MiB here",
    "on the H200",
    "difference",
    "in MiB",
    "agrees",
    "estimated ms",
    "of the first",
    "measured ms",
    "of the first",
)


def rows(results: dict[str, dict[str, Any]], device: dict[str, dict[str, Any]]) -> list[list[str]]:
    lines = []
    for kind, by_name in results.items():
        first = next(iter(by_name))
        for name, r in by_name.items():
            there = device[kind][name]
            percent, mib, agrees = difference(r["temporary"], there["temporary"])
            cells = [
                f"{r['temporary'] / MIB:,.1f}",
                f"{there['temporary'] / MIB:,.1f}",
                f"{percent:+.1f}%",
                f"{mib:+.1f}",
            ]
            cells.append("yes" if agrees else "NO")
            for of, base in ((r, by_name[first]), (there, device[kind][first])):
                known = of["seconds"] is not None
                cells += [f"{1e3 * of['seconds']:.1f}", f"{of['seconds'] / base['seconds']:.2f}"] if known else ["", ""]
            lines.append([f"{kind}: {name}", *cells])
    return lines


def verdicts(results: dict[str, dict[str, Any]], device: dict[str, dict[str, Any]]) -> list[str]:
    """How many rows agree, and how far the estimated times are from the measured ones."""
    pairs = [(f"{k}: {n}", r, device[k][n]) for k, by_name in results.items() for n, r in by_name.items()]
    agreeing = [name for name, r, there in pairs if difference(r["temporary"], there["temporary"])[2]]
    lines = [f"temporary memory agrees in {len(agreeing)} of {len(pairs)} rows"]
    ratios = {name: there["seconds"] / r["seconds"] for name, r, there in pairs if r["seconds"] is not None}
    if ratios:
        low, high = min(ratios, key=lambda n: ratios[n]), max(ratios, key=lambda n: ratios[n])
        lines.append(f"measured time: {ratios[low]:.2f} ({low}) to {ratios[high]:.2f} ({high}) of the estimated one")
    return lines


def on_device() -> dict[str, Any]:
    return json.loads((Path(__file__).parent / "results" / "gpu.json").read_text())


def main() -> None:
    one_of = {
        "nargs": 2,
        "metavar": ("KIND", "NAME"),
        "help": "compile one implementation in this process and print JSON",
    }
    limit = {"type": float, "metavar": "SECONDS", "help": "start no further process after this time"}
    options = parse_args(__doc__ or "", one=one_of, limit=limit)
    if options.one:
        print(json.dumps(one(*options.one, options.quick)))
        return
    start = time.monotonic()
    there, env = on_device(), environment() | {"target": DEVICE, "quick": options.quick}
    print(header(env))
    results: dict[str, dict[str, Any]] = {}
    if options.json and options.json.exists():
        written = json.loads(options.json.read_text())
        if {**written["environment"], "date": env["date"]} != env:
            raise SystemExit(f"{options.json} is from another version: name another file")
        results = written["results"]
    for kind, name in ROWS:
        late = options.limit is not None and time.monotonic() - start > options.limit
        if name in results.get(kind, {}) or name not in there["results"][kind] or late:
            continue
        command = [sys.executable, __file__, "--one", kind, name] + (["--quick"] if options.quick else [])
        # Flags as on the device, for loops that it runs alone.
        process = subprocess.run(command, capture_output=True, text=True, env=gpu.environment_of(name))
        if process.returncode:
            print("\n".join(process.stderr.splitlines()[-12:]), file=sys.stderr, flush=True)
            continue
        results.setdefault(kind, {})[name] = json.loads(process.stdout.splitlines()[-1])
        print(f"{kind}: {name}, {time.monotonic() - start:.0f} s", flush=True)
        if options.json:
            write_json(options.json, env, {"results": results, "verdict": verdicts(results, there["results"])})
    show(f"For an {DEVICE.upper()}", COLUMNS, rows(results, there["results"]))
    print("\n".join(verdicts(results, there["results"])))


if __name__ == "__main__":
    main()
