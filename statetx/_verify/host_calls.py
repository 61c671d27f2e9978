"""`HostCalls`: how often the host is called by a program."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from typing import Any

from .. import _jax
from .._equations.primitives import REMAT
from .._text import counted


@dataclasses.dataclass(frozen=True)
class HostCalls:
    """How often the host is called with effects, by primitive: each of two steps may have functions of its own.

    Attributes:
        counts: calls outside of recomputations; infinite if unknown: in loops of unknown length, or in recomputations
            only. Where one is nested in another, JAX marks the first computation as a recomputation, too. A
            checkpointed loop has both.
        functions: the last function of each primitive, for messages.
    """

    counts: dict[str, float]
    functions: dict[str, str]

    @classmethod
    def of(cls, jaxpr: Any) -> HostCalls:
        counts, functions = Counter[str](), dict[str, str]()

        def visit(jaxpr: Any, times: float) -> None:
            for eqn in jaxpr.eqns:
                name = eqn.primitive.name
                if eqn.effects and name.endswith(("_callback", "debug_print")):
                    functions[name] = _jax.callback_name(eqn)[0]
                    counts[name] += times  # type: ignore[assignment]
                turns = math.inf if name == "while" else eqn.params.get("length", 1)
                is_recomputed = not times or (name in REMAT and eqn.params["differentiated"])
                for inner in _jax.inner_jaxprs(eqn):
                    visit(inner, 0 if is_recomputed else times * turns)

        visit(jaxpr, 1)
        return cls({name: count or math.inf for name, count in counts.items()}, functions)

    def differences(self, expected: HostCalls) -> list[str]:
        """The functions that are not called as often as in another program; called at all, where that is not known."""
        found, functions = [], expected.functions | self.functions
        for name in expected.counts | self.counts:
            num, num_expected = self.counts.get(name, 0), expected.counts.get(name, 0)
            if num != num_expected and math.inf not in (num, num_expected):
                found.append(f"{functions[name]} {counted(int(num), 'time')} in place of {num_expected}")
            elif num != num_expected and 0 in (num, num_expected):
                found.append(f"{functions[name]}: only one of them calls it")
        return found
