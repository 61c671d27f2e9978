"""Transforms inside of ``hk.transform``: functions that read haiku's parameters, and functions that change what it
holds, which are refused.
"""

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import statetx
from statetx.policies import Levels, Slots

X = jnp.sin(jnp.arange(32.0)).reshape(8, 4)


def keeps_mean(x):
    mean = hk.get_state("mean", (), init=jnp.zeros)
    hk.set_state("mean", 0.9 * mean + 0.1 * x.mean())
    return jnp.tanh(x - mean)


def draws(x):
    return x * jax.random.uniform(hk.next_rng_key(), ())


def reads(x):
    return jnp.tanh(hk.Linear(4, b_init=hk.initializers.Constant(0.1))(x))


def scalar(f):
    return lambda x: f(x).mean()


TRANSFORMS = {
    "remat": lambda f: statetx.remat(f),
    "scan": lambda f: lambda x: statetx.scan(lambda h, _: (f(h), None), x, None, 2)[0],
    "scan of levels": lambda f: lambda x: statetx.scan(lambda h, _: (f(h), None), x, None, 2, checkpoint=Levels(2))[0],
    "scan of a weak carry": lambda f: lambda x: statetx.scan(lambda c, _: (c + f(x).sum(), None), 0, None, 2)[0],
    "map": lambda f: lambda x: statetx.map(f, x, batch_size=3),
    "cond": lambda f: lambda x: statetx.cond(x[0, 0] >= 0, f, lambda x: x, x),
    "switch": lambda f: lambda x: statetx.switch(2, [lambda x: x, lambda x: x, f], x),
    "while_loop": lambda f: lambda x: statetx.while_loop(lambda c: c[1] < 2, lambda c: (f(c[0]), c[1] + 1), (x, 0))[0],
    "fori_loop": lambda f: lambda x: statetx.fori_loop(0, 2, lambda _, h: f(h), x),
    "vmap": lambda f: statetx.vmap(f),
    "grad": lambda f: statetx.grad(scalar(f)),
    "jvp": lambda f: lambda x: statetx.jvp(f, (x,), (x,))[1],
    "hessian": lambda f: lambda x: statetx.hessian(scalar(f))(x[0]),
    "jit": lambda f: statetx.jit(f),
    "microbatch": lambda f: statetx.grad(statetx.microbatch(scalar(f), 3)),
    "chunked": lambda f: statetx.chunked(f, size=3, reduce="concat"),
    "eval_shape": lambda f: lambda x: x + 0 * len(statetx.eval_shape(f, x).shape),
}


def run(transformed, plain, is_jitted, key=1):
    """Apply a transformed function in haiku's transform, with parameters and states of the plain one.

    In eager code under a derivative, where `remat` transforms, too.
    """
    params, state = hk.transform_with_state(plain).init(jax.random.key(0), X)
    net = hk.transform_with_state(transformed)

    def apply(x):
        out, new = net.apply(params, state, jax.random.key(key), x)
        return jnp.sum(out), new

    return jax.jit(apply)(X) if is_jitted else jax.jvp(apply, (X,), (X,))[0]


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize(
    "fun, names, is_jitted",
    [(keeps_mean, "haiku's state '~/mean'", False), (draws, "haiku's random keys", True)],
    ids=["state, eager", "key, jitted"],
)
def test_a_change_of_what_haiku_holds_is_refused(fun, names, name, is_jitted):
    """In every transform, and what haiku holds is that of before."""

    def caught(x):
        with pytest.raises(statetx.TraceLeakError, match=rf"{names}, which hk.transform holds(.|\n)*Fix: "):
            TRANSFORMS[name](fun)(x)
        return fun(x)  # draws the key, and reads the state, that the transform has left

    expected, got = run(fun, fun, is_jitted), run(caught, fun, is_jitted)
    jax.tree.map(np.testing.assert_array_equal, got, expected)
    assert np.all(np.asarray(expected[0]) != 0)


@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_parameter_made_inside_is_refused(name):
    """A transform in the init: haiku would keep a tracer as the parameter."""
    with pytest.raises(statetx.TraceLeakError, match=r"haiku's parameter 'linear/\w'(.|\n)*if hk.running_init\(\)"):
        jax.jit(hk.transform(TRANSFORMS[name](lambda x: reads(x))).init)(jax.random.key(0), X)


