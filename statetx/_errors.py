"""The exception tree.

Every error of statetx derives from `StatetxError` and from the builtin exception of the same nature, so
``except ValueError`` keeps working. Each message says which rule was broken, by which state or argument, and
what to do about it.
"""

from __future__ import annotations

from ._typing import public


@public
class StatetxError(Exception):
    """Root of every error that statetx raises itself."""


@public
class TraceLeakError(StatetxError, RuntimeError):
    """A write would leave a tracer in a state after the trace that made it has ended."""


@public
class ForeignStateError(StatetxError, RuntimeError):
    """A state is touched while another thread, or a call that already ended, holds its value."""


@public
class StateAccessError(StatetxError, RuntimeError):
    """A function touched a state that its ``states=`` filter excludes, or a state that is gone."""


@public
class CarryTypeError(StatetxError, TypeError):
    """The shape, dtype or structure of a carried state changed in a loop body, or branches leave different ones."""


@public
class StaticArgumentError(StatetxError, ValueError):
    """``static_argnums`` or ``static_argnames`` name a parameter that the function does not have."""


@public
class PolicyError(StatetxError, ValueError):
    """A rematerialisation policy is unknown or misused."""


@public
class PlanError(PolicyError):
    """A plan cannot be had within its budget, or is for another program.

    Attributes:
        smallest_bytes: the least temporary memory of the plans that were compiled; None where none was.
    """

    def __init__(self, message: str, smallest_bytes: int | None = None):
        super().__init__(message)
        self.smallest_bytes = smallest_bytes


@public
class FunctionError(StatetxError, TypeError):
    """A transform was given a function that it cannot run as one call: a generator, a coroutine, a descriptor."""


@public
class StateValueError(StatetxError, TypeError):
    """A value, or a type of value, that a state cannot have in this place."""


@public
class StateFilterError(StatetxError, ValueError):
    """A filter selects no state, or is not a filter."""


@public
class GradientError(StatetxError, ValueError):
    """Gradients that are not those of the states that an `Optimizer` updates."""


@public
class EffectError(StatetxError, NotImplementedError):
    """A function under rematerialisation has an effect that cannot be repeated or undone."""


@public
class CreatedStateError(StatetxError, RuntimeError):
    """A state made inside a loop body or a traced call outlived it where no single value can be given to it."""


@public
class CheckpointError(StatetxError, ValueError):
    """A checkpoint is damaged, or is of other states; or a step cannot be saved where it was asked for."""


@public
class PolicyWarning(UserWarning):
    """A rematerialisation policy that makes no difference, or that names what does not occur."""


@public
class StagingWarning(UserWarning):
    """A jitted function that is staged again in every call, because of states that it makes."""
