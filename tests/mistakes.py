"""Mistakes of users: each is a function that makes one, the error that it must raise, and words that its message must
have.

The words are the name of the culprit and the fix. `tests/test_mistakes.py` runs the table; ``python tests/mistakes.py``
prints each mistake with its message.
"""

from __future__ import annotations

import dataclasses
import re
import sys
import threading
import warnings
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax

import statetx
from statetx import (
    Broadcast,
    Carry,
    GradientError,
    Not,
    Param,
    PolicyError,
    RngState,
    State,
    StateAccessError,
    StateFilterError,
    StatetxError,
    StateValueError,
    StaticArgumentError,
    TraceLeakError,
    policies,
)

NAMED = jax.errors.ConcretizationTypeError
X = jnp.ones(4)
N = jnp.int32(3)


@dataclasses.dataclass(frozen=True)
class Mistake:
    """A mistake.

    Attributes:
        name: the family and the mistake.
        run: makes it.
        error: the type that it raises.
        words: what the message, with its notes, contains.
    """

    name: str
    run: Callable[[], object]
    error: type[BaseException] | tuple[type[BaseException], ...]
    words: tuple[str, ...]


TABLE: list[Mistake] = []


def mistake(name: str, error: type[BaseException] | tuple[type[BaseException], ...], *words: str) -> Callable:
    def add(run: Callable[[], object]) -> Callable:
        TABLE.append(Mistake(name, run, error, words))
        return run

    return add


def message(error: BaseException) -> str:
    """The message with its notes, and those of the error that caused it."""
    return "\n".join([str(error), *getattr(error, "__notes__", ())])


class Block:
    def __init__(self, size=4):
        self.w, self.mean = Param(jnp.ones((size, size))), State(jnp.zeros(size))

    def __call__(self, x, train=True):
        if train:
            self.mean.value = x
        return jnp.tanh(x @ self.w.value)


def loss_of(model, x=X):
    return model(x).sum()


def double(x):
    return 2 * x


# -- a state in place of its value -----------------------------------------------------------------------------------


def operations(h):
    return {
        "h + 1": lambda: h + 1,
        "1 + h": lambda: 1 + h,
        "h - 1": lambda: h - 1,
        "2 * h": lambda: 2 * h,
        "h / 2": lambda: h / 2,
        "h ** 2": lambda: h**2,
        "-h": lambda: -h,
        "abs(h)": lambda: abs(h),
        "h < 1": lambda: h < 1,
        "1 >= h": lambda: 1 >= h,
        "h == 1": lambda: h == 1,
        "True != h": lambda: True != h,  # noqa: E712
        "h == jax array": lambda: h == X,
        "jax array == h": lambda: X == h,
        "numpy array != h": lambda: np.ones(4) != h,
        "numpy number == h": lambda: np.float32(1) == h,
        "jax array + h": lambda: X + h,
        "jax array @ h": lambda: X @ h,
        "numpy array * h": lambda: np.ones(4) * h,
        "h @ x": lambda: h @ X,
        "h[0]": lambda: h[0],
        "h[0] = 1.0": lambda: h.__setitem__(0, 1.0),
        "for _ in h": lambda: list(h),
        "1.0 in h": lambda: 1.0 in h,
        "len(h)": lambda: len(h),
        "if h": lambda: 1 if h else 2,
        "not h": lambda: not h,
        "float(h)": lambda: float(h),
        "int(h)": lambda: int(h),
        "range(h)": lambda: range(h),
        "round(h)": lambda: round(h),
        "jnp.tanh(h)": lambda: jnp.tanh(h),
        "jnp.sum(h)": lambda: jnp.sum(h),
        "jnp.where(h, 1, 2)": lambda: jnp.where(h, 1, 2),
        "jnp.stack([h, h])": lambda: jnp.stack([h, h]),
        "jnp.asarray(h)": lambda: jnp.asarray(h),
        "jax.nn.relu(h)": lambda: jax.nn.relu(h),
        "jax.lax.add(h, h)": lambda: jax.lax.add(h, h),
        "np.asarray(h)": lambda: np.asarray(h),
        "np.tanh(h)": lambda: np.tanh(h),
        "np.mean(h)": lambda: np.mean(h),
    }


for text in operations(None):

    @mistake(f"forgot .value: {text}", StatetxError, "State 'h'", "f32[4]", "mistakes.py:", " was ", "h.value")
    def forgot(text=text):
        h = State(X, name="h")
        return operations(h)[text]()


@mistake("forgot .value: h += 1", StateValueError, "State 'h'", "h.value")
def augmented():
    h = State(X, name="h")
    h += 1


@mistake("forgot .value: the name of the variable", StateValueError, "Write count.value")
def named_by_variable():
    count = State(X)
    return count * 2


@mistake("forgot .value: the name of the attribute", StatetxError, "Write self.w.value")
def named_by_attribute():
    class Layer:
        def __init__(self):
            self.w = Param(X)

        def __call__(self, x):
            return x * self.w

    return Layer()(X)


@mistake("forgot .value: under jit", StatetxError, "Write self.w.value")
def in_jit():
    class Layer:
        def __init__(self):
            self.w = Param(X)

        @statetx.jit
        def __call__(self, x):
            return jnp.dot(x, self.w)

    return Layer()(X)


for attribute in ("shape", "dtype", "T", "at", "sum", "astype"):

    @mistake(f"forgot .value: h.{attribute}", AttributeError, f"h.value.{attribute}")
    def attribute_of_value(attribute=attribute):
        h = State(X, name="h")
        return getattr(h, attribute)


def draws(rng):
    return {
        "jax.random.normal(rng)": lambda: jax.random.normal(rng),
        "jax.random.uniform(rng, (3,))": lambda: jax.random.uniform(rng, (3,)),
        "jax.random.split(rng)": lambda: jax.random.split(rng),
        "jax.random.fold_in(rng, 1)": lambda: jax.random.fold_in(rng, 1),
        "jax.random.key_data(rng)": lambda: jax.random.key_data(rng),
        "rng + 1": lambda: rng + 1,
        "a, b = rng": lambda: list(rng),
    }


for text in draws(None):

    @mistake(f"RngState as a key: {text}", StatetxError, "RngState 'rng'", "rng.next()")
    def drew(text=text):
        rng = RngState(0, name="rng")
        return draws(rng)[text]()


@mistake("the state was replaced by an array", AttributeError, "has no attribute 'value'", "model.mean.value = x")
def lost_state():
    model = Block()
    model.w = jnp.ones((4, 4))
    statetx.jit(model)(X)


mistake("State of a State", StateValueError, "cannot hold a state", ".value")(lambda: State(State(X)))
mistake("RngState(None)", StateValueError, "RngState(0)")(lambda: RngState(None))


# -- policies --------------------------------------------------------------------------------------------------------

for text, combine in {
    "dots or names": lambda: policies.dots or policies.names("a"),
    "dots and names": lambda: policies.dots and policies.names("a"),
    "not dots": lambda: not policies.dots,
    "if policy": lambda: 1 if policies.dots else 2,
}.items():
    mistake(f"policy: {text}", PolicyError, "dots", "|", "&", "~")(combine)


mistake("policy='dot'", PolicyError, "'dot'", "Did you mean 'dots'?")(lambda: statetx.remat(double, policy="dot"))
mistake("policies.everthing", AttributeError, "everthing")(lambda: policies.everthing)
mistake("policy=policies.names, not called", PolicyError, "policies.names", "call it")(
    lambda: statetx.remat(double, policy=policies.names)
)
mistake("policy=3", PolicyError, "int", "a name or a callable")(lambda: statetx.remat(double, policy=3))
mistake("policies.dots()", PolicyError, "dots is a policy", "policy=dots")(
    lambda: statetx.remat(double, policy=policies.dots())
)
mistake("policies.dots(f)", PolicyError, "dots is a policy", "policy=dots")(lambda: policies.dots(double))
for policy in (
    policies.dots,
    "dots",
    jax.checkpoint_policies.dots_saveable,
    jax.checkpoint_policies.save_only_these_names("hidden"),
):
    mistake(f"@remat({policy!r})", PolicyError, "the policy", "Fix: statetx.remat(policy=...)")(
        lambda policy=policy: statetx.remat(policy)(double)
    )
mistake("remat(policy=Slots(3))", PolicyError, "Slots(3)", "strategy", "checkpoint=Slots(3)")(
    lambda: statetx.remat(double, policy=policies.Slots(3))
)


