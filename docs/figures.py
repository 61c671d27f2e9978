"""Draw the figures of the pages on concepts, residuals and planning: ``python docs/figures.py`` writes docs/images/*.svg.
``make figures`` also draws the charts of ``benchmarks/report.py``.

What is counted in them is measured here: residuals by `saved_residuals`, programs by `memory_report`, the order in which a loop
runs its steps by a callback in its body. Residuals and the plan are the results of their pages' code.
"""

import pathlib
import textwrap

import jax
import jax.numpy as jnp
import matplotlib
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

import statetx
from statetx import policies

IMAGES = pathlib.Path(__file__).parent / "images"
BLUE, ORANGE, GREEN, RED, GREY, PALE = "#1f5f99", "#e08a3c", "#3a8f4f", "#c0392b", "#6b7280", "#eef2f7"
matplotlib.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "statetx", "font.family": "sans-serif", "font.size": 10}


def new(width, height, **options):
    figure = Figure(figsize=(width, height), layout="constrained", facecolor="white")
    return figure, figure.subplots(**options)


def save(figure, name):
    figure.savefig(IMAGES / f"{name}.svg", metadata={"Date": None})


def plain_axes(axes, x, y):
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.spines[["top", "right"]].set_visible(False)


# -- diagrams ------------------------------------------------------------------------------------------------------


def canvas(width, height):
    """Axes in units of about a character."""
    figure, axes = new(width, height)
    axes.set(xlim=(0, 100), ylim=(0, 100 * height / width))
    axes.axis("off")
    return figure, axes


def box(axes, x, y, width, height, title, text="", color=BLUE, fill=PALE):
    axes.add_patch(
        FancyBboxPatch((x, y), width, height, boxstyle="round,pad=0.3,rounding_size=1", fc=fill, ec=color, lw=1.4)
    )
    middle = y + height / 2
    axes.text(x + width / 2, middle + (2.1 if text else 0), title, ha="center", va="center", weight="bold", color=color)
    if text:
        axes.text(x + width / 2, middle - 2.1, text, ha="center", va="center", fontsize=8.5, color="#222222")


def arrow(axes, start, end, text="", color=GREY, above=1.6):
    axes.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=13, color=color, lw=1.4))
    if text:
        x, y = (start[0] + end[0]) / 2, (start[1] + end[1]) / 2
        axes.text(x, y + above, text, ha="center", va="center", fontsize=8.5, color=color)


def draw_state():
    """Cells in a model, their paths, and what a transform makes of them."""
    figure, axes = canvas(9, 3.1)
    box(axes, 1, 2, 25, 30, "", fill="white", color=GREY)
    axes.text(13.5, 29.5, "your model", ha="center", color=GREY)
    rows = [
        ("block.w", "Param", BLUE),
        ("block.mean", "State", ORANGE),
        ("rng", "RngState", GREEN),
        ("spare", "not touched", GREY),
    ]
    for i, (path, kind, color) in enumerate(rows):
        y = 22.5 - 6.2 * i
        box(axes, 3, y, 21, 4, f"{path}: {kind}", color=color)
    box(axes, 40, 7, 24, 20, "compiled program", "pure: values in, values out")
    ins = [(24.5, "read", BLUE), (18.3, "read and written", ORANGE), (12.1, "drawn from", GREEN)]
    for y, text, color in ins:
        arrow(axes, (24.8, y), (39.3, 17 + (y - 18.3) * 0.7), text, color)
    arrow(axes, (64.7, 22), (78, 26), "result", GREY)
    arrow(axes, (64.7, 17), (78, 17), "new mean", ORANGE)
    arrow(axes, (64.7, 12), (78, 8), "next key", GREEN)
    box(axes, 79, 23.5, 19, 5, "what the call returns", color=GREY)
    box(axes, 79, 14.5, 19, 5, "block.mean.value", color=ORANGE)
    box(axes, 79, 5.5, 19, 5, "rng.value", color=GREEN)
    save(figure, "state")


