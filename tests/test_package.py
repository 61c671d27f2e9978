"""The package as a whole: exports, layers, imports, private names."""

import ast
import functools
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile

import jax
import pytest
from packaging.requirements import Requirement

import feature_map
import statetx
from code_map import PAGE, TIERS, with_map
from statetx.cli.help import QUESTIONS

ROOT = pathlib.Path(__file__).parents[1]
SOURCES = sorted(pathlib.Path(statetx.__file__).parent.rglob("*.py"))

EXPORTS = """
Broadcast CacheInfo Carry CarryTypeError CheckpointError CreatedStateError EffectError First
ForeignStateError FunctionError GradientError Last Mean MemoryProfile Not Optimizer Param Plan PlanError PolicyError
PolicyWarning Residuals RngState Split Stack State StagingWarning StateAccessError StateFilterError StateTrace
StateValueError StatetxError StaticArgumentError Target TargetError TraceLeakError Truncated budget cache_info
checkpoint checkpoint_name chunked clear_cache cond eval_shape explain_oom fori_loop functionalize grad hessian jacfwd
jacrev jit jvp linearize loop_report make_jaxpr map max_batch measure memory_profile memory_report microbatch plan
policies print_fwd_bwd print_saved_residuals remat remat_scan restore saved_residuals scan shard_map stack states switch
target trace_states unstack value_and_grad values vjp vmap while_loop
""".split()


def module_name(path):
    return ".".join(path.relative_to(ROOT / "statetx").with_suffix("").parts).removesuffix(".__init__")


@functools.cache
def imported_modules(path, *, for_types=False):
    """Modules of this package that a module imports, be it in a function; those that type checkers alone import only
    `for_types`.
    """
    found = set()
    package = list(path.relative_to(ROOT / "statetx").parts[:-1])
    tree = ast.parse(path.read_text())
    if not for_types:
        tree.body = [n for n in tree.body if not (isinstance(n, ast.If) and "TYPE_CHECKING" in ast.unparse(n.test))]
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) - node.level + 1] + (node.module.split(".") if node.module else [])
            for alias in node.names:
                whole = [*base, alias.name]
                folder = ROOT.joinpath("statetx", *whole)
                is_module = folder.with_suffix(".py").exists() or (folder / "__init__.py").exists()
                found.add(".".join(whole if is_module else base))
    return found


def test_exports():
    packages = {"caches", "kinds", "memory", "planner", "residuals", "testing", "transforms"}
    public = {name for name in dir(statetx) if not name.startswith("_")} - packages
    assert public == set(EXPORTS)
    assert statetx.checkpoint is statetx.remat
    classes = [getattr(statetx, name) for name in EXPORTS if isinstance(getattr(statetx, name), type)]
    assert {cls.__module__ for cls in classes} == {"statetx"} and len(classes) > 25  # in tracebacks, reprs and pickles


def test_lazy_exports_match_type_checking_imports():
    tree = ast.parse((ROOT / "statetx" / "__init__.py").read_text())
    (checked,) = [node for node in tree.body if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)]
    seen = {
        (f".{n.module}", a.name) for n in checked.body if isinstance(n, ast.ImportFrom) and n.module for a in n.names
    }
    assert seen == {(module, name) for name, module in statetx._MODULE_OF.items()}
    for module, name in seen:
        assert getattr(getattr(statetx, name), "__name__", name) in (name, "remat"), module
    with pytest.raises(AttributeError, match="'statetx' has no attribute 'rematt'"):
        statetx.rematt  # noqa: B018


@pytest.mark.thorough
def test_imports_point_down():
    """Between folders by their tiers; inside a folder, without a circle. Imports in functions and for types
    count, too.
    """
    tiers = {name: i for i, names in enumerate(TIERS.split("\n")) for name in names.split()}
    imports = {module_name(p): imported_modules(p) for p in SOURCES if p != ROOT / "statetx" / "__init__.py"}
    assert {m.split(".")[0] for m in imports} == set(tiers), "a new folder needs a place among TIERS"
    for path in SOURCES[1:]:
        module = module_name(path)
        for other in imported_modules(path, for_types=True):
            own, theirs = module.split(".")[0], other.split(".")[0]
            assert own == theirs or tiers[theirs] < tiers[own], f"{module} imports {other}"
    assert not circles({m: imported_modules(p, for_types=True) for m, p in zip(imports, SOURCES[1:], strict=True)})
    for path in SOURCES[1:]:
        found = re.search(r"pkgutil|import_module\(f?[\"'](statetx|\.)", path.read_text())
        assert found is None, f"{path} imports by a string: register a function in `_hooks`"


