"""Targets: names, files, the table of devices, what depends on the device. Compiling for them is in
test_target_programs.py.
"""

import ast
import dataclasses
import json
import pathlib
import subprocess
import sys
import textwrap
import types

import jax
import jax.numpy as jnp
import pytest

import statetx
from statetx import Target, TargetError
from statetx._targets import absent, current, plugins
from statetx._targets.plugins import CHECKS, Gpu, table
from statetx.planner._search import times as _times

SOURCES = pathlib.Path(statetx.__file__).parent


@pytest.mark.parametrize(
    "name, platform, num, hosts",
    [
        ("h100", "gpu", 1, 1),
        ("H100:8", "gpu", 8, 1),
        ("h100:2x8", "gpu", 16, 2),
        ("a100-40gb", "gpu", 1, 1),
        ("a100_40gb", "gpu", 1, 1),
        ("tpu v5e", "tpu", 1, 1),
        ("tpu v5e:2x4", "tpu", 8, 1),
        ("tpu v5e:16", "tpu", 16, 1),
        ("tpu v4:2x2x2", "tpu", 8, 1),
        ("NVIDIA H100 80GB HBM3", "gpu", 1, 1),
        ("nvidia a100-sxm4-40gb:2x8", "gpu", 16, 2),
        ("TPU v5 lite:2x4", "tpu", 8, 1),
    ],
)
def test_name(name, platform, num, hosts):
    target = Target(name)
    assert (target.platform, target.num_devices, target._hosts) == (platform, num, hosts)


def test_kind_of_device_names_its_target(installed):
    for name, spec in table().items():
        assert Target(spec.kind) == Target(f" {spec.kind}:1") == Target(name) and Target(spec.kind).name == name
    with statetx.target("NVIDIA H100 80GB HBM3:8") as chosen:
        assert chosen.name == "h100:8"


@pytest.mark.parametrize(
    "name, message",
    [
        ("h10", "There is no target named 'h10'. Did you mean 'h100'?"),
        ("h100x8", "Did you mean 'h100:8'?"),
        ("8xh100", "Did you mean 'h100:8'?"),
        ("A100-40GB x 2", "Did you mean 'a100-40gb:2'?"),
        ("NVIDIA H100 PCIe", "Did you mean 'h100'?"),
        ("NVIDIA A100 80GB PCIe", "Did you mean 'a100-80gb'?"),
        ("rtx 4090", "Did you mean 'rtx4090'?"),
        ("tpu v5", "Did you mean 'tpu v5e'?"),  # JAX's "TPU v5" is a v5p
        ("v5litepod-8", "Did you mean 'tpu v5e'?"),
        ("mi300x", "There is no target named 'mi300x'.\nTargets: t4, "),
        ("x" * 100_000, "There is no target named"),
        ("", "There is no target named ''."),
        ("h100:", None),
        ("h100:0", "1 to 10000 devices"),
        ("h100:8x", "'8x' is not a number of devices"),
        ("h100:1x2x3", "name hosts and the devices of each"),
        ("h100:99999", "1 to 10000 devices"),
        ("tpu v5e:3", "grids of 2 dimensions, such as 2x4"),
        ("tpu v4:2x2", "grids of 3 dimensions"),
        (8, "A target is a name"),
        ("missing.json", "missing.json cannot be read as a target"),
    ],
)
def test_name_that_is_not_known(name, message):
    if message is None:
        assert Target(name) == Target("h100")
        return
    with pytest.raises(TargetError) as e:
        Target(name)
    assert message in str(e.value)


def test_table_of_devices_has_sources_and_usable_memory(monkeypatch):
    for name in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        monkeypatch.delenv(name, raising=False)
    devices = table()
    for spec in devices.values():
        CHECKS[spec.platform](dataclasses.asdict(spec), "")
    assert set(devices) == set("t4 v100 a10 l4 l40s rtx4090 a100-40gb a100-80gb h100 h200 b200".split()) | {
        f"tpu {v}" for v in ("v4", "v5e", "v5p", "v6e")
    }
    for name, spec in devices.items():
        assert spec.source and Target(name).memory_bytes > 8 * 2**30
    assert Target("h200").memory_bytes == 151397597184 * 3 // 4
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", ".9")
    assert Target("h200").memory_bytes == int(151397597184 * 0.9)
    assert Target("tpu v5e").memory_bytes == int(15.75 * 2**30)  # XLA's own figure, which the variable does not change


