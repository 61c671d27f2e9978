"""`Target`: a device, or several, that programs are compiled for."""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import os
import re
from collections.abc import Sequence
from typing import Any

import jax

from .. import _files
from .._errors import TargetError
from .._records import many, one_of, parse, record, whole
from .._text import brief, format_bytes
from .._typing import public
from . import plugins
from .plugins import CHECKS, Cpu, Gpu, Spec, Tpu, make_spec, short_text, table

_FRACTION = 0.75  # of a GPU's memory, reserved by JAX for programs
_FRACTION_NAMES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")


@public
class Target:
    """A device, or several, that statetx measures and plans for; it need not be there.

    Pass it, or its name, as ``target=`` of `plan`, `measure`, `memory_profile` and the others, or put the calls into
    ``with statetx.target("h100"):``. Compiling for GPUs needs Linux and the extra ``target-cuda``, for TPUs
    ``target-tpu`` (``python -m statetx targets`` shows the command); neither needs the device. Nothing ever runs on a
    target.

    Args:
        name: a device, such as ``"h100"``, ``"a100-40gb"`` or ``"tpu v5e"`` (``python -m statetx targets`` lists them),
            or its ``device_kind`` in JAX, ``"NVIDIA H100 80GB HBM3"``; several, ``"h100:8"`` on one host or
            ``"h100:2x8"`` on two; a grid of TPU chips, ``"tpu v5e:2x4"``; or the path of a file that `save` wrote.

    Attributes:
        name: the device, and the number as given.
        platform: ``"gpu"``, ``"tpu"`` or ``"cpu"``.
        kind: JAX's name of the device, ``device_kind``.
        num_devices: number of devices.

    Raises:
        TargetError: the name, the number of devices or the file is not known.

    Example:
        >>> import statetx
        >>> target = statetx.Target("h100:2x8")
        >>> target.platform, target.num_devices, target.kind
        ('gpu', 16, 'NVIDIA H100 80GB HBM3')
    """

    def __init__(self, name: str | os.PathLike[str]):
        if not isinstance(name, (str, os.PathLike)):
            raise TargetError(f"A target is a name, such as 'h100' or 'tpu v5e:2x4', or a file; got {brief(name)}.")
        text = os.fspath(name)
        if isinstance(name, os.PathLike) or text.endswith(".json"):
            loaded = Target.load(text)
            self._set(loaded.name, loaded._spec, loaded._hosts, loaded._shape)
            return
        written, _, amount = text.strip().partition(":")
        device, amount = _known_name(written), amount.strip().lower()
        if device is None:
            nearest = _nearest_name(written)
            raise TargetError(
                f"There is no target named {brief(text)}.{f' Did you mean {nearest!r}?' if nearest else ''}\n"
                f"Targets: {', '.join(table())}; or a file that Target.save wrote."
            )
        spec = table()[device]
        hosts, shape = _parse_shape(spec, amount, text)
        self._set(device + (f":{amount}" if amount else ""), spec, hosts, shape)

    def _set(self, name: str, spec: Spec, hosts: int, shape: tuple[int, ...]) -> None:
        self.name = name
        self._spec, self._hosts, self._shape = spec, hosts, shape

    @classmethod
    def _of(cls, name: str, spec: Spec, hosts: int, shape: tuple[int, ...]) -> Target:
        target = cls.__new__(cls)
        target._set(name, spec, hosts, shape)
        return target

    @classmethod
    def here(cls) -> Target:
        """The device that JAX uses here, for `save`; all its devices.

        Raises:
            TargetError: a kind of GPU or TPU that is not in the table of common devices.
        """
        devices = jax.devices()
        first, hosts = devices[0], len({d.process_index for d in devices})
        local = len(devices) // hosts
        if first.platform == "cpu":
            spec = Cpu(first.device_kind, max(_machine_memory() // len(jax.local_devices()), 2**20), "this machine")
            return cls._of(f"cpu:{len(devices)}", spec, 1, (len(devices),))
        name = _known_name(first.device_kind)
        if name is None:
            nearest = _nearest_name(first.device_kind)
            raise TargetError(
                f"{first.device_kind} is not in the table of common devices: {', '.join(table())}.\n"
                f"Fix: save the nearest of them{f', {nearest}' if nearest else ''}, and edit the figures in the file."
            )
        spec, limit = table()[name], (first.memory_stats() or {}).get("bytes_limit", 0)
        if isinstance(spec, Gpu):
            shape = (local,)
            if limit:  # another size of the same GPU
                spec = dataclasses.replace(spec, memory_bytes=int(limit / _fraction()), source="this machine")
        else:
            assert isinstance(spec, Tpu)
            shape = _default_grid(spec, len(devices)) or (len(devices), *(1,) * (spec.dimensions - 1))
            spec = dataclasses.replace(spec, memory_bytes=limit or spec.memory_bytes)
        return cls._of(f"{name}:{len(devices)}", spec, hosts, shape)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Target:
        """Read a target from a file that `save` wrote, or that was written by hand after one.

        Raises:
            TargetError: the file cannot be read, or has other fields.
        """
        try:
            fields = parse(_files.read(path, _MOST_BYTES))
            _check(fields)
        except (OSError, ValueError) as e:
            reason = e.strerror if isinstance(e, OSError) else e
            raise TargetError(
                f"{os.fspath(path)} cannot be read as a target: {reason}.\n"
                f"Fix: write such a file with Target.save(path)."
            ) from e
        spec = make_spec(fields["platform"], fields["device"])
        return cls._of(fields["name"], spec, fields["hosts"], tuple(fields["shape"]))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the figures to a JSON file, for `Target.load` on another machine."""
        device = dataclasses.asdict(self._spec)
        fields = {
            "name": self.name,
            "platform": self.platform,
            "hosts": self._hosts,
            "shape": self._shape,
            "device": device,
        }
        _files.write(path, json.dumps(fields, indent=1) + "\n")

    @property
    def platform(self) -> str:
        return self._spec.platform

    @property
    def kind(self) -> str:
        return self._spec.kind

    @property
    def num_devices(self) -> int:
        return self._hosts * math.prod(self._shape)

    @property
    def memory_bytes(self) -> int:
        """The bytes that a program may use on one device: of a GPU 75% of its memory, or the fraction in
        ``XLA_CLIENT_MEM_FRACTION``.
        """
        if isinstance(self._spec, Gpu):
            return int(self._spec.memory_bytes * _fraction())
        return self._spec.memory_bytes

    @property
    def devices(self) -> tuple[Any, ...]:
        """JAX devices that programs can be compiled for; of a GPU or TPU nothing runs on them.

        Raises:
            TargetError: the compiler for them is not installed.
        """
        if self.platform == "cpu":
            devices = jax.devices("cpu")
            if len(devices) < self.num_devices:
                raise TargetError(
                    f"{self.name} has {self.num_devices} devices, and JAX has {len(devices)} here: start Python with "
                    f"XLA_FLAGS=--xla_force_host_platform_device_count={self.num_devices}."
                )
            return tuple(devices[: self.num_devices])
        # XLA has no grid of one chip for TPUs in three dimensions; the first of a host's four serves.
        hosts, shape = self._hosts, self._shape
        if isinstance(self._spec, Tpu) and self._spec.dimensions == 3 and shape == (1, 1, 1):
            shape = (2, 2, 1)
        return plugins.compile_only_devices(self._spec, hosts, shape)[: self.num_devices]

    @property
    def missing(self) -> str:
        """Reason why this machine cannot compile for the target; "" if it can."""
        return plugins.missing(self._spec)

    def mesh(self, shape: Sequence[int], names: Sequence[str], axis_types: Any = None) -> jax.sharding.Mesh:
        """A mesh of the target's devices, for shardings of `jax.ShapeDtypeStruct` arguments.

        Args:
            shape, names: sizes and names of its axes.
            axis_types: as in ``jax.make_mesh``.

        Raises:
            TargetError: it needs more devices than there are, or its axes and names are not equally many.
        """
        if len(shape) != len(names):
            raise TargetError(
                f"A mesh of {'x'.join(map(str, shape))} has {len(shape)} dimensions, and the names {list(names)} are "
                f"{len(names)}.\n"
                f"Fix: name each axis, as in mesh((4, 2), ('data', 'model'))."
            )
        size = math.prod(shape)
        if size > self.num_devices:
            raise TargetError(
                f"A mesh of {'x'.join(map(str, shape))} needs {size} devices, and {self.name} has "
                f"{self.num_devices}.\nFix: name more, as in Target({self._name_of(size)!r})."
            )
        return jax.make_mesh(tuple(shape), tuple(names), axis_types, devices=self.devices[:size])

    def _name_of(self, size: int) -> str:
        return f"{self.name.partition(':')[0]}:{size}"

    @property
    def key(self) -> tuple[Any, ...]:
        """The part of a cache key for programs compiled for the target."""
        return (self._spec, self._hosts, self._shape)

    def __eq__(self, other: object) -> bool:
        return self.key == other.key if isinstance(other, Target) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.key)

    def __repr__(self) -> str:
        return f"Target({self.name!r})"

    def __str__(self) -> str:
        num = f"{self.num_devices} x " if self.num_devices > 1 else ""
        return f"{num}{self.kind} ({format_bytes(self.memory_bytes)} for programs)"


_MOST_DEVICES = 10_000
_MOST_BYTES = 2**16  # of the file of a target
_FIELDS = record(
    {
        "name": short_text,
        "platform": one_of(*CHECKS),
        "hosts": whole(1, _MOST_DEVICES),
        "shape": many(whole(1, _MOST_DEVICES), 1),
        "device": lambda x, path: None,  # its fields depend on the platform
    }
)


def _check(fields: dict[str, Any]) -> None:
    _FIELDS(fields, "")
    CHECKS[fields["platform"]](fields["device"], "device")
    dimensions = fields["device"]["dimensions"] if fields["platform"] == "tpu" else 1
    if len(fields["shape"]) != dimensions or math.prod(fields["shape"]) * fields["hosts"] > _MOST_DEVICES:
        raise ValueError(f"shape must be {dimensions} numbers of devices, got {brief(fields['shape'])}")


_NUM_CHIPS = (1, 4, 8, 16, 32, 64, 128, 256)  # a number of chips has a default grid


def _default_grid(spec: Tpu, num: int) -> tuple[int, ...] | None:
    """The grid with the most equal sides, the shortest first; but a host of four chips is flat."""
    if num not in _NUM_CHIPS:
        return None
    power, dimensions = num.bit_length() - 1, spec.dimensions
    sides = [2 ** ((power + i) // dimensions) for i in range(dimensions)]
    return tuple(reversed(sides) if num == 4 else sides)


def _parse_shape(spec: Spec, amount: str, text: str) -> tuple[int, tuple[int, ...]]:
    """The hosts and the shape of what follows the colon: ``""``, ``"8"``, ``"2x8"``, ``"2x4"``."""
    if amount and not re.fullmatch(r"[0-9]{1,5}(x[0-9]{1,5}){0,2}", amount):
        raise TargetError(
            f"{brief(text)}: {brief(amount)} is not a number of devices. Use 'h100:8', 'h100:2x8' (two hosts of "
            f"eight) or 'tpu v5e:2x4'."
        )
    numbers = tuple(map(int, amount.split("x"))) if amount else (1,)
    if 0 in numbers or math.prod(numbers) > _MOST_DEVICES:
        raise TargetError(f"{brief(text)}: a target has 1 to {_MOST_DEVICES} devices.")
    if isinstance(spec, Tpu):
        if len(numbers) == spec.dimensions:
            return 1, numbers
        grid = _default_grid(spec, numbers[0]) if len(numbers) == 1 else None
        if grid is None:
            example = "x".join(map(str, _default_grid(spec, 8) or ()))
            counts = ", ".join(map(str, _NUM_CHIPS))
            raise TargetError(
                f"{brief(text)}: {spec.kind} has grids of {spec.dimensions} dimensions, such as {example}, or one of "
                f"{counts} chips."
            )
        return 1, grid
    if len(numbers) > 2:
        raise TargetError(f"{brief(text)}: name hosts and the devices of each, as in '2x8'.")
    return (numbers[0], numbers[1:]) if len(numbers) == 2 else (1, numbers)


def _fraction() -> float:
    for name in _FRACTION_NAMES:
        try:
            fraction = float(os.environ.get(name, ""))
        except ValueError:
            continue
        if 0 < fraction <= 1:
            return fraction
    return _FRACTION


def _known_name(text: str) -> str | None:
    """The name in the table of a device that is given by it, or as JAX calls it; None if there is none."""
    words = " ".join(text.split())
    lower = words.lower()
    kinds = {spec.kind: name for name, spec in table().items()}
    # JAX calls a v5p "TPU v5", which a user may write for any of two.
    other_cases = {kind.lower(): name for kind, name in kinds.items() if not any(_begins(kind, k) for k in kinds)}
    name = lower.replace("_", "-")
    return name if name in table() else kinds.get(words, other_cases.get(lower))


def _begins(kind: str, longer: str) -> bool:
    return longer.startswith(f"{kind} ")


_LONGEST_NAME = 100  # characters of a name that may be misspelt
# "h100x8", "h100 8", "8xh100"
_AMOUNTS = (r"(?P<name>.+?)[\s*x-]+(?P<num>[0-9]+)", r"(?P<num>[0-9]+)[\s*x]+(?P<name>.+)")


def _nearest_name(text: str) -> str:
    """The name in the table that is nearest to a misspelt one, with its number of devices; "" if none is near."""
    text = text.strip()[:_LONGEST_NAME]
    for pattern in _AMOUNTS:
        match = re.fullmatch(pattern, text.lower())
        name = _known_name(match["name"]) if match else None
        # In names of clouds the number after a TPU counts cores.
        if match and name and isinstance(table()[name], Gpu) and 0 < int(match["num"]) <= _MOST_DEVICES:
            return f"{name}:{int(match['num'])}"
    text_letters = _letters(text)
    names = {_letters(written): name for name, spec in table().items() for written in (name, spec.kind)}
    longer = next((name for letters, name in names.items() if text_letters and letters.startswith(text_letters)), "")
    contained = max((letters for letters in names if letters in text_letters), key=len, default="")
    close = difflib.get_close_matches(text_letters, names, 1)
    return longer or names.get(contained, names.get(close[0], "") if close else "")


def _letters(name: str) -> str:
    """A name without the maker's words and without punctuation."""
    return re.sub(r"nvidia|geforce|tesla|tpu|[^a-z0-9]", "", name.lower())


def _machine_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 2**30
