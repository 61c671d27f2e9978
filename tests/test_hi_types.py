"""Values of a type that hijax declares: each transform takes them as JAX's does, as one value without a dtype."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import hijax

import statetx
from helpers import assert_close
from statetx._jax import HiPspec, MappingSpec

HiPrim = getattr(hijax, "HiPrim", None) or hijax.VJPHiPrimitive  # the name in 0.10


@dataclasses.dataclass(frozen=True)
class Halves:
    """An array of even length, as its two halves."""

    low: jax.Array
    high: jax.Array


@dataclasses.dataclass(frozen=True)
class Along(MappingSpec):
    """Examples along the first axis of both."""


@dataclasses.dataclass(frozen=True)
class Over(HiPspec):
    """Both divided over an axis of the mesh."""

    axis: str

    def to_lo(self):
        return jax.P(self.axis), jax.P(self.axis)

    def to_tangent_spec(self):
        return jax.P(self.axis)

    to_ct_spec = to_tangent_spec


@dataclasses.dataclass(frozen=True)
class HalvesType(hijax.HiType):
    aval: jax.core.ShapedArray  # of a half

    def lo_ty(self):
        return [self.aval, self.aval]

    def lower_val(self, x):
        return [x.low, x.high]

    def raise_val(self, low, high):
        return Halves(low, high)

    def to_tangent_aval(self):
        *batch, length = self.aval.shape
        return self.aval.update(shape=(*batch, 2 * length))

    def _of(self, aval):
        return HalvesType(aval)

    def dec_rank(self, size, spec):
        return self._of(self.aval if spec is None else self.aval.update(shape=self.aval.shape[1:]))

    def inc_rank(self, size, spec):
        return self._of(self.aval if spec is None else self.aval.update(shape=(size, *self.aval.shape)))

    def leading_axis_spec(self):
        return Along()

    def shard(self, mesh, manual_axes, check_vma, spec):
        return self._of(self.aval.shard(mesh, manual_axes, check_vma, spec.to_lo()[0]))

    def unshard(self, mesh, check_vma, spec):
        return self._of(self.aval.unshard(mesh, check_vma, spec.to_lo()[0]))

    def str_short(self, *args, **kwargs):
        return f"halves[{self.aval.shape}]"


hijax.register_hitype(Halves, lambda x: HalvesType(jax.typeof(x.low)))


class Operation(HiPrim):
    def __init__(self, in_aval, out_aval):
        self.in_avals, self.out_aval, self.params = (in_aval,), out_aval, {}
        super().__init__()

    def vjp_fwd(self, nzs_in, x):
        return self(x), None

    def vjp_bwd_retval(self, _, g):
        return (g,)

    def jvp(self, primals, tangents):
        return self(*primals), tangents[0]

    def batch(self, axis_data, args, dims):
        return call(type(self), *args), Along() if type(self) is Split else 0


class Split(Operation):
    def expand(self, x):
        return Halves(*jnp.split(x, 2, axis=-1))


class Join(Operation):
    def expand(self, x):
        return jnp.concatenate([x.low, x.high], axis=-1)


def call(operation, x):
    aval = jax.typeof(x)
    if operation is Split:
        return Split(aval, HalvesType(aval.update(shape=(*aval.shape[:-1], aval.shape[-1] // 2))))(x)
    return Join(aval, aval.to_tangent_aval())(x)


split, join = (lambda x: call(Split, x)), (lambda x: call(Join, x))
X = jnp.array([0.5, -1.0, 2.0, 0.25])
XS = jnp.stack([X, 2 * X, X + 1])


def double(x):
    return split(2 * join(x))


def squares(x):
    return (join(x) ** 2).sum()


def carry_and_outputs(scan):
    total, outs = scan(lambda c, x: (split(join(c) + join(x)), double(x)), split(X), split(XS), length=3)
    return join(total), join(outs)


def four_times(scan, x):
    return scan(lambda c, _: (double(c), None), split(x), None, length=2)[0]


def loops(transforms):
    return jax.lax if transforms is jax else transforms


# Each takes the module of transforms: `jax`, or `statetx`.
PROGRAMS = {
    "jit": lambda t: join(t.jit(double)(split(X))),
    "grad": lambda t: t.grad(squares)(split(X)),
    "vjp": lambda t: t.vjp(squares, split(X))[1](1.0),
    "vjp of one": lambda t: t.vjp(split, X)[1](X),
    "jvp": lambda t: t.jvp(split, (X,), (XS[2],))[1],
    "remat": lambda t: t.grad(lambda x: t.checkpoint(squares)(split(x)))(X),
    "vmap": lambda t: join(t.vmap(split, out_axes=Along())(XS)),
    "vmap of one": lambda t: t.vmap(join, in_axes=Along(), axis_size=3)(split(XS)),
    "scan": lambda t: carry_and_outputs(loops(t).scan),
    "grad of scan": lambda t: t.grad(lambda x: squares(four_times(loops(t).scan, x)))(X),
    "while_loop": lambda t: join(loops(t).while_loop(lambda c: join(c).sum() < 10, double, split(X))),
    "fori_loop": lambda t: join(loops(t).fori_loop(0, 3, lambda i, c: double(c), split(X))),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_value_passes_a_transform_as_in_jax(name):
    try:
        theirs = jax.jit(lambda: PROGRAMS[name](jax))()
    except AttributeError:  # in 0.10, staged loops ask for an attribute that only types of arrays have
        with pytest.raises(AttributeError, match="'mat'"):
            PROGRAMS[name](statetx)
    else:
        assert_close(PROGRAMS[name](statetx), theirs)


def test_type_of_an_output():
    assert statetx.eval_shape(split, X) == jax.eval_shape(split, X) == jax.typeof(split(X))


def test_values_are_operands_of_a_jitted_function():
    num = 0

    @statetx.jit
    def f(x):
        nonlocal num
        num += 1
        return join(x)

    np.testing.assert_array_equal(f(split(X)), X)
    np.testing.assert_array_equal(f(split(2 * X)), 2 * X)
    assert num == 1


@pytest.mark.parametrize("checkpoint", ["auto", statetx.policies.Levels(2)])
def test_checkpointed_loop_refuses_them(checkpoint):
    with pytest.raises(statetx.PolicyError, match=r"stores arrays, .* has the type halves"):
        four_times(lambda *args, **options: statetx.scan(*args, checkpoint=checkpoint, **options), X)


def test_loop_without_compilation():
    with jax.disable_jit():
        np.testing.assert_array_equal(join(four_times(statetx.scan, X)), 4 * X)


def test_state_that_is_differentiated_holds_arrays():
    state = statetx.State(split(X))
    with pytest.raises(statetx.StateValueError, match="Cannot differentiate"):
        statetx.grad(lambda: squares(state.value), wrt=state)()


@pytest.mark.parametrize("transform", [statetx.jit, statetx.value_and_grad, statetx.remat])
def test_state_holds_a_value(transform):
    state = statetx.State(split(X))

    def step(x):
        state.value = split(join(state.value) * x)
        return join(state.value).sum()

    call = transform(step)
    call(2.0)
    call(3.0)
    np.testing.assert_array_equal(join(state.value), 6 * X)


def test_values_are_divided_over_devices():
    mesh = jax.make_mesh((2,), ("i",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        rows = jax.device_put(XS[:2], jax.P("i"))
        halves = statetx.jit(statetx.shard_map(split, in_specs=jax.P("i"), out_specs=Over("i")))(rows)
        back = statetx.jit(statetx.shard_map(join, in_specs=Over("i"), out_specs=jax.P("i")))(halves)
    np.testing.assert_array_equal(back, XS[:2])
