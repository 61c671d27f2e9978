"""`remat`: call forms, arguments, policies, errors. The laws are in `test_laws.py`."""

import copy
import functools
import inspect
import pickle

import jax
import jax.experimental
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest
from jax.interpreters import ad, mlir

import statetx
from helpers import equations

X = jnp.array([0.3, -0.7, 1.1])


class Cell:
    """A cell with a nonlinear update, so that no gradient is zero or constant."""

    def __init__(self):
        self.w = statetx.Param(jnp.array([0.5, 1.5, -0.4]))
        self.h = statetx.State(jnp.array([0.1, 0.2, 0.3]))
        self.seen = []

    def plain(self, x, scale=2.0, *, training=True):
        """Update the hidden state."""
        self.seen.append((scale, training))
        if training:
            self.h.value = jnp.tanh(self.w.value * x + self.h.value * scale)
        return jnp.sum(self.h.value**2)

    @statetx.remat
    def bare(self, x, scale=2.0, *, training=True):
        """Update the hidden state."""
        return Cell.plain(self, x, scale, training=training)

    @statetx.remat(policy="everything_saveable", static_argnums=(0, 2), static_argnames="training")
    def with_options(self, x, scale=2.0, *, training=True):
        return Cell.plain(self, x, scale, training=training)

    @staticmethod
    @statetx.remat
    def static(x):
        return jnp.sum(jnp.sin(x))

    @statetx.remat
    @staticmethod
    def static_below(x):
        return jnp.sum(jnp.sin(x))

    @statetx.remat
    @classmethod
    def make_loss(cls, x):
        return jnp.sum(jnp.sin(x)) * len(cls.__name__)

    def __call__(self, x):
        return self.plain(x)


def prevent_cse_of(f, *args):
    """The setting on every remat equation of a trace, loops included."""
    remats = [e for e in equations(jax.make_jaxpr(f)(*args).jaxpr) if e.primitive.name in ("remat2", "checkpoint")]
    return [eqn.params["prevent_cse"] for eqn in remats]


def num_remats(f, *args):
    return len(prevent_cse_of(f, *args))


def gradient_of(call, cell):
    """Gradient in x and w, and the state that is left."""
    g = statetx.grad(call, argnums=0, wrt=cell.w)(X)
    return [*g, cell.h.value]


FORMS = {
    "method": lambda c: c.bare,
    "method_options": lambda c: c.with_options,
    "bound_method": lambda c: statetx.remat(c.plain),
    "bound_method_static": lambda c: statetx.remat(c.plain, static_argnums=1),
    "function": lambda c: statetx.remat(lambda x: c.plain(x)),
    "partial": lambda c: statetx.remat(functools.partial(c.plain, training=True)),
    "callable_object": lambda c: statetx.remat(c),
    "nested": lambda c: statetx.remat(statetx.remat(c.plain)),
    "bound_decorated": lambda c: statetx.remat(c.bare),
    "checkpoint": lambda c: statetx.checkpoint(c.plain),
}


@pytest.mark.parametrize("form", FORMS)
def test_call_form_equals_the_plain_method(form):
    expected_cell, cell = Cell(), Cell()
    expected = gradient_of(expected_cell.plain, expected_cell)
    actual = gradient_of(FORMS[form](cell), cell)
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(a, b)
    assert float(jnp.abs(expected[0]).min()) > 0
    # The cell is made inside, so that plain jax.make_jaxpr may see it write.
    assert num_remats(lambda x: FORMS[form](Cell())(x), X) >= 1


def test_descriptors_keep_their_kind():
    for name in ("static", "static_below", "make_loss"):
        f = getattr(Cell, name)
        np.testing.assert_allclose(jax.grad(f)(X), jnp.cos(X) * (len("Cell") if name == "make_loss" else 1), rtol=1e-6)
        assert num_remats(f, X) == 1


def test_class_is_subclassed_with_its_methods_rematerialized():
    rematted = statetx.remat(Cell, methods=("plain", "__call__"))
    assert issubclass(rematted, Cell) and rematted.__name__ == "Cell"
    cell, expected = rematted(), Cell()
    np.testing.assert_array_equal(statetx.grad(cell)(X), statetx.grad(expected)(X))
    np.testing.assert_array_equal(cell.h.value, expected.h.value)
    assert num_remats(lambda x: rematted()(x), X) == 2
    assert list(statetx.states(cell)) == ["w", "h"]
    only_call = statetx.remat(Cell)
    assert num_remats(lambda x: only_call()(x), X) == 1
    assert num_remats(lambda x: only_call().plain(x), X) == 0


