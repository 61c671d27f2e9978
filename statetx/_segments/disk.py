"""`Disk`: a loop longer than memory, whose gradient survives a kill."""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
from collections.abc import Callable
from typing import Any

import jax

from .. import _jax
from .._errors import EffectError, PolicyError
from .._loops.build import as_strategy
from .._loops.derivative import DifferentiableLoop, Differentiated, jvp_of, linear_in_tangents
from .._loops.step import LoopStep
from .._loops.strategy import Strategy, as_count, set_counts
from .._text import parse_bytes
from .program import Segments
from .run import SegmentedRun
from .schedule import DISK, MEMORY, TierSchedule


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

    def _schedule(self, length: int) -> TierSchedule:
        num = max(1, -(-as_count("Disk: length", length, 0) // self.segment))
        return TierSchedule(num, self.slots + self.host, None, *(self.costs or (1.0, 1.0)))

    def num_runs(self, length: int) -> int:
        schedule = self._schedule(length)
        return length + math.ceil((schedule.cost + 1) * length / schedule.length)

    def num_carries(self, length: int) -> dict[str, int]:
        """The most carries at a time on the device, in the host's memory and on disk.

        The device has the loop's argument and the stored ones, and as many more as the carry at hand, its next value,
        and two cotangents. The disk has those of the schedule, the last carry, and its cotangent; with files to resume
        from (`save_every`) up to three more. For a step whose carry has a cotangent of its size, without `limit`, and
        for a read and a write that take as long as a segment if there are no `costs`.

        Example:
            >>> from statetx import policies
            >>> policies.Disk("store", 1000, slots=3, host=4).num_carries(40_000)
            {'device': 8, 'host': 4, 'disk': 2}
        """
        schedule, stored, counts = self._schedule(length), {}, []
        for _ in itertools.chain(schedule.sweep(0, stored), schedule.reversal(schedule.length, stored)):
            tiers = [tier for position, tier in stored.items() if position]
            in_host, on_disk = min(self.host, tiers.count(MEMORY)), tiers.count(DISK)
            counts.append((len(tiers) - in_host - on_disk + 4, in_host, on_disk + 2))
        return dict(zip(("device", "host", "disk"), map(max, *counts), strict=True))


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
        self.refuse_traced(primals)
        with _jax.eval_context():
            run = SegmentedRun(self.segments, self.options, primals, tuple(tangents))
            outs = run.forward()

        def reverse(_: tuple, __: list, ___: tuple[int, ...], cts: list) -> list:
            self.refuse_traced(cts)
            with _jax.eval_context():
                return run.reverse(cts)

        note = Differentiated.here(self, tangents)
        options: dict[str, Any] = {"forward": self._plain, "reverse": reverse, "note": note}
        return outs, linear_in_tangents(primals, [], outs, tangents, **options)

    def refuse_traced(self, values: Any) -> None:
        if any(isinstance(x, _jax.Tracer) for x in jax.tree.leaves(values)):
            raise PolicyError(
                f"{self.step.name}: {self.options!r} runs the loop from the host, and this gradient is being traced, "
                f"by jit, vmap, another loop or a second derivative.\n"
                f"Fix: call statetx.value_and_grad(loss)(...) where nothing is traced, and jit what comes before and "
                f"after; or use policies.Slots, which is compiled."
            )
