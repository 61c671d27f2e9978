"""`State` and its subclasses, frames and the registry: errors, and no leaks."""

import copy
import dataclasses
import itertools
import pickle

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from libraries import VALUED

import statetx


def test_subclass_metadata_and_repr():
    class Trace(statetx.State):
        pass

    s = Trace(jnp.zeros((2, 3), jnp.bfloat16), name="trace", tau=5.0)
    assert repr(s) == "Trace(bf16[2,3], name='trace', tau=5.0)"
    assert s.metadata == {"tau": 5.0}
    s.extra = 3  # subclasses have room for attributes
    assert repr(statetx.State({"a": jnp.ones(2), "b": 1})) == "State({'a': f32[2], 'b': int})"
    assert repr(statetx.State(1.0)) == "State(1.0)"
    assert repr(statetx.State(jnp.arange(3.0))) == "State(f32[3] [0., 1., 2.])"
    assert repr(statetx.State(jnp.arange(5.0))) == "State(f32[5])"
    shown = []
    jax.jit(lambda x: shown.append(repr(statetx.State(x))))(1.0)
    assert shown == ["State(~f32[])"]  # a tracer has no value to show
    assert repr(statetx.RngState(0)) == "RngState(key<fry>[])"
    assert statetx.State(1, name="<x>")._repr_html_() == "<code>State(1, name=&#x27;&lt;x&gt;&#x27;)</code>"


def test_state_in_state_raises():
    s = statetx.State(1.0)
    with pytest.raises(statetx.StateValueError, match="cannot hold a state"):
        statetx.State(s)
    with pytest.raises(statetx.StateValueError, match="cannot hold a state"):
        s.value = statetx.State(2.0)
    assert s.value == 1.0


def test_copies_and_pickles_are_independent():
    s = statetx.Param(jnp.arange(3.0), name="w", axis=1)
    for t in (copy.deepcopy(s), pickle.loads(pickle.dumps(s)), copy.copy(s)):
        assert type(t) is statetx.Param and t.name == "w" and t.metadata == {"axis": 1}
        t.value = jnp.zeros(3)
        np.testing.assert_array_equal(s.value, [0, 1, 2])


class Slotted(statetx.State):
    __slots__ = ("__unit", "axis", "unset")

    def __init__(self, value, axis, unit):
        super().__init__(value)
        self.axis, self.__unit = axis, unit

    @property
    def unit(self):
        return self.__unit


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))])
def test_copies_have_the_slots_of_a_subclass(copied):
    twin = copied(Slotted(jnp.ones(2), 1, "mV"))
    assert (twin.axis, twin.unit) == (1, "mV") and not hasattr(twin, "unset")


def test_seed_of_a_random_state_may_be_traced():
    draw = lambda seed: jax.random.uniform(statetx.RngState(seed).next())
    expected = [draw(seed) for seed in range(3)]
    np.testing.assert_array_equal(jax.vmap(draw)(jnp.arange(3)), expected)
    np.testing.assert_array_equal(statetx.jit(draw)(2), expected[2])
    for run, got in (draw, "float"), (jax.jit(draw), "DynamicJaxprTracer"):
        with pytest.raises(statetx.StateValueError, match=f"needs an integer seed or a random key, got {got}"):
            run(0.5)


def test_container_that_refuses_other_leaves_is_printed():
    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class Vector:
        x: jax.Array

        def __post_init__(self):
            assert self.x.ndim == 1

    assert repr(statetx.State(Vector(jnp.ones(3)))) == "State(Vector(f32[3]))"


def test_rng_state():
    for seed in (0, np.int64(0), jax.random.key(0)):
        rng = statetx.RngState(seed)
        first, rest = rng.next(), rng.split(4)
        assert first.shape == () and rest.shape == (4,)
        words = np.concatenate([jax.random.key_data(k).reshape(-1, 2) for k in (first, rest, rng.value)])
        assert len(np.unique(words, axis=0)) == 6
    legacy = statetx.RngState(jax.random.PRNGKey(0))
    assert legacy.next().shape == (2,)


