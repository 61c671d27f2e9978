"""From a policy to equations: which values of a staged function are kept, and the function rewritten to say so.

A policy of ours judges the values of a function as it was staged (`survey`), and those that it keeps are marked (`mark`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from .. import _jax, _states
from .._errors import PolicyError, PolicyWarning
from .._jax import Jaxpr
from . import mark
from .mark import KeepMarked, Labels
from .policy import SAVE, Decision, JaxPolicy, Marks, Origin, Policy, Verdict, everything, names_of, nothing
from .survey import NONE, Address, Rule, Site, Survey, names_out_of_reach

# -- trying other policies -----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Region:
    """A rematerialised function that was called while something was being tried.

    Attributes:
        name: the function's.
        policy: what it kept by.
        prevent_cse: as handed to JAX.
        names: those that ``checkpoint_name`` gave to its values.
        unmatched: what the policy names and no value is.
    """

    name: str
    policy: Policy
    prevent_cse: bool | tuple[bool, ...] = True
    names: frozenset[str] = NONE
    unmatched: tuple[str, ...] = ()


class Override(threading.local):
    """What every rematerialised function of this thread does while something is being tried.

    Attributes:
        policy: takes the place of each function's own.
        is_off: whether nothing is rematerialised.
        is_quiet: whether policies may name what does not occur, and change nothing, without a word.
        met: the rematerialised functions that were called meanwhile; None if nothing is being tried.
        around: what a function is wrapped in before `statetx.grad` and its kin differentiate it; None for nothing.
    """

    policy: Policy | None = None
    is_off: bool = False
    is_quiet: bool = False
    met: list[Region] | None = None
    around: Callable[[Callable], Callable] | None = None

    @contextlib.contextmanager
    def _set(self, *new: Any) -> Iterator[None]:
        before = self.policy, self.is_off, self.is_quiet, self.met, self.around
        self.policy, self.is_off, self.is_quiet, self.met, self.around = new
        try:
            # What jax.jit traced under other circumstances is not this.
            with _jax.cache_key_context(object()):
                yield
        finally:
            self.policy, self.is_off, self.is_quiet, self.met, self.around = before

    @contextlib.contextmanager
    def __call__(
        self, policy: Policy | None = None, *, is_off: bool = False, is_quiet: bool = False
    ) -> Iterator[list[Region]]:
        met: list[Region] = []
        with self._set(policy, is_off, is_quiet, met, None):
            yield met

    def differentiated(self, around: Callable[[Callable], Callable]) -> contextlib.AbstractContextManager[None]:
        """In this block (and thread) what is differentiated is wrapped like this, but not what is within it.

        Nothing else is being tried in what is wrapped.
        """
        return self._set(self.policy, self.is_off, self.is_quiet, self.met, around)

    def wrapped(self, fun: Callable) -> Callable:
        """The function as it is to be differentiated."""
        if self.around is None:
            return fun
        around = self.around(fun)

        def alone(*args: Any, **kwargs: Any) -> Any:
            with self._set(None, False, False, None, None):
                return around(*args, **kwargs)

        return alone

    def note(
        self, name: str, policy: Policy, jaxpr: Jaxpr, origins: Sequence[frozenset[Origin]], prevent_cse: Any
    ) -> None:
        """Record a rematerialised function in `met`."""
        values = [site.value for site in Survey(_jax.without_remat3(jaxpr), origins).all_sites]
        unmatched = [atom.unmatched(values) for atom in policy.atoms()]
        names = NONE.union(*(v.names for v in values))
        assert self.met is not None
        self.met.append(Region(name, policy, prevent_cse, names, tuple(filter(None, unmatched))))


override = Override()


# -- deciding ------------------------------------------------------------------------------------------------------


def apply(policy: Policy, jaxpr: Jaxpr, origins: Sequence[frozenset[Origin]], name: str) -> tuple[Jaxpr, Any]:
    """The jaxpr and the policy to hand to JAX so that it keeps what `policy` says.

    Args:
        policy: judges the equations as they are here. One of JAX's is handed on as it is.
        origins: for each of the first inputs, the state whose value it is, if any.
        name: of the function, for messages.

    Raises:
        PolicyError: it names what does not occur, or a memory that the devices do not have.
    """
    jaxpr = _jax.without_remat3(jaxpr)
    if policy == nothing:
        return jaxpr, None
    if policy == everything:
        return jaxpr, jax.checkpoint_policies.everything_saveable
    if isinstance(policy, Marks):
        return keep(jaxpr, dict(policy.marks))
    survey = Survey(jaxpr, origins)
    matches = _check_matches(policy, survey.all_sites, jaxpr, name)
    # A policy for JAX that a user wrote may ask for what only the derivative computes: nothing can be said of it here.
    if matches and not (isinstance(policy, JaxPolicy) and not _jax.is_jax_policy(policy.fun)):
        _check_difference(policy, survey.all_sites, name)
    if isinstance(policy, JaxPolicy):
        return jaxpr, policy.fun
    labels: dict[Address, Any] = {**decide(policy, survey.sites)}
    for at, rule in survey.rules.items():
        if decide(policy, rule.survey.sites):
            labels[(*at, mark.RULE)] = _Deferred(policy, rule)
    return _kept(jaxpr, labels, survey)


def keep(jaxpr: Jaxpr, labels: Labels) -> tuple[Jaxpr, Any]:
    """The jaxpr, and the policy to hand to JAX, so that the values with these labels are kept; the policy is None if none is."""
    return _kept(jaxpr, labels, Survey(jaxpr))


def _kept(jaxpr: Jaxpr, labels: Labels, survey: Survey) -> tuple[Jaxpr, Any]:
    if not labels:
        return jaxpr, None
    region = max(survey.regions, default=-1) + 1
    return mark.mark(jaxpr, labels, region=region), KeepMarked(region)


@dataclasses.dataclass(frozen=True, eq=False)
class _Deferred:
    """What a policy keeps of a custom derivative, decided when it is known which inputs are differentiated."""

    policy: Policy
    rule: Rule

    def __call__(self, jaxpr: Jaxpr) -> Labels:
        at = len(self.rule.address) + 1
        labels = decide(self.policy, Survey.of_rule(self.rule, jaxpr).sites)
        return {address[at:]: label for address, label in labels.items()}


def decide(policy: Policy, sites: Sequence[Site]) -> dict[Address, str]:
    """The labels of the values that a policy keeps."""
    verdicts = [(site.address, policy.judge(site.value)) for site in sites]
    spaces = _jax.memory_spaces() if any(v.decision is Decision.OFFLOAD for _, v in verdicts) else ()
    return {at: _label(v, policy, spaces) for at, v in verdicts if v.decision is not Decision.RECOMPUTE}


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
        f"{', '.join(map(repr, spaces))}.\nFix: name one of these, or have values saved where there is none: "
        f"offload(..., otherwise='save')."
    )


def _check_difference(policy: Policy, sites: Sequence[Site], name: str) -> None:
    """Say so where a policy comes to the same as one that is plainly nothing or everything."""

    def verdicts(policy: Policy) -> list[Verdict]:
        return [policy.judge(site.value) for site in sites]

    mine, all_kept = verdicts(policy), verdicts(everything)
    is_nothing = all(v.decision is Decision.RECOMPUTE for v in mine)
    is_everything = all(v.decision is Decision.SAVE for v, e in zip(mine, all_kept, strict=True) if e == SAVE)
    same = nothing if is_nothing else everything if is_everything else None
    if same is not None and policy != same and not policy.is_plain:
        _warn_once(f"remat({name}): policy={policy!r} keeps what policies.{same!r} does.")


def _check_matches(policy: Policy, sites: Sequence[Site], jaxpr: Jaxpr, name: str) -> bool:
    """Whether the function has all that a policy asks for; says so where it has not."""
    if override.is_quiet:
        return True
    matches = True
    values = [site.value for site in sites]
    for atom in policy.atoms():
        if atom.missing == "ignore":
            continue
        message = atom.unmatched(values)
        if message:
            out_of_reach = names_out_of_reach(jaxpr)
            for wanted in sorted(names_of(atom) & out_of_reach.keys()):
                message += f" {wanted!r} is given within {out_of_reach[wanted]}, of which no single value can be kept."
        if message and atom.missing == "raise":
            raise PolicyError(
                f"remat({name}): policy={policy!r}: {message}\n"
                f"Fix: correct it, or say that it may be missing: missing='warn' or missing='ignore'."
            )
        if message:
            matches = False
            _warn_once(f"remat({name}): policy={policy!r}: {message}")
    return matches


_warned: set[str] = set()


def _warn_once(message: str) -> None:
    if message not in _warned and not override.is_quiet:
        _warned.add(message)
        warnings.warn(message, PolicyWarning, stacklevel=_states.user_stacklevel())
