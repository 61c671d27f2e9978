"""Programs that mix kinds of states: their syntax, their text, and their reduction.

A program is a tree of dataclasses that prints as Python. The text runs twice: with statetx's transforms and states of
several libraries, and with `mixed_reference`'s, where every state is a cell with a `value`. So a printed failure can be
read, and run by itself.

An expression knows its shape, and every local variable has a unique name: when a statement is removed, `repair` puts a
number in place of its variable.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

SIZE = 3  # of every axis
Shape = tuple[int, ...]

# -- states ----------------------------------------------------------------------------------------------------

INITIAL = {
    "scalar": "jnp.asarray(0.4, jnp.float32)",
    "vector": "jnp.asarray([0.2, -0.5, 0.8])",
    "matrix": "jnp.asarray([[0.1, 0.6, -0.3], [-0.8, 0.5, 0.2], [0.7, -0.4, 0.9]])",
    "number": "0.25",
    "int": "jnp.zeros((), jnp.int32)",
    "count": "0",
    "flag": "jnp.asarray(False)",
    "weak": "jnp.asarray(0.35)",
    "half": "jnp.zeros((), jnp.bfloat16)",
    "numpy": "np.asarray([0.3, -0.1, 0.6], np.float32)",
    "tree": "{'a': jnp.asarray([0.5, 0.1, -0.2]), 'n': jnp.zeros((), jnp.int32), 'p': Pair(jnp.float32(0.7), 0.5)}",
    "list": "[jnp.asarray([0.9, -0.6, 0.3]), jnp.float32(0.1)]",
    "loose": "(jnp.float32(0.3), 2)",
    "mode": "'hot'",
    "key": "jax.random.key(5)",
    "rng": "7",
}
"""The initial value of a state of each sort."""

SHAPES: dict[str, Shape] = {
    "scalar": (),
    "vector": (SIZE,),
    "matrix": (SIZE, SIZE),
    "number": (),
    "weak": (),
    "numpy": (SIZE,),
}
"""Sorts that are read as one array of floats."""

CLASSES = {
    "statetx": ("statetx.State", "statetx.Param"),
    "brainstate": ("brainstate.State", "brainstate.ParamState", "brainstate.ShortTermState"),
    "nnx": ("nnx.Variable", "nnx.Param", "nnx.BatchStat"),
    "ref": ("jax.new_ref",),
}
RANDOM = {"statetx": "statetx.RngState", "brainstate": "brainstate.random.RandomState", "nnx": "nnx.Rngs"}
IN_REFS = frozenset({"scalar", "vector", "matrix", "int", "flag", "key"})


@dataclasses.dataclass(frozen=True)
class Cell:
    """A state: its place, ``m.w`` or ``m.bag['w']``, its library and class, and the sort of its value."""

    place: str
    kind: str
    cls: str
    sort: str

    def made(self, world: str, first: str | None = None) -> str:
        first = first or INITIAL[self.sort]
        if world == "statetx":
            return f"{self.cls}({first})"
        if self.sort == "rng":
            return f"Rng({self.kind!r}, {first})"
        is_ref = self.kind == "ref"
        return f"Cell({first}, is_random={is_ref and self.sort == 'key'}, is_ref={is_ref})"


def get(cell: Any, world: str) -> str:
    if world == "reference" or cell.kind in ("statetx", "brainstate"):
        return f"{cell.place}.value"
    return f"{cell.place}[...]" if cell.kind == "ref" else f"{cell.place}.get_value()"


def put(cell: Any, value: str, world: str) -> str:
    if world == "statetx" and cell.kind == "nnx":
        return f"{cell.place}.set_value({value})"
    return f"{get(cell, world)} = {value}"


# -- expressions -----------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Expr:
    """`template` with ``{0}``, ``{1}`` for the parts and ``{cell}`` for a state's value; ``names`` are
    variables in it.
    """

    shape: Shape
    template: str
    parts: list[Expr] = dataclasses.field(default_factory=list)
    cell: Cell | None = None
    name: str = ""

    def text(self, world: str) -> str:
        value = "" if self.cell is None else get(self.cell, world)
        return self.template.format(*(p.text(world) for p in self.parts), cell=value)


def number(shape: Shape, value: float = 0.5) -> Expr:
    return Expr(shape, str(value) if shape == () else f"jnp.full({shape}, {value})")


# -- statements ------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Let:
    """``name = expr``."""

    name: str
    shape: Shape
    expr: Expr


@dataclasses.dataclass
class Write:
    """``state.value = expr``."""

    cell: Cell
    expr: Expr


@dataclasses.dataclass
class Do:
    """A line of Python: ``{cell}`` is a state's value, ``{place}`` the state, ``{0}`` an expression."""

    template: str
    cell: Cell | None = None
    parts: list[Expr] = dataclasses.field(default_factory=list)
    name: str = ""  # if it gives a variable one
    shape: Shape = ()

    def text(self, world: str) -> str:
        value, place = ("", "") if self.cell is None else (get(self.cell, world), self.cell.place)
        return self.template.format(*(p.text(world) for p in self.parts), cell=value, place=place)


