"""Random stateful programs: their syntax, a generator of them, and two ways to run one.

`System` runs a program on `statetx` states under `statetx` transforms. `Reference` runs the same tree without statetx:
it threads a plain dict of values by hand, a loop is a Python loop, a map is a Python loop and a stack, a branch runs
both sides on copies and keeps one, a derivative is `jax.vjp` of a pure function of the dict. They share the syntax and
nothing else, so that a mistake would have to be made twice.

Values stay of order one (sums are means, writes decay or pass a tanh), so that rounding is not amplified and a tolerance
of 1e-9 tells a wrong term from a fused product.

The semantics of the reference:
- A call of a transform that raises leaves every state unchanged, also if the exception is caught
  inside another transform, of `remat` in eager code too. The statements of an untransformed function before the exception stay done.
- Both branches of a cond are traced: an exception in the one not taken is raised too.
- A random state is split over the examples of a vmap and carried through a scan unless the node says otherwise; it
  advances if the traced body draws from it, whichever branch is taken.
- A function that is inspected leaves no trace.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

import statetx

SIZE = 3  # of every vector, map and scan

# -- syntax ----------------------------------------------------------------------------------------------------

# Names of states and their objects. Two names may refer to one object.
OBJECTS = {"s": "s", "v": "v", "m": "m", "u": "u", "n": "n", "i": "i", "f": "f", "s_too": "s", "v_too": "v"}
SHAPES = {"s": (), "v": (SIZE,), "m": (SIZE, SIZE), "u": (SIZE,)}
FLOATS = ("s", "v", "m", "u", "f")  # objects that a derivative may be taken with respect to


@dataclasses.dataclass(frozen=True)
class Const:
    """A Python number."""

    value: float


@dataclasses.dataclass(frozen=True)
class Local:
    """A value computed before; counts from the latest."""

    back: int


@dataclasses.dataclass(frozen=True)
class Read:
    """The value of a state; a matrix counts as the mean of its rows, an integer as a float of order one."""

    name: str


@dataclasses.dataclass(frozen=True)
class Unary:
    op: str  # "sin", "tanh", "neg", "mean"; "ruled": a sine with a derivative rule of its own, which reads a state
    arg: Any


@dataclasses.dataclass(frozen=True)
class Binary:
    op: str  # "mid", "diff", "mul"
    left: Any
    right: Any


Expr = Const | Local | Read | Unary | Binary


@dataclasses.dataclass(frozen=True)
class Let:
    expr: Expr


@dataclasses.dataclass(frozen=True)
class Write:
    """``state = expr``; `shape` is the state's at the statement. `raw`: the constant is written unchanged."""

    name: str
    shape: tuple[int, ...]
    expr: Expr
    raw: bool = False


@dataclasses.dataclass(frozen=True)
class Update:
    """``state = 0.5 * state + expr``, with the expression's size halved."""

    name: str
    shape: tuple[int, ...]
    expr: Expr
    raw: bool = False


@dataclasses.dataclass(frozen=True)
class Count:
    """``state = state + by``: `n` holds an int32 array, `i` a Python int."""

    name: str
    by: int


@dataclasses.dataclass(frozen=True)
class Draw:
    """A normal number or vector, from a key of its own."""

    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Raise:
    pass


@dataclasses.dataclass(frozen=True)
class Block:
    """Statements and a result. Each Let, Draw and Call adds a local; so does the argument, or both in a loop."""

    body: tuple[Any, ...]
    result: Expr


@dataclasses.dataclass(frozen=True)
class Call:
    """A transform of a block, applied to `arg`. If it is `caught`, an exception gives minus the argument."""

    kind: str  # "remat", "jit", "grad", "vjp", "scan", "fori", "cond", "vmap"
    block: Block
    arg: Expr
    caught: bool = False
    wrt: tuple[str, ...] = ()  # grad, vjp: names of states
    of_arg: bool = True  # grad: whether to differentiate the argument; vjp always does
    xs: Expr = Const(0.0)  # scan
    reverse: bool = False  # scan
    checkpoint: Any = None  # scan: how it stores less
    other: Block | None = None  # cond: where the argument's mean is not above `threshold`
    threshold: float = 0.0
    mapped: tuple[str, ...] = ()  # scan, vmap: objects with an axis
    rng: str = "default"  # scan: or "split"; vmap: or "broadcast"


