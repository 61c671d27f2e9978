"""Nothing is left out: every state that a call touches takes part, whatever holds it, or the call raises and names it.

A table of holders, crossed with the users of the walk. A holder makes a model, a callable that multiplies by the value
of one state and has it in that place, and says under which path it is found.
"""

import collections
import contextvars
import dataclasses
import enum
import functools
import itertools
import threading
import types
import weakref
from typing import Any, NamedTuple

import brainstate
import elsewhere
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, PartitionSpec
from libraries import get as value_of

import statetx
from statetx import Param, State

X = jnp.array([1.0, 2.0, 3.0])
W = jnp.array([2.0, 5.0, -1.0])

here = None


def scale(x):
    return x * value_of(here)


class Model:
    """Multiplies by the state that `get` finds in `held`."""

    def __init__(self, held, get=lambda held: held):
        self.held = held
        self.get = get

    def __call__(self, x):
        return x * value_of(self.get(self.held))


first = lambda held: next(iter(held))
item = lambda held: held[0]
attribute = lambda held: held.w


def subclass(base, *args):
    cls = type("Sub", (base,), {})

    def make(w):
        held = cls(*args)
        held.w = w
        return Model(held, attribute)

    return make


class Pair(NamedTuple):
    w: Any
    scale: float


class Slotted:
    __slots__ = ("__w",)

    def __init__(self, w):
        self.__w = w

    def __call__(self, x):
        return x * value_of(self.__w)


class SlottedIn_(Slotted):
    __slots__ = ("rest",)


@dataclasses.dataclass
class Fields:
    w: Any

    def __call__(self, x):
        return x * value_of(self.w)


@dataclasses.dataclass(slots=True, eq=False)
class SlottedFields(Fields):
    w: Any


def of_class(w):
    class OfClass:
        gain = w

        def __call__(self, x):
            return x * value_of(self.gain)

    return OfClass()


def of_base(w):
    class Base:
        gains = (1.0, [w])

    class OfBase(Base):
        def __call__(self, x):
            return x * value_of(self.gains[1][0])

    return OfBase()


def of_enum(w):
    class Kind(enum.Enum):
        A = w

    return Model(Kind.A, lambda held: held.value)


def of_class_of_enum(w):
    class Kind(enum.Enum):
        A = w

    return Model(None, lambda held: Kind.A.value)


def entries(w):
    held = np.empty((1, 2), object)
    held[0, 1] = w
    return Model(held, lambda held: held[0, 1])


def closed_over(w):
    return lambda x: x * value_of(w)


def closure_of_helper(w):
    def inner(x):
        return x * value_of(w)

    def outer(x):
        return inner(x)

    return lambda x: outer(x)


def positional_default(w):
    def call(x, w=w):
        return x * value_of(w)

    return call


def keyword_only_default(w):
    def call(x, *, w=w):
        return x * value_of(w)

    return call


def function_attribute(w):
    def call(x):
        return x * value_of(call.w)

    call.w = w
    return call


class Lazy:
    @functools.cached_property
    def gain(self):
        return self.__dict__.pop("w")

    def __call__(self, x):
        return x * value_of(self.gain)


def cached_property(w):
    made = Lazy()
    made.w = w
    made.gain  # noqa: B018
    return made


def lazy_property(w):
    class Lazy:
        @functools.cached_property
        def gain(self):
            return w

        def __call__(self, x):
            return x * value_of(self.gain)

    return Lazy()


def property_(w):
    class WithProperty:
        @property
        def gain(self):
            return w

        def __call__(self, x):
            return x * value_of(self.gain)

    return WithProperty()


def method_of_a_method(w):
    class Inner:
        def apply(self, x):
            return x * value_of(w)

        def unused(self, x):
            return x * value_of(unrelated)

    class Outer:
        def __init__(self):
            self.inner = Inner()

        def __call__(self, x):
            return self.inner.apply(x)

    return Outer()


def of_brainstate(w):
    class Net(brainstate.nn.Module):
        def update(self, x):
            return x * value_of(w)

    return Net()


unrelated = Param(jnp.ones(3))


class Decorator:
    def __init__(self, fun, w):
        functools.update_wrapper(self, fun)
        self.w = w

    def __call__(self, x):
        return self.__wrapped__(x) * value_of(self.w)


