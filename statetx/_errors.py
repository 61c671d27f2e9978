"""The exception tree.

Every error of statetx derives from `StatetxError` and from the builtin exception of the same nature, so
``except ValueError`` keeps working. Each message says which rule was broken, by which state or argument, and
what to do about it.
"""

from __future__ import annotations


class StatetxError(Exception):
    """Root of every error that statetx raises itself."""


class TraceLeakError(StatetxError, RuntimeError):
    """A write would leave a tracer in a state after the trace that made it has ended."""


class ForeignStateError(StatetxError, RuntimeError):
    """A state is touched while another thread, or a call that already ended, holds its value."""


class StateAccessError(StatetxError, PermissionError):
    """A function touched a state that its ``states=`` filter excludes, or a state that is gone."""


class CarryTypeError(StatetxError, TypeError):
    """The shape, dtype or structure of a carried state changed in a loop body, or branches leave different ones."""


class StaticArgumentError(StatetxError, ValueError):
    """``static_argnums`` or ``static_argnames`` name a parameter that the function does not have."""


class PolicyError(StatetxError, ValueError):
    """A rematerialisation policy is unknown or misused."""


class PlanError(PolicyError):
    """A plan cannot be had within its budget, or is for another program.

    Attributes:
        smallest_bytes: the least temporary memory of the plans that were compiled; None where none was.
    """

    def __init__(self, message: str, smallest_bytes: int | None = None):
        super().__init__(message)
        self.smallest_bytes = smallest_bytes


class FunctionError(StatetxError, TypeError):
    """A transform was given a function that it cannot run as one call: a generator, a coroutine, a descriptor."""


class StateValueError(StatetxError, TypeError):
    """A value, or a type of value, that a state cannot have in this place."""


class StateFilterError(StatetxError, ValueError):
    """A filter selects no state, or is not a filter."""


class GradientError(StatetxError, ValueError):
    """Gradients that are not those of the states that an `Optimizer` updates."""


class EffectError(StatetxError, NotImplementedError):
    """A function under rematerialisation has an effect that cannot be repeated or undone."""


class CreatedStateError(StatetxError, RuntimeError):
    """A state made inside a loop body or a traced call outlived it where no single value can be given to it."""


class CheckpointError(StatetxError, ValueError):
    """A checkpoint is damaged, or is of other states; or a step cannot be saved where it was asked for."""


class PolicyWarning(UserWarning):
    """A rematerialisation policy that makes no difference, or that names what does not occur."""


class StagingWarning(UserWarning):
    """A jitted function that is staged again in every call, because of states that it makes."""
