"""Temporary policies of rematerialized functions, with a record of the functions that are called.

`memory_report` compares policies this way, `assert_remat_equivalent` switches rematerialization off, and the planner
rewrites the functions that are differentiated (`rewritten_by`). No object of the user is changed: `remat` and the
derivatives of this thread ask `override` when they are called.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .. import _jax
from .._equations.primitives import Runs, row_of
from .._equations.release.program import with_released_gradients
from .._equations.structure import Body, table
from .._jax import Jaxpr
from .._lift.outcome import is_traced, pack
from .._lift.stage import InputNames, stage
from .._lift.wrapper import name_of
from .atoms import nothing
from .policy import Policy, StateRef
from .rewriter import Observed, Observer, Rewriter
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
    """Settings that replace every rematerialized function's own in this thread.

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
        releases_gradients: whether jitted functions that are traced release the gradients of their loops.
        repeats_loops: whether these loops run twice where it needs that.
    """

    policy: Policy | Rewriter | None = None
    is_off: bool = False
    suppress_warnings: bool = False
    visited_regions: list[VisitedRegion] | None = None
    undone: list[str] | None = None
    rewriter: Rewriter | None = None
    gradient_order: GradientOrder | None = None
    observer: Observer | None = None
    releases_gradients: bool = False
    repeats_loops: bool = False

    @contextlib.contextmanager
    def _set(self, key: Hashable, **settings: Any) -> Iterator[None]:
        """Replace these settings in this block. Under equal keys, blocks share what JAX has traced."""
        previous = {name: getattr(self, name) for name in settings}
        try:
            vars(self).update(settings)
            # jax.jit must not reuse a trace that it made under other settings, nor any where what stays plain is noted.
            noted = object() if self.undone is not None else None
            with _jax.cache_key_context((key, noted, self.releases_gradients, self.repeats_loops)):
                yield
        finally:
            vars(self).update(previous)

    @contextlib.contextmanager
    def __call__(
        self, policy: Policy | Rewriter | None = None, *, is_off: bool = False, suppress_warnings: bool = False
    ) -> Iterator[list[VisitedRegion]]:
        """Override the settings in this block; gives the list of the regions called in it."""
        regions: list[VisitedRegion] = []
        settings = {"policy": policy, "is_off": is_off, "suppress_warnings": suppress_warnings, "rewriter": None}
        with self._set(object(), visited_regions=regions, **settings):
            yield regions

    def replacing(
        self, policy: Policy | Rewriter, rewriter: Rewriter | None
    ) -> contextlib.AbstractContextManager[None]:
        """Replace the policies and the rewriter in this block. No regions are listed, so that equal blocks share what
        JAX has traced.
        """
        settings = {"policy": policy, "is_off": False, "suppress_warnings": True, "rewriter": rewriter}
        return self._set(("policies", policy, rewriter), visited_regions=[], **settings)

    @contextlib.contextmanager
    def nothing_checkpointed(self) -> Iterator[list[str]]:
        """Rematerialize nothing in this block, not in loops, and nothing under ``jax.checkpoint`` either; gives the
        list of these.
        """
        undone: list[str] = []
        with self._set(object(), undone=undone), self(is_off=True, suppress_warnings=True):
            yield undone

    def rewrite_gradients(self, rewriter: Rewriter | None, **settings: Any) -> contextlib.AbstractContextManager[None]:
        """Rewrite each function that is differentiated in reverse mode in this block and thread.

        Equal rewriters share the programs that JAX has traced, whatever the other `settings`.
        """
        key = "gradients", rewriter, self.policy, self.is_off, self.suppress_warnings
        return self._set(key, rewriter=rewriter, **settings)

    def releasing_gradients(self, *, repeats: bool = False) -> contextlib.AbstractContextManager[None]:
        """Move the updates of each jitted function that is traced in this block and donates inputs into the loops of
        its backward pass, which may run twice for it.
        """
        return self._set("released", releases_gradients=True, repeats_loops=repeats)

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


# -- jitted steps ----------------------------------------------------------------------------------------------------


def _release(jaxpr: Any, is_donated: Sequence[bool]) -> Any:
    if not override.releases_gradients or not any(is_donated):
        return jaxpr
    overwritable = [i for i, donated in enumerate(is_donated) if donated]
    return with_released_gradients(jaxpr, overwritable, repeats=override.repeats_loops)


_jax.rewrite_jitted(_release)


# -- the order of gradients ------------------------------------------------------------------------------------------

# Two gradients may not depend on each other, such as a GAN's, taken for both networks before either is updated. XLA
# would run them in turns, and the values of both would be in memory together.


class GradientOrder:
    """The gradients that are taken in one block."""

    def __init__(self) -> None:
        self._previous = _jax.Noted()

    def run(self, program: Callable[..., Any], last_input: int, inputs: Sequence[Any]) -> list[Any]:
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


# -- rewritten gradients ---------------------------------------------------------------------------------------------

# One place for every gradient: of `jax.grad`, `jax.value_and_grad` and `jax.vjp`, of other libraries (flax and optax
# call JAX's), and of statetx. The function is staged when JAX calls it, and the rewritten equations are differentiated
# instead.


def rewritten_by(rewriter: Rewriter, **settings: Any) -> contextlib.AbstractContextManager[None]:
    """Rewrite each function that is differentiated in reverse mode in this block and thread, with other `settings`;
    those inside of one by `Rewriter.inner`.

    An observer around the block sees them, too.
    """
    observer = rewriter if isinstance(rewriter, Observer) else override.observer
    if observer is not None and observer is not rewriter:
        rewriter = Observed(rewriter, observer)
    return override.rewrite_gradients(rewriter, gradient_order=GradientOrder(), observer=observer, **settings)


def unobserved(rewriter: Rewriter | None = None) -> contextlib.AbstractContextManager[None]:
    """Hide the derivatives in this block from the observer; a rewriter may replace it."""
    return override.rewrite_gradients(rewriter, observer=None)


def _replace(fun: Callable[..., Any], has_aux: bool) -> Callable[..., Any]:
    rewriter = override.rewriter
    # Derivative rules differentiate functions of their own, in the backward pass of a function that has been rewritten.
    if rewriter is None or _jax.in_backward_pass():
        return fun

    def rewritten(*primals: Any) -> Any:
        # A gradient inside the function belongs to it.
        with unobserved(rewriter.inner):
            return _run(fun, has_aux, rewriter, primals)

    return rewritten


_jax.replace_differentiated(_replace)


def _run(fun: Callable[..., Any], has_aux: bool, rewriter: Rewriter, primals: tuple[Any, ...]) -> Any:
    arrays, in_tree = jax.tree.flatten(primals)
    user_function = _jax.differentiated_function(fun)
    out_tree, num_out = None, 0

    def body(*tracers: Any) -> tuple[list[Any], Any]:
        nonlocal out_tree, num_out
        out = fun(*jax.tree.unflatten(in_tree, tracers))
        leaves, out_tree = jax.tree.flatten(out)

        # Auxiliary outputs come last, and get no cotangents. JAX refuses an output that is no pair.
        is_pair = has_aux and isinstance(out, (tuple, list)) and len(out) == 2
        num_out = sum(map(is_traced, jax.tree.leaves(out[0] if is_pair else out)))
        return pack(leaves, [])

    # A rewriter that replaces the function sees inner rematerialized functions with the policy `nothing`, whatever
    # their own, as in `remat`.
    policies: Any = contextlib.nullcontext()
    if not rewriter.keeps_policies:
        policies = override.replacing(nothing, rewriter.inner)
    arrays = [x if isinstance(x, jax.Array) else jnp.asarray(x) for x in arrays]
    names = InputNames(user_function)
    with policies:
        staged, outcome, refs = stage(body, [_jax.abstract(x) for x in arrays], traced_for="statetx.remat", names=names)
    if not rewriter.keeps_order:
        staged, arrays = _in_order_of_reading(staged, arrays)
    name = name_of(user_function)
    build = lambda body: rewriter.rewrite(body, name, num_out)
    replaced = build(staged) if rewriter.is_used_once else table.get(staged, ("gradient", rewriter, num_out), build)
    outs = replaced(staged.operands, *arrays)
    leaves = outcome.add(refs).finish([x if isinstance(x, jax.Array) else jnp.asarray(x) for x in outs])
    return jax.tree.unflatten(out_tree, leaves)


def _in_order_of_reading(body: Body, arrays: Sequence[Any]) -> tuple[Body, list[Any]]:
    """Return the function with its arrays in the order of its reads.

    brainstate differentiates with respect to a dict whose keys are addresses of states: the order of its values differs
    from process to process, and a stored plan would not fit.
    """
    jaxpr, first = body.jaxpr, len(body.jaxpr.invars) - len(arrays)
    order = [i for i in _reading_order(jaxpr) if i >= first]
    if order == sorted(order):
        return body, list(arrays)
    invars = [*jaxpr.invars[:first], *(jaxpr.invars[i] for i in order)]
    reordered = _jax.rebuild(jaxpr, invars=invars, outvars=jaxpr.outvars, eqns=jaxpr.eqns)
    return Body(reordered, body.operands), [arrays[i - first] for i in order]


def _reading_order(jaxpr: _jax.Jaxpr) -> list[int]:
    """The inputs of a jaxpr by number: first those that equations read, in their order, then those that are returned
    only, then the others.
    """
    number = {v: i for i, v in enumerate(jaxpr.invars)}
    read_order: dict[int, None] = {}

    def read(atoms: Sequence[Any]) -> None:
        read_order.update(dict.fromkeys(number[v] for v in atoms if isinstance(v, _jax.Var) and v in number))

    for eqn in jaxpr.eqns:
        row, operands = row_of(eqn), eqn.invars
        if row.runs is Runs.ONCE:  # a call, whose operands may be in any order, too
            operands = [operands[i] for i in _reading_order(_jax.open_jaxpr(eqn.params[row.jaxpr])[0])]
        read(operands)
    read(jaxpr.outvars)
    unread = [i for i in range(len(jaxpr.invars)) if i not in read_order]
    return [*read_order, *sorted(unread, key=lambda i: str(jaxpr.invars[i].aval))]