def test_identity_when_nothing_is_traced():
    calls = []

    class Opaque:
        pass

    @statetx.remat
    def f(x, obj):
        calls.append(type(x))
        return x, obj

    x, obj = np.ones(3), Opaque()
    assert f(x, obj)[0] is x and f(x, obj)[1] is obj
    assert calls == [np.ndarray] * 2


def test_any_object_passes_in_and_out_under_a_trace():
    class Mode:
        __hash__ = None

    mode = Mode()
    values = {
        "mode": mode,
        "none": None,
        "flag": True,
        "name": "relu",
        "n": 3,
        "module": np,
        "fn": len,
        "list": [1, "a"],
    }

    @statetx.remat
    def f(x, given):
        assert given["mode"] is mode and given["module"] is np and given["n"] == 3 and given["flag"] is True
        return jnp.sin(x).sum(), {**given, "twice": 2 * given["n"]}

    def loss(x):
        out, back = f(x, values)
        assert back == {**values, "twice": 6} and type(back["n"]) is int and back["list"] == [1, "a"]
        return out

    np.testing.assert_allclose(jax.grad(loss)(X), jnp.cos(X), rtol=1e-6)


@pytest.mark.parametrize(
    "options", [{"static_argnums": 2}, {"static_argnums": -1}, {"static_argnums": (1, -1)}, {"static_argnames": "mask"}]
)
@pytest.mark.parametrize("by_keyword", [False, True])
def test_static_array_stays_concrete(options, by_keyword):
    mask = jnp.array([True, False, True])

    @functools.partial(statetx.remat, **options)
    def f(x, scale, mask):
        with jax.ensure_compile_time_eval():
            kept = int(mask.sum())
        return (jnp.sin(x) * scale * kept).sum()

    call = (lambda x: f(x, 3.0, mask=mask)) if by_keyword else (lambda x: f(x, 3.0, mask))
    np.testing.assert_allclose(jax.jit(jax.grad(call))(X), 6 * jnp.cos(X), rtol=1e-6)


def test_static_counts_self_in_a_class_and_not_on_a_bound_method():
    class Model:
        @functools.partial(statetx.remat, static_argnums=2)
        def in_class(self, x, order):
            return (x ** int(order)).sum()

        def plain(self, x, order):
            return (x ** int(order)).sum()

    order = jnp.asarray(3)
    for f in (Model().in_class, statetx.remat(Model().plain, static_argnums=1)):
        np.testing.assert_allclose(jax.grad(lambda x, f=f: f(x, order))(X), 3 * X**2, rtol=1e-6)


def test_unhashable_static_and_static_tracer():
    @functools.partial(statetx.remat, static_argnums=(1, 2))
    def f(x, table, y):
        return (jnp.sin(x) * table["scale"][0] * y).sum()

    gx, gy = jax.grad(lambda x, y: f(x, {"scale": [2.0]}, y), argnums=(0, 1))(X, 2.0)
    np.testing.assert_allclose(gx, 4 * jnp.cos(X), rtol=1e-6)
    np.testing.assert_allclose(gy, 2 * jnp.sin(X).sum(), rtol=1e-6)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"static_argnums": 2}, r"static_argnums=2 is out of range: .*f has the parameters \(x, y\)"),
        ({"static_argnums": -3}, "out of range"),
        ({"static_argnames": "training"}, r"static_argnames='training'.*parameters \(x, y\)"),
        ({"static_argnames": "z"}, "static_argnames='z'"),
    ],
)
def test_static_argument_that_does_not_exist(options, match):
    def f(x, y):
        return x

    with pytest.raises(statetx.StaticArgumentError, match=match) as error:
        statetx.remat(f, **options)
    assert isinstance(error.value, ValueError)


def test_variadic_statics():
    @functools.partial(statetx.remat, static_argnums=-1, static_argnames="mode")
    def f(*args, **kwargs):
        assert isinstance(args[-1], np.ndarray) and isinstance(kwargs["mode"], np.ndarray)
        return sum(jnp.sin(a).sum() for a in args[:-1])

    flag = np.array(1)
    np.testing.assert_allclose(jax.grad(lambda x: f(x, x, flag, mode=flag))(X), 2 * jnp.cos(X), rtol=1e-6)


