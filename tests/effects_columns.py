"""Every transform crossed with every side effect: the columns.

A column is a function of a model and a number that has one side effect.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback
from libraries import LIBRARIES, Cells, Library

import statetx

NO_VALUE = "no value"  # the result of reading a state that raises
GONE = object()  # the value of a state that is in no attribute any more


class Boom(Exception):
    """Raised by a column."""


class Opaque:
    """An object that JAX cannot see into."""

    def __init__(self, content: Any):
        self.content = content


VALUES: dict[str, Callable[[], Any]] = {
    "alpha": lambda: jnp.float32(0.4),
    "weak": lambda: 0.25,
    "items": lambda: [jnp.float32(0.1), jnp.float32(0.2)],
    "table": lambda: {"p": jnp.float32(0.7)},
    "buffer": lambda: np.array([0.5, 0.6], np.float32),
    "mode": lambda: "hot",
    "spare": lambda: jnp.float32(0.9),
}
"""The values of a model's states. A message about one has its name in it."""


class Model:
    """States of one kind as attributes, and a Ref whatever the kind. `api` has the transforms."""

    def __init__(self, kind: Library, column: Column, api: Any = statetx):
        self.kind, self.column = kind, column
        self.api = api
        self.refs = LIBRARIES["ref"] if api is statetx else Cells(api, "ref")
        for name in column.states:
            setattr(self, name, kind.rng(7) if name == "rng" else kind.make(VALUES[name](), name))
        self.ref = self.refs.make(jnp.float32(0.6))

    def effect(self) -> Callable[[Any], Any]:
        def fun(x: Any) -> Any:
            return self.column.effect(self, x)

        return fun

    def get(self, name: str) -> Any:
        return self.kind.get(getattr(self, name))

    def set(self, name: str, value: Any) -> None:
        self.kind.set(getattr(self, name), value)

    def values(self) -> dict[str, Any]:
        """The values of all states, created ones included; "no value" for a state that raises so."""
        out: dict[str, Any] = {"ref": self.refs.get(self.ref)}
        for name, state in states_of(self):
            try:
                out[name] = self.kind.get(state)
            except self.kind.no_value:
                out[name] = NO_VALUE
            if isinstance(out[name], jax.ShapeDtypeStruct):  # of a state that is made while nothing is computed
                out[name] = f"a {out[name].dtype}{list(out[name].shape)} without a value"
        return {name: value for name, value in out.items() if value is not GONE}


def states_of(model: Model) -> list[tuple[str, Any]]:
    return [
        (name, state) for name, state in vars(model).items() if name not in ("kind", "column", "api", "refs", "ref")
    ]


# -- columns ---------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Column:
    """A side effect.

    Attributes:
        effect: the function with the side effect, ``(model, x) -> y``.
        states: the states of the model that it needs.
        kinds: the kinds that can do it at all.
        varies: whether it writes something that depends on `x`.
    """

    name: str
    effect: Callable[[Model, Any], Any]
    states: tuple[str, ...] = ("alpha",)
    kinds: tuple[str, ...] = ("statetx", "brainstate", "nnx", "ref")
    varies: bool = False


COLUMNS: dict[str, Column] = {}
CELLS = ("statetx", "brainstate", "nnx")
HOLDERS = ("statetx", "brainstate")  # nnx hands out copies of containers


def column(name: str, **options: Any) -> Callable[[Callable], Callable]:
    def add(effect: Callable) -> Callable:
        COLUMNS[name] = Column(name, effect, **options)
        return effect

    return add


@column("read")
def _(m, x):
    return x * m.get("alpha")


@column("write", varies=True)
def _(m, x):
    m.set("alpha", 0.5 * x)
    return jnp.sin(x)


@column("read and write", varies=True)
def _(m, x):
    m.set("alpha", m.get("alpha") + 0.5 * x)
    return jnp.sin(m.get("alpha"))


@column("count")
def _(m, x):
    m.set("alpha", m.get("alpha") + 1.0)
    return x * m.get("alpha")


@column("write only")
def _(m, x):
    m.set("alpha", jnp.float32(2.0))
    return jnp.sin(x)


@column("draw", states=("rng",))
def _(m, x):
    return x * jax.random.uniform(m.kind.draw(m.rng))


@column("make and keep", kinds=CELLS)
def _(m, x):
    m.new = m.kind.make(2.0 * x, "new")
    m.kind.set(m.new, m.get("new") + 1.0)
    return x * m.get("new")


@column("make and drop", kinds=CELLS)
def _(m, x):
    state = m.kind.make(2.0 * x, "new")
    m.kind.set(state, m.kind.get(state) + m.get("alpha"))
    return x * m.kind.get(state)


@column("delete", states=("alpha", "spare"))
def _(m, x):
    if hasattr(m, "spare"):
        del m.spare
    return x * m.get("alpha")


