"""The rows of primitives: names that JAX has, and no table of names elsewhere."""

import ast
import pathlib

import jax
import jax.extend.core.primitives as jax_primitives
import jax.numpy as jnp
import pytest

from statetx._equations import primitives
from statetx._equations.primitives import TABLE, Forwards, count

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
