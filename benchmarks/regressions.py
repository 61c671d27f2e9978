"""Memory regressions: are planted ones named by owner and line, and does nothing else raise an alarm?

``python benchmarks/regressions.py planted [NAME ...] [--out results.json]`` edits one line of a program, as a person
would, and compares the program with the record of the one before (`statetx.testing.assert_memory`): the edit is found
if one of the first lines of the message names the owner and a line that is expected.

``python benchmarks/regressions.py record FILE`` compiles programs that nobody changed: those of ``advised.py``,
unchanged and changed by hand, at two sizes; with ``--drawn N`` in their place N small ones, drawn from blocks, loops,
policies and steps. ``... compare FILE [FILE ...] [--out results.json]`` compares such records of other processes
(another PYTHONHASHSEED) and versions of JAX: any difference between two of one version is a false alarm. Nothing runs
on a device.
"""

import argparse
import importlib.util
import json
import os
import pathlib
import random
import re
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import advised
import jax
import jax.numpy as jnp
from advised import conv, f32, norm, wave

import statetx
from statetx import policies
from statetx.memory.baseline import Difference, MemoryBaseline, key_of, load, save

LAYERS = """
import jax, jax.numpy as jnp, numpy as np, statetx
from jax.ad_checkpoint import checkpoint_name as name
from statetx import policies

WIDTH, BATCH, NUM, PARTS = 64, 512, 8, 4
POLICY = jax.checkpoint_policies.save_anything_except_these_names("hidden", "gate")
f32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)


def block(p, x):
    h = name(jnp.sin(x @ p["up"]), "hidden")
    g = name(jnp.tanh(h * jnp.cos(h)), "gate")
    return x + g @ p["down"]

layer = statetx.remat(block)
kept = statetx.remat(block, policy=POLICY)

def loss(params, x):
    for p in params:
        x = layer(p, x)
    return (x**2).mean()

def step(params, moments, x):
    grads = jax.grad(loss)(params, x)
    moments = jax.tree.map(lambda m, g: 0.9 * m + g, moments, grads)
    params = jax.tree.map(lambda p, m: p - 0.1 * m, params, moments)
    return params, moments

def accumulated(params, x):
    grads = jax.grad(statetx.microbatch(loss, PARTS, argnums=1))(params, x)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

PARAMS = [{"up": f32(WIDTH, WIDTH), "down": f32(WIDTH, WIDTH)}] * NUM
train = jax.jit(step, donate_argnames=("params", "moments"))
def main(): return loss, (PARAMS, f32(BATCH, WIDTH))
def training(): return train, (PARAMS, PARAMS, f32(BATCH, WIDTH))
def parts(): return accumulated, (PARAMS, f32(BATCH, WIDTH))
"""

HALVES = """
import jax, jax.numpy as jnp, statetx
from jax.ad_checkpoint import checkpoint_name as name

f32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)

@statetx.remat(policy=statetx.policies.names("gate"))
def block(p, x):
    h = jnp.sin(x @ p["up"])
    g = name(jnp.tanh(h * jnp.cos(h)).astype(jnp.bfloat16), "gate")
    return x + jnp.sin(g.astype(jnp.float32)) @ p["down"]

def loss(params, x):
    for p in params:
        x = block(p, x)
    return (x**2).mean()

def main(): return loss, ([{"up": f32(32, 128), "down": f32(128, 32)}] * 6, f32(512, 32))
"""

LANGUAGE = """
import jax, jax.numpy as jnp, statetx

WIDTH, LENGTH, WORDS, BATCH = 32, 64, 1024, 8
f32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)

@statetx.remat
def attention(p, x):
    q, k, v = (jnp.einsum("btd,dhe->bhte", x, p[name]) for name in "qkv")
    scores = q @ k.swapaxes(-1, -2) / 3.0
    mask = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))
    weights = jax.nn.softmax(jnp.where(mask, scores, -1e9))
    return x + jnp.einsum("bhte,hed->btd", weights @ v, p["o"])

def loss(params, tokens, targets):
    x = params["embed"].astype(jnp.bfloat16)[tokens]
    for p in params["layers"]:
        x = attention(jax.tree.map(lambda w: w.astype(jnp.bfloat16), p), x)
    logits = x @ params["embed"].astype(jnp.bfloat16).T
    picked = jnp.take_along_axis(logits, targets[..., None], -1)[..., 0]
    return (jax.nn.logsumexp(logits, -1) - picked).mean().astype(jnp.float32)

LAYER = {name: f32(WIDTH, 4, 8) for name in "qkv"} | {"o": f32(4, 8, WIDTH)}
PARAMS = {"embed": f32(WORDS, WIDTH), "layers": [LAYER] * 4}
TOKENS = jax.ShapeDtypeStruct((BATCH, LENGTH), jnp.int32)
def main(): return loss, (PARAMS, TOKENS, TOKENS)
"""

