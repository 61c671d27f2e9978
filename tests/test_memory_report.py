"""`memory_report`: its figures against XLA's, and each diagnosis against a program that provokes it."""

import contextlib
import functools
import inspect
import io
import json
import math
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import statetx
from statetx import policies

barriers_are_dropped = pytest.mark.skipif(
    jax.__version_info__ >= (0, 11, 1) or jax.default_backend() != "cpu", reason="XLA respects the barrier"
)


class Block:
    def __init__(self, key, n=64, wrap=statetx.remat):
        self.w = statetx.Param(jax.random.normal(jax.random.key(key), (n, n)) / math.sqrt(n))
        self.v = statetx.Param(jax.random.normal(jax.random.key(key + 100), (n, n)) / math.sqrt(n))
        self.count = statetx.State(jnp.zeros((), jnp.int32))
        self.run = wrap(self.body)

    def body(self, x):
        self.count.value += 1
        h = statetx.checkpoint_name(jnp.tanh(x @ self.w.value), "hidden")
        unused = statetx.checkpoint_name(h + 1.0, "linear")
        return x + jnp.sin(unused @ self.v.value)

    def loop(self, x):
        return statetx.scan(lambda h, _: (self.run(h), None), x, None, length=12)[0].sum()


class Stack:
    """Unrolled layers."""

    def __init__(self, wrap=statetx.remat):
        self.blocks = [Block(k, wrap=wrap) for k in range(5)]

    def __call__(self, x):
        for block in self.blocks:
            x = block.run(x)
        return (x**2).mean()


X = jnp.ones((128, 64))


def tell_temp_bytes(monkeypatch, num_bytes):
    """Have XLA tell this size of the temporaries of each compiled program."""
    analysis = jax.stages.Compiled.memory_analysis

    class Told:
        def __init__(self, memory):
            self._memory, self.temp_size_in_bytes = memory, num_bytes

        def __getattr__(self, name):
            return getattr(self._memory, name)

    monkeypatch.setattr(jax.stages.Compiled, "memory_analysis", lambda compiled: Told(analysis(compiled)))


def kinds(report, policy=None):
    return {d.category for d in report.diagnoses if policy is None or d.policy == policy}


def test_report_of_a_loop():
    block = Block(0)
    report = statetx.memory_report(block.loop, X, policies=[None, "dots", policies.names("hidden")])
    assert [row.policy for row in report.rows] == ["no remat", "nothing", "dots", "names('hidden')"]
    assert not report.diagnoses
    none, nothing, dots, names = report.rows
    layer = X.nbytes * 12
    assert nothing.residuals.intermediate_bytes == layer  # the carry of each step
    assert dots.residuals.intermediate_bytes == 3 * layer and names.residuals.intermediate_bytes == 2 * layer
    assert none.residual_bytes > dots.residual_bytes > names.residual_bytes > nothing.residual_bytes
    assert none.temp_bytes > dots.temp_bytes > names.temp_bytes > nothing.temp_bytes
    matmul = 2 * 128 * 64 * 64 * 12
    # Forward 2 products and backward 4 of them; without the policy both are computed again, with it none is.
    assert 6 * matmul < none.flops < 6.5 * matmul
    assert nothing.flops - none.flops > 2 * matmul > dots.flops - none.flops
    assert int(block.count.value) == 0
    assert report["dots"] is dots
    with pytest.raises(KeyError, match="there are .*no remat"):
        report["dotss"]


def test_report_takes_one_policy_or_several():
    block = statetx.remat(lambda x: jnp.sin(jnp.tanh(x @ jnp.eye(64))))
    for one in ("dots", policies.dots):
        rows = statetx.memory_report(lambda x: block(x).sum(), X, policies=one).rows
        assert [row.policy for row in rows] == ["no remat", "dots"]