def test_save_and_load(tmp_path):
    for name in ("h100:2x8", "tpu v5e:2x4"):
        path = tmp_path / "target.json"
        Target(name).save(path)
        assert Target.load(path) == Target(path) == Target(str(path)) == Target(name)
        assert hash(Target.load(path)) == hash(Target(name)) and repr(Target(path)) == f"Target({name!r})"
    assert [p.name for p in tmp_path.iterdir()] == ["target.json"]


def _damaged(path, change):
    fields = json.loads(path.read_text())
    change(fields)
    path.write_text(json.dumps(fields))


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda f: f.pop("hosts"), "hosts is missing"),
        (lambda f: f.update(more=1), "'more' is not a field"),
        (lambda f: f.update(hosts=0), "hosts must be a whole number from 1"),
        (lambda f: f.update(hosts=True), "hosts must be a whole number"),
        (lambda f: f.update(shape=[10**9]), "shape[0] must be a whole number"),
        (lambda f: f.update(shape=[2, 4]), "shape must be 1 numbers of devices"),
        (lambda f: f.update(hosts=200, shape=[200]), "shape must be 1 numbers of devices"),
        (lambda f: f.update(shape="8"), "shape must be a list"),
        (lambda f: f.update(platform="quantum"), "platform must be one of 'gpu', 'tpu', 'cpu'"),
        (lambda f: f.update(platform=["gpu"]), "platform must be one of"),
        (lambda f: f.update(platform="tpu"), "device.generation is missing"),
        (lambda f: f.update(name="a\x1b[2J"), "name must be a short name"),
        (lambda f: f["device"].update(cores=-1), "device.cores must be a whole number from 1"),
        (lambda f: f["device"].update(memory_bytes=10**30), "device.memory_bytes must be a whole number"),
        (lambda f: f["device"].update(clock_ghz="1.98}"), "device.clock_ghz must be a number"),
        (lambda f: f["device"].update(clock_ghz=float("nan")), "device.clock_ghz must be a number"),
        (lambda f: f["device"].update(capability=[9]), "device.capability must be a list of 2 items"),
        (lambda f: f["device"].update(kind="}"), "device.kind must be a short name"),
        (lambda f: f["device"].pop("cores"), "device.cores is missing"),
        (lambda f: f.update(device=3), "device must be an object"),
    ],
)
def test_load_refuses_damaged_file(tmp_path, change, message):
    path = tmp_path / "target.json"
    Target("h100").save(path)
    _damaged(path, change)
    with pytest.raises(TargetError) as e:
        Target.load(path)
    assert message in str(e.value) and str(path) in str(e.value)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 5000, b" " * 2**17])
def test_load_refuses_other_content(tmp_path, content):
    path = tmp_path / "target.json"
    path.write_bytes(content)
    with pytest.raises(TargetError):
        Target.load(path)


def test_here_describes_this_machine(tmp_path):
    here = Target.here()
    assert (here.platform, here.num_devices) == ("cpu", len(jax.devices())) and here.memory_bytes > 2**20
    here.save(tmp_path / "here.json")
    assert Target.load(tmp_path / "here.json") == here


@pytest.mark.parametrize(
    "kind, name", [("NVIDIA A100-SXM4-80GB", "a100-80gb"), ("NVIDIA L40S", "l40s"), ("TPU v5", "tpu v5p")]
)
def test_here_is_the_device_of_that_kind(monkeypatch, kind, name):
    """Kinds begin as others do: "NVIDIA A10", "NVIDIA L4", "TPU v5 lite"."""
    device = types.SimpleNamespace(
        device_kind=kind, platform=table()[name].platform, process_index=0, memory_stats=lambda: None
    )
    monkeypatch.setattr(jax, "devices", lambda: [device])
    assert Target.here() == Target(name)
    device.device_kind = "NVIDIA H100 PCIe"
    with pytest.raises(TargetError, match="H100 PCIe is not in the table.*\n.*nearest of them, h100, and edit"):
        Target.here()


def test_mesh_of_too_many_devices():
    with pytest.raises(TargetError, match="needs 8 devices, and h100:4 has 4") as e:
        Target("h100:4").mesh((2, 4), ("data", "model"))
    assert "Target('h100:8')" in str(e.value)


def test_mesh_of_another_shape_than_its_names():
    with pytest.raises(
        TargetError, match=r"A mesh of 4x2 has 2 dimensions, and the names \['data'\] are 1\.\nFix: name each axis"
    ):
        Target("h100:8").mesh((4, 2), ("data",))


def test_mesh_of_this_machine():
    mesh = Target.here().mesh((2, 4), ("data", "model"))
    assert mesh.shape_tuple == (("data", 2), ("model", 4))


