"""Functions that only inspect a step accept one that creates states, such as brainstate's ``init_all_states`` in a
training step.
"""

import contextlib
import dataclasses
import functools
import itertools
import warnings

import brainstate
import jax
import jax.numpy as jnp
import libraries
import numpy as np
import pytest
from flax import nnx

import statetx
from helpers import in_turn

X = jnp.ones((4, 8))
KINDS = {"statetx": statetx.State, "brainstate": brainstate.HiddenState, "nnx": nnx.Variable}
each_kind = pytest.mark.parametrize("kind", KINDS)


class Cell:
    """A hidden state that each call of `loss` creates."""

    def __init__(self, kind):
        self.make = KINDS[kind]
        self.w = statetx.Param(jnp.eye(8) / 2, name="w")

    def loss(self, x):
        self.h = self.make(jnp.zeros_like(x))

        def body(carry, x):
            libraries.put(self.h, jnp.sin(jnp.tanh(libraries.get(self.h) @ self.w.value + x)))
            return carry, libraries.get(self.h)

        return (statetx.scan(body, None, jnp.broadcast_to(x, (20, *x.shape)))[1] ** 2).mean()

    def step(self, x):
        loss, grad = statetx.value_and_grad(self.loss, wrt=self.w)(x)
        self.w.value -= 0.1 * grad
        return loss


INSPECTIONS = {
    "measure": statetx.measure,
    "memory_report": statetx.memory_report,
    "memory_profile": statetx.memory_profile,
    "explain_oom": statetx.explain_oom,
    "saved_residuals": statetx.saved_residuals,
    "trace_states": lambda loss, x: statetx.trace_states(loss)(x),
    "loop_report": statetx.loop_report,
    "max_batch": lambda loss, x: statetx.max_batch(loss, x, budget="64KiB"),
    "plan": lambda loss, x: statetx.plan(loss, x, budget=1.0),
}


each_inspection = pytest.mark.parametrize("inspect", INSPECTIONS)


@each_inspection
def test_inspection_runs_no_program(inspect):
    runs, w = [], statetx.Param(jnp.eye(4))

    def loss(x):
        jax.debug.callback(lambda: runs.append(1))
        return jnp.tanh(jnp.tanh(x @ w.value) @ w.value).sum()

    INSPECTIONS[inspect](loss, jnp.ones((4, 4)))
    jax.effects_barrier()
    assert not runs
    loss(jnp.ones((4, 4)))
    jax.effects_barrier()
    assert runs


@pytest.mark.sample
@each_inspection
@pytest.mark.parametrize(
    ("kind", "is_jitted"),
    [*((kind, True) for kind in KINDS), *(pytest.param(kind, False, marks=pytest.mark.slow) for kind in KINDS)],
)
def test_inspection_accepts_a_created_state_and_leaves_the_attribute_as_it_was(kind, inspect, is_jitted):
    cell, reference = Cell(kind), Cell(kind)
    loss = statetx.jit(cell.loss) if is_jitted else cell.loss
    INSPECTIONS[inspect](loss, X)
    assert not hasattr(cell, "h")
    for _ in range(2):
        np.testing.assert_allclose(loss(X), reference.loss(X), rtol=1e-6)
        np.testing.assert_allclose(libraries.get(cell.h), libraries.get(reference.h), rtol=1e-6)
    h = cell.h
    INSPECTIONS[inspect](loss, X)
    assert cell.h is h
    np.testing.assert_allclose(libraries.get(cell.h), libraries.get(reference.h), rtol=1e-6)
    np.testing.assert_allclose(loss(X + 1), reference.loss(X + 1), rtol=1e-6)


VIEWS = ["saved_residuals", "print_fwd_bwd", "loop_report", "measure", "memory_profile", "memory_report"]


def num_traces(view, fun, is_jitted, **options):
    counted = statetx.testing.count_traces(fun)
    getattr(statetx, view)(statetx.jit(counted) if is_jitted else counted, X, **options)
    return counted.count


