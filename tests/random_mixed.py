"""Run a program of `mixed_generator` under statetx and by `mixed_reference`, compare everything, and reduce programs
that differ.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import linecache
import threading
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
import libraries
import mixed_syntax
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec
from libraries import Cells, Rng, library_of
from mixed_cells import Cell, Only, is_numeric, leaf_type
from mixed_generator import program_of
from mixed_reference import Reference
from mixed_syntax import Call, Fun, Make, Program, source, statements

import statetx
from helpers import open_frames
from statetx import StateAccessError

TOLERANCE = 2e-4  # float32; values are of order one, so that a wrong term shows


class Boom(Exception):
    """The exception that programs raise."""


class Halt(BaseException):
    """As Boom, but no Exception, like an interrupt."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Pair:
    """A pytree of the user's."""

    left: Any
    right: Any


class Model:
    """An object with states. Nothing but its attributes tells models apart."""

    def __init__(self, is_part: bool = False):
        self.training, self.fail = True, False
        self.bag: dict[str, Any] = {}
        self.items: list[Any] = []
        self.row: list[Any] = [None] * 10
        if not is_part:
            self.part = Model(is_part=True)


class Learner:
    """An object with a state, whose rule for derivatives holds it: an equation of a program that uses it does, too."""

    def __init__(self, h: Any):
        self.h = h

    def __call__(self, x: Any) -> Any:
        @jax.custom_jvp
        def step(x: Any) -> Any:
            return jnp.sin(x)

        @step.defjvp
        def _(primals: tuple, tangents: tuple) -> tuple[Any, Any]:
            assert self.h is not None
            return step(*primals), jnp.cos(primals[0]) * tangents[0]

        return step(x)


def total(tree: Any) -> Any:
    """One float of all numbers in a tree."""
    leaves = [jnp.mean(jnp.asarray(x, float)) for x in jax.tree.leaves(tree) if is_numeric(x)]
    return jnp.tanh(sum(leaves, jnp.zeros(())))


def above(x: Any) -> Any:
    """Where the entries of a float array exceed a threshold: 1, elsewhere 0."""
    x = jnp.asarray(x)
    return (x > 0.0765).astype(x.dtype)


spike = jax.custom_jvp(above)
"""`above` with the derivative of a smooth function."""


@spike.defjvp
def _(primals: tuple, tangents: tuple) -> tuple[Any, Any]:
    (x,), (t,) = primals, tangents
    return spike(x), 0.5 * jnp.cos(x) * t


@jax.custom_jvp
def sine_jvp(x: Any) -> Any:
    """A sine with a rule that is not its derivative."""
    return jnp.sin(x)


@sine_jvp.defjvp
def _(primals: tuple, tangents: tuple) -> tuple[Any, Any]:
    (x,), (t,) = primals, tangents
    return sine_jvp(x), 0.6 * jnp.cos(1.1 * x) * t


@jax.custom_vjp
def sine_vjp(x: Any) -> Any:
    return jnp.sin(x)


sine_vjp.defvjp(lambda x: (jnp.sin(x), x), lambda x, ct: (0.6 * jnp.cos(1.1 * x) * ct,))


def loop_of(fun: Callable, x: Any, length: int, checkpoint: str) -> Any:
    """A loop of ``fun(i, x)``."""
    x = jnp.asarray(x, jnp.result_type(x))
    if checkpoint == "while":
        step = lambda c: (jnp.asarray(fun(0.1 * c[1], c[0]), x.dtype), c[1] + 1)
        return statetx.while_loop(lambda c: c[1] < length, step, (x, 0), checkpoint=2)[0]
    checkpoint = eval(checkpoint, {"policies": statetx.policies, "statetx": statetx})
    step = lambda i, c: jnp.asarray(fun(0.1 * i, c), x.dtype)
    return statetx.fori_loop(0, length, step, x, checkpoint=checkpoint)


def plain_loop_of(fun: Callable, x: Any, length: int, checkpoint: str) -> Any:
    """The loop by JAX, whose second derivative with such rules is another one than that of Python's loop."""
    x = jnp.asarray(x, jnp.result_type(x))

    def step(i: Any, c: Any) -> Any:
        if checkpoint == "statetx.Truncated(2)":
            c = jax.lax.select((i % 2 == 0) & (i > 0), jax.lax.stop_gradient(c), c)
        return jnp.asarray(fun(0.1 * i, c), x.dtype)

    return jax.lax.fori_loop(0, length, step, x)


