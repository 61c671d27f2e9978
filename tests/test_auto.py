"""``checkpoint="auto"``: the table of the page, what is logged, and a solver whose loops are short and large."""

import logging
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import statetx
from statetx.policies import Budget, Levels

H, HS = jnp.ones((64, 64)), jnp.ones((16, 64, 64))  # a carry of 16 KiB, and of 16 examples
PAGE = (Path(__file__).parents[1] / "docs" / "loops.md").read_text(encoding="utf-8")


def loop(h, length, depth=4, checkpoint="auto"):
    def step(h, _):
        for _ in range(depth):  # a sine keeps its argument
            h = jnp.sin(h)
        return h, None

    return statetx.scan(step, h, None, length, checkpoint=checkpoint)[0]


def frames(h, checkpoint, inner=loop):
    return statetx.scan(lambda h, _: (inner(h, 10), None), h, None, 40, checkpoint=checkpoint)[0].sum()


def losses(hs):
    return jax.vmap(lambda h: loop(h, 40).sum())(hs)


PROGRAMS = {  # by the example in the table
    "40 steps": (lambda h: loop(h, 40).sum(), H),
    "400 steps": (lambda h: loop(h, 400).sum(), H),
    "8 steps of 4 MiB": (lambda h: loop(h, 8, 16).sum(), jnp.ones((64, 1024))),
    "3 steps of 4 MiB": (lambda h: loop(h, 3, 1).sum(), jnp.ones((1024, 1024))),
    "40 frames of 10 steps": (lambda h: frames(h, "auto"), H),
    "10 steps in 40 turns": (lambda h: frames(h, None), H),
    "10 steps in `remat` in 40 turns": (
        lambda h: frames(h, None, lambda h, num: statetx.remat(lambda h: loop(h, num))(h)),
        H,
    ),
    "16 examples of 40 steps": (lambda hs: losses(hs).sum(), HS),
    "16 parts of 1 example": (jax.grad(statetx.microbatch(lambda hs: losses(hs).mean(), 16)), HS),
    "4 parts of 4 examples": (
        jax.grad(lambda hs: statetx.chunked(losses, size=4, reduce="concat")(hs).mean()),
        HS,
    ),
}


