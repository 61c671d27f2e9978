"""An interrupt at any line of statetx: every state holds its old value or every state its new one, and all can be used.

`sys.settrace` raises KeyboardInterrupt at one line of the package after the other, as Ctrl-C does at a moment of its
own choice, and looks at the states each time. What happens inside a function written in C cannot be divided, by either.
"""

import contextlib
import os
import sys

import brainstate
import jax
import jax.numpy as jnp
import optax
import pytest
from libraries import VALUED, ValuedRef, Variable

import speeds
import statetx
from helpers import assert_no_frame_is_open, assert_nothing_is_overridden, in_thread, locks_of_statetx
from statetx.kinds import nnx as nnx_kind
from statetx.kinds.brainstate import observe

PACKAGE, JAX = os.path.dirname(statetx.__file__), os.path.dirname(jax.__file__)


MIXED = (*VALUED.values(),)


class Model:
    """Four states that change together: `i`, `2 i`, `3 i` and `4 i` after `i` steps."""

    def __init__(self, kinds):
        self.cells = [kind(jnp.zeros(())) for kind in kinds]

    def step(self, x):
        for n, cell in enumerate(self.cells, start=1):
            cell.value = cell.value + n * x
        return x * self.cells[0].value

    def touch(self):
        for cell in self.cells:
            cell.value = cell.value

    def steps_done(self):
        values = [float(cell.value) for cell in self.cells]
        assert values == [n * values[0] for n in range(1, len(values) + 1)], f"a mixture of old and new: {values}"
        return values[0]


class TreeModel(Model):
    """The same with trees as values, which no program stores directly."""

    def __init__(self, kinds):
        self.cells = [kind({"x": jnp.zeros(())}) for kind in kinds]

    def step(self, x):
        for n, cell in enumerate(self.cells, start=1):
            cell.value = {"x": cell.value["x"] + n * x}
        return x * self.cells[0].value["x"]

    def steps_done(self):
        values = [float(cell.value["x"]) for cell in self.cells]
        assert values == [n * values[0] for n in range(1, len(values) + 1)], f"a mixture of old and new: {values}"
        return values[0]


class MakingModel(Model):
    """A step also creates a state in an attribute; its value equals the next state's in the row."""

    def __init__(self, kinds):
        super().__init__(kinds)
        self.kinds = kinds

    def step(self, x):
        self.made = self.kinds[0](self.cells[0].value + x)
        out = Model.step(self, x)
        self.made.value = self.made.value * (len(self.kinds) + 1)
        return out

    def steps_done(self):
        done = super().steps_done()
        assert not hasattr(self, "made") or float(self.made.value) == done * (len(self.kinds) + 1), "made and written"
        return done


class Trained(Model):
    """A step is an update by an `Optimizer`, whose own state counts them."""

    def __init__(self, kinds):
        super().__init__(kinds)
        counting = optax.GradientTransformation(
            lambda params: jnp.zeros(()), lambda grads, count, params: (grads, count + 1)
        )
        self.optimizer = statetx.Optimizer(
            counting, [cell.ref if type(cell) is ValuedRef else cell for cell in self.cells]
        )

    def step(self, x):
        self.optimizer.update([jnp.asarray(n * x) for n in range(1, len(self.cells) + 1)])

    def steps_done(self):
        done = super().steps_done()
        assert float(self.optimizer.state.value) == done, "parameters and the optimizer's memory"
        return done


# Transforms of a model into a function that takes one step.
HOW = {
    "remat, eager": statetx.remat,
    "functionalize": lambda f: lambda x: store(statetx.functionalize(f), x),
    "grad": statetx.grad,
    "vjp": lambda f: lambda x: statetx.vjp(f, x)[0],
    "jacfwd": statetx.jacfwd,
    "grad(remat)": lambda f: statetx.grad(statetx.remat(f)),
    "jit": statetx.jit,
    "jit, donated": statetx.jit(donate_states=True),
    "remat(jit)": lambda f: statetx.remat(statetx.jit(f)),
    "vmap": lambda f: lambda x: statetx.vmap(lambda _: f(x))(jnp.zeros(2)),
    "scan": lambda f: lambda x: statetx.scan(lambda c, _: (c, f(x)), 0, None, 1),
    "fori_loop": lambda f: lambda x: statetx.fori_loop(0, 1, lambda i, c: f(x), 0.0),
    "cond": lambda f: lambda x: statetx.cond(jnp.array(True), f, lambda x: x, x),
    "inspected": lambda f: lambda x: (statetx.saved_residuals(f, x), statetx.remat(f)(x))[1],
}


def store(pure, x):
    values = pure.values(x)
    pure.store(pure(values, x)[1], x)


@contextlib.contextmanager
def interrupted_at(nth, seen, folders=(PACKAGE,)):
    """Raise KeyboardInterrupt at the line of statetx (of `folders`) that is the `nth` to run; `seen[0]` counts the
    lines.
    """

    def in_package(frame, event, arg):
        if event == "line":
            seen[0] += 1
            if seen[0] == nth:
                sys.settrace(None)
                raise KeyboardInterrupt
        return in_package

    def on_call(frame, event, arg):
        return in_package if frame.f_code.co_filename.startswith(folders) else None

    before = sys.gettrace()
    sys.settrace(on_call)
    try:
        yield
    finally:
        sys.settrace(before)