@mistake("names('hiden')", PolicyError, "'hiden'", "'hidden'")
def misspelt_name():
    f = statetx.remat(lambda x: statetx.checkpoint_name(jnp.sin(x), "hidden").sum(), policy=policies.names("hiden"))
    jax.grad(f)(X)


mistake("fence='barier'", TypeError, "'barier'", "Did you mean 'barrier'?")(
    lambda: statetx.remat(double, fence="barier")
)
mistake("prevent_cse='no'", TypeError, "prevent_cse", "'no'", "bool")(lambda: statetx.remat(double, prevent_cse="no"))


# -- options ---------------------------------------------------------------------------------------------------------


mistake("remat(polcy=)", TypeError, "polcy", "Did you mean 'policy'?")(lambda: statetx.remat(double, polcy="dots"))
mistake("remat(concrete=)", TypeError, "concrete", "static_argnums")(lambda: statetx.remat(double, concrete=True))


for option in ("use_reentrant", "preserve_rng_state", "determinism_check", "context_fn", "early_stop"):

    @mistake(f"remat({option}=)", TypeError, option, "torch", "leave it out")
    def torch_option(option=option):
        statetx.remat(double, **{option: False})


mistake("checkpoint(f, x, use_reentrant=False)", TypeError, "(double)(x)", "torch")(
    lambda: statetx.checkpoint(double, X, use_reentrant=False)
)
mistake("checkpoint(f, x)", TypeError, "(double)(x)", "torch")(lambda: statetx.checkpoint(double, X))
mistake("remat(f(x))", statetx.FunctionError, "f32[4]", "remat(f)(x)")(lambda: statetx.remat(double(X)))
mistake("jit(f(x))", statetx.FunctionError, "f32[4]", "jit(f)(x)")(lambda: statetx.jit(double(X)))
mistake("grad(f(x))", statetx.FunctionError, "f32[4]", "grad(f)(x)")(lambda: statetx.grad(double(X)))
for name, call in {
    "jvp": lambda: statetx.jvp(double(X), (X,), (X,)),
    "vjp": lambda: statetx.vjp(double(X), X),
    "linearize": lambda: statetx.linearize(double(X), X),
    "make_jaxpr": lambda: statetx.make_jaxpr(double(X)),
}.items():
    mistake(f"{name}(f(x))", statetx.FunctionError, name, "f32[4]", f"{name}(f(x))")(call)
mistake("remat(None of a module)", statetx.FunctionError, "needs a callable", "str")(lambda: statetx.remat("block"))
mistake("grad of a tree with a flag", TypeError, "d['flag']", "bool", "leave it out of the tree", "argnums=")(
    lambda: statetx.grad(lambda d: d["x"].sum())({"x": X, "flag": True})
)
mistake("grad(return_value=)", TypeError, "return_value", "statetx.value_and_grad")(
    lambda: statetx.grad(double, return_value=True)
)
mistake("value_and_grad(grad_states=)", TypeError, "grad_states", "wrt=")(
    lambda: statetx.value_and_grad(double, grad_states={"w": Param(X)})
)
mistake("vmap(in_states=)", TypeError, "in_states", "states={filter: axis}")(
    lambda: statetx.vmap(double, in_states={0: Param(X)})
)
mistake("jit(static_argnum=)", TypeError, "static_argnum", "Did you mean 'static_argnums'?")(
    lambda: statetx.jit(double, static_argnum=0)
)
mistake("jit(static_argnames='xs')", StaticArgumentError, "'xs'", "Did you mean 'x'?")(
    lambda: statetx.jit(double, static_argnames="xs")
)
mistake("jit(static_argnums=5)", StaticArgumentError, "static_argnums=5", "(x)")(
    lambda: statetx.jit(double, static_argnums=5)
)
mistake("jit(in_shardings=)", TypeError, "in_shardings", "jax.device_put")(
    lambda: statetx.jit(double, in_shardings=None)
)
mistake("grad(wtr=)", TypeError, "wtr", "Did you mean 'wrt'?")(lambda: statetx.grad(loss_of, wtr=Param))
mistake("vmap(in_axis=)", TypeError, "in_axis", "Did you mean 'in_axes'?")(lambda: statetx.vmap(double, in_axis=0))
mistake("remat(methods=) of a function", TypeError, "methods=", "classes")(
    lambda: statetx.remat(double, methods="step")
)
mistake("remat(cls, methods='foward')", TypeError, "'foward'", "Block")(lambda: statetx.remat(Block, methods="foward"))


@mistake("remat of a generator", statetx.FunctionError, "generator")
def generator():
    def items(x):
        yield x

    statetx.grad(lambda x: statetx.remat(items)(x))(X)


def with_flag(flag):
    """Calls with a flag, by transform and option."""
    body, loss = (lambda h, x: (h + x, h)), (lambda x: x.sum())
    shard_map = {"mesh": MESH, "in_specs": jax.P(), "out_specs": jax.P()}
    return {
        "scan: reverse": lambda: statetx.scan(body, 0.0, X, reverse=flag),
        "scan: progress": lambda: statetx.scan(body, 0.0, X, progress=flag),
        "fori_loop: progress": lambda: statetx.fori_loop(0, 3, lambda i, x: x, X, progress=flag),
        "map: progress": lambda: statetx.map(double, X, progress=flag),
        "jit: keep_unused": lambda: statetx.jit(double, keep_unused=flag),
        "jit: inline": lambda: statetx.jit(double, inline=flag),
        "grad: has_aux": lambda: statetx.grad(loss, has_aux=flag),
        "value_and_grad: allow_int": lambda: statetx.value_and_grad(loss, allow_int=flag),
        "hessian: holomorphic": lambda: statetx.hessian(loss, holomorphic=flag),
        "vjp: has_aux": lambda: statetx.vjp(loss, X, has_aux=flag),
        "jvp: has_aux": lambda: statetx.jvp(loss, (X,), (X,), has_aux=flag),
        "linearize: has_aux": lambda: statetx.linearize(loss, X, has_aux=flag),
        "remat_scan: has_ys": lambda: statetx.remat_scan(double, num=2, has_ys=flag),
        "microbatch: interleave": lambda: statetx.microbatch(loss, 2, interleave=flag),
        "shard_map: check_vma": lambda: statetx.shard_map(double, check_vma=flag, **shard_map),
        "Levels: offload": lambda: policies.Levels(2, offload=flag),
        "Lengths: offload": lambda: policies.Lengths(2, 2, offload=flag),
        "plan: offload": lambda: statetx.plan(loss, X, budget="1MiB", offload=flag),
        "budget: offload": lambda: statetx.budget("1MiB", offload=flag),
        "max_batch: gradient": lambda: statetx.max_batch(loss, X, budget="1MiB", gradient=flag),
    }


MESH = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
for text in with_flag(None):
    for flag in ("no", 3, X > 0):
        words = ("'no'",) if isinstance(flag, str) else ("3",) if isinstance(flag, int) else ("bool[4]", "bool(x)")

        @mistake(f"{text}={flag!r}", (TypeError, PolicyError), f"{text}= must be True or False", *words)
        def no_flag(text=text, flag=flag):
            with_flag(flag)[text]()


def with_number(n):
    """Calls with a number of things, by transform and option."""
    return {
        "scan: length": lambda: statetx.scan(lambda h, _: (h, None), X, None, n),
        "scan: unroll": lambda: statetx.scan(lambda h, _: (h, None), X, None, 3, unroll=n),
        "map: batch_size": lambda: statetx.map(double, X, batch_size=n),
        "vmap: axis_size": lambda: statetx.vmap(double, axis_size=n),
        "remat_scan: num": lambda: statetx.remat_scan(double, num=n),
        "stack: num": lambda: statetx.stack(Block, n),
        "while_loop: max_steps": lambda: statetx.while_loop(lambda x: x < 3, lambda x: x + 1, 0, max_steps=n),
        "RngState 'rng'": lambda: RngState(0, name="rng").split(n),
    }


for text in with_number(None):
    for n in ("3", 2.5, -1, 2**63, True, X, State(3, name="n")):
        if not (text == "scan: unroll" and n is True):

            @mistake(
                f"{text}={n!r}", (TypeError, ValueError), text, "whole number" if "stack" not in text else "an integer"
            )
            def no_number(text=text, n=n):
                with_number(n)[text]()


mistake("fori_loop(0, 2**63, ...)", ValueError, "fori_loop", "9223372036854775808", "largest counter")(
    lambda: statetx.fori_loop(0, 2**63, lambda i, x: x, X)
)


