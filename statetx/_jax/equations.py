"""Jaxprs with their equations: classes, types, parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import jax
import jax.core
import jax.extend.core
import jax.numpy as jnp
import numpy as np
from jax._src import core as _core
from jax._src.ad_util import Zero as _Zero
from jax._src.ad_util import instantiate as _instantiate_zeros
from jax._src.lax import lax as _lax
from jax.api_util import shaped_abstractify
from jax.custom_derivatives import SymbolicZero
from jax.experimental import checkify
from jax.extend.core.primitives import closed_call_p

from .versions import ClosedJaxpr as ClosedJaxpr

Jaxpr = _core.Jaxpr

Literal = _core.Literal
Var = _core.Var
Atom = Var | Literal
"""An operand of an equation, or an output of a jaxpr."""

Eqn = jax.extend.core.JaxprEqn
Aval = jax.core.AbstractValue
"""The type of a variable: of an array, a `jax.Ref`, a token."""

Array = jax.Array
Arrays = list[Array]
ArrayFunction = Callable[..., Arrays]
"""A function of arrays that returns a list of arrays."""


def shaped(aval: Aval) -> jax.core.ShapedArray:
    """The type of an array, with its attributes."""
    return cast(jax.core.ShapedArray, aval)


def abstract(x: Any) -> Any:
    """The type (shape, dtype, weak type, sharding) of `x` as an argument of a traced function."""
    return jax.typeof(x) if isinstance(x, jax.Array) else shaped_abstractify(x)


def as_array(x: Any) -> Any:
    """A Python number or NumPy array as an array of JAX; anything else unchanged, as is a zero tangent of an integer.

    `jax.jvp` gives primals and tangents that are Python numbers to rules as such.
    """
    is_other = isinstance(x, bool | int | float | complex | np.ndarray | np.generic)
    return jnp.asarray(x) if is_other and getattr(x, "dtype", None) != jax.dtypes.float0 else x


empty_jaxpr = Jaxpr([], [], [], [], debug_info=_core.DebugInfo("statetx", "nothing", (), ()))


def is_dropped(v: Var) -> bool:
    """Whether a result of an equation is a `DropVar`: no equation reads it."""
    return isinstance(v, _core.DropVar)


def with_nonzero(tangents: Sequence[Any]) -> tuple[list[Any], list[int]]:
    """Tangents as arrays, zeros unchanged, and the numbers of those that are not zero; of integers they are zero in
    fact, though not in type.
    """
    arrays: list[Any] = [t if type(t) is _Zero else as_array(t) for t in tangents]
    return arrays, [i for i, t in enumerate(arrays) if type(t) is not _Zero and t.dtype != jax.dtypes.float0]


def close(jaxpr: Jaxpr, consts: Sequence[Any]) -> ClosedJaxpr:
    """Close a jaxpr without constants over `consts`, the values of its first inputs."""
    num = len(consts)
    return ClosedJaxpr(jaxpr.replace(constvars=jaxpr.invars[:num], invars=jaxpr.invars[num:]), list(consts))


def drop_axis(aval: Any, axis: int) -> Any:
    """The type of one slice of an array of type `aval` along `axis`."""
    return _core.mapped_aval(aval.shape[axis], axis % len(aval.shape), aval)


def element_type(aval: Any, length: int) -> Any:
    """The type of an element of a value of so many, as a step of a loop gets it."""
    return _core.mapped_leading_aval(length, aval)


def with_weak_type(x: Any, weak: bool) -> Any:
    """Make the type of `x` weak or strong; its value is unchanged."""
    return _lax._convert_element_type(x, weak_type=weak)


def output_types(primitive: Any, inputs: Sequence[Any], params: dict[str, Any]) -> list[Any]:
    """The types of an operation's results."""
    if "call_jaxpr" in params:  # custom derivatives: JAX reads their types from the jaxpr
        return [v.aval for v in open_jaxpr(params["call_jaxpr"])[0].outvars]
    out = primitive.abstract_eval(*inputs, **params)[0]
    return list(out) if primitive.multiple_results else [out]


def is_debug_callback(primitive: Any) -> bool:
    """Whether an operation is ``jax.debug.callback`` or ``jax.debug.print``."""
    return primitive.name in ("debug_callback", "debug_print")


def inner_jaxprs(eqn: Eqn) -> Iterator[Jaxpr]:
    """The jaxprs among an equation's parameters."""
    for sub in _core.jaxprs_in_params(eqn.params):
        yield open_jaxpr(sub)[0]


def equations_in(x: Jaxpr | ClosedJaxpr) -> Iterator[Eqn]:
    """The equations of a jaxpr, closed or not, at any depth: each before those inside of it."""
    for eqn in open_jaxpr(x)[0].eqns:
        yield eqn
        for inner in inner_jaxprs(eqn):
            yield from equations_in(inner)


def read_variables(jaxpr: Jaxpr) -> set[Var]:
    """The variables that equations read, or that are results."""
    return {v for atoms in (jaxpr.outvars, *(e.invars for e in jaxpr.eqns)) for v in atoms if isinstance(v, Var)}


def zero_tangent(aval: Any) -> Any:
    """The tangent that a derivative rule returns for an output of this type: a symbolic zero."""
    return SymbolicZero(aval.to_tangent_aval())


def zeros(aval: Any) -> Any:
    """Zeros of a type, with its sharding unless that belongs to a mesh other than the current one."""
    # A type from outside a shard_map, say, names a mesh that no array made here can lie on. Zeros of a tangent, which
    # JAX instantiates, are no keys.
    is_key = jnp.issubdtype(aval.dtype, jax.dtypes.prng_key)
    if is_key or aval.sharding.mesh != jax.sharding.get_abstract_mesh():
        return jnp.zeros(aval.shape, aval.dtype)
    return _instantiate_zeros(_Zero(aval))


def is_jaxpr(x: Any) -> bool:
    return isinstance(x, (Jaxpr, ClosedJaxpr))


def open_jaxpr(x: Any) -> tuple[Jaxpr, Sequence[Any]]:
    """Split a jaxpr, closed or not, into the open jaxpr and its constants."""
    return (x.jaxpr, x.consts) if isinstance(x, ClosedJaxpr) else (x, getattr(x, "consts", ()))


CLOSED_CALL = closed_call_p.name  # "closed_call" before JAX 0.12, "eval_jaxpr" since


def scope(eqn: Eqn) -> str:
    """The name stack of an equation: names of ``jax.named_scope`` and of transforms, joined by slashes."""
    return str(eqn.source_info.name_stack)


# -- equations of `jax.experimental.checkify.check` ------------------------------------------------------------------


def error_numbers(jaxpr: Jaxpr) -> set[Var]:
    """The variables of a jaxpr that hold nothing but the number of an error: 0.10 counts the errors of all traces."""
    checks = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "check"]
    if not checks:
        return set()
    errors = [jax.tree.unflatten(eqn.params["err_tree"], eqn.invars) for eqn in checks]
    read = {v for error in errors for v in error.tree_flatten()[0][1].values() if isinstance(v, Var)}
    literal = [eqn for eqn in jaxpr.eqns if all(isinstance(v, Literal) for v in eqn.invars)]
    return read.intersection(v for eqn in literal for v in eqn.outvars)


def error_messages(tree: Any) -> list[Any]:
    """The messages of the errors in the tree of a check, in order, without their numbers; none of another object."""
    node = tree.node_data() if isinstance(tree, jax.tree_util.PyTreeDef) else None
    return list(node[1].values()) if node is not None and issubclass(node[0], checkify.Error) else []
