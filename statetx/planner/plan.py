"""`plan`: choose what a program keeps, recomputes or offloads so that it fits a budget of bytes."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import math
import numbers
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.extend.core as jex_core
import numpy as np

from .. import _compat, _keep, _schedule
from .._compat import Jaxpr, Literal
from .._cost import Cost, Program, count, flops
from .._errors import PlanError
from .._jaxpr import Body
from .._lift import name_of, short_name
from .._policy import FAMILIES, Rewriting, parse_bytes
from .._strategy import Lengths, Slots, Strategy
from .._targets import resolve_argnums
from .._text import format_bytes, format_table, suggestion
from .._tree import is_array, is_float, num_bytes, partition
from ..residuals._show import format_flops, short_path, short_type
from ..residuals._trace import user_line
from ..transforms.abstract import make_jaxpr
from ..transforms.remat import Remat
from ._analysis import Option, type_of
from ._layout import Layout, marks_of, rewrite
from ._parts import Part, flatten, opened, split
from ._search import Candidate, Search
from .machine import cost_model


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


class Plan(Rewriting):
    """What to keep of a program, made by `plan`; a policy for `remat`.

    Prints as a table. Applies to any function whose equations are those it was made for; else it says what differs.

    Attributes:
        name: of the function.
        budget_bytes: what was asked for.
        predicted_bytes: temporary memory by the model, corrected by all other programs that were compiled.
        foretold_bytes: the same as it was before this one was compiled, corrected by those compiled before it.
        temp_bytes: temporary memory of the compiled program with its gradient.
        unplanned_bytes: the same without rematerialisation.
        flops, unplanned_flops: operations of both programs.
        rows: a `PlanRow` for every value of the program; those kept first, the largest of them first.
        stock: the name of the stock policy that it turned out to be; "" if it is none.
        complete: whether the search ended before its time limit.
    """

    def __init__(self, fields: dict[str, Any]):
        self._fields = fields
        self.name: str = fields["name"]
        self.budget_bytes: int = fields["budget_bytes"]
        self.predicted_bytes: int = fields["predicted_bytes"]
        self.foretold_bytes: int = fields["foretold_bytes"]
        self.temp_bytes: int = fields["temp_bytes"]
        self.unplanned_bytes: int = fields["unplanned_bytes"]
        self.flops: int = fields["flops"]
        self.unplanned_flops: int = fields["unplanned_flops"]
        self.stock: str = fields["stock"]
        self.complete: bool = fields["complete"]
        self.rows = tuple(PlanRow(**row) for row in fields["rows"])
        self._is_step: bool = fields["is_step"]
        self._digest = hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plan) and self._digest == other._digest

    def __hash__(self) -> int:
        return hash(self._digest)

    @property
    def extra_flops(self) -> float:
        """Operations added, as a part of those without rematerialisation."""
        return (self.flops - self.unplanned_flops) / max(self.unplanned_flops, 1)

    # -- use -------------------------------------------------------------------------------------------------------

    def apply(self, fun: Callable) -> Callable:
        """The function, planned: to be differentiated if the plan was made for such a one, else to be called.

        Args:
            fun: a function like the one that the plan was made for; its structure is compared whenever it is traced.

        Raises:
            PlanError: when it is called, if it is another function; the first difference is named.
        """
        if not self._is_step:
            return Remat(fun, policy=self)

        @functools.wraps(fun)
        def step(*args: Any, **kwargs: Any) -> Any:
            with _keep.override.differentiated(lambda loss: Remat(loss, policy=self)):
                return fun(*args, **kwargs)

        return step

    def rewrite(self, body: Body, name: str) -> Callable:
        program = flatten(body.jaxpr)
        self._check(fingerprint(program), name)
        if self._fields["opened"]:
            program, _ = opened(program)
        parts = split(program, self._fields["cuts"])
        options = [_option(self._fields["treatments"][i]) for i in self._fields["parts"]]
        planned = Body(rewrite(program, parts, options), [])
        return lambda operands, *args: planned(operands, *args)

    def _check(self, found: Sequence[str], name: str) -> None:
        expected = self._fields["equations"]
        for n, (mine, theirs) in enumerate(zip(expected, found, strict=False)):
            if mine != theirs:
                raise PlanError(
                    f"The plan for {self.name} does not fit {name}: equation {n} of {len(expected)} is\n  {theirs}\n"
                    f"and was, when the plan was made,\n  {mine}\nFix: make a plan for this program."
                )
        if len(expected) != len(found):
            raise PlanError(
                f"The plan for {self.name} does not fit {name}: it has {len(found)} equations, and had {len(expected)} "
                f"when the plan was made.\nFix: make a plan for this program."
            )

    # -- storage ---------------------------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike) -> None:
        """Write the plan to a file, as JSON."""
        with open(path, "w") as file:
            json.dump(self._fields, file, indent=1)

    @classmethod
    def load(cls, path: str | os.PathLike) -> Plan:
        """Read a plan from a file.

        Raises:
            PlanError: it is no plan, or one of another version.
        """
        try:
            with open(path) as file:
                fields = json.load(file)
            if fields["version"] != _VERSION:
                raise PlanError(
                    f"{path}: a plan of version {fields['version']}; this is version {_VERSION}. Make it anew."
                )
            return cls(fields)
        except (ValueError, KeyError, TypeError) as e:
            if isinstance(e, PlanError):
                raise
            raise PlanError(f"{path} is no plan: {e!r}.") from e

    # -- show ------------------------------------------------------------------------------------------------------

    def curve(self) -> list[tuple[int, float]]:
        """What less memory costs: pairs of predicted bytes and added operations, as a part of those without a plan.

        Each is the best choice of the model for its bytes; fewer bytes never cost less.
        """
        return [(int(b), float(x)) for b, x in self._fields["curve"]]

    def measured(self) -> list[tuple[str, int, float]]:
        """The programs that were compiled: what each was, its temporary bytes, and added operations as in `curve`."""
        return [(str(n), int(b), float(x)) for n, b, x in self._fields["measured"]]

    def plot(self, path: str | os.PathLike | None = None) -> Any:
        """Draw added operations over memory: the curve, what was compiled, the budget. Needs matplotlib.

        Args:
            path: where to write the picture; shown by the caller if not given.

        Returns:
            The matplotlib figure.
        """
        from matplotlib.figure import Figure

        figure = Figure(figsize=(7, 4.2), layout="constrained")
        axes = figure.subplots()
        mib = 2.0**20
        curve = self.curve()
        axes.plot([b / mib for b, _ in curve], [100 * x for _, x in curve], color="#0072b2", label="model", zorder=1)
        plans = [(b, x) for n, b, x in self.measured() if n == "plan"]
        axes.scatter(
            [b / mib for b, _ in plans], [100 * x for _, x in plans], s=22, color="#0072b2", label="plans, compiled"
        )
        for n, b, x in self.measured():
            if n != "plan":
                axes.scatter([b / mib], [100 * x], marker="D", s=30, color="#e69f00")
                axes.annotate(n, (b / mib, 100 * x), textcoords="offset points", xytext=(6, 5), fontsize=8)
        axes.scatter(
            [self.temp_bytes / mib],
            [100 * self.extra_flops],
            s=90,
            facecolors="none",
            edgecolors="#d55e00",
            linewidths=2,
        )
        axes.annotate(
            "this plan",
            (self.temp_bytes / mib, 100 * self.extra_flops),
            textcoords="offset points",
            xytext=(8, 8),
            color="#d55e00",
        )
        axes.axvline(self.budget_bytes / mib, color="#999999", linestyle="--", linewidth=1, label="budget")
        axes.set_xlabel("temporary memory, MiB")
        axes.set_ylabel("added operations, %")
        axes.set_title(f"{self.name}: what memory costs", loc="left", fontsize=11)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_ylim(bottom=-1)
        axes.legend(frameon=False, fontsize=8)
        if path is not None:
            figure.savefig(path, dpi=150)
        return figure

    def __str__(self) -> str:
        lines = [
            f"{'' if self._is_step else 'gradient of '}{self.name}: {format_bytes(self.temp_bytes)} of temporary memory (predicted {format_bytes(self.predicted_bytes)}, "
            f"budget {format_bytes(self.budget_bytes)}, without a plan {format_bytes(self.unplanned_bytes)}), "
            f"{100 * self.extra_flops:+.1f}% operations"
        ]
        planned = [row for row in self.rows if row.decision != "as it is"]
        shown = [row for row in planned if 200 * row.bytes * row.times >= self.unplanned_bytes][:_SHOWN]
        columns = ["value", "owner", "times", "bytes", "decision", "cost"]
        unit = _format_seconds if self._fields["objective"] == "time" else lambda x: format_flops(int(x))
        cells = [[r.value, r.owner, str(r.times), format_bytes(r.bytes), r.decision, unit(r.price)] for r in shown]
        if cells:
            lines.append(format_table(columns, cells, right=["times", "bytes", "cost"]))
        if len(planned) > len(shown):
            lines.append(f"and {len(planned) - len(shown)} more")
        for text in self._fields["loops"]:
            lines.append(text)
        if self.stock:
            lines.append(
                f"This is the stock policy {self.stock!r}." if self.stock != "no remat" else "It fits as it is."
            )
        if not self.complete:
            lines.append("The time limit ended the search; this is the best plan so far.")
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"Plan({self.name}, {format_bytes(self.temp_bytes)} of {format_bytes(self.budget_bytes)})"


_SHOWN = 16
_VERSION = 1


def _format_seconds(x: float) -> str:
    return f"{1e6 * x:.3g} us"


class Fit(Rewriting):
    """``policy="fit:2GiB"``: make a plan for each function that it is used on, for the gradient of all its float inputs.

    Args:
        budget: temporary bytes of that function's gradient, compiled on its own.
        objective, offload, time_limit: as in `plan`.
    """

    def __init__(
        self,
        budget: int | float | str,
        *,
        objective: str = "flops",
        offload: bool = False,
        time_limit: float | None = None,
    ):
        self.budget = _read_budget(budget)
        self._options = (objective, offload, time_limit)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Fit) and (self.budget, self._options) == (other.budget, other._options)

    def __hash__(self) -> int:
        return hash((self.budget, self._options))

    def __repr__(self) -> str:
        return f"fit:{self.budget if isinstance(self.budget, float) else format_bytes(self.budget).replace(' ', '')}"

    def rewrite(self, body: Body, name: str) -> Callable:
        floats = [i for i, v in enumerate(body.jaxpr.invars) if is_float(v.aval)]
        objective, offload, time_limit = self._options
        search = _search(body.jaxpr, floats, objective, offload, time_limit)
        found = _fit(search, self.budget, name)
        planned = Body(found.layout.rewrite(found.options), [])
        return lambda operands, *args: planned(operands, *args)


FAMILIES["fit"] = Fit


def plan(
    fun: Callable[..., Any],
    *args: Any,
    budget: int | float | str,
    objective: str = "flops",
    offload: bool = False,
    argnums: int | Sequence[int] | None = None,
    time_limit: float | None = None,
    progress: bool = False,
    **kwargs: Any,
) -> Plan:
    """Choose what a function keeps for its backward pass so that its gradient fits into some memory.

    The function is traced once; no state changes and nothing is computed. Its equations are cut into regions where few
    bytes cross (or where `remat` marks them), the choices of each region are found by integer programs, and the best
    combination by dynamic programming, with what is in use while each region is run backwards counted in. Candidates are
    compiled until one keeps the budget and the next better one would not, a handful at most. A scan is planned with its body: what each step
    keeps, together with the levels or slots of the loop. The stock policies are candidates, too. Nothing random is drawn
    anew, and each state is written once, as in `remat`.

    Args:
        fun: a function to be differentiated, such as a loss; or, where `argnums` is not given, a training step, which calls
            `statetx.grad` (or ``value_and_grad``, ``vjp``; not JAX's) itself. It may read and write states. Arguments that are
            no arrays are taken as they are, as in `remat`.
        *args, **kwargs: what to call it with; ``jax.ShapeDtypeStruct`` stands for an array.
        budget: temporary bytes of the compiled program beyond its arguments and outputs: a number, ``"2GiB"``, or, as
            a float up to 1, a fraction of what it takes without a plan.
        objective: what to add least of: ``"flops"``, or ``"time"`` by what `calibrate` measured of this machine.
        offload: whether values may be stored in the host's memory, where the backend has one.
        argnums: of a loss, the arguments to differentiate; all if not given. Float states are differentiated always.
        time_limit: seconds from now, after which the best plan so far is returned.
        progress: whether to show what is done (with rich).

    Returns:
        `Plan`. Use it as ``plan.apply(fun)`` or ``remat(fun, policy=plan)``.

    Raises:
        PlanError: no candidate keeps the budget; ``smallest_bytes`` is the least that was reached.

    Source:
        Jain et al., Checkmate: Breaking the memory wall with optimal tensor rematerialization (MLSys 2020), for
        the integer program; the memory model of `_analysis` for the rest.

    Example:
        >>> import jax, jax.numpy as jnp, statetx
        >>> def loss(ws, x):
        ...     for w in ws:
        ...         x = x + jnp.sin(jnp.tanh(x @ w))
        ...     return (x**2).mean()
        >>> ws, x = [jnp.ones((64, 64)) / 64] * 8, jnp.ones((512, 64))
        >>> plan = statetx.plan(loss, ws, x, budget=0.6, argnums=0)
        >>> plan.temp_bytes <= 0.6 * plan.unplanned_bytes
        True
        >>> grads = jax.jit(jax.grad(plan.apply(loss)))(ws, x)
    """
    options = {"objective": objective, "offload": offload, "argnums": argnums, "time_limit": time_limit}
    return Planner(fun, *args, progress=progress, **options, **kwargs).plan(budget)


class Planner:
    """Plans for one program and many budgets, which share what is compiled; `plan` says what the arguments are.

    Example:
        >>> import jax.numpy as jnp, statetx
        >>> def loss(ws, x):
        ...     for w in ws:
        ...         x = x + jnp.sin(jnp.tanh(x @ w))
        ...     return (x**2).mean()
        >>> planner = statetx.planner.Planner(loss, [jnp.ones((64, 64)) / 64] * 8, jnp.ones((512, 64)), argnums=0)
        >>> least, most = planner.ends()
        >>> plans = [planner.plan(budget) for budget in (most, 0.7, 0.5)]
        >>> [plan.temp_bytes <= plan.budget_bytes for plan in plans]
        [True, True, True]
    """

    def __init__(
        self,
        fun: Callable[..., Any],
        *args: Any,
        objective: str = "flops",
        offload: bool = False,
        argnums: int | Sequence[int] | None = None,
        time_limit: float | None = None,
        progress: bool = False,
        **kwargs: Any,
    ):
        if objective not in ("flops", "time"):
            raise ValueError(
                f"objective must be 'flops' or 'time', got {objective!r}.{suggestion(objective, ['flops', 'time'])}"
            )
        self.name = short_name(name_of(fun))
        self._objective = objective
        self._progress = progress
        self._captured = _capture(fun, args, kwargs, argnums)
        compile_ = self._captured.compile_step if self._captured.is_step else None
        report = lambda text: self._report(text)  # noqa: E731
        self._report: Callable[[str], None] = lambda text: None
        with self._shown():
            captured = self._captured
            self._search = _search(captured.jaxpr, captured.chosen, objective, offload, time_limit, report, compile_)

    def ends(self) -> tuple[int, int]:
        """Temporary bytes: the least that was reached so far, and those without a plan."""
        return self._search.ends()

    def plan(self, budget: int | float | str) -> Plan:
        """The best plan for a budget."""
        wanted = _read_budget(budget)
        with self._shown():
            found = _fit(self._search, wanted, self.name)
        return self._plan(found, _budget_bytes(self._search, wanted))

    def best(self, budget: int) -> Plan | None:
        """The best of the plans that were compiled so far, for whatever budgets; None if none of them keeps this one."""
        found = self._search.best(budget)
        return None if found is None else self._plan(found, int(budget))

    def _plan(self, found: Candidate, budget: int) -> Plan:
        return Plan(_fields(self._search, found, self.name, budget, self._objective, self._captured.is_step))

    @contextlib.contextmanager
    def _shown(self) -> Iterator[None]:
        with _shown(self._progress, self.name) as report:
            self._report = report
            yield
        self._report = lambda text: None


def _read_budget(given: Any) -> int | float:
    """Bytes, or a fraction."""
    budget: Any = given
    if isinstance(given, str):
        try:
            budget = (
                float(given)
                if "." in given and given.strip().replace(".", "").isdigit()
                else parse_bytes(given.strip())
            )
        except ValueError:
            budget = None
    is_number = isinstance(budget, numbers.Real) and not isinstance(budget, bool)
    value = float(budget) if is_number else math.nan
    if not math.isfinite(value) or value <= 0 or (value > 1 and value != int(value)):
        raise PlanError(
            f"budget={given!r} is no number of bytes, such as 2**30 or '2GiB', and no fraction of what it takes without a plan, "
            f"such as 0.5."
        )
    is_fraction = value < 1 or (value == 1 and not isinstance(budget, numbers.Integral))
    return value if is_fraction else int(value)


def _budget_bytes(search: Search, budget: int | float) -> int:
    return budget if isinstance(budget, int) else int(budget * search.ends()[1])


def _search(
    jaxpr: Jaxpr,
    chosen: Sequence[int],
    objective: str,
    offload: bool,
    time_limit: float | None,
    report: Callable[[str], None] = lambda text: None,
    compile_: Callable[[Jaxpr], Cost] | None = None,
) -> Search:
    per_byte = None
    price: Callable[[Any], float] = flops
    if objective == "time":
        model = cost_model()
        price = model.seconds
    if offload and _compat.HOST_MEMORY in _compat.memory_spaces():
        per_byte = 1 / cost_model().host_bytes_per_second if objective == "time" else 0.0
    options = {"price": price, "offload": per_byte, "time_limit": time_limit, "report": report, "compile_": compile_}
    return Search(jaxpr, chosen, **options)


def _fit(search: Search, budget: int | float, name: str) -> Candidate:
    bytes_ = _budget_bytes(search, budget)
    found = search.fit(bytes_)
    if found is None:
        least = search.smallest().temp_bytes
        late = ", when the time limit ended the search" if search.is_late() else ""
        raise PlanError(
            f"No plan for {name} keeps the budget of {format_bytes(bytes_)}: the smallest found needs "
            f"{format_bytes(least)}, {format_bytes(least - bytes_)} more{late}.\nFix: allow that much; or rematerialise smaller "
            f"parts, make the batch smaller, or let the loop's steps compute less.",
            smallest_bytes=least,
        )
    return found


@contextlib.contextmanager
def _shown(progress: bool, name: str) -> Iterator[Callable[[str], None]]:
    if not progress:
        yield lambda text: None
        return
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    with Progress(SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()) as bar:
        task = bar.add_task(f"plan {name}")
        yield lambda text: bar.update(task, description=f"plan {name}: {text}")


# -- what is planned -------------------------------------------------------------------------------------------------


class _Capture(Rewriting):
    """Takes down the program of the function that it is used on, and lets it be."""

    def __init__(self) -> None:
        self.bodies: list[
            tuple[Body, list[int], list[int]]
        ] = []  # with what is differentiated, and what is no constant

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)

    def __repr__(self) -> str:
        return "plan"

    def rewrite(self, body: Body, name: str) -> Callable:
        def run(operands: Sequence[Any], *args: Any) -> list[Any]:
            floats = [(i, x) for i, x in enumerate((*operands, *args)) if is_float(x)]
            moving = [i for i, x in floats if _compat.is_differentiated(x)]
            self.bodies.append((body, moving, [i for i, x in floats if isinstance(x, _compat.Tracer)]))
            return body(operands, *args)

        return run


@dataclasses.dataclass(frozen=True)
class _Captured:
    jaxpr: Jaxpr
    chosen: list[int]
    is_step: bool
    compile_step: Callable[[Jaxpr], Cost] | None


def _capture(fun: Callable, args: tuple, kwargs: dict[str, Any], argnums: int | Sequence[int] | None) -> _Captured:
    whole, inner = _Capture(), _Capture()
    nums = None if argnums is None else resolve_argnums(argnums, len(args), fun)[0]

    @functools.wraps(fun)
    def traced(*args: Any, **kwargs: Any) -> Any:
        with _keep.override.differentiated(lambda loss: Remat(loss, policy=inner)):
            return fun(*args, **kwargs)

    # Whether it differentiates anything itself is seen while it is traced, and it is traced once.
    planned = Remat(fun if nums is not None else traced, policy=whole)
    _jaxpr_of(planned, args, kwargs)
    if inner.bodies:
        if len({tuple(fingerprint(flatten(body.jaxpr))) for body, _, _ in inner.bodies}) > 1:
            raise PlanError(
                f"{name_of(fun)} differentiates more than one function. Fix: make a plan for each of them, and use it as "
                f"remat(loss, policy=plan)."
            )
        body, moving, _ = inner.bodies[0]
        return _Captured(body.jaxpr, moving, True, functools.partial(_compile_step, fun, args, kwargs))
    ((body, _, variable),) = whole.bodies
    is_chosen = []
    for n, part in enumerate((*args, *kwargs.values())):
        is_chosen += [nums is None or n in nums] * len(partition(part, _is_traced)[0])
    num_operands = len(body.jaxpr.invars) - len(is_chosen)
    chosen = [i for i in variable if i < num_operands or is_chosen[i - num_operands]]
    if not chosen or not any(is_float(v.aval) for v in body.jaxpr.outvars):
        raise PlanError(
            f"{name_of(fun)} has no float output, or no float argument or state, so there is nothing to differentiate; and it "
            f"differentiates nothing itself by statetx.grad."
        )
    return _Captured(body.jaxpr, chosen, False, None)


def _is_traced(x: Any) -> bool:
    """Whether `remat` traces an argument."""
    return is_array(x) or isinstance(x, jax.ShapeDtypeStruct)


def _jaxpr_of(fun: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """The program of a call; arrays and all that states hold are its inputs, other arguments are as they are."""
    arrays, others = partition((args, kwargs), _is_traced)

    @functools.wraps(fun)
    def call(*arrays: Any) -> Any:
        call_args, call_kwargs = others.combine(arrays)
        return fun(*call_args, **call_kwargs)

    return make_jaxpr(call)(*arrays)


class _Instead(Rewriting):
    """Has a program that is there already in the place of the function."""

    def __init__(self, jaxpr: Jaxpr):
        self._planned = Body(jaxpr, [])

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)

    def rewrite(self, body: Body, name: str) -> Callable:
        return lambda operands, *args: self._planned(operands, *args)


def _compile_step(fun: Callable, args: tuple, kwargs: dict[str, Any], jaxpr: Jaxpr) -> Cost:
    """What a training step costs whose loss is this program."""
    instead = _Instead(jaxpr)

    def step(*args: Any, **kwargs: Any) -> Any:
        with _keep.override.differentiated(lambda loss: Remat(loss, policy=instead)):
            return fun(*args, **kwargs)

    program = _jaxpr_of(step, args, kwargs)
    return Program(jex_core.jaxpr_as_fun(program), [type_of(aval) for aval in program.in_avals]).cost


# -- fields ----------------------------------------------------------------------------------------------------------


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
    if _compat.is_jaxpr(x):
        lines = "\n".join(fingerprint(flatten(_compat.open_jaxpr(x)[0])))
        return hashlib.sha256(lines.encode()).hexdigest()[:12]
    if isinstance(x, (tuple, list)):
        return f"({','.join(map(_param, x))})"
    if callable(x) and not isinstance(x, type):
        return getattr(x, "__name__", type(x).__name__)
    return str(x)


def _fields(search: Search, found: Candidate, name: str, budget: int, objective: str, is_step: bool) -> dict[str, Any]:
    layout = found.layout
    treatments: list[dict[str, Any]] = []
    numbers = []
    for option in found.options:
        written = _written(option)
        if written not in treatments:
            treatments.append(written)
        numbers.append(treatments.index(written))
    unplanned = search.candidates[0].cost
    others = [c for c in search.candidates if c is not found]
    return {
        "version": _VERSION,
        "name": name,
        "objective": objective,
        "is_step": is_step,
        "budget_bytes": budget,
        "predicted_bytes": int(search.predict(found.peak, others) if others else found.peak),
        "foretold_bytes": int(found.predicted),
        "temp_bytes": found.temp_bytes,
        "unplanned_bytes": unplanned.temp_bytes,
        "flops": unplanned.flops + int(found.added)
        if objective == "flops"
        else found.cost.flops + _hidden(layout, found),
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
            hidden += _schedule.num_evaluations(length, option.loop.num) * count(part.jaxpr)
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


def _option(written: dict[str, Any]) -> Option:
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
    for site in _keep.survey(part.jaxpr):
        if len(site.address) != 2:
            continue
        mark = marks.get(site.address)
        decision = (
            "as it is"
            if not is_planned
            else "recompute"
            if mark is None
            else "offload"
            if "offload" in mark
            else "keep"
        )
        file, line, function = user_line(site.eqn)
        named = ", ".join(sorted(site.value.names))
        kind = short_type(str(site.value.type.dtype), tuple(site.value.type.shape))
        owner = f"{short_path(file)}:{line} ({function})" if file else ""
        value = f"{named or site.eqn.primitive.name} {kind}"
        yield PlanRow(value, owner, times * length, num_bytes(site.value.type), decision, float(price(site.eqn)))


def _loops(layout: Layout, options: Sequence[Option]) -> Iterator[str]:
    for part, option in zip(layout.parts, options, strict=True):
        if part.eqn is not None and option.loop is not None:
            file, line, _ = user_line(part.eqn)
            where = f" at {short_path(file)}:{line}" if file else ""
            yield f"The loop of {part.eqn.params['length']} steps{where} is stored by {option.loop!r}."
