"""Programs in place of policies: ``policy=`` of `remat` also takes an object that rewrites the whole function, such as a plan."""

from __future__ import annotations

from typing import Any, NoReturn

from .._errors import PolicyError


def refuse_combination(rewriter: Rewriter, *_: Any, **__: Any) -> NoReturn:
    """Raise: two policies can be combined since each answers for one value at a time, and a rewriter has no such answers."""
    raise PolicyError(f"{rewriter!r} rewrites the whole function, so it does not combine with other policies.")


class Rewriter:
    """Base of objects that replace a rematerialized function by another program.

    It judges no values, so it is not a `Policy`. It is hashable, and equal to another only if both rewrite alike, since the table of
    structures is keyed by it.

    Attributes:
        inner: rewrites the functions that the function itself differentiates; None to leave them.
    """

    inner: Rewriter | None = None

    def rewrite(self, body: Any, name: str, num_out: int) -> Any:
        """Return ``(operands, *args) -> outputs`` in place of a staged function (`Body`) of this name.

        The first `num_out` outputs are the function's results; the new values of the states that it writes follow.
        """
        raise NotImplementedError

    # Reflected operators as well: the left operand may be None, a name or a function of JAX, which have no operators for policies.
    __or__ = __ror__ = __and__ = __rand__ = __invert__ = then = refuse_combination

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        """Raise: `jax.checkpoint` calls its policy for each equation."""
        raise PolicyError(
            f"{self!r} rewrites the whole function, and jax.checkpoint asks about one value at a time.\n"
            f"Fix: statetx.remat(f, policy={self!r})."
        )


class Seen(Rewriter):
    """Leaves functions unchanged, and notes whether there are any."""

    def __init__(self) -> None:
        self.any = False

    def rewrite(self, body: Any, name: str, num_out: int) -> Any:
        self.any = True
        return body
