"""The dialects of the behavior table that statetx itself speaks, one for each kind of state, and the reference's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from behaviors import PARAMETERS, VALUES, Objects, scalar, tangent
from flax import nnx
from libraries import LIBRARIES, Cells, Library
from mixed_reference import Reference

import statetx


class Closures(Objects):
    """Transforms that find the states of a function by themselves, and take nothing but what JAX's take.

    Attributes:
        library: how its states are made, read and written.
        api: the module that has the transforms.
        control: the module that has loops and branches.
    """

    library: Library
    api: Any = statetx
    control: Any = statetx

    def cell(self, name: str, value: Any) -> Any:
        return (self.library.param if name in PARAMETERS else self.library.make)(value)

    def get(self, cell: Any) -> Any:
        return self.library.get(cell)

    def set(self, cell: Any, value: Any) -> None:
        self.library.set(cell, value)

    def rng(self) -> Any:
        return self.library.rng()

    def draw(self, cell: Any) -> Any:
        return self.library.draw(cell)

    def remat(self, fun: Any, **options: Any) -> Any:
        return self.api.remat(fun, **options)

    def scan(self, model: Any, f: Callable, carry: Any, xs: Any) -> Any:
        return self.control.scan(lambda c, x: f(model, c, x), carry, xs)

    def cond(self, model: Any, pred: Any, f: Callable, g: Callable, *operands: Any) -> Any:
        return self.control.cond(pred, lambda *xs: f(model, *xs), lambda *xs: g(model, *xs), *operands)

    def while_loop(self, model: Any, cond: Callable, f: Callable, carry: Any) -> Any:
        return self.control.while_loop(cond, lambda carry: f(model, carry), carry)

    def vmap(self, model: Any, f: Callable, xs: Any) -> Any:
        return self.api.vmap(lambda x: f(model, x))(xs)

    def jit(self, model: Any, fun: Callable) -> Callable:
        return self.api.jit(fun)

    def grad(self, model: Any, fun: Callable) -> Callable:
        parameters = self.parameters(model)

        def gradients(x: Any) -> dict[str, Any]:
            def loss(x: Any) -> jax.Array:
                return scalar(fun(x))

            if not parameters:
                value, of_x = self.api.value_and_grad(loss)(x)
                return {"value": value, "x": of_x}
            value, (of_w, of_x) = self.api.value_and_grad(loss, 0, wrt=parameters)(x)
            return {"value": value, "x": of_x, **of_w}

        return gradients

    def jvp(self, model: Any, fun: Callable) -> Callable:
        return lambda x: self.api.jvp(fun, (x,), (tangent(x),))

    def vjp(self, model: Any, fun: Callable) -> Callable:
        def pulled(x: Any) -> Any:
            out, pullback = self.api.vjp(fun, x)
            (of_x,) = pullback(jax.tree.map(tangent, out))
            return out, of_x

        return pulled

    def linearize(self, model: Any, fun: Callable) -> Callable:
        def linear(x: Any) -> Any:
            out, push = self.api.linearize(fun, x)
            return out, push(tangent(x))

        return linear

    def hessian(self, model: Any, fun: Callable) -> Callable:
        return self.api.hessian(lambda x: scalar(fun(x)))


class Native(Closures):
    name = "statetx.State"
    library = LIBRARIES["statetx"]


class Brainstate(Closures):
    name = "brainstate.State"
    library = LIBRARIES["brainstate"]


class Arrays(Closures):
    """States that hold an array each: for a pytree of values, a pytree of states."""

    state_type: type
    holds_none = False

    def cell(self, name: str, value: Any) -> Any:
        make = self.library.param if name in PARAMETERS else self.library.make
        return jax.tree.map(make, value, is_leaf=lambda x: self.holds_none and x is None)

    def get(self, cell: Any) -> Any:
        return jax.tree.map(lambda x: self.library.get(x) if self._is_state(x) else x, cell, is_leaf=self._is_state)

    def set(self, cell: Any, value: Any) -> None:
        jax.tree.map(self.library.set, cell, value, is_leaf=self._is_state)

    def _is_state(self, x: Any) -> bool:
        return isinstance(x, self.state_type)


class NnxModule(nnx.Module):
    """A module that does not take the names of states, properties of its class, for attributes of its own."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in VALUES:
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)


class Nnx(Arrays):
    name = "flax.nnx.Variable"
    library = LIBRARIES["nnx"]
    base = NnxModule
    state_type = nnx.Variable
    holds_none = True

    def cell(self, name: str, value: Any) -> Any:
        return nnx.data(super().cell(name, value))


class Ref(Arrays):
    """Plain JAX: parameters are arrays, given as arguments; other states are Refs, or pytrees of them."""

    name = "jax.Ref"
    library = LIBRARIES["ref"]
    state_type = jax.Ref

    def poke(self, model: Any, name: str, value: Any) -> None:
        setattr(model, f"cell_{name}", self.cell(name, value))

    def grad(self, model: Any, fun: Callable) -> Callable:
        def gradients(x: Any) -> dict[str, Any]:
            parameters = self.parameters(model)

            def loss(parameters: dict[str, Any], x: Any) -> jax.Array:
                self._assign(model, parameters)
                return scalar(fun(x))

            try:
                value, (of_w, of_x) = self.api.value_and_grad(loss, (0, 1))(parameters, x)
            finally:
                self._assign(model, parameters)
            return {"value": value, "x": of_x, **of_w}

        return gradients

    def _assign(self, model: Any, parameters: dict[str, Any]) -> None:
        for name, value in parameters.items():
            setattr(model, f"cell_{name}", value)


class Meaning(Closures):
    """The expected results: cells of the reference in place of the states of a library, and its transforms.

    Keys are those of the library.
    """

    name = "expected"

    def __init__(self, library: str = "statetx"):
        self.api = self.control = Reference()
        self.library = Cells(self.api, library)

    def remat(self, fun: Any, **options: Any) -> Any:
        return fun if isinstance(fun, type) else self.api.remat(fun)


KINDS = (Native(), Brainstate(), Nnx(), Ref())
