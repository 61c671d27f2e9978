"""`vjp`: the pullback of a function, by its arguments or by states."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, TypeVar, overload

import jax
import jax.numpy as jnp
import numpy as np

from .. import _jax, _states
from .._lift.carry import leaf_names
from .._lift.differentiated import DifferentiatedStates, state_argument_error
from .._lift.options import check_flags, notes_shapes
from .._lift.run import FramedRun
from .._lift.wrapper import check_callable, name_of
from .._text import type_str
from .._tree import Partition, is_array_or_number, is_opaque, partition
from .._typing import Filter, PyTree

R = TypeVar("R")
A = TypeVar("A")


@overload
def vjp(
    fun: Callable[..., tuple[R, A]], *primals: Any, wrt: PyTree | Filter = None, has_aux: Literal[True]
) -> tuple[R, Pullback, A]: ...
@overload
def vjp(
    fun: Callable[..., R], *primals: Any, wrt: PyTree | Filter = None, has_aux: Literal[False] = False
) -> tuple[R, Pullback]: ...
@_jax.api_boundary
@notes_shapes
def vjp(fun: Callable, *primals: Any, wrt: PyTree | Filter = None, has_aux: bool = False) -> tuple[Any, ...]:
    """Evaluate a function that may read and write states, and return its pullback.

    Args:
        fun: called as ``fun(*primals)``.
        *primals: arrays or pytrees of arrays, all differentiated; leaves of other types pass untouched, and with `wrt`
            models that their library has as pytrees, too.
        wrt: states to differentiate, too, as in `grad`.
        has_aux: whether `fun` returns a pair whose second item is passed through.

    Returns:
        ``(out, pullback)``, or with `has_aux` ``(out, pullback, aux)``. ``pullback(cotangent_of_out)`` returns a tuple
        with a cotangent for each primal; with `wrt`, the pair of the states' cotangents and this tuple. It runs
        none of the user's Python and writes no state. It is a pytree: a jitted function may return it. As in JAX,
        ``pullback.with_refs(*refs)`` is one that adds cotangents to Refs, given in the structure of the primals.

    State:
        Each written state is written once, with its value from the forward pass.

    Example:
        >>> import jax.numpy as jnp, statetx
        >>> n = statetx.State(0)
        >>> def f(x):
        ...     n.value += 1
        ...     return x * x
        >>> out, pullback = statetx.vjp(f, 3.0)
        >>> float(out), float(pullback(1.0)[0]), n.value
        (9.0, 6.0, 1)
    """
    check_callable("vjp", fun)
    check_flags("vjp", has_aux=has_aux)
    diff_states = DifferentiatedStates(wrt, fun, primals, {}) if wrt is not None else None
    arrays, primals_part = partition(primals, is_array_or_number, is_leaf=None if diff_states is None else is_opaque)
    if not arrays and diff_states is None:
        error = state_argument_error("vjp", fun, primals)
        if error is not None:
            raise error
    run = FramedRun("vjp", fun, has_aux, diff_states)
    pure = run.named(lambda state_values, *diff: run.flat(primals_part.combine(diff), state_values))
    values = diff_states.values() if diff_states else []
    out_leaves, vjp_fun, leaves = jax.vjp(pure, values, *arrays, has_aux=True)
    aux = run.finish(leaves, vjp_fun)

    # As in JAX, a Python bool, which is not differentiated, has a cotangent of type float0.
    static = [np.zeros((), jax.dtypes.float0) if isinstance(x, bool) else x for x in primals_part.static]
    primals_part = Partition(primals_part.treedef, primals_part.mask, tuple(static))
    types = [*map(jax.typeof, arrays)]
    dtypes = [getattr(x, "dtype", None) for x in out_leaves]
    pull = _Pull(name_of(fun), run.out, dtypes, primals_part, types, jax.tree.structure(values), diff_states)
    pullback = Pullback(pull, vjp_fun)
    out = run.out.combine(out_leaves)
    return (out, pullback, aux) if has_aux else (out, pullback)


def _as_cotangent(number: complex, dtype: Any) -> Any:
    """A Python number as an array of the type: a weak one, as in JAX, if it is of this type by itself."""
    array = jnp.asarray(number)
    return array if array.dtype == dtype else jnp.asarray(number, dtype)


@dataclasses.dataclass(frozen=True, eq=False)
class _Pull:
    """The static part of a pullback: structures of the output and primals, types of both, and differentiated states."""

    name: str
    out: Partition
    dtypes: list[Any]
    primals: Partition
    types: list[Any]
    states: Any
    diff_states: DifferentiatedStates | None

    def __call__(self, vjp_fun: Callable, *cotangents: Any) -> Any:
        if len(cotangents) != 1:
            raise TypeError(
                f"The pullback of {self.name} takes one argument, a cotangent in the structure of its output, "
                f"{self.out.treedef}, got {len(cotangents)} arguments."
            )
        ct_leaves, treedef = jax.tree.flatten(cotangents[0])
        if treedef != self.out.treedef:
            raise TypeError(
                f"The pullback of {self.name} needs a cotangent in the structure of its output, {self.out.treedef}, "
                f"got {treedef}."
            )
        # JAX takes no Python numbers as cotangents, and none for the leaves of the output that are not arrays.
        dynamic = [c for c, d in zip(ct_leaves, self.out.mask, strict=True) if d]
        converted = [
            _as_cotangent(c, dtype) if isinstance(c, (int, float, complex)) else c
            for c, dtype in zip(dynamic, self.dtypes, strict=True)
        ]
        state_cts, *array_cts = vjp_fun(converted)
        primal_cts = self.primals.combine(array_cts)
        return primal_cts if self.diff_states is None else (self.diff_states.combine(state_cts), primal_cts)

    def with_refs(self, vjp_fun: Any, refs: tuple) -> Callable:
        """JAX's pullback with what it shall do with the cotangent of each primal."""
        leaves, treedef = jax.tree.flatten(refs, is_leaf=None if self.diff_states is None else is_opaque)
        if treedef != self.primals.treedef:
            raise ValueError(
                f"with_refs of the pullback of {self.name} needs one entry for each primal, in their structure, "
                f"{self.primals.treedef}, got {treedef}.\nFix: jax.ad.GradValue() for a cotangent that is returned, "
                f"jax.ad.DontWant() for one that is not needed."
            )
        entries = [x for x, is_dynamic in zip(leaves, self.primals.mask, strict=True) if is_dynamic]
        # Checked here: JAX's names of the primals are those of the function around the user's.
        for path, x, aval in zip(leaf_names(self.primals), entries, self.types, strict=True):
            ct = aval.to_ct_aval()
            if isinstance(x, jax.Ref) and hasattr(ct, "dtype") and (x.shape, x.dtype) != (ct.shape, ct.dtype):
                raise ValueError(
                    f"with_refs of the pullback of {self.name}: primals{path} has a cotangent of type {type_str(ct)}, "
                    f"and its entry is {_states.describe(x)}.\nFix: jax.new_ref(jnp.zeros_like(primal))."
                )
        of_states = [jax.ad.GradValue()] * self.states.num_leaves  # pyright: ignore[reportPrivateImportUsage]
        return vjp_fun.with_refs(jax.tree.unflatten(self.states, of_states), *entries)

    def __repr__(self) -> str:
        return f"<pullback of {self.name}>"


class Pullback(jax.tree_util.Partial):
    """A `_Pull` applied to JAX's pullback, whose residuals are its leaves."""

    def with_refs(self, *refs: Any) -> Callable[[Any], Any]:
        """As that of the pullback of ``jax.vjp``."""
        return jax.tree_util.Partial(self.func, self.func.with_refs(*self.args, refs))


jax.tree_util.register_pytree_node(Pullback, lambda p: (p.args, p.func), lambda pull, args: Pullback(pull, *args))
