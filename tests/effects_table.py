"""Every transform crossed with every side effect: the rows.

`effects_columns` has the columns. A row applies a column under a transform of statetx, and of the reference, on equal
models. A cell without an entry in `refused` must agree with the reference; the others must raise the error entered
there, naming the state where the entry says so, and leave the model unchanged.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from effects_columns import GONE
from jax.sharding import PartitionSpec as P
from libraries import put
from mixed_cells import DEAD, Cell
from mixed_reference import Reference

import statetx

X = jnp.float32(0.3)


class Meaning(Reference):
    """The reference, with what the rows need beside the transforms of mixed programs."""

    def undone(self, fun: Callable, x: Any, made: Callable[[Cell], Any] = lambda cell: DEAD) -> Any:
        """The call, with its writes undone; `made` gives the value of a created state. Changes of objects stay."""
        before, start = self._dump(), len(self._cells)
        try:
            return fun(x)
        finally:
            self._load(before)
            for cell in self._live(start):
                cell._value = made(cell)

    def trace_states(self, fun: Callable) -> Callable:
        return lambda x: (self.undone(fun, x, lambda cell: GONE), object.__new__(statetx.StateTrace))[1]

    def eval_shape(self, fun: Callable, x: Any) -> Any:
        return self.undone(lambda x: type_of(fun(x)), x, lambda cell: type_of(cell._value))

    def make_jaxpr(self, fun: Callable) -> Callable:
        return lambda x: types.SimpleNamespace(out_avals=[self.undone(fun, x)])

    def microbatch(self, fun: Callable, num: int, reduce: str) -> Callable:
        return lambda xs: self.map(fun, xs.reshape(num, 1)).sum(0)

    def remat_scan(self, fun: Callable, num: int, **options: Any) -> Callable:
        return lambda x: self.fori_loop(0, num, lambda i, c: fun(c), x)

    def stack(self, layers: list[Callable]) -> Callable:
        return self.remat_scan(layers[0], len(layers))  # which share a function


def type_of(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x))


@dataclasses.dataclass(frozen=True)
class Row:
    """A transform.

    Attributes:
        apply: the transform of a function of one number, called: ``(api, fun, x) -> y``.
        group: rows that refuse the same.
    """

    name: str
    group: str
    apply: Callable[[Any, Callable, Any], Any]


def run_pure(api: Any, fun: Callable, x: Any) -> Any:
    if api is not statetx:
        return api.jit(fun)(x)
    pure = statetx.functionalize(fun)
    states = pure.states(x)
    out, new = jax.jit(pure)(pure.values(x), x)
    for path, state in states.items():
        put(state, new[path])
    return out


def custom(api: Any, kind: str, fun: Callable, x: Any) -> Any:
    """The function inside its custom rule, in a gradient."""
    if kind == "custom_jvp":
        inner = jax.custom_jvp(fun)
        inner.defjvp(lambda primals, tangents: (fun(*primals), tangents[0]))
    else:
        inner = jax.custom_vjp(fun)
        inner.defvjp(lambda x: (fun(x), None), lambda _, g: (g,))
    return api.vjp(lambda x: inner(x), x)[0]


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


def through_sigmoid(fun: Callable, x: Any) -> Any:
    return 4 * jax.nn.sigmoid(fun(x)) - 2  # its derivative reads its result


def through_slots(api: Any, fun: Callable, x: Any) -> Any:
    """Three steps from two slots in a gradient. A carry has more numbers than a step keeps, so that the slots hold
    both.
    """

    def loop(x: Any) -> Any:
        def step(carry: list, _: Any) -> tuple[list, None]:
            return [through_sigmoid(fun, sum(carry) / len(carry))] * len(carry), None

        return api.scan(step, [x] * 6, length=3, checkpoint=2)[0][0]

    return api.value_and_grad(loop)(x)


def _mesh() -> Any:
    return jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))


ROWS = [
    Row("remat", "eager", lambda t, f, x: t.remat(f)(x)),
    Row("remat in grad", "remat", lambda t, f, x: t.value_and_grad(t.remat(f))(x)),
    Row("remat in jit", "remat", lambda t, f, x: t.jit(t.remat(f))(x)),
    Row("grad", "derivative", lambda t, f, x: t.grad(f)(x)),
    Row("value_and_grad", "derivative", lambda t, f, x: t.value_and_grad(f)(x)),
    Row("vjp", "derivative", lambda t, f, x: (lambda out, pull: (out, pull(jnp.float32(1))))(*t.vjp(f, x))),
    Row("jvp", "derivative", lambda t, f, x: t.jvp(f, (x,), (jnp.float32(1),))),
    Row("linearize", "derivative", lambda t, f, x: (lambda out, push: (out, push(jnp.float32(1))))(*t.linearize(f, x))),
    Row("jacfwd", "derivative", lambda t, f, x: t.jacfwd(f)(x)),
    Row("jacrev", "derivative", lambda t, f, x: t.jacrev(f)(x)),
    Row("hessian", "derivative", lambda t, f, x: t.hessian(f)(x)),
    Row("jit", "jit", lambda t, f, x: (lambda g: g(g(x)))(t.jit(f))),
    Row("vmap", "vmap", lambda t, f, x: t.vmap(f)(jnp.stack([x, 2 * x]))),
    Row("scan", "loop", lambda t, f, x: t.scan(lambda c, _: (f(c), None), x, length=2)[0]),
    Row("scan with slots", "slots", lambda t, f, x: t.scan(lambda c, _: (f(c), None), x, length=2, checkpoint=1)[0]),
    Row("fori_loop", "loop", lambda t, f, x: t.fori_loop(0, 2, lambda i, c: f(c), x)),
    Row(
        "while_loop",
        "loop",
        lambda t, f, x: t.while_loop(lambda c: c[1] < 2, lambda c: (f(c[0]), c[1] + 1), (x, 0))[0],
    ),
    Row(
        "condition of while_loop",
        "condition",
        lambda t, f, x: t.while_loop(lambda c: (f(c) < 99.0) & (c < 1.0), lambda c: c + 1.0, x),
    ),
    Row("map", "loop", lambda t, f, x: t.map(f, jnp.stack([x, 2 * x]))),
    Row(
        "microbatch",
        "loop",
        lambda t, f, x: t.microbatch(lambda xs: f(xs[0]), 2, reduce="sum")(jnp.stack([x, 2 * x])),
    ),
    Row("cond", "branch", lambda t, f, x: t.cond(True, f, lambda x: -x, x)),
    Row("cond, not taken", "branch", lambda t, f, x: t.cond(False, f, lambda x: -x, x)),
    Row("switch", "branch", lambda t, f, x: t.switch(1, [lambda x: -x, f, lambda x: x + 1], x)),
    Row(
        "shard_map",
        "shard_map",
        lambda t, f, x: t.jit(t.shard_map(f, mesh=_mesh(), in_specs=P(), out_specs=P()))(x),
    ),
    Row("eval_shape", "abstract", lambda t, f, x: t.eval_shape(f, x)),
    Row("make_jaxpr", "jaxpr", lambda t, f, x: type_of(t.make_jaxpr(f)(x).out_avals[0])),
    Row("trace_states", "abstract", lambda t, f, x: type(t.trace_states(f)(x))),
    Row("functionalize", "functionalize", run_pure),
    Row("remat_scan", "slots", lambda t, f, x: t.remat_scan(f, num=2, carry=True, split_rngs=None)(x)),
    Row("stack", "loop", lambda t, f, x: t.stack([Layer(f), Layer(f)])(x)),
    Row("custom_jvp", "custom", lambda t, f, x: custom(t, "custom_jvp", f, x)),
    Row("custom_vjp", "custom", lambda t, f, x: custom(t, "custom_vjp", f, x)),
    Row("remat that stores bits", "remat", lambda t, f, x: t.value_and_grad(t.remat(gated(f), policy=BITS))(x)),
    Row("slots that hold residuals", "slots", through_slots),
]
