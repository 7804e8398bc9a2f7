"""In float32, bfloat16 and float16 a TP run may be no further from the truth than the single device's own roundings allow, and no less."""

from __future__ import annotations

import planted_layers as bugs
import pytest

import tpverify as tpv
from gpu_suite.conftest import Rows
from gpu_suite.places import Place
from gpu_suite.showing import PAIR, missed
from tpverify.verification import builtin_subjects

DTYPES = ("float32", "bfloat16", "float16")
SUBJECTS = (
    "column_parallel_linear",
    "row_parallel_linear",
    "swiglu_mlp",
    "attention",
    "vocab_parallel_embedding",
    "gpt",
    "bert",
    "dtensor_mlp",
)
IN_TINY = ("row_parallel_linear", "attention")
BUGS = {
    "forward": bugs.bias_before_reduction,
    "input-gradient": bugs.input_gradient_not_reduced,
    "parameter-gradient": bugs.reduced_both_ways,
    "vocabulary": bugs.mask_forgotten,
}
"""By the check that must find it."""


@pytest.mark.row("low precision")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name in IN_TINY else pytest.mark.full) for name in SUBJECTS])
def test_all_checks_hold(name: str, dtype: str, rows: Rows) -> None:
    rows.verify(builtin_subjects()[name], dtypes=(dtype,))


@pytest.mark.row("low precision")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("check", "subject"),
    [pytest.param(check, subject, marks=[] if check == "forward" else pytest.mark.full, id=check) for check, subject in BUGS.items()],
)
def test_a_bug_is_not_lost_among_roundings(check: str, subject: tpv.Subject, dtype: str, place: Place, rows: Rows) -> None:
    rows.need_several()
    lost = missed(subject, {check}, place, dtype)
    rows.add(sizes=PAIR, cases=1, planted=1, caught=not lost)
    assert not lost
