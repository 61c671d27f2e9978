"""Plans on disk: found again by the structure of the program, checked, and never in the way."""

import gc
import gzip
import json
import os
import re
import stat
import subprocess
import sys
import threading
import weakref
from unittest import mock

import damaged
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Primitive
from jax.interpreters import ad, mlir

import statetx
from statetx import _files, _jax, _records
from statetx._equations import compiled
from statetx.memory import baseline
from statetx.planner import Planner, _budget, _store
from statetx.planner._record import STORED_PLAN
from statetx.planner._treatments.loops import CheckpointedLoop

KEY = "0" * 64
X = jnp.ones((128, 32))
WS = [jnp.eye(32) * (1 + 0.01 * i) for i in range(2)]


def loss(ws, x):
    for w in ws:
        x = x + jnp.sin(jnp.tanh(x @ w) @ w.T)
    return (x**2).mean()


def step(ws, x):
    return jax.tree.map(lambda w, g: w - 0.1 * g, ws, jax.grad(loss)(ws, x))


@pytest.fixture
def folder(monkeypatch, tmp_path):
    monkeypatch.setenv("STATETX_CACHE", str(tmp_path))
    return tmp_path


@pytest.fixture
def compilations(monkeypatch):
    """A list that grows by one with each program that is compiled."""
    found, cost = [], compiled.Program.cost.fget

    def counted(self):
        if self not in found:
            found.append(self)
        return cost(self)

    monkeypatch.setattr(compiled.Program, "cost", property(counted))
    return found


def anything(fields, at):
    """A check that takes all fields."""


def entries(folder):
    return sorted((folder / "plans").glob("*.json.gz"))


@pytest.mark.slow
@pytest.mark.parametrize("fun", [loss, step])
def test_second_plan_compiles_nothing(folder, compilations, fun):
    first = statetx.plan(fun, WS, X, budget=0.8)
    assert compilations and len(entries(folder)) == 1
    compilations.clear()
    second = statetx.plan(fun, WS, X, budget=0.8)
    assert not compilations and second == first and hash(second) == hash(first)
    assert str(second) == str(first) and second.rows == first.rows
    assert second.apply(fun) is not None and Planner(fun, WS, X).plan(0.8) == first


@pytest.mark.slow
def test_step_of_a_stored_plan_is_not_differentiated(folder):
    differentiated = []
    sine = Primitive("sine")  # a rule of JAX, which no key asks
    sine.def_abstract_eval(lambda x: x)
    mlir.register_lowering(sine, mlir.lower_fun(jnp.sin, multiple_results=False))
    ad.defjvp(sine, lambda tangent, x: differentiated.append(0) or tangent * jnp.cos(x))

    def step(ws, x):
        return jax.grad(lambda ws: loss(ws, sine.bind(x @ ws[0])))(ws)

    first = statetx.plan(step, WS, X, budget=0.8)
    assert differentiated
    differentiated.clear()
    assert statetx.plan(step, WS, X, budget=0.8) == first and not differentiated


def hessian_product(ws, x):
    return jax.jvp(lambda ws: jax.grad(loss)(ws, x), (ws,), (ws,))[1]


def of_each_example(ws, x):
    return jax.vmap(jax.grad(loss), (None, 0))(ws, x[:4, None])


def with_auxiliary(ws, x):
    gradients, (count, mean) = jax.grad(lambda ws: (loss(ws, x), ((x > 1).sum(), x.mean())), has_aux=True)(ws)
    return gradients, count, mean


def jacobian(ws, x):
    return jax.jacrev(lambda w: loss([w, w], x[:2, :32]) * jnp.ones(2))(ws[0])


@pytest.mark.parametrize("step", [hessian_product, of_each_example, with_auxiliary, jacobian])
def test_keys_of_steps_tell_what_follows_a_gradient(step):
    """For a key each gradient is one equation, which is differentiated and mapped as the gradient would be."""
    keys = [Planner(fun, WS, X).key() for fun in (step, step, lambda *args: jax.tree.map(jnp.sin, step(*args)))]
    assert keys[0] == keys[1] != keys[2]


