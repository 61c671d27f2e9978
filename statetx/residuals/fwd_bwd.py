"""`print_fwd_bwd`: the forward and the backward pass of a function side by side, with the residuals marked."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from html import escape
from typing import Any

from .. import _jax
from .._errors import printable
from .._lift.options import notes_shapes
from .._lift.wrapper import refuse_value
from .._tables import Line, Piece, Printed, folded, plain
from .._text import counted, format_bytes
from .._typing import Filter, PyTree
from ._printer import PLACE, Printer
from ._trace import Passes, differentiate

_MIN_WIDTH = 110  # columns; below it, the passes are printed one above the other


class FwdBwd(Printed):
    """The equations of a forward and a backward pass; made by `print_fwd_bwd`.

    ``str()`` gives plain text, ``rich.print`` colors, and a notebook shows it as HTML.

    Attributes:
        name: the function's name.
        forward, backward: lines, each a list of `Piece`.
        residuals: label, type and bytes of each residual, in the order of the forward pass.
    """

    def __init__(self, passes: Passes):
        self.name = passes.name

        # Forward first: it gives names to values that the backward pass refers to.
        printer = Printer(passes)
        self.forward, self.backward = map(_printable, (printer.forward(), printer.backward()))
        self.residuals = printer.crossing

    def text(self, width: int) -> str:
        """Plain text of at most `width` columns; below 110, the passes are one above the other."""
        return plain(self._lines(width, width)).rstrip()

    def _lines(self, width: int, prose: int) -> Iterator[Line]:
        yield from folded([Piece(self._title(), "bold")], prose, 0)
        if width < _MIN_WIDTH:
            for title, lines in self._passes():
                yield from ([Piece(title, "bold")], [Piece("-" * width, "dim")], *_fitted(lines, width), [])
            return
        half = (width - 3) // 2  # three columns are the separator's
        left, right = (
            [[Piece(title, "bold")], [Piece("-" * half, "dim")], *_fitted(lines, half)]
            for title, lines in self._passes()
        )
        for a, b in itertools.zip_longest(left, right, fillvalue=[]):
            yield [*a, Piece(" " * (half - sum(len(piece.text) for piece in a))), Piece(" | ", "dim"), *b]

    def _passes(self) -> list[tuple[str, list[Line]]]:
        return [("forward", self.forward), ("backward", self.backward)]

    def _title(self) -> str:
        size = format_bytes(sum(n for _, _, n in self.residuals))
        num = len(self.residuals)
        verb = "crosses" if num == 1 else "cross"
        return f"{self.name}: {counted(num, 'value')}, {size}, {verb} from the forward to the backward pass"

    def __str__(self) -> str:
        return super().__str__().rstrip()

    def __repr__(self) -> str:
        return f"FwdBwd({self._title()})"

    def _html(self) -> str:
        sides = (
            f"<div><b>{title}</b><pre>{chr(10).join(''.join(p.html() for p in line) for line in lines)}</pre></div>"
            for title, lines in self._passes()
        )
        return f'<p><b>{escape(self._title())}</b></p><div class="sides">{"".join(sides)}</div>'


def _fitted(lines: list[Line], width: int) -> Iterator[Line]:
    """Lines of at most `width` columns; the place of a long line is dropped first."""
    for line in lines:
        if sum(len(p.text) for p in line) > width:
            line = [p for p in line if p.style != PLACE]
        yield from folded(line, width)


# -- the functions ---------------------------------------------------------------------------------------------------


@_jax.api_boundary
@notes_shapes
def print_fwd_bwd(
    fun: Callable[..., Any],
    /,
    *args: Any,
    argnums: int | Sequence[int] | None = None,
    wrt: PyTree | Filter = None,
    has_aux: bool = False,
    **kwargs: Any,
) -> FwdBwd:
    """Print the forward and the backward pass of a function side by side, and mark the residuals.

    Each line is an operation with the types of its outputs and its line of the source. Inputs have the names of
    arguments and states. A residual is marked by a star and has the same label on both sides: its name from
    ``checkpoint_name``, if it has one. ``recompute f`` on the right is the part of a rematerialized function that the
    backward pass runs again. No array is computed, and no state changes.

    Args:
        fun: the function, which may read and write states. Of a training step, which takes gradients itself, the passes
            of the largest function that it differentiates are printed.
        *args, **kwargs: its arguments; ``jax.ShapeDtypeStruct`` may stand for arrays.
        argnums, wrt, has_aux: as in `saved_residuals`.

    Returns:
        A `FwdBwd`. In a notebook nothing is printed: it is shown as HTML if it is the last value of a cell. In a
        terminal it is printed in colors if rich is installed, elsewhere as plain text, as wide as the terminal (160
        columns without one).

    Raises:
        StateFilterError: `wrt` selects no state.

    Source:
        ``print_fwd_bwd`` in JAX's notebook on autodiff_remat.

    Example:
        >>> import jax.numpy as jnp, statetx
        >>> w = statetx.Param(jnp.ones(3))
        >>> layer = statetx.remat(lambda x: jnp.sin(w.value * x))
        >>> printed = statetx.print_fwd_bwd(layer, jnp.ones(3))  # doctest: +ELLIPSIS
        <lambda>: 2 values, 24 B, cross from the forward to the backward pass
        ...
        >>> printed.residuals
        [('*x', 'f32[3]', 12), ('*w', 'f32[3]', 12)]
    """
    refuse_value("print_fwd_bwd", fun)
    passes = differentiate(fun, args, kwargs, argnums=argnums, wrt=wrt, has_aux=has_aux)
    result = FwdBwd(max(passes, key=lambda p: len(p.forward.eqns)))
    if not _in_notebook():
        _print(result)
    return result


def _printable(lines: list[Line]) -> list[Line]:
    return [[piece._replace(text=printable(piece.text)) for piece in line] for line in lines]


def _in_notebook() -> bool:
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and getattr(shell, "kernel", None) is not None


def _print(result: FwdBwd) -> None:
    if sys.stdout.isatty():
        try:
            from rich.console import Console
        except ImportError:
            pass
        else:
            return Console().print(result)
    print(result)
