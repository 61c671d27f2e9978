"""The rows of primitives: names that JAX has, and no table of names elsewhere. The order of computations, `hold`."""

import ast
import pathlib

import jax
import jax.extend.core.primitives as jax_primitives
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import PartitionSpec as P

from helpers import assert_near
from statetx import _jax
from statetx._equations import primitives
from statetx._equations.primitives import TABLE, Forwards, count
from statetx._equations.updates import order_of_updates

ROOT = pathlib.Path(__file__).parents[1] / "statetx"
SOURCES = sorted(ROOT.rglob("*.py"))
KNOWN = {p.name for p in vars(jax_primitives).values() if isinstance(p, jax.extend.core.Primitive)}

# Names without a public primitive in every supported JAX: of other versions, of statetx, of libraries, of JAX's
# internals.
UNLISTED = set(
    "pjit remat remat2 checkpoint copy_p empty empty2 name statetx_loop statetx_call statetx_settled statetx_mark "
    "statetx_stored "
    "statetx_attach statetx_link statetx_notice statetx_runs statetx_hold statetx_note "
    "statetx_with_tangent_of unvmap_any scatter_add "
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
