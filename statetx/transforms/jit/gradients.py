"""What a jitted step does with the gradients of scanned layers, told and checked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ... import _jax
from ..._equations.release import ANYWHERE, Fate, ReleasedProgram, told
from ..._errors import FunctionError
from ..._lift.context import sharding_of

_WAY_OUT = "let the update treat each layer alone, by jax.vmap(optimizer.init) and jax.vmap(optimizer.update); or "


class GradientRelease:
    """The release of gradients in one staged program.

    Args:
        name: of the function.
        jaxpr: the program, without constants.
        inputs: the name and the value of each of its inputs.
        overwritable: the inputs that are donated.
        wanted: ``release_gradients=`` of the user.
    """

    def __init__(
        self,
        name: str,
        jaxpr: Any,
        inputs: Sequence[tuple[str, Any]],
        overwritable: Sequence[int],
        wanted: bool | None,
    ):
        self._jaxpr, self._program = jaxpr, None
        if wanted is not False and (wanted or overwritable):
            placements, is_wanted = [_placement_of(value) for _, value in inputs], bool(wanted)
            self._program = ReleasedProgram.of(
                jaxpr, overwritable, placements, is_demanded=is_wanted, repeats=is_wanted
            )
        if wanted:
            self._refuse_kept(name, [name for name, _ in inputs])

    def evaluate(self, args: Sequence[Any]) -> list[Any]:
        """The outputs of the program, which is rewritten where it is lowered."""
        return _jax.evaluate(self._jaxpr, (), args) if self._program is None else self._program(args)

    def told(self) -> tuple[str, ...]:
        """A sentence for each loop whose backward pass ends in gradients, and for each thing that happens to them."""
        return () if self._program is None else told(self._program.stacks())

    def _refuse_kept(self, name: str, names: Sequence[str]) -> None:
        stacks = [] if self._program is None else self._program.stacks()
        kept = [stack for stack in stacks if not stack.is_released]
        if stacks and not kept:
            return
        reasons = " ".join(told(kept, names)) or "No loop of it ends in gradients of layers that an update reads."
        way_out = _WAY_OUT if any(stack.fate is Fate.READ for stack in kept) else ""
        raise FunctionError(
            f"{name}: release_gradients=True is for steps whose updates treat each layer of a scan alone. {reasons}\n"
            f"Fix: {way_out}leave release_gradients= out: memory_profile tells what is released and what is not."
        )


def _placement_of(x: Any) -> Any:
    """The sharding of a value; JAX puts one that is not on a mesh where the program needs it."""
    sharding = sharding_of(x)
    return ANYWHERE if sharding is None and not isinstance(x, _jax.Tracer) else sharding
