"""The table of structures: equal and different structures, and no values held."""

import functools
import gc
import threading
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import statetx
from helpers import compilations
from statetx import _jax, policies
from statetx._equations.structure import Body, StructureTable, table
from statetx._lift import context
from statetx._lift.context import TraceContext, note_shardings, sharding_of
from statetx._lift.stage import InputNames, stage

X = jnp.arange(3.0)


def body_of(f, *args):
    avals = [_jax.abstract(x) for x in args]
    return stage(lambda *xs: ([f(*xs)], None), avals, traced_for="test", names=InputNames(f))[0]


def alike(f, g, *args, other=None):
    a, b = body_of(f, *args), body_of(g, *(other or args))
    assert hash(a.key) == hash(b.key) or a.key != b.key
    return a.key == b.key


TWICE, SCALAR, OTHER = 2 * X, jnp.asarray(2.0), jnp.asarray(3.0)
BIG, BIG2 = jnp.ones((64, 64)), jnp.zeros((64, 64))


@pytest.mark.parametrize(
    "pair",
    [
        (lambda x: jnp.sin(x) * 2, lambda y: jnp.sin(y) * 2),
        (lambda x: x + X, lambda x: x + TWICE),  # constants are operands
        (lambda x: x * SCALAR, lambda x: x * OTHER),  # scalar arrays too
        (lambda x: jax.nn.relu(x), lambda x: jax.nn.relu(x)),  # a custom derivative rule of JAX's own
        (lambda x: jax.nn.silu(jax.nn.softmax(x)), lambda x: jax.nn.silu(jax.nn.softmax(x))),
        (lambda x: jax.checkpoint(jnp.sin)(x), lambda x: jax.checkpoint(jnp.sin)(x)),
        (lambda x: jax.lax.scan(lambda c, v: (c + v, None), 0.0, x)[0],) * 2,
    ],
)
def test_equal_structures(pair):
    assert alike(*pair, X)


def with_rule(k):
    @jax.custom_jvp
    def f(x):
        return jnp.sin(x)

    f.defjvps(lambda t, out, x: k * t)
    return f


@pytest.mark.parametrize(
    "pair",
    [
        (lambda x: x * 2, lambda x: x * 3),
        (lambda x: x * 0.0, lambda x: x * -0.0),
        (lambda x: x + 1, lambda x: x + 1.5),
        (lambda x: jnp.sin(x), lambda x: jnp.cos(x)),
        (lambda x: x.sum(), lambda x: x.sum(keepdims=True)),
        (lambda x: (x * 2) - x, lambda x: x - (x * 2)),
        (lambda x: x.astype(jnp.bfloat16), lambda x: x.astype(jnp.float16)),
        (with_rule(1.0), with_rule(2.0)),  # the same lines, another closure
        (lambda x: x + BIG[0, 0], lambda x: x + BIG[0, 1]),
        (
            lambda x: jax.lax.scan(lambda c, v: (c + v, None), 0.0, x)[0],
            lambda x: jax.lax.scan(lambda c, v: (c - v, None), 0.0, x)[0],
        ),
        (lambda x: jax.jit(lambda y: y * 2)(x), lambda x: jax.jit(lambda y: y * 3)(x)),
    ],
)
def test_different_structures(pair):
    assert not alike(*pair, X)


def test_types_and_settings_are_part_of_the_structure():
    def f(x):
        return x @ x

    square = jnp.ones((3, 3))
    assert not alike(f, f, square, other=(square.astype(jnp.bfloat16),))
    assert not alike(jnp.sin, jnp.sin, 1.0, other=(jnp.float32(1.0),))  # weak and strong
    a = body_of(f, square)
    with jax.default_matmul_precision("highest"):
        assert body_of(f, square).key != a.key
    with jax.named_scope("outer"):
        assert body_of(f, square).key == a.key

    def scoped(x):
        with jax.named_scope("inner"):
            return x @ x

    assert body_of(scoped, square).key != a.key  # names in profiles and HLO must stay right


def test_custom_rule_is_never_shared():
    f = with_rule(1.0)
    assert not alike(f, f, X)


def test_body_evaluates_to_the_function():
    b = body_of(lambda x: jnp.sin(x) * BIG2[0, :3] + jnp.asarray(4.0), X)
    np.testing.assert_array_equal(b(b.operands, X)[0], jnp.full(3, 4.0))
    assert not b.jaxpr.constvars
    assert not any(isinstance(v, _jax.Literal) and isinstance(v.val, jax.Array) for e in b.jaxpr.eqns for v in e.invars)