class Bound(State):
    pass


def cached(w):
    @functools.cache
    def get():
        return w

    return Model(None, lambda held: get())


def cache_of(w):
    box = [w]

    @functools.cache
    def get():
        return box.pop()

    get()
    return Model(get, lambda held: held())


def of_here(w):
    global here
    here = w
    return scale


def method_reads_here(w):
    global here
    here = w

    class Reads:
        def __call__(self, x):
            return scale(x)

    return Reads()


def helper_elsewhere(w):
    elsewhere.weight = w
    return lambda x: elsewhere.scale(x)


def method_reads_elsewhere(w):
    elsewhere.weight = w
    return Model(None, lambda held: elsewhere.weight)


def method_by_string(w):
    class Inner:
        def apply(self, x):
            return x * value_of(w)

    return Model(Inner(), lambda held: types.SimpleNamespace(value=getattr(held, "apply")(1.0)))  # noqa: B009


def module_in_an_attribute(w):
    elsewhere.weight = w
    return Model(elsewhere, lambda held: held.weight)


def module_imported_in_the_body(w):
    elsewhere.weight = w
    return elsewhere.scale_by_module


def imported_in_the_body(w):
    elsewhere.weight = w
    return elsewhere.scale_by_import


def class_elsewhere(w):
    elsewhere.Held.weight = w
    return lambda x: x * value_of(elsewhere.Held.weight)


def looked_up_by_name(w):
    elsewhere.hidden = w
    return lambda x: elsewhere.scale_by_name(x)


def thread_local(w):
    held = threading.local()
    held.w = w
    return Model(held, attribute)


def context_variable(w):
    held = contextvars.ContextVar("held")
    held.set(w)
    return Model(held, lambda held: held.get())


def weak_value(w):
    held = weakref.WeakValueDictionary(a=w)
    return Model(held, lambda held: held["a"])


def generator(w):
    def run():
        mine = w
        while True:
            yield mine

    held = run()
    next(held)
    return Model(held, lambda held: next(held))


def other_state(w):
    held = Bound(0.0, partner=w)
    return Model(held, lambda held: held.metadata["partner"])


def linked(w):
    held = {"w": w}
    for _ in range(3000):
        held = {"next": held}

    def get(held):
        while "next" in held:
            held = held["next"]
        return held["w"]

    return Model(held, get)


