"""One table of behaviors: calls of rematerialized functions of stateful models, with the expected results.

A `Row` describes one case for any library: a `body`, the method that is rematerialized, reads and writes the model's
states as attributes (``self.n += 1``) and draws keys with ``self.key()``; `top`, if given, calls the rematerialized
``self.block`` in a loop or branch; `around` names the transforms applied to the whole. A `Dialect` writes the row for
one library. The expected results are those of the dialect `kinds.Meaning`, whose transforms and states are those of
`mixed_reference`.

`test_behaviors.py` runs the table for every kind of state that statetx knows, and ``benchmarks/behaviors.py`` runs it
for other libraries and ``benchmarks/report.py`` writes the outcomes to ``docs/comparison.md``.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

X = np.array([0.3, -0.7, 1.1], np.float32)
Y = np.array([-0.2, 0.4, 0.9], np.float32)
W = np.array([[0.5, -0.2, 0.1], [0.3, 0.8, -0.4], [-0.6, 0.2, 0.9]], np.float32)

VALUES: dict[str, Callable[[], Any]] = {
    # parameters, which are differentiated
    "w": lambda: jnp.array(W),
    # other states
    "n": lambda: jnp.zeros((), jnp.int32),
    "s": lambda: jnp.array([1.0, 2.0, -1.0]),
    "mean": lambda: jnp.zeros(()),
    "var": lambda: jnp.ones(()),
    "tree": lambda: {"a": jnp.ones(3), "b": (jnp.zeros(()), jnp.arange(3))},
    "half": lambda: jnp.ones(3, jnp.bfloat16),
    "buffer": lambda: jnp.zeros((4, 3)),
    "count": lambda: 0,
    "memory": lambda: None,
    "seed": lambda: jax.random.key(3),
    "log": lambda: jnp.zeros((1, 3)),
}
"""Initial values of states, by name."""

PARAMETERS = frozenset({"w"})
RANDOM = "rng"


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of a model: its arguments, and an action just before it."""

    args: tuple = (X,)
    kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    before: Callable[[Any, Any], None] | None = None  # (dialect, model)


TWO_CALLS = (Call((X,)), Call((Y,)))


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        body: the method to rematerialize; its first argument is the model, its second an array.
        form: how rematerialization is put on it, a name of `FORMS`, or the dialect's "own" way, once or "twice".
        static: names of arguments that are declared static, in each library's own way; `spelling` asks for one way.
        policy: the name of a member of `jax.checkpoint_policies`.
        top: the function called from outside, (model, x, ...); by default the rematerialized method itself.
        around: transforms around a call, outermost first.
        check: (results of the calls, values of the states) must hold, besides equality with the expected results.
        refused: kinds of state for which an error is right, by the dialect's name, with its message: a Ref created
            inside a trace ends with it, and a Ref never changes its shape, by JAX's own rules.
    """

    group: str
    title: str
    body: Callable[..., Any]
    states: tuple[str, ...] = ("w", "n")
    form: str = "own"
    static: tuple[str, ...] = ()
    spelling: str = ""
    policy: str = ""
    top: Callable[..., Any] | None = None
    around: tuple[str, ...] = ("grad",)
    calls: tuple[Call, ...] = TWO_CALLS
    check: Callable[[list, dict], bool] | None = None
    refused: dict[str, tuple[type[Exception], str]] = dataclasses.field(default_factory=dict)

    @property
    def draws(self) -> bool:
        return RANDOM in self.states

    @property
    def position(self) -> int:
        """Place of the first static argument among the body's, the model being 0."""
        code = self.body.__code__
        return code.co_varnames.index(self.static[0])


class Bang(Exception):
    """Raised by a body."""


@dataclasses.dataclass(frozen=True)
class Flags:
    """Python attributes of a model that its body looks at."""

    training: bool = True
    scale: float = 2.0
    fail: bool = False


# -- how rematerialization is put on a method ----------------------------------------------------------------------

# Each takes a library's remat (its options given) and the body, and returns the method `block`. The class of the model
# also has the bare body, as `body`.


def _once(key: str, make: Callable[[Any], Any]) -> Callable[..., Any]:
    def block(self: Any, *args: Any, **kwargs: Any) -> Any:
        if key not in self.kept:
            self.kept[key] = make(self)
        return self.kept[key](*args, **kwargs)

    return block


