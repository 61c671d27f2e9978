"""Search mixed programs for counterexamples, from a shell.

python tests/mixed_search.py 0 5000 --out found.jsonl   # a line for each seed; run again, it resumes where it stopped
python tests/mixed_search.py 337                        # one program, reduced and printed if it fails
python tests/mixed_search.py 0 200 --threads            # two programs at a time, in two threads
python tests/mixed_search.py 0 400 --coverage           # how many programs have each feature
JAX_ENABLE_X64=1 python tests/mixed_search.py 0 900 --twice  # double precision, second derivatives of loops
"""

from __future__ import annotations

import argparse
import json
import pathlib
import traceback
from collections.abc import Callable, Iterator, Sequence

import conftest  # noqa: F401  # the suite's settings of JAX
import jax
import mixed_syntax
from mixed_generator import SHIFTS, program_of
from mixed_syntax import Call, Do, If, Make, Program, Raise, Statement, Try, source, statements, walk
from random_mixed import check, check_seed, check_threads

# -- features of the programs ----------------------------------------------------------------------------------


def has(test: Callable[[Statement], bool]) -> Callable[[Program], bool]:
    return lambda program: any(test(s) for s in statements(program))


def depth(fun: mixed_syntax.Fun) -> int:
    calls = [s for s in mixed_syntax.walk_here(fun.body) if isinstance(s, Call)]
    return max((1 + max(map(depth, c.funs), default=0) for c in calls), default=0)


def text(s: Statement) -> str:
    return "\n".join(mixed_syntax.statement_lines(s, "statetx"))


def raises_in_a_call(s: Statement) -> bool:
    calls = s.body if isinstance(s, Try) else []
    return any(isinstance(c, Call) and any(isinstance(r, Raise) for r in walk([c])) for c in calls)


KINDS = (
    "remat stored jit grad vjp jvp linearize jacobian hessian slots twice scan fori while map parts vmap cond switch "
    "update shard_map pure bs_jit bs_for_loop bs_cond inspect"
).split()
FEATURES: dict[str, Callable[[Program], bool]] = {
    **{kind: has(lambda s, kind=kind: isinstance(s, Call) and s.kind == kind) for kind in KINDS},
    **{f"sort {sort}": lambda p, sort=sort: any(c.sort == sort for c in p.cells) for sort in mixed_syntax.INITIAL},
    "two kinds of states": lambda p: len({c.kind for c in p.cells}) >= 2,
    "four kinds of states": lambda p: len({c.kind for c in p.cells}) == 4,
    "depth 4": lambda p: depth(p.main) >= 4,
    "exception from a transformed call, caught": has(raises_in_a_call),
    "exception raised where a flag says so": has(lambda s: isinstance(s, If) and "fail" in s.test),
    "inspection of a function that is then called": has(lambda s: isinstance(s, Call) and bool(s.before)),
    "state left on an attribute": has(lambda s: isinstance(s, Make) and s.place.startswith("m.new")),
    "learner left on an attribute": has(lambda s: isinstance(s, Make) and ".learner" in s.place),
    "learner called": lambda p: any(f"learner{n}(" in source(p, "statetx") for n in (0, 1)),
    "compiled main that leaves a state, called thrice": lambda p: (
        "jit" in p.wrap
        and has(lambda s: isinstance(s, Make) and s.is_left)(p)
        and sum(t.x is not None for t in p.turns) > 2
    ),
    "state appended to a list": has(lambda s: isinstance(s, Make) and s.appended),
    "state dropped": has(lambda s: isinstance(s, Make) and s.place.startswith("t")),
    "state deleted": has(lambda s: isinstance(s, Do) and s.template.startswith("del")),
    "states that begin with one container": lambda p: bool(mixed_syntax.shared_containers(p)),
    "container changed in place": has(lambda s: isinstance(s, Do) and ".append(" in s.template),
    "schedule": has(lambda s: isinstance(s, Call) and "checkpoint=" in s.template),
    "mapped state": has(lambda s: isinstance(s, Call) and "only({c0}): 0" in s.template),
    "gradient of a state": has(lambda s: isinstance(s, Call) and "wrt=" in s.template and s.kind == "grad"),
    "policy": has(lambda s: isinstance(s, Call) and "policy=" in s.template),
    "values stored as bits": lambda p: ".stored_as('bits')" in source(p, "statetx"),
    "derivative rule that gets a state": lambda p: "by_state(" in source(p, "statetx"),
    "derivative rule beside a Ref": lambda p: "by_ref(" in source(p, "statetx"),
    "rule of a custom_jvp that is not its derivative": lambda p: "sine_jvp(" in source(p, "statetx"),
    "rule of a custom_vjp that is not its derivative": lambda p: "sine_vjp(" in source(p, "statetx"),
    "second derivative with such a rule": has(
        lambda s: isinstance(s, Call) and s.kind == "twice" and "sine_" in text(s)
    ),
    "fence": has(lambda s: isinstance(s, Call) and "fence=" in s.template),
    "function called for two models": lambda p: "(k, " in source(p, "statetx"),
    "main compiled": lambda p: "jit" in p.wrap,
    "several calls of main": lambda p: sum(t.x is not None for t in p.turns) > 1,
    "a delay line in a state": has(lambda s: any(shift.partition("{")[0] in text(s) for shift in SHIFTS)),
}


def coverage(seeds: Sequence[int]) -> dict[str, int]:
    """How many of these programs have each feature."""
    programs = [program_of(seed) for seed in seeds]
    return {name: sum(map(test, programs)) for name, test in FEATURES.items()}


# -- the search ------------------------------------------------------------------------------------------------


def search(seeds: Sequence[int], check: Callable[[int], str], out: pathlib.Path | None) -> Iterator[tuple[int, str]]:
    """Write the failures of each program that `out` does not have yet to `out`."""
    done = {json.loads(line)["seed"] for line in out.read_text().splitlines()} if out and out.exists() else set()
    for n, seed in enumerate(s for s in seeds if s not in done):
        try:
            wrong = check(seed)
        except Exception as e:  # the check itself has failed
            wrong = "".join(traceback.format_exception(e))
        if out:
            with out.open("a") as file:
                print(json.dumps({"seed": seed, "wrong": wrong}), file=file)
        if n % 300 == 299:
            jax.clear_caches()  # compiled programs would fill the memory
        yield seed, wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("first", type=int)
    parser.add_argument(
        "last", type=int, nargs="?", help="one past the last seed; without it, that of `first` is run alone"
    )
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--threads", action="store_true")
    parser.add_argument("--coverage", action="store_true")
    parser.add_argument("--twice", action="store_true", help="only programs with a second derivative of a loop")
    args = parser.parse_args()
    if args.last is None and not args.threads:
        check_seed(args.first)
        return print(f"program {args.first}: nothing is wrong")
    seeds: Sequence[int] = range(args.first, args.first + 1 if args.last is None else args.last)
    if args.twice:
        seeds = [seed for seed in seeds if FEATURES["twice"](program_of(seed))]
    if args.coverage:
        for name, num in coverage(seeds).items():
            print(f"{num:6d}  {name}")
        return None
    num_wrong = 0
    for seed, wrong in search(seeds, check_threads if args.threads else lambda seed: check(program_of(seed)), args.out):
        if wrong:
            num_wrong += 1
            print(f"{seed}: {wrong}", flush=True)
    return print(f"{len(seeds)} seeds, {num_wrong} of those run now are wrong")


if __name__ == "__main__":
    main()
