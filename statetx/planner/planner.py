"""`plan`, `Planner`: the choice of what a program saves, recomputes or offloads, so that it fits a budget of bytes."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import warnings
from collections.abc import Callable, Generator, Sequence
from typing import Any

from .. import _jax, _states
from .._cached import cached_property
from .._errors import PlanError, PolicyWarning
from .._lift.options import check_flags, notes_shapes
from .._lift.wrapper import check_callable, name_of, short_name
from .._remat.override import unobserved
from .._spinner import spinner
from .._targets import current
from .._text import format_bytes, suggestion
from .._verify.functions import filled, with_gradients
from .._verify.same import same_step
from . import _store
from ._budget import STEP, ByteBudget, read_time_limit
from ._plan import Plan
from ._program.fingerprint import lines_of
from ._program.values import read_formats
from ._record import OBJECTIVES, STORED_PLAN, are_decisions_for, fields_of
from ._search.capture import Captured, variants
from ._search.program import PlannedProgram, ProgramSearch, fixed_above
from ._search.search import Search, SearchOptions, impossible
from ._search.times import Timer, refuse_unknown_times
from ._show import described
from ._treatments import TREATMENTS
from ._treatments.treatment import Treatment

DEFAULT_TIME_LIMIT = 60.0


@_jax.api_boundary
@notes_shapes
@current.takes_target
def plan(
    fun: Callable[..., Any],
    /,
    *args: Any,
    budget: int | float | str,
    of: str = STEP,
    objective: str = "auto",
    offload: bool = False,
    stored_as: str | Sequence[str] = ("bits",),
    argnums: int | Sequence[int] | None = None,
    time_limit: float | None = DEFAULT_TIME_LIMIT,
    progress: bool | None = None,
    verify: bool = False,
    **kwargs: Any,
) -> Plan:
    """Choose the values that a program saves for its backward passes, so that it fits a budget of memory.

    The function is traced once; no state changes and nothing is computed. Its equations are cut into regions where few
    bytes cross (or where `remat` marks them). Integer programs find the options of each region, and dynamic programming
    their best combination, including the bytes in use during each region's backward pass. Of the choices
    that the model finds, the one of the most expected gain is compiled, its memory corrects the model, and so on until
    none is worth a compilation. A scan is planned with its body: the saved values of each step, together with the
    levels or slots of the loop. The stock policies are candidates too.
    Random values are not drawn again, and each state is written once, as in `remat`.

    The plan is stored on disk by the structure of the program (`STATETX_CACHE`), so that the second run of a script
    reads it.

    Args:
        fun: a training step, which takes gradients itself, by `statetx.grad`, ``jax.grad``, ``jax.vjp`` or a library
            that calls them; or a loss, or another function to differentiate. Without `argnums` a function counts as a
            step if it differentiates a scalar, or takes derivatives of arrays and returns arrays; with them as a loss.
            It may be jitted, and read and write states. Arguments other than arrays are static, as in `remat`.
        *args, **kwargs: example arguments; ``jax.ShapeDtypeStruct`` can replace an array.
        budget: a number of bytes, ``"2GiB"``, ``"device"`` for the memory of the device (``STATETX_DEVICE_MEMORY``
            replaces it), or, as a float up to 1, a fraction of the memory without rematerialization, also without what
            the function has itself (``jax.checkpoint``). On several devices it is for one.
        of: what counts. ``"step"``: arguments, outputs and temporaries of the compiled program; an output in the memory
            of a donated argument counts once, so plan the jitted step if it donates. For a loss the program is its
            gradient, whose outputs are the gradients. ``"temporaries"``: the program's bytes beyond arguments and
            outputs.
        objective: the cost to minimize. ``"auto"``: of the compiled candidates, with the stock policies within the
            budget among them, the one of the least time by XLA's estimate, for a GPU or a target where XLA has one (the
            H100 and the H200); else the one of the fewest operations, ``"flops"``. ``"time"``: the candidates of the
            fewest operations and the stock policies are run, and the fastest is taken; for a target as ``"auto"``.
        offload: whether values may be stored in host memory, where the backend has it.
        stored_as: allowed formats for values stored in fewer bits, as in `Policy.stored_as`. ``"bits"`` is exact, and
            taken only for values that are proved to be 0 or 1, such as masks and spikes. ``"bfloat16"``,
            ``"float8_e4m3fn"`` and ``"float8_e5m2"`` round the operands of the backward pass, and so the gradients.
            ``()``: none.
        argnums: the arguments of a loss to differentiate; all by default. Float states are always differentiated.
        time_limit: seconds; after that the best plan so far is returned. Until a first plan keeps the budget, it may
            take twice as long; if there is none then, or it adds more than a quarter of the operations, the cheapest
            programs that are predicted to keep the budget are compiled, two at most. None for no limit.
        progress: whether to show progress (with rich); by default on a terminal.
        verify: whether to run the planned program and the plain one, and compare, as `testing.assert_same_step` does:
            of a loss with its gradients. A ``jax.ShapeDtypeStruct`` is filled with numbers. Both must fit here.

    Returns:
        `Plan`. Use it as ``plan.apply(fun)`` or ``remat(fun, policy=plan)``.

    Raises:
        PlanError: no candidate keeps the budget; ``smallest_bytes`` is the least that was reached, of what counts. If
            the budget is below what arguments and outputs take, nothing is searched, and ``smallest_bytes`` is what
            these take. Or `verify` has found another result, which the error names.

    Source:
        Jain et al., Checkmate: Breaking the memory wall with optimal tensor rematerialization (MLSys 2020), for
        the integer program; a model of memory for the rest.

    Example:
        >>> import jax, jax.numpy as jnp, statetx
        >>> def loss(ws, x):
        ...     for w in ws:
        ...         x = x + jnp.sin(jnp.tanh(x @ w))
        ...     return (x**2).mean()
        >>> @jax.jit
        ... def step(ws, x):
        ...     return jax.tree.map(lambda w, g: w - 0.1 * g, ws, jax.grad(loss)(ws, x))
        >>> ws, x = [jnp.ones((64, 64)) / 64] * 4, jnp.ones((512, 64))
        >>> plan = statetx.plan(step, ws, x, budget=0.7)
        >>> plan.total_bytes <= 0.7 * plan.unplanned_total_bytes
        True
        >>> ws = plan.apply(step)(ws, x)
    """
    check_flags("plan", offload=offload, progress=progress, verify=verify)
    amount = ByteBudget.read(budget, of).amount  # a mistake shows before anything is traced
    options: dict[str, Any] = {"objective": objective, "offload": offload, "stored_as": stored_as, "argnums": argnums}
    options |= {"of": of, "time_limit": time_limit, "progress": progress}
    new_plan = Planner(fun, *args, **options, **kwargs).plan(amount)
    if verify:
        _verify(new_plan, fun, args, kwargs)
    return new_plan


def _verify(plan: Plan, fun: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise if the planned program has other results than the plain one."""
    functions = [fun, plan.apply(fun)]
    functions = functions if plan.is_step else [with_gradients(f) for f in functions]
    report = same_step(functions[0], functions[1], *filled((args, kwargs)), steps=1, tolerance=None)
    if report.problem:
        raise PlanError(f"The plan for {plan.name} is wrong. {report.problem}\nFix: report it; use policies.nothing.")


