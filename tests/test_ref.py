"""`jax.Ref` under statetx's transforms, against the same program on plain values."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import statetx
from helpers import REMAT3, Counted, in_turn
from statetx.policies import Budget, Levels, Slots

H = jnp.array([0.3, -0.7, 1.1])
W = jnp.array([0.5, 1.5, -0.4])


def test_ref_as_an_argument_itself():
    ref = jax.new_ref(H)

    @statetx.remat
    def f(r, x):
        y = jnp.sin(r[...] * x)
        r[...] = jax.lax.stop_gradient(y)
        r[0] = 0.0
        return y.sum()

    np.testing.assert_allclose(
        jax.grad(lambda x: f(ref, x))(2.0), jax.grad(lambda x: jnp.sin(H * x).sum())(2.0), rtol=1e-6
    )
    np.testing.assert_allclose(ref[...], jnp.sin(H * 2.0).at[0].set(0.0), rtol=1e-6)


VIEW_TRANSFORMS = {
    "jit": statetx.jit,
    "remat": statetx.remat,
    "cond": lambda f: lambda view: statetx.cond(True, f, f, view),
    "value_and_grad": lambda f: lambda view: statetx.value_and_grad(lambda x: f(view) + x)(0.0)[0],
}


@pytest.mark.parametrize("name", VIEW_TRANSFORMS)
def test_view_of_a_ref_as_an_argument(name):
    def triple(view):
        view[...] = 3.0 * view[...]
        return view[...].sum()

    @statetx.jit
    def program(i):
        ref = jax.new_ref(H)
        call = VIEW_TRANSFORMS[name](triple)
        return [call(ref.at[i]), call(ref.at[i + 1]), call(ref.at[:2])], ref[...]

    sums, values = program(0)
    np.testing.assert_allclose(sums, [3 * H[0], 3 * H[1], 9 * (H[0] + H[1])], rtol=1e-6)
    np.testing.assert_allclose(values, H * jnp.array([9.0, 9.0, 1.0]), rtol=1e-6)


def test_ref_made_inside_and_rules_of_custom_derivatives():
    @jax.custom_jvp
    def f(x):
        return x

    f.defjvps(lambda t, out, x: 5.0 * t)

    @statetx.remat
    def g(x):
        r = jax.new_ref(x)
        r[...] = f(r[...]) * 2.0
        return r[...].sum()

    np.testing.assert_allclose(jax.grad(g)(H), jnp.full(3, 10.0))
    np.testing.assert_allclose(jax.jit(jax.grad(g))(H), jnp.full(3, 10.0))


class Float:
    """A float Ref that the argument is written to, and one that is differentiated."""

    def __init__(self):
        self.h = jax.new_ref(H)
        self.w = jax.new_ref(W)

    def step(self, x):
        before = self.h[...]
        self.h[...] = jnp.tanh(self.w[...] * x + before)
        return (jnp.sin(self.h[...]) * before + x**2).sum()


def float_step(w, h, x):
    new = jnp.tanh(w * x + h)
    return (jnp.sin(new) * h + x**2).sum(), new


def test_paths_and_table():
    model = Float()
    assert list(statetx.states(model)) == ["h", "w"]
    rows = {r.path: (r.kind, r.written) for r in statetx.trace_states(model.step)(0.5)}
    assert rows == {"w": ("jax.Ref", False), "h": ("jax.Ref", True)}
    np.testing.assert_array_equal(model.h[...], H)


X = jnp.array([0.2, 0.4, -0.6])

DERIVATIVES = {
    "grad": (lambda f, w: statetx.grad(f, 0, wrt=w)(X), lambda f: jax.grad(f, (0, 1))(W, X)),
    "vjp": (
        lambda f, w: (lambda g, xs: (g, *xs))(*statetx.vjp(f, X, wrt=w)[1](jnp.ones(()))),
        lambda f: jax.grad(f, (0, 1))(W, X),
    ),
    "jvp": (lambda f, w: statetx.jvp(f, (X,), (W,)), lambda f: jax.jvp(lambda x: f(W, x), (X,), (W,))),
    "linearize": (
        lambda f, w: statetx.linearize(f, X)[1](W),
        lambda f: jax.jvp(lambda x: f(W, x), (X,), (W,))[1],
    ),
    "jacfwd": (lambda f, w: statetx.jacfwd(f, 0, wrt=w)(X), lambda f: jax.jacfwd(f, (0, 1))(W, X)),
    "jacrev": (lambda f, w: statetx.jacrev(f, 0, wrt=w)(X), lambda f: jax.jacrev(f, (0, 1))(W, X)),
    "hessian": (lambda f, w: statetx.hessian(f, wrt=w)(X), lambda f: jax.hessian(f, 0)(W, X)),
}


@pytest.mark.parametrize("is_remat", [False, True])
@pytest.mark.parametrize("name", DERIVATIVES)
def test_derivatives_with_respect_to_a_ref_and_through_its_writes(name, is_remat):
    model = Float()
    ours, theirs = DERIVATIVES[name]
    counted = Counted(model.step)
    actual = ours(statetx.remat(counted) if is_remat else counted, model.w)
    expected = theirs(lambda w, x: float_step(w, H, x)[0])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-6, atol=1e-7), actual, expected)
    np.testing.assert_allclose(model.h[...], float_step(W, H, X)[1], rtol=1e-6)
    np.testing.assert_array_equal(model.w[...], W)
    assert counted.runs == 1


@pytest.mark.parametrize("is_remat", [False, True])
def test_vmap_of_a_ref_argument(is_remat):
    def step(h, x):
        before = h[...]
        h[...] = jnp.tanh(W * x + before)
        return (jnp.sin(h[...]) * before + x**2).sum()

    h, many = jax.new_ref(jnp.stack([H, H + 1])), jnp.stack([X, 2 * X])
    out = statetx.vmap(statetx.remat(step) if is_remat else step)(h, many)
    wanted, new = jax.vmap(lambda h, x: float_step(W, h, x))(jnp.stack([H, H + 1]), many)
    np.testing.assert_allclose(out, wanted, rtol=1e-6)
    np.testing.assert_allclose(h[...], new, rtol=1e-6)


def _write_row(h):
    h[0] = jnp.sin(h[1])
    return h[...].sum()


ROW_PROGRAMS = {
    "vmap": (1, lambda vmap: vmap(_write_row, in_axes=1)),
    "remat": (1, lambda vmap: vmap(statetx.remat(_write_row), in_axes=1)),
    "jax.jit": (1, lambda vmap: vmap(jax.jit(statetx.remat(_write_row)), in_axes=1)),
    "twice": (1, lambda vmap: vmap(vmap(_write_row, in_axes=2), in_axes=1)),
}


@pytest.mark.parametrize("name", ROW_PROGRAMS)
def test_vmap_of_a_ref_along_another_axis(name):
    axis, program = ROW_PROGRAMS[name]
    values = jnp.arange(81.0).reshape(3, 3, 3, 3)  # as long along each axis: a transposed value would have its type
    h = jax.new_ref(values)
    out = program(statetx.vmap)(h)
    np.testing.assert_allclose(h[...], values.at[0].set(jnp.sin(values[1])), rtol=1e-6)
    by_example = jnp.moveaxis(h[...], (1, 3) if name == "twice" else axis, (0, 1) if name == "twice" else 0)
    np.testing.assert_allclose(out, by_example.sum(range(out.ndim, 4)), rtol=1e-6)


def test_vmap_of_a_closed_over_ref_raises():
    model, many = Float(), jnp.stack([X, 2 * X])
    model.h = jax.new_ref(jnp.stack([H, H + 1]))
    with pytest.raises(statetx.StateValueError, match="pass it to the mapped function as an argument"):
        statetx.vmap(model.step, states={"h": 0})(many)
    model = Float()
    with pytest.raises(statetx.StateAccessError, match=r"states=\{'h': 0\}"):
        statetx.vmap(model.step)(many)
    np.testing.assert_array_equal(model.h[...], H)


@pytest.mark.parametrize("compiled", [False, True])
def test_ref_of_an_outer_transform_is_explicit_in_the_inner(compiled):
    def outer(x):
        h = jax.new_ref(x)

        def inner(y):
            h[...] = jnp.tanh(h[...] * y)
            return (h[...] ** 2).sum()

        slope = statetx.grad(inner)(x)
        return (slope * h[...]).sum()

    def pure(x):
        slope = jax.grad(lambda y: (jnp.tanh(x * y) ** 2).sum())(x)
        return (slope * jnp.tanh(x * x)).sum()

    run = statetx.grad(outer)
    np.testing.assert_allclose((statetx.jit(run) if compiled else run)(X), jax.grad(pure)(X), rtol=1e-5)


@pytest.mark.thorough
def test_first_ref_is_noticed_wherever_created():
    code = """