def test_policy_mistakes():
    with pytest.raises(statetx.PolicyError, match="is a function that returns a policy"):
        statetx.remat(jnp.sin, policy="save_only_these_names")
    with pytest.raises(statetx.PolicyError, match="is a function that returns a policy"):
        statetx.remat(jnp.sin, policy=jax.checkpoint_policies.save_only_these_names)
    for name in ("everything_saveable", "checkpoint_dots", "dots_with_no_batch_dims_saveable"):
        statetx.remat(jnp.sin, policy=name)


def test_prevent_cse_auto_is_off_only_directly_in_a_loop_body():
    f = statetx.remat(jnp.sin)
    assert prevent_cse_of(f, X) == [True]
    assert prevent_cse_of(lambda xs: statetx.scan(lambda c, x: (c, f(x)), 0, xs), X) == [False]
    assert prevent_cse_of(lambda xs: jax.lax.scan(lambda c, x: (c, f(x)), 0, xs), X) == [False]
    assert prevent_cse_of(lambda x: jax.lax.fori_loop(0, 3, lambda i, c: f(c), x), 1.0) == [False]
    in_jit = jax.jit(lambda x: f(x))
    assert prevent_cse_of(lambda xs: jax.lax.scan(lambda c, x: (c, in_jit(x)), 0, xs), X) == [True]
    inside = statetx.remat(lambda x: f(x) * 2)
    # The inner one is recomputed beside its forward pass, in one iteration of the backward loop.
    assert prevent_cse_of(lambda xs: jax.lax.scan(lambda c, x: (c, inside(x)), 0, xs), X) == [False, True]
    assert True in prevent_cse_of(lambda xs: jax.lax.scan(lambda c, x: (c, jax.grad(f)(x)), 0, xs), X)


def test_prevent_cse_given():
    def f(a, b):
        return jnp.sin(a["x"]) * b + a["y"]

    args = ({"x": X, "y": X}, X)
    assert prevent_cse_of(statetx.remat(f, prevent_cse=False), *args) == [False]
    assert prevent_cse_of(statetx.remat(f, prevent_cse=(True, False)), *args) == [(True, True, False)]
    tree = ({"x": False, "y": True}, True)
    assert prevent_cse_of(statetx.remat(f, prevent_cse=tree), *args) == [(False, True, True)]


def test_states_filter_forbids_excluded_states():
    cell = Cell()
    before = cell.h.value
    f = statetx.remat(cell.plain, states=statetx.Param)
    for call in (lambda: f(X), lambda: statetx.grad(f)(X), lambda: statetx.jit(f)(X)):
        with pytest.raises(statetx.StateAccessError, match=r"State 'h' \(f32\[3\], made at .*test_remat.py:\d+\)"):
            call()
        assert cell.h.value is before
    for states in ([statetx.Param, "h"], "*", lambda path, state: path in ("w", "h"), ~statetx.Not(["w", "h"])):
        statetx.grad(statetx.remat(cell.plain, states=states))(X)
    statetx.remat(cell.plain, states=[statetx.Param, "h"])(X)  # in eager code too
    assert cell.h.value is not before


def test_signature_name_doc_and_repr_survive():
    f = Cell.bare
    assert f.__name__ == "bare" and f.__doc__ == "Update the hidden state." and f.__module__ == __name__
    assert inspect.signature(f) == inspect.signature(Cell.plain)
    assert str(inspect.signature(Cell().bare)) == "(x, scale=2.0, *, training=True)"
    assert "Cell.bare" in repr(f) and "policy='everything_saveable'" in repr(Cell.with_options)


@statetx.remat
def module_level(x):
    return jnp.sin(x)


@statetx.remat
class Decorated:
    def __init__(self, k=1):
        self.k = k

    def __call__(self, x):
        return jnp.sin(x) * self.k


Wrapped = statetx.remat(Cell)


def _plain_function(x):
    return jnp.cos(x)


wrapped_function = statetx.remat(_plain_function, policy="dots_saveable")


def test_pickling_survives():
    again = pickle.loads(pickle.dumps(module_level))
    assert again is module_level
    assert pickle.loads(pickle.dumps(Cell.bare)) is Cell.bare
    again = pickle.loads(pickle.dumps(wrapped_function))
    assert float(again(1.0)) == float(jnp.cos(1.0)) and again._policy == wrapped_function._policy
    cell = pickle.loads(pickle.dumps(Cell()))
    np.testing.assert_array_equal(cell.bare(X), Cell().bare(X))
    bound = pickle.loads(pickle.dumps(Cell().bare))
    np.testing.assert_array_equal(bound(X), Cell().bare(X))
    decorated = pickle.loads(pickle.dumps(Decorated(3)))
    assert type(decorated) is Decorated and decorated.k == 3
    for wrapped in (pickle.loads(pickle.dumps(Wrapped())), copy.deepcopy(Wrapped())):
        assert isinstance(wrapped, Cell) and "__call__" in vars(type(wrapped))
        np.testing.assert_array_equal(statetx.grad(wrapped)(X), statetx.grad(Cell())(X))


