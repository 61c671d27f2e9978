"""Costs of compiled programs, counted the same way everywhere: `measure` of one, `memory_report` under policies."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, ParamSpec, overload

from .. import _jax
from .._equations.compiled import Cost, Program, donated_inputs
from .._equations.differentiate import with_pullback
from .._lift.options import check_flags
from .._lift.wrapper import check_callable, name_of, short_name
from .._remat.override import VisitedRegion, override
from .._remat.parse import as_policy, as_sequence
from .._spinner import spinner
from .._tables import Cell, Column, Table, Tabular
from .._targets.target import Target
from .._text import format_bytes, format_flops, format_seconds
from .._tree import is_float
from .._typing import Policy
from ..transforms.remat import remat
from ._trace import TracedCall, inspects, jitted
from .diagnosis import BASELINE, Diagnosis, Measured, diagnose, not_wrapped
from .saved import residuals_of
from .table import Residuals, in_fewer_bits, see_profile

P = ParamSpec("P")


@overload
def measure(fun: Callable[P, Any], /, *args: P.args, **kwargs: P.kwargs) -> Cost: ...
@overload
def measure(fun: Callable[..., Any], /, *args: Any, gradient: bool | None, **kwargs: Any) -> Cost: ...
@overload
def measure(fun: Callable[..., Any], /, *args: Any, compiler_options: dict[str, Any] | None, **kwargs: Any) -> Cost: ...
@overload
def measure(fun: Callable[..., Any], /, *args: Any, target: Target | str, **kwargs: Any) -> Cost: ...
@inspects
def measure(
    fun: Callable[..., Any],
    /,
    *args: Any,
    gradient: bool | None = None,
    compiler_options: dict[str, Any] | None = None,
    **kwargs: Any,
) -> Cost:
    """Compile a training step, or a loss with its gradient, and count its memory and operations.

    No array is computed and no state changes. Memory is the memory that XLA reserves for the compiled program;
    operations are counted in its equations, including recomputation, without unused equations.

    Args:
        fun: a function that may read and write states. With ``gradient=False`` the arguments that a jitted one donates
            count once, as in the budgets of `plan`.
        *args, **kwargs: its arguments; arrays may be given as ``jax.ShapeDtypeStruct``, also in states, as in a model
            that `eval_shape` has made.
        gradient: whether the program also computes the derivative of all float outputs with respect to every float
            argument and every float state. By default it does, unless the function is a training step, which takes
            gradients itself (as in `plan`).
        compiler_options: as in ``jax.jit``.

    Returns:
        `Cost`, with ``temp_bytes``, ``argument_bytes``, ``output_bytes`` and ``peak_bytes`` in bytes, ``flops`` with
        each loop body counted as often as it runs (once for a while loop of unknown length), and ``compiled_flops``,
        XLA's own figure, which counts the body of every loop once (None where XLA does not tell); on a GPU or TPU, or
        for one as target, also ``seconds``, XLA's estimate of the time. All are of one device: operations outside of a
        shard_map count as divided evenly along the axes of the mesh that divide an input. Arguments are the function's
        arrays and the states that it reads; outputs are its own, the states that it writes or creates, and the
        gradients.

    Source:
        ``jax.stages.Compiled.memory_analysis`` and ``cost_analysis``.

    Example:
        >>> import jax.numpy as jnp, statetx
        >>> def loss(w, x):
        ...     return statetx.scan(lambda h, _: (jnp.tanh(w @ h), None), x, length=100)[0].sum()
        >>> cost = statetx.measure(loss, jnp.eye(64), jnp.ones(64), gradient=False)
        >>> cost.flops == 100 * (2 * 64 * 64 + 64) + 64
        True
    """
    check_callable("measure", fun)
    program = array_program("measure", fun, args, kwargs, gradient)
    return program.for_types(program.arrays, compiler_options, estimates=True).cost_on_device


class ArrayProgram:
    """A traced call as a function of arrays, to be compiled.

    States are inputs of a measured program, as in a jitted step: as constants they would not count as arguments.

    Args:
        gradient: whether it returns the float outputs, then the others with the values of states, then the gradients of
            the float outputs with respect to the float inputs; else one list of values of states and outputs.
        fixed: which arrays of the arguments are not differentiated.
        evaluate: a function of the inputs in place of the call; by default its equations are evaluated.

    Attributes:
        inputs: the states in the order of their first reads, then the arguments, states given by themselves among
            them; `arrays` and `names` are theirs, `states` the names of the former.
        donated: the numbers of the arrays whose memory the outputs may take: those that a jitted function donates. A
            gradient reads its inputs after the call that would donate them.
    """

    def __init__(
        self,
        call: TracedCall,
        gradient: bool,
        fixed: Sequence[bool] = (),
        *,
        evaluate: Callable[[Sequence[Any]], tuple[list[Any], list[Any]]] | None = None,
    ):
        self._call, self._evaluate = call, evaluate
        is_argument = lambda i: i.state is None or id(i.state) in call.given
        states = [i for i in call.inputs if not is_argument(i)]
        self.inputs = [*states, *filter(is_argument, call.inputs)]
        self.arrays = [i.array for i in self.inputs]
        self.names = [i.origin.path for i in self.inputs]
        self.states = self.names[: len(states)]
        of_arguments = {id(i): is_fixed for i, is_fixed in zip(call.inputs, fixed, strict=False)}  # they are the first
        is_fixed = [of_arguments.get(id(i), False) for i in self.inputs]
        self.diff_indices = [i for i, x in enumerate(self.arrays) if is_float(_jax.abstract(x)) and not is_fixed[i]]
        self.run = with_pullback(self._split_outputs, self.diff_indices) if gradient else self._outputs
        number = {id(i): n for n, i in enumerate(self.inputs)}
        donated = () if gradient else donated_inputs(call.body.jaxpr)
        first = call.body.num_operands
        self.donated = tuple(sorted(number[id(call.inputs[i - first])] for i in donated if i >= first))

    def _results(self, arrays: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        by_input = {id(i): x for i, x in zip(self.inputs, arrays, strict=True)}
        in_order = [by_input[id(i)] for i in self._call.inputs]
        if self._evaluate is not None:
            return self._evaluate(in_order)
        types = [v.aval for v in self._call.body.jaxpr.invars[self._call.body.num_operands :]]
        is_same = [_jax.abstract(x) for x in in_order] == types
        return self._call(in_order) if is_same else self._call.retraced(in_order)

    def _outputs(self, *arrays: Any) -> list[Any]:
        # New values in the order of the old ones and before the outputs, as in a jitted step that donates.
        outs, written = self._results(arrays)
        return [*written, *outs]

    def _split_outputs(self, *arrays: Any) -> tuple[list[Any], list[Any]]:
        # Float outputs get cotangents. The others are returned too, so that XLA does not remove what computes them.
        outs, written = self._results(arrays)
        return [x for x in outs if is_float(x)], [*(x for x in outs if not is_float(x)), *written]

    def for_types(
        self, types: Sequence[Any], compiler_options: dict[str, Any] | None, *, estimates: bool = False
    ) -> Program:
        """The program for arrays of these types, to be compiled; `estimates` as in `Program`."""
        return Program(self.run, types, compiler_options, self.donated, estimates=estimates)


def array_program(
    name: str,
    fun: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    gradient: bool | None = None,
    fixed: Sequence[bool] = (),
) -> ArrayProgram:
    """The program of a call; by default with its gradient unless it is a training step. One trace finds the states, and
    whether the function takes gradients itself.
    """
    call = TracedCall(name, fun, args, kwargs)
    return ArrayProgram(call, not call.is_step if gradient is None else gradient, fixed)


# -- policies side by side ---------------------------------------------------------------------------------------------

AS_WRITTEN = "as written"

_RATIO = Column("vs none", "right", "dim")
_COLUMNS = (
    Column("policy", style="bold"),
    Column("residuals", "right", rank=2),
    Column("temporary", "right"),
    _RATIO,
    Column("arguments", "right", rank=3),
    Column("outputs", "right", rank=3),
    Column("peak", "right", rank=2),
    Column("FLOPs", "right", rank=1),
    _RATIO._replace(rank=1),
    Column("estimated time", "right"),
    _RATIO,
)


@dataclasses.dataclass(frozen=True, repr=False)
class MemoryReport(Tabular):
    """Policies side by side: a table of `Measured`, then the diagnoses.

    Prints as text, in colors with ``rich.print``, as HTML in a notebook.

    Attributes:
        name: the function's name.
        rows: one for each policy; the first is the baseline without rematerialization.
        diagnoses: empty if every policy saves memory as expected.
        num_devices: the number of devices that the programs run on. Residuals count all devices together; FLOPs and
            memory of the compiled programs (temporary, arguments, outputs, peak) are per device.
        is_step: whether the function is a training step, which takes gradients itself; else the rows are of the
            function with its derivative.
        notes: on the function's checkpoints, each a heading and a text.
    """

    name: str
    rows: tuple[Measured, ...]
    diagnoses: tuple[Diagnosis, ...]
    num_devices: int = 1
    is_step: bool = False
    notes: tuple[tuple[str, str], ...] = ()

    def __getitem__(self, policy: str) -> Measured:
        for row in self.rows:
            if row.policy == policy:
                return row
        raise KeyError(f"{policy!r}; there are {', '.join(repr(row.policy) for row in self.rows)}")

    @property
    def _title(self) -> str:
        title = f"{self.name}: {'training step' if self.is_step else 'value and gradient'}"
        if self.num_devices == 1:
            return title
        return f"{title} on {self.num_devices} devices; residuals of all devices, other figures of one"

    def _table(self) -> Table:
        baseline, largest = self.rows[0], max(row.temp_bytes for row in self.rows)
        worse = {d.policy for d in self.diagnoses}
        shows_time = any(row.seconds is not None for row in self.rows)
        columns = list(_COLUMNS[: None if shows_time else -2])

        rows = []
        for r in self.rows:
            color = "yellow" if r.policy in worse else "green"
            cells = [
                Cell(r.policy),
                Cell(format_bytes(r.residual_bytes)),
                Cell(format_bytes(r.temp_bytes), color, share=r.temp_bytes / max(largest, 1)),
                Cell(_ratio(r.temp_bytes, baseline.temp_bytes)),
                Cell(format_bytes(r.argument_bytes)),
                Cell(format_bytes(r.output_bytes)),
                Cell(format_bytes(r.peak_bytes)),
                Cell(format_flops(r.flops)),
                Cell(_ratio(r.flops, baseline.flops)),
            ]
            if shows_time:
                cells += [
                    Cell("unknown" if r.seconds is None else format_seconds(r.seconds)),
                    Cell("" if r.seconds is None or baseline.seconds is None else _ratio(r.seconds, baseline.seconds)),
                ]
            rows.append(cells)
        stored = [(r.policy, in_fewer_bits(r.residuals)) for r in self.rows]
        notes = [(f"{d.policy}: {d.category}.", d.text) for d in self.diagnoses]
        notes += [(f"{policy}:", f"residuals in fewer bits: {types}.") for policy, types in stored if types]
        notes += self.notes
        notes.append(see_profile())
        return Table(self._title, columns, rows, notes)

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers and strings, for JSON."""
        rows = []
        for row in self.rows:
            fields = {f.name: getattr(row, f.name) for f in dataclasses.fields(row) if f.name != "residuals"}
            rows.append({**fields, "residual_bytes": row.residual_bytes, "peak_bytes": row.peak_bytes})
        named = {"name": self.name, "num_devices": self.num_devices}
        return {
            **named,
            "rows": rows,
            "notes": [" ".join(note) for note in self.notes],
            "diagnoses": [dataclasses.asdict(d) for d in self.diagnoses],
        }


