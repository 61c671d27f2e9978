"""Replacements for names of each library: statetx's own functions, or the code of a migration guide."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax.tree as jax_tree

import statetx

TRANSFORMS = "jit grad value_and_grad vjp jvp linearize jacfwd jacrev hessian vmap eval_shape make_jaxpr".split()
LOOPS = "scan cond switch while_loop fori_loop map".split()


def jax_remat() -> dict[str, Callable]:
    """Rematerialization alone, under JAX's own transforms."""
    return {"jax.remat": statetx.remat, "jax.checkpoint": statetx.checkpoint}


def jax() -> dict[str, Callable]:
    """Every transform that has JAX's name."""
    swaps = {f"jax.{name}": getattr(statetx, name) for name in (*TRANSFORMS, "remat", "checkpoint", "shard_map")}
    swaps |= {f"jax._src.api.{name}": getattr(statetx, name) for name in TRANSFORMS}
    return swaps | {f"jax.lax.{name}": getattr(statetx, name) for name in LOOPS}


def nnx() -> dict[str, Callable]:
    """Transforms that take modules as arguments; those that map or scan over their Variables are spelled otherwise
    here.
    """
    names = "jit remat cond switch while_loop fori_loop eval_shape make_jaxpr".split()
    swaps = {name: without(("graph", "graph_updates"), getattr(statetx, name)) for name in names}
    swaps |= {"grad": nnx_grad, "value_and_grad": functools.partial(nnx_grad, transform=statetx.value_and_grad)}
    return {f"flax.nnx.{name}": fun for name, fun in swaps.items()}


def without(options: tuple[str, ...], fun: Callable) -> Callable:
    """A function that ignores some options of the other library."""

    @functools.wraps(fun)
    def call(*args: Any, **kwargs: Any) -> Any:
        return fun(*args, **{name: value for name, value in kwargs.items() if name not in options})

    return call


def nnx_grad(f: Callable | None = None, *, argnums: Any = 0, transform: Callable = statetx.grad, **options: Any) -> Any:
    """With `graph_updates`, gradients of the Params of arguments that are modules, in Variables as `nnx.Optimizer`
    wants them.
    """
    from flax import nnx

    if f is None:
        return functools.partial(nnx_grad, argnums=argnums, transform=transform, **options)
    options.pop("graph", None)
    if not options.pop("graph_updates", False):
        return transform(f, argnums, **options)

    def select(args: tuple, chosen: Any) -> Any:
        number, filter = (chosen, nnx.Param) if isinstance(chosen, int) else (chosen.argnum, chosen.filter)
        return args[number] if isinstance(args[number], nnx.Variable) else nnx.state(args[number], filter)

    @functools.wraps(f)
    def differentiated(*args: Any, **kwargs: Any) -> Any:
        if isinstance(argnums, int) and not nnx.graphlib.is_graph_node(args[argnums]):
            return transform(f, argnums, **options)(*args, **kwargs)
        wrt = jax_tree.map(functools.partial(select, args), argnums)
        return transform(f, wrt=wrt, **options)(*args, **kwargs)

    return differentiated


def brainstate() -> dict[str, Callable]:
    """The names of `brainstate.transform` that its migration guide replaces."""
    names = "jit cond switch while_loop eval_shape remat checkpoint jvp".split()
    swaps = {name: getattr(statetx, name) for name in names}
    swaps |= {name: brainstate_derivative(getattr(statetx, name)) for name in ("jacfwd", "jacrev", "hessian")}
    swaps |= {"grad": brainstate_derivative(statetx.grad), "vjp": brainstate_vjp}
    swaps |= {"scan": brainstate_scan, "checkpointed_scan": brainstate_scan}
    swaps |= {"for_loop": brainstate_for_loop, "checkpointed_for_loop": brainstate_for_loop}
    swaps |= {"bounded_while_loop": brainstate_while_loop}
    return {f"brainstate.transform.{name}": fun for name, fun in swaps.items()}


def brainstate_derivative(transform: Callable) -> Callable:
    """``grad(f, states, argnums, return_value=True)(x)``, which gives the gradients first, then the value."""

    def derivative(
        fun: Any = None,
        grad_states: Any = None,
        argnums: Any = None,
        return_value: bool = False,
        check_states: bool = True,
        **options: Any,
    ) -> Any:
        if fun is None:
            return lambda fun: derivative(fun, grad_states, argnums, return_value, **options)
        options |= {"has_aux": bool(options.get("has_aux")), "wrt": grad_states}
        if transform is statetx.grad and return_value:

            @functools.wraps(fun)
            def with_value(*args: Any, **kwargs: Any) -> Any:
                out, grads = statetx.value_and_grad(fun, argnums, **options)(*args, **kwargs)
                return (grads, *out) if options["has_aux"] else (grads, out)

            return with_value
        return transform(fun, argnums, **options, **({"return_value": True} if return_value else {}))

    return derivative


def brainstate_vjp(
    fun: Callable, *primals: Any, grad_states: Any = None, argnums: Any = 0, has_aux: bool = False
) -> tuple:
    """`statetx.vjp`, whose pullback has a cotangent for each primal, not only for those at `argnums`."""
    out, pullback, *aux = statetx.vjp(fun, *primals, wrt=grad_states, has_aux=has_aux)

    def pull(cotangent: Any) -> Any:
        of_states, of_primals = pullback(cotangent) if grad_states is not None else (None, pullback(cotangent))
        if argnums is None or not primals:
            return of_states
        chosen = of_primals[argnums] if isinstance(argnums, int) else tuple(of_primals[n] for n in argnums)
        return chosen if grad_states is None else (of_states, chosen)

    return (out, pull, *aux)


def brainstate_scan(
    f: Callable, init: Any, xs: Any = None, *, pbar: Any = None, base: int | None = None, **options: Any
) -> Any:
    checkpoint = None if base is None else statetx.policies.Levels(2)
    return statetx.scan(f, init, xs, checkpoint=checkpoint, progress=pbar is not None, **options)


def brainstate_for_loop(f: Callable, *xs: Any, **options: Any) -> Any:
    return brainstate_scan(lambda _, x: (None, f(*x)), None, xs, **options)[1]


def brainstate_while_loop(
    cond_fun: Callable, body_fun: Callable, init_val: Any, *, max_steps: int, base: int = 16
) -> Any:
    return statetx.while_loop(cond_fun, body_fun, init_val, max_steps=max_steps, checkpoint=base)