def draw_frame():
    """One call of a transform, in time."""
    figure, axes = canvas(9, 3.4)
    box(axes, 20, 9, 56, 25, "", fill="white", color=BLUE)
    axes.text(48, 31.3, "jax.checkpoint, jax.grad, jax.lax.scan, ...", ha="center", color=BLUE, weight="bold")
    box(axes, 25, 12, 46, 15.5, "", fill=PALE, color=ORANGE)
    axes.text(
        48,
        25,
        "frame: which states are read, which are written, what they held",
        ha="center",
        fontsize=8.5,
        color=ORANGE,
    )
    box(axes, 34, 14, 28, 7.5, "your function, once", "mean.value = 0.9 * mean.value + ...")
    arrow(axes, (6, 17.5), (33.3, 17.5), "")
    axes.text(2, 17.5, "x", ha="center", va="center", weight="bold")
    axes.text(12.5, 21, "values that it reads\nare closed over", ha="center", fontsize=8, color=GREY)
    arrow(axes, (62.7, 17.5), (82, 17.5), "")
    box(axes, 83, 14.5, 15, 6, "(out, written)", color=GREY)
    arrow(axes, (90, 13.8), (90, 5.5), "")
    axes.text(82, 3.3, "stored in the states, if all went well", ha="center", fontsize=8.5, color=GREEN)
    arrow(axes, (48, 11.3), (48, 5.5), "", color=RED)
    axes.text(40, 3.3, "an exception: every state holds its old value again", ha="center", fontsize=8.5, color=RED)
    save(figure, "frame")


# -- measured figures ----------------------------------------------------------------------------------------------


class Block:
    def __init__(self, key, size):
        a, b = jax.random.split(key)
        self.up = statetx.Param(jax.random.normal(a, (size, 4 * size)) / size)
        self.down = statetx.Param(jax.random.normal(b, (4 * size, size)) / size)

    def __call__(self, x):
        hidden = statetx.checkpoint_name(x @ self.up.value, "hidden")
        return x + jax.nn.gelu(hidden) @ self.down.value


def draw_remat():
    """What is held at each moment, from what one block keeps (residuals) and takes in."""
    x = jax.ShapeDtypeStruct((4096, 64), jnp.float32)
    block = Block(jax.random.key(0), 64)
    kept = statetx.saved_residuals(block, x).intermediate_bytes / 2**20
    taken = x.size * 4 / 2**20
    num = 6
    forward = range(num + 1)
    figure, axes = new(8, 3.2)
    plain = [i * kept for i in forward] + [i * kept for i in reversed(range(num))]
    remat = [i * taken for i in forward]
    for i in reversed(range(num)):
        remat += [i * taken + taken + kept, i * taken]
    axes.plot(range(len(plain)), plain, color=ORANGE, lw=2, label="each block keeps what it computed")
    times = [*forward, *(num + (k + 1) / 2 for k in range(2 * num))]
    axes.plot(times, remat, color=BLUE, lw=2, label="each block keeps its input, and is computed again")
    axes.axvline(num, color=GREY, lw=1, ls=":")
    axes.text(num - 0.1, max(plain) * 1.06, "forward", ha="right", color=GREY)
    axes.text(num + 0.1, max(plain) * 1.06, "backward", ha="left", color=GREY)
    axes.set_ylim(0, max(plain) * 1.35)
    axes.set_yticks([0, 50, 100, 150])
    axes.set_xticks([])
    plain_axes(axes, "time, block by block", "MiB held")
    axes.legend(frameon=False, loc="upper right", fontsize=9)
    save(figure, "remat")


def draw_policies():
    """Memory and operations of one loss under several policies, as compiled."""
    blocks = [statetx.remat(Block(key, 64)) for key in jax.random.split(jax.random.key(0), 6)]

    def loss(x):
        for block in blocks:
            x = block(x)
        return jnp.mean(x**2)

    x = jax.ShapeDtypeStruct((2048, 64), jnp.float32)
    tried = [None, policies.names("hidden"), policies.primitives("tanh")]
    report = statetx.memory_report(loss, x, policies=tried)
    least = report.rows[0].flops
    figure, axes = new(7, 3.2)
    for row, color in zip(report.rows, (ORANGE, BLUE, GREEN, RED), strict=False):
        at = row.temp_bytes / 2**20, 100 * (row.flops / least - 1)
        axes.scatter(*at, s=60, color=color, zorder=2)
        axes.annotate(row.policy, at, textcoords="offset points", xytext=(8, 6), color=color, weight="bold")
    axes.set_xlim(0, 1.25 * max(row.temp_bytes for row in report.rows) / 2**20)
    axes.set_ylim(-2, 25)
    plain_axes(axes, "temporary memory of the compiled program, MiB", "added operations, %")
    axes.grid(color="#e5e7eb", zorder=0)
    save(figure, "policies")


def order(checkpoint, length):
    """The steps that a loop runs for its gradient, in order."""
    seen = []

    def step(h, i):
        jax.debug.callback(lambda i: seen.append(int(i)), i)
        return jnp.tanh(h + 0.1), None

    def loop(h):
        return statetx.scan(step, h, jnp.arange(length), checkpoint=checkpoint)[0]

    jax.block_until_ready(jax.jit(jax.grad(loop))(1.0))
    jax.effects_barrier()
    return seen