HELD = {
    "attribute": (lambda w: Model(w), "held"),
    "list": (lambda w: Model([w], first), "held.0"),
    "tuple": (lambda w: Model((w,), first), "held.0"),
    "named tuple": (lambda w: Model(Pair(w, 1.0), first), "held.w"),
    "dict": (lambda w: Model({"a": w}, lambda held: held["a"]), "held.a"),
    "key of a dict": (lambda w: Model({w: 1.0}, first), "held.keys.0"),
    "deque": (lambda w: Model(collections.deque([w]), first), "held.0"),
    "set": (lambda w: Model({w}, first), "held.Param"),
    "frozenset": (lambda w: Model(frozenset([w]), first), "held.Param"),
    "chain of maps": (lambda w: Model(collections.ChainMap({}, {"a": w}), lambda held: held["a"]), "held.a"),
    "namespace": (lambda w: Model(types.SimpleNamespace(w=w), attribute), "held.w"),
    "read-only mapping": (lambda w: Model(types.MappingProxyType({"a": w}), lambda held: held["a"]), "held.a"),
    "array of objects": (entries, "held.0.1"),
    "attribute of a list": (subclass(list), "held.w"),
    "attribute of a dict": (subclass(dict), "held.w"),
    "attribute of a tuple": (subclass(tuple), "held.w"),
    "attribute of a set": (subclass(set), "held.w"),
    "attribute of a deque": (subclass(collections.deque), "held.w"),
    "attribute of a string": (subclass(str, "a"), "held.w"),
    "attribute of a number": (subclass(float, 1.0), "held.w"),
    "attribute of an exception": (subclass(ValueError), "held.w"),
    "attribute of a thread's": (thread_local, "held.w"),
    "attribute of an array": (subclass(np.ndarray, (1,)), "held.w"),
    "default of a dict": (
        lambda w: Model(collections.defaultdict(lambda: w), lambda held: held.default_factory()),
        "held.default_factory.w",
    ),
    "private slot": (Slotted, "_Slotted__w"),
    "private slot of a base class": (SlottedIn_, "_Slotted__w"),
    "field": (Fields, "w"),
    "field in a slot": (SlottedFields, "w"),
    "class": (of_class, "gain"),
    "base class": (of_base, "gains.1.0"),
    "enum": (of_enum, "held.value"),
    "metadata of a state": (other_state, "held.partner"),
    "linked list": (linked, "held." + "next." * 3000 + "w"),
    "closure": (closed_over, "w"),
    "closure of a helper's helper": (closure_of_helper, "outer.inner.w"),
    "default": (positional_default, "w"),
    "keyword-only default": (keyword_only_default, "w"),
    "function": (function_attribute, "w"),
    "argument of a partial": (lambda w: functools.partial(lambda w, x: x * value_of(w), w), "w"),
    "cached property": (cached_property, "gain"),
    "list of a method": (lambda w: Model([w].pop, lambda held: held.__self__[0]), "held.0"),
    "dict of a method": (lambda w: Model({"a": w}.__getitem__, lambda held: held("a")), "held.a"),
    "tuple of a slot": (lambda w: Model((w,).__iter__, lambda held: next(held())), "held.0"),
    "decorator": (lambda w: Decorator(lambda x: x, w), "w"),
    "cached function": (cached, "get.get.w"),
    "variable of the module": (of_here, "here"),
    "variable of another module": (helper_elsewhere, "weight"),
    "variable of another module, imported in the body": (imported_in_the_body, "elsewhere.weight"),
    "class of another module": (class_elsewhere, "elsewhere.Held.weight"),
}
BEYOND = {
    "class of an enum": (of_class_of_enum, "get.Kind.A.value"),
    "variable that a method reads": (method_reads_here, "here"),
    "variable of another module, in an attribute": (method_reads_elsewhere, "get.elsewhere.weight"),
    "module in an attribute": (module_in_an_attribute, "held.weight"),
    "module imported in the body": (module_imported_in_the_body, "elsewhere.weight"),
    "method looked up by a string": (method_by_string, "held.w"),
    "property": (property_, "w"),
    "property to be cached": (lazy_property, "gain"),
    "method of a method": (method_of_a_method, "inner.w"),
    "method that a library calls": (of_brainstate, "w"),
    "weak reference": (lambda w: Model(weakref.ref(w), lambda held: held()), "held"),
    "weak set": (lambda w: Model(weakref.WeakSet([w]), first), "held.Param"),
    "value of a weak dict": (weak_value, "held.a"),
    "context variable": (context_variable, "held"),
}
OPAQUE = {
    "iterator": (lambda w: Model(itertools.cycle([w]), lambda held: next(held)), "held.?.?.0"),
    "generator": (generator, "held.?.w"),
    "cache": (cache_of, "held.?.()"),
}
ALL = HELD | BEYOND | OPAQUE


def holders(table):
    return pytest.mark.parametrize(("make", "path"), table.values(), ids=table)


@holders(HELD)
def test_states_are_found(make, path):
    w = Param(W)
    found = statetx.states(make(w), Param)
    assert {p: s for p, s in found.items() if s is w} == {path: w}
    assert unrelated not in found.values()


@holders(ALL)
def test_gradients_by_filter(make, path):
    w = Param(W)
    model = make(w)
    assert statetx.trace_states(model)(X).reads == {path: w}
    grads = statetx.grad(lambda x: model(x).sum(), wrt=Param)(X)
    assert len(grads) == 1
    np.testing.assert_allclose(*grads.values(), X)


