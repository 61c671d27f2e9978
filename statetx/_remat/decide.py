"""Apply a policy to a staged function: edit its equations so that they save the chosen values.

A policy of this package judges each value of the staged function (`survey`). The values to save or offload
are marked (`mark`).
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax

from .. import _jax, _states
from .._equations.primitives import Runs, row_of
from .._errors import EffectError, PolicyError, PolicyWarning
from .._jax import Jaxpr
from .._targets import current
from .._tree import is_float
from . import mark
from .atoms import JaxPolicy, Marks, Masks, everything, names_of, nothing
from .mark import KeepMarked, Labels
from .override import override
from .policy import SAVE, Action, Policy, StateRef, StoredAs, Value, Verdict
from .stored import BITS, StoredType, is_bool
from .survey import Address, Site, Survey, SurveyedRule, names_out_of_reach


def apply(
    policy: Policy,
    jaxpr: Jaxpr,
    origins: Sequence[frozenset[StateRef]],
    name: str,
    *,
    inputs_stored_as: Sequence[StoredType | None] = (),
    is_ordered: bool = False,
) -> tuple[Jaxpr, Any]:
    """Return the jaxpr and the JAX policy that together save the values that `policy` selects.

    Args:
        policy: judges the equations of `jaxpr`. A policy of JAX is returned unchanged.
        origins: for each of the first inputs, the state that it is the value of, if any.
        name: the function's name, for messages.
        inputs_stored_as: for each of the last inputs, the format to store it in; None to store it unchanged.
        is_ordered: whether what follows the forward pass waits until values are stored in fewer bits. Within a loop
            nothing follows.

    Raises:
        PolicyError: the policy names a value that does not occur, or a memory that the devices do not have.
    """
    jaxpr = _jax.without_remat3(jaxpr)
    # JAX asks its own policies about every equation, so one that saves everything would save decoded values, too: it
    # judges the values of the function instead, as in a combination.
    judges = any(format is not None for format in inputs_stored_as)
    jaxpr, jax_policy = _apply(policy, jaxpr, origins, name, is_ordered, judges=judges)
    first = len(jaxpr.invars) - len(inputs_stored_as)
    labels = {
        first + n: mark.StoredLabel(f, mark.SAVE, is_ordered)
        for n, f in enumerate(inputs_stored_as)
        if f is not None and f.shrinks(jaxpr.invars[first + n].aval)
    }
    return _with_inputs(jaxpr, jax_policy, labels)


def refuse_effects(
    jaxpr: Jaxpr,
    caller: str,
    when: str = "the function is recomputed",
    scope: str = "the rematerialized function",
) -> None:
    """Raise if equations that may run again have effects that must not be repeated.

    Args:
        caller, when, scope: who calls them, when they run again, and what to call them outside of, for the message.
    """
    for callback, place in _jax.forbidden_effects(jaxpr):
        raise EffectError(
            f"{caller} calls {callback} at {place}, a host callback with effects, which would run again when {when}.\n"
            f"Fix: call it outside {scope}, or use jax.pure_callback if it only computes, or jax.debug.callback if "
            f"it may run twice."
        )


def _with_inputs(jaxpr: Jaxpr, policy: Any, labels: Mapping[int, mark.StoredLabel]) -> tuple[Jaxpr, Any]:
    """Store inputs in fewer bits, too; `labels` are by the indices of the inputs."""
    if not labels:
        return jaxpr, policy
    policy = policy or KeepMarked(max(Survey(jaxpr).regions, default=-1) + 1)
    return mark.mark_inputs(jaxpr, labels, region=policy.region), policy


def _apply(
    policy: Policy, jaxpr: Jaxpr, origins: Sequence[frozenset[StateRef]], name: str, is_ordered: bool, *, judges: bool
) -> tuple[Jaxpr, Any]:
    if policy == nothing:
        return jaxpr, None
    # Without marks: each would be an equation to stage, and JAX's own policy saves the same values.
    if policy == everything and not judges:
        return jaxpr, jax.checkpoint_policies.everything_saveable
    if isinstance(policy, Marks):
        return keep(jaxpr, dict(policy.marks))

    survey = Survey(jaxpr, origins)
    if not override.suppress_warnings and _check_matches(policy, survey.all_sites, jaxpr, name):
        # A JAX policy that a user wrote may select values that only the derivative computes, which the survey does not
        # see.
        if not isinstance(policy, JaxPolicy) or _jax.is_jax_policy(policy.fun):
            _check_difference(policy, survey.all_sites, name)
    if isinstance(policy, JaxPolicy) and not judges:
        return jaxpr, policy.fun

    labels: dict[Address, Any] = {**decide(policy, survey.sites, is_ordered=is_ordered)}
    for address, rule in survey.rules.items():
        # Judged by the rule for all operands, since nobody knows yet which JAX will ask for. A rule that branches on
        # zero tangents may compute other values: these are recomputed.
        if decide(policy, rule.survey.sites):
            labels[(*address, mark.RULE)] = functools.partial(_labels_of_rule, policy, rule, is_ordered)
    if any(isinstance(atom, Masks) for atom in policy.atoms()):
        for site in survey.sites:
            if _has_masks(site.eqn):
                labels[(*site.address[:-1], mark.RULE)] = functools.partial(_labels_of_masks, policy)
    return _marked(jaxpr, labels, survey)


def keep(
    jaxpr: Jaxpr, labels: Labels, inputs: Mapping[int, mark.StoredLabel] = MappingProxyType({})
) -> tuple[Jaxpr, Any]:
    """Return the jaxpr and the JAX policy that together save the values with these labels; the policy is None without
    labels.

    Args:
        inputs: labels of inputs that are stored in fewer bits, by index.
    """
    if not labels and not inputs:
        return jaxpr, None
    return _with_inputs(*_marked(jaxpr, labels, Survey(jaxpr)), inputs)


def _marked(jaxpr: Jaxpr, labels: Labels, survey: Survey) -> tuple[Jaxpr, Any]:
    if not labels:
        return jaxpr, None
    # Not a unique number: equal layers would differ then, and each would be differentiated and lowered by itself
    # (decision 19).
    region = max(survey.regions, default=-1) + 1
    return mark.mark(jaxpr, labels, region=region), KeepMarked(region)


def _labels_of_rule(policy: Policy, rule: SurveyedRule, is_ordered: bool, jaxpr: Jaxpr) -> Labels:
    """A policy's decision about a custom derivative, taken when the differentiated inputs, and so the jaxpr,
    are known.
    """
    start = len(rule.address) + 1  # addresses in labels are relative to the rule's jaxpr
    labels = decide(policy, Survey.of_rule(rule, jaxpr).sites, is_ordered=is_ordered)
    return {address[start:]: label for address, label in labels.items()}


def _labels_of_masks(policy: Policy, jaxpr: Jaxpr) -> Labels:
    """A policy's decision about the booleans that an operation's own derivative computes, such as where a
    maximum is.
    """
    return decide(policy, _masks(jaxpr))


def _masks(jaxpr: Jaxpr) -> list[Site]:
    """The boolean arrays that a derivative computes."""
    return [
        Site((i, n), Value(eqn.primitive, tuple(x.aval for x in eqn.invars), eqn.params, v.aval, is_bits=True), eqn)
        for i, eqn in enumerate(jaxpr.eqns)
        for n, v in enumerate(eqn.outvars)
        if is_bool(v.aval) and not _jax.is_dropped(v)
    ]


_masked: dict[Any, bool] = {}  # by primitive


def _has_masks(eqn: Any) -> bool:
    """Whether the derivative of an operation computes booleans; its parameters do not matter to that."""
    if _jax.has_rule(eqn) or _jax.loop_of(eqn) is not None or row_of(eqn).runs is not Runs.NOT:
        return False
    if eqn.primitive not in _masked:
        jaxpr = mark.derivative_of(eqn)
        if jaxpr is None:
            return False  # for lack of floats, perhaps
        results = set(map(id, jaxpr.outvars))
        _masked[eqn.primitive] = any(id(site.eqn.outvars[site.address[1]]) not in results for site in _masks(jaxpr))
    return _masked[eqn.primitive] and any(is_float(v.aval) for v in eqn.invars)


def decide(policy: Policy, sites: Sequence[Site], *, is_ordered: bool = False) -> dict[Address, mark.Label]:
    """The labels of the values that a policy saves or offloads."""
    verdicts = [(site, policy.judge(site.value)) for site in sites]
    spaces = current.memory_kinds() if any(v.decision is Action.OFFLOAD for _, v in verdicts) else ()
    labels = {}
    for site, verdict in verdicts:
        if verdict.decision is not Action.RECOMPUTE:
            label = _label(verdict, policy, spaces)
            if verdict.stored is not None:
                label = mark.StoredLabel(verdict.stored, label, is_ordered)
            labels[site.address] = label
    return labels


def carry_formats(policy: Policy | None, jaxpr: Jaxpr, num: int) -> list[StoredType | None]:
    """Exact storage format, between steps of a loop, for each of the first results of a step; None to store it
    unchanged.

    A policy that stores values as bits asks for it: for booleans, for results that are proved to be 0 or 1 whatever the
    carry before the step is, and for those that the policy stores so because it selects their names.
    """
    results = jaxpr.outvars[:num]
    stores_bits = lambda a: isinstance(a, Masks) or (isinstance(a, StoredAs) and a.format.is_exact)
    if policy is None or not any(map(stores_bits, policy.atoms())):
        return [None] * num
    producers = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
    sites = {s.eqn.outvars[s.address[1]]: s for s in Survey(jaxpr).results if len(s.address) == 2}

    def format(v: Any) -> StoredType | None:
        if not isinstance(v, _jax.Var):
            return None
        if is_bool(v.aval):
            return BITS
        while v in producers and producers[v].primitive in _SAME_VALUE:
            v = producers[v].invars[0]
        site = sites.get(v)
        stored = None if site is None else policy.judge(site.value).stored
        is_exact = site is not None and (site.value.is_bits or (stored is not None and stored.is_exact))
        return BITS if is_exact else None

    return [format(v) for v in results]


_SAME_VALUE = (_jax.name_primitive, _jax.mark_primitive, _jax.stored_primitive)
"""Operations that return their first operand."""


def _label(verdict: Verdict, policy: Policy, spaces: Sequence[str]) -> str:
    if verdict.decision is Action.SAVE:
        return mark.SAVE
    missing = [s for s in (verdict.src, verdict.dst) if s not in spaces]
    if not missing:
        return mark.offload(verdict.src, verdict.dst)
    if verdict.otherwise == "save":
        return mark.SAVE
    raise PolicyError(
        f"policy={policy!r}: the devices of this backend have no memory {missing[0]!r}; they have "
        f"{', '.join(map(repr, spaces))}.\nFix: name one of these, or save the values on backends without that memory: "
        f"offload(..., otherwise='save')."
    )


def _check_difference(policy: Policy, sites: Sequence[Site], name: str) -> None:
    """Warn if a policy decides as `nothing` or `everything` does, and is neither."""

    def verdicts(policy: Policy) -> list[Verdict]:
        return [policy.judge(site.value) for site in sites]

    verdicts_of_policy, verdicts_of_everything = verdicts(policy), verdicts(everything)
    is_nothing = all(v.decision is Action.RECOMPUTE for v in verdicts_of_policy)
    # Views do not count: `everything` does not save them, but a policy by name may.
    is_everything = all(
        v.rank == SAVE.rank for v, e in zip(verdicts_of_policy, verdicts_of_everything, strict=True) if e == SAVE
    )
    equivalent = nothing if is_nothing else everything if is_everything else None
    if equivalent is not None and policy != equivalent and not policy.is_plain:
        _warn_once(f"remat({name}): policy={policy!r} saves {equivalent!r} (same as policies.{equivalent!r}).")


def _check_matches(policy: Policy, sites: Sequence[Site], jaxpr: Jaxpr, name: str) -> bool:
    """Whether the function has all values that a policy names; warn or raise if not."""
    matches = True
    values = [site.value for site in sites]
    for atom in policy.atoms():
        if atom.missing == "ignore":
            continue
        message = atom.unmatched(values)
        if message:
            # The name may occur where the survey does not look: then the suggestion of another name alone would
            # mislead.
            out_of_reach = names_out_of_reach(jaxpr)
            for value_name in sorted(names_of(atom) & out_of_reach.keys()):
                message += (
                    f" {value_name!r} occurs inside {out_of_reach[value_name]}, where no single value can be saved."
                )

        if message and atom.missing == "raise":
            raise PolicyError(
                f"remat({name}): policy={policy!r}: {message}\n"
                f"Fix: correct it, or allow it to be missing: missing='warn' or missing='ignore'."
            )
        if message:
            matches = False
            _warn_once(f"remat({name}): policy={policy!r}: {message}")
    return matches


_warned: set[str] = set()


def _warn_once(message: str) -> None:
    # Once in the process: a function is staged in every call, perhaps from many lines.
    if message not in _warned:
        _warned.add(message)
        warnings.warn(message, PolicyWarning, stacklevel=_states.user_stacklevel())
