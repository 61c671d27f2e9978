"""Numbers of calls in the names of equations: whatever calls a function, and from however many lines."""

import contextlib
import functools
import sys

import equinox as eqx
import flax.linen as nn
import jax
import jax.extend
import jax.numpy as jnp
import pytest
from flax import nnx

import statetx
from statetx import _jax
from statetx.memory._calls import Calls, function_of
from statetx.memory._edits import SaveLess
from statetx.memory._names import calls_of
from statetx.memory._numbered import numbered, traced_call
from statetx.memory._tried import Trials
from statetx.planner._budget import TimeLeft
from statetx.residuals._trace import TracedCall

D = 8
X = jnp.ones((4, D))
PARAMS = [{"a": jnp.eye(D), "b": jnp.eye(D)} for _ in range(4)]


def block(p, x):
    return x + jnp.tanh(jnp.sin(x @ p["a"]) @ p["b"])


def over(function):
    def loss(params, x):
        for p in params:
            x = function(p, x)
        return (x**2).mean()

    return loss


def at_two_lines(params, x):
    x = block(params[0], x)
    return block(params[1], x).mean()


def in_one_expression(params, x):
    return block(params[1], block(params[0], x)).mean()


def in_a_list(params, x):
    return sum([block(p, x) for p in params]).mean()


def reduced(params, x):
    return functools.reduce(lambda x, p: block(p, x), params, x).mean()


def mapped(params, x):
    return sum(map(functools.partial(block, x=x), params)).mean()


def while_(params, x):
    n = 0
    while n < len(params):
        x = block(params[n], x)
        n += 1
    return x.mean()


@contextlib.contextmanager
def nothing():
    yield


def looping(p, x):
    for name in p:
        x = jnp.tanh(x @ p[name])
    return x


def looping_behind(p, x):
    x = x / x.sum()
    for name in p:
        x = x @ p[name]
    return x


def guarded(p, x):
    # The handlers of both jump back in the code, to what follows.
    with nothing():
        scale = 2.0
    try:
        x = jnp.sin(x @ p["a"])
    except ValueError:
        x = jnp.cos(x)
    return scale * x @ p["b"]


def multiplying(p, x):
    for w in p.values():
        x = w @ x  # a product and its transposition, of which the first alone has the weight
    return x


def repeating(p, x):
    for _ in range(3):
        x = jnp.tanh(x @ p["a"])
    return x


def residual(p, x):  # its last operation reads what is no weight
    return x + repeating(p, x)


SINE = jax.make_jaxpr(jnp.sin)(X)


def evaluating(p, x):
    (x,) = jax.extend.core.jaxpr_as_fun(SINE)(x @ p["a"])
    return x @ p["b"]


def summing(p, x):
    return sum([jnp.tanh(x @ w) for w in p.values()])


def recursive(p, x, n=2):
    return x if n == 0 else recursive(p, jnp.tanh(x @ p["a"]), n - 1)


def folding(p, x):
    return functools.reduce(lambda x, w: jnp.tanh(x @ w), p.values(), x)


def converted(params, x):
    params = jax.tree.map(lambda w: w.astype(jnp.bfloat16), params)
    return over(looping)(params, x.astype(jnp.bfloat16))


def printing(params, x):
    jax.debug.print("{}", x)  # an equation of an argument without a result
    return over(block)(params, x)


def generated(params, x):
    def layers(x):
        for p in params:
            x = block(p, x)
            yield x

    return sum(layers(x)).mean()


def staged(stages, x):
    def stage(params, x):
        for p in params:
            x = looping(p, x)
        return x

    for params in stages:
        x = stage(params, x)
    return x.mean()


def decorated(function):
    @functools.wraps(function)
    def wrapper(*args):
        return function(*args)

    return wrapper


def rematerializing(p, x):
    x = x + jax.checkpoint(guarded)(p, x)
    return x + jnp.tanh(x @ p["b"])


