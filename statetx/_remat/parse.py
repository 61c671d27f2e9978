"""The options of `remat` from the arguments of users, policies above all."""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterable
from typing import Any

import jax

from .. import _hooks
from .._errors import PolicyError
from .._text import brief, suggestion
from .atoms import JaxPolicy, dots, dots_without_batch_dims, everything, nothing
from .policy import Policy
from .rewriter import Rewriter, refuse_combination
from .stored import StoredType, as_stored_type

_CONSTANTS = {"everything": everything, "nothing": nothing, "dots": dots}
_CONSTANTS["dots_without_batch_dims"] = dots_without_batch_dims


def _jax_names() -> list[str]:
    return [n for n in dir(jax.checkpoint_policies) if not n.startswith("_")]


# Members of jax.checkpoint_policies that return a policy; the other members are policies.
_FACTORIES = frozenset(n for n in _jax_names() if n.startswith(("save_", "offload_")))


def as_policy(policy: Any) -> Policy | Rewriter:
    """Convert an argument ``policy=`` of `remat`: a `Policy`, a `Rewriter`, None, a name, or a callable of JAX's form.

    Raises:
        PolicyError: an unknown name, a function that returns policies and was not called, or another type.
    """
    if isinstance(policy, (Policy, Rewriter)):
        return policy

    if policy is None:
        return nothing
    if isinstance(policy, str):
        family, colon, argument = policy.partition(":")
        if family in _hooks.policies:
            return _hooks.policies[family](*([argument.strip()] if colon else []))
        if policy in _CONSTANTS:
            return _CONSTANTS[policy]
        jax_names = _jax_names()
        if policy not in jax_names:
            hint = suggestion(policy, [*_CONSTANTS, *jax_names])
            named = "" if hint else f" If checkpoint_name gave a value this name: policies.names({brief(policy)})."
            raise PolicyError(
                f"No policy is named {brief(policy)}.{hint}{named} Known: "
                f"{', '.join([*_CONSTANTS, *sorted(jax_names)])}."
            )
        if policy in _FACTORIES:
            raise PolicyError(_not_called(policy))
        return JaxPolicy(getattr(jax.checkpoint_policies, policy))

    if hasattr(policy, "num_runs"):  # of `_loops.strategy`, above this module
        raise PolicyError(
            f"{policy!r} is a strategy for the steps of a loop, not a policy for the values of a function.\n"
            f"Fix: give it to the loop: statetx.scan(..., checkpoint={policy!r})."
        )
    if not callable(policy):
        raise PolicyError(
            f"A policy is None, a name or a callable, got {type(policy).__name__}: {policy!r}.{_fix(policy)}"
        )
    # A function is a policy of JAX's form, so a factory that was not called would pass, and fail only when JAX asks
    # it.
    if getattr(policy, "__module__", "") == "statetx.policies":
        raise PolicyError(f"policies.{policy.__name__} is a function that returns a policy: call it.")
    for name in _FACTORIES:
        if policy is getattr(jax.checkpoint_policies, name):
            raise PolicyError(_not_called(name))
    if not _takes_parameters(policy):
        raise PolicyError(
            f"The function {brief(policy)} cannot be a policy: JAX calls it for each equation, as policy(primitive, "
            "*types, **parameters), and it takes no **parameters.\n"
            "Fix: use statetx.policies, or write def policy(primitive, *types, **parameters): ..., which returns a "
            "bool."
        )
    return JaxPolicy(policy)


def refuse_policy(fun: Any) -> None:
    """Raise if `remat` has got a policy in the place of the function.

    Raises:
        PolicyError: it has. JAX's policies are functions, so ``@remat(policy)`` would call one in place of `remat`.
    """
    is_name = isinstance(fun, str) and fun in (*_CONSTANTS, *_jax_names())
    is_jax = getattr(fun, "__module__", None) == jax.checkpoint_policies.dots_saveable.__module__
    if is_name or isinstance(fun, (Policy, Rewriter)) or (is_jax and callable(fun) and _takes_parameters(fun)):
        raise PolicyError(
            f"remat takes the function by position and the policy by keyword, got the policy {brief(fun)}.\n"
            "Fix: statetx.remat(policy=...), or statetx.remat(fun, policy=...)."
        )