class ProgramPlanner:
    """Plans for a captured program and many budgets, which share compiled candidates.

    Args:
        variants: programs with its results, the one without rematerialization of inner gradients first.
        of: the bytes that the budgets count, as for `plan`.
    """

    def __init__(self, variants: list[Captured], of: str, options: SearchOptions, *, progress: bool | None):
        self._variants, self.captured, self._of = variants, variants[0], of
        self.name = self.captured.name
        self.target = current.current()
        self._progress = spinner(f"plan {self.name}", is_shown=progress)
        num_searched = sum(c.treatment is None for c in variants)
        limit = None if options.time_limit is None else options.time_limit / num_searched
        self._options = dataclasses.replace(options, time_limit=limit)
        self._timer = Timer() if options.objective == "time" and current.absent() is None else None
        self._needs_baseline = False

        # The search outlives each progress bar: it reports to the last one.
        self._report: Callable[[str], None] = lambda text: None

    @contextlib.contextmanager
    def _for_target(self) -> Generator[None]:
        """A block for the target that the planner was made for, and within its program."""
        with current.kept(self.target), self.captured.context.bind_axes():
            yield

    @cached_property
    def _searches(self) -> list[ProgramSearch]:
        """For programs with these results; last the one without rematerialization of inner gradients.

        They are analyzed and compiled only when something is asked that the store does not have.
        """

        def start(captured: Captured) -> ProgramSearch:
            is_plain = captured is self.captured
            note = "" if is_plain else f", inner gradients with policy {captured.variant!r}"
            report: Callable[[str], None] = lambda text: self._report(text + note)
            return ProgramSearch(captured, self._options, report, is_plain and self._needs_baseline)

        plain = {c.variant: c for c in self._variants if c.treatment is None}
        most = {variant: c.released_bytes for variant, c in plain.items()}
        treated: list[Captured] = []
        for c in self._variants:
            if c.treatment and c.released_bytes > most[c.variant]:
                most[c.variant] = c.released_bytes
                treated.append(c)
        return [start(c) for c in (*treated, *plain.values()) if c is not self.captured] + [start(self.captured)]

    @property
    def _searched(self) -> list[ProgramSearch]:
        """Those among which a plan is chosen: without the programs that a treatment of the step replaces by one with no
        more operations.
        """
        programs = [search.captured for search in self._searches]
        replaced = {c.variant for c in programs if c.treatment and not c.treatment.adds_operations}
        return [s for s in self._searches if s.captured.treatment or s.captured.variant not in replaced]

    @property
    def _plain(self) -> ProgramSearch:
        return self._searches[-1]

    @property
    def _search(self) -> Search:
        """The search for the only gradient."""
        return self._plain.searches[0]

    def ends(self) -> tuple[int, int]:
        """The least bytes reached so far, and the baseline's, counted as in the budget."""
        ends: list[tuple[int, int]] = []
        with self._for_target():
            for search in self._searches:
                with search.time_left.running():
                    ends.append(search.ends())
            self._renew_time()
            fixed = ByteBudget(0, self._of).fixed_bytes(self._plain.fixed())
        return min(least for least, _ in ends) + fixed, ends[-1][1] + fixed

    def plan(self, budget: int | float | str) -> Plan:
        """The best plan for a budget."""
        budget_ = ByteBudget.read(budget, self._of)
        is_valid: Callable[[dict[str, Any]], bool] = lambda fields: self._is_for_program(fields, budget_)
        with self._for_target():
            fields = _store.remembered(self.key(budget_), STORED_PLAN, lambda: self._found(budget_), is_valid)
            return _warn_if_expensive(self._as_plan(fields))

    def _found(self, budget: ByteBudget) -> dict[str, Any]:
        """The fields of the best plan for a budget."""
        with self._progress as self._report, unobserved():  # a search takes gradients itself
            amount = budget.amount
            if budget.of == STEP and isinstance(amount, int):
                fixed = fixed_above(self.captured, amount)
                if fixed is not None:
                    raise impossible(self.captured, budget, fixed)
            self._needs_baseline = isinstance(amount, float)
            try:
                with self._plain.time_left.running():
                    budget = self._plain.in_bytes(budget)
                return self._fields(self._choose(budget), budget)
            finally:
                self._renew_time()

    def _renew_time(self) -> None:
        """Let the next plan have as much time."""
        for search in vars(self).get("_searches", ()):
            search.time_left.renew()

    def best(self, budget: int) -> Plan | None:
        """The best plan compiled so far, for any budget, that keeps this one; None if none does."""
        budget_ = ByteBudget(int(budget), self._of)
        with self._for_target():
            best = (search.best(budget_.left(search.fixed())) for search in self._searches)
            fitting = [program for program in best if program is not None]
            return self._as_plan(self._fields(self._faster(fitting), budget_)) if fitting else None

    def _choose(self, budget: ByteBudget) -> PlannedProgram:
        """The best program: of one of the variants."""
        programs: list[PlannedProgram] = []
        errors: list[PlanError] = []
        searches = sorted(self._searched, key=lambda search: search.total_cost())
        for search, following in itertools.zip_longest(searches, searches[1:]):
            # A program with as many operations of its own as an earlier plan cannot be cheaper.
            is_beaten = programs and search.total_cost() >= _cheapest(programs).total_cost > 0
            if self._timer is not None or not is_beaten:
                try:
                    programs.append(self._best_of(search, budget))
                except PlanError as e:
                    errors.append(e)
            if following is not None:
                search.time_left.pass_on(following.time_left)
        if not programs:
            raise min(errors, key=lambda e: e.smallest_bytes or 0)
        return self._faster(programs) if self._timer is None else self._timer.faster(programs)

    def _faster(self, programs: Sequence[PlannedProgram]) -> PlannedProgram:
        """The best of programs: the fastest if all times are known, else the cheapest."""
        seconds = [program.compiled.seconds for program in programs]
        known_seconds = [x for x in seconds if x is not None]
        if self._options.objective == "flops" or len(known_seconds) < len(seconds):
            return _cheapest(programs)
        return programs[seconds.index(min(known_seconds))]

    def _best_of(self, search: ProgramSearch, budget: ByteBudget) -> PlannedProgram:
        with search.time_left.running():
            program = search.fit(budget)
            if self._timer is None:
                return program
            return self._timer.fastest(search, program, budget.left(search.fixed()))

    # -- records -----------------------------------------------------------------------------------------------------

    def _fields(self, program: PlannedProgram, budget: ByteBudget) -> dict[str, Any]:
        (search,) = (search for search in self._searches if search.captured is program.captured)
        fields = fields_of(search, program, self._plain, self._options, budget)
        return fields if self._timer is None else fields | self._timer.fields(program)

    def _as_plan(self, fields: dict[str, Any]) -> Plan:
        flat = [gradient.flat for gradient in self._variant_of(fields).gradients]
        # It may be asked for outside of the block of the target.
        return Plan(fields | {"name": self.name}, current.bind(lambda gradients: described(flat, gradients)))

    def key(self, *settings: Any) -> str:
        """A digest of the program, the options of its plans, and other settings, in the store."""
        captured = self.captured
        with self._for_target():
            more: list[Any] = [gradient.stored for gradient in captured.gradients]
            if captured.step is not None:
                outline = captured.step.outline
                more += [lines_of(outline.jaxpr), [str(v.aval) for v in outline.jaxpr.invars], outline.context]
                more += [captured.step.donated, sorted(outline.constants), captured.is_loss, captured.ignored]
            return _store.key_of(*settings, self._options, *more)

    def _is_for_program(self, fields: dict[str, Any], budget: ByteBudget) -> bool:
        """Whether stored fields are what this planner may answer: all that it can check."""
        captured, options = self._variant_of(fields), self._options
        asked = {"objective": options.objective, "of": budget.of, "is_step": captured.is_step}
        asked |= {"num_devices": captured.num_devices, "variant": captured.variant, "of_step": captured.of_step}
        asked |= {"budget_bytes": budget.amount} if isinstance(budget.amount, int) else {}
        is_asked = all(fields[name] == value for name, value in asked.items())
        return is_asked and are_decisions_for(captured.gradients, fields, options)

    def _variant_of(self, fields: dict[str, Any]) -> Captured:
        """The program that stored fields are for."""
        key = fields["variant"], fields["of_step"]
        return next((c for c in self._variants if (c.variant, c.of_step) == key), self.captured)


