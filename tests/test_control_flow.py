"""`cond`, `switch`, `while_loop`, `fori_loop`: states threaded through branches and loops."""

import gc
import re
import types

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import statetx
from helpers import Counted, compilations


class Model:
    def __init__(self):
        self.a = statetx.State(jnp.asarray(1.0))
        self.b = statetx.State(jnp.zeros(3))
        self.w = statetx.Param(jnp.asarray(2.0))
        self.n = statetx.State(0)

    def left(self, x):
        self.a.value = self.a.value * self.w.value
        self.n.value += 1
        return jnp.sin(x) * self.a.value

    def right(self, x):
        self.b.value = self.b.value + x
        return x * self.w.value


@pytest.mark.parametrize("wrap", [lambda f: f, statetx.jit, lambda f: statetx.jit(statetx.remat(f))])
@pytest.mark.parametrize("pred", [True, False])
def test_cond_threads_the_union_of_writes(wrap, pred):
    m = Model()
    left, right = Counted(m.left), Counted(m.right)
    f = wrap(lambda p, x: statetx.cond(p, left, right, x))
    out = f(jnp.asarray(pred), 0.5)
    assert (left.runs, right.runs) == (1, 1)
    np.testing.assert_allclose(out, np.sin(0.5) * 2 if pred else 1.0, rtol=1e-6)
    assert float(m.a.value) == (2.0 if pred else 1.0) and int(m.n.value) == int(pred)
    np.testing.assert_array_equal(m.b.value, np.zeros(3) if pred else np.full(3, 0.5))


def test_cond_under_vmap_with_a_batched_predicate():
    m = Model()
    m.b.value = jnp.zeros((2, 3))
    m.a.value = jnp.ones(2)
    m.n.value = jnp.zeros(2, jnp.int32)
    preds = jnp.array([True, False])
    f = statetx.vmap(lambda p, x: statetx.cond(p, m.left, m.right, x), states={"m.[abn]": 0})
    np.testing.assert_allclose(f(preds, jnp.array([0.5, 0.5])), [2 * np.sin(0.5), 1.0], rtol=1e-6)
    np.testing.assert_array_equal(m.a.value, [2, 1])
    np.testing.assert_array_equal(m.n.value, [1, 0])


def test_switch_clamps_and_threads():
    s = statetx.State(jnp.zeros(()))
    branches = [Counted(lambda x, k=k: setattr(s, "value", s.value + k * x) or x + k) for k in (1.0, 10.0, 100.0)]
    for index, expected in ((0, 1.0), (1, 10.0), (2, 100.0), (7, 100.0), (-3, 1.0)):
        s.value = jnp.zeros(())
        assert float(statetx.switch(index, branches, 1.0)) == 1.0 + expected
        assert float(s.value) == expected
    assert all(b.runs == 5 for b in branches)
    assert float(statetx.switch(0, branches[:1], 1.0)) == 2.0
    two = statetx.switch(jnp.asarray(1), branches[:2], 1.0)
    assert float(two) == 11.0


