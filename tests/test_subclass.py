"""Rematerialized objects: their attributes, states and type look unchanged to every reader."""

import copy
import dataclasses
import functools
import gc
import inspect
import pickle
import weakref

import brainstate
import equinox
import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import statetx

X = jnp.array([0.3, -0.7])


class WithArray:
    """Its ``__reduce__`` gives an array."""

    def __init__(self, w):
        self.w = w

    def __call__(self, x):
        return self.w * x

    def __reduce__(self):
        return type(self), (self.w,)


@pytest.mark.parametrize("copied", [copy.copy, lambda x: pickle.loads(pickle.dumps(x))], ids=["copy", "pickle"])
def test_copies_where_reduce_gives_arrays(copied):
    twin = copied(statetx.remat(WithArray(np.arange(2.0))))
    assert isinstance(twin, WithArray)
    np.testing.assert_array_equal(twin(X), [0.0, X[1]])


class Block:
    """Multiply by a weight."""

    def __init__(self, w=2.0):
        self.w = statetx.Param(jnp.asarray(w))
        self.count = statetx.State(0)
        self.train = True

    def __call__(self, x, scale=1.0):
        """Apply it."""
        self.count.value += 1
        return jnp.sin(x * self.w.value) * scale if self.train else x

    @property
    def weight(self):
        return self.w.value

    @weight.setter
    def weight(self, value):
        self.w = statetx.Param(value)


class Slotted:
    __slots__ = ("__dict__", "train", "w")

    def __init__(self):
        self.w = statetx.Param(jnp.asarray(2.0))
        self.train = True

    __call__ = Block.__call__
    count = statetx.State(0)


class Sequence(list):
    train = True

    def __call__(self, x):
        return sum(jnp.sin(x * w.value) for w in self) if self.train else x


class Closed:
    train = True

    def __init_subclass__(cls):
        raise TypeError("no subclasses")

    def __call__(self, x):
        return jnp.sin(x) if self.train else x


class Finalized:
    train = True

    def __call__(self, x):
        return jnp.sin(x) if self.train else x

    def __del__(self):
        self.train  # noqa: B018


class Module(nnx.Module):
    def __init__(self):
        self.linear = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
        self.train = True

    def __call__(self, x):
        return jnp.tanh(self.linear(x)) if self.train else x


class NoTree(Module, pytree=False):
    pass


