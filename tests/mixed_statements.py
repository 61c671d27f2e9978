"""Statements of random programs that mix kinds of states, with the rules for their places.

Values stay of order one and states decay, so that rounding is not amplified. Examples of a map write equal values to
shared states by construction: every variable and state has the set of maps that it varies over, and a state takes only
values that vary over the maps that it is mapped over.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

from mixed_syntax import (
    CLASSES,
    IN_REFS,
    RANDOM,
    SHAPES,
    SIZE,
    Call,
    Cell,
    Do,
    Expr,
    Fun,
    If,
    Let,
    Make,
    Raise,
    Shape,
    Statement,
    Try,
    Write,
    number,
    walk_called,
)

Maps = frozenset[int]
NOWHERE: Maps = frozenset()


@dataclasses.dataclass(frozen=True)
class View:
    """How a state looks at a place in a program: its shape there, and the maps over which it varies."""

    cell: Cell
    shape: Shape | None
    maps: Maps = NOWHERE


@dataclasses.dataclass(frozen=True)
class Scope:
    """The rules for statements at one place of a program.

    Attributes:
        names: variables: name, shape, the maps that it varies over.
        views: the states.
        maps: the enclosing maps.
        varying: the maps whose examples may take different branches here.
        once: whether the Python here runs once for one run of the enclosing code.
        typed: whether states keep their types: in loops and branches.
        flags: whether Python may branch on values that change between calls.
        raises: whether it may raise.
        reverse: number of enclosing reverse-mode derivatives.
        order: number of enclosing derivatives. With one of them, any rule is the derivative of its function: JAX drops
            the rule of a `custom_jvp` where it differentiates what it rematerializes, or a loop, once more.
        forward: whether a derivative in forward mode encloses it, which takes no `custom_vjp`.
        pure: whether it is in a loop that is differentiated twice, whose function writes no state and makes none.
        foreign: whether it is inside a transform of brainstate.
        sharded: whether it is inside a `shard_map`.
        inspected: whether the code here is only traced: it changes no containers of the models, since nothing undoes
            that.
        kept: places of states that enclosing statements still use: these are neither replaced nor deleted.
    """

    depth: int
    names: tuple[tuple[str, Shape, Maps], ...]
    views: tuple[View, ...]
    maps: Maps = NOWHERE
    varying: Maps = NOWHERE
    once: bool = True
    typed: bool = False
    flags: bool = True
    raises: bool = True
    reverse: int = 0
    order: int = 0
    forward: bool = False
    pure: bool = False
    foreign: bool = False
    sharded: bool = False
    inspected: bool = False
    kept: frozenset[str] = frozenset()
    model: str = "m"

    def can_write(self, view: View) -> bool:
        return self.varying <= view.maps and not self.pure

    def with_name(self, name: str, shape: Shape, maps: Maps) -> Scope:
        return dataclasses.replace(self, names=(*self.names, (name, shape, maps)))

    def inside(self, **changes: object) -> Scope:
        """The scope of a function's body."""
        return dataclasses.replace(self.keep(), depth=self.depth - 1, **changes)  # type: ignore[arg-type]

    def differentiated(self, **changes: object) -> Scope:
        """The scope of a differentiated function's body."""
        return self.inside(**{"order": self.order + 1, **changes})

    def keep(self) -> Scope:
        """The scope of statements after which others go on with the states of this one."""
        return dataclasses.replace(self, kept=frozenset(v.cell.place for v in self.views))


FOREIGN = frozenset("pure bs_jit bs_for_loop bs_cond".split())
"""Calls that do not raise: enclosing calls undo nothing."""