def saving_all(p, x):
    x = x + jax.checkpoint(guarded, policy=jax.checkpoint_policies.everything_saveable)(p, x)
    return x + jnp.tanh(x @ p["b"])


def scanned(params, x):
    def body(x, _):
        for p in params:
            x = looping(p, x)
        return x, None

    return jax.lax.scan(body, x, length=3)[0].mean()


def until(params, x):
    def body(x):
        for p in params:
            x = looping(p, x)
        return x

    return jax.lax.while_loop(lambda x: x.sum() > len(params), body, x).mean()


class Layer:
    def __init__(self, p):
        self.p = p

    def __call__(self, x):
        return jnp.tanh(x @ self.p["a"]) @ self.p["b"]


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x + nn.Dense(D)(jnp.tanh(nn.Dense(D)(nn.LayerNorm()(x))))


class LinenNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        for _ in range(4):
            x = LinenBlock()(x)
        return x.mean()


class NnxBlock(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(D, D, rngs=rngs) for _ in range(2)])

    def __call__(self, x):
        for layer in self.layers:
            x = jnp.tanh(layer(x))
        return x


def nnx_loss():
    blocks = nnx.List([NnxBlock(nnx.Rngs(0)) for _ in range(4)])

    def loss(x):
        for one in blocks:
            x = one(x)
        return x.mean()

    return loss


class EquinoxBlock(eqx.Module):
    layers: list

    def __call__(self, x):
        for layer in self.layers:
            x = jnp.tanh(jax.vmap(layer)(x))
        return x


def equinox_blocks():
    return [EquinoxBlock([eqx.nn.Linear(D, D, key=jax.random.key(0)) for _ in range(2)]) for _ in range(4)]


def two_functions_of_one_name(params, x):
    for p in params:
        x = pair[1](p, pair[0](p, x))
    return x.mean()


def one_of_a_pair(operation):
    def layer(p, x):
        return operation(operation(x @ p["a"]) @ p["b"])

    return layer


def another_of_a_pair(operation):
    def layer(p, x):
        return operation(x @ p["b"])

    return layer


pair = one_of_a_pair(jnp.tanh), another_of_a_pair(jnp.sin)

