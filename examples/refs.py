"""Train an autoencoder with a learned codebook whose model state is in plain `jax.Ref`s.

Every weight, the codebook, its averages, a counter and a random key are made by `jax.new_ref`. Images of scikit-learn's
digits are cut into patches, each patch is coded as the nearest of a few vectors, and decoded. The codebook is not
trained by gradients: while a batch is coded, each vector moves toward the mean of the codes assigned to it (van den
Oord et al. 2017, "Neural discrete representation learning", appendix A.1). These averages are state, written in the
middle of a rematerialized function.

`@statetx.remat` on that function is all it takes: statetx's transforms pass Refs in and out of each call. Expect the
same losses and codebooks as without rematerialization, and one write per step. The example is about the writes, not
about memory, since there is only one rematerialized function. The table also shows how often `jax.checkpoint` of the
same function writes during one `jax.grad`: it can write twice.
"""

from _common import (
    BLUE,
    GREY,
    ORANGE,
    between,
    legend_below,
    make_parser,
    parse,
    plot_losses,
    run,
    show_difference,
    show_seconds,
    tidy,
    train,
)


def make_options():
    """Describe the options."""
    parser = make_parser(__doc__, "refs")
    add = parser.add_argument
    add("--updates", type=between(int), default=400, help="training steps of each run")
    add("--codes", type=between(int, 1), default=48, help="vectors of the codebook")
    add("--hidden", type=between(int), default=128, help="units of the encoder and of the decoder")
    add("--batch", type=between(int, 1, 1798), default=256, help="images in a batch")
    add("--noise", type=between(float, -1e-9), default=0.1, help="standard deviation of the noise added to the pixels")
    add("--lr", type=between(float), default=0.002, help="learning rate of Adam")
    return parser


if __name__ == "__main__":  # before the large imports, so that --help and mistakes are answered at once
    parser = make_options()
    options = parse(parser, seconds=15, updates=60, codes=16, hidden=32, batch=64, lr=0.01)

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure
from rich.table import Table
from sklearn.datasets import load_digits

import statetx

COLORS = {"no remat": ORANGE, "statetx.remat": BLUE}


class Autoencoder:
    """Sixteen patches of an image, each coded by one vector of a codebook; all state is in Refs."""

    def __init__(self, options):
        rng = np.random.default_rng(options.seed)
        normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
        sizes = {
            "in": (4, options.hidden),
            "code": (options.hidden, 8),
            "open": (8, options.hidden),
            "out": (options.hidden, 4),
        }
        self.weights = {name: jax.new_ref(normal(*size) * size[0] ** -0.5) for name, size in sizes.items()}
        self.sums, self.counts = jax.new_ref(normal(options.codes, 8)), jax.new_ref(jnp.ones(options.codes))
        self.key = jax.new_ref(jax.random.key(options.seed))
        self.writes = jax.new_ref(jnp.zeros((), jnp.int32))
        self.noise = options.noise

    @statetx.remat
    def code_and_decode(self, patches):
        """Return the decoded patches [n, 4], and the mean squared distance of codes to the codebook; move the
        codebook.
        """
        self.key[...], noise_key = jax.random.split(self.key[...])
        noisy = patches + self.noise * jax.random.normal(noise_key, patches.shape)
        codes = jax.nn.gelu(noisy @ self.weights["in"][...]) @ self.weights["code"][...]
        book = self.sums[...] / self.counts[...][:, None]
        distances = jnp.sum((codes[:, None] - book[None]) ** 2, axis=-1)
        chosen = jax.nn.one_hot(jnp.argmin(distances, axis=1), len(book))

        fixed = jax.lax.stop_gradient(codes)
        self.counts[...] = 0.98 * self.counts[...] + 0.02 * (jnp.sum(chosen, axis=0) + 1e-3)
        self.sums[...] = 0.98 * self.sums[...] + 0.02 * (chosen.T @ fixed + 1e-3 * book)
        self.writes[...] += 1

        nearest = chosen @ book
        straight = codes + jax.lax.stop_gradient(nearest - codes)  # the value of `nearest`, the gradient of `codes`
        decoded = jax.nn.gelu(straight @ self.weights["open"][...]) @ self.weights["out"][...]
        return decoded, jnp.mean((codes - jax.lax.stop_gradient(nearest)) ** 2)

    def loss(self, images):
        patches = cut(images)
        decoded, distance = self.code_and_decode(patches)
        return jnp.mean((decoded - patches) ** 2) + 0.25 * 0.01 * distance


