"""The exception tree.

Every error derives from `StatetxError` and from a builtin exception of its kind, so ``except ValueError`` works. Each
message names the broken rule, the state or argument, and a fix.
"""

from __future__ import annotations

from ._typing import public


@public
class StatetxError(Exception):
    """Root of all errors that statetx raises."""


@public
class TraceLeakError(StatetxError, RuntimeError):
    """A write would leave a tracer in a state after its trace has ended."""


@public
class ForeignStateError(StatetxError, RuntimeError):
    """A state is touched while another thread, or a call that has ended, holds its value."""


@public
class StateAccessError(StatetxError, RuntimeError):
    """A function touched a state that its ``states=`` filter excludes, or an invalidated state."""


@public
class CarryTypeError(StatetxError, TypeError):
    """The shape, dtype or structure of a carried state changed in a loop body, or differs between branches."""


@public
class StaticArgumentError(StatetxError, ValueError):
    """``static_argnums`` or ``static_argnames`` name a parameter that the function does not have."""


@public
class PolicyError(StatetxError, ValueError):
    """A rematerialisation policy is unknown or misused."""


@public
class PlanError(PolicyError):
    """No plan keeps the budget, or a plan is for another program.

    Attributes:
        smallest_bytes: the least temporary memory of the compiled plans; None if none was compiled.
    """

    def __init__(self, message: str, smallest_bytes: int | None = None):
        super().__init__(message)
        self.smallest_bytes = smallest_bytes


@public
class FunctionError(StatetxError, TypeError):
    """A transform was given a function that it cannot run as one call: a generator, a coroutine, a descriptor."""


@public
class StateValueError(StatetxError, TypeError):
    """A state's value has a type, or is a value, that is not allowed here."""


@public
class StateFilterError(StatetxError, ValueError):
    """A filter selects no state, or is not a filter."""


@public
class GradientError(StatetxError, ValueError):
    """Gradients do not match the states that an `Optimizer` updates."""


@public
class EffectError(StatetxError, NotImplementedError):
    """A function under rematerialisation has an effect that cannot be repeated or undone."""


@public
class CreatedStateError(StatetxError, RuntimeError):
    """A state created in a loop body or a traced call outlives it, and has no single value there."""


@public
class CheckpointError(StatetxError, ValueError):
    """A checkpoint is damaged, or of other states; or a step cannot be saved."""


@public
class PolicyWarning(UserWarning):
    """A rematerialisation policy makes no difference, or names values that do not occur."""


@public
class StagingWarning(UserWarning):
    """A jitted function is staged again in every call, because of states that it creates."""
