"""What a memory profile prints, draws and writes: on profiles made by hand, whose bytes are known, and on compiled
programs.
"""

import dataclasses
import io
import json
import re
import sys

import jax
import jax.numpy as jnp
import pytest
import rich.console

import statetx
from statetx._tables import Cell, Column, Table
from statetx._text import format_bytes
from statetx.memory import _show
from statetx.memory.buffer import Buffer, Change, Loop, Step
from statetx.memory.measure import MemoryProfile

KIB = 1024
SCAN = Loop("scan", 100, "model.py:20")


def buffer(num_bytes, start, end, kind="working memory", owner="loss", **fields):
    """A buffer with a place of its own, unless `fields` has one."""
    buffer.count += 1
    names = dict(function="Block.__call__", source="/home/user/model.py:7", primitive="dot_general")
    fields = {"type": f"u8[{num_bytes}]", "name": f"fusion.{buffer.count}", "allocation": buffer.count} | fields
    fields = fields if kind in ("state", "argument") else names | fields
    return Buffer(num_bytes=num_bytes, start=start, end=end, kind=kind, phase="forward", owner=owner, **fields)


buffer.count = 0


def profile(buffers, phases="fffffbbbbb", gap=0, changes=(), num_devices=1, note=""):
    """The profile of a program with a step for each letter, where XLA reserves `gap` bytes more than the
    buffers need.
    """
    names = {"f": "forward", "b": "backward", "u": "update"}
    steps = tuple(
        Step(f"fusion.{n}", "dot_general", names[p], f"/home/user/model.py:{n}", None) for n, p in enumerate(phases)
    )
    sizes = {
        kind: sum(b.num_bytes for b in buffers if b.kind in kind)
        for kind in (("argument", "state"), ("output",), ("constant",))
    }
    arguments, outputs, constants = sizes.values()
    made = MemoryProfile(
        "loss", tuple(buffers), steps, arguments, outputs, 0, 0, constants, num_devices, "cpu", note=note
    )
    vars(made)["changes"] = tuple(changes)  # in place of the advice
    vars(made)["at_peak"] = tuple(g._replace(change=None) for g in made.at_peak)
    temporaries = dataclasses.replace(
        made, buffers=tuple(b for b in buffers if b.kind not in ("argument", "state", "output"))
    )
    return dataclasses_replace(made, temp_bytes=int(temporaries.timeline.max()) + gap)


def dataclasses_replace(made, **fields):
    """With what was set in place of the advice."""
    new = dataclasses.replace(made, **fields)
    vars(new).update({name: vars(made)[name] for name in ("changes", "at_peak")})
    return new


def with_change(made, change, is_changed):
    """The same profile, with a change of the groups that a predicate selects."""
    vars(made)["at_peak"] = tuple(g._replace(change=change if is_changed(g) else None) for g in made.at_peak)
    return made


def layers(num=8, size=10 * KIB, **fields):
    """A model: states, residuals of each layer until its backward pass, an argument."""
    last = 9
    states = [buffer(KIB, 0, last, "state", f"net.blocks.{n}.w") for n in range(num)]
    residuals = [buffer(size, 1, last - 1, "residual", f"net.blocks.{n}", **fields) for n in range(num)]
    return [*states, *residuals, buffer(2 * KIB, 0, last, "argument", "x")]


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
    change = Change("remat", "Block.__call__", "Rematerialize Block.__call__ with @statetx.remat.", 62 * KIB)
    made = profile([*layers(1), buffer(5 * KIB, 5, 5, "working memory", "loss")], changes=[change], gap=KIB)
    assert str(made).splitlines()[0] == (
        "Peak 19.0 KiB in the backward pass at model.py:5 (dot_general): 53% is residuals of net.blocks.0 "
        "(Block.__call__, model.py:7). Largest saving: rematerialize Block.__call__ with @statetx.remat: 62.0 KiB "
        "less (predicted)."
    )


@pytest.mark.parametrize(
    "buffers, words",
    [
        (layers(8), "is residuals of net.blocks.* (8 of them) (Block.__call__, model.py:7)."),
        ([*layers(8), buffer(99 * KIB, 1, 8, "residual", "net.blocks.3")], "is residuals of net.blocks.3 "
            "(Block.__call__, model.py:7)."),
        ([*layers(2), buffer(80 * KIB, 2, 3)], "is working memory of loss (Block.__call__, model.py:7)."),
        ([*layers(2), buffer(80 * KIB, 2, 3, function="loss")], "is working memory of loss (model.py:7)."),
        ([*layers(2), buffer(80 * KIB, 2, 3, "recomputed", region="Block")], "is recomputed values of loss "
            "(Block.__call__, model.py:7, remat of Block)."),
        ([*layers(2), buffer(80 * KIB, 0, 9, "argument", "params['w']")], "is the argument params['w']."),
        ([*layers(2), *[buffer(40 * KIB, 0, 9, "state", f"m.{n}") for n in range(3)]],
         "is the states m.* (3 of them)."),
        ([*layers(2), buffer(80 * KIB, 2, 6, "residual", "cell", stacked=SCAN)],
            "is residuals of cell (Block.__call__, "
            "model.py:7, stacked by scan of 100 steps)."),
        ([*layers(2), buffer(80 * KIB, 2, 3, loop=SCAN)], "(Block.__call__, model.py:7, scan of 100 steps)."),
    ],
)  # fmt: skip
def test_first_line_names_the_largest(buffers, words):
    assert _show.headline(profile(buffers)).endswith(words)