# -- what keeps a machine from compiling -----------------------------------------------------------------------------


def test_missing_compiler_names_the_command(monkeypatch):
    monkeypatch.setattr(plugins, "is_installed", lambda platform: False)
    monkeypatch.chdir(SOURCES.parent)
    for name, extra in (("h100", "target-cuda"), ("tpu v5e", "target-tpu")):
        assert Target(name).missing == f'the compiler is not installed: pip install -e ".[{extra}]"'
        with pytest.raises(TargetError, match=f"This machine cannot compile for {name}: the compiler is not installed"):
            statetx.measure(jnp.sin, 1.0, target=name)
        with pytest.raises(TargetError, match="This machine cannot compile for"):
            Target(name).devices  # noqa: B018


@pytest.mark.parametrize(
    "direct_url, line",
    [
        (None, 'pip install "statetx[target-tpu]"'),
        ('{"url": "file:///a/clone", "dir_info": {}}', 'pip install "statetx[target-tpu] @ file:///a/clone"'),
        (
            '{"url": "https://host/x.git", "vcs_info": {"vcs": "git", "commit_id": "12"}}',
            'pip install "statetx[target-tpu] @ git+https://host/x.git"',
        ),
        ("[]", 'pip install "statetx[target-tpu]"'),
        ("{", 'pip install "statetx[target-tpu]"'),
    ],
)
def test_install_line_names_where_statetx_came_from(monkeypatch, tmp_path, direct_url, line):
    class Distribution:
        def read_text(self, name):
            return direct_url

    in_a_clone = plugins.install_line("tpu")
    assert in_a_clone.startswith("pip install -e ") and in_a_clone.endswith('[target-tpu]"')
    monkeypatch.setattr(plugins, "__file__", str(tmp_path / "statetx" / "_targets" / "plugins.py"))
    monkeypatch.setattr(plugins.importlib.metadata, "distribution", lambda name: Distribution())
    assert plugins.install_line("tpu") == line


@pytest.mark.parametrize("system", ["darwin", "win32"])
def test_other_systems_are_told(monkeypatch, system):
    monkeypatch.setattr(sys, "platform", system)
    assert "exist for Linux only" in Target("h100").missing


def test_cuda_13_has_no_compiler_for_volta(monkeypatch):
    monkeypatch.setattr(plugins, "is_installed", lambda platform: True)
    monkeypatch.setattr(plugins, "cuda_plugin", lambda: absent.CUDA_PLUGINS[0])
    monkeypatch.setattr(sys, "platform", "linux")
    assert "CUDA 12" in Target("v100").missing and not Target("h100").missing


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("INTERNAL: libdevice not found at ./libdevice.10.bc"),
        ValueError("PJRT C API version mismatch: 0.99 and 0.80\nmore"),
        ImportError("cannot import name 'xla_client'"),
    ],
    ids=["no libdevice", "wrong version", "incomplete package"],
)
def test_compiler_that_does_not_start_is_one_error(monkeypatch, error):
    def start(*_):
        raise error

    monkeypatch.setattr(plugins, "missing", lambda spec: "")
    monkeypatch.setattr(plugins, "_gpu_devices", start)
    with pytest.raises(TargetError) as e:
        plugins.compile_only_devices(dataclasses.replace(table()["h100"], cores=1), 1, (1,))
    first = str(error).splitlines()[0]
    assert (
        f"XLA's compiler for NVIDIA H100 80GB HBM3 does not start: {first}\nFix: install the plugin of the same version"
        in str(e.value)
    )
    assert e.value.__cause__ is error


# -- the current target ----------------------------------------------------------------------------------------------


@pytest.fixture
def installed(monkeypatch):
    """Targets are accepted; nothing is compiled for them."""
    monkeypatch.setattr(plugins, "missing", lambda spec: "")


def test_questions_are_answered_for_the_target(installed):
    assert current.current() is None and current.platform() == "cpu"
    with statetx.target("tpu v5e") as chosen:
        assert current.current() == chosen == Target("tpu v5e")
        assert (current.platform(), current.device_kind()) == ("tpu", "TPU v5 lite")
        assert current.memory_stats() == {"bytes_limit": chosen.memory_bytes}
        with statetx.target(None):
            assert current.platform() == "cpu"
        with statetx.target("h100"):
            assert current.memory_kinds() == ["device", "pinned_host"]
        environment = current.environment()
    assert current.platform() == "cpu" and environment != current.environment()