def test_no_property_holds_a_lock():
    """As on Python 3.11, where threads that compute values from each other's would wait forever (`_cached.py`)."""
    assert not [path for path in SOURCES if "@functools.cached_property" in path.read_text()]


def circles(imports):
    """Modules that import each other, or modules that do."""
    for _ in range(len(imports)):
        imports = {m: found for m, others in imports.items() if (found := others & imports.keys())}
    return imports


@pytest.mark.thorough
def test_features_are_those_of_the_tree():
    """Each module is of a feature, and each feature has modules; lines are as many as when the table was drawn."""
    page = feature_map.PAGE.read_text()
    drawn = feature_map.with_table(page)
    assert feature_map.features_of(page) == feature_map.features_of(drawn), "run python tests/feature_map.py"


def test_a_module_has_one_subject():
    """Its docstring begins with one sentence, which needs no "and"."""
    for path in SOURCES[1:]:  # after the package
        subject = (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n\n")[0]
        assert subject and ". " not in subject and "and" not in subject.split(), path


def test_code_map_matches_the_tree():
    assert PAGE.read_text() == with_map(PAGE.read_text()), "run python tests/code_map.py"


@pytest.mark.slow
@pytest.mark.skipif(not jax.__version__.startswith("0.10."), reason="other versions of JAX call back in other places")
def test_data_in_motion_is_what_an_object_visits():
    """In a process of its own, in which no other library is loaded."""
    command = [sys.executable, ROOT / "tests" / "data_motion.py", "--print"]
    environ = {**os.environ, "STATETX_CACHE": "off"}
    shown = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT, env=environ).stdout
    assert (ROOT / "ARCHITECTURE.md").read_text() == shown, "run python tests/data_motion.py"


def test_private_jax_names_only_in_their_modules():
    for path in SOURCES:
        text = path.read_text()
        if path.parent.name != "_jax":
            assert "jax._src" not in text and "jax.interpreters" not in text, path
        if "kinds" not in path.parts:
            assert not re.search(r"^\s*(import|from) (brainstate|flax)", text, re.M), path


def test_modules_of_private_jax_names_share_no_name():
    """`_jax` has the names of all its modules; a name that two of them define would be that of the last."""
    found: dict[str, str] = {}
    for path in SOURCES:
        if path.parent.name == "_jax" and path.stem not in ("__init__", "patches"):
            for node in ast.parse(path.read_text()).body:
                targets = node.targets if isinstance(node, ast.Assign) else [node]
                names = [getattr(x, "name", getattr(x, "id", "_")) for x in targets]
                names += [a.asname or a.name for a in node.names] if isinstance(node, ast.ImportFrom) else []
                local = not isinstance(node, ast.ImportFrom) or node.level == 2
                for name in names if local else ():
                    assert name.startswith("_") or found.setdefault(name, path.stem) in (path.stem, "__init__"), name


# What SECURITY.md promises of all files, and the network.
RUNS_OR_WRITES = re.compile(
    r"(?<![.\w])(?<!def )(open|eval|exec)\(|\.write_(text|bytes)\(|^(?!.*``).*savefig\(|\b(pickle|marshal)\.loads?\(|"
    r"^\s*(import|from) (socket|ssl|urllib|http|requests|webbrowser)\b",
    re.M,
)


def test_one_module_writes_files_and_none_runs_what_it_reads_or_connects():
    found = {path.name for path in SOURCES if RUNS_OR_WRITES.search(path.read_text())}
    assert found == {"_files.py"}


def test_environment_variables_are_those_of_the_security_page():
    page = (ROOT / "SECURITY.md").read_text()
    read = {name for path in SOURCES for name in re.findall(r"\bSTATETX_[A-Z_]+", path.read_text())}
    assert read == set(re.findall(r"\bSTATETX_[A-Z_]+", page)) and len(read) > 3


@pytest.mark.slow
def test_import_side_effects_are_documented():
    """Each change, in a program that loads everything, has a row of the page."""
    code = (
        "import jax, brainstate, flax.nnx, statetx; from statetx import _states; from statetx._jax import patches; "
        "[getattr(statetx, name) for name in statetx.__all__]; _states.kinds(); "
        "print(*sorted(f'| {c.name} | {c.reason} |' for c in patches.changes), sep='\\n')"
    )
    listed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    table = [line for line in (ROOT / "docs" / "imports.md").read_text().split("\n") if line.startswith("| ")][1:]
    rows = [
        f"| {target} | {reason} |"
        for targets, reason in (line[2:-2].split(" | ") for line in table)
        for target in targets.split(", ")
    ]
    words = lambda text: sorted(line.replace("`", "") for line in text)
    assert words(rows) == words(listed.strip().split("\n")) and len(rows) > 10


