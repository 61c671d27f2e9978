"""One gradient of a loop in segments: run forward, reversed, resumed after a kill."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import json
import os
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import _jax
from .._cached import cached_property
from .._errors import CheckpointError, EffectError
from .._lift.staged import as_types, to_key_data, to_keys
from .._objects.code import code_of
from .._spinner import spinner
from .._targets import current
from .._text import format_bytes, type_str
from .schedule import AT_HAND, DISK, MEMORY, Advance, Drop, Keep, Load, Reverse
from .store import Store, digest

_PULL = 3  # runs of a segment that a pull-back takes, for the time that is left


@dataclasses.dataclass
class Trail:
    """Arrays that segments have given, one after the other, and that are on disk in pieces.

    Attributes:
        kind: in the names of the files.
        items: the arrays of each segment; the first `num_saved` are on disk.
    """

    kind: str
    items: list[list] = dataclasses.field(default_factory=list)
    num_saved: int = 0

    def save(self, store: Store) -> None:
        if new := self.items[self.num_saved :]:
            store.write(f"{self.kind}-{self.num_saved}-{len(self.items)}", [x for item in new for x in item])
            self.num_saved = len(self.items)

    def resume(self, store: Store, kind: str) -> tuple[int, list | None]:
        """Take over the pieces. Returns the last position in files of `kind` that they reach, and its arrays."""
        for first, end in store.names(self.kind):
            arrays = store.read(f"{self.kind}-{first}-{end}") if first == self.num_saved else None
            if arrays:
                num = len(arrays) // (end - first)
                self.items += [arrays[i * num : (i + 1) * num] for i in range(end - first)]
                self.num_saved = end
        for (position,) in reversed(store.names(kind)):
            arrays = store.read(f"{kind}-{position}") if position <= self.num_saved else None
            if arrays is not None:
                return position, arrays
        return 0, None


def _joined(parts: Sequence[list], is_reversed: bool, avals: Sequence[Any]) -> list[Any]:
    """Concatenate the arrays of segments to the whole loop's."""
    arrays = [jnp.concatenate(x) for x in zip(*parts[:: -1 if is_reversed else 1], strict=True)]
    return as_types(to_keys(arrays, avals), avals)


def _parts_of(program: Any) -> list[bytes]:
    """What tells a traced program apart: its text, and the code that it calls on the host, but not what that reads."""
    texts = [program.lower().as_text(), *(text for fun in _jax.pure_callbacks(program.jaxpr) for text in code_of(fun))]
    return [text.encode() for text in texts]


