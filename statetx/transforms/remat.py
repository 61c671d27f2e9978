"""`remat`: functions with states that are recomputed in the backward pass, in the place of storing."""

from __future__ import annotations

import contextlib
import functools
import inspect
import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from .. import _jax, _states
from .._equations.structure import Body, table
from .._errors import StateAccessError
from .._lift.late_rules import guarded
from .._lift.options import broadcast_prefix, keeps_type, transform
from .._lift.outcome import pack
from .._lift.run import frame_for, run_eagerly
from .._lift.signature import StaticArguments
from .._lift.stage import InputNames, stage
from .._lift.wrapper import (
    Wrapper,
    as_decorator,
    has_twins,
    is_object,
    make_subclass,
    name_of,
    short_name,
    subclass_for,
    twin,
)
from .._objects.paths import Paths, as_predicate
from .._remat import decide
from .._remat import fence as _fence
from .._remat.atoms import States, nothing, without_objects
from .._remat.override import override
from .._remat.parse import as_policy, check_fence, check_formats, check_prevent_cse, refuse_formats, refuse_policy
from .._remat.policy import Policy as PolicyValue
from .._remat.policy import StateRef
from .._remat.rewriter import Rewriter
from .._remat.stored import StoredType
from .._states import Kind
from .._text import brief, suggestion, type_str
from .._tree import as_array, as_value, freeze, is_array, partition
from .._typing import Filter, Indices, Names, Policy

T = TypeVar("T")


_TORCH = "an option of torch.utils.checkpoint; leave it out: "
_HINTS = {
    "concrete": "JAX has removed it, too; name the arguments that must stay concrete in static_argnums= or "
    "static_argnames=, and use jax.ensure_compile_time_eval() on them in the body",
    "use_reentrant": f"{_TORCH}there is one implementation",
    "preserve_rng_state": f"{_TORCH}a recomputation always sees the same random draws",
    "determinism_check": f"{_TORCH}a recomputation runs the same equations",
    "context_fn": f"{_TORCH}policy= chooses the values to save",
    "early_stop": f"{_TORCH}the compiler removes what the gradient does not need",
    "debug": f"{_TORCH}statetx.saved_residuals shows what is saved",
}


