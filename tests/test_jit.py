"""`jit`: compilations, caches, statics, donation, shardings."""

import dataclasses
import functools
import gc
import re
import weakref

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from libraries import VALUED, ValuedRef

import statetx
from helpers import Counted, compilations


class Hidden:
    """Keeps a state where no walk over attributes finds it."""

    def __init__(self, state):
        self.get = {"state": state}.__getitem__


def test_retrace_once_per_combination_of_types():
    a, hidden = statetx.State(jnp.zeros(3)), Hidden(statetx.State(jnp.ones(())))

    @Counted
    def body(x):
        a.value = a.value + hidden.get("state").value * x
        return a.value.sum()

    f = statetx.jit(body)
    ones = jnp.ones(3)
    with compilations() as compiled:
        for _ in range(3):
            f(2.0)
        assert body.runs == 1 and len(compiled) == 1
        f(ones)
        f(ones)
        f(2.0)
        assert body.runs == 2 and len(compiled) == 2
    np.testing.assert_array_equal(a.value, np.full(3, 4 * 2.0 + 2 * 1.0))
    a.value = jnp.zeros((2, 3))  # a state of another shape
    f(2.0)
    f(2.0)
    assert body.runs == 3 and a.value.shape == (2, 3)


def test_states_are_inputs_and_outputs_never_constants():
    w, n = statetx.Param(jnp.arange(4096.0)), statetx.State(jnp.zeros((), jnp.int32))
    unused, touched_only = statetx.State(jnp.ones(7)), statetx.State(jnp.ones(11))

    def f(x):
        n.value += 1
        _ = touched_only.value
        return (w.value * x).sum()

    lowered = statetx.jit(f).lower(2.0)
    text = lowered.as_text()
    assert "tensor<4096xf32>" in text.split("{", 2)[1] or "4096xf32" in text
    assert "dense<" not in "".join(line for line in text.splitlines() if "4096" in line)
    shapes = sorted(leaf.shape for leaf in jax.tree.leaves(lowered.jax_stage.in_avals))
    assert shapes == [(), (), (11,), (4096,)]  # a value that is read is an input, needed or not; an unread one is not
    del unused


@pytest.mark.parametrize("value", [0, 0.0, np.float64(1), np.arange(3), jnp.zeros(3), {"a": 1.0, "b": np.ones(2)}])
def test_second_call_never_recompiles(value):
    s = statetx.State(value)

    @Counted
    def body(x):
        s.value = jax.tree.map(lambda v: v + x, s.value)

    f = statetx.jit(body)
    is_integer = jnp.issubdtype(jnp.result_type(jax.tree.leaves(value)[0]), jnp.integer)
    x = 1 if is_integer else jnp.float32(1.0)
    f(x)
    with compilations() as compiled:
        f(x)
        f(x)
    assert body.runs == 1 and not compiled


def test_weak_type_is_preserved():
    s = statetx.State(0.0)
    f = statetx.jit(lambda x: setattr(s, "value", s.value + x))
    f(jnp.float32(2.0))
    assert s.value.weak_type and float(s.value) == 2.0
    s.value = jnp.float32(1.0)
    g = statetx.jit(lambda: setattr(s, "value", 5.0))
    h = statetx.jit(lambda: (s.value, setattr(s, "value", 5.0)))
    g()
    h()
    assert float(s.value) == 5.0


def test_statics_are_distinguished_by_type_and_value():
    seen = []

    @functools.partial(statetx.jit, static_argnums=1, static_argnames="flag")
    def f(x, mode, *, flag=False):
        seen.append((mode, flag))
        return x

    for mode in (1, True, 1.0, (1,), [1], (True,), 0.0, -0.0, "a", None, {"k": [1]}, np.array([1, 2])):
        f(1.0, mode)
        f(1.0, mode)
        f(1.0, mode=mode)
        assert len(seen) == 2, mode  # once by position, once by keyword
        seen.clear()
    f(1.0, 1, flag=True)
    f(1.0, 1, flag=True)
    f(1.0, 1, flag=1)
    assert seen == [(1, True), (1, 1)]


