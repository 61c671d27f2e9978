"""Derivative rules, in equations or in Python, with the functions that JAX differentiates."""

from __future__ import annotations

import contextlib
import functools
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import CodeType, FunctionType
from typing import Any, Protocol

import jax
import jax.core
from jax._src import custom_derivatives
from jax._src import linear_util as _lu
from jax._src.interpreters import ad as _ad

from . import patches
from .editing import map_jaxprs, with_equations
from .equations import Jaxpr, equations_in, inner_jaxprs, open_jaxpr
from .primitives import DeferredPullback, loop_with_rules
from .traces import JAX_FOLDER


def is_written_by_jax(jaxpr: Jaxpr) -> bool:
    """Whether a jaxpr comes from a function in JAX's own source, such as ``jnp.where``."""
    return (jaxpr.debug_info.func_filename or "").startswith(JAX_FOLDER)


_RULES = {"custom_jvp_call": "jvp_jaxpr_fun", "custom_vjp_call": "fwd_jaxpr_thunk"}


def has_rule(eqn: Any) -> bool:
    """Whether an equation is a call of a function with a custom derivative."""
    return eqn.primitive.name in _RULES


@contextlib.contextmanager
def rules_kept(eqns: Iterable[Any]) -> Iterator[None]:
    """Restore JAX's records of rules after a block that runs the rules of calls for other differentiated operands.

    JAX keeps the outputs of all runs of a rule, but their structure of the last run only: with ``symbolic_zeros=True``
    two runs may differ, and one that raises leaves no structure.
    """
    outputs, filled = [], []
    for eqn in filter(has_rule, eqns):
        funs = _wrapped_in(eqn.params[_RULES[eqn.primitive.name]])
        if eqn.params.get("symbolic_zeros"):
            outputs += [(x, dict(x)) for f in funs for x in _outputs(f)]
        for store in [x for f in funs for x in f.stores if x is not None]:
            with contextlib.suppress(_lu.StoreException):
                filled.append((store, store.val))
    try:
        yield
    finally:
        for store, value in filled:
            store.reset()
            store.store(value)
        for cache, contents in outputs:
            cache.clear()
            cache.update(contents)


def _wrapped_in(fun: Any) -> list[Any]:
    """A wrapped function, and those that it closes over: two more for each time that JAX has bound a call again."""
    funs = [fun]
    for outer in funs:
        inner = [x for x in _closed_over(outer.f) if isinstance(x, _lu.WrappedFun)]
        funs += [x for x in inner if all(x is not y for y in funs)]
    return funs


def _outputs(fun: Any) -> list[dict]:
    """The outputs of all runs of a rule, by differentiated operands: of JAX's wrapper, or of `_in_place_of`."""
    is_ours = isinstance(fun.f, FunctionType) and fun.f.__code__.co_filename == __file__
    return [x for x in _closed_over(fun.f, 1) if isinstance(x, dict)] if is_ours or _is_in_jax_source(fun.f) else []


def _in_place_of(eqn: Any, run: Callable[..., Any]) -> Any:
    """`run` in place of a call's rule, once for each set of differentiated operands: JAX knows the jaxprs by identity.

    With ``symbolic_zeros=True`` JAX and statetx run the rule again at each request: only a run sets the structure of
    the residuals that the backward rule is given.
    """
    rule = eqn.params[_RULES[eqn.primitive.name]]
    results: dict[tuple[bool, ...], Any] = {}

    def cached(*flags: bool) -> Any:
        if flags not in results:
            results[flags] = run(*flags)
        return results[flags]

    def again(*flags: bool) -> Any:
        _forget_outputs(rule)
        out = run(*flags)
        _forget_outputs(rule)
        return out

    return _lu.wrap_init(again if eqn.params.get("symbolic_zeros") else cached, debug_info=rule.debug_info)


def _forget_outputs(rule: Any) -> None:
    for fun in _wrapped_in(rule):
        for outputs in _outputs(fun):
            outputs.clear()