@dataclasses.dataclass(frozen=True)
class Inspect:
    """A block that is inspected, and not called."""

    how: str  # of `INSPECTIONS`
    block: Block
    arg: Expr


class Boom(Exception):
    """The exception that programs raise."""


# -- the generator ---------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Scope:
    """The rules for statements at one place of a program.

    `free`: objects that accept any value here. `constant`: objects that accept only a value that is the same in
    all examples of an enclosing vmap; none does inside a branch taken by some of the examples only.
    """

    depth: int
    num_locals: int
    shapes: dict[str, tuple[int, ...]]
    free: frozenset[str]
    constant: frozenset[str] = frozenset()
    draws: bool = True
    in_vmap: bool = False
    shared_rng: bool = False


class _Budget:
    """How many more calls a program may have, and how many of them may be of a kind that compiles."""

    def __init__(self, calls: int, compiled: int):
        self.calls = calls
        self.compiled = compiled


_EAGER = ("remat", "grad", "vjp", "vmap")
_COMPILED = ("jit", "scan", "fori", "cond")
_constants = st.sampled_from([0.3, -0.7, 0.9, 1.1])


def _expr(draw: Any, scope: _Scope, depth: int = 2) -> Expr:
    kind = draw(st.sampled_from(["local", "read", "unary", "binary"] if depth else ["local", "read"]))
    if kind == "local":
        return Local(draw(st.integers(0, scope.num_locals - 1)))
    if kind == "read":
        return Read(draw(st.sampled_from(tuple(OBJECTS))))
    if kind == "unary":
        return Unary(draw(st.sampled_from(("sin", "tanh", "neg", "mean", "ruled"))), _expr(draw, scope, depth - 1))
    left = _expr(draw, scope, depth - 1)
    right = Const(draw(_constants)) if draw(st.booleans()) else _expr(draw, scope, depth - 1)
    return Binary(draw(st.sampled_from(("mid", "diff", "mul"))), left, right)


def _write(draw: Any, scope: _Scope) -> Any:
    names = [name for name, obj in OBJECTS.items() if obj in scope.free | scope.constant]
    if not names:
        return Let(_expr(draw, scope))
    name = draw(st.sampled_from(names))
    obj = OBJECTS[name]
    if obj in ("n", "i"):
        return Count(name, draw(st.integers(1, 3)))
    # Two objects hold Python numbers: `f`, which loops and branches promote, and `u` while it is mapped, which is given
    # nothing but constants.
    shape = scope.shapes.get(obj, ())
    constant = obj == "u" or obj in scope.constant or draw(st.integers(0, 3)) == 0
    expr = Const(draw(_constants)) if constant else _expr(draw, scope)
    raw = constant and shape == () and obj in ("f", "u")
    return draw(st.sampled_from((Write, Update)))(name, shape, expr, raw)


def _statement(draw: Any, scope: _Scope, budget: _Budget) -> Any:
    kinds = ["let", "write", "write", "draw", "inspect", "call", "call", "call", "call", "call"]
    kind = draw(st.sampled_from(kinds))
    if kind == "call" and scope.depth and budget.calls > 0:
        return _call(draw, scope, budget)
    if kind == "inspect" and scope.depth and budget.calls > 0:
        budget.calls -= 1
        inner = dataclasses.replace(scope, depth=scope.depth - 1, num_locals=scope.num_locals + 1)
        return Inspect(draw(st.sampled_from(tuple(INSPECTIONS))), _block(draw, inner, budget), _expr(draw, scope, 1))
    if kind == "draw" and scope.draws:
        return Draw(draw(st.sampled_from(((), (SIZE,)))))
    if kind == "write" or (kind == "call" and draw(st.booleans())):
        return _write(draw, scope)
    return Let(_expr(draw, scope))


def _block(draw: Any, scope: _Scope, budget: _Budget) -> Block:
    body = []
    for _ in range(draw(st.integers(1, 3))):
        statement = _statement(draw, scope, budget)
        body.append(statement)
        if isinstance(statement, (Let, Draw, Call)):
            scope = dataclasses.replace(scope, num_locals=scope.num_locals + 1)
    result = _expr(draw, scope)
    if draw(st.integers(0, 15)) == 7:
        body.insert(draw(st.integers(0, len(body))), Raise())
        kept = body[: body.index(Raise())]  # nothing after it runs; a result that refers to it is never computed
        return Block((*kept, Raise()), result)
    return Block(tuple(body), result)