@pytest.mark.parametrize("first", ["text", "numbers"])
def test_array_of_text_is_static_and_array_of_numbers_traced(first):
    seen = []

    @statetx.jit
    def f(x, y):
        seen.append(type(y))
        return x if y.dtype.kind == "U" else x + y.sum()

    text, numbers, x = np.array(["a", "b"]), np.array([1.0, 2.0]), jnp.ones(())
    calls = [(text, 1.0), (numbers, 4.0)] if first == "text" else [(numbers, 4.0), (text, 1.0)]
    for y, expected in (*calls, *calls):
        assert float(f(x, y)) == expected
    assert float(f(x, 2 * numbers)) == 7.0
    assert len(seen) == 2 and seen.count(np.ndarray) == 1


def test_debug_nans_names_the_operation():
    n = statetx.State(jnp.zeros(()))

    @jax.jit
    def inner(x):
        return jnp.log(x) + 1.0

    @statetx.jit
    def f(x):
        n.value += 1.0
        return inner(x) * jnp.var(jnp.stack([x, x + 1.0]))

    with jax.debug_nans(True), pytest.raises(FloatingPointError, match=r"invalid value \(nan\) encountered in log"):
        f(-1.0)
    assert float(n.value) == 0.0
    with jax.debug_nans(True):
        f(1.0)
    assert float(n.value) == 1.0


def test_non_array_state_is_part_of_the_key():
    mode, flag, x = statetx.State("double"), statetx.State(True), statetx.State(jnp.ones(()))
    runs = []

    @statetx.jit
    def f():
        runs.append(1)
        x.value = x.value * (2 if mode.value == "double" and flag.value else 3)
        return mode.value

    assert f() == "double" and f() == "double" and float(x.value) == 4
    mode.value = "triple"
    assert f() == "triple" and float(x.value) == 12
    flag.value = False
    mode.value = "double"
    assert f() == "double" and float(x.value) == 36
    flag.value = True
    assert f() == "double" and float(x.value) == 72
    assert len(runs) == 3


def test_written_python_values_stay_python_values():
    mode = statetx.State("a")

    @statetx.jit
    def f(x):
        mode.value = mode.value + "b"
        return x

    f(1.0)
    f(1.0)
    assert mode.value == "abb"


def test_jax_settings_are_part_of_the_key():
    s = statetx.State(jnp.ones((4, 4)))

    @Counted
    def body():
        return s.value @ s.value

    f = statetx.jit(body)
    f()
    with jax.default_matmul_precision("highest"):
        assert "HIGHEST" in f.lower().as_text()
        f()
    f()
    assert body.runs == 2


def test_donation_on_request():
    s, kept, alias = statetx.State(jnp.ones(64)), statetx.State(jnp.ones(64)), statetx.State(jnp.ones(64))

    @functools.partial(statetx.jit, donate_states=True, donate_argnums=0)
    def f(x):
        s.value = s.value + x + kept.value
        return x * 2

    old, argument, read_only = s.value, jnp.ones(64), kept.value
    f(argument)
    assert old.is_deleted() and not read_only.is_deleted()
    alias.value = s.value  # the same array in two states: the other's must survive

    @functools.partial(statetx.jit, donate_states=lambda path, state: state is s)
    def g():
        s.value = s.value * 2
        return alias.value

    g()
    np.testing.assert_array_equal(alias.value, np.full(64, 3.0))
    alias.value = s.value

    @functools.partial(statetx.jit, donate_states=True)
    def h():
        s.value, alias.value = s.value + 1, alias.value + 1

    h()
    np.testing.assert_array_equal(alias.value, s.value)
    plain = statetx.jit(lambda: setattr(s, "value", s.value + 1))
    old = s.value
    plain()
    assert not old.is_deleted()


@pytest.mark.parametrize("kind", [statetx.State, brainstate.State])
def test_function_of_a_state_runs_its_python_once(kind):
    add, state = Counted(lambda state, x: setattr(state, "value", state.value + x)), kind(jnp.zeros(3))
    jitted = statetx.jit(add)
    jitted(state, 1.0)
    jitted(state, 1.0)
    assert add.runs == 1 and state.value.tolist() == [2.0] * 3


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("donate_states", [False, True])
def test_a_state_whose_array_another_function_has_deleted_is_named(donate_states, is_compiled):
    w = statetx.State(jnp.ones(3))

    @functools.partial(statetx.jit, donate_states=donate_states)
    def add():
        w.value = w.value + 1

    if is_compiled:
        add()
    jax.jit(lambda x: x + 1, donate_argnums=0)(w.value)
    with pytest.raises((RuntimeError, ValueError), match="deleted") as caught:
        add()
    (note,) = [x for x in caught.value.__notes__ if "State 'w'" in x]
    assert "another function" in note or "or a function before it, had consumed" in note