PROGRAMS = {
    "two lines": (at_two_lines, (PARAMS, X), {"block": 2}),
    "one expression": (in_one_expression, (PARAMS, X), {"block": 2}),
    "a loop": (over(block), (PARAMS, X), {"block": 4, "over.loss": 1}),
    "while": (while_, (PARAMS, X), {"block": 4}),
    "comprehension": (in_a_list, (PARAMS, X), {"block": 4, "in_a_list": 1}),
    "reduce": (reduced, (PARAMS, X), {"block": 4, "reduced.<lambda>": 4, "reduced": 1}),
    "map": (mapped, (PARAMS, X), {"block": 4, "mapped": 1}),
    "a loop within": (over(looping), (PARAMS, X), {"looping": 4, "over.loss": 1}),
    "a loop behind": (over(looping_behind), (PARAMS, X), {"looping_behind": 4}),
    "with and try": (over(guarded), (PARAMS, X), {"guarded": 4}),
    "lines of several equations": (over(multiplying), (PARAMS, jnp.ones((2, D, 4))), {"multiplying": 4}),
    "equations of another program": (over(evaluating), (PARAMS, X), {"evaluating": 4}),
    "weights of another type": (converted, (PARAMS, X), {"looping": 4}),
    "print": (printing, (PARAMS, X), {"block": 4}),
    "generator": (generated, (PARAMS, X), {"block": 4, "generated.layers": 0}),
    "a sum within": (over(summing), (PARAMS, X), {"summing": 4}),
    "recursion": (over(recursive), (PARAMS, X), {"recursive": 4}),
    "a fold within": (over(folding), (PARAMS, X), {"folding": 4}),
    "three loops": (staged, ([PARAMS[:2], PARAMS[2:]], X), {"looping": 4, "staged.stage": 2, "staged": 1}),
    "decorator": (over(decorated(block)), (PARAMS, X), {"block": 4, "decorated.wrapper": 4}),
    "jit": (over(jax.jit(block)), (PARAMS, X), {"block": 4}),
    "jit of all": (jax.jit(over(looping)), (PARAMS, X), {"looping": 4}),
    "checkpoint": (over(jax.checkpoint(guarded)), (PARAMS, X), {"guarded": 4}),
    "checkpoint within": (over(rematerializing), (PARAMS, X), {"rematerializing": 4, "guarded": 4}),
    "all is saved": (over(saving_all), (PARAMS, X), {"saving_all": 4}),
    "statetx.remat": (over(statetx.remat(guarded)), (PARAMS, X), {"guarded": 4}),
    "scan": (scanned, (PARAMS, X), {"looping": 4}),
    "while_loop": (until, (PARAMS, X), {"looping": 4}),
    "vmap": (jax.vmap(over(block), (None, 0)), (PARAMS, X), {"block": 4}),
    "callable objects": (over(lambda p, x: Layer(p)(x)), (PARAMS, X), {"Layer.__call__": 4}),
    "one name": (two_functions_of_one_name, (PARAMS, X), {"one_of_a_pair.layer": 4, "another_of_a_pair.layer": 4}),
    "a loop over one weight": (over(repeating), (PARAMS, X), {"repeating": 4}),
    "a residual": (over(residual), (PARAMS, X), {"residual": 4, "repeating": 4}),
    "linen": (LinenNet().apply, (LinenNet().init(jax.random.key(0), X), X), {"LinenBlock.__call__": 4}),
    "nnx": (nnx_loss(), (X,), {"NnxBlock.__call__": 4}),
    "equinox": (over(lambda b, x: b(x)), (equinox_blocks(), X), {"EquinoxBlock.__call__": 4}),
}


def calls_in(jaxpr, function, is_backward=False, is_again=False, outer=""):
    """The calls of a function in a jaxpr with their operations, by the names that XLA sees."""
    found = {}
    for eqn in _jax.open_jaxpr(jaxpr)[0].eqns:
        scope = f"{outer}/{_jax.scope(eqn)}"
        calls = calls_of(scope)
        depth = next((n for n, call in enumerate(calls) if function_of(call) == function), None)
        flags = "transpose(" in scope and "rematted_computation" not in scope, "rematted_computation" in scope
        if depth is not None and flags == (is_backward, is_again):
            found.setdefault(calls[: depth + 1], []).append(eqn.primitive.name)
        for inner in _jax.inner_jaxprs(eqn):
            found |= calls_in(inner, function, is_backward, is_again, scope)
    return found


@pytest.mark.parametrize("name", PROGRAMS)
def test_calls_have_numbers(name):
    fun, args, expected = PROGRAMS[name]
    body = traced_call(fun, args, {}).body.jaxpr
    for function, num in expected.items():
        found = calls_in(body, function)
        assert len(found) == num and len({tuple(operations) for operations in found.values()}) == min(num, 1)


def gradient_of(name):
    fun, args, _ = PROGRAMS[name]
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(args)[0]]
    return numbered(jax.make_jaxpr(jax.grad(fun))(*args), paths)


@pytest.mark.parametrize("name", ["a loop", "a loop within", "three loops", "jit", "checkpoint within", "all is saved"])
def test_calls_in_a_gradient_have_numbers(name):
    jaxpr = gradient_of(name)
    for function, num in PROGRAMS[name][2].items():
        assert len(calls_in(jaxpr, function)) == num


def test_regions_in_a_gradient_belong_to_the_calls_around_them():
    jaxpr = gradient_of("checkpoint within")
    first, *others = calls_in(jaxpr, "rematerializing").values()
    assert others == [first] * 3 and "sin" in first
    assert len(calls_in(jaxpr, "rematerializing", is_backward=True)) == 4
    again = calls_in(jaxpr, "guarded", is_again=True)
    assert len(again) == 4 and all("sin" in operations and len(operations) > 2 for operations in again.values())


