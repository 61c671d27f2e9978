"""A picture of a profile: bytes alive at each step, stacked by owner, as an inline SVG."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from html import escape
from typing import NamedTuple

import numpy as np

from .._text import format_bytes
from ._changes import AdvisedTimeline
from .buffer import Buffer, Phase, replacements

# Okabe and Ito, for the color-blind. What the program holds from its first to its last step is gray, so that colors
# belong to what changes.
GRAYS = {"states": "#7f7f7f", "arguments": "#b0b0b0", "outputs": "#5a5a5a"}
PALETTE = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#c9b800")
OTHERS = "others"
_OTHERS_COLOR = "#d9d9d9"
_PHASE_COLORS = {"forward": "#56b4e9", "backward": "#e69f00", "update": "#999999"}

_INDEX = re.compile(r"(?<=[.\[])\d+(?=[.\]]|$)")


# -- bytes over the schedule -----------------------------------------------------------------------------------------


def family(owner: str) -> str:
    """The path of an owner without indices: equal layers of a model are one family.

    Example:
        >>> family("net.blocks.3.attention"), family("params['layers'][0]['w']"), family("loss")
        ('net.blocks.*.attention', "params['layers'][*]['w']", 'loss')
    """
    return _INDEX.sub("*", owner)


def band(buffer: Buffer) -> str:
    """The band of the picture that a buffer belongs to: what enters and leaves the program by its kind, all else by
    owner and kind.

    What a rematerialized block computes again has another color than what an unchanged block keeps.
    """
    return f"{buffer.kind}s" if f"{buffer.kind}s" in GRAYS else f"{family(buffer.owner)}: {buffer.kind}"


def bytes_by(profile: AdvisedTimeline, key: Callable[[Buffer], str]) -> dict[str, np.ndarray]:
    """Bytes alive at each step, by a key of the buffers, int64[len(steps)]. They sum to `AdvisedTimeline.timeline`."""
    changes: defaultdict[str, np.ndarray] = defaultdict(lambda: np.zeros(len(profile.steps) + 1, np.int64))
    counted = [b for b in profile.buffers if b.kind != "constant"]
    for b in counted:
        change = changes[key(b)]
        change[b.start] += b.num_bytes
        change[b.end + 1] -= b.num_bytes

    # Where a buffer replaces another in place, in this step the memory that both have counts for the new one.
    series = {name: np.cumsum(change)[:-1] for name, change in changes.items()}
    for old, new in replacements(counted):
        shared = min(old.offset + old.num_bytes, new.offset + new.num_bytes) - max(old.offset, new.offset)
        series[key(old)][new.start] -= shared
    return series


def sample_steps(profile: AdvisedTimeline, width: int) -> np.ndarray:
    """At most `width` steps: of each run of steps the one with most bytes, so that the peak is among them."""
    timeline = profile.timeline
    if len(timeline) <= width:
        return np.arange(len(timeline))
    edges = np.linspace(0, len(timeline), width + 1).astype(int)
    return np.array([a + int(np.argmax(timeline[a:b])) for a, b in zip(edges, edges[1:], strict=False)])


class PhaseSpan(NamedTuple):
    """Consecutive columns of one phase, from `first` to `last` inclusive."""

    phase: Phase
    first: int
    last: int


def phase_spans(profile: AdvisedTimeline, width: int) -> list[PhaseSpan]:
    """The phases of the columns of a picture. A column has the phase of most of its steps, that of the peak the phase
    of the peak.

    XLA schedules single operations of one pass within the other: a run below a fifteenth of the width, between two of
    another phase, is left out. The run with the peak stays, and one run of each phase that has a fifteenth of the
    columns altogether.
    """
    num_steps = len(profile.steps)
    width = min(width, num_steps)
    edges = np.linspace(0, num_steps, width + 1).astype(int)
    columns: list[Phase] = []
    for a, b in zip(edges, edges[1:], strict=False):
        phases: list[Phase] = [step.phase for step in profile.steps[a:b]]
        columns.append(max(dict.fromkeys(phases), key=phases.count))
    if not columns:
        return []
    peak = int(np.searchsorted(edges, profile.peak_step, side="right")) - 1
    columns[peak] = profile.steps[profile.peak_step].phase

    spans = _joined(PhaseSpan(phase, column, column) for column, phase in enumerate(columns))
    while (n := _least_span(spans, columns, peak)) is not None:
        spans = _joined(s._replace(phase=spans[n - 1].phase) if s is spans[n] else s for s in spans)

    # What gathers the results at the end of the program belongs to no pass, and counts as forward.
    last = spans[-1]
    if len(spans) > 1 and last.phase == "forward" and _is_short(last, width) and not last.first <= peak <= last.last:
        spans[-2:] = [spans[-2]._replace(last=last.last)]
    return spans


def _joined(spans: Iterable[PhaseSpan]) -> list[PhaseSpan]:
    """Neighbors of one phase as one span."""
    joined: list[PhaseSpan] = []
    for span in spans:
        if joined and joined[-1].phase == span.phase:
            joined[-1] = joined[-1]._replace(last=span.last)
        else:
            joined.append(span)
    return joined


def _is_short(span: PhaseSpan, width: int) -> bool:
    return 15 * (span.last - span.first + 1) < width


def _least_span(spans: Sequence[PhaseSpan], columns: Sequence[Phase], peak: int) -> int | None:
    """The shortest span that may be left out, by its index; of several the one of the phase with most columns."""
    num_columns, num_spans = Counter(columns), Counter(span.phase for span in spans)

    def may_be_left_out(n: int) -> bool:
        span = spans[n]
        is_last_of_phase = num_spans[span.phase] == 1 and 15 * num_columns[span.phase] >= len(columns)
        is_between = spans[n - 1].phase == spans[n + 1].phase
        return (
            is_between
            and _is_short(span, len(columns))
            and not is_last_of_phase
            and not span.first <= peak <= span.last
        )

    length_of = lambda n: (spans[n].last - spans[n].first, -num_columns[spans[n].phase])
    return min(filter(may_be_left_out, range(1, len(spans) - 1)), key=length_of, default=None)


class BandStack(NamedTuple):
    """Bytes by band at sampled steps.

    Attributes:
        bands: their names; the first is drawn at the bottom.
        num_bytes: int64[len(bands), len(steps)].
        steps: indices into ``AdvisedTimeline.steps``.
    """

    bands: tuple[str, ...]
    num_bytes: np.ndarray
    steps: np.ndarray


def choose_bands(profiles: Sequence[AdvisedTimeline]) -> tuple[str, ...]:
    """States, arguments and outputs, then the owners with most bytes at a peak, one for each color, then `OTHERS`.

    Owners that never reach a hundredth of the highest peak would not be visible.
    """
    largest: dict[str, tuple[int, int]] = {}
    for profile in profiles:
        for name, series in bytes_by(profile, band).items():
            size = (int(series[profile.peak_step]), int(series.max()))
            largest[name] = max(size, largest.get(name, (0, 0)))
    highest = max((p.peak_bytes for p in profiles), default=0)
    visible = [name for name in largest.keys() - GRAYS.keys() if 100 * largest[name][1] >= highest]
    owners = sorted(visible, key=lambda name: (*(-n for n in largest[name]), name))[: len(PALETTE)]
    bands = [*(name for name in GRAYS if name in largest), *owners]
    return (*bands, OTHERS) if len(bands) < len(largest) else tuple(bands)


def stack(profile: AdvisedTimeline, bands: tuple[str, ...], width: int) -> BandStack:
    """The bytes of each band; owners without a band of their own belong to the last one."""
    steps = sample_steps(profile, width)
    num_bytes = np.zeros((len(bands), len(steps)), np.int64)
    for name, series in bytes_by(profile, band).items():
        num_bytes[bands.index(name) if name in bands else len(bands) - 1] += series[steps]
    return BandStack(bands, num_bytes, steps)


def band_colors(bands: Sequence[str]) -> list[str]:
    owners = [name for name in bands if name not in GRAYS and name != OTHERS]
    colors = GRAYS | dict(zip(owners, PALETTE, strict=False)) | {OTHERS: _OTHERS_COLOR}
    return [colors[name] for name in bands]


# -- SVG -------------------------------------------------------------------------------------------------------------

_WIDTH, _HEIGHT, _PHASE_HEIGHT, _COLUMNS = 640, 150, 16, 320


def svg(profile: AdvisedTimeline) -> str:
    """The timeline as an SVG element for a page, some 10 KB: bands with their names under the pointer, phases below."""
    layers = stack(profile, choose_bands([profile]), _COLUMNS)
    tops = np.cumsum(layers.num_bytes, axis=0)
    scale = _HEIGHT / max(int(tops.max(initial=0)), 1)
    bottoms = tops - layers.num_bytes
    peak = int(np.argmax(profile.timeline[layers.steps]))

    parts = []
    for name, color, low, high in zip(layers.bands, band_colors(layers.bands), bottoms, tops, strict=True):
        at_peak = format_bytes(int((high - low)[peak]))
        title = f"<title>{escape(name)}: {at_peak} at the peak</title>"
        parts.append(
            f'<path d="{_outline((low * scale).tolist(), (high * scale).tolist())}" fill="{color}">{title}</path>'
        )
    parts += _svg_phases(profile, len(layers.steps))

    x = _WIDTH * (peak + 0.5) / len(layers.steps)
    parts.append(f'<path d="M{x:.1f} 0V{_HEIGHT}" stroke="currentColor" stroke-dasharray="3 3"/>')
    label = f"timeline of {profile.name}: peak of {format_bytes(profile.peak_bytes)}"
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT + _PHASE_HEIGHT}" role="img" aria-label="{escape(label)}" '
        f'style="width:100%;max-width:{_WIDTH}px;height:auto;font:11px sans-serif">{"".join(parts)}</svg>'
        f"{_svg_legend(layers)}"
    )


def _outline(low: Sequence[float], high: Sequence[float]) -> str:
    """The path around a band, with a level for each column; columns of one level are one line."""
    edges = [f"{_WIDTH * n / len(low):.1f}" for n in range(len(low) + 1)]

    def levels(values: Sequence[float], order: Sequence[int]) -> str:
        return "".join(f"V{_HEIGHT - values[n]:.1f}H{edges[e]}" for n, e in _runs(values, order))

    forward, back = range(len(low)), range(len(low) - 1, -1, -1)
    return f"M0 {_HEIGHT - low[0]:.1f}{levels(high, forward)}{levels(low, back)}Z"


def _runs(values: Sequence[float], order: Sequence[int]) -> list[tuple[int, int]]:
    """The last column of each run of equal values, and the edge at which the run ends, in either direction."""
    is_forward = len(order) < 2 or order[0] < order[1]
    ends = [
        n for n, after in zip(order, [*order[1:], None], strict=True) if after is None or values[after] != values[n]
    ]
    return [(n, n + 1 if is_forward else n) for n in ends]


def _svg_phases(profile: AdvisedTimeline, num_columns: int) -> list[str]:
    parts = []
    for phase, first, last in phase_spans(profile, num_columns):
        x, width = _WIDTH * first / num_columns, _WIDTH * (last + 1 - first) / num_columns
        parts.append(
            f'<rect x="{x:.1f}" y="{_HEIGHT}" width="{width:.1f}" height="{_PHASE_HEIGHT}" '
            f'fill="{_PHASE_COLORS[phase]}" opacity="0.35"/>'
        )
        if width > 7 * len(phase):
            parts.append(f'<text x="{x + 4:.1f}" y="{_HEIGHT + 12}" fill="currentColor">{phase}</text>')
    return parts


def _svg_legend(layers: BandStack) -> str:
    items = " ".join(  # spaces, where the line may break
        f'<span style="margin-right:1em;white-space:nowrap"><span style="color:{color}">■</span> {escape(name)}</span>'
        for name, color in zip(layers.bands, band_colors(layers.bands), strict=True)
    )
    return f'<p style="margin:4px 0;font-size:90%">{items}</p>'
