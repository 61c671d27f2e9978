"""`saved_residuals` and `print_fwd_bwd`: the listed residuals against the arrays that the pullback really holds."""

from __future__ import annotations

import io
import json
import os
import xml.etree.ElementTree

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
import pytest

import corpus
import statetx
from corpus import PROGRAMS, Program, X
from helpers import compilations, in_turn
from statetx import policies
from statetx.residuals.fwd_bwd import FwdBwd
from statetx.residuals.saved import traced_to_differentiate
from statetx.residuals.table import Residuals

SOME = [corpus.Dropout, corpus.BatchNormKeyword, corpus.Nested, corpus.CustomRules, corpus.Branches]


def is_float(x):
    return isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jnp.inexact)


def real_bytes(fun, *args, compiled=False):
    """Bytes of the distinct arrays in the closure that `jax.vjp` returns, for every float array that goes in.

    Run eagerly, the function's equations are: JAX makes a scalar array of each Python number that it meets in the
    source of an eager function, where a program that is traced, as every training step is, has a literal.
    """
    pure = statetx.functionalize(fun)
    leaves, treedef = jax.tree.flatten((pure.values(*args), args))
    chosen = [i for i, x in enumerate(leaves) if is_float(x)]

    def differentiated(*given):
        whole = list(leaves)
        for i, x in zip(chosen, given, strict=True):
            whole[i] = x
        values, args = jax.tree.unflatten(treedef, whole)
        return list(filter(is_float, jax.tree.leaves(pure(values, *args)[0])))

    given = [leaves[i] for i in chosen]
    run = jax.jit(differentiated) if compiled else jex_core.jaxpr_as_fun(jax.make_jaxpr(differentiated)(*given))
    _, pull = jax.vjp(run, *given)
    return sum({id(x): x.nbytes for x in jax.tree.leaves(pull) if isinstance(x, jax.Array)}.values())


def first(out):
    return next(leaf for leaf in jax.tree.leaves(out) if is_float(leaf) and jnp.ndim(leaf))


def plain(step):
    return step


def rematerialized(step):
    return statetx.remat(step)


def with_dots(step):
    return statetx.remat(step, policy="dots_saveable")


def nested(step):
    inner = statetx.remat(step)
    return statetx.remat(lambda x: jnp.sin(first(inner(x))))


def scanned(step):
    return lambda x: statetx.scan(lambda c, _: (jnp.tanh(first(step(c))), c), x, None, length=3)


def scanned_remat(step):
    return scanned(statetx.remat(step))


def jitted(step):
    return statetx.jit(lambda x: first(statetx.remat(step)(x)) * 2)


def vmapped(step):
    rows = statetx.vmap(lambda s, x: first(statetx.remat(step)(s * x)), in_axes=(0, None))
    return lambda x: rows(jnp.ones(2), x).sum()


USUAL = [plain, rematerialized, scanned_remat]


# Each program in one of the usual ways in turn.
CASES = [
    pytest.param(p, w, id=f"{p.__name__}-{w.__name__}", marks=[pytest.mark.slow] * (w is not USUAL[n % 3]))
    for n, p in enumerate(PROGRAMS)
    for w in USUAL
]
MORE = [
    pytest.param(p, w, id=f"{p.__name__}-{w.__name__}", marks=pytest.mark.slow)
    for p in PROGRAMS
    for w in (with_dots, nested, scanned, jitted)
]
MORE += [pytest.param(p, vmapped, id=f"{p.__name__}-vmapped") for p in (corpus.ReadOnly, corpus.Branches)]
MORE += [
    pytest.param(p, w, id=f"{p.__name__}-{w.__name__}-") for p in SOME for w in (with_dots, nested, scanned, jitted)
]


@pytest.mark.sample
@pytest.mark.filterwarnings("ignore:.*saves nothing")  # dots, of programs without
@pytest.mark.parametrize("program, way", [*in_turn(CASES), *in_turn(MORE, 3)])
def test_bytes_equal_the_arrays_of_the_pullback(program: type[Program], way):
    x = jnp.asarray(X, jnp.float32)

    def make():
        made = program()
        if program.grows:
            made.step(x)  # a state created in the call itself is not part of its closure
        return way(made.step)

    residuals = statetx.saved_residuals(make(), x)
    assert residuals.total_bytes == sum(row.nbytes for row in residuals)
    assert residuals.total_bytes == real_bytes(make(), x) > 0
    assert residuals.total_bytes == real_bytes(make(), x, compiled=True)