def draw_loops():
    length = 60
    shown = [
        ("checkpoint=None", None, "all 60 steps stored", ORANGE),
        ("Levels(2)", policies.Levels(2), "two loops, one in the other", GREEN),
        ("Slots(4)", policies.Slots(4), "4 carries stored", BLUE),
    ]
    figure, columns = new(9, 3.1, ncols=3, sharey=True)
    for axes, (title, checkpoint, text, color) in zip(columns, shown, strict=True):
        steps = order(checkpoint, length)
        axes.plot(range(len(steps)), steps, ".", ms=2.5, color=color)
        axes.set_title(title, color=color, weight="bold", fontsize=10)
        axes.text(
            0.98,
            0.97,
            f"{text}\n{len(steps)} runs of the body",
            transform=axes.transAxes,
            ha="right",
            va="top",
            fontsize=8,
        )
        axes.set_xlim(-3, 320)
        axes.set_ylim(-2, 85)
        axes.set_yticks([0, 20, 40, 60])
        plain_axes(axes, "runs of the body, in order", "step" if axes is columns[0] else "")
    save(figure, "loops")


def run_page(page, name):
    """The value of a variable of a page: its blocks of code run until one defines it."""
    text, scope = (pathlib.Path(__file__).parent / page).read_text(), {}
    for block in text.split("```python\n")[1:]:
        exec(compile(textwrap.dedent(block.partition("```")[0]), "page.py", "exec"), scope)
        if name in scope:
            return scope[name]
    raise KeyError(f"{page} defines no {name}")


REASONS = {"policy": GREEN, "input": BLUE, "not rematerialized": ORANGE, "not read": RED}


def draw_residuals():
    saved = run_page("residuals.md", "saved")
    figure, axes = new(8, 4.6)
    rows = saved.largest(12)
    for y, row in enumerate(rows):
        axes.barh(y, row.nbytes / 1024, color=REASONS[row.reason], height=0.75)
    axes.set_yticks(
        range(len(rows)), [f"{r.path or r.primitive}  {r.type}" for r in rows], family="monospace", fontsize=8
    )
    axes.invert_yaxis()
    for reason, num_bytes in saved.by("reason").items():
        axes.barh(0, 0, color=REASONS[reason], label=f"{reason}: {num_bytes / 1024:.0f} KiB")
    axes.legend(frameon=False, loc="lower right")
    plain_axes(axes, "KiB", "")
    save(figure, "residuals")


def draw_plan():
    save(run_page("planning.md", "plan").plot(), "plan")


class GeluBlock:
    """A block of a multilayer perceptron, as on the page about memory profiles."""

    def __init__(self, size):
        self.up = statetx.Param(jnp.zeros((size, 4 * size)))
        self.down = statetx.Param(jnp.zeros((4 * size, size)))

    def __call__(self, x):
        return x + jax.nn.gelu(x @ self.up.value) @ self.down.value


def draw_memory_profile():
    blocks = [GeluBlock(32) for _ in range(6)]

    def loss(x):
        for block in blocks:
            x = block(x)
        return jnp.mean(x**2)

    x = jax.ShapeDtypeStruct((4096, 32), jnp.float32)
    before = statetx.memory_profile(loss, x)
    blocks[:] = map(statetx.remat, blocks)
    profiles = {"without remat": before, "with statetx.remat": statetx.memory_profile(loss, x)}
    figure, panels = new(9, 6, nrows=2, sharey=True)
    for axes, (title, profile) in zip(panels, profiles.items(), strict=True):
        kinds = dict.fromkeys(b.kind for p in profiles.values() for b in p.buffers if b.kind != "constant")
        alive = {kind: [0] * len(profile.steps) for kind in kinds}
        for step in range(len(profile.steps)):
            for b in profile.alive(step):
                alive[b.kind][step] += b.num_bytes / 2**20
        axes.stackplot(range(len(profile.steps)), *alive.values(), labels=kinds, step="post")
        axes.axvline(profile.backward_step, color=GREY, linestyle=":")
        plain_axes(axes, "step of the compiled program; the backward pass begins at the dotted line", "MiB")
        axes.set_title(f"{title}: {profile.peak_bytes / 2**20:.1f} MiB reserved", loc="left")
    panels[0].legend(frameon=False, loc="upper left")
    save(figure, "memory-profile")


DRAWINGS = (
    draw_state,
    draw_frame,
    draw_remat,
    draw_policies,
    draw_loops,
    draw_residuals,
    draw_plan,
    draw_memory_profile,
)

if __name__ == "__main__":
    for draw in DRAWINGS:
        draw()
