"""Views: `statetx.State`s as brainstate's transforms see them (decision 5).

Relied upon beyond the documented interface, and tested in `tests/test_brainstate.py`: the attributes ``_value``,
``_level`` of a state, its methods ``_read_value`` and ``_invalidate_trace_value``; the functions that make a predicate
from the states declared to a `vmap`.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any, NoReturn

import brainstate
import jax
from brainstate import _state as _private
from brainstate.transform import _mapping1 as _declared
from brainstate.transform import _mapping_core as _selected

from ... import _frames, _jax, _states
from ..._atomic import commit, locked
from ..._errors import StateAccessError
from ..native import NATIVE, RngState, State, _reset_dead_home

_context: Any = _private.TRACE_CONTEXT


class View(brainstate.State):
    """A `brainstate.State` without a value of its own: it reads and writes the value of a `statetx.State`."""

    native: State

    @property
    def _value(self) -> Any:
        return self.native._value

    @_value.setter
    def _value(self, value: Any) -> None:
        native, frame = self.native, _frames.current_frame()
        if native._home is not None:  # made inside the transform that now stores its result
            _reset_dead_home(native, frame if frame is not None and native._owner is frame else None)
        native._value = value

    def _read_value(self) -> Any:
        # The lock keeps other threads from acquiring the state between the check and the read.
        return locked(_frames.ownership, lambda: (self.check_free(), self._value)[1])

    def check_free(self) -> None:
        """Raise if a call in another thread owns the state."""
        owner = self.native._owner
        if owner is not None and owner.thread != threading.get_ident():
            raise _frames.foreign_state_error(self.native, NATIVE, owner)

    def _invalidate_trace_value(self) -> None:
        commit(NATIVE.invalidate(self.native, "it was created inside a transform of brainstate", None))

    @property
    def type(self) -> type:
        """Type for brainstate's filters: `statetx.Param` selects the views of `statetx.Param`s."""
        return type(self.native)

    def __repr__(self) -> str:
        return _states.describe(self.native, NATIVE)

    def raise_error_with_source_info(self, error: Exception) -> NoReturn:
        raise StateAccessError(
            f"{self!r} cannot be used in this way under a transform of brainstate: {' '.join(str(error).split())}\n"
            f"Fix: declare the state where brainstate asks for it, or use statetx's transform of the same name."
        ) from error


class _RandomView(View, brainstate.random.RandomState):
    """The view of an `RngState`: a brainstate `vmap` gives each example its own key."""

    def check_if_deleted(self) -> None:
        # brainstate would make a typed key of a NumPy value, its placeholder for a seed; here it is the user's own key
        pass


_TEMPLATE = brainstate.State(None)


def view_of(state: State, level: int) -> View:
    """The view of a state, made at its first touch by a transform of brainstate.

    `level`: the number of trace stacks that do not see the state; brainstate reports a touch to those entered later.
    """
    view: Any = None if state._view is None else state._view()
    if view is None:
        attributes = vars(_TEMPLATE.copy()).copy()  # without its constructor, which would report a new state
        del attributes["_value"]
        view = object.__new__(_RandomView if isinstance(state, RngState) else View)
        view.__dict__.update(attributes, native=state, _level=level, _name=state.name, _backup=None)
        state._view = weakref.ref(
            view
        )  # a strong reference would make a cycle, and keep what a transform leaves behind until it is collected
    elif level < view._level:  # the view was made inside a transform that it has outlived
        view.__dict__["_level"] = level
    return view


def _with_views(select: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Let a function of brainstate that turns states into a predicate accept `statetx.State`s."""

    def view(x: Any) -> Any:
        return view_of(x, len(_context.state_stack)) if isinstance(x, State) else x

    @functools.wraps(select)
    def selected(states: Any) -> Any:
        views = jax.tree.map(view, states)
        predicate = select(views)

        def is_selected(*args: Any) -> bool:
            return predicate(*args)

        is_selected.__dict__["views"] = views  # keeps them alive: the predicate compares ids
        return is_selected

    return selected


for _module, _name in ((_declared, "make_identity_predicate"), (_selected, "coerce_axis_value_to_predicate")):
    _jax.patches.replace(
        f"{_module.__name__}.{_name}",
        _module,
        _with_views(getattr(_module, _name)),
        "The arguments that declare states to a map of brainstate may be `statetx.State`s, too; any other argument "
        "is forwarded.",
    )
