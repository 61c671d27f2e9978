"""Programs compiled for GPUs and TPUs that are not there (`make test-targets`): what the library says of such devices,
checked on every commit.
"""

import collections
import dataclasses
import functools
import importlib.util
import pathlib
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import statetx
from statetx import Target, TargetError, policies
from statetx._equations import compiler as _compiler
from statetx._equations.compiled import Program
from statetx._targets import plugins

pytestmark = [
    pytest.mark.targets,
    pytest.mark.skipif(
        bool(Target("h100").missing or Target("tpu v5e").missing), reason="no compilers for GPUs and TPUs"
    ),
]
DEVICES = ["h100", "a100-40gb", "tpu v5e"]


def f32(*shape, sharding=None):
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)


# A compilation for a TPU takes seconds, the more the wider the products; arrays are larger than the memory of its core.
WEIGHTS, X = [f32(128, 128)] * 3, f32(131072, 128)


def blocks(ws, x, wrap=lambda f: f):
    """Each block keeps two arrays of 64 MiB; with remat one."""
    for w in ws:
        x = wrap(lambda x, w=w: jnp.cos(jnp.sin(jnp.tanh(x @ w))))(x)
    return jnp.mean(x**2)


WIDE, ROWS = [f32(512, 512)] * 4, f32(8192, 512)


def wide(ws, x, wrap=lambda f: f):
    """Products take longer than reading and writing."""
    for w in ws:
        x = wrap(lambda x, w=w: jnp.sin(jnp.tanh(x @ w) @ w.T))(x)
    return jnp.mean(x**2)


def temp(fun, *args, **options):
    return statetx.measure(fun, *args, **options).temp_bytes


@pytest.mark.parametrize("device", DEVICES)
def test_remat_of_unrolled_blocks_lowers_the_memory(device):
    """Without the branch that CPUs need."""
    fun, *args = (blocks, WEIGHTS, X) if "tpu" in device else (wide, WIDE, ROWS)
    with statetx.target(device):
        plain, rematerialized, by_jax = (
            temp(lambda ws, x, wrap=wrap: fun(ws, x, wrap), *args)
            for wrap in (lambda f: f, statetx.remat, jax.checkpoint)
        )
    assert rematerialized <= 0.75 * plain and rematerialized <= 1.02 * by_jax


@pytest.mark.parametrize("device, unroll", [("h100", 1), ("h100", 2), ("tpu v5e", 1)])
def test_remat_of_recurrent_layers_lowers_the_memory(device, unroll):
    """Each layer keeps three sequences of 16 MiB; with remat one, and those of one layer at a time."""

    def layer(w, xs):
        step = lambda h, x: (jnp.sin(jnp.tanh(h @ w["a"] + x @ w["b"])),) * 2
        return jax.lax.scan(step, jnp.zeros(xs.shape[1:]), xs, unroll=unroll)[1]

    def loss(wrapped, ws, xs):
        for w in ws:
            xs = wrapped(w, xs)
        return jnp.mean(xs**2)

    args = [dict.fromkeys("ab", f32(64, 64))] * 8, f32(256, 256, 64)
    with statetx.target(device):
        plain, remat = (temp(functools.partial(loss, f), *args) for f in (layer, statetx.remat(layer)))
    assert remat < 0.5 * plain


def test_memory_of_recurrent_layers_is_as_written():
    """In the README and in decision 56."""
    steps, batch, width = 512, 64, 256

    def layer(w, xs):
        def step(h, x):
            z = jax.nn.sigmoid(x @ w["a"] + h @ w["b"])
            h = (1 - z) * h + z * jnp.tanh(x @ w["c"] + (z * h) @ w["d"])
            return h, h

        return jax.lax.scan(step, jnp.zeros((batch, width)), xs)[1]

    def loss(wrapped, ws, xs):
        for w in ws:
            xs = wrapped(w, xs)
        return jnp.mean(xs**2)

    args = [dict.fromkeys("abcd", f32(width, width))] * 8, f32(steps, batch, width)
    figures = []
    for way in (layer, jax.checkpoint(layer), statetx.remat(layer)):
        gradient = jax.value_and_grad(functools.partial(loss, way))
        figures.append(f"{temp(gradient, *args, gradient=False, target='h100') / 1e6:,.0f} MB")
    root = pathlib.Path(__file__).parent.parent
    readme, decision = (root / "README.md").read_text(), next(root.glob("docs/decisions/0056-*")).read_text()
    written = re.search("eight recurrent layers.* take (.*), (.*) under `jax.checkpoint`, and (.*) under `sta", readme)
    assert written is not None and figures == [*written.groups()]
    assert all(text in decision for text in (*figures, f"({steps} steps, batch {batch}, width {width})"))


