"""Assertions for tests of code that uses statetx: equal results under rematerialization, memory, saved residuals,
number of traces.
"""

from __future__ import annotations

import collections
import os
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np

from . import _environment, _jax
from ._errors import FunctionError
from ._lift.wrapper import Wrapper, name_of
from ._remat.override import override
from ._targets import current
from ._text import format_bytes, parse_bytes
from ._tree import is_integer, is_opaque, partition
from ._verify.functions import is_float_array, pulled_back
from ._verify.results import differences
from ._verify.same import SameStep, same_step
from .memory.baseline import TOLERANCE, UPDATE, Difference, MemoryBaseline, find, key_of, read_tolerance, save
from .memory.measure import MemoryProfile, memory_profile
from .residuals._trace import TracedCall
from .residuals.saved import saved_residuals
from .residuals.table import Residual
from .transforms.functionalize import Functionalize
from .transforms.remat import remat

__all__ = ["assert_memory", "assert_remat_equivalent", "assert_residuals", "assert_same_step", "count_traces"]


def __dir__() -> list[str]:
    return __all__


@current.takes_target
def assert_memory(
    fun: Any,
    /,
    *args: Any,
    at_most: int | str | None = None,
    against: str | os.PathLike[str] | None = None,
    tolerance: float | str = TOLERANCE,
    gradient: bool | None = None,
    **kwargs: Any,
) -> None:
    """Check the memory of a compiled function: at most a size, or no more than a file says.

    Nothing is computed and no state changes. With ``target="h100"`` it is compiled for a device that need not be there,
    such as in CI.

    The file has the memory of each program at the time of saving: with ``STATETX_UPDATE_MEMORY=1`` in the environment,
    this function writes it, and compares nothing; `python -m statetx memory module:fun --save memory.json` does the
    same. It is JSON, to be kept under version control. A file has many programs, by name and device. A part that grew
    is named by owner and line: a renamed variable or another order is no difference.

    Args:
        fun: as for `memory_profile`: a function, a jitted one, or a program that is compiled already.
        *args, **kwargs: its arguments; arrays may be given as ``jax.ShapeDtypeStruct``.
        at_most: bytes, or a size such as ``"3GiB"``, of one device: arguments, outputs and temporaries.
        against: the file.
        tolerance: by how much the peak may grow, relative to the file's: ``0.01``, ``"1%"``.
        gradient: as for `memory_profile`.
        target: the device to compile for, a `Target` or the name of one; by default the devices of this machine.

    Raises:
        AssertionError: it takes more; with the parts of the peak, or those that grew, and the libraries of another
            version.
        FileNotFoundError: there is no such file.
        ValueError: the file is damaged or has no such program; or neither `at_most` nor `against` is given.
        TargetError: the target is not known, or its compiler is not installed.

    Example:
        >>> import jax, jax.numpy as jnp, statetx
        >>> loss = lambda w, x: jnp.tanh(jnp.tanh(x @ w) @ w).sum()
        >>> x = jax.ShapeDtypeStruct((4096, 64), jnp.float32)
        >>> statetx.testing.assert_memory(loss, jnp.eye(64), x, at_most="8MiB")
    """
    if at_most is None and against is None:
        raise ValueError(
            "assert_memory has nothing to compare with.\n"
            "Fix: give a size, at_most='3GiB', or a file, against='memory.json'."
        )
    most, allowed = None if at_most is None else parse_bytes(at_most, "at_most="), read_tolerance(tolerance)
    profile = memory_profile(fun, *args, gradient=gradient, **kwargs)
    figures = MemoryBaseline.of(profile)
    if most is not None and figures.peak_bytes > most:
        raise AssertionError(_above(profile, figures, most))
    if against is None:
        return
    key = key_of(profile.name, figures)
    if _environment.flag(UPDATE):
        save(against, key, figures)
        return
    difference = Difference(profile.name, find(against, key), figures, allowed)
    if difference.is_regression:
        raise AssertionError(
            f"{difference}\n"
            "Fix: statetx.memory_profile(...) shows all that is alive, and what would lower it. If the program shall "
            f"take this much, run the test with {UPDATE}=1, which writes {os.fspath(against)}."
        )


