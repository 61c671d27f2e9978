"""The exception tree.

Every error derives from `StatetxError` and from a builtin exception of its kind, so ``except ValueError`` works. Each
message names the broken rule, the state or argument, and a fix, and ends with the address of the error's explanation.
"""

from __future__ import annotations

from ._typing import public

ERRORS_PAGE = "https://statetx.readthedocs.io/en/latest/errors/"


def printable(text: str) -> str:
    r"""Text for a terminal or a page, with an escape in place of each control and format character of a name. Lines
    stay lines.

    Names of states, functions and files are the user's. An escape sequence, or a change of direction, would change what
    is shown around the name.

    Example:
        >>> print(printable("w\x1b[31m\u202e, size:\n4"))
        w\x1b[31m\u202e, size:
        4
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


class Explained(Exception):
    """An exception whose message ends with the address of its explanation: a heading of docs/errors.md.

    The address is added when the message is read: ``args`` keeps the arguments unchanged, so that copies and pickles
    are equal to the original.
    """

    def __str__(self) -> str:
        message = printable(super().__str__())
        if ERRORS_PAGE in message:  # made from the message of another error, which has its own address
            return message
        documented = next(cls for cls in type(self).__mro__ if cls.__module__ == "statetx")  # users derive their own
        return f"{message}\nSee {ERRORS_PAGE}#{documented.__name__.lower()}".lstrip("\n")


@public
class StatetxError(Explained):
    """Root of all errors that statetx raises."""


@public
class TraceLeakError(StatetxError, RuntimeError):
    """A write would leave a tracer in a state after its trace has ended."""


@public
class ForeignStateError(StatetxError, RuntimeError):
    """A state is touched while another thread, or a call that has ended, holds its value."""


@public
class StateAccessError(StatetxError, RuntimeError):
    """A function touched a state that its ``states=`` filter excludes, or an invalidated state, or passed a state to
    JAX as an array.
    """


@public
class CarryTypeError(StatetxError, TypeError):
    """The shape, dtype or structure of a carried state changed in a loop body, or differs between branches."""


@public
class StaticArgumentError(StatetxError, ValueError):
    """``static_argnums`` or ``static_argnames`` name a parameter that the function does not have."""


@public
class PolicyError(StatetxError, ValueError):
    """A rematerialization policy is unknown or misused."""


@public
class PlanError(PolicyError):
    """Raised if no plan keeps the budget, or if a plan is for another program.

    Attributes:
        smallest_bytes: the least temporary memory of the compiled plans; None if none was compiled.
    """

    def __init__(self, message: str, smallest_bytes: int | None = None):
        super().__init__(message)
        self.smallest_bytes = smallest_bytes


@public
class FunctionError(StatetxError, TypeError):
    """A transform was given something other than a function, or one that it cannot run as one call or differentiate: a
    generator, a loss that is not a scalar.
    """


@public
class StateValueError(StatetxError, TypeError):
    """A state is used in place of its value, or the value has a type that is not allowed here."""


@public
class StateFilterError(StatetxError, ValueError):
    """A filter selects no state, or is not a filter."""


@public
class GradientError(StatetxError, ValueError):
    """Gradients do not match the states that an `Optimizer` updates."""


@public
class EffectError(StatetxError, NotImplementedError):
    """A function under rematerialization has an effect that cannot be repeated or undone."""


@public
class CreatedStateError(StatetxError, RuntimeError):
    """A state created in a loop body or a traced call outlives it, and has no single value there."""


@public
class CheckpointError(StatetxError, ValueError):
    """Values of states cannot be taken from an object, or do not fit its states (`values`, `restore`)."""


@public
class TargetError(StatetxError, ValueError):
    """A target is unknown, or programs cannot be compiled for it on this machine, or this program cannot."""


@public
class PolicyWarning(Explained, UserWarning):
    """A rematerialization policy makes no difference, or names values that do not occur; a plan is expensive; or a
    `budget` or `target` is around no code.
    """


@public
class StagingWarning(Explained, UserWarning):
    """A jitted function is staged again in every call, because it returns states that it creates."""