for names in (3, [3], b"x", X, State("x")):
    for text, run in {
        "static_argnames": lambda names: statetx.jit(double, static_argnames=names),
        "donate_argnames": lambda names: statetx.jit(double, donate_argnames=names),
        "argnames": lambda names: statetx.microbatch(double, 2, argnames=names),
    }.items():

        @mistake(f"{text}={names!r}", StaticArgumentError, f"{text} must be a name or a sequence of names", "got")
        def no_names(run=run, names=names):
            run(names)


mistake("jit(compiler_options=3)", TypeError, "jit: compiler_options= must be a dict", "3")(
    lambda: statetx.jit(double, compiler_options=3)
)


def with_mixed_keys(tree):
    return {
        "jit": lambda: statetx.jit(lambda d: d["a"])(tree),
        "jit's output": lambda: statetx.jit(lambda: tree)(),
        "a state in jit": lambda: statetx.jit(lambda s: s.value["a"])(State(tree)),
        "grad": lambda: statetx.grad(lambda d: d["a"].sum())(tree),
        "grad(wrt=)": lambda: statetx.grad(lambda: 1.0, wrt={"a": Param(X), 1: Param(X)})(),
        "scan": lambda: statetx.scan(lambda h, _: (h, None), tree, None, 2),
        "vmap": lambda: statetx.vmap(lambda d: d["a"])(tree),
        "vjp": lambda: statetx.vjp(lambda d: d["a"], tree),
        "jvp": lambda: statetx.jvp(lambda d: d["a"], (tree,), (tree,)),
        "chunked": lambda: statetx.chunked(lambda d: d["a"].sum(), size=2)(tree),
        "shard_map": lambda: statetx.shard_map(double, mesh=MESH, in_specs=(jax.P(),), out_specs=jax.P())(tree),
        "saved_residuals": lambda: statetx.saved_residuals(lambda d: d["a"].sum(), tree),
        "Optimizer": lambda: statetx.Optimizer(optax.sgd(1.0), {"a": Param(X), 1: Param(X)}),
    }


for text in with_mixed_keys(None):

    @mistake(f"{text} with keys of two types", ValueError, "keys 'a', 1", "cannot be sorted", "Fix:")
    def mixed_keys(text=text):
        with_mixed_keys({"a": X, 1: X})[text]()


# -- gradients -------------------------------------------------------------------------------------------------------

for transform in ("grad", "value_and_grad"):

    @mistake(f"{transform}(loss)(model)", TypeError, "Block", "wrt=statetx.Param", "argument 0", "model")
    def gradient_of_model(transform=transform):
        getattr(statetx, transform)(loss_of)(Block())


for transform in ("jacrev", "jacfwd", "hessian"):

    @mistake(f"{transform}(loss)(model)", TypeError, "Block", "wrt=statetx.Param")
    def jacobian_of_model(transform=transform):
        getattr(statetx, transform)(loss_of)(Block())


pull_two = lambda: statetx.vjp(double, X)[1](X, X)
mistake("pullback(a, b)", TypeError, "pullback of double takes one argument", "got 2")(pull_two)
mistake("vjp(loss, model)", TypeError, "Block", "wrt=statetx.Param")(lambda: statetx.vjp(loss_of, Block()))
mistake("grad(loss)(state)", TypeError, "Param", "a state", "wrt=statetx.Param")(
    lambda: statetx.grad(lambda w: (w.value**2).sum())(Param(X))
)
mistake("grad(loss)('text')", TypeError, "argument 0", "str")(lambda: statetx.grad(lambda mode: X.sum())("mean"))


@mistake("wrt=model", StateFilterError, "Block", "2 states", "wrt=statetx.states(model, statetx.Param)")
def wrt_model():
    model = Block()
    statetx.grad(loss_of, wrt=model)(model)


@mistake("wrt=[model, model]", StateFilterError, "Block", "statetx.states(")
def wrt_models():
    models = [Block(), Block()]
    statetx.grad(lambda x: models[0](models[1](x)).sum(), wrt=models)(X)


@mistake("wrt={'a': model}", StateFilterError, "Block", "statetx.states(")
def wrt_dict_of_model():
    model = Block()
    statetx.grad(loss_of, wrt={"a": model})(model)


mistake("wrt='weights'", StateFilterError, "'weights'", "model.w")(
    lambda: statetx.grad(loss_of, wrt="weights")(Block())
)
mistake("wrt=another class", StateFilterError, "RngState", "model.w (Param)")(
    lambda: statetx.grad(loss_of, wrt=RngState)(Block())
)
mistake("wrt=array", StateFilterError, "f32[4]", "not a state")(lambda: statetx.grad(loss_of, wrt=X)(Block()))


@mistake("wrt=integer state", StateValueError, "State 'n'", "floating-point")
def wrt_integer():
    n = State(jnp.zeros((), jnp.int32), name="n")
    statetx.grad(lambda: n.value * 1.0, wrt=n)()


mistake("wrt=[]", StateFilterError, "wrt= is empty", "at least one state")(
    lambda: statetx.grad(loss_of, wrt=[])(Block())
)


@mistake("wrt=[w, w]", StateFilterError, "twice", "Param 'w'")
def wrt_twice():
    w = Param(X, name="w")
    statetx.grad(lambda: w.value.sum(), wrt=[w, w])()


@mistake("grad without argument or wrt", ValueError, "argument 0", "called with 0", "wrt=statetx.Param")
def gradient_of_nothing():
    w = Param(X)
    statetx.grad(lambda: w.value.sum())()


mistake("grad(f, argnums=x)", TypeError, "argnums", "f32[4]", "grad(f)(x)")(lambda: statetx.grad(loss_of, argnums=X))
mistake("argnums=3", ValueError, "argnums=3", "called with 1")(lambda: statetx.grad(double, argnums=3)(1.0))
mistake("grad by keyword", ValueError, "by position")(lambda: statetx.grad(double)(x=1.0))
mistake("loss is not a scalar", TypeError, "grad", "double", "f32[4]", "scalar", ".sum()")(
    lambda: statetx.grad(double)(X)
)


@mistake("loss of a wrt= gradient is not a scalar", TypeError, "f32[4]", "scalar", ".sum()")
def loss_of_states_not_scalar():
    model = Block()
    statetx.grad(model, wrt=Param)(X)


@mistake("loss returns None", TypeError, "loss", "None", "return")
def loss_of_none():
    def loss(x):
        x.sum()

    statetx.grad(loss)(X)


mistake("loss returns a pair without has_aux", TypeError, "tuple", "has_aux=True")(
    lambda: statetx.grad(lambda x: (x.sum(), x))(X)
)
mistake("has_aux without a pair", TypeError, "has_aux=True", "pair")(
    lambda: statetx.grad(lambda x: x.sum(), has_aux=True)(X)
)
mistake("integer argument", TypeError, "i32", "float")(lambda: statetx.grad(lambda x: x.sum() * 1.0)(jnp.arange(3)))


WRONG_TYPES = {
    "of a bool": (lambda x: x > 0, 1.0, ("grad", "value_and_grad", "jacfwd", "jacrev", "hessian")),
    "of text": (lambda x: "text", 1.0, ("grad", "value_and_grad", "jacfwd", "jacrev", "hessian")),
    "of a complex number": (lambda x: x * 1j, 1.0, ("grad", "value_and_grad", "jacrev", "hessian")),
    "at a complex number": (lambda x: abs(x), 1j, ("jacfwd", "hessian")),
    "at an integer": (lambda x: x, 1, ("grad", "value_and_grad", "jacfwd", "jacrev", "hessian")),
}
for text, (fun, x, names) in WRONG_TYPES.items():
    for name in names:

        @mistake(f"{name} {text}", TypeError, f"{name}", "<lambda>")
        def wrong_type(name=name, fun=fun, x=x):
            try:
                getattr(statetx, name)(fun)(x)
            except TypeError as e:  # no other transform is named
                assert str(e).startswith(name) and not re.search(rf"\bjac(fwd|rev)\b(?<!{name}) ?[r(]", str(e)), e
                raise


# -- Python branches on traced values --------------------------------------------------------------------------------


def choose(x, train):
    return x if train else -x


mistake("jit: if train", NAMED, "argument train", "static_argnames='train'")(lambda: statetx.jit(choose)(X, True))
mistake("jit: if options['train']", NAMED, "options['train']", "an argument of its own", "static_argnames")(
    lambda: statetx.jit(lambda x, options: choose(x, **options))(X, {"train": True})
)


@mistake("jit: if state > 0", NAMED, "model.count", "State", "cond")
def branch_on_state():
    model = {"count": State(jnp.zeros(()))}
    statetx.jit(lambda x: x if model["count"].value > 0 else -x)(X)


