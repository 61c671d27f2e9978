"""Small stateful programs, which run with statetx's transforms and states or with those of `mixed_reference`.

A program is a class. An instance holds states and ``step(x)``, which reads and writes them; ``x`` is ``float[3]``, of
the default float type: the laws are checked in float64, where a wrong term cannot hide among rounding errors.

Every output depends on ``x`` by a function with first and second derivatives other than zero, so that a gradient
lost on the way shows; every program with parameters multiplies them with ``x``, for the same reason.
"""

from __future__ import annotations

import inspect
from typing import Any, ClassVar

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
from libraries import LIBRARIES, Cells, Rng
from mixed_cells import Cell

import statetx

X = np.array([0.3, -0.7, 1.1])
W = np.array([[0.5, -0.2, 0.1], [0.3, 0.8, -0.4], [-0.6, 0.2, 0.9]])
U = np.array([[0.1, 0.7, -0.3], [-0.5, 0.4, 0.2], [0.6, -0.1, 0.3]])


def strong(x: float) -> jax.Array:
    """An array of the default float type; ``jnp.array(0.5)`` is weakly typed, which a loop would promote."""
    return jnp.array(np.array(x))


class Program:
    """Base of the corpus. A program has ``setup()``, which makes the states, and ``body(x)``.

    `api` has the transforms: the module statetx, or a `mixed_reference.Reference`, of which the program then is one.

    Attributes:
        writes: whether a step writes states; those that do not also run under plain jax transforms.
        loops: whether a step may be the body of a loop.
        order_in_loops: up to which derivative a loop in JAX equals the same steps written out. One only where a
            custom_jvp rule disagrees with its function: jax.lax.scan differentiates such a rule another way.
        grows: whether the first step creates states.
        wrt: names of the states to differentiate with respect to.
        variant: the library whose states the program is made of.
        runs: how often `step` was run.
    """

    writes: ClassVar[bool] = True
    loops: ClassVar[bool] = True
    order_in_loops: ClassVar[int] = 2
    grows: ClassVar[bool] = False
    wrt: ClassVar[tuple[str, ...]] = ()
    variant: ClassVar[str] = "statetx"

    def __init__(self, api: Any = statetx) -> None:
        self.runs = 0
        self.api = api
        self.library = LIBRARIES[self.variant] if api is statetx else Cells(api, self.variant)
        if api is not statetx:  # methods that the class body rematerializes, as the reference does it
            for name, method in inspect.getmembers_static(type(self), lambda x: hasattr(x, "__wrapped__")):
                setattr(self, name, api.remat(method.__wrapped__.__get__(self)))
        self.setup()

    def step(self, x: jax.Array) -> Any:
        self.runs += 1
        return self.body(x)

    def cells(self) -> dict[str, Any]:
        """The states by name, each once."""
        kinds = (statetx.State, brainstate.State, Cell, Rng)
        by_id: dict[int, tuple[str, Any]] = {}
        for name, state in vars(self).items():
            if isinstance(state, kinds):
                by_id.setdefault(id(state), (name, state))
        return dict(by_id.values())

    def values(self) -> dict[str, Any]:
        return {name: self.library.get(state) for name, state in self.cells().items()}

    def targets(self) -> dict[str, Any]:
        return {name: state for name, state in self.cells().items() if name in self.wrt}


class ReadModifyWrite(Program):
    """A float that is read, changed by the argument and used before and after."""

    wrt = ("s",)

    def setup(self):
        self.s = self.library.make(jnp.array([1.0, 2.0, -1.0]))

    def body(self, x):
        before = self.s.value
        self.s.value = before * 0.5 + jnp.tanh(x)
        return self.s.value * before + x**3


class ReadOnly(Program):
    """Parameters that are only read."""

    writes = False
    wrt = ("w", "b")

    def setup(self):
        self.w = self.library.param(jnp.asarray(W))
        self.b = self.library.param(jnp.array([0.1, -0.2, 0.3]))

    def body(self, x):
        return jnp.tanh(self.w.value @ x + self.b.value)


class WriteThenRead(Program):
    """The state is written before it is read: its old value is unused."""

    wrt = ("w",)

    def setup(self):
        self.w = self.library.param(jnp.asarray(W))
        self.s = self.library.make(jnp.array([7.0, 7.0, 7.0]))

    def body(self, x):
        self.s.value = self.w.value @ x
        y = self.s.value**2
        self.s.value = y + self.s.value
        return jnp.sin(self.s.value) + y