def _ratio(a: float, b: float) -> str:
    return f"{a / b:.2f}" if b else ""


@overload
def memory_report(fun: Callable[P, Any], /, *args: P.args, **kwargs: P.kwargs) -> MemoryReport: ...
@overload
def memory_report(
    fun: Callable[..., Any], /, *args: Any, policies: Policy | Sequence[Policy], **kwargs: Any
) -> MemoryReport: ...
@overload
def memory_report(fun: Callable[..., Any], /, *args: Any, gradient: bool | None, **kwargs: Any) -> MemoryReport: ...
@overload
def memory_report(
    fun: Callable[..., Any], /, *args: Any, compiler_options: dict[str, Any] | None, **kwargs: Any
) -> MemoryReport: ...
@overload
def memory_report(fun: Callable[..., Any], /, *args: Any, target: Target | str, **kwargs: Any) -> MemoryReport: ...
@overload
def memory_report(fun: Callable[..., Any], /, *args: Any, progress: bool | None, **kwargs: Any) -> MemoryReport: ...
@inspects
def memory_report(
    fun: Callable[..., Any],
    /,
    *args: Any,
    policies: Policy | Sequence[Policy] = None,
    gradient: bool | None = None,
    compiler_options: dict[str, Any] | None = None,
    progress: bool | None = None,
    **kwargs: Any,
) -> MemoryReport:
    """Compile a training step, or a loss with its derivative, with and without rematerialization, and compare the
    programs' memory.

    The derivative of a loss is taken with respect to every float argument and every float state. A training step, which
    takes gradients itself, is compiled unchanged. No state changes.

    Args:
        fun: a function that may read and write states. The baseline is the function without its rematerialization: no
            `remat`, no ``jax.checkpoint``, loops without their ``checkpoint=``. If it has none, the report says so,
            names the blocks worth it, and shows the rematerialization of a loss as a whole.
        *args, **kwargs: its arguments.
        policies: a policy that replaces the rematerialized functions' own, or a sequence of them, one after the other;
            by default the functions have their own. In a sequence None is a policy, too.
        gradient: whether the derivative of `fun` is compiled. By default it is, unless `fun` is a training step (as in
            `plan`).
        compiler_options: as in ``jax.jit``; for example ``{"xla_disable_hlo_passes": "cse_barrier_expander"}`` shows on
            a CPU what unrolled rematerialization saves on other devices.
        progress: whether to show progress (with rich); by default on a terminal.

    Returns:
        `MemoryReport`; for a policy that does not reduce temporary memory, it has a diagnosis.

    Raises:
        PolicyError: `policies` is neither a policy nor a sequence of policies.

    Source:
        ``jax.stages.Compiled.memory_analysis`` and ``cost_analysis``.

    Example:
        >>> import jax.numpy as jnp, statetx
        >>> w = statetx.Param(jnp.ones((8, 8)) / 8)
        >>> block = statetx.remat(lambda x: jnp.sin(jnp.tanh(w.value @ x)))
        >>> def loss(x):
        ...     return statetx.scan(lambda h, _: (block(h), None), x, None, length=100)[0].sum()
        >>> report = statetx.memory_report(loss, jnp.ones(8), policies=[None, "dots"])
        >>> [row.policy for row in report.rows]
        ['no remat', 'nothing', 'dots']
        >>> [row.residuals.intermediate_bytes for row in report.rows[1:]]
        [3200, 6400]
    """
    check_callable("memory_report", fun)
    check_flags("memory_report", progress=progress)
    # If nothing is rematerialized, the whole function is.
    replacements = [] if policies is None else map(as_policy, as_sequence(policies, "memory_report"))
    policies_by_name: dict[str, Any] = {}
    for policy in dict.fromkeys(replacements):  # two functions may have one name
        number = sum(label.partition(" #")[0] == repr(policy) for label in policies_by_name)
        policies_by_name[f"{policy!r} #{number + 1}" if number else repr(policy)] = policy
    name = short_name(name_of(fun))

    # Everything is traced before anything is compiled or run: a policy that fails does so early.
    trace = lambda fun: _traced_row(fun, args, kwargs, gradient, compiler_options)
    with override.nothing_checkpointed() as undone:
        baseline = trace(fun)
    with override(suppress_warnings=True) as visited_regions:
        as_written = trace(fun)
    is_wrapped, takes_gradients = bool(visited_regions), baseline.is_step
    labels = [BASELINE, *(policies_by_name or (AS_WRITTEN if is_wrapped or undone else f"remat({name})",))]
    if takes_gradients and not is_wrapped:
        labels = [BASELINE, AS_WRITTEN] if undone else [BASELINE]
    traced = {BASELINE: baseline, AS_WRITTEN: as_written}
    regions: dict[str, list[VisitedRegion]] = {BASELINE: [], AS_WRITTEN: visited_regions}
    for label in labels:
        if label not in traced:
            with override(policies_by_name.get(label), suppress_warnings=True) as regions[label]:
                traced[label] = trace(fun if is_wrapped else remat(fun))
    traced = {label: traced[label] for label in labels}
    programs = {label: row.program for label, row in traced.items()}

    with spinner(f"memory_report of {name}", is_shown=progress) as tell:
        for label, program in programs.items():
            tell(f"compiling {label}")
            _ = program.compiled
    rows = [
        Measured(**vars(row.program.cost_on_device), policy=k, residuals=row.residuals) for k, row in traced.items()
    ]

    diagnoses: list[Diagnosis] = (
        [] if is_wrapped or undone else [not_wrapped(name, baseline.residuals, takes_gradients)]
    )
    for row in rows[1:]:
        diagnoses += diagnose(
            row, rows[0], regions[row.policy], programs[row.policy].lowered, programs[BASELINE].lowered
        )
    num_devices = max([len(x.sharding.device_set) for x in baseline.arrays if isinstance(x, _jax.ArrayImpl)], default=1)
    notes = _notes(visited_regions, undone) if is_wrapped or undone else []
    unique = tuple(dict.fromkeys(diagnoses))
    return MemoryReport(name, tuple(rows), unique, num_devices, takes_gradients, tuple(notes))


