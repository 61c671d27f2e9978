"""Logits at the peak: results of a product that is far wider than what goes into it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from .._jax import Jaxpr
from .._jax.equations import inner_jaxprs
from ._advice import AdvisedTimeline
from .buffer import shape_of

_WIDER = 6  # a hidden layer is up to four times as wide as its input
_LEAST_SHARE = 0.2  # of the peak


def num_words(body: Jaxpr, profile: AdvisedTimeline) -> tuple[int, int]:
    """The size of the vocabulary whose logits take a fifth of the peak or more, and the bytes that they take there;
    zeros if there is none.
    """
    widths = {words: width for words, width in _wide_products(body)}
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


def _wide_products(body: Jaxpr) -> Iterator[tuple[int, int]]:
    """The width of a result, and the width of what goes into the product."""
    eqns: list[Any] = body.eqns
    for eqn in eqns:
        if eqn.primitive.name == "dot_general" and (shape := eqn.outvars[0].aval.shape):
            (contracted, _), _ = eqn.params["dimension_numbers"]
            width = math.prod(eqn.invars[0].aval.shape[axis] for axis in contracted)
            if shape[-1] >= _WIDER * width:
                yield shape[-1], width
        for inner in inner_jaxprs(eqn):
            yield from _wide_products(inner)
