"""Apply a policy to a staged function: decide which values to save, and edit the equations accordingly.

A policy of this package judges each value of the function as it was staged (`survey`). The values to save or offload are marked (`mark`).
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Sequence
from typing import Any

import jax

from .. import _jax, _states
from .._errors import PolicyError, PolicyWarning
from .._jax import Jaxpr
from . import mark
from .atoms import JaxPolicy, Marks, everything, names_of, nothing
from .mark import KeepMarked, Labels
from .override import override
from .policy import Policy
from .survey import Address, Rule, Site, Survey, names_out_of_reach
from .value import SAVE, Decision, StateRef, Verdict


def apply(policy: Policy, jaxpr: Jaxpr, origins: Sequence[frozenset[StateRef]], name: str) -> tuple[Jaxpr, Any]:
    """Return the jaxpr and the JAX policy that together save the values that `policy` selects.

    Args:
        policy: judges the equations of `jaxpr`. A policy of JAX is returned unchanged.
        origins: for each of the first inputs, the state that it is the value of, if any.
        name: the function's name, for messages.

    Raises:
        PolicyError: the policy names a value that does not occur, or a memory that the devices do not have.
    """
    jaxpr = _jax.without_remat3(jaxpr)
    if policy == nothing:
        return jaxpr, None
    # Without marks: each would be an equation to stage, only to save what JAX's own policy saves.
    if policy == everything:
        return jaxpr, jax.checkpoint_policies.everything_saveable
    if isinstance(policy, Marks):
        return keep(jaxpr, dict(policy.marks))

    survey = Survey(jaxpr, origins)
    matches = _check_matches(policy, survey.all_sites, jaxpr, name)
    # A JAX policy that a user wrote may select values that only the derivative computes, which the survey does not see.
    if matches and not (isinstance(policy, JaxPolicy) and not _jax.is_jax_policy(policy.fun)):
        _check_difference(policy, survey.all_sites, name)
    if isinstance(policy, JaxPolicy):
        return jaxpr, policy.fun

    labels: dict[Address, Any] = {**decide(policy, survey.sites)}
    for address, rule in survey.rules.items():
        # Judged by the rule for all operands, since nobody knows yet which JAX will ask for. A rule that branches on
        # zero tangents may compute other values: these are recomputed.
        if decide(policy, rule.survey.sites):
            labels[(*address, mark.RULE)] = _Deferred(policy, rule)
    return _marked(jaxpr, labels, survey)


def keep(jaxpr: Jaxpr, labels: Labels) -> tuple[Jaxpr, Any]:
    """Return the jaxpr and the JAX policy that together save the values with these labels; the policy is None without labels."""
    return _marked(jaxpr, labels, Survey(jaxpr))


def _marked(jaxpr: Jaxpr, labels: Labels, survey: Survey) -> tuple[Jaxpr, Any]:
    if not labels:
        return jaxpr, None
    # Not a unique number: equal layers would differ then, and each would be differentiated and lowered by itself
    # (decision 19).
    region = max(survey.regions, default=-1) + 1
    return mark.mark(jaxpr, labels, region=region), KeepMarked(region)


@dataclasses.dataclass(frozen=True, eq=False)
class _Deferred:
    """A policy's decision about a custom derivative, taken when the differentiated inputs are known."""

    policy: Policy
    rule: Rule

    def __call__(self, jaxpr: Jaxpr) -> Labels:
        start = len(self.rule.address) + 1  # addresses in labels are relative to the rule's jaxpr
        labels = decide(self.policy, Survey.of_rule(self.rule, jaxpr).sites)
        return {address[start:]: label for address, label in labels.items()}


def decide(policy: Policy, sites: Sequence[Site]) -> dict[Address, str]:
    """The labels of the values that a policy saves or offloads."""
    verdicts = [(site.address, policy.judge(site.value)) for site in sites]
    spaces = _jax.memory_spaces() if any(v.decision is Decision.OFFLOAD for _, v in verdicts) else ()
    return {address: _label(v, policy, spaces) for address, v in verdicts if v.decision is not Decision.RECOMPUTE}


def _label(verdict: Verdict, policy: Policy, spaces: Sequence[str]) -> str:
    if verdict.decision is Decision.SAVE:
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
    is_nothing = all(v.decision is Decision.RECOMPUTE for v in verdicts_of_policy)
    # Views do not count: `everything` does not save them, but a policy by name may.
    is_everything = all(
        v.decision is Decision.SAVE
        for v, e in zip(verdicts_of_policy, verdicts_of_everything, strict=True)
        if e == SAVE
    )
    equivalent = nothing if is_nothing else everything if is_everything else None
    if equivalent is not None and policy != equivalent and not policy.is_plain:
        _warn_once(f"remat({name}): policy={policy!r} saves {equivalent!r} (same as policies.{equivalent!r}).")


def _check_matches(policy: Policy, sites: Sequence[Site], jaxpr: Jaxpr, name: str) -> bool:
    """Whether the function has all values that a policy names; warn or raise if not."""
    if override.suppress_warnings:
        return True
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
    if message not in _warned and not override.suppress_warnings:
        _warned.add(message)
        warnings.warn(message, PolicyWarning, stacklevel=_states.user_stacklevel())