@pytest.mark.parametrize("donate_states", [False, True])
def test_a_donated_argument_may_be_the_array_of_a_state(donate_states):
    written, read = statetx.State(jnp.ones(64)), statetx.State(jnp.ones(64))

    @functools.partial(statetx.jit, donate_argnums=(0, 1), donate_states=donate_states)
    def f(x, y):
        written.value = written.value + x + read.value
        return x + 1, 2 * y

    for x in (1.0, 3.0):
        outs = f(written.value, read.value)
        np.testing.assert_array_equal(jnp.stack(outs), np.outer([x + 1, 2.0], np.ones(64)))
    np.testing.assert_array_equal(written.value, np.full(64, 7.0))
    np.testing.assert_array_equal(read.value, np.ones(64))


@pytest.mark.skipif(len(jax.devices()) < 4, reason="needs 4 devices; conftest asks for them")
def test_sharding_is_preserved_without_retrace():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    w = statetx.Param(jax.device_put(jnp.arange(8.0), sharding))
    m = statetx.State({"m": jax.device_put(jnp.zeros(8), sharding)})
    n = statetx.State(jnp.zeros((), jnp.int32))

    @Counted
    def body(x):
        g = statetx.grad(lambda: ((w.value - x) ** 2).sum(), wrt=w)()
        m.value = {"m": m.value["m"] * 0.9 + g.sum()}  # would come back replicated
        w.value = w.value - 0.1 * g
        n.value += 1

    f = statetx.jit(body)
    f(1.0)
    with compilations() as compiled:
        for _ in range(3):
            f(1.0)
            assert w.value.sharding == sharding and m.value["m"].sharding == sharding
    assert body.runs == 1 and not compiled and int(n.value) == 4


def test_program_does_not_keep_old_values_or_arguments():
    s = statetx.State(jnp.ones(3))
    ref = weakref.ref(s.value)
    x = jnp.ones(3)
    xref = weakref.ref(x)
    f = statetx.jit(lambda x: setattr(s, "value", s.value + x))
    f(x)
    del x
    gc.collect()
    assert ref() is None and xref() is None


@pytest.mark.parametrize("make", [lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), jax.typeof], ids=["struct", "aval"])
def test_lower_accepts_types_and_changes_no_state(make):
    s = statetx.State(jnp.ones(3))
    before = s.value

    @Counted
    def body(x):
        s.value = s.value + x

    f = statetx.jit(body)
    compiled = f.lower(make(s.value)).compile()
    assert compiled.memory_analysis() is not None and s.value is before
    f(jnp.ones(3))
    assert body.runs == 1


def test_disable_jit_runs_plainly():
    s = statetx.State(jnp.ones(()))

    @statetx.jit
    def f(x):
        s.value = s.value + x
        return float(s.value)  # concrete

    with jax.disable_jit():
        assert f(1.0) == 2.0


def test_numbers_return_as_arrays_and_other_objects_unchanged():
    f = statetx.jit(lambda x: {"n": 3, "s": "text", "none": None, "x": x})
    out = f(1.0)
    assert isinstance(out["n"], jax.Array) and out["s"] == "text" and out["none"] is None
    out = f(1.0)
    assert isinstance(out["n"], jax.Array) and out["s"] == "text"


def test_closed_over_tracer_is_not_cached():
    @jax.jit
    def outer(x):
        f = statetx.jit(lambda y: y * x)
        return f(2.0) + f(3.0)

    assert float(outer(1.0)) == 5.0 and float(outer(2.0)) == 10.0
    holder = {}
    f = statetx.jit(lambda y: y * holder["x"])

    def g(x):
        holder["x"] = x
        return f(2.0)

    assert float(jax.grad(g)(1.0)) == 2.0 and float(jax.grad(g)(3.0)) == 2.0