import jax, jax.numpy as jnp
from statetx import _jax
before = _jax.has_made_refs()
jax.make_jaxpr(lambda x: jax.new_ref(x)[...])(1.0)
print(before, _jax.has_made_refs())
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.split() == ["False", "True"]


def test_states_filter_of_remat_forbids_refs_too():
    model = Float()
    with pytest.raises(statetx.StateAccessError, match=r"touched Ref 'h' .*f32\[3\].*filter states='w' excludes"):
        statetx.grad(statetx.remat(model.step, states="w"))(X)
    np.testing.assert_array_equal(model.h[...], H)
    statetx.grad(statetx.remat(model.step, states=["w", "h"]))(X)
    assert not np.array_equal(model.h[...], H)


def sliced(scan, reverse=False, **options):
    """A loop over a Ref and an array; each step writes its slice of the Ref."""

    def run(ref, w):
        def body(carry, x):
            slot, y = x["slot"], x["y"]
            assert slot.shape == (3,)
            slot[...] = jnp.tanh(slot[...] * w + carry)
            slot[0] += y
            return carry + slot[1], slot[...].sum()

        return scan(body, jnp.zeros(()), {"slot": ref, "y": jnp.arange(4.0)}, reverse=reverse, **options)

    return run


START = jnp.linspace(-1.0, 1.0, 12).reshape(4, 3)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("options", [{}, {"checkpoint": 2}, {"unroll": 2}], ids=str)
@pytest.mark.parametrize("under", ["jit", "no jit", "disable_jit"])
def test_scan_slices_a_ref_in_xs(reverse, options, under):
    ours, theirs = jax.new_ref(START), jax.new_ref(START)
    with jax.disable_jit(under == "disable_jit"):
        run = sliced(statetx.scan, reverse, **options)
        out = (statetx.jit(run) if under == "jit" else run)(ours, W[1])
    expected = sliced(jax.lax.scan, reverse)(theirs, W[1])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), out, expected)
    np.testing.assert_allclose(ours[...], theirs[...], rtol=1e-6)


