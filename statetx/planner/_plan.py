"""`Plan`: which values a program saves, recomputes or offloads."""

from __future__ import annotations

import contextlib
import functools
import os
import re
from collections.abc import Callable, Sequence
from typing import Any, Never, ParamSpec, TypeVar, cast

from .. import _files, _records
from .._equations.structure import Body
from .._errors import FunctionError, PlanError
from .._jax import ArrayFunction
from .._remat.override import override, rewritten_by
from .._remat.rewriter import Rewriter
from .._tables import Table, Tabular
from .._text import brief, format_bytes
from .._typing import public
from ..transforms.remat import Remat
from . import _show
from ._budget import STEP
from ._program.devices import of_device
from ._program.fingerprint import fingerprint_of, lines_of
from ._program.flat import flatten
from ._record import PLAN, VERSION, GradientPlan, PlanData
from ._treatments import OF_STEPS, as_planned, rewrite

_MAX_BYTES = 2**28  # of a file

P = ParamSpec("P")
R = TypeVar("R")


@public
class Plan(PlanData, Tabular, Rewriter):
    """The values of a program to save, offload or recompute. Made by `plan`; a policy for `remat`.

    Prints as a table: as text, in colors with ``rich.print``, as HTML in a notebook. Applies to any function with the
    same equations; for others the error names the first difference.

    Attributes:
        name: the function's name.
        of: the bytes that the budget counts: "step" or "temporaries".
        budget_bytes: the requested budget.
        argument_bytes, output_bytes: of the compiled program, which no plan changes.
        alias_bytes: of the outputs, those in the memory of donated arguments.
        temp_bytes: temporary memory of the compiled program with its gradient.
        predicted_bytes: temporary memory by the model, corrected by all other compiled programs.
        initial_prediction_bytes: temporary memory by the model, corrected by the programs compiled before this one.
        unplanned_bytes: temporary memory of the baseline (no rematerialization), to within a few hundred bytes if it
            was compiled, or extrapolated from compiled versions with fewer layers (`unplanned_is_compiled`); else by
            the model, which may be far off. For a budget in bytes it is compiled only if it may fit.
        flops, unplanned_flops: operations of the planned program and of the baseline.
        seconds: XLA's estimate of the time of a run, for a GPU or a target where it has one; with
            ``objective="time"`` the median time of a run; else None.
        objective: as in `plan`.
        curve: the model's trade-off: points (predicted bytes, added operations relative to the baseline), each the best
            choice of the model for its bytes. Fewer bytes never cost less.
        measured: the compiled programs: name ("plan", "no remat" or a stock policy), temporary bytes, and added
            operations as in `curve`.
        stock_policies: name, temporary bytes and added operations of each, measured where the search compiled it, else
            by the model; and whether they are predicted.
        timed: the programs whose times are known: name, temporary bytes, and `seconds`.
        rows: a `PlanRow` for every value of the program; saved values first, the largest first.
        groups: a line for each set of regions of equal structure, such as layers: which of them keep what.
        loops: a line for each loop that the plan changes.
        released: a line for each loop whose gradients are used up in its backward pass, layer by layer.
        released_bytes: of these gradients, which do not exist as a set.
        stock: the name of the stock policy that equals this plan, "no remat" for the baseline, else "".
        complete: whether the search ended before its time limit. The integer program of each region has a limit of its
            own, a few seconds, which this does not show; where it is met, the plan may cost more than it must.
        num_equations: number of equations of the planned program; a loop counts as one.
        is_step: whether the program is a training step, whose gradients are planned.
        num_devices: the number of devices that the compiler may share a value between: `rows` and `groups` have the
            bytes of all of them.
        is_sequential: whether the gradients of the step are computed one after the other.
        inner: how the blocks of functions are rematerialized whose gradients are taken inside of the loss; None if
            there are none.
        gradients: how each gradient of the program is rewritten.
    """

    # -- use -------------------------------------------------------------------------------------------------------

    def __call__(self, *args: Never, **kwargs: Never) -> Never:
        """Raise an error: a plan is not a function."""
        raise FunctionError(
            f"{self!r} was called. A plan says what to keep, and is not a function itself.\n"
            f"Fix: planned = plan.apply({self.name}), and call "
            f"planned{'' if self.is_step else ', or take its gradient'}."
        )

    def apply(self, fun: Callable[P, R]) -> Callable[P, R]:
        """Apply the plan to a function. Differentiate the result of a planned loss; call the result of a planned
        training step.

        Args:
            fun: a function with the equations that the plan was made for, jitted or not. They are compared whenever it
                is traced. A jitted step keeps its methods `lower`, `trace` and `eval_shape`.

        Raises:
            PlanError: on a call, if the equations differ; it names the first difference.
        """
        if not self.is_step:
            return cast(Any, Remat(fun, policy=self))

        step = self._rewriting(fun)
        for name in ("lower", "trace", "eval_shape"):  # of a jitted step
            if (stage := getattr(fun, name, None)) is not None:
                setattr(step, name, self._rewriting(stage))
        return step

    def _rewriting(self, fun: Callable[P, R]) -> Callable[P, R]:
        treatment = OF_STEPS.get(self.of_step or "")

        # A step differentiates functions that it may define inside itself, so they are replaced when JAX gets them.
        @functools.wraps(fun)
        def step(*args: P.args, **kwargs: P.kwargs) -> R:
            if override.leaves_plain(f"{self.name} under a plan"):
                return fun(*args, **kwargs)
            with rewritten_by(self), contextlib.nullcontext() if treatment is None else treatment.around():
                return fun(*args, **kwargs)

        return step

    @of_device
    def rewrite(self, body: Body, name: str, num_out: int, /) -> ArrayFunction:
        program = flatten(body.jaxpr)
        gradient = self._find(lines_of(program)[:-1], name)
        if gradient is None:
            return body
        planned = rewrite(*gradient.split(program), gradient.last_input, gradient.is_sequential)
        return as_planned(Body(planned, []))

    def _find(self, lines: tuple[str, ...], name: str) -> GradientPlan | None:
        """The gradient with these equations; None if the plan leaves it unchanged."""
        for gradient in self.gradients:
            if gradient.equations == lines:
                return gradient
        if fingerprint_of(lines) in self.ignored:
            return None

        # Of several gradients the one that agrees for longest is the one that was meant.
        expected = max((g.equations for g in self.gradients), key=lambda e: _num_common(e, lines))
        n, total = _num_common(expected, lines), len(expected)
        what, advice = f"it has {len(lines)} equations, and had {total} when the plan was made.", ""
        if n < min(total, len(lines)):
            what = (
                f"equation {n} of {total} is another one.\nIt is\n  {lines[n]}\n"
                f"and was, when the plan was made,\n  {expected[n]}"
            )
            advice = _of_inputs(lines[n], expected[n])
        raise PlanError(
            f"The plan for {self.name} does not fit {name}: {what}\nFix: make a plan for this program{advice}."
        )

    # -- storage ---------------------------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to a file, as JSON. An existing file is replaced once the plan is written."""
        _files.write(path, _records.dump(self.to_dict(), indent=1))

    def __reduce__(self) -> tuple[Any, ...]:
        return Plan, (self.to_dict(),)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Read a plan from a file. It is data: it is checked, and no code of it runs.

        Raises:
            PlanError: it is not a plan, or one of another version; or it has changed since it was written.
            OSError: the file cannot be opened.
        """
        try:
            fields = _records.parse(_files.read(path, _MAX_BYTES))

            # First the version: fields of another version may be missing, or mean something else.
            version = fields.get("version", VERSION)
            if version == VERSION:
                return cls(_records.verified(fields, PLAN))
        except ValueError as e:
            raise PlanError(f"{path} is not a plan: {e}.") from e
        raise PlanError(f"{path}: a plan of version {brief(version)}; this is version {VERSION}. Make it again.")

    # -- show ------------------------------------------------------------------------------------------------------

    def plot(self, path: str | os.PathLike[str] | None = None) -> Any:
        """Draw added operations over memory: the curve, the compiled programs, the budget. Needs matplotlib.

        Memory counts as in the budget.

        Args:
            path: the image file to write; without it the caller shows the figure.

        Returns:
            The matplotlib figure.
        """
        return _show.plot(self, path)

    def _table(self) -> Table:
        return _show.table(self)

    def __repr__(self) -> str:
        counted = self.total_bytes if self.of == STEP else self.temp_bytes
        return f"Plan({self.name}, {format_bytes(counted)} of {format_bytes(self.budget_bytes)})"


def _num_common(a: Sequence[str], b: Sequence[str]) -> int:
    """The length of the common beginning."""
    return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _of_inputs(line: str, expected: str) -> str:
    """Advice where two lines read other inputs only. Without jit, numbers, equal arrays, and what a library does with
    concrete arrays alone are inputs.
    """
    anonymous = [re.sub(r"\bv[0-9]+", "v", text) for text in (line, expected)]
    if line == expected or anonymous[0] != anonymous[1]:
        return ""
    return (
        "; or plan and call statetx.jit(fun): without jit, concrete arrays, Python numbers and one array given twice "
        "may have other equations"
    )