@keeps_type
@transform(_HINTS, " torch.utils.checkpoint runs the function at once; this returns a function.")
def remat(
    fun: Callable[..., Any] | None = None,
    *,
    policy: Policy = None,
    inputs_stored_as: str | Sequence[Any] | None = None,
    prevent_cse: bool | Sequence[bool] | str = "auto",
    fence: str | None = "auto",
    static_argnums: Indices = (),
    static_argnames: Names = (),
    states: Filter = True,
    methods: Names | None = None,
) -> Callable[..., Any]:
    """Rematerialize a function: under differentiation, save its inputs only and recompute the rest.

    Also called gradient or activation checkpointing. The function may read and write states. Outputs, final values of
    states, gradients of every order and random draws are the same as without; each state is written once and each key
    advances once, however often the body is recomputed. Use it on the blocks of a deep model, or on chunks of a long
    loop. Around a whole loss it saves no memory, since all of the loss is then recomputed at once.

    Works as ``@remat``, ``@remat(policy=...)`` and ``remat(f)``, on functions, methods in a class body, bound
    methods, callable objects, partials, lambdas and classes, above or below ``@staticmethod``, ``@classmethod``,
    ``@property``, ``@cached_property`` and ``functools.partialmethod``. If nothing is traced, ``remat(f)(x)``
    runs ``f(x)``.

    Args:
        fun: the function to rematerialize. For a class, returns a subclass whose `methods` are rematerialized.
        policy: the values to save besides the inputs: None (no others), one of `statetx.policies`, a member of
            ``jax.checkpoint_policies``, the name of either, or any callable policy as in JAX. A callable must be
            hashable and always give the same answer: as in ``jax.checkpoint``, its answer may be cached. Or a plan for
            the whole function: a `statetx.Plan`, or ``"fit:2GiB"`` to make a plan for a budget.
        inputs_stored_as: the format of the stored arguments between forward and backward pass: ``"bits"``, if all are
            0 or 1 (spikes, masks), ``"bfloat16"``, ``"float8_e4m3fn"`` or ``"float8_e5m2"``; see
            `Policy.stored_as`. Or a tuple prefix of the (non-static) arguments with a format or None for each. None
            stores them unchanged.
        prevent_cse: whether to keep the compiler from merging the recomputation with the forward pass. A bool, or
            a tuple prefix of the (non-static) arguments as in ``jax.checkpoint``. ``"auto"`` is False directly inside
            the body of a loop, where merging cannot happen, and True elsewhere.
        fence: the way to prevent this merging. ``"barrier"``: as JAX does; XLA before jaxlib 0.11.1 removes the barrier
            on CPUs before it eliminates common subexpressions. ``"cond"``: compute the backward pass of the function in
            a branch that depends on its cotangents; effective on every backend. ``"auto"``: the branch on CPUs, where
            newer ones start independent recomputations early, else the barrier, behind which on GPUs the arrays that
            loops fill wait, too. None: do not prevent it.
        static_argnums: positions of arguments to pass unchanged, counted as you call the function (``self`` is 0
            in a class body); negative ones count from the end. Python values other than arrays always pass
            unchanged, so a training flag needs no declaration; declare an *array* static to keep it concrete.
        static_argnames: the same by name. Either finds the argument by position, keyword or default.
        states: a filter for the states that the function may touch; touching another raises. A ``jax.Ref`` is checked
            only if something is traced: eager reads and writes of Refs cannot be observed.
        methods: for a class, the names of the methods to rematerialize; by default ``"__call__"``.

    Returns:
        A callable with the signature, name and docstring of `fun`. For a callable object, such as a module of
        brainstate, flax or equinox, an instance of a subclass of its class that shares its ``__dict__``: an attribute
        set on one is set on both, and the object's library treats it like the object and finds the states inside.
        Objects that hold more than a ``__dict__`` (slots) get a function that reads and writes their attributes.

    State:
        Reads and writes the same states as `fun`. Values read are inputs of the rematerialized region, values written
        are its outputs. A call that fails is undone, in eager code, too, at a cost of about two JAX operations.

    Memory:
        Between forward and backward pass, the inputs of the region that are not saved otherwise: its array arguments,
        the state values that it reads and the arrays that it closes over; plus the values that `policy` saves.
        Arguments stored as bits take a bit for each entry, once the values themselves are needed by nothing else.

    Raises:
        StaticArgumentError: a position or name that the function does not have.
        PolicyError: not a policy, or it names a value that does not occur in the function, or it is a plan beside
            `inputs_stored_as`.
        StateAccessError: a state that `states` excludes was touched.
        EffectError: the function calls ``jax.experimental.io_callback``.
        TraceLeakError: the function changes a variable that a running call of haiku or flax.linen holds, which is no
            state; ``hk.remat`` and ``nn.remat`` carry them.

    Callbacks:
        ``jax.debug.print`` and ``jax.debug.callback`` fire again in the recomputation, unless `policy` saves the values
        that they show. To fire once, write the value to a state, which happens once, and call them outside the
        function: ``seen.value = x.mean()`` in it, ``jax.debug.print("{}", seen.value)`` after it.

    Source:
        Griewank and Walther, Evaluating Derivatives (2008), chapter 12; ``jax.checkpoint``.

    Example:
        >>> import jax, jax.numpy as jnp, statetx
        >>> class Block:
        ...     def __init__(self):
        ...         self.w = statetx.Param(jnp.eye(2))
        ...         self.calls = statetx.State(0)
        ...
        ...     @statetx.remat
        ...     def __call__(self, x, training=True):
        ...         self.calls.value += 1
        ...         return jnp.tanh(self.w.value @ x) if training else x
        >>> block = Block()
        >>> loss = lambda x: block(x, training=True).sum()
        >>> statetx.grad(loss)(jnp.zeros(2))
        Array([1., 1.], dtype=float32)
        >>> block.calls.value
        1
    """
    ...


checkpoint = remat


