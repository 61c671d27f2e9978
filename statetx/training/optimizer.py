"""`Optimizer`: an optax optimizer that stores its own memory in a state."""

from __future__ import annotations

import inspect
from typing import Any, Generic, Never, TypeVar

import jax
import jax.numpy as jnp

from .. import _frames, _jax, _states
from .._errors import GradientError, StateFilterError, StateValueError
from .._lift.run import run_eagerly
from .._objects.paths import is_filter
from .._text import brief, counted, format_bytes, suggestion, type_str
from .._tree import flatten, is_array, is_array_or_number, num_bytes, with_plain_dict
from .._typing import PyTree, public
from ..kinds.native import State

# Methods that optimizers of other libraries have, and what to use for them.
_ELSEWHERE = {
    "step": "gradients are values here. Use optimizer.update(grads), with grads = statetx.grad(loss, "
    "wrt=optimizer.states)(x)",
    "apply_gradients": "use optimizer.update(grads)",
    "zero_grad": "gradients are values here, and none are left from an earlier step. Leave it out",
    "param_groups": "the states are optimizer.states; for several learning rates use optax.partition",
    "state_dict": "take statetx.values({'model': model, 'optimizer': optimizer})",
    "load_state_dict": "use statetx.restore({'model': model, 'optimizer': optimizer}, values)",
}


S = TypeVar("S")


@public
class Optimizer(Generic[S]):
    """Update states with an optax optimizer, whose own memory (momenta, counts) is a state.

    Every transform handles that state: `jit` passes it in and out, `scan` carries it, an exception rolls it back, and
    ``statetx.states({"model": model, "optimizer": optimizer})`` finds it, for saving, as ``optimizer.state``.

    Args:
        tx: a gradient transformation: an object with optax's ``init(params)`` and ``update(grads, state, params)``.
        states: the states to update: a state, or a dict, list or other pytree of states, of any kinds, with
            floating-point or complex values. ``statetx.states(model, statetx.Param)`` gives such a dict.

    Attributes:
        tx: the transformation.
        states: the argument; differentiate with ``wrt=optimizer.states``.
        state: a `State` with the optimizer state of ``tx``.

    Raises:
        StateFilterError: `states` holds something other than states, no state, or a state twice.
        StateValueError: a state's value is not differentiable.

    Example:
        >>> import jax.numpy as jnp, optax, statetx
        >>> w = statetx.Param(jnp.array([1.0, -2.0]))
        >>> optimizer = statetx.Optimizer(optax.sgd(0.25), {"w": w})
        >>> @statetx.jit
        ... def step():
        ...     loss, grads = statetx.value_and_grad(lambda: (w.value**2).sum(), wrt=optimizer.states)()
        ...     optimizer.update(grads)
        ...     return loss
        >>> float(step()), float(step()), w.value
        (5.0, 1.25, Array([ 0.25, -0.5 ], dtype=float32))
    """

    def __init__(self, tx: Any, states: S = ()):  # type: ignore[assignment]  # the default has an error of its own
        if not _is_transformation(tx):
            call = " Did you call it?" if inspect.isroutine(tx) else ""
            swapped = " The transformation comes first: Optimizer(tx, states)." if _is_transformation(states) else ""
            raise TypeError(
                f"Optimizer needs a gradient transformation with init and update, such as optax.adam(1e-3), got "
                f"{brief(tx)}.{call}{swapped}"
            )
        self.tx = tx
        self.states = states
        self._states, self._treedef = _flatten(states)
        self.state = State(jax.tree.map(_strong, tx.init(self._values())), name="optimizer")

    def update(self, grads: PyTree, *others: Never, **extra: Any) -> None:
        """Take one step.

        Args:
            grads: the result of ``grad(fun, wrt=optimizer.states)``: a gradient in place of each state, with the
                structure of the state's value.
            **extra: further arguments of the transformation, such as ``value=loss``.

        State:
            Reads and writes every state and the optimizer's own: all of them, or none if it fails. A state keeps its
            dtype.

        Raises:
            GradientError: `grads` has another structure, or an array of another shape.
        """
        if others:
            raise TypeError(
                "Optimizer.update takes the gradients alone: the optimizer has the states, and its own memory.\n"
                "Fix: optimizer.update(grads), without the model or its parameters."
            )
        run_eagerly("Optimizer.update", self._update, (grads,), extra)

    def _update(self, grads: PyTree, **extra: Any) -> None:
        values = self._values()
        _check(grads, values)
        updates, optimizer_state = self.tx.update(grads, self.state.value, values, **extra)

        # Without optax, which is not imported: `tx` is any object with `init` and `update`. The sum may have a wider
        # dtype than the state, which keeps its own.
        updated = jax.tree.map(lambda x, u: jnp.asarray(x + u, jnp.result_type(x)), values, updates)
        for state, value in zip(self._states, self._treedef.flatten_up_to(updated), strict=True):
            _states.kind_of_state(state).write(state, value)
            _frames.note_step(state)
        self.state.value = optimizer_state

    def __getattr__(self, name: str) -> Any:
        hint = f": {_ELSEWHERE[name]}" if name in _ELSEWHERE else ""
        raise AttributeError(f"'Optimizer' object has no attribute {name!r}{hint}", name=name, obj=self)

    def _values(self) -> PyTree:
        return jax.tree.unflatten(self._treedef, [_states.kind_of_state(state).read(state) for state in self._states])

    def __repr__(self) -> str:
        size, remembered = format_bytes(sum(map(_bytes_of, self._states))), format_bytes(_bytes_of(self.state))
        return f"Optimizer({counted(len(self._states), 'state')}, {size}; remembers {remembered})"


