"""Run all benchmarks, one after the other, and compare their figures with ``limits.toml``.

Results go to a folder: a JSON file for each benchmark, its output, and ``summary.md``. A missed limit is not a
failure, since machines are noisy; a benchmark that cannot run is one.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
QUICK = ("bench_import", "bench_dispatch", "bench_eager", "bench_trace", "bench_scale")
ALL = (
    "bench_import",
    "bench_trace",
    "bench_transforms",
    "bench_dispatch",
    "bench_eager",
    "bench_scale",
    "loops",
    "microbatch",
    "stored",
    "planner",
    "bounds",
    "whole_plans",
    "ecosystem",
    "online_rules",
    "published",
)
PICTURES = {"bench_scale": "scale.svg", "planner": "planner.svg", "whole_plans": "whole_plans.svg"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick", action="store_true", help="small sizes, few rounds, the fast benchmarks: a smoke test"
    )
    parser.add_argument("--only", nargs="+", choices=ALL, help="these alone")
    parser.add_argument("--out", type=Path, default=Path("out/bench"), help="where results go (default: %(default)s)")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    lines, failed = [], []
    for name in options.only or (QUICK if options.quick else ALL):
        words = [sys.executable, str(HERE / f"{name}.py"), "--json", str(options.out / f"{name}.json")]
        words += ["--quick"] if options.quick else []
        words += ["--plot", str(options.out / PICTURES[name])] if name in PICTURES else []
        print(f"== {name} ", end="", flush=True)
        start = time.monotonic()
        done = subprocess.run(words, capture_output=True, text=True)
        print(f"({time.monotonic() - start:.0f} s)")
        (options.out / f"{name}.txt").write_text(done.stdout + done.stderr)
        if done.returncode:
            failed.append(name)
            print("\n".join(done.stderr.splitlines()[-5:]))
            continue
        verdict = json.loads((options.out / f"{name}.json").read_text()).get("verdict", [])
        lines += ["", f"## {name}", "", *(f"- {line}" for line in verdict)]
        print("\n".join(f"  {line}" for line in verdict))
    (options.out / "summary.md").write_text("# Figures and limits\n" + "\n".join(lines) + "\n")
    print(
        f"Results are in {options.out}. To put them into the documentation: python benchmarks/report.py {options.out}"
    )
    if failed:
        sys.exit(f"These could not run: {', '.join(failed)}.")


if __name__ == "__main__":
    main()
