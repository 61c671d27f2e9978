"""A plan written down: what it was made for, how each part is treated, and what that means for each value."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from .. import _jax
from .._equations.flops import count
from .._jax import Jaxpr, Literal
from .._lift.around import device_bytes
from .._loops import schedule
from .._loops.strategy import Lengths, Slots, Strategy
from .._remat.survey import Survey
from ..residuals._show import short_path, short_type
from ..residuals._trace import user_line
from ._analysis import Option
from ._layout import Layout, marks_of
from ._parts import Part, flatten
from ._search import Candidate, Search

VERSION = 1


@dataclasses.dataclass(frozen=True)
class PlanRow:
    """What becomes of a value.

    Attributes:
        value: its name where it has one, else the operation that computes it, and its type.
        owner: the line that computes it, and the function that this line is in.
        times: how many such values the program has: one for each part that is alike.
        bytes: of one of them.
        decision: "keep", "recompute", "offload", or "as it is" in parts that are not rematerialised.
        price: of computing one of them from its operands, in operations or seconds.
    """

    value: str
    owner: str
    times: int
    bytes: int
    decision: str
    price: float


def fingerprint(jaxpr: Jaxpr) -> list[str]:
    """A line for each equation of a flat program: equal programs have equal lines."""
    numbers = {v: i for i, v in enumerate(jaxpr.invars)}

    def operand(atom: Any) -> str:
        if isinstance(atom, Literal):
            return f"{np.asarray(atom.val).tolist() if np.ndim(atom.val) == 0 else 'constant'}:{_type(atom)}"
        return f"v{numbers[atom]}:{_type(atom)}"

    lines = []
    for eqn in jaxpr.eqns:
        ins = " ".join(map(operand, eqn.invars))
        for v in eqn.outvars:
            numbers[v] = len(numbers)
        outs = " ".join(_type(v) for v in eqn.outvars)
        params = " ".join(f"{k}={_param(v)}" for k, v in sorted(eqn.params.items()) if k not in _UNSTABLE)
        lines.append(f"{eqn.primitive.name} {ins} -> {outs}" + (f" [{params}]" if params else ""))
    return lines


_UNSTABLE = frozenset(
    {"policy", "name", "debug_info", "jvp_jaxpr_fun", "jvp_jaxpr_thunk", "fwd_jaxpr_thunk", "bwd", "ctx_mesh"}
)


def _type(v: Any) -> str:
    return short_type(str(v.aval.dtype), tuple(v.aval.shape)) if hasattr(v.aval, "dtype") else str(v.aval)


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
    search: Search, found: Candidate, name: str, budget: int, objective: str, is_step: bool
) -> dict[str, Any]:
    """What a plan is made of, as JSON knows it."""
    layout = found.layout
    treatments: list[dict[str, Any]] = []
    numbers = []
    for option in found.options:
        written = _written(option)
        if written not in treatments:
            treatments.append(written)
        numbers.append(treatments.index(written))
    unplanned = search.unplanned.cost
    others = [c for c in search.candidates if c is not found]
    is_counted = objective == "flops"
    found_flops = unplanned.flops + int(found.added) if is_counted else found.cost.flops + _hidden(layout, found)
    return {
        "version": VERSION,
        "name": name,
        "objective": objective,
        "is_step": is_step,
        "budget_bytes": budget,
        "predicted_bytes": int(search.predict(found.peak, others) if others else found.peak),
        "foretold_bytes": int(found.predicted),
        "temp_bytes": found.temp_bytes,
        "unplanned_bytes": unplanned.temp_bytes,
        "flops": found_flops,
        "unplanned_flops": unplanned.flops,
        "stock": "" if found.name == "plan" else found.name,
        "complete": not search.is_late(),
        "opened": layout.jaxpr is not search.jaxpr,
        "cuts": None if layout.cuts is None else list(layout.cuts),
        "parts": numbers,
        "treatments": treatments,
        "equations": fingerprint(search.jaxpr),
        "rows": [dataclasses.asdict(row) for row in _rows(layout, found.options, search.price)],
        "loops": list(_loops(layout, found.options)),
        "curve": search.curve(),
        "measured": [[c.name, c.temp_bytes, c.added / search.whole()] for c in search.candidates],
    }


def _hidden(layout: Layout, found: Candidate) -> int:
    """Operations of the schedules of loops, of which the equations show one step each."""
    hidden = 0
    for part, option in zip(layout.parts, found.options, strict=True):
        if isinstance(option.loop, Slots):
            length = part.eqn.params["length"]
            hidden += schedule.num_evaluations(length, option.loop.num) * count(part.jaxpr)
    return hidden


def _written(option: Option) -> dict[str, Any]:
    loop = option.loop
    written: Any = None
    if isinstance(loop, Slots):
        written = ["Slots", loop.num, loop.block]
    elif isinstance(loop, Lengths):
        written = ["Lengths", *loop.lengths]
    kept = None if option.kept is None else sorted(map(list, option.kept))
    return {"kept": kept, "offloaded": sorted(map(list, option.offloaded)), "loop": written}


def option_of(written: dict[str, Any]) -> Option:
    """The treatment of a part that was written down."""
    loop: Strategy | None = None
    if written["loop"] is not None:
        kind, *numbers = written["loop"]
        loop = Slots(numbers[0], block=numbers[1]) if kind == "Slots" else Lengths(*numbers)
    kept = None if written["kept"] is None else frozenset((a, b) for a, b in written["kept"])
    return Option(kept, 0, 0, 0.0, frozenset((a, b) for a, b in written["offloaded"]), loop)


def _rows(layout: Layout, options: Sequence[Option], price: Callable[[Any], float]) -> list[PlanRow]:
    found: dict[Any, list[Any]] = {}
    for part, option in zip(layout.parts, options, strict=True):
        key = (part.key, option.kept, option.offloaded, option.loop)
        found.setdefault(key, [part, option, 0])[2] += 1
    rows = []
    for part, option, times in found.values():
        rows += _rows_of(part, option, times, price)
    return sorted(rows, key=lambda r: (r.decision not in ("keep", "offload"), -r.bytes * r.times, -r.price))


def _rows_of(part: Part, option: Option, times: int, price: Callable[[Any], float]) -> Iterator[PlanRow]:
    marks = marks_of(option)
    length = part.eqn.params["length"] if part.eqn is not None else 1
    is_planned = option.kept is not None or option.loop is not None
    for site in Survey(part.jaxpr).results:
        if len(site.address) != 2:
            continue
        mark = marks.get(site.address)
        if not is_planned:
            decision = "as it is"
        elif mark is None:
            decision = "recompute"
        else:
            decision = "offload" if "offload" in mark else "keep"
        file, line, function = user_line(site.eqn)
        named = ", ".join(sorted(site.value.names))
        kind = short_type(str(site.value.type.dtype), tuple(site.value.type.shape))
        owner = f"{short_path(file)}:{line} ({function})" if file else ""
        value = f"{named or site.eqn.primitive.name} {kind}"
        yield PlanRow(value, owner, times * length, device_bytes(site.value.type), decision, float(price(site.eqn)))


def _loops(layout: Layout, options: Sequence[Option]) -> Iterator[str]:
    for part, option in zip(layout.parts, options, strict=True):
        if part.eqn is not None and option.loop is not None:
            file, line, _ = user_line(part.eqn)
            where = f" at {short_path(file)}:{line}" if file else ""
            yield f"The loop of {part.eqn.params['length']} steps{where} is stored by {option.loop!r}."
