"""Wrapped functions of every transform: keywords, descriptors, and the functions and objects that raise."""

import abc
import asyncio
import functools
import inspect
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import statetx

X = jnp.array([0.3, -0.7])

# Each maps a function of one array to a callable of the same arguments.
DECORATORS = {
    "remat": statetx.remat,
    "jit": statetx.jit,
    "vmap": statetx.vmap,
    "grad": statetx.grad,
    "value_and_grad": statetx.value_and_grad,
    "jacfwd": statetx.jacfwd,
    "jacrev": statetx.jacrev,
    "hessian": statetx.hessian,
    "functionalize": statetx.functionalize,
    "trace_states": statetx.trace_states,
    "shard_map": statetx.shard_map(
        mesh=jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,)),
        in_specs=jax.P("d"),
        out_specs=jax.P("d"),
    ),
}

# -- arguments -------------------------------------------------------------------------------------------------


def total(x, *, self, fun, args, kwargs, call, name, values, states, wrt, f, options, instance):
    return x * (self + fun + args + kwargs + call + name + values + states + wrt + f + options + instance).sum()


NAMES = "self fun args kwargs call name values states wrt f options instance".split()

CALLS = {
    "remat": lambda f, /, *a, **k: statetx.remat(f)(*a, **k),
    "jit": lambda f, /, *a, **k: statetx.jit(f)(*a, **k),
    "jit lowered": lambda f, /, *a, **k: statetx.jit(f).lower(*a, **k).compile() and f(*a, **k),
    "grad": lambda f, /, *a, **k: statetx.grad(f)(*a, **k) and f(*a, **k),
    "value_and_grad": lambda f, /, *a, **k: statetx.value_and_grad(f)(*a, **k)[0],
    "jacfwd": lambda f, /, *a, **k: statetx.jacfwd(f)(*a, **k) * a[0],
    "jacrev": lambda f, /, *a, **k: statetx.jacrev(f)(*a, **k) * a[0],
    "functionalize": lambda f, /, *a, **k: statetx.functionalize(f)(statetx.functionalize(f).values(*a, **k), *a, **k)[
        0
    ],
    "trace_states": lambda f, /, *a, **k: len(statetx.trace_states(f)(*a, **k)) == 0 and f(*a, **k),
    "eval_shape": lambda f, /, *a, **k: statetx.eval_shape(f, *a, **k).shape == () and f(*a, **k),
    "make_jaxpr": lambda f, /, *a, **k: len(statetx.make_jaxpr(f)(*a, **k).jaxpr.invars) == 13 and f(*a, **k),
    "remat in grad": lambda f, /, *a, **k: statetx.value_and_grad(lambda x: statetx.remat(f)(x, **k))(*a)[0],
}


@pytest.mark.parametrize("transform", CALLS)
def test_keywords_may_have_any_name(transform):
    values = {name: jnp.full(2, float(n)) for n, name in enumerate(NAMES)}
    assert float(CALLS[transform](total, 2.0, **values)) == float(total(2.0, **values)) > 0


def test_keywords_of_a_mapped_function_may_have_any_name():
    values = {name: jnp.arange(6.0).reshape(3, 2) for name in NAMES}
    expected = jax.vmap(total)(jnp.arange(3.0), **values)
    np.testing.assert_array_equal(statetx.vmap(total)(jnp.arange(3.0), **values), expected)


def test_inspection_tools_accept_keywords_of_any_name():
    def f(x, self, fun, args):
        return x * jnp.sin(self * fun * args).sum()

    values = {"self": X, "fun": X, "args": X}
    assert statetx.saved_residuals(f, 2.0, **values).total_bytes > 0
    assert statetx.measure(f, 2.0, **values).argument_bytes > 0
    statetx.testing.assert_remat_equivalent(f, 2.0, **values)
    assert statetx.plan(f, 2.0, budget="1MiB", **values).apply(f)(2.0, **values) == f(2.0, **values)


