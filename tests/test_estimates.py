"""Times that XLA:GPU estimates, summed over kernels. Compiled programs are in test_target_programs.py."""

import json
from types import SimpleNamespace

import pytest

from statetx._jax.buffers import Computation
from statetx._jax.estimates import _Sum

US = 1.0  # of each launch


def kernel(microseconds, opcode="fusion", tiled=None):
    costs = [{"name": "", "exec_time_us": 1000.0}, {"name": "sol", "exec_time_us": microseconds}]
    costs += [] if tiled is None else [{"name": "indexing-cost-model", "exec_time_us": tiled}]
    return instruction(opcode, config=json.dumps({"reification_cost": costs}))


def instruction(opcode, *called, config="", trip_count=None, target=""):
    return SimpleNamespace(opcode=opcode, called=called, backend_config=config, trip_count=trip_count, target=target)


BODY, CONDITION, OTHER, UNKNOWN = 1, 2, 3, 4
COMPUTATIONS = {
    BODY: [kernel(3.0), kernel(2.0)],
    CONDITION: [kernel(0.5)],
    OTHER: [kernel(20.0)],
    UNKNOWN: [instruction("custom-call", target="__cublas$gemm")],
}


@pytest.mark.parametrize(
    "instructions, expected",
    [
        ([kernel(3.0), instruction("bitcast"), instruction("custom-call", target="Sharding")], 3 + US),
        ([instruction("while", BODY, CONDITION, trip_count=10)], 10 * (5.5 + 3 * US)),
        ([instruction("while", BODY, CONDITION)], None),
        ([instruction("conditional", BODY, OTHER)], 20 + US),
        ([instruction("conditional", BODY, UNKNOWN)], None),
        ([instruction("call", BODY), instruction("async-start", OTHER), instruction("async-done")], 25 + 3 * US),
        ([kernel(3.0), instruction("call", UNKNOWN)], None),
        ([instruction("all-reduce-start"), instruction("all-reduce-done")], None),
        ([instruction("copy-start"), instruction("copy-done")], None),
        ([kernel(0.01, tiled=160.0), kernel(0.01)], 160.01 + 2 * US),
        ([kernel(60.0, tiled=800.0)], 60 + US),
        ([kernel(7.0, "all-reduce-start"), instruction("all-reduce-done")], 7 + US),
    ],
)
def test_sum_of_a_program(instructions, expected):
    computations = {n: Computation(n, str(n), 0, i) for n, i in {**COMPUTATIONS, 0: instructions}.items()}
    assert _Sum(computations).of(computations[0]) == (None if expected is None else pytest.approx(expected))
