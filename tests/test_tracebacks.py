"""Tracebacks of a user's own errors have as few frames as JAX's."""

import os
import traceback

import jax
import jax.numpy as jnp
import pytest

import statetx
from statetx import policies


class Layer:
    def __init__(self):
        self.w = statetx.Param(jnp.ones((3, 4)))
        self.calls = statetx.State(jnp.zeros(()))

    @statetx.remat
    def __call__(self, x):
        self.calls.value += 1
        return x @ self.w.value  # a shape error for x of 5 elements


layer = Layer()


def loss(x):
    return layer(x).sum()


def body(carry, x):
    return carry, layer(x)


def frames_of(call, *args):
    """The user's frames in the traceback, those of statetx, and all."""
    package = os.path.dirname(statetx.__file__)
    try:
        call(*args)
    except TypeError as error:
        frames = traceback.extract_tb(error.__traceback__)
        files = [frame.filename for frame in frames]
        return files.count(__file__), sum(file.startswith(package) for file in files), len(files)
    raise AssertionError("no error")


X, XS = jnp.ones(5), jnp.ones((2, 5))
CALLS = {
    "remat in jax.grad": (jax.grad(loss), X),
    "grad": (statetx.grad(loss), X),
    "jit of grad": (statetx.jit(statetx.grad(loss)), X),
    "jit of grad by a state": (statetx.jit(lambda x: statetx.grad(loss, wrt=layer.w)(x)), X),
    "value_and_grad": (statetx.value_and_grad(loss), X),
    "vjp": (lambda x: statetx.vjp(loss, x), X),
    "jvp": (lambda x: statetx.jvp(loss, (x,), (x,)), X),
    "linearize": (lambda x: statetx.linearize(loss, x), X),
    "jacrev": (statetx.jacrev(loss), X),
    "vmap": (statetx.vmap(loss), XS),
    "scan": (lambda xs: statetx.scan(body, 0.0, xs), XS),
    "scan in slots": (
        lambda xs: jax.grad(lambda x: statetx.scan(body, x, xs, checkpoint=policies.Slots(2))[0])(0.0),
        XS,
    ),
    "map": (lambda xs: statetx.map(loss, xs), XS),
    "fori_loop": (lambda x: statetx.fori_loop(0, 3, lambda i, c: c + loss(x), 0.0), X),
    "while_loop": (lambda x: statetx.while_loop(lambda c: c < 3, lambda c: c + loss(x), 0.0), X),
    "cond": (lambda x: statetx.cond(True, loss, lambda x: 0.0, x), X),
    "switch": (lambda x: statetx.switch(0, [loss, lambda x: 0.0], x), X),
    "eval_shape": (lambda x: statetx.eval_shape(loss, x), X),
    "saved_residuals": (lambda x: statetx.saved_residuals(loss, x), X),
    "measure": (lambda x: statetx.measure(loss, x), X),
    "plan": (lambda x: statetx.plan(loss, x, budget="1GiB"), X),
}


@pytest.mark.parametrize("name", CALLS)
def test_traceback_shows_the_users_lines_without_those_of_statetx(name):
    own, ours, num = frames_of(*CALLS[name])
    assert own >= 3 and ours == 0
    assert num == own + 3  # JAX's frames inside jnp.matmul


def test_traceback_is_as_short_as_that_of_jax():
    w = jnp.ones((3, 4))
    in_jax = jax.jit(jax.grad(lambda x: jax.checkpoint(lambda x: x @ w)(x).sum()))
    assert frames_of(*CALLS["jit of grad"])[2] <= frames_of(in_jax, X)[2] + 1


def test_traceback_is_whole_on_request():
    before = jax.config.jax_traceback_filtering
    jax.config.update("jax_traceback_filtering", "off")
    try:
        assert frames_of(*CALLS["jit of grad"])[1] > 5
    finally:
        jax.config.update("jax_traceback_filtering", before)


# -- the user's errors pass unchanged ----------------------------------------------------------------------------------

# As errors of JAX begin that statetx rewords.
TEXTS = ["grad with NaN in batch 3", "jacrev requires a batch", "jacfwd with a gap", "out_specs: no such file"]
TRANSFORMS = {
    "grad": lambda f: statetx.grad(f)(X),
    "value_and_grad": lambda f: statetx.value_and_grad(f)(X),
    "jacfwd": lambda f: statetx.jacfwd(f)(X),
    "jacrev": lambda f: statetx.jacrev(f)(X),
    "hessian": lambda f: statetx.hessian(f)(X),
    "vjp": lambda f: statetx.vjp(f, X),
    "jvp": lambda f: statetx.jvp(f, (X,), (X,)),
    "linearize": lambda f: statetx.linearize(f, X),
    "vmap": lambda f: statetx.vmap(f)(X),
    "jit": lambda f: statetx.jit(f)(X),
    "remat": lambda f: jax.grad(statetx.remat(f))(X),
    "scan": lambda f: statetx.scan(lambda c, x: (f(x), None), 0.0, X),
    "map": lambda f: statetx.map(f, X),
    "cond": lambda f: jax.jit(lambda x: statetx.cond(x[0] > 0, f, f, x))(X),
    "while_loop": lambda f: statetx.while_loop(lambda c: c < 1, f, 0.0),
    "microbatch": lambda f: statetx.microbatch(f, 5)(X),
    "chunked": lambda f: statetx.chunked(f, size=1)(X),
    "shard_map": lambda f: statetx.shard_map(
        f,
        mesh=jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,)),
        in_specs=jax.P("x"),
        out_specs=jax.P("x"),
    )(X),
    "functionalize": lambda f: statetx.functionalize(f)({}, X),
    "measure": lambda f: statetx.measure(f, X),
    "plan": lambda f: statetx.plan(f, X, budget="1GiB"),
}


def failing(error):
    def fail(x):
        raise error

    fail.__name__ = fail.__qualname__ = r"C:\1\train.py" "\x1b[1m"  # once a template of `re.sub`
    return fail


def rule_failing(error):
    @jax.custom_vjp
    def fun(x):
        return x.sum()

    fun.defvjp(lambda x: (x.sum(), x), lambda x, ct: failing(error)(x))
    return fun


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("name", TRANSFORMS)
def test_error_of_the_user_passes_whatever_its_text(name, text):
    made = (failing, rule_failing) if name in ("grad", "value_and_grad", "jacrev", "hessian") else (failing,)
    for make in made:
        for error in (ValueError(text), TypeError(text)):
            with pytest.raises(type(error)) as caught:
                TRANSFORMS[name](make(error))
            assert caught.value is error and error.args == (text,)
            assert make is rule_failing or error.__cause__ is None  # JAX itself adds one to an error of a rule
            assert traceback.extract_tb(error.__traceback__)[-1].filename == __file__


def test_error_of_jax_in_the_users_function_passes():
    inner = jax.grad(lambda x: x, holomorphic=True)
    for transform in (statetx.grad, statetx.jacrev):
        with pytest.raises(TypeError, match=r"^grad with holomorphic=True requires"):
            transform(lambda x: inner(x).sum())(X)


def test_error_of_jax_names_the_transform_and_the_function():
    with pytest.raises(TypeError, match=r"^hessian\(loss\) requires real-valued outputs"):
        statetx.hessian(named(lambda x: x * 1j, "loss"))(X)


def named(fun, name):
    fun.__name__ = fun.__qualname__ = name
    return fun
