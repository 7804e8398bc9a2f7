"""Controls: constants and statistics over a dimension that the ranks hold in parts, of which each takes what belongs to its own part."""

from __future__ import annotations

from tpverify.mutants.catalogue.heads import HeadConstants, reference_with_constants
from tpverify.mutants.catalogue.losses import ClassWeights, reference_with_class_weights
from tpverify.mutants.catalogue.normalisation import QueryNorm, reference_with_query_norm
from tpverify.mutants.control import add_control
from tpverify.subjects.attention_subject import attention
from tpverify.subjects.cross_entropy_subject import vocab_parallel_cross_entropy

add_control(
    "head-constants",
    attention,
    layers=(HeadConstants,),
    reference=reference_with_constants,
    looks_like="a constant that differs between ranks, multiplied into an activation",
    because="each rank has the constants of its own heads, as ALiBi slopes are cut",
)

add_control(
    "query-norm-over-all-heads",
    attention,
    layers=(QueryNorm,),
    reference=reference_with_query_norm,
    communication=None,
    looks_like="a second all_reduce in forward and one more in backward, inside of a column-parallel layer",
    because="the norm is over the features of all heads, so its statistic is a sum over the ranks, and so is the gradient of it",
)

add_control(
    "class-weights",
    vocab_parallel_cross_entropy,
    layers=(ClassWeights,),
    reference=reference_with_class_weights,
    communication=None,
    looks_like="a loss whose token costs depend on the rank that owns the target",
    because="each token is multiplied by the weight of its target's class, which the rank that owns the class tells the others",
)
