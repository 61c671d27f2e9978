"""`Disk`: a loop longer than memory, whose gradient survives a kill."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from .. import _jax
from .._errors import EffectError, PolicyError
from .._loops.build import as_strategy
from .._loops.derivative import DifferentiableLoop, Differentiated, jvp_of, tangents_by_reversal
from .._loops.step import LoopStep
from .._loops.strategy import Strategy, as_count, set_counts
from .._text import format_bytes, parse_bytes
from .._tree import num_bytes
from .program import Segments
from .run import SegmentedRun
from .schedule import TierSchedule, runs_of

_OVERHEAD = 2048  # bytes of the files of a segment, beside their arrays
UNKNOWN = (1.0, 1.0)  # costs: a write and a read take as long as a segment


@dataclasses.dataclass(frozen=True, repr=False)
class Disk(Strategy):
    """Store carries in memory and on disk: gradients of a loop longer than memory, which resume after a kill.

    The loop is driven from the host, in segments that are compiled: call the gradient where nothing is traced, as
    ``statetx.value_and_grad(loss)(...)``, not in a jitted function. Values, states and gradients are the plain
    loop's, in the order of its operations; they may differ in rounding, as XLA compiles segments and not the loop. A
    loop that is not differentiated is the plain one, and stores nothing.

    If the process is killed, repeat the call: with the same program and arguments it resumes from `path`, and gives the
    bits of a call that was not killed. A store of an unfinished call refuses other calls; one that is done is replaced.
    Of functions behind ``jax.pure_callback`` it compares the code, not the values that they read.
    Checksums find damaged files, which are computed again, and steps that are not deterministic, which raise.

    Args:
        path: of a directory for this loop alone.
        segment: the steps that run as one program. Their residuals must fit into memory.
        slots: how many carries are stored on the device, the first one included; `host`: how many more in the
            host's memory. Files hold those that the schedule wants beyond.
        limit: the size of all files, as ``"200GiB"``; None for no limit.
        checkpoint: how to store less within a segment: a strategy, or a short form of one, as in `scan`.
        save_every: seconds between files that a killed run resumes from, beside the schedule's.
        costs: the times to write and to read a carry, in runs of a segment; measured once by default.

    Memory:
        `statetx.loop_report` tells the carries in each tier. Beside them the residuals of a segment, and up to two
        carries that wait for the thread that writes files.

    Raises:
        PolicyError: an option is wrong; the gradient is traced, by ``jit``, ``vmap`` or a second derivative.
        CheckpointError: the store is in use, of another call, full, or cannot be written. No state has changed.
        EffectError: a step calls the host (not by ``jax.pure_callback``), or gives other bits when it runs again.

    Source:
        Herrmann and Pallez 2020, "H-Revolve", ACM TOMS 46(2).

    Example:
        >>> import tempfile, jax, jax.numpy as jnp, statetx
        >>> from statetx import policies
        >>> folder = tempfile.TemporaryDirectory()
        >>> def loss(w, checkpoint=None):
        ...     return statetx.scan(lambda h, _: (jnp.tanh(w * h), None), 1.0, length=100, checkpoint=checkpoint)[0]
        >>> on_disk = policies.Disk(folder.name, 10, slots=3)
        >>> bool(jnp.isclose(jax.grad(loss)(0.9, on_disk), jax.grad(loss)(0.9)))
        True
        >>> folder.cleanup()
    """

    path: str
    segment: int
    slots: int = dataclasses.field(default=8, kw_only=True)
    host: int = dataclasses.field(default=0, kw_only=True)
    limit: Any = dataclasses.field(default=None, kw_only=True)
    checkpoint: Any = dataclasses.field(default=None, kw_only=True)
    save_every: float = dataclasses.field(default=60.0, kw_only=True)
    costs: Any = dataclasses.field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        put = lambda name, value: object.__setattr__(self, name, value)
        if not isinstance(self.path, (str, os.PathLike)):
            raise PolicyError(f"Disk: the path of a directory comes first, got {self.path!r}.")
        put("path", os.path.abspath(self.path))
        set_counts(self, "segment", "slots")
        put("host", as_count("Disk: host", self.host, 0))
        try:
            put("limit", None if self.limit is None else parse_bytes(self.limit, "limit="))
        except PolicyError as e:
            raise PolicyError(f"Disk: limit: {e}") from None
        put("checkpoint", None if self.checkpoint is None else as_strategy("Disk", self.checkpoint))
        put("costs", None if self.costs is None else tuple(self.costs))
        numbers = [self.save_every, *(self.costs or ())]
        if not all(isinstance(x, (int, float)) and math.isfinite(x) and x >= 0 for x in numbers):
            raise PolicyError(f"Disk: save_every and costs are finite numbers of at least 0, got {numbers}.")

    def build(self, step: LoopStep) -> Callable:
        if step.body.jaxpr.effects:
            raise EffectError(
                f"{step.name}: a step calls the host, and {self!r} cannot tell after a kill which calls were made.\n"
                f"Fix: return what it would print or save as an output of the step, or use jax.pure_callback if it "
                f"only computes."
            )
        return LoopOnDisk(step, self)

    def num_runs(self, length: int) -> int:
        num = max(1, -(-as_count("Disk: length", length, 0) // self.segment))
        schedule = TierSchedule(num, self.slots + self.host, None, *(self.costs or UNKNOWN))
        return int(runs_of(schedule.replay(self.host), length, self.segment, self.runs_of_pull))

    def runs_of_pull(self, num: int) -> int:
        """Runs of the step in the pull-back of a segment of so many."""
        return num if self.checkpoint is None else self.checkpoint.num_runs(num)


class StoredSizes(NamedTuple):
    """Bytes of a carry, of its cotangents, of all that a segment passes on, of all outputs and cotangents of xs."""

    carry: int
    of_carry: int
    cotangents: int
    outs: int
    of_xs: int


class LoopOnDisk(DifferentiableLoop):
    """The loop of a `Disk`."""

    def __init__(self, step: LoopStep, options: Disk):
        super().__init__(step)
        self.options, self.segments = options, Segments(step, options.segment, options.checkpoint)

    def with_step(self, step: LoopStep) -> LoopOnDisk:
        return LoopOnDisk(step, self.options)

    def derivative(
        self, primals: tuple, tangents: dict[int, Any], *, is_linearized: bool
    ) -> tuple[tuple[list, list], list]:
        if not is_linearized:  # forward mode stores nothing
            return jvp_of(self._plain, primals, tangents)
        run = None
        if _jax.has_tracers(primals):
            outs = self._plain(*primals)
        else:
            with _jax.eval_context():
                run = SegmentedRun(self, primals, tuple(tangents))
                outs = run.forward()

        def reverse(primals: tuple, _: list, diff_indices: tuple[int, ...], cts: list) -> list:
            if run is not None and not _jax.has_tracers(cts):
                with _jax.eval_context():
                    return run.reverse(cts)
            leaves = jax.tree.leaves(primals)
            avals = [_jax.abstract(leaves[i]).to_ct_aval() for i in diff_indices]
            return _jax.refused_call(self.refusal, [*leaves, *(ct for ct in cts if ct is not None)], avals)

        note = Differentiated.here(self, tangents)
        options: dict[str, Any] = {"forward": self._plain, "reverse": reverse, "note": note}
        return outs, tangents_by_reversal(primals, [], outs, tangents, **options)

    def refusal(self) -> PolicyError:
        return PolicyError(
            f"{self.step.name}: {self.options!r} runs the loop from the host, and this gradient is traced, by jit, "
            f"vmap, another loop or a second derivative.\n"
            f"Fix: call statetx.value_and_grad(loss)(...) where nothing is traced, and jit what comes before and after "
            f"(statetx.loop_report tells what it stores); or use policies.Slots, which is compiled."
        )

    # -- sizes --

    def sizes(self, diff_indices: tuple[int, ...]) -> StoredSizes:
        step, of = self.step, lambda avals, indices: num_bytes([avals[i] for i in indices])
        diff_constants, diff_carry, diff_xs = step.sorted_indices(diff_indices)
        outs = step.length * num_bytes(step.y_avals) + 4 * self.segments.num  # and checksums
        of_constants, of_carry = of(step.constant_avals, diff_constants), of(step.avals, diff_carry)
        return StoredSizes(
            num_bytes(step.avals), of_carry, of_constants + of_carry, outs, step.length * of(step.x_avals, diff_xs)
        )

    def schedule(self, diff_indices: tuple[int, ...], costs: Sequence[float] = UNKNOWN) -> TierSchedule:
        """The schedule for these costs, if the options have none."""
        carry, _, cts, outs, of_xs = self.sizes(diff_indices)
        options, num_files = self.options, None
        if options.limit is not None:
            # Outputs, the last carry, two to resume from, and cotangents; a file exists twice while it is replaced.
            fixed = outs + 5 * carry + 2 * (cts + of_xs) + _OVERHEAD * self.segments.num
            if options.limit < fixed:
                raise PolicyError(
                    f"{self.step.name}: {options!r}: outputs, cotangents and carries to resume from take "
                    f"{format_bytes(fixed)} on disk.\nFix: raise limit=."
                )
            num_files = (options.limit - fixed) // max(carry, 1) + 1  # the first carry is an argument, not a file
        return TierSchedule(self.segments.num, options.slots + options.host, num_files, *(options.costs or costs))