def test_report_equals_the_compiled_program():
    block = Block(0)

    def step(w, v, x):
        def loss(w, v, x):
            body = jax.checkpoint(lambda h: h + jnp.sin((jnp.tanh(h @ w) + 1.0) @ v))
            return jax.lax.scan(lambda h, _: (body(h), None), x, None, length=12)[0].sum()

        return jax.value_and_grad(loss, (0, 1, 2))(w, v, x)

    compiled = jax.jit(step).lower(block.w.value, block.v.value, X).compile()
    row = statetx.memory_report(block.loop, X)["as written"]
    assert abs(row.temp_bytes / compiled.memory_analysis().temp_size_in_bytes - 1) < 0.01
    assert row.argument_bytes == compiled.memory_analysis().argument_size_in_bytes + 4  # the counter
    assert row.seconds is None


def test_function_without_remat_is_rematerialized_as_a_whole():
    report = statetx.memory_report(Block(0, wrap=lambda f: f).body, X, policies=[None])
    assert report["nothing"].residuals.intermediate_bytes == 0 < report["no remat"].residuals.intermediate_bytes


@pytest.mark.parametrize("holds_states", [True, False], ids=["states", "arrays"])
def test_measured_outputs_are_those_of_the_jitted_step(holds_states):
    # A state that is only read, here a frozen weight of 1 MiB, is an argument and no output.
    frozen, adapter, count = (statetx.State(x) for x in (jnp.ones((512, 512)), jnp.ones((512, 4)), jnp.ones((64, 64))))

    def plain(w, a, n, x):
        value, grad = jax.value_and_grad(lambda a: ((x @ w @ a) ** 2).mean())(a)
        return value, grad, n + 1

    def step(x):
        value, grad, count.value = plain(frozen.value, adapter.value, count.value, x)
        return value, grad

    x = jnp.ones((8, 512))
    values = [s.value for s in (frozen, adapter, count)]
    cost = statetx.measure(*((step,) if holds_states else (plain, *values)), x, gradient=False)
    memory = jax.jit(plain).lower(*values, x).compile().memory_analysis()
    expected = (memory.argument_size_in_bytes, memory.output_size_in_bytes, memory.temp_size_in_bytes)
    assert (cost.argument_bytes, cost.output_bytes, cost.temp_bytes) == expected
    jitted = statetx.jit(step).lower(x).compile().memory_analysis()
    assert cost.output_bytes == jitted.output_size_in_bytes


@pytest.mark.parametrize("jit", [jax.jit, statetx.jit], ids=["jax", "statetx"])
def test_measured_step_counts_donated_arguments_once(jit):
    step = jit(lambda w, x: (w - x @ x.T, x.sum()), donate_argnums=0)
    w, x = jnp.ones((64, 64)), jnp.ones((64, 32))
    cost, memory = statetx.measure(step, w, x, gradient=False), jax.jit(step, donate_argnums=0).lower(w, x).compile()
    assert cost.alias_bytes == w.nbytes == memory.memory_analysis().alias_size_in_bytes
    assert cost.fixed_bytes == cost.argument_bytes + cost.output_bytes - w.nbytes
    assert statetx.measure(step, w, x).alias_bytes == 0


def test_measured_gradient_returns_each_array_once():
    frozen, count = statetx.State(jnp.ones((64, 64), jnp.int32)), statetx.State(jnp.ones((64, 64)))

    def model(x):
        count.value += 1
        return jnp.tanh(x * count.value) * frozen.value, {"steps": frozen.value + 1, "name": "model"}

    x = jnp.ones((64, 64))
    # The float output, the other one, the written state, and the gradients for x and the count.
    num_pointers = 5
    assert statetx.measure(model, x).output_bytes == 5 * x.nbytes + 8 * num_pointers
    assert statetx.measure(model, x).argument_bytes == 3 * x.nbytes


def test_measure_counts_a_state_of_several_arrays_as_a_whole():
    # As in a jitted step: a written state is returned with all of its arrays, a state that is read with none.
    written, read = (statetx.State({"a": jnp.ones(512), "b": jnp.ones(2048)}) for _ in range(2))

    def step(x):
        written.value = {**written.value, "a": x * read.value["a"]}

    cost, memory = statetx.measure(step, 2.0, gradient=False), statetx.jit(step).lower(2.0).compile().memory_analysis()
    assert cost.output_bytes == memory.output_size_in_bytes > 10_000


