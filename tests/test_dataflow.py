"""The bytes that are alive at each step."""

from statetx._equations.dataflow import alive_bytes


def test_a_value_is_alive_from_its_first_step_to_its_last():
    spans = [(0, 1, 8), (1, 2, 4), (2, 2, 1), (3, 2, 100)]
    assert alive_bytes(4, spans).tolist() == [8, 12, 5, 0]
    assert alive_bytes(0, []).tolist() == []