class Widths(threading.local):
    """What rules read: a state has one thread at a time."""

    def __init__(self) -> None:
        self.state, self.ref = statetx.State(jnp.float32(0.8)), jax.new_ref(jnp.float32(0.8))


WIDTHS = Widths()
HALVES = jnp.asarray([256, 1, 1], jnp.bfloat16)  # 258; added up in bfloat16 one by one, 256


@jax.custom_jvp
def scaled_sine(width: Any, x: Any) -> Any:
    return width * jnp.sin(x)


@scaled_sine.defjvp
def _(primals: tuple, tangents: tuple) -> tuple[Any, Any]:
    (width, x), (of_width, t) = primals, tangents
    return scaled_sine(width, x), width * jnp.cos(x) * t + of_width * jnp.sin(x)


def by_state(x: Any) -> Any:
    """A sine whose derivative rule gets the value of a state."""
    return scaled_sine(WIDTHS.state.value, x)


@jax.custom_jvp
def by_ref(x: Any) -> Any:
    """A sine that reads a Ref, which its derivative rule does not: a rule in a branch of a plain `jax.jit`, as in
    `run_pure`, cannot.
    """
    return WIDTHS.ref[...] * jnp.sin(x)


@by_ref.defjvp
def _(primals: tuple, tangents: tuple) -> tuple[Any, Any]:
    (x,), (t,) = primals, tangents
    return jnp.float32(0.8) * jnp.sin(x), jnp.float32(0.8) * jnp.cos(x) * t


def in_parts(fun: Callable, xs: Any) -> Any:
    """The sum of a function over examples, and of what half precision loses."""
    both = statetx.microbatch(lambda x, h: (fun(x[0]), h[0]), len(xs), reduce="sum")
    out, halves = both(xs, HALVES)
    of_weight = jax.grad(lambda w: statetx.microbatch(lambda h: (w * h)[0], 3, reduce="sum")(HALVES))
    return out + 0.01 * (halves + of_weight(jnp.bfloat16(1)) - 516).astype(jnp.float32)


def in_chunks(fun: Callable, xs: Any) -> Any:
    both = statetx.chunked(lambda x, h: (fun(x[0]), h[0]), size=1, reduce="sum")
    out, halves = both(xs, HALVES)
    return out + 0.01 * (halves - 258).astype(jnp.float32)


def of_rows(fun: Callable, scan: Callable) -> Callable:
    """``loss(w, x)`` of stacked weights, which a loop reads row by row."""
    return lambda w, x: total(scan(lambda h, row: (fun(row, h), None), x, w)[0])


def update_rows(fun: Callable, w: Any, xs: Any) -> Any:
    """A step on weights that it donates."""
    loss = of_rows(fun, statetx.scan)
    step = statetx.jit(lambda w, x: w - 0.1 * statetx.grad(loss)(w, x), donate_argnums=0)
    return step(jnp.sin(w), xs[0])


def sum_rows(fun: Callable, w: Any, xs: Any) -> Any:
    """The gradient of a batch in parts."""
    loss = of_rows(fun, statetx.scan)
    in_parts = lambda w: statetx.microbatch(lambda x: loss(w, x[0]), len(xs), reduce="sum")(xs)
    return statetx.jit(lambda w: statetx.grad(in_parts)(w))(w)


# -- two worlds ------------------------------------------------------------------------------------------------


class World:
    """Names that a program uses, and how its states are looked at, with `names`, `read` and `is_state`."""

    def __init__(self) -> None:
        self.ticks: collections.Counter[str] = collections.Counter()
        self.common = {
            "jax": jax,
            "jnp": jnp,
            "np": np,
            "types": types,
            "Boom": Boom,
            "Halt": Halt,
            "Pair": Pair,
            "Model": Model,
            "Learner": Learner,
            "P": PartitionSpec,
            "policies": statetx.policies,
            "checkpoint_name": statetx.checkpoint_name,
            "total": total,
            "above": above,
            "spike": spike,
            "sine_jvp": sine_jvp,
            "sine_vjp": sine_vjp,
            "tick": lambda name: self.ticks.update([name]),
        }


