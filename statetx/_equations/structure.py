"""The table of structures: one kept function for all jaxprs that are alike.

Transforms run the user's Python on every call, so nothing is ever stale; what comes after it is shared. The jaxpr
that a call gave is looked up by its structure, that is, its equations with their parameters, types, literals and
settings, but not the values of its constants. For each structure the table keeps one function that evaluates it
and what a transform made of that function. JAX's own caches, which go by identity, then share differentiation,
partial evaluation, lowering and compilation between layers that are alike and between repeated calls.

Two jaxprs are taken for alike only where every part compares equal. A part that cannot be compared (a custom
derivative rule of the user's, which may read anything when it runs; an effect on a Ref) makes the whole unlike any
other: the table errs on the side of doing the work again. Where nothing is traced no rule can run: there they are
taken off first.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core.primitives import closed_call_p, custom_jvp_call_p, custom_vjp_call_p

from .. import _jax
from .._atomic import locked
from .._jax import Jaxpr, Literal
from .._tree import Identity, freeze
from .hoist import hoist


class _NotComparable(Exception):
    """The jaxpr has a part for which equality cannot be decided."""


class Body:
    """A staged function: a closed expression in its inputs.

    Attributes:
        jaxpr: has no constants; its inputs are those of `operands` and then the function's own.
        operands: values that the function closed over.
        key: equal for bodies of equal structure; that of a body like no other equals no other.
    """

    def __init__(self, jaxpr: Jaxpr, operands: list[Any]):
        self.jaxpr = jaxpr
        self.operands = operands

    @classmethod
    def close(cls, jaxpr: Jaxpr, consts: Sequence[Any]) -> Body:
        """A body of a jaxpr with constants, which become its operands."""
        return cls(*hoist(jaxpr, consts))

    @functools.cached_property
    def key(self) -> Structure:
        return Structure(self.jaxpr)

    def __call__(self, operands: Sequence[Any], *args: Any) -> list[Any]:
        return _jax.evaluate(self.jaxpr, (), (*operands, *args))

    @property
    def num_operands(self) -> int:
        return len(self.operands)


# -- structure -------------------------------------------------------------------------------------------------

_nested: weakref.WeakKeyDictionary[Any, Hashable] = weakref.WeakKeyDictionary()


class Structure:
    """What bodies must have in common to be alike: hashed by a part that is cheap to find, compared by all of it."""

    def __init__(self, jaxpr: Jaxpr):
        self._jaxpr = jaxpr
        self._hash = hash((tuple([e.primitive for e in jaxpr.eqns]), tuple([v.aval for v in jaxpr.invars])))

    @functools.cached_property
    def is_incomparable(self) -> bool:
        """Whether it is known to equal no other. Only functions in equations are looked at: they hold a user's values."""
        try:
            for eqn in self._jaxpr.eqns:
                if eqn.effects:
                    return self._parts is None
                if _holds_functions(eqn):
                    for value in eqn.params.values():
                        _param(value)
        except (_NotComparable, TypeError):
            return True
        return False

    @functools.cached_property
    def _parts(self) -> tuple | None:
        try:
            parts = _structure(self._jaxpr)
            hash(parts)
        except (_NotComparable, TypeError):  # TypeError: a part whose hash only looked sound
            self.is_incomparable = True
            return None
        return parts

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other or not isinstance(other, Structure) or self._hash != other._hash:
            return self is other
        mine, others = self._parts, other._parts
        return mine is not None and mine == others


_functional: dict[Any, bool] = {}
_WITH_RULES = (custom_jvp_call_p, custom_vjp_call_p)


def _holds_functions(eqn: Any) -> bool:
    """Whether equations of this primitive hold jaxprs or rules."""
    found = _functional.get(eqn.primitive)
    if found is None:
        leaves = jax.tree.leaves(list(eqn.params.values()), is_leaf=_jax.is_jaxpr)
        found = _functional[eqn.primitive] = any(_jax.is_jaxpr(x) or callable(x) for x in leaves)
    return found


def _structure(jaxpr: Jaxpr) -> tuple:
    numbers = {v: i for i, v in enumerate([*jaxpr.constvars, *jaxpr.invars])}

    def read(atom: Any) -> Hashable:
        return ("lit", atom.aval, _constant(atom.val)) if isinstance(atom, Literal) else numbers[atom]

    eqns = []
    for eqn in jaxpr.eqns:
        ins = tuple([read(v) for v in eqn.invars])
        for v in eqn.outvars:
            numbers[v] = len(numbers)
        params = tuple([(k, _param(v)) for k, v in eqn.params.items()])
        outs = tuple([v.aval for v in eqn.outvars])
        scope = eqn.source_info.name_stack
        eqns.append((eqn.primitive, ins, outs, params, _effects(eqn.effects), eqn.ctx, scope))
    types = tuple([v.aval for v in (*jaxpr.constvars, *jaxpr.invars)])
    return (types, tuple(eqns), tuple([read(v) for v in jaxpr.outvars]))


_PLAIN = frozenset({int, bool, str, type(None)})


def _effects(effects: Any) -> Hashable:
    return frozenset(effects) if effects else None  # an effect on a Ref names a variable, and so equals no other


def _param(x: Any) -> Hashable:
    kind = type(x)
    if kind in _PLAIN:
        return (kind, x)
    if kind is tuple and all([type(v) is int for v in x]):  # shapes and axes
        return (tuple, x)
    if _jax.is_jaxpr(x):
        return _jaxpr_param(x)
    if isinstance(x, (tuple, list)):
        return (type(x), *[_param(v) for v in x])
    if isinstance(x, dict):
        return (dict, *[(k, _param(v)) for k, v in x.items()])
    if isinstance(x, (bool, int, float, complex, np.ndarray, np.generic)):
        return _constant(x)
    if type(x).__name__ == "WrappedFun":
        rule = _jax.derivative_rule(x)
        if rule is None:
            raise _NotComparable
        return rule
    try:
        hash(x)
    except TypeError:
        raise _NotComparable from None
    return x