def test_lines_of_one_owner_count_together():
    """Neither of the lines of a block is the largest group, but the block is the largest owner."""
    lines = [buffer(30 * KIB, 1, 8, "residual", "net", source=f"/home/user/model.py:{n}") for n in (7, 8, 9)]
    made = profile([buffer(40 * KIB, 0, 9, "argument", "x"), *lines])
    assert "69% is residuals of net, the largest part from Block.__call__, model.py:7." in _show.headline(made)
    larger = profile([buffer(40 * KIB, 0, 9, "argument", "x"), *lines, buffer(70 * KIB, 1, 8, "residual", "net")])
    assert "is residuals of net, most of it from Block.__call__, model.py:7." in _show.headline(larger)


def test_first_line_of_constants_that_are_larger_than_the_peak():
    table = buffer(900 * KIB, 0, 9, "constant", "Block.__call__")
    assert _show.headline(profile([*layers(2), table])).endswith(
        "and beside it 900.0 KiB of constants, which XLA's figures leave out; the largest is u8[921600] in "
        "Block.__call__, model.py:7 (900.0 KiB)."
    )


def test_first_line_without_phases_on_devices_and_in_a_loop():
    made = profile(layers(2), phases="f" * 10, num_devices=4)
    assert _show.headline(made).startswith("Peak 24.0 KiB on each of 4 devices at model.py:1 (dot_general): 83% is")
    steps = [step._replace(loop=SCAN) for step in made.steps]
    assert "(dot_general) in a scan of 100 steps: " in _show.headline(dataclasses_replace(made, steps=tuple(steps)))


def test_a_program_without_buffers():
    made = profile([], phases="f")
    assert str(made).splitlines()[0] == "Peak 0 B at model.py:0 (dot_general)."
    assert "peak, step 1 of 1" in _show.html(made) and _show.to_dict(made)["timeline"] == [0]


# -- table -----------------------------------------------------------------------------------------------------------


def bytes_of(shown):
    """The exact bytes of the rows, which HTML shows under the pointer."""
    return [int(row[0].hint.removesuffix(" B").replace(",", "")) for row in shown.rows]


def test_rows_sum_to_the_peak_to_the_byte():
    many = [buffer(1000 + n, 1, 8, "residual", f"part{chr(97 + n)}") for n in range(20)]
    unwritten = buffer(123, 9, 9, "output")
    replaced, by = (buffer(500, a, b, allocation=99_999) for a, b in ((0, 4), (4, 9)))
    made = profile([*layers(), *many, unwritten, replaced, by, buffer(77, 0, 9, "constant")], gap=45)
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
    wide = buffer(71 * KIB, 1, 8, "residual", "net.blocks.3")
    rows = {row.owner: row for row in _show.rows_at_peak(profile([*layers(8), wide]))}
    assert rows["net.blocks.3"].num_bytes == 81 * KIB and rows["net.blocks.*"].num_owners == 7


def test_a_place_is_a_region_or_a_loop():
    kept = [buffer(100, 1, 8, "residual", "a", stacked=SCAN), buffer(90, 1, 8, owner="b", loop=SCAN)]
    kept += [buffer(80, 1, 8, owner="c", region="Block", loop=SCAN), buffer(70, 1, 8, owner="d")]
    places = [row.place for row in _show.rows_at_peak(profile(kept))]
    assert places == ["stacked by scan of 100 steps", "scan of 100 steps", "remat of Block", ""]


def test_changes_are_numbered_below_the_table():
    best, other = Change("remat", "a", "Do this.", 60 * KIB), Change("donate", "x", "Do that.", 2 * KIB)
    made = with_change(profile(layers(), changes=[best]), other, lambda g: g.kind == "argument")
    shown = _show.table(made)
    assert shown.notes == [
        ("[1]", "Do this: 60.0 KiB less (predicted, 67%)."),
        ("[2]", "Do that: 2.0 KiB less (predicted, 2%)."),
    ]
    column = [c.name for c in shown.columns].index("change")
    changes = {row[3].text: row[column].text for row in shown.rows}
    assert changes == {"net.blocks.* (8)": "", "net.blocks.*.w (8)": "", "x": "[2]"}
    assert "[1] Do this" in str(made) and made.changes[0].text in _show.html(made).replace("Do this:", "Do this.")