class Plain(World):
    """The reference."""

    name = "reference"

    def names(self) -> dict[str, Any]:
        r = Reference()

        cells = Cells(r, "statetx")

        def rekey(rng: Rng, key: jax.Array) -> None:
            rng.key.value = key

        def update_rows(fun: Callable, w: Any, xs: Any) -> Any:
            step = r.jit(lambda w, x: w - 0.1 * r.grad(of_rows(fun, r.scan))(w, x))
            return step(jnp.sin(w), xs[0])

        def sum_rows(fun: Callable, w: Any, xs: Any) -> Any:
            loss = of_rows(fun, r.scan)
            return r.jit(lambda w: r.grad(lambda w: r.map(lambda x: loss(w, x), xs).sum(0))(w))(w)

        transforms = {name: getattr(r, name) for name in TRANSFORMS if hasattr(r, name)}
        return {
            **self.common,
            **transforms,
            "bs_jit": r.jit,
            "run_pure": lambda f, *args: r.jit(f)(*args),
            "look_at": lambda name, f, *args: None,
            "by_state": lambda x: jnp.float32(0.8) * jnp.sin(x),
            "by_ref": lambda x: jnp.float32(0.8) * jnp.sin(x),
            "in_parts": lambda f, xs: r.map(f, xs).sum(0),
            "in_chunks": lambda f, xs: r.map(f, xs).sum(0),
            "update_rows": update_rows,
            "sum_rows": sum_rows,
            "loop_of": plain_loop_of,
            "bs_cond": lambda *args: r.jit(lambda: r.cond(*args))(),
            "bs_for_loop": lambda f, xs: r.jit(lambda: r.map(f, xs))(),
            "Cell": lambda value, **options: Cell(r, value, **options),
            "Rng": lambda kind, seed: Rng(r, kind, seed),
            "draw": cells.draw,
            "rekey": rekey,
            "peek": cells.get,
            "only": lambda x: Only(x.key if isinstance(x, Rng) else x),
            "mesh": None,
            "Split": "Split",
            "Carry": "Carry",
            "Broadcast": "Broadcast",
        }

    def is_state(self, x: Any) -> bool:
        return isinstance(x, (Cell, Rng))

    def read(self, state: Any) -> Any:
        return Cells.get(state)


TRANSFORMS = (
    "remat jit grad value_and_grad vjp jvp linearize jacfwd jacrev hessian scan fori_loop while_loop map vmap cond "
    "switch shard_map"
).split()


class System(World):
    """statetx."""

    name = "statetx"

    def names(self) -> dict[str, Any]:
        transform = brainstate.transform
        mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
        return {
            **self.common,
            **{name: getattr(statetx, name) for name in TRANSFORMS},
            "statetx": statetx,
            "brainstate": brainstate,
            "nnx": nnx,
            "run_pure": run_pure,
            "look_at": look_at,
            "by_state": by_state,
            "by_ref": by_ref,
            "in_parts": in_parts,
            "in_chunks": in_chunks,
            "update_rows": update_rows,
            "sum_rows": sum_rows,
            "loop_of": loop_of,
            "bs_jit": transform.jit,
            "bs_cond": transform.cond,
            "bs_for_loop": transform.for_loop,
            "draw": draw,
            "rekey": rekey,
            "peek": self.read,
            "only": only,
            "mesh": mesh,
            "Split": statetx.Split,
            "Carry": statetx.Carry,
            "Broadcast": statetx.Broadcast,
        }

    def is_state(self, x: Any) -> bool:
        return isinstance(x, (statetx.State, brainstate.State, nnx.Variable, nnx.Rngs, jax.Ref))

    def read(self, state: Any) -> Any:
        return libraries.get(state)


def draw(rng: Any) -> jax.Array:
    return library_of(rng).draw(rng)


def rekey(rng: Any, key: jax.Array) -> None:
    library = library_of(rng)
    library.set(library.key_of(rng), key)


def only(state: Any) -> Callable[[str, Any], bool]:
    """A filter."""
    return lambda path, s: s is state


def run_pure(fun: Callable, *args: Any) -> Any:
    """A call through plain JAX."""
    pure = statetx.functionalize(fun)
    states = pure.states(*args)
    out, new = jax.jit(pure)(pure.values(*args), *args)
    for path, state in states.items():
        libraries.put(state, new[path])
    return out