LOOP = """
import jax, jax.numpy as jnp, statetx
from statetx import policies

STEPS, UNITS, BATCH = 200, 32, 16
f32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)

def cell(w, h, x):
    for _ in range(3):
        h = jnp.tanh(jnp.sin(h @ w) + x)
    return h

def loss(w, xs):
    def body(h, x):
        h = cell(w, h, x)
        return h, h.mean()
    h, ys = statetx.scan(body, jnp.zeros((BATCH, UNITS)), xs, checkpoint=policies.Slots(10))
    return (ys**2).mean()

def simple(w, xs):
    def body(h, x):
        return cell(w, h, x), None
    h, _ = statetx.scan(statetx.remat(body), jnp.zeros((BATCH, UNITS)), xs)
    return (h**2).mean()

def main(): return loss, (f32(UNITS, UNITS), f32(STEPS, BATCH, UNITS))
def plain(): return simple, (f32(UNITS, UNITS), f32(STEPS, BATCH, UNITS))
"""

STATES = """
import jax, jax.numpy as jnp, statetx

class Block:
    def __init__(self, seed):
        self.w = statetx.Param(jax.random.normal(jax.random.key(seed), (64, 64)) / 8)
        self.mean = statetx.State(jnp.zeros(64))
    @statetx.remat
    def __call__(self, x):
        h = jnp.sin(jnp.tanh(x @ self.w.value))
        self.mean.value = 0.9 * self.mean.value + 0.1 * x.mean(0)
        return x + h * jnp.cos(h)

class Model:
    def __init__(self):
        self.blocks = [Block(n) for n in range(6)]
    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x

model = Model()
large = statetx.Param(jnp.zeros((512, 512)))

def loss(x):
    return (model(x) ** 2).mean()

def step(x):
    params = statetx.states(model, statetx.Param)
    for name, g in statetx.grad(loss, wrt=params)(x).items():
        params[name].value = params[name].value - 0.1 * g

moment = statetx.State(jnp.zeros((512, 512)))

def weights(x):
    def loss(x):
        return jnp.tanh(x @ large.value).sum()
    moment.value = 0.9 * moment.value + statetx.grad(loss, wrt=large)(x)
    large.value = large.value - 0.1 * moment.value

train = statetx.jit(weights, donate_states=True)
X = jax.ShapeDtypeStruct((512, 64), jnp.float32)
def main(): return step, (X,)
def donated(): return train, (jax.ShapeDtypeStruct((16, 512), jnp.float32),)
"""

IMAGES = """
import jax, jax.numpy as jnp, statetx

SIZE, BATCH = 32, 8
f32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)

def conv(x, w, stride=1):
    return jax.lax.conv_general_dilated(x, w, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

@statetx.remat
def block(p, x):
    h = jax.nn.silu(conv(x, p["first"]))
    return x + conv(h, p["second"])

def loss(params, x):
    x = conv(x, params["stem"], stride=2)
    for p in params["blocks"]:
        x = block(p, x)
    return (x**2).mean()

BLOCK = {"first": f32(3, 3, 16, 16), "second": f32(3, 3, 16, 16)}
def main(): return loss, ({"stem": f32(3, 3, 3, 16), "blocks": [BLOCK] * 4}, f32(BATCH, SIZE, SIZE, 3))
"""

FLAX = """
import jax, jax.numpy as jnp, statetx
from flax import nnx

class Layer(nnx.Module):
    def __init__(self, rngs):
        self.up, self.down = nnx.Linear(32, 64, rngs=rngs), nnx.Linear(64, 32, rngs=rngs)
    def __call__(self, x):
        h = nnx.gelu(self.up(x))
        return x + self.down(h)

layers = nnx.List([Layer(nnx.Rngs(n)) for n in range(6)])

def loss(x):
    for layer in layers:
        x = statetx.remat(layer)(x)
    return (x**2).mean()

def main(): return loss, (jax.ShapeDtypeStruct((512, 32), jnp.float32),)
"""

