"""`print_fwd_bwd`: the passes of a function side by side, with the residuals marked."""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from html import escape
from typing import Any

from .. import _jax
from .._equations.inline import inline
from .._equations.primitives import INLINED, REMAT, row_of
from .._errors import printable
from .._jax import Jaxpr, Literal
from .._lift.options import notes_shapes
from .._lift.wrapper import check_callable
from .._tables import Line, Piece, Printed, folded, plain
from .._text import counted, format_bytes, short_path, type_str
from .._tree import num_bytes
from .._typing import Filter, PyTree
from ._origin import buffers
from ._passes import Passes
from .saved import traced_to_differentiate

_MIN_WIDTH = 110  # columns; below it, the passes are printed one above the other
_HTML_WIDTH = 76  # of each pass: a notebook shows them side by side
_NOT_BROKEN = 12  # columns by which JAX's lines may be longer, since it does not break in front of a first operand

_STYLES = {
    "residual": "bold reverse yellow",
    "place": "dim italic",
    "type": "cyan",
    "word": "bold green",
}
_PATTERN = re.compile(
    r"(?P<residual>\*[^\s:,]+)|(?P<place>  # .*)|(?P<type>(?<=:)[a-z]\w*(<\w+>)?\[[^\]]*\])"
    r"|(?P<word>^(given|return|keep)\b|(?<= = )\w+|\b(lambda|let)\b|\bin(?= \())"
)
_WITH_PLACE = re.compile(r"\s+# ?(?:(.+):(\d+):\d+ \((.*)\))?$")  # as JAX prints it, or none


class FwdBwd(Printed):
    """The equations of a forward and a backward pass; made by `print_fwd_bwd`.

    ``str()`` gives plain text, ``rich.print`` colors, and a notebook shows it as HTML.

    Attributes:
        name: the function's name.
        residuals: label, type and bytes of each residual, in the order of the forward pass.
    """

    def __init__(self, passes: Passes):
        self.name = passes.name
        self.residuals: list[tuple[str, str, int]] = []
        self._passes = passes
        self._names: dict[Any, str] = {}  # of inputs, cotangents and residuals
        names_of_user: dict[Any, str] = {}
        self._forward = _readable(_jax.without_dead_code(inline(passes.forward, calls=INLINED)), names=names_of_user)
        self._backward = _readable(_jax.without_dead_code(passes.backward))
        self._name(names_of_user)
        self._printer = _jax.EquationPrinter(self._names)

    def text(self, width: int) -> str:
        """Plain text of at most `width` columns; below 110, the passes are one above the other."""
        return plain(self._lines(width, width)).rstrip()

    def _lines(self, width: int, prose: int) -> Iterator[Line]:
        yield from folded([Piece(self._title(), "bold")], prose, 0)
        if width < _MIN_WIDTH:
            for title, lines in self._both(width):
                yield from ([Piece(title, "bold")], [Piece("-" * width, "dim")], *lines, [])
            return
        half = (width - 3) // 2  # three columns are the separator's
        forward, backward = (
            [[Piece(title, "bold")], [Piece("-" * half, "dim")], *lines] for title, lines in self._both(half)
        )
        for a, b in itertools.zip_longest(forward, backward, fillvalue=[]):
            yield [*a, Piece(" " * (half - sum(len(piece.text) for piece in a))), Piece(" | ", "dim"), *b]

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
            for title, lines in self._both(_HTML_WIDTH)
        )
        return f'<p><b>{escape(self._title())}</b></p><div class="sides">{"".join(sides)}</div>'

    # -- names --

    def _name(self, names_of_user: dict[Any, str]) -> None:
        """Name the inputs and cotangents, and label the residuals: inputs by their names, others by the name from
        ``checkpoint_name`` or by a number.
        """
        used: set[str] = set()

        def unique(base: str) -> str:
            names = itertools.chain([base], (f"{base}_{i}" for i in itertools.count(2)))
            used.add(name := next(name for name in names if name not in used))
            return name

        constants, numbers = itertools.count(1), itertools.count(1)
        for v, source in zip(self._forward.invars, self._passes.sources, strict=True):
            self._names[v] = unique(source.path or f"constant{next(constants)}")
        # Variables of one array share a label, on both sides.
        for group in buffers(self._passes):
            atom = self._forward.outvars[self._passes.num_out :][group[0]]
            if isinstance(atom, Literal) or _jax.is_link(self._passes.residuals[group[0]].aval):  # a link has no bytes
                continue
            name = self._names.get(atom) or unique(names_of_user.get(atom) or f"r{next(numbers)}")
            label = f"*{name.removeprefix('*')}"
            self._names |= dict.fromkeys([atom, *(self._backward.invars[i] for i in group)], label)
            self.residuals.append((label, type_str(atom.aval, weak=False), num_bytes(atom.aval)))
        cotangents = self._backward.invars[len(self._passes.residuals) :]
        for i, v in enumerate(cotangents, 1):
            self._names[v] = unique("ct" if len(cotangents) == 1 else f"ct{i}")

    # -- lines --

    def _both(self, width: int) -> list[tuple[str, list[Line]]]:
        """Title and lines of each pass."""
        both = {"forward": self._forward_lines(width), "backward": self._backward_lines(width)}
        return [(title, [*itertools.chain(*(_fitted(text, width) for text in texts))]) for title, texts in both.items()]

    def _forward_lines(self, width: int) -> Iterator[str]:
        jaxpr = self._forward
        # A function may be given far more than it reads, such as a whole dict for one item.
        read = _jax.read_variables(jaxpr)
        yield self._given([v for v in jaxpr.invars if v in read])
        yield from self._equations(jaxpr, width)
        yield f"return {', '.join(map(self._printer.atom, jaxpr.outvars[: self._passes.num_out]))}"
        yield ""
        for label, type_, size in self.residuals:
            yield f"keep {label}:{type_}  {format_bytes(size)}"

    def _backward_lines(self, width: int) -> Iterator[str]:
        jaxpr = self._backward
        yield self._given(jaxpr.invars[len(self._passes.residuals) :])
        yield from self._equations(jaxpr, width)
        for i, v in zip(self._passes.chosen, jaxpr.outvars, strict=True):
            yield f"return gradient of {self._passes.sources[i].path} = {self._printer.atom(v)}"

    def _given(self, variables: Sequence[Any]) -> str:
        return f"given {', '.join(f'{self._printer.atom(v)}:{type_str(v.aval, weak=False)}' for v in variables)}"

    def _equations(self, jaxpr: Jaxpr, width: int) -> Iterator[str]:
        for eqn in jaxpr.eqns:
            for text in self._printer.equation(eqn, width - _NOT_BROKEN).splitlines():
                yield _WITH_PLACE.sub(_short_place, text)