def test_method_takes_self_by_keyword():
    class Net:
        @statetx.remat
        def f(self, x):
            return jnp.sin(x)

    np.testing.assert_array_equal(Net.f(self=Net(), x=X), jnp.sin(X))
    with pytest.raises(TypeError, match="values"):
        statetx.functionalize(Net().f)(x=X)


# -- decorators ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_above", [False, True])
@pytest.mark.parametrize("transform", DECORATORS)
def test_abstract_methods_stay_abstract(transform, is_above):
    decorators = [DECORATORS[transform], abc.abstractmethod]

    class Base(abc.ABC):  # noqa: B024
        @decorators[is_above]  # noqa: B027
        @decorators[not is_above]
        def f(self, x): ...

    class Whole(Base):
        @DECORATORS[transform]
        def f(self, x):
            return x

    assert Base.__abstractmethods__ == {"f"}
    with pytest.raises(TypeError, match="abstract"):
        Base()
    assert Whole.__abstractmethods__ == frozenset() and Whole()


def scaled(self, x, k=1.0):
    return jnp.sin(x) * self.w.value * k


class Scale:
    """Methods behind every descriptor of the standard library, rematerialized above and below it."""

    x = X

    def __init__(self):
        self.w = statetx.Param(jnp.asarray(2.0))

    partial_above = statetx.remat(functools.partialmethod(scaled, k=3.0))
    partial_below = functools.partialmethod(statetx.remat(scaled), k=3.0)

    @statetx.remat(fence=None)
    @property
    def property_above(self):
        """What it is."""
        return scaled(self, self.x, 3.0)

    @property_above.setter
    def property_above(self, x):
        self.x = x

    @property
    @statetx.remat
    def property_below(self):
        return scaled(self, self.x, 3.0)

    @statetx.remat
    @functools.cached_property
    def cached_above(self):
        return scaled(self, self.x, 3.0)

    @functools.cached_property
    @statetx.remat
    def cached_below(self):
        return scaled(self, self.x, 3.0)

    @functools.singledispatchmethod
    @statetx.remat
    def dispatched_below(self, x):
        return scaled(self, x, 3.0)

    @dispatched_below.register
    @statetx.remat
    def _(self, x: str):
        return scaled(self, float(x))


@pytest.mark.parametrize("where", ["above", "below"])
@pytest.mark.parametrize("descriptor", ["partial", "property", "cached"])
def test_descriptors_above_and_below_the_transform(descriptor, where):
    name = f"{descriptor}_{where}"

    def loss(x):
        scale = Scale()
        scale.x = x
        out = getattr(scale, name)
        return (out(x) if descriptor == "partial" else out).sum()

    np.testing.assert_allclose(statetx.grad(loss)(X), 6 * jnp.cos(X), rtol=1e-6)
    assert "remat" in str(jax.make_jaxpr(loss)(X))


def test_descriptors_keep_their_other_attributes():
    assert type(Scale.property_above) is property and Scale.property_above.__doc__ == "What it is."
    scale = Scale()
    scale.property_above = 2 * X
    np.testing.assert_array_equal(scale.property_above, 6 * jnp.sin(2 * X))
    assert scale.cached_above is scale.cached_above
    np.testing.assert_array_equal(jax.jit(scale.dispatched_below)(X), 6 * jnp.sin(X))
    np.testing.assert_array_equal(scale.dispatched_below("0.5"), 2 * jnp.sin(0.5))


@pytest.mark.parametrize("transform", DECORATORS)
def test_descriptor_below_that_must_be_above_raises(transform):
    with pytest.raises(statetx.FunctionError, match="(?s)above @singledispatchmethod.*Fix: put @statetx.* below"):
        DECORATORS[transform](functools.singledispatchmethod(scaled))
    with pytest.raises(statetx.FunctionError, match="needs a callable, got float: 1.5"):
        DECORATORS[transform](1.5)


# -- functions that return before their body has run -----------------------------------------------------------


def generator(x):
    yield jnp.sin(x)


async def coroutine(x):
    return jnp.sin(x)


