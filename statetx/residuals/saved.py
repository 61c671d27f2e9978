"""`saved_residuals`: which values a function saves for its backward pass, from where, why."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

from .. import _jax
from .._equations.inline import inline
from .._equations.primitives import INLINED, flops
from .._jax import Jaxpr, Literal
from .._lift.wrapper import check_callable, short_name
from .._tree import num_bytes
from .._typing import Filter, PyTree
from ._origin import NOT_REMATERIALIZED, UNKNOWN_REGION, Provenance, ProvenanceFinder, buffers, readers
from ._passes import InputOrigin, Passes
from ._trace import TracedCall, inspects, user_line
from .table import Residual, Residuals, lines


@inspects
def saved_residuals(
    fun: Callable[..., Any],
    /,
    *args: Any,
    argnums: int | Sequence[int] | None = None,
    wrt: PyTree | Filter = None,
    has_aux: bool = False,
    **kwargs: Any,
) -> Residuals:
    """List the residuals of a function, saved between its forward and its backward pass, without running either.

    The function may read and write states, contain any transforms, and return any arrays: a loss, or the outputs of a
    model. No array is computed and no state changes; the function's Python runs once.

    Without `argnums` and `wrt` it is differentiated with respect to every float in its arguments and every float array
    of the states that it reads, including data, which a training step does not differentiate. With either, as in
    `grad`: ``wrt=statetx.Param`` lists the residuals of ``grad(fun, wrt=statetx.Param)``, and ``argnums=0`` of
    ``grad(fun)``. Of a training step, which takes gradients itself (as in `plan`), the residuals of these are listed;
    each function that it differentiates once.

    Args:
        fun: the function, or a training step.
        *args, **kwargs: its arguments; arrays may be given as ``jax.ShapeDtypeStruct``.
        argnums: positions of the arguments to differentiate.
        wrt: the states to differentiate: a state, a list or dict of states, or a filter.
        has_aux: whether `fun` returns a pair whose second item is not differentiated.

    Returns:
        `Residuals`, with one `Residual` for each array. Identical arrays are counted once. A value that a loop of
        length T stacks counts as T values of its shape in one step.

    Memory:
        The bytes count the arrays held by the closure that ``jax.vjp`` returns, including arguments and parameters.
        Inside a compiled program XLA may hold fewer: it fuses, and recomputes cheap values.

    Raises:
        StateFilterError: `wrt` selects no state.
        ValueError: `argnums` names a missing argument.

    Source:
        ``jax.ad_checkpoint.print_saved_residuals``, which sees no states and gives no bytes, costs or reasons.

    Example:
        >>> import jax.numpy as jnp, statetx
        >>> w = statetx.Param(jnp.ones((4, 4)))
        >>> @statetx.remat(policy=statetx.policies.dots)
        ... def layer(x):
        ...     return jnp.sin(jnp.tanh(w.value @ x))
        >>> residuals = statetx.saved_residuals(lambda x: layer(x).sum(), jnp.ones(4))
        >>> for value in residuals:
        ...     print(value.type, value.nbytes, value.origin, value.path or value.primitive, value.why)
        f32[4] 16 argument x ('input of layer',)
        f32[4,4] 64 state layer.w ('input of layer',)
        f32[4] 16 intermediate dot_general ('policy of layer',)
        >>> residuals.total_bytes, residuals[2].flops
        (96, 32)
    """
    check_callable("saved_residuals", fun)
    options = {"argnums": argnums, "wrt": wrt, "has_aux": has_aux}
    return residuals_of(traced_to_differentiate("saved_residuals", fun, args, kwargs, **options))


def traced_to_differentiate(
    name: str, fun: Callable[..., Any], args: tuple, kwargs: dict[str, Any], **options: Any
) -> TracedCall:
    """A call whose inputs are differentiated; options as of `saved_residuals`."""
    may_be_step = options.get("argnums") is None and options.get("wrt") is None
    return TracedCall(name, fun, args, kwargs, **options, has_passes=True, traces_numbers=True, unjits=may_be_step)


def residuals_of(call: TracedCall, *, may_be_step: bool = True) -> Residuals:
    """The residuals of a call; `may_be_step` as of `TracedCall.passes`."""
    passes = call.passes(may_be_step=may_be_step)
    name = passes[0].name if len(passes) == 1 else f"{len(passes)} gradients in {short_name(call.name)}"
    return Residuals(name, [row for each in passes for row in _rows(each)])


def _rows(passes: Passes) -> Iterator[Residual]:
    # Regions are inlined here, to find the equation behind a residual; in the backward pass they stay, as its readers.
    jaxpr = inline(passes.forward, calls=INLINED)
    find_provenance = ProvenanceFinder(jaxpr, [s.path if s.origin == "state" else None for s in passes.sources])
    atoms = jaxpr.outvars[passes.num_out :]
    read = readers(passes.backward)
    # Links take no bytes.
    groups = [group for group in buffers(passes) if not _jax.is_link(atoms[group[0]].aval)]
    provenances = [find_provenance(atoms[group[0]]) for group in groups]
    groups, provenances = _with_all_codes(groups, provenances)

    # The cost of a residual assumes that the others are available, under any of their variables.
    available = [
        {a for i in group if not isinstance(a := atoms[i], Literal)} | provenance.aliases
        for group, provenance in zip(groups, provenances, strict=True)
    ]
    definitions, all_available = _definitions(jaxpr), frozenset().union(*available)
    for group, provenance, group_available in zip(groups, provenances, available, strict=True):
        atom = atoms[group[0]]
        # The residual itself does not count as available, under any of its variables: this is the cost of dropping it.
        cost = 0 if provenance.eqn is None else _slice(definitions, [atom], all_available - group_available)[0]
        reading_regions = set().union(*(read[i] for i in group))
        avals = [atoms[i].aval for i in (group if provenance.stored_as else group[:1])]
        yield _row(passes, provenance, avals, cost, reading_regions, find_provenance.nearest_states(provenance))


def _with_all_codes(
    groups: Sequence[list[int]], provenances: Sequence[Provenance]
) -> tuple[list[list[int]], list[Provenance]]:
    """Group the arrays that one value is stored as, such as integers and their scales; each once."""
    merged: dict[Any, tuple[list[int], Provenance]] = {}
    for group, provenance in zip(groups, provenances, strict=True):
        key = provenance.encoder or group[0]
        merged.setdefault(key, ([], provenance))[0].extend(group[:1] if provenance.stored_as else group)
    return [group for group, _ in merged.values()], [provenance for _, provenance in merged.values()]


def _row(
    passes: Passes,
    provenance: Provenance,
    avals: Sequence[Any],
    cost: int,
    reading_regions: set[int],
    nearest_states: list[str],
) -> Residual:
    if provenance.input is not None:
        source = passes.sources[provenance.input]
    else:
        source = InputOrigin("literal" if provenance.eqn is None else "intermediate")
    # A state belongs to its own module.
    if source.origin == "state":
        nearest_states = [source.path]
    # The stored form of an input is another array.
    origin = "intermediate" if provenance.stored_as else source.origin
    file, line, function = ("", 0, "") if provenance.eqn is None else user_line(provenance.eqn)

    return Residual(
        shape=tuple(provenance.aval.shape),
        dtype=str(provenance.aval.dtype),
        times=provenance.times,
        nbytes=num_bytes(avals),
        origin=origin,
        path=source.path,
        kind=source.kind,
        names=tuple(sorted(provenance.names)),
        primitive="" if provenance.eqn is None else provenance.eqn.primitive.name,
        source=f"{file}:{line}" if file else "",
        function=function,
        module=", ".join(sorted({path.rpartition(".")[0] for path in nearest_states} - {""})),
        flops=cost,
        why=_reasons(passes, provenance, reading_regions),
        memory=_jax.memory_of(avals[0]) if origin == "intermediate" else "",
        stored_as=provenance.stored_as,
    )


def _reasons(passes: Passes, provenance: Provenance, reading_regions: set[int]) -> tuple[str, ...]:
    """The reasons for saving a value, from its readers in the backward pass."""
    # A region that computes the value and reads it again is one whose policy saves it; a region that only reads it has
    # it as input.
    reasons = ["not rematerialized"] if NOT_REMATERIALIZED in reading_regions else []
    for region in sorted(reading_regions - {NOT_REMATERIALIZED}):
        name = "a rematerialized function" if region == UNKNOWN_REGION else passes.regions[region]
        reasons.append(f"{'policy' if region in provenance.regions else 'input'} of {name}")
    return tuple(dict.fromkeys(reasons)) or ("not read",)


@_jax.api_boundary
def print_saved_residuals(fun: Callable[..., Any], /, *args: Any, **options: Any) -> None:
    """Print the residuals of a function, one line for each; `saved_residuals` has the arguments and more detail.

    Example:
        >>> import jax.numpy as jnp, statetx
        >>> w = statetx.Param(jnp.ones((4, 4)))
        >>> layer = statetx.remat(lambda x: jnp.sin(w.value @ x))
        >>> statetx.print_saved_residuals(layer, jnp.ones(4))
        f32[4]    16 B  from the argument x
        f32[4,4]  64 B  from the state w (Param)
        80 B in 2 values, 0 B of them intermediate
    """
    print(lines(saved_residuals(fun, *args, **options)))


# -- the cost of computing a value again -----------------------------------------------------------------------------


def _definitions(jaxpr: Jaxpr) -> dict[Any, Any]:
    return {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}


def _slice(definitions: dict[Any, Any], results: Iterable[Any], available: Collection[Any]) -> tuple[int, set]:
    """The operations of the equations that compute `results` from inputs and available values, and these inputs.

    Args:
        definitions: the equation that defines each variable.
        available: variables, at any depth, whose values are available.
    """
    # An equation that is met again for another output is looked at again: a scan may then need more of its body.
    needed: dict[int, tuple[Any, set]] = {}
    inputs = set()
    work = list(results)
    while work:
        v = work.pop()
        if isinstance(v, Literal) or v in available:
            continue
        eqn = definitions.get(v)
        if eqn is None:
            inputs.add(v)
            continue
        _, outs = needed.setdefault(id(eqn), (eqn, set()))
        if v not in outs:
            outs.add(v)
            work += _partial(eqn, outs, available)[1]
    return sum(_partial(eqn, outs, available)[0] for eqn, outs in needed.values()), inputs


def _partial(eqn: Any, outs: Collection[Any], available: Collection[Any]) -> tuple[int, list[Any]]:
    """Operations for some outputs of an equation, and the operands that they need. Of a scan, count only the equations
    needed.
    """
    if eqn.primitive.name != "scan":
        return flops(eqn), eqn.invars

    body = _jax.open_jaxpr(eqn.params["jaxpr"])[0]
    num_consts, num_carry = _jax.scan_counts(eqn)
    results = [inner for v, inner in zip(eqn.outvars, body.outvars, strict=True) if v in outs]
    carries = dict(zip(body.invars[num_consts : num_consts + num_carry], body.outvars[:num_carry], strict=True))

    # A step needs carries that the previous step must compute: add their outputs until there are no more.
    while True:
        cost, inputs = _slice(_definitions(body), results, available)
        missing = [carries[v] for v in inputs if v in carries and carries[v] not in results]
        if not missing:
            break
        results += missing

    return eqn.params["length"] * cost, [a for a, v in zip(eqn.invars, body.invars, strict=True) if v in inputs]
