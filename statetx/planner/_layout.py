"""A program cut into parts, the options of each, and the choice among them that costs least within a limit."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .. import _jax
from .._equations.structure import Body
from .._jax import Jaxpr, Literal
from .._lift.around import Around, device_bytes
from .._loops import schedule
from .._loops.checkpointed import Scheduled
from .._loops.nested import Step, nested
from .._loops.strategy import Lengths, Slots
from .._remat import decide, fence, mark
from .._remat.policy import Marks
from ._analysis import Graph, Option, Price, undominated
from ._parts import Part, moving_variables, pulled_variables, run, split

_STATES = 16384  # pairs of kept bytes and price that a choice is looked for among


class Layout:
    """One way to cut a program.

    Args:
        jaxpr: the program, flat.
        cuts: see `split`.
        chosen: the inputs with respect to which it is differentiated.
        num_out: how many of its outputs are: the first.
        fronts: kept from other layouts of the same program, by part.

    Attributes:
        parts, fronts: the parts, and what can be done with each.
        base: for each part the bytes that must be there when it is run backwards, whatever is chosen: the inputs of it
            and of the parts before it that are computed in the program.
    """

    _version: list[int] | None = None  # of the fronts that `_figures` and `_chosen` are of
    _figures: list[np.ndarray]
    _chosen: dict[float, list[Option] | None]

    def __init__(
        self,
        jaxpr: Jaxpr,
        cuts: Sequence[int] | None,
        chosen: Sequence[int],
        num_out: int,
        *,
        price: Price,
        policies: Sequence[Any],
        offload: float | None,
        deadline: Callable[[], bool],
        fronts: dict[Any, Front],
        around: Around,
    ):
        self.jaxpr = jaxpr
        self.cuts = cuts
        self.parts = split(jaxpr, cuts)
        self.fronts: list[Front] = []
        computed = {v for e in jaxpr.eqns for v in e.outvars}
        moving = moving_variables(jaxpr, chosen)
        pulled = pulled_variables(jaxpr, num_out)
        first: dict[Any, int] = {}
        for i, part in enumerate(self.parts):
            variables = [None if isinstance(v, Literal) else v for v in part.invars]
            counted = tuple(v in computed for v in variables)
            moves = tuple(v in moving for v in variables)
            pulls = tuple(v in pulled for v in part.outvars)
            key = (part.key, counted, moves, pulls)
            if key not in fronts:
                fronts[key] = _front(part, counted, moves, pulls, price, policies, offload, deadline, around)
            self.fronts.append(fronts[key])
            for v, c in zip(variables, counted, strict=True):
                if c:
                    first.setdefault(v, i)
        added = [0] * len(self.parts)
        for v, i in first.items():
            added[i] += device_bytes(v.aval)
        self.base = np.cumsum(added).tolist()

    @property
    def options(self) -> list[list[Option]]:
        """For each part what can be done with it."""
        return [front.options for front in self.fronts]

    def stock(self, number: int) -> list[Option]:
        """For each part what the policy with this number does."""
        return [front.stock[number] for front in self.fronts]

    # -- the model --

    def peak(self, options: Sequence[Option]) -> int:
        """The most bytes in use while any part is run backwards."""
        kept, most = 0, 0
        for base, option in zip(self.base, options, strict=True):
            kept += option.kept_bytes
            most = max(most, base + kept + option.working_bytes)
        return most

    def peak_part(self, options: Sequence[Option]) -> tuple[int, int]:
        """The part during whose backward pass most is in use, and the bytes that the parts before it keep then."""
        sums = np.cumsum([0, *(o.kept_bytes for o in options)])
        in_use = [b + s + o.kept_bytes + o.working_bytes for b, s, o in zip(self.base, sums, options, strict=False)]
        part = int(np.argmax(in_use))
        return part, int(sums[part])

    def least_peak(self) -> int:
        """The lowest limit within which there is a choice."""
        low, high = 0, max(1, self.peak([min(o, key=lambda x: x.kept_bytes + x.working_bytes) for o in self.options]))
        while high - low > max(1, high // 10_000):
            middle = (low + high) // 2
            low, high = (low, middle) if self._fits(middle) else (middle, high)
        return high

    def _fits(self, limit: float) -> bool:
        kept = 0
        for base, options in zip(self.base, self.options, strict=True):
            fitting = [o.kept_bytes for o in options if base + kept + o.kept_bytes + o.working_bytes <= limit]
            if not fitting:
                return False
            kept += min(fitting)
        return True

    def choose(self, limit: float) -> list[Option] | None:
        """The options of least price within a limit, None if nothing fits: an exact dynamic program over the parts.

        Of what is kept so far and what it cost, every pair is followed to which no other is preferable (of more than
        `_STATES`, some).
        """
        version = [front.version for front in self.fronts]
        if version != self._version:
            self._version, self._chosen = version, {}
            self._figures = [np.array([o[1:4] for o in options], float).T[:, :, None] for options in self.options]
        if limit not in self._chosen:
            self._chosen[limit] = self._choose(limit)
        return self._chosen[limit]

    def _choose(self, limit: float) -> list[Option] | None:
        kept, price = np.zeros(1), np.zeros(1)  # the cheapest first
        steps: list[tuple[np.ndarray, np.ndarray]] = []
        for base, (sizes, working, prices) in zip(self.base, self._figures, strict=True):
            new_kept = kept + sizes
            option, before = np.nonzero(new_kept <= limit - base - working)
            if not len(before):
                return None
            new_kept = new_kept[option, before]
            new_price = (price + prices)[option, before]
            order = np.argsort(new_price, kind="stable")  # of as many sorted runs as there are options
            ordered = new_kept[order]
            order = order[np.concatenate([[True], ordered[1:] < np.minimum.accumulate(ordered)[:-1]])]
            if len(order) > _STATES:
                order = order[np.unique(np.linspace(0, len(order) - 1, _STATES).astype(int))]
            kept, price = new_kept[order], new_price[order]
            steps.append((before[order], option[order]))
        at, chosen = 0, []
        for (before, option), options in zip(reversed(steps), reversed(self.options), strict=True):
            chosen.append(options[option[at]])
            at = before[at]
        return chosen[::-1]

    # -- the program --

    def rewrite(self, options: Sequence[Option]) -> Jaxpr:
        """The program with its parts treated like this."""
        return rewrite(self.jaxpr, self.parts, options)


def rewrite(jaxpr: Jaxpr, parts: Sequence[Part], options: Sequence[Option]) -> Jaxpr:
    """A program of which each part is treated as its option says."""
    made: dict[Any, Callable | None] = {}
    how = []
    for part, option in zip(parts, options, strict=True):
        key = (part.key, option.kept, option.offloaded, option.loop)
        if key not in made:
            made[key] = _loop(part, option) if part.eqn is not None else _region(part, option)
        how.append(made[key])
    avals = [v.aval for v in jaxpr.invars]
    body = Body.close(
        *_jax.stage(lambda *args: run(jaxpr, parts, how, args), avals, kind="statetx.plan", name="planned")
    )
    assert not body.operands, "rewriting a program without constants made some"
    return body.jaxpr


def marks_of(option: Option) -> dict[tuple[int, ...], str]:
    """What the option keeps, as `decide.keep` takes it."""
    offload = mark.offload("device", _jax.HOST_MEMORY)
    return {at: offload if at in option.offloaded else mark.SAVE for at in sorted(option.kept or ())}


def _region(part: Part, option: Option) -> Callable | None:
    if option.kept is None:
        return None
    # What keeps nothing is what the user's own rematerialisation is, to the letter: XLA's order of things hangs on it.
    jaxpr, policy = decide.keep(part.jaxpr, marks_of(option)) if option.kept else (part.as_given, None)
    return lambda *args: _jax.rematerialise(jaxpr, args, policy=fence.around(policy, "auto"), prevent_cse=True)


def _loop(part: Part, option: Option) -> Callable:
    step = _step(part, option)
    num_constants, num_carry = _jax.scan_counts(part.eqn)
    if option.loop is None:
        call: Callable = step.plain()
    elif isinstance(option.loop, Slots):
        call = Scheduled(step, option.loop.num, option.loop.block)
    else:
        assert isinstance(option.loop, Lengths)
        call = nested(step, option.loop.lengths)

    def loop(*args: Any) -> list[Any]:
        constants, carry, xs = args[:num_constants], args[num_constants:][:num_carry], args[num_constants + num_carry :]
        carry, ys = call(list(constants), list(carry), list(xs))
        return [*carry, *ys]

    return loop


def _step(part: Part, option: Option) -> Step:
    num_constants, num_carry = _jax.scan_counts(part.eqn)
    marks = None if option.kept is None else Marks(tuple(marks_of(option).items()))
    params = part.eqn.params
    return Step(
        Body(part.jaxpr, []),
        num_constants,
        num_carry,
        length=params["length"],
        reverse=params["reverse"],
        policy=marks,
        name="plan",
    )


# -- options ---------------------------------------------------------------------------------------------------------


class Front:
    """What can be done with a part, and with all that are like it.

    Attributes:
        untouched: the option to leave it as it is.
        options: those to which no other is preferable.
        stock: what each of the policies would do.
        version: how often something was learned.

    Args:
        steps: options of its equations; of a loop, of one step. The first leaves them as they are.
        stock: what each of the policies would do with them.
        graph: of the equations; None where nothing is left to learn.
        expand: from options of a step to those of its loop.
    """

    def __init__(
        self,
        steps: Sequence[Option],
        stock: Sequence[Option],
        graph: Graph | None = None,
        expand: Callable[[Sequence[Option]], list[Option]] = list,
    ):
        self._steps, self._stock = list(steps), list(stock)
        self._graph = graph
        self._expand = expand
        self._measured: set[Any] = set()
        self.version = 0
        self._update()

    def _update(self) -> None:
        self.untouched = self._expand(self._steps[:1])[0]
        self.stock = [self._expand([o])[-1] for o in self._stock]
        self.options = undominated([*self._expand(self._steps), *self.stock])

    def measure(self, option: Option) -> bool:
        """Learn what an option takes when it is compiled on its own; whether there was anything to learn."""
        key = option.kept, option.offloaded
        if self._graph is None or key in self._measured:
            return False
        self._measured.add(key)
        working = None
        for known in (self._steps, self._stock):
            for i, o in enumerate(known):
                if (o.kept, o.offloaded) == key:
                    working = working or self._graph.measure(o).working_bytes
                    known[i] = o._replace(working_bytes=working)
        self.version += 1
        self._update()
        return True


def _front(
    part: Part,
    counted: Sequence[bool],
    moves: Sequence[bool],
    pulls: Sequence[bool],
    price: Price,
    policies: Sequence[Any],
    offload: float | None,
    deadline: Callable[[], bool],
    around: Around,
) -> Front:
    nothing_kept = [Option(None, 0, 0, 0.0)]
    if not any(moves) or not any(pulls):
        return Front(nothing_kept, nothing_kept * len(policies))
    is_fixed = part.kind == "rest" or bool(_jax.forbidden_effects(part.jaxpr))
    if part.eqn is not None:
        num_constants, num_carry = _jax.scan_counts(part.eqn)
        counted = [num_constants <= i < num_constants + num_carry for i in range(len(part.jaxpr.invars))]
        moves = [m or c for m, c in zip(moves, counted, strict=True)]
        pulls = [p or i < num_carry for i, p in enumerate(pulls)]
        offload = None
    try:
        graph = Graph(part.jaxpr, price, counted, moves, pulls, around)
    except Exception:  # It has no derivative in reverse mode: an error where it is differentiated, and only there.
        return Front(nothing_kept, nothing_kept * len(policies))
    expand = list if part.eqn is None else functools.partial(_of_loop, part, graph, counted)
    untouched = graph.untouched()
    if is_fixed:
        return Front([untouched], [untouched] * len(policies), None, lambda steps: expand(steps)[:1])
    stock = [graph.by_policy(policy) for policy in policies]
    return Front([untouched, *graph.front(offload=offload, deadline=deadline), *stock], stock, graph, expand)


def _of_loop(part: Part, graph: Graph, is_carry: Sequence[bool], steps: Sequence[Option]) -> list[Option]:
    """What can be done with a loop whose steps can be treated so: last, the last of them and a carry for each step."""
    length, invars = part.eqn.params["length"], part.jaxpr.invars
    carry = sum(device_bytes(v.aval) for v, c in zip(invars, is_carry, strict=True) if c)
    options = []
    for step in steps:
        if step.kept is None:
            kept_carry = sum(device_bytes(invars[i].aval) for i in graph.kept_inputs if is_carry[i])
            options.append(step._replace(kept_bytes=length * (step.kept_bytes + kept_carry)))
            options += _with_slots(step, graph, length, carry)
            continue
        for inner in _inner_lengths(length):
            outer = length // inner
            working = inner * (carry + step.kept_bytes) + step.working_bytes
            again = length * (graph.forward_price + step.price)
            options.append(Option(step.kept, outer * carry, working, again, loop=Lengths(outer, inner)))
        kept = length * (carry + step.kept_bytes)
        options.append(step._replace(kept_bytes=kept, price=length * step.price, loop=Lengths(length)))
    return options


def _with_slots(step: Option, graph: Graph, length: int, carry: int) -> list[Option]:
    options, slots = [], 1
    while slots < length:
        runs = schedule.num_evaluations(length, slots) - length
        working = step.working_bytes + step.kept_bytes + 2 * carry
        options.append(Option(None, slots * carry, working, runs * graph.forward_price, loop=Slots(slots)))
        slots = slots + 1 if slots < 4 else slots * 3 // 2
    return options


@functools.cache
def _inner_lengths(length: int) -> tuple[int, ...]:
    """Lengths of inner loops to try: about the square root, and some powers of two around it."""
    if length < 4:
        return ()
    root = schedule.nested_lengths(length, 2)[1]
    found = {root, *(2**n for n in range(1, length.bit_length()))}
    return tuple(n for n in found if 1 < n <= length // 2)