def test_columns_that_no_row_fills_are_left_out():
    names = lambda made: [c.name for c in _show.table(made).columns]
    assert names(profile(layers())) == ["bytes", "share", "kind", "owner", "arrays", "line", "function"]
    stacked = [buffer(100, 1, 8, stacked=SCAN, region="f")]
    assert names(profile(stacked))[-1] == "in"


def test_notes_on_constants_and_on_what_the_backend_does_not_tell():
    made = profile([*layers(1), buffer(KIB, 0, 9, "constant", "table")], note="There is no buffer assignment.")
    (_, constants), (_, note) = _show.table(made).notes
    assert constants.startswith("1.0 KiB of constants") and "the largest is table u8[1024] in" in constants
    assert note == "There is no buffer assignment."
    assert not _show.table(profile([*layers(1), buffer(1, 0, 9, "constant")])).notes  # a byte is not worth a note


def test_residuals_beyond_what_the_program_reserves():
    """Where the backend has no buffer assignment, the residuals are those before compilation."""
    made = profile(layers())
    smaller = dataclasses_replace(made, temp_bytes=made.temp_bytes - 7)
    shown = _show.table(smaller)
    assert shown.rows[-1][3].text == "more than the program reserves"
    assert made.peak_bytes - 7 == smaller.peak_bytes == sum(row.num_bytes for row in _show.rows_at_peak(made)) - 7


# -- text ------------------------------------------------------------------------------------------------------------


def test_sparkline_has_one_column_for_each_part_of_the_schedule():
    made = profile([buffer(800, 0, 299), buffer(8 * 700, 120, 120)], phases="f" * 150 + "b" * 100 + "u" * 50)
    blocks, phases, mark = _show.sparkline(made).splitlines()
    assert len(blocks) == len(phases) == 60 and blocks.count("█") == 1 and set(blocks) == {"█", "▁"}
    assert blocks.index("█") == mark.index("▲") == 24 and mark == "peak, step 121 of 300 ▲".rjust(25)
    assert phases == "forward ".ljust(30, "─") + "backward ".ljust(20, "═") + "update ".ljust(10, "┄")


def test_sparkline_of_a_short_program_is_wide():
    made = profile([buffer(800, 0, 9), buffer(5600, 0, 0)])
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
    assert phases_of(profile([buffer(8, 0, len(phases) - 1)], phases=phases)) == shown


@pytest.mark.parametrize("phases", ["f" * 23 + "b" + "f" * 36, "f" * 116 + "bbb" + "f" * 181, "b" * 298 + "ff"])
def test_the_peak_is_in_the_phase_of_the_first_line(phases):
    """Also if it is a single step of that phase, or shares its column with more steps of another one."""
    step = max(n for n, p in enumerate(phases) if p == min(phases, key=phases.count))
    made = profile([buffer(KIB, step, step)], phases=phases)
    assert made.peak_step == step and phases_of(made)[step * 60 // len(phases)] == phases[step]


def test_sparkline_names_a_phase_that_is_as_long_as_its_name():
    made = profile([buffer(800, 0, 59)], phases="f" * 44 + "b" * 8 + "u" * 8)
    assert _show.sparkline(made).splitlines()[1] == "forward ".ljust(44, "─") + "backward" + "┄update "


def test_text_fits_a_terminal(monkeypatch):
    change = Change("remat", "a", "Rematerialize what takes most of the memory of this long program " * 3, 60 * KIB)
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
    made = profile([*layers(1), buffer(3, 0, 9, "constant")], gap=KIB)
    assert _show.kinds_line(made) == (
        "At the peak: residual 10.0 KiB (71%), argument 2.0 KiB (14%), state 1.0 KiB (7%), unused (gaps between "
        "buffers) 1.0 KiB (7%)"
    )


def test_forms_of_a_profile(compiled):
    assert _show.headline(compiled) in str(compiled) and _show.html(compiled) in compiled._repr_html_()
    lines = str(compiled).splitlines()
    assert lines[0].startswith(f"Peak {format_bytes(compiled.peak_bytes)} in the ")
    assert "scan of 20 steps" in str(compiled) and "test_memory_show.py:" in lines[0]


# -- HTML, JSON, two profiles


def test_html_has_a_timeline_and_escapes_names():
    made = profile([*layers(), buffer(500 * KIB, 2, 3, owner="<lambda>", function="<lambda>")])
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
    old, new = buffer(800, 0, 5, allocation=77), buffer(300, 5, 9, allocation=77)
    made = profile([old, new, buffer(600, 5, 5)])
    assert made.peak_step == 5
    assert sorted(n for g in _show.to_dict(made)["at_peak"] for n in g["buffers"]) == [0, 1, 2]


def test_compare_two_profiles():
    before = profile(layers())
    after = profile(
        [b for b in layers(size=KIB) if b.owner != "x"] + [buffer(10 * KIB, 5, 6, "recomputed", "net.blocks.7")]
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
