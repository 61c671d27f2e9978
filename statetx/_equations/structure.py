"""The table of structures: one cached function for all jaxprs of equal structure.

Transforms run the user's Python on every call, so nothing is ever stale; the work after it is shared. The jaxpr of a
call is looked up by its structure: its equations with their parameters, types, literals and settings, but not the
values of its constants. For each structure and use, the table keeps one function built by a transform. JAX's own
caches, which go by identity, then share differentiation, partial evaluation, lowering and compilation between layers of
equal structure and between repeated calls.

Two jaxprs have equal structure only if every part compares equal. A part that cannot be compared (a user's custom
derivative rule, which may read anything when it runs; an effect on a Ref) makes the jaxpr unequal to any other: the
table errs on the side of doing the work again. If nothing is traced no rule can run, so rules are removed first.
"""

from __future__ import annotations

import collections
import contextlib
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core.primitives import closed_call_p, custom_jvp_call_p, custom_vjp_call_p

from .. import _jax
from .._atomic import locked, new_lock
from .._cached import cached_property
from .._jax import Jaxpr, Literal
from .._targets import current
from .._tree import Identity, freeze
from .inline import hoist


class _NotComparable(Exception):
    """The jaxpr has a part whose equality cannot be decided."""


class Body:
    """A staged function: a jaxpr without constants, and the values that the function closed over.

    Attributes:
        jaxpr: its inputs are the operands and then the function's inputs.
        operands: values that the function closed over.
        key: equal for bodies of equal structure; the key of an incomparable body equals no other.
    """

    def __init__(self, jaxpr: Jaxpr, operands: list[Any]):
        self.jaxpr = jaxpr
        self.operands = operands

    @classmethod
    def close(cls, jaxpr: Jaxpr, consts: Sequence[Any]) -> Body:
        """Make a body of a jaxpr with constants, which become its operands."""
        return cls(*hoist(jaxpr, consts))

    @cached_property
    def key(self) -> Structure:
        return Structure(self.jaxpr)

    def __call__(self, operands: Sequence[Any], *args: Any) -> list[Any]:
        # JAX stages arrays that the function made as NumPy arrays, which a traced index of a derivative rule does not
        # index.
        arrays = (jnp.asarray(x) if isinstance(x, np.ndarray) and x.ndim else x for x in operands)
        return _jax.evaluate(self.jaxpr, (), (*arrays, *args))

    @property
    def num_operands(self) -> int:
        return len(self.operands)


# -- structure -------------------------------------------------------------------------------------------------

# Weak: an entry ends with its jaxpr, which JAX drops together with the function that it was traced from.
_nested: weakref.WeakKeyDictionary[Any, Hashable] = weakref.WeakKeyDictionary()


class Structure:
    """The structure of a jaxpr: compared by all of its parts, hashed by the primitives and input types, which
    is cheap.
    """

    def __init__(self, jaxpr: Jaxpr):
        self._jaxpr = jaxpr
        # Computed in every call of every transform, so parameters are left to the comparison, which runs only where
        # hashes agree.
        self._hash = hash((tuple([e.primitive for e in jaxpr.eqns]), tuple([v.aval for v in jaxpr.invars])))

    @cached_property
    def is_incomparable(self) -> bool:
        """Whether it equals no other structure. Only functions in equations are checked: they may hold the user's
        values.
        """
        try:
            for eqn in self._jaxpr.eqns:
                # An effect may hold the variable of a Ref, which the comparison of all parts finds out.
                if eqn.effects:
                    return self._parts is None
                if _holds_functions(eqn):
                    for value in eqn.params.values():
                        _param(value)
        except (_NotComparable, TypeError):
            return True
        return False

    @cached_property
    def _parts(self) -> tuple | None:
        try:
            parts = _structure(self._jaxpr)
            hash(parts)
        except (_NotComparable, TypeError):  # TypeError: a part whose own hash fails on its contents
            self.is_incomparable = True
            return None
        return parts

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other or not isinstance(other, Structure) or self._hash != other._hash:
            return self is other
        self_parts, other_parts = self._parts, other._parts
        return self_parts is not None and self_parts == other_parts


_functional: dict[Any, bool] = {}  # by primitive
_WITH_RULES = (custom_jvp_call_p, custom_vjp_call_p)