def inspect_by_call(fun: Callable, *args: Any) -> None:
    """A pure call whose results are dropped, of a function that writes no Ref: such a call writes it in place."""
    pure = statetx.functionalize(fun)
    if not any(isinstance(state, jax.Ref) for state in statetx.trace_states(fun)(*args).writes.values()):
        pure(pure.values(*args), *args)


INSPECTIONS: dict[str, Callable[..., Any]] = {
    "states": lambda fun, *args: statetx.functionalize(fun).states(*args),
    "values": lambda fun, *args: statetx.functionalize(fun).values(*args),
    "call": inspect_by_call,
    "saved_residuals": statetx.saved_residuals,
    "trace_states": lambda fun, *args: statetx.trace_states(fun)(*args),
    "eval_shape": statetx.eval_shape,
    "make_jaxpr": lambda fun, *args: statetx.make_jaxpr(fun)(*args),
    "lower": lambda fun, *args: statetx.jit(fun).lower(*args),
}


def look_at(name: str, fun: Callable, *args: Any) -> None:
    """Inspect a call, which may raise what the program raises, or refuse a new string in a state."""
    refused = statetx.CarryTypeError, statetx.CreatedStateError, statetx.StateValueError
    with contextlib.suppress(Boom, Halt, KeyError, *NO_VALUE, *refused):
        INSPECTIONS[name](fun, *args)


# -- outcome of a run ------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Record:
    """Results of the turns, final values of the models, and the number of runs of each function."""

    outs: list[Any]
    models: dict[str, Any]
    open: set[str]  # states whose weak type nobody promises
    ticks: dict[str, int]
    stagings: int  # how often a compiled main may be staged: calls that failed, and kinds of types among the others


NO_VALUE = (StateAccessError, brainstate.TraceContextError)
ERRORS = (Boom, Halt, KeyError, statetx.StatetxError, *NO_VALUE)
"""Exceptions that a program may raise by its nature."""


def run(program: Program, world: World, between: Callable[[], None] = lambda: None) -> Record:
    """Run a program from the making of its models on; `between` is called after each turn."""
    text = source(program, world.name)
    if jax.config.jax_enable_x64:
        text = text.replace("np.float32", "np.float64")  # of jnp, too
    file = f"<program {program.seed} on {world.name}>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    names = world.names()
    exec(compile(text, file, "exec"), names)
    m, k = names["build"]()
    main = names["program"](m, k)
    outs: list[Any] = []
    first = [state for _, state in look({"m": m, "k": k}, world)]
    types, num_failed = set(), 0
    for turn in program.turns:
        if turn.x is None:
            exec(turn.line, {"m": m, "k": k})
            between()
            continue
        x = eval(turn.x.text(world.name), names)
        now = str([jax.tree.map(leaf_type, value_of(state, world), is_leaf=is_numeric) for state in first])
        try:
            outs.append(main(x))
            types.add(now)
        except ERRORS as e:
            # The reference and statetx have these names in common; of a state without a value, brainstate says it.
            outs.append(StateAccessError.__name__ if isinstance(e, NO_VALUE) else type(e).__name__)
            num_failed += 1
        between()
    states = dict(look({"m": m, "k": k}, world))
    is_open = {path for path, state in states.items() if isinstance(state, Cell) and state.is_weak_open}
    return Record(
        outs,
        {path: value_of(state, world) for path, state in states.items()},
        is_open,
        dict(world.ticks),
        len(types) + num_failed,
    )


def stage(program: Program) -> None:
    """Trace the first call of `main` under statetx, without running what it traces."""
    names = System().names()
    exec(source(program, System.name), names)
    main = names["program"](*names["build"]())
    x = next(turn.x for turn in program.turns if turn.x is not None)
    with strict_warnings(), contextlib.suppress(*ERRORS):
        statetx.jit(main).lower(eval(x.text(System.name), names))