@pytest.mark.parametrize("options", [{}, {"checkpoint": 2}], ids=str)
def test_gradient_of_a_scan_over_a_ref(options):
    def loss(scan, options, start, w):
        ref = jax.new_ref(start)
        carry, ys = sliced(scan, **options)(ref, w)
        return (carry + ys.sum()) + (ref[...] ** 2).sum()

    expected = jax.grad(lambda *a: loss(jax.lax.scan, {}, *a), (0, 1))(START, W[1])
    for grad in (jax.grad, statetx.grad):
        out = grad(lambda *a: loss(statetx.scan, options, *a), (0, 1))(START, W[1])
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), out, expected)


def test_map_slices_a_ref():
    ref = jax.new_ref(jnp.arange(3.0))

    def double(x):
        x[...] *= 2
        return x[...] + 1

    np.testing.assert_allclose(statetx.map(double, ref), [1.0, 3.0, 5.0])
    np.testing.assert_allclose(ref[...], [0.0, 2.0, 4.0])


def test_scan_refuses_a_ref_in_two_roles():
    ref = jax.new_ref(jnp.arange(3.0))
    with pytest.raises(statetx.StateAccessError, match=r"Ref \(f32\[3\].*given as xs and reached by the body"):
        statetx.scan(lambda c, x: (c + ref[...].sum() * x[...], None), 0.0, ref)
    with pytest.raises(statetx.StateAccessError, match="given as xs and reached"):
        statetx.scan(lambda c, x: (c + x[0][...] * x[1][...], None), 0.0, (ref, ref))
    np.testing.assert_allclose(ref[...], [0.0, 1.0, 2.0])