def rule_of(eqn: Any) -> Jaxpr:
    """The derivative rule of a call, as a jaxpr, for nonzero tangents of all operands.

    For a ``custom_jvp`` it is ``(*operands, *tangents) -> (*results, *tangents)``, for a ``custom_vjp``
    ``(*operands) -> (*residuals, *results)``. The first operands, which the function closes over (`num_closed_over`),
    are left out. The request is the same as JAX's own, so JAX's cache is shared.
    """
    num = len(eqn.invars) - num_closed_over(eqn)
    is_jvp = eqn.primitive.name == "custom_jvp_call"
    # One flag an operand: custom_jvp asks whether the tangent is zero, custom_vjp whether it is nonzero.
    rule, flags = eqn.params[_RULES[eqn.primitive.name]], (not is_jvp,) * num
    with rules_kept([eqn]):
        jaxpr, consts, *_ = rule.call_wrapped(*flags)
    if any(isinstance(x, jax.core.Tracer) for x in consts):
        # The values that the rule closes over belong to a trace that may end before JAX differentiates: run it again.
        _forget_outputs(rule)
    return jaxpr


def num_closed_over(eqn: Any) -> int:
    return eqn.params["num_consts"]


def num_unseen(eqn: Any) -> int:
    """Number of the first operands that the rule of a call does not get.

    Where JAX binds a call again, such as one in a rule, what its function closes over become operands like others; the
    wrapper of the rule drops them.
    """

    def dropped(fun: Any) -> int:
        names = fun.__code__.co_freevars if _is_in_jax_source(fun) else ()
        return fun.__closure__[names.index("num_consts")].cell_contents if "num_consts" in names else 0

    rule = eqn.params[_RULES[eqn.primitive.name]]
    return num_closed_over(eqn) + sum(dropped(fun.f) for fun in _wrapped_in(rule))


def results_of_rule(eqn: Any, rule: Jaxpr) -> list[int]:
    """The indices of the outputs of a rule that are the function's results."""
    num = len(eqn.outvars)
    first = 0 if eqn.primitive.name == "custom_jvp_call" else len(rule.outvars) - num
    return list(range(first, first + num))


def with_rule(eqn: Any, edit: Callable[[Jaxpr], Jaxpr], call: Any) -> Any:
    """Edit the rule of a call, and replace its jaxpr for the undifferentiated case by `call`."""
    key = _RULES[eqn.primitive.name]
    rule = eqn.params[key]

    def edited(*flags: bool) -> Any:
        jaxpr, *extra = rule.call_wrapped(*flags)
        return edit(jaxpr), *extra

    changes = {key: _in_place_of(eqn, edited), "call_jaxpr": call}
    return eqn.replace(params={**eqn.params, **changes})


def running_rule() -> str | None:
    """The user's derivative rule that JAX has called here, in messages: its name and place; None if there is none."""
    return _rule_among(frame.f_code for frame, _ in traceback.walk_stack(sys._getframe(1)))


def failed_rule(error: BaseException) -> str | None:
    """The user's derivative rule that raised an error, as `running_rule`."""
    codes = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    return _rule_among(reversed(codes))


def _rule_among(codes: Iterable[CodeType]) -> str | None:
    """The innermost rule; `codes` are of the functions that run, the innermost first."""
    rule = None
    for code in codes:
        if code.co_filename == custom_derivatives.__file__ and rule is not None:
            return f"{rule.co_name} at {rule.co_filename}:{rule.co_firstlineno}"
        rule = None if code.co_filename.startswith(JAX_FOLDER) else code
    return None


def calls_rule(code: CodeType) -> bool:
    """Whether the function that this one calls is a derivative rule of the user's."""
    return code.co_filename == custom_derivatives.__file__ and code.co_name in _CALLERS


_CALLERS = frozenset(["_flatten_fwd", "_flatten_bwd", "_flatten_jvp"])


class RuleGuard(Protocol):
    """Runs the derivative rules of one function, and refuses states and Refs that they touch."""

    def __call__(self, rule: Callable, *args: Any) -> Any:
        """Called in place of ``rule(*args)``."""

    def backward(self, rule: Callable, *args: Any) -> Any:
        """Called in place of ``rule(*args)`` for the backward rule of a ``custom_vjp``."""

    def check_equations(self, jaxpr: Jaxpr, consts: Sequence[Any]) -> None:
        """Called with the equations of a rule."""


