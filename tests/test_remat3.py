"""Some files again with JAX's new rematerialization switched on (`jax_remat3`); ``make test-remat3`` runs the whole
suite so.
"""

import os
import pathlib
import re
import subprocess
import sys

import jax
import pytest
from pages import BLOCK

from helpers import REMAT3

HERE = pathlib.Path(__file__).parent
FILES = ["test_remat.py", "test_ref.py", "test_scan.py", "test_control_flow.py", "test_mark.py"]
FAST = ["test_remat.py"]


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(jax.config, "jax_remat3"), reason="this JAX has none")
@pytest.mark.skipif(REMAT3, reason="it is on already")
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n not in FAST)) for n in FILES])
def test_file_passes_with_jax_remat3(name):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / name)]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "JAX_REMAT3": "1"}, cwd=HERE.parent
    )
    assert done.returncode == 0, done.stdout[-4000:]


@pytest.mark.skipif(not hasattr(jax.config, "jax_remat3"), reason="this JAX has none")
def test_page_counts_products_as_this_jax_does():
    page = (HERE.parent / "docs" / "how-to" / "remat3.md").read_text()
    (code,) = (block["code"] for block in BLOCK.finditer(page) if block["kind"] == "python")
    exec(code, scope := {})
    versions = re.search(r"^\| policy \| without \| (.*) \|$", page, re.M)[1].split(" | ")
    column = versions.index(".".join(jax.__version__.split(".")[:2]))
    rows = re.findall(r"^\| `(.*)`.*? \| (\d) \| (.*) \|$", page, re.M)
    assert len(rows) > 5
    for policy, without, counts in rows:
        expected = [int(without), int(counts.replace("*", "").split(" | ")[column])]
        counted = [scope["num_products"](jax.checkpoint, eval(policy, scope), new) for new in (False, True)]
        assert counted == expected, policy
