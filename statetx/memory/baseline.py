"""Memory baselines: the bytes of programs in a file, for tests that find their growth."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, NamedTuple

from .. import _files, _records
from .._records import many, mapping, one_of, record, row, text, whole
from .._targets import current
from .._text import format_bytes, short_path
from ._advice import AdvisedTimeline
from ._show import SUBJECTS, UNWRITTEN, family, unused_parts, unwritten_outputs
from .buffer import KINDS, grouped

UPDATE = "STATETX_UPDATE_MEMORY"
"""The environment variable under which `statetx.testing.assert_memory` writes its file, and compares nothing."""

TOLERANCE = 0.01  # of the peak before: compilers of one release differ by less
_VERSION = 1
_MAX_BYTES = 2**26  # of a file
_MAX_ROWS = 10  # that a message lists
UNUSED = "unused"  # the kind of reserved memory without a live buffer
_PACKAGES = ("statetx", "jax", "jaxlib", "brainstate", "flax", "equinox", "optax", "haiku")


class PeakPart(NamedTuple):
    """Part of the peak with one role, of one owner and function. Layers of a model count together.

    Attributes:
        source: the line that makes the largest of it, ``file:line``; not compared.
    """

    kind: str
    owner: str
    function: str
    source: str
    num_bytes: int

    @property
    def key(self) -> tuple[str, str, str]:
        return self.kind, self.owner, self.function

    def __str__(self) -> str:
        line = f" at {self.source}" if self.source else ""
        function = f" ({self.function})" if self.function else ""
        if self.kind == UNUSED:
            return self.owner
        return f"{SUBJECTS[self.kind][0]} {self.owner or 'the program'}{line}{function}"


_Size = Annotated[int, whole()]


@dataclasses.dataclass(frozen=True)
class MemoryBaseline:
    """Memory of a compiled program, as a file keeps it.

    Attributes:
        device: that it is compiled for: the name of a target, or of the backend here.
        peak_bytes, argument_bytes, output_bytes, alias_bytes, temp_bytes, constant_bytes: as in `AdvisedTimeline`.
        versions: of the libraries that may change it.
        parts: the live memory at the peak and the constants, the largest first.
    """

    device: Annotated[str, text]
    num_devices: Annotated[int, whole(1)]
    peak_bytes: _Size
    argument_bytes: _Size
    output_bytes: _Size
    alias_bytes: _Size
    temp_bytes: _Size
    constant_bytes: _Size
    versions: Annotated[Mapping[str, str], mapping(text)]
    parts: Annotated[tuple[PeakPart, ...], many(row(one_of(*KINDS, UNUSED), text, text, text, whole()))]

    @property
    def num_bytes(self) -> int:
        """The peak and the constants beside it: an array that is captured moves from one to the other."""
        return self.peak_bytes + self.constant_bytes

    @classmethod
    def of(cls, profile: AdvisedTimeline) -> MemoryBaseline:
        """The record of a profile, made under the target that is in force."""
        target = current.current()
        device = profile.backend if target is None else target.name
        told = {name: getattr(profile, name) for name in _records.metadata(cls) if hasattr(profile, name)}
        return cls(device=device, versions=_versions(), parts=_parts(profile), **told)


_FILE = record({"version": one_of(_VERSION), "programs": mapping(record(_records.metadata(MemoryBaseline)))})


def _parts(profile: AdvisedTimeline) -> tuple[PeakPart, ...]:
    groups_by_key: dict[tuple[str, str, str], list[Any]] = {}
    constants = grouped(b for b in profile.buffers if b.kind == "constant")
    unused, unwritten = unused_parts(profile), grouped(unwritten_outputs(profile))
    if sum(g.num_bytes for g in unwritten) == unused.get(UNWRITTEN):
        del unused[UNWRITTEN]
    else:  # they count in part
        unwritten = ()
    for group in (*profile.at_peak, *unwritten, *constants):
        groups_by_key.setdefault((group.kind, family(group.owner), group.function), []).append(group)
    parts = []
    for key, groups in groups_by_key.items():
        largest = max(groups, key=lambda g: g.num_bytes)
        parts.append(PeakPart(*key, short_path(largest.source), sum(g.num_bytes for g in groups)))
    parts += [PeakPart(UNUSED, name, "", "", num_bytes) for name, num_bytes in unused.items()]
    return tuple(sorted(parts, key=lambda p: (-p.num_bytes, p.key)))


def _versions() -> dict[str, str]:
    versions = {}
    for name in _PACKAGES:
        if name in sys.modules:
            try:
                versions[name] = importlib.metadata.version("dm-haiku" if name == "haiku" else name)
            except importlib.metadata.PackageNotFoundError:  # a checkout on the path
                versions[name] = str(getattr(sys.modules[name], "__version__", "unknown"))
    return versions


# -- files -----------------------------------------------------------------------------------------------------------


def key_of(name: str, baseline: MemoryBaseline) -> str:
    """The name of a program in a file: a function may be there once for each device."""
    return f"{name} on {baseline.device}"


def load(path: str | os.PathLike[str]) -> dict[str, MemoryBaseline]:
    """The programs of a file.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is not a file of this kind, or of another version.
    """
    how = f"`python -m statetx memory ... --save {os.fspath(path)}`, or by {UPDATE}=1 in the test"
    try:
        fields = _records.parse(_files.read(path, _MAX_BYTES))
        _FILE(fields, "")
    except FileNotFoundError:
        raise FileNotFoundError(f"There is no file {os.fspath(path)}.\nFix: write it, by {how}.") from None
    except ValueError as e:
        raise ValueError(
            f"{os.fspath(path)} is not a file of memory baselines: {e}.\n"
            f"Fix: name another file, or write one, by {how}."
        ) from None
    programs = fields["programs"]
    return {
        key: MemoryBaseline(**p | {"parts": tuple(PeakPart(*part) for part in p["parts"])})
        for key, p in programs.items()
    }


def save(path: str | os.PathLike[str], key: str, baseline: MemoryBaseline) -> None:
    """Put a program into a file, which keeps the others that it has."""
    programs = load(path) if os.path.exists(path) else {}
    programs[key] = baseline
    fields = {key: dataclasses.asdict(programs[key]) for key in sorted(programs)}
    # Without a checksum: such a file is under version control, and may be merged by hand.
    _files.write(path, json.dumps({"version": _VERSION, "programs": fields}, indent=1) + "\n")


def find(path: str | os.PathLike[str], key: str) -> MemoryBaseline:
    """A program of a file.

    Raises:
        FileNotFoundError: there is no file.
        ValueError: the file is damaged, or has no program of this name and device.
    """
    programs = load(path)
    if key not in programs:
        names = ", ".join(sorted(programs)) or "none"
        raise ValueError(
            f"{os.fspath(path)} has no program {key!r}; it has {names}.\n"
            f"Fix: add it, by `python -m statetx memory ... --save {os.fspath(path)}` or by {UPDATE}=1 in the test."
        )
    return programs[key]


# -- comparing -------------------------------------------------------------------------------------------------------


class Growth(NamedTuple):
    """A part of the peak that takes more than before."""

    part: PeakPart
    before: int

    def __str__(self) -> str:
        return f"{self.part}: {format_bytes(self.before)} before, {format_bytes(self.part.num_bytes)} now"


@dataclasses.dataclass(frozen=True)
class Difference:
    """Memory of a program now, beside the figures of a file.

    Attributes:
        tolerance: by how much the peak may grow, relative to the peak before.
    """

    name: str
    before: MemoryBaseline
    after: MemoryBaseline
    tolerance: float = TOLERANCE

    @property
    def is_regression(self) -> bool:
        return self.after.num_bytes > self.before.num_bytes * (1 + self.tolerance)

    def grown(self) -> list[Growth]:
        """The parts that take more, those that grew most first."""
        old_bytes = {part.key: part.num_bytes for part in self.before.parts}
        grown = [Growth(p, old_bytes.get(p.key, 0)) for p in self.after.parts if p.num_bytes > old_bytes.get(p.key, 0)]
        return sorted(grown, key=lambda g: g.before - g.part.num_bytes)

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def summary(self) -> str:
        old, new = self.before.num_bytes, self.after.num_bytes
        change = f"{100 * (new - old) / max(old, 1):+.1f}%"
        constants = ", constants included" if self.before.constant_bytes or self.after.constant_bytes else ""
        return (
            f"{self.name} on {self.after.device} takes {format_bytes(new)} at the peak{constants}, and took "
            f"{format_bytes(old)} ({change})"
        )

    def _lines(self) -> Iterator[str]:
        allowed = f"; {100 * self.tolerance:g}% more is allowed" if self.is_regression else ""
        yield f"{self.summary()}{allowed}."
        if self.is_regression:
            yield "At the peak take more than before:"
            grown = self.grown()
            yield from (f"  {growth}" for growth in grown[:_MAX_ROWS])
            if len(grown) > _MAX_ROWS:
                yield f"  and {len(grown) - _MAX_ROWS} more"
            old, new = self.before.alias_bytes, self.after.alias_bytes
            if new < old:
                yield (
                    f"Of the outputs, {format_bytes(new)} take the memory of donated arguments, and "
                    f"{format_bytes(old)} did before."
                )
        elif self.after.num_bytes < self.before.num_bytes * (1 - self.tolerance):
            yield "It takes less than before: save it again, so that it stays so."
        changed = list(self.changed_versions())
        if changed:
            yield f"Versions: {', '.join(changed)}."

    def markdown(self) -> str:
        """The comparison for a page of a hosted CI: the parts that grew as a table."""
        first, *details = self._lines()
        lines = [f"**{_cell(first)}**", ""]
        if self.is_regression:
            lines += ["| grew | owner | line | before | now |", "|---|---|---|--:|--:|"]
            for (kind, owner, function, source, num_bytes), old_bytes in self.grown()[:_MAX_ROWS]:
                place = " ".join(filter(None, (source, f"({function})" if function else "")))
                texts = (kind, owner or "the program", place, format_bytes(old_bytes), format_bytes(num_bytes))
                lines.append(f"| {' | '.join(map(_cell, texts))} |")
        notes = [line for line in details if not line.startswith("  ") and not line.endswith(":")]
        return "\n".join([*lines, "", *map(_cell, notes)]).rstrip() + "\n"

    def changed_versions(self) -> Iterator[str]:
        old, new = self.before.versions, self.after.versions
        for name in dict.fromkeys([*new, *old]):
            if old.get(name) != new.get(name):
                yield f"{name} {old.get(name, 'not there')} before, {new.get(name, 'not there')} now"

    def annotations(self) -> Iterator[str]:
        """Lines that hosted CI of GitHub shows beside the source: one for the program, and one for each part
        that grew.
        """
        level = "error" if self.is_regression else "notice"
        yield f"::{level} title=statetx memory::{_escaped(self.summary())}"
        for growth in self.grown()[:_MAX_ROWS] if self.is_regression else ():
            file, _, line = growth.part.source.rpartition(":")
            place = f" file={_escaped(file, is_property=True)},line={line}," if file else " "
            yield f"::error{place}title=statetx memory::{_escaped(str(growth))}"


def _cell(text: str) -> str:
    """Escape what Markdown would read as its own."""
    return re.sub(r"([\\`*_<>|\[\]])", r"\\\1", text)


def _escaped(text: str, *, is_property: bool = False) -> str:
    text = text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    return text.replace(":", "%3A").replace(",", "%2C") if is_property else text


def read_tolerance(tolerance: float | str) -> float:
    """A relative difference: ``0.01`` or ``"1%"``.

    Raises:
        ValueError: it is neither.
    """
    try:
        if isinstance(tolerance, str):
            number = float(tolerance.removesuffix("%")) / (100 if tolerance.endswith("%") else 1)
        else:
            number = float(tolerance)
    except (TypeError, ValueError):
        number = -1.0
    if not 0 <= number < float("inf"):
        raise ValueError(f"tolerance={tolerance!r} is not a relative difference, such as 0.01 or '1%'.")
    return number
