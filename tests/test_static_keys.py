"""Static arguments of compiled functions: distinguished by type, value and states, and not kept alive."""

import array
import collections
import dataclasses
import gc
import types
import weakref

import brainstate
import jax.numpy as jnp
import libraries
import numpy as np
import pytest
from flax import nnx

import statetx
from helpers import in_thread

X = jnp.ones(2)


class Plain:
    def __init__(self, i):
        self.w = statetx.Param(jnp.full(2, float(i)))


class Slots:
    __slots__ = ("w",)
    __init__ = Plain.__init__


@dataclasses.dataclass
class Unhashable:
    i: int
    w: statetx.Param = dataclasses.field(init=False, compare=False)

    def __post_init__(self):
        self.w = statetx.Param(jnp.full(2, float(self.i)))
        self.i = 0


@dataclasses.dataclass(slots=True)
class UnhashableSlots:
    i: int
    w: statetx.Param = dataclasses.field(init=False, compare=False)

    __post_init__ = Unhashable.__post_init__


class Equal(Plain):
    def __eq__(self, other):
        return isinstance(other, Equal)

    def __hash__(self):
        return 7


class Nnx(nnx.Module):
    def __init__(self, i):
        self.w = nnx.Param(jnp.full(2, float(i)))


class Brainstate(brainstate.nn.Module):
    def __init__(self, i):
        super().__init__()
        self.w = brainstate.ParamState(jnp.full(2, float(i)))


class Arrays:
    def __init__(self, i):
        self.w = Plain(i).w.value


MODELS = [Plain, Slots, Unhashable, UnhashableSlots, Equal, Nnx, Brainstate, Arrays]
ALLOW_NO_REFERENCE = (Slots, UnhashableSlots)
OPENED = ("argument", "list", "keyword", "method")  # as jax.jit does


def weight(model):
    return model.w if isinstance(model, Arrays) else libraries.get(model.w)


@pytest.mark.parametrize("cls", MODELS)
@pytest.mark.parametrize("how", ["argument", "method", "static", "list", "bound method", "keyword"])
def test_models_are_distinguished_and_freed(cls, how):
    runs = []

    def body(model, x):
        runs.append(None)
        return (weight(model) * x).sum()

    class Model(cls):
        __slots__ = ()
        step = statetx.jit(body)
        plain = body

    jitted, call = {
        "argument": (step := statetx.jit(body), step),
        "keyword": (step, lambda model, x: step(model=model, x=x)),
        "method": (Model.step, lambda model, x: model.step(x)),
        "static": (pinned := statetx.jit(body, static_argnums=0), pinned),
        "list": (listed := statetx.jit(lambda models, x: body(*models, x)), lambda model, x: listed([model], x)),
        "bound method": (applied := statetx.jit(lambda f, x: f(x)), lambda model, x: applied(model.plain, x)),
    }[how]
    arrays, models = [], []
    is_opened = cls is Nnx and how in OPENED
    for i in range(1, 6):
        model = Model(i)
        assert float(call(model, X)) == float(call(model, 2 * X)) / 2 == 2.0 * i
        assert len(runs) == (min(i, 2) if is_opened else i), "one program for a model, but from the second of flax on"
        arrays.append(weakref.ref(weight(model)))
        if cls not in ALLOW_NO_REFERENCE:
            models.append(weakref.ref(model))
    del model
    gc.collect()
    if cls in ALLOW_NO_REFERENCE:  # the last goes when another program comes
        assert sum(ref() is not None for ref in arrays) == 1
        call(Model(6), X)
        gc.collect()
    assert not any(ref() is not None for ref in (*arrays, *models))
    assert len(jitted.cache.programs) == (cls in ALLOW_NO_REFERENCE or is_opened)


@dataclasses.dataclass(frozen=True)
class Config:
    width: int
    note: object = None


def test_static_objects_without_states_compare_by_equality():
    runs = []

    @statetx.jit
    def f(config, x):
        runs.append(config)
        return x * config.width

    for _ in range(3):
        gc.collect()
        assert float(f(Config(2), 1.0)) == 2.0
    assert len(runs) == 1
    assert float(f(Config(3), 1.0)) == 3.0 and len(runs) == 2


def test_old_programs_are_evicted(monkeypatch):
    f = statetx.jit(lambda config, x: config.width * x)
    f.cache.programs._size = 3
    for width in range(6):
        f(Config(width), X)
        assert len(f.cache.programs) <= 3
    assert [key[1][0][0].obj.width for key in f.cache.programs] == [3, 4, 5]