RAW = {
    "jit": lambda f: jax.jit(f)(1.0),
    "grad": lambda f: jax.grad(f)(1.0),
    "vmap": lambda f: jax.vmap(f)(jnp.ones(2)),
    "scan": lambda f: jax.lax.scan(lambda c, x: (c, f(x)), 0, jnp.ones(2)),
}
INSIDE = ("statetx.jit", "statetx.grad", "remat", "around remat")


@pytest.mark.parametrize("raw", RAW)
@pytest.mark.parametrize(
    ("kind", "inside"),
    [("statetx", "top level"), *itertools.product(("statetx", "brainstate", "nnx"), INSIDE)],  # theirs have own errors
)
def test_write_under_a_raw_transform_raises_at_the_write(raw, kind, inside):
    s = VALUED[kind](jnp.ones(()))
    reached = []

    def f(x):
        s.value = s.value * x
        reached.append(True)
        return s.value

    def run(y):
        out = RAW[raw](f)
        return jnp.sum(jax.tree.leaves(out)[-1]) * y

    call = {
        "top level": lambda: run(1.0),
        "statetx.jit": lambda: statetx.jit(run)(1.0),
        "statetx.grad": lambda: statetx.grad(run)(1.0),
        "remat": lambda: statetx.grad(statetx.remat(run))(1.0),
        "around remat": lambda: RAW[raw](statetx.remat(f)),
    }[inside]
    before = s.value
    site = "a place that flax does not record" if kind == "nnx" else r".*test_state.py:\d+"
    message = rf"(?s){type(s).__name__} \(f32\[\], made at {site}\).*at .*test_state.py:\d+"
    with pytest.raises(statetx.TraceLeakError, match=message) as e:
        call()
    assert isinstance(e.value, RuntimeError)
    assert kind != "statetx" or inside == "around remat" or not reached
    assert s.value is before


def test_write_under_a_raw_transform_names_the_state():
    s = statetx.State(jnp.ones(()), name="total")

    def f(x):
        s.value = s.value * x
        return s.value

    for name, run in RAW.items():
        instead = f"(?s)State 'total'.*jax's {name} is tracing.*" + (
            f"use statetx.{name} in place" if hasattr(statetx, name) else ""
        )
        with pytest.raises(statetx.TraceLeakError, match=instead):
            run(f)
    with pytest.raises(statetx.TraceLeakError, match="statetx.grad"):
        jax.jvp(f, (1.0,), (1.0,))


def test_untraced_write_under_a_raw_transform_is_allowed():
    s = statetx.State(0)

    def f(x):
        s.value += 1
        return x**2

    assert jax.grad(f)(3.0) == 6 and s.value == 1


def test_state_created_inside_a_raw_transform_is_writable():
    @jax.jit
    def f(x):
        s = statetx.State(x)
        s.value = s.value * 2
        g = statetx.grad(lambda y: (s.value * y).sum())(x)
        s.value = s.value + g
        return s.value

    assert f(3.0) == 12
    assert jax.grad(f)(3.0) == 4

    @jax.jit
    def leaks(x):
        s = statetx.State(x)
        jax.grad(lambda y: setattr(s, "value", y * s.value) or y)(x)
        return s.value

    with pytest.raises(statetx.TraceLeakError):
        leaks(3.0)


def test_state_created_in_a_failed_call_raises_on_read():
    kept = []

    def f(x):
        kept.append(statetx.State(x * 2))
        raise KeyError("later")

    with pytest.raises(KeyError):
        statetx.grad(f)(1.0)
    with pytest.raises(statetx.StateAccessError, match=r"created inside grad\(.*did not complete"):
        _ = kept[0].value
    kept[0].value = 3.0
    assert kept[0].value == 3.0


