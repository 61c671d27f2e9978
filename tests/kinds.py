"""The dialects of the behavior table that statetx itself speaks: one for each kind of state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import brainstate
import jax
from behaviors import PARAMETERS, VALUES, Objects, scalar, tangent
from flax import nnx

import statetx


class Statetx(Objects):
    """statetx's transforms, the same whatever the states are."""

    def remat(self, fun: Any, **options: Any) -> Any:
        return statetx.remat(fun, **options)

    def scan(self, model: Any, f: Callable, carry: Any, xs: Any) -> Any:
        return statetx.scan(lambda c, x: f(model, c, x), carry, xs)

    def cond(self, model: Any, pred: Any, f: Callable, g: Callable, *operands: Any) -> Any:
        return statetx.cond(pred, lambda *xs: f(model, *xs), lambda *xs: g(model, *xs), *operands)

    def while_loop(self, model: Any, cond: Callable, f: Callable, carry: Any) -> Any:
        return statetx.while_loop(cond, lambda carry: f(model, carry), carry)

    def vmap(self, model: Any, f: Callable, xs: Any) -> Any:
        return statetx.vmap(lambda x: f(model, x))(xs)

    def jit(self, model: Any, fun: Callable) -> Callable:
        return statetx.jit(fun)

    def grad(self, model: Any, fun: Callable) -> Callable:
        parameters = self.parameters(model)

        def gradients(x: Any) -> dict[str, Any]:
            def loss(x: Any) -> jax.Array:
                return scalar(fun(x))

            if not parameters:
                value, of_x = statetx.value_and_grad(loss)(x)
                return {"value": value, "x": of_x}
            value, (of_w, of_x) = statetx.value_and_grad(loss, 0, wrt=parameters)(x)
            return {"value": value, "x": of_x, **of_w}

        return gradients

    def jvp(self, model: Any, fun: Callable) -> Callable:
        return lambda x: statetx.jvp(fun, (x,), (tangent(x),))

    def vjp(self, model: Any, fun: Callable) -> Callable:
        def pulled(x: Any) -> Any:
            out, pullback = statetx.vjp(fun, x)
            (of_x,) = pullback(jax.tree.map(tangent, out))
            return out, of_x

        return pulled

    def linearize(self, model: Any, fun: Callable) -> Callable:
        def linear(x: Any) -> Any:
            out, push = statetx.linearize(fun, x)
            return out, push(tangent(x))

        return linear

    def hessian(self, model: Any, fun: Callable) -> Callable:
        return statetx.hessian(lambda x: scalar(fun(x)))


class Native(Statetx):
    name = "statetx.State"

    def cell(self, name: str, value: Any) -> Any:
        return statetx.Param(value) if name in PARAMETERS else statetx.State(value)

    def get(self, cell: Any) -> Any:
        return cell.value

    def set(self, cell: Any, value: Any) -> None:
        cell.value = value

    def rng(self) -> Any:
        return statetx.RngState(0)

    def draw(self, cell: Any) -> Any:
        return cell.next()


class Brainstate(Native):
    name = "brainstate.State"

    def cell(self, name: str, value: Any) -> Any:
        return brainstate.ParamState(value) if name in PARAMETERS else brainstate.ShortTermState(value)

    def rng(self) -> Any:
        return brainstate.random.RandomState(0)

    def draw(self, cell: Any) -> Any:
        return cell.split_key()


class NnxModule(nnx.Module):
    """A module that does not take the names of states, properties of its class, for attributes of its own."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in VALUES:
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)


class Nnx(Statetx):
    name = "flax.nnx.Variable"
    base = NnxModule

    def cell(self, name: str, value: Any) -> Any:
        variable = nnx.Param if name in PARAMETERS else nnx.BatchStat
        return nnx.data(jax.tree.map(variable, value, is_leaf=lambda x: x is None))

    def get(self, cell: Any) -> Any:
        return jax.tree.map(lambda v: v.get_value(), cell, is_leaf=is_variable)

    def set(self, cell: Any, value: Any) -> None:
        jax.tree.map(lambda v, x: v.set_value(x), cell, value, is_leaf=is_variable)

    def rng(self) -> Any:
        return nnx.Rngs(0)

    def draw(self, cell: Any) -> Any:
        return cell()


def is_variable(x: Any) -> bool:
    return isinstance(x, nnx.Variable)


class Ref(Statetx):
    """Plain JAX: parameters are arrays, given as arguments; other states are Refs, or pytrees of them."""

    name = "jax.Ref"

    def cell(self, name: str, value: Any) -> Any:
        return value if name in PARAMETERS else jax.tree.map(jax.new_ref, value)

    def get(self, cell: Any) -> Any:
        return jax.tree.map(lambda r: r[...] if is_ref(r) else r, cell, is_leaf=is_ref)

    def set(self, cell: Any, value: Any) -> None:
        jax.tree.map(lambda r, x: r.__setitem__(..., x), cell, value, is_leaf=is_ref)

    def poke(self, model: Any, name: str, value: Any) -> None:
        setattr(model, f"cell_{name}", self.cell(name, value))

    def rng(self) -> Any:
        return jax.new_ref(jax.random.key(0))

    def draw(self, cell: Any) -> Any:
        cell[...], key = jax.random.split(cell[...])
        return key

    def grad(self, model: Any, fun: Callable) -> Callable:
        def gradients(x: Any) -> dict[str, Any]:
            parameters = self.parameters(model)

            def loss(parameters: dict[str, Any], x: Any) -> jax.Array:
                self._assign(model, parameters)
                return scalar(fun(x))

            try:
                value, (of_w, of_x) = statetx.value_and_grad(loss, (0, 1))(parameters, x)
            finally:
                self._assign(model, parameters)
            return {"value": value, "x": of_x, **of_w}

        return gradients

    def _assign(self, model: Any, parameters: dict[str, Any]) -> None:
        for name, value in parameters.items():
            setattr(model, f"cell_{name}", value)


def is_ref(x: Any) -> bool:
    return isinstance(x, jax.Ref)


KINDS = (Native(), Brainstate(), Nnx(), Ref())