def test_target_of_the_environment(installed, monkeypatch):
    monkeypatch.setenv("STATETX_TARGET", "h100")
    assert current.platform() == "gpu"
    with statetx.target(None):
        assert current.platform() == "cpu"
    monkeypatch.setenv("STATETX_TARGET", "h10")
    with pytest.raises(TargetError, match="STATETX_TARGET: There is no target named 'h10'"):
        current.platform()


def test_times_of_a_target_without_estimates_are_refused(installed, monkeypatch):
    monkeypatch.setattr(_times, "estimate_options", dict)
    with pytest.raises(
        TargetError, match=r"nothing runs on the target a100-40gb; XLA's estimates.*\nFix: use objective='flops'"
    ):
        statetx.plan(jnp.sin, jnp.ones(4), budget=0.5, objective="time", target="a100-40gb")


def test_traces_for_a_target_are_not_reused(installed):
    traced = []

    @jax.jit
    def plain(x):
        traced.append(current.platform())
        return x + 1

    @statetx.jit
    def ours(x):
        traced.append(current.platform())
        return x + 1

    for fun in (plain, ours):
        for _ in range(2):
            fun(1.0)
            with statetx.target("h100"):
                fun(1.0)
    assert traced == ["cpu", "gpu"] * 2


def test_keyword_target_of_the_measured_function_is_its_own():
    def loss(x, target):
        return ((x - target) ** 2).sum()

    cost = statetx.measure(loss, jnp.ones(4), target=jnp.zeros(4))
    assert cost.argument_bytes == 32
    with pytest.raises(TargetError, match="no target named"):
        statetx.measure(loss, jnp.ones(4), jnp.zeros(4), target="h1000")
    with pytest.raises(TypeError):
        statetx.measure(loss, jnp.ones(4), target=None)


def test_keyword_target_may_be_none():
    cost = statetx.measure(lambda x: (x**2).sum(), jnp.ones(4), gradient=False, target=None)
    assert cost.argument_bytes == 16


def test_budget_of_the_device_is_the_target(installed, monkeypatch):
    from statetx.planner._budget import device_memory

    monkeypatch.delenv("STATETX_DEVICE_MEMORY", raising=False)
    with statetx.target("a100-40gb") as chosen:
        assert device_memory() == chosen.memory_bytes
        monkeypatch.setenv("STATETX_DEVICE_MEMORY", "1GiB")
        assert device_memory() == 2**30


@pytest.mark.slow
def test_no_other_module_asks_for_devices():
    """One module knows for which device is compiled."""
    names = {"default_backend", "local_devices", "get_backend", "device_count", "local_device_count"}
    found = []
    for path in sorted(SOURCES.rglob("*.py")):
        if path.relative_to(SOURCES).parts[0] == "_targets":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute):
                owner = ast.unparse(node.value)  # meshes and programs have devices, too
                is_asked = (
                    owner.endswith(("jax", "xla_bridge", "backend")) if node.attr == "devices" else node.attr in names
                )
                if is_asked and owner != "current" and "runtime_executable" not in owner:
                    found.append(f"{path.relative_to(SOURCES)}:{node.lineno}")
            elif isinstance(node, ast.ImportFrom) and any(a.name in names | {"devices"} for a in node.names):
                found.append(f"{path.relative_to(SOURCES)}:{node.lineno}")
    assert not found


def test_configuration_of_a_gpu_has_the_figures_of_the_table():
    spec = table()["h100"]
    assert isinstance(spec, Gpu)
    text = spec.config()
    assert (
        "core_count: 132" in text and "device_memory_size: 84942979072" in text and text.count("{") == text.count("}")
    )


def test_one_compilation_at_a_time_has_a_file_of_kernels():
    with plugins.kernel_file() as first:
        with plugins.kernel_file() as second:
            assert first != second
    with pytest.raises(KeyError), plugins.kernel_file() as again:
        raise KeyError
    assert again == first
    with plugins.kernel_file() as again:
        assert again == first


@pytest.mark.slow
def test_files_of_kernels_go_when_the_process_ends():
    """And not when one that was forked from it does, which has its own."""
    program = """
        import os
        from statetx._targets.plugins import kernel_file
        with kernel_file() as path:
            folder = os.path.dirname(path)
        if not (child := os.fork()):
            with kernel_file() as own:
                raise SystemExit(os.path.dirname(own) == folder)
        print(folder, os.waitpid(child, 0)[1], os.path.isdir(folder))
    """
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(program)], capture_output=True, text=True
    )
    folder, status, is_there = done.stdout.split()
    assert (status, is_there) == ("0", "True"), done.stderr
    assert not pathlib.Path(folder).exists()