def check_locks_are_free(call, where):
    locks = locks_of_statetx()
    if isinstance(call, statetx.transforms.jit.api.Jit):
        locks += [call.cache.staging, call.cache.lock]

    def look():
        for lock in locks:
            free.append(lock.acquire(blocking=False))
            if free[-1]:
                lock.release()

    free = []
    in_thread(look)  # the locks are reentrant: this thread would get them in any case
    assert all(free), f"a lock is held {where}"


def check_every_line(model, make, step=1, folders=(PACKAGE,)):
    """Interrupt a step at every `step`-th line; `make` gives the function that is called. Returns how often."""
    num, done = 0, model.steps_done()
    nth = 1 + speeds.today()[1] % step
    while True:
        call, seen = make(), [0]
        try:
            with interrupted_at(nth, seen, folders):
                call(1.0)
        except KeyboardInterrupt:
            pass
        except ValueError as e:  # JAX 0.12 has met it while it compared keys of a cache, and says so
            if "KeyboardInterrupt" not in str(e):
                raise
        else:
            break
        num += 1
        where = f"after an interrupt at line event {nth}"
        assert_no_frame_is_open(where)
        assert not observe.context.state_stack and not observe.context.new_state_catcher, where
        check_locks_are_free(call, where)
        assert not observe.owners and not nnx_kind._owner, f"a state stays refused {where}"
        assert model.steps_done() in (done, done + 1), where
        model.touch()  # they can be written, too
        done = model.steps_done()
        nth += step
    assert model.steps_done() == done + 1
    return num


# The slow suite interrupts every third line, others in each turn of the twelfths; the fast suite every line of a
# compiled call, and some lines of the others.
SLOW = 3
FAST = {"remat, eager": 3, "jit": 1, "jit, donated": 1, "grad(remat)": 89, "functionalize": 89, "inspected": 397}
# Each kind alone in a compiled call; in the others the fast suite has all four together.
CASES = [
    *[pytest.param(how, k, marks=pytest.mark.slow) for how in ("remat, eager", "grad") for k in VALUED],
    *[("jit", kinds) for kinds in VALUED],
    *[(how, "mixed") for how in HOW],
]


@pytest.mark.sample("slow")
@pytest.mark.parametrize("step", [pytest.param(SLOW, marks=pytest.mark.slow), None], ids=["slow", "fast"])
@pytest.mark.parametrize(("how", "kinds"), CASES)
def test_interrupt_at_every_line_of_a_call(how, kinds, step):
    makes = MIXED if kinds == "mixed" else [VALUED[kinds]] * 2
    # vmap refuses a Ref from outside, and a functionalized function writes it in its place.
    model = Model([m for m in makes if m is not ValuedRef] if how in ("vmap", "functionalize") else makes)
    call = HOW[how](model.step)
    call(1.0)  # where something is compiled or cached, the interrupted calls are later ones
    assert check_every_line(model, lambda: call, step=step or FAST.get(how, 43)) > 10


@pytest.mark.sample("slow")
@pytest.mark.parametrize("step", [pytest.param(SLOW, marks=pytest.mark.slow), None], ids=["slow", "fast"])
@pytest.mark.parametrize("how", [None, "remat, eager", "jit"])
def test_interrupt_at_every_line_of_an_update(how, step):
    model = Trained(MIXED)
    call = model.step if how is None else HOW[how](model.step)
    call(1.0)
    assert check_every_line(model, lambda: call, step=step or {"jit": 1}.get(how, 17)) > 10


@pytest.mark.sample
@pytest.mark.parametrize("step", [pytest.param(SLOW, marks=pytest.mark.slow), None], ids=["slow", "fast"])
@pytest.mark.parametrize("how", ["jit", "remat, eager", "update"])
def test_interrupt_at_every_line_of_jax_in_a_call_with_refs(how, step):
    model = (Trained if how == "update" else Model)([ValuedRef, ValuedRef])
    call = model.step if how == "update" else HOW[how](model.step)
    call(1.0)
    step = step or {"jit": 3}.get(how, 41)
    assert check_every_line(model, lambda: call, step=step, folders=(PACKAGE, JAX)) > 10


@pytest.mark.parametrize("options", [{}, {"donate_states": True}], ids=["", "donated"])
def test_interrupt_at_every_line_of_a_compiled_call_with_tree_values(options):
    model = TreeModel(MIXED[:3])
    call = statetx.jit(model.step, **options)
    call(1.0)
    assert check_every_line(model, lambda: call) > 20