class _Caller:
    """A callable object that is not a model itself but holds one."""

    def __init__(self, model: Any):
        self.model = model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.model.body(*args, **kwargs)


FORMS: dict[str, Callable[[Callable, Callable], Any]] = {
    "decorator": lambda remat, body: remat(body),
    "bound method": lambda remat, body: lambda self, *a, **k: remat(self.body)(*a, **k),
    "bound method, kept": lambda remat, body: _once("kept", lambda self: remat(self.body)),
    "closure": lambda remat, body: lambda self, *a, **k: remat(lambda *a, **k: self.body(*a, **k))(*a, **k),
    "closure, kept": lambda remat, body: _once("kept", lambda self: remat(lambda *a, **k: self.body(*a, **k))),
    "model as argument": lambda remat, body: lambda self, *a, **k: remat(body)(self, *a, **k),
    "partial": lambda remat, body: lambda self, *a, **k: remat(functools.partial(body, self))(*a, **k),
    "callable object": lambda remat, body: lambda self, *a, **k: remat(_Caller(self))(*a, **k),
    "static method": lambda remat, body: (lambda r: lambda self, *a, **k: r.__func__(self, *a, **k))(
        staticmethod(remat(body))
    ),
    "class": lambda remat, body: body,  # the dialect rematerializes the class
}


# -- dialects ------------------------------------------------------------------------------------------------------


def scalar(out: Any) -> jax.Array:
    """A number that depends on every float of the output, each in a different way."""
    leaves = [x for x in jax.tree.leaves(out) if hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.inexact)]
    return sum(jnp.sum(jnp.sin(0.7 * x.astype(jnp.float32) + i)) for i, x in enumerate(leaves))  # type: ignore


def tangent(x: Any) -> jax.Array:
    return jnp.cos(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape)


class Dialect:
    """How one library spells a row. A model has ``flags``, ``body``, ``block`` and ``top``, states as attributes, and
    `key`, `scan`, `cond`, `while_loop` and `vmap`, whose functions take the model first.

    A subclass defines ``build(row)``, a model; ``call(model, row, call)``, its result; ``values(model, row)``, those of
    the states by name, random ones left out; ``poke(model, name, value)``, which sets a state from outside; and
    ``remat(fun, **options)``.
    """

    name: str
    own = "decorator"  # the form that the library's users rematerialize a method with

    def run(self, row: Row) -> tuple[list, dict[str, Any]]:
        """Results of the row's calls, and the final values of the states."""
        model = self.build(row)
        results = []
        for call in row.calls:
            if call.before is not None:
                call.before(self, model)
            try:
                results.append(self.call(model, row, call))
            except Bang:
                results.append("Bang")
        return results, self.values(model, row)

    def flip(self, model: Any, **changes: Any) -> None:
        """Change attributes of the model that are not states."""
        model.flags = dataclasses.replace(model.flags, **changes)

    def rematerialize(self, row: Row, fun: Any, bound: bool = False) -> Any:
        """`remat` with the options of the row; `bound` if the model is not an argument of the function any more."""
        options: dict[str, Any] = {"policy": getattr(jax.checkpoint_policies, row.policy)} if row.policy else {}
        return self.remat(fun, **options, **self.static(row, bound))

    def static(self, row: Row, bound: bool) -> dict[str, Any]:
        """The option that declares the row's static arguments."""
        if not row.static:
            return {}
        if row.spelling == "names":
            return {"static_argnames": row.static}
        position = row.position - bound
        if row.spelling == "negative":
            code = row.body.__code__
            return {"static_argnums": (position - (code.co_argcount - bound),)}
        return {"static_argnums": (position,)}

    def block(self, row: Row) -> Any:
        form = self.own if row.form in ("own", "twice") else row.form
        bound = form.startswith(("bound", "closure", "partial", "callable"))

        def remat(fun: Any) -> Any:
            once = self.rematerialize(row, fun, bound)
            return self.rematerialize(row, once, bound) if row.form == "twice" else once

        return FORMS[form](remat, self.method(row.body))

    def method(self, body: Callable) -> Callable:
        """The body as a method of the class of models."""
        return body


def namespace(dialect: Dialect, row: Row) -> dict[str, Any]:
    """The interface of every dialect's model class."""
    members = {"body": dialect.method(row.body), "block": dialect.block(row), "top": row.top or _top, "kept": {}}
    if row.form == "class":
        members |= {"__call__": members["body"], "block": lambda self, *args, **kwargs: self(*args, **kwargs)}
    return members


