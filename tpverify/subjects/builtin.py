"""The built-in subjects by name, smallest first."""

from __future__ import annotations

from tpverify.subjects.attention_subject import attention
from tpverify.subjects.block import transformer_block
from tpverify.subjects.cross_entropy_subject import vocab_parallel_cross_entropy
from tpverify.subjects.dtensor_attention import dtensor_attention
from tpverify.subjects.dtensor_embedding import dtensor_embedding
from tpverify.subjects.dtensor_linear import dtensor_linear
from tpverify.subjects.dtensor_llama import dtensor_llama
from tpverify.subjects.dtensor_loss import dtensor_loss
from tpverify.subjects.dtensor_mlp import dtensor_mlp
from tpverify.subjects.embedding import vocab_parallel_embedding
from tpverify.subjects.language_model_subjects import bert, gpt
from tpverify.subjects.linear_subjects import column_parallel_linear, row_parallel_linear
from tpverify.subjects.mlp import mlp, swiglu_mlp
from tpverify.subjects.subject import Subject
from tpverify.subjects.teaching_block import all_gather_attention_block

BUILTIN: dict[str, Subject] = {
    subject.name: subject
    for subject in (
        column_parallel_linear,
        row_parallel_linear,
        mlp,
        swiglu_mlp,
        attention,
        vocab_parallel_embedding,
        vocab_parallel_cross_entropy,
        transformer_block,
        gpt,
        bert,
        all_gather_attention_block,
        dtensor_linear,
        dtensor_mlp,
        dtensor_attention,
        dtensor_embedding,
        dtensor_loss,
        dtensor_llama,
    )
}