mistake("remat: if train (an array)", NAMED, "argument train", "static_argnames='train'")(
    lambda: statetx.grad(lambda x: statetx.remat(choose)(x, jnp.array(True)).sum())(X)
)


@mistake("scan: if state > 0", NAMED, "count", "cond")
def branch_in_scan():
    count = State(jnp.zeros(()))
    statetx.scan(lambda c, x: (c + 1 if count.value > 0 else c, x), 0.0, X)


@mistake("grad: if state > 0 under jit", NAMED, "count", "cond")
def branch_in_grad():
    count, w = State(jnp.zeros(())), Param(X)

    def loss(x):
        return (w.value * x).sum() if count.value > 0 else 0.0

    statetx.jit(statetx.grad(loss, wrt=w))(X)


mistake("jit: range(n)", (NAMED, TypeError), "argument n", "static_argnames='n'")(
    lambda: statetx.jit(lambda x, n: [x for _ in range(n)])(X, 3)
)
mistake("jit: float(x)", NAMED, "argument x")(lambda: statetx.jit(lambda x: float(x.sum()))(X))


@mistake("jit: float(state.value)", NAMED, "count")
def float_of_state():
    count = State(jnp.zeros(()))
    statetx.jit(lambda x: x * float(count.value))(X)


mistake("jit: np.sin(x)", jax.errors.TracerArrayConversionError, "argument x", "jnp")(
    lambda: statetx.jit(lambda x: np.sin(x))(X)
)


@mistake("jit: np.sin(state.value)", jax.errors.TracerArrayConversionError, "w", "jnp")
def numpy_of_state():
    w = State(X)
    statetx.jit(lambda x: x * np.sin(w.value))(X)


@mistake("jit: x[mask] of a state", jax.errors.NonConcreteBooleanIndexError, "bool[4]")
def mask_of_state():
    mask = State(X > 0)
    statetx.jit(lambda x: x[mask.value])(X)


# -- writes that leak ------------------------------------------------------------------------------------------------


def accumulate(total):
    def add(x):
        total.value = total.value + x
        return x.sum()

    return add


for text, call in {
    "jax.jit": lambda f: jax.jit(f)(X),
    "jax.grad": lambda f: jax.grad(f)(X),
    "jax.vmap": lambda f: jax.vmap(f)(jnp.ones((2, 4))),
    "jax.checkpoint": lambda f: jax.grad(jax.checkpoint(f))(X),
    "jax.lax.scan": lambda f: jax.lax.scan(lambda c, x: (c, f(x)), 0.0, jnp.ones((2, 4))),
    "jax.lax.map": lambda f: jax.lax.map(f, jnp.ones((2, 4))),
    "jax.eval_shape": lambda f: jax.eval_shape(f, X),
}.items():

    @mistake(f"write under {text}", TraceLeakError, "State 'total'", "mistakes.py:", "statetx.")
    def leak(call=call):
        call(accumulate(State(X, name="total")))


@mistake("another thread", statetx.ForeignStateError, "State 's'", "thread")
def another_thread():
    s, errors = State(X, name="s"), []

    def touch():
        try:
            s.value  # noqa: B018
        except Exception as e:
            errors.append(e)

    def loss(x):
        s.value += x
        thread = threading.Thread(target=touch)
        thread.start()
        thread.join()
        return s.value.sum()

    statetx.grad(loss)(X)
    raise errors[0]


@mistake("io_callback in remat", statetx.EffectError, "io_callback", "mistakes.py:", "pure_callback")
def callback_in_remat():
    from jax.experimental import io_callback

    def log(x):
        io_callback(lambda v: None, None, x)
        return jnp.sin(x).sum()

    jax.grad(statetx.remat(log))(X)


@mistake("io_callback in a planned loss", statetx.EffectError, "plan(", "io_callback", "mistakes.py:", "pure_callback")
def callback_in_a_planned_loss():
    from jax.experimental import io_callback

    def loss(x):
        io_callback(lambda: None, None)
        return jnp.sin(x).sum()

    statetx.plan(loss, X, budget="1KiB")


# -- loops and branches ----------------------------------------------------------------------------------------------


mistake("scan: a state as the carry", StateValueError, "State", "its .value")(
    lambda: statetx.scan(lambda c, x: (c, x), State(X), X)
)


@mistake("while_loop: the condition returns a state", StateValueError, "State", "its .value")
def condition_returns_state():
    done = State(jnp.array(False))
    statetx.while_loop(lambda c: done, lambda c: c + 1, 1.0)


@mistake("jax.jit(f)(state)", StatetxError, "State 'h'", "h.value")
def state_to_jax_jit():
    h = State(X, name="h")
    jax.jit(lambda s: s)(h)


@mistake("jax.grad(f)(state)", StatetxError, "State 'h'", "h.value")
def state_to_jax_grad():
    h = State(X, name="h")
    jax.grad(lambda s: s.sum())(h)


@mistake("jit: a state is returned to jax.jit", StatetxError, "State 'h'", "h.value")
def state_from_jax_jit():
    h = State(X, name="h")
    jax.jit(lambda: h)()


mistake(
    "scan: the carry changes its type", statetx.CarryTypeError, "carry", "f32[]", "f32[4]", "in the body, or start"
)(lambda: statetx.scan(lambda c, x: (c + X, x), jnp.float32(0), X))
mistake("scan: an item of the carry changes its type", statetx.CarryTypeError, "carry['h']", "f32[4]", "f32[]")(
    lambda: statetx.scan(lambda c, x: ({"h": c["h"].sum()}, x), {"h": X}, X)
)


@mistake("scan: the body returns one value", (TypeError, ValueError), "step", "carry", "return carry, y", "f32[]")
def body_returns_one():
    def step(c, x):
        return c + x

    statetx.scan(step, jnp.float32(0), X)


@mistake("scan: the body returns three values", (TypeError, ValueError), "step", "3", "return carry, y")
def body_returns_three():
    def step(c, x):
        return c, x, x

    statetx.scan(step, jnp.float32(0), X)


@mistake("scan: the body returns nothing", (TypeError, ValueError), "step", "None", "return carry, y")
def body_returns_nothing():
    def step(c, x):
        pass

    statetx.scan(step, jnp.float32(0), X)


mistake("scan: xs of different lengths", ValueError, "xs['a']", "4", "xs['b']", "3")(
    lambda: statetx.scan(lambda c, x: (c, x["a"]), 0.0, {"a": X, "b": jnp.ones(3)})
)
mistake("scan: length= disagrees", ValueError, "length=5", "xs", "4")(
    lambda: statetx.scan(lambda c, x: (c, x), 0.0, X, length=5)
)
mistake("scan: a scalar as xs", ValueError, "xs['b']", "f32[]", "no axis 0")(
    lambda: statetx.scan(lambda c, x: (c, None), 0.0, {"a": X, "b": jnp.float32(1)})
)
mistake("scan: a list of numbers as xs", ValueError, "xs[0]", "float", "jnp.asarray(xs)")(
    lambda: statetx.scan(lambda c, x: (c + x, None), 0.0, [1.0, 2.0])
)
mistake("scan: a number of steps as xs", ValueError, "int", "length=3")(
    lambda: statetx.scan(lambda c, x: (c, None), 0.0, 3)
)
mistake("scan: no xs, no length", ValueError, "length=")(lambda: statetx.scan(lambda c, x: (c, x), 0.0))


mistake("microbatch(grad(f)): the batch is differentiated", ValueError, "no argument", "those that are differentiated")(
    lambda: statetx.microbatch(statetx.grad(lambda x: x.sum()), 2)(X)
)
mistake("microbatch: an argument without examples", ValueError, "n is", "no axis 0", "name the arguments", "argnums=1")(
    lambda: statetx.microbatch(lambda x, n: x.mean() * n, 2)(X, jnp.float32(3))
)


@mistake("scan: a state is created in the body", statetx.CreatedStateError, "State", "before the")
def created_in_body():
    kept = []

    def step(c, x):
        kept.append(State(x))
        return c, x

    statetx.scan(step, 0.0, X)


@mistake("scan(states={'wieghts': 0})", StateFilterError, "model.wieghts", "Did you mean 'model.weights'?")
def misspelt_states():
    model = {"weights": State(X)}
    statetx.scan(lambda c, x: (c, model["weights"].value), 0.0, X, states={"model.wieghts": 0})


mistake("scan(states=Param)", StateValueError, "states={statetx.Param: 0}")(
    lambda: statetx.scan(lambda c, x: (c, x), 0.0, X, states=Param)
)


