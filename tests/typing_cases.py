# pyright: reportUnnecessaryTypeIgnoreComment=true
"""The types that a type checker infers for the public names; `make check` holds pyright to it, and a test runs it.

A line that must be refused says so in a comment, which pyright in turn refuses where nothing is wrong.
"""

from collections.abc import Callable
from typing import Any, assert_type

import jax
import jax.numpy as jnp
import optax

import statetx
from statetx.residuals.measure import Cost
from statetx.transforms.jit.api import Lowered

weight = statetx.Param(jnp.ones(2))
rng = statetx.RngState(0)


def scaled(x: jax.Array, *, scale: float = 1.0) -> jax.Array:
    return scale * x * weight.value


def with_aux(x: jax.Array) -> tuple[jax.Array, dict[str, int]]:
    return scaled(x).sum(), {"n": 1}


def total(x: jax.Array) -> jax.Array:
    return scaled(x).sum()


def of_tree(tree: dict[str, jax.Array]) -> jax.Array:
    return total(tree["x"])


def with_index(i: int, carry: jax.Array) -> jax.Array:
    return carry * i


class Model:
    def __init__(self) -> None:
        self.steps = statetx.State(jnp.zeros((), jnp.int32), name="steps")

    @statetx.remat
    def plain(self, x: jax.Array) -> jax.Array:
        return scaled(x)

    @statetx.remat(policy="everything")
    def kept(self, x: jax.Array) -> jax.Array:
        return scaled(x)

    @statetx.jit
    def compiled(self, x: jax.Array, *, scale: float = 1.0) -> jax.Array:
        return scaled(x, scale=scale)

    @statetx.jit(static_argnames="scale", donate_states=True)
    def static(self, x: jax.Array, scale: int) -> jax.Array:
        return scaled(x, scale=scale)

    @classmethod
    @statetx.jit
    def of_class(cls, x: jax.Array) -> jax.Array:
        return scaled(x)

    @statetx.jit
    @classmethod
    def of_class_inside(cls, x: jax.Array) -> jax.Array:
        return scaled(x)

    @staticmethod
    @statetx.jit
    def of_none(x: jax.Array) -> jax.Array:
        return scaled(x)

    @staticmethod
    @statetx.jit
    def without_annotations(x):
        return scaled(x)

    @statetx.value_and_grad(wrt=weight)
    def differentiated(self, x: jax.Array) -> jax.Array:
        return total(x)


@statetx.remat
class Layer:
    def __init__(self, size: int) -> None:
        self.size = size

    def __call__(self, x: jax.Array) -> jax.Array:
        return x


def states() -> None:
    assert_type(weight, statetx.Param[jax.Array])
    assert_type(weight.value, jax.Array)
    assert_type(weight.name, str | None)
    assert_type(statetx.State(0).value, int)
    assert_type(rng.next(), jax.Array)
    assert_type(statetx.states(Model()), dict[str, Any])
    assert_type(statetx.states(Model(), statetx.Param), dict[str, statetx.Param[jax.Array]])
    weight.value = "text"  # pyright: ignore[reportAttributeAccessIssue]


def wrapped(x: jax.Array) -> None:
    model = Model()
    assert_type(statetx.remat(scaled)(x, scale=2.0), jax.Array)
    assert_type(statetx.checkpoint(scaled)(x), jax.Array)
    assert_type(model.plain(x), jax.Array)
    assert_type(model.kept(x), jax.Array)
    assert_type(Layer(3)(x), jax.Array)
    assert_type(statetx.checkpoint_name(x, "x"), jax.Array)
    assert_type(statetx.stack(Model, 3), statetx.Stack[Model])
    assert_type(statetx.stack(Model, 3)[0], Model)
    assert_type(statetx.stack(Model, 3)[:2], statetx.Stack[Model])
    assert_type(statetx.unstack(statetx.stack([model, model])), list[Model])
    assert_type(statetx.jit(scaled)(x, scale=2.0), jax.Array)
    assert_type(statetx.jit(scaled).lower(x), Lowered)
    assert_type(model.compiled(x, scale=2.0), jax.Array)
    assert_type(Model.compiled(model, x), jax.Array)
    assert_type(Model.of_class(x), jax.Array)
    assert_type(model.of_class(x), jax.Array)
    assert_type(Model.of_class_inside(x), jax.Array)
    assert_type(Model.of_none(x), jax.Array)
    assert_type(model.of_none(x), jax.Array)
    assert_type(model.without_annotations(x), jax.Array)
    assert_type(model.differentiated(x), tuple[jax.Array, jax.Array])
    assert_type(model.static(x, 2), jax.Array)
    assert_type(statetx.vmap(scaled, in_axes=0)(x), jax.Array)
    assert_type(statetx.functionalize(total)({"weight": weight.value}, x), tuple[jax.Array, dict[str, Any]])
    assert_type(statetx.trace_states(scaled)(x, scale=2.0), statetx.StateTrace)