@jax.custom_vjp
def through_a_ref(x):
    ref = jax.new_ref(x)
    ref[...] *= 2.0
    return ref[...]


through_a_ref.defvjp(lambda x: (through_a_ref(x), None), lambda _, g: (5.0 * g,))  # no derivative but the rule's


def beside_a_ref(x):
    ref = jax.new_ref(x)
    ref[...] *= 1.0
    return through_a_ref(ref[...])


AROUND = {
    "": lambda f: f,
    "jax.jit": jax.jit,
    "jax.checkpoint": jax.checkpoint,
    "jax.lax.scan": lambda f: lambda x: jax.lax.scan(lambda c, _: (f(c), None), x, None, 1)[0],
    "jax.lax.cond": lambda f: lambda x: jax.lax.cond(x > 0, f, f, x),
    "remat": statetx.remat,
    "scan": lambda f: lambda x: statetx.scan(lambda c, _: (f(c), None), x, None, 1)[0],
    "cond": lambda f: lambda x: statetx.cond(x > 0, f, f, x),
    "scan(remat)": lambda f: lambda x: statetx.scan(statetx.remat(lambda c, _: (f(c), None)), x, None, 1)[0],
}


@pytest.mark.sample
@pytest.mark.parametrize("fun", [through_a_ref, beside_a_ref], ids=["its own", "beside"])
@pytest.mark.parametrize("inner", in_turn(AROUND))
@pytest.mark.parametrize("outer", [statetx.jit, statetx.remat], ids=["jit", "remat"])
def test_custom_rules_survive_discharge(outer, inner, fun):
    """JAX discharges after differentiation, and loses the rules of functions that are in inner jaxprs or
    create Refs.
    """
    f = outer(AROUND[inner](fun))
    assert (f(3.0), jax.grad(f)(3.0), statetx.grad(f)(3.0), jax.jit(statetx.grad(f))(3.0)) == (6.0, 5.0, 5.0, 5.0)


@pytest.mark.parametrize("inner", AROUND)
def test_custom_rules_survive_with_a_closed_over_ref(inner):
    if REMAT3 and inner == "jax.checkpoint":
        pytest.skip("JAX's new checkpoint has no rule for a Ref that is written inside")
    ref = jax.new_ref(1.0)

    def fun(x):
        ref[...] += 1.0
        return through_a_ref(x)

    assert statetx.grad(statetx.remat(AROUND[inner](fun)))(3.0) == 5.0
    assert ref[...] == 2.0


@pytest.mark.parametrize(
    "call",
    [
        lambda x: statetx.jit(jax.new_ref)(x),
        lambda x: statetx.vmap(lambda x: {"a": jax.new_ref(x)})(x[None]),
        lambda x: statetx.cond(x > 0, jax.new_ref, jax.new_ref, x),
        lambda x: statetx.scan(lambda c, _: (jax.new_ref(c), None), x, None, 2),
    ],
    ids=["jit", "vmap", "cond", "scan"],
)
def test_returning_a_created_ref_raises(call):
    with pytest.raises(statetx.CreatedStateError, match=r"returned a Ref\{f32\[\]\} that was created inside"):
        call(jnp.float32(1.0))


def scaled_by(ref, kind, act=lambda ref: ref[...]):
    """``2 x``, of which the function reads the factor from a Ref; its derivative rule calls `act` with the Ref."""
    if kind == "custom_vjp":
        f = jax.custom_vjp(lambda x: x * ref[...])
        f.defvjp(lambda x: (2 * x, act(ref)), lambda _, g: (g * 2,))
    else:
        f = jax.custom_jvp(lambda x: x * ref[...])
        f.defjvp(lambda primals, tangents: (act(ref), (2 * primals[0], tangents[0] * 2))[1])
    return f