@pytest.mark.parametrize("device", DEVICES)
def test_profile_sums_to_the_figures_of_the_compiler(device):
    profile = statetx.memory_profile(blocks, WEIGHTS, X, target=device)
    cost = statetx.measure(blocks, WEIGHTS, X, target=device)
    assert profile.backend == Target(device).platform and profile.temp_bytes == cost.temp_bytes
    assert profile.peak_bytes == cost.peak_bytes and profile.note == ""
    assert sum(group.num_bytes for group in profile.at_peak) + profile.unused_bytes == profile.peak_bytes
    assert 0 <= profile.unused_bytes <= 0.15 * profile.peak_bytes, "no value counts that has no memory of its own there"


def test_kernels_are_assembled_once():
    """Half of a compilation for a GPU: programs of other numbers of layers have the same kernels."""

    def known_bytes():
        with plugins.kernel_file() as path:
            return pathlib.Path(path).stat().st_size

    def compiled(num):
        return temp(wide, [WIDE[0]] * num, f32(64, 512), target="h100")

    compiled(4)
    before = known_bytes()
    assert compiled(5) > 0 and known_bytes() == before > 0


@pytest.mark.parametrize("device", ["h100", "tpu v5e"])
def test_plan_keeps_its_budget_in_the_users_program(device):
    with statetx.target(device):
        unplanned = statetx.measure(blocks, WEIGHTS, X)
        plan = statetx.plan(blocks, WEIGHTS, X, budget=0.85)
        gradient = jax.grad(plan.apply(blocks), argnums=(0, 1))
        users = statetx.measure(lambda ws, x: gradient(ws, x), WEIGHTS, X, gradient=False)
    assert users.peak_bytes <= 0.85 * unplanned.peak_bytes and plan.extra_flops < 0.35


def test_plans_for_a_target_are_stored(tmp_path, monkeypatch):
    monkeypatch.setenv("STATETX_CACHE", str(tmp_path))
    plans = [
        statetx.plan(blocks, WEIGHTS[:1], X, budget=1.0, target=device) for device in ("h100", "h100", "a100-40gb")
    ]
    assert str(plans[0]) == str(plans[1]) and len(list((tmp_path / "plans").iterdir())) == 2


def test_budget_that_is_too_small_for_a_target():
    with pytest.raises(statetx.PlanError, match="64.0 KiB"):
        statetx.plan(blocks, WEIGHTS[:1], X, budget="64KiB", target="h100")


def gru_loss(w, xs, checkpoint=None):
    def step(h, x):
        h = jnp.tanh(h @ w + x)
        return h, (h**2).mean()

    return statetx.scan(step, jnp.zeros(xs.shape[1:]), xs, checkpoint=checkpoint)[1].mean()


@pytest.mark.parametrize("device", ["h100", "tpu v5e"])
def test_checkpointed_loops_take_a_fraction(device):
    args = f32(128, 128), f32(1024, 512, 128)
    with statetx.target(device):
        plain = temp(gru_loss, *args)
        for strategy in (policies.Levels(2), policies.Slots(16), "auto"):
            assert temp(lambda w, xs, s=strategy: gru_loss(w, xs, s), *args) < 0.7 * plain


def test_sizes_take_loops_of_known_length_on_gpus():
    """XLA waits for a GPU before each turn of a loop of unknown length; on CPUs slots have one."""
    args = f32(128, 128), f32(1024, 512, 128)

    def has_unknown_length(device):
        with statetx.target(device):
            jaxpr = jax.make_jaxpr(jax.grad(lambda w, xs: gru_loss(w, xs, "auto")))(*args)
        return "while[" in str(jaxpr).replace(" ", "")

    assert not has_unknown_length("h100") and has_unknown_length(None)


@pytest.mark.parametrize("device", ["h100", "tpu v5e"])
def test_offloaded_carries_leave_the_memory_of_the_device(device):
    args = f32(128, 128), f32(64, 16384, 128)

    def loss(w, xs, offload):
        def step(h, x):
            h = jnp.tanh(h @ w + x)
            return h, (h**2).mean()

        strategy = policies.Levels(1, offload=offload)
        return statetx.scan(step, jnp.zeros((16384, 128)), xs, checkpoint=strategy)[1].mean()

    with statetx.target(device):
        on_device, offloaded = (temp(lambda w, xs, o=o: loss(w, xs, o), *args) for o in (False, True))
    assert offloaded < 0.5 * on_device