def refused(x: jax.Array) -> None:
    model = Model()
    optimizer = statetx.Optimizer(optax.sgd(0.1), {"w": weight})
    optimizer.update()  # pyright: ignore[reportCallIssue]
    optimizer.update(model, {"w": x})  # pyright: ignore[reportArgumentType]
    _ = optimizer.states["w"].vlaue  # pyright: ignore[reportAttributeAccessIssue]
    statetx.remat(scaled)(x, size=2.0)  # pyright: ignore[reportCallIssue]
    statetx.remat(scaled, polcy="dots")  # pyright: ignore[reportCallIssue]
    statetx.jit(scaled)("x")  # pyright: ignore[reportArgumentType]
    statetx.jit(scaled, static_argnum=0)  # pyright: ignore[reportCallIssue]
    model.compiled(x, size=2)  # pyright: ignore[reportCallIssue]
    model.static(x, "2")  # pyright: ignore[reportArgumentType]
    statetx.grad(total)(x, 1.0)  # pyright: ignore[reportCallIssue]
    statetx.grad(total, wrt=weight, has_axu=True)  # pyright: ignore[reportCallIssue]
    _ = statetx.grad(total, wrt=optimizer.states)(x).w  # pyright: ignore[reportAttributeAccessIssue]
    statetx.memory_report(total)  # pyright: ignore[reportCallIssue]
    statetx.memory_report(total, x, gradeint=False)  # pyright: ignore[reportCallIssue]
    statetx.measure(total)  # pyright: ignore[reportCallIssue]
    statetx.vmap(scaled)()  # pyright: ignore[reportCallIssue]
    statetx.scan(lambda c: c, x, x)  # pyright: ignore[reportArgumentType]
    statetx.scan(lambda c, e: (c, e), x, x, checkpoint="auot")  # pyright: ignore[reportArgumentType]
    statetx.fori_loop(0, 2, with_index, "text")  # pyright: ignore[reportArgumentType]


def derivatives(x: jax.Array) -> None:
    tree = {"x": x}
    assert_type(statetx.grad(total)(x), jax.Array)
    assert_type(statetx.grad(jnp.sin)(1.0), jax.Array)
    assert_type(statetx.grad(of_tree)(tree), dict[str, jax.Array])
    assert_type(statetx.grad(lambda tree: tree["x"].sum())(tree), Any)
    assert_type(statetx.jit(statetx.grad(total))(x), jax.Array)
    assert_type(statetx.grad(total, wrt=weight)(x), jax.Array)
    assert_type(statetx.grad(total, wrt=statetx.Param)(x), dict[str, jax.Array])
    assert_type(statetx.value_and_grad(total)(x), tuple[jax.Array, jax.Array])
    assert_type(statetx.value_and_grad(of_tree)(tree), tuple[jax.Array, dict[str, jax.Array]])
    assert_type(statetx.value_and_grad(total, wrt={"w": weight})(x), tuple[jax.Array, dict[str, jax.Array]])
    value, _ = statetx.value_and_grad(with_aux, has_aux=True)(x)
    assert_type(value, tuple[jax.Array, dict[str, int]])
    _, aux = statetx.grad(with_aux, has_aux=True)(x)
    assert_type(aux, dict[str, int])

    @statetx.value_and_grad(wrt=weight)
    def loss(x: jax.Array) -> jax.Array:
        return total(x)

    assert_type(loss(x), tuple[jax.Array, jax.Array])
    assert_type(statetx.jvp(total, (x,), (x,)), tuple[jax.Array, jax.Array])
    assert_type(statetx.vjp(total, x)[0], jax.Array)
    assert_type(statetx.vjp(with_aux, x, has_aux=True)[2], dict[str, int])
    out, push = statetx.linearize(total, x)
    assert_type(out, jax.Array)
    assert_type(push(x), jax.Array)
    assert_type(statetx.hessian(total)(x), Any)


def loops(x: jax.Array) -> None:
    def step(carry: jax.Array, element: jax.Array) -> tuple[jax.Array, int]:
        return carry + element.sum(), 1

    assert_type(statetx.scan(step, x.sum(), x), tuple[jax.Array, int])
    assert_type(statetx.scan(step, x.sum(), x, checkpoint=statetx.policies.Budget("1MiB")), tuple[jax.Array, int])
    assert_type(statetx.scan(lambda c, e: (c, total(x)), None, x), tuple[None, jax.Array])
    assert_type(statetx.map(lambda e: e * 2, x), jax.Array)
    assert_type(statetx.fori_loop(0, 2, with_index, x), jax.Array)
    assert_type(statetx.while_loop(lambda c: c.sum() < 10, lambda c: c * 2 + 1, x), jax.Array)
    assert_type(statetx.cond(True, total, lambda x: x.sum(), x), jax.Array)
    assert_type(statetx.switch(0, [total, total], x), jax.Array)


def training(x: jax.Array) -> None:
    optimizer = statetx.Optimizer(optax.sgd(0.1), {"w": weight})
    assert_type(optimizer.states, dict[str, statetx.Param[jax.Array]])

    @statetx.jit
    def train(x: jax.Array) -> jax.Array:
        value, grads = statetx.value_and_grad(total, wrt=optimizer.states)(x)
        optimizer.update(grads)
        return value

    assert_type(train(x), jax.Array)
    assert_type(statetx.measure(total, x), Cost)
    assert_type(statetx.measure(total, x, gradient=False), Cost)


CASES: list[Callable[[jax.Array], None]] = [wrapped, derivatives, loops, training]
