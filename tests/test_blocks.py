"""Blocks (`statetx.target`, `statetx.budget`): decorators, threads, overlapping tasks, and unused blocks."""

import asyncio
import subprocess
import sys
import threading
import warnings

import pytest

import statetx
from helpers import in_force


def make_target():
    return statetx.target(None)


BLOCKS = {"budget": lambda: statetx.budget("1GiB"), "target": make_target}


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("is_decorator", [True, False])
def test_block_shared_by_two_threads_is_one_for_each(name, is_decorator):
    # Each enters before the other leaves, and the first to enter is the first to leave.
    block = BLOCKS[name]()
    entered, left = [threading.Event(), threading.Event()], threading.Event()
    found = {}

    def inside(who):
        entered[who].set()
        assert entered[1 - who].wait(10) and (who == 0 or left.wait(10))
        return in_force()

    def run(who):
        before = in_force()
        if is_decorator:
            found[who] = before, block(inside)(who), in_force()
        else:
            with block:
                during = inside(who)
            found[who] = before, during, in_force()
        left.set()

    threads = [threading.Thread(target=run, args=(who,)) for who in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for who in range(2):
        before, during, after = found[who]
        assert before == after != during == found[0][1]


@pytest.mark.parametrize("name", BLOCKS)
def test_decorator_nests_in_itself(name):
    @BLOCKS[name]()
    def run(depth):
        return [in_force(), *(run(depth - 1) if depth else [])]

    before = in_force()
    assert len({*run(3)}) == 1 and in_force() == before != run(0)[0]


def coroutine():
    async def run(): ...

    return run()


def generator():
    yield


async def async_generator():
    yield


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("fun", [coroutine, generator, async_generator])
def test_function_that_goes_on_after_its_call_is_refused(name, fun):
    with pytest.raises(
        statetx.FunctionError, match=rf"statetx.{name}\(.*\): the function returned an? .* has been left"
    ):
        BLOCKS[name]()(fun)()
    assert BLOCKS[name]()(lambda: 3)() == 3


@pytest.mark.parametrize("first", BLOCKS)
@pytest.mark.parametrize("second", BLOCKS)
def test_overlapping_tasks_leave_nothing_behind(first, second):
    async def task(name, waits):
        with BLOCKS[name]():
            for _ in range(waits):
                await asyncio.sleep(0)

    async def both():
        before = in_force()
        results = await asyncio.gather(task(first, 1), task(second, 3), return_exceptions=True)
        return before, in_force(), results

    before, after, (error, nothing) = asyncio.run(both())
    assert before == after and nothing is None
    assert isinstance(error, statetx.FunctionError)
    assert f"statetx.{second}" in str(error) and "without await" in str(error)


def test_block_left_in_order_gives_the_outer_setting_back():
    with statetx.budget("1GiB"):
        outer = in_force()
        with statetx.budget("2GiB"), statetx.target(None):
            assert in_force() != outer
        assert in_force() == outer


def test_error_of_the_user_passes_a_block_that_is_left_early():
    first, second = statetx.budget("1GiB"), statetx.budget("2GiB")
    before = in_force()
    with pytest.raises(ZeroDivisionError), first:
        second.__enter__()
        raise ZeroDivisionError
    assert in_force()[0] == "fit:2.0GiB"
    second.__exit__(None, None, None)
    assert in_force() == before


def test_block_left_in_another_thread_is_named():
    block, errors = statetx.budget("1GiB"), []

    def leave():
        try:
            block.__exit__(None, None, None)
        except statetx.FunctionError as e:
            errors.append(str(e))

    with block:
        thread = threading.Thread(target=leave)
        thread.start()
        thread.join()
    assert len(errors) == 1 and "another thread" in errors[0]


def test_unused_block_names_the_line_that_made_it():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        block = make_target()
        assert not caught
        del block
        statetx.budget("1GiB")(len)  # used
        with statetx.budget("1GiB"):
            pass
    (warning,) = caught
    assert (warning.filename, warning.lineno) == (__file__, make_target.__code__.co_firstlineno + 1)


@pytest.mark.slow
def test_unused_block_of_a_module_is_named_when_the_program_ends():
    code = "import statetx\nblock = statetx.budget('1GiB')\n"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "PolicyWarning" in ran.stderr and "Exception ignored" not in ran.stderr