MESH = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))

# Each runs a function of one array under a transform, and returns the function's result where it can.
RUNS = {
    "jit": lambda f: statetx.jit(f)(X),
    "remat": lambda f: statetx.jit(statetx.remat(f))(X),
    "vmap": lambda f: statetx.vmap(f)(X),
    "shard_map": lambda f: statetx.shard_map(f, mesh=MESH, in_specs=jax.P(), out_specs=jax.P())(X),
    "grad": lambda f: statetx.grad(f)(1.0),
    "grad aux": lambda f: statetx.grad(lambda x: (x.sum(), f(x)), has_aux=True)(X),
    "vjp": lambda f: statetx.vjp(f, X),
    "vjp aux": lambda f: statetx.vjp(lambda x: (x, f(x)), X, has_aux=True),
    "jvp": lambda f: statetx.jvp(f, (X,), (X,)),
    "jvp aux": lambda f: statetx.jvp(lambda x: (x, f(x)), (X,), (X,), has_aux=True),
    "linearize": lambda f: statetx.linearize(f, X),
    "linearize aux": lambda f: statetx.linearize(lambda x: (x, f(x)), X, has_aux=True),
    "jacfwd": lambda f: statetx.jacfwd(f)(X),
    "jacfwd aux": lambda f: statetx.jacfwd(lambda x: (x, f(x)), has_aux=True)(X),
    "jacrev aux": lambda f: statetx.jacrev(lambda x: (x, f(x)), has_aux=True)(X),
    "hessian aux": lambda f: statetx.hessian(lambda x: (x.sum(), f(x)), has_aux=True)(X),
    "scan": lambda f: statetx.scan(lambda c, x: (c, f(x)), 0.0, X),
    "scan body": lambda f: statetx.scan(lambda c, x: f(x), 0.0, X),
    "map": lambda f: statetx.map(f, X),
    "fori_loop": lambda f: statetx.fori_loop(0, 2, lambda i, c: f(c), X),
    "while_loop": lambda f: statetx.while_loop(lambda c: c.sum() < 0, f, X),
    "while_loop cond": lambda f: statetx.while_loop(f, lambda c: c, X),
    "cond": lambda f: statetx.cond(jnp.array(True), f, lambda x: x, X),
    "switch": lambda f: statetx.switch(jnp.array(1), [f, f], X),
    "eval_shape": lambda f: statetx.eval_shape(f, X),
    "make_jaxpr": lambda f: statetx.make_jaxpr(f)(X),
    "trace_states": lambda f: statetx.trace_states(f)(X),
    "functionalize": lambda f: jax.jit(lambda x: statetx.functionalize(f)({}, x))(X),
}


@pytest.mark.parametrize("fun", [generator, coroutine], ids=["generator", "coroutine"])
@pytest.mark.parametrize("run", RUNS)
def test_returned_generators_and_coroutines_raise(run, fun):
    with pytest.raises(statetx.FunctionError, match=f"a {fun.__name__} of {fun.__name__}, whose body has not run"):
        RUNS[run](lambda x: fun(x))


def test_eager_code_may_return_a_generator_or_a_coroutine():
    np.testing.assert_array_equal([*statetx.remat(lambda x: generator(x))(X)], [jnp.sin(X)])
    np.testing.assert_array_equal(asyncio.run(statetx.remat(lambda x: coroutine(x))(X)), jnp.sin(X))


# -- objects that JAX does not look into -----------------------------------------------------------------------


class Box:
    def __init__(self, content):
        self.content = content


class Slots:
    __slots__ = ("content",)

    def __init__(self, content):
        self.content = content