def test_cost_has_units_as_text_and_as_html():
    cost = statetx.measure(lambda x: jnp.sum(jnp.tanh(x)), jnp.ones((256, 1024)))
    for text in (str(cost), cost._repr_html_()):
        assert all(
            word in text for word in ("1.0 MiB", "operations", "temporaries", f"{cost.peak_bytes / 2**20:.1f} MiB")
        )


@pytest.mark.thorough
def test_report_without_remat_says_so_and_names_the_blocks_with_their_bytes():
    blocks = [Block(i, wrap=lambda f: f) for i in range(3)]
    scale = statetx.Param(jnp.ones(()))

    def loss(x):
        for block in blocks:
            x = block.body(x)
        return jnp.sin(x * scale.value).sum()

    report = statetx.memory_report(loss, X)
    assert [row.policy for row in report.rows] == ["no remat", "remat(loss)"]
    first = report.diagnoses[0]
    assert first.category == "nothing is rematerialized" and "No function in loss is rematerialized" in first.text
    kept = sum(r.nbytes for r in report["no remat"].residuals if r.primitive and r.module.startswith("blocks."))
    assert f"Most is kept by blocks.* ({kept / 2**10:.1f} KiB in 3 blocks)" in first.text
    wrapped = statetx.memory_report(statetx.remat(loss), X)
    assert "nothing is rematerialized" not in kinds(wrapped)


def test_report_without_remat_advises_checkpoint_for_a_loop():
    w = statetx.Param(jnp.eye(4))

    def loss(xs):
        return statetx.scan(lambda h, x: (jnp.tanh(h @ w.value + x), None), jnp.zeros(4), xs)[0].sum()

    text = statetx.memory_report(loss, jnp.ones((64, 4))).diagnoses[0].text
    assert "checkpoint='auto'" in text and "repeated blocks" not in text


CHECKPOINTED = {  # the programs, and what the report says that they checkpoint
    "scan": "scan with checkpoint='auto'",
    "slots": "fori_loop with checkpoint=Slots(8)",
    "blocks": "block under jax.checkpoint (6 times)",
    "blocks in a loop": "block under jax.checkpoint",
}


def checkpointed(case, is_plain):
    """A loss that checkpoints without `remat`, or the same without checkpointing."""
    strategy = {"scan": "auto", "slots": policies.Slots(8)}.get(case)
    options = {} if is_plain or strategy is None else {"checkpoint": strategy}
    wrap = (lambda f: f) if is_plain or strategy is not None else jax.checkpoint

    def block(w, x):
        return jnp.sin(jnp.tanh(x @ w))

    def loss(w, x):
        if case == "blocks":
            for _ in range(6):
                x = wrap(block)(w, x)
        elif case == "slots":
            x = statetx.fori_loop(0, 200, lambda i, x: block(w, x), x, **options)
        else:
            x = statetx.scan(lambda x, _: (wrap(block)(w, x), None), x, None, 200, **options)[0]
        return jnp.mean(x**2)

    return loss


@pytest.mark.sample
@pytest.mark.parametrize("is_step", [False, True])
@pytest.mark.parametrize("case", CHECKPOINTED)
def test_baseline_has_loops_plain_and_nothing_under_jax_checkpoint(case, is_step):
    args = jnp.eye(64) / 2, jnp.ones((64, 64))
    losses = [checkpointed(case, is_plain) for is_plain in (False, True)]
    fun, plain = [statetx.grad(loss) for loss in losses] if is_step else losses
    report = statetx.memory_report(fun, *args)
    assert [row.policy for row in report.rows] == ["no remat", "as written"] and report.is_step == is_step
    for row, f in zip(report.rows, (plain, fun), strict=True):
        cost = statetx.measure(f, *args)
        assert (row.flops, row.temp_bytes) == (cost.flops, cost.temp_bytes)
    assert 2 * report["as written"].residual_bytes < report["no remat"].residual_bytes
    text = str(report)
    assert f"Checkpointed: {CHECKPOINTED[case]}." in text and "nothing is rematerialized" not in text
    assert ("statetx.loop_report(" in text) == (case in ("scan", "slots"))
    assert report.to_dict()["notes"][0].startswith("Checkpointed:")