TRANSFORMS = {
    "value_and_grad": lambda f: statetx.value_and_grad(f, wrt=Param)(X)[1],
    "vjp": lambda f: statetx.vjp(f, X, wrt=Param)[1](1.0)[0],
    "jacrev": lambda f: statetx.jacrev(f, wrt=Param)(X),
    "jacfwd": lambda f: statetx.jacfwd(f, wrt=Param)(X),
    "grad in jit": lambda f: statetx.jit(statetx.grad(f, wrt=Param))(X),
    "grad of remat": lambda f: statetx.grad(statetx.remat(f), wrt=Param)(X),
    "grad of jit": lambda f: statetx.grad(statetx.jit(f), wrt=Param)(X),
    "grad in a scan": lambda f: jax.tree.map(
        lambda g: g[0], statetx.scan(lambda c, x: (c, statetx.grad(f, wrt=Param)(X)), None, jnp.arange(2))[1]
    ),
}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
@pytest.mark.parametrize("holder", ["set", "class", "property", "iterator"])
def test_every_derivative_by_filter(transform, holder):
    model = ALL[holder][0](Param(W))
    grads = transform(lambda x: model(x).sum())
    assert len(grads) == 1
    np.testing.assert_allclose(*grads.values(), X)


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_unreachable_state_is_named_in_the_error(transform):
    seen, other = State(0), Param(W)

    def loss(x):
        seen.value += 1
        return (looked_up(x) * other.value).sum()

    looked_up = looked_up_by_name(Param(W))
    with pytest.raises(statetx.StateFilterError, match=r"Param.* selects Param \(f32\[3\], made at .*test_walk.py:\d+"):
        transform(loss)
    assert seen.value == 0
    grads = statetx.grad(loss, wrt={"hidden": elsewhere.hidden})(X)
    np.testing.assert_allclose(grads["hidden"], X * W)
    np.testing.assert_allclose(*statetx.grad(loss, wrt="other")(X).values(), X * W)


def test_residuals_by_filter_of_an_unreachable_state_raise():
    looked_up, other = looked_up_by_name(Param(W)), Param(W)
    with pytest.raises(statetx.StateFilterError, match="the walk over the function and its arguments does not find it"):
        statetx.saved_residuals(lambda x: (looked_up(x) * other.value).sum(), X, wrt=Param)


KINDS = {"statetx": Param, "brainstate": brainstate.ParamState, "nnx": nnx.Param, "ref": jax.new_ref}


@pytest.mark.parametrize(
    "holder", ["set", "attribute of a list", "class", "private slot", "property", "weak reference"]
)
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_by_filter_of_every_kind(kind, holder):
    w = KINDS[kind](W)
    if kind in ("nnx", "ref") and holder in ("set", "weak reference"):
        pytest.skip("cannot be hashed, nor referred to weakly")
    model = ALL[holder][0](w)
    grads = statetx.grad(lambda x: model(x).sum(), wrt=jax.Ref if kind == "ref" else KINDS[kind])(X)
    np.testing.assert_allclose(*grads.values(), X)


def test_unreachable_ref_has_a_gradient_or_raises():
    ref, other = jax.new_ref(W), jax.new_ref(W)
    elsewhere.hidden = types.SimpleNamespace(value=ref)
    loss = lambda x: (x * vars(elsewhere)["".join(("hid", "den"))].value[...] * other[...]).sum()
    np.testing.assert_allclose(statetx.grad(loss, wrt=ref)(X), X * W)
    with pytest.raises(statetx.StateFilterError, match="selects Ref"):
        statetx.grad(loss, wrt=jax.Ref)(X)


def test_untouched_state_has_no_gradient():
    """Methods are followed by name, sometimes too far: states found that way and not read are left out."""
    used, unused = Param(W), Param(W)

    class Two:
        def __init__(self):
            self.used = used

        def scale(self, x):
            return x * self.used.value

        def __getitem__(self, i):
            return unused.value

    two = Two()
    assert list(statetx.grad(lambda x: two.scale(x).sum(), wrt=Param)(X)) == ["two.used"]
    grads, of_x = statetx.jacrev(lambda x: two.scale(x).sum(), 0, wrt=Param)(X)
    assert list(grads) == ["two.used"] and of_x.shape == (3,)


def test_instance_listed_by_its_class_is_another_object():
    class Counted:
        made = []

        def __init__(self):
            self.w = Param(W)
            self.made.append(self)

    one, two = Counted(), Counted()
    assert statetx.states(one) == {"w": one.w} and statetx.states(two) == {"w": two.w}
    assert list(statetx.grad(lambda x: (x * one.w.value).sum(), wrt=Param)(X)) == ["one.w"]


# -- walks over objects without a call --


STABLE = {name: entry for name, entry in (HELD | BEYOND).items() if name != "linked list"}


@holders(STABLE)
def test_values_contain_every_holder(make, path):
    w = Param(W)
    model = {"model": make(w)}
    saved = jax.device_get(statetx.values(model))
    w.value = jnp.zeros(3)
    statetx.restore(model, saved)
    np.testing.assert_array_equal(w.value, W)


