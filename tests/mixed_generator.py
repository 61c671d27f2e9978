"""Random programs that mix kinds of states, drawn from a seed: transforms and the functions inside them.

`mixed_statements` has the rules for the statements.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections.abc import Callable, Iterator
from typing import Any

import mixed_syntax
from mixed_statements import NOWHERE, Maps, Scope, Statements, View
from mixed_syntax import SIZE, Call, Cell, Expr, Fun, Make, Program, Raise, Shape, Statement, Turn, walk, walk_called

POLICIES = (
    "None",
    "policies.nothing",
    "policies.everything",
    "policies.dots",
    "'dots'",
    "policies.dots_without_batch_dims",
    "policies.names('h', missing='ignore')",
    "policies.except_names('h', missing='ignore')",
    "policies.states(True, missing='ignore')",
    "policies.path('m.*', missing='ignore')",
    "policies.larger_than(8)",
    "policies.dots | policies.names('h', missing='ignore')",
    "policies.primitives('tanh', missing='ignore')",
    "policies.masks",
    "policies.everything.stored_as('bits')",
    "jax.checkpoint_policies.everything_saveable",
    "jax.checkpoint_policies.dots_saveable",
)
FENCES = (
    "prevent_cse=True",
    "prevent_cse=False",
    "fence=None",
    "fence='barrier'",
    "fence='cond'",
    "prevent_cse=True, fence='cond'",
)
SCHEDULES = (
    "None",
    "None",
    "policies.Slots(2)",
    "policies.Slots(2, policy=policies.everything.stored_as('bits'))",
    "1",
    "policies.Levels(1)",
    "policies.Levels(2)",
    "policies.Lengths(3, 1)",
    "policies.Levels(2, policy='dots', keep='loop')",
)
BITS = (
    "policies.everything.stored_as('bits')",
    "policies.masks",
    "policies.dots | policies.masks",
    "policies.everything.stored_as('bits') | policies.masks",
)
MEASURED = ("policies.Budget('1MiB')", "'auto'", "policies.Budget('2MiB')")
SLOTS = ("policies.Slots(2)", "1")
TWICE = {
    "grad of grad": "grad(lambda x: total(grad(lambda x: total({loop}))(x)))({{0}})",
    "jvp of grad": "jvp(grad(lambda x: total({loop})), ({{0}},), (jnp.cos({{0}}),))[1]",
    "grad of jvp": "grad(lambda x: total(jvp(lambda x: {loop}, (x,), (jnp.cos(x),))[1]))({{0}})",
    "jvp of jvp": "jvp(lambda x: jvp(lambda x: {loop}, (x,), (jnp.cos(x),))[1], ({{0}},), (jnp.tanh({{0}}),))[1]",
    "hessian": "total(hessian(lambda x: total({loop}))({{0}})) * {{0}}",
}
"""Second derivatives of a loop at ``{0}``."""
SHIFTS = (
    "jnp.concatenate([{0}[None], {cell}[:-1]])",
    "jnp.roll({cell}, 1).at[0].set({0})",
    "jnp.hstack([{0}, {cell}[:-1]])",
)
"""A delay line after the step in which ``{0}`` enters it."""
CHECKPOINTS = (
    "policies.Slots(2)",
    "1",
    "policies.Slots(2, policy=policies.dots)",
    "policies.Levels(1)",
    "policies.Levels(2)",
    "policies.Lengths(2, 2)",
    "policies.Levels(2, policy=policies.primitives('sin', missing='ignore'))",
    "statetx.Truncated(9, checkpoint=policies.Levels(2))",
    "statetx.Truncated(2)",
    "'auto'",
)
_FIRST_NAME_ASIDE = 1000
PURE = "plain plain jit vmap scan fori map cond switch".split()
INSPECTIONS = "states values saved_residuals trace_states call eval_shape make_jaxpr lower".split()
"""The first four accept functions that leave states behind."""
LOOKED_AT = frozenset("remat jit grad vjp jvp linearize jacobian hessian plain shard_map bs_jit".split())
COMPILED = frozenset("jit scan fori while map parts cond switch shard_map pure bs_jit bs_for_loop bs_cond".split())
ONE_RUN = frozenset("remat jit grad vjp jvp linearize jacobian hessian plain".split())


class Generator(Statements):
    """Draws one program."""

    storing = 2
    """How many more derivatives may read what is stored in fewer bits or in slots."""

    inspecting = 4
    """How many more calls may be inspected."""

    parts = 0
    """How many functions of parts enclose what is drawn: a derivative by a state that is also written is a training
    step, which they refuse.
    """

    updates = 1
    """How many more steps may update stacked weights."""

    twice = 1
    """How many more loops may be differentiated twice."""

    delays = 1
    """How many more loops may have a delay line."""

    def __init__(self, seed: int):
        super().__init__(seed)
        self.rng_aside, self.rng_twice = random.Random(f"{seed}, aside"), random.Random(f"{seed}, twice")
        self.rng_updates, self.rng_delays = random.Random(f"{seed}, updates"), random.Random(f"{seed}, delays")
        self.num_names_aside = _FIRST_NAME_ASIDE

    def call(self, scope: Scope) -> tuple[list[Statement], Scope]:
        """A transform of a new function, applied to an expression."""
        self.calls -= 1
        if scope.pure:
            kind = self.pick(PURE)
            return self.called(scope, getattr(self, f"call_{kind}"))
        kinds = ["remat", "remat", "grad", "vjp", "jvp", "vmap", "vmap", "plain", "helper"]
        kinds += self.pick(((), ("linearize", "jacobian"), ("jacobian", "hessian")))
        if self.compiled > 0 and self.chance(0.55):
            kinds = ["jit", "jit", "scan", "scan", "scan", "fori", "while", "map", "parts", "cond", "cond", "switch"]
            kinds += self.pick((("shard_map",), ("pure",), ("bs_jit", "bs_for_loop", "bs_cond")))
        if scope.varying and self.chance(0.7):
            kinds = [k for k in kinds if k not in ("helper",)]
        kind = self.pick(kinds)
        if kind in COMPILED:
            self.compiled -= 1
        calls = getattr(self, f"call_{kind}", self.call_plain)
        return self.called(scope, calls)

    def called(self, scope: Scope, calls: Callable[[Scope], Call]) -> tuple[list[Statement], Scope]:
        before = len(scope.names)
        call = calls(scope)
        call.depth = scope.depth
        if self.parts:  # a part that differentiates a state's own value, and writes the state, is refused
            call.parts = [Expr(p.shape, "(0.9 * {0})", [p]) if p.template == "{cell}" else p for p in call.parts]
        if not (scope.inspected or scope.pure):
            self.look_before(call)
        assert len(scope.names) == before
        for name, shape in call.names:
            scope = scope.with_name(name, shape, scope.maps)
        return [call], scope

    def closure(self, *args: Any) -> Fun:
        """A function of arrays alone, see `fun`."""
        fun = self.fun(*args)
        fun.style = "closure"
        return fun

    def simple(
        self,
        scope: Scope,
        kind: str,
        template: str,
        inner: Scope,
        result: Shape | None = None,
        takes_model: bool = True,
    ) -> Call:
        """A transform of a function of one argument, whose call is one."""
        shape = self.shape()
        out = shape if result is None else result
        name = self.fresh("v")
        fun = (self.fun if takes_model else self.closure)(inner, [(shape, scope.maps)], [out])
        return Call(kind, f"{name} = {template}", [fun], [self.expr(scope, shape, depth=1)], [(name, out)])

    def call_plain(self, scope: Scope) -> Call:
        return self.simple(scope, "plain", "{f}({f_}{0})", scope.inside())

    def call_helper(self, scope: Scope) -> Call:
        if scope.varying or scope.foreign or not self.helpers:
            return self.call_plain(scope)
        helper, model, name = self.pick(self.helpers), self.pick(("m", "k")), self.fresh("v")
        wrap = self.pick(("{h}", "remat({h})", "remat({h}, policy='dots')"))
        template = f"{name} = {wrap.format(h=helper.name)}({model}, {{0}})"
        return Call("plain", template, [], [self.expr(scope, (SIZE,), depth=1)], [(name, (SIZE,))])

    def call_remat(self, scope: Scope) -> Call:
        options = [f"policy={self.pick(POLICIES)}"] if self.chance(0.7) else []
        options += [self.pick(FENCES)] if self.chance(0.4) else []
        return self.simple(scope, "remat", f"remat({', '.join(['{f}', *options])})({{f_}}{{0}})", scope.inside())

    def call_jit(self, scope: Scope) -> Call:
        times = self.pick((1, 1, 2, 3))
        inner = scope.inside(flags=False, once=False) if times > 1 else scope.inside()
        call = self.simple(scope, "jit", "", inner)
        ((name, shape),) = call.names
        compiled = self.fresh("g")
        call.template = f"{compiled} = jit({{f}})"
        takes = call.parts[0].shape
        call.after = [f"{name} = {compiled}({{f_}}{{0}})"]
        if times > 1:
            call.after.append(f"{name} = {name} - {compiled}({{f_}}jnp.full({takes}, 0.4))")
        if times > 2:
            call.after.append(f"{name} = {name} + {compiled}({{f_}}{{0}})")
        call.funs[0].runs = times
        return call

    def targets(self, scope: Scope) -> list[Cell]:
        views = [v for v in scope.views if v.shape is not None and v.cell.kind != "ref" and v.cell.sort != "numpy"]
        cells = [v.cell for v in self.rng.sample(views, min(len(views), self.rng.randint(0, 2)))]
        return [] if self.parts else cells

    def call_grad(self, scope: Scope) -> Call:
        inner = scope.differentiated(reverse=scope.reverse + 1)
        shape, cells, name = self.shape(), self.targets(scope), self.fresh("v")
        has_aux, with_value = self.chance(0.3), self.chance(0.5)
        results = [(), (SIZE,)] if has_aux else [()]
        fun = self.fun(inner, [(shape, scope.maps)], results)
        wrt, of_arg = "", not cells or self.chance(0.5)
        if cells:
            listed = [f"{{c{i}}}" for i in range(len(cells))]
            form = self.pick(("[{}]", "{{{{{}}}}}"))
            entries = listed if form == "[{}]" else [f"'t{i}': {c}" for i, c in enumerate(listed)]
            wrt = ", wrt=" + (listed[0] if len(cells) == 1 and self.chance(0.5) else form.format(", ".join(entries)))
            wrt += ", argnums=0" if of_arg else ""
        aux = ", has_aux=True" if has_aux else ""
        which = "value_and_grad" if with_value else "grad"
        out = self.fresh("o")
        template = f"{out} = {which}({{f}}{wrt}{aux})({{f_}}{{0}})"
        if fun.style == "argument" and of_arg:
            template = (
                template.replace("argnums=0", "argnums=1")
                if cells
                else template.replace(f"{{f}}{aux}", f"{{f}}, argnums=1{aux}")
            )
        return Call(
            "grad", template, [fun], [self.expr(scope, shape, depth=1)], [(name, ())], cells, [f"{name} = total({out})"]
        )

    def call_vjp(self, scope: Scope) -> Call:
        call = self.simple(scope, "vjp", "", scope.differentiated(reverse=scope.reverse + 1), takes_model=False)
        ((name, _),), pull = call.names, self.fresh("p")
        call.cells = self.targets(scope)
        wrt = f", wrt=[{', '.join(f'{{c{i}}}' for i in range(len(call.cells)))}]" if call.cells else ""
        call.template = f"{name}, {pull} = vjp({{f}}, {{0}}{wrt})"
        of = self.fresh("v")
        call.after = [f"{of} = total({pull}(jnp.cos({name})))"]
        call.names.append((of, ()))
        return call

    def call_jvp(self, scope: Scope) -> Call:
        call = self.simple(scope, "jvp", "", scope.differentiated(forward=True), takes_model=False)
        ((name, shape),), tangent = call.names, self.fresh("v")
        call.template = f"{name}, {tangent} = jvp({{f}}, ({{0}},), (jnp.cos({{0}}),))"
        call.names.append((tangent, shape))
        return call

    def call_linearize(self, scope: Scope) -> Call:
        inner = scope.differentiated(reverse=scope.reverse + 1, forward=True)
        call = self.simple(scope, "linearize", "", inner, takes_model=False)
        ((name, shape),), push, tangent = call.names, self.fresh("p"), self.fresh("v")
        call.template = f"{name}, {push} = linearize({{f}}, {{0}})"
        call.after = [f"{tangent} = {push}(jnp.cos({{0}}))"]
        call.names.append((tangent, shape))
        return call

    def call_jacobian(self, scope: Scope) -> Call:
        which = self.pick(("jacfwd", "jacrev"))
        inner = scope.differentiated(
            reverse=scope.reverse + (which == "jacrev"), forward=scope.forward or which == "jacfwd"
        )
        call = self.simple(scope, "jacobian", "", inner, takes_model=False)
        (name, _) = call.names.pop()
        call.cells = self.targets(scope)[:1]
        wrt = ", wrt={c0}, argnums=0" if call.cells else ""
        call.template = f"{name} = total({which}({{f}}{wrt})({{0}}))"
        call.names = [(name, ())]
        return call

    def call_hessian(self, scope: Scope) -> Call:
        inner = scope.differentiated(reverse=scope.reverse + 1, order=scope.order + 2, forward=True)
        call = self.simple(scope, "hessian", "", inner, (), False)
        call.template = f"{call.names[0][0]} = total(hessian({{f}})({{0}}))"
        return call

    # -- what is stored for a derivative --

    def block(self, scope: Scope, most: int = 3) -> tuple[list[Statement], Scope]:
        """Statements, and sometimes a derivative that reads bits or what slots hold, on top of them; around them,
        inspections.
        """
        first = self.inspection(scope)
        body, scope = super().block(scope, most)
        if self.storing and scope.depth and not isinstance(body[-1] if body else None, Raise) and self.chance(0.25):
            self.storing -= 1
            more, scope = self.called(scope, self.pick((self.call_stored, self.call_slots, self.call_slots)))
            body += more
        if not isinstance(body[-1] if body else None, Raise):
            for draw in (self.twice_differentiated, self.updated, self.delayed):
                more, scope = draw(scope)
                body += more
        last = [] if isinstance(body[-1] if body else None, Raise) else self.inspection(scope)
        return [*first, *body, *last], scope

    def inspection(self, scope: Scope) -> list[Statement]:
        """Sometimes a function that is inspected, and not called: the program does the same without it."""
        with self.aside(self.rng_aside):
            if not (
                self.inspecting
                and scope.depth
                and not (scope.inspected or scope.pure)
                and self.chance(0.35 if scope.typed else 0.15)
            ):
                return []
            self.inspecting -= 1
            shape = self.shape()
            inner = scope.differentiated(reverse=scope.reverse + 1, once=False, inspected=True)
            fun = self.fun(inner, [(shape, scope.maps)], [self.shape()])
            line, parts = self.looking(fun), [self.expr(scope, shape, depth=1)]
            return [Call("inspect", line, [fun], parts, [], depth=scope.depth)]

    def twice_differentiated(self, scope: Scope) -> tuple[list[Statement], Scope]:
        """Sometimes a second derivative of a loop, where no derivative encloses it."""
        with self.aside(self.rng_twice):
            is_outermost = scope.depth and not (scope.order or scope.inspected or scope.foreign or scope.varying)
            if not (self.twice and is_outermost and self.chance(0.4)):
                return [], scope
            self.twice -= 1
            return self.called(scope, self.call_twice)

    def updated(self, scope: Scope) -> tuple[list[Statement], Scope]:
        """Sometimes a step whose gradients of stacked weights are used up in a loop: in an update, or in a sum."""
        with self.aside(self.rng_updates):
            is_mapped = scope.maps or scope.varying  # examples would write different values to shared states
            is_possible = scope.depth and not (
                is_mapped or scope.order > 1 or scope.inspected or scope.foreign or scope.pure
            )
            if not (self.updates and is_possible and self.chance(0.2)):
                return [], scope
            self.updates -= 1
            return self.called(scope, self.call_update)

    def call_update(self, scope: Scope) -> Call:
        name, row = self.fresh("v"), (SIZE,)
        inner = scope.differentiated(once=False, typed=True, reverse=scope.reverse + 1, raises=False)
        self.parts += 1
        fun = self.closure(inner, [(row, scope.maps), (row, scope.maps)], [row], 100)
        self.parts -= 1
        how = self.pick(("update_rows", "update_rows", "sum_rows"))
        parts = [self.expr(scope, (SIZE, SIZE), depth=1), self.expr(scope, (SIZE, SIZE), depth=1)]
        return Call("update", f"{name} = {how}({{f}}, {{0}}, {{1}})", [fun], parts, [(name, (SIZE, SIZE))])

    def delayed(self, scope: Scope) -> tuple[list[Statement], Scope]:
        """Sometimes a loop with a delay line in a state: what enters is read some steps later."""
        with self.aside(self.rng_delays):
            is_vector = lambda v: v.cell.sort == "vector" and v.shape == (SIZE,) and scope.maps <= v.maps
            lines = [v.cell for v in scope.views if is_vector(v) and scope.can_write(v)]
            if not (self.delays and lines and scope.depth and not scope.inspected and self.chance(0.12)):
                return [], scope
            self.delays -= 1
            return self.called(scope, lambda scope: self.call_delay(scope, self.pick(lines)))

    def call_delay(self, scope: Scope, line: Cell) -> Call:
        scan = dataclasses.replace(scope, views=tuple(v for v in scope.views if v.cell != line))
        call = self.call_scan(scan)
        (fun,) = call.funs
        read = Expr((), "{cell}[-1]", cell=line)
        enters = Expr((), "jnp.sin(0.7 * jnp.sum({0}) + {1})", [Expr(fun.params[1][1], fun.params[1][0]), read])
        late = fun.results[0]
        fun.results[0] = Expr(late.shape, "({0} + 0.3 * {1})", [late, read])
        fun.body.append(mixed_syntax.Write(line, Expr((SIZE,), self.pick(SHIFTS), [enters], line)))
        return call

    def call_twice(self, scope: Scope) -> Call:
        """A second derivative of a loop, which is that of JAX's `scan`."""
        shape, name, length = self.pick(((), (SIZE,))), self.fresh("v"), self.pick((4, 5))
        mode, checkpoint = self.pick(tuple(TWICE)), self.pick(CHECKPOINTS)
        is_forward = mode in ("jvp of jvp", "grad of jvp")
        inner = scope.inside(once=False, typed=True, order=2, forward=is_forward, pure=True, raises=False, flags=False)
        fun = self.closure(inner, [((), NOWHERE), (shape, scope.maps)], [shape], 100)
        if mode == "jvp of grad" and self.chance(0.3):
            checkpoint = "while"
        loop = f"loop_of({{f}}, x, {length}, {checkpoint!r})"
        template = f"{name} = {TWICE[mode].format(loop=loop)}"
        return Call("twice", template, [fun], [self.expr(scope, shape, depth=1)], [(name, shape)])

    def looking(self, fun: Fun) -> str:
        """A line that inspects a function."""
        fun.runs += 20
        makes = any(isinstance(s, Make) and s.is_left for s in walk(fun.body))
        return f"look_at({self.pick(INSPECTIONS[: 4 if makes else None])!r}, {{f}}, {{f_}}{{0}})"

    def look_before(self, call: Call) -> None:
        """Sometimes inspect the function of a call right before it."""
        with self.aside(self.rng_aside):
            if self.inspecting and call.kind in LOOKED_AT and call.funs and self.chance(0.35):
                if not any(map(lasts, walk(call.funs[0].body))):
                    self.inspecting -= 1
                    call.before.append(self.looking(call.funs[0]))

    @contextlib.contextmanager
    def aside(self, rng: random.Random) -> Iterator[None]:
        """Draw with random numbers of its own, so that the rest of a program is the same with and without what is drawn
        here.
        """
        kept = self.rng, self.calls, self.compiled, self.storing
        num_names, is_nested = self.num_names, self.num_names >= _FIRST_NAME_ASIDE
        self.rng, self.calls, self.compiled, self.storing = rng, 2, 1, 0
        self.num_names = num_names if is_nested else self.num_names_aside
        try:
            yield
        finally:
            self.num_names_aside = self.num_names
            self.num_names = self.num_names if is_nested else num_names
            self.rng, self.calls, self.compiled, self.storing = kept

    def mask(self, scope: Scope) -> str:
        """A function whose values are proved 0 or 1."""
        return self.pick(("above", "spike")) if scope.order == 0 else "above"

    def call_stored(self, scope: Scope) -> Call:
        """The derivative of a rematerialized function that stores bits."""
        shape, name, mask = self.shape(), self.fresh("v"), self.mask(scope)
        fun = self.closure(scope.differentiated(reverse=scope.reverse + 1), [(shape, scope.maps)], [shape])
        policy = self.pick(BITS)
        run = self.pick(
            (
                f"remat(lambda x: {mask}(x) * {{f}}(x), policy={policy})(x)",
                f"remat(lambda x: {{f}}({mask}(x) * jnp.sin(x)), policy={policy})(x)",
                f"remat(lambda z, x: {{f}}(z * x), inputs_stored_as=('bits', None))({mask}(x), x)",
            )
        )
        template = f"{name} = grad(lambda x: total({run}))({{0}})"
        return Call("stored", template, [fun], [self.expr(scope, shape, depth=1)], [(name, shape)])

    def call_slots(self, scope: Scope) -> Call:
        """The derivative of a loop whose slots have room for what steps keep, with spikes in the carry or without."""
        shape, name = self.shape(), self.fresh("v")
        inner = scope.differentiated(once=False, typed=True, reverse=scope.reverse + 1)
        fun = self.closure(inner, [((), NOWHERE), (shape, scope.maps)], [shape], 2)
        length = SIZE if scope.typed else self.pick((4, 6, 8))
        policy = f", policy={self.pick(BITS)}" if self.chance(0.5) else ""
        step, init = "jnp.sin(c + {f}(0.1 * i, c))", "x"  # the sine has a residual
        if self.chance(0.5):
            step = f"(lambda h: (h, {self.mask(scope)}(h)))(jnp.sin(c[0] - 0.3 * c[1] + {{f}}(0.1 * i, c[0])))"
            init = "(x, jnp.zeros_like(x))"
        loop = f"fori_loop(0, {length}, lambda i, c: {step}, {init}, checkpoint=policies.Slots({length - 1}{policy}))"
        template = f"{name} = grad(lambda x: total({loop}))({{0}})"
        return Call("slots", template, [fun], [self.expr(scope, shape, depth=1)], [(name, shape)])

    # -- loops and maps --

    def sliced(
        self, scope: Scope, rules: dict[str, str], vmap: int | None, likely: float
    ) -> tuple[tuple[View, ...], list[Cell]]:
        """Views in a loop or map that gives some states an axis; fills `rules` by the number of the state."""
        views, cells = [], []
        for view in scope.views:
            cell, shape = view.cell, view.shape
            maps = view.maps if vmap is None else view.maps | {vmap}
            if shape and cell.kind != "ref" and cell.sort != "numpy" and self.chance(likely):
                axis = self.pick(range(len(shape)))
                rules[f"c{len(cells)}"] = str(axis)
                cells.append(cell)
                view = View(cell, shape[:axis] + shape[axis + 1 :], maps)
            elif cell.sort == "rng":
                if cell.kind != "nnx" and self.chance(0.3):
                    rules[f"c{len(cells)}"] = "Split" if vmap is None else "Broadcast"
                    cells.append(cell)
                elif vmap is not None:
                    view = View(cell, shape, maps)
            elif cell.sort == "key" and cell.kind == "ref" and vmap is not None:
                view = View(cell, shape, maps)  # a Ref that holds a key is random, a State is not
            views.append(view)
        return tuple(views), cells

    def rules(self, rules: dict[str, str]) -> str:
        entries = ", ".join(f"only({{{key}}}): {rule}" for key, rule in rules.items())
        return f", states={{{{{entries}}}}}" if rules else ""

    def schedule(self, scope: Scope) -> str:
        options = MEASURED if self.chance(0.04) else SCHEDULES
        chosen = self.pick(options)
        return "" if chosen == "None" else f", checkpoint={chosen}"

    def call_scan(self, scope: Scope) -> Call:
        carry, x, y = self.shape(), self.pick(((), (SIZE,))), self.pick(((), (SIZE,)))
        rules: dict[str, str] = {}
        views, cells = self.sliced(scope, rules, None, 0.25)
        inner = scope.inside(views=views, once=False, typed=True)
        fun = self.closure(inner, [(carry, scope.maps), (x, scope.maps)], [carry, y], 2)
        schedule = self.schedule(scope)
        options = ", reverse=True" if self.chance(0.3) else ""
        options += ", unroll=2" if not schedule and self.chance(0.15) else ""
        names = [(self.fresh("v"), carry), (self.fresh("v"), (SIZE, *y))]
        template = f"{names[0][0]}, {names[1][0]} = scan({{f}}, {{0}}, {{1}}{options}{self.rules(rules)}{schedule})"
        parts = [self.expr(scope, carry, depth=1), self.expr(scope, (SIZE, *x), depth=1)]
        return Call("scan", template, [fun], parts, names, cells)

    def call_fori(self, scope: Scope) -> Call:
        shape, name = self.shape(), self.fresh("v")
        fun = self.closure(scope.inside(once=False, typed=True), [((), NOWHERE), (shape, scope.maps)], [shape], 2)
        template = f"{name} = fori_loop(0, 3, lambda i, c: {{f}}(0.1 * i, c), {{0}}{self.schedule(scope)})"
        return Call("fori", template, [fun], [self.expr(scope, shape, depth=1)], [(name, shape)])

    def call_while(self, scope: Scope) -> Call:
        if scope.reverse > 1:
            return self.call_plain(scope)
        shape, name = self.shape(), self.fresh("v")
        inner = scope.inside(once=False, typed=True, reverse=scope.reverse + 1)
        fun = self.closure(inner, [(shape, scope.maps)], [shape], 2)
        checkpoint = f", checkpoint={self.pick(SLOTS)}" if scope.reverse or self.chance(0.3) else ""
        template = (
            f"{name}, _ = while_loop(lambda c: c[1] < 3, lambda c: ({{f}}(c[0]), c[1] + 1), ({{0}}, 0){checkpoint})"
        )
        return Call("while", template, [fun], [self.expr(scope, shape, depth=1)], [(name, shape)])

    def call_parts(self, scope: Scope) -> Call:
        """A sum over the parts of a batch, with one in half precision beside it."""
        shape, name, out = self.pick(((), (SIZE,))), self.fresh("v"), self.pick(((), (), (SIZE,)))
        self.parts += 1
        fun = self.closure(scope.inside(once=False, typed=True), [(shape, scope.maps)], [out], 2)
        self.parts -= 1
        template = f"{name} = {self.pick(('in_parts', 'in_chunks'))}({{f}}, {{0}})"
        return Call("parts", template, [fun], [self.expr(scope, (SIZE, *shape), depth=1)], [(name, out)])

    def call_map(self, scope: Scope) -> Call:
        shape, name, out = self.pick(((), (SIZE,))), self.fresh("v"), self.pick(((), (SIZE,)))
        fun = self.closure(scope.inside(once=False, typed=True), [(shape, scope.maps)], [out], 2)
        parts = [self.expr(scope, (SIZE, *shape), depth=1)]
        return Call("map", f"{name} = map({{f}}, {{0}})", [fun], parts, [(name, (SIZE, *out))])

    def call_vmap(self, scope: Scope) -> Call:
        self.num_names += 1
        vmap = self.num_names
        shape, out = self.pick(((), (), (SIZE,))), self.pick(((), (SIZE,)))
        rules: dict[str, str] = {}
        views, cells = self.sliced(scope, rules, vmap, 0.5)
        maps = scope.maps | {vmap}
        inner = scope.inside(views=views, once=False, maps=maps)
        params = [(shape, maps)]
        parts = [self.expr(scope, (SIZE, *shape), depth=1)]
        axes = ""
        if shape and self.chance(0.3):
            axes = ", in_axes=1"
        elif self.chance(0.3):
            params.append(((SIZE,), scope.maps))
            parts.append(self.expr(scope, (SIZE,), depth=1))
            axes = ", in_axes=(0, None)"
        fun = self.closure(inner, params, [out])
        name = self.fresh("v")
        takes = ", ".join(f"{{{i}}}" for i in range(len(parts)))
        template = f"{name} = vmap({{f}}{axes}{self.rules(rules)})({takes})"
        return Call("vmap", template, [fun], parts, [(name, (SIZE, *out))], cells)

    def predicate(self, scope: Scope) -> tuple[Expr, Maps]:
        flags = [v for v in scope.views if v.cell.sort == "flag"]
        if flags and self.chance(0.4):
            return Expr((), "{cell}", cell=self.pick(flags).cell), NOWHERE
        if self.chance(0.15):
            return Expr((), self.pick(("True", "jnp.asarray(False)"))), NOWHERE
        value = self.expr(scope, (), depth=1)
        return Expr((), "{0} > 0.0765", [value]), self.maps_of(value, scope)

    def call_cond(self, scope: Scope, template: str = "cond({0}, {f}, {g}, {1})", kind: str = "cond") -> Call:
        shape, out, name = self.shape(), self.shape(), self.fresh("v")
        pred, maps = self.predicate(scope)
        num = template.count("{f}") + template.count("{g}") + template.count("{h}")
        inner = scope.inside(once=False, typed=True, varying=scope.varying | maps)
        if kind == "bs_cond":
            inner = foreign(inner)
        funs = [self.closure(inner, [(shape, scope.maps)], [out], 2) for _ in range(num)]
        return Call(kind, f"{name} = {template}", funs, [pred, self.expr(scope, shape, depth=1)], [(name, out)])

    def call_switch(self, scope: Scope) -> Call:
        return self.call_cond(scope, "switch(jnp.where({0}, 2, 0), [{f}, {g}, {h}], {1})", "switch")

    def call_shard_map(self, scope: Scope) -> Call:
        if scope.sharded:  # JAX refuses a mesh whose axes are manual already
            return self.call_jit(scope)
        options = self.pick(("", ", check_vma=False"))
        template = f"shard_map({{f}}, mesh=mesh, in_specs=P(), out_specs=P(){options})({{0}})"
        return self.simple(scope, "shard_map", template, scope.inside(sharded=True), takes_model=False)

    def call_pure(self, scope: Scope) -> Call:
        call = self.simple(scope, "pure", "run_pure({f}, {0})", foreign(scope.inside()), takes_model=False)
        call.funs[0].runs = 3
        return call

    # -- brainstate's own transforms around --

    def call_bs_jit(self, scope: Scope) -> Call:
        call = self.simple(scope, "bs_jit", "bs_jit({f})({0})", foreign(scope.inside()), takes_model=False)
        call.funs[0].runs = 3
        return call

    def call_bs_for_loop(self, scope: Scope) -> Call:
        shape, name, out = self.pick(((), (SIZE,))), self.fresh("v"), self.pick(((), (SIZE,)))
        fun = self.closure(foreign(scope.inside(once=False, typed=True)), [(shape, scope.maps)], [out], 3)
        parts = [self.expr(scope, (SIZE, *shape), depth=1)]
        return Call("bs_for_loop", f"{name} = bs_for_loop({{f}}, {{0}})", [fun], parts, [(name, (SIZE, *out))])

    def call_bs_cond(self, scope: Scope) -> Call:
        return self.call_cond(scope, "bs_cond({0}, {f}, {g}, {1})", "bs_cond")

    # -- programs --

    def helper(self, cells: list[Cell]) -> Fun:
        """A function of a model and an array, for models that both have these states."""
        s, n = (dataclasses.replace(c, place=f"model.{c.place.partition('.')[2]}") for c in cells)
        name = self.fresh("f")
        read = Expr((), "jnp.mean(jnp.asarray({cell}))", cell=s)
        body: list[Statement] = [mixed_syntax.Write(n, Expr((), "{cell} + 1", cell=n))]
        if self.chance(0.5):
            body.append(mixed_syntax.Write(s, Expr((), "0.9 * {cell}", cell=s)))
        if self.chance(0.3):
            body.append(mixed_syntax.If("model.fail", [Raise("Boom")], []))
        result = Expr((SIZE,), "jnp.tanh({0} * {1})", [Expr((SIZE,), "x", name="x"), read])
        return Fun(name, [("model", ()), ("x", (SIZE,))], body, [result])

    def program(self) -> Program:
        cells = self.cells()
        wrap = self.pick(("{f}", "{f}", "{f}", "jit({f})", "remat({f})", "jit(remat({f}))"))
        twins = False
        if self.chance(0.5):
            shared = [
                self.cell("m.both", self.pick(("vector", "scalar"))),
                self.cell("m.calls", self.pick(("int", "count"))),
            ]
            self.helpers.append(self.helper(shared))
            cells += shared
            twins = self.chance(0.5)
            if twins:
                cells += [dataclasses.replace(c, place=c.place.replace("m.", "k.")) for c in shared]
        views = tuple(
            View(c, mixed_syntax.SHAPES.get(c.sort))
            for c in cells
            if c.place not in ("m.both", "k.both", "m.calls", "k.calls")
        )
        flags = "jit" not in wrap
        scope = Scope(self.pick((2, 3, 3, 4)), (), views, flags=flags, once=flags)
        main = self.fun(scope, [((SIZE,), NOWHERE)], [self.shape(), ()])
        while not any(isinstance(s, Call) and s.kind != "plain" for s in walk_called(main.body)) or isinstance(
            main.body[-1], Raise
        ):
            main = self.fun(scope, [((SIZE,), NOWHERE)], [self.shape(), ()])
            self.calls = max(self.calls, 2)
        main.name, main.style = "main", "closure"
        turns: list[Turn] = []
        for i in range(self.pick((1, 2, 2, 3))):
            if i and self.chance(0.5) and flags:
                turns.append(Turn(None, self.pick(("m.training = not m.training", "m.fail = not m.fail"))))
            turns.append(
                Turn(Expr((SIZE,), f"jnp.asarray({self.pick(([0.3, -0.7, 1.1], [-0.2, 0.4, 0.9], [0.8, 0.1, -0.5]))})"))
            )
        if not flags and any(isinstance(s, Make) and s.is_left for s in walk_called(main.body)):
            turns += [Turn(Expr((SIZE,), f"jnp.asarray({xs})")) for xs in ([0.6, 0.2, -0.4], [-0.1, 0.9, 0.5])]
        aliases = [(f"k.{name}", f"m.{name}") for name in ("both", "calls")] if self.helpers and not twins else []
        return Program(self.seed, cells, self.helpers, main, wrap, turns, aliases)


def lasts(statement: Statement) -> bool:
    """Whether a statement changes containers of a model, which an inspection does not undo."""
    if isinstance(statement, Make):
        return statement.is_left and ".new" not in statement.place
    return isinstance(statement, mixed_syntax.Do) and statement.template.startswith(
        ("del ", "m.items", "k.items", "model.items")
    )


def foreign(scope: Scope) -> Scope:
    """Inside a transform that knows statetx's and brainstate's states only, and undoes nothing."""
    views = tuple(
        v
        for v in scope.views
        if v.cell.kind in ("statetx", "brainstate") and v.cell.sort not in ("mode", "loose", "list")
    )
    return dataclasses.replace(scope, foreign=True, raises=False, views=views)


def program_of(seed: int) -> Program:
    return Generator(seed).program()
