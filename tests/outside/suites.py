"""The suites: which files and classes of tests, and which of their transforms are exchanged."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import swaps

CHECKOUTS = "STATETX_OUTSIDE"


@dataclasses.dataclass(frozen=True)
class Suite:
    title: str
    library: str
    paths: tuple[str, ...]  # below the checkout, or below the installed package
    swaps: Callable[[], Mapping[str, Callable[..., Any]]]
    classes: tuple[str, ...] = ()
    cases: int | None = None  # of the generated cases of one test
    is_installed: bool = False

    def files(self) -> list[Path]:
        """The files of tests, or an empty list where there is no checkout."""
        if self.is_installed:
            spec = importlib.util.find_spec(self.library)
            root = Path(spec.origin).parent if spec and spec.origin else None
        else:
            root = Path(os.environ[CHECKOUTS]) / self.library if os.environ.get(CHECKOUTS) else None
        return [file for path in self.paths if root for file in sorted(root.glob(path))]


# Of brainstate.transform, the files whose tests call exchanged transforms; the others test its jaxpr tools and
# internals.
BRAINSTATE = tuple(
    f"transform/_{name}_test.py"
    for name in "checkify conditions error_if eval_shape grad_checkpoint grad_grad grad_hessian grad_jacobian jit "
    "loop_collect_return loop_no_collection mapping2 mapping_core util vjp_jvp".split()
)

SUITES = {
    "jax_remat": Suite(
        "JAX, `RematTest`: `remat` under JAX's transforms",
        "jax",
        ("tests/api_test.py",),
        swaps.jax_remat,
        ("RematTest",),
    ),
    "jax_remat_in_ours": Suite(
        "JAX, `RematTest`: every transform", "jax", ("tests/api_test.py",), swaps.jax, ("RematTest",)
    ),
    "jax_control_flow": Suite(
        "JAX, `lax_control_flow_test.py`",
        "jax",
        ("tests/lax_control_flow_test.py",),
        swaps.jax,
        ("LaxControlFlowTest",),
        cases=8,
    ),
    "jax_mutable_array": Suite("JAX, `mutable_array_test.py`", "jax", ("tests/mutable_array_test.py",), swaps.jax),
    "nnx": Suite("flax.nnx, `transforms_test.py`", "flax", ("tests/nnx/transforms_test.py",), swaps.nnx),
    "brainstate": Suite(
        "brainstate, `transform/_*_test.py`", "brainstate", BRAINSTATE, swaps.brainstate, is_installed=True
    ),
}
