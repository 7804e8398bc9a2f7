"""Rank processes outlive a case, and its meshes must not: what DTensor has worked out on them names groups that are gone."""

from __future__ import annotations

import pytest

import tpverify as tpv
from tpverify.case import GROUPS, Case
from tpverify.subjects.dtensor_mlp import DTensorMLPConfig, dtensor_mlp


@pytest.mark.parametrize("order", [GROUPS, GROUPS[::-1]], ids=["one group first", "one group last"])
def test_meshes_of_one_case_do_not_reach_the_next(order: tuple[str, ...]) -> None:
    config = DTensorMLPConfig(hidden=3, ffn=2, bias=False, local_hidden=False, local_output=False)
    for groups in (*order, order[0]):
        assert tpv.check_case(dtensor_mlp, Case("dtensor_mlp", config, 2, groups=groups), world="gloo") == []
