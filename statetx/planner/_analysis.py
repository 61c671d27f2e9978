"""What a region can keep, and what each choice costs: bytes kept, bytes while it is run backwards, work done again.

The model. A region is staged with its derivative. What the backward pass reads are values of the forward graph; each is
either kept or computed again, and what is computed again needs its operands: inputs of the region, kept, or computed
again themselves. `Graph.front` gives all the choices of which no other is better in both bytes and work, by integer programs
(Checkmate, Jain et al., MLSys 2020, within one region). The bytes in use while the region is run backwards are those of a
walk over its equations, where elementwise operations are taken to be fused into what reads them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from .. import _jax
from .._equations.compiled import fast_compile_options
from .._equations.differentiate import backward_pass, forward_pass
from .._equations.inline import inline
from .._equations.primitives import JIT, row_of
from .._equations.structure import Body
from .._jax import Jaxpr, Literal, Var
from .._lift.around import Around, device_bytes
from .._loops.strategy import Strategy
from .._remat import decide, mark
from .._remat.survey import Survey
from .._tree import is_float

Address = tuple[int, int]
Price = Callable[[Any], float]
"""What it costs to run an equation."""


class Option(NamedTuple):
    """One way to treat a region.

    Attributes:
        kept: addresses (equation, output) of the values that it keeps; None if it is not rematerialised.
        kept_bytes: of what it keeps between the passes beyond its inputs.
        working_bytes: in use while it is run backwards, beyond what is kept.
        price: of what is computed again.
        offloaded: which of `kept` are stored in the host's memory.
        loop: of a loop, how its carries are stored; None for a loop as it is. `kept` is then what each step keeps.
    """

    kept: frozenset[Address] | None
    kept_bytes: int
    working_bytes: int
    price: float
    offloaded: frozenset[Address] = frozenset()
    loop: Strategy | None = None


_PLANNED = -1  # the region of marks that are no policy's
_SWEEP = 24  # choices of a region, at most


class Graph:
    """A region with its derivative.

    Args:
        jaxpr: the region.
        price: of an equation.
        counted: for each input, whether it is computed in the program, so that its cotangent takes memory.
        moves: for each input, whether it is differentiated.
        pulls: for each output, whether it gets a cotangent.
        around: what it runs under.
    """

    def __init__(
        self,
        jaxpr: Jaxpr,
        price: Price,
        counted: Sequence[bool],
        moves: Sequence[bool],
        pulls: Sequence[bool],
        around: Around = Around(),  # noqa: B008
    ):
        self.jaxpr = jaxpr
        self._around = around.of_parts()
        floats = [i for i, v in enumerate(jaxpr.invars) if moves[i] and is_float(v.aval)]
        pulled = [i for i, v in enumerate(jaxpr.outvars) if pulls[i] and is_float(v.aval)]
        self._counted = [counted[i] for i in floats]
        self.sites = {site.address: site for site in Survey(jaxpr).results if len(site.address) == 2}
        named = mark.mark(jaxpr, {at: f"{at[0]}.{at[1]}" for at in self.sites}, region=_PLANNED)
        self._forward, self._num_out, self._backward = _derivative(named, floats, pulled)
        plain, num_out, self._plain_backward = _derivative(jaxpr, floats, pulled)
        self._plain_leaves = _variables(plain.outvars[num_out:], plain.invars)
        leaves = {v for v in plain.outvars[num_out:] if isinstance(v, Var)}
        self.kept_inputs = [i for i, v in enumerate(plain.invars) if v in leaves]
        self._made = {v: i for i, e in enumerate(self._forward.eqns) for v in e.outvars}
        self._leaves = _variables(self._forward.outvars[self._num_out :], self._forward.invars)
        self._needed = self._ancestors()
        self._names: dict[Any, Address] = {}
        for i in self._needed:
            eqn = self._forward.eqns[i]
            if eqn.primitive is _jax.mark_primitive and eqn.params["region"] == _PLANNED:
                equation, output = eqn.params["what"].split(".")
                self._names[eqn.outvars[0]] = (int(equation), int(output))
        outputs = {v for v in jaxpr.outvars if isinstance(v, Var)}
        # What the region gives to others is there already where they keep what they read.
        self._is_output = {at for at, site in self.sites.items() if site.eqn.outvars[at[1]] in outputs}
        self.prices = {i: price(self._forward.eqns[i]) for i in self._needed}
        self.forward_price = sum(map(price, jaxpr.eqns))

    def _ancestors(self) -> list[int]:
        work, seen = list(self._leaves), set()
        while work:
            i = self._made.get(work.pop())
            if i is not None and i not in seen:
                seen.add(i)
                work += [v for v in self._forward.eqns[i].invars if isinstance(v, Var)]
        return sorted(seen)

    # -- options --

    def front(self, *, offload: float | None = None, deadline: Callable[[], bool] = lambda: False) -> list[Option]:
        """The choices that no other betters, from the one that keeps all it needs to the one that keeps nothing.

        Args:
            offload: what it costs to bring a byte from the host's memory; None if nothing goes there.
            deadline: whether time is up.
        """
        options = [self.untouched(), self.option(frozenset())]
        if not self.sites or not self._needed:
            return undominated(options)
        program = _Choice(self, offload)
        limit, total = np.inf, None
        while len(options) < _SWEEP and not deadline():
            found = program.solve(limit)
            if found is None:
                break
            kept, offloaded = found
            option = self.option(kept, offloaded, offload or 0.0)
            options.append(option)
            total = total or max(option.kept_bytes, 1)
            if option.kept_bytes == 0:
                break
            # Every step of the front where there are few; else so that it is swept in even steps.
            limit = option.kept_bytes - max(1, total // _SWEEP if len(self._names) > 12 else 1)
        return undominated(options)

    def option(
        self, kept: frozenset[Address], offloaded: frozenset[Address] = frozenset(), per_byte: float = 0.0
    ) -> Option:
        """The region, keeping these values."""
        again = self._computed_again(kept)
        kept_bytes = sum(self.bytes_of(at) for at in kept - offloaded)
        price = sum(self.prices[i] for i in again) + per_byte * sum(self.bytes_of(at) for at in offloaded)
        back = sum(self.bytes_of(at) for at in offloaded)
        return Option(kept, kept_bytes, self._working(again) + back, price, offloaded)

    def untouched(self) -> Option:
        """The region without rematerialisation."""
        kept = sum(device_bytes(v.aval) for v in self._plain_leaves)
        return Option(None, kept, self._walk(self._plain_backward, []), 0.0)

    def by_policy(self, policy: Any) -> Option:
        """The region, keeping what a policy says."""
        labels = decide.decide(policy, list(self.sites.values()))
        return self.option(frozenset((at[0], at[1]) for at in labels))

    def bytes_of(self, address: Address) -> int:
        return 0 if address in self._is_output else device_bytes(self.sites[address].value.type)

    def _computed_again(self, kept: frozenset[Address]) -> list[int]:
        have = {v for v, at in self._names.items() if at in kept}
        work, again = list(self._leaves), set()
        while work:
            v = work.pop()
            i = self._made.get(v)
            if v in have or i is None or i in again:
                continue
            again.add(i)
            work += [u for u in self._forward.eqns[i].invars if isinstance(u, Var)]
        return sorted(again)

    # -- memory in use --

    def _working(self, again: Sequence[int]) -> int:
        return self._walk(self._backward, [self._forward.eqns[i] for i in again])

    def _walk(self, backward: _Backward, again: Sequence[Any]) -> int:
        """The most bytes in use at a time, while what is to be computed again is, and then the backward pass."""
        eqns = [*again, *backward.jaxpr.eqns]
        alias = dict(zip(backward.residuals, backward.leaves, strict=True))
        read = lambda v: alias.get(v, v)  # noqa: E731
        uncounted = {v for v, c in zip(backward.outs, self._counted, strict=True) if not c and isinstance(v, Var)}
        outputs = {v for v in backward.outs if isinstance(v, Var)} - uncounted
        last: dict[Any, int] = {}
        is_read: set[Any] = set(outputs)
        for i, eqn in enumerate(eqns):
            fuses = row_of(eqn).fuses or row_of(eqn).reads_fused
            for v in eqn.invars:
                if isinstance(v, Var):
                    last[read(v)] = i
                    if not fuses:
                        is_read.add(read(v))
        last |= dict.fromkeys(outputs, len(eqns))
        # A fused value lives through what it is made of, as long as it is read.
        for eqn in reversed(eqns):
            if row_of(eqn).fuses:
                for v in eqn.outvars:
                    if v not in is_read:
                        for u in eqn.invars:
                            if isinstance(u, Var):
                                last[read(u)] = max(last[read(u)], last.get(v, -1))
        live = sum(device_bytes(v.aval) for v in backward.cotangents)
        ends: dict[int, int] = {}
        for v in backward.cotangents:
            at = last.get(v, 0)
            ends[at] = ends.get(at, 0) + device_bytes(v.aval)
        most = live
        for i, eqn in enumerate(eqns):
            fused = row_of(eqn).fuses
            for v in eqn.outvars:
                if v in uncounted or (fused and v not in is_read) or v not in last:
                    continue
                live += device_bytes(v.aval)
                ends[last[v]] = ends.get(last[v], 0) + device_bytes(v.aval)
            most = max(most, live)
            live -= ends.get(i, 0)
        return most

    def measure(self, option: Option) -> Option:
        """The option with the bytes in use that the compiled backward pass of the region has, on its own."""
        if option.kept is None:
            back, again, have = self._plain_backward, [], self._plain_leaves
        else:
            back, again = self._backward, [self._forward.eqns[i] for i in self._computed_again(option.kept)]
            have = [v for v, at in self._names.items() if at in option.kept]
        made = {v for e in again for v in e.outvars}
        inputs = dict.fromkeys(v for e in again for v in e.invars if isinstance(v, Var) and v not in made)
        inputs |= dict.fromkeys(v for v in [*back.leaves, *have] if v not in made)
        recomputation = _jax.rebuild(self._forward, invars=list(inputs), outvars=back.leaves, eqns=again)

        def run(given: Sequence[Any], cts: Sequence[Any]) -> list[Any]:
            residuals = _jax.interpret(recomputation, given, lambda eqn, ins: _jax.bind_equation(eqn, eqn.params, ins))
            return _jax.evaluate(back.jaxpr, (), [*residuals, *cts])

        avals = [v.aval for v in (*inputs, *back.cotangents)]
        program = self._around.program(
            lambda *xs: run(xs[: len(inputs)], xs[len(inputs) :]), avals, fast_compile_options()
        )
        temp = program.cost.temp_bytes // self._around.num_examples
        counted = [v for v, c in zip(back.outs, self._counted, strict=True) if c and isinstance(v, Var)]
        ends = sum(device_bytes(v.aval) for v in (*back.cotangents, *counted))
        back_bytes = sum(self.bytes_of(at) for at in option.offloaded)
        return option._replace(working_bytes=temp + ends + back_bytes)


@dataclasses.dataclass(frozen=True)
class _Backward:
    """A backward pass: its inputs are residuals, which are `leaves` of the forward pass, and cotangents."""

    jaxpr: Jaxpr
    residuals: list[Any]
    leaves: list[Any]
    cotangents: list[Any]

    @property
    def outs(self) -> list[Any]:
        return list(self.jaxpr.outvars)


def _derivative(jaxpr: Jaxpr, floats: Sequence[int], pulled: Sequence[int]) -> tuple[Jaxpr, int, _Backward]:
    """A region's outputs `pulled` with the residuals as further outputs, and the backward pass from them to `floats`."""

    def run(*inputs: Any) -> list[Any]:
        outs = _jax.evaluate(jaxpr, (), inputs)
        return [jnp.asarray(outs[i]) for i in pulled]

    in_avals = [v.aval for v in jaxpr.invars]
    forward = forward_pass(run, in_avals, floats, kind="statetx.plan", name="forward")
    whole = inline(forward.body.jaxpr, calls=JIT, deep=False)
    leaves = whole.outvars[len(pulled) :]
    leaf_avals, out_avals = [v.aval for v in leaves], [v.aval for v in whole.outvars[: len(pulled)]]
    back = Body.close(*backward_pass(forward.pullback, leaf_avals, out_avals, kind="statetx.plan", name="backward"))
    flat = inline(_bind_literals(back, leaves), calls=JIT, deep=False)
    residuals = [v for v in leaves if isinstance(v, Var)]
    num = len(residuals)
    split = _Backward(flat, flat.invars[:num], residuals, flat.invars[num:])
    return whole, len(pulled), split


