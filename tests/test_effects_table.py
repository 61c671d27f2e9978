"""Every transform crossed with every side effect, for every kind of state; `effects_table` holds the rows and columns.

`refused` gives the error of each cell that raises; in all others the transform agrees with the reference. No cell
leaves a tracer or an open frame behind, and after an error every state has its former value.
"""

from __future__ import annotations

import collections
import contextlib
import gc
import weakref
from collections.abc import Iterator
from typing import Any

import effects_table as table
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from effects_columns import COLUMNS, GONE, Boom, Column, Model, states_of
from effects_table import ROWS, Row
from libraries import LIBRARIES, Cells
from mixed_cells import DEAD

import statetx
from helpers import assert_no_frame_is_open, publish_all_but_one

# -- cells that raise ------------------------------------------------------------------------------------------

READS = {"read", "make and drop", "delete", "catch from a remat"}
CHANGES_TYPE = {
    "list grows": "items",
    "structure": "alpha",
    "shape": "alpha",
    "dtype": "alpha",
    "string": "mode",
    "None": "alpha",
}
LIFTS = {"jit", "loop", "slots", "condition", "branch", "shard_map", "jaxpr", "functionalize"}
"""Groups of rows that make tracers of NumPy arrays in states, which cannot be changed in place."""


def refused(row: Row, column: Column) -> tuple[type[BaseException], str | None] | None:
    """The error of a cell and a pattern of its message; None where it agrees with the reference."""
    group, name = row.group, column.name
    state = f"{column.states[0]}'"
    if name == "raise":
        return (Boom, statetx.TraceLeakError) if group == "custom" else Boom, None
    if group == "eager":
        return None
    if name == "opaque object":
        return statetx.TraceLeakError, "alpha|Variable"
    if name == "NumPy array in place" and (group in LIFTS or row.name == "remat in jit"):
        return TypeError, "immutable"
    if name == "io_callback" and group in ("remat", "slots"):
        return statetx.EffectError, "io_callback|host callback"
    if group == "condition" and name not in READS | {"make and keep"}:
        return statetx.StateAccessError, "ref'" if name == "Ref" else column.states[0]  # a part of it in an nnx.Rngs
    if group in ("loop", "slots", "branch"):
        if name in CHANGES_TYPE:
            return statetx.CarryTypeError, state
    if name == "make and keep" and group in LIFTS - {"jit"}:
        return statetx.CreatedStateError, "made at .*outlived"
    if group == "vmap" and column.varies:
        return statetx.StateAccessError, state
    if group == "functionalize" and name == "string":
        return statetx.StateValueError, "mode'|Variable"
    if group == "custom" and name in READS:  # the models hold a Ref, for which the call is staged before the rule runs
        return statetx.StateAccessError, "the derivative rule of fun at .* touches"
    if group == "custom" and name != "same string":
        return statetx.TraceLeakError, "was given a value that jax's custom_"
    return None


def is_in_table(row: Row, column: Column, kind: str) -> bool:
    if row.group != "custom":
        return True
    if (kind, column.name) == ("nnx", "make and keep"):
        return False  # see `test_variable_created_under_a_custom_rule_is_missed`
    # A Ref under a user's derivative rule, and effects that JAX runs twice there.
    return kind != "ref" and column.name not in (
        "Ref",
        "NumPy array in place",
        "strong becomes weak",
        "same string",
        "string",
        "None",
    )


# -- the table -------------------------------------------------------------------------------------------------


def cells() -> Iterator[tuple[Row, Column, str, bool]]:
    """All cells, and whether each is run by default: one of four for each row and column, the kinds in turn."""
    for i, row in enumerate(ROWS):
        for j, column in enumerate(COLUMNS.values()):
            kinds = [kind for kind in column.kinds if is_in_table(row, column, kind)]
            for n, kind in enumerate(kinds):
                yield row, column, kind, (i + j) % 4 == 0 and n == (i + j) // 4 % len(kinds)


def params() -> Iterator[Any]:
    for row, column, kind, is_quick in cells():
        name = f"{row.name}-{column.name}-{kind}".replace(" ", "_")
        yield pytest.param(row, column, kind, id=name, marks=() if is_quick else pytest.mark.slow)


def test_cells_run_by_default_have_every_row_column_and_kind():
    quick = [(row.name, column.name, kind) for row, column, kind, is_quick in cells() if is_quick]
    for names in zip(*quick, strict=True):
        assert len(names) >= 300
    of_rows = collections.Counter((row, kind) for row, _, kind in quick)
    of_columns = collections.Counter((column, kind) for _, column, kind in quick)
    assert all(of_rows[row.name, kind] for row in ROWS for kind in LIBRARIES if (row.group, kind) != ("custom", "ref"))
    assert all(of_columns[name, kind] for name, column in COLUMNS.items() for kind in column.kinds)