def _call(draw: Any, scope: _Scope, budget: _Budget) -> Call:
    kinds = _EAGER
    if budget.compiled > 0 and draw(st.integers(0, 2)) == 0:
        kinds = _COMPILED
        budget.compiled -= 1
    budget.calls -= 1
    kind = draw(st.sampled_from(kinds))
    arg = _expr(draw, scope, 1)
    caught = draw(st.integers(0, 3)) == 0
    inner = dataclasses.replace(scope, depth=scope.depth - 1, num_locals=scope.num_locals + 1)
    if kind == "remat":
        return Call(kind, _block(draw, inner, budget), arg, caught)
    if kind == "jit":  # it remembers its closure, by contract: it sees its argument alone
        return Call(kind, _block(draw, dataclasses.replace(inner, num_locals=1), budget), arg, caught)
    if kind in ("grad", "vjp"):
        wrt = draw(st.lists(st.sampled_from(FLOATS), unique=True, max_size=2))
        names = [draw(st.sampled_from([n for n, o in OBJECTS.items() if o == w])) for w in wrt]
        of_arg = not wrt or draw(st.booleans())
        return Call(kind, _block(draw, inner, budget), arg, caught, wrt=tuple(names), of_arg=of_arg)
    if kind == "fori":
        return Call(kind, _block(draw, inner, budget), arg, caught)
    if kind == "cond":
        frozen = {} if not scope.in_vmap else {"constant": frozenset()}
        inner = dataclasses.replace(inner, draws=scope.draws and not scope.shared_rng, **frozen)
        if scope.in_vmap:
            inner = dataclasses.replace(inner, free=inner.free - {"n", "i", "f"})
        threshold = draw(st.sampled_from((-0.1234567, 0.0765432)))
        block, other = _block(draw, inner, budget), _block(draw, inner, budget)
        return Call(kind, block, arg, caught, other=other, threshold=threshold)
    candidates = [o for o in ("v", "m", "u") if scope.shapes[o]]
    mapped = tuple(draw(st.lists(st.sampled_from(candidates), unique=True))) if candidates else ()
    shapes = {o: shape[1:] if o in mapped else shape for o, shape in scope.shapes.items()}
    inner = dataclasses.replace(inner, shapes=shapes)
    if kind == "scan":
        rng = draw(st.sampled_from(("default", "split")))
        inner = dataclasses.replace(inner, num_locals=inner.num_locals + 1)
        xs, reverse = _expr(draw, scope, 1), draw(st.booleans())
        checkpoint = draw(st.sampled_from((None, None, 2, statetx.policies.Levels(1))))
        block = _block(draw, inner, budget)
        return Call(kind, block, arg, caught, xs=xs, reverse=reverse, checkpoint=checkpoint, mapped=mapped, rng=rng)
    free = scope.free & frozenset(mapped)
    rng = draw(st.sampled_from(("default", "default", "broadcast")))
    constant = (scope.free | scope.constant) - free
    inner = dataclasses.replace(inner, free=free, constant=constant, in_vmap=True, shared_rng=rng == "broadcast")
    return Call(kind, _block(draw, inner, budget), arg, caught, mapped=mapped, rng=rng)


@st.composite
def programs(draw: Any, depth: int = 4) -> Block:
    """Blocks of at most three statements, with transforms nested up to `depth` deep."""
    scope = _Scope(depth, 1, SHAPES, frozenset(OBJECTS.values()))
    budget = _Budget(calls=5, compiled=draw(st.sampled_from((0, 0, 0, 0, 0, 1, 1, 2))))
    block = _block(draw, scope, budget)
    if not any(isinstance(s, Call) for s in block.body):  # there is nothing to test without one
        body = [s for s in block.body if not isinstance(s, Raise)]
        scope = dataclasses.replace(scope, num_locals=1 + sum(isinstance(s, (Let, Draw)) for s in body))
        block = Block((*body, _call(draw, scope, budget)), Local(0))
    return block