IN_LOOPS = {
    "slots": lambda f, x: statetx.scan(lambda c, _: (f(c), None), x, None, 3, checkpoint=Slots(2))[0],
    "levels": lambda f, x: statetx.scan(lambda c, _: (f(c), None), x, None, 3, checkpoint=Levels(2))[0],
    "while_loop": lambda f, x: statetx.while_loop(
        lambda c: c[0] < 3, lambda c: (c[0] + 1, f(c[1])), (0, x), checkpoint=Slots(2)
    )[1],
    "microbatch": lambda f, x: statetx.microbatch(lambda x: f(f(f(x[0]))), 2)(jnp.stack([x, x])),
    "chunked": lambda f, x: statetx.chunked(lambda x: f(f(f(x[0]))), size=1, reduce="mean")(jnp.stack([x, x])),
    "cond": lambda f, x: statetx.cond(x > 0, lambda x: f(f(f(x))), jnp.tanh, x),
    "cond in scan": lambda f, x: statetx.scan(lambda c, _: (statetx.cond(c > 0, f, jnp.tanh, c), None), x, None, 3)[0],
    "remat": lambda f, x: statetx.remat(lambda x: f(f(f(x))))(x),
    "jit": lambda f, x: statetx.jit(lambda x: f(f(f(x))))(x),
}


@pytest.mark.sample
@pytest.mark.parametrize("kind", ["custom_vjp", "custom_jvp"])
@pytest.mark.parametrize("name", ["call", *IN_LOOPS])
def test_rule_that_touches_a_ref_it_closes_over_is_refused(name, kind):
    """Recomputed, a write would count twice; in a loop of a jitted call it would be lost."""
    ref = jax.new_ref(jnp.float32(2.0))
    call = IN_LOOPS.get(name, lambda f, x: f(x))
    message = (
        r"the derivative rule of <lambda> at .*test_ref.py:\d+ touches Ref \(f32\[\], made .*\n.*Fix: pass the value"
    )
    for act in (lambda ref: ref[...], lambda ref: ref.__setitem__(..., ref[...] + 1)):
        f = lambda x, act=act: call(scaled_by(ref, kind, act), x)
        for gradient in (statetx.grad(f), statetx.jit(statetx.grad(f))):
            with pytest.raises(statetx.StateAccessError, match=message):
                gradient(1.0)
    assert ref[...] == 2.0


@pytest.mark.sample
@pytest.mark.parametrize("name", IN_LOOPS)
def test_function_with_a_rule_writes_a_ref_or_is_refused(name):
    """Its writes count; in a gradient JAX calls the rule in its place, late, and the write would be lost."""
    ref, message = jax.new_ref(jnp.float32(0.0)), r"the derivative rule of <lambda> at .*test_ref.py:\d+ touches Ref"

    def double(x):
        ref[...] += 1.0
        return 2 * x

    def loss(x):
        f = jax.custom_vjp(lambda x: double(x))
        f.defvjp(lambda x: (double(x), ()), lambda _, g: (2 * g,))
        return IN_LOOPS[name](f, x)

    if name == "while_loop":
        for call in (loss, statetx.jit(loss), statetx.grad(loss)):
            with pytest.raises(
                statetx.StateAccessError, match=r"a function with a derivative rule writes a Ref(.|\n)*Fix"
            ):
                call(1.0)
        return
    num_calls = 6 if name in ("microbatch", "chunked") else 3
    for n, call in enumerate((loss, statetx.jit(loss)), 1):
        call(1.0)
        assert ref[...] == n * num_calls
    for gradient in (statetx.grad(loss), statetx.jit(statetx.grad(loss))):
        with pytest.raises(statetx.StateAccessError, match=message):
            gradient(1.0)
    assert ref[...] == 2 * num_calls


@pytest.mark.sample
@pytest.mark.parametrize("kind", ["custom_vjp", "custom_jvp"])
@pytest.mark.parametrize("name", IN_LOOPS)
def test_function_with_a_rule_reads_a_ref_that_the_rule_does_not(name, kind):
    """Also one that the body writes."""
    ref = jax.new_ref(jnp.float32(2.0))

    def f(x):
        return IN_LOOPS[name](scaled_by(ref, kind, lambda ref: None), x)

    def writing(x):
        ref[...] *= 1.0
        return f(x)

    for g in (f, writing):
        assert g(1.0) == statetx.jit(g)(1.0) == 8.0
        assert statetx.grad(g)(1.0) == statetx.jit(statetx.grad(g))(1.0) == 8.0