SOURCES = {
    "layers": LAYERS,
    "halves": HALVES,
    "language": LANGUAGE,
    "loop": LOOP,
    "states": STATES,
    "images": IMAGES,
    "flax": FLAX,
}


class Planted(NamedTuple):
    """An edit that takes memory.

    Attributes:
        program: the source, and what makes the function.
        old, new: texts.
        line: a text in each line that may be named; empty if what grows has no line, such as an argument.
        owner: a pattern of what the message must say of it.
    """

    program: str
    old: str
    new: str
    line: str
    owner: str


ANY = r"residuals of (params|layers|model|w|xs|block|Block|loss)"
PLANTED = {
    "a dropped remat": Planted("layers:main", "layer = statetx.remat(block)", "layer = block", "name(", r"residuals of params.*\(block\)"),
    "a policy misspelt": Planted(
        "layers:main", 'layer = statetx.remat(block)', 'layer = statetx.remat(block, '
            'policy=jax.checkpoint_policies.save_anything_except_these_names("hiden"))', "name(", r"residuals of params.*\(block\)"
    ),
    "a policy that saves all": Planted("layers:main", "layer = statetx.remat(block)", "layer = statetx.remat(block, "
        "policy='everything')", "name(", r"residuals of params.*\(block\)"),
    "a policy that saves products": Planted("layers:main", "layer = statetx.remat(block)", "layer = statetx.remat(block, "
        "policy='dots')", "x @ p", r"residuals of params.*\(block\)"),
    "remat of the loss in place of the block": Planted("layers:main", "layer(p, x)", "block(p, x)", "name(", r"residuals of params.*\(block\)"),
    "half of the layers without remat": Planted("layers:main", "        x = layer(p, x)", "        x = layer(p, x) if p is "
        "params[0] or p is params[2] else block(p, x)", "name(|g @ p", r"residuals of params.*\(block\)"),
    "a copy of twice the size": Planted("layers:main", "    return x + g @ p", "    x = jnp.concatenate([x, "
        "jnp.sin(x)], -1)\n    x = jnp.sin(x)[:, :WIDTH] * jnp.cos(x)[:, WIDTH:]\n    return x + g @ p", "jnp.concatenate", r"\(block\)"),
    "a batch doubled": Planted("layers:main", "BATCH, NUM, PARTS = 64, 512,", "BATCH, NUM, PARTS = 64, 1024,", "", "the argument x"),
    "a width doubled": Planted("layers:main", 'PARAMS = [{"up": f32(WIDTH, WIDTH), "down": f32(WIDTH, WIDTH)}]', 'PARAMS = [{"up": f32(WIDTH, 8 * '
        'WIDTH), "down": f32(8 * WIDTH, WIDTH)}]', "", r"the argument params\[\*\]"),
    "four layers more": Planted("layers:main", "NUM, PARTS = 64, 512, 8", "NUM, PARTS = 64, 512, 12", "layer(p, x)|g @ p", r"residuals of params.*"),
    "a constant captured": Planted("layers:main", "    return (x**2).mean()", "    return (x @ "
        "np.sin(np.arange(WIDTH * 4096, dtype=np.float32)).reshape(WIDTH, -1)).mean()", "np.sin", "the constant .*"),
    "parameters no longer donated": Planted("layers:training", 'donate_argnames=("params", "moments")', 'donate_argnames=("moments",)', "", "of donated arguments, and .* did "
        "before"),
    "moments no longer donated": Planted("layers:training", 'donate_argnames=("params", "moments")', 'donate_argnames=("params",)', "", "of donated arguments, and .* did "
        "before"),
    "a second moment": Planted("layers:training", "    return params, moments", "    return params, moments, "
        "jax.tree.map(lambda g: g * g, grads)", "g * g", "the output .*"),
    "gradients no longer in parts": Planted("layers:parts", "PARTS = 64, 512, 8, 4", "PARTS = 64, 512, 8, 1", "g @ p|name(", r"residuals of params.*"),
    "activations returned": Planted("layers:training", "    return params, moments", "    hidden = "
        "[jnp.sin(jnp.concatenate([x, x, x]) @ p['up']) for p in params]\n    return params, moments, hidden", "hidden = ", "output"),
    "kept values in float32": Planted("halves:main", ".astype(jnp.bfloat16), \"gate\"", ", \"gate\"", "gate", r"residuals of .*\(block\)"),
    "a copy of the logits in float32": Planted("language:main", "    return (jax.nn.logsumexp(logits, -1)", "    logits = "
        "jnp.sin(logits.astype(jnp.float32))\n    return (jax.nn.logsumexp(logits, -1)", "logits", r"\(loss\)"),
    "a matrix of all pairs": Planted("layers:main", "    return (x**2).mean()", "    return (x**2).mean() + "
        "jnp.cos(jnp.sin(x @ x.T)).mean()", "x @ x.T", r"\(loss\)"),
    "attention without remat": Planted("language:main", "@statetx.remat\n", "", "scores|weights|mask|einsum", r"residuals of "
        r"(params|attention).*\(attention"),
    "sequences doubled": Planted("language:main", "LENGTH, WORDS, BATCH = 32, 64,", "LENGTH, WORDS, BATCH = 32, 128,", "", "the argument "
        "(tokens|targets)|residuals of .*|recomputed values of .*"),
    "a loop without its strategy": Planted("loop:main", ", checkpoint=policies.Slots(10)", "", "jnp.tanh(jnp.sin", r"residuals of .*\(cell\)"),
    "more slots": Planted("loop:main", "Slots(10)", "Slots(120)", "statetx.scan", r"(residuals|recomputed values|working "
        r"memory|.*) of .*"),
    "a body without remat": Planted("loop:plain", "statetx.scan(statetx.remat(body)", "statetx.scan((body)", "jnp.tanh(jnp.sin", r"residuals of .*\(cell\)"),
    "steps stacked that nobody needs": Planted("loop:main", "        return h, h.mean()", "        return h, jnp.concatenate([h, "
        "h])", "concatenate|statetx.scan", r".*"),
    "twice the steps": Planted("loop:main", "STEPS, UNITS, BATCH = 200", "STEPS, UNITS, BATCH = 400", "", "the argument xs"),
    "a loop unrolled by hand": Planted("loop:plain", "    h, _ = statetx.scan(statetx.remat(body), jnp.zeros((BATCH, "
        "UNITS)), xs)", "    h = jnp.zeros((BATCH, UNITS))\n"
        "    for n in range(40):\n        h = cell(w, h, jnp.sin(xs[n]))\n    for n in range(40):\n"
        "        h = cell(w, h, jnp.cos(xs[n]))", "jnp.tanh(jnp.sin|jnp.sin(xs", r"(cell|simple)"),
    "states no longer donated": Planted("states:donated", ", donate_states=True", "", "", "of donated arguments, and .* did "
        "before"),
    "a method without remat": Planted("states:main", "    @statetx.remat\n", "", "h = jnp.sin|jnp.cos(h)", r"residuals of "
        r"model\.blocks.*\(Block.__call__\)"),
    "a running mean of all examples": Planted("states:main", "        self.mean = statetx.State(jnp.zeros(64))", "        self.mean = "
        "statetx.State(jnp.zeros((512, 64)))", "", r"the state .*mean|output"),
    "a stride lost": Planted("images:main", "stride=2", "stride=1", "conv(", r"residuals of .*|recomputed values of "
        r".*|working memory of .*"),
    "a convolution without remat": Planted("images:main", "@statetx.remat\n", "", "jax.nn.silu|conv(h", r"(residuals|working memory) of "
        r"(params|block).*\(block\)"),
    "images of twice the size": Planted("images:main", "SIZE, BATCH = 32", "SIZE, BATCH = 64", "", "the argument x"),
    "a layer of flax without remat": Planted("flax:main", "statetx.remat(layer)(x)", "layer(x)", "nnx.gelu|self.down", r"residuals of .*"),
}  # fmt: skip


