"""Faults that `make mutations` plants: each changes the code of its file, and a probe stands before its statement."""

import ast
import os
import sys

import pytest

import mutations

TEXT = '''def first(a, b, items, deep=True):
    """Return something of everything."""
    if len(items) < a: return items[0]
    elif sorted(items)[0] == b:
        for item in [a, *items]:
            store(b, a, kind=[*items]).x = item
    with_lambda = lambda n: n - a
    while a != b and b:
        with a: a += 1
    return reversed([with_lambda(n) for n in items])
'''


@pytest.fixture
def copy(tmp_path, monkeypatch):
    (tmp_path / "code.py").write_text(TEXT)
    monkeypatch.setattr(mutations, "ROOT", tmp_path)
    monkeypatch.setattr(mutations, "OUT", tmp_path)
    return tmp_path


def test_each_fault_changes_the_code_where_it_says(copy):
    faults = [*mutations.faults_of(copy / "code.py")]
    planted = set()
    for fault in faults:
        (copy / "code.py").write_text(TEXT)
        fault.plant(copy)
        planted.add(ast.dump(ast.parse((copy / "code.py").read_text())))
    assert len(planted) == len(faults) > 12 and ast.dump(ast.parse(TEXT)) not in planted
    kinds = {"comparison", "index", "order", "left out", "option left out", "dropped", "swapped arguments", "flag"}
    assert {fault.kind for fault in faults} == kinds | {"copy", "with"}


def test_a_probe_notes_the_test_that_executes_its_statement(copy, monkeypatch):
    faults = [*mutations.faults_of(copy / "code.py")]
    mutations.probe(copy, faults)
    monkeypatch.delitem(sys.modules, "fault_probe", raising=False)  # of a run that is measured itself
    monkeypatch.syspath_prepend(copy)
    names = {}
    exec((copy / "code.py").read_text(), names)
    monkeypatch.setitem(os.environ, "PYTEST_CURRENT_TEST", "test_y (call)")
    names["first"](1, 1, [1, 0])
    rows = [line.split("\t") for line in (copy / "reached").read_text().splitlines()]
    reached = {faults[int(number)].line for number, test in rows if test == "test_y (call)"}
    assert reached == {1, 3, 4, 7, 8, 10}  # an `elif` is reached with its `if`
