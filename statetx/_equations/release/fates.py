"""`GradientStack`: a stacked result of a loop, with what becomes of it."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ... import _jax, _states
from ..._text import format_bytes
from ..primitives import inner_jaxprs


class Fate(enum.Enum):
    """What becomes of a stacked result."""

    RELEASED = "it no longer exists"
    REPEATED = "it no longer exists, since its loop runs twice"
    RETURNED = "the program returns it"
    READ = "an equation needs several rows at once"
    LATE = "an equation that may run later reads what its consumers overwrite"
    SHARED = "the device would copy what its consumers overwrite"
    UNROLLED = "the device would copy what its consumers overwrite in unrolled steps"
    MANUAL = "it leaves a shard_map, into which its consumers cannot move"
    REPLACED = "what its consumers compute is as large"


class GradientStack(NamedTuple):
    """A stacked result of a loop that other equations read.

    Attributes:
        loop: the equation of the loop.
        num_bytes: its bytes.
        reader: the equation that decides the fate, if one does.
        inputs: the positions of the program's inputs of its shape that loops read. It is the gradient of one of them;
            none if its weights are not among the inputs.
    """

    loop: Any
    num_bytes: int
    fate: Fate
    reader: Any = None
    inputs: tuple[int, ...] = ()

    @property
    def is_released(self) -> bool:
        return self.fate in (Fate.RELEASED, Fate.REPEATED)


def told(stacks: Sequence[GradientStack], names: Sequence[str] = ()) -> tuple[str, ...]:
    """A sentence for each loop whose backward pass ends in gradients, and for each thing that happens to them.

    Args:
        names: of the program's inputs, for the names of the weights; none to leave these out.
    """
    groups: dict[tuple[Any, Fate, Any], GradientStack] = {}
    for stack in stacks:
        key = stack.loop, stack.fate, stack.reader
        group = groups.get(key)
        size, inputs = (0, ()) if group is None else (group.num_bytes, group.inputs)
        inputs = tuple(dict.fromkeys((*inputs, *stack.inputs)))
        groups[key] = stack._replace(num_bytes=size + stack.num_bytes, inputs=inputs)
    return tuple([_sentence(stack, [names[i] for i in stack.inputs] if names else []) for stack in groups.values()])


def _sentence(stack: GradientStack, names: Sequence[str]) -> str:
    layers = f"{format_bytes(stack.num_bytes)} of gradients of {stack.loop.params.get('length', 'all')} layers"
    weights = f" of {', '.join(names[:3])}{', ...' * (len(names) > 3)}" if names else ""
    return f"{layers}{weights} ({_site(stack.loop)}) {_FATES[stack.fate](stack)}."


_FATES: dict[Fate, Callable[[GradientStack], str]] = {
    Fate.RELEASED: lambda stack: "are used up in the loop of the backward pass, layer by layer",
    Fate.REPEATED: lambda stack: (
        f"are used up in the loop of the backward pass, which runs twice: the first time for a number that is computed "
        f"from all layers ({_place(stack.reader)})"
    ),
    Fate.RETURNED: lambda stack: "are kept: the program returns them",
    Fate.READ: lambda stack: f"are kept: {_reason(stack.reader)}",
    Fate.LATE: lambda stack: (
        f"are kept: {_place(stack.reader)} reads arrays that the update overwrites, and does not come before it"
    ),
    Fate.SHARED: lambda stack: "are kept: on CPUs an update by moments copies these, which takes more memory",
    Fate.UNROLLED: lambda stack: (
        f"are kept: in steps that are unrolled (unroll={stack.loop.params['unroll']}) an update would copy the weights"
    ),
    Fate.MANUAL: lambda stack: (
        f"are kept: they leave jax.shard_map, and {_place(stack.reader)} mixes shards or reads an array that is, or "
        "may be, divided otherwise; take the gradient and update inside of it"
    ),
    Fate.REPLACED: lambda stack: "are kept: the results made of them take as much memory",
}


def _reason(reader: Any) -> str:
    where = _place(reader)
    if not any(v.aval.shape for v in reader.outvars):
        return (
            f"a number that is computed from all layers, as for clipping by a global norm, needs them first ({where})"
        )
    return f"{where} needs several layers at once"


def _place(eqn: Any) -> str:
    return f"{eqn.primitive.name} at {_site(eqn)}"


def _site(eqn: Any) -> str:
    """The user's line of an equation; of one that a plan has made, the first line inside of it."""
    folders = (*_states.library_folders(), _jax.JAX_FOLDER)
    site = _jax.traceback_site(eqn.source_info.traceback, folders)
    if site != _jax.UNKNOWN_SITE:
        return site
    inner = (_site(e) for jaxpr in inner_jaxprs(eqn) for e in jaxpr.eqns)
    return next((s for s in inner if s != _jax.UNKNOWN_SITE), site)
