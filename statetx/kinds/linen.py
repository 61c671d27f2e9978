"""Modules of flax.linen in a rematerialized function: they hold variables that no frame watches."""

from __future__ import annotations

import inspect
import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax

from .. import _jax
from .._errors import TraceLeakError
from .._objects.contents import children


def refuse_linen_variables(name: str, fun: Callable, args: tuple, kwargs: dict[str, Any]) -> None:
    """Raise if a function that was staged for `remat` has written variables of a linen module: its tracers would stay
    there.

    Raises:
        TraceLeakError: it names the module, the method and the variable.
    """
    for module in _bound_modules(fun, args, kwargs):
        # The modules of one apply or init keep their variables in the scope of the outermost one.
        variables = module.scope.root.mutable_variables()
        for path, value in jax.tree_util.tree_leaves_with_path(variables):
            if _jax.leaked_tracers(value, _jax.current_trace()):
                cls = type(module).__name__
                raise TraceLeakError(
                    f"remat({name}) writes {jax.tree_util.keystr(path, simple=True, separator='.')!r}, a variable of "
                    f"the flax.linen module {cls}.\n"
                    "linen holds variables until its apply or init returns, and remat carries states only: a value "
                    "computed inside would stay there.\n"
                    "Fix: keep the variables in a statetx.State and call apply in the rematerialized function, as the "
                    f"page 'From flax.linen' shows; or make the module with {flax_remat(cls)}."
                )


def module_with_method(function: str, file: str) -> str | None:
    """The class of flax.linen modules that a method such as ``Block.__call__``, written in this file, is of; None if it
    is of none.
    """
    linen, (owner, _, method) = sys.modules.get("flax.linen"), function.rpartition(".")
    pending = [linen.Module] if linen is not None and owner else []
    while pending:
        cls = pending.pop()
        code = getattr(inspect.unwrap(vars(cls).get(method, cls)), "__code__", None)
        name = cls.__qualname__.replace("<locals>.", "")
        if code is not None and code.co_filename == file and f".{name}".endswith(f".{owner}"):
            return cls.__name__
        pending += type.__subclasses__(cls)
    return None


def flax_remat(module: str) -> str:
    """Advice instead of `remat` for a class of flax.linen modules."""
    # It is `jax.checkpoint`, whose barrier XLA:CPU removes.
    return (
        f"flax's nn.remat({module}), which carries the variables of a linen module (on a CPU it saves memory in loops "
        "only, as in nn.scan: XLA merges other recomputation with the first computation)"
    )


def _bound_modules(fun: Callable, args: tuple, kwargs: dict[str, Any]) -> Iterator[Any]:
    """Modules under an apply or init whose variables the function may write: its own, those it closes over, its
    arguments.
    """
    linen = sys.modules.get("flax.linen")
    if linen is None:
        return
    for x in itertools.chain(args, kwargs.values(), (child for _, child in children(fun))):
        if isinstance(x, linen.Module) and x.scope is not None:
            yield x