@mistake("scan: Broadcast is written", StateAccessError, "Broadcast", "Carry")
def broadcast_written():
    h = State(X, name="h")

    def step(c, x):
        h.value = h.value + x
        return c, x

    statetx.scan(step, 0.0, X, states={State: statetx.Broadcast})


@mistake("vmap: a write differs between examples", (StateAccessError, StateValueError), "State 's'", "states={'s': 0}")
def differs_per_example():
    s = State(jnp.float32(0), name="s")

    def f(x):
        s.value = s.value + x
        return x

    statetx.vmap(f)(X)


mistake("vmap(in_axes=(0, 0)) of a model", StateValueError, "argument model", "'model.w'", "states={'model.*': 0}")(
    lambda: statetx.vmap(lambda model, x: model(x, False), in_axes=(0, 0))(Block(), X[:, None])
)
mistake("scan(xs=a state)", StateValueError, "xs[0] holds states", "states={Param: 0}")(
    lambda: statetx.scan(lambda c, x: (c + x[0].value * x[1], None), 0.0, (Param(X), X))
)
mistake("map(xs=a state)", StateValueError, "map: xs holds states", "scan(", "states={Param: 0}")(
    lambda: statetx.map(lambda p: p.value, Param(X))
)
KEYS = jax.random.split(jax.random.key(0), 4)


@mistake("vmap: a key for each example, Broadcast", StateAccessError, "rng", "declared Broadcast", "declare it Split")
def vmap_broadcast_key():
    rng = RngState(0, name="rng")
    statetx.vmap(lambda key: setattr(rng, "value", key), states={RngState: Broadcast})(KEYS)


@mistake("vmap: Split of an array", StateValueError, "'h'", "f32[4]", "not one random key", "Broadcast")
def vmap_split():
    h = State(X, name="h")
    statetx.vmap(lambda x: x * h.value, states={State: statetx.Split})(X)


@mistake("scan: Split of an array of keys", StateValueError, "'rng'", "key<fry>[4]", "not one random key", "an axis")
def scan_split():
    rng = RngState(KEYS, name="rng")
    statetx.scan(lambda c, x: (c, rng.value), 0.0, X, states={RngState: statetx.Split})


mistake("vmap(states={State: Carry})", StateValueError, "Carry", "an axis", "Split")(
    lambda: statetx.vmap(double, states={State: Carry})(X)
)


@mistake("cond: outputs of different types", TypeError, "f32[4]", "f32[]", "yes", "no")
def cond_outputs():
    def yes(x):
        return x

    def no(x):
        return x.sum()

    statetx.cond(jnp.array(True), yes, no, X)


@mistake("cond: outputs of different structure", TypeError, "yes at", "no at", "(f32[4], f32[4])")
def cond_structure():
    def yes(x):
        return x, x

    def no(x):
        return x

    statetx.cond(jnp.array(True), yes, no, X)


mistake("cond: lambdas of different types", TypeError, "f32[4]", "f32[]", "mistakes.py:")(
    lambda: statetx.cond(jnp.array(True), lambda x: x, lambda x: x.sum(), X)
)


@mistake("while_loop in reverse mode", ValueError, "while_loop(", "checkpoint=", "Slots(")
def while_in_reverse():
    def newton(a):
        return statetx.while_loop(lambda x: abs(x * x - a) > 1e-3, lambda x: (x + a / x) / 2, a)

    statetx.grad(newton)(2.0)


@mistake("while_loop in reverse mode, states", ValueError, "while_loop(", "checkpoint=", "Slots(")
def while_in_reverse_with_states():
    h = State(jnp.float32(2))

    def body(i):
        h.value = jnp.sin(h.value)
        return i + 1

    def loss(x):
        h.value = x
        statetx.while_loop(lambda i: i < 3, body, 0)
        return h.value

    statetx.jit(statetx.grad(loss))(2.0)


mistake("while_loop under jax.grad", ValueError, "while_loop(", "checkpoint=", "Slots(")(
    lambda: jax.grad(lambda a: statetx.while_loop(lambda x: x < 9, lambda x: x * a, a))(2.0)
)
mistake("while_loop: the condition returns nothing", TypeError, "scalar bool", "got nothing")(
    lambda: statetx.while_loop(lambda x: None, double, X)
)
mistake("fori_loop with traced bounds in reverse mode", ValueError, "fori_loop(", "Python integers", "Slots(")(
    lambda: statetx.jit(jax.grad(lambda a, n: statetx.fori_loop(0, n, lambda i, x: x * a, a)))(2.0, N)
)
mistake("fori_loop(checkpoint=) with traced bounds", PolicyError, "concrete bounds", "while_loop(")(
    lambda: statetx.jit(lambda n: statetx.fori_loop(0, n, lambda i, x: x, 1.0, checkpoint=2))(N)
)
mistake("while_loop: the condition is not a bool", TypeError, "scalar bool", "f32[]")(
    lambda: statetx.while_loop(lambda x: x, lambda x: x, 1.0)
)


@mistake("while_loop: the condition writes", StateAccessError, "'h'", "condition", "body")
def condition_writes():
    h = State(jnp.float32(0))

    def condition(x):
        h.value = x
        return x < 1

    statetx.while_loop(condition, lambda x: x + 1, 0.0)


for text, words in {
    "auot": ("'auot'", "Did you mean 'auto'?"),
    "2 gigs": ("'2 gigs' is not a strategy", "Budget('64MiB')"),
}.items():

    @mistake(f"scan(checkpoint={text!r})", PolicyError, "checkpoint=", *words)
    def wrong_checkpoint(text=text):
        statetx.scan(lambda c, x: (c, x), 0.0, X, checkpoint=text)


mistake("scan(checkpoint=True)", PolicyError, "checkpoint=True", "Slots", "'auto'")(
    lambda: statetx.scan(lambda c, x: (c, x), 0.0, X, checkpoint=True)
)
mistake("scan(checkpoint=policies.dots)", PolicyError, "checkpoint=dots", "policy=dots", "Slots")(
    lambda: statetx.scan(lambda c, x: (c, x), 0.0, X, checkpoint=policies.dots)
)
mistake("Slots(0)", PolicyError, "Slots", "at least 1", "0")(lambda: policies.Slots(0))
mistake("Slots(2.5)", PolicyError, "Slots", "2.5")(lambda: policies.Slots(2.5))
mistake("Lengths(3, 2) of 4 steps", PolicyError, "Lengths(3, 2)", "4", "Fix:")(
    lambda: statetx.scan(lambda c, x: (c, x), 0.0, X, checkpoint=(3, 2))
)


@mistake("scan(checkpoint=Budget('1B'))", PolicyError, "1 B")
def tiny_checkpoint():
    step = lambda c, x: (jnp.sin(c * x), None)
    jax.grad(lambda c: statetx.scan(step, c, X, checkpoint=statetx.policies.Budget("1B"))[0])(2.0)


# -- budgets and plans -----------------------------------------------------------------------------------------------

for text in ("2 gigs", 1.5, 0, -1, "lots", None):

    @mistake(f"plan(budget={text!r})", PolicyError, f"{text!r} is not a size", "2**31", "'2GiB'", "0.5")
    def wrong_budget(text=text):
        statetx.plan(lambda x: jnp.sin(x).sum(), X, budget=text)


mistake("remat(policy='fit:2GBB')", PolicyError, "'2GBB' is not a size", "'2GiB'")(
    lambda: statetx.remat(double, policy="fit:2GBB")
)
mistake("larger_than('big')", PolicyError, "'big' is not a size", "'2GiB'")(lambda: policies.larger_than("big"))
mistake("plan without a budget", TypeError, "budget")(lambda: statetx.plan(lambda x: jnp.sin(x).sum(), X))
mistake("plan(objective='flop')", ValueError, "'flop'", "Did you mean 'flops'?")(
    lambda: statetx.plan(lambda x: jnp.sin(x).sum(), X, budget=0.5, objective="flop")
)


for name, options in {
    "plan": {"budget": 0.5},
    "max_batch": {"budget": "1MiB"},
    "measure": {},
    "memory_report": {},
    "memory_profile": {},
    "explain_oom": {},
    "loop_report": {},
    "saved_residuals": {},
    "print_fwd_bwd": {},
    "eval_shape": {},
}.items():

    @mistake(f"{name}(f(x))", statetx.FunctionError, "f32[4]", f"{name}(f, x) in place of {name}(f(x))")
    def inspected_result(name=name, options=options):
        getattr(statetx, name)(double(X), **options)