class Remat(Wrapper, made_by=remat):
    """A rematerialized function; made by `remat`."""

    @classmethod
    def make(cls, fun: Any, options: dict[str, Any]) -> Any:
        if fun is None:
            return functools.partial(cls.make, options=options)
        refuse_policy(fun)
        methods = options["methods"]
        options = options | {"methods": None}
        if inspect.isclass(fun):
            return _remat_class(fun, ("__call__",) if methods is None else methods, options)
        if methods is not None:
            raise TypeError(f"remat: methods= is for classes, but {name_of(fun)} is a {type(fun).__name__}.")
        return _remat_object(fun, options) if is_object(fun) else as_decorator(cls, fun, options)

    def __init__(self, fun: Callable, **options_given: Any):
        super().__init__(fun, **options_given)
        options = self._options
        self._policy = as_policy(options["policy"])
        self._inputs_stored_as = check_formats(options["inputs_stored_as"])
        if isinstance(self._policy, Rewriter):
            refuse_formats(self._policy, self._inputs_stored_as)
        self._prevent_cse, self._fence = check_fence(check_prevent_cse(options["prevent_cse"]), options["fence"])
        self._static = StaticArguments(fun, options["static_argnums"], options["static_argnames"])
        self._allowed = None if options["states"] is True else as_predicate(options["states"])

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        fun = self.__wrapped__
        if _jax.is_eager():  # nothing is differentiated: run the function, and undo its writes if it fails
            return run_eagerly(f"remat({name_of(fun)})", fun, args, kwargs, allow=self._guard(args, kwargs))
        is_visited = override.visited_regions is not None  # the planner, or a report, tries something
        if is_visited and override.is_off:
            return fun(*args, **kwargs)
        policy = override.policy if is_visited and override.policy is not None else self._policy
        dyn_args, dyn_kwargs, merge = self._static.split(args, kwargs)
        arrays, args_part = partition((dyn_args, dyn_kwargs))
        arrays = [as_array(x) for x in arrays]

        operand_origins, on_read, policies = None, None, contextlib.nullcontext()
        if isinstance(policy, Rewriter):
            on_read = _OwnValues().on_read
            # What rewrites the whole function sees its inner regions with the policy `nothing`, whatever their own.
            policies = override.replacing(nothing, policy.inner)
        elif policy.needs_states:
            operand_origins = _OperandOrigins(policy, Paths(fun, args, kwargs))
            on_read = operand_origins.on_read
        guard = self._guard(args, kwargs)

        def read(ref: Any, kind: Kind) -> Any:
            if guard is not None:
                guard(ref, kind)
            value = kind.get(ref)
            return on_read(ref, kind, value) if on_read else value

        def arguments(leaves: Sequence[Any]) -> tuple[tuple, dict[str, Any]]:
            return merge(*args_part.combine(leaves))

        frame = frame_for("remat", fun, on_read=on_read, allow=guard)

        def body(*tracers: Any) -> tuple[list, Any]:
            call_args, call_kwargs = arguments(tracers)
            out = frame.run(fun, *call_args, **call_kwargs)
            return pack(out, frame.effects)

        avals = [_jax.abstract(x) for x in arrays]
        names = InputNames(fun, arguments)
        with policies:
            staged, outcome, refs = stage(body, avals, traced_for="statetx.remat", names=names, read=read)
        outcome.add(refs)
        staged = guarded(frame.name, staged, [(access.state, access.kind) for access in frame.accesses.values()])
        if not (isinstance(self._policy, Rewriter) and self._policy.is_used_once):
            decide.refuse_effects(staged.jaxpr, f"remat({name_of(fun)})")

        prevent_cse = self._resolve_prevent_cse(dyn_args, dyn_kwargs, args_part.mask)
        formats = self._resolve_formats(dyn_args, dyn_kwargs, args_part.mask)
        origins = operand_origins.origins(staged.operands) if operand_origins else ()
        region = self._region(staged, policy, prevent_cse, formats, origins, outcome.num_out)
        with jax.named_scope(short_name(name_of(fun))):
            outs = region(staged.operands, *arrays)
        # A constant output comes back in the form that it had while tracing, which may not be a `jax.Array`.
        return outcome.finish([as_value(x) for x in outs])

    def _region(
        self,
        staged: Body,
        policy: PolicyValue | Rewriter,
        prevent_cse: bool | tuple[bool, ...],
        formats: tuple[StoredType | None, ...],
        origins: Sequence[frozenset[StateRef]],
        num_out: int,
    ) -> Callable:
        name, fence = name_of(self.__wrapped__), self._fence if prevent_cse is True else None
        num_out = num_out if isinstance(policy, Rewriter) else 0
        is_visited = override.visited_regions is not None
        if is_visited:
            override.note(name, policy, staged.jaxpr, origins, prevent_cse)
        elif not isinstance(policy, Rewriter):
            policy, origins = without_objects(policy, origins)

        def build(body: Body) -> Callable:
            if isinstance(policy, Rewriter):
                return policy.rewrite(body, name, num_out)
            options = {"inputs_stored_as": formats, "is_ordered": fence is not None}
            jaxpr, saved_policy = decide.apply(policy, body.jaxpr, origins, name, **options)
            jax_policy = _fence.with_fence(saved_policy, fence)

            def rematerialized(operands: Sequence[Any], *args: Any) -> list[Any]:
                # As in jax.checkpoint, a tuple does not cover closed-over values: no barrier for them.
                cse = (*[False] * len(operands), *prevent_cse) if isinstance(prevent_cse, tuple) else prevent_cse
                return _jax.rematerialize(jaxpr, [*operands, *args], policy=jax_policy, prevent_cse=cse)

            return rematerialized

        if is_visited or (isinstance(policy, Rewriter) and policy.is_used_once):
            return build(staged)
        # JAX caches by identity of functions: equal equations get one function (decision 1).
        use = ("remat", policy, prevent_cse, fence, formats, origins, num_out)
        return table.get(staged, use, build)

    def _resolve_prevent_cse(self, args: tuple, kwargs: dict, mask: Sequence[bool]) -> bool | tuple[bool, ...]:
        if self._prevent_cse == "auto":
            return not _jax.in_loop_body()
        if isinstance(self._prevent_cse, bool):
            return self._prevent_cse
        return self._for_arguments("prevent_cse", self._prevent_cse, args, kwargs, mask)

    def _resolve_formats(self, args: tuple, kwargs: dict, mask: Sequence[bool]) -> tuple[StoredType | None, ...]:
        formats = self._inputs_stored_as
        if formats is None:
            return ()
        if isinstance(formats, StoredType):
            return (formats,) * sum(mask)
        return self._for_arguments("inputs_stored_as", formats, args, kwargs, mask)

    def _for_arguments(self, option: str, prefix: Any, args: tuple, kwargs: dict, mask: Sequence[bool]) -> tuple:
        """The entries of a tuple prefix of the arguments, one for each array."""
        entries = broadcast_prefix(
            f"remat({name_of(self.__wrapped__)})",
            option,
            prefix,
            (args, kwargs) if kwargs else args,
            what=f"{len(args)} arguments that are not static (a method's self counts)",
            entry="an entry",
            is_leaf=lambda x: x is None,
        )
        return tuple(x for x, is_dynamic in zip(entries, mask, strict=True) if is_dynamic)

    def _guard(self, args: tuple, kwargs: dict[str, Any]) -> Callable[[Any, Any], None] | None:
        if self._allowed is None:
            return None
        allowed, paths = self._allowed, Paths(self.__wrapped__, args, kwargs)

        def guard(state: Any, kind: Any) -> None:
            path = paths(state)
            if not allowed(path, state):
                raise StateAccessError(
                    f"remat({name_of(self.__wrapped__)}) touched {_states.describe(state, kind, path)}, which its "
                    f"filter states={brief(self._options['states'])} excludes.\n"
                    f"Fix: add the state to the filter, or do not touch it in this function."
                )

        return guard


