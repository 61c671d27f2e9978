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
from .._loops.derivative import DifferentiableLoop, Differentiated, jvp_of, linear_in_tangents
from .._loops.step import LoopStep
from .._loops.strategy import Strategy, as_count, set_counts
from .._text import format_bytes, parse_bytes
from .._tree import num_bytes
from .program import Segments
from .run import SegmentedRun
from .schedule import Moment, Reverse, TierSchedule, runs_of

_OVERHEAD = 2048  # bytes of the files of a segment, beside their arrays


@dataclasses.dataclass(frozen=True, repr=False)
class Disk(Strategy):
    """Store carries in memory and on disk: gradients of a loop longer than memory, which resume after a kill.

    The loop is driven from the host, in segments that are compiled: call the gradient where nothing is traced, as
    ``statetx.value_and_grad(loss)(...)``, not in a jitted function. Values, states and gradients are those of the plain
    loop, in the order of its operations; they may differ in rounding, as XLA compiles segments and not the loop. A loop
    that is not differentiated is the plain one, and stores nothing.

    If the process is killed, repeat the call: with the same program and arguments it resumes from `path`, and gives the
    bits of a call that was not killed. A store of an unfinished call refuses other calls; one that is done is replaced.
    Checksums find damaged files, which are computed again, and steps that are not deterministic, which raise.

    Args:
        path: of a directory for this loop alone.
        segment: the steps that run as one program. Their residuals must fit into memory.
        slots: how many carries are stored on the device, the first one included; `host`: how many more in the
            host's memory. Files hold those that the schedule wants beyond.
        limit: the size of all files, as ``"200GiB"``; None for no limit.
        checkpoint: how to store less within a segment: a strategy, or a short form of one, as in `scan`.
        save_every: seconds between files that a killed run resumes from, beside those of the schedule.
        costs: the times to write and to read a carry, in runs of a segment; measured once by default.

    Memory:
        `num_carries`, the residuals of a segment, and up to two carries that wait for the thread that writes files.

    Raises:
        PolicyError: an option is wrong; the gradient is traced, by ``jit``, ``vmap`` or a second derivative.
        CheckpointError: the store is in use, of another call, full, or cannot be written. No state has changed.
        EffectError: a step calls the host, or gives other bits when it runs again.

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
        if self.limit is not None:
            try:
                put("limit", parse_bytes(self.limit))
            except ValueError as e:
                raise PolicyError(f"Disk: limit: {e}") from None
        if self.checkpoint is not None:
            put("checkpoint", as_strategy("Disk", self.checkpoint))
        numbers = [self.save_every] if self.costs is None else [self.save_every, *self.costs]
        if not all(isinstance(x, (int, float)) and math.isfinite(x) and x >= 0 for x in numbers):
            raise PolicyError(
                f"Disk: save_every and costs are finite numbers of at least 0, got {self.save_every!r}, {self.costs!r}."
            )
        if self.costs is not None:
            put("costs", tuple(map(float, self.costs)))

    def build(self, step: LoopStep) -> Callable:
        if _jax.calls_host(step.body.jaxpr) or step.body.jaxpr.effects:
            raise EffectError(
                f"{step.name}: a step calls the host, and {self!r} cannot tell after a kill which calls were made.\n"
                f"Fix: return what it would print or save as an output of the step."
            )
        return LoopOnDisk(step, self)

    def schedule(self, num: int, num_files: int | None = None, costs: Sequence[float] | None = None) -> TierSchedule:
        """Of so many segments; for a read and a write that take as long as a segment if no costs are known."""
        return TierSchedule(num, self.slots + self.host, num_files, *(self.costs or costs or (1.0, 1.0)))

    def _schedule(self, length: int) -> TierSchedule:
        return self.schedule(max(1, -(-as_count("Disk: length", length, 0) // self.segment)))

    def runs_of_pull(self, num: int) -> int:
        """Runs of the step in the pull-back of a segment of so many."""
        return num if self.checkpoint is None else self.checkpoint.num_runs(num)

    def num_runs(self, length: int) -> int:
        return int(runs_of(self._schedule(length).replay(self.host), length, self.segment, self.runs_of_pull))

    def num_carries(self, length: int) -> dict[str, int]:
        """The most carries at a time on the device, in the host's memory and on disk, cotangents included.

        The device has the loop's argument, the stored ones, the one at hand, its next value, and cotangents; the disk
        those of the schedule, the last carry, and the cotangents of two segments. For a step whose carry has a
        cotangent of its size, without `limit`, and for a read and a write that take as long as a segment if there are
        no `costs`; `statetx.loop_report` knows the step.

        Example:
            >>> from statetx import policies
            >>> policies.Disk("store", 1000, slots=3, host=4).num_carries(40_000)
            {'device': 8, 'host': 4, 'disk': 3}
        """
        tiers = tiers_of(list(self._schedule(length).replay(self.host)), Sizes(1, 1, 1))
        return {tier.name: tier.num_carries for tier in tiers}


class Tier(NamedTuple):
    """A place of carries: how many it has at a time at the most, cotangents included, and their bytes.

    On disk the outputs and cotangents of a loop's length count in the bytes, too. Up to two carries that wait for the
    thread that writes files are in the device's memory besides.
    """

    name: str
    num_carries: int
    num_bytes: int


class Sizes(NamedTuple):
    """Bytes of a carry, of its cotangents, of all that a segment passes on, of all outputs and cotangents of xs."""

    carry: int
    of_carry: int
    cotangents: int
    outs: int = 0
    of_xs: int = 0


def tiers_of(moments: Sequence[Moment], sizes: Sizes) -> tuple[Tier, ...]:
    """The most carries in each tier."""
    left = num = max(moment.action[-1] for moment in moments)
    on_disk = 0
    for moment in moments:
        left = moment.action.position if isinstance(moment.action, Reverse) else left
        on_disk = max(on_disk, moment.disk * sizes.carry + sizes.of_xs * (num - left) // num)
    on_device = max(
        m.device * sizes.carry + m.cotangents * sizes.cotangents + m.given * sizes.of_carry for m in moments
    )
    in_host = max(moment.host for moment in moments)
    # Beside the carries of the schedule the last one, and cotangents of two segments; or the last ones of the sweep.
    on_disk += sizes.carry + max(sizes.carry, 2 * sizes.cotangents) + sizes.outs
    return (
        Tier("device", max(m.device + m.cotangents + m.given for m in moments), on_device),
        Tier("host", in_host, in_host * sizes.carry),
        Tier("disk", max(moment.disk for moment in moments) + 3, on_disk),
    )


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
        if _is_traced(primals):
            outs = self._plain(*primals)
        else:
            with _jax.eval_context():
                run = SegmentedRun(self, primals, tuple(tangents))
                outs = run.forward()

        def reverse(primals: tuple, _: list, diff_indices: tuple[int, ...], cts: list) -> list:
            if run is not None and not _is_traced(cts):
                with _jax.eval_context():
                    return run.reverse(cts)
            leaves = jax.tree.leaves(primals)
            avals = [_jax.abstract(leaves[i]).to_ct_aval() for i in diff_indices]
            return _jax.refused_call(self.refusal, [*leaves, *(ct for ct in cts if ct is not None)], avals)

        note = Differentiated.here(self, tangents)
        options: dict[str, Any] = {"forward": self._plain, "reverse": reverse, "note": note}
        return outs, linear_in_tangents(primals, [], outs, tangents, **options)

    def refusal(self) -> PolicyError:
        return PolicyError(
            f"{self.step.name}: {self.options!r} runs the loop from the host, and this gradient is traced, by jit, "
            f"vmap, another loop or a second derivative.\n"
            f"Fix: call statetx.value_and_grad(loss)(...) where nothing is traced, and jit what comes before and after "
            f"(statetx.loop_report tells what it stores); or use policies.Slots, which is compiled."
        )

    # -- sizes --

    def sizes(self, diff_indices: tuple[int, ...]) -> Sizes:
        step, of = self.step, lambda avals, indices: num_bytes([avals[i] for i in indices])
        diff_constants, diff_carry, diff_xs = step.sorted_indices(diff_indices)
        of_carry = of(step.avals, diff_carry)
        cts = of(step.constant_avals, diff_constants) + of_carry
        outs = step.length * num_bytes(step.y_avals) + 4 * self.segments.num  # and checksums
        return Sizes(num_bytes(step.avals), of_carry, cts, outs, step.length * of(step.x_avals, diff_xs))

    def num_files(self, diff_indices: tuple[int, ...]) -> int | None:
        """How many carries of the schedule fit on the disk."""
        if self.options.limit is None:
            return None
        carry, _, cts, outs, of_xs = self.sizes(diff_indices)
        # Beside them outputs, the last carry, two to resume from, and cotangents; what is replaced is there twice.
        fixed = outs + 5 * carry + 2 * (cts + of_xs) + _OVERHEAD * self.segments.num
        if self.options.limit < fixed:
            raise PolicyError(
                f"{self.step.name}: {self.options!r}: outputs, cotangents and carries to resume from take "
                f"{format_bytes(fixed)} on disk.\nFix: raise limit=."
            )
        return (self.options.limit - fixed) // max(carry, 1) + 1  # the first carry is an argument, not a file

    def replay(self, diff_indices: tuple[int, ...]) -> list[Moment]:
        """A gradient, if all goes well."""
        schedule = self.options.schedule(self.segments.num, self.num_files(diff_indices))
        return list(schedule.replay(self.options.host))


def _is_traced(values: Any) -> bool:
    return any(isinstance(x, _jax.Tracer) for x in jax.tree.leaves(values))