def _bind_literals(back: Body, leaves: Sequence[Any]) -> Jaxpr:
    """The backward pass without dead code; what it closes over, and residuals that are literals, are written into it."""
    values: list[Any] = [Literal(x, v.aval) for x, v in zip(back.operands, back.jaxpr.invars, strict=False)]
    values += leaves
    given = {v: a for v, a in zip(back.jaxpr.invars, values, strict=False) if isinstance(a, Literal)}
    return _jax.without_dead_code(_jax.with_literals(back.jaxpr, given))


def _variables(atoms: Sequence[Any], inputs: Sequence[Any]) -> list[Any]:
    """The distinct ones that are no inputs."""
    given = set(inputs)
    return list({v: None for v in atoms if not isinstance(v, Literal) and v not in given})


def undominated(options: Sequence[Option]) -> list[Option]:
    """The options to which no other is preferable, the dearest last."""
    found: list[Option] = []
    for option in sorted(set(options), key=lambda o: (o.price, o.kept_bytes, o.working_bytes)):
        if not any(o.kept_bytes <= option.kept_bytes and o.working_bytes <= option.working_bytes for o in found):
            found.append(option)
    return found


class _Choice:
    """The integer program: which values to keep, and which equations to run again, for the least price."""

    def __init__(self, graph: Graph, offload: float | None):
        from scipy.sparse import lil_array

        self._graph = graph
        self._addresses = sorted(set(graph._names.values()))
        equations = graph._needed
        column: dict[tuple[str, Any], int] = {("run", i): n for n, i in enumerate(equations)}
        for kind in ("keep", "offload") if offload is not None else ("keep",):
            column |= {(kind, at): len(column) + n for n, at in enumerate(self._addresses)}
        self._column = column
        self._sizes = np.array([graph.bytes_of(at) for at in self._addresses], float)
        rows: list[list[tuple[int, float]]] = []
        least: list[float] = []

        def there(v: Any) -> list[tuple[int, float]]:
            given = [(column["run", graph._made[v]], 1.0)]
            at = graph._names.get(v)
            if at is not None:
                given += [(column[kind, at], 1.0) for kind in ("keep", "offload") if (kind, at) in column]
            return given

        for v in graph._leaves:
            rows.append(there(v))
            least.append(1.0)
        for i in equations:
            for v in dict.fromkeys(u for u in graph._forward.eqns[i].invars if isinstance(u, Var)):
                if v in graph._made:
                    rows.append([*there(v), (column["run", i], -1.0)])
                    least.append(0.0)
        matrix = lil_array((len(rows) + 1, len(column)))
        for r, row in enumerate(rows):
            for c, x in row:
                matrix[r, c] += x
        for at, size in zip(self._addresses, self._sizes, strict=True):
            matrix[len(rows), column["keep", at]] = size
        self._matrix, self._least = matrix.tocsr(), np.array([*least, -np.inf])
        prices = np.array([graph.prices[i] for i in equations])
        scale = max(prices.max(initial=0.0), 1e-30)
        cost = np.zeros(len(column))
        cost[: len(equations)] = prices / scale
        total = max(self._sizes.sum(), 1.0)
        for at, size in zip(self._addresses, self._sizes, strict=True):
            cost[column["keep", at]] = 1e-6 * (size / total) + 1e-9  # of equal prices the one that keeps less
            if ("offload", at) in column:
                cost[column["offload", at]] = size * (offload or 0.0) / scale + 2e-6 * (size / total) + 2e-9
        self._cost = cost

    def solve(self, limit: float) -> tuple[frozenset[Address], frozenset[Address]] | None:
        """The values to keep, at most `limit` bytes of them on the device, and those of them that go to the host."""
        from scipy.optimize import Bounds, LinearConstraint, milp

        if limit < 0:
            return None
        most = np.full(len(self._least), np.inf)
        most[-1] = limit
        constraint = LinearConstraint(self._matrix, self._least, most)  # pyright: ignore[reportArgumentType]
        options = {"time_limit": 5.0, "mip_rel_gap": 1e-4}
        found = milp(
            self._cost,
            constraints=constraint,
            bounds=Bounds(0, 1),
            integrality=np.ones(len(self._cost)),
            options=options,
        )
        if found.x is None:
            return None
        chosen = {key: found.x[c] > 0.5 for key, c in self._column.items()}
        offloaded = frozenset(at for at in self._addresses if chosen.get(("offload", at)))
        kept = frozenset(at for at in self._addresses if chosen["keep", at]) | offloaded
        return kept, offloaded
