"""Stage a function: trace it to equations, in which states and Refs are inputs and outputs.

One of the two ways to carry states through a transform. Transforms that need the function as a jaxpr use it (`remat`,
`jit`, loops and branches). The other way, `run`, runs the function under JAX's transform.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from .. import _jax, _states
from .._equations.structure import Body
from .._frames import Effect
from .._states import Kind
from .._tree import partition
from .inputs import InputNames, Lifting
from .wrapper import name_of

_CONVERSIONS = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)
"""JAX's errors for a traced value where Python needs a known one."""


def _read(state: Any, kind: Kind) -> Any:
    return kind.get(state)


def stage(
    fun: Callable[..., tuple[list, Any]],
    avals: Sequence[Any],
    *,
    traced_for: str,
    names: InputNames,
    lifting: Lifting | None = None,
    read: Callable[[Any, Kind], Any] = _read,
) -> tuple[Body, Any, list[Effect]]:
    """Trace ``fun(*arrays) -> (list of arrays, aux)`` once; return it as a `Body`, with `aux` and the effects on Refs.

    The body's inputs are its operands, one input for each of `avals`, and the inputs of `lifting`, in this order. Refs
    that the function closes over are discharged: their values are operands, or inputs of `lifting` if it is given, and
    the last value of each written Ref is a further output, one for each returned effect. `read` reads a Ref.
    """
    aux = None

    def run(*tracers: Any) -> list[Any]:
        nonlocal aux
        if lifting is not None:
            lifting.trace = _jax.current_trace()
        try:
            leaves, aux = fun(*tracers)
        except _CONVERSIONS as e:
            names.explain(e, traced_for)
            raise
        except TypeError as e:
            names.explain_call(e, traced_for, tracers)
            raise
        finally:
            names.forget()
            if lifting is not None:
                lifting.trace = None
        return leaves

    names.num_arguments, names.lifting = len(avals), lifting
    jaxpr, consts = _jax.stage(run, avals, traced_for=traced_for, name=name_of(names.fun), names=names)
    body = Body.close(jaxpr, consts)  # first: a discharge renames the values that nested equations hold
    if _jax.touches_refs(body.jaxpr, body.operands):
        body, effects = _with_explicit_refs(body.jaxpr, body.operands, lifting, read)
        return body, aux, effects
    return body, aux, []


def close_derivative(jaxpr: Any, consts: list[Any]) -> Body:
    """The body of staged equations that may hold derivative rules: a Ref that a rule reads is read now."""
    return with_read_refs(Body.close(jaxpr, consts))  # nested equations may hold the Ref


def with_read_refs(body: Body, read: Callable[[Any, Kind], Any] = _read) -> Body:
    """The body, in which the Refs that it closes over are values, read now by `read`; the body itself if it
    writes one.
    """
    if not _jax.touches_refs(body.jaxpr, body.operands):
        return body
    explicit, effects = _with_explicit_refs(body.jaxpr, body.operands, None, read)
    return body if effects else explicit


def _with_explicit_refs(
    jaxpr: Any, consts: list[Any], lifting: Lifting | None, read: Callable[[Any, Kind], Any]
) -> tuple[Body, list[Effect]]:
    invars = [*jaxpr.constvars, *jaxpr.invars]
    pure, is_ref, written = _jax.discharge_refs(_jax.rebuild(jaxpr, invars=invars, outvars=jaxpr.outvars))
    is_ref = is_ref[: len(consts)]
    kinds = [_states.kind_of_state(c) if r else None for c, r in zip(consts, is_ref, strict=True)]
    effects = [
        Effect(ref, kind, None, kind.site_of(ref))
        for ref, kind, is_written in zip(consts, kinds, written, strict=False)
        if is_written and kind is not None
    ]
    values = [c if kind is None else read(c, kind) for c, kind in zip(consts, kinds, strict=True)]
    variables = pure.invars
    if lifting is not None:
        # Each Ref gets an input of `lifting`, like a state that is read: move its variable to the end.
        refs = [i for i, r in enumerate(is_ref) if r]
        for i in refs:
            dynamic, part = partition(values[i])
            lifting.add(consts[i], _states.kind_of_state(consts[i]), part, dynamic, [_jax.abstract(values[i])])
        others = [i for i in range(len(variables)) if i not in set(refs)]
        variables = [variables[i] for i in (*others, *refs)]
        values = [v for v, r in zip(values, is_ref, strict=True) if not r]
    body = Body.close(_jax.rebuild(pure, invars=variables, outvars=pure.outvars), ())
    return Body(body.jaxpr, [*body.operands, *values]), effects
