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
        counts: calls outside of recomputations; None if unknown: in loops of unknown length, or in recomputations only.
            Where one is nested in another, JAX marks the first computation as a recomputation, too. A checkpointed loop
            has both.
        functions: the last function of each primitive, for messages.
    """

    counts: dict[str, int | None]
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
        unknown = sorted(repeated | (recomputed - counts.keys()))
        return cls({**counts, **dict.fromkeys(unknown)}, functions)

    def differences(self, expected: HostCalls) -> list[str]:
        """The functions that are not called as often as in another program; called at all, where that is not known."""
        found, functions = [], expected.functions | self.functions
        for name in expected.counts | self.counts:
            num, num_expected = self.counts.get(name, 0), expected.counts.get(name, 0)
            if num is not None and num_expected is not None and num != num_expected:
                found.append(f"{functions[name]} {counted(num, 'time')} in place of {num_expected}")
            elif num != num_expected and 0 in (num, num_expected):
                found.append(f"{functions[name]}: only one of them calls it")
        return found