for text, unit in {"80": "'80GiB'", 80: "'80GiB'", 1: "'1GiB'"}.items():

    @mistake(f"plan(budget={text!r}), without a unit", statetx.PlanError, "Was a unit forgotten", unit)
    def plan_without_unit(text=text):
        statetx.plan(lambda x: jnp.sin(x).sum(), jnp.ones(40), budget=text)

    @mistake(f"max_batch(budget={text!r}), without a unit", statetx.PlanError, "Was a unit forgotten", unit)
    def max_batch_without_unit(text=text):
        statetx.max_batch(lambda x: jnp.sin(x) @ jnp.ones((4, 100)), X[None], budget=text)

    @mistake(f"microbatch(budget={text!r}), without a unit", statetx.PlanError, "Was a unit forgotten", unit)
    def microbatch_without_unit(text=text):
        statetx.microbatch(lambda x: (jnp.sin(x) @ jnp.ones((4, 100))).mean(), budget=text)(X[None])


mistake("memory_report(policies=3)", PolicyError, "memory_report", "must be a policy or a sequence of policies, got 3")(
    lambda: statetx.memory_report(lambda x: jnp.sin(x).sum(), X, policies=3)
)


# -- names that statetx does not have --------------------------------------------------------------------------------

for name, words in {
    "pmap": ("statetx.shard_map", "statetx.jit"),
    "lax": ("statetx.scan", "statetx.cond", "jax.lax"),
    "for_loop": ("statetx.map", "statetx.scan"),
    "Slots": ("statetx.policies.Slots",),
    "bounded_while_loop": ("statetx.while_loop", "max_steps="),
    "checkpointed_for_loop": ("statetx.scan", "checkpoint="),
    "custom_vjp": ("jax.custom_vjp",),
    "custom_jvp": ("jax.custom_jvp",),
    "associative_scan": ("jax.lax.associative_scan", "statetx.scan"),
    "numpy": ("jax.numpy",),
    "random": ("jax.random", "RngState"),
    "Module": ("class",),
    "Variable": ("statetx.State",),
    "Rngs": ("statetx.RngState",),
    "ParamState": ("statetx.Param",),
    "checkpoint_policies": ("statetx.policies",),
}.items():

    @mistake(f"statetx.{name}", AttributeError, f"has no attribute {name!r}", *words)
    def unknown_name(name=name):
        getattr(statetx, name)


# -- packages that are not installed ---------------------------------------------------------------------------------


def without(package, run):
    """Run with imports of a package and of its loaded modules blocked."""
    names = [name for name in sys.modules if name.partition(".")[0] == package]
    saved = {name: sys.modules.pop(name) for name in names}
    blocked = {name: None for name in {*names, package}}
    sys.modules.update(blocked)
    try:
        run()
    finally:
        for name in blocked:
            sys.modules.pop(name, None)
        sys.modules.update(saved)


mistake("scan(progress=True) without rich", ImportError, "rich", "pip install 'statetx[plot]'")(
    lambda: without("rich", lambda: statetx.scan(lambda c, x: (c, x), 0.0, X, progress=True))
)
mistake("plan(progress=True) without rich", ImportError, "rich", "pip install 'statetx[plot]'")(
    lambda: without("rich", lambda: statetx.plan(lambda x: jnp.sin(x).sum(), X, budget=0.5, progress=True))
)


@mistake("plan.plot() without matplotlib", ImportError, "matplotlib", "pip install 'statetx[plot]'")
def plan_plot_without_matplotlib():
    plan = object.__new__(statetx.Plan)
    without("matplotlib", plan.plot)


# -- stacks ----------------------------------------------------------------------------------------------------------


class Layer:
    def __init__(self, size=4, activation=jnp.tanh, **attributes):
        self.w, self.activation = Param(jnp.ones(size)), activation
        vars(self).update(attributes)

    def __call__(self, x):
        return self.activation(x * self.w.value)


mistake("stack: different sizes", StateValueError, "'w'", "f32[4]", "f32[8]", "layer 1")(
    lambda: statetx.stack([Layer(4), Layer(8)])
)
mistake("stack: different activations", StateValueError, "'activation'", "tanh", "sin", "layer 1")(
    lambda: statetx.stack([Layer(), Layer(activation=jnp.sin)])
)
mistake("stack: different lambdas", StateValueError, "'activation'", "mistakes.py:", "layer 1")(
    lambda: statetx.stack([Layer(activation=lambda x: x), Layer(activation=lambda x: -x)])
)
mistake("stack: different numbers", StateValueError, "'rate'", "0.1", "0.2")(
    lambda: statetx.stack([Layer(rate=0.1), Layer(rate=0.2)])
)
mistake("stack: different arrays", StateValueError, "'mask'", "f32[4]", "statetx.State")(
    lambda: statetx.stack([Layer(mask=X), Layer(mask=2 * X)])
)
mistake("stack: different classes", StateValueError, "Layer in layer 0", "Block in layer 1", "Fix: make a stack for")(
    lambda: statetx.stack([Layer(), Block()])
)
mistake("stack: different attributes", StateValueError, "bias", "layer 1")(
    lambda: statetx.stack([Layer(), Layer(bias=Param(X))])
)


@mistake("stack: classes of one name", StateValueError, "Layer", "mistakes.py:", "layer 1")
def stack_same_name():
    def make(size):
        class Layer:
            def __init__(self):
                self.w = Param(jnp.ones(size))

        return Layer()

    statetx.stack([make(4), make(4)])


mistake("stack(make) without num", ValueError, "num", "stack(Layer, 12)")(lambda: statetx.stack(Layer))
mistake("stack(module)", TypeError, "object", "num")(lambda: statetx.stack(object(), 3))
mistake("stack(layer, 3)", TypeError, "a Block, which is a layer itself", "'x'", "stack(lambda: Block(...), 12)")(
    lambda: statetx.stack(Block(), 3)
)


@mistake("stack(layer that takes any arguments, 3)", TypeError, "stack(lambda: Forwards(...), 3)")
def stack_of_a_layer_that_forwards():
    class Forwards(Layer):  # as brainstate's modules
        def __call__(self, *args):
            return super().__call__(*args)

    statetx.stack(Forwards(), 3)


@mistake("stack(class with sizes, 3)", TypeError, "Sized", "'size'", "stack(lambda: Sized(...), 12)")
def stack_of_sizes():
    class Sized:
        def __init__(self, size):
            self.w = Param(jnp.ones(size))

    statetx.stack(Sized, 3)


# -- the optimizer ---------------------------------------------------------------------------------------------------


def adam(model):
    return statetx.Optimizer(optax.adam(1e-3), statetx.states(model, Param))


mistake("Optimizer(tx)", StateFilterError, "no states", "Fix: Optimizer(tx, statetx.states(model, statetx.Param))")(
    lambda: statetx.Optimizer(optax.adam(1e-3))
)
mistake("Optimizer(tx, model)", StateFilterError, "Block", "statetx.states(model, statetx.Param)")(
    lambda: statetx.Optimizer(optax.adam(1e-3), Block())
)
mistake("Optimizer(model, tx)", TypeError, "Block", "optax.adam(1e-3)")(
    lambda: statetx.Optimizer(Block(), optax.adam(1e-3))
)
mistake("Optimizer(optax.adam, states)", TypeError, "adam", "optax.adam(1e-3)", "call")(
    lambda: statetx.Optimizer(optax.adam, statetx.states(Block(), Param))
)
mistake("Optimizer(tx, Param)", StateFilterError, "Param", "statetx.states(model")(
    lambda: statetx.Optimizer(optax.adam(1e-3), Param)
)
mistake("Optimizer without states", StateFilterError, "no states")(lambda: statetx.Optimizer(optax.adam(1e-3), {}))


@mistake("update with gradients of an argument", GradientError, "'w'", "single array", "wrt=optimizer.states")
def gradients_of_argument():
    model = Block()
    adam(model).update(statetx.grad(lambda x: model(x).sum())(X))


@mistake("update with gradients of other states", GradientError, "'mean'", "'w'", "wrt=optimizer.states")
def gradients_of_others():
    model = Block()
    adam(model).update({"mean": X})


@mistake("update with gradients of another shape", GradientError, "'w'", "f32[4,4]", "f32[4]")
def gradients_of_other_shape():
    model = Block()
    adam(model).update({"w": X})


@mistake("one state, a dict of gradients", GradientError, "'w'", "wrt=optimizer.states")
def gradients_for_one_state():
    w = Param(X, name="w")
    statetx.Optimizer(optax.sgd(1.0), w).update({"w": X})


