"""Refs in jaxprs: where they are, how they are discharged."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.core
from jax._src import core as _core
from jax._src.state.discharge import discharge_state as _discharge_state
from jax._src.state.types import AbstractRef as _AbstractRef
from jax._src.state.types import AccumEffect as _AccumEffect
from jax._src.state.types import WriteEffect as _WriteEffect

from . import patches
from .editing import closed_like, map_jaxprs, rebuild
from .equations import ClosedJaxpr, Jaxpr, Var, inner_jaxprs, open_jaxpr
from .rules import _RULES, has_rule, num_unseen
from .staging import stage
from .traces import Tracer, is_eager

_InternalRefEffect = _core.InternalMutableArrayEffect
_internal_ref_effect = _core.internal_mutable_array_effect
_ref_init = _AbstractRef.__init__  # every Ref has a type, also one made while tracing
_has_made_refs = False


def _note_ref(self: Any, *args: Any, **kwargs: Any) -> None:
    global _has_made_refs
    _has_made_refs = True
    _AbstractRef.__init__ = _ref_init
    _ref_init(self, *args, **kwargs)


patches.replace(
    "jax._src.state.types.AbstractRef.__init__",
    _AbstractRef,
    _note_ref,
    "Notes that the program makes a `jax.Ref`, so that programs without any do not pay for them. JAX's own is put "
    "back when the first is made.",
)


def has_made_refs() -> bool:
    """Whether the program has made a `jax.Ref` since statetx was imported."""
    return _has_made_refs


# JAX's own read and write of a Ref where nothing is traced run a program that takes the buffer, and put another one
# back in Python: an interrupt in between loses the value. A copy of the buffer, and the assignment of another buffer,
# lose nothing. Each makes a copy, since JAX writes a Ref's buffer in place.


def ref_value(ref: Any) -> Any:
    """The value of a Ref; if nothing is traced, without taking its buffer."""
    _, buffer = _buffer_of(ref)
    return ref[...] if buffer is None else _copy_to(buffer.sharding, buffer)


def ref_store(ref: Any, value: Any) -> tuple[Any, ...]:
    """A store of an array in a Ref, as a function and its arguments; the function is in C if nothing is traced.

    JAX refuses a value that the Ref does not accept.
    """
    holder, buffer = _buffer_of(ref)
    # Under a trace, or for a value that JAX must convert or refuse: its own way.
    type_ = getattr(value, "shape", None), getattr(value, "dtype", None)
    if buffer is None or (buffer.shape, buffer.dtype) != type_:
        # Indexed along each axis: JAX's rule of `vmap` for a write without indices takes the value's batch axis for the
        # Ref's, and transposes the value or raises.
        return operator.setitem, ref, (slice(None),) * ref.ndim or ..., value
    return setattr, holder, "_buf", _copy_to(buffer.sharding, value)


def ref_array(ref: Any) -> Any:
    """The array that a Ref holds, which a later write may delete; under a trace its value."""
    _, buffer = _buffer_of(ref)
    return ref[...] if buffer is None else buffer


def ref_store_own(ref: Any, value: Any) -> tuple[Any, ...]:
    """As `ref_store`, of an array that nothing else holds: it is not copied."""
    holder, buffer = _buffer_of(ref)
    if buffer is not None and not isinstance(value, Tracer) and _placed(value) == _placed(buffer):
        return setattr, holder, "_buf", value
    return ref_store(ref, value)


def _buffer_of(ref: Any) -> tuple[Any, Any]:
    """The object that holds a Ref's array, and the array; None under a trace, and where JAX holds it in another way."""
    holder = None if isinstance(ref, Tracer) or not is_eager() else getattr(ref, "_refs", None)
    return holder, getattr(holder, "_buf", None)


def _placed(x: Any) -> tuple[Any, ...]:
    """What an array of a Ref must have in common with the next: JAX refuses to update it in place else."""
    return x.shape, x.dtype, x.sharding, x.committed


