"""StoredInputs of a region in fewer bits: no region has them in memory, but each holds what it reads itself, if that is
smaller.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ..._jax import Literal, Var
from ..._lift.context import device_bytes
from ..._records import many, row, whole
from ..._text import format_bytes
from .._program.flat import Part
from .._program.values import FORMAT, Address, InFormat, smallest_of_variables
from .graph import Graph
from .treatment import Facts, Option, PathSettings, Rewriting, Treatment


@dataclasses.dataclass(frozen=True)
class StoredInputs(Treatment):
    """The inputs that a rematerialized region holds in fewer bits, by index."""

    ways_of: tuple[tuple[int, InFormat], ...]

    name = "inputs"
    CHECK = many(row(whole(), FORMAT), 1)

    def to_json(self) -> list[Any]:
        return [[i, way.name] for i, way in self.ways_of]

    @classmethod
    def from_json(cls, fields: Any) -> StoredInputs:
        return cls(tuple((i, InFormat(name)) for i, name in fields))

    @classmethod
    def paths(cls, settings: PathSettings) -> _StoringPaths | None:
        unheld = smallest_of_variables(settings.program.jaxpr, settings.formats)
        return _StoringPaths(unheld) if unheld else None

    def check(self, part: Part, facts: Facts) -> None:
        for i, way in self.ways_of:
            if i >= len(part.invars) or not facts.can_store(part.invars[i], way):
                raise ValueError(f"an input that cannot be kept as {way.name}")

    def held_inputs(self) -> Mapping[int, InFormat]:
        return dict(self.ways_of)

    def apply(self, rewriting: Rewriting) -> None:
        rewriting.inputs = {i: way.label(is_ordered=True) for i, way in self.ways_of}

    def text(self, part: Part) -> str:
        names = ", ".join(dict.fromkeys(way.name for _, way in self.ways_of))
        stored = sum(way.num_bytes(part.jaxpr.invars[i].aval) for i, way in self.ways_of)
        inputs = "the input" if len(self.ways_of) == 1 else f"{len(self.ways_of)} inputs"
        return f", {inputs} as {names} ({format_bytes(stored)})"


class _StoringPaths:
    """Paths where each region holds what it reads."""

    saves_memory = True

    def __init__(self, unheld: dict[Any, InFormat]):
        self._ways = unheld
        self.unheld = unheld.keys()
        self._fronts: dict[Any, Any] = {}

    def front(self, start: int, end: int, part: Part, front: Any) -> tuple[Any, int]:
        inputs = {i: self._ways[v] for i, v in enumerate(part.invars) if not isinstance(v, Literal) and v in self._ways}
        eqns = part.jaxpr.eqns if part.eqn is None else []
        addresses = {v: (i, n) for i, eqn in enumerate(eqns) for n, v in enumerate(eqn.outvars)}
        pairs = [(v, ours) for v, ours in zip(part.outvars, part.jaxpr.outvars, strict=False) if isinstance(ours, Var)]
        outputs = {addresses[ours]: self._ways[v] for v, ours in pairs if v in self._ways and ours in addresses}
        key = front, tuple(inputs.items()), tuple(outputs.items())
        if key not in self._fronts:
            self._fronts[key] = self._changed(part, front, inputs, outputs)
        return self._fronts[key], 0

    def _changed(
        self, part: Part, front: Any, inputs: Mapping[int, InFormat], outputs: Mapping[Address, InFormat]
    ) -> Any:
        if front.is_free or not (inputs or outputs):
            return front
        if front.graph is not None and part.eqn is None:
            return front.changed(step=lambda o: holding(front.graph, o, inputs, outputs))
        held = sum(device_bytes(part.invars[i].aval) for i in inputs)
        return front.changed(whole=lambda o: o._replace(saved_bytes=o.saved_bytes + held))


def holding(
    graph: Graph, option: Option, inputs: Mapping[int, InFormat], outputs: Mapping[Address, InFormat]
) -> Option:
    """An option where no other region has these inputs and outputs: it holds them itself, in fewer bits if it is
    rematerialized.
    """
    decision, types = option.decision, {i: graph.jaxpr.invars[i].aval for i in inputs}
    if decision.saved is None:
        held = sum(device_bytes(types[i]) for i in inputs if i in graph.residual_inputs)
        return option._replace(saved_bytes=option.saved_bytes + held)
    read = graph.inputs_read(decision)
    held_inputs = tuple((i, inputs[i]) for i in sorted(inputs) if i in read)
    changed = {a: outputs[a] for a in decision.addresses if a in outputs}
    pairs = [(types[i], way) for i, way in held_inputs]
    pairs += [(graph.sites[a].value.type, way) for a, way in changed.items()]
    decision = decision._replace(saved=frozenset((dict(decision.saved) | changed).items()))
    return Option(
        option.saved_bytes + sum(way.num_bytes(aval) for aval, way in pairs),
        option.backward_bytes + max((way.read_bytes(aval) for aval, way in pairs), default=0),
        option.cost + sum(way.cost(aval) for aval, way in pairs),
        decision.having(StoredInputs(held_inputs)) if held_inputs else decision,
    )
