"""Stored inputs: regions hold their inputs in fewer bits."""

from __future__ import annotations

from collections.abc import Hashable, Mapping

from ..._jax import Jaxpr, Literal, Var
from ..._lift.context import device_bytes
from .._program.flat import Part
from .._program.values import INPUT, Address, InFormat, smallest_of_variables
from .front import Front
from .graph import Graph
from .proposals import PartsOf, RegionTreatment
from .treatment import Option, Settings


class StoredInputs(RegionTreatment):
    """Regions hold inputs in fewer bits; in a plan these are saved values."""

    @classmethod
    def paths(cls, program: Jaxpr, settings: Settings, parts_of: PartsOf) -> _StoringPaths | None:
        unheld = smallest_of_variables(program, settings.formats)
        return _StoringPaths(unheld) if unheld else None


class _StoringPaths:
    """Paths where each region holds its operands."""

    def __init__(self, unheld: Mapping[Var, InFormat]):
        self._ways = unheld
        self.unheld = unheld.keys()
        self._fronts: dict[Hashable, Front] = {}

    def front(self, start: int, end: int, part: Part, front: Front) -> tuple[Front, int]:
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
        self, part: Part, front: Front, inputs: Mapping[int, InFormat], outputs: Mapping[Address, InFormat]
    ) -> Front:
        if front.is_free or not (inputs or outputs):
            return front
        graph = front.graph
        if graph is not None and part.eqn is None:
            return front.changed(step=lambda o: holding(graph, o, inputs, outputs))
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
    held = {(INPUT, i): way for i, way in inputs.items() if i in read}
    changed = {a: outputs[a] for a in decision.addresses if a in outputs}
    pairs = [(types[i], way) for (_, i), way in held.items()]
    pairs += [(graph.sites[a].value.type, way) for a, way in changed.items()]
    return Option(
        option.saved_bytes + sum(way.num_bytes(aval) for aval, way in pairs),
        option.backward_bytes + max((way.read_bytes(aval) for aval, way in pairs), default=0),
        option.cost + sum(way.cost(aval) for aval, way in pairs),
        decision._replace(saved=frozenset((dict(decision.saved) | changed | held).items())),
    )