def count_calls(block: Block | None) -> dict[str, int]:
    """How often each transform occurs, and under ``"depth"`` how deep they are nested."""
    found: dict[str, int] = {"depth": 0}
    for s in () if block is None else block.body:
        if isinstance(s, Call):
            found[s.kind] = found.get(s.kind, 0) + 1
            for inner in (count_calls(s.block), count_calls(s.other)):
                found["depth"] = max(found["depth"], 1 + inner.pop("depth"))
                for kind, n in inner.items():
                    found[kind] = found.get(kind, 0) + n
    return found


# -- the system under test -------------------------------------------------------------------------------------


WIDTH = statetx.State(0.8)


@jax.custom_jvp
def ruled(x: Any) -> Any:
    return WIDTH.value * jnp.sin(x)


@ruled.defjvp
def _(primals: tuple, tangents: tuple) -> tuple[Any, Any]:
    (x,), (t,) = primals, tangents
    return ruled(x), WIDTH.value * jnp.cos(x) * t


def _call_pure(fun: Callable, x: Any) -> None:
    pure = statetx.functionalize(fun)
    pure(pure.values(x), x)


INSPECTIONS: dict[str, Callable[[Callable, Any], Any]] = {
    "states": lambda fun, x: statetx.functionalize(fun).states(x),
    "call": _call_pure,
    "saved_residuals": statetx.saved_residuals,
    "trace_states": lambda fun, x: statetx.trace_states(fun)(x),
    "eval_shape": statetx.eval_shape,
    "make_jaxpr": lambda fun, x: statetx.make_jaxpr(fun)(x),
    "lower": lambda fun, x: statetx.jit(fun).lower(x),
}


class Model:
    """An object with states; some attributes share one."""

    def __init__(self) -> None:
        self.s = self.s_too = statetx.Param(jnp.asarray(0.4, jnp.float64))
        self.v = self.v_too = statetx.State(jnp.asarray([0.2, -0.5, 0.8]))
        self.m = statetx.State(jnp.asarray([[0.1, 0.6, -0.3], [-0.8, 0.5, 0.2], [0.7, -0.4, 0.9]]))
        self.u = statetx.State(jnp.asarray([-0.6, 0.3, 0.5]))
        self.n = statetx.State(jnp.zeros((), jnp.int32))
        self.i = statetx.State(0)
        self.f = statetx.State(0.25)
        self.k = statetx.RngState(7)


