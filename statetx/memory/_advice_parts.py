"""Changes that compute values in parts: of the batch, or of rows."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable

from ._advice_inputs import argument_of
from ._edits import ChangeCandidate, InParts, Untried
from .buffer import Buffer, Change, Gap, Timeline, freed_bytes, shape_of

_NUM_PARTS = 8  # of a value that is computed in parts
_LEAST_EXAMPLES = 4  # that a batch has


def rows(profile: Timeline) -> Iterable[ChangeCandidate]:
    """Propose, for programs without gradients, the function of the largest temporary value in parts of its rows."""
    if any(step.phase == "backward" for step in profile.steps):
        return
    temporary = [
        b for b in profile.alive(profile.peak_step) if b.kind in ("working memory", "recomputed") and b.readers
    ]
    for b in temporary[:1]:
        size = next(iter(shape_of(b.type)), 0)
        if (
            10 * b.num_bytes < profile.peak_bytes
            or size < _NUM_PARTS
            or size in _loop_lengths(profile)
            or b.stacked is not None
        ):
            continue
        alike = [x for x in profile.buffers if (x.type, x.kind, x.function) == (b.type, b.kind, b.function)]
        gaps = [Gap(x.start, x.end, x.num_bytes - x.num_bytes // _NUM_PARTS) for x in alike]
        where = b.function or b.owner
        condition = f"{where} computes each of the {size:,} entries along axis 0 of {b.type} independently"
        text = (
            f"If {condition}, compute them in {_NUM_PARTS} parts, as with statetx.map(..., "
            f"batch_size={-(-size // _NUM_PARTS)})."
        )
        change = Change("microbatch", where, text, condition=condition)
        untried = Untried("only you know whether its rows are independent")
        yield ChangeCandidate(change, frozenset(alike), freed_bytes(profile, gaps), untried)


def in_parts(profile: Timeline, num: int | None = None) -> Iterable[ChangeCandidate]:
    """Split the batch of a gradient into parts: of temporaries with an axis of examples, one part's are alive at a
    time.

    Args:
        num: the least number of parts; by default eight, or as many as there are examples.
    """
    if not any(step.phase == "backward" for step in profile.steps):
        return
    # A buffer without readers is working memory of a library, which does not grow with the batch.
    temporary = [b for b in profile.buffers if b.kind in ("residual", "recomputed", "working memory") and b.readers]
    shapes = {b: shape_of(b.type) for b in profile.buffers}
    leading = _leading_axes(profile)

    def scaling(size: int) -> list[Buffer]:
        # XLA merges the axis of examples with others: any multiple of it as the first axis counts.
        return [b for b in temporary if shapes[b] and (shapes[b][0] % size == 0 or size in shapes[b])]

    # An axis of weights that divides the batch finds the same buffers, and a few others: the largest axis that finds
    # nearly all is the batch.
    num_bytes = {size: sum(b.num_bytes for b in scaling(size)) for size in leading}
    size = max((n for n in leading if num_bytes[n] >= 0.9 * max(num_bytes.values())), default=0)
    buffers = scaling(size) if size else []
    if not buffers:
        return
    least = min(_NUM_PARTS, size) if num is None else num
    num = next((n for n in range(least, size + 1) if size % n == 0), 0)
    if not num:
        return
    gaps = [Gap(b.start, b.end, b.num_bytes - b.num_bytes // num) for b in buffers]
    where, how = (" on each device", ", interleave=True") if profile.num_devices > 1 else ("", "")
    names = ", ".join(leading[size])
    condition = f"axis 0 of {names} holds {size:,} independent examples{where} (not steps in time)"
    text = (
        f"If {condition}, split them into {num} parts: take the gradient of statetx.microbatch(loss, {num}, "
        f"argnums=...{how}), whose argnums= are the arguments of the loss with these examples."
    )
    change, edit = (
        Change("microbatch", "batch", text, condition=condition),
        InParts(frozenset(leading[size]), size, num, bool(how)),
    )
    yield ChangeCandidate(change, frozenset(buffers), freed_bytes(profile, gaps), edit)


def _leading_axes(profile: Timeline) -> dict[int, list[str]]:
    """The arguments by the size of their first axis, if that may be an axis of examples.

    An axis as long as a loop is probably a scan's: time, or layers. An argument with a gradient or an update of its
    type is probably a parameter.
    """
    arguments = [b for b in profile.buffers if b.kind == "argument"]
    is_update = lambda b: b.kind == "output" and b.phase != "forward" and not profile.gradient
    updates = Counter(b.type for b in profile.buffers if is_update(b))
    inputs = Counter(b.type for b in profile.buffers if b.kind in ("argument", "state"))

    # Of a type with fewer updates than inputs, the parameters are in arguments that have other updated arrays.
    updated = {argument_of(b.owner) for b in arguments if 0 < inputs[b.type] <= updates[b.type]}
    unupdated = {b for b in arguments if updates[b.type] and argument_of(b.owner) not in updated}
    num_unupdated = Counter(b.type for b in unupdated)
    is_unupdated = lambda b: b in unupdated and num_unupdated[b.type] == inputs[b.type] - updates[b.type]

    loops = _loop_lengths(profile)
    leading: dict[int, list[str]] = defaultdict(list)
    for b in arguments:
        size = next(iter(shape_of(b.type)), 0)
        is_key = b.type.startswith("u32") and len(shape_of(b.type)) == 1  # of random numbers, perhaps
        is_batch = size >= _LEAST_EXAMPLES and size not in loops and not is_key
        if (not updates[b.type] or is_unupdated(b)) and is_batch:
            name = argument_of(b.owner)
            leading[size] += [name] if name not in leading[size] else []
    return leading


def _loop_lengths(profile: Timeline) -> set[int | None]:
    return {step.loop.length for step in profile.steps if step.loop is not None}