class SegmentedRun:
    """The forward sweep and the reversal of one call.

    Whatever is lost, a carry in memory or a damaged file, is computed again from the nearest carry before it; the
    arguments are the first one. Every carry is a result of the same compiled program, so all ways lead to the same
    bits.

    Args:
        loop: a `LoopOnDisk`.
        primals: constants, carry, xs.
        diff_indices: the differentiated ones, by leaf.

    Attributes:
        stored: the tiers of the stored carries, by the number of segments before them; `memory` has those in memory.
        carry: at hand.
        outs: of each segment that has run the checksum of its last carry and, in the sweep, its ys.
        pulled: of each segment that was reversed cotangents of xs; None in the sweep.
        cts: cotangents of the constants, and of the carry.
    """

    def __init__(self, loop: Any, primals: tuple, diff_indices: tuple[int, ...]):
        self.loop, self.options, self.segments = loop, loop.options, loop.segments
        self.step, self.num = loop.step, loop.segments.num
        self.constants, self.init, self.xs = primals
        self.args, self.diff_indices = [*self.constants, *self.init, *self.xs], diff_indices
        self.stored: dict[int, str] = {}
        self.memory: dict[int, list] = {}
        self.carry, self.outs, self.last_save = self.init, Trail("out"), time.monotonic()
        self.pulled: Trail | None = None

    # -- the store --

    @contextlib.contextmanager
    def opened(self) -> Iterator[Store]:
        """Lock the store, and make it this call's."""
        self.schedule = self.loop.schedule(self.diff_indices)
        store = Store(self.options.path, self.options.limit)
        try:
            self.claim(store, "program", self.facts, "probe", "costs", "carry", "out", "ct", "xs", "loss")
            store.owner = digest(json.dumps(self.facts).encode())
            if not self.options.costs:
                costs = store.read("costs") or self.measured(store)
                self.schedule = self.loop.schedule(self.diff_indices, costs[0].tolist())
            yield store
            store.flush()
        finally:
            store.close()

    def claim(self, store: Store, name: str, facts: dict[str, Any], *kinds: str) -> None:
        """Let the file of this name have the facts. If it had others, files of these kinds are removed.

        Raises:
            CheckpointError: it has the facts of another call, which is not done.
        """
        content = store.read(name)
        about = json.loads(content[0].tobytes()) if content else {}
        changed = [k for k in facts | about if facts.get(k) != about.get(k)]
        if about and changed and (about["segments"],) not in store.names("ct"):
            raise CheckpointError(
                f"{self.step.name}: the store {store.path} has an unfinished gradient of another call. It differs in: "
                f"{', '.join(changed)}.\nFix: repeat that call to finish it; or delete this directory, or give another "
                f"one: each loop needs its own."
            )
        if changed:
            for kind in kinds:
                store.prune(kind, ())
            store.write(name, [np.frombuffer(json.dumps(facts).encode(), np.uint8)])
            store.flush()

    @cached_property
    def facts(self) -> dict[str, Any]:
        """Everything that the results depend on, by its name in messages."""
        kinds = {"constant": self.constants, "carry or state": self.init, "xs": self.xs}
        program = self.segments.advance_program.trace(self.segments.num_steps(0), 0, self.constants, self.init, self.xs)
        device, jaxlib = current.local_device(), importlib.metadata.version("jaxlib")
        named = {f"{kind} {i}, {type_str(x)}": x for kind, values in kinds.items() for i, x in enumerate(values)}
        return {
            "versions": [jax.__version__, jaxlib, device.device_kind, device.client.platform_version],
            "XLA_FLAGS": os.environ.get("XLA_FLAGS", ""),
            "equations of the step": digest(*_parts_of(program)),
            "length": self.step.length,
            "segments": self.num,
            "what is differentiated": list(self.diff_indices),
            **{name: digest(*map(np.asarray, to_key_data([x]))) for name, x in named.items()},
        }

    def measured(self, store: Store) -> list[np.ndarray]:
        """The times to write and to read a carry, in runs of a segment."""
        run = lambda: self.segments.advance(0, self.constants, self.init, self.xs)
        write = lambda: (store.write("probe", to_key_data(self.init)), store.flush())[1]
        seconds = []
        for fun in (run, run, write, lambda: store.read("probe")):  # the first run compiles
            start = time.perf_counter()
            jax.block_until_ready(fun())
            seconds.append(time.perf_counter() - start)
        store.prune("probe", ())
        store.write("costs", costs := [np.array([float(f"{x / seconds[1]:.2g}") for x in seconds[2:]])])
        return costs

    def save(self, store: Store, position: int) -> None:
        """Let a killed call resume here: after so many segments, or before them in the reversal."""
        files, done = [p for p, tier in self.stored.items() if tier == DISK], self.num - position
        if self.pulled is None:
            self.outs.save(store)
            store.write(f"carry-{position}", to_key_data(self.carry))
            store.prune("carry", [position, *files])
        else:
            self.pulled.save(store)
            store.write(f"ct-{done}", [x for cts in self.cts for x in cts])
            store.prune("ct", [done])
            store.prune("carry", [self.num, *(p for p in files if p < position)])
        self.last_save = time.monotonic()

    def load(self, store: Store, position: int) -> None:
        """Take a stored carry; forget it if it is damaged."""
        arrays = self.memory.get(position) or (store.read(f"carry-{position}") if position else None)
        if arrays is not None:
            self.carry = self.restored(arrays, self.init)
        elif position:
            del self.stored[position]
        else:
            self.carry = self.init

    def restored(self, arrays: Sequence[Any], like: Sequence[Any]) -> list[Any]:
        """Values of the types and on the devices of `like`: for others JAX would compile other programs."""
        avals = [_jax.abstract(x) for x in like]
        values = zip(to_keys([jnp.asarray(x) for x in arrays], avals), like, strict=True)
        placed = [jax.device_put(x, y.sharding) if getattr(y, "committed", False) else x for x, y in values]
        return as_types(placed, avals)

    # -- the two passes --

    def forward(self) -> tuple[list, list]:
        """The last carry, and the ys of all steps."""
        with self.opened() as store:
            start, arrays = self.outs.resume(store, "carry")
            if arrays is not None:
                self.carry = self.restored(arrays, self.init)
                self.stored = {0: DISK, **{p: DISK for (p,) in store.names("carry") if 0 < p <= start and p < self.num}}
            if start < self.num:
                self.perform(store, start)
                self.save(store, self.num)
        ys = _joined([item[1:] for item in self.outs.items], self.step.reverse, self.step.y_avals)
        self.outs.items = [item[:1] for item in self.outs.items]
        carry, self.carry = self.carry, []
        return as_types(carry, self.step.avals), ys

    def reverse(self, cts: Sequence[Any]) -> list[Any]:
        """The cotangents of the differentiated arguments, from cotangents of the float outputs; None for a zero one."""
        step = self.step
        diff_constants, diff_carry, diff_xs = step.sorted_indices(self.diff_indices)
        ct_of = {i: ct for i, ct in zip(step.float_outs, cts, strict=True) if ct is not None}
        of_carry = [ct_of.get(i, jnp.zeros_like(self.init[i])) for i in diff_carry]
        self.cts = [[jnp.zeros_like(self.constants[i]) for i in diff_constants], of_carry]
        self.of_ys = {i - step.num_carry: ct for i, ct in ct_of.items() if i >= step.num_carry}
        num = self.segments.num_steps(0)
        program = self.segments.pull_program.trace(
            num, self.diff_indices, 0, self.constants, self.init, self.xs, self.cts, self.of_ys
        )
        key = digest(*_parts_of(program), *map(np.asarray, [*of_carry, *self.of_ys.values()]))
        with self.opened() as store:
            self.pulled = Trail("xs")
            loss = {"the cotangents of its results: another loss follows it": key, "segments": self.num}
            self.claim(store, "loss", loss, "ct", "xs")
            done, arrays = self.pulled.resume(store, "ct")
            if arrays is not None:
                restored = self.restored(arrays, [x for cts in self.cts for x in cts])
                self.cts = [restored[: len(diff_constants)], restored[len(diff_constants) :]]
            self.stored = {p: tier for p, tier in self.stored.items() if p < self.num - done} or {0: DISK}
            if done < self.num:
                self.perform(store, self.num - done)
                self.save(store, 0)
        of_carry = dict(zip(diff_carry, self.cts[1], strict=True))
        of_xs = _joined(self.pulled.items, not step.reverse, [self.xs[i].aval for i in diff_xs])
        first, last = step.num_constants, step.num_constants + step.num_carry
        return [*self.cts[0], *(of_carry[i - first] for i in self.diff_indices if first <= i < last), *of_xs]

    def perform(self, store: Store, position: int) -> None:
        """Run the remaining actions of a pass."""
        is_sweep, sweep, reversal = self.pulled is None, self.schedule.sweep, self.schedule.reversal
        ahead = dict(self.stored)
        actions = [*(sweep(position, ahead) if is_sweep else ()), *reversal(self.num if is_sweep else position, ahead)]
        num_runs = sum(a.end - a.start if isinstance(a, Advance) else _PULL * isinstance(a, Reverse) for a in actions)
        num, began = 0, time.monotonic()

        def note(runs: int, position: int) -> None:
            """Show the progress, and save it if it is time to."""
            nonlocal num
            num += runs
            seconds = (time.monotonic() - began) / num * max(0, num_runs - num)
            steps = min(position * self.segments.length, self.step.length)
            way, size = "forward" if is_sweep else "backward", format_bytes(store.num_bytes)
            show(f"{way}, step {steps:,} of {self.step.length:,}, {size} on disk, {seconds:.0f} s left")
            is_new = position == len(self.outs.items) if is_sweep else runs == _PULL
            if is_new and 0 < position < self.num and time.monotonic() - self.last_save >= self.options.save_every:
                self.save(store, position)

        with spinner(self.step.name, is_shown=self.step.is_shown) as show:
            for action in (sweep if is_sweep else reversal)(position, self.stored):
                match action:
                    case Advance(first, end):
                        for segment in range(first, end):
                            self.advance(segment)
                            note(1, segment + 1)
                    case Keep(position, tier):
                        self.keep(store, position, tier)
                    case Load(position):
                        self.load(store, position)
                    case Reverse(position):
                        self.pull(position)
                        note(_PULL, position)
                    case Drop(position):
                        self.memory.pop(position, None)

    def advance(self, segment: int) -> None:
        self.carry, ys, checksum = self.segments.advance(segment, self.constants, self.carry, self.xs)
        checksum = np.asarray(checksum)
        if segment == len(self.outs.items):
            self.outs.items.append([checksum, *to_key_data(ys)])
        elif self.outs.items[segment][0] != checksum:
            first = segment * self.segments.length
            raise EffectError(
                f"{self.step.name}: the steps from {first} to {first + self.segments.num_steps(segment)} gave another "
                f"carry when they ran again: the step is not deterministic, or another kind of processor began this "
                f"store.\nFix: on a GPU set XLA_FLAGS=--xla_gpu_deterministic_ops=true, or "
                f"delete {self.options.path}."
            )

    def pull(self, segment: int) -> None:
        args = (self.constants, self.carry, self.xs, self.cts, self.of_ys)
        *self.cts, of_xs = jax.block_until_ready(self.segments.pull(segment, self.diff_indices, *args))
        if segment == self.num - 1 - len(self.pulled.items):  # type: ignore[union-attr]
            self.pulled.items.append(of_xs)  # type: ignore[union-attr]

    def keep(self, store: Store, position: int, tier: str) -> None:
        if tier == DISK and self.pulled is not None:  # first of all files that are not needed any more go
            self.save(store, self.num - len(self.pulled.items))
        if tier == DISK and position:  # the first carry is an argument
            store.write(f"carry-{position}", to_key_data(self.carry))
        elif position:
            values = to_key_data(self.carry)
            # Those that are stored last are read most often. The first ones are in the host's memory.
            on_device = tier == AT_HAND or sum(x == MEMORY for p, x in self.stored.items() if p) > self.options.host
            self.memory[position] = values if on_device else [np.asarray(x) for x in values]