@dataclasses.dataclass
class Make:
    """A state made while the program runs; `place` is an attribute, an item, a list to append to, or a variable.

    The place ``m.learner0.h`` is in an object that is made with it.
    """

    place: str
    kind: str
    cls: str
    expr: Expr
    appended: bool = False

    @property
    def is_left(self) -> bool:
        """Whether it stays when the function ends."""
        return not self.place.isidentifier()

    def text(self, world: str) -> str:
        made = f"{self.cls if world == 'statetx' else 'Cell'}({self.expr.text(world)})"
        if self.place.endswith(".h"):
            return f"{self.place.removesuffix('.h')} = Learner({made})"
        return f"{self.place}.append({made})" if self.appended else f"{self.place} = {made}"


@dataclasses.dataclass
class If:
    """A Python branch on a concrete value."""

    test: str
    body: list[Any]
    orelse: list[Any]
    cell: Cell | None = None


@dataclasses.dataclass
class Raise:
    error: str


@dataclasses.dataclass
class Try:
    """``name`` is `expr` at the end of `body`, or `fallback` where an exception was caught."""

    name: str
    shape: Shape
    fallback: Expr
    body: list[Any]
    expr: Expr
    error: str
    handler: list[Any]


@dataclasses.dataclass
class Fun:
    """A function. `results` is its return value: one expression, or a tuple of them."""

    name: str
    params: list[tuple[str, Shape]]
    body: list[Any]
    results: list[Expr]
    runs: int = 1  # how often its Python may run for one run of the enclosing code
    style: str = "closure"  # or "argument": the model is its first argument, or "method"
    model: str = "m"


@dataclasses.dataclass
class Call:
    """A transform of functions, applied: `template` says how, with ``{f}``, ``{g}``, ``{0}``, ``{1}``, ... filled in.

    `names` are the variables that it gives, with their shapes; `before` and `after` are further lines.
    """

    kind: str
    template: str
    funs: list[Fun]
    parts: list[Expr]
    names: list[tuple[str, Shape]]
    cells: list[Cell] = dataclasses.field(default_factory=list)
    after: list[str] = dataclasses.field(default_factory=list)
    before: list[str] = dataclasses.field(default_factory=list)
    depth: int = 0

    def lines(self, world: str) -> list[str]:
        words = dict(zip("fgh", (applied(f) for f in self.funs), strict=False))
        words |= {f"{key}_": model_argument(f) for key, f in zip("fgh", self.funs, strict=False)}
        parts = [p.text(world) for p in self.parts]
        places = {f"c{i}": c.place for i, c in enumerate(self.cells)}
        return [line.format(*parts, **words, **places) for line in (*self.before, self.template, *self.after)]


def applied(fun: Fun) -> str:
    return f"types.MethodType({fun.name}, {fun.model})" if fun.style == "method" else fun.name


def model_argument(fun: Fun) -> str:
    return f"{fun.model}, " if fun.style == "argument" else ""


@dataclasses.dataclass
class Turn:
    """An action of the program's user: call `main`, or set a flag of a model."""

    x: Expr | None
    line: str = ""


@dataclasses.dataclass
class Program:
    seed: int
    cells: list[Cell]
    helpers: list[Fun]  # functions that several others call
    main: Fun
    wrap: str  # how main is called: "{f}" or "jit({f})"
    turns: list[Turn]
    aliases: list[tuple[str, str]]  # second places of states


# -- text ------------------------------------------------------------------------------------------------------

Statement = Any