@barriers_are_dropped
def test_barrier_of_jax_checkpoint_is_said_to_need_remat():
    report = statetx.memory_report(checkpointed("blocks", False), jnp.eye(64) / 2, jnp.ones((4096, 64)))
    assert kinds(report) == {"barrier ignored"} and "Use statetx.remat in place of jax.checkpoint" in str(report)


def test_truncated_loops_stay_truncated():
    """Their gradient is another one."""
    from statetx import Truncated

    loss = lambda x: statetx.scan(lambda h, _: (jnp.sin(h), None), x, None, 64, checkpoint=Truncated(8))[0].sum()
    report = statetx.memory_report(loss, jnp.ones(512))
    assert "Checkpointed" not in str(report)


def test_figure_of_xla_below_the_largest_value_is_not_believed(monkeypatch):
    """XLA told of a rematerialized U-Net, whose largest value has 65,536 bytes, that it takes 3,160."""
    loss, args = checkpointed("scan", True), (jnp.eye(64) / 2, jnp.ones((64, 64)))
    expected = statetx.measure(loss, *args).temp_bytes
    tell_temp_bytes(monkeypatch, 3160)
    assert expected > 64 * 64 * 4 and statetx.measure(loss, *args).temp_bytes == expected
    assert statetx.memory_profile(loss, *args).temp_bytes == expected
    assert statetx.measure(jnp.sum, jnp.ones(4), gradient=False).temp_bytes == 3160, (
        "no value of this program is larger"
    )


def test_owners_and_lines_are_those_of_the_memory_profile():
    model = Stack(lambda f: f)
    profile = statetx.memory_profile(model, X)
    residuals = statetx.saved_residuals(model, X)
    line = lambda source: source.rpartition("/")[2]
    groups = {(g.owner, line(g.source), g.function) for g in profile.at_peak if g.kind == "residual"}
    assert len(groups) > 3 and groups <= {(r.module, line(r.source), r.function) for r in residuals}
    # The owner of a row of a plan is a line and its function.
    rows = {line(row.owner) for row in statetx.plan(model, X, budget=0.9, of="temporaries", time_limit=0).rows}
    assert {f"{source} ({function})" for _, source, function in groups} <= rows


# -- one program for each diagnosis --------------------------------------------------------------------------------


def test_diagnosis_nothing_to_drop():
    linear = statetx.remat(lambda x, w: x @ w)

    def loss(x, w):
        return statetx.scan(lambda h, _: (jnp.sin(jnp.tanh(linear(h, w))), None), x, None, length=12)[0].sum()

    report = statetx.memory_report(loss, X, jnp.eye(64))
    assert kinds(report) == {"nothing to drop"}
    assert "compute nothing that the backward pass needs" in str(report)


def test_diagnosis_inputs_dominate():
    first, second = statetx.remat(jnp.sin), statetx.remat(jnp.cos)

    def loss(x):
        def step(h, _):
            return second(first(h)), None

        return statetx.scan(step, x, None, length=12)[0].sum()

    report = statetx.memory_report(loss, X)
    assert kinds(report) == {"inputs dominate"}
    assert "Rematerialize larger functions" in str(report)


def test_diagnosis_policy_saves_everything():
    report = statetx.memory_report(Block(0).loop, X, policies=[policies.everything, None])
    assert kinds(report, "everything") == {"policy keeps it"} and not kinds(report, "nothing")


def test_diagnosis_merged_back():
    report = statetx.memory_report(Stack(lambda f: statetx.remat(f, prevent_cse=False)), X)
    assert kinds(report) == {"merged back"}
    assert "prevent_cse is False (or fence None) for Block.body" in str(report)


