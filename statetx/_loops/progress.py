"""Progress bars of loops: ``progress=True``."""

from __future__ import annotations

from typing import Any

import jax

from .._atomic import new_lock
from .._extras import require


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