def _holds_functions(eqn: Any) -> bool:
    """Whether equations of this primitive hold jaxprs or rules."""
    is_functional = _functional.get(eqn.primitive)
    if is_functional is None:
        leaves = jax.tree.leaves(list(eqn.params.values()), is_leaf=_jax.is_jaxpr)
        is_functional = _functional[eqn.primitive] = any(_jax.is_jaxpr(x) or callable(x) for x in leaves)
    return is_functional


def _structure(jaxpr: Jaxpr) -> tuple:
    numbers = {v: i for i, v in enumerate([*jaxpr.constvars, *jaxpr.invars])}

    def read(atom: Any) -> Hashable:
        return ("lit", atom.aval, _constant(atom.val)) if isinstance(atom, Literal) else numbers[atom]

    eqns = []
    for eqn in jaxpr.eqns:
        ins = tuple([read(v) for v in eqn.invars])
        for v in eqn.outvars:
            numbers[v] = len(numbers)
        params = _params(eqn)
        outs = tuple([v.aval for v in eqn.outvars])
        # Scopes count: they are the names of compiled operations (decision 10). Source lines do not: of equal layers
        # the first one's appear.
        scope = eqn.source_info.name_stack
        eqns.append((eqn.primitive, ins, outs, params, _effects(eqn.effects), eqn.ctx, scope))
    types = tuple([v.aval for v in (*jaxpr.constvars, *jaxpr.invars)])
    return (types, tuple(eqns), tuple([read(v) for v in jaxpr.outvars]))


def operation_of(eqn: Any) -> Hashable:
    """A key of the function that an equation applies to its variables, whatever its scope; None if it equals none."""
    literals = [(v.aval, v.val) for v in eqn.invars if isinstance(v, Literal)]
    try:
        numbers = tuple([(aval, _constant(x)) for aval, x in literals])
        key = eqn.primitive, numbers, _params(eqn), tuple([v.aval for v in eqn.outvars]), eqn.ctx
        hash(key)
    except (_NotComparable, TypeError):
        return None
    return key


def _params(eqn: Any) -> Hashable:
    return tuple([(k, _param(v)) for k, v in eqn.params.items()])


_HASHABLE = frozenset({int, bool, str, type(None)})


def _effects(effects: Any) -> Hashable:
    return frozenset(effects) if effects else None  # an effect on a Ref holds a variable, so it equals no other effect


def _param(x: Any) -> Hashable:
    cls = type(x)
    if cls in _HASHABLE:
        # With the type: True == 1 == 1.0, but they are different parameters.
        return (cls, x)
    if cls is tuple and all([type(v) is int for v in x]):  # fast path: shapes and axes
        return (tuple, x)

    if _jax.is_jaxpr(x):
        return _jaxpr_param(x)
    if isinstance(x, (tuple, list)):
        return (type(x), *[_param(v) for v in x])
    if isinstance(x, dict):
        return (dict, *[(k, _param(v)) for k, v in x.items()])
    # Bit by bit, as 0.0 == -0.0 and nan != nan.
    if isinstance(x, (bool, int, float, complex, np.ndarray, np.generic)):
        return _constant(x)

    # JAX wraps a derivative rule again in each trace, so rules have no useful identity of their own (see
    # `_jax.derivative_rule`).
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
    # JAX keeps one jaxpr for a jitted function and argument types, so most nested jaxprs recur: compute each key once.
    key = _nested.get(x)
    if key is None:
        jaxpr, consts = _jax.open_jaxpr(x)
        key = _nested[x] = _Key(("jaxpr", _structure(jaxpr), tuple([_constant(c) for c in consts])))
    return key


def _constant(x: Any) -> Hashable:
    """A key of a constant, equal for equal bits."""
    if isinstance(x, jax.Array):
        raise _NotComparable  # `hoist` could not make it an operand, and the table would keep it alive
    if isinstance(x, np.ndarray) and x.ndim and x.flags.writeable:
        raise _NotComparable  # its owner may change it in place, and so change the cached function
    if isinstance(x, (np.ndarray, np.generic)):
        return freeze(x)
    return freeze(x) if isinstance(x, (bool, int, float, complex)) else Identity(x)


class _Key:
    """Nested tuples whose hash is computed once."""

    __slots__ = ("hash", "parts")

    def __init__(self, parts: tuple):
        self.parts = parts
        self.hash = hash(parts)

    def __hash__(self) -> int:
        return self.hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, _Key) and self.hash == other.hash and self.parts == other.parts)