class MutatedDict(Program):
    """A state whose dict is changed in place."""

    def setup(self):
        self.d = self.library.make({"n": strong(1.0), "x": jnp.zeros(3)})

    def body(self, x):
        self.d.value["x"] = self.d.value["x"] + jnp.sin(x)
        self.d.value["n"] = self.d.value["n"] * 2
        return self.d.value["x"] * self.d.value["n"] + x**2


class Dropout(Program):
    """Two masks a step; the recomputation must see both of them again."""

    wrt = ("w",)

    def setup(self):
        self.w = self.library.param(jnp.asarray(W))
        self.rng = self.library.rng(17)

    def body(self, x):
        keep = jax.random.bernoulli(self.library.draw(self.rng), 0.7, (3,))
        h = jnp.where(keep, jnp.tanh(self.w.value @ x), 0.0)
        noise = jax.random.normal(self.library.draw(self.rng), (3,))
        return h * noise + x**2


class _BatchNorm(Program):
    """Running statistics under an inner remat, with a training flag; subclasses pass the flag in different ways."""

    wrt = ("scale",)

    def setup(self):
        self.mean = self.library.make(jnp.zeros(()))
        self.var = self.library.make(jnp.ones(()))
        self.scale = self.library.param(strong(1.3))

    def _norm(self, x, training=True):
        if training:
            mean, var = x.mean(), x.var()
            self.mean.value = 0.8 * self.mean.value + 0.2 * mean
            self.var.value = 0.8 * self.var.value + 0.2 * var
        else:
            mean, var = self.mean.value, self.var.value
        return (x - mean) / jnp.sqrt(var + 0.1) * self.scale.value

    def norm(self, x, training):
        raise NotImplementedError

    def body(self, x):
        y = self.norm(x, True)
        z = self.norm(y * y, False)
        return y + z


class BatchNormKeyword(_BatchNorm):
    inner = statetx.remat(_BatchNorm._norm, policy="everything_saveable")

    def norm(self, x, training):
        return self.inner(x=x, training=training)


class BatchNormStaticArgnums(_BatchNorm):
    """The flag is argument 2 as the class body writes it; a list, which cannot be hashed, is as good a flag."""

    inner = statetx.remat(static_argnums=2)(_BatchNorm._norm)

    def norm(self, x, training):
        return self.inner(x, [True] if training else [])


class BatchNormStaticArray(_BatchNorm):
    """The flag is an array, which must stay concrete for Python's ``if``."""

    inner = statetx.remat(static_argnames="training")(_BatchNorm._norm)
    counted_from_end = statetx.remat(static_argnums=-1)(_BatchNorm._norm)

    def setup(self):
        super().setup()
        self.on, self.off = jnp.array(True), jnp.array(False)

    def norm(self, x, training):
        return self.inner(x, training=self.on) if training else self.counted_from_end(x, self.off)


class BatchNormAttribute(_BatchNorm):
    """The flag is an undeclared attribute that changes between two calls of one step."""

    @statetx.remat
    def inner(self, x):
        return self._norm(x, self.training)

    def norm(self, x, training):
        self.training = training
        return self.inner(x)


class Rnn(Program):
    """Two steps of a recurrent cell, the second under an inner remat."""

    wrt = ("w", "u", "h")

    def setup(self):
        self.w, self.u = self.library.param(jnp.asarray(W)), self.library.param(jnp.asarray(U))
        self.h = self.library.make(jnp.array([0.1, 0.0, -0.1]))

    def cell(self, x):
        self.h.value = jnp.tanh(self.w.value @ self.h.value + self.u.value @ x)
        return self.h.value

    def body(self, x):
        return self.cell(x) + self.api.remat(self.cell)(0.5 * x)


