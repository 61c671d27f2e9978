"""Shardings of the states that a jitted function writes, and the number of compilations."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import statetx
from helpers import Counted, compilations

pytestmark = pytest.mark.skipif(len(jax.devices()) < 8, reason="needs 8 devices; conftest asks for them")


def mesh_of(num=8, kind=AxisType.Auto):
    return jax.make_mesh((num,), ("d",), axis_types=(kind,), devices=jax.devices()[:num])


def put(x, *spec, mesh=None):
    return jax.device_put(x, NamedSharding(mesh or mesh_of(), P(*spec)))


# -- states that are only written --


def test_write_only_state_keeps_its_sharding():
    w, last = statetx.State(put(jnp.eye(8))), statetx.State(put(jnp.zeros((16, 8)), "d"))

    @statetx.jit
    def step(x):
        last.value = x @ w.value

    step(put(jnp.ones((16, 8))))
    assert last.value.sharding.spec == P("d")
    np.testing.assert_array_equal(last.value, np.ones((16, 8)))


def test_write_only_state_brings_the_mesh():
    last = statetx.State(put(jnp.zeros(16), "d"))
    step = statetx.jit(lambda x: setattr(last, "value", x + 1))
    step(jnp.ones(16))
    assert last.value.sharding == NamedSharding(mesh_of(), P("d"))


def test_write_only_state_follows_arguments_on_another_device():
    last = statetx.State(put(jnp.zeros(16), "d"))
    device = jax.devices()[3]
    statetx.jit(lambda x: setattr(last, "value", x + 1))(jax.device_put(jnp.ones(16), device))
    assert last.value.devices() == {device}


def test_uncommitted_write_only_state_stays_on_the_device_of_the_first_call():
    last = statetx.State(jnp.zeros((16, 8)))
    body = Counted(lambda x: setattr(last, "value", x * 2))
    step = statetx.jit(body)
    step(put(jnp.ones((16, 8)), "d"))
    assert last.value.sharding.spec == P("d"), "as jax.jit leaves it"
    with compilations() as compiled:
        step(put(jnp.ones((16, 8)), "d"))
    assert not compiled and body.runs == 1
    last.value = put(last.value)
    step(put(jnp.ones((16, 8)), "d"))
    assert last.value.sharding.spec == P(), "the user has put it there"


def test_write_only_state_is_placed_again():
    last = statetx.State(put(jnp.zeros(16), "d"))
    body = Counted(lambda x: setattr(last, "value", x + 1))
    step, x = statetx.jit(body), put(jnp.ones(16))
    for spec, runs in ((P("d"), 1), (P(), 2), (P("d"), 2)):
        last.value = put(last.value, *spec)
        step(x)
        assert last.value.sharding.spec == spec and body.runs == runs


# -- first called with nothing on a mesh --


@pytest.mark.parametrize("donate", [False, True], ids=["kept", "donated"])
def test_shardings_persist_after_a_first_call_on_one_device(donate):
    last, w = statetx.State(jnp.zeros((16, 8))), statetx.State(jnp.eye(8))

    def run(x):
        last.value = 0 * last.value.sum() + x @ w.value

    body = Counted(run)
    step = statetx.jit(body, donate_states=donate)
    step(jnp.ones((16, 8)))
    last.value, w.value = put(last.value, "d"), put(w.value)
    x = put(jnp.ones((16, 8)))
    with compilations() as compiled:
        step(x)
    assert last.value.sharding.spec == P("d")
    assert body.runs == 2 and len(compiled) == 1, "staged again before anything is compiled"
    with compilations() as compiled:
        step(x)
        step(x)
    assert body.runs == 2 and not compiled
    last.value, w.value = jnp.zeros((16, 8)), jnp.eye(8)
    with compilations() as compiled:
        step(jnp.ones((16, 8)))
    assert body.runs == 2 and not compiled and last.value.devices() == {jax.devices()[0]}


def test_shardings_persist_after_staging_inside_a_transform():
    w = statetx.State(put(jnp.ones(8), "d"))

    def run(x):
        w.value = 0 * w.value.sum() + x

    step, x = statetx.jit(run), put(jnp.ones(8))
    statetx.jit(lambda x: step(x * 2))(x)
    step(x)
    assert w.value.sharding.spec == P("d")
    statetx.grad(lambda x: [step(x), w.value.sum()][1])(x)
    assert w.value.sharding.spec == P("d")


def test_ahead_of_time_program_on_a_mesh_keeps_shardings():
    last, count = statetx.State(put(jnp.zeros(8), "d")), statetx.State(0)

    @statetx.jit
    def step(x):
        last.value, count.value = x * 2, count.value + 1

    x = put(jnp.ones(8))
    compiled = step.lower(jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)).compile()
    compiled(x)
    compiled(x)
    assert last.value.sharding.spec == P("d") and int(count.value) == 2


def test_function_with_a_mesh_is_staged_once():
    """Its first call finds states on one device, and leaves them on the mesh."""
    mesh = mesh_of()
    total = statetx.State(jnp.zeros(16))

    def run(x):
        total.value = total.value + jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P("d")))

    body = Counted(run)
    step = statetx.jit(body)
    for n in range(3):
        step(jnp.ones(16))
        assert len(total.value.devices()) == 8 and float(total.value.sum()) == 16 * (n + 1)
    assert body.runs == 1
    first = total.value.sharding.spec
    for spec in (P("d"), P()):
        total.value = put(total.value, *spec)
        step(jnp.ones(16))
        assert total.value.sharding.spec == spec
    assert body.runs == 2, first


# -- meshes of one device --


@pytest.mark.parametrize("num", [1, 2])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=lambda kind: kind.name)
def test_mesh_compiles_once(num, kind):
    mesh = mesh_of(num, kind)
    w, count = statetx.State(put(jnp.ones(8), "d", mesh=mesh)), statetx.State(0)

    @statetx.jit
    def step():
        w.value, count.value = w.value + 1, count.value + 1

    counts = []
    with jax.set_mesh(mesh):
        for _ in range(3):
            with compilations() as compiled:
                step()
            counts.append(len(compiled))
    assert counts == [1, 0, 0]
    assert w.value.sharding.spec == P("d") and int(count.value) == 3


# -- one place, written in two ways --


def test_equivalent_shardings_share_one_program():
    w = statetx.State(put(jnp.ones((16, 4)), "d"))
    body = Counted(lambda: setattr(w, "value", w.value * 2))
    step = statetx.jit(body)
    step()
    w.value = put(jnp.ones((16, 4)), "d", None)
    with compilations() as compiled:
        step()
    assert body.runs == 1 and not compiled
    w.value = put(jnp.ones((16, 4)), None, "d", mesh=mesh_of(4))
    step()
    assert body.runs == 2 and w.value.sharding.spec == P(None, "d")


# -- states whose shape changes --


def test_indivisible_new_shape_gets_the_compilers_sharding():
    s = statetx.State(put(jnp.ones((16, 4)), "d"))
    grow = lambda v: jnp.concatenate([v, v[:3]])
    by_hand = jax.jit(grow)(s.value)
    statetx.jit(lambda: setattr(s, "value", grow(s.value)))()
    assert s.value.shape == (19, 4) and s.value.sharding == by_hand.sharding


def test_divisible_new_shape_keeps_its_sharding():
    s = statetx.State(put(jnp.ones((16, 4)), "d"))
    statetx.jit(lambda: setattr(s, "value", jnp.concatenate([s.value, s.value[:8]])))()
    assert s.value.shape == (24, 4) and s.value.sharding.spec == P("d")


# -- axes that are explicit --


def test_sharding_read_by_python_is_never_stale():
    mesh, seen = mesh_of(kind=AxisType.Explicit), []
    with jax.set_mesh(mesh):
        w = statetx.State(put(jnp.ones((8, 8)), mesh=mesh))

        @statetx.jit
        def f(x):
            seen.append((jax.typeof(x).sharding.spec, jax.typeof(w.value).sharding.spec))
            return x + w.value.sum()

        x = jnp.ones((16, 8))
        assert f(put(x, "d", mesh=mesh)).sharding.spec == P("d", None)
        assert f(put(x, mesh=mesh)).sharding.spec == P(None, None)
        w.value = put(w.value, "d", mesh=mesh)
        f(put(x, mesh=mesh))
    assert seen == [(P("d", None), P(None, None)), (P(None, None), P(None, None)), (P(None, None), P("d", None))]


def test_carried_state_with_changing_sharding_is_named():
    mesh = mesh_of(kind=AxisType.Explicit)
    with jax.set_mesh(mesh):
        h, x = statetx.State(jnp.zeros((16, 4))), put(jnp.ones((16, 4)), "d", mesh=mesh)

        def body(c, _):
            h.value = h.value + c
            return c, None

        run = statetx.jit(lambda x: statetx.scan(body, x, None, 3))
        with pytest.raises(statetx.CarryTypeError, match=r"'h'.*f32\[16,4\].*f32\[16@d,4\](.|\n)*reshard"):
            run(x)
        h.value = put(h.value, "d", mesh=mesh)
        run(x)
        assert h.value.sharding.spec == P("d") and float(h.value.sum()) == 3 * 64


def test_carry_or_branch_with_changing_sharding_raises():
    mesh = mesh_of(kind=AxisType.Explicit)
    with jax.set_mesh(mesh):
        x = put(jnp.ones((16, 4)), "d", mesh=mesh)
        with pytest.raises(statetx.CarryTypeError, match=r"f32\[16,4\] and leaves it as f32\[16@d,4\]"):
            statetx.fori_loop(0, 3, lambda i, c: c + x, jnp.zeros((16, 4)))
        with pytest.raises(statetx.CarryTypeError, match=r"returns f32\[16,4\]\n.* returns f32\[16@d,4\]"):
            statetx.cond(x.sum() > 0, lambda: x, lambda: jnp.zeros((16, 4)))


def test_loop_over_a_divided_axis_raises():
    mesh = mesh_of(kind=AxisType.Explicit)
    with jax.set_mesh(mesh):
        xs = put(jnp.ones((16, 4)), "d", mesh=mesh)
        for name, run in {
            "scan": lambda: statetx.scan(lambda c, x: (c, x), 0.0, {"a": xs}),
            "map": lambda: statetx.map(lambda x: x["a"], {"a": xs}, batch_size=3),
        }.items():
            with pytest.raises(ValueError, match=rf"{name}: xs\['a'\], float32\[16@d,4\], is divided"):
                run()


def test_map_takes_fewer_elements_than_a_batch():
    mesh = mesh_of(kind=AxisType.Explicit)
    with jax.set_mesh(mesh):
        xs = put(jnp.ones((4, 16)), None, "d", mesh=mesh)
        assert statetx.map(lambda x: 2 * x, xs, batch_size=9).sharding.spec == P(None, "d")


@pytest.mark.parametrize("kind", [None, AxisType.Auto, AxisType.Explicit])
def test_types_of_outputs_have_their_sharding(kind):
    mesh, f = mesh_of(kind=kind or AxisType.Auto), lambda x: 2 * x
    with jax.set_mesh(mesh) if kind else contextlib.nullcontext():
        x = put(jnp.ones((16, 4)), "d", mesh=mesh) if kind else jnp.ones((16, 4))
        for get in (lambda tx: tx.jit(f).eval_shape(x), lambda tx: tx.make_jaxpr(f, return_shape=True)(x)[1]):
            ours, theirs = get(statetx), get(jax)
            assert ours == theirs and ours.sharding == theirs.sharding
        assert (ours.sharding is None) == (kind is not AxisType.Explicit)
        ours, theirs = (g(f).lower(x).compile().out_info for g in (statetx.jit, jax.jit))
        assert ours == theirs and ours.sharding == theirs.sharding