@pytest.mark.parametrize("row, column, kind", list(params()))
def test_cell(row, column, kind):
    api = table.Meaning()
    model, plain = Model(LIBRARIES[kind], column), Model(Cells(api, kind), column, api)
    fun, plain_fun = model.effect(), plain.effect()
    expected = refused(row, column)
    if expected is not None:
        error, message = expected
        with pytest.raises(error, match=message):
            row.apply(statetx, fun, table.X)
        is_inspection = row.group == "jaxpr"  # which leaves no trace in the model
        with contextlib.suppress(Boom):
            api.undone(plain_fun, table.X, lambda cell: GONE if is_inspection else DEAD)
    else:
        out, wanted = row.apply(statetx, fun, table.X), row.apply(api, plain_fun, table.X)
        assert not difference(out, wanted)
    left = model.values()
    for name, value in plain.values().items():
        assert not difference(left.pop(name), value), name
    assert not left
    assert_no_frame_is_open()
    use(model)


def use(model: Model) -> None:
    """Write every state: none stays owned."""
    kind = model.kind
    for _, state in states_of(model):
        state = kind.key_of(state)
        try:
            value = kind.get(state)
        except kind.no_value:
            value = jnp.float32(1.0)
        kind.set(state, value)
        assert not difference(kind.get(state), value, 0.0)


def difference(a: Any, b: Any, tolerance: float = 1e-5) -> str:
    leaves = jax.tree.leaves(a)
    if any(isinstance(x, jax.core.Tracer) for x in leaves):
        return f"{a} holds a tracer"
    if jax.tree.structure(a) != jax.tree.structure(b):
        return f"{a} in place of {b}"
    for x, y in zip(leaves, jax.tree.leaves(b), strict=True):
        if not (hasattr(y, "dtype") or isinstance(y, (int, float))):
            if type(x) is not type(y) or (isinstance(y, (str, type)) and x != y):
                return f"{x!r} in place of {y!r}"
            continue
        if (jnp.shape(x), jnp.result_type(x)) != (jnp.shape(y), jnp.result_type(y)):
            return f"{x!r} in place of {y!r}"
        if isinstance(y, jax.ShapeDtypeStruct):
            continue
        if jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        if not np.allclose(np.asarray(x, np.float64), np.asarray(y, np.float64), atol=tolerance, rtol=tolerance):
            return f"{x} in place of {y}"
    return ""


@pytest.mark.parametrize("row", [row for row in ROWS if row.group != "condition"], ids=lambda row: row.name)
def test_call_leaves_no_cycle(row):
    """What a function closes over is freed with it: arrays do not wait for the garbage collector."""

    def call():
        count, weight = statetx.State(jnp.float32(0)), jnp.arange(3.0)

        def fun(x):
            count.value += 1
            return x * weight[1]

        row.apply(statetx, fun, table.X)
        return weakref.ref(count), weakref.ref(weight)

    gc.disable()
    try:
        count, weight = call()
        assert (count(), weight()) == (None, None)
    finally:
        gc.enable()


@pytest.mark.parametrize("rule", ["custom_jvp", "custom_vjp"])
def test_variable_created_under_a_custom_rule_is_missed(rule):
    """As `kinds/nnx.py` says: a Variable made in a transform that is not statetx's, as nnx's own make them, ends with
    that.

    If the user's code stores one, JAX raises as soon as its tracer is used.
    """
    model = Model(LIBRARIES["nnx"], COLUMNS["make and keep"])
    row = next(row for row in ROWS if row.name == rule)
    row.apply(statetx, model.effect(), table.X)
    with pytest.raises(jax.errors.UnexpectedTracerError):
        jnp.sin(model.new.get_value())


# -- the table can fail ----------------------------------------------------------------------------------------


BREAKAGES = {
    "an effect is not published": ("_lift.outcome.Outcome.publish", publish_all_but_one, "grad", "count"),
    "writes stay after an exception": ("_frames.Access.undo", lambda self: [], "remat in jit", "raise"),
    "a key does not advance": (
        "kinds.native.RngState.next",
        lambda self: jax.random.split(self.value)[1],
        "vmap",
        "draw",
    ),
    "what a container holds is not compared": ("_frames.Copy.was_changed", lambda self: False, "vjp", "dict in place"),
    "tracers are not looked for": ("_jax.leaked_tracers", lambda *args: [], "custom_jvp", "write only"),
    "drift is not looked for": ("_lift.carry._check_written", lambda *args: None, "scan", "dtype"),
}
"""By breakage: a name of statetx, its replacement, and a cell that must fail."""


@pytest.mark.parametrize("breakage", BREAKAGES)
def test_broken_feature_fails_a_cell(breakage, monkeypatch):
    """By an assertion of the cell, or by an error other than the expected one, from statetx or JAX."""
    name, broken, row_name, column_name = BREAKAGES[breakage]
    row, column = next(row for row in ROWS if row.name == row_name), COLUMNS[column_name]
    statetx.clear_cache()
    test_cell(row, column, "statetx")
    statetx.clear_cache()
    with (
        monkeypatch.context() as patch,
        pytest.raises((AssertionError, TypeError, statetx.StatetxError, pytest.fail.Exception)),
    ):
        patch.setattr(f"statetx.{name}", broken)
        test_cell(row, column, "statetx")
    statetx.clear_cache()
