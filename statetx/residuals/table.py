"""`saved_residuals`: what a function keeps for its backward pass, and why."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, overload

from .. import _jax
from .._equations.inline import inline
from .._equations.primitives import INLINED
from .._jax import Literal
from .._tree import num_bytes
from .._typing import Filter, PyTree, public
from . import _show
from ._origin import PLAIN, UNKNOWN, Origins, Place, buffers, readers
from ._recompute import Recomputation
from ._trace import Passes, Source, differentiate, user_line


@dataclasses.dataclass(frozen=True)
class Residual:
    """One value that is kept between the forward and the backward pass.

    Attributes:
        shape, dtype: of the value; in a loop, of one step's.
        times: how many such values: the product of the lengths of the loops around it.
        nbytes: bytes of all of them together.
        origin: "argument", "state", "constant", "literal" or "intermediate".
        path: of the argument, as one writes it (``params['w']``), or of the state.
        kind: a state's type.
        names: those that ``checkpoint_name`` gave it.
        primitive: the operation that computes it.
        source: ``file:line`` of the user's code where it is computed, `function` the function that this line is in.
        module: the modules of the states that it was last computed with, separated by commas: those that the operation
            reads, or else those of its latest operand (as ``policies.path`` has it); a state's own module.
        flops: floating-point operations that would compute it from the inputs and from the other values that are kept.
        why: the reasons for which it is kept: "policy of f", "input of f" (of a rematerialised function f),
            "not rematerialised" (an operation outside reads it), "not read" (it is held for nothing).
        memory: the memory it is offloaded to; "" if it stays where it was computed.
    """

    shape: tuple[int, ...]
    dtype: str
    times: int
    nbytes: int
    origin: str
    path: str = ""
    kind: str = ""
    names: tuple[str, ...] = ()
    primitive: str = ""
    source: str = ""
    function: str = ""
    module: str = ""
    flops: int = 0
    why: tuple[str, ...] = ()
    memory: str = ""

    @property
    def reason(self) -> str:
        """The decisive reason in a word: giving up the others would not free the value."""
        for word in ("not rematerialised", "policy", "input"):
            if any(text.startswith(word) for text in self.why):
                return word
        return "not read"

    @property
    def type(self) -> str:
        """Dtype and shape in short: ``f32[3,4]``."""
        return _show.short_type(self.dtype, self.shape)

    def __str__(self) -> str:
        return _show.line(self)


@public
class Residuals(Sequence[Residual]):
    """The values that a function keeps for its backward pass: a sequence of `Residual`, in the order of the forward pass.

    Prints as a table: as plain text with ``print``, in colours with ``rich.print``, as HTML in a notebook.

    Attributes:
        name: the function's.
        rows: the values.
    """

    def __init__(self, name: str, rows: Sequence[Residual]):
        self.name = name
        self.rows = tuple(rows)

    @overload
    def __getitem__(self, index: int) -> Residual: ...
    @overload
    def __getitem__(self, index: slice) -> Residuals: ...
    def __getitem__(self, index: Any) -> Any:
        return Residuals(self.name, self.rows[index]) if isinstance(index, slice) else self.rows[index]

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Residual]:
        return iter(self.rows)

    @property
    def total_bytes(self) -> int:
        """Bytes of all values."""
        return sum(row.nbytes for row in self.rows)

    @property
    def intermediate_bytes(self) -> int:
        """Bytes of those that are not there anyway as arguments, states or constants: what a policy can change."""
        return self.by("origin").get("intermediate", 0)

    def by(self, field: str) -> dict[str, int]:
        """Bytes by the values of a field or property of `Residual`: ``by("module")``, ``by("reason")``; the most first."""
        totals: dict[str, int] = {}
        for row in self.rows:
            key = getattr(row, field)
            key = key if isinstance(key, str) else ", ".join(map(str, key)) if isinstance(key, tuple) else str(key)
            totals[key] = totals.get(key, 0) + row.nbytes
        return dict(sorted(totals.items(), key=lambda item: -item[1]))

    def largest(self, num: int = 10) -> Residuals:
        """Those of the most bytes, the largest first."""
        return Residuals(self.name, sorted(self.rows, key=lambda row: -row.nbytes)[:num])

    def to_dict(self) -> dict[str, Any]:
        """All of it in dicts, lists, strings and numbers, as ``json.dump`` takes them."""
        rows = [{k: list(v) if isinstance(v, tuple) else v for k, v in vars(row).items()} for row in self.rows]
        totals = {"total_bytes": self.total_bytes, "intermediate_bytes": self.intermediate_bytes}
        return {"function": self.name, **totals, "residuals": rows}

    def plot(self, ax: Any = None, *, num: int = 15) -> Any:
        """Draw the `num` largest values as bars, coloured by the reason; needs matplotlib.

        Args:
            ax: the ``matplotlib`` axes to draw in; new ones of a fitting size if None.
            num: how many values have a bar of their own; the rest share one.

        Returns:
            The axes; ``ax.figure.savefig("residuals.png")`` makes a file of them.
        """
        return _show.plot(self, ax, num)

    def __str__(self) -> str:
        return _show.text(self)

    def __repr__(self) -> str:
        return f"Residuals({_show.title(self)})"

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        yield _show.rich_table(self, options.max_width)

    def _repr_html_(self) -> str:
        return _show.html(self)


def saved_residuals(
    fun: Callable[..., Any],
    /,
    *args: Any,
    argnums: int | Sequence[int] | None = None,
    wrt: PyTree | Filter = None,
    has_aux: bool = False,
    **kwargs: Any,
) -> Residuals:
    """Find out what a function keeps between its forward and its backward pass, without running either.

    The function may read and write states, contain any transforms, and return any arrays: a loss, or the outputs of a
    model. No array is computed and no state changes; the function's Python runs once.

    Without `argnums` and `wrt` it is differentiated with respect to every float in its arguments and every float array
    of the states that it reads, as training on data that has a gradient of its own would. With either, as in `grad`:
    ``wrt=statetx.Param`` shows what ``grad(fun, wrt=statetx.Param)`` keeps, and ``argnums=0`` what ``grad(fun)`` does.

    Args:
        fun: the function.
        *args, **kwargs: its arguments; ``jax.ShapeDtypeStruct`` may stand for arrays.
        argnums: positions of the arguments to differentiate.
        wrt: the states to differentiate: a state, a list or dict of states, or a filter.
        has_aux: whether `fun` returns a pair whose second item is not differentiated.

    Returns:
        `Residuals`, a `Residual` for each array. Arrays that are the same are counted once. A value that a loop of
        length T stacks is T values of the shape it has in one step.

    Memory:
        The bytes are those of the arrays that the closure returned by ``jax.vjp`` holds, arguments and parameters
        among them. Inside a compiled program XLA may hold fewer: it fuses, and recomputes what is cheap.

    Raises:
        StateFilterError: `wrt` selects no state.
        ValueError: an argument that `argnums` names is not there.

    Source:
        ``jax.ad_checkpoint.print_saved_residuals``, which sees no states and gives no bytes, costs or reasons.

    Example:
        >>> import jax.numpy as jnp, statetx
        >>> w = statetx.Param(jnp.ones((4, 4)))
        >>> @statetx.remat(policy=statetx.policies.dots)
        ... def layer(x):
        ...     return jnp.sin(jnp.tanh(w.value @ x))
        >>> kept = statetx.saved_residuals(lambda x: layer(x).sum(), jnp.ones(4))
        >>> for value in kept:
        ...     print(value.type, value.nbytes, value.origin, value.path or value.primitive, value.why)
        f32[4] 16 argument x ('input of layer',)
        f32[4,4] 64 state layer.w ('input of layer',)
        f32[4] 16 intermediate dot_general ('policy of layer',)
        >>> kept.total_bytes, kept[2].flops
        (96, 32)
    """
    passes = differentiate(fun, args, kwargs, argnums=argnums, wrt=wrt, has_aux=has_aux)
    return Residuals(passes.name, list(_rows(passes)))


def _rows(passes: Passes) -> Iterator[Residual]:
    whole = inline(passes.forward, calls=INLINED)
    origins = Origins(whole, [s.path if s.origin == "state" else None for s in passes.sources])
    atoms = whole.outvars[passes.num_out :]
    read = readers(passes.backward)
    groups = buffers(passes)
    places = [origins(atoms[group[0]]) for group in groups]
    kept = [
        {a for i in group if not isinstance(a := atoms[i], Literal)} | place.aliases
        for group, place in zip(groups, places, strict=True)
    ]
    recompute = Recomputation(whole, frozenset().union(*kept))
    for group, place, own in zip(groups, places, kept, strict=True):
        atom = atoms[group[0]]
        flops = 0 if place.eqn is None else recompute(atom, own)
        who = set().union(*(read[i] for i in group))
        yield _row(passes, place, atom.aval, flops, who, origins.near(place))


def _row(passes: Passes, place: Place, aval: Any, flops: int, who: set[int], near: list[str]) -> Residual:
    if place.input is not None:
        source = passes.sources[place.input]
    else:
        source = Source("literal" if place.eqn is None else "intermediate")
    if source.origin == "state":
        near = [source.path]
    file, line, function = ("", 0, "") if place.eqn is None else user_line(place.eqn)
    return Residual(
        shape=tuple(place.aval.shape),
        dtype=str(place.aval.dtype),
        times=place.times,
        nbytes=num_bytes(aval),
        origin=source.origin,
        path=source.path,
        kind=source.kind,
        names=tuple(sorted(place.names)),
        primitive="" if place.eqn is None else place.eqn.primitive.name,
        source=f"{file}:{line}" if file else "",
        function=function,
        module=", ".join(sorted({path.rpartition(".")[0] for path in near} - {""})),
        flops=flops,
        why=_reasons(passes, place, who),
        memory=_jax.memory_of(aval) if source.origin == "intermediate" else "",
    )


def _reasons(passes: Passes, place: Place, who: set[int]) -> tuple[str, ...]:
    """What the readers of a value in the backward pass say of why it is kept."""
    reasons = ["not rematerialised"] if PLAIN in who else []
    for region in sorted(who - {PLAIN}):
        name = "a rematerialised function" if region == UNKNOWN else passes.regions[region]
        reasons.append(f"{'policy' if region in place.regions else 'input'} of {name}")
    return tuple(dict.fromkeys(reasons)) or ("not read",)


def print_saved_residuals(
    fun: Callable[..., Any],
    /,
    *args: Any,
    argnums: int | Sequence[int] | None = None,
    wrt: PyTree | Filter = None,
    has_aux: bool = False,
    **kwargs: Any,
) -> None:
    """Print what a function keeps for its backward pass, one line for each value; `saved_residuals` says the rest.

    Example:
        >>> import jax.numpy as jnp, statetx
        >>> w = statetx.Param(jnp.ones((4, 4)))
        >>> layer = statetx.remat(lambda x: jnp.sin(w.value @ x))
        >>> statetx.print_saved_residuals(layer, jnp.ones(4))
        f32[4]    16 B  from the argument x
        f32[4,4]  64 B  from the state w (Param)
        80 B in 2 values, 0 B of them intermediate
    """
    print(_show.lines(saved_residuals(fun, *args, argnums=argnums, wrt=wrt, has_aux=has_aux, **kwargs)))
