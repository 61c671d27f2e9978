"""Variables of flax.linen while an apply or init runs, with advice for its modules."""

from __future__ import annotations

import inspect
import sys
from typing import Any

from .._frames.foreign import Held, nested_items, restoring


def held() -> Held | None:
    """The variables of the apply or init of linen that runs in this thread; None if none runs."""
    module = sys.modules.get("flax.linen.module")
    context = getattr(module, "_context", None)
    running = None if context is None else context.module_stack[-1]
    if running is None or running.scope is None:
        return None
    # The modules of one apply or init keep their variables in the scope of the outermost one.
    variables = running.scope.root._variables

    def values() -> dict[str, Any]:
        return {f"linen's variable {path!r}": x for path, x in nested_items(variables, ".").items()}

    return Held(values, restoring(variables), _explain)


def _explain(transform: str, variable: str) -> str:
    del variable
    theirs = f"; or use flax's nn.{transform}" if hasattr(sys.modules["flax.linen"], transform) else ""
    return (
        f", which linen holds until its apply or init returns. statetx carries its own states only: a value computed "
        f"inside of {transform} would stay there, and break its next use.\n"
        f"Fix: keep the variables in a statetx.State and call apply in the function given to {transform}, as the page "
        f"'From flax.linen' shows{theirs}."
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
    # It is `jax.checkpoint`, whose barrier XLA:CPU removed before jaxlib 0.11.1.
    return (
        f"flax's nn.remat({module}), which carries the variables of a linen module (on a CPU with jaxlib before 0.11.1 "
        "it saves memory in loops only, as in nn.scan: XLA merges other recomputation with the first computation)"
    )