def test_same_program_eagerly_and_under_other_transforms():
    b = statetx.State(jnp.ones(()) * 3)
    for first in (True, False):
        g = Counted(lambda x: x * b.value)
        f = statetx.jit(g)
        calls = [lambda f=f: f(1.0), lambda f=f: statetx.grad(f)(1.0)]
        for call in calls if first else reversed(calls):
            assert float(call()) == 3.0
        assert float(statetx.jit(lambda x, f=f: f(x) * 2)(1.0)) == 6.0
        assert float(statetx.scan(lambda c, x, f=f: (f(c), None), jnp.float32(1), length=2)[0]) == 9.0
        assert g.runs == 2  # a weak and a strong float


def test_type_of_an_unused_state_is_part_of_the_key():
    s = statetx.State(jnp.zeros(3))
    f = statetx.jit(lambda x: x * s.value.shape[0])
    assert float(f(1.0)) == 3
    s.value = jnp.zeros(5)
    assert float(f(1.0)) == 5


def test_order_of_static_keywords_does_not_matter_and_programs_are_bounded():
    body = Counted(lambda x, a, b: x * range(a, b)[0])
    f = statetx.jit(body, static_argnames=iter("ab"))
    f(1.0, a=1, b=2)
    f(1.0, b=2, a=1)
    assert body.runs == 1


@dataclasses.dataclass(frozen=True)
class Equal:
    """Equal to another of its width, whatever its state."""

    width: int
    w: statetx.State = dataclasses.field(compare=False)

    def __call__(self, x):
        return x * self.w.value


class Table(dict):
    """Equal to another dict, whatever its attributes."""


@pytest.mark.parametrize("static", [{}, {"static_argnums": 0}])
@pytest.mark.parametrize(
    "wrap", [lambda x: x, lambda x: (x, "a"), lambda x: {"a": [x]}], ids=["alone", "tuple", "dict"]
)
def test_equal_static_objects_with_other_states_have_separate_programs(static, wrap):
    body = Counted(lambda held, x: jax.tree.leaves(held, is_leaf=callable)[0](x))
    run = statetx.jit(body, **static)
    one, other = Equal(1, statetx.State(jnp.float32(2))), Equal(1, statetx.State(jnp.float32(3)))
    assert one == other and hash(one) == hash(other)
    for _ in range(2):
        assert (run(wrap(one), 1.0), run(wrap(other), 1.0)) == (2.0, 3.0)
    assert body.runs == 2


def test_static_containers_are_distinguished_by_states_in_attributes():
    one, other = Table(a=1), Table(a=1)
    one.w, other.w = statetx.State(jnp.float32(2)), statetx.State(jnp.float32(3))
    run = statetx.jit(lambda table, x: x * table.w.value, static_argnums=0)
    assert one == other and (run(one, 1.0), run(other, 1.0)) == (2.0, 3.0)


@pytest.mark.parametrize("value", ["text", None, (1.0, "text"), [jnp.ones(2)]], ids=str)
@pytest.mark.parametrize("make", [statetx.State, brainstate.State, nnx.Variable])
def test_write_of_a_non_array_to_an_array_state(make, value):
    state = make(jnp.asarray(2.0))
    read, write = (state.get_value, state.set_value) if make is nnx.Variable else (lambda: state.value, None)

    def step(x):
        is_array = isinstance(read(), jax.Array)
        y = x * read() if is_array else x
        write(value) if write else setattr(state, "value", value)
        return y

    counted = Counted(step)
    f = statetx.jit(counted)
    assert [float(f(3.0)) for _ in range(3)] == [6.0, 3.0, 3.0]
    assert jax.tree.structure(read()) == jax.tree.structure(value) and counted.runs == 2


@pytest.mark.parametrize("static", [(), (0,), (1,), (0, 2), (-1,)])
@pytest.mark.parametrize("donated", [(0,), (1,), (2,), (3,), (0, 3)])
def test_donate_argnums_count_static_arguments(static, donated):
    """As jax.jit: positions of donated arguments count the static ones, too."""
    if {i % 4 for i in static} & set(donated):
        with pytest.raises(statetx.StaticArgumentError, match="both static and donated"):
            statetx.jit(lambda a, b, c, d: a, static_argnums=static, donate_argnums=donated)
        return

    def gone(jit):
        f = jit(lambda a, b, c, d: [x * 2 for x in (a, b, c, d)], static_argnums=static, donate_argnums=donated)
        args = [i if i in {j % 4 for j in static} else jnp.ones(i + 1) for i in range(4)]
        f(*args)
        return [not isinstance(x, int) and x.is_deleted() for x in args]

    assert gone(statetx.jit) == gone(jax.jit) == [i in donated for i in range(4)]