def test_table_holds_one_function_and_no_values():
    t = StructureTable(size=8)
    const, other = jnp.ones(5), jnp.zeros(5)
    ref = weakref.ref(const)
    body = body_of(lambda x, c=const: x.sum() + c, X)
    kept = t.get(body, "use", lambda b: lambda *a: b(*a))
    again = t.get(body_of(lambda x: x.sum() + other, X), "use", lambda b: pytest.fail("built again"))
    assert again is kept and (t.hits, t.misses, len(t)) == (1, 1, 1)
    assert t.get(body, "other use", lambda b: 3) == 3
    del body, const
    gc.collect()
    assert ref() is None


def loss_of(w, x):
    return jnp.tanh(x @ w.value).sum()


@pytest.mark.parametrize(
    "policy_for",
    [
        lambda state: policies.states(state),
        lambda state: policies.states(lambda path, s: s is state),
        lambda state: policies.states([state]).then(policies.states(lambda path, s: s is state)),
    ],
    ids=["state", "function", "combined"],
)
def test_table_keeps_no_state_of_a_policy(policy_for):
    w = statetx.Param(jnp.ones((4, 4)))
    gradient = statetx.grad(statetx.remat(functools.partial(loss_of, w), policy=policy_for(w)))
    x = jnp.ones((2, 4))
    np.testing.assert_allclose(gradient(x), jax.grad(loss_of, 1)(w, x), rtol=1e-6)
    counts = table.hits, table.misses
    gradient(x)
    assert (table.hits, table.misses) == (counts[0] + 1, counts[1]), "the second call shares what the first has made"
    alive = weakref.ref(w)
    del w, gradient
    gc.collect()
    assert alive() is None


def test_table_is_bounded():
    t = StructureTable(size=4)
    for k in range(20):
        t.get(body_of(lambda x, k=k: x * k, X), "use", lambda b: b)
    assert len(t) == 4
    t.clear()
    assert len(t) == 0 and "0 of 4 kept" in repr(t)


def test_threads_share_the_table():
    t, found = StructureTable(size=64), []

    def work():
        for k in range(10):
            found.append((k, t.get(body_of(lambda x, k=k: x * k, X), "use", lambda b: object())))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for k in range(10):
        assert len({id(f) for j, f in found if j == k}) == 1


def test_equal_layers_share_the_rematerialized_function():
    class Block:
        def __init__(self, seed):
            self.w = statetx.Param(jax.random.normal(jax.random.key(seed), (4, 4)) * 0.3)
            self.n = statetx.State(jnp.zeros((), jnp.int32))

        @statetx.remat
        def __call__(self, x):
            self.n.value += 1
            return jax.nn.relu(self.w.value @ x)

    blocks = [Block(i) for i in range(6)]

    def loss(x):
        for b in blocks:
            x = b(x)
        return x.sum()

    table.clear()
    statetx.jit(statetx.grad(loss)).lower(jnp.ones(4))
    assert (table.hits, table.misses) == (5, 1)
    assert isinstance(body_of(lambda x: x, X), Body)


def test_custom_rule_with_a_name_of_jax_is_not_shared():
    @functools.wraps(jnp.sin)
    def rule(primals, tangents):
        return primals[0], tangents[0] * SCALE[0]

    f = jax.custom_jvp(lambda x: x)
    f.defjvp(rule)
    for SCALE[0] in (1.0, 7.0):
        assert float(jax.grad(statetx.remat(lambda x: f(x)))(1.0)) == SCALE[0]


SCALE = [0.0]


def test_eager_loops_and_branches_over_a_custom_rule_compile_once():
    """Eager code is not differentiated, so there the rule does not distinguish bodies."""

    @jax.custom_jvp
    def spike(x):
        return (x > 0).astype(x.dtype)

    spike.defjvp(lambda primals, tangents: (spike(*primals), 2.0 * tangents[0]))

    @jax.custom_vjp
    def identity(x):
        return x

    identity.defvjp(lambda x: (x, None), lambda _, ct: (3.0 * ct,))
    potential = statetx.State(jnp.zeros(3))

    def step(x):
        inner = statetx.scan(lambda c, _: (identity(c), None), x, None, 1, checkpoint=1)[0]
        potential.value = 0.5 * potential.value + inner
        return jax.jit(spike)(potential.value - 1.0)

    calls = {
        "map": lambda xs: statetx.map(lambda x: step(x), xs),
        "while_loop": lambda xs: statetx.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, step(xs[0])), (0, xs[0]))[
            1
        ],
        "cond": lambda xs: statetx.cond(xs[0, 0] > 0, lambda x: step(x), lambda x: x, xs[0]),
    }
    xs = jnp.linspace(1.3, 1.9, 12).reshape(4, 3)
    for name, call in calls.items():
        first = call(xs)
        with compilations() as events:
            call(xs)
        assert events == [], name
        assert first.any(), name
    grad = statetx.grad(lambda xs: calls["map"](xs).sum())(xs)  # where something is traced, the rules hold
    np.testing.assert_allclose(grad[-1], 6.0)