class Recursive(Program):
    """``recursive_checkpoint`` of the JAX documentation over five layers that share a counter."""

    wrt = ("w",)

    def setup(self):
        self.w = self.library.param(jnp.linspace(0.5, 1.5, 5))
        self.n = self.library.make(strong(0.0))

    def layer(self, i):
        def apply(x):
            self.n.value = self.n.value * 2 + i
            return jnp.sin(self.w.value[i] * x + 0.1 * self.n.value)

        return apply

    def body(self, x):
        def recursive_checkpoint(funs):
            if len(funs) == 1:
                return funs[0]
            if len(funs) == 2:
                first, second = funs
                return lambda x: first(second(x))
            first = recursive_checkpoint(funs[: len(funs) // 2])
            second = recursive_checkpoint(funs[len(funs) // 2 :])
            return lambda x: first(self.api.remat(second)(x))

        return recursive_checkpoint([self.layer(i) for i in range(5)])(x)


class Nested(Program):
    """A remat within a remat; each writes the same state before and after the other."""

    wrt = ("s",)

    def setup(self):
        self.s = self.library.make(strong(0.7))
        self.n = self.library.make(jnp.array(0, jnp.int32))

    def body(self, x):
        @self.api.remat(policy=jax.checkpoint_policies.everything_saveable)
        def inner(y):
            self.n.value += 1
            self.s.value = self.s.value + 0.1 * jnp.sum(y)
            return jnp.cos(y) * self.s.value

        @self.api.remat
        def outer(y):
            self.s.value = self.s.value + 1.0
            z = inner(jnp.sin(y))
            self.s.value = jnp.tanh(self.s.value)
            return z + inner(z)

        return outer(x) * self.s.value


class Shared(Program):
    """Two submodules write one state, one of them under remat."""

    class Sub:
        def __init__(self, state, gain):
            self.state, self.gain = state, gain

        def __call__(self, x):
            self.state.value = self.state.value + self.gain * x
            return self.state.value * x

    def setup(self):
        self.total = self.library.make(jnp.zeros(3))
        self.first = self.Sub(self.total, 2.0)
        self.second = self.api.remat(self.Sub)(self.total, -0.5)

    def body(self, x):
        return self.second(self.first(x))


class LazyInit(Program):
    """The first step creates a state, which stays."""

    loops = False
    grows = True

    def setup(self):
        self.n = self.library.make(jnp.array(0, jnp.int32))

    def body(self, x):
        self.n.value += 1
        if not hasattr(self, "w"):
            self.w = self.library.param(jnp.sin(x))
        self.w.value = self.w.value + x
        return self.w.value * x


class Discrete(Program):
    """Integer and bool states; the bool selects the branch."""

    def setup(self):
        self.i = self.library.make(jnp.array([1, 2, 3], jnp.int32))
        self.flag = self.library.make(jnp.array(True))

    def body(self, x):
        y = jnp.where(self.flag.value, jnp.sin(x), jnp.cos(x)) * self.i.value.astype(x.dtype)
        self.i.value = self.i.value + jnp.where(self.flag.value, 1, 2)
        self.flag.value = ~self.flag.value
        return y


class PythonNumbers(Program):
    """States that hold a Python int and a Python float: weakly typed where they become arrays."""

    def setup(self):
        self.n = self.library.make(0)
        self.rate = self.library.make(0.5)

    def body(self, x):
        self.n.value += 1
        self.rate.value = self.rate.value * 0.5
        return jnp.sin(x) * self.rate.value


class Constants(Program):
    """Writes and returns arrays that depend on nothing; under a trace, JAX may replace them by literals."""

    def setup(self):
        self.s = self.library.make(strong(0.5))
        self.v = self.library.make(jnp.ones(3))
        self.i = self.library.make(jnp.array(3, jnp.int32))

    @statetx.remat
    def inner(self, x):
        y = x * self.s.value + self.v.value
        self.s.value = jnp.asarray(np.array(2.0), x.dtype)
        self.v.value = jnp.zeros(3)
        self.i.value = jnp.array(7, jnp.int32)
        return y**2, jnp.asarray(np.array(1.0)), jnp.zeros(()), jnp.arange(3), jnp.array(0.25), jnp.array(True)

    def body(self, x):
        return self.inner(x)


class Blob:
    """No pytree."""


BLOB = Blob()


class Objects(Program):
    """Returns objects that are not arrays; the arrays among them are still differentiated."""

    def setup(self):
        self.s = self.library.make(strong(2.0))

    @statetx.remat
    def inner(self, x):
        self.s.value = self.s.value * 1.5
        return {"y": self.s.value * jnp.sin(x), "name": "inner", "blob": BLOB, "none": None, "type": int}

    def body(self, x):
        out = self.inner(x)
        assert out["blob"] is BLOB and out["type"] is int and out["name"] == "inner"
        return {**out, "z": out["y"] ** 2, "n": 3}


@jax.custom_vjp
def _straight_through(x):
    return jnp.round(4 * x) / 4


_straight_through.defvjp(lambda x: (_straight_through(x), None), lambda _, ct: (ct,))


@jax.custom_jvp
def _scaled(x):
    return jnp.sin(x)


@_scaled.defjvp
def _scaled_jvp(primals, tangents):
    return _scaled(primals[0]), 3.0 * jnp.cos(primals[0]) * tangents[0]


class CustomRules(Program):
    """A custom_vjp and a custom_jvp whose rules differ from the derivatives of the functions."""

    order_in_loops = 1
    wrt = ("s",)

    def setup(self):
        self.s = self.library.make(jnp.array([0.2, 0.4, 0.6]))

    def body(self, x):
        y = self.api.remat(lambda v: _straight_through(v * self.s.value))(x)
        self.s.value = _scaled(self.s.value + y)
        return y**2 + self.s.value


class StaticArray(Program):
    """An inner remat with a concrete array as a static argument, which Python's control flow reads."""

    wrt = ("s",)

    def setup(self):
        self.s = self.library.make(jnp.array([1.0, 2.0, 3.0]))
        self.order = jnp.array([2, 0, 1])

    def body(self, x):
        @self.api.remat(static_argnums=(1,), static_argnames="power")
        def permute(y, order, *, power):
            with jax.ensure_compile_time_eval():
                places = [int(i) for i in order]
                exponent = int(power.sum())
            self.s.value = jnp.stack([self.s.value[i] for i in places])
            return self.s.value * y**exponent

        return permute(x, self.order, power=np.array([1, 2]))


class Branches(Program):
    """jax.lax control flow inside, which reads states and writes none."""

    wrt = ("w",)

    def setup(self):
        self.w = self.library.param(jnp.array([0.3, 0.6, 0.9]))
        self.s = self.library.make(strong(1.0))

    def body(self, x):
        y = jax.lax.cond(self.s.value > 2, lambda z: z * self.w.value, lambda z: z - self.w.value**2, x)
        total, _ = jax.lax.scan(lambda c, _: (jnp.sin(c * self.w.value), None), y, length=2)
        self.s.value = self.s.value * 3
        return total


class StoredCarries(Program):
    """A loop with a state in its carry, reversed from two slots that hold residuals, too."""

    wrt = ("w", "h")

    def setup(self):
        self.w = self.library.param(jnp.array([0.3, 0.6, 0.9]))
        self.h = self.library.make(jnp.array([0.1, 0.0, -0.1]))

    def body(self, x):
        def step(y, _):
            self.h.value = jnp.sin(self.h.value * self.w.value + y)
            return y, None

        self.api.scan(step, x, None, 5, checkpoint=statetx.policies.Slots(2))
        return self.h.value * x


def _brainstate(cls: type[Program]) -> type[Program]:
    """The same program made of brainstate's states."""

    class Variant(cls):
        variant = "brainstate"

    Variant.__name__ = Variant.__qualname__ = f"{cls.__name__}_brainstate"
    return Variant


NATIVE: list[type[Program]] = [
    ReadModifyWrite,
    ReadOnly,
    WriteThenRead,
    MutatedDict,
    Dropout,
    BatchNormKeyword,
    BatchNormStaticArgnums,
    BatchNormStaticArray,
    BatchNormAttribute,
    Rnn,
    Recursive,
    Nested,
    Shared,
    LazyInit,
    Discrete,
    PythonNumbers,
    Constants,
    Objects,
    CustomRules,
    StaticArray,
    Branches,
    StoredCarries,
]

FOREIGN: list[type[Program]] = [
    _brainstate(cls)
    for cls in (
        ReadModifyWrite,
        ReadOnly,
        WriteThenRead,
        Dropout,
        BatchNormKeyword,
        Rnn,
        Nested,
        LazyInit,
        Shared,
        Discrete,
    )
]

PROGRAMS = NATIVE + FOREIGN