class _OperandOrigins:
    """The provenance of closed-over values: records the states that they are read from, for policies that need it."""

    def __init__(self, policy: PolicyValue, paths: Paths):
        self._atoms = [atom for atom in policy.atoms() if isinstance(atom, States)]
        self._paths = paths
        # By id of the value, which the entry keeps alive.
        self._entries: dict[int, tuple[Any, frozenset[StateRef]]] = {}

    def on_read(self, state: Any, kind: Any, value: Any) -> Any:
        path = self._paths(state)
        origin = StateRef(path, frozenset(atom for atom in self._atoms if atom.selects(path, state)))
        for leaf in jax.tree.leaves(value):
            _, origins = self._entries.get(id(leaf), (leaf, frozenset()))
            self._entries[id(leaf)] = (leaf, origins | {origin})
        return value

    def origins(self, operands: Sequence[Any]) -> tuple[frozenset[StateRef], ...]:
        entries = [self._entries.get(id(x)) for x in operands]
        return tuple(frozenset() if entry is None else entry[1] for entry in entries)


class _OwnValues:
    """Gives each state a value of its own, as in a plan's program: JAX would make one operand of an array in two
    states.
    """

    def __init__(self) -> None:
        self._trace = _jax.current_trace()
        self._read: dict[int, Any] = {}  # by id of the array, which the entry keeps alive

    def on_read(self, state: Any, kind: Any, value: Any) -> Any:
        leaves, part = partition(value)
        copies = list(leaves)
        with _jax.in_trace(self._trace):
            for n, x in enumerate(leaves):
                if id(x) in self._read:
                    copies[n] = jnp.copy(x)
                self._read[id(x)] = x
        return value if all(map(operator.is_, copies, leaves)) else part.combine(copies)