def test_named_array_is_counted_once():
    def f(x):
        y = jnp.tanh(x)
        z = statetx.checkpoint_name(y, "z")
        return y * z * x

    residuals = statetx.saved_residuals(f, jnp.ones(5))
    assert residuals.total_bytes == real_bytes(f, jnp.ones(5))
    assert [row.names for row in residuals if row.primitive == "tanh"] == [("z",)]


# -- a model with known residuals -----------------------------------------------------------------------------


class Block:
    def __init__(self, n):
        self.w = statetx.Param(jnp.eye(n))
        self.b = statetx.Param(jnp.zeros((1, n)))
        self.calls = statetx.State(jnp.zeros((), jnp.int32))

    def body(self, x):
        self.calls.value += 1
        h = statetx.checkpoint_name(x @ self.w.value + self.b.value, "h")
        return jnp.sin(jnp.tanh(h))

    plain = body
    full = statetx.remat(body)
    by_name = statetx.remat(body, policy=policies.names("h"))
    dots = statetx.remat(body, policy=policies.dots)


def model(method):
    blocks = [Block(8), Block(8)]

    def loss(x):
        for block in blocks:
            x = getattr(block, method)(x)
        return jnp.sum(x)

    return loss, blocks


B8 = jnp.ones((4, 8))
"""Each activation of the model has 4 x 8 floats: 128 bytes; each matrix 256."""


def rows(residuals, *fields):
    return [tuple(getattr(row, f) for f in fields) for row in residuals]


def test_rows_of_a_rematerialized_model():
    loss, blocks = model("full")
    residuals = statetx.saved_residuals(loss, B8)
    assert rows(residuals, "type", "times", "nbytes", "origin", "path", "kind", "module", "primitive", "why") == [
        ("f32[4,8]", 1, 128, "argument", "x", "", "", "", ("input of Block.body",)),
        ("f32[8,8]", 1, 256, "state", "blocks.0.w", "Param", "blocks.0", "", ("input of Block.body",)),
        ("f32[1,8]", 1, 32, "state", "blocks.0.b", "Param", "blocks.0", "", ("input of Block.body",)),
        ("f32[8,8]", 1, 256, "state", "blocks.1.w", "Param", "blocks.1", "", ("input of Block.body",)),
        ("f32[1,8]", 1, 32, "state", "blocks.1.b", "Param", "blocks.1", "", ("input of Block.body",)),
        ("f32[4,8]", 1, 128, "intermediate", "", "", "blocks.0", "sin", ("input of Block.body",)),
    ]
    assert (residuals.total_bytes, residuals.intermediate_bytes) == (832, 128)
    assert residuals.by("module") == {"blocks.0": 416, "blocks.1": 288, "": 128}
    assert [int(block.calls.value) for block in blocks] == [0, 0], "asking runs nothing"


def test_rows_of_values_saved_by_a_policy():
    for method, name, primitive in [("by_name", ("h",), "add"), ("dots", (), "dot_general")]:
        loss, _ = model(method)
        residuals = [row for row in statetx.saved_residuals(loss, B8) if row.reason == "policy"]
        expected = [(name, primitive, module, ("policy of Block.body",)) for module in ("blocks.0", "blocks.1")]
        assert rows(residuals, "names", "primitive", "module", "why") == expected
        assert all("statetx" not in str(row) for row in residuals)


def test_rows_without_remat():
    loss, _ = model("plain")
    residuals = statetx.saved_residuals(loss, B8)
    assert {row.why for row in residuals} == {("not rematerialized",)}
    assert residuals.intermediate_bytes > 3 * 128


def test_source_is_the_line_of_the_user():
    loss, _ = model("by_name")
    row = next(row for row in statetx.saved_residuals(loss, B8) if row.names)
    code = Block.body.__code__
    file, _, line = row.source.rpartition(":")
    assert file == code.co_filename and int(line) == code.co_firstlineno + 2
    assert row.function == "Block.body"


def test_source_of_a_library_function_is_the_line_that_calls_it():
    def one(x):
        return jnp.where(x > 0, jnp.exp(x), 0.0).sum()

    def two(x):  # of the same types: jax has the inner jaxpr of jnp.where from the call above
        return jnp.where(x > 0, jnp.exp(x), 0.0).sum()

    for f in (one, two):
        residuals = statetx.saved_residuals(f, jnp.ones(3))
        assert {row.function.rsplit(".")[-1] for row in residuals} == {f.__name__}


