"""Jaxprs as values: the rows of primitives, names that JAX has, and no table of names elsewhere; structures and their
table, which holds no values; the order of computations, `hold`; programs.
"""

import ast
import functools
import gc
import pathlib
import threading
import weakref

import jax
import jax.extend.core.primitives as jax_primitives
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import statetx
from helpers import assert_near, compilations
from statetx import _jax, policies
from statetx._equations import compiled, compiler, primitives
from statetx._equations.compiled import Program
from statetx._equations.dataflow import alive_bytes
from statetx._equations.primitives import TABLE, Forwards, count
from statetx._equations.release.consumers import paired
from statetx._equations.structure import Body, StructureTable, table
from statetx._equations.updates import order_of_updates
from statetx._lift import context
from statetx._lift.context import TraceContext, note_shardings, sharding_of
from statetx._lift.stage import InputNames, stage

ROOT = pathlib.Path(__file__).parents[1] / "statetx"
SOURCES = sorted(ROOT.rglob("*.py"))
KNOWN = {p.name for p in vars(jax_primitives).values() if isinstance(p, jax.extend.core.Primitive)}

# Names without a public primitive in every supported JAX: of other versions, of statetx, of libraries, of JAX's
# internals.
UNLISTED = set(
    "pjit remat remat2 checkpoint copy_p empty empty2 name statetx_loop statetx_call statetx_settled statetx_mark "
    "statetx_stored "
    "statetx_attach statetx_link statetx_notice statetx_runs statetx_hold statetx_note "
    "statetx_with_tangent_of statetx_batch_first unvmap_any scatter_add "
    "scatter_mul "
    "expand_dims logistic square random_split random_fold_in random_bits random_seed random_wrap random_unwrap "
    "tie_in axis_index "
    "core_call shard_map pvary reduced_vary_cast_p vary_unreduced_cast_p compute_on symbolic_zeros stop_gradient "
    "threefry2x32 reshard "
    "sharding_constraint create_token split optimization_barrier device_put eval_jaxpr closed_call "
    "householder_product geqrf erf_inv "
    "tan top_k rsqrt cbrt acos acosh asin asinh atan atanh cosh sinh log2 one_minus_square "
    "stack unstack heaviside_surrogate_gradient".split()
)


def test_every_row_names_a_primitive():
    assert set(TABLE) - KNOWN - UNLISTED == set()
    assert len(set(TABLE) & KNOWN) > 90  # else JAX has renamed them all


# Names of transforms and ordinary words, which lists of other things hold, too.
WORDS = {
    "jit",
    "scan",
    "cond",
    "checkpoint",
    "remat",
    "shard_map",
    "name",
    "split",
    "copy",
    "sort",
    "slice",
    "not",
    "and",
    "or",
    "max",
    "min",
}
# Tables that say something else: rules of a rewrite, special methods of Python.
TABLES_ELSEWHERE = {"_jax/rules.py", "kinds/misuse.py"}


@pytest.mark.thorough
def test_no_other_module_has_a_table_of_primitives():
    """A set, list or dict display, or a split string, with two names of primitives."""
    tables = {}
    for path in SOURCES:
        name = path.relative_to(ROOT).as_posix()
        for node in ast.walk(ast.parse(path.read_text())):
            words = []
            if isinstance(node, (ast.Set, ast.List, ast.Tuple, ast.Dict)):
                items = node.keys if isinstance(node, ast.Dict) else node.elts
                words = [x.value for x in items if isinstance(x, ast.Constant) and isinstance(x.value, str)]
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "split":
                text = node.func.value
                words = text.value.split() if isinstance(text, ast.Constant) and isinstance(text.value, str) else []
            operations = {word for word in words if word in TABLE and word not in WORDS}
            if len(operations) >= 2:
                tables.setdefault(name, []).append((node.lineno, operations))
    assert {name: found for name, found in tables.items() if name not in TABLES_ELSEWHERE} == {}


def test_sets_are_projections_of_the_table():
    assert primitives.VIEWS == {name for name, row in TABLE.items() if row.is_view}
    assert {"jit", "shard_map", "remat2"} <= primitives.CALLS < primitives.ENTERED
    assert primitives.ENTERED - primitives.CALLS == {"scan", "cond"}
    assert primitives.EAGER == primitives.INLINED - primitives.JIT
    # A view holds the entries of its operand, and recomputing it costs nothing.
    assert all(TABLE[name].forwards and TABLE[name].flops is not None for name in primitives.VIEWS)
    assert all(
        row.is_view for row in TABLE.values() if row.forwards is Forwards.VALUE and row.fuses and not row.is_label
    )