@pytest.mark.parametrize("options", [{"donate_argnames": "model"}, {"donate_argnums": 0}])
@pytest.mark.parametrize(
    "model_of", [lambda w: {"w": w}, lambda w: [w, 1.0], lambda w: w], ids=["dict", "list", "state"]
)
def test_states_of_donated_arguments_are_donated(options, model_of):
    w, other, kept = statetx.Param(jnp.ones(64)), statetx.State(jnp.ones(64)), statetx.State(jnp.ones(64))

    def step(model, x, held):
        for state in jax.tree.leaves((model, held), is_leaf=lambda x: isinstance(x, statetx.State)):
            if isinstance(state, statetx.State) and state is not kept:
                state.value = state.value * x
        return kept.value

    olds = [state.value for state in (w, other, kept)]
    statetx.jit(step, **options)(model_of(w), jnp.ones(64), [other, kept])
    assert [old.is_deleted() for old in olds] == [True, False, False]
    statetx.jit(step, **options)(model=model_of(w), x=jnp.ones(64), held=[])
    statetx.jit(lambda model: 1.0, donate_argnames="model")(None)


def test_donate_argnames_with_static_argnames():
    f = statetx.jit(lambda n, c, d: (c * n, d), static_argnames="n", donate_argnames="c")
    for call in (lambda c, d: f(2, c, d), lambda c, d: f(c=c, d=d, n=2), lambda c, d: f(2, d=d, c=c)):
        c, d = jnp.ones(3), jnp.ones(4)
        call(c, d)
        assert c.is_deleted() and not d.is_deleted()
    with pytest.raises(statetx.StaticArgumentError, match="'n' is both static and donated"):
        statetx.jit(lambda n: n, static_argnames="n", donate_argnums=0)


def ahead():
    n, w = statetx.State(0), statetx.Param(jnp.arange(3.0))

    @Counted
    def body(x, flag="a"):
        n.value += 1
        w.value = w.value + x
        return {"y": 2 * w.value, "flag": flag}

    return n, w, body, statetx.jit(body)


def test_ahead_of_time_program_reads_and_writes_states():
    n, w, body, f = ahead()
    lowered = f.lower(jax.ShapeDtypeStruct((3,), jnp.float32))
    compiled = lowered.compile({"xla_embed_ir_in_executable": True})  # as JAX's own call has not
    assert n.value == 0 < compiled.memory_analysis().argument_size_in_bytes and "HloModule" in compiled.as_text()
    x = jnp.ones(3)
    with compilations() as events:
        for i in range(3):
            out = compiled(x)
            assert int(n.value) == i + 1 and out["flag"] == "a"
            np.testing.assert_allclose(out["y"], 2 * np.asarray(w.value))
    assert body.runs == 1 and not events
    np.testing.assert_allclose(w.value, jnp.arange(3.0) + 3)


def test_ahead_of_time_program_rejects_other_types_and_transforms():
    n, w, _, f = ahead()
    compiled = f.lower(jnp.ones(3)).compile()
    for args in [(jnp.ones((2, 3)),), (jnp.ones(3), "b"), (jnp.ones(3, jnp.int32),)]:
        with pytest.raises(TypeError, match=r"jit\(.*\) was compiled for arguments .*f32\[3\]"):
            compiled(*args)
    w.value = jnp.zeros((2, 3))
    with pytest.raises(TypeError, match="types of states differ"):
        compiled(jnp.ones(3))
    with pytest.raises(TypeError, match="compiled ahead of time"):
        jax.grad(lambda x: compiled(x)["y"].sum())(jnp.ones(3))
    assert int(n.value) == 0


