"""A user's module for the tests of the command line."""

import sys

import jax
import jax.numpy as jnp

import statetx

ARGV = list(sys.argv)  # as a script that reads options would see them


class Block:
    def __init__(self, key=0):
        self.w = statetx.Param(jax.random.normal(jax.random.key(key), (64, 256)) / 8)
        self.v = statetx.Param(jax.random.normal(jax.random.key(key + 1), (256, 64)) / 16)

    def __call__(self, x):
        return x + jnp.tanh(jnp.sin(x @ self.w.value) @ self.v.value)


class Model:
    def __init__(self, depth=4):
        self.blocks = [Block(k) for k in range(depth)]

    def loss(self, x):
        for block in self.blocks:
            x = block(x)
        return (x**2).mean()

    @staticmethod
    def size(x):
        return (x**2).sum()


class Sized:
    def __init__(self, width):
        self.width = width

    def loss(self, x):
        return x.sum()


model = Model()
answer = 42


def loss(w, x, *, batch=None):
    h = jnp.sin(x @ w)
    if batch is not None:
        h = h * batch["scale"]
    return jnp.tanh(h).sum()


def broken(x):
    return x @ jnp.ones((3, 5))


def make():
    return model.loss, (jax.ShapeDtypeStruct((128, 64), jnp.float32),)


def make_with_keywords():
    w, x = jax.ShapeDtypeStruct((8, 4), jnp.float32), jax.ShapeDtypeStruct((2, 8), jnp.float32)
    return loss, [w, x], {"batch": {"scale": jax.ShapeDtypeStruct((), jnp.float32)}}


def make_function():
    return Model(2).loss


def make_step(rate=0.1):
    def step(x):
        gradient = statetx.grad(model.loss, wrt=statetx.Param)(x)
        for block, g in zip(model.blocks, gradient.values(), strict=False):
            block.w.value = block.w.value - rate * jnp.mean(g)

    return step, (jax.ShapeDtypeStruct((128, 64), jnp.float32),)


def make_wrong_step():
    return make_step(0.11)


def make_number():
    return 3


def make_failing():
    raise ZeroDivisionError("in the factory")
