"""Types of loop carries: promotion of weak types, errors for drift.

One compiled body serves every step, so a value must enter and leave a step with the same type. Only the weak type of a
Python number (``State(0.0)``, ``jnp.full(shape, 0.0)``) may change, as in `jax.lax`: if it promotes to the dtype that
the body returns or writes, the initial value is converted and the body is staged again. This may change further weak
leaves, so it is repeated until none changes. Each staging makes a weak leaf strong, which bounds the number of
stagings; two are enough unless leaves depend on each other. If only the weakness differs nothing is staged again: the
result has the type that leaves a step, also as in `jax.lax`.

The rule is the same for the carry that the caller passes and for the states that the body writes: `settle` applies it
to both.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import _jax, _states
from .._errors import CarryTypeError, StateValueError
from .._frames import Effect
from .._frames.foreign import held_by_libraries, undo_changes
from .._objects.paths import Paths
from .._text import tree_type_str, type_str
from .._tree import Partition, as_array, is_model, partition
from .._typing import PyTree
from .staged import Staged, is_loop_leaf
from .wrapper import name_of


def flatten_carry(name: str, init: PyTree) -> tuple[list[Any], Partition]:
    """Flatten a carry to array leaves and its `Partition`.

    Raises:
        StateValueError: a leaf is neither an array nor a number.
    """
    leaves, part = partition(init, is_loop_leaf, is_leaf=is_model)
    if part.static:
        x = part.static[0]
        fix = "Give its .value, or close over it in the body" if _states.kind_of(x) else "Close over it in the body"
        raise StateValueError(f"{name}: the carry holds a {type(x).__name__}, which is not an array. {fix}.")
    return [as_array(x) for x in leaves], part


def settle(
    stage: Callable[[list, Callable], Staged],
    carry: list,
    part: Partition,
    *,
    num_before: int = 0,
    is_carried: Callable[[Effect], bool] = lambda effect: True,
) -> tuple[Staged, list, Callable]:
    """Stage the body of a loop, and promote initial values until the types that enter and leave a step agree.

    Args:
        stage: ``(carry, enter) -> body``; `enter` maps a state to its initial value, as in `Staged`.
        carry: leaves of the carry.
        part: the `Partition` of the carry.
        num_before: the number of arguments (and of output trees) of the body before the carry.
        is_carried: whether the loop carries a written state.

    Returns:
        The body, the carry with promoted leaves, and `enter`.

    Raises:
        CarryTypeError: a leaf enters a step with one type and leaves it with another, and the first does not promote
            to the second.
    """
    promoted: dict[int, tuple[Any, PyTree]] = {}  # by id of the state; holds the state, so that its id stays its own

    def enter(state: Any, value: PyTree) -> PyTree:
        return promoted.get(id(state), (state, value))[1]

    held = held_by_libraries()
    while True:
        body = stage(carry, enter)
        returned = body.outs[num_before]
        out_avals = body.out_avals[num_before : num_before + returned.num_dynamic]
        changed = False
        if returned.treedef == part.treedef:
            first, carry = carry, [promote(x, aval) for x, aval in zip(carry, out_avals, strict=True)]
            changed = any(x is not y for x, y in zip(first, carry, strict=True))
        carried = [effect for effect in body.effects if is_carried(effect)]
        for effect in carried:
            value = _promoted_value(body, effect)
            if value is not None:
                promoted[id(effect.state)] = effect.state, value
                changed = True
        if not changed:
            break
        undo_changes(held)  # the next run of the body shall give haiku's modules the same names

    _check_carry(body, part, body.avals[num_before : num_before + len(carry)], returned, out_avals)
    paths = Paths(body.fun)
    for effect in carried:
        _check_written(body, effect, paths)
    return body, carry, enter


def promote(x: Any, aval: Any) -> Any:
    """Promote `x` to the dtype of `aval`, the type of the next value, if the type of `x` is weak; and in a
    `jax.shard_map` to a value that may vary between devices where the next one does, as operations do with operands.
    """
    x = _as_dtype(x, aval)
    missing = _jax.varying_axes(aval) - _jax.varying_axes(_jax.abstract(x))
    return _jax.as_varying(jnp.asarray(x), sorted(missing)) if missing else x


def _as_dtype(x: Any, aval: Any) -> Any:
    """As ``jax.lax.scan`` does, except that `x` is left unchanged if it does not promote to exactly that dtype."""
    in_aval = _jax.abstract(x)
    if not _jax.is_weak(in_aval) or in_aval.shape != aval.shape or in_aval.dtype == aval.dtype:
        return x
    try:
        dtype = jnp.result_type(x, aval)
    except ValueError:  # a key, or an integer where promotion is strict
        return x
    return jax.lax.convert_element_type(x, dtype) if dtype == aval.dtype else x


def _promoted_value(body: Staged, effect: Effect) -> PyTree | None:
    """The initial value of a written state with promoted leaves; None if no leaf needs promotion."""
    read, written = body.inputs[id(effect.state)], body.written[id(effect.state)]
    first = read.partition.combine(read.values)
    leaves, part = partition(first, is_loop_leaf)
    if (part.treedef, part.mask) != (written.treedef, written.mask):
        return None
    # A Python bool in a state is a flag that Python may branch on; once the body writes it, it is an array, as in the
    # carry.
    pairs = zip(leaves, body.written_avals[id(effect.state)], strict=True)
    promoted = [np.bool_(x) if isinstance(x, bool) else promote(x, aval) for x, aval in pairs]
    return None if all(x is y for x, y in zip(leaves, promoted, strict=True)) else part.combine(promoted)


# -- drift -----------------------------------------------------------------------------------------------------


def differs(a: Any, b: Any) -> bool:
    """Whether two types differ in shape, dtype or explicit sharding; weakness does not count, nor whether values vary
    between the devices of a `jax.shard_map`.
    """
    return _jax.strong_type(a) != _jax.strong_type(b)


def _check_carry(body: Staged, first: Partition, avals: Sequence[Any], returned: Partition, out_avals: Any) -> None:
    if returned.treedef != first.treedef:
        raise CarryTypeError(
            f"{body.name}: the body {name_of(body.fun)} must return a carry with the structure of the carry that it "
            f"gets,\n"
            f"  gets:    {tree_type_str(first.combine(avals))}\n  returns: {tree_type_str(returned.combine(out_avals))}"
        )
    for n, (a, b) in enumerate(zip(avals, out_avals, strict=True)):
        if differs(a, b):
            in_type, out_type = type_str(a), type_str(b)
            raise CarryTypeError(
                f"{body.name}: the body {name_of(body.fun)} changes the type of carry{leaf_names(first)[n]}: it enters "
                f"a step as {in_type} and leaves it as {out_type}.\n"
                f"Fix: convert it in the body{_resharding(in_type, out_type)}, or start with the type that the body "
                f"returns."
            )


def _resharding(*types: str) -> str:
    return " (jax.sharding.reshard)" if "@" in "".join(types) else ""


def _check_written(body: Staged, effect: Effect, paths: Callable[[Any], str]) -> None:
    """Raise if a state leaves the body with another type than it enters with."""
    read, written = body.inputs[id(effect.state)].partition, body.written[id(effect.state)]
    avals, out_avals = body.inputs[id(effect.state)].avals, body.written_avals[id(effect.state)]
    leaf, fix = "", None
    if (read.treedef, read.mask, read.static) == (written.treedef, written.mask, written.static):
        drift = next((n for n, (a, b) in enumerate(zip(avals, out_avals, strict=True)) if differs(a, b)), None)
        if drift is None:
            return
        leaf = leaf_names(read)[drift]
        a, b = avals[drift], out_avals[drift]
        changed = [type_str(a), type_str(b)]
        if body.name in ("microbatch", "chunked") and a.shape[1:] == b.shape[1:] and a.shape[:1] > b.shape[:1] > ():
            fix = (
                f"if it has a value for each example, states={{{paths(effect.state)!r}: 0}}, or a type in place of "
                f"the path, gives each part its own"
            )
    else:
        changed = structure_strs([(read, avals), (written, out_avals)])
    raise drift_error(body.name, effect, paths, leaf, changed, "step", fix)


def structure_strs(values: Sequence[tuple[Partition, Sequence[Any]]]) -> list[str]:
    """Texts for the structures of values that differ: the types of the trees, or the treedefs if these have no or equal
    texts.
    """
    with contextlib.suppress(Exception):  # a container may refuse leaves that are not arrays
        texts = [tree_type_str(part.combine(avals)) for part, avals in values]
        if len(set(texts)) > 1:
            return texts
    return [str(part.treedef) for part, _ in values]


def drift_error(
    name: str,
    effect: Effect,
    paths: Callable[[Any], str],
    leaf: str,
    types: Sequence[str],
    serves: str,
    fix: str | None = None,
) -> CarryTypeError:
    """The error for a write that gives a state another type; `types` are the types on entry and on exit."""
    in_type, out_type = types
    hint = _resharding(in_type, out_type)
    fix = fix or f"create the state with the type that is written, or convert the value before writing it{hint}"
    weak = " (~ marks a weak type, as of a Python number)" if "~" in in_type + out_type else ""
    return CarryTypeError(
        f"{name} changes the type of {type(effect.state).__name__} {paths(effect.state)!r}{leaf}, made at "
        f"{effect.kind.site_of(effect.state)}: it enters as {in_type} and leaves as {out_type}{weak}, written at "
        f"{effect.site}.\nA state must keep its type here, since one compiled body serves every {serves}.\n"
        f"Fix: {fix}."
    )


def leaf_names(part: Partition, leaves: Sequence[Any] | None = None) -> list[str]:
    """The path of each dynamic leaf in its tree: ``.ret``, ``['w'][0]``; empty for a lone leaf.

    Args:
        leaves: the dynamic leaves, for a container that takes nothing else.
    """
    tree = part.combine(range(part.num_dynamic) if leaves is None else leaves)
    keys = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_states.is_opaque)[0]
    return [jax.tree_util.keystr(path) for (path, _), dynamic in zip(keys, part.mask, strict=True) if dynamic]