def _top(self: Any, *args: Any, **kwargs: Any) -> Any:
    return self.block(*args, **kwargs)


class Objects(Dialect):
    """Libraries whose models hold their states and whose transforms see them.

    A subclass defines the kind of state, ``cell(name, value)``, ``get(cell)``, ``set(cell, value)``, ``rng()`` and
    ``draw(cell)``, and the library's transforms: `scan`, `cond`, `while_loop` and `vmap` take the model, the functions
    and the operands, and `jit`, `grad`, `jvp`, `vjp`, `linearize` and `hessian` take the model and a function.
    """

    base: type = object

    def build(self, row: Row) -> Any:
        dialect = self

        class Model(self.base):  # type: ignore[misc,name-defined]
            def __init__(self) -> None:
                self.flags = Flags()
                for name in row.states:
                    cell = dialect.rng() if name == RANDOM else dialect.cell(name, VALUES[name]())
                    setattr(self, f"cell_{name}", cell)

            def key(self) -> Any:
                return dialect.draw(self.cell_rng)  # type: ignore[attr-defined]

            def has(self, name: str) -> bool:
                return hasattr(self, f"cell_{name}")

            def create(self, name: str) -> None:
                setattr(self, f"cell_{name}", dialect.cell(name, VALUES[name]()))

            def scan(self, f: Callable, carry: Any, xs: Any) -> Any:
                return dialect.scan(self, f, carry, xs)

            def cond(self, pred: Any, f: Callable, g: Callable, *operands: Any) -> Any:
                return dialect.cond(self, pred, f, g, *operands)

            def while_loop(self, cond: Callable, f: Callable, carry: Any) -> Any:
                return dialect.while_loop(self, cond, f, carry)

            def vmap(self, f: Callable, xs: Any) -> Any:
                return dialect.vmap(self, f, xs)

        for name in VALUES:
            setattr(Model, name, self._property(f"cell_{name}"))
        for name, value in namespace(self, row).items():
            setattr(Model, name, value)
        if row.form == "class":
            Model = self.rematerialize(row, Model)
        return Model()

    def _property(self, cell: str) -> property:
        return property(
            lambda model: self.get(getattr(model, cell)),
            lambda model, value: self.set(getattr(model, cell), value),
        )

    def call(self, model: Any, row: Row, call: Call) -> Any:
        x, *args = call.args

        def fun(x: Any) -> Any:
            return model.top(x, *args, **call.kwargs)

        for name in reversed(row.around):
            fun = getattr(self, name)(model, fun)
        return fun(jnp.asarray(x))

    def values(self, model: Any, row: Row) -> dict[str, Any]:
        return {name: getattr(model, name) for name in VALUES if hasattr(model, f"cell_{name}")}

    def poke(self, model: Any, name: str, value: Any) -> None:
        setattr(model, name, value)

    def parameters(self, model: Any) -> dict[str, Any]:
        return {n: getattr(model, f"cell_{n}") for n in PARAMETERS if hasattr(model, f"cell_{n}")}


# -- the bodies of the rows ----------------------------------------------------------------------------------------


class Mode(enum.Enum):
    TRAIN = "train"
    EVAL = "eval"


def layer(self, x):
    self.n = self.n + 1
    return jnp.tanh(self.w @ x)


def wide(self, x):
    self.n = self.n + 1
    return jnp.sin(jnp.tanh(self.w @ x) * x)


def tuned(self, x, gain=1.5):
    self.n = self.n + 1
    return jnp.tanh(gain * (self.w @ x))


def flagged(self, x, training=True):
    if training:
        self.n = self.n + 1
        return jnp.tanh(self.w @ x)
    return self.w @ x * x


def keyword_only(self, x, *, training=True):
    return flagged(self, x, training)


def flagged_between(self, x, training, y):
    return flagged(self, x, training) * y


def worded(self, x, activation="tanh"):
    self.n = self.n + 1
    return getattr(jnp, activation)(self.w @ x)


def optional(self, x, bias=None):
    self.n = self.n + 1
    y = jnp.tanh(self.w @ x)
    return y if bias is None else y + bias


def moded(self, x, mode=Mode.TRAIN):
    self.n = self.n + 1
    return jnp.tanh(self.w @ x) if mode is Mode.TRAIN else self.w @ x * x