@pytest.mark.parametrize(
    "device, axis_type",
    [
        *((device, axis_type) for device in ("h100:8", "h100:2x4") for axis_type in (AxisType.Auto, AxisType.Explicit)),
        ("tpu v5e:2x4", AxisType.Auto),
    ],
)
def test_sharded_program_is_compiled_for_as_many_devices(device, axis_type):
    """A mesh of this machine's eight CPU devices; arguments are one device's."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(axis_type,))
    x = f32(*X.shape, sharding=NamedSharding(mesh, PartitionSpec("data")))
    weights = [f32(*w.shape, sharding=NamedSharding(mesh, PartitionSpec())) for w in WEIGHTS]
    with jax.set_mesh(mesh):
        cost = statetx.measure(blocks, weights, x, target=device)
    alone = statetx.measure(blocks, WEIGHTS, X, target=device.partition(":")[0])
    assert cost.argument_bytes == 3 * 2**16 + 8 * 2**20 and cost.temp_bytes < 0.25 * alone.temp_bytes


def test_abstract_mesh():
    mesh = jax.sharding.AbstractMesh((8,), ("data",), axis_types=(AxisType.Auto,))
    x = f32(8192, 512, sharding=NamedSharding(mesh, PartitionSpec("data")))
    assert statetx.measure(lambda x: jnp.sin(x).sum(), x, target="h100:8").argument_bytes == 2 * 2**20


def attention(weights, x, explicit, wrap=lambda f: f):
    """Blocks whose weights are gathered over "data" (FSDP) and whose heads are divided over "model" (tensor
    parallelism).
    """
    place = jax.sharding.reshard if explicit else jax.lax.with_sharding_constraint
    rows = PartitionSpec("data", None, None)
    summed = {"out_sharding": rows} if explicit else {}

    @wrap
    def block(w, x):
        y = jnp.einsum("btw,whd->bthd", x, place(w["in"], PartitionSpec(None, "model", None)))
        scores = jax.nn.softmax(jnp.einsum("bthd,bshd->bhts", y, y))
        y = jnp.einsum("bhts,bshd->bthd", scores, y)
        out = place(w["out"], PartitionSpec("model", None, None))
        return x + place(jnp.einsum("bthd,hdw->btw", y, out, **summed), rows)

    for w in weights:
        x = block(w, x)
    return jnp.mean(x**2)


@pytest.mark.parametrize("device, axis_type", [("h100:8", AxisType.Auto), ("h100:2x8", AxisType.Explicit)])
def test_plan_of_a_program_on_an_abstract_mesh(device, axis_type):
    """Also of sixteen devices, where this machine has eight. Budgets and sizes are one device's."""
    sizes = (Target(device).num_devices // 4, 4)
    mesh = jax.sharding.AbstractMesh(sizes, ("data", "model"), axis_types=(axis_type,) * 2)
    on_mesh = lambda shape, *axes: f32(*shape, sharding=NamedSharding(mesh, PartitionSpec(*axes)))
    w = {"in": on_mesh((128, 8, 16), "data", "model", None), "out": on_mesh((8, 16, 128), "model", None, "data")}
    args = [w, w], on_mesh((32, 512, 128), "data", None, None)
    explicit = axis_type is AxisType.Explicit

    def by_hand(weights, x):
        return attention(weights, x, explicit, jax.checkpoint)

    with statetx.target(device), jax.sharding.use_abstract_mesh(mesh):
        budget = 2**20 + statetx.measure(jax.grad(by_hand), *args, gradient=False).peak_bytes
        plan = statetx.plan(attention, *args, explicit, argnums=0, budget=budget, time_limit=10)
        planned = jax.grad(plan.apply(attention))
        users = statetx.measure(lambda ws, x: planned(ws, x, explicit), *args, gradient=False)
    x_bytes = 32 * 512 * 128 * 4 // sizes[0]
    assert plan.argument_bytes == users.argument_bytes == x_bytes + 2 * 2 * 4 * 128**2 // sizes[0] // sizes[1]
    assert max(users.peak_bytes, plan.total_bytes) <= budget


def test_mesh_of_the_target():
    target = Target("h100:8")
    mesh = target.mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    assert mesh.size == 8 and {d.platform for d in mesh.devices.flat} == {"gpu"}


@pytest.mark.parametrize("device", ["h100", "tpu v5e"])
def test_program_that_cannot_be_compiled(device):
    def calls_python(x):
        return jax.pure_callback(lambda x: x, f32(4), x).sum()

    with pytest.raises(TargetError, match="calls Python functions on the host.*pure_callback.*test_target_programs.py"):
        statetx.measure(calls_python, jnp.ones(4), target=device, gradient=False)
    sharding = NamedSharding(jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,)), PartitionSpec("d"))
    with pytest.raises(TargetError, match="is for 8 devices.*has 1") as e:
        statetx.measure(jnp.sum, f32(64, sharding=sharding), target=device, gradient=False)
    assert f"target='{device}:8'" in str(e.value)


