"""`NewStates`: what a function does with the states that it gets in the place of those in its arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from ... import _frames, _states
from ..._objects.walk import held_states
from ..._tree import is_model
from ..._typing import PyTree
from .arguments import Call


class NewStates:
    """The new states that a function gets in the place of those in its arguments, by themselves or in new models.

    Args:
        trees: the arguments that the function gets, without static ones.
        donated: the arrays in them that are donated.

    Attributes:
        ids: of the new states.

    Raises:
        Reread: a state is there twice.
    """

    def __init__(self, call: Call, trees: PyTree, donated: Sequence[Any]):
        self._call, self._trees, self._originals = call, trees, call.opened_states()
        self._donated = frozenset(map(id, donated))
        if len({*map(id, self._originals)}) < len(self._originals):
            raise call.needs_identity()
        self.ids: frozenset[int] = frozenset()
        if self._originals or call.opens_models:
            self._leaves, self._structure = call.flatten_to_states(trees)
            self._states = [x for x in self._leaves if call.is_opened(x)]
            self._values = [jax.tree.flatten(state) for state in self._states]
            self.ids = frozenset(map(id, self._states))

    def effects(self, out: PyTree, site: str) -> list[_frames.Effect]:
        """The writes of the function, whose output is given, of the original states.

        Raises:
            Reread: it has changed more of its arguments than values of states, or returns a part of a model.
        """
        if not (self._originals or self._call.opens_models):
            return []
        leaves, structure = self._call.flatten_to_states(self._trees)
        if structure != self._structure or any(x is not y for x, y in zip(leaves, self._leaves, strict=True)):
            raise self._call.needs_identity()
        if self._call.opens_models and not self._ids_in(self._trees).isdisjoint(self._ids_in(out)):
            raise self._call.needs_identity()
        returned = frozenset(map(id, jax.tree.leaves(out)))
        effects: list[_frames.Effect] = []
        for original, state, (values, treedef) in zip(self._originals, self._states, self._values, strict=True):
            new_values, new_treedef = jax.tree.flatten(state)
            if new_treedef != treedef:  # metadata
                raise self._call.needs_identity()
            # A donated state whose new values are returned keeps what is deleted, as in JAX, where a second output of
            # each would take as much memory again.
            is_moved = self._donated.issuperset(map(id, values)) and returned.issuperset(map(id, new_values))
            if not is_moved and any(x is not y for x, y in zip(new_values, values, strict=True)):
                kind = _states.kind_of_state(state)
                effects.append(_frames.Effect(original, kind, kind.get(state), site))
        return effects

    @staticmethod
    def _ids_in(tree: PyTree) -> set[int]:
        """The ids of the states and models in a tree."""
        return {id(x) for x in (*held_states([tree]), *filter(is_model, jax.tree.leaves(tree, is_leaf=is_model)))}