def listed(self, x, scales):
    assert isinstance(scales, list) and all(isinstance(scale, float) for scale in scales)
    self.n = self.n + len(scales)
    return jnp.tanh(self.w @ x) * sum(scales)


def sized(self, x, size=2):
    self.n = self.n + 1
    return jnp.tanh(self.w @ x)[:size]


def called(self, x, function=jnp.sin):
    self.n = self.n + 1
    return function(self.w @ x)


def concrete(self, x, threshold):
    self.n = self.n + 1
    with jax.ensure_compile_time_eval():
        positive = bool(threshold > 0)
    return jnp.tanh(self.w @ x) if positive else self.w @ x * x


def by_attribute(self, x):
    self.n = self.n + 1
    return jnp.tanh(self.w @ x) if self.flags.training else self.w @ x * x


def scaled_by_attribute(self, x):
    self.n = self.n + 1
    return jnp.tanh(self.w @ x) * self.flags.scale


def trees(self, batch):
    self.n = self.n + 1
    y = jnp.tanh(self.w @ batch["x"]) * batch["scales"][0]
    return {"y": y, "parts": (y[0], [y[1:]])}


def variadic(self, x, *more, **options):
    self.n = self.n + len(more)
    y = self.w @ x
    for z in more:
        y = y * z
    return jnp.tanh(y * options["gain"])


def labeled(self, x):
    self.n = self.n + 1
    return jnp.tanh(self.w @ x), "label", None, Mode.EVAL


def recursive(self, x):
    self.n = self.n + 1
    if x.shape[0] > 1:
        return jnp.concatenate([self.block(x[:1]), self.block(x[1:])])
    return jnp.tanh(self.w[:1, :1] @ x)


def from_states(self):
    self.n = self.n + 1
    return jnp.tanh(self.w @ self.s)


def modify(self, x):
    before = self.s
    self.s = before * 0.5 + jnp.tanh(x)
    return self.s * before + self.w @ x**3


def blend(self, x):
    before = self.s
    self.s = jnp.tanh(0.5 * before + self.w @ x)
    return jnp.sin(self.s * before + x)


def write_only(self, x):
    self.s = jnp.exp(x)
    return jnp.sin(self.w @ x)


def write_then_read(self, x):
    self.s = jnp.exp(self.w @ x)
    self.n = self.n + 1
    return jnp.sin(self.s) * x


def write_twice(self, x):
    self.s = self.s + jnp.sin(x)
    self.s = self.s * (self.w @ x)
    return jnp.tanh(self.s)


def normalize(self, x, training=True):
    y = self.w @ x
    if training:
        mean, var = y.mean(), y.var()
        self.mean = 0.9 * self.mean + 0.1 * jax.lax.stop_gradient(mean)
        self.var = 0.9 * self.var + 0.1 * jax.lax.stop_gradient(var)
    else:
        mean, var = self.mean, self.var
    return (y - mean) / jnp.sqrt(var + 1e-5) + x**3


def tree_valued(self, x):
    tree = self.tree
    total, counts = tree["b"]
    self.tree = {"a": tree["a"] * jnp.cos(x), "b": (total + x.sum(), counts + 1)}
    return jnp.tanh(self.w @ (tree["a"] + x)) * self.tree["b"][0]


def index(self, x):
    i = self.n
    self.n = i + 1
    self.buffer = jax.lax.dynamic_update_index_in_dim(self.buffer, jnp.tanh(self.w @ x), i, 0)
    return jnp.sin(self.buffer.sum(0))


def in_half(self, x):
    self.half = (self.half * x).astype(jnp.bfloat16)
    return jnp.tanh(self.w @ self.half.astype(jnp.float32)) + x**2


def dropout(self, x):
    keep = jax.random.bernoulli(self.key(), 0.5, (8,))
    y = jnp.where(keep, jnp.tile(jnp.tanh(self.w @ x), 3)[:8] + 2.0, 0.0)
    return y * y  # the backward pass needs the mask


def dropout_by_flag(self, x, training=True):
    return dropout(self, x) if training else jnp.tanh(self.w @ x)


def two_draws(self, x):
    a, b = jax.random.normal(self.key(), (3,)), jax.random.normal(self.key(), (3,))
    return {"noisy": jnp.tanh(self.w @ x * a) * jnp.sin(b * x), "draws": jax.lax.stop_gradient(jnp.stack([a, b]))}


def noise(self, x):
    return jnp.tanh(self.w @ x) * jax.random.normal(self.key(), (3,))


