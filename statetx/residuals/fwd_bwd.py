"""`print_fwd_bwd`: the forward and the backward pass of a function side by side, with the residuals marked."""

from __future__ import annotations

import html as html_
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from .. import _jax
from .._errors import printable
from .._lift.options import notes_shapes
from .._lift.wrapper import refuse_value
from .._text import counted, format_bytes, text_width
from .._typing import Filter, PyTree
from ._printer import Line, Piece, Printer
from ._trace import Passes, differentiate

_RICH = {
    "residual": "bold black on yellow",
    "type": "cyan",
    "operation": "bold green",
    "detail": "dim",
    "place": "dim italic",
}
_CSS = {
    "residual": "background:#ffd54f;color:#000;border-radius:3px;padding:0 2px",
    "type": "color:#0072b2",
    "operation": "color:#009e73;font-weight:bold",
    "detail": "opacity:0.65",
    "place": "opacity:0.5;font-style:italic",
}
_MIN_WIDTH = 110  # columns; below it, the passes are printed one above the other


class FwdBwd:
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
        if width < _MIN_WIDTH:
            parts = [["forward", *_fold(self.forward, width)], ["backward", *_fold(self.backward, width)]]
            body = "\n".join(line for title, *lines in parts for line in (title, "-" * width, *lines, ""))
        else:
            half = (width - 3) // 2  # three columns are the separator's
            forward_lines, backward_lines = _fold(self.forward, half), _fold(self.backward, half)
            head = [f"{'forward':<{half}} | backward", f"{'-' * half}-+-{'-' * half}"]
            rows = [
                f"{a:<{half}} | {b}".rstrip()
                for a, b in itertools.zip_longest(forward_lines, backward_lines, fillvalue="")
            ]
            body = "\n".join([*head, *rows])
        return f"{self._title()}\n{body}".rstrip()

    def _title(self) -> str:
        size = format_bytes(sum(n for _, _, n in self.residuals))
        num = len(self.residuals)
        verb = "crosses" if num == 1 else "cross"
        return f"{self.name}: {counted(num, 'value')}, {size}, {verb} from the forward to the backward pass"

    def __str__(self) -> str:
        return self.text(text_width())

    def __repr__(self) -> str:
        return f"FwdBwd({self._title()})"

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        from rich import box
        from rich.table import Table
        from rich.text import Text

        # Lines are folded here, to the width that borders and padding of the table leave: rich would not indent continuation lines,
        # nor drop the place of a long line first.
        wide = options.max_width >= _MIN_WIDTH
        table = Table(
            title=Text(self._title()), title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, expand=wide
        )
        width = (options.max_width - 7) // 2 if wide else options.max_width - 4

        def column(lines: list[Line]) -> Any:
            text = Text(no_wrap=True, overflow="crop")
            for line in _fold_pieces(lines, width):
                for piece in line:
                    text.append(piece.text, style=_RICH.get(piece.style, ""))
                text.append("\n")
            return text

        if wide:
            table.add_column("forward", ratio=1)
            table.add_column("backward", ratio=1)
            table.add_row(column(self.forward), column(self.backward))
        else:
            table.show_header = False
            for title, lines in (("forward", self.forward), ("backward", self.backward)):
                table.add_row(Text(title, style="bold"))
                table.add_row(column(lines))
        yield table

    def _repr_html_(self) -> str:
        cells = []
        for title, lines in (("forward", self.forward), ("backward", self.backward)):
            body = "\n".join("".join(map(_html_piece, line)) for line in lines)
            cells.append(
                '<td style="vertical-align:top;text-align:left;padding:4px 16px;border:0">'
                f'<b>{title}</b><pre style="margin:4px 0;font-size:90%;line-height:1.45">{body}</pre></td>'
            )
        return (
            f'<div style="overflow-x:auto"><p style="margin:4px 0"><b>{html_.escape(self._title())}</b></p>'
            f"<table><tr>{''.join(cells)}</tr></table></div>"
        )


def _html_piece(piece: Piece) -> str:
    text = html_.escape(piece.text)
    return f'<span style="{_CSS[piece.style]}">{text}</span>' if piece.style in _CSS else text


def _fold(lines: list[Line], width: int) -> list[str]:
    return ["".join(p.text for p in line).rstrip() for line in _fold_pieces(lines, width)]


def _fold_pieces(lines: list[Line], width: int) -> Iterator[Line]:
    """Fold lines to at most `width` columns, with indented continuation lines; the place of a long line is dropped first."""
    # `used` counts the columns of `out`, the line so far. A word longer than a line is cut off.
    for line in lines:
        if sum(len(p.text) for p in line) > width:
            line = [p for p in line if p.style != "place"]
        indent = len(line[0].text) - len(line[0].text.lstrip()) if line else 0
        out: Line = []
        used = 0
        for word in _words(line):
            size = sum(len(p.text) for p in word)
            if used > indent and used + size - (word[-1].text.endswith(" ")) > width:
                yield out
                out, used = [Piece(" " * (indent + 4))], indent + 4
                word = [word[0]._replace(text=word[0].text.lstrip()), *word[1:]]
            for piece in word:
                if used + len(piece.text.rstrip()) > width:
                    piece = piece._replace(text=piece.text[: max(width - used - 1, 0)] + "…" * (used < width))
                out.append(piece)
                used += len(piece.text)
        yield out


def _words(line: Line) -> Iterator[Line]:
    """Group the pieces of a line into words; the line may be broken between two words, at a blank."""
    word: Line = []
    for piece in line:
        if word and (piece.text.startswith(" ") or word[-1].text.endswith(" ")):
            yield word
            word = []
        word.append(piece)
    if word:
        yield word


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

    Each line is an operation with the types of its outputs and its line of the source. Inputs have the names of arguments
    and states. A residual is marked by a star and has the same label on both sides: its name from ``checkpoint_name``, if it
    has one. ``recompute f`` on the right is the part of a rematerialized function that the backward pass runs again. No array
    is computed, and no state changes.

    Args:
        fun: the function, which may read and write states. Of a training step, which takes gradients itself, the passes of the largest function that it
            differentiates are printed.
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