def _copy_to(sharding: Any, x: Any) -> Any:
    return jax.device_put(x, sharding, may_alias=False)


def touches_refs(jaxpr: Jaxpr, consts: Sequence[Any]) -> bool:
    """Whether a staged function closes over a `jax.Ref` or makes one."""
    if any(isinstance(c, jax.Ref) for c in consts):
        return True
    return any(isinstance(e, _InternalRefEffect) for e in jaxpr.effects)


def takes_refs(jaxpr: Jaxpr) -> bool:
    """Whether an input is a Ref: a derivative rule may write it in the backward pass."""
    return any(isinstance(v.aval, _AbstractRef) for v in jaxpr.invars)


def writes_refs(jaxpr: Jaxpr) -> bool:
    """Whether an input is a Ref that is written: after `discharge_refs`, by a function with a derivative rule."""
    return any(isinstance(e, (_AccumEffect, _WriteEffect)) for e in jaxpr.effects)


def discharge_refs(jaxpr: Jaxpr) -> tuple[Jaxpr, list[bool], list[bool]]:
    """Discharge the Refs among the inputs of a jaxpr without constants.

    An input that is a Ref becomes its value, and the last value of each written Ref becomes a further output, in the
    order of the inputs. Returns the jaxpr and, for each input, whether it is a discharged Ref and whether it is
    written. A Ref that is passed to a function with a derivative rule stays: the rule may write it in the backward
    pass. One that the function closes over and only reads does not.
    """
    jaxpr = _hold_rules(_with_values_of_refs(jaxpr))
    in_rules = _refs_in_rules(jaxpr)
    is_ref = [isinstance(v.aval, _AbstractRef) and v not in in_rules for v in jaxpr.invars]
    # lower=False keeps the rules of functions that are passed a Ref.
    pure, consts = open_jaxpr(_discharge_state(ClosedJaxpr(jaxpr, []), should_discharge=is_ref, lower=False))
    pure = _release_rules(pure)

    # JAX returns the last value of every Ref; a Ref that no equation writes returns its input.
    num_out = len(jaxpr.outvars)
    invars = [*pure.constvars, *pure.invars]
    refs = [v for v, r in zip(pure.invars, is_ref, strict=True) if r]
    last = pure.outvars[num_out:]
    written = [new is not old for new, old in zip(last, refs, strict=True)]
    outvars = [*pure.outvars[:num_out], *(v for v, w in zip(last, written, strict=True) if w)]
    assert not consts, "discharging a jaxpr without constants made some"
    flags = iter(written)
    return rebuild(pure, invars=invars, outvars=outvars), is_ref, [r and next(flags) for r in is_ref]


def _with_values_of_refs(x: Any) -> Any:
    """Read the Refs that functions with a derivative rule close over before their calls, at any depth, unless the
    functions write them; and read those of the caller that are frozen, as JAX does: only a Ref that is made here ends
    here.
    """
    eqns = []
    given = set(open_jaxpr(x)[0].invars)
    for eqn in open_jaxpr(x)[0].eqns:
        if eqn.primitive is _core.freeze_p and eqn.invars[0] in given:
            (get,) = _reading(eqn.invars[0].aval).eqns
            eqns.append(get.replace(invars=eqn.invars, outvars=eqn.outvars))
            continue
        eqn = map_jaxprs(_with_values_of_refs, eqn)
        num = num_unseen(eqn) if has_rule(eqn) else 0
        is_ref = [i < num and isinstance(v.aval, _AbstractRef) for i, v in enumerate(eqn.invars)]
        if any(is_ref):
            call = open_jaxpr(_discharge_state(eqn.params["call_jaxpr"], should_discharge=is_ref, lower=False))[0]
            num_out = len(eqn.outvars)
            read = [v for v, r in zip(call.invars, is_ref, strict=True) if r]
            if call.outvars[num_out:] == read:
                call = rebuild(call, invars=call.invars, outvars=call.outvars[:num_out])
                invars = list(eqn.invars)
                for i in [i for i, r in enumerate(is_ref) if r]:
                    (get,) = _reading(eqn.invars[i].aval).eqns
                    invars[i] = value = Var(call.invars[i].aval)
                    eqns.append(get.replace(invars=[eqn.invars[i]], outvars=[value]))
                closed = ClosedJaxpr(call, [])
                params = {**eqn.params, "call_jaxpr": closed}
                eqn = eqn.replace(invars=invars, params=params, effects=_core.positional_effects(closed))
        eqns.append(eqn)
    return _with_changed_equations(x, eqns)


