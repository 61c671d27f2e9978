"""States of every library with one interface, `value`; functions that run in threads of their own."""

import threading

import brainstate
import jax
from flax import nnx

import statetx


class Variable(nnx.Variable):
    value = property(nnx.Variable.get_value, nnx.Variable.set_value)


class Ref:
    """A `jax.Ref` with the interface of a state."""

    def __init__(self, value):
        self.ref = jax.new_ref(value)

    value = property(lambda self: self.ref[...], lambda self, value: self.ref.__setitem__(..., value))


KINDS = {"State": statetx.State, "brainstate": brainstate.ShortTermState, "nnx": Variable, "Ref": Ref}


def in_thread(*functions):
    """Run each function in its own thread; re-raise an exception of one of them."""
    errors = []

    def run(fun):
        try:
            fun()
        except BaseException as e:
            errors.append(e)

    threads = [threading.Thread(target=run, args=(f,)) for f in functions]
    for t in threads:
        t.start()
    for t in threads:
        t.join(120)
        assert not t.is_alive()
    if errors:
        raise errors[0]