def test_models_are_freed_in_any_thread():
    f = statetx.jit(lambda model, x: model.w.value * x)

    def work(start):
        for i in range(start, start + 4):
            assert float(f(Plain(i), X)[0]) == i

    in_thread(*[lambda n=n: work(10 * n) for n in range(3)])
    gc.collect()
    assert len(f.cache.programs) == 0


@dataclasses.dataclass
class Record:
    sizes: list
    parent: object = None

    def append(self, x):
        self.sizes.append(x)

    def __iter__(self):
        return iter(self.sizes)


RecordSlots = dataclasses.make_dataclass(
    "RecordSlots", ["sizes"], slots=True, namespace={"append": Record.append, "__iter__": Record.__iter__}
)


def cyclic(sizes):
    record = Record(list(sizes))
    record.parent = record
    return record


class Namespace(types.SimpleNamespace):
    append, __iter__ = Record.append, Record.__iter__


SEQUENCES = {
    "deque": collections.deque,
    "bytearray": bytearray,
    "array": lambda sizes: array.array("i", sizes),
    "UserList": collections.UserList,
    "dataclass": Record,
    "dataclass with slots": RecordSlots,
    "in a tuple": lambda sizes: (collections.deque(sizes),),
    "in a dataclass": lambda sizes: Record(collections.deque(sizes)),
    "cyclic": cyclic,
    "SimpleNamespace": lambda sizes: Namespace(sizes=list(sizes)),
}


@pytest.mark.parametrize("make", SEQUENCES.values(), ids=SEQUENCES)
def test_mutable_static_argument_is_never_stale(make):
    runs = []
    flat = lambda x: x[0] if isinstance(x, tuple) else x

    @statetx.jit(static_argnums=1)
    def f(x, sizes):
        runs.append(None)
        return x * sum(flat(sizes))

    sizes = make([1, 2])
    assert float(f(1.0, sizes)) == float(f(2.0, sizes)) / 2 == 3.0 and len(runs) == 1
    flat(sizes).append(7)
    assert float(f(1.0, sizes)) == 10.0 and len(runs) == 2
    assert float(f(1.0, make([1, 2]))) == 3.0


@pytest.mark.parametrize(
    "make",
    [
        lambda: collections.defaultdict(int, a=1),
        lambda: collections.OrderedDict(a=1),
        lambda: collections.UserDict(a=1),
        lambda: collections.ChainMap({"a": 1}),
    ],
)
def test_mutable_static_mapping_is_never_stale(make):
    f = statetx.jit(lambda x, sizes: x * sizes["a"], static_argnums=1)
    sizes = make()
    assert float(f(1.0, sizes)) == 1.0
    sizes["a"] = 5
    assert float(f(1.0, sizes)) == 5.0


def test_options_of_static_containers_count():
    f = statetx.jit(lambda x, sizes: x * (sizes.maxlen or 0), static_argnums=1)
    assert [float(f(1.0, collections.deque([1], n))) for n in (None, 2, 3)] == [0, 2, 3]
    g = statetx.jit(lambda x, sizes: x * sizes.default_factory(), static_argnums=1)
    assert [float(g(1.0, collections.defaultdict(make))) for make in (int, lambda: 4)] == [0, 4]
    entries = np.array([1, None], object)
    h = statetx.jit(lambda x, entries: x * entries[0], static_argnums=1)
    assert float(h(1.0, entries)) == 1.0
    entries[0] = 3
    assert float(h(1.0, entries)) == 3.0


def test_record_that_holds_states_keeps_its_program_when_an_attribute_changes():
    runs = []

    @statetx.jit
    def f(model, x):
        runs.append(None)
        return model.w.value * x

    model = Unhashable(3)
    f(model, X)
    model.i = 1  # an attribute of a model, as of a class without equality: `jit` caches by contract
    assert float(f(model, X)[0]) == 3.0 and len(runs) == 1


def test_programs_are_freed_with_their_model():
    f = statetx.jit(lambda model, config, x: model.w.value * config.width * x)
    models = [Plain(1), Plain(2)]
    for model in models:
        for width in (1, 2):
            assert float(f(model, Config(width), X)[0]) == float(model.w.value[0]) * width
    assert len(f.cache.programs) == 4
    del model
    models.pop()
    gc.collect()
    assert len(f.cache.programs) == 2
    f.clear_cache()
    models.pop()
    gc.collect()
    assert float(f(Plain(7), Config(1), X)[0]) == 7.0