def has_rules(jaxpr: Jaxpr) -> bool:
    """Whether a jaxpr calls, at any depth, a function with a custom derivative."""
    return any(map(has_rule, equations_in(jaxpr)))


def has_users_rule(jaxpr: Jaxpr) -> bool:
    """Whether a jaxpr calls, at any depth, a function with a derivative rule that may read anything."""
    return any(
        is_users_rule(eqn) if has_rule(eqn) else loop_with_rules(eqn) or any(map(has_users_rule, inner_jaxprs(eqn)))
        for eqn in jaxpr.eqns
    )


def is_users_rule(eqn: Any) -> bool:
    """Whether the rule of a call is neither JAX's own nor declared to read nothing: see `derivative_rule`."""
    return derivative_rule(eqn.params[_RULES[eqn.primitive.name]]) is None


def with_guarded_rules(x: Any, guard_for: Callable[[str], RuleGuard]) -> Any:
    """Let the users' derivative rules in a jaxpr, closed or not, run through a `RuleGuard`, at any depth.

    Args:
        guard_for: makes the guard for the place of a function that has a rule.
    """
    edited: dict[int, Any] = {}  # by id of a nested jaxpr: JAX's caches go by identity

    def edit(x: Any) -> Any:
        if id(x) not in edited:
            jaxpr, _ = open_jaxpr(x)
            edited[id(x)] = with_equations(x, [of_equation(e) for e in jaxpr.eqns]) if has_users_rule(jaxpr) else x
        return edited[id(x)]

    def of_equation(eqn: Any) -> Any:
        if not has_rule(eqn):
            return map_jaxprs(edit, eqn)
        if not is_users_rule(eqn):
            return eqn
        key = _RULES[eqn.primitive.name]
        guard = guard_for(eqn.params["call_jaxpr"].jaxpr.debug_info.func_src_info)
        changes = {key: _guarded_rule(eqn, guard, guard_for)}
        if "bwd" in eqn.params:
            backward = eqn.params["bwd"]
            run = functools.partial(guard.backward, backward.call_wrapped)
            changes["bwd"] = _lu.wrap_init(run, debug_info=backward.debug_info)
        return eqn.replace(params={**eqn.params, **changes})

    return edit(x)


def _guarded_rule(eqn: Any, guard: RuleGuard, guard_for: Callable[[str], RuleGuard]) -> Any:
    rule = eqn.params[_RULES[eqn.primitive.name]]

    def guarded(*flags: bool) -> Any:
        jaxpr, consts, *extra = guard(rule.call_wrapped, *flags)
        guard.check_equations(jaxpr, consts)
        return with_guarded_rules(jaxpr, guard_for), consts, *extra  # second derivatives run rules in it

    return _in_place_of(eqn, guarded)


def derivative_rule(x: Any) -> tuple[Any, ...] | None:
    """A hashable identity of a custom derivative rule in an equation's parameters; None if it has none.

    JAX wraps the rule again in every trace. Only rules that JAX itself defines are recognized, and those with the
    attribute `reads_nothing`: they read nothing that may change. A user's rule runs when the equation is differentiated
    and may read anything, so two equations with such a rule never compare equal.
    """
    if not isinstance(x, _lu.WrappedFun):
        return None
    inner = x
    while True:  # the memoising thunks around the rule, each a closure over the next
        wrapped = [f for f in _closed_over(inner.f) if isinstance(f, _lu.WrappedFun)]
        if len(wrapped) != 1 or not _is_in_jax_source(
            inner.f
        ):  # `with_rule` edits: its rule differs from the inner one
            break
        inner = wrapped[0]
    rule = inner.f

    if not (_defined_by_jax(rule) or getattr(rule, "reads_nothing", False)):
        return None
    # JAX flattens the rule by transforms with arguments, such as treedefs: equal rules with other arguments are other
    # rules.
    static = tuple(a for _, args in inner.transforms for a in args if not callable(a))
    return (rule, *static)