class Statements:
    """Draws states, expressions, statements and functions."""

    def __init__(self, seed: int):
        self.rng = random.Random(seed)
        # Of their own: other programs stay what they are.
        self.rng_learners = random.Random(f"{seed}, learners")
        self.rng_keys = random.Random(f"{seed}, keys")
        self.rng_rules = random.Random(f"{seed}, rules")
        self.seed = seed
        self.calls = self.rng.choice((3, 4, 5, 6))
        self.compiled = self.rng.choice((0, 0, 1, 1, 1, 2, 2, 3))
        self.num_names = 0
        self.helpers: list[Fun] = []

    # -- choices --

    def chance(self, p: float) -> bool:
        return self.rng.random() < p

    def pick(self, options: Sequence):
        return self.rng.choice(options)

    def fresh(self, letter: str) -> str:
        self.num_names += 1
        return f"{letter}{self.num_names}"

    # -- states --

    def cells(self) -> list[Cell]:
        sorts = ["vector", "scalar", self.pick(("matrix", "vector"))]
        pool = "matrix number weak int count flag half numpy tree list loose mode key rng".split()
        pool += "rng vector tree loose count".split()
        sorts += [self.pick(pool) for _ in range(self.rng.randint(2, 5))]
        cells = []
        for n, sort in enumerate(sorts):
            cells.append(self.cell(self.place(n), sort))
        return cells

    def place(self, n: int) -> str:
        return self.pick((f"m.s{n}", f"m.s{n}", f"m.bag['s{n}']", f"m.part.s{n}", f"m.row[{n}]", f"k.s{n}"))

    def cell(self, place: str, sort: str) -> Cell:
        kinds = ["statetx", "statetx", "brainstate", "nnx", "ref"]
        if sort == "rng":
            kind = self.pick(("statetx", "statetx", "brainstate", "nnx"))
            return Cell(place, kind, RANDOM[kind], sort)
        kind = self.pick(kinds if sort in IN_REFS else kinds[:4])
        return Cell(place, kind, self.pick(CLASSES[kind]), sort)

    # -- expressions --

    def maps_of(self, expr: Expr, scope: Scope) -> Maps:
        if expr.name:
            return next((maps for name, _, maps in scope.names if name == expr.name), scope.maps)
        own = next((v.maps for v in scope.views if v.cell is expr.cell), NOWHERE)
        return own.union(*(self.maps_of(p, scope) for p in expr.parts))

    def expr(self, scope: Scope, shape: Shape, allowed: Maps | None = None, depth: int = 2) -> Expr:
        """An expression of this shape that varies over no other maps than `allowed`."""
        allowed = scope.maps if allowed is None else allowed
        if depth == 0 or self.chance(0.25):
            return self.leaf(scope, shape, allowed)
        e = lambda s=shape: self.expr(scope, s, allowed, depth - 1)
        forms = [
            lambda: Expr(shape, f"{self.sine(scope)}({{0}})", [e()]),
            lambda: Expr(shape, "jnp.tanh({0})", [e()]),
            lambda: Expr(shape, "(0.5 * {0} - 0.3 * {1})", [e(), e()]),
            lambda: Expr(shape, "{0} * {1}", [e(()), Expr(shape, "jnp.cos({0})", [e()])]),
            lambda: Expr(shape, "checkpoint_name({0}, 'h')", [Expr(shape, "jnp.sin({0})", [e()])]),
            lambda: Expr(shape, "jax.nn.softplus({0})", [e()]),
            lambda: Expr(shape, f"{self.with_rule(scope)}({{0}})", [e()]),
            lambda: Expr(shape, "jax.nn.relu({0})", [e()]),
            lambda: Expr(shape, "jnp.where({0} > 0.0765, {1}, {2})", [e(()), e(), e()]),
            lambda: Expr(shape, "(({0} > 0.0765) * {1})", [e(), e()]),
            lambda: Expr(shape, "jax.lax.stop_gradient({0})", [Expr(shape, "jnp.sin({0})", [e()])]),
        ]
        if shape == ():
            forms += [
                lambda: Expr((), "jnp.mean({0})", [e((SIZE,))]),
                lambda: Expr((), "0.3 * jnp.dot({0}, {1})", [e((SIZE,)), e((SIZE,))]),
                lambda: Expr((), "{0}[1]", [e((SIZE,))]),
            ] * 2
        if shape == (SIZE,):
            forms.append(lambda: Expr(shape, "0.3 * jnp.dot({0}, {1})", [e((SIZE, SIZE)), e()]))
            forms.append(lambda: Expr(shape, "jnp.stack([{0}, {1}, {0}])", [e(()), e(())]))
        if len(shape) == 2:
            forms.append(lambda: Expr(shape, "jnp.outer({0}, {1})", [e((SIZE,)), e((SIZE,))]))
        return self.pick(forms)()

    def with_rule(self, scope: Scope) -> str:
        """A function with a derivative rule."""
        name = self.pick(("by_state", "by_ref"))
        # JAX itself has no rule to discharge a Ref in a `custom_jvp`: `jax.jit(by_ref)(x)` raises NotImplementedError.
        return "by_state" if scope.foreign else name

    def sine(self, scope: Scope) -> str:
        """A sine, perhaps with a derivative rule that is not its derivative."""
        names = ["jnp.sin"]
        if scope.order < 2 or scope.pure:
            names += ["sine_jvp", "sine_jvp", *([] if scope.forward else ["sine_vjp"])]
        return self.rng_rules.choice(names)

    def leaf(self, scope: Scope, shape: Shape, allowed: Maps) -> Expr:
        leaves = [Expr(shape, name, name=name) for name, s, maps in scope.names if s == shape and maps <= allowed]
        leaves = leaves[-3:]
        for view in scope.views:
            if view.maps <= allowed:
                leaves += self.readings(view, shape)
        if not leaves or self.chance(0.1):
            return number(shape, self.pick((0.3, -0.7, 0.9, 1.1)))
        return self.pick(leaves)

    def readings(self, view: View, shape: Shape) -> list[Expr]:
        cell, templates = view.cell, []
        if view.shape == shape:
            templates.append("jnp.asarray({cell})" if cell.sort == "numpy" else "{cell}")
        elif shape == ():
            templates += {
                "int": ["0.1 * {cell}"],
                "count": ["0.1 * {cell}"],
                "half": ["0.1 * jnp.asarray({cell}, jnp.float32)"],
                "loose": ["total({cell})"],
                "tree": ["0.1 * {cell}['n']", "{cell}['p'].left"],
                "flag": ["jnp.where({cell}, 0.3, -0.2)"],
                "key": ["jax.random.uniform({cell})"],
            }.get(cell.sort, [])
        elif shape == (SIZE,):
            templates += {"tree": ["{cell}['a']"], "list": ["{cell}[0]"]}.get(cell.sort, [])
        if cell.place.endswith(".h"):
            templates += [f"{cell.place.removesuffix('.h')}({t})" for t in templates]
        return [Expr(shape, t, cell=cell) for t in templates]

    # -- statements --

    def block(self, scope: Scope, most: int = 3) -> tuple[list[Statement], Scope]:
        body: list[Statement] = []
        for _ in range(self.rng.randint(1, most)):
            new, scope = self.statement(scope)
            body += new
            if new and isinstance(new[-1], Raise):
                break
        return body, scope

    def statement(self, scope: Scope) -> tuple[list[Statement], Scope]:
        if scope.pure:
            kind = self.pick(("let", "let", "call", "call", "call"))
        else:
            kind = self.pick(
                (
                    "let",
                    "write",
                    "write",
                    "write",
                    "draw",
                    "make",
                    "drop",
                    "delete",
                    "if",
                    "raise",
                    "try",
                    *("call",) * 7,
                )
            )
        if kind == "call" and scope.depth and self.calls > 0:
            return self.call(scope)
        if kind == "draw":
            return self.draw(scope)
        if kind == "make":
            return self.make(scope)
        if kind == "drop":
            return self.make_and_drop(scope)
        if kind == "delete" and scope.once and scope.flags and not scope.foreign:
            return self.delete(scope)
        if kind == "if":
            return self.branch(scope)
        if kind == "raise" and scope.raises and self.chance(0.6):
            error = self.pick(("Boom", "Boom", "KeyError", "Halt"))
            if scope.flags and self.chance(0.5):
                return [If(f"{scope.model}.fail", [Raise(error)], [])], scope
            return ([Raise(error)], scope) if self.chance(0.4) else ([], scope)
        if kind == "try" and scope.depth and self.calls > 0 and not scope.foreign:
            return self.attempt(scope)
        if kind in ("write", "call", "try"):
            return self.write(scope), scope
        name, shape = self.fresh("v"), self.shape()
        expr = self.expr(scope, shape)
        return [Let(name, shape, expr)], scope.with_name(name, shape, self.maps_of(expr, scope))

    def shape(self) -> Shape:
        return self.pick(((), (SIZE,), (SIZE,), (SIZE, SIZE)))

    def write(self, scope: Scope) -> list[Statement]:
        views = [v for v in scope.views if scope.can_write(v) and v.cell.sort != "rng"]
        if not views:
            return []
        view = self.pick(views)
        cell, e = view.cell, lambda shape=(): self.expr(scope, shape, view.maps)
        if view.shape is not None and cell.sort not in ("number", "weak"):
            if view.shape == () and cell.kind != "ref" and self.chance(0.15):
                return [Write(cell, number((), self.pick((0.3, -0.7))))]
            if self.chance(0.4):
                mix = "0.5 * {cell} + 0.5 * {0}" if cell.sort != "numpy" else "jnp.asarray(0.5 * {cell} + 0.5 * {0})"
                return [Write(cell, Expr(view.shape, mix, [e(view.shape)], cell))]
            return [Write(cell, e(view.shape))]
        return self.special_write(scope, cell, e)

    def special_write(self, scope: Scope, cell: Cell, e) -> list[Statement]:
        vector, own = (SIZE,), lambda template, *parts: Expr((), template, list(parts), cell)
        drifts = not scope.typed or self.chance(0.05)
        match cell.sort:
            case "number" | "weak":
                return [Write(cell, self.pick((own("0.5 * {cell} + 0.1"), number((), 0.7), e())))]
            case "int" | "count" | "half":
                return [Write(cell, own(f"{{cell}} + {self.pick((1, 2))}"))]
            case "flag":
                return [Write(cell, self.pick((own("{0} > 0.0765", e()), own("jnp.logical_not({cell})"))))]
            case "key":
                return [Write(cell, own("jax.random.split({cell})[0]"))]
            case "mode" if drifts:
                return [Write(cell, Expr((), self.pick(("'hot'", "'cold'"))))]
            case "tree":
                return self.pick(
                    (  # nnx returns copies of containers, and brainstate's transforms lose in-place changes
                        [Do("{cell}['a'] = {0}", cell, [e(vector)])],
                        [
                            Do("{cell}['n'] += 1", cell),
                            Do("{cell}['p'] = Pair({0}, 0.5 * {cell}['p'].right)", cell, [e()]),
                        ],
                        [Write(cell, own("{{**{cell}, 'a': 0.5 * {cell}['a'] + 0.5 * {0}}}", e(vector)))],
                    )[2 * (cell.kind == "nnx" or scope.foreign) :]
                )
            case "list" if cell.kind == "nnx":
                return [Write(cell, own("[{0}, *{cell}[1:]]", e(vector)))]
            case "list":
                if drifts and self.chance(0.5):
                    grow = Do("{cell}.append({0})", cell, [e()]), "len({cell}) < 4"
                    shrink = Do("{cell}.pop()", cell), "len({cell}) > 2"
                    line, test = self.pick((grow, shrink))
                    return [If(test, [line], [], cell)]
                return [Do("{cell}[0] = {0}", cell, [e(vector)])]
            case "loose" if drifts:
                forms = (
                    "{0}",
                    "({0}, 1)",
                    "{{'x': {0}}}",
                    "None",
                    "0.5",
                    "3",
                    "'text'",
                    "[{0}, None]",
                    "np.ones(2, np.float32)",
                    "True",
                )
                return [Write(cell, own(self.pick(forms), e(self.shape())))]
        return []

    def draw(self, scope: Scope) -> tuple[list[Statement], Scope]:
        views = [v for v in scope.views if v.cell.sort == "rng" and scope.can_write(v)]
        if scope.varying:  # all examples share the count of an nnx.Rngs
            views = [v for v in views if v.cell.kind != "nnx"]
        if not views:
            return [], scope
        view, name, shape = self.pick(views), self.fresh("v"), self.pick(((), (SIZE,)))
        line = f"{name} = jnp.tanh(jax.random.normal(draw({{place}}), {shape}))"
        key = self.rng_keys.choice((None, None, "jax.random.key(7)", "draw({place})"))
        rekey = [] if key is None else [Do(f"rekey({{place}}, {key})", view.cell)]
        return [*rekey, Do(line, view.cell, name=name, shape=shape)], scope.with_name(name, shape, view.maps)

    def made(self, scope: Scope, place: str) -> tuple[Make, View]:
        kind = self.pick(("statetx", "statetx", "brainstate", "nnx"))
        sort = self.pick(("scalar", "vector"))
        cell = Cell(place, kind, self.pick(CLASSES[kind]), sort)
        make = Make(place, kind, cell.cls, self.expr(scope, SHAPES[sort]))
        return make, View(cell, SHAPES[sort], scope.maps)

    def make(self, scope: Scope) -> tuple[list[Statement], Scope]:
        """A state that stays: on an attribute, in a dict or in a list."""
        if scope.foreign or (scope.typed and not self.chance(0.08)):
            return [], scope
        n, model = self.pick((0, 1)), scope.model
        if scope.once and scope.flags and self.chance(0.3):
            return [Make(f"{model}.items", "statetx", "statetx.State", self.expr(scope, ()), True)], scope
        place = self.pick((f"{model}.new{n}", f"{model}.bag['new{n}']"))
        if scope.inspected:  # no learner: equations that nobody runs may keep it alive
            place = f"{model}.new{n}"
        elif self.rng_learners.random() < 0.3:
            place = f"{model}.learner{n}.h"
        make, view = self.made(scope, place)
        if make.place in scope.kept:
            return [], scope
        views = tuple(v for v in scope.views if v.cell.place != make.place)
        return [make], dataclasses.replace(scope, views=(*views, view))

    def make_and_drop(self, scope: Scope) -> tuple[list[Statement], Scope]:
        """A state that ends with the function, used in between."""
        if scope.foreign:
            return [], scope
        make, view = self.made(scope, self.fresh("t"))
        return [make], dataclasses.replace(scope, views=(*scope.views, view))

    def delete(self, scope: Scope) -> tuple[list[Statement], Scope]:
        n, model = self.pick((0, 1)), scope.model
        name = self.fresh("v")
        place, there = self.pick(
            ((f"{model}.new{n}", f"hasattr({model}, 'new{n}')"), (f"{model}.bag['new{n}']", f"'new{n}' in {model}.bag"))
        )
        if self.chance(0.5):
            line = Do(f"{name} = total(peek({place})) if {there} else jnp.asarray(0.2)", name=name)
            return [line], scope.with_name(name, (), scope.maps)
        views = tuple(v for v in scope.views if v.cell.place != place)
        if self.chance(0.3):
            return [If(f"{model}.items", [Do(f"{model}.items.pop()")], [])], scope
        if place in scope.kept:
            return [], scope
        return [If(there, [Do(f"del {place}")], [])], dataclasses.replace(scope, views=views)

    def branch(self, scope: Scope) -> tuple[list[Statement], Scope]:
        modes = [v.cell for v in scope.views if v.cell.sort == "mode"]
        if modes and self.chance(0.6):
            cell = self.pick(modes)
            return [If("{cell} == 'hot'", self.write(scope), self.write(scope), cell)], scope
        if scope.flags:
            return [If(f"{scope.model}.training", self.write(scope), self.write(scope))], scope
        return [], scope

    def attempt(self, scope: Scope) -> tuple[list[Statement], Scope]:
        name, shape = self.fresh("v"), self.shape()
        fallback = self.expr(scope, shape)
        inner = dataclasses.replace(scope.keep(), raises=True)
        body, within = self.block(inner, 2)
        if not any(isinstance(s, Call) and s.kind != "inspect" for s in body):
            call, within = self.call(within)
            body += call
        if self.chance(0.6):
            self.let_fail(body)
        handler = self.write(scope) if self.chance(0.5) else []
        error = self.pick(("Boom", "Boom", "(Boom, KeyError)", "Exception", "BaseException"))
        expr = self.expr(within, shape)
        return [Try(name, shape, fallback, body, expr, error, handler)], scope.with_name(name, shape, scope.maps)

    def let_fail(self, body: list[Statement]) -> None:
        """Let a function in these statements raise at its end, after its writes."""
        funs = [f for s in walk_called(body) if isinstance(s, Call) and s.kind not in FOREIGN for f in s.funs]
        inside = {
            id(f) for s in walk_called(body) if isinstance(s, Call) and s.kind in FOREIGN for f in inner_functions(s)
        }
        funs = [f for f in funs if id(f) not in inside]
        if funs:
            self.pick(funs).body.append(Raise(self.pick(("Boom", "Boom", "KeyError"))))

    # -- functions --

    def fun(self, scope: Scope, params: Sequence[tuple[Shape, Maps]], results: Sequence[Shape], runs: int = 1) -> Fun:
        """A function of these parameters; `scope` is its body's scope without them."""
        names = [(self.fresh("x"), shape, maps) for shape, maps in params]
        for name, shape, maps in names:
            scope = scope.with_name(name, shape, maps)
        body, end = self.block(scope)
        first, *exprs = [self.expr(end, shape) for shape in results]
        exprs = [with_results(first, body, end), *exprs]
        name = self.fresh("f")
        style = self.pick(("closure", "closure", "argument", "method")) if scope.model == "m" else "closure"
        return Fun(name, [(n, s) for n, s, _ in names], body, exprs, runs, style)

    def call(self, scope: Scope) -> tuple[list[Statement], Scope]:
        """A transform of a new function, applied to an expression."""
        raise NotImplementedError


def with_results(expr: Expr, body: Sequence[Statement], scope: Scope) -> Expr:
    """Add to a return value what the calls of the body have returned: a fault in what nothing reads would not show."""
    called = {name for s in body if isinstance(s, Call) for name, _ in s.names}
    for name, shape, _ in scope.names:
        if name in called:
            expr = Expr(expr.shape, "({0} + 0.1 * total({1}))", [expr, Expr(shape, name, name=name)])
    return expr


def inner_functions(call: Call) -> list[Fun]:
    return [f for s in walk_called([call]) if isinstance(s, Call) for f in s.funs]
