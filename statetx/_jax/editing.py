"""Edit jaxprs."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.extend.core
from jax._src import core as _core
from jax._src.interpreters import partial_eval as _pe
from jax._src.sharding_impls import UNSPECIFIED  # pyright: ignore[reportPrivateImportUsage]

from .equations import Atom, ClosedJaxpr, Eqn, Jaxpr, Literal, Var, is_jaxpr, open_jaxpr, read_variables
from .evaluation import interpret
from .loops import loop_of, with_body
from .versions import is_check_missing


def function_of(eqn: Eqn) -> Jaxpr:
    """A jaxpr of this one equation; its inputs are the variables among the operands."""
    # An operand that is read twice is one input. Literals stay in the equation.
    invars = list(dict.fromkeys(v for v in eqn.invars if isinstance(v, Var)))
    outvars = [Var(v.aval) for v in eqn.outvars]
    info = _core.DebugInfo("statetx", eqn.primitive.name, None, None)
    return Jaxpr([], invars, outvars, [eqn.replace(outvars=outvars)], eqn.effects, info)


class _EditChecks:
    """Whether edited jaxprs are type-checked. A check costs about as much as the edit."""

    on = False


def check_edits(on: bool = True) -> bool:
    """Switch type checks of edited jaxprs on or off; return the former setting."""
    former, _EditChecks.on = _EditChecks.on, on
    return former


def _checked(jaxpr: Jaxpr) -> Jaxpr:
    """Return the jaxpr after JAX's check that each variable is defined once, before its uses, with the right type.

    The body of a `jax.shard_map` alone is not checked: its axis names are bound only within the program that contains
    it.
    """
    if _EditChecks.on and not any(map(_is_manual, (v.aval for v in (*jaxpr.invars, *jaxpr.outvars)))):
        try:
            jax.extend.core.check_jaxpr(jaxpr)
        except NameError:  # an axis of a `jax.shard_map` that types do not show (check_vma=False)
            pass
        except TypeError as e:
            if not is_check_missing(e):
                raise
    return jaxpr


def _is_manual(aval: Any) -> bool:
    sharding = getattr(aval, "sharding", None)
    return sharding is not None and bool(sharding.mesh.manual_axes)


def rebuild(
    jaxpr: Jaxpr, *, invars: Sequence[Var], outvars: Sequence[Atom], eqns: Sequence[Eqn] | None = None
) -> Jaxpr:
    """Replace a jaxpr's inputs, outputs and equations; the result has no constants."""
    # The names of inputs and outputs are by position, and would name others now.
    info = jaxpr.debug_info._replace(arg_names=None, result_paths=None)
    eqns = jaxpr.eqns if eqns is None else list(eqns)
    return _checked(jaxpr.replace(constvars=[], invars=list(invars), outvars=list(outvars), eqns=eqns, debug_info=info))


def constants_as_inputs(jaxpr: Jaxpr) -> Jaxpr:
    """The jaxpr with its constants as the first inputs."""
    if not jaxpr.constvars:
        return jaxpr
    return rebuild(jaxpr, invars=[*jaxpr.constvars, *jaxpr.invars], outvars=jaxpr.outvars)


def substituted(atoms: Sequence[Atom], replaced: Mapping[Var, Atom]) -> list[Atom]:
    """Atoms with others in place of some variables."""
    return [a if isinstance(a, Literal) else replaced.get(a, a) for a in atoms]


def with_atoms(jaxpr: Jaxpr, replaced: Mapping[Var, Atom], eqns: Sequence[Eqn] | None = None) -> Jaxpr:
    """A jaxpr that reads other atoms in place of some variables, which are no inputs then; with other equations, if
    they are given. It has no constants.
    """
    eqns = [e.replace(invars=substituted(e.invars, replaced)) for e in (jaxpr.eqns if eqns is None else eqns)]
    invars = [v for v in jaxpr.invars if v not in replaced]
    return rebuild(jaxpr, invars=invars, outvars=substituted(jaxpr.outvars, replaced), eqns=eqns)


def without_names(x: Any) -> Any:
    """A jaxpr, closed or not, without the names of its inputs. Where a function with a derivative rule has defaults,
    JAX has names of them too, and fails when it removes dead code from a call of the jaxpr.
    """
    jaxpr = open_jaxpr(x)[0]
    jaxpr = jaxpr.replace(debug_info=jaxpr.debug_info._replace(arg_names=None))
    return closed_like(x, jaxpr)


def without_dead_code(jaxpr: Jaxpr | ClosedJaxpr) -> Jaxpr:
    """Remove equations that the outputs do not need, also within loops and regions; the jaxpr may be closed."""
    jaxpr, _ = open_jaxpr(jaxpr)
    return _pe.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)[0]