class System:
    """A program on the states of a `Model`, under `statetx`'s transforms."""

    def __init__(self, program: Block):
        self.model = Model()
        self._program = program
        self._jitted: dict[int, Any] = {}

    def __call__(self, x: Any) -> Any:
        return self._run(self._program, [x])

    def values(self) -> dict[str, Any]:
        return {o: getattr(self.model, o).value for o in ("s", "v", "m", "u", "n", "i", "f", "k")}

    def _run(self, block: Block, local: list) -> Any:
        local = list(local)
        for s in block.body:
            match s:
                case Let(expr):
                    local.append(self._eval(expr, local))
                case Write(name):
                    getattr(self.model, name).value = self._written(s, local)
                case Update(name):
                    state = getattr(self.model, name)
                    state.value = 0.5 * state.value + 0.5 * self._written(s, local)
                case Count(name, by):
                    getattr(self.model, name).value += by
                case Draw(shape):
                    local.append(jnp.tanh(jax.random.normal(self.model.k.next(), shape)))
                case Raise():
                    raise Boom
                case Inspect(how):
                    fun = lambda x, block=s.block: self._run(block, [*local, x])  # noqa: E731
                    with contextlib.suppress(Boom):
                        INSPECTIONS[how](fun, jnp.asarray(self._eval(s.arg, local)))
                case Call():
                    arg = jnp.asarray(self._eval(s.arg, local))
                    try:
                        local.append(self._call(s, arg, local))
                    except Boom:
                        if not s.caught:
                            raise
                        local.append(-arg)
        return self._eval(block.result, local)

    def _written(self, s: Write | Update, local: list) -> Any:
        value = self._eval(s.expr, local)
        return value if s.raw else self._fit(jnp.asarray(value, jnp.float64), s.shape)

    @staticmethod
    def _fit(x: Any, shape: tuple[int, ...]) -> Any:
        if jnp.shape(x) == shape:
            return x
        return jnp.mean(x) if shape == () else jnp.broadcast_to(x, shape)

    def _eval(self, expr: Expr, local: list) -> Any:
        match expr:
            case Const(value):
                return value
            case Local(back):
                return local[-1 - back]
            case Read(name):
                value = getattr(self.model, name).value
                if OBJECTS[name] in ("n", "i"):
                    return jnp.sin(1.0 * value)
                return jnp.mean(value, axis=0) if jnp.ndim(value) == 2 else value
            case Unary(op, arg):
                functions = {"sin": jnp.sin, "tanh": jnp.tanh, "neg": jnp.negative, "mean": jnp.mean, "ruled": ruled}
                return functions[op](self._eval(arg, local))
            case Binary(op, left, right):
                a, b = self._eval(left, local), self._eval(right, local)
                return a * b if op == "mul" else 0.5 * (a + b) if op == "mid" else 0.5 * (a - b)
        raise AssertionError(expr)

    def _scalar(self, x: Any) -> Any:
        return jnp.sum(x * jnp.arange(1.0, 1.0 + jnp.size(x)).reshape(jnp.shape(x)))

    def _rules(self, s: Call) -> dict:
        rules: dict[Any, Any] = {}
        for o in s.mapped:
            mapped = getattr(self.model, o)
            rules[lambda path, state, mapped=mapped: state is mapped] = 0
        if s.rng != "default":
            rules[statetx.RngState] = statetx.Split if s.rng == "split" else statetx.Broadcast
        return rules

    def _call(self, s: Call, arg: Any, local: list) -> Any:
        return getattr(self, "_" + s.kind)(s, arg, local)

    def _remat(self, s: Call, arg: Any, local: list) -> Any:
        return statetx.remat(lambda x: self._run(s.block, [*local, x]))(arg)

    def _jit(self, s: Call, arg: Any, local: list) -> Any:
        if id(s) not in self._jitted:
            self._jitted[id(s)] = statetx.jit(lambda x: self._run(s.block, [x]))
        return self._jitted[id(s)](arg)

    def _grad(self, s: Call, arg: Any, local: list) -> Any:
        def loss(x: Any) -> Any:
            out = self._run(s.block, [*local, x])
            return self._scalar(out), out

        if not s.wrt:
            of_arg, aux = statetx.grad(loss, has_aux=True)(arg)
            return jnp.tanh(of_arg) + 0.1 * self._scalar(aux)
        wrt = {name: getattr(self.model, name) for name in s.wrt}
        if not s.of_arg:
            (value, aux), of_states = statetx.value_and_grad(loss, wrt=wrt, has_aux=True)(arg)
            of_arg = jnp.zeros(())
        else:
            (value, aux), (of_states, of_arg) = statetx.value_and_grad(loss, 0, wrt=wrt, has_aux=True)(arg)
        terms = [0.3 * (n + 1) * jnp.tanh(self._scalar(of_states[name])) for n, name in enumerate(s.wrt)]
        return jnp.tanh(of_arg) + jnp.tanh(value) + sum(terms)

    def _vjp(self, s: Call, arg: Any, local: list) -> Any:
        wrt = {name: getattr(self.model, name) for name in s.wrt} or None
        out, pullback = statetx.vjp(lambda x: self._run(s.block, [*local, x]), arg, wrt=wrt)
        cotangent = 0.5 + jnp.zeros(jnp.shape(out))
        if wrt is None:
            (of_arg,) = pullback(cotangent)
            return jnp.tanh(of_arg) + 0.1 * self._scalar(out)
        of_states, (of_arg,) = pullback(cotangent)
        terms = [0.3 * (n + 1) * jnp.tanh(self._scalar(of_states[name])) for n, name in enumerate(s.wrt)]
        return jnp.tanh(of_arg) + 0.1 * self._scalar(out) + sum(terms)

    def _scan(self, s: Call, arg: Any, local: list) -> Any:
        xs = self._fit(self._eval(s.xs, local), (SIZE,))

        def body(carry: Any, x: Any) -> Any:
            out = self._run(s.block, [*local, carry, x])
            return self._fit(out, jnp.shape(arg)), self._fit(out, ())

        options = {"reverse": s.reverse, "checkpoint": s.checkpoint}
        carry, ys = statetx.scan(body, arg, xs, states=self._rules(s), **options)
        return 0.5 * carry + 0.5 * jnp.tanh(ys)

    def _fori(self, s: Call, arg: Any, local: list) -> Any:
        def body(i: Any, x: Any) -> Any:
            return self._fit(self._run(s.block, [*local, 0.5 * x + 0.1 * i]), jnp.shape(arg))

        return statetx.fori_loop(1, 3, body, arg)

    def _cond(self, s: Call, arg: Any, local: list) -> Any:
        def branch(block: Any) -> Any:
            return lambda x: self._fit(self._run(block, [*local, x]), jnp.shape(arg))

        return statetx.cond(jnp.mean(arg) > s.threshold, branch(s.block), branch(s.other), arg)

    def _vmap(self, s: Call, arg: Any, local: list) -> Any:
        def example(x: Any) -> Any:
            return self._fit(self._run(s.block, [*local, x]), ())

        return statetx.vmap(example, states=self._rules(s))(self._fit(arg, (SIZE,)))


