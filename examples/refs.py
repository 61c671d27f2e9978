"""Train an autoencoder with a learned codebook whose whole state is in plain `jax.Ref`s.

Every weight, the codebook, its averages, a counter, a random key and Adam's moments are made by `jax.new_ref`. Images
of scikit-learn's digits are cut into patches, each patch is coded as the nearest of a few vectors, and decoded. The
codebook is not trained by gradients: while a batch is coded, each vector moves towards the mean of what it stood for
(van den Oord et al. 2017, "Neural discrete representation learning", appendix A.1). Those averages are state, written
in the middle of a function that is rematerialised.

`statetx.remat`, `grad` and `jit` make the Refs explicit around each call. Expect losses and codebooks as without
rematerialisation, and one write a step; a single rematerialised function is about the writes, not about memory. The
table also shows what `jax.checkpoint` makes of the same function under `jax.grad`: it may write twice.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _common import BLUE, GREY, ORANGE, between, make_parser, run, show_difference, tidy, train
from matplotlib.figure import Figure
from rich.table import Table
from sklearn.datasets import load_digits

import statetx


def make_options():
    """Describe the options."""
    parser = make_parser(__doc__, "refs")
    add = parser.add_argument
    add("--updates", type=between(int), default=400, help="training steps of each run")
    add("--codes", type=between(int, 1), default=48, help="vectors of the codebook")
    add("--hidden", type=between(int), default=128, help="units of the encoder and of the decoder")
    add("--batch", type=between(int, 1, 1798), default=256, help="images in a batch")
    add("--noise", type=between(float, -1e-9), default=0.1, help="standard deviation of what is added to the pixels")
    add("--lr", type=between(float), default=0.002, help="learning rate of Adam")
    return parser


class Autoencoder:
    """Sixteen patches of an image, each coded by one vector of a codebook; all state is in Refs."""

    def __init__(self, options, wrap):
        rng = np.random.default_rng(options.seed)
        normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)  # noqa: E731
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
        self.noise, self.reconstruct = options.noise, wrap(self.code_and_decode)

    def code_and_decode(self, patches):
        """Return the patches [n, 4] as decoded, and how far the codes were; move the codebook."""
        self.key[...], draw = jax.random.split(self.key[...])
        noisy = patches + self.noise * jax.random.normal(draw, patches.shape)
        found = jax.nn.gelu(noisy @ self.weights["in"][...]) @ self.weights["code"][...]
        book = self.sums[...] / self.counts[...][:, None]
        distances = jnp.sum((found[:, None] - book[None]) ** 2, axis=-1)
        chosen = jax.nn.one_hot(jnp.argmin(distances, axis=1), len(book))
        kept = jax.lax.stop_gradient(found)
        self.counts[...] = 0.98 * self.counts[...] + 0.02 * (jnp.sum(chosen, axis=0) + 1e-3)
        self.sums[...] = 0.98 * self.sums[...] + 0.02 * (chosen.T @ kept + 1e-3 * book)
        self.writes[...] += 1
        nearest = chosen @ book
        passed = found + jax.lax.stop_gradient(nearest - found)  # the codes, with the gradient of what they stand for
        decoded = jax.nn.gelu(passed @ self.weights["open"][...]) @ self.weights["out"][...]
        return decoded, jnp.mean((found - jax.lax.stop_gradient(nearest)) ** 2)

    def loss(self, images):
        patches = cut(images)
        decoded, distance = self.reconstruct(patches)
        return jnp.mean((decoded - patches) ** 2) + 0.25 * 0.01 * distance


def cut(images):
    """Return images [n, 8, 8] as patches [16 n, 4]."""
    return images.reshape(-1, 4, 2, 4, 2).swapaxes(2, 3).reshape(-1, 4)


def join(patches):
    """Return patches [16 n, 4] as images [n, 8, 8]."""
    return patches.reshape(-1, 4, 4, 2, 2).swapaxes(2, 3).reshape(-1, 8, 8)


def make_step(model, options):
    """Return the training step; Adam's moments are Refs as well."""
    values = {name: ref[...] for name, ref in model.weights.items()}
    adam = optax.adam(options.lr)
    moments = jax.tree.map(jax.new_ref, adam.init(values))

    @statetx.jit
    def step(images):
        loss, grads = statetx.value_and_grad(model.loss, wrt=model.weights)(images)
        values = {name: ref[...] for name, ref in model.weights.items()}
        updates, new = adam.update(grads, jax.tree.map(lambda ref: ref[...], moments), values)
        for ref, value in zip(jax.tree.leaves(moments), jax.tree.leaves(new), strict=True):
            ref[...] = value
        for name, value in optax.apply_updates(values, updates).items():
            model.weights[name][...] = value
        return loss

    return step


