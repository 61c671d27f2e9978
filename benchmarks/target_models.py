"""Public models compiled for GPUs and TPUs that are not there: a size for each, or a refusal with a way out.

Programs
    Those of ``public_models.py``: a gradient or a whole training step of each, of types alone.

Measured
    ``statetx.measure`` for each device: what the compiled program takes in all, XLA's estimate of its time, and the CPU time of
    tracing and compiling it. A `statetx.TargetError` is a refusal; any other error is a fault.

With ``--json OUT`` each row is written when it is done, and the same command goes on where it ended: with ``--limit 200`` it starts no
compilation after 200 seconds, and ``--again`` repeats those that ended in an error. It needs
``pip install ".[target-cuda,target-tpu]"`` and the libraries of the models.
"""

from __future__ import annotations

import itertools
import json
import re
import time
from typing import Any

from _common import environment, header, parse_args, show, write_json
from public_models import PUBLIC

import statetx
from statetx._equations import compiled

DEVICES = ("t4", "a100-40gb", "h100", "b200", "tpu v5e")
GIB = 2**30


def one(name: str, device: str) -> dict[str, Any]:
    """Compile one model for one device, in this process."""
    begin = time.process_time()
    try:
        fun, args = PUBLIC[name].make()
        cost = statetx.measure(fun, *args, gradient=False, target=device)
        row = {"bytes": cost.peak_bytes, "temporary": cost.temp_bytes, "seconds": cost.seconds}
        row["unfused"] = statetx.Target(device) in compiled._targets_with_unfused_products
    except statetx.TargetError as e:
        row = {"refused": str(e)}
    except Exception as e:
        row = {"error": f"{type(e).__name__}: {e}"[:1000]}
    return {**row, "cpu": time.process_time() - begin}


# -- tables ----------------------------------------------------------------------------------------------------------

COLUMNS = ("model", "library", "dtype", "layers, shapes, program", *(f"{device}, GiB" for device in DEVICES))


def cell(row: dict[str, Any] | None, device: str) -> str:
    """GiB; "a" where the device has less, "b" where products are not fused."""
    if row is None:
        return ""
    if "bytes" in row:
        is_too_large = row["bytes"] > statetx.Target(device).memory_bytes
        return f"{row['bytes'] / GIB:.2f}{'a' * is_too_large}{'b' * row['unfused']}"
    needed = re.search(r"\(([0-9.]+)G\) exceeds available HBM", row.get("refused", ""))
    if needed:
        return f"{float(needed[1]):.2f}a"
    return "refused" if "refused" in row else "ERROR"


def rows(results: dict[str, dict[str, Any]]) -> list[list[str]]:
    return [
        [name, model.library, model.dtype, model.size, *(cell(results[name].get(device), device) for device in DEVICES)]
        for name, model in PUBLIC.items()
        if name in results
    ]


def verdicts(results: dict[str, dict[str, Any]]) -> list[str]:
    found = [(device, row) for by_device in results.values() for device, row in by_device.items()]
    sized = [(device, row["bytes"]) for device, row in found if "bytes" in row]
    num_too_large = sum(num > statetx.Target(device).memory_bytes for device, num in sized)
    errors = [
        f"{name} for {d}" for name, by_device in results.items() for d, row in by_device.items() if "error" in row
    ]
    return [
        f"{len(found)} compilations of {len(results)} models: {len(sized)} sizes, {num_too_large} of them more than the device has "
        f"(a); {sum('refused' in row for _, row in found)} refusals; {len(errors)} other errors{': ' * bool(errors)}{', '.join(errors)}",
        f"compiled without fused matrix products, for lack of tiles (b): {sum(bool(row.get('unfused')) for _, row in found)}",
    ]


# -- running ---------------------------------------------------------------------------------------------------------


def main() -> None:
    options = parse_args(
        __doc__ or "",
        only={"nargs": "+", "choices": list(PUBLIC), "metavar": "NAME", "help": "these models alone"},
        device={"nargs": "+", "choices": DEVICES, "default": list(DEVICES), "help": "default: %(default)s"},
        again={"action": "store_true", "help": "compile what ended in an error once more"},
        limit={"type": float, "metavar": "SECONDS", "help": "start no compilation after this time"},
    )
    missing = {statetx.Target(device).missing for device in options.device} - {""}
    if missing:
        raise SystemExit("; ".join(sorted(missing)))
    start = time.monotonic()
    env = environment()
    print(header(env))
    results: dict[str, Any] = {}
    if options.json and options.json.exists():
        written = json.loads(options.json.read_text())
        if {**written["environment"], "date": env["date"], "cpus": env["cpus"]} != env:
            raise SystemExit(f"{options.json} is from another version: name another file")
        results = written["results"]

    def keep(name: str, device: str, row: dict[str, Any]) -> None:
        results.setdefault(name, {})[device] = row
        if options.json:
            write_json(options.json, env, {"results": results, "verdict": verdicts(results)})

    for name, device in itertools.product(options.only or PUBLIC, options.device):
        row = results.get(name, {}).get(device)
        is_done = row is not None and not (options.again and "error" in row)
        if is_done or (options.limit is not None and time.monotonic() - start > options.limit):
            continue
        keep(name, device, {"error": "the process ended"})  # a compiler may end it
        row = one(name, device)
        keep(name, device, row)
        print(f"{name}, {device}: {cell(row, device)}; {time.monotonic() - start:.0f} s", flush=True)
    show("GiB of the compiled program", COLUMNS, rows(results))
    print("\n".join(verdicts(results)))


if __name__ == "__main__":
    main()