@pytest.mark.parametrize("of_step", [False, True], ids=["loss", "step"])
@pytest.mark.parametrize("view", VIEWS[:-1])
def test_view_traces_the_function_once(view, of_step):
    fun = Cell("statetx").step if of_step else Cell("statetx").loss
    assert num_traces(view, fun, is_jitted=False) == 1


@pytest.mark.parametrize("view", ["saved_residuals", "loop_report", "measure"])
def test_view_traces_a_jitted_step_once(view):
    assert num_traces(view, Cell("statetx").step, is_jitted=True) == 1


@pytest.mark.thorough
def test_profile_traces_a_jitted_step_twice_since_its_own_jit_stages_what_is_compiled():
    assert num_traces("memory_profile", Cell("statetx").step, is_jitted=True) == 2
    assert num_traces("memory_profile", Cell("statetx").step, is_jitted=True, gradient=False) == 1


def test_report_traces_the_function_once_for_each_row_and_once_as_written():
    """One that is jitted twice: residuals in a trace within have no names."""
    block = statetx.remat(lambda w, x: jnp.sin(jnp.tanh(x @ w)))
    loss = functools.partial(lambda w, x: block(w, x).sum(), jnp.eye(8))
    assert num_traces("memory_report", loss, is_jitted=False) == 2
    assert num_traces("memory_report", loss, is_jitted=False, policies=["nothing", "dots"]) == 4
    assert num_traces("memory_report", loss, is_jitted=True) == 4


class Lazy:
    """Creates its state at the first call, in a container of a new layer."""

    def __init__(self):
        self.layer = None

    def __call__(self, x):
        if self.layer is None:
            self.layer = Cell("statetx")
            self.layer.states = {"n": [statetx.State(jnp.zeros(()))]}
        self.layer.states["n"][0].value += 1
        return (jnp.sin(jnp.tanh(x @ self.layer.w.value)) ** 2).mean() * self.layer.states["n"][0].value


@pytest.mark.sample
@each_inspection
def test_state_that_is_created_once_counts_from_the_first_real_call(inspect):
    lazy = Lazy()
    INSPECTIONS[inspect](lazy, X)
    assert lazy.layer is None
    first = lazy(X)
    INSPECTIONS[inspect](lazy, X)
    np.testing.assert_allclose([first, lazy(X)], [first, 2 * first], rtol=1e-6)


@each_kind
def test_value_of_a_created_state_is_an_output(kind):
    cell = Cell(kind)
    jitted = statetx.jit(Cell(kind).step).lower(X).compile().memory_analysis()
    cost = statetx.measure(cell.step, X, gradient=False)
    assert cost.output_bytes == jitted.output_size_in_bytes
    assert cost.output_bytes >= X.nbytes + cell.w.value.nbytes + 4  # h, w and the loss
    assert statetx.measure(cell.loss, X).output_bytes >= 2 * X.nbytes + cell.w.value.nbytes + 4  # and the gradient of x


def estimated(fun, *args, **options):
    """The buffers of a program that the compiler refuses for its memory."""

    def refuse(*args, **kwargs):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Ran out of memory.")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax.stages.Lowered, "compile", refuse)
        profile = statetx.explain_oom(fun, *args, limit="1MiB", **options).profile
    assert "estimated from the equations" in profile.note
    return profile.buffers


def test_estimate_without_the_compiler_counts_a_created_state():
    outputs = [b for b in estimated(Cell("statetx").loss, X, gradient=False) if b.kind == "output"]
    assert sum(b.num_bytes for b in outputs) == X.nbytes + 4


