"""`trace_states` and `functionalize`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import statetx
from helpers import Counted


class Cell:
    def __init__(self):
        self.w = statetx.Param(jnp.eye(3))
        self.h = statetx.State(jnp.zeros(3))
        self.log = statetx.State({"n": jnp.zeros((), jnp.int32), "tag": "t"})
        self.mode = statetx.State(True)
        self.unused = statetx.State(1.0)

    def step(self, x):
        if self.mode.value:
            self.h.value = jnp.tanh(self.w.value @ x + self.h.value)
        self.log.value = {**self.log.value, "n": self.log.value["n"] + 1}
        return self.h.value.sum()


X = jnp.array([0.1, 0.2, 0.3])


def test_trace_reports_reads_writes_and_creations_and_runs_nothing():
    cell = Cell()
    before = {p: s.value for p, s in statetx.states(cell).items()}

    def f(x):
        out = cell.step(x)
        f.kept = statetx.State(out)
        write_only.value = out
        return out

    write_only = statetx.State(jnp.zeros(()), name="write_only")
    count = Counted(f)
    trace = statetx.trace_states(count)(jax.ShapeDtypeStruct((3,), jnp.float32))
    assert count.runs == 1
    assert list(trace.reads) == ["fun.cell.mode", "fun.cell.w", "fun.cell.h", "fun.cell.log"]
    assert list(trace.writes) == ["fun.cell.h", "fun.cell.log", "fun.write_only"]
    assert trace.writes["fun.cell.h"] is cell.h and len(trace.created) == 1
    assert all(s.value is before[p] for p, s in statetx.states(cell).items())


def test_trace_table():
    trace = statetx.trace_states(Cell().step)(X)
    assert str(trace).splitlines()[0] == "step: 4 states, 52 B; 4 read, 2 written"
    rows = {r.path: r for r in trace}
    assert len(trace) == 4 and rows["w"].bytes == 36 and rows["w"].kind == "Param" and not rows["w"].written
    assert rows["log"].type == "{'n': i32[], 'tag': str}" and rows["log"].written and rows["log"].read
    header, rule, *lines = str(trace).splitlines()[1:]
    assert header.split() == ["path", "kind", "shape", "and", "dtype", "bytes", "read", "written", "created"]
    assert len(lines) == 4 and set(rule) <= {"-", " "}
    assert str(statetx.trace_states(lambda: 1)()).endswith("no states")


def test_trace_table_in_rich():
    rich_console = pytest.importorskip("rich.console")
    console = rich_console.Console(record=True, width=120, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(statetx.trace_states(Cell().step)(X))
    assert "f32[3,3]" in console.export_text()
    console.file.close()


def test_trace_table_in_html():
    html = statetx.trace_states(Cell().step)(X)._repr_html_()
    assert html.count("<tr>") == 5 and "<code>f32[3,3]</code>" in html
    assert "no states" in statetx.trace_states(lambda: 1)()._repr_html_()


def test_functionalize_under_every_plain_transform():
    cell, reference = Cell(), Cell()
    pure = statetx.functionalize(cell.step)
    values = pure.values(X)
    assert list(values) == ["w", "h", "log"]  # a flag that is read is not a number: it is not an input
    arrays = {k: v for k, v in values.items() if k != "log"} | {"log": values["log"]}
    out, new = pure(arrays, X)
    expected = reference.step(X)
    np.testing.assert_array_equal(out, expected)
    np.testing.assert_array_equal(new["h"], reference.h.value)
    assert cell.h.value is values["h"] and int(new["log"]["n"]) == 1 and int(cell.log.value["n"]) == 0

    def loss(w, x):
        return pure({**values, "w": w}, x)[0]

    g = jax.grad(loss)(jnp.eye(3), X)
    ref = jax.grad(lambda w, x: jnp.tanh(w @ x).sum())(jnp.eye(3), X)
    np.testing.assert_allclose(g, ref, rtol=1e-6)
    batch = jnp.stack([X, 2 * X])
    np.testing.assert_allclose(jax.jit(jax.vmap(jax.grad(loss), (None, 0)))(jnp.eye(3), batch)[0], ref, rtol=1e-6)
    carry, _ = jax.lax.scan(
        lambda h, x: (pure({**values, "h": h}, x)[1]["h"], None), jnp.zeros(3), jnp.stack([X, X, X])
    )
    for _ in range(2):
        reference.step(X)
    np.testing.assert_allclose(carry, reference.h.value, rtol=1e-6)
    assert cell.h.value is values["h"]


def test_paths_belong_to_the_model_of_the_call():
    class Model:
        def __init__(self, w):
            self.w = statetx.Param(jnp.asarray(w))

    def f(model, x):
        model.w.value = model.w.value * x
        return model.w.value

    a, b, pure = Model(1.0), Model(10.0), statetx.functionalize(f)
    values = pure.values(a, 2.0)
    pure.values(b, 2.0)
    out, new = pure(values, a, 2.0)
    assert float(out) == float(new["model.w"]) == 2.0
    pure.store(new, a, 2.0)
    assert float(a.w.value) == 2.0 and float(b.w.value) == 10.0


def test_functionalize_put_back_stores_values():
    cell = Cell()
    pure = statetx.functionalize(cell.step)
    _, new = jax.jit(pure)(pure.values(X), X)
    pure.store(new)
    assert int(cell.log.value["n"]) == 1 and cell.log.value["tag"] == "t"
    statetx.functionalize(cell.step).store(new, X)
    with pytest.raises(statetx.StateAccessError, match="has the path 'v'"):
        pure.store({"v": 1.0})


def test_functionalize_put_back_is_atomic():
    a, b = statetx.State(1.0, name="a"), statetx.State(2.0, name="b")
    pure = statetx.functionalize(lambda: a.value + b.value)
    pure.values()

    @jax.jit
    def leak(x):
        pure.store({"a": 5.0, "b": x + 1.0})

    with pytest.raises(statetx.TraceLeakError, match="State 'b'"):
        leak(1.0)
    assert (a.value, b.value) == (1.0, 2.0)
    statetx.jit(lambda: pure.store({"a": jnp.float32(5.0), "b": jnp.float32(6.0)}))()
    assert (float(a.value), float(b.value)) == (5.0, 6.0)


def test_functionalized_values_pass_through_any_transform():
    cell = Cell()
    both = statetx.State({"x": jnp.ones(3), "mode": "a", "flag": True, "fun": jnp.sin}, name="both")
    toggle, unread = statetx.State(True, name="toggle"), statetx.State("text", name="unread")

    def f(x):
        toggle.value = toggle.value == False  # noqa: E712  # as a traced value, too
        unread.value = "text"
        held = both.value
        assert held["mode"] == "a" and held["flag"] is True
        both.value = {**held, "x": held["x"] + x}
        return cell.step(x) + held["fun"](held["x"]).sum()

    pure = statetx.functionalize(f)
    values = pure.values(X)
    assert values["both"]["mode"] is None and "unread" not in values
    out, new = jax.jit(pure)(values, X)
    assert jax.tree.structure(new) == jax.tree.structure(values)
    np.testing.assert_allclose(new["both"]["x"], 1 + X)
    assert not new["toggle"] and both.value["mode"] == "a"
    pure.store(new)
    assert (
        set(both.value) == {"x", "mode", "flag", "fun"} and both.value["mode"] == "a" and both.value["fun"] is jnp.sin
    )
    given, _ = pure({**new, "both": {**both.value, "x": jnp.zeros(3)}}, X)  # a whole value, where JAX is not asked
    np.testing.assert_allclose(given, pure({**new, "both": {**new["both"], "x": jnp.zeros(3)}}, X)[0])


@pytest.mark.parametrize("name", ["both", "text"])
def test_functionalize_write_of_a_non_array_raises(name):
    states = {"both": statetx.State({"x": 1.0, "mode": "a"}), "text": statetx.State("a")}

    def f(x):
        states[name].value = {"x": x, "mode": "b"} if name == "both" else "b"
        return x

    pure = statetx.functionalize(f)
    with pytest.raises(statetx.StateValueError, match=r"writes 'b' to State.*test_functionalize.py:\d+"):
        pure(pure.values(1.0), 1.0)
    assert states["both"].value["mode"] == "a" and states["text"].value == "a"


def test_functionalize_mistakes():
    cell = Cell()
    pure = statetx.functionalize(cell.step)
    values = pure.values(X)
    with pytest.raises(statetx.StateAccessError, match=r"touched State 'h' .*which is not among the given values"):
        pure({k: v for k, v in values.items() if k != "h"}, X)
    with pytest.raises(statetx.StateAccessError, match="has the path 'v'. Known paths: w, h, log"):
        pure({**values, "v": 1.0}, X)
    with pytest.raises(TypeError, match=r"must be the dict from .values\(\*args\)"):
        pure(X)
    kept = []
    make = statetx.functionalize(lambda x: kept.append(statetx.State(x)))
    with pytest.raises(statetx.CreatedStateError, match="create the state before the call"):
        make(make.values(1.0), 1.0)


def test_exception_in_an_eager_call_restores_refs():
    ref, w = jax.new_ref(jnp.zeros(())), statetx.State(jnp.ones(()))

    def f(x, fails):
        ref[...] = ref[...] + w.value * x
        return 1 // (not fails)

    pure = statetx.functionalize(f)
    values = pure.values(1.0, False)
    pure(values, 1.0, False)
    with pytest.raises(ZeroDivisionError):
        pure(values, 1.0, True)
    assert float(ref[...]) == 1.0
