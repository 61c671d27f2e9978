"""Updates in the backward pass: what consumes the gradients of scanned layers runs in the loop that computes them."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from ..._equations.release.fates import told
from ..._equations.release.loops import has_loop
from ..._equations.release.program import released_bytes, stacks_in
from ..._jax import Jaxpr
from ..._remat.override import override
from .treatment import Treatment


def released(step: Jaxpr | None) -> dict[str, Any]:
    """Bytes of the gradients that a staged step releases, and a line for each of its loops, as in a record; without a
    step none.
    """
    stacks = [] if step is None else [stack for stack in stacks_in(step) if stack.is_released]
    return {"released_bytes": released_bytes(stacks), "released": list(told(stacks))}


class ReleasedGradients(Treatment):
    """Updates of scanned layers in the loop of their backward pass, so that no set of gradients exists.

    The updates run elsewhere, and no operation is added. So a step that can have it has it in every plan.
    """

    name = "released"

    @classmethod
    def may_change(cls, gradients: Sequence[Jaxpr], is_donated: bool) -> bool:
        return is_donated and any(map(has_loop, gradients))

    @classmethod
    def around(cls) -> contextlib.AbstractContextManager[None]:
        return override.releasing_gradients()


class RepeatedGradients(ReleasedGradients):
    """The same where a number of all gradients is needed first, such as their norm: the loop runs twice.

    It adds the operations of a backward pass, so a plan has it where nothing cheaper keeps the budget.
    """

    name = "repeated"
    adds_operations = True

    @classmethod
    def around(cls) -> contextlib.AbstractContextManager[None]:
        return override.releasing_gradients(repeats=True)