@pytest.mark.parametrize(
    ("fun", "operations"),
    [
        (lambda x: jnp.sin(x) + x, 32),
        (lambda x: x @ x, 2 * 64),
        (lambda x: x.sum(), 16),
        (lambda x: x.T.reshape(-1), 0),
        (lambda x: jax.lax.scan(lambda c, _: (c * x, None), x, None, 3)[0], 48),
        (lambda x: jax.lax.cond(True, jnp.sin, lambda x: x @ x, x), 2 * 64),
        (lambda x: jax.jit(jnp.sin)(x), 16),
    ],
)
def test_operations_are_counted_by_the_rows(fun, operations):
    jaxpr = jax.make_jaxpr(fun)(jnp.ones((4, 4))).jaxpr
    assert count(jaxpr) == operations


@pytest.mark.parametrize(
    "order, found", {(0, 1, 2): None, (1, 2, 0): [2, 0, 1], (2, 1, 0): [2, 1, 0], (0, 2, 1): [0, 2, 1]}.items()
)
def test_updates_in_another_order_than_the_donated_inputs_are_found(order, found):
    """The first update depends on all inputs entry by entry, as the weights of Adam do."""
    step = lambda w, m, v: [(w - m / v, 0.9 * m, 0.99 * v)[i] for i in order]
    jaxpr = jax.make_jaxpr(step)(*jnp.ones((3, 4)))
    assert order_of_updates(jaxpr, [True] * 3) == found
    assert order_of_updates(jaxpr, [False] * 3) is None


def test_updates_come_in_the_order_of_the_donated_inputs_and_other_outputs_after_them():
    def step(w, m):
        return m * 2, w * 3, jnp.zeros(3), w.sum() * jnp.ones(3), m.sum()

    jaxpr = jax.make_jaxpr(step)(jnp.ones(3), jnp.ones(3))
    assert order_of_updates(jaxpr, [True, True]) == [1, 0, 2, 3, 4]
    assert order_of_updates(jaxpr, [True, False]) == [1, 0, 2, 3, 4]
    assert order_of_updates(jaxpr, [False, True]) is None


def test_an_output_takes_the_memory_of_what_it_updates():
    """Of two operands of its type that each output is computed from: else the donated memory is copied in the end."""

    def update(w, m, g):
        m = 0.9 * m + g * jnp.abs(w)
        return m, w - 0.1 * m

    jaxpr = jax.make_jaxpr(update)(*jnp.ones((3, 4))).jaxpr
    (w, m, _), (new_m, new_w) = jaxpr.invars, jaxpr.outvars
    assert paired(jaxpr.eqns, [new_m, new_w], [w, m]) == {new_m: m, new_w: w}
    assert paired(jaxpr.eqns, [new_w, new_m], [w]) == {new_w: w}


def test_a_value_is_alive_from_its_first_step_to_its_last():
    spans = [(0, 1, 8), (1, 2, 4), (2, 2, 1), (3, 2, 100)]
    assert alive_bytes(4, spans).tolist() == [8, 12, 5, 0]
    assert alive_bytes(0, []).tolist() == []


# -- programs --------------------------------------------------------------------------------------------------------


def test_options_of_a_program_that_is_compiled_to_be_measured(monkeypatch):
    fast = {"xla_backend_optimization_level": 0}
    assert fast.items() <= compiler.memory_analysis_options().items()
    monkeypatch.setattr(compiled, "estimate_options", lambda: fast)
    args = jnp.sin, [jnp.ones(3)]
    assert compiled.Program(*args, estimates=True).compiler_options == fast
    assert compiled.Program(*args).compiler_options in (None, {})


def test_programs_with_updates_that_can_move():
    """Not on a mesh, whose types the rewritten program would lack."""
    loss = lambda ws, x: jnp.mean(jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws)[0] ** 2)
    step = jax.jit(lambda ws, x: ws - 0.1 * jax.grad(loss)(ws, x), donate_argnums=0)
    args = jnp.ones((8, 64, 64)), jnp.ones((16, 64))
    released = lambda step, *args: Program.of_traced(step.trace(*args)).released()
    assert "scan" in str(released(step, *args).jaxpr)
    assert released(jax.jit(loss), *args) is None
    with jax.set_mesh(jax.make_mesh((1,), ("d",), axis_types=(AxisType.Explicit,))):
        assert released(step, *jax.device_put(args, P())) is None


# -- hold, the identity ----------------------------------------------------------------------------------------------

