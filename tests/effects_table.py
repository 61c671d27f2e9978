"""Every transform crossed with every side effect: the rows, and the expected outcome of each cell.

`effects_columns` has the columns. A row applies a column under a transform, and gives the reference:
plain calls of the same function on equal models: once, one after the other, or one for each example; derivatives are
central differences. A cell without an entry in `REFUSED` must agree with the plain calls; the others must raise the
error entered there, naming the state where the entry says so, and leave the model unchanged.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from effects_columns import NO_VALUE, Column, Model, type_of
from jax.sharding import PartitionSpec as P
from libraries import Library, put

import statetx

X = jnp.float32(0.3)
STEP = 0.02  # of differences, in float32
GONE = object()  # in place of the value of a state that is in no attribute any more


class Case:
    """One column on models of one kind."""

    def __init__(self, kind: Library, column: Column, *, is_plain: bool):
        self._kind = kind
        self._column = column
        self._is_plain = is_plain
        self.model, self.fun = self.fresh()
        self._made: Callable[[Any], Any] | None = None

    def undo(self, made: Callable[[Any], Any] = lambda value: NO_VALUE) -> None:
        """Expect the former values of existing states; `made` maps the value of a created state to the expected one, or
        to `GONE`.
        """
        self._made = made

    def values(self) -> dict[str, Any]:
        """The model's final values."""
        now = self.model.values()
        if self._made is None:
            return now
        before = self.fresh()[0].values()
        values = {name: before[name] if name in before else self._made(value) for name, value in now.items()}
        return {name: value for name, value in values.items() if value is not GONE}

    def fresh(self) -> tuple[Model, Callable[[Any], Any]]:
        model, effect = Model(self._kind, self._column, self._is_plain), self._column.effect

        def fun(x: Any) -> Any:
            return effect(model, x)

        return model, fun

    def slope(self, x: Any) -> Any:
        """The derivative of a first call."""
        up, down = self.fresh()[1], self.fresh()[1]
        return (up(x + STEP) - down(x - STEP)) / (2 * STEP)

    def curvature(self, x: Any) -> Any:
        return (self.slope(x + 5 * STEP) - self.slope(x - 5 * STEP)) / (10 * STEP)


@dataclasses.dataclass(frozen=True)
class Row:
    """A transform.

    Attributes:
        apply: the transform of a function of one number, called.
        plain: the same by plain calls.
        group: rows that refuse the same.
    """

    name: str
    group: str
    apply: Callable[[Callable, Any], Any]
    plain: Callable[[Case, Any], Any]


def once(case: Case, x: Any) -> Any:
    return case.fun(x)


def twice(case: Case, x: Any) -> Any:
    return case.fun(case.fun(x))


def undone(case: Case, x: Any) -> Any:
    """The call, with its writes undone: existing states have their former values, created states have none.

    Changes of Python objects stay.
    """
    out = case.fun(x)
    case.undo()
    return out


def inspected(case: Case, x: Any) -> type:
    """Like `undone`; attributes that hold created states are as before the call."""
    case.fun(x)
    case.undo(lambda value: GONE)
    return statetx.StateTrace


def type_only(case: Case, x: Any) -> Any:
    undone(case, x)
    return jax.ShapeDtypeStruct((), jnp.float32)


def types_only(case: Case, x: Any) -> Any:
    """Like `type_only`; created states have types, too."""
    case.fun(x)
    case.undo(type_of)
    return jax.ShapeDtypeStruct((), jnp.float32)


def value_and_slope(case: Case, x: Any) -> Any:
    slope = case.slope(x)
    return case.fun(x), slope


def through_sigmoid(fun: Callable, x: Any) -> Any:
    return 4 * jax.nn.sigmoid(fun(x)) - 2  # its derivative reads its result


def thrice_and_slope(case: Case, x: Any) -> Any:
    def thrice(fun: Callable, x: Any) -> Any:
        for _ in range(3):
            x = through_sigmoid(fun, x)
        return x

    (_, up), (_, down), step = case.fresh(), case.fresh(), STEP / 8  # as the third call of some is far from a line
    slope = (thrice(up, x + step) - thrice(down, x - step)) / (2 * step)
    return thrice(case.fun, x), slope