class _TracedRow(NamedTuple):
    """A function traced under one policy: its residuals, and the program to compile with its arrays."""

    residuals: Residuals
    program: Program
    arrays: list[Any]
    is_step: bool


def _traced_row(
    fun: Callable, args: tuple, kwargs: dict[str, Any], gradient: bool | None, compiler_options: dict[str, Any] | None
) -> _TracedRow:
    call = TracedCall("memory_report", fun, args, kwargs, has_passes=True)
    is_step = call.is_step if gradient is None else not gradient
    program = ArrayProgram(call, not is_step)
    if jitted(fun) is not None:
        # The program donates the jitted function's donated arguments; origins are known without it. Regions are listed
        # once.
        with override(override.policy, is_off=override.is_off, suppress_warnings=True):
            call = TracedCall("memory_report", fun, args, kwargs, has_passes=True, unjits=True)
    residuals = residuals_of(call, may_be_step=not gradient)
    return _TracedRow(
        residuals, program.for_types(program.arrays, compiler_options, estimates=True), program.arrays, is_step
    )


def _notes(regions: Sequence[VisitedRegion], undone: Sequence[str]) -> list[tuple[str, str]]:
    """Notes on the rows' checkpoints."""
    functions = collections.Counter(f"remat({short_name(region.name)})" for region in regions)
    listed = ", ".join(
        f"{text} ({n} times)" if n > 1 else text for text, n in (functions + collections.Counter(undone)).items()
    )
    notes = [("Checkpointed:", f"{listed}. In the row {BASELINE!r} all of it is plain.")]
    if any("with checkpoint=" in text for text in undone):
        notes.append(("Loops:", "statetx.loop_report(fun, ...) shows what each keeps, and how often its steps run."))
    return notes
