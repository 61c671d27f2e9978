"""Primitives that mark values for policies (`statetx._remat.mark`), with their rules under `jax.checkpoint`.

A value that is saved passes through `mark_primitive`. A value v whose residual is stored small is computed by the
equations

    codes = encode(v)               marked, so that the region saves them
    link = link(v)
    decoded = decode(codes)
    w = stored(v, decoded, link)

and every later equation reads w, which is v. Partial evaluation divides the last equation (`_divide`): the forward pass
has ``w = attach(v, link)``, which is v; the backward pass ``w = attach(decoded, link)``, which is the decoded value, so
that nothing there reads v.

Codes have no tangents. A derivative of the gradient needs v's, and it reaches the backward pass through `link`: an
array with the shape of v, whose entries take no bytes and whose tangents are v's tangents.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax._src import core as _core
from jax._src import dtypes as _dtypes
from jax._src import tree_util as _tree_util
from jax._src.dispatch import apply_primitive as _apply_primitive
from jax._src.earray import EArray
from jax._src.interpreters import ad as _ad
from jax._src.interpreters import batching as _batching
from jax._src.interpreters import mlir as _mlir
from jax._src.interpreters import partial_eval as _pe
from jax._src.interpreters import pxla as _pxla
from jax._src.sharding_impls import physical_sharding as _physical_sharding

from .equations import Var, zeros
from .primitives import identity

# -- marks ---------------------------------------------------------------------------------------------------------

mark_primitive = identity("statetx_mark")
"""The identity, on a value that a region of `statetx.remat` saves: ``region`` is the number of the region, ``what`` a
label, which says whether the value is saved or offloaded (the planner writes the value's place). Unlike a name, JAX's
policies ignore it.
"""


def mark_equation(like: Any, source: Any, result: Any, *, region: int, what: str) -> Any:
    """An equation ``result = mark(source)``, with the source line and context of the equation `like`."""
    params = {"region": region, "what": what}
    return _core.new_jaxpr_eqn([source], [result], mark_primitive, params, _core.no_effects, like.source_info, like.ctx)


def mark(x: Any, *, region: int, what: str) -> Any:
    """Mark a value while tracing."""
    return mark_primitive.bind(x, region=region, what=what)


# -- links ---------------------------------------------------------------------------------------------------------


class _LinkScalar(jax.dtypes.extended):
    """The scalar type of links, as JAX wants it for every dtype."""


@dataclasses.dataclass(frozen=True)
class LinkDType(_dtypes.ExtendedDType):
    """The dtype of links: entries without bytes, whose tangents have a dtype of their own."""

    tangent_dtype: Any
    type = _LinkScalar  # pyright: ignore[reportAssignmentType]  # a property in the base class
    itemsize = 0

    @property
    def name(self) -> str:
        return f"link<{self.tangent_dtype.name}>"

    @property
    def _rules(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        return types.SimpleNamespace(
            physical_element_aval=lambda dtype: _core.ShapedArray((0,), np.dtype("uint8")),
            tangent_dtype=lambda dtype: self.tangent_dtype,
            allow_conversion=False,
            global_sharded_result_handler=_result_handler,
        )

    def __repr__(self) -> str:
        return self.name


class _Links(EArray):
    """Links outside of compiled programs. Unlike a plain `EArray` it has shards: ``jax_debug_nans`` searches them."""

    __slots__ = ()

    @property
    def addressable_shards(self) -> Any:
        return self._data.addressable_shards


# JAX looks up what to do with an array by its exact type.
_pxla.shard_arg_handlers[_Links] = _pxla.shard_arg_handlers[EArray]
_core.pytype_aval_mappings[_Links] = _core.pytype_aval_mappings[EArray]
_dtypes.register_canonicalize_value_handler(_Links, None)
_tree_util.dispatch_registry.register_node(
    _Links, lambda x: ((x._data,), x.aval), lambda aval, data: _Links(aval, data[0])
)


def _result_handler(aval: Any, out_sharding: Any, committed: bool) -> Any:
    """Make an array of a compiled program's output, as JAX does."""
    make = _pxla.global_result_handlers[_core.ShapedArray]
    handler = make(_core.physical_aval(aval), _physical_sharding(aval, out_sharding), committed)
    return handler.wrap(lambda buffers: _Links(aval, buffers))


def is_link(aval: Any) -> bool:
    return isinstance(getattr(aval, "dtype", None), LinkDType)


link_primitive = _core.Primitive("statetx_link")
link_primitive.def_impl(functools.partial(_apply_primitive, link_primitive))
link_primitive.def_abstract_eval(lambda v: v.update(dtype=LinkDType(v.dtype), weak_type=False))
_ad.primitive_jvps[link_primitive] = lambda primals, tangents: (link_primitive.bind(*primals), tangents[0])
_batching.primitive_batchers[link_primitive] = lambda args, dims: (link_primitive.bind(*args), dims[0])


def _lower_link(ctx: Any, v: Any) -> list[Any]:
    physical: Any = _core.physical_aval(ctx.avals_out[0])
    return [_mlir.full_like_aval(ctx, 0, physical)]


_mlir.register_lowering(link_primitive, _lower_link)


def _save_always(saveable: Callable, unknown: Sequence[bool], inst: Sequence[bool], eqn: Any) -> Any:
    """Divide an equation whose result every region saves; returns as `_divide`."""
    if unknown[0]:
        return None, eqn, [True], [True], _missing(inst, eqn)
    if saveable is jax.checkpoint_policies.nothing_saveable:  # as for the body of a while_loop, which cannot save
        return eqn, eqn, [False], [True], _missing(inst, eqn)
    return eqn, None, [False], [False], []


# A link takes no bytes, and to compute it again would take v.
_pe.partial_eval_jaxpr_custom_rules[link_primitive] = _save_always


def new_link(aval: Any) -> Any:
    """A link of a type, to a value without tangents. Links have no bytes, so it is as good as any other."""
    return link_primitive.bind(zeros(aval.update(dtype=aval.dtype.tangent_dtype)))


# -- stored values -------------------------------------------------------------------------------------------------

stored_primitive = identity("statetx_stored", is_one=True)
"""The identity on its first operand: ``stored(v, decoded, link)``; without a link if v has no tangents. Parameters:
``type``, the `StoredType`; ``region`` and ``what``, of the marks on the codes; ``is_ordered``, whether what follows has
to wait for the codes.
"""

attach_primitive = identity("statetx_attach", tangent=-1, is_one=True)
"""The identity on its first operand, with the tangents of the last, a link: ``attach(x, link)``. Operands and
parameters as of `stored_primitive`.
"""


def _missing(inst: Sequence[bool], eqn: Any) -> list[Any]:
    """The operands that become residuals of the backward pass."""
    return [v for v, i in zip(eqn.invars, inst, strict=True) if isinstance(v, Var) and not i]


def _divide(saveable: Callable, unknown: Sequence[bool], inst: Sequence[bool], eqn: Any) -> Any:
    """Divide an equation of `stored_primitive` between the forward and the backward pass.

    Returns, for JAX's partial evaluation: both equations, whether the result is unknown, whether the backward pass
    computes it, and the residuals of the backward pass.
    """
    if any(unknown):
        return None, eqn, [True], [True], _missing(inst, eqn)
    if _is_saved(saveable, stored_primitive, eqn, eqn.params):  # by a policy that saves everything
        return eqn, None, [False], [False], []
    # The question that was asked about the marks on the codes. Another region's policy computes v again.
    if not _is_saved(saveable, mark_primitive, eqn, {key: eqn.params[key] for key in ("region", "what")}):
        return eqn, eqn, [False], [True], _missing(inst, eqn)

    exact, decoded, *links = eqn.invars
    forward = eqn.replace(invars=[exact, *links], primitive=attach_primitive)
    backward = eqn.replace(invars=[decoded, *links], primitive=attach_primitive)
    return forward, backward, [False], [True], _missing(inst[1:], backward)


def _is_saved(saveable: Callable, primitive: Any, eqn: Any, params: dict[str, Any]) -> bool:
    answer = saveable(primitive, eqn.invars[0].aval, **params)
    return not isinstance(_pe.ensure_enum(answer), _pe.RecomputeType)


_pe.partial_eval_jaxpr_custom_rules[stored_primitive] = _divide


def store(x: Any, type: Any, constant: tuple[Any, Any] | None = None, **params: Any) -> Any:
    """The value itself, but with the residual that ``type.encode`` makes of it.

    Args:
        x: an array, while tracing.
        type: a `StoredType`.
        constant: a boolean and the value of `x` where it holds: there the backward pass takes this instead of the
            residual.
        **params: the others of `stored_primitive`.
    """
    label = {key: params[key] for key in ("region", "what")}
    source = x if constant is None else jax.lax.select(constant[0], zeros(x.aval), x)
    codes = mark(_encoder(type)(source), **label)
    decoded = _decoder(type, x.aval)(codes)
    if constant is not None:
        decoded = jax.lax.select(constant[0], jax.lax.stop_gradient(constant[1]), decoded)
    links = [link_primitive.bind(x)] if jnp.issubdtype(x.dtype, jnp.inexact) else []
    return stored_primitive.bind(x, decoded, *links, type=type, **params)


# Cached, so that JAX caches their jaxprs and compiled programs. Reports find the format in the name.
@functools.lru_cache(1024)
def _encoder(type: Any) -> Callable:
    def encode(x: Any) -> Any:
        return type.encode(jax.lax.stop_gradient(x))

    encode.__name__ = encode.__qualname__ = f"{_ENCODE}{type}"
    return jax.jit(encode)


@functools.lru_cache(1024)
def _decoder(type: Any, aval: Any) -> Callable:
    def decode(codes: Any) -> Any:
        return type.decode(codes, aval)

    decode.__name__ = decode.__qualname__ = f"{_DECODE}{type}"
    return jax.jit(decode)


_ENCODE, _DECODE = "statetx_encode_", "statetx_decode_"


def encoded_as(eqn: Any) -> str:
    """The name of the format that an equation encodes its operand in; "" for any other equation."""
    name = eqn.params["name"] if eqn.primitive.name == "jit" else ""
    return name.removeprefix(_ENCODE) if name.startswith(_ENCODE) else ""


def is_storing(eqn: Any) -> bool:
    """Whether an equation belongs to a value stored in another form (`store`); none of its results is a value of the
    user's function.
    """
    if eqn.primitive in (link_primitive, stored_primitive, attach_primitive):
        return True
    return eqn.primitive.name == "jit" and eqn.params["name"].startswith((_ENCODE, _DECODE))