@pytest.mark.parametrize("gradient", [jax.grad(loss), hessian_product, of_each_example, with_auxiliary, jacobian])
def test_a_program_that_a_library_keeps_is_right(gradient):
    """A library may keep what it traces, such as braintrace: also from the trace for the key, in which gradients are
    not differentiated yet.
    """
    kept = []

    def step(ws, x):
        if not kept:
            kept.append(jax.make_jaxpr(gradient, return_shape=True)(ws, x))
        closed, shape = kept[0]
        return jax.tree.unflatten(
            jax.tree.structure(shape), jax.core.eval_jaxpr(closed.jaxpr, closed.consts, ws[0], ws[1], x)
        )

    Planner(step, WS, X)
    assert "statetx_deferred" in str(kept[0][0])
    for a, b in zip(*(jax.tree.leaves(jax.jit(f)(WS, X)) for f in (step, gradient)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_keys_tell_small_gradients_apart():
    """A gradient of a few numbers is not planned, and the plan fits no other one."""

    def key(function):
        return Planner(lambda ws, x: (jax.grad(loss)(ws, x), jax.grad(function)(x[0, 0])), WS, X).key()

    assert key(jnp.sin) == key(jnp.sin) != key(jnp.cos)


@pytest.fixture
def steps_of_orders():
    """brainstate differentiates with respect to a dict by addresses of states, which JAX sorts: in each process another
    order.
    """

    def step_by(*names):
        @jax.jit  # with the dict as its argument
        def apply(weights, x):
            for name in names[:2]:
                x = x + jnp.sin(jnp.tanh(x @ weights[name]) @ weights[names[2]])
            return x

        def step(ws, x):
            weights = dict(zip(names, [*ws, ws[0]], strict=True))
            grads = jax.grad(lambda weights: (apply(weights, x) ** 2).mean())(weights)
            return [grads[name] for name in names]

        return step

    return [step_by(2, 3, 1, 0), step_by(0, 1, 2, 3)], [*WS, jnp.eye(32)]  # the last one is not read


def test_order_of_differentiated_arrays_makes_no_other_key(steps_of_orders):
    steps, ws = steps_of_orders
    first, second = (Planner(step, ws, X).key() for step in steps)
    assert first == second


@pytest.mark.thorough
def test_plan_is_for_each_order_of_differentiated_arrays(steps_of_orders):
    steps, ws = steps_of_orders
    plan = Planner(steps[0], ws, X).plan(0.8)
    for step in steps:
        assert jax.tree.all(jax.tree.map(jnp.array_equal, jax.jit(plan.apply(step))(ws, X), jax.jit(step)(ws, X)))


@pytest.mark.thorough
def test_fit_is_stored(folder, compilations):
    planned = lambda: jax.make_jaxpr(jax.grad(statetx.remat(loss, policy="fit:0.8")))(WS, X)
    first = planned()
    assert compilations and len(entries(folder)) == 1
    compilations.clear()
    statetx.clear_cache()  # it remembers what this process has rewritten
    assert str(planned()) == str(first) and not compilations


CHANGED = [{"budget": 0.81}, {"of": "temporaries"}, {"offload": True}, {"argnums": (0, 1)}, {"stored_as": ()}]


@pytest.mark.parametrize("changed", CHANGED, ids=str)
def test_other_options_are_another_plan(changed):
    def key(budget=0.8, of="step", argnums=0, **options):
        planner = Planner(loss, WS, X, of=of, argnums=argnums, **options)
        return planner.key(_budget.ByteBudget.read(budget, of))

    assert key() == key() != key(**changed)


def test_other_programs_are_other_plans(folder):
    def other(ws, x):
        return loss(ws, jnp.cos(x))

    key = lambda fun, *args: Planner(fun, *args).key(_budget.ByteBudget.read(0.8, "step"))
    keys = [key(loss, WS, X), key(other, WS, X), key(loss, WS, X[:64]), key(loss, WS[:1], X), key(step, WS, X)]
    keys.append(key(jax.jit(step, donate_argnums=0), WS, X))
    mesh = jax.make_mesh((4,), ("d",), devices=jax.devices()[:4])
    mapped = jax.shard_map(loss, mesh=mesh, in_specs=(jax.P(), jax.P()), out_specs=jax.P())
    keys += [key(mapped, WS, X), key(jax.value_and_grad(mapped, (0, 1)), WS, X)]
    assert len({*keys}) == len(keys) and key(loss, WS, X + 1) == keys[0]


@pytest.mark.slow
def test_constants_are_not_arguments(folder):
    """A step that closes over arrays has the equations of one that takes them."""
    taken = Planner(jax.grad(loss, argnums=1), WS, X)
    closed_over = Planner(lambda x: jax.grad(lambda x: loss(WS, x))(x), X)
    assert taken.key() != closed_over.key()
    sizes = [planner.plan(0.9).argument_bytes for planner in (taken, closed_over)]
    assert sizes == [X.nbytes + sum(w.nbytes for w in WS), X.nbytes]


@pytest.mark.parametrize("has_refs", [False, True])
def test_code_of_derivative_rules_counts(has_refs, monkeypatch):
    """The fingerprint of a program leaves the rules out. In a process that has made a Ref, rules run through a
    watch.
    """
    monkeypatch.setattr(_jax, "has_made_refs", lambda: has_refs)

    def rule(scale):
        @jax.custom_vjp
        def wide(x):
            return jnp.sin(x)

        wide.defvjp(lambda x: (jnp.sin(x), x), (lambda x, ct: (scale(x) * ct,)))
        return lambda ws, x: (wide(x @ ws[0]) ** 2).mean()

    budget = _budget.ByteBudget.read(0.8, "step")
    key = lambda scale: Planner(rule(scale), WS, X).key(budget)
    same = [key(lambda x: jnp.cos(x)) for _ in range(2)]
    assert same[0] == same[1] != key(lambda x: 2 * jnp.cos(x) - jnp.cos(x))


@pytest.mark.slow
@pytest.mark.parametrize("num", [60, 1000])
def test_damaged_entries_are_misses_or_plans_of_the_program(tmp_path_factory, damaged_plan, monkeypatch, num):
    """What is accepted is what the call may get: another valid decision, whose gradient is the same, or
    another figure.
    """
    folder = tmp_path_factory.mktemp("store")
    monkeypatch.setenv("STATETX_CACHE", str(folder))
    planner, budget, fields, expected = damaged_plan
    key = planner.key(budget)
    path = folder / "plans" / f"{key}.json.gz"
    path.parent.mkdir()
    gradients, counts = {}, {"miss": 0, "plan": 0}
    for name, put in damaged.every_damage(fields, num, compress=True):
        put(path)
        found = _store.load(key, STORED_PLAN)
        if found is None or not planner._is_for_program(found, budget):
            counts["miss"] += 1
        else:
            counts["plan"] += 1
            plan = planner._as_plan(found)
            assert plan.objective == "auto" and str(plan)
            gradient = str(jax.make_jaxpr(jax.grad(plan.apply(masked)))(WS, X))
            if gradient not in gradients:
                gradients[gradient] = jax.jit(jax.grad(plan.apply(masked)))(WS, X)
                assert jax.tree.all(jax.tree.map(np.allclose, gradients[gradient], expected)), name
        if not path.is_dir() or path.is_symlink():  # a folder is not ours
            _store.save(key, fields)
            assert _store.load(key, STORED_PLAN) == fields, name
        damaged.clear(path)
    assert counts["miss"] > 0.7 * num and counts["plan"] and not [*folder.glob("**/.*")], counts


def masked(ws, x):
    """With values that are stored as bits, and a loop."""
    for w in ws:
        x = jnp.where(x @ w > 0, jnp.sin(x @ w), 0.0)
    return jax.lax.scan(lambda h, _: (jnp.sin(h @ ws[0]), None), x, None, length=8)[0].sum()


@pytest.fixture(scope="module")
def damaged_plan():
    planner = Planner(masked, WS, X, argnums=0, of="temporaries")
    plan = planner.plan(0.6)
    decisions = [decision for gradient in plan.gradients for decision in gradient.decisions]
    assert any(d.get(CheckpointedLoop) for d in decisions) and any(d.saved for d in decisions)
    fields = json.loads(json.dumps(plan.to_dict()))
    del fields["shown"]
    return planner, _budget.ByteBudget.read(0.6, "temporaries"), fields, jax.grad(masked)(WS, X)


@pytest.mark.slow
def test_damaged_entry_is_planned_again_and_replaced(folder, compilations):
    first = statetx.plan(loss, WS, X, budget=0.8, argnums=0)
    (entry,) = entries(folder)
    key, good = entry.name.partition(".")[0], entry.read_bytes()
    for put in (lambda path: path.write_bytes(good[:99] + bytes([good[99] ^ 4]) + good[100:]), os.mkfifo):
        damaged.clear(entry)
        put(entry)
        compilations.clear()
        assert statetx.plan(loss, WS, X, budget=0.8, argnums=0).temp_bytes == first.temp_bytes and compilations
        assert _store.load(key, STORED_PLAN) is not None


FAR = 10**6


def stored_loop(*strategy):
    return {"strategy": [*strategy], "carries": [], "fenced": False}


NOT_THERE = {
    "cuts": lambda program, region, loop: program.update(cuts=[*program["cuts"], FAR]),
    "parts": lambda program, region, loop: program.update(parts=[*program["parts"][1:], FAR]),
    "fewer parts": lambda program, region, loop: program["parts"].pop(),
    "last_input": lambda program, region, loop: program.update(last_input=FAR),
    "saved": lambda program, region, loop: region["saved"].append([FAR, 0, "keep"]),
    "offloaded": lambda program, region, loop: region["saved"].append([*region["saved"].pop()[:-1], "offload"]),
    "inputs": lambda program, region, loop: region["saved"].append([-1, FAR, "bits"]),
    "loop of a region": lambda program, region, loop: region.update(loop=stored_loop("Slots", 2)),
    "length": lambda program, region, loop: loop.update(loop=stored_loop("Lengths", "turn", 7)),
    "groups": lambda program, region, loop: loop.update(loop=stored_loop("Groups", [], [3, {"saved": None}])),
    "values of groups": lambda program, region, loop: loop.update(
        loop=stored_loop("Groups", [], [8, {"saved": [[FAR, 0, "keep"]], "loop": stored_loop("Lengths", "turn", 8)}])
    ),
    "xs of groups": lambda program, region, loop: loop.update(loop=stored_loop("Groups", [FAR], [8, {"saved": None}])),
    "carries": lambda program, region, loop: loop["loop"].update(carries=[[0, "bits"]]),
}


@pytest.mark.parametrize("change", NOT_THERE.values(), ids=NOT_THERE)
def test_entry_that_decides_about_what_is_not_there_is_a_miss(damaged_plan, change):
    planner, budget, fields, _ = damaged_plan
    changed = json.loads(json.dumps(fields))
    (program,) = changed["gradients"]
    decisions = program["decisions"]
    region = next(d for d in decisions if d["saved"] and "loop" not in d)
    change(program, region, next(d for d in decisions if "loop" in d))
    STORED_PLAN(changed, "")
    assert planner._is_for_program(fields, budget) and not planner._is_for_program(changed, budget)


def test_entry_stores_in_no_other_format_than_the_call_allows(damaged_plan):
    """A valid decision for values that are not 0 or 1, inside a region or at its end, would change the gradient."""
    planner, budget, fields, _ = damaged_plan
    changed = json.loads(json.dumps(fields))
    (program,) = changed["gradients"]
    decision = next(d for d in program["decisions"] if d["saved"])
    taken = {"keep": [], "bits": [], "float8_e5m2": []}
    for format, found in taken.items():
        for i, equation in enumerate(program["equations"][:-2]):  # before the loop
            decision["saved"] = [[i, 0, format]]
            STORED_PLAN(changed, "")
            found += [equation.partition(" ")[0]] * planner._is_for_program(changed, budget)
    assert len(taken["keep"]) == 12 and taken["bits"] == 2 * ["gt", "broadcast_in_dim"] and not taken["float8_e5m2"]


@pytest.mark.thorough
def test_entry_of_another_program_is_not_used(folder, compilations):
    """As after a collision of digests."""
    first = statetx.plan(loss, WS, X, budget=0.8, argnums=0)
    (entry,) = entries(folder)
    fields = _store.load(entry.name.partition(".")[0], STORED_PLAN)
    fields["gradients"][0]["equations"][0] = "sin v0"
    _store.save(entry.name.partition(".")[0], fields)
    compilations.clear()
    assert statetx.plan(loss, WS, X, budget=0.8, argnums=0).temp_bytes == first.temp_bytes and compilations


def test_failed_plan_is_not_stored(folder):
    with pytest.raises(statetx.PlanError):
        statetx.plan(loss, WS, X, budget="1KiB", argnums=0)
    assert not entries(folder)


@pytest.mark.parametrize("word", ["", "off", "OFF", "0", "false", "no", " none "])
def test_store_is_off(word, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STATETX_CACHE", word)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert _store.folder() is None and _store.load(KEY, anything) is None
    _store.save(KEY, {})
    assert not list(tmp_path.iterdir())
    monkeypatch.setenv("STATETX_CACHE", "on")
    assert _store.folder() == tmp_path / "statetx"
    monkeypatch.delenv("STATETX_CACHE")
    assert _store.folder() == tmp_path / "statetx"
    _store.save(KEY, {"n": 1})
    assert _store.load(KEY, anything) == {"n": 1}


@pytest.mark.parametrize("cache", [None, "file/below"])
def test_store_is_off_without_a_folder_that_can_be_made(monkeypatch, tmp_path, cache):
    (tmp_path / "file").write_text("")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(_store.pathlib.Path, "home", mock.Mock(side_effect=RuntimeError("no home directory")))
    if cache is None:
        monkeypatch.delenv("STATETX_CACHE")
        assert _store.folder() is None
    else:
        monkeypatch.setenv("STATETX_CACHE", str(tmp_path / cache))
    _store.save(KEY, {"n": 1})
    assert _store.load(KEY, anything) is None


def test_oldest_entries_are_removed(folder, monkeypatch):
    monkeypatch.setattr(_store, "_MAX_BYTES", 1500)
    fields = {"x": [hash(str(i)) for i in range(40)]}
    keys = [str(n) * 64 for n in range(6)]
    for n, key in enumerate(keys):
        _store.save(key, fields)
        os.utime(folder / "plans" / f"{key}.json.gz", (n, n))
        if n == 1:
            os.utime(folder / "plans" / f"{keys[0]}.json.gz", (100, 100))  # it was used
    left = {p.name[0] for p in entries(folder)}
    assert {"0", "5"} <= left and len(left) < 6
    assert sum(p.stat().st_size for p in entries(folder)) <= 1500 + entries(folder)[0].stat().st_size


def test_files_that_the_store_has_not_written_stay(folder, monkeypatch):
    """``STATETX_CACHE`` may name a folder of the user's that has a folder "plans"."""
    monkeypatch.setattr(_store, "_MAX_BYTES", 3000)
    plans = folder / "plans"
    (plans / f"{'a' * 64}.json.gz").mkdir(parents=True)
    foreign = ["thesis.pdf", "short.json.gz", f"{'g' * 64}.json.gz", f"{'0' * 64}.json.gz.bak", ".statetx-mine.part"]
    for n, name in enumerate(foreign):
        (plans / name).write_bytes(bytes(5000))
        os.utime(plans / name, (n, n))
    temporary = [
        f".statetx-{n:016x}.part" for n in range(2)
    ]  # of a process that was killed long ago, and of one that writes
    for name in temporary:
        (plans / name).write_bytes(bytes(5000))
    os.utime(plans / temporary[0], (0, 0))
    _store.save("1" * 64, {"n": 1})
    _store.save("2" * 64, {"n": 2})
    own = [f"{key * 64}.json.gz" for key in "12"]
    assert {p.name for p in plans.iterdir()} == {*foreign, *own, temporary[1], f"{'a' * 64}.json.gz"}


def test_threads_write_whole_entries(folder):
    fields = [{"n": n, "x": list(range(3000))} for n in range(4)]
    threads = [threading.Thread(target=lambda f=f: [_store.save(KEY, f) for _ in range(20)]) for f in fields]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        assert _store.load(KEY, anything) in (None, *fields)
    assert _store.load(KEY, anything) in fields


PROGRAM = """
import jax, jax.numpy as jnp, statetx
def loss(ws, x):
    for w in ws:
        x = x + jnp.sin(jnp.tanh(x @ w) @ w.T)
    return (x**2).mean()
ws, x = [jnp.eye(32)] * 2, jnp.ones((128, 32))
plan = statetx.plan(lambda ws, x: jax.grad(loss)(ws, x), ws, x, budget=0.8)
print(plan.temp_bytes, plan.flops)
"""


def in_a_process(program, seed):
    env = os.environ | {"PYTHONHASHSEED": str(seed)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=env, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_another_process_finds_the_plan(folder):
    assert in_a_process(PROGRAM, 1) == in_a_process(PROGRAM, 2)
    assert len(entries(folder)) == 1


# -- the bytes of measured programs ----------------------------------------------------------------------------------

SIZES = """
import functools, jax, jax.numpy as jnp, statetx
def block(x, w):
    return x + jnp.sin(jnp.tanh(x @ w) @ w.T)
def loss(ws, x):
    return (functools.reduce(block, ws, x) ** 2).mean()
@functools.partial(jax.jit, donate_argnums=0)
def step(ws, x):
    return jax.tree.map(lambda w, g: w - 0.1 * g, ws, jax.grad(loss)(ws, x))
num, compile = 0, jax.stages.Lowered.compile
def counted(*args, **options):
    global num
    num += 1
    return compile(*args, **options)
jax.stages.Lowered.compile = counted
ws, w = [jax.ShapeDtypeStruct((32, 32), "float32")] * 4, statetx.Param(jnp.eye(32))
stateful = statetx.jit(lambda x: statetx.grad(lambda x: block(x, w.value).mean(), wrt=w)(x))
states = {statetx.Param: statetx.Broadcast}
x = jax.ShapeDtypeStruct((2, 512, 32), "float32")
sizes = [statetx.max_batch(f, ws, x, argnums=1, budget="2MiB", limit=64).tried
    for f in (step, lambda *args: step(*args))]
sizes.append(statetx.max_batch(loss, ws, x, argnums=1, budget="2MiB", gradient=True).tried)
sizes.append(statetx.max_batch(stateful, x, budget="2MiB").tried)
sizes.append(statetx.max_batch(stateful, x, budget="2MiB", states=states, gradient=True).tried)
fit = statetx.microbatch(loss, budget="2000KiB", argnums=1).fit(ws, x)
sizes.append((fit.num, fit.total_bytes, fit.tried))
try:
    statetx.microbatch(loss, budget="8KiB", argnums=1).fit(ws, x)
except statetx.PlanError as e:
    sizes.append(str(e))
print(num, sizes, sep="\\n")
"""


@pytest.mark.slow
def test_another_process_compiles_nothing_for_a_batch_or_a_number_of_parts(folder):
    (num, sizes), (again, same_sizes) = (in_a_process(SIZES, seed).splitlines() for seed in (1, 2))
    assert int(num) > 10 and int(again) == 0
    assert same_sizes == sizes


@pytest.mark.thorough
def test_bytes_are_found_by_what_the_compiler_gets(folder, compilations):
    def tried(fun=lambda x: jnp.tanh(x @ x.T).sum(), budget="64KiB", **options):
        compilations.clear()
        return statetx.max_batch(jax.jit(fun, **options), jax.ShapeDtypeStruct((8, 64), X.dtype), budget=budget).tried

    first = tried()
    assert compilations and len(entries(folder)) == len(first)
    assert tried(lambda y: jnp.tanh(y @ y.T).sum()) == first and not compilations
    assert set(tried(budget="128KiB")) & set(first) and 0 < len(compilations) < 4
    for other in (
        {"fun": lambda x: jnp.tanh(x @ x.T) + 1.0},
        {"compiler_options": {"xla_llvm_disable_expensive_passes": True}},
    ):
        tried(**other)
        assert len(compilations) >= 2
    for entry in entries(folder):
        entry.write_bytes(b"{")
    assert tried() == first and len(compilations) == len(first)


def test_plans_keep_no_arrays_alive():
    """Of a step, and of a loss that closes over an array. JAX's caches keep what the settings of a trace hold."""

    def make(fun_of):
        array = jnp.sin(jnp.arange(64.0))
        statetx.plan(fun_of(array), WS[0], jnp.ones((8, 32)), budget="1MiB")
        return weakref.ref(array)

    def loss_of(array):
        return lambda w, x: jnp.sum(jnp.where(array[None, :32] > 0, x @ w, 0.0) ** 2)

    kept = [make(loss_of), make(lambda array: jax.grad(loss_of(array)))]
    gc.collect()
    assert [ref() is None for ref in kept] == [True, True]


# -- files: written as a whole or not at all, and read only where that ends -------------------------------------------


@pytest.fixture
def fifo(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    return tmp_path / "fifo"


def test_read_refuses_what_has_no_end(tmp_path, fifo):
    (tmp_path / "file").write_bytes(b"12345")
    (tmp_path / "link").symlink_to("file")
    assert _files.read(tmp_path / "file", 5) == _files.read(tmp_path / "link", 5) == b"12345"
    with pytest.raises(ValueError, match="more than 4 B"):
        _files.read(tmp_path / "file", 4)
    for path in (fifo, "/dev/zero", tmp_path):
        with pytest.raises(ValueError, match="not a regular file"):
            _files.read(path, 5)
    with pytest.raises(ValueError, match="not a regular file"):
        _files.read(tmp_path / "link", 5, follow_links=False)
    with pytest.raises(FileNotFoundError):
        _files.read(tmp_path / "nothing", 5)


def test_read_refuses_a_pipe_that_takes_the_place_of_a_file(fifo, monkeypatch):
    status = os.stat(__file__)
    monkeypatch.setattr(os, "stat", lambda *_, **__: status)  # as it was before
    with pytest.raises(ValueError, match="not a regular file"):
        _files.read(fifo, 5)


def test_write_keeps_mode_and_link(tmp_path):
    path = tmp_path / "file"
    _files.write(path, "one")
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~_umask()
    path.chmod(0o640)
    (tmp_path / "link").symlink_to("file")
    _files.write(tmp_path / "link", b"two")
    assert path.read_text() == "two" and stat.S_IMODE(path.stat().st_mode) == 0o640
    assert (tmp_path / "link").is_symlink() and len(list(tmp_path.iterdir())) == 2


def _umask():
    mask = os.umask(0)
    os.umask(mask)
    return mask


@pytest.mark.parametrize("failing", ["write", "replace"])
def test_write_that_fails_leaves_the_old_file_alone(tmp_path, monkeypatch, failing):
    path = tmp_path / "file"
    path.write_text("one")
    if failing == "replace":
        monkeypatch.setattr(os, "replace", lambda *_: os.stat(tmp_path / "no space"))
        with pytest.raises(FileNotFoundError) as info:
            _files.write(path, "two")
        assert info.value.filename == str(path)  # the name that the user gave
    else:
        monkeypatch.setattr(os, "chmod", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            _files.write(path, "two")
    assert path.read_text() == "one" and [p.name for p in tmp_path.iterdir()] == ["file"]


def test_write_to_a_device_and_to_a_protected_file(tmp_path, monkeypatch):
    _files.write("/dev/null", "text")
    path = tmp_path / "file"
    path.write_text("one")
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(PermissionError, match="file"):
        _files.write(path, "two")
    assert path.read_text() == "one"


def test_temporary_names_are_known(tmp_path, monkeypatch):
    names = []
    monkeypatch.setattr(os, "replace", lambda a, b: names.append(os.path.basename(a)))
    _files.replace(tmp_path / "file", b"")
    assert re.fullmatch(_files.TEMPORARY, names[0])


@pytest.mark.parametrize("name, written", [("a.svg", "a.svg"), ("a", "a.png")])
def test_figures_have_the_format_of_their_suffix(tmp_path, name, written):
    figure = pytest.importorskip("matplotlib.figure").Figure()
    _files.write_figure(tmp_path / name, figure)
    (path,) = tmp_path.iterdir()
    assert path.name == written and path.read_bytes()[:5] == (b"<?xml" if name == "a.svg" else b"\x89PNG\r")


# -- records ---------------------------------------------------------------------------------------------------------


def load_entry(path):
    entry = path.parent / "plans" / f"{KEY}.json.gz"
    entry.parent.mkdir(exist_ok=True)
    entry.write_bytes(gzip.compress(path.read_bytes(), 1))
    assert _store.load(KEY, STORED_PLAN) is None
    raise ValueError  # a miss


READERS = {
    "Plan.load": (statetx.Plan.load, statetx.PlanError),
    "store": (load_entry, ValueError),
    "Target.load": (statetx.Target.load, statetx.TargetError),
    "memory baseline": (baseline.load, ValueError),
}


# Each step of a reader ends at a depth of its own, where Python's stack does.
@pytest.mark.parametrize("depths", [range(30, 50), range(930, 1000), [5000, 100_000]], ids=["few", "limit", "many"])
@pytest.mark.parametrize("name", READERS)
def test_depth_of_a_file_is_refused(tmp_path, monkeypatch, name, depths):
    monkeypatch.setenv("STATETX_CACHE", str(tmp_path))
    load, error = READERS[name]
    path = tmp_path / "file.json"
    for depth in depths:
        for field in ('"version": 1, "programs"', '"sha256": "", "a"'):
            path.write_bytes(b"{" + field.encode() + b": " + b"[" * depth + b"]" * depth + b"}")
            with pytest.raises(error):
                load(path)


def test_levels_are_counted_through_lists_and_objects():
    text = lambda num: b'{"a": [' * num + b"]}" * num
    assert _records.parse(text(20))
    with pytest.raises(ValueError, match="nested too deeply"):
        _records.parse(text(21))
    assert _records.parse(b'{"a": ' + b"[" + b"[], " * 1000 + b"[]]}")
