"""Diagnoses of `memory_report`: why a policy saves no memory, what to rematerialize."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterator, Sequence
from typing import Any

from .._equations.compiled import Cost
from .._lift.wrapper import short_name
from .._remat.atoms import names_of
from .._remat.override import VisitedRegion
from .._targets import current
from .._text import format_bytes
from ..kinds.linen import flax_remat, module_with_method
from .table import Residual, Residuals

BASELINE = "no remat"
_SAME = 0.05  # a smaller relative reduction of memory counts as none

# XLA merged the recomputation if the compiled program adds less than this part of the operations that the equations
# add, both relative to the baseline. Not 1, since the counts differ: XLA's is taken after its simplifications, and has
# the body of a loop once.
_RECOMPUTED = 0.8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured(Cost):
    """A function and its derivative, compiled under one policy; a `Cost`, and

    Attributes:
        policy: its name; "no remat" for the baseline without rematerialization, "as written" for each function's own
            policy.
        residuals: the residuals before compilation.
    """

    policy: str
    residuals: Residuals

    @property
    def residual_bytes(self) -> int:
        return self.residuals.total_bytes

    def __str__(self) -> str:
        return f"{self.policy}: {super().__str__()}; {format_bytes(self.residual_bytes)} of residuals"


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """The reason why a policy does not save the expected memory.

    Attributes:
        policy: the policy's name.
        category: "nothing is rematerialized", "nothing to drop", "inputs dominate", "policy keeps it", "merged back",
            "barrier ignored", "peak elsewhere", "no residual" or "unmatched".
        text: the finding, and the advice.
    """

    policy: str
    category: str
    text: str

    def __str__(self) -> str:
        return f"{self.policy}: {self.category}. {self.text}"


def not_wrapped(name: str, residuals: Residuals, is_step: bool) -> Diagnosis:
    """Name, of a program without any remat, the blocks (modules with states), or else the function, whose values take
    most of the memory.
    """
    # Blocks of a list are counted together: `layers.0.attn` and `layers.1.attn` are two of `layers.*.attn`.
    sizes: dict[str, int] = {}
    modules: dict[str, set[str]] = {}
    for row in residuals:
        blocks = row.module.split(", ")
        if blocks == [""] or not row.primitive:  # computed from no state, or not computed at all
            continue
        for block in blocks:
            family = re.sub(r"\.\d+(?=\.|$)", ".*", block)
            sizes[family] = sizes.get(family, 0) + row.nbytes // len(blocks)
            modules.setdefault(family, set()).add(block)
    largest = sorted(sizes, key=lambda family: (-sizes[family], family))[:3]
    listed = ", ".join(
        f"{f} ({format_bytes(sizes[f])}{f' in {len(modules[f])} blocks' * (len(modules[f]) > 1)})" for f in largest
    )
    computed = [row for row in residuals if row.primitive]
    half = sum(row.nbytes for row in computed) / 2
    how = "Put @statetx.remat on the methods of its repeated blocks"
    if sum(row.nbytes for row in computed if row.times > 1) > half:
        how = (
            "Make its loop with statetx.scan or statetx.map, and checkpoint='auto'; or put @statetx.remat on what a "
            "step of it runs"
        )
    if sum(sizes[family] for family in largest) < half:
        by_function = Residuals(name, computed).by("function")
        listed = ", ".join(f"{f} ({format_bytes(n)})" for f, n in list(by_function.items())[:1] if f and n >= half)
        if linen := _linen_module(computed):
            how = f"Make its repeated blocks with {flax_remat(linen)}"
    where = f" Most is kept by {listed}." if listed else ""
    as_whole = (
        f" Below the first row, {name} is rematerialized as a whole, and its recomputation needs all of its memory "
        f"at once."
    )
    return Diagnosis(
        BASELINE,
        "nothing is rematerialized",
        f"No function in {name} is rematerialized. {how}.{where}{'' if is_step else as_whole}",
    )


def _linen_module(residuals: Sequence[Residual]) -> str | None:
    """The class of flax.linen modules whose methods compute most of these residuals; None if none of them is of any."""
    find = functools.cache(module_with_method)
    sizes: dict[str, int] = {}
    for row in residuals:
        module = find(row.function, row.source.rpartition(":")[0])
        if module is not None:
            sizes[module] = sizes.get(module, 0) + row.nbytes
    return max(sizes, key=lambda module: sizes[module], default=None)


def diagnose(
    row: Measured, baseline: Measured, regions: Sequence[VisitedRegion], lowered: Any, baseline_lowered: Any
) -> Iterator[Diagnosis]:
    yield from _unmatched(row, regions)

    # If memory did not fall, look at the equations first, then at the compiled program.
    if row.temp_bytes < baseline.temp_bytes * (1 - _SAME):
        return
    dropped = baseline.residual_bytes - row.residual_bytes
    if dropped <= baseline.residual_bytes * _SAME:
        yield _nothing_dropped(row, baseline)
        return

    # If XLA merged the recomputation with the first computation, the compiled program does not have its operations. XLA
    # counts the body of a loop once, however often it runs.
    flops_ratio = row.flops / max(baseline.flops, 1)
    lacks_flops = False
    if row.compiled_flops is not None and baseline.compiled_flops is not None:
        lacks_flops = row.compiled_flops < baseline.compiled_flops * (1 + _RECOMPUTED * (flops_ratio - 1))
    text = lowered.as_text() if lacks_flops else ""
    if lacks_flops and "stablehlo.while" not in text:
        unfenced = sorted({r.name for r in regions if r.prevent_cse is False})
        if unfenced:
            yield Diagnosis(
                row.policy,
                "merged back",
                f"The equations recompute ({flops_ratio:.2f} times the operations), but the compiled program does not "
                "do all of it: common subexpressions were merged, since prevent_cse is False (or fence None) for "
                f"{', '.join(unfenced)}. Leave it at 'auto'.",
            )
            return
        if "optimization_barrier" in text and (barrier := _barrier(row, bool(regions), lowered, baseline_lowered)):
            yield Diagnosis(row.policy, "barrier ignored", barrier)
            return
    yield Diagnosis(
        row.policy,
        "peak elsewhere",
        f"The program keeps {format_bytes(dropped)} less and recomputes it, but its peak is as high: while a whole "
        "function is recomputed at once, or outside of the rematerialized functions. Rematerialize smaller parts, and "
        "the part that needs most.",
    )


def _nothing_dropped(row: Measured, baseline: Measured) -> Diagnosis:
    by_reason = row.residuals.by("reason")
    inputs, by_policy = by_reason.get("input", 0), by_reason.get("policy", 0)
    if by_policy > baseline.residuals.intermediate_bytes / 2:
        return Diagnosis(
            row.policy,
            "policy keeps it",
            f"The policy itself keeps {format_bytes(by_policy)}; without rematerialization "
            f"{format_bytes(baseline.residuals.intermediate_bytes)} of intermediate values are kept. Have it keep "
            f"less.",
        )

    intermediate = baseline.residuals.intermediate_bytes
    if intermediate > baseline.residual_bytes * _SAME and inputs > row.residual_bytes / 2:
        largest = max((r for r in row.residuals if r.reason == "input"), key=lambda r: r.nbytes)
        value = largest.path or ", ".join(largest.names) or largest.primitive
        return Diagnosis(
            row.policy,
            "inputs dominate",
            f"{format_bytes(inputs)} of {format_bytes(row.residual_bytes)} are inputs of rematerialized functions, the "
            f"largest {value} ({largest.type}, {format_bytes(largest.nbytes)}): as much as the functions would keep. "
            "Rematerialize larger functions, so that fewer values are inputs.",
        )

    return Diagnosis(
        row.policy,
        "nothing to drop",
        f"Without rematerialization {format_bytes(intermediate)} of intermediate values are kept, with it "
        f"{format_bytes(row.residuals.intermediate_bytes)}: the rematerialized functions compute nothing that the "
        "backward pass needs beyond what it holds anyway. Rematerialize another part; saved_residuals(fun, ...) shows "
        "what is kept where.",
    )


def _barrier(row: Measured, is_ours: bool, lowered: Any, baseline_lowered: Any) -> str | None:
    """The text about a barrier that the compiler removes, as on CPUs; None if the memory would not fall with it."""
    # Elsewhere barriers last (measured on GPUs), and operations are missing for another reason: XLA counts none in the
    # calls of cuBLAS and cuDNN.
    if current.platform() != "cpu":
        return None
    fix = (
        "Leave fence= at 'auto'" if is_ours else "Use statetx.remat in place of jax.checkpoint, whose fence holds there"
    )
    text = (
        f"The equations recompute and keep {format_bytes(row.residual_bytes)}, but the compiled program does not "
        f"recompute all of it: on the {current.platform()} backend the compiler removes the barrier that delays the "
        f"recomputation, so that unrolled code is merged with the first computation. {fix}, or put the repeated part "
        "into a loop (scan)"
    )
    # The removal can be switched off, which shows the memory that other devices would take.
    option = {"xla_disable_hlo_passes": "cse_barrier_expander"}
    temp, baseline = (x.compile(option).memory_analysis().temp_size_in_bytes for x in (lowered, baseline_lowered))
    if temp >= baseline * (1 - _SAME):
        return None
    return (
        f"{text}; with compiler_options={option} it is {format_bytes(temp)} against {format_bytes(baseline)} of "
        f"temporary memory."
    )


def _unmatched(row: Measured, regions: Sequence[VisitedRegion]) -> Iterator[Diagnosis]:
    for region in regions:
        for message in region.unmatched:
            yield Diagnosis(row.policy, "unmatched", f"In {short_name(region.name)} {message}")

    # A name that exists and is in the policy, but on no residual, is not a typing error: the backward pass does not
    # read the value.
    named_in_policy = {name for region in regions for name in names_of(region.policy)}
    defined = {name for region in regions for name in region.names}
    saved = {name for r in row.residuals for name in r.names}
    for name in sorted(named_in_policy & defined - saved):
        yield Diagnosis(
            row.policy,
            "no residual",
            f"The value {name!r} is computed, but the backward pass does not need it, so naming it in the policy "
            f"keeps nothing.",
        )