def made(source: str, program: str, folder: pathlib.Path, name: str) -> tuple[Any, tuple, pathlib.Path]:
    path = folder / f"{name}.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return *getattr(module, program)(), path


def planted(name: str) -> dict[str, Any]:
    edit = PLANTED[name]
    source, _, program = edit.program.partition(":")
    before = SOURCES[source]
    after = before.replace(edit.old, edit.new)
    assert before != after, f"{name}: the text to replace is not there"
    with tempfile.TemporaryDirectory() as folder:
        where = pathlib.Path(folder)
        file = where / "memory.json"
        fun, args, _ = made(before, program, where, "before")
        os.environ["STATETX_UPDATE_MEMORY"] = "1"
        statetx.testing.assert_memory(fun, *args, against=file)
        del os.environ["STATETX_UPDATE_MEMORY"]
        fun, args, path = made(after, program, where, "after")
        begin = time.process_time()
        try:
            statetx.testing.assert_memory(fun, *args, against=file)
            message = ""
        except AssertionError as e:
            message = str(e)
        seconds = time.process_time() - begin
    lines = message.splitlines()
    wanted = [n for n, text in enumerate(after.splitlines(), 1) if edit.line and re.search(_escaped(edit.line), text)]
    named = (
        [x for x in lines[2:5] if re.search(edit.owner, x)]
        if edit.line
        else [x for x in lines[2:] if re.search(edit.owner, x)][:3]
    )
    found = [x for x in named if not edit.line or any(f"{path.name}:{n}" in x.replace("\\", "/") for n in wanted)]
    return {
        "name": name,
        "found": bool(found),
        "named": found[0].strip() if found else "",
        "message": lines[:6],
        "seconds": round(seconds, 1),
    }