# No derivative below is zero at these, nor equal in two entries.
X = jnp.linspace(0.1, 1.3, 4)
A = jnp.linspace(-0.9, 0.8, 6).reshape(2, 3)
N = jnp.arange(1, 4)


def of_one(hold, x, a):
    y = hold(jnp.sin(x), [a])
    return (y**3).sum() + (jnp.cos(a) ** 3).sum() * jnp.exp(y[0])


def of_several(hold, x, a):
    y = hold(jnp.sin(x), [a, b := a[0] * x[0]])
    return (y**3).sum() + (jnp.cos(a) ** 3).sum() + jnp.sin(b).prod()


def of_integers(hold, x, a):
    return (hold(jnp.sin(x), [N, a]) ** 3).sum() + (jnp.cos(a) ** 3).sum() * N.sum()


def without_tangent(hold, x, a):
    return (hold(jax.lax.stop_gradient(x), [a]) * x).sum() + (jnp.cos(a) ** 3).sum()


def without_cotangent(hold, x, a):
    hold(jnp.sin(x), [a])
    return (x**3).sum() + (jnp.cos(a) ** 3).sum()


each_case = pytest.mark.parametrize(
    "case", [of_one, of_several, of_integers, without_tangent, without_cotangent], ids=lambda f: f.__name__
)


def twins(case):
    """The function with the order, and without."""
    return (lambda x, a: case(_jax.hold, x, a)), (lambda x, a: case(lambda y, others: y, x, a))


@pytest.mark.sample
@each_case
def test_derivatives_equal_those_without_the_order(case):
    def derivatives(f):
        grad = jax.grad(f, (0, 1))
        xs, many = jnp.stack([X, 2 * X, X - 1]), jnp.stack([A, A + 1, 3 * A])

        def compiled(x, a):
            along = jax.jvp(f, (x, a), (x + 1, a * 2)), jax.linearize(f, x, a)[1](x + 1, a * 2)
            mapped = [jax.vmap(grad, (0, None))(xs, a), jax.vmap(grad, (None, 0))(x, many), jax.vmap(f)(xs, many)]
            again = jax.checkpoint(f), jax.checkpoint(f, policy=jax.checkpoint_policies.everything_saveable)
            return (
                f(x, a),
                along,
                mapped,
                jax.hessian(f, (0, 1))(x, a),
                [jax.grad(g, (0, 1))(x, a) for g in (f, *again)],
            )

        return grad(X, A), jax.jit(compiled)(X, A)

    assert_near(*map(derivatives, twins(case)))


def test_gradient_of_a_gradient():
    def penalty(f):
        return lambda x, a: sum((g**2).sum() for g in jax.grad(f, (0, 1))(x, a))

    found, expected = (jax.jit(jax.grad(penalty(f), (0, 1)))(X, A) for f in twins(of_one))
    assert_near(found, expected)
    assert all(jnp.abs(g).min() > 0 for g in expected)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int8", "uint8", "complex64", "bool"])
def test_value_waits_for_arrays_of_any_type(dtype):
    other = jnp.arange(3).astype(dtype)
    found = jax.jit(lambda x, y: (_jax.hold(jnp.sin(x), [y]), _jax.hold(y, [x])))(X, other)
    assert_near(found[0], jnp.sin(X))
    np.testing.assert_array_equal(found[1], other)


@pytest.mark.parametrize("num", [0, 1, 200])
def test_value_waits_for_any_number_of_arrays(num):
    others = [jnp.full(2, float(i)) for i in range(num)]
    assert_near(jax.jit(lambda x, ys: _jax.hold(x, ys))(X, others), X)


def test_zeros_and_nans_do_not_decide_the_value():
    for value in (0.0, -0.0, jnp.nan, jnp.inf):
        assert_near(jax.jit(lambda x, y: _jax.hold(x, [y]))(X, jnp.full(3, value)), X)


def test_exported_for_a_symbolic_size():
    size = export.symbolic_shape("b")[0]
    ordered, plain = (jax.jit(jax.grad(f, (0, 1))) for f in twins(of_one))
    for x, a in ((jax.ShapeDtypeStruct((size,), X.dtype), A), (X, jax.ShapeDtypeStruct((size, 3), A.dtype))):
        assert_near(export.export(ordered)(x, a).call(X, A), plain(X, A))