def with_dropped_results(jaxpr: Jaxpr) -> Jaxpr:
    """Drop the results that nothing reads."""
    read = read_variables(jaxpr)
    drop = lambda eqn: eqn.replace(outvars=[v if v in read else _core.DropVar(v.aval) for v in eqn.outvars])
    return jaxpr.replace(eqns=[eqn if read.issuperset(eqn.outvars) else drop(eqn) for eqn in jaxpr.eqns])


def map_jaxprs(fun: Callable[[Any], Any], eqn: Eqn) -> Eqn:
    """Apply `fun` to each jaxpr in an equation, closed or not; in a `CustomLoop`, to the body of a step.

    Returns `eqn` itself if no jaxpr changes. A jaxpr among values of other types stays: it is a leaf of a tree, as in
    primitives of equinox and lineax, which know it by identity.
    """
    loop = loop_of(eqn)
    if loop is not None:
        body = fun(loop.body)
        return eqn if body is loop.body else with_body(eqn, body)

    def apply(x: Any) -> Any:
        if isinstance(x, (tuple, list)) and any(map(is_jaxpr, x)) and all(v is None or is_jaxpr(v) for v in x):
            # A tuple of branches stays a tuple; a NamedTuple's constructor takes its fields one by one.
            return getattr(x, "_make", type(x))([apply(v) for v in x])
        return fun(x) if is_jaxpr(x) else x

    params = {key: apply(value) for key, value in eqn.params.items()}
    return eqn if all(params[k] is v for k, v in eqn.params.items()) else eqn.replace(params=params)


def map_equations(fun: Callable[[Eqn], Eqn], x: Any) -> Any:
    """Apply a function to each equation of a jaxpr, closed or not.

    An unchanged jaxpr stays the same object, which JAX's caches are keyed by.
    """
    old = open_jaxpr(x)[0].eqns
    new = [fun(eqn) for eqn in old]
    return x if all(map(operator.is_, new, old)) else with_equations(x, new)


def with_equations(x: Any, eqns: Sequence[Eqn]) -> Any:
    """Replace the equations of a jaxpr, closed or not; inputs and outputs stay."""
    return closed_like(x, _checked(open_jaxpr(x)[0].replace(eqns=list(eqns))))


def closed_like(x: Any, jaxpr: Jaxpr) -> Any:
    """Close `jaxpr`, which has no constants or those of `x`, if `x` is closed: a primitive's parameter is always one or
    always the other.
    """
    return jaxpr if isinstance(x, Jaxpr) else ClosedJaxpr(jaxpr, x.consts if jaxpr.constvars else ())


def named_like(closed: ClosedJaxpr, like: Jaxpr) -> ClosedJaxpr:
    """A closed jaxpr with the names of the inputs and outputs of another, which has as many of both."""
    jaxpr, consts = open_jaxpr(closed)
    return ClosedJaxpr(jaxpr.replace(debug_info=like.debug_info), consts)


def spliced(jaxpr: Jaxpr, sources: Sequence[Atom], results: Sequence[Var], like: Eqn) -> list[Eqn]:
    """The equations of a jaxpr without constants between other variables, with the source line of the equation
    `like`.
    """
    eqns: list[Eqn] = []

    def copied(eqn: Eqn, operands: list[Atom]) -> list[Var]:
        outvars = [Var(v.aval) for v in eqn.outvars]
        eqns.append(eqn.replace(invars=operands, outvars=outvars, source_info=like.source_info))
        return outvars

    outs = interpret(jaxpr, sources, copied, literal=lambda atom: atom)
    renamed = dict(zip(outs, results, strict=True))
    return [e.replace(outvars=[renamed.get(v, v) for v in e.outvars]) for e in eqns]


def is_unplaced(eqn: Eqn) -> bool:
    """Whether the equation of a ``jax.jit`` says nothing of shardings, layouts, donation or options of the compiler."""
    params = eqn.params
    is_unspecified = all(x is UNSPECIFIED for x in (*params["in_shardings"], *params["out_shardings"]))
    layouts = (*params["in_layouts"], *params["out_layouts"])
    return is_unspecified and not (any(params["donated_invars"]) or params["compiler_options_kvs"] or any(layouts))


def with_scope(eqn: Eqn, name: str) -> Eqn:
    """Add a name to the equation's name stack; everything that JAX derives from the equation inherits it."""
    info = eqn.source_info
    return eqn.replace(source_info=info.replace(name_stack=info.name_stack.extend(name)))


def inlined(eqn: Eqn, outer: Eqn, *, same_line: bool, **changes: Any) -> Eqn:
    """An equation of the jaxpr in `outer`, below the name stack of `outer`; with `same_line` also at its
    source line.
    """
    info, outer_info = eqn.source_info, outer.source_info
    info = info.replace(name_stack=outer_info.name_stack + info.name_stack)
    return eqn.replace(source_info=info.replace(traceback=outer_info.traceback) if same_line else info, **changes)