@pytest.mark.parametrize("by_name", [False, True])
def test_ahead_of_time_program_takes_no_static_arguments(by_name):
    """As in JAX, which leaves them out of the compiled call."""
    n = statetx.State(jnp.zeros(()))

    def f(power, x, *, scale=2.0):
        n.value += 1.0
        return scale * x**power

    arguments = ((), {"power": 3}) if by_name else ((3,), {})
    static = {"static_argnames": "power"} if by_name else {"static_argnums": 0}
    for jit, total in ((statetx.jit(f, **static), 1), (statetx.jit(f, donate_argnames="x", **static), 2)):
        x = {"x": jnp.full(2, 2.0)} if by_name else jnp.full(2, 2.0)
        rest = ((), x) if by_name else ((x,), {})
        compiled = jit.lower(*arguments[0], *rest[0], **arguments[1], **rest[1], scale=3.0).compile()
        with pytest.raises(TypeError, match="Static arguments are left out"):
            compiled(*arguments[0], *rest[0], **arguments[1], **rest[1], scale=3.0)
        np.testing.assert_array_equal(compiled(*rest[0], **rest[1], scale=3.0), np.full(2, 24.0))
        assert n.value == total


def test_ahead_of_time_stages_describe_the_arguments_and_outputs_of_the_function():
    total = statetx.State(jnp.zeros(2))

    def f(batch, mode, scale=1.0):
        total.value += batch["x"]
        return {"y": total.value * scale, "mode": mode}

    def g(batch, scale=1.0):
        return {"y": batch["x"] * scale}

    x, types = jnp.ones(2), lambda tree: jax.tree.map(lambda a: (a.shape, a.dtype), tree)
    for options, donated in (({}, False), ({"donate_argnums": 0}, True)):
        ours = statetx.jit(f, static_argnums=1, **options).trace({"x": x}, "fast", scale=2.0)
        theirs = jax.jit(g, **options).trace({"x": x}, scale=2.0)
        assert ours.out_avals == {**theirs.out_avals, "mode": "fast"}
        for compiled in (False, True):
            assert types(ours.args_info) == types(theirs.args_info) and ours.args_info[0][0]["x"].donated == donated
            assert ours.in_avals == theirs.in_avals and ours.in_tree == theirs.in_tree
            assert ours.donate_argnums == theirs.donate_argnums
            assert ours.out_tree == jax.tree.structure({"y": 0, "mode": 0})
            if not compiled:
                ours, theirs = (traced.lower().compile() for traced in (ours, theirs))
        assert ours.input_shardings == theirs.input_shardings and ours.input_formats == theirs.input_formats
        assert ours.output_shardings == {**theirs.output_shardings, "mode": "fast"}


def test_trace_and_eval_shape_run_nothing():
    n, _, body, f = ahead()
    assert f.eval_shape(jnp.ones(3)) == {"y": jax.ShapeDtypeStruct((3,), jnp.float32), "flag": "a"}
    traced = f.trace(jnp.ones(3))
    assert len(traced.jaxpr.in_avals) == 3 and len(traced.jaxpr.out_avals) == 3 and traced.out_info["y"].shape == (3,)
    assert float(traced.lower().compile()(jnp.ones(3))["y"][0]) == 2.0
    assert body.runs == 1 and int(n.value) == 1


def test_ahead_of_time_program_donates_and_rolls_back():
    w = statetx.Param(jnp.arange(3.0))

    def step(x):
        w.value = w.value * x

    compiled = statetx.jit(step, donate_states=True).lower(2.0).compile()
    before = w.value
    compiled(2.0)
    assert before.is_deleted() and w.value.tolist() == [0.0, 2.0, 4.0]


# -- called twice --------------------------------------------------------------------------------------------------


def test_jit_called_again_for_a_function_shares_its_programs():
    total = statetx.State(jnp.zeros(()))
    traces = []

    def add(x, scale=1.0):
        traces.append(1)
        total.value += scale * x
        return total.value

    outs = [float(statetx.jit(add)(1.0)) for _ in range(5)]
    assert outs == [1.0, 2.0, 3.0, 4.0, 5.0] and len(traces) == 1
    static = [float(statetx.jit(add, static_argnames=["scale"])(1.0, scale=2)) for _ in range(3)]
    assert static == [7.0, 9.0, 11.0] and len(traces) == 2, "other options, other programs"
    statetx.jit(add).clear_cache()
    assert float(statetx.jit(add)(1.0)) == 12.0 and len(traces) == 3