@jax.custom_vjp
def stash(ref, x):
    """`x`, whose cotangent is written to the Ref in the backward pass."""
    return x


stash.defvjp(lambda ref, x: (x, ref), lambda ref, g: (ref.__setitem__(..., g), (None, g))[1])


def stashing(ref, x):
    return jnp.sin(stash(ref, jnp.sin(x)))


def stashing_body(ref):
    return lambda x, _: (stashing(ref, x), None)


STASHING = {
    "remat": lambda r, x: statetx.remat(stashing)(r, x),
    "remat(closure)": lambda r, x: statetx.remat(lambda x: stashing(r, x))(x),
    "remat(remat)": lambda r, x: statetx.remat(lambda x: statetx.remat(stashing)(r, x))(x),
    "jit": lambda r, x: statetx.jit(stashing)(r, x),
    "scan": lambda r, x: statetx.scan(stashing_body(r), x, None, 1)[0],
    "scan(remat)": lambda r, x: statetx.scan(statetx.remat(stashing_body(r)), x, None, 1)[0],
    "scan(slots)": lambda r, x: statetx.scan(stashing_body(r), x, None, 1, checkpoint=Slots(1))[0],
    "scan(size)": lambda r, x: statetx.scan(stashing_body(r), x, None, 1, checkpoint=Budget("1MiB"))[0],
    "microbatch": lambda r, x: statetx.microbatch(lambda x: stashing(r, x[0]), 1)(jnp.stack([x])),
    "chunked": lambda r, x: statetx.chunked(lambda x: stashing(r, x[0]), size=1, reduce="mean")(jnp.stack([x])),
    "jit(remat(jit))": lambda r, x: statetx.jit(lambda x: statetx.remat(lambda x: statetx.jit(stashing)(r, x))(x))(x),
}
DERIVED = {
    "jax.grad": lambda f: jax.grad(f)(1.0),
    "grad": lambda f: statetx.grad(f)(1.0),
    "vjp": lambda f: statetx.vjp(f, 1.0)[1](1.0)[0],
    "jit(grad)": lambda f: statetx.jit(statetx.grad(f))(1.0),
}


@pytest.mark.parametrize("derived", DERIVED)
@pytest.mark.parametrize("name", STASHING)
def test_custom_rule_writes_a_ref_in_the_backward_pass(name, derived):
    """JAX's guide on Refs logs gradients in this way. `jax.lax.cond` cannot, and `statetx.cond` neither."""
    ref, count = jax.new_ref(jnp.float32(0.0)), statetx.State(0)

    def f(x):
        count.value += 1
        return STASHING[name](ref, x)

    slope = DERIVED[derived](f)
    np.testing.assert_allclose(ref[...], jnp.cos(jnp.sin(1.0)), rtol=1e-6)
    np.testing.assert_allclose(slope, jnp.cos(jnp.sin(1.0)) * jnp.cos(1.0), rtol=1e-6)
    assert int(count.value) == 1


# -- arrays of Refs in compiled programs -------------------------------------------------------------------------------


def test_jit_copies_no_array_of_a_ref():
    refs = [jax.new_ref(jnp.zeros(3)) for _ in range(3)]

    @statetx.jit
    def step(x):
        for ref in refs:
            ref[...] += x
        return refs[0][...] * 2

    x = jnp.ones(3)
    step(x)
    step(x)
    with jax.transfer_guard_device_to_device("disallow_explicit"):
        assert step(x).tolist() == [6.0] * 3
    assert [ref[0].item() for ref in refs] == [3.0] * 3