@pytest.mark.parametrize("wrap", [lambda f: f, statetx.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("num", [1, 2, 3, 5])
def test_each_branch_of_a_switch_writes_in_turn(num, wrap):
    """Branch n alone writes state n, of each kind in turn, and in turn the first or the last state of all."""

    makers = statetx.State, brainstate.ShortTermState, nnx.BatchStat, jax.new_ref

    class Cells:
        def __init__(self):
            self.cells = [makers[n % 4](jnp.float32(10 * n)) for n in range(num)]
            self.ends = statetx.State(jnp.float32(0)), statetx.State(jnp.float32(0))

        def branch(self, n):
            def write(x):
                cell = self.cells[n]
                if n % 4 < 2:
                    cell.value += x
                else:
                    cell[...] += x
                self.ends[n % 2].value += n + x
                return 2 * x

            return write

        def values(self):
            cells = [c.value if n % 4 < 2 else c[...] for n, c in enumerate(self.cells)]
            return [*map(float, cells), *(float(end.value) for end in self.ends)]

    actual, expected = Cells(), Cells()
    run = wrap(lambda n, x: statetx.switch(n, [actual.branch(i) for i in range(num)], x))
    for n in range(num):
        out = run(jnp.int32(n), jnp.float32(0.5 + n))
        assert float(out) == expected.branch(n)(jnp.float32(0.5 + n))
        assert actual.values() == expected.values()


def test_cond_with_an_operand_for_each_branch():
    """The older form, which ``jax.lax.cond`` still takes."""
    count = statetx.State(jnp.zeros(()))

    def add(x):
        count.value += x["a"]
        return x["a"]

    choose = lambda p: statetx.cond(p, {"a": 2.0}, add, 3.0, jnp.negative)
    assert [float(f(p)) for f in (choose, statetx.jit(choose)) for p in (True, False)] == [2.0, -3.0, 2.0, -3.0]
    assert float(count.value) == 4.0


def test_mistakes_in_branches():
    s = statetx.State(jnp.zeros(3), name="s")
    before = s.value
    true = jnp.asarray(True)
    cases = [
        (lambda: statetx.switch(1.5, [lambda: 1]), TypeError, "index must be a scalar integer"),
        (lambda: statetx.switch(lambda: 0, [lambda: 1]), TypeError, "index must be a scalar integer, got function"),
        (lambda: statetx.switch(0, []), ValueError, "at least one branch"),
        (
            lambda: statetx.cond(true, lambda: "a", lambda: "a"),
            statetx.StateValueError,
            "is a str, which is not an array",
        ),
        (lambda: statetx.cond(true, lambda x: x, lambda x: x, 1, operand=2), TypeError, "not both"),
        (
            lambda: statetx.cond(true, lambda: [statetx.State(1.0)], lambda: []),
            statetx.CreatedStateError,
            "created inside",
        ),
    ]
    for call, error, match in cases:
        with pytest.raises(error, match=match):
            call()
        assert s.value is before
    assert statetx.cond(true, lambda x: x, lambda x: -x, operand=2.0) == 2.0


def test_operands_that_are_not_arrays():
    m = Model()
    out = statetx.cond(
        jnp.asarray(True), lambda m, x, how: m.left(x) if how == "l" else x, lambda m, x, how: x, m, 0.5, "l"
    )
    np.testing.assert_allclose(out, 2 * np.sin(0.5), rtol=1e-6)


@pytest.mark.parametrize("static", [True, False])
@pytest.mark.parametrize("wrap", [lambda f: f, statetx.jit])
def test_fori_loop(static, wrap):
    m = Model()

    def body(i, x):
        m.b.value = m.b.value + i * x
        m.n.value += 1
        return x * m.w.value

    count = Counted(body)
    lower, upper = (1, 5) if static else (jnp.asarray(1), jnp.asarray(5))
    out = wrap(lambda x: statetx.fori_loop(lower, upper, count, x))(jnp.float32(1.0))
    assert float(out) == 16.0 and int(m.n.value) == 4 and count.runs == 1
    np.testing.assert_array_equal(m.b.value, np.full(3, 1 + 2 * 2 + 3 * 4 + 4 * 8))


def test_fori_loop_gradient_and_unroll():
    m = Model()

    def loss(x, unroll=None):
        def body(i, x):
            m.a.value = m.a.value * m.w.value
            return jnp.sin(x) * m.a.value

        return statetx.fori_loop(0, 4, body, x, unroll=unroll)

    def reference(w, x):
        a = 1.0
        for _ in range(4):
            a = a * w
            x = jnp.sin(x) * a
        return x

    expected = jax.grad(reference, (0, 1))(2.0, 0.5)
    for unroll in (None, 2, True):
        m.a.value = jnp.asarray(1.0)
        np.testing.assert_allclose(statetx.grad(loss, 0, wrt=m.w)(0.5, unroll), expected, rtol=1e-5)
        np.testing.assert_allclose(m.a.value, 16.0)
    with pytest.raises(TypeError, match="upper must be a real scalar, got str"):
        statetx.fori_loop(0, "2", lambda i, x: x, 1.0)
    with pytest.raises(TypeError, match=r"lower must be a real scalar, got f32\[2\]"):
        statetx.fori_loop(jnp.zeros(2), 2, lambda i, x: x, 1.0)
    assert float(statetx.fori_loop(3, 3, lambda i, x: x + 1, 1.0)) == 1.0


BOUNDS = [(0.5, 2.75), (jnp.float32(-1.0), 1.0), (jnp.int32(1), 3), (2.0, 1.0), (np.int16(0), jnp.int16(2))]


@pytest.mark.parametrize("bounds", BOUNDS, ids=str)
def test_fori_loop_bounds_match_jax(bounds):
    total = statetx.State(0.0)

    def body(i, x):
        total.value += i * 1.0
        return x * (2.0 + i)

    def theirs(lower, upper, x):
        return jax.lax.fori_loop(lower, upper, lambda i, x: (x[0] * (2.0 + i), x[1] + i * 1.0), (x, 0.0))

    def ours(lower, upper, x):
        total.value = 0.0
        return statetx.fori_loop(lower, upper, body, x), total.value

    for disabled in (False, True):
        with jax.disable_jit(disabled):
            np.testing.assert_allclose(ours(*bounds, 1.0), theirs(*bounds, 1.0), rtol=1e-6)
    gradient = lambda f: jax.grad(lambda x: f(*bounds, x)[0])(1.0)
    np.testing.assert_allclose(gradient(ours), gradient(theirs), rtol=1e-6)
    traced = [jnp.asarray(b, jnp.result_type(*bounds)) for b in bounds]
    total.value = 0.0
    np.testing.assert_allclose(statetx.jit(ours)(*traced, 1.0), jax.jit(theirs)(*traced, 1.0), rtol=1e-6)
    with pytest.raises(statetx.PolicyError, match="lower or upper is traced"):
        jax.jit(lambda n: statetx.fori_loop(0, n, lambda i, x: x, 1.0, checkpoint=2))(2)


def test_disable_jit_does_not_change_a_carry_in_place():
    """jax#27019: NumPy's ``+=`` in a body changes the array that the caller gave."""

    def body(x, total):
        x += 1.0
        return x, total + x

    loops = {
        "while_loop": lambda x: statetx.while_loop(lambda c: c[0] < 3.0, lambda c: body(*c), (x, x)),
        "fori_loop": lambda x: statetx.fori_loop(0, 3, lambda i, c: body(*c), (x, x)),
        "scan": lambda x: statetx.scan(lambda c, _: (body(*c), None), (x, x), None, 3)[0],
    }
    for name, loop in loops.items():
        x = np.zeros((), np.float32)
        with jax.disable_jit():
            assert tuple(map(float, loop(x))) == (3.0, 6.0), name
        assert x == 0.0


@pytest.mark.parametrize("argument", ["length", "unroll"])
def test_traced_scan_options_raise(argument):
    f = lambda n: statetx.scan(lambda c, _: (c, None), 0.0, **{"length": 3, argument: n})[0]
    with pytest.raises(jax.errors.ConcretizationTypeError, match=f"scan: {argument}= must be known"):
        jax.jit(f)(3)
    assert jax.jit(f, static_argnums=0)(3) == 0.0


def test_while_loop():
    m = Model()

    def body(x):
        m.b.value = m.b.value + x
        m.n.value += 1
        return x * m.w.value

    def test(x):
        return x < 10 * m.a.value + 0 * m.b.value.sum()

    counted_test, counted_body = Counted(test), Counted(body)
    for wrap in (lambda f: f, statetx.jit, jax.tree_util.Partial):
        m.b.value, m.n.value = jnp.zeros(3), 0
        out = wrap(lambda x: statetx.while_loop(counted_test, counted_body, x))(jnp.float32(1.0))
        assert float(out) == 16.0 and int(m.n.value) == 4
        np.testing.assert_array_equal(m.b.value, 15)
    assert (counted_test.runs, counted_body.runs) == (3, 3)


def test_while_loop_condition_reads_writes_of_the_body():
    n = statetx.State(jnp.zeros((), jnp.int32))

    def body(x):
        n.value += 1
        return x + 1.0

    assert float(statetx.while_loop(lambda x: n.value < 5, body, 0.0)) == 5.0 and int(n.value) == 5
    tangent = statetx.jvp(lambda x: statetx.while_loop(lambda y: y < 10.0, lambda y: y * x, x), (2.0,), (1.0,))
    np.testing.assert_allclose(tangent, (16.0, 32.0))


def test_mistakes_in_loops():
    rng, s = statetx.RngState(0), statetx.State(jnp.zeros(3))
    before = s.value
    cases = [
        (
            lambda: statetx.while_loop(lambda x: jax.random.uniform(rng.next()) < x, lambda x: x, 0.5),
            statetx.StateAccessError,
            "condition .* wrote RngState 'rng' \\(key.*made at .*\\) at .*random draw",
        ),
        (lambda: statetx.while_loop(lambda x: x < 1, lambda x: (x, x), 0.5), statetx.CarryTypeError, "structure"),
        (
            lambda: statetx.while_loop(lambda x: x < 1, lambda x: jnp.ones(2), 0),
            statetx.CarryTypeError,
            "changes the type",
        ),
        (lambda: statetx.fori_loop(0, 3, lambda i, x: [statetx.State(x)] and x, 0), None, None),
        (
            lambda: statetx.fori_loop(0, 3, lambda i, x: KEPT.append(statetx.State(x)) or x, 0),
            statetx.CreatedStateError,
            "created",
        ),
    ]
    for call, error, match in cases:
        if error is None:
            call()
            continue
        with pytest.raises(error, match=match):
            call()
        assert s.value is before


KEPT: list = []


@pytest.mark.parametrize(
    "apply",
    [
        lambda f: statetx.cond(jnp.asarray(True), f, lambda x: x, 2.0),
        lambda f: statetx.fori_loop(0, 1, lambda i, x: f(x), 2.0),
        lambda f: statetx.functionalize(f)({}, 2.0)[0],
        lambda f: statetx.shard_map(f, mesh=jax.make_mesh((1,), ("d",)), in_specs=P(), out_specs=P())(jnp.asarray(2.0)),
    ],
    ids=["cond", "fori_loop", "functionalize", "shard_map"],
)
def test_state_in_a_reference_cycle_is_freed_after_the_body(apply):
    """A jitted function that closes over a local state is one; a module that knows its parent is another."""

    def body(x):
        state = statetx.State(3.0)
        module = types.SimpleNamespace(state=state)
        module.itself = module
        return statetx.jit(lambda x: x * state.value)(x)

    gc.disable()  # so that the cycles exist when the body returns
    try:
        assert float(apply(body)) == 6.0
    finally:
        gc.enable()


def test_eager_calls_share_one_program():
    statetx.clear_cache()
    s = statetx.State(jnp.zeros(()))

    def call(k):
        statetx.cond(k > 2, lambda x: setattr(s, "value", s.value + x) or x, lambda x: x * k, jnp.float32(1.0))
        statetx.while_loop(lambda x: x < 3 + k, lambda x: setattr(s, "value", s.value + k) or x + 1, jnp.float32(0))
        statetx.fori_loop(0, 3, lambda i, x: x * k, jnp.float32(1.0))

    call(jnp.float32(1.0))
    warm = jnp.float32(0)
    with compilations() as compiled:
        for _ in range(4):
            warm = warm + 1
            call(jnp.asarray(np.float32(warm)))
    loops = ("cond", "while_loop", "fori_loop")
    assert not [c for c in compiled if any(name in c for name in loops)] and statetx.cache_info().structures.misses == 3


def test_fori_loop_index_is_weakly_typed():
    out = statetx.fori_loop(0, 3, lambda i, x: x + i, jnp.int8(0))
    assert out.dtype == jnp.int8 and int(out) == 3


@pytest.mark.parametrize("pred", [1j, None, "a", [True], jnp.ones(2)], ids=repr)
def test_cond_predicate_errors(pred):
    with pytest.raises(TypeError, match="cond: the predicate must be a scalar, true or false or a real number, got "):
        statetx.cond(pred, lambda: 1.0, lambda: 2.0)


def test_eager_branches_over_numbers_compile_once():
    def run(i):
        return statetx.cond(i > 2, lambda x: x + 1, lambda x: x * 2, i), statetx.switch(
            i % 2, [jnp.sin, jnp.cos], float(i)
        )

    run(0)
    with compilations() as events:
        for i in range(5):
            run(i)
    assert not events


@pytest.mark.parametrize(
    "loop",
    [
        lambda f: statetx.fori_loop(0, 2, f, 0.0),
        lambda f: statetx.while_loop(f, lambda x: x, 0.0),
        lambda f: statetx.while_loop(lambda x: x < 1, f, 0.0),
        lambda f: statetx.scan(f, 0.0, None, 2),
    ],
)
def test_loops_need_callables(loop):
    with pytest.raises(TypeError, match="needs a callable as the (body|condition), got int"):
        loop(42)


def test_forwarded_branch_outputs_stay_unbatched():
    keep = lambda x, y: statetx.scan(lambda c, _: (c, None), y, None, 1)[0]
    run = jax.vmap(lambda x, y: statetx.cond(x < 0, keep, keep, x, y), (0, None), None)
    assert float(run(jnp.arange(3.0), 3.0)) == 3.0


@pytest.mark.parametrize(
    ("loop", "name"),
    [
        (lambda x: statetx.while_loop(lambda v: v < 10, lambda v: v * x, x), "while_loop"),
        (lambda x: statetx.while_loop(lambda v: v < 10, lambda v: v * x, x, max_steps=5), "while_loop"),
        (lambda x: statetx.while_loop(lambda v: v[0] < 10, lambda v: (v[0] * v[1], v[1]), (x, x))[0], "while_loop"),
        (lambda x: jax.jit(statetx.fori_loop, static_argnums=2)(0, 3, lambda i, v: v * v, x), "fori_loop"),
        (
            lambda x: jax.jit(statetx.fori_loop, static_argnums=2)(0, 3, lambda i, v: (v[0] * v[1], v[1]), (x, x))[0],
            "fori_loop",
        ),
    ],
)
def test_error_of_a_reversed_loop_names_the_body_of_the_user(loop, name):
    with pytest.raises(ValueError, match=rf"The loop: {name}\(.*lambda.* at {re.escape(__file__)}:\d+\)"):
        jax.grad(loop)(1.5)


@pytest.mark.parametrize("num", [2, 3])
def test_last_branch_with_another_structure_is_refused(num):
    branches = [*[lambda x: (x, x)] * (num - 1), lambda x: x]
    with pytest.raises(statetx.CarryTypeError, match="all branches must return the same structure"):
        statetx.switch(num - 1, branches, 1.0)