def _remat_class(cls: type, methods: Names, options: dict[str, Any]) -> type:
    names = (methods,) if isinstance(methods, str) else tuple(methods)
    wrapped_methods = {}
    for name in names:
        if not callable(getattr(cls, name, None)):
            hint = suggestion(name, dir(cls))
            raise TypeError(f"remat: the class {cls.__qualname__} has no method {name!r}.{hint} Name one in methods=.")
        wrapped_methods[name] = as_decorator(Remat, inspect.getattr_static(cls, name), options)
    return make_subclass(cls, wrapped_methods, _remat_class, cls, names, options)


# -- objects ---------------------------------------------------------------------------------------------------


def _remat_object(obj: Any, options: dict[str, Any]) -> Any:
    """The twin of an object, with a rematerialized ``__call__``; a wrapper function if no twin is possible."""
    if has_twins(type(obj)):
        # TypeError: the class allows no subclasses, or an option is wrong, which raises again below.
        with contextlib.suppress(TypeError):
            return twin(obj, _class_of_objects(type(obj), options))
    return as_decorator(Remat, obj, options)


def _class_of_objects(cls: type, options: dict[str, Any]) -> type:
    def make() -> type:
        return make_subclass(cls, {"__call__": _ObjectCall(cls, options)}, _class_of_objects, cls, options)

    return subclass_for(cls, ("remat", freeze(options)), make)


class _ObjectCall(Wrapper):
    """The ``__call__`` of rematerialized objects: `self` is closed over, so that argument positions do not count it."""

    maker, defaults = remat, Remat.defaults

    def __init__(self, cls: type, options: dict[str, Any]):
        function = inspect.getattr_static(cls, "__call__")
        super().__init__(function, **options)
        self._template = as_decorator(Remat, self._bind(object.__new__(cls)), options)

    def _bind(self, instance: Any) -> Callable:
        return self.__wrapped__.__get__(instance, type(instance))

    def __call__(self, instance: Any, /, *args: Any, **kwargs: Any) -> Any:
        # A copy of the template with this instance's method, in place of a new `Remat` with its checks in every call.
        bound = object.__new__(Remat)
        vars(bound).update(vars(self._template), __wrapped__=self._bind(instance))
        return bound(*args, **kwargs)


def checkpoint_name(x: T, name: str) -> T:
    """Give a value a name for policies to select, as ``jax.ad_checkpoint.checkpoint_name`` does.

    Args:
        x: an array or a pytree of arrays; other leaves pass untouched, but a state raises: give its value.
        name: the name for ``jax.checkpoint_policies.save_only_these_names`` and other policies by name.

    Returns:
        `x`, unchanged in value, structure, shape and dtype.

    Example:
        >>> import jax, jax.numpy as jnp, statetx
        >>> keep = jax.checkpoint_policies.save_only_these_names("hidden")
        >>> @statetx.remat(policy=keep)
        ... def f(x):
        ...     return jnp.sin(statetx.checkpoint_name(jnp.cos(x), "hidden"))
        >>> round(float(statetx.grad(f)(1.0)), 3)
        -0.722
    """
    if not isinstance(name, str):
        got = type_str(name) if is_array(name) else f"{type(name).__name__}: {brief(name)}"
        raise TypeError(
            f"checkpoint_name needs a string as the name, after the value: checkpoint_name(x, 'name'). Got {got}."
        )
    arrays, part = partition(x)
    _states.refuse_states("checkpoint_name: the value", *part.static)
    return part.combine([_jax.named(as_array(a), name) for a in arrays])