@pytest.mark.parametrize("device", ["h100", "tpu v5e"])
def test_calls_for_debugging_are_left_out(device):
    """brainstate's `Dropout` checks its probability in such a call."""

    def loss(w, debug):
        def step(h, _):
            jax.lax.cond(h.sum() > 9, lambda: debug("{}", h.sum(), ordered=True), lambda: None)
            return jnp.tanh(h @ w), None

        return statetx.scan(step, w, None, 64, checkpoint=4)[0].sum()

    w = jnp.eye(8)
    costs = [statetx.measure(loss, w, debug, target=device) for debug in (jax.debug.print, lambda *_, **__: None)]
    assert costs[0].peak_bytes == costs[1].peak_bytes


def patch_embedding(kernel, dense, token, position, images):
    """What every vision transformer begins with: XLA fuses the product with the convolution's output, whose rows are
    the patches of images, 196 each.
    """
    y = jax.lax.conv_general_dilated(images, kernel, (16, 16), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    y = y.reshape(y.shape[0], -1, y.shape[-1]) @ dense
    y = jnp.concatenate([jnp.tile(token, (y.shape[0], 1, 1)), y], axis=1) + position
    return jnp.mean(jax.nn.gelu(y) ** 2)


PATCHES = f32(16, 16, 3, 256), f32(256, 512), f32(1, 1, 512), f32(1, 197, 512), f32(64, 224, 224, 3)


def test_product_without_tiles_is_compiled_unfused(monkeypatch, caplog):
    """On a device XLA would time several tiles, and skip those that fail (jax-ml/jax#34010)."""
    monkeypatch.setattr(_compiler, "_targets_with_unfused_products", set())
    with statetx.target("a100-40gb"):
        cost = statetx.measure(patch_embedding, *PATCHES)
        profile = statetx.memory_profile(patch_embedding, *PATCHES)
        unfused = statetx.measure(patch_embedding, *PATCHES, compiler_options={"xla_gpu_enable_triton_gemm": False})
    (told,) = caplog.messages
    assert "A program for a100-40gb is compiled without fusing" in told and "Couldn't find output tile sizes" in told
    assert cost == unfused and profile.peak_bytes == cost.peak_bytes
    for device in ("t4", "b200"):
        assert abs(statetx.measure(patch_embedding, *PATCHES, target=device).temp_bytes / cost.temp_bytes - 1) < 0.4
    assert len(caplog.messages) == 1


def test_program_that_xla_does_not_compile_is_refused():
    """With XLA's reason, which stays the cause."""
    options = {"xla_gpu_no_such_option": True}
    with pytest.raises(
        TargetError, match="XLA cannot compile the program for the target h100. XLA: .*no_such_option"
    ) as e:
        statetx.measure(jnp.sin, f32(4), target="h100", compiler_options=options)
    assert "Fix: " in str(e.value) and isinstance(e.value.__cause__, jax.errors.JaxRuntimeError)


@pytest.mark.parametrize("report", [statetx.measure, statetx.memory_profile, statetx.memory_report])
def test_program_that_is_too_large_for_a_tpu_is_refused(report):
    """XLA:TPU compiles no program that does not fit."""
    with pytest.raises(TargetError, match=r"does not fit on the target tpu v5e. XLA: .*exceeds available HBM") as e:
        report(lambda x: jnp.sort(x @ x.T).sum(), f32(100_000, 4096), target="tpu v5e", gradient=False)
    assert "explain_oom" in str(e.value)


def test_explain_oom_compares_with_the_target():
    large = f32(100_000, 4096)
    for device in ("a100-40gb", "tpu v5e"):
        report = statetx.explain_oom(lambda x: jnp.sort(x @ x.T).sum(), large, target=device)
        assert report.limit_bytes == Target(device).memory_bytes and report.short_bytes > 2**30


def test_nothing_runs_on_a_target():
    """A jitted step inside the block runs here."""
    with statetx.target("h100"):
        out = statetx.jit(statetx.grad(lambda x: (statetx.remat(jnp.sin)(x) ** 2).sum()))(jnp.ones(4))
    assert out.devices() == {jax.devices()[0]} and jnp.allclose(out, jnp.sin(2.0))


def test_programs_of_two_gpus_are_not_mixed():
    """Their description is not in the key of JAX's cache of compiled programs."""
    costs = {}
    for device in ("h100", "t4", "h100"):
        with statetx.target(device):
            program = Program(lambda x: jnp.tanh(x @ x).sum(), [f32(256, 256)])
            costs.setdefault(device, []).append(program.compiled.as_text())
    assert costs["h100"][0] == costs["h100"][1] != costs["t4"][0]


QUIET = """
import statetx, jax.numpy as jnp
for device in ("h100", "tpu v5e"):
    print(statetx.measure(lambda x: jnp.tanh(x @ x).sum(), jnp.ones((128, 128)), target=device).argument_bytes)
"""


def test_plugins_of_absent_devices_do_not_complain():
    """JAX alone prints a traceback for CUDA, and libtpu asks for its host. The lines of jaxlib's own import stay."""
    environment = {"PATH": "/usr/bin:/bin", "STATETX_CACHE": ""}
    done = subprocess.run([sys.executable, "-c", QUIET], capture_output=True, text=True, env=environment, check=False)
    assert (done.returncode, done.stdout) == (0, "65536\n65536\n")
    of_jaxlib = ("before absl::InitializeLog() is called", "Could not find cuda drivers")
    assert not [line for line in done.stderr.splitlines() if not any(text in line for text in of_jaxlib)]


# -- times -----------------------------------------------------------------------------------------------------------


def recurrent_loss(w, x, length):
    return jnp.sum(jax.lax.scan(lambda h, _: (jnp.tanh(h @ w), None), x, length=length)[0] ** 2)


def test_estimated_time_of_a_loop_counts_its_steps():
    w, x = f32(512, 512), f32(2048, 512)
    with statetx.target("h100"):
        few, many = (statetx.measure(lambda w, x, n=n: recurrent_loss(w, x, n), w, x) for n in (8, 64))
        plain = Program(lambda w, x: jax.grad(recurrent_loss)(w, x, 8), [w, x])
    assert few.seconds is not None and 7.5 < many.seconds / few.seconds < 8.1
    assert "; estimated " in str(few) and "estimated time" in few._repr_html_()
    assert plain.cost.seconds is None, "asked for only where it is shown"


def test_estimated_time_of_recomputation_is_longer():
    report = statetx.memory_report(lambda ws, x: wide(ws, x, statetx.remat), WIDE, ROWS, target="h100")
    plain, rematerialized = report.rows
    assert 1.1 < rematerialized.seconds / plain.seconds < 2
    assert "estimated time" in str(report)


def test_estimated_time_of_a_softmax_is_above_that_of_its_bytes():
    """XLA makes one tiled kernel of it, which its first model does not know. 256 MiB are read, and as many written."""
    seconds = statetx.measure(jax.nn.softmax, f32(65536, 1024), gradient=False, target="h100").seconds
    assert 2 * 65536 * 1024 * 4 / 3.35e12 < seconds < 3e-4


def test_estimated_time_on_a_tpu():
    cost = statetx.measure(
        lambda w, x: jnp.sum(jnp.tanh(x @ w) @ w), f32(1024, 1024), f32(4096, 1024), target="tpu v5e"
    )
    assert 5e-5 < cost.seconds < 5e-3
    assert statetx.measure(blocks, WEIGHTS, X, target="tpu v5e").seconds is None  # XLA tells a negative time


def test_time_is_not_estimated_where_it_is_not_known():
    def until(x):
        return jax.lax.while_loop(lambda x: jnp.sum(x) < 1e6, lambda x: x * 2, x)

    assert statetx.measure(until, ROWS, gradient=False, target="h100").seconds is None
    assert (
        statetx.measure(recurrent_loss, f32(512, 512), ROWS, 8, target="tpu v5e").seconds is None
    )  # loop bodies count once
    assert statetx.measure(wide, WIDE, ROWS).seconds is None  # a CPU
    strategy = policies.Levels(2, offload=True)
    offloaded = lambda w, xs: statetx.scan(lambda h, x: (jnp.tanh(h @ w + x), None), xs[0], xs, checkpoint=strategy)
    assert statetx.measure(offloaded, f32(64, 64), f32(64, 8, 64), target="h100").seconds is None
    assert statetx.measure(wide, WIDE, ROWS, target="a100-40gb").seconds is None  # XLA has no model of its products
    for device in ("a100-40gb", "tpu v5e"):
        with pytest.raises(TargetError, match=f"nothing runs on the target {device}; XLA's estimates"):
            statetx.plan(wide, WIDE, ROWS, budget=0.85, objective="time", target=device)


def test_estimates_leave_the_program_unchanged():
    with statetx.target("h100"):
        asked, not_asked = (Program(jax.grad(wide), [WIDE, ROWS], estimates=e).cost for e in (True, False))
    assert asked.seconds and not_asked.seconds is None
    assert dataclasses.replace(asked, seconds=None) == not_asked


def test_plan_compares_estimates():
    with statetx.target("h100"):
        plan = statetx.plan(wide, WIDE, ROWS, budget=0.85, time_limit=10)
        users = statetx.measure(plan.apply(wide), WIDE, ROWS)
    times = [seconds for _, num_bytes, seconds in plan.timed if num_bytes + plan.fixed_bytes <= plan.budget_bytes]
    # Operations decide between times that are nearly equal.
    assert min(times) <= plan.seconds <= 1.003 * min(times)
    assert plan.seconds == pytest.approx(users.seconds, rel=0.02)
    assert plan.total_bytes <= 0.85 * plan.unplanned_total_bytes and "Estimated time: " in str(plan)


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 2, 0)])
def test_updates_returned_out_of_order_are_named_with_what_they_cost(order):
    def step(w, m, v, x):
        loss = lambda w: jnp.mean(jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), x, w)[0] ** 2)
        g = jax.grad(loss)(w)
        m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
        new = (w - 1e-3 * m / (jnp.sqrt(v) + 1e-8), m, v)
        return [new[i] for i in order]

    call = jax.jit(step, donate_argnums=(0, 1, 2)), *[f32(8, 32, 32)] * 3, f32(4, 32)
    reordered = statetx.memory_profile(*call, target="h100").reordered
    if order == (0, 1, 2):
        assert reordered is None
    else:
        assert reordered.saved_bytes > 8 * 32 * 32 * 4 and "test_target_programs.py:" in reordered.text