def test_equal_functions_have_their_own_source_lines():
    x = jnp.ones(3)
    for name in ("f", "g"):
        scope = {"jnp": jnp}
        exec(compile(f"def {name}(x):\n    return jnp.sin(jnp.cos(x))", f"{name}.py", "exec"), scope)
        keep_cos = statetx.remat(scope[name], policy=policies.primitives("cos"))
        keep_cos(x)
        row = statetx.saved_residuals(lambda x, f=keep_cos: jax.jit(f)(x).sum(), x)[-1]
        assert (row.source, row.function, row.why) == (f"{name}.py:2", name, (f"policy of {name}",))


# -- loops, batches, branches, rules --------------------------------------------------------------------------


def test_loop_of_length_t_saves_t_values():
    w = statetx.Param(jnp.eye(4))

    @statetx.remat(policy=policies.dots)
    def cell(h):
        return jnp.tanh(h @ w.value)

    def run(h):
        outer = lambda c, _: (statetx.scan(lambda c, _: (cell(c), None), c, None, length=3)[0], None)
        return statetx.scan(outer, h, None, length=5)[0]

    residuals = {
        row.primitive: row for row in statetx.saved_residuals(run, jnp.ones(4)) if row.origin == "intermediate"
    }
    assert rows(residuals.values(), "shape", "times", "nbytes") == [((4,), 15, 240)] * 2
    assert residuals["dot_general"].why == ("policy of cell",)
    assert residuals["tanh"].why == ("input of cell",), "the result of a step is the input of the next"
    # The products are saved: the recomputation is one tanh for each entry of each step.
    assert residuals["tanh"].flops == 15 * 4
    assert residuals["dot_general"].flops == 15 * 2 * 4 * 4


def test_mapped_function_saves_a_batch():
    def f(w, x):
        return jnp.sin(statetx.checkpoint_name(w @ x, "y"))

    residuals = statetx.saved_residuals(lambda w, xs: jax.vmap(f, (None, 0))(w, xs).sum(), jnp.eye(3), jnp.ones((5, 3)))
    assert [(row.path or row.primitive, row.type) for row in residuals][:2] == [("w", "f32[3,3]"), ("xs", "f32[5,3]")]
    assert (residuals[2].type, residuals[2].primitive) == ("f32[3,5]", "cos")


def test_branch_that_computes_a_residual_is_named():
    for branches in [(lambda x: 2 * x, jnp.exp), (jnp.exp, lambda x: 2 * x)]:
        residuals = statetx.saved_residuals(lambda x, b=branches: jax.lax.cond(x[0] > 0, *b, x), jnp.ones(3))
        assert rows(residuals, "type", "primitive", "flops")[1:] == [("f32[3]", "exp", 3)]


def test_residuals_of_custom_rules_are_found():
    @jax.custom_vjp
    def f(x):
        return jnp.sin(x)

    f.defvjp(lambda x: (f(x), jnp.cosh(x)), lambda residuals, ct: (residuals * ct,))
    for way in (
        lambda f: f,
        jax.jit,
        lambda f: lambda x: jax.lax.scan(lambda c, _: (f(c), None), x, None, length=2)[0],
    ):
        (row,) = statetx.saved_residuals(way(f), jnp.ones(3))
        assert row.primitive == "cosh" and row.nbytes == 12 * row.times


def test_functions_in_a_budgeted_loop_are_named():
    @statetx.remat
    def cell(h):
        return jnp.sin(jnp.sin(h))

    def rows(checkpoint):
        loop = lambda h: statetx.scan(lambda h, _: (cell(h), None), h, None, 70, checkpoint=checkpoint)[0]
        return [(row.type, row.times, row.why, row.source) for row in statetx.saved_residuals(loop, jnp.ones(3))]

    assert rows("auto") == rows(statetx.policies.Budget("64MiB")) == rows(None)
    assert any("input of cell" in row[2] for row in rows("auto"))


def test_nested_remat_saves_for_the_outer_function():
    inner = statetx.remat(jnp.sin, policy="everything_saveable")
    outer = statetx.remat(lambda x: inner(jnp.exp(inner(x))))
    (row,) = statetx.saved_residuals(lambda x: outer(x).sum(), jnp.ones(3))
    assert (row.origin, row.path, len(row.why)) == ("argument", "x", 1)


