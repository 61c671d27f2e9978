"""Check the options of `remat`, and convert them to values."""

from __future__ import annotations

from typing import Any

import jax

from .._errors import PolicyError
from .._text import suggestion
from .rewriter import Rewriter
from .stored import StoredType, as_stored_type


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
            f"remat: policy={rewriter!r} rewrites the whole function and chooses how its values are stored, so it "
            f"does not combine with "
            f"inputs_stored_as={formats!r}.\n"
            f"Fix: give the formats to the plan, statetx.plan(..., stored_as=('bits', 'bfloat16'))."
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
