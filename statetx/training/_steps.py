"""The steps of a directory, written by a `Checkpointer`. Other files in it are no steps, and stay."""

from __future__ import annotations

import dataclasses
import datetime
import os
from collections.abc import Iterator, Sequence
from typing import Any

MANIFEST = os.path.join("manifest", "metadata")
_MARKERS = (MANIFEST, "_CHECKPOINT_METADATA")  # of a step that lost one of them, `restore` says that it is damaged


@dataclasses.dataclass(frozen=True)
class SavedStep:
    """A step, as orbax asks for it.

    Attributes:
        path: of the type of the directory that orbax gives.
    """

    step: int
    path: Any

    @property
    def commit_timestamp(self) -> datetime.datetime:
        # Not from the step's files, which may be damaged.
        return datetime.datetime.fromtimestamp(os.stat(self.path).st_mtime, datetime.UTC)


class StepNames:
    """The names of steps, as orbax's ``NameFormat``."""

    def build_name(self, step: int) -> str:
        return str(step)

    def find_all(self, base_path: Any) -> Iterator[SavedStep]:
        for name in os.listdir(base_path):
            if name.isascii() and name.isdigit() and name == str(int(name)) and _is_ours(base_path / name):
                yield SavedStep(int(name), base_path / name)

    def find_step(self, base_path: Any, step: int) -> SavedStep:
        path = base_path / self.build_name(step)
        if not _is_ours(path):
            raise ValueError(f"{path} is not a step.")
        return SavedStep(step, path)


def _is_ours(path: Any) -> bool:
    is_written = any(os.path.isfile(os.path.join(path, name)) for name in _MARKERS)
    # orbax would read metrics at once, whatever they are. A `Checkpointer` writes none.
    has_metrics = os.path.lexists(os.path.join(path, "metrics"))
    return os.path.isdir(os.path.join(path, "manifest")) and is_written and not has_metrics


@dataclasses.dataclass
class Latest:
    """Preserve the last `num` steps, as orbax's ``PreservationPolicy``.

    A step that the user has moved elsewhere, and linked to, stays, and does not count: orbax cannot remove it.
    """

    directory: str
    num: int | None

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        links = [os.path.islink(os.path.join(self.directory, str(c.step))) for c in checkpoints]
        own_steps = [c.step for c, is_link in zip(checkpoints, links, strict=True) if not is_link]
        last = own_steps if self.num is None else own_steps[-self.num :]
        return [is_link or c.step in last for c, is_link in zip(checkpoints, links, strict=True)]


def irregular(path: str) -> str | None:
    """A file of a step that is neither a regular file nor a folder, such as a pipe, which blocks a reader; or None."""
    for folder, _, files in os.walk(path):
        for name in files:
            file = os.path.join(folder, name)
            if not os.path.isfile(file):
                return os.path.relpath(file, path)
    return None