@pytest.mark.slow
def test_import_is_light_and_needs_no_other_library():
    code = (
        "import sys, statetx; "
        "print([m for m in ('brainstate', 'flax', 'rich', 'matplotlib', 'scipy', 'optax', 'orbax') if m in "
        "sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    heavy = subprocess.run(
        [sys.executable, "-c", "import sys, jax; print('scipy' in sys.modules)"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    expected = ["scipy"] if heavy.stdout.strip() == "True" else []
    assert out.stdout.strip() == str(expected)


@pytest.mark.slow
def test_brainstate_imported_late_is_observed():
    code = """
import jax.numpy as jnp, statetx
s = statetx.State(jnp.ones(()))
f = statetx.jit(lambda x: s.value * x)
f(1.0)
import brainstate
b = brainstate.ShortTermState(jnp.ones(()))
def g(x):
    b.value = b.value + x
    return b.value
print(float(statetx.grad(statetx.remat(g))(2.0)), float(b.value))
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert out.stdout.split() == ["1.0", "3.0"]


def test_version_is_defined_once():
    assert re.fullmatch(r"\d+\.\d+\.\d+(\.dev\d+|rc\d+)?", statetx.__version__)
    written = re.findall(rf"(?m)^.*version.*{re.escape(statetx.__version__)}.*$", (ROOT / "pyproject.toml").read_text())
    assert not written, "pyproject.toml takes the version from statetx/__init__.py"


def project_table():
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_version_and_dependencies_are_repeated_correctly():
    """In the citation, the changelog, the recipe, and the hooks of pre-commit."""
    read = lambda name: (ROOT / name).read_text()
    project = project_table()
    assert f"\nversion: {statetx.__version__}\n" in read("CITATION.cff")
    recipe = read("recipe/recipe.yaml")
    assert f"\n  version: {statetx.__version__}\n" in recipe
    heading = re.search(r"^## \[(.*?)\]", read("CHANGELOG.md"), re.M)[1]
    assert heading == ("Unreleased" if ".dev" in statetx.__version__ else statetx.__version__)
    run = recipe[recipe.index("  run:") : recipe.index("tests:")]
    needed = [f"python{project['requires-python']}", *project["dependencies"]]
    assert [line.replace(" ", "") for line in re.findall(r"^    - (.*)", run, re.M)] == needed
    ruff = re.search(r"^ruff==(.*)$", read("constraints.txt"), re.M)[1]
    assert f"ruff-pre-commit\n    rev: v{ruff}\n" in read(".pre-commit-config.yaml")


def test_tested_versions_are_allowed_and_in_the_readme():
    """The pins are within the bounds, the newest series of jax is the last within them, and hosted CI runs each row of
    the table.
    """
    bounds = {r.name: r.specifier for r in map(Requirement, project_table()["dependencies"])}
    pins = re.findall(r"^(jax|jaxlib|brainstate)==(\S+)", (ROOT / "constraints.txt").read_text(), re.M)
    assert len(pins) == 6 and all(bounds[name].contains(version) for name, version in pins)
    newest = max((version for name, version in pins if name == "jax"), key=lambda v: [int(n) for n in v.split(".")])
    major, minor = map(int, newest.split(".")[:2])
    assert not bounds["jax"].contains(f"{major}.{minor + 1}.0")
    rows = re.findall(r"^\| (3\.\d+) \| jax (\S+),", (ROOT / "README.md").read_text(), re.M)
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    matrix = re.findall(r'python: "(.*?)", jax: "(.*?)"', workflow)
    assert rows == [(python, jax or newest) for python, jax in matrix] and len(rows) == 3


def test_extras_that_messages_and_pages_name_exist():
    texts = [*SOURCES, ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")]
    named = {extra for path in texts for extra in re.findall(r"statetx\[([a-z]+)\]", path.read_text())}
    assert named <= set(project_table()["optional-dependencies"]) and "plot" in named


def links_of(text):
    return [link or source for link, source in re.findall(r'\]\(([^()]*)\)|(?:src|srcset)="(.*?)"', text)]


def test_readme_links_lead_to_files_of_the_clone():
    links = [link for link in links_of((ROOT / "README.md").read_text()) if "://" not in link]
    assert len(links) > 25
    for link in links:
        assert link.startswith("#") or (ROOT / link.partition("#")[0]).is_file(), link


def test_readme_in_a_wheel_has_links_to_the_site():
    """A package index shows the README, where relative links lead nowhere: the build replaces them."""
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    urls = pyproject["project"]["urls"]
    text = (ROOT / "README.md").read_text()
    for rule in pyproject["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]["substitutions"]:
        text = re.sub(rule["pattern"], rule["replacement"], text)
    raw = urls["Repository"].replace("github.com", "raw.githubusercontent.com") + "/main/"
    checked = 0
    for link in links_of(text):
        assert link.startswith(("https://", "#")), link
        if link.startswith(urls["Documentation"]):
            page = link.removeprefix(urls["Documentation"]).split("#")[0].rstrip("/")
            assert any((ROOT / "docs" / p).is_file() for p in (f"{page}.md", f"{page}/index.md")), link
            assert "//" not in link.removeprefix("https://"), link
            checked += 1
        for base in (urls["Repository"] + "/blob/main/", raw):
            if link.startswith(base):
                assert (ROOT / link.removeprefix(base)).is_file(), link
                checked += 1
    assert checked > 25


SMOKE = """
import importlib.metadata, pathlib, sys
import jax.numpy as jnp, statetx

folder = pathlib.Path(statetx.__file__).parent
assert folder.is_relative_to(sys.prefix), folder
assert importlib.metadata.version("statetx") == statetx.__version__
w, n = statetx.Param(jnp.ones(2)), statetx.State(jnp.zeros((), jnp.int32))

@statetx.remat
def f(x):
    n.value += 1
    return (w.value * x).sum()

print(float(statetx.jit(statetx.grad(f, wrt=w))(3.0)[0]), int(n.value), (folder / "py.typed").exists())
"""


@pytest.mark.slow
def test_built_distributions_install_and_import(tmp_path):
    """Both distributions; the wheel is made from the source distribution, so that nothing is missing there."""
    pytest.importorskip("hatchling")

    def call(*words, **options):
        done = subprocess.run([str(w) for w in words], capture_output=True, text=True, **options)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    # A copy: untracked files of the working tree are not part of it, and the build leaves nothing behind.
    kept = shutil.ignore_patterns(".*", "out", "build", "dist", "__pycache__")
    shutil.copytree(ROOT, tmp_path / "source", ignore=kept)
    call(
        sys.executable,
        "-m",
        "build",
        "--no-isolation",
        "--outdir",
        tmp_path / "dist",
        tmp_path / "source",
        cwd=tmp_path,
    )
    (wheel,), (sdist,) = (tmp_path / "dist").glob("*.whl"), (tmp_path / "dist").glob("*.tar.gz")

    inside = set(zipfile.ZipFile(wheel).namelist())
    pages = [path for pattern in ("*.html", "*.css", "*.js", "*.toml") for path in ROOT.glob(f"statetx/**/{pattern}")]
    own = {str(path.relative_to(ROOT)) for path in (*SOURCES, *pages)} | {"statetx/py.typed"}
    searched = ["errors.md", *QUESTIONS]  # of docs/
    texts = [str(path.relative_to(ROOT / "docs")) for pattern in searched for path in (ROOT / "docs").glob(pattern)]
    assert {name for name in inside if ".dist-info/" not in name} == own | {
        f"statetx/cli/pages/{name}" for name in texts
    }
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in inside)
    (metadata,) = (name for name in inside if name.endswith(".dist-info/METADATA"))
    shown = zipfile.ZipFile(wheel).read(metadata).decode()
    assert "# statetx" in shown and all(link.startswith(("https://", "#")) for link in links_of(shown))
    with tarfile.open(sdist) as archive:
        files = {name.partition("/")[2] for name in archive.getnames()}
    wanted = {"pyproject.toml", "LICENSE", "README.md", "CHANGELOG.md", "CITATION.cff", "Makefile", "constraints.txt"}
    assert own | wanted | {"tests/test_package.py", "docs/index.md"} <= files

    venv = tmp_path / "venv"
    call(sys.executable, "-m", "venv", "--without-pip", venv)
    python = next(venv.glob("*/python"))
    call(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel)
    site = next(venv.rglob("site-packages"))
    (site / "dependencies.pth").write_text("\n".join(p for p in sys.path if p.endswith("site-packages")))
    clean = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    assert call(python, "-c", SMOKE, cwd=tmp_path, env=clean) == "3.0 1 True\n"