class Recurrent(brainstate.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = brainstate.ParamState(jnp.eye(8) / 2)

    def init_state(self, batch_size=None, **kwargs):
        self.h = brainstate.HiddenState(jnp.zeros((batch_size, 8)))

    def update(self, x):
        self.h.value = jnp.sin(jnp.tanh(self.h.value @ self.w.value + x))
        return self.h.value


def training_step():
    """The idiom of brainstate's tutorials."""
    net = Recurrent()
    weights = net.states(brainstate.ParamState)

    def loss():
        brainstate.nn.init_all_states(net, batch_size=4)
        return (brainstate.transform.for_loop(net, jnp.broadcast_to(X, (20, 4, 8))) ** 2).mean()

    def step():
        grads, value = brainstate.transform.grad(loss, weights, return_value=True)()
        for name, grad in grads.items():
            weights[name].value -= 0.1 * grad
        return value

    return step


JITS = {"brainstate": brainstate.transform.jit, "statetx": statetx.jit, "plain": lambda step: step}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("planned", "jit"),
    [
        pytest.param(*pair, marks=() if pair == ("statetx", "statetx") else pytest.mark.slow)
        for pair in itertools.product(JITS, repeat=2)
    ],
)
def test_plan_applies_to_a_step_with_init_all_states_inside(planned, jit):
    reference = training_step()
    expected = [reference() for _ in range(3)]
    plan = statetx.plan(JITS[planned](training_step()), budget=0.95, time_limit=0)
    assert plan.temp_bytes < plan.unplanned_bytes
    for step in (plan.apply(JITS[jit](training_step())), JITS[jit](plan.apply(training_step()))):
        np.testing.assert_allclose([step() for _ in range(3)], expected, rtol=1e-5)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", in_turn(KINDS, 3))