@holders(OPAQUE)
def test_values_of_states_without_stable_path_raise(make, path):
    with pytest.raises(statetx.CheckpointError, match="held by 'held'"):
        statetx.values(make(Param(W)))


def test_values_of_sets_with_equal_items_raise():
    with pytest.raises(
        statetx.CheckpointError, match=r"the state 'held.Param' is in the set 'held', which has no order"
    ):
        statetx.values(Model({Param(W), Param(2 * W)}))
    states = {Param(W, name="a"), Param(2 * W, name="b"), State(W)}
    saved = statetx.values(Model(states))
    for state in states:
        state.value = jnp.zeros(3)
    statetx.restore(Model(states), saved)
    assert {s.name: s.value[0] for s in states} == {"a": 2.0, "b": 4.0, None: 2.0}
    assert list(statetx.states(Model(states))) == ["held.State", "held.a", "held.b"]


def test_values_of_a_function_contain_states_of_its_helpers():
    model = helper_elsewhere(Param(W))
    saved = statetx.values(model)
    elsewhere.weight.value = jnp.zeros(3)
    statetx.restore(model, saved)
    np.testing.assert_array_equal(elsewhere.weight.value, W)


def plain(table):
    """Holders of a value that is not a state: layers that differ there compute different results."""
    names = "list,tuple,named tuple,dict,deque,namespace,array of objects,private slot,field,closure,default"
    names += ",chain of maps,keyword-only default,attribute of a list,attribute of a dict,attribute of a tuple"
    names += ",attribute of a deque,attribute of a string,attribute of a number,attribute of a set,function"
    names += (
        ",argument of a partial,cached property,decorator,default of a dict,metadata of a state,private slot of a "
        "base class"
    )
    names += ",attribute of a thread's,closure of a helper's helper"
    return {name: table[name] for name in names.split(",")}


@holders(plain(ALL))
def test_stacked_layers_that_differ_in_a_holder_raise(make, path):
    class Layer:
        def __init__(self, rate):
            self.w = Param(W)
            self.inner = make(types.SimpleNamespace(value=rate))

        def __call__(self, x):
            return self.inner(x) * self.w.value

    with pytest.raises(
        statetx.StateValueError, match="differ in .* which is not a state: 0.5 in layer 0 and 2.0 in layer 1"
    ):
        statetx.stack([Layer(0.5), Layer(2.0)])
    alike = statetx.stack([Layer(0.5), Layer(0.5)])
    np.testing.assert_allclose(alike(X), X * W * W / 4)


UNLIKE = (
    "class",
    "base class",
    "enum",
    "attribute of an exception",
    "class of another module",
)  # for each layer another
STACKED = [name for name in HELD if name not in UNLIKE and "variable" not in name]


@pytest.mark.parametrize("holder", STACKED)
def test_stacks_contain_every_holder(holder):
    make = HELD[holder][0]
    layers = statetx.stack([make(Param(W)), make(Param(2 * W))])
    np.testing.assert_allclose(layers(X), 2 * X * W * W)
    states = list(statetx.states(layers, Param).values())
    assert [s.value.shape for s in states if s is not unrelated] == [(2, 3)]


# -- rules for states, which are asked where a state is touched --

MESH = jax.make_mesh((3,), ("d",), axis_types=(AxisType.Auto,), devices=jax.devices()[:3])
D = PartitionSpec("d")
MAPS = {
    "vmap": lambda f: statetx.vmap(f, states={Param: 0})(X),
    "scan": lambda f: statetx.scan(lambda c, x: (c, f(x)), None, X, states={Param: 0})[1],
    "map in jit": lambda f: statetx.jit(statetx.vmap(f, states={Param: 0}))(X),
    "shard_map": lambda f: statetx.shard_map(f, mesh=MESH, in_specs=D, out_specs=D, states={Param: D})(X),
}
SOME = ["set", "attribute of a list", "class", "private slot", "property", "weak reference", "iterator"]


@pytest.mark.parametrize("transform", MAPS.values(), ids=MAPS)
@pytest.mark.parametrize("holder", SOME)
def test_mapped_states_by_type(transform, holder):
    w = Param(W)
    model = ALL[holder][0](w)
    np.testing.assert_allclose(transform(lambda x: model(x)), X * W)


