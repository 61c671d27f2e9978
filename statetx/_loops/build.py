"""A loop built from a staged body with the strategy of ``checkpoint=``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from .. import _jax
from .._atomic import new_lock
from .._environment import require
from .._equations.structure import Body, table
from .._errors import PolicyError
from .._lift.staged import Staged, body_with_key_data, loop_with_key_data, needs_key_data
from .._lift.wrapper import name_of, place_of, short_name
from .._remat import decide
from .._remat.override import override
from .._remat.policy import Policy
from .._text import brief, suggestion
from .._tree import is_integer
from . import bind
from .offloaded import refuse_in_loops
from .step import LoopStep
from .strategy import Lengths, Slots, Strategy
from .tune import Auto, count_in_plain_loop


def as_strategy(name: str, checkpoint: Any) -> Strategy:
    """The strategy of a ``checkpoint=`` argument, or of its short form.

    Raises:
        PolicyError: it is neither.
    """
    if isinstance(checkpoint, Strategy):
        return checkpoint
    if checkpoint == "auto":
        return Auto()
    if is_integer(checkpoint):
        return Slots(checkpoint)
    if isinstance(checkpoint, tuple) and checkpoint:
        return Lengths(*checkpoint)
    if isinstance(checkpoint, Policy):
        raise PolicyError(
            f"{name}: checkpoint={checkpoint!r} is a policy for the values of one step, not a strategy for the loop.\n"
            f"Fix: give it to a strategy, policies.Slots(n, policy={checkpoint!r}), or put it on the body: "
            f"statetx.remat(body, policy={checkpoint!r})."
        )
    hint = suggestion(checkpoint, ["auto"]) if isinstance(checkpoint, str) else ""
    raise PolicyError(
        f"{name}: checkpoint={brief(checkpoint)} is not a strategy (policies.Levels, Lengths, Slots; Budget('64MiB') "
        f"for a size) nor a short form of one: a number of slots, a tuple of lengths, or 'auto'.{hint}"
    )


def resolve_strategy(name: str, checkpoint: Any, unroll: Any) -> Strategy | None:
    """The strategy of ``checkpoint=``, None without one.

    Raises:
        PolicyError: it is not a strategy, or comes with `unroll`.
    """
    if checkpoint is None:
        return None
    if unroll is True or unroll not in (1, False, None):
        raise PolicyError(
            f"{name}: unroll={unroll!r} and checkpoint={checkpoint!r} do not go together; give one of them."
        )
    strategy = as_strategy(name, checkpoint)
    # A truncation changes the gradients: it is no matter of memory alone.
    is_plain = strategy.truncation is None and override.leaves_plain(f"{name} with checkpoint={checkpoint!r}")
    return None if is_plain else strategy


def make_loop(
    staged: Staged,
    body: Body,
    num_constants: int,
    num_carry: int,
    length: int,
    *,
    reverse: bool = False,
    unroll: int | bool = 1,
    strategy: Strategy | None = None,
    progress: bool = False,
) -> Callable:
    """The loop ``(constants, carry, xs) -> (carry, ys)`` of a body of `staged`, from the table.

    Args:
        body: ``(*constants, *carry, *x) -> (*carry, *y)``.
        strategy: None for a plain loop.
        progress: whether to show a progress bar.

    Raises:
        EffectError: the body has effects that must not be repeated, and a strategy would.
        PolicyError: the strategy does not fit the loop or the devices.
    """
    refuse_effects(staged, body, strategy)
    if strategy is not None and _jax.takes_refs(body.jaxpr):
        strategy = strategy.for_refs()
    title = f"{staged.name} {name_of(staged.fun).rpartition('.')[2]}" if progress else None

    def build(body: Body) -> Callable:
        body = bind.varying_as_it_enters(body, num_constants, num_carry)
        name = f"{staged.name}({name_of(staged.fun)})"
        if strategy is None:
            body = Body(count_in_plain_loop(refuse_in_loops(body.jaxpr, name), length), body.operands)
        if strategy is None and title is None:
            return bind.scan(body, num_constants, num_carry, length=length, reverse=reverse, unroll=unroll)
        tick = Bars(title, length).tick if title else None
        policy = strategy and strategy.policy
        options = {"length": length, "reverse": reverse, "policy": policy, "name": name, "on_tick": tick}
        options["place"] = f"{staged.name} of {short_name(place_of(staged.fun))}"
        if not is_of_words:
            return _build(LoopStep(body, num_constants, num_carry, **options), strategy)
        step = LoopStep(body_with_key_data(body), num_constants, num_carry, **options)
        return loop_with_key_data(_build(step, strategy), body)

    # A strategy runs steps again, with the same keys. JAX's checker of key reuse would take that for a second draw,
    # so that the loop carries keys as words while the checker is on.
    is_of_words = strategy is not None and needs_key_data(body)
    # True and 1 are equal and hash alike, but unroll=True is another loop: hence the type. The title is part of the
    # key since a cached loop reports to the bars that it was built with.
    use = (
        staged.name,
        is_of_words,
        strategy,
        title,
        length,
        reverse,
        type(unroll),
        unroll,
        num_constants,
        num_carry,
    )
    return table.get(body, use, build)


def refuse_effects(staged: Staged, body: Body, strategy: Strategy | None) -> None:
    """Raise if a strategy would repeat effects of the body that must not be repeated, or store what is no array."""
    if strategy is not None:
        for v in (*body.jaxpr.invars, *body.jaxpr.outvars):
            if isinstance(v.aval, _jax.HiType):
                raise PolicyError(
                    f"{staged.name}: checkpoint={strategy!r} stores arrays, and a value of the body "
                    f"{name_of(staged.fun)} has the type {v.aval.str_short()} of hijax.\n"
                    f"Fix: leave checkpoint= out, or carry the arrays that it is made of."
                )
        caller = f"{staged.name}: the body {name_of(staged.fun)}"
        when = f"a step is recomputed, as checkpoint={strategy!r} has it"
        decide.refuse_effects(body.jaxpr, caller, when, "the loop")


def _build(step: LoopStep, strategy: Strategy | None) -> Callable:
    # Without steps there is no residual to save, and a schedule of no blocks has no slots.
    return step.plain() if strategy is None or step.length == 0 else strategy.build(step)


# -- progress bars ---------------------------------------------------------------------------------------------------


class Bars:
    """The bars of one loop: one for the steps, and one for their reversal where a schedule has it.

    A bar starts with the first step of a run and ends with the last. The loop reports about a hundred times.

    Args:
        name: of the loop, shown before the bar.
        length: number of steps.
    """

    def __init__(self, name: str, length: int):
        self._name = name
        self._length = length
        self._every = max(1, length // 100)
        self._lock = new_lock()
        self._shown: dict[str, Any] = {}
        require("rich.progress", "progress=True")

    def tick(self, done: Any, phase: str = "") -> None:
        """Called while tracing, with the number of steps done in this phase."""
        is_due = (done % self._every == 0) | (done == self._length)
        show = lambda n: self._show(int(n), phase)
        # In a branch, so that a step that is not due makes no call to the host.
        jax.lax.cond(is_due, lambda n: jax.debug.callback(show, n), lambda n: None, done)

    def _show(self, done: int, phase: str) -> None:
        from rich.progress import Progress

        # Callbacks come from threads of the runtime, and in no certain order: a bar never goes back.
        with self._lock:
            bar = self._shown.get(phase)
            if bar is None:
                bar = self._shown[phase] = Progress(transient=False)
                bar.add_task(f"{self._name} {phase}".strip(), total=self._length)
                bar.start()
            bar.update(bar.task_ids[0], completed=max(done, bar.tasks[0].completed))
            if done >= self._length:
                bar.stop()
                del self._shown[phase]