def _defined_by_jax(fun: Any) -> bool:
    """Whether a function, and every function it closes over, is in JAX's own source."""
    if isinstance(fun, (tuple, list)):
        return all(map(_defined_by_jax, fun))
    if isinstance(fun, jax.custom_jvp):
        return _defined_by_jax(fun.fun)
    if not callable(fun):
        return isinstance(fun, (str, int, float, type(None)))
    while not isinstance(fun, FunctionType) and hasattr(fun, "__wrapped__"):
        fun = fun.__wrapped__  # of jax.jit and similar wrappers
    return _is_in_jax_source(fun) and all(map(_defined_by_jax, _closed_over(fun, 1)))


def _is_in_jax_source(fun: Any) -> bool:
    # Not its __module__, which functools.wraps copies from another function.
    return isinstance(fun, FunctionType) and fun.__code__.co_filename.startswith(JAX_FOLDER)


def _closed_over(fun: Any, depth: int = 3) -> Iterator[Any]:
    if not isinstance(fun, FunctionType) or depth == 0:
        return
    for cell in fun.__closure__ or ():
        try:
            content = cell.cell_contents
        except ValueError:  # an empty cell
            continue
        yield content
        yield from _closed_over(content, depth - 1)


# -- functions that JAX differentiates in reverse mode, below the names that users bind (``from jax import grad``) -----

Replace = Callable[[Callable, bool], Callable]
"""``(fun, has_aux) -> the function to differentiate in its place``. ``fun(*primals)`` takes and returns trees, with
`has_aux` a pair.
"""

_replace: Replace | None = None


def replace_differentiated(replace: Replace) -> None:
    """Let `replace` see each function that `jax.vjp`, and with it `jax.grad`, is called on, in every thread."""
    global _replace
    _replace = replace


_note: Callable[[list[Any]], None] | None = None


def note_differentiated(note: Callable[[list[Any]], None]) -> None:
    """Let `note` see the leaves of the primals of each function that `jax.vjp`, and with it `jax.grad`, is called on,
    in every thread.
    """
    global _note
    _note = note


_linearize = _ad.linearize


@functools.wraps(_linearize)
def _observed(fun: Callable, *args: Any, **options: Any) -> Any:
    # `jax.linearize` calls this function too, without `is_vjp`.
    if options.get("is_vjp"):
        if _note is not None:  # JAX gives one tree, as a `FlatTree`, which is no pytree
            _note([x for arg in args for x in (arg if hasattr(arg, "unflatten") else jax.tree.leaves(arg))])
        if _replace is not None:
            fun = _replace(fun, bool(options.get("has_aux")))
    return _linearize(fun, *args, **options)


patches.replace(
    "jax._src.interpreters.ad.linearize",
    _ad,
    _observed,
    "`statetx.plan` and `statetx.budget` see the functions that `jax.grad` and `jax.vjp` differentiate, and "
    "`statetx.microbatch` the states whose values they differentiate. Elsewhere the function is JAX's own.",
)

# The functions that run a backward pass. The pullback of a deferred call runs where checkify looks into the call.
_BACKWARD = frozenset([f.__code__ for f in (_ad.backward_pass, _ad.backward_pass3, DeferredPullback.__call__)])


def in_backward_pass() -> bool:
    """Whether a backward pass is running: a function that is differentiated now is part of a derivative rule, or has
    been seen.
    """
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code in _BACKWARD:
            return True
        frame = frame.f_back
    return False


def differentiated_function(fun: Callable) -> Callable:
    """The function that the user differentiates, for messages, from the one that JAX does."""
    # `jax.grad` binds the other arguments first, in a closure.
    code = getattr(fun, "__code__", None)
    if code is not None and code.co_name == "f_wrapped" and "f" in code.co_freevars:
        fun = fun.__closure__[code.co_freevars.index("f")].cell_contents  # type: ignore[index]
    return getattr(fun, "user_function", fun)