@column("list in place", states=("items",), kinds=HOLDERS, varies=True)
def _(m, x):
    m.get("items")[0] = 0.5 * x
    return x * m.get("items")[1]


@column("dict in place", states=("table",), kinds=HOLDERS)
def _(m, x):
    m.get("table")["p"] = m.get("table")["p"] + 1.0
    return x * m.get("table")["p"]


@column("NumPy array in place", states=("buffer",), kinds=HOLDERS)
def _(m, x):
    m.get("buffer")[0] += 1.0
    return jnp.sin(x)


@column("list grows", states=("items",), kinds=HOLDERS)
def _(m, x):
    m.get("items").append(jnp.float32(0.3))
    return x * m.get("items")[0]


@column("structure", kinds=CELLS)
def _(m, x):
    m.set("alpha", {"p": jnp.float32(1.0)})
    return jnp.sin(x)


@column("shape", kinds=CELLS)
def _(m, x):
    m.set("alpha", jnp.ones(2))
    return jnp.sin(x)


@column("dtype", kinds=CELLS)
def _(m, x):
    m.set("alpha", jnp.int32(3))
    return jnp.sin(x)


@column("strong becomes weak", kinds=CELLS)
def _(m, x):
    m.set("alpha", 0.5)
    return jnp.sin(x)


@column("weak becomes strong", states=("weak",), kinds=CELLS)
def _(m, x):
    m.set("weak", jnp.float32(0.5) + m.get("weak"))
    return x * m.get("weak")


@column("string", states=("mode",), kinds=CELLS)
def _(m, x):
    m.set("mode", "cold")
    return jnp.sin(x)


@column("same string", states=("mode",), kinds=CELLS)
def _(m, x):
    m.set("mode", "hot")
    return x if m.get("mode") == "hot" else -x


@column("None", kinds=CELLS)
def _(m, x):
    m.set("alpha", None)
    return jnp.sin(x)


@column("opaque object", kinds=CELLS, varies=True)
def _(m, x):
    m.set("alpha", Opaque(x))
    return jnp.sin(x)


@column("raise", varies=True)
def _(m, x):
    m.set("alpha", 0.5 * x)
    raise Boom


@column("raise and catch")
def _(m, x):
    try:
        m.set("alpha", m.get("alpha") + 1.0)
        raise Boom
    except Boom:
        return x * m.get("alpha")


@column("catch from a remat")
def _(m, x):
    def fails(x):
        m.set("alpha", 5.0 * x)
        raise Boom

    try:
        m.api.remat(fails)(x)
    except Boom:
        pass
    return x * m.get("alpha")


def _nested(wrap: Callable) -> Callable:
    def effect(m: Model, x: Any) -> Any:
        def inner(x: Any) -> Any:
            m.set("alpha", m.get("alpha") + 1.0)
            return x * m.get("alpha")

        return wrap(m.api, inner, x)

    return effect


NESTED: dict[str, Callable[[Any, Callable, Any], Any]] = {
    "remat": lambda t, f, x: t.remat(f)(x),
    "jit": lambda t, f, x: t.jit(f)(x),
    "scan": lambda t, f, x: t.scan(lambda c, _: (f(c), None), x, length=1)[0],
    "cond": lambda t, f, x: t.cond(True, f, lambda x: x, x),
    "vmap": lambda t, f, x: t.vmap(f, axis_size=1, in_axes=None)(x)[0],
    "jvp": lambda t, f, x: t.jvp(f, (x,), (x,))[0],
    "vjp": lambda t, f, x: t.vjp(f, x)[0],
}
for _name, _wrap in NESTED.items():
    COLUMNS[f"write in {_name}"] = Column(f"write in {_name}", _nested(_wrap))


@column("touch by another thread", kinds=CELLS)
def _(m, x):
    m.set("alpha", m.get("alpha") + 1.0)
    seen: list[Any] = []

    def look() -> None:
        try:
            seen.append(m.get("alpha"))
        except statetx.ForeignStateError as e:
            seen.append(e)

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    (what,) = seen
    assert not isinstance(what, jax.core.Tracer), "another thread has got a tracer"
    return x * m.get("alpha")


@column("debug.print")
def _(m, x):
    m.set("alpha", m.get("alpha") + 1.0)
    jax.debug.print("")
    return x * m.get("alpha")


@column("io_callback")
def _(m, x):
    m.set("alpha", m.get("alpha") + 1.0)
    io_callback(lambda: None, None)
    return x * m.get("alpha")


@column("pure_callback")
def _(m, x):
    m.set("alpha", jax.pure_callback(lambda: np.float32(2.0), jax.ShapeDtypeStruct((), jnp.float32)))
    return x * m.get("alpha")


@column("Ref", kinds=CELLS)
def _(m, x):
    m.refs.set(m.ref, m.refs.get(m.ref) + m.get("alpha"))
    return x * m.refs.get(m.ref)
