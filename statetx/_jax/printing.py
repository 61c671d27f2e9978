"""`EquationPrinter`: the text of equations, by JAX's printer."""

from __future__ import annotations

from collections.abc import Mapping

from jax._src import core as _core

from .equations import Atom, Eqn, Var

__all__ = ["EquationPrinter"]


class EquationPrinter:
    """JAX's printer, with names for some variables, which may begin with a star; others get letters, once for all."""

    def __init__(self, names: Mapping[Var, str]):
        self._context = _core.JaxprPpContext(dict(names))
        self._context.shared_jaxpr_names |= {name.strip("*") for name in names.values()}  # which are no letters
        self._settings = _core.JaxprPpSettings(source_info=True)

    def equation(self, eqn: Eqn, width: int) -> str:
        """Lines of about `width` columns, and behind ``" # "`` the line of the source of each equation."""
        return _core.pp_eqn(eqn, self._context, self._settings).format(width, use_color=False)

    def atom(self, atom: Atom) -> str:
        return atom.pretty_print(self._context)