# -- the reference ---------------------------------------------------------------------------------------------

Env = dict[str, Any]
_INITIAL = {
    "s": np.float64(0.4),
    "v": [0.2, -0.5, 0.8],
    "m": [[0.1, 0.6, -0.3], [-0.8, 0.5, 0.2], [0.7, -0.4, 0.9]],
    "u": [-0.6, 0.3, 0.5],
}


class Reference:
    """A program on a dict of values, in plain JAX and Python.

    `env["drawn"]` says whether the random state was written since it was last set to False.
    """

    def __init__(self, program: Block):
        self._program = program
        self.env: Env = {name: jnp.array(value) for name, value in _INITIAL.items()}
        self.env |= {"n": jnp.array(0, jnp.int32), "i": 0, "f": 0.25, "k": jax.random.key(7), "drawn": False}

    def __call__(self, x: Any) -> Any:
        return run_block(self._program, self.env, (x,), traced=False)

    def values(self) -> dict[str, Any]:
        return {name: value for name, value in self.env.items() if name != "drawn"}


def run_block(block: Block, env: Env, temps: tuple, *, traced: bool) -> Any:
    """Run a block; changes `env`."""
    for statement in block.body:
        if isinstance(statement, Raise):
            raise Boom
        if isinstance(statement, Inspect):
            continue
        if isinstance(statement, Let):
            temps += (evaluate(statement.expr, env, temps),)
        elif isinstance(statement, Draw):
            temps += (draw_normal(env, statement.shape),)
        elif isinstance(statement, Count):
            env[OBJECTS[statement.name]] = env[OBJECTS[statement.name]] + statement.by
        elif isinstance(statement, Call):
            argument = jnp.asarray(evaluate(statement.arg, env, temps))
            temps += (run_call(statement, argument, env, temps, traced),)
        else:
            target = OBJECTS[statement.name]
            new = reshape(evaluate(statement.expr, env, temps), statement.shape)
            if isinstance(statement, Update):
                new = (env[target] + new) / 2
            env[target] = new
    return evaluate(block.result, env, temps)


def draw_normal(env: Env, shape: tuple[int, ...]) -> jax.Array:
    keys = jax.random.split(env["k"])
    env["k"], env["drawn"] = keys[0], True
    return jnp.tanh(jax.random.normal(keys[1], shape))


def reshape(x: Any, shape: tuple[int, ...]) -> Any:
    array = jnp.asarray(x)
    if array.shape == shape:
        return x
    return array.mean() if shape == () else jnp.zeros(shape) + (array if array.ndim == 0 else array[None, :])


def evaluate(expr: Expr, env: Env, temps: tuple) -> Any:
    if isinstance(expr, Const):
        return expr.value
    if isinstance(expr, Local):
        return temps[len(temps) - 1 - expr.back]
    if isinstance(expr, Read):
        value = env[OBJECTS[expr.name]]
        if OBJECTS[expr.name] in ("n", "i"):
            return jnp.sin(jnp.asarray(value, float))
        return value.mean(0) if jnp.ndim(value) == 2 else value
    if isinstance(expr, Unary):
        inner = jnp.asarray(evaluate(expr.arg, env, temps))
        if expr.op in ("neg", "ruled"):
            return -inner if expr.op == "neg" else 0.8 * jnp.sin(inner)
        return inner.mean() if expr.op == "mean" else getattr(jnp, expr.op)(inner)
    a, b = evaluate(expr.left, env, temps), evaluate(expr.right, env, temps)
    if expr.op == "mul":
        return a * b
    return (a + b) / 2 if expr.op == "mid" else (a - b) / 2


