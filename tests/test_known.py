"""Known faults of JAX and XLA: the checks of `python -m statetx doctor`, and what is refused because of them."""

import json

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
import pytest

import statetx
from statetx.cli.main import main

VERSION = tuple(map(int, jaxlib.__version__.split(".")[:3]))
# Seen on CPUs with jaxlib 0.10.2, 0.11.0, 0.11.1, 0.11.2 and 0.12.0.1.
RIGHT = {
    "openxla/xla#49176": False,
    "openxla/xla#49121": VERSION >= (0, 12, 0),
    "openxla/xla#49118": False,
    "jax-ml/jax#40101": VERSION != (0, 11, 1),
    "jax-ml/jax#16374": False,
}
OF_GPUS = ["jax-ml/jax#39625", "openxla/xla#46231"]


def doctor(path):
    """What the command writes."""
    assert main(["doctor", "--json", str(path)]) == 0
    return json.loads(path.read_text())


def test_doctor_tells_versions_and_verdicts(capsys, tmp_path):
    content = doctor(tmp_path / "doctor.json")
    out = capsys.readouterr().out
    assert f"jaxlib {jaxlib.__version__}" in out and "brainstate " in out and "flax " in out
    assert "wrong here: A shifted array with a reshape" in out and "openxla/xla#49176" in out
    assert "  Fix: jnp.concatenate([x[:1], x[:-1]]), or a ring buffer." in out
    assert content["versions"]["jax"] == jax.__version__
    expected = {thread: "right here" if is_right else "wrong here" for thread, is_right in RIGHT.items()}
    expected |= dict.fromkeys(OF_GPUS, "not checked: needs a GPU")
    assert {fault["thread"]: fault["verdict"] for fault in content["faults"]} == expected
    assert main(["doctor", "--json", str(tmp_path / "no" / "file")]) == 2


def test_checks_of_gpus_are_right_on_cpus_which_have_no_such_fault(monkeypatch, tmp_path):
    """That of offloaded residuals compares gradients that are not zero."""
    compared, allclose = [], jnp.allclose
    monkeypatch.setattr("statetx._targets.current.platform", lambda: "gpu")
    monkeypatch.setattr("statetx._known.jnp.allclose", lambda a, b, **k: compared.append(a) or allclose(a, b, **k))
    try:
        verdicts = {fault["thread"]: fault["verdict"] for fault in doctor(tmp_path / "doctor.json")["faults"]}
    except jax.errors.JaxRuntimeError:
        pytest.skip("this CPU backend does not compile offloaded values")
    assert {verdicts[thread] for thread in OF_GPUS} == {"right here"}
    assert len(compared) == 1 and float(jnp.abs(compared[0]).min()) > 0


def offloading(x, checkpoint=None):
    policy = statetx.policies.offload("h")
    turn = statetx.remat(lambda h, x: (jnp.tanh(statetx.checkpoint_name(h * x, "h")), None), policy=policy)
    turn = turn if checkpoint is None else lambda h, x: (jnp.tanh(h * x), None)
    return statetx.scan(turn, jnp.float32(1), x, checkpoint=checkpoint)[0]


@pytest.mark.parametrize("checkpoint", [None, statetx.policies.Levels(2, offload=True)], ids=["residuals", "carries"])
def test_offloaded_residuals_are_refused_where_they_are_wrong(checkpoint, monkeypatch):
    monkeypatch.setattr("statetx._targets.current.platform", lambda: "gpu")
    monkeypatch.setattr("statetx._known._jaxlib", lambda: "0.11.0")
    trace = lambda: jax.make_jaxpr(jax.grad(lambda x: offloading(x, checkpoint)))(jnp.ones(8))
    with pytest.raises(statetx.PolicyError, match=r"(?s)jaxlib 0\.11\.0 .*openxla/xla#46231.*Fix: another jaxlib"):
        trace()
    monkeypatch.setattr("statetx._known._jaxlib", lambda: "0.11.2")
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
