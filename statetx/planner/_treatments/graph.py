"""The choices of a region: bytes saved, bytes in use during its backward pass, cost of recomputation.

The model. A region is staged with its derivative. The backward pass reads values of the forward graph. Each is either
saved or recomputed, and recomputation needs the operands: inputs of the region, saved values, or recomputed ones. The
Pareto front of bytes and cost is found by integer programs: Checkmate's (Jain et al., MLSys 2020), within one region.
The bytes in use during the backward pass come from a walk over its equations, which takes elementwise operations to be
fused into their readers.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, NamedTuple, cast

import numpy as np

from ... import _jax
from ..._equations.compiled import Program
from ..._equations.compiler import fast_compile_options
from ..._equations.dataflow import alive_bytes, free_variables, variables_of
from ..._equations.primitives import flops, row_of
from ..._jax import Array, Arrays, Eqn, Jaxpr, Var
from ..._lift.context import TraceContext, device_bytes
from ..._remat import decide, mark
from ..._remat.policy import Policy
from ..._tree import is_float
from .._program.fusions import between_fusions
from .._program.values import (
    KEEP,
    ON_HOST,
    Address,
    BackwardPass,
    Formats,
    ForwardPass,
    InFormat,
    Way,
    derivative_of,
    labels_of,
    smallest,
    values_of,
    without_identities,
)
from .._tuned import TUNED
from .treatment import Decision, Option, Saved, pareto_front

_PLANNED = -1  # the region number of the planner's marks; policies' numbers count from 0


class Graph:
    """A region with its derivative.

    Args:
        jaxpr: the region.
        is_computed: for each input, whether the program computes it, so that its cotangent takes temporary memory.
        is_differentiated: for each input, whether it has a tangent.
        has_cotangent: for each output, whether it gets a cotangent.
        context: the transforms and shardings that the region runs under.
        formats: the allowed storage formats of saved values.
        is_step: whether the region is a step of a loop. A loop stacks what its steps save, also if it stacks their
            outputs.
        keeps_fusions: whether only values `between_fusions` are saved, and those as bits.
    """

    def __init__(
        self,
        jaxpr: Jaxpr,
        is_computed: Sequence[bool],
        is_differentiated: Sequence[bool],
        has_cotangent: Sequence[bool],
        context: TraceContext = TraceContext(),  # noqa: B008
        formats: Formats = (),
        is_step: bool = False,
        keeps_fusions: bool = False,
    ):
        self.jaxpr = jaxpr
        self._context = context.for_other_inputs()
        diff_indices = [i for i, v in enumerate(jaxpr.invars) if is_differentiated[i] and is_float(v.aval)]
        out_indices = [i for i, v in enumerate(jaxpr.outvars) if has_cotangent[i] and is_float(v.aval)]
        self.diff_indices = frozenset(diff_indices)
        self._is_computed = [is_computed[i] for i in diff_indices]

        # Differentiated with every value marked, for choices of what to save. Without the marks it is the derivative of
        # the baseline.
        self.sites, self._results_of_rules = values_of(jaxpr)
        names = {address: ".".join(map(str, address)) for address in self.sites}
        marked = mark.mark(jaxpr, labels_of(names), region=_PLANNED)
        self._forward, self._backward = derivative_of(marked, diff_indices, out_indices)
        plain, self._baseline_backward = without_identities(self._forward, self._backward, _is_planned_mark)
        self._baseline_residuals = plain.computed_residuals
        self.residual_inputs = [i for i, v in enumerate(plain.inputs) if v in plain.residuals]

        # Only marks that residuals depend on become candidates: saving any other value spares no recomputation.
        needed = self._forward.needed()
        self._address_of: dict[Var, Address] = {}
        for eqn in needed:
            if _is_planned_mark(eqn):
                self._address_of[eqn.outvars[0]] = tuple(map(int, eqn.params["what"].split(".")))

        # An output of the region is an input of others, and counted there: saving it takes no further bytes.
        outputs = set[Var]() if is_step else {v for v in jaxpr.outvars if isinstance(v, Var)}
        self._output_addresses = {a for a, site in self.sites.items() if site.eqn.outvars[a[-1]] in outputs}

        # The values worth storing in fewer bits; not outputs, which are in memory for other regions.
        self.smaller: dict[Address, InFormat] = {}
        largest = max((device_bytes(site.value.type) for site in self.sites.values()), default=0)
        for address in set(self._address_of.values()):
            value = self.sites[address].value
            way = smallest(value.type, formats, is_bits=value.is_bits)
            if way is not None and self.num_bytes(address) - self.num_bytes(address, way) > TUNED.negligible * largest:
                self.smaller[address] = way
        self._programs: dict[Saved | None, Program] = {}  # that `measure` is to read

        # The values that options may save; stock policies save others, too.
        self._savable = set(self._address_of.values())
        worth = between_fusions(jaxpr) if keeps_fusions else None
        if worth is not None:
            self._savable = {
                a for a in self._savable if len(a) == 4 or a in self.smaller or jaxpr.eqns[a[0]].outvars[a[1]] in worth
            }

        # The differentiated equations have more cost than the region's own: they also compute the coefficients of the
        # derivative.
        self.costs = {eqn: flops(eqn) for eqn in needed}
        self.residual_cost = sum(self.costs.values())

    # -- options --

    def front_finder(
        self, offload: bool = False, deadline: Callable[[], bool] = lambda: False
    ) -> Callable[[], list[Option]]:
        """A function that finds the Pareto front of the rematerialized region, from the option that saves all it needs
        to the one that saves nothing. The baseline is no part of it: where its residuals are values that an option may
        keep, it has the same bytes at no cost, but no loop can be nested with it. The function traces nothing, so that
        another thread may call it.

        Points are missing after a `deadline`, in the front of a region with many values, which is sampled, and where
        `TUNED.options` or the limits of the solver end the enumeration. All of this errs towards more cost and
        memory: a plan may recompute more than it must, and a budget near the least memory may be refused. Bytes and
        cost of each option always belong to its own set of values.

        Args:
            offload: whether values may be stored in host memory.
            deadline: whether time is up.
        """
        program = self._integer_program(offload) if self.sites and self.costs else None
        return functools.partial(self._front, program, deadline)

    def _front(self, program: IntegerProgram | None, deadline: Callable[[], bool]) -> list[Option]:
        options = [self.option({})]
        if program is None:
            return pareto_front(options)

        # From the cheapest option downwards: each must save fewer bytes than the one before it.
        limit, total = np.inf, None
        while len(options) < TUNED.options - 1 and not deadline():
            solution = program.solve(limit)
            if solution is None:
                break
            option = self.option(solution)
            options.append(option)
            total = total or max(option.saved_bytes, 1)
            if option.saved_bytes == 0:
                break
            # A short front is enumerated point by point. A long one is sampled at distances of equal bytes.
            is_sampled = len(self._savable) > TUNED.options // 2
            limit = option.saved_bytes - max(1, total // TUNED.options if is_sampled else 1)
        return pareto_front(options)

    def _integer_program(self, offload: bool) -> IntegerProgram:
        storages: dict[Address, dict[Way, Storage]] = {}
        for address in sorted(self._savable):
            aval, num_bytes = self.sites[address].value.type, self.num_bytes(address)
            storages[address] = {KEEP: Storage(num_bytes, 0.0, num_bytes)}
            if (way := self.smaller.get(address)) is not None:
                storages[address][way] = Storage(way.num_bytes(aval), way.cost(aval), way.num_bytes(aval))
            if offload:
                storages[address][ON_HOST] = Storage(0, 0.0, 2 * num_bytes)
        return IntegerProgram(self._forward, self.costs, self._address_of, storages)

    def option(self, saved: Mapping[Address, Way]) -> Option:
        """The region, saving these values in these ways."""
        recomputed = self._recomputed(saved.keys())
        types = {address: self.sites[address].value.type for address in saved}
        saved_bytes = sum(self.num_bytes(address, way) for address, way in saved.items())
        cost = sum(self.costs[eqn] for eqn in recomputed) + sum(way.cost(types[a]) for a, way in saved.items())
        fetched = [self.num_bytes(a) for a, way in saved.items() if way.is_read_early]
        decoded = [way.read_bytes(types[a]) for a, way in saved.items() if not way.is_read_early]
        read_bytes = sum(fetched) + max(decoded, default=0)
        backward_bytes = self._peak_bytes(self._backward, recomputed)
        return Option(saved_bytes, backward_bytes + read_bytes, cost, Decision(frozenset(saved.items())))

    def inputs_read(self, decision: Decision) -> set[int]:
        """The inputs, by index, that the backward pass of an option reads, to compute values again or itself."""
        if decision.saved is None:
            return set(self.residual_inputs)
        forward = self._forward
        read = {v for eqn in self._recomputed(decision.addresses) for v in variables_of(eqn)}
        return {i for i, v in enumerate(forward.inputs) if v in read or v in forward.residuals}

    def baseline(self) -> Option:
        """The region without rematerialization."""
        saved_bytes = sum(device_bytes(v.aval) for v in self._baseline_residuals)
        return Option(saved_bytes, self._peak_bytes(self._baseline_backward, []), 0.0, Decision())

    def by_policy(self, policy: Policy) -> Option:
        """The region under a policy."""
        # A result of a rule is judged by the equation that computes it there, as by the policy itself.
        sites = self.sites | self._results_of_rules
        return self.option(dict.fromkeys(decide.decide(policy, list(sites.values())), KEEP))

    def num_bytes(self, address: Address, way: Way = KEEP) -> int:
        """Bytes of a saved value between the passes. An output is in memory for other regions, unless it is in fewer
        bits.
        """
        is_held = way is KEEP and address in self._output_addresses
        return 0 if is_held else way.num_bytes(self.sites[address].value.type)

    def _recomputed(self, saved: Container[Address]) -> list[Eqn]:
        """The equations that run again, in order, where these values are saved."""
        return self._forward.needed({v for v, address in self._address_of.items() if address in saved})

    # -- memory in use --

    def _peak_bytes(self, backward: BackwardPass, recomputed: Sequence[Eqn]) -> int:
        """The most bytes live at a time during recomputation and the backward pass after it.

        Errs in both directions, by up to half (decision 9): XLA's fusions and its order of the equations are unknown
        here. So it orders the options, and `measure` replaces it for the chosen ones.
        """
        eqns = [*recomputed, *backward.jaxpr.eqns]
        forward_variable = dict(zip(backward.residuals, backward.forward_residuals, strict=True))
        resolve: Callable[[Var], Var] = lambda v: forward_variable.get(v, v)

        # The cotangent of an input that the program does not compute, such as a parameter, is an output of the whole
        # program. Outputs have their own memory, so it is not temporary.
        uncounted = {
            v for v, c in zip(backward.jaxpr.outvars, self._is_computed, strict=True) if not c and isinstance(v, Var)
        }
        outputs = {v for v in backward.jaxpr.outvars if isinstance(v, Var)} - uncounted

        # Last uses, and the values that must be in memory because an equation that does not fuse reads them.
        last_use: dict[Var, int] = {}
        in_memory: set[Var] = set(outputs)
        for i, eqn in enumerate(eqns):
            fuses = row_of(eqn).fuses or row_of(eqn).reads_fused
            last_use |= dict.fromkeys(map(resolve, variables_of(eqn)), i)
            if not fuses:
                in_memory.update(map(resolve, variables_of(eqn)))
        last_use |= dict.fromkeys(outputs, len(eqns))

        # A fused value is computed where it is read: its operands live until then. Readers come first in this order, so
        # the last use of a fused value is final before it is passed on to its operands.
        for eqn in reversed(eqns):
            if row_of(eqn).fuses:
                for v in eqn.outvars:
                    if v not in in_memory:
                        for u in map(resolve, variables_of(eqn)):
                            last_use[u] = max(last_use[u], last_use.get(v, -1))

        # Allocated at the equation that computes it, freed after its last use: an equation holds operands and outputs.
        # XLA may reuse a buffer in place, so this errs high.
        held = [(0, v) for v in backward.cotangents]
        for i, eqn in enumerate(eqns):
            counted = (v for v in eqn.outvars if v in last_use and v not in uncounted)
            held += [(i, v) for v in counted if v in in_memory or not row_of(eqn).fuses]
        spans = ((i, last_use.get(v, i), device_bytes(v.aval)) for i, v in held)
        return int(alive_bytes(len(eqns) + 1, spans).max())

    def measure(self, option: Option) -> Option:
        """Return the option with the backward bytes of the region's backward pass, compiled on its own."""
        decision = option.decision
        program = self.program(decision)
        del self._programs[decision.saved]
        # Cotangents and offloaded values are arguments and outputs of this program; within the whole they are
        # temporary. The context maps the program over all examples of a `vmap`, and the model counts one of them.
        backward = self._baseline_backward if decision.saved is None else self._backward
        temp_bytes = program.cost.temp_bytes // self._context.num_examples
        out_cotangents = [
            v for v, c in zip(backward.jaxpr.outvars, self._is_computed, strict=True) if c and isinstance(v, Var)
        ]
        cotangent_bytes = sum(device_bytes(v.aval) for v in (*backward.cotangents, *out_cotangents))
        offloaded_bytes = sum(self.num_bytes(a) for a, way in decision.saved or () if way.is_read_early)
        return option._replace(backward_bytes=temp_bytes + cotangent_bytes + offloaded_bytes)

    def program(self, decision: Decision) -> Program:
        """The region's backward pass, to be compiled; kept until the option is measured."""
        if decision.saved not in self._programs:
            self._programs[decision.saved] = self._program(decision)
        return self._programs[decision.saved]

    def _program(self, decision: Decision) -> Program:
        if decision.saved is None:
            backward, recomputed, saved = self._baseline_backward, [], self._baseline_residuals
        else:
            addresses = decision.addresses
            backward, recomputed = self._backward, self._recomputed(addresses)
            saved = [v for v, address in self._address_of.items() if address in addresses]

        # Everything that is not recomputed is an argument of this program and takes no temporary memory in it: saved
        # values and inputs of the region are counted by `Choice.peak`. Values in fewer bits are arguments in their
        # stored form.
        computed = {v for e in recomputed for v in e.outvars}
        inputs = dict.fromkeys(free_variables(recomputed))
        inputs |= dict.fromkeys(v for v in [*backward.forward_residuals, *saved] if v not in computed)
        by_address = dict(decision.saved or ())
        ways = {v: by_address.get(address, KEEP) for v, address in self._address_of.items()}
        ways |= {self._forward.inputs[i]: way for i, way in decision.inputs.items()}
        types = [ways.get(v, KEEP).stored_type(v.aval) for v in inputs]

        recomputation = _jax.rebuild(
            self._forward.jaxpr, invars=list(inputs), outvars=backward.forward_residuals, eqns=recomputed
        )

        def run(arrays: Sequence[Array], cts: Sequence[Array]) -> Arrays:
            pairs = zip(inputs, arrays, strict=True)
            values = [ways.get(v, KEEP).decode(x, v.aval) for v, x in pairs]
            residuals = _jax.interpret(recomputation, values, lambda eqn, ins: _jax.bind_equation(eqn, eqn.params, ins))
            return _jax.evaluate(backward.jaxpr, (), [*residuals, *cts])

        num = len(types)
        avals = [*types, *(v.aval for v in backward.cotangents)]
        return self._context.program(lambda *xs: run(xs[:num], xs[num:]), avals, fast_compile_options())


