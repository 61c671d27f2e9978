"""Other libraries' dialects of the behavior table: each row as users of the library would write it.

If a library has more than one way to write a program, its dialects are tried in turn, and the first that is right
counts. If a library lacks a transform, JAX's is applied to its functions.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import brainstate
import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import kinds
import libraries
from behaviors import PARAMETERS, RANDOM, VALUES, Call, Dialect, Flags, Row, namespace, scalar, tangent
from flax import nnx

bst = brainstate.transform


class StaticModel(Dialect):
    """Libraries whose models are not pytrees, so that a model must be a static argument."""

    def static(self, row: Row, bound: bool) -> dict[str, Any]:
        options = super().static(row, bound)
        return options if bound else {**options, "static_argnums": (0, *options.get("static_argnums", ()))}


class Functional(Dialect):
    """Libraries whose models are pure functions of their states' values; a model here is the result of `build`.

    A model has ``state``, the values by name, and ``apply(values, *args, **kwargs) -> (out, values)``.
    """

    def call(self, model: Any, row: Row, call: Call) -> Any:
        x, *args = call.args

        def pure(values: dict[str, Any], x: Any) -> tuple[Any, dict[str, Any]]:
            return model.apply(values, x, *args, **call.kwargs)

        for name in reversed(row.around):
            pure = getattr(self, name)(pure)
        out, model.state = pure(dict(model.state), jnp.asarray(x))
        return out

    def values(self, model: Any, row: Row) -> dict[str, Any]:
        return {k: v for k, v in model.state.items() if k != RANDOM}

    def poke(self, model: Any, name: str, value: Any) -> None:
        model.state[name] = value

    def jit(self, pure: Callable) -> Callable:
        return jax.jit(pure)

    def grad(self, pure: Callable) -> Callable:
        def gradients(values: dict[str, Any], x: Any) -> tuple[Any, dict[str, Any]]:
            parameters = {k: v for k, v in values.items() if k in PARAMETERS}
            others = None

            def loss(parameters: dict[str, Any], x: Any) -> tuple[jax.Array, dict[str, Any]]:
                nonlocal others
                out, new = pure({**values, **parameters}, x)
                arrays, others = split(new)
                return scalar(out), arrays

            (value, arrays), (of_w, of_x) = jax.value_and_grad(loss, (0, 1), has_aux=True)(parameters, x)
            return {"value": value, "x": of_x, **of_w}, others(arrays)  # type: ignore[misc]

        return gradients

    def jvp(self, pure: Callable) -> Callable:
        def pushed(values: dict[str, Any], x: Any) -> tuple[Any, dict[str, Any]]:
            out, moved, new = jax.jvp(lambda x: pure(values, x), (x,), (tangent(x),), has_aux=True)
            return (out, moved), new

        return pushed

    def vjp(self, pure: Callable) -> Callable:
        def pulled(values: dict[str, Any], x: Any) -> tuple[Any, dict[str, Any]]:
            out, pullback, new = jax.vjp(lambda x: pure(values, x), x, has_aux=True)
            (of_x,) = pullback(jax.tree.map(tangent, out))
            return (out, of_x), new

        return pulled

    def linearize(self, pure: Callable) -> Callable:
        def linear(values: dict[str, Any], x: Any) -> tuple[Any, dict[str, Any]]:
            out, push, new = jax.linearize(lambda x: pure(values, x), x, has_aux=True)
            return (out, push(tangent(x))), new

        return linear

    def hessian(self, pure: Callable) -> Callable:
        def second(values: dict[str, Any], x: Any) -> tuple[Any, dict[str, Any]]:
            def loss(x: Any) -> tuple[jax.Array, dict[str, Any]]:
                out, new = pure(values, x)
                return scalar(out), new

            return jax.hessian(loss, has_aux=True)(x)

        return second


def split(tree: Any) -> tuple[list, Callable[[list], Any]]:
    leaves, treedef = jax.tree.flatten(tree)
    mask = [hasattr(leaf, "dtype") for leaf in leaves]

    def merge(arrays: list) -> Any:
        given = iter(arrays)
        return treedef.unflatten([next(given) if m else leaf for m, leaf in zip(mask, leaves, strict=True)])

    return [leaf for leaf, m in zip(leaves, mask, strict=True) if m], merge


# -- plain JAX -----------------------------------------------------------------------------------------------------


class Tree:
    """Base class of models as pytrees: arrays and Refs are leaves, the flags are part of the structure."""

    def __init_subclass__(cls) -> None:
        def flatten(model: Any) -> tuple[tuple, tuple]:
            cells = vars(model).copy()
            flags = cells.pop("flags")
            return tuple(cells.values()), (flags, tuple(cells))

        def unflatten(static: tuple, leaves: tuple) -> Any:
            model = object.__new__(cls)
            flags, names = static
            vars(model).update(zip(names, leaves, strict=True), flags=flags)
            return model

        jax.tree_util.register_pytree_node(cls, flatten, unflatten)


class Jax(kinds.Ref):
    """Parameters are arrays and differentiated arguments; other states are Refs in a pytree."""

    base = Tree
    api = jax
    control = jax.lax

    def __init__(self, name: str, own: str = "decorator", kind: str | None = None):
        self.name, self.own, self.library = name, own, OfKind(kind)

    def vmap(self, model: Any, f: Callable, xs: Any) -> Any:
        if not hasattr(model, "cell_rng"):
            return super().vmap(model, f, xs)

        def with_key(key: Any, x: Any) -> Any:
            outer = model.cell_rng
            model.cell_rng = self.cell(RANDOM, key)
            try:
                return f(model, x)
            finally:
                model.cell_rng = outer

        return jax.vmap(with_key)(jax.random.split(model.key(), len(xs)), xs)


class OfKind(libraries.Ref):
    """Refs of a kind that JAX names."""

    def __init__(self, kind: str | None):
        self.kind = kind

    def state(self, value: Any) -> Any:
        return jax.new_ref(value, kind=self.kind)


class JaxPure(Functional):
    """The same models in pure functions: Refs are made from values on entry, and their values are returned."""

    def __init__(self, name: str, kind: str | None = None):
        self.name, self.refs = name, Jax(name, kind=kind)

    class Model:
        def __init__(self, refs: Jax, bare: Any):
            self.refs, self.bare = refs, bare
            self.state = self._values()

        @property
        def flags(self) -> Flags:
            return self.bare.flags

        @flags.setter
        def flags(self, flags: Flags) -> None:
            self.bare.flags = flags

        def apply(self, values: dict[str, Any], *args: Any, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
            for name, value in values.items():
                setattr(self.bare, f"cell_{name}", self.refs.cell(name, value))
            return self.bare.top(*args, **kwargs), self._values()

        def _values(self) -> dict[str, Any]:
            cells = {name: cell for name, cell in vars(self.bare).items() if name.startswith("cell_")}
            return {name.removeprefix("cell_"): self.refs.get(cell) for name, cell in cells.items()}

    def build(self, row: Row) -> Any:
        refs = copy.copy(self.refs)
        refs.remat = self.remat  # type: ignore[method-assign]
        return self.Model(refs, refs.build(row))

    def remat(self, fun: Any, **options: Any) -> Any:
        return jax.checkpoint(fun, **options)


# -- flax.linen ----------------------------------------------------------------------------------------------------


class Linen(Functional):
    """Modules with a collection of parameters and a mutable one of states; lifted transforms inside."""

    name = "flax.linen"

    class Module(nn.Module):
        flags: Flags = Flags()

        def __getattr__(self, name: str) -> Any:
            return self.get_variable(collection(name), name) if name in VALUES else super().__getattr__(name)

        def __setattr__(self, name: str, value: Any) -> None:
            if name in VALUES:
                self.put_variable(collection(name), name, value)
            else:
                super().__setattr__(name, value)

        def has(self, name: str) -> bool:
            return self.has_variable(collection(name), name)

        def create(self, name: str) -> None:
            self.put_variable(collection(name), name, VALUES[name]())

        def key(self) -> Any:
            return self.make_rng(RANDOM)

        def scan(self, f: Callable, carry: Any, xs: Any) -> Any:
            lifted = nn.scan(f, variable_broadcast="params", variable_carry="states", split_rngs={RANDOM: True})
            return lifted(self, carry, xs)

        def cond(self, pred: Any, f: Callable, g: Callable, *operands: Any) -> Any:
            return nn.cond(pred, f, g, self, *operands)

        def while_loop(self, cond: Callable, f: Callable, carry: Any) -> Any:
            return nn.while_loop(lambda self, carry: cond(carry), f, self, carry, carry_variables="states")

        def vmap(self, f: Callable, xs: Any) -> Any:
            return nn.vmap(f, variable_axes={"params": None, "states": None}, split_rngs={RANDOM: True})(self, xs)

    class Model:
        """A module's class and the variables that it is applied to."""

        def __init__(self, cls: type, state: dict[str, Any]):
            self.cls, self.state, self.flags = cls, state, Flags()

        def apply(self, values: dict[str, Any], *args: Any, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
            variables: dict[str, dict[str, Any]] = {"params": {}, "states": {}}
            for name in values.keys() - {RANDOM}:
                variables[collection(name)][name] = values[name]
            new_key, rngs = {}, {}
            if RANDOM in values:
                new_key[RANDOM], rngs[RANDOM] = jax.random.split(values[RANDOM])
            module = self.cls(flags=self.flags)
            out, new = module.apply(variables, *args, **kwargs, mutable=["states"], rngs=rngs, method="top")
            return out, {**variables["params"], **variables["states"], **new.get("states", {}), **new_key}

    def build(self, row: Row) -> Any:
        cls = type("Module", (Linen.Module,), namespace(self, row))
        if row.form == "class":
            cls = self.rematerialize(row, cls)
        return self.Model(cls, initial(row))

    def remat(self, fun: Any, **options: Any) -> Any:
        return nn.remat(fun, **options)


def collection(name: str) -> str:
    return "params" if name in PARAMETERS else "states"


def initial(row: Row) -> dict[str, Any]:
    return {name: jax.random.key(0) if name == RANDOM else VALUES[name]() for name in row.states}


# -- haiku ---------------------------------------------------------------------------------------------------------


class Haiku(StaticModel, Functional):
    """Modules in a function that `hk.transform_with_state` makes pure."""

    name = "haiku"
    own = "bound method"  # hk.remat may not be called outside of a transformed function

    class Module(hk.Module):
        def __init__(self, flags: Flags):
            super().__init__("model")
            self.flags = flags

        def key(self) -> Any:
            return hk.next_rng_key()

        def has(self, name: str) -> bool:
            return False  # hk.get_state would create it

        def create(self, name: str) -> None:
            value = VALUES[name]()
            hk.get_state(name, value.shape, value.dtype, init=lambda shape, dtype: value)

        def scan(self, f: Callable, carry: Any, xs: Any) -> Any:
            return hk.scan(lambda c, x: f(self, c, x), carry, xs)

        def cond(self, pred: Any, f: Callable, g: Callable, *operands: Any) -> Any:
            return hk.cond(pred, lambda *xs: f(self, *xs), lambda *xs: g(self, *xs), *operands)

        def while_loop(self, cond: Callable, f: Callable, carry: Any) -> Any:
            return hk.while_loop(cond, lambda carry: f(self, carry), carry)

        def vmap(self, f: Callable, xs: Any) -> Any:
            return hk.vmap(lambda x: f(self, x), split_rng=hk.maybe_next_rng_key() is not None)(xs)

    class Model:
        """A module's class and the parameters and states that it is applied to."""

        def __init__(self, cls: type, state: dict[str, Any]):
            self.cls, self.state, self.flags = cls, state, Flags()

        def apply(self, values: dict[str, Any], *args: Any, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
            params = {k: v for k, v in values.items() if k in PARAMETERS}
            states = {k: v for k, v in values.items() if k not in PARAMETERS | {RANDOM}}
            new_key, key = {}, None
            if RANDOM in values:
                new_key[RANDOM], key = jax.random.split(values[RANDOM])
            pure = hk.transform_with_state(lambda *args, **kwargs: self.cls(self.flags).top(*args, **kwargs)).apply
            out, new = pure({"model": params}, {"model": states}, key, *args, **kwargs)
            return out, {**params, **new["model"], **new_key}

    def build(self, row: Row) -> Any:
        members = {name: self._property(name) for name in VALUES} | namespace(self, row)
        cls = type(hk.Module)("Model", (Haiku.Module,), members)
        if row.form == "class":
            cls = self.rematerialize(row, cls)
        return self.Model(cls, initial(row))

    @staticmethod
    def _property(name: str) -> property:
        if name in PARAMETERS:
            shape = VALUES[name]().shape
            return property(lambda self: hk.get_parameter(name, shape, init=lambda shape, dtype: VALUES[name]()))
        return property(lambda self: hk.get_state(name), lambda self, value: hk.set_state(name, value))

    def remat(self, fun: Any, **options: Any) -> Any:
        return hk.remat(fun, **options)


# -- equinox -------------------------------------------------------------------------------------------------------


class Equinox(Functional):
    """Modules with parameters; other states are an additional argument and result of every method.

    A row's body works on a `Box`, made of both on entry.
    """

    name = "equinox"

    class Module(eqx.Module):
        parameters: dict[str, Any]
        flags: Flags = eqx.field(static=True)

    @dataclasses.dataclass
    class Box:
        module: Any
        state: dict[str, Any]

        def __getattr__(self, name: str) -> Any:
            for values in (self.module.parameters, self.state):
                if name in values:
                    return values[name]
            raise AttributeError(name)

        def __setattr__(self, name: str, value: Any) -> None:
            if name in VALUES:
                self.state = {**self.state, name: value}
            else:
                super().__setattr__(name, value)

        @property
        def flags(self) -> Flags:
            return self.module.flags

        def block(self, *args: Any, **kwargs: Any) -> Any:
            out, self.state = self.module.block(self.state, *args, **kwargs)
            return out

        def key(self) -> Any:
            next_key, key = jax.random.split(self.state[RANDOM])
            self.state = {**self.state, RANDOM: next_key}
            return key

        def has(self, name: str) -> bool:
            return name in self.state

        def create(self, name: str) -> None:
            self.state = {**self.state, name: VALUES[name]()}

        def scan(self, f: Callable, carry: Any, xs: Any) -> Any:
            def step(pair: tuple, x: Any) -> tuple[tuple, Any]:
                state, carry = pair
                box = Equinox.Box(self.module, state)
                carry, y = f(box, carry, x)
                return (box.state, carry), y

            (self.state, carry), ys = jax.lax.scan(step, (self.state, carry), xs)
            return carry, ys

        def cond(self, pred: Any, f: Callable, g: Callable, *operands: Any) -> Any:
            branches = [threaded(lambda box, *xs, f=f: f(box, *xs)) for f in (f, g)]
            pure = [lambda state, *xs, b=b: b(self.module, state, *xs) for b in branches]
            out, self.state = jax.lax.cond(pred, *pure, self.state, *operands)
            return out

        def while_loop(self, cond: Callable, f: Callable, carry: Any) -> Any:
            def step(pair: tuple) -> tuple:
                box = Equinox.Box(self.module, pair[0])
                carry = f(box, pair[1])
                return box.state, carry

            self.state, carry = jax.lax.while_loop(lambda pair: cond(pair[1]), step, (self.state, carry))
            return carry

        def vmap(self, f: Callable, xs: Any) -> Any:
            if RANDOM not in self.state:
                return eqx.filter_vmap(lambda x: f(Equinox.Box(self.module, self.state), x))(xs)
            keys = jax.random.split(self.key(), len(xs))
            return eqx.filter_vmap(lambda key, x: f(Equinox.Box(self.module, {**self.state, RANDOM: key}), x))(keys, xs)

    class Model:
        """A module's class and the parameters and states to make it from."""

        def __init__(self, cls: type, top: Callable, state: dict[str, Any]):
            self.cls, self.top, self.state, self.flags = cls, top, state, Flags()

        def apply(self, values: dict[str, Any], *args: Any, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
            parameters = {k: v for k, v in values.items() if k in PARAMETERS}
            states = {k: v for k, v in values.items() if k not in PARAMETERS}
            module = self.cls(parameters, self.flags)
            out, states = threaded(self.top)(module, states, *args, **kwargs)
            return out, {**parameters, **states}

    def build(self, row: Row) -> Any:
        members = namespace(self, row)
        top = members.pop("top")
        cls = type(self.Module)("Module", (self.Module,), {**members, "__module__": __name__})
        if row.form == "class":
            cls = self.rematerialize(row, cls)
        return self.Model(cls, top, initial(row))

    def method(self, body: Callable) -> Callable:
        return threaded(body)

    def static(self, row: Row, bound: bool) -> dict[str, Any]:
        return {}  # leaves that are not arrays are static

    def remat(self, fun: Any, **options: Any) -> Any:
        return eqx.filter_checkpoint(fun, **options)

    def jit(self, pure: Callable) -> Callable:
        return eqx.filter_jit(pure)


def threaded(body: Callable) -> Callable:
    """The body as a method of a module that takes its states and returns them."""

    def method(self: Any, state: dict[str, Any], *args: Any, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        box = Equinox.Box(self, state)
        return body(box, *args, **kwargs), box.state

    return method


class JaxByHand(Equinox):
    """Plain JAX in the same form: modules are any pytrees, and an argument that is not an array must be declared static."""

    name = "jax"

    class Module(Tree):
        def __init__(self, parameters: dict[str, Any], flags: Flags):
            self.parameters, self.flags = parameters, flags

    def static(self, row: Row, bound: bool) -> dict[str, Any]:
        options = Dialect.static(self, row, bound)
        if "static_argnums" in options:  # the state comes between the model and the other arguments
            options["static_argnums"] = tuple(n + 1 if n >= 0 else n for n in options["static_argnums"])
        return options

    def remat(self, fun: Any, **options: Any) -> Any:
        return jax.checkpoint(fun, **options)

    def jit(self, pure: Callable) -> Callable:
        return jax.jit(pure)


# -- flax.nnx ------------------------------------------------------------------------------------------------------


class Nnx(kinds.Nnx):
    """nnx's transforms, which need the module as an argument; `graph` and `updates` choose among its modes."""

    def __init__(self, name: str, graph: bool = True, updates: bool = True):
        self.name, self.graph, self.updates = name, graph, updates

    def run(self, row: Row) -> tuple[list, dict[str, Any]]:
        with self._mode():
            return super().run(row)

    @contextlib.contextmanager
    def _mode(self) -> Any:
        with nnx.set_graph_mode(self.graph), nnx.set_graph_updates(self.updates):
            yield

    def call(self, model: Any, row: Row, call: Call) -> Any:
        x, *args = call.args

        def fun(model: Any, x: Any) -> Any:
            return model.top(x, *args, **call.kwargs)

        for name in reversed(row.around):
            fun = getattr(self, name)(model, fun)
        return fun(model, jnp.asarray(x))

    def remat(self, fun: Any, **options: Any) -> Any:
        return nnx.remat(fun, **options)

    def scan(self, model: Any, f: Callable, carry: Any, xs: Any) -> Any:
        def step(pair: tuple, x: Any) -> tuple[tuple, Any]:
            model, carry = pair
            carry, y = f(model, carry, x)
            return (model, carry), y

        (_, carry), ys = nnx.scan(step, in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))((model, carry), xs)
        return carry, ys

    def cond(self, model: Any, pred: Any, f: Callable, g: Callable, *operands: Any) -> Any:
        return nnx.cond(pred, f, g, model, *operands)

    def while_loop(self, model: Any, cond: Callable, f: Callable, carry: Any) -> Any:
        def step(pair: tuple) -> tuple:
            model, carry = pair
            return model, f(model, carry)

        return nnx.while_loop(lambda pair: cond(pair[1]), step, (model, carry))[1]

    def vmap(self, model: Any, f: Callable, xs: Any) -> Any:
        axes = {nnx.RngState: 0, ...: None}
        if self.graph and self.updates:
            with nnx.split_rngs(model, splits=len(xs)):
                return nnx.vmap(f, in_axes=(nnx.StateAxes(axes), 0))(model, xs)
        lanes = nnx.split_rngs(model, splits=len(xs))
        return nnx.vmap(f, in_axes=(nnx.prefix(lanes, axes), 0))(lanes, xs)

    def jit(self, model: Any, fun: Callable) -> Callable:
        return nnx.jit(fun)

    def grad(self, model: Any, fun: Callable) -> Callable:
        def with_graph(model: Any, x: Any) -> dict[str, Any]:
            arguments = (nnx.DiffState(0, nnx.Param), 1)
            value, (of_w, of_x) = nnx.value_and_grad(lambda model, x: scalar(fun(model, x)), argnums=arguments)(
                model, x
            )
            return {"value": value, "x": of_x, **named(of_w)}

        def split(model: Any, x: Any) -> dict[str, Any]:
            graph, parameters, others = nnx.split(model, nnx.Param, ...)

            def loss(parameters: Any, others: Any, x: Any) -> jax.Array:
                return scalar(fun(nnx.merge(graph, parameters, others), x))

            value, (of_w, of_x) = nnx.value_and_grad(loss, argnums=(0, 2))(parameters, others, x)
            return {"value": value, "x": of_x, **named(of_w)}

        return with_graph if self.graph and self.updates else split

    def jvp(self, model: Any, fun: Callable) -> Callable:
        def pushed(model: Any, x: Any) -> Any:
            out, out_tangent, new = jax.jvp(functional(model, fun), (x,), (tangent(x),), has_aux=True)
            nnx.update(model, new)
            return out, out_tangent

        return pushed

    def vjp(self, model: Any, fun: Callable) -> Callable:
        def pulled(model: Any, x: Any) -> Any:
            out, pullback, new = jax.vjp(functional(model, fun), x, has_aux=True)
            nnx.update(model, new)
            (of_x,) = pullback(jax.tree.map(tangent, out))
            return out, of_x

        return pulled

    def linearize(self, model: Any, fun: Callable) -> Callable:
        def linear(model: Any, x: Any) -> Any:
            out, push, new = jax.linearize(functional(model, fun), x, has_aux=True)
            nnx.update(model, new)
            return out, push(tangent(x))

        return linear

    def hessian(self, model: Any, fun: Callable) -> Callable:
        def second(model: Any, x: Any) -> Any:
            out, new = jax.hessian(functional(model, lambda model, x: scalar(fun(model, x))), has_aux=True)(x)
            nnx.update(model, new)
            return out

        return second


def functional(model: Any, fun: Callable) -> Callable:
    """A pure function as in nnx's guide for JAX's own transforms: split, merge inside, and return the new state."""
    graph, state = nnx.split(model)

    def pure(x: Any) -> tuple[Any, Any]:
        model = nnx.merge(graph, state, copy=True)
        return fun(model, x), nnx.state(model)

    return pure


def named(gradients: Any) -> dict[str, Any]:
    return {name.removeprefix("cell_"): value.get_value() for name, value in gradients.items()}


# -- brainstate ----------------------------------------------------------------------------------------------------


class Brainstate(StaticModel, kinds.Brainstate):
    """brainstate's transforms, which find states in closures."""

    base = brainstate.nn.Module
    api = control = bst

    def __init__(self, name: str, own: str):
        self.name, self.own = name, own

    def vmap(self, model: Any, f: Callable, xs: Any) -> Any:
        return bst.vmap2(lambda x: f(model, x))(xs)

    def grad(self, model: Any, fun: Callable) -> Callable:
        parameters = self.parameters(model)

        def gradients(x: Any) -> dict[str, Any]:
            def loss(x: Any) -> jax.Array:
                return scalar(fun(x))

            if not parameters:
                of_x, value = bst.grad(loss, argnums=0, return_value=True)(x)
                return {"value": value, "x": of_x}
            (of_w, of_x), value = bst.grad(loss, parameters, argnums=0, return_value=True)(x)
            return {"value": value, "x": of_x, **of_w}

        return gradients

    def vjp(self, model: Any, fun: Callable) -> Callable:
        def pulled(x: Any) -> Any:
            out, pullback = bst.vjp(fun, x)
            return out, pullback(jax.tree.map(tangent, out))

        return pulled

    def linearize(self, model: Any, fun: Callable) -> Callable:
        def linear(x: Any) -> Any:
            stateful = bst.StatefulFunction(fun, return_only_write=False).make_jaxpr(x)
            states = stateful.get_states(x)

            def pure(x: Any) -> tuple[Any, list]:
                new, out = stateful.jaxpr_call([state.value for state in states], x)
                return out, new

            out, push, new = jax.linearize(pure, x, has_aux=True)
            for state, value in zip(states, new, strict=True):
                state.value = value
            return out, push(tangent(x))

        return linear

    def hessian(self, model: Any, fun: Callable) -> Callable:
        return bst.hessian(lambda x: scalar(fun(x)), argnums=0)