def _escaped(line: str) -> str:
    return "|".join(map(re.escape, line.split("|")))


# -- programs that nobody changed
# ----------------------------------------------------------------------------------------------

SIZES = {"": 1, ", larger": 2}


def programs(part: str) -> Iterator[tuple[str, Any, tuple]]:
    """Each program of ``advised.py`` that can be made here, unchanged and with each of its changes, at two sizes."""
    k, n = map(int, part.split("/"))
    for name, make in list(advised.PROGRAMS.items())[k - 1 :: n]:
        if advised.NEEDS[name] and importlib.util.find_spec(advised.NEEDS[name]) is None:
            continue
        hand = advised.Hand()
        step, args = make(hand)
        statetx.eval_shape(step, *args)  # notes the changes
        for change in ("", *hand.changes):
            for text, scale in SIZES.items():
                step, args = make(advised.Hand(change, statetx.policies.Levels(2)))
                if (args := _scaled(args, scale)) is not None:
                    yield f"{name}{', ' + change if change else ''}{text}", step, args


BLOCKS = {
    "wave": wave,
    "gated": lambda w, x: x + jnp.tanh(x @ w) * jax.nn.sigmoid(norm(x) @ w.T),
    "normalized": lambda w, x: norm(x + jax.nn.gelu(norm(x) @ w)),
    "softmax": lambda w, x: x + jax.nn.softmax(x @ w @ x.T / 8.0) @ x,
    "maximum": lambda w, x: jnp.maximum(x @ w, 0.1 * x) + jnp.log1p(x**2),
    "dropout": lambda w, x: x + jnp.where(jax.random.bernoulli(jax.random.key(0), 0.9, x.shape), jnp.sin(x @ w), 0.0),
    "sorted": lambda w, x: jnp.sort(jnp.sin(x @ w), -1) + jnp.cumsum(x, -1) / 64.0,
    "convolution": lambda w, x: (
        x + jnp.tanh(conv(jnp.sin(x).reshape(8, -1, 8, x.shape[-1]), w[None, None])).reshape(x.shape)
    ),
}
WRAPPED = {
    "": lambda f: f,
    "remat": statetx.remat,
    "dots": lambda f: statetx.remat(f, policy="dots"),
    "jax's": jax.checkpoint,
}  # fmt: skip
LOOPS = {"": None, "levels": policies.Levels(2), "slots": policies.Slots(3)}