def _short_place(match: re.Match[str]) -> str:
    file, line, function = match.groups()
    return f"  # {short_path(f'{file}:{line}')} {function.rsplit('.', 1)[-1]}" if file else ""


def _fitted(text: str, width: int) -> Iterator[Line]:
    """Styled lines of at most `width` columns; the place of a long line is dropped first."""
    text = printable(text if len(text) <= width else text.split("  # ")[0])
    line, end = [], 0
    for match in _PATTERN.finditer(text):
        line += [Piece(text[end : match.start()]), Piece(match[0], _STYLES[match.lastgroup or ""])]
        end = match.end()
    return folded([*line, Piece(text[end:])], width)


# -- the function ----------------------------------------------------------------------------------------------------


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

    Equations are as JAX prints them, each with its line of the source. Inputs have the names of arguments and states. A
    residual is marked by a star and has the same label on both sides: its name from ``checkpoint_name``, if it has one.
    ``remat2`` on the right is the part of a rematerialized function that the backward pass runs again. No array is
    computed, and no state changes.

    Args:
        fun: the function, which may read and write states. Of a training step, which takes gradients itself, the passes
            of the largest function that it differentiates are printed.
        *args, **kwargs: its arguments; arrays may be given as ``jax.ShapeDtypeStruct``.
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
    check_callable("print_fwd_bwd", fun)
    options = {"argnums": argnums, "wrt": wrt, "has_aux": has_aux}
    passes = traced_to_differentiate("print_fwd_bwd", fun, args, kwargs, **options).passes()
    result = FwdBwd(max(passes, key=lambda p: len(p.forward.eqns)))
    if not _in_notebook():
        _print(result)
    return result


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


# -- equations that are easy to read --------------------------------------------------------------------------------


def _readable(x: Any, operands: Sequence[Any] = (), names: dict[Any, str] | None = None) -> Any:
    """The jaxpr without the equations that label a value. Bodies have the variables of outside for what is the same
    there.

    Args:
        x: a jaxpr, closed or not.
        operands: what its first inputs are, outside.
        names: gets the names from ``checkpoint_name``.
    """
    jaxpr, eqns = _jax.open_jaxpr(x)[0], list[Any]()

    def rule(eqn: Any, operands: list[Any]) -> list[Any]:
        if row_of(eqn).is_label:
            if eqn.primitive is _jax.name_primitive and names is not None:
                names[operands[0]] = eqn.params["name"]
            # A value stored in fewer bits is the first operand; the others belong to its residual.
            return operands if len(operands) == len(eqn.outvars) else operands[:1] * len(eqn.outvars)
        name, same = eqn.primitive.name, list[Any]()
        if name in REMAT:
            same = operands
        elif name == "cond":  # the first operand says which branch
            same = operands[1:]
        elif name == "scan":
            same = operands[: _jax.scan_counts(eqn)[0]]
        eqns.append(_jax.map_jaxprs(lambda inner: _readable(inner, same), eqn).replace(invars=operands))
        return eqn.outvars

    pairs = itertools.zip_longest(operands, jaxpr.invars)
    invars = [outer if isinstance(outer, _jax.Var) else v for outer, v in pairs]
    outvars = _jax.interpret(jaxpr, [*jaxpr.constvars, *invars], rule, literal=lambda atom: atom)
    return _jax.closed_like(x, jaxpr.replace(invars=invars, outvars=outvars, eqns=eqns))