def _is_transformation(x: Any) -> bool:
    try:
        return hasattr(x, "init") and hasattr(x, "update")
    except KeyError:  # a brainstate dict of states, which has its items as attributes
        return False


def _bytes_of(state: Any) -> int:
    return num_bytes(_states.kind_of_state(state).get(state))  # `get`: printing is not a read


def _flatten(states: PyTree) -> tuple[list[Any], Any]:
    """The states of a pytree and its structure, after checking each state."""
    if is_filter(states):
        raise StateFilterError(
            f"Optimizer needs the states themselves, got the filter {brief(states)}. Write statetx.states(model, "
            f"{brief(states)})."
        )
    leaves, treedef = flatten(with_plain_dict(states), is_leaf=_states.is_opaque)
    if not leaves:
        raise StateFilterError(
            "Optimizer got no states, and would update nothing.\n"
            "Cause: the argument states is left out; or the filter given to statetx.states selects none; or the object "
            "holds none, such as a class in place of its instance.\n"
            "Fix: Optimizer(tx, statetx.states(model, statetx.Param)); statetx.states(model) shows what the model has."
        )

    seen: set[int] = set()
    for state in leaves:
        kind = _states.kind_of(state)
        if kind is None:
            raise StateFilterError(
                f"Optimizer: states= holds {type_str(state) if is_array(state) else f'a {type(state).__name__}'}, "
                "which is not a state. Pass a dict of states, such as statetx.states(model, statetx.Param)."
            )
        if id(state) in seen:
            raise StateFilterError(
                f"Optimizer: states= lists {_states.describe(state, kind)} twice, so it would be updated twice."
            )
        seen.add(id(state))

        # `get` rather than `read`: to check a value is not to read the state, which a surrounding transform would
        # count.
        for x in jax.tree.leaves(kind.get(state)):
            if not (is_array_or_number(x) and jnp.issubdtype(jnp.result_type(x), jnp.inexact)):
                raise StateValueError(
                    f"Optimizer cannot update {_states.describe(state, kind)}: gradients need floating-point or "
                    "complex arrays. Leave it out of states=."
                )
    return leaves, treedef


def _strong(x: Any) -> Any:
    """Make strongly typed. The first update does, and would change the type of the optimizer's state."""
    if not is_array_or_number(x):
        return x
    x = jnp.asarray(x)
    return _jax.with_weak_type(x, False) if jax.typeof(x).weak_type else x


def _check(grads: PyTree, values: PyTree) -> None:
    # By path, since leaves in order would be compared with the wrong states after the first difference.
    grad_leaves, value_leaves = _by_path(grads), _by_path(values)
    if jax.tree.structure(grads) != jax.tree.structure(values):
        missing, unknown = (
            [p for p in a if p not in b] for a, b in ((value_leaves, grad_leaves), (grad_leaves, value_leaves))
        )
        problems = []
        if missing:
            problems.append(f"there is none for {_listed(missing)}" if missing != [""] else "there is one state, alone")
        if unknown == [""]:
            problems.append(f"they are a single array, {type_str(grads)}")
        elif unknown:
            problems.append(f"there is one for {_listed(unknown)}, which is not among the states")
        # Neither: the containers differ, with the same paths.
        difference = (
            "; ".join(problems) or f"they are {jax.tree.structure(grads)}, the states {jax.tree.structure(values)}"
        )
        fix = "differentiate with wrt=optimizer.states"
        if (
            isinstance(grads, (tuple, list))
            and len(grads) == 2
            and jax.tree.structure(grads[1]) == jax.tree.structure(values)
        ):
            fix = "value_and_grad returns a pair (value, gradients): update with the second"
        elif unknown == [""] and not jnp.shape(grads):  # type: ignore[arg-type]
            fix += "; is it the loss? value_and_grad returns a pair (value, gradients)"
        raise GradientError(
            f"The gradients do not match the optimizer's states: {difference}."
            f"{suggestion(unknown[0], missing) if unknown else ''}\n"
            f"Fix: {fix}."
        )

    for path, x in value_leaves.items():
        if jnp.shape(grad_leaves[path]) != jnp.shape(x):
            raise GradientError(
                f"The gradient for {path or 'the state'!r} is {type_str(grad_leaves[path])}, the state's value "
                f"{type_str(x)}. They must agree in "
                f"shape.\nFix: differentiate with wrt=optimizer.states, and reduce over examples before the update."
            )


def _by_path(tree: PyTree) -> dict[str, Any]:
    leaves = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_states.is_opaque)[0]
    return {jax.tree_util.keystr(keys, simple=True, separator="."): x for keys, x in leaves}


def _listed(paths: list[str]) -> str:
    tail = f" and {len(paths) - 3} more" if len(paths) > 3 else ""
    return ", ".join(map(repr, paths[:3])) + tail
