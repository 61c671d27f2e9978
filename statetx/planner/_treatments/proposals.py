"""The proposals of treatments: options of a part, variants of all regions of a program."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence, Set
from typing import Protocol

from ... import _frames, _jax
from ..._jax import Jaxpr, Var
from .._program.flat import Part
from .front import FREE, Front
from .graph import Graph
from .treatment import Expand, Option, Settings, Treatment

FindOptions = Callable[[], list[Option]]

PartsOf = Callable[[Front], Sequence[Part]]
"""``front -> parts``: those that share a `Front`."""


class Variants(Protocol):
    """Variants of all regions of a program, which are of use together only."""

    @property
    def unheld(self) -> Set[Var]:
        """The values of the program that are not in memory between regions, since each region makes or holds its
        operands.
        """
        ...

    def front(self, start: int, end: int, part: Part, front: Front) -> tuple[Front, int] | None:
        """The options of a region, and bytes beside its cotangents in its backward pass; None if it has no variant."""


class RegionTreatment(Treatment):
    """Base of the treatments of regions. It has no part in a method that it does not override."""

    @classmethod
    def expanding(cls, part: Part, graph: Graph, settings: Settings) -> Expand | None:
        """A function from the options of a part, the unchanged one first, to more of them or others; None for none.

        The last of its results replaces the last given option. `graph` is of the part, or of a step of a loop.
        """
        return None

    @classmethod
    def paths(cls, program: Jaxpr, settings: Settings, parts_of: PartsOf) -> Variants | None:
        """Variants of all regions of a program; None for none."""
        return None


def of_regions(treatments: Sequence[type[Treatment]]) -> Iterator[type[RegionTreatment]]:
    return (kind for kind in treatments if issubclass(kind, RegionTreatment))


def front_of(
    part: Part,
    is_computed: Sequence[bool],
    is_differentiated: Sequence[bool],
    has_cotangent: Sequence[bool],
    settings: Settings,
    start: Callable[[FindOptions], FindOptions] = lambda find: find,
) -> Front:
    """The front of a part.

    Args:
        start: takes a function that solves integer programs, and returns one that waits for its result.
    """
    # Without tangents or cotangents the part has no backward pass, and saves nothing for it.
    free, policies, offload = [FREE], settings.policies, settings.offload
    if not any(is_differentiated) or not any(has_cotangent):
        return Front(free, free * len(policies))

    if part.eqn is not None:
        # A step's carry comes from the step before, so it may have tangents, and has cotangents, from the second step
        # on.
        num_constants, num_carry = _jax.scan_counts(part.eqn)
        is_computed = [num_constants <= i < num_constants + num_carry for i in range(len(part.jaxpr.invars))]
        find = _frames.undone(_jax.steps_with_tangents)
        is_differentiated, _ = find(part.jaxpr, is_differentiated, num_constants, num_carry)
        has_cotangent = [c or i < num_carry for i, c in enumerate(has_cotangent)]

        # No value of a step is offloaded: the model of loops of loops does not count the fetches for a turn.
        offload = False
    flags = is_computed, is_differentiated, has_cotangent
    graph = Graph(part.jaxpr, *flags, settings.context, settings.formats, part.eqn is not None, settings.keeps_fusions)
    all_expands = [kind.expanding(part, graph, settings) for kind in of_regions(settings.treatments)]
    expands = [expand for expand in all_expands if expand is not None]

    def expand(steps: Sequence[Option]) -> list[Option]:
        return functools.reduce(lambda options, more: more(options), expands, list(steps))

    baseline = graph.baseline()
    if _jax.forbidden_effects(part.jaxpr):  # JAX does not rematerialize an equation whose side effect would run again
        return Front([baseline], [baseline] * len(policies), None, lambda steps: expand(steps)[:1])
    stock = [graph.by_policy(policy) for policy in policies]
    find_front = start(graph.front_finder(offload, settings.deadline))
    return Front(lambda: [baseline, *find_front(), *stock], stock, graph, expand)
