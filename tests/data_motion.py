"""Draw the files that four objects visit, by following them: ``python tests/data_motion.py`` writes ARCHITECTURE.md."""

import pathlib
import sys
import types
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

import statetx
from statetx import policies

ROOT = pathlib.Path(__file__).parents[1]
PAGE = ROOT / "ARCHITECTURE.md"
BEGIN, END = "<!-- drawn by tests/data_motion.py -->\n", "<!-- end -->\n"
PACKAGE = f"{ROOT / 'statetx'}/"


class Arrived(Exception):
    """The last file is reached; what follows takes long."""


def files_visited(thing: object, run: Callable[[], Any], *, becomes: str = "", until: str = "") -> list[str]:
    """The files of the functions that get an object itself as an argument, in the order of their first call.

    Args:
        becomes: the type of the object that a function makes of it, and that is followed from there.
        until: the last file.
    """
    followed, visited = [thing], []

    def note(frame: types.FrameType, event: str, result: Any) -> None:
        code = frame.f_code
        if event == "return" and becomes and type(result).__name__ == becomes:
            followed.append(result)
        if event != "call" or not code.co_filename.startswith(PACKAGE):
            return
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount + 2]  # *args and **kwargs, too
        given = [frame.f_locals[name] for name in names if name in frame.f_locals]
        given += [x for value in given for x in (value if type(value) is tuple else ())]
        given += [x for value in given if type(value) is dict for x in value.values()]
        if any(x is one for x in given for one in followed):
            file = code.co_filename.removeprefix(PACKAGE)
            visited.extend([] if file in visited else [file])
            if file == until:
                raise Arrived

    sys.setprofile(note)
    try:
        run()
    except Arrived:
        pass
    finally:
        sys.setprofile(None)
    return visited


def routes() -> dict[str, list[str]]:
    """What is followed, and its files."""
    w, h, x = statetx.Param(jnp.eye(4)), statetx.State(jnp.zeros(4)), jnp.ones(4)
    policy, budget = policies.names("h"), "".join(["8", "MiB"])

    def loss(x):
        return statetx.checkpoint_name(jnp.sin(w.value @ x), "h").sum()

    def body(carry, x):
        h.value = h.value + x
        return carry, None

    planned = lambda: statetx.plan(loss, x, budget=budget)
    return {
        "`policy`, through `grad(remat(f, policy=policy))`": files_visited(
            policy, lambda: statetx.grad(statetx.remat(loss, policy=policy))(x)
        ),
        "an argument, through `jit`": files_visited(x, lambda: statetx.jit(loss)(x)),
        "`budget`, through `plan`; in `_budget.py` it becomes a `ByteBudget`": files_visited(
            budget, planned, becomes="ByteBudget", until="planner/_store.py"
        ),
        "a state that a `scan` carries": files_visited(h, lambda: statetx.scan(body, None, jnp.ones((3, 4)))),
    }


def drawn() -> str:
    rows = ["| what | files |", "|---|---|"]
    rows += [f"| {what} | {' → '.join(f'`{file}`' for file in files)} |" for what, files in routes().items()]
    return "\n".join(rows) + "\n"


def with_routes(page: str) -> str:
    head, _, rest = page.partition(BEGIN)
    return head + BEGIN + "\n" + drawn() + "\n" + END + rest.partition(END)[2]


if __name__ == "__main__":
    if "--print" in sys.argv:
        print(with_routes(PAGE.read_text()), end="")
    else:
        PAGE.write_text(with_routes(PAGE.read_text()))
