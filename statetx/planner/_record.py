"""The record of a plan, as stored in JSON: the program's fingerprint, the decision for each part, and a row for each value.

The keys are a file format: they keep their names ("treatments", "foretold_bytes") where the code has others.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from .. import _jax
from .._jax import Jaxpr, Literal
from .._lift.context import device_bytes
from .._loops.strategy import Strategy
from .._remat.survey import Survey
from .._text import short_path, type_str
from ..residuals._trace import user_line
from ._analysis import Option
from ._layout import Layout, marks_of
from ._parts import Part, flatten
from ._search import Candidate, Search

VERSION = 1


@dataclasses.dataclass(frozen=True)
class PlanRow:
    """The decision for a value.

    Attributes:
        value: its name, or else the operation that computes it; and its type.
        owner: the line that computes it, and the function of that line.
        times: number of such values in the program: one for each equal part and each step of a loop.
        bytes: size of one of them.
        decision: "keep", "recompute", "offload", or "unchanged" in parts that are not rematerialized.
        price: cost of computing one of them from its operands, in operations or seconds.
    """

    value: str
    owner: str
    times: int
    bytes: int
    decision: str
    price: float


def fingerprint(jaxpr: Jaxpr) -> list[str]:
    """A line for each equation of a flat program. Equal programs have equal lines."""
    # Variables are numbered in the order of their definition: names of variables and of functions do not count.
    numbers = {v: i for i, v in enumerate(jaxpr.invars)}

    def operand(atom: Any) -> str:
        if isinstance(atom, Literal):
            return f"{np.asarray(atom.val).tolist() if np.ndim(atom.val) == 0 else 'constant'}:{_type(atom)}"
        return f"v{numbers[atom]}:{_type(atom)}"

    lines = []
    for eqn in jaxpr.eqns:
        operands = " ".join(map(operand, eqn.invars))
        for v in eqn.outvars:
            numbers[v] = len(numbers)
        outs = " ".join(_type(v) for v in eqn.outvars)
        params = " ".join(f"{k}={_param(v)}" for k, v in sorted(eqn.params.items()) if k not in _UNSTABLE)
        lines.append(f"{eqn.primitive.name} {operands} -> {outs}" + (f" [{params}]" if params else ""))
    return lines


# Parameters that may differ between traces of the same program: functions made by each trace, names and debugging information. A
# difference in them alone, such as another derivative rule, is not noticed.
_UNSTABLE = frozenset(
    {"policy", "name", "debug_info", "jvp_jaxpr_fun", "jvp_jaxpr_thunk", "fwd_jaxpr_thunk", "bwd", "ctx_mesh"}
)


def _type(v: Any) -> str:
    # Hashed into stored plans, without sharding and weak type: not to be changed with the notation of messages.
    return type_str(jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype)) if hasattr(v.aval, "dtype") else str(v.aval)


def _param(x: Any) -> str:
    if _jax.is_jaxpr(x):
        lines = "\n".join(fingerprint(flatten(_jax.open_jaxpr(x)[0])))
        return hashlib.sha256(lines.encode()).hexdigest()[:12]
    if isinstance(x, (tuple, list)):
        return f"({','.join(map(_param, x))})"
    if callable(x) and not isinstance(x, type):
        return getattr(x, "__name__", type(x).__name__)
    return str(x)


def fields_of(
    search: Search, candidate: Candidate, name: str, budget: int, objective: str, is_step: bool
) -> dict[str, Any]:
    """The fields of a plan, as JSON values."""
    layout = candidate.layout
    # Equal parts have equal decisions: each is stored once, and parts refer to it by number.
    decisions: list[dict[str, Any]] = []
    numbers = []
    for option in candidate.options:
        decision = _to_json(option)
        if decision not in decisions:
            decisions.append(decision)
        numbers.append(decisions.index(decision))

    # `predicted_bytes` is a leave-one-out prediction: the candidate's own measurement does not correct it.
    baseline = search.baseline.compiled
    other_candidates = [c for c in search.candidates if c is not candidate]

    fields = {
        "version": VERSION,
        "name": name,
        "objective": objective,
        "is_step": is_step,
        "budget_bytes": budget,
        "predicted_bytes": int(
            search.predict(candidate.peak, other_candidates) if other_candidates else candidate.peak
        ),
        "foretold_bytes": int(candidate.predicted_bytes),
        "temp_bytes": candidate.temp_bytes,
        "unplanned_bytes": baseline.temp_bytes,
        "flops": candidate.compiled.flops,
        "unplanned_flops": baseline.flops,
        "stock": "" if candidate.name == "plan" else candidate.name,
        "complete": not search.is_late(),
    }

    # To rewrite the program: where it is cut, the decision for each part, and how to tell that it is the same program.
    fields |= {
        "opened": layout.jaxpr is not search.jaxpr,
        "cuts": None if layout.cuts is None else list(layout.cuts),
        "parts": numbers,
        "treatments": decisions,
        "equations": fingerprint(search.jaxpr),
    }

    # To print the plan.
    fields |= {
        "rows": [dataclasses.asdict(row) for row in _rows(layout, candidate.options, search.equation_cost)],
        "loops": list(_loops(layout, candidate.options)),
        "curve": search.curve(),
        "measured": [[c.name, c.temp_bytes, c.added_cost / search.total_cost()] for c in search.candidates],
    }
    return fields


def _to_json(option: Option) -> dict[str, Any]:
    strategy = option.loop and option.loop.to_json()
    saved = None if option.saved is None else sorted(map(list, option.saved))
    return {"kept": saved, "offloaded": sorted(map(list, option.offloaded)), "loop": strategy}


def option_of(decision: dict[str, Any]) -> Option:
    """The option of a stored decision, without bytes and cost."""
    # Rewriting needs the decision only; bytes and cost belong to the search that is over.
    loop = decision["loop"] and Strategy.from_json(decision["loop"])
    saved = None if decision["kept"] is None else frozenset((a, b) for a, b in decision["kept"])
    return Option(saved, 0, 0, 0.0, frozenset((a, b) for a, b in decision["offloaded"]), loop)


def _rows(layout: Layout, options: Sequence[Option], equation_cost: Callable[[Any], float]) -> list[PlanRow]:
    # Equal parts with equal decisions have equal rows: list them once, with their number.
    counts: dict[Any, list[Any]] = {}
    for part, option in zip(layout.parts, options, strict=True):
        key = (part.key, option.saved, option.offloaded, option.loop)
        counts.setdefault(key, [part, option, 0])[2] += 1
    rows = []
    for part, option, times in counts.values():
        rows += _rows_of(part, option, times, equation_cost)
    return sorted(rows, key=lambda r: (r.decision not in ("keep", "offload"), -r.bytes * r.times, -r.price))


def _rows_of(part: Part, option: Option, times: int, equation_cost: Callable[[Any], float]) -> Iterator[PlanRow]:
    marks = marks_of(option)
    length = part.eqn.params["length"] if part.eqn is not None else 1
    is_planned = option.saved is not None or option.loop is not None
    for site in Survey(part.jaxpr).results:
        # Values in inner jaxprs, such as branches, are not candidates (`Graph.sites`).
        if len(site.address) != 2:
            continue

        mark = marks.get(site.address)
        if not is_planned:
            decision = "unchanged"
        elif mark is None:
            decision = "recompute"
        else:
            decision = "offload" if "offload" in mark else "keep"

        file, line, function = user_line(site.eqn)
        names = ", ".join(sorted(site.value.names))
        type_text = type_str(site.value.type, weak=False)
        owner = f"{short_path(file)}:{line} ({function})" if file else ""
        value = f"{names or site.eqn.primitive.name} {type_text}"
        yield PlanRow(
            value, owner, times * length, device_bytes(site.value.type), decision, float(equation_cost(site.eqn))
        )


def _loops(layout: Layout, options: Sequence[Option]) -> Iterator[str]:
    for part, option in zip(layout.parts, options, strict=True):
        if part.eqn is not None and option.loop is not None:
            file, line, _ = user_line(part.eqn)
            location = f" at {short_path(file)}:{line}" if file else ""
            yield f"The loop of {part.eqn.params['length']} steps{location} is stored by {option.loop!r}."