def counting_in_python(self, x):
    self.count = self.count + 1
    return jnp.tanh(self.w @ x) * self.count


def remembering(self, x):
    y = jnp.tanh(self.w @ x)
    self.memory = y if self.memory is None else self.memory * y
    return jnp.sin(self.memory)


def seeded(self, x):
    self.seed, key = jax.random.split(self.seed)
    y = jnp.tanh(self.w @ x) * jax.random.normal(key, (3,))
    return y * y


def growing(self, x):
    self.log = jnp.concatenate([self.log, jnp.tanh(self.w @ x)[None]])
    return jnp.sin(self.log.sum(0))


def with_state(self, x):
    self.s = self.s * 0.5 + self.w @ x
    return jnp.tanh(self.s), self.s


def cast(self, x, dtype=jnp.float32):
    self.n = self.n + 1
    return jnp.tanh((self.w @ x).astype(dtype))


def shaped(self, x, shape=(3, 1)):
    self.n = self.n + 1
    return jnp.tanh(self.w @ x).reshape(shape)


def failing(self, x):
    self.n = self.n + 1
    self.s = self.s * self.w[0] * x
    if self.flags.fail:
        raise Bang("in the body")
    return jnp.tanh(self.s)


def lazy(self, x):
    if not self.has("s"):
        self.create("s")
    self.s = self.s * 0.5 + x
    return jnp.tanh(self.w @ self.s)


def untouched(self, x):
    return jnp.tanh(x) * x


def inner_scan(self, x):
    def step(self, h, t):
        self.n = self.n + 1
        h = jnp.tanh(self.w @ h + t)
        return h, jnp.sin(h)

    h, ys = self.scan(step, x, jnp.arange(3.0))
    return h * ys.sum(0)


def inner_cond(self, x):
    def up(self, x):
        self.n = self.n + 1
        return jnp.tanh(self.w @ x)

    def down(self, x):
        self.n = self.n - 1
        return jnp.sin(self.w @ x)

    return self.cond(x.sum() > 0.8, up, down, x) * x


def cond_on_state(self, x):
    def restart(self, x):
        self.n = self.n * 0
        return jnp.tanh(self.w @ x)

    def advance(self, x):
        self.n = self.n + 1
        return jnp.sin(self.w @ x)

    return self.cond(self.n > 0, restart, advance, x) * x


def inner_while(self, x):
    def step(self, carry):
        i, h = carry
        self.n = self.n + 1
        return i + 1, jnp.tanh(self.w @ h)

    return self.while_loop(lambda carry: carry[0] < 3, step, (0, x))[1]


def inner_vmap(self, x):
    self.n = self.n + 1
    return self.vmap(lambda self, z: jnp.tanh(self.w @ z), jnp.stack([x, 2 * x])).sum(0)


# -- the tops: functions that call the rematerialized method ---------------------------------------------------------


def twice(self, x):
    return self.block(self.block(x)) + self.block(x)


def read_after(self, x):
    y = self.block(x)
    return y * self.s + jnp.cos(self.s)


def in_scan(self, x):
    def step(self, h, t):
        h = self.block(h + t)
        return h, jnp.sin(h)

    h, ys = self.scan(step, x, jnp.arange(3.0))
    return h * ys.sum(0)


def in_scan_nested(self, x):
    def outer(self, h, t):
        def inner(self, h, u):
            h = self.block(h + 0.1 * u)
            return h, h * u

        h, ys = self.scan(inner, h + t, jnp.arange(2.0))
        return h, ys.sum(0)

    h, ys = self.scan(outer, x, jnp.arange(3.0))
    return h * ys.sum(0)


def in_cond(self, x):
    return self.cond(x.sum() > 0.8, lambda self, x: self.block(x), lambda self, x: jnp.sin(self.w @ x), x) * x


def in_while(self, x):
    def step(self, carry):
        i, h = carry
        return i + 1, self.block(h)

    return self.while_loop(lambda carry: carry[0] < 3, step, (0, x))[1]


def in_vmap(self, x):
    return self.vmap(lambda self, z: self.block(z), jnp.stack([x, 2 * x, -x])).sum(0)


def in_scan_of_cond(self, x):
    def step(self, h, t):
        h = self.cond(t > 0.5, lambda self, h: self.block(h), lambda self, h: jnp.sin(h), h)
        return h, h

    h, ys = self.scan(step, x, jnp.arange(3.0))
    return h * ys.sum(0)