@pytest.mark.skipif(len(jax.devices()) < 4, reason="needs 4 devices; conftest asks for them")
@pytest.mark.parametrize("check_vma", [True, False])
def test_gradient_in_shard_map(check_vma):
    rows = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("d",))

    def sums(f):
        def local(x, a):
            return jax.tree.map(lambda g: jax.lax.psum(g, "d"), jax.grad(f, (0, 1))(x, a))

        specs = {"in_specs": (P("d"), P()), "out_specs": P(), "check_vma": check_vma}
        return jax.jit(jax.shard_map(local, mesh=rows, **specs))(X, A)

    assert_near(*map(sums, twins(of_several)))


# -- structures ------------------------------------------------------------------------------------------------------

V = jnp.arange(3.0)


def body_of(f, *args):
    avals = [_jax.abstract(x) for x in args]
    return stage(lambda *xs: ([f(*xs)], None), avals, traced_for="test", names=InputNames(f))[0]


def alike(f, g, *args, other=None):
    a, b = body_of(f, *args), body_of(g, *(other or args))
    assert hash(a.key) == hash(b.key) or a.key != b.key
    return a.key == b.key


TWICE, SCALAR, OTHER = 2 * V, jnp.asarray(2.0), jnp.asarray(3.0)
BIG, BIG2 = jnp.ones((64, 64)), jnp.zeros((64, 64))


@pytest.mark.parametrize(
    "pair",
    [
        (lambda x: jnp.sin(x) * 2, lambda y: jnp.sin(y) * 2),
        (lambda x: x + V, lambda x: x + TWICE),  # constants are operands
        (lambda x: x * SCALAR, lambda x: x * OTHER),  # scalar arrays too
        (lambda x: jax.nn.relu(x), lambda x: jax.nn.relu(x)),  # a custom derivative rule of JAX's own
        (lambda x: jax.nn.silu(jax.nn.softmax(x)), lambda x: jax.nn.silu(jax.nn.softmax(x))),
        (lambda x: jax.checkpoint(jnp.sin)(x), lambda x: jax.checkpoint(jnp.sin)(x)),
        (lambda x: jax.lax.scan(lambda c, v: (c + v, None), 0.0, x)[0],) * 2,
    ],
)
def test_equal_structures(pair):
    assert alike(*pair, V)


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
    assert not alike(*pair, V)


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
    assert not alike(f, f, V)


def test_body_evaluates_to_the_function():
    b = body_of(lambda x: jnp.sin(x) * BIG2[0, :3] + jnp.asarray(4.0), V)
    np.testing.assert_array_equal(b(b.operands, V)[0], jnp.full(3, 4.0))
    assert not b.jaxpr.constvars
    assert not any(isinstance(v, _jax.Literal) and isinstance(v.val, jax.Array) for e in b.jaxpr.eqns for v in e.invars)


def test_table_holds_one_function_and_no_values():
    t = StructureTable(size=8)
    const, other = jnp.ones(5), jnp.zeros(5)
    ref = weakref.ref(const)
    body = body_of(lambda x, c=const: x.sum() + c, V)
    kept = t.get(body, "use", lambda b: lambda *a: b(*a))
    again = t.get(body_of(lambda x: x.sum() + other, V), "use", lambda b: pytest.fail("built again"))
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
        t.get(body_of(lambda x, k=k: x * k, V), "use", lambda b: b)
    assert len(t) == 4
    t.clear()
    assert len(t) == 0 and "0 of 4 kept" in repr(t)


def test_threads_share_the_table():
    t, found = StructureTable(size=64), []

    def work():
        for k in range(10):
            found.append((k, t.get(body_of(lambda x, k=k: x * k, V), "use", lambda b: object())))

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
    assert isinstance(body_of(lambda x: x, V), Body)


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

    statetx.jit(fun)(V)
    jaxpr = statetx.make_jaxpr(fun)(V).jaxpr
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
        statetx.vmap(fun)(V)
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


def test_mapped_call_has_its_batch_axis_first():
    """A scan stacks its outputs behind the axis of steps; a `jax.custom_jvp` and its rule must agree on one axis."""
    rows = lambda x: jax.lax.scan(lambda c, n: (c, n * x), 0, jnp.arange(3.0))[1]
    calls = {
        "call_whole": lambda x: _jax.call_whole(jax.make_jaxpr(rows)(x), [x])[0],
        "batch_first": lambda x: _jax.batch_first(rows(x)),
    }
    for name, call in calls.items():
        eqns = jax.make_jaxpr(jax.vmap(call, in_axes=1, out_axes=1))(jnp.ones((2, 5))).eqns
        shapes = [e.outvars[0].aval.shape for e in eqns if e.primitive.name.startswith("statetx")]
        assert shapes == [(5, 3, 2)], name
