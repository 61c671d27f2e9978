"""`plan`: choose which values a program saves, recomputes or offloads, so that it fits a budget of bytes."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ParamSpec, TypeVar, cast

from .. import _jax
from .._equations.structure import Body
from .._errors import PlanError
from .._extras import require
from .._lift.wrapper import name_of, short_name
from .._remat.override import override
from .._remat.rewriter import Rewriter
from .._tables import Cell, Column, Table, Tabular
from .._text import format_bytes, format_flops, suggestion
from .._typing import public
from ..residuals._show import see_profile
from ..residuals.report import BASELINE
from ..transforms.remat import Remat
from ._budget import budget_bytes, fit_budget, read_budget, start_search
from ._capture import capture
from ._layout import rewrite
from ._parts import flatten, inline_remat, split
from ._record import VERSION, PlanRow, fields_of, fingerprint, option_of
from ._search import Candidate

P = ParamSpec("P")
R = TypeVar("R")


@public
class Plan(Tabular, Rewriter):
    """The values of a program to save, offload or recompute. Made by `plan`; a policy for `remat`.

    Prints as a table: as text, in colors with ``rich.print``, as HTML in a notebook. Applies to any function with the same equations; for others the error names the first difference.

    Attributes:
        name: the function's name.
        budget_bytes: the requested budget.
        predicted_bytes: temporary memory by the model, corrected by all other compiled programs.
        initial_prediction_bytes: temporary memory by the model, corrected by the programs compiled before this one.
        temp_bytes: temporary memory of the compiled program with its gradient.
        unplanned_bytes: temporary memory of the baseline (no rematerialization), to within a few hundred bytes.
        flops, unplanned_flops: operations of the planned program and of the baseline.
        rows: a `PlanRow` for every value of the program; saved values first, the largest first.
        stock: the name of the stock policy that equals this plan, "no remat" for the baseline, else "".
        complete: whether the search ended before its time limit. The integer program of each region has a limit of its own, a few
            seconds, which this does not show; where it is met, the plan may cost more than it must.
        num_equations: number of equations of the planned program; a loop counts as one.
    """

    def __init__(self, fields: dict[str, Any]):
        self._fields = fields
        self.name: str = fields["name"]
        self.budget_bytes: int = fields["budget_bytes"]
        self.predicted_bytes: int = fields["predicted_bytes"]
        self.initial_prediction_bytes: int = fields["foretold_bytes"]
        self.temp_bytes: int = fields["temp_bytes"]
        self.unplanned_bytes: int = fields["unplanned_bytes"]
        self.flops: int = fields["flops"]
        self.unplanned_flops: int = fields["unplanned_flops"]
        self.stock: str = fields["stock"]
        self.complete: bool = fields["complete"]
        self.num_equations = len(fields["equations"])
        self.rows = tuple(PlanRow(**row) for row in fields["rows"])
        self._is_step: bool = fields["is_step"]
        self._digest = hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plan) and self._digest == other._digest

    def __hash__(self) -> int:
        return hash(self._digest)

    @property
    def extra_flops(self) -> float:
        """Added operations relative to the baseline."""
        return (self.flops - self.unplanned_flops) / max(self.unplanned_flops, 1)

    # -- use -------------------------------------------------------------------------------------------------------

    def apply(self, fun: Callable[P, R]) -> Callable[P, R]:
        """Apply the plan to a function. Differentiate the result of a planned loss; call the result of a planned training step.

        Args:
            fun: a function with the equations that the plan was made for. They are compared whenever it is traced.

        Raises:
            PlanError: on a call, if the equations differ; it names the first difference.
        """
        if not self._is_step:
            return cast(Any, Remat(fun, policy=self))

        # A step differentiates a loss that it may define inside itself, so the loss is replaced when `statetx.grad` gets it.
        @functools.wraps(fun)
        def step(*args: P.args, **kwargs: P.kwargs) -> R:
            with override.wrap_differentiated(lambda loss: Remat(loss, policy=self)):
                return fun(*args, **kwargs)

        return step

    def rewrite(self, body: Body, name: str, num_out: int) -> Callable:
        # Cuts and decisions count equations, so the program must be flattened and cut exactly as it was for the plan.
        program = flatten(body.jaxpr)
        self._check(fingerprint(program), name)
        if self._fields["opened"]:
            program, _ = inline_remat(program)
        parts = split(program, self._fields["cuts"])

        # Parts with equal decisions share a number; the cache of `_layout.rewrite` gives them one function.
        options = [option_of(self._fields["treatments"][i]) for i in self._fields["parts"]]
        planned = Body(rewrite(program, parts, options), [])
        return lambda operands, *args: planned(operands, *args)

    def _check(self, actual: Sequence[str], name: str) -> None:
        expected = self._fields["equations"]
        for n, (expected_line, line) in enumerate(zip(expected, actual, strict=False)):
            if expected_line != line:
                raise PlanError(
                    f"The plan for {self.name} does not fit {name}: equation {n} of {len(expected)} is\n  {line}\n"
                    f"and was, when the plan was made,\n  {expected_line}\nFix: make a plan for this program."
                )
        if len(expected) != len(actual):
            raise PlanError(
                f"The plan for {self.name} does not fit {name}: it has {len(actual)} equations, and had {len(expected)} "
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
            PlanError: it is not a plan, or one of another version.
        """
        try:
            with open(path) as file:
                fields = json.load(file)

            # First the version: fields of another version may be missing, or mean something else.
            if fields["version"] != VERSION:
                raise PlanError(
                    f"{path}: a plan of version {fields['version']}; this is version {VERSION}. Make it again."
                )
            return cls(fields)
        except (ValueError, KeyError, TypeError) as e:
            if isinstance(e, PlanError):
                raise
            raise PlanError(f"{path} is not a plan: {e!r}.") from e

    # -- show ------------------------------------------------------------------------------------------------------

    def curve(self) -> list[tuple[int, float]]:
        """The model's trade-off: points (predicted bytes, added operations relative to the baseline).

        Each is the best choice of the model for its bytes. Fewer bytes never cost less.
        """
        return [(int(b), float(x)) for b, x in self._fields["curve"]]

    def measured(self) -> list[tuple[str, int, float]]:
        """The compiled programs: name ("plan", "no remat" or a stock policy), temporary bytes, and added operations as in `curve`."""
        return [(str(n), int(b), float(x)) for n, b, x in self._fields["measured"]]

    def plot(self, path: str | os.PathLike | None = None) -> Any:
        """Draw added operations over memory: the curve, the compiled programs, the budget. Needs matplotlib.

        Args:
            path: the image file to write; without it the caller shows the figure.

        Returns:
            The matplotlib figure.
        """
        require("matplotlib.figure", "plot")
        from matplotlib.figure import Figure

        # Not by pyplot, which holds every figure until it is closed.
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
        axes.set_title(f"{self.name}: operations over memory", loc="left", fontsize=11)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_ylim(bottom=-1)
        axes.legend(frameon=False, fontsize=8)
        if path is not None:
            figure.savefig(path, dpi=150)
        return figure

    def _table(self) -> Table:
        title = (
            f"{'' if self._is_step else 'gradient of '}{self.name}: {format_bytes(self.temp_bytes)} of temporary memory "
            f"(predicted {format_bytes(self.predicted_bytes)}, budget {format_bytes(self.budget_bytes)}, "
            f"without a plan {format_bytes(self.unplanned_bytes)}), {100 * self.extra_flops:+.1f}% operations"
        )

        # Rows that differ in their number only, from parts of different structure, become one.
        totals: dict[PlanRow, int] = {}
        for row in self.rows:
            if row.decision != "unchanged":
                key = dataclasses.replace(row, times=0)
                totals[key] = totals.get(key, 0) + row.times
        planned = [dataclasses.replace(row, times=times) for row, times in totals.items()]

        # Rows below half a percent of the baseline's memory tell nothing.
        large = [row for row in planned if 200 * row.bytes * row.times >= self.unplanned_bytes][:_MAX_ROWS]
        unit = _format_seconds if self._fields["objective"] == "time" else lambda x: format_flops(int(x))
        most = max((r.bytes * r.times for r in large), default=1)
        rows = [
            [
                Cell(r.value),
                Cell(r.owner),
                Cell(str(r.times)),
                Cell(format_bytes(r.bytes), _COLORS.get(r.decision, ""), share=r.bytes * r.times / max(most, 1)),
                Cell(r.decision, _COLORS.get(r.decision, "")),
                Cell(unit(r.price)),
            ]
            for r in large
        ]

        notes = [(f"and {len(planned) - len(large)} more", "")] if len(planned) > len(large) else []
        notes += [(text, "") for text in self._fields["loops"]]
        if self.stock:
            is_stock = self.stock != BASELINE
            notes.append((f"This is the stock policy {self.stock!r}." if is_stock else "It fits unchanged.", ""))
        if not self.complete:
            notes.append(("The time limit ended the search; this is the best plan so far.", ""))
        return Table(title, _COLUMNS, rows, [*notes, see_profile("plan.apply(fun)")])

    def __repr__(self) -> str:
        return f"Plan({self.name}, {format_bytes(self.temp_bytes)} of {format_bytes(self.budget_bytes)})"


