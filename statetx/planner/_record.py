"""The record of a plan, as stored in JSON: the programs' fingerprints, the decision for each part, and a row for each value.

Its fields, with their types and ranges, are listed in `_fields`.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from .. import _frames, _jax
from .._equations.flops import flops
from .._jax import Jaxpr, Literal
from .._lift.context import device_bytes
from .._remat.stored import StoredType
from .._remat.survey import Site
from .._text import format_bytes, short_path, type_str
from ..residuals._trace import user_line
from ._budget import STEP, Budget
from ._candidate import Candidate
from ._decision import parts_of, to_json
from ._fields import VERSION
from ._groups import Groups
from ._layout import Waits
from ._option import Option
from ._parts import Part, flatten
from ._search import Search
from ._stored import stored_bytes
from ._values import values_of

if TYPE_CHECKING:  # it takes the fingerprints of programs from here
    from ._whole import Choice, Options, Whole


@dataclasses.dataclass(frozen=True)
class PlanRow:
    """The decision for a value.

    Attributes:
        value: its name, or else the operation that computes it; and its type.
        owner: the line that computes it, and the function of that line.
        times: number of such values in the program: one for each equal part and each step of a loop.
        bytes: size of one of them.
        decision: "keep", "recompute", "offload", "keep as bits" (or another format), or "unchanged" in parts that are not
            rematerialized.
        price: cost of computing one of them from its operands, in operations or seconds.
    """

    value: str
    owner: str
    times: int
    bytes: int
    decision: str
    price: float

    def rank(self) -> tuple[Any, ...]:
        """The order in which rows are listed: saved values first, the largest first."""
        is_saved = self.decision not in ("recompute", "unchanged")
        return (not is_saved, -self.bytes * self.times, -self.price)


def fingerprint(jaxpr: Jaxpr) -> list[str]:
    """A line for each equation of a flat program. Programs with equal equations have equal lines; what they return does not count."""
    return _lines(jaxpr)[0]


def full_fingerprint(jaxpr: Jaxpr) -> tuple[str, ...]:
    """The fingerprint of a flat program, and a line for what it returns."""
    lines, last = _lines(jaxpr)
    return (*lines, last)


def _lines(jaxpr: Jaxpr, has_rules: bool = True) -> tuple[list[str], str]:
    # Variables are numbered in the order of their definition: names of variables and of functions do not count.
    variables = {v: f"v{i}:{_type(v)}" for i, v in enumerate(jaxpr.invars)}

    def operand(atom: Any) -> str:
        if isinstance(atom, Literal):
            return f"{np.asarray(atom.val).tolist() if np.ndim(atom.val) == 0 else 'constant'}:{_type(atom)}"
        return variables[atom]

    lines = []
    for eqn in jaxpr.eqns:
        operands = " ".join(map(operand, eqn.invars))
        types = [_type(v) for v in eqn.outvars]
        for v, type in zip(eqn.outvars, types, strict=True):
            variables[v] = f"v{len(variables)}:{type}"
        outs = " ".join(types)
        params = [f"{k}={_param(v, has_rules)}" for k, v in sorted(eqn.params.items()) if k not in _UNSTABLE]
        # A plan may keep values of a rule, but not of the rules in it: often it calls the function itself.
        if has_rules and eqn.primitive.name == "custom_vjp_call":
            params.append(f"rule={_rule(eqn)}")
        lines.append(f"{eqn.primitive.name} {operands} -> {outs}" + (f" [{' '.join(params)}]" if params else ""))
    return lines, f"return {' '.join(map(operand, jaxpr.outvars))}"


# Parameters that may differ between traces of the same program: functions made by each trace, names and debugging information. A
# difference in them alone, such as another rule for forward mode, is not noticed.
_UNSTABLE = frozenset(
    {"policy", "name", "debug_info", "jvp_jaxpr_fun", "jvp_jaxpr_thunk", "fwd_jaxpr_thunk", "bwd", "ctx_mesh"}
)


def _type(v: Any) -> str:
    return _array_type(v.aval.shape, v.aval.dtype) if hasattr(v.aval, "dtype") else str(v.aval)


@functools.lru_cache(4096)
def _array_type(shape: tuple[Any, ...], dtype: Any) -> str:
    # Hashed into stored plans, without sharding and weak type: not to be changed with the notation of messages.
    return type_str(jax.ShapeDtypeStruct(shape, dtype))


def _param(x: Any, has_rules: bool) -> str:
    if _jax.is_jaxpr(x):
        lines, last = _lines(flatten(_jax.constants_as_inputs(_jax.open_jaxpr(x)[0])), has_rules)
        return hashlib.sha256("\n".join([*lines, last]).encode()).hexdigest()[:12]
    if isinstance(x, (tuple, list)):
        return f"({','.join(_param(item, has_rules) for item in x)})"
    if callable(x) and not isinstance(x, type):
        return getattr(x, "__name__", type(x).__name__)
    return _ADDRESS.sub("", str(x))


def _rule(eqn: Any) -> str:
    """The forward rule of a ``custom_vjp``; nothing if it raises, since no plan sees into it then."""
    try:
        rule = _frames.undone(_jax.rule_of)(eqn)
    except Exception:
        return ""
    return _param(rule, has_rules=False)


_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def fields_of(whole: Whole, choice: Choice, name: str, budget: Budget, options: Options) -> dict[str, Any]:
    """The fields of a plan, as JSON values: what it takes and costs, and how to rewrite each gradient of the program."""
    fixed = whole.fixed()
    fields = {
        "version": VERSION,
        "name": name,
        "objective": options.objective,
        "is_step": whole.captured.is_step,
        "of": budget.of,
        "budget_bytes": bytes_of(whole, budget),
        "argument_bytes": fixed.argument_bytes,
        "output_bytes": fixed.output_bytes,
        "alias_bytes": fixed.alias_bytes,
        "temp_bytes": choice.temp_bytes,
        "flops": choice.compiled.flops,
        "stock": "" if choice.name == "plan" else choice.name,
        "complete": whole.is_complete(),
        "seconds": None,
        "ignored": [digest_of(lines) for lines in whole.captured.ignored],
        "inner": whole.captured.variant,
        "num_devices": whole.captured.num_devices,
    }
    pairs = zip(whole.searches, choice.candidates, strict=True)
    return fields | {"programs": [_program_fields(search, candidate, choice.waits) for search, candidate in pairs]}


def bytes_of(whole: Whole, budget: Budget) -> int:
    """A budget in bytes of what it counts."""
    if isinstance(budget.amount, int):
        return budget.amount
    fixed = whole.fixed().bytes if budget.of == STEP else 0
    return budget.temp_bytes(fixed, whole.fraction_of_baseline) + fixed


def shown_fields(whole: Whole, choice: Choice) -> dict[str, Any]:
    """The fields that only say how good a plan is. They need the whole trade-off."""
    # `predicted_bytes` is a leave-one-out prediction: the candidate's own measurement does not correct it.
    return {
        "predicted_bytes": int(whole.predict(choice)),
        "foretold_bytes": int(max(c.predicted_bytes for c in choice.candidates)),
        "curve": whole.curve(),
        "measured": [[c.name, c.temp_bytes, c.added_cost / whole.total_cost()] for c in whole.choices()],
        "stock_policies": [[n, b, c / whole.total_cost(), p] for n, b, c, p in whole.stock_policies()],
        **unplanned_fields(whole),
    }


def unplanned_fields(whole: Whole) -> dict[str, Any]:
    """The fields of the program without a plan."""
    return {
        "unplanned_bytes": whole.unplanned_bytes(),
        "unplanned_is_compiled": whole.has_baseline(),
        "unplanned_flops": whole.unplanned_flops(),
    }


def _program_fields(search: Search, candidate: Candidate, waits: Waits) -> dict[str, Any]:
    """How to rewrite one gradient."""
    layout = candidate.layout
    # Equal parts have equal decisions: each is stored once, and parts refer to it by number.
    decisions: list[dict[str, Any]] = []
    numbers = []
    for option in candidate.options:
        decision = to_json(option)
        if decision not in decisions:
            decisions.append(decision)
        numbers.append(decisions.index(decision))

    return {
        # Where the program is cut, the decision for each part, and how to tell that it is the same program.
        "cuts": list(layout.cuts),
        "parts": numbers,
        "treatments": decisions,
        "order": [list(order) for order in layout.order],
        "last_input": None if waits is Waits.FOR_NOTHING else layout.first_read(),
        "is_sequential": waits is Waits.FOR_GRADIENTS,
        "equations": fingerprint(search.jaxpr),
    }


def described(program: Jaxpr, fields: dict[str, Any]) -> dict[str, Any]:
    """The fields of one gradient, a flat program, with those that print it: a row for each value, and the loops and groups of regions."""
    _, parts, options, _ = parts_of(program, fields)
    return fields | {
        "rows": [dataclasses.asdict(row) for row in _rows(parts, options)],
        "loops": list(_loops(parts, options)),
        "groups": list(_groups(parts, options)),
    }


def digest_of(lines: Sequence[str]) -> str:
    """A digest of a fingerprint."""
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _rows(parts: Sequence[Part], options: Sequence[Option]) -> list[PlanRow]:
    # Equal parts with equal decisions have equal rows: list them once, with their number.
    counts: dict[Any, list[Any]] = {}
    for part, option in zip(parts, options, strict=True):
        key = (part.key, option.decision)
        counts.setdefault(key, [part, option, 0])[2] += 1
    rows = []
    for part, option, times in counts.values():
        length = part.eqn.params["length"] if part.eqn is not None else 1
        for number, step in option.loop.steps() if isinstance(option.loop, Groups) else [(length, option)]:
            rows += _rows_of(part, step, times * number)
    return sorted(rows, key=PlanRow.rank)


def _rows_of(part: Part, option: Option, times: int) -> Iterator[PlanRow]:
    formats: dict[tuple[int, ...], StoredType] = dict(option.stored)
    is_planned = option.saved is not None or option.loop is not None
    for address, site in values_of(part.jaxpr).sites.items():
        if not is_planned:
            decision = "unchanged"
        elif address not in (option.saved or ()):
            decision = "recompute"
        elif address in formats:
            decision = f"keep as {formats[address]}"
        else:
            decision = "offload" if address in option.offloaded else "keep"

        file, line, function = user_line(site.eqn)
        names = ", ".join(sorted(site.value.names))
        type_text = type_str(site.value.type, weak=False)
        owner = f"{short_path(file)}:{line} ({function})" if file else ""
        value = f"{names or site.eqn.primitive.name} {type_text}"
        yield PlanRow(value, owner, times, device_bytes(site.value.type), decision, float(flops(site.eqn)))


def _loops(parts: Sequence[Part], options: Sequence[Option]) -> Iterator[str]:
    for part, option in zip(parts, options, strict=True):
        if part.eqn is not None and option.loop is not None:
            file, line, _ = user_line(part.eqn)
            location = f" at {short_path(file)}:{line}" if file else ""
            text = f"The loop of {part.eqn.params['length']} steps{location} is stored by {option.loop!r}"
            yield f"{text}{_carries_text(part, option)}."


def _carries_text(part: Part, option: Option) -> str:
    if not option.carries:
        return ""
    num_constants, num_carry = _jax.scan_counts(part.eqn)
    types = [v.aval for v in part.jaxpr.invars[num_constants : num_constants + num_carry]]
    names = ", ".join(dict.fromkeys(str(format) for _, format in option.carries))
    stored = sum(stored_bytes(types[n], format) for n, format in option.carries)
    unchanged = sum(device_bytes(types[n]) for n, _ in option.carries)
    sizes = f"{format_bytes(stored)} in place of {format_bytes(unchanged)}"
    return f", {len(option.carries)} of the {num_carry} arrays in its carry as {names} ({sizes})"


def _groups(parts: Sequence[Part], options: Sequence[Option]) -> Iterator[str]:
    """Neighboring parts of equal structure, from the first to the last layer: which of them keep what."""
    layers: list[tuple[Part, list[Option]]] = []
    structures: dict[Any, list[Option]] = {}
    for part, option in zip(parts, options, strict=True):
        if option.saved is None and option.loop is None:
            continue
        if part.key not in structures:
            structures[part.key] = []
            layers.append((part, structures[part.key]))
        structures[part.key].append(option)

    for part, same in layers:
        # The same decision for a run of them is one line's worth of text.
        runs: list[tuple[Option, int]] = []
        for option in same:
            if runs and runs[-1][0].decision == option.decision:
                runs[-1] = (option, runs[-1][1] + 1)
            else:
                runs.append((option, 1))
        if len(same) > 1:
            yield f"{len(same)} equal regions{_place(part)}: {_runs_text(part, runs)}"
        else:
            yield f"A region of {len(part.jaxpr.eqns)} equations{_place(part)}: {_kept_text(part, same[0])}"


def _place(part: Part) -> str:
    for eqn in part.jaxpr.eqns:
        file, line, function = user_line(eqn)
        if file:
            return f" from {short_path(file)}:{line} ({function})"
    return ""


def _runs_text(part: Part, runs: Sequence[tuple[Option, int]]) -> str:
    texts, number = [], 1
    for option, times in runs:
        numbers = f"{number}" if times == 1 else f"{number}-{number + times - 1}"
        texts.append(f"{numbers} {_kept_text(part, option)}")
        number += times
    return "; ".join(texts)


def _kept_text(part: Part, option: Option) -> str:
    text, formats = _saved_text(part, option), dict(option.inputs)
    if not formats:
        return text
    names = ", ".join(dict.fromkeys(str(format) for format in formats.values()))
    stored = sum(stored_bytes(part.jaxpr.invars[i].aval, format) for i, format in formats.items())
    inputs = "the input" if len(formats) == 1 else f"{len(formats)} inputs"
    return f"{text}, {inputs} as {names} ({format_bytes(stored)})"


def _saved_text(part: Part, option: Option) -> str:
    results = values_of(part.jaxpr).sites.values()
    formats: dict[tuple[int, ...], StoredType] = dict(option.stored)
    sites = [site for site in results if site.address in (option.saved or ())]
    if option.inner:
        return f"keep nothing, computed again in {len(option.inner)} parts"
    if not sites:
        return "keep nothing"

    def bytes_of(site: Site) -> int:
        format, aval = formats.get(site.address), site.value.type
        return device_bytes(aval) if format is None else stored_bytes(aval, format)

    kept_bytes = sum(map(bytes_of, sites))
    # Means, and other values of a sixteenth of the largest one's size and below, tell nothing.
    least = max(device_bytes(site.value.type) for site in results) / 16
    sites = [site for site in sites if device_bytes(site.value.type) > least]
    if not sites:
        return f"keep small values ({format_bytes(kept_bytes)})"
    names = []
    for site in sites:
        format = f" as {formats[site.address]}" if site.address in formats else ""
        names.append(f"{', '.join(sorted(site.value.names)) or site.eqn.primitive.name}{format}")
    counts = {n: names.count(n) for n in dict.fromkeys(names)}
    text = ", ".join(n if c == 1 else f"{c} {n}" for n, c in counts.items())
    return f"keep {text} ({format_bytes(kept_bytes)})"