def statement_lines(s: Statement, world: str) -> Iterator[str]:
    match s:
        case Let():
            yield f"{s.name} = {s.expr.text(world)}"
        case Write():
            yield put(s.cell, s.expr.text(world), world)
        case Do() | Make():
            yield s.text(world)
        case If():
            yield f"if {s.test.format(cell='' if s.cell is None else get(s.cell, world))}:"
            yield from block_lines(s.body, world)
            if s.orelse:
                yield "else:"
                yield from block_lines(s.orelse, world)
        case Raise():
            yield f"raise {s.error}('raised')"
        case Try():
            yield f"{s.name} = {s.fallback.text(world)}"
            yield "try:"
            yield from block_lines(s.body, world)
            yield f"    {s.name} = {s.expr.text(world)}"
            yield f"except {s.error}:"
            yield from block_lines(s.handler, world)
        case Call():
            for fun in s.funs:
                yield from function_lines(fun, world)
            yield from s.lines(world)


def block_lines(body: list[Statement], world: str) -> Iterator[str]:
    for s in body:
        for line in statement_lines(s, world):
            yield f"    {line}"
    if not body:
        yield "    pass"


def function_lines(fun: Fun, world: str) -> Iterator[str]:
    params = [name for name, _ in fun.params]
    if fun.style != "closure":
        params = [fun.model, *params]
    yield f"def {fun.name}({', '.join(params)}):"
    yield f"    tick({fun.name!r})"
    yield from block_lines(fun.body, world) if fun.body else ()
    results = [r.text(world) for r in fun.results]
    yield f"    return {', '.join(results)}"


def source(program: Program, world: str) -> str:
    """``build(...)`` makes the models; ``program(m, k)`` gives `main` ready to be called."""
    lines = ["def build():", "    m, k = Model(), Model()"]
    shared = shared_containers(program)
    lines += [f"    {sort}_ = {INITIAL[sort]}" for sort in shared]
    lines += [f"    {c.place} = {c.made(world, f'{c.sort}_' if c.sort in shared else None)}" for c in program.cells]
    lines += [f"    {new} = {old}" for new, old in program.aliases]
    lines += ["    return m, k", "", "def program(m, k):"]
    for fun in (*program.helpers, program.main):
        lines += [f"    {line}" for line in function_lines(fun, world)]
    lines += [f"    return {program.wrap.format(f=program.main.name)}"]
    return "\n".join(lines) + "\n"


def shared_containers(program: Program) -> list[str]:
    """Sorts of which all states begin with the same container: those that no statement changes in place, since a
    compiled program refuses that.
    """
    sorts = [c.sort for c in program.cells]
    changed = {s.cell.sort for s in statements(program) if isinstance(s, Do) and s.cell is not None}
    return [sort for sort in ("tree", "list", "loose") if sorts.count(sort) > 1 and sort not in changed]


# -- walking and shrinking -------------------------------------------------------------------------------------


def blocks(s: Statement) -> list[list[Statement]]:
    """The lists of statements right inside a statement."""
    match s:
        case If():
            return [s.body, s.orelse]
        case Try():
            return [s.body, s.handler]
        case Call():
            return [f.body for f in s.funs]
    return []


def walk(body: list[Statement]) -> Iterator[Statement]:
    for s in body:
        yield s
        for inner in blocks(s):
            yield from walk(inner)


def walk_called(body: list[Statement]) -> Iterator[Statement]:
    """Like `walk`, without functions that are only inspected."""
    for s in body:
        if not (isinstance(s, Call) and s.kind == "inspect"):
            yield s
            for inner in blocks(s):
                yield from walk_called(inner)


def walk_here(body: list[Statement]) -> Iterator[Statement]:
    """Like `walk`, without the bodies of functions."""
    for s in body:
        yield s
        for inner in [] if isinstance(s, Call) else blocks(s):
            yield from walk_here(inner)


def all_blocks(program: Program) -> Iterator[list[Statement]]:
    pending = [f.body for f in (*program.helpers, program.main)]
    while pending:
        block = pending.pop()
        yield block
        for s in block:
            pending += blocks(s)


def statements(program: Program) -> Iterator[Statement]:
    for fun in (*program.helpers, program.main):
        yield from walk(fun.body)


def repair(program: Program) -> Program:
    """Replace variables that are not defined any more by numbers."""
    helpers = {f.name for f in program.helpers}
    for fun in program.helpers:
        _repair_fun(fun, set())
    _repair_fun(program.main, helpers)
    return program


def _repair_fun(fun: Fun, names: set[str]) -> None:
    names = names | {name for name, _ in fun.params}
    names = _repair_block(fun.body, names)
    fun.results = [_repair_expr(r, names) for r in fun.results]


