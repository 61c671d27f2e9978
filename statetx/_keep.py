"""From a policy to equations: which values of a staged function are kept, and the function rewritten to say so.

JAX asks a policy about primitives, types and parameters, of equations that differentiation and vmap have rewritten: it cannot
tell one value from another. So a policy of ours judges the equations as they were staged, and each value that it keeps is given a
name of ours, which survives both. Where a derivative rule reads the value it differentiates (that of ``exp``, ``tanh``, a
maximum), the rule is made to read the named one; else keeping it would not spare its recomputation.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from . import _compat, _registry
from ._compat import ClosedJaxpr, Jaxpr, Literal, Var
from ._errors import PolicyError, PolicyWarning
from ._policy import VIEWS, Decision, JaxPolicy, Marks, Origin, Policy, Value, Verdict, everything, nothing
from ._tree import is_float

_NONE: frozenset[Any] = frozenset()

# Operations that hand a value on, in another shape, type or place.
_TRANSPARENT = VIEWS | frozenset(
    "name convert_element_type reduce_precision sharding_constraint optimization_barrier device_put".split()
)
_ENTERED = {"jit": "jaxpr", "pjit": "jaxpr", "scan": "jaxpr", "cond": "branches"}


class Site(NamedTuple):
    """A value of a jaxpr and its place: indices of equations (and branches) from the outside in, then of the output."""

    address: tuple[int, ...]
    value: Value
    eqn: Any


class _Flow(NamedTuple):
    """What is known of a variable: the states it holds, those it was last computed with, and when it was computed."""

    read: frozenset[Origin]
    near: frozenset[Origin]
    order: int


def survey(jaxpr: Jaxpr, origins: Sequence[frozenset[Origin]] = ()) -> list[Site]:
    """The values that a jaxpr computes, in the order of its equations.

    Args:
        origins: for each input that is known to be the value of a state, which.
    """
    flows = [_Flow(o, o, -1) for o in origins] + [_Flow(_NONE, _NONE, -1)] * (len(jaxpr.invars) - len(origins))
    survey = _Survey()
    survey.visit(jaxpr, flows, [_NONE] * len(jaxpr.outvars), 1, (), True)
    return survey.sites


class _Survey:
    def __init__(self) -> None:
        self.sites: list[Site] = []
        self._order = 0

    def visit(
        self,
        jaxpr: Jaxpr,
        ins: Sequence[_Flow],
        out_names: Sequence[frozenset[str]],
        times: int,
        at: tuple,
        outer: bool,
    ) -> list[_Flow]:
        """Record the values of a jaxpr; returns what is known of its outputs."""
        names = _names(jaxpr, out_names)
        known = dict(zip(jaxpr.invars, ins, strict=True))
        known |= dict.fromkeys(jaxpr.constvars, _Flow(_NONE, _NONE, -1))
        made = set()

        def flow(atom: Any) -> _Flow:
            return _Flow(_NONE, _NONE, -2) if isinstance(atom, Literal) else known[atom]

        for i, eqn in enumerate(jaxpr.eqns):
            flows = [flow(v) for v in eqn.invars]
            read = _NONE.union(*(f.read for f in flows))
            near = read or max(flows, key=lambda f: f.order, default=_Flow(_NONE, _NONE, -1)).near
            is_jit = eqn.primitive.name in ("jit", "pjit")
            inner = list(_inner(eqn))
            outs: list[_Flow] = []
            for n, (sub, length, given) in enumerate(inner):
                names_of_outs = [names.get(v, _NONE) for v in eqn.outvars] if is_jit else [_NONE] * len(sub.outvars)
                found = self.visit(sub, given(flows), names_of_outs, times * length, (*at, i, n), outer and is_jit)
                outs = outs or found
            self._order += 1
            for n, v in enumerate(eqn.outvars):
                is_name_of_made = eqn.primitive.name == "name" and (eqn.invars[0] in made or not outer)
                if not is_jit and not is_name_of_made and hasattr(v.aval, "dtype"):
                    own = names.get(v, _NONE)
                    if eqn.primitive.name == "name":
                        own |= {eqn.params["name"]}
                    ins_ = tuple(a.aval for a in eqn.invars)
                    value = Value(eqn.primitive, ins_, eqn.params, v.aval, times, own, read, near)
                    self.sites.append(Site((*at, i, n), value, eqn))
                made.add(v)
                handed = read if eqn.primitive.name in _TRANSPARENT else _NONE
                known[v] = outs[n] if is_jit else _Flow(handed, near, self._order)
        return [flow(v) for v in jaxpr.outvars]


def _inner(eqn: Any) -> Iterator[tuple[Jaxpr, int, Callable[[list[_Flow]], list[_Flow]]]]:
    """Jaxprs in an equation whose values can be kept one by one, how often each is run, and what goes in."""
    name = eqn.primitive.name
    param = eqn.params.get(_ENTERED.get(name, ""))
    if param is None:
        return
    if name == "cond":
        for branch in param:
            yield _compat.open_jaxpr(branch)[0], 1, lambda flows: flows[1:]
    elif name == "scan":
        num_consts, num_carry = _compat.scan_counts(eqn)

        def given(flows: list[_Flow]) -> list[_Flow]:
            carry = [f._replace(read=_NONE) for f in flows[num_consts : num_consts + num_carry]]
            return [*flows[:num_consts], *carry, *flows[num_consts + num_carry :]]

        yield _compat.open_jaxpr(param)[0], eqn.params["length"], given
    else:
        yield _compat.open_jaxpr(param)[0], 1, lambda flows: flows


def _names(jaxpr: Jaxpr, out_names: Sequence[frozenset[str]]) -> dict[Any, frozenset[str]]:
    """The names of each variable: those that later equations give to the same value."""
    names: dict[Any, frozenset[str]] = {}

    def add(atom: Any, more: frozenset[str]) -> None:
        if more and not isinstance(atom, Literal):
            names[atom] = names.get(atom, _NONE) | more

    for v, more in zip(jaxpr.outvars, out_names, strict=True):
        add(v, more)
    for eqn in reversed(jaxpr.eqns):
        if eqn.primitive.name == "name":
            add(eqn.invars[0], names.get(eqn.outvars[0], _NONE) | {eqn.params["name"]})
        elif eqn.primitive.name in ("jit", "pjit"):
            inner = _compat.open_jaxpr(eqn.params["jaxpr"])[0]
            found = _names(inner, [names.get(v, _NONE) for v in eqn.outvars])
            for outside, inside in zip(eqn.invars, inner.invars, strict=True):
                add(outside, found.get(inside, _NONE))
    return names


# -- marking -------------------------------------------------------------------------------------------------------


def keep_marked(primitive: Any, *_: Any, **params: Any) -> Any:
    """The policy, as JAX takes one, that keeps what is marked."""
    if _compat.is_debug_callback(primitive):
        return True  # a no makes JAX lose kept values that it reads; it is called again where that takes more than them
    if primitive.name == "custom_jvp_call":  # that of `_with_named_rule`, left as it is where none of its inputs moves
        names = [e.params["name"] for e in _compat.open_jaxpr(params["call_jaxpr"])[0].eqns if _is_name(e.primitive)]
    else:
        names = [params["name"]] if _is_name(primitive) else []
    marks = sorted(
        (n.removeprefix(_compat.KEPT) for n in names if n.startswith(_compat.KEPT)), reverse=True
    )  # "save" first
    if not marks:
        return False
    what, *memories = marks[0].split(":")
    return True if what == "save" else _compat.Offloadable(*memories)


def _is_name(primitive: Any) -> bool:
    return primitive is _compat.name_primitive


def mark(jaxpr: Jaxpr, marks: dict[tuple[int, ...], str]) -> Jaxpr:
    """The jaxpr with values named: `marks` maps addresses of `Site`s to names."""
    if not marks:
        return jaxpr
    marked, consts = _rewrite(jaxpr, (), marks)
    assert not consts, "rewriting a jaxpr without constants made some"
    return marked


def _rewrite(jaxpr: Jaxpr, consts: Sequence[Any], marks: dict[tuple[int, ...], str]) -> tuple[Jaxpr, list[Any]]:
    def run(*args: Any) -> list[Any]:
        env = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))
        for i, eqn in enumerate(jaxpr.eqns):
            own = {address[1:]: name for address, name in marks.items() if address[0] == i}
            ins = [v.val if isinstance(v, Literal) else env[v] for v in eqn.invars]
            outs = _run(eqn, ins, own) if own else _compat.bind_equation(eqn, eqn.params, ins)
            env.update(zip(eqn.outvars, outs, strict=True))
        return [v.val if isinstance(v, Literal) else env[v] for v in jaxpr.outvars]

    avals = [v.aval for v in jaxpr.invars]
    return _compat.stage(run, avals, kind="statetx.remat", name=jaxpr.debug_info.func_name)


def _run(eqn: Any, ins: list[Any], marks: dict[tuple[int, ...], str]) -> list[Any]:
    """Run an equation with some of its outputs, or of the values within it, named."""
    params = eqn.params
    within = {address: name for address, name in marks.items() if len(address) > 1}
    if within:
        key = _ENTERED[eqn.primitive.name]
        parts = params[key] if isinstance(params[key], (tuple, list)) else (params[key],)
        new = []
        for n, part in enumerate(parts):
            own = {address[1:]: name for address, name in within.items() if address[0] == n}
            inner, consts = _compat.open_jaxpr(part)
            new.append(ClosedJaxpr(*_rewrite(inner, consts, own)) if own else part)
        params = {**params, key: tuple(new) if isinstance(params[key], (tuple, list)) else new[0]}
    own = {address[0]: name for address, name in marks.items() if len(address) == 1}

    def plain(*xs: Any) -> list[Any]:
        return _compat.bind_equation(eqn, params, xs)

    if own and _rule_reads_result(plain, ins, own):
        return _with_named_rule(plain, own)(*ins)
    return _name(plain(*ins), own)


def _name(outs: Sequence[Any], names: dict[int, str]) -> list[Any]:
    return [_marked(x, names[i]) if i in names else x for i, x in enumerate(outs)]


def _marked(x: Any, name: str) -> Any:
    if not jnp.iscomplexobj(x):
        return _compat.named(x, name)
    # JAX rounds each float that it keeps (reduce_precision), and fails on complex ones (jax 0.12).
    return jax.lax.complex(_compat.named(jnp.real(x), name), _compat.named(jnp.imag(x), name))


class _Jvp(NamedTuple):
    """``(inputs, tangents of some of them) -> (outputs, tangents of the float outputs)`` as equations."""

    jaxpr: Jaxpr
    consts: Sequence[Any]
    num_out: int


def _rule_reads_result(fun: Callable[..., list[Any]], ins: Sequence[Any], outs: dict[int, str]) -> bool:
    """Whether the derivative of an operation is computed from its results."""
    floats = [i for i, x in enumerate(ins) if is_float(x)]
    try:
        jaxpr, _, num_out = _jvp(fun, ins, floats)
    except Exception:
        return False  # an operation without a derivative is an error only where it is differentiated
    made = {v for eqn in jaxpr.eqns for v in eqn.outvars}
    if not all(isinstance(v, Var) and v in made for v in jaxpr.outvars[:num_out]):
        return False
    if any(eqn.primitive is _compat.custom_lin_primitive for eqn in jaxpr.eqns):
        return False  # a rule for reverse mode only (custom_vjp) cannot stand within one for both
    results = {jaxpr.outvars[i] for i in outs}
    return any(v in results for eqn in jaxpr.eqns for v in eqn.invars if isinstance(v, Var))


def _jvp(fun: Callable[..., list[Any]], ins: Sequence[Any], moving: Sequence[int]) -> _Jvp:
    types = [_compat.abstract(x) for x in ins]
    num_out = 0

    def push(*xs: Any) -> list[Any]:
        nonlocal num_out
        primals, tangents = xs[: len(types)], xs[len(types) :]

        def of_moving(*given: Any) -> list[Any]:
            whole = list(primals)
            for i, x in zip(moving, given, strict=True):
                whole[i] = x
            return fun(*whole)

        outs, moved = jax.jvp(of_moving, [primals[i] for i in moving], list(tangents))
        num_out = len(outs)
        return [*outs, *(t for x, t in zip(outs, moved, strict=True) if is_float(x))]

    jaxpr, consts = _compat.stage(push, [*types, *(types[i] for i in moving)], kind="statetx.remat", name="jvp")
    return _Jvp(jaxpr, consts, num_out)


def _with_named_rule(fun: Callable[..., list[Any]], names: dict[int, str]) -> Callable[..., Any]:
    """The function with named outputs, and with a derivative that reads these in place of the outputs themselves."""

    @jax.custom_jvp
    def named(*xs: Any) -> list[Any]:
        return _name(fun(*xs), names)

    # Inputs that do not move stay out of the derivative: what it is with respect to them may not be finite, or not be at all.
    @functools.partial(named.defjvp, symbolic_zeros=True)
    def rule(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        moving = [i for i, t in enumerate(tangents) if not isinstance(t, SymbolicZero) and is_float(primals[i])]
        jaxpr, consts, num_out = _jvp(fun, primals, moving)
        variables = [*jaxpr.constvars, *jaxpr.invars]
        env = dict(zip(variables, [*consts, *primals, *(tangents[i] for i in moving)], strict=True))
        name_of = {v: names[i] for i, v in enumerate(jaxpr.outvars[:num_out]) if i in names and isinstance(v, Var)}
        for eqn in jaxpr.eqns:
            ins = [v.val if isinstance(v, Literal) else env[v] for v in eqn.invars]
            results = _compat.bind_equation(eqn, eqn.params, ins)
            own = {i: name_of[v] for i, v in enumerate(eqn.outvars) if v in name_of}
            env.update(zip(eqn.outvars, _name(results, own), strict=True))
        outs = [v.val if isinstance(v, Literal) else env[v] for v in jaxpr.outvars]
        rest = iter(outs[num_out:])
        types = [_compat.abstract(x) for x in outs[:num_out]]
        return outs[:num_out], [next(rest) if is_float(t) else _compat.zero_tangent(t) for t in types]

    return named


# -- trying other policies -----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Region:
    """A rematerialised function that was called while something was being tried.

    Attributes:
        name: the function's.
        policy: what it kept by.
        prevent_cse: as handed to JAX.
        names: those that ``checkpoint_name`` gave to its values.
        unmatched: what the policy names and no value is.
    """

    name: str
    policy: Policy
    prevent_cse: bool | tuple[bool, ...] = True
    names: frozenset[str] = _NONE
    unmatched: tuple[str, ...] = ()


class Override(threading.local):
    """What every rematerialised function of this thread does while something is being tried.

    Attributes:
        policy: takes the place of each function's own.
        is_off: whether nothing is rematerialised.
        is_quiet: whether policies may name what does not occur, and change nothing, without a word.
        met: the rematerialised functions that were called meanwhile; None if nothing is being tried.
        around: what a function is wrapped in before `statetx.grad` and its kin differentiate it; None for nothing.
    """

    policy: Policy | None = None
    is_off: bool = False
    is_quiet: bool = False
    met: list[Region] | None = None
    around: Callable[[Callable], Callable] | None = None

    @contextlib.contextmanager
    def _set(self, *new: Any) -> Iterator[None]:
        before = self.policy, self.is_off, self.is_quiet, self.met, self.around
        self.policy, self.is_off, self.is_quiet, self.met, self.around = new
        try:
            # What jax.jit traced under other circumstances is not this.
            with _compat.traced_apart(object()):
                yield
        finally:
            self.policy, self.is_off, self.is_quiet, self.met, self.around = before

    @contextlib.contextmanager
    def __call__(
        self, policy: Policy | None = None, *, is_off: bool = False, is_quiet: bool = False
    ) -> Iterator[list[Region]]:
        met: list[Region] = []
        with self._set(policy, is_off, is_quiet, met, None):
            yield met

    def differentiated(self, around: Callable[[Callable], Callable]) -> contextlib.AbstractContextManager[None]:
        """In this block (and thread) what is differentiated is wrapped like this, but not what is within it.

        Nothing else is being tried in what is wrapped.
        """
        return self._set(self.policy, self.is_off, self.is_quiet, self.met, around)

    def wrapped(self, fun: Callable) -> Callable:
        """The function as it is to be differentiated."""
        if self.around is None:
            return fun
        around = self.around(fun)

        def alone(*args: Any, **kwargs: Any) -> Any:
            with self._set(None, False, False, None, None):
                return around(*args, **kwargs)

        return alone

    def note(
        self, name: str, policy: Policy, jaxpr: Jaxpr, origins: Sequence[frozenset[Origin]], prevent_cse: Any
    ) -> None:
        """Record a rematerialised function in `met`."""
        values = [site.value for site in survey(jaxpr, origins)]
        unmatched = [atom.unmatched(values) for atom in policy.atoms()]
        names = _NONE.union(*(v.names for v in values))
        assert self.met is not None
        self.met.append(Region(name, policy, prevent_cse, names, tuple(filter(None, unmatched))))


override = Override()


# -- deciding ------------------------------------------------------------------------------------------------------


def apply(policy: Policy, jaxpr: Jaxpr, origins: Sequence[frozenset[Origin]], name: str) -> tuple[Jaxpr, Any]:
    """The jaxpr and the policy to hand to JAX so that it keeps what `policy` says.

    Args:
        policy: judges the equations as they are here. One of JAX's is handed on as it is.
        origins: for each of the first inputs, the state whose value it is, if any.
        name: of the function, for messages.

    Raises:
        PolicyError: it names what does not occur, or a memory that the devices do not have.
    """
    if policy == nothing:
        return jaxpr, None
    if isinstance(policy, Marks):
        return mark(jaxpr, dict(policy.marks)), keep_marked if policy.marks else None
    sites = survey(jaxpr, origins)
    if policy == everything and not any(jnp.issubdtype(s.value.type.dtype, jnp.complexfloating) for s in sites):
        return jaxpr, jax.checkpoint_policies.everything_saveable
    matches = _check_matches(policy, sites, name)
    if isinstance(policy, JaxPolicy):
        # One that a user wrote may ask for what only the derivative computes: nothing can be said of it here.
        if matches and _compat.is_policy_of_jax(policy.fun):
            answers = list(_answers(policy, jaxpr))
            _check_difference(policy, not any(answers), all(answers), name)
        return jaxpr, policy.fun
    marks = decide(policy, sites)
    if matches:
        _check_difference(policy, not marks, marks == decide(everything, sites), name)
    return mark(jaxpr, marks), keep_marked


def _answers(policy: JaxPolicy, jaxpr: Jaxpr) -> Iterator[Any]:
    """What a policy of JAX's says of each equation, those in equations included."""
    for eqn in jaxpr.eqns:
        inner = list(_compat.inner_jaxprs(eqn))
        for sub in inner:
            yield from _answers(policy, sub)
        if not inner:
            yield _compat.policy_answer(policy.fun(eqn.primitive, *(v.aval for v in eqn.invars), **eqn.params))