@pytest.mark.parametrize("name", ["read", "read in a jit", "swapped", "returned, too", "taken", "in two Refs"])
def test_no_array_of_a_ref_is_elsewhere(name):
    """JAX updates a Ref in place: another holder of its array would see the new values."""
    a, b, x = jax.new_ref(jnp.zeros(3)), jax.new_ref(jnp.ones(3)), jnp.full(3, 2.0)

    @jax.jit
    def add():
        for ref in (a, b):
            ref[...] += 1.0

    def swap(x):
        a[...], b[...] = b[...], a[...]

    def return_too(x):
        a[...] = y = 2 * x
        return y

    def take(x):
        a[...] = x
        return x

    def in_two(x):
        a[...] = b[...] = 2 * x

    bodies = {
        "read": lambda x: (a[...], {"b": b[...]}),
        "read in a jit": lambda x: jax.jit(lambda y: y)(a[...]),
        "swapped": swap,
        "returned, too": return_too,
        "taken": take,
        "in two Refs": in_two,
    }
    jitted, plain, states = statetx.jit(bodies[name]), bodies[name], lambda: (a[...], b[...])
    for _ in range(2):
        before = jax.tree.map(np.asarray, states())
        expected = jax.tree.map(np.asarray, (plain(x), states()))
        for ref, value in zip((a, b), before, strict=True):
            ref[...] = value
        out = jitted(x)
        jax.tree.map(np.testing.assert_array_equal, (out, states()), expected)
        add()
        jax.tree.map(np.testing.assert_array_equal, (out, x), (expected[0], np.full(3, 2.0)))


@pytest.mark.parametrize("is_written", [False, True])
@pytest.mark.parametrize("name", ["jit", "remat", "scan"])
def test_frozen_ref_of_the_caller_is_read(name, is_written):
    """As in JAX: it is made elsewhere, and lives on."""
    ref = jax.new_ref(H)

    def f(x):
        if is_written:
            ref[...] = x * ref[...]
        return jax.jit(lambda: jax.freeze(ref))() + jax.freeze(ref)

    calls = {"jit": statetx.jit(f), "remat": lambda x: jax.jit(statetx.remat(f))(x)}
    calls["scan"] = lambda x: statetx.scan(lambda c, _: (c + f(x), None), jnp.zeros(3), length=1)[0]
    factor = 2.0 if is_written else 1.0
    np.testing.assert_allclose(calls[name](2.0), 2 * factor * H)
    np.testing.assert_allclose(ref[...], factor * H)


def test_pullback_adds_cotangents_to_refs():
    """As that of ``jax.vjp``; leaves that are not arrays and differentiated states have no part in it."""
    gradient, w = jax.new_ref(jnp.zeros(3)), statetx.Param(W)

    def f(tree, mode, y):
        return jnp.sin(tree["h"] * w.value).sum() * y if mode == "sin" else 0.0

    entries = {"h": gradient}, "sin", jax.ad.DontWant()
    for n in (1, 2):
        out, pullback = statetx.vjp(f, {"h": H}, "sin", 2.0, wrt=w)
        of_w, (of_h, mode, of_y) = pullback.with_refs(*entries)(1.0)
        assert (of_h, mode, of_y) == ({"h": jax.ad.GradRef()}, "sin", jax.ad.DidntWant())
        np.testing.assert_allclose(of_w, 2 * jnp.cos(H * W) * H, rtol=1e-6)
        np.testing.assert_allclose(gradient[...], n * 2 * jnp.cos(H * W) * W, rtol=1e-6)

    with pytest.raises(ValueError, match=r"primals\[0\]\['h'\] has a cotangent of type f32\[3\], and its entry is Ref"):
        pullback.with_refs({"h": jax.new_ref(jnp.zeros(2))}, "sin", jax.ad.GradValue())
    with pytest.raises(ValueError, match="one entry for each primal"):
        pullback.with_refs(gradient)


def test_refs_collect_the_cotangents_of_a_loop():
    gradient = jax.new_ref(jnp.zeros(3))

    @statetx.jit
    def train(xs):
        def step(total, x):
            loss, pullback = statetx.vjp(lambda w: jnp.sin(w * x).sum(), W)
            pullback.with_refs(gradient)(jnp.ones_like(loss))
            return total + loss, None

        return statetx.scan(step, 0.0, xs)[0]

    xs = jnp.stack([H, 2 * H])
    loss, expected = jax.value_and_grad(lambda w: sum(jnp.sin(w * x).sum() for x in xs))(W)
    np.testing.assert_allclose(train(xs), loss, rtol=1e-6)
    np.testing.assert_allclose(gradient[...], expected, rtol=1e-6)