@mistake("update(model, grads)", TypeError, "gradients alone", "optimizer.update(grads)")
def update_of_model():
    model = Block()
    adam(model).update(model, {"w": model.w.value})


for attribute, word in {
    "step": "optimizer.update(grads)",
    "zero_grad": "Leave it out",
    "state_dict": "statetx.values",
    "apply_gradients": "optimizer.update(grads)",
}.items():

    @mistake(f"optimizer.{attribute}()", AttributeError, attribute, word)
    def method_of_others(attribute=attribute):
        getattr(adam(Block()), attribute)()


mistake("restore(values, model)", statetx.CheckpointError, "Block", "restore(model, values)")(
    lambda: statetx.restore({"w": X}, Block())
)


# -- functions that take a function and its arguments, and those that return one

RETURNING = (
    "jit remat grad value_and_grad jacfwd jacrev hessian vmap make_jaxpr trace_states functionalize chunked microbatch"
)
for transform in RETURNING.split():
    for given in (X, N[None], (X, X), State(X, name="h")):

        @mistake(
            f"{transform}(f, {given})",
            TypeError,
            transform,
            "Fix: give the arguments",
            f"statetx.{transform}(double)(x)",
        )
        def called_with_arguments(transform=transform, given=given):
            getattr(statetx, transform)(double, given)


mistake(
    "make_jaxpr(f, model)", StaticArgumentError, "static_argnums", "Block", "to the function that the transform returns"
)(lambda: statetx.make_jaxpr(double, Block()))
mistake("jacfwd(f, model)", TypeError, "argnums", "Block", "to the function that the transform returns")(
    lambda: statetx.jacfwd(double, Block())
)


for name in ("measure", "memory_profile", "memory_report", "explain_oom", "loop_report", "plan"):
    for library, jit in (("jax", jax.jit), ("statetx", statetx.jit)):

        @mistake(
            f"{name}(f), f jitted by {library} with compiler_options=",
            statetx.FunctionError,
            f"{name} compiles <lambda> within",
            "the step jitted without compiler_options=",
        )
        def jitted_with_options(name=name, jit=jit):
            jitted = jit(lambda x: (jnp.sin(x) ** 2).sum(), compiler_options={"xla_backend_optimization_level": 1})
            getattr(statetx, name)(jitted, X, **({"budget": "1MiB"} if name == "plan" else {}))


for name in ("measure", "memory_profile", "memory_report", "saved_residuals", "explain_oom", "eval_shape"):

    @mistake(f"{name}(loss, x.shape)", TypeError, f"{name} was given x=(4,)", "jax.ShapeDtypeStruct((4,), jnp.float32)")
    def shape_for_array(name=name):
        getattr(statetx, name)(Block(), X.shape)

    @mistake(f"{name}(loss, (shape, dtype))", TypeError, f"{name} was given x[0]=(4,)", "jax.ShapeDtypeStruct((4,), ")
    def shape_and_type_for_array(name=name):
        getattr(statetx, name)(Block(), (X.shape, X.dtype))


mistake("switch(1, f, g)", TypeError, "double", "[double, ...]")(lambda: statetx.switch(1, double, jnp.sin))
mistake("map(f, xs, ys)", TypeError, "map takes 2 positional arguments, got 3", "(xs, ys)")(
    lambda: statetx.map(jnp.add, X, X)
)
mistake("plan(f, x)(x)", statetx.FunctionError, "Plan(double", "plan.apply(double)")(
    lambda: statetx.plan(double, X, budget="1MiB")(X)
)
mistake("budget(f, x)", TypeError, "budget takes 1 positional argument, got 2", "with statetx.budget(size)")(
    lambda: statetx.budget(double, X)
)
mistake("budget() of an array", statetx.FunctionError, "budget needs a function")(lambda: statetx.budget("1MiB")(X))


for call, block in {
    "budget('1MiB')": lambda: statetx.budget("1MiB"),
    "target(None)": lambda: statetx.target(None),
}.items():

    @mistake(f"{call} without with", statetx.PolicyWarning, "not entered", f"with statetx.{call}", f"@statetx.{call}")
    def block_alone(block=block):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            block()
        raise caught[0].message

    @mistake(
        f"{call} above a coroutine", statetx.FunctionError, f"{call}: the function returned a coroutine", "call it in"
    )
    def block_of_a_coroutine(block=block):
        async def run(): ...

        block()(run)()


# -- functionalize, remat of an object -------------------------------------------------------------------------------


mistake("functionalize: a value is missing", StateAccessError, "model.w")(
    lambda: statetx.functionalize(loss_of)({}, Block(), X)
)
mistake("remat(block).wieght", AttributeError, "wieght")(lambda: statetx.remat(Block()).wieght)
mistake("remat(states=) excludes a touched state", StateAccessError, "mean", "Fix:")(
    lambda: jax.grad(lambda x: statetx.remat(Block(), states=Param)(x).sum())(X)
)
mistake("states(model, 3)", StateFilterError, "Not a filter: 3", "state type")(lambda: statetx.states(Block(), 3))


# -- chunks ----------------------------------------------------------------------------------------------------------


mistake("chunked: a loss for each example", StateValueError, "chunked(<lambda>", "f32[2]", 'reduce="concat"')(
    lambda: statetx.chunked(lambda x: x**2, size=2)(X)
)


def stepped(x):
    W.value = W.value - statetx.grad(lambda x: (W.value * x).sum(), wrt=W)(x)
    return x.sum()


W = Param(jnp.ones(()))
for text, (word, run) in {
    "weight that is an array": ("weight=", lambda: statetx.chunked(jnp.sum, size=2, weight=lambda x: x)(X)),
    "reduce of another structure": ("reduce=", lambda: statetx.chunked(jnp.sum, size=2, reduce=("sum", "sum"))(X)),
    "concat of a number": ("reduce=", lambda: statetx.chunked(jnp.sum, size=2, reduce="concat")(X)),
    "unequal chunks": ("reduce=", lambda: statetx.chunked(lambda x: x, size=3, reduce="sum")(jnp.ones(5))),
    "unknown reduction": ("reduce=", lambda: statetx.chunked(jnp.sum, size=3, reduce="max")),
    "unknown dtype": ("accumulate=", lambda: statetx.chunked(jnp.sum, size=3, accumulate="int8")),
    "no dtype": ("accumulate=", lambda: statetx.chunked(jnp.sum, size=3, accumulate={"w": "float32"})),
    "branch on an array": ("statetx.chunked.", lambda: statetx.chunked(lambda x: x.sum() or 0.0, size=2)(X)),
    "weight that branches": (
        "statetx.chunked.",
        lambda: statetx.chunked(jnp.sum, size=2, weight=lambda x: x.sum() or 1)(X),
    ),
    "training step": ("value_and_grad(statetx.chunked(loss", lambda: statetx.chunked(stepped, size=2)(X)),
    "axis that is a name": ("axis=('x',)", lambda: statetx.chunked(jnp.sum, ("x",), size=2)(X)),
    "unknown path": ("states=", lambda: statetx.chunked(jnp.sum, size=2, states={"typo": Carry})(X)),
    "unknown rule": ("states=", lambda: statetx.chunked(jnp.sum, size=2, states={Param: "carry"})(X)),
}.items():

    @mistake(f"chunked: {text}", (TypeError, ValueError), "chunked", word)
    def wrong_chunks(run=run):
        try:
            run()
        except (TypeError, ValueError) as e:
            assert "microbatch" not in str(e), e
            raise


# -- arguments in the wrong place


def add_w(x):
    return (W.value * x).sum()