def _repair_block(body: list[Statement], names: set[str]) -> set[str]:
    names = set(names)
    for s in body:
        match s:
            case Let() | Write():
                s.expr = _repair_expr(s.expr, names)
                if isinstance(s, Let):
                    names.add(s.name)
            case Make():
                s.expr = _repair_expr(s.expr, names)
                names.add(s.place)
            case Do() | Call():
                s.parts = [_repair_expr(p, names) for p in s.parts]
                if isinstance(s, Call):
                    for fun in s.funs:
                        _repair_fun(fun, names)
                    names |= {name for name, _ in s.names}
                elif s.name:
                    names.add(s.name)
            case If():
                _repair_block(s.body, names)
                _repair_block(s.orelse, names)
            case Try():
                s.fallback = _repair_expr(s.fallback, names)
                s.expr = _repair_expr(s.expr, _repair_block(s.body, names))
                _repair_block(s.handler, names)
                names.add(s.name)
    return names


def _repair_expr(expr: Expr, names: set[str]) -> Expr:
    if expr.name and expr.name not in names:
        return number(expr.shape)
    expr.parts = [_repair_expr(p, names) for p in expr.parts]
    return expr


def smaller(program: Program) -> Iterator[Program]:
    """Programs with one thing less, the largest parts first."""
    for i in reversed(range(len(program.turns))):
        yield _edited(program, lambda p, i=i: p.turns.pop(i))
    if program.wrap != "{f}":
        yield dataclasses.replace(copy.deepcopy(program), wrap="{f}")
    for n, block in enumerate(all_blocks(program)):
        for i in range(len(block)):
            yield _edited(program, lambda p, n=n, i=i: list(all_blocks(p))[n].pop(i))
            if isinstance(block[i], (If, Try)):
                for k in range(2):
                    yield _edited(program, lambda p, n=n, i=i, k=k: _splice(list(all_blocks(p))[n], i, k))
            if isinstance(block[i], Call) and block[i].before:
                yield _edited(program, lambda p, n=n, i=i: list(all_blocks(p))[n][i].before.clear())
            if isinstance(block[i], Call) and block[i].kind != "plain" and len(block[i].names) == 1:
                yield _edited(program, lambda p, n=n, i=i: _untransform(list(all_blocks(p))[n], i))
    used = {id(s): s for s in statements(program)}
    for n, (_, expr) in enumerate(_expressions(used.values(), program)):
        if expr.parts or expr.cell is not None or (expr.name and expr.shape):
            yield _edited(program, lambda p, n=n: _flatten(p, n))
    text = source(program, "reference").partition("def program")[2] + str(program.aliases)
    if program.helpers and not any(f.name in text.partition("def main")[2] for f in program.helpers):
        yield dataclasses.replace(copy.deepcopy(program), helpers=[], aliases=[])
    for i, cell in enumerate(program.cells):
        if cell.place not in text:
            yield _edited(program, lambda p, i=i: p.cells.pop(i))


def _edited(program: Program, edit: Callable[[Program], Any]) -> Program:
    program = copy.deepcopy(program)
    edit(program)
    return repair(program)


def _splice(block: list[Statement], i: int, k: int) -> None:
    block[i : i + 1] = blocks(block[i])[k]


def _untransform(block: list[Statement], i: int) -> None:
    """The function called without a transform, where its result has the shape that the transform's has."""
    call = block[i]
    fun = call.funs[0]
    (name, shape), params = call.names[0], [shape for _, shape in fun.params]
    if (
        len(fun.results) == 1
        and fun.results[0].shape == shape
        and params == [p.shape for p in call.parts[-len(params) :]]
    ):
        parts = call.parts[-len(params) :]
        places = ", ".join(f"{{{j}}}" for j in range(len(parts)))
        block[i] = Call("plain", f"{name} = {{f}}({{f_}}{places})", [fun], parts, call.names)


def _expressions(nodes: Any, program: Program) -> list[tuple[Any, Expr]]:
    out = []
    for s in nodes:
        exprs = [getattr(s, k) for k in ("expr", "fallback") if hasattr(s, k)] + list(getattr(s, "parts", []))
        exprs += [r for f in getattr(s, "funs", []) for r in f.results]
        out += [(s, e) for e in exprs]
    return out + [(f, r) for f in (*program.helpers, program.main) for r in f.results]


def _flatten(program: Program, n: int) -> None:
    _, expr = _expressions(statements(program), program)[n]
    plain = number(expr.shape)
    expr.template, expr.parts, expr.cell, expr.name = plain.template, [], None, ""