@functools.cache
def benchmark_kernels():
    path = pathlib.Path(__file__).parents[1] / "benchmarks" / "kernels.py"
    spec = importlib.util.spec_from_file_location("benchmark_kernels", path)
    kernels = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(kernels)
    return kernels


def test_kernels_and_the_bytes_that_they_move_are_counted():
    def traffic(fun, *args):
        with statetx.target("h100"):
            return benchmark_kernels().traffic(Program(fun, args).compiled)

    x, size = f32(1024, 512), 1024 * 512 * 4
    assert traffic(lambda x: jnp.sin(x) + 1, x) == (1, 0, 2 * size)
    assert traffic(jax.nn.softmax, x)[1:] == (1, 2 * size)  # its rows are reduced and read again in one tiled kernel
    loop = lambda x, rows: jax.lax.scan(lambda x, row: (jnp.sin(x) + row[None], None), x, rows)[0]
    loops = [traffic(loop, x, f32(length, 512)) for length in (8, 16)]
    assert loops[1].kernels - loops[0].kernels >= 8
    # Each turn reads and writes the carry and reads one row, not all of them.
    assert 8 * 2 * size <= loops[1].num_bytes - loops[0].num_bytes < 8 * (2 * size + 3 * 512 * 4)


def test_times_of_kernels_by_kind_add_up_to_the_estimate():
    def turn(x, row):
        return jax.nn.softmax(jnp.sin(x) @ x + row[:, None]), None

    def times(length):
        loop = lambda x, rows: jax.lax.scan(turn, x, rows)[0]
        with statetx.target("h100"):
            program = Program(loop, (f32(512, 512), f32(length, 512)), estimates=True)
            kinds = collections.Counter()
            for kernel in benchmark_kernels().timed(program.compiled):
                kinds[kernel.kind] += kernel.seconds
            assert kinds.total() == pytest.approx(program.cost.seconds)
        return kinds

    short, long = times(8), times(16)
    for kind in ("products", "softmaxes and norms"):
        assert long[kind] > 1.5 * short[kind] > 0
