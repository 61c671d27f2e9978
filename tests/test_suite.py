"""The settings of the suite itself: what is compiled is kept, a test that takes too long fails, and of a cross a part
runs.
"""

import itertools
import pathlib
import types

import jax
import jax.numpy as jnp
import pytest


@pytest.fixture
def conftest(pytestconfig):
    """The settings that pytest has read; another file of that name may be imported by now."""
    path = str(pathlib.Path(__file__).with_name("conftest.py"))
    plugins = pytestconfig.pluginmanager.get_plugins()
    return next(plugin for plugin in plugins if getattr(plugin, "__file__", None) == path)


def events_of(fun, *args):
    """What JAX notes while a function is compiled that nothing in this process has compiled."""
    events = []
    listener = lambda event, **_: events.append(event)
    jax.monitoring.register_event_listener(listener)
    try:
        jax.jit(fun).lower(*args).compile()
    finally:
        jax.monitoring.unregister_event_listener(listener)
    return events


def test_a_program_that_was_compiled_before_is_read():
    fun, x = lambda x: jnp.sin(x) * 1.4142, jnp.arange(5.0)
    events_of(fun, x)
    assert "/jax/compilation_cache/cache_hits" in events_of(lambda x: fun(x), x)


def test_an_entry_is_there_as_a_whole_or_not_at_all(conftest, tmp_path, monkeypatch):
    cache = conftest.lru_cache.LRUCache(str(tmp_path), max_size=-1)
    cache.put("first", b"program")
    assert cache.get("first") == b"program"

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(conftest.os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        cache.put("second", b"half a program")
    assert cache.get("second") is None


def test_a_test_of_the_fast_suite_that_takes_over_five_seconds_fails(conftest):
    conftest.check_time(4.9)
    conftest.check_time(6.0, lambda: 2.0)  # on a machine that takes twice as long
    with pytest.raises(pytest.fail.Exception, match="mark it slow"):
        conftest.check_time(6.0, lambda: 1.0)


@pytest.mark.parametrize("axes", ["ab", "abc"])
def test_of_a_cross_the_fast_suite_runs_each_value_or_each_pair(conftest, axes):
    sizes, slow = {"a": 4, "b": 3, "c": 2}, []

    def cell(*values):
        return types.SimpleNamespace(
            path="test_x.py",
            originalname="test_x",
            callspec=types.SimpleNamespace(params=dict(zip(axes, values, strict=True))),
            get_closest_marker=lambda name: None,
            iter_markers=lambda name: [types.SimpleNamespace(args=(axis,)) for axis in axes],
            add_marker=lambda name: slow.append(values),
        )

    every = [*itertools.product(*(range(sizes[axis]) for axis in axes))]
    conftest.leave_crosses_to_the_slow_suite([cell(*values) for values in every])
    fast, places = {*every} - {*slow}, [*itertools.combinations(range(len(axes)), len(axes) - 1)]
    assert all(
        {tuple(v[i] for i in place) for v in fast} == {tuple(v[i] for i in place) for v in every} for place in places
    )
    assert len(fast) <= len(every) // 2