@barriers_are_dropped
def test_diagnosis_barrier_ignored():
    stack = Stack(lambda f: statetx.remat(f, fence="barrier"))
    report = statetx.memory_report(stack, X)
    assert kinds(report) == {"barrier ignored"}
    assert "cse_barrier_expander" in str(report) and "Leave fence= at 'auto'" in str(report)
    respected = statetx.memory_report(stack, X, compiler_options={"xla_disable_hlo_passes": "cse_barrier_expander"})
    assert not respected.diagnoses
    assert respected["as written"].temp_bytes < 0.7 * respected["no remat"].temp_bytes


@barriers_are_dropped
def test_barrier_is_not_blamed_for_products_that_xla_does_not_count(monkeypatch):
    """As on GPUs: products are calls of a library there, and XLA counts no operations in them (jax-ml/jax#22249)."""
    monkeypatch.setattr(jax.stages.Compiled, "cost_analysis", lambda compiled: {"flops": 1000.0})
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    report = statetx.memory_report(Stack(lambda f: statetx.remat(f, fence="barrier")), X)
    assert kinds(report) == {"peak elsewhere"}


@pytest.mark.parametrize("size", [4, 32])
def test_barrier_is_not_blamed_for_the_bytes_of_the_fence(size):
    report = statetx.memory_report(statetx.remat(lambda x: jnp.sum((jnp.sin(x) * 2.0) ** 2)), jnp.ones(size))
    assert kinds(report) == {"peak elsewhere"}


@pytest.mark.parametrize("is_loop", [pytest.param(False, marks=barriers_are_dropped), True])
def test_barrier_is_not_blamed_for_a_loop(is_loop, monkeypatch):
    """XLA counts the operations of a loop's body once, so that fewer than the equations have are no sign of a removed
    barrier.
    """
    monkeypatch.setattr(jax.stages.Compiled, "cost_analysis", lambda compiled: {"flops": 1000.0})
    if is_loop:  # whose memory would fall
        tell_temp_bytes(monkeypatch, 2**20)
    block = Block(0, wrap=lambda f: statetx.remat(f, fence="barrier"))
    report = statetx.memory_report(block.loop if is_loop else Stack(lambda f: statetx.remat(f, fence="barrier")), X)
    assert kinds(report) == {"peak elsewhere" if is_loop else "barrier ignored"}


def test_most_is_kept_by_modules_only_if_they_keep_half():
    w = statetx.Param(jnp.ones(32))
    small = {"layer": Holder(w)}

    def loss(xs):
        def cell(c, x):
            return jnp.tanh(jnp.sin(jnp.cos(c)) + jnp.abs(small["layer"].w.value).sum() + x), None

        return statetx.scan(cell, jnp.zeros((8, 32)), xs)[0].sum()

    (text,) = [d.text for d in statetx.memory_report(loss, jnp.ones(100)).diagnoses if "nothing is" in d.category]
    assert "Most is kept by cell (" in text and "layer" not in text


class Holder:
    def __init__(self, w):
        self.w = w


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="figures of XLA on a CPU")
def test_diagnosis_peak_elsewhere():
    """All layers are recomputed at once, in a loop, where nothing is merged back."""

    def loss(x):
        def step(h, _):
            return whole(h), None

        return statetx.scan(step, x, None, length=1)[0].sum()

    @statetx.remat
    def whole(h):
        return statetx.scan(lambda h, _: (block.body(h), None), h, None, length=12)[0]

    block = Block(0)
    report = statetx.memory_report(loss, X)
    assert kinds(report) == {"peak elsewhere"}
    assert "Rematerialize smaller parts" in str(report)


def test_diagnosis_no_residual():
    @statetx.remat(policy=policies.names("linear"))
    def block(x, w):
        return jnp.tanh(x) + statetx.checkpoint_name(x * 2.0 + w, "linear")

    def loss(x, w):
        return statetx.scan(lambda h, _: (block(h, w), None), x, None, length=12)[0].sum()

    report = statetx.memory_report(loss, X, X)
    assert "no residual" in kinds(report)
    assert "The value 'linear' is computed, but the backward pass does not need it" in str(report)


