"""Functions of a program to plan, as they are recorded while it is staged, or replaced."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ... import _jax
from ..._cached import cached_property
from ..._equations.compiled import Program
from ..._equations.differentiate import with_pullback
from ..._equations.structure import Body
from ..._jax import ArrayFunction, Arrays, Jaxpr
from ..._lift.context import TraceContext, sharding_of
from ..._remat.rewriter import Rewriter
from ..._tree import is_array, is_float, num_bytes
from .._program.devices import of_device
from .._program.fingerprint import lines_of, rules_of
from .._program.flat import flatten
from .._treatments import as_planned

_EMBEDDED = 2**20  # bytes of a constant, at most


@dataclasses.dataclass(frozen=True, eq=False)
class Recorded:
    """A recorded function.

    Attributes:
        num_out: number of outputs of the function itself; new values of states follow them.
        diff_indices: the inputs under differentiation.
        traced_floats: the float inputs that are traced, not constants.
        context: the transforms and shardings that it runs under.
        constants: by number, the small arrays among the inputs that the function closes over. The compiled function has
            their values, and XLA computes what follows from them alone.
    """

    jaxpr: Jaxpr
    num_out: int
    diff_indices: list[int]
    traced_floats: list[int]
    context: TraceContext
    constants: Mapping[int, Any] = dataclasses.field(default_factory=dict[int, Any])

    @cached_property
    def flat(self) -> Jaxpr:
        """The program without inner jits."""
        return flatten(self.jaxpr)

    @cached_property
    def lines(self) -> tuple[str, ...]:
        """The lines of the equations."""
        return self.key[:-1]

    @cached_property
    def key(self) -> tuple[str, ...]:
        """The lines, with the program's outputs."""
        return lines_of(self.flat)

    @cached_property
    def stored(self) -> tuple[Any, ...]:
        """Values that the key of a stored plan depends on."""
        with self.context.bind_axes():
            rules = rules_of(self.flat)
        types = [str(v.aval) for v in self.flat.invars]
        return self.key, rules, types, self.context, self.diff_indices, self.num_out, sorted(self.constants)

    def program(self, jaxpr: Jaxpr, compiler_options: dict[str, Any] | None) -> Program:
        """The gradient on its own, of this program or a rewritten one, to be compiled."""
        avals = [v.aval for v in jaxpr.invars]
        gradient = gradient_of(jaxpr, self.diff_indices, self.num_out)
        return self.context.program(gradient, avals, compiler_options, constants=self.constants)


class Recorder(Rewriter):
    """A policy that records the functions it is used on, and leaves them unchanged.

    Its records are taken once (`take`): JAX's caches keep the recorder itself, which was part of the settings of a
    trace.
    """

    is_used_once = True

    def __init__(self, inner: Rewriter | None = None) -> None:
        self._recorded: list[Recorded] = []
        self.inner = inner

    def take(self) -> list[Recorded]:
        """The functions, which it keeps no longer."""
        recorded, self._recorded = self._recorded, []
        return recorded

    def __repr__(self) -> str:
        return "plan"

    def rewrite(self, body: Body, name: str, num_out: int, /) -> ArrayFunction:
        def run(operands: Sequence[jax.Array], *args: jax.Array) -> Arrays:
            # Only the tracers of this call tell which inputs are differentiated and mapped: ask them now.
            floats = [(i, x) for i, x in enumerate((*operands, *args)) if is_float(x)]
            diff_indices = [i for i, x in floats if _jax.is_differentiated(x)]
            traced_floats = [i for i, x in floats if isinstance(x, _jax.Tracer)]
            constants = {i: x for i, x in enumerate(operands) if _is_embedded(x)}
            context = TraceContext.of([*operands, *args])
            self._recorded.append(Recorded(body.jaxpr, num_out, diff_indices, traced_floats, context, constants))
            return self._run(body, num_out, operands, args)

        return run

    def _run(self, body: Body, num_out: int, operands: Sequence[jax.Array], args: Sequence[jax.Array]) -> Arrays:
        return body(operands, *args)


class InnerGradientRecorder(Recorder):
    """Recorder of functions that are differentiated. Each becomes one equation: to differentiate them takes the most
    time.

    Of one that consists of a shard_map, what runs on a device is recorded. Those whose equations are in no program are
    not `taken`: brainstate traces a loss once more, to find its states.
    """

    @of_device
    def rewrite(self, body: Body, name: str, num_out: int, /) -> ArrayFunction:
        return super().rewrite(body, name, num_out)

    def _run(self, body: Body, num_out: int, operands: Sequence[jax.Array], args: Sequence[jax.Array]) -> Arrays:
        with jax.named_scope(f"{_GRADIENT}{len(self._recorded)}"):
            return _jax.deferred_call(body, [*operands, *args], [v.aval for v in body.jaxpr.outvars], num_out)


_GRADIENT = "statetx_gradient_"


def taken(recorded: Sequence[Recorded], step: Jaxpr) -> list[Recorded]:
    """Those of the recorded functions that a step differentiates, by the scopes of its equations."""
    scopes = {_jax.scope(eqn) for eqn in _jax.equations_in(step)}
    numbers = {int(n) for scope in scopes for n in re.findall(rf"{_GRADIENT}(\d+)", scope)}
    return [r for n, r in enumerate(recorded, 1) if n in numbers]


class Replace(Rewriter):
    """A policy that replaces functions by programs, which it finds by the keys of the functions."""

    def __init__(self, programs: dict[tuple[str, ...], Jaxpr], inner: Rewriter | None):
        self._bodies = {key: Body(jaxpr, []) for key, jaxpr in programs.items()}
        self.inner = inner

    @of_device
    def rewrite(self, body: Body, name: str, num_out: int, /) -> ArrayFunction:
        planned = self._bodies.get(lines_of(flatten(body.jaxpr))) if self._bodies else None
        return body if planned is None else as_planned(planned)


def gradient_of(jaxpr: Jaxpr, diff_indices: Sequence[int], num_out: int) -> Callable[..., tuple[Arrays, ...]]:
    """A function of the inputs of a jaxpr that computes its outputs, and the gradient of the first `num_out`
    of them.
    """

    def run(*inputs: jax.Array) -> tuple[Arrays, Arrays]:
        all_outs = _jax.evaluate(jaxpr, (), inputs)
        outs, new_states = all_outs[:num_out], all_outs[num_out:]

        # Outputs without a derivative and new states stay outputs, as in the user's program, so they are not temporary.
        floats = [jnp.asarray(x) for x in outs if is_float(x)]  # pyright: ignore[reportUnknownMemberType]
        return floats, [*(x for x in outs if not is_float(x)), *new_states]

    return with_pullback(run, diff_indices)


def _is_embedded(x: Any) -> bool:
    """Whether a value is a small array of one device, which a compiled program has inside. Larger ones count as
    arguments: they take memory.
    """
    return is_array(x) and not isinstance(x, _jax.Tracer) and num_bytes(x) <= _EMBEDDED and sharding_of(x) is None
