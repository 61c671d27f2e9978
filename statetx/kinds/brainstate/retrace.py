"""Functions that brainstate has traced are traced again where plans and reports rewrite what they differentiate.

`jax.jit` does so for a user context. ``brainstate.transform.jit`` keeps the programs that it has traced itself, by the
types of the arguments.
"""

from __future__ import annotations

from typing import Any

import brainstate

from ... import _jax


def install() -> None:
    """Make `_jax.cache_key_context` a part of the keys of brainstate's traced functions."""
    cls: Any = brainstate.transform.StatefulFunction
    key_of_arguments = cls.get_arg_cache_key

    def get_arg_cache_key(self: Any, *args: Any, compile_if_miss: bool = False, **kwargs: Any) -> Any:
        setting = _jax.cache_key_context.value
        if setting is None:
            return key_of_arguments(self, *args, compile_if_miss=compile_if_miss, **kwargs)
        if compile_if_miss:
            # It asks for the key, and traces the function unless that has been done for this key.
            self.make_jaxpr(*args, **kwargs)
        key = key_of_arguments(self, *args, **kwargs)
        return key._replace(static_args=(key.static_args, setting))

    _jax.patches.replace(
        "brainstate.transform.StatefulFunction.get_arg_cache_key",
        cls,
        get_arg_cache_key,
        "A function that brainstate has traced is traced again while a plan, a budget or a report of statetx "
        "rewrites what it differentiates.",
    )
