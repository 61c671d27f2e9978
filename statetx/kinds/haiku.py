"""What haiku holds while the function of an ``hk.transform`` runs: parameters, states, random keys."""

from __future__ import annotations

import collections
import sys
from typing import Any

from .._atomic import Store
from .._frames.foreign import Held, nested_items, restoring

_KEYS = "haiku's random keys"

_FIXES = {
    "param": "let hk.transform's init make the parameters before the transform: `if hk.running_init(): return f(x)`",
    "state": "call statetx.{transform} outside of hk.transform, on a function of apply",
    "key": "draw the key before, by hk.next_rng_key(), and pass it as an argument; modules that draw keys themselves "
    "get it from `with hk.with_rng(key):`",
}


def held() -> Held | None:
    """The variables of the running ``hk.transform`` of this thread; None if none runs."""
    base: Any = sys.modules.get("haiku._src.base")
    if base is None or not getattr(base, "frame_stack", ()):
        return None
    frame = base.current_frame()
    keys = frame.rng_stack.peek()

    def values() -> dict[str, Any]:
        states = nested_items(frame.state or {}, "/")
        return {
            **{f"haiku's parameter {path!r}": x for path, x in nested_items(frame.params or {}, "/").items()},
            **{f"haiku's state {path!r}": x.current for path, x in states.items()},
            **({} if keys is None else {_KEYS: keys.internal_state}),
        }

    undo: list[Store] = [*restoring(frame.params), *restoring(frame.state)]
    if keys is not None:
        key, subkeys = keys.internal_state
        undo += [(setattr, keys, "_key", key), (setattr, keys, "_subkeys", collections.deque(subkeys))]
    # The names of the modules that the call makes: a second run of it shall give them the same ones.
    for counter in frame.counter_stack:
        undo += restoring(counter)
    for names in frame.used_names_stack:
        undo += [(set.clear, names), (set.update, names, set(names))]
    return Held(values, undo, _explain)


def _explain(transform: str, variable: str) -> str:
    fix = _FIXES["key" if variable == _KEYS else "param" if " parameter " in variable else "state"]
    theirs = f", or use haiku's hk.{transform}" if hasattr(sys.modules["haiku"], transform) else ""
    return (
        f", which hk.transform holds while it runs. statetx carries its own states only: a value computed inside of "
        f"{transform} would stay there, and break its next use.\nFix: {fix.format(transform=transform)}{theirs}."
    )
