"""Move the consumers of a loop's stacked results into the loop, so that the stacks never exist.

Layers in a `scan` have a backward pass that ends in gradients of all layers, stacked. What follows often treats each
layer alone: the sum of gradients of a batch in parts, or the update of an optimizer. For such a row-by-row `f`,

    carry, ys = scan(step, carry, xs)
    outs = f(ys, others)                  and       carry, outs = scan(step + f, carry, (xs, others))

are equal: each row has the same operations in the same order. On the right one row of ys exists. A stack among `others`
that nothing reads later becomes a carry: each turn reads its rows, and overwrites them by rows of an output of the same
type.

The rewriting is for lowering. Its result is not differentiated any more, so calls with rules are inlined.
"""
