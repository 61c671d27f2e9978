"""Checks of objects that JAX's trees do not flatten: they must not hold a tracer when its trace has ended.

A transform passes such an object through unchanged. If it holds a tracer, the tracer outlives its trace, invisible to
every check that looks at the leaves of a tree. The same holds for a generator or a coroutine, whose body has not run
yet.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable
from typing import Any

import jax

from .. import _jax, _states
from .._errors import CreatedStateError, TraceLeakError
from .._unfinished import refuse_unfinished
from .contents import children, has_parts

_DEPTH = 5  # levels of attributes that are searched: a tracer hidden deeper is missed


def refuse_hidden(leaves: Iterable[Any], returned: Callable[[], str] = lambda: "The function returned") -> None:
    """Raise if a leaf that is not an array holds a tracer of the trace that is about to end.

    Args:
        leaves: leaves of the result of a call, or of a value that it leaves in a state.
        returned: the beginning of the message.

    Raises:
        TraceLeakError: an attribute, or a variable that a function closes over, is such a tracer.
        CreatedStateError: a leaf is a ``jax.Ref`` that was made inside.
        FunctionError: a leaf is a generator or a coroutine.
    """
    if _jax.is_eager():
        return
    for leaf in leaves:
        refuse_unfinished(leaf, returned)
        if isinstance(leaf, jax.Ref) and isinstance(leaf, _jax.Tracer) and _jax.ends_with_current_trace(leaf):
            raise CreatedStateError(
                f"{returned()} a {leaf.aval.str_short(short_dtypes=True)} that was created inside; it ends with the "
                f"trace.\n"
                f"Fix: return its value (ref[...] or jax.freeze(ref)), or create the Ref outside."
            )
        hidden = hidden_tracer(leaf, _jax.ends_with_current_trace)
        if hidden is not None:
            raise _leak(leaf, *hidden, returned())


def hidden_tracer(obj: Any, is_left: Callable[[Any], bool]) -> tuple[str, Any] | None:
    """The path to a tracer inside an object that satisfies `is_left`, and the tracer; None if there is none."""
    if not has_parts(obj) or _states.kind_of(obj) is not None:
        return None
    pending = [(obj, "")]
    seen = {id(obj): obj}  # with the objects: those made during the walk must outlive it, or their ids are reused
    # Breadth first, so that the path in the message is a shortest one.
    for _ in range(_DEPTH):
        deeper = []
        for holder, path in pending:
            for key, child in children(holder):
                where = f"{path}.{key}" if path and key else path or key
                if isinstance(child, _jax.Tracer):
                    if is_left(child):
                        return where, child
                elif has_parts(child) and id(child) not in seen and _states.kind_of(child) is None:
                    seen[id(child)] = child
                    deeper.append((child, where))
        pending = deeper
    return None


def _leak(obj: Any, path: str, tracer: Any, returned: str) -> TraceLeakError:
    name, why = type(obj).__name__, "JAX cannot see into that object"
    if isinstance(obj, types.FunctionType):
        holder = f"the function {obj.__qualname__}, whose variable {path!r} is"
        fix = "hand the function what it needs by jax.tree_util.Partial(function, array), which is a pytree"
    elif not jax.tree_util.all_leaves([obj]):  # of a class whose objects may hold states
        holder, why = f"a {name} whose attribute {path!r} holds", "A model passes unchanged"
        fix = f"hold it in a state, or return jax.tree.leaves of the {name}"
    else:
        holder = f"a {name} whose attribute {path!r} holds"
        fix = f"register {name} as a pytree (jax.tree_util.register_dataclass)"
    return TraceLeakError(
        f"{returned} {holder} an array computed inside ({tracer.aval.str_short(short_dtypes=True)}). {why}, so the "
        f"array would stay there as a dead tracer.\nFix: use the array itself, or {fix}."
    )
