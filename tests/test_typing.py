"""The cases that pyright checks are code that runs."""

import jax.numpy as jnp
import pytest

import statetx
from typing_cases import CASES


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_case_runs(case):
    statetx.trace_states(case)(jnp.ones(2))  # nothing needs to be compiled