def test_equations_stay_as_they_are():
    fun, args, _ = PROGRAMS["checkpoint within"]
    jaxpr = jax.make_jaxpr(jax.grad(fun))(*args)
    assert str(numbered(jaxpr)) == str(jaxpr)


def saving(function):
    return statetx.remat(function, policy="everything")


def first_of_equals(p, x):
    return jnp.sin(jnp.tanh(x @ p["a"]))


def second_of_equals(p, x):
    return jnp.sin(jnp.tanh(x @ p["a"]))


def test_functions_of_equal_equations_have_their_own_names():
    """Though the table of structures would share what is made of the first."""

    def loss(p, x):
        return saving(second_of_equals)(p, saving(first_of_equals)(p, x)).mean()

    args = PARAMS[0], X
    body = traced_call(loss, args, {}).body.jaxpr
    trials = Trials(TracedCall("explain_oom", loss, args, {}), gradient=True, time_left=TimeLeft(None))
    for function in ("first_of_equals", "second_of_equals"):
        assert len(calls_in(body, function)) == 1
        assert trials.cost(SaveLess(function)) is not None, trials.why_not(SaveLess(function))


@pytest.mark.parametrize("wrap", [lambda loss: loss, lambda loss: jax.jit(jax.grad(loss))], ids=["loss", "step"])
def test_what_is_computed_again_belongs_to_the_call_around_its_region(wrap):
    def around(p, x):
        return x + jnp.tanh(statetx.remat(guarded)(p, x))

    profile = statetx.memory_profile(wrap(over(around)), PARAMS, X)
    function = "test_what_is_computed_again_belongs_to_the_call_around_its_region.around"
    calls = Calls(profile, function)
    again = {calls.of(n) for n, s in enumerate(profile.steps) if s.is_recomputed and "guarded" in s.stack}
    assert len(again) == 4 and None not in again


def test_profiler_that_is_set_stays_and_sees_the_trace():
    seen = set()

    def note(frame, event, arg):
        seen.add(frame.f_code)

    sys.setprofile(note)
    try:
        profile = statetx.memory_profile(over(block), PARAMS, X)
        assert sys.getprofile() is note
    finally:
        sys.setprofile(None)
    assert block.__code__ in seen and Calls(profile, "block").num == 4


@pytest.mark.parametrize("is_traced", [True, False])
def test_calls_in_a_program_that_was_traced_before_are_told_apart(is_traced):
    step = jax.jit(jax.grad(over(block)))
    jax.block_until_ready(step(PARAMS, X))
    profile = statetx.memory_profile(step.trace(PARAMS, X)) if is_traced else statetx.memory_profile(step, PARAMS, X)
    assert Calls(profile, "block").num == 4


@jax.custom_vjp
def with_rule(w, x):
    return forward_rule(w, x)[0]


def forward_rule(w, x):
    y = jnp.tanh(x @ w)
    return y @ w.T, (w, x, y)


def backward_rule(residuals, cotangent):
    w, x, y = residuals
    ct = (cotangent @ w) * (1 - y * y)
    return x.T @ ct + cotangent.T @ y, ct @ w.T


with_rule.defvjp(forward_rule, backward_rule)


def test_a_derivative_rule_is_no_function_to_rematerialize():
    """What it returns is kept whatever is around its computation."""
    loss = over(lambda p, x: jnp.sin(with_rule(p["a"], x)))
    profile = statetx.memory_profile(jax.jit(jax.grad(loss)), PARAMS, jnp.ones((256, D)))
    assert any("forward_rule" in step.stack for step in profile.steps)
    assert "remat" not in {change.action for change in profile.changes if change.owner == "forward_rule"}