def look(x: Any, world: World, path: str = "", seen: frozenset[int] = frozenset()) -> Iterator[tuple[str, Any]]:
    if world.is_state(x):
        yield path, x
    elif isinstance(x, (Model, Learner)):
        if id(x) not in seen:
            for name, part in vars(x).items():
                yield from look(part, world, f"{path}.{name}", seen | {id(x)})
    elif isinstance(x, dict):
        for name, part in x.items():
            yield from look(part, world, f"{path}[{name}]", seen)
    elif isinstance(x, list):
        for i, part in enumerate(x):
            yield from look(part, world, f"{path}[{i}]", seen)


def value_of(state: Any, world: World) -> Any:
    try:
        return world.read(state)
    except Exception as e:
        return Gone(e)


class Gone:
    """A state that cannot be read."""

    def __init__(self, error: Exception):
        self.error = error


# -- comparing -------------------------------------------------------------------------------------------------


def difference(actual: Record, wanted: Record) -> str:
    """The first difference between two runs, empty if there is none."""
    for i, (a, b) in enumerate(zip(actual.outs, wanted.outs, strict=True)):
        found = tree_difference(a, b, weak=False)
        if found:
            return f"output of call {i}: {found}"
    if set(actual.models) != set(wanted.models):
        return f"states {sorted(set(actual.models) ^ set(wanted.models))} are there only once"
    for path, b in wanted.models.items():
        a = actual.models[path]
        if isinstance(a, Gone) or isinstance(b, Gone):
            if type(a) is not type(b):
                return (
                    f"state {path}: {a.error if isinstance(a, Gone) else a!r} in place of "
                    f"{b.error if isinstance(b, Gone) else b!r}"
                )
            continue
        found = tree_difference(a, b, weak=path not in wanted.open)
        if found:
            return f"state {path}: {found}"
    return ""


def tree_difference(a: Any, b: Any, weak: bool) -> str:
    if isinstance(a, str) or isinstance(b, str):
        return "" if isinstance(a, str) and isinstance(b, str) and a == b else f"{a!r} in place of {b!r}"
    xs, ys = jax.tree_util.tree_leaves_with_path(a), jax.tree_util.tree_leaves_with_path(b)
    if jax.tree.structure(a) != jax.tree.structure(b):
        return f"structure {jax.tree.structure(a)} in place of {jax.tree.structure(b)}"
    for (path, x), (_, y) in zip(xs, ys, strict=True):
        found = leaf_difference(x, y, weak)
        if found:
            return f"{jax.tree_util.keystr(path)} {found}"
    return ""


def leaf_difference(x: Any, y: Any, weak: bool) -> str:
    if isinstance(x, jax.core.Tracer):
        return f"a tracer {x!r}"
    if not is_numeric(y) or not is_numeric(x):
        return "" if type(x) is type(y) and x == y else f"{x!r} in place of {y!r}"
    (shape, dtype, is_weak), wanted = leaf_type(x), leaf_type(y)
    if (shape, dtype) != wanted[:2] or (weak and is_weak != wanted[2]):
        return f"type {(shape, dtype, is_weak)} in place of {wanted}"
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        x, y = jax.random.key_data(x), jax.random.key_data(y)
    x, y = np.asarray(x), np.asarray(y)
    if x.dtype.kind not in "biu":
        close = np.isclose(x.astype(np.float64), y.astype(np.float64), rtol=TOLERANCE, atol=TOLERANCE)
        return "" if close.all() else f"{x} in place of {y}"
    return "" if np.array_equal(x, y) else f"{x} in place of {y}"


def too_many_runs(program: Program, ticks: dict[str, int], stagings: int) -> str:
    """A function whose Python ran more often than the law allows."""
    turns = sum(t.x is not None for t in program.turns)
    if "jit" in program.wrap:  # one that leaves a state behind is staged once more (decision 16)
        is_left = any(isinstance(s, Make) and s.is_left for s in statements(program))
        turns = min(turns, (1 + is_left) * stagings)
    most: collections.Counter[str] = collections.Counter()

    def count(fun: Fun, runs: int) -> None:
        most[fun.name] += runs
        for s in mixed_syntax.walk_here(fun.body):
            if isinstance(s, Call):
                for f in s.funs:
                    count(f, runs * f.runs)

    count(program.main, turns)
    helpers = {f.name for f in program.helpers}
    for name, runs in ticks.items():
        if name not in helpers and runs > most[name]:
            return f"{name} was run {runs} times, at most {most[name]} are right"
    return ""