def test_offloaded_values_show_their_memory():
    @statetx.remat(policy=policies.offload("h"))
    def f(x):
        return jnp.sin(statetx.checkpoint_name(jnp.exp(x), "h"))

    row = statetx.saved_residuals(lambda x: f(x).sum(), jnp.ones(3))[-1]
    assert (row.names, row.memory, row.primitive, row.reason) == (("h",), "pinned_host", "exp", "policy")
    assert "pinned_host" in str(row)


# -- wrt= and argnums= ----------------------------------------------------------------------------------------


def test_wrt_and_argnums_limit_residuals():
    w = statetx.Param(jnp.ones(3))
    scale = statetx.State(jnp.ones(3))

    def f(x, y):
        return (w.value * x + scale.value * y).sum()

    def paths(**options):
        return {row.path for row in statetx.saved_residuals(f, jnp.ones(3), jnp.ones(3), **options)}

    assert paths() == {"w", "x", "scale", "y"}
    assert paths(argnums=0) == {"w"}
    assert paths(argnums=(0, 1)) == {"w", "scale"}
    assert paths(wrt=statetx.Param) == {"x"}
    assert paths(wrt={"s": scale}) == {"y"}
    assert paths(wrt=w, argnums=1) == {"x", "scale"}
    with pytest.raises(statetx.StateFilterError):
        paths(wrt="nothing.*")
    with pytest.raises(ValueError, match="argnums"):
        paths(argnums=2)


def test_arguments_are_named_as_expressions():
    def f(params, *rest, scale):
        return sum(jnp.sin(x).sum() * jnp.sum(scale["s"] ** 2) for x in (params["w"], *rest))

    residuals = statetx.saved_residuals(f, {"w": jnp.ones(2)}, jnp.ones(3), jnp.ones(4), scale={"s": jnp.ones(5)})
    plan = statetx.remat(f, policy=None)
    names = {
        row.path for row in statetx.saved_residuals(plan, {"w": jnp.ones(2)}, jnp.ones(3), scale={"s": jnp.ones(5)})
    }
    assert names == {"params['w']", "rest[0]", "scale['s']"}
    assert len(residuals) > 0


def test_types_may_stand_for_arrays():
    loss, _ = model("full")
    of_types = statetx.saved_residuals(loss, jax.ShapeDtypeStruct((4, 8), jnp.float32))
    assert of_types.to_dict() == statetx.saved_residuals(loss, B8).to_dict()


def test_has_aux_and_functions_without_floats():
    f = lambda x: (jnp.sum(x**2), jnp.exp(x))
    assert {row.primitive for row in statetx.saved_residuals(f, jnp.ones(3), has_aux=True)} == {"mul"}
    assert len(statetx.saved_residuals(f, jnp.ones(3))) == 2
    nothing = statetx.saved_residuals(lambda n: n + 1, jnp.arange(3))
    assert (len(nothing), nothing.total_bytes, str(nothing)) == (0, 0, "<lambda> keeps nothing")
    assert nothing._repr_html_() and repr(nothing)


def test_body_runs_once_and_nothing_is_computed():
    class Boom(Exception):
        pass

    runs = []
    s = statetx.State(jnp.zeros(3))

    def f(x):
        runs.append(1)
        s.value = jax.pure_callback(lambda v: (_ for _ in ()).throw(Boom()), x, x)
        return jnp.sin(x + jax.lax.stop_gradient(s.value))

    before = s.value
    with compilations() as compiled:
        residuals = statetx.saved_residuals(f, jax.ShapeDtypeStruct((3,), jnp.float32), argnums=())
        assert not len(residuals) and not compiled
    assert runs == [1] and s.value is before


def test_refs_are_states():
    ref = jax.new_ref(jnp.ones(3))

    def f(x):
        ref[...] = ref[...] * 2
        return jnp.sin(x * ref[...]).sum()

    residuals = statetx.saved_residuals(lambda x: f(x) * ref[...].sum(), jnp.ones(3), argnums=0)
    assert [row.primitive for row in residuals if row.reason != "not read"] == ["mul", "cos", "reduce_sum"]
    assert float(ref[0]) == 1.0
    residuals = statetx.saved_residuals(lambda x: (ref[...] * x).sum(), jnp.ones(3), argnums=0)
    assert rows(residuals, "origin", "path", "kind") == [("state", "ref", "Ref")]


