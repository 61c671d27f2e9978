"""The equations of a forward and a backward pass as lines, with one name for each value in both."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from .. import _jax
from .._equations.inline import inline
from .._equations.primitives import INLINED, REMAT, row_of
from .._jax import Jaxpr, Literal
from .._tables import Line, Piece
from .._text import format_bytes, short_path, type_str
from .._tree import num_bytes
from ._origin import buffers
from ._trace import Passes, regions_of, user_line

# Styles of pieces.
RESIDUAL, TYPE, OPERATION, DETAIL, PLACE = "bold reverse yellow", "cyan", "bold green", "dim", "dim italic"

# Parameters that are printed. The dimension numbers of products are printed as letters, other parameters are omitted.
_PRINTED_PARAMS = frozenset(
    "axes axis dimension dimensions permutation new_dtype shape start_indices limit_indices strides dim index y "
    "length reverse k "
    "lengths padding window_dimensions direction num_keys".split()
)
_MAX_PARAM = 24  # columns of a printed parameter


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
        # A function may be given far more than it reads, such as a dict of which it uses one item.
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

        elif name == "scan":
            body = _jax.open_jaxpr(eqn.params["jaxpr"])[0]
            start, num_carry = _jax.scan_counts(eqn)
            end = start + num_carry

            # Constants are the same in every step, so the body uses their outer names. Carries and elements have their
            # own.
            self._aliases.update(zip(body.invars[:start], eqn.invars[:start], strict=True))
            for inner, outer in zip(body.invars[start:end], eqn.invars[start:end], strict=True):
                yield self._loop_input(depth, "carry", inner, "from", outer)
            for inner, outer in zip(body.invars[end:], eqn.invars[end:], strict=True):
                yield self._loop_input(depth, "each", inner, "of", outer)
            yield from self._equations(body, depth)

            carries, stacked = body.outvars[: end - start], body.outvars[end - start :]
            for word, atoms in (("carry on", carries), ("stack", stacked)):
                if atoms:
                    yield [Piece("  " * depth), *self._list(word, atoms)]

        elif name == "cond":
            # The first operand is the index of the branch.
            for i, branch in enumerate(eqn.params["branches"]):
                body = _jax.open_jaxpr(branch)[0]
                self._aliases.update(zip(body.invars, eqn.invars[1:], strict=True))
                yield [Piece("  " * depth), Piece(f"branch {i}", OPERATION)]
                yield from self._equations(body, depth + 1)
                yield [Piece("  " * (depth + 1)), *self._list("return", body.outvars)]

        elif name in ("while", "shard_map"):
            for key, value in eqn.params.items():
                if _jax.is_jaxpr(value):
                    body = _jax.open_jaxpr(value)[0]
                    word = key.removesuffix("jaxpr").removesuffix("_") or "body"
                    yield [Piece("  " * depth), *self._list(word, body.invars, types=True)]
                    yield from self._equations(body, depth + 1)
                    yield [Piece("  " * (depth + 1)), *self._list("return", body.outvars)]

    def _loop_input(self, depth: int, word: str, inner: Any, preposition: str, outer: Any) -> Line:
        start = [Piece("  " * depth), Piece(f"{word} ", OPERATION)]
        return [*start, *self._typed(inner), Piece(f" {preposition} "), self._atom(outer)]

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
    # Each dimension of the left operand has a letter; a joined dimension of the right one has that of its partner. The
    # result has batch dimensions first, then the others of both operands, as XLA orders them.
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
