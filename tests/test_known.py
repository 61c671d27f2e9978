"""Known faults of JAX and XLA: the checks of `python -m statetx doctor`, and what is refused because of them."""

import json

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
import pytest

import statetx
from statetx import _known
from statetx._targets import current
from statetx.cli.main import main

VERSION = tuple(map(int, jaxlib.__version__.split(".")[:3]))
# Seen on CPUs with jaxlib 0.10.2, 0.11.0, 0.11.1, 0.11.2 and 0.12.0.1.
RIGHT = {
    _known.DELAY_LINE: False,
    _known.ROW_AFTER_ROLL: VERSION >= (0, 12, 0),
    _known.SHARDED_ROW: False,
    _known.ROW_IN_LOOP: VERSION != (0, 11, 1),
}


@pytest.mark.whole
@pytest.mark.parametrize("fault", _known.FAULTS, ids=lambda f: f.thread)
def test_check_of_a_known_fault(fault):
    if fault.platform == "gpu":
        assert fault.verdict() == "not checked: needs a GPU"
        # On CPUs there is no such fault, so that the check itself is right.
        assert fault is _known.OFFLOADED_RESIDUALS or fault.is_right()
    else:
        assert fault.verdict() == ("right here" if RIGHT[fault] else "wrong here")


def test_check_of_offloaded_residuals_is_right_where_they_stay_on_the_device():
    gradients = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_known.jnp, "allclose", lambda a, b, rtol: gradients.append((a, b)) or True)
        try:
            assert _known.OFFLOADED_RESIDUALS.is_right()
        except jax.errors.JaxRuntimeError:
            pytest.skip("this CPU backend does not compile offloaded values")
    assert np.allclose(*gradients[0]) and float(jnp.abs(gradients[0][0]).min()) > 0


def test_doctor_tells_versions_and_verdicts(capsys, tmp_path):
    path = tmp_path / "doctor.json"
    assert main(["doctor", "--json", str(path)]) == 0
    out = capsys.readouterr().out
    assert f"jaxlib {jaxlib.__version__}" in out and "brainstate " in out and "flax " in out
    assert "wrong here: A shifted array with a reshape" in out and "openxla/xla#49176" in out
    assert "  Fix: jnp.concatenate([x[:1], x[:-1]]), or a ring buffer." in out
    content = json.loads(path.read_text())
    assert content["versions"]["jax"] == jax.__version__
    assert [f["thread"] for f in content["faults"]] == [f.thread for f in _known.FAULTS]
    assert main(["doctor", "--json", str(tmp_path / "no" / "file")]) == 2


def offloading(x, checkpoint=None):
    policy = statetx.policies.offload("h")
    turn = statetx.remat(lambda h, x: (jnp.tanh(statetx.checkpoint_name(h * x, "h")), None), policy=policy)
    turn = turn if checkpoint is None else lambda h, x: (jnp.tanh(h * x), None)
    return statetx.scan(turn, jnp.float32(1), x, checkpoint=checkpoint)[0]


@pytest.mark.parametrize("checkpoint", [None, statetx.policies.Levels(2, offload=True)], ids=["residuals", "carries"])
def test_offloaded_residuals_are_refused_where_they_are_wrong(checkpoint, monkeypatch):
    monkeypatch.setattr(current, "platform", lambda: "gpu")
    monkeypatch.setattr(_known, "_jaxlib", lambda: "0.11.0")
    trace = lambda: jax.make_jaxpr(jax.grad(lambda x: offloading(x, checkpoint)))(jnp.ones(8))
    with pytest.raises(statetx.PolicyError, match=r"(?s)jaxlib 0\.11\.0 .*openxla/xla#46231.*Fix: another jaxlib"):
        trace()
    monkeypatch.setattr(_known, "_jaxlib", lambda: "0.11.2")
    statetx.clear_cache()  # what was staged for the other version
    jax.clear_caches()
    trace()


def test_delay_line_as_the_documentation_writes_it():
    """The form that is right in a loop with a reshape, against NumPy."""

    def turn(line, x):
        line = 3 * jnp.concatenate([x[None], line[:-1]])
        return line, line.reshape(1, 8)[0, -1]

    x = jnp.arange(12).reshape(6, 2)
    _, last = statetx.jit(lambda x: statetx.scan(turn, jnp.zeros((4, 2), int), x))(x)
    line, expected = np.zeros((4, 2), int), []
    for row in np.asarray(x):
        line = 3 * np.concatenate([row[None], line[:-1]])
        expected.append(line[-1, -1])
    assert last.tolist() == expected