def _takes_parameters(policy: Any) -> bool:
    try:
        parameters = inspect.signature(policy).parameters.values()
    except (TypeError, ValueError):  # of a builtin
        return True
    return any(p.kind is p.VAR_KEYWORD for p in parameters)


def _fix(policy: Any) -> str:
    """The fix for an object that is not a policy, in a sentence of its own; empty if the mistake is not known."""
    if isinstance(policy, (list, tuple, set)) and policy and all(isinstance(x, str) for x in policy):
        return f"\nFix: policies.names({', '.join(map(brief, policy))}) saves the values of these names."
    if isinstance(policy, bool):
        return f"\nFix: policies.{'everything' if policy else 'nothing'} saves {'every value' if policy else 'none'}."
    return "\nFix: give one of its policies, such as policies.dots." if isinstance(policy, types.ModuleType) else ""


def _not_called(name: str) -> str:
    return (
        f"jax.checkpoint_policies.{name} is a function that returns a policy: call it, "
        f"policy=jax.checkpoint_policies.{name}(...)."
    )


def as_value_policy(policy: Any) -> Policy:
    """`as_policy` for an operand of another policy and for the step of a loop, which are judged value by value.

    Raises:
        PolicyError: as `as_policy`, or it is a `Rewriter`, also by name (``"fit:2GiB"``).
    """
    converted = as_policy(policy)
    return refuse_combination(converted) if isinstance(converted, Rewriter) else converted


def as_sequence(policies: Any, caller: str) -> tuple[Any, ...]:
    """The policies in an argument ``policies=``, which takes one or several.

    Raises:
        PolicyError: neither.
    """
    if isinstance(policies, str) or callable(policies):  # a `Policy` is callable
        return (policies,)
    if not isinstance(policies, Iterable):
        raise PolicyError(f"{caller}: policies must be a policy or a sequence of policies, got {policies!r}.")
    return tuple(policies)


# The operators of `Policy` cannot import this module, which imports the classes of policies.
Policy._coerce = staticmethod(as_value_policy)


# -- the other options of remat --------------------------------------------------------------------------------------


def check_prevent_cse(prevent_cse: Any) -> bool | tuple | str:
    if isinstance(prevent_cse, bool) or prevent_cse == "auto":
        return prevent_cse
    if isinstance(prevent_cse, (tuple, list)) and all(isinstance(x, bool) for x in jax.tree.leaves(prevent_cse)):
        return tuple(prevent_cse)
    raise TypeError(
        f"prevent_cse must be a bool, a tuple prefix of bools over the arguments, or 'auto', got {prevent_cse!r}."
    )


def check_formats(formats: Any) -> Any:
    if formats is None or isinstance(formats, (str, StoredType)):
        return None if formats is None else as_stored_type(formats, "remat: inputs_stored_as")
    if not isinstance(formats, (tuple, list)):
        raise TypeError(
            f"remat: inputs_stored_as must be the name of a format or a tuple prefix of the arguments, got {formats!r}."
        )
    return tuple(check_formats(format) for format in formats)


def refuse_formats(rewriter: Rewriter, formats: Any) -> None:
    """Raise if a format is given beside a policy that rewrites the whole function."""
    if jax.tree.leaves(formats):
        raise PolicyError(
            f"remat: policy={rewriter!r} rewrites the whole function and chooses how its values are stored, so it does "
            f"not combine with inputs_stored_as={formats!r}.\n"
            "Fix: give the formats to the plan, statetx.plan(..., stored_as=('bits', 'bfloat16'))."
        )


_FENCES = ("auto", "barrier", "cond")


def check_fence(prevent_cse: Any, fence: Any) -> tuple[bool | tuple | str, str | None]:
    """Resolve both arguments: every fence except "auto" determines `prevent_cse`."""
    if fence not in (*_FENCES, None):
        raise TypeError(f"fence must be 'auto', 'barrier', 'cond' or None, got {fence!r}.{suggestion(fence, _FENCES)}")
    if fence == "auto":
        return prevent_cse, fence
    if prevent_cse not in ("auto", fence is not None):
        raise TypeError(f"fence={fence!r} and prevent_cse={prevent_cse!r} contradict each other; give one of them.")
    return fence is not None, fence
