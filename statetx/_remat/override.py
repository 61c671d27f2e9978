"""Replace the policies of rematerialized functions for a while, and record which of them are called.

`memory_report` compares policies this way, `assert_remat_equivalent` switches rematerialization off, and the planner
rewrites the functions that are differentiated (`gradients`). No object of the user is changed: `remat` and the
derivatives of this thread ask `override` when they are called.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

from .. import _jax
from .._jax import Jaxpr
from .policy import Policy, StateRef
from .rewriter import Observer, Rewriter
from .survey import NONE, Survey


@dataclasses.dataclass(frozen=True)
class VisitedRegion:
    """A rematerialized function that was called during an override.

    Attributes:
        name: the function's name.
        policy: the policy that was applied.
        prevent_cse: the argument for JAX.
        names: the names that ``checkpoint_name`` gave to its values.
        unmatched: messages about names, paths or filters of the policy that match no value.
    """

    name: str
    policy: Policy | Rewriter
    prevent_cse: bool | tuple[bool, ...] = True
    names: frozenset[str] = NONE
    unmatched: tuple[str, ...] = ()


class Override(threading.local):
    """The settings that replace those of every rematerialized function in this thread.

    Attributes:
        policy: replaces the policy of each function; None to keep it.
        is_off: whether no function under `remat` is rematerialized.
        suppress_warnings: whether a policy may name values that do not occur, or change nothing, without a warning or
            error.
        visited_regions: the rematerialized functions called so far; None outside of an override.
        undone: the loops with ``checkpoint=`` and the functions under ``jax.checkpoint`` that were left plain so far;
            None to leave none plain.
        rewriter: rewrites each function that is differentiated in reverse mode; None to leave them.
        gradient_order: of the gradients that are rewritten; None outside of such a block.
        observer: is told of the gradients that another rewriter replaces; None to tell nothing.
    """

    policy: Policy | Rewriter | None = None
    is_off: bool = False
    suppress_warnings: bool = False
    visited_regions: list[VisitedRegion] | None = None
    undone: list[str] | None = None
    rewriter: Rewriter | None = None
    gradient_order: GradientOrder | None = None
    observer: Observer | None = None

    @contextlib.contextmanager
    def _set(self, *settings: Any, key: Hashable) -> Iterator[None]:
        previous = self.policy, self.is_off, self.suppress_warnings, self.visited_regions, self.rewriter
        self.policy, self.is_off, self.suppress_warnings, self.visited_regions, self.rewriter = settings
        try:
            # jax.jit must not reuse a trace that it made under other settings, nor any where what stays plain is noted.
            noted = object() if self.undone is not None else None
            with _jax.cache_key_context((key, noted)):
                yield
        finally:
            self.policy, self.is_off, self.suppress_warnings, self.visited_regions, self.rewriter = previous

    @contextlib.contextmanager
    def __call__(
        self,
        policy: Policy | Rewriter | None = None,
        *,
        is_off: bool = False,
        suppress_warnings: bool = False,
        rewriter: Rewriter | None = None,
    ) -> Iterator[list[VisitedRegion]]:
        """Override the settings in this block; gives the list of the regions called in it."""
        regions: list[VisitedRegion] = []
        with self._set(policy, is_off, suppress_warnings, regions, rewriter, key=object()):
            yield regions

    def replacing(
        self, policy: Policy | Rewriter, rewriter: Rewriter | None
    ) -> contextlib.AbstractContextManager[None]:
        """Replace the policies and the rewriter in this block. No regions are listed, so that equal blocks share what
        JAX has traced.
        """
        return self._set(policy, False, True, [], rewriter, key=("policies", policy, rewriter))

    @contextlib.contextmanager
    def nothing_checkpointed(self) -> Iterator[list[str]]:
        """Rematerialize nothing in this block, not in loops, and nothing under ``jax.checkpoint`` either; gives the
        list of these.
        """
        previous, self.undone = self.undone, []
        try:
            with self(is_off=True, suppress_warnings=True):
                yield self.undone
        finally:
            self.undone = previous

    def rewrite_gradients(self, rewriter: Rewriter | None) -> contextlib.AbstractContextManager[None]:
        """Rewrite each function that is differentiated in reverse mode in this block and thread.

        Equal rewriters share the programs that JAX has traced.
        """
        settings = (self.policy, self.is_off, self.suppress_warnings, self.visited_regions)
        return self._set(*settings, rewriter, key=("gradients", rewriter, *settings[:3]))

    def note(
        self,
        name: str,
        policy: Policy | Rewriter,
        jaxpr: Jaxpr,
        origins: Sequence[frozenset[StateRef]],
        prevent_cse: Any,
    ) -> None:
        """Add a rematerialized function to `visited_regions`."""
        values = [site.value for site in Survey(_jax.without_remat3(jaxpr), origins).all_sites]
        atoms = () if isinstance(policy, Rewriter) else policy.atoms()
        unmatched = [atom.unmatched(values) for atom in atoms]
        names = NONE.union(*(v.names for v in values))
        assert self.visited_regions is not None
        self.visited_regions.append(VisitedRegion(name, policy, prevent_cse, names, tuple(filter(None, unmatched))))

    def leaves_plain(self, checkpointed: str) -> bool:
        """Whether a loop or function stays plain, which is then noted."""
        if self.undone is None:
            return False
        self.undone.append(checkpointed)
        return True


override = Override()
_jax.undo_checkpoints(lambda name: override.leaves_plain(f"{name} under jax.checkpoint"))


# -- the order of gradients ------------------------------------------------------------------------------------------

# Two gradients may not depend on each other, such as those of the two networks of a GAN that are taken before either is
# updated. XLA would run them in turns, and the values of both would be in memory together.


class GradientOrder:
    """The gradients that are taken in one block."""

    def __init__(self) -> None:
        self._previous = _jax.Noted()

    def run(self, program: Callable, last_input: int, inputs: Sequence[Any]) -> list[Any]:
        """Run a function that is being differentiated once the gradient before is computed.

        Args:
            last_input: the number of an input that the function begins with.
        """
        inputs = list(inputs)
        awaited = [x for x in self._previous.tracers() if _jax.is_usable_here(x)]
        if awaited:
            inputs[last_input] = _jax.hold(inputs[last_input], awaited)
        self._previous = noted = _jax.Noted()
        return program(*(_jax.note(x, noted) if _jax.is_differentiated(x) else x for x in inputs))