def in_vmap_of_scan(self, x):
    def row(self, z):
        return self.scan(lambda self, h, t: (self.block(h + t), h), z, jnp.arange(3.0))[0]

    return self.vmap(row, jnp.stack([x, 2 * x])).sum(0)


def without_arguments(self, x):
    return self.block() * x


def over_tree(self, x):
    return self.block({"x": x, "scales": [x[0], 1.0]})


def first_of(self, x):
    y, label, nothing, mode = self.block(x)
    assert (label, nothing, mode) == ("label", None, Mode.EVAL)
    return y


def pair_by_keyword(self, x):
    return self.block(x=x, gain=0.5)


def variadic_call(self, x):
    return self.block(x, 2.0 * x, x + 1.0, gain=0.5)


def read_only(self, x):
    return jnp.tanh(self.w @ x)


# -- the rows ------------------------------------------------------------------------------------------------------


def set_flag(**changes: Any) -> Callable[[Dialect, Any], None]:
    return lambda dialect, model: dialect.flip(model, **changes)


def set_state(name: str, value: Any) -> Callable[[Dialect, Any], None]:
    return lambda dialect, model: dialect.poke(model, name, jnp.array(value))


def calls(*values: Any, name: str | None = None, args: tuple = ()) -> tuple[Call, ...]:
    """A call with each of these values as a positional argument, or as the keyword `name`."""
    if name is None:
        return tuple(Call((X, value, *args)) for value in values)
    return tuple(Call((X, *args), {name: value}) for value in values)


def draws_differ(results: list, values: dict) -> bool:
    return not np.allclose(results[0]["value"], results[1]["value"])


call_form, flag, semantics, nesting = (
    functools.partial(Row, group) for group in ("Call forms", "Flags", "States", "Nestings")
)

CALL_FORMS = [
    call_form("the library's own way for a method", layer),
    call_form("with a policy", wide, policy="dots_saveable"),
    call_form("decorator on a method", layer, form="decorator"),
    call_form("bound method", layer, form="bound method"),
    call_form("bound method, wrapped once and kept", layer, form="bound method, kept"),
    call_form("closure over the model", layer, form="closure"),
    call_form("closure over the model, kept", layer, form="closure, kept"),
    call_form("function that takes the model", layer, form="model as argument"),
    call_form("functools.partial over the model", layer, form="partial"),
    call_form("callable object that holds the model", layer, form="callable object"),
    call_form("static method that takes the model", layer, form="static method"),
    call_form("class", layer, form="class"),
    call_form("remat of remat", layer, form="twice"),
    call_form("all arguments by keyword", tuned, top=pair_by_keyword),
    call_form("default argument left out", tuned),
    call_form("*args and **kwargs", variadic, top=variadic_call),
    call_form("pytrees in and out", trees, top=over_tree),
    call_form("outputs that are no arrays: a string, None, an enum", labeled, top=first_of),
    call_form("no arguments at all, only states", from_states, states=("w", "n", "s"), top=without_arguments),
    call_form("one block called three times in a step", layer, top=twice),
    call_form("recursion: the method calls itself", recursive),
]