def examples(case: Case, x: Any) -> Any:
    """Each example on its own model, with its own key; the results, and a created state's values, are stacked."""
    xs, outs = (x, 2 * x), []
    rng = getattr(case.model, "rng", None)
    keys = None if rng is None else jax.random.split(case.model.kind.get(case.model.kind.key_of(rng)), 3)
    for i, x in enumerate(xs):
        model, fun = case.fresh()
        if keys is not None:
            model.kind.set(model.kind.key_of(model.rng), keys[i + 1])
        outs.append(fun(x))
    case.fun(x)
    if keys is not None and case.model.kind.name != "nnx":  # its key stays and its count advances
        case.model.kind.set(case.model.kind.key_of(case.model.rng), keys[0])
    if hasattr(case.model, "new"):
        case.model.new = case.model.kind.make(jnp.stack([2 * x + 1.0 for x in xs]), "new")
    return jnp.stack(outs)


def run_pure(fun: Callable, x: Any) -> Any:
    pure = statetx.functionalize(fun)
    states = pure.states(x)
    out, new = jax.jit(pure)(pure.values(x), x)
    for path, state in states.items():
        put(state, new[path])
    return out


def custom(kind: str, fun: Callable, x: Any) -> Any:
    """The function inside its custom rule, in a gradient."""
    if kind == "custom_jvp":
        inner = jax.custom_jvp(fun)
        inner.defjvp(lambda primals, tangents: (fun(*primals), tangents[0]))
    else:
        inner = jax.custom_vjp(fun)
        inner.defvjp(lambda x: (fun(x), None), lambda _, g: (g,))
    return statetx.vjp(lambda x: inner(x), x)[0]


class Layer:
    """A layer for `stack`, whose states all layers share."""

    def __init__(self, fun: Callable):
        self.fun = fun

    def __call__(self, x: Any) -> Any:
        return self.fun(x)


BITS = statetx.policies.everything.stored_as("bits")


def gated(fun: Callable) -> Callable:
    """The function times 1, which a derivative reads: stored as bits."""
    return lambda x: fun(x) * (x > -99.0).astype(jnp.float32)


def through_slots(fun: Callable, x: Any) -> Any:
    """Three steps from two slots in a gradient. A carry has more numbers than a step keeps, so that the slots hold
    both.
    """

    def loop(x: Any) -> Any:
        def step(carry: list, _: Any) -> tuple[list, None]:
            return [through_sigmoid(fun, sum(carry) / len(carry))] * len(carry), None

        return statetx.scan(step, [x] * 6, length=3, checkpoint=2)[0][0]

    return statetx.value_and_grad(loop)(x)


def _mesh() -> Any:
    return jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))