def _cheapest(programs: Sequence[PlannedProgram]) -> PlannedProgram:
    return min(programs, key=lambda program: program.total_cost)


def _warn_if_expensive(plan: Plan) -> Plan:
    """Warn of a plan that the time limit left expensive; return the plan."""
    if not plan.complete and plan.extra_flops > 0.5:
        warnings.warn(
            f"plan({plan.name}): the time limit ended the search. The best plan until then takes "
            f"{1 + plan.extra_flops:.1f} times the operations of the program without rematerialization; one that "
            f"takes fewer within the budget of {format_bytes(plan.budget_bytes)} may exist.\nFix: give the search more "
            f"time, time_limit=300, or None for no limit; for policy='fit:...' as "
            f"policy=statetx.planner.Fit(..., time_limit=300).",
            PolicyWarning,
            stacklevel=_states.user_stacklevel(),
        )
    return plan


class Planner(ProgramPlanner):
    """Plans for one program and many budgets, which share compiled candidates. Arguments as in `plan`.

    The time limit is for each plan; by default there is none. The target is the one in force when the planner is made.
    ``treatments=`` leaves some of `statetx.planner.TREATMENTS` out, to see their worth.

    Example:
        >>> import jax.numpy as jnp, statetx
        >>> def loss(ws, x):
        ...     for w in ws:
        ...         x = x + jnp.sin(jnp.tanh(x @ w))
        ...     return (x**2).mean()
        >>> args = [jnp.ones((64, 64)) / 64] * 4, jnp.ones((512, 64))
        >>> planner = statetx.planner.Planner(loss, *args, of="temporaries", argnums=0)
        >>> least, most = planner.ends()
        >>> plans = [planner.plan(budget) for budget in (most, 0.8, 0.7)]
        >>> [plan.temp_bytes <= plan.budget_bytes for plan in plans]
        [True, True, True]
    """

    def __init__(
        self,
        fun: Callable[..., Any],
        /,
        *args: Any,
        of: str = STEP,
        objective: str = "auto",
        offload: bool = False,
        stored_as: str | Sequence[str] = ("bits",),
        argnums: int | Sequence[int] | None = None,
        time_limit: float | None = None,
        progress: bool | None = None,
        treatments: Sequence[type[Treatment]] = TREATMENTS,
        **kwargs: Any,
    ):
        check_callable("plan", fun)
        if objective not in OBJECTIVES:
            raise ValueError(
                f"objective must be 'auto', 'flops' or 'time', got {objective!r}.{suggestion(objective, OBJECTIVES)}"
            )
        if objective == "time":
            refuse_unknown_times()
        formats = read_formats(stored_as)
        with unobserved():
            captured_variants = variants(fun, args, kwargs, argnums)
        name = short_name(name_of(fun))
        captured_variants = [dataclasses.replace(c, name=name) for c in captured_variants]
        captured_variants += [treated for c in captured_variants for treated in c.treated(treatments)]
        limit = read_time_limit(time_limit)
        settings = SearchOptions(objective, offload, limit, formats, tuple(treatments))
        super().__init__(captured_variants, of, settings, progress=progress)
