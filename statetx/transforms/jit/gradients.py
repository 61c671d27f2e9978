"""`GradientRelease`: a jitted step that releases the gradients of scanned layers, or says why not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ... import _jax
from ..._equations.release.devices import ANYWHERE
from ..._equations.release.fates import Fate, told
from ..._equations.release.program import ReleasedProgram
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
        release_gradients: the option of `jit`.
    """

    def __init__(
        self,
        name: str,
        jaxpr: Any,
        inputs: Sequence[tuple[str, Any]],
        overwritable: Sequence[int],
        release_gradients: bool | None,
    ):
        self._jaxpr, self._program = jaxpr, None
        if release_gradients is not False and (release_gradients or overwritable):
            placements, is_demanded = [_placement_of(value) for _, value in inputs], bool(release_gradients)
            self._program = ReleasedProgram.of(
                jaxpr, overwritable, placements, is_demanded=is_demanded, repeats=is_demanded
            )
        if release_gradients:
            self._refuse_kept(name, [name for name, _ in inputs])

    def evaluate(self, args: Sequence[Any]) -> list[Any]:
        """The outputs of the program, which is rewritten where it is lowered."""
        return _jax.evaluate(self._jaxpr, (), args) if self._program is None else self._program(args)

    def told(self) -> tuple[str, ...]:
        """A sentence for each loop whose backward pass ends in gradients, and for each thing that happens to them."""
        return () if self._program is None else told(self._program.stacks())

    def _refuse_kept(self, name: str, names: Sequence[str]) -> None:
        stacks = [] if self._program is None else self._program.stacks()
        unreleased = [stack for stack in stacks if not stack.is_released]
        if stacks and not unreleased:
            return
        reasons = " ".join(told(unreleased, names)) or "No loop of it ends in gradients of layers that an update reads."
        way_out = _WAY_OUT if any(stack.fate is Fate.READ for stack in unreleased) else ""
        raise FunctionError(
            f"{name}: release_gradients=True is for steps whose updates treat each layer of a scan alone. {reasons}\n"
            f"Fix: {way_out}leave release_gradients= out: memory_profile tells what is released and what is not."
        )


def _placement_of(x: Any) -> Any:
    """The sharding of a value; JAX puts one that is not on a mesh where the program needs it."""
    sharding = sharding_of(x)
    return ANYWHERE if sharding is None and not isinstance(x, _jax.Tracer) else sharding
