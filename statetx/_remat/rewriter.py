"""Programs in place of policies: ``policy=`` of `remat` also takes an object that rewrites the whole function, such as
a plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

import jax

from .. import _jax
from .._cached import cached_property
from .._equations.structure import Body
from .._errors import PolicyError
from .._jax import ArrayFunction


def refuse_combination(rewriter: Rewriter, *_: Any, **__: Any) -> NoReturn:
    """Raise: two policies can be combined since each answers for one value at a time, and a rewriter has no such
    answers.
    """
    raise PolicyError(f"{rewriter!r} rewrites the whole function, so it does not combine with other policies.")


class Rewriter:
    """Base of objects that replace a rematerialized function by another program.

    It judges no values, so it is not a `Policy`. It is hashable, and equal to another only if both rewrite alike, since
    the table of structures is keyed by it.

    Attributes:
        inner: rewrites the functions that the function itself differentiates; None to leave them.
        keeps_policies: whether rematerialized functions inside keep their policies, since nothing is replaced.
        is_used_once: whether it is made for one trace. Its functions then must not stay in the table of structures,
            where they would keep the arrays of the trace alive.
        keeps_order: whether it sees the inputs in their own order, not in the order of the reads.
    """

    keeps_policies = False
    is_used_once = False
    keeps_order = False

    @cached_property  # not a property: some set it
    def inner(self) -> Rewriter | None:
        return None

    def rewrite(self, body: Body, name: str, num_out: int, /) -> ArrayFunction:
        """Return ``(operands, *args) -> outputs`` in place of a staged function of this name.

        The first `num_out` outputs are the function's results; the new values of the states that it writes follow.
        """
        raise NotImplementedError

    # Reflected operators as well: the left operand may be None, a name or a function of JAX, which have no operators
    # for policies.
    __or__ = __ror__ = __and__ = __rand__ = __invert__ = then = refuse_combination

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        """Raise: `jax.checkpoint` calls its policy for each equation."""
        raise PolicyError(
            f"{self!r} rewrites the whole function, and jax.checkpoint asks about one value at a time.\n"
            f"Fix: statetx.remat(f, policy={self!r})."
        )


class Observer(Rewriter):
    """Leaves functions unchanged, and is told of each that is differentiated; also of those that another rewriter
    replaces (`Observed`). It names their equations by a ``jax.named_scope``: `marks_in` finds them.

    JAX caches traces by observer. One that takes notes must be a new one for each trace; `MARKER` takes none.
    """

    keeps_policies = True
    is_used_once = True

    def observe(self, outputs: Sequence[Any], run: ArrayFunction, operands: Sequence[Any], args: Sequence[Any]) -> None:
        """Note a call ``run(operands, *args)``; its first results, of types `outputs`, are results of the function."""

    def rewrite(self, body: Body, name: str, num_out: int, /) -> ArrayFunction:
        return self.observing(body, num_out, body)

    def observing(self, body: Body, num_out: int, replacement: ArrayFunction) -> ArrayFunction:
        """The replacement of a staged function, whose calls are noted."""
        outputs = [v.aval for v in body.jaxpr.outvars[:num_out]]

        @jax.named_scope(_MARKS[_are_scalars(outputs)])
        def run(operands: Sequence[Any], *args: Any) -> list[Any]:
            self.observe(outputs, replacement, operands, args)
            return replacement(operands, *args)

        return run


class Observed(Rewriter):
    """A rewriter under an observer; equal to another one of the same two."""

    def __init__(self, rewriter: Rewriter, observer: Observer):
        self._rewriter, self._observer = rewriter, observer
        self.inner, self.keeps_policies = rewriter.inner, rewriter.keeps_policies
        self.keeps_order = rewriter.keeps_order
        self.is_used_once = True

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Observed) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash((self._rewriter, self._observer))

    def rewrite(self, body: Body, name: str, num_out: int, /) -> ArrayFunction:
        return self._observer.observing(body, num_out, self._rewriter.rewrite(body, name, num_out))


class Seen(Observer):
    """Notes whether a function is differentiated, as `any`."""

    any = False

    def observe(self, outputs: Sequence[Any], run: ArrayFunction, operands: Sequence[Any], args: Sequence[Any]) -> None:
        self.any = True


MARKER = Observer()
_MARKS = {True: "statetx_differentiates_scalars", False: "statetx_differentiates_arrays"}


def marks_in(jaxpr: _jax.Jaxpr) -> set[bool]:
    """Tell of the functions that an `Observer` has seen differentiated in a jaxpr: True if one returns scalars alone,
    False if one does not.
    """
    marks: set[bool] = set()
    pending, visited = [jaxpr], set()
    while pending:
        inner = pending.pop()
        if id(inner) not in visited:
            visited.add(id(inner))
            scopes = {_jax.scope(eqn) for eqn in inner.eqns}
            marks |= {is_scalar for is_scalar, mark in _MARKS.items() if any(mark in scope for scope in scopes)}
            pending += [nested for eqn in inner.eqns for nested in _jax.inner_jaxprs(eqn)]
    return marks


def _are_scalars(types: Iterable[Any]) -> bool:
    return all(x.shape == () for x in types)


def is_training_step(differentiated: Iterable[Sequence[Any]], outputs: Iterable[Any]) -> bool:
    """Whether a function is a training step, and no loss, by the gradients that it takes itself.

    Args:
        differentiated: the types of the outputs of each function that it differentiates.
        outputs: the types of its own float outputs.
    """
    return is_step_by_marks(set(map(_are_scalars, differentiated)), outputs)


def is_step_by_marks(marks: set[bool], outputs: Iterable[Any]) -> bool:
    """`is_training_step` for the result of `marks_in`.

    A step differentiates a scalar, or returns arrays. A loss may take derivatives of arrays, as an integrator does that
    linearizes the equations of neurons.
    """
    return True in marks or (bool(marks) and not _are_scalars(outputs))
