"""`print_fwd_bwd`: the forward and the backward pass of a function side by side, with the residuals marked."""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from html import escape
from typing import Any

import jax

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
from ._passes import Passes, regions_of
from ._trace import user_line
from .saved import traced_to_differentiate

_MIN_WIDTH = 110  # columns; below it, the passes are printed one above the other

# Styles of pieces.
RESIDUAL, TYPE, OPERATION, DETAIL, PLACE = "bold reverse yellow", "cyan", "bold green", "dim", "dim italic"

# Parameters that are printed. The dimension numbers of products are printed as letters, other parameters are omitted.
_PRINTED_PARAMS = frozenset(
    "axes axis dimension dimensions permutation new_dtype shape start_indices limit_indices strides dim index y length "
    "reverse k lengths padding window_dimensions direction num_keys".split()
)
_WITH_BODIES = ("scan", "cond", "while", "shard_map")
_MAX_PARAM = 24  # columns of a printed parameter


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
        forward, backward = (
            [[Piece(title, "bold")], [Piece("-" * half, "dim")], *_fitted(lines, half)]
            for title, lines in self._passes()
        )
        for a, b in itertools.zip_longest(forward, backward, fillvalue=[]):
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


# -- lines -----------------------------------------------------------------------------------------------------------


class Printer:
    """Formats the equations of both passes, with the same names for the same values.

    Equations that only forward a value have no line of their own. The bodies of regions and branches use the outer
    names of their inputs.
    """

    def __init__(self, passes: Passes):
        self._passes = passes
        self._names: dict[Any, str] = {}
        self._residuals: dict[Any, str] = {}  # the labels of residuals, by their variables in either pass
        self._aliases: dict[Any, Any] = {}  # variables that alias another
        self._lines: dict[Any, Line] = {}  # the line that defines a variable
        self._used: set[str] = set()
        self._letters = (f"{a}{b}" for a in ["", *_ALPHABET] for b in _ALPHABET)
        self.crossing: list[tuple[str, str, int]] = []

        # Names of inputs and residuals come first, so that letters for other values avoid them.
        self._forward = _without_dead(inline(passes.forward, calls=INLINED))
        self._backward = _without_dead(passes.backward)
        self._name_inputs()
        self._name_residuals()

    # -- names --

    def _unique(self, base: str) -> str:
        candidates = itertools.chain([base], (f"{base}_{i}" for i in itertools.count(2)))
        name = next(n for n in candidates if n not in self._used)
        self._used.add(name)
        return name

    def _name_inputs(self) -> None:
        constants = itertools.count(1)
        for v, source in zip(self._forward.invars, self._passes.sources, strict=True):
            self._names[v] = self._unique(source.path or f"constant{next(constants)}")

    def _name_residuals(self) -> None:
        """Label the residuals: inputs by their names, others by the name from ``checkpoint_name`` or by a number."""
        # A label is an alias of the value that it labels, and a name belongs to that value.
        user_names = {}
        for eqn in self._forward.eqns:
            if row_of(eqn).is_label:
                self._aliases[eqn.outvars[0]] = eqn.invars[0]
                if eqn.primitive is _jax.name_primitive:
                    user_names[self._root(eqn.outvars[0])] = eqn.params["name"]

        # Variables of one array share a label, on both sides.
        atoms = self._forward.outvars[self._passes.num_out :]
        numbers = itertools.count(1)
        for group in buffers(self._passes):
            atom = self._root(atoms[group[0]])
            if isinstance(atom, Literal) or _jax.is_link(atoms[group[0]].aval):  # a link has no bytes
                continue
            if atom not in self._residuals:
                name = self._names.get(atom) or self._unique(user_names.get(atom) or f"r{next(numbers)}")
                self._residuals[atom] = f"*{name}"
            for i in group:
                self._residuals[self._backward.invars[i]] = self._residuals[atom]
            self.crossing.append((self._residuals[atom], type_str(atom.aval, weak=False), num_bytes(atom.aval)))

    def _root(self, atom: Any) -> Any:
        while not isinstance(atom, Literal) and atom in self._aliases:
            atom = self._aliases[atom]
        return atom

    def _atom(self, atom: Any) -> Piece:
        atom = self._root(atom)
        if isinstance(atom, Literal):
            return Piece(f"{float(atom.val):g}" if _is_plain_float(atom) else _shorten(str(atom.val)), DETAIL)
        if atom in self._residuals:
            return Piece(self._residuals[atom], RESIDUAL)
        if atom not in self._names:
            self._names[atom] = self._unique(next(n for n in self._letters if n not in self._used))
        return Piece(self._names[atom])

    def _typed(self, v: Any) -> Line:
        return [self._atom(v), Piece(":"), Piece(type_str(v.aval, weak=False), TYPE)]

    def _list(self, word: str, atoms: Sequence[Any], *, types: bool = False) -> Line:
        line = [Piece(f"{word} ", OPERATION)]
        for i, v in enumerate(atoms):
            line += [Piece(", ")] if i else []
            line += self._typed(v) if types else [self._atom(v)]
        return line

    # -- the two passes --

    def forward(self) -> list[Line]:
        # A function may be given far more than it reads, such as a whole dict for one item.
        read = {a for e in self._forward.eqns for a in e.invars if not isinstance(a, Literal)}
        read.update(a for a in self._forward.outvars if not isinstance(a, Literal))
        inputs = [v for v in self._forward.invars if v in read]
        outs = self._forward.outvars[: self._passes.num_out]
        lines = [
            self._list("given", inputs, types=True),
            *self._equations(self._forward, 0),
            self._list("return", outs),
        ]
        return [*lines, [], *self._crossing()]

    def backward(self) -> list[Line]:
        cotangents = self._backward.invars[len(self._passes.residuals) :]
        for i, v in enumerate(cotangents, 1):
            self._names[v] = self._unique("ct" if len(cotangents) == 1 else f"ct{i}")
        lines = [self._list("given", cotangents, types=True), *self._equations(self._backward, 0)]
        for i, v in zip(self._passes.chosen, self._backward.outvars, strict=True):
            path = self._passes.sources[i].path
            lines.append([Piece("return ", OPERATION), Piece(f"gradient of {path} = "), self._atom(v)])
        return lines

    def _crossing(self) -> list[Line]:
        return [
            [Piece("keep ", OPERATION), Piece(label, RESIDUAL), Piece(":"), Piece(type_, TYPE)]
            + [Piece(f"  {format_bytes(size)}", DETAIL)]
            for label, type_, size in self.crossing
        ]

    # -- equations --

    def _equations(self, jaxpr: Jaxpr, depth: int) -> list[Line]:
        return [line for eqn in jaxpr.eqns for line in self._equation(eqn, depth)]

    def _equation(self, eqn: Any, depth: int) -> list[Line]:
        if row_of(eqn).is_label:
            self._fold(eqn)
            return []
        line = [Piece("  " * depth)] if depth else []
        for i, v in enumerate(eqn.outvars):
            line += [Piece(", ")] if i else []
            line += self._typed(v)
            self._lines[v] = line
        line += [Piece(" = "), Piece(self._operation(eqn), OPERATION), *self._params(eqn)]
        for atom in eqn.invars:
            if not _jax.is_link(atom.aval):
                line += [Piece(" "), self._atom(atom)]
        line.append(self._place(eqn))
        return [line, *self._bodies(eqn, depth + 1)]

    def _fold(self, eqn: Any) -> None:
        # A value stored in fewer bits is the first operand; the others belong to its residual.
        sources = eqn.invars if len(eqn.invars) == len(eqn.outvars) else eqn.invars[:1] * len(eqn.outvars)
        self._aliases.update(zip(eqn.outvars, sources, strict=True))

        # The name goes in front of the last piece, which is the place.
        line = self._lines.get(self._root(sources[0]))
        if line is not None and eqn.primitive is _jax.name_primitive:
            line.insert(-1, Piece(f" named {eqn.params['name']!r}", DETAIL))

    def _bodies(self, eqn: Any, depth: int) -> Iterator[Line]:
        name = eqn.primitive.name
        if name in REMAT:
            body = _jax.open_jaxpr(eqn.params["jaxpr"])[0]
            self._aliases.update(zip(body.invars, eqn.invars, strict=True))

            # An output takes the name of the outer variable, unless its inner variable has a name already.
            defined = set(body.invars)
            copies = []
            for outer, inner in zip(eqn.outvars, body.outvars, strict=True):
                if isinstance(inner, Literal) or inner in defined:
                    copies.append([Piece("  " * depth), self._atom(outer), Piece(" = "), self._atom(inner)])
                else:
                    defined.add(inner)
                    self._aliases[inner] = outer
            yield from self._equations(body, depth)
            yield from copies

        elif name in _WITH_BODIES:
            # Constants of a loop, and what branches are given, are the same inside, and have their outer names. The
            # first operand of a branch is its index.
            outer = eqn.invars[1:] if name == "cond" else eqn.invars
            num_same = len(outer) if name == "cond" else _jax.scan_counts(eqn)[0] if name == "scan" else 0
            for n, inner in enumerate(_jax.inner_jaxprs(eqn)):
                body = _jax.open_jaxpr(inner)[0]
                self._aliases.update(zip(body.invars[:num_same], outer[:num_same], strict=True))
                word = f"branch {n}" if name == "cond" else "given"
                yield [Piece("  " * depth), *self._list(word, body.invars[num_same:], types=True)]
                yield from self._equations(body, depth + 1)
                yield [Piece("  " * (depth + 1)), *self._list("return", body.outvars)]

    def _operation(self, eqn: Any) -> str:
        name = eqn.primitive.name
        if name in REMAT:
            # Of nested regions the innermost, which is the last in the equation's scope.
            regions = regions_of(eqn)
            return f"recompute {self._passes.regions[regions[-1]]}" if regions else "recompute"
        return f"dot {_contraction(eqn)}" if name == "dot_general" else name

    def _params(self, eqn: Any) -> Line:
        params = {k: v for k, v in eqn.params.items() if k in _PRINTED_PARAMS and v not in (None, False, (), "")}
        text = " ".join(f"{k}={_shorten(_compact(v))}" for k, v in params.items())
        return [Piece(f"[{text}]", DETAIL)] if text else []

    def _place(self, eqn: Any) -> Piece:
        file, line, function = user_line(eqn)
        text = f"  # {short_path(f'{file}:{line}')} {function.rsplit('.', 1)[-1]}" if file else ""
        return Piece(text, PLACE)