def rows():
    lines = PAGE[PAGE.index("{ #auto }") :].splitlines()
    cells = [[c.strip() for c in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    return [(loop, *example.split(": "), choice) for loop, _, example, choice in cells[2 : 2 + 11]]


def choice_of(row):
    if row.slots == 0:
        return "plain"
    is_nested = row.slots == sum(Levels(2).lengths_for(row.length))
    return "`Levels(2)`" if is_nested else f"`Slots({row.slots})`"


@pytest.mark.parametrize(("place", "example", "size", "choice"), rows(), ids=lambda x: x)
def test_row_of_the_table_is_what_auto_does(place, example, size, choice, monkeypatch):
    if "GPU" in place:
        monkeypatch.setattr("statetx._loops.tune._waits_for_loops", lambda: True)
    kept = []
    statetx.clear_cache()  # of loops that have chosen
    monkeypatch.setattr("statetx._loops.tune.Sized._say", lambda self, *_: kept.append(self.sizes.plain))
    report = statetx.loop_report(*PROGRAMS[example], policies=())
    assert ", ".join(map(choice_of, report.rows)) == choice
    if choice == "plain":
        kept = [sum(row.residual_bytes * row.length for row in report.rows)]
    (num_bytes,) = {*kept}
    assert num_bytes == pytest.approx(Budget(size).bytes, rel=0.01)


def test_loop_in_a_loop_is_not_logged_by_itself(caplog, monkeypatch):
    monkeypatch.setattr("statetx._loops.tune._said", set())
    statetx.clear_cache()
    jax.eval_shape(jax.grad(lambda h: frames(h, "auto")), jnp.ones((512, 512)))  # 40 MiB in each turn
    (said,) = [r.getMessage() for r in caplog.records]
    assert "40 x 10 steps keep 1.6 GiB for the gradient; Slots(8) keeps" in said


@pytest.mark.parametrize("is_silent", [False, True])
def test_choice_is_logged_once_with_the_line(caplog, monkeypatch, is_silent):
    monkeypatch.setattr("statetx._loops.tune._said", set())
    statetx.clear_cache()
    with caplog.at_level(logging.ERROR if is_silent else logging.WARNING, logger="statetx"):
        jax.eval_shape(lambda h: frames(h, "auto"), H)
        assert not caplog.records  # nothing is differentiated
        jax.eval_shape(jax.grad(lambda h: frames(h, "auto")), H)
        jax.eval_shape(jax.grad(lambda h: 2 * frames(h, "auto")), H)
    said = [r.getMessage() for r in caplog.records]
    line = frames.__code__.co_firstlineno + 1
    expected = (
        f'scan of <lambda> at {__file__}:{line}: checkpoint="auto": 40 x 10 steps keep 25.0 MiB for the gradient; '
        f"Slots(8) keeps 272.0 KiB (predicted)."
    )
    assert said == ([] if is_silent else [expected])
    assert expected.partition(": ")[2] in PAGE


# -- a spectral solver -------------------------------------------------------------------------------------------------


def energy(vorticity, checkpoint, num_frames=12, num_steps=6, dt=0.01, viscosity=0.01):
    """The energy of a flow on the torus at all frames: 2D Navier-Stokes in Fourier space, with dealiased products."""
    n = vorticity.shape[0]
    kx, ky = jnp.meshgrid(jnp.fft.fftfreq(n, 1 / n), jnp.fft.rfftfreq(n, 1 / n), indexing="ij")
    k2 = kx**2 + ky**2
    poisson = jnp.where(k2 == 0, 0.0, 1 / jnp.maximum(k2, 1))
    smooth = jnp.float32((jnp.abs(kx) < n / 3) & (ky < n / 3))
    field = lambda w: jnp.fft.irfft2(w, s=(n, n))

    def step(w, _):
        psi = w * poisson
        flux = field(1j * ky * psi) * field(1j * kx * w) - field(1j * kx * psi) * field(1j * ky * w)
        return (w - dt * smooth * jnp.fft.rfft2(flux)) / (1 + dt * viscosity * k2), None

    def frame(w, _):
        w, _ = statetx.scan(step, w, None, num_steps, checkpoint=checkpoint)
        return w, jnp.mean(field(w) ** 2)

    return statetx.scan(frame, jnp.fft.rfft2(vorticity), None, num_frames, checkpoint=checkpoint)[1].sum()


@pytest.mark.slow
def test_solver_of_frames_of_steps_takes_what_nested_levels_take(monkeypatch):
    monkeypatch.setattr("statetx._loops.tune._SMALL", 2**16)  # bytes; the small solver keeps 300 KiB
    first = jax.random.normal(jax.random.key(0), (16, 16))
    gradient = lambda c: jax.jit(jax.value_and_grad(lambda w: energy(w, c))).lower(first).compile()
    steps = {c: gradient(c) for c in (None, "auto", Levels(2))}
    size = {c: step.memory_analysis().temp_size_in_bytes for c, step in steps.items()}
    assert size["auto"] < 2 * size[Levels(2)] < size[None] / 2
    plain = auto = first
    for _ in range(4):
        expected, plain_gradient = steps[None](plain)
        actual, auto_gradient = steps["auto"](auto)
        np.testing.assert_allclose(actual, expected, rtol=1e-6)
        np.testing.assert_allclose(auto_gradient, plain_gradient, rtol=1e-4, atol=1e-6)
        assert jnp.abs(auto_gradient).max() > 1e-3
        plain, auto = plain - 20 * plain_gradient, auto - 20 * auto_gradient