class PlainAutoencoder(Autoencoder):
    """The same without rematerialization, for comparison."""

    code_and_decode = Autoencoder.code_and_decode.__wrapped__


class JaxAutoencoder(Autoencoder):
    """The same with JAX's rematerialization, for comparison."""

    code_and_decode = partial(jax.checkpoint, static_argnums=0)(Autoencoder.code_and_decode.__wrapped__)


def cut(images):
    """Return images [n, 8, 8] as patches [16 n, 4]."""
    return images.reshape(-1, 4, 2, 4, 2).swapaxes(2, 3).reshape(-1, 4)


def join(patches):
    """Return patches [16 n, 4] as images [n, 8, 8]."""
    return patches.reshape(-1, 4, 4, 2, 2).swapaxes(2, 3).reshape(-1, 8, 8)


def make_step(model, options):
    """Return the training step."""
    optimizer = statetx.Optimizer(optax.adam(options.lr), model.weights)

    @statetx.jit
    def step(images):
        loss, grads = statetx.value_and_grad(model.loss, wrt=optimizer.states)(images)
        optimizer.update(grads)
        return loss

    return step


def count_writes(options, images):
    """Return how often one gradient writes: rematerialized by statetx, and by JAX."""
    writes = {}
    for name, kind in ("statetx.remat", Autoencoder), ("jax.checkpoint", JaxAutoencoder):
        model = kind(options)
        jax.jit(jax.grad(model.loss))(images)
        writes[name] = int(model.writes[...])
    return writes


def example(options, progress, results):
    """Train with and without rematerialization, and compare."""
    images = (load_digits().images / 16).astype(np.float32)
    rng = np.random.default_rng(options.seed)
    batches = [(images[rng.choice(len(images), options.batch, replace=False)],) for _ in range(options.updates)]
    models = {"no remat": PlainAutoencoder(options), "statetx.remat": Autoencoder(options)}
    runs = train({name: make_step(model, options) for name, model in models.items()}, batches, progress, results)
    for name, model in models.items():
        runs[name] |= {"writes": int(model.writes[...]), "counts": np.asarray(model.counts[...]).tolist()}
    writes = count_writes(options, *batches[0])

    plain, remat = runs.values()
    difference = float(np.max(np.abs(np.array(remat["losses"]) / plain["losses"] - 1)))
    results |= {"loss_difference": difference, "writes_in_one_gradient": writes}
    table = Table("", *runs, "jax.checkpoint", title=f"A codebook of {options.codes} vectors, {options.updates} steps")
    table.add_row("median time of a step", *(show_seconds(r["step_seconds"]) for r in runs.values()), "")
    table.add_row("last loss", *(f"{r['losses'][-1]:.6f}" for r in runs.values()), "")
    table.add_row("relative difference of losses", "", show_difference(difference), "")
    table.add_row("writes of the codebook", *(str(r["writes"]) for r in runs.values()), "")
    table.add_row("writes in one jax.grad", "", *(str(n) for n in writes.values()))
    decoded, _ = statetx.jit(models["statetx.remat"].code_and_decode)(cut(images[:10]))
    return table, draw(images[:10], join(np.asarray(decoded)), runs)


def draw(images, decoded, runs):
    """Draw images and their reconstructions, the losses over each other, and how often each vector is used."""
    figure = Figure(figsize=(13, 6.5), layout="constrained")
    top, bottom = figure.subfigures(2, 1, height_ratios=(1, 1.5))
    rows = top.subplots(2, len(images))
    for row, pictures, label in zip(rows, (images, decoded), ("image", "decoded"), strict=True):
        for axes, picture in zip(row, pictures, strict=True):
            axes.imshow(picture, cmap="gray_r", vmin=0, vmax=1)
            axes.set(xticks=[], yticks=[])
        row[0].set_ylabel(label)
    losses, counts = bottom.subplots(1, 2)
    plot_losses(losses, runs, COLORS, {name: f"{name}: {r['writes']} writes" for name, r in runs.items()})
    tidy(losses, counts="x", xlabel="training step", ylabel="loss", yscale="log", title="training")
    legend_below(losses, columns=2)
    shares = np.array(runs["statetx.remat"]["counts"])
    counts.bar(range(1, len(shares) + 1), 100 * np.sort(shares)[::-1] / np.sum(shares), color=GREY)
    tidy(
        counts,
        counts="x",
        xlabel="vector of the codebook, most used first",
        ylabel="patches coded by it [%]",
        title="use of the codebook, running average",
    )
    return figure


if __name__ == "__main__":
    run(parser, options, example)