def _above(profile: MemoryProfile, figures: MemoryBaseline, most: int) -> str:
    """The message that a program takes more than a size."""
    over = format_bytes(figures.peak_bytes - most)
    parts = "\n".join(f"  {part}: {format_bytes(part.num_bytes)}" for part in figures.parts[:5])
    changes = [c.text.rstrip(".") for c in profile.changes[:2]]
    fix = "; or ".join([*changes, "statetx.memory_profile(...) shows all that is alive"])
    return (
        f"{profile.name} on {figures.device} takes {format_bytes(figures.peak_bytes)} at its peak, {over} more than "
        f"{format_bytes(most)}. The largest parts:\n{parts}\n"
        f"Fix: {fix}."
    )


def assert_remat_equivalent(fun: Callable, /, *args: Any, rtol: float = 0.0, atol: float = 0.0, **kwargs: Any) -> None:
    """Check that rematerialization does not change the results of a function.

    Runs the function and its pullback twice without rematerialization and once with it, and compares outputs, new
    values of states (random keys included) and gradients with respect to every float argument and state. Operations run
    one by one (``jax.disable_jit``), loops step by step, so give it small arguments. No state changes. If a loop's
    ``checkpoint=`` stores values as bits, it runs the function and its pullback once more, with compiled loops, to
    check that these values are 0 or 1.

    Args:
        fun: a function that may read and write states. If it rematerializes nothing, it is rematerialized as a whole.
        *args, **kwargs: its arguments.
        rtol, atol: tolerances for floats; zero for bitwise equality, which nested rematerialization may miss by a
            rounding, since it sums the cotangents of a value with several uses in another order.

    Raises:
        AssertionError: naming the first difference; or values stored as bits that are not 0 or 1; or, if the function
            is not deterministic, the random generator or host callback that makes it so.
        FunctionError: a transform traces the values that are to be compared.

    Example:
        >>> import jax.numpy as jnp, statetx
        >>> w = statetx.Param(jnp.ones(3))
        >>> statetx.testing.assert_remat_equivalent(lambda x: jnp.tanh(w.value * x), jnp.arange(3.0))
    """
    pure = Functionalize(fun, takes_refs=True)
    values = pure.values(*args, **kwargs)
    initial_generators = _generators()
    with override(is_off=True):
        first, second = _run(pure, values, args, kwargs), _run(pure, values, args, kwargs)
    if any(isinstance(x, _jax.Tracer) for x in first.values()):
        raise FunctionError(
            f"assert_remat_equivalent({name_of(fun)}) compares numbers, and a transform around it traces them.\n"
            f"Fix: call it outside of functions that are transformed."
        )
    drawn = [name for name, state in _generators().items() if state != initial_generators[name]]
    difference = _difference(second, first, 0.0, 0.0)
    if difference:
        raise AssertionError(
            f"{name_of(fun)} is not deterministic: two runs without rematerialization differ at {difference}.\n"
            f"{_suspects(fun, args, kwargs, drawn)}"
        )

    # `override` lists the rematerialized functions that it meets.
    with override() as visited:
        result = _run(pure, values, args, kwargs)
    if not visited:
        wrapped = Functionalize(remat(fun), takes_refs=True)
        wrapped.values(*args, **kwargs)  # finds the states that no path leads to
        result = _run(wrapped, values, args, kwargs)
    difference = _difference(result, first, rtol, atol)
    if difference:
        suspects = _suspects(fun, args, kwargs, drawn)
        raise AssertionError(f"{name_of(fun)} gives other results when it is rematerialized: {difference}.\n{suspects}")