# Each hides an array in an object that is not a pytree; with the path to it in the error.
HIDDEN = {
    "attribute": (Box, "a Box whose attribute 'content'"),
    "slot": (Slots, "a Slots whose attribute 'content'"),
    "list": (lambda x: Box([{"x": x}]), "a Box whose attribute 'content.0.x'"),
    "nested": (lambda x: Box(Slots(Box(x))), "a Box whose attribute 'content.content.content'"),
    "in a tuple": (lambda x: (x, Box(x)), "a Box whose attribute 'content'"),
    "closure": (lambda x: lambda: x, "the function .*, whose variable 'x' is"),
    "method": (lambda x: types.MethodType(Box, x), "a method whose attribute"),
    "partial": (lambda x: functools.partial(jnp.add, x), "a partial whose attribute"),
}


@pytest.mark.parametrize("how", HIDDEN)
@pytest.mark.parametrize("run", ["jit", "remat", "vmap", "shard_map", "vjp", "jvp aux"])
def test_object_hiding_a_tracer_raises(run, how):
    hide, holder = HIDDEN[how]
    with pytest.raises(statetx.TraceLeakError, match=f"(?s){holder}.*Fix: use the array itself, or "):
        RUNS[run](lambda x: hide(jnp.sin(x)))


@pytest.mark.parametrize("run", [run for run in RUNS if run not in ("grad", "jacfwd", "scan body")])
def test_object_hiding_a_tracer_raises_in_every_transform(run):
    with pytest.raises(statetx.TraceLeakError, match="(?s)a Box whose attribute 'content' .*Fix: use the array itself"):
        RUNS[run](lambda x: Box(jnp.sin(x)))


@pytest.mark.parametrize("run", [run for run in RUNS if run != "scan body"])
def test_object_hiding_a_tracer_in_a_state_raises_in_every_transform(run):
    state = statetx.State(None, name="kept")

    def f(x):
        state.value = Box(jnp.sin(x))
        return x

    with pytest.raises(
        statetx.TraceLeakError, match="(?s)At .*test_wrapped_functions.py:.*'kept'.* was given a Box whose attribute"
    ):
        RUNS[run](f)
    assert state.value is None


@pytest.mark.parametrize("how", HIDDEN)
def test_object_hiding_a_tracer_in_a_state_raises(how):
    state = statetx.State(None, name="kept")

    def f(x):
        state.value = HIDDEN[how][0](jnp.sin(x))

    with pytest.raises(statetx.TraceLeakError, match=f"(?s)'kept'.* was given {HIDDEN[how][1]}"):
        statetx.jit(f)(X)
    assert state.value is None


def test_object_hiding_a_tracer_under_a_plain_transform_raises():
    state = statetx.State(None, name="kept")

    def f(x):
        state.value = Box(x)

    for run in (jax.jit(f), jax.vmap(f), statetx.jit(lambda x: jax.vmap(f)(x))):
        with pytest.raises(statetx.TraceLeakError, match="'kept'.*tracing"):
            run(X)
        assert state.value is None


def test_objects_without_tracers_or_with_outer_tracers_pass():
    box, state = Box(X), statetx.State(None)

    @statetx.jit
    def outer(x):
        mine = Box(x)

        def inner(y):
            state.value = mine
            return y, mine, box

        (y, seen, passed), _ = statetx.vjp(statetx.remat(inner), x)
        assert seen is mine and passed is box and state.value is mine
        state.value = box
        return y

    np.testing.assert_array_equal(outer(X), X)
    assert state.value is box


@pytest.mark.parametrize("name", "grad hessian jacfwd jacrev jit make_jaxpr remat trace_states vmap".split())
def test_function_and_every_option_may_be_given_by_name(name):
    transform = getattr(statetx, name)
    options = {p.name: p.default for p in inspect.signature(transform).parameters.values()} | {"fun": jnp.sum}
    transform(**options)(jnp.ones(2))


@pytest.mark.parametrize("transform", [statetx.jit, statetx.grad, statetx.vmap, statetx.remat, statetx.functionalize])
def test_signature_of_the_result_itself(transform):
    def f(x, y=1.0):
        return x * y

    wrapped = transform(f)
    assert inspect.signature(wrapped) == inspect.signature(f)
    assert str(inspect.signature(wrapped, follow_wrapped=False)) == "(*args, **kwargs)"