# -- checking --------------------------------------------------------------------------------------------------


def check(program: Program) -> str:
    """The failure of a program's run, empty if there is none."""
    with strict_warnings():
        try:
            wanted = run(program, Plain())
        except Exception as e:
            return f"REFERENCE {type(e).__name__}: {e}"
        try:
            actual = run(program, System())
        except Exception as e:
            return f"{type(e).__name__}: {str(e)[:500]}"
        return compare(program, actual, wanted) or open_frames()


@contextlib.contextmanager
def strict_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", statetx.PolicyWarning)  # policies are drawn without a look at the function
        warnings.simplefilter(
            "ignore", statetx.StagingWarning
        )  # states are created whether or not anything references them
        # Under a derivative that does not need the new weights, their memory is of no use.
        warnings.filterwarnings("ignore", "Some donated buffers were not usable")
        yield


def compare(program: Program, actual: Record, wanted: Record) -> str:
    return difference(actual, wanted) or too_many_runs(program, actual.ticks, wanted.stagings)


SHARED_STEPS: tuple[Callable[[Callable], Callable], ...] = (
    statetx.jit,
    statetx.remat,
    statetx.grad,
    lambda f: statetx.jit(statetx.grad(statetx.remat(f))),
    lambda f: lambda x: statetx.vmap(f, axis_size=1, in_axes=None)(x),
    lambda f: lambda x: statetx.fori_loop(0, 1, lambda i, c: f(c), x),
    lambda f: lambda x: statetx.cond(x > 0.0, f, f, x),
)


def check_threads(seed: int) -> str:
    """Two programs in two threads. Their models are their own; of a third both have a lock, and count in it."""
    programs = [program_of(2 * seed), program_of(2 * seed + 1)]
    with strict_warnings():
        wanted = [run(p, Plain()) for p in programs]
        shared = Model()
        shared.bag = {
            "n": statetx.State(jnp.zeros((), jnp.int32)),
            "b": brainstate.State(0.0),
            "v": nnx.Variable(jnp.uint8(0)),
        }
        lock, start = threading.Lock(), threading.Barrier(2)
        actual: list[Any] = [None, None]

        def bump(x: Any) -> Any:
            shared.bag["n"].value += 1
            shared.bag["b"].value += 0.25
            shared.bag["v"].set_value(shared.bag["v"].get_value() + 2)
            return 2 * x

        step = SHARED_STEPS[seed % len(SHARED_STEPS)](bump)

        def between() -> None:
            with lock:
                step(jnp.float32(0.5))

        def work(i: int) -> None:
            _ = WIDTHS.state  # made before a program runs, not in a call of it
            start.wait()
            try:
                actual[i] = run(programs[i], System(), between)
            except BaseException as e:
                actual[i] = e

        threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for p, a, w in zip(programs, actual, wanted, strict=True):
            found = f"{type(a).__name__}: {a}" if isinstance(a, BaseException) else compare(p, a, w)
            if found:
                return f"in a thread: {report(p, found)}"
        turns = sum(len(p.turns) for p in programs)
        left = [float(System().read(s)) for s in shared.bag.values()]
        return open_frames() if left == [turns, turns / 4, 2 * turns] else f"{left} after {turns} turns"


def reduce(program: Program, found: str, limit: int = 400) -> tuple[Program, str]:
    """A program with nothing left that can be taken out of it, which fails alike."""
    kind_of_failure = lambda found: found.partition(":")[0].partition(" ")[0]
    category = kind_of_failure(found)
    tries = 0
    improved = True
    while improved and tries < limit:
        improved = False
        for candidate in mixed_syntax.smaller(program):
            tries += 1
            with contextlib.suppress(SyntaxError):
                now = check(candidate)
                if now and kind_of_failure(now) == category:
                    program, found, improved = candidate, now, True
                    break
            if tries >= limit:
                break
    return program, found


def report(program: Program, found: str) -> str:
    turns = "\n".join(f"main({t.x.text('statetx')})" if t.x else t.line for t in program.turns)
    return f"program {program.seed}: {found}\n\n{source(program, 'statetx')}\n{turns}\n"


def check_seed(seed: int) -> None:
    program = program_of(seed)
    found = check(program)
    if found:
        raise AssertionError(report(*reduce(program, found)))