def _is_planned_mark(eqn: Eqn) -> bool:
    return eqn.primitive is _jax.mark_primitive and eqn.params["region"] == _PLANNED


# -- which values to save, and which equations to run again ------------------------------------------------------------

# The limit of HiGHS for one integer program; `IntegerProgram.solve` says which way it errs. In nodes of its search tree
# rather than seconds: a loaded machine would get another plan. Most programs take one node.
_MAX_NODES = 500


class Storage(NamedTuple):
    """Cost of holding a value in some way.

    Attributes:
        num_bytes: on the device between the passes.
        cost: operations of holding it so, and of reading it.
        moved_bytes: of equal costs the fewest of these are held.
    """

    num_bytes: int
    cost: float
    moved_bytes: int


class IntegerProgram:
    """Choice of the values to save, and the equations to run again, at the least cost.

    Variables are binary: run[i] for each needed equation, hold[a, w] for each address and way to hold its value. A
    value v is available if its equation runs or it is held: available(v) = run[producer(v)] + sum of hold[a, w].
    Minimize the cost of what runs, and of holding, such that

        available(v) >= 1                    for each residual v,
        available(u) - run[i] >= 0           for each operand u of equation i that an equation computes,
        sum of bytes(a, w) hold[a, w] <= limit     (the last row).

    Args:
        forward: the forward pass of the region.
        costs: of the equations that its residuals depend on.
        address_of: the addresses of the variables that may be saved.
        storages: the storage for each address and each way to hold its value.
    """

    def __init__(
        self,
        forward: ForwardPass,
        costs: Mapping[Eqn, float],
        address_of: Mapping[Var, Address],
        storages: Mapping[Address, Mapping[Way, Storage]],
    ):
        from scipy.sparse import lil_array  # pyright: ignore[reportMissingTypeStubs]

        pairs = {(a, way): storage for a, ways in storages.items() for way, storage in ways.items()}
        column: dict[Any, int] = {eqn: n for n, eqn in enumerate(costs)}
        column |= {pair: len(column) + n for n, pair in enumerate(pairs)}
        self._column = {pair: column[pair] for pair in pairs}

        def available(v: Var) -> dict[int, float]:
            address = address_of.get(v)
            ways = () if address is None else storages.get(address, ())
            columns = [column[forward.producer[v]], *(column[address, way] for way in ways)]
            return dict.fromkeys(columns, 1.0)

        # A row for each condition: its coefficients by column, and its least value.
        rows = [(available(v), 1.0) for v in forward.computed_residuals]
        for eqn in costs:
            for v in variables_of(eqn):
                if v in forward.producer:
                    rows.append((available(v) | {column[eqn]: -1.0}, 0.0))
        # In units of the common divisor the last row keeps its exact meaning: HiGHS lets a binary variable be off by
        # 1e-6, so that with large numbers it took a byte too much for allowed, and printed that it tries again.
        self._unit = math.gcd(*(storage.num_bytes for storage in pairs.values())) or 1
        rows.append(({column[pair]: storage.num_bytes // self._unit for pair, storage in pairs.items()}, -np.inf))
        matrix = lil_array((len(rows), len(column)))
        for r, (coefficients, _) in enumerate(rows):
            for c, x in coefficients.items():
                matrix[r, c] = x
        self._matrix, self._lower = matrix.tocsr(), np.array([least for _, least in rows])

        # The objective is scaled to the most expensive equation, so that small terms in proportion to it can break
        # ties: of equal costs, save fewer bytes, then fewer values; and where a fetch is free, save on the device
        # rather than the host. They add up to at most 1e-6, plus 2e-9 for each value. The gap of HiGHS may be
        # coarser: a solution that saves too much for its cost is then dominated by a later one of the front.
        run_costs = np.array(list(costs.values()))
        scale = max(run_costs.max(initial=0.0), 1e-30)
        objective = np.zeros(len(column))
        objective[: len(costs)] = run_costs / scale
        total = max(float(sum(max(s.moved_bytes for s in ways.values()) for ways in storages.values())), 1.0)
        for pair, storage in pairs.items():
            tie = 1e-6 * storage.moved_bytes / total + 1e-9 * (2 if pair[1].is_read_early else 1)
            objective[column[pair]] = storage.cost / scale + tie
        self._objective = objective

    def solve(self, limit: float) -> dict[Address, Way] | None:
        """Return the values to save, at most `limit` bytes of them on the device; None if it is infeasible.

        After `_MAX_NODES` HiGHS returns its best solution so far, which may cost more than the optimum, or none, which
        counts as infeasible. `Plan.complete` does not tell: it is about the user's time limit. The
        constraints hold in any case: a plan may cost more, or a tight budget be refused, but none is exceeded.
        """
        from scipy.optimize import Bounds, LinearConstraint, milp  # pyright: ignore

        if limit < 0:
            return None
        upper = np.full(len(self._lower), np.inf)
        upper[-1] = np.floor(limit / self._unit)  # of infinity, infinity
        constraint = LinearConstraint(self._matrix, self._lower, upper)  # pyright: ignore[reportArgumentType]
        options = {"node_limit": _MAX_NODES}
        integrality, bounds = np.ones(len(self._objective)), Bounds(0, 1)
        result = cast(
            Any, milp(self._objective, integrality=integrality, bounds=bounds, constraints=constraint, options=options)
        )
        solution: np.ndarray | None = result.x
        if solution is None:
            return None

        # Integers hold to within a tolerance, so a binary variable is near 0 or 1.
        chosen: dict[Address, Way] = {}
        for (address, way), c in self._column.items():
            if solution[c] > 0.5:
                chosen.setdefault(address, way)
        return chosen
