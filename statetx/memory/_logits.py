"""Logits at the peak: results of a product that is far wider than its input, reduced by a maximum."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from .._jax import Jaxpr
from .._jax.equations import equations_in
from ._advice import AdvisedTimeline
from .buffer import shape_of

_WIDER = 6  # a hidden layer is up to four times as wide as its input
_LEAST_SHARE = 0.2  # of the peak


def num_words(body: Jaxpr, profile: AdvisedTimeline) -> tuple[int, int]:
    """The size of the vocabulary whose logits take a fifth of the peak or more, and the bytes that they take there;
    zeros if there is none.
    """
    eqns = [*equations_in(body)]
    maxima = {size for eqn in eqns for size in _maxima(eqn)}
    widths = {words: width for eqn in eqns for words, width in _wide_product(eqn) if words in maxima}
    sizes = dict.fromkeys(widths, 0)
    for group in profile.at_peak:
        if group.kind not in ("residual", "recomputed", "working memory"):
            continue
        for buffer in group.buffers:
            shape = shape_of(buffer.type)
            for words in widths.keys() & {*shape}:
                # The weights, and their gradient, have as many rows as the product has inputs.
                if math.prod(shape) // words > widths[words]:
                    sizes[words] += buffer.num_bytes
    words = max(sizes, key=lambda words: sizes[words], default=0)
    return (words, sizes[words]) if words and sizes[words] >= _LEAST_SHARE * profile.peak_bytes else (0, 0)


def _maxima(eqn: Any) -> Iterator[int]:
    """The sizes of the axes that it takes a maximum over, as a softmax does."""
    if eqn.primitive.name == "reduce_max":
        yield from (eqn.invars[0].aval.shape[axis] for axis in eqn.params["axes"])


def _wide_product(eqn: Any) -> Iterator[tuple[int, int]]:
    """The widths of its result and of its input, if it is a wide product; not one for each example, as in attention."""
    if eqn.primitive.name == "dot_general" and (shape := eqn.outvars[0].aval.shape):
        (contracted, _), (batch, _) = eqn.params["dimension_numbers"]
        width = math.prod(eqn.invars[0].aval.shape[axis] for axis in contracted)
        if not batch and shape[-1] >= _WIDER * width:
            yield shape[-1], width