def test_diagnosis_unmatched():
    tried = [policies.names("hiden", missing="ignore"), jax.checkpoint_policies.save_only_these_names("hiden")]
    report = statetx.memory_report(Block(0).loop, X, policies=tried)
    for row in report.rows[1:]:
        assert kinds(report, row.policy) == {"unmatched"}
    assert "In Block.body no value has the name 'hiden'. Did you mean 'hidden'?" in str(report)


# -- how it looks --------------------------------------------------------------------------------------------------


@barriers_are_dropped
def test_shown_as_text_html_and_rich():
    from rich.console import Console

    report = statetx.memory_report(Stack(lambda f: statetx.remat(f, fence="barrier")), X)
    lines = str(report).splitlines()
    assert (
        lines[1].split()[:3] == ["policy", "residuals", "temporary"]
        and len(lines) == 8
        and "barrier ignored" in lines[-3]
        and lines[-2].startswith("Checkpointed: remat(Block.body) (5 times).")
        and lines[-1].startswith("More: statetx.memory_profile(fun, ...)")
    )
    html = report._repr_html_()
    assert html.count("<tr>") == 3 and "barrier ignored" in html
    console = Console(record=True, width=140, file=io.StringIO())
    console.print(report)
    text = console.export_text()
    assert "no remat" in text and "barrier ignored" in text
    console = Console(record=True, width=60, file=io.StringIO())
    console.print(report)
    header, _, *rows = console.export_text().splitlines()[1:5]
    assert header.split() == ["policy", "temporary", "vs", "none", "FLOPs", "vs", "none"], "whole columns are left out"
    assert rows[0].split()[:2] == ["no", "remat"]
    again = json.loads(json.dumps(report.to_dict()))
    assert again["rows"][1]["temp_bytes"] == report["as written"].temp_bytes


@pytest.mark.parametrize("format", ["bits", "bfloat16"])
def test_values_stored_in_fewer_bits_are_shown(format):
    block = statetx.remat(lambda x, w: jnp.sin(jnp.sin(x) @ w), inputs_stored_as=(format, None))

    def loss(x, w):
        for _ in range(3):
            x = block(x, w)
        return x.sum()

    x, w = jnp.ones((8, 64)), jnp.ones((64, 64))
    report = statetx.memory_report(loss, x, w)
    (row, *_) = [r for r in statetx.saved_residuals(loss, x, w) if r.stored_as]
    assert f"as written: residuals in fewer bits: 3 x {row.type} for f32." in str(report)
    assert f"{row.type} for f32" in str(row)
    assert "fewer bits" not in str(statetx.memory_report(statetx.remat(jnp.sum), x))


@pytest.mark.skipif(len(jax.devices()) < 8, reason="needs 8 devices; conftest asks for them")
def test_sizes_on_a_mesh_are_labeled_per_device():
    mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    place = lambda x, *spec: jax.device_put(x, jax.NamedSharding(mesh, jax.P(*spec)))
    block = Block(0)
    for state in statetx.states(block).values():
        state.value = place(state.value)
    reports = [statetx.memory_report(block.loop, x) for x in (X, place(X, "d"))]
    alone, divided = ([r.residual_bytes for r in report.rows] for report in reports)
    assert alone == divided, "of whole arrays"
    row, base = reports[1]["as written"], reports[0]["as written"]
    weights = 2 * 64 * 64 * 4 + 4
    assert base.argument_bytes == X.nbytes + weights and row.argument_bytes == X.nbytes // 8 + weights
    assert row.temp_bytes < base.temp_bytes / 2
    title = str(reports[1]).partition("\n")[0]
    assert title == "Block.loop: value and gradient on 8 devices; residuals of all devices, other figures of one"
    assert reports[1].to_dict()["num_devices"] == 8
    assert row.flops == pytest.approx(base.flops / 8, abs=1)