class BModule(brainstate.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = brainstate.nn.Linear(2, 2)
        self.train = True

    def update(self, x):
        return jnp.tanh(self.linear(x)) if self.train else x


@dataclasses.dataclass
class Equal:
    w: statetx.Param = dataclasses.field(default_factory=lambda: statetx.Param(jnp.asarray(2.0)))
    train: bool = True

    def __call__(self, x):
        return jnp.sin(x * self.w.value) if self.train else x


OBJECTS = {
    "plain": Block,
    "slots": Slotted,
    "list": lambda: Sequence([statetx.Param(jnp.asarray(2.0))]),
    "no subclasses": Closed,
    "finalized": Finalized,
    "nnx": Module,
    "nnx, no pytree": NoTree,
    "brainstate": BModule,
    "dataclass": Equal,
}
TWINS = [name for name in OBJECTS if name not in ("slots", "list", "no subclasses", "finalized")]


def num_remats(f, *args):
    return str(jax.make_jaxpr(f)(*args)).count("remat2")


# -- attributes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", OBJECTS)
@pytest.mark.parametrize("transform", ["remat", "jit", "vmap", "grad", "functionalize"])
def test_attributes_are_read_from_and_written_to_the_object(transform, kind):
    obj = OBJECTS[kind]()
    wrapped = getattr(statetx, transform)(obj)
    assert wrapped.train is True
    wrapped.train = False
    assert obj.train is False
    obj.train = True
    assert wrapped.train is True
    if kind != "no subclasses":
        wrapped.new = 1
        assert obj.new == 1
        del wrapped.new
        assert not hasattr(obj, "new")
    with pytest.raises(AttributeError, match="trian"):
        wrapped.trian  # noqa: B018
    assert list(statetx.states(wrapped)) == list(statetx.states(obj))
    assert all(a is b for a, b in zip(statetx.states(wrapped).values(), statetx.states(obj).values(), strict=True))


def test_an_attribute_that_a_wrapped_function_lacks_cannot_be_deleted():
    wrapped = statetx.remat(jnp.sin)
    wrapped.new = 1
    del wrapped.new
    with pytest.raises(AttributeError, match="'Remat' object has no attribute 'new'"):
        del wrapped.new


@pytest.mark.parametrize("kind", OBJECTS)
def test_a_flipped_attribute_is_seen_by_the_next_call(kind):
    obj = OBJECTS[kind]()
    wrapped = statetx.remat(obj)
    x = X if not isinstance(obj, nnx.Module) else X[None]
    gradient = statetx.grad(lambda x: wrapped(x).sum())
    np.testing.assert_array_equal(gradient(x), statetx.grad(lambda x: obj(x).sum())(x))
    assert "remat2" in str(statetx.make_jaxpr(wrapped)(x))
    wrapped.train = False
    np.testing.assert_array_equal(gradient(x), jnp.ones_like(x))


class Counting(type):
    def __call__(cls, *args):
        return super().__call__(*args)


@pytest.mark.parametrize("make", [lambda f: f, jax.custom_jvp, lambda f: Counting("Made", (), {})])
def test_wrapped_functions_have_their_own_attributes(make):
    f = make(lambda x: x)
    f.note = 1
    g = statetx.jit(f)
    assert g.note == 1
    g.note = 2
    assert f.note == 1 and g.note == 2
    assert not hasattr(g, "__jax_array__") and not hasattr(statetx.vmap(Block()), "__len__")


def test_properties_and_other_methods_are_forwarded():
    block = Block()
    wrapped = statetx.remat(block)
    wrapped.weight = jnp.asarray(3.0)
    assert block.w is wrapped.w and float(block.weight) == 3.0


class Gain(brainstate.ParamState):
    def __call__(self, x):
        return self.value * x


def test_a_state_that_can_be_called_has_no_twin():
    gain = Gain(2.0)
    assert statetx.grad(statetx.remat(gain), wrt=gain)(3.0) == 3.0


# -- twins -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", TWINS)
def test_rematerialized_objects_are_instances_of_a_subclass(kind):
    obj, other = OBJECTS[kind](), OBJECTS[kind]()
    wrapped = statetx.remat(obj)
    assert isinstance(wrapped, type(obj)) and type(wrapped).__name__ == type(obj).__name__
    assert type(wrapped) is type(statetx.remat(other)), "objects of one class stay of one class"
    assert type(wrapped) is not type(statetx.remat(other, policy="dots_saveable"))
    assert repr(wrapped).startswith(repr(obj).split(" at ")[0].split("(")[0])


def test_signature_options_and_mistakes_match_the_bound_call():
    block = Block()
    wrapped = statetx.remat(block)
    assert str(inspect.signature(wrapped)) == str(inspect.signature(block)) == "(x, scale=1.0)"
    assert wrapped.__call__.__doc__ == "Apply it." and wrapped.__doc__ == "Multiply by a weight."
    with pytest.raises(statetx.StaticArgumentError, match=r"Block has the parameters \(x, scale"):
        statetx.remat(block, static_argnums=2)
    seen = []
    block.seen = seen.append

    class Seeing(Block):
        def __call__(self, x, scale):
            seen.append(type(scale))
            return x * scale

    static = statetx.remat(Seeing(), static_argnums=1, prevent_cse=(True,))
    jax.make_jaxpr(lambda x: static(x, np.ones(2, np.float32)))(X)
    assert seen == [np.ndarray]
    np.testing.assert_array_equal(type(wrapped).__call__(wrapped, X), jnp.sin(X * 2))
    with pytest.raises(statetx.StateAccessError, match=r"remat\(Block\) touched State 'count'"):
        statetx.grad(lambda x: statetx.remat(block, states="w")(x).sum())(X)


def test_subclasses_are_freed_with_their_objects():
    class Local(Block):
        pass

    made = weakref.ref(type(statetx.remat(Local())))
    gc.collect()
    assert made() is None and not Local.__subclasses__()


@pytest.mark.parametrize("kind", [kind for kind in TWINS if kind != "brainstate"])  # its modules cannot be pickled
@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_and_pickles_are_rematerialized_and_independent(again, kind):
    obj = OBJECTS[kind]()
    wrapped = statetx.remat(obj)
    copied = again(wrapped)
    assert type(copied) is type(wrapped)
    copied.train = False
    assert obj.train is True and statetx.states(copied).keys() == statetx.states(obj).keys()
    x = X if not isinstance(obj, nnx.Module) else X[None]
    copied.train = True
    np.testing.assert_array_equal(statetx.grad(lambda x: copied(x).sum())(x), statetx.grad(lambda x: obj(x).sum())(x))


class Reduced(Block):
    def __reduce__(self):
        return Reduced, (self.w.value,)


def test_objects_with_custom_pickling_are_rematerialized():
    again = pickle.loads(pickle.dumps(statetx.remat(Reduced(5.0))))
    assert isinstance(again, Reduced) and type(again) is not Reduced and float(again.w.value) == 5.0


def test_equality_and_hash_follow_the_class():
    a = Equal()
    assert statetx.remat(a) == statetx.remat(a) and Equal.__hash__ is None
    b = Block()
    assert len({b, statetx.remat(b)}) == 2


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Registered:
    w: jax.Array
    power: int = dataclasses.field(metadata={"static": True})

    def __call__(self, x):
        return jnp.sin(x * self.w) ** self.power


class Equinox(equinox.Module):
    w: jax.Array
    power: int = equinox.field(static=True)

    __call__ = Registered.__call__


@pytest.mark.parametrize("cls", [Registered, Equinox])
def test_rematerialized_pytrees_are_pytrees(cls):
    obj = cls(jnp.ones(2), 3)
    wrapped = statetx.remat(obj)
    assert [(jax.tree_util.keystr(k), x) for k, x in jax.tree_util.tree_leaves_with_path(wrapped)] == [(".w", obj.w)]

    def loss(model, x):
        return model(x).sum()

    gradient = jax.grad(loss)(wrapped, X)
    assert type(gradient) is type(wrapped) and gradient.power == 3
    np.testing.assert_allclose(gradient.w, jax.grad(loss)(obj, X).w, rtol=1e-6)
    assert num_remats(lambda m: m(X), wrapped) == 1
    again = jax.jit(lambda m: m)(wrapped)
    assert type(again) is type(wrapped) and jax.tree.structure(again) == jax.tree.structure(wrapped)
    assert jax.tree.structure(statetx.remat(cls(jnp.ones(2), 3))) == jax.tree.structure(wrapped)
    assert jax.tree.structure(statetx.remat(cls(jnp.ones(2), 4))) != jax.tree.structure(wrapped)


# -- host libraries --------------------------------------------------------------------------------------------


class Net(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.blocks = nnx.List([nnx.Linear(2, 2, rngs=rngs) for _ in range(2)])
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dropout(functools.reduce(lambda x, block: jnp.tanh(block(x)), self.blocks, x))


@pytest.mark.thorough
def test_nnx_finds_the_states_of_rematerialized_modules():
    net, plain = Net(), Net()
    paths = list(statetx.states(net))
    net.blocks[:] = [statetx.remat(block) for block in net.blocks]
    net.dropout = statetx.remat(net.dropout)
    assert list(statetx.states(net)) == paths
    assert jax.tree.structure(nnx.state(net)) == jax.tree.structure(nnx.state(plain))
    assert len(list(nnx.iter_modules(net))) == len(list(nnx.iter_modules(plain)))
    net.eval()
    assert net.dropout.deterministic and num_remats(lambda x: net(x), X[None]) == 3
    net.train()
    assert not net.dropout.deterministic

    def loss(model, x):
        return (model(x) ** 2).sum()

    merged = nnx.merge(*nnx.split(net))
    assert type(merged.blocks[0]) is type(net.blocks[0])
    results = []
    for model in (net, plain):
        optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

        @nnx.jit
        def step(model, optimizer, x):
            optimizer.update(model, nnx.grad(loss)(model, x))

        step(model, optimizer, jnp.ones((1, 2)))
        results.append(jax.tree.leaves(nnx.state(model, nnx.Param)))
    for a, b in zip(*results, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
    assert float(jnp.abs(results[0][0] - jax.tree.leaves(nnx.state(Net(), nnx.Param))[0]).max()) > 0


class Stateful(brainstate.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = [brainstate.nn.Linear(2, 2) for _ in range(2)]
        self.cell = brainstate.nn.GRUCell(2, 2)

    def update(self, x):
        return self.cell(functools.reduce(lambda x, block: block(x), self.blocks, x))


@jax.numpy_rank_promotion("allow")  # brainstate's initializers rely on it
def test_brainstate_finds_the_states_of_rematerialized_modules():
    net = Stateful()
    brainstate.nn.init_all_states(net)
    expected, paths = net.states().keys(), list(statetx.states(net))
    del net.cell.h
    net.blocks[:] = [statetx.remat(block) for block in net.blocks]
    net.cell = statetx.remat(net.cell)
    brainstate.nn.init_all_states(net)
    assert net.states().keys() == expected and list(statetx.states(net)) == paths
    assert net.nodes(brainstate.nn.Linear).keys() == {("blocks", 0), ("blocks", 1), ("cell", "Wrz"), ("cell", "Wh")}
    weights = net.states(brainstate.ParamState)
    gradients = brainstate.transform.grad(lambda: net(jnp.ones(2)).sum(), weights)()
    assert all(float(jnp.abs(g).max()) > 0 for g in jax.tree.leaves(gradients) if g.ndim == 2)


def test_linen_modules_are_applied_rematerialized():
    dense = flax.linen.Dense(3)
    wrapped = statetx.remat(dense)
    variables = dense.init(jax.random.key(0), X)
    np.testing.assert_array_equal(wrapped.apply(variables, X), dense.apply(variables, X))
    assert jax.tree.structure(wrapped.init(jax.random.key(0), X)) == jax.tree.structure(variables)
    assert num_remats(lambda x: wrapped.apply(variables, x), X) == 1