AS_PLAIN = {  # in-place changes reach every state that holds the container
    "remat": lambda f: statetx.remat(f),
    "remat of remat": lambda f: statetx.remat(statetx.remat(f)),
    "jvp": lambda f: lambda x: statetx.jvp(f, (x,), (x,))[0],
    "grad": lambda f: lambda x: statetx.value_and_grad(lambda x: f(x))(x)[0],
    "grad of remat": lambda f: lambda x: statetx.value_and_grad(statetx.remat(f))(x)[0],
    "vmap": lambda f: lambda x: statetx.vmap(lambda _: f(x))(jnp.ones(2))[0],
}
REFUSED = {  # each state is an input of its own
    "jit": lambda f: statetx.jit(f),
    "scan": lambda f: lambda x: statetx.scan(lambda c, _: (c, f(x)), 0.0, jnp.ones(2))[1],
    "cond": lambda f: lambda x: statetx.cond(x > 0, f, f, x),
    "jit of grad": lambda f: statetx.jit(lambda x: statetx.value_and_grad(lambda x: f(x))(x)[0]),
}


@pytest.mark.parametrize("make", [list, lambda xs: dict(enumerate(xs))], ids=["list", "dict"])
@pytest.mark.parametrize("cls", [statetx.State, brainstate.State])
def test_states_that_share_a_container_share_it_in_a_call_or_the_call_is_refused(cls, make):
    def program(transform):
        container = make([jnp.float32(1), jnp.float32(2)])
        a, b = cls(container), cls(container)

        def f(x):
            a.value[0] = a.value[0] + x
            b.value[1] = b.value[0] * x
            return 10 * a.value[1] + b.value[0]

        try:
            out = transform(f)(jnp.float32(3))
        except statetx.StateValueError as error:
            assert "two states hold" in str(error)
            out = None
        return out, dict(enumerate([a.value[0], a.value[1], b.value[0], b.value[1]]))

    expected = program(lambda f: f)
    for transform in AS_PLAIN.values():
        assert program(transform) == expected
    for transform in REFUSED.values():
        assert program(transform) == (None, {0: 1, 1: 2, 2: 1, 3: 2})


@jax.tree_util.register_pytree_node_class
class Shy:
    """Refuses at times to be taken apart."""

    is_refusing = False

    def __init__(self, x):
        self.x = x

    def tree_flatten(self):
        if Shy.is_refusing:
            raise KeyError("not now")
        return (self.x,), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


@pytest.mark.parametrize("wrap", [statetx.jit, statetx.grad])
def test_value_whose_read_has_failed_is_not_written(wrap, monkeypatch):
    s = statetx.State(Shy(jnp.ones(3)))
    held = s.value

    def f(x):
        with monkeypatch.context() as patch, pytest.raises(KeyError):
            patch.setattr(Shy, "is_refusing", True)
            _ = s.value
        return x

    assert wrap(f)(1.0) == 1.0 and s.value is held


@pytest.mark.parametrize("make", [statetx.State, brainstate.State])
def test_in_place_change_or_created_state_under_a_custom_rule_raises(make):
    """Writes are not seen there: the final values are checked at the end."""
    items, models = make([jnp.zeros(())]), []

    def change(x):
        items.value[0] = x
        return x

    def keep(x):
        models.append(make(2 * x))
        return x

    for fun in (change, keep):
        rule = jax.custom_jvp(fun)
        rule.defjvp(lambda primals, tangents, fun=fun: (fun(*primals), tangents[0]))
        with pytest.raises(statetx.TraceLeakError, match=r"custom_jvp.*(changed it in place|test_state.py:\d+)"):
            statetx.jit(rule)(1.0)
    assert float(items.value[0]) == 0.0


def test_repr_of_a_dict_with_keys_of_two_types():
    assert repr(statetx.State({"a": 1, 2: 3})) == "State(dict)"