@pytest.mark.skipif(len(jax.devices()) < 8, reason="needs 8 devices; conftest asks for them")
def test_operations_are_of_one_device():
    mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    x = jax.device_put(jnp.ones((64, 16)), jax.NamedSharding(mesh, jax.P("d")))
    product = lambda x: jnp.sin(x @ jnp.ones((16, 16)))
    mapped = jax.shard_map(product, mesh=mesh, in_specs=jax.P("d"), out_specs=jax.P("d"))
    calls = (product, np.ones((64, 16))), (product, x), (mapped, x)
    costs = [statetx.measure(f, y, gradient=False) for f, y in calls]
    assert [cost.flops * 8 for cost in costs[1:]] == [costs[0].flops] * 2
    assert costs[1].compiled_flops == pytest.approx(costs[1].flops, rel=0.2)
    replicated = statetx.measure(product, jax.device_put(x, jax.NamedSharding(mesh, jax.P())), gradient=False)
    assert replicated.flops == costs[0].flops and replicated.compiled_flops == pytest.approx(costs[0].flops, rel=0.2)


@pytest.mark.skipif(len(jax.devices()) < 8, reason="needs 8 devices; conftest asks for them")
def test_gradient_taken_inside_of_shard_map():
    mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    gradient = jax.grad(lambda w, x: jax.lax.pmean((jnp.sin(x @ w) ** 2).mean(), "d"))
    step = jax.shard_map(gradient, mesh=mesh, in_specs=(jax.P(), jax.P("d")), out_specs=jax.P())
    assert statetx.memory_report(step, jnp.ones((16, 4)), jnp.ones((64, 16))).rows[0].residual_bytes > 0


def test_operations_that_xla_does_not_tell_are_none(monkeypatch):
    monkeypatch.setattr(jax.stages.Compiled, "cost_analysis", lambda self: None)
    step = statetx.remat(lambda x: jnp.sin(jnp.sin(x)).sum())
    assert statetx.measure(step, jnp.ones(64)).compiled_flops is None
    assert statetx.memory_report(step, jnp.ones(64)).rows[1].compiled_flops is None


def test_report_leaves_donated_arrays_and_states():
    w, v = statetx.Param(jnp.eye(8)), jnp.ones((8, 8))

    @functools.partial(statetx.jit, donate_states=True, donate_argnums=0)
    def step(v):
        loss, grads = statetx.value_and_grad(lambda v: jnp.sum(jnp.tanh(v @ w.value)), wrt=w)(v)
        w.value = w.value - 0.1 * grads
        return v + loss

    report = statetx.memory_report(step, v)
    assert report.rows[0].alias_bytes > 0
    np.testing.assert_array_equal(w.value, jnp.eye(8))
    assert not v.is_deleted() and step(v).shape == (8, 8)


def test_policies_of_one_name_have_rows_of_their_own():
    f = lambda x: statetx.remat(lambda x: jnp.sin(jnp.cos(x @ x)).sum())(x)
    report = statetx.memory_report(f, jnp.ones((8, 8)), policies=[lambda *_, **__: True, lambda *_, **__: False])
    assert len(report.rows) == 3 and len({row.policy for row in report.rows}) == 3
    assert report.rows[1].residual_bytes > report.rows[2].residual_bytes


@pytest.mark.parametrize(
    ("fun", "expected"),
    [(statetx.memory_report, ["compiling no remat", "compiling as written"]), (statetx.memory_profile, ["compiling"])],
)
def test_progress_tells_what_is_compiled(fun, expected, monkeypatch):
    told = []
    module = sys.modules[inspect.unwrap(fun).__module__]
    monkeypatch.setattr(module, "spinner", lambda what, is_shown: contextlib.nullcontext(told.append))
    loss = lambda w: (statetx.remat(jnp.sin)(w @ w)).sum()
    fun(loss, jnp.eye(4), progress=True)
    assert told == expected
    with pytest.raises(TypeError, match="progress= must be True or False"):
        fun(loss, jnp.eye(4), progress="yes")


@pytest.mark.parametrize("is_terminal", [False, True])
def test_progress_is_shown_on_a_terminal(is_terminal, monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    statetx.memory_profile(jnp.sin, jnp.eye(4))
    assert bool(capsys.readouterr().out) == is_terminal