@pytest.mark.parametrize(
    ("kinds", "options"),
    [
        ("statetx", {}),
        ("brainstate", {"donate_states": True}),
        ("nnx", {}),
        pytest.param("statetx", {"donate_states": True}, marks=pytest.mark.slow),
        pytest.param("brainstate", {}, marks=pytest.mark.slow),
        pytest.param("nnx", {"donate_states": True}, marks=pytest.mark.slow),
    ],
    ids=lambda x: x if isinstance(x, str) else "donated" * bool(x),
)
def test_interrupt_at_every_line_of_a_compiled_call_that_creates_a_state(kinds, options):
    model = MakingModel([VALUED[kinds], *MIXED[:3]])
    call = statetx.jit(model.step, **options)
    for _ in range(2):
        call(1.0)
    made = id(model.made)
    assert check_every_line(model, lambda: call) > 20
    assert id(model.made) == made  # no call was staged again


@pytest.mark.slow
@pytest.mark.parametrize("step", [11, 53])
@pytest.mark.parametrize("how", ["jit", "jit, donated"])
def test_interrupt_while_staging_and_compiling(how, step):
    model = Model(MIXED)
    assert check_every_line(model, lambda: HOW[how](model.step), step=step) > 20


def test_interrupt_at_every_line_of_a_restore():
    model = Model([statetx.State, brainstate.ShortTermState, Variable])
    model.step(5.0)
    saved = statetx.values(model)
    nth, num = 1, 0
    while True:
        for n, cell in enumerate(model.cells, start=1):
            cell.value = jnp.asarray(7.0 * n)
        try:
            with interrupted_at(nth, [0]):
                statetx.restore(model, saved)
        except KeyboardInterrupt:
            assert model.steps_done() in (5.0, 7.0)
            num += 1
        else:
            break
        nth += 5
    assert model.steps_done() == 5.0 and num > 20


@pytest.mark.slow
@pytest.mark.parametrize("num", [100, 2])
def test_interrupted_plan_leaves_states_and_stored_plans_as_they_were(num, tmp_path, monkeypatch):
    w, h, x = statetx.Param(jnp.eye(16)), statetx.State(jnp.zeros(16)), jnp.ones((256, 16))

    def loss(x):
        for _ in range(3):
            x = jnp.tanh(x @ w.value)
        h.value = x[0]
        return (x**2).sum()

    def plan(folder, nth=0):
        monkeypatch.setenv("STATETX_CACHE", str(tmp_path / folder))
        seen = [0]
        with interrupted_at(nth, seen):
            return statetx.plan(loss, x, budget=1.0, argnums=0), seen[0]

    (expected, num_lines), (other, num_of_hit) = plan("whole"), plan("whole")
    assert other == expected and num_of_hit < num_lines / 5
    held = w.value, h.value
    for n in range(num):
        # Half of them in the last lines, where the plan is stored.
        nth = int(num_lines * (n + 1) / (num + 1)) if n % 2 else num_lines - 100 - 3 * n
        with contextlib.suppress(KeyboardInterrupt):
            plan(f"interrupted {n}", nth)
        assert w.value is held[0] and h.value is held[1]
        assert_no_frame_is_open()
        assert_nothing_is_overridden()
        check_locks_are_free(None, f"at line {nth}")
        assert not list((tmp_path / f"interrupted {n}").rglob("*.part"))
    assert plan(f"interrupted {num - 1}")[0] == expected


def test_interrupted_save_of_a_plan_leaves_the_old_file(tmp_path):
    plans = [statetx.plan(lambda x: jnp.tanh(x).sum(), jnp.ones(n), budget="1MiB", argnums=0) for n in (64, 96)]
    path, num, nth = tmp_path / "plan.json", 0, 1
    plans[0].save(path)
    while True:
        try:
            with interrupted_at(nth, [0]):
                plans[1].save(path)
        except KeyboardInterrupt:
            assert statetx.Plan.load(path) == plans[0]
            assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]
        else:
            break
        num, nth = num + 1, nth + 19
    assert num > 1 and statetx.Plan.load(path) == plans[1]


def test_callback_exception_in_a_donating_program_names_lost_states():
    state = statetx.State(jnp.ones(3))

    def fail(x):
        raise ValueError("from the callback")

    @statetx.jit(donate_states=True)
    def step(x):
        state.value = state.value + jax.pure_callback(fail, jax.ShapeDtypeStruct((), jnp.float32), x)

    with pytest.raises(Exception, match="from the callback") as e:
        step(1.0)
        jax.block_until_ready(state.value)
    if "donated states" in "".join(getattr(e.value, "__notes__", ())):  # it came while the program was called
        with pytest.raises(statetx.StateAccessError, match="donated to jit"):
            _ = state.value
    state.value = jnp.zeros(3)
    assert float(statetx.jit(lambda: state.value.sum())()) == 0.0


def test_interrupted_call_caught_inside_a_transform():
    model = Model([statetx.State, brainstate.ShortTermState, Variable])
    inner = statetx.remat(model.step)

    def outer(x):
        with contextlib.suppress(KeyboardInterrupt), interrupted_at(outer.nth, [0]):
            inner(x)
        return x * 2.0

    num = 0
    for outer.nth in range(1, 150, 3):
        before = model.steps_done()
        assert float(statetx.grad(outer)(1.0)) == 2.0
        assert model.steps_done() in (before, before + 1)
        num += model.steps_done() == before
    assert num > 10