def drawn(num: int) -> Iterator[tuple[str, Any, tuple]]:
    """Small programs, each drawn by its number: layers in a Python loop or in a scan of ours or JAX's, differentiated
    in a step or by the profile.
    """
    for number in range(num):
        draw = random.Random(number)
        block, wrapped, loop = (draw.choice(list(some)) for some in (BLOCKS, WRAPPED, LOOPS))
        layers, width, batch = draw.randint(2, 6), draw.choice([16, 32, 64]), draw.choice([64, 128, 192])
        form = draw.choice(["unrolled", "unrolled", "scanned", "scanned by JAX"])
        layer = WRAPPED[wrapped](BLOCKS[block])

        def loss(ws: Any, x: Any, layer: Any = layer, form: str = form, loop: str = loop, layers: int = layers) -> Any:
            if form == "unrolled":
                for n in range(layers):
                    x = layer(ws[n], x)
            elif form == "scanned":
                x, _ = statetx.scan(lambda x, w: (layer(w, x), None), x, ws, checkpoint=LOOPS[loop])
            else:
                x, _ = jax.lax.scan(lambda x, w: (layer(w, x), None), x, ws)
            return (x**2).mean()

        step = draw.choice(["loss", "step", "donated", "parts"])
        if step == "parts":
            loss = statetx.microbatch(loss, 2, argnums=1)
        update = lambda ws, x, loss=loss: ws - 0.1 * jax.grad(loss)(ws, x)
        fun = loss if step == "loss" else jax.jit(update, donate_argnums=(0,) if step == "donated" else ())
        name = f"{number}: {layers} {block} of {width}, {form}, {wrapped or 'plain'}, {loop or 'no'} strategy, {step}"
        yield name, fun, (f32(layers, width, width), f32(batch, width))


def _scaled(args: tuple, scale: int) -> tuple | None:
    """With more examples: the first axis of the last argument; None if it has none."""
    last = args[-1]
    if scale == 1:
        return args
    if not isinstance(last, jax.ShapeDtypeStruct):
        return None
    return *args[:-1], jax.ShapeDtypeStruct((scale * last.shape[0], *last.shape[1:]), last.dtype)


def record(file: pathlib.Path, some: Iterator[tuple[str, Any, tuple]]) -> None:
    for name, step, args in some:
        try:
            baseline = MemoryBaseline.of(statetx.memory_profile(step, *args))
        except Exception as e:  # a version of a library that refuses it
            print(f"{name}: {type(e).__name__}: {str(e).splitlines()[0][:150]}", flush=True)
        else:
            save(file, key_of(name, baseline), baseline)


def compare(files: Sequence[str]) -> dict[str, Any]:
    """What each file says of the programs that the first has, too."""
    before, rows = load(files[0]), []
    for file in files[1:]:
        after = load(file)
        some = [Difference(key, before[key], after[key]) for key in before if key in after]
        sizes = [d.after.num_bytes / d.before.num_bytes - 1 for d in some]
        rows.append(
            {
                "before": some[0].before.versions,
                "after": some[0].after.versions,
                "programs": len(some),
                "equal": sum(d.after.num_bytes == d.before.num_bytes for d in some),
                "alarms": sum(d.is_regression for d in some),
                "least": round(min(sizes), 4),
                "most": round(max(sizes), 4),
                "explained": sum(bool(list(d.changed_versions())) and bool(d.grown()) for d in some if d.is_regression),
                "messages": [str(d).splitlines() for d in some if d.is_regression],
            }
        )
    return {"files": len(files), "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["planted", "record", "compare"])
    parser.add_argument("names", nargs="*")
    parser.add_argument("--part", default="1/1", help="K/N: every N-th program")
    parser.add_argument("--drawn", type=int, default=0)
    parser.add_argument("--out", type=pathlib.Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # of libraries, about names that they changed
    if options.what == "record":
        record(pathlib.Path(options.names[0]), drawn(options.drawn) if options.drawn else programs(options.part))
        return
    if options.what == "compare":
        result = compare(options.names)
        print(json.dumps(result, indent=1))
        rows = result["rows"]
    else:
        rows = []
        for name in options.names or PLANTED:
            rows.append(planted(name))
            print(
                f"{'found' if rows[-1]['found'] else 'MISSED'}: {name}: {rows[-1]['named'] or rows[-1]['message']}",
                flush=True,
            )
    if options.out:
        options.out.write_text(json.dumps(rows, indent=1) + "\n")
    sys.exit(any(not r["found"] for r in rows) if options.what == "planted" else 0)


if __name__ == "__main__":
    main()
