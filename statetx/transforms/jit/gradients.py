"""What a jitted step does with the gradients of scanned layers, told and checked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ... import _jax, _states
from ..._equations.release import Fate, Release, Stack, has_loop
from ..._errors import FunctionError
from ..._positions import replaced
from ..._text import format_bytes


class Gradients:
    """The release of gradients in one staged program.

    Args:
        name: of the function.
        jaxpr: the program, without constants.
        overwritable: the inputs that are donated.
        wanted: ``release_gradients=`` of the user.
    """

    def __init__(self, name: str, jaxpr: Any, overwritable: Sequence[int], wanted: bool | None):
        self._jaxpr, self._release = jaxpr, None
        # A Ref is no operand of a call with a rule of its own.
        if wanted is not False and (wanted or overwritable) and not jaxpr.is_high and has_loop(jaxpr):
            self._init_release(overwritable, is_demanded=bool(wanted))
        if wanted:
            self._refuse_kept(name)

    def _init_release(self, overwritable: Sequence[int], *, is_demanded: bool) -> None:
        """Make one equation of what is computed. Inputs that nothing reads, and those that are outputs, are left to
        JAX, which knows more of them than of operands of a call.
        """
        live = _jax.without_dead_code(self._jaxpr)
        read = {v for eqn in live.eqns for v in eqn.invars if isinstance(v, _jax.Var)}
        self._used = [i for i, v in enumerate(live.invars) if v in read]
        made = {v for eqn in live.eqns for v in eqn.outvars}
        self._made = [n for n, v in enumerate(live.outvars) if v in made]
        invars, outvars = [live.invars[i] for i in self._used], [live.outvars[n] for n in self._made]
        self._call = _jax.close(_jax.rebuild(live, invars=invars, outvars=outvars), ())
        positions = [n for n, i in enumerate(self._used) if i in overwritable and live.invars[i] not in live.outvars]
        self._release = Release(tuple(positions), is_demanded=is_demanded)

    def evaluate(self, args: Sequence[Any]) -> list[Any]:
        """The outputs of the program, which is rewritten where it is lowered."""
        if self._release is None:
            return _jax.evaluate(self._jaxpr, (), args)
        values = _jax.call_whole(self._call, [args[i] for i in self._used], self._release)
        inputs = dict(zip(self._jaxpr.invars, args, strict=True))
        outs = [v.val if isinstance(v, _jax.Literal) else inputs.get(v) for v in self._jaxpr.outvars]
        return replaced(outs, self._made, values)

    def told(self) -> tuple[str, ...]:
        """A sentence for each loop whose backward pass ends in gradients, and for each thing that happens to them."""
        if self._release is None:
            return ()
        groups: dict[tuple[Any, Fate, Any], int] = {}
        for stack in self._release.rewritten(self._call).stacks:
            key = stack.loop, stack.fate, stack.reader
            groups[key] = groups.get(key, 0) + stack.num_bytes
        return tuple([_sentence(Stack(loop, size, fate, reader)) for (loop, fate, reader), size in groups.items()])

    def _refuse_kept(self, name: str) -> None:
        stacks = [] if self._release is None else self._release.rewritten(self._call).stacks
        kept = [stack for stack in stacks if stack.fate is not Fate.RELEASED]
        if stacks and not kept:
            return
        reasons = " ".join(map(_sentence, kept)) or "No loop of it ends in gradients of layers that an update reads."
        raise FunctionError(
            f"{name}: release_gradients=True is for steps whose updates treat each layer of a scan alone. {reasons}\n"
            f"Fix: leave release_gradients= out: what can be released is, and memory_profile tells what is not."
        )


def _sentence(stack: Stack) -> str:
    layers = f"{format_bytes(stack.num_bytes)} of gradients of {stack.loop.params.get('length', 'all')} layers"
    return f"{layers} ({_site(stack.loop)}) {_FATES[stack.fate](stack)}."


_FATES: dict[Fate, Callable[[Stack], str]] = {
    Fate.RELEASED: lambda stack: "are used up in the loop of the backward pass, layer by layer",
    Fate.RETURNED: lambda stack: "are kept: the program returns them",
    Fate.READ: lambda stack: (
        f"are kept: {stack.reader.primitive.name} at {_site(stack.reader)} needs several layers at once"
    ),
    Fate.SHARED: lambda stack: "are kept: on CPUs an update by moments copies these, which takes more memory",
    Fate.REPLACED: lambda stack: "are kept: what is made of them takes as much memory",
}


def _site(eqn: Any) -> str:
    folders = (*_states.library_folders(), _jax.JAX_FOLDER)
    return _jax.traceback_site(eqn.source_info.traceback, folders)