def _jaxpr_param(x: Any) -> Hashable:
    # JAX keeps one jaxpr for a jitted function and argument types, so most are met again: look once.
    key = _nested.get(x)
    if key is None:
        jaxpr, consts = _jax.open_jaxpr(x)
        key = _nested[x] = _Key(("jaxpr", _structure(jaxpr), tuple([_constant(c) for c in consts])))
    return key


def _constant(x: Any) -> Hashable:
    """Equal for equal bits."""
    if isinstance(x, jax.Array):
        raise _NotComparable  # one that could not be made an operand: what keeps the equation would keep it alive
    if isinstance(x, np.ndarray) and x.ndim and x.flags.writeable:
        raise _NotComparable  # its owner may change it in place, here and in what would be kept
    if isinstance(x, (np.ndarray, np.generic)):
        return freeze(x)
    return freeze(x) if isinstance(x, (bool, int, float, complex)) else Identity(x)


class _Key:
    """A nest of tuples that is hashed once."""

    __slots__ = ("hash", "parts")

    def __init__(self, parts: tuple):
        self.parts = parts
        self.hash = hash(parts)

    def __hash__(self) -> int:
        return self.hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, _Key) and self.hash == other.hash and self.parts == other.parts)


def _without_rules(x: Jaxpr) -> Jaxpr:
    """A jaxpr in which functions with derivative rules are plain calls, at any depth.

    For what is executed at once: no derivative can reach it, so rules that make it unlike any other do not matter.
    """

    def of_equation(eqn: Any) -> Any:
        if eqn.primitive in _WITH_RULES or _jax.loop_of(eqn) is not None:
            call = eqn.params["jaxpr" if "jaxpr" in eqn.params else "call_jaxpr"]
            return eqn.replace(primitive=closed_call_p, params={"call_jaxpr": _without_rules(call)})
        return _jax.map_jaxprs(_without_rules, eqn)

    jaxpr, _ = _jax.open_jaxpr(x)
    eqns = [of_equation(eqn) for eqn in jaxpr.eqns]
    is_same = all(new is old for new, old in zip(eqns, jaxpr.eqns, strict=True))
    return x if is_same else _jax.with_equations(x, eqns)


# -- the table -------------------------------------------------------------------------------------------------


class _Bypass(threading.local):
    active = False


_bypass = _Bypass()


class Table:
    """Kept functions by structure and use; bounded, least recently used first out; safe to share by threads.

    Attributes:
        hits, misses: how often `get` found and did not find what it was asked for.
    """

    def __init__(self, size: int):
        self.size = size
        self.hits = 0
        self.misses = 0
        self._kept: collections.OrderedDict[Hashable, Callable] = collections.OrderedDict()
        self._lock = threading.RLock()  # a finalizer that runs in here may trace, too
        self._counts: dict[tuple[str, bool], int] = {}

    def get(self, bodies: Body | Sequence[Body], use: tuple, build: Callable[..., Callable]) -> Callable:
        """What `build` made of bodies of these structures, for this use: a transform's name, and every setting of `build`."""
        bodies = (bodies,) if isinstance(bodies, Body) else bodies
        if _jax.is_eager() and any(body.key.is_incomparable for body in bodies):
            bodies = [Body(_without_rules(body.jaxpr), body.operands) for body in bodies]
        if _bypass.active or any(body.key.is_incomparable for body in bodies):
            locked(self._lock, self._count, use, False)
            return build(*bodies)
        key = (use, *(body.key for body in bodies))
        kept = locked(self._lock, self._find, key, use)
        if kept is not None:
            return kept
        if any(body.key.is_incomparable for body in bodies):  # as turned out when it was compared
            return build(*bodies)
        # What is kept must not keep the values that one call closed over.
        built = build(*(Body(body.jaxpr, []) for body in bodies))
        return locked(self._lock, self._keep, key, built)

    def _find(self, key: Hashable, use: tuple) -> Callable | None:
        kept = self._kept.get(key)
        if kept is not None:
            self._kept.move_to_end(key)
        self._count(use, kept is not None)
        return kept

    def _keep(self, key: Hashable, built: Callable) -> Callable:
        kept = self._kept.setdefault(key, built)
        while len(self._kept) > self.size:
            self._kept.popitem(last=False)
        return kept

    @contextlib.contextmanager
    def bypassed(self) -> Iterator[None]:
        """In this block (and thread) no two bodies are alike: each keeps the names and lines of its own source."""
        before, _bypass.active = _bypass.active, True
        try:
            yield
        finally:
            _bypass.active = before

    def clear(self) -> None:
        locked(self._lock, self._clear)

    def _clear(self) -> None:
        self._kept.clear()
        self._counts.clear()
        self.hits = self.misses = 0

    def _count(self, use: Any, is_hit: bool) -> None:
        self.hits += is_hit
        self.misses += not is_hit
        counted = (use[0], is_hit)
        self._counts[counted] = self._counts.get(counted, 0) + 1

    def by_transform(self) -> dict[str, tuple[int, int]]:
        """Hits and misses by the transform that asked, in alphabetical order."""
        counts = locked(self._lock, self._counts.copy)
        return {
            name: (counts.get((name, True), 0), counts.get((name, False), 0)) for name in sorted({n for n, _ in counts})
        }

    def __len__(self) -> int:
        return len(self._kept)

    def __repr__(self) -> str:
        return f"Table({len(self)} of {self.size} kept, {self.hits} hits, {self.misses} misses)"


table = Table(size=2048)
