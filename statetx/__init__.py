"""Transforms for JAX functions that read and write mutable state.

``@statetx.remat`` on a method of a model keeps every number and every state update of the training step while it
stores a fraction of the activations; `grad`, `jit`, `scan` and the rest carry states through JAX's transforms as
explicit inputs and outputs. See the README for a first program.
"""

import importlib as _importlib
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from . import _hooks
from ._atomic import new_lock as _new_lock
from ._environment import flag as _flag
from ._targets.absent import load_jax as _load_jax

_load_jax()


def _brainstate_kind() -> _Any:
    from .kinds.brainstate import KIND

    return KIND


def _nnx_kind() -> _Any:
    from .kinds.nnx import KIND

    return KIND


def _held_by_haiku() -> _Any:
    from .kinds.haiku import held

    return held()


def _held_by_linen() -> _Any:
    from .kinds.linen import held

    return held()


def _fit_policy(*args: _Any) -> _Any:
    from .planner.fit import Fit

    return Fit(*args)


def _fit_microbatch(*args: _Any) -> _Any:
    from .planner.batches import parts

    return parts(*args)


_hooks.foreign_kinds.update({"brainstate": _brainstate_kind, "flax.nnx": _nnx_kind})
_hooks.holders += [_held_by_haiku, _held_by_linen]
_hooks.policies["fit"] = _fit_policy
_hooks.fits["microbatch"] = _fit_microbatch

from ._errors import CarryTypeError as CarryTypeError
from ._errors import CheckpointError as CheckpointError
from ._errors import CreatedStateError as CreatedStateError
from ._errors import EffectError as EffectError
from ._errors import ForeignStateError as ForeignStateError
from ._errors import FunctionError as FunctionError
from ._errors import GradientError as GradientError
from ._errors import PlanError as PlanError
from ._errors import PolicyError as PolicyError
from ._errors import PolicyWarning as PolicyWarning
from ._errors import StagingWarning as StagingWarning
from ._errors import StateAccessError as StateAccessError
from ._errors import StateFilterError as StateFilterError
from ._errors import StatetxError as StatetxError
from ._errors import StateValueError as StateValueError
from ._errors import StaticArgumentError as StaticArgumentError
from ._errors import TargetError as TargetError
from ._errors import TraceLeakError as TraceLeakError
from ._objects.paths import Not as Not
from ._objects.paths import states as states
from .kinds.native import Param as Param
from .kinds.native import RngState as RngState
from .kinds.native import State as State

__version__ = "0.1.0.dev0"

if _TYPE_CHECKING:
    from . import policies as policies
    from . import testing as testing
    from ._lift.rules import Broadcast as Broadcast
    from ._lift.rules import Carry as Carry
    from ._lift.rules import First as First
    from ._lift.rules import Last as Last
    from ._lift.rules import Mean as Mean
    from ._lift.rules import Split as Split
    from ._loops.truncated import Truncated as Truncated
    from ._targets.current import target as target
    from ._targets.target import Target as Target
    from .caches import CacheInfo as CacheInfo
    from .caches import cache_info as cache_info
    from .caches import clear_cache as clear_cache
    from .memory.measure import MemoryProfile as MemoryProfile
    from .memory.measure import memory_profile as memory_profile
    from .memory.oom import explain_oom as explain_oom
    from .planner._plan import Plan as Plan
    from .planner.batches import max_batch as max_batch
    from .planner.fit import budget as budget
    from .planner.planner import plan as plan
    from .residuals.fwd_bwd import print_fwd_bwd as print_fwd_bwd
    from .residuals.loop_report import loop_report as loop_report
    from .residuals.measure import measure as measure
    from .residuals.measure import memory_report as memory_report
    from .residuals.saved import print_saved_residuals as print_saved_residuals
    from .residuals.saved import saved_residuals as saved_residuals
    from .residuals.table import Residuals as Residuals
    from .training.optimizer import Optimizer as Optimizer
    from .training.values import restore as restore
    from .training.values import values as values
    from .transforms.abstract import eval_shape as eval_shape
    from .transforms.abstract import make_jaxpr as make_jaxpr
    from .transforms.chunked import chunked as chunked
    from .transforms.cond import cond as cond
    from .transforms.cond import switch as switch
    from .transforms.functionalize import StateTrace as StateTrace
    from .transforms.functionalize import functionalize as functionalize
    from .transforms.functionalize import trace_states as trace_states
    from .transforms.grad import grad as grad
    from .transforms.grad import value_and_grad as value_and_grad
    from .transforms.jacobian import hessian as hessian
    from .transforms.jacobian import jacfwd as jacfwd
    from .transforms.jacobian import jacrev as jacrev
    from .transforms.jacobian import jvp as jvp
    from .transforms.jacobian import linearize as linearize
    from .transforms.jit.api import jit as jit
    from .transforms.map import map as map
    from .transforms.microbatch import microbatch as microbatch
    from .transforms.remat import checkpoint as checkpoint
    from .transforms.remat import checkpoint_name as checkpoint_name
    from .transforms.remat import remat as remat
    from .transforms.remat_scan import remat_scan as remat_scan
    from .transforms.scan import scan as scan
    from .transforms.shard_map import shard_map as shard_map
    from .transforms.stack import Stack as Stack
    from .transforms.stack import stack as stack
    from .transforms.stack import unstack as unstack
    from .transforms.vjp import vjp as vjp
    from .transforms.vmap import vmap as vmap
    from .transforms.while_loop import fori_loop as fori_loop
    from .transforms.while_loop import while_loop as while_loop

