"""The meaning of a stateful program, without statetx: cells in plain Python, and every transform written out.

A rematerialized or compiled call is the call, a loop is Python's, a map is a loop over the examples and a stack, a
branch is an ``if``, and a derivative is JAX's of a pure function that takes the values of all cells as arguments and
returns their new values. Nothing of statetx is used but the names of its errors. Drawn programs, the corpus of the
laws, the behaviors and the table of effects are compared with it.

Laws defined here and nowhere else:

- A transformed call that raises leaves every cell unchanged, and the cells that it created without a value.
- Both sides of a branch are traced, so both are run here; writes of the side not taken are undone, its exceptions are
  raised.
- A loop's carry and a branch's write keep structure, shape and dtype; a weak type is promoted to another dtype that is
  written. As in `jax.lax`, a loop leaves a value as weak as its body leaves it, branches as weak as the first of them.
- A cell made in the body of a loop or branch, or on the devices of a `shard_map`, may not outlive it. One made under a
  map and left behind holds a value for each example.
- A map gives each example a random key of its own, and the key advances once, if the mapped function writes it at all,
  whatever it writes. brainstate's keys advance in two splits, the others in one.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from mixed_cells import (
    DEAD,
    Cell,
    Only,
    Tree,
    is_numeric,
    join,
    leaf_types,
    rebuild,
    same_leaves,
    settle,
    stack,
    strengthens,
    take,
    unsettle,
)

from statetx import CarryTypeError, CreatedStateError


class Reference:
    """The cells of one program, and its transforms written out without states."""

    def __init__(self) -> None:
        self._cells: dict[int, weakref.ref[Cell]] = {}
        self.has_read_open = False

    def add(self, cell: Cell) -> None:
        self._cells[len(self._cells)] = weakref.ref(cell)

    # -- values of all cells --

    def _live(self, start: int = 0) -> Iterator[Cell]:
        for number in range(start, len(self._cells)):
            cell = self._cells[number]()
            if cell is not None:
                yield cell

    def _dump(self) -> list[tuple[Cell, Tree]]:
        return [(cell, rebuild(cell._value)) for cell in self._live()]

    def _load(self, values: list[tuple[Cell, Tree]]) -> None:
        for cell, value in values:
            cell._value = rebuild(value)

    def atomic(self, run: Callable[[], Any]) -> Any:
        before, start = self._dump(), len(self._cells)
        try:
            return run()
        except BaseException:
            self._load(before)
            for cell in self._live(start):
                cell._value = DEAD
            raise

    def _refuse_created(self, start: int) -> None:
        # One without a value, which a call that raised has left, is harmless.
        if any(cell._value is not DEAD for cell in self._live(start)):
            raise CreatedStateError("a cell outlived the body of a loop or branch")

    # -- transforms that are the call itself --

    def remat(self, fun: Callable | None = None, **options: Any) -> Callable:
        if fun is None:
            return self.remat
        return lambda *args, **kwargs: self.atomic(lambda: fun(*args, **kwargs))

    def shard_map(self, fun: Callable, **options: Any) -> Callable:
        def call(*args: Any) -> Any:
            start = len(self._cells)
            out = fun(*args)
            self._refuse_created(start)
            return out

        return lambda *args: self.atomic(lambda: call(*args))

    def jit(self, fun: Callable) -> Callable:
        """The call. A compiled program keeps the weak type of a state, so that the next call hits the cache."""

        def call(*args: Any) -> Any:
            before = self._dump()
            out = self.atomic(lambda: fun(*args))
            for cell, entry in before:
                cell.is_weak_open |= not same_leaves(cell._value, entry)
            return out

        return call

    # -- derivatives --

    def pure(self, fun: Callable, targets: Sequence[Cell], has_aux: bool = False) -> tuple[Callable, Callable]:
        """``pure(target_values, *args) -> (out, arrays)`` and ``finish(arrays) -> aux``, which stores the writes."""
        kept: list[Any] = []

        def run(values: Sequence[Tree], *args: Any) -> tuple[Any, list]:
            before = [cell._value for cell in targets]
            for cell, value in zip(targets, values, strict=True):
                cell._value = value
            out = fun(*args)
            out, aux = out if has_aux else (out, None)
            for cell, value, entry in zip(targets, values, before, strict=True):
                if cell._value is value:
                    cell._value = entry  # for example a number that JAX turned into an array
            cells = list(self._live())
            leaves, treedef = jax.tree.flatten(([c._value for c in cells], aux))
            kept[:] = [cells, leaves, treedef]
            return out, [x for x in leaves if isinstance(x, jax.Array)]

        def finish(arrays: Sequence[Any]) -> Any:
            cells, leaves, treedef = kept
            it = iter(arrays)
            whole = [next(it) if isinstance(x, jax.Array) else x for x in leaves]
            values, aux = jax.tree.unflatten(treedef, whole)
            for cell, value in zip(cells, values, strict=True):
                cell._value = value
            kept.clear()
            return aux

        return run, finish

    def _differentiated(self, transform: Callable, fun: Any, argnums: Any, wrt: Any, has_aux: bool, pack: Any) -> Any:
        """`grad` and its relatives: ``transform(pure, argnums=, has_aux=True)`` with respect to cells and arguments."""
        nums = (0 if wrt is None else ()) if argnums is None else argnums
        cells, treedef = jax.tree.flatten(wrt)

        def differentiated(*args: Any) -> Any:
            pure, finish = self.pure(fun, cells, has_aux)
            positions = [nums] if isinstance(nums, int) else list(nums)
            out = transform(pure, argnums=(0, *(i + 1 for i in positions)), has_aux=True)(
                [c.value for c in cells], *args
            )
            value, arrays, (of_cells, *of_args) = pack(out)
            aux = finish(arrays)
            of_wrt = jax.tree.unflatten(treedef, of_cells)
            of_args = of_args[0] if isinstance(nums, int) else tuple(of_args)
            gradients = of_args if wrt is None else of_wrt if argnums is None else (of_wrt, of_args)
            return value, aux, gradients

        return lambda *args: self.atomic(lambda: differentiated(*args))

    def value_and_grad(self, fun: Any, argnums: Any = None, *, wrt: Any = None, has_aux: bool = False) -> Callable:
        pack = lambda out: (out[0][0], out[0][1], out[1])
        run = self._differentiated(jax.value_and_grad, fun, argnums, wrt, has_aux, pack)

        def call(*args: Any) -> Any:
            value, aux, gradients = run(*args)
            return ((value, aux) if has_aux else value), gradients

        return call

    def grad(self, fun: Any, argnums: Any = None, *, wrt: Any = None, has_aux: bool = False) -> Callable:
        run = self.value_and_grad(fun, argnums, wrt=wrt, has_aux=has_aux)

        def call(*args: Any) -> Any:
            value, gradients = run(*args)
            return (gradients, value[1]) if has_aux else gradients

        return call

    def _jacobian(self, transform: Callable, fun: Any, argnums: Any = None, *, wrt: Any = None) -> Callable:
        """The output must be one array."""
        run = self._differentiated(transform, fun, argnums, wrt, False, lambda out: (None, out[1], out[0]))
        return lambda *args: run(*args)[2]

    def jacfwd(self, fun: Any, argnums: Any = None, **options: Any) -> Callable:
        return self._jacobian(jax.jacfwd, fun, argnums, **options)

    def jacrev(self, fun: Any, argnums: Any = None, **options: Any) -> Callable:
        return self._jacobian(jax.jacrev, fun, argnums, **options)

    def hessian(self, fun: Any) -> Callable:
        def twice(x: Any) -> Any:
            pure, finish = self.pure(fun, ())
            out, arrays = jax.hessian(lambda x: pure((), x), has_aux=True)(x)
            finish(arrays)
            return out

        return lambda x: self.atomic(lambda: twice(x))

    def vjp(self, fun: Any, *primals: Any, wrt: Any = None) -> tuple[Any, Callable]:
        """What is no float array in the output has no derivative; its cotangents are ignored."""
        cells, treedef = jax.tree.flatten(wrt)

        def split(*args: Any) -> tuple[list, Any]:
            leaves, structure = jax.tree.flatten(fun(*args))
            is_float = [isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jnp.inexact) for x in leaves]
            others = [None if f else x for f, x in zip(is_float, leaves, strict=True)]
            return [x for f, x in zip(is_float, leaves, strict=True) if f], (others, is_float, structure)

        def run() -> tuple[Any, Callable]:
            pure, finish = self.pure(split, cells, has_aux=True)
            floats, pull, arrays = jax.vjp(pure, [c.value for c in cells], *primals, has_aux=True)
            others, is_float, structure = finish(arrays)
            rest = iter(floats)
            out = structure.unflatten([next(rest) if f else x for f, x in zip(is_float, others, strict=True)])

            def pullback(cotangent: Any) -> Any:
                leaves = structure.flatten_up_to(cotangent)
                of_cells, *of_args = pull([c for f, c in zip(is_float, leaves, strict=True) if f])
                return tuple(of_args) if wrt is None else (jax.tree.unflatten(treedef, of_cells), tuple(of_args))

            return out, pullback

        return self.atomic(run)

    def jvp(self, fun: Any, primals: tuple, tangents: tuple) -> tuple[Any, Any]:
        def run() -> tuple[Any, Any]:
            pure, finish = self.pure(fun, ())
            out, tangent, arrays = jax.jvp(lambda *xs: pure((), *xs), primals, tangents, has_aux=True)
            finish(arrays)
            return out, tangent

        return self.atomic(run)

    def linearize(self, fun: Any, *primals: Any) -> tuple[Any, Callable]:
        def run() -> tuple[Any, Callable]:
            pure, finish = self.pure(fun, ())
            out, push, arrays = jax.linearize(lambda *xs: pure((), *xs), *primals, has_aux=True)
            finish(arrays)
            return out, push

        return self.atomic(run)

    # -- loops --

    def _step(self, body: Callable, left: dict[int, tuple[Cell, Tree]], skipped: Sequence[Cell] = ()) -> Any:
        """One iteration of a loop: run it and check that existing cells keep their types; `left` receives the written
        values.
        """
        before, start = self._dump(), len(self._cells)
        out = body()
        self._refuse_created(start)
        for cell, entry in before:
            if not any(cell is s for s in skipped) and not same_leaves(cell._value, entry):
                left[id(cell)] = cell, cell._value
                cell._value = settle(cell._value, entry)
                cell.is_strengthened |= strengthens(cell._value, entry)
        return out

    def _leave(self, left: dict[int, tuple[Cell, Tree]], init: Tree, carry: Tree) -> None:
        """Take the values of the last step as the loop's.

        Where only the weakness of a value changes, the body is not staged again for a strong one: the weakness of
        values computed from it is unspecified.
        """
        is_open = strengthens(carry, init) or any(cell.is_strengthened for cell, _ in left.values())
        for cell, value in left.values():
            cell._value = unsettle(cell._value, value)
            cell.is_weak_open |= is_open

    def scan(
        self,
        f: Callable,
        init: Tree,
        xs: Tree = None,
        length: int | None = None,
        reverse: bool = False,
        unroll: Any = 1,
        *,
        states: Any = None,
        checkpoint: Any = None,
    ) -> tuple[Tree, Tree]:
        n = length if length is not None else len(jax.tree.leaves(xs)[0])

        def run() -> tuple[Tree, Tree]:
            mapped = _Mapped(states, n)
            carry, last, ys, left = init, init, {}, {}
            for i in reversed(range(n)) if reverse else range(n):
                mapped.enter(i)
                now = carry
                last, ys[i] = self._step(lambda i=i, now=now: f(now, take(xs, i)), left, mapped.cells)
                carry = settle(last, now)
                mapped.leave(i)
            mapped.finish()
            self._leave(left, init, carry)
            return unsettle(carry, last), stack([ys[i] for i in range(n)])

        return self.atomic(run)

    def map(self, f: Callable, xs: Tree) -> Tree:
        return self.scan(lambda carry, x: (carry, f(x)), None, xs)[1]

    def fori_loop(self, lower: int, upper: int, body: Callable, init: Tree, **options: Any) -> Tree:
        # Between Python's numbers an index is weak, as in `jax.lax`.
        index = lambda i: jnp.asarray(int(i)) if is_known(i) else i
        return self.scan(lambda c, i: (body(index(i), c), None), init, jnp.arange(lower, upper))[0]

    def while_loop(self, test: Callable, body: Callable, init: Tree, **options: Any) -> Tree:
        def run() -> Tree:
            carry, last, left = init, init, {}
            while test(carry):
                last = self._step(lambda now=carry: body(now), left)
                carry = settle(last, carry)
            self._leave(left, init, carry)
            return unsettle(carry, last)

        return self.atomic(run)

    # -- maps --

    def vmap(
        self, fun: Callable, in_axes: Any = 0, out_axes: Any = 0, *, axis_size: int | None = None, states: Any = None
    ) -> Callable:
        def mapped(*args: Any) -> Any:
            axes = in_axes if isinstance(in_axes, tuple) else (in_axes,) * len(args)
            n = axis_size or next(
                jnp.shape(x)[a] for x, a in zip(args, axes, strict=True) if isinstance(x, jax.Array) and a is not None
            )
            split = [c for c in self._live() if c.is_random and not any(f.cell is c for f in states or ())]
            slices = _Mapped({**(states or {}), **{Only(c): SPLIT for c in split}}, n)
            before = self._dump()
            outs, left, made = [], [], []
            for i in range(n):
                self._load(before)
                slices.enter(i)
                first = len(self._cells)
                outs.append(
                    fun(
                        *(
                            x if a is None or not isinstance(x, jax.Array) else take(x, i, a)
                            for x, a in zip(args, axes, strict=True)
                        )
                    )
                )
                slices.leave(i)
                left.append([cell._value for cell, _ in before])
                made.append(list(self._live(first)))
            for (cell, entry), values in zip(before, zip(*left, strict=True), strict=True):
                if not any(cell is c for c in slices.cells):
                    _check_equal(values, entry)
            slices.finish()
            for cells in zip(*made, strict=True):
                if cells[-1]._value is not DEAD:
                    cells[-1]._value = stack([c._value for c in cells])
                    cells[-1].is_weak_open = True
            return stack(outs, out_axes)

        return lambda *args: self.atomic(lambda: mapped(*args))

    # -- branches --

    def cond(self, pred: Any, true_fun: Callable, false_fun: Callable, *operands: Any) -> Any:
        if not is_known(pred):  # in a loop of JAX, whose body writes no cells
            return jax.lax.cond(pred, true_fun, false_fun, *operands)
        return self._branch(bool(pred), [false_fun, true_fun], operands)

    def switch(self, index: Any, branches: Sequence[Callable], *operands: Any) -> Any:
        if not is_known(index):
            return jax.lax.switch(index, branches, *operands)
        return self._branch(min(max(int(index), 0), len(branches) - 1), branches, operands)

    def _branch(self, chosen: int, branches: Sequence[Callable], operands: tuple) -> Any:
        def run() -> Any:
            before = self._dump()
            outs, left = [], []
            for branch in branches:
                self._load(before)
                start, entered = len(self._cells), [jax.tree.flatten(cell._value) for cell, _ in before]
                outs.append(branch(*operands))
                self._refuse_created(start)
                left.append(
                    [
                        entry if same_leaves(cell._value, jax.tree.unflatten(treedef, leaves)) else cell._value
                        for (cell, entry), (leaves, treedef) in zip(before, entered, strict=True)
                    ]
                )
            if any(leaf_types(out) != leaf_types(outs[0]) for out in outs):
                raise CarryTypeError("branches return different types")
            for (cell, entry), values in zip(before, zip(*left, strict=True), strict=True):
                is_written = any(not same_leaves(v, entry) for v in values)
                cell._value = join(values, chosen) if is_written else entry
            return join(outs, chosen)

        return self.atomic(run)


def is_known(x: Any) -> bool:
    """Whether a number is known while the program runs."""
    try:
        int(x)
    except jax.errors.ConcretizationTypeError:
        return False
    return True


SPLIT, CARRY, BROADCAST = "Split", "Carry", "Broadcast"


class _Mapped:
    """Cells with one value for each iteration of a loop or example of a map."""

    def __init__(self, states: Any, n: int):
        self._n = n
        rules = [(f.cell, rule) for f, rule in (states or {}).items() if rule not in (CARRY, BROADCAST)]
        self._rules = [rule for _, rule in rules]
        self.cells = [cell for cell, _ in rules]
        self._before = [cell._value for cell in self.cells]
        self._keys = [jax.random.split(c._value, n + 1) if r == SPLIT else None for c, r in rules]
        self._entered: list[Any] = []
        self._left: list[dict[int, Any]] = [{} for _ in rules]
        self._is_written = [False for _ in rules]

    def enter(self, i: int) -> None:
        for cell, rule, before, keys in zip(self.cells, self._rules, self._before, self._keys, strict=True):
            cell._value = take(before, i, rule) if keys is None else keys[i + 1]
        self._entered = [cell._value for cell in self.cells]

    def leave(self, i: int) -> None:
        for k, (cell, entered) in enumerate(zip(self.cells, self._entered, strict=True)):
            self._left[k][i] = cell._value
            self._is_written[k] |= not same_leaves(cell._value, entered)

    def finish(self) -> None:
        for k, cell in enumerate(self.cells):
            if not self._is_written[k]:
                cell._value = self._before[k]
            elif self._keys[k] is not None:
                kept = self._keys[k][0]
                cell._value = jax.random.split(kept)[1] if cell.library == "brainstate" else kept
            else:
                cell._value = stack([self._left[k][i] for i in range(self._n)], self._rules[k])
                cell.is_weak_open = True  # JAX stacks numbers to either


def _check_equal(values: Sequence[Tree], entry: Tree) -> None:
    """By construction, examples write equal values to shared cells: a difference is a fault of the generator."""
    for value in values[1:]:
        xs, ys = jax.tree.leaves(values[0]), jax.tree.leaves(value)
        assert jax.tree.structure(values[0]) == jax.tree.structure(value), "examples write different structures"
        for x, y in zip(xs, ys, strict=True):
            if isinstance(x, jax.core.Tracer) or isinstance(y, jax.core.Tracer) or not is_numeric(x):
                continue
            if jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key):
                with jax.ensure_compile_time_eval():  # or the words would be traced where something else is
                    x, y = jax.random.key_data(x), jax.random.key_data(y)
            assert np.array_equal(x, y), "examples write different values to a shared cell"