def test_plan_of_a_loss_applies_to_its_gradient(kind):
    cell, reference = Cell(kind), Cell(kind)
    plan = statetx.plan(cell.loss, X, budget=0.9)
    grads = statetx.grad(plan.apply(cell.loss), wrt=cell.w)(X)
    np.testing.assert_allclose(grads, statetx.grad(reference.loss, wrt=reference.w)(X), rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(libraries.get(cell.h), libraries.get(reference.h), rtol=1e-6)


def test_max_batch_of_a_state_with_an_axis_and_a_created_one():
    h = statetx.State(jnp.zeros((4, 8)), name="h")
    kept = []

    def loss(x):
        kept[:] = [statetx.State(x @ x.T)]
        h.value = jnp.tanh(h.value + x)
        return (h.value**2).sum() + kept[0].value.sum()

    fit = statetx.max_batch(loss, X, budget="64KiB", states={"h": 0})
    assert fit.total_bytes <= 2**16 < fit.next_bytes


def test_make_jaxpr_refuses_a_created_state_and_does_not_speak_of_loops():
    with pytest.raises(statetx.CreatedStateError) as error:
        statetx.make_jaxpr(Cell("statetx").loss)(X)
    assert "inside make_jaxpr(Cell.loss)" in str(error.value) and "loop" not in str(error.value)


@pytest.mark.slow
@pytest.mark.parametrize("kind", in_turn(KINDS, 3))
def test_reports_of_a_jitted_step_warn_of_nothing(kind):
    """They stage the step many times, each in a trace of its own, and training stages it once."""
    cell, stagings = Cell(kind), []

    @statetx.jit
    def step(x):
        stagings.append(0)
        return cell.step(x)

    with warnings.catch_warnings():
        warnings.simplefilter("error", statetx.StagingWarning)
        statetx.memory_report(step, X)
        statetx.explain_oom(step, X)
        for _ in range(3):
            step(X)
        stagings.clear()
        step(X)
    assert not stagings


# -- inside of a transform -------------------------------------------------------------------------------------------

CELLS = {"statetx": statetx.Param, "brainstate": brainstate.ParamState, "nnx": nnx.Variable, "ref": jax.new_ref}


def values_through(fun, x):
    """A call of the pure function, whose new values nobody stores; a Ref is written in place, as its docstring says."""
    pure = statetx.functionalize(fun)
    if pure.states(x):
        pure(pure.values(x), x)


ASIDE = {
    "functionalize.states": lambda fun, x: statetx.functionalize(fun).states(x),
    "saved_residuals": statetx.saved_residuals,
    "functionalize.values": lambda fun, x: statetx.functionalize(fun).values(x),
    "functionalize": values_through,
    "trace_states": lambda fun, x: statetx.trace_states(fun)(x),
    "eval_shape": statetx.eval_shape,
    "make_jaxpr": lambda fun, x: statetx.make_jaxpr(fun)(x),
    "states": lambda fun, x: statetx.states(fun),
    "lower": lambda fun, x: statetx.jit(fun).lower(x),
    "count_traces": lambda fun, x: statetx.eval_shape(statetx.testing.count_traces(fun), x),
}
COMPILING = {
    "print_saved_residuals": statetx.print_saved_residuals,
    "print_fwd_bwd": statetx.print_fwd_bwd,
    "assert_residuals": lambda fun, x: statetx.testing.assert_residuals(fun, x, expected=4),
    **{name: inspect for name, inspect in INSPECTIONS.items() if name not in ASIDE},
    "plan": lambda fun, x: statetx.plan(fun, x, budget="1MiB"),
    "max_batch": lambda fun, x: statetx.max_batch(lambda xs: fun(xs.sum()), x[None], budget="1MiB", limit=8),
}
BEFORE = {
    "untouched": lambda cell: None,
    "read": libraries.get,
    "written": lambda cell: libraries.put(cell, 1.0 * libraries.get(cell)),
}


def doubling(make, inspections):
    """A step that doubles states, 1 at first, and inspects beforehand a function that writes them; returns them all."""
    pairs = [(BEFORE["untouched"], inspect) for inspect in inspections]
    pairs += itertools.product((BEFORE["read"], BEFORE["written"]), inspections[:3])
    cells = [(make(jnp.float32(1)), *pair) for pair in pairs]

    def step(x):
        for cell, before, inspect in cells:

            def fun(x, cell=cell):
                libraries.put(cell, 3.0 * libraries.get(cell) + x)
                return jnp.sin(libraries.get(cell))

            before(cell)
            inspect(fun, x)
            libraries.put(cell, 2.0 * libraries.get(cell))
        return jnp.stack([libraries.get(cell) for cell, _, _ in cells]) + 0.0 * x

    return step, [cell for cell, _, _ in cells]


def times(transformed):
    return jnp.stack([transformed(jnp.float32(0)) for _ in range(3)])


def with_aux(grad, step):
    return lambda x: grad(lambda x: (x, step(x)), has_aux=True)(x)[1]


def by_fori_loop(step):
    shape = statetx.eval_shape(step, 0.0).shape
    return statetx.fori_loop(0, 3, lambda i, ys: ys.at[i].set(step(jnp.float32(0))), jnp.zeros((3, *shape)))


def by_while_loop(step):
    ys = jnp.zeros((3, *statetx.eval_shape(step, 0.0).shape))
    body = lambda c: (c[0] + 1, c[1].at[c[0]].set(step(jnp.float32(0))))
    return statetx.while_loop(lambda c: c[0] < 3, body, (0, ys))[1]


def on_a_device(step):
    mesh = jax.make_mesh((1,), ("d",))
    spec = jax.sharding.PartitionSpec()
    return statetx.shard_map(step, mesh=mesh, in_specs=spec, out_specs=spec)


def by_jax(transform):
    """``transform(pure)(values, xs) -> (values, ys)`` of JAX around the pure function of a step."""

    def run(step):
        pure = statetx.functionalize(step)
        values, ys = transform(pure)(pure.values(XS[0]), XS)
        pure.store(values, XS[0])
        return ys

    return run


def by_jax_scan(pure):
    return lambda values, xs: jax.lax.scan(lambda values, x: pure(values, x)[::-1], values, xs)


def by_calls(transform):
    def run(pure):
        def calls(values, xs):
            ys = []
            for x in xs:
                y, values = transform(pure)(values, x)
                ys.append(y)
            return values, jnp.stack(ys)

        return calls

    return run


def by_jax_grad(pure):
    return lambda values, x: jax.grad(lambda x: (x, pure(values, x)), has_aux=True)(x)[1]


XS = jnp.zeros(3)
bs = brainstate.transform
TRANSFORMS = {
    "nothing": times,
    "jit": lambda step: times(statetx.jit(step)),
    "remat": lambda step: times(statetx.remat(step)),
    "grad": lambda step: times(with_aux(statetx.grad, step)),
    "vjp": lambda step: times(lambda x: statetx.vjp(step, x)[0]),
    "jvp": lambda step: times(lambda x: statetx.jvp(step, (x,), (x,))[0]),
    "jit of grad of remat": lambda step: times(statetx.jit(with_aux(statetx.grad, statetx.remat(step)))),
    "vmap": lambda step: times(statetx.vmap(step, in_axes=None, out_axes=None, axis_size=2)),
    "scan": lambda step: statetx.scan(lambda c, x: (c, step(x)), None, XS)[1],
    "checkpointed scan": lambda step: statetx.scan(lambda c, x: (c, step(x)), None, XS, checkpoint=1)[1],
    "map": lambda step: statetx.map(step, XS),
    "fori_loop": by_fori_loop,
    "while_loop": by_while_loop,
    "cond": lambda step: times(lambda x: statetx.cond(x < 1, step, step, x)),
    "switch": lambda step: times(lambda x: statetx.switch(jnp.int32(1), [step, step], x)),
    "microbatch": lambda step: times(lambda x: statetx.microbatch(lambda xs: step(xs[0]), 1)(x[None])),
    "chunked": lambda step: times(lambda x: statetx.chunked(lambda xs: step(xs[0]), reduce="mean")(x[None])),
    "shard_map": lambda step: times(statetx.jit(on_a_device(step))),
    "brainstate's jit": lambda step: times(bs.jit(step)),
    "brainstate's for_loop": lambda step: bs.for_loop(step, XS),
    "brainstate's scan": lambda step: bs.scan(lambda c, x: (c, step(x)), 0.0, XS)[1],
    "brainstate's vmap": lambda step: times(lambda x: bs.vmap(step)(x[None])[0]),
    "brainstate's grad": lambda step: times(lambda x: bs.grad(lambda x: (x, step(x)), argnums=0, has_aux=True)(x)[1]),
    "brainstate's cond": lambda step: times(lambda x: bs.cond(x < 1, step, step, x)),
    "JAX's jit": by_jax(by_calls(jax.jit)),
    "JAX's grad": by_jax(by_calls(by_jax_grad)),
    "JAX's scan": by_jax(by_jax_scan),
}


def places():
    """Each transform for states of brainstate, whose values are attributes; each kind under `jit`; the others where the
    suite is long.
    """
    for transform, kind in itertools.product(TRANSFORMS, CELLS):
        if "brainstate" in transform and (kind == "nnx" or (kind, transform) == ("ref", "brainstate's vmap")):
            continue  # brainstate's transforms know no states of flax, and JAX refuses to write a Ref in a map
        is_fast = kind == "brainstate" or transform == "jit"
        yield pytest.param(transform, kind, marks=() if is_fast else pytest.mark.slow)


def check_no_trace(transform, kind, inspections):
    step, cells = doubling(CELLS[kind], inspections)
    found = TRANSFORMS[transform](step)
    np.testing.assert_array_equal(found, np.broadcast_to([[2.0], [4.0], [8.0]], found.shape))
    assert [float(libraries.get(cell)) for cell in cells] == [8.0] * len(cells)


@pytest.mark.sample
@pytest.mark.parametrize(("transform", "kind"), [*places()])
def test_inspection_in_a_transform_leaves_no_trace(transform, kind):
    check_no_trace(transform, kind, [*ASIDE.values()])


@pytest.mark.sample
@pytest.mark.parametrize("kind", CELLS)
@pytest.mark.parametrize("inspect", COMPILING)
def test_report_or_plan_in_a_jitted_step_leaves_no_trace(inspect, kind):
    check_no_trace("jit", kind, [COMPILING[inspect]])


@pytest.mark.parametrize("kind", ["statetx", "brainstate", "nnx"])
def test_gradient_through_the_values_that_functionalize_reads_in_the_transform(kind):
    cell = CELLS[kind](jnp.float32(1))
    pure = statetx.functionalize(lambda x: libraries.get(cell) * 2.0 + x)
    loss = lambda x: pure(pure.values(x), x)[0]
    assert float(statetx.grad(loss, wrt=cell)(0.0)) == 2.0
    assert float(statetx.jit(statetx.grad(loss, wrt=cell))(0.0)) == 2.0


@pytest.mark.sample
@pytest.mark.parametrize("kind", CELLS)
@pytest.mark.parametrize("transform", ["jit", "scan"])
def test_inspection_draws_no_random_numbers(transform, kind):
    library = libraries.LIBRARIES[kind]

    def run(inspections):
        rngs = [library.rng() for _ in ASIDE]

        def step(x):
            for rng, inspect in zip(rngs, inspections, strict=False):
                inspect(lambda x, rng=rng: jax.random.uniform(library.draw(rng)) + x, x)
            return jnp.stack([jax.random.uniform(library.draw(rng)) for rng in rngs])

        return TRANSFORMS[transform](step)

    np.testing.assert_array_equal(run(ASIDE.values()), run(()))


@pytest.mark.parametrize("transform", ["jit", "grad", "vmap", "brainstate's jit"])
@pytest.mark.parametrize("inspect", ["functionalize.states", "saved_residuals", "trace_states", "make_jaxpr"])
def test_inspection_in_a_transform_of_a_call_that_makes_states(inspect, transform):
    """Its attributes hold the earlier states afterwards, which the step goes on with."""
    cell = Cell("brainstate")
    cell.h = brainstate.HiddenState(jnp.float32(1))

    def step(x):
        with contextlib.suppress(statetx.CreatedStateError):
            ASIDE[inspect](cell.loss, jnp.ones((2, 8)))
        cell.h.value = 2.0 * cell.h.value
        return cell.h.value + x

    h = cell.h
    np.testing.assert_array_equal(TRANSFORMS[transform](step), [2.0, 4.0, 8.0])
    assert cell.h is h


@pytest.mark.parametrize("make", [statetx.State, brainstate.HiddenState, nnx.Variable])
@pytest.mark.parametrize("inspect", ["saved_residuals", "trace_states", "measure"])
def test_state_of_an_inspected_call_that_something_keeps_alive_is_no_state_of_the_loop(inspect, make):
    """The equations of a learner, such as those of braintrace, hold its states."""
    kept = []

    def call(x):
        kept.append(make(2.0 * x))
        return libraries.get(kept[-1])

    def body(carry, _):
        INSPECTIONS[inspect](call, carry)
        return 2.0 * carry, None

    assert statetx.scan(body, jnp.float32(1.0), None, 3)[0] == 8
    assert statetx.cond(True, lambda x: body(x, None)[0], jnp.sin, jnp.float32(1.0)) == 2
    with pytest.raises(Exception, match="inspected|created inside a traced function"):
        libraries.get(kept[0])


def test_brainstate_does_not_take_an_inspected_write_for_a_write():
    h, kept = brainstate.ShortTermState(jnp.float32(1)), brainstate.ShortTermState(jnp.float32(1))

    def fun(x):
        h.value = h.value + x
        kept.value = kept.value + x

    def step(x):
        statetx.trace_states(fun)(x)
        kept.value = kept.value + x
        statetx.trace_states(fun)(x)
        return h.value + kept.value

    written = bs.StatefulFunction(step).make_jaxpr(1.0).get_write_states(1.0)
    assert [state is kept for state in written] == [True]
    assert not h._been_writen
    assert float(bs.jit(step)(1.0)) == 3.0


def test_comparison_in_a_transform_says_that_it_compares_numbers():
    with pytest.raises(statetx.FunctionError, match="compares numbers") as error:
        statetx.jit(lambda x: statetx.testing.assert_remat_equivalent(jnp.sin, x))(1.0)
    assert "\nFix: " in str(error.value)


def test_comparison_of_a_function_that_writes_a_ref_leaves_it_unchanged():
    ref = jax.new_ref(jnp.float32(1))

    def fun(x):
        ref[...] = ref[...] * x
        return jnp.sin(ref[...])

    statetx.testing.assert_remat_equivalent(fun, jnp.float32(2))
    assert float(ref[...]) == 1.0


# -- derivative rules that are Python --------------------------------------------------------------------------------


def with_rule(forward, backward=lambda x: None):
    """A sine whose derivative rules first call `forward` and `backward`."""

    @jax.custom_vjp
    def sine(x):
        return jnp.sin(x)

    def rule(x):
        forward(x)
        return jnp.sin(x), x

    def transposed_rule(x, ct):
        backward(x)
        return (ct * jnp.cos(x),)

    sine.defvjp(rule, transposed_rule)
    return sine


def planned(loss, x):
    return statetx.plan(loss, x, of="temporaries", budget=10**6).rows


def printed(loss, x):
    return str(statetx.saved_residuals(statetx.remat(loss, policy="everything"), x)), statetx.print_fwd_bwd(loss, x)


@pytest.mark.parametrize("inspect", [planned, printed, statetx.saved_residuals, statetx.loop_report])
@pytest.mark.parametrize("is_backward", [False, True])
def test_writes_of_derivative_rules_are_undone(inspect, is_backward):
    """Rules of braintrace write states, past the setter that statetx watches, and expect that the call ends as that of
    a jitted function. A plan, and `remat`, would run them late.
    """
    state = brainstate.ParamState(jnp.zeros(8))
    before = state.value
    write = lambda x: state.restore_value(x[0])
    sine = with_rule(lambda x: None, write) if is_backward else with_rule(write)
    loss = lambda x: (sine(x) ** 2).sum()
    if inspect in (planned, printed):
        with pytest.raises(statetx.StateAccessError, match="the derivative rule of sine at .* touches ParamState"):
            inspect(loss, X)
    else:
        inspect(loss, X)
    assert state.value is before


@pytest.mark.parametrize("inspect", ["saved_residuals", "memory_report", "loop_report", "plan"])
def test_derivative_rules_that_read_what_the_call_has_set_are_named(inspect):
    class Model:
        pass

    def step(x):
        model = Model()
        model.h = x
        value = (with_rule(lambda x: model.h)(x) ** 2).sum()
        del model.h
        return value

    with pytest.raises(AttributeError, match="no attribute 'h'") as error:
        INSPECTIONS[inspect](step, X)
    (note,) = (n for n in error.value.__notes__ if "derivative rule" in n)
    assert "test_inspected.py:" in note and "\nFix: " in note


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Net:
    """As a module of equinox, whose sizes are leaves of the tree."""

    w: jax.Array
    size: int

    def loss(self, x):
        def body(h, x):
            return jnp.tanh((h + x) @ self.w), None

        return statetx.scan(body, jnp.zeros(self.size), x, checkpoint=2)[0].sum()

    def step(self, x):
        return self.w - jax.grad(lambda w: Net(w, self.size).loss(x))(self.w)


@pytest.mark.sample
@pytest.mark.parametrize("fun", [Net.loss, Net.step])
@pytest.mark.parametrize(
    "inspect",
    [
        statetx.measure,
        statetx.memory_profile,
        estimated,
        statetx.memory_report,
        statetx.loop_report,
        statetx.saved_residuals,
        statetx.explain_oom,
        functools.partial(statetx.plan, budget=1.0),
    ],
)
def test_a_number_in_a_module_may_be_a_shape(inspect, fun):
    assert str(inspect(fun, Net(jnp.eye(8) / 2, 8), X))
