"""fairscale 0.4.13: what is wrong in its tensor-parallel layers, and that the rest is right."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from released import CASES, WITHOUT_TPVERIFY, Recorder, assert_found, assert_holds, counted, shown_on_gloo, subjects_of

from tpverify.cli import main

SUBJECTS = subjects_of("fairscale")

FINDINGS = {
    "a strided gradient is all-reduced": (
        "Case('fairscale.column_parallel_linear', LinearConfig(seq=2, in_features=2, out_features=2, bias=False), "
        "world_size=2, layout='transposed')",
        "buffers",
        "non-contiguous tensor at a collective",
    ),
    "every other column is all-reduced": (
        "Case('fairscale.mappings', RegionConfig(hidden=2), world_size=2, layout='sliced')",
        "buffers",
        "non-contiguous tensor at a collective",
    ),
    "an expanded gradient is all-reduced": (
        "Case('fairscale.mappings', RegionConfig(seq=2), world_size=2, layout='expanded')",
        "execution",
        "more than one element of the written-to tensor",
    ),
    "padding_idx is taken within the shard": (
        "Case('fairscale.vocab_parallel_embedding', EmbeddingConfig(vocab=2, padding_idx=1), world_size=2)",
        "execution",
        "Padding_idx must be within num_embeddings",
    ),
    "ids of other ranks count in scale_grad_by_freq": (
        "Case('fairscale.vocab_parallel_embedding', EmbeddingConfig(seq=2, vocab=2, scale_grad_by_freq=True), world_size=2)",
        "parameter-gradient",
        "weight.grad",
    ),
    "the norm's order is scale_grad_by_freq": (
        "Case('fairscale.parallel_embedding', EmbeddingConfig(max_norm=0.5), world_size=1)",
        "forward",
        "output",
    ),
    "the loss overwrites the logits": (
        "Case('fairscale.vocab_parallel_cross_entropy', CrossEntropyConfig(reuse=True), world_size=1)",
        "forward",
        "output[1]",
    ),
    "the loss needs contiguous logits": (
        "Case('fairscale.vocab_parallel_cross_entropy', CrossEntropyConfig(seq=2, batch=2), world_size=1, layout='transposed')",
        "execution",
        "view size is not compatible",
    ),
}

ON_GLOO = {
    "a strided gradient is all-reduced": 0,  # the strides of all ranks agree: gloo adds what lies side by side in memory
    "every other column is all-reduced": "x.grad: expected [[[1.021579577725906, 1.1931636491238495]]], got [[[1.021579577725906, 0.0]]]",
    "an expanded gradient is all-reduced": 0,  # gloo goes on behind the one row that there is, and that row comes out right
    "padding_idx is taken within the shard": "Padding_idx must be within num_embeddings",
    "ids of other ranks count in scale_grad_by_freq": "weight.grad: expected [[1.0]], got [[0.5]]",
    "the norm's order is scale_grad_by_freq": "output: expected [[[-0.49999997",
    "the loss overwrites the logits": "output[1]: expected [[[-3.0, 3.0]]], got [[[-6.0, 0.0]]]",
    "the loss needs contiguous logits": "view size is not compatible",
}
"""What the scripts show on real processes: text, with exit code 1; or the exit code 0, where the numbers come out right by luck."""

CORRECT = "Case('fairscale.column_parallel_linear', LinearConfig(seq=2, in_features=2, out_features=4), world_size=2, calls='twice')"

RIGHT: dict[str, dict[str, Any]] = {
    "vocab_parallel_embedding": {"padding_idx": None, "scale_grad_by_freq": False, "max_norm": None},
    "parallel_embedding": {"max_norm": None},
    "vocab_parallel_cross_entropy": {"reuse": False},
}
"""By subject, what keeps it off the wrong paths."""


@pytest.mark.parametrize("finding", FINDINGS)
def test_what_is_wrong_is_found(finding: str) -> None:
    assert_found(*FINDINGS[finding])


@pytest.mark.parametrize("name", SUBJECTS)
def test_the_rest_holds(name: str, record_property: Recorder) -> None:
    counted(record_property, assert_holds(SUBJECTS[name], lambda config: RIGHT.get(name, {}), layouts=False), CASES)


@pytest.mark.parametrize("layer", ["column_parallel_linear", "row_parallel_linear"])
def test_its_collectives_are_those_of_the_layer_that_comes_with_tpverify(layer: str) -> None:
    done = CliRunner().invoke(main, ["ledger", f"fairscale.{layer}", layer, "--world-size", "3"])
    assert done.exit_code == 0, done.output
    assert done.output.count(" all_reduce ") == 3 and "same" in done.output.splitlines()[-2] and "other" not in done.output, done.output


@pytest.mark.parametrize("finding", FINDINGS)
def test_a_script_shows_it_on_gloo_without_tpverify(finding: str, tmp_path: Path) -> None:
    code, printed = shown_on_gloo(FINDINGS[finding][0], tmp_path)
    says = ON_GLOO[finding]
    assert code == (0 if says == 0 else 1), printed
    assert "<-- differs" not in printed if says == 0 else str(says) in printed, printed


def test_the_script_of_a_correct_case_exits_0(tmp_path: Path) -> None:
    code, printed = shown_on_gloo(CORRECT, tmp_path)
    assert code == 0 and printed.count(": expected ") == 2 * 6 and "differs" not in printed, printed


def test_a_script_that_imported_tpverify_would_fail() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_TPVERIFY + "import tpverify"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "tpverify" in done.stderr