FLAGGED = [
    flag("bool by position, static", flagged, static=("training",), calls=calls(True, False)),
    flag("bool by keyword, static", flagged, static=("training",), calls=calls(True, False, name="training")),
    flag("bool left at its default, static", flagged, static=("training",)),
    flag(
        "bool by position, static by a negative number",
        flagged,
        static=("training",),
        spelling="negative",
        calls=calls(True, False),
    ),
    flag("bool by position, static by name", flagged, static=("training",), spelling="names", calls=calls(True, False)),
    flag(
        "keyword-only bool, static by name",
        keyword_only,
        static=("training",),
        spelling="names",
        calls=calls(True, False, name="training"),
    ),
    flag("static bool between two arrays", flagged_between, static=("training",), calls=calls(True, False, args=(Y,))),
    flag("bool by position, not declared", flagged, calls=calls(True, False)),
    flag("bool by keyword, not declared", flagged, calls=calls(True, False, name="training")),
    flag("bool left at its default, not declared", flagged),
    flag("string, static", worded, static=("activation",), calls=calls("sin", "cos")),
    flag("string, not declared", worded, calls=calls("sin", "cos")),
    flag("None or an array, not declared", optional, calls=calls(None, Y)),
    flag("enum, not declared", moded, calls=calls(Mode.EVAL, Mode.TRAIN)),
    flag("list (unhashable), static", listed, static=("scales",), calls=calls([1.0, 2.0], [3.0])),
    flag("int that sets a shape, not declared", sized, calls=calls(1, 2)),
    flag("tuple that is a shape, not declared", shaped, calls=calls((1, 3), (3,))),
    flag("dtype, not declared", cast, calls=calls(jnp.float16, jnp.float32)),
    flag("function, not declared", called, calls=calls(jnp.cos, jnp.tanh)),
    flag(
        "array, static, looked at in Python",
        concrete,
        static=("threshold",),
        calls=(Call((X, np.float32(1))), Call((X, np.float32(-1)))),
    ),
    flag(
        "attribute of the model flipped between calls",
        by_attribute,
        calls=(Call((X,)), Call((X,), before=set_flag(training=False)), Call((X,), before=set_flag(training=True))),
    ),
    flag(
        "attribute flipped, wrapped once and kept",
        by_attribute,
        form="closure, kept",
        calls=(Call((X,)), Call((X,), before=set_flag(training=False)), Call((X,), before=set_flag(training=True))),
    ),
    flag(
        "number in an attribute changed between calls",
        scaled_by_attribute,
        calls=(Call((X,)), Call((X,), before=set_flag(scale=-0.5))),
    ),
]

STATE_SEMANTICS = [
    semantics("counter: one write a call", layer, check=lambda results, values: values["n"] == 2),
    semantics("no state touched", untouched, states=()),
    semantics("read only", read_only, states=("w",)),
    semantics("read, changed and read again", modify, states=("w", "s")),
    semantics("written, never read", write_only, states=("w", "s")),
    semantics("written, then read", write_then_read, states=("w", "n", "s")),
    semantics("written twice in a call", write_twice, states=("w", "s")),
    semantics("gradient through a written value read after the call", modify, states=("w", "s"), top=read_after),
    semantics("value of one call read by the next of the same step", modify, states=("w", "s"), top=twice),
    semantics(
        "running mean and variance, trained and used",
        normalize,
        states=("w", "mean", "var"),
        static=("training",),
        calls=calls(True, True, False),
    ),
    semantics("pytree as a value", tree_valued, states=("w", "tree")),
    semantics("integer state as an index into a buffer", index, states=("w", "n", "buffer")),
    semantics("bfloat16 state stays bfloat16", in_half, states=("w", "half")),
    semantics("state written only if a flag says so", flagged, calls=calls(False, True), static=("training",)),
    semantics(
        "state set from outside between calls",
        modify,
        states=("w", "s"),
        calls=(Call((X,)), Call((X,), before=set_state("s", [0.5, 0.5, 2.0]))),
    ),
    semantics(
        "state reshaped between calls",
        index,
        states=("w", "n", "buffer"),
        calls=(Call((X,)), Call((X,), before=set_state("buffer", np.ones((6, 3), np.float32)))),
    ),
    semantics(
        "state that grows by a row in each call",
        growing,
        states=("w", "log"),
        refused={"jax.Ref": (ValueError, "Invalid shape for `swap`")},
    ),
    semantics(
        "state that is None at first and an array later",
        remembering,
        states=("w", "memory"),
        refused={"jax.Ref": (ValueError, "NoneType")},
    ),
    semantics("Python number as a state", counting_in_python, states=("w", "count")),
    semantics("typed random key in a plain state", seeded, states=("w", "seed")),
    semantics("state's value returned beside the output", with_state, states=("w", "s")),
    semantics(
        "state created by the first call",
        lazy,
        states=("w",),
        refused={"jax.Ref": (jax.errors.UnexpectedTracerError, "created on line .*Ref.make")},
    ),
    semantics(
        "exception in the body leaves every state as it was",
        failing,
        states=("w", "n", "s"),
        calls=(Call((X,)), Call((X,), before=set_flag(fail=True)), Call((Y,), before=set_flag(fail=False))),
    ),
    semantics("dropout: the backward pass uses the same mask", dropout, states=("w", RANDOM), check=draws_differ),
    semantics("two draws in a call", two_draws, states=("w", RANDOM), check=draws_differ),
    semantics(
        "dropout that a flag turns off",
        dropout_by_flag,
        states=("w", RANDOM),
        static=("training",),
        calls=calls(True, False, True),
    ),
]

