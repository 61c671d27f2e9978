"""`HostCalls`: how often the host is called by a program."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

from .. import _jax
from .._equations.primitives import REMAT
from .._text import counted


@dataclasses.dataclass(frozen=True)
class HostCalls:
    """How often the host is called with effects, by primitive: each of two steps may have functions of its own.

    Attributes:
        counts: calls outside of recomputations and of loops of unknown length.
        uncounted: primitives in loops of unknown length, or in recomputations only: where one is nested in another, JAX
            marks the first computation as a recomputation, too. A checkpointed loop has both.
        functions: the last function of each primitive, for messages.
    """

    counts: Counter[str]
    uncounted: frozenset[str]
    functions: dict[str, str]

    @classmethod
    def of(cls, jaxpr: Any) -> HostCalls:
        counts, recomputed, repeated, functions = Counter[str](), set[str](), set[str](), dict[str, str]()

        def visit(jaxpr: Any, times: int, is_recomputed: bool, is_repeated: bool) -> None:
            for eqn in jaxpr.eqns:
                if eqn.effects and eqn.primitive.name.endswith(("_callback", "debug_print")):
                    name = eqn.primitive.name
                    functions[name] = _jax.callback_name(eqn)[0]
                    if is_recomputed:
                        recomputed.add(name)
                    elif is_repeated:
                        repeated.add(name)
                    else:
                        counts[name] += times
                inside = is_recomputed or (eqn.primitive.name in REMAT and eqn.params["differentiated"])
                for inner in _jax.inner_jaxprs(eqn):
                    is_while = is_repeated or eqn.primitive.name == "while"
                    visit(inner, times * eqn.params.get("length", 1), inside, is_while)

        visit(jaxpr, 1, False, False)
        return cls(counts, frozenset(repeated | (recomputed - counts.keys())), functions)

    def differences(self, expected: HostCalls) -> list[str]:
        """The functions that are not called as often as in another program; called at all, where that is not known."""
        found, functions = [], expected.functions | self.functions
        uncounted = self.uncounted | expected.uncounted
        for name in dict.fromkeys([*expected.counts, *self.counts, *sorted(uncounted)]):
            if name not in uncounted and self.counts[name] != expected.counts[name]:
                times = counted(self.counts[name], "time")
                found.append(f"{functions[name]} {times} in place of {expected.counts[name]}")
            elif (name in self) != (name in expected):
                found.append(f"{functions[name]}: only one of them calls it")
        return found

    def __contains__(self, name: object) -> bool:
        return name in self.counts or name in self.uncounted