def _run(pure: Callable, values: dict[str, Any], args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Outputs, new states and gradients, by their names in messages."""
    is_differentiated = partition((values, args, kwargs), is_float_array)[1].mask
    leaves = jax.tree_util.tree_leaves_with_path((values, args, kwargs), is_leaf=is_opaque)
    paths = [path for path, _ in leaves]
    with jax.disable_jit():  # compiled as a whole, a function may be rounded otherwise than its parts
        out, new_values, gradients = pulled_back(pure, values, args, kwargs)
    grads = iter(gradients)
    results = {f"output{jax.tree_util.keystr(p)}": x for p, x in jax.tree_util.tree_leaves_with_path(out)}
    for path, value in new_values.items():
        for p, x in jax.tree_util.tree_leaves_with_path(value):
            results[f"state {path!r}{jax.tree_util.keystr(p)}"] = x
    for path, has_gradient in zip(paths, is_differentiated, strict=True):
        if has_gradient:
            results[f"gradient of {_describe(path)}"] = next(grads)
    return results


def _describe(path: tuple) -> str:
    """The state or argument of a path in ``(values, args, kwargs)``."""
    group, entry, *keys = path
    tail = jax.tree_util.keystr(tuple(keys))
    name = getattr(entry, "key", getattr(entry, "idx", entry))
    return f"{('state', 'argument', 'argument')[group.idx]} {name!r}{tail}"


def _difference(actual: dict[str, Any], expected: dict[str, Any], rtol: float, atol: float) -> str:
    """A description of the first result that differs; empty if none does."""
    if list(actual) != list(expected):
        return f"the results {sorted(set(actual) ^ set(expected))}, which only one of them has"

    def are_close(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        wide = np.complex128 if np.iscomplexobj(b) else np.float64
        return np.isclose(a.astype(wide), b.astype(wide), rtol=rtol, atol=atol, equal_nan=True)

    return next((f"{name}{found.text}" for name, found in differences(actual, expected, are_close).items()), "")


def _generators() -> dict[str, Any]:
    """The states of the global random generators."""
    return {"numpy.random": str(np.random.get_state(legacy=False)), "random": random.getstate()}


def _suspects(fun: Callable, args: tuple, kwargs: dict[str, Any], drawn: Iterable[str]) -> str:
    lines = [
        f"It draws from the global generator of {name}, which is not a state: use a statetx.RngState." for name in drawn
    ]
    with override(is_off=True):
        callbacks = _jax.callbacks(TracedCall("assert_remat_equivalent", fun, args, kwargs).body.jaxpr)
    for name, line in callbacks:
        lines.append(
            f"It calls {name} on the host, at {line}, again for each recomputation: it must return the same result."
        )
    return (
        "\n".join(lines)
        or "No host callback and no draw from a global generator was found. If a value is stored as bits since it is "
        "an input or has a name, it may be neither 0 nor 1; otherwise this is a bug in statetx or JAX."
    )


def assert_same_step(
    reference: Callable, step: Callable, /, *args: Any, steps: int = 3, tolerance: float | None = None, **kwargs: Any
) -> SameStep:
    """Check that two training steps do the same: outputs, new values of states, keys, moments of optimizers.

    Both run, jitted, each time from the reference's states; at the end every state holds its value from before. States
    that a call creates, as with brainstate's ``init_all_states``, are results, and removed again. Results are compared
    bit for bit. If some differ, the reference is compiled otherwise and run from inputs that differ by a unit in the
    last place, and both run in float64 where their types allow it: a difference within this rounding counts as none.
    For another the error names the first state by path, and the lines where the first value that differs is computed.

    Args:
        reference, step: functions of the same arguments, jitted or not, on one model or on two, whose states have
            equal paths, or paths with equal ends.
        *args, **kwargs: their arguments; copies are passed.
        steps: how many steps are compared.
        tolerance: relative to the largest entry of each array; nothing is measured then. As many writes of each state,
            draws of each key and calls to the host are demanded as the reference has; writes by transforms of
            other libraries are not counted.

    Returns:
        The comparison, with its measurements; prints as text.

    Raises:
        AssertionError: they are not the same step, or the reference is not deterministic.
        FunctionError: they cannot run here, do not take the arguments, or create states in a list, a dict or a global
            variable.

    Example:
        >>> import jax.numpy as jnp, statetx
        >>> w = statetx.Param(jnp.eye(3))
        >>> def plain(x):
        ...     w.value -= 0.1 * statetx.grad(lambda x: jnp.tanh(x @ w.value).sum(), wrt=w)(x)
        >>> def step(x):
        ...     w.value -= 0.1 * statetx.grad(statetx.remat(lambda x: jnp.tanh(x @ w.value).sum()), wrt=w)(x)
        >>> print(statetx.testing.assert_same_step(plain, step, jnp.ones((2, 3))))
        step is the same step as plain: 1 result in 3 steps, bit for bit.
    """
    report = same_step(reference, step, args, kwargs, steps=steps, tolerance=tolerance)
    if report.problem:
        raise AssertionError(report.problem)
    return report


def assert_residuals(fun: Callable, /, *args: Any, expected: int | Sequence[str], **kwargs: Any) -> None:
    """Check the residuals of a function, apart from its arguments, states and constants.

    Args:
        fun: a function that may read and write states.
        *args, **kwargs: its arguments; nothing is run.
        expected: the bytes, or the values in any order, each by its name, by its type (``"f32[8,64]"``), or by both
            (``"hidden f32[8,64]"``). A residual of each step of a loop of 10 steps is given once, as
            ``"10 x f32[64]"``.

    Raises:
        AssertionError: naming unexpected residuals, and missing ones.

    Example:
        >>> import jax.numpy as jnp, statetx
        >>> @statetx.remat(policy=statetx.policies.names("hidden"))
        ... def f(x):
        ...     return jnp.sin(statetx.checkpoint_name(jnp.cos(x), "hidden"))
        >>> statetx.testing.assert_residuals(f, jnp.ones(4), expected=["hidden f32[4]"])
        >>> statetx.testing.assert_residuals(f, jnp.ones(4), expected=16)
    """
    residuals = saved_residuals(fun, *args, **kwargs)
    rows = [row for row in residuals if row.origin == "intermediate"]
    if is_integer(expected):
        if residuals.intermediate_bytes != expected:
            raise AssertionError(
                f"{name_of(fun)} keeps {residuals.intermediate_bytes} bytes, not {expected}:\n{residuals}"
            )
        return
    if isinstance(expected, (int, str)):
        raise TypeError(f"assert_residuals: expected={expected!r} is one value.\nFix: give a list, [{expected!r}].")
    remaining = collections.Counter(expected)
    extra = []

    def forms_of(row: Residual) -> list[str]:
        times = f"{row.times} x " if row.times > 1 else ""
        return [f"{name} {times}{row.type}" for name in row.names] + [*row.names, times + row.type]

    # First those that fit the fewest of the expected values.
    for forms in sorted(map(forms_of, rows), key=lambda forms: len(remaining.keys() & set(forms))):
        matched = next((form for form in forms if remaining[form] > 0), None)
        if matched is None:
            extra.append(forms[0])
        else:
            remaining[matched] -= 1
    missing = sorted((+remaining).elements())
    if extra or missing:
        raise AssertionError(
            f"{name_of(fun)} keeps, unexpectedly, {extra or 'nothing'}, and does not keep "
            f"{missing or 'nothing else'}:\n"
            f"{residuals}"
        )


class count_traces(Wrapper):
    """Wrap a function to count runs of its Python body. Under a transform, a run is a trace.

    Use it on a function or, in a class body, on a method.

    Attributes:
        count: number of runs.

    Example:
        >>> import jax.numpy as jnp, statetx
        >>> f = statetx.testing.count_traces(lambda x: x * 2)
        >>> g = statetx.jit(statetx.grad(statetx.remat(f)))
        >>> _ = g(1.0), g(2.0)
        >>> f.count
        1
    """

    def __init__(self, fun: Callable):
        super().__init__(fun)
        self.count = 0

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        self.count += 1
        return self.__wrapped__(*args, **kwargs)