def test_advice_names_a_transform_that_haiku_has():
    with pytest.raises(statetx.TraceLeakError, match=r"Fix: call statetx.remat outside .* or use haiku's hk.remat\."):
        run(statetx.remat(keeps_mean), keeps_mean, True)
    with pytest.raises(statetx.TraceLeakError, match=r"Fix: call statetx.microbatch outside of .* of apply\.\n"):
        run(TRANSFORMS["microbatch"](keeps_mean), keeps_mean, True)


PLAIN = {
    "scan": lambda f: lambda x: jax.lax.scan(lambda h, _: (f(h), None), x, None, 2)[0],
    "scan of a weak carry": lambda f: lambda x: jax.lax.scan(lambda c, _: (c + f(x).sum(), None), 0.0, None, 2)[0],
    "cond": lambda f: lambda x: jax.lax.cond(x[0, 0] >= 0, f, lambda x: x, x),
    "grad": lambda f: jax.grad(scalar(f)),
    "jvp": lambda f: lambda x: jax.jvp(f, (x,), (x,))[1],
    "hessian": lambda f: lambda x: jax.hessian(scalar(f))(x[0]),
    "eval_shape": lambda f: lambda x: x,
}
PLAIN |= {"microbatch": PLAIN["grad"]}
PLAIN |= dict.fromkeys(("scan of levels", "while_loop", "fori_loop"), PLAIN["scan"])


@pytest.mark.parametrize("name, is_jitted", [*((name, True) for name in TRANSFORMS), ("remat", False), ("scan", False)])
def test_a_function_that_reads_parameters_works(name, is_jitted):
    """However often the transform traces it, its modules have the names that one run gives them, and so has the next
    one.
    """

    def init_or(f):
        return lambda x: reads(reads(x)) if hk.running_init() else f(x)

    params = hk.transform(init_or(reads)).init(jax.random.key(0), X)
    first, second = ((lambda x, p=p: jnp.tanh(x @ p["w"] + 0.1)) for p in (params["linear"], params["linear_1"]))
    expected = PLAIN.get(name, lambda f: f)(first)(X).sum() + second(X).sum()
    got = run(init_or(lambda x: TRANSFORMS[name](reads)(x).sum() + reads(x).sum()), init_or(reads), is_jitted)[0]
    np.testing.assert_allclose(got, expected, rtol=1e-5)
    assert abs(second(X).sum()) > 0.1


class Predictor(hk.Module):
    """One step of a weather model in the manner of GraphCast: residuals of two fields, from them and a forcing."""

    def __call__(self, fields, forcing):
        x = jnp.concatenate([fields["wind"], fields["heat"], forcing], -1)
        step = 0.1 * hk.Linear(6)(jax.nn.swish(hk.LayerNorm(-1, True, True)(hk.Linear(16)(x))))
        return {"wind": fields["wind"] + step[..., :4], "heat": fields["heat"] + step[..., 4:]}


def rollout(scan):
    """An autoregressive loop whose steps read parameters only."""

    def forward(fields, forcings):
        predict = Predictor()
        if hk.running_init():
            return predict(fields, forcings[0])

        def step(fields, forcing):
            fields = predict(fields, forcing)
            return fields, fields["heat"]

        last, heat = scan(step, fields, forcings)
        return (heat**2).mean() + (last["wind"] ** 2).mean()

    return hk.without_apply_rng(hk.transform(forward))


SCANS = {
    "Levels": lambda *args: statetx.scan(*args, checkpoint=Levels(2)),
    "Slots": lambda *args: statetx.scan(*args, checkpoint=Slots(3)),
    "remat": lambda step, *args: statetx.scan(statetx.remat(step), *args),
}


@pytest.mark.sample("slow")
@pytest.mark.parametrize("name, library", [*((name, jax.lax.scan) for name in SCANS), ("Levels", hk.scan)])
def test_autoregressive_rollout_equals_that_of_haiku(name, library):
    """Four training steps of a rollout in ``hk.transform``."""
    fields = {"wind": X, "heat": X[:, :2]}
    forcings = jnp.cos(jnp.arange(144.0)).reshape(6, 8, 3)
    params = rollout(library).init(jax.random.key(0), fields, forcings)

    def train(scan):
        step = jax.jit(jax.value_and_grad(rollout(scan).apply))
        trained, losses = params, []
        for _ in range(4):
            loss, grads = step(trained, fields, forcings)
            trained = jax.tree.map(lambda w, g: w - 0.05 * g, trained, grads)
            losses.append(loss)
        return losses, trained

    with jax.numpy_rank_promotion("allow"):
        got, expected = train(SCANS[name]), train(library)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6), got, expected)
    assert expected[0][0] > 1.05 * expected[0][-1]