def count_writes(options, images):
    """Return how often one gradient writes: rematerialised by statetx, and by JAX."""
    writes = {}
    for name, wrap in ("statetx.remat", statetx.remat), ("jax.checkpoint", jax.checkpoint):
        model = Autoencoder(options, wrap)
        jax.jit(jax.grad(model.loss))(images)
        writes[name] = int(model.writes[...])
    return writes


def example(options, progress):
    """Train with and without rematerialisation, and compare."""
    images = (load_digits().images / 16).astype(np.float32)
    rng = np.random.default_rng(options.seed)
    batches = [images[rng.choice(len(images), options.batch, replace=False)] for _ in range(options.updates)]
    ways = {"no remat": lambda method: method, "statetx.remat": statetx.remat}
    models = {name: Autoencoder(options, wrap) for name, wrap in ways.items()}
    steps = {name: make_step(model, options) for name, model in models.items()}
    runs = train(steps, [(images,) for images in batches], progress)
    for name, model in models.items():
        runs[name] |= {"writes": int(model.writes[...]), "counts": np.asarray(model.counts[...]).tolist()}
    writes = count_writes(options, batches[0])

    plain, remat = runs.values()
    difference = float(np.max(np.abs(np.array(remat["losses"]) / plain["losses"] - 1)))
    table = Table("", *runs, "jax.checkpoint", title=f"A codebook of {options.codes} vectors, {options.updates} steps")
    table.add_row("median time of a step", *(f"{r['step_seconds']:.4f} s" for r in runs.values()), "")
    table.add_row("last loss", *(f"{r['losses'][-1]:.6f}" for r in runs.values()), "")
    table.add_row("losses differ, relatively, by", "", show_difference(difference), "")
    table.add_row("writes of the codebook", *(str(r["writes"]) for r in runs.values()), "")
    table.add_row("writes in one jax.grad", "", *(str(n) for n in writes.values()))
    results = {"runs": runs, "loss_difference": difference, "writes_in_one_gradient": writes}
    decoded, _ = statetx.jit(models["statetx.remat"].code_and_decode)(cut(images[:10]))
    return table, draw(images[:10], join(np.asarray(decoded)), runs), results


def draw(images, decoded, runs):
    """Draw images and what came of them, the losses over each other, and how often each vector is used."""
    figure = Figure(figsize=(13, 6), layout="constrained")
    top, bottom = figure.subfigures(2, 1, height_ratios=(1, 1.3))
    rows = top.subplots(2, len(images))
    for row, pictures, label in zip(rows, (images, decoded), ("image", "decoded"), strict=True):
        for axes, picture in zip(row, pictures, strict=True):
            axes.imshow(picture, cmap="gray_r", vmin=0, vmax=1)
            axes.set(xticks=[], yticks=[])
        row[0].set_ylabel(label)
    losses, counts = bottom.subplots(1, 2)
    for (name, fitted), colour, width in zip(runs.items(), (ORANGE, BLUE), (5, 1.5), strict=True):
        losses.plot(fitted["losses"], color=colour, linewidth=width, label=f"{name}: {fitted['writes']} writes")
    losses.legend(frameon=False)
    tidy(losses, xlabel="training step", ylabel="loss", yscale="log", title="training")
    shares = np.array(runs["statetx.remat"]["counts"])
    counts.bar(range(len(shares)), 100 * np.sort(shares)[::-1] / np.sum(shares), color=GREY)
    tidy(
        counts,
        xlabel="vector of the codebook, most used first",
        ylabel="patches coded by it [%]",
        title="the codebook's averages",
    )
    return figure


if __name__ == "__main__":
    run(make_options(), example, updates=20, codes=8, hidden=16, batch=64)