def test_recomputation_starts_from_residuals():
    w = jnp.eye(8)

    @statetx.remat(policy=policies.names("a", "b"))
    def f(x):
        a = statetx.checkpoint_name(x @ w, "a")
        b = statetx.checkpoint_name(jnp.sin(a) @ w, "b")
        return jnp.sin(b)

    residuals = {row.names: row for row in statetx.saved_residuals(lambda x: f(x).sum(), jnp.ones(8))}
    assert residuals[("a",)].flops == 128
    assert residuals[("b",)].flops == 8 + 128, "from a, which is kept, and not from x"


# -- printed forms -------------------------------------------------------------------------------------------


def small():
    w = statetx.Param(jnp.ones((3, 4)))
    cell = statetx.remat(
        lambda h: jnp.tanh(statetx.checkpoint_name(h @ w.value @ w.value.T, "h<1>")), policy=policies.names("h<1>")
    )

    def loss(x):
        return statetx.scan(lambda c, _: (cell(c), None), x, None, length=10)[0].sum()

    return loss


def test_text():
    residuals = statetx.saved_residuals(small(), jnp.ones((2, 3)))
    line = residuals[-1].source.rsplit(":")[-1]
    lines = [" ".join(text.split()) for text in str(residuals).splitlines()]
    assert lines == [
        "loss keeps 3 values, 528 B: 480 B intermediate, 48 B inputs and constants",
        "value times bytes what where module FLOPs kept because",
        lines[2],
        "f32[3,4] 48 B cell.w Param cell input of <lambda>",
        f"f32[2,3] 10 240 B 'h<1>' tests/test_residuals.py:{line} (<lambda>) cell 960 policy of <lambda>",
        f"f32[2,3] 10 240 B tanh tests/test_residuals.py:{line} (<lambda>) cell 60 input of <lambda>",
        "More: statetx.memory_profile(fun, ...) shows what is alive at the peak of the compiled program.",
    ]
    widths = {len(text) for text in str(residuals).splitlines()[2:3]}
    assert len(widths) == 1 and repr(residuals).startswith("Residuals(loss keeps")


def test_printed_lines(capsys):
    statetx.print_saved_residuals(small(), jnp.ones((2, 3)))
    *found, total = capsys.readouterr().out.splitlines()
    residuals = statetx.saved_residuals(small(), jnp.ones((2, 3)))
    place = os.path.relpath(residuals[1].source)
    assert os.path.isabs(residuals[1].source) and not place.startswith("..")
    assert [" ".join(line.split()) for line in found] == [
        "f32[3,4] 48 B from the state cell.w (Param)",
        f"10 x f32[2,3] 240 B named 'h<1>' from {place} (<lambda>)",
        f"10 x f32[2,3] 240 B output of tanh from {place} (<lambda>)",
    ]
    assert total == "528 B in 3 values, 480 B of them intermediate"


def test_dict_is_json():
    residuals = statetx.saved_residuals(small(), jnp.ones((2, 3)))
    data = json.loads(json.dumps(residuals.to_dict()))
    assert data["total_bytes"] == 528 and len(data["residuals"]) == 3
    assert data["residuals"][1]["names"] == ["h<1>"] and data["residuals"][1]["shape"] == [2, 3]


def test_sequence():
    residuals = statetx.saved_residuals(small(), jnp.ones((2, 3)))
    assert isinstance(residuals[:2], Residuals) and len(residuals[:2]) == 2 and residuals[0] in residuals
    assert [row.nbytes for row in residuals.largest(2)] == [240, 240]
    assert residuals.by("origin") == {"intermediate": 480, "state": 48}


def parts_of(html):
    """The text of well-formed HTML; raises where it is not."""
    return "".join(xml.etree.ElementTree.fromstring(html).itertext())


def test_html():
    pytest.importorskip("rich")
    residuals = statetx.saved_residuals(small(), jnp.ones((2, 3)))
    text = parts_of(residuals._repr_html_())
    assert "'h<1>'" in text and "cell.wParamcell" in text and "policy of <lambda>" in text


def test_rich():
    console = pytest.importorskip("rich.console")
    residuals = statetx.saved_residuals(small(), jnp.ones((2, 3)))
    for width, lines in [(200, 10), (60, 22)]:
        out = console.Console(width=width, file=io.StringIO(), record=True)
        out.print(residuals)
        text = out.export_text()
        assert text.count("\n") < lines
        words = " ".join(text.split())
        assert "'h<1>'" in words and "240 B" in words and "policy of <lambda>" in words