def test_new_function_objects_do_not_share():
    def make(scale):
        return lambda x: scale * x

    assert [float(statetx.jit(make(s))(2.0)) for s in (1.0, 2.0)] == [2.0, 4.0]


def test_clear_caches_of_jax_forgets_programs():
    traces = []

    @statetx.jit
    def f(x):
        traces.append(1)
        return x

    f(1.0), f(1.0), jax.clear_caches(), f(1.0)
    assert len(traces) == 2


def test_programs_are_freed_with_their_function():
    def make():
        held = statetx.State(jnp.full(3, 7.0))

        def fun(x):
            held.value += x
            return held.value

        return fun, weakref.ref(held), weakref.ref(fun)

    fun, state, function = make()
    for donates in (False, True):
        statetx.jit(fun, donate_states=donates)(1.0)
    del fun
    gc.collect()
    assert function() is None and state() is None


def test_unbounded_options_are_evicted():
    traces = []

    def fun(x):
        traces.append(1)
        return x

    for n in range(20):
        statetx.jit(fun, donate_states=lambda path, state, n=n: False)(1.0)
    statetx.jit(fun)(1.0), statetx.jit(fun)(1.0)
    assert len(traces) == 21
    caches = statetx.transforms.jit.cache._caches[fun]
    assert len(caches) <= 8


def aliases(lowered):
    """The output that takes the memory of each input of a lowered program; None for an input that none does."""
    main = lowered.as_text().partition("@main(")[2].partition(") -> ")[0]
    found = [re.search(r"tf.aliasing_output = (\d+)", argument) for argument in re.split(r"%arg\d+: ", main)[1:]]
    return [None if match is None else int(match[1]) for match in found]


@pytest.mark.parametrize("make", VALUED.values(), ids=VALUED)
def test_donated_states_are_updated_in_their_own_memory(make):
    """JAX gives donated inputs to outputs of their type in order, and XLA copies what another output takes."""
    w, v, m = [make(jnp.full((3, 3), x)) for x in (1.0, 2.0, 3.0)]
    reshaped = [] if make is ValuedRef else [make(jnp.ones(9))]
    written = [make(jnp.zeros((3, 3)))] if make in (statetx.State, brainstate.ShortTermState) else []  # others are read

    @functools.partial(statetx.jit, donate_states=True, donate_argnames="y")
    def step(x, y):
        g = w.value * x
        for state in reshaped:
            state.value = state.value.reshape(3, 3)  # of the type of the others: must not take their memory
        for state in written:
            state.value = g + 6.0
        v.value = 0.9 * v.value + g**2
        m.value = 0.9 * m.value + g
        w.value = w.value - m.value
        return g, y + 1.0  # of the states' type, too

    inputs = [s.value for s in (w, *reshaped, v, m)] + [jnp.full((3, 3), 2.0), jnp.full((3, 3), 7.0)]
    traced = step.trace(*inputs[-2:])
    outputs = jax.core.eval_jaxpr(traced.jaxpr.jaxpr, traced.jaxpr.consts, *inputs)
    taken = aliases(traced.lower())
    assert taken == [0, *[None for _ in reshaped], 1, 2, None, 3]  # the donated argument takes the first output
    inputs = jax.tree.map(jnp.copy, inputs[-2:])
    outputs = jax.tree.map(np.asarray, outputs)
    out = step(*inputs)
    for value, output in zip((w.value, v.value, m.value, out[0]), outputs, strict=False):
        np.testing.assert_allclose(value, output, rtol=1e-6)


def test_a_token_leaves_the_program():
    h = statetx.State(jnp.zeros(2))

    @statetx.jit
    def step(x):
        h.value = h.value + x
        return {"token": jax.lax.create_token(x), "sum": h.value.sum(), "name": "step"}

    for n in (1, 2):
        out = step(jnp.ones(2))
        assert not isinstance(out["token"], jax.core.Tracer)
        assert (float(out["sum"]), out["name"]) == (2.0 * n, "step")
    double = statetx.jit(lambda token, x: (jax.lax.after_all(token), 2 * x))
    token, y = double(out["token"], jnp.ones(2))
    assert type(token) is type(out["token"])
    np.testing.assert_array_equal(y, [2.0, 2.0])
