"""Records in JSON: what is nested deeply is refused by whoever reads it, at every depth."""

import gzip

import pytest

import statetx
from statetx import _records
from statetx.memory import baseline
from statetx.planner import _store
from statetx.planner._record import STORED_PLAN

KEY = "0" * 64


def load_entry(path):
    entry = path.parent / "plans" / f"{KEY}.json.gz"
    entry.parent.mkdir(exist_ok=True)
    entry.write_bytes(gzip.compress(path.read_bytes(), 1))
    assert _store.load(KEY, STORED_PLAN) is None
    raise ValueError  # a miss


READERS = {
    "Plan.load": (statetx.Plan.load, statetx.PlanError),
    "store": (load_entry, ValueError),
    "Target.load": (statetx.Target.load, statetx.TargetError),
    "memory baseline": (baseline.load, ValueError),
}


# Each step of a reader ends at a depth of its own, where Python's stack does.
@pytest.mark.parametrize("depths", [range(30, 50), range(930, 1000), [5000, 100_000]], ids=["few", "limit", "many"])
@pytest.mark.parametrize("name", READERS)
def test_depth_of_a_file_is_refused(tmp_path, monkeypatch, name, depths):
    monkeypatch.setenv("STATETX_CACHE", str(tmp_path))
    load, error = READERS[name]
    path = tmp_path / "file.json"
    for depth in depths:
        for field in ('"version": 1, "programs"', '"sha256": "", "a"'):
            path.write_bytes(b"{" + field.encode() + b": " + b"[" * depth + b"]" * depth + b"}")
            with pytest.raises(error):
                load(path)


def test_levels_are_counted_through_lists_and_objects():
    text = lambda num: b'{"a": [' * num + b"]}" * num
    assert _records.parse(text(20))
    with pytest.raises(ValueError, match="nested too deeply"):
        _records.parse(text(21))
    assert _records.parse(b'{"a": ' + b"[" + b"[], " * 1000 + b"[]]}")