NESTINGS = [
    nesting("no transform: eager", layer, around=()),
    nesting("jit", layer, around=("jit",)),
    nesting("jit(grad)", layer, around=("jit", "grad")),
    nesting("grad(jit)", layer, around=("grad", "jit")),
    nesting("jit(grad), random draws", dropout, states=("w", RANDOM), around=("jit", "grad"), check=draws_differ),
    nesting("vjp", modify, states=("w", "s"), around=("vjp",)),
    nesting("jvp", modify, states=("w", "s"), around=("jvp",)),
    nesting("linearize", modify, states=("w", "s"), around=("linearize",)),
    nesting("hessian", modify, states=("w", "s"), around=("hessian",)),
    nesting("grad(grad)", modify, states=("w", "s"), around=("grad", "grad")),
    nesting("jvp(grad)", modify, states=("w", "s"), around=("jvp", "grad")),
    nesting("jit(grad(scan(remat)))", layer, top=in_scan, around=("jit", "grad")),
    nesting("grad(scan(remat)), float state", blend, states=("w", "s"), top=in_scan),
    nesting("grad(scan(scan(remat)))", layer, top=in_scan_nested),
    nesting("grad(scan(remat)), random draws", noise, states=("w", RANDOM), top=in_scan, check=draws_differ),
    nesting("grad(grad(scan(remat)))", blend, states=("w", "s"), top=in_scan, around=("grad", "grad")),
    nesting("grad(remat(scan))", inner_scan),
    nesting("grad(cond(remat))", layer, top=in_cond),
    nesting("grad(remat(cond))", inner_cond),
    nesting("jit(grad(remat(cond))), on a state", cond_on_state, around=("jit", "grad")),
    nesting("jit(grad(scan(cond(remat))))", layer, top=in_scan_of_cond, around=("jit", "grad")),
    nesting("jit(while_loop(remat))", layer, top=in_while, around=("jit",)),
    nesting("jvp(remat(while_loop))", inner_while, around=("jvp",)),
    nesting("grad(vmap(remat)), state only read", read_only, states=("w",), top=in_vmap),
    nesting("grad(vmap(remat)), random draws", noise, states=("w", RANDOM), top=in_vmap, check=draws_differ),
    nesting("grad(remat(vmap))", inner_vmap),
    nesting("grad(vmap(scan(remat)))", read_only, states=("w",), top=in_vmap_of_scan),
]

ROWS: tuple[Row, ...] = (*CALL_FORMS, *FLAGGED, *STATE_SEMANTICS, *NESTINGS)


# -- judging -------------------------------------------------------------------------------------------------------


def difference(actual: Any, wanted: Any, tolerance: float = 2e-5) -> str:
    """The first difference between two outcomes of `Dialect.run`: structure, type or value; empty if equal."""
    if jax.tree.structure(actual) != jax.tree.structure(wanted):
        return f"structure is {jax.tree.structure(actual)}, not {jax.tree.structure(wanted)}"
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(actual), jax.tree.leaves(wanted), strict=True):
        where = place(path)
        if isinstance(a, jax.core.Tracer):
            return f"{where} is a dead tracer"
        if not hasattr(b, "dtype"):
            if a is not b and a != b:
                return f"{where} is {a!r}, not {b!r}"
        elif (np.shape(a), getattr(a, "dtype", None)) != (b.shape, b.dtype):
            return f"{where} is {getattr(a, 'dtype', type(a).__name__)}{np.shape(a)}, not {b.dtype}{b.shape}"
        else:
            a, b = numbers(a), numbers(b)
            if not np.allclose(a, b, rtol=0, atol=tolerance * float(np.max(np.abs(b), initial=1))):
                return f"{where} is {short(a)}, not {short(b)}"
    return ""


def place(path: tuple) -> str:
    """``n`` for a state, ``['w'] of call 1`` for a part of a result."""
    side, which, *rest = path
    inside = jax.tree_util.keystr(tuple(rest))
    if side.idx == 1:
        return f"{which.key}{inside}"
    return f"{inside or 'result'} of call {which.idx + 1}"


def numbers(x: Any) -> np.ndarray:
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    return np.asarray(x, np.float64 if jnp.issubdtype(x.dtype, jnp.inexact) else np.int64)


def short(x: np.ndarray) -> str:
    return np.array2string(x, precision=4, threshold=4, separator=", ").replace("\n", "")
