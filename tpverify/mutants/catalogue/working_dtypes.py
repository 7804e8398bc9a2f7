"""Planted bugs of the other files once more, in the dtypes that people train in: errors there stand beside rounding."""

from __future__ import annotations

from tpverify.mutants.catalogue import addends, cross_entropy, reductions, scales, sequence, shared_heads, tied, vocabulary
from tpverify.mutants.mutant import add_again

FILES = (addends, cross_entropy, reductions, scales, sequence, shared_heads, tied, vocabulary)
"""Where they are defined."""

IN_BFLOAT16 = {
    "loss-one-percent-too-high": "input-gradient",
    "output-one-percent-larger": "forward",
    "ids-last-of-shard-unowned": "vocabulary",
    "own-exponentials-only": "forward",
    "row-not-reduced": "forward",
    "row-averaged": "forward",
    "bias-before-reduction": "forward",
    "column-gradient-not-reduced": "input-gradient",
    "head-use-lost": "tied",
    "shared-heads-not-reduced": "parameter-gradient",
    "final-norm-not-flagged": "parameter-gradient",
    "last-rank-left-out": "forward",
}
"""By mutant, the check that must kill it."""

IN_FLOAT16 = ("output-one-percent-larger", "row-averaged", "own-exponentials-only", "bias-before-reduction")
IN_FLOAT32 = (
    "loss-one-percent-too-high",
    "gradient-one-percent-larger",
    "row-not-reduced",
    "bias-before-reduction",
    "final-norm-not-flagged",
)

for id, check in IN_BFLOAT16.items():
    add_again(id, "bfloat16", check)
for id in IN_FLOAT16:
    add_again(id, "float16")
for id in IN_FLOAT32:
    add_again(id, "float32")