ROWS = [
    Row("remat", "eager", lambda f, x: statetx.remat(f)(x), once),
    Row("remat in grad", "remat", lambda f, x: statetx.value_and_grad(statetx.remat(f))(x), value_and_slope),
    Row("remat in jit", "remat", lambda f, x: statetx.jit(statetx.remat(f))(x), once),
    Row("grad", "derivative", lambda f, x: (None, statetx.grad(f)(x)), lambda c, x: (None, value_and_slope(c, x)[1])),
    Row("value_and_grad", "derivative", lambda f, x: statetx.value_and_grad(f)(x), value_and_slope),
    Row("vjp", "derivative", lambda f, x: (lambda out: (out[0], out[1](1.0)[0]))(statetx.vjp(f, x)), value_and_slope),
    Row("jvp", "derivative", lambda f, x: statetx.jvp(f, (x,), (jnp.float32(1),)), value_and_slope),
    Row(
        "linearize",
        "derivative",
        lambda f, x: (lambda out: (out[0], out[1](jnp.float32(1))))(statetx.linearize(f, x)),
        value_and_slope,
    ),
    Row(
        "jacfwd", "derivative", lambda f, x: (None, statetx.jacfwd(f)(x)), lambda c, x: (None, value_and_slope(c, x)[1])
    ),
    Row(
        "jacrev", "derivative", lambda f, x: (None, statetx.jacrev(f)(x)), lambda c, x: (None, value_and_slope(c, x)[1])
    ),
    Row("hessian", "derivative", lambda f, x: statetx.hessian(f)(x), lambda c, x: (c.curvature(x), c.fun(x))[0]),
    Row("jit", "jit", lambda f, x: (lambda g: g(g(x)))(statetx.jit(f)), twice),
    Row("vmap", "vmap", lambda f, x: statetx.vmap(f)(jnp.stack([x, 2 * x])), examples),
    Row("scan", "loop", lambda f, x: statetx.scan(lambda c, _: (f(c), None), x, length=2)[0], twice),
    Row(
        "scan with slots",
        "slots",
        lambda f, x: statetx.scan(lambda c, _: (f(c), None), x, length=2, checkpoint=1)[0],
        twice,
    ),
    Row("fori_loop", "loop", lambda f, x: statetx.fori_loop(0, 2, lambda i, c: f(c), x), twice),
    Row(
        "while_loop",
        "loop",
        lambda f, x: statetx.while_loop(lambda c: c[1] < 2, lambda c: (f(c[0]), c[1] + 1), (x, 0))[0],
        twice,
    ),
    Row(
        "condition of while_loop",
        "condition",
        lambda f, x: statetx.while_loop(lambda c: (f(c) < 99.0) & (c < 1.0), lambda c: c + 1.0, x),
        lambda c, x: (c.fun(x), c.fun(x), x + 1.0)[2],
    ),
    Row(
        "map",
        "loop",
        lambda f, x: statetx.map(f, jnp.stack([x, 2 * x])),
        lambda c, x: jnp.stack([c.fun(x), c.fun(2 * x)]),
    ),
    Row(
        "microbatch",
        "loop",
        lambda f, x: statetx.microbatch(lambda xs: f(xs[0]), 2, reduce="sum")(jnp.stack([x, 2 * x])),
        lambda c, x: c.fun(x) + c.fun(2 * x),
    ),
    Row("cond", "branch", lambda f, x: statetx.cond(True, f, lambda x: -x, x), once),
    Row(
        "cond, not taken",
        "branch",
        lambda f, x: statetx.cond(False, f, lambda x: -x, x),
        lambda c, x: -x + 0 * undone(c, x),
    ),
    Row("switch", "branch", lambda f, x: statetx.switch(1, [lambda x: -x, f, lambda x: x + 1], x), once),
    Row(
        "shard_map",
        "shard_map",
        lambda f, x: statetx.jit(statetx.shard_map(f, mesh=_mesh(), in_specs=P(), out_specs=P()))(x),
        once,
    ),
    Row("eval_shape", "abstract", lambda f, x: statetx.eval_shape(f, x), types_only),
    Row("make_jaxpr", "jaxpr", lambda f, x: statetx.make_jaxpr(f)(x).out_avals[0], type_only),
    Row(
        "trace_states",
        "abstract",
        lambda f, x: type(statetx.trace_states(f)(x)),
        inspected,
    ),
    Row("functionalize", "functionalize", run_pure, once),
    Row("remat_scan", "slots", lambda f, x: statetx.remat_scan(f, num=2, carry=True, split_rngs=None)(x), twice),
    Row("stack", "loop", lambda f, x: statetx.stack([Layer(f), Layer(f)])(x), twice),
    Row("custom_jvp", "custom", lambda f, x: custom("custom_jvp", f, x), once),
    Row("custom_vjp", "custom", lambda f, x: custom("custom_vjp", f, x), once),
    Row(
        "remat that stores bits",
        "remat",
        lambda f, x: statetx.value_and_grad(statetx.remat(gated(f), policy=BITS))(x),
        value_and_slope,
    ),
    Row("slots that hold residuals", "slots", through_slots, thrice_and_slope),
]