def _reading(ref_type: Any) -> Jaxpr:
    jaxpr, consts = stage(lambda ref: [ref[...]], [ref_type], traced_for="statetx", name="a read of a Ref")
    assert not consts
    return jaxpr


class _HiddenEquation:
    """An equation hidden from JAX: a parameter that it does not look into."""

    def __init__(self, eqn: Any):
        self.eqn = eqn


_held_p = _core.Primitive("statetx_held")
_held_p.multiple_results = True
_held_p.def_abstract_eval(lambda *_, held: [v.aval for v in held.eqn.outvars])


def _hold_rules(x: Any) -> Any:
    """Hide calls of functions with a derivative rule, at any depth, in a `statetx_held` equation; `_release_rules`
    undoes it.

    JAX expects differentiation to come before the discharge. It would inline a call that is in an inner jaxpr, or that
    makes a Ref itself, and drop its rule.
    """

    def hold(eqn: Any) -> Any:
        if not has_rule(eqn):
            return map_jaxprs(_hold_rules, eqn)
        if any(isinstance(v.aval, _AbstractRef) for v in eqn.invars):
            return eqn
        # Held without effects: these would show JAX the Refs made inside. The call has them again when it is
        # released, and so have the jaxprs around it.
        return eqn.replace(primitive=_held_p, params={"held": _HiddenEquation(eqn)}, effects=_core.no_effects)

    return _with_changed_equations(x, [hold(eqn) for eqn in open_jaxpr(x)[0].eqns])


def _release_rules(x: Any) -> Any:
    """Put the calls hidden by `_hold_rules` back, with the variables that their equations have now."""

    def release(eqn: Any) -> Any:
        if eqn.primitive is _held_p:
            return eqn.params["held"].eqn.replace(invars=eqn.invars, outvars=eqn.outvars)
        inner = map_jaxprs(_release_rules, eqn)
        shows = any(_internal_ref_effect in jaxpr.effects for jaxpr in inner_jaxprs(inner))
        return inner.replace(effects=inner.effects | {_internal_ref_effect}) if shows else inner

    return _with_changed_equations(x, [release(eqn) for eqn in open_jaxpr(x)[0].eqns])


def _with_changed_equations(x: Any, eqns: list[Any]) -> Any:
    jaxpr, _ = open_jaxpr(x)
    if len(eqns) == len(jaxpr.eqns) and all(map(operator.is_, eqns, jaxpr.eqns)):
        return x
    effects = jaxpr.effects | {e for eqn in eqns for e in eqn.effects if isinstance(e, _InternalRefEffect)}
    return closed_like(x, jaxpr.replace(eqns=eqns, effects=effects))


def _refs_in_rules(jaxpr: Any) -> set[Any]:
    """Variables of Refs that some equation passes to a function with a derivative rule, at any depth."""
    in_rules = set()
    for eqn in open_jaxpr(jaxpr)[0].eqns:
        refs = [v for v in eqn.invars if isinstance(v.aval, _AbstractRef)]
        if refs and (eqn.primitive.name in _RULES or any(map(_refs_in_rules, inner_jaxprs(eqn)))):
            in_rules.update(refs)
    return in_rules