def run_call(call: Call, argument: jax.Array, env: Env, temps: tuple, traced: bool) -> Any:
    inner = dict(env)
    try:
        result = MEANINGS[call.kind](call, argument, inner, temps, traced)
    except Boom:
        if call.caught:
            return -argument
        raise
    env.update(inner)
    return result


def run_remat(call: Call, x: jax.Array, env: Env, temps: tuple, traced: bool) -> Any:
    return run_block(call.block, env, (*temps, x), traced=traced)


def run_jit(call: Call, x: jax.Array, env: Env, temps: tuple, traced: bool) -> Any:
    return run_block(call.block, env, (x,), traced=True)


def weighted(x: Any) -> jax.Array:
    flat = jnp.asarray(x).reshape(-1)
    return jnp.dot(flat, jnp.arange(flat.size) + 1.0)


def pull_back(call: Call, x: jax.Array, env: Env, temps: tuple, cotangent: Any) -> tuple:
    """The block's output, and the cotangents of the argument and of the states in `wrt`; `env` is as after the block."""
    names = [OBJECTS[name] for name in call.wrt]
    drawn = False

    def pure(x: jax.Array, values: dict) -> tuple:
        nonlocal drawn
        inner = {**env, **values}
        out = jnp.asarray(run_block(call.block, inner, (*temps, x), traced=True))
        drawn = inner.pop("drawn")
        return out, (out, inner)

    primals = {name: jnp.asarray(env[name]) for name in names}
    _, pull, (out, after) = jax.vjp(pure, x, primals, has_aux=True)
    env.update(after)
    env["drawn"] = drawn
    of_x, of_states = pull(cotangent(out))
    return out, of_x, [of_states[name] for name in names]


def run_grad(call: Call, x: jax.Array, env: Env, temps: tuple, traced: bool) -> Any:
    # The loss is the output's entries weighted by 1, 2, ...: these are the output's cotangent.
    out, of_x, of_states = pull_back(call, x, env, temps, lambda out: (jnp.arange(out.size) + 1.0).reshape(out.shape))
    if not call.wrt:
        return jnp.tanh(of_x) + weighted(out) / 10
    result = jnp.tanh(weighted(out)) + (jnp.tanh(of_x) if call.of_arg else 0)
    for place, g in enumerate(of_states, start=1):
        result = result + 0.3 * place * jnp.tanh(weighted(g))
    return result


def run_vjp(call: Call, x: jax.Array, env: Env, temps: tuple, traced: bool) -> Any:
    out, of_x, of_states = pull_back(call, x, env, temps, lambda out: jnp.full(out.shape, 0.5))
    result = jnp.tanh(of_x) + weighted(out) / 10
    for place, g in enumerate(of_states, start=1):
        result = result + 0.3 * place * jnp.tanh(weighted(g))
    return result


def run_scan(call: Call, carry: jax.Array, env: Env, temps: tuple, traced: bool) -> Any:
    xs = reshape(evaluate(call.xs, env, temps), (SIZE,))
    whole = {name: env[name] for name in call.mapped}
    key, drawn_before = env["k"], env["drawn"]
    step_keys = jax.random.split(key, SIZE + 1)
    slices: dict[str, list] = {name: [None] * SIZE for name in call.mapped}
    ys: list[Any] = [None] * SIZE
    shape = carry.shape
    env["drawn"] = False
    for at in reversed(range(SIZE)) if call.reverse else range(SIZE):
        for name in call.mapped:
            env[name] = whole[name][at]
        if call.rng == "split":
            env["k"] = step_keys[at + 1]
        out = run_block(call.block, env, (*temps, carry, xs[at]), traced=True)
        carry, ys[at] = jnp.asarray(reshape(out, shape)), reshape(out, ())
        for name in call.mapped:
            slices[name][at] = jnp.broadcast_to(env[name], whole[name].shape[1:])
    for name in call.mapped:
        env[name] = jnp.stack(slices[name])
    if call.rng == "split":
        env["k"] = step_keys[0] if env["drawn"] else key
    env["drawn"] = env["drawn"] or drawn_before
    return carry / 2 + jnp.tanh(jnp.stack(ys)) / 2