_ALPHABET = "abcdefghijklmnopqrstuvwxyz"


def _is_plain_float(atom: Any) -> bool:
    return not getattr(atom.aval, "shape", (1,)) and jax.numpy.issubdtype(atom.aval.dtype, jax.numpy.floating)


def _compact(value: Any) -> str:
    return re.sub(r",\s*", ",", str(value)).replace(",)", ")")


def _shorten(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _MAX_PARAM else text[: _MAX_PARAM - 1] + "…"


def _contraction(eqn: Any) -> str:
    """The dimension numbers of a product in the notation of ``jnp.einsum``: ``ab,bc->ac``."""
    (contracted_l, contracted_r), (batch_l, batch_r) = eqn.params["dimension_numbers"]
    # Each dimension of the left operand has a letter; a joined dimension of the right one has its partner's letter.
    # The result has batch dimensions first, then the others of both operands, as XLA orders them.
    letters = iter(_ALPHABET)
    lhs = [next(letters) for _ in eqn.invars[0].aval.shape]
    joined = dict(zip((*contracted_r, *batch_r), (*contracted_l, *batch_l), strict=True))
    rhs = [lhs[joined[i]] if i in joined else next(letters) for i in range(len(eqn.invars[1].aval.shape))]
    out = [lhs[i] for i in batch_l]
    out += [c for i, c in enumerate(lhs) if i not in (*contracted_l, *batch_l)]
    out += [c for i, c in enumerate(rhs) if i not in (*contracted_r, *batch_r)]
    return f"{''.join(lhs)},{''.join(rhs)}->{''.join(out)}"


def _without_dead(jaxpr: Jaxpr) -> Jaxpr:
    """The jaxpr without equations whose outputs are unused; the bodies of loops are unchanged."""
    # JAX's own elimination would also change the bodies of loops.
    alive = {v for v in jaxpr.outvars if not isinstance(v, Literal)}
    eqns = []
    for eqn in reversed(jaxpr.eqns):
        if eqn.effects or alive.intersection(eqn.outvars):
            eqns.append(eqn)
            alive |= {v for v in eqn.invars if not isinstance(v, Literal)}
    return _jax.rebuild(jaxpr, invars=jaxpr.invars, outvars=jaxpr.outvars, eqns=eqns[::-1])
