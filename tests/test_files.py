"""Files: written as a whole or not at all, and read only where that ends; records in JSON of which no reader takes
those that are nested deeply.
"""

import gzip
import os
import re
import stat

import pytest

import statetx
from statetx import _files, _records
from statetx.memory import baseline
from statetx.planner import _store
from statetx.planner._record import STORED_PLAN


@pytest.fixture
def fifo(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    return tmp_path / "fifo"


def test_read_refuses_what_has_no_end(tmp_path, fifo):
    (tmp_path / "file").write_bytes(b"12345")
    (tmp_path / "link").symlink_to("file")
    assert _files.read(tmp_path / "file", 5) == _files.read(tmp_path / "link", 5) == b"12345"
    with pytest.raises(ValueError, match="more than 4 B"):
        _files.read(tmp_path / "file", 4)
    for path in (fifo, "/dev/zero", tmp_path):
        with pytest.raises(ValueError, match="not a regular file"):
            _files.read(path, 5)
    with pytest.raises(ValueError, match="not a regular file"):
        _files.read(tmp_path / "link", 5, follow_links=False)
    with pytest.raises(FileNotFoundError):
        _files.read(tmp_path / "nothing", 5)


def test_read_refuses_a_pipe_that_takes_the_place_of_a_file(fifo, monkeypatch):
    status = os.stat(__file__)
    monkeypatch.setattr(os, "stat", lambda *_, **__: status)  # as it was before
    with pytest.raises(ValueError, match="not a regular file"):
        _files.read(fifo, 5)


def test_write_keeps_mode_and_link(tmp_path):
    path = tmp_path / "file"
    _files.write(path, "one")
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~_umask()
    path.chmod(0o640)
    (tmp_path / "link").symlink_to("file")
    _files.write(tmp_path / "link", b"two")
    assert path.read_text() == "two" and stat.S_IMODE(path.stat().st_mode) == 0o640
    assert (tmp_path / "link").is_symlink() and len(list(tmp_path.iterdir())) == 2


def _umask():
    mask = os.umask(0)
    os.umask(mask)
    return mask


@pytest.mark.parametrize("failing", ["write", "replace"])
def test_write_that_fails_leaves_the_old_file_alone(tmp_path, monkeypatch, failing):
    path = tmp_path / "file"
    path.write_text("one")
    if failing == "replace":
        monkeypatch.setattr(os, "replace", lambda *_: os.stat(tmp_path / "no space"))
        with pytest.raises(FileNotFoundError) as info:
            _files.write(path, "two")
        assert info.value.filename == str(path)  # the name that the user gave
    else:
        monkeypatch.setattr(os, "chmod", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            _files.write(path, "two")
    assert path.read_text() == "one" and [p.name for p in tmp_path.iterdir()] == ["file"]


def test_write_to_a_device_and_to_a_protected_file(tmp_path, monkeypatch):
    _files.write("/dev/null", "text")
    path = tmp_path / "file"
    path.write_text("one")
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(PermissionError, match="file"):
        _files.write(path, "two")
    assert path.read_text() == "one"


def test_temporary_names_are_known(tmp_path, monkeypatch):
    names = []
    monkeypatch.setattr(os, "replace", lambda a, b: names.append(os.path.basename(a)))
    _files.replace(tmp_path / "file", b"")
    assert re.fullmatch(_files.TEMPORARY, names[0])


@pytest.mark.parametrize("name, written", [("a.svg", "a.svg"), ("a", "a.png")])
def test_figures_have_the_format_of_their_suffix(tmp_path, name, written):
    figure = pytest.importorskip("matplotlib.figure").Figure()
    _files.write_figure(tmp_path / name, figure)
    (path,) = tmp_path.iterdir()
    assert path.name == written and path.read_bytes()[:5] == (b"<?xml" if name == "a.svg" else b"\x89PNG\r")


# -- records ---------------------------------------------------------------------------------------------------------


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