_MAX_ROWS = 16  # of the printed table
_COLUMNS = (
    Column("value", code=True),
    Column("owner", rank=1),
    Column("times", "right", rank=1),
    Column("bytes", "right"),
    Column("decision", style="bold"),
    Column("cost", "right", rank=2),
)
_COLORS = {"keep": "green", "offload": "cyan", "recompute": "yellow"}


def _format_seconds(x: float) -> str:
    return f"{1e6 * x:.3g} us"


@_jax.api_boundary
def plan(
    fun: Callable[..., Any],
    /,
    *args: Any,
    budget: int | float | str,
    objective: str = "flops",
    offload: bool = False,
    argnums: int | Sequence[int] | None = None,
    time_limit: float | None = None,
    progress: bool = False,
    **kwargs: Any,
) -> Plan:
    """Choose the values that a function saves for its backward pass, so that its gradient fits a budget of memory.

    The function is traced once; no state changes and nothing is computed. Its equations are cut into regions where few
    bytes cross (or where `remat` marks them). Integer programs find the options of each region, and dynamic programming
    their best combination, including the bytes in use during each region's backward pass. Candidates are compiled until
    one keeps the budget and the next better one would not, a handful at most. A scan is planned with its body: the saved
    values of each step, together with the levels or slots of the loop. The stock policies are candidates too. Random
    values are not drawn again, and each state is written once, as in `remat`.

    Args:
        fun: a function to differentiate, such as a loss; or, without `argnums`, a training step that calls `statetx.grad`
            (or ``value_and_grad``, ``vjp``; not JAX's) itself. It may read and write states. Arguments other than arrays
            are static, as in `remat`.
        *args, **kwargs: example arguments; ``jax.ShapeDtypeStruct`` can replace an array.
        budget: temporary bytes of the compiled program beyond its arguments and outputs: a number, ``"2GiB"``, or, as
            a float up to 1, a fraction of the baseline's.
        objective: the cost to minimize: ``"flops"``, or ``"time"`` by the rates that `calibrate` measured.
        offload: whether values may be stored in host memory, where the backend has it.
        argnums: the arguments of a loss to differentiate; all by default. Float states are always differentiated.
        time_limit: seconds; after that the best plan so far is returned.
        progress: whether to show progress (with rich).

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
    read_budget(budget)  # a mistake shows before anything is compiled
    options = {"objective": objective, "offload": offload, "argnums": argnums, "time_limit": time_limit}
    return Planner(fun, *args, progress=progress, **options, **kwargs).plan(budget)


class Planner:
    """Plans for one program and many budgets, which share compiled candidates. Arguments as in `plan`.

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
        /,
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
        self._progress = _Progress(self.name) if progress else contextlib.nullcontext(lambda text: None)
        self._captured = capture(fun, args, kwargs, argnums)

        # The search outlives each progress bar: it reports to the current one.
        report = lambda text: self._report(text)  # noqa: E731
        self._report: Callable[[str], None] = lambda text: None
        with self._context():
            captured = self._captured
            options = (objective, offload, time_limit, report, captured.step_with, captured.context)
            self._search = start_search(captured.jaxpr, captured.diff_indices, captured.num_out, *options)

    def ends(self) -> tuple[int, int]:
        """The least temporary bytes reached so far, and the baseline's."""
        return self._search.ends()

    def plan(self, budget: int | float | str) -> Plan:
        """The best plan for a budget."""
        amount = read_budget(budget)
        with self._context():
            candidate = fit_budget(self._search, amount, self.name)
        return self._plan(candidate, budget_bytes(self._search, amount))

    def best(self, budget: int) -> Plan | None:
        """The best plan compiled so far, for any budget, that keeps this one; None if none does."""
        candidate = self._search.best(budget)
        return None if candidate is None else self._plan(candidate, int(budget))

    def _plan(self, candidate: Candidate, budget: int) -> Plan:
        is_step = self._captured.is_step
        return Plan(fields_of(self._search, candidate, self.name, budget, self._objective, is_step))

    @contextlib.contextmanager
    def _context(self) -> Iterator[None]:
        """Show progress, and bind the axis names of the surrounding transforms."""
        try:
            with self._progress as report, self._captured.context.bind_axes():
                self._report = report
                yield
        finally:
            self._report = lambda text: None


class _Progress:
    """A spinner with a text and the seconds since it was made. It may be shown several times, and leaves nothing behind."""

    def __init__(self, name: str):
        require("rich.progress", "progress=True")
        from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        self._name = name
        columns = SpinnerColumn(), TimeElapsedColumn(), TextColumn("{task.description}")
        self._bar = Progress(*columns, transient=True)
        self._task = self._bar.add_task(f"plan {name}")

    def __enter__(self) -> Callable[[str], None]:
        self._bar.start()
        return lambda text: self._bar.update(self._task, description=f"plan {self._name}: {text}")

    def __exit__(self, *exception: Any) -> None:
        self._bar.stop()