def _check_difference(policy: Policy, is_nothing: bool, is_everything: bool, name: str) -> None:
    same = nothing if is_nothing else everything if is_everything else None
    if same is not None and policy != same and not policy.is_plain:
        _warn_once(f"remat({name}): policy={policy!r} keeps what policies.{same!r} does.")


def decide(policy: Policy, sites: Sequence[Site]) -> dict[tuple[int, ...], str]:
    """The marks of the values that a policy keeps."""
    verdicts = [(site.address, policy.judge(site.value)) for site in sites]
    spaces = _compat.memory_spaces() if any(v.decision is Decision.OFFLOAD for _, v in verdicts) else ()
    return {at: _mark_of(v, policy, spaces) for at, v in verdicts if v.decision is not Decision.RECOMPUTE}


def _mark_of(verdict: Verdict, policy: Policy, spaces: Sequence[str]) -> str:
    if verdict.decision is Decision.SAVE:
        return _compat.KEPT + "save"
    missing = [s for s in (verdict.src, verdict.dst) if s not in spaces]
    if not missing:
        return f"{_compat.KEPT}offload:{verdict.src}:{verdict.dst}"
    if verdict.otherwise == "save":
        return _compat.KEPT + "save"
    raise PolicyError(
        f"policy={policy!r}: the devices of this backend have no memory {missing[0]!r}; they have "
        f"{', '.join(map(repr, spaces))}.\nFix: name one of these, or have values saved where there is none: "
        f"offload(..., otherwise='save')."
    )


def _check_matches(policy: Policy, sites: Sequence[Site], name: str) -> bool:
    """Whether the function has all that a policy asks for; says so where it has not."""
    if override.is_quiet:
        return True
    matches = True
    values = [site.value for site in sites]
    for atom in policy.atoms():
        if atom.missing == "ignore":
            continue
        message = atom.unmatched(values)
        if message and atom.missing == "raise":
            raise PolicyError(
                f"remat({name}): policy={policy!r}: {message}\n"
                f"Fix: correct it, or say that it may be missing: missing='warn' or missing='ignore'."
            )
        if message:
            matches = False
            _warn_once(f"remat({name}): policy={policy!r}: {message}")
    return matches


_warned: set[str] = set()


def _warn_once(message: str) -> None:
    if message not in _warned and not override.is_quiet:
        _warned.add(message)
        warnings.warn(message, PolicyWarning, stacklevel=_registry.user_stacklevel())
