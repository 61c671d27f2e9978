"""`memory_profile`: what is alive in a compiled program at each of its steps, and who made it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from .. import _files
from .._errors import printable
from .._tables import Line, Printed, Table, Tabular
from .._typing import public
from . import _show
from ._advice import AdvisedTimeline
from ._page import to_html

if TYPE_CHECKING:
    from os import PathLike


@public
class MemoryProfile(Printed, AdvisedTimeline):
    """The memory of a compiled program, buffer by buffer; made by `memory_profile`.

    Sizes are in bytes, and of one device. Print it, or show it in a notebook.

    Attributes:
        name: of the function.
        buffers: all buffers, in the order of their first step; those of zero bytes are left out.
        steps: the schedule of the compiled program.
        argument_bytes, output_bytes, alias_bytes, temp_bytes: XLA's own figures. Outputs that reuse the memory of an
            argument (donation) count in the first three.
        constant_bytes: of the constants in the program, which XLA's figures leave out.
        num_devices: that the program runs on.
        backend: "cpu", "gpu" or "tpu".
        backward_step: the first step of the backward pass, of several gradients that of the largest; the number of
            steps if there is none.
        gradient: whether the program has the gradient of a loss among its outputs, and not a step that updates its
            arguments.
        note: what the profile lacks on this backend; empty if nothing.
    """

    def _lines(self, width: int, prose: int) -> Iterator[Line]:
        return _show.lines(self, width, prose)

    def _html(self) -> str:
        return _show.html(self)

    def __repr__(self) -> str:
        return (
            f"<MemoryProfile of {printable(self.name)}: {len(self.buffers)} buffers, {self.peak_bytes} bytes at the "
            f"peak>"
        )

    def compare(self, after: MemoryProfile) -> Comparison:
        """This profile beside another: the peak, its parts, and the owners with their difference. It prints.

        Args:
            after: the profile of the changed program.
        """
        return Comparison(self, after)

    def to_dict(self) -> dict[str, Any]:
        """Everything as lists, dicts, numbers and text, for ``json.dump``."""
        return _show.to_dict(self)

    def to_html(self, path: str | PathLike[str], *, after: MemoryProfile | None = None) -> None:
        """Write a page with a timeline to zoom, and a list of the buffers to filter. It needs no other file and no
        network.

        Args:
            path: the file to write.
            after: a second profile, shown below the first.
        """
        _files.write(path, to_html(self, after))


@dataclasses.dataclass(frozen=True, repr=False)
class Comparison(Tabular):
    """Two profiles beside each other; made by `MemoryProfile.compare`."""

    before: MemoryProfile
    after: MemoryProfile

    def _table(self) -> Table:
        return _show.compare(self.before, self.after)