def _without_rules(x: Jaxpr) -> Jaxpr:
    """Turn functions with derivative rules into plain calls, at any depth.

    For eager execution: no derivative can reach it, so the rules, which make the jaxpr incomparable, do not matter.
    """

    def of_equation(eqn: Any) -> Any:
        if eqn.primitive in _WITH_RULES or _jax.loop_of(eqn) is not None:
            call = eqn.params["jaxpr" if "jaxpr" in eqn.params else "call_jaxpr"]
            plain = _jax.without_names(_without_rules(call))
            return eqn.replace(primitive=closed_call_p, params={"call_jaxpr": plain})
        return _jax.map_jaxprs(_without_rules, eqn)

    return _jax.map_equations(of_equation, x)


# -- the table -------------------------------------------------------------------------------------------------


class _Bypass(threading.local):
    active = False


_bypass = _Bypass()


class StructureTable:
    """A bounded LRU cache of functions, by structure and use; thread-safe.

    Attributes:
        hits, misses: counts of `get`.
    """

    def __init__(self, size: int):
        self.size = size
        self.hits = 0
        self.misses = 0
        self._entries: collections.OrderedDict[Hashable, Callable] = collections.OrderedDict()
        self._lock = new_lock()  # reentrant: a finalizer that runs under the lock may trace
        self._counts: dict[tuple[str, bool], int] = {}

    def get(self, bodies: Body | Sequence[Body], use: tuple, build: Callable[..., Callable]) -> Callable:
        """``build(*bodies)``, shared by all bodies of equal structure for this `use`: a transform's name and every
        setting of `build`.
        """
        bodies = (bodies,) if isinstance(bodies, Body) else bodies
        # A rule runs only under differentiation, never in eager code: without rules the layers are comparable again.
        if _jax.is_eager() and any(body.key.is_incomparable for body in bodies):
            bodies = [Body(_without_rules(body.jaxpr), body.operands) for body in bodies]
        if _bypass.active or any(body.key.is_incomparable for body in bodies):
            locked(self._lock, self._count, use, False)
            return build(*bodies)
        # The built function may depend on the device.
        key = (use, current.current(), *(body.key for body in bodies))
        entry = locked(self._lock, self._lookup, key, use)
        if entry is not None:
            return entry
        if any(body.key.is_incomparable for body in bodies):  # found out by the comparison of the lookup
            return build(*bodies)
        # Without operands: an entry must not keep alive the values that one call closed over.
        built = build(*(Body(body.jaxpr, []) for body in bodies))
        return locked(self._lock, self._store, key, built)

    def _lookup(self, key: Hashable, use: tuple) -> Callable | None:
        entry = self._entries.get(key)
        if entry is not None:
            self._entries.move_to_end(key)
        self._count(use, entry is not None)
        return entry

    def _store(self, key: Hashable, built: Callable) -> Callable:
        entry = self._entries.setdefault(key, built)  # another thread may have built it meanwhile
        while len(self._entries) > self.size:
            self._entries.popitem(last=False)
        return entry

    @contextlib.contextmanager
    def bypassed(self) -> Iterator[None]:
        """Let this thread do without the table for a block, so that each body keeps its own names and source lines."""
        former, _bypass.active = _bypass.active, True
        try:
            yield
        finally:
            _bypass.active = former

    def clear(self) -> None:
        locked(self._lock, self._clear)

    def _clear(self) -> None:
        self._entries.clear()
        self._counts.clear()
        self.hits = self.misses = 0

    def _count(self, use: Any, is_hit: bool) -> None:
        self.hits += is_hit
        self.misses += not is_hit
        key = (use[0], is_hit)
        self._counts[key] = self._counts.get(key, 0) + 1

    def by_transform(self) -> dict[str, tuple[int, int]]:
        """Hits and misses of each transform, in alphabetical order."""
        counts = locked(self._lock, self._counts.copy)
        return {
            name: (counts.get((name, True), 0), counts.get((name, False), 0)) for name in sorted({n for n, _ in counts})
        }

    def __len__(self) -> int:
        return len(self._entries)

    def __repr__(self) -> str:
        return f"Table({len(self)} of {self.size} kept, {self.hits} hits, {self.misses} misses)"


table = StructureTable(size=2048)