OVER_X = lambda c, x: (c, x)
for text, (error, words, run) in {
    "scan(body, xs)": (ValueError, ("xs comes third", "scan(body, init, xs)"), lambda: statetx.scan(OVER_X, X)),
    "scan(init, body, xs)": (TypeError, ("f32[4]", "the body comes first"), lambda: statetx.scan(X, OVER_X, X)),
    "scan(body, init, xs, ys)": (TypeError, ("length=", "(xs, ys)"), lambda: statetx.scan(OVER_X, X, X, X)),
    "map(xs, f)": (TypeError, ("map", "f32[4]", "map(f, xs)"), lambda: statetx.map(X, double)),
    "cond(p, 1, 2)": (TypeError, ("cond", "int", "lambda: value"), lambda: statetx.cond(True, 1, 2)),
    "remat_scan([layer, layer])": (TypeError, ("remat_scan", "stack(layers)"), lambda: statetx.remat_scan([W, W])),
    "stack([])": (ValueError, ("no layers", "at least one layer"), lambda: statetx.stack([])),
    "chunked(f, 2)": (ValueError, ("no axis 2", "size="), lambda: statetx.chunked(jnp.sum, 2, size=2)(X)),
    "Not(a, b)": (TypeError, ("Not takes one filter, got 2", "Not([...])"), lambda: Not(Param, State)),
    "grad(f, array)": (TypeError, ("which cannot be", "f64[2]"), lambda: statetx.grad(double, np.ones(2))),
    "grad(f, states)": (TypeError, ("argnums", "wrt=states"), lambda: statetx.grad(add_w, {"w": W})),
    "two axes of vmap for one argument": (ValueError, ("1 in all, not 2",), lambda: statetx.vmap(double, (0, 0))(X)),
    "has_aux=True of a loss": (
        TypeError,
        ("f32[]", "leave has_aux out"),
        lambda: statetx.grad(jnp.sum, has_aux=True)(X),
    ),
    "an axis that a state cannot have": (
        StateValueError,
        ("states={'mean': 3}", "f32[4]", "mistakes.py:", "from 0 to 1"),
        lambda: statetx.vmap(Block(), states={"mean": 3})(jnp.ones((2, 4))),
    ),
    "value_and_grad's pair to update": (
        GradientError,
        ("(value, gradients): update with the second",),
        lambda: statetx.Optimizer(optax.sgd(1.0), [W]).update((1.0, [X[0]])),
    ),
    "a loss to update": (
        GradientError,
        ("is it the loss?",),
        lambda: statetx.Optimizer(optax.sgd(1.0), [W]).update(X[0]),
    ),
}.items():
    mistake(f"wrong place: {text}", error, *words)(run)

for text, (words, run) in {
    "scan": ("the carry and an element of xs", lambda: statetx.scan(lambda c: c, X, X)),
    "fori_loop": ("the index and the carry", lambda: statetx.fori_loop(0, 2, lambda c: c, X)),
    "while_loop": ("one argument, the carry", lambda: statetx.while_loop(lambda: True, lambda c: c, X)),
    "cond": ("the operands", lambda: statetx.cond(X[0] > 0, lambda x: x, lambda x: x)),
    "switch": ("the operands", lambda: statetx.switch(N, [lambda x: x])),
}.items():
    mistake(f"{text}: a function of other arguments", TypeError, "<lambda>", "is called with", words)(run)

for name in ("measure", "memory_profile", "memory_report", "saved_residuals", "explain_oom", "eval_shape", "vjp"):

    @mistake(
        f"{name}(f) without arguments",
        TypeError,
        "'x'",
        f"Fix: give the arguments after the function: statetx.{name}(double, x)",
    )
    def without_arguments(name=name):
        getattr(statetx, name)(double)


# -- things of another kind

for policy, words in {
    (lambda: True): "<lambda> cannot be a policy",
    (lambda prim, *types: True): "takes no **parameters",
    ("a", "b"): "policies.names('a', 'b')",
    True: "policies.everything",
    policies: "policies.dots",
    "hidden": "policies.names('hidden')",
}.items():

    @mistake(f"remat(policy={getattr(policy, '__name__', policy)!r}): {words}", PolicyError, words)
    def not_a_policy(policy=policy):
        statetx.remat(double, policy=policy)


mistake("dots + names('a')", PolicyError, "dots | names('a')")(lambda: policies.dots + policies.names("a"))
mistake("rng.normal", AttributeError, "RngState", "'normal'", ".next()", "jax.random")(lambda: RngState(0).normal((3,)))
mistake("statetx.chekpoint", AttributeError, "Did you mean 'checkpoint'?")(lambda: statetx.chekpoint)


for obj, words in {"dict": ({"w": X}, "a dict of 1 array"), "tuple": (({"w": X}, 3.0), "a tuple of 2 arrays")}.values():

    @mistake(f"states({words})", StateFilterError, words, "statetx.Param(array)")
    def states_of_arrays(obj=obj):
        statetx.states(obj)


# -- paths that select nothing


def with_misspelt_path(model, path):
    """Calls with a filter, in which `path` selects no state."""
    step = statetx.jit(lambda x: model(x), donate_states=path)
    sharded = {"mesh": MESH, "in_specs": jax.P(), "out_specs": jax.P(), "states": {path: jax.P()}}
    return {
        "states": lambda: statetx.states(model, path),
        "jit(donate_states=)": lambda: step(X),
        "wrt=": lambda: statetx.grad(lambda x: model(x).sum(), wrt=["model.w", path])(X),
        "vmap(states=)": lambda: statetx.vmap(lambda x: model(x, False), states={path: Broadcast})(jnp.ones((2, 4))),
        "scan(states=)": lambda: statetx.scan(lambda h, _: (model(h), None), X, None, 2, states={path: Carry}),
        "microbatch(states=)": lambda: statetx.microbatch(lambda x: model(x[0]), 2, states={path: Carry})(
            jnp.ones((2, 4))
        ),
        "shard_map(states=)": lambda: statetx.shard_map(lambda x: model(x), **sharded)(X),
        "stack(shared=)": lambda: statetx.stack(Block, 2, shared=path),
        "remat_scan(carry=)": lambda: statetx.remat_scan(Block, 2, carry=path)(),
        "remat_scan(broadcast=)": lambda: statetx.remat_scan(lambda x: model(x), num=2, broadcast=path),
    }


for path in ("*mena", Not("*mena"), (Param, "*mena")):
    for text in with_misspelt_path(None, path):

        @mistake(
            f"{text} with the path {path}",
            StateFilterError,
            text.rstrip("=)").split("(")[0],
            "'*mena'",
            "w'",
            "Fix:",
        )
        def misspelt_path(text=text, path=path):
            with_misspelt_path(Block(), path)[text]()


mistake("states(Block)", StateFilterError, "class Block", "states(Block(...))")(lambda: statetx.states(Block))


for obj in (X, np.ones(3), 3.0, "model", True):

    @mistake(f"states({obj!r})", StateFilterError, "holds no states", "model")
    def states_of_value(obj=obj):
        statetx.states(obj)


mistake("states(model, Not())", TypeError, "Not", "filter")(lambda: statetx.states(Block(), Not()))


FLAG, COUNT = State(True, name="flag"), State(2, name="count")
for text, run in {
    "cond(h, ...)": lambda: statetx.cond(FLAG, lambda: 1, lambda: 2),
    "switch(h, ...)": lambda: statetx.switch(COUNT, [lambda: 1, lambda: 2]),
    "fori_loop(0, h, ...)": lambda: statetx.fori_loop(0, COUNT, lambda i, x: x, X),
    "checkpoint_name(h, 'a')": lambda: statetx.checkpoint_name(COUNT, "a"),
    "checkpoint_name([x, h], 'a')": lambda: statetx.checkpoint_name([X, COUNT], "a"),
}.items():
    culprit = "'flag'" if text.startswith("cond") else "'count'"
    mistake(f"forgot .value: {text}", StateValueError, text.split("(")[0], culprit, "mistakes.py:", "Fix:", ".value")(
        run
    )


mistake("vmap(f, (0, 0))(x, 1.0)", ValueError, "vmap(", "argument y is the float 1.0", "None for it in in_axes")(
    lambda: statetx.vmap(lambda x, y: x + y, (0, 0))(X, 1.0)
)
mistake("vmap(f, (0, 0))(x, {'scale': 1.0})", ValueError, "argument y is the float 1.0", "None for it in in_axes")(
    lambda: statetx.vmap(lambda x, y: x + y["scale"], (0, 0))(X, {"scale": 1.0})
)
mistake("checkpoint_name(x)", TypeError, "name")(lambda: statetx.checkpoint_name(X))
mistake("checkpoint_name('hidden', x)", TypeError, "checkpoint_name", "string", "f32[4]")(
    lambda: statetx.checkpoint_name("hidden", X)
)


def outcome(case: Mistake) -> tuple[BaseException | None, list[str]]:
    """What a mistake raises, and what is wrong with it."""
    try:
        case.run()
    except BaseException as e:
        wrong = [] if isinstance(e, case.error) else [f"it raises {type(e).__name__}"]
        return e, wrong + [f"its message lacks {word!r}" for word in case.words if word not in message(e)]
    return None, ["it raises nothing"]


if __name__ == "__main__":
    for case in TABLE:
        error, wrong = outcome(case)
        first_line = "" if error is None else message(error).partition("\n")[0]
        print(f"{case.name}\n  {type(error).__name__}: {first_line}{''.join(f'{chr(10)}  WRONG: {w}' for w in wrong)}")