# -- forward and backward side by side ---------------------------------------------------------------------------


def test_fwd_bwd_marks_residuals_on_both_sides(capsys):
    loss, blocks = model("by_name")
    shown = statetx.print_fwd_bwd(loss, B8)
    printed = capsys.readouterr().out
    assert printed.strip() == str(shown).strip()
    forward, backward = shown.text(109).split("\nbackward\n")
    labels = [label for label, _, _ in shown.residuals]
    assert labels == ["*x", "*blocks.0.w", "*blocks.1.w", "*h", "*h_2", "*r1"]
    assert all(label in forward and label in backward for label in labels)
    assert backward.count(" = remat2[") == 2 and "remat2" not in forward
    assert "statetx_" not in printed and "gradient of blocks.1.b" in backward
    residuals = statetx.saved_residuals(loss, B8)
    assert sum(size for _, _, size in shown.residuals) == residuals.total_bytes
    assert int(blocks[0].calls.value) == 0


@pytest.mark.parametrize("format", ["bits", "bfloat16", "float8_e5m2"])
def test_fwd_bwd_of_values_stored_in_fewer_bits(format):
    block = statetx.remat(lambda x, w: jnp.sin(jnp.sin(x) @ w), inputs_stored_as=(format, None))
    loss = lambda x, w: jnp.sum(block(block(x, w), w))
    x, w = jnp.ones((2, 16)), jnp.ones((16, 16))
    shown = statetx.print_fwd_bwd(loss, x, w)
    types = [type_ for _, type_, _ in shown.residuals]
    assert {"bits": "u8[2,2]", "bfloat16": "bf16[2,16]", "float8_e5m2": "f8_e5m2[2,16]"}[format] in types
    assert sum(size for _, _, size in shown.residuals) == statetx.saved_residuals(loss, x, w).total_bytes


def test_fwd_bwd_fits_the_width():
    loss, _ = model("dots")

    def looped(x):
        y = statetx.scan(lambda c, _: (jnp.sin(c) * loss(c), None), x, None, length=2)[0]
        return jax.lax.cond(y[0, 0] > 0, jnp.sin, lambda y: jax.lax.fori_loop(0, 3, lambda i, y: y * y, y), y)

    shown = FwdBwd(*traced_to_differentiate("print_fwd_bwd", looped, (B8,), {}).passes())
    for width in (60, 109, 120, 200):
        assert max(map(len, shown.text(width).splitlines()[1:])) <= width
    assert " | " in shown.text(110) and " | " not in shown.text(109)
    assert "length=2" in str(shown) and "cond[" in str(shown)


def test_fwd_bwd_in_colors_and_html():
    console = pytest.importorskip("rich.console")
    loss, _ = model("by_name")
    shown = statetx.print_fwd_bwd(loss, B8)
    for width in (80, 200):
        out = console.Console(width=width, file=io.StringIO(), force_terminal=True, color_system="truecolor")
        out.print(shown)
        text = out.file.getvalue()
        assert "\x1b[" in text and "*h_2" in text
    assert "*h_2" in parts_of(shown._repr_html_())


def test_a_linear_solve_has_residuals():
    residuals = statetx.saved_residuals(
        statetx.remat(lambda a, b: jnp.linalg.solve(a, jnp.sin(b))), jnp.eye(3), jnp.ones(3)
    )
    assert [row.origin for row in residuals][:2] == ["argument", "argument"]


@pytest.mark.parametrize("inspect", [statetx.saved_residuals, statetx.memory_profile, statetx.measure])
def test_rule_that_refuses_a_tangent_is_explained(inspect):
    """As diffrax refuses one of the time of a random path."""

    @jax.custom_jvp
    def constant(t):
        return t

    @constant.defjvp
    def constant_jvp(primals, tangents):
        raise RuntimeError("Unexpected tangent.")

    loss = lambda w, t: jnp.sum(jnp.sin(w) * constant(t))  # noqa: E731
    args = jnp.ones(3), jnp.float32(2)
    with pytest.raises(RuntimeError, match="Unexpected") as error:
        inspect(loss, *args)
    assert any("jax.grad(loss)" in note for note in error.value.__notes__)
    inspect(jax.grad(loss), *args)