@pytest.mark.parametrize("name", ["vmap", "scan", "map in jit"])
def test_mapped_unreachable_states(name):
    np.testing.assert_allclose(MAPS[name](looked_up_by_name(Param(W))), X * W)


def test_sharded_unreachable_states_raise():
    model, state = looked_up_by_name(Param(W)), State(0.0)

    def f(x):
        state.value = 1.0
        return model(x)

    with pytest.raises(statetx.StateFilterError, match=r"shard_map: states= selects Param .*test_walk.py"):
        MAPS["shard_map"](f)
    assert state.value == 0.0

    def write(x):
        elsewhere.hidden.value = x
        return x

    MAPS["shard_map"](write)
    np.testing.assert_array_equal(elsewhere.hidden.value, X)


def test_mapped_states_of_an_argument_by_name():
    model = Model(Param(W))
    out = statetx.vmap(lambda model, x: model(x), (None, 0), states={"model.held": 0})(model, X)
    np.testing.assert_allclose(out, X * W)


@holders(HELD | BEYOND)
def test_allowed_states_by_path_and_functional_form(make, path):
    w = Param(W)
    model = make(w)
    np.testing.assert_allclose(statetx.jit(statetx.remat(model, states=path.replace("[", "[[]")))(X), X * W)
    with pytest.raises(statetx.StateAccessError, match="which its filter states=False excludes"):
        statetx.remat(model, states=False)(X)
    pure = statetx.functionalize(model)
    assert pure.states(X) == {path: w}
    out, new = jax.jit(pure)(pure.values(X), X)
    np.testing.assert_allclose(out, X * W)
    assert list(new) == [path]


@pytest.mark.sample
@pytest.mark.parametrize("holder", ["list", "set", "class", "property", "iterator"])
def test_memory_report_counts_every_holder(holder):
    """`memory_report`, `measure` and `plan` see a state wherever it is: as many bytes as in a list."""
    w = Param(jnp.ones((64, 64)))

    def report(model):
        block = statetx.remat(lambda x: jnp.tanh(x @ model(jnp.eye(64))))
        loss = lambda x: block(block(x)).sum()
        rows = statetx.memory_report(loss, jnp.ones((8, 64))).rows
        cost = statetx.measure(loss, jnp.ones((8, 64)))
        return [(r.residual_bytes, r.argument_bytes, r.output_bytes) for r in rows], cost.argument_bytes

    assert report(ALL[holder][0](w)) == report(HELD["attribute"][0](w))


# -- classes and proxies that refuse to be looked at -----------------------------------------------------------------


class RefusesInstances(type):
    def __instancecheck__(cls, obj):
        raise TypeError("do not use isinstance")


class Kind(metaclass=RefusesInstances):
    size = 3
    parts = (1, 2)


class Unbound:
    """A proxy that stands for nothing yet, as of a lazy import."""

    @property
    def __class__(self):
        raise RuntimeError("outside of a context")

    def __getattr__(self, name):
        raise RuntimeError("outside of a context")


UNBOUND: Any = None
GLOBAL_WEIGHT = Param(jnp.ones(3))


class WithKind:
    kind = Kind

    def __call__(self, x):
        return jnp.sum(GLOBAL_WEIGHT.value * x) * self.kind.size


class WithProxy:
    def __init__(self):
        self.proxy = UNBOUND

    def __call__(self, x):
        return jnp.sum(GLOBAL_WEIGHT.value * x) if UNBOUND is not None else self.proxy


@pytest.mark.parametrize("make", [WithKind, WithProxy])
def test_metaclasses_and_proxies_that_raise_are_passed_over(make, monkeypatch):
    monkeypatch.setitem(globals(), "UNBOUND", Unbound())  # not before: pytest looks at all variables of the module
    model = make()
    f = lambda x: model(x)
    assert list(statetx.states(f)) == []  # of what it holds, not of what it reads
    (path,) = statetx.trace_states(f)(X).reads
    assert path.endswith("GLOBAL_WEIGHT") and list(statetx.functionalize(f).values(X)) == [path]
    assert float(statetx.jit(f)(X)) == float(f(X))
    assert statetx.memory_profile(f, X).peak_bytes > 0