def run_fori(call: Call, x: jax.Array, env: Env, temps: tuple, traced: bool) -> Any:
    shape = x.shape
    for i in (1, 2):
        x = jnp.asarray(reshape(run_block(call.block, env, (*temps, x / 2 + i / 10), traced=True), shape))
    return x


def run_cond(call: Call, x: jax.Array, env: Env, temps: tuple, traced: bool) -> Any:
    taken, left = (call.block, call.other) if bool(x.mean() > call.threshold) else (call.other, call.block)
    assert taken is not None and left is not None
    elsewhere = dict(env)
    run_block(left, elsewhere, (*temps, x), traced=True)
    out = reshape(run_block(taken, env, (*temps, x), traced=True), x.shape)
    env["drawn"] = env["drawn"] or elsewhere["drawn"]
    return jnp.asarray(out)


def run_vmap(call: Call, x: jax.Array, env: Env, temps: tuple, traced: bool) -> Any:
    xs = reshape(x, (SIZE,))
    keys = jax.random.split(env["k"], SIZE + 1)
    examples, outs = [], []
    for at in range(SIZE):
        example = {**env, "drawn": False} | {name: env[name][at] for name in call.mapped}
        if call.rng == "default":
            example["k"] = keys[at + 1]
        outs.append(reshape(run_block(call.block, example, (*temps, xs[at]), traced=True), ()))
        examples.append(example)
    last, before = examples[-1], dict(env)
    env.update(last)  # unmapped values are the same in all
    for name in call.mapped:
        shape = before[name].shape[1:]
        env[name] = jnp.stack([jnp.broadcast_to(example[name], shape) for example in examples])
    if call.rng == "default":
        env["k"] = keys[0] if last["drawn"] else before["k"]
    env["drawn"] = before["drawn"] or last["drawn"]
    return jnp.stack(outs)


MEANINGS = {
    "remat": run_remat,
    "jit": run_jit,
    "grad": run_grad,
    "vjp": run_vjp,
    "scan": run_scan,
    "fori": run_fori,
    "cond": run_cond,
    "vmap": run_vmap,
}


# -- the property ----------------------------------------------------------------------------------------------


def check(program: Block, calls: int = 2) -> None:
    """Raise AssertionError unless system and reference agree on `program`, call after call."""
    with jax.enable_x64(True):
        system, reference = System(program), Reference(program)
        for call in range(calls):
            x = jnp.asarray([0.6, -0.2][call % 2])
            actual, expected = outcome(system, x), outcome(reference, x)
            assert isinstance(actual, str) == isinstance(expected, str), f"call {call}: {actual}, not {expected}"
            assert_close(actual, expected, f"call {call}: output")
            values = system.values()
            for name, value in reference.values().items():
                assert not isinstance(values[name], jax.core.Tracer), f"call {call}: {name} holds {values[name]}"
                assert_close(values[name], value, f"call {call}: state {name}")


def outcome(run: Any, x: Any) -> Any:
    try:
        return run(x)
    except Boom:
        return "Boom"


def assert_close(actual: Any, expected: Any, where: str) -> None:
    if isinstance(expected, str):
        assert actual == expected, where
        return
    assert not isinstance(actual, jax.core.Tracer), f"{where}: {actual}"
    if isinstance(expected, jax.Array) and jnp.issubdtype(expected.dtype, jax.dtypes.prng_key):
        actual, expected = jax.random.key_data(actual), jax.random.key_data(expected)
    a, e = np.asarray(actual), np.asarray(expected)
    assert (a.shape, a.dtype) == (e.shape, e.dtype), f"{where}: {a.dtype}{a.shape} instead of {e.dtype}{e.shape}"
    if np.issubdtype(e.dtype, np.inexact):
        assert np.all(np.isfinite(e)), f"{where}: the program is badly scaled"
        np.testing.assert_allclose(a, e, rtol=1e-9, atol=1e-11, err_msg=where)
    else:
        np.testing.assert_array_equal(a, e, err_msg=where)