# -- names of inputs, for JAX's errors about traced values ------------------------------------------------------------


class Held:
    pass


def traced():
    """The type of a trace's names, their name for its input, and a weak reference to an object in the function's
    closure.
    """
    held, found = Held(), []

    def fun(x):
        names = _jax.current_trace().frame.debug_info.arg_names
        found.append((type(names), names[0]))
        return x + len(vars(held))

    statetx.jit(fun)(X)
    jaxpr = statetx.make_jaxpr(fun)(X).jaxpr
    assert not isinstance(jaxpr.debug_info.arg_names, InputNames)
    return *found[0], weakref.ref(held)


def test_names_are_forgotten_with_the_trace():
    cls, name, alive = traced()
    gc.collect()
    assert (cls, name) == (InputNames, "x") and alive() is None


def failed():
    """A weak reference to an object in the closure of a function whose trace, of equations on constants, has failed."""
    held, key = Held(), jax.new_ref(jax.random.key(0))

    def fun(x):
        key[...] = jax.random.split(key[...])[0]
        raise KeyError(len(vars(held)))

    with pytest.raises(KeyError):
        statetx.vmap(fun)(X)
    return weakref.ref(held)


def test_names_are_forgotten_with_a_failed_trace():
    alive = failed()
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("broken", [lambda x: x.nothing, lambda x: 1 / 0])
def test_argument_that_cannot_be_unflattened_is_unknown(broken):
    names = InputNames(jnp.where, lambda leaves: broken(leaves))
    names.num_arguments = 1
    assert names[0] == "unknown" and len(names) == 1 and str(names).startswith("where at ")


def test_names_can_be_copied():
    """JAX 0.12 copies them into each jaxpr that holds a constant."""
    names = InputNames(jnp.where)
    names.num_arguments = 3
    assert tuple(names) == ("", "", "") and names[1:] == ("", "")


# -- shardings of tracers --


def rows_on_mesh():
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
    return mesh, jax.device_put(jnp.ones((16, 8)), NamedSharding(mesh, P("d")))


def test_sharding_of_a_tracer():
    (mesh, x), found = rows_on_mesh(), {}
    w = statetx.State(jax.device_put(jnp.ones((8, 8)), NamedSharding(mesh, P(None, "d"))))

    def look(x):
        found["argument"], found["state"] = sharding_of(x), sharding_of(w.value)
        found["computed"] = sharding_of(x + 1)
        jax.grad(lambda x: [found.update(primal=sharding_of(x)), x.sum()][1])(x)
        jax.vmap(lambda x: found.update(example=sharding_of(x)), in_axes=1)(x)
        return x

    statetx.jit(look)(x)
    named = lambda *spec: NamedSharding(mesh, P(*spec))
    assert found == {
        "argument": named("d", None),
        "state": named(None, "d"),
        "computed": None,
        "primal": named("d", None),
        "example": named(None, "d"),
    }


@pytest.mark.slow
def test_sharding_notes_do_not_outlive_tracers():
    num = len(context._noted_shardings)
    statetx.jit(lambda x: x * 2)(rows_on_mesh()[1])
    jax.clear_caches()
    gc.collect()
    assert len(context._noted_shardings) <= num
    assert TraceContext.of([jnp.ones(3)]) == TraceContext() and note_shardings([], []) is None


def test_loop_calls_a_function_with_a_rule_and_defaults():
    """JAX has more names than inputs of it."""

    @functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2))
    def total(x, axis=None, keepdims=False):
        return x.sum(axis, keepdims=keepdims)

    total.defjvp(lambda axis, keepdims, xs, ts: (total(*xs, axis, keepdims), ts[0].sum(axis, keepdims=keepdims)))
    _, ys = statetx.scan(lambda c, x: (c, total(x, axis=0)), 0.0, jnp.ones((3, 2, 4)))
    np.testing.assert_array_equal(ys, jnp.full((3, 4), 2.0))