# The imports above are for type checkers. A name is loaded on first use: importing statetx costs little more than
# importing JAX.
_PUBLIC = {
    ".training.optimizer": "Optimizer",
    "._lift.rules": "Broadcast Carry First Last Mean Split",
    "._loops.truncated": "Truncated",
    "._targets.current": "target",
    "._targets.target": "Target",
    ".training.values": "restore values",
    ".caches": "CacheInfo cache_info clear_cache",
    ".memory.measure": "MemoryProfile memory_profile",
    ".memory.oom": "explain_oom",
    ".planner.batches": "max_batch",
    ".planner._plan": "Plan",
    ".planner.planner": "plan",
    ".planner.fit": "budget",
    ".residuals.fwd_bwd": "print_fwd_bwd",
    ".residuals.loop_report": "loop_report",
    ".residuals.measure": "measure memory_report",
    ".residuals.saved": "print_saved_residuals saved_residuals",
    ".residuals.table": "Residuals",
    ".transforms.abstract": "eval_shape make_jaxpr",
    ".transforms.chunked": "chunked",
    ".transforms.cond": "cond switch",
    ".transforms.functionalize": "StateTrace functionalize trace_states",
    ".transforms.grad": "grad value_and_grad",
    ".transforms.jacobian": "hessian jacfwd jacrev jvp linearize",
    ".transforms.jit.api": "jit",
    ".transforms.map": "map",
    ".transforms.microbatch": "microbatch",
    ".transforms.remat": "checkpoint checkpoint_name remat",
    ".transforms.remat_scan": "remat_scan",
    ".transforms.scan": "scan",
    ".transforms.shard_map": "shard_map",
    ".transforms.stack": "Stack stack unstack",
    ".transforms.vjp": "vjp",
    ".transforms.vmap": "vmap",
    ".transforms.while_loop": "fori_loop while_loop",
}
_MODULE_OF = {name: module for module, names in _PUBLIC.items() for name in names.split()}
# Names that other libraries have, and what to use for them.
_ELSEWHERE = {
    "ParamState": "statetx.Param",
    "Module": "any Python class that holds statetx.State objects",
    "ProgressBar": "progress=True of statetx.scan, fori_loop or map",
    "Rngs": "statetx.RngState",
    "StatefulFunction": "statetx.functionalize, statetx.make_jaxpr or statetx.jit",
    "Variable": "statetx.State",
    "VariableState": "statetx.State",
    "associative_scan": "jax.lax.associative_scan for a function without states, statetx.scan for others",
    **{name: f"statetx.policies.{name}" for name in ("Budget", "Lengths", "Levels", "Slots")},
    "bounded_while_loop": "statetx.while_loop, with max_steps= and checkpoint= for a gradient",
    "checkpointed_for_loop": "statetx.scan or statetx.map with checkpoint=",
    "checkpointed_scan": "statetx.scan with checkpoint=",
    "checkpoint_policies": "statetx.policies; jax.checkpoint_policies are accepted, too",
    "custom_gradient": "jax.custom_gradient for a function without states",
    "custom_jvp": "jax.custom_jvp for a function without states",
    "custom_vjp": "jax.custom_vjp for a function without states",
    "filter_jit": "statetx.jit, which takes any object as an argument",
    "filter_grad": "statetx.grad(f, wrt=statetx.Param)",
    "for_loop": "statetx.map, or statetx.scan with a carry",
    "ifelse": "statetx.cond or statetx.switch",
    "jacobian": "statetx.jacrev or statetx.jacfwd",
    "lax": "statetx.scan, statetx.cond, statetx.switch, statetx.while_loop, statetx.fori_loop and statetx.map; jax.lax "
    "for operations on arrays",
    "nn": "the layers of flax.nnx, brainstate or your own, and jax.nn for functions of arrays",
    "numpy": "jax.numpy",
    "pjit": "statetx.jit, which follows the shardings of its arguments and states",
    "pmap": "statetx.jit with sharded arrays and states, or statetx.shard_map for a function of one device",
    "pure_callback": "jax.pure_callback",
    "random": "jax.random with keys from a statetx.RngState",
    "rematerialize": "statetx.remat",
    "save": "orbax, or another library for files, on the dict that statetx.values(model) gives",
    "vector_grad": "statetx.vjp, with ones for an output that is no scalar",
    "vmap_new_states": "statetx.vmap, under which new states get an axis for the examples",
}
_SUBMODULES = ("policies", "testing", "caches", "memory", "planner", "residuals", "transforms", "kinds")
_loading = _new_lock()


def __getattr__(name: str) -> _Any:
    if name not in _SUBMODULES and name not in _MODULE_OF:
        from ._text import suggestion

        hint = f": use {_ELSEWHERE[name]}" if name in _ELSEWHERE else f".{suggestion(name, __all__)}".rstrip(".")
        raise AttributeError(f"module 'statetx' has no attribute {name!r}{hint}")
    with _loading:  # two threads that load packages from both ends would see half of one
        if name in _SUBMODULES:
            return _importlib.import_module(f".{name}", __name__)
        value = globals()[name] = getattr(_importlib.import_module(_MODULE_OF[name], __name__), name)
    return value


__all__ = sorted(  # pyright: ignore[reportUnsupportedDunderAll]
    {*(name for name in globals() if not name.startswith("_") and name != "kinds"), *_MODULE_OF, "policies", "testing"}
)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


if _flag("STATETX_DEBUG"):
    from ._jax.editing import check_edits as _check_edits
    from .kinds import debug as _kinds_debug

    _check_edits()
    _kinds_debug.install()