def test_array_like_arguments():
    class Arrayish:
        def __init__(self, x):
            self.x = x

        def __jax_array__(self):
            return self.x

    f = statetx.remat(lambda a, b, key: (jnp.asarray(a) * b * jax.random.uniform(key)).sum())
    key = jax.random.key(0)
    expected = jax.grad(lambda x: (x * np.float32(2) * jax.random.uniform(key)).sum())(X)
    np.testing.assert_allclose(jax.grad(lambda x: f(Arrayish(x), np.float32(2), key))(X), expected, rtol=1e-6)


def test_concrete_outputs_are_unchanged():
    table = np.arange(3)
    f = statetx.remat(lambda x: (jnp.sin(x).sum(), table, X))

    def loss(x):
        out, t, const = f(x)
        assert t is table and const is X
        return out

    jax.grad(loss)(X)


def test_host_callbacks():
    seen = []

    def record(x):
        seen.append(float(x))

    def with_effect(x):
        jax.experimental.io_callback(record, None, x)
        return jnp.sin(x)

    for f in (with_effect, lambda x: jax.jit(with_effect)(x)):
        match = r"calls .*record at .*test_remat.py:\d+, a host callback"
        with pytest.raises(statetx.EffectError, match=match) as error:
            jax.jit(jax.grad(statetx.remat(f)))(1.0)
        assert isinstance(error.value, NotImplementedError) and not seen

    def prints(x):
        jax.debug.callback(record, x)
        return jnp.sin(jnp.sin(x))

    jax.grad(statetx.remat(prints))(1.0)
    jax.effects_barrier()
    assert seen == [1.0, 1.0]  # documented: once forward, once in the recomputation
    np.testing.assert_allclose(statetx.remat(with_effect)(1.0), np.sin(1.0), rtol=1e-6)  # eager: f(x) itself


@pytest.mark.parametrize("compiled", [False, True])
def test_callback_on_a_written_value_fires_once(compiled):
    shown, fired = statetx.State(jnp.zeros(())), []

    @statetx.remat
    def block(x):
        shown.value = jax.lax.stop_gradient(jnp.sin(x))
        return jnp.sin(jnp.sin(x))

    def step(x, _):
        x = block(x)
        jax.debug.callback(lambda value: fired.append(round(float(value), 4)), shown.value)
        return x, None

    loss = statetx.grad(lambda x: statetx.scan(step, x, None, length=3)[0])
    (statetx.jit(loss) if compiled else loss)(1.0)
    jax.effects_barrier()
    x, expected = 1.0, []
    for _ in range(3):
        expected.append(round(float(np.sin(x)), 4))
        x = np.sin(np.sin(x))
    assert sorted(fired) == sorted(expected)


def test_jaxprs_of_primitives_of_other_libraries_are_theirs():
    """lineax compares a jaxpr among the parameters of its solver with the one that another function closes over."""
    held = jax.extend.core.Primitive("held")

    def run(x, *, leaves):
        jaxpr, known = leaves
        assert known() is jaxpr
        return jax.core.eval_jaxpr(jaxpr, (), x)[0]

    held.def_impl(run)
    held.def_abstract_eval(lambda x, **_: x)
    mlir.register_lowering(held, mlir.lower_fun(run, multiple_results=False))
    ad.primitive_jvps[held] = lambda xs, ts, **params: jax.jvp(functools.partial(run, **params), xs, ts)

    @jax.custom_jvp
    def f(x):
        return jnp.sin(x)

    f.defjvp(lambda xs, ts: (f(*xs), jnp.cos(*xs) * ts[0]))
    jaxpr = jax.make_jaxpr(f)(1.0).jaxpr
    loss = statetx.remat(lambda x: jnp.exp(held.bind(x, leaves=(jaxpr, lambda: jaxpr))))
    x = jnp.float32(0.5)
    np.testing.assert_allclose(jax.grad(loss)(x), jnp.exp(jnp.sin(x)) * jnp.cos(x), rtol=1e-6)
